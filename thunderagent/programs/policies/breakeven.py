"""`breakeven`: hold memory through a tool as long as that is cheaper than computing it again; least area first.

Theory of operation
===================
A replica's memory is claimed by programs: each claims its context and what turns were seen to add in the mean, and what
several prompts share is claimed once (`ClaimRules`). Five rules say who may claim it:

**Hold or pause.** When a tool begins, its program keeps its claim: the next turn finds its history. Holding costs
memory; pausing costs computing the history again. Which is worth more depends on what the engine is short of. So it is
planned from measured prices for how long holding pays (`learned/holding.py`), and a program is held until its tool's
rate of return falls below one in that threshold times `hold_ratio` (`tool_times.py`). After that it is *expired*: its
claim is taken as soon as the first in the queue needs the room, and not before. Where nothing is worth holding, turns
alone fill the memory. A client's hint on its next turn replaces that guess, for at most the threshold, and for at most
`hint_ratio` of a replica (`transitions.py`).

**No idle engine.** A replica without a turn in flight lets the first in the queue in, whatever is claimed there; the
programs whose tools have run longest are paused for it. Engines evict those first, too.

**Admission by area.** The program that will end for least memory times turns is restored first, on every event that
frees room (`parts/least_area.py`, or another `order`). A program that has waited too long comes before all, which
bounds waiting. If the first does not fit anywhere, newcomers and the `pass_count` behind it may pass. Once the first
has waited for `wait_ratio` of the median time of programs, the replica with most room lets nobody else in until it
fits. A program that a route binds to one replica may be passed there for the same time; then that replica lets nobody
else in.

**Room to grow.** Programs are small when they come. One that is let in needs room not only for itself, but for the
growth of all programs on the replica over the time in which letting it in would pay: pausing one too soon costs more
than leaving memory empty until then. `foresight_ratio` scales that time, and nobody is expected to grow beyond the mean
size of programs. This applies if memory is short, and once growth was seen. A newcomer waits for it only once programs
ended, because nobody waits for a guess. One that lost its claim waits as soon as turns grew: something outgrew the
memory. If all that are in or wait would fit at mean size, a newcomer that fits is let in at once, because not all of
them are large at the same time.
Programs are let in up to `low_ratio` of the limit, and paused only above `high_ratio`: first expired ones, then the
youngest acting, at last the youngest with a turn in flight, which is marked, and unmarked if there is room again before
that ends. The last unfinished member of a group is paused last, because the whole group waits for it.
Where nothing is worth holding and lost tokens cost little, three programs more than fit are let in: they wait in the
engine's queue, and no memory is unused in which a turn could run (`learned/holding.py`).

**Home.** A program goes back to the replica with its history, if there is room. If not, it goes where a new one would:
of the replicas where it fits, to the one with fewest turns in flight, or with fewest programs for its memory where that
would not do for one more, each of mean size.

If memory is not short, none of this has an effect: every turn is granted at once. A program that is larger than every
replica is let in at once, too, and so is one that would be alone on a replica: the engine decides what it can do with
it. A replica of unknown capacity counts as the median of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.policies.helpers import check_not_negative
from thunderagent.programs.policies.letting_in import LettingIn
from thunderagent.programs.policies.parts.least_area import LeastArea
from thunderagent.programs.policy import (
    HINT_RATIO,
    ClaimRules,
    Learner,
    Moment,
    Placement,
    Policy,
    ProgramView,
    ReplicaView,
    View,
)
from thunderagent.programs.state.ranked_set import Rank


@dataclass(frozen=True)
class BreakEven(Policy):
    """Hold, let in, pause and place as above. Each part has a setting that switches it off."""

    hold_ratio: float = 1.5
    """How far the planned threshold is stretched: tools' rates are learned from few returns. Raise it if engines
    recompute much after `expired`; lower it if turns are held while `caching` is large. `inf`: hold through every tool;
    `0`: expire at once.
    """
    low_ratio: float = 0.95
    """Admit up to this part of the limit. Lower it if programs are paused and restored in quick succession. `1`: until
    full.
    """
    high_ratio: float = 1.0
    """Pause above this part of the limit. Lower it with `low_ratio` to leave memory to other users of the engines. A
    large number: pause nobody for memory.
    """
    reserve_tokens: int = 256
    """What a claim holds beside its context for growth, until that is learned: then it is what turns add in the mean.
    The guess weighs as much as 16 turns. `0`: claims hold contexts alone.
    """
    foresight_ratio: float = 1.5
    """How far ahead who is let in leaves room for growth, in β·C. Raise it if programs are paused soon after they came;
    lower it if `unused` is large while others wait. `0`: no room for growth.
    """
    share_prefixes: bool = True
    """Count once what prompts on a replica have in common. `false` if engines do not cache prefixes across requests."""
    adapt_capacity: bool = True
    """Correct the capacity by cache losses. `false`: trust what the engine says."""
    pass_count: int = 4
    """How many programs behind the first may pass it where it does not fit. Raise it if sizes differ much and memory
    stays `unused`. `0`: strictly in order.
    """
    wait_ratio: float = 0.5
    """How long the first waits before a replica is reserved for it, in median residences. Lower it if large programs
    wait long; raise it if `unused` grows when one comes. `inf`: never; `0`: at once.
    """
    hint_ratio: float = HINT_RATIO
    """The part of the limit that clients' hints may keep for longer than the policy would. Raise it if all clients are
    your own and `thunderagent_hints_measured_total` says they are right. `0`: hints can only free memory.
    """
    name: ClassVar[str] = "breakeven"
    tick_s: ClassVar[float] = 1.0
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        names = ("hold_ratio", "reserve_tokens", "foresight_ratio", "pass_count", "wait_ratio")
        check_not_negative("breakeven", self, *names, "hint_ratio")
        if not 0 < self.low_ratio <= self.high_ratio:
            raise ConfigurationError(
                f"breakeven: needs 0 < low_ratio <= high_ratio, not {self.low_ratio} and {self.high_ratio}"
            )

    @property
    def decider(self) -> Any:
        """Return its rules; a subclass, which may have others, is asked itself."""
        return self.rules if type(self) is BreakEven else self

    @cached_property
    def rules(self) -> Any:
        """Return the `LettingIn` of these settings, which is compiled where the core is."""
        return LettingIn(
            hold_ratio=self.hold_ratio,
            low_ratio=self.low_ratio,
            high_ratio=self.high_ratio,
            foresight_ratio=self.foresight_ratio,
            pass_count=self.pass_count,
            wait_ratio=self.wait_ratio,
        )

    @cached_property
    def order(self) -> LeastArea:
        """Return who is let in first, unless another is chosen; it learns, so a policy belongs to one scheduler."""
        return LeastArea()

    def learners(self) -> Sequence[Learner]:
        """Return those of its order."""
        return self.order.learners()

    @property
    def claim_rules(self) -> ClaimRules:
        """Return what claims hold beyond contexts."""
        return ClaimRules(
            reserve_tokens=self.reserve_tokens,
            learns_reserve=self.reserve_tokens > 0,
            share_prefixes=self.share_prefixes,
            adapt_capacity=self.adapt_capacity,
        )

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica while it is active, otherwise one with room, if it is its turn."""
        placement: Placement = self.rules.place(view, program, candidates)
        return placement

    def balance(self, view: View, moment: Moment) -> None:
        """Pause where claims exceed the capacity, and let fitting programs in, where something changed or on a tick."""
        self.rules.balance(view, moment)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return until when the program's tool returns more often than once in the break-even time."""
        return float(self.rules.hold_s(view, program))

    def hold_threshold_s(self, view: View, program: ProgramView) -> float:
        """Return what a lost token is worth in seconds of holding, as planned, times `hold_ratio`."""
        return float(self.rules.hold_threshold_s(view, program))

    def kept_tokens(self, view: View, program: ProgramView, replica: ReplicaView) -> float:
        """Return what must stay free there: above the watermark, and for growth."""
        return float(self.rules.kept_tokens(view, program, replica))

    def pause_rank(self, program: ProgramView) -> float:
        """Rank the youngest first, and the last of a group last."""
        return inf if program.is_last_of_group else -program.opened_s

    def restore_rank(self, program: ProgramView) -> Rank:
        """Rank as its order does."""
        return self.order.restore_rank(program)
