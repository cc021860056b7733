"""Profiles of programs: the parts of a turn's time, means over turns, and nothing of programs that ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from thunderagent.errors import NotFoundError, RequestError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.model.events import (
    Event,
    ProgramReleased,
    TurnAbandoned,
    TurnArrived,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from thunderagent.programs.model.fleet_events import ReplicaPolled, ReplicaUp
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
        TurnArrived(1.0, 1, "other"),
        TurnArrived(2.0, 2, "p"),  # waits until the other has ended
        TurnFinished(4.0, 1, 10, 1),
        ProgramReleased(5.0, "other"),
        TurnStarted(7.0, 2),
        TurnFinished(11.0, 2, 100, 10, 40),
        TurnArrived(17.0, 3, "p"),
        TurnStarted(18.0, 3),
        TurnFinished(20.0, 3, 200, 30, 180),
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
        TurnArrived(1.0, 1, "p"),
        TurnFailed(2.0, 1),
        TurnArrived(2.0, 2, "p"),
        TurnAbandoned(3.0, 2),
        TurnArrived(4.0, 3, "p"),
        TurnFinished(5.0, 3),  # no usage, no stream
        TurnArrived(6.0, 4, None),
        TurnFinished(7.0, 4),
    )
    profile = await world.one("p")
    assert (profile["step_count"], profile["avg_prefill_s"], profile["avg_kv_hit_rate"]) == (1, 1.0, None)
    world.tell(TurnArrived(8.0, 5, "p"), ProgramReleased(9.0, "p"), TurnFinished(10.0, 5))
    assert await world.all() == {}
    with pytest.raises(NotFoundError):
        await world.one("p")


async def test_off_it_says_how_to_turn_it_on() -> None:
    world = World(is_on=False)
    world.tell(TurnArrived(1.0, 1, "p"), TurnFinished(2.0, 1))
    with pytest.raises(RequestError, match="--profiles true"):
        await world.all()
    with pytest.raises(RequestError, match="--profiles true"):
        await world.one("p")
