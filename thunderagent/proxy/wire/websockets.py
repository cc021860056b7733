"""Websockets that are open: carried byte for byte until a side closes, they are too old, or the proxy ends them.

What is said is not read. Only where the frames of the engine begin is followed (RFC 6455, 5.2): a close frame of ours
may stand between two of them alone. One that ends in the middle of a frame for longer than a moment ends without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from thunderagent.errors import ReplicaError
from thunderagent.proxy.wire.exchange import Exchange, Sink, Wait, done
from thunderagent.proxy.wire.http11.answers import Answer

GOING_AWAY = 1001
"""The code that a client is told which ends for no fault of its own (RFC 6455, 7.4.1)."""

FRAME_LIMIT_S = 1.0
"""For the frame to end in whose middle a websocket is to end."""

_CLOSE, _MASKED = 0x08, 0x80
_LENGTH_BYTES = {126: 2, 127: 8}
"""By a length that stands for a longer one, how many bytes that has."""


class Frames:
    """Follow where the frames of one side begin."""

    __slots__ = ("_head", "_left_bytes", "is_closed")

    def __init__(self) -> None:
        """Begin between two frames."""
        self._head = b""
        self._left_bytes = 0
        self.is_closed = False
        """Whether a close frame has begun, after which no other may come."""

    @property
    def is_between(self) -> bool:
        """Whether nothing of a frame is still to come."""
        return not self._head and not self._left_bytes

    def feed(self, data: bytes) -> int:
        """Take in what follows; return how much of it came before the first gap between frames, -1 if there is none."""
        at, gap_at = 0, -1
        while True:
            if self.is_between and gap_at < 0:
                gap_at = at
            if at == len(data):
                return gap_at
            if self._left_bytes:
                step = min(self._left_bytes, len(data) - at)
                self._left_bytes -= step
            else:
                step = self._feed_head(data[at : at + 14])
            at += step

    def _feed_head(self, data: bytes) -> int:
        """Take in bytes of a frame's head; return how many these are."""
        head = self._head + data
        length = head[1] & ~_MASKED if len(head) > 1 else 0
        length_bytes = _LENGTH_BYTES.get(length, 0)
        size = 2 + length_bytes + (4 if len(head) > 1 and head[1] & _MASKED else 0)
        if len(head) < size:
            self._head = head
            return len(data)
        step, self._head = size - len(self._head), b""
        self._left_bytes = int.from_bytes(head[2 : 2 + length_bytes], "big") if length_bytes else length
        self.is_closed = self.is_closed or head[0] & 0x0F == _CLOSE
        return step


def close_frame(code: int, why: str) -> bytes:
    """Return the frame by which a server ends a websocket; `why` has at most 123 bytes."""
    data = code.to_bytes(2, "big") + why.encode()
    return bytes((0x80 | _CLOSE, len(data))) + data


class _Conversation:
    """One websocket."""

    __slots__ = ("_exchange", "_frames", "_timer", "_upstream", "replica_id", "was_ended", "why")

    def __init__(self, replica_id: str, exchange: Exchange, upstream: Answer) -> None:
        self.replica_id = replica_id
        self._exchange = exchange
        self._upstream = upstream
        self._frames = Frames()
        self._timer: asyncio.TimerHandle | None = None
        self.why = ""
        """Why it is to end; empty while it is not."""
        self.was_ended = False
        """Whether it ended for that."""

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame of the engine's has begun and not ended."""
        return not self._frames.is_between

    def take(self, piece: bytes) -> Wait:
        """Take what the engine says."""
        gap_at = self._frames.feed(piece)
        if not self.why or gap_at < 0:
            return self._exchange.write(piece)
        if gap_at:
            self._exchange.write(piece[:gap_at])
        self._end()
        return None

    def go_away(self, why: str) -> None:
        """End it with a close frame: now, or once the engine's frame ends."""
        if self.why:
            return
        self.why = why
        if self._frames.is_between:
            self._end()
        else:
            self.over()
            self._timer = asyncio.get_running_loop().call_later(FRAME_LIMIT_S, self._break_off)

    def _end(self) -> None:
        if not self._frames.is_closed:
            self._exchange.write(close_frame(GOING_AWAY, self.why))
        self._break_off()

    def _break_off(self) -> None:
        self.was_ended = True
        self._upstream.close()

    def due_in(self, limit_s: float) -> None:
        """End it after so long."""
        why = f"it was open for {limit_s:g} s, and none may be for longer"
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.go_away, why)

    def over(self) -> None:
        """Have no timer any more."""
        if self._timer is not None:
            self._timer.cancel()


class Websockets:
    """Carries websockets, each until one of its sides closes it, it is too old, or it is ended from outside."""

    def __init__(self, limit_s: float) -> None:
        """Have none open for longer than `limit_s`."""
        self._limit_s = limit_s
        self._open: set[_Conversation] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def carry(
        self, replica_id: str, exchange: Exchange, upstream: Answer, pipe: Callable[[Sink], Awaitable[None]]
    ) -> None:
        """Carry what both sides say, after the answer's head; who closes closes the other.

        `pipe` has the replica hear the client, and gives a sink what the replica says; what it raises is raised.
        """
        conversation = _Conversation(replica_id, exchange, upstream)
        self._open.add(conversation)
        conversation.due_in(self._limit_s)
        try:
            await pipe(conversation.take)
        except ReplicaError:
            if not conversation.was_ended:
                exchange.cut()
                raise
            if conversation.is_in_frame:  # nobody can be told in the midst of one
                exchange.cut()
            else:
                await done(exchange.end())
        else:
            exchange.cut()
        finally:
            conversation.over()
            self._open.discard(conversation)

    def replica_removed(self, replica_id: str) -> None:
        """End those on a replica that is removed: it drained for as long as it may, or is to go at once."""
        for conversation in [each for each in self._open if each.replica_id == replica_id]:
            conversation.go_away("its replica was removed")

    def close(self) -> None:
        """End all of them."""
        for conversation in list(self._open):
            conversation.go_away("the proxy is shutting down")
