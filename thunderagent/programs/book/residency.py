"""Estimate whose tokens are still in an engine's memory, by following its least-recently-used order from outside.

Theory of operation
===================
An engine keeps the blocks of ended turns until it needs them. It evicts the oldest first, and each program's tail
first. So what is left of a program depends on how much was touched since its last turn: by programs that run, whose
tools run, that are paused, or that have ended. The engine does not know the difference. A list of programs in the order
of their last turns, with their tokens, is enough to follow that: one entry per turn, O(1) each.

It is an estimate: shared tokens are left out where known, and preemptions in the engine are not seen. If an engine
reports what it holds, that replaces the estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

PROGRAMS_COUNT: Final = 10_000
"""How many programs without a turn are remembered: nothing else bounds them if the memory's size is unknown."""


class Residency:
    """What is in one replica's memory, by the program's generation, which is unique."""

    __slots__ = ("_idle", "_idle_tokens", "_used", "_used_tokens", "capacity_tokens")

    def __init__(self) -> None:
        """Create an empty memory of unknown size, from which nothing is evicted."""
        self.capacity_tokens: int | None = None
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._idle_tokens = 0
        self._used: dict[int, int] = {}
        self._used_tokens = 0

    def __repr__(self) -> str:
        return f"<Residency {self._used_tokens} in use, {self._idle_tokens} idle, of {self.capacity_tokens} tokens>"

    def __len__(self) -> int:
        return len(self._used) + len(self._idle)

    def resident_tokens(self, generation: int) -> int:
        """Return how many tokens of a program are there."""
        if generation in self._idle:
            return self._idle[generation]
        return self._used.get(generation, 0)

    def use(self, generation: int, tokens: int) -> None:
        """Note that a turn of a program runs, or goes on, with `tokens` in all."""
        if generation in self._idle:
            self._idle_tokens -= self._idle.pop(generation)
        self._used_tokens += tokens - self._used.get(generation, 0)
        self._used[generation] = tokens
        if self.capacity_tokens is not None and self._idle_tokens + self._used_tokens > self.capacity_tokens:
            self._shrink(self.capacity_tokens)

    def leave(self, generation: int, tokens: int) -> None:
        """Note that a program's last turn ended and left `tokens` behind. Does nothing if it had no turn."""
        used_tokens = self._used.pop(generation, None)
        if used_tokens is None:
            return
        self._used_tokens -= used_tokens
        self._idle[generation] = tokens
        self._idle_tokens += tokens
        if len(self._idle) > PROGRAMS_COUNT:
            self._idle_tokens -= self._idle.popitem(last=False)[1]
        if self.capacity_tokens is not None and self._idle_tokens + self._used_tokens > self.capacity_tokens:
            self._shrink(self.capacity_tokens)

    def report(self, generation: int, tokens: int) -> None:
        """Replace the estimate for a program without a turn by the engine's report."""
        if generation not in self._used and (tokens or generation in self._idle):
            self._idle_tokens += tokens - self._idle.get(generation, 0)
            self._idle[generation] = tokens

    def clear_idle(self) -> None:
        """Note that nothing is left except what turns in flight use."""
        self._idle.clear()
        self._idle_tokens = 0

    def clear(self) -> None:
        """Note that the memory is empty."""
        self._idle.clear()
        self._used.clear()
        self._idle_tokens = self._used_tokens = 0

    def _shrink(self, capacity_tokens: int) -> None:
        idle = self._idle
        excess_tokens = self._idle_tokens + self._used_tokens - capacity_tokens
        while excess_tokens > 0 and idle:
            generation, tokens = next(iter(idle.items()))
            if tokens > excess_tokens:
                idle[generation] = tokens - excess_tokens
                self._idle_tokens -= excess_tokens
                return
            del idle[generation]
            self._idle_tokens -= tokens
            excess_tokens -= tokens
