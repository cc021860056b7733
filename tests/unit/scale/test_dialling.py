"""The links of a gateway to its schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from thunderagent.scale import messages
from thunderagent.scale.gateway.dialling import Dialling
from thunderagent.scale.gateway.remote import RemoteRuntime


async def test_a_frame_that_cannot_be_taken_ends_its_link_and_no_more() -> None:
    """The gateway continues, and dials again."""
    await _is_dialled_again(1, 2)


async def test_a_scheduler_that_does_not_send_its_epoch_is_dialled_again() -> None:
    """It hangs, or its epoch would come later, and might be over: it is not followed, and that is logged."""
    async with asyncio.timeout(10):
        with capture_logs() as logs:
            await _is_dialled_again(epoch_limit_s=0.05)
    assert "no epoch" in next(each["why"] for each in logs if each["event"] == "link_given_up")


async def test_a_scheduler_that_takes_no_link_is_named_once_with_the_reason() -> None:
    """A refused gateway logs it: otherwise it would wait silently. A standby's refusal does not count."""
    asked_count, often = 0, asyncio.Event()

    async def refuse(_request: web.Request) -> web.Response:
        nonlocal asked_count
        asked_count += 1
        if asked_count == 6:
            often.set()
        return web.Response(status=421 if asked_count > 2 else 503)

    with capture_logs() as logs:
        await _dials(refuse, often)
    (said,) = [entry for entry in logs if entry["event"] == "scheduler_refuses"]
    assert (said["log_level"], said["status"]) == ("warning", 421)
    assert "reached_at" in said["why"]


async def _is_dialled_again(*numbers: int, epoch_limit_s: float = 5.0) -> None:
    """Let a scheduler send frames of these numbers, and hang; wait until the gateway dials a second time."""
    links_count, again = 0, asyncio.Event()

    async def lead(request: web.Request) -> web.WebSocketResponse:
        nonlocal links_count
        links_count += 1
        if links_count == 2:
            again.set()
        socket = web.WebSocketResponse(protocols=(messages.PROTOCOL,))
        await socket.prepare(request)
        for number in numbers:
            await socket.send_bytes(messages.encode(messages.Frame(number, 0, 1, ())))
        await socket.receive()
        return socket

    await _dials(lead, again, epoch_limit_s=epoch_limit_s)


async def _dials(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], until: asyncio.Event, *, epoch_limit_s: float = 5.0
) -> None:
    """Let a gateway dial a scheduler that answers this way, until something was seen."""

    def take(_frame: messages.Frame) -> None:
        raise KeyError("a turn that is not there")

    app = web.Application()
    app.router.add_get(messages.PATH, answer)
    runtime: Any = SimpleNamespace(
        turns=SimpleNamespace(epoch=0, has_news=False),
        news=asyncio.Event(),
        leases_count=0,
        take=take,
        linked=lambda: None,
        unlinked=lambda: None,
        look=lambda: None,
    )
    async with TestServer(app, host="127.0.0.1") as server, asyncio.TaskGroup() as group:
        urls = (str(server.make_url("")),)
        over = cast("RemoteRuntime", runtime)
        dialling = Dialling(over, urls, headers={}, ssl_context=None, epoch_limit_s=epoch_limit_s)
        running = group.create_task(dialling.run())
        await until.wait()
        running.cancel()
