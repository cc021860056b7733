"""The HTTP server: its connections, aiohttp's part of them, and logging.

A connection is ours, and lent to aiohttp for each request that is not a turn. There aiohttp reads the target as we do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from thunderagent.errors import RequestError
from thunderagent.proxy.wire.aiohttp_request import with_target
from thunderagent.proxy.wire.errors import plain_answer
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.http11.lent import Borrower, Lent
from thunderagent.proxy.wire.http11.limits import Sweep
from thunderagent.proxy.wire.http11.server import Connection, Handler, Settings

log = structlog.get_logger("thunderagent.http")

HandlerOf = Callable[[RequestHead], Handler | None]


def all_lent(_: RequestHead) -> Handler | None:
    """Lend every request to aiohttp."""
    return None


class Server(web.Server):
    """Creates our connection for each client, and lends it to aiohttp for what is not ours."""

    def __init__(self, server: web.Server, handler_of: HandlerOf, stall_s: float, **options: Any) -> None:
        """Replace `server`, as an `AppRunner` created it with `options`."""
        super().__init__(
            server.request_handler,
            request_factory=with_target(server.request_factory),
            handler_cancellation=server.handler_cancellation,
        )
        self.handler = handler_of
        loop = asyncio.get_running_loop()
        self.borrower: Callable[[], Borrower] = partial(_Borrower, self, loop=loop, **options)
        """Returns the protocol for one aiohttp request."""
        sweep = Sweep(loop)
        self.settings = Settings(self, sweep, idle_s=options.get("keepalive_timeout", 75.0), stall_s=stall_s)

    def __call__(self) -> Connection:  # type: ignore[override]
        """Return the protocol of a new connection."""
        return Connection(self.settings)

    def leave(self) -> None:
        """Move clients elsewhere: each answer from now on announces that it is its connection's last.

        Idle connections stay, so that no request meets a closing one.
        """
        self.settings.is_leaving = True

    def close_idle(self) -> None:
        """Close idle connections, and the rest after the pending answers. New connections are accepted."""
        self.settings.is_leaving = self.settings.is_closing = True
        for connection in list(self.settings.connections):
            connection.close()

    def pre_shutdown(self) -> None:
        """Close idle connections, and the rest after the pending answers."""
        super().pre_shutdown()
        self.close_idle()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        """Let answers end within the timeout, and close all connections."""
        try:
            async with asyncio.timeout(timeout):
                await super().shutdown(timeout)
                await self.settings.all_closed()
        except TimeoutError:
            pass
        for connection in list(self.settings.connections):
            connection.close(at_once=True)


class Runner(web.AppRunner):
    """Runs an application on our servers."""

    def __init__(
        self, app: web.Application, *, handler_of: HandlerOf = all_lent, stall_s: float = 120.0, **options: Any
    ) -> None:
        """Run `app`, and beside it what `handler_of` claims; the other options are aiohttp's."""
        super().__init__(app, access_log=None, logger=server_logger(), **options)
        self._handler_of = handler_of
        self._stall_s = stall_s

    async def _make_server(self) -> web.Server:
        own = ("handler_cancellation", "access_log_class")
        options = {name: value for name, value in self._kwargs.items() if name not in own}
        return Server(await super()._make_server(), self._handler_of, self._stall_s, **options)


class _Borrower(RequestHandler):
    """A client's connection as aiohttp sees it, for one request."""

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Return the connection with the last byte of an answer."""
        if isinstance(self._manager, Server) and self._manager.settings.is_leaving:
            resp.force_close()
        response, has_left = await super().finish_response(request, resp, start_time)
        if isinstance(self.transport, Lent):
            self.transport.answered(keeps_alive=bool(response.keep_alive) and not has_left)
        return response, has_left

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Report what aiohttp cannot read in our API's format, not in its own, which repeats the input."""
        response = super().handle_error(request, status, exc, message)
        if status < HTTPStatus.INTERNAL_SERVER_ERROR and isinstance(response, web.Response):
            told = plain_answer(status, RequestError.code, "the request, or the URL in it, is not HTTP", None)
            response.headers.update(told.headers)
            response.body = told.body
        return response


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):  # its text repeats the invalid line
            log.info("request_is_not_http", why=type(error).__name__)
        else:
            log.error("http_server_error", what=record.getMessage(), exc_info=error)


def server_logger() -> logging.Logger:
    """Return a logger for aiohttp's server, whose own prints tracebacks with bytes of requests."""
    logger = logging.getLogger("thunderagent.http")
    logger.handlers = [_LogHandler()]
    logger.propagate = False
    return logger
