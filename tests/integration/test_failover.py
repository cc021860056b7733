"""Replicas that die: turns go elsewhere before the first byte of an answer, never after it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from os import sysconf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from benchmarks.load import LoadSpec, run_programs
from tests.integration.support import (
    JSON_TYPE,
    CommandProcess,
    Gate,
    answers,
    ask,
    chunk,
    engine,
    fake_replica,
    head_bytes,
    metrics_of,
    running_proxy,
    shared_engine,
    stream_head,
    until,
    word,
    writes,
)
from tests.loopback import free_ports
from thunderagent.cli import main
from thunderagent.proxy.turns.forward import Forwarding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.support import Call

SLOW_POLLS = {"poll_interval_s": 30.0, "model_pools": False}
"""At this interval a turn, not a poll, finds out that a replica is gone. No turn waits to hear of models."""


async def test_a_lost_peer_of_a_turn_is_noticed_within_a_minute() -> None:
    """The kernel probes the connections to the client and to the engine, long before its own two hours."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call()
        ends = [(urlsplit(proxy.url).port, True), (urlsplit(replica.url).port, False)]
        await until(lambda: all(end in keepalive_timers_s() for end in ends))  # once what was sent is acknowledged
        timers_s = keepalive_timers_s()
        assert max(*timers_s[ends[0]], *timers_s[ends[1]]) <= 60
        gate.open()
        assert (await waiting).status == 200


def keepalive_timers_s() -> dict[tuple[int | None, bool], list[float]]:
    """Return when the kernel probes each connection next, by the known port, and whether it is the local one."""
    timers_s: dict[tuple[int | None, bool], list[float]] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        kind, when = timer.split(":")
        if (state, kind) == ("01", "02"):
            for address, is_local in ((local, True), (remote, False)):
                timers_s.setdefault((int(address[-4:], 16), is_local), []).append(int(when, 16) / sysconf("SC_CLK_TCK"))
    return timers_s


async def test_a_replica_that_refuses_connections_is_passed_over() -> None:
    """Every turn is served by the other one, the first as well as later ones."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        homes = {name: (await ask(proxy.url, name)).header("X-Replica-ID") for name in "abcdef"}
        assert set(homes.values()) == {one.replica_id, other.replica_id}
        await one.stop()
        served = await asyncio.gather(*(ask(proxy.url, name) for name in homes))
        assert {(answer.status, answer.header("X-Replica-ID")) for answer in served} == {(200, other.replica_id)}


async def test_a_turn_that_finds_its_replica_dead_takes_it_down() -> None:
    """Long before the next poll the program and all others are served elsewhere."""
    async with (
        fake_replica() as one,
        fake_replica() as other,
        running_proxy(one.url, other.url, up=0, **SLOW_POLLS) as proxy,
    ):
        for replica in (one, other):
            proxy.runtime.replica_up(replica.replica_id)
        for name in "abcdef":
            await ask(proxy.url, name)
        await one.stop()
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        for name in "abcdef":
            answer = await ask(proxy.url, name)
            assert (answer.status, answer.header("X-Replica-ID")) == (200, other.replica_id)
        assert loop.time() - begin_s < 20
        assert (await metrics_of(proxy.url))["thunderagent_replica_up"][one.replica_id,] == 0


@pytest.mark.parametrize(
    "pieces", [(), (b"HTTP/1.1 200 OK\r\ncontent-",), (b"garbage\r\n\r\n",)], ids=["nothing", "half a head", "garbage"]
)
async def test_a_turn_whose_replica_breaks_before_its_answer_is_tried_elsewhere(pieces: tuple[bytes, ...]) -> None:
    async with (
        fake_replica(writes(*pieces)) as broken,
        fake_replica() as healthy,
        running_proxy(broken.url, healthy.url) as proxy,
    ):
        served = [await ask(proxy.url, name) for name in "abcd"]
        assert {(answer.status, answer.header("X-Replica-ID")) for answer in served} == {(200, healthy.replica_id)}
        assert broken.calls


async def test_a_failed_attempt_is_no_latency_that_the_proxy_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica lost that time; what came before the first lease counts once."""
    added_s, lost_s, lost = 0.3, 0.5, []
    headers_of = Forwarding.headers_of

    def takes_long(*arguments: Any) -> Any:
        time.sleep(added_s)
        return headers_of(*arguments)

    async def closes_late(call: Call) -> None:
        begin_s = time.monotonic()
        await asyncio.sleep(lost_s)
        lost.append(time.monotonic() - begin_s)
        call.close()

    monkeypatch.setattr(Forwarding, "headers_of", takes_long)
    async with (
        fake_replica(closes_late) as broken,
        fake_replica() as healthy,
        running_proxy(broken.url, healthy.url) as proxy,
    ):
        turns_count, begin_s = 0, time.monotonic()
        while not broken.calls:
            assert (await ask(proxy.url, f"a-{turns_count}")).status == 200
            turns_count += 1
        took_s = time.monotonic() - begin_s
        counted_s = (await metrics_of(proxy.url))["thunderagent_added_latency_seconds_sum"][()]
        assert added_s * turns_count <= counted_s < took_s - sum(lost)


@pytest.mark.parametrize(
    ("streamed", "pieces"),
    [
        (True, (stream_head(), chunk(word("one")))),
        (True, (stream_head(),)),
        (False, (head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("content-length", "9")]), b"{")),
    ],
)
async def test_an_answer_that_has_begun_is_never_begun_again(streamed: bool, pieces: tuple[bytes, ...]) -> None:
    """The other replica never sees the turn."""
    async with (
        fake_replica(writes(*pieces)) as one,
        fake_replica(writes(*pieces)) as other,
        running_proxy(one.url, other.url) as proxy,
    ):
        answer = await ask(proxy.url, "a", stream=streamed)
        assert not answer.whole or answer.status == 502
        assert len(one.calls) + len(other.calls) == 1


async def test_tries_are_limited() -> None:
    """However many replicas are broken, a turn visits no more than configured."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_replica(writes())) for _ in range(5)]
        proxy = await stack.enter_async_context(running_proxy(*(each.url for each in replicas), retries_count=2))
        answer = await ask(proxy.url, "a")
        assert answer.status == 502
        assert sum(len(replica.calls) for replica in replicas) == 3


async def test_a_dead_replica_stalls_nobody_elsewhere() -> None:
    """A hanging replica and its polls that time out do not affect turns on the other replica."""

    async def hang(call: Call) -> None:
        await call.left.wait()

    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        homes = {name: (await ask(proxy.url, name)).header("X-Replica-ID") for name in "abcdef"}
        one.behaviour = hang
        stuck = [asyncio.create_task(ask(proxy.url, name)) for name in homes if homes[name] == one.replica_id]
        await until(lambda: len(one.calls) >= len(stuck))
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        lively = [name for name in homes if homes[name] == other.replica_id]
        for _ in range(10):
            served = await asyncio.gather(*(ask(proxy.url, name) for name in lively))
            assert {answer.header("X-Replica-ID") for answer in served} == {other.replica_id}
        assert loop.time() - begin_s < 20
        await one.stop()
        assert {(await each).header("X-Replica-ID") for each in stuck} == {other.replica_id}


async def test_a_replica_that_closes_idle_connections_costs_no_turn() -> None:
    """Each turn meets a kept-alive connection that the replica has just closed."""

    async def answer_and_close(call: Call) -> None:
        await answers()(call)
        call.close()

    async with fake_replica(answer_and_close) as replica, running_proxy(replica.url) as proxy:
        for _ in range(30):
            assert (await ask(proxy.url, "a")).status == 200


LOAD = LoadSpec(
    programs=8,
    turns=(3, 5),
    system_tokens=50,
    first_prompt_tokens=(100, 300),
    output_tokens=(5, 20),
    tool_result_tokens=(50, 100),
    tool_mean_s=0.1,
    model="simulated",
    tries=8,
    retry_after_s=0.1,
    turn_timeout_s=20,
)


async def test_every_program_finishes_though_a_replica_is_killed_and_restarted() -> None:
    """Engines as processes, one killed with -9 in mid-load and started again on its port."""
    policy = {"policy": "thunderagent", "policy_args": {"delta_s": "0.2"}}
    async with engine(kv_tokens=4000, profile="demo") as one, contextlib.AsyncExitStack() as stack:
        (port,) = free_ports(1)  # so that nobody else gets it meanwhile
        other = await stack.enter_async_context(engine(kv_tokens=4000, profile="demo", port=port))
        async with running_proxy(one.url, other.url, **policy) as proxy:
            load = asyncio.create_task(run_programs(LOAD, proxy.url, 24, is_proxy=True))
            await until(lambda: proxy.runtime.outcome_counts["finished"] > 15)
            await kill(other)
            await proxy.up(1)
            await until(lambda: proxy.runtime.outcome_counts["finished"] > 30)
            async with engine(kv_tokens=4000, profile="demo", port=port):
                await proxy.up(2)
                result = await load
        assert result.finished_program_count == 24
        assert result.failed_turn_count == 0
        assert result.release_error_count == 0
        assert len(proxy.runtime.scheduler.programs) == 0


async def kill(process: CommandProcess) -> None:
    process.process.kill()
    await process.process.wait()


@pytest.fixture(scope="module")
def short_engine_urls() -> Iterator[list[str]]:
    """Run two engines of short memory."""
    with shared_engine(kv_tokens=1500) as one, shared_engine(kv_tokens=1500) as other:
        yield [one, other]


@pytest.mark.parametrize("policy", ["breakeven", "thunderagent", "passthrough", "sticky", "cap"])
async def test_a_load_leaves_no_program_and_its_log_replays(
    policy: str, short_engine_urls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short memory on two engines: every program finishes, and `thunderagent replay` decides the same again."""
    log = tmp_path / "events"
    config = {"policy": policy, "event_log": log}
    if policy == "thunderagent":
        config |= {"policy_args": {"delta_s": "0.01", "half_life_s": "10"}, "tick_s": 0.01}
    async with running_proxy(*short_engine_urls, **config) as proxy:
        spec = replace(LOAD, tool_mean_s=0.05, programs=16)
        result = await run_programs(spec, proxy.url, 32, is_proxy=True)
        assert (result.finished_program_count, result.failed_turn_count) == (32, 0)
        if policy == "thunderagent":
            decisions = {decision for decision, _ in (await metrics_of(proxy.url))["thunderagent_decisions_total"]}
            assert decisions >= {"hold", "pause", "restore"}
    assert main(["replay", str(log)]) == 0
    said = capsys.readouterr().out
    assert "every decision is the same" in said
    assert "within 1/2/3 times their ideal time: " in said
