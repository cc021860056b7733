"""The client SDK against a running proxy, with the real openai client: each block is a program, and is released."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.support import (
    DEADLINE_S,
    FakeReplica,
    Gate,
    RunningProxy,
    answers,
    cap,
    fake_replica,
    running_proxy,
    until,
)
from tests.integration.test_sandboxes import elsewhere, proxy_with_sandboxes, until_gone
from thunderagent.client import (
    Branch,
    Program,
    ProxyRefusedError,
    SandboxFailedError,
    as_program,
    current_program,
    program,
)
from thunderagent.programs.messages import ProgramReleased
from thunderagent.proxy.gate.keys import mint_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MESSAGES: Any = [{"role": "user", "content": "hello there"}]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"


@pytest.fixture
async def proxy(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningProxy]:
    """Run a proxy that the environment names, as it would on an agent's machine."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with running_proxy(replica.url) as proxy:
        monkeypatch.setenv("THUNDERAGENT_PROXY", proxy.url)
        yield proxy


def live(proxy: RunningProxy) -> list[str]:
    return [program.program_id for program in proxy.runtime.scheduler.programs.values()]


def say(where: Branch, **more: Any) -> Any:
    """Make one turn."""
    with where.openai(max_retries=0) as client:
        return client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=4, **more)


async def async_say(where: Branch, **more: Any) -> Any:
    async with where.async_openai(max_retries=0) as client:
        return await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=4, **more)


IDS = ["task-7", "team/7", "a task", "tâche 七", "a%2Fb", "v1", "x/v1", "a/../b", "?#&", "x" * 256]


async def test_a_block_is_a_program(proxy: RunningProxy) -> None:
    """Any id works, sync and async: its turns are its own, and the proxy forgets the program afterwards."""

    def agent(program_id: str, http_client: Any) -> None:
        with program(program_id) as p:
            client = p.openai(http_client=http_client, max_retries=0)
            client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=4)
            assert live(proxy) == [program_id]

    with openai.DefaultHttpxClient() as http_client:
        for program_id in IDS:
            await asyncio.to_thread(agent, program_id, http_client)
            assert live(proxy) == []
    async with openai.DefaultAsyncHttpxClient() as async_http_client:
        for program_id in IDS:
            async with program(program_id) as p:
                client = p.async_openai(http_client=async_http_client, max_retries=0)
                for _ in range(2):
                    await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=4)
                (known,) = proxy.runtime.scheduler.programs.values()
                assert (known.program_id, known.turn_count) == (program_id, 2)
            assert live(proxy) == []


async def test_error_and_cancellation_release_too(replica: FakeReplica, proxy: RunningProxy) -> None:
    replica.behaviour = answers(status="404 Not Found")
    with pytest.raises(openai.NotFoundError):
        async with program() as p, p.async_openai(max_retries=0) as client:
            await client.chat.completions.create(model="other", messages=MESSAGES)
    assert len(replica.calls) == 1
    assert live(proxy) == []
    replica.behaviour = answers()

    acting = asyncio.Event()

    async def agent() -> None:
        async with program() as p:
            await async_say(p)
            acting.set()
            await asyncio.sleep(DEADLINE_S)

    task = asyncio.create_task(agent())
    await acting.wait()
    assert len(live(proxy)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert live(proxy) == []


async def test_a_program_that_is_cancelled_in_a_turn_leaves_nothing() -> None:
    """It is cancelled in flight or while held; the next program continues."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **cap(1)) as proxy:

        async def agent(program_id: str) -> None:
            async with program(program_id, proxy=proxy.url) as p:
                await async_say(p)

        in_flight = asyncio.create_task(agent("in-flight"))
        await replica.call()
        held = [asyncio.create_task(agent(f"held-{number}")) for number in range(2)]
        await until(lambda: proxy.runtime.held_count == 2)
        held[0].cancel()
        await asyncio.wait([held[0]])
        assert "held-0" not in live(proxy)
        replica.behaviour = answers()
        in_flight.cancel()
        await asyncio.wait_for(held[1], DEADLINE_S)
        assert live(proxy) == []
        assert replica.calls[0].left.is_set()


async def test_programs_nest_within_a_program(proxy: RunningProxy) -> None:
    """Each has its own turns; the inner ones end first."""
    async with program("outer") as outer:
        await async_say(outer)

        async def inner(program_id: str) -> None:
            async with program(program_id) as p:
                assert p.parent is outer
                await async_say(p)
                assert {"outer", program_id} <= set(live(proxy))

        await asyncio.gather(inner("a"), inner("b"))
        assert live(proxy) == ["outer"]
        assert current_program() is outer
    assert live(proxy) == []


async def test_decorated_functions_run_as_programs(proxy: RunningProxy) -> None:
    seen = []

    def turn_of_current() -> Program:
        p = current_program()
        assert p is not None
        seen.append(p.program_id)
        return p

    @as_program(program_id="task/{}".format)
    def agent(number: int) -> None:
        say(turn_of_current())
        assert f"task/{number}" in live(proxy)

    @as_program
    async def async_agent() -> None:
        await async_say(turn_of_current())
        assert seen[-1] in live(proxy)

    await asyncio.to_thread(agent, 1)
    await async_agent()
    assert seen[0] == "task/1"
    assert live(proxy) == []


async def test_helpers_send_their_headers(proxy: RunningProxy) -> None:
    """Group and branch reach the scheduler; the other forms name the same program."""
    async with program("task", group="prompt-3") as p:
        assert set(proxy.runtime.scheduler.book.groups) == {("", "prompt-3")}, (
            "for agents that are given a base URL alone"
        )
        await async_say(p)
        await async_say(p.branch("helper"))
        (known,) = proxy.runtime.scheduler.programs.values()
        assert set(known.branches) == {"", "helper"}
        async with openai.AsyncOpenAI(base_url=f"{p.proxy}/v1", api_key="none") as plain:
            turn: Any = {"model": "simulated", "messages": MESSAGES, "max_tokens": 4}
            await plain.chat.completions.create(**turn, extra_headers=p.headers)
            await plain.chat.completions.create(**turn, extra_body=p.extra_body)
        assert live(proxy) == ["task"]
        assert known.turn_count == 4


CHILD = """
import openai
turn = openai.OpenAI().chat.completions.create(
    model="simulated", messages=[{"role": "user", "content": "hello"}], max_tokens=4
)
print(turn.usage.completion_tokens)
"""


async def test_a_child_process_runs_as_the_program(proxy: RunningProxy) -> None:
    """It does not know the SDK: the openai client reads the environment."""
    async with program("père/1") as p:
        environment = {"OPENAI_API_KEY": "none", **os.environ, **p.environment}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, stdout=PIPE, stderr=PIPE, env=environment
        )
        out, err = await child.communicate()
        assert (out, err) == (b"3\n", b"")
        (known,) = proxy.runtime.scheduler.programs.values()
        assert (known.program_id, known.turn_count) == ("père/1", 1)
    assert live(proxy) == []


async def test_the_key_of_the_environment_is_enough(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent with turns, by a child process too, as with the release."""
    key, line = mint_key("me")
    async with running_proxy(replica.url, api_keys=(line,)) as proxy:
        monkeypatch.setenv("THUNDERAGENT_PROXY", proxy.url)
        monkeypatch.setenv("THUNDERAGENT_KEY", key)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        async with program("task") as p, p.async_openai() as client:
            await client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=4)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, stdout=PIPE, stderr=PIPE, env=os.environ | p.environment
            )
            assert await child.communicate() == (b"3\n", b"")
            (known,) = proxy.runtime.scheduler.programs.values()
            assert known.turn_count == 2
        assert live(proxy) == []


# --- sandboxes


async def test_sandboxes_are_there_and_go_with_the_program() -> None:
    async with proxy_with_sandboxes() as (proxy, service):

        def agent() -> str | None:
            with program("a/b", proxy=proxy.url, program_class="coder") as p:
                return p.wait_for_sandbox("coder")["address"]

        assert await asyncio.to_thread(agent) == "10.1.1.1"
        await until_gone(service)
        async with program("a/b", proxy=proxy.url, sandboxes=["plain", {"template": "coder"}]) as p:
            assert len(await p.async_sandboxes()) == 2
            usable = await p.async_wait_for_sandbox()
            assert usable["program_ids"] == ["a/b"]
            assert usable["address"] == "10.1.1.1"
        await until_gone(service)


async def test_a_sandbox_that_cannot_be_made_is_said_to_be() -> None:
    async with proxy_with_sandboxes() as (proxy, service):
        service.refusal = 404
        async with program(proxy=proxy.url, sandboxes=["plain"]) as p:
            with pytest.raises(SandboxFailedError, match="the sandbox service refused"):
                await p.async_wait_for_sandbox()


async def test_sandboxes_that_are_off_are_a_refusal(proxy: RunningProxy) -> None:
    with pytest.raises(ProxyRefusedError, match="sandboxes are off"):
        async with program(sandboxes=["plain"]):
            pytest.fail("unreachable")
    assert live(proxy) == []


# --- the page


async def test_the_examples_of_the_page_run(
    engine_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They run unchanged; an engine serves the turns, and every program is released with its sandbox."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    async with elsewhere() as service:
        templates = {"coder": service.template()}
        async with running_proxy(engine_url, sandboxes=("callback",), sandbox_templates=templates) as proxy:
            monkeypatch.setenv("THUNDERAGENT_PROXY", proxy.url)
            released: list[ProgramReleased] = []
            proxy.runtime.observe(
                lambda event, _: released.append(event) if isinstance(event, ProgramReleased) else None
            )
            for example in examples:
                await asyncio.to_thread(exec, example, {"__name__": "__main__"})
                assert live(proxy) == []
            assert len(released) == 1 + 2 + 1 + 2 + 1 + 1
            assert proxy.runtime.outcome_counts == {"finished": 1 + 2 + 1 + 2 + 1}
            assert len(service.prepared) == 1
            await until_gone(service)
