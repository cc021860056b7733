"""Pins: the blocks of a program whose tool runs, held for its next turn. Pure.

Theory of operation
-------------------
A pin is a reference to blocks, with a deadline. So it can cost others nothing but room, and that is bounded: all pins
together hold at most a share of the pool, and whoever needs their room may take it, in the order of `candidates`:

- a running request takes any pin;
- a waiting one takes those of younger programs, and stale ones; any if nothing runs or if it has waited too long.

A pin is **stale** when its program is gone for longer than most tools take, and nobody said that it comes back: most of
these programs are over. Stale pins go first, the longest gone before others; then those of programs that never came
back, since most of these are single requests; then the youngest program's (or, with `largest_first`, the largest). The
asker's own goes last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol


class Pool(Protocol):
    """What pins need of the pool of blocks."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference to each block."""

    def free(self, blocks: Sequence[Any]) -> None:
        """Give the references back; the last block is evicted first."""


class Pin:
    """The blocks of one program.

    `birth` counts programs, `came_back` is whether it had more than one turn. It is stale from `stale_s` on, and over
    at `until_s`.
    """

    __slots__ = ("birth", "blocks", "came_back", "since_s", "stale_s", "until_s")

    def __init__(
        self, birth: int, blocks: Sequence[Any], since_s: float, stale_s: float, until_s: float, *, came_back: bool
    ) -> None:
        self.birth = birth
        self.blocks = blocks
        self.since_s = since_s
        self.stale_s = stale_s
        self.until_s = until_s
        self.came_back = came_back


class Pins:
    """All pins of a pool: at most `most_blocks` together."""

    def __init__(self, pool: Pool, most_blocks: int, *, largest_first: bool = False) -> None:
        self._pool = pool
        self._most_blocks = most_blocks
        self._largest_first = largest_first
        self._pins: dict[str, Pin] = {}
        self._holders: Counter[int] = Counter()
        """How many pins hold a block, by its identity: programs share their first blocks."""
        self._next_end_s = float("inf")
        self.counts: Counter[str] = Counter()
        """Events: kept, used, expired, given_back, released, refused, dropped."""

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, program_id: str) -> bool:
        return program_id in self._pins

    @property
    def block_count(self) -> int:
        """Return how many blocks are held; one that several pins hold is one."""
        return len(self._holders)

    def items(self) -> list[tuple[str, Pin]]:
        """Return all, by program id."""
        return list(self._pins.items())

    def keep(self, program_id: str, pin: Pin) -> bool:
        """Hold a program's blocks in place of those held before; return whether there was room for that.

        To make room, pins go that would go before this one.
        """
        if not pin.blocks:
            return False
        held, kept = self._pins.get(program_id), set(map(id, pin.blocks))
        over_count = len(kept - self._holders.keys()) + self.block_count - self._most_blocks
        if over_count > 0 and held is not None:
            over_count -= self._freed_count(held, kept)
        goes: list[str] = []
        if over_count > 0:
            now_s = pin.since_s
            own_rank = self._rank(pin, now_s)
            for other_id, other in sorted(self._pins.items(), key=lambda item: self._rank(item[1], now_s)):
                if over_count <= 0 or self._rank(other, now_s) >= own_rank:
                    break
                if other_id != program_id:
                    goes.append(other_id)
                    over_count -= self._freed_count(other, kept)
        if over_count > 0:
            self.counts["refused"] += 1
            return False
        for other_id in goes:
            self.drop(other_id, "given_back")
        self._pool.touch(pin.blocks)
        if held is not None:  # after the touch: what both share stays
            self._let_go(program_id)
        self._pins[program_id] = pin
        self._holders.update(map(id, pin.blocks))
        self._next_end_s = min(self._next_end_s, pin.until_s)
        self.counts["kept"] += 1
        return True

    def extend(self, program_id: str, until_s: float) -> None:
        """Set the deadline of a pin, if there is one; until then it is not stale."""
        pin = self._pins.get(program_id)
        if pin is not None:
            pin.until_s = pin.stale_s = until_s
            self._next_end_s = min(self._next_end_s, until_s)

    def drop(self, program_id: str, event: str) -> bool:
        """Let go of a program's blocks; return whether there were any."""
        if program_id not in self._pins:
            return False
        self._let_go(program_id)
        self.counts[event] += 1
        return True

    def drop_all(self, event: str = "dropped") -> None:
        """Let go of everything."""
        for program_id in list(self._pins):
            self.drop(program_id, event)
        self._next_end_s = float("inf")

    def expire(self, now_s: float) -> None:
        """Let go of what is over; costs nothing before the first deadline."""
        if now_s < self._next_end_s:
            return
        for program_id, pin in list(self._pins.items()):
            if pin.until_s <= now_s:
                self.drop(program_id, "expired")
        self._next_end_s = min((pin.until_s for pin in self._pins.values()), default=float("inf"))

    def candidates(self, program_id: str | None, birth: int | None, now_s: float) -> list[str]:
        """Return the programs whose pins may go, in order: of all, or stale ones and those younger than `birth`.

        The asker's own is last, even if it may take no other.
        """
        ranked = sorted(
            (self._rank(pin, now_s), other_id)
            for other_id, pin in self._pins.items()
            if other_id != program_id and (birth is None or pin.birth > birth or pin.stale_s <= now_s)
        )
        found = [other_id for _, other_id in ranked]
        if program_id is not None and program_id in self._pins:
            found.append(program_id)
        return found

    def block_count_of(self, program_id: str) -> int:
        """Return how many blocks a program's pin holds."""
        pin = self._pins.get(program_id)
        return 0 if pin is None else len(pin.blocks)

    def _rank(self, pin: Pin, now_s: float) -> tuple[int, float, int]:
        """Return the order in which pins go: least first."""
        if self._largest_first:
            return (0, -len(pin.blocks), -pin.birth)
        if pin.stale_s <= now_s:
            return (0, pin.since_s, -pin.birth)
        if not pin.came_back:
            return (1, pin.since_s, -pin.birth)
        return (2, -pin.birth, 0)

    def _freed_count(self, pin: Pin, kept: set[int]) -> int:
        """Return how many blocks only this pin holds, without those that are kept."""
        return sum(self._holders[block] == 1 and block not in kept for block in map(id, pin.blocks))

    def _let_go(self, program_id: str) -> None:
        pin, holders = self._pins.pop(program_id), self._holders
        for block in map(id, pin.blocks):
            if holders[block] > 1:
                holders[block] -= 1
            else:
                del holders[block]
        self._pool.free(pin.blocks)
