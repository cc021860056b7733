"""A set that yields its lowest-ranked member first: a heap in which what was taken out dies lazily."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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

FEW_RATIO = 1 / 4
"""Entries that are put into the heap one by one: of more than so many for each that is there it is made anew."""

DEAD_AHEAD_COUNT = 8
"""So many of the dead may be passed over each time, before they are taken out of the way."""


class RankedSet(Generic[T]):
    """Members in ascending order of rank; equal ranks in order of entry.

    `add` and `discard` cost O(1), for an entry is put into the heap only when somebody looks: many are gone by then.
    `first` costs O(log members) for each, amortised: one that was discarded or ranked anew stays in the heap until it
    reaches the top or the dead outnumber the living.
    """

    __slots__ = ("_entry_of", "_heap", "_new", "_next_entry_id")

    def __init__(self) -> None:
        """Begin empty."""
        self._heap: list[Entry] = []
        self._new: list[Entry] = []
        """Those not in the heap yet."""
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
        entry_of, new = self._entry_of, self._new
        before = entry_of.get(member)
        if before is not None and before[0] == rank:
            return
        entry: Entry = (rank, self._next_entry_id, member)
        self._next_entry_id += 1
        entry_of[member] = entry
        new.append(entry)
        if len(new) > len(entry_of) + COMPACT_ABOVE:
            self._make_heap()

    def add_all(self, members: Sequence[T], rank_of: Callable[[T], Order]) -> None:
        """Put members in that are not in yet, in their order. Cost: a few calls, and `rank_of` for each."""
        first_id, self._next_entry_id = self._next_entry_id, self._next_entry_id + len(members)
        entries: list[Entry] = list(
            zip(map(rank_of, members), range(first_id, self._next_entry_id), members, strict=True)
        )
        self._entry_of.update(zip(members, entries, strict=True))
        self._new += entries

    def _make_heap(self) -> None:
        """Make the heap anew, of the living alone."""
        self._heap = list(self._entry_of.values())
        heapify(self._heap)
        self._new.clear()

    def _whole_heap(self) -> list[Entry]:
        """Return the heap with those that came since somebody looked; most of a large one are alive."""
        heap, new = self._heap, self._new
        if len(new) > FEW_RATIO * len(heap) or len(heap) + len(new) > 2 * len(self._entry_of) + COMPACT_ABOVE:
            self._make_heap()
            return self._heap
        for entry in new:
            heappush(heap, entry)
        new.clear()
        return heap

    def discard(self, member: T) -> None:
        """Take `member` out if it is in."""
        self._entry_of.pop(member, None)

    def discard_all(self, members: Iterable[T]) -> None:
        """Take those out that are in."""
        entry_of = self._entry_of
        for member in members:
            entry_of.pop(member, None)

    def pop(self) -> T | None:
        """Take out and return the member with the lowest rank, or None."""
        heap, entry_of = self._whole_heap() if self._new else self._heap, self._entry_of
        while heap:
            entry = heappop(heap)
            member: T = entry[2]
            if entry_of.get(member) is entry:
                del entry_of[member]
                return member
        return None

    def first(self) -> T | None:
        """Return the member with the lowest rank, or None."""
        heap, entry_of = self._whole_heap() if self._new else self._heap, self._entry_of
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
        first = self.first()
        if first is None or (wanted is not None and not wanted(first)):
            return []
        heap, entry_of = self._heap, self._entry_of
        dead_count, size = 0, len(heap)
        found: list[T] = []
        ahead: list[Any] = [(heap[0], 0)]
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
