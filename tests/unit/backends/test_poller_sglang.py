"""The poller on an SGLang: its health takes a while, and its capacity may be elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from tests.loopback import on_loopback
from thunderagent.backends import backend_of
from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.poller import Poller, PollerSettings, ReplicaEndpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

METRICS = "sglang:max_total_num_tokens 16000.0\nsglang:num_running_reqs 3.0\n"
DEADLINE_S = 0.5


@dataclass
class Engine:
    """An engine on a socket, whose answers a test sets; an info that is None is 404."""

    metrics: str | None = METRICS
    info: dict[str, str | None] = field(default_factory=dict)
    health_hangs: bool = False
    asked: list[str] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/health":
            while self.health_hangs:
                await asyncio.sleep(0.01)
            return web.Response()
        said = self.metrics if request.path == "/metrics" else self.info.get(request.path)
        return web.Response(text=said or "", status=404 if said is None else 200)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.router.add_get("/{path:.*}", engine.answer)
    async with on_loopback(app, shutdown_timeout=0) as engine.url:
        yield engine
        engine.health_hangs = False


@dataclass
class Listener:
    """Remembers its reports."""

    heard: list[str] = field(default_factory=list)
    readings: list[ReplicaReading] = field(default_factory=list)

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        self.readings.append(reading)

    def replica_up(self, replica_id: str) -> None:
        self.heard.append("up")

    def may_be_silent(self, replica_id: str) -> bool:
        return False

    def heard_ago_s(self, replica_id: str) -> float:
        return float("inf")

    def replica_lost(self, replica_id: str, why: str) -> None: ...

    def replica_down(self, replica_id: str, why: str, *, is_silent: bool) -> None:
        self.heard.append(why)


@contextlib.asynccontextmanager
async def polling(engine: Engine, kind: str = "sglang") -> AsyncIterator[Listener]:
    listener = Listener()
    poller = Poller(listener, PollerSettings(interval_s=0.02, deadline_s=DEADLINE_S, silence_limit_s=0.0))
    poller.add(ReplicaEndpoint("a", engine.url, backend_of(kind)))
    task = asyncio.create_task(poller.run())
    try:
        yield listener
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def polls(listener: Listener, count: int) -> None:
    target = len(listener.readings) + count
    async with asyncio.timeout(10):
        while len(listener.readings) < target:
            await asyncio.sleep(0.005)


async def test_an_engine_that_answers_for_its_metrics_is_not_silent(engine: Engine) -> None:
    """While it is paused its health does not answer; it stays up, and is read."""
    async with polling(engine) as listener:
        await polls(listener, 1)
        engine.health_hangs = True
        await polls(listener, 4)
        assert listener.heard == ["up"]
        engine.metrics = None  # the only answer now is a 404
        async with asyncio.timeout(10):
            while len(listener.heard) < 2:
                await asyncio.sleep(0.005)
        assert listener.heard[1].startswith("no answer within")


async def test_an_engine_whose_health_hangs_from_the_start_is_not_up(engine: Engine) -> None:
    """Metrics alone bring no engine up."""
    engine.health_hangs = True
    async with polling(engine) as listener:
        async with asyncio.timeout(10):
            while engine.asked.count("/metrics") < 3:
                await asyncio.sleep(0.005)
        assert listener.heard == []
        engine.health_hangs = False
        await polls(listener, 1)
        assert listener.heard == ["up"]


async def test_the_server_information_is_asked_only_while_the_metrics_lack_the_capacity(engine: Engine) -> None:
    """Before the first batch some versions report no capacity; afterwards there are no more requests."""
    engine.metrics = "sglang:num_running_reqs 3.0\n"
    engine.info = {"/server_info": '{"max_total_num_tokens": 4000, "dp_size": 2, "disable_radix_cache": false}'}
    async with polling(engine) as listener:
        await polls(listener, 2)
        assert set(listener.readings) == {ReplicaReading(capacity_tokens=8000, running_count=3, uncached_ranks_count=0)}
        engine.metrics = METRICS
        await polls(listener, 2)
        assert listener.readings[-1] == ReplicaReading(capacity_tokens=16_000, running_count=3, uncached_ranks_count=0)
        engine.asked.clear()
        await polls(listener, 2)
        assert "/server_info" not in engine.asked


@pytest.mark.parametrize("kind", ["sglang", "auto"])
async def test_a_disabled_radix_cache_is_known_of_each_process(engine: Engine, kind: str) -> None:
    """It is asked once, however many polls there are, and again of a process that began later."""
    engine.info = {"/server_info": '{"disable_radix_cache": true}'}
    engine.metrics = f"{METRICS}process_start_time_seconds 100.0\n"
    async with polling(engine, kind) as listener:
        await polls(listener, 25)
        assert engine.asked.count("/server_info") == 1
        assert {each.uncached_ranks_count for each in listener.readings} == {1}
        engine.info = {"/server_info": '{"disable_radix_cache": false}'}
        engine.metrics = f"{METRICS}process_start_time_seconds 200.0\n"
        async with asyncio.timeout(10):
            while listener.readings[-1].uncached_ranks_count != 0:
                await asyncio.sleep(0.005)


async def test_an_engine_that_does_not_say_it_is_asked_now_and_then(engine: Engine) -> None:
    """Some versions have no such word, and nothing is said of theirs."""
    engine.info = {"/server_info": '{"disable_radix_cache": "what"}'}
    async with polling(engine) as listener:
        await polls(listener, 25)
        assert 2 <= engine.asked.count("/server_info") <= 5
        assert {each.uncached_ranks_count for each in listener.readings} == {None}


@pytest.mark.parametrize("kind", ["sglang", "auto"])
async def test_an_older_engine_without_metrics_has_a_capacity_all_the_same(engine: Engine, kind: str) -> None:
    """Its path was another, and `auto` recognises the kind by it."""
    engine.metrics = None
    engine.info = {"/get_server_info": '{"max_total_num_tokens": 4000}'}
    async with polling(engine, kind) as listener:
        await polls(listener, 2)
        assert set(listener.readings) == {ReplicaReading(capacity_tokens=4000)}


async def test_an_engine_that_says_its_capacity_nowhere_is_up_without_one(engine: Engine) -> None:
    """Unknown is not zero."""
    engine.metrics = "sglang:max_total_num_tokens 0.0\n"
    engine.info = {"/server_info": "<html>"}
    async with polling(engine) as listener:
        await polls(listener, 2)
        assert set(listener.readings) == {ReplicaReading()}
        assert listener.heard == ["up"]
