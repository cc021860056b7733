"""What people use: the openai client, and the command line against a running proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Gate,
    answers,
    ask,
    cap,
    chunk,
    fake_replica,
    get,
    post,
    running_proxy,
    stream_head,
    turn,
    until,
    word,
    writes,
)
from thunderagent.cli import main

if TYPE_CHECKING:
    from tests.integration.support import Call, RunningProxy

MESSAGES: Any = [{"role": "user", "content": "hello there"}]


def programs_of(proxy: RunningProxy) -> list[str]:
    return [program.program_id for program in proxy.runtime.scheduler.programs.values()]


async def test_the_async_openai_client_names_its_program_in_the_body(engine_url: str) -> None:
    """`extra_body={"program_id": ...}`, whole and streamed, with and without usage."""
    async with (
        running_proxy(engine_url) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in (await client.models.list()).data] == ["simulated"]
        extra: Any = {"program_id": "by-body"}
        whole = await client.chat.completions.create(
            model="simulated", messages=MESSAGES, max_tokens=8, extra_body=extra
        )
        assert whole.usage is not None
        for options in (None, {"include_usage": True}):
            text, usage = "", None
            arguments: Any = {} if options is None else {"stream_options": options}
            stream = await client.chat.completions.create(
                model="simulated", messages=MESSAGES, max_tokens=8, stream=True, extra_body=extra, **arguments
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            assert text == whole.choices[0].message.content
            assert (usage is not None) == (options is not None)
        assert programs_of(proxy) == ["by-body"]
        program = proxy.runtime.scheduler.programs.get("by-body")
        assert program is not None
        assert program.prompt_tokens_total == 3 * whole.usage.prompt_tokens


async def test_the_openai_client_names_its_program_in_the_base_url(engine_url: str) -> None:
    """`/p/{id}/v1`, from threads, whole and streamed, on both endpoints."""
    async with running_proxy(engine_url) as proxy:

        def talk() -> None:
            with openai.OpenAI(base_url=f"{proxy.url}/p/team/7/v1", api_key="none", max_retries=0) as client:
                whole = client.chat.completions.create(model="simulated", messages=MESSAGES, max_tokens=8)
                with client.chat.completions.create(
                    model="simulated", messages=MESSAGES, max_tokens=8, stream=True
                ) as stream:
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                assert text == whole.choices[0].message.content
                completion = client.completions.create(model="simulated", prompt="a b c", max_tokens=4)
                assert completion.usage is not None
                assert completion.usage.completion_tokens == 4

        await asyncio.to_thread(talk)
        assert programs_of(proxy) == ["team/7"]


async def test_the_openai_client_understands_our_errors(engine_url: str) -> None:
    """Status, code and message arrive as the client's own exceptions."""
    async with (
        running_proxy(engine_url) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="at most 256 bytes") as caught:
            await client.chat.completions.create(
                model="simulated", messages=MESSAGES, extra_body={"program_id": "x" * 300}
            )
        assert caught.value.code == "invalid_program_id"
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            await client.chat.completions.create(model="other", messages=MESSAGES)


async def test_a_broken_stream_is_an_error_for_the_openai_client() -> None:
    """The client gets an error, not a shorter answer."""
    async with (
        fake_replica(writes(stream_head(), chunk(word("one")))) as replica,
        running_proxy(replica.url) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="simulated", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="closed the connection"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("header", ["X-Program-Parent", "X-Dynamo-Parent-Session-ID", "X-Parent-Session-Id"])
async def test_parents_that_fill_the_memory_do_not_wait_for_their_own_sub_agents(header: str) -> None:
    """Each goes on after a child that its client names in this header and never releases."""
    parents = ["parent-0", "parent-1", "parent-2"]
    async with fake_replica() as replica, running_proxy(replica.url, **cap(len(parents))) as proxy:

        async def turns(names: list[str], *of_whom: tuple[str, str]) -> None:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(post(proxy.url, CHAT, turn(), ("X-Session-Id", name), *of_whom)) for name in names
                ]
            assert [each.result().status for each in asked] == [200] * len(names)

        await turns(parents)
        for parent in parents:
            await turns([f"child of {parent}"], (header, parent))
        await turns(parents)
        assert programs_of(proxy) == parents


async def test_programs_share_a_prefix_behind_a_block_that_engines_leave_out() -> None:
    """Claude Code's first block differs with each task, its tools and its prompt do not."""

    async def counts(call: Call) -> None:
        usage = {"prompt_tokens": len(call.body) // 4, "completion_tokens": 1, "total_tokens": len(call.body) // 4 + 1}
        await answers({"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}], "usage": usage})(
            call
        )

    async def shared_tokens(*marks: str) -> int:
        async with fake_replica(counts) as replica, running_proxy(replica.url) as proxy:
            for number, mark in enumerate(marks):
                system = f"x-anthropic-billing-header: cc_version=2.1.{mark};", "You are an agent. " * 1000
                body = turn(
                    system=[{"type": "text", "text": text} for text in system],
                    tools=[{"name": "tool", "description": "does this " * 1000, "input_schema": {}}],
                    content=f"task {number}",
                )
                assert (await post(proxy.url, f"/p/{number}{CHAT}", body)).status == 200
            (known,) = (await get(proxy.url, "/replicas")).json()["replicas"]
            return int(known["shared_tokens"])

    alike = await shared_tokens("a", "a", "a")
    assert alike > 2 * 5000
    assert await shared_tokens("a", "b", "c") == alike


async def test_nat_does_not_forget_a_turn_that_is_held_or_in_flight() -> None:
    """The kernel probes both its connections within a minute."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **cap(1)) as proxy:
        turns = [asyncio.create_task(ask(proxy.url, name)) for name in ("in flight", "held")]
        await until(lambda: replica.calls and proxy.runtime.held_count == 1)
        port, engine_port = (int(url.rpartition(":")[2]) for url in (proxy.url, replica.url))
        _, of_turn = replica.calls[0].transport.get_extra_info("peername")

        def probed_in_s() -> list[float]:
            """Of the two turns' connections, and of that to the engine."""
            return [
                each
                for (local, other), each in probes_of_kernel().items()
                if local == port or (local, other) == (of_turn, engine_port)
            ]

        await until(lambda: float("inf") not in probed_in_s())  # what was just sent has another timer first
        assert len(probed_in_s()) == 3
        assert max(probed_in_s()) <= 60.0
        gate.open()
        assert (await turns[0]).status == 200
        assert proxy.runtime.release("in flight")
        assert (await turns[1]).status == 200


KEEP_ALIVE_TIMER = "02"
TICKS_PER_S = 100.0


def probes_of_kernel() -> dict[tuple[int, int], float]:
    """Return in how many seconds the kernel probes each connection here, by its ports; `inf` if it never does."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, other, state, _, timer, *_ = line.split()
        if state == "01":
            kind, _, ticks = timer.partition(":")
            ports = int(local.rpartition(":")[2], 16), int(other.rpartition(":")[2], 16)
            found[ports] = int(ticks, 16) / TICKS_PER_S if kind == KEEP_ALIVE_TIMER else float("inf")
    return found


async def test_status_shows_a_running_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas up and down, programs, and waiting turns; program ids are shown as plain text."""
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url, **cap(2)) as proxy:
        await other.stop()
        await proxy.up(1)
        await ask(proxy.url, "first[/x]")
        await ask(proxy.url, "second[b]")
        held = asyncio.create_task(ask(proxy.url, "third"))
        await until(lambda: proxy.runtime.held_count == 1)
        assert await asyncio.to_thread(main, ["status", "--url", proxy.url]) == 0
        shown = capsys.readouterr().out
        idle = "engines idle while programs are held: "
        for text in ("policy cap", one.replica_id, "down", "first[/x]", "second[b]", "third", "no room", idle):
            assert text in shown, text
        assert proxy.runtime.release("first[/x]")
        await held


async def test_status_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_replica() as replica:
        await replica.stop()
        assert await asyncio.to_thread(main, ["status", "--url", replica.url]) == 1
        assert "no proxy answers" in capsys.readouterr().err


async def test_status_asks_for_no_key_where_that_does_not_help(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_replica(answers(status="500 Oh")) as replica:
        assert await asyncio.to_thread(main, ["status", "--url", replica.url]) == 1
        assert capsys.readouterr().err == f"thunderagent: error: {replica.url} answers 500\n"
