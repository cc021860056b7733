"""`least-area`: the program that ends for least memory times time comes first, an order of the paused queue.

Theory of operation
===================
If memory is short, a program costs its *area*: the tokens that it holds, times the time for which it holds them. The
mean time of programs is lowest if those come first that end for least area, as the shortest job comes first if a
processor is short. How long and how large a program will be is unknown, but both can be learned while programs end.

**How long.** A life table on a logarithmic scale counts, for each interval of turns, how many programs *ended* in it
and how many *passed* it (Kaplan and Meier; programs that still run say nothing of later intervals). Until enough ended
it is drawn towards a guess with a heavy tail.

**How large.** What a turn adds to a context is learned as a mean over all programs. A program that has c tokens now and
takes n more turns holds n·(c + g·n/2), in tokens times turns: it is accurate enough to assume that all turns take
equally long.

**The index** of a program after a turns is the area per end that it brings,

    I(a, c) = min over d of E[area of the next d turns, or fewer if it ends] / P(it ends within d turns),

which is one over its Gittins index with the area as the cost. If programs are alike in length, it grows with what a
program holds and shrinks as it nears its end. If a few are far longer than the rest, a program falls back once it has
outlived the short ones, as in ORBIT's steps, but at the turns where that holds for this load. A program that starts
with a whole book comes behind those that start with a question, as under MARS, but not behind all of them.

**Who began.** A program that was let in before and lost its claim counts with `begun_ratio` of its area: the part of
its history that is still in memory need not be computed again, and the longer it waits the more of that is lost.

**The bound.** A program whose turns have waited, over its whole life, longer than `bound_ratio` times the learned
median time of programs comes before all others, the longest wait first. So in sum, later programs are let in before it
for no longer than that: otherwise a large program that loses its claim again and again would wait as long each time.
Only then does a rank change while a program waits, whatever is learned meanwhile. This is checked whenever a turn or a
program ends, and so before there is room.

**The end of a batch.** Once some programs ended and none came or began, as at the end of a rollout, the bound is a
sixteenth of that. What counts then is when the last one ends, and the ones that are behind would run their tools alone,
beside empty engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from thunderagent.programs.messages import LengthsRecord
from thunderagent.programs.policies.helpers import check_not_negative
from thunderagent.programs.policies.parts.areas import Areas
from thunderagent.programs.policy import Learner, Order, ProgramView


@dataclass(frozen=True)
class LeastArea(Order):
    """Rank by the index; programs that waited `bound_ratio` times the median residence in all come first."""

    bound_ratio: float = 4.0
    """A program that waited this many median residences in all comes before all; a sixteenth of it as a batch ends.
    `inf`: never; `0`: longest wait first.
    """
    begun_ratio: float = 0.5
    """What a program counts that lost its claim. Lower it if programs are often paused in the middle."""
    name: ClassVar[str] = "least-area"

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        check_not_negative(self.name, self, "bound_ratio", "begun_ratio")

    @cached_property
    def areas(self) -> Any:
        """Return the `Areas` of these settings, compiled where the core is; it is Any as `BreakEven.rules` is."""
        return Areas(bound_ratio=self.bound_ratio, begun_ratio=self.begun_ratio)

    def restore_rank(self, program: ProgramView) -> float:
        """Return the index, or since when it waits, if that is for too long."""
        return float(self.areas.restore_rank(program))

    def learners(self) -> Sequence[Learner]:
        """Return what learns."""
        return (self.areas,)

    def export(self) -> LengthsRecord:
        """Return what it learned."""
        lengths: LengthsRecord = self.areas.export()
        return lengths

    def adopt(self, lengths: LengthsRecord) -> None:
        """Take what was learned before."""
        self.areas.adopt(lengths)
