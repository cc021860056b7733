"""The scheduler for vLLM, on vLLM's real scheduler, and on a real engine behind its server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.engine_kinds import KINDS
from benchmarks.real_engine import RealEngine, RealEngineConfig, ensure_model
from tests.loopback import free_ports
from tests.real.conftest import HIDDEN_SIZE, LAYERS, MAX_MODEL_LEN
from tests.real.support import CHAT, chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PACKAGE = Path(__file__).parents[2] / "packages" / "thunderagent-vllm"
PATH = "/thunderagent/programs"

pytestmark = [pytest.mark.xdist_group("vllm")]


def run_in_vllm(script: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a script of the package's tests in vLLM's environment, and return what it prints."""
    kind = KINDS["vllm"]
    model = ensure_model(HIDDEN_SIZE, LAYERS, max_model_len=MAX_MODEL_LEN)
    if script == "in_vllm.py":  # its prompts are longer
        model = ensure_model(HIDDEN_SIZE, LAYERS, max_model_len=8192)
    command = [str(kind.ensure_environment()), str(PACKAGE / "tests" / script), str(model), *arguments]
    variables = {**os.environ, **kind.variables, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=280, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return lines


CHECKS = ("order", "quanta", "pins", "expiry_and_reset", "shrinking", "no_wedge", "histories", "faults", "factory")


def test_decisions_on_the_real_scheduler(vllm: None) -> None:
    """Order, quanta, pins, shrinking and the breaker; random histories, in which each request gets its tokens once."""
    found = run_in_vllm("in_vllm.py", *CHECKS)
    assert [each["check"] for each in found] == list(CHECKS)
    assert [each for each in found if not each["ok"]] == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_of_the_stock_scheduler(vllm: None) -> None:
    stock, plugin = (run_in_vllm("greedy.py", mode, "60", "1")[-1] for mode in ("stock", "plugin"))
    assert plugin["report"]["on"]
    assert plugin["report"]["pins_total"]["used"] > 0
    assert plugin["reset"], "the prefix cache was not reset while pins were held"
    assert plugin["tokens"] == stock["tokens"]
    assert plugin["aborted"] == stock["aborted"] > 0


@pytest.fixture
async def engine(vllm: None) -> AsyncIterator[RealEngine]:
    (port,) = free_ports(1)
    config = RealEngineConfig(
        hidden_size=HIDDEN_SIZE,
        layers=LAYERS,
        pool_blocks=160,
        max_model_len=MAX_MODEL_LEN,
        port=port,
        core=None,
        extra_args=(
            *("--scheduler-cls", "thunderagent_vllm.scheduler.Scheduler"),
            *("--middleware", "thunderagent_vllm.route.Route"),
        ),
        extra_variables=(("PYTHONPATH", str(PACKAGE)),),
    )
    async with RealEngine(config) as running:
        yield running


async def test_engine_keeps_a_program_through_a_flood(engine: RealEngine) -> None:
    """A turn says who it is and how long to hold; the next one finds its blocks; a message lets them go."""
    async with httpx2.AsyncClient(base_url=engine.url, timeout=120) as client:

        async def turn(program: str, prompt: str, hold_s: float) -> int:
            body = chat(prompt, 4, vllm_xargs={"thunderagent_hold_s": hold_s})
            answer = await client.post(CHAT, json=body, headers={"X-Session-ID": program})
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"]
            return int(details["cached_tokens"]) if details else 0

        def prompt(seed: int) -> str:
            return " ".join(f"w{(seed * 131 + number * 17) % 2000}" for number in range(900))

        await turn("agent", prompt(1), 600)
        await asyncio.gather(*(turn(f"flood{number}", prompt(10 + number), 30) for number in range(8)))
        assert await turn("agent", prompt(1), 600) >= 800
        report = (await client.get(PATH)).json()
        assert (report["on"], report["protocol"], report["failures_total"]) == (True, 1, 0)
        assert "agent" in report["pins"]
        assert report["turns_total"]["warm"] >= 1
        told = (await client.post(PATH, json={"protocol": 1, "ops": [["release", "agent"]]})).json()
        assert (told["done"], "agent" in told["pins"]) == (1, False)
    await engine.reset_prefix_cache()
