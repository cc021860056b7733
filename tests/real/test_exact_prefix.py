"""Exact prompts on real engines: a program's turns extend each other where the tokenizer would come to other tokens.

The model is random and its tokens are pieces of text, so its answers are hardly ever tokenised as they were sampled.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.real_engine import RealEngine
from tests.real.conftest import text_config
from tests.real.support import CHAT, events, words

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import RunProxy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900, func_only=True)]

END_TOKEN, END_BIAS = 0, 6.0
"""Of the text tokenizer; so that a random model ends its answers after some 10 tokens."""

PROGRAMS_COUNT, TURNS_COUNT = 4, 5


async def converse(client: httpx2.AsyncClient, program_id: str, seed: int) -> list[dict[str, Any]]:
    """Run a program that sends back what it was answered, streamed and whole by turns; return its recorded turns."""
    messages: list[dict[str, str]] = []
    for number in range(TURNS_COUNT):
        messages.append({"role": "user", "content": words(20, seed=100 * seed + number)})
        body = {
            "model": MODEL_NAME,
            "messages": messages,
            "max_tokens": 200,
            "temperature": 1.0,
            "seed": 100 * seed + number,
            "logit_bias": {str(END_TOKEN): END_BIAS},
            "stream": bool((number + seed) % 2),
        }
        answer = await client.post(CHAT, json=body, headers={"X-Program-ID": program_id})
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            deltas = [choice["delta"] for event in events(answer.content) for choice in event["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
        else:
            text = json.loads(answer.content)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
    found = await client.get(f"/programs/{program_id}/trajectory", params={"view": "turns"})
    turns: list[dict[str, Any]] = found.json()["turns"]
    return turns


async def test_turns_extend_each_other_though_the_tokenizer_would_not(
    cacheless: RealEngine, run_proxy: RunProxy
) -> None:
    """With an exact prompt each turn after an ended answer extends it; without, four in ten do not."""
    await check_links(cacheless, run_proxy)


@pytest.mark.nightly  # a second engine; tests/integration/test_exact_prefix.py has its requests
async def test_turns_extend_each_other_on_sglang(sglang: None, run_proxy: RunProxy, tmp_path: Path) -> None:
    """The same, with its own requests."""
    async with RealEngine(text_config("sglang", tmp_path / "template.jinja")) as engine:
        await check_links(engine, run_proxy)


async def check_links(engine: RealEngine, run_proxy: RunProxy) -> None:
    """Run programs without and with exact prompts, and check how their turns are linked."""
    links: dict[str, list[tuple[str, str]]] = {}
    cached: dict[str, int] = {}
    for name, options in (("off", ()), ("on", ("--rollout-prefix", "supply"))):
        async with (
            run_proxy((engine,), "--rollouts", "ids", *options) as proxy,
            httpx2.AsyncClient(base_url=proxy.url, timeout=300) as client,
        ):
            turns = [await converse(client, f"{name}-{seed}", seed) for seed in range(PROGRAMS_COUNT)]
        links[name] = [(turn["prefix"], turn["link"]) for of_program in turns for turn in of_program[1:]]
        cached[name] = sum(turn["cached_tokens"] or 0 for of_program in turns for turn in of_program)
    print(links, cached)
    assert {prefix for prefix, _ in links["off"]} == {""}
    drifts_count = sum(link == "drift" for _, link in links["off"])
    assert drifts_count > len(links["off"]) / 4, "the tokenizer comes to the same tokens"
    assert {prefix for prefix, _ in links["on"]} <= {"supplied", "same", "cut", "template"}
    assert {link for prefix, link in links["on"] if prefix in ("supplied", "same")} == {"extends"}
    supplied_count = sum(prefix == "supplied" for prefix, _ in links["on"])
    assert supplied_count > len(links["on"]) / 4, "as many as drift without it, or so"
    assert sum(prefix in ("supplied", "same") for prefix, _ in links["on"]) >= len(links["on"]) / 2
