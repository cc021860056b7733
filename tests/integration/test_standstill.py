"""No request of one key and no answer of an engine stops the loop for 100 ms, or takes 4 times its own size.

A processor that is slower has the more time.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.integration.measuring import MeasuredProxy, measured_command, measured_proxy, slower_ratio
from tests.integration.support import (
    CHAT,
    FakeReplica,
    answers,
    event,
    fake_replica,
    get,
    metric,
    post,
    streams,
    writes,
)
from thunderagent.proxy.gate.access import ENGINE, ROUTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MOST_S = 0.1
MOST_RATIO = 4
SIZE_BYTES = 24 * 2**20
BESIDE_BYTES = 4 * 2**20
"""What polls, the event log and the many small things of turns take beside. Bodies here are six times as large."""


def within(body: bytes, piece: bytes, end: bytes) -> bytes:
    return body + piece * ((SIZE_BYTES - len(body) - len(end)) // len(piece)) + end


SAID = b'{"model":"m","messages":[{"role":"user","content":"'
TWICE = b'"}],"program_id":"a","program_id":"a"}'
USED = b'"}],"program_id":"a","stream":true,"stream_options":{"include_usage":false}}'
BODIES: dict[str, Callable[[], bytes]] = {
    "escaped quotes, program_id twice": lambda: within(SAID, rb"\"", TWICE),
    "backslashes": lambda: within(SAID, rb"\\", TWICE),
    "escaped letters": lambda: within(SAID, rb"\u0061", TWICE),
    "usage": lambda: within(SAID, rb"\n", USED),
    "no end": lambda: within(SAID, rb"\"", b"\\"),
    "numbers": lambda: within(b'{"program_id":"a","messages":[0', b",0", b"]}"),
    "lists": lambda: within(b'{"program_id":"a","messages":[0', b",[]", b"]}"),
    "objects": lambda: within(b'{"program_id":"a","input":[{}', b",{}", b"]}"),
    "members": lambda: within(b'{"program_id":"a","program_id":"a"', b',"b":0', b"}"),
    "of a field": lambda: within(b'{"program_id":"a","metadata":[0', b",[]", b"]}"),
    "other quotes": lambda: within(b'{\'priority\':1,"a":"', rb"\"", b'"}'),
    "spaces": lambda: within(b"", b" ", b'{"program_id":"a","program_id":"b"}'),
    "UTF-16": lambda: within(b"", " ".encode("utf-16-le"), '{"priority":1}'.encode("utf-16-le")),
    "a prompt": lambda: within(b'{"program_id":"a","prompt":"', b"word ", b'"}'),
    "media": lambda: within(SAID[:-12] + b'[{"type":"text","text":"', b'{"image_url":', b'"}]}]}'),
}


async def checked(proxy: MeasuredProxy, size_bytes: int, what: str) -> None:
    seen = await proxy.look()
    if seen.longest_s >= MOST_S:
        most_s = MOST_S * slower_ratio()
        stood = f"the loop stood still for {seen.longest_s * 1000:.0f} ms of {most_s * 1000:.0f}"
        assert seen.longest_s < most_s, f"{what}: {stood}"
    most_bytes = MOST_RATIO * size_bytes + BESIDE_BYTES
    assert seen.grown_bytes < most_bytes, f"{what}: {size_bytes} bytes took {seen.grown_bytes}"


Shared = tuple[FakeReplica, MeasuredProxy]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Shared]:
    """Run one proxy for all bodies and answers: it gives back what is free before each, so that it hides nothing."""
    async with (
        fake_replica(capacity_tokens=10**8) as replica,
        measured_proxy(replica.url, infer_programs=True, client_priority="drop") as proxy,
    ):
        yield replica, proxy


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BODIES)
async def test_a_body_stops_nobody(name: str, shared: Shared) -> None:
    body, (replica, proxy) = BODIES[name](), shared
    replica.behaviour = answers()
    for path in (CHAT, "/v1/responses", "/tokenize"):
        answer = await post(proxy.url, path, body)
        assert answer.status in (200, 400, 413), path
        await checked(proxy, len(body), f"{name} to {path}")
    replica.calls.clear()


async def test_each_route_of_ours_refuses_what_is_large() -> None:
    """Its bound is in its row; a million ids are refused before they are read."""
    ids = json.dumps({"program_ids": [f"p{number}" for number in range(1_000_000)]}).encode()
    async with fake_replica() as replica, measured_proxy(replica.url) as proxy:
        for row in ROUTES:
            if row.access is ENGINE or not set(row.methods.split()) & {"POST", "*"}:
                continue
            if row.pattern.startswith("/internal/"):  # only where a process hands over to the next
                continue
            path = row.pattern.replace("**", "").replace("{}", "a")
            answer = await post(proxy.url, path, ids)
            assert answer.status in (404, 405, 413), path
            if answer.status == 413:
                assert "the limit of this path is" in answer.json()["error"]["message"]
            await checked(proxy, len(ids), path)
        for path in ("/programs/release", "/sessions/batch_delete", "/leases", "/keys", "/pause"):
            assert (await post(proxy.url, path, ids)).status in ((413, 404) if path == "/keys" else (413,)), path


async def test_through_a_gateway_what_is_large_is_refused_as_fast_and_stops_no_process() -> None:
    """It never reaches the scheduler, which goes on to lead: other turns run meanwhile."""
    listen = ("--listen", "127.0.0.1:0", "--poll-interval-s", "0.05")
    ids = json.dumps({"program_ids": [f"p{number}" for number in range(5_000_000)]}).encode()
    assert len(ids) > 55 * 10**6
    async with (
        fake_replica(capacity_tokens=10**8) as replica,
        measured_command("scheduler", *listen, "--backends", replica.url) as leader,
        measured_command("gateway", "--port", "0", "--schedulers", leader.url) as gateway,
    ):
        async with asyncio.timeout(60):
            while (await get(gateway.url, "/ready")).status != 200:
                await asyncio.sleep(0.02)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        assert (await post(gateway.url, CHAT, {**body, "program_id": "first"})).status == 200
        epoch = (await get(leader.url, "/internal/leader")).json()["epoch"]
        for each in (leader, gateway):
            await each.look()
        for path in ("/programs/release", "/sessions/batch_delete"):
            refusing = asyncio.create_task(post(gateway.url, path, ids))
            turns = [await post(gateway.url, CHAT, {**body, "program_id": f"{path}{number}"}) for number in range(20)]
            assert {each.status for each in turns} == {200}
            refused = await refusing
            assert (refused.status, refused.error["code"]) == (413, "body_too_large")
            for name, each in (("scheduler", leader), ("gateway", gateway)):
                await checked(each, 2**20, f"{path}, {name}")
        said = (await get(leader.url, "/internal/leader")).json()
        assert (said["role"], said["epoch"]) == ("leader", epoch)
        assert await metric(gateway.url, "gateway_links_total") == 1
        assert await metric(gateway.url, "fail_open_turns_total") == 0


async def test_full_batch_of_ids_is_released_in_slices() -> None:
    ids = [f"p{number}" for number in range(9_000)]
    async with fake_replica(capacity_tokens=10**8) as replica, measured_proxy(replica.url) as proxy:
        for _ in range(2):
            answer = await post(proxy.url, "/programs/release", {"program_ids": ids})
            assert answer.status == 200
            await checked(proxy, 0, "9,000 ids")


# --- answers to turns

LARGE_ID = b'{"id":"' + b"i" * 2**20 + b'","choices":[],"usage":{"prompt_tokens":7}}'
ANSWERS: dict[str, Callable[[], bytes]] = {
    "choices": lambda: within(b'{"choices":[{}', b",{}", b"]}"),
    "lists": lambda: within(b'{"tool_calls":0,"choices":[{"message":{"content":[0', b",[]", b"]}}]}"),
    "texts": lambda: within(b'{"tool_calls":0,"choices":[{"message":{"content":[0', b',"ab"', b"]}}]}"),
    "escapes": lambda: within(b'{"tool_calls":0,"choices":[{"message":{"content":"```', rb"\"", b'"}}]}'),
    "members": lambda: within(b'{"usage":{"prompt_tokens":7', b',"b":0', b"}}"),
    "an error beside lists": lambda: within(b'{"error":0,"choices":[0', b",[]", b"]}"),
    "an error of members": lambda: within(b'{"error":{"a":0', b',"b":0', b"}}"),
    "a list of errors": lambda: within(b'[{"error":0}', b",{}", b"]"),
    "no JSON": lambda: within(b"[", b"[", b""),
    "items": lambda: within(b'{"output":[{"type":"message"}', b',{"a":[]}', b"]}"),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_stops_nobody(name: str, shared: Shared) -> None:
    content, (replica, proxy) = ANSWERS[name](), shared
    replica.behaviour = answers(content)
    for path in (CHAT, "/v1/responses", "/v1/messages", "/generate"):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x", "text": "x"}
        assert (await post(proxy.url, path, body)).body == content
        await checked(proxy, len(content), f"{name} of {path}")
    replica.calls.clear()


async def test_large_ids_of_answers_are_not_kept() -> None:
    """Answers are remembered for those that continue them."""
    async with (
        fake_replica(answers(LARGE_ID), capacity_tokens=10**8) as replica,
        measured_proxy(replica.url) as proxy,
    ):
        for number in range(40):
            answer = await post(proxy.url, "/v1/responses", {"model": "m", "input": f"{number}"})
            assert answer.status == 200
        await checked(proxy, 2**20, "40 ids of a megabyte")


async def test_a_stream_of_one_large_piece_stops_nobody() -> None:
    piece = event({"choices": [{"index": 0, "delta": {"content": "x"}}]}) * 100_000
    async with (
        fake_replica(streams(piece), capacity_tokens=10**8) as replica,
        measured_proxy(replica.url) as proxy,
    ):
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        assert (await post(proxy.url, CHAT, body)).status == 200
        await checked(proxy, len(piece), "100,000 events at once")


@pytest.mark.parametrize("said", [b'{"error":0,"choices":[0%b]}', b'{"choices":[{}%b],"error":{}}', b'[{"error":0}%b]'])
async def test_large_stream_event_stops_nobody(said: bytes) -> None:
    size_bytes = 12 * 2**20
    data = b"data: " + said % (b",[]" * (size_bytes // 3)) + b"\n\n"
    async with (
        fake_replica(streams(data, b"data: [DONE]\n\n"), capacity_tokens=10**8) as replica,
        measured_proxy(replica.url) as proxy,
    ):
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        answer = await post(proxy.url, CHAT, body)
        assert data in answer.body
        await checked(proxy, len(data), "a large event")


async def test_an_answer_without_end_to_a_held_stream_is_cut() -> None:
    """It cannot be sent as one event of the stream that began with heartbeats; it is not kept until memory ends."""
    endless = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
    async with (
        fake_replica(writes(endless, *[b"x" * 2**20] * 64)) as replica,
        measured_proxy(replica.url, heartbeat_s=0.05, policy="cap", policy_args={"n": "1"}) as proxy,
    ):
        lease = (await post(proxy.url, "/leases", {"program_id": "first"})).json()
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], "program_id": "b"}
        held = asyncio.create_task(post(proxy.url, CHAT, body))
        await asyncio.sleep(0.3)
        await post(proxy.url, f"/leases/{lease['lease_id']}/end")
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        answer = await held
        assert b"replica_answer_too_large" in answer.body
        await checked(proxy, 2**20, "an answer without end")


# --- answers to polls


def _exposition(lines: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(lines) + lines


def _packed() -> bytes:
    packed = gzip.compress(b"# " + b"0" * (200 * 2**20), 1)
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed


def _models(count: int) -> bytes:
    return _exposition(json.dumps({"data": [{"id": f"model-{number}"} for number in range(count)]}).encode())


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 99999999999\r\n\r\n"
BLOCK = b"# " + b"x" * 65_533 + b"\n"

POLLS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "metrics without end": ("/metrics", lambda: ENDLESS, "sent more than"),
    "metrics of 20 MB": ("/metrics", lambda: _exposition(b"vllm:num_requests_running 1\n" * 700_000), "sent more than"),
    "many lines": ("/metrics", lambda: _exposition(b"#\n" * 200_000), "lines"),
    "many samples": (
        "/metrics",
        lambda: _exposition(b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % each for each in range(90_000))),
        "samples",
    ),
    "long lines": ("/metrics", lambda: _exposition((b"x" * 16_000 + b"\n") * 480 + b"#\n" * 100_000), "lines"),
    "a long line after others": (
        "/metrics",
        lambda: _exposition((b"x" * 16_000 + b"\n") * 64 + b"x" * 16_385),
        "characters",
    ),
    "a long line": ("/metrics", lambda: _exposition(b'vllm:num_requests_running{a="' + b"x" * 2**20), "characters"),
    "packed metrics": ("/metrics", _packed, "sent more than"),
    "models without end": ("/v1/models", lambda: ENDLESS, "sent more than"),
    "many models": ("/v1/models", lambda: _models(100_000), "models"),
    "models of lists": ("/v1/models", lambda: _exposition(b'{"data":[' + b"{}," * 600_000 + b"{}]}"), "models"),
}


@asynccontextmanager
async def engine(path: bytes, answer: bytes) -> AsyncIterator[str]:
    """Answer requests for one path with these bytes, without end if it is `ENDLESS`; others as an engine does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                asked = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
                writer.write(answer if asked == path else _exposition(b""))
                while asked == path and answer == ENDLESS:
                    writer.write(BLOCK)
                    await writer.drain()
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()


@pytest.mark.parametrize("name", POLLS)
async def test_a_poll_stops_nobody_and_its_replica_is_down(name: str) -> None:
    path, answer, why = POLLS[name]
    content = answer()
    async with (
        engine(path.encode(), content) as bad_url,
        fake_replica() as good,
        measured_proxy(bad_url, good.url, up=1) as proxy,
    ):
        assert await down_for(proxy, good) != ""
        said = await down_for(proxy, good)
        assert why in said
        assert path in said
        await checked(proxy, 8 * 2**20, name)
        assert (await post(proxy.url, CHAT, {"model": "m", "messages": []})).status == 200


async def down_for(proxy: MeasuredProxy, good: FakeReplica) -> str:
    """Return why the other replica is down, as soon as it is."""
    why = ""

    async def is_down() -> bool:
        nonlocal why
        replicas = (await get(proxy.url, "/replicas")).json()["replicas"]
        why = next((each["why_down"] or "" for each in replicas if each["replica_id"] != good.replica_id), "")
        return bool(why) and "not polled" not in why

    while not await is_down():
        await asyncio.sleep(0.05)
    return why
