"""The companion systems' policies behind a proxy: turns are served, with each one's priorities and window."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.integration.support import ask, exposition, fake_replica, post, running_proxy, until

if TYPE_CHECKING:
    from tests.integration.support import Call

PRIORITIES = {"autellix": True, "continuum": True, "continuum-fixed": True, "mars": True}


def turns_of(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.method == "POST"]


@pytest.mark.parametrize("policy", ["autellix", "concur", "continuum", "continuum-fixed", "fcfs", "infercept", "mars"])
async def test_programs_are_served_and_engines_get_the_priorities_of_those_that_have_some(policy: str) -> None:
    """Programs of several turns run at once, and the replay of their events makes the same decisions."""
    async with fake_replica() as engine, running_proxy(engine.url, policy=policy) as proxy:
        for _ in range(3):
            served = await asyncio.gather(*(ask(proxy.url, f"p{number}") for number in range(4)))
            assert [answer.status for answer in served] == [200] * 4
        for number in range(4):
            await post(proxy.url, "/programs/release", {"program_id": f"p{number}"})
        carried = ["priority" in call.json() for call in turns_of(engine.calls)]
        assert carried == [PRIORITIES.get(policy, False)] * 12


async def test_the_window_is_cut_where_the_engine_says_that_it_thrashes() -> None:
    """The engine is full and misses its cache: in the end one of four programs is in; its release admits the next."""
    async with fake_replica() as engine:
        concur = {"policy": "concur", "policy_args": {"admission.first_count": "4", "admission.interval_s": "0.2"}}
        async with running_proxy(engine.url, **concur) as proxy:
            for number in range(4):
                assert (await ask(proxy.url, f"p{number}")).status == 200
            assert engine.metrics is not None
            engine.metrics = exposition(1_000_000) + 'vllm:kv_cache_usage_perc{engine="0"} 0.95\n'
            runtime = proxy.runtime
            await until(lambda: runtime.scheduler.book.admitted_count == 1)
            waiting = asyncio.ensure_future(ask(proxy.url, "p3"))
            await until(lambda: len(runtime.scheduler.queue.unadmitted.order) == 1)
            await post(proxy.url, "/programs/release", {"program_id": "p0"})
            assert (await waiting).status == 200
