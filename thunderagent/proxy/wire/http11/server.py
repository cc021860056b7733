"""A client's connection, as an asyncio Protocol: requests one after the other, each passed to its handler.

Theory of operation
===================
A connection reads one head, and asks whose it is. Ours becomes an `Asked` and a task that answers it; any other is lent
to another protocol, aiohttp's, with the bytes as received (`lent.py`). The end of a request is determined only here:
later bytes wait until it is answered. Only a little of them is kept. A client that sends more than that ahead waits,
and nothing is read from it, so its leaving cannot be noticed either. Until its answer begins it is probed now and then,
like one that ended its requests; after that, writing to it would fail. A client that ended its requests gets answers to
all those that arrived complete, in order, and to no other.

The writer of an answer waits only where it is told to: what a client does not read stays with the transport. Past the
transport's mark there is something to await before the next piece. An answer is over as soon as its last byte is
written, and the connection is free for the next request then.

The end of what a client sends may only end its requests, and then it waits for its answer (RFC 9112, 9.6). A client
that left looks the same until something is sent: a closed peer refuses it. So such a client gets an interim answer now
and then, which means nothing and which clients skip (RFC 9110, 15.2). If one is refused the client has left, and its
turn ends as usual. HTTP/1.0 has no interim answers; there the client stays only for a moment. Nor may one follow a
head; from then on the client shows itself by reading.

Input that is not HTTP that all servers read the same way is answered 400, and the connection closes. It also closes
after an answer to a request whose body has not arrived: what still comes would be read as the next request. Such a
client may finish for a moment, because closing at once would take the answer away from it.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from email.utils import formatdate
from math import inf
from time import time
from typing import Any, Final, Protocol, cast

import structlog
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import RequestError
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.errors import plain_answer
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
    KnownHeads,
    RequestHead,
    end_of_head,
    known_requests,
    written,
)
from thunderagent.proxy.wire.http11.lent import Borrower, Lent
from thunderagent.proxy.wire.http11.limits import Sweep, notice_lost_peers

log = structlog.get_logger("thunderagent.http")
stall_log = structlog.get_logger("thunderagent.stall")

Handler = Callable[["Asked"], Awaitable[None]]

AHEAD_BYTES: Final = 64 * 1024
"""A client that has sent more than this before its current request was answered waits."""

JOINED_BYTES: Final = 64 * 1024
"""A larger body is not copied to join its head."""

READ_AHEAD_BYTES: Final = 2**20
"""How much of a body without a reader is read ahead before the client must wait."""

EARLY_BYTES: Final = 64 * 1024
"""How much may follow a request for another protocol before its answer; clients of it wait for that."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

LINGER_S: Final = 2.0
"""For a client to finish sending unread bytes."""

PROBES_AFTER_S = (0.0, 0.02, 0.1, 0.5, 2.0)
"""A client that sends nothing more is probed at once, and again after each of these times; then always after the last.
A client that left refuses the second probe, if it was near enough to get the first."""

OLD_CLIENT_S: Final = 1.0
"""For an answer to a client of HTTP/1.0 that sends nothing more."""

STALL_LOOKS_COUNT: Final = 4
"""How often a client is checked within the limit before it counts as reading nothing."""


class Router(Protocol):
    """Says who answers which request."""

    def handler(self, head: RequestHead) -> Handler | None:
        """Return the handler of a request of ours; None for one that is not ours."""

    def borrower(self) -> Borrower:
        """Return a protocol that answers one request that is not ours."""


@dataclass(slots=True, eq=False)
class Settings:
    """Shared settings of a server's connections."""

    router: Router
    sweep: Sweep
    heads: KnownHeads[RequestHead] = field(default_factory=known_requests)
    idle_s: float = 75.0
    """For a head to arrive, from the start or the last answer on."""
    stall_s: float = 120.0
    """A client that reads nothing of its answer for this long is cut off."""
    connections: set[Connection] = field(default_factory=set)
    is_leaving: bool = False
    """Whether each new answer announces that it is its connection's last."""
    is_closing: bool = False
    """Whether each answer is its connection's last, announced or not."""
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    def ended(self, connection: Connection) -> None:
        """Note that a connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._closed.set()

    async def all_closed(self) -> None:
        """Return when no connection is open."""
        while self.connections:
            self._closed.clear()
            await self._closed.wait()


# --- One request, and its answer


class Asked:
    """A request and its answer."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_is_chunked",
        "_left_bytes",
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

    def __init__(self, connection: Connection, head: RequestHead) -> None:
        """Create a request whose head has arrived."""
        self._connection = connection
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
        peer = self._connection.transport.get_extra_info("peername") if self._connection.transport is not None else None
        return str(peer[0]) if peer else None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection; None once it left."""
        return self._connection.transport

    # --- the request ---------------------------------------------------------------------------------------------

    def invite(self) -> None:
        """Tell a waiting client that its body is welcome (RFC 9110, 10.1.1)."""
        transport = self._connection.transport
        if transport is not None and self.head.is_http_11 and not self.is_whole and not self.begun:
            transport.write(CONTINUE)

    async def next_piece(self) -> bytes:
        """Return the next part of the body; empty at its end. Raises `LeftError` if the client leaves."""
        while not self._pieces:
            if self.is_whole:
                return b""
            if self._connection.transport is None:
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
        found, self._pieces, self._pieces_bytes = b"".join(self._pieces), [], 0
        if self._connection.is_paused:
            self._connection.resume_reading()
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
        self._connection.pause_reading()

    def go_on(self) -> None:
        """Accept more bytes."""
        self._connection.resume_reading()

    # --- the answer ----------------------------------------------------------------------------------------------

    def answer(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> Wait:
        """Write a whole answer and its Content-Length. Raises `ValueError` for invalid headers."""
        transport = self._connection.transport
        assert not self.begun, "a request is answered once"
        if status in BODILESS_STATUSES:
            body = b""
            if status != 304:
                headers.popall(CONTENT_LENGTH, None)
        elif self.head.method != "HEAD" or CONTENT_LENGTH not in headers:
            headers[CONTENT_LENGTH] = str(len(body))
        head = self._connection.head_of(self, status, reason, headers)
        self.begun = self.is_over = True
        self.sent_bytes = len(body)
        if transport is not None:
            if self.head.method == "HEAD" or not body:
                transport.write(head)
            elif len(body) <= JOINED_BYTES:
                transport.write(head + body)
            else:
                transport.writelines([head, body])
        return self._connection.answered()

    def begin(self, status: int, reason: str, headers: CIMultiDict[str]) -> Wait:
        """Write the head of an answer whose length is in its headers, or is not known yet.

        After a switch of protocols, bytes go both ways until `cut`.
        """
        transport = self._connection.transport
        assert not self.begun, "a request is answered once"
        if status == CHANGES_PROTOCOL:
            headers["Upgrade"] = self.head.headers["Upgrade"]
        elif status not in BODILESS_STATUSES and CONTENT_LENGTH not in headers and self.head.is_http_11:
            self._is_chunked = self.head.method != "HEAD"
            headers[TRANSFER_ENCODING] = "chunked"
        head = self._connection.head_of(self, status, reason, headers)
        self.begun = True
        if transport is not None:
            transport.write(head)
        return Room(self._connection) if self._connection.is_full or transport is None else None

    def write(self, data: bytes) -> Wait:
        """Write a piece of the body; does nothing if the client left."""
        transport = self._connection.transport
        self.sent_bytes += len(data)
        if transport is not None and data and self.head.method != "HEAD":
            if not self._is_chunked:
                transport.write(data)
            elif len(data) <= JOINED_BYTES:
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            else:
                transport.writelines([b"%x\r\n" % len(data), data, b"\r\n"])
        connection = self._connection
        return Room(connection) if connection.is_full or transport is None else None

    def end(self) -> Wait:
        """End the body."""
        transport = self._connection.transport
        if self._is_chunked and transport is not None:
            transport.write(b"0\r\n\r\n")
        self.is_over = True
        return self._connection.answered()

    def cut(self) -> None:
        """Close the connection, which is how HTTP marks a started answer as incomplete."""
        self.is_over, self._sink = True, None
        self._connection.cut()

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
                self._connection.pause_reading()
        if self._waiter is not None:
            self._tell()
        return rest

    def left(self) -> None:
        """Note that the client left, or that nothing more of its request is read."""
        self._sink = None
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Room:
    """An awaitable for room to write; not a coroutine, because it need not be awaited."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        """Wait for the client of this connection."""
        self._connection = connection

    def __await__(self) -> Generator[Any, Any, None]:
        return self._connection.room().__await__()


def _make_date() -> Callable[[], str]:
    said_s, said = 0, ""

    def date() -> str:
        """Return the header of this second."""
        nonlocal said_s, said
        now_s = int(time())
        if now_s != said_s:
            said_s, said = now_s, f"Date: {formatdate(now_s, usegmt=True)}"
        return said

    return date


_date = _make_date()


# --- How long a client is waited for


class Waiting:
    """What one client's connection waits for."""

    __slots__ = (
        "_asked",
        "_idle_s",
        "_looks_count",
        "_loop",
        "_probes_count",
        "_queued_bytes",
        "_stall_s",
        "_sweep",
        "_transport",
        "due_s",
    )  # fmt: skip

    def __init__(self, transport: asyncio.Transport, sweep: Sweep, idle_s: float, stall_s: float) -> None:
        """Wait for a first head. A late connection is closed."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._sweep = sweep
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._queued_bytes = 0
        self._looks_count = 0
        self._asked: Asked | Lent | None = None
        self._probes_count = 0
        self.due_s = self._loop.time() + idle_s
        sweep.add(self)

    def over(self) -> None:
        """Stop waiting: the connection is closed."""
        self._sweep.remove(self)
        self._asked = None

    def for_head(self) -> None:
        """Wait for the next head; first for pending output to be read, if that is waited for."""
        if self.due_s == inf or self._asked is not None:
            self._asked = None
            self.due_s = due_s = self._loop.time() + self._idle_s
            if due_s < self._sweep.timer_s:
                self._sweep.hasten(due_s)

    def for_room(self) -> None:
        """Wait for the client to read some of the output."""
        self._asked = None
        self._queued_bytes, self._looks_count = self._transport.get_write_buffer_size(), 0
        self._until(self._stall_s / STALL_LOOKS_COUNT)

    def for_end(self) -> None:
        """Wait for the client to finish sending unread bytes."""
        self._asked = None
        self._until(LINGER_S)

    def for_sign(self, asked: Asked | Lent) -> None:
        """Probe the client again and again while its answer has not begun."""
        if not asked.begun:
            self._asked, self._probes_count = asked, 0
            self._probe(asked)

    def late(self, now_s: float) -> None:
        """Close a late connection, or check again."""
        if self._asked is not None:
            if not self._asked.begun:
                self._probe(self._asked)
            else:
                self._asked, self.due_s = None, inf
            return
        queued_bytes = self._transport.get_write_buffer_size()
        if queued_bytes != self._queued_bytes:  # it read something, or more was written
            self._queued_bytes, self._looks_count = queued_bytes, 0
        self._looks_count += 1
        if queued_bytes and self._looks_count < STALL_LOOKS_COUNT:
            self.due_s = now_s + self._stall_s / STALL_LOOKS_COUNT
            return
        if queued_bytes:
            stall_log.warning("client_stalled", limit_s=self._stall_s)
        self.due_s = inf
        self._transport.abort()  # closing it would wait for the client to read

    def _until(self, wait_s: float) -> None:
        self.due_s = due_s = self._loop.time() + wait_s
        if due_s < self._sweep.timer_s:
            self._sweep.hasten(due_s)

    def _probe(self, asked: Asked | Lent) -> None:
        """Send what only a client that left refuses; the transport then reports the end."""
        if self._transport.is_closing():
            return
        self._probes_count += 1
        if not asked.head.is_http_11:
            if self._probes_count > 1:
                self._transport.close()
            self._until(OLD_CLIENT_S)
            return
        self._transport.write(CONTINUE)
        self._until(PROBES_AFTER_S[min(self._probes_count, len(PROBES_AFTER_S)) - 1])


# --- The connection


class Connection:
    """One client's connection, with the methods of an asyncio protocol: a compiled class cannot inherit from that."""

    def __init__(self, settings: Settings) -> None:
        """Start before the connection is made."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._waiting: Waiting | None = None
        self._buffer = b""
        self._looked_at = 0
        """How much of the buffer contains no end of a head."""
        self._asked: Asked | None = None
        self._task: asyncio.Task[None] | None = None
        self._lent: Lent | None = None
        self.closes = False
        """Whether it ends with the pending answer."""
        self._has_ended = False
        """Whether the client has ended its requests; complete ones are answered."""
        self._is_lingering = False
        self.is_paused = False
        """Whether nothing is read from it for now."""
        self._is_ahead = False
        """Whether the client has sent so much ahead that it waits until its request is answered."""
        self.is_full = False
        self._room: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Connection, {'closed' if self.transport is None else self._asked or self._lent or 'idle'}>"

    @property
    def is_idle(self) -> bool:
        """Whether it carries no request."""
        return self._asked is None and self._lent is None

    # --- what the transport tells --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for a head."""
        self.transport = cast("asyncio.Transport", transport)
        notice_lost_peers(transport)
        settings = self._settings
        self._waiting = Waiting(self.transport, settings.sweep, settings.idle_s, settings.stall_s)
        settings.connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End: a handler would answer nobody."""
        self.transport = None
        if self._waiting is not None:
            self._waiting.over()
        self._settings.ended(self)
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.lost(exc)
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.left()
            if self._task is not None and not asked.is_over:
                self._task.cancel()
        self._task = None
        self._has_room()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, or of what follows it."""
        if self._is_lingering:
            return
        asked, lent = self._asked, self._lent
        if asked is not None and not asked.is_whole:
            self._feed(asked, data)
        elif lent is not None and not lent.is_whole:
            try:
                rest = lent.feed(data)
            except NotHttpError as error:
                self._refuse(error, lent.head.target)
            else:
                self._keep(rest)
        elif asked is not None or lent is not None:
            self._keep(data)
        else:
            self._buffer = self._buffer + data if self._buffer else data
            self._next()

    def eof_received(self) -> bool:
        """Keep the connection if a complete request still waits for its answer to begin.

        A client that ends within a body or an answer has left. TLS has no half-closed connections.
        """
        if self.transport is None or self.transport.get_extra_info("sslcontext") is not None:
            return False
        due = self._asked or self._lent
        if due is not None and (not due.is_whole or due.begun):
            return False
        self._has_ended = True
        if due is None:
            self._next()  # ends it if no request is left
        else:
            self._ask_for_sign()
        return True

    def _ask_for_sign(self) -> None:
        """Probe a client that sends nothing more; one that left before its request was complete is gone."""
        due = self._asked or self._lent
        assert self._waiting is not None
        if due is None:
            return
        if due.is_whole:
            self._waiting.for_sign(due)
        elif self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        """Make the handler wait: the client reads nothing for now."""
        self.is_full = True
        assert self._waiting is not None
        self._waiting.for_room()
        if self._lent is not None:
            self._lent.full()

    def resume_writing(self) -> None:
        """Go on: the client read something."""
        self.is_full = False
        assert self._waiting is not None
        self._waiting.due_s = inf
        if self.is_idle:
            self._waiting.for_head()
        self._has_room()
        if self._lent is not None:
            self._lent.has_room()

    # --- for a request -------------------------------------------------------------------------------------------

    def head_of(self, asked: Asked, status: int, reason: str, headers: CIMultiDict[str]) -> bytes:
        """Return the head of an answer, with what all answers have and what becomes of the connection."""
        asked.status = status
        if asked.decorate is not None:
            asked.decorate(asked, headers)
        is_known = CONTENT_LENGTH in headers or TRANSFER_ENCODING in headers or status in BODILESS_STATUSES
        is_last = self.closes or self._settings.is_leaving or (self._has_ended and not self._buffer)
        if status == CHANGES_PROTOCOL:
            headers["Connection"] = "Upgrade"
            self.closes = True
        elif is_last or not (is_known and asked.is_whole):
            headers["Connection"] = "close"
            self.closes = True
        elif not asked.head.is_http_11:
            headers["Connection"] = "keep-alive"
        return written([f"HTTP/1.1 {status} {reason}"], headers, "" if DATE in headers else _date())

    async def room(self) -> None:
        """Return when the client has read something. Raises `LeftError`."""
        while self.is_full and self.transport is not None:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)  # others wait for it, too
        if self.transport is None:
            raise LeftError("the client left")

    def _has_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def pause_reading(self) -> None:
        """Make the client wait."""
        if self.transport is not None and not self.is_paused:
            self.is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Accept more bytes, unless the client is too far ahead."""
        if self.is_paused and not self._is_ahead:
            self.is_paused = False
            if self.transport is not None:
                self.transport.resume_reading()

    def answered(self, *, stays: bool = True) -> Wait:
        """Go on with the next request, or end; return what to await until the client has read some of the answer.

        Unless it `stays`, a borrower ended it.
        """
        due = self._asked or self._lent
        self._asked = self._task = self._lent = None
        if self.transport is None or self._waiting is None:
            return Room(self)
        wait = Room(self) if self.is_full else None
        self._is_ahead = False
        if self.is_paused:
            self.resume_reading()
        if not stays or self.closes or self._settings.is_closing:
            self._end(is_whole=due is None or due.is_whole)
            return wait
        self._waiting.for_head()
        if self._buffer or self._has_ended:
            self._loop.call_soon(self._next)
        return wait

    def cut(self) -> None:
        """End it with what was written so far."""
        self._is_lingering = True
        if self.transport is not None and self._waiting is not None:
            self.transport.close()
            self._waiting.for_room()  # it closes when that was read

    # --- requests ------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Start the next request, if its head has arrived."""
        if self.transport is None or self.transport.is_closing() or self._asked is not None or self._lent is not None:
            return
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: some clients end a body this way
            buffer = self._buffer = buffer[2:]
        try:
            end = end_of_head(buffer, self._looked_at)
            if not end:
                self._looked_at = len(buffer)
                if self._has_ended:
                    self._end(is_whole=True)
                return
            raw, self._buffer, self._looked_at = buffer[:end], buffer[end:], 0
            head = self._settings.heads.read(raw)
        except NotHttpError as error:
            self._refuse(error, _target_in(buffer))
            return
        assert self._waiting is not None
        if not self.is_full:
            self._waiting.due_s = inf  # an answer may take as long as it takes
        self.closes = not head.keeps_alive
        handler = self._settings.router.handler(head)
        if handler is not None:
            asked, data = Asked(self, head), b""
            self._asked = asked
            if not asked.is_whole:
                data, self._buffer = self._buffer, b""
            if data and not self._feed(asked, data):
                return
            self._task = self._loop.create_task(self._answer(asked, handler))
        else:
            self._lent = Lent(self, self.transport, head, self._settings.router.borrower())
            rest, self._buffer = self._buffer, b""
            try:
                self._buffer = self._lent.feed(rest, raw)
            except NotHttpError as error:
                self._refuse(error, head.target)
                return
        if self._has_ended:
            self._ask_for_sign()

    async def _answer(self, asked: Asked, handler: Handler) -> None:
        try:
            await handler(asked)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client left; a task that kept the error would hold the whole turn until a collection
        except Exception:
            log.exception("http_server_error")
        finally:
            if not asked.is_over and self.transport is not None:
                self.transport.abort()

    def _feed(self, asked: Asked, data: bytes) -> bool:
        """Add bytes to a body; return whether they belong to it."""
        try:
            rest = asked.feed(data)
        except NotHttpError as error:
            self._refuse(error, asked.head.target)
            return False
        if rest:
            self._keep(rest)
        if asked.is_followed:  # where that begins is unknown
            self.closes = True
        return True

    def _keep(self, data: bytes) -> None:
        """Keep bytes sent ahead; a client that is too far ahead waits. What follows its last request is dropped."""
        self._buffer = b"" if self.closes else self._buffer + data
        due = self._asked or self._lent
        if len(self._buffer) <= AHEAD_BYTES or self._is_ahead or due is None:
            return
        if not due.head.is_http_11:  # it cannot be probed
            self._buffer, self.closes = b"", True
            return
        self._is_ahead = True
        self.pause_reading()
        assert self._waiting is not None
        self._waiting.for_sign(due)

    def _refuse(self, error: NotHttpError, target: bytes) -> None:
        """Answer invalid input that asks for `target` with 400, or cut an answer that has begun, and end."""
        log.info("request_is_not_http", why=str(error))
        asked, lent, task, transport = self._asked, self._lent, self._task, self.transport
        self._asked = self._lent = self._task = None
        if lent is not None:
            lent.lost(None)
        if asked is not None:
            asked.is_over = True
            asked.left()
        if task is not None:
            task.cancel()
        if transport is None or (asked is not None and asked.begun) or (lent is not None and lent.begun):
            self.cut()
            return
        transport.write(refusal(str(error), target))
        self._end(is_whole=False)

    def _end(self, *, is_whole: bool) -> None:
        """End after what was written; a client that still sends may finish for a moment."""
        transport = self.transport
        assert transport is not None
        assert self._waiting is not None
        self._is_lingering, self._buffer = True, b""
        if is_whole or not transport.can_write_eof() or transport.is_closing():
            self.cut()
            return
        self.resume_reading()  # what stays unread when it closes would reset it
        transport.write_eof()
        self._waiting.for_end()

    def close(self, *, at_once: bool = False) -> None:
        """End it after the pending answer; if there is none, or `at_once`, now."""
        self.closes = True
        if self.transport is not None and at_once:
            self.transport.abort()
        elif self.transport is not None and self.is_idle:
            self.transport.close()


def _target_in(buffer: bytes) -> bytes:
    """Return the second word of the first line, which may be anything."""
    words = buffer[:AHEAD_BYTES].partition(b"\r\n")[0].split(b" ", 2)
    return words[1] if len(words) > 1 else b""


def refusal(why: str, target: bytes) -> bytes:
    """Return the answer to what is not HTTP, in the schema of the API that it seems to ask for."""
    try:
        spelt = Target.parse(target.decode("utf-8", "surrogateescape")).spelt
    except RequestError:
        spelt = None
    told = plain_answer(RequestError.status, RequestError.code, f"the request was not accepted: {why}", spelt)
    fields = "".join(f"{name}: {value}\r\n" for name, value in told.headers.items())
    fields += f"Content-Length: {len(told.body)}\r\nConnection: close\r\n\r\n"
    return f"HTTP/1.1 400 Bad Request\r\n{fields}".encode() + told.body
