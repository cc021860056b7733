"""Sessions and their stored state: what is loaded, what is saved, and what is left after the end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import threading
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.client.support import fake_proxy
from tests.unit.workflows.agents import Patient, only
from tests.unit.workflows.elsewhere import LocalLauncher
from thunderagent.workflows import Deployment, SessionEndedError, StoreError, deploy, managed_dict, managed_list, stubs
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


# --- what outlives it


class Outliver(Patient):
    """Goes on after its session's end: makes a call, a turn, or an entry."""

    own = managed_list("own")
    found: list[object] = []  # noqa: RUF012 - the test's

    async def late(self, what: str) -> None:
        await self.wait("late")
        try:
            if what == "call":
                await hear("late")
            elif what == "turn":
                turn_headers()
            else:
                self.own.append("late")
        except SessionEndedError as error:
            self.found.append(str(error))

    async def turn(self, when: str) -> None:
        if when == "before":
            turn_headers()
        await self.wait("turn")
        if when == "between":
            turn_headers()

    async def cross(self, what: str) -> None:
        """Make a call that is on its way when the session ends."""
        if what == "first":
            await self.wait("cross")
        stubs.call("echo", "say", (what,))
        self.found.append(what)

    async def unawaited(self) -> None:
        with pytest.raises(SessionEndedError) as caught:
            turn_headers()
        self.found.append(str(caught.value))

    async def append(self, text: str) -> list[str]:
        self.own.append(text)
        return [*self.own]


OUTLIVER: dict[str, Any] = {
    "outliver": {
        "class": f"{__name__}:Outliver",
        "methods": {
            "late": {"what": "str"},
            "turn": {"when": "str"},
            "cross": {"what": "str"},
            "unawaited": {},
            "append": {"text": "str"},
        },
    }
}


@pytest.fixture(autouse=True)
def _nothing_is_found() -> None:
    Outliver.found.clear()
    Patient.gates.clear()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def begin_late(what: str) -> None:
    stubs.call("outliver", "late", (what,))
    await until(lambda: "late" in Patient.gates)


@pytest.mark.parametrize("what", ["call", "turn", "entry"])
@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_what_outlives_a_session_does_nothing_in_the_next_of_its_name(what: str, is_elsewhere: bool) -> None:
    async def go_on() -> tuple[Any, Any]:
        mine = stubs.call("outliver", "append", ("mine",))
        if is_elsewhere:
            await until(lambda: launcher.peers["outliver/0"].host.node.controllers["outliver/0"].queue.calls_count)
        Patient.gates["late"].set()
        return await mine, await hear("mine")

    launcher = LocalLauncher()
    agents = OUTLIVER | only("rememberer", min_instances=1)
    async with deploy(agents, policies=(), period_s=0.01, ray=launcher if is_elsewhere else "") as app:
        await app.run_async(begin_late, what, session="s")
        await app.end_session_async("s")
        assert await app.run_async(go_on, session="s") == (["mine"], ["mine"])
        assert app.node.sessions["s"].uses_proxy is False
    (why,) = Outliver.found
    wanted = {"call": "rememberer.hear #", "turn": "a turn", "entry": "managed state 'own'"}[what]
    assert why.startswith(wanted)
    assert why.endswith("comes after the end of session 's'")


async def test_a_call_that_nobody_awaits_leaves_no_session() -> None:
    """It begins when its session has ended, and makes no turn there."""

    async def main() -> None:
        stubs.call("outliver", "unawaited", ())

    async with deploy(OUTLIVER, policies=(), period_s=0.01) as app:
        await app.run_async(main)
        await until(lambda: app.node.instances["outliver/0"].done_count)
        assert app.node.sessions == {}
    assert len(Outliver.found) == 1


async def test_a_call_of_a_thread_that_comes_with_the_end_fails() -> None:
    """It was made before the end, and its loop takes it afterwards."""
    made: list[Any] = []

    async def main(app: Deployment) -> None:
        thread = threading.Thread(target=copy_context().run, args=(lambda: made.append(hear_plain("a")),))
        thread.start()
        thread.join()
        await app.end_session_async("s")
        with pytest.raises(SessionEndedError, match=r"rememberer.hear #1 comes after the end"):
            await made[0]

    async with deploy(only("rememberer"), policies=(), period_s=0.01) as app:
        await app.run_async(main, app, session="s")
        assert app.node.sessions == {}


def hear_plain(text: str) -> Any:
    return stubs.call("rememberer", "hear", (text,))


@pytest.mark.parametrize("when", ["before", "between"])
async def test_a_turn_elsewhere_is_released_whenever_its_session_ends(when: str) -> None:
    """Its call is not over then; or its host has not heard of the end."""

    async def main() -> None:
        stubs.call("outliver", "turn", (when,))
        await until(lambda: "turn" in Patient.gates)

    with fake_proxy() as proxy:
        async with deploy(OUTLIVER, policies=(), period_s=0.01, proxy=proxy.url, ray=LocalLauncher()) as app:
            await app.run_async(main, session="s")
            if when == "between":
                Patient.gates["turn"].set()
            await app.end_session_async("s")
            await until(proxy.released)
        assert proxy.released() == ["s"]


async def test_a_call_that_crosses_the_end_between_hosts_does_not_begin_the_session_anew() -> None:
    async def main() -> None:
        stubs.call("outliver", "cross", ("first",))
        await until(lambda: "cross" in Patient.gates)

    async def cross_no_end() -> None:
        await stubs.call("outliver", "cross", ("second",))
        await until(lambda: host().instances["echo/0"].done_count)

    def host() -> Any:
        return launcher.peers["echo/0"].host.node

    launcher = LocalLauncher()
    async with deploy(OUTLIVER | only("echo"), policies=(), period_s=60.0, ray=launcher) as app:
        await app.run_async(main, session="s")
        Patient.gates["cross"].set()
        await until(lambda: Outliver.found)
        await app.end_session_async("s")
        await app.run_async(cross_no_end, session="t")
        assert [*host().sessions] == ["t"]
        assert host().instances["echo/0"].done_count == 1


async def test_a_turn_in_an_ended_session_ends_it_on_its_host() -> None:
    """Otherwise the next session of that name would not tell of its turns there, and never be released."""

    async def first() -> None:
        for name in "ab":
            stubs.call("mixer", "mix", (name,))
        await until(lambda: "a" in Patient.gates)

    async def other() -> str:
        made = stubs.call("mixer", "mix", ("c",))
        host = launcher.peers["mixer/0"].host.node
        await until(lambda: host.controllers["mixer/0"].queue.calls_count == 2)
        Patient.gates["a"].set()
        await until(lambda: "b" in Patient.gates)
        await app.end_session_async("s")
        await until(lambda: "s" not in host.sessions)
        Patient.gates["b"].set()
        value: str = await made
        return value

    async def again() -> None:
        Patient.gates["turn"].set()
        await stubs.call("outliver", "turn", ("before",))

    agents, launcher = OUTLIVER | only("mixer"), LocalLauncher()
    with fake_proxy() as proxy:
        async with deploy(agents, policies=(), period_s=60.0, proxy=proxy.url, ray=launcher) as app:
            async with asyncio.timeout(10):
                await app.run_async(first, session="s")
                assert await app.run_async(other, session="t") == "c"
            assert "s" not in launcher.peers["outliver/0"].host.node.sessions
            await until(lambda: proxy.released() == ["s"])
            await app.run_async(again, session="s")
            await app.end_session_async("s")
        assert proxy.released() == ["s", "s"]


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
    package = SimpleNamespace(asyncio=SimpleNamespace(Redis=client), exceptions=SimpleNamespace(RedisError=OSError))
    for name, module in {"": package, ".asyncio": package.asyncio, ".exceptions": package.exceptions}.items():
        monkeypatch.setitem(sys.modules, f"redis{name}", module)
    found = importlib.util.find_spec("thunderagent.workflows.redis_store")
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
