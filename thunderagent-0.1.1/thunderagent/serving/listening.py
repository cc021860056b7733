"""Starting and stopping to listen for clients, in the order that loses no request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, cast

import structlog
from aiohttp import web

from thunderagent.config import ServeConfig
from thunderagent.proxy.app import FRONT
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.wire.aiohttp_server import Runner, Server
from thunderagent.proxy.wire.http11.heads import MAX_HEAD_BYTES
from thunderagent.serving.security import (
    ServerTls,
    is_loopback,
)

log = structlog.get_logger("thunderagent")

LISTENER: web.AppKey[Runner] = web.AppKey("listener", Runner)
"""The application's listener."""
CLOSE_S = 2.0
"""Time for connections to close after the grace period."""


@asynccontextmanager
async def listening(
    app: web.Application,
    config: ServeConfig,
    tls: ServerTls | None,
    admin_port: AdminPort | None = None,
    *,
    shares_port: bool = False,
) -> AsyncIterator[str]:
    """Listen for the length of the block, on a port that other processes may share; yield the URL."""
    runner = Runner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        shutdown_timeout=CLOSE_S,
        stall_s=config.client_stall_limit_s,
        handler_of=app[FRONT].handler_of,
        keepalive_timeout=config.idle_timeout_s,  # aiohttp's name; it counts from a connection's start
    )
    app[LISTENER] = runner
    await runner.setup()
    try:
        site = web.TCPSite(
            runner,
            config.host,
            config.port,
            backlog=4096,
            ssl_context=tls.context if tls is not None else None,
            reuse_port=shares_port or None,
        )
        await site.start()
        data_ports = {address[1] for address in runner.addresses}
        if admin_port is not None:
            await web.TCPSite(
                runner, config.host, config.admin_port or 0, ssl_context=tls.context if tls is not None else None
            ).start()
            # A free port may be the same one on two of the host's addresses: then it stays the data's.
            admin_port.ports = frozenset(address[1] for address in runner.addresses) - data_ports
            log.info("admin_port", ports=sorted(admin_port.ports))
        if not config.has_keys and not is_loopback(config.host):
            log.warning(
                "open_to_the_network", host=config.host, effect="anybody who reaches this port can use the proxy"
            )
        host, port = runner.addresses[0][:2]
        yield f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        await runner.cleanup()


class Leaving(Protocol):
    """Knows whether this process is ready."""

    leaving: bool
    """Whether others should get new turns."""


async def leave(app: web.Application, runtime: Leaving, delay_s: float) -> None:
    """Move clients elsewhere: stop being ready, serve for `delay_s`, then close idle connections.

    Each answer announces that it is its connection's last.

    Without that a client keeps its connection, and removing this process from a load balancer's list has no effect on
    it: its next turn would be refused. New connections are accepted all the time, if only to be refused.
    """
    runtime.leaving = True
    server = cast("Server", app[LISTENER].server)
    server.leave()
    await asyncio.sleep(delay_s)
    server.close_idle()


async def leave_port(app: web.Application) -> None:
    """Accept no further connections, and close idle ones; pending answers go on."""
    runner = app[LISTENER]
    for site in list(runner.sites):
        await site.stop()
    if runner.server is not None:
        runner.server.pre_shutdown()
