"""One websocket of a gateway, and who sends by it; and how all of them together give way to others."""

from __future__ import annotations

import asyncio
from time import perf_counter

from aiohttp import web

from thunderagent.scale.scheduler.gateway import Gateway

GIVE_WAY_S = 0.01
"""One turn of the loop takes in no more of what gateways tell, once it has taken so long, and one frame."""


class Link:
    """One websocket, and who sends by it."""

    def __init__(self, socket: web.WebSocketResponse, gateway: Gateway) -> None:
        self.socket = socket
        self.gateway = gateway
        self.number = gateway.link_number
        self.news = asyncio.Event()
        self.news.set()
        self.sender: asyncio.Task[None]
        self._closing: asyncio.Task[bool] | None = None

    def replaced(self) -> None:
        """End it: its gateway has a later one, or another process goes by its gateway's name."""
        self.sender.cancel()
        self._closing = asyncio.create_task(self.socket.close())


class GivesWay:
    """`async with` it do what many tasks may want at once: it takes little of one turn of the loop."""

    def __init__(self) -> None:
        """Begin with nothing done."""
        self._spent_s = self._began_s = 0.0

    async def __aenter__(self) -> None:
        """Wait for a turn of the loop in which not much was done."""
        while self._spent_s >= GIVE_WAY_S:  # noqa: ASYNC110 - nothing is waited for: others get their turn
            await asyncio.sleep(0)
        self._began_s = perf_counter()

    async def __aexit__(self, *_: object) -> None:
        """Count what was done, without awaiting in between, and give way."""
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._begin_anew)
        self._spent_s += perf_counter() - self._began_s
        await asyncio.sleep(0)  # who awaits what has come already does not give way

    def _begin_anew(self) -> None:
        self._spent_s = 0.0
