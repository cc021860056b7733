"""Why a program waits, what must happen for it to continue, and what a program holds whose tool runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import Driver, grew
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import ProgramReleased, ReplicaDown, TurnAsk, TurnEnd
from thunderagent.programs.policies import POLICIES
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.ttl import Ttl
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policy import Policy
from thunderagent.proxy.admin.story import ProgramStoryReport, WaitingReport, program_story
from thunderagent.runtime import Runtime

PLAIN = BreakEven(reserve_tokens=0, foresight_ratio=0, low_ratio=1, hold_ratio=1e9)
"""Claims are contexts, and nothing is kept free, so figures are round."""


PLACE = "a place must become free: 1 program is admitted (admission window)"


def story_of(driver: Driver, program_id: str) -> ProgramStoryReport:
    runtime = Runtime(driver.scheduler, clock=lambda: driver.now_s)
    return program_story(runtime, driver.program(program_id))


def waiting_of(driver: Driver, program_id: str) -> WaitingReport:
    waiting = story_of(driver, program_id).waiting
    assert waiting is not None, f"{program_id} does not wait"
    return waiting


def driven(policy: Policy = PLAIN, *, replicas: dict[str, int | None] | None = None) -> Driver:
    """Return a driver whose replicas hold, so no more is claimed than fits."""
    return Driver(policy, replicas=replicas, threshold_s=20.0)


def full(policy: Policy = PLAIN, *, replicas: dict[str, int | None] | None = None) -> Driver:
    """Return a driver whose replica of 1,000 tokens computes for a program of 800."""
    driver = driven(policy, replicas=replicas)
    driver.arrives("first", 800)
    return driver


def test_the_head_of_the_queue_waits_for_the_tokens_that_are_missing() -> None:
    """The report has all figures, and a sentence made from them."""
    driver = full()
    driver.arrives("a", 500)
    driver.passes(3.0)
    waiting = waiting_of(driver, "a")
    assert (waiting.reason, waiting.for_s, waiting.ahead_count, waiting.claim_tokens) == ("no_room", 3.0, 0, 500)
    (room,) = waiting.replicas
    assert room.model_dump(exclude={"growth_tokens"}) == {
        "replica_id": "r0",
        "free_tokens": 200,
        "kept_tokens": 0,
        "needed_tokens": 500,
        "missing_tokens": 300,
        "resident_tokens": 0,
        "is_home": False,
    }
    assert waiting.what_must_happen == "300 tokens must become free on r0"


def test_program_behind_the_queue_head_waits_for_others_first() -> None:
    """There are one or several others; a program that would fit waits only for them."""
    driver = full()
    for name, tokens in (("a", 500), ("b", 600), ("c", 700)):
        driver.arrives(name, tokens)
        driver.passes(1.0)
    must = waiting_of(driver, "b").what_must_happen
    assert must == "1 program goes first; then 400 tokens must become free on r0"
    must = waiting_of(driver, "c").what_must_happen
    assert must == "2 programs go first; then 500 tokens must become free on r0"
    driver = full(Ttl(reserve_tokens=0))
    driver.arrives("a", 500)
    driver.passes(1.0)
    driver.arrives("b", 100)
    waiting = waiting_of(driver, "b")
    assert (waiting.reason, waiting.what_must_happen) == (
        "queue_ahead",
        "1 program goes first; then it fits on r0, if enough room is left",
    )


def test_program_goes_where_least_is_missing() -> None:
    """Of several replicas the sentence names one; the report has them all."""
    driver = driven(PLAIN, replicas={"r0": 1000, "r1": 1000})
    driver.arrives("x", 900)
    driver.arrives("y", 800)
    driver.arrives("a", 500)
    waiting = waiting_of(driver, "a")
    assert [room.missing_tokens for room in waiting.replicas] == [400, 300]
    assert waiting.what_must_happen == "300 tokens must become free on r1"


def test_a_newcomer_is_told_what_is_kept_for_others_to_grow() -> None:
    """It fits beside all claims and still waits: the programs there are still small. An idle replica keeps nothing."""
    driver = driven(replace(PLAIN, foresight_ratio=100.0))
    growth = driver.scheduler.knowledge.growth
    for _ in range(20):  # programs grow by 200 tokens a turn, and by 400 in all
        growth.turn_ended(grew(200, 0, 1.0))
        growth.program_ended(400, 1)
    (busy,) = driver.keeps_busy()
    driver.takes_turn("first", 500)
    driver.arrives("second", 400)
    waiting = waiting_of(driver, "second")
    (room,) = waiting.replicas
    assert (room.free_tokens, room.needed_tokens, room.growth_tokens) == (500, 400, 800)
    assert room.kept_tokens == room.missing_tokens + 100 == 800
    assert waiting.what_must_happen == (
        "700 tokens must become free on r0: 400 are needed and 500 are free, but 800 are kept for programs to grow"
    )
    driver.finishes(busy)
    assert story_of(driver, "second").waiting is None
    assert driver.home("first") == "r0"


def test_history_in_memory_is_named() -> None:
    """A paused program has its history where it was, until others need that memory."""
    driver = driven(PLAIN, replicas={"r0": 1000})
    driver.takes_turn("old", 100)
    driver.passes(1.0)
    driver.takes_turn("a", 500)
    driver.arrives("old", 600)
    driver.ticks(1.0)
    assert driver.home("a") is None
    driver.arrives("a", 500)
    waiting = waiting_of(driver, "a")
    (room,) = waiting.replicas
    assert (room.is_home, room.resident_tokens) == (True, 400)
    assert waiting.what_must_happen == "100 tokens must become free on r0, where 400 tokens of its history are cached"


def test_without_a_replica_one_must_come_up() -> None:
    driver = full()
    driver.arrives("a", 500)
    driver.goes_down("r0")
    waiting = waiting_of(driver, "a")
    assert (waiting.replicas, waiting.what_must_happen) == ([], "a replica must come up")


def test_suspension_is_reported_of_replicas_where_the_program_may_go() -> None:
    """A bound program reports a suspension of its own replica; an unbound one only a suspension of all replicas."""
    driver = full(replicas={"r0": 1000, "r1": 1000})
    driver.routes("class", "to-r0", r0=1)
    driver.suspends("weights", "r0")
    driver.arrives("bound", 100, program_class="to-r0")
    driver.arrives("beside", 900)
    driver.arrives("anywhere", 500)
    assert waiting_of(driver, "bound").what_must_happen == "grants must go on, which are suspended for: weights"
    assert waiting_of(driver, "bound").reason == "suspended"
    assert waiting_of(driver, "anywhere").what_must_happen == "400 tokens must become free on r1"
    driver.suspends("sleep", "r1")
    assert waiting_of(driver, "bound").what_must_happen == "grants must go on, which are suspended for: weights"
    assert waiting_of(driver, "anywhere").what_must_happen.endswith("suspended for: weights, sleep")


def test_program_outside_the_window_must_be_admitted_while_anything_grants() -> None:
    """Its route's replica grants nothing, but the program may be admitted before that."""
    driver = full(load_policy("passthrough", {"admission": "window", "admission.n": 1}), replicas={"r0": 9, "r1": 9})
    driver.routes("class", "to-r0", r0=1)
    driver.suspends("weights", "r0")
    driver.arrives("bound", 100, program_class="to-r0")
    assert waiting_of(driver, "bound").what_must_happen.startswith(PLACE)
    assert waiting_of(driver, "bound").reason == "admission"
    several = full(load_policy("passthrough", {"admission": "window", "admission.n": 2}), replicas={"r0": 9, "r1": 9})
    for program_id in ("second", "third"):
        several.arrives(program_id, 100)
    assert waiting_of(several, "third").what_must_happen.startswith("a place must become free: 2 programs are admitted")
    driver.suspends("sleep", "r1")
    assert waiting_of(driver, "bound").what_must_happen.endswith("suspended for: weights, sleep")


def test_a_place_is_the_policy_s_to_give() -> None:
    """Under a cap the sentence does not say that tokens are missing, because they are not."""
    driver = full(Cap(n=1), replicas={"r0": None})
    driver.arrives("a", 500)
    waiting = waiting_of(driver, "a")
    (room,) = waiting.replicas
    assert (room.free_tokens, room.missing_tokens) == (None, 0)
    assert waiting.what_must_happen == (
        "the policy must let it in: it fits on r0, but the policy limits active programs"
    )


def test_shared_prefixes_are_not_needed_twice() -> None:
    """Tokens that others claim there are neither needed nor missing, and are in memory."""
    driver = driven()
    driver.send(
        TurnAsk(now_s=driver.now_s, turn_id=1, program_id="first", branch_id="", prompt_bytes=3200, prefix=((7, 1600),))
    )
    driver.send(
        TurnAsk(now_s=driver.now_s, turn_id=2, program_id="a", branch_id="", prompt_bytes=3200, prefix=((7, 1600),))
    )
    waiting = waiting_of(driver, "a")
    (room,) = waiting.replicas
    assert (waiting.claim_tokens, room.needed_tokens, room.missing_tokens) == (800, 400, 200)
    assert waiting.what_must_happen == "200 tokens must become free on r0, where 400 tokens of its prompt are cached"


def test_an_active_program_whose_tool_runs_holds_its_claim() -> None:
    """It says for how long, and for how much longer; negative times mean that others may take its room."""
    driver = Driver(Ttl(ttl_s=10.0))
    turn_id = driver.arrives("a", 100)
    assert story_of(driver, "a").holding is None
    driver.send(
        TurnEnd(
            now_s=driver.now_s,
            turn_id=turn_id,
            prompt_tokens=100,
            output_tokens=10,
            cached_tokens=0,
            tool="bash:pytest",
        )
    )
    driver.passes(4.0)
    holding = story_of(driver, "a").holding
    assert holding is not None
    assert holding.model_dump() == {"tool": "bash:pytest", "for_s": 4.0, "hold_until_in_s": 6.0}
    driver.passes(8.0)
    holding = story_of(driver, "a").holding
    assert holding is not None
    assert holding.hold_until_in_s == -2.0


def test_hold_without_end_reports_no_end() -> None:
    driver = Driver(Cap(n=1))
    driver.takes_turn("a", 100)
    holding = story_of(driver, "a").holding
    assert holding is not None
    assert holding.hold_until_in_s is None


def test_a_paused_program_whose_tool_runs_neither_waits_nor_holds() -> None:
    driver = Driver(Ttl(ttl_s=1.0))
    driver.takes_turn("a", 100)
    driver.ticks(2.0)
    report = story_of(driver, "a")
    assert report.status == "paused"
    assert (report.waiting, report.holding) == (None, None)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("capacity_tokens", [1000, None])
def test_every_policy_s_programs_are_told_of(name: str, capacity_tokens: int | None) -> None:
    """At any event each waiting program shows what it waits for, and no other does."""
    driver = Driver(load_policy(name, {"n": 2} if name == "cap" else {}), replicas={"r0": capacity_tokens})
    turn_ids = [driver.arrives(f"p{number}", 300) for number in range(6)]
    driver.finishes(turn_ids[0], 300, 10)
    driver.send(ProgramReleased(driver.now_s, "p1"))
    for event in (None, ReplicaDown(driver.now_s, "r0")):
        if event is not None:
            driver.send(event)
        for program in driver.scheduler.programs.values():
            report = story_of(driver, program.program_id)
            assert (report.waiting is not None) == bool(program.held)
            assert (report.holding is not None) == ((report.status, report.phase) == ("active", "acting"))
            if report.waiting is not None:
                assert report.waiting.what_must_happen


def test_a_turn_that_ended_says_when_it_got_its_lease_and_what_it_calls() -> None:
    """A turn that was held has the end of its hold; a turn that never got a lease has nothing."""
    driver = Driver(Cap(1))
    turn = driver.arrives("a", 100)
    driver.passes(2.0)
    driver.finishes(turn, 100, 5, tool="bash:make")
    held, left = driver.arrives("b", 100), driver.arrives("c", 100)
    driver.passes(3.0)
    driver.is_abandoned(left)
    driver.releases("a")
    driver.passes(4.0)
    driver.finishes(held, 100, 5)
    ended = {name: story_of(driver, name).story[-1] for name in ("b", "c")}
    assert (ended["b"].what, ended["b"].why, ended["b"].ago_s, ended["b"].began_ago_s) == ("finished", "", 0.0, 4.0)
    assert (ended["c"].what, ended["c"].ago_s, ended["c"].began_ago_s) == ("abandoned", 4.0, None)
    turn = driver.arrives("b", 150)
    driver.passes(1.0)
    driver.finishes(turn, 150, 5, tool="bash:make")
    last = story_of(driver, "b").story[-1]
    assert (last.why, last.ago_s, last.began_ago_s) == ("calls bash:make", 0.0, 1.0)


def test_turns_that_have_not_ended_are_told() -> None:
    driver = Driver(Cap(1))
    running = driver.arrives("a", 100)
    driver.passes(1.0)
    driver.starts(running)
    driver.arrives("b", 200)
    driver.passes(2.0)
    (turn,) = story_of(driver, "a").turns
    assert turn.model_dump() == {
        "turn_id": running,
        "branch_id": "",
        "replica_id": "r0",
        "prompt_tokens": 100,
        "output_tokens": 0,
        "arrived_ago_s": 3.0,
        "granted_ago_s": 3.0,
        "started_ago_s": 2.0,
    }
    (turn,) = story_of(driver, "b").turns
    assert (turn.replica_id, turn.arrived_ago_s, turn.granted_ago_s, turn.started_ago_s) == (None, 2.0, None, None)


def test_a_turn_that_the_engine_refused_is_told_as_that() -> None:
    """It does not count as one that its replica failed."""
    driver = Driver()
    driver.fails(driver.arrives("a", 100), refused=True)
    driver.fails(driver.arrives("a", 100))
    assert [entry.what for entry in story_of(driver, "a").story][-2:] == ["refused", "failed"]
