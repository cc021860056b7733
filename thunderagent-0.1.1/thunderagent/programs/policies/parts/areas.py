"""What `least-area` learns about programs, and the order of admission that follows from it, without its settings."""

# compiled: every turn is learned from, and every wait is ranked

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from math import fsum, inf
from typing import Final

from thunderagent.programs.messages import LengthsRecord
from thunderagent.programs.policies.helpers import times
from thunderagent.programs.state.program import Phase, Program, Status, Turn
from thunderagent.programs.transitions import SchedulerView

ENDS_COUNT: Final = (*range(1, 9), *(round(8 * 2 ** (step / 4)) for step in range(1, 29)))
"""The last turn of each interval: 1 to 8, and then four for each doubling, up to 1,024."""

_INTERVAL_OF: Final = {last_count: interval for interval, last_count in enumerate(ENDS_COUNT)}

ENDING_RATIO: Final = 0.1
"""First guess: how many of those that reach an interval end in it. 0.1 is a Pareto tail with exponent 0.6."""

GUESS_WEIGHT: Final = 2.0
"""What the first guess weighs, in programs."""

NOBODY_LEFT_RATIO: Final = 0.01
"""Where so few are left, later turns do not count."""

FIRST_GROWTH_TOKENS: Final = 1000.0
"""What a turn adds until some were seen: 1,200 to 4,400 tokens were measured on coding agents, less on others."""

FORGETTING_RATIO: Final = 0.999
"""Weight of a turn over that of the next one in what a turn adds."""

REFRESH_COUNT: Final = 32
"""What is made of the table is made anew once one of so many counts in it is new: at the begin with each."""

REMEMBERED_COUNT: Final = 1000.0
"""Programs that count; beyond, what was seen before is halved."""

FEW_COUNT: Final = 64
"""So many waits that are over may be kept, and as many as there are that are not."""

DRAINING_COUNT: Final = 4
DRAINING_RATIO: Final = 0.25
"""Once so many programs, and this part of those that are left, ended since the last one came or began, a batch ends."""

DRAINING_DIVISOR: Final = 16.0
"""How much shorter the bound of a wait is then."""

MOST_COUNT: Final = 1e9
"""More than is ever counted: what is taken in from a file is checked."""

UNVERIFIED_TOKENS: Final = -1
"""In place of a context once nobody vouched for the size of a turn: what its program adds teaches nothing any more."""

NOT_OVERDUE_RANK: Final = 1e12
"""Over every time: ranks of those that waited too long are times."""


class Areas:
    """Learns how long and how large programs become, ranks them, and finds those that waited for too long."""

    __slots__ = (
        "_begun_ratio",
        "_bound_ratio",
        "_contexts_tokens",
        "_due",
        "_ended",
        "_ended_count",
        "_ends",
        "_grown_count",
        "_grown_tokens",
        "_known_count",
        "_news_count",
        "_overdue",
        "_passed",
        "_passed_counts",
        "_waited_s",
        "_waits",
    )

    def __init__(self, *, bound_ratio: float, begun_ratio: float) -> None:
        """Know nothing yet. The settings are those of `LeastArea`."""
        self._bound_ratio = bound_ratio
        self._begun_ratio = begun_ratio
        self._ended = [0.0] * len(ENDS_COUNT)
        self._passed = [0.0] * len(ENDS_COUNT)
        self._contexts_tokens: dict[str, int] = {}
        self._ends: dict[int, list[tuple[float, float]]] = {}
        """By turns behind a program: see `_ends_after`."""
        self._news_count = 0
        """Counts of the table that changed since it was made."""
        self._known_count = 0.0
        self._grown_tokens = FIRST_GROWTH_TOKENS
        self._grown_count = 1.0
        self._passed_counts: dict[str, int] = {}
        """How many turns of each program are known to have been passed: one that is tried again is passed once."""
        self._ended_count = 0
        """How many ended since, and since the last one began."""
        self._waits: dict[str, tuple[float, float]] = {}
        """Since when and in which rank programs wait."""
        self._overdue: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}
        """What programs waited in all, before they wait now."""
        self._due: list[tuple[float, str, float]] = []
        """A heap of those that wait: since when if all their waiting were one, and since when this time."""

    @property
    def growth_tokens(self) -> float:
        """What a turn adds to a context."""
        return self._grown_tokens / self._grown_count

    def restore_rank(self, program: Program) -> float:
        """Return the index, or since when it waits, as if all its waiting were one, if that is for too long."""
        if program.phase is Phase.REASONING:
            since_s = program.waiting_since_s
            program_id = program.program_id
            if self._overdue.get(program_id) == since_s:
                return since_s - self._waited_s.get(program_id, 0.0)
            wait = self._waits.get(program_id)
            if wait is None or wait[0] != since_s:
                if not program.turn_count:  # it comes
                    self._ended_count = 0
                wait = self._waits[program_id] = since_s, self._rank_now(program)
                self._expect(program_id, since_s)
            return wait[1]
        return self._rank_now(program)

    def _expect(self, program_id: str, since_s: float) -> None:
        """Put a program that begins to wait where it will be found once that is for too long."""
        if len(self._due) > 2 * len(self._waits) + FEW_COUNT:  # mostly of waits that are over
            self._due = [each for each in self._due if self._waits.get(each[1], (None,))[0] == each[2]]
            heapify(self._due)
        heappush(self._due, (since_s - self._waited_s.get(program_id, 0.0), program_id, since_s))

    def _rank_now(self, program: Program) -> float:
        area = self.area(program.turn_count, program.claim_tokens)
        return NOT_OVERDUE_RANK + (self._begun_ratio * area if program.turn_count else area)

    def area(self, turn_count: int, claim_tokens: float) -> float:
        """Return the index after so many turns, in tokens times turns."""
        if turn_count >= ENDS_COUNT[-1]:
            return claim_tokens * turn_count
        ends = self._ends.get(turn_count)
        if ends is None:
            ends = self._ends[turn_count] = self._ends_after(turn_count)
        growth_tokens, least_area = self.growth_tokens, inf
        for claim_turns, growth_turns in ends:
            index = claim_turns * claim_tokens + growth_turns * growth_tokens
            if index < least_area:
                least_area = index
        return least_area

    def _ends_after(self, turn_count: int) -> list[tuple[float, float]]:
        """Return by what claim and growth are multiplied for the index, for each d by which that may be least.

        Cost: O(intervals), of which there are 36.
        """
        ends: list[tuple[float, float]] = []
        claim_turns, growth_turns, left_ratio, done_count = 0.0, 0.0, 1.0, turn_count
        first = bisect_left(ENDS_COUNT, turn_count + 1)
        previous_count = ENDS_COUNT[first - 1] if first else 0
        for interval in range(first, len(ENDS_COUNT)):
            last_count = ENDS_COUNT[interval]
            turns_count = last_count - done_count
            ended_count = self._ended[interval] + ENDING_RATIO * GUESS_WEIGHT
            staying_ratio = 1 - ended_count / (self._ended[interval] + self._passed[interval] + GUESS_WEIGHT)
            if done_count != previous_count:  # of the interval that it is in only the rest
                staying_ratio **= turns_count / (last_count - previous_count)
            taken_turns = left_ratio * turns_count * (1 + staying_ratio) / 2
            claim_turns += taken_turns
            growth_turns += taken_turns * (done_count - turn_count + turns_count / 2)
            left_ratio *= staying_ratio
            of_claim, of_growth = claim_turns / (1 - left_ratio), growth_turns / (1 - left_ratio)
            if not any(claim <= of_claim and growth <= of_growth for claim, growth in ends):
                ends.append((of_claim, of_growth))
            if left_ratio < NOBODY_LEFT_RATIO:
                break
            done_count = previous_count = last_count
        return ends

    def _refresh(self) -> None:
        """Forget what was made of the table, because its counts changed much."""
        self._ends.clear()
        self._news_count = 0
        self._known_count = fsum(self._ended) + fsum(self._passed)

    def export(self) -> LengthsRecord:
        """Return what was learned of all programs."""
        return LengthsRecord(tuple(self._ended), tuple(self._passed), self._grown_tokens, self._grown_count)

    def adopt(self, lengths: LengthsRecord) -> None:
        """Know what another one knew, in place of what was learned here. Raises ValueError for what cannot be."""
        if not len(lengths.ended) == len(lengths.passed) == len(ENDS_COUNT):
            raise ValueError(f"lengths of programs have {len(ENDS_COUNT)} intervals")
        if not all(0 <= count <= MOST_COUNT for count in (*lengths.ended, *lengths.passed)):
            raise ValueError(f"lengths of programs: a count is not from 0 to {MOST_COUNT:g}")
        if not (1 <= lengths.grown_count <= MOST_COUNT and 0 <= lengths.grown_tokens <= MOST_COUNT * MOST_COUNT):
            raise ValueError("lengths of programs: what turns added is beyond all measure")
        self._ended, self._passed = list(lengths.ended), list(lengths.passed)
        self._grown_tokens, self._grown_count = lengths.grown_tokens, lengths.grown_count
        self._refresh()

    def turn_granted(self, program: Program, turn: Turn, held_s: float) -> None:
        """Learn how many turns programs have, and forget that this one waited."""
        program_id = program.program_id
        if not program.turn_count:
            self._ended_count = 0
        self._waits.pop(program_id, None)
        self._overdue.pop(program_id, None)
        if held_s and not program.in_flight:  # the first of the turns that waited together: it waited longest
            self._waited_s[program_id] = self._waited_s.get(program_id, 0.0) + held_s
        if program.turn_count <= self._passed_counts.get(program_id, 0):
            return
        self._passed_counts[program_id] = program.turn_count
        interval = _INTERVAL_OF.get(program.turn_count)
        if interval is not None:
            self._passed[interval] += 1
            self._news_count += 1
            if self._news_count > self._known_count / REFRESH_COUNT:
                self._refresh()

    def program_ended(self, view: SchedulerView, program: Program) -> None:
        """Learn how many turns an ended program had, and look who has waited for too long."""
        turn_count = program.turn_count
        for known in (self._contexts_tokens, self._passed_counts, self._waits, self._overdue, self._waited_s):
            known.pop(program.program_id, None)
        self._ended_count += 1
        if turn_count:
            self._ended[min(bisect_left(ENDS_COUNT, turn_count), len(ENDS_COUNT) - 1)] += 1
        if fsum(self._ended) > REMEMBERED_COUNT:
            self._ended = [count / 2 for count in self._ended]
            self._passed = [count / 2 for count in self._passed]
        self._news_count += 1
        if self._news_count > self._known_count / REFRESH_COUNT:
            self._refresh()
        if self._due:
            self._look_for_overdue(view)

    def turn_ended(self, view: SchedulerView, program: Program, turn: Turn, finished: bool) -> None:
        """Learn by how much programs grow, and look who has waited for too long."""
        if finished:
            program_id = program.program_id
            before_tokens, tokens = self._contexts_tokens.get(program_id, 0), program.context_tokens
            if before_tokens < 0 or turn.unverified:
                tokens = UNVERIFIED_TOKENS
            self._contexts_tokens[program_id] = tokens
            if 0 < before_tokens <= tokens:
                self._grown_tokens = FORGETTING_RATIO * self._grown_tokens + (tokens - before_tokens)
                self._grown_count = FORGETTING_RATIO * self._grown_count + 1
        if self._due:
            self._look_for_overdue(view)

    def _look_for_overdue(self, view: SchedulerView) -> None:
        """Rank those anew who waited for too long. Cost: O(1), and O(log n) for each wait that began."""
        due = self._due
        bound_ratio = self._bound_ratio
        if self._ended_count >= max(DRAINING_COUNT, DRAINING_RATIO * len(self._passed_counts)):
            bound_ratio /= DRAINING_DIVISOR
        before_s = view.now_s - times(bound_ratio, view.median_residence_s)
        while due and due[0][0] < before_s:
            _, program_id, since_s = heappop(due)
            wait = self._waits.get(program_id)
            if wait is None or wait[0] != since_s:
                continue
            del self._waits[program_id]
            program = view.program(program_id)
            if program is not None and program.status is Status.PAUSED:
                self._overdue[program_id] = since_s
                view.rank_anew(program)
