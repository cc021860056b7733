"""The combination beside single policies: all workloads have cases, runs are paired, the best single is the best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import combination, mars
from benchmarks.combination import (
    CASES,
    COMBINATION,
    CONTESTANTS,
    FCFS,
    MARS_REGIME,
    MEASURES,
    OLDEST_FIRST,
    SINGLE,
    STICKY,
    Case,
    Found,
    Task,
    judge,
    plot,
    run_one,
    table,
    tasks,
    turns_per_min,
)
from benchmarks.kept_runs import do_runs
from benchmarks.machine import code_hash
from benchmarks.policy import mean_context_tokens
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.workloads.distributions import load_workloads

MORE = {"longest_hold_s": 1.0, "p99_s": 1.0, "hit_ratio": 1.0, "simulated_s": 1.0}
THROUGHPUT, LATENCY, GOODPUT = MEASURES


def kept_with(
    figures: dict[str, tuple[float, float, float]], seeds: tuple[int, ...] = (0, 1)
) -> dict[str, dict[str, float]]:
    """Return runs of all cases in which each policy has the same turns a minute, seconds, and part in time."""
    kept = {}
    for case in CASES:
        for seed in seeds:
            for name in CONTESTANTS:
                rate, mean_s, in_time_ratio = figures.get(name, (10.0, 100.0, 0.1))
                values = {"turns_per_min": rate * (1 + seed), "mean_s": mean_s, "in_time_ratio": in_time_ratio}
                kept[Task(case, name, seed).key] = values | MORE | {"whole_turns_per_min": rate}
    return kept


def test_every_workload_has_a_case() -> None:
    """Workloads that are mixed or made from others stand for these."""
    mixed = {*mars.SHORT_KINDS, mars.LONG_KIND}
    have = {case.workload for case in CASES}
    assert len(have) == len(CASES)
    assert have == set(load_workloads()) - mixed - {"shared-prefix", "gaia-orbit"} | {MARS_REGIME, "shared-prefix-90"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.workload)
def test_every_policy_can_be_made_and_every_program_comes(case: Case) -> None:
    """More programs come than fit, on engines whose blocks hold them."""
    for name in CONTESTANTS:
        Contestant.parse(Task(case, name, 0).policy)
    assert case.programs_count > 1.5 * case.fitting_count
    arrivals_s = [case.programs().program(index, 7).arrival_s for index in range(case.programs_count)]
    if case.loop == "open":
        assert None not in arrivals_s
        assert arrivals_s == sorted(arrivals_s)  # type: ignore[type-var]
    assert case.programs().program(3, 7) == case.programs().program(3, 7)
    assert case.programs().program(3, 7) != case.programs().program(3, 8)


def test_on_one_replica_sticky_is_fcfs_and_runs_once() -> None:
    """On two replicas it has its own run; caps are parts of the number that fits."""
    one = next(case for case in CASES if case.replicas_count == 1)
    two = next(case for case in CASES if case.replicas_count == 2)
    assert Task(one, STICKY, 0).key == Task(one, FCFS, 0).key
    assert Task(two, STICKY, 0).key != Task(two, FCFS, 0).key
    assert Task(one, "cap 1", 0).policy == f"cap:n={one.fitting_count}"
    assert Task(one, "cap 0.5", 0).policy == f"cap:n={round(one.fitting_count / 2)}"


@pytest.mark.parametrize("case", [case for case in CASES if case.profile == "demo"], ids=lambda case: case.workload)
def test_case_runs_as_many_programs_as_it_says(case: Case) -> None:
    """The mean size of programs over their lives counts; the other workloads are computed in the same way."""
    engine = case.scenario(0).engine
    context_tokens = mean_context_tokens(case.programs(), engine)
    assert case.fitting_count == int(case.replicas_count * engine.capacity_tokens / context_tokens)


def test_new_load_is_a_new_run() -> None:
    """Stored runs of one load are not taken for those of another."""
    tasks = [Task(case, "mars", 0) for case in (CASES[0], replace(CASES[0], rate_per_s=9.0), CASES[1])]
    assert len({task.key for task in tasks}) == 3


def test_throughput_is_that_until_nine_tenths_of_the_turns_are_through() -> None:
    """The time of the last one does not matter."""
    assert turns_per_min([*(6.0 * turn for turn in range(1, 11)), 1e6, 1e6, 1e6][:10]) == pytest.approx(10.0)
    assert turns_per_min([1.0] * 9 + [1000.0]) == pytest.approx(540.0)


def test_the_best_single_policy_is_the_best_over_all_workloads() -> None:
    """It is chosen for each figure separately, and ratios are taken to it."""
    figures = {
        COMBINATION: (12.0, 30.0, 0.6),
        OLDEST_FIRST: (11.0, 50.0, 0.3),
        "mars": (5.0, 40.0, 0.2),
        "thunderagent": (6.0, 70.0, 0.5),
    }
    found = Found(kept_with(figures), (0, 1, 2))
    assert found.seeds == [0, 1]
    assert [found.best_single(measure) for measure in MEASURES] == [OLDEST_FIRST, "mars", "thunderagent"]
    verdicts = judge(found)
    assert verdicts["turns_per_min"]["over_all_workloads"] == "1.091 ± 0.000"
    assert verdicts["mean_s"]["over_all_workloads"] == "0.750 ± 0.000"
    assert verdicts["in_time_ratio"]["worst_ratio"] == 1.2
    assert all(verdicts[measure.name]["reached"] for measure in MEASURES)
    assert all(verdicts[measure.name]["no_workload_worse"] for measure in MEASURES)
    assert table(found, verdicts).row_count == len(CASES) + 2
    assert len(plot(found, verdicts).axes) == len(MEASURES)


def test_single_worse_workload_is_found() -> None:
    """It is found although the mean over all is better; a longer time is worse."""
    kept = kept_with({COMBINATION: (20.0, 50.0, 0.1)})
    kept[Task(CASES[2], COMBINATION, 0).key]["mean_s"] = 120.0
    kept[Task(CASES[2], COMBINATION, 1).key]["mean_s"] = 120.0
    verdict = judge(Found(kept, (0, 1)))["mean_s"]
    assert verdict["reached"]
    assert not verdict["no_workload_worse"]
    assert (verdict["worst_workload"], verdict["worst_ratio"]) == (CASES[2].workload, 1.2)


def test_comparison_without_any_program_in_time_divides_by_nothing() -> None:
    """If a seed of the best single policy has no program in time, means are compared."""
    kept = kept_with({})
    for name in SINGLE:
        kept[Task(CASES[0], name, 0).key]["in_time_ratio"] = 0.0
    found = Found(kept, (0, 1))
    assert found.ratio(CASES[0], COMBINATION, "mars", "in_time_ratio").mean == pytest.approx(2.0)
    assert found.ratio(CASES[1], COMBINATION, "mars", "in_time_ratio").mean == pytest.approx(1.0)
    for name in SINGLE:
        kept[Task(CASES[0], name, 1).key]["in_time_ratio"] = 0.0
    assert found.ratio(CASES[0], "mars", OLDEST_FIRST, "in_time_ratio").mean == 1.0
    assert found.score("mars", GOODPUT) == pytest.approx(1.0)


def test_runs_are_kept_and_not_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short load runs to its end; its stored runs are read again."""
    case = replace(CASES[0], programs_count=6)
    monkeypatch.setattr(combination, "CONTESTANTS", {COMBINATION: CONTESTANTS[COMBINATION], FCFS: FCFS})
    path = tmp_path / "runs.json"
    kept = do_runs(run_one, tasks((5,), (case,)), path, 1, Console(quiet=True))
    assert set(kept) == {Task(case, COMBINATION, 5).key, Task(case, FCFS, 5).key}
    figures = kept[Task(case, COMBINATION, 5).key]
    assert 0 < figures["whole_turns_per_min"] <= figures["turns_per_min"] * 1.5
    assert figures["mean_s"] > 0
    assert 0 <= figures["in_time_ratio"] <= 1
    changed = {key: values | {"mean_s": 1.0} for key, values in kept.items()}
    other = {"0123": {"commit": "before", "runs": changed}}
    path.write_text(json.dumps({code_hash(): {"commit": "now", "runs": changed}} | other))
    assert do_runs(run_one, tasks((5,), (case,)), path, 1, Console(quiet=True)) == changed
    path.write_text(json.dumps(other))
    assert do_runs(run_one, tasks((5,), (case,)), path, 1, Console(quiet=True)) == kept, "other code made those"
    assert json.loads(path.read_text())["0123"] == other["0123"], "and they stay"


def test_runs_of_a_seed_are_the_same() -> None:
    """Each time they give the same figures."""
    task = Task(replace(CASES[1], programs_count=8), COMBINATION, 3)
    assert run_one(task, lambda: None) == run_one(task, lambda: None)
