"""Learned knowledge in a file: read at the start, written every half minute and at the end.

Theory of operation
===================
A file is one line of JSON with format, version, length and checksum, followed by the records of all pools, JSON too. It
is written beside its place and renamed once it is on the disk, off the event loop, so readers find either the old one
or the new one. An unusable file (torn, of another version, not ours) is moved out of the way and logged: a proxy that
has to learn again is slower for a minute, one that does not start serves nobody. A file that cannot be read may be a
good one: it stays, and nothing is written over it.

Which record belongs to which pool is known once replicas report what they serve: a pool that has learned nothing takes
the record of its models, by an event like any other, so that a log replays. Records of models that nobody serves at the
moment are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from thunderagent.errors import ConfigurationError, StateError
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.messages import KnowledgeLoaded, LearnedRecord
from thunderagent.programs.policies.parts.least_area import LeastArea
from thunderagent.programs.policy import ClaimRules
from thunderagent.programs.pools import Pool
from thunderagent.runtime.runtime import Runtime

log = structlog.get_logger("thunderagent.learned_state")

FORMAT = "thunderagent-learned"
VERSION = 1
"""Version of the records: others are not read."""

SAVE_EVERY_S = 30.0
"""A killed process forgets no more than this and the time to write."""

MAX_STATE_BYTES = 64 * 2**20
"""A larger file is not ours: one full pool takes half a megabyte."""

MAX_RECORDS_COUNT = 64
"""How many pools are kept, the one longest unused forgotten first."""


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """What the pool of some models has learned."""

    models: tuple[str, ...]
    learned: LearnedRecord


class _Head(msgspec.Struct):
    format: str
    version: int
    bytes: int
    sha256: str


_encode, _decode = msgspec.json.encode, msgspec.json.Decoder(list[PoolRecord]).decode


def encode_state(records: Sequence[PoolRecord]) -> bytes:
    """Return the content of a file."""
    body = _encode(records)
    return _encode(_Head(FORMAT, VERSION, len(body), hashlib.sha256(body).hexdigest())) + b"\n" + body


def decode_state(content: bytes) -> list[PoolRecord]:
    """Return the records in a file. Raises `StateError` with the reason: invalid, of another version, or torn."""
    first, _, body = content.partition(b"\n")
    try:
        head = msgspec.json.decode(first, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError("it is not a file of learned state") from error
    if head.format != FORMAT:
        raise StateError("it is not a file of learned state")
    if head.version != VERSION:
        raise StateError(f"it is of version {head.version}, not {VERSION}")
    if head.bytes != len(body) or head.sha256 != hashlib.sha256(body).hexdigest():
        raise StateError("it is incomplete: its length or checksum is not what its first line says")
    try:
        records = _decode(body)
        for record in records:
            Knowledge(ClaimRules(adapt_capacity=True)).adopt(record.learned)
            if record.learned.lengths is not None:
                LeastArea().adopt(record.learned.lengths)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise StateError(f"its content is invalid: {error}") from error
    return records


def read_state(path: Path) -> list[PoolRecord]:
    """Return the records in a file, empty if there is none. Raises `StateError` if it is unusable, OSError."""
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise StateError(f"it has more than {MAX_STATE_BYTES:,} bytes")
        return decode_state(path.read_bytes())
    except FileNotFoundError:
        return []


def write_state(path: Path, records: Sequence[PoolRecord]) -> None:
    """Write a file atomically, readable only by its owner. Blocks. Raises OSError."""
    beside = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        beside.unlink()
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encode_state(records))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class LearnedState:
    """Gives pools what was learned before, and keeps what they learn."""

    def __init__(self, path: Path | None, runtime: Runtime, *, every_s: float = SAVE_EVERY_S) -> None:
        """Read the file; an unusable one is moved to `FILE.refused`. None: somebody else keeps the records.

        Raises `ConfigurationError` for a directory.
        """
        self._path = path
        self._every_s = every_s
        self._runtime = runtime
        self._writing = asyncio.Lock()
        self._saved_count = -1
        self._fails = False
        self._is_unread = False
        """Whether there is a file of unknown content: it is not overwritten."""
        self._unplaced: deque[PoolRecord] = deque(maxlen=MAX_RECORDS_COUNT)
        """Records of models that nobody has listed yet."""
        runtime.served.on_listed = self.place
        if path is None:
            return
        try:
            self._unplaced.extend(read_state(path))
        except StateError as error:
            kept = path.with_name(f"{path.name}.refused")
            with suppress(OSError):
                path.replace(kept)
            log.warning("state_refused", file=str(path), why=error.message, moved_to=str(kept))
        except IsADirectoryError as error:
            raise ConfigurationError(f"the file of what was learned is a folder: {path}") from error
        except OSError as error:
            self._is_unread = True
            log.warning("state_not_read", file=str(path), why=error.strerror or str(error))
        else:
            log.info("state_read", file=str(path), models=[each.models for each in self._unplaced])

    def take(self, records: Sequence[PoolRecord]) -> None:
        """Take what another process had learned, and give it to the pools."""
        self._unplaced.extend(records)
        self.place()

    def place(self) -> None:
        """Give each pool that has learned nothing the record of its models."""
        for pool in self._runtime.pools.all:
            if self._unplaced and pool.listed and pool.scheduler.knowledge.growth.is_empty:
                self._place(pool)

    def _place(self, pool: Pool) -> None:
        served = set(pool.models)
        for record in reversed(self._unplaced):
            if not served.isdisjoint(record.models) or not (served or record.models):
                self._unplaced.remove(record)
                replica_id = next(iter(pool.listed))
                self._runtime.dispatch(KnowledgeLoaded(self._runtime.now_s(), replica_id, record.learned))
                log.info("knowledge_loaded", models=record.models)
                return

    def records(self) -> list[PoolRecord]:
        """Return the records to keep: those not placed, and what each pool has learned."""
        pools: Iterable[Pool] = self._runtime.pools.all
        learned = [pool for pool in pools if not pool.scheduler.knowledge.growth.is_empty]
        served = {name for pool in learned for name in pool.models}
        unplaced = [record for record in self._unplaced if served.isdisjoint(record.models)]
        return [*unplaced, *(PoolRecord(each.models, each.scheduler.learned()) for each in learned)]

    async def run(self) -> None:
        """Write it every half minute, or at its interval, if a turn ended since; until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.save()

    async def save(self) -> None:
        """Write it now, if a turn ended since the last write; a failing disk is logged once.

        A cancelled call leaves the write running, and the next waits for that: two at once would tear the file.
        """
        await asyncio.shield(self._save())

    async def _save(self) -> None:
        async with self._writing:
            turns_count, path = self._runtime.outcome_counts.total(), self._path
            if path is None or turns_count == self._saved_count or self._runtime.has_crashed or self._is_unread:
                return
            try:
                await asyncio.to_thread(write_state, path, self.records())
            except OSError as error:
                if not self._fails:
                    log.warning("state_not_written", file=str(path), why=error.strerror or str(error))
                self._fails = True
                return
            self._fails = False
            self._saved_count = turns_count
