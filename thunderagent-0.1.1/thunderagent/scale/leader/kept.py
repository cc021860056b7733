"""What a scheduler leaves for the next one: entries of a log, and their accumulated state.

Theory of operation
===================
An entry says what changed since the one before it: where programs stand now, which of them ended, which turns of which
gateways were counted, and the sums with these. It states how things **are**, not what happened. So an entry may come
twice, frequent changes are written once, and another version of the code reads the same from it. A follower of the log
has all programs in a dict, and nothing to compute.

Turns are not in it: their gateways are the source of truth. That a turn was counted is in it, because the sums include
it, and its gateway may not have heard that. So an end is acknowledged once its entry is written, and both are in the
same entry.

The log needs no snapshot. Now and then, and at the begin of each epoch, its writer sends all programs again, some in
each entry, between `Begins` and `Whole`; what is older than that `Begins` is cut off.

Times are durations before the entry's `now_s`, which is of the clock of its epoch's scheduler. A reader compares that
with its own clock, at the entry with the least delay. No wall clock is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from thunderagent.errors import BadFrameError
from thunderagent.programs.messages import BranchRecord, ProgramRecord
from thunderagent.scale.messages import MAX_EPOCH, known_of

COUNTED_COUNT = 20_000
"""How many turns of a gateway are remembered as counted: it may not have heard of the last ones."""


class At(Struct, frozen=True, array_like=True, tag="at"):
    """The current state of a program of a pool."""

    pool: str
    program: Annotated[Sequence[Any], Meta(min_length=1)]
    """The fields of a `ProgramRecord`."""


class Ended(Struct, frozen=True, array_like=True, tag="ended", gc=False):
    """A program is no longer there."""

    pool: str
    program_id: str


class Linked(Struct, frozen=True, array_like=True, tag="linked", gc=False):
    """A gateway is there, and must report before its turns count as over."""

    gateway_id: str
    boot_id: int


class Lost(Struct, frozen=True, array_like=True, tag="lost", gc=False):
    """A gateway is gone, at least for now; its counted turns are still useful."""

    gateway_id: str


class Counted(Struct, frozen=True, array_like=True, tag="counted", gc=False):
    """These turns of a gateway have ended, and the sums have them."""

    gateway_id: str
    turn_ids: tuple[int, ...]


class Sums(Struct, frozen=True, array_like=True, tag="sums", gc=False):
    """Number of turns by outcome, and the usage of finished ones."""

    outcome_counts: dict[str, int]
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    may_miss: bool = False
    """Whether turns may be missing: a takeover from a store that had lost data."""


class Learned(Struct, frozen=True, array_like=True, tag="learned", gc=False):
    """What was learned so far, as in the file of `--state`."""

    content: bytes


class Operated(Struct, frozen=True, array_like=True, tag="operated"):
    """Lasting settings of operators and global policies: routes, and where nothing is granted for which causes."""

    routes: tuple[tuple[str, str, dict[str, float]], ...] = ()
    """Scope, name, and weights of replicas."""
    causes: tuple[tuple[str | None, str], ...] = ()
    """Each with its replica, or None for all."""


class Begins(Struct, frozen=True, array_like=True, tag="begins", gc=False):
    """From here on all programs are written again."""


class Whole(Struct, frozen=True, array_like=True, tag="whole", gc=False):
    """All programs were written: there is no other."""


Record = At | Ended | Linked | Lost | Counted | Sums | Learned | Operated | Begins | Whole


class Entry(Struct, frozen=True, array_like=True):
    """What changed, at `now_s` of the scheduler of an epoch."""

    epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCH)]
    now_s: float
    records: Sequence[Record]


class _RawEntry(Struct, frozen=True, array_like=True):
    epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCH)]
    now_s: float
    records: list[Raw]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode
_decode_raw = msgspec.msgpack.Decoder(_RawEntry).decode
_decode_record: Any = msgspec.msgpack.Decoder(Record).decode
_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Record))
_BRANCHES = ProgramRecord._fields.index("branches")


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    return _encode(entry)


def encode_record(record: Record) -> bytes:
    """Encode a part of an entry; `entry_of` joins parts."""
    return _encode(record)


def entry_of(epoch: int, now_s: float, parts: Sequence[bytes]) -> bytes:
    """Return the same as `encode` for the encoded records in `parts`."""
    return _encode(_RawEntry(epoch, now_s, [Raw(each) for each in parts]))


def decode(data: bytes) -> Entry:
    """Decode an entry, without records of unknown kinds. Raises `BadFrameError`."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        raw = _decode_raw(data)
        return Entry(raw.epoch, raw.now_s, known_of(raw.records, _decode_record, _KINDS))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrameError(f"an entry is invalid: {error}") from error


def program_of(fields: Sequence[Any]) -> ProgramRecord:
    """Return a program from its fields; unknown further ones are ignored. Raises `msgspec.ValidationError`."""
    kept = list(fields[: len(ProgramRecord._fields)])
    if len(kept) > _BRANCHES:
        kept[_BRANCHES] = [each[: len(BranchRecord._fields)] for each in kept[_BRANCHES]]
    return msgspec.convert(kept, ProgramRecord)


class KeptGateway:
    """A gateway that was there."""

    __slots__ = ("boot_id", "counted", "is_there")

    def __init__(self, boot_id: int) -> None:
        """Start without counted turns."""
        self.boot_id = boot_id
        self.is_there = True
        self.counted: dict[int, None] = {}
        """The last ones, oldest first."""


class Kept:
    """The accumulated state of the entries."""

    def __init__(self) -> None:
        """Start empty."""
        self.epoch = 0
        """Of the last entry."""
        self.gateways: dict[str, KeptGateway] = {}
        self.sums = Sums({})
        self.learned = b""
        self.operated = Operated()
        self._programs: dict[tuple[str, str], tuple[Sequence[Any], int, float]] = {}
        self._told: set[tuple[str, str]] | None = None
        self._told_gateway_ids: set[str] = set()
        self.is_torn = False
        """Whether the store lost what its last leader wrote, and not all was written again."""
        self._ahead_s: dict[int, float] = {}
        """How far our clock is ahead of that of each epoch's scheduler."""

    def __repr__(self) -> str:
        return f"<Kept, epoch {self.epoch}: {len(self._programs)} programs, {len(self.gateways)} gateways>"

    @property
    def programs_count(self) -> int:
        """Number of programs."""
        return len(self._programs)

    def take(self, entry: Entry, now_s: float) -> None:
        """Add the next entry, received at `now_s` of our own clock."""
        self.epoch = entry.epoch
        ahead_s = now_s - entry.now_s
        self._ahead_s[entry.epoch] = min(ahead_s, self._ahead_s.get(entry.epoch, ahead_s))
        for record in entry.records:
            self._take(record, entry)

    def _take(self, record: Record, entry: Entry) -> None:
        match record:
            case At():
                key = record.pool, str(record.program[0])
                self._programs[key] = record.program, entry.epoch, entry.now_s
                if self._told is not None:
                    self._told.add(key)
            case Ended():
                self._programs.pop((record.pool, record.program_id), None)
            case Linked():
                self._link(record)
            case Lost():
                if (gateway := self.gateways.get(record.gateway_id)) is not None:
                    gateway.is_there = False
            case Counted():
                self._count(record)
            case Sums():
                self.sums = record
            case Learned():
                self.learned = record.content
            case Operated():
                self.operated = record
            case Begins() | Whole():
                self._forget_untold(begins=isinstance(record, Begins))

    def _forget_untold(self, *, begins: bool) -> None:
        """Start to note what is written again; or forget programs and gateways that were not: they are gone."""
        if begins:
            self._told, self._told_gateway_ids = set(), set()
            return
        if self._told is not None:
            for key in self._programs.keys() - self._told:
                del self._programs[key]
            self.gateways = {key: each for key, each in self.gateways.items() if key in self._told_gateway_ids}
            self.is_torn = False
        self._told = None

    def _link(self, record: Linked) -> None:
        known = self.gateways.get(record.gateway_id)
        if known is None or known.boot_id != record.boot_id:
            known = self.gateways[record.gateway_id] = KeptGateway(record.boot_id)
        known.is_there = True
        if self._told is not None:
            self._told_gateway_ids.add(record.gateway_id)

    def _count(self, record: Counted) -> None:
        gateway = self.gateways.get(record.gateway_id)
        if gateway is None:
            return
        gateway.counted.update(dict.fromkeys(record.turn_ids))
        while len(gateway.counted) > COUNTED_COUNT:
            del gateway.counted[next(iter(gateway.counted))]

    def programs(self, now_s: float) -> Iterator[tuple[str, ProgramRecord]]:
        """Yield the programs in their current state, each with its pool's name; unreadable ones are left out.

        Cost: O(programs), so take them a few at a time.
        """
        for (pool, _), (fields, epoch, told_s) in self._programs.items():
            try:
                record = program_of(fields)
            except (msgspec.ValidationError, TypeError, KeyError):
                continue
            yield pool, record.older(max(0.0, now_s - self._ahead_s[epoch] - told_s))

    def forget(self, count: int) -> bool:
        """Forget this many programs; return False if those were all."""
        for _ in range(min(count, len(self._programs))):
            self._programs.popitem()
        return bool(self._programs)
