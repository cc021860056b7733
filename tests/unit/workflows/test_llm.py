"""Turns name their program: the headers of requests to the proxy, which no other request gets."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest

from tests.unit.workflows.agents import AGENTS
from thunderagent_workflows import WorkflowError, deploy, stubs
from thunderagent_workflows.llm import ProgramHook, base_url

PROXY = "http://127.0.0.1:8300"


def headers_of(url: str) -> dict[str, str]:
    """Send a request through the hook, without a network, and return its headers that name a program."""
    answers = httpx2.MockTransport(lambda request: httpx2.Response(200, json=dict(request.headers)))
    with httpx2.Client(transport=answers, event_hooks={"request": [ProgramHook(PROXY)]}) as client:
        found = client.get(url).json()
    return {name: value for name, value in found.items() if name.startswith("x-program")}


class Asker:
    """Makes turns."""

    def ask(self, text: str) -> dict[str, str]:
        return headers_of(f"{PROXY}/v1/chat/completions") | {"text": text}

    async def ask_async(self, text: str) -> dict[str, str]:
        answers = httpx2.MockTransport(lambda request: httpx2.Response(200, json=dict(request.headers)))
        hooks = {"request": [ProgramHook(PROXY).async_call]}
        async with httpx2.AsyncClient(transport=answers, event_hooks=hooks) as client:
            found = (await client.get(f"{PROXY}/v1/{text}")).json()
        return {name: value for name, value in found.items() if name.startswith("x-program")}

    def nested(self, text: str) -> Any:
        return APP[0].run(lambda: headers_of(f"{PROXY}/v1/{text}"))


class Mixer:
    """Makes turns for several sessions at once."""

    gate = threading.Event()

    def ask(self, text: list[str]) -> list[dict[str, str]]:
        if text == ["wait"]:
            self.gate.wait(10)
        return [headers_of(f"{PROXY}/v1") | {"url": base_url(PROXY)}] * len(text)


APP: list[Any] = []
ASK = {"ask": {"text": "str"}, "ask_async": {"text": "str"}, "nested": {"text": "str"}}
AGENTS_HERE = {
    "asker": {"class": f"{__name__}:Asker", "methods": ASK},
    "pinned": {"class": f"{__name__}:Asker", "methods": ASK, "stateful": True},
    "mixer": {
        "class": f"{__name__}:Mixer",
        "methods": {"ask": {"text": "str"}},
        "batchable": True,
        "mix_sessions": True,
    },
}


def ask(agent: str, method: str = "ask") -> Any:
    return stubs.call(agent, method, ("x",)).value(10)


def test_a_turn_names_program_and_branch() -> None:
    def main() -> None:
        assert headers_of(f"{PROXY}/v1") == {"x-program-id": "s"}
        assert ask("asker") == {"x-program-id": "s", "x-program-branch": "asker/1", "text": "x"}
        assert ask("asker", "ask_async") == {"x-program-id": "s", "x-program-branch": "asker/2"}
        for _ in range(2):
            assert ask("pinned")["x-program-branch"] == "pinned"
        assert base_url(PROXY) == f"{PROXY}/p/s/v1"

    with deploy(AGENTS_HERE, policies=()) as app:
        app.run(main, session="s")


def test_others_are_told_nothing() -> None:
    def main() -> None:
        for url in ("http://example.org/v1", "http://127.0.0.1:8301/v1", "https://127.0.0.1:8300/v1"):
            assert headers_of(url) == {}

    assert headers_of(f"{PROXY}/v1") == {}
    with pytest.raises(WorkflowError):
        base_url()
    with deploy(AGENTS_HERE, policies=()) as app:
        app.run(main, session="s")


def test_a_workflow_within_a_workflow_is_a_program_with_a_parent() -> None:
    with deploy(AGENTS_HERE, policies=()) as app:
        APP[:] = [app]
        found = app.run(lambda: ask("asker", "nested"), session="outer")
    assert found["x-program-parent"] == "outer"
    assert found["x-program-group"] == "outer/1"
    assert found["x-program-id"].startswith("session-")


def test_a_batch_of_several_sessions_is_anonymous() -> None:
    def first() -> Any:
        held = stubs.call("mixer", "ask", ("wait",))
        mine = stubs.call("mixer", "ask", ("a",))
        other = app.run(lambda: [stubs.call("mixer", "ask", ("b",))], session="t")[0]
        Mixer.gate.set()
        return held.value(10), mine.value(10), other.value(10)

    with deploy(AGENTS_HERE, policies=()) as app:
        alone, mine, other = app.run(first, session="s")
    assert (alone["x-program-id"], alone["url"]) == ("s", f"{PROXY}/p/s/v1")
    assert mine == other == {"url": f"{PROXY}/v1"}


def test_a_session_has_a_name_that_a_header_can_bear() -> None:
    with deploy({"echo": AGENTS["echo"]}, policies=()) as app:
        for name in ("tâche", "a\nb", " a", "x" * 257):
            with pytest.raises(WorkflowError, match="printable ASCII"):
                app.run(lambda: None, session=name)
