"""The one global queue of paused programs."""

from __future__ import annotations

from thunderagent.programs.book.paused_queue import PausedQueue
from thunderagent.programs.model.places import Phase
from thunderagent.programs.model.program import Program


def program(name: str, tokens: int, phase: Phase = Phase.REASONING) -> Program:
    new = Program(name, 1, 0.0)
    new.claim_tokens = tokens
    new.phase = phase
    return new


def by_claim(each: Program) -> float:
    return each.claim_tokens


def test_reasoning_programs_come_before_acting_ones_and_each_in_the_order_of_the_rank() -> None:
    """The queue is two queues: whoever has a turn is first, whatever the ranks say."""
    queue = PausedQueue(by_claim)
    for each in (program("a", 30), program("b", 1, Phase.ACTING), program("c", 10), program("d", 0, Phase.ACTING)):
        queue.put(each)
    assert [each.program_id for each in queue] == ["c", "a", "d", "b"]
    assert len(queue) == 4


def test_a_program_that_changes_is_put_into_its_new_place() -> None:
    """A new phase or size moves a program; it is never in the queue twice."""
    queue = PausedQueue(by_claim)
    small, large = program("small", 10), program("large", 20)
    queue.put(small)
    queue.put(large)
    small.claim_tokens = 30
    queue.put(small)
    assert list(queue) == [large, small]
    large.phase = Phase.ACTING
    queue.put(large)
    assert list(queue) == [small, large]
    assert (list(queue.reasoning), list(queue.acting)) == ([small], [large])


def test_a_program_comes_before_all_waiting_only_if_its_rank_is_lower() -> None:
    """Equal ranks keep their order of entry, and acting programs are in nobody's way."""
    queue = PausedQueue(by_claim)
    queue.put(program("acting", 1, Phase.ACTING))
    assert queue.comes_before_all_waiting(program("new", 20))
    first = program("first", 20)
    queue.put(first)
    assert queue.comes_before_all_waiting(first)
    assert not queue.comes_before_all_waiting(program("new", 20))
    assert queue.comes_before_all_waiting(program("new", 19))


def test_removing_is_idempotent() -> None:
    """A program that is in neither queue may be taken out all the same."""
    queue = PausedQueue(by_claim)
    only = program("only", 1)
    queue.put(only)
    queue.remove(only)
    queue.remove(only)
    assert len(queue) == 0
    assert list(queue) == []
