"""The proxy passes on exactly the engine's own answer: status, headers and bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from tests.real.support import CHAT, COMPLETIONS, ask, assert_same, chat, completion, words

if TYPE_CHECKING:
    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = words(100, seed=1)
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
NO_USAGE = {"stream": True, "stream_options": {"include_usage": False}}
EVERY_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

ANSWERS = {
    "chat": (CHAT, chat(PROMPT, 6)),
    "chat with log probabilities": (CHAT, chat(PROMPT, 5, logprobs=True, top_logprobs=3)),
    "chat, two choices": (CHAT, chat(PROMPT, 5, n=2, temperature=0.7, seed=3)),
    "chat stream": (CHAT, chat(PROMPT, 6, **STREAM)),
    "chat stream with usage": (CHAT, chat(PROMPT, 6, **USAGE)),
    "chat stream without usage": (CHAT, chat(PROMPT, 6, **NO_USAGE)),
    "chat stream with usage in every event": (CHAT, chat(PROMPT, 6, **EVERY_USAGE)),
    "chat stream with log probabilities": (CHAT, chat(PROMPT, 5, logprobs=True, top_logprobs=2, **STREAM)),
    "completion": (COMPLETIONS, completion(PROMPT, 6)),
    "completion of token ids": (COMPLETIONS, completion(list(range(50, 150)), 6, return_token_ids=True)),
    "completion of two prompts": (COMPLETIONS, completion([PROMPT, "w5 w6"], 4)),
    "completion stream": (COMPLETIONS, completion(PROMPT, 6, **STREAM)),
    "completion stream with usage": (COMPLETIONS, completion(PROMPT, 6, **USAGE)),
    "completion stream without usage": (COMPLETIONS, completion(PROMPT, 6, **NO_USAGE)),
    "completion stream with echo": (COMPLETIONS, completion("w1 w2 w3", 3, echo=True, **STREAM)),
}

REFUSALS = {
    "too long": (CHAT, chat(words(5000, seed=2), 10)),
    "too long, streamed": (CHAT, chat(words(5000, seed=2), 10, **STREAM)),
    "too long completion": (COMPLETIONS, completion(words(5000, seed=2), 10)),
    "no JSON": (CHAT, b'{"model": "'),
    "no object": (CHAT, b"[1, 2]"),
    "no body": (CHAT, b""),
    "no messages": (CHAT, {"model": MODEL_NAME}),
    "wrong type": (CHAT, chat(PROMPT, 10, temperature="hot")),
    "out of range": (CHAT, chat(PROMPT, 10, temperature=-1)),
    "usage of no stream": (CHAT, chat(PROMPT, 10, stream_options={"include_usage": True})),
    "empty prompt": (COMPLETIONS, completion("", 10)),
    "no such path": ("/v1/nothing", chat(PROMPT, 10)),
    "not for this model": ("/v1/embeddings", {"model": MODEL_NAME, "input": "w1"}),
}

SIDE_CALLS = {
    "tokenize": ("/tokenize", {"model": MODEL_NAME, "prompt": PROMPT}),
    "tokenize a chat": ("/tokenize", {"model": MODEL_NAME, "messages": [{"role": "user", "content": PROMPT}]}),
    "detokenize": ("/detokenize", {"model": MODEL_NAME, "tokens": [1, 2, 3]}),
    "version": ("/version", None),
    "method not allowed": (CHAT, None),
}


@pytest.mark.parametrize(("path", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_is_the_engines_own(
    engine: RealEngine, proxy_of_one: Server, path: str, body: dict[str, Any]
) -> None:
    """Every byte but the time stamp is the same, whether or not usage was asked for."""
    answer = await assert_same(engine, proxy_of_one, path, body)
    assert answer.status == 200
    streams = body.get("stream", False)
    assert (b"data: [DONE]" in answer.body) == streams
    wants_usage = not streams or body.get("stream_options", {}).get("include_usage", False)
    assert (b'"completion_tokens"' in answer.body) == wants_usage


@pytest.mark.parametrize(("path", "body"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_is_the_engines_own(
    engine: RealEngine, proxy_of_one: Server, path: str, body: dict[str, Any] | bytes
) -> None:
    """The client reads the engine's words about what is wrong."""
    answer = await assert_same(engine, proxy_of_one, path, body)
    assert 400 <= answer.status < 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_model_that_no_engine_lists_is_refused_as_the_engine_would(
    engine: RealEngine, proxy_of_one: Server, path: str
) -> None:
    """The words are the proxy's, which asks no engine; status and fields are those that clients know."""
    body = chat(PROMPT, 10, model="gone") if path == CHAT else completion(PROMPT, 10, model="gone", **STREAM)
    direct = await ask(engine, engine.url, path, body)
    through = await ask(engine, proxy_of_one.url, path, body)
    assert (through.status, direct.status) == (404, 404)
    assert set(json.loads(through.body)["error"]) == set(json.loads(direct.body)["error"])


@pytest.mark.parametrize(("path", "body"), SIDE_CALLS.values(), ids=SIDE_CALLS)
async def test_a_side_call_is_the_engines_own(
    engine: RealEngine, proxy_of_one: Server, path: str, body: dict[str, Any] | None
) -> None:
    """Requests that are not turns pass too."""
    await assert_same(engine, proxy_of_one, path, body)


async def test_the_models_are_the_engines_own(engine: RealEngine, proxy: Server) -> None:
    """Both engines serve the same models, so their union is each one's own list."""
    direct = await ask(engine, engine.url, "/v1/models", None)
    through = await ask(engine, proxy.url, "/v1/models", None)
    assert (through.status, through.body) == (direct.status, direct.body)
    assert dict(through.headers)["content-type"] == dict(direct.headers)["content-type"]


async def test_additions_of_the_proxy_are_named(engine: RealEngine, proxy_of_one: Server) -> None:
    """The only new headers give replica, program and hold time of the turn."""
    async with httpx2.AsyncClient(base_url=proxy_of_one.url, timeout=60) as client:
        response = await client.post(CHAT, json=chat(PROMPT, 2, program_id="named"))
    assert response.status_code == 200
    assert response.headers["X-Program-ID"] == "named"
    assert response.headers["X-Program-ID-Source"] == "body"
    assert response.headers["X-Replica-ID"] == engine.url.removeprefix("http://")
    assert int(response.headers["X-Hold-Ms"]) < 1000
