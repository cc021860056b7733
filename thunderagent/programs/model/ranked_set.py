"""A set that yields its lowest-ranked members first: these stand in order, the others in a heap where the dead stay."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Rank = float
Order = Rank | tuple[float, Rank]
"""A rank, or one that another number comes before. Within one set all are of one kind."""

Entry = Any
"""A tuple of order, number and member. Were it typed so, a compiled core would make another tuple at each turn."""

COMPACT_ABOVE: Final = 64
"""Entries below which the dead are not worth looking for."""

FEW_RATIO: Final = 1 / 4
"""Entries that are put into the heap one by one: of more than so many for each that is there it is made anew."""

FRONT_COUNT: Final = 16
"""So many are put in order at a time, when somebody looks; there are never more than four times as many by `add`."""


class RankedSet(Generic[T]):
    """Members in ascending order of rank; equal ranks in order of entry.

    The lowest stand in front, in order, and of a small set all: who looks mostly finds them there, and costs O(1). All
    others are ranked no lower than the last of these. Of them `add` and `discard` cost O(1), for an entry is put into
    the heap only when the front is empty: many are gone by then. That costs O(log members) for each, amortised: one
    that was discarded or ranked anew stays in the heap until it reaches the top or the dead outnumber the living.
    """

    __slots__ = ("_entry_of", "_front", "_heap", "_is_sorted", "_new", "_next_entry_id")

    def __init__(self) -> None:
        """Begin empty."""
        self._front: list[Entry] = []
        self._heap: list[Entry] = []
        self._is_sorted = True
        """Whether the heap is in order from its begin to its end, as it is when it was made anew."""
        self._new: list[Entry] = []
        """Those in neither yet."""
        self._entry_of: dict[T, Entry] = {}
        self._next_entry_id = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, member: T) -> bool:
        return member in self._entry_of

    def __repr__(self) -> str:
        return f"<RankedSet of {len(self)}>"

    def add(self, member: T, rank: Order) -> None:
        """Put `member` in, or rank it anew; one that is in and has that rank stays where it is."""
        entry_of, front = self._entry_of, self._front
        before = entry_of.get(member)
        if before is not None:
            if before[0] == rank:
                return
            if front and before <= front[-1]:
                del front[bisect_left(front, before)]
        entry: Entry = (rank, self._next_entry_id, member)
        self._next_entry_id += 1
        entry_of[member] = entry
        if (front and rank < front[-1][0]) or not (self._heap or self._new):
            insort(front, entry)
            if len(front) > 4 * FRONT_COUNT:
                self._new += front[FRONT_COUNT:]
                del front[FRONT_COUNT:]
            return
        new = self._new
        new.append(entry)
        if len(new) > len(entry_of) + COMPACT_ABOVE:
            self._make_heap()

    def add_all(self, members: Sequence[T], ranks: Sequence[Order]) -> None:
        """Put members in that are not in yet, in their order, each with its rank. Cost: a few calls."""
        first_id, self._next_entry_id = self._next_entry_id, self._next_entry_id + len(members)
        entries: list[Entry] = list(zip(ranks, range(first_id, self._next_entry_id), members, strict=True))
        if not self._entry_of:
            self._entry_of.update(zip(members, entries, strict=True))
            entries.sort(key=itemgetter(0))  # of equal ranks they are in order, and ranks alone compare quickly
            self._heap, self._is_sorted = entries, True
            self._new.clear()
            return
        self._entry_of.update(zip(members, entries, strict=True))
        self._new += self._front
        self._new += entries
        self._front.clear()
        if len(self._new) > len(self._entry_of) + COMPACT_ABOVE:
            self._make_heap()

    def pair_ranks(self) -> None:
        """Have a number come before each rank from now on: 0 before the ranks of all who are in."""
        self._entry_of = {member: ((0, entry[0]), entry[1], member) for member, entry in self._entry_of.items()}
        self._make_heap()

    def _make_heap(self) -> None:
        """Make the heap anew, of the living alone, and of those in front."""
        self._heap = sorted(self._entry_of.values())
        self._is_sorted = True
        self._new.clear()
        self._front.clear()

    def _order(self, count: int) -> None:
        """Put members in front until there are `count`, if there are so many."""
        heap, new, front, entry_of = self._heap, self._new, self._front, self._entry_of
        if new:  # most of a large heap are alive
            if len(new) > FEW_RATIO * len(heap) or len(heap) + len(new) > 2 * len(entry_of) + COMPACT_ABOVE:
                self._make_heap()
                heap = self._heap
            else:
                for entry in new:
                    heappush(heap, entry)
                self._is_sorted = False
                new.clear()
        while heap and len(front) < count:
            lowest = heap[: count - len(front)] if self._is_sorted else [heappop(heap)]
            if self._is_sorted:
                del heap[: len(lowest)]
            front += [entry for entry in lowest if entry_of.get(entry[2]) is entry]

    def discard(self, member: T) -> None:
        """Take `member` out if it is in."""
        entry, front = self._entry_of.pop(member, None), self._front
        if entry is not None and front and entry <= front[-1]:
            del front[bisect_left(front, entry)]

    def discard_all(self, members: Iterable[T]) -> None:
        """Take those out that are in."""
        if self._front:
            self._new += self._front
            self._front.clear()
        entry_of = self._entry_of
        for member in members:
            if member in entry_of:
                del entry_of[member]

    def discard_lowest(self, count: int) -> None:
        """Take those out that `lowest` returned first, so many."""
        front, entry_of = self._front, self._entry_of
        for entry in front[:count]:
            del entry_of[entry[2]]
        del front[:count]

    def first(self) -> T | None:
        """Return the member with the lowest rank, or None."""
        front = self._front
        if not front:
            if not self._entry_of:
                return None
            self._order(FRONT_COUNT)
        member: T = front[0][2]
        return member

    def lowest(self, count: int, highest: Order | None = None) -> list[T]:
        """Return the `count` members with the lowest ranks, in order; with `highest` none of a higher rank."""
        front = self._front
        if not front:
            if not self._entry_of:
                return []
            self._order(FRONT_COUNT)
        if highest is None:
            if len(front) < count:
                self._order(count)
            return [entry[2] for entry in front[:count]]
        found: list[T] = []
        if front[0][0] > highest:
            return found
        while len(front) < count and len(front) < len(self._entry_of) and front[-1][0] <= highest:
            self._order(len(front) + FRONT_COUNT)
        for entry in front:
            if len(found) == count or entry[0] > highest:
                break
            found.append(entry[2])
        return found

    def __iter__(self) -> Iterator[T]:
        """Yield members by rank. Costs O(members log members): for reports, not for deciding."""
        for _, _, member in sorted(self._entry_of.values()):
            yield member
