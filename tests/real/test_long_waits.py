"""Waits of minutes, in real time and concurrently: a held turn, and a paused generation.

A turn of Codex waits for 400 s with `THUNDERAGENT_LONG_HOLD_S=400`; without it for more than 120 s, the longest wait
that the proxy itself asks of a client. Turns of clients for Node wait as long as their transport lets them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.processes import thunderagent
from tests.real.support import metrics, until
from tests.real.test_coding_clis import NODE_CLIENTS, node_folder  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOLD_S = float(os.environ.get("THUNDERAGENT_LONG_HOLD_S", "130"))
PAUSE_S = 60.0
OUTPUT_TOKENS = 4000  # some seconds: a busy machine must not be done before it is paused
CODEX = {
    "session-id": "0199a213-codex",
    "thread-id": "0199a213-codex",
    "originator": "codex_cli_rs",
    "accept": "text/event-stream",
}
GENERATE = "/inference/v1/generate"


def without_moment(answer: bytes) -> bytes:
    """Return an answer without its creation time."""
    return re.sub(rb'"created":\d+', b'"created":0', answer)


async def hold_codex(folder: Path) -> str:
    """Hold a streamed turn of Codex, then grant it; return its wait for the head of its answer."""
    one_at_a_time = ("--policy", "cap", "--policy-arg", "n=1", "--idle-limit-s", "1000")
    options = ("--embedded-engines", "1", "--port", "0", *one_at_a_time)
    async with (
        thunderagent("serve", *options, log_path=folder / "codex.log") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=None) as client,
    ):
        first = {"model": "simulated", "input": "w1", "max_output_tokens": 2}
        assert (await client.post("/p/first/v1/responses", json=first)).status_code == 200
        asked = {**first, "input": "w1 w2", "stream": True, "store": False, "prompt_cache_key": CODEX["session-id"]}
        began_s = time.monotonic()
        request = client.build_request("POST", "/v1/responses", json=asked, headers=CODEX)
        held = asyncio.create_task(client.send(request, stream=True))
        while time.monotonic() - began_s < HOLD_S:
            await asyncio.sleep(1.0)
            assert not held.done(), f"a head came after {time.monotonic() - began_s:.0f} s"
        assert (await client.get("/queue")).json()["turns_held_count"] == 1
        await client.post("/programs/release", json={"program_id": "first"})
        response = await held
        body = (await response.aread()).decode()
        assert (response.status_code, response.headers["X-Program-ID"]) == (200, CODEX["session-id"])
        assert int(response.headers["X-Hold-Ms"]) >= HOLD_S * 1000
        events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        program = (await client.get(f"/programs/{CODEX['session-id']}")).json()
        assert (program["turn_count"], program["output_tokens_total"]) == (1, 2)
        log = (folder / "codex.log").read_text()
        assert "429" not in re.findall(r"status['\"]?[=:] ?(\d+)", log)
    return f"a turn of Codex was held for {int(response.headers['X-Hold-Ms']) / 1000:.1f} s, and completed"


async def pause_as_skyrl(engine: RealEngine, proxy: Server) -> str:
    """Pause in mid-generation as SkyRL does before new weights, and compare every byte with an answer without both."""
    tokens = [100 + (index * 13) % 1500 for index in range(200)]
    sampling = {
        "max_tokens": OUTPUT_TOKENS,
        "min_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 1,
    }
    asked = {"model": MODEL_NAME, "token_ids": tokens, "sampling_params": sampling, "cache_salt": "0"}
    headers = {"X-Session-ID": "task-1_0", "X-Request-Id": "pinned"}
    async with httpx2.AsyncClient(timeout=None) as client:

        async def generated_tokens() -> float:
            return (await metrics(client, engine.url))["vllm:generation_tokens_total"]

        async def told(path: str, **options: Any) -> dict[str, Any]:
            answer = await client.post(f"{proxy.url}{path}", **options)
            assert answer.status_code == 200, answer.text
            said: dict[str, Any] = answer.json()
            return said

        expected = await client.post(f"{engine.url}{GENERATE}", json=asked, headers=headers)
        assert expected.status_code == 200
        await engine.reset_prefix_cache()
        before_tokens = await generated_tokens()
        running = asyncio.create_task(client.post(f"{proxy.url}{GENERATE}", json=asked, headers=headers))

        async def is_in_the_middle() -> bool:
            return await generated_tokens() > before_tokens + 50

        await until(is_in_the_middle)
        await told("/pause", params={"mode": "keep", "clear_cache": "false"})
        late = asyncio.create_task(client.post(f"{proxy.url}{GENERATE}", json=asked, headers={"X-Session-ID": "late"}))
        await asyncio.sleep(1.0)
        paused_tokens = await generated_tokens()
        assert before_tokens < paused_tokens < before_tokens + OUTPUT_TOKENS
        await asyncio.sleep(PAUSE_S)
        assert (await generated_tokens(), running.done(), late.done()) == (paused_tokens, False, False)
        program = (await client.get(f"{proxy.url}/programs/task-1_0")).json()
        assert (program["status"], program["phase"]) == ("active", "reasoning")
        await told("/resume")
        answer = await running
        assert answer.status_code == 200
        assert without_moment(answer.content) == without_moment(expected.content)
        assert (await late).status_code == 200
        generation = program["generation"]
        for name, released in (("task-1_0", True), ("task-1_0", False), ("never-seen_3", False), ("late", True)):
            assert (await told("/finish_session", params={"session_id": name}))["released"] is released
        # The next epoch has the same ids.
        short = {**asked, "sampling_params": {**sampling, "max_tokens": 1, "min_tokens": 1}}
        assert (await client.post(f"{proxy.url}{GENERATE}", json=short, headers=headers)).status_code == 200
        program = (await client.get(f"{proxy.url}/programs/task-1_0")).json()
        assert program["generation"] > generation
        assert program["turn_count"] == 1
        await told("/finish_session", params={"session_id": "task-1_0"})
    return f"a generation stood still for {PAUSE_S:.0f} s, and gave the same {len(answer.content):,} bytes"


async def hold_for_node(client: str, packages: Path, folder: Path) -> str:
    """Hold a turn of a client for Node with its defaults, and never make room; return how it is served."""
    folder.mkdir()
    options = ("--embedded-engines", "1", "--port", "0", "--policy", "cap", "--policy-arg", "n=1")
    async with (
        thunderagent("serve", *options, "--idle-limit-s", "1000", log_path=folder / "proxy.log") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin,
    ):
        first = {"model": "simulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert (await admin.post("/p/first/v1/chat/completions", json=first)).status_code == 200
        script = folder / "client.cjs"
        script.write_text(NODE_CLIENTS.replace("http://127.0.0.1:8300", f"{proxy.url}/p/second"))
        environment = {**os.environ, "NODE_PATH": str(packages), "NO_PROXY": "127.0.0.1"}
        node = await asyncio.create_subprocess_exec("node", script, client, stdout=PIPE, stderr=PIPE, env=environment)
        try:
            said, complaint = await node.communicate()
        finally:
            if node.returncode is None:
                node.kill()
        assert b"answered" in said, complaint.decode()
        second = (await admin.get("/programs/second")).json()
        assert second["turn_count"] == 1
        assert ("restore", "patience") in [(entry["what"], entry["why"]) for entry in second["story"]]
        assert not [entry for entry in second["story"] if entry["what"] == "abandoned"]
        assert LEAST_NODE_S < second["held_s_total"] < NODE_GIVES_UP_S
    return f"{client} for Node was held for {second['held_s_total']:.0f} s, and served at its first attempt"


LEAST_NODE_S, NODE_GIVES_UP_S = 120.0, 300.0


@pytest.mark.nightly
@pytest.mark.timeout(NODE_GIVES_UP_S + 180, func_only=True)
async def test_clients_for_node_are_served_before_their_transport_gives_up(
    node_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """They wait for 600 s and say so, or say nothing; what they are built on ends each request after 300 s."""
    clients = ("openai", "anthropic")
    for outcome in await asyncio.gather(*(hold_for_node(each, node_folder, tmp_path / each) for each in clients)):
        print(outcome)


@pytest.mark.nightly
@pytest.mark.timeout(HOLD_S + 180, func_only=True)
async def test_minutes_of_waiting_change_nothing(engine: RealEngine, proxy_of_one: Server, tmp_path: Path) -> None:
    """No 429 and no head of an answer while Codex is held; the same bytes after a pause of 60 s in mid-generation."""
    for outcome in await asyncio.gather(hold_codex(tmp_path), pause_as_skyrl(engine, proxy_of_one)):
        print(outcome)
