"""`mars`: memory is kept where a warm return pays, and evicted by priority and footprint; and the parts together."""

from __future__ import annotations

from math import inf

import pytest

from tests.builders import Driver, of_kind
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant, Mark, Pause, Reason, Signal, WindowUpdate
from thunderagent.programs.policies.papers.mars import Mars


def driver_with(capacity_tokens: int | None = 100_000, **settings: float) -> Driver:
    policy = Mars(reserve_tokens=0, growth_quantile=0.0, **settings)  # type: ignore[arg-type]
    return Driver(policy, replicas={"r0": capacity_tokens})


def test_a_program_in_is_granted_where_it_is_and_newcomers_by_their_size() -> None:
    """Both parts work: the admission decides what begins, the priority goes to the engine."""
    driver = driver_with()
    driver.takes_turn("a", 3000)
    driver.passes(1.0)
    again = driver.arrives("a", 3100)
    small = driver.arrives("small", 100)
    large = driver.arrives("large", 40_000)
    grants = {each.turn_id: each for _, decisions in driver.events for each in decisions if isinstance(each, Grant)}
    assert grants[again].reason is Reason.HOME
    assert [grants[turn_id].engine_priority for turn_id in (again, small, large)] == [0, 0, 3]


def test_room_is_made_of_who_expired() -> None:
    """A claim that is held too long goes once a program needs the room, and not before."""
    driver = driver_with(warm_ratio=0.0)
    driver.takes_turn("a", 70_000)
    driver.ticks(50.0)
    assert driver.home("a") == "r0"
    driver.takes_turn("b", 20_000)
    assert driver.home("a") == "r0"
    third = driver.arrives("c", 60_000)
    driver.ticks(1.0)
    assert driver.home("a") is None or driver.held(third)


def test_routed_program_may_overtake_the_queue_head() -> None:
    """Behind one that fits nowhere it would keep its replica from all others, though there is room for them."""
    settings = {"reserve_tokens": 0, "growth_quantile": 0.0, "admission": "window", "admission.n": 100}
    driver = Driver(load_policy("mars", settings), replicas={"r0": 40_000, "r1": 40_000})
    driver.routes("class", "to-r0", r0=1)
    assert [driver.granted_on[driver.arrives(f"run-{tokens}", tokens)] for tokens in (20_000, 39_500)] == ["r0", "r1"]
    driver.passes(1.0)
    large = driver.arrives("large", 30_000)
    driver.ticks(100.0)
    bound = driver.arrives("bound", 4000, program_class="to-r0")
    small = driver.arrives("small", 4000)
    driver.ticks(1.0)
    assert driver.held(large)
    assert [driver.granted_on.get(turn_id) for turn_id in (bound, small)] == ["r0", "r0"]


def test_memory_is_taken_from_the_largest_at_its_tool() -> None:
    """If programs outgrew memory, the lowest level and the largest goes first; it returns when there is room."""
    driver = driver_with(warm_ratio=1e6)
    driver.takes_turn("small", 900)
    driver.takes_turn("large", 60_000)
    driver.takes_turn("middle", 20_000)
    driver.passes(1.0)
    driver.finishes(driver.arrives("middle", 39_000), 39_000)
    driver.passes(1.0)
    assert not driver.held(driver.arrives("small", 1500))
    driver.ticks(0.2)
    assert [name for _, decisions in driver.events for name in of_kind(Pause, decisions)] == ["large"]
    back = driver.arrives("large", 61_000)
    assert driver.held(back)
    driver.releases("middle")
    assert not driver.held(back)


def test_lower_level_program_at_its_tool_makes_room() -> None:
    """A turn of a higher level gets the room if that one alone is enough; a turn of its own level does not."""
    driver = driver_with(warm_ratio=1e6)
    for name, tokens in (("small", 6000), ("large", 40_000), ("other", 40_000)):
        driver.takes_turn(name, tokens)
    driver.passes(1.0)
    running = driver.arrives("other", 40_000)
    driver.progresses(running, 55_000)
    driver.ticks(0.2)
    assert [name for _, decisions in driver.events for name in of_kind(Pause, decisions)] == ["large", "small"]
    driver.finishes(running, 40_000, 55_000)
    assert driver.held(driver.arrives("large", 40_500))
    assert driver.home("other") == "r0"
    assert not driver.held(driver.arrives("small", 6100))
    assert driver.home("other") is None


def test_growth_beyond_the_memory_is_marked_and_unmarked() -> None:
    """The largest with a turn pauses at its end, unless there is room again."""
    driver = driver_with()
    first = driver.arrives("first", 50_000)
    second = driver.arrives("second", 30_000)
    driver.progresses(first, 30_000)
    assert of_kind(Mark, driver.ticks(0.2)) == ["first"]
    driver.finishes(second, 30_000)
    driver.releases("second")
    assert not driver.program("first").marked
    driver.finishes(first, 50_000, 30_000)
    assert driver.home("first") == "r0"


def test_a_small_one_passes_a_large_one_that_does_not_fit() -> None:
    """Waiting programs that do not fit are passed over."""
    driver = driver_with(warm_ratio=1e6)
    for name, tokens in (("a", 40_000), ("b", 30_000), ("c", 10_000)):
        driver.takes_turn(name, tokens)
    running = driver.arrives("c", 10_000)
    driver.progresses(running, 85_000)
    driver.ticks(0.2)
    assert {name: driver.home(name) for name in "abc"} == {"a": None, "b": None, "c": "r0"}
    large, small = driver.arrives("a", 40_000), driver.arrives("b", 30_000)
    driver.passes(1.0)
    driver.finishes(running, 10_000, 55_000)
    assert driver.held(large)
    assert not driver.held(small)


def test_program_larger_than_every_replica_goes_at_once() -> None:
    """The engine decides what happens to it."""
    driver = driver_with(1000)
    assert not driver.held(driver.arrives("giant", 2000))


def test_common_tokens_of_branches_do_not_make_a_program_too_large() -> None:
    """Two of 60,000 with 50,000 in common are 70,000, and wait for room."""
    driver = driver_with()
    prefix = {"system": 50_000}
    for branch in ("", "side"):
        driver.takes_turn("p", 60_000, branch=branch, prefix=prefix, tool="make")
    driver.scheduler.core.pause(driver.program("p"), Reason.IDLE)
    driver.arrives("other", 50_000)
    driver.ticks(1.0)
    again = driver.arrives("p", 60_000, prefix=prefix)
    assert driver.program("p").claim_tokens == 120_000
    assert driver.held(again)


def test_without_a_capacity_memory_holds_nobody() -> None:
    """An unknown capacity has room for everyone; the window is then the authors' guess."""
    driver = driver_with(None)
    turns = [driver.arrives(f"p{number}", 10**6) for number in range(31)]
    driver.ticks(0.2)
    assert [driver.held(turn) for turn in turns].count(True) == 1


def test_memory_of_no_known_size_is_kept_through_every_tool_if_that_is_wanted() -> None:
    """The break-even time is 0 there."""
    driver = driver_with(None, warm_ratio=inf)
    driver.takes_turn("a", 100)
    assert driver.program("a").hold_until_s == inf


def test_the_window_is_told() -> None:
    """Signals have it, with the cause of each change."""
    driver = driver_with(window_max_count=8)
    heard: list[Signal] = []
    driver.scheduler.listen(heard.append)
    for number in range(6):
        driver.takes_turn(f"p{number}", 14_500)
    driver.progresses(driver.arrives("p0", 14_500), 10_000)
    driver.ticks(0.2)
    assert [each for each in heard if isinstance(each, WindowUpdate)] == [WindowUpdate(100.2, 4, 6, "memory")]


@pytest.mark.parametrize(
    "wrong", [{"warm_ratio": -1.0}, {"reserve_tokens": -1}, {"growth_quantile": 1.0}, {"tool_cpu_count": -1}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Mars(**wrong)  # type: ignore[arg-type]
