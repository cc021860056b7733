"""Name lookups: a silent name server stalls neither other names nor the end of the process."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from typing import Any

import pytest
import trustme
import uvloop
from multidict import CIMultiDict

from thunderagent.proxy.wire.failures import UnreachedError
from thunderagent.proxy.wire.http11.client import Pool
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep
from thunderagent.serving.lookups import Lookups, Loop, _host_and_port

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
async def test_caller_gets_the_error(error: Exception) -> None:
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


async def test_a_thread_that_cannot_be_started_fails_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one for that name starts another."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lookups = Lookups(Server().lookup)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="can't start new thread"):
            await asyncio.wait_for(lookups.find(KEY), 5)
    assert await asyncio.wait_for(lookups.find(KEY), 5) == FOUND


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be an engine that answers one request."""
    while await reader.readline() not in (b"\r\n", b""):
        pass
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    writer.close()


def test_the_connections_to_an_engine_use_them() -> None:
    """Its first address refuses, so the second is tried; what is an address needs no lookup."""
    asked: list[str] = []

    def lookup(host: str, port: int, *_: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        pool = Pool(Sweep(loop), Pause(loop))
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            for host in ("engine.invalid", "127.0.0.1"):
                answered = await pool.request("GET", f"http://{host}:{port}", "/", CIMultiDict(), None, Limits(5, 5))
                assert answered.status == 204
            listening.close()
            with pytest.raises(UnreachedError) as unreached:
                await pool.request("GET", f"http://engine.invalid:{port}", "/", CIMultiDict(), None, Limits(5, 5))
            assert unreached.value.is_refused
        await pool.close()

    uvloop.run(ask(), loop_factory=lambda: Loop(Lookups(lookup)))
    assert asked == ["engine.invalid", "engine.invalid"]


@pytest.mark.parametrize(
    ("address", "host"),
    [
        (("10.0.0.1", 80), "10.0.0.1"),
        (("fd00::1", 80, 0, 0), "fd00::1"),
        (("fe80::1", 80, 0, 3), "fe80::1%3"),
    ],
)
def test_an_address_keeps_its_scope(address: tuple[Any, ...], host: str) -> None:
    """Without it nothing can connect to a link-local one."""
    assert _host_and_port(address) == (host, 80)


def test_a_certificate_is_checked_for_the_name_that_was_looked_up() -> None:
    """It does not name the address."""
    authority = trustme.CA()
    trusts, shows = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.configure_trust(trusts)
    authority.issue_cert("engine.invalid").configure_cert(shows)

    def lookup(_host: str, port: int, *_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=shows) as listening:
            port = listening.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("engine.invalid", port, ssl=trusts)
            writer.write(b"\r\n")
            assert await reader.readline() == b"HTTP/1.1 204 No Content\r\n"
            writer.close()
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.open_connection("other.invalid", port, ssl=trusts)

    uvloop.run(ask(), loop_factory=lambda: Loop(Lookups(lookup)))


def test_the_loop_looks_up_as_the_system_does() -> None:
    """Its addresses are those of `socket.getaddrinfo`."""

    async def ask() -> Any:
        return await asyncio.get_running_loop().getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)

    assert uvloop.run(ask(), loop_factory=Loop) == socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
