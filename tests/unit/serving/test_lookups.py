"""Name lookups: a silent name server stalls neither other names nor the end of the process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
import uvloop

from thunderagent.serving.lookups import Lookups, Loop

KEY = ("name", 80, 0, 0, 0, 0)
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))]


class Server:
    """A name server that answers when a test lets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.silent = threading.Event()
        self.error: Exception | None = None

    def lookup(self, host: str, *_: Any) -> Any:
        self.asked.append(host)
        if host.startswith("dead"):
            assert self.silent.wait(10)
        if self.error is not None:
            raise self.error
        return FOUND


async def test_a_name_that_hangs_keeps_no_other_waiting() -> None:
    """However many hang, the next is looked up at once."""
    server = Server()
    lookups = Lookups(server.lookup)
    hanging = [asyncio.create_task(lookups.find((f"dead-{number}", *KEY[1:]))) for number in range(20)]
    assert await asyncio.wait_for(lookups.find(KEY), 5) == FOUND
    server.silent.set()
    assert await asyncio.gather(*hanging) == [FOUND] * 20


async def test_a_name_is_looked_up_once_at_a_time_whoever_leaves() -> None:
    """Repeated requests, as of a poller, add nothing to a hanging lookup; a cancelled one cancels no other."""
    server = Server()
    lookups = Lookups(server.lookup)
    key = ("dead", *KEY[1:])
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lookups.find(key), 0.01)
    waiting = asyncio.create_task(lookups.find(key))
    await asyncio.sleep(0)
    server.silent.set()
    assert await waiting == FOUND
    assert server.asked == ["dead"]
    await lookups.find(key)
    assert server.asked == ["dead", "dead"]  # results are not kept


@pytest.mark.parametrize("error", [socket.gaierror(-2, "not known"), UnicodeError("no name")])
async def test_who_asks_gets_the_error(error: Exception) -> None:
    """It equals the system's own."""
    server = Server()
    server.error = error
    with pytest.raises(type(error)):
        await Lookups(server.lookup).find(KEY)


def test_a_loop_ends_while_a_lookup_hangs() -> None:
    """What cannot be cancelled is left behind, and its late answer is silently dropped."""
    server = Server()

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Lookups(server.lookup).find(("dead", *KEY[1:])), 0.01)

    began_s = time.monotonic()
    uvloop.run(ask(), loop_factory=Loop)
    assert time.monotonic() - began_s < 5
    threads = [thread for thread in threading.enumerate() if thread.name == "lookup dead"]
    assert all(thread.daemon for thread in threads)
    server.silent.set()
    for thread in threads:
        thread.join(5)


def test_the_loop_looks_up_as_the_system_does() -> None:
    """Its addresses are those of `socket.getaddrinfo`."""

    async def ask() -> Any:
        return await asyncio.get_running_loop().getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)

    assert uvloop.run(ask(), loop_factory=Loop) == socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
