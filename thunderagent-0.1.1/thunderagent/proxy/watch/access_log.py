"""A log line for each request of any kind: its caller and its result. Off by default: turns have their own lines."""

from __future__ import annotations

from time import monotonic
from urllib.parse import unquote

import structlog
from aiohttp import web

from thunderagent.proxy.gate.bodies import Visitor
from thunderagent.proxy.gate.guard import Handler
from thunderagent.proxy.gate.keys import caller_key
from thunderagent.proxy.wire.aiohttp_request import told_path
from thunderagent.proxy.wire.headers import REQUEST_ID
from thunderagent.proxy.wire.http11.server import Asked
from thunderagent.proxy.wire.http11.server import Handler as TurnHandler

log = structlog.get_logger("thunderagent.access")

CLIENT_LEFT = 499
"""Used as status if the client left before there was one."""


def logged(handler: Handler) -> Handler:
    """Wrap the handler of a route, including its errors, so that each request is logged."""

    async def handle(request: web.Request) -> web.StreamResponse:
        began_s = monotonic()
        status, sent_bytes = CLIENT_LEFT, 0
        try:
            response = await handler(request)
            status, sent_bytes = response.status, response.content_length or response.body_length
            return response
        finally:
            _write(request, told_path(request), request.content_length, began_s, status, sent_bytes)

    return handle


def logged_turn(handler: TurnHandler) -> TurnHandler:
    """Wrap the handler of turns that our own server read, so that each is logged."""

    async def handle(asked: Asked) -> None:
        began_s = monotonic()
        try:
            await handler(asked)
        finally:
            length_bytes = asked.head.length if asked.head.length >= 0 else None
            path = unquote(asked.target.path)
            _write(asked, path, length_bytes, began_s, asked.status or CLIENT_LEFT, asked.sent_bytes)

    return handle


def _write(
    request: Visitor, path: str, request_bytes: int | None, began_s: float, status: int, sent_bytes: int
) -> None:
    key = caller_key()
    log.info(
        "request",
        method=request.method,
        path=path,
        status=status,
        duration_s=round(monotonic() - began_s, 6),
        request_bytes=request_bytes,
        key=key.name if key is not None else None,
        remote=request.remote,
        sent_bytes=sent_bytes,
        request_id=REQUEST_ID.get(),
    )
