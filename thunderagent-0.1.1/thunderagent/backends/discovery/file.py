"""Replicas from a file that may be edited at any time: TOML, JSON, or one URL per line.

The file is read again every few seconds and compared by its bytes, because a ConfigMap is exchanged behind a link and
modification times are unreliable on network file systems. An unreadable file is an error, and never a smaller set: an
editor may be in the middle of writing it. So new content counts only if it is still the same a moment later.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from thunderagent.backends.discovery.base import (
    MOST_RANKS_COUNT,
    DiscoveryListener,
    Wanted,
    refuse_twins,
    wanted_of,
)
from thunderagent.errors import DiscoveryError
from thunderagent.faults import faults_of

MOST_BYTES = 4 * 2**20
"""A larger file is a mistake."""

SETTLE_S = 0.05
"""A changed file must stay the same for this long: otherwise it is being written."""

_COMMENT = re.compile(r"(^|\s)#.*")  # a # within a URL begins its number of ranks


_DAMAGE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""What no editor writes, and a crash of the machine may leave; some of it ends a line for Python. CR goes before LF."""


class Entry(BaseModel):
    """A replica as an object: with more than its URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    data_parallel_ranks: Annotated[int, Field(ge=1, le=MOST_RANKS_COUNT, strict=True)] | Literal["auto"] | None = None

    def wanted(self) -> Wanted:
        """Return the engine that it names. Raises `DiscoveryError`."""
        return wanted_of(self.url, self.data_parallel_ranks)


def _entry(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


_ENTRIES = TypeAdapter(list[Annotated[Entry, BeforeValidator(_entry)]])


class FileSource:
    """Follows a file."""

    def __init__(self, path: Path, *, interval_s: float) -> None:
        """Check `path` every `interval_s`; it need not exist yet."""
        self.name = "file"
        self._path = path
        self._interval_s = interval_s

    def __repr__(self) -> str:
        return f"<FileSource {self._path}>"

    async def run(self, listener: DiscoveryListener) -> None:
        """Report the file's content whenever its bytes changed."""
        known: bytes | None = None
        while True:
            try:
                content = await asyncio.to_thread(_read, self._path)
                if content != known and await self._is_settled(content):
                    wanted = parse(content, self._path.suffix)
                    known = content
                    listener.replicas_wanted(self.name, wanted)
            except DiscoveryError as error:
                known = None
                listener.source_failed(self.name, f"{self._path}: {error}")
            await asyncio.sleep(self._interval_s)

    async def _is_settled(self, content: bytes) -> bool:
        await asyncio.sleep(SETTLE_S)
        return await asyncio.to_thread(_read, self._path) == content


def parse(content: bytes, suffix: str) -> list[Wanted]:
    """Return the replicas that a file names. Raises `DiscoveryError` for any error in it."""
    if not content.strip():
        raise DiscoveryError("the file is empty; write an empty list, or only a comment, to name no replica")
    try:
        text = content.decode().replace("\r\n", "\n")
        if damage := _DAMAGE.search(text):
            raise DiscoveryError(f"the file is damaged: it has the control character {damage[0]!r}")
        if suffix == ".toml":
            entries = _list_of(tomllib.loads(text))
        elif suffix == ".json":
            entries = _list_of(msgspec.json.decode(text))
        else:
            lines = (_COMMENT.sub("", line).strip() for line in text.splitlines())
            entries = [line for line in lines if line]
        wanted = [entry.wanted() for entry in _ENTRIES.validate_python(entries)]
    except ValidationError as error:
        raise DiscoveryError(faults_of(error, whole="the file")[0]) from error
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # no text, a number too long, nested too deep
        raise DiscoveryError(f"the file cannot be read: {error}") from error
    refuse_twins(wanted)
    return wanted


def _list_of(value: Any) -> Any:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or set(value) != {"replicas"}:
        raise DiscoveryError("the file must have one name, replicas, with a list")
    return value["replicas"]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DiscoveryError(f"the file cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise DiscoveryError(f"the file is larger than {MOST_BYTES} bytes")
    return content
