"""Our own stream of server-sent events, open for as long as its reader stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from thunderagent.proxy.wire.aiohttp_request import begin, write, write_eof

HEARTBEAT_S = 15.0
"""How often a silent stream sends a comment, so that no intermediary takes it for dead."""


async def stream_events(
    request: web.Request,
    next_events: Callable[[], Awaitable[bytes | None]],
    *,
    first: bytes = b"",
    heartbeat_s: float = HEARTBEAT_S,
) -> web.StreamResponse:
    """Answer with `first` and then with the results of `next_events`, until that is None or the reader leaves.

    Waiting for `next_events` is cancelled and restarted for a heartbeat: it must lose nothing by that.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would buffer them
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
