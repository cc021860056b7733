"""A client's connection: the order of its answers, its end, and what is lent."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from multidict import CIMultiDict

from thunderagent.proxy.wire.failures import NotHttpError
from thunderagent.proxy.wire.http11.heads import (
    CHUNKED,
    MAX_HEAD_BYTES,
    MAX_HEADERS_COUNT,
    end_of_head,
    read_answer,
    read_request,
)
from thunderagent.proxy.wire.http11.limits import Sweep
from thunderagent.proxy.wire.http11.server import AHEAD_BYTES, EARLY_BYTES, Connection, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from thunderagent.proxy.wire.http11.heads import RequestHead
    from thunderagent.proxy.wire.http11.server import Asked, Handler

DEADLINE_S = 10.0
LARGE_BYTES = 16 * 1024


def request(target: str, body: bytes = b"", *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: h", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Borrower(asyncio.Protocol):
    """Answers `lent` once it has a whole body of two bytes; it refuses a larger one at once, and reads no further."""

    def __init__(self) -> None:
        self.got = b""
        self.transport: Any = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.got.endswith(b"{}"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlent")
            self.transport.answered(keeps_alive=True)
        elif len(self.got) > LARGE_BYTES:
            self.transport.pause_reading()
            self.transport.write(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n")
            self.transport.answered(keeps_alive=False)


class Served:
    """A server that answers `/echo` with the body, `/wait` when told to, and lends all else."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.borrowers: list[Borrower] = []
        self.port = 0
        self.settings: Settings

    def handler(self, head: RequestHead) -> Handler | None:
        return None if head.target == b"/lent" else self.handle

    def borrower(self) -> Borrower:
        self.borrowers.append(Borrower())
        return self.borrowers[-1]

    async def handle(self, asked: Asked) -> None:
        self.asked.set()
        target = asked.head.target
        if target == b"/refuse":
            asked.answer(413, "No", CIMultiDict(), b"no")
            return
        if target == b"/large":
            await self._stream(asked)
            return
        if "Expect" in asked.headers:
            asked.invite()
        body = b"" if asked.head.upgrades else await asked.read()
        try:
            if target == b"/wait":
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if target == b"/stream":
            asked.begin(200, "OK", CIMultiDict())
            asked.write(body)
            asked.end()
        else:
            asked.answer(200, "OK", CIMultiDict(), body)

    async def _stream(self, asked: Asked) -> None:
        asked.begin(200, "OK", CIMultiDict())
        try:
            while True:
                wait = asked.write(b"x" * 65536)
                if wait is not None:
                    await wait
        except BaseException:
            self.left.set()
            raise


@asynccontextmanager
async def serving(*, idle_s: float = 75.0, stall_s: float = 120.0) -> AsyncIterator[Served]:
    served, loop = Served(), asyncio.get_running_loop()
    settings = served.settings = Settings(served, Sweep(loop), idle_s=idle_s, stall_s=stall_s)
    server = await loop.create_server(lambda: Connection(settings), "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield served
    finally:
        for connection in list(settings.connections):
            connection.close(at_once=True)
        await settings.all_closed()
        server.close()


async def told(served: Served, *pieces: bytes, ends: bool = False) -> bytes:
    """Send pieces one by one, and return all output until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        if ends:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


def bodies(answers: bytes) -> list[bytes]:
    """Return the bodies of answers that all have a length."""
    found = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        found.append(answers[:length])
        answers = answers[length:]
    return found


LAST = request("/echo", b"last", "Connection: close")


async def test_requests_on_one_connection_are_answered_in_their_order() -> None:
    """This holds however they are cut, and for those that come before the previous one was answered."""
    stream = request("/echo", b"one") + b"\r\n" + request("/lent", b"{}") + request("/echo", b"") + LAST
    async with serving() as served:
        for size in (1, 7, 50, len(stream)):
            pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            assert bodies(await reader.read()) == [b"one", b"lent", b"", b"last"], size
            writer.close()


async def test_a_lent_request_is_all_that_its_borrower_sees_and_the_connection_comes_back() -> None:
    async with serving() as served:
        sent = request("/lent", b"{}")
        assert bodies(await told(served, sent + request("/echo", b"mine") + sent[:20], sent[20:] + LAST)) == [
            *(b"lent", b"mine", b"lent", b"last")
        ]
        assert [(each.got, each.is_lost) for each in served.borrowers] == [(sent, True)] * 2


async def test_bytes_that_are_no_http_are_answered_400_and_nothing_after_it() -> None:
    async with serving() as served:
        for wrong in (b"GET / HTTP/1.1\r\n\r\n", b"POST /echo HTTP/1.1\r\nHost: h\nX: y\r\n\r\n"):
            answer = await told(served, request("/echo", b"a"), wrong + LAST)
            assert [answer.count(status) for status in (b"HTTP/1.1 200 OK", b"HTTP/1.1 400 Bad")] == [1, 1]
            assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"400")
        chunked = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
        assert b"400 Bad Request" in await told(served, chunked, b"nonsense\r\n")


async def test_a_body_in_chunks_is_read_without_its_framing_and_ends_the_connection_if_something_follows() -> None:
    """The begin of the rest cannot be known; a body alone leaves the connection open."""
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"2;a=b\r\n{}\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n"
    async with serving() as served:
        assert bodies(await told(served, head, body, LAST)) == [b"{}abc", b"last"]
        assert bodies(await told(served, head + body + LAST)) == [b"{}abc"]
        framing = b"".join(b"1%s\r\nx\r\n" % (b";" + b"a" * 1000) for _ in range(100))
        assert b"400 Bad Request" in await told(served, head + framing)


async def test_an_answer_before_the_body_is_the_last_and_its_client_may_finish() -> None:
    """Otherwise later bytes would be read as a request, or the answer be lost."""
    async with serving() as served:
        rest = [b"x" * 50_000] * 10
        answer = await told(served, request("/refuse", b"x" * 1_000_000)[:100_000], *rest)
        assert b"413 No" in answer
        assert b"Connection: close" in answer


async def test_a_client_whose_lent_request_is_refused_may_finish() -> None:
    """Even if its borrower made it wait: a reset would take the answer away."""
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/lent", b"x" * 8_000_000))  # more than a system keeps
        await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 413 No")
        writer.close()


async def test_writer_that_stops_waiting_leaves_the_others_waiting() -> None:
    async with serving() as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        while not served.settings.connections:
            await asyncio.sleep(0)
        (connection,) = served.settings.connections
        connection.pause_writing()
        leaves, stays = asyncio.create_task(connection.room()), asyncio.create_task(connection.room())
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.wait([leaves])
        comes = asyncio.create_task(connection.room())
        await asyncio.sleep(0)
        connection.resume_writing()
        await asyncio.gather(stays, comes)
        writer.close()


async def test_a_body_is_invited_only_when_somebody_wants_it() -> None:
    head, body = request("/echo", b"{}", "Expect: 100-continue", "Connection: close")[:-2], b"{}"
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert bodies(await reader.read()) == [b"{}"]
        writer.close()
        refused = request("/refuse", b"{}", "Expect: 100-continue")[:-2]
        assert b"100 Continue" not in await told(served, refused)


async def test_client_that_sends_far_ahead_waits_and_is_answered_in_order() -> None:
    """However much comes, nothing is lost, and only a little of it waits here."""
    body, count = b"x" * AHEAD_BYTES, 100
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/wait"))
        await served.asked.wait()
        writer.write(request("/echo", body) * count + LAST)
        await asyncio.sleep(0.1)
        (connection,) = served.settings.connections
        assert len(connection._buffer) < 10 * AHEAD_BYTES
        served.go_on.set()
        answers = (await reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert bodies(answers) == [b"", *[body] * count, b"last"]
        writer.close()


async def test_a_client_that_is_far_ahead_and_leaves_is_noticed() -> None:
    """Its end of stream is behind unread data."""
    async with serving() as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/wait"))
        await served.asked.wait()
        writer.write(request("/echo", b"ahead") * (10 * AHEAD_BYTES // 20))
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await served.left.wait()


async def test_an_old_client_that_sends_far_ahead_has_to_come_again() -> None:
    """HTTP/1.0 has no way to ask whether it is still there."""
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/wait", b"", "Connection: keep-alive", version="1.0"))
        await served.asked.wait()
        writer.write(request("/echo", b"ahead") * (AHEAD_BYTES // 20))
        await asyncio.sleep(0.1)
        served.go_on.set()
        assert bodies(await reader.read()) == [b""]
        writer.close()


async def test_client_that_changes_protocol_before_its_answer_is_cut() -> None:
    """Nobody counts its data, and while that is not read, its leaving cannot be noticed either."""
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/wait", b"", "Connection: Upgrade", "Upgrade: websocket", method="GET"))
        await served.asked.wait()
        writer.write(b"x" * (2 * EARLY_BYTES))
        assert (await reader.readline()) == b"HTTP/1.1 400 Bad Request\r\n"
        await served.left.wait()
        writer.close()


async def test_a_client_that_ended_its_requests_and_takes_nothing_is_cut() -> None:
    """Once its answer has begun it is judged by what it reads."""
    async with serving(stall_s=0.4) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(request("/large"))
        writer.write_eof()
        await served.left.wait()
        del reader
        writer.transport.abort()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_ends_its_requests_is_answered_and_one_that_left_is_noticed(version: str) -> None:
    async with serving() as served:
        asyncio.get_running_loop().call_later(0.2, served.go_on.set)
        answer = await told(served, request("/wait", b"{}", version=version), ends=True)
        assert answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").endswith(b"\r\n\r\n{}")
        served.go_on.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/wait", b"{}", version=version))
        await asyncio.sleep(0.05)
        writer.close()
        await served.left.wait()


async def test_a_client_that_ends_its_requests_is_answered_all_that_came_whole() -> None:
    """It may end before the first answer or between two; answers are in order; half a request gets none."""
    several = request("/echo", b"two") + request("/lent", b"{}") + request("/stream", b"") + request("/echo", b"last")
    for half in (b"", request("/echo", b"never")[:-1], b"POST /ec", b"\r\n"):
        async with serving() as served:
            asyncio.get_running_loop().call_later(0.1, served.go_on.set)
            answers = await told(served, request("/wait", b"one") + several + half, ends=True)
            answers = answers.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            found = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]
            assert found == [b"one", b"two", b"lent", b"0\r\n\r\n", b"last"], half
            await served.settings.all_closed()
            assert len(served.settings.sweep) == 0


async def test_a_client_that_ended_its_requests_and_leaves_before_its_last_answer_is_noticed() -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/echo", b"one") + request("/wait"))
        writer.write_eof()
        await reader.readuntil(b"one")
        await reader.readuntil(b"100 Continue")
        writer.transport.abort()
        await served.left.wait()


async def test_streams_to_old_clients_end_with_the_connection() -> None:
    async with serving() as served:
        old = await told(served, request("/stream", b"data", "Connection: keep-alive", version="1.0"))
        assert old.endswith(b"\r\n\r\ndata")
        assert b"Transfer-Encoding" not in old
        assert b"Connection: close" in old
        new = await told(served, request("/stream", b"data", "Connection: close"))
        assert new.endswith(b"\r\n\r\n4\r\ndata\r\n0\r\n\r\n")


async def test_heads_that_do_not_come_and_answers_that_are_not_taken_are_cut() -> None:
    async with serving(idle_s=0.5, stall_s=0.4) as served:
        assert await told(served, b"POST /echo HT") == b""
        assert bodies(await told(served, request("/echo", b"a"), b"POST")) == [b"a"], "after an answer, too"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(request("/large"))
        await served.left.wait()
        del reader
        writer.transport.abort()


async def test_a_closing_server_ends_idle_connections_at_once_and_others_with_their_answers() -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request("/echo", b"a"))
        await reader.readuntil(b"\r\n\r\na")
        served.asked.clear()
        busy = asyncio.create_task(told(served, request("/wait", b"b")))
        await served.asked.wait()
        served.settings.is_closing = True
        for connection in list(served.settings.connections):
            connection.close()
        assert await reader.read() == b""
        writer.close()
        served.go_on.set()
        assert bodies(await busy) == [b"b"]
        await served.settings.all_closed()
        assert len(served.settings.sweep) == 0


async def test_nothing_of_a_request_waits_for_a_collection() -> None:
    """It may be answered, abandoned by its client, or no HTTP."""
    chunked = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx"
    async with serving() as served:
        for streams in ((request("/echo", b"a"), LAST), (chunked, b"zz"), (request("/lent", b"{}"), LAST)):
            await told(served, *streams)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for streams in ((request("/echo", b"a"), LAST), (chunked, b"zz"), (request("/lent", b"{}"), LAST)):
                await told(served, *streams)
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request("/wait"))
            await asyncio.sleep(0.05)
            writer.close()
            await served.left.wait()
            served.borrowers.clear()
            await asyncio.sleep(0.05)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("thunderagent")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not left


@pytest.mark.parametrize(
    "head",
    [
        b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /x HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
        b"POST  /x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: h\r\nX: y\r\n z\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(NotHttpError):
        read_request(head)


def test_a_head_is_read_as_it_came() -> None:
    """Bytes that are not UTF-8 come out as they went in, and blanks around a value are dropped."""
    head = read_request(
        b"POST /\xc3\xa9?a=b HTTP/1.1\r\nHost: h\r\nX:\t y\xff z \r\ntransfer-encoding: Chunked\r\n\r\n"
    )
    assert (head.method, head.target, head.length, head.keeps_alive) == ("POST", b"/\xc3\xa9?a=b", CHUNKED, True)
    assert head.headers["x"].encode("utf-8", "surrogateescape") == b"y\xff z"


def test_an_old_client_cannot_change_the_protocol() -> None:
    """By RFC 9110, 7.8 its wish is ignored."""
    head = b"GET /x HTTP/1.%d\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert [read_request(head % minor).upgrades for minor in (0, 1)] == [False, True]


def test_an_endless_head_is_refused() -> None:
    with pytest.raises(NotHttpError):
        end_of_head(b"POST / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES, 0)
    with pytest.raises(NotHttpError):
        end_of_head(b"POST / HTTP/1.1\r\nHost: h\n", 0)


@pytest.mark.parametrize(
    ("begin", "read"),
    [
        (b"POST / HTTP/1.1\r\nHost: h\r\n", read_request),
        (b"HTTP/1.1 200 OK\r\nAge: 1\r\n", lambda head: read_answer(head, "POST")),
    ],
)
def test_a_head_has_so_many_headers_and_no_more(begin: bytes, read: Callable[[bytes], Any]) -> None:
    full = begin + b"".join(b"X-%d: y\r\n" % number for number in range(MAX_HEADERS_COUNT - 1))
    assert len(read(full + b"\r\n").headers) == MAX_HEADERS_COUNT
    with pytest.raises(NotHttpError):
        read(full + b"One: more\r\n\r\n")
