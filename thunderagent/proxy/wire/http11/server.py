"""A client's connection, as an asyncio Protocol: requests one after the other, each passed to its handler.

Theory of operation
===================
A connection reads one head, and asks whose it is. Ours becomes an `Asked` and a task that answers it; any other is lent
to another protocol, aiohttp's, with the bytes as received (`lent.py`). The end of a request is determined only here:
later bytes wait until it is answered. Only a little of them is kept. A client that sends more than that ahead waits,
and nothing is read from it, so its leaving cannot be noticed either. Until its answer begins it is probed now and then,
like one that ended its requests (`waiting.py`); after that, writing to it would fail. A client that ended its requests
gets answers to all those that arrived complete, in order, and to no other.

Input that is not HTTP that all servers read the same way is answered 400, and the connection closes. It also closes
after an answer to a request whose body has not arrived: what still comes would be read as the next request. Such a
client may finish for a moment, because closing at once would take the answer away from it.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
from typing import Final, cast

import structlog

from thunderagent.proxy.wire.failures import LeftError, NotHttpError
from thunderagent.proxy.wire.http11.asked import Asked, refusal
from thunderagent.proxy.wire.http11.heads import end_of_head
from thunderagent.proxy.wire.http11.lent import Lent
from thunderagent.proxy.wire.http11.limits import notice_lost_peers
from thunderagent.proxy.wire.http11.line import Handler, Settings
from thunderagent.proxy.wire.http11.waiting import Waiting

log = structlog.get_logger("thunderagent.http")

AHEAD_BYTES: Final = 64 * 1024
"""A client that has sent more than this before its current request was answered waits."""


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
        self._is_paused = False
        self._is_ahead = False
        """Whether the client has sent so much ahead that it waits until its request is answered."""
        self.is_full = False
        self._room: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Connection, {'closed' if self.transport is None else self._asked or self._lent or 'idle'}>"

    @property
    def may_stay(self) -> bool:
        """Whether it may carry another request."""
        is_whole = self._asked is not None and self._asked.is_whole
        settings = self._settings
        is_last = self.closes or settings.is_leaving or (self._has_ended and not self._buffer)
        return is_whole and not is_last

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
                self._refuse(error)
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
        self._waiting.for_answer()
        if self.is_idle:
            self._waiting.for_head()
        self._has_room()
        if self._lent is not None:
            self._lent.has_room()

    # --- for a request -------------------------------------------------------------------------------------------

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
        if self.transport is not None and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Accept more bytes, unless the client is too far ahead."""
        if self._is_paused and not self._is_ahead:
            self._is_paused = False
            if self.transport is not None:
                self.transport.resume_reading()

    def answered(self) -> None:
        """Go on with the next request, or end."""
        asked, self._asked, self._task = self._asked, None, None
        if self.transport is None or self._waiting is None:
            return
        self._is_ahead = False
        if self._is_paused:
            self.resume_reading()
        if self.closes or self._settings.is_closing:
            self._end(is_whole=asked is None or asked.is_whole)
            return
        self._waiting.for_head()
        if self._buffer or self._has_ended:
            self._loop.call_soon(self._next)

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
            self._refuse(error)
            return
        assert self._waiting is not None
        if not self.is_full:
            self._waiting.for_answer()
        self.closes = not head.keeps_alive
        handler = self._settings.router.handler(head)
        if handler is not None:
            self._begin(Asked(self, head), handler)
        else:
            self._lent = Lent(self, self.transport, head, self._settings.router.borrower())
            rest, self._buffer = self._buffer, b""
            try:
                self._buffer = self._lent.begin(raw, rest)
            except NotHttpError as error:
                self._refuse(error)
                return
        if self._has_ended:
            self._ask_for_sign()

    def _begin(self, asked: Asked, handler: Handler) -> None:
        self._asked = asked
        data = b""
        if not asked.is_whole:
            data, self._buffer = self._buffer, b""
        if data and not self._feed(asked, data):
            return
        self._task = self._loop.create_task(self._answer(asked, handler))

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
            self._refuse(error)
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

    def _refuse(self, error: NotHttpError) -> None:
        """Answer invalid input with 400, or cut an answer that has begun, and end."""
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
        transport.write(refusal(str(error)))
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

    # --- requests of others, and the end -------------------------------------------------------------------------

    def returned(self, *, stays: bool) -> None:
        """Note that a lent request was answered, and whether the connection may carry another."""
        lent, self._lent = self._lent, None
        if stays:
            self.answered()
        elif self.transport is not None:
            self._end(is_whole=lent is None or lent.is_whole)

    def close(self, *, at_once: bool = False) -> None:
        """End it after the pending answer; if there is none, or `at_once`, now."""
        self.closes = True
        if self.transport is not None and at_once:
            self.transport.abort()
        elif self.transport is not None and self.is_idle:
            self.transport.close()
