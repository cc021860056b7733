"""The proxy in front of SGLang: embedded engines with its dialect, and one that records its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.doubles.sglang.server import SglangServer
from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Gate,
    Wire,
    answers,
    ask,
    cap,
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
)
from thunderagent.config import ServeConfig
from thunderagent.serving.building import build_runtime
from thunderagent.serving.serving import proxy
from thunderagent.simulator.embedded.endpoints import EngineServer
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import Build, running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Call, FakeReplica

SGLANG = "sglang:max_total_num_tokens 1000000.0\n"
LONG = {"max_tokens": 5000, "ignore_eos": True}  # about 40 s on the demo engine


@asynccontextmanager
async def sglang(build: Build = SglangServer, *, timing: str = "instant", **config: Any) -> AsyncIterator[str]:
    """Serve an engine in this process; yield its URL."""
    engine = EngineConfig(kv_tokens=config.pop("kv_tokens", 16_000), timing=profile(timing))
    async with running(ServerConfig(engine, port=0, grace_s=0.0, **config), build) as url:
        yield url


@asynccontextmanager
async def recording(
    behaviour: Any = None, *, statuses: dict[str, str] | None = None
) -> AsyncIterator[tuple[FakeReplica, list[tuple[str, Any, str | None]]]]:
    """Run a fake replica that the poller takes for an SGLang; yield it and the notices that it got."""
    heard: list[tuple[str, Any, str | None]] = []
    turns = behaviour or answers()

    async def behave(call: Call) -> None:
        if call.target in {"/abort_request", "/close_session"}:
            heard.append((call.target, call.json(), call.header("Authorization")))
            await answers(b"", status=(statuses or {}).get(call.target, "200 OK"))(call)
        else:
            await turns(call)

    async with fake_replica(behave) as replica:
        replica.metrics = SGLANG
        yield replica, heard


async def engine_metric(url: str, name: str) -> float:
    return sum((await metrics_of(url))[name].values())


async def requests_count(url: str) -> int:
    """Return how many requests are in an embedded engine."""
    (load,) = (await get(url, "/v1/loads")).json()["loads"]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


async def until_requests(url: str, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await requests_count(url) != count:
            await asyncio.sleep(0.01)


# --- scheduling


async def test_turns_are_scheduled_on_two_engines_and_hits_are_read() -> None:
    """Kind and capacity are detected; a program stays with its cache; answers and metrics show the hits."""
    async with (
        sglang(kv_tokens=8000) as first,
        sglang(kv_tokens=4000) as second,
        running_proxy(first, second) as proxy,
    ):
        programs = {}
        for number in range(4):
            history = f"program{number} " * 400
            for _ in range(2):
                answer = await ask(proxy.url, f"p{number}", content=history, max_tokens=20, ignore_eos=True)
                assert answer.status == 200
                history += answer.json()["choices"][0]["message"]["content"]
            programs[f"p{number}"] = answer.header("X-Replica-ID")
        reports = (await get(proxy.url, "/replicas")).json()["replicas"]
        assert [(report["kind"], report["capacity_tokens"]) for report in reports] == [
            ("sglang", 8000),
            ("sglang", 4000),
        ]
        for program_id, replica_id in programs.items():
            program = (await get(proxy.url, f"/programs/{program_id}")).json()
            assert program["replica_id"] == replica_id
            assert program["cached_tokens_total"] == 400
        async with asyncio.timeout(DEADLINE_S):  # until the next poll
            while (
                sum(
                    report["engine"]["cache_hit_tokens_total"]
                    for report in (await get(proxy.url, "/replicas")).json()["replicas"]
                )
                != 1600
            ):
                await asyncio.sleep(0.01)


async def test_request_that_does_not_fit_waits() -> None:
    """The pool's size comes from the engine alone: when programs fill it, the last ones are held."""
    async with sglang(kv_tokens=2048, timing="demo") as url, running_proxy(url) as proxy:
        bodies = [turn(content=f"{number} " + "word " * 600, max_tokens=40, ignore_eos=True) for number in range(6)]
        turns = [
            asyncio.create_task(post(proxy.url, f"/p/p{number}{CHAT}", body, ("X-Program-Final", "1")))
            for number, body in enumerate(bodies)
        ]
        await until(lambda: proxy.runtime.held_count > 0)
        assert {answer.status for answer in await asyncio.gather(*turns)} == {200}


async def test_both_kinds_serve_side_by_side() -> None:
    """Each replica is read by its kind."""
    async with (
        sglang() as first,
        sglang(EngineServer) as second,
        running_proxy(first, second) as proxy,
    ):
        reports = (await get(proxy.url, "/replicas")).json()["replicas"]
        said = {report["url"]: (report["kind"], report["capacity_tokens"]) for report in reports}
        assert said == {first: ("sglang", 16_000), second: ("vllm", 16_000)}
        answered = {(await ask(proxy.url, f"p{number}")).header("X-Replica-ID") for number in range(8)}
        assert len(answered) == 2


async def test_an_engine_without_metrics_is_scheduled_all_the_same() -> None:
    """Its server information has its size."""

    async def behave(call: Call) -> None:
        known = call.target == "/get_server_info"
        await answers({"max_total_num_tokens": 3000, "dp_size": 2}, status="200 OK" if known else "404 Not Found")(call)

    async with fake_replica(behave) as replica:
        replica.metrics = None
        async with running_proxy(replica.url) as proxy:
            report = (await get(proxy.url, "/replicas")).json()["replicas"][0]
            assert (report["kind"], report["capacity_tokens"]) == ("sglang", 6000)


@pytest.mark.parametrize("stream", [True, False])
async def test_its_own_endpoint_is_a_turn(stream: bool) -> None:
    """It takes and gives tokens, as trainers need: claims, hits and our id are as on other endpoints."""
    async with sglang() as url, running_proxy(url) as proxy:
        body = {"input_ids": list(range(200, 400)), "stream": stream, "sampling_params": {"max_new_tokens": 8}}
        for _ in range(2):
            answer = await post(proxy.url, "/generate", body, ("X-Program-ID", "p"))
            said = events_of(answer.body)[-2] if stream else answer.json()
            assert len(said["meta_info"]["id"]) == 32
        program = (await get(proxy.url, "/programs/p")).json()
        assert (program["turn_count"], program["prompt_tokens_total"], program["cached_tokens_total"]) == (2, 400, 192)


# --- leaving


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_keeps_zombies_is_rid_of_them_within_a_second(stream: bool) -> None:
    """A closed connection alone would leave the request there for 40 s."""
    async with sglang(timing="demo", keep_zombies=True) as url, running_proxy(url) as proxy:
        body = json.dumps(turn("p", content="word " * 100, stream=stream, **LONG)).encode()
        async with Wire.open(url) as wire:  # without the proxy: it continues
            wire.send("POST", CHAT, [], json.dumps(turn(stream=False, **LONG, rid="zombie")).encode())
            await until_requests(url, 1)
        await asyncio.sleep(0.05)
        assert await requests_count(url) == 1
        await post(url, "/abort_request", {"rid": "zombie"})
        await until_requests(url, 0)
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, [], body)
            await until_requests(url, 1)
            if stream:
                await wire.head()
        await until_requests(url, 0)
        await proxy.nothing_left()
        assert await engine_metric(url, "sglang:num_aborted_requests_total") == 2


@pytest.mark.parametrize("moment", ["before the first byte", "in a stream", "in a whole answer"])
async def test_abort_names_the_request_at_any_moment(moment: str) -> None:
    """The abort has the id and the key of the turn."""
    half = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    before = {
        "before the first byte": [],
        "in a stream": [stream_head(), b"%x\r\n%s\r\n" % (len(word("a")), word("a"))],
    }
    gate = Gate(before.get(moment, [half]))
    async with recording(gate) as (replica, heard), running_proxy(replica.url) as proxy:
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, [("Authorization", "Bearer key")], json.dumps(turn("p")).encode())
            call = await replica.call()
            if moment == "in a stream":
                await wire.head()
        await until(lambda: heard)
        sent = call.json()
        assert heard == [("/abort_request", {"rid": sent.pop("rid")}, "Bearer key")]
        assert sent == turn()


async def test_a_turn_by_the_facade_is_ended_by_its_id_too() -> None:
    """This happens when its client leaves, on the replica that the client chose."""
    async with recording(Gate()) as (replica, heard), running_proxy(replica.url) as proxy:
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", f"/workers/{replica.replica_id}{CHAT}", [], json.dumps(turn("p")).encode())
            call = await replica.call()
        await until(lambda: heard)
        sent = call.json()
        assert heard == [("/abort_request", {"rid": sent.pop("rid")}, None)]
        assert sent == turn()


async def test_a_turn_that_ends_well_or_never_went_there_is_not_aborted() -> None:
    """The same holds for a turn that the client named: its name may be the beginning of others."""
    gate = Gate()
    async with recording(gate) as (replica, heard), running_proxy(replica.url, **cap(1)) as proxy:
        async with Wire.open(proxy.url) as running_turn:
            running_turn.send("POST", CHAT, [], json.dumps(turn("first")).encode())
            await replica.call()
            async with Wire.open(proxy.url) as held:
                held.send("POST", CHAT, [], json.dumps(turn("second")).encode())
                await until(lambda: proxy.runtime.held_count == 1)
            await until(lambda: proxy.runtime.held_count == 0)
            gate.open()
            assert (await running_turn.answer()).status == 200
        replica.behaviour = Gate()
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, [], json.dumps(turn("first", rid="1")).encode())
            call = await replica.call(1)
            assert json.loads(call.body) == turn(rid="1")
        await proxy.nothing_left()
        await asyncio.sleep(0.05)
        assert heard == []


async def test_turns_that_a_shutdown_cuts_off_are_ended_in_their_engine() -> None:
    """At the end of the grace period the proxy still sends a last message to the engine."""
    async with sglang(timing="demo", keep_zombies=True) as url:
        settings = ServeConfig.load(backends=(url,), port=0, poll_interval_s=0.05, grace_s=0.0)
        runtime, _ = build_runtime(settings)
        async with proxy(settings, runtime, settings.backends) as proxy_url:
            await until(lambda: runtime.scheduler.open_replicas)
            cut_off = asyncio.create_task(post(proxy_url, CHAT, turn("p", **LONG)))
            await until_requests(url, 1)
        await until_requests(url, 0)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await cut_off


async def test_an_engine_without_aborts_is_asked_once() -> None:
    """Its 404 is no error for anybody."""
    async with (
        recording(Gate(), statuses={"/abort_request": "404 Not Found"}) as (replica, heard),
        running_proxy(replica.url) as proxy,
    ):
        for number in range(3):
            async with Wire.open(proxy.url) as wire:
                wire.send("POST", CHAT, [], json.dumps(turn("p")).encode())
                await until(lambda: sum(call.target == CHAT for call in replica.calls) == number + 1)  # noqa: B023
            await proxy.nothing_left()
            await until(lambda: heard)
            await asyncio.sleep(0.02)
        assert len(heard) == 1


# --- the end of a program


async def test_a_release_gives_tagged_memory_back_wherever_it_lies() -> None:
    """This needs the option; another program keeps its memory."""
    async with (
        sglang() as first,
        sglang() as second,
        running_proxy(first, second, engine_tags=True, policy="sticky") as proxy,
    ):
        for program_id in ("p", "q"):
            await ask(proxy.url, program_id, content=f"{program_id} " * 100, max_tokens=8, ignore_eos=True)
        assert sum([await engine_metric(url, "simulator:tagged_tokens") for url in (first, second)]) == 192
        released = await post(proxy.url, "/programs/release", {"program_id": "p"})
        assert released.json()["released"] is True
        async with asyncio.timeout(DEADLINE_S):
            while sum([await engine_metric(url, "simulator:tagged_tokens") for url in (first, second)]) != 96:
                await asyncio.sleep(0.01)


async def test_only_programs_that_were_tagged_are_ended_and_only_once() -> None:
    """The option or the client tags them; a replica without a turn of the program gets no notice."""
    async with recording() as (replica, heard), running_proxy(replica.url) as proxy:
        await ask(proxy.url, "untagged")
        assert "session_id" not in replica.calls[-1].json()
        await post(proxy.url, CHAT, turn(session_id="tagged"))
        for _ in range(2):
            await post(proxy.url, "/programs/release", {"program_ids": ["untagged", "tagged"]})
        await until(lambda: heard)
        await asyncio.sleep(0.05)
        assert heard == [("/close_session", {"session_id": "tagged"}, None)]


async def test_an_engine_without_close_session_is_asked_once_and_a_dead_one_delays_nothing() -> None:
    """A release is answered at once, whatever the engine does with it."""
    async with (
        recording(statuses={"/close_session": "404 Not Found"}) as (replica, heard),
        running_proxy(replica.url, engine_tags=True) as proxy,
    ):
        for number in range(3):
            await ask(proxy.url, f"p{number}")
            assert replica.calls[-1].json()["session_id"] == f"p{number}"
            assert (await post(proxy.url, "/programs/release", {"program_id": f"p{number}"})).status == 200
            await until(lambda: heard)
            await asyncio.sleep(0.02)
        assert len(heard) == 1
        await ask(proxy.url, "last")
        await replica.stop()
        async with asyncio.timeout(DEADLINE_S):
            assert (await post(proxy.url, "/programs/release", {"program_id": "last"})).status == 200


# --- observation


async def test_a_pause_and_new_weights_that_somebody_else_gave_are_observed() -> None:
    """A trainer contacts only the engine: no turn is granted while it is paused, and new weights empty its cache."""
    async with sglang() as url, running_proxy(url, observe_interval_s=0.05) as proxy:
        (replica,) = proxy.runtime.scheduler.replicas.values()
        await ask(proxy.url, "a", max_tokens=5)

        async def report() -> Any:
            return (await get(proxy.url, "/replicas")).json()["replicas"][0]

        async with asyncio.timeout(DEADLINE_S):
            while (await report())["weight_version"] != "default":
                await asyncio.sleep(0.01)
        assert (await post(url, "/pause_generation", {"mode": "in_place"})).status == 200
        await until(lambda: replica.suspended_for)
        assert (await report())["suspended_for"] == ["observed"]
        waiting = asyncio.create_task(ask(proxy.url, "a", max_tokens=5))
        await until(lambda: proxy.runtime.held_count == 1)
        assert replica.flushed_s < 0
        assert (await post(url, "/update_weight_version", {"new_version": "step-7"})).json()["success"] is True
        await until(lambda: replica.flushed_s > 0)
        assert (await report())["weight_version"] == "step-7"
        assert not waiting.done()
        assert (await post(url, "/continue_generation", {})).status == 200
        answer = await waiting
        assert answer.json()["metadata"]["weight_version"] == "step-7"
        assert not replica.suspended_for


async def test_a_pause_that_went_through_the_proxy_ends_where_the_engine_goes_on() -> None:
    """It ends whoever resumed the engine."""
    async with sglang() as url, running_proxy(url, observe_interval_s=0.05) as proxy:
        (replica,) = proxy.runtime.scheduler.replicas.values()
        assert (await post(proxy.url, "/pause_generation", {"mode": "in_place"})).status == 200
        assert list(replica.suspended_for) == ["pause"]
        await asyncio.sleep(0.3)
        assert list(replica.suspended_for) == ["pause"]
        assert (await post(url, "/continue_generation", {})).status == 200
        await until(lambda: not replica.suspended_for)


async def test_an_older_engine_that_does_not_say_whether_it_is_paused_is_left_alone() -> None:
    """Its 404 says nothing about a pause."""
    async with (
        recording(answers({"detail": "Not Found"}, status="404 Not Found")) as (replica, _),
        running_proxy(replica.url, observe_interval_s=0.05) as proxy,
    ):
        await until(lambda: sum(call.target == "/ready" for call in replica.calls) > 2)
        assert not next(iter(proxy.runtime.scheduler.replicas.values())).suspended_for


async def test_loads_of_an_engine_count_the_turns_held_for_it() -> None:
    """Trainers wait until a load is zero; the answer has the engine's own count, too."""
    async with sglang(timing="demo") as url, running_proxy(url, **cap(1)) as proxy:
        first = asyncio.create_task(ask(proxy.url, "a", **LONG))
        await until(lambda: proxy.runtime.leases_count == 1)
        others = [asyncio.create_task(ask(proxy.url, name, **LONG)) for name in ("b", "c")]
        await until(lambda: proxy.runtime.held_count == 2)
        (replica_id,) = proxy.runtime.scheduler.replicas
        async with asyncio.timeout(DEADLINE_S):
            while (await get(url, "/v1/loads")).json()["loads"][0]["num_running_reqs"] != 1:
                await asyncio.sleep(0.01)
        (own,) = (await get(url, "/v1/loads")).json()["loads"]
        (load,) = (await get(proxy.url, "/v1/loads")).json()["loads"]
        assert (own["num_waiting_reqs"], load["num_waiting_reqs"], load["num_running_reqs"]) == (0, 2, 1)
        passed_on = (await get(proxy.url, f"/workers/{replica_id}/v1/loads")).json()
        (load,) = passed_on["loads"]
        assert load["max_total_num_tokens"] == own["max_total_num_tokens"]
        assert (load["num_waiting_reqs"], load["num_running_reqs"]) == (2, 1)
        for task in (first, *others):
            task.cancel()


async def test_loads_of_an_older_engine_are_added_up_as_it_says_them() -> None:
    """It has one sum for each rank, and one over all."""
    said = {
        "loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "num_total_reqs": 1}],
        "aggregate": {"total_running_reqs": 1, "total_waiting_reqs": 0, "total_reqs": 1},
    }

    async def behave(call: Call) -> None:
        if call.target == "/v1/loads":
            await answers(said)(call)
        else:
            await Gate()(call)

    async with recording(behave) as (replica, _), running_proxy(replica.url, **cap(1)) as proxy:
        tasks = [asyncio.create_task(ask(proxy.url, name)) for name in ("a", "b")]
        await until(lambda: proxy.runtime.held_count == 1)
        passed_on = (await get(proxy.url, f"/workers/{replica.replica_id}/v1/loads")).json()
        for task in tasks:
            task.cancel()
    assert passed_on["loads"] == [{"num_running_reqs": 1, "num_waiting_reqs": 1, "num_total_reqs": 2}]
    assert passed_on["aggregate"] == {"total_running_reqs": 1, "total_waiting_reqs": 1, "total_reqs": 2}
