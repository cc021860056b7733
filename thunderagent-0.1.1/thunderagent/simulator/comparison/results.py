"""A comparison's plan, its finished runs, and their figures in rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thunderagent.errors import ConfigurationError
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.figures.figures import RunResult, Sample
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.clients import Supply
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.plans import Workload

CAP_BEST = "cap-best"

COSTS = ("decode", "prefill", "recompute", "caching", "unused")
"""The five costs of the ledger, useful work first."""

KEPT_SAMPLES_COUNT = 120
"""Limit of a run's samples in a report."""


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """The plan of a comparison. Raises ConfigurationError if impossible.

    `scenario` is that of every run, except for its seed and `programs_count`; the events of runs are not kept.
    `contestants` are texts for `Contestant.parse`, or `cap-best`. Ratios are to `baseline`, or to the first of the
    contestants. `process_count` None: one per core, as far as memory allows. `keep_samples` False saves memory: for
    seeds other than the first only what a plot of imbalance needs is kept.
    """

    scenario: Scenario
    workload: Workload
    contestants: tuple[str, ...]
    programs_counts: tuple[int, ...]
    seeds: tuple[int, ...] = tuple(range(10))
    baseline: str = ""
    process_count: int | None = None
    keep_samples: bool = True

    def __post_init__(self) -> None:
        for what, values in (
            ("policies", self.contestants),
            ("numbers of programs", self.programs_counts),
            ("seeds", self.seeds),
        ):
            if not values:
                raise ConfigurationError(f"nothing to compare: no {what}")
            if twice := [value for value, count in Counter(values).items() if count > 1]:
                raise ConfigurationError(f"{what}: {twice[0]} is there twice")
        policies = [Contestant.parse(text) for text in self.contestants if text != CAP_BEST]
        if not self.baseline:
            object.__setattr__(self, "baseline", self.contestants[0])
        if self.baseline not in self.contestants:
            raise ConfigurationError(
                f"the baseline {self.baseline!r} is none of the policies: {', '.join(self.contestants)}"
            )
        if self.process_count is not None and self.process_count < 1:
            raise ConfigurationError(f"a comparison needs at least 1 process, got {self.process_count}")
        for programs_count in self.programs_counts:
            scenario = self.scenario_of(programs_count, self.seeds[0])
            Supply(scenario, self.workload).next()
            for policy in policies:
                policy.prepare(scenario, self.workload)

    def scenario_of(self, programs_count: int, seed: int) -> Scenario:
        """Return the scenario of one run."""
        return replace(self.scenario, programs_count=programs_count, seed=seed, keep_events=False)

    @property
    def sweep_seed(self) -> int:
        """Return the seed of the sweeps of `cap-best`: none of those that count."""
        return max(self.seeds) + 1


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A pending run: `policy` is the text of what runs, which for `cap-best` is some `cap:n=...`."""

    contestant: str
    policy: str
    programs_count: int
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    contestant: str
    policy: str
    programs_count: int
    seed: int
    result: RunResult


@dataclass(frozen=True, slots=True)
class CapSweep:
    """What `cap-best` tried at a load, with the seed of sweeps: the score of each number of programs.

    The score is the ratio of its limit that a run reached: turns per minute would favour a cap that lets everybody
    begin and nobody grow. For a run without a limit it is turns per minute all the same.
    """

    programs_count: int
    tried: tuple[tuple[int, float], ...]

    @property
    def best_count(self) -> int:
        """Return the best number; of equal ones the smallest."""
        return max(self.tried, key=lambda each: (each[1], -each[0]))[0]


@dataclass(frozen=True, slots=True)
class Row:
    """A contestant at a load, over all finished seeds.

    `ratio` is turns per minute over those of the baseline with the same seed; None if the baseline has none. The limit
    is min(L1, L2, L3) of exactly the turns that each run finished; None without a bound. `costs` are ratios of the
    available memory: capacity times time. `turn_goodputs` and `program_goodputs` are the ratios of them that took at
    most each of `ALPHA_RATIOS` times their ideal time, `goodput_per_hour` how many programs did within the last.
    """

    contestant: str
    policy: str
    programs_count: int
    turns_per_min: Interval
    ratio: Interval | None
    hit_ratio: Interval
    turn_mean_s: Interval
    turn_p50_s: Interval
    turn_p99_s: Interval
    held_p99_s: Interval
    program_mean_s: Interval
    turn_goodputs: tuple[Interval, ...]
    program_goodputs: tuple[Interval, ...]
    goodput_per_hour: Interval
    imbalance_ratio: Interval
    idle_held_ratio: Interval
    limit_per_min: Interval | None
    limit_ratio: Interval | None
    limited_by: str
    failed_turn_count: int
    preemption_count: int
    costs: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The result of a comparison: all finished runs, by contestant, load and seed, each in the plan's order.

    `done_count` includes the runs of sweeps. `stopped_by` is the reason for an early end; empty if there is none.
    """

    plan: ComparisonPlan
    runs: tuple[Run, ...]
    sweeps: tuple[CapSweep, ...]
    done_count: int
    planned_count: int
    stopped_by: str = ""

    @property
    def complete(self) -> bool:
        """Say whether all runs are done, and each of them is complete."""
        return not self.stopped_by and all(run.result.complete for run in self.runs)

    @property
    def programs_counts(self) -> tuple[int, ...]:
        """Return the loads with at least one run, the lightest first."""
        return tuple(sorted({run.programs_count for run in self.runs}))

    def runs_of(self, contestant: str, programs_count: int) -> tuple[Run, ...]:
        """Return the runs of a contestant at a load, one for each finished seed."""
        return tuple(run for run in self.runs if (run.contestant, run.programs_count) == (contestant, programs_count))

    def rows(self) -> tuple[Row, ...]:
        """Return the figures of each contestant at each load, the lightest first."""
        return tuple(
            self.row_of(runs)
            for programs_count in self.programs_counts
            for contestant in self.plan.contestants
            if (runs := self.runs_of(contestant, programs_count))
        )

    def row_of(self, runs: tuple[Run, ...]) -> Row:
        """Return the figures of runs of one contestant at one load, at least one."""
        first = runs[0]

        def over_seeds(figure: Callable[[RunResult], float]) -> Interval:
            return Interval.of([figure(run.result) for run in runs])

        limits = [run.result.bounds.limit_per_s for run in runs if run.result.bounds is not None]
        is_limited = len(limits) == len(runs) and all(map(math.isfinite, limits))
        limiting = {run.result.bounds.limited_by for run in runs if run.result.bounds is not None}
        return Row(
            contestant=first.contestant,
            policy=first.policy,
            programs_count=first.programs_count,
            turns_per_min=over_seeds(lambda result: result.turns_per_min_count),
            ratio=self._ratio(runs),
            hit_ratio=over_seeds(lambda result: result.hit_ratio),
            turn_mean_s=over_seeds(lambda result: result.turn_latency.mean_s),
            turn_p50_s=over_seeds(lambda result: result.turn_latency.p50_s),
            turn_p99_s=over_seeds(lambda result: result.turn_latency.p99_s),
            held_p99_s=over_seeds(lambda result: result.held.p99_s),
            program_mean_s=over_seeds(lambda result: result.program_latency.mean_s),
            turn_goodputs=_over_each([[each.turn_ratio for each in run.result.goodputs] for run in runs]),
            program_goodputs=_over_each([[each.program_ratio for each in run.result.goodputs] for run in runs]),
            goodput_per_hour=over_seeds(lambda result: result.goodputs[-1].programs_per_hour_count),
            imbalance_ratio=over_seeds(lambda result: result.imbalance_mean_ratio),
            idle_held_ratio=over_seeds(lambda result: result.idle_held_ratio),
            limit_per_min=Interval.of([limit * 60 for limit in limits]) if is_limited else None,
            limit_ratio=over_seeds(lambda result: result.limit_ratio) if is_limited else None,
            limited_by=" ".join(sorted(limiting)) if is_limited else "",
            failed_turn_count=sum(run.result.failed_turn_count for run in runs),
            preemption_count=sum(replica.preemption_count for run in runs for replica in run.result.replicas),
            costs={name: Interval.of([cost_parts(run.result)[name] for run in runs]) for name in COSTS},
        )

    def _ratio(self, runs: tuple[Run, ...]) -> Interval | None:
        """Return the ratio to the baseline over the seeds that both have."""
        baselines = {run.seed: run for run in self.runs_of(self.plan.baseline, runs[0].programs_count)}
        paired = [(run, baselines[run.seed]) for run in runs if run.seed in baselines]
        return Interval.of_ratios(
            [run.result.turns_per_min_count for run, _ in paired],
            [baseline.result.turns_per_min_count for _, baseline in paired],
        )


def _over_each(figures: Sequence[Sequence[float]]) -> tuple[Interval, ...]:
    """Return several figures over the seeds, each of which has all of them."""
    return tuple(Interval.of(values) for values in zip(*figures, strict=True))


def cost_parts(result: RunResult) -> dict[str, float]:
    """Return each of the five costs as a ratio of the available memory in all replicas: capacity times time."""
    whole_token_s = sum(replica.capacity_tokens for replica in result.replicas) * result.measured_s or 1.0
    return {
        name: sum(getattr(replica.costs, f"{name}_token_s") for replica in result.replicas) / whole_token_s
        for name in COSTS
    }


def thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return every second, fourth, eighth, ... sample: at most `KEPT_SAMPLES_COUNT`, evenly spaced.

    So of two runs the shorter one keeps all the times that the longer one keeps, as far as it lasts.
    """
    step_count = 1
    while len(samples) > step_count * KEPT_SAMPLES_COUNT:
        step_count *= 2
    return samples[::step_count]
