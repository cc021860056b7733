"""The engine that drips and the client that reads it: output equals input, byte for byte, however it is cut."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.drip import DripEngine, Plan, event_of, whole
from benchmarks.streams import Dripped, StreamClient, all_ended, exact_count, open_all

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport:
    """The parts of a transport that a client needs."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        assert data == b"request"

    def close(self) -> None:
        self.closed = True


def test_a_stream_is_read_however_it_is_cut() -> None:
    payloads = [event_of({"sent_s": 0.0}), event_of({"usage": {}}) + b"data: [DONE]\n\n"]
    answer = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in payloads) + b"0\r\n\r\n"
    for size in (1, 2, 3, 7, len(answer)):
        delays_s: list[float] = []
        client, transport = StreamClient(b"request", delays_s), Transport()
        any_transport: Any = transport
        client.connection_made(any_transport)
        for start in range(0, len(answer), size):
            client.data_received(answer[start : start + size])
        assert client.whole
        assert transport.closed
        assert client.digest.digest() == blake2b(b"".join(payloads), digest_size=16).digest()
        assert len(delays_s) == 1


async def test_streams_come_whole_and_those_that_are_cut_do_not() -> None:
    dripped = Dripped(0.01)
    engine = DripEngine(dripped.plan, 1000)
    names = (f"stream-{number}" for number in count())
    async with engine.serving() as port:
        clients, delays_s = await open_all(port, dripped, names, 8)
        cut, stay = clients[:3], clients[3:]
        for _, client in cut:
            client.transport.abort()
        while engine.left_count < 3:
            await asyncio.sleep(0.001)
        await all_ended(clients, dripped)
        assert exact_count(cut, dripped) == 0
        assert exact_count(stay, dripped) == 5
        assert engine.turns_count == 0
        assert len(delays_s) >= 8


async def test_an_engine_fails_where_it_is_told_to() -> None:
    """It fails before the head, or between two events."""

    def plan(path: str, body: bytes) -> Plan:
        events: Iterator[bytes] | None = iter([b"data: 1\n\n"]) if body == b"stream" else None
        return Plan(events=events, answer=whole(200, "text/plain", b"x") if body == b"whole" else b"", breaks=True)

    async with DripEngine(plan, 1000).serving() as port:
        for body, expected in ((b"at once", b""), (b"stream", b"9\r\ndata: 1\n\n\r\n"), (b"whole", b"x")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            answer = await reader.read()
            writer.close()
            assert answer.partition(b"\r\n\r\n")[2] == expected


@pytest.mark.parametrize("status", [200, 500])
def test_a_whole_answer_says_how_long_it_is(status: int) -> None:
    assert whole(status, "text/plain", b"four").endswith(b"Content-Length: 4\r\n\r\nfour")
