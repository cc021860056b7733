"""`least-area`: the index, its learning, and the bound on waiting."""

from __future__ import annotations

from math import inf

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Reason, SchedulerSettings, TurnUnverified
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.policies.parts.areas import (
    ENDING_RATIO,
    ENDS_COUNT,
    FEW_COUNT,
    FIRST_GROWTH_TOKENS,
    GUESS_WEIGHT,
    NOBODY_LEFT_RATIO,
    NOT_OVERDUE_RANK,
    REMEMBERED_COUNT,
)
from thunderagent.programs.policies.parts.least_area import LeastArea


def driver_with(order: LeastArea) -> Driver:
    """Return a driver that holds nothing: learning does not depend on the order."""
    return Driver(Composed(Passthrough(), order=order), replicas={"r0": 10_000_000})


def live(driver: Driver, program_id: str, turns_count: int, first_tokens: int = 100, grown_tokens: int = 0) -> None:
    """Run a program from its first turn to its end."""
    for turn in range(turns_count):
        driver.takes_turn(program_id, first_tokens + turn * grown_tokens)
    driver.releases(program_id)


def taught(lengths: list[int], **turn: int) -> LeastArea:
    """Return an order that saw programs of these lengths."""
    order = LeastArea()
    driver = driver_with(order)
    for number, turns_count in enumerate(lengths):
        live(driver, f"p{number}", turns_count, **turn)
    return order


def one_at_a_time(bound_ratio: float = 8.0) -> Driver:
    """Return a scheduler that lets one program in after another."""
    settings = {"n": 1, "order": "least-area", "order.bound_ratio": bound_ratio}
    return Driver(load_policy("cap", settings), replicas={"r0": 1_000_000})


def test_larger_programs_have_larger_areas() -> None:
    """This holds before anything was learned, too; areas are in proportion if turns add nothing."""
    assert LeastArea().areas.area(0, 100) < LeastArea().areas.area(0, 10_000) < LeastArea().areas.area(0, 100_000)
    order = taught([10] * 50)
    assert order.areas.area(0, 8000) == pytest.approx(8 * order.areas.area(0, 1000), rel=0.01)


def test_nearness_to_the_end_counts_where_all_lengths_are_equal() -> None:
    """With the same claim, the program with more turns behind it has less to go."""
    order = taught([16] * 200)
    assert order.areas.area(14, 5000) < order.areas.area(8, 5000) < order.areas.area(0, 5000)
    assert order.areas.area(0, 5000) == pytest.approx(16 * 5000, rel=0.2)


def test_program_that_outlives_short_ones_falls_back() -> None:
    """Nine of ten take two turns, and the others a hundred: after three turns many more are to come."""
    order = taught(([2] * 9 + [100]) * 20)
    assert order.areas.area(3, 5000) > 5 * order.areas.area(0, 5000)
    assert order.areas.area(95, 5000) < order.areas.area(3, 5000)


@pytest.mark.parametrize("turn_count", [0, 1, 7, 9, 30, 100, 1000])
def test_the_index_is_the_least_over_all_ends(turn_count: int) -> None:
    """Ends are left out if another one is nearer and smaller: the result equals the formula for each interval."""
    areas = taught(([2] * 9 + [100]) * 20, grown_tokens=300).areas
    for claim_tokens in (10, 1000, 100_000):
        least, area, left, tokens, done = inf, 0.0, 1.0, float(claim_tokens), turn_count
        for number, last in enumerate(ENDS_COUNT):
            if last <= turn_count or left < NOBODY_LEFT_RATIO:
                continue
            first = ENDS_COUNT[number - 1] if number else 0
            ended, passed = areas._ended[number], areas._passed[number]
            stays = 1 - (ended + ENDING_RATIO * GUESS_WEIGHT) / (ended + passed + GUESS_WEIGHT)
            stays **= (last - done) / (last - first)
            grown = areas.growth_tokens * (last - done)
            area += left * (last - done) * (tokens + grown / 2) * (1 + stays) / 2
            left *= stays
            least = min(least, area / (1 - left))
            tokens, done = tokens + grown, last
        areas._ends.clear()
        assert areas.area(turn_count, claim_tokens) == pytest.approx(least)


def test_derived_table_follows_within_a_part_in_32() -> None:
    """At first it is rebuilt for each turn that teaches something, later for a few in a hundred."""
    order = LeastArea()
    driver, made = driver_with(order), []
    for number in range(200):
        driver.takes_turn(f"p{number}", 100)
        order.areas.area(0, 5000)
        driver.takes_turn(f"p{number}", 100)
        made.append(not order.areas._ends)
    assert all(made[:30])
    assert 1 <= sum(made[100:]) < 30


def test_an_area_is_known_however_many_turns_there_were() -> None:
    """This holds beyond the last interval, too."""
    assert 0 < LeastArea().areas.area(5000, 100) < inf


def test_programs_that_still_run_say_nothing_of_later_turns() -> None:
    """Passing an interval counts at once: with ten programs beyond it, an end there is at most one in eleven."""
    order = LeastArea()
    driver = driver_with(order)
    live(driver, "short", 2)
    eager = order.areas.area(0, 5000)
    for number in range(10):
        for _ in range(5):
            driver.takes_turn(f"long{number}", 100)
    assert order.areas.area(0, 5000) > 1.5 * eager
    assert order.areas._ended[1] == 1
    assert (order.areas._passed[1], order.areas._passed[3], order.areas._passed[5]) == (10, 10, 0)


def test_policy_learns_what_a_turn_adds() -> None:
    """It learns from the contexts of the same program, not from those of others; until then it guesses."""
    order = LeastArea()
    assert order.areas.growth_tokens == FIRST_GROWTH_TOKENS
    driver = driver_with(order)
    for number in range(60):
        live(driver, f"p{number}", 20, first_tokens=50_000, grown_tokens=300)
    assert order.areas.growth_tokens == pytest.approx(300, rel=0.05)


def test_sizes_that_nobody_vouches_for_teach_no_growth() -> None:
    """Neither does what comes after them in the same program."""
    order = LeastArea()
    driver = driver_with(order)
    driver.takes_turn("p", 1000)
    turn_id = driver.arrives("p", 1000)
    driver.send(TurnUnverified(driver.now_s, turn_id))
    driver.finishes(turn_id, 900_000)
    for _ in range(3):
        driver.takes_turn("p", 950_000)
    assert order.areas.growth_tokens == FIRST_GROWTH_TOKENS


def test_policy_forgets_ended_programs() -> None:
    """Only their counts are kept."""
    order = taught([3] * 20)
    kept = (
        order.areas._contexts_tokens,
        order.areas._passed_counts,
        order.areas._waits,
        order.areas._overdue,
        order.areas._waited_s,
    )
    assert kept == ({}, {}, {}, {}, {})


def test_a_flood_of_programs_is_forgotten_with_the_oldest() -> None:
    """The limit of programs bounds what is known of each, also of those that never end."""
    order = LeastArea()
    driver = Driver(
        Composed(Cap(n=10), order=order),
        replicas={"r0": 10_000_000},
        settings=SchedulerSettings(max_programs_count=50),
    )
    turn_ids: list[int] = []
    for number in range(500):
        turn_ids.append(driver.arrives(f"p{number}", 1000))
        driver.ticks(1.0)
        held_ids = [turn_id for turn_id in turn_ids if driver.held(turn_id)]
        for turn_id in set(turn_ids) - set(held_ids):
            driver.finishes(turn_id, 1000)
        if len(held_ids) > 15:
            driver.is_abandoned(held_ids.pop(0))
        turn_ids = held_ids
    areas, live_ids = order.areas, driver.scheduler.programs.keys()
    assert len(live_ids) <= 50
    assert areas._contexts_tokens
    assert areas._waits
    for known in (areas._contexts_tokens, areas._passed_counts, areas._waits, areas._overdue, areas._waited_s):
        assert known.keys() <= live_ids
    assert len(areas._due) <= 2 * 50 + FEW_COUNT + 1


def test_a_turn_that_fails_teaches_nothing() -> None:
    """A turn that is tried five times counts once when the next one comes, with its final size."""
    order = LeastArea()
    driver = driver_with(order)
    driver.takes_turn("p", 1000)
    for _ in range(5):
        driver.fails(driver.arrives("p", 1500))
    assert order.areas._passed[0] == 1
    assert order.areas.growth_tokens == FIRST_GROWTH_TOKENS


def test_a_rank_stays_while_a_program_waits_whatever_is_learned() -> None:
    """The queue keeps the ranks from the begin of the waits: computed again, they are the same."""
    order = LeastArea()
    driver = Driver(Composed(Cap(n=1), order=order), replicas={"r0": 1_000_000})
    driver.arrives("holder", 10)
    driver.arrives("a", 5000)
    driver.arrives("b", 500)
    waiting = list(driver.scheduler.queue.waiting.order)
    before = [order.restore_rank(program) for program in waiting]
    order.areas._ended[0] += 500
    order.areas._grown_tokens *= 100
    order.areas._ends.clear()
    assert [order.restore_rank(program) for program in waiting] == before == sorted(before)
    assert order.areas.area(0, 500) != pytest.approx(before[0] - NOT_OVERDUE_RANK)


def test_old_observations_weigh_little() -> None:
    """A load of long programs is learned although a thousand short ones came before."""
    order = taught([1] * int(REMEMBERED_COUNT) + [2] * 300)
    assert order.areas._ended[0] == pytest.approx(REMEMBERED_COUNT / 2, abs=1)
    assert order.areas._ended[1] == pytest.approx(300, abs=1)


def test_the_smallest_of_those_that_wait_goes_first() -> None:
    """The order of arrival does not count."""
    driver = one_at_a_time()
    driver.arrives("holder", 10)
    large, small = driver.arrives("large", 50_000), driver.arrives("small", 500)
    driver.releases("holder")
    assert not driver.held(small)
    assert driver.held(large)


def test_nobody_waits_for_later_programs_beyond_the_bound() -> None:
    """A large program among an endless stream of small ones is admitted soon after the bound, and not before."""
    driver = one_at_a_time(bound_ratio=5.0)
    for number in range(8):  # the median residence is a second
        turn_id = driver.arrives(f"first{number}", 500)
        driver.passes(1.0)
        driver.finishes(turn_id, 500)
        driver.releases(f"first{number}")
    driver.arrives("small0", 500)
    large = driver.arrives("large", 50_000)
    arrived_s = driver.now_s
    for number in range(1, 40):
        driver.arrives(f"small{number}", 500)
        driver.passes(1.0)
        driver.releases(f"small{number - 1}")
        if not driver.held(large):
            break
    waited_s = driver.now_s - arrived_s
    assert not driver.held(large)
    assert 4.0 < waited_s < 12.0


def test_the_waits_of_all_its_turns_count_together() -> None:
    """Half of the bound passes for its first turn, half for its second: then none goes before it."""
    driver = one_at_a_time(bound_ratio=10.0)
    for number in range(8):  # the median residence is a second
        turn_id = driver.arrives(f"first{number}", 500)
        driver.passes(1.0)
        driver.finishes(turn_id, 500)
        driver.releases(f"first{number}")
    for round_number, smaller_go_first in enumerate((True, False)):
        driver.arrives(f"holder{round_number}", 10)
        large = driver.arrives("large", 50_000)
        driver.passes(6.0)
        small = driver.arrives(f"small{round_number}", 500)
        driver.releases(f"holder{round_number}")
        assert driver.held(large) == smaller_go_first
        if smaller_go_first:
            driver.releases(f"small{round_number}")
            driver.finishes(large, 50_000)
            driver.scheduler.core.pause(driver.program("large"), Reason.IDLE)
        else:
            assert driver.held(small)


def test_turns_that_wait_together_wait_once() -> None:
    """Sixteen branches that are held for a minute are one program that waited for a minute."""
    order = LeastArea()
    driver = Driver(Composed(Cap(n=1), order=order), replicas={"r0": 1_000_000})
    for waited_s in (60.0, 90.0):
        driver.arrives("holder", 10)
        turn_ids = [driver.arrives("a", 100, branch=f"b{number}") for number in range(16)]
        driver.passes(60.0 if waited_s == 60.0 else 30.0)
        driver.releases("holder")
        assert order.areas._waited_s == {"a": waited_s}
        for turn_id in turn_ids:
            driver.finishes(turn_id, 100)
        driver.scheduler.core.pause(driver.program("a"), Reason.IDLE)


def test_programs_that_waited_longest_go_first_as_a_batch_ends() -> None:
    """Small ones go first as long as programs come; once four ended and none came, a sixteenth of the bound counts."""
    for programs_come in (False, True):
        driver = one_at_a_time(bound_ratio=64.0)
        for number in range(8):  # the median residence is a second, so the bound is a minute
            turn_id = driver.arrives(f"first{number}", 500)
            driver.passes(1.0)
            driver.finishes(turn_id, 500)
            driver.releases(f"first{number}")
        sizes = {"large": 50_000, **{f"small{number}": 500 for number in range(10)}}
        for name, tokens in sizes.items():
            driver.takes_turn(name, tokens)
            driver.scheduler.core.pause(driver.program(name), Reason.IDLE)
        driver.arrives("holder", 10)
        turns = {name: driver.arrives(name, tokens + 10) for name, tokens in sizes.items()}
        driver.releases("holder")
        for number in range(8):
            driver.passes(1.0)
            running = next(name for name, turn in turns.items() if not driver.held(turn))
            if running == "large":
                break
            del turns[running]
            if programs_come:
                driver.arrives(f"comes{number}", 60_000)
            driver.releases(running)
        assert ("large" not in turns or not driver.held(turns["large"])) is not programs_come


def test_waits_that_are_over_are_forgotten_though_nobody_is_ever_overdue() -> None:
    """A thousand turns that waited leave no more than a few behind."""
    order = LeastArea(bound_ratio=inf)
    driver = Driver(Composed(Cap(n=1), order=order), replicas={"r0": 1_000_000})
    for number in range(1000):
        driver.arrives(f"holder{number}", 10)
        driver.arrives(f"waits{number}", 100)
        driver.releases(f"holder{number}")
        driver.releases(f"waits{number}")
    assert len(order.areas._due) <= FEW_COUNT + 1


def test_without_a_bound_it_waits_as_long_as_small_ones_come() -> None:
    """The bound exists for this."""
    driver = one_at_a_time(bound_ratio=inf)
    driver.arrives("small0", 500)
    large = driver.arrives("large", 50_000)
    for number in range(1, 40):
        driver.arrives(f"small{number}", 500)
        driver.passes(1.0)
        driver.releases(f"small{number - 1}")
    assert driver.held(large)


def test_longest_waiting_of_overdue_programs_goes_first() -> None:
    """Sizes do not matter."""
    driver = one_at_a_time(bound_ratio=0.0)
    holder = driver.arrives("holder", 10)
    large = driver.arrives("large", 50_000)
    driver.passes(1.0)
    small = driver.arrives("small", 500)
    driver.passes(1.0)
    driver.finishes(holder, 10)
    driver.releases("holder")
    driver.releases("nobody")
    assert not driver.held(large)
    assert driver.held(small)


def test_without_patience_waits_are_in_order_before_any_program_ended() -> None:
    """With `bound_ratio=0` each is overdue at once, though the median is not known yet."""
    driver = one_at_a_time(bound_ratio=0.0)
    holder = driver.arrives("holder", 10)
    driver.arrives("large", 50_000)
    driver.passes(1.0)
    driver.arrives("small", 500)
    driver.passes(1.0)
    driver.finishes(holder, 10)
    assert [program.program_id for program in driver.scheduler.view.waiting()] == ["large", "small"]


def test_started_one_of_two_equal_programs_goes_first() -> None:
    """It counts half, so it precedes a new one that is a little smaller, but not one that is much smaller."""
    for new_tokens, began_goes_first in ((900, True), (100, False)):
        driver = Driver(load_policy("cap", {"n": 1, "order": "least-area"}), replicas={"r0": 1_000_000})
        driver.takes_turn("began", 1000)
        driver.ticks(301.0)  # its tool takes longer than the idle limit
        driver.arrives("holder", 10)
        new, again = driver.arrives("new", new_tokens), driver.arrives("began", 1000)
        driver.releases("holder")
        assert driver.held(new) == began_goes_first
        assert driver.held(again) != began_goes_first


@pytest.mark.parametrize("name", ["bound_ratio", "begun_ratio"])
def test_a_negative_ratio_is_refused(name: str) -> None:
    """So is one that is not a number."""
    for ratio in (-1.0, float("nan")):
        with pytest.raises(ConfigurationError, match=f"{name} must not be negative"):
            LeastArea(**{name: ratio})
