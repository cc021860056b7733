"""`thunderagent-released`: the order in which the authors' code restores, and the sum by which it pauses."""

from __future__ import annotations

from math import inf

import pytest

from tests.builders import Driver, of_kind, restored_on
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Mark, Pause, Reason, Restore
from thunderagent.programs.policies.papers.thunderagent_released import ThunderAgentReleased


def driver_with(*, half_life_s: float = inf, **replicas: int | None) -> Driver:
    policy = ThunderAgentReleased(half_life_s=half_life_s, reserve_tokens=0)
    return Driver(policy, replicas=replicas or {"r0": 1000})


def test_returning_programs_are_restored_before_new_ones_then_those_whose_tools_run() -> None:
    """The paper's order has the new one first, for it is smaller."""
    driver = driver_with()
    driver.takes_turn("rests", 100)
    driver.takes_turn("returns", 300)
    large = driver.arrives("large", 600)
    driver.progresses(large, output=400)
    assert of_kind(Pause, driver.ticks(5.0)) == ["rests", "returns"]
    driver.arrives("new", 200)
    driver.arrives("returns", 300)
    driver.is_abandoned(large)
    driver.releases("large")
    assert of_kind(Restore, driver.ticks(5.0)) == ["returns", "new", "rests"]


def test_restored_programs_are_placed_largest_first_where_most_room_is() -> None:
    """Of 700 and 300 the larger goes first; 300 then fits on the other replica alone."""
    driver = driver_with(r0=800, r1=600)
    driver.takes_turn("a", 800)
    driver.takes_turn("b", 600)
    driver.arrives("small", 300)
    driver.arrives("big", 700)
    driver.releases("a")
    driver.releases("b")
    assert restored_on(driver.ticks(5.0)) == {"big": "r0", "small": "r1"}


def test_program_that_does_not_fit_is_skipped() -> None:
    """The next group's smaller one is let in, where the paper would wait for the first."""
    driver = driver_with()
    driver.takes_turn("returns", 600)
    grows = driver.arrives("grows", 400)
    driver.progresses(grows, output=100)
    assert of_kind(Pause, driver.ticks(5.0)) == ["returns"]
    driver.takes_turn("fill", 500)
    driver.arrives("returns", 600)
    driver.arrives("new", 500)
    driver.releases("fill")
    assert of_kind(Restore, driver.ticks(5.0)) == ["new"]


def test_a_pause_is_decided_by_undecayed_sums_and_a_restore_by_decayed_ones() -> None:
    """After ten half-lives the tool's program weighs nothing for the restore, and all for the pause after it."""
    driver = driver_with(half_life_s=1.0)
    driver.takes_turn("acts", 700)
    driver.passes(10.0)
    driver.arrives("new", 600)
    decided = driver.ticks(5.0)
    assert of_kind(Restore, decided) == ["new"]
    assert of_kind(Pause, decided) == ["acts"]


def test_if_acting_programs_do_not_suffice_all_others_are_marked() -> None:
    """A mark frees nothing in the sum that decides, so the marking does not stop."""
    driver = driver_with()
    turns = {name: driver.arrives(name, size) for name, size in (("a", 100), ("b", 400), ("c", 500))}
    driver.progresses(turns["c"], output=50)
    assert of_kind(Mark, driver.ticks(5.0)) == ["a", "b", "c"]
    assert driver.finishes(turns["a"], 100) == [Pause("a", "r0", Reason.MARKED)]


def test_between_checks_a_new_program_passes_those_that_wait_and_a_returning_one_waits() -> None:
    driver = driver_with()
    driver.takes_turn("returns", 400)
    grows = driver.arrives("grows", 500)
    driver.progresses(grows, output=200)
    assert of_kind(Pause, driver.ticks(5.0)) == ["returns"]
    back = driver.arrives("returns", 250)
    assert driver.program("returns").hold_reason == Reason.QUEUE_AHEAD
    new = driver.arrives("new", 250)
    assert not driver.held(new)
    assert driver.held(back)


def test_a_turn_that_waited_half_an_hour_is_let_in_without_room() -> None:
    driver = driver_with()
    driver.arrives("grows", 900)
    waits = driver.arrives("large", 5000)
    driver.ticks(1799.0)
    assert driver.held(waits)
    driver.ticks(6.0)
    assert not driver.held(waits)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="thunderagent-released: delta_s must be over 0"):
        ThunderAgentReleased(delta_s=0)
    with pytest.raises(ConfigurationError, match="force_s"):
        ThunderAgentReleased(force_s=-1)
