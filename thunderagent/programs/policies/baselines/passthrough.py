"""`passthrough`: what a plain load balancer does. Every turn is sent at once to the least loaded replica.

It is the baseline, and the lower bound for every other policy: where memory is not short, nothing may be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.policy import ClaimRules, Moment, Placement, least_loaded
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView, ReplicaView
from thunderagent.programs.policies.helpers import restore_waiting


@dataclass(frozen=True, slots=True)
class Passthrough:
    """Grant every turn at once on the replica with the fewest turns in flight."""

    name: ClassVar[str] = "passthrough"
    holds_nobody: ClassVar[bool] = True
    claim_rules: ClassVar[ClaimRules] = ClaimRules()
    tick_s: ClassVar[float] = 1.0

    def pause_rank(self, program: ProgramView) -> float:
        """Return the age: unused, because nobody is paused."""
        return program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time: after an outage, the oldest program comes first."""
        return program.opened_s

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return infinity: nobody is paused."""
        return inf

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the least loaded replica, for each turn separately."""
        return Placement(least_loaded(candidates), Reason.POLICY)

    def balance(self, view: View, moment: Moment) -> None:
        """Restore programs that waited for a replica to come back."""
        if moment is Moment.REPLICAS_CHANGED:
            restore_waiting(view, self)
