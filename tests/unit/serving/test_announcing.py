"""When a process says that it is ready, and what it says before."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.virtual_time import VirtualTimeLoop
from thunderagent.programs.messages import ReplicaUp
from thunderagent.serving.serving import FIRST_POLLS_S, announce, background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Source:
    """What may be ready, with its observers."""

    def __init__(self, why: str) -> None:
        self.why_not_ready = why
        self.observers: list[Callable[..., None]] = []

    def observe(self, observer: Callable[..., None], *about: type) -> Callable[[], None]:
        assert about == (ReplicaUp,)
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def came_up(self) -> None:
        self.why_not_ready = ""
        for observer in self.observers:
            observer(None, ())


class Lines:
    """Keeps what is said, and when."""

    def __init__(self) -> None:
        self.said: list[tuple[float, str]] = []

    def ready(self, url: str, what: str) -> None:
        self.said.append((asyncio.get_running_loop().time(), f"ready {url} {what}"))

    def not_ready(self, url: str, what: str, why: str) -> None:
        self.said.append((asyncio.get_running_loop().time(), f"not ready {url} {what}: {why}"))


@asynccontextmanager
async def announcing(source: Source) -> AsyncIterator[Lines]:
    lines = Lines()

    async def tell() -> None:
        await announce(lines, source, "http://here", "policy p")

    async with background(tell):
        yield lines


def run(coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def test_proxy_is_ready_at_once_where_a_turn_would_be_served() -> None:
    """Nothing else is said."""

    async def test() -> None:
        source = Source("")
        async with announcing(source) as lines:
            await asyncio.sleep(5)
            assert lines.said == [(0.0, "ready http://here policy p")]
        assert not source.observers

    run(test())


def test_a_replica_that_comes_up_soon_makes_it_ready_then() -> None:
    """It is not said before that none is: the first polls take a moment."""

    async def test() -> None:
        source = Source("no replica is up")
        async with announcing(source) as lines:
            await asyncio.sleep(0.6)
            source.came_up()
            await asyncio.sleep(5)
            assert [line for _, line in lines.said] == ["ready http://here policy p"]
            assert lines.said[0][0] == pytest.approx(0.6, abs=0.01)

    run(test())


def test_unready_proxy_says_why_once_and_when_it_is_ready() -> None:
    """Also if no event tells of it: a link to a scheduler, a leader."""

    async def test() -> None:
        source = Source("there is no link to a scheduler")
        async with announcing(source) as lines:
            await asyncio.sleep(60)
            source.why_not_ready = ""
            await asyncio.sleep(1)
        assert [line for _, line in lines.said] == [
            "not ready http://here policy p: there is no link to a scheduler",
            "ready http://here policy p",
        ]
        assert lines.said[0][0] == pytest.approx(FIRST_POLLS_S, abs=0.3)
        assert not source.observers

    run(test())


def test_announcing_without_a_listener_ends_at_once() -> None:
    """It ends at once."""
    run(announce(None, Source("no replica is up"), "http://here", "policy p"))
