"""A chunked body, decoded by llhttp: data out; sizes, extensions and trailers dropped.

Each body has a parser of its own, which starts with a head of ours; so the rest of its message's head cannot influence
it. Extensions and trailers are dropped, as a recipient may (RFC 9112, 7.1): trailers that became headers would be
unchecked headers.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

from typing import Any, Final

import httptools

from thunderagent.proxy.wire.failures import NotHttpError

FRAMING_BYTES: Final = 16 * 1024
FRAMING_RATIO: Final = 16
"""How many bytes may be framing, in total and for each byte of data: a byte in a chunk of its own takes six."""

_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Chunks:
    """Decodes one body. `is_whole` once it ended; `is_followed` if something came after that."""

    __slots__ = ("_data_bytes", "_fed_bytes", "_parser", "_pieces", "_tail", "is_followed", "is_whole")

    def __init__(self) -> None:
        """Start before the first chunk."""
        self._pieces: list[bytes] = []
        self._tail = b""
        self._fed_bytes = 0
        self._data_bytes = 0
        self.is_whole = False
        self.is_followed = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> bytes:
        """Return the data in these bytes. Raises `NotHttpError` for an invalid chunk, or almost nothing but framing."""
        if self.is_whole:
            self.is_followed = True
            return b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_whole:
                self._parser = None
                raise NotHttpError(f"a chunk of the body is malformed: {error}") from None
            self.is_followed = True
        self._tail = data[-6:] if len(data) > 5 else (self._tail + data)[-6:]
        if self.is_whole:
            self._parser = None  # breaks the reference cycle
            if self._tail == b"\r\n\r\n\r\n" or not self._tail.endswith(b"\r\n\r\n"):
                self.is_followed = True  # llhttp skips empty lines between two messages
        pieces = self._pieces
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._fed_bytes += len(data)
        self._data_bytes += len(found)
        if self._fed_bytes > FRAMING_BYTES + FRAMING_RATIO * self._data_bytes:
            raise NotHttpError("the body consists almost only of chunk sizes, extensions and trailers")
        return found

    def close(self) -> None:
        """Stop decoding. A decoder neither closed nor whole waits for a garbage collection."""
        self._parser = None

    def on_body(self, piece: bytes) -> None:
        """Take a piece of data from the parser; not of another message, which may follow."""
        if not self.is_whole:
            self._pieces.append(piece)

    def on_message_begin(self) -> None:
        """Note that another message begins, which is not part of this body."""
        if self.is_whole:
            self.is_followed = True

    def on_message_complete(self) -> None:
        """Note the end."""
        self.is_whole = True
