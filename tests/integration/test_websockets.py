"""Websockets: with a lease, byte for byte both ways, at the speed of the slower side, until one side closes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from tests.integration.support import DEADLINE_S, exposition, get, running_proxy, serve, until
from tests.integration.test_bounds import BLUE, KEYS, RED
from thunderagent.proxy.wire.websockets import GOING_AWAY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REALTIME = "/v1/realtime"


class Engine:
    """A vLLM for the poller, which echoes everything on its websockets."""

    def __init__(self) -> None:
        self.url = ""
        self.sockets: list[web.WebSocketResponse] = []
        self.requests: list[web.Request] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.closed_count = 0

    async def talk(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if request.query.get("model") == "none":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        socket = web.WebSocketResponse(max_msg_size=2**26)
        await socket.prepare(request)
        self.sockets.append(socket)
        await self.reads.wait()
        async for message in socket:
            if message.data == "bye":
                await socket.close(code=4000, message=b"bye")
            elif message.data == "die":
                assert request.transport is not None
                request.transport.abort()
            elif message.data == "half":
                assert request.transport is not None
                request.transport.write(b"\x82\x7e\x01\x00" + b"x" * 3)  # 3 of 256 bytes
            else:
                await socket.send_bytes(message.data)
        self.closed_count += 1
        return socket


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    found = Engine()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=exposition(1_000_000))

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", healthy), web.get("/metrics", metrics), web.get(REALTIME, found.talk)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.url = "http://{}:{}".format(*runner.addresses[0])
        yield found
    finally:
        await runner.cleanup()


@asynccontextmanager
async def talking(url: str, path: str = REALTIME, **options: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        asyncio.timeout(DEADLINE_S),
        aiohttp.ClientSession() as session,
        session.ws_connect(url + path, max_msg_size=2**26, **options) as socket,
    ):
        yield socket


async def test_messages_go_both_ways_under_a_lease() -> None:
    """Messages are small and large; the lease ends when the client closes, and no program was opened."""
    async with engine() as behind, running_proxy(behind.url) as proxy:
        async with talking(proxy.url, REALTIME + "?model=m", headers={"X-Program-ID": "a", "X-Own": "1"}) as socket:
            await until(lambda: proxy.runtime.leases_count == 1)
            for data in (b"", b"hi", b"x" * 3_000_000):
                await socket.send_bytes(data)
                assert await socket.receive_bytes() == data
            sent = behind.requests[0]
            assert (sent.query_string, sent.headers["X-Own"]) == ("model=m", "1")
        await until(lambda: behind.closed_count == 1)
        await proxy.nothing_left()
        assert len(proxy.runtime.scheduler.programs) == 0


async def test_close_by_one_side_closes_the_other() -> None:
    async with engine() as behind, running_proxy(behind.url) as proxy:
        async with talking(proxy.url) as socket:
            await socket.send_str("bye")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
            assert socket.close_code == 4000
        async with talking(proxy.url) as socket:
            await socket.send_str("die")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSED
            assert socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        async with talking(proxy.url) as socket:
            await until(lambda: len(behind.sockets) == 3)
            assert socket._response.connection is not None
            assert socket._response.connection.transport is not None
            socket._response.connection.transport.abort()
            await until(lambda: behind.closed_count == 3)
        await proxy.nothing_left()


async def test_fast_sender_waits_for_its_reader() -> None:
    """Messages on their way take buffers of megabytes, not memory without end."""
    async with engine() as behind, running_proxy(behind.url) as proxy:
        behind.reads.clear()
        async with talking(proxy.url) as socket:
            sent_count = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while sent_count < 200:
                        await socket.send_bytes(b"x" * 1_000_000)
                        sent_count += 1
            assert sent_count < 100
            behind.reads.set()
            for _ in range(sent_count):
                assert len(await socket.receive_bytes()) == 1_000_000
        await proxy.nothing_left()


async def test_a_refusal_is_the_engines_and_other_paths_change_no_protocol() -> None:
    async with engine() as behind, running_proxy(behind.url) as proxy:
        for path, status in (
            (REALTIME + "?model=none", 404),
            ("/version", 404),
            ("/v1/chat/completions", 426),
            ("/v1/responses", 426),
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with talking(proxy.url, path):
                    raise AssertionError(path)
            assert refused.value.status == status
        assert (await get(proxy.url, REALTIME)).status == 400, "no websocket was asked for"
        await proxy.nothing_left()


async def test_keys_and_pages_of_others_are_judged() -> None:
    """A page may open a websocket to any origin, without a preflight."""
    async with engine() as behind:
        async with running_proxy(behind.url, **KEYS) as proxy:
            await _refused(proxy.url, 401)
            async with talking(proxy.url, headers=[RED]) as socket:
                await socket.send_bytes(b"hi")
                assert await socket.receive_bytes() == b"hi"
        async with running_proxy(behind.url, cors_origins=("http://good.test",)) as proxy:
            await _refused(proxy.url, 403, origin="http://evil.test")
            for origin in ("http://good.test", proxy.url):
                async with talking(proxy.url, origin=origin) as socket:
                    await socket.send_bytes(b"hi")
                    assert await socket.receive_bytes() == b"hi"


async def _went_away(socket: aiohttp.ClientWebSocketResponse, why: str) -> None:
    message = await socket.receive()
    assert (message.type, message.data, message.extra) == (aiohttp.WSMsgType.CLOSE, GOING_AWAY, why)


async def _refused(url: str, status: int, **options: Any) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with talking(url, **options):
            raise AssertionError("it was let in")
    assert refused.value.status == status


async def test_a_replica_that_drains_keeps_its_websockets_and_one_that_is_removed_does_not() -> None:
    async with engine() as one, engine() as other, running_proxy(one.url, other.url) as proxy:
        async with talking(proxy.url) as socket:
            await until(lambda: one.sockets or other.sockets)
            used = (one if one.sockets else other).url.removeprefix("http://")
            async with aiohttp.ClientSession() as session:
                async with session.delete(f"{proxy.url}/replicas/{used}") as answer:
                    assert answer.status == 202
                await socket.send_bytes(b"hi")
                assert await socket.receive_bytes() == b"hi"
                async with session.delete(f"{proxy.url}/replicas/{used}", params={"force": "1"}) as answer:
                    assert answer.status < 300
            await _went_away(socket, "its replica was removed")
        await proxy.nothing_left()


async def test_a_drain_ends_websockets_when_its_patience_is_over() -> None:
    async with engine() as behind, running_proxy(behind.url, drain_limit_s=0.3) as proxy:
        async with talking(proxy.url) as socket, aiohttp.ClientSession() as session:
            async with session.delete(f"{proxy.url}/replicas/{behind.url.removeprefix('http://')}") as answer:
                assert answer.status == 202
            await _went_away(socket, "its replica was removed")
        await proxy.nothing_left()


async def test_a_shutdown_ends_websockets_after_its_patience() -> None:
    async with engine() as behind, serve("--backends", behind.url, "--grace-s", "3") as process:
        await process.ready()
        async with talking(process.url) as socket:
            process.process.terminate()
            await socket.send_bytes(b"hi")
            assert await socket.receive_bytes() == b"hi"
            await _went_away(socket, "the proxy is shutting down")
        assert await process.exit_status() == 0


async def test_a_websocket_is_open_for_so_long_and_no_longer() -> None:
    async with engine() as behind, running_proxy(behind.url, websocket_limit_s=0.3) as proxy:
        async with talking(proxy.url) as socket:
            await _went_away(socket, "it was open for 0.3 s, and none may be for longer")
        await proxy.nothing_left()
        await until(lambda: behind.closed_count == 1)


async def test_a_websocket_that_is_too_old_in_the_midst_of_a_frame_is_no_failure_of_its_replica() -> None:
    async with engine() as behind, running_proxy(behind.url, websocket_limit_s=2.0) as proxy:
        async with talking(proxy.url) as socket:
            await socket.send_str("half")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSED
            assert socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        await proxy.nothing_left()
        metrics = (await get(proxy.url, "/metrics")).body.decode()
        assert 'thunderagent_turns_total{outcome="failed"} 0.0' in metrics or 'outcome="failed"' not in metrics


async def test_open_websockets_are_bounded() -> None:
    """There is a limit for all together and one for each key; closing one allows another."""
    async with engine() as behind:
        async with running_proxy(behind.url, max_websockets_count=2) as proxy:
            async with talking(proxy.url), talking(proxy.url):
                await _refused(proxy.url, 503)
                metrics = (await get(proxy.url, "/metrics")).body.decode()
                assert "thunderagent_websockets 2.0" in metrics
                assert 'thunderagent_held_refused_total{bound="websockets"} 1.0' in metrics
            await proxy.nothing_left()
            async with talking(proxy.url), talking(proxy.url):
                pass
        async with (
            running_proxy(behind.url, **KEYS, key_max_websockets_count=1) as proxy,
            talking(proxy.url, headers=[RED]),
        ):
            await _refused(proxy.url, 429, headers=[RED])
            async with talking(proxy.url, headers=[BLUE]):
                pass


async def test_an_engine_that_listens_no_more_gives_its_lease_back() -> None:
    """It may keep sending; messages to it block nothing."""
    async with engine() as behind, running_proxy(behind.url, client_stall_limit_s=0.4) as proxy:
        behind.reads.clear()
        async with talking(proxy.url) as socket:
            await until(lambda: proxy.runtime.leases_count == 1)
            with suppress(ConnectionError):
                while True:
                    await socket.send_bytes(b"x" * 1_000_000)
            await proxy.nothing_left()
        behind.reads.set()
