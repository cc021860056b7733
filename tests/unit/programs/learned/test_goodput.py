"""The part in time, of what could be judged."""

from __future__ import annotations

import pytest

from tests.builders import Driver, prefilled
from thunderagent.programs.learned.goodput import ENOUGH_TOKENS, REFRESH_COUNT, Goodput
from thunderagent.programs.messages import ToolEnded, ToolStarted


def test_nothing_is_judged_before_an_answer_was_seen() -> None:
    """The speed of generation is unknown; short answers do not show it."""
    goodput = Goodput()
    goodput.turn_ended(prefilled(0.5, 10.0, 100, ENOUGH_TOKENS - 1), 0.001)
    assert (goodput.turn_count, goodput.decode_token_s) == (0, 0.0)
    assert goodput.turn_ended(prefilled(2.0, 10.0, 0, 1000), 0.001) == 1000 * goodput.decode_token_s
    assert 0.007 < goodput.decode_token_s < 0.0099
    assert (goodput.turn_count, goodput.turns) == (1, {1.0: 0, 2.0: 1, 3.0: 1})
    assert goodput.words == "within 1/2/3 times their ideal time: 0/100/100 % of 1 turns, 0/0/0 % of 0 programs"


def test_the_speed_is_that_of_turns_that_shared_their_engine_with_fewest() -> None:
    """A token takes a tenth of a second in company, a hundredth alone."""
    goodput = Goodput()
    for number in range(2 * REFRESH_COUNT):
        goodput.turn_ended(prefilled(1.0, 11.0, 0, 1000 if number % 4 == 0 else 100), 0.001)
    assert 0.005 < goodput.decode_token_s < 0.02
    assert goodput.turn_ended(prefilled(1.0, 11.0, 1000, 100), 0.001) == 1.0 + 100 * goodput.decode_token_s


def test_cached_tokens_are_not_part_of_the_ideal() -> None:
    """Neither is the program's history, even if it was recomputed: goodput is about that."""
    driver = Driver(replicas={"r0": 100_000}, token_s=2e-4)
    for number in range(3):
        turn_id = driver.arrives("a", 10_000 + 100 * number)
        driver.passes(2.0)
        driver.starts(turn_id)
        driver.passes(1.0)
        driver.finishes(turn_id, 10_000 + 100 * number, 50, 0, tool="make")
        driver.passes(4.0)
    goodput = driver.scheduler.knowledge.goodput
    program = driver.scheduler.programs.get("a")
    assert program is not None
    first_s, later_s = 3.0, 0.02 * 50  # 2 s for 10,000 tokens that were new, and next to nothing for 100
    assert program.ideal_s_total == pytest.approx(first_s + 2 * later_s + 8.0, rel=0.1)
    assert goodput.turns[1.0] <= 1
    assert goodput.turns[3.0] >= 1
    driver.releases("a")
    assert (goodput.program_count, goodput.programs) == (1, {1.0: 0, 2.0: 1, 3.0: 1})


def test_a_program_without_a_finished_turn_is_not_judged() -> None:
    """No client waited for it."""
    driver = Driver()
    driver.is_abandoned(driver.arrives("a", 10))
    driver.releases("a")
    assert driver.scheduler.knowledge.goodput.program_count == 0


@pytest.mark.parametrize("announced", [False, True])
def test_a_tool_alone_judges_no_program(announced: bool) -> None:
    """Its only turn was refused; only its client says that a tool ran afterwards."""
    driver = Driver()
    if announced:
        driver.opens("a")
        driver.passes(5.0)
    driver.fails(driver.arrives("a", 10), refused=True)
    driver.send(ToolStarted(driver.now_s, "a", "make"))
    driver.passes(4.0)
    driver.send(ToolEnded(driver.now_s, "a"))
    driver.is_abandoned(driver.arrives("a", 10))
    assert driver.program("a").ideal_s_total > 0
    driver.releases("a")
    assert driver.scheduler.knowledge.goodput.program_count == 0
