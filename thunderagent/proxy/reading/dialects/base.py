"""What the proxy must know of an API to serve its turns: a `Dialect` is one file for one API.

A dialect says which paths are turns, reads usage and what was said out of answers, and speaks the errors that a caller
of that API expects. It never touches the bytes of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from thunderagent.proxy.reading.sse import UNREADABLE, data_of, events_in, server_sent

Read = TypeVar("Read")


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


class Completion(NamedTuple):
    """One choice of an answer as a client puts it into its next prompt, in each form that the engine said it in."""

    messages: Sequence[dict[str, Any]] = ()
    """Messages, or items of the Responses API."""
    text: str = ""
    token_ids: bytes = b""
    """As they are written, each with a comma behind it and nothing between."""


class CompletionReader(Protocol):
    """Follow one answer for what it says, whole or event by event."""

    @property
    def kept_chars(self) -> int:
        """How much it keeps of the events."""

    def read_answer(self, answer: bytes) -> None:
        """Take in a whole answer. Raises one of `UNREADABLE`."""

    def read_event(self, data: bytes) -> bool:
        """Take in the data of an event; say whether nothing follows that matters. Raises one of `UNREADABLE`."""

    def choices(self) -> list[Completion]:
        """Return what was said, in the order of the choices."""


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

    def read_calling(self, answer: bytes, keep_id: KeepId) -> tuple[Usage, str]:
        """Return the usage of a whole answer that may call tools, and the key of what it calls, from one decoding.

        Raises one of `UNREADABLE`, also if only one of the two cannot be read.
        """

    def reader(self, keep_id: KeepId) -> UsageReader:
        """Return what follows a stream."""

    def completions(self) -> CompletionReader:
        """Return what follows an answer for what it says."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error. `code` is ours, for programs to read, whatever the API has besides."""

    def break_off(self, code: str, message: str, last_events: bytes) -> bytes:
        """Return the event that ends a stream whose replica failed; `last_events` are the last that were whole."""


def written_ids(token_ids: bytes) -> bytes:
    """Return a list of token ids in the spelling of `Completion`, without building it; empty if it is no such list."""
    digits = token_ids.translate(None, b" \t\r\n")
    if not digits.startswith(b"[") or digits == b"[]" or digits.translate(None, b"0123456789,") != b"[]":
        return b""
    return digits[1:-1] + b","


def count(tokens: int | None) -> int | None:
    """Return a count if it is one."""
    return tokens if tokens is not None and tokens >= 0 else None


def event_of(body: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    return server_sent(msgspec.json.encode(body), kind=name)
