"""How limits are kept: one timer for all connections, and a clock that stands still while a replica is paused.

A timer for each limit of each connection would be created and cancelled with every piece that arrives. Here a
connection only notes when it is due, which mostly moves later. One timer is set to the first due time; when it fires,
all connections are checked, and late ones are told. It fires less often the more there are, so that checking takes a
small part of the time: with ten thousand connections a limit is kept to within a fifth of a second.

An engine that is paused, sleeps, or gets new weights sends no byte for minutes, without failing. So the owner reports
begin and end of such a time. The limit of silence restarts at its end, as if a byte had arrived then; that time does
not count for the whole answer.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import socket
from math import inf
from typing import Final, NamedTuple, Protocol

KEEPALIVE_IDLE_S: Final = 30
"""A peer that sends nothing for this long is probed: most NATs forget a silent connection after minutes."""

KEEPALIVE_INTERVAL_S: Final = 10
KEEPALIVE_PROBES_COUNT: Final = 3
"""A peer that answers none of them is gone: after a minute in all."""

LEAST_PAUSE_S: Final = 0.01
PAUSE_FOR_EACH_S: Final = 20e-6


class Limits(NamedTuple):
    """Time limits for the parts of a request."""

    connect_s: float
    silence_s: float
    """From the connection to the first byte, and between two bytes. It stops while the replica is paused."""
    total_s: float = inf
    """For the whole answer, from the request on; it stops, too."""


class Watched(Protocol):
    """Something with a due time."""

    due_s: float
    """When it is late, by the loop's clock; infinite for never. To make it earlier, call `Sweep.hasten`."""

    def late(self, now_s: float) -> None:
        """Handle being late, and set a new `due_s`; otherwise it is called again and again."""


class Sweep:
    """Watches for what may be late."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start with nothing to watch."""
        self._loop = loop
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.timer_s = inf
        """When it checks next; infinite for never."""

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        """Watch it from now on."""
        self._watched.add(watched)
        self.hasten(watched.due_s)

    def remove(self, watched: Watched) -> None:
        """Stop watching it; idempotent. With nothing to watch there is no timer."""
        self._watched.discard(watched)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer, self.timer_s = None, inf

    def hasten(self, due_s: float) -> None:
        """Note that something may be late earlier than before; changes nothing from `timer_s` on."""
        if due_s < self.timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self.timer_s = due_s
            self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer, self.timer_s = None, inf
        now_s = self._loop.time()
        for watched in [each for each in self._watched if each.due_s <= now_s]:
            watched.late(now_s)
        first_s = min((each.due_s for each in self._watched), default=inf)
        if first_s < inf:
            self.hasten(max(first_s, now_s + LEAST_PAUSE_S + PAUSE_FOR_EACH_S * len(self._watched)))


class Pause:
    """Whether the replica is paused, and for how long in total; `clock_s` stops meanwhile."""

    __slots__ = ("_clock_s", "_loop", "_since_s", "ended_s", "is_on")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start with a replica that is not paused."""
        self._loop = loop
        self._clock_s = 0.0
        """Total of all ended pauses."""
        self._since_s = 0.0
        """When the pause began that is on."""
        self.is_on = False
        """Whether the replica is paused now."""
        self.ended_s = -inf
        """When the last pause ended, by the loop's clock."""

    def set(self, *, on: bool) -> None:
        """Start a pause, or end it. Idempotent."""
        if on == self.is_on:
            return
        now_s, self.is_on = self._loop.time(), on
        if on:
            self._since_s = now_s
        else:
            self._clock_s += now_s - self._since_s
            self.ended_s = now_s

    def clock_s(self) -> float:
        """Return seconds without the pauses."""
        return (self._since_s if self.is_on else self._loop.time()) - self._clock_s


def notice_lost_peers(transport: asyncio.BaseTransport) -> None:
    """Enable keep-alive probes of the other side, within a minute: a turn may be held for hours."""
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES_COUNT)
