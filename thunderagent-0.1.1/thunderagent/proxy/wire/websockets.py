"""Open websockets: relayed byte for byte until a side closes, they are too old, or the proxy ends them.

Messages are not read. Only the boundaries of the engine's frames are tracked (RFC 6455, 5.2): our close frame may only
stand between two of them. A websocket that stays within a frame for longer than a moment ends without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from thunderagent.errors import ReplicaError
from thunderagent.proxy.wire.exchange import Channel, Exchange, Sink, Wait, done
from thunderagent.proxy.wire.http11.client import Answer

GOING_AWAY = 1001
"""The close code for a client that ends without its own fault (RFC 6455, 7.4.1)."""

FRAME_LIMIT_S = 1.0
"""For the current frame to end before a websocket is closed."""

_CLOSE, _MASKED = 0x08, 0x80
_LENGTH_BYTES = {126: 2, 127: 8}
"""For length values that announce a longer length: its number of bytes."""


class Frames:
    """Tracks the frame boundaries of one side."""

    __slots__ = ("_head", "_left_bytes", "is_closed")

    def __init__(self) -> None:
        """Start between two frames."""
        self._head = b""
        self._left_bytes = 0
        self.is_closed = False
        """Whether a close frame has begun; no other may follow."""

    @property
    def is_between(self) -> bool:
        """Whether no part of a frame is still to come."""
        return not self._head and not self._left_bytes

    def feed(self, data: bytes) -> int:
        """Take bytes; return how many came before the first gap between frames, -1 if there is no gap."""
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
        """Take bytes of a frame's head; return how many these are."""
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
    """Return a server's close frame; `why` has at most 123 bytes."""
    data = code.to_bytes(2, "big") + why.encode()
    return bytes((0x80 | _CLOSE, len(data))) + data


class Counted:
    """A client's bytes, counted as they come."""

    __slots__ = ("_client", "_count")

    def __init__(self, client: Channel, count: Callable[[int], None]) -> None:
        """Tell `count` how many bytes each piece of `client` has."""
        self._client = client
        self._count = count

    def pour(self, sink: Callable[[bytes], None]) -> None:
        """See `Channel`."""

        def take(piece: bytes) -> None:
            self._count(len(piece))
            sink(piece)

        self._client.pour(take)

    def hold(self) -> None:
        """See `Channel`."""
        self._client.hold()

    def go_on(self) -> None:
        """See `Channel`."""
        self._client.go_on()


class _Conversation:
    """One websocket."""

    __slots__ = ("_count", "_exchange", "_frames", "_timer", "_upstream", "replica_id", "was_ended", "why")

    def __init__(
        self, replica_id: str, exchange: Exchange, upstream: Answer, count: Callable[[int], None] | None
    ) -> None:
        self.replica_id = replica_id
        self._count = count
        self._exchange = exchange
        self._upstream = upstream
        self._frames = Frames()
        self._timer: asyncio.TimerHandle | None = None
        self.why = ""
        """Why it is to end; empty if it is not."""
        self.was_ended = False
        """Whether it ended for that reason."""

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame of the engine has begun and not ended."""
        return not self._frames.is_between

    def take(self, piece: bytes) -> Wait:
        """Take bytes from the engine."""
        if self._count is not None:
            self._count(len(piece))
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
        """End it after this time."""
        why = f"it was open for {limit_s:g} s, and none may be for longer"
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.go_away, why)

    def over(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()


class Websockets:
    """Relays websockets, each until one of its sides closes it, it is too old, or it is ended from outside."""

    def __init__(self, limit_s: float) -> None:
        """Keep none open for longer than `limit_s`."""
        self._limit_s = limit_s
        self._open: set[_Conversation] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def carry(
        self,
        replica_id: str,
        exchange: Exchange,
        upstream: Answer,
        pipe: Callable[[Sink], Awaitable[None]],
        count: Callable[[int], None] | None = None,
    ) -> None:
        """Relay both sides, after the answer's head; when one closes, the other is closed.

        `pipe` passes the client's bytes to the replica, and the replica's to a sink; its errors are raised. `count`
        hears how many bytes each piece of the replica has.
        """
        conversation = _Conversation(replica_id, exchange, upstream, count)
        self._open.add(conversation)
        conversation.due_in(self._limit_s)
        try:
            await pipe(conversation.take)
        except ReplicaError:
            if not conversation.was_ended:
                exchange.cut()
                raise
            if conversation.is_in_frame:  # no close frame can be sent within a frame
                exchange.cut()
            else:
                await done(exchange.end())
        else:
            exchange.cut()
        finally:
            conversation.over()
            self._open.discard(conversation)

    def replica_removed(self, replica_id: str) -> None:
        """End those on a removed replica: its drain time is over, or it goes at once."""
        for conversation in [each for each in self._open if each.replica_id == replica_id]:
            conversation.go_away("its replica was removed")

    def close(self) -> None:
        """End all of them."""
        for conversation in list(self._open):
            conversation.go_away("the proxy is shutting down")
