"""Messages between carriers of bytes and granters of leases: as bytes, as pushed, and with each lease."""

from __future__ import annotations

import msgspec
import pytest

from tests.builders import asked
from thunderagent.leases import Lease, ReplicaMap, ReplicaState, TurnAsk, TurnEnd
from thunderagent.leases.open_lease import LeaseSource, OpenLease
from thunderagent.programs.messages import ReplicaPolled, TurnProgressed, TurnStarted, TurnUnverified
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime import Runtime

ASK = TurnAsk(turn_id=7, program_id="p", prefix=((1, 20), (2, 40)), media=(("m/image/1", 256),), patience_s=2.5)
LEASE = Lease(7, "p", 3, "r0", "http://r0", -1, "patience", 0.25)
END = TurnEnd(7, "p", 3, "finished", 100, 20, 80, "bash:ls")


class Keeper:
    """Records its events."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def now_s(self) -> float:
        return 100.0

    def dispatch(self, event: object) -> None:
        self.heard.append(event)

    def ended(self, end: TurnEnd) -> None:
        self.heard.append(end)


def runtime_of(*replica_ids: str) -> Runtime:
    runtime = Runtime(Scheduler(Cap(n=9)), clock=lambda: 100.0)
    for replica_id in replica_ids:
        runtime.replica_at(replica_id, f"http://{replica_id}")
        runtime.replica_up(replica_id, 1000)
    return runtime


@pytest.mark.parametrize("message", [ASK, LEASE, END])
def test_message_can_be_sent(message: TurnAsk | Lease | TurnEnd) -> None:
    """It is an array that begins with its kind, and may have more at its end than a reader knows."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert fields[0] == {TurnAsk: "acquire", Lease: "grant", TurnEnd: "end"}[type(message)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([*fields, "later"]), type=type(message)) == message


def test_the_first_word_on_a_lease_is_the_last() -> None:
    """The keeper of leases gets one end of each, with the data that identifies program and incarnation."""
    keeper = Keeper()
    with OpenLease(keeper, LEASE) as lease:
        lease.unverified()
        lease.started()
        lease.progressed(5)
        lease.finished(100, 20, 80, "bash:ls")
        lease.refused()
    assert keeper.heard == [TurnUnverified(100.0, 7), TurnStarted(100.0, 7), TurnProgressed(100.0, 7, 5), END]
    with OpenLease(keeper, LEASE):
        pass
    assert keeper.heard[-1] == TurnEnd(7, "p", 3, "abandoned")


async def test_a_lease_says_where_and_which_incarnation() -> None:
    """No look-up is needed after the grant."""
    runtime: LeaseSource = runtime_of("r0")
    for generation in (1, 2):
        lease = await runtime.lease(asked(runtime, "p"))
        assert (lease.granted.url, lease.granted.generation) == ("http://r0", generation)
        assert runtime.lives("p", generation)
        lease.finished(10, 5, 0)
        assert runtime.release("p", generation)
        assert not runtime.lives("p", generation)
    with await runtime.lease(asked(runtime, None)) as lease:
        assert (lease.granted.program_id, lease.granted.generation) == (None, 0)


async def test_a_program_that_was_opened_again_is_another() -> None:
    """The end of its earlier incarnation does not end it."""
    runtime = runtime_of("r0")
    first = await runtime.lease(asked(runtime, "p"))
    runtime.release("p")
    second = await runtime.lease(asked(runtime, "p"))
    assert not runtime.lives("p", first.granted.generation)
    assert not runtime.release("p", first.granted.generation)
    assert runtime.lives("p", second.granted.generation)
    first.finished()
    second.finished()


def test_the_map_has_what_the_scheduler_decided_on_replicas() -> None:
    """It is updated after each event, without a request; removed replicas are gone."""
    runtime = runtime_of("a", "b", "c")
    states, replicas = runtime.replicas.states, runtime.replicas
    assert states["a"] == ReplicaState("a", "http://a", is_up=True, is_open=True, capacity_tokens=1000, verdict="up")
    assert replicas.open_ids == ("a", "b", "c")
    runtime.replica_draining("a")
    runtime.replica_tripped("b", tripped=True)
    assert (replicas.open_ids, replicas.is_up("a"), replicas.is_up("b")) == (("c",), True, True)
    runtime.suspend_grants("sync")
    runtime.suspend_grants("pause", "c")
    assert [state.suspended_for for state in states.values()] == [("sync",), ("sync",), ("sync", "pause")]
    runtime.continue_grants("sync")
    assert [state.suspended_for for state in states.values()] == [(), (), ("pause",)]
    runtime.dispatch(ReplicaPolled(runtime.now_s(), "c", 2000))
    assert states["c"].capacity_tokens == 2000
    runtime.replica_down("c")
    assert (replicas.open_ids, replicas.is_up("c")) == ((), False)
    runtime.replica_removed("b")
    assert (replicas.get("b"), replicas.is_up("b"), replicas.is_up(None)) == (None, False, False)
    assert repr(replicas) == "<ReplicaMap: 2 replicas, 0 open>"


def test_the_map_has_the_replicas_in_their_order() -> None:
    """A replica that comes back keeps its place; a removed one gets a new place."""
    replicas = ReplicaMap()
    replicas.push([ReplicaState(name, is_open=True) for name in ("a", "b", "c")])
    replicas.push([ReplicaState("a")])
    replicas.push([ReplicaState("a", is_open=True)])
    assert replicas.open_ids == ("a", "b", "c")
    replicas.push((), ["a", "x"])
    replicas.push([ReplicaState("a", is_open=True)])
    assert replicas.open_ids == ("b", "c", "a")


async def test_questions_about_programs_are_answered_from_the_table() -> None:
    """It knows a program's place and tenant, and how busy a replica is."""
    runtime = runtime_of("a")
    lease = await runtime.lease(asked(runtime, "p", tenant="blue"))
    assert (runtime.home_of("p"), runtime.home_of("q")) == ("a", None)
    assert (runtime.tenant_of("p"), runtime.tenant_of("q")) == ("blue", None)
    assert (runtime.turns_count("a"), runtime.turns_count("x")) == (1, 0)
    runtime.replica_down("a")
    assert runtime.home_of("p") is None
    lease.failed()
