"""The verbs: what is done to programs and turns, whoever asks. Callers check beforehand whether it may be done.

Below are the verbs of handlers and rules (`Core`), and of what it is made; what operators may do (`Operations`); and
what a policy reads and may propose (`SchedulerView`). The last two check first, then call the same verbs.

Global policies
---------------
What a policy is told in a period is bounded, so that no event waits long for its decision.

Places
------
Where a program may go: the candidate replicas, the policy's answer, and who must be let in.
It lets in two kinds of turns that the policy would hold, regardless of room, where that costs least: one whose client
would soon give up (`rules/patience.py`), and one of a child whose parent holds a claim (`rules/families.py`). A parent
waits for its children as for its own branches: held behind a claim that is only given back when they have ended, they
would wait for ever.

Hints
-----
When a program's turns have ended, a policy that holds by break-even (`hold_threshold_s`) guesses from the tool how long
it is worth holding. A client may know better: it says in how many seconds s the next turn comes, and how sure it is.
With p, how far that is believed (`learned/trust.py`), and T, the threshold, holding until 2·s costs p·s + (1 - p)·2·s
seconds of memory on average and saves p·T. So the claim is kept until 2·s if p·T is at least s·(2 - p), and is free for
others at once if not. Below `LEAST_CONFIDENCE_RATIO` the policy's own guess stands.

That is a stranger's word, so what it takes from others is bounded. A hint keeps a claim at most for T from the first
hint that counted between two turns, however often it is repeated. What hints keep on a replica for longer than the
policy would is at most `hint_ratio` of its limit in all. Within that a wrong hint costs the next one: the first between
two turns is checked against when the turn came. A client that announces a long wait, or frees its memory, gives only
its own away.

Operations
----------
They are the primitives of Nalar ("Nalar: An agent serving framework", arXiv 2601.05109, Table 2). The paper's session,
agent instance and agent type are here program, replica and a scope of programs (`routes.Scope`).

- **route**: programs of a scope go to these replicas, by weight. It narrows the policy's choice (`rules/routes.py`).
- **set_priority**: a number that comes before the policy's rank, lower first, in the paused queue and in engines; with
  a replica, in that engine alone.
- **migrate**: a pause and then a restore elsewhere, regardless of room. A program with a turn in flight is marked, and
  restored there when that ends; one without claim and turn goes there with its next turn.
- **kill**: a program ends at once. A replica drains and ends: whoever started it does that, and also **provision**.

There are two levels (section 4). An operator's event, or a global policy that is asked periodically what should be
changed (`GlobalPolicies`), only sets routes and priorities and moves programs. The scheduler and its policy
then place and order every turn as it arrives, without asking again.

Each operation can say why it is impossible (`why_not_...`), empty if it is possible: the view refuses by it, and the
admin API reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Final

from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.learned.trust import RIGHT
from thunderagent.programs.messages import (
    DROP,
    OFFLOAD,
    RETAIN,
    EndReplica,
    GpuEnd,
    GpuFirstToken,
    GpuSubmit,
    Grant,
    ProgramEnd,
    ProgramHinted,
    Provision,
    Reason,
    Reject,
    SandboxSums,
    Scope,
    SetPriority,
    Signal,
    Targets,
    ToolEnd,
    ToolNum,
    ToolStart,
)
from thunderagent.programs.policy import (
    Admission,
    EnginePriority,
    GlobalPolicy,
    Learner,
    Moment,
    Observe,
    Placement,
    Policy,
    ProgramView,
    ReplicaView,
    View,
    least_loaded,
)
from thunderagent.programs.rules.families import Families, family_of
from thunderagent.programs.rules.limits import Limits
from thunderagent.programs.rules.patience import Deadlines
from thunderagent.programs.rules.program_limits import ProgramLimiter
from thunderagent.programs.rules.routes import Routing, serving
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.program import (
    LEAVING,
    MAIN_BRANCH,
    REASONING,
    Branch,
    Hint,
    Kind,
    Phase,
    Place,
    Program,
    RouteView,
    Turn,
)
from thunderagent.programs.state.replica import Replica, ReplicaPlace, replica_of


class Core:
    """The verbs that handlers and the view call. It has no state except that of its parts."""

    def __init__(
        self,
        policy: Policy,
        view: View,
        *,
        book: Book,
        knowledge: Knowledge,
        families: Families,
        deadlines: Deadlines,
        limits: Limits,
        placing: Placing,
        global_policies: GlobalPolicies,
        stream: Stream,
    ) -> None:
        """Work on these parts for `policy`."""
        self.policy = policy
        self.decider = policy.decider
        """What answers for the policy: it is asked to place, balance and hold."""
        self.view = view
        self.book = book
        self.knowledge = knowledge
        self.families = families
        self.deadlines = deadlines
        self.limits = limits
        self.placing = placing
        self.routing = Routing(book)
        self.global_policies = global_policies
        self.stream = stream
        self.claim_rules = policy.claim_rules
        self.admission: Admission | None = policy.admission
        self.leases = Leases(book, deadlines, stream, view, policy.priority)
        self.turn_ends = TurnEnds(self)
        self.hints = Hints(self)
        self.program_limits = ProgramLimiter(
            lambda: knowledge.restore_pace.restored_total, knowledge.ideal_turn_s, knowledge.shortest_tool_s
        )
        self.active_before_count = 0  # active programs before this event

    # --- claims -----------------------------------------------------------------------------------------------------

    def take_destination(self, program: Program) -> tuple[Replica | None, Reason]:
        """Return a program's destination, if it can still go there, and clear it."""
        destination, reason = self.placing.destination_of(program)
        program.destination = None
        return destination, reason

    def leave(self, program: Program, to: Place, reason: Reason) -> None:
        """Take an active program's claim; its held turns wait for room from now on."""
        book = self.book
        book.move(program, to, reason)
        for turn in program.held.values():
            self.deadlines.add(turn)
            book.ledger.wait_begins(book.now_s)
        if program.held:
            program.hold_reason = reason
            if program.program_limits is not None:
                self.program_limits.held(program)
            self.global_policies.begins_to_wait(program)
        self.families.lost_claim(program)

    def pause(self, program: Program, reason: Reason) -> None:
        """Take the claim of an active program that has no turn in flight."""
        self.limits.look_away(program)
        self.knowledge.tool_censored(program, self.book.now_s)
        self.leave(program, self.book.paused_place(program), reason)
        self.watch_paused(program)

    def pause_until(self, replica: Replica, most_tokens: float, reason: Reason, least_count: int) -> None:
        """Pause acting programs of a replica in one batch: see `View.propose_pause_until`."""
        paused = self.book.pause_until(replica, most_tokens, reason, least_count)
        self.limits.look_away_from_all(paused)
        self.knowledge.tools_censored(paused, self.book.now_s)
        for program in paused if self.families.children or self.admission is not None else ():
            self.families.lost_claim(program)
            self.watch_paused(program)

    def idle(self, program: Program) -> None:
        """Take the claim and the admission of a program without a turn, until its next one."""
        to = self.book.idle if self.admission is None else self.book.dismissed
        if program.place.active:
            self.knowledge.tool_censored(program, self.book.now_s)
            self.leave(program, to, Reason.IDLE)
        elif program.place is not to:
            self.book.move(program, to)

    def lose_replica(self, program: Program, reason: Reason) -> None:
        """Take a program off a lost replica; its turns in flight there are lost."""
        book = self.book
        was_reasoning = program.place.kind is not Kind.ACTING
        self.limits.look_away(program)
        for turn in program.in_flight.values():
            self.stream.lost(turn)
        program.lost.update(program.in_flight)
        program.in_flight.clear()
        self.leave(program, book.paused_place(program), reason)
        if not program.held and was_reasoning:
            program.acting_since_s = program.turns_ended_s = book.now_s
            program.tool_ends_count = 0
            self.limits.hear_of(program)
        book.resize(program)
        program.place.rank(program)
        self.watch_paused(program)
        if program.held and program.destination is not None:  # it had a destination, and nothing keeps it any more
            destination, reason = self.take_destination(program)
            if destination is not None:
                self.restore(program, destination, reason)

    def restore(self, program: Program, replica: Replica, reason: Reason) -> None:
        """Give a paused program a claim on a replica, and a lease to each of its held turns.

        If a turn continues from something that only another replica has, restore the program there, regardless of room:
        elsewhere the turn would only fail.
        """
        book = self.book
        replica = self.placing.wanted_by(program) or replica
        program.destination = None
        if program.held and next(iter(program.held.values())).arrived_s < book.now_s:  # not a retry
            self.knowledge.restore_pace.restored(book.now_s)
        self.leases.end_waits(program)
        if program.look_again_s < inf:
            self.program_limits.forget(program)
        book.move(program, replica.working if program.held else replica.acting, reason)
        if reason in (Reason.PATIENCE, Reason.PARENT):
            replica.let_in.add(program)
        if program.held:
            self.leases.grant_held(program, replica, reason)
        else:
            program.hold_reason = ""
            self.limits.watch(program)
        self.families.got_claim(program)

    def restore_beyond_limit(self, program: Program, reason: Reason) -> bool:
        """Restore a program where that costs least, regardless of room; return False if no replica may take it."""
        replica = self.placing.beyond_limit(program, self.placing.open_to(program))
        if replica is not None:
            self.restore(program, replica, reason)
        return replica is not None

    def parent_claims(self, program: Program) -> bool:
        """Return whether a program must be let in because its parent may wait for it."""
        return self.placing.parent_claims(program)

    def asked(self, program: Program, replica: Replica) -> Placement:
        """Ask the policy whether a program may be active on that replica now."""
        placement: Placement = self.decider.place(self.view, program, [replica])
        return placement

    def go_on(self, program: Program, replica: Replica) -> None:
        """Grant the held turns of a stalled program, because grants go on there."""
        self.book.move(program, replica.working)
        self.leases.end_waits(program)
        self.leases.grant_held(program, replica, Reason.HOME)
        self.book.resize(program)

    def stand(self, program: Program) -> None:
        """Put a paused program into its current place, behind its equals."""
        to = self.book.paused_place(program)
        if to is program.place:
            self.book.enter_anew(program)
        else:
            self.book.move(program, to)

    def watch_paused(self, program: Program) -> None:
        """Watch the idle limit of a program without a claim whose admission keeps others from beginning."""
        place = program.place
        if self.admission is not None and place.admitted and place.kind in (Kind.RESTING, Kind.AWAY):
            self.limits.watch(program)

    def tool_began(self, program: Program) -> None:
        """Note that a program's tool runs from now on."""
        self.knowledge.tool_began(program)
        if self.stream.flows:
            self.stream.tool_began(program)

    def reject(self, turn: Turn, reason: Reason) -> None:
        """End a held turn that will never get a lease."""
        self.turn_ends.reject(turn, reason)

    # --- marks ------------------------------------------------------------------------------------------------------

    def mark(self, program: Program, reason: Reason, *, cause: Reason | None = None) -> None:
        """Add a cause for a program with turns in flight to leave when these end.

        Turns that arrive until then are held.
        """
        book, cause = self.book, cause or reason
        if cause in program.leaves_for:
            return
        program.leaves_for[cause] = None
        if program.place.kind is Kind.LEAVING:
            book.rank_anew(program)
            program.note(book.now_s, "mark", reason, program.replica_id)
            return
        book.move(program, replica_of(program).leaving, reason)
        for turn in program.held.values():  # until grants go on there
            self.deadlines.add(turn)

    def unmark(self, program: Program, reason: Reason, *, cause: Reason | None = None) -> None:
        """Remove one cause for which a program is marked, or all; without any cause it stays.

        Turns that were held because it was to leave are then granted.
        """
        book, replica = self.book, replica_of(program)
        if cause is not None:
            del program.leaves_for[cause]
        else:
            program.leaves_for.clear()
        if program.leaves_for:
            book.rank_anew(program)
            return
        suspended = bool(program.held and replica.suspended_for)
        book.move(program, replica.stalled if suspended else replica.working, reason)
        if suspended:
            for turn in program.held.values():
                self.deadlines.discard(turn)
            program.hold_reason = Reason.SUSPENDED
        else:
            self.leases.end_waits(program)
            self.leases.grant_held(program, replica, Reason.HOME)

    def reconsider(self, program: Program) -> None:
        """Remove the causes of a program's mark that are over: it has nowhere to go, or no turn that must go."""
        failed = any(self.placing.can_avoid(program, turn.avoid_replica_id) for turn in program.held.values())
        if Reason.TURN_FAILED in program.leaves_for and not failed:
            self.unmark(program, Reason.STAYS, cause=Reason.TURN_FAILED)
        destination = program.destination
        if Reason.MOVED in program.leaves_for and not (destination and self.routing.is_open(destination[0])):
            program.destination = None
            self.unmark(program, Reason.STAYS, cause=Reason.MOVED)

    # --- who may begin ----------------------------------------------------------------------------------------------

    def balance(self, moment: Moment) -> None:
        """Where there may be room, admit programs, place routed ones, and let the policy restore others."""
        book = self.book
        if self.admission is not None:
            self.admit(moment)
        if book.queue.routed:
            place_is_free = book.active_count < self.active_before_count  # room that all replicas share
            self.routing.let_in(self, everywhere=moment is not Moment.TURN_ENDED or place_is_free)
        self.decider.balance(self.view, moment)
        book.changed_replicas.clear()

    def admit(self, moment: Moment) -> None:
        """Admit the programs that the admission lets in, and place them."""
        if self.admission is None:
            return
        book = self.book
        while (admitted := self.admission.next(self.view, moment)) is not None and book.granting_replicas:
            program = book.programs.get(admitted.program_id)
            if program is None or program.place is not book.queue.unadmitted:
                return
            program.note(book.now_s, "admitted", self.admission.name, None)
            routed_to = program.routed_to
            book.move(program, book.queue.waiting if routed_to is None else book.queue.place_at(routed_to))
            target, reason = self.placing.find(program, None)
            if target is None:
                program.hold_reason = reason
                self.global_policies.begins_to_wait(program)
            else:
                self.restore(program, target, reason)

    def dismiss(self, program: Program, reason: Reason) -> None:
        """Make a program without a turn in flight wait for admission from its next turn on."""
        book = self.book
        if program.place.active:
            self.pause(program, reason)
        self.limits.look_away(program)
        book.move(program, book.queue.unadmitted if program.held else book.dismissed)
        if program.held:
            program.hold_reason = Reason.ADMISSION

    def refresh_hold_reason(self, program: Program) -> None:
        """Update the hold reason of a program once no replica is up, and of one that was held as nothing was granted.

        An unadmitted program waits for admission if any replica grants. A routed one waits for its replica, whatever
        other replicas grant.
        """
        book = self.book
        if not book.open_replicas:
            program.hold_reason = Reason.NO_REPLICA
        elif program.hold_reason not in (Reason.SUSPENDED, Reason.NO_REPLICA):
            return
        elif not (self.placing.candidates(None, program) if program.admitted else book.granting_replicas):
            program.hold_reason = Reason.SUSPENDED
        else:
            program.hold_reason = Reason.NO_ROOM if program.admitted else Reason.ADMISSION

    # --- the end of a program ---------------------------------------------------------------------------------------

    def end(self, program: Program, reason: Reason) -> None:  # noqa: C901, PLR0912 - what does not apply is not called
        """End a program: reject its held turns, and let those in flight finish as turns without a program."""
        book, place = self.book, program.place
        replica = place.replica if isinstance(place, ReplicaPlace) else None
        for turn in program.in_flight.values():
            self.stream.lost(turn)
        tool_ran = program.tool_runs
        if program.hint is not None:
            self.hints.program_ended(program)
        self.knowledge.program_ended(program, book.now_s)
        for learner in self.stream.learners:
            learner.program_ended(self.view, program)
        if self.stream.flows:
            if tool_ran:
                self.stream.tools_changed()
            self.stream.program_ended(program)
        if program.group is not None:
            book.leave_group(program)
        if program.parent_id:
            self.families.leave(program)
        if self.global_policies.name is not None:
            self.global_policies.program_ended(program)
        routes = self.routing.routes
        if routes.count or routes.by_model:
            routes.program_ended(program)
        for turn in program.held.values():
            del book.turns[turn.turn_id]
            self.leases.wait_ends(program, turn)
            book.decisions.append(Reject(turn.turn_id, program.program_id, reason))
        program.held.clear()
        if program.look_again_s < inf:
            self.program_limits.forget(program)
        if replica is not None:
            if program.in_flight:
                replica.residency.leave(program.generation, program.context_tokens)
            if program.parent_id:
                self.families.lost_claim(program)
        self.limits.ended(program)
        book.move(program, book.ended, reason)
        if replica is not None and program.in_flight:
            first = next(iter(program.in_flight.values()))  # it stands for all: they share their prefix
            first.claim_tokens = program.claim_tokens
            replica.account.claim_other(first.claim_tokens)
        for turn in (*program.in_flight.values(), *program.lost.values()):
            turn.program = None
        program.in_flight.clear()
        program.lost.clear()


Listener = Callable[[Signal], None]


class Stream:
    """Who hears what happens in one scheduler: the learners of its policy, and by signals its observers and others."""

    __slots__ = ("_book", "_knowledge", "_listeners", "_observers", "_view", "flows", "learners")

    def __init__(
        self, book: Book, knowledge: Knowledge, view: View, observers: Sequence[Observe], learners: Sequence[Learner]
    ) -> None:
        """Start without listeners; `observers` of the policy hear all signals, with its `view`."""
        self._book = book
        self._knowledge = knowledge
        self._observers = tuple(observers)
        self._listeners: tuple[Listener, ...] = ()
        self._view = view
        self.learners = tuple(learners)
        """They are told directly: no signal is made for them."""
        self.flows = bool(observers)
        """Whether anybody wants signals: check before making one."""

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each new signal; return a function that ends that."""
        self._listeners = (*self._listeners, listener)
        self.flows = True

        def stop() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            self.flows = bool(self._observers) or bool(self._listeners)

        return stop

    def send(self, signal: Signal) -> None:
        """Send a signal to the policy and to listeners."""
        for observe in self._observers:
            observe(self._view, signal)
        for listener in self._listeners:
            listener(signal)

    def submitted(self, program: Program, turn: Turn) -> None:
        """Report that a turn goes to its replica."""
        now_s, projected_tokens = self._book.now_s, turn.prompt_tokens + program.reserve_tokens
        account_id, held_s = turn.account_id or "", now_s - turn.arrived_s
        self.send(GpuSubmit(now_s, program.program_id, turn.turn_id, account_id, projected_tokens, held_s))

    def began(self, turn: Turn) -> None:
        """Report that the first token of a turn arrived."""
        if turn.program is not None:
            now_s, program_id, account_id = self._book.now_s, turn.program.program_id, turn.account_id or ""
            self.send(GpuFirstToken(now_s, program_id, turn.turn_id, account_id, now_s - turn.granted_s))

    def ended(self, turn: Turn, freed_tokens: int, computed_tokens: int, *, finished: bool) -> None:
        """Report that a turn is over, if it was in flight."""
        if turn.account_id is None or turn.program is None:
            return
        now_s, program_id, account_id = self._book.now_s, turn.program.program_id, turn.account_id
        served_s = now_s - turn.granted_s
        self.send(
            GpuEnd(now_s, program_id, turn.turn_id, account_id, freed_tokens, computed_tokens, served_s, finished)
        )

    def lost(self, turn: Turn) -> None:
        """Report the end of a turn without usage, if it was in flight: what it computed is a guess."""
        if turn.account_id is not None and turn.program is not None:
            for learner in self.learners:
                learner.turn_ended(self._view, turn.program, turn, False)
        if self.flows:
            whole_tokens = turn.prompt_tokens + turn.output_tokens
            self.ended(turn, whole_tokens, whole_tokens - turn.resident_tokens, finished=False)

    def tool_began(self, program: Program) -> None:
        """Report that a program's tool began."""
        self.send(ToolStart(self._book.now_s, program.program_id, program.tool))
        self.tools_changed()

    def tool_ended(self, program: Program) -> None:
        """Report that a program's tool ended."""
        self.send(ToolEnd(self._book.now_s, program.program_id, program.tool, program.away_s))
        self.tools_changed()

    def tools_changed(self) -> None:
        """Report how many tools run."""
        self.send(ToolNum(self._book.now_s, self._knowledge.tools_running_count, self._knowledge.mean_tool_s))

    def program_ended(self, program: Program) -> None:
        """Report that a program ended."""
        self.send(ProgramEnd(self._book.now_s, program.program_id, program.turn_count))


NEWLY_WAITING_COUNT: Final = 8192
"""A global policy hears of at most this many newly waiting programs in one period; of the others in the next ones.

No event is handled while it decides, so it must not process a burst in one go. A second's turns are fewer."""


class GlobalPolicies:
    """The global policies of one scheduler; mostly there is none."""

    __slots__ = ("_asked", "_book", "_view", "changes_count", "name", "newly_waiting")

    def __init__(self, policy: Policy, book: Book, view: View) -> None:
        """Ask the global policy of `policy`, if any, at the next tick."""
        chosen = policy.global_policy
        self.name = None if chosen is None else chosen.name
        """Their name; None without one."""
        self._asked = [] if chosen is None else [_Asked(each) for each in chosen.chained()]
        self._book = book
        self._view = view
        self.changes_count = 0
        """Number of changes so far, by them or by an operator."""
        self.newly_waiting: Sequence[Program] = ()
        """The programs of which the policy hears while it is asked."""

    @property
    def unseen_count(self) -> int:
        """Number of programs whose wait a policy has not heard of yet; some may no longer wait."""
        return max((len(asked.unseen) for asked in self._asked), default=0)

    def decide(self) -> bool:
        """Ask the policies that are due; return whether they changed anything."""
        before_count, now_s = self.changes_count, self._book.now_s
        for asked in self._asked:
            if now_s >= asked.due_s:
                asked.due_s = next_due_s(asked.due_s, now_s, asked.policy.period_s)
                self.newly_waiting = asked.take_unseen()
                asked.policy.decide(self._view)
                self.newly_waiting = ()
        return self.changes_count != before_count

    def begins_to_wait(self, program: Program) -> None:
        """Note for them that a program's turn is held."""
        for asked in self._asked:
            asked.unseen[program] = None

    def program_ended(self, program: Program) -> None:
        """Forget a program."""
        for asked in self._asked:
            asked.unseen.pop(program, None)


class _Asked:
    """A global policy, when it is asked next, and of whom it has not heard yet."""

    __slots__ = ("due_s", "policy", "unseen")

    def __init__(self, policy: GlobalPolicy) -> None:
        """Ask `policy` at the next tick."""
        self.policy = policy
        self.due_s = -inf
        self.unseen: dict[Program, None] = {}
        """Programs whose turns were held since it last heard of them, if ever."""

    def take_unseen(self) -> Sequence[Program]:
        """Take and return the first to wait that still wait, at most `NEWLY_WAITING_COUNT`."""
        told: list[Program] = []
        for program in list(self.unseen):
            if len(told) == NEWLY_WAITING_COUNT:
                break
            del self.unseen[program]
            if waits(program):
                told.append(program)
        return told


def waits(program: Program) -> bool:
    """Return whether a program waits to be let in, with a turn."""
    return bool(program.held) and not program.place.active


def next_due_s(due_s: float, now_s: float, period_s: float) -> float:
    """Return when something due at `due_s` is due again: ticks come a little early or late, and may be missed."""
    return now_s + period_s if due_s == -inf else max(due_s + period_s, now_s + period_s / 2)


PRIORITY_STEP: Final = 2**32
"""Weight of one step of a program's priority against the policy's, in the numbers that engines get."""


class Leases:
    """Grants turns of active programs, and turns without a program."""

    __slots__ = ("_book", "_deadlines", "_priority", "_stream", "_view")

    def __init__(
        self, book: Book, deadlines: Deadlines, stream: Stream, view: View, priority: EnginePriority | None
    ) -> None:
        """Grant turns in `book`; `priority` computes what engines are told, if anything."""
        self._book = book
        self._deadlines = deadlines
        self._stream = stream
        self._view = view
        self._priority = priority

    def begin_flights(self, program: Program, turns: list[Turn], replica: Replica) -> int:
        """Put turns in flight on their program's replica; the program's claim may be stale after that.

        Return how many tokens of the program others claim there, or its branches repeat.
        """
        account = replica.account
        others_tokens, repeated_tokens = self._book.prefixes.shared_on(program, replica.replica_id)
        resident_tokens = others_tokens + replica.residency.resident_tokens(program.generation)
        for turn in turns:
            turn.account_id = replica.replica_id
            turn.granted_s, turn.granted_flight_s = self._book.now_s, account.flight_s
            turn.resident_tokens = resident_tokens if resident_tokens < turn.prompt_tokens else turn.prompt_tokens
            account.turn_count += 1
            if account.pending_encode_count is not None:
                account.pending_encode_count += 1  # one image of it, as far as known
            for learner in self._stream.learners:
                learner.turn_granted(program, turn, turn.granted_s - turn.arrived_s)
            if self._stream.flows:  # listeners find the turns before it in the program's count
                self._stream.submitted(program, turn)
            program.in_flight[turn.turn_id] = turn
            program.turn_count += 1
        return others_tokens + repeated_tokens

    def grant(self, program: Program, turn: Turn, reason: Reason) -> None:
        """Report that a turn, which is in flight by now, has its lease."""
        program.granted_output_tokens = turn.expected_output_tokens
        priority = None if self._priority is None else self._priority.engine_priority(self._view, program)
        replica_id = program.replica_id or ""
        if program.priority or program.priority_by_replica is not None:
            priority = engine_priority(program, replica_id, priority)
        self._book.decisions.append(Grant(turn.turn_id, program.program_id, replica_id, reason, priority))

    def grant_held(self, program: Program, replica: Replica, reason: Reason) -> None:
        """Grant every held turn of an active program where it is."""
        program.hold_reason = ""
        held, program.held = program.held, {}
        if held:
            shared_tokens = self.begin_flights(program, list(held.values()), replica)
            replica.residency.use(program.generation, program.claim_tokens - shared_tokens)
        for turn in held.values():
            self.grant(program, turn, reason)

    def end_waits(self, program: Program) -> None:
        """Note that none of a program's turns is held any longer."""
        for turn in program.held.values():
            self.wait_ends(program, turn)

    def wait_ends(self, program: Program, turn: Turn) -> None:
        """Note that a turn is no longer held; one that was held in place did not wait for room."""
        program.held_s_total += self._book.now_s - turn.arrived_s
        self._deadlines.discard(turn)
        if not program.place.active:
            self._book.ledger.wait_ends(self._book.now_s)

    def grant_anonymous(self, turn: Turn, candidates: Sequence[Replica]) -> None:
        """Grant a turn without a program on the least loaded replica."""
        replica_id = least_loaded(candidates).replica_id
        account = self._book.touch(self._book.replicas[replica_id])
        account.claim_other(turn.claim_tokens)
        account.turn_count += 1
        if account.pending_encode_count is not None:
            account.pending_encode_count += 1
        turn.account_id = replica_id
        turn.granted_s, turn.granted_flight_s = self._book.now_s, account.flight_s
        self._book.decisions.append(Grant(turn.turn_id, None, replica_id, Reason.ANONYMOUS))


def engine_priority(program: Program, replica_id: str, policy_priority: int | None) -> int | None:
    """Return the number that an engine gets with a turn: the program's own priority before the policy's."""
    by_replica = program.priority_by_replica
    priority = program.priority if by_replica is None else by_replica.get(replica_id, program.priority)
    if not priority or policy_priority is None:
        return priority or policy_priority
    return priority * PRIORITY_STEP + max(-PRIORITY_STEP // 2, min(PRIORITY_STEP // 2 - 1, policy_priority))


class Placing:
    """Finds where programs may go. It changes nothing."""

    __slots__ = ("_book", "_decider", "_families", "_overdraft_ratio", "some_encode", "view")

    def __init__(self, book: Book, policy: Policy, families: Families, overdraft_ratio: float, view: View) -> None:
        """Ask `policy` about what is in `book`."""
        self._book = book
        self._decider = policy.decider
        self._families = families
        self._overdraft_ratio = overdraft_ratio
        self.view = view
        self.some_encode = False
        """Whether any replica ever reported how many images it has to encode."""

    def open_to(self, program: Program) -> Sequence[Replica]:
        """Return where a program may get a claim now: its route's replica if that grants, else any with its model."""
        routed = self._book.replicas.get(program.routed_to) if program.routed_to is not None else None
        if routed is not None and routed.grants:
            return [routed]
        return serving(self._book.granting_replicas, program.served_by)

    def candidates(self, avoid_replica_id: str | None, program: Program | None = None) -> Sequence[Replica]:
        """Return the replicas that a turn may go to: without the one to avoid, if another is left.

        A routed program may go to its replica alone, except for a turn that just failed there.
        """
        granting: Sequence[Replica] = self._book.granting_replicas
        if program is not None and program.routed_to not in (None, avoid_replica_id):
            routed = self._book.replicas.get(program.routed_to or "")
            return [routed] if routed is not None and routed.grants else []
        if program is not None and program.served_by is not None:
            granting = serving(granting, program.served_by)
        if avoid_replica_id is None:
            return granting
        return [replica for replica in granting if replica.replica_id != avoid_replica_id] or granting

    def can_avoid(self, program: Program, replica_id: str | None) -> bool:
        """Return whether that is an active program's replica, and it could go on elsewhere."""
        if replica_id is None or replica_id != program.replica_id:
            return False
        return any(candidate.replica_id != replica_id for candidate in self.candidates(replica_id, program))

    def wanted_by(self, program: Program) -> Replica | None:
        """Return the replica that a program's held turn needs, if it grants."""
        for turn in program.held.values():
            if turn.wanted_replica_id is not None:
                wanted = self._book.replicas.get(turn.wanted_replica_id)
                if wanted is not None and wanted.grants and serving([wanted], program.served_by):
                    return wanted
        return None

    def granting(self, proposed: ReplicaView | None) -> Replica | None:
        """Return the replica that a policy named, if a program may get a claim there."""
        replica = self._book.replicas.get(proposed.replica_id) if proposed is not None else None
        return replica if replica is not None and replica.grants else None

    def destination_of(self, program: Program) -> tuple[Replica | None, Reason]:
        """Return a program's destination, if it can still go there."""
        if program.destination is None:
            return None, Reason.GLOBAL_POLICY
        replica_id, reason = program.destination
        replica = self._book.replicas.get(replica_id)
        may_go = replica is not None and replica.grants and serving([replica], program.served_by)
        return (replica if may_go else None), reason

    def find(self, program: Program, avoid_replica_id: str | None) -> tuple[Replica | None, Reason]:
        """Ask the policy where a program with a turn may be active now; if nowhere, return the reason."""
        wanted = self.wanted_by(program)
        candidates = self.candidates(avoid_replica_id, program) if wanted is None else [wanted]
        if not candidates and self.parent_claims(program):
            candidates = self.open_to(program)
            if not candidates and program.served_by is not None:
                self._families.overdrawn[family_of(program)] = None
        if not candidates:
            return None, Reason.SUSPENDED if self._book.open_replicas else Reason.NO_REPLICA
        target, reason = self._among(candidates, program)
        if target is not None and program.routed_to is not None and target not in candidates:
            target = candidates[0]
        return target, reason

    def _among(self, candidates: Sequence[Replica], program: Program) -> tuple[Replica | None, Reason]:
        """Return where a program may be active now, or where its parent's claim lets it in; if nowhere, the reason.

        Of replicas where it fits, one with fewer images to encode comes first: they are encoded one after the other.
        """
        nearer = self._nearer_to_encode(candidates, program) if self.some_encode else ()
        placement: Placement = self._decider.place(self.view, program, nearer or candidates)
        if nearer and placement.reason is not Reason.FITS:
            placement = self._decider.place(self.view, program, candidates)
        target = self.granting(placement.replica)
        if target is None and self.parent_claims(program):
            beyond = self.beyond_limit(program, candidates)
            if beyond is not None:
                return beyond, Reason.PARENT
            self._families.overdrawn[family_of(program)] = None
        return target, placement.reason

    def _nearer_to_encode(self, candidates: Sequence[Replica], program: Program) -> Sequence[Replica]:
        """Return the candidates with the fewest images to encode, if those are not all, and the program's last one.

        Only if the program fits there beside the claims: nobody gives up memory for it.
        """
        if program.place.active:
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

    def parent_claims(self, program: Program) -> bool:
        """Return whether a program must be let in because its parent, of the same tenant, may wait for it."""
        if not program.parent_id:
            return False
        parent = self._book.programs.get(program.parent_id)
        if parent is None or not parent.place.active or parent.tenant != program.tenant:
            return False
        return self._families.may_enter(program)

    def beyond_limit(self, program: Program, candidates: Sequence[Replica]) -> Replica | None:
        """Return where a program that fits nowhere costs least: most of it is there, and least is overdrawn.

        None if no replica may take it beyond its limit.
        """
        wanted = self.wanted_by(program)
        able = candidates if wanted is None else [wanted]
        willing = [replica for replica in able if replica.may_overdraw(program.claim_tokens, self._overdraft_ratio)]

        def cost(replica: Replica) -> tuple[float, float, int, int]:
            account = replica.account
            resident_tokens = min(program.claim_tokens, self._book.resident_tokens(program, replica))
            excess_tokens = max(0.0, account.demand_tokens + program.claim_tokens - account.limit_tokens)
            return -resident_tokens, excess_tokens, account.turn_count, account.demand_tokens

        return min(willing, key=cost, default=None)


LEAST_CONFIDENCE_RATIO: Final = 0.5
"""A hint that is believed less is ignored."""

LATE_RATIO: Final = 2.0
"""A turn that comes after more than this many times the announced time is late, one before its reciprocal early."""

TOLERANCE_S: Final = 1.0
"""Any hint may be wrong by this much."""


class Hints:
    """Handles clients' hints on their programs' next turns."""

    __slots__ = ("_core", "_hint_ratio", "threshold_s")

    def __init__(self, core: Core) -> None:
        """Work on the parts of `core`."""
        self._core = core
        self.threshold_s: Callable[[View, ProgramView], float] | None = (
            core.decider.hold_threshold_s if core.policy.holds_by_cost else None
        )
        """For how long holding a program pays; None if the policy does not say."""
        self._hint_ratio: float = core.policy.hint_ratio

    def take(self, event: ProgramHinted) -> Moment | None:
        """Take a hint; it counts from now, or from the end of the turns that are here.

        Return why a balance is due, if one is.
        """
        core, book = self._core, self._core.book
        program = book.programs.get(event.program_id)
        if program is None:
            return None
        core.knowledge.hints.taken_counts[event.keep] += 1
        if event.keep == DROP and event.branch_id != MAIN_BRANCH:
            return self._drop_branch(program, event.branch_id)
        hint = Hint(event.next_turn_in_s, event.confidence_ratio, event.keep)
        program.note(book.now_s, "hinted", hint.words, program.replica_id)
        before, program.hint = program.hint, hint
        if program.place.phase is not Phase.ACTING:
            return None
        if before is not None and before.given_s is not None:
            hint.since_s, hint.measured = before.since_s, before.measured
            own_until_s = before.own_until_s
        else:
            own_until_s = program.hold_until_s
            hint.since_s = book.now_s
        hint.given_s = book.now_s
        hold_until_s, keeps = self.hold_until_s(program, hint, own_until_s)
        self._hold(program, hold_until_s, keeps=keeps)
        return Moment.TURN_ENDED if program.place.kind is Kind.ACTING and hold_until_s <= book.now_s else None

    def _hold(self, program: Program, hold_until_s: float, *, keeps: bool) -> None:
        """Hold a program's claim until then, if it has one."""
        if program.place.kind is Kind.ACTING:
            self._core.book.act_anew(program, program.acting_since_s, hold_until_s, hint_keeps=keeps)
        else:
            program.hold_until_s, program.hint_keeps = hold_until_s, keeps

    def hold_until_s(self, program: Program, hint: Hint, own_until_s: float) -> tuple[float, bool]:
        """Return until when a claim is worth holding, and whether that is longer than the policy's `own_until_s`.

        A hint that did not count yet counts from now on.
        """
        now_s = self._core.book.now_s
        if hint.given_s is None:
            hint.given_s = hint.since_s = now_s
        hint.own_until_s = own_until_s
        threshold_s = inf if self.threshold_s is None else self.threshold_s(self._core.view, program)
        if hint.measured is None:
            hint.measured = _expected(hint, threshold_s)
        if self.threshold_s is None:
            return own_until_s, False
        until_s = self._until_s(program, hint, own_until_s, threshold_s)
        if until_s <= own_until_s:
            return until_s, False
        return (until_s, True) if self._has_room(program) else (own_until_s, False)

    def _until_s(self, program: Program, hint: Hint, own_until_s: float, threshold_s: float) -> float:
        assert hint.given_s is not None, "a hint that counts was given"
        if hint.keep in (OFFLOAD, DROP):
            return min(own_until_s, hint.given_s)
        ratio = self._core.knowledge.hints.confidence_ratio(program, hint.confidence_ratio)
        if ratio < LEAST_CONFIDENCE_RATIO:
            return own_until_s
        most_until_s = hint.since_s + threshold_s
        if hint.next_turn_in_s is None:
            return max(own_until_s, most_until_s)
        held_s = ratio * hint.next_turn_in_s + (1.0 - ratio) * LATE_RATIO * hint.next_turn_in_s
        if ratio * threshold_s < held_s:
            return hint.given_s
        return min(hint.given_s + max(TOLERANCE_S, LATE_RATIO * hint.next_turn_in_s), most_until_s)

    def _has_room(self, program: Program) -> bool:
        """Return whether the limit for hints has room for this claim, where it is."""
        place = program.place
        if not isinstance(place, ReplicaPlace) or place.kind is Kind.LEAVING:
            return False
        replica = place.replica
        others_tokens = replica.acting.hint_tokens - (program.claim_tokens if program.hint_keeps else 0)
        return others_tokens + program.claim_tokens <= self._hint_ratio * replica.account.limit_tokens

    def turn_came(self, program: Program) -> None:
        """Check a client's hint against when the turn came; one that does not count yet stays for the turn's end."""
        hint = program.hint
        if hint is None or hint.given_s is None:
            return
        self._measure(program, hint)
        program.hint = None
        if program.hint_keeps:
            self._hold(program, program.hold_until_s, keeps=False)

    def program_ended(self, program: Program) -> None:
        """Count a hint as late if its program ended after the turn was expected."""
        hint = program.hint
        if hint is not None and hint.measured is not None:
            given_s, _, most_s = hint.measured
            if self._core.book.now_s - given_s > most_s:
                self._measure(program, hint)
        program.hint = None

    def _measure(self, program: Program, hint: Hint) -> None:
        if hint.measured is None:
            return
        given_s, least_s, most_s = hint.measured
        came_s = self._core.book.now_s - given_s
        outcome = self._core.knowledge.hints.learn(program, came_s, least_s, most_s)
        if outcome != RIGHT:
            why = f"{outcome}: the turn came after {came_s:.1f} s"
            program.note(self._core.book.now_s, "hint was", why, program.replica_id)

    def _drop_branch(self, program: Program, branch_id: str) -> Moment | None:
        """Treat a branch without a turn as ended."""
        core, book = self._core, self._core.book
        turns = (*program.in_flight.values(), *program.held.values())
        busy = any(turn.branch_id == branch_id for turn in turns)
        if busy or branch_id not in program.branches:
            return None
        core.turn_ends.leave_prefixes(program, [program.branches.pop(branch_id)])
        program.note(book.now_s, "hinted", f"{DROP} {branch_id}", program.replica_id)
        book.resize(program)
        if program.place.active:
            return Moment.TURN_ENDED
        program.place.rank(program)
        return None


def _expected(hint: Hint, threshold_s: float) -> tuple[float, float, float] | None:
    """Return when a hint was given, and the seconds from then within which its turn is expected; None if unknown.

    A client that wants its memory kept without saying how long expects the turn before keeping stops to pay.
    """
    assert hint.given_s is not None, "a hint that counts was given"
    said_s = hint.next_turn_in_s
    if said_s is None:
        return (hint.given_s, 0.0, threshold_s) if hint.keep == RETAIN else None
    return hint.given_s, min(said_s / LATE_RATIO, said_s - TOLERANCE_S), max(said_s * LATE_RATIO, said_s + TOLERANCE_S)


class TurnEnds:
    """Removes ended turns from their programs, which then act, leave or go on."""

    __slots__ = ("_core",)

    def __init__(self, core: Core) -> None:
        """Work on the parts of `core`."""
        self._core = core

    def reject(self, turn: Turn, reason: Reason) -> None:
        """End a held turn that will never get a lease."""
        program_id = turn.program.program_id if turn.program is not None else None
        self._core.book.decisions.append(Reject(turn.turn_id, program_id, reason))
        self.drop(turn, "rejected")

    def drop(self, turn: Turn, outcome: str) -> None:
        """End a turn that leaves no usage."""
        program = turn.program
        if program is not None:
            self._core.stream.lost(turn)
        if turn.account_id is not None:
            account = self._core.book.replicas[turn.account_id].account
            self._core.knowledge.turn_lost(turn, self._core.book.now_s, account.turn_count - 1)
        del self._core.book.turns[turn.turn_id]
        if program is None:
            self.end_anonymous(turn)
            return
        if outcome != "superseded" and turn.turn_id not in program.held:
            program.lost_turn_ids.append(turn.turn_id)
        self._forget_prefix(program, turn)
        self.end_turn(program, turn)
        if len(program.branches) > 1:
            self.forget_branches(program, turn, finished=False)
        self.after_turn(program, turn, outcome)

    def end_anonymous(self, turn: Turn) -> None:
        """End a turn that has no program, or no longer has one."""
        if self._core.book.anonymous_held.pop(turn.turn_id, None) is not None:
            self._core.book.ledger.wait_ends(self._core.book.now_s)
        elif turn.account_id is not None:
            account = self._core.book.changes(self._core.book.replicas[turn.account_id])
            account.claim_other(-turn.claim_tokens)
            account.turn_count -= 1

    def end_turn(self, program: Program, turn: Turn) -> None:
        """Remove an ended turn from its program, which stays in its place."""
        program.lost.pop(turn.turn_id, None)
        if program.held.pop(turn.turn_id, None) is not None:
            self._core.leases.wait_ends(program, turn)
            if not program.held and program.look_again_s < inf:
                self._core.program_limits.forget(program)
        elif program.in_flight.pop(turn.turn_id, None) is not None:
            book, place = self._core.book, program.place
            assert isinstance(place, ReplicaPlace), program
            replica = place.replica
            book.changes(replica).turn_count -= 1
            if not program.in_flight:
                others_tokens, repeated_tokens = book.prefixes.shared_on(program, replica.replica_id)
                left_tokens = program.context_tokens - others_tokens - repeated_tokens
                replica.residency.leave(program.generation, left_tokens if left_tokens > 0 else 0)

    def forget_branches(self, program: Program, ended: Turn, *, finished: bool) -> None:
        """Drop side branches of a program that are not used again."""
        forgotten = program.forget_ended_branches(ended, finished=finished)
        if forgotten:
            self.leave_prefixes(program, forgotten)

    def leave_prefixes(self, program: Program, forgotten: list[Branch]) -> None:
        """Remove a program's former branches from what others share there."""
        if program.place.active:
            account = self._core.book.changes(replica_of(program))
            self._core.book.prefixes.leave(program, account, forgotten)

    def _forget_prefix(self, program: Program, dropped: Turn) -> None:
        """Drop what a branch shares if it claims nothing without this turn."""
        branch = program.branches.get(dropped.branch_id)
        if branch is None or branch.context_tokens or not branch.prefix:
            return
        turns = (*program.in_flight.values(), *program.held.values())
        if not any(turn.branch_id == dropped.branch_id for turn in turns if turn is not dropped):
            self.leave_prefixes(program, [branch])
            branch.prefix = ()

    def after_turn(self, program: Program, turn: Turn, outcome: str, *, tool_begins: bool = False) -> None:
        """Move a program on after one of its turns ended; a leaving program leaves after its last."""
        book, place = self._core.book, program.place
        why = f"calls {program.tool}" if program.tool and outcome == "finished" else turn.verdict_cause
        program.note(book.now_s, outcome, why, program.replica_id, turn.granted_s or None)
        if place.phase is REASONING and not program.in_flight and not program.held:
            self._turns_ended(program, tool_begins=tool_begins)
        else:
            if place.kind is Kind.STALLED and not program.held:
                book.move(program, replica_of(program).working)
            book.resize(program)
        if not program.place.active:
            program.place.rank(program)
        elif program.place.kind is LEAVING:
            if program.in_flight:
                self._core.reconsider(program)
            else:
                self._go(program)

    def _turns_ended(self, program: Program, *, tool_begins: bool) -> None:
        """Begin the time between two turns, and measure anew; a leaving program stays in its place until then."""
        book, place = self._core.book, program.place
        program.acting_since_s = program.turns_ended_s = book.now_s
        program.tool_ends_count = 0
        self._core.limits.hear_of(program)
        if tool_begins:
            self._core.knowledge.tool_began(program)
            if self._core.stream.flows:
                self._core.stream.tool_began(program)
        program.hold_until_s = book.now_s + self._core.decider.hold_s(self._core.view, program)
        if (hint := program.hint) is not None:
            program.hold_until_s, program.hint_keeps = self._core.hints.hold_until_s(
                program, hint, program.hold_until_s
            )
        if isinstance(place, ReplicaPlace) and place.kind is not LEAVING:
            book.move(program, place.replica.acting, resized=True)
            self._core.limits.watch(program)
            return
        if not place.active:
            if place.admitted and not program.context_tokens:
                # Its only turns were held and left: there is no memory to restore until another turn comes.
                book.move(program, book.idle)
            else:
                self._core.stand(program)
            self._core.watch_paused(program)
        book.resize(program)

    def _go(self, program: Program) -> None:
        """Let a leaving program go whose turns in flight have ended, with the turns that came meanwhile."""
        avoid_replica_id = program.replica_id if Reason.TURN_FAILED in program.leaves_for else None
        destination, reason = self._core.take_destination(program)
        self._core.pause(program, Reason.MARKED)
        if destination is None and program.held:
            destination, reason = self._core.placing.find(program, avoid_replica_id)
            program.hold_reason = reason
        if destination is not None:
            self._core.restore(program, destination, reason)


MOST_PRIORITY: Final = 1_000_000
"""Priorities are from minus this to this."""

NOT_THERE: Final = "there is no "
"""How a reason begins that names an unknown program or replica."""


class Operations:
    """Routes, priorities, moves and ends of one scheduler."""

    __slots__ = ("_book", "_core")

    def __init__(self, core: Core) -> None:
        """Carry operations out by `core`."""
        self._core = core
        self._book = core.book

    # --- route ------------------------------------------------------------------------------------------------------

    def why_not_route(self, scope: str, name: str, targets: Targets) -> str:
        """Return why a route cannot be set."""
        if scope not in set(Scope):
            return f"a route is for one of {', '.join(Scope)}, not {scope!r}"
        if bool(name) == (scope == Scope.ALL):
            return "a route for all has no name" if name else f"a route for a {scope} names it"
        if scope == Scope.PROGRAM and self._book.programs.get(name) is None:
            return f"there is no live program {name!r}"
        replica_ids = [replica_id for replica_id, _ in targets]
        if unknown := [replica_id for replica_id in replica_ids if replica_id not in self._book.replicas]:
            return f"there is no replica {unknown[0]!r}"
        if len(set(replica_ids)) < len(replica_ids):
            return "a route names a replica twice"
        if not all(weight > 0 and isfinite(weight) for _, weight in targets):
            return "a weight is a number over 0"
        return ""

    def set_route(self, scope: Scope, name: str, targets: Targets, reason: Reason) -> None:
        """Send programs of a scope to replicas: waiting ones now, the others with their next turn."""
        self._changed()
        self._core.routing.set_route(self._core, scope, name, targets, reason)

    # --- priority ---------------------------------------------------------------------------------------------------

    def why_not_priority(self, program_id: str, priority: int, replica_id: str | None) -> str:
        """Return why a program cannot get a priority."""
        if self._book.programs.get(program_id) is None:
            return f"there is no live program {program_id!r}"
        if replica_id is not None and replica_id not in self._book.replicas:
            return f"there is no replica {replica_id!r}"
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY or priority % 1:
            return f"a priority is a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        return ""

    def set_priority(self, program: Program, priority: int, replica_id: str | None, reason: Reason) -> None:
        """Give a program a priority; do nothing if it has that already."""
        if replica_id is None:
            if program.priority == priority:
                return
            program.priority = priority
            if not program.place.active:
                program.place.rank(program)
        else:
            program.priority_by_replica = {**(program.priority_by_replica or {}), replica_id: priority}
        self._changed()
        self._book.decisions.append(SetPriority(program.program_id, priority, replica_id, reason))

    # --- migrate ----------------------------------------------------------------------------------------------------

    def why_not_migrate(self, program_id: str, replica_id: str) -> str:
        """Return why a program cannot go to a replica."""
        program = self._book.programs.get(program_id)
        if program is None:
            return f"there is no live program {program_id!r}"
        replica = self._book.replicas.get(replica_id)
        if replica is None:
            return f"there is no replica {replica_id!r}"
        if not replica.grants:
            return f"replica {replica_id} takes no programs now"
        if not program.admitted:
            return f"program {program_id!r} is not admitted yet"
        if program.place.active and program.replica_id == replica_id:
            return f"program {program_id!r} is on {replica_id} already"
        if program.destination is not None and program.destination[0] == replica_id:
            return f"program {program_id!r} is on its way to {replica_id} already"
        if program.routed_to is not None and program.route is not None and not program.route.names(replica_id):
            return f"program {program_id!r} has a route that does not lead to {replica_id}"
        if program.served_by is not None and not program.served_by.names(replica_id):
            return f"program {program_id!r} asks for a model that {replica_id} does not serve"
        wanted = self._core.placing.wanted_by(program)
        if wanted is not None and wanted is not replica:
            return f"a turn of program {program_id!r} goes on from what {wanted.replica_id} alone has"
        return ""

    def migrate(self, program: Program, replica: Replica, reason: Reason) -> None:
        """Move a program: now, when its turns in flight end, or when its next one arrives."""
        core = self._core
        self._changed()
        if program.routed_to is not None:
            program.routed_to = replica.replica_id
        if program.place.active and program.in_flight:
            program.destination = (replica.replica_id, reason)
            core.mark(program, reason, cause=Reason.MOVED)
        elif program.place.active:
            core.pause(program, reason)
            core.restore(program, replica, reason)
        elif program.held:
            core.restore(program, replica, reason)
        else:
            program.destination = (replica.replica_id, reason)
            self._book.rank_anew(program)

    # --- kill and provision -----------------------------------------------------------------------------------------

    def why_not_kill(self, program_id: str) -> str:
        """Return why a program cannot be ended."""
        return "" if self._book.programs.get(program_id) is not None else f"there is no live program {program_id!r}"

    def kill(self, program: Program) -> None:
        """End a program."""
        self._changed()
        self._core.end(program, Reason.KILLED)

    def why_not_kill_replica(self, replica_id: str) -> str:
        """Return why a replica cannot be ended."""
        return "" if replica_id in self._book.replicas else f"there is no replica {replica_id!r}"

    def kill_replica(self, replica_id: str, reason: Reason) -> None:
        """Make a replica drain and end."""
        self._changed()
        self._book.decisions.append(EndReplica(replica_id, reason))

    def provision(self, reason: Reason) -> None:
        """Ask for one more replica."""
        self._changed()
        self._book.decisions.append(Provision(reason))

    def _changed(self) -> None:
        self._core.global_policies.changes_count += 1


class SchedulerView:
    """The policy's window on the scheduler: see `policy.View`, whose members these are."""

    __slots__ = ("_book", "_core", "_operations", "_provisions_replicas", "previous_tick_s")
    _core: Core
    _operations: Operations

    def __init__(self, book: Book, *, provisions_replicas: bool) -> None:
        """Look at `book`; proposals are possible after `attach`."""
        self._book = book
        self._provisions_replicas = provisions_replicas
        self.previous_tick_s = 0.0  # see `View`

    def attach(self, core: Core, operations: Operations) -> None:
        """Carry proposals out by these."""
        self._core = core
        self._operations = operations

    def _own(self, program: ProgramView) -> Program | None:
        """Return the live program that a policy means."""
        own = program if isinstance(program, Program) else self._book.programs.get(program.program_id)
        return own if own is None or own.place is not self._book.ended else None

    def _replica(self, replica: ReplicaView) -> Replica:
        return replica if isinstance(replica, Replica) else self._book.replicas[replica.replica_id]

    @property
    def now_s(self) -> float:
        """See `View`."""
        return self._book.now_s

    @property
    def replicas(self) -> list[Replica]:
        """See `View`."""
        return self._book.granting_replicas

    @property
    def changed_replicas(self) -> list[Replica]:
        """See `View`."""
        changed: list[Replica] = []
        for replica in self._book.changed_replicas.values():
            if replica.account.usable:
                changed.append(replica)  # noqa: PERF401 - a comprehension costs a call where nothing is compiled
        return changed

    def roomiest(self, ratio: float, count: int) -> list[Replica]:
        """See `View`."""
        return self._book.roomiest(ratio, count)

    def replica(self, replica_id: str | None) -> Replica | None:
        """See `View`."""
        replica = self._book.replicas.get(replica_id) if replica_id is not None else None
        return replica if replica is not None and replica.account.usable else None

    @property
    def active_count(self) -> int:
        """See `View`."""
        return self._book.active_count

    @property
    def admitted_count(self) -> int:
        """See `View`."""
        return self._book.admitted_count

    @property
    def unadmitted_count(self) -> int:
        """See `View`."""
        return self._book.queue.unadmitted.count

    def first_unadmitted(self) -> Program | None:
        """See `View`."""
        return self._book.queue.unadmitted.order.first()

    def unadmitted(self) -> Iterator[ProgramView]:
        """See `View`."""
        return iter(self._book.queue.unadmitted.order)

    def program(self, program_id: str) -> Program | None:
        """See `View`."""
        return self._book.programs.get(program_id)

    def rank_anew(self, program: ProgramView) -> None:
        """See `View`."""
        own = self._own(program)
        if own is not None:
            self._book.rank_anew(own)

    def signal(self, signal: Signal) -> None:
        """See `View`."""
        self._core.stream.send(signal)

    def first_to_pause(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return self._replica(replica).acting.order.first()

    def first_to_mark(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return self._replica(replica).working.order.first()

    def first_expired(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return next(iter(self.first_expired_few(replica, 1)), None)

    def first_expired_few(self, replica: ReplicaView, count: int) -> list[Program]:
        """See `View`."""
        return self._replica(replica).acting.expiring.lowest(count, self._book.now_s)

    def first_to_give_way(self, replica: ReplicaView, count: int) -> list[Program]:
        """See `View`."""
        acting = self._replica(replica).acting
        return acting.expiring.lowest(count) or acting.order.lowest(count)

    def last_marked(self, replica: ReplicaView) -> Program | None:
        """See `View`."""
        return self._replica(replica).leaving.order.first()

    def first_waiting(self) -> Program | None:
        """See `View`."""
        waiting = self._book.queue.waiting
        return waiting.order.first() if waiting.count else None

    def waiting(self) -> Iterator[ProgramView]:
        """See `View`."""
        return iter(self._book.queue.waiting.order)

    def first_waiting_few(self, count: int) -> list[Program]:
        """See `View`."""
        return self._book.queue.waiting.order.lowest(count)

    def first_paused_acting(self) -> Program | None:
        """See `View`."""
        return self._book.queue.resting.order.first()

    def comes_before_all_waiting(self, program: ProgramView) -> bool:
        """See `View`."""
        return (own := self._own(program)) is not None and self._book.queue.comes_before_all_waiting(own)

    @property
    def routed_count(self) -> int:
        """See `View`."""
        return self._book.queue.routed_count

    def first_routed_before(self, program: ProgramView, replica: ReplicaView) -> Program | None:
        """See `View`."""
        own = self._own(program) if self._book.queue.routed else None
        return None if own is None else self._book.queue.first_routed_before(own, replica.replica_id)

    @property
    def some_share(self) -> bool:
        """See `View`."""
        return bool(self._book.prefixes.tree.cuts)

    def claim_tokens_on(self, program: ProgramView, replica: ReplicaView | None) -> int:
        """See `View`."""
        own, replica_id = self._own(program), "" if replica is None else replica.replica_id
        tokens = program.claim_tokens
        return tokens if own is None else self._book.prefixes.own_tokens(own, tokens, replica_id)

    def resident_tokens(self, program: ProgramView, replica: ReplicaView) -> int:
        """See `View`."""
        own = program if isinstance(program, Program) else self._own(program)
        return 0 if own is None else self._book.resident_tokens(own, self._replica(replica))

    def tool_hold_s(self, tool: str, threshold_s: float) -> float:
        """See `View`."""
        return self._core.knowledge.tool_times.hold_s(tool, threshold_s)

    @property
    def prefill_token_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.prices.decided_token_s

    def break_even_s(self, replica_id: str | None) -> float:
        """See `View`."""
        return self._core.knowledge.break_even_s(replica_id, self._book.memory_tokens_of(replica_id))

    def hold_threshold_s(self, replica_id: str | None) -> float:
        """See `View`."""
        account = self._book.ledger.accounts.get(replica_id) if replica_id is not None else None
        if replica_id is None or account is None:
            return 0.0
        return self._core.knowledge.holding(replica_id, account, self._book.now_s).threshold_s

    def may_overfill(self, replica_id: str) -> bool:
        """See `View`."""
        return self._core.knowledge.last_plan(replica_id).may_overfill

    @property
    def growth_tokens_per_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.growth.tokens_per_s

    @property
    def mean_growth_tokens(self) -> float:
        """See `View`."""
        return self._core.knowledge.growth.whole_tokens

    @property
    def median_residence_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.median_residence_s

    @property
    def tools_running_count(self) -> int:
        """See `View`."""
        return self._core.knowledge.tools_running_count

    @property
    def mean_tool_s(self) -> float:
        """See `View`."""
        return self._core.knowledge.mean_tool_s

    @property
    def sandboxes(self) -> SandboxSums:
        """See `View`."""
        return self._book.sandboxes

    @property
    def waiting_count(self) -> int:
        """See `View`."""
        return self._book.queue.for_room_count

    def waiting_count_for(self, replica: ReplicaView) -> int:
        """See `View`."""
        return 0 if (place := self._book.queue.routed.get(replica.replica_id)) is None else place.count

    def first_waiting_for(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        return () if (place := self._book.queue.routed.get(replica.replica_id)) is None else place.order.lowest(count)

    def newly_waiting(self) -> Sequence[ProgramView]:
        """See `View`."""
        return [program for program in self._core.global_policies.newly_waiting if waits(program)]

    def first_to_pause_few(self, replica: ReplicaView, count: int) -> Sequence[ProgramView]:
        """See `View`."""
        return self._replica(replica).acting.order.lowest(count)

    def longest_turn_s(self, replica: ReplicaView) -> float:
        """See `View`."""
        return self._replica(replica).longest_turn_s(self._book.now_s)

    def targets(self, program: ProgramView) -> Sequence[ReplicaView]:
        """See `View`."""
        return self._core.routing.targets(self._own(program))

    def routes(self) -> Sequence[RouteView]:
        """See `View`."""
        return self._core.routing.views()

    def propose_route(
        self, scope: str, name: str, replicas: Mapping[str, float], reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """See `View`. Accepted for a valid scope, and known replicas."""
        targets = tuple(replicas.items())
        if possible := not self._operations.why_not_route(scope, name, targets):
            self._operations.set_route(Scope(scope), name, targets, reason)
        return possible

    def propose_priority(
        self,
        program: ProgramView,
        priority: int,
        reason: Reason = Reason.GLOBAL_POLICY,
        *,
        replica: ReplicaView | None = None,
    ) -> bool:
        """See `View`. Accepted for a live program and a whole number of at most a million either way."""
        own, replica_id = self._own(program), None if replica is None else replica.replica_id
        if own is None or self._operations.why_not_priority(program.program_id, priority, replica_id):
            return False
        self._operations.set_priority(own, priority, replica_id, reason)
        return True

    def propose_migrate(
        self, program: ProgramView, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY
    ) -> bool:
        """See `View`. Accepted for an admitted program elsewhere, and an open replica that its route allows."""
        own = self._own(program)
        if own is None or self._operations.why_not_migrate(program.program_id, replica.replica_id):
            return False
        self._operations.migrate(own, self._replica(replica), reason)
        return True

    def propose_kill(self, program: ProgramView) -> bool:
        """See `View`. Accepted for a live program."""
        if (own := self._own(program)) is not None:
            self._operations.kill(own)
        return own is not None

    def propose_kill_replica(self, replica: ReplicaView, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """See `View`. Accepted for an open replica that is not the only one, if somebody ends replicas."""
        if self.replica(replica.replica_id) is None or len(self.replicas) < 2 or not self._provisions_replicas:
            return False
        self._operations.kill_replica(replica.replica_id, reason)
        return True

    def propose_provision(self, reason: Reason = Reason.GLOBAL_POLICY) -> bool:
        """See `View`. Accepted if somebody starts replicas."""
        if self._provisions_replicas:
            self._operations.provision(reason)
        return self._provisions_replicas

    def propose_pause(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an active program whose tool runs."""
        own = self._own(program)
        if own is None or own.place.kind is not Kind.ACTING:
            return False
        self._core.pause(own, reason)
        return True

    def propose_pause_until(self, replica: ReplicaView, tokens: float, reason: Reason, least_count: int = 0) -> None:
        """See `View`."""
        self._core.pause_until(self._replica(replica), tokens, reason, least_count)

    def propose_mark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an active program with a turn in flight that is not marked yet."""
        own = self._own(program)
        if own is None or not own.in_flight or own.place.kind is Kind.LEAVING:
            return False
        self._core.mark(own, reason)
        return True

    def propose_unmark(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for a program that is marked only by the policy."""
        if (own := self._own(program)) is None or not own.marked_by_policy:
            return False
        self._core.unmark(own, reason)
        return True

    def propose_dismiss(self, program: ProgramView, reason: Reason) -> bool:
        """See `View`. Accepted for an admitted program without a turn in flight, or one held where it is active."""
        own = self._own(program)
        if own is None or not own.admitted or own.in_flight or self._core.admission is None:
            return False
        if may_leave := not own.place.active or own.place.kind is Kind.ACTING:
            self._core.dismiss(own, reason)
        return may_leave

    def propose_restore(self, program: ProgramView, replica: ReplicaView, reason: Reason) -> bool:
        """See `View`. Accepted for a paused program on an open replica; for a routed one, only on its own."""
        own, target = self._own(program), self._core.placing.granting(replica)
        if own is None or own.place.active or target is None or own.routed_to not in (None, target.replica_id):
            return False
        self._core.restore(own, target, reason)
        return True
