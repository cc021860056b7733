"""Random histories with all events of the core, which a single incident for each policy does not cover.

The generator knows only what any client knows: which of its turns were granted, rejected, or are held.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.builders import Driver
from thunderagent.policy_loader import Setting, load_policy
from thunderagent.programs.messages import (
    EncodesPolled,
    GrantsContinued,
    GrantsSuspended,
    MigrationAsked,
    PrioritySet,
    ProgramJudged,
    ProgramKilled,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    ProvisionAsked,
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
    SchedulerSettings,
    Tick,
    ToolEnded,
    ToolStarted,
    TurnAsk,
    TurnDue,
    TurnEnd,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.policy import Policy

SETTINGS = SchedulerSettings(
    idle_limit_s=20.0,
    forget_limit_s=60.0,
    no_replica_limit_s=10.0,
    patience_margin_s=0.5,
    patience_ratio=0.3,
    max_programs_count=9,
    tenant_max_programs_count=6,
    tenant_weight_ratios={"red": 4.0},
    judge_fail_count=2,
    judge_ends_hopeless=True,
)
LEARNED_LIMITS = SchedulerSettings(forget_limit_s=90.0, no_replica_limit_s=10.0, patience_ratio=0.3)
NAMES = tuple("abcdefghij")
REPLICAS = ("r0", "r1", "r2")
PREFIXES = ((), ((1, 400),), ((1, 400), (2, 1200)), ((1, 420), (3, 900)), ((1, 400), (2, 1100), (4, 5000)))


class History:
    """One random history, recorded by a driver."""

    def __init__(
        self,
        policy: str,
        policy_settings: dict[str, Setting],
        settings: SchedulerSettings,
        seed: object,
        watched: Callable[[Policy], Policy] = lambda policy: policy,
    ) -> None:
        """Begin with two replicas; equal seeds make equal histories while the decisions are equal."""
        self.random = Random(str(seed))
        made = watched(load_policy(policy, policy_settings))
        self.driver = Driver(made, replicas={"r0": 2000, "r1": 2500}, settings=settings)
        self.turns: dict[int, str | None] = {}
        """Unfinished turns, each with its program."""
        self.turn_id = 0
        self.last_s = self.driver.now_s
        roll = self.random
        self.things: tuple[tuple[int, Callable[[], None]], ...] = (
            (60, self.turn_arrives),
            (60, self.turn_goes_on),
            (6, self.turn_is_lost),
            (8, self.turn_is_tried_again),
            (3, self.pinned_turn_arrives),
            (4, lambda: self.send(ProgramOpened, self.name(), roll.choice(("", "g")), roll.choice(("", "a")))),
            (5, lambda: self.send(ToolStarted, self.name(), roll.choice(("", "make")), roll.random() < 0.5)),
            (5, lambda: self.send(ToolEnded, self.name(), roll.random() < 0.5)),
            (4, self.program_ends),
            (12, lambda: self.send(Tick)),
            (3, self.time_passes),
            (7, self.replica_changes),
            (4, self.replica_is_polled),
            (4, self.grants_stop_or_go_on),
            (6, self.operator_speaks),
            (3, lambda: self.send(ProgramJudged, self.name(), roll.randrange(1, 30), 3, roll.random() < 0.5, 0.9)),
        )

    def record(self, count: int) -> Driver:
        """Make a number of events happen, then end everything."""
        weights = [weight for weight, _ in self.things]
        for _ in range(count):
            self.driver.passes(self.random.choice((0.013, 0.07, 0.31, 0.9)) * (0.5 + self.random.random()))
            self.random.choices(self.things, weights)[0][1]()
        for turn_id in list(self.turns):
            self.send(TurnEnd, turn_id=turn_id, outcome="abandoned")
        for _ in range(3):
            self.driver.passes(31.0)
            self.send(Tick)
        return self.driver

    def send(self, kind: type[Any], *fields: object, **more: object) -> None:
        """Send an event now; forget turns that were rejected, or replaced by another."""
        now_s = round(self.driver.now_s, 6)
        is_message = kind in (TurnAsk, TurnEnd)
        self.driver.send(kind(now_s=now_s, **more) if is_message else kind(now_s, *fields, **more))
        for turn_id in [turn_id for turn_id in self.turns if turn_id in self.driver.rejected_for]:
            del self.turns[turn_id]

    def name(self) -> str:
        return self.random.choice(NAMES)

    def replica(self) -> str:
        return self.random.choice(REPLICAS)

    def new_id(self, program_id: str | None) -> int:
        self.turn_id += 1
        self.turns[self.turn_id] = program_id
        return self.turn_id

    def turn_arrives(self, program_id: str | None = None, supersedes_id: int | None = None) -> None:
        roll = self.random
        if program_id is None and roll.random() < 0.96:
            program_id = self.name()
        now_s = round(self.driver.now_s, 6)
        deadline_s = self.driver.now_s + roll.uniform(0.1, 15.0) if roll.random() < 0.3 else None
        self.send(
            TurnAsk,
            turn_id=self.new_id(program_id),
            program_id=program_id,
            branch_id=roll.choice(("", "", "", "", "sub", "below")),
            prompt_bytes=4 * roll.randrange(20, 1300),
            avoid_replica_id=self.replica() if roll.random() < 0.1 else None,
            prefix=roll.choice(PREFIXES),
            group_id=roll.choice(("", "", "g", "h")),
            patience_s=None if deadline_s is None else deadline_s - now_s,
            supersedes_id=supersedes_id,
            waited_s=now_s - (self.driver.now_s - 3.0) if roll.random() < 0.1 else None,
            parent_id=roll.choice(("", "", "", "a", "b", "gone")),
            tenant=roll.choice(("", "red", "blue")),
            wanted_replica_id=self.replica() if roll.random() < 0.05 else None,
            program_class=roll.choice(("", "c")),
            role=roll.choice(("", "coder")),
            media=(("image", 60),) if roll.random() < 0.05 else (),
        )

    def pinned_turn_arrives(self) -> None:
        turn_id, replica_id = self.new_id(None), self.replica()
        prompt_bytes = 4 * self.random.randrange(900)
        self.send(TurnAsk, turn_id=turn_id, pinned_replica_id=replica_id, prompt_bytes=prompt_bytes)

    def granted(self) -> list[int]:
        return [turn_id for turn_id in self.turns if turn_id in self.driver.granted_on]

    def turn_goes_on(self) -> None:
        """Begin a turn, have it generate, and end it, mostly all at once."""
        if not (granted := self.granted()):
            self.send(Tick)
            return
        turn_id, roll = self.random.choice(granted), self.random
        self.send(TurnStarted, turn_id)
        if roll.random() < 0.5:
            self.send(TurnProgressed, turn_id, roll.randrange(1, 300))
        if roll.random() < 0.8:
            self.driver.passes(roll.uniform(0.05, 2.0))
            del self.turns[turn_id]
            prompt_tokens, cached_tokens = roll.choice((None, roll.randrange(20, 1300))), roll.randrange(900)
            tool = roll.choice(("", "ls", "make"))
            self.send(
                TurnEnd,
                turn_id=turn_id,
                prompt_tokens=prompt_tokens,
                output_tokens=roll.choice((None, roll.randrange(300))),
                cached_tokens=roll.choice((None, cached_tokens)),
                tool=tool,
            )

    def turn_is_lost(self) -> None:
        if self.turns:
            turn_id = self.random.choice(list(self.turns))
            del self.turns[turn_id]
            self.send(TurnEnd, turn_id=turn_id, outcome=self.random.choice(("failed", "abandoned", "abandoned")))

    def turn_is_tried_again(self) -> None:
        if self.turns:
            turn_id = self.random.choice(list(self.turns))
            program_id = self.turns.pop(turn_id)
            self.send(TurnDue, turn_id)
            if turn_id not in self.driver.rejected_for:
                self.turn_arrives(program_id, turn_id)

    def program_ends(self) -> None:
        roll = self.random.random()
        if roll < 0.7:
            self.send(ProgramReleased, self.name(), None, self.random.choice(("", "success", "failure")))
        elif roll < 0.9:
            self.send(ProgramsReleased, (self.name(), self.name()))
        else:
            self.send(ProgramKilled, self.name())

    def time_passes(self) -> None:
        self.driver.passes(self.random.choice((5.0, 12.0, 25.0)))
        self.send(Tick)

    def replica_changes(self) -> None:
        replica_id, roll = self.replica(), self.random.random()
        if roll < 0.1:
            self.send(ReplicaDown, replica_id)
        elif roll < 0.25:
            self.send(ReplicaDraining, replica_id)
        elif roll < 0.3:
            self.send(ReplicaRemoved, replica_id)
        elif roll < 0.5:
            self.send(ReplicaTripped, replica_id, self.random.random() < 0.4)
        elif roll < 0.55:
            self.send(ReplicaFlushed, replica_id)
        else:
            self.send(ReplicaUp, replica_id, 2000)

    def replica_is_polled(self) -> None:
        replica_id, roll = self.replica(), self.random
        if roll.random() < 0.2:
            self.send(EncodesPolled, replica_id, roll.randrange(4))
        elif roll.random() < 0.2:
            self.send(ResidencyReported, replica_id, ((self.name(), roll.randrange(900)),))
        else:
            capacity_tokens = roll.choice((None, None, roll.randrange(800, 4000)))
            told = (roll.choice((None, round(roll.random(), 3))), roll.choice((None, roll.randrange(9000))))
            self.send(ReplicaPolled, replica_id, capacity_tokens, *told, roll.choice((None, 0, 1)), roll.random())

    def grants_stop_or_go_on(self) -> None:
        replica_id, cause = self.random.choice((None, *REPLICAS)), self.random.choice(("pause", "weights"))
        self.send(GrantsSuspended if self.random.random() < 0.4 else GrantsContinued, cause, replica_id)

    def operator_speaks(self) -> None:
        roll = self.random
        chosen = roll.random()
        if chosen < 0.4:
            scopes = (("all", ""), ("program", self.name()), ("group", "g"), ("tenant", "red"), ("class", "c"))
            scope, name = roll.choice(scopes)
            named = roll.sample(REPLICAS, roll.randrange(3))
            self.send(RouteSet, scope, name, tuple((replica_id, roll.choice((1.0, 2.5))) for replica_id in named))
        elif chosen < 0.6:
            self.send(PrioritySet, self.name(), roll.randrange(-2, 3), roll.choice((None, None, "r0")))
        elif chosen < 0.85:
            self.send(MigrationAsked, self.name(), self.replica())
        else:
            self.send(ReplicaKilled, self.replica())
            self.send(ProvisionAsked)
