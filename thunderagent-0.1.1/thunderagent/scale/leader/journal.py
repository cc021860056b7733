"""What a leading scheduler writes down for its successor: gathered while it works, written some milliseconds later.

Theory of operation
===================
Pure: it is told what happened, and returns what to write. Of a program it keeps only the fact that it changed, and
reads its state when it makes an entry. So a store that is away costs no memory: a program that changes a thousand
times meanwhile is written once. The same holds for a gateway that comes and goes, and for what was learned. An entry
stays until it is written: it may be written twice.

An entry is bounded, because a store takes only a limited amount in its time limit. The rest follows in the next
entries. Which turns were counted never waits for a later one: it is in one entry with the sums.

A counted turn waits here for its entry. While the store is away, turns past `WAITING_COUNT` are acknowledged without
an entry: otherwise gateways would have to keep them all. A crash then loses statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from thunderagent.scale.leader.kept import (
    Begins,
    Counted,
    Learned,
    Linked,
    Lost,
    Operated,
    Record,
    Sums,
    Whole,
    encode_record,
    entry_of,
)

SLICE_COUNT = 100
"""So many programs are told again in one entry: 1 ms, which what changes meanwhile waits for."""

ENTRY_BYTES = 1_000_000
"""An entry that is as large takes in no more programs; half of it is for those that are told again."""

WAITING_COUNT = 50_000
"""So many turns wait for being written at most."""

TELL_AFTER_BYTES = 8_000_000
"""All is told again after so much, and four times what that took: then what is written anew costs little."""

Turn = tuple[str, int]
"""A gateway's id and its number of a turn."""


class Journal:
    """What is to be written."""

    def __init__(
        self,
        epoch: int,
        *,
        changes: Callable[[], Iterable[Record]],
        everything: Callable[[], Iterable[Record]],
        sums: Callable[[], Sums],
    ) -> None:
        """Write in `epoch`. `changes` says how programs are that changed since it was called last, `everything` all.

        Both are read in slices, while programs change: what changed is written in the same entry or a later one.
        """
        self.epoch = epoch
        self.tells_from: str | None = None
        """Where in the log all is told anew, once that is done: what is before it can go."""
        self._changes = changes
        self._everything = everything
        self._sums = sums
        self._linked: dict[str, Linked] = {}
        self._lost: dict[str, Lost] = {}
        self._learned: Learned | None = None
        self._operated: Operated | None = None
        self._counted: dict[Turn, None] = {}
        self._changed: Iterator[Record] | None = None
        """What changed and found no place in the last entry."""
        self._told: Iterator[Record] | None = None
        self._tells_anew = True
        self._begun_at: str | None = None
        self._last_sums: Sums | None = None
        self._written_bytes = self._told_bytes = 0
        """Since all was told anew last; and how much of that is what was told."""
        self._entry: bytes | None = None
        self._entry_begins = False
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
        self._linked[gateway_id] = Linked(gateway_id, boot_id)
        self._lost.pop(gateway_id, None)

    def lost(self, gateway_id: str) -> None:
        """Take in that a gateway is no longer there."""
        self._lost[gateway_id] = Lost(gateway_id)

    def learned(self, content: bytes) -> None:
        """Take in what was learned so far."""
        self._learned = Learned(content)

    def operated(self, record: Operated) -> None:
        """Take in what operators said so far."""
        self._operated = record

    def tell_all(self) -> None:
        """Have all be told again: the store has lost it, or nobody knows what it has."""
        self._tells_anew, self._told = True, None

    def entry(self, now_s: float) -> bytes | None:
        """Return what is to be written now, the same until it `was_written`; None if there is nothing."""
        if self._entry is not None:
            return self._entry
        parts: list[bytes] = []
        self._entry_begins = self._tells_anew
        if self._tells_anew:
            self._tells_anew, self._begun_at, self._last_sums, self._told_bytes = False, None, None, 0
            self._told = iter(self._everything())
            parts.append(encode_record(Begins()))
        parts += map(encode_record, self._take_facts())
        parts += self._take_told()
        parts += map(encode_record, self._take_counted())
        parts += self._take_changed(ENTRY_BYTES - sum(map(len, parts)))  # after those that are told: they are as new
        if not parts:
            return None
        self._entry = entry_of(self.epoch, now_s, parts)
        return self._entry

    def _take_facts(self) -> list[Record]:
        facts: list[Record] = [*self._linked.values(), *self._lost.values()]
        facts += [each for each in (self._learned, self._operated) if each is not None]
        self._linked, self._lost, self._learned, self._operated = {}, {}, None, None
        return facts

    def _take_told(self) -> list[bytes]:
        """Take some of what is told again, and say at its end that it is whole."""
        parts: list[bytes] = []
        if self._told is None:
            return parts
        size = 0
        for record in self._told:
            parts.append(encode_record(record))
            size += len(parts[-1])
            if len(parts) == SLICE_COUNT or size >= ENTRY_BYTES // 2:
                break
        else:
            self._told = None
            parts.append(encode_record(Whole()))
        self._told_bytes += size
        return parts

    def _take_counted(self) -> list[Record]:
        by_gateway: dict[str, list[int]] = {}
        for gateway_id, turn_id in self._counted:
            by_gateway.setdefault(gateway_id, []).append(turn_id)
        self._of_entry, self._counted = list(self._counted), {}
        records: list[Record] = [Counted(gateway_id, tuple(ids)) for gateway_id, ids in by_gateway.items()]
        sums = self._sums()
        if sums != self._last_sums:
            self._last_sums = sums
            records.append(sums)
        return records

    def _take_changed(self, room_bytes: int) -> list[bytes]:
        """Take what changed, as far as there is room: first what the entry before had none for."""
        parts: list[bytes] = []
        is_rest = self._changed is not None
        changed = self._changed if self._changed is not None else iter(self._changes())
        while room_bytes > 0:
            record = next(changed, None)
            if record is not None:
                parts.append(encode_record(record))
                room_bytes -= len(parts[-1])
            elif is_rest:
                changed, is_rest = iter(self._changes()), False
            else:
                self._changed = None
                return parts
        self._changed = changed
        return parts

    def was_written(self, where: str) -> list[Turn]:
        """Take in that the entry stands in the log; return the turns that are to be acknowledged for it."""
        assert self._entry is not None, "there is an entry"
        if self._entry_begins:
            self._begun_at, self._written_bytes = where, 0
        self._written_bytes += len(self._entry)
        self._entry = None
        if self._told is None and not self._tells_anew:
            if self._begun_at is not None:
                self.tells_from, self._begun_at = self._begun_at, None
            if self._written_bytes > TELL_AFTER_BYTES + 4 * self._told_bytes:
                self.tell_all()
        turns, self._of_entry = self._of_entry, []
        return turns

    @property
    def has_more(self) -> bool:
        """Whether there is more to be written for certain."""
        waits = self._entry is not None or self._changed is not None
        return waits or self._told is not None or self._tells_anew
