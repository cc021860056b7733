"""Real clients that know nothing of the proxy but its base URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from tests.real.support import words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.processes import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXACTLY: dict[str, Any] = {"min_tokens": 12, "ignore_eos": True}


@pytest.fixture
async def client(proxy: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield the client of one agent program, named in the path of its base URL; release the program afterwards."""
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/p/agent-7/v1", api_key="none", max_retries=0) as client:
        yield client
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin:
        assert (await admin.delete("/programs/agent-7")).status_code == 200


async def test_openai_client_runs_an_agent_loop(proxy: Server, client: openai.AsyncOpenAI) -> None:
    """Turns of one program, whole and streamed, each with the history of those before."""
    messages: list[Any] = [{"role": "system", "content": words(64, seed=1)}]
    for turn in range(4):
        messages.append({"role": "user", "content": words(100, seed=turn)})
        if turn % 2 == 0:
            text, usage = await _whole(client, messages)
        else:
            text, usage = await _streamed(client, messages)
        assert len(text.split()) == usage.completion_tokens == 12
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= turn * 96  # a turn adds over 110 tokens
        messages.append({"role": "assistant", "content": text})
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin:
        program = (await admin.get("/programs/agent-7")).json()
    assert program["turn_count"] == 4
    assert program["claim_tokens"] == usage.total_tokens


async def _whole(client: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, openai.types.CompletionUsage]:
    answer = await client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=12, temperature=0, extra_body=EXACTLY
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage


async def _streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, openai.types.CompletionUsage]:
    stream = await client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXACTLY,
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), usage


async def test_the_openai_client_sees_the_engines_errors(client: openai.AsyncOpenAI) -> None:
    """A refusal raises the client's type for it, with the engine's words if the engine was asked."""
    with pytest.raises(openai.NotFoundError, match="'gone' is not served here; there are: "):
        await client.chat.completions.create(model="gone", messages=[{"role": "user", "content": "w1"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model=MODEL_NAME, prompt=words(5000, seed=1), max_tokens=10)


async def test_the_openai_client_lists_the_models(client: openai.AsyncOpenAI) -> None:
    """The client's paging works."""
    assert [model.id async for model in client.models.list()] == [MODEL_NAME]
