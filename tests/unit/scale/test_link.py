"""How links yield to others."""

from __future__ import annotations

import asyncio
import time

from thunderagent.scale.scheduler.link import GIVE_WAY_S, GivesWay


async def test_no_turn_of_the_loop_takes_in_all_that_comes_at_once() -> None:
    """Of a dozen that each take the allowed time, one is done in each turn; of those that take none, all are."""
    gives_way, turns_count, in_turns = GivesWay(), 0, list[int]()

    async def one(takes_s: float) -> None:
        async with gives_way:
            in_turns.append(turns_count)
            until_s = time.perf_counter() + takes_s
            while time.perf_counter() < until_s:
                pass

    async def count_turns() -> None:
        nonlocal turns_count
        while True:
            await asyncio.sleep(0)
            turns_count += 1

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(one(0.0) for _ in range(12)))
    assert len(set(in_turns)) <= 2  # the system may stop this process once meanwhile
    in_turns.clear()
    await asyncio.gather(*(one(GIVE_WAY_S) for _ in range(12)))
    assert len(set(in_turns)) == 12
    counting.cancel()
