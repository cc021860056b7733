"""A gateway's leases: its reactions to its scheduler's messages, in the order of arrival."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from thunderagent.errors import NoReplicaError
from thunderagent.leases import FAIL_OPEN, Lease, ReplicaState, TurnAsk
from thunderagent.leases.open_lease import OpenLease
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.remote import RemoteRuntime, RemoteSettings
from thunderagent.scale.messages import Frame, Hold, Lead, Message, Refusal, RemoteReplica, Replicas

PATIENCE_S = 30.0


class Link:
    """A gateway's runtime, and a scheduler's messages to it."""

    def __init__(self, *, turns_count: int = 64) -> None:
        self.now_s = 0.0
        settings = RemoteSettings(PATIENCE_S, turns_count)
        self.runtime = RemoteRuntime(CarriedTurns("g", 1), settings, clock=lambda: self.now_s)
        self._number = 0

    def begin(self) -> None:
        self.runtime.linked()
        self._number = 0

    def say(self, *messages: Message) -> None:
        self._number += 1
        self.runtime.take(Frame(self._number, 0, 1, messages))

    def lead(self) -> None:
        self.begin()
        self.say(Lead(1), Replicas((RemoteReplica(ReplicaState("a", "http://a", True, True)),), is_whole=True))

    async def asked(self) -> asyncio.Task[OpenLease]:
        """Make a turn wait for its lease: the first one of this gateway."""
        waiting = asyncio.create_task(self.runtime.lease(TurnAsk(turn_id=1, program_id="p"), nullcontext()))
        await asyncio.sleep(0)
        return waiting


@pytest.mark.parametrize("is_held_before", [False, True])
async def test_a_turn_that_is_held_and_refused_at_once_hears_of_the_refusal(is_held_before: bool) -> None:
    """Both messages come in one frame, before their waiter runs."""
    link = Link()
    link.lead()
    waiting = await link.asked()
    if is_held_before:
        link.say(Hold(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    link.say(Hold(1), Refusal(1, "no_replica", "none is up", 7))
    with pytest.raises(NoReplicaError, match="none is up"):
        await waiting
    assert not link.runtime.held_count
    assert not link.runtime.turns.rows


async def test_no_turn_runs_without_leave_while_there_is_a_link() -> None:
    """A scheduler knows that it is held; until one reports that it leads, no other lets it run."""
    link = Link()
    link.lead()
    link.runtime.unlinked()
    waiting = await link.asked()
    link.begin()
    link.now_s = PATIENCE_S
    link.runtime.look()
    assert not link.runtime.alone.granted_count
    link.say(Lead(1), Lease(1, "p", 1, "a", "http://a", None, "fits", 0.0))
    assert (await waiting).granted.reason == "fits"


async def test_a_turn_runs_without_leave_once_a_link_ends_that_nobody_led() -> None:
    """It waited for the full time; a link that comes and goes restarts that time only if it was led."""
    link = Link()
    link.lead()
    link.runtime.unlinked()
    waiting = await link.asked()
    link.begin()
    link.now_s = PATIENCE_S
    link.runtime.unlinked()
    lease = await waiting
    assert lease.granted.reason == FAIL_OPEN
    lease.finished()
    assert not link.runtime.leases_count


async def test_waiting_turns_are_examined_only_while_there_is_room() -> None:
    """Without a scheduler thousands may wait: one that ends lets the next one run, and costs no look at each."""
    link = Link(turns_count=2)
    link.lead()
    link.runtime.unlinked()
    asks = {n: TurnAsk(turn_id=n, program_id=f"p{n}") for n in range(1, 101)}
    waiting = [asyncio.create_task(link.runtime.lease(ask)) for ask in asks.values()]
    await asyncio.sleep(0)
    asked_count = 0
    home_of = link.runtime.home_of

    def counted(program_id: str, model: str = "") -> str | None:
        nonlocal asked_count
        asked_count += 1
        return home_of(program_id, model)

    link.now_s = PATIENCE_S
    granted = list(link.runtime.alone.grants(asks, {}, counted))
    assert (len(granted), asked_count) == (2, 2)
    assert not list(link.runtime.alone.grants(asks, {}, counted))
    assert asked_count == 2
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
