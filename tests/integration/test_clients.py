"""What people use: the openai client, and the command line against a running proxy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.support import (
    answers,
    ask,
    cap,
    chunk,
    fake_replica,
    running_proxy,
    stream_head,
    until,
    word,
    writes,
)
from thunderagent.cli import main

if TYPE_CHECKING:
    from tests.integration.support import RunningProxy

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
