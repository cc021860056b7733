"""The connections to one replica, each an asyncio Protocol: one request at a time, and its answer as it arrives.

Theory of operation
===================
Bytes are read where they arrive, in `data_received`: a head wakes its waiter, and the pieces of a body go to the
answer; directly to a sink, if there is one, without waking a task. Nobody has to read: past `READ_AHEAD_BYTES` the
server waits. A connection is free for the next request as soon as an answer is complete, and its pool keeps it; after
an error or an abandoned request it carries no other.

An answer that breaks off raises a new error for each reader: a stored error would keep its frames alive, and they the
answer, until a garbage collection.

A request that is not alone is sent a moment later, together with those that other turns begin in the same pass of the
event loop: to write to a socket runs a long way through the kernel, and costs less just after another write than
between the work of two turns (measured: a tenth of a turn). One without a body, or with a large one, is not.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import inf
from ssl import SSLContext, create_default_context
from typing import Any, Final, NamedTuple, NoReturn, cast
from urllib.parse import urlsplit

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from thunderagent.proxy.wire.exchange import Channel, Sink, Wait
from thunderagent.proxy.wire.failures import (
    ClosedError,
    ConnectLateError,
    Failure,
    GarbledError,
    LostError,
    NotHttpError,
    SilentError,
    StaleError,
    TotalError,
    UnreachedError,
)
from thunderagent.proxy.wire.http11.chunks import Chunks
from thunderagent.proxy.wire.http11.heads import (
    CHANGES_PROTOCOL,
    CHUNKED,
    CONTENT_LENGTH,
    MAX_HEAD_BYTES,
    TO_THE_END,
    AnswerHead,
    KnownHeads,
    end_of_head,
    known_answers,
    read_answer,
    written,
)
from thunderagent.proxy.wire.http11.limits import Limits, Pause, Sweep, notice_lost_peers

READ_AHEAD_BYTES: Final = 2**20
"""How much of an answer without a reader is read ahead before the server must wait."""

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

_BODILESS_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Without a body they have no Content-Length header either."""

_IDEMPOTENT_METHODS: Final = _BODILESS_METHODS | {"PUT", "DELETE"}
"""RFC 9110, 9.2.2."""

CROWD_S: Final = 0.1
"""A request is alone if no two were on their way for this long."""

STALE_WITHIN_S: Final = 1.0
"""A kept connection that dies later than this after a request was not stale: the engine had the request."""

_SENDABLE: Final = re.compile(r"/[!\"$-~]*")
"""Printable ASCII without `#`: no server can see an earlier end of such a path."""


# --- An answer, as its reader sees it


class Answer:
    """An answer whose head has arrived; its body may still be on its way. Read it to its end, or close it."""

    __slots__ = (
        "_body",
        "_connection",
        "_failure",
        "_is_held",
        "_pieces",
        "_pieces_bytes",
        "_raised",
        "_wait",
        "_waiter",
        "_wanted_bytes",
        "content_type",
        "headers",
        "is_whole",
        "notes",
        "reason",
        "sink",
        "status",
    )

    def __init__(self, head: AnswerHead, connection: Connection) -> None:
        """Start before the first byte of the body."""
        self.status = head.status
        self.reason = head.reason
        self.headers: CIMultiDictProxy[str] = head.headers
        self.content_type = head.content_type
        self.notes: dict[str, Any] = head.notes
        self.is_whole = False
        self._connection: Connection | None = connection
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._is_held = False
        self._wanted_bytes = 0
        self.sink: Sink | None = None
        """What takes each piece as it arrives; None while they are kept for a reader."""
        self._wait: Wait = None
        self._raised: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Failure | None = None
        self._body: bytes | None = None

    def __repr__(self) -> str:
        return f"<Answer {self.status}, {'whole' if self.is_whole else self._failure or self._connection}>"

    async def read(self) -> bytes:
        """Return the whole body, or what is left of it; repeatable. Raises like `next_piece`."""
        await self.whole_within(sys.maxsize)
        return self.whole()

    async def whole_within(self, max_bytes: int) -> bool:
        """Wait for the whole body; return False as soon as it is larger: it then waits for a reader of pieces.

        Raises like `next_piece`.
        """
        self._wanted_bytes = max_bytes
        try:
            while not self.is_whole and self._pieces_bytes <= max_bytes:
                self.go_on()
                await self._change()
        finally:
            self._wanted_bytes = 0
        return self.is_whole

    def whole(self) -> bytes:
        """Return the body of a complete answer, or what is left of it; repeatable."""
        if self._body is None:
            self._body, self._pieces = b"".join(self._pieces), []
        return self._body

    def peek(self) -> bytes:
        """Return what has arrived and was not read; it stays unread."""
        if self._body is not None:
            return self._body
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    async def next_piece(self) -> bytes:
        """Return the next part of the body; empty at its end. Raises a kind of `Failure`."""
        while not self._pieces:
            if self.is_whole:
                return b""
            await self._change()
        return self._taken()

    async def pipe(self, sink: Sink) -> None:
        """Pass the body to `sink` as it arrives, and return at its end. Raises like `next_piece`.

        What `sink` returns is awaited before more comes; errors of either are raised here.
        """
        while True:
            if self._pieces:
                piece, self._pieces, self._pieces_bytes = b"".join(self._pieces), [], 0
                wait = sink(piece)
                if wait is not None:
                    self.hold()
                    await wait
                if self._is_held:
                    self.go_on()
                continue
            if self.is_whole:
                return
            if self._failure is not None:
                kind, why = self._failure
                raise kind(why)
            self.sink = sink
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            except BaseException:
                if isinstance(self._wait, Coroutine):
                    self._wait.close()  # nobody will await it
                self._wait = None
                raise
            finally:
                self.sink = self._waiter = None
            raised, self._raised = self._raised, None
            if raised is not None:
                try:
                    raise raised
                finally:
                    del raised
            wait, self._wait = self._wait, None
            if wait is not None:
                await wait
                self.go_on()

    def hold(self) -> None:
        """Make the server wait: no more is wanted for now."""
        self._is_held = True
        if self._connection is not None:
            self._connection.pause_reading()

    def go_on(self) -> None:
        """Accept more; without a `hold` this changes nothing."""
        if self._is_held:
            self._is_held = False
            if self._connection is not None:
                self._connection.resume_reading()

    def converse(self, client: Channel, stall_s: float) -> None:
        """Pass the client's bytes to the server from now on; the protocol has changed.

        A server that reads none of them for `stall_s` counts as silent.
        """
        if self._connection is not None:
            self._connection.converse(client, stall_s)

    def limit_silence(self, silence_s: float) -> None:
        """Limit the pauses in the rest of the answer to this, whatever the limit was before."""
        if self._connection is not None:
            self._connection.limit_silence(silence_s)

    def close(self) -> None:
        """End the request, and close its connection if the answer is incomplete; idempotent."""
        if self._connection is not None:
            self._connection.give_up()

    # --- for the connection --------------------------------------------------------------------------------------

    def feed(self, piece: bytes) -> None:
        """Keep a piece of the body for its reader."""
        self._pieces.append(piece)
        self._pieces_bytes += len(piece)
        if self._pieces_bytes <= self._wanted_bytes:
            return
        if self._pieces_bytes > READ_AHEAD_BYTES:
            self.hold()
        if self._waiter is not None:
            self._tell()

    def interrupt(self, wait: Wait, raised: Exception | None = None) -> None:
        """Have the sink get no more until `wait` was awaited, or no more at all if it raised an error."""
        self._wait, self._raised, self.sink = wait, raised, None
        self.hold()
        self._tell()

    def end(self, failure: Failure | None) -> None:
        """Release the connection: the body is complete, or nothing more arrives."""
        self._connection = None
        self.is_whole = failure is None
        self._failure = failure
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _taken(self) -> bytes:
        found, self._pieces, self._pieces_bytes = b"".join(self._pieces), [], 0
        if self._is_held:
            self.go_on()
        return found

    async def _change(self) -> None:
        """Wait until something arrives, or nothing more can."""
        if self._failure is not None:
            kind, why = self._failure
            raise kind(why)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tell(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


# --- The connection


class Connection:
    """One connection to a server; it has the methods of an asyncio protocol, like a client's connection."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sweep: Sweep,
        pause: Pause,
        ended: Callable[[Connection, bool], None],
        closed: Callable[[Connection], None],
        heads: KnownHeads[AnswerHead],
    ) -> None:
        """Call `ended` when its request ended in any way, and whether it is still open; `closed` when it is closed."""
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
        """Send a request; return what to await, or to pass to `abandoned` if the wait was cut short.

        Its result is the answer whose head has arrived, or None if there is none, as `raise_failure` says.

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

    def raise_failure(self) -> NoReturn:
        """Raise the reason for which its request has no answer.

        That is a `ClosedError`, `GarbledError`, `LostError`, `SilentError`, `TotalError`, or `StaleError` if the
        connection was reused and died before the first byte.
        """
        kind, why = self._failure or (ClosedError, "it was closed")
        raise kind(why)

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

    def data_received(self, data: bytes) -> None:  # noqa: C901, PLR0912 - each piece of each answer passes here
        """Take bytes of an answer; nothing is carried by a connection where bytes come before the request."""
        if not self._method or self.is_unsent:
            self._abort()
            return
        self._heard_s = self._loop.time()
        self._has_heard = True
        answer, waiter = self._answer, None
        try:
            if answer is None:
                begun = self._take_head(data)
                if begun is None:
                    return
                answer, data = begun
                waiter = self._waiter
            if not data and self._left_bytes:
                piece, is_whole = b"", False
            elif self._chunks is not None:
                piece, is_whole = self._chunks.feed(data), self._chunks.is_whole
                self._keeps_alive = self._keeps_alive and not self._chunks.is_followed
            elif self._left_bytes == TO_THE_END:
                piece, is_whole = data, False
            else:
                piece = data if len(data) <= self._left_bytes else data[: self._left_bytes]
                self._keeps_alive = self._keeps_alive and len(piece) == len(data)
                self._left_bytes -= len(piece)
                is_whole = not self._left_bytes
        except NotHttpError as error:
            is_answer = self._answer is not None or (self._buffer + data).startswith(ANSWERS)
            self._fail((GarbledError if is_answer else ClosedError, f"what it answered is not HTTP: {error}"))
            return
        if piece and answer.sink is None:
            answer.feed(piece)
        elif piece and answer.sink is not None:
            try:
                if (wait := answer.sink(piece)) is not None:
                    answer.interrupt(wait)
            except Exception as error:
                answer.interrupt(None, error)
        if is_whole and self._answer is answer:  # otherwise the taker of the piece abandoned the answer
            self._end(None)
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(answer)

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

    def _take_head(self, data: bytes) -> tuple[Answer, bytes] | None:
        """Return the answer that begins, and what came of its body; None if its head has not arrived."""
        buffer, looked_at = (self._buffer + data, len(self._buffer)) if self._buffer else (data, 0)
        while True:
            end = end_of_head(buffer, looked_at)
            if not end:
                self._buffer = buffer
                return None
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
            return None
        self._keeps_alive = head.keeps_alive and head.status != FAILED
        self._chunks = Chunks() if head.length == CHUNKED else None
        self._left_bytes = head.length
        self._answer = Answer(head, self)
        return self._answer, buffer

    def _end(self, failure: Failure | None) -> None:
        """End the request; the connection may take another if nothing of this one is left."""
        answer, self._answer, self._method, self._client = self._answer, None, "", None
        waiter, self._waiter = self._waiter, None
        self._failure = failure
        self.due_s = self._taken_s = inf
        self._buffer = b""
        self._chunks = None
        transport = self._transport
        is_sent = transport is not None and not self._unsent and not transport.get_write_buffer_size()
        stays = failure is None and self._keeps_alive and is_sent
        if not stays:
            self._abort()
        elif self._is_paused:
            self.resume_reading()
        self._unsent = memoryview(b"")
        self._is_reused = True
        self._ended(self, stays and transport is not None and not transport.is_closing())
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
        if due_s < self._sweep.timer_s:
            self._sweep.hasten(due_s)


# --- The connections to one replica


class _Site(NamedTuple):
    """The data of a base URL for every request to it."""

    host: str
    port: int
    is_secure: bool
    path: str
    lines: tuple[str, ...]
    """Lines of each head after its first."""
    idle: list[Connection]
    """Connections there without a request; the newest is last, and is taken first."""


class Pool:
    """The connections to one replica, and the number of requests on them."""

    def __init__(
        self,
        sweep: Sweep,
        pause: Pause,
        rank_headers: tuple[tuple[str, str], ...] = (),
        *,
        ssl_context: SSLContext | None = None,
        keepalive_s: float = 4.0,
    ) -> None:
        """Use `sweep` for limits; `rank_headers` replace the client's in every request.

        A connection idle for longer than `keepalive_s` gets no request, and is closed. `ssl_context` says which
        certificates to trust if a URL begins with https; None is the system's.
        """
        self._sweep = sweep
        self._ssl_context = ssl_context
        self._keepalive_s = keepalive_s
        self.pause = pause
        """Whether the replica is paused."""
        self._sites: dict[str, _Site] = {}
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._connections: set[Connection] = set()
        self._heads = known_answers()
        self._last_path: str | None = None
        """Of the last request: it was checked."""
        self._loop = asyncio.get_running_loop()
        self.rank_headers = rank_headers
        self.requests_count = 0
        self._crowded_s = -inf
        """When two requests were last on their way at once."""
        self._is_closed = False
        self._all_closed: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Close all connections at once; requests on them fail as if the replica had closed them."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.give_up()
        if self._connections:
            self._all_closed = self._loop.create_future()
            await self._all_closed

    def lose(self, why: str, sent_ago_s: float = 0.0) -> None:
        """Fail all requests sent so long ago, because the replica was declared lost; later ones get new connections."""
        sent_s = self._loop.time() - sent_ago_s
        for connection in list(self._connections):
            if connection.sent_s <= sent_s:
                connection.lose(why)

    async def request(
        self,
        method: str,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        limits: Limits,
        *,
        may_repeat: bool = False,
    ) -> Answer:
        """Send a request and return its answer's head; the request counts until the answer is complete or closed.

        It is sent again, on a new connection, if a kept one dies at once: the engine just closed it. It is not if that
        might execute something twice: it was written, and neither the method nor `may_repeat` allows it. Raises
        `UnreachedError`, `ConnectLateError` or a kind of `Failure`, which reading the body may raise, too; and
        `ValueError` for a URL or headers that cannot be sent.
        """
        site = self._sites.get(base_url) or self._site(base_url)
        if path != self._last_path:
            if not _SENDABLE.fullmatch(path):  # it is sent as it was checked, or not at all
                raise ValueError("the path of a request to a replica begins with / and holds no #, space or control")
            self._last_path = path
        if CONTENT_LENGTH in headers:
            headers = headers.copy()
            del headers[CONTENT_LENGTH]
        length_bytes = len(body) if body is not None else 0
        has_length = body is not None or method not in _BODILESS_METHODS
        lines = [f"{method} {site.path}{path} HTTP/1.1", *site.lines]
        head = written(lines, headers, f"Content-Length: {length_bytes}" if has_length else "")
        changes = method == "GET" and "Upgrade" in headers
        begun_s = self.pause.clock_s() if limits.total_s < inf else 0.0
        sent_s = self._loop.time()
        if self.requests_count:
            self._crowded_s = sent_s
        kept = connection = self._idle_connection(site, sent_s)
        while True:
            if connection is None:
                connection = await self._connected(site, limits.connect_s, was_sent=kept is not None)
            self.requests_count += 1  # until the connection reports its end
            alone = sent_s - self._crowded_s > CROWD_S
            waiter = connection.request(method, head, body, limits, begun_s, may_change=changes, is_alone=alone)
            try:
                if (answer := await waiter) is not None:
                    return answer
                connection.raise_failure()
            except StaleError:
                may_repeat = may_repeat or connection.is_unsent or method in _IDEMPOTENT_METHODS
                if not may_repeat or self._loop.time() - sent_s > STALE_WITHIN_S:
                    raise
                connection = None
            except BaseException:
                connection.abandoned(waiter)
                raise

    async def _connected(self, site: _Site, connect_s: float, *, was_sent: bool) -> Connection:
        """Return a new connection, for a request that perhaps was sent before: then one had been made."""
        self.requests_count += 1  # connecting is a part of it
        try:
            return await self._connect(site, connect_s)
        except (UnreachedError, ConnectLateError) as error:
            if was_sent:
                raise ClosedError(f"it is gone: {error}") from None
            raise
        finally:
            self.requests_count -= 1

    def _idle_connection(self, site: _Site, now_s: float) -> Connection | None:
        """Return the valid connection that was idle for the shortest time; None if there is none.

        The others age and are closed, so only useful ones stay, and the engine rarely closes one first.
        """
        while site.idle:
            connection = site.idle.pop()
            if connection.is_open and connection.due_s > now_s:
                return connection
            connection.give_up()
        return None

    async def _connect(self, site: _Site, connect_s: float) -> Connection:
        ended, closed = partial(self._ended, site), partial(self._closed, site)
        make: Any = partial(Connection, self._loop, self._sweep, self.pause, ended, closed, self._heads)
        context = (self._ssl_context or _trusting_the_system()) if site.is_secure else None
        try:
            async with asyncio.timeout(connect_s):
                connection: Connection
                _, connection = await self._loop.create_connection(make, site.host, site.port, ssl=context)
        except TimeoutError:
            raise ConnectLateError("the connection was not made in time") from None
        except OSError as error:
            unreached = UnreachedError(str(error) or type(error).__name__)
            unreached.is_refused = isinstance(error, ConnectionRefusedError)
            raise unreached from None
        if self._is_closed:
            connection.give_up()
        if not connection.is_open:
            raise UnreachedError("the pool is closed" if self._is_closed else "it was closed at once")
        self._connections.add(connection)
        self._sweep.add(connection)
        return connection

    def _ended(self, site: _Site, connection: Connection, is_open: bool) -> None:
        """Take a connection back whose request ended."""
        self.requests_count -= 1
        if is_open and not self._is_closed:
            site.idle.append(connection)
            connection.due_s = due_s = self._loop.time() + self._keepalive_s  # unless a request is sent before
            if due_s < self._sweep.timer_s:
                self._sweep.hasten(due_s)

    def _closed(self, site: _Site, connection: Connection) -> None:
        self._connections.discard(connection)
        with suppress(ValueError):
            site.idle.remove(connection)
        if self._all_closed is not None and not self._connections and not self._all_closed.done():
            self._all_closed.set_result(None)

    def _site(self, base_url: str) -> _Site:
        url = URL(base_url, encoded=True)
        if url.host is None or url.scheme not in ("http", "https") or url.port is None:
            raise ValueError("the URL of a replica begins with http:// or https:// and names a host")
        lines = [f"Host: {url.host_port_subcomponent or ''}"]
        if url.raw_user or url.raw_password:
            login = f"{url.user or ''}:{url.password or ''}"
            lines.append(f"Authorization: Basic {b64encode(login.encode('latin1')).decode()}")
        where = (url.host, url.port, url.scheme == "https")
        site = _Site(*where, urlsplit(base_url).path.rstrip("/"), tuple(lines), self._idle.setdefault(where, []))
        self._sites[base_url] = site
        return site


_default_context: list[SSLContext] = []


def _trusting_the_system() -> SSLContext:
    """Return a context that trusts the system's certificates; created once, because that is slow."""
    if not _default_context:
        _default_context.append(create_default_context())
    return _default_context[0]
