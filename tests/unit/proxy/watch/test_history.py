"""Samples, rates and percentiles of the last quarter of an hour."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tests.builders import Driver
from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.backends.vllm import VllmBackend
from thunderagent.programs.messages import Grant, Hold, Reason
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.watch.history import KEPT_COUNT, WINDOW_S, History
from thunderagent.proxy.watch.turn_metrics import PERCENTILE_BUCKETS_S, TurnMetrics
from thunderagent.runtime import Runtime


class World:
    """A history whose clocks a test moves."""

    def __init__(self) -> None:
        self.driver = Driver(Cap(1))
        self.runtime = Runtime(self.driver.scheduler, clock=lambda: self.driver.now_s)
        self.replicas = Replicas(self.runtime, [ReplicaEndpoint("r0", "http://127.0.0.1:1", VllmBackend())])
        self.metrics = TurnMetrics(CollectorRegistry())
        self.history = History(
            self.runtime,
            self.replicas,
            self.metrics.latency_counts,
            wall_clock=lambda: 1_000_000.0 + self.driver.now_s,
        )

    def samples(self, count: int) -> None:
        """Let a number of seconds pass."""
        for _ in range(count):
            self.driver.passes(1.0)
            self.history.sample()

    def held(self, *seconds: float) -> None:
        for wait_s in seconds:
            self.metrics.turn_granted(wait_s, 0.0)

    def cache(self, queries: float, hits: float) -> None:
        self.replicas.known["r0"].reading = ReplicaReading(
            cache_query_tokens_total=queries, cache_hit_tokens_total=hits
        )


def test_rates_are_over_the_last_minute() -> None:
    """Earlier events do not count, and are not forgotten too early."""
    world = World()
    world.samples(30)
    world.runtime.outcome_counts["finished"] += 100
    world.samples(50)
    _, rates = world.history.now()
    assert (rates.window_s, rates.turns_per_min) == (60.0, 100.0)
    world.samples(15)
    assert world.history.now()[1].turns_per_min == 0.0


def test_a_proxy_that_has_just_started_has_a_shorter_window() -> None:
    world = World()
    world.runtime.outcome_counts["finished"] += 5
    world.runtime.output_tokens_total += 600
    world.samples(10)
    _, rates = world.history.now()
    assert (rates.window_s, rates.turns_per_min, rates.output_tokens_per_s) == (10.0, 30.0, 60.0)


def test_only_so_many_samples_are_kept_and_given_after_a_time() -> None:
    world = World()
    world.samples(KEPT_COUNT + 10)
    samples = world.history.since(0)
    assert len(samples) == KEPT_COUNT
    assert samples[-1].at_s - samples[0].at_s == KEPT_COUNT - 1
    assert world.history.since(samples[-3].at_s) == samples[-2:]
    assert world.history.since(samples[-1].at_s) == []
    assert len(world.history.since(-1e308)) == KEPT_COUNT


def test_programs_are_counted_by_status_and_phase() -> None:
    world = World()
    world.driver.arrives("a", 100)
    world.driver.arrives("b", 100)
    sample, _ = world.history.now()
    assert (sample.active_reasoning_count, sample.paused_reasoning_count) == (1, 1)
    world.driver.finishes("a", 100)
    sample, _ = world.history.now()
    counts = (
        sample.active_reasoning_count,
        sample.active_acting_count,
        sample.paused_reasoning_count,
        sample.paused_acting_count,
    )
    assert sum(counts) == len(world.driver.scheduler.programs) == 2


def test_idling_while_programs_are_held_is_a_part_of_the_last_minute() -> None:
    """`b` waits for 15 s while the tool of `a` runs; then `a` has a turn. A replica that goes takes nothing away."""
    world = World()
    world.samples(60)
    world.driver.takes_turn("a", 100)
    world.driver.arrives("b", 100)
    world.samples(15)
    world.driver.arrives("a", 110)
    world.samples(15)
    sample, rates = world.history.now()
    assert (sample.idle_held_s, rates.idle_held_ratio) == (15.0, 0.25)
    world.driver.is_removed("r0")
    sample, rates = world.history.now()
    assert (sample.idle_held_s, rates.idle_held_ratio) == (15.0, None)


def test_hits_are_what_grew_whatever_engine_began_anew() -> None:
    """The totals of a restarted engine fall, which is neither a hit nor a miss."""
    world = World()
    world.cache(1000, 900)  # before the first look
    world.samples(1)
    world.cache(1100, 950)
    world.samples(1)
    assert world.history.now()[1].hit_ratio == 0.5
    world.cache(10, 0)
    world.samples(1)
    assert world.history.now()[1].hit_ratio == 0.5
    world.cache(110, 100)
    sample, rates = world.history.now()
    assert (sample.cache_query_tokens_total, sample.cache_hit_tokens_total) == (200, 150)
    assert rates.hit_ratio == 0.75


def test_most_turns_are_anonymous_once_there_were_a_few() -> None:
    """A part is shown for any number; "most" needs more than a few turns, and covers only the last minute."""
    world = World()
    counts = world.runtime.decision_counts
    counts[Grant, Reason.ANONYMOUS] += 3
    _, rates = world.history.now()
    assert (rates.anonymous_ratio, rates.mostly_anonymous) == (1.0, False)
    counts[Grant, Reason.ANONYMOUS] += 30
    counts[Grant, Reason.HOME] += 7
    counts[Hold, Reason.NO_ROOM] += 100
    sample, rates = world.history.now()
    assert (sample.turns_granted_total, sample.anonymous_turns_total) == (40, 33)
    assert (rates.anonymous_ratio, rates.mostly_anonymous) == (0.825, True)
    counts[Grant, Reason.FITS] += 26
    assert world.history.now()[1].mostly_anonymous is False
    world.samples(70)
    _, rates = world.history.now()
    assert (rates.anonymous_ratio, rates.mostly_anonymous) == (None, False)


def test_nothing_is_known_where_nothing_was_looked_up_or_held() -> None:
    world = World()
    world.samples(2)
    _, rates = world.history.now()
    assert (rates.hit_ratio, rates.held_p50_s, rates.held_p99_s) == (None, None, None)


def test_latency_is_of_the_last_minute() -> None:
    """What was before is forgotten; each time has percentiles of its own, and errors have no duration."""
    world = World()
    world.held(*[100.0] * 50)
    world.metrics.turn_ended("r0", 200, 70.0, 50.0)
    world.samples(61)
    world.held(*[0.0] * 60, *[7.5] * 40)
    for number in range(1, 101):
        world.metrics.turn_ended("r0", 200, number / 10, number / 100)
        world.metrics.turn_ended("r0", 503, 0.001)
        world.metrics.turn_ended(None, None, 500.0)
    sample, _ = world.history.now()
    assert sample.held_p50_s == 0.0
    assert sample.held_p90_s == pytest.approx(7.5, rel=0.2)
    assert sample.held_p99_s == pytest.approx(7.5, rel=0.2)
    first, turn = sample.first_token, sample.turn
    assert (first.p50_s, first.p90_s, first.p99_s) == pytest.approx((0.5, 0.9, 0.99), rel=0.19)
    assert (turn.p50_s, turn.p90_s, turn.p99_s) == pytest.approx((5.0, 9.0, 9.9), rel=0.19)
    world.samples(62)
    sample, _ = world.history.now()
    assert (sample.held_p99_s, sample.first_token.p50_s, sample.turn.p99_s) == (None, None, None)


@pytest.mark.parametrize(
    ("waits_s", "expected"),
    [
        ([], None),
        ([0.0005], 0.0),
        ([0.0, 0.0, 0.0, 3.0], 0.0),
        ([0.004] * 10, 0.004),
        ([3.0] * 10, 3.0),
        ([600.0] * 10, 600.0),
        ([20_000.0], PERCENTILE_BUCKETS_S[-1]),
    ],
)
def test_a_median_is_as_exact_as_its_bucket(waits_s: list[float], expected: float | None) -> None:
    world = World()
    world.held(*waits_s)
    sample, _ = world.history.now()
    assert sample.held_p50_s == (expected if not expected else pytest.approx(expected, rel=0.19))


def test_counts_of_the_last_minute_alone_are_kept() -> None:
    """However long it runs, and however seldom it could take its samples."""
    world = World()
    world.samples(KEPT_COUNT)
    assert len(world.history._window) <= WINDOW_S + 2
    world.driver.passes(1000.0)
    world.history.now()
    assert len(world.history._window) == 1


def test_errors_are_a_rate_without_those_whose_clients_left() -> None:
    world = World()
    counts = world.runtime.outcome_counts
    counts.update({"refused": 1, "failed": 2, "errored": 3, "rejected": 4, "abandoned": 5, "finished": 100})
    world.samples(60)
    sample, rates = world.history.now()
    assert sample.ended_badly_total == {"refused": 1, "failed": 2, "errored": 3, "rejected": 4, "abandoned": 5}
    assert (rates.errors_per_min, rates.abandoned_per_min) == (10.0, 5.0)


def test_a_turn_that_waits_is_seen_while_it_waits() -> None:
    """The percentiles are of turns that were let in; the longest wait is of those that were not."""
    world = World()
    world.driver.takes_turn("a", 100)
    world.driver.arrives("a", 110)
    world.driver.arrives("b", 100)
    world.samples(47)
    sample, _ = world.history.now()
    assert (sample.longest_held_s, sample.held_p50_s) == (47.0, None)


def test_the_limit_is_unknown_where_a_replicas_is() -> None:
    world = World()
    sample, _ = world.history.now()
    assert sample.limit_tokens is not None
    other = Driver(Cap(1), replicas={"r0": None})
    history = History(Runtime(other.scheduler, clock=lambda: other.now_s), world.replicas, world.metrics.latency_counts)
    assert history.now()[0].limit_tokens is None
