"""How much of the told capacity may be claimed: small closed simulations of an engine that holds more or less."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.programs.capacity import (
    BLOCK_TOKENS,
    CEILING_RATIO,
    HIGHEST_RATIO,
    LARGEST_STEP_RATIO,
    LOWEST_RATIO,
    STEP_UP_RATIO,
    WINDOW_S,
    WINDOW_TURNS_COUNT,
    CapacityControl,
)

CONTEXT_TOKENS = 10_000


def runs(
    control: CapacityControl, true_ratio: float, *, from_s: float, to_s: float, wanted: bool = True
) -> list[float]:
    """Five turns a second on an engine that holds `true_ratio` of what it says; all that may be claimed is."""
    ratios = []
    for second in range(int(from_s), int(to_s)):
        for _ in range(5):
            kept_ratio = min(1.0, true_ratio / control.ratio)
            control.turn_granted(CONTEXT_TOKENS)
            control.turn_ended(CONTEXT_TOKENS, int(CONTEXT_TOKENS * kept_ratio), inf)
        control.step(second + 1.0, active_count=1, wanted=wanted)
        ratios.append(control.ratio)
    return ratios


def told(control: CapacityControl, lost_tokens: int, expected_tokens: int = CONTEXT_TOKENS) -> None:
    """A window of turns of each of which so much was lost."""
    for _ in range(WINDOW_TURNS_COUNT):
        control.turn_granted(expected_tokens)
        control.turn_ended(expected_tokens, expected_tokens - lost_tokens - BLOCK_TOKENS, inf)


# --- Closed loops


def test_it_goes_down_fast_when_it_is_told_twice_as_much() -> None:
    """Within a minute to where next to nothing is lost, and it stays there."""
    control = CapacityControl(0.0)
    ratios = runs(control, 0.5, from_s=0, to_s=60)
    assert ratios[40] <= 0.6
    assert min(ratios) >= 0.45
    later = runs(control, 0.5, from_s=60, to_s=1200)
    assert 0.45 <= min(later) <= max(later) <= 0.6


def test_it_goes_up_when_there_is_more_than_told() -> None:
    """While others wait: an engine that holds half as much again is filled within five minutes."""
    control = CapacityControl(0.0)
    ratios = runs(control, 1.5, from_s=0, to_s=300)
    assert ratios[-1] >= 1.4
    assert max(runs(control, 1.5, from_s=300, to_s=1500)) <= 1.75


def test_it_stays_when_it_is_right() -> None:
    """Within a tenth, for an hour."""
    control = CapacityControl(0.0)
    ratios = runs(control, 1.0, from_s=0, to_s=3600)
    assert 0.9 <= min(ratios) <= max(ratios) <= 1.12


def test_it_does_not_go_up_while_nobody_waits() -> None:
    """Nothing is lost where nothing is claimed: that says nothing."""
    assert set(runs(CapacityControl(0.0), 3.0, from_s=0, to_s=600, wanted=False)) == {1.0}


def test_it_goes_up_slowly_near_to_where_much_was_lost() -> None:
    """From the ceiling on in steps of a two-thousandth."""
    control = CapacityControl(0.0)
    told(control, 4000)
    control.step(10.0, active_count=1, wanted=True)
    assert control.ratio == pytest.approx(0.8)
    now_s, ratios = 10.0, [control.ratio]
    for _ in range(20):
        now_s += WINDOW_S
        told(control, 0)
        control.step(now_s, active_count=1, wanted=True)
        ratios.append(control.ratio)
    steps = [after / before - 1 for before, after in pairwise(ratios)]
    assert steps[:3] == pytest.approx([STEP_UP_RATIO, 2 * STEP_UP_RATIO, 4 * STEP_UP_RATIO])
    assert all(step < STEP_UP_RATIO for before, step in zip(ratios, steps, strict=False) if before >= CEILING_RATIO)


# --- One step


@pytest.mark.parametrize(
    ("lost_tokens", "ratio"), [(900, 1.0), (1500, 0.925), (1900, 0.905), (5000, 0.75), (9900, 0.75)]
)
def test_a_step_down_is_half_of_what_was_lost(lost_tokens: int, ratio: float) -> None:
    """From a tenth on, and by a quarter at most."""
    control = CapacityControl(0.0)
    told(control, lost_tokens)
    assert control.step(10.0, active_count=1, wanted=True) == (ratio != 1.0)
    assert control.ratio == pytest.approx(ratio)


def test_a_little_loss_changes_nothing() -> None:
    """Between a two-hundredth and a tenth it neither goes up nor down."""
    control = CapacityControl(0.0)
    told(control, 300)
    assert not control.step(10.0, active_count=1, wanted=True)
    assert control.ratio == 1.0


def test_between_two_steps_lie_some_time_and_some_turns() -> None:
    """Neither is enough alone."""
    control = CapacityControl(0.0)
    told(control, 5000)
    assert not control.step(WINDOW_S - 0.1, active_count=1, wanted=True)
    assert control.step(WINDOW_S, active_count=1, wanted=True)
    for _ in range(WINDOW_TURNS_COUNT - 1):
        control.turn_granted(1000)
        control.turn_ended(1000, 0, inf)
    assert not control.step(100.0, active_count=1, wanted=True)
    control.turn_ended(1000, 0, inf)
    assert control.step(100.0, active_count=1, wanted=True)


def test_a_step_begins_anew() -> None:
    """What was lost before it is not counted twice."""
    control = CapacityControl(0.0)
    told(control, 5000)
    control.step(10.0, active_count=1, wanted=False)
    told(control, 0)
    assert not control.step(20.0, active_count=1, wanted=False)
    assert control.ratio == pytest.approx(1 - LARGEST_STEP_RATIO)


def test_what_was_lost_before_a_step_down_is_not_counted_after_it() -> None:
    """Programs that had been held since before then notice only now."""
    control = CapacityControl(0.0)
    told(control, 5000)
    control.step(10.0, active_count=1, wanted=True)
    ratio = control.ratio
    for kept_since_s in (9.0, 11.0):
        for _ in range(WINDOW_TURNS_COUNT):
            control.turn_ended(1000, 0, kept_since_s)
        assert control.step(30.0, active_count=1, wanted=True) == (kept_since_s > 10.0)
    assert control.ratio == pytest.approx(ratio * (1 - LARGEST_STEP_RATIO))


def test_many_programs_need_more_turns_to_notice_a_step() -> None:
    """Two of each that is active."""
    control = CapacityControl(0.0)
    told(control, 5000)
    assert not control.step(10.0, active_count=11, wanted=True)
    told(control, 5000)
    assert control.step(10.0, active_count=11, wanted=True)


def test_the_end_of_a_block_is_not_lost() -> None:
    """Short turns that each miss less than a block of 500 tokens: 12 %, and no reaction."""
    control = CapacityControl(0.0)
    for _ in range(WINDOW_TURNS_COUNT):
        control.turn_granted(500)
        control.turn_ended(500, 500 - BLOCK_TOKENS, inf)
    assert not control.step(10.0, active_count=1, wanted=False)
    assert control.ratio == 1.0


def test_without_turns_there_is_no_reaction() -> None:
    """Preemptions and polls of an engine that others use, too: nothing of ours was lost."""
    control = CapacityControl(0.0)
    for second in range(100):
        control.polled(0)
        control.preempted(10_000)
        assert not control.step(float(second), active_count=1, wanted=True)
    assert control.ratio == 1.0


def test_turns_of_programs_that_had_kept_nothing_change_nothing() -> None:
    """First turns: nothing should be cached, and nothing was."""
    control = CapacityControl(0.0)
    for _ in range(100):
        control.turn_granted(0)
        control.turn_ended(0, 0, inf)
    assert not control.step(100.0, active_count=1, wanted=True)
    assert control.ratio == 1.0


def test_counters_stand_in_where_turns_do_not_say_what_was_cached() -> None:
    """20 turns of 100 tokens, of which 1,700 hit: 15 % are lost."""
    control = CapacityControl(0.0)
    for _ in range(WINDOW_TURNS_COUNT):
        control.turn_granted(100)
    control.polled(1700)
    control.polled(0)
    assert control.step(10.0, active_count=1, wanted=True)
    assert control.ratio == pytest.approx(0.925)


def test_what_running_requests_lose_is_lost() -> None:
    """5,000 of 20 times 1,000 and 5,000: a fifth."""
    control = CapacityControl(0.0)
    for _ in range(WINDOW_TURNS_COUNT):
        control.turn_granted(1000)
        control.turn_ended(1000, 1000, inf)
    control.preempted(5000)
    control.step(10.0, active_count=1, wanted=True)
    assert control.ratio == pytest.approx(0.9)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 30_000), st.booleans()), max_size=150))
def test_the_ratio_stays_within_its_limits(windows: list[tuple[int, int, bool]]) -> None:
    """Whatever is expected and cached, and though more is cached than expected."""
    control = CapacityControl(0.0)
    for number, (expected_tokens, cached_tokens, wanted) in enumerate(windows):
        for _ in range(WINDOW_TURNS_COUNT):
            control.turn_granted(expected_tokens)
            control.turn_ended(expected_tokens, cached_tokens, inf)
        before = control.ratio
        changed = control.step(10.0 * (number + 1), active_count=1, wanted=wanted)
        assert LOWEST_RATIO <= control.ratio <= HIGHEST_RATIO
        assert changed == (control.ratio != before)
