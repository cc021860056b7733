"""Iterations end at the model's times, whatever the waits in between; a client that left gets no messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from thunderagent.simulator.engine.realtime import Generation, RealtimeEngine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.engine.timing import TimingProfile

SECOND = TimingProfile("second", base_s=1.0, prefill_token_s=0.0, decode_request_s=0.0)
INSTANT = TimingProfile("instant", base_s=0.0, prefill_token_s=0.0, decode_request_s=0.0)


def make_realtime(*, timing: TimingProfile = SECOND, speed: float = 1.0) -> RealtimeEngine:
    return RealtimeEngine(EngineConfig(kv_tokens=160, timing=timing), speed=speed, now_s=100.0)


@contextmanager
def request(realtime: RealtimeEngine, *, whole: bool = False) -> Iterator[tuple[Generation, list[int]]]:
    """Run a request of three output tokens; yield it with the counts in its messages."""
    news: list[int] = []
    engine_request = EngineRequest("a", [1, 2], [3, 4, 5])
    with realtime.generation(
        engine_request, "length", 100.0, whole=whole, on_news=lambda: news.append(generation.generated_count)
    ) as generation:
        yield generation, news


def iterate(realtime: RealtimeEngine, now_s: float) -> float:
    """Run one iteration and return its wait."""
    result = realtime.begin_iteration()
    left_s = realtime.time_left_s(result, now_s)
    realtime.deliver(result)
    return left_s


def test_an_inaccurate_wait_is_made_up_for_by_the_next() -> None:
    realtime = make_realtime()
    with request(realtime):
        assert iterate(realtime, 100.0) == 1.0
        assert iterate(realtime, 101.25) == 0.75


def test_an_iteration_that_is_over_already_counts_as_late() -> None:
    realtime = make_realtime()
    with request(realtime):
        assert iterate(realtime, 103.0) == 0.0
        assert (realtime.late_iteration_count, realtime.lag_s) == (1, 2.0)


def test_an_engine_without_work_is_behind_nothing() -> None:
    realtime = make_realtime()
    with request(realtime):
        for _ in range(3):
            iterate(realtime, 105.0)
    assert (realtime.late_iteration_count, realtime.lag_s) == (3, 0.0)


def test_time_without_work_is_not_made_up_for() -> None:
    realtime = make_realtime()
    realtime.catch_up(150.0)
    with request(realtime):
        assert iterate(realtime, 150.25) == 0.75


def test_speed_divides_what_is_waited_for() -> None:
    realtime = make_realtime(speed=4.0)
    with request(realtime):
        assert iterate(realtime, 100.0) == 0.25


def test_an_iteration_that_takes_no_time_is_never_late() -> None:
    realtime = make_realtime(timing=INSTANT)
    with request(realtime):
        assert iterate(realtime, 107.0) == 0.0
    assert realtime.late_iteration_count == 0


@pytest.mark.parametrize(("whole", "counts"), [(False, [1, 2, 3, 3]), (True, [3])])
def test_news_comes_with_each_token_or_at_the_end_only(whole: bool, counts: list[int]) -> None:
    realtime = make_realtime()
    with request(realtime, whole=whole) as (generation, news):
        for _ in range(3):
            iterate(realtime, 100.0)
        assert news == counts
        assert generation.finished is not None
    assert realtime.ended_count == {"length": 1}


@pytest.mark.parametrize("iterations", [0, 1])
def test_leaving_early_aborts(iterations: int) -> None:
    realtime = make_realtime()
    with request(realtime):
        for _ in range(iterations):
            iterate(realtime, 100.0)
    assert not realtime.engine.has_work
    assert realtime.ended_count == {"abort": 1}


def test_leaving_during_the_last_iteration_counts_as_an_abort() -> None:
    realtime = make_realtime()
    with request(realtime) as (_generation, news):
        iterate(realtime, 100.0)
        iterate(realtime, 100.0)
        last = realtime.begin_iteration()
    realtime.deliver(last)
    assert news == [1, 2]
    assert realtime.ended_count == {"abort": 1}
