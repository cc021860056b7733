"""Pins: bounded, expiring, and given back in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from thunderagent_vllm.pins import Pin, Pins


class CountingPool:
    """Counts the references to each block."""

    def __init__(self) -> None:
        self.held: Counter[Any] = Counter()

    def touch(self, blocks: Sequence[Any]) -> None:
        self.held.update(blocks)

    def free(self, blocks: Sequence[Any]) -> None:
        self.held.subtract(blocks)
        assert min(self.held.values()) >= 0

    @property
    def count(self) -> int:
        return sum(self.held.values())


def pin(birth: int, blocks: int, now_s: float = 0.0, *, stale_s: float = 5.0, came_back: bool = True) -> Pin:
    numbers = range(birth * 100, birth * 100 + blocks)
    return Pin(birth, list(numbers), now_s, now_s + stale_s, now_s + 30.0, came_back=came_back)


def test_pin_is_a_reference_that_ends_with_its_deadline() -> None:
    pool = CountingPool()
    pins = Pins(pool, 100)
    assert pins.keep("a", pin(1, 10))
    assert (pool.count, pins.block_count, "a" in pins) == (10, 10, True)
    pins.expire(29.9)
    assert pool.count == 10
    pins.expire(30.0)
    assert (pool.count, pins.block_count, len(pins)) == (0, 0, 0)
    assert pins.counts == {"kept": 1, "expired": 1}


def test_new_pin_replaces_the_old_one() -> None:
    pool = CountingPool()
    pins = Pins(pool, 12)
    pins.keep("a", pin(1, 10))
    assert pins.keep("a", pin(1, 12, 1.0))
    assert (pool.count, pins.block_count) == (12, 12)


def test_a_block_that_several_pins_hold_counts_once() -> None:
    """Ten programs with a system prompt of 30 blocks and 5 of their own hold 80 blocks."""
    pool, shared = CountingPool(), [object() for _ in range(30)]
    pins = Pins(pool, 90)
    for birth in range(1, 13):
        assert pins.keep(
            f"p{birth}", Pin(birth, [*shared, *(object() for _ in range(5))], 0.0, 5.0, 30.0, came_back=True)
        )
        assert (birth, pins.block_count) == (birth, 30 + 5 * birth)
    assert not pins.keep("late", Pin(13, [*shared, object()], 0.0, 5.0, 30.0, came_back=True))
    assert pins.keep("p12", Pin(12, [*shared, *(object() for _ in range(5))], 1.0, 6.0, 30.0, came_back=True))
    assert pins.keep("old", Pin(0, [*shared, object()], 1.0, 6.0, 30.0, came_back=True))
    assert ("p12" in pins, len(pins), pins.block_count) == (False, 12, 86)
    pins.drop_all()
    assert (pool.count, pins.block_count) == (0, 0)


def test_pins_are_bounded_and_a_younger_program_is_refused() -> None:
    pool = CountingPool()
    pins = Pins(pool, 20)
    assert pins.keep("old", pin(1, 15))
    assert not pins.keep("young", pin(2, 10, 1.0))
    assert pins.counts["refused"] == 1
    assert pool.count == 15


def test_older_program_takes_the_room_of_a_younger_one() -> None:
    pins = Pins(CountingPool(), 20)
    pins.keep("young", pin(2, 15))
    assert pins.keep("old", pin(1, 10, 1.0))
    assert "young" not in pins


def test_program_that_came_back_takes_the_room_of_single_turns() -> None:
    pins = Pins(CountingPool(), 20)
    pins.keep("single1", pin(1, 10, came_back=False))
    pins.keep("single2", pin(2, 10, 1.0, came_back=False))
    assert pins.keep("agent", pin(3, 10, 2.0))
    assert ("single1" in pins, "single2" in pins) == (False, True)


def test_pin_larger_than_the_bound_lets_nothing_go() -> None:
    pins = Pins(CountingPool(), 20)
    pins.keep("a", pin(2, 15))
    assert not pins.keep("b", pin(1, 21, 1.0))
    assert "a" in pins


def test_nothing_to_hold_is_no_pin() -> None:
    pins = Pins(CountingPool(), 20)
    assert not pins.keep("a", pin(1, 0))
    assert not pins.counts


def test_waiting_requests_take_younger_and_stale_pins_only() -> None:
    pins = Pins(CountingPool(), 100)
    pins.keep("oldest", pin(1, 5))
    pins.keep("stale", pin(2, 5, stale_s=0.5))
    pins.keep("asker", pin(3, 5))
    pins.keep("young", pin(4, 5))
    pins.keep("youngest", pin(5, 5))
    pins.keep("single", pin(6, 5, came_back=False))
    assert pins.candidates("asker", 3, 1.0) == ["stale", "single", "youngest", "young", "asker"]
    assert pins.candidates("asker", None, 1.0) == ["stale", "single", "youngest", "young", "oldest", "asker"]
    assert pins.candidates(None, 9, 1.0) == ["stale"]


def test_largest_goes_first_as_in_the_paper() -> None:
    pins = Pins(CountingPool(), 100, largest_first=True)
    for birth, blocks in ((1, 5), (2, 9), (3, 7)):
        pins.keep(str(birth), pin(birth, blocks))
    assert pins.candidates(None, None, 1.0) == ["2", "3", "1"]


def test_hold_that_was_asked_for_is_not_stale() -> None:
    pins = Pins(CountingPool(), 100)
    pins.keep("a", pin(1, 5))
    pins.extend("a", 50.0)
    pins.extend("unknown", 50.0)
    assert pins.candidates(None, 9, 20.0) == []
    pins.expire(49.0)
    assert "a" in pins
    pins.extend("a", 10.0)
    pins.expire(49.5)
    assert "a" not in pins


_OPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "drop", "expire", "extend", "all"]),
        st.integers(1, 8),
        st.integers(0, 30),
        st.booleans(),
        st.floats(0, 20),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(_OPS, st.booleans())
def test_every_reference_is_given_back(ops: list[tuple[str, int, int, bool, float]], largest: bool) -> None:
    pool, now_s = CountingPool(), 0.0
    pins = Pins(pool, 50, largest_first=largest)
    for verb, birth, count, came_back, later_s in ops:
        if verb == "keep":
            pins.keep(str(birth), pin(birth, count, now_s, came_back=came_back))
        elif verb == "drop":
            pins.drop(str(birth), "given_back")
        elif verb == "extend":
            pins.extend(str(birth), now_s + later_s)
        elif verb == "expire":
            now_s += later_s
            pins.expire(now_s)
            assert all(each.until_s > now_s for _, each in pins.items())
        else:
            pins.drop_all()
        assert pool.count == pins.block_count <= 50
        assert pins.block_count == sum(pins.block_count_of(program_id) for program_id, _ in pins.items())
    pins.drop_all()
    assert pool.count == 0
