"""The APIs besides completions, on real engines: the engine's own bytes, and the usage that it reports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import openai
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from tests.real.support import until, words
from tests.real.test_exact import assert_same

if TYPE_CHECKING:
    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = words(100, seed=1)
TOKEN_IDS = list(range(50, 250))
USER: Any = [{"role": "user", "content": PROMPT}]
SAMPLING = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {"input": USER, "max_output_tokens": 6, "temperature": 0}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 6, "temperature": 0, "system": "w1 w2"}),
    "tokens": ("/inference/v1/generate", {"token_ids": TOKEN_IDS, "sampling_params": SAMPLING}),
}
ANSWERS = {
    **{name: (path, {"model": MODEL_NAME, **body}) for name, (path, body) in BODIES.items()},
    **{
        f"{name}, streamed": (path, {"model": MODEL_NAME, **body, "stream": True})
        for name, (path, body) in BODIES.items()
    },
    "tokens with usage": (
        "/inference/v1/generate",
        {**BODIES["tokens"][1], "stream": True, "stream_options": {"include_usage": True}},
    ),
    "tokens with log probabilities": (
        "/inference/v1/generate",
        {**BODIES["tokens"][1], "sampling_params": {**SAMPLING, "logprobs": 2}, "return_token_ids": True},
    ),
    "tokens counted": ("/v1/messages/count_tokens", {"model": MODEL_NAME, "messages": USER}),
}
REFUSALS = {
    "no input": ("/v1/responses", {"model": MODEL_NAME}),
    "too long": ("/v1/messages", {"model": MODEL_NAME, "messages": USER, "max_tokens": 5000}),
    "no tokens": ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
    "unknown response": ("/v1/responses/resp_nobody", None),
    "embeddings": ("/v2/embed", {"model": MODEL_NAME, "texts": ["w1"]}),
}


@pytest.mark.parametrize(("path", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_is_the_engines_own(
    engine: RealEngine, proxy_of_one: Server, path: str, body: dict[str, Any]
) -> None:
    """All bytes except ids and time stamps are equal, although the proxy asks for usage on its own behalf."""
    answer = await assert_same(engine, proxy_of_one, path, body)
    assert answer.status == 200


@pytest.mark.parametrize(("path", "body"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_is_the_engines_own(
    engine: RealEngine, proxy_of_one: Server, path: str, body: dict[str, Any] | None
) -> None:
    """The client reads the engine's words about what is wrong."""
    answer = await assert_same(engine, proxy_of_one, path, body)
    assert 400 <= answer.status < 500


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_program_has_the_usage_that_the_engine_said(
    engine: RealEngine, proxy_of_one: Server, name: str, stream: bool
) -> None:
    """Prompt, output and hits of two turns are counted; the second hits the first one's blocks."""
    path, body = BODIES[name]
    program_id = f"usage-{name}-{stream}"
    said = []
    async with httpx2.AsyncClient(base_url=proxy_of_one.url, timeout=60) as client:
        await engine.reset_prefix_cache()
        asked = {"model": MODEL_NAME, **body, "stream": stream}
        if name == "tokens" and stream:
            asked["stream_options"] = {"include_usage": True}
        for _ in range(2):
            response = await client.post(f"/p/{program_id}{path}", json=asked)
            assert response.status_code == 200, response.text
            said.append(usage_in(response.text, stream=stream))
        program = (await client.get(f"/programs/{program_id}")).json()
    prompts, outputs, hits = zip(*said, strict=True)
    assert program["prompt_tokens_total"] == sum(prompts)
    assert program["output_tokens_total"] == sum(outputs) == 12
    assert program["cached_tokens_total"] == sum(hits)
    assert prompts[0] == prompts[1] > 100
    assert hits[0] == 0
    assert hits[1] >= 64


def usage_in(text: str, *, stream: bool) -> tuple[int, int, int]:
    """Return prompt, output and cached tokens of an answer of any API."""
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    answers = [json.loads(part) for part in parts] if stream else [json.loads(text)]
    usage = next(
        usage
        for answer in reversed(answers)
        if (usage := answer.get("usage") or (answer.get("response") or {}).get("usage"))
    )
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]
    kept = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + sum(kept), usage["output_tokens"], kept[0]


async def test_sdks_of_both_makers_are_served(proxy: Server) -> None:
    """Covers openai's responses, one in the background, found on either engine; anthropic's messages, streamed."""
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/p/sdk/v1", api_key="none", max_retries=0) as client:
        first = await client.responses.create(model=MODEL_NAME, input=PROMPT, max_output_tokens=6)
        assert (await client.responses.retrieve(first.id)).output_text == first.output_text
        async with client.responses.stream(
            model=MODEL_NAME, input="w7", max_output_tokens=6, previous_response_id=first.id
        ) as stream:
            assert (await stream.get_final_response()).status == "incomplete"
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        made: dict[str, str] = {}
        for program in ("sdk-1", "sdk-2", "sdk-3", "sdk-4"):
            named = client.with_options(base_url=f"{proxy.url}/p/{program}/v1")
            answer = await named.responses.with_raw_response.create(
                model=MODEL_NAME,
                input=PROMPT,
                max_output_tokens=3000,
                background=True,
                extra_body={"ignore_eos": True},
            )
            made[answer.parse().id] = answer.headers["X-Replica-ID"]
        assert len(set(made.values())) == 2
        for response_id in made:
            await assert_cancelled(client, response_id)
    async with anthropic.AsyncAnthropic(base_url=f"{proxy.url}/p/sdk", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL_NAME, "messages": USER}
        counted = await client.messages.count_tokens(**asked)
        async with client.messages.stream(max_tokens=6, **asked) as stream:
            message = await stream.get_final_message()
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="gone", max_tokens=5, messages=USER)


async def assert_cancelled(client: openai.AsyncOpenAI, response_id: str) -> None:
    """Cancel a response where it is generated; or it ended first, because a busy machine halted this client so long."""
    try:
        assert (await client.responses.cancel(response_id)).status == "cancelled"
    except openai.BadRequestError:
        assert (await client.responses.retrieve(response_id)).status == "incomplete"


async def test_a_client_that_leaves_a_message_ends_it_in_the_engine(engine: RealEngine, proxy_of_one: Server) -> None:
    """As with a chat, the engine runs nothing for a client that left."""
    async with httpx2.AsyncClient(base_url=proxy_of_one.url, timeout=60) as client:
        body = {"model": MODEL_NAME, "messages": USER, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/messages", json=body) as response:
            async for _ in response.aiter_lines():
                break

        async def is_idle() -> bool:
            text = (await client.get(f"{engine.url}/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
            return all(line.endswith(" 0.0") for line in lines)

        await until(is_idle)
