"""Clients that wait, give up, and retry: one turn, one generation, and no timer of ours ends a wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from aiohttp import web

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Gate,
    Wire,
    answers,
    ask,
    cap,
    chunk,
    event,
    events_of,
    fake_replica,
    get,
    post,
    running_proxy,
    stream_head,
    streams,
    turn,
    until,
    word,
)
from tests.loopback import on_loopback
from thunderagent.errors import NoReplicaError
from thunderagent.proxy.reading.dialects import dialect_of
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns.heartbeat import HeldStream
from thunderagent.proxy.turns.record import LEAST_OBSERVED_S
from thunderagent.proxy.wire.aiohttp_exchange import AiohttpExchange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.integration.support import Call, Header, RunningProxy

MESSAGES: Any = [{"role": "user", "content": "hello"}]
BODY = json.dumps(turn("second")).encode()


def send(wire: Wire, *headers: Header, body: bytes = BODY, target: str = CHAT) -> None:
    wire.send("POST", target, [("Content-Type", "application/json"), *headers], body)


def retry(count: int) -> Header:
    return ("x-stainless-retry-count", str(count))


async def in_flight(proxy: RunningProxy, replica_calls: list[Call], count: int) -> None:
    await until(lambda: len(replica_calls) == count and proxy.runtime.leases_count)


# --- patience


async def test_an_openai_client_with_6_s_of_patience_gets_its_answer_before_it_gives_up() -> None:
    """Its program is held for lack of memory; the turn runs once, before the client would retry."""
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1)) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/p/second/v1", api_key="-", timeout=6.0, max_retries=2) as client,
    ):
        await ask(proxy.url, "first")
        await client.chat.completions.create(model="m", messages=MESSAGES)
        assert len(replica.calls) == 2
        assert replica.calls[1].header("x-stainless-read-timeout") == "6.0"
        assert replica.calls[1].header("x-stainless-retry-count") == "0"
        second = (await get(proxy.url, "/programs/second")).json()
        assert (second["turn_count"], proxy.runtime.outcome_counts) == (1, {"finished": 2})
        assert {entry["why"] for entry in second["story"] if entry["what"] == "restore"} == {"patience"}


async def test_an_openai_client_that_gives_up_and_tries_again_leaves_one_generation() -> None:
    """Its first attempts generate for too long: each ends on the replica before the next begins; one is answered."""

    async def behave(call: Call) -> None:
        if call.header("x-stainless-retry-count") == "2":
            await answers()(call)
        else:
            await call.left.wait()

    async with (
        fake_replica(behave) as replica,
        running_proxy(replica.url) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/p/a/v1", api_key="-", timeout=2.5, max_retries=2) as client,
    ):
        await client.chat.completions.create(model="m", messages=MESSAGES)
        assert [call.header("x-stainless-retry-count") for call in replica.calls] == ["0", "1", "2"]
        assert [call.left.is_set() for call in replica.calls[:2]] == [True, True]
        await until(lambda: proxy.runtime.outcome_counts == {"abandoned": 2, "finished": 1})
        assert (await get(proxy.url, "/programs/a")).json()["turn_count"] == 1


async def test_an_openai_client_that_tries_again_while_it_is_held_makes_one_turn() -> None:
    """Patience is not read here: abandoned attempts reach no engine; the last one is one turn, one generation."""
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1), client_patience=False) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/p/second/v1", api_key="-", timeout=2.5, max_retries=2) as client,
    ):
        await ask(proxy.url, "first")
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
        held_turn_ids: set[int] = set()

        def third_attempt_is_held() -> bool:
            held_turn_ids.update(turn.turn_id for turn in proxy.runtime.scheduler.turns.values())
            return len(held_turn_ids) == 3

        await until(third_attempt_is_held)
        assert (proxy.runtime.held_count, len(replica.calls)) == (1, 1)
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        await asked
        assert [call.header("x-stainless-retry-count") for call in replica.calls[1:]] == ["2"]
        second = (await get(proxy.url, "/programs/second")).json()
        assert (second["turn_count"], proxy.runtime.outcome_counts["finished"]) == (1, 2)


@pytest.mark.parametrize(
    ("header", "setting"),
    [(("X-Program-Patience", "1.6"), {}), (("X-Stainless-Timeout", "1.6"), {}), (None, {"patience_s": 1.6})],
)
async def test_patience_is_read_from_any_of_its_sources(header: Header | None, setting: dict[str, float]) -> None:
    """Half of it is left for the answer, because the margin is longer than that."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1), **setting) as proxy:
        await post(proxy.url, CHAT, turn("first"))
        answer = await post(proxy.url, CHAT, turn("second"), *([header] if header else []))
        assert answer.status == 200
        assert int(answer.header("X-Hold-Ms") or 0) > 700
        story = (await get(proxy.url, "/programs/second")).json()["story"]
        assert {entry["why"] for entry in story if entry["what"] == "restore"} == {"patience"}


async def test_an_operator_may_want_no_patience() -> None:
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1), client_patience=False) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        await ask(proxy.url, "first")
        send(wire, ("X-Program-Patience", "0.1"))
        await until(lambda: proxy.runtime.held_count == 1)
        await asyncio.sleep(0.2)
        assert proxy.runtime.held_count == 1


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan", ""])
async def test_a_patience_that_is_none_is_refused_in_clear_words(value: str) -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, CHAT, turn("a"), ("X-Program-Patience", value))
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert "X-Program-Patience" in answer.error["message"]
        for name in ("x-stainless-read-timeout", "x-stainless-retry-count"):
            assert (await post(proxy.url, CHAT, turn("a"), (name, value))).status == 200


async def test_a_client_like_codex_is_held_as_long_as_it_takes() -> None:
    """No limit of ours ends the wait, and no status comes, least of all 429: limits of 1 s pass twice."""
    limits = {"idle_limit_s": 30.0, "no_replica_limit_s": 1.0, "silence_timeout_s": 1.0, "first_byte_timeout_s": 1.0}
    async with (
        fake_replica(streams(word("hello"), event("[DONE]"))) as replica,
        running_proxy(replica.url, **cap(1), **limits, total_timeout_s=1.0, poll_interval_s=0.05) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        await ask(proxy.url, "first", stream=True)
        body = json.dumps(turn(None, stream=True)).encode()
        send(wire, ("session-id", "codex"), ("thread-id", "main"), body=body)
        await until(lambda: proxy.runtime.held_count == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.1):
                await wire.head()
        assert proxy.runtime.held_count == 1
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        answer = await wire.answer()
        assert (answer.status, answer.header("X-Program-ID")) == (200, "codex")
        assert int(answer.header("X-Hold-Ms") or 0) >= 2000


# --- a second attempt


async def test_a_held_attempt_is_superseded_by_the_next() -> None:
    """The first gets 410, which no client retries; the second runs once, and its wait counts from the first."""
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1)) as proxy,
        Wire.open(proxy.url) as one,
        Wire.open(proxy.url) as other,
    ):
        await ask(proxy.url, "first")
        send(one, retry(0))
        await until(lambda: proxy.runtime.held_count == 1)
        await asyncio.sleep(0.3)
        send(other, retry(1))
        answer = await one.answer()
        assert (answer.status, answer.error["code"]) == (410, "turn_superseded")
        assert proxy.runtime.held_count == 1
        waiting = (await get(proxy.url, "/queue")).json()["waiting"]
        assert [program["held_for_s"] >= 0.3 for program in waiting] == [True]
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await other.answer()).status == 200
        assert len(replica.calls) == 2
        assert proxy.runtime.outcome_counts == {"finished": 2, "superseded": 1}
        assert (await get(proxy.url, "/programs/second")).json()["turn_count"] == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_attempt_in_flight_is_superseded_by_the_next(streamed: bool) -> None:
    """Its generation ends, the second gets the lease, and nothing is left."""
    gate = Gate([stream_head(), chunk(word("one"))]) if streamed else Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url) as proxy,
        Wire.open(proxy.url) as one,
        Wire.open(proxy.url) as other,
    ):
        body = json.dumps(turn("second", stream=streamed)).encode()
        send(one, retry(0), body=body)
        await in_flight(proxy, replica.calls, 1)
        if streamed:
            await one.head()
        replica.behaviour = answers()
        send(other, retry(1), body=body)
        assert (await other.answer()).status == 200
        await asyncio.wait_for(replica.calls[0].left.wait(), DEADLINE_S)
        if streamed:
            assert (await one.chunk()) == word("one")
            assert b'"turn_superseded"' in await one.chunk()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await one.chunk()
        else:
            assert (await one.answer()).status == 410
        assert proxy.runtime.outcome_counts == {"finished": 1, "superseded": 1}
        assert (await get(proxy.url, "/programs/second")).json()["turn_count"] == 1


SAMPLES = 4


async def test_identical_samples_do_not_end_each_other() -> None:
    """Best of n sends the same body of one program at once on purpose; this holds even if one of them is retried."""
    gate = Gate(after=(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",))
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        wires = [await stack.enter_async_context(Wire.open(proxy.url)) for _ in range(SAMPLES + 1)]
        for wire in wires[:SAMPLES]:
            send(wire, retry(0))
        await until(lambda: len(replica.calls) == SAMPLES)
        for wire in wires[1 : SAMPLES - 1]:
            await wire.leave()
        await until(lambda: proxy.runtime.leases_count == 2)
        await wires[0].leave()
        send(wires[SAMPLES], retry(1))
        await until(lambda: len(replica.calls) == SAMPLES + 1)
        gate.open()
        assert [(await wires[number].answer()).status for number in (SAMPLES - 1, SAMPLES)] == [200, 200]
        assert proxy.runtime.outcome_counts["superseded"] == 0


async def test_the_same_body_without_a_retry_count_is_another_turn() -> None:
    gate = Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url) as proxy,
        Wire.open(proxy.url) as one,
        Wire.open(proxy.url) as other,
    ):
        send(one)
        send(other)
        await until(lambda: len(replica.calls) == 2)
        gate.open()
        assert [(await wire.answer()).status for wire in (one, other)] == [200, 200]


@pytest.mark.parametrize(
    ("keys", "count", "program_id", "superseded"),
    [
        (("k", "k"), 0, "second", True),
        (("k", "l"), 1, "second", False),
        (("k", ""), 1, "second", False),
        (("k", "k"), 1, None, True),
        (("k", "k"), 0, None, False),
        (("", ""), 1, None, False),
    ],
)
async def test_an_idempotency_key_says_what_is_the_same_turn(
    keys: tuple[str, str], count: int, program_id: str | None, superseded: bool
) -> None:
    """With a key no retry count is needed; anonymous turns need both."""
    gate = Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url) as proxy,
        Wire.open(proxy.url) as one,
        Wire.open(proxy.url) as other,
    ):
        body = json.dumps(turn(program_id)).encode()
        for wire, key, retries_count in ((one, keys[0], 0), (other, keys[1], count)):
            send(wire, retry(retries_count), *([("Idempotency-Key", key)] if key else []), body=body)
            await until(lambda wire=wire: len(replica.calls) == (1 if wire is one else 2))
        await until(lambda: replica.calls[0].left.is_set() == superseded)
        gate.open()
        assert (await other.answer()).status == 200
        assert (await one.answer()).status == (410 if superseded else 200)


async def test_changed_body_is_a_new_turn_whatever_the_retry_count() -> None:
    gate = Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url) as proxy,
        Wire.open(proxy.url) as one,
        Wire.open(proxy.url) as other,
    ):
        send(one, body=json.dumps(turn("second", content="hello")).encode())
        await until(lambda: len(replica.calls) == 1)
        send(other, retry(1), body=json.dumps(turn("second", content="hallo")).encode())
        await until(lambda: len(replica.calls) == 2)
        gate.open()
        assert [(await wire.answer()).status for wire in (one, other)] == [200, 200]


async def test_many_attempts_of_many_programs_leave_nothing() -> None:
    """Each of 40 turns is tried three times while the ones before are held or in flight: 40 generations survive."""
    gate = Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url, **cap(20)) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        last = []
        for number in range(40):
            body = json.dumps(turn(f"program-{number}")).encode()
            for count in range(3):
                wire = await stack.enter_async_context(Wire.open(proxy.url))
                send(wire, retry(count), body=body)
                await until(lambda number=number: proxy.runtime.leases_count + proxy.runtime.held_count > number)
                await asyncio.sleep(0)
            last.append(wire)
        await until(lambda: proxy.runtime.outcome_counts["superseded"] == 80)
        gate.open()
        for number, wire in enumerate(last):
            assert (await wire.answer()).status == 200
            await post(proxy.url, "/programs/release", {"program_id": f"program-{number}"})
        assert proxy.runtime.outcome_counts == {"finished": 40, "superseded": 80}
        assert sum(not call.left.is_set() for call in replica.calls) <= 40


# --- parents


async def test_a_parent_that_waits_for_five_sub_agents_under_its_own_id_is_no_deadlock(engine_url: str) -> None:
    """With capacity for one program the sub-agents' turns run concurrently, and the parent continues after them."""
    async with running_proxy(engine_url, **cap(1)) as proxy:
        async with asyncio.timeout(DEADLINE_S):
            assert (await ask(proxy.url, "parent", max_tokens=4)).status == 200
            other = asyncio.create_task(ask(proxy.url, "other", max_tokens=4))
            for _ in range(3):
                sub_agents = [
                    post(proxy.url, CHAT, turn("parent", max_tokens=4), ("X-Program-Branch", f"sub-{number}"))
                    for number in range(5)
                ]
                assert {answer.status for answer in await asyncio.gather(*sub_agents)} == {200}
            assert (await ask(proxy.url, "parent", max_tokens=4)).status == 200
            assert not other.done()
            await post(proxy.url, "/programs/release", {"program_id": "parent"})
            assert (await other).status == 200


async def test_a_parent_that_waits_for_five_programs_of_its_own_is_no_deadlock(engine_url: str) -> None:
    """The programs have their own ids, and a header that names their parent."""
    async with running_proxy(engine_url, **cap(1)) as proxy:
        async with asyncio.timeout(DEADLINE_S):
            assert (await ask(proxy.url, "parent", max_tokens=4)).status == 200
            parent = ("X-Program-Parent", "parent")
            for _ in range(3):
                children = [post(proxy.url, CHAT, turn(f"child-{n}", max_tokens=4), parent) for n in range(5)]
                assert {answer.status for answer in await asyncio.gather(*children)} == {200}
            report = (await get(proxy.url, "/programs/child-0")).json()
            assert (report["parent_id"], report["turn_count"]) == ("parent", 3)
            assert (await ask(proxy.url, "parent", max_tokens=4)).status == 200


# --- heartbeats


async def test_a_held_stream_shows_signs_of_life() -> None:
    """Comments come until the lease, then the engine's events, byte for byte."""
    pieces = [word("hello"), event("[DONE]")]
    async with (
        fake_replica(streams(*pieces)) as replica,
        running_proxy(replica.url, **cap(1), heartbeat_s=0.03) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        await ask(proxy.url, "first")
        send(wire, ("Accept-Encoding", "gzip"), body=json.dumps(turn("second", stream=True)).encode())
        head = await wire.head()
        assert (head.status, head.header("Content-Type")) == (200, "text/event-stream; charset=utf-8")
        assert (head.header("X-Program-ID"), head.header("X-Replica-ID")) == ("second", None)
        beats = [await wire.chunk() for _ in range(3)]
        assert beats == [b": held\n\n"] * 3
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        answer = await wire.body(head)
        assert answer.whole
        assert answer.body.replace(b": held\n\n", b"") == b"".join(pieces)
        assert replica.calls[-1].header("Accept-Encoding") == "identity"


async def test_a_stream_that_is_not_held_has_no_heartbeat() -> None:
    """A turn that is not streamed has none either, however long it is held."""
    async with (
        fake_replica(streams(word("x"))) as replica,
        running_proxy(replica.url, **cap(1), heartbeat_s=0.02) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        answer = await ask(proxy.url, "first", stream=True)
        assert answer.body == word("x")
        assert answer.header("X-Replica-ID") == replica.replica_id
        send(wire)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await wire.head()


async def test_an_error_after_a_heartbeat_comes_as_an_event() -> None:
    """It has the words of the called API; the stream ends properly."""
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1), heartbeat_s=0.02) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        await ask(proxy.url, "first")
        send(wire, body=json.dumps(turn("second", stream=True)).encode())
        head = await wire.head()
        assert await wire.chunk() == b": held\n\n"
        await post(proxy.url, "/programs/release", {"program_id": "second"})
        answer = await wire.body(head)
        assert answer.whole
        (error,) = events_of(answer.body.replace(b": held\n\n", b""))
        assert error["error"]["code"] == "program_released"


async def test_the_messages_api_has_an_event_for_heartbeats_and_one_for_errors() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        exchange = AiohttpExchange(request, Target.parse("/v1/messages"), b"")
        stream = HeldStream(exchange, "/v1/messages", dialect_of("/v1/messages"), 0.01, {})
        async with stream.beating():
            await asyncio.sleep(0.05)
        await stream.fail(NoReplicaError("none is up"))
        return exchange.response

    async with serving([web.post("/v1/messages", handle)]) as url:
        body = (await post(url, "/v1/messages")).body
    *beats, error = body.split(b"\n\n")[:-1]
    assert set(beats) == {b'event: ping\ndata: {"type": "ping"}'}
    assert error.startswith(b"event: error\ndata: ")
    assert json.loads(error.partition(b"data: ")[2]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "none is up", "code": "no_replica"},
    }


@contextlib.asynccontextmanager
async def serving(routes: Sequence[web.RouteDef] = (), app: web.Application | None = None) -> AsyncIterator[str]:
    """Serve on loopback during the block."""
    app = app or web.Application()
    app.add_routes(routes)
    async with on_loopback(app, handler_cancellation=True) as url:
        yield url


@pytest.mark.parametrize("status", ["400 Bad Request", "500 Internal Server Error"])
async def test_an_engines_refusal_after_a_heartbeat_comes_as_an_event(status: str) -> None:
    refusal = {"error": {"message": "no", "type": "x", "param": None, "code": 400}}
    async with (
        fake_replica() as replica,
        running_proxy(replica.url, **cap(1), heartbeat_s=0.02) as proxy,
        Wire.open(proxy.url) as wire,
    ):
        await ask(proxy.url, "first")
        replica.behaviour = answers(refusal, status=status)
        send(wire, body=json.dumps(turn("second", stream=True)).encode())
        head = await wire.head()
        await wire.chunk()
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        answer = await wire.body(head)
        assert answer.whole
        assert events_of(answer.body.replace(b": held\n\n", b"")) == [refusal]
        assert proxy.runtime.outcome_counts["refused"] == 1


async def test_a_client_that_leaves_between_heartbeats_leaves_nothing() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1), heartbeat_s=0.01) as proxy:
        await ask(proxy.url, "first")
        for how in ("leave", "reset", "leave", "reset"):
            async with Wire.open(proxy.url) as wire:
                send(wire, body=json.dumps(turn("second", stream=True)).encode())
                await wire.head()
                await wire.chunk()
                if how == "reset":
                    wire.reset()
            await until(lambda: proxy.runtime.held_count == 0)
        assert proxy.runtime.outcome_counts["abandoned"] == 4
        assert len(replica.calls) == 1


async def test_a_client_that_gives_up_twice_after_the_same_time_is_let_in_before_it_does_again() -> None:
    """It tells no patience. Somebody who leaves once, or at different times, waits for room."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(LEAST_OBSERVED_S + 1.5):
                    await ask(proxy.url, "hasty")
            await until(lambda: proxy.runtime.held_count == 0)
        calls_count = len(replica.calls)
        assert (await ask(proxy.url, "hasty")).status == 200
        assert len(replica.calls) == calls_count + 1
        story = (await get(proxy.url, "/programs/hasty")).json()["story"]
        assert ("restore", "patience") in [(entry["what"], entry["why"]) for entry in story]
