"""A stream of server-sent events of ours, which stays open for as long as its reader does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from thunderagent.proxy.wire.aiohttp_request import begin, write, write_eof

HEARTBEAT_S = 15.0
"""A comment is sent on a silent stream so often, so that nobody between takes it for dead."""


async def stream_events(
    request: web.Request,
    next_events: Callable[[], Awaitable[bytes | None]],
    *,
    first: bytes = b"",
    heartbeat_s: float = HEARTBEAT_S,
) -> web.StreamResponse:
    """Answer with `first` and then with what `next_events` gives, until that is None or the reader leaves.

    Waiting for `next_events` is cancelled and begun again for a heartbeat: it must lose nothing by that.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would collect them
        }
    )
    await begin(request, response)
    if first:
        await write(request, response, first)
    while True:
        try:
            async with asyncio.timeout(heartbeat_s):
                events = await next_events()
        except TimeoutError:
            await write(request, response, b": still here\n\n")
            continue
        if events is None:
            break
        await write(request, response, events)
    await write_eof(request, response)
    return response
