"""Under every policy a program that waits for one replica is neither passed for ever nor passes others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import Setting, load_policy
from thunderagent.programs.messages import Reason, SchedulerSettings
from thunderagent.programs.state.paused_queue import PausedQueue
from thunderagent.programs.state.program import Program, Turn

CAPACITY_TOKENS = 10_000
LARGE_TOKENS, SMALL_TOKENS = 7_000, 2_400
STEP_COUNT = 60
"""Number of steps within which the waiting one must run."""

BY_AGE: Mapping[str, tuple[str, Mapping[str, Setting]]] = {
    "breakeven": ("breakeven", {"reserve_tokens": 0}),
    "breakeven, nobody passes": ("breakeven", {"reserve_tokens": 0, "pass_count": 0}),
    "ttl": ("ttl", {"reserve_tokens": 0}),
    "continuum": ("continuum", {}),
    "infercept": ("infercept", {"reserve_tokens": 0}),
    "mars": ("mars", {"reserve_tokens": 0, "growth_quantile": 0.0, "admission": "window", "admission.n": 1000}),
    "thunderagent by age": ("thunderagent", {"reserve_tokens": 0, "order": "fcfs"}),
    "ttl by least attained service": ("ttl", {"reserve_tokens": 0, "order": "plas"}),
    "ttl by steps": ("ttl", {"reserve_tokens": 0, "order": "orbit-step"}),
}
"""Policies in whose order no later program goes before a waiting one of any size."""

BY_SIZE: Mapping[str, tuple[str, Mapping[str, Setting]]] = {
    "thunderagent": ("thunderagent", {"reserve_tokens": 0}),
    "ttl, shortest first": ("ttl", {"reserve_tokens": 0, "order": "shortest"}),
    "breakeven, shortest first": ("breakeven", {"reserve_tokens": 0, "order": "shortest"}),
}
"""Policies in whose order smaller ones always go first: none is passed by one of equal size."""

CAP: Mapping[str, tuple[str, Mapping[str, Setting]]] = {"cap": ("cap", {"n": 6})}


def driven(policy: tuple[str, Mapping[str, Setting]], *, fair: bool = False) -> Driver:
    name, settings = policy
    driver = Driver(
        load_policy(name, settings),
        replicas={"r0": CAPACITY_TOKENS, "r1": CAPACITY_TOKENS},
        settings=SchedulerSettings(fair_tenants=fair),
    )
    driver.routes("class", "to-r0", r0=1)
    driver.routes("class", "to-r1", r1=1)
    return driver


class Stream:
    """Small programs of one turn each that arrive faster than they end."""

    def __init__(self, driver: Driver, tokens: int, class_of: Callable[[int], str]) -> None:
        self._driver = driver
        self._tokens = tokens
        self._class_of = class_of
        self._numbers = count()
        self._turns: dict[int, str] = {}

    def step(self) -> None:
        """Let two arrive; a second later the two longest running end, each is followed by one more, and it ticks."""
        for _ in range(2):
            self._comes()
        self._driver.passes(1.0)
        running = [turn_id for turn_id in self._turns if turn_id in self._driver.granted_on]
        for turn_id in running[:2]:
            program_id = self._turns.pop(turn_id)
            self._driver.finishes(turn_id, self._tokens)
            self._driver.releases(program_id)
            self._comes()
        self._driver.ticks()

    def _comes(self) -> None:
        number = next(self._numbers)
        program_id = f"small-{number}"
        turn_id = self._driver.arrives(program_id, self._tokens, program_class=self._class_of(number))
        self._turns[turn_id] = program_id


STREAMS: Mapping[str, Callable[[int], str]] = {
    "of the same route": lambda _: "to-r0",
    "without a route": lambda _: "",
    "of both": lambda number: ("to-r0", "")[number % 2],
    "of both and of another route": lambda number: ("to-r0", "", "to-r1")[number % 3],
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("policy", [*BY_AGE, *BY_SIZE, *CAP])
def test_routed_program_is_not_overtaken_without_end(policy: str, stream: str) -> None:
    """Newcomers of the same route, or without a route, fit where it does not fit."""
    driver = driven({**BY_AGE, **BY_SIZE, **CAP}[policy])
    newcomers = Stream(driver, SMALL_TOKENS, STREAMS[stream])
    for _ in range(4):
        newcomers.step()
    tokens = SMALL_TOKENS if policy in BY_SIZE else LARGE_TOKENS
    waiting = driver.arrives("bound", tokens, program_class="to-r0")
    assert driver.held(waiting)
    for _ in range(STEP_COUNT):
        newcomers.step()
        if not driver.held(waiting):
            break
    assert driver.granted_on.get(waiting) == "r0", driver.program("bound").story()


@pytest.mark.parametrize("policy", [*BY_AGE, *BY_SIZE, *CAP])
def test_free_program_is_not_overtaken_without_end_by_routed_ones(policy: str) -> None:
    """Bound programs are considered first, but go in the same order."""
    driver = driven({**BY_AGE, **BY_SIZE, **CAP}[policy])
    newcomers = Stream(driver, SMALL_TOKENS, lambda number: ("to-r0", "to-r1")[number % 2])
    for _ in range(4):
        newcomers.step()
    waiting = driver.arrives("free", SMALL_TOKENS if policy in BY_SIZE else LARGE_TOKENS)
    assert driver.held(waiting)
    for _ in range(STEP_COUNT):
        newcomers.step()
        if not driver.held(waiting):
            break
    assert not driver.held(waiting), driver.program("free").story()


@pytest.mark.parametrize("policy", ["ttl", "breakeven", "cap"])
def test_nobody_is_overtaken_without_end_where_tenants_have_shares(policy: str) -> None:
    """Within a tenant it is as without shares; a tenant that had less may go first, until it had as much."""
    driver = driven({**BY_AGE, **CAP}[policy], fair=True)
    newcomers = Stream(driver, SMALL_TOKENS, lambda _: "to-r0")
    for _ in range(4):
        newcomers.step()
    waiting = driver.arrives("bound", LARGE_TOKENS, program_class="to-r0")
    assert driver.held(waiting)
    for _ in range(STEP_COUNT):
        newcomers.step()
    assert not driver.held(waiting)


def test_places_that_replicas_share_go_to_who_is_first_of_all_that_are_bound() -> None:
    """The replica that is considered first gives no advantage to its own."""
    driver = driven(("cap", {"n": 1}))
    first = driver.arrives("running", 10)
    before = [driver.arrives(f"r1-{number}", 10, program_class="to-r1") for number in range(2)]
    bound = driver.arrives("r0", 10, program_class="to-r0")
    after = [driver.arrives(f"r1-{number}", 10, program_class="to-r1") for number in range(2, 4)]
    order = []
    for turn_id, name in [
        (first, "running"),
        (before[0], "r1-0"),
        (before[1], "r1-1"),
        (bound, "r0"),
        (after[0], "r1-2"),
        (after[1], "r1-3"),
    ]:
        assert turn_id in driver.granted_on, f"not {name}, after {order}"
        order.append(name)
        driver.passes(1.0)
        driver.finishes(turn_id, 10)
        driver.releases(name)


def test_a_place_that_the_end_of_a_turn_frees_elsewhere_goes_to_who_is_bound_and_first() -> None:
    """A later one without a route does not get it, though nothing changed at the first one's replica."""
    driver = Driver(load_policy("cap", {"n": 1}), replicas={"r0": 1000, "r1": 1000, "r2": 1000})
    for replica_id in ("r0", "r1"):
        driver.routes("class", f"to-{replica_id}", **{replica_id: 1})
    running = driver.arrives("running", 100, program_class="to-r1")
    driver.passes(1.0)
    bound = driver.arrives("bound", 10, program_class="to-r0")
    driver.passes(1.0)
    later = driver.arrives("later", 10)
    driver.drains("r1")
    driver.finishes(running, 100)
    assert driver.granted_on.get(bound) == "r0"
    assert driver.held(later)


def test_a_replica_with_room_is_not_closed_for_one_that_waits_for_another() -> None:
    """A program that waits for one replica blocks none elsewhere."""
    driver = driven(("ttl", {"reserve_tokens": 0}))
    driver.arrives("a", 6_000, program_class="to-r0")
    driver.arrives("b", 7_000, program_class="to-r1")
    held = driver.arrives("bound", 7_000, program_class="to-r0")
    assert driver.held(held)
    fits_on_both = driver.arrives("c", 2_000)  # the first replica has the most room
    assert driver.granted_on[fits_on_both] == "r1"
    too_large = driver.arrives("d", 3_000)
    assert driver.held(too_large)
    assert driver.program("d").hold_reason == Reason.QUEUE_AHEAD


def test_breakeven_lets_pass_for_a_while_on_a_replica_for_which_one_waits() -> None:
    """It does as with the head of its queue, until that has waited for half of a program's median life."""
    driver = driven(("breakeven", {"reserve_tokens": 0, "foresight_ratio": 0.0, "order": "fcfs"}))
    for number in range(4):  # the life of programs is learned: 20 s
        turn_id = driver.arrives(f"earlier-{number}", 100)
        driver.passes(20.0)
        driver.finishes(turn_id, 100)
        driver.releases(f"earlier-{number}")
    driver.arrives("a", 6_000, program_class="to-r0")
    assert driver.held(driver.arrives("bound", 7_000, program_class="to-r0"))
    driver.passes(9.0)
    assert not driver.held(driver.arrives("b", 500, program_class="to-r0"))
    driver.passes(2.0)
    late = driver.arrives("c", 500, program_class="to-r0")
    assert driver.held(late)
    assert driver.program("c").hold_reason == Reason.QUEUE_AHEAD
    anywhere = driver.arrives("d", 500)
    assert driver.granted_on[anywhere] == "r1"


def test_pins_make_room_for_who_waits_for_their_replica_alone() -> None:
    """If nothing runs, `continuum` takes pins away until it fits, as for the head of its queue."""
    driver = driven(("continuum", {"ttl_s": 1000.0}))
    driver.takes_turn("pinned", 6_000)
    bound = driver.arrives("bound", 7_000, program_class="to-r0")
    driver.ticks(1.0)
    assert driver.granted_on[bound] == "r0"
    assert driver.home("pinned") is None


def test_a_turn_that_arrives_waits_for_nobody_who_would_go_after_it() -> None:
    """The older program goes at once, although a younger one waits for the only replica with room."""
    driver = Driver(load_policy("ttl", {"ttl_s": 1.0, "reserve_tokens": 0}), replicas={"r0": 1000})
    driver.takes_turn("old", 100)
    driver.ticks(5.0)
    driver.arrives("busy", 600)
    driver.routes("class", "to-r0", r0=1)
    bound = driver.arrives("young", 500, program_class="to-r0")
    driver.passes(1.0)
    back = driver.arrives("old", 110)
    assert driver.held(bound)
    assert driver.granted_on[back] == "r0"


def test_longest_waiting_of_equal_ranks_goes_first() -> None:
    """This holds in any queue: a bound program does not wait behind a later one that may go anywhere."""
    queue = PausedQueue(lambda _: 0.0)
    programs = {name: waiting(name, number) for number, name in enumerate(["bound", "free", "new"], start=1)}
    programs["bound"].routed_to = "r0"
    for name, place in (("bound", queue.place_at("r0")), ("free", queue.waiting)):
        programs[name].place = place
        place.enter(programs[name], 0.0)
    assert queue.routed_count == 1
    assert queue.comes_before_all_waiting(programs["bound"])
    assert queue.first_routed_before(programs["free"], "r0") is programs["bound"]
    assert queue.first_routed_before(programs["free"], "r1") is None
    assert queue.first_routed_before(programs["bound"], "r0") is None
    programs["new"].routed_to = "r0"
    assert not queue.comes_before_all_waiting(programs["new"])
    programs["new"].priority = -1
    assert queue.comes_before_all_waiting(programs["new"])
    assert queue.first_routed_before(programs["new"], "r0") is None


def waiting(name: str, number: int) -> Program:
    program = Program(name, 1, float(number))
    turn = Turn(number, program, "", 40, float(number))
    program.held[turn.turn_id] = turn
    return program
