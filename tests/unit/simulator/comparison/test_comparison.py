"""A comparison makes the named runs, pairs them correctly, and keeps finished ones when it is ended early."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import pytest

from thunderagent.errors import ConfigurationError
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.simulator.comparison.comparison import ComparisonProgress, cap_grid, compare, processes_that_fit
from thunderagent.simulator.comparison.results import (
    KEPT_SAMPLES_COUNT,
    CapSweep,
    ComparisonPlan,
    ComparisonResult,
    Run,
    cost_parts,
    thinned,
)
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult, quantiles_s
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan

SCENARIO = Scenario(engine=EngineConfig(kv_tokens=16_000, timing=profile("demo")), horizon_s=60)
PLAN = ComparisonPlan(SCENARIO, workload("standard"), ("passthrough", "cap:n=3"), (8, 2), seeds=(5, 3), process_count=1)

INTERRUPTED = """
from thunderagent.programs.policies.baselines.passthrough import Passthrough

class Interrupted(Passthrough):
    def place(self, view, program, candidates):
        raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    return compare(PLAN)


def keys(result: ComparisonResult) -> list[tuple[str, int, int]]:
    return [(run.contestant, run.programs_count, run.seed) for run in result.runs]


def stop_after(count: int) -> Callable[[ComparisonProgress], None]:
    """Press Ctrl-C after a number of runs."""

    def on_progress(progress: ComparisonProgress) -> None:
        if progress.done_count == count:
            raise KeyboardInterrupt

    return on_progress


def test_everyone_runs_at_each_load_with_each_seed(result: ComparisonResult) -> None:
    """They are in the plan's order, whatever the order of running."""
    assert keys(result) == [
        (contestant, programs_count, seed)
        for contestant in ("passthrough", "cap:n=3")
        for programs_count in (8, 2)
        for seed in (5, 3)
    ]
    assert (result.complete, result.done_count, result.planned_count) == (True, 8, 8)
    assert result.programs_counts == (2, 8)


def test_a_run_is_what_simulate_makes_of_it(result: ComparisonResult) -> None:
    scenario = replace(SCENARIO, programs_count=8, seed=3)
    (run,) = [run for run in result.runs_of("passthrough", 8) if run.seed == 3]
    assert run.result == simulate(scenario, workload("standard"), Passthrough())


def test_latencies_have_all_percentiles(result: ComparisonResult) -> None:
    """They are nearest-rank, like those of the figures, for a plot of the distribution."""
    assert quantiles_s([]) == ()
    assert quantiles_s([7.0]) == (7.0,) * 101
    assert quantiles_s([float(value) for value in range(200, 0, -1)]) == (1.0, *range(2, 201, 2))
    run = result.runs[0].result
    quantiles = run.turn_latency_quantiles_s
    assert (quantiles[50], quantiles[99], quantiles[100]) == (
        run.turn_latency.p50_s,
        run.turn_latency.p99_s,
        run.turn_latency.max_s,
    )


def test_rows_are_means_over_seeds_and_ratios_are_paired(result: ComparisonResult) -> None:
    rows = {(row.contestant, row.programs_count): row for row in result.rows()}
    assert list(rows) == [("passthrough", 2), ("cap:n=3", 2), ("passthrough", 8), ("cap:n=3", 8)]
    base, capped = result.runs_of("passthrough", 8), result.runs_of("cap:n=3", 8)
    row = rows["cap:n=3", 8]
    assert row.turns_per_min.mean == pytest.approx(sum(run.result.turns_per_min_count for run in capped) / 2)
    assert row.ratio is not None
    assert row.ratio.mean == pytest.approx(
        sum(a.result.turns_per_min_count / b.result.turns_per_min_count for a, b in zip(capped, base, strict=True)) / 2
    )
    ratio = rows["passthrough", 8].ratio
    assert ratio is not None
    assert (ratio.mean, ratio.half_width) == (1.0, 0.0)
    assert row.limited_by == "L2"
    assert row.limit_ratio is not None
    assert 0.3 < row.limit_ratio.mean < 1
    assert row.held_p99_s.mean > rows["passthrough", 8].held_p99_s.mean == 0


def test_costs_are_parts_of_the_memory_that_there_was(result: ComparisonResult) -> None:
    """If turns always wait, and none inside the engine, all five together are all of it."""
    run = result.runs_of("cap:n=3", 8)[0].result
    assert sum(cost_parts(run).values()) == pytest.approx(1.0, abs=0.03)
    assert cost_parts(run)["unused"] > 0.2


def with_runs(result: ComparisonResult, change: Callable[[Run], RunResult | None]) -> ComparisonResult:
    changed = [replace(run, result=new) for run in result.runs if (new := change(run)) is not None]
    return replace(result, runs=tuple(changed))


def test_only_seeds_that_both_have_make_a_ratio(result: ComparisonResult) -> None:
    """The baseline's run with seed 5 is not done yet."""
    partial = with_runs(result, lambda run: None if (run.contestant, run.seed) == ("passthrough", 5) else run.result)
    ratio = partial.rows()[-1].ratio
    assert ratio is not None
    assert (ratio.count, ratio.half_width) == (1, None)
    without = with_runs(result, lambda run: None if run.contestant == "passthrough" else run.result)
    assert [row.ratio for row in without.rows()] == [None, None]


def test_a_limit_that_is_infinite_or_unknown_is_none(result: ComparisonResult) -> None:
    unlimited = replace(result.runs[0].result.bounds, hold_or_drop_per_s=inf, closed_loop_per_s=inf)
    for bounds in (unlimited, None):
        row = with_runs(result, lambda run, bounds=bounds: replace(run.result, bounds=bounds)).rows()[0]
        assert (row.limit_per_min, row.limit_ratio, row.limited_by) == (None, None, "")


@pytest.mark.parametrize(
    ("programs_count", "tried"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 3, 4, 6]),
        (10, [1, 2, 3, 4, 6, 8, 10]),
        (48, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]),
    ],
)
def test_cap_best_tries_a_geometric_grid(programs_count: int, tried: list[int]) -> None:
    assert cap_grid(programs_count) == tried


def test_cap_best_runs_the_best_for_all_seeds() -> None:
    """It was found with another seed: a run that chose itself would be too good."""
    plan = replace(PLAN, contestants=("cap-best", "cap:n=4"), programs_counts=(8,), seeds=(0, 1), baseline="")
    result = compare(plan)
    (sweep,) = result.sweeps
    assert [number for number, _ in sweep.tried] == [1, 2, 3, 4, 6, 8]
    best_count = sweep.best_count
    assert 3 < best_count < 8  # 8 programs thrash this engine
    assert [(run.policy, run.seed) for run in result.runs_of("cap-best", 8)] == [
        (f"cap:n={best_count}", s) for s in (0, 1)
    ]
    outside = replace(plan, contestants=(f"cap:n={best_count}",), seeds=(plan.sweep_seed,), baseline="")
    assert compare(outside).runs[0].result.limit_ratio == max(reached for _, reached in sweep.tried)
    assert result.done_count == result.planned_count == 6 + 2 + 2


def test_cap_best_keeps_the_order_of_seeds() -> None:
    order: list[tuple[str, int, int]] = []

    def on_progress(progress: ComparisonProgress) -> None:
        if progress.last is not None:
            order.append((progress.last.contestant, progress.last.programs_count, progress.last.seed))

    compare(
        replace(PLAN, contestants=("cap-best", "sticky"), programs_counts=(2, 3), seeds=(5, 3), baseline=""),
        on_progress=on_progress,
    )
    ran = list(dict.fromkeys(order))
    assert ran == [
        ("cap-best", 3, 6),
        ("cap-best", 3, 5),
        ("sticky", 3, 5),
        ("cap-best", 2, 6),
        ("cap-best", 2, 5),
        ("sticky", 2, 5),
        ("cap-best", 3, 3),
        ("sticky", 3, 3),
        ("cap-best", 2, 3),
        ("sticky", 2, 3),
    ]


def test_smallest_of_equally_good_caps_is_best() -> None:
    assert CapSweep(8, ((1, 5.0), (2, 9.0), (4, 9.0))).best_count == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"contestants": ()}, "no policies"),
        ({"contestants": ("sticky", "sticky")}, "sticky is there twice"),
        ({"contestants": ("nonsense",)}, "no policy 'nonsense'"),
        ({"contestants": ("cap:m=3",)}, "no setting 'm'"),
        ({"contestants": ("cap:n=3:m",)}, "not a policy: 'cap:n=3:m'"),
        ({"baseline": "sticky"}, "baseline 'sticky' is none of the policies: passthrough, cap:n=3"),
        ({"programs_counts": ()}, "no numbers of programs"),
        ({"programs_counts": (2, 0)}, "programs_count must be at least 1, got 0"),
        ({"programs_counts": (2, 2)}, "2 is there twice"),
        ({"seeds": ()}, "no seeds"),
        ({"process_count": 0}, "at least 1 process, got 0"),
        ({"scenario": replace(SCENARIO, loop="open")}, "no arrival"),
        ({"contestants": ("oracle",), "scenario": replace(SCENARIO, engine=EngineConfig(64))}, "an engine takes 64"),
    ],
)
def test_an_impossible_plan_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        replace(PLAN, **{"baseline": ""} | changes)


def test_the_first_contestant_is_the_baseline_if_nobody_says_otherwise() -> None:
    assert PLAN.baseline == "passthrough"
    assert replace(PLAN, baseline="cap:n=3").baseline == "cap:n=3"


def test_more_at_a_time_than_memory_has_room_for_is_refused() -> None:
    """The message gives the number that fits; without a requested number that many run."""
    with pytest.raises(ConfigurationError, match=r"1000000 runs at a time would need about .* enough for \d+;"):
        compare(replace(PLAN, process_count=1_000_000))
    huge = replace(PLAN.scenario, engine=EngineConfig(kv_tokens=10**15))
    with pytest.raises(ConfigurationError, match="enough for 0"):
        compare(replace(PLAN, scenario=huge, process_count=None))


def test_no_more_processes_than_runs_and_cores() -> None:
    single = replace(PLAN, contestants=("passthrough",), programs_counts=(2,), seeds=(0,), process_count=None)
    assert processes_that_fit(single) == 1
    assert processes_that_fit(replace(PLAN, process_count=None)) == min(8, len(os.sched_getaffinity(0)))
    assert processes_that_fit(replace(PLAN, process_count=3)) == 3


# --- ended early ----------------------------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_is_done() -> None:
    """Results are kept seed by seed, so that all contestants have the same seeds."""
    result = compare(PLAN, on_progress=stop_after(5))
    assert (result.done_count, result.planned_count, result.complete) == (5, 8, False)
    assert "interrupted" in result.stopped_by
    assert [key for key in keys(result) if key[2] == 5] == [key for key in keys(compare(PLAN)) if key[2] == 5]


def test_the_run_that_an_interrupt_ended_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a run, which then returns partial results."""
    (tmp_path / "interrupted_run.py").write_text(INTERRUPTED)
    monkeypatch.syspath_prepend(tmp_path)
    plan = replace(PLAN, contestants=("passthrough", "interrupted_run:Interrupted"), programs_counts=(2,))
    result = compare(plan)
    assert keys(result) == [("passthrough", 2, 5)]
    assert "interrupted" in result.stopped_by


def test_an_interrupted_sweep_has_no_best() -> None:
    plan = replace(PLAN, contestants=("passthrough", "cap-best"), programs_counts=(4,), seeds=(0,))
    result = compare(plan, on_progress=stop_after(3))
    assert keys(result) == [("passthrough", 4, 0)]
    assert result.sweeps == ()
    assert result.done_count == 3


@dataclass(frozen=True)
class RunsDry:
    """A workload whose programs become impossible."""

    name: str = "runs dry"

    def program(self, index: int, seed: int) -> ProgramPlan:
        plan = workload("standard").program(index, seed)
        return plan if index < 10 else replace(plan, turns=())


@pytest.mark.parametrize("process_count", [1, 2])
def test_an_error_of_a_run_keeps_what_is_done(process_count: int) -> None:
    """One program at a time does not reach the impossible one; two do."""
    plan = replace(PLAN, workload=RunsDry(), contestants=("cap:n=1", "passthrough"), programs_counts=(2,), baseline="")
    result = compare(replace(plan, process_count=process_count, seeds=(5,)))
    assert re.search(r"^\S+ with 2 programs and seed 5 failed: .*program 10 .*has no turns", result.stopped_by)
    assert not result.complete
    if process_count == 1:
        assert keys(result) == [("cap:n=1", 2, 5)]


def test_further_seeds_keep_only_what_is_shown() -> None:
    """The first seed keeps all, the others what a plot of imbalance needs, and sweeps nothing."""
    scenario = replace(SCENARIO, replica_count=2, sample_interval_s=0.2)
    plan = replace(PLAN, scenario=scenario, contestants=("passthrough", "cap-best"), programs_counts=(2,))
    whole = compare(plan)
    spare = compare(replace(plan, keep_samples=False))
    for run, all_of_it in zip(spare.runs, whole.runs, strict=True):
        assert replace(run.result, samples=()) == replace(all_of_it.result, samples=())
        if run.seed == 5:
            assert run.result.samples == all_of_it.result.samples
        else:
            kept = thinned(all_of_it.result.samples)
            assert run.result.samples == tuple(replace(sample, replicas=()) for sample in kept)
            assert len(kept) <= KEPT_SAMPLES_COUNT < len(all_of_it.result.samples)
    single = compare(replace(plan, scenario=replace(scenario, replica_count=1), keep_samples=False))
    assert [bool(run.result.samples) for run in single.runs] == [True, False] * 2


def test_processes_change_no_figure(result: ComparisonResult) -> None:
    """Order does not change, either."""
    seen: list[tuple[int, int]] = []

    def on_progress(progress: ComparisonProgress) -> None:
        seen.append((progress.done_count, progress.all_count))

    assert compare(replace(PLAN, process_count=2), on_progress=on_progress).runs == result.runs
    assert seen == [(done_count, 8) for done_count in range(9)]
