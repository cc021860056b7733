"""Engine control: what trainers tell all replicas or one of them, and what happens to the turns meanwhile."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    DONE,
    LAST_CHUNK,
    USAGE_EVENT,
    Call,
    FakeReplica,
    Gate,
    RunningProxy,
    Wire,
    answers,
    ask,
    cap,
    chunk,
    events_of,
    exchange,
    exposition,
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
from tests.loopback import free_ports
from thunderagent.errors import ReplicaRemovedError
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.control.engine_control import EngineControl, EngineControlSettings
from thunderagent.proxy.fleet.commands import COMMANDS, REPLICA_COMMANDS
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.target import Target
from thunderagent.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Answer
    from thunderagent.proxy.fleet.client import ReplicaClient

Behaviour = "Callable[[Call], Awaitable[None]]"


@asynccontextmanager
async def replicas_behind(count: int = 2, **config: Any) -> AsyncIterator[tuple[RunningProxy, list[FakeReplica]]]:
    """Run a proxy with this number of replicas."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_replica()) for _ in range(count)]
        proxy = await stack.enter_async_context(running_proxy(*(replica.url for replica in replicas), **config))
        yield proxy, replicas


async def replica_report(proxy: RunningProxy, replica: FakeReplica) -> dict[str, Any]:
    reports = (await get(proxy.url, "/replicas")).json()["replicas"]
    return next(report for report in reports if report["url"] == replica.url)


def id_of(replica: FakeReplica) -> str:
    return replica.url.removeprefix("http://")


def resident_tokens(scheduler: Scheduler, replica: FakeReplica) -> int:
    """The part of program "a" that is expected in a replica's memory."""
    return scheduler.book.resident_tokens(scheduler.programs["a"], scheduler.replicas[id_of(replica)])


async def held(proxy: RunningProxy, count: int) -> None:
    await until(lambda: proxy.runtime.held_count == count)


# --- To all replicas


@pytest.mark.parametrize(
    "path",
    [
        *("/pause?mode=keep", "/flush_cache", "/update_weights_from_disk", "/v1/load_lora_adapter"),
        *("/pd_role_switch", "/open_session", "/close_session", "/add_external_corpus", "/remove_external_corpus"),
        *("/load_lora_adapter_from_tensors", "/inference/v1/abort_requests"),
    ],
)
async def test_a_call_goes_to_every_replica_as_it_is(path: str) -> None:
    """Method, query, headers and body reach each one; if all answers are equal, that is the answer."""
    body = b'{"odd" :  [1,2] }'
    async with replicas_behind(3) as (proxy, replicas):
        for replica in replicas:
            replica.behaviour = answers(b'{"status": "ok" }')
        answer = await post(proxy.url, path, body, ("X-Trainer", "me"))
        assert (answer.status, answer.body) == (200, b'{"status": "ok" }')
        assert answer.header("X-Engine-Control-Replies") == ", ".join(f"{id_of(replica)}=200" for replica in replicas)
        for replica in replicas:
            (call,) = replica.calls
            assert (call.method, call.target, call.body, call.header("x-trainer")) == ("POST", path, body, "me")
        if path.startswith("/pause"):
            await post(proxy.url, "/resume")


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/flush_cache", "/is_paused", "/abort_requests"])
async def test_an_engine_with_several_ranks_is_told_once(path: str) -> None:
    """One URL is one engine; its result counts for each of its ranks, and is reported for each."""
    async with fake_replica() as ranked, fake_replica() as single:
        ranked.metrics, ranked.behaviour = exposition(1000, 1000, 1000), answers({"ranks": 3})
        async with running_proxy(ranked.url, single.url, up=4, data_parallel_ranks="auto") as proxy:
            answer = await post(proxy.url, path, {}, ("X-Sent", "1"))
            assert [(call.target, call.header("X-Sent")) for call in ranked.calls] == [(path, "1")]
            assert ranked.calls[0].header("X-data-parallel-rank") is None
            assert len(single.calls) == 1
            ranks = [f"{ranked.replica_id}/{rank}" for rank in range(3)]
            assert set(answer.json()["replicas"]) == {*ranks, single.replica_id}
            assert answer.json()["replicas"][ranks[2]] == {"status": 200, "body": {"ranks": 3}}
            replicas = proxy.runtime.scheduler.replicas.values()
            expected = [("pause",)] * 4 if path.startswith("/pause") else [()] * 4
            assert [tuple(replica.suspended_for) for replica in replicas] == expected


async def test_command_to_one_rank_holds_for_its_engine() -> None:
    """A trainer that talks to each replica pauses the engine with the first call."""
    async with fake_replica() as ranked, fake_replica() as single:
        ranked.metrics = exposition(1000, 1000)
        async with running_proxy(ranked.url, single.url, up=3, data_parallel_ranks="auto") as proxy:
            assert (await post(proxy.url, f"/workers/{ranked.replica_id}%2F1/pause?mode=keep")).status == 200
            assert len(ranked.calls) == 1
            paused = {r.replica_id for r in proxy.runtime.scheduler.replicas.values() if r.suspended_for}
            assert paused == {f"{ranked.replica_id}/{rank}" for rank in range(2)}


async def test_a_put_goes_to_every_replica_too() -> None:
    async with replicas_behind(2) as (proxy, replicas):
        answer = await exchange(proxy.url, "PUT", "/register_transfer_engine_info", body=b"{}")
        assert answer.status == 200
        assert [[call.method for call in replica.calls] for replica in replicas] == [["PUT"], ["PUT"]]


async def test_no_turn_meets_a_weight_update_session_of_sglang() -> None:
    """From the beginning to the end of the session, on all replicas: each would refuse the update otherwise."""
    async with replicas_behind(2) as (proxy, replicas):
        assert (await post(proxy.url, "/begin_weight_update", {})).status == 200
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        assert (await post(proxy.url, "/update_weights_from_tensor", {"flush_cache": False})).status == 200
        assert proxy.runtime.held_count == 1
        assert (await post(proxy.url, "/end_weight_update", {})).status == 200
        assert (await waiting).status == 200
        for replica in replicas:
            told = [call.target for call in replica.calls if not call.target.startswith("/v1")]
            assert told == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


async def test_a_flush_is_known_by_get_too() -> None:
    """SGLang takes GET and POST; its answer is text."""
    async with replicas_behind() as (proxy, replicas):
        for replica in replicas:
            replica.behaviour = answers(b"Cache flushed.\n", headers=[("content-type", "text/plain; charset=utf-8")])
        answer = await get(proxy.url, "/flush_cache")
        assert (answer.status, answer.body) == (200, b"Cache flushed.\n")
        assert answer.header("Content-Type") == "text/plain; charset=utf-8"
        assert [replica.calls[0].method for replica in replicas] == ["GET", "GET"]


async def test_answers_that_differ_are_joined() -> None:
    """The joint answer is yes only if all replicas said yes; it includes each one's answer."""
    async with replicas_behind() as (proxy, (one, other)):
        one.behaviour, other.behaviour = answers({"is_paused": True}), answers({"is_paused": False})
        answer = (await get(proxy.url, "/is_paused")).json()
        assert answer["is_paused"] is False
        assert answer["replicas"][id_of(other)] == {"status": 200, "body": {"is_paused": False}}


async def test_a_replica_that_fails_makes_the_call_fail_and_is_not_taken_for_paused() -> None:
    """The other replicas are paused: their turns wait, and new programs' turns go where an engine works."""
    async with replicas_behind() as (proxy, (one, other)):
        one.behaviour = answers({"status": "paused"})
        other.behaviour = answers({"error": "no"}, status="500 Internal Server Error")
        answer = await post(proxy.url, "/pause?mode=keep")
        assert answer.status == 502
        assert answer.json()["error"]["code"] == "replicas_disagree"
        assert answer.json()["replicas"][id_of(other)] == {"status": 500, "body": {"error": "no"}}
        assert (await replica_report(proxy, one))["suspended_for"] == ["pause"]
        assert (await replica_report(proxy, other))["suspended_for"] == []
        other.behaviour = answers()
        assert (await ask(proxy.url, "a")).header("X-Replica-ID") == id_of(other)
        one.behaviour = answers({"status": "resumed"})
        await post(proxy.url, "/resume")
        assert (await replica_report(proxy, one))["suspended_for"] == []


async def test_a_replica_that_is_gone_makes_the_call_fail() -> None:
    """That replica would come back with other weights than the rest."""
    async with replicas_behind() as (proxy, (one, other)):
        one.behaviour = answers({"success": True})
        await other.stop()
        answer = await post(proxy.url, "/update_weights_from_disk", {"model_path": "m"})
        assert answer.status == 502
        assert answer.json()["replicas"][id_of(other)]["status"] == 502


async def test_refusal_by_all_engines_is_passed_on() -> None:
    """vLLM refuses it without its development mode."""
    async with replicas_behind() as (proxy, replicas):
        for replica in replicas:
            replica.behaviour = answers({"detail": "Not Found"}, status="404 Not Found")
        answer = await post(proxy.url, "/pause")
        assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})


async def test_calls_are_told_one_after_another_but_reading_waits_for_nobody() -> None:
    """A second call begins after the answer to the first; reads of an engine do not wait."""
    gate = Gate()
    async with replicas_behind(1) as (proxy, (replica,)):
        replica.behaviour = gate
        first = asyncio.create_task(post(proxy.url, "/update_weights_from_tensor", {"x": 1}))
        await replica.call()
        second = asyncio.create_task(post(proxy.url, "/flush_cache"))
        replica.behaviour = answers({"is_paused": False})
        assert (await get(proxy.url, "/is_paused")).status == 200
        assert len(replica.calls) == 2
        gate.open()
        assert [(await first).status, (await second).status] == [200, 200]
        assert [call.target for call in replica.calls] == ["/update_weights_from_tensor", "/is_paused", "/flush_cache"]


async def test_a_call_that_waited_goes_to_the_replicas_that_are_there_then() -> None:
    """One that joined meanwhile would serve older weights without it; one that left cannot answer."""
    gate = Gate()
    async with replicas_behind() as (proxy, (one, other)), fake_replica() as joined:
        one.behaviour = gate
        first = asyncio.create_task(post(proxy.url, "/update_weights_from_tensor"))
        await one.call()
        second = asyncio.create_task(post(proxy.url, "/update_weights_from_disk"))
        await asyncio.sleep(0.05)
        assert (await post(proxy.url, "/replicas", {"url": joined.url})).status == 201
        assert (await exchange(proxy.url, "DELETE", f"/replicas/{id_of(other)}?force=1")).status == 200
        gate.open()
        await first
        answer = await second
        assert (answer.status, len(joined.calls)) == (200, 1)
        assert answer.header("X-Engine-Control-Replies") == f"{id_of(one)}=200, {id_of(joined)}=200"


async def test_a_replica_that_is_removed_while_a_call_to_it_is_read_says_so() -> None:
    runtime = Runtime(Scheduler(Passthrough()))
    settings = EngineControlSettings(timeout_s=1.0, weight_sync_limit_s=1.0, lease_limit_s=1.0, lease_total_s=1.0)
    control = EngineControl(runtime, cast("ReplicaClient", None), Replicas(runtime, []), settings)
    request = make_mocked_request("POST", "/flush_cache")
    with pytest.raises(ReplicaRemovedError, match="replica gone:1 was removed"):
        await control.tell_one(request, Target.parse("/flush_cache", ""), "gone:1", COMMANDS["/flush_cache"])


async def test_a_call_that_takes_too_long_is_over_but_not_its_effect() -> None:
    """The call's own limit counts, not that of turns; grants stay stopped until the engine answers a call."""
    async with replicas_behind(1, engine_control_timeout_s=1.0) as (proxy, (replica,)):
        replica.behaviour = Gate()
        answer = await post(proxy.url, "/update_weights")
        assert answer.status == 504
        assert (await replica_report(proxy, replica))["suspended_for"] == ["unanswered"]
        turn_waits = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        replica.behaviour = answers()
        assert (await post(proxy.url, "/update_weights")).status == 200
        assert (await turn_waits).status == 200
    async with replicas_behind(1, silence_timeout_s=0.1) as (proxy, (replica,)):
        gate = replica.behaviour = Gate()
        update = asyncio.create_task(post(proxy.url, "/update_weights"))
        await asyncio.sleep(0.3)
        gate.open()
        assert (await update).status == 200


@pytest.mark.parametrize("path", REPLICA_COMMANDS)
async def test_command_that_differs_by_replica_is_not_sent_to_all(path: str) -> None:
    """The answer tells how to send it to one replica; sent that way it passes."""
    async with replicas_behind() as (proxy, (one, other)):
        answer = await post(proxy.url, path, {"rank_offset": 1})
        assert (answer.status, answer.error["code"]) == (409, "per_replica_only")
        assert f"/workers/REPLICA_ID{path}" in answer.error["message"]
        assert (await post(proxy.url, f"/workers/{id_of(one)}{path}", {"rank_offset": 1})).status == 200
        assert one.calls[0].json() == {"rank_offset": 1}
        assert not other.calls


@pytest.mark.parametrize("one", [False, True])
async def test_a_call_goes_on_when_its_caller_leaves(one: bool) -> None:
    """No turn runs into it, the next call waits for it, and what it was told is known at its end."""
    async with replicas_behind(1) as (proxy, (replica,)):
        gate = replica.behaviour = Gate()
        prefix = f"/workers/{id_of(replica)}" if one else ""
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", f"{prefix}/sleep?level=1", (), b"{}")
            call = await replica.call()
        turn_waits = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        assert not call.left.is_set()
        replica.behaviour = answers()
        gate.open()
        await until(lambda: "sleep" in proxy.runtime.replicas.states[id_of(replica)].suspended_for)
        assert proxy.runtime.held_count == 1
        assert (await post(proxy.url, "/wake_up")).status == 200
        assert (await turn_waits).status == 200
        assert proxy.runtime.replicas.states[id_of(replica)].suspended_for == ()


async def test_question_to_an_engine_ends_with_its_caller() -> None:
    async with replicas_behind(1) as (proxy, (replica,)):
        replica.behaviour = Gate()
        async with Wire.open(proxy.url) as wire:
            wire.send("GET", "/is_paused")
            call = await replica.call()
        await call.left.wait()


async def test_a_call_that_still_waits_for_another_is_not_told_when_its_caller_left() -> None:
    async with replicas_behind(1) as (proxy, (replica,)):
        gate = replica.behaviour = Gate()
        first = asyncio.create_task(post(proxy.url, "/update_weights"))
        await replica.call()
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", "/sleep", (), b"{}")
            await asyncio.sleep(0.05)
        replica.behaviour = answers()
        gate.open()
        assert (await first).status == 200
        assert (await post(proxy.url, "/flush_cache")).status == 200
        assert [call.target for call in replica.calls] == ["/update_weights", "/flush_cache"]


class Doubtful:
    """An engine that leaves a call unanswered, and may say what became of it."""

    def __init__(
        self, said: dict[str, Any] | None, status: str = "200 OK", breaks_off: tuple[str, ...] = ("/pause", "/sleep")
    ) -> None:
        self.told: list[str] = []
        self._said, self._status, self._breaks_off = said, status, breaks_off

    async def __call__(self, call: Call) -> None:
        self.told.append(call.target)
        if call.method == "GET" and call.target.startswith("/is_"):
            await answers(self._said or {}, status=self._status)(call)
        elif call.method == "POST" and call.target.startswith(self._breaks_off):
            call.close()
        else:
            await answers()(call)


async def test_an_engine_that_does_not_answer_does_not_delay_what_others_are_asked() -> None:
    """The pause of one is seen while the question to the other is still open, again and again."""
    is_paused = False

    async def engine(call: Call) -> None:
        await answers({"is_paused": is_paused} if call.target == "/is_paused" else {})(call)

    async with (
        fake_replica(engine) as replica,
        fake_replica(Gate()) as silent,
        running_proxy(replica.url, silent.url, observe_interval_s=0.02, poll_deadline_s=3600.0) as proxy,
    ):
        await until(lambda: silent.calls)
        for is_paused in (True, False, True):
            wanted = ("observed",) if is_paused else ()
            await until(lambda wanted=wanted: proxy.runtime.replicas.states[replica.replica_id].suspended_for == wanted)
        assert len(silent.calls) == 1


@pytest.mark.parametrize(
    "path", ["/abort_requests", "/pause?mode=abort", "/inference/v1/abort_requests", "/sleep?level=1"]
)
async def test_abort_by_a_trainer_is_no_engine_failure(path: str) -> None:
    """Whether it aborts at one replica or, as trainers do, at all."""
    async with replicas_behind(2) as (proxy, replicas):
        gates = [
            Gate([stream_head(), chunk(word("one"))], [chunk(word("", "abort")), chunk(DONE), LAST_CHUNK])
            for _ in replicas
        ]
        for replica, gate in zip(replicas, gates, strict=True):
            replica.behaviour = gate
        turns = [asyncio.create_task(ask(proxy.url, str(number), stream=True)) for number in range(4)]
        await until(lambda: sum(len(replica.calls) for replica in replicas) == 4)
        for replica in replicas:
            replica.behaviour = answers({"status": "aborted"})
        telling = asyncio.create_task(post(proxy.url, path, {"request_ids": ["x"]}))
        await until(lambda: all(any(path in call.target for call in replica.calls) for replica in replicas))
        for gate in gates:
            gate.open()
        assert (await telling).status == 200
        await asyncio.gather(*turns)
        for number in range(4):
            assert (await get(proxy.url, f"/programs/{number}")).json()["verdict"] == "aborted_by_trainer"


@pytest.mark.parametrize(
    ("path", "field", "cause"), [("/pause?mode=keep", "is_paused", "pause"), ("/sleep", "is_sleeping", "sleep")]
)
@pytest.mark.parametrize("holds", [True, False, None])
async def test_an_engine_that_left_a_call_unanswered_is_asked(
    path: str, field: str, cause: str, holds: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did it, or did not; where it cannot say, grants stay stopped, and the report says so."""
    monkeypatch.setattr("thunderagent.proxy.control.engine_control.ASK_AGAIN_S", 0.02)
    async with replicas_behind(1) as (proxy, (replica,)):
        engine = Doubtful(None if holds is None else {field: holds}, "404 Not Found" if holds is None else "200 OK")
        replica.behaviour = engine
        assert (await post(proxy.url, path)).status == 502
        state = proxy.runtime.replicas.states
        if holds is None:
            await until(lambda: f"/{field}" in engine.told)
            await asyncio.sleep(0.1)
            assert state[id_of(replica)].suspended_for == ("unanswered",)
            assert engine.told.count(f"/{field}") == 1
        else:
            expected = (cause,) if holds else ()
            await until(lambda: state[id_of(replica)].suspended_for == expected)


@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_engine_that_left_a_resume_unanswered_is_asked(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns wait until it says that it goes on; if it says often enough that it does not, until the next resume."""
    monkeypatch.setattr("thunderagent.proxy.control.engine_control.ASK_AGAIN_S", 0.02)
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, "/pause?mode=keep")
        engine = replica.behaviour = Doubtful({"is_paused": not goes_on}, breaks_off=("/resume",))
        assert (await post(proxy.url, "/resume")).status == 502
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        if not goes_on:
            await until(lambda: engine.told.count("/is_paused") == 3)
            await asyncio.sleep(0.1)
            assert (engine.told.count("/is_paused"), proxy.runtime.held_count) == (3, 1)
            replica.behaviour = answers()
            await post(proxy.url, "/resume")
        assert (await waiting).status == 200


async def test_what_an_engine_said_before_the_next_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked because a pause was not answered, and resumed while it was about to answer."""
    monkeypatch.setattr("thunderagent.proxy.control.engine_control.ASK_AGAIN_S", 0.02)
    may_say = asyncio.Event()

    async def engine(call: Call) -> None:
        if call.target == "/is_paused":
            await may_say.wait()
            await answers({"is_paused": True})(call)
        elif call.target.startswith("/pause"):
            call.close()
        else:
            await answers()(call)

    async with replicas_behind(1) as (proxy, (replica,)):
        replica.behaviour = engine
        assert (await post(proxy.url, "/pause?mode=keep")).status == 502
        await until(lambda: any(call.target == "/is_paused" for call in replica.calls))
        assert (await post(proxy.url, "/resume")).status == 200
        may_say.set()
        await asyncio.sleep(0.1)
        assert proxy.runtime.replicas.states[id_of(replica)].suspended_for == ()


async def test_an_engine_is_asked_for_all_that_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sleeps and was paused, too, gets no turn because one of the two is over."""
    monkeypatch.setattr("thunderagent.proxy.control.engine_control.ASK_AGAIN_S", 0.02)
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, "/pause?mode=keep")
        await post(proxy.url, "/sleep")
        replica.behaviour = Doubtful({"is_paused": False, "is_sleeping": True})
        proxy.runtime.replica_down(id_of(replica))
        proxy.runtime.replica_up(id_of(replica), 1000)
        state = proxy.runtime.replicas.states
        await until(lambda: state[id_of(replica)].suspended_for == ("sleep",))


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        ({"is_paused": True}, "200 OK", ("pause",)),
        ({"is_paused": False}, "200 OK", ()),
        (None, "404 Not Found", ()),
    ],
)
async def test_an_engine_that_was_only_unreachable_is_still_paused(
    said: dict[str, Any] | None, status: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked before it gets a turn; one that restarted denies it, or does not know the question."""
    monkeypatch.setattr("thunderagent.proxy.control.engine_control.ASK_AGAIN_S", 0.02)
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, "/pause?mode=keep")
        engine = replica.behaviour = Doubtful(said, status)
        proxy.runtime.replica_down(id_of(replica))
        await until(lambda: proxy.runtime.replicas.states[id_of(replica)].suspended_for == ("unanswered",))
        proxy.runtime.replica_up(id_of(replica), 1000)
        await until(lambda: "/is_paused" in engine.told)
        await until(lambda: proxy.runtime.replicas.states[id_of(replica)].suspended_for == expected)


# --- Turns meanwhile


async def test_no_turn_is_sent_to_an_engine_that_is_paused_and_all_are_afterwards() -> None:
    """Programs stay where they are, a turn of each kind waits, `/queue` and the story say why."""
    async with replicas_behind(1, no_replica_limit_s=1.5, idle_limit_s=1.5) as (proxy, (replica,)):
        assert (await ask(proxy.url, "old")).status == 200
        await post(proxy.url, "/pause?mode=keep")
        calls_count = len(replica.calls)
        waiting = [asyncio.create_task(ask(proxy.url, program_id)) for program_id in ("old", "new", None)]
        await held(proxy, 3)
        await asyncio.sleep(2.0)  # longer than every limit
        queue = (await get(proxy.url, "/queue")).json()
        assert (queue["suspended_for"], queue["turns_held_count"], queue["held_in_place_count"]) == (["pause"], 3, 1)
        assert (await get(proxy.url, "/summary")).json()["now"]["turns_held_count"] == 3
        for program_id in ("old", "new"):
            program = (await get(proxy.url, f"/programs/{program_id}")).json()
            assert program["hold_reason"] == "suspended"
            assert program["waiting"]["what_must_happen"] == "grants must go on, which are suspended for: pause"
        assert (await get(proxy.url, "/programs/old")).json()["status"] == "active"
        assert (await get(proxy.url, "/ready")).status == 200
        assert len(replica.calls) == calls_count
        await post(proxy.url, "/resume")
        assert [(await each).status for each in waiting] == [200, 200, 200]


async def test_a_pause_in_mid_generation_costs_no_byte() -> None:
    """The stream continues when the engine does, after any time, and no limit applies."""
    gate = Gate([stream_head(), chunk(word("one"))], [chunk(word("two")), chunk(DONE), LAST_CHUNK])
    async with replicas_behind(1, idle_limit_s=1.2, forget_limit_s=1.3, no_replica_limit_s=0.1) as (proxy, (replica,)):
        await ask(proxy.url, "resting")
        async with Wire.open(proxy.url) as wire:
            replica.behaviour = gate
            wire.send("POST", "/v1/chat/completions", (), json.dumps(turn("a", stream=True)).encode())
            assert (await wire.head()).status == 200
            assert await wire.chunk() == word("one")
            replica.behaviour = answers({"status": "paused"})
            assert (await post(proxy.url, "/pause?mode=keep&clear_cache=false")).status == 200
            await asyncio.sleep(1.5)
            assert (await get(proxy.url, "/programs/resting")).json()["status"] == "active"
            assert (await get(proxy.url, "/replicas")).json()["replicas"][0]["up"] is True
            await post(proxy.url, "/resume")
            gate.open()
            rest = b""
            while data := await wire.chunk():
                rest += data
            assert rest == word("two") + DONE
        await until(lambda: proxy.runtime.scheduler.programs.get("resting") is None)  # its limits run again


LIMITS = {
    "silence": {"silence_timeout_s": 1.2},
    "first byte": {"first_byte_timeout_s": 1.2},
    "total": {"total_timeout_s": 1.2},
}
LIMIT_CODES = {"silence": "replica_timeout", "first byte": "first_byte_timeout", "total": "total_timeout"}
SAID_PAUSED = {
    "pause": ("/pause?mode=keep", "/resume"),
    "one": ("/workers/{}/pause?mode=keep", "/workers/{}/resume"),
    "hook": ("/weight_sync/begin", "/weight_sync/end"),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("said", SAID_PAUSED)
async def test_an_engine_that_is_paused_may_be_silent_for_longer_than_any_limit(limit: str, said: str) -> None:
    """This holds before the first byte and in a stream; when the engine resumes the answers are complete."""
    parts = ([stream_head(), chunk(word("one"))], [chunk(word("two") + DONE), LAST_CHUNK])
    whole, part = Gate(), Gate(*parts)

    async def engine(call: Call) -> None:
        if call.target == CHAT:
            await (part if call.json().get("stream") else whole)(call)
        else:
            await answers()(call)

    async with fake_replica(engine) as replica, running_proxy(replica.url, **LIMITS[limit], retries_count=0) as proxy:
        before = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call()
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, (), json.dumps(turn("b", stream=True)).encode())
            answer = await wire.head()
            first = await wire.chunk()
            begin, end = (path.format(id_of(replica)) for path in SAID_PAUSED[said])
            assert (await post(proxy.url, begin)).status == 200
            await asyncio.sleep(1.3)
            assert not before.done()
            assert (await post(proxy.url, end)).status == 200
            whole.open()
            part.open()
            rest = await wire.body(answer)
            assert rest.whole
            assert first + rest.body == word("one") + word("two") + DONE
        assert ((await before).status, (await before).body) == (200, b"{}")


@pytest.mark.parametrize("limit", LIMITS)
async def test_an_engine_that_is_paused_no_longer_has_its_limits_again(limit: str) -> None:
    """The limits count from the end of the pause: an engine that hangs then is detected."""
    gate = Gate()

    async def engine(call: Call) -> None:
        await (gate if call.target == CHAT else answers())(call)

    async with fake_replica(engine) as replica, running_proxy(replica.url, **LIMITS[limit], retries_count=0) as proxy:
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call()
        await post(proxy.url, "/pause?mode=keep")
        await asyncio.sleep(1.3)
        await post(proxy.url, "/resume")
        began_s = monotonic()
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (504, LIMIT_CODES[limit])
        assert monotonic() - began_s > 0.1


async def test_sleep_lasts_until_all_of_the_engine_is_awake() -> None:
    """Weights alone are not enough to run a turn."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, "/sleep?level=1")
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        await post(proxy.url, "/wake_up?tags=weights")
        await post(proxy.url, "/resume")
        assert (await replica_report(proxy, replica))["suspended_for"] == ["sleep"]
        await post(proxy.url, "/wake_up?tags=kv_cache")
        assert (await waiting).status == 200


async def test_memory_that_was_released_comes_back_by_its_tags() -> None:
    """The tags are SGLang's words, in the body."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, "/release_memory_occupation", {})
        await post(proxy.url, "/resume_memory_occupation", {"tags": ["weights"]})
        assert (await replica_report(proxy, replica))["suspended_for"] == ["memory"]
        await post(proxy.url, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert (await replica_report(proxy, replica))["suspended_for"] == []


@pytest.mark.parametrize(
    ("path", "body", "forgotten"),
    [
        ("/flush_cache", {}, True),
        ("/reset_prefix_cache", {}, True),
        ("/update_weights_from_disk", {"model_path": "m"}, True),
        ("/update_weights_from_distributed", {"flush_cache": False}, False),
        ("/pause?mode=wait", {}, True),
        ("/pause?mode=wait&clear_cache=false", {}, False),
        ("/pause?mode=keep", {}, True),
        ("/pause?mode=keep&clear_cache=false", {}, False),
        ("/sleep", {}, True),
        ("/sleep?level=0", {}, False),
        ("/release_memory_occupation", {"tags": ["weights"]}, False),
        ("/update_weights", {"update_info": {}}, False),
        ("/finish_weight_update", {}, False),
        ("/end_weight_update", {}, False),
        ("/update_weight_version", {"new_version": "2"}, False),
        ("/collective_rpc", {"method": "echo"}, False),
        ("/load_lora_adapter", {"lora_name": "l"}, False),
    ],
)
async def test_the_ledger_forgets_what_a_cleared_cache_held(path: str, body: dict[str, Any], forgotten: bool) -> None:
    """It forgets nothing else; the program keeps its claim."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await ask(proxy.url, "a")
        scheduler = proxy.runtime.scheduler
        program = scheduler.programs.get("a")
        assert program is not None
        assert resident_tokens(scheduler, replica) == 13
        assert (await post(proxy.url, path, body)).status == 200
        assert resident_tokens(scheduler, replica) == (0 if forgotten else 13)
        assert program.claim_tokens == 13
        assert (await get(proxy.url, "/programs/a")).json()["status"] == "active"


async def test_a_cache_that_could_not_be_cleared_is_not_forgotten() -> None:
    """vLLM answers 200, and its body says no."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await ask(proxy.url, "a")
        replica.behaviour = answers({"success": False})
        assert (await post(proxy.url, "/reset_prefix_cache")).json() == {"success": False}
        assert resident_tokens(proxy.runtime.scheduler, replica) == 13


async def test_the_weight_version_is_shown() -> None:
    """It is the version that was last told."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, "/update_weights_from_disk", {"model_path": "m", "weight_version": "step-7"})
        assert (await replica_report(proxy, replica))["weight_version"] == "step-7"
        await post(proxy.url, "/update_weight_version", {"new_version": "step-8"})
        assert (await replica_report(proxy, replica))["weight_version"] == "step-8"


async def test_a_shutdown_while_nothing_is_granted_refuses_who_waits() -> None:
    """It does not wait until grants resume."""
    async with replicas_behind(1) as (proxy, _):
        await post(proxy.url, "/pause?mode=keep")
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        await proxy.runtime.close()
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")


async def test_a_release_while_nothing_is_granted_ends_the_program() -> None:
    """Its held turn gets its answer at once."""
    async with replicas_behind(1) as (proxy, _):
        await ask(proxy.url, "a")
        await post(proxy.url, "/pause?mode=keep")
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        assert (await post(proxy.url, "/finish_session?session_id=a")).json()["released"] is True
        assert (await waiting).error["code"] == "program_released"
        await post(proxy.url, "/resume")


# --- Aborts


def generate(program_id: str, **more: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}, "session_id": program_id, **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"abort_all": True}),
        ("/abort_requests", {}),
        ("/pause?mode=abort", {}),
        ("/pause", {}),
        ("/pause_generation", {"mode": "abort"}),
    ],
)
async def test_an_abort_of_all_ends_held_turns_with_tokens_in(path: str, body: dict[str, Any]) -> None:
    """Each gets the answer that its engine would give; turns with text stay held."""
    async with replicas_behind(1, **cap(1)) as (proxy, (replica,)):
        await ask(proxy.url, "first")
        waiting = [
            asyncio.create_task(post(proxy.url, "/generate", generate("a", rid="r1"))),
            asyncio.create_task(post(proxy.url, "/inference/v1/generate", {"token_ids": [1, 2], "program_id": "b"})),
            asyncio.create_task(
                post(proxy.url, "/v1/completions", {"model": "m", "prompt": [1, 2, 3, 4], "program_id": "c"})
            ),
        ]
        text = [
            asyncio.create_task(ask(proxy.url, "d")),
            asyncio.create_task(post(proxy.url, "/v1/completions", {"prompt": "some text", "program_id": "e"})),
        ]
        await held(proxy, 5)
        calls_count = len(replica.calls)
        assert (await post(proxy.url, path, body)).status == 200
        sglang, vllm, completion = [(await each).json() for each in waiting]
        assert sglang["meta_info"] == {
            "id": "r1",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "cached_tokens": 0,
        }
        assert (sglang["text"], sglang["output_ids"]) == ("", [])
        assert (vllm["choices"][0]["finish_reason"], vllm["choices"][0]["token_ids"]) == ("abort", [])
        assert (completion["choices"][0]["finish_reason"], completion["choices"][0]["text"]) == ("abort", "")
        assert completion["usage"]["prompt_tokens"] == 4
        assert len(replica.calls) == calls_count + 1  # none of them reached the engine
        assert proxy.runtime.outcome_counts["aborted"] == 3
        await held(proxy, 2)
        await post(proxy.url, "/resume")
        for each in text:
            await post(proxy.url, "/programs/release", {"all": True})
            await each


@pytest.mark.parametrize(
    ("kind", "path", "body", "aborted"),
    [
        ("sglang", "/update_weight_version", {"new_version": "2"}, True),
        ("sglang", "/update_weight_version", {"new_version": "2", "abort_all_requests": False}, False),
        ("vllm", "/update_weight_version", {"new_version": "2"}, False),
        ("sglang", "/update_weights_from_disk", {"model_path": "m", "abort_all_requests": True}, True),
        ("sglang", "/update_weights_from_disk", {"model_path": "m"}, False),
    ],
)
async def test_abort_at_the_engine_aborts_its_held_turns(
    kind: str, path: str, body: dict[str, Any], aborted: bool
) -> None:
    """A new name for the weights aborts everything on SGLang, unless told otherwise; an update, if told so."""
    async with replicas_behind(1, backend_type=kind, **cap(1)) as (proxy, (replica,)):
        if kind == "sglang":
            replica.metrics = "sglang:max_total_num_tokens 1000000.0\n"
        await ask(proxy.url, "first")
        waiting = asyncio.create_task(post(proxy.url, "/generate", generate("a", rid="r1")))
        await held(proxy, 1)
        assert (await post(proxy.url, path, body)).status == 200
        await held(proxy, 0 if aborted else 1)
        await post(proxy.url, "/finish_session?session_id=first")
        assert ("abort" in (await waiting).body.decode()) is aborted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "headers", "abort", "told"),
    [
        ("/generate", {"rid": "r-1", "input_ids": [1]}, (), "/abort_request", {"rid": "r-1"}),
        ("/generate", {"rid": "r-1", "text": "words"}, (), "/abort_request", {"rid": "r-1"}),
        (CHAT, {"rid": "r-1", "messages": []}, (), "/abort_request", {"rid": "r-1"}),
        (CHAT, {"request_id": "q", "messages": []}, (), "/abort_requests", {"request_ids": ["x", "chatcmpl-q"]}),
        (CHAT, {"messages": []}, (("X-Request-Id", "q"),), "/abort_requests", {"request_ids": ["chatcmpl-q"]}),
        (
            "/v1/completions",
            {"prompt": "words", "request_id": "q"},
            (),
            "/abort_requests",
            {"request_ids": ["cmpl-q-0"]},
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "request_id": "q"},
            (),
            "/inference/v1/abort_requests",
            {"request_ids": ["generate-tokens-q"]},
        ),
    ],
)
async def test_an_abort_by_id_ends_a_held_turn(
    path: str,
    body: dict[str, Any],
    headers: tuple[tuple[str, str], ...],
    abort: str,
    told: dict[str, Any],
    stream: bool,
) -> None:
    """In any API, as an engine would end it; the others stay held, and the engine is told, too."""
    async with replicas_behind(1, **cap(1)) as (proxy, (replica,)):
        await ask(proxy.url, "first")
        turn_ends = asyncio.create_task(post(proxy.url, path, {**body, "session_id": "a", "stream": stream}, *headers))
        other = asyncio.create_task(post(proxy.url, "/generate", generate("b", rid="r-11")))
        await held(proxy, 2)
        calls_count = len(replica.calls)
        assert (await post(proxy.url, abort, told)).status == 200
        answer = await turn_ends
        assert answer.status == 200
        events = events_of(answer.body) if stream else [answer.json()]
        assert any('"abort"' in json.dumps(event) for event in events)
        assert [call.target for call in replica.calls[calls_count:]] == [abort]
        await held(proxy, 1)
        await post(proxy.url, "/finish_session?session_id=first")
        assert (await other).status == 200


async def test_an_abort_by_id_in_an_api_without_aborts_is_an_error_in_it() -> None:
    async with replicas_behind(1, **cap(1)) as (proxy, (_,)):
        await ask(proxy.url, "first")
        body = {"model": "m", "max_tokens": 8, "messages": [], "session_id": "a"}
        waiting = asyncio.create_task(post(proxy.url, "/v1/messages", body, ("X-Request-Id", "q")))
        await held(proxy, 1)
        await post(proxy.url, "/abort_requests", {"request_ids": ["q"]})
        answer = await waiting
        assert (answer.status, answer.json()["error"]["code"]) == (503, "turn_aborted")


async def test_an_engine_knows_a_request_by_the_id_in_its_body() -> None:
    """On vLLM a header overrides the body, and we always send one."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await post(proxy.url, CHAT, {"messages": [], "request_id": "mine"})
        await post(proxy.url, CHAT, {"messages": [], "request_id": "mine"}, ("X-Request-Id", "head"))
        assert [call.header("X-Request-Id") for call in replica.calls] == ["mine", "head"]


async def test_an_abort_of_others_touches_no_held_turn() -> None:
    """Their ids are the engine's matter."""
    async with replicas_behind(1, **cap(1)) as (proxy, (replica,)):
        await ask(proxy.url, "first")
        waiting = asyncio.create_task(post(proxy.url, "/generate", generate("a")))
        await held(proxy, 1)
        await post(proxy.url, "/abort_request", {"rid": "x"})
        await post(proxy.url, "/abort_requests", {"request_ids": ["x"]})
        assert proxy.runtime.held_count == 1
        assert [call.target for call in replica.calls[1:]] == ["/abort_request", "/abort_requests"]
        await post(proxy.url, "/finish_session?session_id=first")
        assert (await waiting).status == 200


async def test_an_abort_does_not_wait_for_a_call_that_waits_for_it() -> None:
    """Otherwise a pause that waits for all turns to finish would wait for ever."""
    gate = Gate()
    async with replicas_behind(1) as (proxy, (replica,)):
        replica.behaviour = gate
        pause = asyncio.create_task(post(proxy.url, "/pause?mode=wait"))
        await replica.call()
        replica.behaviour = answers({"status": "aborted"})
        assert (await post(proxy.url, "/abort_requests", {})).status == 200
        gate.open()
        assert (await pause).status == 200
        await post(proxy.url, "/resume")


async def test_an_abort_that_overtakes_a_turn_on_its_way_is_told_again() -> None:
    """The engine gets the abort before it reads the turn: it aborts nothing, and then generates."""
    async with replicas_behind(1, **cap(1)) as (proxy, (replica,)):
        gate = Gate([], [http_json(generate_answer([7, 8]))])
        replica.behaviour = gate
        on_its_way = asyncio.create_task(post(proxy.url, "/generate", generate("a")))
        await replica.call()
        waiting = asyncio.create_task(post(proxy.url, "/generate", generate("b")))
        await held(proxy, 1)
        told_count = 0

        async def abort(call: Call) -> None:
            nonlocal told_count
            told_count += 1
            await answers({"status": "aborted"})(call)
            if told_count == 3:
                gate.open()

        replica.behaviour = abort
        assert (await post(proxy.url, "/abort_requests", {})).json() == {"status": "aborted"}
        assert told_count == 3
        assert (await on_its_way).json()["choices"][0]["finish_reason"] == "abort"
        assert (await waiting).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert [call.target for call in replica.calls] == ["/generate", *["/abort_requests"] * 3]


async def test_an_abort_is_told_once_where_all_turns_are_surely_known() -> None:
    """Their first bytes have arrived, so no abort can have overtaken them."""
    async with replicas_behind(1) as (proxy, (replica,)):
        gate = Gate([stream_head(), chunk(word("a"))], [chunk(DONE), LAST_CHUNK])
        replica.behaviour = gate
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", "/v1/chat/completions", (), json.dumps(turn("a", stream=True)).encode())
            assert (await wire.head()).status == 200
            await wire.chunk()
            replica.behaviour = answers({"status": "aborted"})
            assert (await post(proxy.url, "/abort_requests", {})).status == 200
            assert [call.target for call in replica.calls[1:]] == ["/abort_requests"]
            gate.open()


async def test_the_same_prompt_with_what_came_so_far_is_the_same_program_s_next_turn() -> None:
    """It counts once in the claim, and the time in between is not a tool's."""
    abort = {**generate_answer([7, 8]), "usage": None}
    async with replicas_behind(1) as (proxy, (replica,)):
        gate = Gate([], [http_json(abort)])
        replica.behaviour = gate
        first = asyncio.create_task(
            post(proxy.url, "/inference/v1/generate", {"token_ids": [1] * 100, "program_id": "a"})
        )
        await replica.call()
        replica.behaviour = answers({"status": "paused"})
        paused = asyncio.create_task(post(proxy.url, "/pause?mode=abort"))
        await until(lambda: len(replica.calls) == 2)
        gate.open()
        assert (await first).json()["choices"][0]["finish_reason"] == "abort"
        await paused
        again = asyncio.create_task(
            post(proxy.url, "/inference/v1/generate", {"token_ids": [1] * 100 + [7, 8], "program_id": "a"})
        )
        await held(proxy, 1)
        replica.behaviour = answers(generate_answer([9], "stop"))
        await post(proxy.url, "/resume")
        assert (await again).json()["choices"][0]["finish_reason"] == "stop"
        scheduler = proxy.runtime.scheduler
        assert len(scheduler.programs) == 1
        assert scheduler.knowledge.mean_tool_s == 0.0
        program = scheduler.programs.get("a")
        assert program is not None
        assert program.turn_count == 2


def generate_answer(token_ids: list[int], finish_reason: str = "abort") -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish_reason, "token_ids": token_ids, "logprobs": None}
    return {"request_id": "r", "choices": [choice]}


def http_json(value: object) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def test_slime_aborts_sixty_four_held_turns_at_once() -> None:
    """slime asks for the engines, aborts on each until its load is zero, and gets an abort for every turn."""
    async with replicas_behind(2, **cap(1)) as (proxy, replicas):
        await post(proxy.url, "/generate", generate("first"))
        for replica in replicas:
            replica.behaviour = slime_engine
        waiting = [
            asyncio.create_task(post(proxy.url, "/generate", generate(f"p{number}", return_logprob=True)))
            for number in range(64)
        ]
        await held(proxy, 64)
        assert (await get(proxy.url, "/v1/loads")).json()["aggregate"]["total_reqs"] == 64
        began_s = process_time()
        urls = [each["url"] for each in (await get(proxy.url, "/workers")).json()["workers"]]
        assert len(urls) == 2
        await asyncio.gather(*(abort_until_idle(url) for url in urls))
        results = [(await each).json() for each in waiting]
        assert process_time() - began_s < 3.0
        assert {result["meta_info"]["finish_reason"]["type"] for result in results} == {"abort"}
        assert all(result["meta_info"]["output_token_logprobs"] == [] for result in results)
        loads = (await get(proxy.url, "/v1/loads")).json()
        assert [load["num_total_reqs"] for load in loads["loads"]] == [0, 0]


async def slime_engine(call: Call) -> None:
    """Behave as SGLang with nothing to do."""
    if call.target.startswith("/v1/loads"):
        await answers({"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0}]})(
            call
        )
    else:
        await answers(b"")(call)


async def abort_until_idle(url: str) -> None:
    """Do what slime does (`abort_server_until_idle`)."""
    origin, _, path = url.partition("/workers/")
    while True:
        assert (await post(origin, f"/workers/{path}/abort_request", {"abort_all": True})).status == 200
        loads = (await get(origin, f"/workers/{path}/v1/loads?include=core,disagg,queues")).json()["loads"]
        if not sum(load["num_total_reqs"] for load in loads):
            return


async def test_a_held_stream_is_aborted_as_a_stream() -> None:
    """One event with the abort, and the end."""
    async with replicas_behind(1, **cap(1)) as (proxy, _):
        await ask(proxy.url, "first")
        waiting = asyncio.create_task(post(proxy.url, "/generate", generate("a", stream=True)))
        await held(proxy, 1)
        await post(proxy.url, "/abort_request", {"abort_all": True})
        answer = await waiting
        assert answer.header("Content-Type") == "text/event-stream"
        first, last = answer.body.removesuffix(b"\n\n").split(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        assert last == b"data: [DONE]"


# --- To one replica


async def test_the_facade_lists_urls_of_ours() -> None:
    """The lists have the shapes of SGLang's gateway and of slime's router."""
    async with replicas_behind() as (proxy, replicas):
        listed = (await get(proxy.url, "/workers")).json()
        assert [each["id"] for each in listed["workers"]] == [id_of(replica) for replica in replicas]
        urls = [f"{proxy.url}/workers/{id_of(replica)}" for replica in replicas]
        assert [each["url"] for each in listed["workers"]] == urls
        assert (listed["total"], listed["stats"]["healthy_workers"]) == (2, 2)
        assert (await get(proxy.url, "/list_workers")).json() == {"urls": urls}


async def test_the_facade_passes_everything_on() -> None:
    """Any method and path, byte for byte; an id that is not known is 404."""
    async with replicas_behind() as (proxy, (one, other)):
        one.behaviour = answers(b"\x00odd", headers=[("content-type", "x/y"), ("x-more", "1")])
        answer = await exchange(proxy.url, "PUT", f"/workers/{id_of(one)}/any/path?a=%2F", [("X-A", "b")], b"body")
        assert (answer.status, answer.body, answer.header("x-more")) == (200, b"\x00odd", "1")
        (call,) = one.calls
        assert (call.method, call.target, call.body, call.header("x-a")) == ("PUT", "/any/path?a=%2F", b"body", "b")
        assert not other.calls
        assert (await get(proxy.url, "/workers/nobody:1/health")).status == 404


async def test_a_pause_by_the_facade_stops_grants_on_that_replica_alone() -> None:
    """Its programs go to a replica that works."""
    async with replicas_behind() as (proxy, (one, other)):
        assert (await post(proxy.url, f"/workers/{id_of(one)}/pause?mode=keep")).status == 200
        assert (await replica_report(proxy, one))["suspended_for"] == ["pause"]
        for number in range(4):
            assert (await ask(proxy.url, f"p{number}")).header("X-Replica-ID") == id_of(other)
        await post(proxy.url, f"/workers/{id_of(one)}/resume")
        assert (await replica_report(proxy, one))["suspended_for"] == []


async def test_a_flush_by_the_facade_is_noticed() -> None:
    """The memory of that replica's programs counts as empty."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await ask(proxy.url, "a")
        await get(proxy.url, f"/workers/{id_of(replica)}/flush_cache")
        assert resident_tokens(proxy.runtime.scheduler, replica) == 0


async def test_a_turn_by_the_facade_is_load_on_that_replica() -> None:
    """It counts there while it runs, waits while grants there are suspended, and is anonymous."""
    gate = Gate()
    async with replicas_behind() as (proxy, (one, other)):
        await post(proxy.url, f"/workers/{id_of(other)}/pause?mode=keep")
        other.behaviour = gate
        path = f"/workers/{id_of(other)}/v1/chat/completions"
        turn_by_facade = asyncio.create_task(post(proxy.url, path, turn("a")))
        await held(proxy, 1)
        loads = (await get(proxy.url, "/v1/loads")).json()["loads"]
        assert {each["replica_id"]: each["num_total_reqs"] for each in loads} == {id_of(one): 0, id_of(other): 1}
        other.behaviour = answers({})
        await post(proxy.url, f"/workers/{id_of(other)}/resume")
        assert (await turn_by_facade).status == 200
        assert not one.calls
        assert len(proxy.runtime.scheduler.programs) == 0


async def test_a_turn_by_the_facade_is_a_turn() -> None:
    """Its usage is requested and read, our field is removed; a body that is no JSON object is left to the engine."""
    async with replicas_behind() as (proxy, (one, other)):
        path = f"/workers/{id_of(one)}/v1/chat/completions"
        one.behaviour = streams(word("hi"), USAGE_EVENT, DONE)
        answer = await post(proxy.url, path, turn("a", stream=True), ("X-Program-Final", "1"))
        assert (answer.status, answer.body) == (200, word("hi") + DONE)
        assert one.calls[0].json() == {**turn(stream=True), "stream_options": {"include_usage": True}}
        assert proxy.runtime.prompt_tokens_total == 10
        assert len(proxy.runtime.scheduler.programs) == 0
        one.behaviour = answers({"detail": "what?"}, status="400 Bad Request")
        answer = await post(proxy.url, path, b"rubbish")
        assert (answer.status, answer.json(), one.calls[1].body) == (400, {"detail": "what?"}, b"rubbish")
        assert not other.calls


async def test_a_turn_by_the_facade_ends_when_its_replica_does() -> None:
    """It never goes to another one."""
    async with replicas_behind() as (proxy, (one, other)):
        await post(proxy.url, f"/workers/{id_of(one)}/pause?mode=keep")
        path = f"/workers/{id_of(one)}/v1/chat/completions"
        waiting = asyncio.create_task(post(proxy.url, path, turn()))
        await held(proxy, 1)
        await one.stop()
        assert (await waiting).error["code"] == "no_replica"
        assert (await post(proxy.url, path, turn())).error["code"] == "no_replica"
        assert not other.calls


# --- The hook


async def test_nothing_is_granted_between_the_two_words_of_the_hook() -> None:
    """Each word may be said twice; the proxy takes in the version and the cleared cache."""
    async with replicas_behind(1) as (proxy, (replica,)):
        await ask(proxy.url, "a")
        assert (await post(proxy.url, "/weight_sync/end")).json() == {"suspended": False, "ended": False}
        assert (await post(proxy.url, "/weight_sync/begin")).json()["began"] is True
        assert (await post(proxy.url, "/weight_sync/begin", {"weight_version": 3})).json()["began"] is False
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        assert (await get(proxy.url, "/queue")).json()["suspended_for"] == ["weight_sync"]
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        assert (await post(proxy.url, "/weight_sync/end", {"weight_version": 3})).json()["ended"] is True
        assert (await waiting).status == 200
        assert (await replica_report(proxy, replica))["weight_version"] == "3"
        assert (await post(proxy.url, "/weight_sync/begin", b"rubbish")).status == 400


async def test_a_trainer_that_dies_is_found_out() -> None:
    """Grants resume after the limit."""
    async with replicas_behind(1, weight_sync_limit_s=0.2) as (proxy, _):
        await post(proxy.url, "/weight_sync/begin")
        assert (await ask(proxy.url, "a")).status == 200
        assert (await post(proxy.url, "/weight_sync/end")).json()["ended"] is False


# --- Observation


async def test_an_engine_that_somebody_else_paused_gets_no_turn() -> None:
    """The engine reports the pause itself, if polled; new weights invalidate its memory."""
    state = {"is_paused": False, "weight_version": "1"}

    async def engine(call: Call) -> None:
        told = {"/is_paused": "is_paused", "/weight_info": "weight_version"}.get(call.target)
        await answers({told: state[told]} if told else None)(call) if told else await answers()(call)

    async with replicas_behind(1, observe_interval_s=0.05) as (proxy, (replica,)):
        replica.behaviour = engine
        await ask(proxy.url, "a")
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        state["is_paused"] = True
        await until(lambda: proxy.runtime.scheduler.replicas[id_of(replica)].suspended_for)
        assert (await replica_report(proxy, replica))["suspended_for"] == ["observed"]
        assert (await replica_report(proxy, replica))["weight_version"] == "1"
        assert resident_tokens(proxy.runtime.scheduler, replica) == 13
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await held(proxy, 1)
        state.update(is_paused=False, weight_version="2")
        assert (await waiting).status == 200
        await until(lambda: proxy.runtime.scheduler.replicas[id_of(replica)].flushed_s > 0)


@pytest.mark.parametrize(
    "rubbish", [b'{"is_paused": "\xff"}', b"[" * 100_000, b"{", b"[]"], ids=["no UTF-8", "deep", "cut", "no object"]
)
async def test_an_engine_that_reports_rubbish_is_asked_again(rubbish: bytes) -> None:
    said: list[bytes] = [rubbish, b'{"is_paused": true}']

    async def engine(call: Call) -> None:
        body = said.pop(0) if call.target == "/is_paused" and len(said) > 1 else said[0]
        await answers(body if call.target == "/is_paused" else {})(call)

    async with replicas_behind(1, observe_interval_s=0.02) as (proxy, (replica,)):
        replica.behaviour = engine
        await until(lambda: proxy.runtime.scheduler.replicas[id_of(replica)].suspended_for)


async def test_engine_report_from_before_the_command_does_not_count() -> None:
    """A poll that began before a pause or a resume through the proxy, and ends after it, has the older state."""
    asked: asyncio.Queue[tuple[str, asyncio.Future[dict[str, Any]]]] = asyncio.Queue()

    async def engine(call: Call) -> None:
        if call.target in ("/is_paused", "/weight_info"):
            answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            await asked.put((call.target, answered))
            await answers(await answered)(call)
        else:
            await answers()(call)

    async with fake_replica(engine) as replica, running_proxy(replica.url, observe_interval_s=0.02) as proxy:

        async def poll() -> asyncio.Future[dict[str, Any]]:
            async with asyncio.timeout(DEADLINE_S):
                path, answer = await asked.get()
                while path != "/is_paused":
                    answer.set_result({"weight_version": "1"})
                    path, answer = await asked.get()
            return answer

        for command, late, then in (("pause?mode=keep", False, ["pause"]), ("resume", True, [])):
            answer = await poll()
            assert (await post(proxy.url, f"/{command}")).status == 200
            answer.set_result({"is_paused": late})
            answer = await poll()  # so that the result of the poll before is taken in
            assert (await replica_report(proxy, replica))["suspended_for"] == then
            answer.set_result({"is_paused": bool(then)})
        answer = await poll()
        answer.set_result({"is_paused": True})
        await until(lambda: proxy.runtime.scheduler.replicas[id_of(replica)].suspended_for)
        answer = await poll()
        answer.set_result({"is_paused": False})
        await until(lambda: not proxy.runtime.scheduler.replicas[id_of(replica)].suspended_for)


async def test_weights_that_an_engine_had_before_it_was_told_do_not_count() -> None:
    """Otherwise the proxy would forget what the new weights computed, and again at the next poll that reports them."""
    late: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    polled_count = 0

    async def engine(call: Call) -> None:
        nonlocal polled_count
        if call.target == "/weight_info":
            polled_count += 1
            version = "1" if polled_count == 1 else await late if polled_count == 2 else "2"
            await answers({"weight_version": version})(call)
        else:
            await answers({"is_paused": False} if call.target == "/is_paused" else {})(call)

    async with fake_replica(engine) as replica, running_proxy(replica.url, observe_interval_s=0.02) as proxy:
        await until(lambda: polled_count == 2)
        await post(proxy.url, "/update_weights_from_disk", {"weight_version": "2"})
        flushed_s = proxy.runtime.scheduler.replicas[id_of(replica)].flushed_s
        late.set_result("1")
        await until(lambda: polled_count >= 4)
        assert (await replica_report(proxy, replica))["weight_version"] == "2"
        assert proxy.runtime.scheduler.replicas[id_of(replica)].flushed_s == flushed_s > 0


# --- Leases over the API


async def test_a_caller_without_http_turns_takes_leases() -> None:
    """It waits like all others, and reports the result."""
    async with replicas_behind(1, **cap(1)) as (proxy, (replica,)):
        first = (await post(proxy.url, "/leases", {"program_id": "a", "prompt_tokens": 100})).json()
        assert (first["replica_id"], first["url"]) == (id_of(replica), replica.url)
        waiting = asyncio.create_task(post(proxy.url, "/leases", {"program_id": "b"}))
        await held(proxy, 1)
        path = f"/leases/{first['lease_id']}"
        assert (await post(proxy.url, f"{path}/progress", {"output_tokens": 5})).json()["held"] is True
        usage = {"prompt_tokens": 100, "output_tokens": 20}
        assert (await post(proxy.url, f"{path}/end", usage)).json()["ended"] is True
        assert (await post(proxy.url, f"{path}/end", usage)).json()["ended"] is False
        assert (await get(proxy.url, "/programs/a")).json()["context_tokens"] == 120
        await post(proxy.url, "/finish_session?session_id=a")
        second = (await waiting).json()
        assert second["held_s"] > 0
        assert (await post(proxy.url, f"/leases/{second['lease_id']}/end", {"outcome": "abandoned"})).status == 200
        assert not replica.calls
        rubbish: object
        for rubbish in ({"prompt_tokens": -1}, {"program_id": ""}, [], {"prompt_tokens": "many"}):
            assert (await post(proxy.url, "/leases", rubbish)).status == 400


async def test_a_lease_takes_what_the_headers_of_a_turn_say() -> None:
    """The lease takes parent, tenant, and how long the caller waits."""
    async with replicas_behind(1, **cap(1)) as (proxy, _):
        first = (await post(proxy.url, "/leases", {"program_id": "a", "parent_id": "p", "tenant": "red"})).json()
        program = (await get(proxy.url, "/programs/a")).json()
        assert (program["parent_id"], program["tenant"]) == ("p", "red")
        second = (await post(proxy.url, "/leases", {"program_id": "b", "patience_s": 2.0})).json()
        assert second["reason"] == "patience"
        assert second["held_s"] > 0.1
        for lease in (first, second):
            await post(proxy.url, f"/leases/{lease['lease_id']}/end")
        for rubbish in ({"patience_s": 0}, {"patience_s": "long"}, {"patience_s": 1e999}, {"tenant": "x" * 257}):
            assert (await post(proxy.url, "/leases", rubbish)).status == 400, rubbish


@pytest.mark.parametrize("said", ["a\nb", "a\x00", "\x1b[2J", "a\x7f", "a\x9bb", "a\u2028b", "a\u2029"])
async def test_a_name_is_checked_wherever_it_comes_from(said: str) -> None:
    """A body may not say what a header may not; nothing is opened."""
    async with replicas_behind(1) as (proxy, _):
        for path, name in (
            *(("/leases", each) for each in ("program_id", "branch_id", "group_id", "parent_id", "tenant", "model")),
            *(("/programs", each) for each in ("program_id", "group_id", "parent_id", "tenant", "program_class")),
            ("/programs/p/tools/start", "tool"),
            ("/programs/p/hints", "branch"),
        ):
            body = {"program_id": "p", "keep": "drop", name: said}
            answer = await post(proxy.url, path, body)
            assert (answer.status, answer.error["code"]) == (400, "invalid_program_id"), (path, name)
        answer = await post(proxy.url, "/v1/chat/completions", {**turn(), "program_id": said})
        assert answer.status == 400
        assert not proxy.runtime.programs
        await proxy.nothing_left()


async def test_a_lease_whose_caller_is_gone_comes_back() -> None:
    """It comes back after the limit, or at once if the caller left while it waited."""
    async with replicas_behind(1, lease_limit_s=0.2, **cap(1)) as (proxy, _):
        lease_id = (await post(proxy.url, "/leases", {"program_id": "a"})).json()["lease_id"]
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", "/leases", (), b'{"program_id": "b"}')
            await held(proxy, 1)
        await held(proxy, 0)
        await until(lambda: proxy.runtime.leases_count == 0)
        assert (await post(proxy.url, f"/leases/{lease_id}/end")).json()["ended"] is False


# --- SkyRL's sessions


async def test_sessions_end_as_often_as_they_are_told_to_and_begin_anew() -> None:
    """Ending twice, or an unknown id, is no error; the same id is a new program in the next epoch."""
    async with replicas_behind(1) as (proxy, _):
        await ask(proxy.url, "s")
        first = (await get(proxy.url, "/programs/s")).json()["generation"]
        for session_id, released in (("s", True), ("s", False), ("unknown", False)):
            answer = await post(proxy.url, f"/finish_session?session_id={session_id}")
            assert (answer.status, answer.json()["released"]) == (200, released)
        await ask(proxy.url, "s")
        assert (await get(proxy.url, "/programs/s")).json()["generation"] > first


# --- Rubbish


@pytest.mark.parametrize("path", [*COMMANDS, "/update_weights_by_magic"])
async def test_rubbish_reaches_the_engine_and_harms_nobody(path: str) -> None:
    """The engine decides how to answer it."""
    async with replicas_behind(1) as (proxy, (replica,)):
        replica.behaviour = answers({"error": "what?"}, status="400 Bad Request")
        for body in (b"\xff\x00{", b"[1, 2]", b'{"tags": {"a": 1}, "mode": [], "abort_all": null}', b'"' * 100):
            answer: Answer = await post(proxy.url, path + "?level=x&tags=&mode=%FF", body)
            assert answer.status == 400
        assert (await replica_report(proxy, replica))["suspended_for"] == []
        replica.behaviour = answers()
        assert (await ask(proxy.url, "a")).status == 200


# --- The admin port


async def test_with_an_admin_port_the_data_port_controls_nothing() -> None:
    """Both ports serve what agents call; spellings that an engine may understand do not get round the limit."""
    (admin_port,) = free_ports(1)
    async with replicas_behind(1, admin_port=admin_port) as (proxy, (replica,)):
        admin_url = f"http://127.0.0.1:{admin_port}"
        await ask(proxy.url, "a")
        await ask(admin_url, "a")
        calls_count = len(replica.calls)
        for method, path in (
            *(("POST", path) for path in [*COMMANDS, *REPLICA_COMMANDS, "/update_weights_from_disk"]),
            *(("POST", path) for path in ("//pause", "/%70ause", "/pause/", "/v1/pause", "/p/a/v1/pause")),
            *(
                ("GET", path)
                for path in ("/replicas", "/queue", "/tools", "/programs", "/programs/a", "/v1/loads", "/events")
            ),
            ("GET", "/workers"),
            ("GET", "/sandboxes"),
            ("GET", "/sandboxes/events"),
            ("GET", "/dashboard"),
            ("POST", f"/workers/{id_of(replica)}/pause"),
            ("POST", f"/workers/{id_of(replica)}/v1/chat/completions"),
            ("POST", "/weight_sync/begin"),
        ):
            assert (await exchange(proxy.url, method, path)).status == 404, path
        assert len(replica.calls) == calls_count
        for path in ("/health", "/ready", "/metrics"):
            assert (await get(proxy.url, path)).status == (await get(admin_url, path)).status == 200
        assert (await get(admin_url, "/queue")).status == 200
        assert (await post(admin_url, "/flush_cache")).status == 200
        assert (await post(proxy.url, "/finish_session?session_id=a")).json()["released"] is True
