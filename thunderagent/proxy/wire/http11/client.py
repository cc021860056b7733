"""A connection to a server, as an asyncio Protocol: one request at a time, and its answer as it arrives.

Bytes are read where they arrive, in `data_received`: a head wakes its waiter, and the pieces of a body go to the
answer. The connection is free for the next request as soon as an answer is complete; after an error or an abandoned
request it carries no other.

A request that is not alone is sent a moment later, together with those that other turns begin in the same pass of the
event loop: to write to a socket runs a long way through the kernel, and costs less just after another write than
between the work of two turns (measured: a tenth of a turn). One without a body, or with a large one, is not.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final, cast

from thunderagent.proxy.wire.exchange import Channel
from thunderagent.proxy.wire.failures import (
    ClosedError,
    Failure,
    GarbledError,
    LostError,
    NotHttpError,
    SilentError,
    StaleError,
    TotalError,
)
from thunderagent.proxy.wire.http11.answers import Answer
from thunderagent.proxy.wire.http11.chunks import Chunks
from thunderagent.proxy.wire.http11.heads import (
    CHANGES_PROTOCOL,
    CHUNKED,
    MAX_HEAD_BYTES,
    TO_THE_END,
    AnswerHead,
    KnownHeads,
    end_of_head,
    read_answer,
)
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep, notice_lost_peers

JOINED_BYTES: Final = 64 * 1024
"""A larger body is not copied to join its head."""

PIECE_BYTES: Final = 512 * 1024
"""A larger body is sent in pieces of this size, so that other turns go on meanwhile."""

LOOK_AGAIN_S: Final = 1.0
"""How often limits are checked while a replica is paused."""

STALL_LOOKS_COUNT: Final = 4
"""How often progress is checked within a server's stall limit on a websocket."""

ROUNDING_S: Final = 1e-6
"""Tolerance for rounding errors of a limit that has just passed."""

ANSWERS: Final = b"HTTP/1."
"""What begins so is an answer, whatever follows: the server had the request. Anything else is of no HTTP server."""

FAILED: Final = 500
"""Servers close the connection of an application that failed, just after its answer, and do not say so (uvicorn)."""


class Connection:
    """One connection to a server; it has the methods of an asyncio protocol, like a client's connection."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sweep: Sweep,
        pause: Pause,
        ended: Callable[[Connection], None],
        closed: Callable[[Connection], None],
        heads: KnownHeads[AnswerHead],
    ) -> None:
        """Call `ended` when its request ended in any way, and `closed` when it is closed."""
        self._loop = loop
        self._sweep = sweep
        self._pause = pause
        self._ended = ended
        self._closed = closed
        self._heads = heads
        self._transport: asyncio.Transport | None = None
        self._method = ""
        """Of its current request; empty if there is none."""
        self._waiter: asyncio.Future[Answer | None] | None = None
        self._answer: Answer | None = None
        self._failure: Failure | None = None
        self._buffer = b""
        self._left_bytes = self._queued_bytes = self._interim_bytes = 0
        self._chunks: Chunks | None = None
        self._unsent = memoryview(b"")
        self._keeps_alive = self._may_change = False
        self._client: Channel | None = None
        """The client that sends more after the request."""
        self._stall_s = inf
        """A server that reads none of that for this long has failed."""
        self._taken_s = inf
        """When it was last seen to read some of the queued bytes; infinite while none wait."""
        self._is_full = self._is_paused = self._is_reused = self._has_heard = False
        self.is_unsent = False
        """Whether its request was not written yet, or given up before: the server knows nothing of it."""
        self._heard_s = self._begun_s = 0.0
        self.sent_s = 0.0
        """When its last request was sent."""
        self._silence_s = self._total_s = self.due_s = inf

    def __repr__(self) -> str:
        return f"<Connection, {'open' if self.is_open else 'closed'}, {self._method or 'idle'}>"

    @property
    def is_open(self) -> bool:
        """Whether it can take a request."""
        return self._transport is not None and not self._transport.is_closing()

    def request(
        self,
        method: str,
        head: bytes,
        body: bytes | None,
        limits: Limits,
        begun_s: float,
        *,
        may_change: bool = False,
        is_alone: bool = True,
    ) -> asyncio.Future[Answer | None]:
        """Send a request; return what to await and to pass to `answered`, or to `abandoned` if the wait was cut short.

        All of the answer is limited from `begun_s` on, by the clock of the pauses. `may_change` says that the request
        asks for another protocol, so the answer may start that. One that `is_alone` is sent at once.
        """
        assert self._transport is not None
        assert not self._method, "a connection carries one request at a time"
        self._method = method
        self._may_change = may_change
        self._has_heard, self._interim_bytes = False, 0
        self._heard_s = self.sent_s = self._loop.time()
        self._silence_s, self._total_s, self._begun_s = limits.silence_s, limits.total_s, begun_s
        self._set_due(self._heard_s)
        if not body:
            self._transport.write(head)
        elif len(body) <= JOINED_BYTES:
            if is_alone:
                self._transport.write(head + body)
            else:
                self.is_unsent = True
                self._loop.call_soon(self._write, head + body)
        else:
            self._unsent = memoryview(body)[PIECE_BYTES:]
            self._transport.writelines([head, memoryview(body)[:PIECE_BYTES]])
            self._send_more()
        waiter: asyncio.Future[Answer | None] = self._loop.create_future()
        self._waiter = waiter
        return waiter

    def answered(self, answer: Answer | None) -> Answer:
        """Return the answer whose head has arrived.

        Raises `ClosedError`, `GarbledError`, `LostError`, `SilentError`, `TotalError`, or `StaleError` if the
        connection was reused and died before the first byte.
        """
        if answer is None:
            kind, why = self._failure or (ClosedError, "it was closed")
            raise kind(why)
        return answer

    def abandoned(self, waiter: asyncio.Future[Answer | None]) -> None:
        """Give up a request whose answer nobody waits for any more."""
        if waiter.cancelled():
            self.give_up()
        elif (answer := waiter.result()) is not None:
            answer.close()  # leaves the connection alone if it carries another request by now

    def _write(self, request: bytes) -> None:
        """Write a request, unless it was given up."""
        waiter, transport = self._waiter, self._transport
        if waiter is not None and not waiter.done() and transport is not None and not transport.is_closing():
            self.is_unsent = False
            transport.write(request)

    def converse(self, client: Channel, stall_s: float) -> None:
        """Send the client's bytes from now on, as fast as the server reads them; the protocol has changed.

        A server that reads none of them for `stall_s` counts as silent, whatever it sends itself.
        """
        self._client, self._stall_s = client, stall_s
        client.pour(self._say)

    def _say(self, data: bytes) -> None:
        if self._transport is not None and self._client is not None:
            now_s = self._heard_s = self._loop.time()  # a side that is spoken to may stay silent
            self._transport.write(data)
            if self._taken_s == inf:
                self._taken_s = now_s
                self._set_due(now_s)

    def limit_silence(self, silence_s: float) -> None:
        """Change the limit for silence from now on."""
        self._silence_s = silence_s
        self._heard_s = self._loop.time()
        self._set_due(self._heard_s)

    def keep_until(self, due_s: float) -> None:
        """Close it at that time, unless a request is sent before."""
        self.due_s = due_s
        self._sweep.hasten(due_s)

    def give_up(self) -> None:
        """End its request, if there is one, and close it without sending the rest."""
        self._fail((ClosedError, "the answer was closed"))

    def lose(self, why: str) -> None:
        """End its request, if there is one, because the server was declared lost; close it either way."""
        self._fail((LostError, why))

    def pause_reading(self) -> None:
        """Make the server wait."""
        if not self._is_paused and self.is_open:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Accept more bytes."""
        if self._is_paused:
            self._is_paused = False
            self._heard_s = self._loop.time()
            if self._transport is not None:
                self._transport.resume_reading()

    # --- what the transport tells --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start before anything was sent."""
        self._transport = cast("asyncio.Transport", transport)
        notice_lost_peers(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Fail all waiters: the connection is gone."""
        self._transport = None
        self._sweep.remove(self)
        if self._method:
            kind = ClosedError if self._has_heard or not self._is_reused else StaleError
            why = "it closed the connection"
            self._fail((kind, f"{why}: {exc}" if exc is not None else why))
        self._closed(self)

    def eof_received(self) -> None:
        """End a body that ends with the connection; the transport closes itself."""
        if self._answer is not None and self._chunks is None and self._left_bytes == TO_THE_END:
            self._end(None)

    def pause_writing(self) -> None:
        """Wait: the server reads slowly."""
        self._is_full = True
        if self._client is not None:
            self._client.hold()

    def resume_writing(self) -> None:
        """Send more."""
        self._is_full = False
        self._heard_s = self._loop.time()  # it read some, so it is not silent
        if self._client is not None:
            self._client.go_on()
        if self._unsent:
            self._send_more()

    def data_received(self, data: bytes) -> None:
        """Take bytes of an answer; nothing is carried by a connection where bytes come before the request."""
        if not self._method or self.is_unsent:
            self._abort()
            return
        self._heard_s = self._loop.time()
        self._has_heard = True
        try:
            if self._answer is None:
                self._take_head(data)
            else:
                self._take_body(self._answer, data)
        except NotHttpError as error:
            is_answer = self._answer is not None or (self._buffer + data).startswith(ANSWERS)
            self._fail((GarbledError if is_answer else ClosedError, f"what it answered is not HTTP: {error}"))

    def late(self, now_s: float) -> None:
        """Close it if it was idle for too long, or fail its late request."""
        if not self._method:
            self._abort()
            return
        queued_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if queued_bytes != self._queued_bytes:
            self._queued_bytes, self._heard_s = queued_bytes, now_s  # it read some
            if self._taken_s < inf:
                self._taken_s = now_s
        if self._is_paused:
            self._heard_s = now_s
        if not queued_bytes:
            self._taken_s = inf
        elif not self._pause.is_on and max(self._taken_s, self._pause.ended_s) + self._stall_s <= now_s:
            self._fail((SilentError, "it took nothing of what it was told"))
            return
        self._set_due(now_s)
        if self.due_s <= now_s:
            total_left_s = self._begun_s + self._total_s - self._pause.clock_s()
            failed = (
                (TotalError, "it took too long in all") if total_left_s < ROUNDING_S else (SilentError, "it was silent")
            )
            self._fail(failed)

    # --- the parts of an answer ----------------------------------------------------------------------------------

    def _take_head(self, data: bytes) -> None:
        buffer, looked_at = (self._buffer + data, len(self._buffer)) if self._buffer else (data, 0)
        while True:
            end = end_of_head(buffer, looked_at)
            if not end:
                self._buffer = buffer
                return
            raw = buffer[:end]
            head = self._heads.read(raw) if self._method != "HEAD" else read_answer(raw, self._method)
            buffer, looked_at = buffer[end:], 0
            if head.status >= 200 or (head.status == CHANGES_PROTOCOL and self._may_change):
                break
            if head.status == CHANGES_PROTOCOL:
                raise NotHttpError("it switches protocols without being asked")
            self._interim_bytes += end
            if self._interim_bytes > MAX_HEAD_BYTES:  # each one ends a silence, so no limit would apply
                raise NotHttpError(f"it sends more than {MAX_HEAD_BYTES} bytes of interim answers")
        self._buffer = b""
        waiter = self._waiter
        if waiter is None or waiter.done():  # its client has left; the connection must not carry another request
            self.give_up()
            return
        self._keeps_alive = head.keeps_alive and head.status != FAILED
        self._chunks = Chunks() if head.length == CHUNKED else None
        self._left_bytes = head.length
        answer = self._answer = Answer(head, self)
        if buffer or not head.length:
            self._take_body(answer, buffer)
        self._waiter = None
        if not waiter.done():
            waiter.set_result(answer)

    def _take_body(self, answer: Answer, data: bytes) -> None:
        if self._chunks is not None:
            piece, is_whole = self._chunks.feed(data), self._chunks.is_whole
            self._keeps_alive = self._keeps_alive and not self._chunks.is_followed
        elif self._left_bytes == TO_THE_END:
            piece, is_whole = data, False
        else:
            piece = data if len(data) <= self._left_bytes else data[: self._left_bytes]
            self._keeps_alive = self._keeps_alive and len(piece) == len(data)
            self._left_bytes -= len(piece)
            is_whole = not self._left_bytes
        if piece:
            answer.feed(piece)
        if is_whole and self._answer is answer:  # otherwise the taker of the piece abandoned the answer
            self._end(None)

    def _end(self, failure: Failure | None) -> None:
        """End the request; the connection may take another if nothing of this one is left."""
        answer, self._answer, self._method, self._client = self._answer, None, "", None
        waiter, self._waiter = self._waiter, None
        self._failure = failure
        self.due_s = self._taken_s = inf
        self._buffer = b""
        if self._chunks is not None:
            self._chunks.close()
            self._chunks = None
        transport = self._transport
        is_sent = transport is not None and not self._unsent and not transport.get_write_buffer_size()
        if failure is not None or not self._keeps_alive or not is_sent:
            self._abort()
        elif self._is_paused:
            self.resume_reading()
        self._unsent = memoryview(b"")
        self._is_reused = True
        self._ended(self)
        if answer is not None:
            answer.end(failure)
        if waiter is not None and not waiter.done() and failure is not None:
            waiter.set_result(None)

    def _fail(self, failure: Failure) -> None:
        if self._method:
            self._end(failure)
        else:
            self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send_more(self) -> None:
        """Send a large body piece by piece, as fast as it is read."""
        while self._unsent and not self._is_full and self._transport is not None:
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            self._transport.write(piece)

    def _set_due(self, now_s: float) -> None:
        """Compute when the request is late if nothing more arrives."""
        pause = self._pause
        due_s = max(self._heard_s, pause.ended_s) + self._silence_s
        if self._total_s < inf:
            due_s = min(due_s, now_s + self._begun_s + self._total_s - pause.clock_s())
        if self._taken_s < inf:
            due_s = min(due_s, now_s + self._stall_s / STALL_LOOKS_COUNT)
        if pause.is_on:
            due_s = now_s + LOOK_AGAIN_S
        self.due_s = due_s
        self._sweep.hasten(due_s)
