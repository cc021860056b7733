"""Images, audio and files: their token counts are guessed first, and then learned from usage."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.programs.learned.sizes import CLASSES_COUNT, LARGEST_FACTOR, MediaSizes
from thunderagent.programs.messages import TurnAsk
from thunderagent.programs.policies.breakeven import BreakEven

SMALL, LARGE = (("m image 8", 200),), (("m image 11", 1500),)


def test_a_class_begins_with_its_guess_and_the_first_usage_is_believed() -> None:
    """Later ones count a little; another class, of another model or size, learns nothing from it."""
    sizes = MediaSizes()
    assert sizes.tokens(SMALL) == 200
    sizes.learn(SMALL, 300)
    assert sizes.tokens(SMALL) == 300
    sizes.learn(SMALL, 600)
    assert sizes.tokens(SMALL) == 375
    assert sizes.tokens(LARGE) == 1500


def test_sum_of_several_classes_is_shared_by_their_expectations() -> None:
    """A guess of 1,700 that turns out as 850 halves both."""
    sizes = MediaSizes()
    sizes.learn(SMALL + LARGE, 850)
    assert (sizes.tokens(SMALL), sizes.tokens(LARGE)) == (100, 750)


@pytest.mark.parametrize(("told", "factor"), [(0, 1 / LARGEST_FACTOR), (10**12, LARGEST_FACTOR)])
def test_no_usage_moves_a_class_beyond_its_bounds(told: int, factor: float) -> None:
    """A stranger's turn may teach, within these bounds."""
    sizes = MediaSizes()
    sizes.learn(SMALL, told)
    assert sizes.tokens(SMALL) == int(200 * factor)


def test_only_so_many_classes_are_remembered() -> None:
    """The one that was unused for longest is forgotten first."""
    sizes = MediaSizes()
    sizes.learn(SMALL, 400)
    for number in range(CLASSES_COUNT):
        sizes.learn(((f"model {number} image 8", 100),), 200)
    assert sizes.tokens(SMALL) == 200


def test_a_turn_claims_its_text_by_bytes_and_its_media_by_what_they_were() -> None:
    """Its first turn claims the guess; the next one knows all. Text alone is learned from text alone."""
    driver = Driver(BreakEven(reserve_tokens=0), replicas={"r0": 100_000})
    driver.send(TurnAsk(now_s=driver.now_s, turn_id=1, program_id="a", prompt_bytes=400, media=LARGE))
    assert driver.program("a").claim_tokens == 1600
    driver.finishes(1, 900, 50)
    driver.send(TurnAsk(now_s=driver.now_s, turn_id=2, program_id="a", prompt_bytes=800, media=(("m image 11", 3000),)))
    assert driver.program("a").claim_tokens == 1800
    driver.finishes(2, 1800, 50)
    driver.send(TurnAsk(now_s=driver.now_s, turn_id=3, program_id=None, prompt_bytes=400, media=LARGE))
    assert driver.scheduler.replicas["r0"].account.other_tokens == 900
    driver.finishes(3, 900, 1)
    driver.send(TurnAsk(now_s=driver.now_s, turn_id=4, program_id="text", prompt_bytes=400))
    assert driver.program("text").claim_tokens == 100
