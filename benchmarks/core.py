"""The core alone: events with 10,000 live programs on 64 replicas, a tick that pauses half of them, and plain turns."""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

from benchmarks.core_beside import beside
from benchmarks.machine import save_results
from thunderagent.compilation import build_kind
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    Event,
    Grant,
    Pause,
    PrefixCut,
    ProgramReleased,
    ReplicaPolled,
    ReplicaUp,
    Tick,
    TurnAsk,
    TurnEnd,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.scheduler import Scheduler
from thunderagent.serving.process import calm_garbage_collector

CONTEXT_BYTES = 40_000
CAPACITY_TOKENS = 400_000

PLAIN_PROGRAMS_COUNT = 300
PLAIN_REPLICAS_COUNT = 4
PLAIN_CUT_COUNT = 9
"""Like a chat of some 30 messages. The first two are the same in all programs: tools, and the system prompt."""


@dataclass
class Load:
    """Programs that take turns, at the pace of one event every `step_s` of virtual time."""

    scheduler: Scheduler
    rng: random.Random
    now_s: float = 1000.0
    turn_id: int = 0
    step_s: float = 0.0005

    def arrive(self, program_id: str, size_bytes: int, prefix: tuple[PrefixCut, ...] = ()) -> TurnAsk:
        """Return the arrival of the program's next turn."""
        self.turn_id += 1
        self.now_s += self.step_s
        return TurnAsk(
            now_s=self.now_s,
            turn_id=self.turn_id,
            program_id=program_id,
            branch_id="",
            prompt_bytes=size_bytes,
            prefix=prefix,
        )


def build(policy_name: str, programs_count: int, replicas_count: int, capacity_tokens: int) -> Load:
    """Return a scheduler on which every program has had one turn and is acting now.

    `policy_name` may name an order, too: `breakeven+order=fcfs`.
    """
    name, _, order = policy_name.partition("+order=")
    load = Load(Scheduler(load_policy(name, {"order": order} if order else {})), random.Random(1))
    handle = load.scheduler.handle
    for index in range(replicas_count):
        handle(ReplicaPolled(load.now_s, f"r{index}", capacity_tokens))
        handle(ReplicaUp(load.now_s, f"r{index}"))
    for index in range(programs_count):
        event = load.arrive(f"p{index}", load.rng.randrange(1000, 2 * CONTEXT_BYTES))
        handle(event)
        handle(TurnStarted(load.now_s, event.turn_id))
        handle(
            TurnEnd(
                now_s=load.now_s,
                turn_id=event.turn_id,
                prompt_tokens=event.prompt_bytes // 4,
                output_tokens=200,
                cached_tokens=0,
            )
        )
    calm_garbage_collector()  # as the server runs
    return load


def mixed_events(load: Load, events_count: int, programs_count: int) -> dict[str, list[float]]:
    """Time arrivals, first bytes, progress, ends and releases, by kind; ticks come every second untimed.

    Only granted turns go on; a held turn goes on when a later event grants it.
    """
    rng, left_count = load.rng, events_count
    times: dict[str, list[float]] = defaultdict(list)
    arrived: dict[int, TurnAsk] = {}
    in_flight: list[TurnAsk] = []

    def send(event: Event) -> None:
        nonlocal left_count
        began = perf_counter()
        decisions = load.scheduler.handle(event)
        times[type(event).__name__].append(perf_counter() - began)
        left_count -= 1
        in_flight.extend(arrived.pop(d.turn_id) for d in decisions if isinstance(d, Grant))

    while left_count > 0:
        if len(in_flight) > programs_count // 3 or (arrived and rng.random() < 0.5 and in_flight):
            turn = in_flight.pop(rng.randrange(len(in_flight)))
            tokens = turn.prompt_bytes // 4
            send(TurnStarted(load.now_s, turn.turn_id))
            send(TurnProgressed(load.now_s, turn.turn_id, 100))
            send(
                TurnEnd(
                    now_s=load.now_s,
                    turn_id=turn.turn_id,
                    prompt_tokens=tokens,
                    output_tokens=200,
                    cached_tokens=tokens // 2,
                )
            )
            if rng.random() < 0.05:
                send(ProgramReleased(load.now_s, turn.program_id or ""))
        else:
            turn = load.arrive(f"p{rng.randrange(programs_count)}", rng.randrange(1000, 2 * CONTEXT_BYTES))
            arrived[turn.turn_id] = turn
            send(turn)
        if int(load.now_s) > load.scheduler.view.previous_tick_s:
            send(Tick(load.now_s))
            left_count += 1
    del times["Tick"]
    return times


def pausing_tick(programs_count: int, replicas_count: int, *, is_first: bool = False) -> tuple[float, int]:
    """Return the seconds of a tick that must pause half of all programs, and how many it paused.

    The first tick that pauses a program on a replica also ranks all programs there, and keeps them ranked.
    """
    load = build("thunderagent", programs_count, replicas_count, 10**9)
    for replica in load.scheduler.replicas.values():
        account = replica.account
        smallest_first = sorted(program.claim_tokens for program in replica.programs.values())
        kept_tokens = sum(smallest_first[len(smallest_first) // 2 :])
        share = account.weighed_tokens(load.now_s) / max(1, account.acting.tokens)
        load.scheduler.handle(ReplicaPolled(load.now_s, replica.replica_id, int(kept_tokens * share)))
        if not is_first:
            load.scheduler.view.first_to_pause(replica)
    began = perf_counter()
    decisions = load.scheduler.handle(Tick(load.now_s))
    elapsed_s = perf_counter() - began
    return elapsed_s, sum(isinstance(decision, Pause) for decision in decisions)


def plain_turns(policy_name: str, turns_count: int) -> list[float]:
    """Time typical turns: arrival, first byte and end, with room for all and a growing chat."""
    load = build(policy_name, PLAIN_PROGRAMS_COUNT, PLAIN_REPLICAS_COUNT, 10**8)
    handle, times = load.scheduler.handle, []
    cuts = [
        tuple((cut if cut < 2 else number * 100 + cut, 500 * 2**cut) for cut in range(PLAIN_CUT_COUNT))
        for number in range(PLAIN_PROGRAMS_COUNT)
    ]
    for count in range(turns_count):
        number = count % PLAIN_PROGRAMS_COUNT
        arrived = load.arrive(f"p{number}", CONTEXT_BYTES + 2000 * (count // PLAIN_PROGRAMS_COUNT % 20), cuts[number])
        tokens = int(arrived.prompt_bytes * load.rng.uniform(0.23, 0.28))
        started = TurnStarted(load.now_s + 0.1, arrived.turn_id)
        finished = TurnEnd(
            now_s=load.now_s + 0.4,
            turn_id=arrived.turn_id,
            prompt_tokens=tokens,
            output_tokens=200,
            cached_tokens=tokens - 500,
            tool="bash",
        )
        began = perf_counter()
        handle(arrived)
        handle(started)
        handle(finished)
        times.append(perf_counter() - began)
    return times


def percentile(values: list[float], ratio: float) -> float:
    """Return the nearest-rank percentile."""
    return sorted(values)[min(len(values) - 1, int(ratio * len(values)))]


def main() -> None:
    """Measure, print and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--policy", default="breakeven")
    parser.add_argument(
        "--beside", metavar="REV", help="take turns with the code of that commit, and with today's compiled"
    )
    parser.add_argument("--rounds", type=int, default=3, help="with --beside: how often each has its turn")
    parser.add_argument("--interpreted", action="store_true", help="with --beside: compile nothing")
    args = parser.parse_args()
    if args.beside:
        counts = (args.programs, args.replicas, args.events)
        beside(args.beside, (args.policy, *map(str, counts)), args.rounds, compiles=not args.interpreted)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load = build(args.policy, args.programs, args.replicas, CAPACITY_TOKENS)
    by_kind = mixed_events(load, args.events, args.programs)
    times = [each for of_kind in by_kind.values() for each in of_kind]
    ticks = [pausing_tick(args.programs, args.replicas) for _ in range(5)]
    turns = plain_turns(args.policy, args.events // 5)
    figures = {
        "event_mean_ms": fmean(times) * 1e3,
        "event_p50_ms": percentile(times, 0.5) * 1e3,
        "event_p99_ms": percentile(times, 0.99) * 1e3,
        "event_max_ms": max(times) * 1e3,
        **{f"{kind}_mean_ms": fmean(of_kind) * 1e3 for kind, of_kind in by_kind.items()},
        "tick_pausing_half_ms": median(elapsed_s for elapsed_s, _ in ticks) * 1e3,
        "tick_paused_count": ticks[0][1],
        "plain_turn_mean_ms": fmean(turns) * 1e3,
        "plain_turn_p50_ms": percentile(turns, 0.5) * 1e3,
        "live_programs": len(load.scheduler.programs),
    }
    print(f"the build is {build_kind()}")
    for name, value in figures.items():
        print(f"{name:24} {value:.4f}")
    arguments = {name: vars(args)[name] for name in ("programs", "replicas", "events", "policy")}
    save_results("core", {"arguments": arguments, "build": build_kind(), "figures": figures})


if __name__ == "__main__":
    main()
