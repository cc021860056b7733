"""Our data on an aiohttp request (its target, its body's counter), and writing its answer within a limit.

A stream advances as fast as its client reads. A client that stops reading would keep its lease, its engine's connection
and the buffered answer for as long as it likes. So a write that waits for it ends after the limit, and the handler with
it. What the system's buffers hold counts as read, some megabytes on a fast network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import structlog
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from yarl import URL

from thunderagent.errors import RequestError
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.exchange import KeptBody
from thunderagent.proxy.wire.headers import REQUEST_ID

log = structlog.get_logger("thunderagent.stall")

STALL_LIMIT_S = web.AppKey("stall_limit_s", float)
"""Key of the limit in the application."""

NEVER_WAITS_BYTES = 16 * 1024
"""An asyncio transport asks writers to wait above 64 KiB, until it is down to this."""

KEPT_BODY = web.RequestKey("kept_body", KeptBody)
"""Key of a request's body counter, if the body did not come with its head."""

TARGET = web.RequestKey("target", object)
"""Key of a request's target, or of the error that it has none."""


def with_target(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Return what makes a request from its head as `make` does, with its target, and with the URL for routing by that.

    A refused target is routed nowhere in particular: whatever handles it raises the error.
    """

    def make_request(message: RawRequestMessage, payload: StreamReader, *others: Any) -> web.BaseRequest:
        target: Target | RequestError
        try:
            target = Target.parse(message.path, message.headers.get("Host", ""))
        except RequestError as error:
            target = error
            message = message._replace(url=URL.build(path="/", encoded=True))
        else:
            if target.path + target.query != message.path:
                url = URL.build(path=target.path, query_string=target.query[1:], encoded=True)
                message = message._replace(url=url)
        request = make(message, payload, *others)
        request[TARGET] = target
        return request

    return make_request


def target_of(request: web.BaseRequest) -> Target:
    """Return a request's target. Raises `RequestError` if it was refused."""
    target = request[TARGET]
    if isinstance(target, RequestError):
        raise RequestError(target.message)
    assert isinstance(target, Target)
    return target


def told_path(request: web.BaseRequest) -> str:
    """Return the path of a request for people to read, in messages, logs and spans."""
    target = request[TARGET]
    return unquote(target.path) if isinstance(target, Target) else ""


def mark(response: web.StreamResponse) -> None:
    """Add the request's id to an answer whose head was not sent yet."""
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = REQUEST_ID.get()


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """Send the head of an answer that its handler writes piece by piece."""
    mark(response)
    await response.prepare(request)


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write a piece of an answer. Raises `ConnectionError` if the client left, or read nothing for too long."""
    transport = request.transport
    if transport is None or transport.get_write_buffer_size() + len(data) <= NEVER_WAITS_BYTES:
        await response.write(data)  # a timer would cost as much
    else:
        await _within_limit(request, response.write(data))


async def write_eof(request: web.Request, response: web.StreamResponse) -> None:
    """End an answer. Raises like `write`."""
    await _within_limit(request, response.write_eof())


async def _within_limit(request: web.Request, writing: Awaitable[None]) -> None:
    limit_s = request.app.get(STALL_LIMIT_S)
    try:
        async with asyncio.timeout(limit_s):
            await writing
    except TimeoutError:
        log.warning("client_stalled", path=told_path(request), limit_s=limit_s, request_id=REQUEST_ID.get())
        if request.transport is not None:
            request.transport.abort()  # closing it would wait for the client to read
        raise ConnectionResetError("the client read nothing of its answer for too long") from None
