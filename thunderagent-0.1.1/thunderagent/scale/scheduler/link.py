"""One websocket of a gateway and its sending task; and how all links together yield to others."""

from __future__ import annotations

import asyncio
from time import perf_counter

from aiohttp import web

from thunderagent.scale.scheduler.gateway import Gateway

GIVE_WAY_S = 0.01
"""How long one iteration of the loop processes gateways' frames, and one frame more."""


class Link:
    """One websocket, and its sending task."""

    def __init__(self, socket: web.WebSocketResponse, gateway: Gateway) -> None:
        self.socket = socket
        self.gateway = gateway
        self.number = gateway.link_number
        self.news = asyncio.Event()
        self.news.set()
        self.sender: asyncio.Task[None]
        self._closing: asyncio.Task[bool] | None = None

    def replaced(self) -> None:
        """End it: its gateway has a later one, or another process uses its gateway's name."""
        self.sender.cancel()
        self._closing = asyncio.create_task(self.socket.close())


class GivesWay:
    """`async with` it for work that many tasks may start at once: it limits the work per loop iteration."""

    def __init__(self) -> None:
        """Start with nothing done."""
        self._spent_s = self._began_s = 0.0

    async def __aenter__(self) -> None:
        """Wait for a loop iteration with little work."""
        while self._spent_s >= GIVE_WAY_S:  # noqa: ASYNC110 - nothing is waited for: others get their turn
            await asyncio.sleep(0)
        self._began_s = perf_counter()

    async def __aexit__(self, *_: object) -> None:
        """Count the work, which must not await in between, and yield."""
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._begin_anew)
        self._spent_s += perf_counter() - self._began_s
        await asyncio.sleep(0)  # awaiting what has already arrived does not yield

    def _begin_anew(self) -> None:
        self._spent_s = 0.0
