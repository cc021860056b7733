"""The HTTP server under us: which connections it makes, what of them is aiohttp's, and what that logs.

A connection is ours, and lent to aiohttp for each request that is no turn. Where it is, aiohttp reads the target as we
do, and answers a client that half-closes.

aiohttp takes the end of what a client sends for the end of the client. It may be the end of its requests alone, and
then it waits for its answer (RFC 9112, 9.6). The two look the same until something is sent: a closed peer refuses it.
So such a client is sent an interim answer now and then, which means nothing and which clients pass over (RFC 9110,
15.2); where one is refused the client has left, and its turn ends as ever. HTTP/1.0 knows no interim answers, nor may
one follow a head. There the client stays for a moment only, or until what it reads is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from thunderagent.proxy.wire.aiohttp_request import keep_target, routed
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.http11.lent import Borrower, Lent
from thunderagent.proxy.wire.http11.limits import Sweep
from thunderagent.proxy.wire.http11.server import Connection, Handler, Settings

log = structlog.get_logger("thunderagent.http")

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBES_AFTER_S = (0.0, 0.02, 0.1, 0.5, 2.0)
"""A client that sends nothing more is asked at once whether it is there, and again after each of these times; from the
last on, always after that. The second one is refused by a client that left, if it was near enough to hear the first."""

OLD_CLIENT_S = 1.0
"""For an answer to a client of HTTP/1.0 that sends nothing more."""


HandlerOf = Callable[[RequestHead], Handler | None]


def all_lent(_: RequestHead) -> Handler | None:
    """Say of every request that it is aiohttp's."""
    return None


class Server(web.Server):
    """Makes a connection of ours for each client, and lends it to aiohttp for what is not ours."""

    def __init__(self, server: web.Server, handler_of: HandlerOf, stall_s: float, **options: Any) -> None:
        """Take the place of `server`, as an `AppRunner` made it with `options`."""
        super().__init__(
            server.request_handler,
            request_factory=_with_target(server.request_factory),
            handler_cancellation=server.handler_cancellation,
        )
        self._options = options
        self.handler = handler_of
        sweep = Sweep(asyncio.get_running_loop())
        self._settings = Settings(self, sweep, idle_s=options["keepalive_timeout"], stall_s=stall_s)

    def __call__(self) -> Connection:  # type: ignore[override]
        """Return the protocol of a new connection."""
        return Connection(self._settings)

    def borrower(self) -> Borrower:
        """Return the protocol of one request of aiohttp's."""
        return _Borrower(self, loop=asyncio.get_running_loop(), **self._options)

    def pre_shutdown(self) -> None:
        """Close what is idle, and the rest after the answers that are due."""
        super().pre_shutdown()
        self._settings.is_closing = True
        for connection in list(self._settings.connections):
            connection.close()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        """Let answers end for so long, and close all connections."""
        try:
            async with asyncio.timeout(timeout):
                await super().shutdown(timeout)
                await self._settings.all_closed()
        except TimeoutError:
            pass
        for connection in list(self._settings.connections):
            connection.abort()


def _with_target(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    def make_request(message: RawRequestMessage, payload: StreamReader, *others: Any) -> web.BaseRequest:
        message, target = routed(message)
        request = make(message, payload, *others)
        keep_target(request, target)
        return request

    return make_request


class Runner(web.AppRunner):
    """Runs an application on servers of ours."""

    def __init__(
        self, app: web.Application, *, handler_of: HandlerOf = all_lent, stall_s: float = 120.0, **options: Any
    ) -> None:
        """Run `app`, and what `handler_of` says is ours beside it; the other options are aiohttp's."""
        super().__init__(app, access_log=None, logger=server_logger(), **options)
        self._handler_of = handler_of
        self._stall_s = stall_s

    async def _make_server(self) -> web.Server:
        own = ("handler_cancellation", "access_log_class")
        options = {name: value for name, value in self._kwargs.items() if name not in own}
        return Server(await super()._make_server(), self._handler_of, self._stall_s, **options)


class _Borrower(RequestHandler):
    """A client's connection as aiohttp has it for one request; it answers also where its client sends nothing more."""

    __slots__ = ("_probe_timer",)

    def __init__(self, manager: web.Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self._probe_timer: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a whole request still waits for its answer to begin.

        Who ends in the middle of a body or of an answer has left. TLS has no half of a connection.
        """
        request = self._current_request
        if self._is_idle or self.ssl_context is not None:
            return False
        if request is not None and (not request.content.is_eof() or _has_begun(request)):
            return False
        if len(self._messages) <= (self._waiter is not None):
            self.close()  # after the answer to the last request
        self._probe(0)
        return True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Give the connection back with the last byte of an answer."""
        response, has_left = await super().finish_response(request, resp, start_time)
        if isinstance(self.transport, Lent):
            self.transport.answered(keeps_alive=bool(response.keep_alive) and not has_left)
        return response, has_left

    @property
    def _is_idle(self) -> bool:
        """Whether it waits for a request; if it does not, one is handled, or is about to be."""
        return self._waiter is not None and not self._waiter.done()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the probes with the connection."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def _probe(self, count: int) -> None:
        """Send what only a client refuses that left; the transport then tells of the end."""
        transport, request = self.transport, self._current_request
        if transport is None or transport.is_closing():
            return
        if self._is_idle:
            transport.close()
            return
        if request is not None and request.version < HttpVersion11:
            self._probe_timer = self._loop.call_later(OLD_CLIENT_S, transport.close)
            return
        if request is not None and not _has_begun(request):
            transport.write(PROBE)
        pause_s = PROBES_AFTER_S[min(count, len(PROBES_AFTER_S) - 1)]
        self._probe_timer = self._loop.call_later(pause_s, self._probe, count + 1)


def _has_begun(request: web.BaseRequest) -> bool:
    """Say whether something of a request's answer was sent."""
    writer = request.writer
    return isinstance(writer, StreamWriter) and writer.output_size > 0


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):  # its text repeats the line that is wrong
            log.info("request_is_not_http", why=type(error).__name__)
        else:
            log.error("http_server_error", what=record.getMessage(), exc_info=error)


def server_logger() -> logging.Logger:
    """Return a logger for aiohttp's server, whose own would print tracebacks with bytes of requests."""
    logger = logging.getLogger("thunderagent.http")
    logger.handlers = [_LogHandler()]
    logger.propagate = False
    return logger
