"""A set that yields its lowest-ranked member first: a heap in which what was taken out dies lazily."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Rank = float
Order = Rank | tuple[float, Rank]
"""A rank, or one that another number comes before. Within one set all are of one kind."""

Entry = Any
"""A tuple of order, number and member. Were it typed so, a compiled core would make another tuple at each turn."""

COMPACT_ABOVE = 64
"""Entries below which the dead are not worth looking for."""

DEAD_AHEAD_COUNT = 8
"""So many of the dead may be passed over each time, before they are taken out of the way."""


class RankedSet(Generic[T]):
    """Members in ascending order of rank; equal ranks in order of entry.

    `add`, `discard` and `first` cost O(log members), amortised: an entry that was discarded or ranked anew stays in
    the heap until it reaches the top or the dead outnumber the living.
    """

    __slots__ = ("_compact_above", "_entry_of", "_heap", "_next_entry_id")

    def __init__(self) -> None:
        """Begin empty."""
        self._heap: list[Entry] = []
        self._entry_of: dict[T, Entry] = {}
        self._next_entry_id = 0
        self._compact_above = COMPACT_ABOVE

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, member: T) -> bool:
        return member in self._entry_of

    def __repr__(self) -> str:
        return f"<RankedSet of {len(self)}>"

    def add(self, member: T, rank: Order) -> None:
        """Put `member` in, or rank it anew; one that is in and has that rank stays where it is."""
        before = self._entry_of.get(member)
        if before is not None and before[0] == rank:
            return
        entry: Entry = (rank, self._next_entry_id, member)
        self._next_entry_id += 1
        self._entry_of[member] = entry
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > self._compact_above:
            self._compact()

    def fill(self, members: Iterable[T], rank_of: Callable[[T], Order]) -> None:
        """Put members into an empty set. Cost: O(members)."""
        heap, entry_of = self._heap, self._entry_of
        for member in members:
            entry: Entry = (rank_of(member), self._next_entry_id, member)
            self._next_entry_id += 1
            entry_of[member] = entry
            heap.append(entry)
        heapify(heap)

    def _compact(self) -> None:
        """Drop the dead if they outnumber the living, and look again when the heap has doubled."""
        entry_of = self._entry_of
        if len(self._heap) > 2 * len(entry_of):
            self._heap = [entry for entry in self._heap if entry_of.get(entry[2]) is entry]
            heapify(self._heap)
        self._compact_above = max(COMPACT_ABOVE, 2 * len(entry_of))

    def discard(self, member: T) -> None:
        """Take `member` out if it is in."""
        self._entry_of.pop(member, None)

    def first(self) -> T | None:
        """Return the member with the lowest rank, or None."""
        heap, entry_of = self._heap, self._entry_of
        while heap:
            entry = heap[0]
            member: T = entry[2]
            if entry_of.get(member) is entry:
                return member
            heappop(heap)
        return None

    def lowest(self, count: int, wanted: Callable[[T], bool] | None = None) -> list[T]:
        """Return the `count` members with the lowest ranks, in order: those before the first that is not `wanted`.

        The heap is walked from its root, and stays as it is. Cost: O(k log k) for k = as many as are returned, and a
        few of the dead among them.
        """
        heap, entry_of, dead_count, size = self._heap, self._entry_of, 0, len(self._heap)
        found: list[T] = []
        ahead: list[Any] = [(heap[0], 0)] if heap else []
        while ahead and len(found) < count:
            entry, index = heappop(ahead)
            member: T = entry[2]
            if entry_of.get(member) is not entry:
                dead_count += 1
            elif wanted is None or wanted(member):
                found.append(member)
            else:
                break
            child: int = 2 * index + 1
            if child < size:
                heappush(ahead, (heap[child], child))
                if child + 1 < size:
                    heappush(ahead, (heap[child + 1], child + 1))
        if dead_count > DEAD_AHEAD_COUNT:
            for entry in [heappop(heap) for _ in range(len(found) + dead_count)]:
                if entry_of.get(entry[2]) is entry:
                    heappush(heap, entry)
        return found

    def __iter__(self) -> Iterator[T]:
        """Yield members by rank. Costs O(members log members): for reports, not for deciding."""
        for _, _, member in sorted(self._entry_of.values(), key=itemgetter(0, 1)):
            yield member
