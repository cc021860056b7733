"""What a client gets when its request is wrong, or a replica is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.integration.support import (
    ANSWER,
    CHAT,
    DONE,
    JSON_TYPE,
    LAST_CHUNK,
    SERVER_HEADERS,
    Gate,
    Wire,
    answers,
    ask,
    cap,
    chunk,
    engine,
    events_of,
    exposition,
    fake_replica,
    get,
    head_bytes,
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

# --- bad requests


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"5", b"null", b"\xff\xfe", b'{"messages": \xff}'])
async def test_body_that_is_no_json_object_gets_the_engines_own_answer(engine_url: str, body: bytes) -> None:
    """The proxy's answer is the engine's, byte for byte, and nothing enters the program table."""
    async with running_proxy(engine_url) as proxy:
        direct = await post(engine_url, CHAT, body)
        relayed = await post(proxy.url, f"/p/somebody{CHAT}", body)
        assert direct.status == 400
        assert (relayed.status, relayed.body) == (direct.status, direct.body)
        assert len(proxy.runtime.scheduler.programs) == 0


@pytest.mark.parametrize(
    "program_id", ["x" * 257, "é" * 129, "a\x00b", "a\nb", "a\x7f", "a\u0085b", "", [], {}, True, 1.5]
)
async def test_a_program_id_that_is_none_is_refused_in_the_openai_schema(program_id: object) -> None:
    """400 with a code, nothing is forwarded, nothing enters the program table."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, CHAT, {**turn(), "program_id": program_id})
        assert answer.status == 400
        assert answer.error["code"] == "invalid_program_id"
        assert answer.error["type"] == "invalid_request_error"
        assert not replica.calls
        assert len(proxy.runtime.scheduler.programs) == 0


@pytest.mark.parametrize("target", [b"*", b"http:///x", b"http://[::1/x", b"file:///etc/passwd", b"/health\xff"])
async def test_a_target_that_is_none_is_refused_in_the_openai_schema(target: bytes) -> None:
    """The proxy's own words refuse it, without the bytes that came."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        wire.send_raw(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await wire.answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert target not in answer.body


async def test_the_longest_program_id_is_taken() -> None:
    """256 bytes are allowed, and characters of several bytes."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        for program_id in ("x" * 256, "é" * 128, "😀" * 64):
            assert (await ask(proxy.url, program_id)).status == 200
        assert len(proxy.runtime.scheduler.programs) == 3


async def test_header_bytes_that_are_no_text_harm_nobody() -> None:
    """An id that is not UTF-8 is refused; if admitted, it would break the program list and the event log."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, CHAT, turn(), ("X-Program-ID", "a\udcff"))
        assert answer.status == 400
        assert answer.error["code"] == "invalid_program_id"
        branch = await post(proxy.url, CHAT, turn("a"), ("X-Program-Branch", "b\udcff"))
        assert branch.status in {200, 400}
        assert (await get(proxy.url, "/programs")).status == 200


async def test_a_body_over_the_limit_is_refused() -> None:
    """413 in the OpenAI schema, whether the length was announced or not; one byte less is served."""
    async with fake_replica() as replica, running_proxy(replica.url, max_body_bytes=10_000) as proxy:
        fitting = b'{"messages":"' + b"x" * (10_000 - 15) + b'"}'
        assert len(fitting) == 10_000
        assert (await post(proxy.url, CHAT, fitting)).status == 200
        for target in (CHAT, f"/p/a{CHAT}", "/v1/embeddings", "/programs/release"):
            answer = await post(proxy.url, target, fitting + b" ")
            assert answer.status == 413, target
            assert answer.error["code"] == "body_too_large"
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, [("Transfer-Encoding", "chunked")], chunk(fitting + b" ") + LAST_CHUNK)
            assert (await wire.answer()).status == 413
        assert len(replica.calls) == 1


# --- no replica


async def test_without_a_replica_a_turn_is_held_and_then_refused() -> None:
    """It waits for the whole limit, and then gets 503 with the reason and Retry-After."""
    async with fake_replica() as replica:
        await replica.stop()
        async with running_proxy(replica.url, up=0, no_replica_limit_s=0.3) as proxy:
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            named, anonymous = await asyncio.gather(ask(proxy.url, "a"), ask(proxy.url))
            assert loop.time() - begin_s >= 0.25
            for answer in (named, anonymous):
                assert answer.status == 503
                assert answer.error["code"] == "no_replica"
                assert "no replica has been usable" in answer.error["message"]
                assert "thunderagent doctor" in answer.error["message"]
                assert 0 < int(answer.header("Retry-After") or 0) <= 120
            assert (await metrics_of(proxy.url))["thunderagent_turns_total"]["rejected",] == 2


async def test_a_replica_that_starts_late_serves_the_turns_that_waited_for_it() -> None:
    async with fake_replica() as replica:
        await replica.stop()
        async with running_proxy(replica.url, up=0) as proxy:
            turns = [asyncio.create_task(ask(proxy.url, program_id)) for program_id in ("a", "b", None)]
            await until(lambda: proxy.runtime.held_count == 3)
            await replica.start()
            assert [(await each).status for each in turns] == [200] * 3


async def test_turns_go_on_when_a_replica_comes_back() -> None:
    """A program of a replica that went away is held meanwhile, and then served by it again."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        assert (await ask(proxy.url, "a")).status == 200
        await replica.stop()
        held = asyncio.create_task(ask(proxy.url, "a"))
        await until(lambda: proxy.runtime.held_count == 1)
        await replica.start()
        answer = await held
        assert answer.status == 200
        assert int(answer.header("X-Hold-Ms") or 0) > 0


# --- replicas that answer badly


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Odd", "429 Too Many", "500 Oh", "503 No"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_refusal_by_an_engine_belongs_to_the_client(status: str, streamed: bool) -> None:
    """Status, reason, body and headers come through; it is not tried again; the lease comes back.

    429 and 503 come so if their client does not wait for as long as the engine says.
    """
    body = b'{"error": {"message": "the engine says no"}}'
    refusal = answers(body, status=status, headers=[JSON_TYPE, ("retry-after", "7")])
    async with fake_replica(refusal) as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, CHAT, turn("a", stream=streamed), ("X-Program-Patience", "5"))
        assert f"{answer.status} {answer.reason}" == status
        assert answer.body == body
        assert answer.header("retry-after") == "7"
        assert len(replica.calls) == 1
        assert (await metrics_of(proxy.url))["thunderagent_turns_total"]["refused",] == 1


@pytest.mark.parametrize(
    "pieces",
    [
        (b"this is not HTTP\r\n\r\n",),
        (b"\x16\x03\x01\x02\x00\x01",),
        (b"HTTP/1.1 abc\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\ncontent-le",),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno chunk",),
        (b"",),
    ],
)
async def test_a_replica_that_does_not_speak_http_is_a_502(pieces: tuple[bytes, ...]) -> None:
    """A connection without an HTTP answer: tried again as often as configured. One that cannot be read was computed."""
    whole_head = pieces[0].startswith(b"HTTP/1.1") and pieces[0].endswith((b"\r\n\r\n", b"no chunk"))
    code, tries_count = ("replica_garbled", 1) if whole_head else ("replica_closed_early", 3)
    async with fake_replica(writes(*pieces)) as replica, running_proxy(replica.url, retries_count=2) as proxy:
        answer = await ask(proxy.url, "a", stream=True)
        assert answer.status == 502
        assert answer.error["code"] == code
        assert replica.replica_id in answer.error["message"]
        assert len(replica.calls) == tries_count
        await proxy.nothing_left()


@pytest.mark.parametrize(
    "pieces",
    [
        (head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("content-length", "100")]), b'{"id": "1", '),
        (head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("transfer-encoding", "chunked")]), chunk(b'{"id": ')),
    ],
)
async def test_a_whole_answer_that_breaks_off_is_a_502(pieces: tuple[bytes, ...]) -> None:
    """It is not tried again, because an answer had begun, and no half answer is passed off as one."""
    async with fake_replica(writes(*pieces)) as replica, running_proxy(replica.url) as proxy:
        answer = await ask(proxy.url, "a")
        assert answer.status == 502
        assert answer.error["code"] == "replica_closed_early"
        assert len(replica.calls) == 1
        await proxy.nothing_left()


async def test_garbage_between_the_chunks_of_an_answer_is_a_502() -> None:
    """aiohttp's parser gives up without telling its reader; the closed connection does."""
    head = head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("transfer-encoding", "chunked")])
    async with fake_replica(writes(head, chunk(b"{"), b"zzz\r\nwhat")) as replica, running_proxy(replica.url) as proxy:
        assert (await ask(proxy.url, "a")).status == 502


@pytest.mark.parametrize("asked_for_usage", [False, True])
@pytest.mark.parametrize("rest", [b"", b'data: {"choices": [{"del'])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(rest: bytes, asked_for_usage: bool) -> None:
    """What came is relayed, then comes an event of its own that says what happened, and the connection is cut."""
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked_for_usage else {}
    pieces = [stream_head(), chunk(word("one")), *([chunk(rest)] if rest else [])]
    async with fake_replica(writes(*pieces)) as replica, running_proxy(replica.url) as proxy:
        answer = await ask(proxy.url, "a", stream=True, **options)
        assert answer.status == 200
        assert not answer.whole
        assert answer.body.startswith(word("one"))
        *_, last = answer.body.removesuffix(b"\n\n").split(b"\n\n")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "replica_closed_early"
        assert set(error) == {"message", "type", "param", "code"}
        await proxy.nothing_left()
        counts = (await metrics_of(proxy.url))["thunderagent_turns_total"]
        assert (counts["failed",], counts["finished",]) == (1, 0)


async def test_a_side_call_that_breaks_off_is_cut() -> None:
    """An answer without a lease that breaks off is not filled up with a second answer."""
    half = (head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("content-length", "1000")]), b'{"half": ')
    async with fake_replica(writes(*half)) as replica, running_proxy(replica.url) as proxy:
        answer = await get(proxy.url, "/v1/files")
        assert not answer.whole
        assert answer.body == b'{"half": '


async def test_a_replica_that_falls_silent_is_a_504() -> None:
    """It is silent before the head or in the middle of an answer; there is a limit, and the lease comes back."""
    half = head_bytes("HTTP/1.1 200 OK", [*SERVER_HEADERS, JSON_TYPE, ("content-length", "100")])
    for silence in (Gate(), Gate([half, b"{"])):
        async with fake_replica(silence) as replica, running_proxy(replica.url, silence_timeout_s=0.1) as proxy:
            answer = await ask(proxy.url, "a")
            assert answer.status == 504
            assert answer.error["code"] == "replica_timeout"
            assert len(replica.calls) == 1


# --- usage


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"usage": None},
        {"usage": {}},
        {"usage": {"prompt_tokens": None}},
        {"usage": "many"},
        {"usage": {"prompt_tokens": -5}},
        {"usage": {"prompt_tokens": 1.5, "completion_tokens": "x"}},
        {"usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}},
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_without_proper_usage_is_relayed_and_the_size_estimated(
    usage: dict[str, Any],
    streamed: bool,
) -> None:
    """The client gets the bytes, and the program still claims something: the estimate from the body's length."""
    whole = json.dumps({**ANSWER, "usage": 0} | usage if usage else {"choices": []}).encode()
    pieces = [word("hello"), b"data: " + json.dumps({"choices": [{"index": 0}], **usage}).encode() + b"\n\n", DONE]
    behaviour = streams(*pieces) if streamed else answers(whole)
    async with fake_replica(behaviour) as replica, running_proxy(replica.url) as proxy:
        options = {"stream_options": {"include_usage": True}} if streamed else {}
        answer = await ask(proxy.url, "a", content="word " * 400, stream=streamed, **options)
        assert answer.body == (b"".join(pieces) if streamed else whole)
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        assert program.claim_tokens > 0
        assert (await metrics_of(proxy.url))["thunderagent_turns_total"]["finished",] == 1


# --- capacity


@pytest.mark.parametrize(
    "metrics", [None, "", "garbage {{{\n", exposition("None"), exposition(0), exposition(4000, "None")]
)
async def test_an_unknown_capacity_lets_everybody_in_and_raises_an_alarm(metrics: str | None) -> None:
    """It fails open: no turn is held for lack of memory, and /metrics shows that the size is unknown."""
    async with fake_replica() as replica:
        replica.metrics = metrics
        async with running_proxy(replica.url) as proxy:
            for number in range(20):
                answer = await ask(proxy.url, f"program-{number}", content="x" * 10_000)
                assert (answer.status, answer.header("X-Hold-Ms")) == (200, "0")
            samples = await metrics_of(proxy.url)
            assert samples["thunderagent_capacity_unknown"] == {(replica.replica_id,): 1}
            assert (replica.replica_id,) not in samples.get("thunderagent_capacity_tokens", {})


async def test_the_operators_capacity_stands_in_for_an_unknown_one() -> None:
    async with fake_replica() as replica:
        replica.metrics = None
        async with running_proxy(replica.url, capacity_tokens=5000) as proxy:
            samples = await metrics_of(proxy.url)
            assert samples["thunderagent_capacity_unknown"] == {(replica.replica_id,): 0}
            assert samples["thunderagent_capacity_tokens"] == {(replica.replica_id,): 5000}


async def test_the_ranks_of_one_replica_are_summed() -> None:
    async with fake_replica() as replica:
        replica.metrics = exposition(3000, 5000)
        async with running_proxy(replica.url) as proxy:
            assert (await metrics_of(proxy.url))["thunderagent_capacity_tokens"] == {(replica.replica_id,): 8000}


async def test_a_program_larger_than_every_replica_hears_the_engines_own_words() -> None:
    async with engine(kv_tokens=512) as small, running_proxy(small.url) as proxy:
        body = turn("large", content="word " * 2000)
        relayed = await post(proxy.url, CHAT, body)
        del body["program_id"]
        direct = await post(small.url, CHAT, body)
        assert direct.status == 400
        assert "maximum context length" in direct.json()["error"]["message"]
        assert (relayed.status, relayed.body) == (direct.status, direct.body)


async def test_memory_that_is_full_holds_a_turn_until_there_is_room() -> None:
    """With the paper's policy and a full engine a turn waits, and runs when the other program ends."""
    gate = Gate()
    policy = {"policy": "thunderagent", "policy_args": {"delta_s": "0.05"}}
    async with fake_replica(gate, capacity_tokens=1000) as replica, running_proxy(replica.url, **policy) as proxy:
        first = asyncio.create_task(ask(proxy.url, "first", content="x" * 2800))
        await replica.call()
        second = asyncio.create_task(ask(proxy.url, "second", content="x" * 2800))
        await until(lambda: proxy.runtime.held_count == 1)
        assert len(replica.calls) == 1
        gate.open()
        assert (await first).header("X-Hold-Ms") == "0"
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        answer = await second
        assert answer.status == 200
        assert int(answer.header("X-Hold-Ms") or 0) > 0


# --- releases


async def test_a_program_released_while_held_ends_its_turn() -> None:
    """The held turn gets 410 program_released and is never forwarded."""
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        assert (await ask(proxy.url, "first")).status == 200
        held = [asyncio.create_task(ask(proxy.url, "second")) for _ in range(3)]
        await until(lambda: proxy.runtime.held_count == 3)
        assert (await post(proxy.url, "/programs/release", {"program_id": "second"})).json()["released"] is True
        for each in held:
            answer = await each
            assert answer.status == 410
            assert answer.error["code"] == "program_released"
        assert len(replica.calls) == 1
        assert [program.program_id for program in proxy.runtime.scheduler.programs.values()] == ["first"]


async def test_a_program_released_in_its_turn_lets_the_turn_end() -> None:
    """The answer is complete; the claim stays until then, as an anonymous one."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        running = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call()
        assert (await post(proxy.url, "/programs/release", {"program_id": "a"})).json()["released"] is True
        assert len(proxy.runtime.scheduler.programs) == 0
        gate.open()
        assert (await running).status == 200


async def test_releasing_twice_is_releasing_once() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        await ask(proxy.url, "a")
        released = [(await post(proxy.url, "/programs/release", {"program_id": "a"})).json() for _ in range(2)]
        assert released == [{"program_id": "a", "released": True}, {"program_id": "a", "released": False}]


async def test_releasing_what_is_not_known_is_no_error() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await post(proxy.url, "/programs/release", {"program_id": "nobody"})
        assert (answer.status, answer.json()) == (200, {"program_id": "nobody", "released": False})


async def test_a_late_release_does_not_end_the_next_incarnation() -> None:
    """Ids come back; a release may say which incarnation it means."""
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        await ask(proxy.url, "a")
        old = (await get(proxy.url, "/programs/a")).json()["generation"]
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        await ask(proxy.url, "a")
        new = (await get(proxy.url, "/programs/a")).json()["generation"]
        assert new != old
        late = await post(proxy.url, "/programs/release", {"program_id": "a", "generation": old})
        assert late.json()["released"] is False
        assert (await get(proxy.url, "/programs/a")).status == 200
        right = await post(proxy.url, "/programs/release", {"program_id": "a", "generation": new})
        assert right.json()["released"] is True


# --- many at once


async def test_64_turns_of_one_program_run_at_once() -> None:
    """They never wait for one another, and the program acts only when none is in flight."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        turns = [asyncio.create_task(ask(proxy.url, "a", seed=number)) for number in range(64)]
        await until(lambda: len(replica.calls) == 64)
        report = (await get(proxy.url, "/programs/a")).json()
        assert (report["turns_in_flight_count"], report["phase"]) == (64, "reasoning")
        gate.open()
        assert {(await each).status for each in turns} == {200}
        assert (await get(proxy.url, "/programs/a")).json()["phase"] == "acting"


async def test_64_held_turns_of_one_program_are_granted_together() -> None:
    async with fake_replica() as replica, running_proxy(replica.url, **cap(1)) as proxy:
        await ask(proxy.url, "first")
        turns = [asyncio.create_task(ask(proxy.url, "second", seed=number)) for number in range(64)]
        await until(lambda: proxy.runtime.held_count == 64)
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert {(await each).status for each in turns} == {200}
        assert sorted(call.json()["seed"] for call in replica.calls[1:]) == list(range(64))


async def test_events_that_came_before_a_stream_broke_off_are_relayed() -> None:
    """The last events of a broken stream are those of the engine, then ours."""
    pieces = [stream_head(), chunk(word("one") + word("two"))]
    async with fake_replica(writes(*pieces)) as replica, running_proxy(replica.url) as proxy:
        answer = await ask(proxy.url, "a", stream=True)
        *relayed, last = events_of(answer.body)
        assert [each["choices"][0]["delta"]["content"] for each in relayed] == ["one", "two"]
        assert "error" in last
