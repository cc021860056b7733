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
import pytest_asyncio

from benchmarks.engine_kinds import KINDS
from benchmarks.peer_arms import plugin_settings
from benchmarks.real_engine import RealEngine, RealEngineConfig, ensure_model
from tests.loopback import free_ports
from tests.real.conftest import HIDDEN_SIZE, LAYERS, MAX_MODEL_LEN
from tests.real.support import CHAT, chat, metrics, replicas, until, words
from thunderagent.cli import build_parser
from thunderagent.doctor.command import examine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.real.conftest import RunProxy

PACKAGE = Path(__file__).parents[2] / "packages" / "thunderagent-vllm"
PATH = "/thunderagent/programs"

pytestmark = pytest.mark.xdist_group("engines")  # some need the two beside the one of this file


def run_in_vllm(script: str, *arguments: str, timeout_s: float = 1200) -> list[dict[str, Any]]:
    """Run a script of the package's tests in vLLM's environment, and return what it prints."""
    kind = KINDS["vllm"]
    model = ensure_model(HIDDEN_SIZE, LAYERS, max_model_len=MAX_MODEL_LEN)
    if script in ("in_vllm.py", "soak.py"):  # their prompts are longer
        model = ensure_model(HIDDEN_SIZE, LAYERS, max_model_len=8192)
    command = [str(kind.ensure_environment()), str(PACKAGE / "tests" / script), str(model), *arguments]
    variables = {**os.environ, **kind.variables, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=timeout_s, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return lines


CHECKS = (
    *("order", "quanta", "pins", "expiry_and_reset", "shrinking", "no_wedge"),
    *("stop_text", "shared_blocks", "strangers_priority", "loaded_blocks", "cascade"),
    *("histories", "faults", "set_up", "factory"),
)


def test_decisions_hold_on_the_real_scheduler(vllm: None) -> None:
    """Order, quanta, pins, shrinking and the breaker; random histories, in which each request gets its tokens once."""
    found = run_in_vllm("in_vllm.py", *CHECKS)
    assert [each["check"] for each in found] == list(CHECKS)
    assert [each for each in found if not each["ok"]] == []


def check_soak(seconds: int) -> dict[str, Any]:
    """Run hours of load with faults; nothing is lost, and nothing grows from one life of an engine to the next."""
    *lives, found = run_in_vllm("soak.py", str(seconds), timeout_s=10_000)
    assert found["ok"], found
    assert (found["lost"], found["wrong"]) == (0, 0)
    assert found["failed_plugins"] == found["lives"] // 2
    for fault in ("aborted", "sent_again", "lost_messages"):
        assert found[fault] > 0, fault
    assert max(each["most_pinned"] for each in lives) <= 450  # 0.9 of the pool
    assert any(each["pins_total"].get("used") for each in lives)
    return found


@pytest.mark.timeout(1200)
def test_load_with_faults(vllm: None) -> None:
    """Clients leave, messages are lost, the cache is reset, the plugin fails, engines start anew: nothing is lost."""
    check_soak(240)


@pytest.mark.nightly
@pytest.mark.timeout(11_000)
def test_three_hours_with_faults(vllm: None) -> None:
    """The same for three hours of virtual time: nothing grows."""
    found = check_soak(10_800)
    assert found["resets"] > 0
    third = len(found["objects"]) // 3
    assert found["objects"][-1] < 1.1 * max(found["objects"][:third])
    assert found["resident_kib"][-1] < 1.1 * found["resident_kib"][third]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_step_costs_at_most_a_tenth_more(vllm: None) -> None:
    """With 64 generating requests, whoever waits, or while a prompt is read: fails if it is more with 95 %."""
    (found,) = run_in_vllm("in_vllm.py", "step_cost")
    assert found["ok"], found
    assert set(found["found"]) == {"quiet", "waiting", "short", "reading"}
    assert {load: each for load, each in found["found"].items() if each["low"] > 1.1} == {}


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", ["default", "mars"])
@pytest.mark.parametrize("caching", ["1", "0"])
def test_greedy_tokens_are_those_of_the_stock_scheduler(vllm: None, caching: str, mode: str) -> None:
    """Of 1,000 requests, some of which are aborted or preempted, with and without a prefix cache."""
    stock, plugin = (run_in_vllm("greedy.py", each, "1000", caching)[-1] for each in ("stock", mode))
    report = plugin["report"]
    assert (report["on"], report["failures_total"]) == (True, 0)
    assert sum(report["preemptions_total"].values()) > 0
    assert report["chunks_total"]["bounded"] > 0
    if caching == "1":
        assert report["pins_total"]["used"] > 0
        assert report["pins_total"]["given_back"] > 0
    else:
        assert report["pins_total"] == {}
    assert plugin["reset"], "the prefix cache was not reset while pins were held"
    assert len(stock["tokens"]) == 1000
    assert plugin["tokens"] == stock["tokens"]
    assert plugin["aborted"] == stock["aborted"] > 0


in_module = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm: None) -> AsyncIterator[RealEngine]:
    (port,) = free_ports(1)
    config = RealEngineConfig(
        hidden_size=HIDDEN_SIZE,
        layers=LAYERS,
        pool_blocks=160,
        max_model_len=MAX_MODEL_LEN,
        port=port,
        core=None,
        **plugin_settings(),
    )
    async with RealEngine(config) as running:
        yield running


@in_module
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


@in_module
async def test_both_halves_speak(engine: RealEngine, run_proxy: RunProxy) -> None:
    """Programs of the proxy are the engine's, and are held, kept through a flood, paused and released there."""
    too_much = ("--capacity-tokens", "5900")
    async with run_proxy((engine,), *too_much) as proxy, httpx2.AsyncClient(timeout=120) as client:

        async def plugin() -> dict[str, Any] | None:
            found: dict[str, Any] | None = (await replicas(client, proxy.url))[0]["plugin"]
            return found

        async def holds() -> dict[str, float]:
            """Return for how many more seconds the engine holds whom."""
            pins: dict[str, list[float]] = (await client.get(engine.url + PATH)).json()["pins"]
            return {program: until_s for program, (_blocks, until_s) in pins.items()}

        async def turn(program: str | None, prompt: str, **headers: str) -> int:
            named = {"X-Program-ID": program} if program else {}
            answer = await client.post(proxy.url + CHAT, json=chat(prompt, 4), headers={**named, **headers})
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"]
            return int(details["cached_tokens"]) if details else 0

        async def known() -> bool:
            return await plugin() is not None

        await until(known)

        async def knows_better() -> bool:
            return bool((await replicas(client, proxy.url))[0]["capacity_tokens"] == 5120)

        await until(knows_better)
        await turn("agent", words(900, 1))
        assert 0 < (await holds())["agent"] <= 30
        await turn("hinted", words(100, 2), **{"X-Program-Hint": "next_turn_in_s=90"})
        assert 90 < (await holds())["hinted"] <= 181

        hinted = await client.post(f"{proxy.url}/programs/agent/hints", json={"next_turn_in_s": 100})
        assert hinted.status_code == 200

        async def is_held_by_the_hint() -> bool:
            return (await holds())["agent"] > 100

        await until(is_held_by_the_hint)
        await asyncio.gather(*(turn(None, words(900, 10 + number)) for number in range(8)))
        assert await turn("agent", words(900, 1)) >= 800

        async def is_warm() -> bool:
            report = await plugin()
            return report is not None and report["turns_total"].get("warm", 0) >= 1

        await until(is_warm)
        report = await plugin()
        assert report is not None
        assert (report["on"], report["failures_total"]) == (True, 0)
        assert (await metrics(client, proxy.url))["thunderagent_engine_plugin_pinned_blocks"] > 0
        findings = await examine(build_parser().parse_args(["doctor", "--url", proxy.url, "--no-turns"]))
        assert "Both halves are there" in next(each.text for each in findings if each.check == "engine_plugin")

        # The pool has 5,120 tokens: who comes now pauses others, and the engine hears of it.
        await turn("large", words(3800, 3))

        async def is_paused() -> bool:
            return "agent" not in await holds()

        await until(is_paused)
        assert (await holds()).keys() <= {"large", "hinted"}
        for program in ("large", "hinted"):
            await client.post(f"{proxy.url}/programs/release", json={"program_id": program})

        async def is_let_go() -> bool:
            return await holds() == {}

        await until(is_let_go)
    await engine.reset_prefix_cache()


@in_module
async def test_either_half_works_alone(
    engine: RealEngine, engines: tuple[RealEngine, RealEngine], run_proxy: RunProxy
) -> None:
    """A proxy that does not speak of programs before an engine that would listen, and the other way round."""
    async with httpx2.AsyncClient(timeout=120) as client:
        before = (await client.get(engine.url + PATH)).json()
        for replica, options in ((engine, ("--engine-plugin", "false")), (engines[0], ())):
            async with run_proxy((replica,), *options) as proxy:
                for number in range(3):
                    body = chat(words(200 + 50 * number, 5), 4)
                    answer = await client.post(proxy.url + CHAT, json=body, headers={"X-Program-ID": "agent"})
                    assert answer.status_code == 200, answer.text
                assert (await replicas(client, proxy.url))[0]["plugin"] is None
        report = (await client.get(engine.url + PATH)).json()
        assert (report["on"], report["pins"], report["programs"]) == (True, {}, before["programs"])
