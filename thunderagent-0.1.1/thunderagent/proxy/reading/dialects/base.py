"""What the proxy must know of an API to serve its turns: a `Dialect` is one file for one API.

A dialect says which paths are turns, reads usage and text from answers, and writes the errors that a caller of that API
expects. It never touches the bytes of an answer.
"""

# compiled: each answer passes here

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from thunderagent.proxy.reading.sse import UNREADABLE, data_of, events_in, server_sent

Read = TypeVar("Read")


def read_events(events: bytes, mark: bytes, decode: Callable[[bytes], Read]) -> list[Read]:
    """Return the data of those whole events that contain `mark`; unreadable ones are skipped."""
    found: list[Read] = []
    for event in events.split(b"\n\n") if events.find(b"\r") < 0 else events_in(events):
        if event.find(mark) < 0:
            continue
        is_line = event.startswith(b"data:") and event.find(b"\n") < 0  # as engines write them
        try:
            found.append(decode(event[5:].strip() if is_line else data_of(event)))
        except UNREADABLE:
            continue
    return found


class Usage(NamedTuple):
    """Token counts of one answer; None if the engine did not report it. The prompt includes the cached tokens."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE: Final = Usage()

KeepId = Callable[[str], None]
"""Gets the id by which a client may request an answer again, as soon as it is known."""


class UsageReader(Protocol):
    """Follows one streamed answer."""

    @property
    def mark(self) -> bytes:
        """What all events hold that it reads."""

    @property
    def usage(self) -> Usage:
        """The usage as far as reported."""

    def read(self, events: bytes) -> None:
        """Read whole events, one or several. Unreadable ones are skipped."""


class Completion(NamedTuple):
    """One choice of an answer as a client puts it into its next prompt, in each form that the engine sent."""

    messages: Sequence[dict[str, Any]] = ()
    """Messages, or items of the Responses API."""
    text: str = ""
    token_ids: bytes = b""
    """As written, each followed by a comma, without spaces."""


class CompletionReader(Protocol):
    """Follows one answer for its text, whole or event by event."""

    @property
    def builds_all(self) -> bool:
        """Whether it builds objects of any kind, not only texts."""

    @property
    def kept_chars(self) -> int:
        """How much it keeps of the events."""

    def read_answer(self, answer: bytes) -> None:
        """Read a whole answer. Raises one of `UNREADABLE`."""

    def read_event(self, data: bytes) -> None:
        """Read the data of an event. Raises one of `UNREADABLE`."""

    def choices(self) -> list[Completion]:
        """Return the choices in order."""


class Dialect(Protocol):
    """One API."""

    turn_paths: tuple[str, ...]
    """A POST to one of these is a turn."""
    asks_for_usage: bool
    """Whether this API has `stream_options.include_usage`: it is then set if a stream would have no usage."""
    last_events: tuple[bytes, ...]
    """Types of events that end a stream; in each API `[DONE]` does."""
    token_id_fields: tuple[str, ...]
    """Fields that hold a prompt as token ids; such a prompt is large, and never names a program."""

    def speaks(self, path: str) -> bool:
        """Return whether callers of `path` expect errors of this API."""

    def read_answer(self, answer: bytes, keep_id: KeepId) -> Usage:
        """Return the usage of a whole answer. Raises one of `UNREADABLE`."""

    def read_sound(self, answer: bytes) -> Usage | None:
        """Return the usage of a whole answer that surely reports no error; None where that is not told so.

        Raises one of `UNREADABLE` for one that may.
        """

    def read_calling(self, answer: bytes, keep_id: KeepId) -> tuple[Usage, str]:
        """Return the usage of a whole answer that may call tools, and the key of what it calls, by one decoding.

        Raises one of `UNREADABLE`, also if only one of the two is unreadable.
        """

    def reader(self, keep_id: KeepId) -> UsageReader:
        """Return a reader of a stream."""

    def completions(self) -> CompletionReader:
        """Return a reader of an answer's text."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Return the body of an error. `code` is ours, for programs to read, in addition to the API's fields."""

    def break_off(self, status: int, code: str, message: str, last_events: bytes) -> bytes:
        """Return the event that ends a stream early, with an error as above; `last_events` are the last whole ones."""


def written_ids(token_ids: bytes) -> bytes:
    """Return a list of token ids in the spelling of `Completion`, without building it; empty if it is not one."""
    digits = token_ids.translate(None, b" \t\r\n")
    if not digits.startswith(b"[") or digits == b"[]" or digits.translate(None, b"0123456789,") != b"[]":
        return b""
    return digits[1:-1] + b","


MOST_TOKENS: Final = 2**40
"""No answer has more; JSON has no largest number, and one of 310 digits is no `float` any more."""


def count(tokens: int | None) -> int | None:
    """Return a count if it is a valid one."""
    return tokens if tokens is not None and 0 <= tokens <= MOST_TOKENS else None


def usage_of(prompt_tokens: int | None, output_tokens: int | None, cached_tokens: int | None) -> Usage:
    """Return a usage of those counts that are valid."""
    return Usage(
        prompt_tokens if prompt_tokens is not None and 0 <= prompt_tokens <= MOST_TOKENS else None,
        output_tokens if output_tokens is not None and 0 <= output_tokens <= MOST_TOKENS else None,
        cached_tokens if cached_tokens is not None and 0 <= cached_tokens <= MOST_TOKENS else None,
    )


def event_of(body: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    return server_sent(msgspec.json.encode(body), kind=name)
