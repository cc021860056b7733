"""The benchmark of the default policy without its runs: its inputs, the loads, and its verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from benchmarks.findings import Finding, mean_of, plot, ratio_of, table
from benchmarks.policy import (
    ABLATIONS,
    COMMANDS,
    LARGE,
    SMALL,
    Bench,
    arguments,
    command_of,
    idle_moves_count,
    known,
    mean_context_tokens,
    programs_at,
)
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.simulator.comparison.results import Run
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import TimingProfile
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan


@dataclass(frozen=True)
class OneProgram:
    """It has 100 new tokens, 20 out, a tool of 100 s, 30 new, 10 out."""

    name: str = "one"

    def program(self, index: int, seed: int) -> ProgramPlan:
        if index:
            raise IndexError
        return ProgramPlan("p", (TurnPlan(100, 20, 100.0), TurnPlan(30, 10, 0.0)))


def run(seed: int, value: float | None) -> Run:
    return Run("p", "p", 1, seed, cast("Any", SimpleNamespace(value=value)))


def value_of(result: Any) -> Any:
    return result.value


def test_mean_context_of_a_program_matches_a_calculation_by_hand() -> None:
    """Turns take 20 s and 10 s, a second an iteration; a tool takes 100 s with 120 tokens."""
    engine = EngineConfig(16_000, timing=TimingProfile("unit", base_s=1.0, prefill_token_s=0.0, decode_request_s=0.0))
    assert mean_context_tokens(OneProgram(), engine) == pytest.approx((20 * 110 + 100 * 120 + 10 * 155) / 130)


@pytest.mark.parametrize(("load", "count"), [(0.5, 7), (1.0, 14), (3.0, 40), (0.001, 1)])
def test_a_load_is_that_many_contexts_over_the_capacity(load: float, count: int) -> None:
    assert programs_at(load, 540_000, 40_000.0) == count


def test_ratios_are_taken_seed_by_seed() -> None:
    runs, others = [run(0, 6.0), run(1, 8.0)], [run(1, 4.0), run(0, 2.0)]
    assert ratio_of(runs, others, value_of) == Interval.of([3.0, 2.0])
    assert ratio_of(runs, [run(1, 0.0), run(0, 2.0)], value_of) is None
    assert ratio_of(runs, [run(1, None), run(0, 2.0)], value_of) is None


def test_a_figure_that_one_run_lacks_has_no_mean() -> None:
    assert mean_of([run(0, 1.0), run(1, 3.0)], value_of) == Interval.of([1.0, 3.0])
    assert mean_of([run(0, 1.0), run(1, None)], value_of) is None


@pytest.mark.parametrize(
    ("interval", "at_least", "at_most", "verdict"),
    [
        (Interval(5, 0.84, 1.5), 0.85, None, "no"),  # only its good end would reach the bar
        (Interval(5, 1.1, 0.2), 1.0, None, "no"),
        (Interval(5, 1.3, 0.2), 1.0, None, "yes"),
        (Interval(5, 0.9, 0.05), 1.0, None, "no"),
        (Interval(2, 1.3, 0.2), 1.0, None, "undecided"),
        (Interval(1, 1.3, None), 1.0, None, "undecided"),
        (Interval(1, 0.9, None), 1.0, None, "undecided"),
        (Interval(5, 1.0, 0.5), None, 1.2, "no"),
        (Interval(5, 0.5, 0.5), None, 1.2, "yes"),
        (Interval(2, 0.0, 0.0), None, 0.0, "yes"),  # the same in each seed
        (Interval(1, 0.0, None), None, None, ""),
        (None, 1.0, None, ""),
    ],
)
def test_the_bad_end_of_an_interval_must_reach_the_bar_over_enough_seeds(
    interval: Interval | None, at_least: float | None, at_most: float | None, verdict: str
) -> None:
    assert Finding("here", "p", "figure", interval, at_least, at_most).verdict == verdict


def test_programs_in_time_are_kept_of_every_comparison() -> None:
    """The report needs it, whichever command made the comparison."""
    bench = Bench(arguments().parse_args(["told", "--seeds", "1", "--jobs", "1", "--minutes", "1"]), Console())
    for count in (2, 3):
        bench.runs(f"with {count}", bench.scenario(SMALL), bench.programs(SMALL), ("passthrough", "sticky"), count)
    kept = [(row["setting"], row["policy"]) for row in bench.runner.in_time]
    assert kept == [(f"with {count}", policy) for count in (2, 3) for policy in ("passthrough", "sticky")]


def test_findings_are_set_out_and_drawn_also_without_a_figure() -> None:
    found = [
        Finding("here", "ttl", "ratio", Interval(3, 0.9, 0.05), at_least=1.0),
        Finding("here", "ttl", "correlation", None),
    ]
    text = Console(width=120)
    with text.capture() as captured:
        text.print(table("title", found))
    assert ">= 1" in captured.get()
    assert "no" in captured.get()
    assert len(plot(found).axes) == 1
    assert found[1].to_json()["mean"] is None


def test_a_report_does_not_say_where_the_recorded_sessions_lie() -> None:
    words = ["ablation", "--traces", "/a/b/sessions.jsonl", "--seeds", "2"]
    assert command_of(words, Path("/a/b/sessions.jsonl")) == (
        "scripts/bench policy ablation --traces sessions.jsonl --seeds 2"
    )


def test_the_time_of_the_command_line_takes_the_place_of_a_cases_own() -> None:
    bench, short = (Bench(arguments().parse_args(["told", *words]), Console()) for words in ([], ["--minutes", "12"]))
    scenario = bench.scenario(LARGE, replica_count=2)
    assert (scenario.horizon_s, scenario.warmup_s, scenario.replica_count) == (90 * 60, 20 * 60, 2)
    assert (short.scenario(LARGE).horizon_s, short.scenario(LARGE).warmup_s) == (720, 120)


def test_every_part_of_the_default_policy_is_there() -> None:
    console = Console(quiet=True)
    texts = [f"breakeven:{setting}" for setting in ABLATIONS.values()]
    assert known(texts, console) == texts
    assert known(["breakeven:no_such_part=0", "ttl"], console) == ["ttl"]
    assert len(COMMANDS) == 14
    assert Bench(arguments().parse_args(["told"]), console).programs(SMALL).name == "standard"


def test_an_idle_table_moves_nobody() -> None:
    assert idle_moves_count(Passthrough()) == 0
