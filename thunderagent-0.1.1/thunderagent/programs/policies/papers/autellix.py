"""`autellix`: least attained service first, by the priorities of engines; long calls stay near their history.

Theory of operation
===================
Autellix (arXiv 2502.13965) holds nobody back. Every call goes to an engine at once, and engines first serve the
programs that got least so far (`plas.py`, its PLAS; choose the priority `atlas` for programs with parallel calls). With
several engines [Algorithm 2] a call of at most 2,048 tokens goes to the least used one, because it is cheap to compute
anywhere. A longer one goes to its program's engine, which has its history, or to the least used one if the program has
none yet. The program's engine is where it ran last, and a call's length is the program's claim.

Without priorities in the engine it is a load balancer that keeps long programs at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from thunderagent.programs.messages import Reason, Signal
from thunderagent.programs.policies.helpers import check_not_negative, home_of, restore_waiting
from thunderagent.programs.policies.papers.plas import Plas
from thunderagent.programs.policy import (
    ClaimRules,
    Moment,
    Placement,
    Policy,
    ProgramView,
    ReplicaView,
    View,
    least_loaded,
)


@dataclass(frozen=True, slots=True)
class Autellix(Policy):
    """Grant every turn at once, one over `short_tokens` at home. The settings of PLAS are those of `priority=plas`."""

    short_tokens: int = 2048
    """A turn up to this size goes to the least busy replica, a longer one to its program's."""
    priority: Plas = field(init=False, repr=False, default_factory=Plas)
    name: ClassVar[str] = "autellix"
    holds_nobody: ClassVar[bool] = True
    claim_rules: ClassVar[ClaimRules] = ClaimRules()
    tick_s: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        """Reject a negative length."""
        check_not_negative("autellix", self, "short_tokens")

    def observe(self, view: View, signal: Signal) -> None:
        """Pass the signal to PLAS."""
        self.priority.observe(view, signal)

    def pause_rank(self, program: ProgramView) -> float:
        """Return the age: unused, because nobody is paused."""
        return program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        """Return PLAS' order: after an outage, the program that got least comes first."""
        return self.priority.restore_rank(program)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return infinity: nobody is paused."""
        return inf

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the least loaded replica for a short turn or the first one, otherwise the program's own."""
        home = home_of(program, candidates)
        if home is not None and program.claim_tokens > self.short_tokens:
            return Placement(home, Reason.HOME)
        return Placement(least_loaded(candidates), Reason.POLICY)

    def balance(self, view: View, moment: Moment) -> None:
        """Restore programs that waited for a replica to come back."""
        if moment is Moment.REPLICAS_CHANGED:
            restore_waiting(view, self)
