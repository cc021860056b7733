"""Sessions and their stored state: what is loaded, what is saved, and what is left after the end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.client.support import fake_proxy
from tests.unit.workflows.agents import Patient, only
from tests.unit.workflows.elsewhere import LocalLauncher
from tests.unit.workflows.shelf import Shelf
from thunderagent_workflows import Deployment, StoreError, deploy, managed_dict, stubs
from thunderagent_workflows.llm import turn_headers

notes = managed_dict("notes")


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
    """It is logged, of agents here and elsewhere and of drivers; the store keeps what is beside it, and forgets it."""

    async def main() -> Any:
        notes["lock"] = threading.Lock()
        return await stubs.call("hoarder", "keep", ())

    hoarder = {"class": f"{__name__}:Hoarder", "methods": {"keep": {}}, "managed": True}
    shelf = Shelf()
    async with opened(shelf, {"hoarder": hoarder}, ray=LocalLauncher() if is_elsewhere else "") as app:
        async with asyncio.timeout(10):
            assert await app.run_async(main, session="s") == "kept"
            while len(shelf.states.get("s", ())) < 2:
                await asyncio.sleep(0)
    refused = dict.fromkeys(["locks", "strange"])
    assert shelf.states == {"s": {"": {"notes": None}, "hoarder": {"good": {"x": 1}} | refused}}
    for name in ("locks", "strange", "notes"):
        assert caplog.text.count(f"state {name} of session 's' is not kept") == 1


async def test_redis_keeps_each_value_that_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that msgpack cannot hold is logged, and keeps nothing else from it; an older one of its name goes."""
    given: list[tuple[Any, ...]] = []

    class Pipeline(contextlib.AbstractAsyncContextManager[Any]):
        async def __aexit__(self, *_: object) -> None: ...

        def hset(self, key: str, mapping: dict[str, bytes]) -> None:
            given.append((key, mapping))

        def hdel(self, key: str, *fields: str) -> None:
            given.append((key, {*fields}))

        async def execute(self) -> None: ...

    client = SimpleNamespace(from_url=lambda *_, **__: SimpleNamespace(pipeline=Pipeline))
    names = ("Ask", "BusyLoading", "ClusterDown", "MasterDown", "ReadOnly", "TryAgain")
    errors = SimpleNamespace(RedisError=OSError, **{f"{name}Error": type(name, (OSError,), {}) for name in names})
    package = SimpleNamespace(asyncio=SimpleNamespace(Redis=client), exceptions=errors)
    for name, module in {"": package, ".asyncio": package.asyncio, ".exceptions": package.exceptions}.items():
        monkeypatch.setitem(sys.modules, f"redis{name}", module)
    found = importlib.util.find_spec("thunderagent_workflows.redis_store")
    assert found is not None
    assert found.loader is not None
    redis_store = importlib.util.module_from_spec(found)
    found.loader.exec_module(redis_store)
    itself: list[Any] = []
    itself.append(itself)
    bad = {"half": "\ud800", "itself": itself, "object": Shelf(), "large": 2**64}
    store = redis_store.RedisStore("redis://")
    await store.save_state("agent", "s", {"good": [1], **bad, "also": {"x": 2}})
    await store.save_state("agent", "t", bad)
    await store.save_state("agent", "u", {"uncopied": None})
    key, gone = "thunderagent:workflows:state:", {f"agent/{name}" for name in bad}
    assert given == [
        (f"{key}s", {"agent/good": b"\x91\x01", "agent/also": b"\x81\xa1x\x02"}),
        (f"{key}s", gone),
        (f"{key}t", gone),
        (f"{key}u", {"agent/uncopied"}),
    ]
    for name in bad:
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
