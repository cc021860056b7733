"""What is counted of held turns and of bodies, and given back."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from thunderagent.errors import KeyHeldLimitError, TooManyHeldError
from thunderagent.proxy.gate.held import HeldLimits, HeldTurns, KeptBody


def held_turns(**limits: int) -> HeldTurns:
    return HeldTurns(HeldLimits(**limits), CollectorRegistry())


def test_a_body_that_comes_in_pieces_is_counted_as_it_comes() -> None:
    """And given back once, however often it is released."""
    held = held_turns(body_bytes=100)
    first, second = KeptBody(held), KeptBody(held)
    first.grow(60)
    second.grow(40)
    with pytest.raises(TooManyHeldError):
        second.grow(1)
    first.release()
    first.release()
    second.grow(60)
    second.release()
    assert repr(held) == "<HeldTurns: 0 turns, 0 bytes>"


def test_one_body_is_kept_however_large_it_is() -> None:
    """Or else it would never be: what may come at all is another limit."""
    held = held_turns(body_bytes=100)
    KeptBody(held).grow(1000)
    with pytest.raises(TooManyHeldError):
        KeptBody(held).grow(1)


def test_a_key_has_half_of_all_if_nothing_else_is_said() -> None:
    held = held_turns(turns_count=4, body_bytes=100)
    for _ in range(2):
        held.take("red", 1, 10)
    with pytest.raises(KeyHeldLimitError):
        held.take("red", 1, 10)
    for _ in range(2):
        held.take("blue", 1, 10)
    with pytest.raises(TooManyHeldError):
        held.take("green", 1, 10)
    held.give_back("red", 1, 10)
    held.take("green", 1, 10)


def test_a_body_that_is_only_announced_takes_nothing_from_others() -> None:
    """It is refused where there is no room for it, and counts as it comes."""
    held = held_turns(body_bytes=100)
    first, second = KeptBody(held), KeptBody(held)
    first.check(90)
    second.grow(60)
    with pytest.raises(TooManyHeldError):
        first.check(90)
    assert repr(held) == "<HeldTurns: 0 turns, 60 bytes>"
