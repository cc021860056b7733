"""How long a client is waited for: for its next head, to read its answer, to finish sending, or to prove it is there.

The end of what a client sends may only end its requests, and then it waits for its answer (RFC 9112, 9.6). A client
that left looks the same until something is sent: a closed peer refuses it. So such a client gets an interim answer now
and then, which means nothing and which clients skip (RFC 9110, 15.2). If one is refused the client has left, and its
turn ends as usual. HTTP/1.0 has no interim answers; there the client stays only for a moment. Nor may one follow a
head; from then on the client shows itself by reading. A client that sent so much ahead that nothing more is read from
it is probed, too.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
from math import inf
from typing import Final, Protocol

import structlog

from thunderagent.proxy.wire.http11.asked import CONTINUE
from thunderagent.proxy.wire.http11.heads import RequestHead
from thunderagent.proxy.wire.http11.limits import Sweep

log = structlog.get_logger("thunderagent.stall")

LINGER_S: Final = 2.0
"""For a client to finish sending unread bytes."""

PROBES_AFTER_S = (0.0, 0.02, 0.1, 0.5, 2.0)
"""A client that sends nothing more is probed at once, and again after each of these times; then always after the last.
A client that left refuses the second probe, if it was near enough to get the first."""

OLD_CLIENT_S: Final = 1.0
"""For an answer to a client of HTTP/1.0 that sends nothing more."""

STALL_LOOKS_COUNT: Final = 4
"""How often a client is checked within the limit before it counts as reading nothing."""


class Due(Protocol):
    """An answer that a client waits for."""

    begun: bool
    """Whether part of it was written."""
    head: RequestHead
    """Of the request."""


class Waiting:
    """What one client's connection waits for."""

    __slots__ = (
        "_asked",
        "_idle_s",
        "_looks_count",
        "_loop",
        "_probes_count",
        "_queued_bytes",
        "_stall_s",
        "_sweep",
        "_transport",
        "due_s",
    )  # fmt: skip

    def __init__(self, transport: asyncio.Transport, sweep: Sweep, idle_s: float, stall_s: float) -> None:
        """Wait for a first head. A late connection is closed."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._sweep = sweep
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._queued_bytes = 0
        self._looks_count = 0
        self._asked: Due | None = None
        self._probes_count = 0
        self.due_s = self._loop.time() + idle_s
        sweep.add(self)

    def over(self) -> None:
        """Stop waiting: the connection is closed."""
        self._sweep.remove(self)
        self._asked = None

    def for_head(self) -> None:
        """Wait for the next head; first for pending output to be read, if that is waited for."""
        if self.due_s == inf or self._asked is not None:
            self._asked = None
            self._until(self._idle_s)

    def for_answer(self) -> None:
        """Wait as long as an answer takes."""
        self.due_s = inf

    def for_room(self) -> None:
        """Wait for the client to read some of the output."""
        self._asked = None
        self._queued_bytes, self._looks_count = self._transport.get_write_buffer_size(), 0
        self._until(self._stall_s / STALL_LOOKS_COUNT)

    def for_end(self) -> None:
        """Wait for the client to finish sending unread bytes."""
        self._asked = None
        self._until(LINGER_S)

    def for_sign(self, asked: Due) -> None:
        """Probe the client again and again while its answer has not begun."""
        if not asked.begun:
            self._asked, self._probes_count = asked, 0
            self._probe(asked)

    def late(self, now_s: float) -> None:
        """Close a late connection, or check again."""
        if self._asked is not None:
            if not self._asked.begun:
                self._probe(self._asked)
            else:
                self._asked, self.due_s = None, inf
            return
        queued_bytes = self._transport.get_write_buffer_size()
        if queued_bytes != self._queued_bytes:  # it read something, or more was written
            self._queued_bytes, self._looks_count = queued_bytes, 0
        self._looks_count += 1
        if queued_bytes and self._looks_count < STALL_LOOKS_COUNT:
            self.due_s = now_s + self._stall_s / STALL_LOOKS_COUNT
            return
        if queued_bytes:
            log.warning("client_stalled", limit_s=self._stall_s)
        self.due_s = inf
        self._transport.abort()  # closing it would wait for the client to read

    def _until(self, wait_s: float) -> None:
        self.due_s = self._loop.time() + wait_s
        self._sweep.hasten(self.due_s)

    def _probe(self, asked: Due) -> None:
        """Send what only a client that left refuses; the transport then reports the end."""
        if self._transport.is_closing():
            return
        self._probes_count += 1
        if not asked.head.is_http_11:
            if self._probes_count > 1:
                self._transport.close()
            self._until(OLD_CLIENT_S)
            return
        self._transport.write(CONTINUE)
        self._until(PROBES_AFTER_S[min(self._probes_count, len(PROBES_AFTER_S)) - 1])
