"""No request's body runs as another request, and no answer is cut, whatever came before on the same connection.

A front proxy carries the requests of many clients on few connections. A tail of one client's body that we read as a
request would take the next client's request for its body.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    FakeReplica,
    Wire,
    answers,
    fake_replica,
    head_bytes,
    running_proxy,
    turn,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Call

SPELLINGS = ("X-A-Length", "x-a-length", "X-Content-Length", "A-Content-length", "X-Content-Length-Length")
"""Headers that are not the length, but end like it."""

TRIES = (("", "", "5"), ("", "", "", "0"), ("7", "7", "5"), ("", "", "5 "), ("5", "5", ""), ("", "", "9" * 18))
"""What such a header says in one request after the other."""


@asynccontextmanager
async def front(url: str) -> AsyncIterator[str]:
    """Run a proxy with one connection to `url`, on which it sends whatever request comes next, from any client."""
    parts = urlsplit(url)
    upstream = await asyncio.open_connection(parts.hostname, parts.port)
    is_free = asyncio.Lock()

    async def message(reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = [line[16:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
        return head + await reader.readexactly(int(length))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await message(reader)
                async with is_free:
                    upstream[1].write(asked)
                    answer = await message(upstream[0])
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
        upstream[1].close()


def request(who: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """Return a turn; the odd headers come before its length."""
    own = [("Host", "h"), *headers, ("Content-Length", str(len(body))), ("X-Client", who)]
    return head_bytes(f"POST {CHAT} HTTP/1.1", own) + body


async def echo(call: Call) -> None:
    """Behave: answer with whose turn it was, and the size of its body."""
    said = {"choices": [], "client": call.header("X-Client"), "size_bytes": len(call.body)}
    await answers(said)(call)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("tries", TRIES)
async def test_a_clients_request_never_becomes_anothers_body(name: str, tries: tuple[str, ...]) -> None:
    victim = request("victim", json.dumps(turn("mine", content="secret")).encode(), ("Authorization", "Bearer mine"))
    smuggled = head_bytes(
        f"POST {CHAT} HTTP/1.1",
        [("Host", "h"), ("X-Client", "attacker"), ("Content-Length", str(len(victim)))],
    )
    body = b"{}   " + smuggled
    async with fake_replica(echo) as replica, running_proxy(replica.url) as proxy, front(proxy.url) as url:
        async with Wire.open(url) as attacker, Wire.open(url) as other:
            for value in tries:
                attacker.send_raw(request("attacker", body, (name, value)))
                answer = await attacker.answer()
                assert answer.json() == {"choices": [], "client": "attacker", "size_bytes": len(body)}
            other.send_raw(victim)
            answer = await other.answer()
            assert (answer.status, answer.json()["client"]) == (200, "victim")
        assert [call.body for call in replica.calls[:-1]] == [body] * len(tries), "each body is whole"
        assert replica.calls[-1].json()["messages"] == [{"role": "user", "content": "secret"}]


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("tries", TRIES)
async def test_an_engines_answer_is_as_long_as_it_says(name: str, tries: tuple[str, ...]) -> None:
    values = iter(tries)

    async def behave(call: Call) -> None:
        await answers(b'{"choices": []}', headers=[(name, next(values)), ("Content-Type", "application/json")])(call)

    async def behave_first(call: Call) -> None:
        """Write the odd header before the length."""
        head = head_bytes("HTTP/1.1 200 OK", [(name, next(values)), ("Content-Length", "15")])
        call.write(head + b'{"choices": []}')

    for behaviour in (behave, behave_first):
        values = iter(tries)
        async with fake_replica(behaviour) as replica, running_proxy(replica.url) as proxy:
            async with Wire.open(proxy.url) as wire, asyncio.timeout(DEADLINE_S):
                for _ in tries:
                    wire.send("POST", CHAT, [], json.dumps(turn("p")).encode())
                    answer = await wire.answer()
                    assert (answer.status, answer.body, answer.whole) == (200, b'{"choices": []}', True)
            assert len(replica.calls) == len(tries), "none was tried again"


async def test_bytes_behind_an_answer_belong_to_no_other(replica: FakeReplica) -> None:
    """An engine that sends more than it announced loses the connection, and the next turn has its own answer."""
    replica.behaviour = echo
    async with running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        for who in ("first", "second"):
            wire.send_raw(request(who, b"{}"))
            assert (await wire.answer()).json()["client"] == who

            async def more(call: Call) -> None:
                await echo(call)
                call.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

            replica.behaviour = more
        wire.send_raw(request("third", b"{}"))
        assert (await wire.answer()).json()["client"] == "third"
