"""Reproduce MARS, Fig. 7, Fig. 10 and its goodput: `scripts/bench papers mars`.

Four regimes, by the mean input volume of a program (all prompts of its turns together), two GPUs, and rates about
saturation: 20 points. At each point every policy has the same programs at the same times. Tools share 8 cores. A
regime is a mix of five kinds of programs (`workloads.toml`); the share of those with a long document grows with it.

`mars` is run three times: on the engine that the paper also changed (`mlfq.py`); as `mars, few long` on the same engine
with this project's order of admission; and as `mars, stock engine` on one that knows only priorities, which is what a
proxy can have. Every run is stored when it ends (`results/papers-mars-runs.json`), so an interrupted benchmark resumes
where it stopped; delete the file to start over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.kept_runs import do_runs
from benchmarks.machine import RESULTS
from benchmarks.mlfq import Mlfq
from benchmarks.simulated import Runner, save_plot
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult, nearest_rank
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan

TOOL_CORES_COUNT = 8
PROGRAMS_COUNT = 200
CONTEXT_LIMIT_TOKENS = 262_144
BLOCK_TOKENS = 256
"""Larger than vLLM's 16: contexts are long, and a run takes less time."""

SHORT_KINDS = {"mars-terminal": 0.3, "mars-swe": 0.3, "mars-git": 0.2, "mars-repo": 0.2}
LONG_KIND = "mars-infinity"
REGIMES = {"125k": 0.027, "167k": 0.096, "220k": 0.180, "263k": 0.245}
"""The part of programs with a long document, chosen so that the mean volume is that of the paper's regime."""

SATURATION_PER_S = {
    "h100": {"125k": 0.20, "167k": 0.15, "220k": 0.10, "263k": 0.08},
    "h200": {"125k": 0.23, "167k": 0.18, "220k": 0.12, "263k": 0.095},
}
"""Programs a second that end if all arrive at once, under `infercept`: the limit of 8 cores or the GPU."""

LOADS = {"h100": (1.0, 1.5, 2.0), "h200": (1.0, 1.5)}
"""Rates, in multiples of `SATURATION_PER_S`."""

PROFILES = {"h100": "qwen3-coder-30b-h100-nvl", "h200": "qwen3-coder-30b-h200-nvl"}

MARS = "mars"
FEW_LONG = "mars, few long"
MARS_ON_STOCK = "mars, stock engine"
OWN = ("thunderagent", "breakeven")
POLICIES = {
    MARS: f"mars:tool_cpu_count={TOOL_CORES_COUNT}",
    FEW_LONG: f"mars:tool_cpu_count={TOOL_CORES_COUNT}:admission=mars-few-long",
    MARS_ON_STOCK: f"mars:tool_cpu_count={TOOL_CORES_COUNT}",
    "fcfs": "passthrough",
    "autellix": "autellix",
    "infercept": "infercept",
    "continuum": "continuum",
    "continuum-fixed": "continuum-fixed",
    "concur": "passthrough:admission=concur",
    "thunderagent": "thunderagent",
    "breakeven": "breakeven",
}
PUBLISHED = ("fcfs", "autellix", "infercept", "continuum", "continuum-fixed", "concur")
"""The companions' policies, including the paper's five baselines; the last two are this project's own."""

ALPHA_RATIO = 3.0
HEAVIEST = ("220k", "263k")
COLOURS = {
    MARS: "#b5182b",
    FEW_LONG: "#7f4f24",
    MARS_ON_STOCK: "#e69f00",
    "fcfs": "#8a8f98",
    "autellix": "#cc79a7",
    "infercept": "#009e73",
    "continuum": "#5a4fcf",
    "continuum-fixed": "#a49be8",
    "concur": "#56b4e9",
    "thunderagent": "#1c88cf",
    "breakeven": "#444444",
}


@dataclass(frozen=True)
class Point:
    """One point of the figures."""

    regime: str
    gpu: str
    load: float

    def __str__(self) -> str:
        return f"{self.regime} {self.gpu} {self.load:g}"

    @property
    def rate_per_s(self) -> float:
        """Programs a second."""
        return self.load * SATURATION_PER_S[self.gpu][self.regime]


POINTS = tuple(Point(regime, gpu, load) for gpu, loads in LOADS.items() for regime in REGIMES for load in loads)


@dataclass(frozen=True)
class Mix:
    """Programs of several kinds that arrive at a rate; every rate has the same program k and the same relative gaps."""

    name: str
    rate_per_s: float
    weights: Mapping[str, float]
    _gaps: dict[int, list[float]] = field(default_factory=dict, compare=False, repr=False)

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""
        rng = Random(f"mars/{seed}/{index}")
        kind = rng.choices(list(self.weights), list(self.weights.values()))[0]
        return replace(workload(kind).program(index, seed), arrival_s=self._arrival(index, seed) / self.rate_per_s)

    def _arrival(self, index: int, seed: int) -> float:
        """Return when program `index` arrives, in units of the mean gap."""
        known = self._gaps.setdefault(seed, [])
        while len(known) <= index:
            gap = Random(f"mars/{seed}/arrival/{len(known)}").expovariate(1.0)
            known.append((known[-1] if known else 0.0) + gap)
        return known[index]


def mix(regime: str, rate_per_s: float) -> Mix:
    """Return the programs of a regime."""
    long_ratio = REGIMES[regime]
    weights = {kind: weight * (1 - long_ratio) for kind, weight in SHORT_KINDS.items()} | {LONG_KIND: long_ratio}
    return Mix(f"mars-{regime}", rate_per_s, weights)


def scenario_of(point: Point, policy: str, seed: int) -> Scenario:
    """Return one replica on a GPU, as the policy's authors run it, and 8 cores for tools."""
    timing = profile(PROFILES[point.gpu])
    engine = EngineConfig.of(timing, block_size=BLOCK_TOKENS, max_num_batched_tokens=8192)
    engine = replace(engine, max_model_len=CONTEXT_LIMIT_TOKENS)
    if policy in (MARS, FEW_LONG):
        engine = replace(engine, scheduling_policy="priority", discipline=Mlfq)
    return Scenario(
        engine,
        loop="open",
        programs_count=PROGRAMS_COUNT,
        horizon_s=1e6,
        seed=seed,
        tools=ToolSettings(cpu_count=TOOL_CORES_COUNT),
        sample_interval_s=600.0,
        engines_retain=policy in (MARS, FEW_LONG),
    )


# --- runs -----------------------------------------------------------------------------------------

RUNS = RESULTS / "papers-mars-runs.json"


@dataclass(frozen=True)
class Task:
    """A pending run."""

    point: Point
    policy: str
    seed: int
    programs_count: int = PROGRAMS_COUNT

    @property
    def key(self) -> str:
        """Return its name among the stored runs."""
        return f"{self.point}|{self.policy}|{self.seed}"


def run_one(task: Task, go_on: GoOn) -> dict[str, float]:
    """Do one run; return its figures."""
    scenario = replace(scenario_of(task.point, task.policy, task.seed), programs_count=task.programs_count)
    programs = mix(task.point.regime, task.point.rate_per_s)
    contestant = Contestant.parse(POLICIES[task.policy])
    return figures_of(contestant.run(scenario, programs, on_progress=lambda _: go_on()))


def figures_of(result: RunResult) -> dict[str, float]:
    """Return the stored figures of a run."""
    latencies = result.program_latency
    in_time = {f"goodput_{each.alpha_ratio:g}": each.program_ratio for each in result.goodputs}
    turns = {f"turn_goodput_{each.alpha_ratio:g}": each.turn_ratio for each in result.goodputs}
    residences_s = sorted(program.residence_s for program in result.waits.programs)
    values = {
        "mean_s": latencies.mean_s,
        "p50_s": latencies.p50_s,
        "p90_s": nearest_rank(residences_s, 0.9),
        "p95_s": nearest_rank(residences_s, 0.95),
        "p99_s": latencies.p99_s,
        "hit_ratio": result.hit_ratio,
        "simulated_s": result.simulated_s,
        "first_token_p50_s": result.first_token_latency.p50_s,
        "first_token_p90_s": result.first_token_latency.p90_s,
        "first_token_p99_s": result.first_token_latency.p99_s,
        "tool_wait_s": result.tools.waited_for_cpu_s / max(1, result.tools.tool_count),
        **in_time,
        **turns,
    }
    return {name: round(value, 4) for name, value in values.items()}


# --- figures --------------------------------------------------------------------------------------


class Found:
    """The runs over the seeds that all points and policies have."""

    def __init__(self, kept: Mapping[str, dict[str, float]], seeds: Sequence[int]) -> None:
        self._kept = kept
        self.seeds = [
            seed
            for seed in seeds
            if all(Task(point, policy, seed).key in kept for point in POINTS for policy in POLICIES)
        ]

    def values(self, point: Point, policy: str, figure: str) -> list[float]:
        """Return a figure of each seed."""
        return [self._kept[Task(point, policy, seed).key][figure] for seed in self.seeds]

    def mean(self, point: Point, policy: str, figure: str) -> Interval:
        """Return a figure over the seeds."""
        return Interval.of(self.values(point, policy, figure))

    def best(self, point: Point, policies: Sequence[str]) -> str:
        """Return the policy with the lowest mean latency at a point."""
        return min(policies, key=lambda policy: self.mean(point, policy, "mean_s").mean)

    def speedup(self, point: Point, policy: str, others: Sequence[str]) -> Interval | None:
        """Return the best other policy's mean latency over this one's, seed by seed."""
        best = self.best(point, others)
        return Interval.of_ratios(self.values(point, best, "mean_s"), self.values(point, policy, "mean_s"))

    def goodput(self, regime: str, policy: str, figure: str = f"goodput_{ALPHA_RATIO:g}") -> Interval:
        """Return the part of a regime's programs (or turns) in time, all points together."""
        points = [point for point in POINTS if point.regime == regime]
        columns = [self.values(point, policy, figure) for point in points]
        return Interval.of([sum(each) / len(each) for each in zip(*columns, strict=True)])


def figure(runner: Runner, console: Console) -> dict[str, Any]:
    """Do and show the runs; return the figures for the results."""
    tasks = [Task(point, policy, seed) for seed in runner.seeds for point in POINTS for policy in POLICIES]
    found = Found(do_runs(run_one, tasks, RUNS, runner.jobs_count, console), runner.seeds)
    if not found.seeds:
        return {}
    rows = []
    for point in POINTS:
        row: dict[str, Any] = {"point": str(point), "best_published": found.best(point, PUBLISHED)}
        row["best_of_all"] = found.best(point, (*PUBLISHED, *OWN))
        row["mean_s"] = {policy: _text(found.mean(point, policy, "mean_s"), 1) for policy in POLICIES}
        for policy in (MARS, FEW_LONG, MARS_ON_STOCK):
            row[f"{policy}: x best published"] = _text(found.speedup(point, policy, PUBLISHED), 3)
            row[f"{policy}: x best of all"] = _text(found.speedup(point, policy, (*PUBLISHED, *OWN)), 3)
        row["in_time"] = {policy: _text(found.mean(point, policy, "goodput_3"), 3) for policy in POLICIES}
        rows.append(row)
    console.print(_table(found))
    goodputs = {regime: {policy: _text(found.goodput(regime, policy), 3) for policy in POLICIES} for regime in REGIMES}
    console.print(f"programs within {ALPHA_RATIO:g} times their ideal time:", goodputs)
    runner.in_time += in_time_rows(found)
    summary = {policy: _summary(found, policy) for policy in (MARS, FEW_LONG, MARS_ON_STOCK)}
    console.print(summary)
    save_plot("papers-mars", _plot(found))
    return {"seeds": found.seeds, "summary": summary, "goodput_3": goodputs, "points": rows}


def in_time_rows(found: Found) -> list[dict[str, str | int]]:
    """Return the parts of turns and programs in time for each regime and policy, all points together."""
    return [
        {
            "setting": regime,
            "programs_count": PROGRAMS_COUNT,
            "policy": policy,
            "turns": in_time(found.goodput(regime, policy, f"turn_goodput_{alpha:g}").mean for alpha in ALPHA_RATIOS),
            "programs": in_time(found.goodput(regime, policy, f"goodput_{alpha:g}").mean for alpha in ALPHA_RATIOS),
        }
        for regime in REGIMES
        for policy in POLICIES
    ]


def _summary(found: Found, policy: str) -> dict[str, Any]:
    """Return how often a policy is best, its largest speedup, and its goodput, against both sets of others."""
    summary: dict[str, Any] = {}
    for name, others in (("published", PUBLISHED), ("all", (*PUBLISHED, *OWN))):
        speedups = [found.speedup(point, policy, others) for point in POINTS]
        means = [each.mean for each in speedups if each is not None]
        best_goodput = {
            regime: max(found.goodput(regime, other).mean for other in others) or 1e-9 for regime in HEAVIEST
        }
        summary[name] = {
            "points_won": sum(mean > 1 for mean in means),
            "best_speedup": round(max(means), 3),
            "least_speedup": round(min(means), 3),
            "goodput_ratio": {
                regime: round(found.goodput(regime, policy).mean / best, 2) for regime, best in best_goodput.items()
            },
        }
    return summary


def _text(interval: Interval | None, digits: int) -> str:
    return "-" if interval is None else interval.text(digits)


def _table(found: Found) -> Table:
    made = Table(title=f"MARS: mean latency of programs (s), seeds {found.seeds}", box=box.SIMPLE_HEAD)
    for column in ("point", *POLICIES, "x published", "x all"):
        made.add_column(column, justify="left" if column == "point" else "right")
    for point in POINTS:
        means = [f"{found.mean(point, policy, 'mean_s').mean:.0f}" for policy in POLICIES]
        speedups = [found.speedup(point, MARS, PUBLISHED), found.speedup(point, MARS, (*PUBLISHED, *OWN))]
        made.add_row(str(point), *means, *(_text(speedup, 2) for speedup in speedups))
    return made


def _plot(found: Found) -> Figure:
    """Draw mean latency, and programs in time, against the rate: a column for each regime, a row for each GPU."""
    drawn = Figure(figsize=(9.6, 7.6), layout="constrained")
    panels = drawn.subplots(4, len(REGIMES), sharex="row")
    pairs: tuple[tuple[str, str, str], ...] = tuple(
        (gpu, figure_name, label)
        for figure_name, label in (("mean_s", "mean latency (s)"), ("goodput_3", "in time (%)"))
        for gpu in LOADS
    )
    for row, (gpu, figure_name, label) in zip(panels, pairs, strict=True):
        for axes, regime in zip(row, REGIMES, strict=True):
            scale = 100 if figure_name == "goodput_3" else 1
            for policy in POLICIES:
                intervals = [found.mean(Point(regime, gpu, load), policy, figure_name) for load in LOADS[gpu]]
                axes.errorbar(
                    LOADS[gpu],
                    [scale * each.mean for each in intervals],
                    yerr=[scale * (each.half_width or 0.0) for each in intervals],
                    color=COLOURS[policy],
                    label=policy,
                    marker="o",
                    markersize=3,
                    linewidth=1.8 if policy == MARS else 0.9,
                    capsize=2,
                )
            axes.set_title(f"{regime}, {gpu.upper()}", fontsize=8, loc="left")
            axes.tick_params(labelsize=7)
            if figure_name == "mean_s":
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, 100)
        row[0].set_ylabel(label, fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("rate / saturation", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return drawn
