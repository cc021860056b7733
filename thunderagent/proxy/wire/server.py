"""A client's connection, as an asyncio Protocol: requests one after the other, each to whoever answers its kind.

Theory of operation
===================
A connection reads one head, and asks whose it is. What is ours becomes an `Asked` and a task that answers it; the
rest is lent to another protocol, aiohttp's, with the bytes as they came (`lent.py`). Where a request ends is read here
alone, so that both would have to read it the same way: what comes after it waits here until it is answered. Of that, a
little is kept. A client that sends more ahead than that is told to come again on another connection.

What is no HTTP that all servers read the same way is answered 400, and the connection closes. So it does after an answer
to a request whose body has not come: what still comes would be read as the next request. Such a client is let finish for
a moment, because to close on it at once would take the answer away from it.

The end of what a client sends may be the end of its requests alone, and then it waits for its answer (RFC 9112, 9.6).
A client that left looks the same until something is sent: a closed peer refuses it. So such a client is sent an interim
answer now and then, which means nothing and which clients pass over (RFC 9110, 15.2); where one is refused the client
has left, and its turn ends as ever. HTTP/1.0 knows no interim answers, nor may one follow a head. There the client stays
for a moment only, or until what it reads is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, cast

import structlog

from thunderagent.proxy.wire.asked import CONTINUE, Asked
from thunderagent.proxy.wire.heads import NotHttpError, RequestHead, end_of_head, read_request
from thunderagent.proxy.wire.lent import Borrower, Lent
from thunderagent.proxy.wire.limits import Sweep, notice_lost_peers

log = structlog.get_logger("thunderagent.http")

AHEAD_BYTES = 64 * 1024
"""Of requests that come before the one before them was answered, so much is kept."""

LINGER_S = 2.0
"""For a client to finish sending what nobody reads."""

PROBES_AFTER_S = (0.0, 0.02, 0.1, 0.5, 2.0)
"""A client that sends nothing more is asked at once whether it is there, and again after each of these times; from the
last on, always after that. The second one is refused by a client that left, if it was near enough to hear the first."""

OLD_CLIENT_S = 1.0
"""For an answer to a client of HTTP/1.0 that sends nothing more."""

STALL_LOOKS_COUNT = 4
"""A client is looked at so often, within the limit, before it is said to take nothing."""

Handler = Callable[[Asked], Awaitable[None]]


class Router(Protocol):
    """Says who answers what."""

    def handler(self, head: RequestHead) -> Handler | None:
        """Return who answers a request of ours; None for one that is not ours."""

    def borrower(self) -> Borrower:
        """Return a protocol that answers one request which is not ours."""


@dataclass(slots=True, eq=False)
class Settings:
    """What all connections of a server share."""

    router: Router
    sweep: Sweep
    idle_s: float = 75.0
    """For a head to come, from the first moment or the last answer on."""
    stall_s: float = 120.0
    """A client that takes nothing of its answer for so long is cut off."""
    connections: set[Connection] = field(default_factory=set)
    is_closing: bool = False
    """Whether each answer is its connection's last."""


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, settings: Settings) -> None:
        """Begin before it is made."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._buffer = b""
        self._looked_at = 0
        """Of the buffer, so much holds no end of a head."""
        self._exchange: Asked | None = None
        self._task: asyncio.Task[None] | None = None
        self._lent: Lent | None = None
        self._closes = False
        """Whether it ends with the answer that is due."""
        self._is_lingering = False
        self._is_paused = False
        self._queued_bytes = 0
        self._unchanged_count = 0
        """How often it was seen that nothing of that was taken."""
        self._probes_count = 0
        """How often a client that sends nothing more was asked; it is while this is not 0."""
        self.due_s = inf

    def __repr__(self) -> str:
        doing = self._exchange or self._lent or "idle"
        return f"<Connection, {'closed' if self.transport is None else doing}>"

    @property
    def may_stay(self) -> bool:
        """Whether it may carry another request."""
        exchange = self._exchange
        return not self._closes and exchange is not None and exchange.is_whole and not self._settings.is_closing

    @property
    def is_idle(self) -> bool:
        """Whether it carries no request."""
        return self._exchange is None and self._lent is None

    def stay_no_longer(self) -> None:
        """Have it end with the answer that is due."""
        self._closes = True

    # --- what the transport tells --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head."""
        self.transport = cast("asyncio.Transport", transport)
        notice_lost_peers(transport)
        self.due_s = self._loop.time() + self._settings.idle_s
        self._settings.connections.add(self)
        self._settings.sweep.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End: whoever answers answers nobody."""
        self.transport = None
        self._settings.sweep.remove(self)
        self._settings.connections.discard(self)
        if self._lent is not None:
            self._lent.lost(exc)
            self._lent = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.left()
            if self._task is not None and not exchange.is_over:
                self._task.cancel()
        self._task = None

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, or of what follows it."""
        exchange = self._exchange
        if self._is_lingering:
            return
        if exchange is not None and not exchange.is_whole:
            self._feed(exchange, data)
        elif self._lent is not None and self._lent.wants:
            if rest := self._lent.feed(data):
                self._keep(rest)
        elif exchange is not None or self._lent is not None:
            self._keep(data)
        else:
            self._buffer = self._buffer + data if self._buffer else data
            self._next()

    def eof_received(self) -> bool:
        """Keep the connection if a whole request still waits for its answer to begin.

        Who ends in the middle of a body or of an answer has left. TLS has no half of a connection.
        """
        if self.transport is None or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self._lent is not None:
            return self._lent.eof_received()
        exchange = self._exchange
        if exchange is None or not exchange.is_whole or exchange.has_begun:
            return False
        self._closes = True
        self._probe(exchange)
        return True

    def pause_writing(self) -> None:
        """Hold whoever answers: the client takes nothing for now."""
        self._watch_queue()
        if self._exchange is not None:
            self._exchange.full()
        elif self._lent is not None:
            self._lent.full()

    def resume_writing(self) -> None:
        """Go on: it took something."""
        self.due_s = self._loop.time() + self._settings.idle_s if self.is_idle else inf
        self._settings.sweep.hasten(self.due_s)
        if self._exchange is not None:
            self._exchange.has_room()
        elif self._lent is not None:
            self._lent.has_room()

    def pause_reading(self) -> None:
        """Have the client wait."""
        if self.transport is not None and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Let more come."""
        if self._is_paused:
            self._is_paused = False
            if self.transport is not None:
                self.transport.resume_reading()

    def late(self, now_s: float) -> None:
        """Close it: no head came, what it was sent was not taken, or it did not finish; or ask whether it is there."""
        transport, exchange = self.transport, self._exchange
        if transport is None:
            return
        if self._probes_count and exchange is not None:
            self._probe(exchange)
            return
        queued = transport.get_write_buffer_size()
        if queued != self._queued_bytes:  # it took something, or more was written
            self._queued_bytes, self._unchanged_count = queued, 0
        self._unchanged_count += 1
        if queued and self._unchanged_count < STALL_LOOKS_COUNT:
            self.due_s = now_s + self._settings.stall_s / STALL_LOOKS_COUNT
            return
        if queued:
            log.warning("client_stalled", limit_s=self._settings.stall_s)
        self.due_s = inf
        transport.abort()  # to close it would wait for the client to read

    # --- requests ------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Begin with the next request, if its head is there."""
        if self.transport is None or self.transport.is_closing() or not self.is_idle:
            return
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: some clients end a body so
            buffer = self._buffer = buffer[2:]
        try:
            end = end_of_head(buffer, self._looked_at)
            if not end:
                self._looked_at = len(buffer)
                return
            raw, self._buffer, self._looked_at = buffer[:end], buffer[end:], 0
            head = read_request(raw)
        except NotHttpError as error:
            self._refuse(error)
            return
        self.due_s = inf
        self._closes = not head.keeps_alive
        handler = self._settings.router.handler(head)
        if handler is None:
            self._lend(head, raw)
        else:
            self._begin(Asked(self, head), handler)

    def _begin(self, exchange: Asked, handler: Handler) -> None:
        self._exchange = exchange
        if not exchange.is_whole:
            data, self._buffer = self._buffer, b""
            if data and not self._feed(exchange, data):
                return
        self._task = self._loop.create_task(self._answer(exchange, handler))

    async def _answer(self, exchange: Asked, handler: Handler) -> None:
        try:
            await handler(exchange)
        except ConnectionError:
            pass  # the client left
        except Exception:
            log.exception("http_server_error")
        finally:
            if not exchange.is_over and self.transport is not None:
                self.transport.abort()

    def _feed(self, exchange: Asked, data: bytes) -> bool:
        """Take bytes of a body; say whether that is what they are."""
        try:
            rest = exchange.feed(data)
        except NotHttpError as error:
            self._refuse(error)
            return False
        if rest:
            self._keep(rest)
        if exchange.is_followed:  # it cannot be told where that begins
            self._closes = True
        return True

    def _keep(self, data: bytes) -> None:
        """Keep what came ahead, or else end with the answer that is due."""
        if len(self._buffer) + len(data) <= AHEAD_BYTES and not self._closes:
            self._buffer += data
        else:
            self._buffer, self._closes = b"", True

    def answered(self) -> None:
        """Go on with the next request, or end."""
        exchange, self._exchange, self._task = self._exchange, None, None
        transport = self.transport
        if transport is None:
            return
        self.resume_reading()
        if self._closes or self._settings.is_closing:
            self._close(is_whole=exchange is not None and exchange.is_whole)
            return
        if self.due_s == inf:  # else what was written has to be taken first
            self.due_s = self._loop.time() + self._settings.idle_s
            self._settings.sweep.hasten(self.due_s)
        if self._buffer:
            self._loop.call_soon(self._next)

    def _refuse(self, error: NotHttpError) -> None:
        """Answer what is no HTTP, or cut an answer that has begun, and end."""
        log.info("request_is_not_http", why=str(error))
        exchange, task, transport = self._exchange, self._task, self.transport
        self._exchange = self._task = None
        self._closes, self._buffer = True, b""
        has_begun = exchange is not None and exchange.has_begun
        if exchange is not None:
            exchange.is_over = True
            exchange.left()
        if task is not None:
            task.cancel()
        if has_begun:
            self.cut()
        elif transport is not None:
            body = f"400: {error}\n".encode()
            fields = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            transport.write(f"HTTP/1.1 400 Bad Request\r\n{fields}".encode() + body)
            self._close(is_whole=False)

    def _close(self, *, is_whole: bool) -> None:
        """End after what was written; a client that still sends is let finish for a moment."""
        transport = self.transport
        assert transport is not None
        self._is_lingering, self._buffer = True, b""
        if is_whole or not transport.can_write_eof() or transport.is_closing():
            self.cut()
            return
        transport.write_eof()
        self.due_s = self._loop.time() + LINGER_S
        self._settings.sweep.hasten(self.due_s)

    def _watch_queue(self) -> None:
        """Look whether the client takes what was written."""
        assert self.transport is not None
        self._queued_bytes, self._unchanged_count = self.transport.get_write_buffer_size(), 0
        self.due_s = self._loop.time() + self._settings.stall_s / STALL_LOOKS_COUNT
        self._settings.sweep.hasten(self.due_s)

    def cut(self) -> None:
        """End it with what was written so far."""
        if self.transport is not None:
            self.transport.close()
            self._watch_queue()  # it closes when that was taken

    def close(self) -> None:
        """End it after the answer that is due; at once if none is."""
        self._closes = True
        if self.is_idle and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()

    def _probe(self, exchange: Asked) -> None:
        """Send what only a client refuses that left; the transport then tells of the end."""
        transport = self.transport
        if transport is None or exchange.is_over:
            return
        if not exchange.head.is_http_11:
            if self._probes_count:
                transport.close()
            pause_s = OLD_CLIENT_S
        else:
            if not exchange.has_begun:
                transport.write(CONTINUE)
            pause_s = PROBES_AFTER_S[min(self._probes_count, len(PROBES_AFTER_S) - 1)]
        self._probes_count += 1
        self.due_s = self._loop.time() + pause_s
        self._settings.sweep.hasten(self.due_s)

    # --- requests of others --------------------------------------------------------------------------------------

    def _lend(self, head: RequestHead, raw: bytes) -> None:
        """Have another protocol answer a request; what comes after it stays here."""
        assert self.transport is not None
        self._lent = Lent(self, self.transport, head, self._settings.router.borrower())
        rest, self._buffer = self._buffer, b""
        self._buffer = self._lent.begin(raw, rest)

    def returned(self, *, stays: bool) -> None:
        """Hear that a lent request was answered; without `stays` its borrower has closed the connection."""
        self._lent = None
        if stays and not self._closes:
            self.answered()
        else:
            self.cut()
