"""A real Redis in which somebody else writes, or that loses data: a scheduler leads again, and says what was wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.measuring import measured_command
from tests.integration.support import CHAT, command, engine, get, metric, post
from tests.real.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path
    from typing import NoReturn

    from tests.integration.support import CommandProcess
    from tests.real.redis_server import RedisServer

pytestmark = [pytest.mark.usefixtures("redis_installed"), pytest.mark.timeout(240)]

LOCK_S = 1.0
LIMIT_S = 60.0
LOCK, EPOCH = "ta:{default}:leader", "ta:{default}:epoch"


class StoredCell:
    """Two schedulers with a store, and a gateway."""

    def __init__(self, redis: RedisServer, schedulers: list[CommandProcess], gateway: CommandProcess) -> None:
        self.redis = redis
        self.schedulers = schedulers
        self.gateway = gateway

    def store(self, *words: str) -> str:
        """Send a command to the store."""
        return asked(self.redis, *words)

    async def leader(self) -> CommandProcess | None:
        """Return who leads."""
        for each in self.schedulers:
            if (await told(each)).get("role") == "leader":
                return each
        return None

    async def until_followed(self) -> CommandProcess:
        """Wait until somebody leads, the other one stands by, and the gateway has a link; return the leader."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                leader = await self.leader()
                has_standby = leader is not None and (await told(leader)).get("has_standby")
                if leader is not None and has_standby and (await get(self.gateway.url, "/ready")).status == 200:
                    return leader
                await asyncio.sleep(0.05)

    async def turns(self, name: str, count: int = 5) -> None:
        """Run turns, each with a lease."""
        before = await metric(self.gateway.url, "fail_open_turns_total")
        for number in range(count):
            body = {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            answer = await post(self.gateway.url, f"/p/{name}-{number}{CHAT}", body)
            assert answer.status == 200, answer.body
        assert await metric(self.gateway.url, "fail_open_turns_total") == before


def asked(redis: RedisServer, *words: str) -> str:
    line = ["redis-cli", "-s", str(redis.folder / "redis.sock"), *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


async def told(scheduler: CommandProcess) -> dict[str, Any]:
    try:
        answer = await get(scheduler.url, "/internal/leader")
    except OSError:
        return {}
    return dict(json.loads(answer.body)) if answer.status == 200 else {}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def a_cell(require_real: Callable[[str], NoReturn], folder: Path) -> AsyncIterator[StoredCell]:
    with redis_server(require_real, folder) as redis:
        settings = {"PYTHONPATH": f"{redis.packages}:{os.environ.get('PYTHONPATH', '')}"}
        options = ("--listen", "127.0.0.1:0", "--store", redis.url, "--lock-s", str(LOCK_S))
        async with engine() as behind:
            start = [command("scheduler", *options, "--backends", behind.url, settings=settings) for _ in range(2)]
            async with start[0] as first, start[1] as second:
                urls = f"{first.url},{second.url}"
                carries = ("--port", "0", "--schedulers", urls, "--scheduler-patience-s", "45")
                async with command("gateway", *carries, settings=settings) as gateway:
                    cell = StoredCell(redis, [first, second], gateway)
                    await cell.until_followed()
                    await cell.turns("before")
                    yield cell


def said(cell: StoredCell, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for each in cell.schedulers for line in each.log.splitlines()]
    return [each for each in lines if each["event"] == event]


@pytest.mark.parametrize(
    "lasts_ms", [None, pytest.param(10**12, marks=pytest.mark.nightly)], ids=["for ever", "for years"]
)
async def test_a_stolen_lock_gets_an_end(
    lasts_ms: int | None, require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """The leader steps down, somebody leads again, and no turn runs without a lease."""
    async with a_cell(require_real, tmp_path) as cell:
        cell.store("SET", LOCK, "a stranger", *(("PX", str(lasts_ms)) if lasts_ms else ()))

        async def is_said() -> bool:
            return bool(said(cell, "store_damaged"))

        await until(is_said)
        assert "the lock of 'a stranger' had no end" in said(cell, "store_damaged")[0]["what"]
        left_ms = int(cell.store("PTTL", LOCK))
        assert left_ms <= (600_000 if lasts_ms else 1000 * LOCK_S)
        if lasts_ms:  # as the runbook says, for who does not want to wait
            cell.store("DEL", LOCK)
        await cell.until_followed()
        await cell.turns("after")


@pytest.mark.parametrize(
    "epoch",
    [
        "9" * 30,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("rubbish", "-7", "2147483647", "1e300")),
    ],
)
async def test_an_epoch_beyond_reason_is_written_again(
    epoch: str, require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """By the leader, which goes on to lead; or if that has ended, by the next one."""
    async with a_cell(require_real, tmp_path) as cell:
        leader = await cell.until_followed()
        before = (await told(leader))["epoch"]
        cell.store("SET", EPOCH, epoch)
        await cell.turns("during")

        async def is_mended() -> bool:
            return cell.store("GET", EPOCH) == str(before)

        await until(is_mended)
        assert ((await told(leader))["role"], (await told(leader))["epoch"]) == ("leader", before)
        leader.process.kill()
        cell.store("SET", EPOCH, epoch)
        other = next(each for each in cell.schedulers if each is not leader)

        async def leads() -> bool:
            return (await told(other)).get("role") == "leader"

        await until(leads)
        assert (await told(other))["epoch"] == before + 1
        await cell.turns("after")
        assert said(cell, "store_damaged")


async def test_a_leader_killed_after_its_store_was_wiped_leaves_counts_that_say_so(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    async with a_cell(require_real, tmp_path) as cell:
        leader = await cell.until_followed()
        assert await metric(leader.url, "scheduler_counts_may_miss") == 0
        other = next(each for each in cell.schedulers if each is not leader)
        leader.process.send_signal(signal.SIGSTOP)  # on a busy machine it would write all again before it is killed
        cell.store("FLUSHALL")
        leader.process.kill()

        async def leads() -> bool:
            return (await told(other)).get("role") == "leader"

        await until(leads)
        assert await metric(other.url, "scheduler_counts_may_miss") == 1
        assert (await told(other))["counts_may_miss"] is True
        await cell.turns("after")


async def test_a_wiped_store_alone_costs_no_count(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """Its leader writes all of it again, and the next one has it."""
    async with a_cell(require_real, tmp_path) as cell:
        leader = await cell.until_followed()
        other = next(each for each in cell.schedulers if each is not leader)
        cell.store("FLUSHALL")

        async def is_told_again() -> bool:
            return bool(cell.store("EXISTS", "ta:{default}:log") == "1" and said(cell, "store_is_back"))

        await until(is_told_again)
        await cell.until_followed()
        await cell.turns("between")
        leader.process.kill()

        async def leads() -> bool:
            return (await told(other)).get("role") == "leader"

        await until(leads)
        assert (await told(other))["counts_may_miss"] is False


async def test_through_a_gateway_no_large_request_outlasts_the_lock(
    require_real: Callable[[str], NoReturn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """55 MB of ids are refused by the gateway: the leader keeps its lock, and turns their leases."""
    ids = json.dumps({"program_ids": [f"p{number}" for number in range(5_000_000)]}).encode()
    assert len(ids) > 55 * 10**6
    with redis_server(require_real, tmp_path) as redis:
        monkeypatch.setenv("PYTHONPATH", f"{redis.packages}:{os.environ.get('PYTHONPATH', '')}")
        options = ("--listen", "127.0.0.1:0", "--store", redis.url, "--lock-s", "1.5")
        async with (
            engine() as behind,
            measured_command("scheduler", *options, "--backends", behind.url) as leader,
            measured_command("gateway", "--port", "0", "--schedulers", leader.url) as gateway,
        ):

            async def is_ready() -> bool:
                return (await get(gateway.url, "/ready")).status == 200

            await until(is_ready)
            epoch = (await get(leader.url, "/internal/leader")).json()["epoch"]
            body = {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            for path in ("/programs/release", "/sessions/batch_delete", "/leases"):
                refusing = asyncio.create_task(post(gateway.url, path, ids))
                for number in range(10):
                    assert (await post(gateway.url, f"/p/{number}{CHAT}", body)).status == 200
                assert (await refusing).status in (404, 413), path
            now = (await get(leader.url, "/internal/leader")).json()
            assert (now["role"], now["epoch"], now["store_answers"]) == ("leader", epoch, True)
            assert await metric(gateway.url, "fail_open_turns_total") == 0
            assert asked(redis, "GET", EPOCH) == str(epoch)
