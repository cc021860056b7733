"""`cap`: at most N programs at once over all replicas, first come first served; the rest wait for a release.

The simplest thing that stops thrashing, and the baseline that a scheduler must beat. It needs to be told N, and a
program that never releases keeps its place until the idle limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import check_whole_from_one, home_of, restore_waiting, without_routed_before
from thunderagent.programs.policy import Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Status


@dataclass(frozen=True, slots=True)
class Cap(Policy):
    """Let `n` programs be active at once; a program stays on its replica until it ends."""

    n: int = 8
    """Programs that may be active at once, over all replicas."""
    name: ClassVar[str] = "cap"
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject a cap that lets nobody in."""
        check_whole_from_one("cap", self, "n")

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica, or, while there is a free place, the one with the smallest demand.

        A program that must leave its replica keeps its place.
        """
        if program.status is Status.ACTIVE:
            home = home_of(program, candidates)
            return Placement(home or _smallest_demand(candidates), Reason.HOME if home else Reason.FITS)
        if view.active_count >= self.n:
            return Placement(None, Reason.NO_ROOM)
        open_to_it = without_routed_before(view, program, candidates)
        if not open_to_it or not view.comes_before_all_waiting(program):
            return Placement(None, Reason.QUEUE_AHEAD)
        return Placement(_smallest_demand(open_to_it), Reason.FITS)

    def balance(self, view: View, moment: Moment) -> None:
        """Fill free places from the head of the queue."""
        restore_waiting(view, self)


def _smallest_demand(candidates: Sequence[ReplicaView]) -> ReplicaView:
    return min(candidates, key=lambda replica: (replica.account.demand_tokens, replica.account.turn_count))
