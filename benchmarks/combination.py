"""Compare one combination of parts with every single policy, on all workloads, simulated.

    scripts/bench combination --seeds 10 --jobs 1

Each workload is a number of programs that arrive independently, at about one and a half times the engine's rate, or all
at once, so that memory is short. Each run goes on until the last program ends, so every program counts under every
policy. In a loop that replaces programs as they end, programs that never get their turn count nowhere, and the policy
that lets them starve looks best.

Three figures are compared: turns a minute until nine tenths of all turns ended; the mean time of a program, from its
first turn's arrival to its end; and how many programs take at most three times their ideal time, alone on an idle
engine. The first omits the last tenth of the turns, because by then few programs are left, memory is no longer short,
and the longest program alone decides the time; turns a minute until the last turn ended are shown beside it. For each
figure the *best single policy* is the one that is best in the mean over all workloads, the same on each of them; the
best policy on one workload is shown beside it. Ratios are taken seed by seed, means over workloads are geometric.

The combination and the loads were chosen on seeds from 100 on; the figures are of seeds from 0 on. Every run is stored
when it ends (`results/combination-runs.json`), so an interrupted benchmark resumes where it stopped; delete the file to
start over.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import mars
from benchmarks.findings import OTHER_COLOUR
from benchmarks.kept_runs import do_runs
from benchmarks.machine import RESULTS, save_results
from benchmarks.simulated import colour_of, save_plot, scenario_of
from thunderagent.programs.messages import TurnEnd
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.scenario import Loop, Scenario
from thunderagent.simulator.workloads.distributions import Poisson, workload
from thunderagent.simulator.workloads.plans import Workload

RUNS = RESULTS / "combination-runs.json"

COMBINATION = "breakeven"
OLDEST_FIRST = "breakeven + fcfs"
"""The same without its own order, `least-area`."""
FCFS, STICKY = "fcfs", "sticky"
CAPS = {f"cap {ratio:g}": ratio for ratio in (0.5, 0.7, 0.85, 1.0)}
"""A cap of so many times the programs of their mean size that memory holds."""
CONTESTANTS = {
    COMBINATION: "breakeven",
    OLDEST_FIRST: "breakeven:order=fcfs",
    "mars": "mars",
    "thunderagent": "thunderagent",
    "infercept": "infercept",
    "continuum": "continuum",
    "ttl": "ttl",
    **dict.fromkeys(CAPS, "cap:n={n}"),
    "concur": "concur",
    "autellix": "autellix",
    "orbit-step": "passthrough:priority=orbit-step",
    STICKY: "sticky",
    FCFS: "fcfs",
}
"""Presets that differ from one of these in settings only are left out. MARS is not told how many processors tools
share, because here they share none."""

SINGLE = tuple(name for name in CONTESTANTS if name != COMBINATION)

ALPHA_RATIO = 3.0
BUSY_RATIO = 0.9
DAY_MIN = 24 * 60.0
MARS_REGIME = "mars-220k"


@dataclass(frozen=True)
class Case:
    """A workload on engines: programs that arrive at a rate, at the workload's own, or all at once.

    Memory holds `fitting_count` programs of their mean size (`policy.mean_context_tokens`).
    """

    workload: str
    profile: str
    fitting_count: int
    programs_count: int
    rate_per_s: float | None = None
    loop: Loop = "open"
    replicas_count: int = 1
    block_tokens: int = 64

    def scenario(self, seed: int) -> Scenario:
        """Return the engines, and a day, in which all programs finish."""
        scenario = scenario_of(self.profile, replicas_count=self.replicas_count, minutes=DAY_MIN, loop=self.loop)
        engine = replace(scenario.engine, block_size=self.block_tokens)
        if self.workload == MARS_REGIME:
            engine = replace(engine, max_model_len=mars.CONTEXT_LIMIT_TOKENS)
        return replace(
            scenario,
            engine=engine,
            programs_count=self.programs_count,
            seed=seed,
            sample_interval_s=600.0,
            keep_events=True,
        )

    def programs(self) -> Workload:
        """Return the programs' workload."""
        if self.workload == MARS_REGIME:
            assert self.rate_per_s is not None
            return mars.mix(MARS_REGIME.removeprefix("mars-"), self.rate_per_s)
        programs = workload(self.workload)
        if self.rate_per_s is not None:
            programs = replace(programs, arrivals=Poisson(self.rate_per_s), _arrivals_s={})
        return programs


CASES = (
    Case("standard", "demo", 7, 120, 0.43, block_tokens=16),
    Case("bursts", "demo", 7, 128, block_tokens=16),
    Case("burst-64", "qwen3-8b-rtx5090", 11, 64, loop="batch"),
    Case("shared-prefix-90", "qwen3-8b-rtx5090", 7, 160, 0.55),
    Case("toolorchestra-hle", "qwen3-8b-rtx5090", 4, 60, 0.05),
    Case(MARS_REGIME, "qwen3-coder-30b-h100-nvl", 9, 150, 0.15, block_tokens=mars.BLOCK_TOKENS),
    Case("scienceagentbench", "glm-4.6-h100x8", 20, 80, 0.13),
    Case("coding-assistant", "glm-4.6-h100x8", 3, 10, 0.05),
    Case("mini-swe-agent", "glm-4.6-h100x8", 10, 44, 0.06),
    Case("gaia-magentic-one", "qwen3-14b-h100", 6, 64),
    Case("computer-use", "qwen3-14b-h100", 8, 48, 0.08),
    Case("openhands", "qwen3-32b-h200", 10, 48, 0.06, replicas_count=2),
    Case("grpo", "glm-4.6-h100x8", 9, 40, loop="batch"),
)
"""Blocks are larger than vLLM's 16 where contexts are long: a run takes less time. The cheapest come first."""


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A pending run."""

    case: Case
    contestant: str
    seed: int

    @property
    def key(self) -> str:
        """Return its name among the stored runs, unique to its load and policy."""
        case = self.case
        load = f"{case.programs_count} at {case.rate_per_s or case.loop} on {case.replicas_count} {case.profile}"
        return f"{case.workload}, {load}|{self.policy}|{self.seed}"

    @property
    def policy(self) -> str:
        """Return what runs: on one replica `sticky` is `fcfs`."""
        if self.contestant == STICKY and self.case.replicas_count == 1:
            return CONTESTANTS[FCFS]
        text = CONTESTANTS[self.contestant]
        return text.format(n=max(1, round(CAPS.get(self.contestant, 1.0) * self.case.fitting_count)))


def run_one(task: Task, go_on: GoOn) -> dict[str, float]:
    """Do one run; return its figures."""
    contestant = Contestant.parse(task.policy)
    return figures_of(
        contestant.run(task.case.scenario(task.seed), task.case.programs(), on_progress=lambda _: go_on())
    )


def figures_of(result: RunResult) -> dict[str, float]:
    """Return the stored figures of a run."""
    ends_s = [event.now_s for event, _ in result.events if (isinstance(event, TurnEnd) and event.outcome == "finished")]
    goodput = next(each for each in result.goodputs if each.alpha_ratio == ALPHA_RATIO)
    values = {
        "turns_per_min": turns_per_min(ends_s),
        "whole_turns_per_min": result.turns_per_min_count,
        "mean_s": result.program_latency.mean_s,
        "in_time_ratio": goodput.program_ratio,
        "p99_s": result.program_latency.p99_s,
        "longest_hold_s": result.longest_hold_s,
        "hit_ratio": result.hit_ratio,
        "simulated_s": result.simulated_s,
    }
    return {name: round(value, 4) for name, value in values.items()}


def turns_per_min(ends_s: Sequence[float]) -> float:
    """Return the throughput until nine tenths of the turns ended; `ends_s` is sorted."""
    count = math.ceil(BUSY_RATIO * len(ends_s))
    return 60 * count / ends_s[count - 1]


def tasks(seeds: Sequence[int], cases: Sequence[Case] = CASES) -> list[Task]:
    """Return all runs, seed by seed; those of `sticky` on one replica have the key of `fcfs`."""
    return [Task(case, name, seed) for seed in seeds for case in cases for name in CONTESTANTS]


# --- figures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A compared figure, whether more of it is better, and its bar in the mean over all workloads."""

    name: str
    title: str
    more_is_better: bool

    def worst_first(self, ratio: float) -> float:
        """Return a sort key that ascends from the worst ratio to the best."""
        return ratio if self.more_is_better else 1 / ratio

    def reaches(self, ratio: Interval, bar: float = 1.0) -> bool:
        """Return whether the bad end of a ratio is as good as the bar, or its inverse."""
        return self.worst_first(ratio.low if self.more_is_better else ratio.high) >= bar


MEASURES = (
    Measure("turns_per_min", "throughput, turns/min", more_is_better=True),
    Measure("mean_s", "mean time of a program", more_is_better=False),
    Measure("in_time_ratio", "goodput, programs within 3 x ideal", more_is_better=True),
)
WHOLE = Measure("whole_turns_per_min", "turns/min until the last is through", more_is_better=True)
"""Shown beside them, without a bar."""

WORST_BAR = 0.95
LEAST_RATIO = 1e-3
"""The least value of a figure in a geometric mean: no program in time counts as that."""


class Found:
    """The runs over the seeds that all contestants and workloads have."""

    def __init__(
        self, kept: Mapping[str, dict[str, float]], seeds: Sequence[int], cases: Sequence[Case] = CASES
    ) -> None:
        self._kept = kept
        self.cases = cases
        self.seeds = [
            seed for seed in seeds if all(Task(case, name, seed).key in kept for case in cases for name in CONTESTANTS)
        ]

    def values(self, case: Case, contestant: str, measure: str) -> list[float]:
        """Return a figure of each seed."""
        return [self._kept[Task(case, contestant, seed).key][measure] for seed in self.seeds]

    def mean(self, case: Case, contestant: str, measure: str) -> Interval:
        """Return a figure over the seeds."""
        return Interval.of(self.values(case, contestant, measure))

    def ratio(self, case: Case, contestant: str, other: str, measure: str) -> Interval:
        """Return a figure over another's, seed by seed; if that is 0 for a seed, the mean over the mean."""
        values, others = self.values(case, contestant, measure), self.values(case, other, measure)
        paired = Interval.of_ratios(values, others)
        if paired is not None:
            return paired
        whole = fmean(others)
        return Interval(1, fmean(values) / whole if whole else (math.inf if fmean(values) else 1.0), None)

    def score(self, contestant: str, measure: Measure) -> float:
        """Return the geometric mean over all workloads of a figure over the best on each: 1 is the best there is."""
        logs = []
        for case in self.cases:
            best = self.mean(case, self.best_of(case, measure), measure.name).mean
            own = self.mean(case, contestant, measure.name).mean
            logs.append(math.log(max(LEAST_RATIO, own / best) if best else 1.0))
        return math.exp(fmean(logs))

    def best_of(self, case: Case, measure: Measure) -> str:
        """Return the best single policy on one workload."""
        sign = 1 if measure.more_is_better else -1
        return max(SINGLE, key=lambda name: sign * self.mean(case, name, measure.name).mean)

    def best_single(self, measure: Measure) -> str:
        """Return the best single policy in the mean over all workloads."""
        sign = 1 if measure.more_is_better else -1
        return max(SINGLE, key=lambda name: sign * self.score(name, measure))

    def over_cases(self, contestant: str, other: str, measure: Measure) -> Interval:
        """Return the geometric mean over all workloads of the ratios of each seed, with its interval over seeds."""
        means = []
        for place in range(len(self.seeds)):
            logs = []
            for case in self.cases:
                value = self.values(case, contestant, measure.name)[place]
                base = self.values(case, other, measure.name)[place]
                logs.append(math.log(max(LEAST_RATIO, value) / max(LEAST_RATIO, base)))
            means.append(math.exp(fmean(logs)))
        return Interval.of(means)


def judge(found: Found) -> dict[str, Any]:
    """Return for each measure the best single policy, the ratios to it, and whether the bars are reached."""
    verdicts: dict[str, Any] = {}
    for measure in (*MEASURES, WHOLE):
        best = found.best_single(measure)
        ratios = {case.workload: found.ratio(case, COMBINATION, best, measure.name) for case in found.cases}
        beside = {case.workload: found.best_of(case, measure) for case in found.cases}
        worst = min(ratios, key=lambda name: measure.worst_first(ratios[name].mean))
        no_worse = all(measure.reaches(ratio, WORST_BAR) for ratio in ratios.values())
        over_cases = found.over_cases(COMBINATION, best, measure)
        verdicts[measure.name] = {
            "best_single": best,
            "over_all_workloads": over_cases.text(3),
            "worst_workload": worst,
            "worst_ratio": round(ratios[worst].mean, 3),
            "reached": measure.reaches(over_cases),
            "no_workload_worse": no_worse,
            "ratios": {name: ratio.text(3) for name, ratio in ratios.items()},
            "best_on_each": {
                case.workload: {
                    "policy": beside[case.workload],
                    "ratio": found.ratio(case, COMBINATION, beside[case.workload], measure.name).text(3),
                }
                for case in found.cases
            },
            "scores": {name: round(found.score(name, measure), 3) for name in CONTESTANTS},
        }
    return verdicts


def figures(found: Found) -> dict[str, Any]:
    """Return every figure of every contestant on every workload, as text."""
    names = ("turns_per_min", "whole_turns_per_min", "mean_s", "in_time_ratio", "p99_s", "longest_hold_s", "hit_ratio")
    return {
        case.workload: {
            contestant: {name: found.mean(case, contestant, name).text(3) for name in names}
            for contestant in CONTESTANTS
        }
        for case in found.cases
    }


def table(found: Found, verdicts: Mapping[str, Any]) -> Table:
    """Return a row for each workload: the ratios to the best single policy, and to the best on that workload."""
    made = Table(
        title=f"{COMBINATION} / the best single policy, seeds {found.seeds[0]} to {found.seeds[-1]}",
        box=box.SIMPLE_HEAD,
        caption="in brackets: over the best single policy on that workload alone",
    )
    made.add_column("workload")
    for measure in (*MEASURES, WHOLE):
        made.add_column(f"{measure.title}\n/ {verdicts[measure.name]['best_single']}", justify="right")
    for case in found.cases:
        cells = []
        for measure in (*MEASURES, WHOLE):
            beside = verdicts[measure.name]["best_on_each"][case.workload]
            ratio = verdicts[measure.name]["ratios"][case.workload]
            cells.append(f"{ratio} ({beside['policy']}: {beside['ratio'].partition(' ')[0]})")
        made.add_row(case.workload, *cells)
    made.add_section()
    shown = [verdicts[measure.name] for measure in (*MEASURES, WHOLE)]
    made.add_row("all, geometric mean", *(verdict["over_all_workloads"] for verdict in shown))
    made.add_row("worst", *(f"{verdict['worst_ratio']} {verdict['worst_workload']}" for verdict in shown))
    return made


def scores_table(verdicts: Mapping[str, Any]) -> Table:
    """Return a row for each contestant: its figures over the best single policy's on each workload."""
    made = Table(title="over the best single policy of each workload, geometric means", box=box.SIMPLE_HEAD)
    made.add_column("policy")
    for measure in (*MEASURES, WHOLE):
        made.add_column(measure.title, justify="right")
    for name in CONTESTANTS:
        made.add_row(name, *(f"{verdicts[measure.name]['scores'][name]:.3f}" for measure in (*MEASURES, WHOLE)))
    return made


def plot(found: Found, verdicts: Mapping[str, Any]) -> Figure:
    """Draw for each measure and workload all policies over the best single one: the combination in red."""
    drawn = Figure(figsize=(9.6, 0.8 + 0.34 * len(found.cases)), layout="constrained")
    panels = drawn.subplots(1, len(MEASURES), sharey=True)
    places = range(len(found.cases))
    for axes, measure in zip(panels, MEASURES, strict=True):
        best = verdicts[measure.name]["best_single"]
        for place, case in zip(places, reversed(found.cases), strict=True):
            for name in SINGLE:
                mean = found.ratio(case, name, best, measure.name).mean
                colour = colour_of(name) or OTHER_COLOUR
                axes.plot(mean, place, color=colour, marker="|", markersize=7, linestyle="none")
            ratio = found.ratio(case, COMBINATION, best, measure.name)
            axes.errorbar(
                ratio.mean, place, xerr=ratio.half_width or 0.0, color="#b5182b", marker="o", markersize=4, capsize=2
            )
        axes.axvline(1.0, color=OTHER_COLOUR, linewidth=0.8, linestyle="--")
        axes.set_xlim(0.25 if measure.more_is_better else 0.4, 2.0 if measure.more_is_better else 3.0)
        axes.set_title(f"{measure.title}, / {best}", fontsize=7, loc="left")
        axes.tick_params(labelsize=7)
    panels[0].set_yticks(places, [case.workload for case in reversed(found.cases)])
    drawn.supxlabel("red: the combination; lines: single policies; what lies outside is not drawn", fontsize=7)
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not stored yet, and show it; exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each, each with other programs")
    parser.add_argument("--first-seed", type=int, default=0, help="100 and more are those it was chosen on")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: 2)")
    args = parser.parse_args(argv)
    console = Console()
    console.width = max(console.width, 150)  # what the tables take
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    found = Found(do_runs(run_one, tasks(seeds), RUNS, args.jobs, console), seeds)
    if not found.seeds:
        return 1
    verdicts = judge(found)
    console.print(table(found, verdicts))
    console.print(scores_table(verdicts))
    save_plot("combination", plot(found, verdicts))
    report = {
        "command": shlex.join(["scripts/bench", "combination", *(sys.argv[1:] if argv is None else argv)]),
        "seeds": found.seeds,
        "policies": CONTESTANTS,
        "verdicts": verdicts,
        "figures": figures(found),
    }
    console.print(f"written: {save_results('combination', report).name}")
    judged = [verdicts[measure.name] for measure in MEASURES]
    reached = all(verdict["reached"] and verdict["no_workload_worse"] for verdict in judged)
    console.print("all bars are reached" if reached else "[bold red]a bar is missed[/]")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
