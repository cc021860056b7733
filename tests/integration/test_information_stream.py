"""The stream and the file of what GPUs and tools do; and clients that say when a tool runs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx2

from tests.integration.support import ask, engine, fake_replica, post, running_proxy, serve, until

if TYPE_CHECKING:
    from pathlib import Path


async def test_signals_are_streamed_to_who_asks_for_them() -> None:
    """They cover the engine's first token to the tool's end; other listeners get none."""
    heard: list[dict[str, Any]] = []

    async def listen(url: str, kinds: str, into: list[dict[str, Any]]) -> None:
        async with (
            httpx2.AsyncClient(timeout=60) as client,
            client.stream("GET", f"{url}/events?kinds={kinds}") as stream,
        ):
            data = (line.removeprefix("data: ") async for line in stream.aiter_lines() if line.startswith("data: "))
            async for each in data:
                into.append(json.loads(each))  # noqa: PERF401 - read while more comes

    others: list[dict[str, Any]] = []
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        listeners = [
            asyncio.create_task(listen(proxy.url, "signals", heard)),
            asyncio.create_task(listen(proxy.url, "", others)),
        ]
        await until(lambda: proxy.runtime.scheduler.stream.flows)
        await ask(proxy.url, "a")
        started = await post(proxy.url, "/programs/a/tools/start", {"tool": "pytest"})
        assert (started.status, started.json()) == (200, {"program_id": "a", "known": True})
        assert (await post(proxy.url, "/programs/a/tools/end")).json() == {"program_id": "a", "known": True}
        assert (await post(proxy.url, "/programs/b/tools/end")).json() == {"program_id": "b", "known": False}
        assert (await post(proxy.url, "/programs/a/tools/start", b'{"tool": [1]}')).status == 400
        await until(lambda: len(heard) >= 8 and others)
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        await until(lambda: not proxy.runtime.scheduler.stream.flows)
    kinds = [each["kind"] for each in heard]
    assert kinds == [
        "gpu_submit",
        "gpu_end",
        "tool_start",
        "tool_num",
        "tool_start",
        "tool_num",
        "tool_end",
        "tool_num",
    ]
    assert heard[0]["replica_id"] == replica.url.removeprefix("http://")
    assert (heard[6]["tool"], heard[6]["program_id"]) == ("pytest", "a")
    assert not {"gpu_submit", "tool_num"} & {each["kind"] for each in others}


async def test_signals_are_written_to_a_file(tmp_path: Path) -> None:
    """A line each, appended, with Unix times; the streamed turn has its first token in it."""
    path = tmp_path / "signals.jsonl"
    path.write_text('{"kind": "earlier"}\n')
    async with engine() as replica, serve("--backends", replica.url, "--signal-log", str(path)) as proxy:
        await ask(proxy.url, "a", stream=True, max_tokens=3)
        await post(proxy.url, "/programs/release", {"program_id": "a"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == [
        "earlier",
        "gpu_submit",
        "gpu_1st_token",
        "gpu_end",
        "tool_start",
        "tool_num",
        "tool_num",
        "program_end",
    ]
    assert lines[2]["launch_delay_s"] >= 0
    assert lines[3]["at_s"] > 1.7e9
