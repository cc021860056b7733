"""A client that leaves stops its request in the engine, according to the engine's own counters."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.real.support import CHAT, chat, metrics, replicas, until, words

if TYPE_CHECKING:
    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTPUT_TOKENS = 3500  # some 12 s
LONG = chat(words(50, seed=9), OUTPUT_TOKENS, program_id="leaver")
# Part of the requested tokens that may still be generated: mostly almost nothing, but on a busy machine with two cores
# the engine's own server sometimes notices a closed connection seconds later. So it gets some tries.
SOON_RATIO = 0.75
TRIES = 3
LATE = "the engine never stopped soon"


async def generated_tokens(client: httpx2.AsyncClient, engine: RealEngine) -> float:
    return (await metrics(client, engine.url))["vllm:generation_tokens_total"]


async def stopped_soon(
    client: httpx2.AsyncClient, engine: RealEngine, proxy: Server, began_tokens: float, *, leavers: int = 1
) -> bool:
    """Check that the engine frees its memory and generates no more, and that the lease is returned.

    Return whether it stopped soon.
    """

    async def engine_is_idle() -> bool:
        values = await metrics(client, engine.url)
        return values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"] == 0

    async def proxy_is_idle() -> bool:
        return all(replica["turns_in_flight_count"] == 0 for replica in await replicas(client, proxy.url))

    # Measured in tokens, not in time: on a busy machine the engine's metrics themselves may be late.
    await until(engine_is_idle, within_s=60)
    await until(proxy_is_idle)
    ended_tokens = await generated_tokens(client, engine)
    await asyncio.sleep(0.3)
    assert await generated_tokens(client, engine) == ended_tokens
    return ended_tokens - began_tokens < SOON_RATIO * OUTPUT_TOKENS * leavers


async def is_running(client: httpx2.AsyncClient, engine: RealEngine, asking: asyncio.Task[Any]) -> bool:
    """Return whether a request is in the engine, or already answered."""
    return asking.done() or (await metrics(client, engine.url))["vllm:num_requests_running"] == 1


async def test_leaving_a_stream_stops_the_engine(engine: RealEngine, proxy_of_one: Server) -> None:
    """Closed after some events, in the middle of decoding."""
    async with httpx2.AsyncClient(timeout=60) as client:
        for _ in range(TRIES):
            began_tokens = await generated_tokens(client, engine)
            async with client.stream("POST", f"{proxy_of_one.url}{CHAT}", json={**LONG, "stream": True}) as response:
                lines = response.aiter_lines()
                for _ in range(40):
                    await anext(lines)
            if await stopped_soon(client, engine, proxy_of_one, began_tokens):
                return
    pytest.fail(LATE)


async def test_leaving_before_a_whole_answer_stops_the_engine(engine: RealEngine, proxy_of_one: Server) -> None:
    """Closed before any byte of the answer."""
    async with httpx2.AsyncClient(timeout=60) as client:
        for _ in range(TRIES):
            began_tokens = await generated_tokens(client, engine)
            asking = asyncio.create_task(client.post(f"{proxy_of_one.url}{CHAT}", json=LONG))
            await until(partial(is_running, client, engine, asking))
            asking.cancel()  # at once: a busy engine may take as long for its metrics as for the rest of the answer
            await asyncio.wait([asking])
            if await stopped_soon(client, engine, proxy_of_one, began_tokens):
                return
    pytest.fail(LATE)


async def test_many_that_leave_at_once_leave_nothing(engine: RealEngine, proxy_of_one: Server) -> None:
    """More clients than the engine has places: running and waiting requests all end."""
    async with httpx2.AsyncClient(timeout=60) as client:
        bodies = [{**LONG, "program_id": f"leaver-{number}", "stream": number % 2 == 0} for number in range(12)]
        asking = [asyncio.create_task(client.post(f"{proxy_of_one.url}{CHAT}", json=body)) for body in bodies]

        async def all_are_there() -> bool:
            values = await metrics(client, engine.url)
            return values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"] == len(bodies)

        await until(all_are_there, within_s=30)
        began_tokens = await generated_tokens(client, engine)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert await stopped_soon(client, engine, proxy_of_one, began_tokens, leavers=len(bodies))
        await client.post(f"{proxy_of_one.url}/programs/release", json={"all": True})
        assert (await client.get(f"{proxy_of_one.url}/programs")).json()["total"] == 0
