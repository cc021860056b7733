"""What a scheduler that leads writes down for the next one: gathered while it works, written some milliseconds later.

Theory of operation
===================
Pure: it is told what happened, and says what is to be written. Of a program nothing is kept here but that it changed;
how it is, is asked when an entry is made, so that a store that is away costs no memory: a program that changes a
thousand times meanwhile is written once. The entry that is being written stays until it is: it may be written twice.

A turn that was counted waits here for its entry. Past `WAITING_COUNT` such turns, while the store is away, they are
acknowledged without: else gateways would have to keep them all. What a crash loses then are statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from thunderagent.scale.kept import Begins, Counted, Entry, Learned, Linked, Lost, Record, Sums, Whole

SLICE_COUNT = 500
"""So many programs are told again in one entry."""

WAITING_COUNT = 50_000
"""So many turns wait for being written at most."""

TELL_AFTER_COUNT = 10_000
"""All is told again after so many records, and four for each program: then what is written anew costs little."""

Turn = tuple[str, int]
"""A gateway's id and its number of a turn."""


class Journal:
    """What is to be written."""

    def __init__(
        self,
        epoch: int,
        *,
        changes: Callable[[], list[Record]],
        everything: Callable[[], Iterable[Record]],
        sums: Callable[[], Sums],
    ) -> None:
        """Write in `epoch`. `changes` says how programs are that changed since it was called last, `everything` all.

        `everything` is read in slices, while programs change: what changed is written in the same entry or a later one.
        """
        self.epoch = epoch
        self.tells_from: str | None = None
        """Where in the log all is told anew, once that is done: what is before it can go."""
        self._changes = changes
        self._everything = everything
        self._sums = sums
        self._facts: list[Record] = []
        self._counted: dict[Turn, None] = {}
        self._told: Iterator[Record] | None = None
        self._tells_anew = True
        self._begun_at: str | None = None
        self._last_sums: Sums | None = None
        self._written_count = self._programs_count = 0
        self._entry: Entry | None = None
        self._of_entry: list[Turn] = []

    def __repr__(self) -> str:
        return f"<Journal of epoch {self.epoch}: {len(self._counted)} turns wait>"

    def counted(self, gateway_id: str, turn_id: int) -> list[Turn]:
        """Take in that a turn was counted; return those that are to be acknowledged unwritten."""
        self._counted[gateway_id, turn_id] = None
        if len(self._counted) <= WAITING_COUNT:
            return []
        forgone, self._counted = list(self._counted), {}
        return forgone

    def linked(self, gateway_id: str, boot_id: int) -> None:
        """Take in that a gateway is there."""
        self._facts.append(Linked(gateway_id, boot_id))

    def lost(self, gateway_id: str) -> None:
        """Take in that a gateway is no longer there."""
        self._facts.append(Lost(gateway_id))

    def learned(self, content: bytes) -> None:
        """Take in what was learned so far."""
        self._facts.append(Learned(content))

    def tell_all(self) -> None:
        """Have all be told again: the store has lost it, or nobody knows what it has."""
        self._tells_anew, self._told = True, None

    def entry(self, now_s: float) -> Entry | None:
        """Return what is to be written now, the same until it `was_written`; None if there is nothing."""
        if self._entry is not None:
            return self._entry
        records: list[Record] = []
        if self._tells_anew:
            self._tells_anew, self._begun_at, self._last_sums = False, None, None
            self._told = iter(self._everything())
            records.append(Begins())
        records += self._facts
        self._facts = []
        told = list(islice(self._told, SLICE_COUNT)) if self._told is not None else []
        records += told
        records += self._changes()  # after those that are told again: they are as new
        if self._told is not None and len(told) < SLICE_COUNT:
            self._told = None
            records.append(Whole())
        by_gateway: dict[str, list[int]] = {}
        for gateway_id, turn_id in self._counted:
            by_gateway.setdefault(gateway_id, []).append(turn_id)
        records += [Counted(gateway_id, tuple(ids)) for gateway_id, ids in by_gateway.items()]
        sums = self._sums()
        if sums != self._last_sums:
            self._last_sums = sums
            records.append(sums)
        if not records:
            return None
        self._of_entry, self._counted = list(self._counted), {}
        self._entry = Entry(self.epoch, now_s, records)
        return self._entry

    def was_written(self, where: str, programs_count: int) -> list[Turn]:
        """Take in that the entry stands in the log; return the turns that are to be acknowledged for it.

        `programs_count` is how many there are now.
        """
        assert self._entry is not None, "there is an entry"
        records, self._entry = self._entry.records, None
        self._written_count += len(records)
        if type(records[0]) is Begins:
            self._begun_at, self._written_count = where, 0
        if self._begun_at is not None and self._told is None and not self._tells_anew:
            self.tells_from, self._begun_at = self._begun_at, None
        if self._written_count > TELL_AFTER_COUNT + 4 * programs_count:
            self.tell_all()
        turns, self._of_entry = self._of_entry, []
        return turns

    @property
    def has_more(self) -> bool:
        """Whether there is more to be written for certain."""
        return self._entry is not None or self._told is not None or self._tells_anew
