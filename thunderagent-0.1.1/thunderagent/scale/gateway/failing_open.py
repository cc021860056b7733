"""Grants by a gateway itself after a long time without a scheduler.

Theory of operation
===================
Pure. Waiting turns keep waiting while there is no scheduler. After `patience_s` without one, each runs on the replica
where its program was last, or on one that follows from its name, as long as fewer than `turns_count` run there from
here. When a scheduler is back it is told of them, as of everything that runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from thunderagent.leases import FAIL_OPEN, Lease, TurnAsk
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.fleet import RemoteFleet
from thunderagent.scale.gateway.known import KnownPrograms


class FailingOpen:
    """Grants held turns while no scheduler does."""

    def __init__(
        self,
        turns: CarriedTurns,
        fleet: RemoteFleet,
        known: KnownPrograms,
        *,
        patience_s: float,
        turns_count: int,
        clock: Callable[[], float],
    ) -> None:
        """Count the time without a scheduler from now on."""
        self.granted_count = 0
        """Number of turns that ran without a scheduler's grant."""
        self._turns = turns
        self._fleet = fleet
        self._known = known
        self._patience_s = patience_s
        self._turns_count = turns_count
        self._now_s = clock
        self._since_s: float | None = clock()
        self._coming: Counter[str] = Counter()
        """Granted turns by replica, until their waiters go on."""

    def __repr__(self) -> str:
        return f"<FailingOpen: {self.granted_count} granted, alone since {self._since_s}>"

    @property
    def is_on(self) -> bool:
        """Whether there has been no scheduler for so long that turns run without one."""
        return self._since_s is not None and self._now_s() - self._since_s >= self._patience_s

    def alone(self) -> None:
        """Note that there is no scheduler; count from now, if there was one until now."""
        if self._since_s is None:
            self._since_s = self._now_s()

    def led(self) -> float | None:
        """Note that a scheduler leads; return how long none did, or None if one did already."""
        since_s, self._since_s = self._since_s, None
        return None if since_s is None else self._now_s() - since_s

    def came(self, lease: Lease) -> None:
        """Note that a lease's waiter goes on, or gave up."""
        if lease.reason == FAIL_OPEN:
            self._coming[lease.replica_id] -= 1

    def grants(
        self, held: Mapping[int, TurnAsk], running: Mapping[str, int], home_of: Callable[[str], str | None]
    ) -> Iterator[Lease]:
        """Yield leases for held turns where fewer than the limit run from here; `running` counts them.

        Cost: at most O(held turns) for each grant.
        """
        if not held or self._turns.is_linked or not self.is_on:
            return  # a linked scheduler was told that they are held

        def has_room(replica_id: str) -> bool:
            return running.get(replica_id, 0) + self._coming[replica_id] < self._turns_count

        for turn_id, ask in list(held.items()):
            if not any(map(has_room, self._fleet.replicas.open_ids)):
                return
            row = self._turns.rows.get(turn_id)
            if row is None or row.lease is not None:
                continue
            replica_id = self._fleet.where(ask, home_of(ask.program_id or ""), has_room)
            if replica_id is None:
                continue
            known = self._known.get(ask.program_id)
            generation = known.generation if known is not None else 0
            url, held_s = self._fleet.replicas.states[replica_id].url, self._now_s() - row.asked_s
            lease = Lease(turn_id, ask.program_id, generation, replica_id, url, None, FAIL_OPEN, held_s)
            self._turns.granted_here(turn_id, lease)
            self.granted_count += 1
            self._coming[replica_id] += 1
            yield lease
