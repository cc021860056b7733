"""Loads and engines as strangers have them: the default is not worse than a simple policy; and how that is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.world import BARS, MISS, NOISE, OTHERS, PASS, Outcome, Task, outcome_of, run_in, table
from benchmarks.world_cells import Cell, cells

WORLD = (
    "h1-told-x0.5-streamed",
    "h1-told-x2-whole",
    "h1-unknown-whole",
    "h2-streamed",
    "real-4-whole",
    "grid-cheap-short-1x0.5-whole",
    "grid-cheap-long-1x1-whole",
    "grid-cheap-long-silent-whole",
    "grid-dear-long-1x0.5-whole",
    "grid-dear-long-silent-whole",
)
"""Some cells; all of them, for longer and with ten seeds, are those of `scripts/bench policy world`."""
WITH_OTHER_NUMBERS = ("grid-cheap-long-1x0.5-whole", "grid-cheap-long-1x2-whole")

SEEDS = (0, 1, 2)
WARMUP_S, MEASURED_S = 30.0, 150.0


def shortened(name: str) -> Cell:
    """Return a cell that takes a second or two; a batch is short anyway."""
    cell = next(cell for cell in cells() if cell.name == name)
    if cell.scenario.loop == "batch":
        return cell
    return replace(cell, scenario=replace(cell.scenario, warmup_s=WARMUP_S, horizon_s=WARMUP_S + MEASURED_S))


@pytest.mark.parametrize(
    "name", [*WORLD, *(pytest.param(name, marks=pytest.mark.nightly) for name in WITH_OTHER_NUMBERS)]
)
def test_the_default_is_not_worse_than_any_simple_policy(name: str) -> None:
    """Its turns and programs an hour, the time of a program and idling while programs are held reach their bars."""
    cell = shortened(name)
    kept = {
        Task(name, policy, seed).key: run_in(cell, policy, seed) for policy in ("breakeven", *OTHERS) for seed in SEEDS
    }
    outcome = outcome_of(cell, "breakeven", OTHERS, SEEDS, kept)
    assert outcome.verdict != MISS, {key: value for key, value in outcome.to_json().items() if key != "runs"}


# --- how it is judged -------------------------------------------------------------------------------------------------

CELL = cells()[0]


def judged(judged: list[float], other: list[float], *, mean_s: float = 1.0, idle_ratio: float = 0.0) -> Outcome:
    """Return the outcome of runs with these turns an hour, beside `slow`, whose programs take a tenth longer."""

    def run(turns: float, time_s: float) -> dict[str, float]:
        return {
            "turns_per_hour": turns,
            "programs_per_hour": turns,
            "mean_s": time_s,
            "idle_ratio": idle_ratio,
            "hit_ratio": 0.5,
        }

    kept = {}
    for seed, (one, two) in enumerate(zip(judged, other, strict=True)):
        kept[Task(CELL.name, "new", seed).key] = run(one, mean_s)
        kept[Task(CELL.name, "fast", seed).key] = run(two, 1.0)
        kept[Task(CELL.name, "slow", seed).key] = run(0.5 * two, 1.1)
    return outcome_of(CELL, "new", ["slow", "fast"], range(len(judged)), kept)


def test_the_best_of_the_others_is_what_counts() -> None:
    outcome = judged([100.0, 100.0, 100.0], [100.0, 100.0, 100.0])
    assert outcome.verdict == PASS
    assert list(outcome.figures) == list(BARS)
    assert {(each.best, each.interval.mean) for each in outcome.figures.values()} == {("fast", 1.0)}


@pytest.mark.parametrize(
    ("turns", "more", "verdict"),
    [
        ([99.0, 99.0, 99.0], {}, PASS),
        ([97.0, 97.0, 97.0], {}, MISS),
        ([90.0, 100.0, 110.0], {}, NOISE),
        ([100.0, 100.0, 100.0], {"mean_s": 1.03}, MISS),
        ([100.0, 100.0, 100.0], {"mean_s": 0.5}, PASS),
        ([100.0, 100.0, 100.0], {"idle_ratio": 0.01}, MISS),
    ],
)
def test_every_figure_must_reach_its_bar_by_its_bad_end(
    turns: list[float], more: dict[str, float], verdict: str
) -> None:
    """Where only means reach it, the runs were too few or too short to say."""
    outcome = judged(turns, [100.0, 100.0, 100.0], **more)
    assert outcome.verdict == verdict
    assert outcome.to_json()["verdict"] == verdict
    assert table("t", [outcome]).row_count == 1


def test_turns_take_time_to_reach_every_cells_engines() -> None:
    """Without it a place that a turn leaves is taken at once, by whom the proxy sends: no engine is so quick."""
    assert min(cell.scenario.engine.timing.request_overhead_s for cell in cells()) >= 0.002


def test_every_cell_has_a_name_of_its_own() -> None:
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names)
    assert {*WORLD, *WITH_OTHER_NUMBERS} <= set(names)
