"""`infercept`: memory is preserved until that has wasted as much as a recomputation would."""

from __future__ import annotations

import pytest

from tests.builders import Driver, of_kind
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Pause, Reason
from thunderagent.programs.policies.papers.infercept import InferCept


def preserve_waste_token_s(context_tokens: float, elapsed_s: float) -> float:
    """Return the waste of holding a context for a time [Eq. 2]."""
    return elapsed_s * context_tokens


def discard_waste_token_s(context_tokens: float, running_tokens: float, prefill_token_s: float) -> float:
    """Return the waste of recomputing a context in chunks, beside others that run [Eq. 4]."""
    forward_s = prefill_token_s * context_tokens
    return forward_s * context_tokens / 2 + forward_s * running_tokens


def driver_with(**replicas: int | None) -> Driver:
    return Driver(InferCept(prefill_token_s=0.01, reserve_tokens=0), replicas=replicas or {"r0": 2000})


def test_alone_it_is_held_for_half_of_its_prefill() -> None:
    """t* = β · C/2 = 0.01 · 400 / 2 = 2 s while nothing else runs."""
    driver = driver_with()
    driver.takes_turn("a", 400)
    assert driver.ticks(1.9) == []
    assert driver.ticks(0.2) == [Pause("a", "r0", Reason.EXPIRED)]


def test_beside_others_it_is_held_longer_and_what_runs_now_counts() -> None:
    """t* = 0.01 · (400/2 + 300) = 5 s; when the other turn ends after 3 s, 2 s have passed at once."""
    driver = driver_with()
    driver.takes_turn("a", 400)
    other = driver.arrives("b", 300)
    assert driver.ticks(4.9) == []
    assert of_kind(Pause, driver.ticks(0.2)) == ["a"]
    driver.takes_turn("a", 400)
    assert driver.ticks(3.0) == []
    assert of_kind(Pause, driver.finishes(other, 300)) == ["a"]


def test_the_crossover_is_where_the_two_wastes_are_equal() -> None:
    """Whatever runs beside it, it is preserved a moment before, and given up a moment after."""
    for context_tokens, running_tokens in ((100, 1500), (700, 900), (1000, 0)):
        crossover_s = discard_waste_token_s(context_tokens, running_tokens, 0.01) / context_tokens
        assert preserve_waste_token_s(context_tokens, crossover_s) == pytest.approx(
            discard_waste_token_s(context_tokens, running_tokens, 0.01)
        )
        driver = driver_with()
        if running_tokens:
            driver.arrives("others", running_tokens)
        driver.takes_turn("a", context_tokens)
        assert of_kind(Pause, driver.ticks(crossover_s - 0.01)) == []
        assert of_kind(Pause, driver.ticks(0.02)) == ["a"]


def test_programs_are_served_as_they_came_and_the_large_ones_are_held_longer() -> None:
    """A large context wastes more when it is recomputed; waiting programs are admitted by age."""
    driver = driver_with()
    driver.takes_turn("small", 200)
    driver.takes_turn("large", 1200)
    old = driver.arrives("old", 700)
    driver.passes(0.5)
    young = driver.arrives("young", 100)
    assert driver.held(old)
    assert driver.held(young)
    driver.ticks(0.6)  # 0.01 · 200 / 2
    assert driver.home("small") is None
    assert driver.home("large") == "r0"
    assert not driver.held(old)
    assert not driver.held(young)


def test_growth_beyond_the_capacity_is_mended_by_waste() -> None:
    """The program nearest to its t* is paused first: the small one, if both are away for the same time."""
    driver = driver_with()
    driver.takes_turn("large", 900)
    driver.takes_turn("small", 300)
    turn_id = driver.arrives("growing", 700)
    decisions = driver.progresses(turn_id, 200) + driver.ticks(0.1)
    assert of_kind(Pause, decisions) == ["small"]


def test_the_speed_is_learned_where_it_is_not_told() -> None:
    """40,000 tokens that take 4 s are held for half of that."""
    driver = Driver(InferCept(reserve_tokens=0), replicas={"r0": 100_000}, token_s=1e-4)
    turn_id = driver.arrives("a", 40_000)
    driver.passes(4.0)
    driver.starts(turn_id)
    driver.passes(0.5)
    driver.finishes(turn_id, 40_000, 10)
    assert driver.ticks(1.6) == []
    assert of_kind(Pause, driver.ticks(0.8)) == ["a"]


@pytest.mark.parametrize("setting", ["prefill_token_s", "reserve_tokens"])
def test_negative_settings_are_refused(setting: str) -> None:
    """The error has the name of the setting."""
    with pytest.raises(ConfigurationError, match=setting):
        InferCept(**{setting: -1})
