"""Compare the figures from a real engine's KV events with the usage of the programs' turns."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.integration.support import until
from tests.real.support import CHAT, conversation, words
from thunderagent.backends.kv_events import KvEvents, KvEventsEndpoint, KvEventsSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK_TOKENS = 32
SYSTEM = {"role": "system", "content": words(200, seed=900)}
# The last block is not full, and the last token's keys and values are never computed.
UNSEEN_TOKENS = BLOCK_TOKENS
SETTLED_S = 20.0


@dataclass
class Residency:
    """A listener that keeps the last figure of each program."""

    figures: dict[str, int] = field(default_factory=dict)

    def residency_reported(self, replica_id: str, resident_tokens: tuple[tuple[str, int], ...]) -> None:
        self.figures.update(resident_tokens)

    async def settled(self, *programs: Program) -> dict[str, int]:
        """Wait for a report, on a busy machine until these programs are in it, and return the figures."""
        await asyncio.sleep(1.0)
        with suppress(TimeoutError):
            await until(lambda: all(each.lies_there(self.figures) for each in programs), within_s=SETTLED_S)
        return dict(self.figures)


@dataclass
class Program:
    """A conversation under a program's id; `total_tokens` is from the usage of its last turn."""

    program_id: str
    engine: RealEngine
    client: httpx2.AsyncClient
    messages: list[dict[str, str]] = field(default_factory=lambda: [SYSTEM])
    total_tokens: int = 0
    cached_tokens: int = 0

    async def turn(self, prompt_tokens: int, output_tokens: int) -> None:
        seed = hash_free_seed(self.program_id, len(self.messages))
        self.messages.append({"role": "user", "content": words(prompt_tokens, seed)})
        body = conversation(self.messages, output_tokens)
        headers = {"X-Session-ID": self.program_id.encode()}
        answer = (await self.client.post(f"{self.engine.url}{CHAT}", json=body, headers=headers)).json()
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        self.total_tokens = answer["usage"]["total_tokens"]
        self.cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def lies_there(self, figures: dict[str, int]) -> bool:
        """Return whether it is fully in memory, except the part that events cannot report."""
        return 0 <= self.total_tokens - figures.get(self.program_id, 0) <= UNSEEN_TOKENS


def hash_free_seed(program_id: str, turn: int) -> int:
    """Return a seed for hashes that is the same in every run."""
    return int.from_bytes(program_id.encode(), "big") * 100 + turn


@asynccontextmanager
async def following(endpoint: KvEventsEndpoint) -> AsyncIterator[Residency]:
    residency = Residency()
    task = asyncio.create_task(KvEvents(residency, [endpoint], KvEventsSettings()).run())
    try:
        yield residency
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_resident_blocks_match_the_reported_usage_through_pressure_and_a_restart(
    publishing: tuple[RealEngine, KvEventsEndpoint],
) -> None:
    """Two programs grow; one is evicted, tail first; a late subscriber agrees; a new engine is empty."""
    engine, endpoint = publishing
    await engine.reset_prefix_cache()
    async with httpx2.AsyncClient(timeout=60) as client, following(endpoint) as residency:
        await asyncio.sleep(0.5)
        first, second, crowd = (Program(name, engine, client) for name in ("first", "zwölf/2", "crowd"))
        for _ in range(3):
            await first.turn(150, 40)
            await second.turn(250, 60)
            assert_agrees(await residency.settled(first, second), first, second)

        # The crowd needs more than is free: the tail of `first` is evicted, whose last turn is the oldest.
        await second.turn(20, 40)
        await crowd.turn(3600, 60)
        figures = await residency.settled(crowd)
        print("after pressure:", figures, first.total_tokens, second.total_tokens, crowd.total_tokens)
        assert_agrees(figures, crowd)
        assert figures["first"] < first.total_tokens - 5 * BLOCK_TOKENS
        async with following(endpoint) as late:
            await second.turn(20, 40)
            assert_agrees(await residency.settled(second), second)
            while not late.figures:  # that turn was over before it had connected: the next one's events bring it all
                await second.turn(20, 40)
                await residency.settled(second)

            def lying() -> dict[str, int]:
                return {name: tokens for name, tokens in residency.figures.items() if tokens}

            with suppress(TimeoutError):
                await until(lambda: late.figures == lying(), within_s=SETTLED_S)
            assert late.figures == lying()
        left_tokens = residency.figures["first"]
        await first.turn(10, 4)
        print(f"first: {left_tokens} were said to lie there, {first.cached_tokens} were hit")
        assert first.cached_tokens == left_tokens

        await engine.kill()
        await engine.start()
        third = Program("third", engine, client)
        await third.turn(100, 40)
        figures = await residency.settled(third)
        assert_agrees(figures, third)
        assert {name for name, tokens in figures.items() if tokens} == {"third"}


def assert_agrees(figures: dict[str, int], *programs: Program) -> None:
    for program in programs:
        tokens = figures.get(program.program_id, 0)
        print(f"{program.program_id}: {tokens} of {program.total_tokens} tokens lie there")
        assert program.lies_there(figures), (program, figures)
