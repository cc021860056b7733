"""The embedded runtime: futures, sessions, state, batches, interruption, and the end of all of them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from typing import Any

import pytest

from tests.unit.workflows.agents import AGENTS, HERE, Blocking, Holder, Patient, only
from tests.unit.workflows.elsewhere import LocalLauncher
from thunderagent_workflows import (
    CallError,
    DeadlockError,
    Deployment,
    EndedError,
    Future,
    LostError,
    SessionEndedError,
    StateError,
    StoreError,
    WorkflowError,
    deploy,
    instance,
    managed_dict,
    settle,
    settle_async,
    stubs,
)
from thunderagent_workflows.future import MAY_HOLD_FUTURES, holds_future
from thunderagent_workflows.store import Decisions, MemoryStore
from thunderagent_workflows.view import Act, Line, Summary, View

CALM = {"policies": (), "period_s": 0.01}


def call(agent: str, method: str, *args: Any) -> Any:
    return stubs.call(agent, method, args)


@pytest.fixture(autouse=True)
def _gates_are_shut() -> None:
    Blocking.gates.clear()
    Patient.gates.clear()
    Holder.gates.clear()
    Holder.closed.clear()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


# --- futures


def test_a_future_is_its_value_where_python_allows() -> None:
    def main() -> None:
        found = call("echo", "say", ["a", "b"])
        assert len(found) == 2
        assert found == ["a", "b"]
        assert [*found] == ["a", "b"]
        first, second = call("echo", "say", ("x", "y"))
        assert f"{first}{second}" == "xy"
        assert isinstance(found, list)
        assert ["c"] + found == ["c", "a", "b"]  # noqa: RUF005 - `+` is what is tested
        with pytest.raises(TypeError):
            json.dumps(found)
        assert json.dumps(found.value()) == '["a", "b"]'
        assert found.available
        assert found.available()
        assert "echo.say #1: done at echo/0" in repr(found)

    with deploy(only("echo"), **CALM) as app:
        app.run(main)


def test_a_future_knows_where_it_stands() -> None:
    def main() -> None:
        held = call("blocking", "gate", "g")
        behind = call("blocking", "say", held)
        last = call("echo", "say", [behind, {"k": held}])
        with pytest.raises(TimeoutError, match=r"blocking.gate #1 is not there after 0.05 s"):
            held.value(timeout=0.05)
        while "g" not in Blocking.gates:
            time.sleep(0.001)
        assert held.metadata["state"] == "running"
        assert behind.metadata["dependencies"] == [(held.metadata["call_id"], "blocking/0")]
        assert (behind.metadata["creator"], behind.metadata["stage"]) == ("driver", 2)
        assert last.metadata["state"] == "queued"
        assert held.metadata["consumers"] == ["blocking/0", "echo/0"]
        Blocking.gates["g"].set()
        assert last.value(10)[1] == {"k": "g"}
        assert last.metadata["state"] == "done"
        assert "driver" in last.metadata["consumers"]

    with deploy(only("echo", "blocking"), **CALM) as app:
        app.run(main)


async def test_an_async_driver_awaits() -> None:
    async def main() -> Any:
        parts = call("echo", "say", [1, 2, 3])
        with pytest.raises(DeadlockError, match="await") as caught:
            len(parts)
        assert (caught.value.path, caught.value.instance) == (("echo/0",), "echo/0")
        with pytest.raises(DeadlockError, match=r"echo.say #1: `settle` would stop") as caught:
            settle([parts])
        assert caught.value.path == ("echo/0",)
        size = call("blocking", "measure", parts)
        assert await size == 3
        assert await settle_async([size, parts]) == [size, parts]
        return call("echo", "say", "returned")

    async with deploy(only("echo", "blocking"), **CALM) as app:
        assert await app.run_async(main) == "returned"
        assert await app.run_async(lambda: call("echo", "say", "from a thread").value()) == "from a thread"


def test_agents_see_plain_values_only() -> None:
    """Futures among arguments, nested too, are resolved first; so are those that a method returns."""

    def main() -> Any:
        nested = call("echo", "say", {"a": [call("echo", "say", 1), (call("echo", "say", 2),)], "b": "c"})
        return nested.value()

    with deploy(only("echo"), **CALM) as app:
        assert app.run(main) == {"a": [1, (2,)], "b": "c"}


class Nester:
    """Returns futures within others' parts, one of them available."""

    async def nest(self) -> Any:
        made = [call("echo", "say", "x") for _ in range(3)]
        await made[0]
        return {"parts": [{"a": made[0]}, (made[1], [made[2]])], "rest": 1}

    async def fail(self) -> Any:
        return {"parts": [call("echo", "fail", "x")]}

    async def cycle(self) -> list[Any]:
        itself: list[Any] = []
        itself.append(itself)
        return itself

    async def open_cycle(self) -> list[Any]:
        return [call("echo", "say", "x"), await self.cycle()]


def test_a_returned_value_has_no_futures_in_it() -> None:
    """However deep; a value that holds itself is left as it is."""
    nester = {"class": f"{__name__}:Nester", "methods": {key: {} for key in ("nest", "fail", "cycle", "open_cycle")}}
    with deploy({"nester": nester} | only("echo"), **CALM) as app:
        found = app.run(lambda: call("nester", "nest").value(10))
        assert found == {"parts": [{"a": "x"}, ("x", ["x"])], "rest": 1}
        assert [type(found["parts"][0]["a"]), *map(type, found["parts"][1])] == [str, str, list]
        with pytest.raises(CallError, match=r"echo.fail failed: ValueError: x"):
            app.run(lambda: call("nester", "fail").value(10))
        itself = app.run(lambda: call("nester", "cycle").value(10))
        assert itself[0] is itself
        for make in (lambda: call("nester", "open_cycle").value(10), lambda: call("echo", "say", itself)):
            with pytest.raises(WorkflowError, match="nest too deeply, or hold themselves"):
                app.run(make)


def test_a_plain_method_s_value_is_searched_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one would stop the loop."""
    threads: list[str] = []

    def note(value: Any) -> bool | None:
        threads.append(threading.current_thread().name)
        return holds_future(value)

    monkeypatch.setattr(instance, "holds_future", note)
    with deploy(only("blocking"), **CALM) as app:
        app.run(lambda: call("blocking", "say", 1).value(10))
    assert threads == ["workflow-blocking/0_0"]


def test_a_coroutine_s_large_value_is_searched_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop looks at the first parts only."""
    found: list[tuple[int, bool | None]] = []

    def note(value: Any, *limit: float) -> bool | None:
        is_open = holds_future(value, *limit)
        found.append((threading.get_ident(), is_open))
        return is_open

    monkeypatch.setattr(instance, "holds_future", note)
    with deploy(only("echo"), **CALM) as app:
        half = [0.0] * (instance.SEARCHED_COUNT // 2)
        assert app.run(lambda: call("echo", "say", [half]).value(10)) == [half]
        on_loop = app.node.thread_id
        assert found == [(on_loop, False)]
        large = {"a": half, "b": [[*half], [*half]]}
        app.run(lambda: call("echo", "say", large).value(10))
        assert found[1] == (on_loop, None)
        assert found[2][0] != on_loop
        assert found[2][1] is False


def test_a_value_may_change_while_it_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread searches it, and its owner goes on."""
    rows: dict[int, Any] = {0: [], 1: []}

    class Changing(frozenset[type]):
        def __contains__(self, kind: object) -> bool:
            rows[len(rows)] = "more"
            return super().__contains__(kind)

    monkeypatch.setattr("thunderagent_workflows.future.MAY_HOLD_FUTURES", Changing(MAY_HOLD_FUTURES))
    assert holds_future(rows) is False
    assert len(rows) > 2


def test_settle_sleeps_until_one_more_is_there() -> None:
    def main() -> None:
        done = call("echo", "say", 1)
        done.value()
        held = [call("blocking", "gate", "one"), call("echo", "say", "x")]
        assert settle([done, *held], any=True, timeout=10) == [done, held[1]]
        assert settle(held, timeout=0.01) == [held[1]]
        Blocking.gates["one"].set()
        assert settle(held, timeout=10) == held

    with deploy(only("echo", "blocking"), **CALM) as app:
        app.run(main)


# --- errors


def test_an_error_says_where_it_was_and_brings_the_traceback() -> None:
    """It passes through another agent, and to all calls that depend on it."""

    def main() -> None:
        failed = call("echo", "through", "why")
        depends = call("echo", "say", [failed])
        with pytest.raises(CallError) as caught:
            depends.value(10)
        error = caught.value
        assert error.path == ("echo/0",)
        assert error.instance == "echo/0"
        assert error.agent == "echo"
        assert isinstance(error.__cause__, CallError)
        assert error.__cause__.path == ("echo/0", "blocking/0")
        assert isinstance(error.__cause__.__cause__, KeyError)
        assert "raise KeyError(text)" in str(error)
        assert failed.metadata["state"] == "failed"

    with deploy(only("echo", "blocking"), **CALM) as app:
        app.run(main)


def test_a_call_outside_of_a_session_or_of_nobody_is_refused() -> None:
    with pytest.raises(WorkflowError, match="needs a session"):
        call("echo", "say", 1)
    with deploy(only("echo"), **CALM) as app, pytest.raises(WorkflowError, match="no agent 'nobody' is deployed"):
        app.run(lambda: call("nobody", "say", 1))


def test_a_call_that_waits_for_itself_fails() -> None:
    """The error names the call, which was made within the other."""
    said = "waits at blocking/0 for a call"
    with deploy(only("blocking"), **CALM) as app, pytest.raises(CallError, match=said) as caught:
        app.run(lambda: call("blocking", "ask_myself", "x").value(20))
    assert caught.value.path == ("blocking/0",)
    inner = caught.value.__cause__
    assert isinstance(inner, DeadlockError)
    assert (inner.path, inner.instance, inner.agent) == (("blocking/0", "blocking/0"), "blocking/0", "blocking")


def test_a_call_may_ask_another_instance_of_its_agent() -> None:
    with deploy(only("blocking", min_instances=2), **CALM) as app:
        assert app.run(lambda: call("blocking", "ask_myself", "x").value(20))[0] == "x"


def test_call_on_a_lost_instance_fails_and_a_new_instance_takes_its_place() -> None:
    async def main(app: Deployment) -> None:
        held, behind = call("patient", "wait", "a"), call("patient", "wait", "b")
        depends = call("echo", "say", [behind])
        await until(lambda: held.metadata["state"] == "running")
        app.lose("patient/0")
        for future in (held, behind, depends):
            with pytest.raises(LostError) as caught:
                await future
            assert caught.value.path == ("patient/0",)
        again = call("patient", "wait", "c")
        await until(lambda: again.metadata["state"] == "running")
        assert again.metadata["executor"] == "patient/1"
        Patient.gates.setdefault("c", asyncio.Event()).set()
        assert await again == "c"

    with deploy(only("patient", "echo"), **CALM) as app:
        app.run(main, app)


def test_an_agent_that_cannot_be_made_stops_the_deployment() -> None:
    before = threading.active_count()
    broken = {"broken": {"class": f"{HERE}:Broken", "methods": {"say": {}}}}
    with pytest.raises(RuntimeError, match="no licence"), deploy(broken):
        pass
    assert threading.active_count() == before


# --- sessions


def test_stateful_calls_run_in_order_on_one_instance() -> None:
    async def main(name: str) -> list[int]:
        futures = [call("counter", "add", name, number) for number in range(50)]
        return (await settle_async(futures))[-1].value()

    async def together(app: Deployment) -> list[Any]:
        return await asyncio.gather(*(app.run_async(main, f"s{i}", session=f"s{i}") for i in range(6)))

    with deploy(only("counter"), **CALM) as app:
        for found in asyncio.run_coroutine_threadsafe(together(app), app._loop).result(20):
            assert found == list(range(50))
        seen = [instance._object.seen for instance in app.node.instances.values()]
        assert sum(len(each) for each in seen) == 6


def test_managed_state_goes_where_its_session_goes() -> None:
    """A migration between two calls changes nothing that the session sees; another session sees nothing of it."""

    def say(*texts: str) -> Any:
        for text in texts:
            found = call("rememberer", "hear", text).value(10)
        return found

    with deploy(only("rememberer"), **CALM) as app:
        assert app.run(say, "a", "b", session="s") == ["a", "b"]
        assert app.run(say, "z", session="t") == ["z"]
        home = app.session_log("s").log[-1][4]
        other = ({"rememberer/0", "rememberer/1"} - {home}).pop()
        assert app.act(lambda act: act.migrate("s", home, other)) == []
        assert app.run(say, "c", session="s") == ["a", "b", "c"]
        assert app.session_log("s").log[-1][4] == other
        app.end_session("s")
        assert app.run(say, "d", session="s") == ["d"]


class SlowStore(MemoryStore):
    """Answers as late as a store across a network."""

    async def push(self, node: str, decisions: Decisions) -> None:
        await super().push(node, decisions)
        await asyncio.sleep(0.02)

    async def take(self, node: str) -> list[Decisions]:
        found = await super().take(node)
        await asyncio.sleep(0.05 if found else 0.001)
        return found


def test_requested_actions_are_done_when_act_returns() -> None:
    """The loop's own turn does not take it away to apply it later, and does not ask for it again."""
    asked: list[str] = []

    def move(act: Act) -> None:
        asked.append("move")
        act.migrate("s", home, other)

    with deploy(only("rememberer"), policies=(), period_s=0.001, store=SlowStore()) as app:
        for number in range(6):
            app.run(lambda: call("rememberer", "hear", "a").value(10), session="s")
            home = app.session_log("s").log[-1][4]
            other = ({"rememberer/0", "rememberer/1"} - {home}).pop()
            assert app.act(move) == []
            app.run(lambda: call("rememberer", "hear", "b").value(10), session="s")
            assert app.session_log("s").log[-1][4] == other
            assert len(asked) == number + 1


def ask_for_more(_: View, act: Act) -> None:
    act.provision("slow_start")


async def test_instances_that_begin_to_be_count() -> None:
    """A class takes longer to construct than many turns do: no more are started than there may be."""
    slow = {"class": f"{HERE}:SlowStart", "methods": {"say": {}}, "max_instances": 2, "resources": {"gpu": 1}}
    for limit in ({}, {"max_instances": 9}):
        resources = {"gpu": 2.0} if limit else None
        policies = [f"{__name__}:ask_for_more"]
        async with deploy(
            {"slow_start": {**slow, **limit}}, policies=policies, period_s=0.005, resources=resources
        ) as app:
            await until(lambda app=app: len(app.node.instances) == 2)
            await asyncio.sleep(0.1)
            assert sorted(app.node.instances) == ["slow_start/0", "slow_start/1"]


async def test_action_requested_as_the_deployment_ends_fails() -> None:
    """It neither waits for good nor starts anything again."""
    store = SlowStore()
    async with deploy(only("echo"), policies=(), period_s=0.001, store=store) as app:
        asked = asyncio.create_task(app.act_async(lambda act: act.kill("echo/0")))
        await asyncio.sleep(0)
    with pytest.raises(WorkflowError, match="the deployment has ended"):
        await asked
    assert not app.node.instances
    with pytest.raises(WorkflowError, match="the deployment has ended"):
        await app.act_async(lambda act: act.kill("echo/0"))


class FailingStore(MemoryStore):
    """Takes nothing while it fails."""

    fails = False
    fails_to_push = False

    async def publish(self, node: str, summaries: list[Summary]) -> None:
        if self.fails:
            raise StoreError("away")
        await super().publish(node, summaries)

    async def collect(self) -> list[Summary]:
        if self.fails:
            raise StoreError("away")
        return await super().collect()

    async def push(self, node: str, decisions: Decisions) -> None:
        if self.fails_to_push:
            raise StoreError("away")
        await super().push(node, decisions)


async def test_reports_outlive_a_failure_of_the_store() -> None:
    """What the store has not taken comes with the next turn; whoever asks meanwhile hears of the failure."""
    store = FailingStore()
    async with deploy(only("patient"), policies=(), period_s=0.002, store=store) as app:
        await until(lambda: app.control.level.view.instances)

        async def main() -> list[str]:
            store.fails = True
            made = [call("patient", "wait", name) for name in "ab"]
            with pytest.raises(StoreError, match="away"):
                await app.act_async(lambda act: act.kill("patient/0"))
            store.fails = False
            await until(lambda: app.control.level.view.instances["patient/0"].load_count == 2)
            assert app.control.level.view.sessions["s"].calls_count >= 1
            for name in "ab":
                Patient.gates[name].set()
            return [await each for each in made]

        Patient.gates.update(a=asyncio.Event(), b=asyncio.Event())
        assert await app.run_async(main, session="s") == ["a", "b"]


async def test_instances_are_replaced_while_the_store_fails() -> None:
    """So is a call failed that waits for itself."""
    store = FailingStore()
    async with deploy(only("echo", "blocking"), policies=(), period_s=0.005, store=store) as app:
        store.fails = True
        app.lose("echo/0")
        with pytest.raises(CallError, match="waits at blocking/0"):
            await app.run_async(lambda: call("blocking", "ask_myself", "x").value(10))
        await until(lambda: "echo/1" in app.node.controllers)


async def test_action_that_the_store_did_not_take_can_be_requested_again() -> None:
    """A kill is not under way then; routes and priorities come with the next turn."""

    def ask(act: Act) -> None:
        act.set_priority("vip", 5.0)
        act.set_priority("vip", 6.0, agent="patient")
        act.route(agent="patient", to="patient/1")
        act.route(agent="patient", session="vip", to="patient/0")
        act.kill("echo/0")

    store = FailingStore()
    agents = only("patient", "echo", min_instances=1, max_instances=2)
    async with deploy(agents, policies=(), period_s=60.0, store=store) as app:
        for name in agents:
            await app.act_async(lambda act, name=name: act.provision(name))
        await until(lambda: len(app.node.controllers) == 4)
        await app.act_async(lambda _: None)
        store.fails_to_push = True
        with pytest.raises(StoreError, match="away"):
            await app.act_async(ask)
        store.fails_to_push = False
        assert await app.act_async(lambda act: act.kill("echo/0")) == []
        assert "echo/0" not in app.node.controllers
        for location, controller in app.node.controllers.items():
            assert controller.queue.priorities == {"vip": 6.0 if location.startswith("patient") else 5.0}
        picked = [app.node.origin.router.pick(session, "patient") for session in ("other", "vip")]
        assert picked == ["patient/1", "patient/0"]


async def test_a_new_instance_knows_the_priorities_in_force() -> None:
    """A session's end ends them."""
    async with deploy(only("patient", max_instances=2), policies=(), period_s=0.005) as app:

        def ask(act: Act) -> None:
            act.set_priority("low", 1.0, agent="patient")
            act.set_priority("low", 2.0)
            act.set_priority("vip", 5.0)
            act.set_priority("vip", 6.0, agent="patient")
            act.set_priority("over", 1.0)
            act.set_priority("over", 2.0, agent="patient")
            act.provision("patient")

        assert await app.act_async(ask) == []
        await app.end_session_async("over")
        await until(lambda: "patient/1" in app.node.controllers)
        await until(lambda: app.node.controllers["patient/1"].queue.priorities == {"low": 2.0, "vip": 6.0})


async def test_a_report_that_comes_after_its_session_s_end_brings_no_order() -> None:
    """Its priority would stay for good, and be told each new instance."""
    store = MemoryStore()
    late = Summary("echo/0", "node-0", 1, (), 0.0, 0, 0.0, is_retiring=False, lines={"over": Line(1, 3, 0, 1.0)})
    async with deploy(only("echo"), policies=["srtf"], period_s=60.0, store=store) as app:
        await store.publish("node-0", [late])
        assert await app.act_async(lambda _: None) == []
        view = app.control.level.view
        assert (view.priorities, view.sessions, view.instances["echo/0"].waiting) == ({}, {}, {})


class HeldStore(MemoryStore):
    """Takes decisions, and answers when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed, self.gate = asyncio.Event(), asyncio.Event()

    async def push(self, node: str, decisions: Decisions) -> None:
        await super().push(node, decisions)
        self.pushed.set()
        await self.gate.wait()


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_an_order_that_comes_after_its_session_s_end_is_dropped(is_elsewhere: bool) -> None:
    """The next session of that name would have it. It can get the same one."""

    def ask(act: Act) -> None:
        for session in "st":
            act.set_priority(session, 5.0)
            act.route(agent="echo", session=session, to="echo/0")

    launcher, store = LocalLauncher(), HeldStore()
    agents = only("echo", min_instances=2)
    async with deploy(agents, policies=(), period_s=60.0, store=store, ray=launcher if is_elsewhere else "") as app:
        asked = asyncio.create_task(app.act_async(ask))
        await store.pushed.wait()
        await app.end_session_async("s")
        store.gate.set()
        assert await asked == []
        node = launcher.peers["echo/1"].host.node if is_elsewhere else app.node
        await until(lambda: node.controllers["echo/1"].queue.priorities)
        assert node.controllers["echo/1"].queue.priorities == {"t": 5.0}
        assert node.origin.router._session_routes == {("t", "echo"): "echo/0"}
        assert await app.act_async(ask) == []
        await until(lambda: node.controllers["echo/1"].queue.priorities == {"s": 5.0, "t": 5.0})


async def test_repeated_orders_interrupt_nothing() -> None:
    """An agent's own priority holds from the first moment, where it is lower, too."""

    def order(act: Act) -> None:
        act.set_priority("vip", 5.0)
        act.set_priority("vip", 1.0, agent="patient")
        act.set_priority("other", 2.0)

    async def main() -> Any:
        made = call("patient", "count", "x")
        await until(lambda: "x" in Patient.gates)
        waiting = asyncio.create_task(app.run_async(lambda: call("patient", "wait", "y").value(10), session="vip"))
        await until(lambda: app.node.controllers["patient/0"].queue.calls_count)
        await app.act_async(lambda act: act.provision("echo"))
        await until(lambda: "echo/1" in app.node.controllers)
        await app.act_async(lambda _: None)
        Patient.gates.setdefault("y", asyncio.Event()).set()
        Patient.gates["x"].set()
        await waiting
        return await made

    agents = only("patient") | only("echo", min_instances=1, max_instances=2)
    async with deploy(agents, policies=(), period_s=60.0) as app:
        await app.act_async(order)
        assert await app.run_async(main, session="other") == ("x", None)


async def test_an_order_for_all_agents_comes_after_an_agent_s_own_of_the_same_turn() -> None:
    async with deploy(only("patient"), policies=(), period_s=60.0) as app:

        def ask(act: Act) -> None:
            act.set_priority("s", 1.0, agent="patient")
            act.set_priority("s", 2.0)

        await app.act_async(lambda _: None)
        await app.act_async(ask)
        assert app.node.controllers["patient/0"].queue.priorities == {"s": 2.0}


async def test_an_instance_that_cannot_end_takes_calls_again() -> None:
    """Whoever asked for its end hears of that, though nothing happens there."""
    async with deploy(only("counter", min_instances=1, max_instances=2), policies=(), period_s=0.005) as app:
        view = app.control.level.view

        async def main() -> str:
            made = call("counter", "add", "s", 1)
            await made
            return str(made.metadata["executor"])

        home = await app.run_async(main, session="s")
        await app.act_async(lambda act: act.provision("counter"))
        await until(lambda: len(view.of("counter")) == 2 and view.instances[home].done_count == 1)
        assert await app.act_async(lambda act: act.kill(home)) == []
        await until(lambda: len(view.of("counter")) == 2)
        assert home in app.node.origin.router.instances["counter"]


def fail(*_: object) -> None:
    raise ValueError("not today")


async def test_policies_see_all_changes_whoever_has_a_turn(caplog: pytest.LogCaptureFixture) -> None:
    """A turn that was asked for takes no change from them, and one that fails, decision or policy, stops no other."""
    policies = [f"{__name__}:fail", "srtf"]
    async with deploy(only("patient"), policies=policies, period_s=60.0) as app:

        async def main() -> list[str]:
            made = [call("patient", "wait", name) for name in "cd"]
            await until(lambda: len(app.node.controllers["patient/0"].here) == 2)
            with pytest.raises(ValueError, match="not today"):
                await app.act_async(fail)
            assert app.control.level.view.priorities == {"s": 1.0}
            for name in "cd":
                Patient.gates[name].set()
            return [await each for each in made]

        Patient.gates.update(c=asyncio.Event(), d=asyncio.Event())
        assert await app.run_async(main, session="s") == ["c", "d"]
    assert caplog.text.count("a policy failed") == 1


def test_requests_do_not_hasten_the_look_for_deadlocks() -> None:
    """A call that waits for itself fails at the second look, and a look comes once a period."""

    async def main(app: Deployment) -> str:
        made = call("blocking", "ask_myself", "x")
        await until(lambda: app.node.controllers["blocking/0"].queue.count_of("s"))
        for _ in range(3):
            await app.act_async(lambda _: None)
        await asyncio.sleep(0.05)  # a failure of the inner call would have reached the outer one
        state: str = made.metadata["state"]
        return state

    with deploy(only("blocking"), policies=(), period_s=60.0) as app:
        assert app.run(main, app, session="s") == "running"


def test_a_driver_s_state_belongs_to_its_session() -> None:
    seen = managed_dict("seen")

    def main(key: str) -> dict[str, int]:
        seen[key] = seen.get(key, 0) + 1
        return dict(seen)

    with deploy(only("echo"), **CALM) as app:
        assert app.run(main, "a", session="s") == {"a": 1}
        assert app.run(main, "a", session="s") == {"a": 2}
        assert app.run(main, "a", session="t") == {"a": 1}
        assert app.run(main, "a") == {"a": 1}
    with pytest.raises(WorkflowError, match="needs a session"):
        seen["x"] = 1


def test_state_of_an_agent_that_is_not_managed_is_refused() -> None:
    agents = only("rememberer")

    def main() -> None:
        with pytest.raises(CallError) as caught:
            call("rememberer", "hear", "a").value(10)
        assert isinstance(caught.value.__cause__, StateError)

    app = deploy(agents, **CALM)
    app.agents = {"rememberer": app.agents["rememberer"].with_directives(managed=False)}
    with app:
        app.run(main)


def test_a_session_that_ends_fails_its_calls() -> None:
    async def main(app: Deployment) -> None:
        held = call("patient", "wait", "never")
        await app.end_session_async("s")
        with pytest.raises(SessionEndedError):
            await held

    with deploy(only("patient"), **CALM) as app:
        app.run(main, app, session="s")


# --- directives


def test_a_batch_is_one_run_of_calls_that_wait() -> None:
    async def main() -> list[Any]:
        return [future.value() for future in await settle_async([call("batcher", "double", n) for n in range(9)])]

    with deploy(only("batcher"), **CALM) as app:
        found = app.run(main)
    assert [value for value, _ in found] == [n * 2 for n in range(9)]
    assert [size for _, size in found] == [1, 4, 4, 4, 4, 4, 4, 4, 4]


def test_a_batch_that_gives_too_little_fails_all_its_calls() -> None:
    with deploy(only("batcher"), **CALM) as app, pytest.raises(CallError, match="as many values"):
        app.run(lambda: call("batcher", "short", 1).value(10))


@pytest.mark.parametrize("agent", ["patient", "stoppable"])
def test_a_call_of_higher_priority_interrupts(agent: str) -> None:
    """A coroutine is cancelled, a plain method is asked; each continues from its last state."""
    method = {"patient": "count", "stoppable": "work"}[agent]

    async def low() -> Any:
        return await call(agent, method, "long")

    async def high() -> Any:
        if agent == "patient":
            Patient.gates["short"] = asyncio.Event()
            Patient.gates["short"].set()
        return await call(agent, method, "short")

    async def both(app: Deployment) -> None:
        app.node.post(f"{agent}/0", _priorities({"vip": 5.0}))
        slow = asyncio.create_task(app.run_async(low, session="normal"))
        await until(lambda: app.node.instances[f"{agent}/0"]._has_begun)
        assert await app.run_async(high, session="vip") == ("short", None)
        assert await slow == ("long", "half" if agent == "patient" else 7)

    with deploy(only(agent), **CALM) as app:
        asyncio.run_coroutine_threadsafe(both(app), app._loop).result(20)


def test_a_call_that_is_interrupted_before_its_first_step_runs_all_the_same() -> None:
    async def main(app: Deployment) -> None:
        held = [call("patient", "count", f"{n}") for n in range(2)]
        app.node.retire("patient/0", ("patient/1",))
        for n in range(2):
            Patient.gates.setdefault(f"{n}", asyncio.Event()).set()
        assert [await each for each in held] == [("0", None), ("1", None)]

    with deploy(only("patient", min_instances=2), **CALM) as app:
        app.run(main, app)


async def test_a_call_that_is_through_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run again only because a thread still searches its value."""
    is_searched, gate = threading.Event(), threading.Event()

    def search(value: Any, *limit: float) -> bool | None:
        if not limit:
            is_searched.set()
            gate.wait(10)
        return holds_future(value, *limit)

    async def count(name: str) -> Any:
        Patient.gates.setdefault(name, asyncio.Event()).set()
        return await call("patient", "count", name)

    monkeypatch.setattr(instance, "SEARCHED_COUNT", 1)
    monkeypatch.setattr(instance, "holds_future", search)
    async with deploy(only("patient"), **CALM) as app:
        app.node.post("patient/0", _priorities({"vip": 5.0}))
        low = asyncio.create_task(app.run_async(count, "low", session="normal"))
        await until(is_searched.is_set)
        high = asyncio.create_task(app.run_async(count, "high", session="vip"))
        await until(lambda: app.node.controllers["patient/0"].queue.calls_count)
        gate.set()
        assert [await low, await high] == [("low", None), ("high", None)]


def _priorities(changes: dict[str, float]) -> Any:
    from thunderagent_workflows.core.messages import SetPriorities  # noqa: PLC0415

    return SetPriorities(changes)


def test_instances_come_and_go_as_they_are_asked_for() -> None:
    async def main(app: Deployment) -> None:
        held = [call("patient", "wait", f"{n}") for n in range(4)]
        assert await app.act_async(lambda act: act.provision("patient")) == []
        await until(lambda: "patient/1" in app.node.controllers)
        assert (await app.act_async(lambda act: act.provision("patient")))[0].startswith("provision patient")
        assert await app.act_async(lambda act: act.kill("patient/0")) == []
        for n in range(4):
            Patient.gates.setdefault(f"{n}", asyncio.Event()).set()
        assert [await each for each in held] == ["0", "1", "2", "3"]
        await until(lambda: "patient/0" not in app.node.controllers)
        refused = await app.act_async(lambda act: act.kill("patient/1"))
        assert refused == ["kill patient/1: patient keeps at least so many"]

    with deploy(only("patient", max_instances=2), **CALM) as app:
        app.run(main, app)


def test_an_agent_without_instances_gets_one_when_it_is_called() -> None:
    with deploy(only("echo", min_instances=0), **CALM) as app:
        assert app.node.controllers == {}
        assert app.run(lambda: call("echo", "say", 1).value(10)) == 1


# --- the end


def test_nothing_is_left_after_a_deployment() -> None:
    """No thread and no task is left, and open calls fail."""
    for thread in threading.enumerate():
        if thread.name.startswith("workflow-"):  # a thread of another test may still be at its last line
            thread.join(timeout=10)
    before = set(threading.enumerate())
    with deploy(AGENTS, **CALM) as app:
        left: list[Future] = []
        app.run(lambda: left.extend([call("patient", "wait", "x"), call("blocking", "say", 1)]), session="s")
        loop = app._loop
    assert set(threading.enumerate()) == before
    assert loop.is_closed()
    with pytest.raises(LostError) as caught:
        left[0].value(1)
    assert caught.value.path == ("patient/0",)


async def test_a_call_that_was_nowhere_yet_ends_with_the_deployment() -> None:
    """It was made and waits for an instance that did not come in time."""
    left: list[Future] = []
    async with deploy(only("echo", min_instances=0), policies=(), period_s=60.0) as app:
        await app.run_async(lambda: left.append(call("echo", "say", 1)), session="s")
    with pytest.raises(EndedError, match=r"echo.say was not through when the deployment ended") as caught:
        left[0].value(1)
    assert caught.value.path == ()


@pytest.mark.parametrize("agent", ["holder", "async_holder", "faulty"])
def test_an_agent_closes_whichever_way_it_goes(agent: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is killed, lost and replaced, or at the end; an error of its `close` is logged, and stops nothing."""

    async def main(app: Deployment) -> None:
        await until(lambda: len(app.control.level.view.of(agent)) == 3)
        assert await app.act_async(lambda act: act.kill(f"{agent}/0")) == []
        await until(lambda: len(Holder.closed) == 1)
        app.lose(f"{agent}/1")
        await until(lambda: len(Holder.closed) == 2 and f"{agent}/3" in app.node.controllers)

    with deploy(only(agent, min_instances=2, max_instances=3), **CALM) as app:
        app.act(lambda act: act.provision(agent))
        app.run(main, app)
        assert len(Holder.closed) == 2
    assert len(Holder.closed) == 4
    assert ("its close() failed" in caplog.text) == (agent == "faulty")


def test_an_agent_closes_when_what_it_runs_is_over() -> None:
    """A plain method cannot be stopped; a declared `close` is a method like others, and not called at the end."""
    with deploy(only("holder", "door"), **CALM) as app:
        app.run(lambda: [call("holder", "hold", "h"), None][1], session="s")
        app.run(lambda: call("door", "close").value(10))
        assert Holder.closed == ["called"]
        threading.Timer(0.05, Holder.gates.setdefault("h", threading.Event()).set).start()
    assert Holder.closed == ["called", "plain"]


async def test_no_task_is_left_on_the_loop_of_others() -> None:
    before = asyncio.all_tasks()
    async with deploy(AGENTS, **CALM) as app:
        await app.run_async(lambda: call("echo", "say", 1).value())
        assert len(asyncio.all_tasks()) > len(before)
    assert asyncio.all_tasks() == before


async def test_calls_that_are_over_are_forgotten() -> None:
    async def main() -> None:
        for number in range(20):
            await call("echo", "say", [call("echo", "say", number)])

    async with deploy(only("echo"), **CALM) as app:
        await app.run_async(main)
        assert app.node.origin.records == {}
        gc.collect()
        assert sum(isinstance(each, Future) for each in gc.get_objects() if type(each) is Future) == 0
        assert app.node.waiting == {}
