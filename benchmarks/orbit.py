"""Simulate ORBIT, Table 1 and Fig. 3 to 5: how long tasks take, right and wrong, by order of service.

212 GAIA tasks with Magentic-One arrive as a Poisson process, 0.5 a second; GPT-OSS-120B on four A100 computes 16 turns
at a time. Under FCFS turns are served as they come. STEP and JUDGE give the engine priorities; the questions to the
judge run on the same engine, as anonymous turns, and delay other turns. All policies get the same tasks at the same
times. JUDGE asks after each step and has the judge read the whole trajectory, as in the paper; `JUDGE, every 5` asks as
the proxy does by default.

The judge's accuracy is an input: a curve as in the paper's Fig. 4, which gives the part of the wrong tasks that is
predicted to fail at a step: almost none until 15, then a straight line, all from 45 on. The paper does not give its
false alarms on right tasks, so those are chosen. Fig. 4 here shows what the scheduler *received*: verdicts are late,
and questions are asked only about tasks that have not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.findings import Finding, mean_of, ratio_of, table
from benchmarks.judging import JudgeModel
from benchmarks.simulated import Runner, save_plot, scenario_of
from thunderagent.programs.messages import FAILURE, SUCCESS
from thunderagent.simulator.figures.figures import nearest_rank
from thunderagent.simulator.workloads.distributions import workload

if TYPE_CHECKING:
    from thunderagent.simulator.comparison.results import Run
    from thunderagent.simulator.figures.figures import RunResult

JUDGE = JudgeModel(
    recall=((15, 0.03), (40, 0.9), (45, 1.0)),
    false_alarms=((15, 0.02), (40, 0.15)),
    every_turns_count=1,
    max_transcript_tokens=131_072,
)
"""Recall read off Fig. 4, false alarms chosen; the whole trajectory is read after each step."""

DEFAULT_JUDGE = replace(JUDGE, every_turns_count=5, max_transcript_tokens=7700)
"""The same judge, asked as the proxy does by default."""

FAIL_COUNT = 10
"""K_fail of the paper, for a verdict at each step; it is divided by the steps between two verdicts."""

BATCH_COUNT = 16
HORIZON_S = 100_000.0


@dataclass(frozen=True)
class Place:
    """An engine and its tasks."""

    profile: str
    workload: str
    block_tokens: int


PAPERS = Place("gpt-oss-120b-a100x4", "gaia-orbit", 256)
SHORT = Place("qwen3-14b-h100", "gaia-magentic-one", 64)
"""Not the paper's: tasks are longer, and memory is short."""

PAPER_S = {"FCFS": (901.2, 2439.5, 1703.5), "STEP": (800.6, 2635.1, 1750.6), "JUDGE": (862.4, 2686.9, 1837.8)}
"""Table 1: mean latency of right, of wrong and of all tasks, in seconds."""

RIGHT, WRONG, ALL = "right", "wrong", "all"
OUTCOMES = {RIGHT: SUCCESS, WRONG: FAILURE, ALL: ""}

Contestants = dict[str, tuple[str, JudgeModel | None]]

IN_THE_ENGINE: Contestants = {
    "FCFS": ("passthrough", None),
    "STEP": ("passthrough:priority=orbit-step", None),
    "JUDGE": ("passthrough:priority=orbit-judge", JUDGE),
    "JUDGE, every 5": ("passthrough:priority=orbit-judge", DEFAULT_JUDGE),
}
IN_FRONT_OF_IT: Contestants = {
    "breakeven": ("breakeven", None),
    "breakeven, STEP": ("breakeven:order=orbit-step:priority=orbit-step", None),
    "breakeven, JUDGE": ("breakeven:order=orbit-judge:priority=orbit-judge", DEFAULT_JUDGE),
}

STEP_EDGES_COUNT = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 80)
PAPER_RECALL = ((0, 0.0), (15, 0.03), (40, 0.9), (45, 1.0), (80, 1.0))
"""Fig. 4 in the paper's words: almost none at first, near-linear from 15 to 40, all beyond 45."""


PERCENTS = (25, 50, 75, 90, 99)
"""Fig. 3: the distribution of the latency of right tasks."""

QUEUEING = "to a turn's first token (s)"
"""Fig. 5: how long a request queues; here with its prefill, since the prompt is nearly all cached."""


def latency_s(outcome: str, percent: int | None = None) -> Callable[[RunResult], float | None]:
    """Return a function that picks the mean, or a percentile, of the times of the tasks with an outcome; empty: all."""

    def pick(result: RunResult) -> float | None:
        times_s = sorted(each.residence_s for each in result.waits.programs if outcome in ("", each.outcome))
        if not times_s:
            return None
        return fmean(times_s) if percent is None else nearest_rank(times_s, percent / 100)

    return pick


def first_token_s(result: RunResult) -> float:
    """Return the mean time from a turn's arrival to its first token; the judge's questions do not count."""
    return result.first_token_latency.mean_s


def recall_by_step(results: Sequence[RunResult], outcome: str = FAILURE) -> list[tuple[int, float, int]]:
    """Return (last step, part of verdicts that were failure, number of verdicts) of the tasks with one outcome."""
    verdicts = [
        verdict
        for result in results
        for each in result.waits.programs
        if each.outcome == outcome
        for verdict in each.verdicts
    ]
    found, before = [], 0
    for edge in STEP_EDGES_COUNT:
        failed = [is_failure for turn_count, is_failure in verdicts if before < turn_count <= edge]
        if failed:
            found.append((edge, round(sum(failed) / len(failed), 3), len(failed)))
        before = edge
    return found


def questions_count(result: RunResult) -> float:
    """Return the number of questions to the judge."""
    return result.decision_counts.get("grant anonymous", 0)


def orbit(runner: Runner, console: Console) -> dict[str, Any]:
    """Have the engine serve in the order of STEP or JUDGE, and hold nothing in front of it, as in the paper."""
    return _compared("papers-orbit", runner, console, IN_THE_ENGINE)


def orbit_front(runner: Runner, console: Console) -> dict[str, Any]:
    """Order turns in front of the engine, too: the default policy, with its own order and with ORBIT's.

    In the paper's setting, or in one whose memory is short.
    """
    contestants = {"FCFS": IN_THE_ENGINE["FCFS"]} | IN_FRONT_OF_IT
    if runner.only == "short":
        return _compared("papers-orbit-front-short", runner, console, contestants, SHORT)
    return _compared("papers-orbit-front", runner, console, contestants)


def _compared(
    name: str, runner: Runner, console: Console, contestants: Contestants, place: Place = PAPERS
) -> dict[str, Any]:
    runs = {name: _runs_of(runner, name, place, *contestant) for name, contestant in contestants.items()}
    found = [each for policy in runs for each in _findings(place, policy, runs)]
    console.print(table(place.profile, found))
    recalls = {
        policy: {what: recall_by_step([run.result for run in runs[policy]], OUTCOMES[what]) for what in (RIGHT, WRONG)}
        for policy, (_, judge) in contestants.items()
        if judge is not None
    }
    save_plot(name, _plot(found, recalls))
    return {
        "paper": {"latency_s": PAPER_S, "recall": PAPER_RECALL},
        "found": [each.to_json() for each in found],
        "failure by step": recalls,
    }


def _runs_of(runner: Runner, name: str, place: Place, policy: str, judge: JudgeModel | None) -> Sequence[Run]:
    programs = workload(place.workload)
    assert programs.programs_count is not None
    scenario = scenario_of(place.profile, minutes=HORIZON_S / 60, loop="open")
    engine = replace(scenario.engine, max_num_seqs=BATCH_COUNT, block_size=place.block_tokens)
    fail_count = FAIL_COUNT if judge is None else max(1, round(FAIL_COUNT / judge.every_turns_count))
    scheduler = replace(scenario.scheduler, judge_fail_count=fail_count)
    scenario = replace(scenario, engine=engine, sample_interval_s=60.0, judge=judge, scheduler=scheduler)
    result = runner.compare(name, scenario, programs, [policy], [programs.programs_count], keep_samples=False)
    return result.runs_of(policy, programs.programs_count)


def _findings(place: Place, policy: str, all_runs: Mapping[str, Sequence[Run]]) -> Iterator[Finding]:
    runs, fcfs = all_runs[policy], all_runs["FCFS"]
    for what, outcome in OUTCOMES.items():
        pick = latency_s(outcome)
        yield Finding(place.profile, policy, f"latency of {what} tasks (s)", mean_of(runs, pick))
        if policy != "FCFS":
            yield Finding(place.profile, policy, f"latency of {what} tasks / FCFS", ratio_of(runs, fcfs, pick))
    for percent in PERCENTS:
        pick = latency_s(OUTCOMES[RIGHT], percent)
        yield Finding(place.profile, policy, f"P{percent} of {RIGHT} tasks (s)", mean_of(runs, pick))
    yield Finding(place.profile, policy, QUEUEING, mean_of(runs, first_token_s))
    if policy != "FCFS":
        yield Finding(place.profile, policy, f"{QUEUEING} / FCFS", ratio_of(runs, fcfs, first_token_s))
    yield Finding(place.profile, policy, "programs/h", mean_of(runs, lambda each: each.programs_per_hour_count))
    yield Finding(place.profile, policy, "prompt tokens cached", mean_of(runs, lambda each: each.hit_ratio))
    yield Finding(place.profile, policy, "questions to the judge", mean_of(runs, questions_count))


def _plot(found: Sequence[Finding], recalls: Mapping[str, Mapping[str, Sequence[tuple[int, float, int]]]]) -> Figure:
    """Draw the changes of latency beside the paper's, and predicted failure by step."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    changes, steps = figure.subplots(1, 2)
    shown = [each for each in found if each.figure.endswith("tasks / FCFS") and each.interval is not None]
    for place, each in enumerate(reversed(shown)):
        assert each.interval is not None
        mean, half_width = 100 * (each.interval.mean - 1), 100 * (each.interval.half_width or 0.0)
        changes.errorbar(mean, place, xerr=half_width, color="#1c88cf", marker="o", markersize=4, capsize=3)
        if each.policy in PAPER_S:
            column = next(number for number, what in enumerate(OUTCOMES) if f" {what} " in each.figure)
            change = 100 * (PAPER_S[each.policy][column] / PAPER_S["FCFS"][column] - 1)
            changes.plot(change, place, color="#666666", marker="|", markersize=14)
    labels = [f"{each.policy}: {each.figure.split()[2]}" for each in reversed(shown)]
    changes.set_yticks(range(len(shown)), labels, fontsize=7)
    changes.axvline(0, color="#444444", linewidth=0.8)
    changes.set_xlabel("mean latency against FCFS (%); grey: the paper", fontsize=8)
    steps.plot(*zip(*PAPER_RECALL, strict=True), color="#666666", linestyle="--", label="paper, wrong tasks")
    for (policy, by_outcome), colour in zip(recalls.items(), ("#b5182b", "#1c88cf"), strict=False):
        for (what, points), line in zip(by_outcome.items(), (":", "-"), strict=True):
            xs, ys = [edge for edge, _, _ in points], [ratio for _, ratio, _ in points]
            steps.plot(xs, ys, color=colour, linestyle=line, marker="o", markersize=3, label=f"{policy}, {what} tasks")
    steps.set_xlabel("step", fontsize=8)
    steps.set_ylabel("verdicts of failure", fontsize=8)
    steps.legend(fontsize=7, frameon=False)
    return figure
