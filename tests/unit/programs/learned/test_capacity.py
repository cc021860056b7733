"""The claimable part of a reported capacity: small closed simulations of an engine that holds more or less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import kept
from thunderagent.programs.learned.capacity import (
    BLOCK_TOKENS,
    CEILING_RATIO,
    HIGHEST_RATIO,
    LARGEST_STEP_RATIO,
    LOWEST_COUNTED_RATIO,
    LOWEST_RATIO,
    MOST_SEEN_COUNT,
    STEP_UP_RATIO,
    WINDOW_S,
    WINDOW_TURNS_COUNT,
    CapacityCorrection,
    _SeenTurn,
    _Window,
)
from thunderagent.programs.messages import CapacityRecord

CONTEXT_TOKENS = 10_000


def runs(
    correction: CapacityCorrection, true_ratio: float, *, from_s: float, to_s: float, wanted: bool = True
) -> list[float]:
    """Run five turns a second on an engine that holds `true_ratio` of its reported capacity, fully claimed."""
    ratios = []
    for second in range(int(from_s), int(to_s)):
        for _ in range(5):
            kept_ratio = min(1.0, true_ratio / correction.ratio)
            correction.turn_ended(kept(CONTEXT_TOKENS, int(CONTEXT_TOKENS * kept_ratio), inf))
        correction.step(second + 1.0, active_count=1, wanted=wanted)
        ratios.append(correction.ratio)
    return ratios


def told(correction: CapacityCorrection, lost_tokens: int, expected_tokens: int = CONTEXT_TOKENS) -> None:
    """A window of turns, each of which lost this much."""
    for _ in range(WINDOW_TURNS_COUNT):
        correction.turn_ended(kept(expected_tokens, expected_tokens - lost_tokens - BLOCK_TOKENS, inf))


# --- Closed loops


@pytest.mark.parametrize(("lost_ratio", "goes_down"), [(0.3, False), (0.8, True)])
def test_only_large_losses_count_where_claims_may_exceed_the_memory(lost_ratio: float, goes_down: bool) -> None:
    """The engine gives up a part of what is held; most of it is lost only if the memory is much smaller than told."""
    correction = CapacityCorrection(0.0)
    told(correction, int(lost_ratio * CONTEXT_TOKENS))
    assert correction.step(10.0, active_count=1, wanted=True, may_exceed=True) == goes_down
    assert (correction.ratio < 1.0) == goes_down


def test_correction_falls_fast_when_twice_the_capacity_is_told() -> None:
    """Within a minute next to nothing is lost, and it stays there."""
    correction = CapacityCorrection(0.0)
    ratios = runs(correction, 0.5, from_s=0, to_s=60)
    assert ratios[40] <= 0.6
    assert min(ratios) >= 0.45
    later = runs(correction, 0.5, from_s=60, to_s=1200)
    assert 0.45 <= min(later) <= max(later) <= 0.6


def test_correction_rises_when_there_is_more_than_told() -> None:
    """While others wait, an engine that holds half as much again is filled within five minutes."""
    correction = CapacityCorrection(0.0)
    ratios = runs(correction, 1.5, from_s=0, to_s=300)
    assert ratios[-1] >= 1.4
    assert max(runs(correction, 1.5, from_s=300, to_s=1500)) <= 1.75


def test_correction_stays_when_it_is_right() -> None:
    """It stays within a tenth, for an hour."""
    correction = CapacityCorrection(0.0)
    ratios = runs(correction, 1.0, from_s=0, to_s=3600)
    assert 0.9 <= min(ratios) <= max(ratios) <= 1.12


def test_correction_does_not_rise_while_nobody_waits() -> None:
    """Without claims nothing can be lost, so this gives no information."""
    assert set(runs(CapacityCorrection(0.0), 3.0, from_s=0, to_s=600, wanted=False)) == {1.0}


def test_correction_rises_slowly_near_earlier_losses() -> None:
    """From the ceiling on its steps are a two-thousandth."""
    correction = CapacityCorrection(0.0)
    told(correction, 4000)
    correction.step(10.0, active_count=1, wanted=True)
    assert correction.ratio == pytest.approx(0.8)
    now_s, ratios = 10.0, [correction.ratio]
    for _ in range(20):
        now_s += WINDOW_S
        told(correction, 0)
        correction.step(now_s, active_count=1, wanted=True)
        ratios.append(correction.ratio)
    steps = [after / before - 1 for before, after in pairwise(ratios)]
    assert steps[:3] == pytest.approx([STEP_UP_RATIO, 2 * STEP_UP_RATIO, 4 * STEP_UP_RATIO])
    assert all(step < STEP_UP_RATIO for before, step in zip(ratios, steps, strict=False) if before >= CEILING_RATIO)


# --- Engines that only count


class Counting:
    """Five turns a second on an engine of which only the count of cached tokens is known, as polled.

    Each is looked up `lookup_s` after its grant and answered as long after that. Of what is expected `kept_ratio` is
    cached, without the end of a block.
    """

    def __init__(self, correction: CapacityCorrection) -> None:
        self.correction = correction
        self.happens: list[tuple[float, int, Callable[[], None]]] = []
        self.hit_tokens = self.read_tokens = 0

    def at(self, now_s: float, then: Callable[[], None]) -> None:
        self.happens.append((now_s, len(self.happens), then))

    def turn(self, granted_s: float, lookup_s: float, cached_tokens: int, expected_tokens: int) -> None:
        def looked_up() -> None:
            self.hit_tokens += cached_tokens

        self.at(granted_s + lookup_s, looked_up)
        seen_s = granted_s + 2 * lookup_s
        self.at(
            seen_s,
            lambda: self.correction.turn_seen(
                expected_tokens, 0, granted_s=granted_s, kept_since_s=granted_s - 1.0, now_s=seen_s
            ),
        )

    def poll(self, read_s: float, age_s: float) -> None:
        def read() -> None:
            counted = self.hit_tokens - self.read_tokens
            self.read_tokens = self.hit_tokens
            now_s = read_s + age_s
            self.at(now_s, lambda: self.correction.polled(counted, asked_s=read_s, now_s=now_s))

        self.at(read_s, read)

    def ratios(self, to_s: float, *, wanted: bool = False) -> list[float]:
        """Run all events in order, with a step each second; return the ratio after each."""
        found: list[float] = []
        for second in range(1, int(to_s) + 1):
            self.at(float(second), partial(self._step, float(second), wanted, found))
        while self.happens:
            now = min(self.happens)
            self.happens.remove(now)
            now[2]()
        return found

    def _step(self, now_s: float, wanted: bool, found: list[float]) -> None:
        self.correction.step(now_s, active_count=6, wanted=wanted)
        found.append(self.correction.ratio)


def counted(
    kept_ratio: float,
    *,
    poll_s: float = 1.0,
    age_s: float = 0.0,
    lookup_s: float = 0.5,
    missing: int = 0,
    to_s: float = 240.0,
) -> list[float]:
    """The ratios of a run in which each turn expects 1,500 tokens; one of `missing` + 1 polls arrives."""
    counting = Counting(CapacityCorrection(0.0))
    for number in range(int(5 * to_s)):
        counting.turn(number / 5 + 0.05, lookup_s, int(1500 * kept_ratio) // 32 * 32, 1500)
    for number in range(1, int(to_s / poll_s) + 1):
        if number == 1 or number % (missing + 1) == 0:
            counting.poll(number * poll_s, age_s)
    return counting.ratios(to_s)


@pytest.mark.parametrize("poll_s", [1.0, 5.0, 10.0])
@pytest.mark.parametrize(("age_s", "lookup_s", "missing"), [(0.0, 0.1, 0), (0.0, 3.0, 0), (4.0, 1.0, 0), (2.0, 2.0, 2)])
def test_counters_that_are_read_late_or_seldom_show_no_loss_where_there_is_none(
    poll_s: float, age_s: float, lookup_s: float, missing: int
) -> None:
    """Turns granted before a poll and looked up after it are not lost, nor are those that a late reading lacks."""
    assert set(counted(1.0, poll_s=poll_s, age_s=age_s, lookup_s=lookup_s, missing=missing)) == {1.0}


@pytest.mark.parametrize("poll_s", [1.0, 5.0, 10.0])
@pytest.mark.parametrize(("age_s", "lookup_s", "missing"), [(0.0, 0.1, 0), (0.0, 1.0, 0), (2.0, 0.5, 1)])
def test_counters_show_a_loss(poll_s: float, age_s: float, lookup_s: float, missing: int) -> None:
    """Half of what was kept is gone: the capacity falls, but not below its bound."""
    ratios = counted(0.5, poll_s=poll_s, age_s=age_s, lookup_s=lookup_s, missing=missing)
    assert ratios[-1] == LOWEST_COUNTED_RATIO == min(ratios)


def test_the_end_of_a_block_of_each_turn_is_no_loss_in_counters() -> None:
    """Turns have 500 tokens, 60 of which are never whole blocks."""
    counting = Counting(CapacityCorrection(0.0))
    for number in range(600):
        counting.turn(number / 5, 0.1, 440, 500)
    for second in range(1, 121):
        counting.poll(float(second), 0.0)
    assert set(counting.ratios(120.0)) == {1.0}


@pytest.mark.parametrize(("ratio", "ends_at"), [(1.2, 1.0), (1.0, 1.0), (0.9, 0.9)])
def test_a_small_loss_in_counters_is_taken_back_beyond_what_was_reported(ratio: float, ends_at: float) -> None:
    """A twentieth is lost: too little for a step down elsewhere."""
    correction = CapacityCorrection(0.0)
    correction.adopt(CapacityRecord("r0", ratio, HIGHEST_RATIO))
    counting = Counting(correction)
    for number in range(1200):
        counting.turn(number / 5 + 0.05, 0.1, 1344, 1500)
    for second in range(1, 241):
        counting.poll(float(second), 0.0)
    assert counting.ratios(240.0)[-1] == ends_at


def test_counters_that_begin_anew_are_compared_from_then_on() -> None:
    """Counts from before the engine's restart are unknown."""
    correction = CapacityCorrection(0.0)
    correction.polled(0, asked_s=0.0, now_s=0.0)
    for number in range(100):
        correction.turn_seen(1500, 0, granted_s=number / 10 + 0.1, kept_since_s=0.0, now_s=number / 10 + 0.2)
    correction.polled(None, asked_s=12.0, now_s=12.0)
    assert not correction.step(20.0, active_count=1, wanted=True)


def test_an_engine_that_is_idle_while_turns_wait_gets_back_what_was_taken() -> None:
    """Half of the capacity was taken in error; the engine is idle for a tenth of the time until that is undone."""
    correction = CapacityCorrection(0.0)
    for second in range(10, 30, 10):
        told(correction, 9000)
        correction.step(float(second), active_count=1, wanted=True)
    assert correction.ratio == pytest.approx(0.75**2)
    ratios = []
    for second in range(20, 60, 5):
        correction.step(float(second), active_count=1, wanted=True, idle_s=second / 10)
        ratios.append(correction.ratio)
    assert ratios[-1] == 1.0 == max(ratios)
    assert ratios == sorted(ratios)


def test_an_engine_that_is_hardly_idle_gets_nothing_back() -> None:
    """For a fiftieth of the time all admitted programs may be at their tools."""
    correction = CapacityCorrection(0.0)
    told(correction, 9000)
    correction.step(10.0, active_count=1, wanted=True)
    for second in range(20, 60, 5):
        assert not correction.step(float(second), active_count=1, wanted=True, idle_s=(second - 10) / 60)


# --- One step


@pytest.mark.parametrize(
    ("lost_tokens", "ratio"), [(900, 1.0), (1500, 0.925), (1900, 0.905), (5000, 0.75), (9900, 0.75)]
)
def test_a_step_down_is_half_of_what_was_lost(lost_tokens: int, ratio: float) -> None:
    """Losses count from a tenth on, and a step is at most a quarter."""
    correction = CapacityCorrection(0.0)
    told(correction, lost_tokens)
    assert correction.step(10.0, active_count=1, wanted=True) == (ratio != 1.0)
    assert correction.ratio == pytest.approx(ratio)


def test_a_little_loss_changes_nothing() -> None:
    """Between a two-hundredth and a tenth it neither rises nor falls."""
    correction = CapacityCorrection(0.0)
    told(correction, 300)
    assert not correction.step(10.0, active_count=1, wanted=True)
    assert correction.ratio == 1.0


def test_between_two_steps_lie_some_time_and_some_turns() -> None:
    """Neither is enough alone."""
    correction = CapacityCorrection(0.0)
    told(correction, 5000)
    assert not correction.step(WINDOW_S - 0.1, active_count=1, wanted=True)
    assert correction.step(WINDOW_S, active_count=1, wanted=True)
    for _ in range(WINDOW_TURNS_COUNT - 1):
        correction.turn_ended(kept(1000, 0, inf))
    assert not correction.step(100.0, active_count=1, wanted=True)
    correction.turn_ended(kept(1000, 0, inf))
    assert correction.step(100.0, active_count=1, wanted=True)


def test_a_step_begins_anew() -> None:
    """Losses before it are not counted twice."""
    correction = CapacityCorrection(0.0)
    told(correction, 5000)
    correction.step(10.0, active_count=1, wanted=False)
    told(correction, 0)
    assert not correction.step(20.0, active_count=1, wanted=False)
    assert correction.ratio == pytest.approx(1 - LARGEST_STEP_RATIO)


def test_losses_before_a_step_down_do_not_count_after_it() -> None:
    """Programs that were held since before then notice only now."""
    correction = CapacityCorrection(0.0)
    told(correction, 5000)
    correction.step(10.0, active_count=1, wanted=True)
    ratio = correction.ratio
    for kept_since_s in (9.0, 11.0):
        for _ in range(WINDOW_TURNS_COUNT):
            correction.turn_ended(kept(1000, 0, kept_since_s))
        assert correction.step(30.0, active_count=1, wanted=True) == (kept_since_s > 10.0)
    assert correction.ratio == pytest.approx(ratio * (1 - LARGEST_STEP_RATIO))


def test_many_programs_need_more_turns_to_notice_a_step() -> None:
    """It takes two turns of each active program."""
    correction = CapacityCorrection(0.0)
    told(correction, 5000)
    assert not correction.step(10.0, active_count=11, wanted=True)
    told(correction, 5000)
    assert correction.step(10.0, active_count=11, wanted=True)


def test_the_end_of_a_block_is_not_lost() -> None:
    """Short turns each miss less than a block of 500 tokens: that is 12 %, and there is no reaction."""
    correction = CapacityCorrection(0.0)
    for _ in range(WINDOW_TURNS_COUNT):
        correction.turn_ended(kept(500, 500 - BLOCK_TOKENS, inf))
    assert not correction.step(10.0, active_count=1, wanted=False)
    assert correction.ratio == 1.0


def test_without_turns_there_is_no_reaction() -> None:
    """Others use the engine, too, so it has preemptions and polls, but nothing of ours was lost."""
    correction = CapacityCorrection(0.0)
    for second in range(100):
        correction.polled(0, asked_s=second, now_s=second)
        correction.preempted(10_000)
        assert not correction.step(float(second), active_count=1, wanted=True)
    assert correction.ratio == 1.0


def test_turns_of_programs_that_had_kept_nothing_change_nothing() -> None:
    """They are first turns: nothing should be cached, and nothing was."""
    correction = CapacityCorrection(0.0)
    for _ in range(100):
        correction.turn_ended(kept(0, 0, inf))
    assert not correction.step(100.0, active_count=1, wanted=True)
    assert correction.ratio == 1.0


def test_losses_of_running_requests_count() -> None:
    """5,000 of 20 times 1,000 and 5,000 are a fifth."""
    correction = CapacityCorrection(0.0)
    for _ in range(WINDOW_TURNS_COUNT):
        correction.turn_ended(kept(1000, 1000, inf))
    correction.preempted(5000)
    correction.step(10.0, active_count=1, wanted=True)
    assert correction.ratio == pytest.approx(0.9)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 30_000), st.booleans()), max_size=150))
def test_the_ratio_stays_within_its_limits(windows: list[tuple[int, int, bool]]) -> None:
    """This holds whatever is expected and cached, also if more is cached than expected."""
    correction = CapacityCorrection(0.0)
    for number, (expected_tokens, cached_tokens, wanted) in enumerate(windows):
        for _ in range(WINDOW_TURNS_COUNT):
            correction.turn_ended(kept(expected_tokens, cached_tokens, inf))
        before = correction.ratio
        changed = correction.step(10.0 * (number + 1), active_count=1, wanted=wanted)
        assert LOWEST_RATIO <= correction.ratio <= HIGHEST_RATIO
        assert changed == (correction.ratio != before)


def test_an_engine_whose_counters_stay_away_is_not_remembered_for_ever() -> None:
    """Before its first reading nothing is kept, and later at most some thousand turns."""
    window = _Window()
    turn = _SeenTurn(seen_s=2.0, granted_s=1.5, expected_tokens=10, other_tokens=0)
    window.add(turn)
    assert not window._seen
    window.read(0, asked_s=0.5, now_s=1.0)
    for _ in range(MOST_SEEN_COUNT + 10):
        window.add(turn)
    assert len(window._seen) == MOST_SEEN_COUNT
