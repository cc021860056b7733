"""Limits and deadlines of programs on the wire: by header, key and option; and turns that end with their program."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Call,
    FakeReplica,
    Gate,
    Header,
    RunningProxy,
    Wire,
    answers,
    chunk,
    events_of,
    fake_replica,
    get,
    metric,
    post,
    running_proxy,
    stream_head,
    turn,
    until,
    word,
)
from thunderagent.programs.state.program import Program
from thunderagent.proxy.gate.keys.file import KeyLimitsEntry, add_key

LIMITS = "X-Program-Limits"


def named(program_id: str, limits: str = "") -> tuple[Header, ...]:
    """Return the headers of a program's turn."""
    return (("X-Program-ID", program_id), *(((LIMITS, limits),) if limits else ()))


@pytest.mark.parametrize(
    ("path", "where"),
    [(CHAT, "code"), ("/v1/responses", "code"), ("/v1/messages", "code")],
)
async def test_a_turn_past_a_limit_is_refused_in_the_callers_schema(
    replica: FakeReplica, proxy: RunningProxy, path: str, where: str
) -> None:
    """The engine never sees it, and no client tries it again: 410."""
    headers = named("a", "max_turns=1, max_age_s=3600")
    assert (await post(proxy.url, path, turn(), *headers)).status == 200
    refused = await post(proxy.url, path, turn(), *headers)
    assert refused.status == 410
    assert "max_turns" in refused.body.decode()
    assert len(replica.calls) == 1
    assert int(refused.header("X-Hold-Ms") or "-1") >= 0
    assert refused.json()["error"][where] == "program_limit"
    said = (await get(proxy.url, "/programs/a")).json()
    assert (said["max_turns"], said["max_age_s"], said["max_tokens"], said["urgent"]) == (1, 3600.0, None, False)


@pytest.mark.parametrize(
    "wrong",
    [
        "rubbish",
        "max_turns=-1",
        "max_turns=0",
        "max_turns=1.5",
        "max_turns=nan",
        "max_turns=" + "9" * 400,
        "max_turns=1, max_turns=2",
        "deadline_s=nan",
        "deadline_s=inf",
        "deadline_s=-3",
        "deadline_s=1_0",
        "max_age_s=1e300",
        "max_tokens=\u0664",
        "end=never",
        "",
    ],
)
async def test_a_wrong_limit_is_refused(replica: FakeReplica, proxy: RunningProxy, wrong: str) -> None:
    """It limits nothing silently, and nothing is forwarded."""
    header = (LIMITS, wrong.encode().decode("latin-1"))
    refused = await post(proxy.url, CHAT, turn(), ("X-Program-ID", "a"), header)
    assert refused.status == 400
    assert replica.calls == []


async def test_a_header_that_comes_twice_says_each_limit_once(replica: FakeReplica, proxy: RunningProxy) -> None:
    """Two headers are one list; the same limit in both is refused."""
    both = (("X-Program-ID", "a"), (LIMITS, "max_turns=1"), (LIMITS, "max_turns=9"))
    assert (await post(proxy.url, CHAT, turn(), *both)).status == 400
    both = (("X-Program-ID", "a"), (LIMITS, "max_turns=1"), (LIMITS, "max_age_s=9"))
    assert (await post(proxy.url, CHAT, turn(), *both)).status == 200
    assert (await post(proxy.url, CHAT, turn(), *both)).status == 410
    assert len(replica.calls) == 1


async def test_limits_that_would_limit_nothing_are_refused(proxy: RunningProxy) -> None:
    """Only turns and leases have a program's limits, in a header; whoever says them elsewhere is told so."""
    for wanted, headers in (({"limits": {"max_turns": 1}}, ()), ({}, named("a", "max_turns=1")[1:])):
        refused = await post(proxy.url, "/programs", {"program_id": "a", **wanted}, *headers)
        assert (refused.status, refused.error["code"]) == (400, "invalid_request")
        assert "X-Program-Limits" in refused.error["message"]
        assert (await get(proxy.url, "/programs/a")).status == 404
    refused = await post(proxy.url, "/leases", {"program_id": "a", "limits": {"max_turns": 1}})
    assert (refused.status, "X-Program-Limits" in refused.error["message"]) == (400, True)


async def test_a_lease_has_its_programs_limits_in_the_header(proxy: RunningProxy) -> None:
    """They count as those of a turn, and a wrong one is refused."""
    wanted = {"program_id": "a"}
    limits = named("a", "max_turns=1")[1:]
    lease = (await post(proxy.url, "/leases", wanted, *limits)).json()["lease_id"]
    await post(proxy.url, f"/leases/{lease}/end", {"outcome": "finished"})
    refused = await post(proxy.url, "/leases", wanted)
    assert (refused.status, refused.error["code"]) == (410, "program_limit")
    assert (await post(proxy.url, "/leases", {"program_id": "b"}, (LIMITS, "max_turns=0"))).status == 400


async def test_a_program_that_ends_at_its_limit_is_gone(proxy: RunningProxy) -> None:
    """Its memory is free after the last turn; the id is refused until it is released."""
    headers = named("a", "max_turns=1, end=finish")
    assert (await post(proxy.url, CHAT, turn(), *headers)).status == 200
    assert (await get(proxy.url, "/programs/a")).status == 404
    assert (await post(proxy.url, CHAT, turn(), *named("a"))).status == 410
    await post(proxy.url, "/programs/release", {"program_id": "a"})
    assert (await post(proxy.url, CHAT, turn(), *named("a"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/programs/release", {"program_id": "a", "abort": True}, "program_released"),
        ("/programs/release", {"program_ids": ["a", "b"], "abort": True}, "program_released"),
        ("/operations/kill", {"program_id": "a", "abort": True}, "program_killed"),
    ],
)
async def test_the_end_of_a_program_may_abort_its_turns(
    path: str, body: dict[str, Any], code: str, *, stream: bool
) -> None:
    """The engine sees its client leave, and the caller is told why."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        running = asyncio.create_task(post(proxy.url, CHAT, turn(stream=stream), *named("a")))
        await until(lambda: len(replica.calls) == 1)
        assert (await post(proxy.url, path, body)).status == 200
        answer = await running
        assert (answer.status, answer.json()["error"]["code"]) == (410, code)
        await until(lambda: proxy.runtime.leases_count == 0)
        assert [await metric(proxy.url, "turns_total", outcome) for outcome in ("aborted", "abandoned")] == [1, 0]


async def test_a_stream_that_is_aborted_says_why_it_ends() -> None:
    """Its answer has begun, so its client gets an event, as where a replica breaks off."""
    gate = Gate(before=[stream_head(), chunk(word("one"))])
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy:
        running = asyncio.create_task(post(proxy.url, CHAT, turn(stream=True), *named("a")))
        await until(lambda: (program := proxy.runtime.programs.get("a")) is not None and has_begun(program))
        assert (await post(proxy.url, "/operations/kill", {"program_id": "a", "abort": True})).status == 200
        answer = await running
        first, last = events_of(answer.body)
        assert (first["choices"][0]["delta"]["content"], last["error"]["code"]) == ("one", "program_killed")
        assert not answer.whole
        await until(lambda: proxy.runtime.leases_count == 0)
        assert [await metric(proxy.url, "turns_total", outcome) for outcome in ("aborted", "abandoned")] == [1, 0]


def has_begun(program: Program) -> bool:
    """Return whether a turn of a program has the first byte of its answer."""
    return any(each.started_s is not None for each in program.in_flight.values())


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, b'data: {"error":{"message":'),
        ("/v1/completions", b'data: {"error":{"message":'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":'),
        ("/generate", b'data: {"error":{"message":'),
    ],
)
async def test_stream_of_an_aborted_program_ends_with_an_error_event(path: str, event: bytes) -> None:
    """In the caller's schema; then the connection closes, and nothing is left."""
    gate = Gate([stream_head(), chunk(word("one"))])
    async with fake_replica(gate) as replica, running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        body = json.dumps(turn(stream=True)).encode()
        wire.send("POST", path, named("a"), body)
        assert (await wire.head()).status == 200
        assert await wire.chunk() == word("one")
        await post(proxy.url, "/programs/release", {"program_id": "a", "abort": True})
        said = await wire.chunk()
        assert said.startswith(event)
        assert b'"program_released"' in said
        assert (b'"type":"invalid_request_error"' in said) is (path not in ("/v1/responses", "/generate"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await wire.chunk()
        await asyncio.wait_for(replica.calls[0].left.wait(), DEADLINE_S)
        await until(lambda: proxy.runtime.leases_count == 0)


async def floods(call: Call) -> None:
    """Stream without end."""
    call.write(stream_head())
    while not call.left.is_set():
        call.write(chunk(word("x" * 100_000)))
        await asyncio.sleep(0.01 if call.transport.get_write_buffer_size() > 1_000_000 else 0)


async def test_client_that_reads_nothing_keeps_no_lease_of_an_aborted_program() -> None:
    """It cannot be told; its engine is free at once."""
    async with fake_replica(floods) as replica, running_proxy(replica.url) as proxy:
        address = urlsplit(proxy.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            body = json.dumps(turn(stream=True)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Program-ID: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            await until(lambda: replica.calls and replica.calls[0].transport.get_write_buffer_size() > 1_000_000)
            await post(proxy.url, "/programs/release", {"program_id": "a", "abort": True})
            await asyncio.wait_for(replica.calls[0].left.wait(), DEADLINE_S)
            await until(lambda: proxy.runtime.leases_count == 0)


async def test_the_least_of_header_key_and_option_counts(tmp_path: Path) -> None:
    """No client raises the limit of its key, and no key that of the proxy."""
    file = tmp_path / "keys.json"
    few = add_key(file, "few", admin=False, expires=None, limits=KeyLimitsEntry(program_max_turns=2))
    many = add_key(file, "many", admin=False, expires=None, limits=KeyLimitsEntry(program_max_turns=50))
    async with (
        fake_replica(answers()) as replica,
        running_proxy(replica.url, keys_file=file, program_max_turns=3) as proxy,
    ):

        async def allowed_count(program_id: str, key: str, limits: str) -> int:
            """Return how many of five turns are answered."""
            headers = (*named(program_id, limits), ("Authorization", f"Bearer {key}"))
            return sum([(await post(proxy.url, CHAT, turn(), *headers)).status == 200 for _ in range(5)])

        assert await allowed_count("a", few, "max_turns=100") == 2
        assert await allowed_count("b", many, "max_turns=100") == 3
        assert await allowed_count("c", many, "") == 3
        assert await allowed_count("d", many, "max_turns=1") == 1
