"""Read the usage that a streamed answer carries, and take its event out where only we asked for it."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec

from thunderagent.proxy.reading.dialects.base import Usage, UsageReader
from thunderagent.proxy.reading.dialects.openai import ChoicesReader
from thunderagent.proxy.reading.sse import UNREADABLE, data_of, end_of_last_event, events_in

MAX_EVENT_BYTES = 16 * 2**20
"""A stream that shows no end of an event for so long is relayed without looking for one any more."""


class _Chunk(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw()
    choices: list[msgspec.Raw] | None = None
    system_fingerprint: msgspec.Raw = msgspec.Raw()  # empty if there is none; a union with None refuses texts


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def decompressor(content_encoding: str | None) -> Callable[[bytes], bytes] | None:
    """Return a function that decodes a body piece by piece; None for an encoding that is not known."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        return lambda piece: piece
    if encoding in {"gzip", "x-gzip", "deflate"}:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32).decompress
    return None


class StreamUsage:
    """Follow a stream of server-sent events for its usage.

    `feed` takes the bytes as they come, split anywhere, and returns the bytes to relay. With `take_out`, usage was
    asked for on the client's behalf: whole events are relayed as soon as they are complete, and the one event that
    has usage and no choices is left out. Without it, every byte is relayed at once.

    vLLM (seen in 0.32) writes `system_fingerprint` into the last event that has choices, or, if usage is asked for,
    into the usage event instead. To give back exactly what the client asked for, an event with a `finish_reason` is
    relayed together with what follows it, and gets the fingerprint of a usage event that is left out.
    """

    __slots__ = (
        "_carry",
        "_decompress",
        "_last_choice",
        "_listener",
        "_reader",
        "_take_out",
        "events_count",
        "last_events",
    )

    def __init__(
        self,
        *,
        take_out: bool,
        content_encoding: str | None = None,
        listener: Callable[[bytes], None] | None = None,
        reader: UsageReader | None = None,
    ) -> None:
        """Begin before the first byte. An encoded stream cannot be cut, so there `take_out` has no effect.

        `listener` is called with whole events, one or several at a time, decoded. `reader` knows the API; by default
        that of the chat completions.
        """
        self._listener = listener
        self._reader = reader or ChoicesReader()
        self._decompress = decompressor(content_encoding)
        self._take_out = take_out and (content_encoding or "identity") == "identity"
        self._carry = b""
        self._last_choice = b""
        self.events_count = 0
        self.last_events = b""

    @property
    def usage(self) -> Usage:
        """The usage as far as the stream said it."""
        return self._reader.usage

    @property
    def pending_bytes(self) -> int:
        """How much of an event is there that is not whole yet."""
        return len(self._carry)

    def feed(self, piece: bytes) -> bytes:
        """Take in the next bytes of the stream, return what the client gets now."""
        if self._decompress is None:
            return piece
        try:
            plain = self._decompress(piece)
        except zlib.error:
            self._decompress = None
            return piece
        data = self._carry + plain if self._carry else plain
        end = end_of_last_event(data, max(0, len(self._carry) - 3))
        whole, self._carry = data[:end], data[end:]
        if len(self._carry) > MAX_EVENT_BYTES:
            self._decompress, whole, self._carry = None, data, b""
        relayed = self._read_events(whole) if whole else b""
        return relayed if self._take_out else piece

    def rest(self) -> bytes:
        """Return what is left to relay when the stream has ended: an event that never became whole."""
        rest, self._last_choice, self._carry = self._last_choice + self._carry, b"", b""
        return rest if self._take_out else b""

    def broken_off(self) -> bytes:
        """Return what is left to relay when the stream broke off, so that an event of ours can follow."""
        if self._take_out:
            return self._last_choice
        return b"\n\n" if self._carry else b""

    def _read_events(self, whole: bytes) -> bytes:
        """Read whole events, return those that the client gets now."""
        self.events_count += whole.count(b"data:")
        self.last_events = whole
        self._reader.read(whole)
        if self._listener is not None:
            self._listener(whole)
        return self._without_usage(whole) if self._take_out else whole

    def _without_usage(self, whole: bytes) -> bytes:
        """Return the events without that which was only asked for by us."""
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
        """Say whether it is the event that was only asked for by us; note what else it has."""
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
    """Return the last event with choices as it is if nobody asks for usage."""
    closing = event.rfind(b"}")
    if not bytes(fingerprint) or closing < 0 or b'"system_fingerprint"' in event:
        return event
    return event[:closing] + b',"system_fingerprint":' + bytes(fingerprint) + event[closing:]
