"""`passthrough`: what a plain load balancer does. Every turn is sent at once to the least loaded replica.

It is the baseline, and the lower bound for every other policy: where memory is not short, nothing may be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import restore_waiting
from thunderagent.programs.policy import (
    Moment,
    Placement,
    Policy,
    ProgramView,
    ReplicaView,
    View,
    least_loaded,
)


@dataclass(frozen=True, slots=True)
class Passthrough(Policy):
    """Grant every turn at once on the replica with the fewest turns in flight."""

    name: ClassVar[str] = "passthrough"
    holds_nobody: ClassVar[bool] = True

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the least loaded replica, for each turn separately."""
        return Placement(least_loaded(candidates), Reason.POLICY)

    def balance(self, view: View, moment: Moment) -> None:
        """Restore programs that waited for a replica to come back."""
        if moment is Moment.REPLICAS_CHANGED:
            restore_waiting(view, self)
