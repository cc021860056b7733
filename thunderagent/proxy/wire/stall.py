"""Writes to clients that take what they are sent; one that takes nothing for too long is cut off.

A stream goes on as fast as its client reads. One that stops reading keeps its lease, its engine's connection and what
was answered for as long as it likes: so a write that waits for it ends after the limit, and the handler with it. What
the system's buffers hold counts as taken, some megabytes on a quick network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import structlog
from aiohttp import web

from thunderagent.proxy.wire.aiohttp_request import told_path
from thunderagent.proxy.wire.request_id import REQUEST_ID

log = structlog.get_logger("thunderagent.stall")

STALL_LIMIT_S = web.AppKey("stall_limit_s", float)
"""Where the application keeps the limit."""

NEVER_WAITS_BYTES = 16 * 1024
"""A transport of asyncio's asks writers to wait above 64 KiB, until it is down to so much."""


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write a piece of an answer. Raises `ConnectionError` if the client left, or took nothing for too long."""
    transport = request.transport
    if transport is None or transport.get_write_buffer_size() + len(data) <= NEVER_WAITS_BYTES:
        await response.write(data)  # a timer would cost as much
    else:
        await _within_limit(request, response.write(data))


async def send_if_large(request: web.Request, response: web.StreamResponse) -> None:
    """Send a whole answer that a client may leave waiting; a small one is the server's to send. Raises like `write`."""
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    if isinstance(body, bytes) and len(body) > NEVER_WAITS_BYTES:
        await response.prepare(request)
        await write_eof(request, response)


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
            request.transport.abort()  # to close it would wait for the client to read
        raise ConnectionResetError("the client read nothing of its answer for too long") from None
