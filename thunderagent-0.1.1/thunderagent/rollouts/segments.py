"""Rollouts on disk: files of some size to which packed rollouts are appended, the oldest deleted first.

A file has one rollout after the other: its summary and its blocks, each with its length before it. It is written by one
thread. Nobody but the owner of the process may read it, since token ids are prompts.

Each file is of one tenant, whose share is the whole divided by the tenants that have any. When the disk is short, the
oldest file goes of the tenant that has most: one with no more than its share loses nothing to others. A client may name
any number of tenants: those beyond `OWN_SHARES_COUNT` share files, and count as one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from msgspec import Struct

from thunderagent.rollouts.records import OTHERS, Rollout, decode_rollout, encode_rollout, share_name

SEGMENT_BYTES: Final = 64 * 2**20
_MAGIC: Final = b"TAROLL01"
_OTHERS_MAGIC: Final = b"TAROLLS1"
"""What a file begins with that several tenants share."""
_SUFFIX: Final = ".rollouts"


class Stored(Struct, frozen=True):
    """Where a rollout's blocks are."""

    segment: int
    offset: int
    size_bytes: int


class Segments:
    """The files of one folder. Raises `OSError` as files do."""

    def __init__(self, folder: Path, max_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the folder, or make it. Raises `PermissionError` if others may read it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise PermissionError(f"{folder}: others may read it; chmod 700")
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max(1, max_bytes // 2))
        self._sizes = {int(path.name.removesuffix(_SUFFIX)): path.stat().st_size for path in self._files()}
        self._tenants: dict[int, str] = {}
        """Whose each file is, which may be all others' together."""
        self._sums: dict[str, int] = {}
        """What the files of each of these take."""
        for number, size_bytes in self._sizes.items():
            self._tenants[number] = share_name(self._tenant_of(number), self._sums)
            self._add(number, size_bytes)
        self._number = max(self._sizes, default=0)
        """The last that was given to a file."""
        self._current: dict[str, int] = {}
        """The file that each tenant's rollouts are appended to; a new process begins others."""
        self._handle: int | None = None
        self._handle_number = 0
        """Of the file that is open."""

    def _files(self) -> list[Path]:
        names = [path for path in self._folder.glob(f"*{_SUFFIX}") if path.name.removesuffix(_SUFFIX).isdigit()]
        return sorted(names)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}{_SUFFIX}"

    def _tenant_of(self, number: int) -> str:
        """Return whose a file is, which its first rollout says, if it is not shared."""
        with self._path(number).open("rb") as file:
            if file.read(len(_OTHERS_MAGIC)) == _OTHERS_MAGIC:
                return OTHERS
        return next((rollout.tenant for rollout, _ in self._found_in(number)), "")

    def _add(self, number: int, size_bytes: int) -> None:
        tenant = self._tenants[number]
        self._sums[tenant] = self._sums.get(tenant, 0) + size_bytes

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(self._sums.values())

    def append(self, rollout: Rollout, blocks: Sequence[bytes]) -> tuple[Stored, list[int]]:
        """Write a rollout; return where it is, and which files were deleted for it.

        If it cannot be written, nothing of it stays: what follows would stand elsewhere than is noted.
        """
        summary, body = encode_rollout(rollout), b"".join(_sized(block) for block in blocks)
        data, tenant = _sized(summary) + len(body).to_bytes(8, "little") + body, share_name(rollout.tenant, self._sums)
        most_bytes = min(self._segment_bytes, self._max_bytes // (2 * len({*self._sums, tenant})))
        number = self._current.get(tenant)
        if number is None or self._sizes[number] + len(data) > most_bytes:
            number = self._begin(tenant)
        handle, offset = self._opened(number), self._sizes[number]
        try:
            _write(handle, data)
        except OSError:
            try:
                os.ftruncate(handle, offset)
            except OSError:
                self.close()
                del self._current[tenant]  # the next one begins another file
            raise
        self._sizes[number] = offset + len(data)
        self._add(number, len(data))
        return Stored(number, offset + len(data) - len(body), len(body)), self._delete_oldest(number)

    def _begin(self, tenant: str) -> int:
        self.close()
        self._number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        handle = os.open(self._path(self._number), flags, 0o600)
        try:
            _write(handle, _OTHERS_MAGIC if tenant == OTHERS else _MAGIC)
        except OSError:
            os.close(handle)
            self._path(self._number).unlink(missing_ok=True)
            raise
        self._handle, self._handle_number = handle, self._number
        self._current[tenant], self._tenants[self._number] = self._number, tenant
        self._sizes[self._number] = len(_MAGIC)
        self._add(self._number, len(_MAGIC))
        return self._number

    def _opened(self, number: int) -> int:
        if self._handle is None or self._handle_number != number:
            self.close()
            self._handle = os.open(self._path(number), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._handle_number = number
        return self._handle

    def _delete_oldest(self, written: int) -> list[int]:
        """Delete files until the rest fits, but not that which was just written."""
        deleted: list[int] = []
        while self.size_bytes > self._max_bytes:
            most = max(self._sums, key=self._sums.__getitem__)
            oldest = min(number for number, tenant in self._tenants.items() if tenant == most)
            if oldest == written:
                break
            self._delete(oldest)
            deleted.append(oldest)
        return deleted

    def _delete(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        self._add(number, -self._sizes.pop(number))
        tenant = self._tenants.pop(number)
        if not self._sums[tenant]:
            del self._sums[tenant]
        if self._current.get(tenant) == number:
            del self._current[tenant]
        if self._handle_number == number:
            self.close()

    def delete_except(self, kept: AbstractSet[int]) -> None:
        """Delete the files before the last of `kept` that are not among these: nothing in them is wanted any more."""
        for number in [each for each in self._sizes if each not in kept and each < max(kept, default=0)]:
            self._delete(number)

    def read(self, stored: Stored) -> list[bytes]:
        """Return the blocks of a rollout. Raises `ValueError` if the file ends before."""
        with self._path(stored.segment).open("rb") as file:
            file.seek(stored.offset)
            body = file.read(stored.size_bytes)
        if len(body) != stored.size_bytes:
            raise ValueError(f"segment {stored.segment} ends within a rollout")
        blocks, at = [], 0
        while at < len(body):
            end = at + 4 + int.from_bytes(body[at : at + 4], "little")
            blocks.append(body[at + 4 : end])
            at = end
        return blocks

    def found(self) -> Iterator[tuple[Rollout, Stored]]:
        """Yield what earlier processes left; what is broken, or cut off by their end, is left out."""
        for number in sorted(self._sizes):
            yield from self._found_in(number)

    def _found_in(self, number: int) -> Iterator[tuple[Rollout, Stored]]:
        with self._path(number).open("rb") as file:
            if file.read(len(_MAGIC)) not in (_MAGIC, _OTHERS_MAGIC):
                return
            while (head := file.read(4)) and len(head) == 4:
                summary = file.read(int.from_bytes(head, "little"))
                size_bytes = int.from_bytes(file.read(8), "little")
                stored = Stored(number, file.tell(), size_bytes)
                if stored.offset + size_bytes > self._sizes[number]:
                    break
                file.seek(size_bytes, os.SEEK_CUR)
                try:
                    yield decode_rollout(summary), stored
                except ValueError:  # another schema, or broken
                    continue

    def close(self) -> None:
        """Close the file that is written."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _sized(packed: bytes) -> bytes:
    return len(packed).to_bytes(4, "little") + packed


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
