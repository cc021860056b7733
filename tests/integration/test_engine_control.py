"""The embedded engine is paused, put to sleep and aborted through the proxy, as vLLM would be."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from tests.integration.support import (
    DEADLINE_S,
    Wire,
    ask,
    engine,
    events_of,
    get,
    metrics_of,
    post,
    running_proxy,
    turn,
    until,
)

if TYPE_CHECKING:
    from tests.integration.support import RunningProxy

LONG = {"max_tokens": 200, "min_tokens": 200, "ignore_eos": True}
LONGER = {**LONG, "max_tokens": 2000, "min_tokens": 2000}
"""It takes 15 s, unless it is ended."""


async def began(wire: Wire, url: str, program_id: str) -> bytes:
    """Begin a long stream and return its first bytes."""
    wire.send("POST", "/v1/chat/completions", (), json.dumps(turn(program_id, stream=True, **LONG)).encode())
    assert (await wire.head()).status == 200
    return await wire.chunk()


async def rest_of(wire: Wire) -> bytes:
    rest = b""
    while data := await wire.chunk():
        rest += data
    return rest


async def what_comes_within(wire: Wire, limit_s: float) -> bytes:
    """Read until the time is over."""
    came = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while data := await wire.chunk():
                came += data
    return came


def text_of(stream: bytes) -> str:
    events = [event for event in events_of(stream) if isinstance(event, dict)]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def until_running(engine_url: str, count: int) -> None:
    """Wait until this number of turns runs in an engine."""
    async with asyncio.timeout(DEADLINE_S):
        while sum((await metrics_of(engine_url))["vllm:num_requests_running"].values()) != count:
            await asyncio.sleep(0.01)


async def finish_reason_of(proxy: RunningProxy, engine_url: str, pause: str, limits: dict[str, Any] = LONGER) -> str:
    """Pause while a turn runs, and return how that turn ended."""
    runs = asyncio.create_task(post(proxy.url, "/v1/chat/completions", turn("a", **limits)))
    await until_running(engine_url, 1)
    assert (await post(proxy.url, pause, {})).status == 200
    reason: str = (await runs).json()["choices"][0]["finish_reason"]
    return reason


async def test_a_keep_mode_pause_gives_the_same_text_as_no_pause() -> None:
    """The engine stands still in the middle of a stream, for longer than the proxy's limits."""
    async with (
        engine(profile="demo") as process,
        running_proxy(process.url, idle_limit_s=0.5, forget_limit_s=1.0) as proxy,
    ):
        whole = (await post(process.url, "/v1/chat/completions", turn(stream=True, **LONG))).body
        async with Wire.open(proxy.url) as wire:
            came = await began(wire, proxy.url, "a")
            assert (await post(proxy.url, "/pause?mode=keep")).json() == {"status": "paused"}
            assert (await get(proxy.url, "/is_paused")).json() == {"is_paused": True}
            waits = asyncio.create_task(ask(proxy.url, "b", max_tokens=3))
            came += await what_comes_within(wire, 1.0)
            assert not waits.done()
            assert (await post(proxy.url, "/resume")).json() == {"status": "resumed"}
            came += await rest_of(wire)
        assert text_of(came) == text_of(whole)
        assert (await waits).status == 200


async def test_each_mode_of_a_pause_ends_a_turn_in_its_way() -> None:
    """A turn is aborted with its output so far, or finishes; a sleeping engine has an empty cache and wakes up."""
    async with engine(profile="demo") as process, running_proxy(process.url) as proxy:
        assert await finish_reason_of(proxy, process.url, "/pause") == "abort"
        await post(proxy.url, "/resume")
        assert await finish_reason_of(proxy, process.url, "/pause?mode=wait", LONG) == "length"
        await post(proxy.url, "/resume")
        assert await finish_reason_of(proxy, process.url, "/abort_requests") == "abort"
        await ask(proxy.url, "a", max_tokens=3)
        assert (await post(proxy.url, "/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
        waits = asyncio.create_task(ask(proxy.url, "a", max_tokens=3))
        await until(lambda: proxy.runtime.held_count == 1)
        assert (await post(proxy.url, "/wake_up?tags=weights")).json()["status"] == "sleeping"
        assert (await post(proxy.url, "/wake_up?tags=kv_cache")).json()["status"] == "awake"
        assert (await waits).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for path, body in (
            ("/collective_rpc", {"method": "echo"}),
            ("/update_weights", {"update_info": {}}),
            ("/update_weight_version", {"new_version": "2"}),
        ):
            assert (await post(proxy.url, path, body)).status == 200
        assert (await get(process.url, "/weight_info")).json() == {"weight_version": "2"}
        for path in ("/pause?mode=never", "/sleep?level=7"):
            assert (await post(process.url, path)).status == 422
        for path in ("/abort_requests", "/collective_rpc"):
            assert (await post(process.url, path, b"[")).status == 400


async def test_all_ranks_of_an_engine_are_controlled_at_once() -> None:
    """An abort ends what runs on each, and each forgets its cache."""
    async with (
        engine("--data-parallel-size", "2", profile="demo") as process,
        running_proxy(process.url, data_parallel_ranks=2, up=2) as proxy,
    ):
        turns = [asyncio.create_task(ask(proxy.url, name, **LONGER)) for name in ("a", "b")]
        await until_running(process.url, 2)
        assert (await post(process.url, "/pause?mode=abort", {})).status == 200
        answers = [await each for each in turns]
        assert {answer.header("X-Replica-ID") for answer in answers} == set(proxy.runtime.scheduler.replicas)
        assert [answer.json()["choices"][0]["finish_reason"] for answer in answers] == ["abort", "abort"]
        assert (await post(process.url, "/resume", {})).status == 200
        assert (await post(process.url, "/reset_prefix_cache", {})).json() == {"success": True}
