"""Takes notes during a run, and computes its figures at the end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from thunderagent.programs.messages import Decision, Event
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.accounts import Costs
from thunderagent.simulator.engine.records import FinishedRequest
from thunderagent.simulator.figures.bounds import Bounds, Engines, TurnShape, bounds, makespan_bound_s
from thunderagent.simulator.figures.figures import (
    Goodput,
    Percentiles,
    ReplicaFigures,
    ReplicaSample,
    RunResult,
    Sample,
    ToolFigures,
    TurnLog,
    difference,
    nearest_rank,
    quantiles_s,
)
from thunderagent.simulator.figures.restores import RestoreFigures
from thunderagent.simulator.figures.waits import ProgramWait, Waits
from thunderagent.simulator.runs.clients import RunningProgram
from thunderagent.simulator.runs.replicas import SimulatedReplica
from thunderagent.simulator.runs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run; `hit_ratio` is that of all turns so far."""

    now_s: float
    turn_count: int
    program_count: int
    active_count: int
    held_count: int
    hit_ratio: float


class Tally:
    """The notes of one run."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, replicas: Mapping[str, SimulatedReplica]) -> None:
        self.turns = TurnLog()
        self._scenario = scenario
        self._scheduler = scheduler
        self._replicas = replicas
        self._replica_numbers = {replica_id: number for number, replica_id in enumerate(replicas)}
        self._shapes: list[TurnShape] = []  # of all turns in the log
        self._engines = Engines.of(scenario.engine, scenario.replica_count)
        self.ended: list[ProgramWait] = []
        """All programs that ran to their last turn, in the order of their ends."""
        self._failed_count = 0
        self._samples: list[Sample] = []
        self._begin_costs = {replica_id: Costs() for replica_id in replicas}
        self._begin_idle_s = dict.fromkeys(replicas, 0.0)
        self._program_parts = array("d")  # of each turn in the log: its part of its program
        self._begin_preemption_counts = dict.fromkeys(replicas, 0)
        self._prompt_tokens = self._cached_tokens = 0

    def progress(self, now_s: float) -> Progress:
        """Return the run's progress."""
        return Progress(
            now_s,
            turn_count=len(self.turns),
            program_count=len(self.ended),
            active_count=self._scheduler.book.active_count,
            held_count=self._scheduler.ledger.waiting_count,
            hit_ratio=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )

    def begin(self) -> None:
        """Note that the warm-up is over."""
        self._begin_costs = self._costs(self._scenario.warmup_s)
        self._begin_idle_s = self._idle_s()
        self._begin_preemption_counts = {name: replica.preemption_count for name, replica in self._replicas.items()}

    def finished(self, program: RunningProgram, finished: FinishedRequest, shape: TurnShape) -> None:
        """Note a finished turn of a program."""
        self._shapes.append(shape)
        self._program_parts.append(1.0 / len(program.plan.turns))
        program.wait.add_turn(shape.prompt_tokens, program.granted_s - program.arrived_s)
        program.wait.alone_s += self._engines.alone_s(shape) + (shape.gap_s or 0.0)
        self._prompt_tokens += finished.prompt_tokens
        self._cached_tokens += finished.cached_tokens
        self.turns.add(
            program.arrived_s,
            program.granted_s,
            finished.first_token_s,
            finished.finished_s,
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            replica_count=self._replica_numbers[program.replica_id],
        )

    def failed(self) -> None:
        """Note a turn that was refused or rejected."""
        self._failed_count += 1

    def program_ended(self, program: RunningProgram, now_s: float) -> None:
        """Add an ended program."""
        wait = program.wait
        wait.started_s, wait.ended_s = program.started_s, now_s
        self.ended.append(wait)

    def sample(self, now_s: float) -> None:
        """Sample every replica."""
        accounts = self._scheduler.ledger.accounts
        samples = []
        for replica_id, replica in self._replicas.items():
            stats = replica.stats
            samples.append(
                ReplicaSample(
                    demand_tokens=accounts[replica_id].demand_tokens,
                    used_tokens=stats.used_block_count * self._scenario.engine.block_size,
                    running_count=stats.running_count,
                    waiting_count=stats.waiting_count,
                    lost_blocks_count=stats.lost_block_count,
                )
            )
        demands_tokens = [sample.demand_tokens for sample in samples]
        imbalance_ratio = (max(demands_tokens) - min(demands_tokens)) / self._scenario.engine.capacity_tokens
        self._samples.append(Sample(now_s, tuple(samples), self._scheduler.ledger.waiting_count, imbalance_ratio))

    def result(
        self,
        *,
        now_s: float,
        complete: bool,
        workload: str,
        decision_counts: dict[str, int],
        tools: ToolFigures,
        restores: RestoreFigures,
        held_since_s: Sequence[float],
        events: tuple[tuple[Event, tuple[Decision, ...]], ...],
    ) -> RunResult:
        """Compute the current figures; `held_since_s` are the begins of the current holds."""
        scenario, log = self._scenario, self.turns
        begin_s = min(scenario.warmup_s, now_s)
        measured_s = now_s - begin_s
        turns = log.since(begin_s)
        parts = self._parts_since(begin_s, turns)
        limits = scenario_bounds(scenario, [self._shapes[turn] for turn in turns], parts) if turns else None
        ended = [wait for wait in self.ended if wait.ended_s >= begin_s]
        held = log.between(log.arrived_s, log.granted_s, turns)
        is_through = scenario.loop == "batch" and complete
        imbalances = [sample.imbalance_ratio for sample in self._samples if sample.now_s >= begin_s]
        return RunResult(
            policy=self._scheduler.policy.name,
            workload=workload,
            seed=scenario.seed,
            complete=complete,
            simulated_s=now_s,
            measured_s=measured_s,
            turn_count=len(turns),
            program_count=len(ended),
            programs_per_hour_count=len(ended) * 3600 / measured_s if measured_s > 0 else 0.0,
            program_parts_count=fsum(self._program_parts[turn] for turn in turns),
            failed_turn_count=self._failed_count,
            bounds=limits,
            limit_ratio=sum(parts) / measured_s / limits.limit_per_s if limits and measured_s > 0 else 0.0,
            turns_per_min_count=len(turns) * 60 / measured_s if measured_s > 0 else 0.0,
            hit_ratio=log.hit_ratio(turns),
            turn_latency=log.between(log.arrived_s, log.finished_s, turns),
            turn_latency_quantiles_s=quantiles_s([log.finished_s[turn] - log.arrived_s[turn] for turn in turns]),
            first_token_latency=log.between(log.arrived_s, log.first_token_s, turns),
            held=held,
            longest_hold_s=max([held.max_s, *(now_s - since_s for since_s in held_since_s)]),
            waits=Waits.of(ended),
            program_latency=Percentiles.of([wait.residence_s for wait in ended]),
            goodputs=self._goodputs(turns, ended, measured_s),
            makespan_s=now_s if is_through else None,
            makespan_bound_s=self._makespan_bound_s() if is_through else None,
            held_by_size=log.held_by_size(turns),
            imbalance_mean_ratio=sum(imbalances) / len(imbalances) if imbalances else 0.0,
            imbalance_p99_ratio=nearest_rank(sorted(imbalances), 0.99) if imbalances else 0.0,
            replicas=self._replica_figures(now_s, turns),
            tools=tools,
            decision_counts=decision_counts,
            restores=restores,
            samples=tuple(self._samples),
            events=events,
        )

    def _goodputs(self, turns: range, ended: Sequence[ProgramWait], measured_s: float) -> tuple[Goodput, ...]:
        log, shapes = self.turns, self._shapes
        turns_s = [(log.finished_s[turn] - log.arrived_s[turn], self._engines.alone_s(shapes[turn])) for turn in turns]
        programs_s = [(wait.residence_s, wait.alone_s) for wait in ended]
        return Goodput.of_all(turns_s, programs_s, measured_s)

    def _makespan_bound_s(self) -> float | None:
        """Return this batch's least time; None if none of its turns finished."""
        if not self._shapes:
            return None
        limits = scenario_bounds(self._scenario, self._shapes)
        return makespan_bound_s(limits, len(self._shapes), [wait.alone_s for wait in self.ended])

    def _parts_since(self, begin_s: float, turns: range) -> list[float]:
        """Return for each turn the ratio of it after `begin_s`, including its preceding tool time."""
        log, parts = self.turns, []
        for turn in turns:
            finished_s = log.finished_s[turn]
            span_s = finished_s - log.arrived_s[turn] + (self._shapes[turn].gap_s or 0.0)
            parts.append(min(1.0, (finished_s - begin_s) / span_s) if span_s > 0 else 1.0)
        return parts

    def _replica_figures(self, now_s: float, turns: range) -> tuple[ReplicaFigures, ...]:
        costs, engines = self._costs(now_s), self._scenario.engines
        idle_s = self._idle_s()
        turn_counts = [0] * len(self._replicas)
        for turn in turns:
            turn_counts[self.turns.replicas[turn]] += 1
        return tuple(
            ReplicaFigures(
                replica_id=replica_id,
                capacity_tokens=engines[replica_id].capacity_tokens,
                turn_count=turn_counts[self._replica_numbers[replica_id]],
                preemption_count=replica.preemption_count - self._begin_preemption_counts[replica_id],
                costs=difference(costs[replica_id], self._begin_costs[replica_id]),
                idle_held_s=idle_s[replica_id] - self._begin_idle_s[replica_id],
            )
            for replica_id, replica in self._replicas.items()
        )

    def _idle_s(self) -> dict[str, float]:
        """Return for each replica how long it idled so far while programs were held, as of its last costs."""
        return {replica_id: account.idle_held_s for replica_id, account in self._scheduler.ledger.accounts.items()}

    def _costs(self, now_s: float) -> dict[str, Costs]:
        """Return the ledger's costs so far, for each replica."""
        ledger = self._scheduler.ledger
        for account in ledger.accounts.values():
            ledger.accrue(account, now_s)
        return {replica_id: replace(account.costs) for replica_id, account in ledger.accounts.items()}


def scenario_bounds(scenario: Scenario, shapes: Sequence[TurnShape], parts: Sequence[float] | None = None) -> Bounds:
    """Return the bounds of these turns, or of parts of them, in a scenario. Raises ValueError as `bounds` does."""
    return bounds(
        shapes,
        Engines.of(scenario.engine, scenario.replica_count),
        parts=parts,
        programs_count=scenario.programs_count if scenario.loop == "closed" else None,
        tool_processors_count=scenario.tools.cpu_count,
    )
