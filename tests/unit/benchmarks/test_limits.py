"""The benchmark of limits: which programs' times count, and how they are compared."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.findings import Finding
from benchmarks.limits import (
    SWEEP_SEED,
    Cell,
    Followed,
    Task,
    best_caps,
    findings,
    loads,
    run_one,
    task_of,
    whole_numbers,
)
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.simulator.commands.compare import names
from thunderagent.simulator.comparison.results import CAP_BEST
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

CELL = Cell("mini-swe-agent", "qwen3-14b-h100", 1, 0.5)


class Tens:
    """Every program's tool takes ten seconds, and all else next to nothing."""

    name = "tens"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return ProgramPlan(f"p{seed}-{index}", (TurnPlan(10, 1, 10.0), TurnPlan(10, 1, 0.0)))


def test_programs_that_came_in_time_are_followed_to_their_ends() -> None:
    """One runs at a time; from 25 to 45 s those that came at 30 and 40 s count, though the second ends at 50 s."""
    scenario = Scenario(EngineConfig(16_000), programs_count=2, horizon_s=45.0)
    agenda = Agenda()
    simulation = Simulation(scenario, Tens(), Cap(n=1), agenda=agenda)
    came = Followed(simulation, 25.0, 45.0)
    simulation.begin()
    while agenda.advance(45.0):
        pass
    assert came.left_count > 0
    halfway = came.times(agenda.now_s)
    while came.left_count and agenda.advance(500.0):
        pass
    times = came.times(agenda.now_s)
    assert times.count == halfway.count == 2
    assert times.mean_s == pytest.approx(20.0, abs=2.0)  # ten seconds of waiting, ten of its own
    assert halfway.mean_s < times.mean_s
    assert came.longest_hold_s(agenda.now_s) == pytest.approx(10.0, abs=1.0)


def test_a_run_says_how_long_programs_took() -> None:
    figures = run_one(Task(CELL, "breakeven", 3), lambda: None)
    assert 0 < figures["limit_ratio"] <= 1
    assert figures["left_count"] == 0 < figures["came_count"]
    assert 0 < figures["p50_s"] <= figures["p99_s"] <= figures["max_s"]


def test_ratios_are_taken_seed_by_seed_and_their_mean_over_cells() -> None:
    cells, seeds = [CELL, replace(CELL, load=2.0)], (0, 1, 2)
    kept = {}
    for number, cell in enumerate(cells):
        for seed in seeds:
            for policy, factor in (("breakeven", 1.0), ("thunderagent", 2.0 + number), ("passthrough", 4.0)):
                names = (
                    "limit_ratio",
                    "turns_per_min",
                    "programs_per_hour",
                    "mean_s",
                    "p50_s",
                    "p99_s",
                    "longest_hold_s",
                )
                kept[Task(cell, policy, seed).key] = dict.fromkeys(names, factor * (1 + seed))
                if policy == "passthrough":
                    kept[Task(cell, policy, seed).key]["longest_hold_s"] = 0.0
    found = findings(kept, cells, ["breakeven", "thunderagent", "passthrough"], seeds, {})

    def ratio(at: str, figure: str) -> Finding:
        return next(each for each in found if (each.setting, each.figure) == (at, figure))

    mean = ratio(cells[1].title, "a program's mean time / thunderagent")
    assert mean.interval is not None
    assert (mean.interval.mean, mean.verdict) == (pytest.approx(1 / 3), "yes")
    over_all = ratio("all 2 cells", "/ thunderagent")
    assert over_all.interval is not None
    assert (over_all.interval.mean, over_all.verdict) == (pytest.approx((1 / 2 + 1 / 3) / 2), "no")
    assert ratio("all 2 cells", "longest hold / passthrough").interval is None


def test_the_best_cap_comes_nearest_to_the_limit_in_its_cell() -> None:
    """It is tried with a seed of its own, from less than half of what fits to more."""
    fitting_count = CELL.scenario(0).programs_count / CELL.load
    numbers = [int(cap.removeprefix("cap:n=")) for cap in CELL.caps]
    assert min(numbers) <= fitting_count / 2
    assert max(numbers) > fitting_count
    kept = {Task(CELL, cap, SWEEP_SEED).key: {"limit_ratio": 1 / number} for number, cap in enumerate(CELL.caps, 1)}
    kept[Task(CELL, CELL.caps[2], SWEEP_SEED).key]["limit_ratio"] = 2.0
    caps = best_caps(kept, [CELL])
    assert caps == {CELL: CELL.caps[2]}
    assert task_of(CELL, CAP_BEST, 3, caps) == Task(CELL, CELL.caps[2], 3)
    assert task_of(CELL, "ttl", 3, caps) == Task(CELL, "ttl", 3)


@pytest.mark.parametrize(
    ("read", "text"),
    [(loads, "0"), (loads, "1,x"), (loads, "inf"), (whole_numbers, "1.5"), (whole_numbers, "-1"), (names, "a,,b")],
)
def test_argument_that_is_no_list_is_refused(read: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)
