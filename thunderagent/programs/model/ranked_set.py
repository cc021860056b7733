"""A set that yields its lowest-ranked member first: a heap in which what was taken out dies lazily."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Rank = float
Order = Rank | tuple[float, Rank]
"""A rank, or one that another number comes before. Within one set all are of one kind."""

COMPACT_ABOVE = 64
"""Entries below which the dead are not worth looking for."""


class RankedSet(Generic[T]):
    """Members in ascending order of rank; equal ranks in order of entry.

    `add`, `discard` and `first` cost O(log members), amortised: an entry that was discarded or ranked anew stays in
    the heap until it reaches the top or the dead outnumber the living.
    """

    __slots__ = ("_compact_above", "_entry_of", "_heap", "_next_entry_id")

    def __init__(self) -> None:
        """Begin empty."""
        self._heap: list[tuple[Order, int, T]] = []
        self._entry_of: dict[T, tuple[Order, int, T]] = {}
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
        entry = (rank, self._next_entry_id, member)
        self._next_entry_id += 1
        self._entry_of[member] = entry
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > self._compact_above:
            self._compact()

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
            if entry_of.get(entry[2]) is entry:
                return entry[2]
            heappop(heap)
        return None

    def lowest(self, count: int, wanted: Callable[[T], bool] | None = None) -> list[T]:
        """Return the `count` members with the lowest ranks, in order: those before the first that is not `wanted`.

        Cost: O((as many as are returned + dead there) log members).
        """
        heap, entry_of = self._heap, self._entry_of
        entries: list[tuple[Order, int, T]] = []
        while heap and len(entries) < count:
            entry = heap[0]
            living = entry_of.get(entry[2]) is entry
            if living and wanted is not None and not wanted(entry[2]):
                break
            heappop(heap)
            if living:
                entries.append(entry)
        for entry in entries:
            heappush(heap, entry)
        return [entry[2] for entry in entries]

    def __iter__(self) -> Iterator[T]:
        """Yield members by rank. Costs O(members log members): for reports, not for deciding."""
        for _, _, member in sorted(self._entry_of.values(), key=itemgetter(0, 1)):
            yield member
