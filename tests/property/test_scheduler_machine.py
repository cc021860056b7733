"""Random events drive the core; the invariants hold after each, and a replay decides the same."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from thunderagent.policy_loader import load_policy
from thunderagent.programs.invariants import check
from thunderagent.programs.messages import (
    KEEPS,
    BranchRecord,
    CapacityRecord,
    Decision,
    EncodesPolled,
    Event,
    GpuEnd,
    GpuSubmit,
    Grant,
    GrantsContinued,
    GrantsSuspended,
    KnowledgeLoaded,
    MigrationAsked,
    ModelAsked,
    ModelServed,
    Pause,
    PrioritySet,
    ProgramHinted,
    ProgramJudged,
    ProgramKilled,
    ProgramLimits,
    ProgramOpened,
    ProgramRecord,
    ProgramReleased,
    ProgramsAdopted,
    ProgramsReleased,
    ProvisionAsked,
    Reject,
    Release,
    ReplicaDown,
    ReplicaDraining,
    ReplicaFlushed,
    ReplicaKilled,
    ReplicaPolled,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    ResidencyReported,
    RouteSet,
    SandboxesMeasured,
    SandboxFailed,
    SandboxReady,
    SchedulerSettings,
    Signal,
    Tick,
    TierPolled,
    ToolEnded,
    ToolNum,
    ToolStarted,
    TurnAdopted,
    TurnAsk,
    TurnDue,
    TurnEnd,
    TurnLimited,
    TurnProgressed,
    TurnStarted,
    Unmark,
)
from thunderagent.programs.policy import HINT_RATIO
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.accounts import Account

EXAMPLES_COUNT = int(os.environ.get("SCHEDULER_EXAMPLES", "12"))
"""Number of examples for each policy, each of 50 steps; they are new each time, and scripts/nightly has many more."""

POLICY_SETTINGS = {
    "breakeven": {"hold_ratio": 40.0, "reserve_tokens": 100, "foresight_ratio": 20.0, "wait_ratio": 0.3},
    "mars": {"tool_cpu_count": 1, "window_max_count": 4, "reserve_tokens": 100},
    "passthrough": {},
    "sticky": {},
    "cap": {"n": 2},
    "thunderagent": {"delta_s": 2.0, "lambda_max": 0.95, "lambda_min": 0.8},
    "thunderagent-released": {"delta_s": 2.0, "force_s": 20.0},
    "ttl": {"ttl_s": 3.0},
    "autellix": {"short_tokens": 500},
    "continuum": {"cold_count": 2, "reserve_tokens": 100},
    "continuum-fixed": {"ttl_s": 3.0},
    "infercept": {"prefill_token_s": 0.002},
    "concur": {"admission.first_count": 1, "admission.add_count": 1, "admission.interval_s": 1.0},
    "continuum behind a window": {
        "policy": "continuum",
        "cold_count": 0,
        "admission": "concur",
        "admission.first_count": 2,
        "admission.interval_s": 2.0,
    },
    "ttl, by attained service": {
        "policy": "ttl",
        "ttl_s": 3.0,
        "order": "plas",
        "order.first_tokens": 200,
        "priority": "atlas",
        "priority.starved_ratio": 0.5,
    },
    "breakeven, in parts": {
        "policy": "breakeven",
        "reserve_tokens": 100,
        "admission": "tests.builders:Breathing",
        "order": "shortest",
        "victims": "largest",
        "priority": "age",
    },
    "breakeven, by area": {
        "policy": "breakeven",
        "reserve_tokens": 100,
        "order": "least-area",
        "order.bound_ratio": 0.5,
    },
    "breakeven, fair tenants": {"policy": "breakeven", "reserve_tokens": 100, "fair_tenants": True},
    "breakeven, controlled": {
        "policy": "breakeven",
        "reserve_tokens": 100,
        "priority": "age",
        "global_policy": "balance+migrate+reassign",
        "global_policy.gap_ratio": 0.1,
        "global_policy.rest_s": 2.0,
        "global_policy.long_turn_s": 1.0,
        "global_policy.wait_s": 0.0,
        "global_policy.waiting_count": 0.5,
        "global_policy.patience_s": 1.0,
    },
    "ttl, in parts": {"policy": "ttl", "ttl_s": 3.0, "order": "orbit-judge", "priority": "orbit-judge"},
    "cap, in parts": {
        "policy": "cap",
        "n": 2,
        "order": "orbit-step",
        "order.window_count": 2,
        "priority": "orbit-step",
    },
    "thunderagent, with the parts of MARS": {
        "policy": "thunderagent",
        "delta_s": 2.0,
        "admission": "mars",
        "admission.window_min_count": 1,
        "admission.window_max_count": 4,
        "order": "mars",
        "priority": "mars",
        "priority.first_level_tokens": 200,
    },
    "thunderagent, in parts": {"policy": "thunderagent", "delta_s": 2.0, "admission": "window", "admission.n": 3},
    "thunderagent-ports": {},
    "infercept, in parts": {
        "policy": "infercept",
        "prefill_token_s": 0.002,
        "admission": "mars-few-long",
        "order": "shortest",
        "victims": "youngest",
    },
}
"""Each case by its name, which is the policy's name if none is given."""
SETTINGS = SchedulerSettings(
    idle_limit_s=20.0,
    forget_limit_s=60.0,
    no_replica_limit_s=10.0,
    patience_margin_s=0.5,
    patience_ratio=0.3,
    judge_fail_count=2,
    judge_ends_hopeless=True,
)
PROGRAMS = st.sampled_from([None, "a", "b", "c", "d", "e", "f"])
REPLICAS = st.sampled_from(["r0", "r1", "r2"])
BRANCHES = st.sampled_from(["", "", "sub", "below"])
CAUSES = st.sampled_from(["pause", "weights"])
TOKENS = st.integers(0, 1500)
TOOLS = st.sampled_from(["", "ls", "make"])
PATIENCES = st.none() | st.floats(-1, 15)
PARENTS = st.sampled_from(["", "", "a", "b", "gone"])
TENANTS = st.sampled_from(["", "red", "blue"])
CLASSES = st.sampled_from(["", "c"])
GROUPS = st.sampled_from(["", "g", "h"])
MODELS = st.sampled_from(["x", "x", "y"])
PREFIXES = st.sampled_from(
    [(), ((1, 400),), ((1, 400), (2, 1200)), ((1, 420), (3, 900)), ((1, 400), (2, 1100), (4, 5000)), ((5, 800),)]
)


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, in whatever order, a lease is answered once and every sum stays right."""

    policy_name = "thunderagent"
    turns = Bundle("turns")

    @initialize()
    def begin(self) -> None:
        self.heard: list[Signal] = []
        self.scheduler = self.fresh()
        self.log: list[tuple[Event, list[object]]] = []
        self.now_s = 100.0
        self.next_turn_id = 0
        self.answered: set[int] = set()
        self.asked: dict[int, str] = {}
        """Turns for a model that only some replicas serve, as these always did."""
        self.serving: dict[str, tuple[str, ...]] = {}
        self.leaving: dict[int, set[int]] = {}
        """The turns in flight of programs that are marked to leave their replicas, by generation."""
        self.there_was_token_s: dict[Account, float] = {}
        self.counted_until_s = self.now_s
        for replica_id in ("r0", "r1"):
            self.send(ReplicaPolled(self.now_s, replica_id, capacity_tokens=2000))
            self.send(ReplicaUp(self.now_s, replica_id))

    def fresh(self) -> Scheduler:
        policy_settings = dict(POLICY_SETTINGS[self.policy_name])
        fair = bool(policy_settings.pop("fair_tenants", False))
        policy = load_policy(str(policy_settings.pop("policy", self.policy_name)), policy_settings)
        scheduler = Scheduler(policy, replace(SETTINGS, fair_tenants=fair, tenant_weight_ratios={"red": 4.0}))
        scheduler.listen(self.heard.append)
        return scheduler

    def send(self, event: Event) -> None:
        elapsed_s, self.counted_until_s = event.now_s - self.counted_until_s, event.now_s
        for account in self.scheduler.ledger.accounts.values():
            capacity_tokens = inf if account.capacity_tokens is None else account.capacity_tokens
            before_token_s = self.there_was_token_s.get(account, 0.0)
            self.there_was_token_s[account] = before_token_s + (capacity_tokens * elapsed_s if elapsed_s else 0.0)
        decisions = self.scheduler.handle(event)
        self.log.append((event, list(decisions)))
        if isinstance(event, TurnAsk) and event.supersedes_id is not None:
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
                model = self.asked.get(decision.turn_id, "")
                assert decision.replica_id in self.serving.get(model, (decision.replica_id,)), f"not there: {decision}"
        self.who_leaves_gets_nothing_new(decisions)

    def who_leaves_gets_nothing_new(self, decisions: list[Decision]) -> None:
        """With `check` a program leaves with its last turn in flight: until then it gets no new turns."""
        began_anew = {decision.program_id for decision in decisions if isinstance(decision, Unmark | Pause | Release)}
        before = self.leaving
        self.leaving = {
            each.generation: set(each.in_flight) for each in self.scheduler.programs.values() if each.marked
        }
        for program in self.scheduler.programs.values():
            if program.marked and program.program_id not in began_anew and program.generation in before:
                story = "\n".join(map(str, program.story()))
                assert self.leaving[program.generation] <= before[program.generation], f"granted a turn\n{story}"

    @rule(program_id=PROGRAMS, tool=TOOLS, inferred=st.booleans())
    def tool_starts(self, program_id: str | None, tool: str, inferred: bool) -> None:
        self.send(ToolStarted(self.now_s, program_id or "nobody", tool, inferred))

    @rule(program_id=PROGRAMS, inferred=st.booleans())
    def tool_ends(self, program_id: str | None, *, inferred: bool) -> None:
        self.send(ToolEnded(self.now_s, program_id or "nobody", inferred))

    @rule(
        program_id=PROGRAMS,
        next_turn_in_s=st.none() | st.floats(0, 40),
        confidence=st.floats(0, 1),
        keep=st.sampled_from(["", "", *KEEPS]),
        branch_id=BRANCHES,
    )
    def program_is_hinted(
        self, program_id: str | None, next_turn_in_s: float | None, confidence: float, keep: str, branch_id: str
    ) -> None:
        self.send(ProgramHinted(self.now_s, program_id or "nobody", next_turn_in_s, confidence, keep, branch_id))
        program = self.scheduler.programs.get(program_id or "nobody")
        if program is not None and program.hint_keeps:
            replica = self.scheduler.replicas[program.replica_id or ""]
            ratio = getattr(self.scheduler.policy, "hint_ratio", HINT_RATIO)
            assert replica.acting.hint_tokens <= ratio * replica.account.limit_tokens, "hints keep more than they may"

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
        tenant=TENANTS,
        wanted=st.none() | REPLICAS,
        program_class=CLASSES,
        parent_branch_id=BRANCHES,
        model=MODELS,
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
        tenant: str = "",
        wanted: str | None = None,
        program_class: str = "",
        parent_branch_id: str = "",
        model: str = "",
    ) -> int:
        turn_id = self.next_turn_id
        self.next_turn_id += 1
        if model in self.serving:
            self.asked[turn_id] = model
            self.send(ModelAsked(self.now_s, turn_id, model))
        if program_id is not None and turn_id % 5 == 0:
            limits = ProgramLimits(6, 4000, 600.0, 20.0 + turn_id % 7, turns=3, ends=turn_id % 2 == 0)
            self.send(TurnLimited(self.now_s, turn_id, limits))
        self.send(
            TurnAsk(
                now_s=self.now_s,
                turn_id=turn_id,
                program_id=program_id,
                branch_id=branch_id,
                prompt_bytes=size * 4,
                avoid_replica_id=avoid,
                prefix=prefix,
                group_id=group_id,
                patience_s=patience_s,
                supersedes_id=supersedes_id,
                waited_s=age_s,
                parent_id=parent_id,
                tenant=tenant,
                wanted_replica_id=wanted,
                program_class=program_class,
                parent_branch_id=parent_branch_id,
            )
        )
        return turn_id

    @rule(
        target=turns,
        program_id=PROGRAMS,
        branch_id=BRANCHES,
        size=TOKENS,
        replica_id=REPLICAS,
        parent_id=PARENTS,
        tenant=TENANTS,
    )
    def turn_is_adopted(
        self, program_id: str | None, branch_id: str, size: int, replica_id: str, parent_id: str, tenant: str
    ) -> int:
        turn_id = self.next_turn_id
        self.next_turn_id += 1
        arrived = TurnAsk(
            now_s=self.now_s,
            turn_id=turn_id,
            program_id=program_id,
            branch_id=branch_id,
            prompt_bytes=size * 4,
            parent_id=parent_id,
            tenant=tenant,
        )
        replica = self.scheduler.replicas.get(replica_id)
        grants = replica is not None and replica.grants
        self.leaving = {}  # it runs beside the turns of a program that leaves
        self.send(TurnAdopted(self.now_s, turn_id, replica_id, arrived))
        turn = self.scheduler.turns.get(turn_id)
        assert (turn is not None and turn.account_id == replica_id) == grants, "counted elsewhere, or nowhere"
        return turn_id

    @rule(
        program_id=PROGRAMS.filter(bool),
        standing=st.sampled_from(["announced", "active", "paused", "idle", "unadmitted"]),
        replica_id=REPLICAS,
        size=TOKENS,
        tool_runs=st.booleans(),
    )
    def program_is_adopted(self, program_id: str, standing: str, replica_id: str, size: int, tool_runs: bool) -> None:
        """The program comes from another scheduler: it is taken in once, and has its claim if its replica is open."""
        branches = (BranchRecord("", size, size), BranchRecord("b", size, 0, 0.25, ""))[: 1 + size % 2]
        record = ProgramRecord(
            program_id,
            standing=standing,
            replica_id=replica_id,
            resident_tokens=size,
            branches=branches,
            age_s=30.0,
            acting_s=5.0,
            tool_runs=tool_runs,
            turn_count=1,
        )
        known = program_id in self.scheduler.programs or program_id in self.scheduler.refused_ids
        self.send(ProgramsAdopted(self.now_s, replica_id, (record, record)))
        program = self.scheduler.programs.get(program_id)
        replica = self.scheduler.replicas.get(replica_id)
        if known or program is None or standing == "announced":
            return
        is_open = replica is not None and replica.open_to_programs and program.routed_to in (None, replica_id)
        assert program.place.active == (standing == "active" and is_open)

    @rule(target=turns, earlier_id=consumes(turns), program_id=PROGRAMS, patience_s=PATIENCES)
    def turn_is_tried_again(self, earlier_id: int, program_id: str | None, patience_s: float | None) -> int:
        earlier = self.scheduler.turns.get(earlier_id)
        if earlier is not None and earlier.program is not None:  # mostly it is the same client's
            program_id = earlier.program.program_id
        granted = earlier is not None and earlier.account_id is not None
        leaves = False
        if earlier is not None and granted:
            replica = self.scheduler.replicas[earlier.account_id or ""]
            marked = earlier.program is not None and earlier.program.marked
            leaves = marked and not replica.open_to_programs
            granted = not marked and not replica.suspended_for  # otherwise the next attempt is held where this one was
        left_id = earlier.account_id if earlier is not None else None
        turn_count = 0 if earlier is None or earlier.program is None else earlier.program.turn_count
        turn_id = self.turn_arrives(
            program_id, "", 100, None, patience_s=patience_s, supersedes_id=earlier_id, age_s=3.0
        )
        turn = self.scheduler.turns.get(turn_id)
        if granted and earlier is not None and turn is not None and turn.program is earlier.program is not None:
            assert turn.program.turn_count == turn_count, "one turn was counted twice"
            assert turn.account_id is not None, "held, though the attempt before it was not"
        if leaves and earlier is not None and turn is not None and turn.program is earlier.program is not None:
            assert turn.account_id != left_id, "sent again to a replica that its program is to leave"
        return turn_id

    @rule(target=turns, replica_id=REPLICAS, size=TOKENS)
    def pinned_turn_arrives(self, replica_id: str, size: int) -> int:
        turn_id = self.next_turn_id
        self.next_turn_id += 1
        self.send(TurnAsk(now_s=self.now_s, turn_id=turn_id, pinned_replica_id=replica_id, prompt_bytes=size * 4))
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
            self.send(
                TurnEnd(
                    now_s=self.now_s,
                    turn_id=turn_id,
                    prompt_tokens=prompt,
                    output_tokens=output,
                    cached_tokens=cached,
                    tool=tool,
                )
            )

    @rule(turn_id=consumes(turns), failed=st.booleans())
    def turn_is_lost(self, turn_id: int, failed: bool) -> None:
        self.send(TurnEnd(turn_id, outcome="failed" if failed else "abandoned", now_s=self.now_s))
        self.answered.add(turn_id)

    @rule(turn_id=turns)
    def turn_ends_again(self, turn_id: int) -> None:
        if turn_id not in self.scheduler.turns:
            self.send(TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="abandoned"))

    @rule(program_id=PROGRAMS.filter(bool), generation=st.none() | st.integers(0, 20))
    def program_is_released(self, program_id: str, generation: int | None) -> None:
        self.send(ProgramReleased(self.now_s, program_id, generation))

    @rule(program_id=PROGRAMS.filter(bool), outcome=st.sampled_from(["success", "failure", "?"]))
    def program_ends_with_an_outcome(self, program_id: str, outcome: str) -> None:
        self.send(ProgramReleased(self.now_s, program_id, None, outcome))
        assert program_id not in self.scheduler.refused_ids

    @rule(
        program_id=PROGRAMS.filter(bool),
        late=st.booleans(),
        turn_count=st.integers(0, 6),
        succeeds=st.booleans(),
        confidence=st.floats(0, 1),
    )
    def program_is_judged(
        self, program_id: str, late: bool, turn_count: int, succeeds: bool, confidence: float
    ) -> None:
        program = self.scheduler.programs.get(program_id)
        generation = 0 if program is None else program.generation - late
        level_counts = self.scheduler.knowledge.judge_record.level_counts.copy()
        self.send(ProgramJudged(self.now_s, program_id, generation, turn_count, succeeds, confidence))
        if program is None or late:
            assert self.scheduler.knowledge.judge_record.level_counts == level_counts, "a verdict on nobody was taken"
        elif program_id in self.scheduler.refused_ids:
            assert self.scheduler.programs.get(program_id) is None
        else:
            assert program.level is not None

    @rule(program_ids=st.lists(PROGRAMS.filter(bool), max_size=4))
    def programs_are_released(self, program_ids: list[str]) -> None:
        self.send(ProgramsReleased(self.now_s, tuple(program_ids)))

    @rule(replica_id=REPLICAS)
    def replica_comes_up(self, replica_id: str) -> None:
        self.send(ReplicaUp(self.now_s, replica_id, 2000 if replica_id not in self.scheduler.replicas else None))

    @rule(replica_id=REPLICAS)
    def replica_goes_down(self, replica_id: str) -> None:
        self.send(ReplicaDown(self.now_s, replica_id))

    @rule(replica_id=REPLICAS)
    def replica_drains(self, replica_id: str) -> None:
        self.send(ReplicaDraining(self.now_s, replica_id))

    @rule(replica_id=REPLICAS, trips=st.booleans(), program_id=PROGRAMS.filter(bool), branch_id=BRANCHES)
    def replica_is_left(self, replica_id: str, trips: bool, program_id: str, branch_id: str) -> None:
        """No program is there once the turns in flight there have ended, whatever happens meanwhile."""
        turns = [turn for turn in self.scheduler.turns.values() if turn.account_id == replica_id]
        self.send(ReplicaTripped(self.now_s, replica_id) if trips else ReplicaDraining(self.now_s, replica_id))
        for turn in turns:
            self.turn_arrives(program_id if turn.program is None else turn.program.program_id, branch_id, 100, None)
            if turn.turn_id in self.scheduler.turns:
                self.send(TurnEnd(now_s=self.now_s, turn_id=turn.turn_id))
        replica = self.scheduler.replicas.get(replica_id)
        assert replica is None or not replica.programs, f"still there: {replica!r}"
        assert replica is None or not replica.up or not replica.account.turn_count, f"still there: {replica!r}"

    @rule(replica_id=st.none() | REPLICAS, cause=CAUSES)
    def grants_are_suspended(self, replica_id: str | None, cause: str) -> None:
        self.send(GrantsSuspended(self.now_s, cause, replica_id))

    @rule(replica_id=st.none() | REPLICAS, cause=CAUSES)
    def grants_go_on(self, replica_id: str | None, cause: str) -> None:
        self.send(GrantsContinued(self.now_s, cause, replica_id))

    @rule(replica_id=REPLICAS, ratio=st.floats(0.2, 3.0))
    def knowledge_is_loaded(self, replica_id: str, ratio: float) -> None:
        capacities = (CapacityRecord(replica_id, ratio, 3.0),)
        learned = replace(self.scheduler.knowledge.export(), capacities=capacities)
        self.send(KnowledgeLoaded(self.now_s, replica_id, learned))

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
        used=st.none() | st.floats(0, 1),
    )
    def replica_is_polled(
        self,
        replica_id: str,
        capacity: int | None,
        hits: float | None,
        queries: int | None,
        preemptions: int | None,
        used: float | None,
    ) -> None:
        self.send(ReplicaPolled(self.now_s, replica_id, capacity, hits, queries, preemptions, used))

    @rule(replica_id=REPLICAS, count=st.integers(0, 9))
    def encodes_are_polled(self, replica_id: str, count: int) -> None:
        self.send(EncodesPolled(self.now_s, replica_id, count))

    @rule(replica_id=REPLICAS, asked=TOKENS, found=TOKENS)
    def tier_is_polled(self, replica_id: str, asked: int, found: int) -> None:
        self.send(TierPolled(self.now_s, replica_id, asked, found))

    @rule(replica_id=REPLICAS, tokens=st.lists(st.tuples(PROGRAMS.filter(bool), TOKENS), max_size=4))
    def residency_is_reported(self, replica_id: str, tokens: list[tuple[str, int]]) -> None:
        self.send(ResidencyReported(self.now_s, replica_id, tuple(tokens)))

    @rule(model=MODELS, replica_ids=st.lists(REPLICAS, max_size=2, unique=True))
    def some_serve_a_model(self, model: str, replica_ids: list[str]) -> None:
        self.asked = {turn_id: each for turn_id, each in self.asked.items() if each != model}
        self.serving.pop(model, None)
        if replica_ids:
            self.serving[model] = tuple(replica_ids)
        self.send(ModelServed(self.now_s, model, tuple(replica_ids)))

    @rule(
        route=st.sampled_from([("all", ""), ("program", "a"), ("group", "g"), ("tenant", "red"), ("class", "c")]),
        weights=st.dictionaries(REPLICAS, st.sampled_from([0.0, 1.0, 1.0, 2.5]), max_size=3),
    )
    def route_is_set(self, route: tuple[str, str], weights: dict[str, float]) -> None:
        self.send(RouteSet(self.now_s, *route, tuple(weights.items())))

    @rule(
        program_id=PROGRAMS.filter(bool),
        priority=st.integers(-2, 2) | st.just(10**9),
        replica_id=st.none() | st.none() | REPLICAS,
    )
    def priority_is_set(self, program_id: str, priority: int, replica_id: str | None) -> None:
        self.send(PrioritySet(self.now_s, program_id, priority, replica_id))

    @rule(program_id=PROGRAMS.filter(bool), replica_id=REPLICAS)
    def program_is_migrated(self, program_id: str, replica_id: str) -> None:
        why_not = self.scheduler.operations.why_not_migrate(program_id, replica_id)
        self.send(MigrationAsked(self.now_s, program_id, replica_id))
        program = self.scheduler.programs.get(program_id)
        if not why_not and program is not None and program.destination is None:
            assert replica_id in self.scheduler.replicas
            assert program.replica_id == replica_id or program.status == "paused"

    @rule(program_id=PROGRAMS.filter(bool))
    def program_is_killed(self, program_id: str) -> None:
        self.send(ProgramKilled(self.now_s, program_id))
        assert self.scheduler.programs.get(program_id) is None

    @rule(replica_id=REPLICAS)
    def replicas_are_asked_for(self, replica_id: str) -> None:
        self.send(ReplicaKilled(self.now_s, replica_id))
        self.send(ProvisionAsked(self.now_s))

    @rule(turn_id=turns)
    def turn_is_due(self, turn_id: int) -> None:
        self.send(TurnDue(self.now_s, turn_id))

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
            there_was_token_s = self.there_was_token_s.get(account, 0.0)
            assert costs.spent_token_s <= there_was_token_s * (1 + 1e-9) + 1e-3, "more was spent than there was"

    @invariant()
    def what_is_judged_makes_sense(self) -> None:
        for program in self.scheduler.programs.values():
            assert program.program_id not in self.scheduler.refused_ids
            assert (program.level is None) == (not program.verdicts.last)
            assert [each.turn_count for each in program.verdicts.last] == sorted(
                each.turn_count for each in program.verdicts.last
            )
        if self.scheduler.settings.fair_tenants:  # tenants come first there
            return
        queue = self.scheduler.queue.waiting.order
        rank, ranks = self.scheduler.policy.restore_rank, []
        for program in queue:
            is_urgent = program.urgent_until_s < inf  # it would miss its deadline
            assert not is_urgent or program.held
            ranks.append((program.priority, not is_urgent, program.urgent_until_s if is_urgent else rank(program)))
        assert ranks == sorted(ranks), f"queued as it was: {list(queue)}"

    @invariant()
    def what_is_learned_makes_sense(self) -> None:
        scheduler = self.scheduler
        members = {group_id: set(group.programs.values()) for group_id, group in scheduler.book.groups.items()}
        grouped = {program for program in scheduler.programs.values() if program.group is not None}
        assert set().union(*members.values()) == grouped
        assert all(members.values())
        for replica in scheduler.replicas.values():
            programs = replica.programs.values()
            assert replica.account.growth_tokens == sum(program.growth_tokens for program in programs)
            assert 0.2 <= replica.account.capacity_ratio <= 3.0
            assert min((replica.residency.resident_tokens(each.generation) for each in programs), default=0) >= 0
            for order, sign in ((replica.acting.kept, 1), (replica.working.kept, 1), (replica.leaving.kept, -1)):
                ranks = [sign * scheduler.policy.pause_rank(program) for program in order or ()]
                assert ranks == sorted(ranks), f"ranked as it was: {order and list(order)}"
        if not self.scheduler.policy.claim_rules.share_prefixes:
            assert len(scheduler.book.prefixes.tree) == 0
        assert scheduler.knowledge.prices.token_s > 0

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        first_heard, self.heard = self.heard, []
        again = self.fresh()
        for event, decisions in self.log:
            assert again.handle(event) == decisions
        assert self.heard == first_heard
        self.what_was_heard_adds_up()
        for turn_id in list(self.scheduler.turns):
            self.send(TurnEnd(now_s=self.now_s, turn_id=turn_id, outcome="abandoned"))
        for program in list(self.scheduler.programs.values()):
            self.send(ProgramReleased(self.now_s, program.program_id))
        check(self.scheduler)
        self.nothing_is_left()
        for replica_id in list(self.scheduler.replicas):
            self.send(ReplicaRemoved(self.now_s, replica_id))
            self.send(ReplicaPolled(self.now_s, replica_id, 1000))
            self.send(ReplicaDraining(self.now_s, replica_id))
            self.send(GrantsSuspended(self.now_s, "late", replica_id))
        assert not self.scheduler.replicas
        assert not self.scheduler.ledger.accounts
        assert not self.scheduler.book.changed_replicas
        assert not self.scheduler.open_replicas

    def what_was_heard_adds_up(self) -> None:
        """Every turn that went to a replica came back or is still there, and so is every tool."""
        gone = {signal.turn_id for signal in self.heard if isinstance(signal, GpuSubmit)}
        back = [signal.turn_id for signal in self.heard if isinstance(signal, GpuEnd)]
        there = {turn_id for program in self.scheduler.programs.values() for turn_id in program.in_flight}
        assert len(back) == len(set(back)), "a turn came back twice"
        assert gone - set(back) == there
        counts = [signal.tool_count for signal in self.heard if isinstance(signal, ToolNum)]
        assert self.scheduler.knowledge.tools_running_count == (counts[-1] if counts else 0)

    def nothing_is_left(self) -> None:
        assert not self.scheduler.turns
        assert not len(self.scheduler.programs)
        assert not len(self.scheduler.queue)
        for replica in self.scheduler.replicas.values():
            assert replica.account.demand_tokens == 0
            assert replica.account.turn_count == replica.account.growth_tokens == replica.account.shared_tokens == 0
        assert len(self.scheduler.book.prefixes.tree) == 0
        assert not self.scheduler.book.groups
        assert not self.scheduler.families
        assert not self.scheduler.deadlines
        if self.scheduler.tenants is not None:
            assert not any(tenant.busy for tenant in self.scheduler.tenants)


@pytest.mark.parametrize("name", POLICY_SETTINGS)
def test_random_events_keep_every_invariant(name: str) -> None:
    """Leases are answered once, sums equal the sum of their parts, and all are zero after all programs left."""
    machine = type(f"{name.title()}Machine", (SchedulerMachine,), {"policy_name": name})
    case = machine.TestCase
    case.settings = settings(
        max_examples=EXAMPLES_COUNT, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
