"""After an update no token that older weights computed is used, by a real vLLM's own counters: it clears nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import pytest_asyncio

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.real_engine import RealEngine
from tests.loopback import free_ports
from tests.real.conftest import _engine_config
from tests.real.support import CHAT, COMPLETIONS, chat, completion, metrics, words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.real.conftest import RunProxy

pytestmark = pytest.mark.asyncio(loop_scope="session")

HITS = "vllm:prefix_cache_hits_total"
TOKENS_PATH = "/inference/v1/generate"
UPDATES_COUNT = 5
AGENTS_COUNT, MAX_LAG_COUNT = 6, 3


def turns(seed: int) -> dict[str, dict[str, Any]]:
    """Return a turn of each API, with a prompt of several blocks."""
    prompt = words(300, seed=seed)
    return {
        CHAT: chat(prompt, 2),
        COMPLETIONS: completion(prompt, 2),
        TOKENS_PATH: {
            "model": MODEL_NAME,
            "token_ids": [50 + seed, *range(60, 360)],
            "sampling_params": {"max_tokens": 2, "temperature": 0},
        },
        "/v1/responses": {"model": MODEL_NAME, "input": prompt, "max_output_tokens": 2, "temperature": 0},
    }


class Asks:
    """Sends turns through a proxy, and reads what the engine counts."""

    def __init__(self, client: httpx2.AsyncClient, engine: RealEngine, *, is_fenced: bool = True) -> None:
        self.is_fenced = is_fenced
        self._client = client
        self._engine = engine

    async def hit_tokens(self, path: str, body: dict[str, Any], program_id: str) -> float:
        """Return how many tokens the engine took from its cache for a turn."""
        before = (await metrics(self._client, self._engine.url))[HITS]
        answer = await self._client.post(path, json=body, headers={"X-Program-ID": program_id})
        assert answer.status_code == 200, answer.text
        return (await metrics(self._client, self._engine.url))[HITS] - before

    async def update(self) -> None:
        """Pause and go on, as for an update that clears nothing."""
        for path, body in (
            ("/weight_sync/begin", {}),
            ("/pause?mode=keep&clear_cache=false", None),
            ("/resume", None),
            ("/weight_sync/end", {"cache_cleared": False}),
        ):
            answer = await self._client.post(path, json=body)
            assert answer.status_code == 200, answer.text


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["turn", ""], ids=["fenced", "open"])
async def asks(
    request: pytest.FixtureRequest, engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> AsyncIterator[Asks]:
    """Send turns through a proxy with a fence, and through one without."""
    options = ("--fence", request.param) if request.param else ()
    async with (
        run_proxy((engines[0],), *options) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client,
    ):
        yield Asks(client, engines[0], is_fenced=bool(options))


@pytest.mark.parametrize("path", list(turns(0)))
async def test_vllm_reuses_nothing_of_older_weights(asks: Asks, path: str) -> None:
    """The first turn after each update hits nothing, the second does; without a fence the first does, too."""
    body = turns(1 + asks.is_fenced + 10 * list(turns(0)).index(path))[path]
    await asks.hit_tokens(path, body, "a")
    for number in range(UPDATES_COUNT):
        assert await asks.hit_tokens(path, body, "a") > 100
        await asks.update()
        hit_tokens = await asks.hit_tokens(path, body, f"new-{path}-{number}" if number % 2 else "a")
        assert hit_tokens == 0 if asks.is_fenced else hit_tokens > 100


async def test_vllm_clears_its_cache_when_it_is_paused_unless_told_otherwise(
    engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> None:
    """In every mode: the proxy assumes so."""
    async with run_proxy((engines[0],)) as proxy, httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client:
        asks, body = Asks(client, engines[0]), chat(words(300, seed=98), 2)
        await asks.hit_tokens(CHAT, body, "a")
        for mode in ("abort", "wait", "keep"):
            for clears in ("true", "false"):
                assert (await client.post(f"/pause?mode={mode}&clear_cache={clears}")).status_code == 200
                assert (await client.post("/resume")).status_code == 200
                hit_tokens = await asks.hit_tokens(CHAT, body, "a")
                assert hit_tokens == 0 if clears == "true" else hit_tokens > 100


async def rollouts_of(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Return all ended rollouts with their turns."""
    found: list[dict[str, Any]] = []
    while lines := (await client.get(f"/rollouts?view=turns&after={found[-1]['seq'] if found else 0}")).text.split():
        found += map(json.loads, lines)
    return found


async def test_vllm_program_keeps_its_own_and_new_ones_begin_anew(
    engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> None:
    """With `start`: an old program hits its own cache after an update, a new one hits nothing older."""
    async with (
        run_proxy((engines[0],), "--fence", "start") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client,
    ):
        asks, body = Asks(client, engines[0]), chat(words(300, seed=99), 2)
        assert await asks.hit_tokens(CHAT, body, "old") == 0
        for number in range(UPDATES_COUNT):
            await asks.update()
            assert await asks.hit_tokens(CHAT, body, "old") > 100
            assert await asks.hit_tokens(CHAT, body, f"new-{number}") == 0
            assert await asks.hit_tokens(CHAT, body, f"beside-{number}") > 100


@pytest.mark.nightly
@pytest.mark.timeout(3600, func_only=True)
async def test_vllm_reuses_nothing_older_in_a_thousand_updates_under_load(vllm: None, run_proxy: RunProxy) -> None:
    """All prompts are alike, and after each update some turn is the first: it hits nothing. No program is too old.

    FENCE_UPDATES says how many updates.
    """
    updates_count = int(os.environ.get("FENCE_UPDATES", "1000"))
    bound = ("--fence-max-lag-count", str(MAX_LAG_COUNT), "--fence-when-stale", "finish")
    (port,) = free_ports(1)
    async with (
        RealEngine(replace(_engine_config(port), ready_timeout_s=600)) as engine,
        run_proxy((engine,), "--fence", "turn", *bound, "--rollouts", "ids") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client,
    ):
        asks, body = Asks(client, engine), chat(words(300, seed=97), 2)
        through, answered, statuses = 0, asyncio.Event(), defaultdict[int, int](int)

        async def update() -> None:
            nonlocal through
            for _ in range(updates_count):
                await asks.update()
                through += 1
                answered.clear()
                await answered.wait()

        async def agent(number: int) -> None:
            while not updates.done():
                number, status = number + AGENTS_COUNT, 200
                while status == 200 and not updates.done():
                    sent = through
                    answer = await client.post(CHAT, json=body, headers={"X-Program-ID": f"p{number}"})
                    status = answer.status_code
                    statuses[status] += 1
                    if status == 200 and sent == through:
                        answered.set()
                await client.post("/programs/release", json={"program_id": f"p{number}"})

        async with asyncio.TaskGroup() as group:
            updates = group.create_task(update())
            for number in range(AGENTS_COUNT):
                group.create_task(agent(number))
        found = await rollouts_of(client)
    assert set(statuses) == {200, 410}, statuses
    turns = [[turn for turn in each["turns"] if turn["status"] == 200] for each in found]
    assert sum(map(len, turns)) == statuses[200], "each is recorded"
    cached, salts = defaultdict[int, list[int]](list), set[tuple[int, str]]()
    for turn in (turn for of_program in turns for turn in of_program):
        cached[turn["changes_before"]].append(turn["cached_tokens"])
        salts.add((turn["changes_before"], turn["salt"]))
    assert len(cached) == len(salts) == len({salt for _, salt in salts}) >= updates_count
    assert {min(each) for each in cached.values()} == {0}
    assert max(map(max, cached.values())) > 100, "it has a cache that it uses"
    lags = [turn["changes_before"] - each[0]["changes_before"] for each in turns if each for turn in each]
    hits = sum(tokens > 0 for each in cached.values() for tokens in each)
    print(f"{updates_count} updates, {len(lags)} turns of {len(found)} programs, {hits} with cached tokens,")
    print(f"{len(cached)} numbers of weights, answers {dict(statuses)}, most lag {max(lags)}")
    assert max(lags) == MAX_LAG_COUNT
