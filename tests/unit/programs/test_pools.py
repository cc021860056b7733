"""Pools: which of them has a model, and which of them hear of an event."""

from __future__ import annotations

from time import process_time

import pytest

from thunderagent.programs.messages import ProgramsReleased, ReplicaUp, RouteSet, Tick, TurnAsk, TurnEnd
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.pools import Pools
from thunderagent.programs.scheduler import Scheduler


def new_scheduler() -> Scheduler:
    return Scheduler(Passthrough())


def two_pools() -> Pools:
    """Return pools of the replicas `r0` with the model `a` and `r1` with the model `b`, both up."""
    pools = Pools(new_scheduler(), new_scheduler)
    for replica_id, model in (("r0", "a"), ("r1", "b")):
        pools.listed(replica_id, (model,))
        pools.handle(ReplicaUp(1.0, replica_id, 1000))
    assert [pool.name for pool in pools.all] == ["a", "b"]
    return pools


def arrives(pools: Pools, turn_id: int, program_id: str, pool_number: int) -> None:
    pools.send(turn_id, pools.all[pool_number])
    pools.handle(TurnAsk(now_s=2.0, turn_id=turn_id, program_id=program_id, prompt_bytes=40))


def test_a_list_that_links_two_live_pools_leaves_each_its_models() -> None:
    """The replica serves the names of its own pool until one of the two has no program, and they merge."""
    pools = two_pools()
    for number in range(2):
        arrives(pools, number, f"p{number}", number)
    first, second = pools.all
    pools.listed("r0", ("a", "b"))
    pools.handle(Tick(3.0))
    assert (pools.of_model("a"), pools.of_model("b")) == (first, second)
    pools.handle(ProgramsReleased(4.0, ("p0", "p1")))
    for number in range(2):
        pools.handle(TurnEnd(now_s=4.0, turn_id=number, outcome="abandoned"))
    pools.handle(Tick(5.0))
    assert len(pools.all) == 1
    assert pools.of_model("a") is pools.of_model("b") is pools.all[0]


def test_a_name_that_goes_before_its_scheduler_heard_of_it_is_no_error() -> None:
    """No event came between the two lists."""
    pools = Pools(new_scheduler(), new_scheduler)
    for replica_id, names in (("r0", ("a", "lora")), ("r1", ("a",)), ("r0", ("a",))):
        pools.listed(replica_id, names)
    pools.handle(Tick(1.0))
    assert not pools.all[0].partly
    assert not pools.all[0].scheduler.core.routing.routes


@pytest.mark.parametrize("others", [("base",), ()])
def test_a_hundred_thousand_names_cost_as_many_looks(others: tuple[str, ...]) -> None:
    """Many adapters on one replica of a pool: each name was searched for in the list of all of them, for 30 s."""
    names = tuple(f"m{number}" for number in range(100_000))
    pools = Pools(new_scheduler(), new_scheduler)
    begun_s = process_time()
    pools.listed("r0", ("base", *names))
    pools.listed("r1", others)
    pools.handle(ReplicaUp(1.0, "r0", 1000))
    pools.listed("r0", ("base", *reversed(names)))
    pools.listed("r0", ("base",))
    pools.handle(Tick(2.0))
    assert process_time() - begun_s < 30
    assert not pools.all[0].partly


def test_programs_that_are_released_together_are_no_longer_hopeless_in_any_pool() -> None:
    """A pool may know only such programs."""
    pools = two_pools()
    refused_ids = pools.all[1].scheduler.refused_ids
    refused_ids["p"] = None
    pools.handle(ProgramsReleased(2.0, ("other", "p")))
    assert not refused_ids


def test_a_route_replaces_the_one_that_it_has_in_another_pool() -> None:
    """Its programs there go anywhere again; other routes stay."""
    pools = two_pools()
    for name, replica_id in (("c", "r1"), ("d", "r1"), ("c", "r0")):
        pools.handle(RouteSet(2.0, "class", name, ((replica_id, 1.0),)))
    routes = [[name for _, name, _ in scheduler.core.routing.routes] for scheduler in pools.schedulers]
    assert routes == [["c"], ["d"]]
