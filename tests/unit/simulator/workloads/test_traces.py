"""Recordings of three kinds become plans; errors name what does not parse or fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from thunderagent.errors import TraceError
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.formats import FORMATS, load_mooncake, load_recorded, load_weka
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan
from thunderagent.simulator.workloads.traces import Limits, Trace, TraceWorkload


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Time, input, output and hit tokens, seconds of the answer and after it, and why it stopped.
FIRST = [0, 1000, 100, 0, 5.0, 2.0, "tool_use"]
SECOND = [7, 1300, 50, 960, 4.0, 600.0, "end_turn"]
THIRD = [611, 1400, 0, 1280, None, None, "unknown"]


def test_our_own_format_becomes_what_is_appended(tmp_path: Path) -> None:
    """New tokens are those of the prompt beyond the context; the gap is the tool's time, `stop` its name."""
    path = jsonl(tmp_path / "day.jsonl", {"id": "a", "turns": [FIRST, SECOND, THIRD]})
    turns = (TurnPlan(1000, 100, 2.0, "tool"), TurnPlan(200, 50, 600.0, "person"), TurnPlan(50, 1, 0.0, "unknown"))
    assert load_recorded(path).programs == (ProgramPlan("a", turns),)
    assert load_recorded(path) == FORMATS["recorded"](path, None)


def test_a_compressed_file_is_read_too(tmp_path: Path) -> None:
    """Its name ends in `.gz`; blank lines are ignored."""
    path = tmp_path / "day.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"id": "a", "turns": [FIRST]}).encode() + b"\n\n"))
    assert len(load_recorded(path).programs) == 1


def test_programs_of_a_group_share_their_first_tokens(tmp_path: Path) -> None:
    """Shared tokens are not new; a first prompt that is shorter than them shares something else."""
    rows = [
        {"id": name, "prefix_group": 7, "shared_prefix_tokens": 640, "turns": [[0, tokens, 10, 0, 1.0, None, "x"]]}
        for name, tokens in (("a", 1000), ("b", 700), ("c", 640))
    ]
    a, b, c = load_recorded(jsonl(tmp_path / "day.jsonl", *rows)).programs
    assert (a.shared_prefix_id, a.shared_prefix_tokens) == (b.shared_prefix_id, b.shared_prefix_tokens)
    assert [program.turns[0].new_tokens for program in (a, b, c)] == [360, 60, 640]
    assert (c.shared_prefix_id, c.shared_prefix_tokens) == ("", 0)


def test_a_prompt_that_shrank_a_little_is_made_up_for(tmp_path: Path) -> None:
    """Thinking was dropped from the history: the replay is ahead until the next results outgrow it."""
    turns = [[0, 1000, 500, 0, 1, 1, "x"], [2, 1100, 10, 960, 1, 1, "x"], [4, 2000, 10, 1088, 1, None, "x"]]
    (program,) = load_recorded(jsonl(tmp_path / "day.jsonl", {"id": "a", "turns": turns})).programs
    assert [turn.new_tokens for turn in program.turns] == [1000, 1, 2000 - 1511]


def test_a_context_that_was_compacted_begins_a_new_program(tmp_path: Path) -> None:
    """A turn that reuses less than half of the last prompt has a new context: a plan can only append."""
    row = {"id": "a", "start_s": 5.0, "turns": [FIRST, [7, 500, 10, 448, 1.0, None, "x"]]}
    trace = load_recorded(jsonl(tmp_path / "day.jsonl", row))
    assert [(program.program_id, program.arrival_s) for program in trace.programs] == [("a", 5.0), ("a+1", 7.0)]
    assert trace.reset_count == 1


def test_an_id_that_is_there_again_is_another_program(tmp_path: Path) -> None:
    """Two recordings in one file may have the same ids, and names that were made of them."""
    compacted = [7, 500, 10, 448, 1.0, None, "x"]
    rows = [{"id": name, "turns": turns} for name in ("a", "a#2") for turns in ([FIRST, compacted], [FIRST])]
    trace = load_recorded(jsonl(tmp_path / "day.jsonl", *rows, rows[0]))
    assert [program.program_id for program in trace.programs] == [
        "a",
        "a+1",
        "a#2",
        "a#2#2",
        "a#2+1",
        "a#2#3",
        "a#3",
        "a+1#2",
    ]
    scenario = Scenario(EngineConfig(kv_tokens=16_000, timing=profile("demo")), programs_count=8, horizon_s=1000)
    assert simulate(scenario, TraceWorkload("day", trace), Passthrough()).program_count >= 8


def test_contexts_over_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    """A program ends before the first turn that does not fit; one that never fits is gone; long absences are cut."""
    long = {"id": "b", "turns": [[0, 5000, 10, 0, 1.0, None, "x"]]}
    path = jsonl(tmp_path / "day.jsonl", {"id": "a", "turns": [FIRST, SECOND, THIRD]}, long)
    trace = load_recorded(path, Limits(context_tokens=1350, away_s=60.0))
    assert [len(program.turns) for program in trace.programs] == [2]
    assert trace.programs[0].turns[-1].tool_s == 60.0
    assert (trace.dropped_turns_count, trace.dropped_programs_count, trace.shortened_count) == (2, 1, 1)
    assert str(trace) == (
        "1 programs, 2 turns; over the context limit: 2 turns dropped, 1 programs with all of theirs; "
        "0 context resets, 1 absences shortened"
    )


@pytest.mark.parametrize("loader", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"id": 1, "turns": []}', '{"input_length": -1}', "\udcff"])
def test_a_line_that_does_not_parse_is_named(loader: object, line: str, tmp_path: Path) -> None:
    """The error has file and line, for cut-off lines, wrong fields and bytes that are not text."""
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(TraceError, match=r"day\.jsonl: line 2: "):
        loader(path)  # type: ignore[operator]


def test_a_wrong_value_is_named_with_its_place(tmp_path: Path) -> None:
    """The error has the turn and the field."""
    path = jsonl(tmp_path / "day.jsonl", {"id": "a", "turns": [FIRST, [7, -5, 50, 0, 4.0, 1.0, "x"]]})
    with pytest.raises(TraceError, match=r"line 1: .*turns\[1\]\[1\]"):
        load_recorded(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Cases are a missing file, and one with a compressed name that is not compressed."""
    with pytest.raises(TraceError, match=r"none\.jsonl: line 1: cannot be read"):
        load_recorded(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match=r"day\.gz: line 1: cannot be read"):
        load_recorded(jsonl(tmp_path / "day.gz", {}))


def test_mooncake_requests_are_joined_by_their_blocks(tmp_path: Path) -> None:
    """A request that begins with all full blocks of an earlier one is its next turn; others share common blocks."""
    path = jsonl(
        tmp_path / "mooncake.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 700, "output_length": 10, "hash_ids": [1, 9]},
        {"timestamp": 4500, "input_length": 1700, "output_length": 26, "hash_ids": [1, 2, 4, 5]},
    )
    first, second = load_mooncake(path).programs
    assert first.turns == (TurnPlan(588, 52, 4.5, "unknown"), TurnPlan(548, 26, 0.0, "unknown"))
    assert second.turns == (TurnPlan(188, 10, 0.0, "unknown"),)
    assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)
    assert first.shared_prefix_id == second.shared_prefix_id != ""
    assert first.shared_prefix_tokens == second.shared_prefix_tokens == 512


def test_aiperf_rows_of_one_session_append(tmp_path: Path) -> None:
    """Named programs go by their rows: a row waits for its `delay`, or for its timestamp."""
    path = jsonl(
        tmp_path / "aiperf.jsonl",
        {"session_id": "s", "timestamp": 1000, "input_length": 100, "output_length": 40},
        {"session_id": "t", "timestamp": 1500, "input_length": 70, "output_length": 4},
        {"session_id": "s", "delay": 2500, "input_length": 30, "output_length": 20},
        {"session_id": "t", "timestamp": 2000, "input_length": 7},
    )
    s, t = load_mooncake(path).programs
    assert s == ProgramPlan("s", (TurnPlan(100, 40, 2.5, "unknown"), TurnPlan(30, 20, 0.0, "unknown")), arrival_s=1.0)
    assert t.turns == (TurnPlan(70, 4, 0.5, "unknown"), TurnPlan(7, 1, 0.0, "unknown"))


def test_weka_conversations_become_programs(tmp_path: Path) -> None:
    """Think time is given, or is the gap less the answer; a repeated request counts once; a sub-agent is a program."""
    call = {"model": "m", "input_types": ["text"]}
    blocks = list(range(16))
    path = jsonl(
        tmp_path / "weka.jsonl",
        {
            "id": "trace_1",
            "block_size": 64,
            "tool_tokens": 128,
            "system_tokens": 64,
            "requests": [
                {**call, "t": 0.0, "type": "s", "in": 1024, "out": 99, "hash_ids": blocks, "stop": ""},
                {**call, "t": 4.0, "type": "n", "in": 1024, "out": 100, "hash_ids": blocks, "stop": "tool_use"},
                {
                    "t": 5.0,
                    "type": "subagent",
                    "agent_id": "sub",
                    "requests": [{**call, "t": 1, "type": "n", "in": 300, "out": 9}],
                },
                {**call, "t": 10.0, "type": "s", "in": 1200, "out": 10, "hash_ids": [*blocks, 17], "think_time": 1.5},
                {**call, "t": 20.0, "type": "n", "in": 400, "out": 10, "hash_ids": [0, 1, 2, 30], "stop": "end_turn"},
            ],
        },
    )
    trace = load_weka(path)
    main, later, sub = trace.programs
    assert main.turns == (TurnPlan(832, 100, 1.5, "tool"), TurnPlan(76, 10, 10.0, "unknown"))
    assert later == ProgramPlan("trace_1+1", (TurnPlan(208, 10, 0.0, "person"),), "tools-128-system-64", 192)
    assert (sub.program_id, sub.turns) == ("trace_1.sub", (TurnPlan(300, 9, 0.0, "unknown"),))
    assert trace.reset_count == 1


def test_a_trace_is_replayed_whole_before_again() -> None:
    """Each program comes once a round, in an order that the seed gives, under its own id."""
    trace = Trace(tuple(ProgramPlan(name, (TurnPlan(1, 1, 0.0),)) for name in "abcdef"))
    workload = TraceWorkload("day", trace)
    rounds = [[workload.program(index + start, 3).program_id for index in range(6)] for start in (0, 6)]
    assert sorted(rounds[0]) == list("abcdef")
    assert rounds[1] == [f"{name}~1" for name in rounds[0]]
    assert rounds[0] != [workload.program(index, 4).program_id for index in range(6)]


def test_recorded_arrivals_keep_their_order_and_go_on_in_the_next_round() -> None:
    """The second round begins one mean gap after the last arrival of the first."""
    plans = tuple(ProgramPlan(name, (TurnPlan(1, 1, 0.0),), arrival_s=at_s) for name, at_s in (("b", 9.0), ("a", 0.0)))
    workload = TraceWorkload("day", Trace(plans))
    replayed = [workload.program(index, 0) for index in range(4)]
    assert [(plan.program_id, plan.arrival_s) for plan in replayed] == [
        ("a", 0.0), ("b", 9.0), ("a~1", 18.0), ("b~1", 27.0)
    ]  # fmt: skip


def test_every_seed_has_its_own_order_where_arrivals_do_not_matter() -> None:
    """A closed loop starts programs by itself: equal seeds would have intervals of 0."""
    trace = Trace(tuple(ProgramPlan(name, (TurnPlan(1, 1, 0.0),), arrival_s=float(ord(name))) for name in "abcdef"))
    workload = TraceWorkload("day", trace, in_order_of_arrival=False)
    orders = [[workload.program(index, seed).program_id for index in range(6)] for seed in (3, 4)]
    assert sorted(orders[0]) == sorted(orders[1]) == list("abcdef")
    assert orders[0] != orders[1]


def test_a_round_takes_time_even_if_all_arrive_at_once() -> None:
    """Otherwise an open loop that asks for programs until its horizon would never get there."""
    workload = TraceWorkload("day", Trace((ProgramPlan("a", (TurnPlan(1, 1, 0.0),), arrival_s=0.0),)))
    assert [workload.program(index, 0).arrival_s for index in range(3)] == [0.0, 1.0, 2.0]


def test_nothing_to_replay_is_refused() -> None:
    """The error lists what was dropped, so that a too low limit is noticed."""
    with pytest.raises(TraceError, match=r"day: no program is left to replay .* 3 programs"):
        TraceWorkload("day", Trace((), dropped_programs_count=3, dropped_turns_count=5))
