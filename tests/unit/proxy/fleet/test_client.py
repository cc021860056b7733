"""A pool of connections for each replica: counted, and closed at once when the replica goes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from multidict import CIMultiDict

from tests.loopback import on_loopback
from thunderagent.backends import backend_of
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import ReplicaClosedEarlyError, ReplicaRefusedError, ReplicaRemovedError
from thunderagent.proxy.fleet.client import ClientSettings, ReplicaClient
from thunderagent.proxy.wire.http11.client import READ_AHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Server:
    """Answers `/empty` and `/whole` at once, `/slow` when told to; it keeps the last headers."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.asked = asyncio.Event()
        self.ranks: list[str] = []
        self.logins: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.ranks = request.headers.getall("X-data-parallel-rank", [])
        self.logins = request.headers.getall("Authorization", [])
        self.asked.set()
        if request.path == "/slow":
            await self.go_on.wait()
        return web.Response(body=b"x" * {"/empty": 0, "/large": 4 * READ_AHEAD_BYTES}.get(request.path, 100_000))


@asynccontextmanager
async def serving(rank_id: int | None = None) -> AsyncIterator[tuple[Server, ReplicaClient, str]]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    async with on_loopback(app, shutdown_timeout=0) as url:
        try:
            async with ReplicaClient(ClientSettings()) as client:
                client.add(ReplicaEndpoint("r", url, backend_of("vllm"), rank_id))
                yield server, client, url
        finally:
            server.go_on.set()


async def test_requests_are_counted_until_their_answers_are_read_or_closed() -> None:
    async with serving() as (_, client, url):
        for path in ("/empty", "/whole"):
            response = await client.send("r", url, "GET", path, CIMultiDict(), None)
            await client.read("r", response)
            assert client.requests_count("r") == 0
        response = await client.send("r", url, "GET", "/large", CIMultiDict(), None)
        assert client.requests_count("r") == 1, "it cannot be whole: nobody reads it, and so much is not read ahead"
        response.close()
        response.close()
        assert client.requests_count("r") == 0
        assert client.requests_count("nobody") == 0


async def test_a_request_that_fails_or_is_cancelled_counts_no_longer() -> None:
    async with serving() as (server, client, url):
        with pytest.raises(ReplicaRefusedError):
            await client.send("r", "http://127.0.0.1:1", "GET", "/", CIMultiDict(), None)
        assert client.requests_count("r") == 0
        task = asyncio.create_task(client.send("r", url, "GET", "/slow", CIMultiDict(), None))
        await server.asked.wait()
        assert client.requests_count("r") == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.requests_count("r") == 0


async def test_a_removed_replicas_requests_fail_at_once() -> None:
    """Requests that wait for an answer, and later ones, fail; from the removal on nothing is sent any more."""
    async with serving() as (server, client, url):
        waiting = asyncio.create_task(client.send("r", url, "GET", "/slow", CIMultiDict(), None))
        await server.asked.wait()
        async with asyncio.timeout(2):
            await client.remove("r")
            with pytest.raises(ReplicaClosedEarlyError):
                await waiting
        with pytest.raises(ReplicaRemovedError, match="replica r was removed"):
            await client.send("r", url, "GET", "/whole", CIMultiDict(), None)
        await client.remove("r")


async def test_a_rank_is_named_in_place_of_what_the_client_sent() -> None:
    """The headers that the caller uses next stay as they are."""
    async with serving(rank_id=3) as (server, client, url):
        headers = CIMultiDict([("X-Data-Parallel-Rank", "0"), ("x-data-parallel-rank", "1"), ("A", "b")])
        response = await client.send("r", url, "GET", "/whole", headers, None)
        await client.read("r", response)
        assert server.ranks == ["3"]
        assert headers.getall("X-data-parallel-rank") == ["0", "1"]


async def test_a_login_in_a_url_takes_the_place_of_the_client_s_there_alone() -> None:
    """If the request is retried on another replica, that gets what the client sent."""
    async with serving() as (server, client, url):
        headers = CIMultiDict([("Authorization", "Bearer of-the-client")])
        for base_url, sent in (
            (url.replace("://", "://name:word@"), "Basic bmFtZTp3b3Jk"),
            (url, "Bearer of-the-client"),
        ):
            response = await client.send("r", base_url, "GET", "/whole", headers, None)
            await client.read("r", response)
            assert server.logins == [sent]
