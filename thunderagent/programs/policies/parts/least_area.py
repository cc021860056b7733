"""`least-area`: who is through for least memory and time comes first, an order of the paused queue.

Theory of operation
===================
Where memory is what is short, a program costs its *area*: the tokens that it holds, times the time for which it holds
them. The mean time of programs is least if those come first that come to their end for least area, as the shortest job
comes first where a processor is short. Neither how long a program will be is known, nor how large, but both can be
learned while programs end.

**How long.** A life table on a logarithmic scale counts, for each interval of turns, how many programs *ended* in it
and how many *passed* it (Kaplan and Meier; programs that still run say nothing of later intervals). Until enough ended
it is drawn towards a guess with a heavy tail.

**How large.** What a turn adds to a context is learned as a mean over all programs. One that has c tokens now and takes
n more turns holds n·(c + g·n/2), in tokens times turns: that a turn takes equally long for all is good enough here.

**The index** of a program after a turns is the area for each end that it brings,

    I(a, c) = min over d of E[area of the next d turns, or fewer if it ends] / P(it ends within d turns),

which is one over its Gittins index with the area as the cost. Where programs are alike in length, it grows with what a
program holds and shrinks as it comes near its end; where a few are far longer than the rest, it falls back once it has
outlived the short ones, as ORBIT's steps do, but at the turns where that is so on this load; and a program that comes
with a whole book comes behind those that come with a question, as under MARS, but not behind all of them.

**Who began.** A program that was let in before and lost its claim counts with `begun_ratio` of its area: what still
lies in memory of its history need not be computed again, and the longer it waits the more of that is lost.

**The bound.** Whose turns have waited, in all of its life, for longer than `bound_ratio` times the median time that
programs take, as learned, comes before everybody else, whoever has waited for longest first. So those that come later
are let in before it for no longer than that in sum: a large program that loses its claim again and again would else
wait as long each time. Only then does a rank change while a program waits, whatever is learned meanwhile; whether it is
so is looked at whenever a turn or a program ends, and so before there is room.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, ClassVar

from thunderagent.programs.model.places import Phase, Status
from thunderagent.programs.model.records.learned import LengthsRecord
from thunderagent.programs.model.records.signals import GpuEnd, GpuSubmit, ProgramEnd
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView
from thunderagent.programs.policies.setting_checks import check_not_negative

if TYPE_CHECKING:
    from thunderagent.programs.model.records.signals import Signal

ENDS_COUNT = (*range(1, 9), *(round(8 * 2 ** (step / 4)) for step in range(1, 29)))
"""The last turn of each interval: 1 to 8, and then four for each doubling, up to 1,024."""

_INTERVAL_OF = {last_count: interval for interval, last_count in enumerate(ENDS_COUNT)}

ENDING_RATIO = 0.1
"""First guess: how many of those that reach an interval end in it. 0.1 is a Pareto tail with exponent 0.6."""

GUESS_WEIGHT = 2.0
"""What the first guess weighs, in programs."""

NOBODY_LEFT_RATIO = 0.01
"""Where so few are left, later turns do not count."""

FIRST_GROWTH_TOKENS = 1000.0
"""What a turn adds until some were seen: 1,200 to 4,400 tokens were measured on coding agents, less on others."""

FORGETTING_RATIO = 0.999
"""Weight of a turn over that of the next one in what a turn adds."""

REMEMBERED_COUNT = 1000.0
"""Programs that count; beyond, what was seen before is halved."""

FEW_COUNT = 64
"""So many waits that are over may be kept, and as many as there are that are not."""

MOST_COUNT = 1e9
"""More than is ever counted: what is taken in from a file is checked."""

NOT_OVERDUE_RANK = 1e12
"""Over every time: ranks of those that waited too long are times."""


@dataclass(slots=True)
class LeastArea:
    """Rank by the index, and those first who waited for `bound_ratio` times the median residence in all."""

    bound_ratio: float = 4.0
    """A program that waited this many median residences in all comes before all. `inf`: never; `0`: longest wait first.
    """
    begun_ratio: float = 0.5
    """What a program counts that lost its claim. Lower it if programs are often paused in the middle."""
    _ended: list[float] = field(init=False, repr=False, default_factory=lambda: [0.0] * len(ENDS_COUNT))
    _passed: list[float] = field(init=False, repr=False, default_factory=lambda: [0.0] * len(ENDS_COUNT))
    _contexts_tokens: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    _grown_tokens: float = field(init=False, repr=False, default=FIRST_GROWTH_TOKENS)
    _grown_count: float = field(init=False, repr=False, default=1.0)
    _passed_counts: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """How many turns of each program are known to have been passed: one that is tried again is passed once."""
    _waits: dict[str, tuple[float, float]] = field(init=False, repr=False, default_factory=dict)
    """Since when and in which rank programs wait."""
    _overdue: dict[str, float] = field(init=False, repr=False, default_factory=dict)
    _waited_s: dict[str, float] = field(init=False, repr=False, default_factory=dict)
    """What programs waited in all, before they wait now."""
    _due: list[tuple[float, str, float]] = field(init=False, repr=False, default_factory=list)
    """A heap of those that wait: since when if all their waiting were one, and since when this time."""
    name: ClassVar[str] = "least-area"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_not_negative(self.name, self, "bound_ratio", "begun_ratio")

    def restore_rank(self, program: ProgramView) -> float:
        """Return the index, or since when it waits, as if all its waiting were one, if that is for too long."""
        if program.phase is Phase.REASONING:
            since_s = program.waiting_since_s
            program_id = program.program_id
            if self._overdue.get(program_id) == since_s:
                return since_s - self._waited_s.get(program_id, 0.0)
            wait = self._waits.get(program_id)
            if wait is None or wait[0] != since_s:
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

    def _rank_now(self, program: ProgramView) -> float:
        area = self.area(program.turn_count, program.claim_tokens)
        return NOT_OVERDUE_RANK + (self.begun_ratio * area if program.turn_count else area)

    def area(self, turn_count: int, claim_tokens: float) -> float:
        """Return the index after so many turns, in tokens times turns. Cost: O(intervals), of which there are 36."""
        ended, passed = self._ended, self._passed
        growth_tokens = self._grown_tokens / self._grown_count
        least_area = inf
        area, left_ratio, tokens, done_count = 0.0, 1.0, claim_tokens, turn_count
        first = bisect_left(ENDS_COUNT, turn_count + 1)
        previous_count = ENDS_COUNT[first - 1] if first else 0
        for interval in range(first, len(ENDS_COUNT)):  # a call for each would cost more than all the rest
            last_count = ENDS_COUNT[interval]
            turns_count = last_count - done_count
            ended_count = ended[interval] + ENDING_RATIO * GUESS_WEIGHT
            staying_ratio = 1 - ended_count / (ended[interval] + passed[interval] + GUESS_WEIGHT)
            if done_count != previous_count:  # of the interval that it is in only the rest
                staying_ratio **= turns_count / (last_count - previous_count)
            grown_tokens = growth_tokens * turns_count
            area += left_ratio * turns_count * (tokens + grown_tokens / 2) * (1 + staying_ratio) / 2
            left_ratio *= staying_ratio
            index = area / (1 - left_ratio)
            if index < least_area:
                least_area = index
            if left_ratio < NOBODY_LEFT_RATIO:
                break
            tokens += grown_tokens
            done_count = previous_count = last_count
        return least_area if least_area < inf else claim_tokens * turn_count

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

    def observe(self, view: View, signal: Signal) -> None:
        """Learn how long programs are and how they grow, and look who has waited for too long."""
        if isinstance(signal, GpuSubmit):
            self._submitted(view, signal.program_id)
            if signal.held_s:
                self._waited_s[signal.program_id] = self._waited_s.get(signal.program_id, 0.0) + signal.held_s
        elif isinstance(signal, GpuEnd) and signal.finished:
            self._turn_finished(view, signal.program_id)
        elif isinstance(signal, ProgramEnd):
            for known in (self._contexts_tokens, self._passed_counts, self._waits, self._overdue, self._waited_s):
                known.pop(signal.program_id, None)
            self._program_ended(signal.turn_count)
        if isinstance(signal, GpuEnd | ProgramEnd):
            self._look_for_overdue(view)

    def _submitted(self, view: View, program_id: str) -> None:
        self._waits.pop(program_id, None)
        self._overdue.pop(program_id, None)
        program = view.program(program_id)
        if program is None or program.turn_count <= self._passed_counts.get(program_id, 0):
            return
        self._passed_counts[program_id] = program.turn_count
        interval = _INTERVAL_OF.get(program.turn_count)
        if interval is not None:
            self._passed[interval] += 1

    def _program_ended(self, turn_count: int) -> None:
        if turn_count:
            self._ended[min(bisect_left(ENDS_COUNT, turn_count), len(ENDS_COUNT) - 1)] += 1
        if sum(self._ended) > REMEMBERED_COUNT:
            self._ended = [count / 2 for count in self._ended]
            self._passed = [count / 2 for count in self._passed]

    def _turn_finished(self, view: View, program_id: str) -> None:
        program = view.program(program_id)
        if program is None:
            return
        before_tokens = self._contexts_tokens.get(program_id, 0)
        self._contexts_tokens[program_id] = program.context_tokens
        if 0 < before_tokens <= program.context_tokens:
            grown_tokens = program.context_tokens - before_tokens
            self._grown_tokens = FORGETTING_RATIO * self._grown_tokens + grown_tokens
            self._grown_count = FORGETTING_RATIO * self._grown_count + 1

    def _look_for_overdue(self, view: View) -> None:
        """Rank those anew who waited for too long. Cost: O(1), and O(log n) for each wait that began."""
        before_s, due = view.now_s - self.bound_ratio * view.median_residence_s, self._due
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
