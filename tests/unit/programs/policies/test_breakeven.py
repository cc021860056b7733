"""`breakeven`: each sentence of its theory of operation."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver, grew, of_kind, restored_on
from thunderagent.errors import ConfigurationError
from thunderagent.programs.learned.holding import HoldingPlan
from thunderagent.programs.learned.price import FIRST_TOKEN_S
from thunderagent.programs.messages import Grant, Hold, Mark, Pause, Reason, Restore, SchedulerSettings, Unmark
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.policies.letting_in import LONGEST_HOLD_S
from thunderagent.programs.policies.parts.simple import Fcfs
from thunderagent.programs.policy import Order, Policy

TOKEN_S = FIRST_TOKEN_S
"""The price of a token on these replicas: 1,000 are computed in 50 ms. Short turns teach nothing."""

THRESHOLD_S = 2.0
"""What is planned: how many seconds of holding a lost token is worth."""

LONG = SchedulerSettings(idle_limit_s=1e6, forget_limit_s=1e7)
FOREVER = 1e12
"""With this hold ratio no tool ever expires."""


def driver_with(
    *,
    hold_ratio: float = FOREVER,
    low_ratio: float = 1.0,
    foresight_ratio: float = 0.0,
    reserve_tokens: int = 0,
    adapt_capacity: bool = False,
    wait_ratio: float = FOREVER,
    replicas: dict[str, int | None] | None = None,
    order: Order | None = None,
    **more: float,
) -> Driver:
    """A driver with every part off but the requested ones and letting pass; its own order unless another is given."""
    policy: Policy = BreakEven(
        hold_ratio=hold_ratio,
        low_ratio=low_ratio,
        foresight_ratio=foresight_ratio,
        reserve_tokens=reserve_tokens,
        adapt_capacity=adapt_capacity,
        wait_ratio=wait_ratio,
        **more,
    )
    if order is not None:
        policy = Composed(policy, order=order)
    return Driver(policy, replicas=replicas or {"r0": 1000}, settings=LONG, threshold_s=THRESHOLD_S)


def holds_for(threshold_s: float) -> float:
    """Return the hold ratio that gives a threshold."""
    return threshold_s / THRESHOLD_S


def foresees_for(elapsed_s: float, capacity_tokens: int = 1000) -> float:
    """Return the foresight ratio that looks so far ahead."""
    return elapsed_s / (TOKEN_S * capacity_tokens)


def opens(driver: Driver, **tokens: int) -> None:
    """Let programs take a turn each, a second apart: the first is the oldest."""
    for name, size in tokens.items():
        driver.takes_turn(name, size)
        driver.passes(1.0)


# --- Hold or pause


def test_when_a_tool_begins_its_program_keeps_its_claim() -> None:
    """Its next turn finds its history."""
    driver = driver_with()
    opens(driver, a=600)
    assert driver.home("a") == "r0"
    assert driver.demand() == 600
    driver.arrives("a", 650)
    assert driver.decisions == [Grant(2, "a", "r0", Reason.HOME)]


@pytest.mark.parametrize(("hold_s", "waits"), [(FOREVER, True), (0.0, False)])
def test_an_expired_program_goes_when_somebody_needs_its_room(hold_s: float, waits: bool) -> None:
    """A held one stays."""
    driver = driver_with(hold_ratio=hold_s)
    driver.keeps_busy()
    opens(driver, a=600)
    turn = driver.arrives("b", 600)
    assert driver.held(turn) == waits
    assert driver.home("a") == ("r0" if waits else None)
    if not waits:
        assert driver.decisions == [
            Pause("a", "r0", Reason.EXPIRED),
            Restore("b", "r0", Reason.FITS),
            Grant(turn, "b", "r0", Reason.FITS),
        ]


def test_an_expired_program_stays_while_nobody_needs_its_room() -> None:
    """An hour of ticks takes nothing from it."""
    driver = driver_with(hold_ratio=0.0)
    opens(driver, a=400, b=400)
    assert [driver.ticks(10.0) for _ in range(360)] == [[]] * 360
    opens(driver, c=200)
    assert driver.home("a") == driver.home("b") == "r0"


def test_with_the_expired_goes_what_they_would_grow_by() -> None:
    """The expected growth of all counts as missing; the first program that goes takes its own part of it away."""
    driver = driver_with(hold_ratio=0.0, foresight_ratio=1e9, replicas={"r0": 18_000})
    grown(driver, whole_tokens=3000)
    opens(driver, a=1000, b=1000, c=1000)
    working = driver.arrives("w", 500)
    turn = driver.arrives("n", 2000)
    assert not driver.held(turn)
    assert not driver.held(working)
    assert [driver.home(name) for name in "abc"] == [None, "r0", "r0"]


@pytest.mark.parametrize("someone_works", [False, True])
def test_all_who_expired_go_for_one_that_fits_only_alone(someone_works: bool) -> None:
    """Together they claim less than the expected shortage, but without them the replica would be empty."""
    driver = driver_with(hold_ratio=0.0, foresight_ratio=1e9)
    driver.keeps_busy()
    opens(driver, a=200)
    if someone_works:
        driver.arrives("w", 50)
    grown(driver)
    turn = driver.arrives("b", 700)
    assert driver.held(turn) == someone_works
    assert driver.home("a") == ("r0" if someone_works else None)


def test_no_more_of_the_expired_go_than_need_be() -> None:
    """The one that expired first makes the room."""
    driver = driver_with(hold_ratio=0.0)
    opens(driver, a=300, b=300, c=300)
    driver.arrives("d", 400)
    assert of_kind(Pause, driver.decisions) == ["a"]


def test_a_program_is_held_until_its_tool_returns_less_than_once_in_the_threshold() -> None:
    """At a threshold of 20 s a tool of 10 s is held for 20 s; no program gets the room before its rate has fallen."""
    driver = driver_with(hold_ratio=holds_for(20.0))
    for _ in range(100):
        driver.scheduler.knowledge.tool_times.returned("compile", 10.0)
    driver.keeps_busy()
    driver.takes_turn("a", 500, tool="compile")
    hold_s = driver.program("a").hold_until_s - driver.now_s
    assert hold_s == pytest.approx(driver.scheduler.knowledge.tool_times.hold_s("compile", 20.0))
    assert 10.0 < hold_s < 30.0
    turn = driver.arrives("b", 600)
    driver.ticks(hold_s - 0.1)
    assert driver.held(turn)
    assert of_kind(Pause, driver.ticks(0.2)) == ["a"]
    assert not driver.held(turn)


def test_the_threshold_is_the_one_that_is_planned_for_its_replica() -> None:
    """The same for all sizes of programs; the hold ratio scales it, and infinite it is where all should be held."""
    held_s = {}
    for threshold_s, hold_ratio in ((5.0, 1.0), (20.0, 1.0), (5.0, 4.0), (0.0, 4.0), (inf, 1.0), (inf, 0.0)):
        driver = driver_with(hold_ratio=hold_ratio)
        driver.plans(threshold_s)
        opens(driver, small=10, large=500)
        small_s, large_s = (
            driver.program(each).hold_until_s - driver.program(each).acting_since_s for each in ("small", "large")
        )
        assert small_s == large_s
        held_s[threshold_s, hold_ratio] = small_s
    assert 0.0 < held_s[5.0, 1.0] < held_s[20.0, 1.0] == held_s[5.0, 4.0] < LONGEST_HOLD_S
    assert held_s[0.0, 4.0] == held_s[inf, 0.0] == 0.0
    assert held_s[inf, 1.0] == LONGEST_HOLD_S


def test_tools_are_held_by_their_names() -> None:
    """A tool that returns after a second is held; one that takes an hour is paused at once."""
    driver = driver_with(hold_ratio=holds_for(3.0))
    times = driver.scheduler.knowledge.tool_times
    for _ in range(200):
        times.returned("ls", 1.0)
        times.returned("train", 3600.0)
    driver.keeps_busy()
    driver.takes_turn("a", 400, tool="ls")
    driver.takes_turn("b", 400, tool="train")
    driver.passes(0.5)
    driver.arrives("c", 400)
    assert of_kind(Pause, driver.decisions) == ["b"]


# --- No idle engine


def test_a_replica_without_a_turn_lets_the_first_in_whoever_is_held_there() -> None:
    """With a turn in flight, whoever it belongs to, the first waits as long as others are held."""
    for busy in (False, True):
        driver = driver_with()
        if busy:
            driver.keeps_busy()
        opens(driver, a=600)
        turn = driver.arrives("b", 600)
        if busy:
            assert driver.decisions == [Hold(turn, "b", Reason.NO_ROOM)]
            continue
        assert driver.decisions == [
            Pause("a", "r0", Reason.EXPIRED),
            Restore("b", "r0", Reason.FITS),
            Grant(turn, "b", "r0", Reason.FITS),
        ]


@pytest.mark.parametrize("end", ["finishes", "fails", "is_abandoned"])
def test_expired_program_makes_room_when_the_last_turn_there_ends(end: str) -> None:
    """There is no tick in between; the second in the queue waits for the first one's turn."""
    driver = driver_with()
    turns = driver.keeps_busy("r0", "r0")
    opens(driver, a=600)
    first = driver.arrives("first", 600)
    driver.passes(1.0)
    second = driver.arrives("second", 700)
    getattr(driver, end)(turns[0])
    assert driver.held(first)
    getattr(driver, end)(turns[1])
    assert of_kind(Pause, driver.decisions) == ["a"]
    assert first in driver.granted_on
    assert driver.held(second)
    driver.finishes(first, 600)
    assert of_kind(Pause, driver.decisions) == ["first"]
    assert second in driver.granted_on


def test_programs_with_the_longest_tools_are_paused_first_and_no_more_than_needed() -> None:
    """They are evicted first, too."""
    for tokens, going in ((100, []), (400, ["b"]), (700, ["b", "c"]), (701, ["b", "c", "a"])):
        driver = driver_with()
        opens(driver, a=300, b=300, c=300)
        opens(driver, a=300)
        assert not driver.held(driver.arrives("d", tokens))
        assert of_kind(Pause, driver.decisions) == going


def test_overdue_holds_end_first_then_the_next_due() -> None:
    """The client of `young` said when its next turn comes; the others are held for ever."""
    for elapsed_s in (0.0, 30.0):
        driver = driver_with()
        opens(driver, old=300, young=300, middle=300)
        driver.is_hinted("young", 4.0)
        driver.passes(elapsed_s)
        assert (driver.program("young").hold_until_s < driver.now_s) == (elapsed_s > 0)
        driver.arrives("next", 600)
        assert of_kind(Pause, driver.decisions) == ["young", "old"]


def test_room_above_the_watermark_and_for_growth_is_nobodys_there() -> None:
    """With a turn in flight the next would wait; without one nobody has to go for it."""
    for busy in (False, True):
        driver = driver_with(low_ratio=0.5, foresight_ratio=1e9)
        grown(driver)
        opens(driver, a=400)
        if busy:
            driver.keeps_busy()
        turn = driver.arrives("b", 500)
        assert driver.held(turn) == busy
        assert of_kind(Pause, driver.decisions) == []


def test_idle_replica_of_several_admits_the_queue_head() -> None:
    """It is not its home, where a turn runs."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    away_from_home(driver, 300)
    driver.keeps_busy("r0", "r1")
    opens(driver, x=900, y=900)
    homes = {driver.home(each): each for each in ("x", "y")}
    driver.passes(1.0)
    turn = driver.arrives("a", 300)
    assert driver.held(turn)
    ends = next(each for each, at in driver.granted_on.items() if at == "r1" and driver.scheduler.turns.get(each))
    driver.finishes(ends)
    assert driver.granted_on[turn] == "r1"
    assert of_kind(Pause, driver.decisions) == [homes["r1"]]
    assert driver.home(homes["r0"]) == "r0"


def test_a_program_that_waits_for_one_replica_gets_it_when_it_idles() -> None:
    """One that may go anywhere, and came later, stays in the queue."""
    driver = driver_with(order=Fcfs(), replicas={"r0": 1000, "r1": 1000})
    driver.routes("program", "bound", r0=1)
    busy, _ = driver.keeps_busy("r0", "r1")
    opens(driver, x=900, y=900)
    bound = driver.arrives("bound", 500)
    driver.passes(1.0)
    free = driver.arrives("free", 600)
    assert driver.held(bound)
    assert driver.held(free)
    driver.finishes(busy)
    assert driver.granted_on[bound] == "r0"
    assert driver.held(free)


# --- Admission by age


def test_program_nearest_its_end_goes_first() -> None:
    """A small program before a large one that came before it."""
    driver = driver_with(pass_count=0)
    driver.keeps_busy()
    driver.takes_turn("x", 1000)
    driver.passes(60.0)
    driver.takes_turn("x", 1000)
    large = driver.arrives("large", 900)
    driver.passes(5.0)
    small = driver.arrives("small", 300)
    assert driver.held(large)
    assert driver.held(small)
    driver.releases("x")
    assert of_kind(Restore, driver.decisions) == ["small"]
    driver.finishes(small, 300)
    driver.releases("small")
    assert not driver.held(large)


def test_overdue_program_goes_before_all_and_has_room_kept() -> None:
    """The limit is four times the median life: until then smaller programs precede it, afterwards none does."""
    driver = driver_with(wait_ratio=0.5)
    driver.takes_turn("lived", 10)
    driver.passes(100.0)
    driver.takes_turn("lived", 10)
    driver.releases("lived")
    bound_s = 4.0 * driver.scheduler.knowledge.median_residence_s
    opens(driver, a=300)
    busy = driver.arrives("busy", 300)
    large = driver.arrives("large", 900)
    driver.passes(bound_s - 1.0)
    early = driver.arrives("early", 100)
    assert not driver.held(early)
    driver.passes(2.0)
    driver.finishes(early, 100)
    late = driver.arrives("late", 100)
    assert driver.held(large)
    assert driver.held(late)
    driver.finishes(busy, 300)
    for name in ("early", "busy", "a"):
        driver.releases(name)
    assert not driver.held(large)


def test_external_order_replaces_the_own_one_which_then_learns_nothing() -> None:
    """The oldest program goes first, not the one whose turn waits longest."""
    driver = driver_with(pass_count=0, order=Fcfs())
    assert not driver.scheduler.stream.learners
    opens(driver, old=300)
    driver.drains("r0")
    driver.comes_up("r0", 1000)
    assert driver.home("old") is None
    driver.keeps_busy()
    driver.takes_turn("x", 1000)
    young = driver.arrives("young", 200)
    driver.passes(5.0)
    old = driver.arrives("old", 300)
    assert driver.held(young)
    assert driver.held(old)
    driver.releases("x")
    assert of_kind(Restore, driver.decisions) == ["old", "young"]


def test_room_is_given_on_the_event_that_frees_it() -> None:
    """There is no tick in between."""
    driver = driver_with()
    driver.keeps_busy()
    opens(driver, a=900)
    driver.arrives("b", 500)
    assert restored_on(driver.releases("a")) == {"b": "r0"}


def test_a_few_behind_the_first_may_pass_it() -> None:
    """If the first does not fit and one may pass, only the next in the queue is considered."""
    for pass_count, passed in ((0, []), (1, []), (2, ["small"])):
        driver = driver_with(pass_count=pass_count)
        driver.keeps_busy()
        opens(driver, a=700, b=300)
        for name, tokens in (("first", 900), ("second", 800), ("small", 200)):
            assert driver.held(driver.arrives(name, tokens))
            driver.passes(1.0)
        assert of_kind(Restore, driver.releases("b")) == passed


def test_a_newcomer_passes_where_it_fits_and_not_when_nobody_may() -> None:
    """It may pass on arrival, too; `pass_count` 0 switches that off, and the reason says so."""
    for pass_count in (0, 4):
        driver = driver_with(pass_count=pass_count, order=Fcfs())
        driver.keeps_busy()
        opens(driver, a=700)
        driver.arrives("first", 900)
        turn = driver.arrives("small", 200)
        assert driver.held(turn) == (pass_count == 0)
        if not pass_count:
            assert driver.decisions == [Hold(turn, "small", Reason.QUEUE_AHEAD)]


def test_overtaking_program_takes_nothing_from_expired_claims() -> None:
    """Only the first gets room made for it."""
    driver = driver_with(hold_ratio=holds_for(10.0), order=Fcfs())
    driver.arrives("busy", 600)
    driver.passes(1.0)
    opens(driver, b=300)
    assert driver.held(driver.arrives("first", 900))
    driver.passes(10.0)
    assert driver.program("b").hold_until_s < driver.now_s
    assert driver.held(driver.arrives("small", 200))
    assert driver.home("b") == "r0"


def test_when_the_first_has_waited_for_long_nobody_passes_it_on_its_replica() -> None:
    """The limit is half of the median life: until then others pass, afterwards the room is kept until it fits."""
    driver = driver_with(wait_ratio=0.5, replicas={"r0": 1000}, order=Fcfs())
    driver.keeps_busy()
    driver.takes_turn("lived", 10)
    driver.passes(100.0)
    driver.takes_turn("lived", 10)
    driver.releases("lived")
    wait_s = 0.5 * driver.scheduler.knowledge.median_residence_s
    assert 40.0 < wait_s < 60.0
    opens(driver, a=400, b=300)
    first = driver.arrives("first", 900)
    driver.passes(wait_s - 0.1)
    assert not driver.held(driver.arrives("passes", 100))
    driver.passes(0.2)
    waits = driver.arrives("waits", 100)
    driver.releases("a")
    assert driver.held(first)
    assert driver.held(waits)
    driver.releases("b")
    assert not driver.held(first)


def test_on_other_replicas_whoever_fits_goes_on() -> None:
    """Only the replica where the first is nearest to fitting is kept for it, though fewer programs are there."""
    driver = driver_with(wait_ratio=0.5, replicas={"r0": 1000, "r1": 1000}, order=Fcfs())
    driver.keeps_busy("r0", "r1")
    driver.takes_turn("lived", 10)
    driver.passes(10.0)
    driver.releases("lived")
    opens(driver, a=250, b=300, c=250)
    assert [driver.home(each) for each in "abc"] == ["r0", "r1", "r0"]
    first = driver.arrives("first", 900)
    driver.passes(60.0)
    assert driver.granted_on[driver.arrives("small", 100)] == "r0"
    assert driver.held(first)


def test_program_whose_home_is_reserved_for_the_head_goes_elsewhere() -> None:
    """The full home counts as usual: the program goes elsewhere."""
    driver = driver_with(wait_ratio=0.5, replicas={"r0": 1000, "r1": 1000}, order=Fcfs())
    driver.keeps_busy("r0", "r1")
    driver.takes_turn("lived", 10)
    driver.passes(10.0)
    driver.releases("lived")
    opens(driver, first=10, a=300)
    assert (driver.home("first"), driver.home("a")) == ("r0", "r1")
    for replica_id in ("r0", "r1"):
        driver.drains(replica_id)
        driver.comes_up(replica_id, 1000)
    opens(driver, c=600, b=550)
    assert (driver.home("c"), driver.home("b")) == ("r0", "r1")
    first = driver.arrives("first", 900)
    driver.passes(60.0)
    turn = driver.arrives("a", 300)
    assert driver.granted_on[turn] == "r0"
    assert driver.held(first)


def test_until_a_program_ended_nobody_has_waited_for_too_long() -> None:
    """The median is unknown until then."""
    driver = driver_with()
    driver.keeps_busy()
    opens(driver, a=700)
    first = driver.arrives("first", 900)
    driver.passes(1e5)
    assert driver.held(first)
    assert not driver.held(driver.arrives("small", 100))


def test_without_patience_nobody_passes_the_first_before_any_program_ended() -> None:
    """With `wait_ratio=0` a replica is reserved at once, though the median is not known yet."""
    driver = driver_with(wait_ratio=0.0, order=Fcfs())
    driver.keeps_busy()
    opens(driver, a=700)
    driver.arrives("first", 900)
    driver.passes(1.0)
    assert driver.held(driver.arrives("small", 100))


# --- Room to grow


def grown(driver: Driver, whole_tokens: int = 5000) -> None:
    """Teach the scheduler that programs add 100 tokens in ten seconds, and are 5,000 larger in the mean."""
    growth = driver.scheduler.knowledge.growth
    for _ in range(20):
        growth.turn_ended(grew(100, 50, 10.0))
        growth.program_ended(whole_tokens, 1)


def newcomers_let_in(driver: Driver) -> int:
    """Let programs of 100 tokens come until one has to wait; return how many did not."""
    for number in range(20):
        turn = driver.arrives(f"new {number}", 100)
        if driver.held(turn):
            driver.is_abandoned(turn)
            driver.releases(f"new {number}")
            return number
    raise AssertionError("twenty fit")


def test_a_newcomer_needs_room_for_what_all_will_grow_by() -> None:
    """Ten of 100 fit into 1,000; fewer fit the further ahead it looks; if it is off, all ten fit."""
    counts = []
    for foresight_s in (0.0, 5.0, 20.0, 1000.0):
        driver = driver_with(foresight_ratio=foresees_for(foresight_s))
        grown(driver)
        counts.append(newcomers_let_in(driver))
    assert counts[0] == 10 > counts[1] > counts[2] > counts[3] == 1


def test_nobody_waits_for_growth_that_was_never_seen() -> None:
    """How fast programs grow, and how far, must both be known: all ten that fit are let in before."""
    for rate_known, size_known, some_wait in ((False, False, False), (True, False, False), (True, True, True)):
        driver = driver_with(foresight_ratio=foresees_for(1000.0))
        growth = driver.scheduler.knowledge.growth
        for _ in range(20):
            if rate_known:
                growth.turn_ended(grew(100, 50, 10.0))
            if size_known:
                growth.program_ended(5000, 1)
        assert (newcomers_let_in(driver) < 10) == some_wait


def test_nobody_waits_for_growth_where_all_fit_at_their_full_size() -> None:
    """Five of 400 tokens with their growth fit in 2,100, the sixth does not; the expectation is much more."""
    driver = driver_with(foresight_ratio=1e9, replicas={"r0": 2100})
    grown(driver, whole_tokens=300)
    opens(driver, large=700)
    assert newcomers_let_in(driver) == 4


def test_one_that_lost_its_claim_needs_that_room_before_any_program_ended() -> None:
    """A newcomer does not wait for a guess of how large programs become; who lost its claim knows that they grew."""
    for whole_tokens, newcomers_wait in ((None, False), (5000, True)):
        driver = driver_with(foresight_ratio=foresees_for(1000.0), pass_count=0)
        growth = driver.scheduler.knowledge.growth
        for _ in range(20):
            growth.turn_ended(grew(100, 50, 10.0))
            if whole_tokens is not None:
                growth.program_ended(whole_tokens, 1)
        opens(driver, back=100)
        driver.drains("r0")
        driver.comes_up("r0", 1000)
        assert driver.home("back") is None
        assert not driver.held(driver.arrives("first", 300))
        turn = driver.arrives("newcomer", 100)
        assert driver.held(turn) == newcomers_wait
        driver.is_abandoned(turn)
        driver.releases("newcomer")
        assert driver.held(driver.arrives("back", 100))


def test_one_that_lost_its_claim_needs_room_for_itself_only_where_all_fit() -> None:
    """Memory is not short: two programs of 100 tokens that grow by 300 fit in 1,000."""
    driver = driver_with(foresight_ratio=foresees_for(1000.0), pass_count=0)
    grown(driver, whole_tokens=300)
    opens(driver, back=100)
    driver.drains("r0")
    driver.comes_up("r0", 1000)
    assert not driver.held(driver.arrives("first", 100))
    assert not driver.held(driver.arrives("back", 100))


def test_nobody_is_expected_to_grow_beyond_the_mean() -> None:
    """A program that is larger than most from the start is not expected to grow at all."""
    driver = driver_with(foresight_ratio=foresees_for(20.0))
    growth = driver.scheduler.knowledge.growth
    for _ in range(20):
        growth.turn_ended(grew(100, 50, 10.0))
        growth.program_ended(120, 1)
    turn = driver.arrives("a", 300)
    assert driver.program("a").growth_tokens == 120
    driver.finishes(turn, 300, 0)
    driver.takes_turn("a", 400)
    assert driver.program("a").growth_tokens == 20
    driver.takes_turn("a", 500)
    assert driver.program("a").growth_tokens == 0


def test_a_claim_holds_what_turns_were_seen_to_add() -> None:
    """A guess of 100 tokens weighs as much as 16 turns; after many turns it is what they add in the mean."""
    driver = driver_with(reserve_tokens=100, replicas={"r0": 10**6})
    turn = driver.arrives("a", 400)
    assert driver.demand() == 400 + 100
    driver.finishes(turn, 400, 0)
    assert driver.demand() == 400 + 100 * 16 // 17  # a first turn adds nothing
    for number in range(1, 1000):
        driver.takes_turn("a", 400 + 300 * number)
    assert 400 + 300 * 999 + 294 <= driver.demand() <= 400 + 300 * 999 + 300


def test_programs_of_one_turn_claim_no_more_than_they_need() -> None:
    """Nobody was seen to go on, so nothing is kept for a next turn: as many as fit are let in."""
    driver = driver_with(reserve_tokens=100, replicas={"r0": 1000})
    for number in range(2000):
        driver.takes_turn(f"done{number}", 100)
        driver.releases(f"done{number}")
    turns = [driver.arrives(f"p{number}", 100) for number in range(11)]
    assert [turn in driver.granted_on for turn in turns].count(True) == 10


def test_a_reserve_of_nothing_stays_nothing() -> None:
    """Whatever turns add."""
    driver = driver_with(replicas={"r0": 10**6})
    for number in range(20):
        driver.takes_turn("a", 400 + 300 * number)
    assert driver.demand() == 400 + 300 * 19


@pytest.mark.parametrize(("share_prefixes", "fitting_count"), [(True, 16), (False, 4)])
def test_common_tokens_of_programs_are_claimed_once(share_prefixes: bool, fitting_count: int) -> None:
    """Programs share 200 of 250 tokens: 16 of them take 200 and 16 times 50."""
    driver = driver_with(share_prefixes=share_prefixes)
    turns = [driver.arrives(f"p{number}", 250, prefix={"system": 200}) for number in range(20)]
    assert sum(turn in driver.granted_on for turn in turns) == fitting_count
    assert driver.demand() == 1000


# --- Watermarks


def test_up_to_the_low_watermark_programs_are_let_in_and_above_the_high_one_paused() -> None:
    """The marks are 800 and 1,000 of 1,000: between them none is admitted or paused."""
    driver = driver_with(low_ratio=0.8)
    opens(driver, a=400)
    turn = driver.arrives("b", 400)
    assert not driver.held(turn)
    driver.is_abandoned(held := driver.arrives("c", 10))
    assert held not in driver.granted_on
    driver.progresses(turn, output=200)
    assert driver.ticks(1.0) == []
    driver.progresses(turn, output=201)
    assert driver.ticks(1.0) == [Pause("a", "r0", Reason.THRASHING)]


FILLED = HoldingPlan(0.0, 1.0, 1.0, may_overfill=True)


def filled(**settings: float) -> Driver:
    """One replica of 1,000 tokens, to be filled by turns alone."""
    driver = driver_with(low_ratio=0.6, **settings)
    driver.scheduler.knowledge._plans["r0"] = (inf, FILLED)
    return driver


@pytest.mark.parametrize(("high_ratio", "fit_count"), [(1.0, 10), (0.7, 7)])
def test_where_turns_alone_fill_the_memory_three_more_than_fit_are_let_in(high_ratio: float, fit_count: int) -> None:
    """Nobody is paused for that; and when one ends, the next is let in."""
    driver = filled(high_ratio=high_ratio)
    turns = [driver.arrives(f"p{number}", 100) for number in range(16)]
    assert [driver.held(turn) for turn in turns] == [False] * (fit_count + 3) + [True] * (13 - fit_count)
    view, held = driver.scheduler.view, driver.program("p15")
    kept_tokens = driver.scheduler.policy.kept_tokens(view, held, driver.scheduler.replicas["r0"])
    assert 100 + kept_tokens - (1000 - driver.demand()) == pytest.approx(100)
    assert driver.ticks(1.0) == []
    driver.finishes(turns[0], 100)
    driver.releases("p0")
    assert not driver.held(turns[fit_count + 3])
    assert driver.held(turns[fit_count + 4])


def test_turns_without_a_program_take_room_but_are_no_programs() -> None:
    driver = filled()
    driver.arrives(None, 500)
    turns = [driver.arrives(f"p{number}", 100) for number in range(16)]
    assert [driver.held(turn) for turn in turns].count(False) == 5 + 3


@given(st.lists(st.integers(1, 600), min_size=4, max_size=30))
def test_who_was_let_in_beyond_the_memory_is_not_marked_while_nobody_grows(sizes: list[int]) -> None:
    driver = filled()
    for number, tokens in enumerate(sizes):
        driver.arrives(f"p{number}", tokens)
    assert [each for _ in range(3) for each in driver.ticks(1.0) if isinstance(each, Mark | Unmark | Pause)] == []


def test_the_three_are_marked_once_memory_is_worth_more() -> None:
    driver = filled()
    turns = [driver.arrives(f"p{number}", 100) for number in range(16)]
    assert [driver.held(turn) for turn in turns].count(False) == 13
    driver.scheduler.knowledge._plans["r0"] = (inf, HoldingPlan(0.0, 1.0, 1.0))
    assert len(of_kind(Mark, driver.ticks(1.0))) == 3


def test_first_those_go_who_expired() -> None:
    """They go though they are the oldest."""
    driver = driver_with(hold_ratio=holds_for(3.0))
    for _ in range(200):
        driver.scheduler.knowledge.tool_times.returned("train", 3600.0)
        driver.scheduler.knowledge.tool_times.returned("ls", 1.0)
    driver.takes_turn("old", 300, tool="train")
    driver.passes(0.1)
    driver.takes_turn("young", 300, tool="ls")
    turn = driver.arrives("grows", 400)
    driver.progresses(turn, output=100)
    assert of_kind(Pause, driver.ticks(0.1)) == ["old"]


def test_then_the_youngest_whose_tool_runs_and_then_the_youngest_with_a_turn() -> None:
    """The latter is only marked: a turn in flight is never interrupted."""
    driver = driver_with()
    opens(driver, acts_old=100, acts_young=100)
    turns = {}
    for name in ("reasons_old", "reasons_young"):
        turns[name] = driver.arrives(name, 400)
        driver.passes(1.0)
    driver.progresses(turns["reasons_old"], output=100)
    assert driver.ticks(1.0) == [Pause("acts_young", "r0", Reason.THRASHING)]
    driver.progresses(turns["reasons_old"], output=500)
    assert driver.ticks(1.0) == [
        Pause("acts_old", "r0", Reason.THRASHING),
        Mark("reasons_young", "r0", Reason.THRASHING),
    ]
    assert driver.finishes(turns["reasons_young"], 400) == [Pause("reasons_young", "r0", Reason.MARKED)]


def test_a_marked_one_is_unmarked_if_there_is_room_again_before_its_turn_ends() -> None:
    """It keeps its claim; of several the oldest is first."""
    driver = driver_with()
    turns = {}
    for name in ("a", "b", "c"):
        turns[name] = driver.arrives(name, 300)
        driver.passes(1.0)
    driver.progresses(turns["a"], output=500)
    assert of_kind(Mark, driver.ticks(1.0)) == ["c", "b"]
    driver.finishes(turns["a"], 300)
    assert driver.decisions == [Unmark("b", "r0", Reason.RELIEVED), Unmark("c", "r0", Reason.RELIEVED)]
    driver.finishes(turns["c"], 300)
    assert driver.home("c") == "r0"


def test_a_marked_one_is_not_unmarked_while_its_room_is_needed() -> None:
    """Only as many are unmarked as fit."""
    driver = driver_with()
    turns = {}
    for name in ("a", "b", "c"):
        turns[name] = driver.arrives(name, 300)
        driver.passes(1.0)
    driver.progresses(turns["a"], output=500)
    driver.ticks(1.0)
    driver.finishes(turns["a"], 500)
    assert driver.decisions == [Unmark("b", "r0", Reason.RELIEVED)]


def test_the_last_unfinished_member_of_a_group_goes_last() -> None:
    """It goes last though it is the youngest: the whole group waits for it."""
    for group, paused in (("g", "a"), ("", "last")):
        driver = driver_with()
        driver.takes_turn("a", 300)
        driver.passes(1.0)
        driver.takes_turn("other", 100, group=group)
        driver.passes(1.0)
        driver.takes_turn("last", 300, group=group)
        driver.releases("other")
        driver.takes_turn("last", 300)
        driver.progresses(driver.arrives("grows", 400), output=100)
        assert of_kind(Pause, driver.ticks(1.0)) == [paused]


def test_program_that_becomes_the_last_of_its_group_during_a_tool_is_paused_last() -> None:
    """Its place in the order changes when the others end, not only at its next turn."""
    driver = driver_with()
    driver.takes_turn("a", 300)
    driver.passes(1.0)
    driver.takes_turn("other", 100, group="g")
    driver.passes(1.0)
    driver.takes_turn("last", 300, group="g")
    driver.releases("other")
    driver.progresses(driver.arrives("grows", 400), output=100)
    assert of_kind(Pause, driver.ticks(1.0)) == ["a"]


def test_a_group_of_one_is_no_group() -> None:
    """With a separate group for each program the youngest is still paused first."""
    driver = driver_with()
    for name in ("a", "b"):
        driver.takes_turn(name, 300, group=f"only {name}")
        driver.passes(1.0)
    driver.progresses(driver.arrives("grows", 400), output=100)
    assert of_kind(Pause, driver.ticks(1.0)) == ["b"]


# --- Home


def away_from_home(driver: Driver, tokens: int) -> None:
    """Run a program's turn on r0 and pause it there, with its history kept; then r1 has the most room."""
    driver.takes_turn("a", tokens)
    driver.drains("r0")
    driver.comes_up("r0", 1000)
    assert driver.home("a") is None


def test_a_program_goes_back_to_where_its_history_lies() -> None:
    """It does so though there is more room elsewhere."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    away_from_home(driver, 300)
    driver.passes(1.0)
    driver.takes_turn("b", 300)
    assert driver.home("b") == "r0"
    assert driver.granted_on[driver.arrives("a", 300)] == "r0"


def test_a_program_whose_home_is_full_goes_elsewhere() -> None:
    """It moves at once: on no load did waiting for its history pay."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    away_from_home(driver, 500)
    driver.arrives("b", 600)
    assert driver.granted_on[driver.arrives("a", 500)] == "r1"


def test_new_ones_go_where_fewest_programs_are_for_the_memory() -> None:
    """Twice the memory takes twice as many."""
    driver = driver_with(replicas={"r0": 1000, "r1": 2000})
    homes = []
    for number in range(6):
        driver.takes_turn(f"p{number}", 200)
        homes.append(driver.home(f"p{number}"))
    assert homes == ["r1", "r0", "r1", "r1", "r0", "r1"]


def test_while_all_fit_new_ones_go_where_fewest_turns_run() -> None:
    """More memory computes no faster, and tools that run slow nobody down."""
    driver = driver_with(replicas={"r0": 1000, "r1": 4000})
    grown(driver, whole_tokens=30)
    for number in range(6):
        driver.arrives(f"p{number}", 20)
    assert [driver.home(f"p{number}") for number in range(6)] == ["r1", "r0"] * 3
    driver.takes_turn("tool", 20)
    assert driver.home("tool") == "r1"
    assert driver.granted_on[driver.arrives("beside it", 20)] == "r0"
    assert driver.granted_on[driver.arrives("another", 20)] == "r1"


def test_a_replica_without_memory_for_one_more_of_mean_size_counts_by_its_memory() -> None:
    """It has fewest turns, and room for the program as it is, but not for all as they will be."""
    driver = driver_with(replicas={"r0": 1000, "r1": 4000})
    grown(driver, whole_tokens=400)
    for number in range(6):
        driver.arrives(f"p{number}", 20)
    assert [driver.home(f"p{number}") for number in range(6)] == ["r1", "r0", "r1", "r0", "r1", "r1"]


@pytest.mark.parametrize(("tokens", "home"), [(300, "r0"), (500, "r1")])
def test_a_large_program_counts_as_one_where_there_is_room(tokens: int, home: str) -> None:
    """There is more room beside two small ones, but their turns slow each other down."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    driver.takes_turn("large", 600)
    driver.takes_turn("small", 100)
    driver.takes_turn("smaller", 50)
    assert [driver.home(each) for each in ("large", "small", "smaller")] == ["r0", "r1", "r1"]
    assert driver.granted_on[driver.arrives("a", tokens)] == home


def test_among_replicas_with_as_many_programs_one_goes_where_most_room_is() -> None:
    """The one with most of all has more of them."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000, "r2": 1000})
    for name, tokens in {"a": 500, "b": 300, "c": 50, "d": 50}.items():
        driver.takes_turn(name, tokens)
    assert [driver.home(each) for each in "abcd"] == ["r0", "r1", "r2", "r2"]
    assert driver.granted_on[driver.arrives("e", 100)] == "r1"


def test_turns_count_as_programs_those_side_by_side_and_those_of_none() -> None:
    """One program with two turns slows another down as much as two with one."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    driver.arrives("a", 100)
    driver.arrives("a", 100, branch="other")
    driver.takes_turn("b", 500)
    assert driver.home("a") == "r0"
    assert driver.home("b") == "r1"
    assert driver.granted_on[driver.arrives("c", 100)] == "r1"
    driver.takes_turn("d", 10)
    assert driver.home("d") == "r0"
    driver.arrives_pinned("r1")
    driver.arrives_pinned("r1")
    assert driver.granted_on[driver.arrives("e", 100)] == "r0"


def test_an_empty_replica_draws_none_that_it_is_too_small_for() -> None:
    """Alone one may always stay, but where there is room it goes on."""
    driver = driver_with(replicas={"r0": 4000})
    driver.takes_turn("a", 500)
    driver.comes_up("r1", 1000)
    assert driver.granted_on[driver.arrives("b", 2000)] == "r0"
    assert driver.granted_on[driver.arrives("c", 500)] == "r1"


def test_shared_tokens_bring_no_extra_programs_in() -> None:
    """Each adds little to what is claimed beside the others, but as many turns as any."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    driver.takes_turn("other", 300)
    homes = []
    for number in range(5):
        driver.takes_turn(f"p{number}", 210, prefix={"system": 200})
        homes.append(driver.home(f"p{number}"))
    assert driver.home("other") == "r0"
    assert homes == ["r1", "r1", "r0", "r1", "r0"]


def test_program_takes_the_room_that_was_made_for_it() -> None:
    """It would fit beside fewer programs, whose beginning it shares, but then they would have gone for nothing."""
    driver = driver_with(hold_ratio=0.0, replicas={"r0": 500})
    driver.takes_turn("alike", 400, prefix={"system": 360})
    driver.comes_up("r1", 2000)
    for name in "abcdef":
        driver.takes_turn(name, 270)
        assert driver.home(name) == "r1"
    turn = driver.arrives("n", 450, prefix={"system": 360})
    assert driver.granted_on[turn] == "r1"
    assert of_kind(Pause, driver.decisions) == ["a"]


def test_a_turn_that_its_home_failed_does_not_wait_for_it() -> None:
    """It is tried elsewhere at once, if there is room."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    driver.takes_turn("a", 600)
    assert driver.home("a") == "r0"
    turn = driver.arrives("a", 650)
    driver.fails(turn)
    assert driver.granted_on[driver.arrives("a", 650, avoid="r0")] == "r1"


# --- Where memory is not short, or not known


def test_every_turn_goes_at_once_where_memory_is_not_short() -> None:
    """The default settings cause no hold, no pause and no mark."""
    driver = Driver(BreakEven(), replicas={"r0": 100_000}, settings=LONG)
    for number in range(200):
        driver.passes(0.3)
        name = f"p{number % 10}"
        turn = driver.arrives(name, 100 + number * 5)
        driver.finishes(turn, 100 + number * 5, 20, tool="sh")
        driver.ticks(0.1)
    assert {type(decision) for _, decisions in driver.events for decision in decisions} == {Grant, Restore}


def test_a_program_that_is_larger_than_every_replica_goes_at_once() -> None:
    """The engine decides; other programs may wait, or be on the replica."""
    driver = driver_with(replicas={"r0": 1000, "r1": 500})
    opens(driver, a=600, b=450)
    driver.arrives("waits", 900)
    driver.arrives("huge", 1001)
    assert of_kind(Restore, driver.decisions) == ["huge"]
    assert {decision.reason for decision in driver.decisions} == {Reason.OVERSIZE}


def test_common_tokens_of_branches_do_not_make_a_program_too_large() -> None:
    """Two of 600 with 500 in common are 700, and wait for room; two of 1,100 are larger than the replica."""
    driver = driver_with()
    prefix = {"system": 500}
    for branch in ("", "side"):
        driver.takes_turn("p", 600, branch=branch, prefix=prefix, tool="make")
    assert driver.demand() == 700
    driver.scheduler.core.pause(driver.program("p"), Reason.IDLE)
    running = driver.arrives("other", 500)
    again = driver.arrives("p", 600, prefix=prefix)
    assert driver.program("p").claim_tokens == 1200
    assert driver.decisions == [Hold(again, "p", Reason.NO_ROOM)]
    driver.finishes(running, 500)
    driver.releases("other")
    assert not driver.held(again)
    assert driver.demand() == 700


@pytest.mark.parametrize("head_tokens", [0, 850])
def test_branches_that_share_fit_where_nobody_else_shares(head_tokens: int) -> None:
    """Two of 450 with 400 in common are 500: as the first that waits, and behind one that needs 850."""
    driver = driver_with(pass_count=8, order=Fcfs())
    prefix = {"system": 400}
    driver.opens("head")
    driver.passes(1.0)
    for branch in ("", "side"):
        driver.takes_turn("p", 450, branch=branch, prefix=prefix, tool="make")
    driver.scheduler.core.pause(driver.program("p"), Reason.IDLE)
    running = [driver.arrives("long", 200), driver.arrives("short", 400)]
    assert not head_tokens or driver.held(driver.arrives("head", head_tokens))
    again = driver.arrives("p", 450, prefix=prefix)
    assert driver.held(again)
    driver.finishes(running[1], 400)
    driver.releases("short")
    assert not driver.held(again)
    assert driver.demand() == 700


def test_a_program_that_shares_with_others_may_be_larger_than_every_replica() -> None:
    """Beside them it would add 300 of its 1,200; alone it fits nowhere, so it goes at once."""
    driver = driver_with()
    driver.arrives("other", 950, prefix={"system": 900})
    driver.arrives("p", 1200, prefix={"system": 900})
    assert driver.decisions[-1] == Grant(2, "p", "r0", Reason.OVERSIZE)


def test_program_alone_always_fits() -> None:
    """It may grow beyond the replica, and is neither paused nor marked."""
    driver = driver_with(low_ratio=0.5, high_ratio=0.6)
    turn = driver.arrives("a", 490)
    driver.progresses(turn, output=900)
    assert driver.ticks(1.0) == []
    driver.finishes(turn, 490, 900)
    assert driver.ticks(1.0) == []
    assert driver.home("a") == "r0"


def test_program_alone_fits_although_its_growth_does_not() -> None:
    """A newcomer on an empty replica needs no room to grow."""
    driver = driver_with(foresight_ratio=foresees_for(1e4))
    grown(driver)
    assert not driver.held(driver.arrives("a", 990))


def test_everyone_fits_where_no_capacity_is_known() -> None:
    """This holds whatever they claim, with the default settings."""
    driver = Driver(BreakEven(), replicas={"r0": None}, settings=LONG)
    turns = [driver.arrives(f"p{number}", 10**6) for number in range(50)]
    assert not any(driver.held(turn) for turn in turns)
    assert driver.ticks(1.0) == []


@pytest.mark.parametrize(("known", "assumed_tokens"), [((3000, 1000, 2000), 2000), ((500,), 500), ((), inf)])
def test_a_replica_of_unknown_size_counts_as_the_median_of_the_others(
    known: tuple[int, ...], assumed_tokens: float
) -> None:
    """Where no size is known it has room for everyone; once its own is known, that counts."""
    driver = driver_with(replicas={"unknown": None} | {f"r{number}": size for number, size in enumerate(known)})
    account = driver.scheduler.replicas["unknown"].account
    assert account.limit_tokens == assumed_tokens
    assert account.capacity_tokens is None
    driver.comes_up("unknown", 700)
    assert account.limit_tokens == account.assumed_tokens == account.capacity_tokens == 700


def test_assumed_size_of_an_unknown_replica_follows_the_others() -> None:
    """They come, tell another size, and go."""
    driver = driver_with(replicas={"r0": None})
    account = driver.scheduler.replicas["r0"].account
    limits = [account.limit_tokens]
    for size in (1000, 4000):
        driver.comes_up("r1", size)
        limits.append(account.limit_tokens)
    driver.is_removed("r1")
    limits.append(account.limit_tokens)
    assert limits == [inf, 1000, 4000, inf]


def test_a_new_replica_of_unknown_size_gets_its_share_beside_known_ones() -> None:
    """It neither draws all nor gets none, and holds who comes when as much is claimed there."""
    driver = driver_with(replicas={"r0": 1000, "r1": 1000})
    opens(driver, a=200, b=200)
    driver.comes_up("new", None)
    turns = [driver.arrives(f"p{number}", 200) for number in range(15)]
    granted = [turn for turn in turns if turn in driver.granted_on]
    homes = [driver.granted_on[turn] for turn in granted]
    assert {each: homes.count(each) for each in ("r0", "r1", "new")} == {"r0": 4, "r1": 4, "new": 5}
    assert [driver.demand(each) for each in ("r0", "r1", "new")] == [1000, 1000, 1000]


def test_turns_in_flight_decide_where_no_size_is_known() -> None:
    """Whatever is claimed: the one with fewest turns gets the next."""
    driver = driver_with(replicas={"r0": None, "r1": None})
    large = driver.arrives("large", 100_000)
    others = [driver.arrives(f"p{number}", 100) for number in range(3)]
    homes = [driver.granted_on[turn] for turn in (large, *others)]
    assert sorted(homes[:2]) == sorted(homes[2:]) == ["r0", "r1"]
    driver.finishes(large, 100_000)
    assert driver.granted_on[driver.arrives("next", 100)] == homes[0]


def test_program_to_be_held_through_every_tool_is_held_where_no_capacity_is_known() -> None:
    """Nothing is planned there, and holding costs nothing."""
    driver = Driver(BreakEven(hold_ratio=inf), replicas={"r0": None}, settings=LONG)
    driver.takes_turn("a", 100)
    assert driver.program("a").hold_until_s == driver.now_s + LONGEST_HOLD_S


def test_an_idle_table_decides_nothing_in_a_thousand_ticks() -> None:
    """With acting, paused and waiting programs none moves back and forth."""
    driver = driver_with(hold_ratio=0.75, adapt_capacity=True, low_ratio=0.95)
    busy = driver.arrives("busy", 600)
    driver.takes_turn("a", 300)
    driver.arrives("waits", 900)
    driver.progresses(busy, output=100)
    driver.ticks(1.0)
    assert [driver.ticks(1.0) for _ in range(1000)] == [[]] * 1000


# --- Settings


def test_the_capacity_is_corrected_by_what_is_lost_unless_that_is_switched_off() -> None:
    """If a replica loses half of what programs keep, less of it may be claimed."""
    for adapt_capacity in (True, False):
        driver = driver_with(adapt_capacity=adapt_capacity)
        for _ in range(60):
            driver.finishes(driver.arrives("a", 400), 400, 0, 200)
            driver.ticks(0.5)
        limit_tokens = driver.scheduler.replicas["r0"].account.limit_tokens
        assert (limit_tokens < 900) == adapt_capacity
        assert adapt_capacity or limit_tokens == 1000


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        *[
            ({name: bad}, f"breakeven: {name} must not be negative")
            for name in (
                "hold_ratio",
                "reserve_tokens",
                "foresight_ratio",
                "pass_count",
                "wait_ratio",
            )
            for bad in (-1, float("nan"))
        ],
        ({"low_ratio": 0.0}, "0 < low_ratio <= high_ratio"),
        ({"low_ratio": 0.9, "high_ratio": 0.8}, "0 < low_ratio <= high_ratio"),
        ({"high_ratio": float("nan")}, "0 < low_ratio <= high_ratio"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float], named: str) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigurationError, match=named):
        BreakEven(**wrong)


@pytest.mark.parametrize("adapt_capacity", [True, False])
def test_more_may_be_claimed_than_fits_where_the_plan_says_so(adapt_capacity: bool) -> None:
    """A lost token costs little there. With a capacity that is not corrected, claims stay within it."""
    driver = driver_with(adapt_capacity=adapt_capacity)
    driver.takes_turn("a", 100)
    account = driver.scheduler.replicas["r0"].account
    limits = []
    for claimed_ratio in (1.0, 1.2, 1.0):
        driver.scheduler.knowledge._plans["r0"] = (inf, HoldingPlan(1.0, 2.0, 1.0, claimed_ratio))
        driver.ticks(1.0)
        limits.append(account.limit_tokens)
    assert limits == ([1000, 1200, 1000] if adapt_capacity else [1000] * 3)
