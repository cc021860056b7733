"""Compares policies: each contestant at each load with each seed, on all cores.

Theory of operation
-------------------
Runs with one seed have the same programs, whoever schedules them, so contestants are paired: the ratio to the baseline
is taken seed by seed, and the common effect of a seed drops out of its interval (`intervals.py`).

A run is a fold without clock or threads (`run.py`), so runs go on processes of their own (`processes.py`). The first
seed comes first for all, then the second, so an interrupted comparison, or one ended by a run's error, still compares.
The figures do not depend on the number of processes.

`cap-best` is the best number of programs for `cap`. At each load every number of a geometric grid is run with a seed
that is not in the plan, and the one that comes nearest to its limit runs with all of those: choosing by the counted
runs would be biased. It is the result of an operator who tries all numbers beforehand; no other contestant is told as
much, except the oracle.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from thunderagent.errors import ConfigurationError, ThunderAgentError
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.comparison.processes import PROCESS_BYTES, GoOn, do_all
from thunderagent.simulator.comparison.results import (
    CAP_BEST,
    CapSweep,
    ComparisonPlan,
    ComparisonResult,
    PlannedRun,
    Run,
    thinned,
)
from thunderagent.simulator.figures.figures import RunResult, Sample
from thunderagent.simulator.runs.scenario import MEMORY_ADVICE, available_bytes, estimate_bytes


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """The progress of a comparison; `last` is the last finished run, None before the first."""

    done_count: int
    all_count: int
    last: PlannedRun | None


def compare(
    plan: ComparisonPlan, *, on_progress: Callable[[ComparisonProgress], None] | None = None
) -> ComparisonResult:
    """Run a comparison and return its figures; an interrupt (Ctrl-C) or a run's error ends it, and finished runs count.

    Raises ConfigurationError if its runs would not fit in memory. With one process everything runs in this one;
    otherwise the main module must be safe to import, as `multiprocessing` requires.
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
    """Return the number of processes of a comparison. Raises ConfigurationError if that many do not fit in memory."""
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
    """Do one run of a comparison, and check at each of its samples whether to go on."""
    scenario = plan.scenario_of(planned.programs_count, planned.seed)
    try:
        result = Contestant.parse(planned.policy).run(scenario, plan.workload, on_progress=lambda _: go_on())
    except ThunderAgentError as error:
        which = f"{planned.policy} with {planned.programs_count} programs and seed {planned.seed}"
        raise ThunderAgentError(f"{which} failed: {error}") from error
    if not result.complete and result.simulated_s < scenario.horizon_s:  # a run ends on Ctrl-C
        raise KeyboardInterrupt
    return replace(result, samples=_kept_samples(plan, planned, result.samples))


def _kept_samples(plan: ComparisonPlan, planned: PlannedRun, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    if plan.keep_samples or planned.seed == plan.seeds[0]:
        return samples
    if planned.seed not in plan.seeds or plan.scenario.replica_count == 1:
        return ()
    return tuple(replace(sample, replicas=()) for sample in thinned(samples))


def cap_grid(programs_count: int) -> list[int]:
    """Return the numbers of programs that `cap-best` tries: 1, 2, 3, 4, 6, 8, 12, ... and all of them."""
    powers = [2**exponent for exponent in range(programs_count.bit_length())]
    between = [power + power // 2 for power in powers[1:]]
    return sorted({number for number in (*powers, *between) if number < programs_count} | {programs_count})


class _Grid:
    """All runs of a comparison: pending ones, in order, and finished ones."""

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
        """Return the sort key of `todo`: a sweep is where the first seed is."""
        contestant_place = self._plan.contestants.index(planned.contestant)
        return self._seed_places.get(planned.seed, 0), -planned.programs_count, contestant_place

    def note(self, planned: PlannedRun, result: RunResult) -> None:
        """Add a finished run; the last of a sweep decides which runs of `cap-best` are still to do."""
        self.done[planned] = result
        if planned.contestant == CAP_BEST and planned.seed == self._plan.sweep_seed:
            best = self._best_of_sweep(planned.programs_count)
            if best is not None:
                found = [replace(planned, policy=best, seed=seed) for seed in self._plan.seeds]
                in_order = sorted([*self.todo, *found], key=self._place)
                self.todo.clear()
                self.todo.extend(in_order)

    def sweeps(self) -> Iterator[CapSweep]:
        """Yield finished sweeps."""
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
        """Yield finished runs, without those of a sweep that is incomplete or that were not its best."""
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
        """Return the best policy at a load; None until it is known."""
        for sweep in self.sweeps():
            if sweep.programs_count == programs_count:
                return f"cap:n={sweep.best_count}"
        return None
