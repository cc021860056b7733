"""`concur`: the window follows the fill of the engines and their cache hits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import ReplicaPolled, Signal, WindowUpdate
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.policies.papers.concur import Concur
from thunderagent.programs.state.program import Status


class Congested:
    """A driver of `concur` with an engine whose figures a test sets."""

    def __init__(self, **settings: float) -> None:
        self.concur = Concur(**settings)  # type: ignore[arg-type]
        self.driver = Driver(Composed(Passthrough(), admission=self.concur), replicas={"r0": 100_000})
        self.heard: list[Signal] = []
        self.driver.scheduler.listen(self.heard.append)

    def is_looked_at(self, used_ratio: float, hit_ratio: float) -> int:
        """Let five seconds pass with these figures of the engine; return the window."""
        driver = self.driver
        polled = ReplicaPolled(0.0, "r0", 100_000, hit_ratio, 1000, 0, used_ratio, 0)
        for _ in range(5):
            driver.passes(1.0)
            driver.send(replace(polled, now_s=driver.now_s))
            driver.ticks()
        return self.concur.window_count

    @property
    def updates(self) -> list[tuple[int, str]]:
        return [(each.window_count, each.why) for each in self.heard if isinstance(each, WindowUpdate)]


@pytest.mark.parametrize(
    ("used_ratio", "hit_ratio", "window_count", "why"),
    [
        (0.19, 0.0, 12, "under-used"),
        (0.2, 0.0, 10, "held"),
        (0.5, 0.0, 10, "held"),
        (0.51, 0.19, 5, "thrashing"),
        (0.51, 0.2, 10, "held"),
        (1.0, 0.9, 10, "held"),
        (1.0, 0.0, 5, "thrashing"),
    ],
)
def test_the_law_is_the_papers(used_ratio: float, hit_ratio: float, window_count: int, why: str) -> None:
    """It grows by 2 under 0.2; it halves over 0.5 if the hit ratio is under 0.2; otherwise it stays."""
    assert Concur(first_count=10).next_window(used_ratio, hit_ratio) == (window_count, why)


def test_the_window_is_a_whole_number_and_never_under_one() -> None:
    """It goes 5, 2, 1 and 1."""
    concur = Concur(first_count=5)
    for expected_count in (2, 1, 1):
        concur.window_count = concur.next_window(0.9, 0.0)[0]
        assert concur.window_count == expected_count


def test_window_grows_by_two_while_it_is_full_and_memory_is_not() -> None:
    """It grows every five seconds; waiting programs begin as it grows, and each change is signalled."""
    world = Congested(first_count=1)
    turns = [world.driver.arrives(f"p{number}", 10) for number in range(4)]
    assert [turn_id for turn_id in turns if not world.driver.held(turn_id)] == turns[:1]
    assert world.is_looked_at(0.1, 0.0) == 3
    assert [turn_id for turn_id in turns if not world.driver.held(turn_id)] == turns[:3]
    assert world.is_looked_at(0.3, 0.0) == 3
    assert world.is_looked_at(0.1, 0.0) == 5
    assert world.is_looked_at(0.1, 0.0) == 5  # none waits, and there is a place
    assert world.updates == [(3, "under-used"), (5, "under-used")]


def test_program_over_the_window_is_paused_between_turns_and_returns_before_new_ones() -> None:
    """Turns in flight are never disturbed; the youngest program is dismissed first."""
    world = Congested(first_count=4)
    driver = world.driver
    turns = [driver.arrives(f"p{number}", 10) for number in range(4)]
    for number in (0, 3):
        driver.finishes(turns[number], 10, tool="make")
    assert world.is_looked_at(0.9, 0.1) == 2
    assert not driver.program("p3").admitted
    assert not driver.program("p0").admitted
    assert driver.program("p3").status is Status.PAUSED
    assert all(driver.program(f"p{number}").in_flight for number in (1, 2))
    new = driver.arrives("new", 10)
    driver.passes(1.0)
    back = driver.arrives("p3", 20)
    assert driver.held(new)
    assert driver.held(back)
    driver.finishes(turns[1], 10)
    driver.releases("p1")
    assert not driver.held(back)
    assert driver.held(new)


def test_a_turn_that_ends_over_the_window_is_the_programs_last_for_now() -> None:
    """Its program waits outside from its next turn on."""
    world = Congested(first_count=2)
    driver = world.driver
    turns = [driver.arrives(f"p{number}", 10) for number in range(2)]
    assert world.is_looked_at(0.9, 0.0) == 1
    assert driver.scheduler.book.admitted_count == 2
    driver.finishes(turns[0], 10, tool="make")
    assert driver.scheduler.book.admitted_count == 1
    assert driver.held(driver.arrives("p0", 20))


def test_window_follows_the_mean_of_replicas_and_interval() -> None:
    """One full and one empty replica have a mean of one half."""
    world = Congested(first_count=4)
    world.driver.comes_up("r1", 100_000)
    assert world.is_looked_at(0.9, 0.0) == 4


def test_a_window_that_is_not_full_is_cut_all_the_same() -> None:
    """Few programs can be too many."""
    world = Congested(first_count=8)
    world.driver.arrives("a", 10)
    assert world.is_looked_at(0.9, 0.0) == 4
    assert world.updates == [(4, "thrashing")]


@pytest.mark.parametrize(
    "settings",
    [
        {"add_count": 0},
        {"add_count": 1.5},
        {"first_count": 0},
        {"cut_ratio": 0.0},
        {"cut_ratio": 1.0},
        {"low_ratio": 0.6},
        {"low_ratio": -0.1},
        {"interval_s": 0.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    """The error has the name of the part."""
    with pytest.raises(ConfigurationError, match="concur: "):
        Concur(**settings)  # type: ignore[arg-type]


def test_the_preset_is_the_stock_engine_behind_the_window() -> None:
    """The part can be chosen beside any policy."""
    assert load_policy("concur", {}).name == "passthrough+admission=concur"
    assert load_policy("breakeven", {"admission": "concur"}).name == "breakeven+admission=concur"
