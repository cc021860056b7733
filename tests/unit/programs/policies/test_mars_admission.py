"""`mars` and `mars-few-long`, admissions: a window that both pressures move, its clamps, and the admitted programs."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant, Signal, ToolStarted, WindowUpdate
from thunderagent.programs.policies.papers.mars_admission import MarsAdmission

FEW_LONG = "mars-few-long"


def driver_with(capacity_tokens: int | None = 100_000, admission: str = "mars", **settings: float) -> Driver:
    chosen = {f"admission.{name}": value for name, value in settings.items()}
    policy = load_policy("passthrough", {"admission": admission, **chosen})
    return Driver(policy, replicas={"r0": capacity_tokens})


def admission_of(driver: Driver) -> MarsAdmission:
    admission = driver.scheduler.policy.admission  # type: ignore[attr-defined]
    assert isinstance(admission, MarsAdmission)
    return admission


def admitted(driver: Driver) -> list[str | None]:
    """The admitted programs, in order."""
    grants = [each for _, decisions in driver.events for each in decisions if isinstance(each, Grant)]
    return list(dict.fromkeys(grant.program_id for grant in grants))


def test_window_grows_by_one_per_interval_and_shrinks_by_a_factor() -> None:
    """Additively while both pressures are low, multiplicatively while one is high, never under its smallest."""
    driver = driver_with(window_max_count=20)
    admission = admission_of(driver)
    assert admission.window_count == 20
    turn_id = driver.arrives("a", 92_000)
    counts = []
    for _ in range(7):
        driver.ticks(0.2)
        counts.append(admission.window_count)
    assert counts == [4] * 7  # 14 at once clamped by memory at its high mark
    driver.finishes(turn_id, 1000)
    driver.releases("a")
    counts = []
    for _ in range(3):
        driver.ticks(0.1)
        driver.ticks(0.1)
        counts.append(admission.window_count)
    assert counts == [5, 6, 7]


def test_memory_pressure_goes_off_only_under_its_low_mark() -> None:
    """This is hysteresis: between the marks it stays, and the soft cap follows in a line."""
    driver = driver_with(window_max_count=20)
    admission = admission_of(driver)
    seen = []
    turn_id = driver.arrives("a", 1000)
    for output in (85_000, 86_500, 89_500):
        driver.progresses(turn_id, output)
        driver.ticks(0.2)
        seen.append((admission.kv_overloaded, admission.window_count))
    assert seen == [(False, 17), (False, 12), (True, 4)]
    driver.finishes(turn_id, 1000, 86_500)
    driver.ticks(0.2)
    assert admission.kv_overloaded
    driver.finishes(driver.arrives("a", 80_000), 80_000)
    driver.releases("a")
    driver.ticks(0.2)
    assert not admission.kv_overloaded


def test_tools_shrink_the_window_by_their_number_and_the_wait() -> None:
    """Either starts it, both must be low to end it; the wait of tools follows from how many share the workers."""
    driver = driver_with(tool_cpu_count=2, window_max_count=40, backlog_low_ratio=4.0, backlog_high_ratio=6.0)
    admission = admission_of(driver)
    for number in range(10):
        driver.takes_turn(f"p{number}", 100)
    driver.ticks(0.2)
    assert not admission.tools_overloaded
    driver.passes(29.8)
    driver.arrives("p0", 150)  # 30 s with 10 on 2 workers: 24 s of waiting, of which a fifth counts
    assert admission.mean_wait_s == pytest.approx(4.8)
    driver.arrives("p1", 150)
    assert admission.mean_wait_s == pytest.approx(4.8 + 0.2 * (30 * 7 / 9 - 4.8))
    driver.ticks(0.2)
    assert admission.tools_overloaded
    assert admission.window_count == 7  # W_cpu 10, times 0.7
    for number in range(2, 10):
        driver.releases(f"p{number}")
    driver.ticks(0.2)
    assert not admission.tools_overloaded  # no tool runs that could show more


def test_without_known_workers_it_looks_at_what_tools_take_beyond_the_usual() -> None:
    """Tools that always take 20 s are no pressure; a sudden 60 s is."""
    driver = driver_with(window_max_count=20)
    admission = admission_of(driver)
    for seconds in [20.0] * 5 + [60.0]:
        driver.takes_turn("a", 100)
        driver.passes(seconds)
        driver.fails(driver.arrives("a", 150))
        if seconds == 20.0:
            assert admission.mean_wait_s == 0.0
    assert admission.mean_wait_s == pytest.approx(0.2 * 40 - 0.01 * 40)
    driver.takes_turn("a", 200)
    driver.ticks(0.2)
    assert admission.tools_overloaded


def test_a_posted_start_says_how_long_a_tool_waited() -> None:
    """It is the time from the turn's end to the start; neither the tool's time nor further starts count then."""
    driver = driver_with(tool_cpu_count=1)
    admission = admission_of(driver)
    driver.takes_turn("a", 100)
    driver.takes_turn("b", 100)
    driver.passes(10.0)
    driver.send(ToolStarted(driver.now_s, "a", "make"))
    assert admission.mean_wait_s == pytest.approx(0.2 * 10)
    driver.passes(30.0)
    driver.send(ToolStarted(driver.now_s, "a", "test"))
    driver.arrives("a", 150)
    assert admission.mean_wait_s == pytest.approx(0.2 * 10)
    driver.releases("b")
    assert not admission._at_tools


def test_tool_cpus_bound_the_window() -> None:
    """W_cpu is the workers times the middle of the marks."""
    driver = driver_with(tool_cpu_count=2)
    for number in range(8):
        driver.arrives(f"p{number}", 100)
    assert driver.scheduler.book.admitted_count == 5


def test_the_largest_window_is_learned_from_the_size_of_programs() -> None:
    """It is how many programs of mean size memory holds; until one is known, the authors' 30 for each replica."""
    driver = driver_with()
    assert admission_of(driver).window_count == 30
    driver.arrives("a", 10_000)
    driver.ticks(0.2)
    assert admission_of(driver).window_count == 10
    unknown = driver_with(None)
    for number in range(40):
        unknown.arrives(f"p{number}", 10_000)
    assert unknown.scheduler.book.admitted_count == 30


@pytest.mark.parametrize(
    ("admission", "order"), [("mars", ["small", "middle", "large"]), (FEW_LONG, ["large", "small", "middle"])]
)
def test_the_smallest_goes_first_by_the_paper_also_where_all_find_a_place(admission: str, order: list[str]) -> None:
    """Order of arrival while both pressures are low is ours, under its own name."""
    driver = driver_with(admission=admission, window_max_count=8)
    driver.suspends()
    for name, tokens in (("large", 30_000), ("small", 100), ("middle", 2000)):
        driver.arrives(name, tokens)
        driver.passes(1.0)
    driver.goes_on()
    assert admitted(driver) == order


def long_ones_behind_a_full_window(admission: str) -> Driver:
    """All four places are taken, little memory is left, only long programs are outside; then a place becomes free."""
    driver = driver_with(200_000, admission=admission, window_min_count=4, window_max_count=4)
    turn_id = driver.arrives("in0", 40_000)
    for number in range(1, 4):
        driver.arrives(f"in{number}", 15_000)
    for name, tokens in (("oversized", 150_000), ("long", 80_000), ("shorter", 60_000)):
        driver.passes(1.0)
        driver.arrives(name, tokens)
    driver.passes(10.0)
    driver.finishes(turn_id, 40_000)
    driver.releases("in0")
    driver.ticks(0.2)
    return driver


def test_first_fitting_program_goes_where_all_are_long() -> None:
    """This is first fit: an oversized one at the head blocks none, and a smaller one does not pass one that fits."""
    assert admitted(long_ones_behind_a_full_window("mars"))[4:] == ["long"]
    assert admitted(long_ones_behind_a_full_window(FEW_LONG))[4:] == ["shorter"]


def test_a_short_one_outside_ends_first_fit() -> None:
    """First fit is for queues of long programs only: otherwise the smallest goes first."""
    driver = driver_with(300_000, window_min_count=1, window_max_count=1)
    turn_id = driver.arrives("in", 1000)
    for name, tokens in (("long", 80_000), ("longer", 90_000), ("short", 50_000)):
        driver.passes(1.0)
        driver.arrives(name, tokens)
    driver.finishes(turn_id, 1000)
    driver.releases("in")
    assert admitted(driver) == ["in", "short"]


def test_long_programs_are_bounded_by_their_places() -> None:
    """The paper does not bound their number, and no program waits for short ones that may come."""
    driver = driver_with(10_000_000, window_max_count=8)
    for number in range(5):
        driver.arrives(f"long{number}", 60_000)
        driver.ticks(0.2)  # the order is computed once in each control interval
    assert len(admitted(driver)) == 5


def test_the_smallest_goes_first_where_not_all_find_a_place() -> None:
    """One that does not fit in memory is passed over: then no larger one fits either."""
    driver = driver_with(window_min_count=1, window_max_count=1)
    turn_id = driver.arrives("in", 50_000)
    for name, tokens in (("large", 30_000), ("small", 1000), ("middle", 2000)):
        driver.passes(1.0)
        driver.arrives(name, tokens)
    for name in ("in", "small", "middle"):
        if name != "in":
            turn_id = max(driver.granted_on)
        driver.finishes(turn_id, 100)
        driver.releases(name)
    assert admitted(driver) == ["in", "small", "middle", "large"]


def test_the_largest_that_fits_goes_first_while_tools_are_under_pressure() -> None:
    """It reaches its tools later; one larger than the rest of the room is skipped, not waited for."""
    driver = driver_with(tool_cpu_count=1, backlog_low_ratio=1.0, backlog_high_ratio=2.0, window_min_count=4)
    for number in range(4):
        driver.takes_turn(f"t{number}", 10_000)
    driver.ticks(0.2)
    assert admission_of(driver).tools_overloaded
    for name, tokens in (("small", 1000), ("middle", 40_000), ("large", 70_000)):
        driver.arrives(name, tokens)
    driver.releases("t0")
    driver.ticks(0.2)
    assert admitted(driver)[-1] == "middle"


def test_a_long_program_goes_when_no_short_one_was_outside_for_a_moment() -> None:
    """At most two are in, and none while memory is under pressure; the first of all is let in at once."""
    driver = driver_with(
        10_000_000,
        FEW_LONG,
        window_max_count=40,
        window_min_count=10,
        tool_cpu_count=40,
        backlog_low_ratio=0.1,
        backlog_high_ratio=90.0,
    )
    driver.takes_turn("first", 10_000)
    for number in range(8):
        driver.takes_turn(f"t{number}", 10_000)  # more tools than is healthy: no longer in the order of arrival
        driver.passes(2.0)
    held = [driver.arrives(f"long{number}", 60_000) for number in range(3)]
    assert [driver.held(turn_id) for turn_id in held] == [False, False, True]
    driver.finishes(held[0], 60_000)
    driver.releases("long0")
    assert not driver.held(held[2])


def test_a_long_program_waits_for_short_ones() -> None:
    """It waits while they come one after the other, 5 s at most."""
    driver = driver_with(
        10_000_000,
        FEW_LONG,
        window_max_count=40,
        window_min_count=10,
        tool_cpu_count=40,
        backlog_low_ratio=0.1,
        backlog_high_ratio=90.0,
    )
    for number in range(9):
        driver.passes(8.0)
        driver.takes_turn(f"t{number}", 10_000)
    long = driver.arrives("long", 60_000)
    assert driver.held(long)
    driver.ticks(4.9)
    assert driver.held(long)
    driver.ticks(0.2)
    assert not driver.held(long)


def test_program_goes_in_whatever_it_takes_where_nobody_is_in() -> None:
    """Otherwise a program larger than the rest under the mark would wait for ever."""
    driver = driver_with(window_min_count=1, window_max_count=1)
    turn_id = driver.arrives("a", 100)
    giant = driver.arrives("giant", 99_000)
    driver.finishes(turn_id, 100)
    assert driver.held(giant)
    driver.releases("a")
    assert not driver.held(giant)


def test_moved_window_says_why() -> None:
    """The information stream has these signals."""
    driver = driver_with(window_max_count=10, window_min_count=2)
    heard: list[Signal] = []
    driver.scheduler.listen(heard.append)
    turn_id = driver.arrives("a", 95_000)
    driver.ticks(0.2)
    driver.finishes(turn_id, 100)
    driver.releases("a")
    driver.ticks(0.2)
    driver.ticks(0.2)
    told = [(each.window_count, each.why) for each in heard if isinstance(each, WindowUpdate)]
    assert told[0] == (2, "memory")
    assert told[-1][1] == "grown"


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool_cpu_count": -1},
        {"tool_cpu_count": 1.5},
        {"window_min_count": 0},
        {"window_max_count": 3},
        {"grow_count": 0},
        {"shrink_ratio": 1.0},
        {"control_interval_s": 0.0},
        {"backlog_low_ratio": 5.0},
        {"wait_low_s": 6.0},
        {"kv_low_ratio": 0.95},
        {"long_count": -1},
        {"packing": "neat"},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    """The error says which values are allowed."""
    with pytest.raises(ConfigurationError, match="admission mars"):
        MarsAdmission(**wrong)  # type: ignore[arg-type]
