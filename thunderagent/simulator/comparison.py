"""Compare policies: each contestant at each load with each seed, on all cores, and what came of it.

Theory of operation
-------------------
Runs with one seed have the same programs, whoever schedules them, so contestants are paired: the ratio to the baseline
is taken seed by seed, and what seeds have in common falls out of its interval (`intervals.py`).

A run is a fold without clock or threads (`run.py`), so runs go on processes of their own (`processes.py`). The first
seed comes first for all, then the second, so a comparison that is interrupted, or ended by an error of a run, still
compares. The figures do not depend on how many processes there are.

`cap-best` is whatever number of programs is best for `cap`: at each load every number of a geometric grid is run with a
seed that is none of the plan's, and the one that comes nearest to its limit runs with all of those: a run that chose
itself would be too good. It is what an operator gets who tries them all beforehand, so no other contestant is told as
much, but for the oracle.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from thunderagent.errors import ConfigurationError, ThunderAgentError
from thunderagent.simulator.clients import Supply
from thunderagent.simulator.contestants import Contestant
from thunderagent.simulator.intervals import Interval
from thunderagent.simulator.plans import Workload
from thunderagent.simulator.processes import PROCESS_BYTES, GoOn, do_all
from thunderagent.simulator.report import RunResult, Sample
from thunderagent.simulator.scenario import MEMORY_ADVICE, Scenario, available_bytes, estimate_bytes

CAP_BEST = "cap-best"

COSTS = ("decode", "prefill", "recompute", "caching", "unused")
"""The five costs of the ledger, useful work first."""

KEPT_SAMPLES_COUNT = 120
"""Samples of a run that a report has, at most."""


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Say what is compared. Raises ConfigurationError for what is impossible.

    `scenario` is that of every run, but for its seed and `programs_count`; the events of runs are not kept.
    `contestants` are texts that `Contestant.parse` reads, or `cap-best`. Ratios are to `baseline`, or to the first of
    the contestants. `process_count` None: one for each core, as far as memory reaches. `keep_samples` False spares
    memory: of other seeds than the first there is only what a plot of imbalance needs.
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
        """Return the seed of the sweeps of `cap-best`: none of those whose runs count."""
        return max(self.seeds) + 1


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run that is to be done: `policy` is the text of what runs, which for `cap-best` is some `cap:n=...`."""

    contestant: str
    policy: str
    programs_count: int
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run that is done."""

    contestant: str
    policy: str
    programs_count: int
    seed: int
    result: RunResult


@dataclass(frozen=True, slots=True)
class CapSweep:
    """What `cap-best` tried at a load, with the seed of sweeps: each number of programs with how good it was.

    That is the part of its limit that a run reached: turns a minute would praise a cap that lets everybody begin and
    nobody grow. Where nothing limits a run it is turns a minute all the same.
    """

    programs_count: int
    tried: tuple[tuple[int, float], ...]

    @property
    def best_count(self) -> int:
        """Return the best number; of equal ones the smallest."""
        return max(self.tried, key=lambda each: (each[1], -each[0]))[0]


@dataclass(frozen=True, slots=True)
class Row:
    """A contestant at a load, over all seeds that were run.

    `ratio` is turns a minute over those of the baseline with the same seed; None if the baseline has none. The limit is
    min(L1, L2, L3) of the very turns that each run finished; None where nothing bounds them. `costs` are parts of the
    memory that there was: capacity times time. `turn_goodputs` and `program_goodputs` are the parts of them that took
    no longer than each of `ALPHA_RATIOS` times their ideal time, `goodput_per_hour` how many programs did within the
    last.
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
    limit_per_min: Interval | None
    limit_ratio: Interval | None
    limited_by: str
    failed_turn_count: int
    preemption_count: int
    costs: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """What a comparison came to: all runs that are done, by contestant, load and seed, each in the plan's order.

    `done_count` counts the runs of sweeps too. `stopped_by` says in words what ended it early; empty if nothing did.
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
        """Return the loads of which there is at least one run, the lightest first."""
        return tuple(sorted({run.programs_count for run in self.runs}))

    def runs_of(self, contestant: str, programs_count: int) -> tuple[Run, ...]:
        """Return the runs of a contestant at a load, one for each seed that is done."""
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
    """Return each of the five costs as a part of the memory that there was, in all replicas: capacity times time."""
    whole_token_s = sum(replica.capacity_tokens for replica in result.replicas) * result.measured_s or 1.0
    return {
        name: sum(getattr(replica.costs, f"{name}_token_s") for replica in result.replicas) / whole_token_s
        for name in COSTS
    }


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """How far a comparison is, for whoever watches it; `last` is the run that was done last, None before any is."""

    done_count: int
    all_count: int
    last: PlannedRun | None


def compare(
    plan: ComparisonPlan, *, on_progress: Callable[[ComparisonProgress], None] | None = None
) -> ComparisonResult:
    """Run a comparison and return its figures; an interrupt (Ctrl-C) or a run's error ends it, and what is done counts.

    Raises ConfigurationError if its runs would not fit in memory. With one process everything runs in this one;
    otherwise the module that was started must be safe to import, as `multiprocessing` says.
    """
    process_count = processes_that_fit(plan)
    grid = _Grid(plan)

    def report(last: PlannedRun | None) -> None:
        if on_progress is not None:
            on_progress(ComparisonProgress(len(grid.done), grid.all_count, last))

    def note(planned: PlannedRun, result: RunResult) -> None:
        grid.note(planned, result)
        report(planned)

    report(None)
    stopped_by = do_all(partial(_run_one, plan), grid.todo, note, process_count)
    return ComparisonResult(plan, tuple(grid.runs()), tuple(grid.sweeps()), len(grid.done), grid.all_count, stopped_by)


def processes_that_fit(plan: ComparisonPlan) -> int:
    """Return on how many processes a comparison runs. Raises ConfigurationError if that many do not fit in memory."""
    scenario = plan.scenario_of(max(plan.programs_counts), plan.seeds[0])
    needed_bytes = estimate_bytes(scenario, plan.workload) + PROCESS_BYTES
    free_bytes = available_bytes()
    wanted_count = plan.process_count or min(len(os.sched_getaffinity(0)), _Grid(plan).all_count)
    fitting_count = wanted_count if free_bytes is None else min(wanted_count, free_bytes // needed_bytes)
    if fitting_count < (plan.process_count or 1):
        raise ConfigurationError(
            f"{wanted_count} runs at a time would need about {wanted_count * needed_bytes / 2**30:.1f} GiB of memory, "
            f"and {(free_bytes or 0) / 2**30:.1f} GiB are free: that is enough for {fitting_count}; {MEMORY_ADVICE}"
        )
    return fitting_count


def _run_one(plan: ComparisonPlan, planned: PlannedRun, go_on: GoOn) -> RunResult:
    """Do one run of a comparison, and ask at each of its samples whether to go on."""
    scenario = plan.scenario_of(planned.programs_count, planned.seed)
    try:
        result = Contestant.parse(planned.policy).run(scenario, plan.workload, on_progress=lambda _: go_on())
    except ThunderAgentError as error:
        which = f"{planned.policy} with {planned.programs_count} programs and seed {planned.seed}"
        raise ThunderAgentError(f"{which} failed: {error}") from error
    if not result.complete and result.simulated_s < scenario.horizon_s:  # a run takes Ctrl-C for its end
        raise KeyboardInterrupt
    return replace(result, samples=_kept_samples(plan, planned, result.samples))


def _kept_samples(plan: ComparisonPlan, planned: PlannedRun, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    if plan.keep_samples or planned.seed == plan.seeds[0]:
        return samples
    if planned.seed not in plan.seeds or plan.scenario.replica_count == 1:
        return ()
    return tuple(replace(sample, replicas=()) for sample in thinned(samples))


def thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return every second, third, ... sample: at most `KEPT_SAMPLES_COUNT`, equally far from one another."""
    return samples[:: max(1, math.ceil(len(samples) / KEPT_SAMPLES_COUNT))]


def cap_grid(programs_count: int) -> list[int]:
    """Return the numbers of programs that `cap-best` tries: 1, 2, 3, 4, 6, 8, 12, ... and all of them."""
    powers = [2**exponent for exponent in range(programs_count.bit_length())]
    between = [power + power // 2 for power in powers[1:]]
    return sorted({number for number in (*powers, *between) if number < programs_count} | {programs_count})


class _Grid:
    """All runs of a comparison: those to do, in their order, and those done."""

    def __init__(self, plan: ComparisonPlan) -> None:
        self._plan = plan
        self.done: dict[PlannedRun, RunResult] = {}
        self.todo: deque[PlannedRun] = deque()
        self.all_count = 0
        self._seed_places = {seed: place for place, seed in enumerate(plan.seeds)}
        for seed in plan.seeds:
            for programs_count in sorted(plan.programs_counts, reverse=True):  # the longest runs first
                self._plan_runs(programs_count, seed)

    def _plan_runs(self, programs_count: int, seed: int) -> None:
        for contestant in self._plan.contestants:
            if contestant != CAP_BEST:
                self.todo.append(PlannedRun(contestant, contestant, programs_count, seed))
                self.all_count += 1
            elif seed == self._plan.seeds[0]:
                sweep = self._sweep(programs_count)
                self.todo.extend(sweep)
                self.all_count += len(sweep) + len(self._plan.seeds)

    def _sweep(self, programs_count: int) -> list[PlannedRun]:
        return [
            PlannedRun(CAP_BEST, f"cap:n={number}", programs_count, self._plan.sweep_seed)
            for number in cap_grid(programs_count)
        ]

    def _place(self, planned: PlannedRun) -> tuple[int, int, int]:
        """Return what the order of `todo` is by: a sweep is where the first seed is."""
        contestant_place = self._plan.contestants.index(planned.contestant)
        return self._seed_places.get(planned.seed, 0), -planned.programs_count, contestant_place

    def note(self, planned: PlannedRun, result: RunResult) -> None:
        """Note a run that is done; the last of a sweep says which runs of `cap-best` are still to do."""
        self.done[planned] = result
        if planned.contestant == CAP_BEST and planned.seed == self._plan.sweep_seed:
            best = self._best_of_sweep(planned.programs_count)
            if best is not None:
                found = [replace(planned, policy=best, seed=seed) for seed in self._plan.seeds]
                in_order = sorted([*self.todo, *found], key=self._place)
                self.todo.clear()
                self.todo.extend(in_order)

    def sweeps(self) -> Iterator[CapSweep]:
        """Give the sweeps that are done."""
        if CAP_BEST not in self._plan.contestants:
            return
        for programs_count in self._plan.programs_counts:
            runs = [(planned, self.done.get(planned)) for planned in self._sweep(programs_count)]
            tried = [
                (number, result.limit_ratio or result.turns_per_min_count)
                for number, (_, result) in zip(cap_grid(programs_count), runs, strict=True)
                if result is not None
            ]
            if len(tried) == len(runs):
                yield CapSweep(programs_count, tuple(tried))

    def runs(self) -> Iterator[Run]:
        """Give the runs that are done, without those of a sweep that were not the best, or not all there."""
        for contestant in self._plan.contestants:
            for programs_count in self._plan.programs_counts:
                policy = contestant
                if contestant == CAP_BEST:
                    best = self._best_of_sweep(programs_count)
                    if best is None:
                        continue
                    policy = best
                for seed in self._plan.seeds:
                    result = self.done.get(PlannedRun(contestant, policy, programs_count, seed))
                    if result is not None:
                        yield Run(contestant, policy, programs_count, seed, result)

    def _best_of_sweep(self, programs_count: int) -> str | None:
        """Return the policy that was the best at a load; None before that is known."""
        for sweep in self.sweeps():
            if sweep.programs_count == programs_count:
                return f"cap:n={sweep.best_count}"
        return None
