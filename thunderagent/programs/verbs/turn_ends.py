"""What follows from the end of a turn, however it ended."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from thunderagent.programs.model.decisions import Reason, Reject
from thunderagent.programs.model.places import LEAVING, REASONING, Kind
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.turn import Branch, Turn

if TYPE_CHECKING:
    from thunderagent.programs.core import Core


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
        if program is not None and self._core.stream.flows:
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
            book, replica = self._core.book, program.place.replica
            book.changes(replica).turn_count -= 1
            if not program.in_flight:
                left_tokens = book.prefixes.own_tokens(program, program.context_tokens, replica.replica_id)
                replica.residency.leave(program.generation, left_tokens)

    def forget_branches(self, program: Program, ended: Turn, *, finished: bool) -> None:
        """Drop side branches of a program that are not used again."""
        forgotten = program.forget_ended_branches(ended, finished=finished)
        if forgotten:
            self.leave_prefixes(program, forgotten)

    def leave_prefixes(self, program: Program, forgotten: list[Branch]) -> None:
        """Remove a program's former branches from what others share there."""
        if program.place.active:
            account = self._core.book.changes(program.place.replica)
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
                book.move(program, place.replica.working)
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
            self._core.tool_began(program)
        program.hold_until_s = book.now_s + self._core.policy.hold_s(self._core.view, program)
        if (hint := program.hint) is not None:
            program.hold_until_s, program.hint_keeps = self._core.hints.hold_until_s(
                program, hint, program.hold_until_s
            )
        if place.active and place.kind is not LEAVING:
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
