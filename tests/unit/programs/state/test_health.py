"""The verdict on a replica: the gravest cause counts, and each piece of evidence has its threshold."""

from __future__ import annotations

import pytest

from thunderagent.programs.state.health import (
    KEEPING_TURNS_COUNT,
    Counters,
    Keeping,
    Pressure,
    ReplicaState,
    Stillness,
    Verdict,
)

LIMIT_S = 15.0


def counters(progress: float | None = 0.0, *, running: int | None = 1, waiting: int | None = 0) -> Counters:
    return Counters((progress,), running, waiting, is_paced=progress is not None)


def polls(
    stillness: Stillness,
    of: Counters,
    *,
    since_s: int,
    until_s: int,
    heard_s: float = -1.0,
    has_begun: bool = False,
) -> float:
    """Poll once a second; return when it was found frozen, else the end. Each wanted check is sent and not answered."""
    for now_s in range(since_s, until_s + 1):
        stillness.polled(of, heard_s=heard_s, is_busy=True, now_s=now_s, has_begun=has_begun)
        if stillness.wants_check(now_s):
            stillness.checked_s = now_s
        if stillness.is_frozen(now_s):
            return now_s
    return until_s + 1


# --- the verdict


def test_the_gravest_cause_counts_and_keeps_its_time() -> None:
    verdict = Verdict(0.0)
    assert (verdict.state, verdict.reason, verdict.since_s) == ("up", "", 0.0)
    verdict.set(ReplicaState.DRAINING, "an operator", 1.0)
    verdict.set(ReplicaState.FAILING, "500", 2.0)
    verdict.set(ReplicaState.BACKPRESSURE, "429", 3.0)
    assert (verdict.state, verdict.reason, verdict.since_s) == ("failing", "500", 2.0)
    verdict.set(ReplicaState.FAILING, "502", 4.0)
    assert (verdict.reason, verdict.since_s) == ("502", 2.0)
    verdict.end(ReplicaState.FAILING, 5.0)
    assert (verdict.state, verdict.since_s) == ("draining", 1.0)
    verdict.end_all(6.0, ReplicaState.DRAINING, ReplicaState.BACKPRESSURE)
    assert (verdict.state, verdict.since_s) == ("up", 6.0)


def test_every_state_has_a_gravity() -> None:
    verdict = Verdict(0.0)
    for number, state in enumerate(list(ReplicaState)[1:]):
        verdict.set(state, "why", float(number))
        assert verdict.state is state


# --- frozen


@pytest.mark.parametrize("of", [counters(5.0), counters(5.0, waiting=9), counters(None)], ids=["paced", "full", "idle"])
def test_an_engine_that_stands_still_is_frozen_in_time(of: Counters) -> None:
    """Its counters move with each step, or nothing waits in its queue: then a check without an answer is evidence."""
    assert polls(Stillness(LIMIT_S), of, since_s=0, until_s=30) <= LIMIT_S


@pytest.mark.parametrize("of", [counters(None, waiting=7), counters(None, running=None, waiting=None)])
def test_a_stream_that_stands_still_tells_of_an_engine_whose_counters_do_not(of: Counters) -> None:
    """What has begun does not wait in a queue: SGLang under load, and an engine without counters."""
    assert polls(Stillness(LIMIT_S), of, since_s=0, until_s=30, has_begun=True) <= LIMIT_S


@pytest.mark.parametrize(
    "of", [counters(None, waiting=3), counters(None, waiting=None)], ids=["a queue", "nothing known"]
)
def test_an_engine_whose_counters_say_nothing_is_never_frozen(of: Counters) -> None:
    """A whole answer may be computed for long, and a check may wait behind others."""
    assert polls(Stillness(LIMIT_S), of, since_s=0, until_s=300) == 301


def test_any_progress_counts_as_life() -> None:
    """A counter, a byte of a turn, a request that ended; new requests are none."""
    stillness = Stillness(LIMIT_S)
    for now_s in range(300):
        stillness.polled(counters(now_s // 8), heard_s=-1.0, is_busy=True, now_s=now_s)
        assert not stillness.is_frozen(now_s)
    assert polls(stillness, counters(99.0), since_s=300, until_s=310, heard_s=305.0) == 311
    fewer = counters(99.0, running=0)
    assert fewer.moved_since(counters(99.0))
    assert not counters(99.0, running=7).moved_since(counters(99.0))


def test_an_engine_without_turns_does_not_stand_still() -> None:
    stillness = Stillness(LIMIT_S)
    for now_s in range(100):
        stillness.polled(counters(), heard_s=-1.0, is_busy=False, now_s=now_s)
        assert not stillness.wants_check(now_s)
    assert polls(stillness, counters(), since_s=100, until_s=105) == 106


def test_an_answered_check_ends_the_suspicion() -> None:
    stillness = Stillness(LIMIT_S)
    for now_s in range(300):
        stillness.polled(counters(None), heard_s=-1.0, is_busy=True, now_s=now_s)
        if stillness.wants_check(now_s):
            stillness.begin_anew()
        assert not stillness.is_frozen(now_s)
    assert stillness.limit_s == LIMIT_S


def test_an_engine_with_long_steps_is_given_more_time() -> None:
    """It went on by itself after a check had no answer: one long prefill, for example."""
    stillness = Stillness(LIMIT_S)
    assert polls(stillness, counters(1.0), since_s=0, until_s=11) == 12
    assert polls(stillness, counters(2.0), since_s=12, until_s=25) == 26
    assert stillness.limit_s == 2 * 12


def test_an_engine_that_computes_a_long_prompt_at_once_is_given_that_time() -> None:
    """Nothing moves until the step ends, not even the answer to a check."""
    stillness = Stillness(LIMIT_S)
    assert polls(stillness, counters(1.0), since_s=0, until_s=11) == 12
    assert stillness.is_frozen(12.0)
    assert not stillness.is_frozen(12.0, prefill_s=20.0)
    assert not stillness.is_frozen(59.0, prefill_s=20.0)
    assert stillness.is_frozen(60.0, prefill_s=20.0)
    assert stillness.is_frozen(12.0, prefill_s=1.0), "a short one is no excuse"


# --- backpressure


def test_pressure_lasts_as_long_as_the_engine_says_within_bounds() -> None:
    assert [Pressure().pressed(said_s, 0.0) for said_s in (0.0, 7.0, 3600.0)] == [1.0, 7.0, 30.0]


def test_pressure_doubles_until_a_turn_is_answered() -> None:
    pressure, now_s, times_s = Pressure(), 0.0, []
    for _ in range(7):
        times_s.append(pressure.pressed(None, now_s))
        assert pressure.pressed(None, now_s + 0.25) == times_s[-1] - 0.25, "a refusal meanwhile changes nothing"
        now_s = pressure.until_s
    assert times_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    pressure.answered()
    assert pressure.pressed(None, now_s) == 1.0


# --- collapsed


def ended(keeping: Keeping, found_ratio: float, *, count: int = KEEPING_TURNS_COUNT) -> None:
    for _ in range(count):
        keeping.turn_ended(10_000, int(found_ratio * 10_000))


def test_a_cache_that_kept_and_keeps_no_more_has_collapsed() -> None:
    keeping = Keeping()
    ended(keeping, 0.95)
    ended(keeping, 0.0, count=KEEPING_TURNS_COUNT - 3)
    assert not keeping.has_collapsed
    ended(keeping, 0.0, count=2)
    assert keeping.has_collapsed
    keeping.begin_anew()
    assert not keeping.has_collapsed
    ended(keeping, 0.0)
    assert keeping.has_collapsed


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.0), (0.9, 0.2)], ids=["its cache is off", "it loses much"])
def test_a_cache_that_is_merely_bad_has_not_collapsed(before: float, now: float) -> None:
    keeping = Keeping()
    ended(keeping, before)
    ended(keeping, now)
    assert not keeping.has_collapsed


def test_cache_kept_before_memory_was_short_is_not_expected() -> None:
    """An overloaded engine evicts what it kept: each program's next turn begins cold, and none after it."""
    keeping = Keeping()
    ended(keeping, 1.0)
    keeping.pressed(10.0)
    for _ in range(100):
        keeping.turn_ended(10_000, 0, 9.0)
    assert not keeping.has_collapsed
    for _ in range(KEEPING_TURNS_COUNT):
        keeping.turn_ended(10_000, 0, 11.0)
    assert keeping.has_collapsed


def test_short_prompts_say_nothing_of_a_cache() -> None:
    keeping = Keeping()
    ended(keeping, 1.0)
    for _ in range(100):
        keeping.turn_ended(500, 0)
    assert not keeping.has_collapsed
