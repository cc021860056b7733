"""The scheduler: `handle(event)` is the only way in, decisions are the only way out.

Theory of operation
===================
A turn needs a lease. `handle` is synchronous, so there is no lock and no race; it reads no clock, so the same events
always give the same decisions, on a server, in a simulation, and in a replay of yesterday's log.

Each event does three things, in this order:

1. *Book.* The turn, the program and the ledger take in what happened. Sums are kept by increments: before a program
   changes in phase, status, place or size its claim is taken out of its replica's account (`_lift`), afterwards it
   is put back (`_put`). Between the two, nothing else is looked at.
2. *Place.* If the event is a turn that could be placed anew, the policy is asked where (`place`). The scheduler
   checks the answer; None puts the program into the paused queue.
3. *Balance.* If the event may have freed room, or time has passed, the policy makes proposals (`balance`), each of
   which the view checks and has carried out at once (`view.py`).

Where a policy has an admission (`policies/parts.py`), a program that it does not let in waits outside the paused queue,
and the policy is asked where to place it only then. What a policy wants to hear it is told in signals (`signals.py`).
What an operator or a global policy does - routes, priorities, moves - is in `control.py`.

What the scheduler decides without asking a policy: a turn of a program that has a turn in flight is granted beside
it, unless the program leaves: then it is held until those end; an anonymous turn is granted on the least loaded
replica; programs leave a replica that is down at once, and one that is draining, or that failed a turn of theirs, at
the end of their turns in flight; the idle limit takes a claim, the forget limit a program; turns for which no
replica has been usable for longer than the limit are rejected. And it lets two kinds of turns in that the policy would
hold, whether there is room or not, where that costs least: one whose client would give up before long (`impatient.py`),
and one of a child whose parent holds a claim (`families.py`). A parent waits for its children, so they are to it what
its branches are: held behind a claim that is only given back when they are through, they would wait for ever.

While grants are suspended on a replica - its engine is paused, sleeps, or gets new weights - no policy sees it and
no limit takes anything there. Turns of programs that are active there are held where they are, if there is no other
replica that grants or one of their turns is in flight, and are granted there when grants go on: no policy has a say in
that, for nothing has changed. The clock of the idle and forget limits stands still while nothing is granted anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from thunderagent.programs.control import Control, engine_priority
from thunderagent.programs.decisions import (
    Decision,
    Grant,
    Hold,
    Mark,
    Pause,
    Reason,
    Reject,
    Release,
    Restore,
    Unmark,
)
from thunderagent.programs.events import (
    EncodesPolled,
    Event,
    GrantsContinued,
    GrantsSuspended,
    Media,
    PinnedTurnArrived,
    PrefixCut,
    ProgramJudged,
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
    ToolEnded,
    ToolStarted,
    TurnAbandoned,
    TurnArrived,
    TurnDue,
    TurnFailed,
    TurnFinished,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.families import Families, Family, family_of
from thunderagent.programs.impatient import Impatient
from thunderagent.programs.knowledge import LEAST_IDLE_LIMIT_S, Knowledge
from thunderagent.programs.ledger import Ledger
from thunderagent.programs.lifecycle import Phase, Status, Trigger
from thunderagent.programs.limits_clock import LimitsClock
from thunderagent.programs.paused_queue import PausedQueue
from thunderagent.programs.policies.base import Moment, Policy, ReplicaView, SandboxSums, least_loaded
from thunderagent.programs.policies.parts import Admission, EnginePriority, Observe
from thunderagent.programs.program import MAIN_BRANCH, Branch, Group, Program, Turn
from thunderagent.programs.replica import Replica
from thunderagent.programs.shares import Shares
from thunderagent.programs.signals import (
    GpuEnd,
    GpuFirstToken,
    GpuSubmit,
    ProgramEnd,
    Signal,
    ToolEnd,
    ToolNum,
    ToolStart,
)
from thunderagent.programs.table import ProgramTable
from thunderagent.programs.tenants import Tenants
from thunderagent.programs.verdicts import OUTCOMES, Level, Verdict
from thunderagent.programs.view import SchedulerView

FIRST_TOKENS_PER_BYTE_RATIO = 0.25
"""English text in a common tokenizer: four bytes a token. Used until the first usage says better."""

MOST_TOKENS_PER_BYTE_RATIO = 1.0
"""A token of a text has a byte at least. More is learned of its own program alone, whose client may have made it up."""

LEARNING_RATIO = 0.05
"""Weight of the newest turn in the learned tokens per byte of programs that are seen for the first time."""


MAX_HOPELESS_COUNT = 10_000
"""So many ids of programs that were ended as hopeless are remembered, the oldest forgotten first."""

REMOVED_COUNT = 1000
"""So many replicas that were removed are remembered."""

IN_DEMAND_RATIO = 0.8
"""A replica is in demand while others wait and so much of what may be claimed there is: then more may be tried."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits that hold whatever the policy is."""

    idle_limit_s: float | None = None
    """A program whose tool runs longer gives its claim back; its next turn is simply placed again.

    None is what was learned of its tool: long beyond the time in which nearly all return, and 300 s at least, but never
    more than half of the forget limit."""
    forget_limit_s: float = 1800.0
    """A program that was not heard of for longer is dropped from the table."""
    no_replica_limit_s: float = 60.0
    """Turns are held for so long while no replica is usable, then rejected."""
    patience_margin_s: float = 1.0
    """A turn whose client would give up gets its lease so long before, at least: for its answer."""
    patience_ratio: float = 0.25
    """The same as a part of its client's patience, where that is longer."""
    patience_overdraft_ratio: float = 0.5
    """How much more than its limit a replica may take of who is let in whether there is room or not, as a part of
    that; one program may exceed it where nothing is overdrawn."""
    max_programs_count: int = 100_000
    """Programs that may live at a time; past that the oldest without a turn are forgotten, then new ones rejected."""
    tenant_max_programs_count: int = 50_000
    """The same for each tenant."""
    fair_tenants: bool = False
    """Whether who waits goes by what its tenant had (`tenants.py`)."""
    tenant_weight_ratios: Mapping[str, float] = field(default_factory=dict)
    """How much more than others some may have; 1 for those that are not named."""
    judge_fail_count: int = 10
    """More verdicts of failure than this make a program's level the lowest: K_fail of ORBIT."""
    judge_confidence_ratio: float = 0.0
    """A verdict of failure counts as one if the judge is as sure of it."""
    judge_ends_hopeless: bool = False
    """Whether a program whose level becomes the lowest is ended."""
    provisions_replicas: bool = True
    """Whether somebody starts and ends replicas where a global policy wants it; else its proposals are refused."""


class Scheduler:
    """The single owner of the program table, the ledger, the paused queue and the replicas.

    Not thread-safe: one caller at a time. Cost of an event: O(log programs + replicas), besides a tick, which costs
    that for each program it pauses or restores, and the loss of a replica, the same for each program on it.
    """

    def __init__(self, policy: Policy, settings: SchedulerSettings | None = None) -> None:
        """Begin with no replica and no program."""
        self.policy = policy
        self._rules = policy.claim_rules
        self.settings = settings or SchedulerSettings()
        self.table = ProgramTable()
        self.ledger = Ledger(policy.claim_rules.half_life_s)
        self._admission: Admission | None = getattr(policy, "admission", None)
        self._priority: EnginePriority | None = getattr(policy, "priority", None)
        self._observe: Observe | None = getattr(policy, "observe", None)
        self._listeners: tuple[Callable[[Signal], None], ...] = ()
        self._emits = self._observe is not None
        self.tenants = Tenants(self.settings.tenant_weight_ratios) if self.settings.fair_tenants else None
        self.queue = PausedQueue(  # a policy sees a Program as a ProgramView
            policy.restore_rank, None if self._admission is None else self._admission.rank, self.tenants
        )
        self.admitted_count = 0
        """Programs that may begin, or began: all, where the policy has no admission."""
        self.replicas: dict[str, Replica] = {}
        self.turns: dict[int, Turn] = {}
        """Every turn that was not ended, by its id."""
        self.anonymous_held: dict[int, Turn] = {}
        self.active_count = 0
        self.knowledge = Knowledge()
        self.shares = Shares()
        self.groups: dict[tuple[str, str], Group] = {}
        """By tenant and id."""
        self.families = Families()
        self.impatient = Impatient(self.settings.patience_margin_s, self.settings.patience_ratio)
        self.changed_replicas: dict[str, Replica] = {}
        """On which programs came, went or changed in size since the policy was asked to balance."""
        self.previous_tick_s = self._now_s = 0.0
        self.sandboxes = SandboxSums()
        """As last measured."""
        self.hopeless_ids: dict[str, None] = {}
        """Programs that were ended because they were judged hopeless: turns of these are rejected."""
        self.suspended_for: dict[str, None] = {}
        """Causes for which nothing is granted on any replica; each replica sees them, and has its own beside them."""
        self._removed_ids: dict[str, None] = {}  # those removed last: what comes late of one does not bring it back
        self._open_replicas: list[Replica] = []
        self._granting_replicas: list[Replica] = []
        self._limits_clock = LimitsClock()
        self._new_parents: list[Family] = []
        """Families whose parents got a claim in this event."""
        self._no_replica_since_s: float | None = None
        self._tokens_per_byte_ratio = FIRST_TOKENS_PER_BYTE_RATIO
        self._decisions: list[Decision] = []
        self._active_before_count = 0
        """Active programs before this event."""
        self._some_encode = False  # until a replica tells how many images it has yet to encode
        self._view = SchedulerView(self)
        self.control = Control(self)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ProgramOpened: self._program_opened,
            TurnArrived: self._turn_arrived,
            PinnedTurnArrived: self._pinned_turn_arrived,
            TurnStarted: self._turn_started,
            TurnProgressed: self._turn_progressed,
            TurnFinished: self._turn_finished,
            TurnFailed: self._turn_lost,
            TurnAbandoned: self._turn_lost,
            ProgramReleased: self._program_released,
            ProgramsReleased: self._programs_released,
            ProgramJudged: self._program_judged,
            ReplicaUp: self._replica_up,
            ReplicaDown: self._replica_down,
            ReplicaDraining: self._replica_draining,
            ReplicaRemoved: self._replica_removed,
            GrantsSuspended: self._grants_suspended,
            GrantsContinued: self._grants_continued,
            ReplicaFlushed: self._replica_flushed,
            ReplicaTripped: self._replica_tripped,
            ReplicaPolled: self._replica_polled,
            EncodesPolled: self._encodes_polled,
            ResidencyReported: self._residency_reported,
            ToolStarted: self._tool_started,
            ToolEnded: self._tool_ended,
            SandboxReady: self._sandbox_ready,
            SandboxFailed: self._sandbox_failed,
            SandboxesMeasured: self._sandboxes_measured,
            TurnDue: lambda _: None,  # who must have its lease gets it after every event
            Tick: self._tick,
            **self.control.handlers(),
        }

    def __repr__(self) -> str:
        return f"<Scheduler {self.policy.name}: {len(self.table)} programs, {self.queue!r}, {self._open_replicas}>"

    @property
    def now_s(self) -> float:
        """Monotonic seconds of the last event."""
        return self._now_s

    @property
    def open_replicas(self) -> Sequence[Replica]:
        """Replicas on which a program may get a claim, now or when grants go on."""
        return self._open_replicas

    @property
    def granting_replicas(self) -> Sequence[Replica]:
        """Those of them on which grants are not suspended: what a policy sees."""
        return self._granting_replicas

    def handle(self, event: Event) -> list[Decision]:
        """Take in one event and return what follows from it, in the order in which it was decided.

        An event that is older than the last one is taken to be as old as that one. An event about a turn or a
        replica that is not known, or no longer, changes nothing.
        """
        self._now_s = max(self._now_s, event.now_s)
        if self.tenants is not None:
            self.tenants.advance(self._now_s)
        decisions = self._decisions = []
        self._active_before_count = self.active_count
        self._handlers[type(event)](event)
        if self.impatient:
            self._grant_impatient()
        if self._new_parents:
            self._restore_children()
        if self.tenants is not None:
            self.tenants.event_ended()
        self.knowledge.restore_pace.settle(self._now_s, waiting=self._somebody_may_be_restored())
        return decisions

    def _somebody_may_be_restored(self) -> bool:
        """Say whether a program with a turn waits for room or admission, and not for a replica that grants nothing."""
        queue, granting = self.queue, self._granting_replicas
        if queue.reasoning or queue.outside:
            return bool(granting)
        return queue.bound_count > 0 and any(replica.replica_id in queue.bound for replica in granting)

    @property
    def view(self) -> SchedulerView:
        """What policies see."""
        return self._view

    def decide(self, decision: Decision) -> None:
        """Add a decision to those on this event. For the control, as are the next two."""
        self._decisions.append(decision)

    def balance(self, moment: Moment) -> None:
        """Have those restored for whom there may be room."""
        self._balance(moment)

    def terminate(self, program: Program, reason: Reason) -> None:
        """End a program."""
        self._terminate(program, reason)

    @property
    def place_is_free(self) -> bool:
        """Whether a program lost its claim in this event and no other got one: places may be shared by all replicas."""
        return self.active_count < self._active_before_count

    @property
    def has_admission(self) -> bool:
        """Whether programs may have to wait outside the paused queue."""
        return self._admission is not None

    @property
    def admission_name(self) -> str:
        """The word for what lets programs into the paused queue; empty where all are let in."""
        return self._admission.name if self._admission is not None else ""

    def listen(self, listener: Callable[[Signal], None]) -> Callable[[], None]:
        """Have `listener` called with each signal as it is made; return what ends that."""
        self._listeners = (*self._listeners, listener)
        self._emits = True

        def stop() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            self._emits = self._observe is not None or bool(self._listeners)

        return stop

    def signal(self, signal: Signal) -> None:
        """Give a signal to the policy and to who listens. Ask `_emits` before one is made that nobody may want."""
        if self._observe is not None:
            self._observe(self._view, signal)
        for listener in self._listeners:
            listener(signal)

    def _signal_tools(self) -> None:
        self.signal(ToolNum(self._now_s, self.knowledge.tools_running_count, self.knowledge.mean_tool_s))

    # --- turns ------------------------------------------------------------------------------------------------------

    def _turn_arrived(self, event: TurnArrived) -> None:
        assert event.turn_id not in self.turns, f"turn {event.turn_id} arrives twice"
        earlier = self.turns.get(event.supersedes_id) if event.supersedes_id is not None else None
        if event.program_id is None:
            self._anonymous_turn_arrived(event)
        else:
            if earlier is not None and self._keeps_its_program_from_going(earlier, event):
                self._drop_turn(earlier, "superseded")
            self._turn_of_program_arrived(event, event.program_id, earlier)
        if earlier is not None and earlier.turn_id in self.turns:  # so late that its program gives nothing up before
            self._drop_turn(earlier, "superseded")

    def _keeps_its_program_from_going(self, earlier: Turn, event: TurnArrived) -> bool:
        """Say whether an attempt is in flight where its program, whose next attempt comes, is not to stay."""
        program = earlier.program
        if program is None or program.program_id != event.program_id or earlier.turn_id not in program.in_flight:
            return False
        return program.marked or self._can_avoid(program, event.avoid_replica_id)

    def _can_avoid(self, program: Program, replica_id: str | None) -> bool:
        """Say whether that is the replica of an active program, which could go on elsewhere."""
        if replica_id is None or replica_id != program.replica_id:
            return False
        return any(candidate.replica_id != replica_id for candidate in self._candidates(replica_id, program))

    def _turn_of_program_arrived(self, event: TurnArrived, program_id: str, earlier: Turn | None) -> None:
        program = self.table.get(program_id)
        if program is None and program_id in self.hopeless_ids:
            self._decisions.append(Reject(event.turn_id, program_id, Reason.HOPELESS))
            return
        if program is None:
            if not self._has_place(event.tenant):
                self._decisions.append(Reject(event.turn_id, program_id, Reason.TOO_MANY_PROGRAMS))
                return
            program = self._open(event, program_id)
        elif program.announced:
            if event.tenant and not program.tenant and not self._has_place(event.tenant, opens=False):
                self._decisions.append(Reject(event.turn_id, program_id, Reason.TOO_MANY_PROGRAMS))
                return
            self._announced_begins(program, event)
        elif program.tool_runs:
            self._tool_returned(program)
        if self.control.routes:
            self.control.bind(program)
        turn = self._new_turn(event, program, earlier)
        self._measure_media(turn, event.media)
        turn.prompt_tokens = program.estimate_prompt_tokens(turn, self._tokens_per_byte_ratio)
        self.turns[turn.turn_id] = turn
        branch = program.branch_of(turn, event.parent_branch_id)
        if self._rules.share_prefixes and event.prefix:
            self._set_prefix(program, branch, event.prefix)
        self._place_turn(program, turn, event, earlier)

    def _place_turn(self, program: Program, turn: Turn, event: TurnArrived, earlier: Turn | None) -> None:
        """Grant a turn where its program has others in flight, place its program anew, or hold it where that is."""
        suspended = self._is_suspended(program)
        wanted_here = event.wanted_replica_id is not None and event.wanted_replica_id == program.replica_id
        if program.in_flight and not wanted_here and self._can_avoid(program, event.avoid_replica_id):
            self.mark(program, Reason.TURN_FAILED)
        if program.marked:
            self._hold_in_place(program, turn, Reason.LEAVING)
        elif suspended and (program.in_flight or wanted_here or not self._granting_replicas):
            self._hold_in_place(program, turn, Reason.SUSPENDED)
        elif program.in_flight:
            self._grant_beside(program, turn)
        else:
            self._place(program, turn, event.avoid_replica_id, earlier)

    def _announced_begins(self, program: Program, event: TurnArrived) -> None:
        """Take in what the first turn of a program says that was announced without it."""
        program.announced = False
        program.opened_s = self._now_s
        if event.tenant and not program.tenant:
            group = program.group
            self.families.leave(program)
            self._leave_group(program)
            self.table.name_tenant(program, event.tenant)
            self.families.join(program, program.parent_id)
            program.group = None
            if group is not None:
                self._join_group(program, group.group_id)
        if program.group is None:
            self._join_group(program, event.group_id)
        if not program.parent_id:
            self.families.join(program, event.parent_id)
        program.program_class = program.program_class or event.program_class

    def _new_turn(self, event: TurnArrived, program: Program, earlier: Turn | None) -> Turn:
        """Return the turn that arrived, with the age of the attempt that it takes the place of."""
        turn = Turn(event.turn_id, program, event.branch_id, event.prompt_bytes, self._now_s)
        turn.wanted_replica_id = event.wanted_replica_id
        turn.avoid_replica_id = event.avoid_replica_id
        turn.role = event.role or event.branch_id
        turn.expected_output_tokens = self.knowledge.role_outputs.expected_tokens(turn.role)
        if event.deadline_s is not None:
            turn.deadline_s = event.deadline_s
        if event.supersedes_id is not None and event.supersedes_id in program.lost_turn_ids:
            program.lost_turn_ids.remove(event.supersedes_id)
            program.turn_count -= 1  # both are one turn
        elif earlier is not None and earlier.program is program:
            program.turn_count -= earlier.account_id is not None or earlier.turn_id in program.lost
        if earlier is not None and earlier.program is program:
            turn.waiting_since_s = earlier.waiting_since_s
        elif event.waiting_since_s is not None:
            turn.waiting_since_s = min(event.waiting_since_s, self._now_s)
        return turn

    def _grant_beside(self, program: Program, turn: Turn) -> None:
        """Grant a turn of a program that has one in flight, where that one is."""
        self._lift(program)
        program.advance(Trigger.TURN_ARRIVED)
        self._begin_flight(program, turn)
        self._measure_claim(program)
        self._book_residency(program)
        self._put(program)
        self._grant(program, turn, Reason.HOME)

    def _grant(self, program: Program, turn: Turn, reason: Reason) -> None:
        """Say that a turn, which is in flight by now, has its lease."""
        program.granted_output_tokens = turn.expected_output_tokens
        priority = None if self._priority is None else self._priority.engine_priority(self._view, program)
        replica_id = program.replica_id or ""
        if program.priority or program.priority_by_replica is not None:
            priority = engine_priority(program, replica_id, priority)
        self._decisions.append(Grant(turn.turn_id, program.program_id, replica_id, reason, priority))

    def _place(self, program: Program, turn: Turn, avoid_replica_id: str | None, earlier: Turn | None) -> None:
        """Ask the policy where a program may go on whose first turn in a while has come."""
        self._lift(program)
        self.table.acting_ends(program)
        program.advance(Trigger.TURN_ARRIVED)  # ranked, when the policy compares it, as one that waits
        program.held[turn.turn_id] = turn
        if earlier is not None and program.held.pop(earlier.turn_id, None) is not None:
            del self.turns[earlier.turn_id]  # else it would be granted with the one that takes its place
            self._wait_ends(program, earlier)
        self._measure_claim(program)
        if not program.admitted:
            if not self._parent_holds_a_claim(program):
                self._hold_outside(program, turn)
                return
            program.admitted = True  # its parent may wait for it
            self.admitted_count += 1
        destination, reason = self.control.take_destination(program)
        if destination is not None:
            self._to_paused_reasoning(program, turn, reason)
            self.restore(program, destination, reason)
            return
        target, reason = self._find_replica(program, avoid_replica_id)
        if target is None:
            self._hold(program, turn, reason)
            return
        home = program.replica_id if program.status is Status.ACTIVE else None
        if home == target.replica_id:
            del program.held[turn.turn_id]
            self._begin_flight(program, turn)
            self._book_residency(program)
            if program.acting_since_s > target.flushed_s:
                turn.kept_since_s = program.acting_since_s
                turn.kept_tokens = min(turn.prompt_tokens, program.branches[turn.branch_id].prompt_tokens)
            self._put(program)
            self._grant(program, turn, reason)
            return
        self._to_paused_reasoning(program, turn, Reason.MOVED)
        self.restore(program, target, reason)

    def _hold(self, program: Program, turn: Turn, reason: Reason) -> None:
        self._to_paused_reasoning(program, turn, reason)
        self._put(program)
        program.hold_reason = reason
        self.impatient.add(turn)
        self.control.begins_to_wait(program)
        program.note(self._now_s, "hold", reason, None)
        self._decisions.append(Hold(turn.turn_id, program.program_id, reason))

    def _hold_outside(self, program: Program, turn: Turn) -> None:
        """Let a turn wait whose program is not admitted, unless it is now."""
        self._to_paused_reasoning(program, turn, Reason.ADMISSION)
        self._put(program)
        program.hold_reason = Reason.ADMISSION
        self.impatient.add(turn)
        self._admit(Moment.TURN_ARRIVED)
        if turn.turn_id not in program.held:
            return
        if not self._granting_replicas:
            program.hold_reason = Reason.SUSPENDED if self._open_replicas else Reason.NO_REPLICA
        program.note(self._now_s, "hold", program.hold_reason, None)
        self._decisions.append(Hold(turn.turn_id, program.program_id, Reason(program.hold_reason)))

    def _hold_in_place(self, program: Program, turn: Turn, reason: Reason) -> None:
        """Hold a turn of an active program where that is: it leaves, or nothing is granted there at the moment."""
        self._lift(program)
        program.held[turn.turn_id] = turn
        self.table.acting_ends(program)
        program.advance(Trigger.TURN_ARRIVED)
        self._measure_claim(program)
        self._put(program)
        program.hold_reason = reason
        if reason is Reason.LEAVING:
            self.impatient.add(turn)
        program.note(self._now_s, "hold", reason, program.replica_id)
        self._decisions.append(Hold(turn.turn_id, program.program_id, reason))

    def _to_paused_reasoning(self, program: Program, turn: Turn, reason: Reason) -> None:
        """Make a program whose claim was lifted, and one of whose turns is held, PAUSED."""
        program.idle = False
        if program.status is Status.ACTIVE:
            self._leave_replica(program, Trigger.PAUSE, reason)
        else:
            self.ledger.wait_begins(turn.arrived_s)

    def _begin_flight(self, program: Program, turn: Turn) -> None:
        """Put a turn in flight on its program's replica; the program's claim must be lifted, and may be stale after."""
        replica = self.replicas[program.replica_id or ""]
        self.ledger.settle(replica.account, self._now_s)
        turn.account_id = program.replica_id
        turn.granted_s, turn.granted_flight_s = self._now_s, replica.account.flight_s
        turn.resident_tokens = min(turn.prompt_tokens, self.resident_tokens(program, replica.replica_id))
        if self._emits:
            projected_tokens = turn.prompt_tokens + program.reserve_tokens
            held_s = self._now_s - turn.arrived_s
            ids = program.program_id, turn.turn_id, replica.replica_id
            self.signal(GpuSubmit(self._now_s, *ids, projected_tokens, held_s))
        program.in_flight[turn.turn_id] = turn
        program.turn_count += 1
        replica.account.turn_granted()

    def _book_residency(self, program: Program) -> None:
        """Note what of a program its turns in flight have in memory; its claim must have been measured with them."""
        residency = self.replicas[program.replica_id or ""].residency
        residency.use(program.generation, self.shares.own_tokens(program, program.claim_tokens))

    def _anonymous_turn_arrived(self, event: TurnArrived) -> None:
        turn = Turn(event.turn_id, None, MAIN_BRANCH, event.prompt_bytes, self._now_s)
        self._measure_media(turn, event.media)
        wanted = self.replicas.get(event.wanted_replica_id or "")
        if wanted is not None and wanted.open_to_programs:
            turn.pinned_replica_id = wanted.replica_id
            self._place_anonymous(turn, [] if wanted.suspended_for else [wanted])
            return
        self._place_anonymous(turn, self._candidates(event.avoid_replica_id))

    def _pinned_turn_arrived(self, event: PinnedTurnArrived) -> None:
        replica = self.replicas.get(event.replica_id)
        if replica is None or not replica.up:
            self._decisions.append(Reject(event.turn_id, None, Reason.NO_REPLICA))
            return
        turn = Turn(event.turn_id, None, MAIN_BRANCH, event.prompt_bytes, self._now_s)
        self._measure_media(turn, event.media)
        turn.pinned_replica_id = event.replica_id
        self._place_anonymous(turn, [] if replica.suspended_for else [replica])

    def _place_anonymous(self, turn: Turn, candidates: Sequence[Replica]) -> None:
        turn.claim_tokens = int(turn.prompt_bytes * self._tokens_per_byte_ratio) + turn.media_tokens
        self.turns[turn.turn_id] = turn
        if candidates:
            self._grant_anonymous(turn, candidates)
        else:
            self.anonymous_held[turn.turn_id] = turn
            self.ledger.wait_begins(self._now_s)
            suspended = bool(self._open_replicas or turn.pinned_replica_id)
            self._decisions.append(Hold(turn.turn_id, None, Reason.SUSPENDED if suspended else Reason.NO_REPLICA))

    def _grant_anonymous(self, turn: Turn, candidates: Sequence[Replica]) -> None:
        replica_id = least_loaded(candidates).replica_id
        account = self.replicas[replica_id].account
        self.ledger.settle(account, self._now_s)
        account.other_tokens += turn.claim_tokens
        account.turn_granted()
        turn.account_id = replica_id
        turn.granted_s, turn.granted_flight_s = self._now_s, account.flight_s
        self._decisions.append(Grant(turn.turn_id, None, replica_id, Reason.ANONYMOUS))

    def _turn_started(self, event: TurnStarted) -> None:
        turn = self.turns.get(event.turn_id)
        if turn is not None and turn.account_id is not None and turn.started_s is None:
            turn.started_s = self._now_s
            self._engine_began(turn)
            if self._emits and turn.program is not None:
                delay_s = self._now_s - turn.granted_s
                self.signal(GpuFirstToken(self._now_s, turn.program.program_id, turn.turn_id, turn.account_id, delay_s))

    def _engine_began(self, turn: Turn) -> None:
        """Note what its engine should have found cached of a turn, when it began it."""
        if not turn.disturbed:
            self.replicas[turn.account_id or ""].control.turn_seen(
                turn.kept_tokens,
                max(0, turn.resident_tokens - turn.kept_tokens),
                granted_s=turn.granted_s,
                kept_since_s=turn.kept_since_s,
                now_s=self._now_s,
            )

    def _turn_progressed(self, event: TurnProgressed) -> None:
        turn = self.turns.get(event.turn_id)
        if turn is None or turn.program is None or turn.account_id is None:
            return
        program = turn.program
        self._lift(program)
        turn.output_tokens = max(turn.output_tokens, event.output_tokens)
        self._measure_claim(program)
        self._put(program)

    def _turn_finished(self, event: TurnFinished) -> None:
        turn = self.turns.pop(event.turn_id, None)
        if turn is None:
            return
        prompt_tokens = turn.prompt_tokens if event.prompt_tokens is None else event.prompt_tokens
        output_tokens = turn.output_tokens if event.output_tokens is None else event.output_tokens
        program = turn.program
        branch = program.branches.get(turn.branch_id) if program is not None else None
        if turn.account_id is not None:
            account = self.replicas[turn.account_id].account
            self.ledger.charge_turn(
                account,
                turn,
                self._now_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=event.cached_tokens,
                known_tokens=min(prompt_tokens, branch.context_tokens) if branch is not None else 0,
                prefill_token_s=self.knowledge.prefill_speed.learned_token_s,
            )
            self._learn_from(turn, branch, prompt_tokens, output_tokens, event.cached_tokens)
        if event.prompt_tokens is not None and turn.prompt_bytes:
            self._learn_size(turn, branch, event.prompt_tokens)
        if program is None:
            self._end_without_program(turn)
            self._balance(Moment.TURN_ENDED)
            return
        self._lift(program)
        if self._emits:
            cached_tokens = turn.resident_tokens if event.cached_tokens is None else event.cached_tokens
            whole_tokens = prompt_tokens + output_tokens
            self._signal_end(turn, whole_tokens, whole_tokens - min(prompt_tokens, cached_tokens), finished=True)
        if branch is not None:
            branch.learn(prompt_tokens, output_tokens)
            branch.turn_finished(event.tool)
        program.prompt_tokens_total += prompt_tokens
        program.output_tokens_total += output_tokens
        program.cached_tokens_total += event.cached_tokens or 0
        program.tool, program.tool_named = event.tool, bool(event.tool)
        self._end_turn(program, turn)
        if len(program.branches) > 1:
            self._forget_branches(program, turn, finished=True)
        self._after_turn(program, turn, "finished", tool_begins=not turn.disturbed)
        self._balance(Moment.TURN_ENDED)

    def _learn_size(self, turn: Turn, branch: Branch | None, prompt_tokens: int) -> None:
        """Learn how many tokens the bytes of a prompt are, or, where it has media, what these are beside its text."""
        if turn.media:
            known_ratio = branch.tokens_per_byte_ratio if branch is not None else None
            text_tokens = turn.prompt_bytes * (known_ratio or self._tokens_per_byte_ratio)
            self.knowledge.media_sizes.learn(turn.media, prompt_tokens - text_tokens)
            return
        ratio = prompt_tokens / turn.prompt_bytes
        usual_ratio = min(ratio, MOST_TOKENS_PER_BYTE_RATIO)
        self._tokens_per_byte_ratio += LEARNING_RATIO * (usual_ratio - self._tokens_per_byte_ratio)
        if branch is not None:
            branch.tokens_per_byte_ratio = ratio

    def _measure_media(self, turn: Turn, media: Media) -> None:
        if media:
            turn.media, turn.media_tokens = media, self.knowledge.media_sizes.tokens(media)

    def _learn_from(
        self, turn: Turn, branch: Branch | None, prompt_tokens: int, output_tokens: int, cached_tokens: int | None
    ) -> None:
        """Learn from a turn in flight that finished, and what of it was lost."""
        if turn.disturbed:
            return
        replica = self.replicas[turn.account_id or ""]
        if cached_tokens is None:
            cached_tokens = max(turn.resident_tokens, turn.kept_tokens)
            if turn.started_s is None:
                self._engine_began(turn)
        else:
            replica.tells_cached = True
            replica.control.turn_ended(min(turn.kept_tokens, prompt_tokens), cached_tokens, turn.kept_since_s)
            replica.control.computed(prompt_tokens - cached_tokens + output_tokens)
        if branch is not None:
            self.knowledge.turn_finished(
                turn,
                branch,
                self._now_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
            )

    def _turn_lost(self, event: TurnFailed | TurnAbandoned) -> None:
        """End a turn from which nothing is learned: held or in flight, failed or left by its client."""
        turn = self.turns.get(event.turn_id)
        if turn is not None:
            how = "abandoned" if isinstance(event, TurnAbandoned) else "refused" if event.refused else "failed"
            self._drop_turn(turn, how)
            self._balance(Moment.TURN_ENDED)

    def _drop_turn(self, turn: Turn, outcome: str) -> None:
        """End a turn that leaves no usage."""
        del self.turns[turn.turn_id]
        program = turn.program
        if program is None:
            self._end_without_program(turn)
            return
        self._lift(program)
        if self._emits:
            self._signal_lost(turn)
        if outcome != "superseded" and turn.turn_id not in program.held:
            program.lost_turn_ids.append(turn.turn_id)
        self._end_turn(program, turn)
        if len(program.branches) > 1:
            self._forget_branches(program, turn, finished=False)
        self._after_turn(program, turn, outcome)

    def _signal_end(self, turn: Turn, freed_tokens: int, computed_tokens: int, *, finished: bool) -> None:
        if turn.account_id is None or turn.program is None:
            return
        program_id, served_s = turn.program.program_id, self._now_s - turn.granted_s
        self.signal(
            GpuEnd(
                self._now_s,
                program_id,
                turn.turn_id,
                turn.account_id,
                freed_tokens,
                computed_tokens,
                served_s,
                finished,
            )
        )

    def _signal_lost(self, turn: Turn) -> None:
        """Signal the end of a turn that leaves no usage: what it computed is a guess."""
        whole_tokens = turn.prompt_tokens + turn.output_tokens
        self._signal_end(turn, whole_tokens, whole_tokens - turn.resident_tokens, finished=False)

    def _end_turn(self, program: Program, turn: Turn) -> None:
        """Take an ended turn out of its program, whose claim must be lifted."""
        program.lost.pop(turn.turn_id, None)
        if program.held.pop(turn.turn_id, None) is not None:
            self._wait_ends(program, turn)
        elif program.in_flight.pop(turn.turn_id, None) is not None:
            replica = self.replicas[turn.account_id or ""]
            replica.account.turn_count -= 1
            if not program.in_flight:
                replica.residency.leave(program.generation, self.shares.own_tokens(program, program.context_tokens))

    def _after_turn(self, program: Program, turn: Turn, outcome: str, *, tool_begins: bool = False) -> None:
        """Put a program back after one of its turns ended, and pause it if it was marked."""
        why = f"calls {program.tool}" if program.tool and outcome == "finished" else ""
        program.note(self._now_s, outcome, why, program.replica_id, turn.granted_s or None)
        if program.phase is Phase.REASONING and not program.in_flight and not program.held:
            program.advance(Trigger.TURNS_ENDED)
            program.acting_since_s = self._now_s
            self._limits_begin(program)
            if tool_begins:
                self._tool_began(program)
            program.hold_until_s = self._now_s + self.policy.hold_s(self._view, program)
            # Its only turns were held and left: there is no memory to restore it to until another turn comes.
            program.idle = program.status is Status.PAUSED and program.context_tokens == 0
        self._measure_claim(program)
        self._put(program)
        if program.marked and not program.in_flight:
            self._leave(program)
        elif program.marked:
            self._settle_mark(program)

    def _leave(self, program: Program) -> None:
        """Have a marked program go whose turns in flight have ended, with the turns that came meanwhile."""
        avoid_replica_id = program.replica_id if Reason.TURN_FAILED in program.leaves_for else None
        destination, reason = self.control.take_destination(program)
        self.pause(program, Reason.MARKED)
        if destination is None and program.held:
            destination, reason = self._find_replica(program, avoid_replica_id)
            program.hold_reason = reason
        if destination is not None:
            self.restore(program, destination, reason)

    def _end_without_program(self, turn: Turn) -> None:
        if self.anonymous_held.pop(turn.turn_id, None) is not None:
            self.ledger.wait_ends(self._now_s)
        elif turn.account_id is not None:
            account = self.replicas[turn.account_id].account
            self.ledger.settle(account, self._now_s)
            account.other_tokens -= turn.claim_tokens
            account.turn_count -= 1

    def _wait_ends(self, program: Program, turn: Turn) -> None:
        """Note that a turn is held no longer; one that was held in place did not wait for room."""
        program.held_s_total += self._now_s - turn.arrived_s
        self.impatient.discard(turn)
        if program.status is Status.PAUSED:
            self.ledger.wait_ends(self._now_s)

    # --- turns that are let in whether there is room or not ---------------------------------------------------------

    def _grant_impatient(self) -> None:
        """Let in who is held and whose client would give up; where too much would be claimed, tell it so at once.

        So it is told where its program leaves a replica: the turns in flight there may well outlast its client.
        """
        while self._granting_replicas and (turn := self.impatient.first_due(self._now_s)) is not None:
            program = turn.program
            assert program is not None, f"{turn} is held for its program"
            leaving = program.status is Status.ACTIVE
            overdrawable = [] if leaving else self._overdrawable(program, self._open_to(program))
            if overdrawable:
                self.restore(program, self._cheapest(program, overdrawable), Reason.PATIENCE)
            else:
                reason = Reason.LEAVING if leaving else Reason.OVERDRAWN
                self._decisions.append(Reject(turn.turn_id, program.program_id, reason))
                self._drop_turn(turn, "rejected")

    def _find_replica(self, program: Program, avoid_replica_id: str | None) -> tuple[Replica | None, Reason]:
        """Ask the policy where a program with a turn may be active now; if nowhere, return why not."""
        wanted = self._wanted_by(program)
        candidates = self._candidates(avoid_replica_id, program) if wanted is None else [wanted]
        if not candidates and self._parent_holds_a_claim(program):
            candidates = self._open_to(program)
        if not candidates:
            return None, Reason.SUSPENDED if self._open_replicas else Reason.NO_REPLICA
        target, reason = self._place_among(candidates, program)
        if target is not None and target not in candidates and program.bound_to is not None:
            target = candidates[0]
        return target, reason

    def _place_among(self, candidates: Sequence[Replica], program: Program) -> tuple[Replica | None, Reason]:
        """Return where a program may be active now, or its parent's claim lets it in; if nowhere, why.

        Of replicas where it fits, one with fewer images to encode comes first: they are encoded one after the other.
        """
        nearer = self._nearer_to_encode(candidates, program) if self._some_encode else ()
        replica, reason = self.policy.place(self._view, program, nearer or candidates)
        if nearer and reason is not Reason.FITS:
            replica, reason = self.policy.place(self._view, program, candidates)
        target = self.open_replica(replica)
        if target is None and self._parent_holds_a_claim(program):
            overdrawable = self._overdrawable(program, candidates)
            if overdrawable:
                return self._cheapest(program, overdrawable), Reason.PARENT
            self.families.overdrawn[family_of(program)] = None
        return target, reason

    def _overdrawable(self, program: Program, candidates: Sequence[Replica]) -> list[Replica]:
        """Return the replicas that may take a program whether there is room or not."""
        wanted, ratio = self._wanted_by(program), self.settings.patience_overdraft_ratio
        able = candidates if wanted is None else [wanted]
        return [replica for replica in able if replica.may_overdraw(program.claim_tokens, ratio)]

    def _nearer_to_encode(self, candidates: Sequence[Replica], program: Program) -> Sequence[Replica]:
        """Return the candidates with the fewest images to encode, if they are not all, and the program's last one.

        Only where the program fits beside what is claimed: nobody gives up memory for it.
        """
        if program.status is Status.ACTIVE:
            return ()
        counts = [replica.account.pending_encode_count or 0 for replica in candidates]
        fewest = min(counts)
        if fewest == max(counts):
            return ()
        return [
            each
            for each, count in zip(candidates, counts, strict=True)
            if (count == fewest or each.replica_id == program.replica_id)
            and each.account.demand_tokens + program.claim_tokens <= each.account.limit_tokens
        ]

    def _parent_holds_a_claim(self, program: Program) -> bool:
        """Say whether a program must be let in because its parent, of the same tenant, may wait for it.

        Where tenants have shares, only one child of each parent at a time: its siblings wait for it, too.
        """
        parent = self.table.get(program.parent_id) if program.parent_id else None
        if parent is None or parent.status is not Status.ACTIVE or parent.tenant != program.tenant:
            return False
        return self.tenants is None or not self.families.active_count(family_of(program))

    def _restore_children(self) -> None:
        """Let in children whose turns are held although their parent holds a claim now, and their children."""
        while self._new_parents:
            family = self._new_parents.pop()
            if self.tenants is None:
                children = self.families.held_children(family)
            else:
                first = self.families.first_held_child(family)
                children = [] if first is None else [first]
            for child in children:
                waits = child.status is Status.PAUSED and self._parent_holds_a_claim(child)
                if not (waits and self._granting_replicas):
                    continue
                if overdrawable := self._overdrawable(child, self._open_to(child)):
                    self.restore(child, self._cheapest(child, overdrawable), Reason.PARENT)
                else:
                    self.families.overdrawn[family] = None

    def _cheapest(self, program: Program, candidates: Sequence[Replica]) -> Replica:
        """Return where a program costs least that fits nowhere: most of it lies there, least is claimed in excess."""

        def cost(replica: Replica) -> tuple[float, float, int, int]:
            account = replica.account
            resident_tokens = min(program.claim_tokens, self.resident_tokens(program, replica.replica_id))
            excess_tokens = max(0.0, account.demand_tokens + program.claim_tokens - account.limit_tokens)
            return -resident_tokens, excess_tokens, account.turn_count, account.demand_tokens

        return min(candidates, key=cost)

    # --- groups and prefixes ----------------------------------------------------------------------------------------

    def _join_group(self, program: Program, group_id: str) -> None:
        if not group_id:
            return
        group = program.group = self.groups.setdefault((program.tenant, group_id), Group(program.tenant, group_id))
        last = group.last
        group.programs[program.program_id] = program
        if last is not None:
            self._rank_anew(last)

    def _leave_group(self, program: Program) -> None:
        group = program.group
        if group is None:
            return
        del group.programs[program.program_id]
        group.some_ended = True
        if not group.programs:
            del self.groups[group.tenant, group.group_id]
        elif group.last is not None:
            self._rank_anew(group.last)

    def _rank_anew(self, program: Program) -> None:
        """Put an active program in its place again that became the last of its group, or is it no longer."""
        if program.status is Status.ACTIVE:
            self._lift(program)
            self._put(program)

    def _set_prefix(self, program: Program, branch: Branch, cuts: Sequence[PrefixCut]) -> None:
        account = None
        if program.status is Status.ACTIVE:
            account = self.replicas[program.replica_id or ""].account
            self.ledger.settle(account, self._now_s)
        ratio = branch.tokens_per_byte_ratio or self._tokens_per_byte_ratio
        self.shares.set_prefix(program, branch, cuts, ratio, account)
        if branch.tokens_per_byte_ratio is not None:  # the size of what is shared was a guess before
            for replica_id, tokens in self.shares.tree.resize(branch.prefix).items():
                account = self.replicas[replica_id].account
                self.ledger.settle(account, self._now_s)
                account.shared_tokens += tokens

    def _forget_branches(self, program: Program, ended: Turn, *, finished: bool) -> None:
        """Drop side branches of a program, whose claim is lifted, that are not used again."""
        forgotten = program.forget_ended_branches(ended, finished=finished)
        if forgotten and program.status is Status.ACTIVE:
            self.shares.leave(program, self.replicas[program.replica_id or ""].account, forgotten)

    def resident_tokens(self, program: Program, replica_id: str) -> int:
        """Return how many tokens of a program are expected to lie in a replica's memory."""
        own_tokens = self.replicas[replica_id].residency.resident_tokens(program.generation)
        return own_tokens + self.shares.tokens_on(program, replica_id)

    # --- the claim of a program -------------------------------------------------------------------------------------

    def _measure_claim(self, program: Program) -> None:
        self.knowledge.measure_claim(program, self._rules)

    def _lift(self, program: Program) -> None:
        """Take a program's claim out of its account, and the program out of the orders that its claim ranks it in."""
        if program.status is not Status.ACTIVE:
            return
        replica = self.replicas[program.replica_id or ""]
        account = replica.account
        self.changed_replicas[replica.replica_id] = replica
        self.ledger.settle(account, self._now_s)
        account.growth_tokens -= program.growth_tokens
        if self.tenants is not None:
            self.tenants.claims(program.tenant, -program.claim_tokens)
        if program.phase is Phase.REASONING:
            account.reasoning_tokens -= program.claim_tokens
            account.reasoning_count -= 1
            if program.marked:
                account.marked_tokens -= program.claim_tokens
                replica.marked.discard(program)
            else:
                replica.reasoning.discard(program)
        else:
            account.acting_tokens -= program.claim_tokens
            account.acting_count -= 1
            account.acting.remove(program.claim_tokens, program.acting_since_s, self._now_s)
            replica.acting.discard(program)
            replica.expiring.discard(program)
            self.table.acting_with_limit.discard(program)

    def _put(self, program: Program) -> None:
        """Put a program where its status and phase say: into its replica's account, or into the paused queue."""
        if program.status is Status.PAUSED:
            if program.idle:
                self.queue.remove(program)
            else:
                self.queue.put(program)
            if self._admission is not None and program.admitted and program.phase is Phase.ACTING:
                self._watch_for_idleness(program)  # it has no claim, but keeps others out
            return
        replica = self.replicas[program.replica_id or ""]
        account = replica.account
        self.changed_replicas[replica.replica_id] = replica
        self.ledger.settle(account, self._now_s)
        account.growth_tokens += program.growth_tokens
        if self.tenants is not None:
            self.tenants.claims(program.tenant, program.claim_tokens)
        if program.phase is Phase.REASONING:
            account.reasoning_tokens += program.claim_tokens
            account.reasoning_count += 1
            if program.marked:
                account.marked_tokens += program.claim_tokens
                if program.marked_by_policy:
                    replica.marked.add(program, -self.policy.pause_rank(program))
            else:
                replica.reasoning.add(program, self.policy.pause_rank(program))
        else:
            account.acting_tokens += program.claim_tokens
            account.acting_count += 1
            account.acting.add(program.claim_tokens, program.acting_since_s, self._now_s)
            replica.acting.add(program, self.policy.pause_rank(program))
            if program.hold_until_s < inf:
                replica.expiring.add(program, program.hold_until_s)
            self._watch_for_idleness(program)

    def _leave_replica(self, program: Program, trigger: Trigger, reason: Reason) -> None:
        """Make an active program paused; its claim must be lifted."""
        replica_id = program.replica_id or ""
        replica = self.replicas[replica_id]
        program.advance(trigger)
        program.leaves_for.clear()
        for turn in program.held.values():  # in place, until now
            self.impatient.add(turn)
            self.ledger.wait_begins(self._now_s)
        if program.held:
            program.hold_reason = reason
            self.control.begins_to_wait(program)
        self.shares.leave(program, replica.account)
        del replica.programs[program.program_id]
        replica.let_in.discard(program)
        self.active_count -= 1
        self._leave_family(program)
        program.note(self._now_s, "pause", reason, replica_id)
        self._decisions.append(Pause(program.program_id, replica_id, reason))

    def pause(self, program: Program, reason: Reason) -> None:
        """Take the claim of an active program whose tool runs. For the view: it checks first."""
        self._lift(program)
        self.knowledge.tool_let_go(program, self._now_s)
        self._leave_replica(program, Trigger.PAUSE, reason)
        self._put(program)

    def mark(self, program: Program, reason: Reason, *, cause: Reason | None = None) -> None:
        """Have a program with turns in flight leave when these end, for one more cause. For the view: it checks first.

        Turns that come until then are held.
        """
        cause = cause or reason
        if cause in program.leaves_for:
            return
        self._lift(program)
        program.advance(Trigger.MARK)
        was_marked = program.marked
        program.leaves_for[cause] = None
        self._put(program)
        replica_id = program.replica_id or ""
        program.note(self._now_s, Trigger.MARK.value, reason, replica_id)
        if not was_marked:
            for turn in program.held.values():  # until grants go on there
                self.impatient.add(turn)
            self._decisions.append(Mark(program.program_id, replica_id, reason))

    def unmark(self, program: Program, reason: Reason, *, cause: Reason | None = None) -> None:
        """End one cause for which a program is marked, or all; after the last it stays. For the view: it checks first.

        The turns that were held, because it was to leave, are granted then.
        """
        self._lift(program)
        if cause is not None:
            del program.leaves_for[cause]
        else:
            program.leaves_for.clear()
        if not program.marked:
            program.advance(Trigger.UNMARK)
            replica_id = program.replica_id or ""
            program.note(self._now_s, Trigger.UNMARK.value, reason, replica_id)
            self._decisions.append(Unmark(program.program_id, replica_id, reason))
            self._grant_in_place(program)
        self._put(program)

    def _settle_mark(self, program: Program) -> None:
        """End what of a program's mark is over: it has nowhere to go, or nothing that must."""
        failed = any(self._can_avoid(program, turn.avoid_replica_id) for turn in program.held.values())
        if Reason.TURN_FAILED in program.leaves_for and not failed:
            self.unmark(program, Reason.STAYS, cause=Reason.TURN_FAILED)
        if Reason.MOVED in program.leaves_for and not self.control.destination_is_open(program):
            program.destination = None
            self.unmark(program, Reason.STAYS, cause=Reason.MOVED)

    def _settle_marks(self) -> None:
        """Let programs stay that have nowhere else to go to any more. Cost: O(active programs)."""
        active = [program for replica in self.replicas.values() for program in replica.programs.values()]
        for program in active:
            if program.marked:
                self._settle_mark(program)

    def _end_marks(self, replica: Replica, cause: Reason) -> None:
        """Let the programs of a replica stay that were to leave it for a cause that is over."""
        for program in list(replica.programs.values()):
            if cause in program.leaves_for:
                self.unmark(program, Reason.STAYS, cause=cause)

    def restore(self, program: Program, replica: Replica, reason: Reason) -> None:
        """Give a paused program a claim on a replica, and a lease to each of its held turns. For the view.

        Where one of them goes on from what another replica alone has, it is restored there, whether there is room or
        not: elsewhere the turn would only fail.
        """
        replica = self._wanted_by(program) or replica
        self.queue.remove(program)
        program.destination = None
        self.admitted_count += not program.admitted
        program.admitted = True
        if program.held and next(iter(program.held.values())).arrived_s < self._now_s:  # not one that was tried again
            self.knowledge.restore_pace.restored()
        for turn in program.held.values():
            self._wait_ends(program, turn)
        program.advance(Trigger.RESTORE)
        program.replica_id = replica.replica_id
        replica.programs[program.program_id] = program
        if reason in (Reason.PATIENCE, Reason.PARENT):
            replica.let_in.add(program)
        self.active_count += 1
        if program.parent_id:
            self.families.claims(program, more=True)
        self.ledger.settle(replica.account, self._now_s)
        self.shares.enter(program, replica.account)
        program.note(self._now_s, "restore", reason, replica.replica_id)
        self._decisions.append(Restore(program.program_id, replica.replica_id, reason))
        self._grant_held(program, reason)
        self._put(program)
        if self.families:
            self._new_parents.append((program.tenant, program.program_id))

    def _leave_family(self, program: Program) -> None:
        """Note that a child holds a claim no longer; where only one does at a time, the next may have it."""
        if program.parent_id and self.families.claims(program, more=False) and self.tenants is not None:
            self._new_parents.append(family_of(program))

    def _grant_held(self, program: Program, reason: Reason) -> None:
        """Grant every held turn of an active program, whose claim must be lifted, where it is."""
        program.hold_reason = ""
        held, program.held = program.held, {}
        for turn in held.values():
            self._begin_flight(program, turn)
        if held:
            self._book_residency(program)
        for turn in held.values():
            self._grant(program, turn, reason)

    def _grant_in_place(self, program: Program) -> None:
        """Grant what is held of an active program, whose claim must be lifted, unless nothing may be there now."""
        if program.marked:
            program.hold_reason = Reason.LEAVING if program.held else ""
            return
        for turn in program.held.values():
            self.impatient.discard(turn)
        if self.replicas[program.replica_id or ""].suspended_for:
            program.hold_reason = Reason.SUSPENDED if program.held else ""
            return
        for turn in program.held.values():
            self._wait_ends(program, turn)
        self._grant_held(program, Reason.HOME)

    # --- who may begin ----------------------------------------------------------------------------------------------

    def _has_place(self, tenant: str, *, opens: bool = True) -> bool:
        """Say whether a tenant may have one more program, where the oldest without a turn was forgotten if need be.

        A tenant that has as many as it may forgets its own; where all have, the one with most does. One that does not
        open lives already, and nobody's until now.
        """
        table, settings = self.table, self.settings
        if table.count_of(tenant) >= settings.tenant_max_programs_count:
            oldest = table.longest_acting(tenant)
        elif opens and len(table) >= settings.max_programs_count:
            oldest = table.longest_acting(table.largest_tenant()) or table.longest_acting(tenant)
        else:
            return True
        if oldest is None:
            return False
        self._terminate(oldest, Reason.FORGOTTEN)
        self._balance(Moment.PROGRAM_ENDED)
        return True

    def _open(self, event: TurnArrived | ProgramOpened, program_id: str) -> Program:
        program = self.table.open(program_id, self._now_s, event.tenant)
        program.admitted = self._admission is None
        self.admitted_count += program.admitted
        self._join_group(program, event.group_id)
        self.families.join(program, event.parent_id)
        program.program_class = event.program_class
        return program

    def _admit(self, moment: Moment) -> None:
        """Let in from outside whom the admission lets in, and place them."""
        if self._admission is None:
            return
        while (admitted := self._admission.next(self._view, moment)) is not None and self._granting_replicas:
            program = self.table.get(admitted.program_id)
            if program is None or program not in self.queue.outside:
                return
            program.admitted = True
            self.admitted_count += 1
            program.note(self._now_s, "admitted", self._admission.name, None)
            self._put(program)
            target, reason = self._find_replica(program, None)
            if target is None:
                program.hold_reason = reason
                self.control.begins_to_wait(program)
            else:
                self.restore(program, target, reason)

    def dismiss(self, program: Program, reason: Reason) -> None:
        """Have a program without a turn in flight wait outside from its next turn on. For the view: it checks first."""
        if program.status is Status.ACTIVE:
            self.pause(program, reason)
        self._wait_outside(program)
        self._put(program)
        if program.held:
            program.hold_reason = Reason.ADMISSION

    def _wait_outside(self, program: Program) -> None:
        program.admitted = False
        self.admitted_count -= 1
        self.table.acting_with_limit.discard(program)

    def rank_anew(self, program: Program) -> None:
        """Ask the policy again in which place a program stands. For the view."""
        self._rank_anew(program)
        if program.status is Status.PAUSED:
            self._put(program)

    # --- what a program is told of outside its turns ----------------------------------------------------------------

    def _program_opened(self, event: ProgramOpened) -> None:
        self.hopeless_ids.pop(event.program_id, None)
        if self.table.get(event.program_id) is not None:
            return
        if not self._has_place(event.tenant):
            return
        program = self._open(event, event.program_id)
        program.announced = program.idle = True
        self._limits_begin(program)
        if self.control.routes:
            self.control.bind(program)
        self._measure_claim(program)
        program.note(self._now_s, "opened", "", None)

    def _tool_began(self, program: Program) -> None:
        self.knowledge.tool_began(program)
        if self._emits:
            self.signal(ToolStart(self._now_s, program.program_id, program.tool))
            self._signal_tools()

    def _tool_returned(self, program: Program) -> None:
        self.knowledge.tool_returned(program, self._now_s)
        if self._emits:
            self.signal(ToolEnd(self._now_s, program.program_id, program.tool, program.away_s))
            self._signal_tools()

    def _tool_started(self, event: ToolStarted) -> None:
        """Measure from now on, whatever was taken to have begun at the end of the turn."""
        program = self.table.get(event.program_id)
        if program is None or program.phase is not Phase.ACTING or program.announced:
            return
        self._lift(program)
        if program.tool_runs:
            self.knowledge.tool_is_another(program)
        if event.tool and not (event.inferred and program.tool_named):
            program.tool, program.tool_named = event.tool, not event.inferred
        program.acting_since_s = self._now_s
        self._limits_begin(program)
        self._tool_began(program)
        program.hold_until_s = self._now_s + self.policy.hold_s(self._view, program)
        self._put(program)

    def _tool_ended(self, event: ToolEnded) -> None:
        """Hold on to a program that will be back at once; where nobody said so, as long as at the begin of its tool."""
        program = self.table.get(event.program_id)
        if program is None or not program.tool_runs:
            return
        self._lift(program)
        self._limits_begin(program)
        self._tool_returned(program)
        hold_s = self.policy.hold_s(self._view, program) if event.inferred else inf
        program.hold_until_s = self._now_s + hold_s
        self._put(program)

    def _program_judged(self, event: ProgramJudged) -> None:
        program = self.table.get(event.program_id)
        if program is None or event.generation != program.generation:
            return
        settings, verdicts = self.settings, program.verdicts
        if not verdicts.add(
            Verdict(event.turn_count, event.will_succeed, event.confidence_ratio),
            fail_count=settings.judge_fail_count,
            least_confidence_ratio=settings.judge_confidence_ratio,
        ):
            return
        assert verdicts.level is not None, "a verdict makes a level"
        self.knowledge.judge_record.level_counts[verdicts.level] += 1
        prediction = "success" if event.will_succeed else "failure"
        why = f"{prediction} by {event.confidence_ratio:.2f} at turn {event.turn_count}: {verdicts.level.name.lower()}"
        program.note(self._now_s, "judged", why, program.replica_id)
        if settings.judge_ends_hopeless and verdicts.level is Level.LOWEST:
            self.hopeless_ids[program.program_id] = None
            if len(self.hopeless_ids) > MAX_HOPELESS_COUNT:
                del self.hopeless_ids[next(iter(self.hopeless_ids))]
            self._terminate(program, Reason.HOPELESS)
            self._balance(Moment.PROGRAM_ENDED)
        else:
            self.rank_anew(program)

    def _sandbox_ready(self, event: SandboxReady) -> None:
        program = self.table.get(event.program_id)
        if program is not None:
            why = f"{event.sandbox_id} after {event.prepare_s:.1f} s"
            program.note(self._now_s, "sandbox ready", why, program.replica_id)

    def _sandbox_failed(self, event: SandboxFailed) -> None:
        program = self.table.get(event.program_id)
        if program is not None:
            program.note(self._now_s, "sandbox failed", f"{event.sandbox_id}: {event.why}", program.replica_id)

    def _sandboxes_measured(self, event: SandboxesMeasured) -> None:
        self.sandboxes = SandboxSums(event.sandbox_count, event.disk_bytes, event.memory_bytes)

    def expected_holds_s(self, count: int) -> dict[str, float]:
        """Return for the first `count` programs that wait in how many seconds each is expected to be restored.

        Those that wait to be admitted come after all that wait for room. Cost: O(count log waiting), once for
        those that may go anywhere, and once for each replica that is waited for.
        """
        interval_s = self.knowledge.restore_pace.interval_s
        waiting = self.queue.first_waiting(count)
        return {program.program_id: place * interval_s for place, program in enumerate(waiting, start=1)}

    # --- the end of a program ---------------------------------------------------------------------------------------

    def _program_released(self, event: ProgramReleased) -> None:
        self.hopeless_ids.pop(event.program_id, None)
        program = self.table.get(event.program_id)
        if program is None or event.generation not in (None, program.generation):
            return
        if event.outcome in OUTCOMES:
            self.knowledge.judge_record.program_ended(event.outcome, program.verdicts.first_failure_turn_count)
        self._terminate(program, Reason.RELEASED)
        self._balance(Moment.PROGRAM_ENDED)

    def _programs_released(self, event: ProgramsReleased) -> None:
        for program_id in event.program_ids:
            self.hopeless_ids.pop(program_id, None)
            program = self.table.get(program_id)
            if program is not None:
                self._terminate(program, Reason.RELEASED)
        self._balance(Moment.PROGRAM_ENDED)

    def _terminate(self, program: Program, reason: Reason) -> None:
        """End a program: reject its held turns, and let those in flight end as turns without a program."""
        self._lift(program)
        if self._emits:
            for turn in program.in_flight.values():
                self._signal_lost(turn)
        tool_ran = program.tool_runs
        self.knowledge.program_ended(program, self._now_s)
        if self._emits:
            if tool_ran:
                self._signal_tools()
            self.signal(ProgramEnd(self._now_s, program.program_id, program.turn_count))
        self.admitted_count -= program.admitted
        self._leave_group(program)
        self.families.leave(program)
        self.queue.remove(program)
        self.control.program_ended(program)
        for turn in program.held.values():
            del self.turns[turn.turn_id]
            self._wait_ends(program, turn)
            self._decisions.append(Reject(turn.turn_id, program.program_id, reason))
        program.held.clear()
        if program.status is Status.ACTIVE:
            replica = self.replicas[program.replica_id or ""]
            self.shares.leave(program, replica.account)
            replica.residency.leave(program.generation, program.context_tokens)
            del replica.programs[program.program_id]
            replica.let_in.discard(program)
            self.active_count -= 1
            self._leave_family(program)
            claim_tokens = program.claim_tokens
            for turn in program.in_flight.values():
                turn.claim_tokens, claim_tokens = claim_tokens, 0  # the first stands for all: they share their prefix
                replica.account.other_tokens += turn.claim_tokens
        for turn in (*program.in_flight.values(), *program.lost.values()):
            turn.program = None
        program.in_flight.clear()
        program.lost.clear()
        program.leaves_for.clear()
        program.advance(Trigger.RELEASE)
        self.table.remove(program)
        program.note(self._now_s, "release", reason, program.replica_id)
        self._decisions.append(Release(program.program_id, program.generation, reason))

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _open_to(self, program: Program) -> Sequence[Replica]:
        """Return the replicas on which a program may get a claim now, whatever its route: that one's, if it can be."""
        bound = self.replicas.get(program.bound_to) if program.bound_to is not None else None
        return [bound] if bound is not None and bound.grants else self._granting_replicas

    def _candidates(self, avoid_replica_id: str | None, program: Program | None = None) -> Sequence[Replica]:
        """Return the replicas that a turn may go to: without the one to be avoided, if another is left.

        A program that its route binds to a replica may go there alone, but for a turn that just failed there.
        """
        if program is not None and program.bound_to not in (None, avoid_replica_id):
            bound = self.replicas[program.bound_to or ""]
            return [bound] if bound.grants else []
        if avoid_replica_id is None:
            return self._granting_replicas
        others = [replica for replica in self._granting_replicas if replica.replica_id != avoid_replica_id]
        return others or self._granting_replicas

    def _wanted_by(self, program: Program) -> Replica | None:
        """Return the replica that a held turn of a program needs, if it grants."""
        for turn in program.held.values():
            wanted = self.replicas.get(turn.wanted_replica_id or "")
            if wanted is not None and wanted.grants:
                return wanted
        return None

    def open_replica(self, proposed: ReplicaView | None) -> Replica | None:
        """Return the replica that a policy named, if a program may get a claim there."""
        replica = self.replicas.get(proposed.replica_id) if proposed is not None else None
        return replica if replica is not None and replica.grants else None

    def _balance(self, moment: Moment) -> None:
        self._admit(moment)
        if self.queue.bound:
            self.control.let_in(moment, self.changed_replicas)
        self.policy.balance(self._view, moment)
        self.changed_replicas.clear()

    def _known_or_new(self, replica_id: str) -> Replica | None:
        """Return a replica, a new one if there is none; None if it was removed: then its news are late."""
        replica = self.replicas.get(replica_id)
        if replica is None and replica_id not in self._removed_ids:
            account = self.ledger.open(replica_id, self._now_s)
            replica = self.replicas[replica_id] = Replica(replica_id, account, self.suspended_for)
        return replica

    def _replicas_changed(self) -> None:
        before = self._open_replicas, self._granting_replicas
        self._open_replicas = [replica for replica in self.replicas.values() if replica.open_to_programs]
        self._granting_replicas = [replica for replica in self._open_replicas if replica.grants]
        if self.tenants is not None:
            self.tenants.set_granting(replica.replica_id for replica in self._granting_replicas)
        self.control.replicas_changed()
        halted = bool(self._open_replicas) and not self._granting_replicas
        self._limits_clock.set_halted(self._now_s, halted=halted)
        for turn in list(self.anonymous_held.values()):
            pinned = self.replicas.get(turn.pinned_replica_id or "")
            candidates = self._granting_replicas if pinned is None else [pinned]
            if candidates and (pinned is None or not pinned.suspended_for):
                del self.anonymous_held[turn.turn_id]
                self.ledger.wait_ends(self._now_s)
                self._grant_anonymous(turn, candidates)
        if self._open_replicas:
            self._no_replica_since_s = None
            if self._granting_replicas and self.families:
                self._new_parents.extend(self.families.all())
        elif self._no_replica_since_s is None:
            self._no_replica_since_s = self._now_s
        others = (self._open_replicas, self._granting_replicas) != before
        if others:
            self._settle_marks()
        self._balance(Moment.REPLICAS_CHANGED)
        if others:
            for program in self.queue.waiting():
                self.settle_hold_reason(program)

    def settle_hold_reason(self, program: Program) -> None:
        """Say anew why a program waits that was held because nothing granted. For the control.

        One that is not admitted waits for that, if any replica grants; one that a route binds waits for its replica,
        whatever grants beside it.
        """
        if program.hold_reason not in (Reason.SUSPENDED, Reason.NO_REPLICA):
            return
        if not self._open_replicas:
            program.hold_reason = Reason.NO_REPLICA
        elif not (self._candidates(None, program) if program.admitted else self._granting_replicas):
            program.hold_reason = Reason.SUSPENDED
        else:
            program.hold_reason = Reason.NO_ROOM if program.admitted else Reason.ADMISSION

    def _set_health(self, replica: Replica, *, up: bool, draining: bool) -> None:
        replica.up, replica.draining = up, draining
        self._settle_usable(replica)

    def _settle_usable(self, replica: Replica) -> None:
        """Note from when on a replica's memory can be had, or no longer."""
        self.ledger.settle(replica.account, self._now_s)
        replica.account.usable = replica.grants

    def _replica_up(self, event: ReplicaUp) -> None:
        self._removed_ids.pop(event.replica_id, None)
        replica = self._known_or_new(event.replica_id)
        assert replica is not None, "one that is up was not removed"
        grown = event.capacity_tokens not in (None, replica.account.capacity_tokens)
        if event.capacity_tokens is not None and grown:
            self._set_capacity(replica, event.capacity_tokens)
        if grown or not replica.up or replica.draining:
            self._set_health(replica, up=True, draining=False)
            self._end_marks(replica, Reason.REPLICA_DRAINING)
            self._replicas_changed()

    def _replica_down(self, event: ReplicaDown) -> None:
        replica = self._known_or_new(event.replica_id)
        if replica is not None:
            self._empty(replica, Reason.REPLICA_DOWN)
            self._replicas_changed()

    def _replica_removed(self, event: ReplicaRemoved) -> None:
        replica = self.replicas.get(event.replica_id)
        if replica is not None:
            self._empty(replica, Reason.REPLICA_REMOVED)
            del self.replicas[event.replica_id]
        self.ledger.close(event.replica_id)
        self._removed_ids[event.replica_id] = None
        if len(self._removed_ids) > REMOVED_COUNT:
            del self._removed_ids[next(iter(self._removed_ids))]
        if replica is not None:
            self._replicas_changed()

    def _empty(self, replica: Replica, reason: Reason) -> None:
        """Take everything off a replica that is gone."""
        replica.tripped = False
        self._set_health(replica, up=False, draining=False)
        for program in list(replica.programs.values()):
            self._lose_replica(program, reason)
        account = replica.account
        for turn in [turn for turn in self.turns.values() if turn.account_id == replica.replica_id]:
            turn.account_id = None
        account.other_tokens = 0
        account.turn_count = 0
        account.pending_encode_count = None  # what starts again has none; it says so
        replica.residency.clear()
        replica.own_causes.clear()  # an engine that starts again is paused no longer
        for turn in [turn for turn in self.anonymous_held.values() if turn.pinned_replica_id == replica.replica_id]:
            self._decisions.append(Reject(turn.turn_id, None, Reason.NO_REPLICA))
            self._drop_turn(turn, "rejected")

    def _lose_replica(self, program: Program, reason: Reason) -> None:
        """Take a program off a replica that is gone; its turns in flight there are lost."""
        self._lift(program)
        was_reasoning = program.phase is Phase.REASONING
        if self._emits:
            for turn in program.in_flight.values():
                self._signal_lost(turn)
        program.lost.update(program.in_flight)
        program.in_flight.clear()
        self._leave_replica(program, Trigger.REPLICA_LOST, reason)
        self._measure_claim(program)
        if program.held:  # where it was, because nothing was granted there
            program.advance(Trigger.TURN_ARRIVED)
        elif was_reasoning:
            program.acting_since_s = self._now_s
            self._limits_begin(program)
        self._put(program)
        if program.held and program.destination is not None:  # it was on its way, and nothing keeps it any more
            destination, reason = self.control.take_destination(program)
            if destination is not None:
                self.restore(program, destination, reason)

    def _replica_draining(self, event: ReplicaDraining) -> None:
        replica = self._known_or_new(event.replica_id)
        if replica is not None:
            self._set_health(replica, up=replica.up, draining=True)
            self._send_away(replica, Reason.REPLICA_DRAINING)
            self._replicas_changed()

    def _replica_tripped(self, event: ReplicaTripped) -> None:
        replica = self.replicas.get(event.replica_id)
        if replica is None or not replica.up or replica.tripped == event.tripped:
            return
        replica.tripped = event.tripped
        self._set_health(replica, up=replica.up, draining=replica.draining)
        if replica.tripped:
            self._send_away(replica, Reason.REPLICA_TRIPPED)
        else:
            self._end_marks(replica, Reason.REPLICA_TRIPPED)
        self._replicas_changed()

    def _send_away(self, replica: Replica, reason: Reason) -> None:
        """Pause the programs of a replica that gets nothing new, each once it has no turn in flight."""
        for program in list(replica.programs.values()):
            if program.in_flight:
                self.mark(program, reason)
            else:
                self.pause(program, reason)

    def _grants_suspended(self, event: GrantsSuspended) -> None:
        replica = self._known_or_new(event.replica_id) if event.replica_id is not None else None
        if replica is not None:
            replica.own_causes[event.cause] = None
        elif event.replica_id is None:
            self.suspended_for[event.cause] = None
        for each in self._meant(event.replica_id):
            self._settle_usable(each)
            self._disturb_turns(each)
        self._replicas_changed()

    def _grants_continued(self, event: GrantsContinued) -> None:
        """End a cause on all replicas or on one: a cause of one stands when the same one ends for all."""
        replicas = self._meant(event.replica_id)
        suspended = [replica for replica in replicas if replica.suspended_for]
        if event.replica_id is None:
            self.suspended_for.pop(event.cause, None)
        for replica in suspended if event.replica_id is not None else ():
            replica.own_causes.pop(event.cause, None)
        for replica in suspended:
            if not replica.suspended_for:
                self._settle_usable(replica)
                self._continue_programs(replica)
        self._replicas_changed()

    def _meant(self, replica_id: str | None) -> list[Replica]:
        """Return the replica of that id if it is known, or all for None."""
        if replica_id is None:
            return list(self.replicas.values())
        return [self.replicas[replica_id]] if replica_id in self.replicas else []

    def _continue_programs(self, replica: Replica) -> None:
        """Grant what was held in place on a replica, who waits longest first, and let the idle limit run again."""
        waiting = [program for program in replica.programs.values() if program.held]
        for program in sorted(waiting, key=lambda program: program.waiting_since_s):
            self._lift(program)
            self._grant_in_place(program)
            self._measure_claim(program)
            self._put(program)
        forgotten_before_s = self._limits_clock.at(self._now_s) - self.settings.forget_limit_s
        for program in replica.acting:  # a limit was over, and passed it by
            if program not in self.table.acting_with_limit or program.limits_since_s < forgotten_before_s:
                self._limits_begin(program)
                self._watch_for_idleness(program)

    def _replica_flushed(self, event: ReplicaFlushed) -> None:
        replica = self.replicas.get(event.replica_id)
        if replica is None:  # removed while it was told to
            return
        replica.residency.clear_idle()
        replica.flushed_s = self._now_s
        self._disturb_turns(replica)

    def _disturb_turns(self, replica: Replica) -> None:
        """Learn nothing from the turns in flight there: their times and hits are not the engine's usual ones."""
        for program in replica.programs.values():
            for turn in program.in_flight.values():
                turn.disturbed = True

    def _replica_polled(self, event: ReplicaPolled) -> None:
        replica = self._known_or_new(event.replica_id)
        if replica is None:
            return
        account = replica.account
        if event.kv_used_ratio is not None:
            account.kv_used_ratio = event.kv_used_ratio
        if event.engine_waiting_count is not None:
            account.engine_waiting_count = event.engine_waiting_count
        asked_s = self._now_s - event.age_s
        if event.hit_ratio is not None:
            account.hit_ratio = event.hit_ratio
        if event.query_tokens is None or (event.query_tokens and event.hit_ratio is None):
            replica.control.polled(None, asked_s=asked_s, now_s=self._now_s)
        elif not replica.tells_cached:
            hit_tokens = int((event.hit_ratio or 0.0) * event.query_tokens)
            replica.control.polled(hit_tokens, asked_s=asked_s, now_s=self._now_s)
            replica.control.computed(event.query_tokens - hit_tokens)
        if event.preemption_count:
            mean_tokens = account.reasoning_tokens // max(1, account.reasoning_count)
            replica.control.preempted(event.preemption_count * mean_tokens)
        if event.capacity_tokens is not None and event.capacity_tokens != account.capacity_tokens:
            self._set_capacity(replica, event.capacity_tokens)
            if replica.open_to_programs:
                self._replicas_changed()

    def _set_capacity(self, replica: Replica, capacity_tokens: int) -> None:
        self.ledger.settle(replica.account, self._now_s)
        replica.account.capacity_tokens = replica.residency.capacity_tokens = capacity_tokens

    def break_even_s(self, replica_id: str | None) -> float:
        """Return how long a replica takes to prefill its whole memory; see `View`."""
        account = self.ledger.accounts.get(replica_id) if replica_id is not None else None
        capacity_tokens = account.capacity_tokens if account is not None else None
        if capacity_tokens is None:
            capacities_tokens = (replica.account.capacity_tokens or 0 for replica in self._open_replicas)
            capacity_tokens = max(capacities_tokens, default=0)
        return self.knowledge.break_even_s(capacity_tokens)

    def _encodes_polled(self, event: EncodesPolled) -> None:
        replica = self._known_or_new(event.replica_id)
        if replica is not None:
            self._some_encode = True
            replica.account.pending_encode_count = event.pending_encode_count

    def _residency_reported(self, event: ResidencyReported) -> None:
        replica = self.replicas.get(event.replica_id)
        if replica is None:  # removed: a report of it may be late
            return
        for program_id, tokens in event.resident_tokens:
            program = self.table.get(program_id)
            if program is not None:
                replica.residency.report(program.generation, tokens)

    # --- time -------------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick) -> None:  # noqa: ARG002 - its time was taken in already
        self._new_parents.extend(self.families.overdrawn)
        self.families.overdrawn.clear()
        self._enforce_limits()
        if self._rules.adapt_capacity:
            self._correct_capacities()
        self._balance(Moment.TICK)
        if self.control.decide():
            self._balance(Moment.TURN_ENDED)  # where it changed anything
        self.previous_tick_s = self._now_s

    def _correct_capacities(self) -> None:
        """Correct what may be claimed of each replica by what was lost there."""
        others_wait = bool(self.ledger.waiting_count)
        for replica in self._granting_replicas:
            account, control = replica.account, replica.control
            in_demand = others_wait and account.demand_tokens >= IN_DEMAND_RATIO * account.limit_tokens
            full = control.computed_tokens >= account.limit_tokens
            self.ledger.settle(account, self._now_s)
            wanted, idle_s = in_demand and full, account.idle_waited_s
            if control.step(self._now_s, active_count=account.active_count, wanted=wanted, idle_s=idle_s):
                account.capacity_ratio = control.ratio

    def _enforce_limits(self) -> None:
        now_s, settings = self._now_s, self.settings
        if not self._limits_clock.halted:
            self._enforce_program_limits()
        since_s = self._no_replica_since_s
        if since_s is None and not self._open_replicas:
            self._no_replica_since_s = now_s
        elif since_s is not None and now_s - since_s > settings.no_replica_limit_s:
            self._reject_all_held()

    @property
    def _most_idle_limit_s(self) -> float:
        """The longest idle limit that is learned: a claim goes well before its program would be forgotten."""
        return self.settings.forget_limit_s / 2

    def _limits_begin(self, program: Program) -> None:
        """Measure the idle and the forget limit from now on, of a program that acts."""
        program.limits_since_s = self._limits_clock.at(self._now_s)
        self.table.acting_begins(program)

    def _watch_for_idleness(self, program: Program) -> None:
        """Look at an acting program with a claim when the idle limit may be over at the soonest."""
        limit_s = self.settings.idle_limit_s
        if limit_s is None:
            limit_s = min(LEAST_IDLE_LIMIT_S, self._most_idle_limit_s)
        program.idle_at_s = program.limits_since_s + limit_s
        self.table.acting_with_limit.add(program, program.idle_at_s)

    def _enforce_program_limits(self) -> None:
        clock_s, settings = self._limits_clock.at(self._now_s), self.settings
        with_limit = self.table.acting_with_limit
        while (program := with_limit.first()) and clock_s > program.idle_at_s:
            if self._is_suspended(program):
                with_limit.discard(program)  # until grants go on there
                continue
            if settings.idle_limit_s is None:
                learned_s = self.knowledge.idle_limit_s(program.tool)
                idle_at_s = program.limits_since_s + min(learned_s, self._most_idle_limit_s)
                if idle_at_s >= clock_s:
                    program.idle_at_s = idle_at_s
                    with_limit.add(program, idle_at_s)
                    continue
            program.idle = True
            if program.status is Status.ACTIVE:
                self.pause(program, Reason.IDLE)
            else:
                self._put(program)
            if self._admission is not None:
                self._wait_outside(program)
        for program in self.table.acting_longer(clock_s - settings.forget_limit_s):
            if not self._is_suspended(program):
                self._terminate(program, Reason.FORGOTTEN)

    def _is_suspended(self, program: Program) -> bool:
        """Say whether a program is active where nothing is granted now."""
        return program.status is Status.ACTIVE and bool(self.replicas[program.replica_id or ""].suspended_for)

    def _reject_all_held(self) -> None:
        """Reject every turn that has waited for a replica for longer than the limit."""
        limit_s = self._now_s - self.settings.no_replica_limit_s
        for turn in [*self.anonymous_held.values(), *self._held_turns()]:
            if turn.arrived_s <= limit_s:
                self._decisions.append(
                    Reject(turn.turn_id, turn.program.program_id if turn.program else None, Reason.NO_REPLICA)
                )
                self._drop_turn(turn, "rejected")

    def _held_turns(self) -> list[Turn]:
        """Return the turns that wait for a claim of their programs."""
        waiting = tuple(self.queue.waiting())
        return [turn for program in waiting for turn in program.held.values()]
