"""Replicas that fail turns although their health looks fine: time-outs, failover, the breaker, no storm of retries."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Gate,
    Wire,
    answers,
    ask,
    chunk,
    events_of,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    stream_head,
    turn,
    until,
    word,
    writes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Call, FakeReplica, RunningProxy

BREAKS = {"breaker_failure_count": 3, "breaker_backoff_s": 0.2, "retry_budget_ratio": 1.0}


@contextlib.asynccontextmanager
async def two_replicas(**config: Any) -> AsyncIterator[tuple[FakeReplica, FakeReplica, RunningProxy]]:
    """Run a replica that closes connections before it answers, a healthy one, and a proxy."""
    async with (
        fake_replica(writes()) as broken,
        fake_replica() as healthy,
        running_proxy(broken.url, healthy.url, policy="passthrough", policy_args={}, **config) as proxy,
    ):
        yield broken, healthy, proxy


async def breaker_of(proxy: RunningProxy, replica: FakeReplica) -> dict[str, Any]:
    reports = (await get(proxy.url, "/replicas")).json()["replicas"]
    return {report["replica_id"]: report for report in reports}[replica.replica_id]


async def trip(proxy: RunningProxy, replica: FakeReplica) -> None:
    """Make turns until the replica gets none any more."""
    for number in range(30):
        assert (await ask(proxy.url, f"trip-{number}")).status == 200
        if (await breaker_of(proxy, replica))["breaker"] == "open":
            return
    raise AssertionError("the breaker never opened")


async def eight_turns(proxy: RunningProxy, healthy: FakeReplica) -> list[asyncio.Task[Any]]:
    """Send turns that are all granted before any is answered, so each of two replicas gets four."""
    gate = Gate()
    healthy.behaviour = gate
    turns = [asyncio.create_task(ask(proxy.url, f"probe-{number}")) for number in range(8)]
    await until(lambda: proxy.runtime.leases_count == 8)
    gate.open()
    return turns


# --- time-outs


async def test_a_replica_that_hangs_is_passed_over() -> None:
    """It takes the request and never answers: the turn goes elsewhere, and its request there is cancelled."""
    async with (
        fake_replica(Gate()) as hangs,
        fake_replica() as healthy,
        running_proxy(hangs.url, healthy.url, first_byte_timeout_s=1.5, silence_timeout_s=60.0) as proxy,
    ):
        served = await asyncio.gather(*(ask(proxy.url, name) for name in "abcdef"))
        assert {(answer.status, answer.header("X-Replica-ID")) for answer in served} == {(200, healthy.replica_id)}
        assert hangs.calls
        await until(lambda: all(call.left.is_set() for call in hangs.calls))


async def test_where_all_hang_it_is_a_504_after_so_many_tries() -> None:
    async with (
        fake_replica(Gate()) as one,
        fake_replica(Gate()) as other,
        running_proxy(one.url, other.url, first_byte_timeout_s=0.05) as proxy,
    ):
        answer = await ask(proxy.url, "a")
        assert (answer.status, answer.error["code"]) == (504, "first_byte_timeout")
        assert len(one.calls) + len(other.calls) == 3


async def test_after_the_first_byte_the_limit_between_two_bytes_counts() -> None:
    """The limit for the first byte no longer counts: a slow answer is complete, a stopped one is broken off."""

    async def slow(call: Call) -> None:
        goes_on = b"go on" in call.body
        call.write(stream_head())
        for _ in range(3 if goes_on else 1):
            await asyncio.sleep(0.5)
            call.write(chunk(word("x")))
        if goes_on:
            call.write(b"0\r\n\r\n")

    limits = {"first_byte_timeout_s": 1.0, "silence_timeout_s": 2.0}
    async with fake_replica(slow) as replica, running_proxy(replica.url, **limits) as proxy:
        assert (await ask(proxy.url, "a", stream=True, content="go on")).whole
        answer = await ask(proxy.url, "a", stream=True)
        assert not answer.whole
        assert events_of(answer.body)[-1]["error"]["code"] == "replica_timeout"
        assert len(replica.calls) == 2


@pytest.mark.parametrize("before", [[], [stream_head(), chunk(word("one"))]], ids=["no byte", "some bytes"])
async def test_an_answer_that_takes_too_long_in_all_is_cut(before: list[bytes]) -> None:
    """It gets 504 before the head, an event after it; the replica is left either way, and nothing is tried again."""

    async def drip(call: Call) -> None:
        await call.write_apart(*before)
        while before and not call.left.is_set():
            call.write(chunk(word("more")))
            await asyncio.sleep(0.02)
        await call.left.wait()

    async with fake_replica(drip) as replica, running_proxy(replica.url, total_timeout_s=1.5) as proxy:
        answer = await ask(proxy.url, "a", stream=True)
        if before:
            assert not answer.whole
            assert events_of(answer.body)[-1]["error"]["code"] == "total_timeout"
        else:
            assert (answer.status, answer.error["code"]) == (504, "total_timeout")
        await asyncio.wait_for((await replica.call()).left.wait(), DEADLINE_S)
        assert len(replica.calls) == 1


async def test_a_connection_that_is_not_made_in_time_is_a_504_or_a_failover() -> None:
    """The backlog is full: connections are neither accepted nor refused."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # fill the backlog
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = "http://{}:{}".format(*full.getsockname())
        async with running_proxy(url, up=0, connect_timeout_s=0.1, retries_count=0, model_pools=False) as proxy:
            proxy.runtime.replica_up(url.removeprefix("http://"))
            answer = await ask(proxy.url, "a")
            assert (answer.status, answer.error["code"]) == (504, "connect_timeout")
        async with (
            fake_replica() as healthy,
            running_proxy(url, healthy.url, up=1, connect_timeout_s=1.5, model_pools=False) as proxy,
        ):
            proxy.runtime.replica_up(url.removeprefix("http://"))
            served = await asyncio.gather(*(ask(proxy.url, name) for name in "abcd"))
            assert {(answer.status, answer.header("X-Replica-ID")) for answer in served} == {(200, healthy.replica_id)}


# --- the breaker


async def test_a_replica_that_fails_turn_after_turn_gets_none_for_a_while() -> None:
    """Its breaker says for how long."""
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        assert failures_count == 3
        report = await breaker_of(proxy, broken)
        assert report["up"] is True
        assert 0 < report["breaker_retry_in_s"] <= 60
        assert (await metrics_of(proxy.url))["thunderagent_replica_tripped"] == {
            (broken.replica_id,): 1,
            (healthy.replica_id,): 0,
        }
        for number in range(10):
            assert (await ask(proxy.url, f"meanwhile-{number}")).header("X-Replica-ID") == healthy.replica_id
        assert len(broken.calls) == failures_count


async def test_a_tripped_replica_is_asked_for_its_models_only_if_it_is_the_only_one() -> None:
    """It may hang; another one of its pool has them, too."""
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour, healthy.behaviour = (answers({"data": [{"id": name}]}) for name in ("late", "well"))

        async def names() -> list[str]:
            return [model["id"] for model in (await get(proxy.url, "/v1/models")).json()["data"]]

        assert await names() == ["well"]
        assert len(broken.calls) == failures_count
        await post(proxy.url, f"/replicas/{healthy.replica_id}/drain", {})
        assert await names() == ["late", "well"]


async def test_a_replica_whose_while_is_over_gets_one_turn() -> None:
    """After that turn is answered, it gets all of its share again."""
    async with two_replicas(**BREAKS) as (broken, _, proxy):
        await trip(proxy, broken)
        broken.behaviour = answers()
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        assert (await breaker_of(proxy, broken))["breaker"] == "half_open"
        async with asyncio.timeout(DEADLINE_S):
            number = 0
            while (await ask(proxy.url, f"after-{number}")).header("X-Replica-ID") != broken.replica_id:
                number += 1
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["breaker_retry_in_s"]) == ("closed", None)


async def test_turns_that_chose_their_replica_count_too() -> None:
    """Each of them fails there once and is not tried elsewhere; one that is answered there closes the breaker again."""
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 1.0}) as (broken, healthy, proxy):
        path = f"/workers/{broken.replica_id}{CHAT}"
        for number in range(3):
            answer = await post(proxy.url, path, turn("p"))
            told = [answer.header(name) for name in ("X-Replica-ID", "X-Hold-Ms", "X-Program-ID")]
            assert (answer.status, told) == (502, [broken.replica_id, "0", None])
            assert len(broken.calls) == number + 1
        assert (await breaker_of(proxy, broken))["breaker"] != "closed"
        assert not healthy.calls
        broken.behaviour = answers()
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        assert (await post(proxy.url, path, turn("p"))).status == 200
        assert (await breaker_of(proxy, broken))["breaker"] == "closed"


async def test_a_replica_that_is_half_open_is_tried_with_one_turn() -> None:
    """The others that were granted there wait for its outcome, and go elsewhere when it fails: they were never sent."""
    gate = Gate(after=())
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 2.0}) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour = gate
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        turns = await eight_turns(proxy, healthy)
        await until(lambda: len(broken.calls) == failures_count + 1)
        await until(lambda: sum(task.done() for task in turns) == 4)  # those granted on the healthy one
        assert len(broken.calls) == failures_count + 1
        broken.calls[-1].close()
        answered = await asyncio.gather(*turns)
        assert {(answer.status, answer.header("X-Replica-ID")) for answer in answered} == {(200, healthy.replica_id)}
        assert len(broken.calls) == failures_count + 1
        report = await breaker_of(proxy, broken)
        assert report["breaker"] == "open"
        assert report["breaker_retry_in_s"] > 2.0, "the backoff did not grow"


async def test_when_the_probe_is_answered_those_that_waited_go_on() -> None:
    gate = Gate(after=(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",))
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour = gate
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        turns = await eight_turns(proxy, healthy)
        await until(lambda: sum(task.done() for task in turns) == 4)
        gate.open()
        assert {answer.status for answer in await asyncio.gather(*turns)} == {200}
        assert len(broken.calls) == failures_count + 4


async def test_a_probe_whose_client_leaves_makes_way_for_another() -> None:
    gate = Gate(after=(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",))
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour = gate
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        async with contextlib.AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(Wire.open(proxy.url)) for _ in range(4)]
            for number, wire in enumerate(wires):
                wire.send("POST", CHAT, [], json.dumps(turn(f"probe-{number}")).encode())
            await until(lambda: len(broken.calls) == failures_count + 1)
            for wire in wires:
                await wire.leave()
        await until(broken.calls[-1].left.is_set)
        await until(lambda: proxy.runtime.leases_count == 0)
        gate.open()
        async with asyncio.timeout(DEADLINE_S):
            while (await breaker_of(proxy, broken))["breaker"] != "closed":
                assert (await ask(proxy.url, f"again-{len(broken.calls) + len(healthy.calls)}")).status == 200


async def test_the_last_replica_is_never_taken_away() -> None:
    """Failing there is no worse than waiting: turns fail at once, and the first one that can be served is served."""
    async with (
        fake_replica(writes()) as broken,
        running_proxy(broken.url, **BREAKS, retries_count=0) as proxy,
    ):
        for _ in range(8):
            answer = await ask(proxy.url, "a")
            assert (answer.status, answer.error["code"]) == (502, "replica_closed_early")
        broken.behaviour = answers()
        assert (await ask(proxy.url, "a")).status == 200


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable", "400 Bad Request"])
async def test_what_an_engine_answers_is_no_failure(status: str) -> None:
    """Every status is the client's affair; otherwise a client could take one replica after the other away."""
    async with two_replicas(**BREAKS) as (broken, _, proxy):
        broken.behaviour = answers({"error": "no"}, status=status)
        for number in range(12):
            await ask(proxy.url, str(number))
        assert (await breaker_of(proxy, broken))["breaker"] == "closed"


async def test_a_breaker_may_be_switched_off() -> None:
    async with two_replicas(**{**BREAKS, "breaker_failure_count": 0}) as (broken, _, proxy):
        for number in range(12):
            assert (await ask(proxy.url, str(number))).status == 200
        assert (await breaker_of(proxy, broken))["breaker"] == "closed"
        assert len(broken.calls) > 4


async def test_a_replica_that_went_down_begins_anew() -> None:
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, _, proxy):
        await trip(proxy, broken)
        await broken.stop()
        await proxy.up(1)
        await until(lambda: not proxy.runtime.scheduler.replicas[broken.replica_id].up)
        broken.behaviour = answers()
        await broken.start()
        await proxy.up(2)
        assert (await breaker_of(proxy, broken))["breaker"] == "closed"


# --- the budget


async def test_a_client_that_tries_again_itself_gets_fewer_of_our_tries() -> None:
    """A client that tries three times causes 3 + 2 + 1 tries in all, not 9."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_replica(writes())) for _ in range(4)]
        urls = [replica.url for replica in replicas]
        proxy = await stack.enter_async_context(running_proxy(*urls, breaker_failure_count=0))
        for count in range(3):
            answer = await post(proxy.url, CHAT, turn("a"), ("x-stainless-retry-count", str(count)))
            assert answer.status == 502
        assert sum(len(replica.calls) for replica in replicas) == 6


async def test_tries_of_all_turns_together_are_limited() -> None:
    """When every replica fails, they are at most a hundred, or a fifth of the turns, whatever each turn has left."""
    async with (
        fake_replica(writes()) as one,
        fake_replica(writes()) as other,
        running_proxy(one.url, other.url, breaker_failure_count=0) as proxy,
    ):
        for _ in range(15):
            answered = await asyncio.gather(*(ask(proxy.url, str(number)) for number in range(20)))
            assert {answer.status for answer in answered} == {502}
        assert len(one.calls) + len(other.calls) == 300 + 100
        retries = (await metrics_of(proxy.url))["thunderagent_retries_total"]
        assert retries["made",] == 100
        assert retries["over_budget",] > 100


async def test_a_replica_killed_in_mid_turn_fails_over_or_is_one_clean_error() -> None:
    """Before the first byte turns go elsewhere, each once; after it they end with one event."""
    hold = Gate([stream_head(), chunk(word("one"))])

    async def behave(call: Call) -> None:
        await (hold if call.json()["messages"][0]["content"] == "begun" else Gate())(call)

    async with (
        fake_replica(behave) as dies,
        fake_replica() as healthy,
        running_proxy(dies.url, up=1, policy="passthrough", policy_args={}) as alone,
    ):
        begun = [asyncio.create_task(ask(alone.url, f"b{n}", stream=True, content="begun")) for n in range(5)]
        await until(lambda: len(dies.calls) == 5)
        await asyncio.sleep(0.05)
        async with running_proxy(dies.url, healthy.url, policy="passthrough", policy_args={}) as proxy:
            waiting = [asyncio.create_task(ask(proxy.url, f"w{n}", stream=True)) for n in range(20)]
            await until(lambda: len(dies.calls) + len(healthy.calls) == 25)
            await dies.stop()
            answered = await asyncio.gather(*waiting)
            assert {(each.status, each.header("X-Replica-ID")) for each in answered} == {(200, healthy.replica_id)}
        for answer in await asyncio.gather(*begun):
            assert not answer.whole
            *words, error = events_of(answer.body)
            assert len(words) == 1
            assert error["error"]["code"] == "replica_closed_early"
        assert len(dies.calls) <= 5 + 20
        assert len(healthy.calls) == 20
