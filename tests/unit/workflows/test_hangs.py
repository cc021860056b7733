"""What must not stop an event loop or wait for good: cancelled drivers, `sys.exit`, blocking methods, late calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.workflows.agents import Blocking, only
from thunderagent_workflows import (
    CallError,
    DeadlockError,
    Deployment,
    EndedError,
    SessionEndedError,
    WorkflowError,
    deploy,
    future,
    instance,
    settle,
    settle_async,
    stubs,
)
from thunderagent_workflows.circles import find_circle
from thunderagent_workflows.future import Handle, Waiting, handle_of
from thunderagent_workflows.node import Node

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

    def stop_iteration(self) -> None:
        next(iter(()))

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


class Empty:
    """Ends in its constructor as a plain method may."""

    def __init__(self) -> None:
        next(iter(()))

    def say(self) -> None: ...


async def wait_for(made: Any) -> Any:
    return await made


class Stuck:
    """Does not end."""

    gate = threading.Event()

    def say(self) -> None: ...

    def close(self) -> None:
        self.gate.wait(PATIENCE_S)


class Knot:
    """Waits for calls of its own only instance."""

    def settle(self) -> Any:
        return settle([stubs.call("knot", "say", (1,))])[0].value()

    async def settle_async(self) -> Any:
        return (await settle_async([stubs.call("knot", "say", (1,))]))[0].value()

    async def settle_needing(self) -> Any:
        """Settle also a call that takes the value."""
        made = stubs.call("knot", "say", (1,))
        return (await settle_async([made, stubs.call("echo", "say", (made,))]))[1].value()

    async def beside_another(self) -> None:
        """Begin the other wait last."""
        made = [stubs.call("knot", "say", (1,)), stubs.call("blocking", "gate", ("g",))]
        await asyncio.gather(*(wait_for(each) for each in made))

    async def timed(self) -> int:
        """Look now and then, until another call is made."""
        made = stubs.call("knot", "say", (1,))
        while not Blocking.gates["g"].is_set():
            await settle_async([made], timeout=0.2)
            await asyncio.sleep(0.001)
        return len(await settle_async([made], timeout=0.01))

    def timed_plain(self) -> int:
        made = stubs.call("knot", "say", (1,))
        while not Blocking.gates["g"].is_set():
            settle([made], timeout=0.2)
        return len(settle([made], timeout=0.01))

    async def any(self) -> list[bool]:
        """Wait for no call in particular."""
        made = [stubs.call("knot", "say", (1,)), stubs.call("blocking", "gate", ("g",))]
        await settle_async(made, any=True)
        return [each.available for each in made]

    async def needing(self) -> Any:
        """Wait for another agent's call that takes the value of such a call."""
        return await (await self.returning())

    async def returning(self) -> Any:
        return stubs.call("echo", "say", (stubs.call("knot", "say", (1,)),))

    async def say(self, value: int) -> int:
        return value


METHODS = ("exit", "exit_plain", "cancelled", "cancelled_itself", "cancelled_plain", "stop_iteration", "block")
FRAGILE: dict[str, Any] = {"fragile": {"class": f"{__name__}:Fragile", "methods": {name: {} for name in METHODS}}}
KNOT: dict[str, Any] = {
    "knot": {
        "class": f"{__name__}:Knot",
        "methods": {
            "settle": {},
            "settle_async": {},
            "settle_needing": {},
            "beside_another": {},
            "timed": {},
            "timed_plain": {},
            "any": {},
            "needing": {},
            "returning": {},
            "say": {"value": "int"},
        },
    }
}
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
        ("stop_iteration", "RuntimeError: plain code raised StopIteration"),
    ],
)
def test_a_call_fails_whatever_its_method_raises(method: str, why: str) -> None:
    """The loop goes on, and so does the instance."""
    with deploy(FRAGILE, **CALM) as app:
        for _ in range(2):
            with pytest.raises(CallError, match=f"fragile.{method} failed: {why}"):
                app.run(lambda: stubs.call("fragile", method, ()).value(PATIENCE_S))


async def test_stop_iteration_ends_a_driver_and_a_start() -> None:
    """It is raised as another error, since no future can have it."""
    async with deploy(only("echo"), **CALM) as app, asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await app.run_async(lambda: next(iter(())))
    empty = {"empty": {"class": f"{__name__}:Empty", "methods": {"say": {}}}}
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        async with asyncio.timeout(PATIENCE_S), deploy(empty, **CALM):
            pass


@pytest.mark.parametrize("way", ["wait", "settle", "forgotten"])
def test_caller_that_gave_up_on_another_loop_keeps_nobody(way: str) -> None:
    """Its loop is closed when the value comes; the next one gets it."""

    async def give_up(made: Any) -> None:
        if way == "settle":
            await settle_async([made], timeout=0.01)
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await made

    def main() -> str:
        made = stubs.call("blocking", "gate", ("g",))
        if way == "forgotten":
            loop = asyncio.new_event_loop()
            task = loop.create_task(wait_for(made))
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        else:
            asyncio.run(give_up(made))
        Blocking.gates.setdefault("g", threading.Event()).set()
        value: str = made.value(PATIENCE_S)
        if way == "forgotten":
            task._log_destroy_pending = False
        return value

    Blocking.gates.clear()
    with deploy(only("blocking"), **CALM) as app:
        assert app.run(main) == "g"
        assert app.run(lambda: stubs.call("blocking", "say", (1,)).value(PATIENCE_S))[0] == 1


def test_a_garbage_collection_may_give_up_a_wait() -> None:
    """It comes at any time, also in a thread that registers a waiter."""
    made = Handle(cast("Any", None))

    def register() -> None:
        with future._registering:
            made.remove_waiter(lambda: None)

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_wait_that_is_given_up_leaves_no_waiter() -> None:
    """So that who looks again and again is not told as often."""

    def main() -> list[Any]:
        made = [stubs.call("blocking", "gate", ("g",)), stubs.call("blocking", "say", (1,))]
        with pytest.raises(TimeoutError):
            made[0].value(0.001)
        settle(made, any=True, timeout=0.001)
        asyncio.run(settle_async(made, timeout=0.001))
        left = [[*handle_of(each).waiters] for each in made]
        Blocking.gates.setdefault("g", threading.Event()).set()
        settle(made, timeout=PATIENCE_S)
        return left

    Blocking.gates.clear()
    with deploy(only("blocking"), **CALM) as app:
        assert app.run(main) == [[], []]


@pytest.mark.parametrize("method", ["settle", "settle_async", "settle_needing", "beside_another"])
def test_a_call_that_waits_for_itself_fails_however_it_waits(method: str) -> None:
    """It may settle it, also with one that needs it, or wait for another one beside."""
    Blocking.gates.clear()
    with deploy(KNOT | only("blocking", "echo"), **CALM) as app:
        try:
            with pytest.raises(CallError) as caught:
                app.run(lambda: stubs.call("knot", method, ()).value(PATIENCE_S))
        finally:
            Blocking.gates.setdefault("g", threading.Event()).set()
    assert isinstance(caught.value.__cause__, DeadlockError)
    assert "knot.say #2 waits at knot/0 for a call that waits for it" in str(caught.value.__cause__)


@pytest.mark.parametrize("method", ["timed", "timed_plain"])
async def test_caller_that_settles_with_a_timeout_does_not_wait_for_itself(method: str) -> None:
    """The call runs afterwards."""

    async def main(app: Deployment) -> Any:
        made = stubs.call("knot", method, ())
        async with asyncio.timeout(PATIENCE_S):
            while not any(each.call.method == "say" and each.waiters for each in app.node.origin.records.values()):
                await asyncio.sleep(0.001)
        for _ in range(3):
            app.node.break_circle()
            await asyncio.sleep(0.001)
        Blocking.gates["g"].set()
        return await made

    Blocking.gates["g"] = threading.Event()
    async with deploy(KNOT, policies=(), period_s=60.0) as app:
        assert await app.run_async(main, app, session="s") == 0


class Looks(dict[Any, Any]):
    """Notes each look."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.looked: list[Any] = []

    def get(self, key: Any, default: Any = None) -> Any:
        self.looked.append(key)
        return super().get(key, default)


def waited_for(call_id: int, executor: str, *needs: Handle) -> Handle:
    made = Handle(cast("Any", SimpleNamespace(call_id=call_id)), needs)
    made.executor = executor
    return made


def waits(*handles: Handle) -> Waiting:
    return Waiting(handles, lambda: None, None)


def runs(*call_ids: int) -> Any:
    return SimpleNamespace(running=dict.fromkeys(call_ids))


async def test_a_look_for_calls_that_wait_for_themselves_goes_on_from_each_once() -> None:
    """However many wait in the queue of one instance, or need the same ones."""
    controllers = Looks({"a/0": runs(3, 4)})
    queued = [waits(*(waited_for(call_id, "a/0") for call_id in range(3, 100)))]
    deep = waited_for(100, "elsewhere")
    for call_id in range(101, 110):
        deep = waited_for(call_id, "elsewhere", deep, deep)
    looks = Looks({1: queued, 2: queued, 3: [waits(deep)]})
    assert find_circle(looks, controllers) is None
    assert sorted(looks.looked) == [1, 2, 3, 3, 3, 4, 4]
    assert controllers.looked.count("elsewhere") == 3 * 10


def test_calls_that_wait_for_themselves_are_found_through_any_call_of_a_batch() -> None:
    """What waits is the code of all, in the name of the first."""
    queued = waited_for(4, "b/0")
    waiting = {1: [waits(queued)], 3: [waits(waited_for(2, "a/0"))]}
    assert find_circle(waiting, {"a/0": runs(1, 2), "b/0": runs(3)}) is queued


def test_a_garbage_collection_may_give_up_a_wait_that_is_looked_at() -> None:
    """So the waits are not read one by one."""
    queued = waited_for(2, "a/0")
    assert find_circle({1: Unread({waits(queued)})}, {"a/0": runs(1)}) is queued


@pytest.mark.parametrize("method", ["needing", "returning"])
async def test_a_call_that_needs_one_which_waits_for_its_caller_fails(method: str) -> None:
    """What it needs runs afterwards."""

    async def main(app: Deployment) -> None:
        with pytest.raises(CallError) as caught:
            await stubs.call("knot", method, ())
        assert isinstance(caught.value.__cause__, DeadlockError)
        assert "echo.say #3 waits at echo/0 for a call that waits for it" in str(caught.value.__cause__)
        async with asyncio.timeout(PATIENCE_S):
            while app.node.instances["knot/0"].done_count < 2:
                await asyncio.sleep(0.001)

    async with deploy(KNOT | only("echo"), **CALM) as app, asyncio.timeout(PATIENCE_S):
        await app.run_async(main, app, session="s")


class Unread(set[Any]):
    """Waits that may be added, taken off and copied in one step, but not be read one by one."""

    def __iter__(self) -> Any:
        raise AssertionError("the waits are read one by one")


async def test_a_wait_costs_the_same_however_many_others_a_call_has() -> None:
    made, node = Handle(cast("Any", SimpleNamespace(call_id=2))), Node({}, {})
    made.node = node
    node.waiting[1] = Unread({waits(made)})
    with Waiting((made,), lambda: None, cast("Any", SimpleNamespace(call_id=1))):
        assert len(node.waiting[1]) == 2
    assert len(node.waiting[1]) == 1


class Collecting(dict[int, Any]):
    """Has a garbage collection end a call's other waits when one more begins."""

    def setdefault(self, key: int, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self.pop(key)


async def test_a_wait_is_known_though_a_garbage_collection_ends_the_others() -> None:
    made, node = waited_for(2, "a/0"), Node({}, {})
    made.node, node.waiting = node, Collecting()
    with Waiting((made,), lambda: None, cast("Any", SimpleNamespace(call_id=1))):
        assert len(node.waiting[1]) == 1
    assert node.waiting == {}


async def test_caller_that_waits_for_any_of_several_calls_does_not_wait_for_itself() -> None:
    async def main(app: Deployment) -> list[bool]:
        made = stubs.call("knot", "any", ())
        async with asyncio.timeout(PATIENCE_S):
            while "g" not in Blocking.gates:
                await asyncio.sleep(0.001)
        for _ in range(3):
            app.node.break_circle()
        Blocking.gates["g"].set()
        return await made

    Blocking.gates.clear()
    async with deploy(KNOT | only("blocking"), policies=(), period_s=60.0) as app:
        assert await app.run_async(main, app, session="s") == [False, True]
        assert app.node.waiting == {}


async def test_drivers_in_all_threads_of_the_loop_get_large_values() -> None:
    """None is left there to search the value for futures."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    large = [0.0] * (instance.SEARCHED_COUNT + 1)

    def main() -> Any:
        return stubs.call("echo", "say", (large,)).value(PATIENCE_S)

    async with deploy(only("echo"), **CALM) as app:
        assert await asyncio.to_thread(app.run, main) == large


async def test_an_agent_s_end_has_a_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The loop is not blocked by what goes on in its thread."""
    monkeypatch.setattr(instance, "CLOSE_S", 0.01)
    stuck = {"stuck": {"class": f"{__name__}:Stuck", "methods": {"say": {}}}}
    try:
        async with asyncio.timeout(PATIENCE_S / 2), deploy(stuck, **CALM):
            pass
    finally:
        Stuck.gate.set()
    assert "stuck/0: its close() failed" in caplog.text


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
