"""The last quarter of an hour, one sample per second: for a dashboard that was just opened.

A sample is read from sums that are kept anyway: by the scheduler, and by the metrics, which count each turn's times in
fine buckets for it. Totals only grow, so the difference of two samples is what happened between them. Of the buckets
the last minute is kept: what a sample says of the latency is the percentiles of the minute before it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate, chain, islice
from math import isfinite

from pydantic import Field

from thunderagent.programs.messages import Grant, Reason
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.bodies import Report
from thunderagent.proxy.watch.autoscaling import oldest_hold_s
from thunderagent.proxy.watch.turn_metrics import PERCENTILE_BUCKETS_S
from thunderagent.runtime import Runtime

INTERVAL_S = 1.0
KEPT_COUNT = 900
WINDOW_S = 60.0
"""Window of rates and percentiles."""
FEW_TURNS_COUNT = 10
"""With fewer turns, a high ratio of turns without a program is not reported."""
ERRORS = ("refused", "failed", "errored", "rejected")
"""Ends of turns that are errors; outcomes as in the metric `thunderagent_turns`."""
ABANDONED = "abandoned"

Counts = tuple[int, ...]
"""How many turns were in each of `PERCENTILE_BUCKETS_S`, and above."""


class Percentiles(Report):
    """Of a time, over the turns of the minute before; null without turns."""

    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class Sample(Report):
    """State at one time, over all replicas. None is unknown."""

    at_s: float = Field(description="Unix time")
    active_reasoning_count: int
    active_acting_count: int
    paused_reasoning_count: int
    paused_acting_count: int
    turns_in_flight_count: int
    turns_held_count: int
    turns_finished_total: int
    turns_granted_total: int
    anonymous_turns_total: int = Field(description="of the granted ones, those that named no program")
    prompt_tokens_total: int
    output_tokens_total: int
    cache_query_tokens_total: int
    cache_hit_tokens_total: int
    demand_tokens: int
    limit_tokens: int | None
    costs_token_s: dict[str, float]
    idle_held_s: float = Field(
        description="how long replicas had no turn in flight while programs were held for memory"
    )
    ended_badly_total: dict[str, int] = Field(
        description="turns by outcome, without the finished: refused, failed, errored, rejected, abandoned"
    )
    longest_held_s: float | None = Field(
        description="of the turns that wait, how long the oldest has; null: none waits"
    )
    held_p50_s: float | None
    held_p90_s: float | None
    held_p99_s: float | None
    first_token: Percentiles = Field(description="time from a turn's arrival to the first token, of streams")
    turn: Percentiles = Field(description="time from a turn's arrival to the end of its answer, without errors")


class Rates(Report):
    """What happened in the last `window_s`, by time."""

    window_s: float
    turns_per_min: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_ratio: float | None
    anonymous_ratio: float | None = Field(description="part of the turns that named no program; null without turns")
    idle_held_ratio: float | None = Field(
        description="part of the time in which replicas had no turn in flight while programs were held for memory"
    )
    mostly_anonymous: bool = Field(description="most turns named no program, and there were more than a few")
    errors_per_min: float = Field(description="turns that were refused, failed, errored or rejected; each try counts")
    abandoned_per_min: float = Field(description="turns whose client left")
    held_p50_s: float | None
    held_p90_s: float | None
    held_p99_s: float | None


class History:
    """The ring of samples. `latency_counts` returns what `TurnMetrics.latency_counts` does."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        latency_counts: Callable[[], tuple[Counts, ...]],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Start with one sample of a proxy that has done nothing yet."""
        self._runtime = runtime
        self._replicas = replicas
        self._latency_counts = latency_counts
        self._epoch_s = wall_clock() - runtime.now_s()
        """Unix time of the runtime's second 0: samples follow its clock, which is never set back."""
        self._cache_totals = _CacheTotals()
        self._samples: deque[Sample] = deque(maxlen=KEPT_COUNT)
        self._window: deque[tuple[Sample, tuple[Counts, ...]]] = deque()
        """The samples of the last minute, at least the last one, with the counts of their time."""
        self.started_s = round(self._epoch_s + runtime.now_s(), 3)
        self.sample()

    def __repr__(self) -> str:
        return f"<History of {len(self._samples)} samples>"

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Take a sample and keep it."""
        taken = self._take()
        self._samples.append(taken[0])
        self._window.append(taken)

    def since(self, at_s: float) -> list[Sample]:
        """Return the samples after a Unix time, the oldest first."""
        times_s = [sample.at_s for sample in self._samples]
        return list(islice(self._samples, bisect_right(times_s, at_s), None))

    def now(self) -> tuple[Sample, Rates]:
        """Return a current sample, and what happened in the last `WINDOW_S`. Cost: as a sample."""
        sample, _ = self._take()
        before, _ = self._window[0]
        elapsed_s = max(1e-3, sample.at_s - before.at_s)
        queries = sample.cache_query_tokens_total - before.cache_query_tokens_total
        hits = sample.cache_hit_tokens_total - before.cache_hit_tokens_total
        granted_count = sample.turns_granted_total - before.turns_granted_total
        anonymous_count = sample.anonymous_turns_total - before.anonymous_turns_total
        ended_badly = {
            outcome: count - before.ended_badly_total[outcome] for outcome, count in sample.ended_badly_total.items()
        }
        rates = Rates(
            window_s=round(elapsed_s, 1),
            turns_per_min=_per(sample.turns_finished_total - before.turns_finished_total, elapsed_s / 60),
            prompt_tokens_per_s=_per(sample.prompt_tokens_total - before.prompt_tokens_total, elapsed_s),
            output_tokens_per_s=_per(sample.output_tokens_total - before.output_tokens_total, elapsed_s),
            hit_ratio=round(min(1.0, hits / queries), 4) if queries else None,
            anonymous_ratio=round(anonymous_count / granted_count, 4) if granted_count else None,
            mostly_anonymous=granted_count > FEW_TURNS_COUNT and 2 * anonymous_count > granted_count,
            idle_held_ratio=self._idle_held_ratio(sample.idle_held_s - before.idle_held_s, elapsed_s),
            errors_per_min=_per(sum(ended_badly[outcome] for outcome in ERRORS), elapsed_s / 60),
            abandoned_per_min=_per(ended_badly[ABANDONED], elapsed_s / 60),
            held_p50_s=sample.held_p50_s,
            held_p90_s=sample.held_p90_s,
            held_p99_s=sample.held_p99_s,
        )
        return sample, rates

    def _idle_held_ratio(self, idle_s: float, elapsed_s: float) -> float | None:
        """Return the part of the replicas' time; None if no replica is open."""
        count = sum(len(scheduler.open_replicas) for scheduler in self._runtime.pools.schedulers)
        return round(min(1.0, idle_s / (elapsed_s * count)), 4) if count else None

    def _take(self) -> tuple[Sample, tuple[Counts, ...]]:
        """Return a sample as of now, with its counts. Costs O(replicas + turns held)."""
        runtime, schedulers = self._runtime, self._runtime.pools.schedulers
        now_s = runtime.now_s()
        at_s = self._epoch_s + now_s
        self._cache_totals.read(self._replicas)
        window, counts = self._window, self._latency_counts()
        while len(window) > 1 and window[0][0].at_s < at_s - WINDOW_S:
            window.popleft()
        before = window[0][1] if window else [(0,) * len(each) for each in counts]
        held, first_token, turn = map(_percentiles, counts, before)
        longest_held_s = oldest_hold_s(schedulers, now_s)
        reasoning_count = acting_count = turn_count = demand_tokens = 0
        limit_tokens = 0.0
        all_costs = [scheduler.ledger.closed_costs for scheduler in schedulers]
        idle_held_s = sum(scheduler.ledger.closed_idle_held_s for scheduler in schedulers)
        for scheduler, replica in ((each, replica) for each in schedulers for replica in each.replicas.values()):
            account = replica.account
            scheduler.ledger.accrue(account, now_s)
            reasoning_count += account.reasoning_count
            acting_count += account.acting.count
            turn_count += account.turn_count
            demand_tokens += account.demand_tokens
            if replica.open_to_programs:
                limit_tokens += account.limit_tokens
            all_costs.append(account.costs)
            idle_held_s += account.idle_held_s
        costs: dict[str, float] = {}
        for name, value in chain.from_iterable(asdict(each).items() for each in all_costs):
            costs[name] = costs.get(name, 0.0) + value
        paused_reasoning_count = sum(scheduler.queue.waiting_count for scheduler in schedulers)
        paused_count = sum(len(scheduler.programs) - scheduler.book.active_count for scheduler in schedulers)
        sample = Sample(
            at_s=round(at_s, 3),
            active_reasoning_count=reasoning_count,
            active_acting_count=acting_count,
            paused_reasoning_count=paused_reasoning_count,
            paused_acting_count=paused_count - paused_reasoning_count,
            turns_in_flight_count=turn_count,
            turns_held_count=self._runtime.held_count,
            turns_finished_total=runtime.outcome_counts["finished"],
            turns_granted_total=sum(
                number for (decision, _), number in runtime.decision_counts.items() if decision is Grant
            ),
            anonymous_turns_total=runtime.decision_counts[Grant, Reason.ANONYMOUS],
            prompt_tokens_total=runtime.prompt_tokens_total,
            output_tokens_total=runtime.output_tokens_total,
            cache_query_tokens_total=int(self._cache_totals.query_tokens),
            cache_hit_tokens_total=int(self._cache_totals.hit_tokens),
            demand_tokens=demand_tokens,
            limit_tokens=int(limit_tokens) if isfinite(limit_tokens) else None,
            costs_token_s={k.removesuffix("_token_s"): round(v, 1) for k, v in costs.items()},
            idle_held_s=round(idle_held_s, 3),
            ended_badly_total={outcome: runtime.outcome_counts[outcome] for outcome in (*ERRORS, ABANDONED)},
            longest_held_s=None if longest_held_s is None else round(longest_held_s, 3),
            held_p50_s=held.p50_s,
            held_p90_s=held.p90_s,
            held_p99_s=held.p99_s,
            first_token=first_token,
            turn=turn,
        )
        return sample, counts


class _CacheTotals:
    """Engines' lookups and hits in their prefix caches since the start, across engine restarts."""

    def __init__(self) -> None:
        self.query_tokens = 0.0
        self.hit_tokens = 0.0
        self._last: dict[str, tuple[float, float]] = {}

    def read(self, replicas: Replicas) -> None:
        """Add the growth since the last call."""
        for replica_id, known in replicas.known.items():
            queries, hits = known.reading.cache_query_tokens_total, known.reading.cache_hit_tokens_total
            if queries is None or hits is None:
                continue
            last_queries, last_hits = self._last.get(replica_id, (queries, hits))
            if queries >= last_queries and hits >= last_hits:
                self.query_tokens += queries - last_queries
                self.hit_tokens += hits - last_hits
            self._last[replica_id] = (queries, hits)
        self._last = {replica_id: last for replica_id, last in self._last.items() if replica_id in replicas.known}


def _percentiles(counts: Counts, before: Counts) -> Percentiles:
    """Return the percentiles of the turns that came to the counts since."""
    up_to = list(accumulate(now - then for now, then in zip(counts, before, strict=True)))
    return Percentiles(p50_s=quantile_s(up_to, 0.5), p90_s=quantile_s(up_to, 0.9), p99_s=quantile_s(up_to, 0.99))


def quantile_s(counts_up_to: Sequence[int], part_ratio: float) -> float | None:
    """Return the time that this ratio of the turns took at most; None if there were none.

    The counts are of turns up to each of `PERCENTILE_BUCKETS_S`, and in all. Within a bucket it is interpolated, as in
    Prometheus; in the first, of a millisecond, it is 0, and above all it is the last bound.
    """
    total, bounds_s = counts_up_to[-1], PERCENTILE_BUCKETS_S
    if total <= 0:
        return None
    wanted = part_ratio * total
    index = bisect_left(counts_up_to, wanted)
    if index == 0:
        return 0.0
    if index == len(bounds_s):
        return bounds_s[-1]
    low_s, below = bounds_s[index - 1], counts_up_to[index - 1]
    return round(low_s + (bounds_s[index] - low_s) * (wanted - below) / (counts_up_to[index] - below), 4)


def _per(amount: float, time_: float) -> float:
    return round(amount / time_, 2)
