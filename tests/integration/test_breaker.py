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
    DONE,
    JSON_TYPE,
    LAST_CHUNK,
    Gate,
    Wire,
    answers,
    ask,
    chunk,
    event,
    events_of,
    exposition,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    stream_head,
    streams,
    turn,
    until,
    word,
    writes,
)
from thunderagent.cli import main
from thunderagent.programs.state.health import ReplicaState

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


async def test_turn_gets_504_after_its_tries_where_all_engines_hang() -> None:
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

    limits = {"first_byte_timeout_s": 1.0, "silence_timeout_s": 4.0}
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
    """The others that were granted there go elsewhere at once, and it does when it fails."""
    gate = Gate(after=())
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 2.0}) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour = gate
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        turns = await eight_turns(proxy, healthy)
        await until(lambda: len(broken.calls) == failures_count + 1)
        await until(lambda: sum(task.done() for task in turns) == 7)  # all others
        assert len(broken.calls) == failures_count + 1
        broken.calls[-1].close()
        answered = await asyncio.gather(*turns)
        assert {(answer.status, answer.header("X-Replica-ID")) for answer in answered} == {(200, healthy.replica_id)}
        assert len(broken.calls) == failures_count + 1
        report = await breaker_of(proxy, broken)
        assert report["breaker"] == "open"
        assert report["breaker_retry_in_s"] > 2.0, "the backoff did not grow"


async def test_when_the_probe_is_answered_its_replica_gets_turns_again() -> None:
    gate = Gate(after=(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",))
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour = gate
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        turns = await eight_turns(proxy, healthy)
        await until(lambda: sum(task.done() for task in turns) == 7)
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["verdict"]) == ("half_open", "failing")
        gate.open()
        assert {answer.status for answer in await asyncio.gather(*turns)} == {200}
        assert len(broken.calls) == failures_count + 1
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["verdict"]) == ("closed", "up")


@pytest.mark.parametrize("ends", [chunk(event({"error": {"code": 500, "message": "dead"}})) + LAST_CHUNK, b""])
async def test_a_probe_that_begins_well_and_ends_badly_does_not_close_the_breaker(ends: bytes) -> None:
    """An error event, or a connection that is closed: an engine that fails its streams late is failing, too."""

    async def late(call: Call) -> None:
        call.write(stream_head(), chunk(word("one")), ends)
        call.close()

    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 1.0}) as (broken, _, proxy):
        await trip(proxy, broken)
        failures_count = len(broken.calls)
        broken.behaviour = late
        await until(lambda: len(proxy.runtime.scheduler.open_replicas) == 2)
        async with asyncio.timeout(DEADLINE_S):
            number = 0
            while len(broken.calls) == failures_count:
                await ask(proxy.url, f"p{number}", stream=True)
                number += 1
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["verdict"]) == ("open", "failing")
        assert report["breaker_retry_in_s"] > 1.0, "the backoff did not grow"


@pytest.mark.parametrize("has_priorities", [True, False])
async def test_a_probe_whose_client_leaves_makes_way_for_another(has_priorities: bool) -> None:
    """With priorities the first 400 is read before it is passed on; it may be about them."""
    before = (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n",) if has_priorities else ()
    gate = Gate(before, after=() if has_priorities else (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",))
    more = {"priority": "tests.integration.test_priorities:Seven"} if has_priorities else {}
    async with two_replicas(**BREAKS, **more) as (broken, healthy, proxy):
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
        if has_priorities:
            broken.behaviour = answers()
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


async def test_a_4xx_is_its_clients_own() -> None:
    """It goes to the client as it is, and says nothing of the replica."""
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        broken.behaviour = healthy.behaviour = answers({"error": "no"}, status="400 Bad Request")
        for number in range(12):
            assert (await ask(proxy.url, str(number))).status == 400
        assert len(broken.calls) + len(healthy.calls) == 12
        assert (await breaker_of(proxy, broken))["breaker"] == "closed"


async def test_a_replica_that_answers_500_is_failing_and_costs_no_turn() -> None:
    """Its turns are tried elsewhere; it is no free replica, but gets none for a while, and says why."""
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, healthy, proxy):
        broken.behaviour = answers({"error": "no"}, status="500 Internal Server Error")
        served = await asyncio.gather(*(ask(proxy.url, str(number)) for number in range(4)))
        served += [await ask(proxy.url, f"later-{number}") for number in range(16)]
        assert {(each.status, each.header("X-Replica-ID")) for each in served} == {(200, healthy.replica_id)}
        assert 3 <= len(broken.calls) <= 4, "those sent before the third answer came"
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["verdict"]) == ("open", "failing")
        assert "it answered 500" in report["verdict_reason"]
        assert report["verdict_for_s"] >= 0


async def test_a_verdict_is_the_same_wherever_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, healthy, proxy):
        await trip(proxy, broken)
        report = await breaker_of(proxy, broken)
        assert report["verdict"] == "failing"
        samples = (await metrics_of(proxy.url))["thunderagent_replica_verdict"]
        of_replica = {
            replica.replica_id: {
                labels[1] for labels, value in samples.items() if value and labels[0] == replica.replica_id
            }
            for replica in (broken, healthy)
        }
        assert of_replica == {broken.replica_id: {"failing"}, healthy.replica_id: {"up"}}
        assert len(samples) == 2 * len(ReplicaState)
        assert await asyncio.to_thread(main, ["status", "--url", proxy.url]) == 0
        assert f"failing: {report['verdict_reason']}" in " ".join(capsys.readouterr().out.split())


async def test_a_turn_that_fails_everywhere_says_nothing_of_a_replica() -> None:
    """Otherwise a client could take one replica after the other away. The last answer is its own."""
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        broken.behaviour = healthy.behaviour = answers({"error": "no"}, status="500 Internal Server Error")
        for number in range(12):
            answer = await ask(proxy.url, str(number))
            assert (answer.status, answer.json()) == (500, {"error": "no"})
        for replica in (broken, healthy):
            assert (await breaker_of(proxy, replica))["breaker"] == "closed"


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_a_full_replica_costs_no_turn_and_gets_none_for_a_while(status: str) -> None:
    async with two_replicas(**BREAKS) as (full, healthy, proxy):
        full.behaviour = answers({"error": "full"}, status=status, headers=[JSON_TYPE, ("retry-after", "25")])
        for number in range(12):
            answer = await ask(proxy.url, str(number))
            assert (answer.status, answer.header("X-Replica-ID")) == (200, healthy.replica_id)
        assert len(full.calls) == 1
        report = await breaker_of(proxy, full)
        assert (report["breaker"], report["verdict"]) == ("closed", "backpressure")
        assert report["verdict_reason"] == f"it answered {status[:3]}"


async def test_a_turn_waits_where_the_only_replica_is_full() -> None:
    """It is sent again once there is room, as long as its client waits."""
    calls_count = 0

    async def full_at_first(call: Call) -> None:
        nonlocal calls_count
        calls_count += 1
        await answers(status="503 Service Unavailable" if calls_count == 1 else "200 OK")(call)

    async with fake_replica(full_at_first) as replica, running_proxy(replica.url) as proxy:
        patient = await post(proxy.url, CHAT, turn("a"), ("X-Program-Patience", "60"))
        assert (patient.status, calls_count) == (200, 2)
        replica.behaviour = answers({"error": "full"}, status="503 Service Unavailable")
        impatient = await post(proxy.url, CHAT, turn("a"), ("X-Program-Patience", "0.5"))
        assert (impatient.status, impatient.json()) == (503, {"error": "full"})


async def test_turn_whose_program_is_released_before_its_next_try_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin another program of that name, which nobody releases."""
    async with two_replicas() as (broken, healthy, proxy):

        async def may_retry(*_given: object) -> bool:
            await asyncio.sleep(0)
            proxy.runtime.release("a")
            return True

        monkeypatch.setattr("thunderagent.proxy.turns.forward.Forwarding.may_retry", may_retry)
        async with asyncio.timeout(DEADLINE_S):
            while not broken.calls:
                proxy.runtime.release("a")
                before_count = len(healthy.calls)
                answer = await ask(proxy.url, "a")
        assert answer.status == 502
        assert len(healthy.calls) == before_count
        assert "a" not in proxy.runtime.scheduler.programs


async def test_an_unreadable_answer_is_not_computed_again() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n"
    for garbled in (head, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok"):
        async with two_replicas() as (broken, other, proxy):
            broken.behaviour = other.behaviour = writes(garbled)
            answer = await ask(proxy.url, "a")
            assert (answer.status, answer.error["code"]) == (502, "replica_garbled")
            assert len(broken.calls) + len(other.calls) == 1


async def test_turns_wait_when_all_engines_die_and_come_back() -> None:
    """However many there are: what a lost replica had goes on elsewhere once, whatever the budget."""
    hangs = Gate()
    async with (
        fake_replica(hangs) as one,
        fake_replica(hangs) as other,
        running_proxy(one.url, other.url, retry_budget_ratio=0.0) as proxy,
    ):
        turns = [asyncio.create_task(ask(proxy.url, f"p{number}")) for number in range(130)]
        await until(lambda: len(one.calls) + len(other.calls) == 130)
        await asyncio.gather(one.stop(), other.stop())
        await proxy.up(0)
        await until(lambda: proxy.runtime.held_count == 130)
        one.behaviour = other.behaviour = answers()
        await asyncio.gather(one.start(), other.start())
        assert {answer.status for answer in await asyncio.gather(*turns)} == {200}


async def test_turn_in_flight_on_a_silent_replica_ends() -> None:
    """Before the first byte a turn goes elsewhere, or waits; after it the stream ends with one event."""
    hangs, polls = Gate([stream_head(), chunk(word("one"))]), {"poll_deadline_s": 0.2, "poll_silence_limit_s": 1.0}

    async def behave(call: Call) -> None:
        await (hangs if call.json()["messages"][0]["content"] == "begun" else Gate())(call)

    async with (
        fake_replica(behave) as silent,
        running_proxy(silent.url, policy="passthrough", policy_args={}, **polls) as proxy,
    ):
        begun = asyncio.create_task(ask(proxy.url, "begun", stream=True, content="begun"))
        waits = asyncio.create_task(ask(proxy.url, "waits"))
        await until(lambda: len(silent.calls) == 2)
        silent.is_silent = True
        answer = await begun
        assert not answer.whole
        assert events_of(answer.body)[-1]["error"]["code"] == "replica_lost"
        report = await breaker_of(proxy, silent)
        assert (report["up"], report["verdict"]) == (False, "silent")
        assert not waits.done(), "there is no other replica: it waits"
        silent.behaviour, silent.is_silent = answers(), False
        assert (await waits).status == 200
        assert (await breaker_of(proxy, silent))["verdict"] == "up"


async def test_turn_lost_by_a_restart_between_two_polls_is_retried() -> None:
    """The turn has no tries left, and its replica is up; but another process answers there than before."""

    def metrics(started_s: float) -> str:
        return f"{exposition(1_000_000)}process_start_time_seconds {started_s}\n"

    async with fake_replica(Gate()) as replica:
        replica.metrics = metrics(1.0)
        async with running_proxy(
            replica.url, policy="passthrough", policy_args={}, poll_interval_s=60.0, retries_count=0
        ) as proxy:
            waits = asyncio.create_task(ask(proxy.url, "a"))
            await until(lambda: replica.calls)
            replica.metrics, replica.behaviour = metrics(2.0), answers()
            for peer in list(replica.peers):
                peer.abort()
            assert (await waits).status == 200
            report = await breaker_of(proxy, replica)
            assert (report["up"], report["incarnation"]) == (True, 1)


async def test_turn_sent_before_a_restart_ends_although_its_connection_is_open() -> None:
    """Something in between keeps it open."""
    async with fake_replica(Gate()) as replica:
        replica.metrics = f"{exposition(1_000_000)}process_start_time_seconds 1\n"
        async with running_proxy(replica.url, policy="passthrough", policy_args={}) as proxy:
            waits = asyncio.create_task(ask(proxy.url, "a"))
            await until(lambda: replica.calls)
            polls_count = replica.polls_count
            await until(lambda: replica.polls_count > polls_count + 2)
            replica.behaviour = answers()
            replica.metrics = f"{exposition(1_000_000)}process_start_time_seconds 2\n"
            assert (await waits).status == 200
            assert len(replica.calls) == 2


async def test_a_replica_whose_streams_flow_is_not_silent() -> None:
    """A loaded engine may delay its polls for long."""
    gone = asyncio.Event()

    async def drip(call: Call) -> None:
        call.write(stream_head())
        while not gone.is_set():
            call.write(chunk(word("x")))
            await asyncio.sleep(0.1)
        call.write(LAST_CHUNK)

    polls = {"poll_deadline_s": 0.1, "poll_silence_limit_s": 2.0}
    async with fake_replica(drip) as loaded, running_proxy(loaded.url, **polls) as proxy:
        stream = asyncio.create_task(ask(proxy.url, "a", stream=True))
        await until(lambda: loaded.calls)
        loaded.is_silent = True
        silent_polls_count = loaded.polls_count + 30
        await until(lambda: loaded.polls_count >= silent_polls_count)
        assert (await breaker_of(proxy, loaded))["up"]
        gone.set()
        loaded.is_silent = False
        assert (await stream).whole


FREEZES = {"frozen_limit_s": 1.5, "policy": "passthrough", "policy_args": {}}
IDLE_QUEUE = 'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'


async def test_turn_in_flight_on_a_frozen_replica_goes_elsewhere() -> None:
    """It answers its polls, and nothing moves. It comes back with the first check that is answered."""
    async with (
        fake_replica(Gate()) as frozen,
        fake_replica() as healthy,
        running_proxy(frozen.url, healthy.url, **FREEZES) as proxy,
    ):
        frozen.metrics = IDLE_QUEUE
        turns = [asyncio.create_task(ask(proxy.url, f"p{number}")) for number in range(4)]
        served = await asyncio.gather(*turns)
        assert {(each.status, each.header("X-Replica-ID")) for each in served} == {(200, healthy.replica_id)}
        assert frozen.calls
        report = await breaker_of(proxy, frozen)
        assert (report["up"], report["verdict"]) == (False, "frozen")
        assert "stood still" in report["verdict_reason"]
        calls_count = len(frozen.calls)
        for number in range(6):
            assert (await ask(proxy.url, f"q{number}")).header("X-Replica-ID") == healthy.replica_id
        assert len(frozen.calls) == calls_count
        frozen.behaviour = answers()
        await proxy.up(2)
        assert (await breaker_of(proxy, frozen))["verdict"] == "up"


NO_COUNTERS = "up 1\n"
SGLANG_BUSY = 'sglang:num_running_reqs{model_name="m"} 3.0\nsglang:num_queue_reqs{model_name="m"} 9.0\n'


@pytest.mark.parametrize("metrics", [NO_COUNTERS, SGLANG_BUSY], ids=["none", "sglang"])
@pytest.mark.parametrize("is_alive", [False, True], ids=["frozen", "alive"])
async def test_a_stream_that_stands_still_tells_of_an_engine_whose_counters_do_not(
    metrics: str, is_alive: bool
) -> None:
    """A turn whose answer has begun does not wait in a queue; a check that is answered speaks for the engine."""
    stands, checks_count = Gate([stream_head(), chunk(word("one"))], [chunk(DONE), LAST_CHUNK]), 0

    async def behave(call: Call) -> None:
        nonlocal checks_count
        is_check = call.target == "/v1/completions"
        checks_count += is_check
        await (stands if call.target == CHAT or (is_check and not is_alive) else answers())(call)

    kind = {"backend_type": "sglang"} if metrics is SGLANG_BUSY else {}
    async with fake_replica(behave) as replica, running_proxy(replica.url, **FREEZES, **kind) as proxy:
        replica.metrics = metrics
        stream = asyncio.create_task(ask(proxy.url, "a", stream=True))
        await until(lambda: checks_count == 3)
        report = await breaker_of(proxy, replica)
        assert report["verdict"] == ("up" if is_alive else "frozen")
        stands.open()
        answer = await stream
        assert answer.whole is is_alive
        assert is_alive or events_of(answer.body)[-1]["error"]["code"] == "replica_lost"


async def test_a_replica_that_computes_a_long_prompt_at_once_is_not_frozen() -> None:
    """Nothing moves until that step ends; a check has to wait for it."""
    step = Gate()
    async with fake_replica(step) as busy, running_proxy(busy.url, **FREEZES) as proxy:
        busy.metrics = IDLE_QUEUE
        long = asyncio.create_task(ask(proxy.url, "a", content="word " * 200_000))
        await until(lambda: busy.calls)
        polls_count = busy.polls_count + 40
        await until(lambda: busy.polls_count >= polls_count)
        assert (await breaker_of(proxy, busy))["verdict"] == "up"
        step.open()
        assert (await long).status == 200


async def test_a_replica_that_computes_whole_answers_for_long_is_not_frozen() -> None:
    """No byte comes and no counter moves; but it answers the check, as an engine does that works on several at once."""
    gate, checks_count = Gate(), 0

    async def behave(call: Call) -> None:
        nonlocal checks_count
        if call.target == "/v1/completions":
            checks_count += 1
            await answers()(call)
        else:
            await gate(call)

    async with fake_replica(behave) as slow, running_proxy(slow.url, **FREEZES) as proxy:
        slow.metrics = IDLE_QUEUE
        turn_there = asyncio.create_task(ask(proxy.url, "a"))
        await until(lambda: checks_count == 3)
        assert (await breaker_of(proxy, slow))["verdict"] == "up"
        gate.open()
        assert (await turn_there).status == 200


@pytest.mark.parametrize(
    "events",
    [
        [event({"error": {"message": "the request queue is full", "type": "SERVICE_UNAVAILABLE", "code": 503}}), DONE],
        [word("one"), event({"error": {"message": "EngineCore", "code": 500}}), DONE],
        [word("one"), word("", "abort"), DONE],
    ],
    ids=["first", "later", "abort"],
)
async def test_an_error_inside_a_stream_is_no_finished_turn(events: list[bytes]) -> None:
    """It reaches the client as it is, ends no program, and counts under a name of its own."""
    async with fake_replica(streams(*events)) as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, CHAT, turn("a", stream=True), ("X-Program-Final", "1"))
        assert answer.body == b"".join(events)
        assert (await get(proxy.url, "/programs/a")).status == 200
        turns = (await metrics_of(proxy.url))["thunderagent_turns_total"]
        assert (turns["errored",], turns["finished",]) == (1, 0)


async def test_a_replica_whose_answers_have_errors_inside_is_failing() -> None:
    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, healthy, proxy):
        error = {"error": {"message": "EngineCore", "type": "InternalServerError", "code": 500}}
        broken.behaviour = answers(error)
        for number in range(20):
            assert (await ask(proxy.url, str(number))).status == 200
        assert len(broken.calls) == 3
        assert (await breaker_of(proxy, broken))["verdict"] == "failing"
        assert len(healthy.calls) == 20, "nothing reached the clients before"


MESSAGES = '{"type":"message_start","message":{"id":"m","role":"assistant","content":[],"usage":{"input_tokens":1}}}'
CREATED = event({"type": "response.created", "response": {"id": "r", "status": "in_progress"}})
FAILED = event({"type": "response.failed", "response": {"id": "r", "status": "failed", "error": {"code": "server"}}})
DEAD = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}


@pytest.mark.parametrize(
    "begins",
    [
        streams(event(DEAD), DONE),
        streams(b": ping\n\n", event(DEAD), DONE),
        streams(b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"x"}}\n\n'),
        streams(f"event: message_start\ndata: {MESSAGES}\n\n".encode(), b'event: error\ndata: {"type":"error"}\n\n'),
        streams(CREATED, FAILED),
        answers(DEAD),
    ],
    ids=["vllm", "comment", "messages", "started", "responses", "whole"],
)
async def test_an_answer_that_begins_with_an_error_is_computed_elsewhere(begins: Any) -> None:
    """Nothing of it has reached the client, so it is like a 5xx: status 200 was only a promise."""
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        broken.behaviour = begins
        for number in range(8):
            answer = await ask(proxy.url, str(number), stream=True)
            assert (answer.status, answer.whole, answer.header("X-Replica-ID")) == (200, True, healthy.replica_id)
        assert 0 < len(broken.calls) < 8
        assert (await get(proxy.url, "/programs/0")).json()["verdict"] == "ok"


@pytest.mark.parametrize("before", [[stream_head()], [stream_head(), chunk(CREATED)]], ids=["head", "announced"])
async def test_a_stream_without_an_event_goes_elsewhere_when_its_replica_dies(before: list[bytes]) -> None:
    """Engines send the head before they compute; no byte of it has reached the client."""
    dies_with = Gate(before, [chunk(word("one")), LAST_CHUNK])
    async with two_replicas() as (dies, healthy, proxy):
        dies.behaviour = healthy.behaviour = dies_with
        turns = [asyncio.create_task(ask(proxy.url, str(number), stream=True)) for number in range(8)]
        await until(lambda: len(dies.calls) + len(healthy.calls) == 8)
        healthy.behaviour = streams(word("one"), DONE)
        assert dies.calls
        await dies.stop()
        dies_with.open()
        for answer in await asyncio.gather(*turns):
            assert answer.status == 200
        assert len(dies.calls) + len(healthy.calls) == 8 + len(dies.calls)


async def test_an_answer_that_begins_with_an_error_everywhere_reaches_the_client() -> None:
    """It is the turn's own fault: it counts against neither replica, however many there are."""
    async with two_replicas(**BREAKS) as (one, other, proxy):
        one.behaviour = other.behaviour = streams(event(DEAD), DONE)
        for number in range(8):
            answer = await ask(proxy.url, str(number), stream=True)
            assert (answer.status, answer.body) == (200, event(DEAD) + DONE)
        assert len(one.calls) == len(other.calls) == 8
        assert {(await breaker_of(proxy, each))["breaker"] for each in (one, other)} == {"closed"}


@pytest.mark.parametrize(
    "error", [{"code": 400, "type": "BadRequestError"}, {"code": "x", "type": "invalid_request_error"}]
)
async def test_an_error_that_names_the_request_is_not_computed_elsewhere(error: dict[str, Any]) -> None:
    async with two_replicas(**BREAKS) as (one, other, proxy):
        one.behaviour = other.behaviour = streams(event({"error": {"message": "too long", **error}}), DONE)
        for number in range(4):
            assert (await ask(proxy.url, str(number), stream=True)).status == 200
        assert len(one.calls) + len(other.calls) == 4


async def test_an_engine_that_says_inside_an_answer_that_it_is_full_is_under_pressure() -> None:
    full = {"error": {"message": "The request queue is full.", "type": "SERVICE_UNAVAILABLE", "code": 503}}
    async with two_replicas(**BREAKS) as (broken, healthy, proxy):
        broken.behaviour = streams(event(full), DONE)
        for number in range(4):
            answer = await ask(proxy.url, str(number), stream=True)
            assert (answer.header("X-Replica-ID"), answer.whole) == (healthy.replica_id, True)
        assert len(broken.calls) == 1
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["verdict"], report["verdict_reason"]) == (
            "closed",
            "backpressure",
            "it answered 503",
        )


async def test_the_first_event_of_a_stream_is_not_delayed() -> None:
    hold = Gate([stream_head(), chunk(b": ping\n\n"), chunk(word("one"))])
    async with fake_replica(hold) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        wire.send("POST", CHAT, [JSON_TYPE], json.dumps(turn("a", stream=True)).encode())
        assert (await wire.head()).status == 200
        while b"one" not in await wire.chunk():
            pass


async def test_the_head_of_a_stream_goes_on_without_an_event_after_a_while() -> None:
    """Clients may limit the time to the head; an engine sends it before it computes."""
    hold = Gate([stream_head()])
    async with fake_replica(hold) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        wire.send("POST", CHAT, [JSON_TYPE], json.dumps(turn("a", stream=True)).encode())
        assert (await wire.head()).header("X-Replica-ID") == replica.replica_id


async def test_a_replica_that_fails_every_other_turn_is_failing() -> None:
    """It never fails often in a row; no client notices."""
    count = 0

    async def every_other(call: Call) -> None:
        nonlocal count
        count += 1
        await answers(status="500 Internal Server Error" if count % 2 else "200 OK")(call)

    async with two_replicas(**{**BREAKS, "breaker_backoff_s": 60.0}) as (broken, _, proxy):
        broken.behaviour = every_other
        for number in range(40):
            assert (await ask(proxy.url, str(number))).status == 200
        report = await breaker_of(proxy, broken)
        assert (report["breaker"], report["verdict"]) == ("open", "failing")
        assert report["verdict_reason"].startswith("5 of the last 12 turns failed")


class Cache:
    """Behave as an engine with a prefix cache of so many tokens; each turn's prompt has 2,000, of its own program."""

    def __init__(self, capacity_tokens: int = 1_000_000, *, tells: bool = True) -> None:
        self.capacity_tokens = capacity_tokens
        self.tells = tells
        self.is_broken = False
        self.kept: dict[str, None] = {}

    async def __call__(self, call: Call) -> None:
        name = call.json()["messages"][0]["content"].split()[0]
        cached_tokens = 1900 if name in self.kept and not self.is_broken else 0
        self.kept.pop(name, None)
        self.kept[name] = None
        while len(self.kept) * 2_010 > self.capacity_tokens:
            del self.kept[next(iter(self.kept))]
        usage: dict[str, Any] = {"prompt_tokens": 2_000, "completion_tokens": 10, "total_tokens": 2_010}
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        await answers({"choices": [], "usage": usage})(call)


async def rounds(proxy: RunningProxy, rounds_count: int, programs_count: int = 8) -> None:
    for _ in range(rounds_count):
        for number in range(programs_count):
            assert (await ask(proxy.url, f"p{number}", content=f"p{number} {'word ' * 1600}")).status == 200


async def verdicts(proxy: RunningProxy, *replicas: FakeReplica) -> list[str]:
    """Return the verdicts after two more polls of each."""
    for replica in replicas:
        polls_count = replica.polls_count + 4
        await until(lambda replica=replica, polls_count=polls_count: replica.polls_count >= polls_count)
    return [(await breaker_of(proxy, replica))["verdict"] for replica in replicas]


async def test_a_replica_whose_cache_stops_hitting_until_it_restarts_is_collapsed() -> None:
    """Its programs leave it and keep their cache elsewhere; after a restart it is up, and its cache may be off."""
    caches = Cache(), Cache()
    async with (
        fake_replica(caches[0]) as breaks,
        fake_replica(caches[1]) as healthy,
        running_proxy(breaks.url, healthy.url) as proxy,
    ):
        await rounds(proxy, 8)
        assert await verdicts(proxy, breaks, healthy) == ["up", "up"]
        caches[0].is_broken = True
        await rounds(proxy, 3)
        assert await verdicts(proxy, breaks, healthy) == ["up", "up"], "of 20 turns some hit"
        await rounds(proxy, 6)
        assert await verdicts(proxy, breaks, healthy) == ["collapsed", "up"]
        assert "of what it was given" in (await breaker_of(proxy, breaks))["verdict_reason"]
        calls_count = len(breaks.calls)
        await rounds(proxy, 2)
        assert len(breaks.calls) == calls_count
        await breaks.stop()
        await until(lambda: not proxy.runtime.scheduler.replicas[breaks.replica_id].up)
        await breaks.start()
        await proxy.up(2)
        assert await verdicts(proxy, breaks, healthy) == ["up", "up"]
        proxy.runtime.replica_draining(healthy.replica_id)
        await rounds(proxy, 6)
        assert len(breaks.calls) > calls_count
        assert await verdicts(proxy, breaks) == ["up"], "it never kept since: its cache is off"


@pytest.mark.parametrize("tells", [True, False], ids=["tells", "does not tell"])
async def test_an_engine_that_evicts_for_want_of_memory_has_not_collapsed(tells: bool) -> None:
    """With more programs than room no turn finds its cache; nor, once others are gone, does the next one of each."""
    cache = Cache(100_000, tells=tells)
    async with (
        fake_replica(cache, capacity_tokens=100_000) as replica,
        running_proxy(replica.url, policy="passthrough", policy_args={}) as proxy,
    ):
        await rounds(proxy, 2, 24)
        await rounds(proxy, 1, 100)
        assert await verdicts(proxy, replica) == ["up"]
        others = [f"p{number}" for number in range(24, 100)]
        await post(proxy.url, "/programs/release", {"program_ids": others})
        await rounds(proxy, 1, 24)
        assert await verdicts(proxy, replica) == ["up"]


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


async def test_a_program_says_whether_it_may_be_trained_on() -> None:
    """One field: an engine's failure is not the agent's, and a turn that is answered after all is none."""
    async with fake_replica() as replica, running_proxy(replica.url, retries_count=0) as proxy:

        async def verdict() -> tuple[str, str, str | None]:
            report = (await get(proxy.url, "/programs/a")).json()
            return report["verdict"], report["verdict_cause"], report["verdict_replica_id"]

        assert (await ask(proxy.url, "a")).status == 200
        assert await verdict() == ("ok", "", None)
        replica.behaviour = answers({"error": "no"}, status="500 Internal Server Error")
        await ask(proxy.url, "a", content="second")
        assert await verdict() == ("infrastructure_failed", "status 500", replica.replica_id)
        replica.behaviour = answers()
        await ask(proxy.url, "a", content="another one")
        assert (await verdict())[0] == "infrastructure_failed", "the agent went on without that answer"
        await ask(proxy.url, "a", content="second")
        assert await verdict() == ("ok", "", None), "the same turn was answered after all"
        for behaviour, expected in (
            (answers({"error": "no"}, status="400 Bad Request"), ("agent_error", "status 400")),
            (writes(), ("infrastructure_failed", "replica_closed_early")),
            (answers({"error": {"code": 500, "message": "x"}}), ("infrastructure_failed", "in its answer: 500")),
        ):
            replica.behaviour = behaviour
            await ask(proxy.url, "a", content="third")
            assert (await verdict())[:2] == expected
            assert any(expected[0] in each["why"] for each in (await get(proxy.url, "/programs/a")).json()["story"])


async def test_the_answer_to_a_release_says_whether_a_program_may_be_trained_on() -> None:
    """It is the last moment to ask. Without a word it may be."""
    async with fake_replica() as replica, running_proxy(replica.url, retries_count=0) as proxy:
        for program_id in ("good", "bad", "worse"):
            await ask(proxy.url, program_id)
        replica.behaviour = answers({"error": "no"}, status="500 Internal Server Error")
        for program_id in ("bad", "worse"):
            await ask(proxy.url, program_id, content="second")
        verdict = {
            "verdict": "infrastructure_failed",
            "verdict_cause": "status 500",
            "verdict_replica_id": replica.replica_id,
        }
        released = await post(proxy.url, "/programs/release", {"program_id": "bad"})
        assert released.json() == {"program_id": "bad", "released": True, **verdict}
        released = await post(proxy.url, "/programs/release", {"program_ids": ["good", "worse", "nobody"]})
        assert released.json() == {"released": True, "released_ids": ["good", "worse"], "not_ok": {"worse": verdict}}
