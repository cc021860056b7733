"""The admin port: on every address of the host, and on no data port."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from thunderagent.config import ServeConfig
from thunderagent.errors import NotFoundError
from thunderagent.proxy.app import FRONT, Front
from thunderagent.proxy.gate.admin_port import AdminPort
from thunderagent.proxy.wire.aiohttp_server import all_lent
from thunderagent.serving.listening import LISTENER, listening

TWO_ADDRESSES = [
    (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, name, ("127.0.0.1", 0)) for name in ("one", "other")
]
"""Two sockets for a name, each with a free port; a machine may have no IPv6."""


async def test_a_host_with_two_addresses_serves_admin_routes_on_no_data_port(monkeypatch: pytest.MonkeyPatch) -> None:
    admin_port = AdminPort()

    async def handle(request: web.Request) -> web.Response:
        try:
            admin_port.check(request.transport, request.path)
        except NotFoundError:
            return web.Response(text="data")
        return web.Response(text="admin")

    async def resolve(*_: Any, **__: Any) -> Any:
        return TWO_ADDRESSES

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", resolve)
    app = web.Application()
    app.router.add_get("/", handle)
    app[FRONT] = cast("Front", SimpleNamespace(handler_of=all_lent))
    config = ServeConfig.load(host="localhost", port=0, admin_port=0)
    async with listening(app, config, None, admin_port) as url, aiohttp.ClientSession() as client:
        assert urlsplit(url).port == app[LISTENER].addresses[0][1]
        said = []
        for _, port in app[LISTENER].addresses:
            async with client.get(f"http://127.0.0.1:{port}/") as answer:
                said.append(await answer.text())
    assert said == ["data", "data", "admin", "admin"]
