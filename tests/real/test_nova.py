"""Nova with a real model, small and random, behind the proxy: separate processes on real sockets."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from benchmarks.processes import thunderagent
from tests.real.support import metrics, replicas, until, until_all_up

CHAT = "/v1/chat/completions"
OUTPUT_TOKENS = 8
OUTPUT_LIMIT_TOKENS = 500
TURNS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model's folder."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("no PyTorch here: test_nova_environment.py runs this with it")
    path = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-m", "tests.unit.nova.folder", str(path)], check=True, timeout=100)
    return path


class World(NamedTuple):
    """The running servers' URLs."""

    client: httpx2.AsyncClient
    model: str
    nova: str
    text_engine: str
    proxy: str


@asynccontextmanager
async def world_of(model: Path, logs: Path, *options: str) -> AsyncIterator[World]:
    """Run Nova, a text engine, and the proxy in front; turns of each model go to its engine."""
    async with AsyncExitStack() as stack:
        nova_options = ("--port", "0", "--slot-tokens", "2048", "--slots", "4", *options)
        run = stack.enter_async_context
        nova = await run(thunderagent("nova", "serve", "--model", str(model), *nova_options, log_path=logs / "nova"))
        text = await run(thunderagent("engine", "--port", "0", log_path=logs / "engine"))
        command = ("serve", "--port", "0", "--backends", f"{nova.url},{text.url}", "--engine-tags", "true")
        proxy = await run(thunderagent(*command, "--poll-interval-s", "0.1", log_path=logs / "proxy"))
        client = await run(httpx2.AsyncClient(timeout=60, trust_env=False))
        await until_all_up(client, proxy.url)
        yield World(client, model.name, nova.url, text.url, proxy.url)


def picture(number: int, side: int = 64) -> dict[str, Any]:
    from tests.unit.nova.folder import png  # noqa: PLC0415 - needs torch

    url = "data:image/png;base64," + base64.b64encode(png(number % 256, side, side)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def vision_agent(world: World, url: str, name: str) -> list[dict[str, Any]]:
    """Add a screenshot each turn to the full history; return the answers."""
    messages: list[dict[str, Any]] = []
    answers = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": [picture(10 * turn), {"type": "text", "text": f"step {turn}"}]})
        body = {"model": world.model, "messages": messages, "max_tokens": OUTPUT_TOKENS}
        answer = await world.client.post(f"{url}{CHAT}", json=body, headers={"X-Program-ID": name})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
        messages.append(answers[-1]["choices"][0]["message"])
    return answers


async def text_agent(client: httpx2.AsyncClient, url: str, name: str, turns: int) -> None:
    text = "begin"
    for _ in range(turns):
        body = {"model": "simulated", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
        answer = await client.post(f"{url}{CHAT}", json=body, headers={"X-Program-ID": name})
        assert answer.status_code == 200, answer.text
        text += answer.json()["choices"][0]["message"]["content"]


async def is_idle(world: World) -> bool:
    """Return whether no request is left in Nova."""
    health = (await world.client.get(f"{world.nova}/health")).json()
    return not any(health[name] for name in ("running", "waiting", "pending_encode", "decoding", "slots_used"))


async def test_vision_agent_runs_beside_text_agents(model: Path, tmp_path: Path) -> None:
    """Twenty turns add a screenshot each; each one is encoded once, and the answers are those without a cache."""
    async with world_of(model, tmp_path, "--keep-slots", "2", "--cached-images", "32") as world:
        client = world.client
        async with asyncio.TaskGroup() as group:
            vision = group.create_task(vision_agent(world, world.proxy, "eyes"))
            for number in range(4):
                group.create_task(text_agent(client, world.proxy, f"words-{number}", 10))
        answers = vision.result()
        kinds = {replica["kind"]: replica for replica in await replicas(client, world.proxy)}
        assert set(kinds) == {"nova", "vllm"}
        assert kinds["nova"]["capacity_tokens"] == 4 * 2048
        images = [answer["usage"]["prompt_tokens_details"]["image_tokens"] for answer in answers]
        assert images == [images[0] * (turn + 1) for turn in range(TURNS)]
        assert images[0] > 0
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {OUTPUT_TOKENS}
        said = await metrics(client, world.nova)
        assert said["nova:slots_kept"] == 1
        encodes = await passes(client, world.nova, "encode")
        assert encodes == TURNS
        assert (await metrics(client, world.text_engine))["vllm:request_success_total"] == 40

        await client.post(f"{world.proxy}/programs/release", json={"program_id": "eyes"})

        async def is_released() -> bool:
            return (await metrics(client, world.nova))["nova:slots_kept"] == 0

        await until(is_released)
        again = await vision_agent(world, world.nova, "nobody")  # without the proxy there is no program name
        assert texts(again) == texts(answers)
        assert len(set(texts(answers))) > TURNS / 2, "answers all alike would prove little"
        assert await is_idle(world)


async def passes(client: httpx2.AsyncClient, url: str, stage: str) -> float:
    """Return the number of a stage's passes."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    begin = f'nova:stage_passes_total{{stage="{stage}"}}'
    return next(float(line.split()[1]) for line in lines if line.startswith(begin))


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["message"]["content"] for answer in answers]


async def test_a_client_that_leaves_in_any_stage_gives_everything_back(model: Path, tmp_path: Path) -> None:
    """With and without the proxy, slots, memory and queues are as before, and nobody was answered to the end."""
    bodies = {
        "pending_encode": [picture(7, 256), {"type": "text", "text": "look"}],
        "pending_prefill": [{"type": "text", "text": "read " * 300}],
        "decoding": [{"type": "text", "text": "go on"}],
    }
    async with world_of(model, tmp_path) as world:
        for stage, content in bodies.items():
            for url in (world.proxy, world.nova):
                await leave_in(world, url, stage, content)
        await vision_agent(world, world.proxy, "after")
        assert await is_idle(world)


async def leave_in(world: World, url: str, stage: str, content: list[dict[str, Any]]) -> None:
    """Start eight clients on four slots, and disconnect them when a request is in that stage.

    To answer the four that wait would take more passes than there are tokens in an answer.
    """
    messages = [{"role": "user", "content": content}]
    body = {"model": world.model, "messages": messages, "max_tokens": OUTPUT_LIMIT_TOKENS, "stream": True}
    async with httpx2.AsyncClient(timeout=60, trust_env=False) as leavers:
        posts = [
            leavers.post(f"{url}{CHAT}", json=body, headers={"X-Program-ID": f"{stage}-{number}-{len(url)}"})
            for number in range(8)
        ]
        tasks = [asyncio.create_task(post) for post in posts]

        async def is_there() -> bool:
            health = (await world.client.get(f"{world.nova}/health")).json()
            return bool(health["running"] and health[stage])

        await until(is_there, within_s=20)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    before = await passes(world.client, world.nova, "decode")
    await until(lambda: is_idle(world))
    assert await passes(world.client, world.nova, "decode") - before < OUTPUT_LIMIT_TOKENS
