"""Every API through the proxy: the same bytes both ways, usage read, errors in the caller's schema."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs

from tests.integration.support import (
    CHAT,
    DONE,
    JSON_TYPE,
    LAST_CHUNK,
    SSE_TYPE,
    USAGE,
    Answer,
    Call,
    FakeReplica,
    Gate,
    Header,
    RunningProxy,
    Wire,
    answers,
    cap,
    chunk,
    event,
    exchange,
    fake_replica,
    get,
    head_bytes,
    post,
    running_proxy,
    stream_head,
    streams,
    turn,
    until,
    word,
)
from thunderagent.proxy.gate.keys import mint_key

RESPONSE_USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 3,
    "total_tokens": 13,
}
MESSAGE_USAGE = {"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 1, "output_tokens": 3}
META_INFO = {"id": "1", "prompt_tokens": 10, "completion_tokens": 3, "cached_tokens": 4}
USER = [{"role": "user", "content": "hello"}]
RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": RESPONSE_USAGE}


def named(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + event(data)


@dataclass(frozen=True)
class Api:
    """One API: a request, its whole answer, and its stream, each with the same usage."""

    path: str
    body: dict[str, Any]
    whole: dict[str, Any]
    stream: tuple[bytes, ...]
    gets: bytes = b""
    """The part of the stream that the client gets; all of it by default."""
    asks: tuple[tuple[str, Any], ...] = ()
    """The members that are added to the body of a stream."""


CHOICE = {"index": 0, "token_ids": [5, 6, 7], "logprobs": None, "finish_reason": "stop"}
TOKENS = event({"request_id": "1", "choices": [{**CHOICE, "finish_reason": None}], "usage": None})
LAST_TOKENS = event({"request_id": "1", "choices": [CHOICE], "usage": None})
APIS = {
    "responses": Api(
        "/v1/responses",
        {"model": "m", "input": USER, "instructions": "be brief"},
        RESPONSE,
        (
            named({"type": "response.created", "sequence_number": 0, "response": {**RESPONSE, "usage": None}}),
            named({"type": "response.output_text.delta", "sequence_number": 1, "delta": "hi"}),
            named({"type": "response.completed", "sequence_number": 2, "response": RESPONSE}),
        ),
    ),
    "messages": Api(
        "/v1/messages",
        {"model": "m", "max_tokens": 8, "system": "be brief", "messages": USER},
        {"id": "msg_1", "type": "message", "content": [{"type": "text", "text": "hi"}], "usage": MESSAGE_USAGE},
        (
            named({"type": "message_start", "message": {"usage": {**MESSAGE_USAGE, "output_tokens": 1}}}),
            named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
            named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
            named({"type": "message_stop"}),
        ),
    ),
    "generate": Api(
        "/generate",
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True},
        {"text": "hi", "output_ids": [5], "meta_info": {**META_INFO, "output_token_logprobs": [[-0.5, 5, None]]}},
        (
            event({"text": "a", "meta_info": {**META_INFO, "completion_tokens": 1}}),
            event({"text": "a b", "meta_info": META_INFO}),
            DONE,
        ),
    ),
    "token-in": Api(
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}},
        {"request_id": "1", "choices": [CHOICE], "prompt_logprobs": None, "usage": USAGE},
        (TOKENS, LAST_TOKENS, event({"request_id": "1", "choices": [], "usage": USAGE}), DONE),
        gets=b"".join((TOKENS, LAST_TOKENS, DONE)),
        asks=(("stream_options", {"include_usage": True}),),
    ),
}
EACH_API = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


def totals(proxy: RunningProxy, program_id: str = "a") -> tuple[int, int, int]:
    """Return a program's prompt, output and cached tokens."""
    program = proxy.runtime.scheduler.programs.get(program_id)
    assert program is not None
    return program.prompt_tokens_total, program.output_tokens_total, program.cached_tokens_total


# --- The same bytes, and their usage


@EACH_API
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_whole_answer_passes_in_every_api(
    replica: FakeReplica, proxy: RunningProxy, api: Api, encoding: str
) -> None:
    """The request loses only its program's id, the answer nothing; its usage is the program's."""
    content = json.dumps(api.whole, indent=1).encode()
    if encoding == "gzip":
        content = gzip.compress(content)
    replica.behaviour = answers(content, headers=[JSON_TYPE, ("Content-Encoding", encoding)])
    body = json.dumps(api.body).encode()
    answer = await post(proxy.url, api.path, b'{"program_id": "a",' + body[1:])
    assert (answer.status, answer.body) == (200, content)
    assert (answer.header("X-Program-ID"), answer.header("X-Replica-ID")) == ("a", replica.replica_id)
    (call,) = replica.calls
    assert (call.target, call.body) == (api.path, body)
    assert totals(proxy) == (10, 3, 4)


@EACH_API
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_stream_split_at_every_byte_passes_in_every_api(
    replica: FakeReplica, proxy: RunningProxy, api: Api, line_end: bytes
) -> None:
    """At any cut the client gets the answer that it asked for, and the usage is read."""
    full = b"".join(api.stream).replace(b"\n", line_end)
    gets = api.gets.replace(b"\n", line_end) or full
    for turns_count, cut in enumerate(range(1, len(full), 3), start=1):
        replica.calls.clear()
        replica.behaviour = streams(full[:cut], full[cut:])
        answer = await post(proxy.url, f"/p/a{api.path}", {**api.body, "stream": True})
        assert (answer.body, answer.whole) == (gets, True), cut
        assert totals(proxy) == (10 * turns_count, 3 * turns_count, 4 * turns_count), cut
    assert replica.calls[0].json() == {**api.body, "stream": True, **dict(api.asks)}


@EACH_API
async def test_a_gzip_stream_is_not_touched(replica: FakeReplica, proxy: RunningProxy, api: Api) -> None:
    """Its usage is still read."""
    content = gzip.compress(b"".join(api.stream))
    replica.behaviour = streams(content[:20], content[20:], headers=[("content-encoding", "gzip")])
    answer = await post(proxy.url, api.path, {**api.body, "stream": True}, ("X-Program-ID", "a"))
    assert answer.body == content
    assert totals(proxy) == (10, 3, 4)


@EACH_API
async def test_a_refusal_is_the_engines_own(replica: FakeReplica, proxy: RunningProxy, api: Api) -> None:
    """Status and words are the engine's; there is no second try."""
    replica.behaviour = answers(b'{"detail":"too long"}', status="400 Bad Request")
    answer = await post(proxy.url, f"/p/a{api.path}", api.body)
    assert (answer.status, answer.body) == (400, b'{"detail":"too long"}')
    assert len(replica.calls) == 1
    assert proxy.runtime.outcome_counts["refused"] == 1


@EACH_API
async def test_a_turn_is_held_for_memory(replica: FakeReplica, api: Api) -> None:
    """It is a turn: a second program waits while the first is active."""
    replica.behaviour = answers(api.whole)
    async with running_proxy(replica.url, **cap(1)) as proxy:
        await post(proxy.url, f"/p/first{api.path}", api.body)
        second = asyncio.create_task(post(proxy.url, f"/p/second{api.path}", api.body))
        await until(lambda: proxy.runtime.held_count)
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await second).status == 200


async def test_a_body_of_2_mb_keeps_its_bytes_but_for_the_programs_id(
    replica: FakeReplica, proxy: RunningProxy
) -> None:
    """The body has token ids both ways, and is compressed on the way back."""
    ids = json.dumps(list(range(300_000))).encode()
    said = json.dumps({"usage": USAGE, "meta_info": META_INFO}).encode()
    for path, field in (("/inference/v1/generate", b"token_ids"), ("/generate", b"input_ids")):
        content = gzip.compress(b'{"prompt_token_ids": ' + ids + b"," + said[1:])
        replica.behaviour = answers(content, headers=[JSON_TYPE, ("Content-Encoding", "gzip")])
        body = b'{"%s": ' % field + ids + b', "n": 1.50}'
        answer = await post(proxy.url, path, body.replace(b' "n"', b' "program_id":"a", "n"'))
        assert (answer.status, answer.body) == (200, content)
        assert answer.header("X-Program-ID") == "a"
        assert replica.calls[-1].body == body
    assert totals(proxy) == (20, 6, 8)


# --- Errors of ours, in the caller's schema


def error_code(answer: Answer) -> str:
    return str(answer.json()["error"]["code"])


@EACH_API
async def test_an_error_of_the_proxy_has_the_callers_schema(replica: FakeReplica, api: Api) -> None:
    """Cases: a wrong id, a body that is too large, a replica that hangs up, no replica at all."""
    async with running_proxy(replica.url, max_body_bytes=20_000, no_replica_limit_s=0, retries_count=0) as proxy:

        async def hang_up(call: Call) -> None:
            call.close()

        long_id = await post(proxy.url, f"/p/{'x' * 300}{api.path}", api.body)
        large = await post(proxy.url, api.path, {**api.body, "x": "y" * 30_000})
        replica.behaviour = hang_up
        hung_up = await post(proxy.url, api.path, api.body)
        await replica.stop()
        await until(lambda: not proxy.runtime.scheduler.open_replicas)
        down = await post(proxy.url, api.path, api.body)
        await replica.start()
    refusals = [long_id, large, hung_up, down]
    assert [answer.status for answer in refusals] == [400, 413, 502, 503]
    codes = ["invalid_program_id", "body_too_large", "replica_closed_early", "no_replica"]
    assert [error_code(answer) for answer in refusals] == codes
    assert down.header("Retry-After") == "10"
    if api.path == "/v1/messages":
        kinds = ["invalid_request_error", "request_too_large", "api_error", "overloaded_error"]
        assert [answer.json()["error"]["type"] for answer in refusals] == kinds
        assert {answer.json()["type"] for answer in refusals} == {"error"}
    elif api.path == "/generate":
        assert {frozenset(answer.json()["error"]) for answer in refusals} == {frozenset({"message", "code"})}
    else:
        assert all(answer.error for answer in refusals)


@EACH_API
async def test_a_stream_that_breaks_ends_with_an_event_of_its_api(
    replica: FakeReplica, proxy: RunningProxy, api: Api
) -> None:
    """In the middle of an event or not, the client gets the data so far, then one event, then the connection is cut."""
    for torn in (b"", b'data: {"half'):

        async def break_off(call: Call, torn: bytes = torn) -> None:
            call.write(stream_head(), chunk(b"".join(api.stream[:2]) + torn))
            call.close()

        replica.behaviour = break_off
        answer = await post(proxy.url, f"/p/a{api.path}", {**api.body, "stream": True})
        assert not answer.whole
        *came, ending = [part for part in answer.body.split(b"\n\n") if part]
        assert came[:2] == [part.removesuffix(b"\n\n") for part in api.stream[:2]]
        name, _, data = ending.rpartition(b"data: ")
        error = json.loads(data)
        if api.path == "/v1/responses":
            assert (name, error["type"], error["sequence_number"]) == (b"event: error\n", "error", 2)
            assert error["code"] == "replica_closed_early"
        else:
            assert error["error"]["code"] == "replica_closed_early"
            assert name == (b"event: error\n" if api.path == "/v1/messages" else b"")
    assert proxy.runtime.outcome_counts["failed"] == 2


# --- Responses that are asked for again


def makes(response_id: str, *, stream: bool = False) -> Any:
    """Behave: make a response of this id, and report it when it is asked for."""
    response = {**RESPONSE, "id": response_id}
    if stream:
        return streams(named({"type": "response.created", "sequence_number": 0, "response": response}))
    return answers(response)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_asked_for_where_it_was_made(stream: bool) -> None:
    """GET, cancel and DELETE do so, with or without the program's id, though others are less busy."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        replicas = {one.replica_id: one, other.replica_id: other}
        for replica in replicas.values():
            replica.behaviour = makes(f"resp_{replica.replica_id}", stream=stream)
        makers = {}
        for number in range(6):
            body = {"model": "m", "input": "hi", "stream": stream}
            answer = await post(proxy.url, f"/p/program-{number}/v1/responses", body)
            makers[number] = answer.header("X-Replica-ID")
        assert set(makers.values()) == set(replicas)
        for replica_id, replica in replicas.items():
            replica.calls.clear()
            path = f"/v1/responses/resp_{replica_id.replace(':', '%3A')}"
            asked = [("GET", f"{path}?stream=true"), ("POST", f"{path}/cancel"), ("DELETE", path)]
            for method, target in [*asked, ("GET", "/p/somebody" + path)]:
                answer = await exchange(proxy.url, method, target)
                assert (answer.status, answer.header("X-Replica-ID")) == (200, replica_id), target
            assert [(call.method, call.target) for call in replica.calls] == [*asked, ("GET", path)]
        assert proxy.runtime.outcome_counts["finished"] == 6  # none of these calls was a turn


async def test_a_response_is_known_while_it_is_streamed(replica: FakeReplica) -> None:
    """A client cancels it by its id before it is whole."""
    async with fake_replica() as other, running_proxy(replica.url, other.url) as proxy:
        created = named({"type": "response.created", "sequence_number": 0, "response": {**RESPONSE, "id": "resp_7"}})
        gate = Gate([stream_head(), chunk(created)], [LAST_CHUNK])
        replica.behaviour = other.behaviour = gate
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", "/v1/responses", (), json.dumps({"input": "hi", "stream": True}).encode())
            answer = await wire.head()
            await wire.chunk()
            replica.behaviour = other.behaviour = answers(RESPONSE)
            cancelled = await post(proxy.url, "/v1/responses/resp_7/cancel")
            assert cancelled.header("X-Replica-ID") == answer.header("X-Replica-ID")
            gate.open()
            await wire.body(answer)


async def test_a_response_whose_replica_is_gone_is_asked_for_nowhere_else(replica: FakeReplica) -> None:
    """Another replica would only say that it knows no such response."""
    replica.behaviour = makes("resp_1")
    async with fake_replica() as other, running_proxy(replica.url, other.url, up=2) as proxy:
        other.behaviour = makes("resp_2")
        while (await post(proxy.url, "/v1/responses", {"input": "hi"})).json()["id"] != "resp_1":
            await post(proxy.url, "/p/busy/v1/responses", {"input": "hi"})
        other.calls.clear()
        await replica.stop()
        answer = await get(proxy.url, "/v1/responses/resp_1")
        assert (answer.status, error_code(answer)) == (502, "replica_unreachable")
        assert not other.calls
        await replica.start()


async def test_a_response_is_its_tenants(replica: FakeReplica) -> None:
    """Another tenant neither reads, cancels, deletes nor continues it, though the engine would let it."""
    replica.behaviour = makes("resp_1")
    (red, red_line), (blue, blue_line) = mint_key("red"), mint_key("blue")
    async with running_proxy(replica.url, api_keys=(red_line, blue_line)) as proxy:
        of_red, of_blue = [("Authorization", f"Bearer {red}")], [("Authorization", f"Bearer {blue}")]
        assert (await post(proxy.url, "/v1/responses", {"input": "hi"}, *of_red)).status == 200
        replica.calls.clear()
        asked = [("GET", ""), ("POST", "/cancel"), ("DELETE", "")]
        further = {"input": "go on", "previous_response_id": "resp_1"}
        for method, end in asked:
            answer = await exchange(proxy.url, method, f"/v1/responses/resp_1{end}", of_blue)
            assert (answer.status, error_code(answer)) == (403, "other_tenant")
        assert (await post(proxy.url, "/v1/responses", further, *of_blue)).status == 403
        assert not replica.calls
        for method, end in asked:
            assert (await exchange(proxy.url, method, f"/v1/responses/resp_1{end}", of_red)).status == 200
        assert (await post(proxy.url, "/v1/responses", further, *of_red)).status == 200


@pytest.mark.parametrize("program", ["", "/p/one-of-its-own"])
async def test_a_turn_that_goes_on_from_a_response_runs_where_that_is(program: str) -> None:
    """This holds even if others are less busy, for anonymous turns and for an unknown program."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        for replica in (one, other):
            replica.behaviour = makes(f"resp_{replica.replica_id}")
        made: dict[str, str | None] = {}
        for number in range(6):
            answer = await post(proxy.url, f"/p/maker-{number}/v1/responses", {"input": "hi"})
            made[answer.json()["id"]] = answer.header("X-Replica-ID")
        assert len(made) == 2
        for number, (response_id, maker) in enumerate([*made.items(), *made.items()]):
            body = {"input": "go on", "previous_response_id": response_id}
            path = f"{program}-{number}/v1/responses" if program else "/v1/responses"
            answer = await post(proxy.url, path, body)
            assert (answer.status, answer.header("X-Replica-ID")) == (200, maker)


async def test_a_response_that_is_gone_is_the_engines_to_miss() -> None:
    """While its replica fails no other is asked; when it is down, another one reports in its words that it is gone."""
    missing = {"error": {"message": "Response with id 'resp_1' not found.", "type": "invalid_request_error"}}
    async with fake_replica(makes("resp_1")) as maker, running_proxy(maker.url, breaker_failure_count=0) as proxy:
        assert (await post(proxy.url, "/v1/responses", {"input": "hi"})).json()["id"] == "resp_1"
        async with fake_replica(answers(missing, status="404 Not Found")) as other:
            assert (await post(proxy.url, "/replicas", {"url": other.url})).status == 201
            await proxy.up(2)

            async def hang_up(call: Call) -> None:
                call.close()

            body = {"input": "go on", "previous_response_id": "resp_1"}
            maker.behaviour = hang_up
            answer = await post(proxy.url, "/p/a/v1/responses", body)
            assert (answer.status, error_code(answer)) == (502, "replica_closed_early")
            assert not other.calls
            await maker.stop()
            await proxy.up(1)
            with capture_logs() as logs:
                answer = await post(proxy.url, "/p/a/v1/responses", body)
            assert (answer.status, answer.json(), len(other.calls)) == (404, missing, 1)
            assert answer.header("X-Replica-ID") == other.replica_id
            (said,) = [line for line in logs if line["event"] == "response_is_elsewhere"]
            assert (said["maker_id"], said["replica_id"]) == (maker.replica_id, other.replica_id)
            await maker.start()
            await proxy.up(2)


async def test_stopped_answer_ends_no_program(replica: FakeReplica, proxy: RunningProxy) -> None:
    """An agent may ask on after `finish_reason: "stop"`: it is a hint, and its client says when the program ends."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
    replica.behaviour = answers({"id": "1", "object": "chat.completion", "choices": [choice], "usage": USAGE})
    for turn_count in (1, 2):
        assert (await post(proxy.url, f"/p/a{CHAT}", turn())).json()["choices"] == [choice]
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        assert (program.status, program.phase, program.turn_count) == ("active", "acting", turn_count)
        assert (program.generation, program.claim_tokens) == (1, 13)
    replica.behaviour = streams(word("done", "stop"), DONE)
    assert (await post(proxy.url, f"/p/a{CHAT}", turn(stream=True))).whole
    assert proxy.runtime.scheduler.programs.get("a") is program
    assert (await post(proxy.url, "/finish_session?session_id=a")).json()["released"] is True


# --- Errors of the proxy's own


ERRING = {
    "/v1/chat/completions": turn(),
    "/v1/completions": {"prompt": "x"},
    **{api.path: api.body for api in APIS.values()},
}


@pytest.mark.parametrize("target", ERRING)
async def test_an_error_says_whose_turn_it_was_and_where_it_failed(target: str) -> None:
    """Every dialect has it: a replica that hung up, a program that was released, a proxy that shuts down."""

    async def hang_up(call: Call) -> None:
        call.close()

    async with fake_replica(hang_up) as replica, running_proxy(replica.url, **cap(1), retries_count=0) as proxy:
        failed = await post(proxy.url, f"/p/caf%C3%A9{target}", ERRING[target])
        assert (failed.status, error_code(failed)) == (502, "replica_closed_early")
        assert failed.header("X-Replica-ID") == replica.replica_id
        assert (failed.header("X-Program-ID"), failed.header("X-Program-ID-Source")) == ("caf\\xe9", "path")
        assert failed.header("X-Hold-Ms") == "0"
        await post(proxy.url, "/finish_session?session_id=caf%C3%A9")
        replica.behaviour = answers()
        await post(proxy.url, f"/p/busy{target}", ERRING[target])
        held = asyncio.create_task(post(proxy.url, target, ERRING[target], ("X-Session-ID", "s")))
        await until(lambda: proxy.runtime.held_count == 1)
        await asyncio.sleep(0.02)
        await post(proxy.url, "/programs/release", {"program_id": "s"})
        released = await held
        assert (released.status, error_code(released)) == (410, "program_released")
        assert released.header("X-Replica-ID") is None
        assert (released.header("X-Program-ID"), released.header("X-Program-ID-Source")) == ("s", "x-session-id")
        assert int(released.header("X-Hold-Ms") or 0) >= 20
        patient = await post(proxy.url, f"/p/c{target}", ERRING[target], ("X-Program-Patience", "long"))
        assert (patient.status, patient.header("X-Program-ID")) == (400, "c")
        anonymous = await post(proxy.url, target, ERRING[target])
        assert (anonymous.status, anonymous.header("X-Program-ID")) == (200, None)


async def test_an_error_of_a_side_call_says_whose_it_was_and_where_it_failed() -> None:
    async def hang_up(call: Call) -> None:
        call.close()

    async with fake_replica(hang_up) as replica, running_proxy(replica.url) as proxy:
        failed = await post(proxy.url, "/v1/messages/count_tokens", {"program_id": "a"})
        assert (failed.status, error_code(failed)) == (502, "replica_closed_early")
        told = [failed.header(name) for name in ("X-Replica-ID", "X-Program-ID", "X-Program-ID-Source", "X-Hold-Ms")]
        assert told == [replica.replica_id, "a", "body", None]
        failed = await get(proxy.url, f"/workers/{replica.replica_id}/anything")
        assert (failed.status, failed.header("X-Replica-ID")) == (502, replica.replica_id)
        await replica.stop()
        await until(lambda: not proxy.runtime.scheduler.open_replicas)
        failed = await get(proxy.url, "/p/a/v1/files")
        assert (failed.status, failed.header("X-Program-ID"), failed.header("X-Replica-ID")) == (503, "a", None)
        await replica.start()


# --- Side calls


SIDE_CALLS = [
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/chat/completions/render"),
    ("GET", "/v1/files/x"),
]


@pytest.mark.parametrize(
    "target", ["/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/rerank", "/v2/nobody/knows"]
)
@pytest.mark.parametrize("padding_bytes", [0, 600_000])
async def test_a_side_call_whose_body_names_its_program_goes_where_that_is(target: str, padding_bytes: int) -> None:
    """It goes there although another replica is less busy; our field is cut out, and nothing else is touched."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url) as proxy:
        homes = {name: (await post(proxy.url, f"/p/{name}{CHAT}", turn())).header("X-Replica-ID") for name in "abcd"}
        assert len(set(homes.values())) == 2
        for replica in (one, other):
            replica.calls.clear()
        pad = b"x" * padding_bytes
        for name, home in homes.items():
            for body, forwarded, source in (
                (b'{"input": ["%s"],  "program_id":"%s"}', b'{"input": ["%s"]}', "body"),
                (
                    b'{"input":"%s","extra_body":{"program_id":"%s", "k":1}}',
                    b'{"input":"%s","extra_body":{ "k":1}}',
                    "extra_body",
                ),
            ):
                answer = await post(proxy.url, target, body % (pad, name.encode()))
                told = [answer.header(header) for header in ("X-Replica-ID", "X-Program-ID", "X-Program-ID-Source")]
                assert (answer.status, told) == (200, [home, name, source])
                (call,) = [*one.calls, *other.calls]
                assert (call.target, call.body) == (target, forwarded % pad)
                one.calls.clear()
                other.calls.clear()
        leases_count = 8 if target == "/v2/nobody/knows" else 0  # it may generate; no other call was a turn
        assert proxy.runtime.outcome_counts["finished"] == 4 + leases_count
        assert {program.turn_count for program in proxy.runtime.scheduler.programs.values()} == {1}


async def test_a_side_call_with_an_id_that_is_none_is_refused(replica: FakeReplica, proxy: RunningProxy) -> None:
    """The refusal has the schema of its API; without a name the call is anonymous."""
    answer = await post(proxy.url, "/v1/messages/count_tokens", {"program_id": ""})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_program_id")
    assert not replica.calls
    answer = await post(proxy.url, "/tokenize", {"prompt": "x"}, ("X-Session-ID", ""))
    assert (answer.status, answer.header("X-Program-ID"), answer.header("X-Hold-Ms")) == (200, None, None)


@pytest.mark.parametrize(("method", "target"), SIDE_CALLS)
async def test_a_side_call_is_tried_elsewhere_before_its_first_byte(method: str, target: str) -> None:
    """This holds if its replica hangs up, and if none listens."""

    async def hang_up(call: Call) -> None:
        call.close()

    async with fake_replica(hang_up) as bad, fake_replica() as good, running_proxy(bad.url, good.url) as proxy:
        for _ in range(3):
            answer = await exchange(proxy.url, method, target, (), b"{}" if method == "POST" else b"")
            assert (answer.status, answer.header("X-Replica-ID")) == (200, good.replica_id)
        await bad.stop()
        answer = await exchange(proxy.url, method, target, (), b"{}" if method == "POST" else b"")
        assert answer.status == 200
        await bad.start()


async def test_unsafe_call_is_not_sent_twice() -> None:
    """An unknown POST may already have taken effect."""

    async def hang_up(call: Call) -> None:
        call.close()

    async with fake_replica(hang_up) as one, fake_replica(hang_up) as other, running_proxy(one.url, other.url) as proxy:
        answer = await post(proxy.url, "/v1/files", b"{}")
        assert (answer.status, error_code(answer)) == (502, "replica_closed_early")
        assert len(one.calls) + len(other.calls) == 1


async def test_a_side_call_streams(replica: FakeReplica, proxy: RunningProxy) -> None:
    """Its first piece arrives before its last is sent."""
    go_on = asyncio.Event()

    async def behave(call: Call) -> None:
        call.write(head_bytes("HTTP/1.1 200 OK", [SSE_TYPE, ("transfer-encoding", "chunked")]), chunk(b"one"))
        await go_on.wait()
        call.write(chunk(b"two"), LAST_CHUNK)

    replica.behaviour = behave
    async with Wire.open(proxy.url) as wire:
        wire.send("GET", "/v1/responses/resp_unknown?stream=true")
        answer = await wire.head()
        assert await wire.chunk() == b"one"
        go_on.set()
        assert (await wire.body(answer)).body == b"two"


async def test_side_calls_of_nobody_are_spread_by_what_is_in_flight_and_in_turn_where_that_is_equal() -> None:
    """Twenty embeddings at once, and twenty one after another, are ten and ten."""
    gate = asyncio.Event()

    async def wait(call: Call) -> None:
        await gate.wait()
        await answers()(call)

    async with fake_replica(wait) as one, fake_replica(wait) as other, running_proxy(one.url, other.url) as proxy:
        asked = [asyncio.create_task(post(proxy.url, "/v1/embeddings", {"input": "x"})) for _ in range(20)]
        await until(lambda: len(one.calls) + len(other.calls) == 20)
        assert len(one.calls) == len(other.calls) == 10
        gate.set()
        assert {(await each).status for each in asked} == {200}
        for _ in range(20):
            await post(proxy.url, "/v1/embeddings", {"input": "x"})
        assert len(one.calls) == len(other.calls) == 20


@pytest.mark.parametrize("head", [(), (("content-encoding", "gzip"),)])
async def test_a_side_call_that_streams_breaks_off_as_a_turn_does(
    replica: FakeReplica, proxy: RunningProxy, head: tuple[Header, ...]
) -> None:
    """It ends with an event of its API, numbered on, unless the client could not read one."""
    created = named({"type": "response.created", "sequence_number": 6, "response": RESPONSE})

    async def behave(call: Call) -> None:
        call.write(stream_head(*head), chunk(created + b"event: resp"))
        call.close()

    replica.behaviour = behave
    answer = await get(proxy.url, "/v1/responses/resp_1?stream=true")
    assert not answer.whole
    came, _, ending = answer.body.removeprefix(created).partition(b"\n\n")
    assert came == b"event: resp"
    if head:
        assert ending == b""
    else:
        error = json.loads(ending.partition(b"data: ")[2])
        assert (error["type"], error["code"], error["sequence_number"]) == ("error", "replica_closed_early", 7)


@pytest.mark.parametrize("prefix", ["", "/p/a"])
async def test_every_listed_model_can_be_retrieved(prefix: str) -> None:
    """Whichever replica has it, and aliases; vLLM has no such route, and another replica would say 404."""
    async with fake_replica() as one, fake_replica() as other:
        one.behaviour = answers({"object": "list", "data": [{"id": "org/Chat", "object": "model", "max_model_len": 9}]})
        other.behaviour = answers({"object": "list", "data": [{"id": "adapter", "object": "model"}]})
        async with running_proxy(one.url, other.url, model_aliases={"gpt": "org/Chat"}) as proxy:
            listed = (await get(proxy.url, f"{prefix}/v1/models")).json()["data"]
            assert {model["id"] for model in listed} == {"org/Chat", "adapter", "gpt"}
            for model in listed:
                for name in (model["id"], quote(model["id"], safe="")):
                    answer = await get(proxy.url, f"{prefix}/v1/models/{name}")
                    assert (answer.status, answer.json()) == (200, model)
            for spelling in ("/v1/models//adapter", "/V1/Models/adapter/", "/v1/models\\adapter"):
                assert (await get(proxy.url, prefix + spelling)).json()["id"] == "adapter"
            answer = await get(proxy.url, f"{prefix}/v1/models/other")
            assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
            head = await exchange(proxy.url, "HEAD", f"{prefix}/v1/models/adapter")
            assert (head.status, head.body) == (200, b"")


PACKED = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("size", [1, 300_000])
@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/v1/messages/count_tokens", "/v1/any", CHAT])
async def test_packed_body_is_forwarded_plain(
    replica: FakeReplica, proxy: RunningProxy, path: str, encoding: str, size: int
) -> None:
    """No engine reads it packed, whether it is a turn or not, whole with its head or not."""
    body = json.dumps({"model": "m", "input": "x" * size}).encode() + b" " * size
    packed = PACKED[encoding](body)
    for _ in range(2):
        assert (await post(proxy.url, path, packed, ("Content-Encoding", encoding))).status == 200
    for call in replica.calls:
        assert call.header("Content-Encoding") is None
        assert call.header("Content-Length") == str(len(body))
        assert call.body == body


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens", CHAT, "/programs/release"])
@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", b"\x0b\x02\x80hello\x03", 415),
        ("gzip, br", b"x", 415),
        ("gzip", b"rubbish", 400),
        ("gzip", gzip.compress(bytes(80 * 2**20)), 413),
    ],
    ids=["br", "br of gzip", "broken", "a bomb"],
)
async def test_unpackable_body_is_refused_and_reaches_no_engine(
    replica: FakeReplica, proxy: RunningProxy, path: str, encoding: str, body: bytes, status: int
) -> None:
    answer = await post(proxy.url, path, body, ("Content-Encoding", encoding))
    assert answer.status == status, answer.body
    if status == 415:
        assert answer.json()["error"]["code"] == "unreadable_encoding"
        assert "'br'" in answer.json()["error"]["message"]
        assert "gzip" in answer.json()["error"]["message"]
    assert not replica.calls


async def test_a_release_may_come_packed(proxy: RunningProxy) -> None:
    assert (await post(proxy.url, f"/p/packed{CHAT}", {"model": "m", "messages": []})).status == 200
    packed = gzip.compress(b'{"program_id": "packed"}')
    answer = await post(proxy.url, "/programs/release", packed, ("Content-Encoding", "gzip"))
    assert answer.json()["released"] is True
