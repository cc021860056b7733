"""Helpers of the tests on real engines."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.real_engine import MODEL_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Json = dict[str, Any]


def words(count: int, seed: int) -> str:
    """Return text of so many tokens."""
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(2000)}" for _ in range(count))


def chat(prompt: str, output_tokens: int, **fields: object) -> Json:
    """Return the body of a chat whose answer has exactly so many tokens."""
    return conversation([{"role": "user", "content": prompt}], output_tokens, **fields)


def conversation(messages: list[dict[str, str]], output_tokens: int, **fields: object) -> Json:
    """Return the body of a chat with a history."""
    return {"messages": messages, **_exactly(output_tokens), **fields}


def completion(prompt: object, output_tokens: int, **fields: object) -> Json:
    """Return the body of a text completion whose answer has exactly so many tokens."""
    return {"prompt": prompt, **_exactly(output_tokens), **fields}


def _exactly(output_tokens: int) -> Json:
    return {
        "model": MODEL_NAME,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


async def metrics(client: httpx2.AsyncClient, url: str) -> dict[str, float]:
    """Return an engine's samples by name, summed over their labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families((await client.get(f"{url}/metrics")).text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


async def replicas(client: httpx2.AsyncClient, url: str) -> list[Json]:
    """Return what the proxy says of its replicas."""
    found: list[Json] = (await client.get(f"{url}/replicas")).json()["replicas"]
    return found


async def until_all_up(client: httpx2.AsyncClient, url: str) -> None:
    """Wait until the proxy has seen all its replicas up."""

    async def all_up() -> bool:
        return all(replica["up"] for replica in await replicas(client, url))

    await until(all_up)


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = 30.0) -> None:
    """Wait until an awaited condition holds. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)


def events(body: bytes) -> list[Json]:
    """Return the events of a whole stream, having checked that it is one."""
    *found, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]
