"""A program passes from one scheduler to another: it keeps its state, and all that it used."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.builders import Driver
from thunderagent.programs.handlers.programs import record_of
from thunderagent.programs.messages import ProgramRecord, ProgramsAdopted, SchedulerSettings
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.ttl import Ttl
from thunderagent.programs.state.program import Kind


def records(driver: Driver) -> dict[str, ProgramRecord]:
    book = driver.scheduler.book
    return {program_id: record_of(program, book) for program_id, program in book.programs.items()}


def adopts(driver: Driver, kept: dict[str, ProgramRecord]) -> None:
    driver.send(ProgramsAdopted(driver.now_s, "r0", tuple(kept.values())))


def busy() -> Driver:
    """One program in each state, where two programs at a time may be active."""
    driver = Driver(Cap(n=2), replicas={"r0": 100_000, "r1": 100_000}, settings=SchedulerSettings(idle_limit_s=20.0))
    driver.takes_turn("idle", 500)
    driver.passes(21.0)
    driver.ticks()
    driver.takes_turn("acting", 1000)
    driver.tool_starts("acting", "make")
    driver.arrives("working", 2000, branch="side")
    driver.arrives("waits", 3000)
    driver.opens("announced", group="g", parent="acting")
    driver.passes(2.0)
    return driver


def test_programs_stand_with_the_next_scheduler_where_they_stood() -> None:
    """The next scheduler's record of them is the same, but for turns, which their gateways report."""
    driver = busy()
    kept = records(driver)
    places = {program_id: program.place.kind for program_id, program in driver.scheduler.programs.items()}
    assert places == {
        "idle": Kind.AWAY,
        "acting": Kind.ACTING,
        "working": Kind.WORKING,
        "waits": Kind.WAITING,
        "announced": Kind.AWAY,
    }
    other = Driver(Cap(n=2), replicas={"r0": 100_000, "r1": 100_000})
    adopts(other, kept)
    after = records(other)
    assert after.keys() == kept.keys()
    for program_id, record in kept.items():
        turned = record if program_id != "working" else record._replace(resident_tokens=0)  # its turn is reported later
        now = after[program_id] if program_id != "working" else after[program_id]._replace(resident_tokens=0)
        if program_id == "waits":
            assert (record.standing, now.standing) == ("paused", "idle"), "it has no memory to be restored to"
            continue
        assert now == turned
    assert other.demand("r0") + other.demand("r1") > 0
    assert other.scheduler.book.active_count == 2


def test_a_program_whose_replica_is_not_open_is_paused() -> None:
    """It keeps its usage, and waits for room with its next turn."""
    kept = records(busy())
    other = Driver(Cap(n=1), replicas={})
    adopts(other, kept)
    assert other.scheduler.book.active_count == 0
    assert other.program("acting").prompt_tokens_total == kept["acting"].prompt_tokens_total
    assert other.program("acting").place.kind is Kind.RESTING


def test_a_program_that_lives_is_not_adopted_and_a_tenant_has_no_more_than_it_may() -> None:
    """The next scheduler's own knowledge is newer."""
    other = Driver(Cap(n=1), settings=SchedulerSettings(max_programs_count=1))
    other.takes_turn("a", 700)
    adopts(other, {"a": ProgramRecord("a", standing="active", replica_id="r0")})
    assert other.program("a").context_tokens > 0
    turn = other.arrives("a", 900)
    adopts(other, {"b": ProgramRecord("b"), "a": ProgramRecord("a")})
    assert list(other.scheduler.programs) == ["a"]
    other.finishes(turn)


@pytest.mark.parametrize("ages", [(0.0, 5.0, 50.0)])
def test_ages_grow_with_the_time_that_passed(ages: tuple[float, ...]) -> None:
    """The next scheduler counts them on its own clock."""
    driver = busy()
    kept = records(driver)["acting"]
    olds = [kept.older(elapsed_s) for elapsed_s in ages]
    for (first_s, first), (second_s, second) in pairwise(zip(ages, olds, strict=True)):
        assert second.age_s - first.age_s == pytest.approx(second_s - first_s)
    other = Driver(Cap(n=1))
    adopts(other, {"acting": olds[-1]})
    program = other.program("acting")
    assert other.now_s - program.acting_since_s == pytest.approx(kept.acting_s + ages[-1])
    assert program.tool_runs
    assert program.tool == "make"


def test_program_writer_hears_of_each_change() -> None:
    """Each is reported once, however often it changed; an ended one is reported as ended."""
    driver = Driver(Cap(n=1))
    book = driver.scheduler.book
    assert book.changed_programs is None
    book.changed_programs = {}
    driver.takes_turn("a", 100)
    driver.takes_turn("a", 300)
    driver.arrives("b", 100)
    assert list(book.changed_programs) == ["a", "b"]
    book.changed_programs = {}
    driver.tool_starts("a", "x")
    driver.releases("b")
    assert list(book.changed_programs) == ["a", "b"]
    assert book.changed_programs["b"] is None


@pytest.mark.parametrize("tool_ended", [True, False])
def test_an_adopted_program_holds_its_claim_no_longer_than_one_of_this_scheduler(tool_ended: bool) -> None:
    """That is so if no tool of it runs, too, because that was said to be over, or a turn is in flight."""
    driver = Driver(Ttl(ttl_s=5.0))
    driver.takes_turn("a", 100)
    if tool_ended:
        driver.tool_ends("a")
    else:
        driver.arrives("a", 200)
    driver.passes(60.0)
    other = Driver(Ttl(ttl_s=5.0))
    adopts(other, records(driver))
    program = other.program("a")
    assert (program.place.kind, program.tool_runs) == (Kind.ACTING, False)
    other.ticks(4.9)
    assert other.home("a") == "r0", "its turn may be reported yet"
    other.ticks(0.2)
    assert other.home("a") is None


def test_an_adopted_program_goes_where_its_route_leads_and_its_memory_is() -> None:
    """Its route leads to three replicas, one of which it was on."""
    replicas: dict[str, int | None] = {"r0": 100_000, "r1": 100_000, "r2": 100_000}
    driver, other = Driver(replicas=replicas), Driver(replicas=replicas)
    for each in (driver, other):
        each.routes("all", "", r0=1, r1=1, r2=1)
    for name in "abc":
        driver.takes_turn(name, 100)
    homes = {name: driver.home(name) for name in "cba"}
    assert sorted(filter(None, homes.values())) == ["r0", "r1", "r2"]
    kept = records(driver)
    adopts(other, {name: kept[name] for name in homes})
    assert {name: other.home(name) for name in homes} == homes
    assert {name: other.program(name).routed_to for name in homes} == homes
