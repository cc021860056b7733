"""A set that yields its lowest-ranked members first. These are sorted; the rest is a heap that keeps dead entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Rank = float

Order = Rank | tuple[float, Rank]
"""A rank, or a rank after another number. Within one set all are of one kind."""

Entry = Any
"""A tuple of order, number and member. With that type, a compiled core would make another tuple at each turn."""

COMPACT_ABOVE: Final = 64
"""Up to this many entries, dead ones are not worth removing."""

KEPT_RATIO: Final = 9 / 8
"""How many entries may be kept for one that lives, where the others' members ended."""

FEW_RATIO: Final = 1 / 4
"""Entries pushed one by one, as a ratio of the heap's size: for more, the heap is rebuilt."""

FRONT_COUNT: Final = 16
"""How many entries are sorted at a time on demand; `add` grows them to at most four times as many."""


class RankedSet(Generic[T]):
    """Members in ascending order of rank; equal ranks in order of entry.

    The lowest members are sorted in front; in a small set all are. Lookups mostly hit the front, and cost O(1). No
    other member ranks lower than the last of the front. For those, `add` and `discard` cost O(1), because an entry
    enters the heap only when the front is empty, and many are gone by then. Entering costs O(log members) each,
    amortised: a discarded or re-ranked entry stays in the heap until it reaches the top or dead entries outnumber live
    ones.
    """

    __slots__ = ("_entry_of", "_front", "_heap", "_is_sorted", "_new", "_next_entry_id")

    def __init__(self) -> None:
        """Create an empty set."""
        self._front: list[Entry] = []
        self._heap: list[Entry] = []
        self._is_sorted = True
        """Whether the heap is fully sorted, as after a rebuild."""
        self._new: list[Entry] = []
        """Entries that are in neither front nor heap yet."""
        self._entry_of: dict[T, Entry] = {}
        self._next_entry_id = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, member: T) -> bool:
        return member in self._entry_of

    def __repr__(self) -> str:
        return f"<RankedSet of {len(self)}>"

    def add(self, member: T, rank: Order) -> None:
        """Add `member`, or rank it anew; a member with that rank already stays where it is."""
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
        """Add members that are not in yet, in their order, each with its rank. Cost: a few calls."""
        first_id, self._next_entry_id = self._next_entry_id, self._next_entry_id + len(members)
        entries: list[Entry] = list(zip(ranks, range(first_id, self._next_entry_id), members, strict=True))
        if not self._entry_of:
            self._entry_of.update(zip(members, entries, strict=True))
            entries.sort(key=itemgetter(0))  # the sort is stable for equal ranks, and ranks alone compare quickly
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
        """Put a number before each rank from now on: 0 for all current members."""
        self._entry_of = {member: ((0, entry[0]), entry[1], member) for member, entry in self._entry_of.items()}
        self._make_heap()

    def _make_heap(self) -> None:
        """Rebuild the heap from live entries, including those in front."""
        self._heap = sorted(self._entry_of.values())
        self._is_sorted = True
        self._new.clear()
        self._front.clear()

    def _order(self, count: int) -> None:
        """Sort members into the front until it has `count`, if there are as many."""
        heap, new, front, entry_of = self._heap, self._new, self._front, self._entry_of
        if new:  # most entries of a large heap are live
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
        """Remove `member` if it is in."""
        entry, front = self._entry_of.pop(member, None), self._front
        if entry is not None and front and entry <= front[-1]:
            del front[bisect_left(front, entry)]

    def forget(self, member: T) -> None:
        """Remove a member that ended: of such, few stay until their rank is reached. Cost: O(1), amortised."""
        entry, front = self._entry_of.pop(member, None), self._front  # as `discard`, which would be a call more
        if entry is not None and front and entry <= front[-1]:
            del front[bisect_left(front, entry)]
        if len(self._heap) + len(self._new) > KEPT_RATIO * len(self._entry_of) + FRONT_COUNT:
            self._make_heap()

    def discard_lowest(self, count: int) -> None:
        """Remove the first `count` members that `lowest` returned."""
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
        """Return the `count` members with the lowest ranks, in order; with `highest`, none of a higher rank."""
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
