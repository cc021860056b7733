"""How long a replica may be silent, and an answer take: limits that stand still while the replica is paused.

An engine that is paused, sleeps, or gets new weights sends no byte for minutes, and fails nothing by that. So whoever
knows says when such a time begins and ends. Of silence the limit counts anew from its end, as if a byte had come then;
of the whole answer that time is not counted.

aiohttp (3.14) looks after silence by a timer of the connection, and makes a new one with each piece that comes. Here a
connection has one timer: what comes is only noted, and when the timer is due it looks whether there was silence for so
long. aiohttp's own limit for the whole cannot be stopped, so that is one of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

LOOK_AGAIN_S = 1.0
"""While a replica is paused the limit for the whole is looked at so often, at most."""


class Pause:
    """Whether a replica is paused, and for how long it was; `clock_s` stands still meanwhile."""

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


class _PatientConnection(ResponseHandler):
    """A connection whose silence does not count while its replica is paused, and that nothing stays of once closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: Pause) -> None:
        super().__init__(loop=loop)
        self._pause = pause
        self._silent_since_s: float | None = None
        """None while nothing is awaited; the timer may run on, and does nothing when it is due."""
        self._timer_due_s = inf

    def _reschedule_timeout(self) -> None:
        """Count silence anew from now."""
        limit_s = self.read_timeout
        if not limit_s:
            self._silent_since_s = None
            return
        self._silent_since_s = now_s = self._loop.time()
        if now_s + limit_s < self._timer_due_s:
            self._stop_timer()
            self._start_timer(now_s, limit_s)

    def _drop_timeout(self) -> None:
        """Count no more; of a connection that is closed nothing stays."""
        self._silent_since_s = None
        if self.transport is None:
            self._stop_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _start_timer(self, now_s: float, delay_s: float) -> None:
        self._timer_due_s = now_s + delay_s
        self._read_timeout_handle = self._loop.call_later(delay_s, self._on_read_timeout)

    def _stop_timer(self) -> None:
        self._timer_due_s = inf
        if self._read_timeout_handle is not None:
            self._read_timeout_handle.cancel()
            self._read_timeout_handle = None

    def _on_read_timeout(self) -> None:
        self._stop_timer()
        if self._silent_since_s is None:
            return
        now_s, limit_s = self._loop.time(), self.read_timeout or 0.0
        left_s = limit_s if self._pause.is_on else max(self._silent_since_s, self._pause.ended_s) + limit_s - now_s
        if left_s > 0:
            self._start_timer(now_s, left_s)
        else:
            super()._on_read_timeout()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Go on reading, if it was paused; aiohttp (3.14) asks for that with every piece that is taken."""
        if self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

    def close(self) -> None:
        """Close it, and let go of an answer whose head came when nobody waited for it any more.

        The answer's body holds this connection, which holds the answer: both would wait for a collection, which is
        rare. If somebody does wait, because the whole pool is closed, that fails as if the replica had closed it.
        """
        super().close()
        if self._buffer:
            self._buffer.clear()
            self.set_exception(aiohttp.ServerDisconnectedError())


class PatientConnector(aiohttp.TCPConnector):
    """Make connections to a replica that wait while it is paused."""

    def __init__(self, pause: Pause, **options: Any) -> None:
        """Take the options of aiohttp's connector."""
        super().__init__(**options)
        connection: Callable[..., ResponseHandler] = _PatientConnection
        self._factory = partial(connection, loop=self._loop, pause=pause)


class TotalLimit:
    """The limit for a whole answer, from its request on. `head` is the block in which its head is awaited."""

    __slots__ = ("_begun_s", "_content", "_limit_s", "_loop", "_pause", "_timer", "head")

    def __init__(self, limit_s: float, pause: Pause) -> None:
        """Begin now."""
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._pause = pause
        self._begun_s = pause.clock_s()
        self._content: aiohttp.StreamReader | None = None
        self.head = asyncio.timeout(None)
        self._timer = self._loop.call_later(limit_s, self._look)

    def end(self) -> None:
        """Stop: the answer is whole, or nobody waits for it."""
        self._timer.cancel()

    def watch(self, content: aiohttp.StreamReader) -> None:
        """Go on with the body of an answer whose head came."""
        self._content = content

    def _look(self) -> None:
        left_s = self._begun_s + self._limit_s - self._pause.clock_s()
        if left_s > 0 or self._pause.is_on:
            delay_s = max(left_s, LOOK_AGAIN_S) if self._pause.is_on else left_s
            self._timer = self._loop.call_later(delay_s, self._look)
        elif self._content is None:
            self.head.reschedule(self._loop.time())
        elif self._content.exception() is None:
            self._content.set_exception(TimeoutError("the answer took too long"))
