"""Reproduce MARS: its orders of admission, its tails, Fig. 8, 11, 12 and 13: `scripts/bench papers mars-orders`, ...

Programs, engines, tools and rates are those of `mars.py` unless stated otherwise:

- *orders*: the paper's order of admission beside this project's, at all twenty points.
- *evictions*: Fig. 3A: the blocks that are evicted in each tenth of a run.
- *tails*: P90 and P95 of Fig. 7 and 10, and Fig. 3B: the time from a turn's arrival to its first token.
- *Fig. 8*: GPT-OSS-120B on one H100 NVL, whose context ends at 131,072 tokens: longer programs are drawn anew. Beside
  Continuum with its fixed and its learned time, as in the paper.
- *Fig. 11 and 12*: the whole of OpenHands on the H200. No OpenHands runs here: it adds time that the serving system
  does not see, increasingly irregular. Each tool takes `FRAMEWORK_S` more and is multiplied by a random number.
  Fig. 12 is the share of programs that end.
- *Fig. 13*: without one component each. Without the coordinator the engine serves turns as they come; without the
  control plane everybody is admitted; without the co-scheduler nothing is kept through a tool. Without the last the
  engine still shrinks chunks: its levels need that.

Runs are stored as those of `mars.py` are (`results/papers-mars-NAME-runs.json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.kept_runs import do_runs
from benchmarks.machine import RESULTS
from benchmarks.mars import (
    BLOCK_TOKENS,
    COLOURS,
    FEW_LONG,
    MARS,
    MARS_ON_STOCK,
    POINTS,
    POLICIES,
    PROGRAMS_COUNT,
    PUBLISHED,
    Mix,
    Point,
    figures_of,
    mix,
    scenario_of,
)
from benchmarks.simulated import Runner, save_plot
from thunderagent.policy_loader import load_policy
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.plans import ProgramPlan

GPT_OSS = "gpt-oss-120b-h100-nvl"
GPT_OSS_CONTEXT_TOKENS = 131_072
SHORT_REGIMES = {"S-ILR1": "125k", "S-ILR2": "167k", "S-ILR3": "220k"}
SHORT_SATURATION_PER_S = {"S-ILR1": 0.24, "S-ILR2": 0.22, "S-ILR3": 0.20}
"""Chosen: near where the first of them begin to queue."""

FRAMEWORK_S = 1.5
FRAMEWORK_SPREAD = 0.8
"""Standard deviation of the logarithm of the factor of a tool's time."""

WITHOUT_COORDINATOR = "no coordinator"
WITHOUT_CONTROL = "no control plane"
WITHOUT_COSCHEDULER = "no co-scheduler"
ABLATIONS = {
    MARS: POLICIES[MARS],
    WITHOUT_COORDINATOR: f"{POLICIES[MARS]}:order=fcfs",
    WITHOUT_CONTROL: "mars:admission=window:admission.n=1000000",
    WITHOUT_COSCHEDULER: f"{POLICIES[MARS]}:warm_ratio=0",
}
ALL_POLICIES = POLICIES | ABLATIONS
DEFAULT = "breakeven"
"""The default policy, beside the paper's."""
PAPER = {
    "evictions": "Fig. 3A: the baselines evict throughout; MARS at the first burst, then less",
    "tails": "Fig. 7: P90 better at 17 of 20 points, up to 3.37 times, P95 at 15, up to 1.29; Fig. 10: P95 at 20 of "
    "28, up to 1.34; Fig. 3B: all percentiles of the time to the first token over 1,000 s for the baselines",
    "fig8": "mean 1.59 to 7.56 times as fast as the better Continuum",
    "fig11": "mean 1.20 to 1.87 times as fast as the best baseline; P90 up to 1.34, P95 up to 1.28",
    "fig12": "completion rates as those of the baselines",
    "fig13": "mean 2 to 5 times without the coordinator, 1.5 to 3 without the control plane, 1.5 to 2 without the "
    "co-scheduler in ILR-3 and ILR-4",
}


@dataclass(frozen=True)
class Task:
    """A pending run."""

    figure: str
    regime: str
    gpu: str
    load: float
    policy: str
    seed: int
    programs_count: int = PROGRAMS_COUNT

    @property
    def key(self) -> str:
        """Return its name among the stored runs."""
        return f"{self.regime} {self.gpu} {self.load:g}|{self.policy}|{self.seed}"


@dataclass(frozen=True)
class Bounded:
    """Programs of a mix whose context never passes a model's; those that would are drawn anew."""

    inner: Mix
    limit_tokens: int

    @property
    def name(self) -> str:
        """Return the mix's."""
        return f"{self.inner.name}-short"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""
        plan = self.inner.program(index, seed)
        drawn_count = 0
        while context_tokens(plan) > self.limit_tokens:
            drawn_count += 1
            other = self.inner.program(PROGRAMS_COUNT * 100 * drawn_count + index, seed)
            plan = replace(other, program_id=plan.program_id, arrival_s=plan.arrival_s)
        return plan


@dataclass(frozen=True)
class Framed:
    """Programs of a mix in an agent framework: their tools take longer and vary more."""

    inner: Mix

    @property
    def name(self) -> str:
        """Return the mix's."""
        return f"{self.inner.name}-framework"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""
        rng = Random(f"framework/{seed}/{index}")
        plan = self.inner.program(index, seed)
        turns = [
            replace(turn, tool_s=turn.tool_s * rng.lognormvariate(0.0, FRAMEWORK_SPREAD) + FRAMEWORK_S)
            for turn in plan.turns
        ]
        return replace(plan, turns=tuple(turns))


def context_tokens(plan: ProgramPlan) -> int:
    """Return a program's final context in tokens."""
    return plan.shared_prefix_tokens + sum(turn.new_tokens + turn.output_tokens for turn in plan.turns)


def run_one(task: Task, go_on: GoOn) -> dict[str, float]:
    """Do one run; return its figures."""
    scenario, programs = _run_of(task)
    scenario = replace(scenario, programs_count=task.programs_count)
    if task.figure == "evictions":
        scenario = replace(scenario, sample_interval_s=EVICTIONS_SAMPLED_S)
    text = ALL_POLICIES[task.policy]
    if task.policy == WITHOUT_COORDINATOR:  # `Contestant` would give its engine priorities
        name, _, settings = text.partition(":")
        chosen = dict(pair.split("=") for pair in settings.split(":"))
        policy = load_policy(name, {key: float(value) if value.isdigit() else value for key, value in chosen.items()})
        result = simulate(scenario, programs, policy, on_progress=lambda _: go_on())
    else:
        result = Contestant.parse(text).run(scenario, programs, on_progress=lambda _: go_on())
    if task.figure == "evictions":
        return evicted_by_tenth(result)
    return figures_of(result) | {
        "completed_ratio": round(result.program_count / task.programs_count, 4),
        "failed_turns_count": float(result.failed_turn_count),
    }


EVICTIONS_SAMPLED_S = 5.0
TENTHS = tuple(f"evicted_blocks_{tenth}" for tenth in range(10))


def evicted_by_tenth(result: RunResult) -> dict[str, float]:
    """Return how many blocks were evicted in each tenth of a run, as far as samples tell, and how long it took."""
    counts = [0] * len(TENTHS)
    before = 0
    for sample in result.samples:
        evicted = sum(replica.lost_blocks_count for replica in sample.replicas)
        counts[min(len(TENTHS) - 1, int(len(TENTHS) * sample.now_s / result.simulated_s))] += evicted - before
        before = evicted
    return dict(zip(TENTHS, map(float, counts), strict=True)) | {"simulated_s": round(result.simulated_s, 1)}


def _run_of(task: Task) -> tuple[Scenario, Mix | Bounded | Framed]:
    """Return a run's engines and programs."""
    on_engine = MARS if task.policy in (WITHOUT_CONTROL, WITHOUT_COSCHEDULER, WITHOUT_COORDINATOR) else task.policy
    if task.figure == "fig8":
        scenario = scenario_of(Point("125k", "h100", 1.0), on_engine, task.seed)
        timing = profile(GPT_OSS)
        assert timing.kv_tokens is not None
        engine = replace(
            scenario.engine, timing=timing, kv_tokens=timing.kv_tokens, max_model_len=GPT_OSS_CONTEXT_TOKENS
        )
        rate_per_s = task.load * SHORT_SATURATION_PER_S[task.regime]
        programs = mix(SHORT_REGIMES[task.regime], rate_per_s)
        return replace(scenario, engine=engine), Bounded(programs, GPT_OSS_CONTEXT_TOKENS)
    point = Point(task.regime, task.gpu, task.load)
    scenario = scenario_of(point, on_engine, task.seed)
    if task.policy == WITHOUT_COORDINATOR:
        scenario = replace(scenario, engine=replace(scenario.engine, scheduling_policy="fcfs", discipline=None))
    if task.policy == WITHOUT_COSCHEDULER:
        scenario = replace(scenario, engines_retain=False)
    programs = mix(point.regime, point.rate_per_s)
    return scenario, Framed(programs) if task.figure == "fig11" else programs


# --- figures --------------------------------------------------------------------------------------

Place = tuple[str, str, float]
"""A regime, a GPU and a load."""


@dataclass(frozen=True)
class Plan:
    """A figure: its points and its policies."""

    name: str
    places: tuple[Place, ...]
    policies: tuple[str, ...]
    baselines: tuple[str, ...]
    """The policies of which the best is compared; in Fig. 13 that is `mars`, so its time is the numerator."""


REGIMES = ("125k", "167k", "220k", "263k")
ALL_PLACES = tuple((each.regime, each.gpu, each.load) for each in POINTS)
ORDERS = Plan("orders", ALL_PLACES, (MARS, FEW_LONG), (FEW_LONG,))
TAILS = Plan("tails", ALL_PLACES, (MARS, *PUBLISHED, DEFAULT), PUBLISHED)
EVICTIONS = Plan("evictions", (("263k", "h100", 2.0),), (MARS, *PUBLISHED, DEFAULT), PUBLISHED)
FIG8 = Plan(
    "fig8",
    tuple((regime, "gpt-oss", load) for regime in SHORT_REGIMES for load in (1.0, 2.0)),
    (MARS, MARS_ON_STOCK, "continuum", "continuum-fixed", DEFAULT),
    ("continuum", "continuum-fixed"),
)
FIG11 = Plan(
    "fig11",
    tuple((regime, "h200", load) for regime in REGIMES for load in (1.5,)),
    (MARS, MARS_ON_STOCK, *PUBLISHED[:-1], DEFAULT),
    PUBLISHED[:-1],
)
FIG13 = Plan(
    "fig13", tuple((regime, "h100", load) for regime in REGIMES for load in (1.0, 2.0)), (*ABLATIONS, DEFAULT), (MARS,)
)


class Found:
    """The stored runs of a plan over its complete seeds."""

    def __init__(self, plan: Plan, kept: Mapping[str, dict[str, float]], seeds: Sequence[int]) -> None:
        self.plan = plan
        self._kept = kept
        tasks = {seed: tasks_of(plan, seed) for seed in seeds}
        self.seeds = [seed for seed in seeds if all(task.key in kept for task in tasks[seed])]

    def values(self, place: Place, policy: str, figure: str) -> list[float]:
        """Return a figure of each seed."""
        return [self._kept[Task(self.plan.name, *place, policy, seed).key][figure] for seed in self.seeds]

    def mean(self, place: Place, policy: str, figure: str) -> Interval:
        """Return a figure over the seeds."""
        return Interval.of(self.values(place, policy, figure))

    def ratio(self, place: Place, policy: str, figure: str = "mean_s") -> Interval | None:
        """Return the best baseline's figure over this policy's, seed by seed."""
        best = min(self.plan.baselines, key=lambda name: self.mean(place, name, figure).mean)
        return Interval.of_ratios(self.values(place, best, figure), self.values(place, policy, figure))


def tasks_of(plan: Plan, seed: int) -> list[Task]:
    """Return the runs of one seed."""
    return [Task(plan.name, *place, policy, seed) for place in plan.places for policy in plan.policies]


def figure_of(plan: Plan, runner: Runner, console: Console) -> dict[str, Any]:
    """Do and show a figure's runs; return its figures for the results."""
    tasks = [task for seed in runner.seeds for task in tasks_of(plan, seed)]
    path = RESULTS / f"papers-mars-{plan.name}-runs.json"
    found = Found(plan, do_runs(run_one, tasks, path, runner.jobs_count, console), runner.seeds)
    if not found.seeds:
        return {}
    rows = [_row(found, place) for place in plan.places]
    console.print(_table(found, rows))
    save_plot(f"papers-mars-{plan.name}", _plot(found))
    own = [policy for policy in plan.policies if plan is FIG13 or policy not in plan.baselines]
    summary = {
        policy: {
            figure: _range([each for place in plan.places if (each := found.ratio(place, policy, figure))])
            for figure in ("mean_s", "p90_s", "p95_s")
        }
        for policy in own
    }
    console.print(summary)
    return {"paper": PAPER.get(plan.name), "seeds": found.seeds, "best baseline / it": summary, "places": rows}


FIRST_TOKENS = ("first_token_p50_s", "first_token_p90_s", "first_token_p99_s")
FIGURES = dict.fromkeys(("mean_s", "p90_s", "p95_s", *FIRST_TOKENS), 1) | {"goodput_3": 3, "completed_ratio": 3}
"""What is stored of a place, with its digits."""


def _row(found: Found, place: Place) -> dict[str, Any]:
    row: dict[str, Any] = {"place": " ".join(str(each) for each in place)}
    for figure, digits in FIGURES.items():
        row[figure] = {policy: found.mean(place, policy, figure).text(digits) for policy in found.plan.policies}
    ratios = {policy: found.ratio(place, policy) for policy in found.plan.policies}
    row["best baseline / it"] = {name: each.text(2) if each else "-" for name, each in ratios.items()}
    return row


def _range(ratios: Sequence[Interval]) -> str:
    means = [each.mean for each in ratios]
    return f"{min(means):.2f} to {max(means):.2f}, over 1 at {sum(mean > 1 for mean in means)} of {len(means)}"


def _table(found: Found, rows: Sequence[Mapping[str, Any]]) -> Table:
    made = Table(title=f"MARS, {found.plan.name}: mean time of programs (s), seeds {found.seeds}", box=box.SIMPLE_HEAD)
    for column in ("place", *found.plan.policies, *(f"x {policy}" for policy in found.plan.policies)):
        made.add_column(column, justify="left" if column == "place" else "right")
    for row in rows:
        made.add_row(row["place"], *row["mean_s"].values(), *row["best baseline / it"].values())
    return made


def _plot(found: Found) -> Figure:
    """Draw mean and 95th percentile against the load: a column for each regime and GPU."""
    plan = found.plan
    columns = list(dict.fromkeys((regime, gpu) for regime, gpu, _ in plan.places))
    drawn = Figure(figsize=(max(5.0, 1.9 * len(columns)), 4.6), layout="constrained")
    panels = drawn.subplots(2, len(columns), sharex="col", squeeze=False)
    colours = {**COLOURS, **dict(zip(list(ABLATIONS)[1:], ("#1c88cf", "#009e73", "#e69f00"), strict=True))}
    for row, (figure, label) in zip(panels, (("mean_s", "mean time (s)"), ("p95_s", "P95 (s)")), strict=True):
        for axes, (regime, gpu) in zip(row, columns, strict=True):
            loads = [load for at, on, load in plan.places if (at, on) == (regime, gpu)]
            for policy in plan.policies:
                means = [found.mean((regime, gpu, load), policy, figure).mean for load in loads]
                axes.plot(loads, means, color=colours[policy], label=policy, marker="o", markersize=3)
            axes.set_yscale("log")
            axes.set_title(f"{regime}, {gpu}", fontsize=8, loc="left")
            axes.tick_params(labelsize=7, which="both")
        row[0].set_ylabel(label, fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("rate / saturation", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return drawn


def orders(runner: Runner, console: Console) -> dict[str, Any]:
    """Compare the paper's order of admission with this project's."""
    return figure_of(ORDERS, runner, console)


def tails(runner: Runner, console: Console) -> dict[str, Any]:
    """Make P90 and P95 of Fig. 7 and 10, and Fig. 3B."""
    return figure_of(TAILS, runner, console)


def evictions(runner: Runner, console: Console) -> dict[str, Any]:
    """Make Fig. 3A: full blocks evicted in each tenth of a run, for each program."""
    plan, (place,) = EVICTIONS, EVICTIONS.places
    tasks = [task for seed in runner.seeds for task in tasks_of(plan, seed)]
    path = RESULTS / f"papers-mars-{plan.name}-runs.json"
    found = Found(plan, do_runs(run_one, tasks, path, runner.jobs_count, console), runner.seeds)
    if not found.seeds:
        return {}
    evicted = {
        policy: [round(found.mean(place, policy, tenth).mean / PROGRAMS_COUNT, 1) for tenth in TENTHS]
        for policy in plan.policies
    }
    console.print(evicted)
    drawn = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = drawn.subplots()
    for policy, counts in evicted.items():
        axes.plot(range(len(counts)), counts, color=COLOURS[policy], label=policy, marker="o", markersize=3)
    axes.set_xlabel("tenth of the run", fontsize=8)
    axes.set_ylabel("blocks evicted for each program", fontsize=8)
    axes.set_yscale("log")
    axes.legend(fontsize=7, frameon=False)
    save_plot(f"papers-mars-{plan.name}", drawn)
    return {
        "paper": PAPER[plan.name],
        "seeds": found.seeds,
        "place": " ".join(str(each) for each in place),
        "block_tokens": BLOCK_TOKENS,
        "evicted blocks for each program by tenth": evicted,
    }


def fig8(runner: Runner, console: Console) -> dict[str, Any]:
    """Make Fig. 8: a larger model."""
    return figure_of(FIG8, runner, console)


def fig11(runner: Runner, console: Console) -> dict[str, Any]:
    """Make Fig. 11 and 12: a whole agent framework, and the programs that end."""
    return figure_of(FIG11, runner, console)


def fig13(runner: Runner, console: Console) -> dict[str, Any]:
    """Make Fig. 13: without one component each."""
    return figure_of(FIG13, runner, console)
