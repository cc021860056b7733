"""The replicas as the proxy knows them: where each is, what its last poll said, and who must hear of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from thunderagent.backends.base import NOTHING_READ, ReplicaReading
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.errors import NoReplicaError
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.replicas")


class Watcher(Protocol):
    """What the proxy asks of the poller."""

    def suspect(self, replica_id: str) -> None:
        """Poll a replica at once, because a request just failed there."""

    def refused(self, replica_id: str) -> None:
        """Take a replica for down until a poll says otherwise, because it refused a connection."""


@dataclass(slots=True)
class KnownReplica:
    """One replica's address and last reading."""

    endpoint: ReplicaEndpoint
    reading: ReplicaReading = NOTHING_READ
    why_down: str = "not polled yet"
    weight_version: str = ""
    """Of the weights that it was last told to take, or said it has; empty if nobody said."""


class Replicas:
    """Listen to the poller, tell the runtime, and say where a replica is.

    `capacity_override_tokens` stands in for the capacity that an engine says, or does not say.
    """

    def __init__(
        self, runtime: Runtime, endpoints: list[ReplicaEndpoint], *, capacity_override_tokens: int | None = None
    ) -> None:
        """Know `endpoints`, none of them up yet."""
        self._runtime = runtime
        self._capacity_override_tokens = capacity_override_tokens
        self.known = {endpoint.replica_id: KnownReplica(endpoint) for endpoint in endpoints}

    def __repr__(self) -> str:
        return f"<Replicas {', '.join(self.known)}>"

    def url_of(self, replica_id: str) -> str:
        """Return the base URL of a replica."""
        return self.known[replica_id].endpoint.url

    def known_id(self, replica_id: str | None) -> str | None:
        """Return the id if there is such a replica, up or not."""
        return replica_id if replica_id in self.known else None

    def serving(self, program_id: str | None = None, avoid: Collection[str] = ()) -> str:
        """Return the replica that a request without a lease goes to: its program's, or the least busy one.

        Never one to `avoid`, because it just failed. Raises `NoReplicaError` if no other is up.
        """
        scheduler = self._runtime.scheduler
        program = scheduler.table.get(program_id) if program_id is not None else None
        home_id = program.replica_id if program is not None else None
        if home_id is not None and home_id not in avoid and scheduler.replicas[home_id].up:
            return home_id
        usable = [replica for replica in scheduler.open_replicas if replica.replica_id not in avoid]
        if not usable:
            raise NoReplicaError("no replica is up")
        return min(usable, key=lambda replica: replica.account.turn_count).replica_id

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        """Take a reading; tell the runtime if it says anything new."""
        known = self.known[replica_id]
        since = _since(known.reading, reading)
        known.reading = reading
        capacity_tokens = self._capacity_override_tokens or reading.capacity_tokens
        account = self._runtime.scheduler.ledger.accounts.get(replica_id)
        news = account is None or capacity_tokens != account.capacity_tokens
        if since.query_tokens or since.preemption_count or (news and capacity_tokens is not None):
            self._runtime.replica_polled(replica_id, capacity_tokens, *since)

    def replica_up(self, replica_id: str) -> None:
        """Let the scheduler use a replica; raise the alarm if nobody knows how large it is."""
        account = self._runtime.scheduler.ledger.accounts.get(replica_id)
        capacity_tokens = account.capacity_tokens if account is not None else None
        log.info("replica_up", replica_id=replica_id, capacity_tokens=capacity_tokens)
        if capacity_tokens is None:
            log.warning(
                "capacity_unknown",
                replica_id=replica_id,
                effect="every program is let in there; set --capacity-tokens if the engine cannot say it",
            )
        self.known[replica_id].why_down = ""
        self._runtime.replica_up(replica_id)

    def replica_down(self, replica_id: str, why: str) -> None:
        """Take a replica away from the scheduler."""
        log.warning("replica_down", replica_id=replica_id, why=why)
        self.known[replica_id].why_down = why
        self._runtime.replica_down(replica_id)


class _Since(NamedTuple):
    """What a replica did between two readings; None is what is not known. The ratio is of the tokens looked up."""

    hit_ratio: float | None
    query_tokens: int | None
    preemption_count: int | None


def _since(before: ReplicaReading, now: ReplicaReading) -> _Since:
    """Compare two readings; nothing is known if the engine began its totals anew between them."""
    queries = _growth(before.cache_query_tokens_total, now.cache_query_tokens_total)
    hits = _growth(before.cache_hit_tokens_total, now.cache_hit_tokens_total)
    preemptions = _growth(before.preemptions_total, now.preemptions_total)
    if any(growth is not None and growth < 0 for growth in (queries, hits, preemptions)):
        return _Since(None, None, None)
    hit_ratio = min(1.0, hits / queries) if queries and hits is not None else None
    return _Since(hit_ratio, _rounded(queries), _rounded(preemptions))


def _growth(before: float | None, now: float | None) -> float | None:
    return now - before if before is not None and now is not None else None


def _rounded(count: float | None) -> int | None:
    return round(count) if count is not None else None
