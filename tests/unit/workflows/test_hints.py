"""A deployment's hints about its sessions' next turns: learned times, confidence, and ended branches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.client.support import FakeProxy, fake_proxy
from tests.unit.workflows.elsewhere import LocalLauncher
from thunderagent_workflows import LostError, deploy, settle_async, stubs
from thunderagent_workflows.hints import Hints
from thunderagent_workflows.llm import turn_headers

CALM: dict[str, Any] = {"policies": (), "period_s": 0.01}
TOOL_S = [5.0]
NOW_S = [1000.0]


class Thinker:
    """Makes a turn, waits for a tool, and makes another turn."""

    async def work(self) -> str:
        turn_headers()
        await stubs.call("tool", "run", ())
        return turn_headers()["X-Program-Branch"]


class Tool:
    """Takes as long as the test says, on the test's clock."""

    async def run(self) -> None:
        NOW_S[0] += TOOL_S[0]


AGENTS: dict[str, Any] = {
    "thinker": {"class": f"{__name__}:Thinker", "methods": {"work": {}}},
    "pinned": {"class": f"{__name__}:Thinker", "methods": {"work": {}}, "stateful": True},
    "tool": {"class": f"{__name__}:Tool", "methods": {"run": {}}},
}


@pytest.fixture(autouse=True)
def _clock() -> None:
    TOOL_S[0], NOW_S[0] = 5.0, 1000.0


async def said_by(agent: str, times_s: list[float]) -> list[dict[str, Any]]:
    """Make an agent work a number of times, with given tool times; return the hints."""
    said: list[dict[str, Any]] = []

    async def main() -> list[str]:
        branches = []
        for TOOL_S[0] in times_s:
            branches.append(await stubs.call(agent, "work", ()))
        return branches

    async with deploy(AGENTS, clock=lambda: NOW_S[0]) as app:
        app.node.hints = Hints(app.node, lambda session, what: said.append({"session": session, **what}))
        await app.run_async(main, session="s")
    return said


async def test_tool_is_expected_to_take_what_it_took_before() -> None:
    """There is no hint for unseen tools; later hints give the time until the next turn, and the confidence."""
    said = await said_by("thinker", [5.0] * 8)
    hints = [each for each in said if "next_turn_in_s" in each]
    assert {each["session"] for each in hints} == {"s"}
    assert [each["next_turn_in_s"] for each in hints] == [pytest.approx(5.0)] * len(hints)
    assert len(hints) >= 6
    sure = [each["confidence"] for each in hints]
    assert sure == sorted(sure)
    assert sure[-1] > sure[0] >= 0.5


async def test_inaccurate_estimator_says_nothing() -> None:
    """Such a tool takes no time like any before."""
    said = await said_by("thinker", [1.0, 60.0] * 12)
    hints = [each for each in said if "next_turn_in_s" in each]
    assert len(hints) < 6


async def test_a_branch_ends_with_its_call() -> None:
    """The branch of a pinned agent continues."""
    drops = [each for each in await said_by("thinker", [1.0] * 3) if each.get("keep") == "drop"]
    assert len({each["branch"] for each in drops}) == 3
    assert all(each["branch"].startswith("thinker/") for each in drops)
    assert not [each for each in await said_by("pinned", [1.0] * 3) if each.get("keep")]


async def test_instances_elsewhere_say_it_through_the_driver_s_node() -> None:
    """The branch's node reports its end; the waiter reports the next turn's time, from earlier calls."""

    async def main() -> None:
        for _ in range(8):
            await stubs.call("thinker", "work", ())

    def said(proxy: FakeProxy) -> list[dict[str, Any]]:
        return [body for _, path, body in proxy.requests if path == "/programs/s/hints"]

    with fake_proxy() as proxy:
        async with deploy(AGENTS, proxy=proxy.url, hints=True, ray=LocalLauncher(), **CALM) as app:
            assert app.node.controllers == {}
            await app.run_async(main, session="s")
            async with asyncio.timeout(10):
                while len({each["branch"] for each in said(proxy) if "branch" in each}) < 8:
                    await asyncio.sleep(0.01)
            assert app.node.hints is not None
            (by,) = app.node.hints._times.values()
    assert sum("branch" in each for each in said(proxy)) == 8
    hints = [each for each in said(proxy) if "next_turn_in_s" in each]
    assert all(0.0 <= each["next_turn_in_s"] < 10.0 for each in hints)
    assert hints[-1]["confidence"] > 0.5
    assert (by.count > 5, by.turns_ratio) == (True, 1.0), "the driver's node knows of turns that were made elsewhere"


async def test_a_branch_that_was_lost_has_ended() -> None:
    """Its instance can no longer report that."""
    said: list[dict[str, Any]] = []

    async def main(app: Any) -> None:
        await stubs.call("thinker", "work", ())
        lost = stubs.call("thinker", "work", ())
        app.node.lose("thinker/0")
        with pytest.raises(LostError):
            await lost

    async with deploy(AGENTS, clock=lambda: NOW_S[0], **CALM) as app:
        app.node.hints = Hints(app.node, lambda _, what: said.append(what))
        await app.run_async(main, app, session="s")
    assert len({each["branch"] for each in said if each.get("keep") == "drop"}) == 2


async def test_the_proxy_is_told() -> None:
    """Hints go in order, each for its session; a refused one stops nothing."""

    async def main() -> None:
        for _ in range(4):
            await settle_async([stubs.call("thinker", "work", ())])

    with fake_proxy() as proxy:
        proxy.answer("/programs/s%2F1/hints", (500, {}), (200, {"known": True}))
        async with deploy(AGENTS, clock=lambda: NOW_S[0], proxy=proxy.url, hints=True) as app:
            await app.run_async(main, session="s/1")
            await until_told(proxy, 6)
            await app.end_session_async("s/1")
    bodies = [body for _, path, body in proxy.requests if path == "/programs/s%2F1/hints"]
    assert {"drop"} == {body["keep"] for body in bodies if "keep" in body}
    assert any("next_turn_in_s" in body for body in bodies)


async def until_told(proxy: FakeProxy, count: int) -> None:
    async with asyncio.timeout(10):
        while len(proxy.requests) < count:
            await asyncio.sleep(0.01)
