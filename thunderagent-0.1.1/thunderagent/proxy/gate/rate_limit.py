"""Limits on request rates: data requests wait in line, requests to the admin API get 429.

Each caller has a bucket that holds `burst_count` requests and fills by `per_s` per second. A data request that finds it
empty waits in line, because clients such as Codex give up at a 429; one that leaves the line leaves no debt.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from prometheus_client import CollectorRegistry, Counter

from thunderagent.errors import RateLimitedError

MAX_CALLERS = 10_000
"""How many callers are remembered; the least recent one is forgotten, which fills its bucket."""


class Bucket:
    """A token bucket that fills by `rate_per_s` up to `capacity_count`; it may be overdrawn."""

    __slots__ = ("_capacity_count", "_filled_s", "_left_count", "_rate_per_s")

    def __init__(self, rate_per_s: float, capacity_count: float, now_s: float) -> None:
        """Start full."""
        self._rate_per_s = rate_per_s
        self._capacity_count = capacity_count
        self._left_count = capacity_count
        self._filled_s = now_s

    def missing_s(self, now_s: float) -> float:
        """Return the seconds until it holds one."""
        self._fill(now_s)
        return max(0.0, (1 - self._left_count) / self._rate_per_s) if self._left_count < 1 - 1e-9 else 0.0

    def take(self, count: float, now_s: float) -> None:
        """Take this many, available or not."""
        self._fill(now_s)
        self._left_count -= count

    def _fill(self, now_s: float) -> None:
        grown_count = self._left_count + (now_s - self._filled_s) * self._rate_per_s
        self._left_count, self._filled_s = min(self._capacity_count, grown_count), now_s


@dataclass(slots=True)
class _Line:
    bucket: Bucket
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RateLimits:
    """Buckets by caller: the name of a key, or an address."""

    def __init__(
        self, per_s: float, burst_count: int, registry: CollectorRegistry, clock: Callable[[], float] | None = None
    ) -> None:
        """Allow each caller `burst_count` requests at once, and `per_s` per second in the long run."""
        self._rate_per_s = per_s
        self._burst_count = burst_count
        self._clock = clock
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._limited = Counter(
            "thunderagent_rate_limited",
            "Requests over a caller's rate limit: waited, or refused on the admin API.",
            labelnames=["outcome"],
            registry=registry,
        )

    def set(self, per_s: float, burst_count: int) -> None:
        """Set the rate from now on; waiting requests keep their times."""
        self._rate_per_s, self._burst_count = per_s, burst_count
        self._lines.clear()

    async def wait(self, caller: str) -> bool:
        """Wait until a caller may send one more request, behind its waiting ones; return whether it had to."""
        line = self._line(caller)
        if not line.lock.locked() and not line.bucket.missing_s(self._now_s()):
            line.bucket.take(1, self._now_s())
            return False
        self._limited.labels("waited").inc()
        async with line.lock:
            while missing_s := line.bucket.missing_s(self._now_s()):  # noqa: ASYNC110 - time is what is waited for
                await asyncio.sleep(missing_s)
            line.bucket.take(1, self._now_s())
        return True

    def check(self, caller: str) -> None:
        """Take one request of a caller, or raise `RateLimitedError`."""
        bucket = self._line(f"admin {caller}").bucket  # separate from its data requests
        if missing_s := bucket.missing_s(self._now_s()):
            self._limited.labels("refused").inc()
            error = RateLimitedError(f"more than {self._rate_per_s:g} requests a second")
            error.retry_after_s = ceil(missing_s)
            raise error
        bucket.take(1, self._now_s())

    def _line(self, caller: str) -> _Line:
        line = self._lines.get(caller)
        if line is None:
            line = self._lines[caller] = _Line(Bucket(self._rate_per_s, self._burst_count, self._now_s()))
            if len(self._lines) > MAX_CALLERS:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(caller)
        return line

    def _now_s(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()
