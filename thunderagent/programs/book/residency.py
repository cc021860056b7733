"""Whose tokens still lie in an engine's memory: its own least-recently-used order, followed from outside.

Theory of operation
===================
An engine keeps the blocks of turns that ended until it needs them, and takes the oldest first, of each program the tail
first. So what is left of a program after a while depends on how much was touched since its last turn - by others that
run, whose tools run, that are paused, or that have ended: the engine does not know the difference. A list of programs
in the order of their last turns, with their tokens, is all it takes to follow that: one entry a turn, O(1) each.

It is an estimate: what programs share is left out of it as far as it is known, and a request that the engine preempts
is not seen. Where an engine reports what it holds, that replaces the estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

PROGRAMS_COUNT: Final = 10_000
"""Programs without a turn that are remembered: where the memory's size is not known nothing else bounds them."""


class Residency:
    """What lies in one replica's memory, by the generation of the program, which is unique."""

    __slots__ = ("_idle", "_idle_tokens", "_used", "_used_tokens", "capacity_tokens")

    def __init__(self) -> None:
        """Begin with an empty memory of unknown size, out of which nothing is ever taken."""
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
        """Return how many tokens of a program lie there."""
        if generation in self._idle:
            return self._idle[generation]
        return self._used.get(generation, 0)

    def use(self, generation: int, tokens: int) -> None:
        """Note that a turn of a program runs, or runs on, with `tokens` in all."""
        if generation in self._idle:
            self._idle_tokens -= self._idle.pop(generation)
        self._used_tokens += tokens - self._used.get(generation, 0)
        self._used[generation] = tokens
        if self.capacity_tokens is not None and self._idle_tokens + self._used_tokens > self.capacity_tokens:
            self._shrink(self.capacity_tokens)

    def leave(self, generation: int, tokens: int) -> None:
        """Note that the last turn of a program ended, and left `tokens` behind. Nothing for one that had no turn."""
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
        """Replace the estimate for a program without a turn by what the engine says."""
        if generation not in self._used and (tokens or generation in self._idle):
            self._idle_tokens += tokens - self._idle.get(generation, 0)
            self._idle[generation] = tokens

    def clear_idle(self) -> None:
        """Note that nothing is left but what turns in flight use."""
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
