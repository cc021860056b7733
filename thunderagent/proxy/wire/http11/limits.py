"""What limits are kept by: one timer for all connections, and the clock that stands still while a replica is paused.

A timer of its own for each limit of each connection would be made and cancelled with every piece that comes. Here a
connection only notes when it is due, which mostly moves on. One timer is set to the first that is due; when it goes off
all are looked at, and those that are late hear of it. It goes off the more seldom the more there are, so that looking
takes a small part of the time: with ten thousand connections a limit is kept to within a fifth of a second.

An engine that is paused, sleeps, or gets new weights sends no byte for minutes, and fails nothing by that. So whoever
knows says when such a time begins and ends. Of silence the limit counts anew from its end, as if a byte had come then;
of the whole answer that time is not counted.
"""

# compiled: each turn passes here, on both sides

from __future__ import annotations

import asyncio
import socket
from math import inf
from typing import Final, NamedTuple, Protocol

LEAST_PAUSE_S: Final = 0.01
PAUSE_FOR_EACH_S: Final = 20e-6


class Limits(NamedTuple):
    """How long the parts of a request may take."""

    connect_s: float
    silence_s: float
    """From the connection to the first byte, and between two bytes. It stands still while the replica is paused."""
    total_s: float = inf
    """For all of the answer, from the request on; it stands still, too."""


class Watched(Protocol):
    """What is looked at."""

    due_s: float
    """When it is late, by the loop's clock; infinity for never. To make it earlier, call `Sweep.hasten`."""

    def late(self, now_s: float) -> None:
        """Do what is to be done then, and set `due_s` anew; else it is called again and again."""


class Sweep:
    """Look after what may be late."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look after nothing yet."""
        self._loop = loop
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        """Look after it from now on."""
        self._watched.add(watched)
        self.hasten(watched.due_s)

    def remove(self, watched: Watched) -> None:
        """Look after it no longer; once more changes nothing. Without anything to look after there is no timer."""
        self._watched.discard(watched)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_s = None, inf

    def hasten(self, due_s: float) -> None:
        """Hear that something may be late sooner than it said before."""
        if due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s = due_s
            self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer, self._timer_s = None, inf
        now_s = self._loop.time()
        for watched in [each for each in self._watched if each.due_s <= now_s]:
            watched.late(now_s)
        first_s = min((each.due_s for each in self._watched), default=inf)
        if first_s < inf:
            self.hasten(max(first_s, now_s + LEAST_PAUSE_S + PAUSE_FOR_EACH_S * len(self._watched)))


class Pause:
    """Whether the replica is paused, and for how long it was; `clock_s` stands still meanwhile."""

    __slots__ = ("_clock_s", "_loop", "_since_s", "ended_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin with a replica that is not paused."""
        self._loop = loop
        self._clock_s = 0.0
        """Of all pauses that are over, together."""
        self._since_s: float | None = None
        self.ended_s = -inf
        """When the last one was over, by the loop's clock."""

    @property
    def is_on(self) -> bool:
        """Whether the replica is paused now."""
        return self._since_s is not None

    def set(self, *, on: bool) -> None:
        """Begin a pause, or end it. Once more changes nothing."""
        now_s = self._loop.time()
        if on and self._since_s is None:
            self._since_s = now_s
        elif not on and self._since_s is not None:
            self._clock_s += now_s - self._since_s
            self._since_s = None
            self.ended_s = now_s

    def clock_s(self) -> float:
        """Return seconds that pauses do not count in."""
        return (self._loop.time() if self._since_s is None else self._since_s) - self._clock_s


def notice_lost_peers(transport: asyncio.BaseTransport) -> None:
    """Have the system ask now and then whether the other side is still there: a turn may be held for hours."""
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
