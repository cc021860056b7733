"""Instances in other processes, without the processes: messages, losses, and their reports."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from tests.unit.workflows.agents import Patient, only
from tests.unit.workflows.elsewhere import LocalLauncher
from thunderagent_workflows import (
    Act,
    CallError,
    DeclarationError,
    Deployment,
    LostError,
    StateError,
    WorkflowError,
    deploy,
    stubs,
)

CALM: dict[str, Any] = {"policies": (), "period_s": 0.01}


def call(agent: str, method: str, *args: Any) -> Any:
    return stubs.call(agent, method, args)


@pytest.fixture(autouse=True)
def _gates_are_shut() -> None:
    Patient.gates.clear()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def homes(app: Deployment, session: str) -> list[str]:
    return [entry[4] for entry in app.session_log(session).log]


async def test_calls_values_and_errors_travel() -> None:
    """They travel between drivers and agents, between agents, and as unresolved arguments."""

    async def main() -> None:
        parts = call("echo", "say", {"a": [1, 2]})
        assert await call("echo", "say", [parts, call("blocking", "measure", [3, 4])]) == [{"a": [1, 2]}, 2]
        with pytest.raises(CallError) as caught:
            await call("echo", "through", "why")
        error = caught.value
        assert (error.path, error.instance) == (("echo/0",), "echo/0")
        assert isinstance(error.__cause__, CallError)
        assert error.__cause__.path == ("echo/0", "blocking/0")
        assert "raise KeyError(text)" in str(error)
        assert isinstance(error.__cause__.__cause__, KeyError)

    async with deploy(only("echo", "blocking"), ray=LocalLauncher(), **CALM) as app:
        await app.run_async(main, session="s")
        log = [(entry[2], entry[3]) for entry in app.session_log("s").log]
        assert ("blocking", "fail") in log, "a call that an agent made stands in the session's log, too"
        assert app.node.controllers == {}


async def test_value_that_cannot_travel_fails_its_call_and_no_other() -> None:
    async def main() -> None:
        with pytest.raises(CallError, match=r"the arguments of echo.say cannot be sent: .*lock") as caught:
            await call("echo", "say", threading.Lock())
        assert caught.value.path == ("echo/0",)
        with pytest.raises(CallError, match="the value cannot be sent") as caught:
            await call("picky", "lock")
        assert (caught.value.path, caught.value.instance) == (("picky/0",), "picky/0")
        with pytest.raises(CallError, match=r"StrangeError: 1 and 2") as caught:
            await call("picky", "fail")
        assert "raise StrangeError(1, 2)" in caught.value.remote_traceback
        assert caught.value.__cause__ is None, "an exception that does not come back is told by its text"
        with pytest.raises(CallError, match=r"the arguments of call #\d+ cannot be read at echo/0") as caught:
            await call("echo", "say", Unreadable())
        assert (caught.value.path, caught.value.agent) == (("echo/0",), "echo")
        assert await call("echo", "say", 1) == 1

    picky = {"class": f"{__name__}:Picky", "methods": {"lock": {}, "fail": {}}}
    async with deploy({**only("echo"), "picky": picky}, ray=LocalLauncher(), **CALM) as app:
        await app.run_async(main)


class StrangeError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Picky:
    async def lock(self) -> Any:
        return threading.Lock()

    async def fail(self) -> None:
        raise StrangeError(1, 2)


class Unreadable:
    def __reduce__(self) -> Any:
        return _not_here, ()


def _not_here() -> None:
    raise ImportError("no such module here")


async def test_call_on_a_lost_process_fails_and_the_rest_goes_on() -> None:
    """The error has path, agent, instance and the known reason; later calls find another instance."""

    async def main(app: Deployment, launcher: LocalLauncher) -> None:
        held = [call("patient", "wait", f"{n}") for n in range(4)]
        depends = call("echo", "say", [held[0], held[1]])
        await until(lambda: set(Patient.gates) >= {"0", "1"})
        lost_at = held[0].metadata["executor"]
        launcher.peers[lost_at].kill()
        for future in (held[0], held[2], depends):
            with pytest.raises(LostError) as caught:
                await future
            assert (caught.value.path, caught.value.agent) == ((lost_at,), "patient")
            assert caught.value.remote_traceback == f"the process of {lost_at} was killed"
        again = call("patient", "wait", "again")
        for name in ("1", "3", "again"):
            Patient.gates.setdefault(name, asyncio.Event()).set()
        assert [await held[1], await held[3], await again] == ["1", "3", "again"]
        await until(lambda: len(app.hub.locations() if app.hub else ()) == 3)

    launcher = LocalLauncher()
    async with deploy(only("patient", "echo", min_instances=2) | only("echo"), ray=launcher, **CALM) as app:
        await app.run_async(main, app, launcher)
    assert launcher.is_closed


async def test_state_moves_between_processes_and_is_missed_when_it_is_lost() -> None:
    async def main(app: Deployment, launcher: LocalLauncher) -> None:
        assert await call("rememberer", "hear", "a") == ["a"]
        assert await call("rememberer", "hear", "b") == ["a", "b"]
        home = homes(app, "s")[-1]
        other = ({"rememberer/0", "rememberer/1"} - {home}).pop()
        await until(lambda: other in app.control.level.view.instances)
        assert await app.act_async(lambda act: act.migrate("s", home, other)) == []
        await until(lambda: app.node._machines["directory"].homes["s", "rememberer"].location == other)
        assert await call("rememberer", "hear", "c") == ["a", "b", "c"]
        assert homes(app, "s")[-1] == other
        launcher.peers[other].kill()
        await until(lambda: app.hub is not None and other not in app.hub.locations())
        for _ in range(2):
            with pytest.raises(LostError, match=f"state of session 's' was at {other}, which is gone") as caught:
                await call("rememberer", "hear", "d")
            assert caught.value.path == (other,)

    async def begin() -> Any:
        return await call("rememberer", "hear", "e")

    launcher = LocalLauncher()
    async with deploy(only("rememberer"), ray=launcher, **CALM) as app:
        await app.run_async(main, app, launcher, session="s")
        assert await app.run_async(begin, session="t") == ["e"]
        await app.end_session_async("s")
        assert await app.run_async(begin, session="s") == ["e"]


@pytest.mark.parametrize("what", ["lock", "strange"])
async def test_state_that_cannot_travel_is_missed_after_a_move(what: str) -> None:
    """It may not pickle, or not come back."""

    async def main(app: Deployment) -> None:
        await call("hoarder", "keep", what)
        home = homes(app, "s")[-1]
        other = ({"hoarder/0", "hoarder/1"} - {home}).pop()
        await until(lambda: other in app.control.level.view.instances)
        await app.act_async(lambda act: act.migrate("s", home, other))
        await until(lambda: app.node._machines["directory"].homes["s", "hoarder"].location == other)
        with pytest.raises(CallError, match="could not move to hoarder/") as caught:
            await call("hoarder", "keep", what)
        assert isinstance(caught.value.__cause__, StateError)

    async with asyncio.timeout(10), deploy(HOARDER, ray=LocalLauncher(), **CALM) as app:
        await app.run_async(main, app, session="s")


async def test_state_that_cannot_move_fails_with_all_that_needs_it() -> None:
    """Its checkpoint does not come back, so the interrupted call goes nowhere; one that waits for its value is told."""

    async def main(app: Deployment) -> None:
        stopped = call("hoarder", "wait")
        await until(lambda: "wait" in Patient.gates)
        home = stopped.metadata["executor"]
        other = ({"hoarder/0", "hoarder/1"} - {home}).pop()
        depends = call("echo", "say", stopped)
        await until(lambda: launcher.peers[home].host.node.controllers[home].subscribers)
        await until(lambda: other in app.control.level.view.instances)
        await app.act_async(lambda act: act.migrate("s", home, other))
        for made in (stopped, depends):
            with pytest.raises(CallError, match=r"the arguments of hoarder.wait cannot be sent: TypeError"):
                await made
        assert await call("hoarder", "keep", "nothing") is None

    Patient.gates.clear()
    launcher = LocalLauncher()
    async with asyncio.timeout(10), deploy(HOARDER | only("echo"), ray=launcher, **CALM) as app:
        await app.run_async(main, app, session="s")


class Hoarder(Patient):
    async def keep(self, what: str) -> None:
        from thunderagent_workflows import managed_dict  # noqa: PLC0415 - so that the module has none

        managed_dict("things")[what] = {"lock": threading.Lock(), "strange": StrangeError(1, 2)}.get(what)

    async def wait(self) -> str:
        return await super().wait("wait")

    def checkpoint(self) -> Any:
        return StrangeError(1, 2)


HOARDER: dict[str, Any] = {
    "hoarder": {
        "class": f"{__name__}:Hoarder",
        "methods": {"keep": {"what": "str"}, "wait": {}},
        "managed": True,
        "min_instances": 2,
        "preemptable": True,
    }
}


async def test_an_instance_retires_with_its_process() -> None:
    async def main(app: Deployment, launcher: LocalLauncher) -> None:
        held = [call("patient", "wait", f"{n}") for n in range(4)]
        await until(lambda: len(app.control.level.view.of("patient")) == 1 and "0" in Patient.gates)
        assert await app.act_async(lambda act: act.provision("patient")) == []
        await until(lambda: len(app.control.level.view.of("patient")) == 2)
        assert await app.act_async(lambda act: act.kill("patient/0")) == []
        for n in range(4):
            Patient.gates.setdefault(f"{n}", asyncio.Event()).set()
        assert [await each for each in held] == ["0", "1", "2", "3"]
        assert app.hub is not None
        await until(lambda: app.hub.names() == ["node-2"])
        assert launcher.peers["patient/0"].is_closed
        assert await call("patient", "wait", "0") == "0"

    launcher = LocalLauncher()
    async with deploy(only("patient", max_instances=2), ray=launcher, **CALM) as app:
        await app.run_async(main, app, launcher)


async def test_a_new_instance_knows_the_orders_in_force() -> None:
    """Its calls go by the routes that were set before it came."""

    def ask(act: Act) -> None:
        act.route(agent="echo", to="echo/1")
        act.route(agent="echo", session="vip", to="echo/0")
        act.set_priority("vip", 5.0)
        act.provision("patient")

    def knows_all() -> bool:
        if "patient/1" not in launcher.peers or not hasattr(launcher.peers["patient/1"], "host"):
            return False
        node = launcher.peers["patient/1"].host.node
        picked = [node.origin.router.pick(session, "echo") for session in ("other", "vip") for _ in range(2)]
        queue = node.controllers["patient/1"].queue if node.controllers else None
        return picked == ["echo/1"] * 2 + ["echo/0"] * 2 and queue is not None and queue.priorities == {"vip": 5.0}

    launcher = LocalLauncher()
    agents = only("patient", max_instances=2) | only("echo", min_instances=2)
    async with deploy(agents, ray=launcher, **CALM) as app:
        await until(lambda: len(app.control.level.view.instances) == 3)
        assert await app.act_async(ask) == []
        await until(knows_all)


async def test_an_agent_that_is_called_from_elsewhere_gets_its_first_instance() -> None:
    async def main() -> None:
        with pytest.raises(CallError, match="KeyError"):
            await call("echo", "through", "x")

    agents = only("echo") | only("blocking", min_instances=0)
    async with deploy(agents, ray=LocalLauncher(), **CALM) as app:
        await app.run_async(main)


async def test_an_agent_that_cannot_be_made_stops_the_deployment() -> None:
    before = asyncio.all_tasks()
    launcher = LocalLauncher()
    broken = {"broken": {"class": "tests.unit.workflows.agents:Broken", "methods": {"say": {}}}}
    with pytest.raises(RuntimeError, match="no licence"):
        async with deploy(broken | only("echo"), ray=launcher, **CALM):
            pass
    assert launcher.is_closed
    assert asyncio.all_tasks() == before


async def test_no_task_is_left() -> None:
    before = asyncio.all_tasks()
    async with deploy(only("echo", "patient"), ray=LocalLauncher(), **CALM) as app:
        left: list[Any] = []
        await app.run_async(lambda: left.append(call("patient", "wait", "never")))
    assert asyncio.all_tasks() == before
    with pytest.raises(WorkflowError):
        left[0].value(1)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of the workflows imports Ray."""
    assert "ray" not in sys.modules or sys.modules["ray"] is None
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(DeclarationError, match="install the package `thunderagent-workflows` with its extra `ray`"),
        deploy(only("echo"), ray="auto"),
    ):
        pass
