"""`thunderagent`: the paper's policy, equation by equation."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import Driver, of_kind, restored_on
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Hold, Mark, Pause, Reason, Restore
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent


def driver_with(
    *,
    delta_s: float = 5.0,
    half_life_s: float = inf,
    lambda_max: float = 1.0,
    lambda_min: float | None = None,
    **replicas: int | None,
) -> Driver:
    low = lambda_max if lambda_min is None else lambda_min
    policy = ThunderAgent(
        delta_s=delta_s, half_life_s=half_life_s, lambda_max=lambda_max, lambda_min=low, reserve_tokens=0
    )
    return Driver(policy, replicas=replicas or {"r0": 1000})


def a_full_replica(driver: Driver, **tokens: int) -> dict[str, int]:
    """Let programs reason, each with its claim; return their turns."""
    turns = {name: driver.arrives(name, size) for name, size in tokens.items()}
    assert all(turn in driver.granted_on for turn in turns.values())
    return turns


# --- When it thrashes [Eq. 7]


def test_replica_at_exactly_its_capacity_does_not_thrash() -> None:
    """C < sum is strict: at 1000 of 1000 nothing happens, at 1001 one program is marked."""
    driver = driver_with()
    turns = a_full_replica(driver, a=400, b=600)
    assert driver.ticks(5.0) == []
    driver.progresses(turns["a"], output=1)
    assert driver.ticks(5.0) == [Mark("a", "r0", Reason.THRASHING)]


def test_acting_programs_are_weighed_by_their_time_in_the_tool() -> None:
    """700 tokens whose tool has run for one half-life count as 350: 1000 in all, which just fits."""
    driver = driver_with(half_life_s=5.0, delta_s=5.0, r0=1000)
    driver.takes_turn("acts", 700)
    turn = driver.arrives("acts2", 300)
    driver.progresses(turn, output=350)
    assert driver.ticks(5.0) == []
    driver.takes_turn("acts", 700)
    driver.progresses(turn, output=400)
    assert of_kind(Pause, driver.ticks(5.0)) == ["acts"]


def test_a_half_life_of_zero_lets_a_check_fill_what_acting_programs_claim() -> None:
    """At a check their memory counts as free the moment their tool begins; between checks it is in use."""
    driver = driver_with(half_life_s=0.0)
    driver.takes_turn("a", 1000)
    waiting = driver.arrives("b", 1000)
    assert driver.program("b").hold_reason == Reason.NO_ROOM
    assert of_kind(Restore, driver.ticks(5.0)) == ["b"]
    driver.finishes(waiting, 1000)
    assert driver.ticks(5.0) == []


def test_between_checks_an_acting_program_counts_in_full() -> None:
    """After ten half-lives its weight is almost zero, and still none is admitted beside it before the check."""
    driver = driver_with(delta_s=20.0, half_life_s=1.0)
    driver.takes_turn("a", 600)
    driver.ticks(10.0)
    driver.arrives("b", 600)
    assert driver.program("b").hold_reason == Reason.NO_ROOM
    assert of_kind(Restore, driver.ticks(10.0)) == ["b"]


def test_a_check_comes_every_delta_s_and_not_between() -> None:
    """Ticks come four times a second; the decision falls on the multiple of delta_s."""
    driver = driver_with(delta_s=5.0)
    turns = a_full_replica(driver, a=400, b=600)
    driver.progresses(turns["b"], output=200)
    assert [len(driver.ticks(0.25)) for _ in range(20)] == [0] * 19 + [1]


def test_a_check_is_made_up_for_when_ticks_come_late() -> None:
    """A tick after 12 s is one check, not three, and the next check is due at the next multiple."""
    driver = driver_with(delta_s=5.0)
    turns = a_full_replica(driver, a=400, b=600)
    driver.progresses(turns["b"], output=200)
    assert of_kind(Mark, driver.ticks(12.0)) == ["a"]
    assert driver.ticks(2.9) == []


# --- Pauses [Eq. 11]


def test_acting_programs_are_paused_before_reasoning_ones_the_shortest_first() -> None:
    """S_pause = 1/c + 1[acting]: 1240 over 1000 is relieved by 100 and 200, though a reasoning one has 90."""
    driver = driver_with()
    for name, tokens in (("c", 300), ("a", 100), ("b", 200)):
        driver.takes_turn(name, tokens)
    turns = a_full_replica(driver, tiny=90, grows=300)
    driver.progresses(turns["grows"], output=250)
    assert driver.ticks(5.0) == [Pause("a", "r0", Reason.THRASHING), Pause("b", "r0", Reason.THRASHING)]
    assert driver.home("c") == "r0"


def test_reasoning_programs_are_only_marked_the_shortest_first_and_no_more_than_needed() -> None:
    """1250 over 1000: marking 100 and 200 counts as relief at once; 300 and the grown one stay."""
    driver = driver_with()
    turns = a_full_replica(driver, c=300, a=100, b=200, d=400)
    driver.progresses(turns["d"], output=250)
    assert of_kind(Mark, driver.ticks(5.0)) == ["a", "b"]
    assert driver.ticks(5.0) == []
    assert driver.finishes(turns["a"], 100) == [Pause("a", "r0", Reason.MARKED)]


def test_pausing_goes_on_below_the_high_watermark() -> None:
    """lambda_max 0.8: nothing happens at 1000 of 1000; from 1001 on, down to 800."""
    driver = driver_with(lambda_max=0.8, lambda_min=0.5)
    driver.takes_turn("a", 100)
    driver.takes_turn("b", 150)
    turns = a_full_replica(driver, c=300, d=250)
    driver.progresses(turns["d"], output=200)
    assert driver.ticks(5.0) == []
    driver.progresses(turns["d"], output=201)
    assert of_kind(Pause, driver.ticks(5.0)) == ["a", "b"]
    assert driver.demand() == 751


def test_each_replica_is_relieved_by_itself() -> None:
    """Room on one does not help the other."""
    driver = driver_with(r0=1000, r1=1000)
    turns = a_full_replica(driver, a=600, b=500)
    driver.takes_turn("c", 300)
    assert (driver.home("a"), driver.home("b"), driver.home("c")) == ("r0", "r1", "r1")
    driver.progresses(turns["b"], output=300)
    assert driver.ticks(5.0) == [Pause("c", "r1", Reason.THRASHING)]
    assert restored_on(driver.ticks(5.0)) == {"c": "r0"}


# --- Restores [Eq. 10]


def test_reasoning_programs_are_restored_before_acting_ones_the_shortest_first() -> None:
    """S_restore = 1/c + 1[reasoning]: 200, 300, then the paused 100 whose tool still runs."""
    driver = driver_with()
    driver.takes_turn("acts", 100)
    turns = a_full_replica(driver, large=800)
    driver.progresses(turns["large"], output=150)
    assert of_kind(Pause, driver.ticks(5.0)) == ["acts"]
    driver.arrives("b", 300)
    driver.arrives("a", 200)
    driver.is_abandoned(turns["large"])
    driver.releases("large")
    assert of_kind(Restore, driver.ticks(5.0)) == ["a", "b", "acts"]


def test_a_restore_needs_the_low_watermark_and_never_passes_the_high_one() -> None:
    """With 0.5/0.8, at 500 of 1000 nothing is restored though 300 fit; at 400 they are, and no 301 beside them."""
    driver = driver_with(lambda_max=0.8, lambda_min=0.5)
    turns = a_full_replica(driver, base=400, more=100)
    driver.takes_turn("fill", 300)
    held = [driver.arrives("x", 300), driver.arrives("y", 301)]
    driver.releases("fill")
    assert driver.ticks(5.0) == []
    driver.is_abandoned(turns["more"])
    driver.releases("more")
    assert of_kind(Restore, driver.ticks(5.0)) == ["x"]
    assert [driver.held(turn) for turn in held] == [False, True]
    assert driver.demand() == 700


def test_a_restore_goes_to_the_replica_with_most_room() -> None:
    """Each restore looks anew: 300 to the first of two empty ones, 400 to the other, 500 beside the 300."""
    driver = driver_with(r0=1000, r1=1000)
    driver.takes_turn("x", 1000)
    driver.takes_turn("y", 1000)
    for name, tokens in (("c", 500), ("a", 300), ("b", 400)):
        driver.arrives(name, tokens)
    driver.releases("x")
    driver.releases("y")
    assert restored_on(driver.ticks(5.0)) == {"a": "r0", "b": "r1", "c": "r0"}


def test_a_marked_program_still_fills_its_memory() -> None:
    """Room that a mark promises is given away only when the turn has ended."""
    driver = driver_with()
    turns = a_full_replica(driver, a=300, b=700)
    driver.progresses(turns["b"], output=100)
    assert of_kind(Mark, driver.ticks(5.0)) == ["a"]
    waiting = driver.arrives("c", 150)
    assert driver.ticks(5.0) == []
    driver.finishes(turns["a"], 300)
    driver.ticks(5.0)
    assert driver.granted_on[waiting] == "r0"


def test_programs_are_spread_where_no_capacity_is_known() -> None:
    """Every replica has infinite room: demand decides for arrivals, and for restores after an outage."""
    driver = driver_with(r0=None, r1=None, r2=None)
    for number in range(6):
        driver.takes_turn(f"p{number}", 100)
    assert [driver.demand(name) for name in ("r0", "r1", "r2")] == [200, 200, 200]
    for name in ("r0", "r1", "r2"):
        driver.drains(name)
    for number in range(6):
        driver.arrives(f"q{number}", 100)
    for name in ("r0", "r1"):
        driver.comes_up(name)
    turns_counts = [driver.scheduler.replicas[name].account.turn_count for name in ("r0", "r1")]
    assert sum(turns_counts) == 6
    assert driver.ticks(5.0) == []


def test_new_programs_of_unknown_size_are_spread() -> None:
    """A first turn of no bytes claims nothing; turns in flight decide then."""
    driver = driver_with(r0=None, r1=None)
    homes = [driver.granted_on[driver.arrives(f"p{number}", 0)] for number in range(6)]
    assert sorted(homes) == ["r0"] * 3 + ["r1"] * 3


# --- Between two checks


def test_a_new_program_does_not_overtake_the_queue() -> None:
    """Room for both appears between two checks: the waiting one goes first, the larger newcomer is held."""
    driver = driver_with()
    driver.takes_turn("a", 900)
    first = driver.arrives("waits", 300)
    driver.releases("a")
    late = driver.arrives("late", 400)
    assert driver.decisions == [Hold(late, "late", Reason.QUEUE_AHEAD)]
    assert driver.ticks(5.0)
    assert [driver.granted_on.get(turn) for turn in (first, late)] == ["r0", "r0"]


def test_a_smaller_program_comes_before_the_queue_as_the_score_says() -> None:
    """The paper's order is shortest first: this is no overtaking."""
    driver = driver_with()
    driver.takes_turn("a", 900)
    driver.arrives("waits", 300)
    assert driver.granted_on[driver.arrives("small", 100)] == "r0"


# --- It comes to rest


SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from([0.5, 5.0, inf]), st.sampled_from([(1.0, 1.0), (0.95, 0.8)]), st.integers(1, 3))
def test_without_news_nobody_bounces_and_no_restore_passes_the_watermark(
    sizes: list[int], half_life_s: float, watermarks: tuple[float, float], replicas_count: int
) -> None:
    """In 200 s without an event each program is paused and restored at most once, within lambda_max * C."""
    lambda_max, lambda_min = watermarks
    names = {f"r{number}": 1000 for number in range(replicas_count)}
    driver = driver_with(half_life_s=half_life_s, lambda_max=lambda_max, lambda_min=lambda_min, **names)
    for number, tokens in enumerate(sizes):
        turn = driver.arrives(f"p{number}", tokens)
        if turn in driver.granted_on and number % 3:
            driver.finishes(turn, tokens + number * 20)
    paused, restored = [], []
    for _ in range(40):
        decisions = driver.ticks(5.0)
        paused += of_kind(Pause, decisions)
        for name, replica_id in restored_on(decisions).items():
            restored.append(name)
            account = driver.scheduler.replicas[replica_id].account
            assert account.weighed_tokens(driver.now_s) <= lambda_max * 1000 + 1e-6
    assert len(paused) == len(set(paused))
    assert len(restored) == len(set(restored))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"delta_s": 0.0}, "delta_s"),
        ({"delta_s": float("nan")}, "delta_s"),
        ({"half_life_s": -1.0}, "half_life_s"),
        ({"lambda_min": 0.0}, "lambda_min"),
        ({"lambda_min": 0.9, "lambda_max": 0.8}, "lambda_min <= lambda_max"),
        ({"lambda_min": 0.9, "restore_ratio": 0.8}, "lambda_min <= restore_ratio"),
        ({"lambda_min": 0.5, "lambda_max": 0.0, "restore_ratio": 0.8}, "lambda_max and thrash_ratio over 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float], named: str) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigurationError, match=named):
        ThunderAgent(**wrong)


def test_settings_match_those_of_the_public_ports() -> None:
    """Above 950 of 1000 it pauses, down to 800; it restores up to 850."""
    ports = ThunderAgent(
        half_life_s=inf, thrash_ratio=0.95, lambda_max=0.8, restore_ratio=0.85, lambda_min=0.85, reserve_tokens=0
    )
    driver = Driver(ports, replicas={"r0": 1000})
    driver.takes_turn("a", 100)
    driver.takes_turn("b", 150)
    turn = driver.arrives("c", 600)
    driver.progresses(turn, output=100)
    assert driver.demand() == 950
    assert driver.ticks(5.0) == []
    driver.progresses(turn, output=101)
    assert of_kind(Pause, driver.ticks(5.0)) == ["a", "b"]
    held = driver.arrives("b", 150)
    assert driver.held(held)  # 701 and 150 are over 850
    driver.releases("a")
    driver.finishes(turn, 600, 100)
    assert driver.ticks(5.0)
    assert not driver.held(held)  # 700 and 150 are not


def test_every_program_claims_a_reserve_beside_its_context() -> None:
    """Two programs of 400 with 100 each fill 1,000 tokens; a token more does not fit."""
    driver = Driver(ThunderAgent(half_life_s=inf, reserve_tokens=100), replicas={"r0": 1000})
    driver.takes_turn("a", 400)
    assert driver.demand() == 500
    assert driver.held(driver.arrives("b", 401))
    assert not driver.held(driver.arrives("c", 400))


def test_the_equations_have_the_papers_numbers() -> None:
    """S_restore is Eq. 10 and S_pause Eq. 11, in the module and in the documentation."""
    page = (Path(__file__).parents[4] / "docs" / "reference" / "policies.md").read_text(encoding="utf-8")
    assert "highest score first [Eq. 11]:\n\n    S_pause" in page
    assert "highest score first [Eq. 10]:\n\n    S_restore" in page
    assert "[Eq. 11]" in (ThunderAgent.pause_rank.__doc__ or "")
    assert "[Eq. 10]" in (ThunderAgent.restore_rank.__doc__ or "")
