"""Replicas by room: the unclaimed part of their limits."""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.ranked_set import RankedSet


class Rooms:
    """Granting replicas, first those with most of `ratio` of their limits left; ties in any order.

    Kept once it was asked for. A change of a replica costs O(1), and O(log replicas) at the next question.
    """

    __slots__ = ("_order", "ratio", "stale")

    def __init__(self, ratio: float) -> None:
        """Create an empty order."""
        self.ratio = ratio
        self._order: RankedSet[Replica] = RankedSet()
        self.stale: dict[Replica, None] = {}
        """Replicas whose room changed since the last question."""

    def set_granting(self, replicas: Sequence[Replica]) -> None:
        """Record which replicas grant."""
        self._order = RankedSet()
        self.stale = dict.fromkeys(replicas)

    def first(self, count: int) -> list[Replica]:
        """Return the `count` replicas with most room."""
        order = self._order
        for replica in self.stale:
            account = replica.account
            if account.usable:
                order.add(replica, account.demand_tokens - self.ratio * account.limit_tokens)
        self.stale.clear()
        return order.lowest(count)
