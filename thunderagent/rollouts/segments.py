"""Rollouts on disk: files of some size to which packed rollouts are appended, the oldest deleted first.

A file has one rollout after the other: its summary and its blocks, each with its length before it. It is written by one
thread. Nobody but the owner of the process may read it, since token ids are prompts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from msgspec import Struct

from thunderagent.rollouts.records import Rollout, decode_rollout, encode_rollout

SEGMENT_BYTES: Final = 64 * 2**20
_MAGIC: Final = b"TAROLL01"
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
        self._number = max(self._sizes, default=0)
        """Of the file that is written; a new process begins another."""
        self._handle: int | None = None

    def _files(self) -> list[Path]:
        names = [path for path in self._folder.glob(f"*{_SUFFIX}") if path.name.removesuffix(_SUFFIX).isdigit()]
        return sorted(names)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}{_SUFFIX}"

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(self._sizes.values())

    def append(self, rollout: Rollout, blocks: Sequence[bytes]) -> tuple[Stored, list[int]]:
        """Write a rollout; return where it is, and which files were deleted for it.

        If it cannot be written, nothing of it stays: what follows would stand elsewhere than is noted.
        """
        summary, body = encode_rollout(rollout), b"".join(_sized(block) for block in blocks)
        head = _sized(summary) + len(body).to_bytes(8, "little")
        if self._handle is None or self._sizes[self._number] + len(head) + len(body) > self._segment_bytes:
            self._begin()
        assert self._handle is not None
        offset = self._sizes[self._number]
        try:
            _write(self._handle, head + body)
        except OSError:
            try:
                os.ftruncate(self._handle, offset)
            except OSError:
                self.close()  # the next one begins another file
            raise
        self._sizes[self._number] = offset + len(head) + len(body)
        return Stored(self._number, offset + len(head), len(body)), self._delete_oldest()

    def _begin(self) -> None:
        self.close()
        self._number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        handle = os.open(self._path(self._number), flags, 0o600)
        try:
            _write(handle, _MAGIC)
        except OSError:
            os.close(handle)
            self._path(self._number).unlink(missing_ok=True)
            raise
        self._handle, self._sizes[self._number] = handle, len(_MAGIC)

    def _delete_oldest(self) -> list[int]:
        deleted = []
        while self.size_bytes > self._max_bytes and (oldest := min(self._sizes)) != self._number:
            self._path(oldest).unlink(missing_ok=True)
            del self._sizes[oldest]
            deleted.append(oldest)
        return deleted

    def delete_except(self, kept: AbstractSet[int]) -> None:
        """Delete the files before the last of `kept` that are not among these: nothing in them is wanted any more."""
        for number in [each for each in self._sizes if each not in kept and each < max(kept, default=0)]:
            self._path(number).unlink(missing_ok=True)
            del self._sizes[number]

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
            with self._path(number).open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    continue
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
