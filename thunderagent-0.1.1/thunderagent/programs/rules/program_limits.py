"""Limits of a program: what it may use in all, and the deadline by which it must be done.

Theory of operation
===================
A program brings its limits with its turns; of several the least counts, so a later turn can only tighten them. They
are checked when a turn arrives. Then the turn is refused, or, if the limits say that they end the program, the turn
that reached one was its last, and the program ended with it: further turns are refused until it is released.

A deadline also counts in the order of the queue, no earlier than it must, because others pay for it: a held program is
*urgent* from its latest start on, when what it may need still is all that is left. It is expected to go on for the
turns that its client stated, otherwise for as many as it had, at the mean time a turn of its own without the time it
was held and of `PRIOR_TURNS` like the last of others with deadlines: `k` turns in all. A turn with its tool varies as
much as it takes in the mean, and so does a mean of `k`, by `1 / sqrt(k)` of it: `n` turns deviate by
`sqrt(n + n**2 / k)` of them, and it may need `n + MARGIN_SIGMAS` times that.

Until its first turn has ended its own pace is unknown, but its client set the deadline by it. So then it may need
`NEW_RATIO` of its time, and of its turns `FIRST_SIGMAS` times their deviation more than expected if that is longer: if
its client stated them, and something is known of others. Urgent programs come before all others of their priority, the
earliest deadline first.

So that nobody starves, urgency is paid for: a program becomes urgent for `1 / URGENT_RATIO` restores of the paused
queue, after the first `FREE_COUNT`. So at most a quarter of those that are restored passed others, however many
programs have deadlines; without room in that, they wait in the ordinary order.

A deadline *cannot* be met if the turns that are left, as stated by the client (at least the one that arrives), would
not end in time even if none waited, each in `LEAST_RATIO` of the program's mean time alone: what its turns took as on
an idle engine, plus its tools. Before its first finished turn, what a turn of its role generates at the speed of an
idle engine stands for that, and between two turns the time that nine of ten tools take at least. Where nothing is known
nothing is said until the deadline has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt
from typing import Final

from thunderagent.programs.messages import ProgramLimits, Reason
from thunderagent.programs.rules import Verbs
from thunderagent.programs.state.program import Program
from thunderagent.programs.state.ranked_set import RankedSet

MARGIN_SIGMAS: Final = 2.5
"""How many deviations longer than expected the turns that are left may take: they also wait again."""

FIRST_SIGMAS: Final = 1.0
"""The same for all turns of a new program. Each second of its first wait that it is too early, others pay."""

NEW_RATIO: Final = 0.5
"""The part of its time that a new program may need: loaded engines take twice its time alone, and some waits."""

PRIOR_TURNS: Final = 2.0
"""How many turns of others count in the mean time of a program's turns: its own first ones say little."""

PACE_RATIO: Final = 0.125
"""How much the last program counts in what turns of others take."""

URGENT_RATIO: Final = 0.25
"""Urgent programs, as a ratio of the restores of the paused queue."""

FREE_COUNT: Final = 8
"""How many may be urgent before the first restore."""

LOOK_RATIO: Final = 0.125
LEAST_LOOK_S: Final = 0.1
"""A program that may not be urgent yet is looked at again after this part of what is left, at the earliest."""

LEAST_RATIO: Final = 0.5
"""A turn may take this part of the mean time alone: what is said to be impossible is far from possible."""


class ProgramLimiter:
    """Refuses turns past their program's limits, and puts held programs first that would miss their deadlines.

    Nothing here is called for a program without limits.
    """

    __slots__ = (
        "_asked",
        "_next",
        "_pace_s",
        "_restored_total",
        "_tool_s",
        "_turn_s",
        "_urgent_count",
        "due_s",
        "some_asked",
    )

    def __init__(
        self, restored_total: Callable[[], int], turn_s: Callable[[str], float], tool_s: Callable[[], float]
    ) -> None:
        """Start without programs.

        `restored_total` returns how many programs the paused queue let go, `turn_s` what a turn of a role takes alone,
        `tool_s` what nearly all tools take at least; both 0 if unknown.
        """
        self._restored_total = restored_total
        self._turn_s = turn_s
        self._tool_s = tool_s
        self._asked: tuple[int, ProgramLimits | None] = (-1, None)
        self.some_asked = False
        """Whether limits ever came with a turn: `asked` need not be called before."""
        self._next: RankedSet[Program] = RankedSet()
        """Held programs with deadlines, by when to look again: as they become urgent, then at the deadline."""
        self._urgent_count = 0
        self._pace_s = 0.0
        """What a turn and its tool take in programs with deadlines, without the time they were held; 0 if unknown."""
        self.due_s = inf

    def ask(self, turn_id: int, limits: ProgramLimits) -> None:
        """Note what comes with the next turn."""
        self._asked = turn_id, limits
        self.some_asked = True

    def asked(self, turn_id: int) -> ProgramLimits | None:
        """Return the limits that came with an arrived turn; None if none did."""
        return self._asked[1] if self._asked[0] == turn_id else None

    def why_not(
        self, limits: ProgramLimits, program: Program | None, now_s: float, role: str, *, again: bool = False
    ) -> Reason | None:
        """Return why a turn may not begin; None if it may.

        `program` is None if the turn would open it. `again` is another attempt at a turn that counts already.
        """
        age_s = 0.0 if program is None else now_s - program.opened_s
        if program is not None:
            turn_count = program.turn_count + len(program.held) - again
            if limits.max_turns is not None and turn_count >= limits.max_turns:
                return Reason.MAX_TURNS
            if limits.max_tokens is not None and _tokens_of(program) >= limits.max_tokens:
                return Reason.MAX_TOKENS
        if limits.max_age_s is not None and age_s >= limits.max_age_s:
            return Reason.MAX_AGE
        if limits.deadline_s is not None and age_s + self._least_s(limits, program, role) >= limits.deadline_s:
            return Reason.DEADLINE if age_s >= limits.deadline_s else Reason.DEADLINE_UNMET
        return None

    def why_ended(self, program: Program, now_s: float) -> Reason | None:
        """Return which limit a turn that ended has reached, if limits end this program; None if none."""
        limits = program.program_limits
        if limits is None or not limits.ends or program.in_flight or program.held:
            return None
        age_s = now_s - program.opened_s
        if limits.max_turns is not None and program.turn_count >= limits.max_turns:
            return Reason.MAX_TURNS
        if limits.max_tokens is not None and _tokens_of(program) >= limits.max_tokens:
            return Reason.MAX_TOKENS
        if limits.max_age_s is not None and age_s >= limits.max_age_s:
            return Reason.MAX_AGE
        return Reason.DEADLINE if limits.deadline_s is not None and age_s >= limits.deadline_s else None

    # --- deadlines --------------------------------------------------------------------------------------------------

    def held(self, program: Program) -> None:
        """Watch a program with a deadline whose turn is held."""
        limits = program.program_limits
        if limits is not None and limits.deadline_s is not None:
            need_s = self._need_s(limits, limits.deadline_s, program)
            self._watch(program, program.opened_s + limits.deadline_s - need_s)

    def settle(self, verbs: Verbs) -> None:
        """Make held programs urgent in time, and refuse turns whose deadline has passed."""
        now_s = verbs.book.now_s
        while (program := self._next.first()) is not None and program.look_again_s <= now_s:
            limits = program.program_limits
            assert limits is not None, "it is watched for its deadline"
            assert limits.deadline_s is not None, "it is watched for its deadline"
            deadline_s = program.opened_s + limits.deadline_s
            if now_s < deadline_s:
                again_s = deadline_s
                if not self._hurry(verbs, program, deadline_s):
                    again_s = min(deadline_s, now_s + max(LEAST_LOOK_S, LOOK_RATIO * (deadline_s - now_s)))
                self._watch(program, again_s)
                continue
            for turn in list(program.held.values()):
                verbs.reject(turn, Reason.DEADLINE)
            self.forget(program)
        first = self._next.first()
        self.due_s = inf if first is None else first.look_again_s

    def forget(self, program: Program) -> None:
        """Stop watching a program that waits no longer."""
        self._next.discard(program)
        program.look_again_s = program.urgent_until_s = inf

    def _watch(self, program: Program, again_s: float) -> None:
        program.look_again_s = again_s
        self._next.add(program, again_s)
        self.due_s = min(self.due_s, again_s)

    def _hurry(self, verbs: Verbs, program: Program, deadline_s: float) -> bool:
        """Put a held program before others; return whether it is, and may be by what others got."""
        if program.urgent_until_s < inf:
            return True
        most_count = FREE_COUNT + URGENT_RATIO * self._restored_total()
        if program.place.active or self._urgent_count >= most_count:
            return False
        self._urgent_count += 1
        program.urgent_until_s = deadline_s
        verbs.book.rank_anew(program)
        program.note(verbs.book.now_s, "urgent", f"{deadline_s - verbs.book.now_s:.1f} s to its deadline", None)
        return True

    def _need_s(self, limits: ProgramLimits, deadline_s: float, program: Program) -> float:
        """Return how long a held program may need still once it comes first, and learn from its turns."""
        done_count = program.turn_count
        took_s = max(0.0, program.waiting_since_s - program.opened_s - program.held_s_total)
        pace_s = self._pace_s or (took_s / done_count if done_count else 0.0)
        if not pace_s or (not done_count and limits.turns is None):
            return NEW_RATIO * deadline_s
        if done_count and took_s:  # branches that were held at once leave none
            self._pace_s = pace_s + PACE_RATIO * (took_s / done_count - pace_s)
        left_count = max(1, limits.turns - done_count if limits.turns is not None else done_count)
        known_count = done_count + PRIOR_TURNS
        turn_s = (took_s + PRIOR_TURNS * pace_s) / known_count
        deviation_s = turn_s * sqrt(left_count + left_count * left_count / known_count)
        if done_count:
            return turn_s * left_count + MARGIN_SIGMAS * deviation_s
        return max(turn_s * left_count + FIRST_SIGMAS * deviation_s, NEW_RATIO * deadline_s)

    def _least_s(self, limits: ProgramLimits, program: Program | None, role: str) -> float:
        """Return the least time in which a program's turns from the one that arrives on could end; 0 if unknown."""
        done_count = 0 if program is None else program.turn_count
        left_count = max(1, (limits.turns or 0) - done_count)
        if program is not None and done_count and program.ideal_s_total:
            return LEAST_RATIO * program.ideal_s_total / done_count * left_count
        return LEAST_RATIO * (self._turn_s(role) * left_count + self._tool_s() * (left_count - 1))


def _tokens_of(program: Program) -> int:
    return program.prompt_tokens_total + program.output_tokens_total
