"""Random bodies and answers of every API: both ends see the same bytes as without the proxy.

1,000 of them each time; 10,000 with `scripts/test --real`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.integration.support import (
    DONE,
    JSON_TYPE,
    LAST_CHUNK,
    OF_THE_PROXY,
    SERVER_HEADERS,
    SSE_TYPE,
    USAGE,
    Answer,
    Call,
    Header,
    Wire,
    chunk,
    end_to_end,
    event,
    fake_replica,
    head_bytes,
    running_proxy,
)
from tests.integration.test_exactness import joined, program_id_member, random_members, random_text, without_space

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTIONS_COUNT = 8

PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/generate": "input_ids",
    "/inference/v1/generate": "token_ids",
    "/v1/embeddings": "input",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "prompt",
}
ASKED_FOR_USAGE = {"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"}
USAGE_OF = {
    "/v1/responses": {"type": "response.completed", "response": {"id": "resp_1", "usage": {"input_tokens": 5}}},
    "/v1/messages": {"type": "message_delta", "usage": {"input_tokens": 5, "output_tokens": 2}},
    "/generate": {"text": "x", "meta_info": {"prompt_tokens": 5, "completion_tokens": 2}},
}
STATUSES = ("200 OK", "200 OK", "200 OK", "201 Made", "400 Bad Request", "404 Not Found", "500 Internal Server Error")


@dataclass(slots=True)
class Case:
    """One request, the replica's answer, and the expected request at the replica."""

    target: str
    headers: list[Header]
    sent: bytes
    arrives: bytes | None
    """None: the sent bytes."""
    head: bytes
    pieces: list[bytes]
    """The body of the answer; in a stream that reports usage only on request, the usage is the last piece but one."""
    usage_is_asked_for: bool
    values: list[bytes]
    """The values of the body's members, as they are spelt."""

    @property
    def may_change(self) -> bool:
        """Whether the proxy takes its own field out, or asks for usage."""
        wants_usage = self.usage_is_asked_for and b"include_usage" not in self.sent and b'"stream"' in self.sent
        return self.arrives is not None or wants_usage


def case_of(seed: int) -> Case:
    """Make the case of this number; the same in every run."""
    random = Random(seed)
    path = random.choice(list(PATHS))
    members = random_members(random)
    members.insert(random.randrange(len(members) + 1), (f'"{PATHS[path]}"', _prompt(random)))
    streams = random.random() < 0.5
    if streams:
        members.append(('"stream"', "true"))
        if random.random() < 0.5:
            members.append(('"stream_options"', '{"include_usage": true}'))
    asks = random.random() < 0.3
    arrives = None
    if asks and path not in {"/v1/embeddings", "/v1/messages/count_tokens", "/tokenize"}:
        place = random.randrange(len(members) + 1)
        own = program_id_member(random)
        arrives = joined(members, Random(seed))
        members = [*members[:place], own, *members[place:]]
    sent = joined(members, Random(seed))
    headers: list[Header] = [("X-Case", str(seed)), ("Content-Type", "application/json")]
    target = path
    if arrives is None and random.random() < 0.7:
        target = f"/p/program-{seed % 7}{path}"
    values = [value.encode() for key, value in members if key != '"program_id"']
    head, pieces = _answer(random, path, streams=streams)
    return Case(target, headers, sent, arrives, head, pieces, path in ASKED_FOR_USAGE, values)


def _prompt(random: Random) -> str:
    kind = random.randrange(20)
    if kind == 0:
        return json.dumps([random.randrange(150_000) for _ in range(12_000)])  # large enough to be set aside
    if kind < 8:
        return json.dumps([random.randrange(150_000) for _ in range(random.randrange(50))])
    return json.dumps([{"role": "user", "content": random_text(random)} for _ in range(random.randrange(4))])


def _answer(random: Random, path: str, *, streams: bool) -> tuple[bytes, list[bytes]]:
    encoding: list[Header] = []
    status = random.choice(STATUSES)
    if not streams:
        body = joined([*random_members(random), ('"usage"', json.dumps(USAGE))], random)
        if random.random() < 0.1:
            body = random.randbytes(random.randrange(2000))
        if random.random() < 0.2:
            body, encoding = gzip.compress(body), [("content-encoding", "gzip")]
        length = ("content-length", str(len(body)))
        return head_bytes(f"HTTP/1.1 {status}", [*SERVER_HEADERS, length, JSON_TYPE, *encoding]), [body]
    kinds = (
        lambda: event({"choices": [{"index": 0, "delta": {"content": random_text(random)}}]}),
        lambda: b"event: x\nid: 7\n" + event({"text": random_text(random)}),
        lambda: b": comment\n\n",
        lambda: event("no json"),
        lambda: b"data: two\ndata: lines\n\n",
        lambda: random_text(random).encode() + b"\n\n",
    )
    events = [random.choice(kinds)() for _ in range(random.randrange(12))]
    usage = event(USAGE_OF.get(path, {"id": "1", "choices": [], "usage": USAGE}))
    line_end = random.choice((b"\n", b"\r\n"))
    events = [part.replace(b"\n", line_end) for part in [*events, usage, random.choice((DONE, b""))]]
    head = head_bytes("HTTP/1.1 200 OK", [*SERVER_HEADERS, SSE_TYPE, ("transfer-encoding", "chunked")])
    return head, events


def _cut(data: bytes, random: Random) -> Iterator[bytes]:
    """Cut a stream into pieces that the network could have made."""
    while data:
        size = random.choice((1, 2, 7, 60, 500, len(data)))
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize(
    "cases_count",
    [
        pytest.param(1000, marks=pytest.mark.timeout(180)),
        pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(600)]),
    ],
)
async def test_random_bodies_and_answers_pass_as_they_are(cases_count: int) -> None:
    """Requests, answers and streams: the same bytes, directly and through the proxy."""
    cases: dict[int, Case] = {}
    arrived: dict[int, list[Call]] = {}

    async def behave(call: Call) -> None:
        number = int(call.header("X-Case") or 0)
        arrived[number].append(call)
        replica.calls.clear()
        case = cases[number]
        if b"chunked" not in case.head:
            call.write(case.head, *case.pieces)
            return
        events = list(case.pieces)
        if case.usage_is_asked_for and b"include_usage" not in call.body:
            del events[-2]
        pieces = list(_cut(b"".join(events), Random(number)))
        await call.write_apart(case.head, *map(chunk, pieces), LAST_CHUNK)

    def seen(answer: Answer) -> tuple[object, ...]:
        headers = end_to_end(answer.headers, *OF_THE_PROXY, "content-length")
        return answer.status, answer.reason, headers, answer.body, answer.whole

    async def compare(numbers: Iterator[int], direct: Wire, relayed: Wire) -> None:
        for number in numbers:
            case = cases[number] = case_of(number)
            arrived[number] = []
            engines_target = case.target.removeprefix(f"/p/program-{number % 7}")
            direct.send("POST", engines_target, case.headers, case.arrives or case.sent)
            relayed.send("POST", case.target, case.headers, case.sent)
            as_it_is, through = await direct.answer(), await relayed.answer()
            assert seen(through) == seen(as_it_is), f"the answer of case {number}"
            del cases[number]
            calls = arrived.pop(number)
            asked, forwarded = (call.body for call in calls)
            if forwarded != asked:
                assert case.may_change, f"the body of case {number}"
                if case.arrives is None:
                    assert forwarded.replace(OUR_WISH, b"", 1) == asked, f"the body of case {number}"
                assert _without_our_wish(forwarded) == without_space(asked), f"the body of case {number}"
                assert all(value in forwarded for value in case.values), f"the body of case {number}"
            assert {call.target for call in calls} == {engines_target}

    async with fake_replica(behave) as replica, running_proxy(replica.url) as proxy:

        async def worker(numbers: Iterator[int]) -> None:
            async with Wire.open(replica.url) as direct, Wire.open(proxy.url) as relayed:
                await compare(numbers, direct, relayed)

        numbers = iter(range(cases_count))
        async with asyncio.TaskGroup() as workers:
            for _ in range(CONNECTIONS_COUNT):
                workers.create_task(worker(numbers))
        assert next(numbers, None) is None


OUR_WISH = b'"stream_options":{"include_usage":true},'


def _without_our_wish(body: bytes) -> list[bytes]:
    """Return the tokens of a body, without the wish for usage that the proxy puts first."""
    opening = body.index(b"{") + 1
    return without_space(body[:opening] + body[opening:].removeprefix(OUR_WISH))
