"""The answer to a turn on its way to its client: relayed as it comes, read for its usage and the tool that it calls.

When it is complete, or its last event was sent, and before the program's next turn can begin, the lease ends with what
was read. A client has a whole answer before that is booked: what it sends then is read later, and begun after whatever
already waits for the loop.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Generator
from functools import partial
from time import monotonic
from typing import Final

from multidict import CIMultiDict

from thunderagent.errors import ReplicaAnswerTooLargeError, ReplicaError, ThunderAgentError
from thunderagent.leases.open_lease import OpenLease
from thunderagent.proxy.fleet.client import BROKEN_OFF, ReplicaClient, broken_off
from thunderagent.proxy.fleet.made_answers import MadeAnswers
from thunderagent.proxy.reading.answers import StreamUsage, decoded, error_of_body, includes_last, read_answer, tool_in
from thunderagent.proxy.reading.inference import Inference
from thunderagent.proxy.reading.outline import LARGE_BODY_BYTES
from thunderagent.proxy.turns.forward import Forwarding
from thunderagent.proxy.turns.record import Record, ended_by
from thunderagent.proxy.wire.exchange import Channel, Exchange, Wait, done
from thunderagent.proxy.wire.headers import LOCATION, forwarded_response_headers, lead_back
from thunderagent.proxy.wire.http11.client import Answer
from thunderagent.proxy.wire.http11.heads import CHANGES_PROTOCOL, CONTENT_ENCODING
from thunderagent.proxy.wire.websockets import Counted, Websockets

MOST_WHOLE_BYTES: Final = 64 * 2**20
"""A larger answer is not buffered, and not read."""

MOST_EVENT_BYTES: Final = 2**20
"""What is no stream is sent as one event of the stream that was begun for a held turn: an error, or an answer."""

MOST_EXPANSION: Final = 32
"""How many times its size a piece of a packed stream may have; text packs to a tenth."""

MANY_EVENTS_BYTES: Final = 32 * 1024
MANY_LINES_COUNT: Final = 2048
"""A piece of more lines has many events: it is read on a thread, some at a time."""

PROGRESS_PERIOD_S: Final = 1.0
"""The least time between two progress reports of a stream to the scheduler."""

LAST_EVENT_S: Final = 1.0
"""How long a client may take to read why its stream was ended here; the lease is held meanwhile."""

_ONCE: Final = (None,)


class _Others:
    """Lets other ready work of the event loop go first, cheaper than `asyncio.sleep(0)`."""

    def __await__(self) -> Generator[None, None, None]:
        return iter(_ONCE)  # type: ignore[return-value]  # no frame to enter and to leave


OTHERS_FIRST: Final = _Others()


class Relay:
    """Relays answers, and ends the leases of their turns."""

    def __init__(
        self,
        client: ReplicaClient,
        forwarding: Forwarding,
        made: MadeAnswers,
        inference: Inference | None,
        websockets: Websockets,
    ) -> None:
        """Read with `client`; `made` records who made which answer, `inference` how prompts go on, if it is on."""
        self._client = client
        self._forwarding = forwarding
        self.made = made
        self._inference = inference
        self._websockets = websockets

    def relay(self, exchange: Exchange, record: Record, lease: OpenLease, upstream: Answer) -> Awaitable[None]:
        """Relay an answer whose head has arrived. Raises `ReplicaError` if it breaks off before its client sees it."""
        granted, record.status = lease.granted, upstream.status
        if upstream.status == CHANGES_PROTOCOL and exchange.channel is not None:
            return self._converse(exchange, exchange.channel, record, lease, upstream)
        streams = upstream.content_type == "text/event-stream"
        headers = forwarded_response_headers(upstream.headers, upstream.notes, keep_length=not streams)
        if LOCATION in headers:
            lead_back(headers, granted.url, granted.replica_id, record.target)
        record.put_headers(headers)
        if streams and not (exchange.begun and upstream.status >= 400):
            return self._stream(exchange, record, lease, upstream, headers)
        return self._whole(exchange, record, lease, upstream, headers)

    async def _whole(
        self, exchange: Exchange, record: Record, lease: OpenLease, upstream: Answer, headers: CIMultiDict[str]
    ) -> None:
        """Relay an answer that is no stream."""
        if not upstream.is_whole and not await self._read(exchange, record, lease, upstream):
            if exchange.begun:
                raise self._too_large(lease)
            await self._pass_on(exchange, record, lease, upstream, headers)
            return
        body = upstream.whole()
        recording = record.recording
        if recording is not None and recording.reads(upstream.status, upstream.headers.get(CONTENT_ENCODING)):
            take, is_large = recording.take_whole, len(body) > LARGE_BODY_BYTES
            body = await asyncio.to_thread(take, body) if is_large else take(body)
        if len(body) > LARGE_BODY_BYTES:
            await asyncio.to_thread(self._look_into, record, lease, upstream, body)
        if record.held_stream is not None and exchange.begun:
            self._end_lease(record, lease)
            await record.held_stream.refuse(body)  # the head of a stream was sent: report it as an event
            return
        try:
            wait = exchange.answer(upstream.status, upstream.reason, headers, body)
            if len(body) <= LARGE_BODY_BYTES:
                await OTHERS_FIRST  # it is sent first; a next turn that comes now begins after this
        finally:
            if len(body) <= LARGE_BODY_BYTES:
                self._look_into(record, lease, upstream, body)
            self._end_lease(record, lease)
        if wait is not None:
            await wait

    async def _read(self, exchange: Exchange, record: Record, lease: OpenLease, upstream: Answer) -> bool:
        """Read an answer to its end; return whether it is complete, as one that is sent as an event must be."""
        max_bytes = MOST_EVENT_BYTES if exchange.begun else MOST_WHOLE_BYTES
        try:
            return await self._client.whole_within(lease.granted.replica_id, upstream, max_bytes)
        except ReplicaError as error:
            record.failed(error.code)
            self._forwarding.failed(lease, error)
            raise

    def _too_large(self, lease: OpenLease) -> ReplicaError:
        """Return the error for an answer that cannot be sent as one event, and end its lease."""
        replica_id = lease.granted.replica_id
        why = f"replica {replica_id} answered a stream with more than {MOST_EVENT_BYTES} bytes that are no stream"
        error = ReplicaAnswerTooLargeError(why, replica_id=replica_id)
        self._forwarding.failed(lease, error)
        return error

    async def _pass_on(
        self, exchange: Exchange, record: Record, lease: OpenLease, upstream: Answer, headers: CIMultiDict[str]
    ) -> None:
        """Relay an answer that is too large to buffer, as it comes."""
        lease.started()
        await done(exchange.begin(upstream.status, upstream.reason, headers))
        try:
            await self._client.pipe(lease.granted.replica_id, upstream, exchange.write)
        except ReplicaError as error:
            record.failed(error.code)
            self._forwarding.failed(lease, error)
            exchange.cut()
            return
        self._end_lease(record, lease)
        await done(exchange.end())

    def _look_into(self, record: Record, lease: OpenLease, upstream: Answer, body: bytes) -> None:
        """Read the usage of a whole answer, and its tool call; and its text if that is wanted."""
        if upstream.status < 400:
            encoding = upstream.headers.get(CONTENT_ENCODING)
            if record.completions is not None:
                record.completions.read_answer(body, encoding)
            if record.sound_usage is not None:
                record.usage, record.tool = record.sound_usage, tool_in(body)
                return
            keep_id = partial(self.made.keep, replica_id=lease.granted.replica_id, tenant=record.turn.tenant)
            record.usage, record.tool = read_answer(record.dialect, body, encoding, keep_id)
            if not record.is_judged:
                record.error = error_of_body(body if encoding is None else decoded(body, encoding) or b"")

    async def _stream(
        self, exchange: Exchange, record: Record, lease: OpenLease, upstream: Answer, headers: CIMultiDict[str]
    ) -> None:
        """Relay a stream of events as they come, and end the lease with their usage and calls."""
        streamed = _Streamed(self, exchange, record, lease, upstream)
        if not exchange.begun and (wait := exchange.begin(upstream.status, upstream.reason, headers)) is not None:
            await wait
        try:
            await upstream.pipe(streamed.take)
        except BROKEN_OFF as broken:
            if not streamed.has_ended():
                error = broken_off(lease.granted.replica_id, broken)
                record.failed(error.code)
                self._forwarding.failed(lease, error)
                await streamed.break_off(error)
                return
        except asyncio.CancelledError as error:
            if streamed.has_ended():
                self._end_lease(record, lease, streamed)
            elif record.superseded:
                upstream.close()
                await streamed.say_ended(ended_by(record))
            raise error  # noqa: TRY201 - bare, it would end a compiled process after a wait
        if (record.turn.usage_added or record.recording is not None) and (rest := streamed.rest()):
            await done(exchange.write(rest))
        self._end_lease(record, lease, streamed)
        if (wait := exchange.end()) is not None:
            await wait

    async def _converse(
        self, exchange: Exchange, client: Channel, record: Record, lease: OpenLease, upstream: Answer
    ) -> None:
        """Carry a websocket; the lease ends with it."""
        headers = forwarded_response_headers(upstream.headers, keep_length=True)
        headers.update(record.headers())
        lease.started()
        await done(exchange.begin(upstream.status, upstream.reason, headers))
        count = record.tenancy.bytes_counter() if record.tenancy is not None else None
        try:
            replica_id = lease.granted.replica_id
            pipe = partial(
                self._client.converse, replica_id, upstream, client if count is None else Counted(client, count)
            )
            await self._websockets.carry(replica_id, exchange, upstream, pipe, count)
        except ReplicaError as error:
            record.failed(error.code)
            self._forwarding.failed(lease, error)
        else:
            self._end_lease(record, lease)

    def remember(self, record: Record) -> None:
        """Remember once how the next prompt of an inferred program begins."""
        chain, completions, record.chain = record.chain, record.completions, None
        if chain is not None and completions is not None and self._inference is not None and record.status == 200:
            self._inference.answered(record.turn.program_id or "", chain, completions.choices())

    def _end_lease(self, record: Record, lease: OpenLease, streamed: _Streamed | None = None) -> None:
        """End the lease of a turn whose answer is complete; an engine's 4xx or 5xx is an answer, too.

        An error inside an answer is a failure: nothing is learned from it, and its program is not released.
        """
        if streamed is not None:
            events, first_s = streamed.events, streamed.first_s
            record.usage, record.error = events.reader.usage, events.error
            if events.calls is not None:
                record.tool = events.calls.key()
            if first_s:
                gaps_count = events.events_count - 1
                record.first_s = first_s - record.arrived_s
                record.between_s = (streamed.last_s - first_s) / gaps_count if gaps_count > 0 else None
        replica_id = lease.granted.replica_id
        if record.status is not None and record.status < 400 and record.error is not None:
            record.outcome, record.cause = "errored", f"in its answer: {record.error.code}"
            record.verdict = self._forwarding.verdict_of_error(record, lease.granted)
            if not (record.error.is_callers or record.error.is_abort):
                self._forwarding.erred(record, replica_id, f"an error inside its answer: {record.error.code}")
            lease.errored(record.verdict, record.cause)
        elif record.status is not None and record.status < 400:
            record.outcome, record.verdict = "finished", "ok"
            self._forwarding.answered(record, replica_id)
            prompt_tokens, output_tokens, cached_tokens = record.usage
            lease.finished(prompt_tokens, output_tokens, cached_tokens, record.tool)
            if record.chain is not None:
                self.remember(record)
        else:
            record.refused()
            lease.refused(record.verdict, record.cause)


class _Streamed:
    """One stream: takes bytes as they arrive, and passes them to the client."""

    __slots__ = (
        "_exchange",
        "_expands",
        "_last_events",
        "_lease",
        "_progress_at_s",
        "_promised",
        "_record",
        "_recording",
        "_relay",
        "events",
        "first_s",
        "last_s",
    )

    def __init__(self, relay: Relay, exchange: Exchange, record: Record, lease: OpenLease, upstream: Answer) -> None:
        self._relay = relay
        self._exchange = exchange
        self._record = record
        self._lease = lease
        encoding = upstream.headers.get(CONTENT_ENCODING)
        self._promised = "identity" if exchange.begun else encoding or "identity"
        self._expands = encoding not in (None, "identity")
        self._progress_at_s = self.first_s = self.last_s = 0.0
        self._last_events = b""
        recording = record.recording
        self._recording = recording if recording is not None and recording.reads(upstream.status, encoding) else None
        self.events = StreamUsage(
            take_out=record.turn.usage_added,
            content_encoding=encoding,
            listener=record.completions.read_events if record.completions is not None else None,
            reader=record.dialect.reader(
                partial(relay.made.keep, replica_id=lease.granted.replica_id, tenant=record.turn.tenant)
            ),
        )

    def take(self, piece: bytes) -> Wait:
        """Take the next bytes."""
        now_s = self.last_s = monotonic()
        if not self._progress_at_s:
            self.first_s = now_s
            self._lease.started()
            self._progress_at_s = now_s + PROGRESS_PERIOD_S
        elif now_s > self._progress_at_s:
            self._lease.progressed(self.events.events_count)
            self._progress_at_s = now_s + PROGRESS_PERIOD_S
        size_bytes = len(piece) * MOST_EXPANSION if self._expands else len(piece)
        pending_bytes = len(self.events.begun)
        if self._recording is not None:
            pending_bytes += self._recording.pending_bytes
        if pending_bytes + size_bytes > LARGE_BODY_BYTES or (
            size_bytes > MANY_EVENTS_BYTES and piece.count(b"\n") > MANY_LINES_COUNT
        ):
            return self._take_aside(piece)
        relayed = self.events.feed(piece) if self._recording is None else self._recorded(piece)
        if self._record.completions is not None:
            self._note_end()
        self._last_events = self.events.last_events
        return self._exchange.write(relayed) if relayed else None

    def _recorded(self, piece: bytes) -> bytes:
        """Return what the client gets of a piece, after what only we asked for was taken out."""
        assert self._recording is not None
        whole = self._recording.feed(piece)
        return self.events.feed(whole) if whole else b""

    def rest(self) -> bytes:
        """Return what is left to relay when the stream has ended."""
        rest = self._recording.rest() if self._recording is not None else b""
        return (self.events.feed(rest) if rest else b"") + self.events.rest()

    def has_ended(self) -> bool:
        """Return whether the last event was handed on; engine and client may leave then, before the answer ends."""
        return includes_last(self._record.dialect, self._last_events)

    async def break_off(self, error: ThunderAgentError) -> None:
        """Report a broken stream to the client as an event, and cut the connection: the answer is incomplete."""
        if self._promised == "identity":  # otherwise an event would be unreadable
            ending = self._record.dialect.break_off(error.status, error.code, error.message, self.events.last_events)
            await done(self._exchange.write(self.events.broken_off() + ending))
        self._exchange.cut()

    async def say_ended(self, error: ThunderAgentError) -> None:
        """Report to the client, if it reads that in time, why its stream was ended here."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LAST_EVENT_S):
                await self.break_off(error)

    async def _take_aside(self, piece: bytes) -> None:
        feed = self.events.feed if self._recording is None else self._recorded
        for start in range(0, len(piece), MANY_EVENTS_BYTES):
            part = piece[start : start + MANY_EVENTS_BYTES] if len(piece) > MANY_EVENTS_BYTES else piece
            relayed = await asyncio.to_thread(feed, part)
            if self._record.completions is not None:
                self._note_end()
            self._last_events = self.events.last_events
            if relayed:
                await done(self._exchange.write(relayed))

    def _note_end(self) -> None:
        """Remember what a stream said once it ends, before the client knows the end, and continues from it."""
        completions = self._record.completions
        if completions is not None and completions.ended:
            self._relay.remember(self._record)
