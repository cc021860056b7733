"""The replicas as others know them: where each is, and what is pushed of it after each event that changes it."""

# compiled: each lease says where its replica is

from __future__ import annotations

from collections import Counter
from typing import Final

from thunderagent.leases import ReplicaMap, ReplicaState
from thunderagent.programs.messages import (
    EncodesPolled,
    Event,
    GrantsContinued,
    GrantsSuspended,
    ReplicaDown,
    ReplicaDraining,
    ReplicaJudged,
    ReplicaKilled,
    ReplicaPolled,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
)
from thunderagent.programs.pools import Pools

_OF_REPLICAS = (
    ReplicaUp,
    ReplicaDown,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaJudged,
    ReplicaPolled,
    EncodesPolled,
    ReplicaKilled,
    GrantsSuspended,
    GrantsContinued,
)

OF_REPLICAS: Final = frozenset(_OF_REPLICAS)
"""The kinds of events after which their replicas are pushed."""


class Fleet:
    """Where the replicas of all pools are, and the map that the carriers of bytes read."""

    def __init__(self, pools: Pools) -> None:
        """Start without replicas."""
        self._pools = pools
        self.urls: dict[str, str] = {}
        """By replica id."""
        self.aborts_counts: Counter[str] = Counter()
        """How often a trainer aborted what ran on a replica."""
        self.incarnations: Counter[str] = Counter()
        """How often what ran on a replica was lost with its engine's process, or as if it were."""
        self.replicas = ReplicaMap()
        """What others may know of them."""

    def push(self, event: Event) -> None:
        """Push an event's changes of replicas to the carriers of bytes. Cost: O(replicas it is about)."""
        assert isinstance(event, _OF_REPLICAS)
        known = self._pools.replicas
        if event.replica_id is None:  # grants stop or continue everywhere
            self.replicas.push(map(self.state_of, known))
        elif event.replica_id in known:
            self.replicas.push((self.state_of(event.replica_id),))
        else:
            self.replicas.push((), (event.replica_id,))

    def state_of(self, replica_id: str) -> ReplicaState:
        """Return what is pushed of a replica."""
        replica = self._pools.replicas[replica_id]
        return ReplicaState(
            replica_id,
            self.urls.get(replica_id, ""),
            replica.up,
            replica.open_to_programs,
            tuple(replica.suspended_for),
            replica.account.capacity_tokens,
            self._pools.of_replica(replica_id).name if self._pools.several else "",
            replica.verdict.state.value,
            replica.verdict.reason,
            self.aborts_counts[replica_id] if self.aborts_counts else 0,
            self.incarnations[replica_id] if self.incarnations else 0,
        )

    def aborted(self, replica_id: str) -> None:
        """Push that a trainer aborted what runs on a replica."""
        self.aborts_counts[replica_id] += 1
        if replica_id in self._pools.replicas:
            self.replicas.push((self.state_of(replica_id),))
