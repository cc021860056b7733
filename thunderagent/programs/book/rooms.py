"""Replicas by room: the part of their limits that nobody claims."""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.ranked_set import RankedSet


class Rooms:
    """Replicas that grant, those first with most of `ratio` of their limits left; of equal ones any.

    Kept once it was asked for. A change of a replica costs O(1), and O(log replicas) at the next question.
    """

    __slots__ = ("_order", "ratio", "stale")

    def __init__(self, ratio: float) -> None:
        """Begin empty."""
        self.ratio = ratio
        self._order: RankedSet[Replica] = RankedSet()
        self.stale: dict[Replica, None] = {}
        """Whose room changed since somebody asked."""

    def set_granting(self, replicas: Sequence[Replica]) -> None:
        """Take in which replicas grant."""
        self._order = RankedSet()
        self.stale = dict.fromkeys(replicas)

    def first(self, count: int) -> list[Replica]:
        """Return the `count` with most room."""
        order = self._order
        for replica in self.stale:
            account = replica.account
            if account.usable:
                order.add(replica, account.demand_tokens - self.ratio * account.limit_tokens)
        self.stale.clear()
        return order.lowest(count)
