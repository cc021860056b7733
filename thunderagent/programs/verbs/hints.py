"""A client's hint on its program's next turn, which replaces the policy's own guess within limits.

Theory of operation
===================
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
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final

from thunderagent.programs.learned.trust import RIGHT
from thunderagent.programs.model.advice.hints import DROP, OFFLOAD, RETAIN, Hint
from thunderagent.programs.model.events import ProgramHinted
from thunderagent.programs.model.places import Kind, Phase
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.turn import MAIN_BRANCH
from thunderagent.programs.policy import Moment, ProgramView, View

if TYPE_CHECKING:
    from thunderagent.programs.core import Core

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
            core.policy.hold_threshold_s if core.policy.holds_by_cost else None
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
        if not place.active or place.kind is Kind.LEAVING:
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
