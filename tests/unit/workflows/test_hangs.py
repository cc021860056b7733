"""What must not stop an event loop or wait for good: cancelled drivers, `sys.exit`, blocking methods, late calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from typing import Any

import pytest

from tests.unit.workflows.agents import Blocking, only
from thunderagent.workflows import (
    CallError,
    Deployment,
    EndedError,
    SessionEndedError,
    WorkflowError,
    deploy,
    stubs,
)

CALM: dict[str, Any] = {"policies": (), "period_s": 0.01}
PATIENCE_S = 10.0


class Fragile:
    """Ends in ways that are no `Exception`."""

    async def exit(self) -> None:
        sys.exit("no key")

    def exit_plain(self) -> None:
        sys.exit("no key")

    async def cancelled(self) -> None:
        work = asyncio.create_task(asyncio.sleep(PATIENCE_S))
        work.cancel()
        await work

    async def cancelled_itself(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(PATIENCE_S)

    def cancelled_plain(self) -> None:
        work: concurrent.futures.Future[None] = concurrent.futures.Future()
        work.cancel()
        work.result()

    async def block(self) -> None:
        APP[0].run(lambda: None)


class Late:
    """Makes a call before or after the end of the deployment begins, and waits for it."""

    found: list[BaseException] = []  # noqa: RUF012 - the test's
    is_ending = threading.Event()

    def ask(self, when: str) -> None:
        made = stubs.call("echo", "say", (when,)) if when == "before" else None
        Blocking.gates["asked"].set()
        self.is_ending.wait(PATIENCE_S)
        try:
            (made or stubs.call("echo", "say", (when,))).value(PATIENCE_S)
        except (EndedError, TimeoutError) as error:
            self.found.append(error)


class Ender:
    """Tells that its deployment ends."""

    def say(self) -> None: ...

    def close(self) -> None:
        Late.is_ending.set()


METHODS = ("exit", "exit_plain", "cancelled", "cancelled_itself", "cancelled_plain", "block")
FRAGILE: dict[str, Any] = {"fragile": {"class": f"{__name__}:Fragile", "methods": {name: {} for name in METHODS}}}
LATE: dict[str, Any] = {
    "late": {"class": f"{__name__}:Late", "methods": {"ask": {"when": "str"}}},
    "ender": {"class": f"{__name__}:Ender", "methods": {"say": {}}},
}
APP: list[Deployment] = []


async def test_a_plain_driver_that_is_cancelled_stops_no_loop() -> None:
    """Its calls fail, so that its thread ends."""
    found: list[BaseException] = []
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def main() -> None:
        try:
            stubs.call("blocking", "gate", ("g",)).value(PATIENCE_S)
        except SessionEndedError as error:
            found.append(error)
        finally:
            loop.call_soon_threadsafe(is_over.set)

    Blocking.gates.clear()
    async with deploy(only("blocking"), **CALM) as app:
        driving = asyncio.create_task(app.run_async(main))
        async with asyncio.timeout(PATIENCE_S):
            while "g" not in Blocking.gates:
                await asyncio.sleep(0.001)
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving
        await is_over.wait()
        Blocking.gates["g"].set()
    assert len(found) == 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_call_within_a_call_ends_with_the_deployment(when: str) -> None:
    """The plain method around it is waited for, so it must not wait for an instance that no longer comes."""
    Late.found.clear()
    Late.is_ending.clear()
    is_asked = Blocking.gates["asked"] = threading.Event()
    async with deploy(LATE | only("echo", min_instances=0), policies=(), period_s=60.0) as app:
        await app.run_async(lambda: [stubs.call("late", "ask", (when,)), None][1], session="s")
        await asyncio.to_thread(is_asked.wait, PATIENCE_S)
    assert [type(each) for each in Late.found] == [EndedError]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("exit", "SystemExit: no key"),
        ("exit_plain", "SystemExit: no key"),
        ("cancelled", "CancelledError"),
        ("cancelled_itself", "CancelledError"),
        ("cancelled_plain", "CancelledError"),
    ],
)
def test_a_call_fails_whatever_its_method_raises(method: str, why: str) -> None:
    """The loop goes on, and so does the instance."""
    with deploy(FRAGILE, **CALM) as app:
        for _ in range(2):
            with pytest.raises(CallError, match=f"fragile.{method} failed: {why}"):
                app.run(lambda: stubs.call("fragile", method, ()).value(PATIENCE_S))


def test_an_async_driver_may_exit() -> None:
    """Who runs it exits, as with a plain driver; the deployment's loop does not."""

    async def main() -> None:
        sys.exit("it is enough")

    with deploy(only("echo"), **CALM) as app:
        with pytest.raises(SystemExit, match="it is enough"):
            app.run(main)
        assert app.run(lambda: stubs.call("echo", "say", (1,)).value(PATIENCE_S)) == 1


async def test_blocking_methods_are_refused_on_the_loop() -> None:
    """They are for other threads; a deployment that is not open has none."""
    app = deploy(only("echo"), **CALM)
    with pytest.raises(WorkflowError, match="not open"):
        app.run(lambda: None)
    async with app:
        with pytest.raises(WorkflowError, match=r"await app.run_async\(...\)"):
            app.run(lambda: None)
        with pytest.raises(WorkflowError, match=r"await app.end_session_async\(...\)"):
            app.end_session("s")
        with pytest.raises(WorkflowError, match=r"await app.act_async\(...\)"):
            app.act(lambda _: None)
        assert await asyncio.to_thread(app.run, lambda: stubs.call("echo", "say", (1,)).value(PATIENCE_S)) == 1
        await asyncio.to_thread(app.end_session, "s")


def test_blocking_methods_are_refused_in_an_agent_s_coroutine() -> None:
    with deploy(FRAGILE, **CALM) as app:
        APP[:] = [app]
        with pytest.raises(CallError, match=r"await app.run_async\(...\)"):
            app.run(lambda: stubs.call("fragile", "block", ()).value(PATIENCE_S))
