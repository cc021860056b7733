"""Sessions and their stored state: what is loaded, what is saved, and what is left after the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.unit.client.support import fake_proxy
from tests.unit.workflows.agents import Patient, only
from tests.unit.workflows.elsewhere import LocalLauncher
from thunderagent.workflows import Deployment, StoreError, deploy, managed_dict, stubs
from thunderagent.workflows.llm import turn_headers
from thunderagent.workflows.store import MemoryStore

TURNS_COUNT = 50
"""Turns of the loop that a slow answer takes: more than a call with its value does."""

notes = managed_dict("notes")


class Shelf:
    """A store that outlives deployments, in memory. `refuses` and `slow` have commands: load, save, drop."""

    def __init__(self, states: dict[str, Any] | None = None) -> None:
        self.states: dict[str, dict[str, dict[str, Any]]] = states or {}
        self.refuses: set[str] = set()
        self.slow: list[str] = []
        """Each is taken off by the command that it slows down."""
        self.loads_count = 0
        of = MemoryStore()
        self.publish, self.collect, self.push, self.take, self.close = (
            of.publish,
            of.collect,
            of.push,
            of.take,
            of.close,
        )

    async def _do(self, command: str) -> None:
        if command in self.refuses:
            raise StoreError(f"no {command}")
        if command in self.slow:
            self.slow.remove(command)
            for _ in range(TURNS_COUNT):
                await asyncio.sleep(0)

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        await self._do("save")
        self.states.setdefault(session, {}).setdefault(agent, {}).update(values)

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:
        self.loads_count += 1
        found = {agent: dict(values) for agent, values in self.states.get(session, {}).items()}
        await self._do("load")
        return found

    async def drop_session(self, session: str) -> None:
        await self._do("drop")
        self.states.pop(session, None)


def remembered(session: str, *texts: str) -> Shelf:
    return Shelf({session: {"rememberer": {"said": [*texts], "counts": {}}}})


def opened(shelf: Shelf, agents: dict[str, Any] | None = None, **options: Any) -> Deployment:
    return deploy(agents or only("rememberer"), policies=(), period_s=0.01, store=shelf, **options)


async def hear(text: str) -> Any:
    return await stubs.call("rememberer", "hear", (text,))


async def note(text: str) -> None:
    notes[text] = 1


# --- the begin


async def test_a_session_whose_state_is_not_loaded_has_not_begun() -> None:
    shelf = remembered("s", "a")
    async with opened(shelf) as app:
        shelf.refuses = {"load"}
        with pytest.raises(StoreError, match="no load"):
            await app.run_async(hear, "b", session="s")
        shelf.refuses = set()
        assert await app.run_async(hear, "b", session="s") == ["a", "b"]


async def test_drivers_that_begin_a_session_together_load_it_once() -> None:
    shelf = remembered("s", "a")
    shelf.slow = ["load"]
    async with opened(shelf) as app:
        found = await asyncio.gather(*(app.run_async(hear, text, session="s") for text in "bc"))
    assert found == [["a", "b"], ["a", "b", "c"]]
    assert shelf.loads_count == 1


async def test_a_session_begins_anew_after_its_end() -> None:
    """It waits for the end, and loads nothing that is about to be dropped."""
    shelf = remembered("s", "a")
    shelf.slow = ["drop"]
    async with opened(shelf) as app:
        _, found = await asyncio.gather(app.end_session_async("s"), app.run_async(hear, "b", session="s"))
    assert found == ["b"]
    assert shelf.states["s"]["rememberer"]["said"] == ["b"]


# --- the end


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_session_that_was_not_used_here_is_dropped(is_begun: bool) -> None:
    shelf = remembered("s", "a")
    async with opened(shelf) as app:
        if is_begun:
            await app.run_async(note, "x", session="s")
        await app.end_session_async("s")
        assert shelf.states == {}
        assert await app.run_async(hear, "b", session="s") == ["b"]


async def test_an_end_that_the_store_refuses_can_be_asked_for_again() -> None:
    """The proxy is told all the same."""

    async def main() -> None:
        turn_headers()
        await hear("a")

    shelf = Shelf()
    with fake_proxy() as proxy:
        async with opened(shelf, proxy=proxy.url) as app:
            await app.run_async(main, session="s")
            shelf.refuses = {"drop"}
            with pytest.raises(StoreError, match="no drop"):
                await app.end_session_async("s")
            assert proxy.released() == ["s"]
            assert "s" in shelf.states
            shelf.refuses = set()
            await app.end_session_async("s")
            assert shelf.states == {}
    assert proxy.released() == ["s"]


async def test_a_session_without_a_name_leaves_nothing() -> None:
    """Neither its drivers' state, nor that of agents, which is still being saved."""

    async def main() -> None:
        await note("x")
        await hear("a")

    shelf = Shelf()
    shelf.slow = ["save"]
    async with opened(shelf) as app:
        await app.run_async(main)
    assert shelf.slow == []
    assert shelf.states == {}


async def test_a_call_that_outlives_its_session_saves_nothing() -> None:
    async def main(app: Deployment) -> None:
        stubs.call("late", "note", ())
        async with asyncio.timeout(10):
            while "late" not in Patient.gates:
                await asyncio.sleep(0)
        notes["driver"] = 1
        await app.end_session_async("s")
        Patient.gates["late"].set()
        async with asyncio.timeout(10):
            while not app.node.instances["late/0"].done_count:
                await asyncio.sleep(0)

    Patient.gates.clear()
    shelf = Shelf()
    late = {"class": f"{__name__}:Late", "methods": {"note": {}}}
    async with opened(shelf, {"late": late}) as app:
        await app.run_async(main, app, session="s")
    assert shelf.states == {}


class Late(Patient):
    async def note(self) -> None:
        await self.wait("late")
        notes["x"] = 1


# --- what is saved


async def test_the_newest_state_is_saved_last() -> None:
    shelf = Shelf()
    shelf.slow = ["save"]
    async with opened(shelf) as app:
        for text in "ab":
            await app.run_async(hear, text, session="s")
    assert shelf.states["s"]["rememberer"]["said"] == ["a", "b"]


async def test_the_state_of_a_driver_that_is_not_through_is_saved_at_the_end() -> None:
    async def main() -> None:
        await note("x")
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()
    shelf = Shelf()
    async with opened(shelf) as app:
        running = asyncio.create_task(app.run_async(main, session="s"))
        await begun.wait()
    assert shelf.states == {"s": {"": {"notes": {"x": 1}}}}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_state_that_cannot_be_kept_stops_nothing(is_elsewhere: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, of agents here and elsewhere and of drivers; the state beside it is kept."""

    async def main() -> Any:
        notes["lock"] = threading.Lock()
        return await stubs.call("hoarder", "keep", ())

    hoarder = {"class": f"{__name__}:Hoarder", "methods": {"keep": {}}, "managed": True}
    shelf = Shelf()
    async with opened(shelf, {"hoarder": hoarder}, ray=LocalLauncher() if is_elsewhere else "") as app:
        async with asyncio.timeout(10):
            assert await app.run_async(main, session="s") == "kept"
            while "s" not in shelf.states:
                await asyncio.sleep(0)
    assert shelf.states == {"s": {"hoarder": {"good": {"x": 1}}}}
    for name in ("locks", "strange", "notes"):
        assert caplog.text.count(f"state {name} of session 's' is not kept") == 1


class Hoarder:
    async def keep(self) -> str:
        managed_dict("good")["x"] = 1
        managed_dict("locks")["x"] = threading.Lock()
        managed_dict("strange")["x"] = Unreadable()
        return "kept"


class Unreadable:
    def __reduce__(self) -> Any:
        return _not_here, ()


def _not_here() -> None:
    raise ImportError("no such module here")
