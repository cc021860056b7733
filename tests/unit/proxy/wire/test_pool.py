"""A kept connection: the bytes of a request, and when the connection may serve another."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING

import pytest
import uvloop
from multidict import CIMultiDict

from thunderagent.proxy.wire.failures import ClosedError, SilentError, TotalError, UnreachedError
from thunderagent.proxy.wire.http11.client import Pool
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LIMITS = Limits(connect_s=5, silence_s=5)
LARGE_BODY_BYTES = 512 * 1024
LARGE_BODY = b"x" * (16 * LARGE_BODY_BYTES)


class Server:
    """A server that knows its connections, and treats each as told."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.connections_count = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_count += 1
        try:
            await self.behaviour(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def pool_of(behaviour: Behaviour, *, keepalive_s: float = 4.0) -> AsyncIterator[tuple[Server, Pool]]:
    server = Server(behaviour)
    pause = Pause(asyncio.get_running_loop())
    pool = Pool(Sweep(asyncio.get_running_loop()), pause, keepalive_s=keepalive_s)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield server, pool
        finally:
            await pool.close()


async def ask(
    pool: Pool,
    url: str,
    method: str = "POST",
    *,
    body: bytes | None = b"{}",
    total_s: float = inf,
    silence_s: float = 5,
    may_repeat: bool = False,
) -> bytes:
    limits = Limits(5, silence_s, total_s)
    answer = await pool.request(method, url, "/v1/x", CIMultiDict(), body, limits, may_repeat=may_repeat)
    try:
        content = await answer.read()
        assert await answer.read() == content, "it can be read once more"
        return content
    finally:
        answer.close()


async def heads(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the heads of requests with a body of two bytes or none."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"Content-Length: 2" in head:
            await reader.readexactly(2)
        yield head


def recording(seen: list[bytes]) -> Behaviour:
    """Keep each head, and answer it."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for head in heads(reader):
            seen.append(head)
            writer.write(OK)

    return behaviour


async def test_a_request_says_what_it_was_given_and_no_more() -> None:
    seen: list[bytes] = []
    async with pool_of(recording(seen)) as (server, pool):
        headers = CIMultiDict([("Accept", "a"), ("X-Mine", "ü"), ("accept", "b")])
        answer = await pool.request("POST", server.url + "/under", "/v1/x?y=%20", headers, b"{}", LIMITS)
        assert (answer.status, answer.reason, await answer.read()) == (200, "OK", b"{}")
        for method, body in (("GET", None), ("POST", None), ("DELETE", None)):
            assert await ask(pool, server.url, method, body=body) == b"{}"
        assert await ask(pool, server.url.replace("//", "//a%40b:c@"), "GET", body=None) == b"{}"
        assert server.connections_count == 1, "it was kept"
    host = server.url.removeprefix("http://").encode()
    assert seen[0] == (
        b"POST /under/v1/x?y=%20 HTTP/1.1\r\nHost: " + host + b"\r\nAccept: a\r\nX-Mine: \xc3\xbc\r\naccept: b\r\n"
        b"Content-Length: 2\r\n\r\n"
    )
    assert [b"Content-Length: 0\r\n" in head for head in seen[1:4]] == [False, True, True]
    assert b"Authorization: Basic YUBiOmM=\r\n" in seen[4]  # a@b:c


@pytest.mark.parametrize("path", ["/v1/x#y", "/v1/x y", "/v1/x\r\nA: b", "v1/x", "", "http://h/", "/é"])
async def test_a_path_that_is_not_sent_as_it_stands_is_not_sent(path: str) -> None:
    """The access check saw the whole path; nothing is cut off or rewritten here."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writer.write(OK)

    async with pool_of(behaviour) as (server, pool):
        with pytest.raises(ValueError, match="path of a request"):
            await pool.request("GET", server.url, path, CIMultiDict(), None, LIMITS)
        assert (server.connections_count, pool.requests_count) == (0, 0)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_request_is_sent_again_to_the_same_replica_if_its_kept_connection_dies_before_a_byte(
    method: str,
) -> None:
    """The engine closed it just then, and has not read the request. On a new connection that is a real failure."""
    asked_count = 0

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked_count
        number = server.connections_count
        async for _ in heads(reader):
            asked_count += 1
            if number == 3 or asked_count == 2:
                return
            writer.write(OK)
            if number == 2:
                return  # the pool notices the end before the next request

    async with pool_of(behaviour) as (server, pool):
        body = None if method == "GET" else b"{}"
        for connections_count in (1, 2):
            assert await ask(pool, server.url, method, body=body, may_repeat=True) == b"{}"
            assert server.connections_count == connections_count
        await asyncio.sleep(0.05)
        with pytest.raises(ClosedError):
            await ask(pool, server.url, method, body=body, may_repeat=True)
        assert (asked_count, pool.requests_count) == (4, 0), "a new connection gets no second try"


async def test_a_connection_is_not_kept_once_its_application_failed() -> None:
    """The server closes it after that answer, perhaps just when the next request is sent, which it may not repeat."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writer.write(OK.replace(b"200 OK", b"500 Internal Server Error"))

    async with pool_of(behaviour) as (server, pool):
        for connections_count in (1, 2):
            assert await ask(pool, server.url) == b"{}"
            assert server.connections_count == connections_count


@pytest.mark.parametrize(("may_repeat", "pause_s"), [(False, 0.0), (True, 1.2)])
async def test_request_that_may_have_been_done_is_not_sent_again(may_repeat: bool, pause_s: float) -> None:
    """Cases are a POST that changes something, and a request that the engine had for a while before the end."""
    asked_count = 0

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked_count
        async for _ in heads(reader):
            asked_count += 1
            if asked_count == 2:
                await asyncio.sleep(pause_s)
                return
            writer.write(OK)

    async with pool_of(behaviour) as (server, pool):
        assert await ask(pool, server.url) == b"{}"
        with pytest.raises(ClosedError):
            await ask(pool, server.url, may_repeat=may_repeat)
        assert (asked_count, pool.requests_count) == (2, 0)


async def test_an_engine_that_dies_with_a_request_is_not_one_that_was_never_reached() -> None:
    """The second try finds no server; the first may have been read."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            if listening:
                writer.write(OK)
                listening.clear()
            else:
                return

    listening = {"yes"}
    server = Server(behaviour)
    pause = Pause(asyncio.get_running_loop())
    pool = Pool(Sweep(asyncio.get_running_loop()), pause)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        assert await ask(pool, url) == b"{}"
        listener.close()
        with pytest.raises(ClosedError):
            await ask(pool, url, may_repeat=True)
    await pool.close()


async def test_a_kept_connection_that_dies_in_the_middle_of_an_answer_is_tried_once_only() -> None:
    """`103 Early Hints` came, so the engine has the request."""
    asked_count = 0

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked_count
        async for _ in heads(reader):
            asked_count += 1
            if asked_count == 2:
                writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
                return
            writer.write(OK)

    async with pool_of(behaviour) as (server, pool):
        assert await ask(pool, server.url) == b"{}"
        with pytest.raises(ClosedError):
            await ask(pool, server.url)
        assert (asked_count, server.connections_count) == (2, 1)


async def test_the_newest_idle_connection_is_taken_so_that_the_others_grow_old() -> None:
    """After a burst of three, one request at a time keeps one connection; the other two are closed."""
    open_count, together = 0, asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_count
        open_count += 1
        try:
            async for _ in heads(reader):
                await together.wait()
                writer.write(OK)
        finally:
            open_count -= 1

    async with pool_of(behaviour, keepalive_s=2.0) as (server, pool):
        burst = [asyncio.create_task(ask(pool, server.url)) for _ in range(3)]
        while open_count < 3:
            await asyncio.sleep(0.01)
        together.set()
        await asyncio.gather(*burst)
        async with asyncio.timeout(20):
            while open_count > 1:
                assert await ask(pool, server.url) == b"{}"
                await asyncio.sleep(0.02)
        assert await ask(pool, server.url) == b"{}"
        assert server.connections_count == 3


async def test_unasked_bytes_on_an_idle_connection_are_no_answer() -> None:
    """Otherwise each later answer on it would go to the wrong client."""
    came = asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = server.connections_count
        async for _ in heads(reader):
            writer.write(OK.replace(b"{}", b"%02d" % number))
            await asyncio.sleep(0.05)
            writer.write(OK.replace(b"{}", b"no"))
            await writer.drain()
            came.set()

    async with pool_of(behaviour) as (server, pool):
        assert await ask(pool, server.url) == b"01"
        await came.wait()
        await asyncio.sleep(0.05)
        assert await ask(pool, server.url) == b"02"


@asynccontextmanager
async def two_kept() -> AsyncIterator[tuple[Server, Pool, list[bytes]]]:
    """A pool that keeps two connections, after two requests at once, and the heads that the server has seen."""
    seen: list[bytes] = []
    async with pool_of(recording(seen)) as (server, pool):
        assert await asyncio.gather(ask(pool, server.url), ask(pool, server.url)) == [b"{}", b"{}"]
        yield server, pool, seen


async def test_a_request_that_is_not_alone_is_not_sent_once_it_is_given_up() -> None:
    """It is sent after what else is ready, and the pool is closed before."""
    async with two_kept() as (server, pool, seen):
        asking = [asyncio.create_task(ask(pool, server.url)) for _ in range(2)]
        await asyncio.sleep(0)
        assert pool.requests_count == 2
        await pool.close()
        assert [type(error) for error in await asyncio.gather(*asking, return_exceptions=True)] == [ClosedError] * 2
        assert (len(seen), server.connections_count) == (2, 2)


async def test_a_connection_that_is_made_after_the_pool_was_closed_is_closed_at_once() -> None:
    """Otherwise nobody would: its request would be answered, and then it would stay open."""
    ended = asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        ended.set()

    async with pool_of(behaviour) as (server, pool):
        asking = asyncio.create_task(ask(pool, server.url))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(UnreachedError, match="the pool is closed"):
            await asking
        assert pool.requests_count == 0
        async with asyncio.timeout(5):
            await ended.wait()


def test_caller_that_leaves_during_connect_leaves_nothing_behind() -> None:
    """On the loop of `thunderagent serve`, which closes such a connection without telling it so."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        sweep, server = Sweep(loop), Server(behaviour)
        pool = Pool(sweep, Pause(loop))
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            for passes_count in range(12):
                asking = asyncio.create_task(ask(pool, server.url))
                for _ in range(passes_count):
                    await asyncio.sleep(0)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await pool.close()
        assert (len(sweep), pool.requests_count) == (0, 0)

    uvloop.run(main())


async def test_bytes_before_a_request_are_not_its_answer() -> None:
    """The connection is dropped, and the request goes out on another one: the server never saw it."""
    async with two_kept() as (server, pool, _):
        asking = [asyncio.create_task(ask(pool, server.url)) for _ in range(2)]
        await asyncio.sleep(0)
        for connection in list(pool._connections):
            connection.data_received(OK.replace(b"{}", b"[]"))
        assert await asyncio.gather(*asking) == [b"{}", b"{}"]
        assert server.connections_count == 4


async def test_a_client_that_leaves_before_its_request_is_sent_costs_the_server_nothing() -> None:
    async with two_kept() as (server, pool, seen):
        asking = [asyncio.create_task(ask(pool, server.url)) for _ in range(2)]
        await asyncio.sleep(0)
        asking[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking[0]
        assert await asking[1] == b"{}"
        assert (len(seen), pool.requests_count) == (3, 0)


async def test_an_answer_that_comes_as_its_client_leaves_takes_nobody_else_s_connection() -> None:
    """Otherwise the next request went out on that connection, and was given up with the one whose client left."""
    sent = asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            sent.set()
            if server.connections_count > 1:
                writer.write(OK)

    async with pool_of(behaviour) as (server, pool):
        leaving = asyncio.create_task(ask(pool, server.url))
        await sent.wait()
        (connection,) = pool._connections
        next_one = asyncio.create_task(ask(pool, server.url))
        leaving.cancel()
        connection.data_received(OK)  # the next one runs now, and then the one that left
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await next_one == b"{}"
        assert pool.requests_count == 0


async def test_an_answer_that_follows_a_chunked_one_at_once_is_no_part_of_it() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + OK)

    async with pool_of(behaviour) as (server, pool):
        for number in range(2):
            assert await ask(pool, server.url) == b"{}"
            assert server.connections_count == number + 1, "the connection is not used again"


async def test_a_connection_that_is_idle_for_too_long_is_closed_and_gets_no_request() -> None:
    ended = asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for _ in heads(reader):
                writer.write(OK)
        finally:
            ended.set()

    async with pool_of(behaviour, keepalive_s=2.0) as (server, pool):
        for pause_s, connections_count in ((0.0, 1), (0.05, 1), (3.0, 2)):
            await asyncio.sleep(pause_s)
            assert await ask(pool, server.url) == b"{}"
            assert server.connections_count == connections_count
        ended.clear()
        async with asyncio.timeout(5):
            await ended.wait()
        assert await ask(pool, server.url) == b"{}"
        assert server.connections_count == 3


async def test_a_connection_that_its_server_closed_meanwhile_gets_no_request() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heads(reader).__anext__()
        writer.write(OK)

    async with pool_of(behaviour) as (server, pool):
        for connections_count in (1, 2, 3):
            assert await ask(pool, server.url) == b"{}"
            assert server.connections_count == connections_count
            await asyncio.sleep(0.05)


async def test_silence_counts_from_the_last_byte_and_only_while_something_is_awaited() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            for piece in (OK[:10], OK[10:20], OK[20:-1], OK[-1:]):
                await asyncio.sleep(0.6)
                writer.write(piece)

    async with pool_of(behaviour) as (server, pool):
        for pause_s in (0.0, 2.1):  # each takes longer in all than it may be silent; so does the time in between
            await asyncio.sleep(pause_s)
            assert await ask(pool, server.url, silence_s=2.0) == b"{}"
        assert server.connections_count == 1


async def test_each_request_has_the_limit_for_silence_that_it_came_with() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writer.write(OK)
            await heads(reader).__anext__()
            await asyncio.sleep(1)

    async with pool_of(behaviour) as (server, pool):
        assert await ask(pool, server.url, silence_s=5) == b"{}"
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(SilentError):
            await ask(pool, server.url, silence_s=0.1)
        assert 0.09 <= asyncio.get_running_loop().time() - begun_s < 4.9
        assert (server.connections_count, pool.requests_count) == (1, 0)


async def test_connection_answered_before_its_body_was_read_gets_no_further_request() -> None:
    """The answer is read although the body was not: engines refuse too large bodies this way."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writer.write(OK)
            await asyncio.sleep(10 if server.connections_count == 1 else 0)

    async with pool_of(behaviour) as (server, pool):
        async with asyncio.timeout(5):
            assert await ask(pool, server.url, body=LARGE_BODY) == b"{}"
            assert await ask(pool, server.url) == b"{}"
        assert server.connections_count == 2


async def test_a_large_body_arrives_whole() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        same = await reader.readexactly(len(LARGE_BODY)) == LARGE_BODY
        writer.write(OK if same else b"HTTP/1.1 500 \r\nContent-Length: 0\r\n\r\n")
        await heads(reader).__anext__()
        writer.write(OK)

    async with pool_of(behaviour) as (server, pool):
        assert await ask(pool, server.url, body=LARGE_BODY) == b"{}"
        assert await ask(pool, server.url) == b"{}"
        assert server.connections_count == 1


async def test_a_client_that_leaves_while_a_large_body_goes_out_ends_that_at_once() -> None:
    got_bytes = asyncio.get_running_loop().create_future()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        await cancelled.wait()
        size_bytes = 0
        try:
            while chunk := await reader.read(1 << 16):
                size_bytes += len(chunk)
        except ConnectionError:
            pass
        got_bytes.set_result(size_bytes)

    begun, cancelled = asyncio.Event(), asyncio.Event()
    async with pool_of(behaviour) as (server, pool):
        asking = asyncio.create_task(ask(pool, server.url, body=8 * LARGE_BODY))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert pool.requests_count == 0
        cancelled.set()
        assert await got_bytes < len(8 * LARGE_BODY)


async def test_a_replica_that_takes_no_more_of_a_large_body_times_out() -> None:
    """It neither reads nor answers, so nothing else would end the request; a slow reader gets its time."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not stops:
            for _ in range(16):
                await asyncio.sleep(0.05)
                await reader.readexactly(len(body) // 16)
            writer.write(OK)
            await writer.drain()
        await ended.wait()

    ended, body = asyncio.Event(), 8 * LARGE_BODY  # more than sockets hold
    limits = Limits(5, 0.5)
    async with pool_of(behaviour) as (server, pool):
        for stops in (False, True):
            async with asyncio.timeout(20):
                asking = pool.request("POST", server.url, "/v1/x", CIMultiDict(), body, limits)
                if stops:
                    with pytest.raises(SilentError):
                        await asking
                else:
                    assert await (await asking).read() == b"{}"
        assert pool.requests_count == 0
        ended.set()


@pytest.mark.parametrize("later_rounds_count", range(4))
async def test_an_answer_that_comes_as_its_client_leaves_waits_for_no_collection(later_rounds_count: int) -> None:
    """It came in the same round of the event loop or one before: its head is in the connection then."""
    writers: list[asyncio.StreamWriter] = []

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writers.append(writer)
            begun.set()

    begun = asyncio.Event()
    async with pool_of(behaviour) as (server, pool):
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            asking = asyncio.create_task(ask(pool, server.url))
            await begun.wait()
            writers[0].write(OK)
            for _ in range(later_rounds_count):
                await asyncio.sleep(0)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
            del asking
            await asyncio.sleep(0.01)
            gc.collect()
            left = [type(each).__name__ for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert "Connection" not in left
        assert pool.requests_count == 0


async def test_an_answer_that_comes_as_the_pool_is_closed_fails_as_if_the_replica_had_closed_it() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writers.append(writer)
            begun.set()

    writers: list[asyncio.StreamWriter] = []
    begun = asyncio.Event()
    failures: list[Exception] = []
    for rounds_count in range(3):
        begun.clear()
        async with pool_of(behaviour) as (server, pool):
            asking = asyncio.create_task(ask(pool, server.url))
            await begun.wait()
            writers[-1].write(OK)
            for _ in range(rounds_count):
                await asyncio.sleep(0)
            closing = asyncio.create_task(pool.close())
            try:
                assert await asking == b"{}"
            except ClosedError as error:
                failures.append(error)
            await closing
    assert failures


async def test_interim_answers_are_skipped() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for _ in heads(reader):
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" + OK)

    async with pool_of(behaviour) as (server, pool):
        assert await ask(pool, server.url) == b"{}"


async def test_a_server_that_sends_nothing_but_interim_answers_has_failed() -> None:
    """Each of them ends a silence, so no limit on silence would end the request."""

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heads(reader).__anext__()
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n" * 100)
                await writer.drain()

    async with pool_of(behaviour) as (server, pool):
        async with asyncio.timeout(5):
            with pytest.raises(ClosedError, match="interim"):
                await ask(pool, server.url)
        assert pool.requests_count == 0


async def test_bytes_that_are_no_http_are_a_connection_error() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heads(reader).__anext__()
        writer.write(b"I am no server\r\n\r\n")

    async with pool_of(behaviour) as (server, pool):
        with pytest.raises(ClosedError):
            await ask(pool, server.url)
        assert pool.requests_count == 0


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{"])
async def test_an_answer_that_takes_too_long_in_all_times_out(sent: bytes) -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heads(reader).__anext__()
        writer.write(sent)
        await reader.read()

    async with pool_of(behaviour) as (server, pool):
        with pytest.raises(TotalError):
            await ask(pool, server.url, total_s=0.1)
        assert pool.requests_count == 0


async def test_headers_that_would_be_two_are_not_sent() -> None:
    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with pool_of(behaviour) as (server, pool):
        with pytest.raises(ValueError, match="header"):
            await pool.request("GET", server.url, "/", CIMultiDict({"A": "b\r\nC: d"}), None, LIMITS)
        assert pool.requests_count == 0


class Talker:
    """The bytes that a client sends after its head."""

    def __init__(self) -> None:
        self.sink: Callable[[bytes], None] | None = None
        self.is_held = asyncio.Event()
        self.may_go_on = asyncio.Event()

    def pour(self, sink: Callable[[bytes], None]) -> None:
        self.sink = sink

    def hold(self) -> None:
        self.is_held.set()

    def go_on(self) -> None:
        self.may_go_on.set()


UPGRADE = CIMultiDict([("Connection", "Upgrade"), ("Upgrade", "websocket")])
CHANGES = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


async def test_a_protocol_changes_only_for_who_asked_for_it() -> None:
    """For others it is not HTTP; both sides then send as fast as the other takes it."""
    reads = asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHANGES + b"hi")
        await reads.wait()
        writer.write(b"%d" % len(await reader.readexactly(len(LARGE_BODY))))

    async with pool_of(behaviour) as (server, pool):
        for method, headers in (("GET", CIMultiDict[str]()), ("POST", UPGRADE)):
            with pytest.raises(ClosedError):
                await pool.request(method, server.url, "/v1/realtime", headers, None, LIMITS)
        answer = await pool.request("GET", server.url, "/v1/realtime", UPGRADE, None, LIMITS)
        assert (answer.status, await answer.next_piece()) == (101, b"hi")
        talker = Talker()
        answer.converse(talker, 5.0)
        assert talker.sink is not None
        talker.sink(LARGE_BODY)
        await talker.is_held.wait()
        assert not talker.may_go_on.is_set()
        reads.set()
        await talker.may_go_on.wait()
        assert await answer.read() == b"%d" % len(LARGE_BODY)
        talker.sink(b"nobody hears this")
    assert pool.requests_count == 0


async def test_a_server_that_is_spoken_to_and_does_not_listen_is_silent_whatever_it_says() -> None:
    """A server that reads something now and then is not silent."""
    ended = asyncio.Event()

    async def behaviour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHANGES)
        while not ended.is_set():
            writer.write(b"hi")
            await asyncio.sleep(0.02)

    async with pool_of(behaviour) as (server, pool):
        answer = await pool.request("GET", server.url, "/v1/realtime", UPGRADE, None, LIMITS)
        talker = Talker()
        answer.converse(talker, 0.3)
        assert talker.sink is not None
        talker.sink(b"little")
        for _ in range(30):  # twice the limit
            await answer.next_piece()
        talker.sink(LARGE_BODY)
        with pytest.raises(SilentError, match="took nothing"):
            await answer.read()
        ended.set()
    assert pool.requests_count == 0
