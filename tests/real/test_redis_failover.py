"""A Redis that fails over behind one address and leaves connections open, to what is a read-only replica then.

That is how managed services do it. `FAILOVERS_COUNT` says how often, one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import command, engine, get
from tests.loopback import free_ports
from tests.real.redis_server import ensure_redis

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path
    from typing import NoReturn

    from tests.integration.support import CommandProcess

pytestmark = pytest.mark.usefixtures("redis_installed")

LOCK_S = 3.0
LATE_S = 1.0
"""A standby leads at most so long after the lock was over."""
FAILOVERS_COUNT = int(os.environ.get("FAILOVERS_COUNT", "2"))
LIMIT_S = 60.0


class Service:
    """Two servers of Redis and one address in front of them, which new connections follow to the primary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.front, *self.ports = free_ports(3)
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def primary(self) -> int:
        return self.ports[0]

    async def asked(self, port: int, *words: str) -> str:
        """Send one command to a server; return the first line of its answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(" ".join(words).encode() + b"\r\n")
            line = await reader.readline()
            if line.startswith(b"$") and line != b"$-1\r\n":
                return (await reader.readexactly(int(line[1:]) + 2)).decode()
            return line.decode()
        finally:
            writer.close()

    async def start(self) -> None:
        for port in self.ports:
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            options += ["--dbfilename", f"{port}.rdb", "--repl-diskless-sync-delay", "0"]
            server = subprocess.Popen(["redis-server", *options], cwd=self.folder, stdout=subprocess.DEVNULL)
            self.processes.append(server)
        async with asyncio.timeout(LIMIT_S):
            for port in self.ports:
                while True:
                    with contextlib.suppress(OSError):
                        if (await self.asked(port, "PING")).startswith("+PONG"):
                            break
                    await asyncio.sleep(0.02)
        await self.asked(self.ports[1], "REPLICAOF", "127.0.0.1", str(self.ports[0]))
        await self.until_replicated()

    async def until_replicated(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while "master_link_status:up" not in await self.asked(self.ports[1], "INFO", "replication"):
                await asyncio.sleep(0.02)

    async def fail_over(self) -> None:
        """Make the replica the primary, and the primary its replica."""
        old, new = self.ports
        await self.asked(new, "REPLICAOF", "NO", "ONE")
        await self.asked(old, "REPLICAOF", "127.0.0.1", str(new))
        self.ports = [new, old]

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection to the primary of the moment, and leave it there."""
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self.primary)
            await asyncio.gather(_pump(reader, back), _pump(there, writer))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[Service]:
    redis = Service(folder)
    try:
        await redis.start()
        async with await asyncio.start_server(redis.carry, "127.0.0.1", redis.front):
            yield redis
    finally:
        redis.kill()


async def said(scheduler: CommandProcess) -> dict[str, Any]:
    """Return a scheduler's role; empty while its process stands still."""
    try:
        async with asyncio.timeout(0.5):
            answer = await get(scheduler.url, "/internal/leader")
    except (OSError, TimeoutError):
        return {}
    return dict(json.loads(answer.body)) if answer.status == 200 else {}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.timeout(60 + 30 * FAILOVERS_COUNT)
async def test_a_standby_leads_after_a_fail_over_that_leaves_connections_open(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """First the leader goes on leading; then it stands still, and the standby leads once the lock is over."""
    settings = {"PYTHONPATH": ensure_redis(require_real)}
    took_s: list[float] = []
    async with service(tmp_path) as redis, engine() as behind, AsyncExitStack() as stack:
        options = ("--listen", "127.0.0.1:0", "--store", f"redis://127.0.0.1:{redis.front}", "--lock-s", str(LOCK_S))
        start = (command("scheduler", *options, "--backends", behind.url, settings=settings) for _ in range(2))
        leader, standby = [await stack.enter_async_context(each) for each in start]

        async def is_followed() -> bool:
            nonlocal leader, standby
            roles = await said(leader), await said(standby)
            if roles[1].get("role") == "leader":
                leader, standby, roles = standby, leader, roles[::-1]
            return roles[0].get("role") == "leader" and roles[0]["has_standby"] and roles[1].get("role") == "standby"

        async def leads() -> bool:
            return (await said(standby)).get("role") == "leader"

        for number in range(FAILOVERS_COUNT):
            await until(is_followed)
            await redis.until_replicated()
            epoch = (await said(leader))["epoch"]
            await redis.fail_over()
            if number % 2:  # it has renewed its lock at the new primary
                await asyncio.sleep(LOCK_S)
                assert ((await said(leader))["role"], (await said(leader))["epoch"]) == ("leader", epoch)
            leader.process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            await until(leads)
            took_s.append(time.monotonic() - began_s)
            leader.process.send_signal(signal.SIGCONT)
    print("takeovers, s:", *(f"{each:.2f}" for each in took_s))
    assert max(took_s) <= LOCK_S + LATE_S
