"""A core that never sees a program id twice keeps nothing of ended programs, and no memory for them."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest

from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    Event,
    Grant,
    ProgramHinted,
    ProgramJudged,
    ProgramReleased,
    Reject,
    ReplicaPolled,
    ReplicaUp,
    SchedulerSettings,
    Tick,
    ToolEnded,
    ToolStarted,
    TurnAsk,
    TurnEnd,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.scheduler import Scheduler

EVENT_COUNT = int(os.environ.get("LEAK_EVENT_COUNT", "16000"))
PROGRAM_COUNT = 120
REPLICA_COUNT = 3
CAPACITY_TOKENS = 400_000


class Load:
    """Programs that come, take some turns and go; more of them than fit; every id is new."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 1000.0
        self.event_count = 0
        self._rng = random.Random(3)
        self._numbers = itertools.count(1)
        self._turns: dict[int, tuple[str, int, int]] = {}  # held ones: program, tokens, turns left
        self._granted: deque[tuple[int, tuple[str, int, int]]] = deque()
        self._acting: deque[tuple[str, int, int]] = deque()
        for number in range(REPLICA_COUNT):
            self._send(ReplicaPolled(self.now_s, f"r{number}", CAPACITY_TOKENS))
            self._send(ReplicaUp(self.now_s, f"r{number}"))

    def run(self, event_count: int) -> None:
        """Continue until this number of events was sent."""
        while self.event_count < event_count:
            self.now_s += 0.01
            for event in self._next_events():
                self._send(event)
            if int(self.now_s) > self.scheduler.view.previous_tick_s:
                for number in range(REPLICA_COUNT):
                    self._send(ReplicaPolled(self.now_s, f"r{number}", CAPACITY_TOKENS, 0.5, 1000))
                self._send(Tick(self.now_s))

    def _next_events(self) -> Iterator[Event]:
        rng = self._rng
        if len(self._turns) + len(self._granted) + len(self._acting) < PROGRAM_COUNT:
            number = next(self._numbers)
            yield self._arrival((f"program-{number}", rng.randrange(1000, 20_000), rng.randrange(1, 8)))
        if self._turns and rng.random() < 0.02:
            turn_id = next(iter(self._turns))
            program_id, _, _ = self._turns.pop(turn_id)
            yield TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="abandoned")
            yield ProgramReleased(self.now_s, program_id)
        if self._granted:
            yield from self._serve(*self._granted.popleft())
        if self._acting and rng.random() < 0.8:
            program = self._acting.popleft()
            yield ToolEnded(self.now_s, program[0])
            yield self._arrival(program)

    def _arrival(self, program: tuple[str, int, int]) -> TurnAsk:
        program_id, tokens, _ = program
        number = int(program_id.rpartition("-")[2])
        turn_id = next(self._numbers)
        self._turns[turn_id] = program
        return TurnAsk(
            now_s=self.now_s,
            turn_id=turn_id,
            program_id=program_id,
            prompt_bytes=tokens * 4,
            group_id=f"group-{number // 4}",
            tenant=f"tenant-{number % 5 if number % 2 else number}",
            prefix=((number % 7, 4000), (number, 8000)),
            role=f"role-{number % 3}",
            program_class=f"class-{number % 3}",
        )

    def _serve(self, turn_id: int, program: tuple[str, int, int]) -> Iterator[Event]:
        program_id, tokens, turns_left = program
        yield TurnStarted(self.now_s, turn_id)
        yield TurnProgressed(self.now_s, turn_id, 50)
        if self._rng.random() < 0.05:
            yield TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="failed")
            yield ProgramReleased(self.now_s, program_id, outcome="failure")
            return
        yield TurnEnd(
            now_s=self.now_s,
            turn_id=turn_id,
            prompt_tokens=tokens,
            output_tokens=100,
            cached_tokens=tokens // 2,
            tool=f"tool-{turn_id % 6}",
        )
        if turns_left:
            yield ToolStarted(self.now_s, program_id, "edit")
            yield ProgramHinted(self.now_s, program_id, self._rng.random())
            self._acting.append((program_id, tokens + 1000, turns_left - 1))
        else:
            yield ProgramJudged(self.now_s, program_id, 1, 1, will_succeed=True, confidence_ratio=0.9)
            yield ProgramReleased(self.now_s, program_id, outcome="success")

    def _send(self, event: Event) -> None:
        self.event_count += 1
        for decision in self.scheduler.handle(event):
            if isinstance(decision, Grant) and decision.turn_id in self._turns:
                self._granted.append((decision.turn_id, self._turns.pop(decision.turn_id)))
            elif isinstance(decision, Reject):
                self._turns.pop(decision.turn_id, None)


def held_count(root: object) -> int:
    """Return the number of entries in all containers that can be reached from an object."""
    seen, found, entry_count = {id(root)}, [root], 0
    while found:
        each = found.pop()
        if isinstance(each, dict | set | frozenset | list | tuple | deque):
            entry_count += len(each)
        for inner in gc.get_referents(each):
            is_code = isinstance(inner, type | ModuleType | FunctionType | BuiltinFunctionType)
            if id(inner) not in seen and gc.is_tracked(inner) and not is_code:
                seen.add(id(inner))
                found.append(inner)
    return entry_count


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["breakeven", "thunderagent"])
def test_nothing_grows_with_the_events(policy: str) -> None:
    """Containers are as full at the end as after a quarter of the events, except samples: names differ in length."""
    scheduler = Scheduler(load_policy(policy, {}), SchedulerSettings(fair_tenants=True))
    load = Load(scheduler)
    load.run(EVENT_COUNT // 4)
    gc.collect()
    held_before, blocks_before = held_count(scheduler), sys.getallocatedblocks()
    held_counts, blocks_counts = list[int](), list[int]()
    for part in (0.7, 0.8, 0.9, 1.0):  # the least: the number of waiting programs, and of their records, varies
        load.run(int(part * EVENT_COUNT))
        gc.collect()
        held_counts.append(held_count(scheduler))
        blocks_counts.append(sys.getallocatedblocks())
    held, blocks = min(held_counts), min(blocks_counts)
    print(f"{policy}: {held_before} entries and {blocks_before} blocks, then {held_counts} and {blocks_counts}")
    assert held < 1.15 * held_before + 500
    assert blocks - blocks_before < 0.02 * EVENT_COUNT + 5000
