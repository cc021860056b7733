"""How long tools run: life tables against a computation by hand, and the time to pause."""

from __future__ import annotations

from bisect import bisect_right
from math import inf, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.programs.learned.tool_times import (
    ALL_TOOLS_WEIGHT,
    EDGES_S,
    GUESS_WEIGHT,
    NAMES_COUNT,
    RETURN_RATIO,
    ToolTimes,
)

STARTS_S = (0.0, *EDGES_S)
LENGTHS_S = [end - start for start, end in zip(STARTS_S, EDGES_S, strict=False)] + [EDGES_S[-1]]
Seen = tuple[str, float, bool]
"""The name of a tool, its running time, and whether the program was paused then instead of coming back."""

SEEN = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0, 6000), st.booleans()), max_size=40)


def learned(seen: list[Seen]) -> ToolTimes:
    times = ToolTimes()
    for name, away_s, is_censored in seen:
        (times.censored if is_censored else times.returned)(name, away_s)
    return times


def of_one(*away_s: float, name: str = "t") -> ToolTimes:
    return learned([(name, each_s, False) for each_s in away_s])


def ratios_by_hand(seen: list[Seen], guess: list[float], guess_count: float) -> list[float]:
    """Kaplan and Meier, interval by interval, looking at every program each time."""
    ratios = []
    for index in range(len(STARTS_S)):
        at_risk = [each for each in seen if bisect_right(EDGES_S, each[1]) >= index]
        leaving = [each for each in at_risk if bisect_right(EDGES_S, each[1]) == index]
        away_count = sum(is_censored for _, _, is_censored in leaving)
        exposed = len(at_risk) - away_count / 2
        returned_count = len(leaving) - away_count
        ratios.append((returned_count + guess_count * guess[index]) / (exposed + guess_count))
    return ratios


def rate_by_hand(ratios: list[float], first: int) -> float:
    """Try every time that one could hold until."""
    rates = []
    for last in range(first, len(ratios)):
        away = [1.0]
        for ratio in ratios[first : last + 1]:
            away.append(away[-1] * (1 - ratio))
        # Within an interval the curve is a straight line: its area is the time of holding.
        held_s = sum(LENGTHS_S[first + n] * (away[n] + away[n + 1]) / 2 for n in range(len(away) - 1))
        rates.append((1 - away[-1]) / held_s)
    return max(rates)


@given(SEEN)
def test_the_return_rate_is_what_the_theory_says(seen: list[Seen]) -> None:
    """Kaplan-Meier, shrunk to all tools, and these to the guess, then the best holding time: all from scratch."""
    times = learned(seen)
    everything = ratios_by_hand(seen, [RETURN_RATIO] * len(STARTS_S), GUESS_WEIGHT)
    of_a = ratios_by_hand([each for each in seen if each[0] == "a"], everything, ALL_TOOLS_WEIGHT)
    known = any(name == "a" for name, _, _ in seen)
    for index in (0, 1, 5, 12, 20, len(STARTS_S) - 1):
        elapsed_s = STARTS_S[index] * 1.01
        expected = rate_by_hand(of_a if known else everything, index)
        assert times.return_rate_per_s("a", elapsed_s) == pytest.approx(expected)


def test_three_returns_and_one_censored_match_a_calculation_by_hand() -> None:
    """Two return and one is paused in the first 50 ms, one returns in the next 21: G(0) is 16.6 a second."""
    times = learned([("t", 0.01, False), ("t", 0.02, False), ("t", 0.03, True), ("t", 0.06, False)])
    all_first, all_second = (2 + 2 * 0.22) / (1 + 2 + 0.5 + 2), (1 + 2 * 0.22) / (1 + 2)
    first, second = (2 + 8 * all_first) / (1 + 2 + 0.5 + 8), (1 + 8 * all_second) / (1 + 8)
    still_away = (1 - first) * (1 - second)
    held_s = 0.05 * (1 - first / 2) + (1 - first) * 0.05 * (2**0.5 - 1) * (1 - second / 2)
    assert (1 - still_away) / held_s == pytest.approx(16.62, abs=0.01)
    assert times.return_rate_per_s("t", 0.0) == pytest.approx((1 - still_away) / held_s)


def test_censored_time_says_nothing_of_later() -> None:
    """A hundred pauses after a second change nothing for those that are away for five."""
    few = [("t", 10.0, False)] * 50
    assert learned(few).return_rate_per_s("t", 5.0) == learned([*few, *[("t", 1.0, True)] * 100]).return_rate_per_s(
        "t", 5.0
    )


def test_censored_time_was_at_risk_until_then() -> None:
    """Ten back after half a second are half of twenty, or a tenth if ninety were still away then."""
    back = [("t", 0.5, False)] * 10
    assert learned([*back, *[("t", 3.0, True)] * 90]).return_rate_per_s("t", 0.0) < 0.5 * learned(
        [*back, *[("t", 3.0, True)] * 10]
    ).return_rate_per_s("t", 0.0)


def test_late_return_counts_as_if_never_censored() -> None:
    """Paused after 2 s and back after 70 s, it counts as a return after 70 s."""
    late, plain = ToolTimes(), ToolTimes()
    for _ in range(5):
        late.censored("t", 2.0)
        late.came_back_late("t", 2.0, 70.0)
        plain.returned("t", 70.0)
    for name in ("t", "unseen"):
        for elapsed_s in (0.0, 1.0, 2.0, 3.0, 60.0, 1000.0):
            assert late.return_rate_per_s(name, elapsed_s) == plain.return_rate_per_s(name, elapsed_s)


def test_those_still_away_were_at_risk_until_now_even_if_they_lost_their_claims_before() -> None:
    """Twenty came back after a second, ten are away for 30 s; five of these were paused after 0.1 s."""
    back = [("t", 1.0, False)] * 20
    times = learned([*back, *[("t", 0.1, True)] * 5])
    assert times.returns([30.0] * 10, [0.1] * 5) == learned([*back, *[("t", 30.0, True)] * 10]).returns()
    first = bisect_right(EDGES_S, 1.0)
    guessed = GUESS_WEIGHT * RETURN_RATIO
    for found, count in ((times.returns([30.0] * 10, [0.1] * 5), 30), (times.returns(), 20)):
        assert found.return_ratios[first] == pytest.approx((20 + guessed) / (count + GUESS_WEIGHT))


@given(SEEN, st.integers(0, 30))
def test_rates_stay_rates_whoever_comes_back_late(seen: list[Seen], late_count: int) -> None:
    """Correcting counts that were halved or forgotten meanwhile gives no negative rate, and no share over one."""
    times = learned(seen)
    for _ in range(late_count):
        times.came_back_late("a", 3.0, 50.0)
    for elapsed_s in (0.0, 2.0, 3.0, 40.0, 5000.0):
        assert 0 < times.return_rate_per_s("a", elapsed_s) < inf


def test_the_return_rate_of_an_exponential_tool_is_its_hazard() -> None:
    """It returns once in 20 s, however long it has run already."""
    times = of_one(*(-20 * log((number + 0.5) / 950) for number in range(950)))
    for elapsed_s in (0.0, 2.0, 8.0, 16.0, 30.0):
        assert times.return_rate_per_s("t", elapsed_s) == pytest.approx(1 / 20, rel=0.25)
    assert times.hold_s("t", 14.0) < 1.0
    assert times.hold_s("t", 30.0) > 30.0


def test_a_tool_that_is_clipped_is_held_when_its_timeout_is_near() -> None:
    """Half return at once, half reach their timeout of 30 s: holding 40 s pays, not 15, but from 18 s on."""
    times = of_one(*[0.2, 30.0] * 100)
    assert 30.0 < times.hold_s("t", 40.0) < 37.0
    assert 0.2 < times.hold_s("t", 15.0) < 0.4
    assert times.return_rate_per_s("t", 1.0) * 15 < 1 < times.return_rate_per_s("t", 20.0) * 15


def test_a_tool_is_censored_when_its_timeout_is_over() -> None:
    """If all others returned by then, a missing one has no known time of return."""
    times = of_one(*[30.0] * 200)
    assert times.return_rate_per_s("t", 40.0) < 0.1 * times.return_rate_per_s("t", 26.0)


@given(SEEN, st.lists(st.floats(0, 1e5), min_size=2, max_size=6))
def test_dearer_context_is_held_for_at_least_as_long(seen: list[Seen], thresholds: list[float]) -> None:
    """`hold_s` is monotone in the threshold, and nothing is held that costs nothing to recompute."""
    times = learned(seen)
    held = [times.hold_s("a", threshold_s) for threshold_s in sorted(thresholds)]
    assert held == sorted(held)
    assert times.hold_s("a", 0.0) == 0.0
    assert times.hold_s("a", inf) == inf


def test_a_tool_is_held_until_its_rate_falls_below_one_in_the_threshold() -> None:
    """Until then the rate is above it."""
    random = Random(3)
    times = of_one(*(random.paretovariate(0.8) for _ in range(500)))
    hold_s = times.hold_s("t", 10.0)
    assert 1.0 < hold_s < 100.0
    assert times.return_rate_per_s("t", hold_s * 1.01) * 10 < 1 <= times.return_rate_per_s("t", hold_s * 0.99) * 10


def test_a_rate_at_the_begin_of_an_interval_is_that_interval_s() -> None:
    """When `hold_s` ends, holding no longer pays."""
    times = of_one(*[0.3] * 100)
    hold_s = times.hold_s("t", 5.0)
    assert times.return_rate_per_s("t", hold_s) * 5 < 1


def test_an_unseen_name_behaves_like_all_together() -> None:
    """After 200 returns of two tools, a third is held like the mixture, and so is one that was seen once."""
    seen = [("fast", 1.0, False), ("slow", 100.0, False)] * 100
    everything = of_one(*(away_s for _, away_s, _ in seen), name="fast")
    times = learned(seen)
    for threshold_s in (5.0, 50.0, 500.0):
        assert times.hold_s("unseen", threshold_s) == everything.hold_s("unseen", threshold_s)
    times.returned("once", 3000.0)
    assert times.hold_s("once", 20.0) == times.hold_s("unseen", 20.0)
    assert times.hold_s("fast", 20.0) < times.hold_s("slow", 150.0)


def test_a_name_that_was_seen_often_speaks_for_itself() -> None:
    """A thousand quick tools do not make the slow one quick."""
    times = learned([("fast", 0.2, False)] * 900 + [("slow", 100.0, False)] * 90)
    assert times.return_rate_per_s("slow", 0.1) < 0.1 * times.return_rate_per_s("fast", 0.1)


def test_without_anything_seen_the_guess_has_a_heavy_tail() -> None:
    """The rate falls with time, about as 1/t."""
    times = ToolTimes()
    assert times.return_rate_per_s("t", 100.0) == pytest.approx(times.return_rate_per_s("t", 10.0) / 10, rel=0.5)


def test_a_tool_that_changed_is_learned_anew() -> None:
    """After a thousand returns in a second, a thousand in 200 s weigh more."""
    times = of_one(*[1.0] * 1000)
    assert times.hold_s("t", 2.0) < 5.0
    for _ in range(1500):
        times.returned("t", 200.0)
    assert times.return_rate_per_s("t", 0.5) < 0.2


def test_rates_follow_new_observations_soon() -> None:
    """A used rate is recomputed after a quarter more observations, at latest after sixteen."""
    times = of_one(*[1.0] * 4)
    before = times.return_rate_per_s("t", 0.5)
    for _ in range(2):
        times.returned("t", 1.0)
    assert times.return_rate_per_s("t", 0.5) > before


def test_names_are_bounded_and_the_one_not_seen_for_longest_is_forgotten() -> None:
    """A client that puts arguments into tool names does not fill the memory."""
    times = of_one(*[1.0] * 50, name="kept")
    for number in range(NAMES_COUNT - 1):
        times.returned(f"tool {number}", 1.0)
    times.returned("kept", 1.0)
    times.returned("one more", 1.0)
    assert len(times) == NAMES_COUNT
    forgotten, unseen = times.return_rate_per_s("tool 0", 0.75), times.return_rate_per_s("unseen", 0.75)
    assert forgotten == unseen != times.return_rate_per_s("kept", 0.75)


def test_lateness_of_a_tool_is_known_after_ten_returns() -> None:
    """It counts returned programs, late ones included; those that never return and other tools do not count."""
    times = of_one(*[1.0] * 9)
    assert times.returned_within_s("t", 0.99) == 0.0
    times.returned("t", 1.0)
    assert 1.0 <= times.returned_within_s("t", 0.99) < 1.5
    for _ in range(100):
        times.censored("t", 50.0)
    assert times.returned_within_s("t", 0.99) < 1.5
    for _ in range(10):
        times.came_back_late("t", 50.0, 900.0)
    assert times.returned_within_s("t", 0.5) < 1.5
    assert 900.0 <= times.returned_within_s("t", 0.99) < 1300.0
    times.returned("t", 1e6)
    assert times.returned_within_s("t", 1.0) == EDGES_S[-1]
    assert times.returned_within_s("unseen", 0.99) == 0.0


def test_least_duration_of_most_tools_is_known_after_ten_returns() -> None:
    """It is of all names together, and never more than those returns took."""
    times = of_one(*[1.0] * 9)
    assert times.shortest_s(0.1) == 0.0
    times.returned("another", 0.06)
    assert 0.7 < times.shortest_s(0.1) <= 1.0
    assert 0.05 <= times.shortest_s(0.05) <= 0.06


def test_lookup_of_a_name_does_not_remember_it() -> None:
    """Only observed names take memory."""
    times = ToolTimes()
    times.hold_s("t", 1.0)
    assert len(times) == 0


@given(st.lists(st.floats(0.0, 10_000.0) | st.sampled_from(EDGES_S), min_size=1, max_size=20), st.integers(1, 200))
def test_many_are_censored_as_one_by_one(some_s: list[float], times: int) -> None:
    """Each counts in its interval; if more come than are remembered, they count in the order of their times."""
    together, apart, away_s = ToolTimes(), ToolTimes(), some_s * times
    together.all_censored("t", away_s)
    for each_s in sorted(away_s):
        apart.censored("t", each_s)
    assert together.export() == apart.export()


def test_more_late_returns_than_are_remembered_leave_what_another_can_adopt() -> None:
    """5,000 programs lose their claims at once, as at an outage, and all of them come back."""
    times = ToolTimes()
    times.all_censored("t", [50.0] * 5000)
    for _ in range(5000):
        times.came_back_late("t", 50.0, 900.0)
    ToolTimes().adopt(*times.export())
