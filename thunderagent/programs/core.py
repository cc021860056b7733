"""The verbs: what is done to programs and turns, whoever asks. Callers check beforehand whether it may be done."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from thunderagent.programs.book.book import Book
from thunderagent.programs.book.replica import Replica
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.model.decisions import Reason, Reject
from thunderagent.programs.model.places import Kind, Place
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.turn import Turn
from thunderagent.programs.policy import Admission, Moment, Placement, Policy
from thunderagent.programs.rules.families import Families
from thunderagent.programs.rules.limits import Limits
from thunderagent.programs.rules.patience import Deadlines
from thunderagent.programs.rules.program_limits import ProgramLimiter
from thunderagent.programs.rules.routes import Routing
from thunderagent.programs.verbs.hints import Hints
from thunderagent.programs.verbs.leases import Leases
from thunderagent.programs.verbs.placing import Placing
from thunderagent.programs.verbs.stream import Stream
from thunderagent.programs.verbs.turn_ends import TurnEnds

if TYPE_CHECKING:
    from thunderagent.programs.policy import View
    from thunderagent.programs.verbs.global_policy import GlobalPolicies


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
        for program in paused if self.families or self.admission is not None else ():
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
        if self.stream.flows:
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
        return self.policy.place(self.view, program, [replica])

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
        if self.stream.flows_whole:
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
        book.move(program, program.place.replica.leaving, reason)
        for turn in program.held.values():  # until grants go on there
            self.deadlines.add(turn)

    def unmark(self, program: Program, reason: Reason, *, cause: Reason | None = None) -> None:
        """Remove one cause for which a program is marked, or all; without any cause it stays.

        Turns that were held because it was to leave are then granted.
        """
        book, replica = self.book, program.place.replica
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
        self.policy.balance(self.view, moment)
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
        """Update the hold reason of a program that was held because nothing was granted.

        An unadmitted program waits for admission if any replica grants. A routed one waits for its replica, whatever
        other replicas grant.
        """
        book = self.book
        if program.hold_reason not in (Reason.SUSPENDED, Reason.NO_REPLICA):
            return
        if not book.open_replicas:
            program.hold_reason = Reason.NO_REPLICA
        elif not (self.placing.candidates(None, program) if program.admitted else book.granting_replicas):
            program.hold_reason = Reason.SUSPENDED
        else:
            program.hold_reason = Reason.NO_ROOM if program.admitted else Reason.ADMISSION

    # --- the end of a program ---------------------------------------------------------------------------------------

    def end(self, program: Program, reason: Reason) -> None:
        """End a program: reject its held turns, and let those in flight finish as turns without a program."""
        book, place = self.book, program.place
        replica = place.replica if place.active else None
        if self.stream.flows:
            for turn in program.in_flight.values():
                self.stream.lost(turn)
        tool_ran = program.tool_runs
        if program.hint is not None:
            self.hints.program_ended(program)
        self.knowledge.program_ended(program, book.now_s)
        if self.stream.flows:
            if tool_ran and self.stream.flows_whole:
                self.stream.tools_changed()
            self.stream.program_ended(program)
        book.leave_group(program)
        self.families.leave(program)
        self.global_policies.program_ended(program)
        self.routing.routes.program_ended(program)
        for turn in program.held.values():
            del book.turns[turn.turn_id]
            self.leases.wait_ends(program, turn)
            book.decisions.append(Reject(turn.turn_id, program.program_id, reason))
        program.held.clear()
        if program.look_again_s < inf:
            self.program_limits.forget(program)
        if replica is not None:
            replica.residency.leave(program.generation, program.context_tokens)
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
