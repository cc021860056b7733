"""The scheduler's inputs match the engines' reports, and its decisions take effect in the engines."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.real.conftest import MAX_SEQS
from tests.real.support import (
    CHAT,
    COMPLETIONS,
    chat,
    completion,
    conversation,
    events,
    replicas,
    until,
    words,
)

if TYPE_CHECKING:
    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine
    from tests.real.conftest import RunProxy

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK_TOKENS = 32


async def kv_cache_size_tokens(client: httpx2.AsyncClient, engine: RealEngine) -> int:
    exposition = (await client.get(f"{engine.url}/metrics")).text
    infos = [
        sample.labels["kv_cache_size_tokens"]
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    ]
    assert len(infos) == 1
    return int(infos[0])


async def run_program(client: httpx2.AsyncClient, program_id: str, seed: int, *, turns: int) -> list[dict[str, Any]]:
    """Run an agent with a growing history; return each turn's usage and replica."""
    messages = [{"role": "system", "content": words(40, seed=0)}]
    served = []
    for turn in range(turns):
        messages.append({"role": "user", "content": words(200, seed=seed * 100 + turn)})
        body = conversation(messages, 16, stream=True, stream_options={"include_usage": True})
        response = await client.post(CHAT, json=body, headers={"X-Program-ID": program_id})
        assert response.status_code == 200
        chunks = events(response.content)
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        messages.append({"role": "assistant", "content": text})
        served.append({**chunks[-1]["usage"], "replica_id": response.headers["X-Replica-ID"]})
    return served


async def test_a_program_hits_its_own_history(engines: tuple[RealEngine, RealEngine], proxy: Server) -> None:
    """Every turn after the first stays on its replica and finds all whole blocks of the turn before it cached."""
    for engine in engines:
        await engine.reset_prefix_cache()
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as client:
        programs = await asyncio.gather(*(run_program(client, f"hits-{n}", n, turns=4) for n in range(4)))
        released = await client.post("/programs/release", json={"program_ids": [f"hits-{n}" for n in range(4)]})
    assert len(released.json()["released_ids"]) == 4
    for turns in programs:
        assert len({turn["replica_id"] for turn in turns}) == 1
        for before, after in itertools.pairwise(turns):
            # The last token of an answer is never computed, so the block it would fill may not be whole.
            whole_blocks = (before["total_tokens"] - 1) // BLOCK_TOKENS
            assert after["prompt_tokens_details"]["cached_tokens"] >= whole_blocks * BLOCK_TOKENS
    assert {turns[0]["replica_id"] for turns in programs} == {url_id(engine) for engine in engines}


def url_id(engine: RealEngine) -> str:
    return engine.url.removeprefix("http://")


async def test_capacity_is_what_each_engine_says(engines: tuple[RealEngine, RealEngine], proxy: Server) -> None:
    """The ledger's capacity is the size that the engine itself states for its KV pool."""
    async with httpx2.AsyncClient(timeout=60) as client:
        said = {url_id(engine): await kv_cache_size_tokens(client, engine) for engine in engines}
        known = {replica["replica_id"]: replica["capacity_tokens"] for replica in await replicas(client, proxy.url)}
    assert known == said


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_demand_is_the_sum_of_the_usage(proxy: Server, streams: bool) -> None:
    """While tools run, the claims of all programs are their contexts, to the token; after their release, nothing."""
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as client:
        await client.post("/programs/release", json={"all": True})  # leftovers of earlier tests
        demand_tokens = 0
        for number, prompt_tokens in enumerate((50, 333, 700)):
            options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            body = completion(words(prompt_tokens, seed=number), 10, program_id=f"demand-{number}", **options)
            response = await client.post(COMPLETIONS, json=body)
            usage = events(response.content)[-1]["usage"] if streams else response.json()["usage"]
            assert usage["prompt_tokens"] == prompt_tokens
            demand_tokens += usage["prompt_tokens"] + usage["completion_tokens"]
        known = await replicas(client, proxy.url)
        assert sum(replica["demand_tokens"] for replica in known) == demand_tokens
        assert sum(replica["acting_count"] for replica in known) == 3

        await client.post("/programs/release", json={"all": True})
        assert sum(replica["demand_tokens"] for replica in await replicas(client, proxy.url)) == 0


async def test_usage_that_was_not_asked_for_is_known_all_the_same(proxy: Server) -> None:
    """A stream without usage is also counted to the token."""
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as client:
        body = completion(words(321, seed=5), 11, program_id="silent", stream=True)
        response = await client.post(COMPLETIONS, json=body)
        assert all(chunk.get("usage") is None for chunk in events(response.content))
        program = (await client.get("/programs/silent")).json()
        await client.delete("/programs/silent")
    assert program["claim_tokens"] == 321 + 11
    assert (program["prompt_tokens_total"], program["output_tokens_total"]) == (321, 11)


async def test_the_engine_serves_by_the_priority_in_the_body(
    engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> None:
    """If the engine is full, waiting turns are served by `priority`, lower first, not by arrival.

    On a busy machine the engine may read some of the turns too late to order them, so it gets five tries.
    """
    expected = [0, 10, 20, 30, 40]
    async with run_proxy(engines[:1], "--policy", "passthrough") as proxy, httpx2.AsyncClient(timeout=60) as client:
        for _ in range(5):
            finished = await order_of_service(client, proxy.url, [30, 10, 40, 20, 0])
            if finished == expected:
                break
    assert finished == expected


async def order_of_service(client: httpx2.AsyncClient, url: str, priorities: list[int]) -> list[int]:
    """Fill the engine, send a turn with each priority, and return the priorities in the order of the answers."""
    finished: list[int] = []

    async def ask(priority: int, output_tokens: int) -> None:
        body = chat(words(20, seed=priority + 100), output_tokens, priority=priority)
        response = await client.post(f"{url}{CHAT}", json=body)
        assert response.status_code == 200, response.text
        finished.append(priority)

    async def in_flight(count: int) -> bool:
        return (await replicas(client, url))[0]["turns_in_flight_count"] == count

    async with asyncio.TaskGroup() as group:
        # Each frees its place at a different time, so that only one is free at a time. Together they almost
        # fill the pool.
        for number in range(MAX_SEQS):
            group.create_task(ask(-100, 900 + 15 * number))
        await until(lambda: in_flight(MAX_SEQS))
        await asyncio.sleep(0.5)  # the engine has them all
        for priority in priorities:
            group.create_task(ask(priority, 2))
    return [priority for priority in finished if priority >= 0]
