"""A turn on its way to its replica: with its name and priority if the engine wants them, and retried or not.

A turn is retried on another replica only while no byte of an answer has come, and only if the connection failed: an
engine's answer goes to the client, whatever its status. `retry_budget.py` limits retries. `fleet/breaker.py` hears of
each try, and keeps turns off a replica that fails too often.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

import structlog
from multidict import CIMultiDict

from thunderagent.backends.base import NamedTurn, Priorities
from thunderagent.errors import (
    FirstByteTimeoutError,
    ReplicaError,
    ReplicaTimeoutError,
    ReplicaTrippedError,
    ReplicaUnreachableError,
)
from thunderagent.leases import Lease
from thunderagent.leases.open_lease import OpenLease
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.proxy.turns.attempts import Attempt
from thunderagent.proxy.turns.record import Record
from thunderagent.proxy.turns.retry_budget import RetryBudget
from thunderagent.proxy.turns.side_calls import look_at
from thunderagent.proxy.watch.turn_metrics import TurnMetrics
from thunderagent.proxy.wire.exchange import Exchange
from thunderagent.proxy.wire.headers import forwarded_request_headers
from thunderagent.proxy.wire.http11.answers import Answer
from thunderagent.proxy.wire.request_id import REQUEST_ID

log = structlog.get_logger("thunderagent.turns")


class Forwarding:
    """Sends turns to the replicas that they have leases on."""

    def __init__(
        self,
        client: ReplicaClient,
        replicas: Replicas,
        watcher: Watcher,
        budget: RetryBudget,
        metrics: TurnMetrics,
        *,
        names_programs: bool,
    ) -> None:
        """Send with `client`; `names_programs` tells engines whose turn it is."""
        self._client = client
        self._replicas = replicas
        self._watcher = watcher
        self._budget = budget
        self._metrics = metrics
        self._names_programs = names_programs
        self.names = replicas.has_notices
        """Returns whether turns have ids of their own on a replica: if it wants to hear of clients that left."""

    def headers_of(self, exchange: Exchange, record: Record) -> CIMultiDict[str]:
        """Return a turn's headers for an engine."""
        headers = forwarded_request_headers(exchange.headers, exchange.notes)
        if exchange.channel is not None:
            headers["Connection"], headers["Upgrade"] = "Upgrade", exchange.headers["Upgrade"]
        if self._names_programs and record.turn.program_id is not None:
            headers["X-Session-ID"] = record.turn.program_id
        return headers

    async def named(self, record: Record, replica_id: str, authorization: str | None) -> NamedTurn:
        """Return the body with an id of its own."""
        turn, path = record.turn, record.target.engine_path
        name = partial(self._replicas.name_turn, replica_id, path, turn.body, turn.program_id, authorization)
        return await read_aside(name, len(turn.body))

    def send(
        self, exchange: Exchange, record: Record, lease: Lease, headers: CIMultiDict[str], body: bytes
    ) -> Awaitable[Answer]:
        """Forward a turn, with its priority if the scheduler gives it one, and return when its answer's head arrived.

        A turn that its engine refuses for its priority is sent again without it. Raises `ReplicaError`.
        """
        if lease.engine_priority is not None:
            given = self._replicas.priorities.for_engine(lease.replica_id, lease.engine_priority)
            if given is not None:
                return self._send_with(*given, exchange, record, lease, headers, body)
        return self._send_once(exchange, record, lease, headers, body)

    async def _send_with(
        self,
        priorities: Priorities,
        priority: int,
        exchange: Exchange,
        record: Record,
        lease: Lease,
        headers: CIMultiDict[str],
        body: bytes,
    ) -> Answer:
        with_priority = CIMultiDict(headers)
        put = partial(priorities.put, record.target.engine_path, body, with_priority, priority)
        with_it = await read_aside(put, len(body))
        upstream = await self._send_once(exchange, record, lease, with_priority, with_it)
        if upstream.status != 400:
            return upstream
        try:
            answer = await self._client.read(lease.replica_id, upstream)
        except BaseException:
            upstream.close()
            raise
        if not priorities.is_refusal(answer):
            return upstream
        upstream.close()
        upstream = await self._send_once(exchange, record, lease, headers, body)
        if upstream.status != 400:
            self._replicas.priorities.refused(lease.replica_id)
        return upstream

    async def _send_once(
        self, exchange: Exchange, record: Record, lease: Lease, headers: CIMultiDict[str], body: bytes
    ) -> Answer:
        """Forward a turn once, and report the result to its replica's breaker. Raises `ReplicaError`."""
        if exchange.begun:
            headers = CIMultiDict(headers)
            headers["Accept-Encoding"] = "identity"  # the head was sent with this promise
        breakers, replica_id = self._replicas.breakers, lease.replica_id
        probe = await breakers.admit(replica_id) if breakers.knows(replica_id) else None
        try:
            upstream = await self._client.send(
                replica_id,
                lease.url,
                record.method,
                record.target.sent,
                headers,
                body or None,
                may_repeat=not record.turn.is_unknown,
            )
        except BaseException as error:
            breakers.lost(replica_id, error, probe)
            raise
        if breakers.knows(replica_id):
            breakers.succeeded(replica_id)
        return upstream

    def may_retry(self, record: Record, attempt: Attempt, error: ReplicaError, now_s: float) -> bool:
        """Return whether a turn that failed before its first byte may be retried."""
        if error.replica_id in (record.chosen_id, record.maker_id):
            return False  # elsewhere it would only be refused
        if record.turn.is_unknown and not isinstance(error, ReplicaUnreachableError):
            return False  # it may have been executed
        if isinstance(error, ReplicaTimeoutError) and not isinstance(error, FirstByteTimeoutError):
            return False
        refused_before = self._budget.refused_count
        may_retry = self._budget.may_retry(now_s, record.tries_count, attempt.patience.retry_count)
        if may_retry:
            self._metrics.count_retry("made")
        elif self._budget.refused_count > refused_before:
            self._metrics.count_retry("over_budget")
            log.warning("retry_over_budget", program_id=record.turn.program_id, replica_id=error.replica_id)
        return may_retry

    def failed(self, lease: OpenLease, error: ReplicaError) -> None:
        """Return a lease that its replica failed, and have that replica polled."""
        lease.failed()
        log.warning(
            "replica_failed_turn",
            program_id=lease.granted.program_id,
            replica_id=lease.granted.replica_id,
            why=str(error),
            request_id=REQUEST_ID.get(),
        )
        if not isinstance(error, ReplicaTrippedError):
            look_at(self._watcher, error)

    def left(self, record: Record, lease: Lease, named: NamedTurn, authorization: str | None) -> None:
        """Abort on an engine what nobody waits for any more, if the turn has an id of its own there."""
        if named.engine_request_id and record.outcome not in ("finished", "refused"):
            self._replicas.abort_turn(lease.replica_id, named.engine_request_id, authorization)
