"""Limits on how often a caller may ask: data requests wait for their turn, requests to the admin API get 429.

Each caller has a bucket that holds `burst_count` requests and fills by `per_s` a second. A data request that finds it
empty waits in line, because clients such as Codex give up at a 429; one that leaves the line leaves no debt behind.
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
"""So many callers are remembered; the one that asked least recently is forgotten, which fills its bucket."""


@dataclass(slots=True)
class _Bucket:
    left_count: float
    filled_s: float
    line: asyncio.Lock = field(default_factory=asyncio.Lock)


class RateLimits:
    """Buckets by caller: the name of a key, or an address."""

    def __init__(
        self, per_s: float, burst_count: int, registry: CollectorRegistry, clock: Callable[[], float] | None = None
    ) -> None:
        """Let each caller ask `burst_count` times at once, and `per_s` times a second in the long run."""
        self._rate_per_s = per_s
        self._burst_count = burst_count
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._limited = Counter(
            "thunderagent_rate_limited",
            "Requests over a caller's rate limit, by what became of them: waited, refused.",
            labelnames=["outcome"],
            registry=registry,
        )

    async def wait(self, caller: str) -> None:
        """Wait until a caller may ask once more, behind those of its requests that wait already."""
        bucket = self._bucket(caller)
        if not bucket.line.locked() and not self._missing_s(bucket):
            bucket.left_count -= 1
            return
        self._limited.labels("waited").inc()
        async with bucket.line:
            while missing_s := self._missing_s(bucket):  # noqa: ASYNC110 - time is what is waited for
                await asyncio.sleep(missing_s)
            bucket.left_count -= 1

    def check(self, caller: str) -> None:
        """Take a request of a caller's, or raise `RateLimitedError`."""
        bucket = self._bucket(f"admin {caller}")  # apart from its data requests
        if missing_s := self._missing_s(bucket):
            self._limited.labels("refused").inc()
            error = RateLimitedError(f"more than {self._rate_per_s:g} requests a second")
            error.retry_after_s = ceil(missing_s)
            raise error
        bucket.left_count -= 1

    def _bucket(self, caller: str) -> _Bucket:
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = _Bucket(self._burst_count, self._now_s())
            if len(self._buckets) > MAX_CALLERS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(caller)
        return bucket

    def _missing_s(self, bucket: _Bucket) -> float:
        """Fill a bucket up to now; return how long it takes until it holds a request, in seconds."""
        now_s = self._now_s()
        grown_count = bucket.left_count + (now_s - bucket.filled_s) * self._rate_per_s
        bucket.left_count, bucket.filled_s = min(self._burst_count, grown_count), now_s
        return max(0.0, (1 - bucket.left_count) / self._rate_per_s) if bucket.left_count < 1 - 1e-9 else 0.0

    def _now_s(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()
