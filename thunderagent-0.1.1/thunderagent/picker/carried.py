"""The answer of a turn that Envoy carries: relayed, its usage read, and its lease ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import msgspec
import structlog
from multidict import CIMultiDict

from thunderagent.errors import TooManyHeldError
from thunderagent.leases import TurnAsk
from thunderagent.leases.open_lease import LeaseSource, OpenLease
from thunderagent.picker import messages
from thunderagent.picker.addresses import Addresses
from thunderagent.picker.stream import Stream
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.gate.held import HeldTurns, KeptBody
from thunderagent.proxy.reading.answers import StreamUsage, includes_last, read_answer
from thunderagent.proxy.turns.record import Record

log = structlog.get_logger("thunderagent.picker")

MAX_KEPT_BYTES = 16 * 2**20
"""The usage of a larger whole answer is not read."""

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Around:
    """Shared by all turns."""

    leases: LeaseSource
    addresses: Addresses
    held: HeldTurns
    made: MadeAnswers
    suspect: Callable[[str], None] = lambda _: None
    """Has an unreachable replica polled."""


class Carried:
    """A turn whose bytes are on their way."""

    def __init__(self, around: Around, stream: Stream, record: Record) -> None:
        """Start before the first message of its answer."""
        self._stream = stream
        self._record = record
        self._around = around
        self._events: StreamUsage | None = None
        self._kept: list[bytes] | None = []
        """An answer that is not a stream; None once it is too large to be read."""
        self._kept_bytes = 0
        self._counted = KeptBody(around.held)
        self._encoding: str | None = None
        self._progress_at_s = 0.0
        self._leasing: asyncio.Task[OpenLease] | None = None
        """The lease of another replica, if Envoy went there."""

    async def answer(self, lease: OpenLease, ask: TurnAsk) -> None:
        """Relay the answer, and end the lease with it, or with its last event if the client leaves with that."""
        try:
            await self._relay(lease, ask)
        finally:
            last_events = self._events.last_events if self._events is not None else b""
            if self._record.outcome == "abandoned" and includes_last(self._record.dialect, last_events):
                self._end(lease)

    async def _relay(self, lease: OpenLease, ask: TurnAsk) -> None:
        stream, ended = self._stream, False
        while (message := await stream.read()) is not None:
            if message.HasField("response_headers"):
                self._begin(message, lease, ask)
                if ended := message.response_headers.end_of_stream:
                    self._end(lease)
                reply = messages.ProcessingResponse()
                messages.mutate(reply.response_headers.response.header_mutation, list(self._record.headers().items()))
                await stream.write(reply)
            elif message.HasField("response_body"):
                ends = message.response_body.end_of_stream
                relayed = self._take(lease, message.response_body.body)
                if ends:
                    relayed += self._rest()
                    self._end(lease)
                    ended = True
                await stream.write_body("response_body", relayed, ends=ends)
            elif message.HasField("response_trailers"):
                if not ended:
                    await stream.write_body("response_body", self._rest(), ends=False)
                    self._end(lease)
                await stream.echo(message)
            else:
                await stream.echo(message)

    def close(self) -> None:
        """Return pending leases, and drop the answer."""
        self._counted.release()
        if self._leasing is not None:
            give_up(self._leasing)

    def _begin(self, message: Any, lease: OpenLease, ask: TurnAsk) -> None:
        """Process the head of an answer, and where it came from."""
        headers = CIMultiDict(messages.headers_of(message.response_headers.headers))
        record, around, granted = self._record, self._around, lease.granted
        record.status = int(headers.get(":status", "200"))
        self._encoding = headers.get("Content-Encoding")
        content_type = headers.get("Content-Type", "").partition(";")[0].strip()
        served = messages.texts_in(message.metadata_context, messages.METADATA, messages.SERVED)
        served_id = around.addresses.replica_at(served[0]) if served else None
        if served_id not in (None, granted.replica_id):
            self._moved(lease, ask, str(served_id))
        elif record.status == 503 and content_type == "text/plain":  # Envoy's own error: engines send JSON
            around.suspect(granted.replica_id)
            record.outcome = "failed"
            lease.failed()
        if content_type == "text/event-stream":
            replica_id = record.replica_id or granted.replica_id
            keep_id = partial(around.made.keep, replica_id=replica_id, tenant=record.turn.tenant)
            self._events = StreamUsage(
                take_out=record.turn.usage_added,
                content_encoding=self._encoding,
                reader=record.dialect.reader(keep_id),
            )

    def _moved(self, lease: OpenLease, ask: TurnAsk, served_id: str) -> None:
        around, record, failed_id = self._around, self._record, lease.granted.replica_id
        log.warning("turn_moved", program_id=ask.program_id, replica_id=failed_id, served_id=served_id)
        around.suspect(failed_id)
        lease.failed()
        record.replica_id = served_id
        again = msgspec.structs.replace(
            ask,
            turn_id=around.leases.new_turn_id(),
            supersedes_id=ask.turn_id,
            avoid_replica_id=failed_id,
            wanted_replica_id=served_id,
            patience_s=None,
        )
        self._leasing = asyncio.ensure_future(around.leases.lease(again))

    def _take(self, lease: OpenLease, piece: bytes) -> bytes:
        now_s = monotonic()
        if not self._progress_at_s:
            lease.started()
            self._progress_at_s = now_s + PROGRESS_PERIOD_S
        elif self._events is not None and now_s > self._progress_at_s:
            lease.progressed(self._events.events_count)
            self._progress_at_s = now_s + PROGRESS_PERIOD_S
        if self._events is not None:
            return self._events.feed(piece)
        self._keep(piece)
        return piece

    def _keep(self, piece: bytes) -> None:
        """Keep a part of an answer that is not a stream, unless it exceeds its own or the total limit."""
        if self._kept is None:
            return
        self._kept_bytes += len(piece)
        fits = self._kept_bytes <= MAX_KEPT_BYTES
        with suppress(TooManyHeldError):
            if fits:
                self._counted.grow(len(piece))
                self._kept.append(piece)
                return
        self._kept = None
        self._counted.release()

    def _rest(self) -> bytes:
        return self._events.rest() if self._events is not None else b""

    def _end(self, lease: OpenLease) -> None:
        """End the lease of a complete answer, before its client has the last of it."""
        record = self._record
        if record.outcome == "failed":
            return
        if self._leasing is not None:
            if not self._leasing.done() or self._leasing.cancelled() or self._leasing.exception() is not None:
                record.outcome = "finished"  # where it ran there was no room for it in time: its usage is not counted
                return
            lease, self._leasing = self._leasing.result(), None
        if record.status is None or record.status >= 400:
            record.outcome = "refused"
            lease.refused()
            return
        if self._events is not None:
            record.usage = self._events.reader.usage
            record.tool = self._events.calls.key() if self._events.calls is not None else ""
        elif self._kept is not None:
            keep_id = partial(self._around.made.keep, replica_id=record.replica_id or "", tenant=record.turn.tenant)
            record.usage, record.tool = read_answer(record.dialect, b"".join(self._kept), self._encoding, keep_id)
        record.outcome = "finished"
        lease.finished(*record.usage, record.tool)


def give_up(leasing: asyncio.Task[OpenLease]) -> None:
    """Stop wanting a lease; one that came at the same moment is returned."""

    def ended(task: asyncio.Task[OpenLease]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().abandoned()

    leasing.cancel()
    leasing.add_done_callback(ended)
