"""Random events drive the core; the invariants hold after each, and a replay decides the same."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from thunderagent.policy_loader import load_policy
from thunderagent.programs.decisions import Grant, Reject
from thunderagent.programs.events import (
    Event,
    GrantsContinued,
    GrantsSuspended,
    PinnedTurnArrived,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    ReplicaDown,
    ReplicaDraining,
    ReplicaFlushed,
    ReplicaPolled,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    ResidencyReported,
    SandboxesMeasured,
    SandboxFailed,
    SandboxReady,
    Tick,
    TurnAbandoned,
    TurnArrived,
    TurnFailed,
    TurnFinished,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.invariants import check
from thunderagent.programs.scheduler import Scheduler, SchedulerSettings

POLICY_SETTINGS = {
    "breakeven": {"hold_ratio": 40.0, "reserve_tokens": 100, "foresight_ratio": 20.0, "wait_ratio": 0.3},
    "passthrough": {},
    "sticky": {},
    "cap": {"n": 2},
    "thunderagent": {"delta_s": 2.0, "lambda_max": 0.95, "lambda_min": 0.8},
    "ttl": {"ttl_s": 3.0},
}
SETTINGS = SchedulerSettings(
    idle_limit_s=20.0, forget_limit_s=60.0, no_replica_limit_s=10.0, patience_margin_s=0.5, patience_ratio=0.3
)
PROGRAMS = st.sampled_from([None, "a", "b", "c", "d", "e", "f"])
REPLICAS = st.sampled_from(["r0", "r1", "r2"])
BRANCHES = st.sampled_from(["", "", "sub"])
CAUSES = st.sampled_from(["pause", "weights"])
TOKENS = st.integers(0, 1500)
TOOLS = st.sampled_from(["", "ls", "make"])
PATIENCES = st.none() | st.floats(-1, 15)
PARENTS = st.sampled_from(["", "", "a", "b", "gone"])
GROUPS = st.sampled_from(["", "g", "h"])
PREFIXES = st.sampled_from(
    [(), ((1, 400),), ((1, 400), (2, 1200)), ((1, 420), (3, 900)), ((1, 400), (2, 1100), (4, 5000)), ((5, 800),)]
)


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, in whatever order, a lease is answered once and every sum stays right."""

    policy_name = "thunderagent"
    turns = Bundle("turns")

    @initialize()
    def begin(self) -> None:
        self.scheduler = self.fresh()
        self.log: list[tuple[Event, list[object]]] = []
        self.now_s = 100.0
        self.next_turn_id = 0
        self.answered: set[int] = set()
        for replica_id in ("r0", "r1"):
            self.send(ReplicaPolled(self.now_s, replica_id, capacity_tokens=2000))
            self.send(ReplicaUp(self.now_s, replica_id))

    def fresh(self) -> Scheduler:
        return Scheduler(load_policy(self.policy_name, POLICY_SETTINGS[self.policy_name]), SETTINGS)

    def send(self, event: Event) -> None:
        decisions = self.scheduler.handle(event)
        self.log.append((event, list(decisions)))
        if isinstance(event, TurnArrived) and event.supersedes_id is not None:
            self.answered.add(event.supersedes_id)
            assert event.supersedes_id not in self.scheduler.turns
        for decision in decisions:
            if isinstance(decision, Grant | Reject):
                assert decision.turn_id not in self.answered, f"answered twice: {decision}"
                self.answered.add(decision.turn_id)
            if isinstance(decision, Grant):
                replica = self.scheduler.replicas[decision.replica_id]
                assert replica.up, f"granted on a replica that is down: {decision}"
                assert not replica.suspended_for, f"granted though nothing is: {decision}"

    @rule(elapsed_s=st.floats(0, 30))
    def time_passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @rule(
        target=turns,
        program_id=PROGRAMS,
        branch_id=BRANCHES,
        size=TOKENS,
        avoid=st.none() | REPLICAS,
        prefix=PREFIXES,
        group_id=GROUPS,
        patience_s=PATIENCES,
        parent_id=PARENTS,
    )
    def turn_arrives(
        self,
        program_id: str | None,
        branch_id: str,
        size: int,
        avoid: str | None,
        prefix: tuple[tuple[int, int], ...] = (),
        group_id: str = "",
        patience_s: float | None = None,
        parent_id: str = "",
        supersedes_id: int | None = None,
        age_s: float | None = None,
    ) -> int:
        turn_id = self.next_turn_id
        self.next_turn_id += 1
        self.send(
            TurnArrived(
                self.now_s,
                turn_id,
                program_id,
                branch_id,
                size * 4,
                avoid,
                prefix,
                group_id,
                deadline_s=None if patience_s is None else self.now_s + patience_s,
                supersedes_id=supersedes_id,
                waiting_since_s=None if age_s is None else self.now_s - age_s,
                parent_id=parent_id,
            )
        )
        return turn_id

    @rule(target=turns, earlier_id=consumes(turns), program_id=PROGRAMS, patience_s=PATIENCES)
    def turn_is_tried_again(self, earlier_id: int, program_id: str | None, patience_s: float | None) -> int:
        earlier = self.scheduler.turns.get(earlier_id)
        if earlier is not None and earlier.program is not None:  # mostly it is the same client's
            program_id = earlier.program.program_id
        granted = earlier is not None and earlier.account_id is not None
        if earlier is not None and granted:  # else the next attempt is held where this one was
            granted = not self.scheduler.replicas[earlier.account_id or ""].suspended_for
        turn_count = 0 if earlier is None or earlier.program is None else earlier.program.turn_count
        turn_id = self.turn_arrives(
            program_id, "", 100, None, patience_s=patience_s, supersedes_id=earlier_id, age_s=3.0
        )
        turn = self.scheduler.turns.get(turn_id)
        if granted and earlier is not None and turn is not None and turn.program is earlier.program is not None:
            assert turn.program.turn_count == turn_count, "one turn was counted twice"
            assert turn.account_id is not None, "held, though the attempt before it was not"
        return turn_id

    @rule(target=turns, replica_id=REPLICAS, size=TOKENS)
    def pinned_turn_arrives(self, replica_id: str, size: int) -> int:
        turn_id = self.next_turn_id
        self.next_turn_id += 1
        self.send(PinnedTurnArrived(self.now_s, turn_id, replica_id, size * 4))
        return turn_id

    @rule(target=turns, program_id=st.sampled_from(["a", "b"]), count=st.integers(2, 8))
    def many_turns_arrive(self, program_id: str, count: int) -> object:
        return multiple(*[self.turn_arrives(program_id, "", 100, None) for _ in range(count)])

    @rule(program_id=st.sampled_from(["a", "b", "c"]), group_id=GROUPS)
    def program_is_opened(self, program_id: str, group_id: str) -> None:
        self.send(ProgramOpened(self.now_s, program_id, group_id))

    @rule(program_id=st.sampled_from(["a", "z"]))
    def sandboxes_come_and_fail(self, program_id: str) -> None:
        self.send(SandboxReady(self.now_s, program_id, "box", 1.0))
        self.send(SandboxFailed(self.now_s, program_id, "box", "it died"))
        self.send(SandboxesMeasured(self.now_s, 1, 100))

    @rule(turn_id=turns)
    def turn_starts(self, turn_id: int) -> None:
        self.send(TurnStarted(self.now_s, turn_id))

    @rule(turn_id=turns, output=TOKENS)
    def turn_progresses(self, turn_id: int, output: int) -> None:
        self.send(TurnProgressed(self.now_s, turn_id, output))

    @rule(
        turn_id=consumes(turns),
        prompt=st.none() | TOKENS,
        output=st.none() | TOKENS,
        cached=st.none() | TOKENS,
        tool=TOOLS,
    )
    def turn_finishes(
        self, turn_id: int, prompt: int | None, output: int | None, cached: int | None, tool: str
    ) -> None:
        turn = self.scheduler.turns.get(turn_id)
        if turn is not None and turn_id in self.answered:
            self.send(TurnFinished(self.now_s, turn_id, prompt, output, cached, tool))

    @rule(turn_id=consumes(turns), failed=st.booleans())
    def turn_is_lost(self, turn_id: int, failed: bool) -> None:
        self.send((TurnFailed if failed else TurnAbandoned)(self.now_s, turn_id))
        self.answered.add(turn_id)

    @rule(turn_id=turns)
    def turn_ends_again(self, turn_id: int) -> None:
        if turn_id not in self.scheduler.turns:
            self.send(TurnAbandoned(self.now_s, turn_id))

    @rule(program_id=PROGRAMS.filter(bool), generation=st.none() | st.integers(0, 20))
    def program_is_released(self, program_id: str, generation: int | None) -> None:
        self.send(ProgramReleased(self.now_s, program_id, generation))

    @rule(program_ids=st.lists(PROGRAMS.filter(bool), max_size=4))
    def programs_are_released(self, program_ids: list[str]) -> None:
        self.send(ProgramsReleased(self.now_s, tuple(program_ids)))

    @rule(replica_id=REPLICAS)
    def replica_comes_up(self, replica_id: str) -> None:
        self.send(ReplicaUp(self.now_s, replica_id))

    @rule(replica_id=REPLICAS)
    def replica_goes_down(self, replica_id: str) -> None:
        self.send(ReplicaDown(self.now_s, replica_id))

    @rule(replica_id=REPLICAS)
    def replica_drains(self, replica_id: str) -> None:
        self.send(ReplicaDraining(self.now_s, replica_id))

    @rule(replica_id=st.none() | REPLICAS, cause=CAUSES)
    def grants_are_suspended(self, replica_id: str | None, cause: str) -> None:
        self.send(GrantsSuspended(self.now_s, cause, replica_id))

    @rule(replica_id=st.none() | REPLICAS, cause=CAUSES)
    def grants_go_on(self, replica_id: str | None, cause: str) -> None:
        self.send(GrantsContinued(self.now_s, cause, replica_id))

    @rule(replica_id=REPLICAS)
    def replica_is_flushed(self, replica_id: str) -> None:
        self.send(ReplicaFlushed(self.now_s, replica_id))

    @rule(replica_id=REPLICAS)
    def replica_is_removed(self, replica_id: str) -> None:
        self.send(ReplicaRemoved(self.now_s, replica_id))
        assert replica_id not in self.scheduler.replicas
        assert replica_id not in self.scheduler.ledger.accounts

    @rule(replica_id=REPLICAS, tripped=st.booleans())
    def replica_trips(self, replica_id: str, tripped: bool) -> None:
        self.send(ReplicaTripped(self.now_s, replica_id, tripped))

    @rule(
        replica_id=REPLICAS,
        capacity=st.none() | st.integers(1, 6000),
        hits=st.none() | st.floats(0, 1),
        queries=st.none() | st.integers(0, 20_000),
        preemptions=st.none() | st.integers(0, 5),
    )
    def replica_is_polled(
        self, replica_id: str, capacity: int | None, hits: float | None, queries: int | None, preemptions: int | None
    ) -> None:
        self.send(ReplicaPolled(self.now_s, replica_id, capacity, hits, queries, preemptions))

    @rule(replica_id=REPLICAS, tokens=st.lists(st.tuples(PROGRAMS.filter(bool), TOKENS), max_size=4))
    def residency_is_reported(self, replica_id: str, tokens: list[tuple[str, int]]) -> None:
        self.send(ResidencyReported(self.now_s, replica_id, tuple(tokens)))

    @rule(elapsed_s=st.floats(0, 5))
    def tick(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.send(Tick(self.now_s))

    @invariant()
    def invariants_hold(self) -> None:
        check(self.scheduler)
        for account in self.scheduler.ledger.accounts.values():
            costs = account.costs
            assert min(asdict(costs).values()) >= 0

    @invariant()
    def what_is_learned_makes_sense(self) -> None:
        scheduler = self.scheduler
        members = {group_id: set(group.programs.values()) for group_id, group in scheduler.groups.items()}
        grouped = {program for program in scheduler.table if program.group is not None}
        assert set().union(*members.values()) == grouped
        assert all(members.values())
        for replica in scheduler.replicas.values():
            programs = replica.programs.values()
            assert replica.account.growth_tokens == sum(program.growth_tokens for program in programs)
            assert 0.2 <= replica.account.capacity_ratio <= 3.0
            assert min((replica.residency.resident_tokens(each.generation) for each in programs), default=0) >= 0
            for order, sign in ((replica.acting, 1), (replica.reasoning, 1), (replica.marked, -1)):
                ranks = [sign * scheduler.policy.pause_rank(program) for program in order]
                assert ranks == sorted(ranks), f"ranked as it was: {list(order)}"
        if self.policy_name != "breakeven":
            assert len(scheduler.shares.tree) == 0
        assert scheduler.knowledge.prefill_speed.token_s > 0

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        again = self.fresh()
        for event, decisions in self.log:
            assert again.handle(event) == decisions
        for turn_id in list(self.scheduler.turns):
            self.send(TurnAbandoned(self.now_s, turn_id))
        for program in list(self.scheduler.table):
            self.send(ProgramReleased(self.now_s, program.program_id))
        check(self.scheduler)
        self.nothing_is_left()
        for replica_id in list(self.scheduler.replicas):
            self.send(ReplicaRemoved(self.now_s, replica_id))
        assert not self.scheduler.replicas
        assert not self.scheduler.ledger.accounts
        assert not self.scheduler.changed_replicas
        assert not self.scheduler.open_replicas

    def nothing_is_left(self) -> None:
        assert not self.scheduler.turns
        assert not len(self.scheduler.table)
        assert not len(self.scheduler.queue)
        for replica in self.scheduler.replicas.values():
            assert replica.account.demand_tokens == 0
            assert replica.account.turn_count == replica.account.growth_tokens == replica.account.shared_tokens == 0
        assert len(self.scheduler.shares.tree) == 0
        assert not self.scheduler.groups
        assert not self.scheduler.families
        assert not self.scheduler.impatient


@pytest.mark.parametrize("name", POLICY_SETTINGS)
def test_random_events_keep_every_invariant(name: str) -> None:
    """Leases are answered once, sums equal the sum of their parts, and all is zero after everybody left."""
    machine = type(f"{name.title()}Machine", (SchedulerMachine,), {"policy_name": name})
    case = machine.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
