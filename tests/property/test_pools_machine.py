"""Pools under any order of events: each scheduler's books are right, and no turn is in a pool without its model."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from thunderagent.policy_loader import load_policy
from thunderagent.programs import invariants
from thunderagent.programs.messages import (
    Decision,
    Event,
    Grant,
    GrantsContinued,
    GrantsSuspended,
    ModelAsked,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    Reject,
    Release,
    ReplicaDown,
    ReplicaRemoved,
    ReplicaUp,
    SchedulerSettings,
    Tick,
    ToolStarted,
    TurnAsk,
    TurnEnd,
)
from thunderagent.programs.pools import Pools
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime.event_log import EventLogWriter, replay

SETTINGS = SchedulerSettings(max_programs_count=6, tenant_max_programs_count=4, forget_limit_s=60.0)
REPLICA_IDS = st.sampled_from(["r0", "r1", "r2", "r3"])
PROGRAM_IDS = st.sampled_from(["p0", "p1", "p2", "p3", "p4", "p5", "p6"])
NAMES = st.sampled_from(["a", "b", "c", "a-lora"])
LISTS = st.sampled_from([("a",), ("b",), ("c",), ("a", "a-lora"), ("a", "b"), ()])


def new_scheduler() -> Scheduler:
    return Scheduler(load_policy("breakeven", {}), SETTINGS)


class PoolsMachine(RuleBasedStateMachine):
    """What the runtime does with pools, in any order."""

    @initialize()
    def begin(self) -> None:
        self.pools = Pools(new_scheduler(), new_scheduler)
        self.now_s = 0.0
        self.turn_ids = count(1)
        self.models: dict[int, str] = {}
        self.granted: dict[int, str] = {}
        self.up: set[str] = set()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "log")
        self.log = EventLogWriter(self.path, policy="breakeven", policy_settings={}, settings=SETTINGS)

    def send(self, event: Event) -> list[Decision]:
        pools = self.pools
        if pools.several or pools.to_tell:
            decisions = pools.handle(event)
            self.log.write_pools(pools.handled)
        else:
            decisions = pools.all[0].scheduler.handle(event)
            self.log.write(event, decisions)
        for decision in decisions:
            if isinstance(decision, Grant):
                assert decision.turn_id not in self.granted, "granted twice"
                self.granted[decision.turn_id] = decision.replica_id
            elif isinstance(decision, Reject):
                self.models.pop(decision.turn_id, None)
            elif isinstance(decision, Release):
                assert not pools.incarnations(decision.program_id), "an end is told of a program that lives"
        return decisions

    # --- replicas

    @rule(replica_id=REPLICA_IDS, names=LISTS)
    def comes_up(self, replica_id: str, names: tuple[str, ...]) -> None:
        if self.pools.listing_of(replica_id) != names:
            self.pools.listed(replica_id, names)
        if self.pools.is_strange(replica_id):
            self.send(ReplicaRemoved(self.now_s, replica_id))
            self.pools.forget(replica_id)
            self.pools.listed(replica_id, names)
        self.up.add(replica_id)
        self.send(ReplicaUp(self.now_s, replica_id, 3_000))

    @rule(replica_id=REPLICA_IDS)
    def goes_down(self, replica_id: str) -> None:
        self.up.discard(replica_id)
        self.send(ReplicaDown(self.now_s, replica_id))

    @rule(replica_id=REPLICA_IDS)
    def is_removed(self, replica_id: str) -> None:
        self.up.discard(replica_id)
        self.send(ReplicaRemoved(self.now_s, replica_id))
        self.pools.forget(replica_id)

    @rule(suspends=st.booleans(), replica_id=st.none() | REPLICA_IDS)
    def pauses(self, suspends: bool, replica_id: str | None) -> None:
        self.send((GrantsSuspended if suspends else GrantsContinued)(self.now_s, "weights", replica_id))

    # --- programs

    @rule(program_id=PROGRAM_IDS, tenant=st.sampled_from(["", "t"]))
    def opens(self, program_id: str, tenant: str) -> None:
        self.send(ProgramOpened(self.now_s, program_id, tenant=tenant))

    @rule(program_id=st.none() | PROGRAM_IDS, model=NAMES, kilobytes=st.integers(1, 6))
    def arrives(self, program_id: str | None, model: str, kilobytes: int) -> None:
        turn_id = next(self.turn_ids)
        if self.pools.several:
            pool = self.pools.of_model(model)
            if pool is None:
                assert all(model not in pool.models for pool in self.pools.all)
                return  # a 404
            self.pools.send(turn_id, pool)
        self.models[turn_id] = model
        if name := self.pools.partly_name(model):
            self.send(ModelAsked(self.now_s, turn_id, name))
        self.send(TurnAsk(now_s=self.now_s, turn_id=turn_id, program_id=program_id, prompt_bytes=kilobytes * 1000))
        assert turn_id not in self.pools.turns or not self.pools.several or turn_id in pool.scheduler.turns
        if turn_id in self.granted and model in self.pools.models:
            assert (self.pools.listing_of(self.granted[turn_id]) or (model,)).count(model), "not where its model is"

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), leaves=st.booleans())
    def ends(self, data: st.DataObject, leaves: bool) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.granted)))
        del self.granted[turn_id]
        self.send(
            TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="abandoned")
            if leaves
            else TurnEnd(
                now_s=self.now_s, turn_id=turn_id, prompt_tokens=400, output_tokens=20, cached_tokens=0, tool="bash"
            )
        )
        assert turn_id not in self.pools.turns

    @rule(program_id=PROGRAM_IDS)
    def tool_starts(self, program_id: str) -> None:
        self.send(ToolStarted(self.now_s, program_id, "bash"))

    @rule(program_id=PROGRAM_IDS, others=st.lists(PROGRAM_IDS, max_size=2))
    def is_released(self, program_id: str, others: list[str]) -> None:
        ids = (program_id, *others)
        event = ProgramsReleased(self.now_s, ids) if others else ProgramReleased(self.now_s, program_id)
        lived = {each for each in ids if self.pools.incarnations(each)}
        ended = [each.program_id for each in self.send(event) if isinstance(each, Release)]
        assert sorted(ended) == sorted(lived)
        assert not any(self.pools.incarnations(each) for each in ids)

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0, 90.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.send(Tick(self.now_s))

    # --- what holds

    @invariant()
    def every_pool_is_sound(self) -> None:
        for pool in self.pools.all:
            invariants.check(pool.scheduler)

    @invariant()
    def nothing_is_in_two_pools(self) -> None:
        schedulers = self.pools.schedulers
        turn_ids = [turn_id for each in schedulers for turn_id in each.turns]
        usable_ids = [replica.replica_id for each in schedulers for replica in each.open_replicas]
        assert len(turn_ids) == len(set(turn_ids))
        assert len(usable_ids) == len(set(usable_ids))
        for pool in self.pools.all:
            assert {each for each in pool.scheduler.replicas if each in self.up} <= set(pool.listed)

    @invariant()
    def limits_hold_over_all(self) -> None:
        assert sum(len(each.programs) for each in self.pools.schedulers) <= SETTINGS.max_programs_count

    @invariant()
    def generations_are_unique(self) -> None:
        generations = [program.generation for each in self.pools.schedulers for program in each.programs.values()]
        assert len(generations) == len(set(generations))

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        self.log.close()
        with self.path.open("rb") as lines:
            report = replay(lines, after_event=invariants.check)
        self.folder.cleanup()
        assert report.difference is None, report.difference


class TestPools(PoolsMachine.TestCase):  # type: ignore[misc, valid-type]
    """Many short lives of pools."""

    settings = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
