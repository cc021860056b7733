"""The queue behaves as vLLM's queues do, and sorts between iterations only."""

from __future__ import annotations

import pytest
from thunderagent_vllm.queue import ProgramQueue


def queue(*values: int) -> ProgramQueue:
    made = ProgramQueue(lambda request, _now_s: request)
    for value in values:
        made.add_request(value)
    return made


def test_order_is_kept_until_the_next_sort() -> None:
    made = queue(3, 1, 2)
    made.sort(0.0)
    assert (list(made), made.head(), len(made), bool(made)) == ([1, 2, 3], 1, 3, True)
    made.add_request(0)
    assert made.peek_request() == made.pop_request() == 1
    made.prepend_request(9)
    made.prepend_requests([7, 8])
    assert list(made) == [8, 7, 9, 2, 3, 0]
    made.sort(0.0)
    assert list(made) == [0, 2, 3, 7, 8, 9]


def test_order_is_renewed_as_time_passes() -> None:
    sorts = []
    made = ProgramQueue(lambda request, now_s: sorts.append(now_s) or request)
    made.add_request(1)
    made.add_request(2)
    for now_s in (0.0, 0.1, 0.2, 0.3):
        made.sort(now_s)
    assert set(sorts) == {0.0, 0.3}
    made.changed()
    made.sort(0.3)
    assert sorts.count(0.3) == 4


def test_queue_is_put_in_order_when_somebody_looks() -> None:
    made = queue(3, 1, 2)
    looks = []

    def look() -> None:
        looks.append(made.head())
        made.sort(0.0)

    made.before_peek = look
    assert (made.head(), looks) == (3, [])
    assert made.peek_request() == made.pop_request() == 1
    made.add_request(0)
    assert made.peek_request() == 2
    assert looks == [3]


def test_removed_request_leaves_the_queue() -> None:
    made = queue(1, 2, 3, 4)
    made.remove_request(2)
    made.remove_requests([3, 99])
    assert list(made) == [1, 4]
    with pytest.raises(ValueError, match="not in"):
        made.remove_request(2)


def test_empty_queue_gives_nothing() -> None:
    made = queue()
    assert (made.head(), bool(made)) == (None, False)
    with pytest.raises(IndexError):
        made.peek_request()
    with pytest.raises(IndexError):
        made.pop_request()
