"""What the proxy must know of an API to serve its turns: a `Dialect` is one file for one API.

A dialect says which paths are turns, reads usage out of answers, and speaks the errors that a caller of that API
expects. It never touches the bytes of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from thunderagent.proxy.dialects.sse import data_of, events_in

Read = TypeVar("Read")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding bytes of an engine may raise; what cannot be read says nothing."""


def read_events(events: bytes, mark: bytes, decode: Callable[[bytes], Read]) -> Iterator[Read]:
    """Yield what those of some whole events say that hold `mark`; what cannot be read says nothing."""
    for event in events_in(events):
        if mark not in event:
            continue
        try:
            said = decode(data_of(event))
        except UNREADABLE:
            continue
        yield said


class Usage(NamedTuple):
    """Token counts of one answer; None is what the engine did not say. The prompt includes the cached tokens."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()

KeepId = Callable[[str], None]
"""Is told the id by which a client may ask for an answer again, as soon as it is known."""


class UsageReader(Protocol):
    """Follow one streamed answer."""

    @property
    def usage(self) -> Usage:
        """The usage as far as it was said."""

    def read(self, events: bytes) -> None:
        """Take in whole events, one or several. What cannot be read is passed over."""


class Dialect(Protocol):
    """One API."""

    turn_paths: tuple[str, ...]
    """A POST to one of these is a turn."""
    asks_for_usage: bool
    """Whether `stream_options.include_usage` is this API's: then it is set if a stream would have no usage."""
    token_id_fields: tuple[str, ...]
    """Fields that hold a prompt as token ids; such a prompt is large, and has nothing that would name a program."""

    def speaks(self, path: str) -> bool:
        """Say whether callers of `path` expect errors of this API."""

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:
        """Return the usage of a whole answer. Raises one of `UNREADABLE`."""

    def reader(self, keep_id: KeepId) -> UsageReader:
        """Return what follows a stream."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error. `code` is ours, for programs to read, whatever the API has besides."""

    def break_off(self, code: str, message: str, last_events: bytes) -> bytes:
        """Return the event that ends a stream whose replica failed; `last_events` are the last that were whole."""


def count(tokens: int | None) -> int | None:
    """Return a count if it is one."""
    return tokens if tokens is not None and tokens >= 0 else None


def event_of(body: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    data = b"data: " + msgspec.json.encode(body) + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data
