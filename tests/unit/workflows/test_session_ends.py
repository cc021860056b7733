"""What outlives a session: code that goes on, and messages between hosts that cross its end."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from typing import Any

import pytest

from tests.unit.client.support import fake_proxy
from tests.unit.workflows.agents import Patient, only
from tests.unit.workflows.elsewhere import LocalLauncher
from tests.unit.workflows.shelf import Shelf
from thunderagent_workflows import CallError, Deployment, SessionEndedError, deploy, managed_list, stubs
from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.directory import Directory
from thunderagent_workflows.llm import turn_headers
from thunderagent_workflows.node import Node
from thunderagent_workflows.scope import Scope


async def hear(text: str) -> Any:
    return await stubs.call("rememberer", "hear", (text,))


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


def open_gate(name: str) -> None:
    Patient.gates[name] = asyncio.Event()
    Patient.gates[name].set()


async def make_turn() -> None:
    """Have all that the outliver's host has sent so far taken in."""
    open_gate("turn")
    await stubs.call("outliver", "turn", ("never",))


async def begin_late(what: str) -> None:
    stubs.call("outliver", "late", (what,))
    await until(lambda: "late" in Patient.gates)


@pytest.mark.parametrize("what", ["call", "turn", "entry"])
@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_call_that_outlives_its_session_does_nothing_in_the_next_of_its_name(
    what: str, is_elsewhere: bool
) -> None:
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


@pytest.mark.parametrize("next_name", ["s", "t"])
async def test_a_call_that_crosses_the_end_between_hosts_reaches_no_session(next_name: str) -> None:
    """It neither begins its own anew, nor runs in the next one of that name."""

    async def main() -> None:
        stubs.call("outliver", "cross", ("first",))
        await until(lambda: "cross" in Patient.gates)

    async def cross_no_end() -> None:
        await stubs.call("outliver", "cross", ("second",))
        await stubs.call("echo", "say", ("third",))

    def host() -> Any:
        return launcher.peers["echo/0"].host.node

    launcher = LocalLauncher()
    async with deploy(OUTLIVER | only("echo"), policies=(), period_s=60.0, ray=launcher) as app:
        await app.run_async(main, session="s")
        Patient.gates["cross"].set()
        await until(lambda: Outliver.found)
        await app.end_session_async("s")
        await app.run_async(cross_no_end, session=next_name)
        assert [*host().sessions] == [next_name]
        assert host().instances["echo/0"].done_count == 2


async def test_a_host_that_comes_after_an_end_makes_calls_like_others() -> None:
    """It has heard of no end."""

    async def main() -> Any:
        assert await app.act_async(lambda act: act.provision("echo")) == []
        async with asyncio.timeout(10):
            while "echo/0" not in app.control.level.view.instances:
                await asyncio.sleep(0.001)
            with pytest.raises(CallError, match="KeyError"):
                await stubs.call("echo", "through", ("x",))

    agents = only("blocking") | only("echo", min_instances=0, max_instances=1)
    async with deploy(agents, policies=(), period_s=0.01, ray=LocalLauncher()) as app:
        await app.end_session_async("s")
        await app.run_async(main, session="s")


async def test_a_pinned_call_that_crosses_the_end_leaves_no_home() -> None:
    """It asks for one on the way."""

    async def main() -> None:
        await begin_late("call")
        Patient.gates["late"].set()
        await until(lambda: origin().waits_for_instance("rememberer"))

    def origin() -> Any:
        return launcher.peers["outliver/0"].host.node.origin

    launcher = LocalLauncher()
    agents = OUTLIVER | only("rememberer", min_instances=1)
    async with deploy(agents, policies=(), period_s=60.0, ray=launcher) as app:
        await app.run_async(main)
        await until(lambda: Outliver.found)
        await app.run_async(make_turn, session="t")
        assert app.node._machines["directory"].homes.keys() == {("t", "outliver")}
        assert origin()._homes == {}


def test_a_home_that_waits_for_an_instance_ends_with_its_session() -> None:
    """The next one of that name would begin with it, and could miss a state that it never had."""
    directory = Directory()
    for session in ("s", "t"):
        directory.handle(m.AskHome(session, "a", "node-1", ""))
    directory.handle(m.SessionEnded("s"))
    assert [each.message.session for each in directory.handle(m.Joined("a/0"))] == ["t"]
    assert directory.homes.keys() == {("t", "a")}


async def test_a_home_that_crosses_the_end_is_not_kept() -> None:
    """An instance tells the callers of calls that it no longer takes."""
    launcher = LocalLauncher()
    async with deploy(OUTLIVER, policies=(), period_s=60.0, ray=launcher) as app:
        launcher.peers["outliver/0"].host.node.post(app.node.name, m.Home("s", "outliver", "outliver/0", 1, 1))
        await app.run_async(make_turn, session="t")
        assert app.node.origin._homes.keys() == {("t", "outliver")}


@pytest.mark.parametrize("next_name", ["s", "t"])
async def test_a_move_that_crosses_the_end_is_over(next_name: str) -> None:
    """Its calls do not run at the new place: one that waits for another there would never be answered."""

    async def main() -> None:
        for name in ("busy", "of s"):
            stubs.call("patient", "wait", (name,))
        await until(lambda: controller().queue.calls_count)

    async def after() -> str:
        open_gate("after")
        value: str = await stubs.call("patient", "wait", ("after",))
        return value

    def controller(number: int = 0) -> Any:
        return launcher.peers[f"patient/{number}"].host.node.controllers[f"patient/{number}"]

    launcher = LocalLauncher()
    async with deploy(only("patient", min_instances=2), policies=(), period_s=0.01, ray=launcher) as app:
        await app.act_async(lambda act: act.route(agent="patient", to="patient/0"))
        await app.run_async(main, session="s")
        async with asyncio.timeout(10):
            while len(app.control.level.view.instances) < 2:
                await asyncio.sleep(0.001)
        assert await app.act_async(lambda act: act.migrate("s", "patient/0", "patient/1")) == []
        await until(lambda: not controller().queue.calls_count)
        await app.end_session_async("s")
        await app.act_async(lambda act: act.route(agent="patient", to="patient/1"))
        async with asyncio.timeout(10):
            assert await app.run_async(after, session=next_name) == "after"
        assert "of s" not in Patient.gates
        assert (controller().moves.sent, controller(1).here) == ({}, {})


async def test_state_that_crosses_the_end_is_not_the_next_session_s() -> None:
    """It comes from a host that had not heard of the end."""

    launcher, shelf = LocalLauncher(), Shelf()
    async with deploy(OUTLIVER, policies=(), period_s=0.01, store=shelf, ray=launcher) as app:
        await app.run_async(begin_late, "entry", session="s")
        Patient.gates["late"].set()
        await until(lambda: launcher.peers["outliver/0"].host.node.instances["outliver/0"].done_count)
        await app.end_session_async("s")
        await app.run_async(make_turn, session="s")
    assert shelf.states == {}


async def test_the_next_session_s_log_has_no_call_of_the_one_before() -> None:
    """It fails with the end, which its host hears of later. Those that follow are there."""

    def logged() -> list[str]:
        return sorted(entry[3] for entry in app.session_log("s").log)

    async def main() -> None:
        await begin_late("call")
        Patient.gates["late"].set()
        await until(lambda: launcher.peers["outliver/0"].host.node.origin.waits_for_instance("rememberer"))

    async def after() -> None:
        await stubs.call("outliver", "cross", ("second",))
        await until(lambda: "say" in logged())

    launcher = LocalLauncher()
    agents = OUTLIVER | only("rememberer", min_instances=0) | only("echo")
    async with deploy(agents, policies=(), period_s=60.0, ray=launcher) as app:
        await app.run_async(main, session="s")
        await app.end_session_async("s")
        await app.run_async(after, session="s")
    assert logged() == ["cross", "say"]


@pytest.mark.parametrize("what", ["call", "turn"])
async def test_a_host_that_begins_an_ended_session_anew_hears_of_its_end(what: str) -> None:
    """Whatever made it do that: its call would never be answered, its turns never be released."""
    launcher = LocalLauncher()
    with fake_proxy() as proxy:
        agents = OUTLIVER | only("echo")
        async with deploy(agents, policies=(), period_s=60.0, proxy=proxy.url, ray=launcher) as app:
            node = launcher.peers["outliver/0"].host.node
            scope = Scope(node, node.session("s"))
            if what == "call":
                with pytest.raises(SessionEndedError):
                    async with asyncio.timeout(10):
                        await node.call(scope, "echo", "say", ("x",))
            else:
                node.uses_proxy(scope)
                await until(lambda: scope.session.has_ended)
                await until(lambda: proxy.released() == ["s"])
            assert node.sessions == app.node.sessions == {}


async def test_a_host_hears_once_of_the_end_of_all_that_comes_too_late() -> None:
    """Each time it looks through its calls. Other hosts hear nothing, and their calls go on."""
    heard: list[Any] = []

    def hear_all(message: Any, **kept: Any) -> None:
        heard.append(message)
        broadcast(message, **kept)

    async def main() -> None:
        await make_turn()
        with pytest.raises(CallError, match="KeyError"):
            await stubs.call("echo", "through", ("x",))

    launcher = LocalLauncher()
    agents = OUTLIVER | only("echo", "blocking")
    async with deploy(agents, policies=(), period_s=60.0, ray=launcher) as app, asyncio.timeout(10):
        node = launcher.peers["outliver/0"].host.node
        broadcast, node.broadcast = node.broadcast, hear_all
        for name in "sst":
            scope = Scope(node, node.session(name))
            for made in [node.call(scope, "echo", "say", (n,)) for n in range(3)]:
                with pytest.raises(SessionEndedError):
                    await made
        await app.run_async(main, session="u")
    assert [each for each in heard if type(each) is m.SessionEnded] == [m.SessionEnded(name) for name in "sst"]


async def test_a_batch_whose_first_session_has_ended_makes_no_turn_there() -> None:
    node = Node({}, {})
    scope = Scope(node, node.session("s"), batch_count=2, is_mixed=True)
    node.end_session("s")
    with pytest.raises(SessionEndedError, match="a turn comes after the end"):
        node.uses_proxy(scope)


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_batch_whose_first_session_has_ended_does_not_begin_it_anew(is_elsewhere: bool) -> None:
    """Calls that it makes would be that session's. Nobody would end it, nor release its turns."""

    async def first() -> None:
        for name in "ab":
            stubs.call("mixer", "mix", (name,))
        await until(lambda: "a" in Patient.gates)

    def node(location: str) -> Any:
        return launcher.peers[location].host.node if is_elsewhere else app.node

    async def other() -> str:
        made = stubs.call("mixer", "mix", ("c",))
        await until(lambda: node("mixer/0").controllers["mixer/0"].queue.calls_count == 2)
        Patient.gates["a"].set()
        await until(lambda: "b" in Patient.gates)
        await app.end_session_async("s")
        await until(lambda: "s" not in node("mixer/0").sessions)
        open_gate("turn")
        Patient.gates["b"].set()
        value: str = await made
        return value

    agents, launcher = OUTLIVER | only("mixer"), LocalLauncher()
    async with deploy(agents, policies=(), period_s=60.0, ray=launcher if is_elsewhere else "") as app:
        async with asyncio.timeout(10):
            await app.run_async(first, session="s")
            assert await app.run_async(other, session="t") == "c"
        assert [*app.node.sessions] == ["t"]
        assert node("outliver/0").instances["outliver/0"].done_count == 0


@pytest.mark.parametrize("write", [True, False])
async def test_a_drivers_state_after_the_end_of_its_session_raises(write: bool) -> None:
    """What it wrote would be lost, and what it read be of no session."""
    own = managed_list("drivers")

    async def main(app: Deployment) -> None:
        own.append("before")
        await app.end_session_async("s")
        with pytest.raises(SessionEndedError, match="managed state 'drivers' comes after the end of session 's'"):
            own.append("late") if write else len(own)

    async with deploy(only("echo"), policies=(), period_s=0.01) as app:
        await app.run_async(main, app, session="s")
