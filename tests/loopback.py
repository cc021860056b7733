"""Serve an aiohttp application to a test, and find ports for servers that must be told one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from thunderagent.provision.base import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def on_loopback(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """Serve on a free port during the block; yield the URL. The options are those of aiohttp's runner."""
    runner = web.AppRunner(app, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


def free_ports(count: int) -> list[int]:
    """Return different ports that nobody listens on, and that no test beside this one gets before its server starts."""
    ports: dict[int, None] = {}
    while len(ports) < count:
        ports[free_port()] = None
    return list(ports)
