"""The event feed: filters, slow or returning listeners, and no cost without listeners."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.builders import asked
from thunderagent.errors import ProgramHopelessError, ProgramReleasedError, RequestError, TooManyListenersError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import (
    Event,
    ProgramReleased,
    ProgramsReleased,
    Reason,
    ReplicaPolled,
    ReplicaUp,
    Tick,
    TurnAsk,
    TurnEnd,
    TurnProgressed,
    TurnStarted,
)
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.watch.event_feed import KINDS, MAX_LISTENERS_COUNT, EventFeed, Listener
from thunderagent.runtime import Runtime


class World:
    """A runtime with one replica, and a feed of its events."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 0.0
        self.runtime = Runtime(Scheduler(load_policy("cap", {"n": 1})), clock=lambda: self.now_s)
        self.feed = EventFeed(self.runtime, **settings)
        self.tell(ReplicaPolled(0.0, "r0", 1000), ReplicaUp(0.0, "r0"))

    def tell(self, *events: Event) -> None:
        for event in events:
            self.now_s = max(self.now_s, event.now_s)
            self.runtime.dispatch(event)

    def turns(self, count: int, *, first: int = 100) -> None:
        """Let a program take a number of turns: three messages each."""
        for turn_id in range(first, first + count):
            self.tell(
                TurnAsk(now_s=self.now_s, turn_id=turn_id, program_id="p"),
                TurnEnd(now_s=self.now_s, turn_id=turn_id, prompt_tokens=10, output_tokens=1),
            )


async def heard(listener: Listener) -> list[dict[str, Any]]:
    """Return a listener's next messages: the data of each event, with its name under `sse` and its id."""
    async with asyncio.timeout(5):
        events = await listener.next_events()
    return [] if events is None else parsed(events)


def parsed(stream: bytes) -> list[dict[str, Any]]:
    messages = []
    for block in stream.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            messages.append({"sse": lines.get("event"), "id": lines.get("id"), **json.loads(lines["data"])})
    return messages


async def test_a_turns_events_and_the_decisions_on_them_are_heard() -> None:
    """Each names its program and its cause, even if the scheduler's event has only the turn."""
    world = World()
    with world.feed.listen() as listener:
        world.tell(
            TurnAsk(now_s=1.0, turn_id=7, program_id="p", prompt_bytes=40),
            TurnStarted(2.0, 7),
            TurnEnd(now_s=3.0, turn_id=7, prompt_tokens=10, output_tokens=2, cached_tokens=4, tool="bash"),
        )
        messages = await heard(listener)
    assert [(m["kind"], m["program_id"], m.get("because")) for m in messages] == [
        ("turn_arrived", "p", None),
        ("restore", "p", "turn_arrived"),
        ("grant", "p", "turn_arrived"),
        ("turn_started", "p", None),
        ("turn_finished", "p", None),
    ]
    assert all(message["sse"] == message["kind"] for message in messages)
    assert messages[2]["replica_id"] == "r0"
    assert messages[4] | {"tool": "bash", "prompt_tokens": 10, "cached_tokens": 4, "turn_id": 7} == messages[4]
    assert messages[4]["at_s"] - messages[0]["at_s"] == pytest.approx(2.0, abs=1e-3)


async def test_frequent_events_are_left_out_but_not_their_consequences() -> None:
    world = World()
    world.tell(
        TurnAsk(now_s=1.0, turn_id=1, program_id="p"), TurnEnd(now_s=1.0, turn_id=1, prompt_tokens=10, output_tokens=1)
    )
    with world.feed.listen() as listener:
        world.tell(
            Tick(2.0),
            ReplicaPolled(2.0, "r0", 1000),
            TurnAsk(now_s=2.0, turn_id=2, program_id="p"),
            TurnProgressed(2.5, 2, 5),
        )
        world.tell(TurnEnd(now_s=3.0, turn_id=2, prompt_tokens=10, output_tokens=1), Tick(10_000.0))
        kinds = [(message["kind"], message.get("because")) for message in await heard(listener)]
    assert kinds == [
        ("turn_arrived", None),
        ("grant", "turn_arrived"),
        ("turn_finished", None),
        ("pause", "tick"),
        ("release", "tick"),
    ]


async def test_a_listener_chooses_a_program_and_kinds() -> None:
    """Turns that arrived before anybody listened still have their programs."""
    world = World()
    world.tell(TurnAsk(now_s=1.0, turn_id=1, program_id="a"), TurnAsk(now_s=1.0, turn_id=2, program_id="b"))
    with (
        world.feed.listen(program_id="a") as of_a,
        world.feed.listen(kinds={"hold", "release"}) as some,
        world.feed.listen(program_id="b", kinds={"programs_released"}) as both,
    ):
        world.tell(
            TurnEnd(now_s=2.0, turn_id=1, prompt_tokens=10, output_tokens=1),
            TurnAsk(now_s=2.0, turn_id=3, program_id="c"),
            ProgramsReleased(3.0, ("a", "b")),
        )
        assert [message["kind"] for message in await heard(of_a)] == ["turn_finished", "programs_released", "release"]
        assert [(m["kind"], m["program_id"]) for m in await heard(some)] == [
            ("hold", "c"),
            ("release", "a"),
            ("release", "b"),
        ]
        assert [message["program_ids"] for message in await heard(both)] == [["a", "b"]]


async def test_a_slow_listener_is_told_how_much_it_lost() -> None:
    world = World(kept_count=30)
    world.turns(1)
    with world.feed.listen() as listener:
        world.turns(20)  # 60 messages: 20 turns that arrive, are granted and finish
        messages = await heard(listener)
        assert messages[0] == {"sse": "lost", "id": None, "lost_count": 30}
        assert len(messages) == 31
        world.turns(1)
        assert [message["kind"] for message in await heard(listener)] == ["turn_arrived", "grant", "turn_finished"]


async def test_returning_listener_continues_after_its_last_message() -> None:
    world = World(kept_count=30)
    with world.feed.listen() as listener:
        world.turns(2, first=1)
        messages = await heard(listener)
    world.turns(1, first=3)  # no listener; the recording continues for a while
    with world.feed.listen(after_id=messages[3]["id"]) as listener:
        assert parsed(listener.greeting()) == []
        again = await heard(listener)
        assert [message["id"] for message in again[:3]] == [message["id"] for message in messages[4:]]
        assert [message["turn_id"] for message in again[3:]] == [3, 3, 3]
    world.turns(20)
    with world.feed.listen(after_id=messages[0]["id"]) as listener:
        assert (await heard(listener))[0]["lost_count"] == 70 - 30 - 1


async def test_listener_that_returns_to_another_recording_is_told_of_the_gap() -> None:
    world = World(linger_s=0.0)
    with world.feed.listen() as listener:
        world.turns(1)
        last_id = (await heard(listener))[-1]["id"]
    await asyncio.sleep(0.01)
    assert not world.feed.recording
    with world.feed.listen(after_id=last_id) as listener:
        assert parsed(listener.greeting()) == [{"sse": "lost", "id": None, "lost_count": None}]
        world.turns(1, first=5)
        assert [message["kind"] for message in await heard(listener)] == ["turn_arrived", "grant", "turn_finished"]


@pytest.mark.parametrize("after_id", ["x", "-", "1", "abc-", "abc-x", "abc-1.5", "abc--1", "abc-" + "9" * 40, "abc-²"])
async def test_rubbish_for_an_id_is_refused(after_id: str) -> None:
    world = World()
    with pytest.raises(RequestError), world.feed.listen(after_id=after_id):
        pass
    assert world.feed._listeners_count == 0


async def test_an_unknown_kind_is_refused() -> None:
    world = World()
    with pytest.raises(RequestError, match="no kind 'tick'"), world.feed.listen(kinds={"tick"}):
        pass
    assert not world.feed.recording


async def test_nothing_is_recorded_while_nobody_listens() -> None:
    """The runtime does not know the feed before the first listener, nor a while after the last."""
    world = World(linger_s=0.02)
    assert not world.runtime._writer.observers
    with world.feed.listen(), world.feed.listen():
        assert len(world.runtime._writer.observers) == 1
    assert world.feed.recording
    with world.feed.listen():  # it comes in time: the same recording
        await asyncio.sleep(0.04)
        assert world.feed.recording
    await asyncio.sleep(0.05)
    assert not world.runtime._writer.observers
    assert world.feed._ring == []


async def test_listeners_are_bounded() -> None:
    world = World()
    with ExitStack() as stack:
        for _ in range(MAX_LISTENERS_COUNT):
            stack.enter_context(world.feed.listen())
        with pytest.raises(TooManyListenersError), world.feed.listen():
            pass
    with world.feed.listen():
        pass


async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    """A heartbeat cancels the wait, before a message came or while more are awaited."""
    world = World()
    with world.feed.listen() as listener:
        for news in (False, True):
            waiting = asyncio.create_task(listener.next_events())
            await asyncio.sleep(0)
            if news:
                world.turns(1)
                await asyncio.sleep(0.01)  # it waits for further messages
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert world.feed._waiting == []
        assert len(await heard(listener)) == 4


async def test_closing_ends_it_for_everybody() -> None:
    world = World()
    with world.feed.listen() as waits:
        waiting = asyncio.create_task(waits.next_events())
        await asyncio.sleep(0)
        world.feed.close()
        async with asyncio.timeout(5):
            assert await waiting is None
    with world.feed.listen() as late:
        assert await late.next_events() is None
    assert not world.runtime._writer.observers


async def test_a_turn_that_ended_is_forgotten() -> None:
    """Only turns that have not ended are kept, even if their program is gone."""
    world = World()
    with world.feed.listen():
        world.turns(5)
        world.tell(
            TurnAsk(now_s=2.0, turn_id=1, program_id="p"), ProgramReleased(2.0, "p"), TurnEnd(now_s=3.0, turn_id=1)
        )
        world.tell(TurnAsk(now_s=4.0, turn_id=2, program_id=None), TurnEnd(now_s=5.0, turn_id=2))
        assert world.feed._program_ids == {}


def test_every_kind_is_named() -> None:
    """Kinds are those of events and decisions, in lower case."""
    assert {"turn_arrived", "programs_released", "replica_down", "hold", "pause", "restore", "unmark"} <= KINDS
    assert not {"tick", "turn_progressed", "replica_polled"} & KINDS


async def test_turn_refused_on_arrival_is_not_kept() -> None:
    """It has no other events; its client may retry again and again while a listener stays for days."""
    world = World()
    with world.feed.listen(kinds={"reject", "turn_abandoned"}) as listener:
        world.runtime.scheduler.refused_ids["p"] = Reason.HOPELESS
        with pytest.raises(ProgramHopelessError):
            await world.runtime.lease(asked(world.runtime, "p"))
        await world.runtime.lease(asked(world.runtime, "q"))
        held = asyncio.create_task(world.runtime.lease(asked(world.runtime, "r")))
        await asyncio.sleep(0)
        world.tell(ProgramReleased(0.0, "r"))
        with pytest.raises(ProgramReleasedError):
            await held
        said = [(message["kind"], message["program_id"]) for message in await heard(listener)]
        assert said == [("reject", "p"), ("reject", "r"), ("turn_abandoned", "r")]
        assert set(world.feed._program_ids.values()) == {"q"}
