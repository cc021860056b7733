"""A chunked body, decoded by llhttp: data out; sizes, extensions and trailers dropped.

Each body has a parser of its own, which starts with a head of ours; so the rest of its message's head cannot influence
it. Extensions and trailers are dropped, as a recipient may (RFC 9112, 7.1): trailers that became headers would be
unchecked headers.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import httptools

from thunderagent.proxy.wire.failures import NotHttpError

FRAMING_BYTES: Final = 16 * 1024
FRAMING_RATIO: Final = 16
"""How many bytes may be framing, in total and for each byte of data: a byte in a chunk of its own takes six."""

_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Heard(NamedTuple):
    """What the parser calls. It appends to a list, which is read once the parser has returned."""

    on_body: Callable[[bytes], None]
    on_message_begin: Callable[[], None]
    on_message_complete: Callable[[], None]


class Chunks:
    """Decodes one body. `is_whole` once it ended; `is_followed` if something came after that."""

    __slots__ = ("_data_bytes", "_fed_bytes", "_heard", "_parser", "_tail", "is_followed", "is_whole")

    def __init__(self) -> None:
        """Start before the first chunk."""
        self._heard: list[Any] = []
        """Pieces of data; then None for the end, and something again if another message begins after that."""
        self._tail = b""
        self._fed_bytes = 0
        self._data_bytes = 0
        self.is_whole = False
        self.is_followed = False
        mark: Callable[[], None] = partial(self._heard.append, None)
        self._parser: Any = httptools.HttpResponseParser(_Heard(self._heard.append, mark, mark))
        self._parser.feed_data(_HEAD)
        self._heard.clear()

    def feed(self, data: bytes) -> bytes:
        """Return the data in these bytes. Raises `NotHttpError` for an invalid chunk, or almost nothing but framing."""
        if self.is_whole:
            self.is_followed = True
            return b""
        heard, why = self._heard, None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            why = str(error)
        self._tail = data[-6:] if len(data) > 5 else (self._tail + data)[-6:]
        if None in heard:
            self.is_whole = True
            at = heard.index(None)
            # llhttp skips empty lines between two messages
            skipped = self._tail == b"\r\n\r\n\r\n" or not self._tail.endswith(b"\r\n\r\n")
            self.is_followed = skipped or why is not None or len(heard) > at + 1
            del heard[at:]
        elif why is not None:
            raise NotHttpError(f"a chunk of the body is malformed: {why}")
        found = b"".join(heard)
        heard.clear()
        self._fed_bytes += len(data)
        self._data_bytes += len(found)
        if self._fed_bytes > FRAMING_BYTES + FRAMING_RATIO * self._data_bytes:
            raise NotHttpError("the body consists almost only of chunk sizes, extensions and trailers")
        return found
