"""Engines that die at work, and a proxy that gets SIGTERM."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx2
import pytest

from benchmarks.load import LoadResult, LoadSpec, TurnRecord, run_programs
from tests.real.support import CHAT, answers_503, chat, events, metrics, replicas, until, until_all_up, words

if TYPE_CHECKING:
    from benchmarks.real_engine import RealEngine
    from tests.real.conftest import RunProxy

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOAD = LoadSpec(
    programs=8,
    turns=(3, 5),
    system_tokens=60,
    first_prompt_tokens=(200, 400),
    tool_result_tokens=(50, 150),
    output_tokens=(16, 40),
    tool_mean_s=0.2,
    tries=10,
)
PROGRAMS = 20
KILLED_AFTER_TURNS = 10
STREAMED_TOKENS = 400


async def test_an_engine_that_dies_and_comes_back_costs_no_program(
    engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> None:
    """Killed with turns in flight: every program finishes on the other engine; started again, both serve."""
    enough_turns = asyncio.Event()
    turns: list[TurnRecord] = []

    def on_turn(record: TurnRecord) -> None:
        turns.append(record)
        if len(turns) == KILLED_AFTER_TURNS:
            enough_turns.set()

    async def kill_and_restart(client: httpx2.AsyncClient, url: str) -> None:
        async def has_turns() -> bool:
            return (await replicas(client, url))[1]["turns_in_flight_count"] > 0

        async def is_down() -> bool:
            return not (await replicas(client, url))[1]["up"]

        await enough_turns.wait()
        await until(has_turns)
        await engines[1].kill()
        await until(is_down)
        await engines[1].start()

    async with run_proxy(engines, "--policy", "thunderagent") as proxy, httpx2.AsyncClient(timeout=60) as client:
        async with asyncio.TaskGroup() as group:
            load = group.create_task(run_programs(LOAD, proxy.url, PROGRAMS, is_proxy=True, on_turn=on_turn))
            group.create_task(kill_and_restart(client, proxy.url))
        assert_all_finished(load.result(), PROGRAMS)

        await until_all_up(client, proxy.url)
        before = [await generated_tokens(client, engine) for engine in engines]
        assert_all_finished(await run_programs(LOAD, proxy.url, 8, is_proxy=True), 8)
        after = [await generated_tokens(client, engine) for engine in engines]
        assert all(after[place] > before[place] for place in (0, 1))
        assert (await client.get(f"{proxy.url}/programs")).json()["total"] == 0


def assert_all_finished(result: LoadResult, program_count: int) -> None:
    failed = [(record.status, record.error) for record in result.records if not record.succeeded]
    assert failed == []
    assert (result.finished_program_count, result.release_error_count) == (program_count, 0)


async def generated_tokens(client: httpx2.AsyncClient, engine: RealEngine) -> float:
    return (await metrics(client, engine.url))["vllm:generation_tokens_total"]


async def test_a_proxy_that_is_told_to_end_finishes_its_streams(
    engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> None:
    """After SIGTERM a stream goes on to its last byte, new turns get 503, and then the process ends with status 0.

    The engine pauses meanwhile: a stream that ended first would not keep the proxy alive.
    """
    body = chat(words(30, seed=3), STREAMED_TOKENS, stream=True)
    async with run_proxy(engines, "--grace-s", "300") as proxy, httpx2.AsyncClient(timeout=60) as client:
        pieces = []
        async with client.stream("POST", f"{proxy.url}{CHAT}", json=body) as response:
            relayed = response.aiter_bytes()
            pieces.append(await anext(relayed))
            served = f"http://{response.headers['X-Replica-ID']}"
            assert (await client.post(f"{served}/pause?mode=keep&clear_cache=false")).status_code == 200
            try:
                proxy.process.terminate()
                await until(lambda: answers_503(client, f"{proxy.url}/ready"))
                refused = await client.post(f"{proxy.url}{CHAT}", json=chat("w1", 1))
                assert refused.status_code == 503
            finally:
                assert (await client.post(f"{served}/resume")).status_code == 200
            pieces += [piece async for piece in relayed]
        chunks = events(b"".join(pieces))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert len(text.split()) == STREAMED_TOKENS
        assert await asyncio.wait_for(proxy.process.wait(), 60) == 0
