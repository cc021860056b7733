"""What a turn or a poll leaves behind is freed at once: nothing waits for the garbage collector, which comes rarely."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections import Counter
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from tests.integration.support import (
    CHAT,
    FakeReplica,
    Gate,
    Wire,
    answers,
    ask,
    chunk,
    fake_replica,
    head_bytes,
    post,
    running_proxy,
    stream_head,
    turn,
    until,
    word,
    writes,
)
from thunderagent.serving.process import FULL_COLLECTION_AFTER_COUNT, LOOKED_AT_COUNT, collect_garbage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.support import Call, RunningProxy

TURNS_COUNT = 5


class Ring:
    """Something that a reference count never frees."""

    itself: Ring


@contextmanager
def collecting() -> Iterator[Counter[str]]:
    """Count, by type, what only a collection finds of what the block left: ours, and whole answers to polls."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(_name(each) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    for name in list(found):
        if not name.startswith("thunderagent."):
            del found[name]


def _name(found: object) -> str:
    """Return the type of an object; of a frame, the module that it runs in, because frames hold what turns hold."""
    if isinstance(found, FrameType):
        return str(found.f_globals.get("__name__"))
    return f"{type(found).__module__}.{type(found).__qualname__}"


def send(wire: Wire, program_id: str, *headers: tuple[str, str], **fields: object) -> None:
    body = json.dumps(turn(program_id, **fields)).encode()
    wire.send("POST", CHAT, [("Content-Type", "application/json"), *headers], body)


async def answered(replica: FakeReplica, proxy: RunningProxy) -> None:
    replica.behaviour = answers()
    assert (await ask(proxy.url, "a")).status == 200


async def refused(replica: FakeReplica, proxy: RunningProxy) -> None:
    answer = await post(proxy.url, CHAT, turn("a"), ("X-Program-Patience", "never"))
    assert answer.status == 400


async def broken_before_the_first_byte(replica: FakeReplica, proxy: RunningProxy) -> None:
    replica.behaviour = writes()
    assert (await ask(proxy.url, "a")).status == 502


async def broken_in_mid_stream(replica: FakeReplica, proxy: RunningProxy) -> None:
    replica.behaviour = writes(stream_head(), chunk(word("one")))
    async with Wire.open(proxy.url) as wire:
        send(wire, "a", stream=True)
        assert not (await wire.answer()).whole


async def left(replica: FakeReplica, proxy: RunningProxy) -> None:
    replica.behaviour = Gate([stream_head(), chunk(word("one"))])
    async with Wire.open(proxy.url) as wire:
        send(wire, "a", stream=True)
        await wire.head()
        await wire.chunk()


async def superseded(replica: FakeReplica, proxy: RunningProxy) -> None:
    calls_count = len(replica.calls)
    gate = replica.behaviour = Gate()
    async with Wire.open(proxy.url) as one, Wire.open(proxy.url) as other:
        send(one, "a")
        await replica.call(calls_count)
        send(other, "a", ("X-Stainless-Retry-Count", "1"))
        assert (await one.answer()).status == 410
        gate.open()
        assert (await other.answer()).status == 200


async def released_while_held(replica: FakeReplica, proxy: RunningProxy) -> None:
    proxy.runtime.suspend_grants("test")
    async with Wire.open(proxy.url) as wire:
        send(wire, "a")
        await until(lambda: proxy.runtime.held_count)
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        assert (await wire.answer()).status == 410
    proxy.runtime.continue_grants("test")


async def left_while_held(replica: FakeReplica, proxy: RunningProxy) -> None:
    proxy.runtime.suspend_grants("test")
    async with Wire.open(proxy.url) as wire:
        send(wire, "a")
        await until(lambda: proxy.runtime.held_count)
    await until(lambda: not proxy.runtime.scheduler.ledger.waiting_count)
    proxy.runtime.continue_grants("test")


WAYS = (
    answered,
    refused,
    broken_before_the_first_byte,
    broken_in_mid_stream,
    left,
    superseded,
    released_while_held,
    left_while_held,
)


async def test_no_turn_waits_for_the_garbage_collector() -> None:
    """This holds whatever became of the turn, and for the answers to polls."""
    config = {"retry_budget_ratio": 0.0, "retries_count": 1, "breaker_failure_count": 0, "poll_deadline_s": 20.0}
    async with fake_replica() as replica, running_proxy(replica.url, **config) as proxy:
        for way in WAYS:
            await way(replica, proxy)  # objects that are made only once are made here
            with collecting() as found:
                polls_count = replica.polls_count
                for _ in range(TURNS_COUNT):
                    await proxy.up(1)
                    await way(replica, proxy)
                    await until(lambda: not proxy.runtime.leases_count)
                await until(lambda count=polls_count: replica.polls_count > count + 3)
                replica.calls.clear()
                await asyncio.sleep(0.1)
            assert not found, way.__name__
        await post(proxy.url, "/programs/release", {"all": True})


class Stalling(FakeReplica):
    """A replica whose metrics stop in the middle."""

    async def answer_call(self, call: Call) -> None:
        if call.target == "/metrics":
            self.polls_count += 1
            call.write(head_bytes("HTTP/1.1 200 OK", [("content-length", "100")]), b"vllm:")
        else:
            await super().answer_call(call)


async def test_no_poll_without_an_end_waits_for_the_garbage_collector() -> None:
    """The same holds for its connection, which the answer holds."""
    replica = Stalling(answers())
    await replica.start()
    try:
        async with running_proxy(replica.url, poll_deadline_s=0.1):
            await until(lambda: replica.polls_count > 4)  # objects that are made only once are made here
            with collecting() as found:
                await until(lambda count=replica.polls_count: replica.polls_count > count + 8)
            assert not found
    finally:
        await replica.end()


@contextmanager
def old_ring() -> Iterator[weakref.ref[Ring]]:
    """Garbage that outlived a collection; only the block's own collection removes it."""
    ring = Ring()
    ring.itself = ring
    gc.collect()
    gc.disable()  # a test makes more objects than a proxy, and would have Python collect by itself
    is_there = weakref.ref(ring)
    del ring
    try:
        yield is_there
    finally:
        gc.enable()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a period of a millisecond; afterwards no object counts as permanent."""
    monkeypatch.setattr("thunderagent.serving.process.GARBAGE_PERIOD_S", 0.001)
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("turns_count", [0, 1], ids=["no turn in hand", "turns, for a day"])
async def test_old_garbage_is_collected_too(turns_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if it counted as permanent."""
    monkeypatch.setattr("thunderagent.serving.process.FULL_COLLECTION_AT_LAST_COUNT", FULL_COLLECTION_AFTER_COUNT)
    with old_ring() as is_there:
        gc.collect(1)
        gc.freeze()
        assert is_there() is not None, "it is old"
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(collect_garbage(lambda: turns_count))
            await until(lambda: is_there() is None)
            collecting.cancel()


@pytest.mark.usefixtures("quick")
async def test_no_collection_looks_at_more_than_it_can_while_a_turn_is_in_hand() -> None:
    """A longer one would stop all streams: objects above the limit count as permanent instead."""
    looked_at: list[tuple[int, bool]] = []

    def heard(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            looked_at.append((info["generation"], gc.get_freeze_count() > 0))

    gc.collect()
    gc.disable()
    gc.callbacks.append(heard)
    try:
        for _ in range(LOOKED_AT_COUNT + 1):
            gc.collect(0)
        looked_at.clear()
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(collect_garbage(lambda: 1))
            await until(lambda: len(looked_at) > FULL_COLLECTION_AFTER_COUNT)
            collecting.cancel()
    finally:
        gc.callbacks.remove(heard)
        gc.enable()
    assert set(looked_at) == {(1, True)}
