"""One request of a client, as read, and its answer as written.

The writer waits only where it is told to: what a client does not read stays with the transport. Past the transport's
mark there is something to await before the next piece. An answer is over as soon as its last byte is written, and the
connection is free for the next request then.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from email.utils import formatdate
from time import time
from typing import Any, Final

from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.exchange import KeptBody, Wait
from thunderagent.proxy.wire.failures import LeftError, NotHttpError
from thunderagent.proxy.wire.http11.chunks import Chunks
from thunderagent.proxy.wire.http11.heads import (
    BODILESS_STATUSES,
    CHANGES_PROTOCOL,
    CHUNKED,
    CONTENT_LENGTH,
    DATE,
    TRANSFER_ENCODING,
    RequestHead,
    written,
)
from thunderagent.proxy.wire.http11.line import Line, Room

JOINED_BYTES: Final = 64 * 1024
"""A larger body is not copied to join its head."""

READ_AHEAD_BYTES: Final = 2**20
"""How much of a body without a reader is read ahead before the client must wait."""

EARLY_BYTES: Final = 64 * 1024
"""How much may follow a request for another protocol before its answer; clients of it wait for that."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


def refusal(why: str) -> bytes:
    """Return the answer to what is not HTTP."""
    body = f"400: {why}\n".encode()
    fields = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return f"HTTP/1.1 400 Bad Request\r\n{fields}".encode() + body


class Asked:
    """A request and its answer."""

    __slots__ = (
        "_chunks",
        "_is_chunked",
        "_left_bytes",
        "_line",
        "_pieces",
        "_pieces_bytes",
        "_sink",
        "_waiter",
        "begun",
        "body",
        "decorate",
        "head",
        "headers",
        "is_followed",
        "is_over",
        "is_whole",
        "kept",
        "method",
        "notes",
        "sent_bytes",
        "status",
        "target",
    )

    target: Target
    """Its target, once that was read."""

    def __init__(self, line: Line, head: RequestHead) -> None:
        """Create a request whose head has arrived."""
        self._line = line
        self.head = head
        self.method = head.method
        self.headers: CIMultiDictProxy[str] = head.headers
        self.notes: dict[str, Any] = head.notes
        """What other parts derived from the head."""
        self.body = b""
        """The whole body, once it was read."""
        self.kept: KeptBody | None = None
        self.status = 0
        """Of the answer, once it was begun."""
        self.sent_bytes = 0
        """Of the answer's body."""
        self.decorate: Callable[[Asked, CIMultiDict[str]], None] | None = None
        """Adds to the head of the answer what all answers have."""
        self._chunks = Chunks() if head.length == CHUNKED else None
        self._left_bytes = sys.maxsize if head.upgrades else head.length
        self.is_whole = not self._left_bytes
        """Whether all of the request arrived."""
        self.is_followed = False
        """Whether something followed a chunked body; where it began is unknown."""
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_chunked = False
        self.begun = False
        """Whether something of the answer was written."""
        self.is_over = False
        """Whether the answer was written to its end, or cut."""

    def __repr__(self) -> str:
        stage = "over" if self.is_over else "begun" if self.begun else "unanswered"
        return f"<Asked {self.head.method}, {stage}>"

    @property
    def host(self) -> str:
        """The host name in the request."""
        return self.head.headers.get("Host", "")

    @property
    def remote(self) -> str | None:
        """The address that it came from."""
        peer = self._line.transport.get_extra_info("peername") if self._line.transport is not None else None
        return str(peer[0]) if peer else None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection; None once it left."""
        return self._line.transport

    # --- the request ---------------------------------------------------------------------------------------------

    def invite(self) -> None:
        """Tell a waiting client that its body is welcome (RFC 9110, 10.1.1)."""
        transport = self._line.transport
        if transport is not None and self.head.is_http_11 and not self.is_whole and not self.begun:
            transport.write(CONTINUE)

    async def next_piece(self) -> bytes:
        """Return the next part of the body; empty at its end. Raises `LeftError` if the client leaves."""
        while not self._pieces:
            if self.is_whole:
                return b""
            if self._line.transport is None:
                raise LeftError("the client disconnected before its request was complete")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.taken()

    async def read(self) -> bytes:
        """Return the body, or the part that was not taken yet. Raises like `next_piece`."""
        if self.is_whole:
            return self.taken()
        pieces = []
        while piece := await self.next_piece():
            pieces.append(piece)
        return b"".join(pieces)

    def taken(self) -> bytes:
        """Return what arrived of the body and was not taken yet; all of it if `is_whole`."""
        pieces = self._pieces
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._pieces_bytes = 0
        self._line.resume_reading()
        return found

    @property
    def channel(self) -> Asked | None:
        """Itself, if it asks for another protocol: all that follows its head belongs to that."""
        return self if self.head.upgrades else None

    def pour(self, sink: Callable[[bytes], None]) -> None:
        """Pass to `sink` what has arrived, and later bytes as they arrive."""
        data, self._sink = self.taken(), sink
        if data:
            sink(data)

    def hold(self) -> None:
        """Make the client wait."""
        self._line.pause_reading()

    def go_on(self) -> None:
        """Accept more bytes."""
        self._line.resume_reading()

    # --- the answer ----------------------------------------------------------------------------------------------

    def answer(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> Wait:
        """Write a whole answer and its Content-Length. Raises `ValueError` for invalid headers."""
        transport = self._line.transport
        assert not self.begun, "a request is answered once"
        if status in BODILESS_STATUSES:
            body = b""
            if status != 304:
                headers.popall(CONTENT_LENGTH, None)
        elif self.head.method != "HEAD" or CONTENT_LENGTH not in headers:
            headers[CONTENT_LENGTH] = str(len(body))
        head = self._head(status, reason, headers)
        self.begun = True
        self.sent_bytes = len(body)
        if transport is not None:
            if self.head.method == "HEAD" or not body:
                transport.write(head)
            elif len(body) <= JOINED_BYTES:
                transport.write(head + body)
            else:
                transport.writelines([head, body])
        return self._over()

    def begin(self, status: int, reason: str, headers: CIMultiDict[str]) -> Wait:
        """Write the head of an answer whose length is in its headers, or is not known yet.

        After a switch of protocols, bytes go both ways until `cut`.
        """
        transport = self._line.transport
        assert not self.begun, "a request is answered once"
        if status == CHANGES_PROTOCOL:
            headers["Upgrade"] = self.head.headers["Upgrade"]
        elif status not in BODILESS_STATUSES and CONTENT_LENGTH not in headers and self.head.is_http_11:
            self._is_chunked = self.head.method != "HEAD"
            headers[TRANSFER_ENCODING] = "chunked"
        head = self._head(status, reason, headers)
        self.begun = True
        if transport is not None:
            transport.write(head)
        return self._wait()

    def write(self, data: bytes) -> Wait:
        """Write a piece of the body; does nothing if the client left."""
        transport = self._line.transport
        self.sent_bytes += len(data)
        if transport is not None and data and self.head.method != "HEAD":
            if not self._is_chunked:
                transport.write(data)
            elif len(data) <= JOINED_BYTES:
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            else:
                transport.writelines([b"%x\r\n" % len(data), data, b"\r\n"])
        return self._wait()

    def end(self) -> Wait:
        """End the body."""
        transport = self._line.transport
        if self._is_chunked and transport is not None:
            transport.write(b"0\r\n\r\n")
        return self._over()

    def cut(self) -> None:
        """Close the connection, which is how HTTP marks a started answer as incomplete."""
        self.is_over, self._sink = True, None
        self._line.cut()

    # --- for the connection --------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        """Add bytes to the body; return what follows it. Raises `NotHttpError`."""
        rest = b""
        if self._chunks is not None:
            data = self._chunks.feed(data)
            self.is_whole, self.is_followed = self._chunks.is_whole, self._chunks.is_followed
        else:
            data, rest = data[: self._left_bytes], data[self._left_bytes :]
            self._left_bytes -= len(data)
            self.is_whole = not self._left_bytes
        if self._sink is not None:
            self._sink(data)
        elif data and not self.is_over:
            self._pieces.append(data)
            self._pieces_bytes += len(data)
            if self.head.upgrades and not self.begun and self._pieces_bytes > EARLY_BYTES:
                raise NotHttpError("a client that asks for another protocol must wait for the answer")
            if self._pieces_bytes > READ_AHEAD_BYTES and not self.is_whole:
                self._line.pause_reading()
        if self._waiter is not None:
            self._tell()
        return rest

    def left(self) -> None:
        """Note that the client left, or that nothing more of its request is read."""
        self._sink = None
        if self._chunks is not None:
            self._chunks.close()
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wait(self) -> Wait:
        line = self._line
        return Room(line) if line.is_full or line.transport is None else None

    def _over(self) -> Wait:
        self.is_over = True
        if self._chunks is not None and not self.is_whole:
            self._chunks.close()
        wait = self._wait()
        self._line.answered()
        return wait

    def _head(self, status: int, reason: str, headers: CIMultiDict[str]) -> bytes:
        self.status = status
        if self.decorate is not None:
            self.decorate(self, headers)
        is_known = CONTENT_LENGTH in headers or TRANSFER_ENCODING in headers or status in BODILESS_STATUSES
        if status == CHANGES_PROTOCOL:
            headers["Connection"] = "Upgrade"
            self._line.closes = True
        elif not (self._line.may_stay and is_known):
            headers["Connection"] = "close"
            self._line.closes = True
        elif not self.head.is_http_11:
            headers["Connection"] = "keep-alive"
        if DATE not in headers:
            headers[DATE] = _date()
        return written([f"HTTP/1.1 {status} {reason}"], headers)


def _make_date() -> Callable[[], str]:
    said_s, said = 0, ""

    def date() -> str:
        nonlocal said_s, said
        now_s = int(time())
        if now_s != said_s:
            said_s, said = now_s, formatdate(now_s, usegmt=True)
        return said

    return date


_date = _make_date()
