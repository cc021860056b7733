"""Agents: who goes first, how large a chunk is, what is kept, who is preempted. Pure.

Theory of operation
-------------------
The engine's half of "MARS" (arXiv 2604.26963, section 4.3), as decisions over plain values: `Agents` knows no vLLM and
no clock. The scheduler tells it of each request that comes, is served and ends, and asks it at each decision. What it
decides changes order, chunks and what stays in memory: never what a request computes.

A **call** is one request. A **program** is all calls with one session id. A call without one is a program of its own
that is never pinned. A program's **birth** counts programs in the order in which they came.

**Level.** By the uncached tokens of its prompt, and by the service that its program had lately; whichever is worse.
With quanta, a call whose whole quantum was not enough falls by one. `promote_s` without service is worth a level.

**Order of what waits**: the priority that came with it, preempted ones first, level, pinned ones first, birth, arrival.
**Order of what runs**: those that generate, then level, then who was not served for longest.

**Chunks.** A prompt gets at most its level's quantum (`quanta`); leaves tokens to a better level that waits and would
fit, at most half of the budget; and is halved until it fits the free blocks (`shrink`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from thunderagent_vllm.levels import Service, effective_level, level_of, quantum_tokens, shrunk_tokens
from thunderagent_vllm.pins import Pin, Pins, Pool
from thunderagent_vllm.settings import HOLD_MOST_S, Settings

MOST_PROGRAMS = 100_000
"""More are forgotten, the least recent first."""

MOST_ID_CHARACTERS = 256
"""Longer session ids are no program's."""

GENERATES = -1
"""Stands for the level of a call that generates, in the choice of a victim: it goes last."""


LEARNED_COUNT = 10
"""Programs that came back, from which on their times count."""


class Mean:
    """The mean of about the last hundred values."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.count = min(100, self.count + 1)
        self.value += (value - self.value) / self.count


class Program:
    """What is known of a program."""

    __slots__ = ("birth", "block_count", "left_s", "service", "turn_count")

    def __init__(self, birth: int) -> None:
        self.birth = birth
        self.left_s: float | None = None
        """When its last call ended by itself; None while one is here."""
        self.turn_count = 0
        self.block_count = 0
        self.service = Service()


class Call:
    """What is known of a request in the engine. `program_id` is None if it named none."""

    __slots__ = (
        "arrived_s",
        "base_level",
        "feedback_level",
        "hold_s",
        "is_preempted",
        "is_reading",
        "level_now",
        "program",
        "program_id",
        "served_s",
        "uncached_tokens",
        "was_started",
    )

    def __init__(self, program: Program, program_id: str | None, uncached_tokens: int, now_s: float) -> None:
        self.program = program
        self.program_id = program_id
        self.uncached_tokens = uncached_tokens
        self.base_level = 0
        self.feedback_level = 0
        self.level_now = 0
        self.arrived_s = now_s
        self.served_s = now_s
        self.is_preempted = False
        self.is_reading = False
        self.was_started = False
        self.hold_s: float | None = None


class Agents:
    """The decisions for one engine; its pool has `pool_blocks` blocks of `block_tokens`."""

    def __init__(
        self, settings: Settings, pool: Pool, *, pool_blocks: int, block_tokens: int, budget_tokens: int
    ) -> None:
        self.settings = settings
        self.pins = Pins(pool, int(settings.pin_share * pool_blocks), largest_first=settings.largest_first)
        self.calls: dict[str, Call] = {}
        self.reading: dict[str, Call] = {}
        """Calls that run and whose prompt is not read."""
        self.counts: Counter[str] = Counter()
        self.preemptions: Counter[int] = Counter()
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._births = 0
        self._begun_s = math.inf
        self._ends = Service()
        self._starve_s = settings.starve_s
        self._growth_blocks = Mean()
        self._gap_s = Mean()
        self._block_tokens = block_tokens
        self._budget_tokens = budget_tokens
        self._given_tokens = 0
        self._head: Call | None = None
        self._reserved_tokens = 0

    # --- requests come and go

    def arrived(self, request_id: str, session_id: object, uncached_tokens: int, hint: object, now_s: float) -> Call:
        """Note a request; `hint` is how long to hold its program afterwards, in seconds, if it says so."""
        program_id = session_id if isinstance(session_id, str) and 0 < len(session_id) <= MOST_ID_CHARACTERS else None
        call = Call(self._program(program_id), program_id, uncached_tokens, now_s)
        call.hold_s = hold_of(hint)
        self._begun_s = min(self._begun_s, now_s)
        settings, program = self.settings, call.program
        served_tokens = program.service.tokens(now_s, settings.window_s) / settings.served_ratio
        tokens = max(uncached_tokens, served_tokens)
        call.base_level = call.level_now = level_of(tokens, settings.first_level_tokens, settings.level_count)
        program.turn_count += 1
        if program.left_s is not None:
            self._gap_s.add(min(now_s - program.left_s, settings.stale_s))
            program.left_s = None
        self.calls[request_id] = call
        return call

    def started(self, request_id: str, now_s: float, *, is_reading: bool) -> None:
        """Note that a request runs, for the first time or again: what was held for it is its own now."""
        call = self.calls.get(request_id)
        if call is None:
            return
        call.is_preempted = False
        call.is_reading = is_reading
        call.served_s = now_s
        if is_reading:
            self.reading[request_id] = call
        if call.was_started:
            return
        call.was_started = True
        if call.program_id is not None:
            warm = self.pins.drop(call.program_id, "used")
            self.counts["turns_warm" if warm else "turns_cold"] += 1

    def read(self, request_id: str, tokens: int, now_s: float, *, is_through: bool) -> None:
        """Count the tokens of a prompt that were computed, and lower the call if its quantum was not enough."""
        call = self.calls[request_id]
        settings = self.settings
        if settings.quanta and not is_through and tokens >= quantum_tokens(self._budget_tokens, call.level_now):
            call.feedback_level = min(settings.level_count - 1, max(call.feedback_level, call.base_level) + 1)
        call.served_s = now_s
        call.program.service.add(tokens, now_s, settings.window_s)
        if is_through:
            call.is_reading = False
            call.feedback_level = 0
            self.reading.pop(request_id, None)

    def preempted(self, request_id: str) -> None:
        """Note that a request lost its blocks, and waits again."""
        self.reading.pop(request_id, None)
        call = self.calls.get(request_id)
        if call is not None:
            self.preemptions[call.level_now] += 1
            call.is_preempted, call.is_reading, call.feedback_level = True, False, 0

    def ended(self, request_id: str, generated_tokens: int, blocks: Sequence[Any] | None, now_s: float) -> bool:
        """Forget a request, and hold its blocks for its program's next turn; None: none may be held.

        Returns whether they are held.
        """
        self.reading.pop(request_id, None)
        call = self.calls.pop(request_id, None)
        if call is None:
            return False
        program, program_id = call.program, call.program_id
        program.service.add(generated_tokens, now_s, self.settings.window_s)
        self._ends.add(1, now_s, self.settings.window_s)
        if blocks:
            self._grew(program, len(blocks))
        if program_id is None or blocks is None or self._programs.get(program_id) is not program:
            return False
        hold_s = self.settings.hold_s if call.hold_s is None else call.hold_s
        if hold_s <= 0:
            self.pins.drop(program_id, "released")
            return False
        program.left_s = now_s
        stale_s = now_s + (hold_s if call.hold_s is not None else self._stale_s())
        came_back = program.turn_count > 1 or call.hold_s is not None  # who is told to hold knows that it comes back
        pin = Pin(program.birth, blocks, now_s, stale_s, now_s + hold_s, came_back=came_back)
        return self.pins.keep(program_id, pin)

    # --- what the proxy says between turns

    def tell(self, ops: Sequence[Any], now_s: float) -> int:
        """Carry out messages: `["release", id]`, `["pause", id]`, `["hold", id, seconds]`; return how many were known.

        Unknown verbs and ids, and what is no message, are passed over.
        """
        done_count = 0
        for op in ops:
            if not isinstance(op, (list, tuple)) or len(op) < 2 or not isinstance(op[1], str):
                continue
            verb, program_id = op[0], op[1]
            hold_s = hold_of(op[2]) if len(op) > 2 else None
            if verb == "hold" and hold_s is not None:
                self.pins.extend(program_id, now_s + hold_s)
                self.pins.expire(now_s)
            elif verb in ("pause", "release"):
                self.pins.drop(program_id, "released")
                if verb == "release":
                    self._programs.pop(program_id, None)
            else:
                continue
            done_count += 1
        return done_count

    # --- order

    def look(self, now_s: float) -> None:
        """Note how long a request may wait now."""
        settings = self.settings
        self._starve_s = settings.starve_s
        ends_count = self._ends.tokens(now_s, settings.window_s)
        if settings.starve_rounds and ends_count:
            seen_s = settings.window_s * (1.0 - math.exp((self._begun_s - now_s) / settings.window_s))
            round_s = (len(self.calls) + len(self.pins)) * seen_s / ends_count
            self._starve_s = min(settings.starve_s, settings.starve_rounds * round_s)

    def begin_step(self, now_s: float, head: Call | None, head_fits: bool) -> None:
        """Begin an iteration: `head` waits first, and `head_fits` says whether it could be admitted."""
        self._given_tokens = 0
        self._head = head if head_fits and self.settings.program_order else None
        self._reserved_tokens = 0
        if self._head is not None:
            self._head.level_now = self.level(self._head, now_s)
            self._reserved_tokens = min(self._head.uncached_tokens, self._budget_tokens // 2)
        for call in self.reading.values():
            call.level_now = self.level(call, now_s)

    def level(self, call: Call, now_s: float) -> int:
        """Return a call's level now."""
        return effective_level(call.base_level, call.feedback_level, now_s - call.served_s, self.settings.promote_s)

    def waiting_key(self, request_id: str, priority: int, arrival_s: float, now_s: float) -> tuple[Any, ...]:
        """Return the place of a waiting request: least first."""
        call = self.calls.get(request_id)
        if call is None or not self.settings.order:
            return (priority, 1, 0, 0, 0, arrival_s)
        if not self.settings.program_order:
            return (priority, not call.is_preempted, self.level(call, now_s), False, 0, arrival_s)
        if now_s - call.arrived_s >= self._starve_s:
            return (priority, not call.is_preempted, -1, False, 0, call.arrived_s)
        is_pinned = call.program_id is not None and call.program_id in self.pins
        return (
            priority,
            not call.is_preempted,
            self.level(call, now_s),
            not is_pinned,
            call.program.birth,
            arrival_s,
        )

    def running_key(self, request_id: str) -> tuple[int, float]:
        """Return the place of a running request: those that generate keep their order, before all others."""
        call = self.reading.get(request_id)
        return (GENERATES, 0.0) if call is None else (call.level_now, call.served_s)

    # --- chunks

    def chunk_tokens(
        self, request_id: str, wanted_tokens: int, fitting_tokens: int | None, *, is_alone: bool, generating_count: int
    ) -> int:
        """Return the tokens of a prompt's next chunk, at most those wanted, and at least one block or those wanted.

        `fitting_tokens` is what the free blocks hold, or None if the chunk must not shrink; `is_alone` is whether no
        other request is in the engine, so that nobody gains by bounds.
        """
        call = self.calls.get(request_id)
        if call is None:
            return wanted_tokens
        settings, tokens = self.settings, wanted_tokens
        least_tokens = min(wanted_tokens, self._block_tokens)
        if not is_alone and settings.order:
            head = self._head
            if settings.quanta:
                tokens = min(tokens, quantum_tokens(self._budget_tokens, call.level_now))
            if head is not None and head is not call and call.is_reading and call.level_now > head.level_now:
                left_tokens = self._budget_tokens - self._reserved_tokens - generating_count - self._given_tokens
                tokens = min(tokens, left_tokens)
            tokens = max(tokens, least_tokens)
        is_bounded = tokens < wanted_tokens
        is_shrunk = False
        if settings.shrink and fitting_tokens is not None and fitting_tokens < tokens:
            floor_tokens = max(least_tokens, int(tokens * settings.shrink_floor))
            shrunk = shrunk_tokens(tokens, fitting_tokens, floor_tokens)
            is_shrunk, tokens = shrunk < tokens, shrunk
        self.counts["chunks_shrunk" if is_shrunk else "chunks_bounded" if is_bounded else "chunks_whole"] += 1
        self._given_tokens += tokens
        return tokens

    # --- memory

    def pins_to_take(self, request_id: str, now_s: float, *, is_running: bool, runs_any: bool) -> list[str]:
        """Return the programs whose pins a request may take, in order."""
        call = self.calls.get(request_id)
        if call is None:
            return self.pins.candidates(None, None, now_s)
        may_take_any = is_running or not runs_any or now_s - call.arrived_s >= self._starve_s
        return self.pins.candidates(call.program_id, None if may_take_any else call.program.birth, now_s)

    def room_blocks(self, request_id: str, running_count: int, now_s: float) -> int:
        """Return how many blocks must stay free if a waiting request is admitted beside so many running ones.

        Programs that are here grow, and whoever begins in that room loses its own blocks soon. Who is pinned, was
        preempted or has waited for long needs no room beside its own, nor does anybody where nothing runs, nor who
        comes with a hold: whoever said that has let it in.
        """
        call, settings = self.calls.get(request_id), self.settings
        if not settings.room_turns or not running_count or call is None or call.is_preempted:
            return 0
        if call.hold_s is not None or call.program_id in self.pins or now_s - call.arrived_s >= self._starve_s:
            return 0
        takeable_count = len(self.pins.candidates(None, call.program.birth, now_s))
        here_count = running_count + len(self.pins) - takeable_count
        return int(settings.room_turns * self._growth_blocks.value * here_count)

    def victim_key(self, request_id: str, priority: int, block_count: int, arrival_s: float) -> tuple[Any, ...]:
        """Return how soon a running request is preempted: the greatest first."""
        call = self.reading.get(request_id)
        return (priority, GENERATES if call is None else call.level_now, block_count, arrival_s)

    # --- programs

    @property
    def program_count(self) -> int:
        """Return how many programs are known."""
        return len(self._programs)

    def _grew(self, program: Program, block_count: int) -> None:
        """Learn by how many blocks a turn makes a program grow."""
        if program.block_count:
            self._growth_blocks.add(max(0, block_count - program.block_count))
        program.block_count = block_count

    def _stale_s(self) -> float:
        """Return how long a program may be gone until most that are gone for so long do not come back."""
        settings = self.settings
        if not settings.stale_gaps or self._gap_s.count < LEARNED_COUNT:
            return settings.stale_s
        return min(settings.stale_s, settings.stale_gaps * self._gap_s.value)

    def _program(self, program_id: str | None) -> Program:
        if program_id is not None and program_id in self._programs:
            self._programs.move_to_end(program_id)
            return self._programs[program_id]
        self._births += 1
        program = Program(self._births)
        if program_id is not None:
            self._programs[program_id] = program
            if len(self._programs) > MOST_PROGRAMS:
                forgotten_id, _ = self._programs.popitem(last=False)
                self.pins.drop(forgotten_id, "dropped")
        return program


def hold_of(hint: object) -> float | None:
    """Return how long to hold, in seconds, bounded; None if that is no number."""
    if isinstance(hint, bool) or not isinstance(hint, (int, float)) or math.isnan(hint):
        return None
    return min(max(0.0, float(hint)), HOLD_MOST_S)
