"""A turn arrives, begins, goes on and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from thunderagent.programs.handlers.programs import Lives
from thunderagent.programs.learned.capacity import CapacityCorrection
from thunderagent.programs.messages import (
    TURN_VERDICTS,
    Hold,
    Outcome,
    ProgramLimits,
    Reason,
    Reject,
    TurnAdopted,
    TurnAsk,
    TurnEnd,
    TurnJudged,
    TurnProgressed,
    TurnStarted,
    TurnUnverified,
    TurnVerdict,
    least_of,
)
from thunderagent.programs.policy import Moment
from thunderagent.programs.rules.routes import serving
from thunderagent.programs.state.health import KEEPING_LEAST_TOKENS, KEEPING_USED_RATIO
from thunderagent.programs.state.program import ACTING, LEAVING, MAIN_BRANCH, Kind, Program, Turn, TurnEnded
from thunderagent.programs.state.replica import Replica, ReplicaPlace, replica_of
from thunderagent.programs.transitions import Core

# What each turn asks for: looking up a member of an enum costs more than a call.
HOME: Final = Reason.HOME
_TURN_ENDED: Final = Moment.TURN_ENDED


class Anonymous:
    """Grants turns without a program at once, or as soon as a replica grants."""

    def __init__(self, core: Core) -> None:
        """Work on the parts of `core`."""
        self._core = core

    def turn(self, event: TurnAsk) -> Turn:
        """Return the arrived turn, with or without a program."""
        turn = Turn(event.turn_id, None, MAIN_BRANCH, event.prompt_bytes, self._core.book.now_s)
        if event.media:
            turn.media, turn.media_tokens = event.media, self._core.knowledge.media_sizes.tokens(event.media)
        return turn

    def arrived(self, event: TurnAsk) -> None:
        """Take a turn that may run anywhere, or continues from something that one replica has."""
        core, turn = self._core, self.turn(event)
        served_by = turn.served_by = core.routing.routes.asked(event.turn_id) if core.routing.routes else None
        wanted = core.book.replicas.get(event.wanted_replica_id or "")
        if wanted is not None and wanted.open_to_programs and serving([wanted], served_by):
            turn.pinned_replica_id = wanted.replica_id
            self.place(turn, [] if wanted.suspended_for else [wanted])
            return
        candidates = serving(core.placing.candidates(event.avoid_replica_id), served_by)
        self.place(turn, candidates or serving(core.book.granting_replicas, served_by))

    def pinned_arrived(self, event: TurnAsk, replica_id: str) -> None:
        """Take a turn for the replica that its client chose."""
        replica = self._core.book.replicas.get(replica_id)
        if replica is None or not replica.up:
            self._core.book.decisions.append(Reject(event.turn_id, None, Reason.NO_REPLICA))
            return
        turn = self.turn(event)
        turn.pinned_replica_id = replica_id
        self.place(turn, [] if replica.suspended_for else [replica])

    def place(self, turn: Turn, candidates: Sequence[Replica]) -> None:
        """Grant a turn on the least loaded candidate; hold it if there is none."""
        book = self._core.book
        turn.claim_tokens = int(turn.prompt_bytes * self._core.knowledge.tokens_per_byte_ratio) + turn.media_tokens
        book.turns[turn.turn_id] = turn
        if candidates:
            self._core.leases.grant_anonymous(turn, candidates)
        else:
            book.anonymous_held[turn.turn_id] = turn
            book.ledger.wait_begins(book.now_s)
            suspended = bool(book.open_replicas or turn.pinned_replica_id)
            book.decisions.append(Hold(turn.turn_id, None, Reason.SUSPENDED if suspended else Reason.NO_REPLICA))

    def grant_held(self) -> None:
        """Grant held turns that have a replica now."""
        book = self._core.book
        for turn in list(book.anonymous_held.values()):
            pinned = book.replicas.get(turn.pinned_replica_id or "")
            candidates = serving(book.granting_replicas, turn.served_by) if pinned is None else [pinned]
            if candidates and (pinned is None or not pinned.suspended_for):
                del book.anonymous_held[turn.turn_id]
                book.ledger.wait_ends(book.now_s)
                self._core.leases.grant_anonymous(turn, candidates)


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
            any_ended = bool(self._core.families.children) and self._lives.parent_goes_on(event.program_id)
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
        limits = core.program_limits.asked(event.turn_id) if core.program_limits.some_asked else None
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
            core.knowledge.tool_returned(program, book.now_s)
            if core.stream.flows:
                core.stream.tool_ended(program)
        program.program_limits = limits
        if program.hint is not None:
            core.hints.turn_came(program)
        routes = core.routing.routes
        if routes.count or routes.by_model:
            if not routes.serve(program, routes.asked(event.turn_id)):
                self._anonymous.arrived(event)
                return False
            core.routing.send(program)
        turn = self._new_turn(event, program, earlier)
        branch = program.begin_turn(turn, event.parent_branch_id, core.knowledge.tokens_per_byte_ratio)
        book.turns[turn.turn_id] = turn
        if event.prefix and core.claim_rules.share_prefixes:
            most_tokens, ratio = turn.prompt_tokens if turn.prompt_bytes else inf, core.knowledge.tokens_per_byte_ratio
            grown = book.prefixes.set_prefix(program, branch, event.prefix, ratio, most_tokens)
            for replica_id, tokens in grown.items():
                if tokens:
                    book.touch(book.replicas[replica_id]).share(tokens)
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
        if not isinstance(place, ReplicaPlace):
            self._ask(program, turn, earlier)
            return
        if place.kind is ACTING and self._stays_home:
            home = place.replica
            replica_id = home.replica_id
            if (  # only the policy could move it elsewhere, as for most turns
                home.account.usable
                and turn.avoid_replica_id != replica_id
                and (turn.wanted_replica_id is None or turn.wanted_replica_id == replica_id)
                and (program.routed_to is None or program.routed_to == replica_id)
                and program.destination is None
            ):
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
        home = place.replica if isinstance(place, ReplicaPlace) else None
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
        shared_tokens = self._core.leases.begin_flights(program, [turn], home)
        home.residency.use(program.generation, program.claim_tokens - shared_tokens)
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
            book.move(program, replica_of(program).stalled)
        book.resize(program)
        program.hold_reason = reason
        if reason is Reason.LEAVING:
            self._core.deadlines.add(turn)
        program.note(book.now_s, "hold", reason, program.replica_id)
        book.decisions.append(Hold(turn.turn_id, program.program_id, reason))

    def _grant_beside(self, program: Program, turn: Turn) -> None:
        """Grant a turn beside the program's turn in flight, on the same replica."""
        replica = replica_of(program)
        self._core.book.changes(replica)
        shared_tokens = self._core.leases.begin_flights(program, [turn], replica)
        self._core.book.resize(program)
        replica.residency.use(program.generation, program.claim_tokens - shared_tokens)
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
            home = place.replica if isinstance(place, ReplicaPlace) and place.kind is not Kind.ACTING else None
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
        if isinstance(place, ReplicaPlace) and place.replica is replica:
            program.in_flight[turn.turn_id] = turn
            self._grant_at_home(program, turn, replica, HOME, resized=True)
            return
        program.held[turn.turn_id] = turn
        if isinstance(place, ReplicaPlace):
            book.move(program, place.replica.asking)
        elif place.kind is not Kind.WAITING:
            book.move(program, book.asking)
        book.resize(program)
        self._give_up_home(program, turn, Reason.MOVED)
        self._core.restore(program, replica, HOME)


class Turns:
    """Handles what happens to turns that have a lease, or wait for one."""

    def __init__(self, core: Core, lives: Lives) -> None:
        """Work on the parts of `core`; `lives` ends programs at their limits."""
        self._core = core
        self._lives = lives

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {
            TurnUnverified: self._turn_unverified,
            TurnStarted: self._turn_started,
            TurnProgressed: self._turn_progressed,
            TurnEnd: self._turn_ended,
            TurnJudged: self._turn_judged,
        }

    def _turn_unverified(self, event: TurnUnverified) -> None:
        turn = self._core.book.turns.get(event.turn_id)
        if turn is not None:
            turn.unverified = turn.unrepresentative = True

    def _turn_started(self, event: TurnStarted) -> None:
        core, turn = self._core, self._core.book.turns.get(event.turn_id)
        if turn is None or turn.account_id is None:
            return
        core.book.replicas[turn.account_id].account.heard_s = core.book.now_s
        if turn.started_s is None:
            turn.started_s = core.book.now_s
            correction = core.knowledge.corrections[turn.account_id]
            if core.claim_rules.adapt_capacity and not (correction.tells_cached or turn.unrepresentative):
                self._engine_began(turn, correction)
            if core.stream.flows:
                core.stream.began(turn)

    def _engine_began(self, turn: Turn, correction: CapacityCorrection) -> None:
        """Note, when its engine began a turn, what should have been cached of it, where only counters tell."""
        correction.turn_seen(
            turn.kept_tokens,
            max(0, turn.resident_tokens - turn.kept_tokens),
            granted_s=turn.granted_s,
            kept_since_s=turn.kept_since_s,
            now_s=self._core.book.now_s,
        )

    def _turn_progressed(self, event: TurnProgressed) -> None:
        turn = self._core.book.turns.get(event.turn_id)
        if turn is None or turn.account_id is None:
            return
        self._core.book.replicas[turn.account_id].account.heard_s = self._core.book.now_s
        if turn.program is None:
            return
        if event.output_tokens > turn.output_tokens:
            turn.output_tokens = event.output_tokens
        self._core.book.resize(turn.program)

    def _turn_ended(self, event: TurnEnd) -> Moment | None:
        turn = self._core.book.turns.get(event.turn_id)
        if turn is None:
            return None
        if event.outcome == "finished":
            return self._turn_finished(turn, event)
        self._turn_lost(turn, event.outcome)
        return _TURN_ENDED

    def _turn_finished(self, turn: Turn, event: TurnEnd) -> Moment:  # noqa: C901, PLR0912 - what does not apply is not called
        core, book = self._core, self._core.book
        prompt_tokens = turn.prompt_tokens if event.prompt_tokens is None else event.prompt_tokens
        output_tokens = turn.output_tokens if event.output_tokens is None else event.output_tokens
        program = turn.program
        branch = program.branches.get(turn.branch_id) if program is not None else None
        if turn.account_id is not None:
            ended = TurnEnded(turn, branch, book.now_s, prompt_tokens, output_tokens, event.cached_tokens)
            knowledge, account = core.knowledge, book.replicas[turn.account_id].account
            account.heard_s = book.now_s
            loaded_tokens = knowledge.loading_tokens(ended) if knowledge.tiers.by_replica else 0
            price = knowledge.prices.of(turn.account_id)
            prefill_token_s = price.decided_token_s if price.is_measured else None
            book.ledger.charge_turn(account, ended, prefill_token_s=prefill_token_s, loaded_tokens=loaded_tokens)
            knowledge.turn_left_engine(ended, account.turn_count - 1)
            if not turn.unrepresentative:
                self._learn_from(ended)
        if event.prompt_tokens is not None and turn.prompt_bytes:
            core.knowledge.learn_size(turn, branch, event.prompt_tokens)
        if program is None:
            del book.turns[turn.turn_id]
            core.turn_ends.end_anonymous(turn)
            return _TURN_ENDED
        if turn.account_id is not None:
            for learner in core.stream.learners:
                learner.turn_ended(core.view, program, turn, True)
        if core.stream.flows:
            cached_tokens = turn.resident_tokens if event.cached_tokens is None else event.cached_tokens
            whole_tokens = prompt_tokens + output_tokens
            core.stream.ended(turn, whole_tokens, whole_tokens - min(prompt_tokens, cached_tokens), finished=True)
        if branch is not None:
            is_believed = branch.turn_finished(prompt_tokens, output_tokens, event.tool)
            if is_believed and turn.account_id is not None:  # its replica was not lost meanwhile
                branch.kept_since_s = book.now_s
        if program.verdict.verdict is not TurnVerdict.OK:
            program.verdict.ended(TurnVerdict.OK, "", None, turn.branch_id, turn.prompt_bytes)
        program.prompt_tokens_total += prompt_tokens
        program.output_tokens_total += output_tokens
        program.cached_tokens_total += event.cached_tokens or 0
        program.tool, program.tool_named = event.tool, bool(event.tool)
        del book.turns[turn.turn_id]
        core.turn_ends.end_turn(program, turn)
        if len(program.branches) > 1:
            core.turn_ends.forget_branches(program, turn, finished=True)
        core.turn_ends.after_turn(program, turn, "finished", tool_begins=not turn.unrepresentative)
        if program.program_limits is not None:
            limit = core.program_limits.why_ended(program, book.now_s)
            if limit is not None:
                self._lives.end_for_good(program, limit)
                return Moment.PROGRAM_ENDED
        return _TURN_ENDED

    def _learn_from(self, ended: TurnEnded) -> None:
        """Learn from a finished turn, and from what was lost of it."""
        core, turn = self._core, ended.turn
        tells_cached, has_tier = ended.cached_tokens is not None, turn.account_id in core.knowledge.tiers.by_replica
        if tells_cached:
            replica = core.book.replicas[turn.account_id or ""]
            replica.tells_cached = True
            account = replica.account
            if account.demand_tokens > account.limit_tokens or (account.kv_used_ratio or 0.0) >= KEEPING_USED_RATIO:
                replica.keeping.pressed(core.book.now_s)
            elif not has_tier and account.capacity_tokens is not None:
                expected_tokens = min(turn.kept_tokens, ended.prompt_tokens)
                if expected_tokens >= KEEPING_LEAST_TOKENS:
                    replica.keeping.turn_ended(expected_tokens, ended.cached_tokens or 0, turn.kept_since_s)
        if core.claim_rules.adapt_capacity:
            correction = core.knowledge.corrections[turn.account_id or ""]
            if tells_cached and not has_tier:
                correction.turn_ended(ended)
            elif turn.started_s is None and not correction.tells_cached:
                self._engine_began(turn, correction)
        if ended.branch is not None:
            core.knowledge.turn_ended(ended)

    def _turn_judged(self, event: TurnJudged) -> None:
        turn, verdict = self._core.book.turns.get(event.turn_id), TURN_VERDICTS.get(event.verdict)
        if turn is not None and turn.program is not None and verdict is not None:
            turn.verdict_cause = f"{event.verdict}: {event.cause}" if event.cause else event.verdict
            replica_id = turn.account_id or turn.program.replica_id
            turn.program.verdict.ended(verdict, event.cause, replica_id, turn.branch_id, turn.prompt_bytes)

    def _turn_lost(self, turn: Turn, outcome: Outcome) -> None:
        """End a turn without learning from it: held or in flight, failed, refused or left by its client."""
        if outcome == "abandoned" and turn.program is not None and not turn.verdict_cause:
            turn.program.verdict.ended(TurnVerdict.CLIENT_LEFT, "", None, turn.branch_id, turn.prompt_bytes)
        self._core.turn_ends.drop(turn, outcome)
