"""An engine's answer: its usage, the tool that it calls, the error inside it, and its text.

A whole answer is decoded once for usage and tool, if it may call one at all. A stream is followed for its usage, and
the usage event is removed if only we asked for it. The text is only read if a program may be recognised by it, at the
beginning of its next prompt.

Engines report what fails late, or in a stream, inside an answer with status 200. Seen of vLLM (a dead engine core),
SGLang (a full queue, a prompt that is too long), and of both for aborted requests. An answer without one of the marks
costs a few searches; inside a JSON string no mark can appear, as its quotes are escaped there.
"""

# compiled: each turn passes here

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from thunderagent.proxy.reading.dialects.base import NO_USAGE, Completion, Dialect, KeepId, Usage, UsageReader
from thunderagent.proxy.reading.dialects.openai import ChoicesReader
from thunderagent.proxy.reading.dialects.structs import AnswerErrorFields, Calls
from thunderagent.proxy.reading.dialects.tool_calls import CALL_MARKS, StreamToolCalls, key_of, may_call
from thunderagent.proxy.reading.json_cost import MIN_LISTED_COUNT, is_cheap, is_readable
from thunderagent.proxy.reading.sse import UNREADABLE, completed, data_of, end_of_last_event, events_in

MAX_EVENT_BYTES: Final = 16 * 2**20
"""A stream with a longer event is relayed without looking for events any more."""

MAX_PLAIN_BYTES: Final = 64 * 2**20
"""A compressed answer that expands beyond this is not read."""

_decode_calls: Final = msgspec.json.Decoder(Calls).decode
_decode_error: Any = msgspec.json.Decoder(AnswerErrorFields).decode
_decode_errors: Any = msgspec.json.Decoder(list[AnswerErrorFields]).decode

_LINE_END: Final = re.compile(rb"[ \t\v\f]*(?:[\r\n]|\Z)")
_MAX_CODE_CHARS: Final = 100

MAX_KEPT_CHARS: Final = 4 * 2**20
"""A longer streamed answer is not kept."""


_Chunk = msgspec.defstruct(
    "_Chunk",
    [
        ("usage", msgspec.Raw, msgspec.Raw()),
        ("choices", list[msgspec.Raw] | None, None),
        ("system_fingerprint", msgspec.Raw, msgspec.Raw()),  # empty if there is none; a union with None refuses texts
    ],
)


_Kind = msgspec.defstruct("_Kind", [("type", str, "")])

_decode_kind: Callable[[bytes], Any] = msgspec.json.Decoder(_Kind).decode

_decode_chunk: Callable[[bytes], Any] = msgspec.json.Decoder(_Chunk).decode


# --- whole answers


def read_answer(dialect: Dialect, body: bytes, content_encoding: str | None, keep_id: KeepId) -> tuple[Usage, str]:
    """Return the usage of a whole answer, and the key of what it calls; unreadable parts count as missing.

    Cost: one decoding that builds only these, after a few searches for a possible call.
    """
    plain = body if content_encoding is None else decoded(body, content_encoding)
    if not plain or (len(plain) > MIN_LISTED_COUNT and not is_readable(plain)):
        return NO_USAGE, ""
    calls = may_call(plain)
    if calls:
        try:
            return dialect.read_calling(plain, keep_id)
        except UNREADABLE:  # one of them is invalid; the other may be readable by itself
            pass
    try:
        usage = dialect.read_answer(plain, keep_id)
    except UNREADABLE:
        usage = NO_USAGE
    return usage, _tool_of(plain) if calls else ""


def usage_if_sound(dialect: Dialect, body: bytes) -> Usage | None:
    """Return the usage of a whole answer that surely reports no error, and is not large; None if it may.

    Cost: one decoding, which is less than the searches for an error, and finds the usage, too.
    """
    try:
        return dialect.read_sound(body)
    except UNREADABLE:
        return None


def tool_in(plain: bytes) -> str:
    """Return the key of what an answer calls, which is not large; empty if it calls nothing."""
    return _tool_of(plain) if may_call(plain) else ""


def _tool_of(plain: bytes) -> str:
    try:
        return key_of(_decode_calls(plain))
    except UNREADABLE:
        return ""


def decoded(body: bytes, content_encoding: str | None) -> bytes | None:
    """Return a body without its content encoding; None if that is neither gzip nor deflate, or is broken."""
    if content_encoding is None:
        return body
    decompress = decompressor(content_encoding, MAX_PLAIN_BYTES)
    if decompress is None:
        return None
    try:
        return decompress(body)
    except zlib.error:
        return None


def decompressor(content_encoding: str | None, max_bytes: int) -> Callable[[bytes], bytes] | None:
    """Return a function that decodes a body piece by piece; None for an unknown encoding.

    It raises `zlib.error` for a broken piece, or one that would expand to more than `max_bytes`: a megabyte of zeros is
    a kilobyte.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        return lambda piece: piece
    if encoding in {"gzip", "x-gzip", "deflate"}:
        packed = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)

        def decompress(piece: bytes) -> bytes:
            plain = packed.decompress(piece, max_bytes)
            if packed.unconsumed_tail:
                raise zlib.error(f"a piece holds more than {max_bytes} bytes")
            return plain

        return decompress
    return None


# --- errors inside an answer


class AnswerError(NamedTuple):
    """An error inside an answer: the engine's word for it, and whether it names the request, or an abort, as cause."""

    code: str
    is_callers: bool = False
    is_abort: bool = False


ERROR_MARKS: Final[tuple[bytes, ...]] = (b"error", b'"abort"', b'failed"')
"""What all data have that may hold an error."""


def error_of_body(body: bytes) -> AnswerError | None:
    """Return the error of a whole answer; None if it has none, or cannot be read at a cost like its size."""
    if not may_hold_error(body) or not is_cheap(body):
        return None
    try:
        said = _decode_errors(body) if body.lstrip()[:1] == b"[" else [_decode_error(body)]
    except UNREADABLE:
        return None
    return next((found for found in map(_error_of, said) if found is not None), None)


def error_of_events(events: bytes) -> AnswerError | None:
    """Return the first error of whole events of a stream that `may_hold_error`; None if they have none."""
    for event in events_in(events):
        found = error_of_body(data_of(event))
        if found is not None:
            return found
        if any(_is_line(event, name) for name in (b"event: error", b"event:error")):
            return AnswerError("error")
    return None


def may_hold_error(body: bytes) -> bool:
    """Return whether a body holds a mark of an error: three searches, if it holds none.

    `in` with bytes makes an exception on its way, `find` does not.
    """
    return (
        (body.find(b"error") >= 0 and (b'"error"' in body or b"event: error" in body or b"event:error" in body))
        or body.find(b'"abort"') >= 0
        or (body.find(b'failed"') >= 0 and (b'"failed"' in body or b'"response.failed"' in body))
    )


def _is_line(event: bytes, wanted: bytes) -> bool:
    """Return whether a line of an event is `wanted`, but for spaces at its end; it is not split: it may be large."""
    at = event.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if (at == 0 or event[at - 1] in b"\r\n") and _LINE_END.match(event, end):
            return True
        at = event.find(wanted, end)
    return False


def _error_of(said: AnswerErrorFields) -> AnswerError | None:
    response = said.response if isinstance(said.response, dict) else {}
    if said.error or said.type == "error" or said.object == "error":
        return _named(said.error if isinstance(said.error, dict) else {"code": said.code, "type": said.error})
    if said.type == "response.failed" or response.get("status") == "failed":
        return _named(response.get("error"))
    if said.object == "response" and said.status == "failed":
        return _named(None)
    choices = said.choices if isinstance(said.choices, list) else []
    reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
    if isinstance(said.meta_info, dict):
        reasons.append(said.meta_info.get("finish_reason"))
    for reason in reasons:
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind == "abort":
            of = _named(reason) if isinstance(reason, dict) and reason.get("status_code") else None
            return AnswerError("abort", of.is_callers, not of.is_callers) if of else AnswerError("abort", is_abort=True)
        if kind == "error":
            return AnswerError("error")
    return None


def _named(error: Any) -> AnswerError:
    """Return an error by its own fields."""
    fields = error if isinstance(error, dict) else {}
    code = next((fields[name] for name in ("code", "status_code", "err_type", "type") if fields.get(name)), "error")
    kind = str(fields.get("type", "")).lower()
    status = int(code) if isinstance(code, int) or (isinstance(code, str) and code.isdigit() and len(code) < 4) else 0
    full = status == 429 or "rate_limit" in kind
    is_callers = not full and (400 <= status < 500 or "invalid_request" in kind or "badrequest" in kind)
    return AnswerError(str(code)[:_MAX_CODE_CHARS], is_callers)


# --- streams


def includes_last(dialect: Dialect, events: bytes) -> bool:
    """Return whether whole events include the one that ends a stream of this API."""
    return any(is_last(dialect, data_of(event)) for event in events_in(events))


def is_last(dialect: Dialect, data: bytes) -> bool:
    """Return whether the data of an event end a stream of this API."""
    if data == b"[DONE]":
        return True
    if not any(b'"%s"' % kind in data for kind in dialect.last_events):
        return False
    try:
        return _decode_kind(data).type.encode() in dialect.last_events
    except UNREADABLE:
        return False


_ANNOUNCES: Final = re.compile(rb'"type"\s*:\s*"(message_start|ping|response\.(created|in_progress|queued))"').search
"""Events that engines send before they know whether they can answer."""


def begins_well(events: bytes) -> bool:
    """Return whether a stream begins with an event that says something and is no error, as nearly all do."""
    first = events.find(b"\n\n")
    if first < 0 or not events.startswith(b"data: {") or _ANNOUNCES(events, 0, first) is not None:
        return False
    for mark in ERROR_MARKS:  # noqa: SIM110 - a generator costs a call for each mark
        if events.find(mark) >= 0:
            return False
    return True


def says_something(events: bytes) -> bool:
    """Return whether the begin of a stream has a whole event that is no comment, and no mere announcement."""
    end = end_of_last_event(events)
    for event in events_in(events[:end]):
        data = data_of(event)
        if data and not _ANNOUNCES(data):
            return True
    return False


_MARKS: Final = ERROR_MARKS + CALL_MARKS
"""What events have that may hold an error, or a call; most have none of it."""


class StreamUsage:
    """Follows a stream of server-sent events for its usage, its tool calls, and an error.

    `feed` takes the bytes as they come, split anywhere, and returns the bytes to relay. With `take_out`, usage was
    requested on the client's behalf: whole events are relayed as soon as they are complete, and the one event that has
    usage and no choices is left out. Without it, every byte is relayed at once.

    vLLM (seen in 0.32) writes `system_fingerprint` into the last event that has choices, or, if usage is requested,
    into the usage event instead. To return exactly what the client asked for, an event with a `finish_reason` is
    relayed together with what follows it, and gets the fingerprint of a usage event that is left out.
    """

    __slots__ = (
        "_decompress",
        "_is_read",
        "_last_choice",
        "_listener",
        "_mark",
        "_take_out",
        "begun",
        "calls",
        "error",
        "events_count",
        "last_events",
        "reader",
    )

    def __init__(
        self,
        *,
        take_out: bool,
        content_encoding: str | None = None,
        listener: Callable[[bytes], None] | None = None,
        reader: UsageReader | None = None,
    ) -> None:
        """Start before the first byte. An encoded stream cannot be cut, so there `take_out` has no effect.

        `listener` is called with whole decoded events, one or several at a time. `reader` knows the API; the default is
        that of the chat completions.
        """
        self._listener = listener
        self.reader = reader or ChoicesReader()
        """Has the usage, as far as the stream reported it."""
        self._mark = self.reader.mark
        self.calls: StreamToolCalls | None = None
        """What the stream calls, if it may call anything."""
        is_plain = (content_encoding or "identity") == "identity"
        self._decompress = None if is_plain else decompressor(content_encoding, MAX_EVENT_BYTES)
        self._is_read = is_plain or self._decompress is not None
        self._take_out = take_out and is_plain
        self.begun = bytearray()
        """The incomplete event."""
        self._last_choice = b""
        self.events_count = 0
        self.last_events = b""
        self.error: AnswerError | None = None
        """The first error that an event reported."""

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes of the stream, and return what the client gets now."""
        if not self._is_read:
            return piece
        whole = piece  # as most are
        if self._decompress is not None or self.begun or not piece.endswith(b"\n\n"):
            found = self._completed(piece)
            if found is None:
                return piece
            whole = found
        if not whole:
            return b"" if self._take_out else piece
        self.events_count += whole.count(b"\ndata:") + whole.startswith(b"data:")  # a text may hold the word
        if whole.find(b"\r") >= 0:
            self.events_count += whole.count(b"\rdata:")
        self.last_events = whole
        if whole.find(self._mark) >= 0:
            self.reader.read(whole)
        for mark in _MARKS:
            if self.calls is not None or whole.find(mark) >= 0:
                self._look_into(whole)
                break
        if self._listener is not None:
            self._listener(whole)
        return self._without_usage(whole) if self._take_out else piece

    def _look_into(self, whole: bytes) -> None:
        """Look for an error, and for calls."""
        if self.error is None and may_hold_error(whole):
            self.error = error_of_events(whole)
        if self.calls is not None or may_call(whole):
            self.calls = self.calls or StreamToolCalls()
            self.calls.read(whole)

    def _completed(self, piece: bytes) -> bytes | None:
        """Return the events that are whole with this piece, decoded, and keep the rest; None if it cannot be read."""
        plain = piece
        if self._decompress is not None:
            try:
                plain = self._decompress(piece)
            except zlib.error:
                self._is_read = False
                return None
        whole = completed(self.begun, plain)
        if len(self.begun) > MAX_EVENT_BYTES:
            self._is_read = False
            whole += self.begun
            self.begun.clear()
        return whole

    def rest(self) -> bytes:
        """Return what is left to relay when the stream has ended: an incomplete event."""
        rest, self._last_choice = self._last_choice + self.begun, b""
        self.begun.clear()
        return rest if self._take_out else b""

    def broken_off(self) -> bytes:
        """Return what is left to relay when the stream broke off, so that our own event can follow."""
        if self._take_out:
            return self._last_choice
        return b"\n\n" if self.begun else b""

    def _without_usage(self, whole: bytes) -> bytes:
        """Return the events without the one that only we asked for."""
        if not self._last_choice and b'"usage"' not in whole and b'"finish_reason":"' not in whole:
            return whole
        relayed = []
        for event in events_in(whole):
            if self._is_added_usage(event):
                self._last_choice += event[: len(event) - len(event.lstrip(b"\r\n"))]  # an empty line before it
                continue
            relayed.append(self._last_choice)
            self._last_choice = event if b'"finish_reason":"' in event else b""
            if not self._last_choice:
                relayed.append(event)
        return b"".join(relayed)

    def _is_added_usage(self, event: bytes) -> bool:
        """Return whether it is the event that only we asked for; note what else it has."""
        if b'"usage"' not in event:
            return False
        try:
            chunk = _decode_chunk(data_of(event))
        except UNREADABLE:
            return False
        if not bytes(chunk.usage).startswith(b"{") or chunk.choices != []:
            return False
        self._last_choice = _with_fingerprint(self._last_choice, chunk.system_fingerprint)
        return True


def _with_fingerprint(event: bytes, fingerprint: msgspec.Raw) -> bytes:
    """Return the last event with choices as if nobody had asked for usage."""
    closing = event.rfind(b"}")
    if not bytes(fingerprint) or closing < 0 or b'"system_fingerprint"' in event:
        return event
    return event[:closing] + b',"system_fingerprint":' + bytes(fingerprint) + event[closing:]


# --- what was said


class Completions:
    """Follows a whole answer or a stream of events for its text; unreadable parts count as missing."""

    __slots__ = ("_dialect", "_over_limit", "_reader", "ended")

    def __init__(self, dialect: Dialect) -> None:
        """Start before the first byte of an answer in this API."""
        self._dialect = dialect
        self._reader = dialect.completions()
        self._over_limit = False
        self.ended = False
        """Whether a stream sent its last event."""

    def read_answer(self, body: bytes, content_encoding: str | None) -> None:
        """Read a whole answer."""
        plain = decoded(body, content_encoding)
        if not plain or not (is_cheap(plain) if self._reader.builds_all else is_readable(plain)):
            return
        try:
            self._reader.read_answer(plain)
        except UNREADABLE:
            return

    def read_events(self, whole: bytes) -> None:
        """Read whole events of a stream, as `StreamUsage` finds them."""
        for event in events_in(whole):
            data = data_of(event)
            self.ended = self.ended or is_last(self._dialect, data)
            if self._over_limit or data == b"[DONE]":
                continue
            try:
                self._reader.read_event(data)
            except UNREADABLE:
                continue
            self._over_limit = self._reader.kept_chars > MAX_KEPT_CHARS

    def choices(self) -> list[Completion]:
        """Return the choices in order."""
        return [] if self._over_limit else self._reader.choices()
