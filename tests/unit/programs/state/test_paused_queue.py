"""The one global queue of paused programs."""

from __future__ import annotations

from thunderagent.programs.state.paused_queue import PausedQueue, QueuePlace
from thunderagent.programs.state.program import Program


def put(place: QueuePlace, name: str, tokens: int) -> Program:
    program = Program(name, 1, 0.0, place)
    program.claim_tokens = tokens
    place.enter(program, 0.0)
    return program


def by_claim(each: Program) -> float:
    return each.claim_tokens


def test_reasoning_programs_come_before_acting_ones_and_each_in_the_order_of_the_rank() -> None:
    """The queue is two queues: programs with a turn are first, whatever the ranks say."""
    queue = PausedQueue(by_claim)
    for name, tokens, place in (
        ("a", 30, queue.waiting),
        ("b", 1, queue.resting),
        ("c", 10, queue.waiting),
        ("d", 0, queue.resting),
    ):
        put(place, name, tokens)
    assert [each.program_id for each in queue] == ["c", "a", "d", "b"]
    assert len(queue) == 4
    assert (queue.waiting.tokens, queue.resting.tokens) == (40, 1)


def test_a_program_that_changes_is_put_where_its_rank_says() -> None:
    """A new size moves a program; it is never in the queue twice."""
    queue = PausedQueue(by_claim)
    small, large = put(queue.waiting, "small", 10), put(queue.waiting, "large", 20)
    small.claim_tokens = 30
    small.place.resize(small, 10, 0, 0.0)
    small.place.rank(small)
    assert list(queue) == [large, small]
    assert queue.waiting.tokens == 50
    queue.waiting.leave(large, 0.0)
    assert list(queue) == [small]


def test_a_program_comes_before_all_waiting_only_if_its_rank_is_lower() -> None:
    """Equal ranks keep their order of entry, and acting programs block none."""
    queue = PausedQueue(by_claim)
    put(queue.resting, "acting", 1)
    new = Program("new", 2, 0.0)
    new.claim_tokens = 20
    assert queue.comes_before_all_waiting(new)
    first = put(queue.waiting, "first", 20)
    assert queue.comes_before_all_waiting(first)
    assert not queue.comes_before_all_waiting(new)
    new.claim_tokens = 19
    assert queue.comes_before_all_waiting(new)


def test_empty_queue_of_a_replica_is_forgotten() -> None:
    """The queue of one replica exists while a program waits in it."""
    queue = PausedQueue(by_claim)
    place = queue.place_at("r0")
    only = put(place, "only", 1)
    assert queue.place_at("r0") is place
    assert (queue.routed_count, len(queue)) == (1, 1)
    place.leave(only, 0.0)
    queue.tidy(place)
    assert not queue.routed
    assert list(queue) == []
