"""The pure parts of the comparison of peers: loads, order, ratios, command lines."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import dynamo
from benchmarks.environments import RealEngineError
from benchmarks.load import EndSignal, LoadResult, LoadSpec, TurnRecord, plan_program
from benchmarks.peer_arms import (
    AgentInferArm,
    DirectArm,
    OurArm,
    PluginArm,
    RouterArm,
    Setup,
    Target,
    find_arm,
    serve_words,
)
from benchmarks.peer_clients import (
    abench_figures,
    abench_words,
    aiperf_figures,
    aiperf_words,
    run_aiperf,
    write_sessions,
)
from benchmarks.peers import (
    LOADS,
    Cell,
    Run,
    _arguments,
    _spec,
    cells_of,
    command_of,
    figures,
    markdown,
    order,
    ratios,
)

MOCKERS = Setup("mocker", 1, 131_072)
CELL = Cell("h1", "whole", 1)


@pytest.mark.parametrize("name", LOADS)
def test_programs_of_a_load_depend_on_the_seed_alone(name: str) -> None:
    load, cell = LOADS[name], Cell(name, "whole", LOADS[name].engines_count)
    ours = _spec(load, cell, 3, Target("http://ours", end_signal=EndSignal.RELEASE, is_ours=True))
    theirs = _spec(load, cell, 3, Target("http://theirs", "X-Dynamo-Session-ID", EndSignal.FINAL_TURN))
    assert [plan_program(ours, index) for index in range(5)] == [plan_program(theirs, index) for index in range(5)]
    other = _spec(load, cell, 4, Target("http://ours"))
    assert plan_program(ours, 0).turns[0].prompt != plan_program(other, 0).turns[0].prompt


def test_a_target_says_how_programs_name_themselves_and_end() -> None:
    target = Target("http://theirs", "X-Dynamo-Session-ID", EndSignal.FINAL_TURN)
    spec = _spec(LOADS["h1"], CELL, 0, target)
    assert (spec.program_header, spec.end_signal) == ("X-Dynamo-Session-ID", EndSignal.FINAL_TURN)
    # A load that says no end says none to anybody.
    assert _spec(LOADS["h3-1"], Cell("h3-1", "whole", 2), 0, target).end_signal is EndSignal.NONE


def test_more_engines_get_more_programs() -> None:
    target = Target("http://any")
    assert _spec(LOADS["h1"], Cell("h1", "whole", 4), 0, target).programs == 96
    assert _spec(LOADS["h3-5"], Cell("h3-5", "whole", 4), 0, target).programs == 80
    assert _spec(LOADS["h1"], Cell("h1", "whole", 2, 8), 0, target).programs == 16


def test_tool_times_are_fixed_where_a_load_says_so() -> None:
    spec = LOADS["h3-5"].spec
    assert {turn.tool_s for turn in plan_program(spec, 0).turns} == {5.0}
    assert len({turn.tool_s for turn in plan_program(LOADS["h1"].spec, 0).turns}) > 1


def test_arms_take_turns_at_going_first_and_skip_engines_that_they_cannot_have() -> None:
    arms = [find_arm(name) for name in ("direct", "breakeven", "vllm-router-cache")]
    cells = [CELL, Cell("standard", "whole", 1)]
    made = [(number, cell.load, arm.name) for number, cell, arm in order(cells, arms, 2)]
    assert made == [
        (0, "h1", "direct"),
        (0, "h1", "breakeven"),
        (0, "standard", "direct"),
        (0, "standard", "breakeven"),
        (0, "standard", "vllm-router-cache"),
        (1, "h1", "breakeven"),
        (1, "h1", "direct"),
        (1, "standard", "breakeven"),
        (1, "standard", "vllm-router-cache"),
        (1, "standard", "direct"),
    ]


def test_ratios_pair_rounds_and_leave_out_those_that_failed() -> None:
    rates = {("a", 0): 110.0, ("b", 0): 100.0, ("a", 1): 120.0, ("b", 1): 100.0, ("a", 2): 500.0}
    runs = [Run(CELL, arm, number, number, {"turns_per_min": rate}) for (arm, number), rate in rates.items()]
    runs.append(Run(CELL, "b", 2, 2, error="did not start"))
    found = {(ratio.arm, ratio.other): ratio for ratio in ratios(runs)}
    ratio = found["a", "b"]
    assert ratio.pairs_count == 2
    assert ratio.mean == pytest.approx((1.1 * 1.2) ** 0.5)
    assert ratio.low < 1.1
    assert ratio.high > 1.2
    assert found["b", "a"].mean == pytest.approx(1 / ratio.mean)


def test_a_program_counts_when_its_last_turn_ended_in_the_window() -> None:
    spec = LoadSpec(turns=(2, 2))

    def turn(program: int, number: int, start_s: float, end_s: float) -> TurnRecord:
        return TurnRecord(program, number, start_s, None, end_s, 10, 0, 1, 200, 1)

    records = (turn(0, 0, 0.0, 1.0), turn(0, 1, 3.0, 12.0), turn(1, 0, 11.0, 14.0))
    assert figures(LoadResult(spec, 10.0, 20.0, records, 1, 0))["program_mean_s"] == 12.0
    assert figures(LoadResult(spec, 13.0, 20.0, records, 1, 0))["program_mean_s"] is None


def test_our_proxy_is_told_the_pool_of_engines_that_do_not_tell_it() -> None:
    words = serve_words("breakeven:hold_ratio=0", Setup("mocker", 1, 1000, told_ratio=2.0), ["http://a", "http://b"])
    assert words[:7] == ["serve", "--port", "0", "--policy", "breakeven", "--policy-arg", "hold_ratio=0"]
    assert words[words.index("--backends") + 1] == "http://a,http://b"
    assert words[words.index("--capacity-tokens") + 1] == "2000"
    assert "--capacity-tokens" not in serve_words("breakeven", Setup("vllm", 1, 1000), ["http://a"])
    assert "--embedded-engines" in serve_words("breakeven", Setup("embedded", 2, 1000), [])


def test_names_find_peers_and_else_policies_of_ours() -> None:
    kinds = {"direct": DirectArm, "smg": RouterArm, "agentinfer": AgentInferArm, "thunderagent-ports": OurArm}
    assert {name: type(find_arm(name)) for name in kinds} == kinds


def test_our_scheduler_is_in_vllm_alone_or_behind_our_proxy() -> None:
    assert isinstance(find_arm("plugin"), PluginArm)
    both = find_arm("breakeven:high_ratio=1.1+plugin")
    assert isinstance(both, OurArm)
    assert both.kinds == find_arm("plugin").kinds == {"vllm"}
    assert both.name == "breakeven:high_ratio=1.1+plugin"


def test_command_lines_of_peers_are_built() -> None:
    words = dynamo.mocker_words(dynamo.MockerConfig(kv_tokens=16_000), "/model", "name")
    assert words[words.index("--num-gpu-blocks-override") + 1] == "500"
    router = find_arm("vllm-router-program")
    assert isinstance(router, RouterArm)
    words = router.words(["http://a", "http://b"], 1, 2)
    assert words[words.index("--worker-urls") + 1 : words.index("--host")] == ["http://a", "http://b"]
    assert "--enable-program-scheduling" in words
    assert dynamo.frontend_words(5, dynamo.Router.KV)[-2:] == ["--router-mode", "kv"]


def test_abench_gets_the_shape_of_the_load_and_gives_its_steady_figures() -> None:
    spec = LOADS["abench"].spec
    words = abench_words(spec, "http://a", 60.0, "/tokenizer", "/result")
    assert words[words.index("--max-concurrency") + 1] == "24"
    assert words[words.index("--gap-policy") + 1] == "exponential:2000"
    assert "--disable-stream" not in words
    times = {"p50_ms": 500.0, "p99_ms": 900.0}
    found = abench_figures(
        {
            "steady_window_s": 30.0,
            "steady_turns": 60,
            "total_turns": 70,
            "successful_turns": 69,
            "prefix_cache_ratio": 0.5,
            "mean_trajectory_time_s": 12.0,
            "e2e_overall": times,
            "t2plus_ttft": {"p50_ms": 0.0},
        }
    )
    assert (found["turns_per_min"], found["failed_turn_count"], found["first_token_p50_s"]) == (120.0, 1, None)


def test_recorded_programs_become_sessions_in_which_what_was_cached_has_the_same_blocks(tmp_path: Path) -> None:
    turns = [
        [0, 640, 50, 0, 2.0, 3.0, "tool_use"],
        [5, 800, 50, 640, None, 1.0, "unknown"],
        [3600, 200, 0, 128, 1.0, None, "end_turn"],
    ]
    rows = [
        {"id": "few", "turns": turns},
        {"id": "part", "parent": "whole", "turns": turns * 2},
        {"id": "whole", "turns": turns * 2},
        {"id": "large", "turns": [*turns * 2, [20, 99_990, 11, 0, 1.0, None, "end_turn"]]},
    ]
    traces = tmp_path / "traces.jsonl.gz"
    traces.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (folder := tmp_path / "sessions").mkdir()
    assert write_sessions(traces, folder) == 1
    (path,) = folder.iterdir()
    session = json.loads(path.read_text())
    first, second, third, again, *_ = session["requests"]
    assert (session["id"], session["block_size"], session["hash_id_scope"]) == ("whole", 64, "local")
    assert second["hash_ids"] == [*first["hash_ids"], 10, 11]
    assert third["hash_ids"] == [*first["hash_ids"][:2], 12]
    assert (third["out"], second["stop"], second["api_time"]) == (1, "", None)
    assert [each["t"] for each in (first, second, third, again)] == [0, 5, 65, 65]
    assert not set(again["hash_ids"]) & {*first["hash_ids"], *second["hash_ids"], *third["hash_ids"]}


def test_what_was_cached_of_an_answer_is_no_block_that_a_prompt_had(tmp_path: Path) -> None:
    turns = [[0, 640, 300, 0, 1.0, 1.0, "tool_use"], [3, 1280, 1, 900, 1.0, 1.0, "tool_use"]] * 3
    (traces := tmp_path / "traces.jsonl").write_text(json.dumps({"id": "a", "turns": turns}))
    (folder := tmp_path / "sessions").mkdir()
    write_sessions(traces, folder)
    first, second, *_ = json.loads((folder / "000.json").read_text())["requests"]
    assert second["hash_ids"][:10] == first["hash_ids"]
    assert len(set(second["hash_ids"])) == 20


@pytest.mark.parametrize(
    "text", ["", "{}", "no json", '{"id": "a", "turns": [[1, 2]]}', '{"turns": [1, 2, 3, 4, 5, 6]}']
)
def test_a_file_without_recorded_programs_is_named_but_not_its_folder(text: str, tmp_path: Path) -> None:
    (traces := tmp_path / "traces.jsonl").write_text(text)
    with pytest.raises(RealEngineError, match=r"^traces\.jsonl: no "):
        write_sessions(traces, tmp_path)
    with pytest.raises(RealEngineError, match=r"^gone\.jsonl: no "):
        write_sessions(tmp_path / "gone.jsonl", tmp_path)


def test_a_result_has_no_folders_of_this_machine() -> None:
    words = ["--traces", "/home/me/traces.jsonl", "--code", "/home/me/code", "--loads", "h1,h2"]
    assert command_of(words) == "scripts/bench peers --traces traces.jsonl --code code --loads h1,h2"
    assert command_of(["--traces=/home/me/traces.jsonl"]).endswith("peers --traces=traces.jsonl")


def test_aiperf_gets_the_scenario_and_names_programs_as_the_arm_reads_them() -> None:
    """Recorded programs of one's own are no corpus that the scenario names: it must be told to take them."""
    spec = replace(LOADS["aiperf"].spec, program_header="X-Session-ID")
    words = aiperf_words(spec, "http://a", 900.0, "/tokenizer", "/sessions", "/out")
    assert words[words.index("--scenario") + 1] == "inferencex-agentx-mvp"
    assert words[words.index("--session-header") + 1] == "X-Session-ID"
    assert words[words.index("--concurrency") + 1] == "24"
    assert "--unsafe-override" in words


def test_aiperf_figures_have_our_names() -> None:
    found = aiperf_figures(
        {
            "benchmark_duration": {"avg": 30.0},
            "request_count": {"avg": 60.0},
            "overall_usage_prompt_cache_read_pct": {"avg": 80.0},
            "request_latency": {"avg": 1500.0, "p50": 1000.0, "p99": 4000.0},
            "error_request_count": {"avg": 2.0},
        }
    )
    assert (found["turns_per_min"], found["hit_ratio"], found["failed_turn_count"]) == (120.0, 0.8, 2)
    assert (found["latency_p50_s"], found["latency_p99_s"], found["first_token_p50_s"]) == (1.0, 4.0, None)


@pytest.mark.parametrize(("stream", "missing"), [(True, "--traces"), (False, "--answers streamed")])
async def test_aiperf_says_what_it_lacks(stream: bool, missing: str, tmp_path: Path) -> None:
    spec = replace(LOADS["aiperf"].spec, stream=stream)
    with pytest.raises(RealEngineError, match=missing):
        await run_aiperf(spec, "http://a", 60.0, None if stream else tmp_path / "traces.jsonl")


def test_options_name_cells_and_unknown_loads_are_refused() -> None:
    found = cells_of(_arguments(["--loads", "h1,h3-1", "--answers", "whole", "--engines", "1,2"]))
    assert [str(cell) for cell in found] == ["h1 whole 1", "h1 whole 2", "h3-1 whole 1", "h3-1 whole 2"]
    found = cells_of(_arguments(["--loads", "standard", "--answers", "whole", "--programs", "8,16"]))
    assert [str(cell) for cell in found] == ["standard whole 1 of 8", "standard whole 1 of 16"]
    assert cells_of(_arguments(["--loads", "h3-1", "--answers", "streamed"])) == [Cell("h3-1", "streamed", 2)]
    with pytest.raises(SystemExit, match="h9"):
        cells_of(_arguments(["--loads", "h9"]))
    replayed = ["--loads", "aiperf", "--traces", "traces.jsonl"]
    assert cells_of(_arguments([*replayed, "--answers", "streamed"])) == [Cell("aiperf", "streamed", 1)]
    for lacking in (replayed, ["--loads", "aiperf", "--answers", "streamed"]):
        with pytest.raises(SystemExit, match="--traces and --answers streamed"):
            cells_of(_arguments(lacking))


def test_the_page_gets_a_row_for_each_cell_and_arm_with_ratios_to_the_first() -> None:
    rates = {("direct", 0): 100.0, ("direct", 1): 100.0, ("breakeven", 0): 110.0, ("breakeven", 1): 110.0}
    runs = [Run(CELL, arm, number, number, {"turns_per_min": rate}) for (arm, number), rate in rates.items()]
    runs.append(Run(CELL, "agentinfer", 0, 0, error="has no router\nand more"))
    assert markdown(runs).splitlines()[2:] == [
        "| h1 whole 1 | `direct` | 2 | 100.0 | 1 | - | - | |",
        "| h1 whole 1 | `breakeven` | 2 | 110.0 | 1.10 (1.10, 1.10) | - | - | |",
        "| h1 whole 1 | `agentinfer` | 0 | - | - | - | - | has no router |",
    ]
