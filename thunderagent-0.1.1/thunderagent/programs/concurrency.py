"""How many programs would be useful now: for trainers, which can start as many as they like.

Theory of operation
===================
With fewer programs than memory carries, engines idle. With many more, the rest wait, and that wait is the latency of a
batch: nothing is computed sooner. So the useful number is the sum of

- what memory carries: what may be claimed on all replicas, over a program's size with its expected growth;
- programs at tools without a claim: they take no memory, and come back;
- programs that should wait, so that freed room is taken at once: `WAITING_RATIO` of what memory carries, and at least
  one.

If an engine has turns in its own queue, compute is short, not memory: then no more are useful than there are. Until
some programs have ended, nobody knows how large they become, only that they begin small: then `UNKNOWN_RATIO` of those
that seem to fit are useful. The number may at most double at any time: nobody should follow a wrong signal far.

The count changes with every turn. So it is smoothed over `HALF_LIFE_S`, and the published number changes only if it is
off by more than `DEAD_RATIO`, and by at least one: noise then starts and stops nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf
from typing import Final

from thunderagent.programs.scheduler import Scheduler

WAITING_RATIO: Final = 0.5
"""How many programs should wait, as a ratio of those that memory carries."""

UNKNOWN_RATIO: Final = 0.5
"""Ratio of what memory would carry that is useful until it is known how large programs become."""

FIRST_COUNT: Final = 4
"""How many programs a replica can use in any case, until their size is known."""

LARGEST_STEP_RATIO: Final = 2.0
"""At most this many times the current number are said to be useful."""

ENGINE_QUEUE_RATIO: Final = 0.25
"""An engine whose own queue exceeds this ratio of its turns is short of compute."""

HALF_LIFE_S: Final = 30.0
DEAD_RATIO: Final = 0.15


class Why(StrEnum):
    """What limits the number of useful programs."""

    MEMORY = "memory"
    """Memory is the limit."""
    SIZES = "sizes"
    """It is not known yet how large programs become."""
    STEP = "step"
    """More may be useful; that shows once these are there."""
    ENGINE = "engine"
    """The engines have turns in their own queues."""
    CAPACITY_UNKNOWN = "capacity_unknown"
    """A replica does not report its memory size: nobody is held there, and nobody knows how many fit."""
    NO_REPLICA = "no_replica"
    """No replica grants anything now."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many programs are useful, and how many there are: active, waiting, or at a tool and expected back."""

    useful_count: float
    programs_count: int
    why: Why


def concurrency(scheduler: Scheduler) -> Concurrency:
    """Return how many programs are useful in a pool now. Cost: O(replicas)."""
    book, queue = scheduler.book, scheduler.queue
    accounts = [replica.account for replica in book.granting_replicas]
    away_count = queue.resting.count + book.destined.count
    there_count = book.active_count + queue.waiting_count + away_count
    if not accounts:
        return Concurrency(there_count, there_count, Why.NO_REPLICA)
    limit_tokens = sum(account.limit_tokens for account in accounts)
    if limit_tokens == inf:
        return Concurrency(there_count, there_count, Why.CAPACITY_UNKNOWN)
    most_count = max(FIRST_COUNT * len(accounts), LARGEST_STEP_RATIO * there_count)
    active_count = sum(account.active_count for account in accounts)
    if not active_count:
        return Concurrency(most_count, there_count, Why.STEP)
    claimed_tokens = sum(account.demand_tokens + account.growth_tokens for account in accounts)
    fitting_count = max(1.0, limit_tokens * active_count / max(1, claimed_tokens))
    if scheduler.knowledge.growth.whole_tokens == inf:
        useful_count = max(FIRST_COUNT * len(accounts), UNKNOWN_RATIO * fitting_count + away_count)
        return Concurrency(min(most_count, useful_count), there_count, Why.SIZES)
    useful_count = fitting_count + away_count + max(1, ceil(WAITING_RATIO * fitting_count))
    engine_waiting_count = sum(account.engine_waiting_count for account in accounts)
    engines_queue = engine_waiting_count > ENGINE_QUEUE_RATIO * sum(account.turn_count for account in accounts)
    if engines_queue and useful_count > there_count:
        return Concurrency(there_count, there_count, Why.ENGINE)
    if useful_count > most_count:
        return Concurrency(most_count, there_count, Why.STEP)
    return Concurrency(useful_count, there_count, Why.MEMORY)


class SteadyCount:
    """A published count: it changes only for lasting changes."""

    __slots__ = ("_level_count", "_updated_s", "count")

    def __init__(self) -> None:
        """Create one without a published count."""
        self.count = 0
        self._level_count: float | None = None
        self._updated_s = 0.0

    def update(self, useful_count: float, now_s: float) -> int:
        """Add the current count; return the published one. The first is published as it is."""
        if self._level_count is None:
            self._level_count = useful_count
            self.count = max(1, int(useful_count))
        else:
            kept_ratio = 0.5 ** (max(0.0, now_s - self._updated_s) / HALF_LIFE_S)
            self._level_count = useful_count + (self._level_count - useful_count) * kept_ratio
            if abs(self._level_count - self.count) > max(1.0, DEAD_RATIO * self.count):
                self.count = max(1, int(self._level_count))
        self._updated_s = now_s
        return self.count
