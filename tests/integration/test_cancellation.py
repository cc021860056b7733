"""Clients that leave at any moment: the replica is told, the lease is returned, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    DONE,
    JSON_TYPE,
    USAGE_EVENT,
    Gate,
    Wire,
    ask,
    cap,
    chunk,
    event,
    fake_replica,
    get,
    head_bytes,
    metrics_of,
    post,
    running_proxy,
    sockets_count,
    stream_head,
    turn,
    until,
    word,
)

if TYPE_CHECKING:
    from tests.integration.support import Call, RunningProxy

HALF_ANSWER = head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("content-length", "1000")]) + b'{"id": '


def send(wire: Wire, program_id: str | None, target: str = CHAT, **fields: Any) -> None:
    body = json.dumps(turn(program_id, **fields)).encode()
    wire.send("POST", target, [("Content-Type", "application/json")], body)


async def depart(wire: Wire, how: str) -> None:
    if how == "reset":
        wire.reset()
    else:
        await wire.leave()


async def all_counts_are_zero(proxy: RunningProxy) -> None:
    """Check the runtime, the invariants and what `/metrics` says; programs are released before."""
    await proxy.nothing_left()
    await post(proxy.url, "/programs/release", {"all": True})
    samples = await metrics_of(proxy.url)
    for name in ("turns_held", "leases_active", "programs", "demand_tokens", "replica_turns"):
        assert set(samples[f"thunderagent_{name}"].values()) == {0}, name
    assert (await get(proxy.url, "/queue")).json()["turns_held_count"] == 0


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("program_id", ["second", None])
async def test_a_client_leaves_while_its_turn_is_held(how: str, program_id: str | None) -> None:
    """The turn leaves the queue, and its replica never receives it."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        if program_id is None:  # anonymous turns are held only for want of a replica
            await replica.stop()
            await proxy.up(0)
        async with Wire.open(proxy.url) as wire:
            send(wire, program_id)
            await until(lambda: proxy.runtime.held_count == 1)
            await depart(wire, how)
            await until(lambda: proxy.runtime.held_count == 0)
        assert proxy.runtime.outcome_counts["abandoned"] == 1
        await all_counts_are_zero(proxy)
        assert len(replica.calls) == 1


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_leaves_before_the_first_byte(how: str, streamed: bool) -> None:
    """The replica's connection is closed, which is how an engine learns to stop."""
    async with fake_replica(Gate()) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        send(wire, "a", stream=streamed)
        call = await replica.call()
        assert proxy.runtime.leases_count == 1
        await depart(wire, how)
        await asyncio.wait_for(call.left.wait(), DEADLINE_S)
        await all_counts_are_zero(proxy)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("asks_for_usage", [False, True])
async def test_a_client_leaves_a_stream(how: str, asks_for_usage: bool) -> None:
    """It leaves in the middle of a stream, between two events."""
    gate = Gate([stream_head(), chunk(word("one"))])
    options = {"stream_options": {"include_usage": True}} if asks_for_usage else {}
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        send(wire, "a", stream=True, **options)
        assert (await wire.head()).status == 200
        assert await wire.chunk() == word("one")
        await depart(wire, how)
        await asyncio.wait_for((await replica.call()).left.wait(), DEADLINE_S)
        await all_counts_are_zero(proxy)


LAST_EVENTS = {
    CHAT: [USAGE_EVENT, DONE],
    "/v1/messages": [
        event('{"type":"message_delta","usage":{"input_tokens":10,"output_tokens":3}}'),
        event('{"type":"message_stop"}'),
    ],
    "/v1/responses": [
        event('{"type":"response.completed","response":{"usage":{"input_tokens":10,"output_tokens":3}}}'),
    ],
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("path", LAST_EVENTS)
async def test_a_client_that_leaves_with_the_last_event_has_its_answer(path: str, how: str) -> None:
    """The engine has not ended the answer yet; the turn is finished all the same, and its usage counts."""
    gate = Gate([stream_head(), chunk(word("one")), *map(chunk, LAST_EVENTS[path])])
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        send(wire, "a", path, stream=True)
        assert (await wire.head()).status == 200
        while LAST_EVENTS[path][-1] not in await wire.chunk():
            pass
        await depart(wire, how)
        await asyncio.wait_for((await replica.call()).left.wait(), DEADLINE_S)
        await proxy.nothing_left()
        assert proxy.runtime.outcome_counts["finished"] == 1
        (program,) = (await get(proxy.url, "/programs")).json()["programs"]
        assert (program["prompt_tokens_total"], program["output_tokens_total"]) == (10, 3)


@pytest.mark.parametrize("path", LAST_EVENTS)
async def test_an_engine_that_leaves_with_its_last_event_has_answered(path: str) -> None:
    """Its client gets a complete answer, without an error behind the last event."""

    async def behave(call: Call) -> None:
        call.write(b"".join([stream_head(), chunk(word("one")), *map(chunk, LAST_EVENTS[path])]))
        call.transport.close()

    async with fake_replica(behave) as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, path, turn("a", stream=True))
        assert answer.whole
        assert answer.body.endswith(LAST_EVENTS[path][-1])
        assert proxy.runtime.outcome_counts["finished"] == 1
        (program,) = (await get(proxy.url, "/programs")).json()["programs"]
        assert (program["prompt_tokens_total"], program["output_tokens_total"]) == (10, 3)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_leaves_a_whole_answer(how: str) -> None:
    """It leaves while the proxy has read half of an answer that is not streamed."""
    gate = Gate([HALF_ANSWER])
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        send(wire, "a")
        call = await replica.call()
        await depart(wire, how)
        await asyncio.wait_for(call.left.wait(), DEADLINE_S)
        await all_counts_are_zero(proxy)


async def test_a_client_that_does_not_read_its_stream_leaves() -> None:
    """The proxy waits for a client whose buffers are full, but no longer once that client leaves."""
    flood = chunk(event("x" * 2**20))

    async def behave(call: Call) -> None:
        call.write(stream_head())
        while not call.left.is_set():
            if call.transport.get_write_buffer_size() < 2**22:
                call.write(flood)
            await asyncio.sleep(0.001)

    async with fake_replica(behave) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        send(wire, "a", stream=True)
        await wire.head()
        call = await replica.call()
        await until(lambda: call.transport.get_write_buffer_size() >= 2**22)
        wire.reset()
        await asyncio.wait_for(call.left.wait(), DEADLINE_S)
        await all_counts_are_zero(proxy)


async def test_a_client_leaves_while_it_sends_its_body() -> None:
    """No turn has arrived yet; nothing is forwarded, and nothing is logged as a bug."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        wire.send_raw(b"POST /p/a/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await wire.leave()
        await all_counts_are_zero(proxy)
        assert not replica.calls
        assert (await ask(proxy.url, "a")).status == 200


async def test_a_client_leaves_a_side_call() -> None:
    """Requests that are not turns end at the replica too."""
    async with fake_replica(Gate()) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        wire.send("POST", "/v1/embeddings", [("Content-Type", "application/json")], b'{"input": "x"}')
        call = await replica.call()
        await wire.leave()
        await asyncio.wait_for(call.left.wait(), DEADLINE_S)


async def test_the_place_of_a_client_that_left_goes_to_the_next() -> None:
    """A turn that waits for memory is granted when the client of the turn before it leaves."""
    policy = {"policy": "thunderagent", "policy_args": {"delta_s": "0.05", "half_life_s": "0.05"}}
    async with fake_replica(Gate(), capacity_tokens=1000) as replica, running_proxy(replica.url, **policy) as proxy:
        async with Wire.open(proxy.url) as first, Wire.open(proxy.url) as second:
            send(first, "first", content="x" * 2800)
            await replica.call()
            send(second, "second", content="x" * 2800)
            await until(lambda: proxy.runtime.held_count == 1)
            await first.leave()
            call = await replica.call(1)
            assert b"xxx" in call.body
        await proxy.nothing_left()


async def test_a_replica_that_fails_just_when_its_client_leaves_costs_nothing() -> None:
    """Both ends of a turn break at the same moment."""
    gate = Gate([stream_head(), chunk(word("one"))])
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        for _ in range(20):
            async with Wire.open(proxy.url) as wire:
                send(wire, "a", stream=True)
                await wire.head()
                replica.calls[-1].transport.abort()
                wire.reset()
        await all_counts_are_zero(proxy)


TURNS_COUNT = 1000
CLIENTS_COUNT = 48


async def _slow_engine(call: Call) -> None:
    """Behave: take up to some milliseconds before and in every part of an answer."""
    body = call.json()
    random = Random(body["seed"])

    async def pause() -> None:
        await asyncio.sleep(random.choice((0, 0.001, 0.01)))

    await pause()
    if call.left.is_set():
        return
    if body.get("stream"):
        pieces = [stream_head(), *(chunk(word("word")) for _ in range(5)), chunk(event("[DONE]")), b"0\r\n\r\n"]
    else:
        pieces = [HALF_ANSWER, b" " * (1000 - len(b'{"id": ') - 2), b"1}"]
    for piece in pieces:
        if call.left.is_set():
            return
        call.write(piece)
        await pause()


async def _leave_at_random(proxy: RunningProxy, number: int) -> None:
    """Make one turn and leave it at a random moment."""
    random = Random(number)
    moment = random.choice(("at once", "soon", "head", "event", "end"))
    streamed = random.random() < 0.5
    program_id = random.choice((None, *(f"program-{random.randrange(60)}" for _ in range(9))))
    async with Wire.open(proxy.url) as wire:
        send(wire, program_id, stream=streamed, seed=number, content="x" * 2000)
        if moment == "soon":
            await asyncio.sleep(random.random() * 0.02)
        elif moment != "at once":
            answer = await wire.head()
            if moment == "event" and streamed:
                await wire.chunk()
            elif moment == "end":
                await wire.body(answer)
                assert answer.whole
        if random.random() < 0.5:
            wire.reset()


@pytest.mark.timeout(180)
async def test_a_thousand_clients_leave_at_random() -> None:
    """48 at a time, at any moment, with memory so short that most are held: afterwards every count is zero."""
    policy = {"policy": "thunderagent", "policy_args": {"delta_s": "0.02", "half_life_s": "0.02"}, "tick_s": 0.01}
    tasks_before, sockets_before = len(asyncio.all_tasks()), sockets_count()
    async with (
        fake_replica(_slow_engine, capacity_tokens=4000) as one,
        fake_replica(_slow_engine, capacity_tokens=4000) as other,
        running_proxy(one.url, other.url, **policy) as proxy,
    ):
        tasks_idle = len(asyncio.all_tasks())
        numbers = iter(range(TURNS_COUNT))

        async def client() -> None:
            for number in numbers:
                await _leave_at_random(proxy, number)

        await asyncio.gather(*(client() for _ in range(CLIENTS_COUNT)))
        await until(lambda: not one.tasks and not other.tasks)
        counts = proxy.runtime.outcome_counts
        assert counts["abandoned"] > TURNS_COUNT / 4
        assert counts["finished"] > TURNS_COUNT / 10
        decisions = {decision for decision, _ in (await metrics_of(proxy.url))["thunderagent_decisions_total"]}
        assert decisions >= {"hold", "pause", "restore"}
        await all_counts_are_zero(proxy)
        # Idle connections to replicas have no task; tasks that answered clients are gone.
        await until(lambda: len(asyncio.all_tasks()) <= tasks_idle)
    await until(lambda: len(asyncio.all_tasks()) == tasks_before)
    await until(lambda: sockets_count() == sockets_before)


async def test_all_held_turns_leave_at_once() -> None:
    """200 turns of 50 programs leave the queue together, and the replica receives none of them."""
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1)) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        await ask(proxy.url, "first")
        wires = [await stack.enter_async_context(Wire.open(proxy.url)) for _ in range(200)]
        for number, wire in enumerate(wires):
            send(wire, f"program-{number % 50}")
        await until(lambda: proxy.runtime.held_count == 200)
        for wire in wires:
            wire.reset()
        await until(lambda: proxy.runtime.held_count == 0)
        await all_counts_are_zero(proxy)
        assert len(replica.calls) == 1
