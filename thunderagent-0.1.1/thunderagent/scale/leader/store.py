"""What schedulers of a cell share: a lock with an epoch, and the leader's log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from thunderagent.scale.messages import MAX_EPOCH
from thunderagent.scale.scheduler.gateways import EPOCH_JUMP

EPOCH_DIGITS = len(str(MAX_EPOCH))


class Seen(NamedTuple):
    """The content of the store."""

    owner: str | None
    """Of the lock; empty if it was given up, None if there is none."""
    epoch: int
    entries: Sequence[tuple[str, bytes]]
    """Of the log, after the requested position: each with its position and content."""
    has_more: bool
    damage: str = ""
    """What no scheduler wrote there, and what is done about it."""


def seen_of(
    owner: bytes | None, epoch: bytes | None, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]], *, has_more: bool
) -> Seen:
    """Convert a store's answer; an entry without content is empty, and an epoch that no scheduler writes is none."""
    name = owner.decode(errors="backslashreplace") if owner is not None else None
    number = int(epoch or b"0") if (epoch or b"0").isdigit() and len(epoch or b"0") <= EPOCH_DIGITS else MAX_EPOCH
    damage = "" if number < MAX_EPOCH else f"the epoch is {(epoch or b'')[:40]!r}: not counted"
    found = [(where.decode(), fields.get(b"e", b"")) for where, fields in entries]
    return Seen(name, 0 if damage else number, found, has_more, damage)


def believed(epoch: int, known: int) -> int:
    """Return the epoch of a store; 0 if it is beyond reason for who has `known` of one. 0: nothing is known."""
    return 0 if known and epoch - known > EPOCH_JUMP else epoch


@contextmanager
def heeds_cancellation() -> Iterator[None]:
    """End the task after the block if it was cancelled within, even if the cancellation was swallowed.

    `asyncio.wait_for` swallows one before Python 3.12 if it comes together with the awaited result, and store clients
    use it: a scheduler that had to start over would go on for ever with what it was to end.
    """
    task = asyncio.current_task()
    assert task is not None, "stores are asked by tasks"
    before_count = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before_count:
            raise asyncio.CancelledError


class Store(Protocol):
    """What schedulers share. Each method raises `StoreError` if it cannot be done now."""

    async def look(self, after: str) -> Seen:
        """Return the lock, the epoch, and the entries after one; "0" is before the first."""

    async def take(self, owner: str, expected: str, least_epoch: int) -> int:
        """Take the lock if it is free, empty, or `expected`'s; return the new epoch, above `least_epoch`, or 0."""

    async def renew(self, owner: str, epoch: int) -> int:
        """Renew the lock, in this epoch at least: 0 if it is another's, 2 if the store knew no epoch as high."""

    async def append(self, owner: str, epoch: int, data: bytes) -> str:
        """Write an entry; return its position. Raises `FencedError` if another one leads, or has led since."""

    async def position(self) -> str:
        """Return the position of the last entry; empty if there is none."""

    async def trim(self, where: str) -> None:
        """Cut off what is before an entry."""

    async def give_up(self, owner: str) -> None:
        """Empty the lock, if it is still the owner's."""

    async def stand_by(self, owner: str) -> None:
        """Announce that a standby is ready to lead."""

    async def has_standby(self, owner: str) -> bool:
        """Return whether a standby other than `owner` announced itself recently."""

    async def warnings(self) -> list[str]:
        """Return settings that may lose data."""

    async def close(self) -> None:
        """Close it."""
