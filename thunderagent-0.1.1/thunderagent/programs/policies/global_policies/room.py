"""How full replicas are, for policies that look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from thunderagent.programs.policy import ReplicaView


def free_tokens(replica: ReplicaView) -> float:
    """Return what nobody claims there; infinite if the capacity is unknown."""
    return replica.account.limit_tokens - replica.account.demand_tokens


def size_tokens(replicas: Sequence[ReplicaView]) -> float:
    """Return the mean capacity of a replica; if a capacity is unknown, the largest claim."""
    limits = [replica.account.limit_tokens for replica in replicas]
    if not limits or inf in limits:
        return max(1.0, max((replica.account.demand_tokens for replica in replicas), default=1))
    return sum(limits) / len(limits)


def emptiest_first(replica: ReplicaView) -> tuple[float, int, int]:
    """Rank replicas by room; if no capacity is known, by turns in flight and demand."""
    account = replica.account
    return -free_tokens(replica), account.turn_count, account.demand_tokens
