"""A turn arrives: its program is found or opened, and it is granted, or held with a reason."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from thunderagent.programs.book.replica import Replica
from thunderagent.programs.handlers.anonymous import Anonymous
from thunderagent.programs.handlers.lives import Lives
from thunderagent.programs.messages import PrefixCut, ProgramLimits, TurnAsk, least_of
from thunderagent.programs.model.decisions import HOME, Hold, Reason, Reject
from thunderagent.programs.model.events import TurnAdopted
from thunderagent.programs.model.places import ACTING, LEAVING, Kind
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.turn import Branch, Turn
from thunderagent.programs.policy import Moment
from thunderagent.programs.rules.routes import serving
from thunderagent.programs.transitions import Core


class Arrivals:
    """Handles turns that want a lease.

    A turn of a program with another in flight is granted beside it, unless the program leaves: then it is held until
    those end. An anonymous turn is granted on the least loaded replica. If its replica grants nothing now, a turn of an
    active program is held in place when no other replica grants or one of its turns is in flight. The policy is not
    asked then, because nothing has changed.
    """

    def __init__(self, core: Core, lives: Lives, anonymous: Anonymous) -> None:
        """Work on the parts of `core`."""
        self._core = core
        self._lives = lives
        self._anonymous = anonymous
        self._stays_home: bool = core.policy.stays_home
        """Whether the policy keeps an active program on its replica whenever that grants: then it is not asked."""

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {
            TurnAsk: self._turn_arrived,
            TurnAdopted: self._turn_adopted,
        }

    def _turn_arrived(self, event: TurnAsk) -> Moment | None:
        turns, turn_ends = self._core.book.turns, self._core.turn_ends
        assert event.turn_id not in turns, f"turn {event.turn_id} arrives twice"
        if event.pinned_replica_id is not None:
            self._anonymous.pinned_arrived(event, event.pinned_replica_id)
            return None
        earlier = turns.get(event.supersedes_id) if event.supersedes_id is not None else None
        any_ended = False
        if event.program_id is None:
            self._anonymous.arrived(event)
        else:
            if earlier is not None and self._keeps_its_program(earlier, event):
                turn_ends.drop(earlier, "superseded")
            any_ended = bool(self._core.families) and self._lives.parent_goes_on(event.program_id)
            any_ended |= self._turn_of_program_arrived(event, event.program_id, earlier)
        if earlier is not None and earlier.turn_id in turns:  # done late, so that its program gives nothing up before
            if any_ended:
                self._core.balance(Moment.PROGRAM_ENDED)
                any_ended = False
            turn_ends.drop(earlier, "superseded")
        return Moment.PROGRAM_ENDED if any_ended else None

    def _keeps_its_program(self, earlier: Turn, event: TurnAsk) -> bool:
        """Return whether an attempt is in flight whose program must not stay when its next attempt arrives."""
        program = earlier.program
        if program is None or program.program_id != event.program_id or earlier.turn_id not in program.in_flight:
            return False
        return program.marked or self._core.placing.can_avoid(program, event.avoid_replica_id)

    def _turn_of_program_arrived(  # noqa: C901, PLR0912 - each way a turn may end here
        self, event: TurnAsk, program_id: str, earlier: Turn | None, runs_on: Replica | None = None
    ) -> bool:
        """Place an arrived turn, hold it or reject it; return whether its program ended by that."""
        core, book, lives = self._core, self._core.book, self._lives
        program = book.programs.get(program_id)
        if program is None and (refused_for := lives.refused_ids.get(program_id)) is not None:
            book.decisions.append(Reject(event.turn_id, program_id, refused_for))
            return False
        limits = core.program_limits.asked(event.turn_id)
        if limits is not None or (program is not None and program.program_limits is not None):
            limits = least_of(None if program is None else program.program_limits, limits)
            if runs_on is None and limits is not None:
                reason = self._why_over_limits(event, limits, program, earlier)
                if reason is not None:
                    return self._refuse(event, limits, program, reason)
        if program is None:
            if not lives.has_place(event.tenant):
                book.decisions.append(Reject(event.turn_id, program_id, Reason.TOO_MANY_PROGRAMS))
                return False
            program = lives.open(event, program_id)
        elif program.place is book.announced:
            if event.tenant and not program.tenant and not lives.has_place(event.tenant, opens=False):
                book.decisions.append(Reject(event.turn_id, program_id, Reason.TOO_MANY_PROGRAMS))
                return False
            lives.announced_begins(program, event)
        elif program.tool_runs:
            lives.tool_returned(program)
        program.program_limits = limits
        if program.hint is not None:
            core.hints.turn_came(program)
        if core.routing.routes:
            if not core.routing.routes.serve(program, core.routing.routes.asked(event.turn_id)):
                self._anonymous.arrived(event)
                return False
            core.routing.send(program)
        turn = self._new_turn(event, program, earlier)
        turn.prompt_tokens = program.estimate_prompt_tokens(turn, core.knowledge.tokens_per_byte_ratio)
        book.turns[turn.turn_id] = turn
        branch = program.branch_of(turn, event.parent_branch_id)
        if event.prefix and core.claim_rules.share_prefixes:
            self._share(program, branch, event.prefix, turn.prompt_tokens if turn.prompt_bytes else inf)
        if runs_on is None:
            self._place_turn(program, turn, earlier)
        else:
            self._count_where_it_runs(program, turn, runs_on)
        return False

    def _why_over_limits(
        self, event: TurnAsk, limits: ProgramLimits, program: Program | None, earlier: Turn | None
    ) -> Reason | None:
        """Return which limit of its program a turn is past; None if none."""
        core = self._core
        begun = None if program is None or program.place is core.book.announced else program
        again = begun is not None and (
            event.supersedes_id in begun.lost_turn_ids or (earlier is not None and earlier.program is begun)
        )
        role = event.role or event.branch_id
        return core.program_limits.why_not(limits, begun, core.book.now_s, role, again=again)

    def _refuse(self, event: TurnAsk, limits: ProgramLimits, program: Program | None, reason: Reason) -> bool:
        """Reject a turn past its program's limits; end the program if they say so, and it has no other turn.

        Return whether it ended.
        """
        book = self._core.book
        book.decisions.append(Reject(event.turn_id, event.program_id, reason))
        if program is None or program.place is book.announced:
            return False
        program.program_limits = limits
        program.note(book.now_s, "refused", reason, program.replica_id)
        if ends := limits.ends and not program.in_flight and not program.held:
            self._lives.end_for_good(program, reason)
        return ends

    def _share(self, program: Program, branch: Branch, prefix: tuple[PrefixCut, ...], prompt_tokens: float) -> None:
        """Note which parts of a prompt other programs may share."""
        book, ratio = self._core.book, self._core.knowledge.tokens_per_byte_ratio
        for replica_id, tokens in book.prefixes.set_prefix(program, branch, prefix, ratio, prompt_tokens).items():
            if tokens:
                book.touch(book.replicas[replica_id]).share(tokens)

    def _new_turn(self, event: TurnAsk, program: Program, earlier: Turn | None) -> Turn:
        """Return the arrived turn, with the age of the attempt that it replaces."""
        now_s, knowledge = self._core.book.now_s, self._core.knowledge
        turn = Turn(event.turn_id, program, event.branch_id, event.prompt_bytes, now_s)
        turn.wanted_replica_id = event.wanted_replica_id
        turn.avoid_replica_id = event.avoid_replica_id
        turn.role = event.role or event.branch_id
        turn.expected_output_tokens = knowledge.role_outputs.expected_tokens(turn.role)
        if event.patience_s is not None:
            turn.deadline_s = event.now_s + event.patience_s
        if event.media:
            turn.media, turn.media_tokens = event.media, knowledge.media_sizes.tokens(event.media)
        if event.supersedes_id is not None and event.supersedes_id in program.lost_turn_ids:
            program.lost_turn_ids.remove(event.supersedes_id)
            program.turn_count -= 1  # both are one turn
        elif earlier is not None and earlier.program is program:
            program.turn_count -= earlier.account_id is not None or earlier.turn_id in program.lost
        if earlier is not None and earlier.program is program:
            turn.waiting_since_s = earlier.waiting_since_s
        elif event.waited_s is not None:
            turn.waiting_since_s = min(event.now_s - event.waited_s, now_s)
        return turn

    def _place_turn(self, program: Program, turn: Turn, earlier: Turn | None) -> None:
        """Grant a turn beside others in flight, place its program anew, or hold the turn in place."""
        core, place = self._core, program.place
        if not place.active:
            self._ask(program, turn, earlier)
            return
        if place.kind is ACTING and self._stays_home:
            home = place.replica
            if self._goes_on_at(home, program, turn):
                core.limits.turn_came(program)
                program.in_flight[turn.turn_id] = turn
                self._grant_at_home(program, turn, home, HOME, resized=True)
                return
        wanted_here = turn.wanted_replica_id is not None and turn.wanted_replica_id == program.replica_id
        if program.in_flight and not wanted_here and core.placing.can_avoid(program, turn.avoid_replica_id):
            core.mark(program, Reason.TURN_FAILED)
        if program.place.kind is LEAVING:
            self._hold_in_place(program, turn, Reason.LEAVING)
            return
        suspended = bool(place.replica.suspended_for)
        served_here = program.served_by is None or program.served_by.names(place.replica.replica_id)
        if suspended and served_here and (program.in_flight or wanted_here or not core.book.granting_replicas):
            self._hold_in_place(program, turn, Reason.SUSPENDED)
        elif program.in_flight:
            self._grant_beside(program, turn)
        else:
            self._ask(program, turn, earlier)

    def _goes_on_at(self, home: Replica, program: Program, turn: Turn) -> bool:
        """Return whether only the policy could move a program elsewhere, as for most turns."""
        replica_id = home.replica_id
        return (
            home.account.usable
            and turn.avoid_replica_id != replica_id
            and (turn.wanted_replica_id is None or turn.wanted_replica_id == replica_id)
            and (program.routed_to is None or program.routed_to == replica_id)
            and program.destination is None
        )

    def _ask(self, program: Program, turn: Turn, earlier: Turn | None) -> None:
        """Ask the policy where a program goes on whose first turn in a while has arrived; grant or hold the turn."""
        book = self._core.book
        self._core.limits.turn_came(program)
        program.held[turn.turn_id] = turn
        if earlier is not None and program.held.pop(earlier.turn_id, None) is not None:
            del book.turns[earlier.turn_id]  # otherwise it would be granted with the one that replaces it
            self._core.leases.wait_ends(program, earlier)
        if not program.place.admitted and not self._core.placing.parent_claims(program):
            self._hold_unadmitted(program, turn)
            return
        place = program.place
        home = place.replica if place.active else None
        if place.kind is Kind.WAITING:
            book.resize(program)
        else:
            book.move(program, book.asking if home is None else home.asking, resized=True)
        if program.destination is not None:
            destination, reason = self._core.take_destination(program)
            if destination is not None:
                self._give_up_home(program, turn, reason)
                self._core.restore(program, destination, reason)
                return
        target, reason = self._core.placing.find(program, turn.avoid_replica_id)
        if target is None:
            self._hold(program, turn, reason)
        elif target is home:
            del program.held[turn.turn_id]
            self._grant_at_home(program, turn, target, reason)
        else:
            self._give_up_home(program, turn, Reason.MOVED)
            self._core.restore(program, target, reason)

    def _grant_at_home(
        self, program: Program, turn: Turn, home: Replica, reason: Reason, *, resized: bool = False
    ) -> None:
        self._core.book.move(program, home.working, resized=resized)
        home.use_memory(program, self._core.leases.begin_flights(program, [turn], home))
        branch = program.branches[turn.branch_id]
        if branch.kept_since_s > home.flushed_s:
            turn.kept_since_s = branch.kept_since_s
            turn.kept_tokens = min(turn.prompt_tokens, branch.prompt_tokens)
        self._core.leases.grant(program, turn, reason)

    def _give_up_home(self, program: Program, turn: Turn, reason: Reason) -> None:
        """Take the claim of a program that asks, if it has one; the new turn waits with the held ones."""
        if program.place.active:
            self._core.leave(program, self._core.book.asking, reason)
        else:
            self._core.book.ledger.wait_begins(turn.arrived_s)

    def _hold(self, program: Program, turn: Turn, reason: Reason) -> None:
        book = self._core.book
        self._give_up_home(program, turn, reason)
        self._core.stand(program)
        program.hold_reason = reason
        self._core.deadlines.add(turn)
        if program.program_limits is not None:
            self._core.program_limits.held(program)
        self._core.global_policies.begins_to_wait(program)
        program.note(book.now_s, "hold", reason, None)
        book.decisions.append(Hold(turn.turn_id, program.program_id, reason))

    def _hold_unadmitted(self, program: Program, turn: Turn) -> None:
        """Hold a turn whose program is not admitted, unless it is admitted now."""
        book = self._core.book
        book.ledger.wait_begins(turn.arrived_s)
        book.resize(program)
        self._core.stand(program)
        program.hold_reason = Reason.ADMISSION
        self._core.deadlines.add(turn)
        if program.program_limits is not None:
            self._core.program_limits.held(program)
        self._core.admit(Moment.TURN_ARRIVED)
        if turn.turn_id not in program.held:
            return
        if not book.granting_replicas:
            program.hold_reason = Reason.SUSPENDED if book.open_replicas else Reason.NO_REPLICA
        program.note(book.now_s, "hold", program.hold_reason, None)
        book.decisions.append(Hold(turn.turn_id, program.program_id, Reason(program.hold_reason)))

    def _hold_in_place(self, program: Program, turn: Turn, reason: Reason) -> None:
        """Hold a turn of an active program in place: the program leaves, or its replica grants nothing now."""
        book = self._core.book
        program.held[turn.turn_id] = turn
        self._core.limits.turn_came(program)
        if program.place.kind in (Kind.ACTING, Kind.WORKING):
            book.move(program, program.place.replica.stalled)
        book.resize(program)
        program.hold_reason = reason
        if reason is Reason.LEAVING:
            self._core.deadlines.add(turn)
        program.note(book.now_s, "hold", reason, program.replica_id)
        book.decisions.append(Hold(turn.turn_id, program.program_id, reason))

    def _grant_beside(self, program: Program, turn: Turn) -> None:
        """Grant a turn beside the program's turn in flight, on the same replica."""
        replica = program.place.replica
        self._core.book.changes(replica)
        shared_tokens = self._core.leases.begin_flights(program, [turn], replica)
        self._core.book.resize(program)
        replica.use_memory(program, shared_tokens)
        self._core.leases.grant(program, turn, HOME)

    # --- turns that run already -------------------------------------------------------------------------------------

    def _turn_adopted(self, event: TurnAdopted) -> None:
        """Count a turn where it runs; as anonymous if its program has others elsewhere, or may not be opened.

        If the program's tool was last seen running elsewhere, the program is here by now: the turn is newer than that
        record.
        """
        book, lives, ask = self._core.book, self._lives, event.ask
        replica, program_id = book.replicas.get(event.replica_id), ask.program_id
        if event.turn_id in book.turns or replica is None or not replica.grants:
            return
        program = book.programs.get(program_id) if program_id is not None else None
        is_elsewhere = False
        if program is not None:
            place = program.place
            home = place.replica if place.active and place.kind is not Kind.ACTING else None
            is_elsewhere = (home or self._core.placing.wanted_by(program) or replica) is not replica
            is_elsewhere |= bool(program.held) and not serving([replica], program.served_by)
        may_open = program is not None or (program_id not in lives.refused_ids and lives.has_place(ask.tenant))
        if program_id is None or is_elsewhere or not may_open:
            self._anonymous.place(self._anonymous.turn(ask), [replica])
        else:
            self._turn_of_program_arrived(ask, program_id, None, replica)

    def _count_where_it_runs(self, program: Program, turn: Turn, replica: Replica) -> None:
        """Put a turn in flight and its program on a replica, regardless of room."""
        book, place = self._core.book, program.place
        if place.active and place.kind is not Kind.ACTING:
            self._grant_beside(program, turn)
            return
        self._core.limits.turn_came(program)
        turn.wanted_replica_id = None  # it got the replica that it wanted
        if place.active and place.replica is replica:
            program.in_flight[turn.turn_id] = turn
            self._grant_at_home(program, turn, replica, HOME, resized=True)
            return
        program.held[turn.turn_id] = turn
        if place.active:
            book.move(program, place.replica.asking)
        elif place.kind is not Kind.WAITING:
            book.move(program, book.asking)
        book.resize(program)
        self._give_up_home(program, turn, Reason.MOVED)
        self._core.restore(program, replica, HOME)
