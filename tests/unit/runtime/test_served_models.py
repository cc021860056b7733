"""The models of replicas, without a proxy: when replicas are asked again, and how long a turn waits for that."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from thunderagent.errors import UnknownModelError
from thunderagent.leases import ReplicaMap, ReplicaState, TurnAsk
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.pools import Pools
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime.served_models import ASK_EVERY_S, ServedModels


class World:
    """A replica `r` that lists the model `a`, a stopped clock, and the replicas that were asked again."""

    def __init__(self, *, refuses_others: bool = True, pools: bool = True) -> None:
        self.now_s = 100.0
        self.asked: list[str] = []
        replicas = ReplicaMap()
        replicas.push([ReplicaState("r", is_up=True)])
        self.served = ServedModels(
            Pools(Scheduler(Passthrough()), (lambda: Scheduler(Passthrough())) if pools else None),
            replicas,
            state_of=ReplicaState,
            clock=lambda: self.now_s,
            no_replica_limit_s=60.0,
        )
        self.served.ask_anew = self.asked.extend
        self.served.replica_known("r")
        self.lists("a", refuses_others=refuses_others)
        self.served.replica_heard("r")

    def lists(self, *models: str, refuses_others: bool = True) -> None:
        self.served.listed("r", models, refuses_others=refuses_others, asked_s=self.now_s)

    async def find(self, model: str, patience_s: float | None = None) -> None:
        await self.served.find_pool(TurnAsk(turn_id=1, model=model, patience_s=patience_s), nullcontext())

    def finding(self, model: str, patience_s: float | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.find(model, patience_s))


async def test_a_model_that_is_listed_and_none_need_no_look() -> None:
    world = World()
    assert world.served.is_plain("a")
    assert world.served.is_plain("")
    assert not world.served.is_plain("b")
    await world.find("a")
    assert world.asked == []


async def test_an_unknown_model_waits_for_one_answer_of_each_replica() -> None:
    """Turns that come meanwhile wait for the same answer; an answer to an earlier question does not count."""
    world = World()
    finding = [world.finding("b") for _ in range(3)]
    await asyncio.sleep(0)
    assert world.asked == ["r"]
    world.served.listed("r", ("a",), refuses_others=True, asked_s=world.now_s - 1)
    await asyncio.sleep(0)
    assert not any(each.done() for each in finding)
    world.lists("a")
    with pytest.raises(UnknownModelError):
        await finding[0]
    assert {type(each) for each in await asyncio.gather(*finding, return_exceptions=True)} == {UnknownModelError}
    with pytest.raises(UnknownModelError):
        await world.find("b")  # at once
    world.now_s += ASK_EVERY_S
    again = world.finding("b")
    await asyncio.sleep(0)
    assert world.asked == ["r", "r"]
    world.lists("a", "b")
    await again


async def test_a_pool_is_remembered_only_for_a_turn_that_is_sent_there() -> None:
    """Not with a single pool, and not for a turn whose replica is known: nobody would ask, and it would stay."""
    world = World()
    finding = world.finding("b")
    await asyncio.sleep(0)
    world.lists("a", "b")
    await finding
    world.served.listed("q", ("c",))
    assert world.served.pools.several
    for turn_id, replica_id in ((2, "q"), (3, None)):
        ask = TurnAsk(turn_id=turn_id, model="c", pinned_replica_id=replica_id)
        await world.served.find_pool(ask, nullcontext())
    assert list(world.served.pools._to_come) == [3]


async def test_model_loaded_just_after_the_question_is_found() -> None:
    """A turn that comes too early for another question waits until it is allowed."""
    world = World()
    before = world.finding("b")
    await asyncio.sleep(0)
    world.lists("a")
    with pytest.raises(UnknownModelError):
        await before
    world.now_s += 0.99 * ASK_EVERY_S
    finding = world.finding("b")
    await asyncio.sleep(0)
    assert world.asked == ["r"]
    world.now_s += 0.01 * ASK_EVERY_S
    async with asyncio.timeout(10):
        while len(world.asked) < 2:
            assert not finding.done()
            await asyncio.sleep(0.001)
    world.lists("a", "b")
    await finding


async def test_a_client_without_patience_waits_for_no_answer() -> None:
    """This holds even for a replica that never came up, for which others wait."""
    world = World()
    world.served.listed("q", ("c",))
    world.served.replica_known("s")
    with pytest.raises(UnknownModelError):
        await asyncio.wait_for(world.find("b", patience_s=0.0), 5)


async def test_a_replica_that_is_removed_is_not_waited_for() -> None:
    world = World()
    world.served.listed("q", ("a",), refuses_others=True)
    finding = world.finding("b")
    await asyncio.sleep(0)
    world.served.forget("r")
    with pytest.raises(UnknownModelError):
        await finding


async def test_unknown_model_is_refused_at_once_where_nobody_asks() -> None:
    world = World()
    world.served.ask_anew = None
    with pytest.raises(UnknownModelError):
        await world.find("b")


@pytest.mark.parametrize(("refuses_others", "pools"), [(False, True), (True, False)])
async def test_an_engine_that_takes_any_name_is_asked_nothing(*, refuses_others: bool, pools: bool) -> None:
    """Its kind shows that, or an operator says so of an engine that loads adapters by name."""
    world = World(refuses_others=refuses_others, pools=pools)
    await world.find("b")
    assert world.asked == []


async def test_a_replica_that_never_came_up_may_serve_it() -> None:
    """With one pool its engines decide, as long as one of them has not reported."""
    world = World()
    world.served.replica_known("q")
    await world.find("b")
    world.served.listed("q", ("a",), refuses_others=True)
    world.served.ask_anew = None
    with pytest.raises(UnknownModelError):
        await world.find("b")
