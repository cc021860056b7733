"""ORBIT, Table 1, in the simulator: how long tasks take that come to a right answer, by who is served first.

212 GAIA tasks with Magentic-One arrive as a Poisson process, 0.5 a second; an engine computes 16 turns at a time. Under
FCFS turns are served as they come. STEP and JUDGE give the engine priorities; the questions to the judge run on the
same engine, as anonymous turns, and count in what others wait. All policies get the same tasks at the same times.

What the judge knows is a curve, as in the paper's Fig. 4: the part of the tasks that it has predicted to fail after so
many turns. Its numbers are chosen here: it misses 2 of 3 failures at ten turns and one
in five at 45, and takes one right task in ten for a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.findings import Finding, mean_of, ratio_of, table
from benchmarks.simulated import Runner, save_plot, scenario_of
from thunderagent.programs.verdicts import FAILURE, SUCCESS
from thunderagent.simulator.judging import JudgeModel
from thunderagent.simulator.workloads import workload

if TYPE_CHECKING:
    from thunderagent.simulator.comparison import Run
    from thunderagent.simulator.report import RunResult

JUDGE = JudgeModel(
    recall=((5, 0.15), (10, 0.35), (15, 0.5), (20, 0.6), (30, 0.72), (45, 0.8), (60, 0.85)),
    false_alarms=((5, 0.04), (10, 0.08), (20, 0.12), (60, 0.15)),
)
"""Chosen; asked every five turns."""

BATCH_COUNT = 16
HORIZON_S = 100_000.0
PAPER = {"STEP": (-0.14, -0.08), "JUDGE": (-0.08, -0.03)}
"""What the latency of right tasks changes by against FCFS."""

Contestants = dict[str, tuple[str, JudgeModel | None]]

IN_THE_ENGINE: Contestants = {
    "FCFS": ("passthrough", None),
    "STEP": ("passthrough:priority=orbit-step", None),
    "JUDGE": ("passthrough:priority=orbit-judge", JUDGE),
}
IN_FRONT_OF_IT: Contestants = {
    "breakeven": ("breakeven", None),
    "breakeven, STEP": ("breakeven:order=orbit-step:priority=orbit-step", None),
    "breakeven, JUDGE": ("breakeven:order=orbit-judge:priority=orbit-judge", JUDGE),
}
PROFILE = "qwen3-14b-h100"


def latency_s(outcome: str) -> Callable[[RunResult], float | None]:
    """Return what picks the mean time from arrival to end of the tasks that come to an outcome."""

    def pick(result: RunResult) -> float | None:
        times_s = [program.residence_s for program in result.waits.programs if program.outcome == outcome]
        return fmean(times_s) if times_s else None

    return pick


def questions_count(result: RunResult) -> float:
    """Return how often the judge was asked."""
    return result.decision_counts.get("grant anonymous", 0)


def orbit(runner: Runner, console: Console) -> dict[str, Any]:
    """Let the engine serve whom STEP or JUDGE puts first, and nobody be held in front of it, as the paper does."""
    return _compared("papers-orbit", runner, console, IN_THE_ENGINE)


def orbit_front(runner: Runner, console: Console) -> dict[str, Any]:
    """Do the same in front of the engine, too: the default policy, with its own order and with ORBIT's."""
    return _compared("papers-orbit-front", runner, console, {"FCFS": IN_THE_ENGINE["FCFS"]} | IN_FRONT_OF_IT)


CHANGE = "latency of right tasks / FCFS"


def _compared(name: str, runner: Runner, console: Console, contestants: Contestants) -> dict[str, Any]:
    found = _on(runner, PROFILE, contestants)
    console.print(table(PROFILE, found))
    save_plot(name, _plot([each for each in found if each.figure == CHANGE]))
    return {
        "paper": {policy: list(bars) for policy, bars in PAPER.items()},
        "found": [each.to_json() for each in found],
    }


def _on(runner: Runner, profile_name: str, contestants: Contestants) -> list[Finding]:
    programs = workload("gaia-magentic-one")
    assert programs.programs_count is not None
    scenario = scenario_of(profile_name, minutes=HORIZON_S / 60, loop="open")
    engine = replace(scenario.engine, max_num_seqs=BATCH_COUNT, block_size=64)
    scenario = replace(scenario, engine=engine, sample_interval_s=60.0)
    found: list[Finding] = []
    fcfs: Sequence[Run] = ()
    for name, (policy, judge) in contestants.items():
        result = runner.compare(
            f"{profile_name}, {name}",
            replace(scenario, judge=judge),
            programs,
            [policy],
            [programs.programs_count],
            keep_samples=False,
        )
        runs = result.runs_of(policy, programs.programs_count)
        fcfs = fcfs or runs
        for what, outcome in (("right", SUCCESS), ("wrong", FAILURE)):
            pick = latency_s(outcome)
            found.append(Finding(profile_name, name, f"latency of {what} tasks (s)", mean_of(runs, pick)))
            if runs is not fcfs:
                bar = 1 + PAPER[name][1] if name in PAPER and outcome == SUCCESS else None
                ratio = ratio_of(runs, fcfs, pick)
                found.append(Finding(profile_name, name, f"latency of {what} tasks / FCFS", ratio, at_most=bar))
        found.append(Finding(profile_name, name, "prompt tokens cached", mean_of(runs, lambda each: each.hit_ratio)))
        if judge is not None:
            found.append(Finding(profile_name, name, "questions to the judge", mean_of(runs, questions_count)))
    return found


def _plot(changes: Sequence[Finding]) -> Figure:
    """Draw by how much the latency of right tasks changed, with the paper's ranges beside."""
    figure = Figure(figsize=(7.2, 0.7 + 0.28 * len(changes)), layout="constrained")
    axes = figure.subplots()
    for place, each in enumerate(reversed(changes)):
        if each.interval is None:
            continue
        mean = 100 * (each.interval.mean - 1)
        half_width = 100 * (each.interval.half_width or 0.0)
        axes.errorbar(mean, place, xerr=half_width, color="#1c88cf", marker="o", markersize=4, capsize=3)
        if (bars := PAPER.get(each.policy)) is not None:
            axes.barh(place, 100 * (bars[1] - bars[0]), left=100 * bars[0], height=0.6, color="#cccccc", zorder=0)
    labels = [f"{each.policy} - {each.setting}" for each in reversed(changes)]
    axes.set_yticks(range(len(changes)), labels, fontsize=7)
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_xlabel("latency of right tasks against FCFS (%); grey: the paper's range", fontsize=8)
    return figure
