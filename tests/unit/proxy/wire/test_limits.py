"""Limits stop while a replica is paused: the clock of its pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from thunderagent.proxy.wire.http11.limits import Pause

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Clock:
    """The parts of an event loop that a pause needs."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s


def test_the_clock_of_a_replica_stands_still_while_it_is_paused() -> None:
    """A second pause changes nothing."""
    clock = Clock()
    pause = Pause(cast("AbstractEventLoop", clock))
    began_s = pause.clock_s()
    clock.now_s += 5
    for _ in range(2):
        pause.set(on=True)
        clock.now_s += 20
        assert pause.is_on
        assert pause.clock_s() == began_s + 5
    for _ in range(2):
        pause.set(on=False)
        clock.now_s += 1
    assert (pause.is_on, pause.ended_s) == (False, 145.0)
    assert pause.clock_s() == began_s + 7
    pause.set(on=True)
    clock.now_s += 3
    pause.set(on=False)
    assert pause.clock_s() == began_s + 7
