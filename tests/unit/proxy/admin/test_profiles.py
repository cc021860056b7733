"""Profiles of programs: the parts of a turn's time, means over turns, and nothing of programs that ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from thunderagent.errors import NotFoundError, RequestError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    Event,
    ProgramReleased,
    ReplicaPolled,
    ReplicaUp,
    TurnAsk,
    TurnEnd,
    TurnStarted,
)
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.admin.profiles import Profiles
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.runtime import Runtime

if TYPE_CHECKING:
    from aiohttp import web


class World:
    """A runtime with one replica that lets in one program at a time, and its profiles."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.now_s = 0.0
        self.runtime = Runtime(Scheduler(load_policy("cap", {"n": 1})), clock=lambda: self.now_s)
        self.profiles = Profiles(self.runtime, Tenancy(self.runtime, from_key=False), is_on=is_on)
        self.tell(ReplicaPolled(0.0, "r0", 1000), ReplicaUp(0.0, "r0"))

    def tell(self, *events: Event) -> None:
        for event in events:
            self.now_s = max(self.now_s, event.now_s)
            self.runtime.dispatch(event)

    async def all(self) -> dict[str, Any]:
        answer = await self.profiles.all(cast("web.Request", None))
        return cast("dict[str, Any]", json.loads(cast("bytes", answer.body)))

    async def one(self, program_id: str) -> dict[str, Any]:
        class Request:
            match_info = {"program_id": program_id}  # noqa: RUF012 - a request's

        answer = await self.profiles.one(cast("web.Request", Request()))
        return cast("dict[str, Any]", json.loads(cast("bytes", answer.body)))


async def test_the_parts_of_a_program_are_means_over_its_turns() -> None:
    world = World()
    world.tell(
        TurnAsk(now_s=1.0, turn_id=1, program_id="other"),
        TurnAsk(now_s=2.0, turn_id=2, program_id="p"),  # waits until the other has ended
        TurnEnd(now_s=4.0, turn_id=1, prompt_tokens=10, output_tokens=1),
        ProgramReleased(5.0, "other"),
        TurnStarted(7.0, 2),
        TurnEnd(now_s=11.0, turn_id=2, prompt_tokens=100, output_tokens=10, cached_tokens=40),
        TurnAsk(now_s=17.0, turn_id=3, program_id="p"),
        TurnStarted(18.0, 3),
        TurnEnd(now_s=20.0, turn_id=3, prompt_tokens=200, output_tokens=30, cached_tokens=180),
    )
    assert await world.one("p") == {
        "step_count": 2,
        "avg_prefill_s": 1.5,
        "avg_decode_s": 3.0,
        "avg_pause_s": 1.5,
        "avg_tool_call_s": 6.0,
        "avg_prompt_tokens": 150.0,
        "avg_completion_tokens": 20.0,
        "avg_cached_tokens": 110.0,
        "avg_kv_hit_rate": 0.65,
    }
    assert list(await world.all()) == ["p"]


async def test_turns_that_did_not_finish_count_for_nothing_and_leave_nothing() -> None:
    world = World()
    world.tell(
        TurnAsk(now_s=1.0, turn_id=1, program_id="p"),
        TurnEnd(now_s=2.0, turn_id=1, outcome="failed"),
        TurnAsk(now_s=2.0, turn_id=2, program_id="p"),
        TurnEnd(now_s=3.0, turn_id=2, outcome="abandoned"),
        TurnAsk(now_s=4.0, turn_id=3, program_id="p"),
        TurnEnd(now_s=5.0, turn_id=3),  # no usage, no stream
        TurnAsk(now_s=6.0, turn_id=4, program_id=None),
        TurnEnd(now_s=7.0, turn_id=4),
    )
    profile = await world.one("p")
    assert (profile["step_count"], profile["avg_prefill_s"], profile["avg_kv_hit_rate"]) == (1, 1.0, None)
    world.tell(TurnAsk(now_s=8.0, turn_id=5, program_id="p"), ProgramReleased(9.0, "p"), TurnEnd(now_s=10.0, turn_id=5))
    assert await world.all() == {}
    with pytest.raises(NotFoundError):
        await world.one("p")


async def test_off_it_says_how_to_turn_it_on() -> None:
    world = World(is_on=False)
    world.tell(TurnAsk(now_s=1.0, turn_id=1, program_id="p"), TurnEnd(now_s=2.0, turn_id=1))
    with pytest.raises(RequestError, match="--profiles true"):
        await world.all()
    with pytest.raises(RequestError, match="--profiles true"):
        await world.one("p")
