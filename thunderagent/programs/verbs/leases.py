"""Leases: how turns get them, and how their waits end. Where a program goes is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from thunderagent.programs.book.book import Book
from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.decisions import Grant, Reason
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.turn import Turn
from thunderagent.programs.policy import EnginePriority, View, least_loaded
from thunderagent.programs.rules.patience import Deadlines
from thunderagent.programs.verbs.stream import Stream

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
            account.turn_granted()
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
            replica.use_memory(program, self.begin_flights(program, list(held.values()), replica))
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
        account.turn_granted()
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
