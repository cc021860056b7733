"""Recorded tokens are the engine's own, on a real vLLM and a real SGLang, whole and streamed, on all APIs."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import pytest_asyncio

from benchmarks.engine_kinds import MODEL_NAME
from tests.real.support import CHAT, COMPLETIONS, ask, assert_same, chat, completion, conversation, words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.processes import Server
    from benchmarks.real_engine import RealEngine
    from tests.real.conftest import RunProxy

    Json = dict[str, Any]

pytestmark = pytest.mark.asyncio(loop_scope="session")

RECORDS = ("--rollouts", "logprobs")
PROGRAMS_COUNT = 4
TURNS_COUNT = 6
OUTPUT_TOKENS = 8
FIRST_SPECIAL = 2000
"""Smaller ids are the model's words, by their number."""

GREEDY = {"temperature": 0, "ignore_eos": True}
TOKENS_PATH, GENERATE = "/inference/v1/generate", "/generate"


def token_turn(**fields: object) -> Json:
    """Return the body of a turn of vLLM's token API."""
    sampling = {**GREEDY, "max_tokens": OUTPUT_TOKENS, "min_tokens": OUTPUT_TOKENS}
    return {"model": MODEL_NAME, "token_ids": list(range(50, 90)), "sampling_params": sampling, **fields}


def generate_turn(**fields: object) -> Json:
    """Return the body of a turn of SGLang's own API."""
    return {"input_ids": list(range(50, 90)), "sampling_params": {**GREEDY, "max_new_tokens": OUTPUT_TOKENS}, **fields}


def responses_turn(**fields: object) -> Json:
    """Return the body of a turn of the responses API."""
    return {"model": MODEL_NAME, "input": words(20, seed=3), "max_output_tokens": 8, "temperature": 0, **fields}


PROMPT = words(40, seed=2)
OF_VLLM = {
    "chat": (CHAT, chat(PROMPT, 6)),
    "chat, two choices": (CHAT, chat(PROMPT, 5, n=2, temperature=0.7, seed=3)),
    "chat with log probabilities": (CHAT, chat(PROMPT, 5, logprobs=True, top_logprobs=2)),
    "chat stream": (CHAT, chat(PROMPT, 6, stream=True)),
    "chat stream with usage": (CHAT, chat(PROMPT, 6, stream=True, stream_options={"include_usage": True})),
    "completion": (COMPLETIONS, completion(PROMPT, 6)),
    "completion stream": (COMPLETIONS, completion(PROMPT, 6, stream=True)),
    "completion with echo": (COMPLETIONS, completion("w1 w2", 3, echo=True)),
    "tokens": (TOKENS_PATH, token_turn()),
    "tokens stream": (TOKENS_PATH, token_turn(stream=True)),
    "too long": (CHAT, chat(words(5000, seed=2), 10)),
}
OF_SGLANG = {
    "chat": (CHAT, chat(PROMPT, 6, rid="pinned")),
    "chat with log probabilities": (CHAT, chat(PROMPT, 5, rid="pinned", logprobs=True, top_logprobs=2)),
    "chat stream": (CHAT, chat(PROMPT, 6, rid="pinned", stream=True)),
    "completion": (COMPLETIONS, completion(PROMPT, 6, rid="pinned")),
    "completion stream": (COMPLETIONS, completion(PROMPT, 6, rid="pinned", stream=True)),
    "generate": (GENERATE, generate_turn(rid="pinned")),
    "generate stream": (GENERATE, generate_turn(rid="pinned", stream=True)),
}


@asynccontextmanager
async def recording(engine: RealEngine, run_proxy: RunProxy) -> AsyncIterator[tuple[Server, httpx2.AsyncClient]]:
    """Run a proxy that records, with a client of it."""
    async with run_proxy((engine,), *RECORDS) as proxy, httpx2.AsyncClient(base_url=proxy.url, timeout=120) as client:
        yield proxy, client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def of_vllm(
    engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> AsyncIterator[tuple[Server, httpx2.AsyncClient]]:
    """Run one proxy that records for all tests of a vLLM."""
    async with recording(engines[0], run_proxy) as running:
        yield running


async def rollout(client: httpx2.AsyncClient, program_id: str, view: str = "turns") -> Json:
    """Return a program's rollout."""
    answer = await client.get(f"/programs/{program_id}/trajectory", params={"view": view})
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


async def converse(client: httpx2.AsyncClient, program_id: str, seed: int) -> None:
    """Run a program of several turns, streamed and whole by turns, that sends back what it was answered."""
    messages: list[dict[str, str]] = []
    for number in range(TURNS_COUNT):
        messages.append({"role": "user", "content": words(30, seed=1000 * seed + number)})
        streams = bool((number + seed) % 2)
        body = conversation(messages, OUTPUT_TOKENS, stream=streams)
        answer = await client.post(CHAT, json=body, headers={"X-Program-ID": program_id})
        assert answer.status_code == 200, answer.text
        if streams:
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        else:
            text = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})


async def check_conversations(
    client: httpx2.AsyncClient, own_answer: Callable[[list[int]], Any], id_of: Callable[[str], int]
) -> None:
    """Check each recorded turn of several programs: what the engine answers to the recorded prompt is what is recorded.

    `own_answer` asks the engine itself for the continuation of tokens.
    """
    for seed in range(PROGRAMS_COUNT):
        await converse(client, f"p{seed}", seed)
    checked = 0
    for seed in range(PROGRAMS_COUNT):
        found = await rollout(client, f"p{seed}")
        assert found["complete"], found
        samples = (await rollout(client, f"p{seed}", "samples"))["samples"]
        prompt: list[int] = []
        is_lost = False  # the text of an answer lacks its special tokens, so they do not come back
        for turn in found["turns"]:
            assert turn["link"] == ("root" if not turn["seq"] else "drift" if is_lost else "extends")
            prompt = [*prompt[: turn["shared_tokens"]], *turn["prompt_new_ids"]]
            (output,) = turn["outputs"]
            assert output["finish"] == "length"
            assert len(output["logprobs"]) == len(output["ids"]) == OUTPUT_TOKENS
            own_ids, own_logprobs = await own_answer(prompt)
            assert output["ids"] == own_ids
            assert output["logprobs"] == pytest.approx(own_logprobs, abs=1e-2)  # other batches round otherwise
            new = words(30, seed=1000 * seed + turn["seq"]).split()
            assert [id_of(word) for word in new] == [each for each in turn["prompt_new_ids"] if each < FIRST_SPECIAL][
                -30:
            ]
            prompt += output["ids"]
            is_lost = any(each >= FIRST_SPECIAL for each in output["ids"])
            checked += 1
        assert samples[-1]["ids"] == prompt
        assert sum(sum(sample["mask"]) for sample in samples) == TURNS_COUNT * OUTPUT_TOKENS
    assert checked == PROGRAMS_COUNT * TURNS_COUNT


async def test_vllm_records_what_the_engine_says(
    engine: RealEngine, of_vllm: tuple[Server, httpx2.AsyncClient]
) -> None:
    """The token API's own answers to the recorded prompts are the recorded tokens."""
    async with httpx2.AsyncClient(base_url=engine.url, timeout=60) as direct:

        async def own(prompt: list[int]) -> tuple[list[int], list[float]]:
            body = token_turn(token_ids=prompt)
            body["sampling_params"]["logprobs"] = 0
            (choice,) = (await direct.post(TOKENS_PATH, json=body)).json()["choices"]
            return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]

        await check_conversations(of_vllm[1], own, lambda word: int(word[1:]))


@pytest.mark.parametrize(("path", "body"), OF_VLLM.values(), ids=OF_VLLM)
async def test_vllm_clients_get_its_own_answer(
    engine: RealEngine, of_vllm: tuple[Server, httpx2.AsyncClient], path: str, body: Json
) -> None:
    """With rollouts on, every byte but the time is the engine's own without the proxy."""
    await assert_same(engine, of_vllm[0], path, body)


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_vllm_other_apis_are_recorded(of_vllm: tuple[Server, httpx2.AsyncClient], fields: Json) -> None:
    """Completions, tokens and responses with their ids; messages say that they have none."""
    _, client = of_vllm
    turns = {
        COMPLETIONS: completion(PROMPT, 6, **fields),
        TOKENS_PATH: token_turn(**fields),
        "/v1/responses": responses_turn(**fields),
        "/v1/messages": {**chat(PROMPT, 6), "max_tokens": 6, **fields},
    }
    for path, body in turns.items():
        name = f"{path.replace('/', '_')}{len(fields)}"
        answer = await client.post(path, json=body, headers={"X-Program-ID": name})
        assert answer.status_code == 200, answer.text
        (turn,) = (await rollout(client, name))["turns"]
        if path == "/v1/messages":
            assert (turn["missing"], turn["outputs"]) == ("not_askable", [])
            continue
        assert turn["missing"] == ("no_logprobs" if path == "/v1/responses" else "")
        assert turn["prompt_new_ids"]
        assert turn["outputs"][0]["ids"]


async def test_sglang_records_what_the_engine_says(sglang_engine: RealEngine, run_proxy: RunProxy) -> None:
    """Its own answers to the recorded prompts are the recorded tokens, and clients get its own bytes."""
    engine = sglang_engine
    async with recording(engine, run_proxy) as (proxy, client):
        async with httpx2.AsyncClient(base_url=engine.url, timeout=60) as direct:

            async def own(prompt: list[int]) -> tuple[list[int], list[float]]:
                answer = (await direct.post(GENERATE, json=generate_turn(input_ids=prompt, return_logprob=True))).json()
                return answer["output_ids"], [row[0] for row in answer["meta_info"]["output_token_logprobs"]]

            await check_conversations(client, own, lambda word: int(word[1:]))
        for path, body in OF_SGLANG.values():
            await assert_same(engine, proxy, path, body)
        for streams in (False, True):
            for path, body in ((COMPLETIONS, completion(PROMPT, 6)), (GENERATE, generate_turn())):
                name = f"{path.replace('/', '_')}{streams}"
                await client.post(path, json={**body, "stream": streams}, headers={"X-Program-ID": name})
                (turn,) = (await rollout(client, name))["turns"]
                assert turn["missing"] == ""
                assert len(turn["outputs"][0]["ids"]) == len(turn["outputs"][0]["logprobs"])
                assert turn["outputs"][0]["ids"] == (await ask_ids(engine, path, body))


async def ask_ids(engine: RealEngine, path: str, body: Json) -> list[int]:
    """Return the tokens of the engine's own answer."""
    asked = body if path == GENERATE else {**body, "return_token_ids": True}
    answer = json.loads((await ask(engine, engine.url, path, asked)).body)
    ids: list[int] = answer["output_ids"] if path == GENERATE else answer["choices"][0]["token_ids"]
    return ids
