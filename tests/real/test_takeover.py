"""Two schedulers on a real Redis, two gateways, and clients that stream and wait: the leader fails, nothing is lost."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from tests.integration.support import ask, command, engine, events_of, get, metric, metrics_of
from tests.loopback import free_ports
from tests.real.redis_server import redis_server
from thunderagent.errors import FencedError, StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
    from typing import NoReturn

    from tests.integration.support import Answer, CommandProcess
    from tests.real.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("redis_installed")

CLIENTS_COUNT = 12
LOCK_S = 8.0
TOOL_S = 0.3

ROOT = Path(__file__).parents[2]
EARLIER = "f37a8ec2"
"""The first version with gateways, a store and a standby; none is released yet. Later this is the last release."""


class Cell:
    """Two schedulers, two gateways, an engine, and clients that take turns one after another."""

    def __init__(self, redis: RedisServer, behind: CommandProcess, within: Sequence[str]) -> None:
        self.redis = redis
        self.within = within
        """The command that runs the first scheduler and the first gateway."""
        self.behind = behind
        self.ports = free_ports(2)
        self.schedulers: dict[int, CommandProcess] = {}
        self.stack = AsyncExitStack()
        self.fronts: list[CommandProcess] = []
        self.answers: list[Answer] = []
        self.answered_s: list[float] = []
        self.stop = asyncio.Event()

    async def start(self, port: int) -> None:
        some_wait = ("--policy", "cap", "--policy-arg", "n=6", "--idle-limit-s", "0.1", "--tick-s", "0.1")
        # A leader that steps down waits for no turn of its gateways: with this grace it would never be a standby again.
        options = ("--backends", self.behind.url, "--lock-s", str(LOCK_S), "--grace-s", "3600", *some_wait)
        quick = ("--poll-interval-s", "0.2", "--gateway-lost-s", "5", "--store", self.redis.url)
        environment = {"PYTHONPATH": self.redis.packages}
        within = self.within if port == self.ports[0] else ()
        listen = ("--listen", f"127.0.0.1:{port}")
        process = command("scheduler", *listen, *quick, *options, settings=environment, within=within)
        self.schedulers[port] = await self.stack.enter_async_context(process)

    async def begin(self) -> None:
        urls = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        for port in self.ports:
            await self.start(port)
            await self.leader()
        for within in (self.within, ()):
            front = command("gateway", "--port", "0", "--schedulers", urls, within=within)
            self.fronts.append(await self.stack.enter_async_context(front))
        for front in self.fronts:
            await front.ready()

    async def said(self, port: int) -> dict[str, Any]:
        """Return a scheduler's status; empty if it does not answer."""
        try:
            async with asyncio.timeout(1.0):
                answer = await get(f"http://127.0.0.1:{port}", "/internal/leader")
        except (OSError, TimeoutError):
            return {}
        return dict(json.loads(answer.body)) if answer.status == 200 else {}

    async def status(self, port: int) -> dict[str, Any]:
        """Wait until a scheduler answers; return its status."""
        async with asyncio.timeout(60):
            while not (said := await self.said(port)):
                await asyncio.sleep(0.05)
        return said

    async def leader(self) -> int:
        """Wait until one leads; return its port. A resumed one may not know yet that its epoch is over."""
        async with asyncio.timeout(60):
            while True:
                said = {port: await self.said(port) for port in self.schedulers}
                epochs = {port: each["epoch"] for port, each in said.items() if each.get("role") == "leader"}
                if epochs:
                    return max(epochs, key=lambda port: epochs[port])
                await asyncio.sleep(0.02)

    async def until_led_by(self, port: int) -> None:
        """Wait until this one leads: a handover is answered before the old leader gives up."""
        async with asyncio.timeout(60):
            while await self.leader() != port:
                await asyncio.sleep(0.05)

    async def until_followed(self) -> None:
        """Wait until the other scheduler follows, and the leader knows."""
        async with asyncio.timeout(60):
            while True:
                leader = await self.leader()
                others = [await self.said(port) for port in self.schedulers if port != leader]
                stand_by = others and all(each.get("role") == "standby" for each in others)
                if stand_by and (await self.said(leader)).get("has_standby"):
                    return
                await asyncio.sleep(0.05)

    async def talk(self, number: int) -> None:
        """Stream turn after turn of one program."""
        front = self.fronts[number % 2]
        while not self.stop.is_set():
            more = {"stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}
            self.answers.append(await ask(front.url, f"p{number}", **more))
            self.answered_s.append(time.monotonic())
            await asyncio.sleep(TOOL_S)  # in which it loses its claim, so that another program gets a turn

    async def more(self, count: int) -> None:
        """Wait for a number of further answers."""
        wanted_count = len(self.answers) + count
        async with asyncio.timeout(60):
            while len(self.answers) < wanted_count:
                await asyncio.sleep(0.02)

    async def gap_after(self, moment_s: float) -> float:
        """Return the longest time without an answer since a moment."""
        await self.more(2 * CLIENTS_COUNT)
        times = [moment_s, *(each for each in self.answered_s if each > moment_s)]
        return max(after - before for before, after in pairwise(times))

    def tell(self) -> None:
        """Print recent logs of the processes, to explain a failure."""
        for process in (*self.schedulers.values(), *self.fronts):
            lines = [
                line for line in process.log.splitlines() if '"event":"turn"' not in line and "restore" not in line
            ]
            print(process.url, *lines[-12:], sep="\n")

    async def check(self) -> None:
        """Check that every turn was answered whole and counted once, and that nothing is left anywhere."""
        leader = f"http://127.0.0.1:{await self.leader()}"
        async with asyncio.timeout(60):
            while any([*[await metric(front.url, "gateway_turns_told") for front in self.fronts]]):
                await asyncio.sleep(0.05)
        assert {answer.status for answer in self.answers} == {200}
        assert all(answer.whole and events_of(answer.body)[-1] == "[DONE]" for answer in self.answers)
        for url in (leader, *(front.url for front in self.fronts)):
            assert await metric(url, "leases_active") == 0
            assert await metric(url, "turns_held") == 0
        assert await metric(leader, "turns_total", "finished") == len(self.answers)
        of_engine = await metrics_of(self.behind.url)
        for ours, theirs in (("prompt_tokens_total", "prompt"), ("output_tokens_total", "generation")):
            assert await metric(leader, ours) == sum(of_engine[f"vllm:{theirs}_tokens_total"].values())
        programs = json.loads((await get(leader, "/programs")).body)["programs"]
        assert {each["program_id"] for each in programs} == {f"p{number}" for number in range(CLIENTS_COUNT)}
        assert sum(each["turn_count"] for each in programs) == len(self.answers)
        for front in self.fronts:
            assert await metric(front.url, "fail_open_turns_total") == 0
            assert "Traceback" not in front.log


@asynccontextmanager
async def cell(
    require_real: Callable[[str], NoReturn], folder: Path, within: Sequence[str] = ()
) -> AsyncIterator[Cell]:
    with redis_server(require_real, folder, keeps=True) as redis:
        async with engine("--speed", "4", kv_tokens=64_000, profile="demo") as behind:
            running = Cell(redis, behind, within)
            async with running.stack:
                async with asyncio.TaskGroup() as group:
                    await running.begin()
                    await running.until_followed()
                    for number in range(CLIENTS_COUNT):
                        group.create_task(running.talk(number))
                    await running.more(2 * CLIENTS_COUNT)
                    try:
                        yield running
                    except BaseException:
                        running.tell()
                        raise
                    finally:
                        running.stop.set()
                await running.check()


@pytest.fixture
def server(
    require_real: Callable[[str], NoReturn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisServer]:
    """A Redis, whose client can be imported."""
    with redis_server(require_real, tmp_path) as server:
        monkeypatch.syspath_prepend(server.packages)
        yield server


def store_at(url: str) -> Any:
    """Return a `RedisStore`, which cannot be imported before its client can."""
    return importlib.import_module("thunderagent.scale.leader.redis_store").RedisStore(url, "c", LOCK_S)


async def test_a_log_that_does_not_end_as_it_was_written_is_not_written_on(server: RedisServer) -> None:
    """A restart with older data between two commands does that: no command failed, so nothing else would notice."""
    client = importlib.import_module("redis.asyncio").Redis.from_url(server.url)
    store = store_at(server.url)
    assert await store.take("a", "", 6) == 7
    await store.append("a", 7, b"first")
    await store.trim(await store.append("a", 7, b"second"))
    last = await store.append("a", 7, b"third")
    await client.xdel("ta:{c}:log", last)
    with pytest.raises(StoreError, match="lost"):
        await store.append("a", 7, b"fourth")
    await store.append("a", 7, b"all")
    assert [data for _, data in (await store.look("0")).entries] == [b"second", b"all"]

    await client.set("ta:{c}:epoch", 6)
    with pytest.raises(StoreError, match="lost"):
        await store.append("a", 7, b"fifth")
    await client.set("ta:{c}:epoch", 8)
    with pytest.raises(FencedError):
        await store.append("a", 7, b"fifth")
    await store.close()
    await client.aclose()


async def test_candidate_cancelled_while_it_asks_the_store_ends(server: RedisServer) -> None:
    """This holds in every turn of the loop: the client missed the cancellation in every second one."""
    store = store_at(server.url)
    cancelled_count = 0
    for turns_count in [*range(12)] * 20:
        asking = asyncio.create_task(store.has_standby("a"))
        for _ in range(turns_count):
            await asyncio.sleep(0)
        if asking.cancel():
            await asyncio.wait([asking])
            assert asking.cancelled()
            cancelled_count += 1
    assert cancelled_count
    await store.close()


@pytest.mark.usefixtures("server")
def test_a_store_that_ends_connections_at_once_is_away() -> None:
    """It may end them at any time. uvloop raises an error of its own when the client writes after that."""

    async def look() -> None:
        turns_count = 0

        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(turns_count):
                await asyncio.sleep(0)
            writer.transport.abort()

        async with await asyncio.start_server(end, "127.0.0.1", 0) as listening:
            store = store_at("redis://{}:{}".format(*listening.sockets[0].getsockname()))
            for turns_count in [*range(6)] * 5:  # noqa: B007 - `end` reads it
                with pytest.raises(StoreError, match="the store refused"):
                    await store.look("0")
            await store.close()

    uvloop.run(look())


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*2\r\n$1\r\na\r\n$1\r\nb\r\n", b"-NO\r\n", b"\xff\r\n"]
)
@pytest.mark.usefixtures("server")
async def test_a_store_that_answers_as_no_redis_does_is_away(answer: bytes) -> None:
    """Whatever it answers, a scheduler gets a `StoreError` or a value, and goes on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(answer * (data.count(b"\r\n*") + 1))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        store = store_at("redis://{}:{}".format(*listening.sockets[0].getsockname()))
        refused_count = 0
        calls: list[Callable[[], Awaitable[object]]] = [
            partial(store.look, "0"),
            partial(store.take, "a", "", 0),
            partial(store.renew, "a", 1),
            partial(store.append, "a", 1, b"entry"),
            partial(store.trim, "1-0"),
            partial(store.give_up, "a"),
            partial(store.stand_by, "a"),
            partial(store.has_standby, "a"),
            store.warnings,
        ]
        for call in calls:
            try:
                await call()
            except StoreError:
                refused_count += 1
        assert refused_count
        await store.close()


async def test_a_scheduler_is_not_its_own_standby(server: RedisServer) -> None:
    """Its announcements from before it led do not count."""
    store = store_at(server.url)
    assert not await store.has_standby("a")
    await store.stand_by("a")
    assert not await store.has_standby("a")
    assert await store.has_standby("b")
    await store.close()


async def hand_over(front: CommandProcess) -> None:
    command = (sys.executable, "-m", "thunderagent", "handover", "--url", front.url)
    assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0


def within_version(commit: str, folder: Path, require_real: Callable[[str], NoReturn]) -> Sequence[str]:
    """Extract an earlier version of the package into a folder; return a command prefix that runs with it."""
    archive = subprocess.run(["git", "archive", commit, "thunderagent"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        require_real(f"this checkout does not have {commit}: {archive.stderr.decode()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    within = ("env", "-C", str(folder))
    which = (*within, sys.executable, "-c", "import thunderagent; print(thunderagent.__file__)")
    assert subprocess.run(which, capture_output=True, text=True, check=True).stdout.startswith(str(folder))
    return within


async def test_a_store_that_is_full_changes_nobodys_place(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """The leader continues without it past the end of its lock, and still leads when there is room again."""
    async with cell(require_real, tmp_path) as running:
        leader = await running.leader()
        epoch = (await running.status(leader))["epoch"]
        client = ["redis-cli", "-s", str(running.redis.folder / "redis.sock"), "CONFIG", "SET", "maxmemory"]
        subprocess.run([*client, "1"], check=True, capture_output=True)
        moment_s = time.monotonic()
        async with asyncio.timeout(60):
            while (await running.status(leader))["store_answers"] or time.monotonic() < moment_s + 1.5 * LOCK_S:
                await asyncio.sleep(0.05)
        await running.more(2 * CLIENTS_COUNT)
        subprocess.run([*client, "0"], check=True, capture_output=True)
        await running.until_followed()
        assert await running.leader() == leader
        assert (await running.status(leader))["epoch"] == epoch
        for each in running.schedulers.values():
            assert any("store_is_away" in line and "maxmemory" in line for line in each.log.splitlines())


async def test_two_versions_run_side_by_side(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """An earlier scheduler and gateway beside current ones: an upgrade and a downgrade, while clients stream."""
    (tmp_path / "earlier").mkdir()
    within = within_version(EARLIER, tmp_path / "earlier", require_real)
    async with cell(require_real, tmp_path, within) as running:
        earlier, today = running.ports
        for next_one in (earlier, today, earlier):
            if await running.leader() != next_one:
                await hand_over(running.fronts[0])
                await running.more(2 * CLIENTS_COUNT)
            await running.until_led_by(next_one)
            await running.until_followed()


async def test_nothing_is_lost_whoever_leads(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """The leader is killed, hands over, is paused, and is killed again just after a killed Redis is back."""
    gaps_s: dict[str, float] = {}
    async with cell(require_real, tmp_path) as running:
        first = await running.leader()
        moment_s = time.monotonic()
        running.schedulers[first].process.kill()
        gaps_s["killed"] = await running.gap_after(moment_s)
        assert await running.leader() != first
        await running.start(first)
        await running.until_followed()

        moment_s = time.monotonic()
        await hand_over(running.fronts[0])
        gaps_s["handed over"] = await running.gap_after(moment_s)
        await running.until_led_by(first)
        await running.until_followed()

        moment_s = time.monotonic()
        os.kill(running.schedulers[first].process.pid, signal.SIGSTOP)
        gaps_s["paused"] = await running.gap_after(moment_s)
        os.kill(running.schedulers[first].process.pid, signal.SIGCONT)
        second = next(port for port in running.ports if port != first)
        await running.until_led_by(second)
        await running.until_followed()

        moment_s = time.monotonic()
        running.redis.kill()
        gaps_s["without a store"] = await running.gap_after(moment_s)
        running.redis.start()
        assert await running.leader() == second
        await running.until_followed()
        running.schedulers[second].process.kill()
        await running.more(2 * CLIENTS_COUNT)
    print("longest time without an answer:", {name: f"{gap_s:.2f} s" for name, gap_s in gaps_s.items()})
