"""A body that comes in chunks, decoded by llhttp: pieces of data out, sizes, extensions and trailers away.

Each body has a parser of its own, which began with a head of ours; so what the head of its message said of anything
else has no say in it. Extensions and trailers are dropped, as a recipient may (RFC 9112, 7.1): trailers that became
headers would be headers that nobody judged.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

from typing import Any, Final

import httptools

from thunderagent.proxy.wire.failures import NotHttpError

FRAMING_BYTES: Final = 16 * 1024
FRAMING_RATIO: Final = 16
"""So much may be no data, and so much for each byte of data: a byte in a chunk of its own takes six."""

_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Chunks:
    """Decode one body. `is_whole` once its end came; `is_followed` if something came after that."""

    __slots__ = ("_data_bytes", "_fed_bytes", "_parser", "_pieces", "_tail", "is_followed", "is_whole")

    def __init__(self) -> None:
        """Begin before the first chunk."""
        self._pieces: list[bytes] = []
        self._tail = b""
        self._fed_bytes = 0
        self._data_bytes = 0
        self.is_whole = False
        self.is_followed = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> bytes:
        """Return the data that came. Raises `NotHttpError` where it is no chunk, or next to nothing but sizes."""
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
            self._parser = None  # it holds this, and this it
            if self._tail == b"\r\n\r\n\r\n" or not self._tail.endswith(b"\r\n\r\n"):
                self.is_followed = True  # llhttp passes over empty lines between two messages
        pieces = self._pieces
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._fed_bytes += len(data)
        self._data_bytes += len(found)
        if self._fed_bytes > FRAMING_BYTES + FRAMING_RATIO * self._data_bytes:
            raise NotHttpError("the body consists almost only of chunk sizes, extensions and trailers")
        return found

    def close(self) -> None:
        """Decode no more. What is not closed, nor whole, waits for a garbage collection."""
        self._parser = None

    def on_body(self, piece: bytes) -> None:
        """Take a piece of data from the parser."""
        self._pieces.append(piece)

    def on_message_begin(self) -> None:
        """Hear that another message begins, which is none of this body's."""
        if self.is_whole:
            self.is_followed = True

    def on_message_complete(self) -> None:
        """Hear of the end."""
        self.is_whole = True
