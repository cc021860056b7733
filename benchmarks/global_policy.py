"""The global policies alone: one period, and one turn on its way, while 131,072 turns wait.

No HTTP and no engines, one core. `routed`: the programs of 48 tenants wait for the replica of their tenant; their
routes also have 16 further replicas, which have room now and then. `anywhere`: all wait in the one paused queue.
Between two periods a second of the load goes by: turns end, programs leave, others come and wait. Times are processor
times, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from time import thread_time
from typing import ClassVar

from benchmarks.core import percentile
from benchmarks.machine import save_results
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    Decision,
    Event,
    Grant,
    ProgramReleased,
    Reason,
    ReplicaPolled,
    ReplicaUp,
    RouteSet,
    SetPriority,
    Tick,
    TurnAsk,
    TurnEnd,
)
from thunderagent.programs.policy import GlobalPolicy, View
from thunderagent.programs.scheduler import Scheduler
from thunderagent.serving.process import calm_garbage_collector

CAPACITY_TOKENS = 400_000
PROGRAM_TOKENS = (4_000, 16_000)
ROUTED_PART = 0.75
"""Ratio of the replicas that have a tenant; the others serve all tenants."""
ROUTE_WEIGHTS = (1000.0, 1.0)
"""Weights of a tenant's own replica and of the further one."""


@dataclass
class Shortest(GlobalPolicy):
    """The program with least to compute goes first, instead of Nalar's SRTF: here most wait for their first turn."""

    period_s: float = 1.0
    name: ClassVar[str] = "shortest"

    def decide(self, view: View) -> None:
        """Prioritise programs that wait since the last period."""
        for program in view.newly_waiting():
            view.propose_priority(program, program.claim_tokens // 1000, Reason.GLOBAL_POLICY)


@dataclass
class Fleet:
    """A scheduler with many waiting turns, and what keeps it going."""

    scheduler: Scheduler
    tenants_count: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now_s: float = 1000.0
    turn_id: int = 0
    in_flight: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Granted turns: their program, and until when they run."""

    def send(self, event: Event) -> list[Decision]:
        """Handle one event, and note grants."""
        decisions = self.scheduler.handle(event)
        self.note(decisions)
        return decisions

    def note(self, decisions: list[Decision]) -> None:
        """Let granted turns run for some seconds."""
        for decision in decisions:
            if type(decision) is Grant and decision.program_id is not None:
                run_s = self.rng.expovariate(1 / 8.0)
                self.in_flight[decision.turn_id] = (decision.program_id, self.now_s + run_s)

    def arrive(self, program_id: str, tenant: str = "") -> list[Decision]:
        """Let a program's next turn arrive."""
        self.turn_id += 1
        size_bytes = 4 * self.rng.randrange(*PROGRAM_TOKENS)
        return self.send(
            TurnAsk(
                now_s=self.now_s, turn_id=self.turn_id, program_id=program_id, prompt_bytes=size_bytes, tenant=tenant
            )
        )

    def tenant_of(self, number: int) -> str:
        """Return a program's tenant; empty without routes."""
        return f"t{number % self.tenants_count}" if self.tenants_count else ""

    def second(self, programs_count: int) -> int:
        """Advance a second: finished turns end, two of three programs with them, and as many new ones come."""
        self.now_s += 1.0
        ended = [turn_id for turn_id, (_, until_s) in self.in_flight.items() if until_s <= self.now_s]
        for turn_id in ended:
            program_id, _ = self.in_flight.pop(turn_id)
            self.send(
                TurnEnd(now_s=self.now_s, turn_id=turn_id, prompt_tokens=8_000, output_tokens=200, cached_tokens=0)
            )
            if self.rng.random() < 2 / 3:
                self.send(ProgramReleased(self.now_s, program_id))
        while self.waiting_count < programs_count:
            self.turn_id += 1
            self.arrive(f"n{self.turn_id}", self.tenant_of(self.turn_id))
        return len(ended)

    @property
    def waiting_count(self) -> int:
        """Number of held turns."""
        return self.scheduler.ledger.waiting_count


def build(waiting_count: int, replicas_count: int, *, routed: bool, policy: str, global_policy: str) -> Fleet:
    """Return a fleet with full replicas, and this many waiting turns."""
    tenants_count = int(ROUTED_PART * replicas_count) if routed else 0
    fleet = Fleet(Scheduler(load_policy(policy, {"global_policy": global_policy})), tenants_count)
    for number in range(replicas_count):
        fleet.send(ReplicaPolled(fleet.now_s, f"r{number}", CAPACITY_TOKENS))
        fleet.send(ReplicaUp(fleet.now_s, f"r{number}"))
    for number in range(tenants_count):
        further = f"r{tenants_count + number % (replicas_count - tenants_count)}"
        targets = tuple(zip((f"r{number}", further), ROUTE_WEIGHTS, strict=True))
        fleet.send(RouteSet(fleet.now_s, "tenant", f"t{number}", targets))
    number = 0
    while fleet.waiting_count < waiting_count:
        fleet.arrive(f"p{number}", fleet.tenant_of(number))
        fleet.now_s += 1e-4
        number += 1
    return fleet


def periods(fleet: Fleet, periods_count: int, waiting_count: int) -> dict[str, float | int | dict[str, int]]:
    """Time the ticks that control: first those that hear of all turns that wait from before, then later ones."""
    calm_garbage_collector()  # as the server runs
    burst = [_period(fleet)[0]]
    while fleet.scheduler.global_policies.unseen_count:
        fleet.second(waiting_count)
        burst.append(_period(fleet)[0])
    times, changes = [], Counter[str]()
    ended_count = 0
    for _ in range(periods_count):
        ended_count += fleet.second(waiting_count)
        elapsed_s, decisions = _period(fleet)
        times.append(elapsed_s)
        changes.update(_word(decision) for decision in decisions)
    return {
        "period_first_ms": burst[0] * 1e3,
        "burst_periods_count": len(burst),
        "burst_max_ms": max(burst) * 1e3,
        "burst_total_ms": sum(burst) * 1e3,
        "period_p50_ms": percentile(times, 0.5) * 1e3,
        "period_p99_ms": percentile(times, 0.99) * 1e3,
        "period_max_ms": max(times) * 1e3,
        "waiting": fleet.waiting_count,
        "turns_ended_between": ended_count,
        "changes": dict(changes),
    }


def _period(fleet: Fleet) -> tuple[float, list[Decision]]:
    """Return the duration of a tick, and its decisions."""
    tick = Tick(fleet.now_s)
    began = thread_time()
    decisions = fleet.scheduler.handle(tick)
    elapsed_s = thread_time() - began
    fleet.note(decisions)
    return elapsed_s, decisions


def _word(decision: Decision) -> str:
    kind = "priority" if type(decision) is SetPriority else type(decision).__name__.lower()
    return f"{kind} ({decision.reason.value})"


def route_one(fleet: Fleet, turns_count: int) -> dict[str, float | int]:
    """Time the arrival of turns that are granted at once: of new programs on a route, and of acting ones."""
    figures: dict[str, float | int] = {}
    if fleet.tenants_count:  # otherwise waiting programs take the room of a replica that comes
        fleet.send(ReplicaPolled(fleet.now_s, "free", CAPACITY_TOKENS))
        fleet.send(ReplicaUp(fleet.now_s, "free"))
        fleet.send(RouteSet(fleet.now_s, "tenant", "fast", (("free", 1.0),)))
        times = [_route_new(fleet, f"f{number}") for number in range(turns_count)]
        figures = {
            "route_new_p50_ms": percentile(times, 0.5) * 1e3,
            "route_new_p99_ms": percentile(times, 0.99) * 1e3,
        }
    return figures | _next_turns(fleet, turns_count)


def _route_new(fleet: Fleet, program_id: str) -> float:
    fleet.now_s += 1e-4
    fleet.turn_id += 1
    event = TurnAsk(now_s=fleet.now_s, turn_id=fleet.turn_id, program_id=program_id, prompt_bytes=16_000, tenant="fast")
    began = thread_time()
    decisions = fleet.scheduler.handle(event)
    elapsed_s = thread_time() - began
    assert any(type(d) is Grant and d.turn_id == event.turn_id for d in decisions), decisions
    fleet.send(
        TurnEnd(now_s=fleet.now_s, turn_id=event.turn_id, prompt_tokens=4_000, output_tokens=100, cached_tokens=0)
    )
    fleet.send(ProgramReleased(fleet.now_s, program_id))
    return elapsed_s


def _next_turns(fleet: Fleet, turns_count: int) -> dict[str, float | int]:
    """Time the next turns of programs that hold a claim."""
    scheduler, times = fleet.scheduler, []
    running = list(fleet.in_flight.items())[:256]
    for place in range(turns_count):
        turn_id, (program_id, _) = running[place % len(running)]
        fleet.now_s += 1e-4
        scheduler.handle(
            TurnEnd(now_s=fleet.now_s, turn_id=turn_id, prompt_tokens=8_000, output_tokens=200, cached_tokens=0)
        )
        program = scheduler.programs.get(program_id)
        if program is None or program.status != "active":
            continue
        fleet.turn_id += 1
        event = TurnAsk(now_s=fleet.now_s, turn_id=fleet.turn_id, program_id=program_id, prompt_bytes=4 * 8_000)
        began = thread_time()
        decisions = scheduler.handle(event)
        elapsed_s = thread_time() - began
        if any(type(d) is Grant and d.turn_id == event.turn_id for d in decisions):
            times.append(elapsed_s)
        running[place % len(running)] = (event.turn_id, (program_id, 0.0))
    return {
        "route_next_p50_ms": percentile(times, 0.5) * 1e3,
        "route_next_p99_ms": percentile(times, 0.99) * 1e3,
        "route_next_count": len(times),
    }


def main() -> None:
    """Measure, print and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=131_072)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--periods", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--policy", default="breakeven")
    parser.add_argument("--global-policy", default="balance+migrate+reassign+benchmarks.global_policy:Shortest")
    args = parser.parse_args()
    os.sched_setaffinity(0, {0})
    figures = {}
    for case in ("routed", "anywhere"):
        fleet = build(
            args.waiting, args.replicas, routed=case == "routed", policy=args.policy, global_policy=args.global_policy
        )
        figures[case] = periods(fleet, args.periods, args.waiting) | route_one(fleet, args.turns)
        print(case)
        for name, value in figures[case].items():
            print(f"  {name:24} {value:.4f}" if isinstance(value, float) else f"  {name:24} {value}")
        del fleet
    save_results("global_policy", {"arguments": vars(args), "figures": figures})


if __name__ == "__main__":
    main()
