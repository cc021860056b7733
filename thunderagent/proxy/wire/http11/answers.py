"""An answer as its reader sees it: the head, and the body as it arrives.

Pieces go directly to a sink, if there is one, without waking a task. Nobody has to read: past `READ_AHEAD_BYTES` the
server waits.

An answer that breaks off raises a new error for each reader: a stored error would keep its frames alive, and they the
answer, until a garbage collection.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from multidict import CIMultiDictProxy

from thunderagent.proxy.wire.exchange import Channel, Sink, Wait
from thunderagent.proxy.wire.failures import Failure
from thunderagent.proxy.wire.http11.heads import AnswerHead

READ_AHEAD_BYTES: Final = 2**20
"""How much of an answer without a reader is read ahead before the server must wait."""


class Carrier(Protocol):
    """The connection of an answer."""

    def pause_reading(self) -> None:
        """Make the server wait."""

    def resume_reading(self) -> None:
        """Accept more bytes."""

    def limit_silence(self, silence_s: float) -> None:
        """Change the limit for silence from now on."""

    def converse(self, client: Channel, stall_s: float) -> None:
        """Send the client's bytes from now on; a server that reads none of them for `stall_s` counts as silent."""

    def give_up(self) -> None:
        """End the request, and the connection with it."""


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
        "_sink",
        "_wait",
        "_waiter",
        "_wanted_bytes",
        "headers",
        "is_whole",
        "notes",
        "reason",
        "status",
    )

    def __init__(self, head: AnswerHead, connection: Carrier) -> None:
        """Start before the first byte of the body."""
        self.status = head.status
        self.reason = head.reason
        self.headers: CIMultiDictProxy[str] = head.headers
        self.notes: dict[str, Any] = head.notes
        self.is_whole = False
        self._connection: Carrier | None = connection
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._is_held = False
        self._wanted_bytes = 0
        self._sink: Sink | None = None
        self._wait: Wait = None
        self._raised: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Failure | None = None
        self._body: bytes | None = None

    def __repr__(self) -> str:
        return f"<Answer {self.status}, {'whole' if self.is_whole else self._failure or self._connection}>"

    @property
    def content_type(self) -> str:
        """The media type, without its parameters."""
        known: str | None = self.notes.get("content_type")
        if known is None:
            known = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            self.notes["content_type"] = known
        return known

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
            self._body = self._taken()
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
                wait = sink(self._taken())
                if wait is not None:
                    self.hold()
                    await wait
                    self.go_on()
                continue
            if self.is_whole:
                return
            self._sink = sink
            try:
                await self._change()
            except BaseException:
                if isinstance(self._wait, Coroutine):
                    self._wait.close()  # nobody will await it
                self._wait = None
                raise
            finally:
                self._sink = None
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
        """Add a piece of the body."""
        if self._sink is not None and not self._pieces:
            try:
                self._wait = self._sink(piece)
            except Exception as error:
                self._raised = error
            if self._wait is not None or self._raised is not None:
                self._sink = None
                self.hold()
                self._tell()
        else:
            self._pieces.append(piece)
            self._pieces_bytes += len(piece)
            if self._pieces_bytes <= self._wanted_bytes:
                return
            if self._pieces_bytes > READ_AHEAD_BYTES:
                self.hold()
            if self._waiter is not None:
                self._tell()

    def end(self, failure: Failure | None) -> None:
        """Release the connection: the body is complete, or nothing more arrives."""
        self._connection = None
        self.is_whole = failure is None
        self._failure = failure
        if self._waiter is not None:
            self._tell()

    def _taken(self) -> bytes:
        pieces = self._pieces
        found = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._pieces_bytes = 0
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
