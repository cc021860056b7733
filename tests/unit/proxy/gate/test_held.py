"""The counts of held turns and bodies, and their return."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from thunderagent.errors import KeyHeldLimitError, TooManyHeldError
from thunderagent.proxy.gate.held import HeldLimits, HeldTurns, KeptBody
from thunderagent.proxy.gate.keys import Key, KeyLimits


def held_turns(**limits: int) -> HeldTurns:
    return HeldTurns(HeldLimits(**limits), CollectorRegistry())


def key(name: str, **limits: int) -> Key:
    return Key(name, b"", is_admin=False, limits=KeyLimits(**limits))


def test_a_body_that_comes_in_pieces_is_counted_as_it_comes() -> None:
    """It is given back once, however often it is released."""
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


def test_single_body_is_kept_however_large() -> None:
    """Otherwise it could never be kept; another limit bounds the size of a body."""
    held = held_turns(body_bytes=100)
    KeptBody(held).grow(1000)
    with pytest.raises(TooManyHeldError):
        KeptBody(held).grow(1)


def test_a_key_has_half_of_all_if_nothing_else_is_said() -> None:
    held = held_turns(turns_count=4, body_bytes=100)
    for _ in range(2):
        held.take(key("red"), 1, 10)
    with pytest.raises(KeyHeldLimitError):
        held.take(key("red"), 1, 10)
    for _ in range(2):
        held.take(key("blue"), 1, 10)
    with pytest.raises(TooManyHeldError):
        held.take(key("green"), 1, 10)
    held.give_back(key("red"), 1, 10)
    held.take(key("green"), 1, 10)


def test_a_key_may_have_a_limit_of_its_own() -> None:
    """It replaces the limit of all keys, and may be higher or lower."""
    held = held_turns(turns_count=10, key_turns_count=2)
    few, many = key("few", held_turns_count=1), key("many", held_turns_count=3)
    held.take(few, 1, 10)
    with pytest.raises(KeyHeldLimitError, match="1 turns of this key are held"):
        held.take(few, 1, 10)
    for _ in range(3):
        held.take(many, 1, 10)
    with pytest.raises(KeyHeldLimitError):
        held.take(many, 1, 10)


def test_keys_of_a_tenant_share_its_limits() -> None:
    """Their names are alike up to a slash; what one gives back is room for all of them."""
    held = held_turns(turns_count=10, body_bytes=1000, tenant_turns_count=2, tenant_body_bytes=60)
    held.take(key("acme/ci"), 1, 10)
    held.take(key("acme/dev"), 1, 10)
    with pytest.raises(KeyHeldLimitError, match="2 turns of this tenant are held"):
        held.take(key("acme/prod"), 1, 10)
    held.take(key("other"), 1, 10)
    held.give_back(key("acme/ci"), 1, 10)
    with pytest.raises(KeyHeldLimitError, match="bodies of 10 bytes of this tenant are kept"):
        held.take(key("acme/prod"), 1, 51)
    held.take(key("acme/prod"), 1, 50)
    for name in ("acme/dev", "other"):
        held.give_back(key(name), 1, 10)
    held.give_back(key("acme/prod"), 1, 50)
    assert repr(held) == "<HeldTurns: 0 turns, 0 bytes>"
    assert held._of_owners == {}


def test_limits_can_be_set_while_turns_are_held() -> None:
    """Held turns stay; new ones go by the new limits."""
    held = held_turns(turns_count=4)
    held.take(None, 1, 10)
    held.set(HeldLimits(turns_count=1))
    with pytest.raises(TooManyHeldError):
        held.take(None, 1, 10)
    held.give_back(None, 1, 10)
    held.take(None, 1, 10)


def test_a_body_that_is_only_announced_takes_nothing_from_others() -> None:
    """It is refused if there is no room for it, and counts as it comes."""
    held = held_turns(body_bytes=100)
    first, second = KeptBody(held), KeptBody(held)
    first.check(90)
    second.grow(60)
    with pytest.raises(TooManyHeldError):
        first.check(90)
    assert repr(held) == "<HeldTurns: 0 turns, 60 bytes>"


def test_turns_without_a_body_end_in_any_order() -> None:
    """Websockets, for example; also beside one with a body."""
    held = held_turns(running_bytes=100)
    names = [(held.runs(size), size) for size in (0, 50, 0)]
    for name, size in names:
        held.ran(name, size)
    assert held._running_by_key == {}
    assert held.runs(100) == ""
