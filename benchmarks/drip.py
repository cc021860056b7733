"""An engine that answers slowly, and fails as often as told: one raw protocol on the benchmark's event loop.

It understands only the HTTP that the benchmarks need. What it sends for a turn follows from a `Plan`; the load makes
plans from the turn's body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

METRICS = b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="%d"} 1.0\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
STATUS_LINES = {200: b"200 OK", 500: b"500 Internal Server Error"}


@dataclass(frozen=True)
class Plan:
    """The course of one turn: silence at first, then an answer with its head, or the next of its events every `gap_s`.

    An event is computed when it is sent. With `breaks` the connection is closed where the turn would otherwise end;
    without an answer or events that is before the head.
    """

    wait_s: float = 0.0
    answer: bytes = b""
    events: Iterator[bytes] | None = None
    gap_s: float = 0.0
    breaks: bool = False


Planner = Callable[[str, bytes], Plan]
"""Maps a path and a body to the course of that turn."""


def whole(status: int, content_type: str, body: bytes) -> bytes:
    """Return an answer with its head."""
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (STATUS_LINES[status], content_type.encode(), len(body)) + body


def event_of(payload: dict[str, object], name: str = "") -> bytes:
    """Return a server-sent event."""
    data = b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data


class DripEngine:
    """One replica: its number of current turns, and the protocol of its connections."""

    def __init__(self, plan: Planner, capacity_tokens: int) -> None:
        """Answer turns by `plan`."""
        self.plan = plan
        self.metrics = whole(200, "text/plain", METRICS % capacity_tokens)
        self.connections_count = 0
        self.turns_count = 0
        """Current number."""
        self.left_count = 0
        """Turns whose peer closed the connection before their end."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Run it for the length of the block; yield its port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=16_384)
        async with server:
            yield server.sockets[0].getsockname()[1]


class _Connection(asyncio.Protocol):
    """One connection: a turn at a time."""

    def __init__(self, engine: DripEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._plan: Plan | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._engine.connections_count += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._engine.connections_count -= 1
        if self._timer is not None:
            self._timer.cancel()
        if self._plan is not None:
            self._engine.left_count += 1
            self._engine.turns_count -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            method, target, _ = head.partition(b"\r\n")[0].split(b" ", 2)
            self._answer(method, target.decode(), body)

    def _answer(self, method: bytes, path: str, body: bytes) -> None:
        if path == "/metrics":
            self._transport.write(self._engine.metrics)
        elif method == b"GET":
            self._transport.write(whole(200, "application/json", b"{}"))
        else:
            plan = self._plan = self._engine.plan(path, body)
            self._engine.turns_count += 1
            self._timer = asyncio.get_running_loop().call_later(plan.wait_s, self._begin, plan)

    def _begin(self, plan: Plan) -> None:
        if plan.events is not None:
            self._transport.write(STREAM_HEAD)
            self._drip(plan, plan.events)
        else:
            self._transport.write(plan.answer)
            self._end(plan)

    def _drip(self, plan: Plan, events: Iterator[bytes]) -> None:
        event = next(events, None)
        if event is not None:
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._timer = asyncio.get_running_loop().call_later(plan.gap_s, self._drip, plan, events)
            return
        if not plan.breaks:
            self._transport.write(LAST_CHUNK)
        self._end(plan)

    def _end(self, plan: Plan) -> None:
        self._plan = self._timer = None
        self._engine.turns_count -= 1
        if plan.breaks:
            self._transport.close()
