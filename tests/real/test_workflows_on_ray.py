"""Workflows on a Ray cluster of two nodes on this machine: calls, state, moves, and the loss of a node."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.processes import thunderagent
from scripts.docs_site import whole
from tests.real.ray_cluster import MEMORY_BYTES, two_nodes
from thunderagent_workflows import CallError, Deployment, LostError, deploy, stubs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.ray_cluster import TwoNodes

DOCS = Path(__file__).parents[2] / "docs/how-to/workflows.md"
HERE = "tests.real.ray_agents"
AGENTS: dict[str, Any] = {
    "worker": {
        "class": f"{HERE}:Worker",
        "methods": {"where": {}, "gate": {"fifo": "str"}, "fail": {"text": "str"}},
        "min_instances": 3,
        "resources": {"cpu": 1},
    },
    "asker": {"class": f"{HERE}:Asker", "methods": {"ask": {"text": "str"}}},
    "keeper": {
        "class": f"{HERE}:Keeper",
        "methods": {"hear": {"text": "str"}},
        "min_instances": 2,
        "resources": {"memory": MEMORY_BYTES // 2 + 1},
    },
}
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tutorial's files, for this process and those of Ray."""
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="module")
def nodes(code: Path) -> Iterator[TwoNodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: test_workflows_ray.py runs this with it")
    with two_nodes(str(code)) as nodes:
        yield nodes


def call(agent: str, method: str, *args: Any) -> Any:
    return stubs.call(agent, method, args)


async def until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def places(app: Deployment, agent: str) -> dict[str, str]:
    """Return the nodes of an agent's instances by location."""
    return {each.location: each.node for each in app.control.level.view.of(agent)}


async def test_tutorial_runs_on_both_nodes(nodes: TwoNodes, code: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The documentation's workflow runs unchanged except for `ray=`; its turns use the proxy, under its session."""
    text = whole(DOCS.read_text())
    monkeypatch.chdir(code)
    monkeypatch.syspath_prepend(str(code))
    log_path = tmp_path / "proxy.log"
    serve = ("serve", "--port", "0", "--embedded-kv-tokens", "4000")
    async with thunderagent(*serve, log_path=log_path) as proxy, httpx2.AsyncClient(timeout=60) as client:
        for name, content in re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", text, re.DOTALL):
            at_proxy = content.replace("http://127.0.0.1:8300", proxy.url)
            (code / name).write_text(at_proxy.replace("async_http_client()", f"async_http_client({proxy.url!r})"))
        stubbed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "thunderagent", "workflow", "stubs", "agents.yaml")
        )
        assert await stubbed.wait() == 0
        import main  # type: ignore[import-not-found]  # noqa: PLC0415 - the tutorial's

        for agent in ("planner", "developer", "tester"):
            stubs.configure(agent, resources={"cpu": 1})
        try:
            async with deploy("agents.yaml", proxy=proxy.url, ray=nodes.address) as app:
                parts = await app.run_async(main.main, "Enable OAuth login", session="user-7")
                assert parts == [f"Enable OAuth login, part {n}" for n in range(3)]
                await until(lambda: len(app.control.level.view.instances) == 4)
                where = places(app, "planner") | places(app, "developer") | places(app, "tester")
                assert sorted([*where.values()].count(each) for each in {*where.values()}) == [2, 2]
                program = await client.get(f"{proxy.url}/programs/user-7")
                assert program.json()["status"] == "active", "agents' turns bear the session's name"
                app.write_timeline("user-7", tmp_path / "timeline.html")
            released = await client.get(f"{proxy.url}/programs/user-7")
            assert released.status_code == 404 or released.json()["status"] == "terminated"
        finally:
            stubs.GIVEN_DIRECTIVES.clear()


async def test_a_node_is_lost_in_mid_run(nodes: TwoNodes, tmp_path: Path) -> None:
    """Calls there fail with their path; the rest continues; Ray places the replacements."""
    threads, tasks = threading.active_count(), asyncio.all_tasks()
    async with deploy(AGENTS, policies=(), ray=nodes.address) as app:
        await app.run_async(_lose_a_node, app, nodes, tmp_path, session="s")
        await app.run_async(_find_the_others, app, nodes)
    assert asyncio.all_tasks() == tasks
    assert threading.active_count() <= threads + 1  # Ray leaves none of our processes, and at most one of its own


async def _lose_a_node(app: Deployment, nodes: TwoNodes, tmp_path: Path) -> None:
    await until(lambda: len(app.control.level.view.instances) == 6)
    where = places(app, "worker")
    second = nodes.second.node_id
    lost = {location for location, place in where.items() if place == second}
    assert 0 < len(lost) < 3, where
    with pytest.raises(CallError) as caught:
        await call("asker", "ask", "why")
    assert caught.value.__cause__.path[0] == "asker/0"
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    assert "raise KeyError(text)" in str(caught.value)

    keepers = places(app, "keeper")
    (home,) = (location for location, place in keepers.items() if place == second)
    (near,) = (location for location, place in keepers.items() if place != second)
    assert await call("keeper", "hear", "a") == ["a"]
    for to in (near, home) if app.session_log("s").log[-1][4] == home else (home, near, home):
        await _move(app, "s", app.session_log("s").log[-1][4], to)
        said = await call("keeper", "hear", "b")
        assert app.session_log("s").log[-1][4] == to
    assert said == ["a", *"b" * (len(said) - 1)]

    fifos = [tmp_path / f"fifo-{n}" for n in range(3)]
    for fifo in fifos:
        os.mkfifo(fifo)
    futures = [call("worker", "gate", str(fifo)) for fifo in fifos]
    assert {future.metadata["executor"] for future in futures} == set(where)
    await until(lambda: all(each.running for each in app.control.level.view.of("worker")))
    nodes.remove()
    for future, fifo in zip(futures, fifos, strict=True):
        location = future.metadata["executor"]
        if location in lost:
            with pytest.raises(LostError) as missed:
                await future
            error = missed.value
            assert (error.path, error.agent, error.instance) == ((location,), "worker", location)
            assert "actor" in error.remote_traceback.lower(), error.remote_traceback
        else:
            fifo.write_text("go on")
            assert await future == "go on"
    await until(lambda: app.hub is not None and not lost & app.hub.locations())
    await until(lambda: app.hub is not None and home not in app.hub.locations())
    with pytest.raises(LostError, match=f"the state of session 's' was at {home}, which is gone"):
        await call("keeper", "hear", "c")


async def _move(app: Deployment, session: str, home: str, to: str) -> None:
    """Move a session to the other node."""
    assert await app.act_async(lambda act: act.migrate(session, home, to)) == []
    directory = app.node._machines["directory"]
    await until(lambda: directory.homes[session, "keeper"].location == to)


async def _find_the_others(app: Deployment, nodes: TwoNodes) -> None:
    """Calls run on the remaining node; with room again, all wanted instances exist again."""
    alone = nodes.cluster.head_node.node_id
    assert {(await call("worker", "where"))[0] for _ in range(4)} == {alone}
    assert await call("keeper", "hear", "x") == ["x"]
    nodes.add()  # Ray needs the main thread for it
    wanted = {alone, nodes.second.node_id}
    await until(lambda: len(places(app, "worker")) == 3 and set(places(app, "worker").values()) == wanted)


async def test_a_process_that_is_killed_is_lost_alone(nodes: TwoNodes) -> None:
    async def main(app: Deployment) -> None:
        _, pid = await call("worker", "where")
        held = call("worker", "gate", "/nowhere/at/all")
        with pytest.raises(CallError, match="FileNotFoundError"):
            await held
        os.kill(pid, signal.SIGKILL)
        await until(lambda: app.hub is not None and "worker/0" not in app.hub.locations())
        assert (await call("worker", "where"))[1] != pid

    async with deploy({"worker": {**AGENTS["worker"], "min_instances": 1}}, policies=(), ray=nodes.address) as app:
        await app.run_async(main, app)
