"""A turn on its way to its replica: with its name and priority if the engine wants them, and retried or not.

A turn is retried on another replica only while its client has no byte of an answer: if the connection failed, or the
engine answered 5xx and another replica could answer. An answer that begins with an error is like a 5xx, whatever its
status: so the head of a stream waits for its first event. A budget limits retries, except of turns that were
never sent, and of those whose replica is lost as a whole: these wait for another one, as long as their clients do. So
do turns that an engine refuses because it is full (429, 503). All other answers go to the client as they are, and what
cannot be read as an answer is not computed again. `fleet/breaker.py` hears of each try, and keeps turns off a replica
that fails too often.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final

import structlog
from multidict import CIMultiDict, istr

from thunderagent.backends.base import NamedTurn
from thunderagent.errors import (
    FirstByteTimeoutError,
    ReplicaError,
    ReplicaGarbledError,
    ReplicaLostError,
    ReplicaRefusedError,
    ReplicaRemovedError,
    ReplicaTimeoutError,
    ReplicaTrippedError,
    ReplicaUnreachableError,
)
from thunderagent.leases import Lease
from thunderagent.leases.open_lease import OpenLease
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.proxy.reading.answers import (
    AnswerError,
    begins_well,
    error_of_body,
    error_of_events,
    may_hold_error,
    says_something,
    usage_if_sound,
)
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.proxy.turns.record import Record
from thunderagent.proxy.turns.side_calls import look_at
from thunderagent.proxy.watch.turn_metrics import TurnMetrics
from thunderagent.proxy.wire.exchange import Exchange
from thunderagent.proxy.wire.headers import REQUEST_ID, forwarded_request_headers
from thunderagent.proxy.wire.http11.client import Answer
from thunderagent.proxy.wire.http11.heads import CONTENT_ENCODING, CONTENT_LENGTH

log = structlog.get_logger("thunderagent.turns")

FULL: Final = frozenset({429, 503})
"""What engines answer that have no room: the turn did not run."""

_FULL_CODES: Final = frozenset(map(str, FULL))
"""The same, of an error inside an answer."""

MOST_LOST_COUNT: Final = 2
"""A turn whose replica went down, or came back as another process, may go elsewhere this often beyond its tries:
engines that fail together fail one after the other, but a turn that ends its engine must not end all."""

LOST_WITHIN_S: Final = 0.5
"""How long a turn over the budget waits for the word that its replica is down, or another: it is polled at once."""

LOOK_PERIOD_S: Final = 0.05

HEAD_WAITS_S: Final = 10.0
"""How long the head of a stream waits for its first event: engines send it before they compute."""

MOST_JUDGED_BYTES: Final = 16 * 1024
"""A stream that begins with a longer event, and a longer whole answer, are no errors."""

_UPGRADE: Final = istr("Upgrade")

_NOT_SENT = (ReplicaRefusedError, ReplicaRemovedError, ReplicaTrippedError)
"""Errors before a turn was sent, after which its replica gets no turns."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often turns are retried after a replica failed them before the first byte."""

    retries_count: int = 2
    """Per turn. A client that retries says how often it did: we retry that many fewer times, so that its retries and
    ours do not multiply."""
    budget_ratio: float = 0.2
    """Ratio of all turns in the last window or two; Envoy's and Finagle's budget."""
    budget_min_count: int = 100
    """Per window, however few turns there are: all that a lost replica had in flight may go elsewhere."""
    window_s: float = 30.0


DEFAULT_RETRIES: Final = RetrySettings()


class RetryBudget:
    """Counts turns and retries of this window and the one before. O(1) for each."""

    __slots__ = ("_earlier", "_ends_s", "_retries_count", "_settings", "_turns_count", "_window", "refused_count")

    def __init__(self, settings: RetrySettings) -> None:
        """Start with empty counts."""
        self._settings = settings
        self._window = 0
        self._ends_s = 0.0
        """When the window ends."""
        self._turns_count = self._retries_count = 0
        self._earlier = 0, 0
        self.refused_count = 0
        """Retries that the turn itself had left, but the budget had not."""

    def turn_came(self, now_s: float) -> None:
        """Count a turn."""
        if now_s >= self._ends_s:
            self._step(now_s)
        self._turns_count += 1

    def may_retry(self, now_s: float, tries_count: int, client_retry_count: int) -> bool:
        """Return whether a turn with this many tries may be tried once more, and count that."""
        settings = self._settings
        if tries_count > settings.retries_count - client_retry_count:
            return False
        self._step(now_s)
        turns_count = self._turns_count + self._earlier[0]
        retries_count = self._retries_count + self._earlier[1]
        if retries_count >= max(settings.budget_min_count, settings.budget_ratio * turns_count):
            self.refused_count += 1
            return False
        self._retries_count += 1
        return True

    def _step(self, now_s: float) -> None:
        window = int(now_s // self._settings.window_s)
        if window == self._window:
            return
        self._earlier = (self._turns_count, self._retries_count) if window == self._window + 1 else (0, 0)
        self._turns_count = self._retries_count = 0
        self._window = window
        self._ends_s = (window + 1) * self._settings.window_s


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
        if _UPGRADE in exchange.headers and exchange.channel is not None:
            headers["Connection"], headers["Upgrade"] = "Upgrade", exchange.headers["Upgrade"]
        if self._names_programs and record.turn.program_id is not None:
            headers["X-Session-ID"] = record.turn.program_id
        return headers

    async def named(self, record: Record, replica_id: str, authorization: str | None) -> NamedTurn:
        """Return the body with an id of its own, or what else its engine wants to know."""
        turn, path = record.turn, record.target.engine_path
        hint = None if turn.branch_id else record.patience.hint or turn.hint  # a branch is not its program
        branch_id = "" if self._names_programs else turn.branch_id  # what engines publish is of programs
        told = turn.program_id, authorization, hint, branch_id
        name = partial(self._replicas.name_turn, replica_id, path, turn.body, *told)
        return await read_aside(name, len(turn.body))

    async def send_in_order(
        self, exchange: Exchange, record: Record, lease: Lease, headers: CIMultiDict[str], body: bytes
    ) -> Answer:
        """Forward a turn as `send` does, with the priority of its lease if its engine has such.

        A turn that its engine refuses for its priority is sent again without it.
        """
        assert lease.engine_priority is not None
        given = self._replicas.priorities.for_engine(lease.replica_id, lease.engine_priority)
        if given is None:
            return await self.send(exchange, record, lease, headers, body)
        priorities, priority = given
        with_priority = CIMultiDict(headers)
        put = partial(priorities.put, record.target.engine_path, body, with_priority, priority)
        with_it = await read_aside(put, len(body))
        upstream = await self.send(exchange, record, lease, with_priority, with_it)
        if upstream.status != 400:
            return upstream
        try:
            answer = await self._client.read(lease.replica_id, upstream)
        except BaseException as error:
            upstream.close()
            self._replicas.breakers.lost(lease.replica_id, error, record.probe)
            raise
        if not priorities.is_refusal(answer):
            return upstream
        self.unsent(record, lease, upstream)
        upstream = await self.send(exchange, record, lease, headers, body)
        if upstream.status != 400:
            self._replicas.priorities.refused(lease.replica_id)
        return upstream

    def unsent(self, record: Record, lease: Lease, upstream: Answer) -> None:
        """Drop an answer: its turn is sent again, to the same replica, otherwise."""
        upstream.close()
        self._replicas.breakers.left(lease.replica_id, record.probe)

    async def send(
        self, exchange: Exchange, record: Record, lease: Lease, headers: CIMultiDict[str], body: bytes
    ) -> Answer:
        """Forward a turn, return when its answer has begun, and report the result to its replica's breaker.

        Raises `ReplicaError`.
        """
        if exchange.begun:
            headers = CIMultiDict(headers)
            headers["Accept-Encoding"] = "identity"  # the head was sent with this promise
        breakers, replica_id = self._replicas.breakers, lease.replica_id
        record.probe = probe = None
        if breakers.knows(replica_id):
            is_bound = replica_id in (record.chosen_id, record.maker_id)
            record.probe = probe = await breakers.admit(replica_id, is_bound=is_bound)
        state = self._replicas.map.states.get(replica_id)
        record.incarnation = 0 if state is None else state.incarnation
        upstream, record.error, record.first_error = None, None, None
        record.had_head = record.is_judged = False
        record.sound_usage = None
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
            if upstream.status == 200 and CONTENT_ENCODING not in upstream.headers:  # engines send errors as they are
                if upstream.content_type == "text/event-stream":
                    if not begins_well(upstream.peek()):
                        record.first_error = await self._first_of_stream(replica_id, upstream)
                elif CONTENT_LENGTH in upstream.headers and int(upstream.headers[CONTENT_LENGTH]) <= MOST_JUDGED_BYTES:
                    if not upstream.is_whole:
                        await self._client.whole_within(replica_id, upstream, MOST_JUDGED_BYTES)
                    record.first_error = self._judge(record, upstream)
        except BaseException as error:
            if upstream is not None:
                record.had_head = True
                upstream.close()
            breakers.lost(replica_id, error, probe)
            raise
        return upstream

    def ended(self, record: Record, replica_id: str) -> None:
        """Note the end of a probe whose answer had begun: one that broke off failed, any other makes way."""
        assert record.probe is not None
        breakers = self._replicas.breakers
        if record.outcome == "failed" and not record.probe.done():
            breakers.failed(replica_id, record.cause)
        breakers.left(replica_id, record.probe)

    def _judge(self, record: Record, upstream: Answer) -> AnswerError | None:
        """Look into a whole answer before it is relayed; return the engine's own error that it is, if it is one."""
        body, recording = upstream.whole(), record.recording
        if recording is not None and recording.reads(upstream.status, None):
            body = recording.take_whole(body)  # without what only we asked for: it is searched
        record.is_judged = True
        record.sound_usage = usage_if_sound(record.dialect, body)
        if record.sound_usage is not None:
            return None
        record.error = found = error_of_body(body)
        return None if found is None or found.is_callers or found.is_abort else found

    async def _first_of_stream(self, replica_id: str, upstream: Answer) -> AnswerError | None:
        """Return the engine's own error with which a stream begins that may not begin well, before it is relayed.

        Raises `ReplicaError` if it breaks off before its first event.
        """
        begun = upstream.peek()
        if not (upstream.is_whole or says_something(begun) or await self._has_begun(replica_id, upstream)):
            return None
        begun = upstream.peek()
        found = error_of_events(begun) if may_hold_error(begun) else None
        return None if found is None or found.is_callers or found.is_abort else found

    async def _has_begun(self, replica_id: str, upstream: Answer) -> bool:
        """Wait for the first event that says something; return whether it came before the head must go on."""
        seen_bytes = 0
        try:
            async with asyncio.timeout(HEAD_WAITS_S):
                while seen_bytes <= MOST_JUDGED_BYTES:
                    is_whole = await self._client.whole_within(replica_id, upstream, seen_bytes)
                    begun = upstream.peek()
                    if is_whole or says_something(begun):
                        return True
                    seen_bytes = len(begun)
        except TimeoutError:
            pass
        return False

    def waits(self, record: Record, lease: Lease, upstream: Answer, patience_s: float) -> bool:
        """Return whether a turn that its engine has no room for waits for room, there or elsewhere.

        It does if its client still waits, for `patience_s`, after the time for which the replica is granted nothing.
        One that is refused inside an answer goes elsewhere, but does not wait for the same replica.
        """
        status = upstream.status
        if _says_full(record) and self._replicas_of(lease.replica_id):
            assert record.first_error is not None
            status = int(record.first_error.code)
        elif status not in FULL:
            return False
        after_s = _seconds(upstream.headers.get("Retry-After"))
        for_s = self._replicas.breakers.pressed(lease.replica_id, after_s, status)
        return for_s < patience_s

    def goes_elsewhere(self, record: Record, lease: Lease, upstream: Answer, now_s: float) -> bool:
        """Return whether a turn that was answered 5xx, or so inside a 200, is tried on another replica.

        That counts against this one.
        """
        if _says_full(record):
            return False
        if record.first_error is not None:
            why = f"an error inside its answer: {record.first_error.code}"
        elif upstream.status < 500 or upstream.status in FULL:
            return False
        else:
            why = f"it answered {upstream.status}"
        replica_id = lease.replica_id
        self._blame(record, replica_id, why)
        if replica_id in (record.chosen_id, record.maker_id) or record.turn.is_unknown:
            return False
        states = self._replicas_of(replica_id)
        if not any(each not in record.failed_ids for each in states):
            return False
        log.warning("engine_failed_turn", program_id=lease.program_id, replica_id=replica_id, why=why)
        return self._has_tries(record, replica_id, now_s)

    def _replicas_of(self, replica_id: str) -> list[str]:
        """Return the other replicas of a pool that grant now."""
        states = self._replicas.map.states
        own = states.get(replica_id)
        return [
            state.replica_id
            for state in states.values()
            if own is not None
            and state is not own
            and state.is_open
            and state.pool == own.pool
            and not state.suspended_for
        ]

    def _blame(self, record: Record, replica_id: str, why: str) -> None:
        """Count a failed turn against its replica, unless it fails elsewhere, too: it may be the turn's own fault."""
        breakers, failed_ids = self._replicas.breakers, record.failed_ids
        if replica_id in failed_ids:
            return
        if not failed_ids:
            breakers.failed(replica_id, why)
        elif len(failed_ids) == 1:
            breakers.excuse(failed_ids[0])
        record.failed_ids = (*failed_ids, replica_id)

    def answered(self, record: Record, replica_id: str) -> None:
        """Note a good answer: whichever replicas failed its turn before did so for reasons of their own."""
        breakers = self._replicas.breakers
        if len(record.failed_ids) > 1:
            for failed_id in record.failed_ids:
                breakers.failed(failed_id, "it failed a turn that another replica did not")
        if breakers.knows(replica_id) or breakers.is_pressed(replica_id):
            breakers.succeeded(replica_id, record.turn.program_id, record.probe)

    def verdict_of_error(self, record: Record, lease: Lease) -> str:
        """Return whose fault an error inside an answer is; aborts are the trainer's if it aborted what ran there."""
        assert record.error is not None
        if record.error.is_callers:
            return "agent_error"
        ran_s = monotonic() - record.arrived_s
        is_trainers = record.error.is_abort and self._replicas.aborted_ago_s(lease.replica_id) <= ran_s
        return "aborted_by_trainer" if is_trainers else "infrastructure_failed"

    def erred(self, record: Record, replica_id: str, why: str) -> None:
        """Note an error inside an answer, unless it began with it."""
        if record.first_error is not None:
            return
        self._replicas.breakers.erred(replica_id, record.turn.program_id, why)

    async def may_retry(self, record: Record, error: ReplicaError, now_s: float, patience_s: float) -> bool:
        """Return whether a turn that failed before its first byte may be retried; its client waits for `patience_s`."""
        if error.replica_id in (record.chosen_id, record.maker_id):
            return False  # elsewhere it would only be refused
        if isinstance(error, ReplicaGarbledError):
            return False  # it was computed, and would be again
        if isinstance(error, _NOT_SENT) and patience_s > 0:
            if record.unsent_count:
                await asyncio.sleep(min(1.0, LOOK_PERIOD_S * 2 ** min(record.unsent_count, 5), patience_s))
            record.unsent_count += 1
            return True
        if record.turn.is_unknown and not isinstance(error, ReplicaUnreachableError):
            return False  # it may have been executed
        if isinstance(error, ReplicaTimeoutError) and not isinstance(error, FirstByteTimeoutError):
            return False
        if isinstance(error, ReplicaLostError) and patience_s > 0:
            return True
        if not record.had_head and self._has_tries(record, error.replica_id, now_s):
            return True
        if record.lost_count >= MOST_LOST_COUNT or not await self._is_lost(error.replica_id, record.incarnation):
            return False
        record.lost_count += 1
        return True

    def _has_tries(self, record: Record, replica_id: str, now_s: float) -> bool:
        """Return whether a turn, and all turns together, may be tried once more, and count that."""
        refused_before = self._budget.refused_count
        tries_count = record.tries_count - record.unsent_count
        may_retry = self._budget.may_retry(now_s, tries_count, record.patience.retry_count)
        if may_retry:
            self._metrics.count_retry("made")
        elif self._budget.refused_count > refused_before:
            self._metrics.count_retry("over_budget")
            log.warning("retry_over_budget", program_id=record.turn.program_id, replica_id=replica_id)
        return may_retry

    async def _is_lost(self, replica_id: str, incarnation: int) -> bool:
        """Return whether a replica turns out to be down, or another incarnation than the one that a turn was sent to.

        Then what it had goes elsewhere, however much it is.
        """
        for _ in range(round(LOST_WITHIN_S / LOOK_PERIOD_S)):
            state = self._replicas.map.get(replica_id)
            if state is None or not state.is_up or state.incarnation != incarnation:
                return True
            await asyncio.sleep(LOOK_PERIOD_S)
        return False

    def failed(self, lease: OpenLease, error: ReplicaError) -> None:
        """Return a lease that its replica failed, and have that replica polled."""
        lease.failed(error.code)
        if isinstance(error, ReplicaTrippedError):
            return  # it was not sent, and its replica is known to fail
        log.warning(
            "replica_failed_turn",
            program_id=lease.granted.program_id,
            replica_id=lease.granted.replica_id,
            why=str(error),
            request_id=REQUEST_ID.get(),
        )
        look_at(self._watcher, error)

    def left(self, record: Record, lease: Lease, named: NamedTurn, authorization: str | None) -> None:
        """Abort on an engine what nobody waits for any more, if the turn has an id of its own there."""
        if named.engine_request_id and record.outcome not in ("finished", "refused", "errored"):
            self._replicas.abort_turn(lease.replica_id, named.engine_request_id, authorization)


def _says_full(record: Record) -> bool:
    """Return whether an answer began with the error that its engine has no room."""
    return record.first_error is not None and record.first_error.code in _FULL_CODES


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a `Retry-After`; None if it names none, or a date."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None
