"""The replicas of a gateway: its reports of them, and the targets of turns without a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import NoReplicaError, ThunderAgentError, UnknownModelError
from thunderagent.leases import ReplicaState, TurnAsk
from thunderagent.programs.messages import (
    Decision,
    Event,
    Release,
    ReplicaDown,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaUp,
)
from thunderagent.proxy.fleet.known import KnownReplica
from thunderagent.scale.gateway.fleet import RemoteFleet
from thunderagent.scale.gateway.remote import error_of
from thunderagent.scale.messages import Refusal, RemoteReplica, Replicas
from thunderagent.scaling import _Fleet


def replica(name: str, *, up: bool = True, is_open: bool = True, models: tuple[str, ...] = ()) -> RemoteReplica:
    return RemoteReplica(ReplicaState(name, f"http://{name}", up, up and is_open), "vllm", None, models)


def fleet_of(*replicas: RemoteReplica, has_pools: bool = False) -> RemoteFleet:
    fleet = RemoteFleet(lambda: 1.0)
    fleet.take(Replicas(replicas, has_pools=has_pools, is_whole=True))
    return fleet


def test_a_replica_whose_url_changed_is_called_at_the_new_one() -> None:
    """Its id has neither a scheme nor a login."""
    known: dict[str, KnownReplica] = {}
    here: Any = SimpleNamespace(
        known=known, add=lambda each: known.setdefault(each.replica_id, KnownReplica(each)), came_up=lambda _: None
    )
    fleet = _Fleet(here, asyncio.TaskGroup())
    for url in ("http://a", "https://a"):
        state = ReplicaState("a", url, is_up=True, is_open=True)
        fleet.take((RemoteReplica(state, "vllm"),), (), ())
        assert known["a"].endpoint.url == url


def test_a_gateway_knows_when_a_trainer_aborted_what_runs_on_a_replica() -> None:
    """A count that was there before says nothing of the turns that run now; a new one does."""
    now_s = 1.0
    fleet = RemoteFleet(lambda: now_s)

    def told(aborts_count: int, *, up: bool = True) -> dict[str, float]:
        state = ReplicaState("a", "http://a", is_up=up, is_open=up, aborts_count=aborts_count)
        fleet.take(Replicas((RemoteReplica(state),)))
        return fleet.aborted_s

    assert told(3) == {}
    now_s = 2.0
    assert told(3, up=False) == {}
    assert told(4) == {"a": 2.0}
    now_s = 3.0
    assert told(4, up=False) == {"a": 2.0}
    fleet.take(Replicas((), ("a",)))
    assert fleet.aborted_s == {}


def test_a_gateway_hears_once_that_what_runs_on_a_replica_that_is_down_is_lost() -> None:
    """It gives up its connections then."""
    fleet, heard = RemoteFleet(lambda: 1.0), []
    fleet.observe(lambda event, _: heard.append(type(event)), ReplicaDown)

    def told(incarnation: int, *, up: bool) -> int:
        heard.clear()
        fleet.take(Replicas((RemoteReplica(ReplicaState("a", is_up=up, is_open=up, incarnation=incarnation)),)))
        return len(heard)

    assert [told(0, up=True), told(0, up=False), told(0, up=False)] == [0, 1, 0]
    assert [told(1, up=False), told(1, up=False), told(1, up=True)] == [1, 0, 0]


class Known:
    """A proxy's replicas, and which of them began anew."""

    def __init__(self) -> None:
        self.known: dict[str, KnownReplica] = {}
        self.came_up_ids: list[str] = []
        self.came_up = self.came_up_ids.append

    def add(self, endpoint: ReplicaEndpoint) -> KnownReplica:
        known = self.known[endpoint.replica_id] = KnownReplica(endpoint)
        return known

    async def remove(self, replica_id: str) -> None:
        self.known.pop(replica_id, None)


async def test_a_replica_that_is_removed_and_up_again_in_one_frame_stays() -> None:
    """It was restarted with another model; a later removal counts."""
    here: Any = Known()
    async with asyncio.TaskGroup() as group:
        fleet = _Fleet(here, group)
        fleet.take((replica("a"),), (), ())
        fleet.take((), ("a",), ())
        fleet.take((replica("a", models=("m",)),), (), ())
    assert (list(here.known), here.came_up_ids) == (["a"], ["a", "a"])
    async with asyncio.TaskGroup() as group:
        fleet = _Fleet(here, group)
        fleet.take((replica("a"),), (), ())
        fleet.take((), ("a",), ())
    assert not here.known


def test_an_engine_of_a_kind_that_only_its_scheduler_knows_is_detected() -> None:
    """A scheduler may be newer than its gateways."""
    here: Any = Known()
    fleet, state = _Fleet(here, asyncio.TaskGroup()), ReplicaState("a", "http://a", is_up=True)
    fleet.take((RemoteReplica(state, "of_tomorrow"),), (), ())
    endpoint = here.known["a"].endpoint
    fleet.take((RemoteReplica(state, "of_tomorrow"),), (), ())
    assert endpoint.backend.kind == "auto"
    assert here.known["a"].endpoint is endpoint


def test_replica_changes_are_sent_as_the_events_of_the_core() -> None:
    """Events go to the concerned parts; a full list removes replicas that it does not name."""
    fleet, heard = fleet_of(replica("a"), replica("b")), list[type]()

    def observer(event: Event, decisions: Sequence[Decision]) -> None:
        heard.extend(map(type, [event, *decisions]))

    stop = fleet.observe(observer, ReplicaUp, ReplicaDown, ReplicaDraining, ReplicaRemoved, Release)
    fleet.take(Replicas((replica("a", up=False),)))
    fleet.take(Replicas((replica("b", is_open=False),)))
    fleet.take(Replicas((replica("a", up=False), replica("c")), is_whole=True))
    fleet.program_gone("p", 3)
    stop()
    fleet.take(Replicas((), ("c",)))
    assert [kind.__name__ for kind in heard] == [
        "ReplicaDown",
        "ReplicaDraining",
        "ReplicaUp",
        "ReplicaRemoved",
        "ProgramReleased",
        "Release",
    ]
    assert list(fleet.replicas.states) == ["a"]


def test_without_leave_a_turn_runs_where_its_program_was_else_where_its_name_leads() -> None:
    """The same name gives the same replica, and names are spread."""
    fleet = fleet_of(*map(replica, "abc"))
    ask = TurnAsk(turn_id=1, program_id="p")
    assert fleet.where(ask, "b", lambda _: True) == "b"
    chosen = [fleet.where(TurnAsk(turn_id=1, program_id=f"p{n}"), None, lambda _: True) for n in range(60)]
    assert chosen == [fleet.where(TurnAsk(turn_id=2, program_id=f"p{n}"), None, lambda _: True) for n in range(60)]
    assert all(chosen.count(name) > 8 for name in "abc")
    assert fleet.where(ask, "b", lambda each: each != "b") in ("a", "c")
    assert fleet.where(ask, "b", lambda _: False) is None


def test_without_leave_a_turn_avoids_what_it_must() -> None:
    """It avoids a replica that just failed it, is tripped, is down, or does not serve its model."""
    fleet = fleet_of(
        replica("a", models=("m",)), replica("b", models=("n",)), replica("c", up=False, models=("m",)), has_pools=True
    )
    assert fleet.where(TurnAsk(turn_id=1, model="m"), "b", lambda _: True) == "a"
    assert fleet.where(TurnAsk(turn_id=1, avoid_replica_id="a"), "a", lambda _: True) == "b"
    assert fleet.where(TurnAsk(turn_id=1, pinned_replica_id="c"), None, lambda _: True) is None
    assert fleet.where(TurnAsk(turn_id=1, wanted_replica_id="a"), "b", lambda _: True) == "a"
    fleet.tripped_ids.add("a")
    assert fleet.where(TurnAsk(turn_id=1), "a", lambda _: True) == "b"
    assert fleet.where(TurnAsk(turn_id=1, model="m"), "a", lambda _: True) == "a"  # no other one serves it
    assert list(fleet.ids_serving("n")) == ["b"]
    with pytest.raises(UnknownModelError):
        fleet.ids_serving("o")


def test_a_replica_that_went_down_or_is_gone_is_tripped_no_more() -> None:
    """A replacement has not failed yet, and no scheduler is told that it did."""
    fleet = fleet_of(*map(replica, "abc"))
    fleet.tripped_ids.update("abc")
    fleet.take(Replicas((replica("a", up=False), replica("b")), ("c",)))
    assert fleet.tripped_ids == {"b"}


def test_a_refusal_is_the_error_that_it_was() -> None:
    """It keeps its status and retry time; an unknown code gives the root class."""
    error = error_of(Refusal(1, "no_replica", "none is up", 7))
    assert isinstance(error, NoReplicaError)
    assert (error.status, error.message, error.retry_after_s) == (503, "none is up", 7)
    assert type(error_of(Refusal(1, "of_tomorrow", "x"))) is ThunderAgentError
