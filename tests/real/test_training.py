"""TRL's GRPO learns through the proxy on a real vLLM and a real SGLang, as `docs/examples/training/grpo.py` shows it.

The model is a tiny random one, the task is to say the word that a tool said. It runs with and without the proxy.
TRAINING_STEPS says how many steps, TRAINING_SEEDS how often; TRAINING_RESULT is a file for the rewards and the times.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.environments import RealEngineError, ensure_environment
from benchmarks.processes import running
from benchmarks.real_engine import RealEngine, RealEngineConfig, ensure_model
from tests.loopback import free_ports
from tests.real import token_tap

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import NoReturn

    from tests.real.conftest import RunProxy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
TRL = ["trl==1.16.0", "torch==2.13.0", "transformers==5.19.0"]
MAX_LEN = 512


@pytest.fixture(scope="module")
def python(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> Path:
    """Make TRL's environment; the first time takes some minutes and is announced."""
    try:
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            return ensure_environment("trl", TRL, "about 1 GB, some minutes")
    except RealEngineError as error:
        require_real(f"no TRL: {error}")


@asynccontextmanager
async def engines(model: Path, folder: Path) -> AsyncIterator[tuple[RealEngine, RealEngine]]:
    """Run one of each kind with the model; vLLM writes down what its core got and made."""
    (plugin := folder / "plugin").mkdir()
    token_tap.install(plugin)
    ports = free_ports(2)
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "layers": 2,
        "max_model_len": MAX_LEN,
        "core": None,
        "ready_timeout_s": 600,
    }
    vllm = RealEngineConfig(
        **shape,
        pool_blocks=256,
        port=ports[0],
        extra_args=("--model", str(model), "--max-num-seqs", "16"),
        extra_variables=(("PYTHONPATH", str(plugin)), ("TOKEN_TAP", str(folder / "tap.jsonl"))),
    )
    sglang = RealEngineConfig(
        **shape,
        engine="sglang",
        pool_blocks=8192,
        block_size=1,
        port=ports[1],
        extra_args=("--model-path", str(model), "--max-running-requests", "16"),
    )
    async with RealEngine(vllm) as first, RealEngine(sglang) as second:
        await warm(first.url, second.url, model)
        yield first, second


async def warm(vllm_url: str, sglang_url: str, model: Path) -> None:
    """Load vLLM's weights once, and answer: what engines compile when they first do that is in neither training's time.

    SGLang's are not loaded: it would call its model by their folder, and the proxy would not know its first name.
    """
    asks = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 1, "logprobs": True}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    async with httpx2.AsyncClient(timeout=600) as client:
        for path, body in (("/pause?mode=wait", {}), ("/collective_rpc", reload), ("/resume", {})):
            (await client.post(f"{vllm_url}{path}", json=body)).raise_for_status()
        for url in (vllm_url, sglang_url):
            for count in (1, 8, 16):
                path = f"{url}/v1/chat/completions"
                sent = [client.post(path, json={"model": MODEL_NAME, **asks}) for _ in range(count)]
                for answer in await asyncio.gather(*sent):
                    answer.raise_for_status()


async def trained(python: Path, script: Path, log: Path, *arguments: object, **variables: str) -> dict[str, Any]:
    """Run a training to its end; return what it prints last."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    command = (str(python), str(script), *map(str, arguments))
    async with running(*command, log_path=log, core=None, **environment) as process:
        assert await process.wait() == 0, log.read_text()[-6000:]
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return found


@pytest.mark.timeout(7200, func_only=True)
async def test_grpo_learns_through_the_proxy(
    vllm: None, sglang: None, python: Path, run_proxy: RunProxy, tmp_path: Path
) -> None:
    """Reward rises as without it; each token is the engine's own, and bears the version of its step's weights."""
    steps, seeds = int(os.environ.get("TRAINING_STEPS", "30")), int(os.environ.get("TRAINING_SEEDS", "4"))
    model = ensure_model(128, 2, word_count=8, max_model_len=MAX_LEN)
    example, direct = ROOT / "docs/examples/training/grpo.py", ROOT / "tests/real/train_directly.py"
    runs: list[dict[str, Any]] = []
    recorded = ("--rollouts", "logprobs", "--rollout-keep-s", "7200", "--poll-interval-s", "1")
    async with engines(model, tmp_path) as pair, run_proxy(pair, *recorded) as proxy:
        for seed in range(seeds):
            folder = tmp_path / f"seed-{seed}"
            folder.mkdir()
            run: dict[str, Any] = {"seed": seed}
            for arm in ("through", "direct")[:: -1 if seed % 2 else 1]:  # each is first as often as the other
                given = (model, folder / f"weights-{arm}", steps, seed)
                if arm == "direct":
                    urls = (engine.url for engine in pair)
                    run[arm] = await trained(python, direct, folder / "direct.log", *given, *urls)
                    continue
                tapped = (tmp_path / "tap.jsonl").stat().st_size
                run[arm] = await trained(python, example, folder / "through.log", *given, THUNDERAGENT_PROXY=proxy.url)
                found = await rollouts_of(proxy.url, 64 * steps * seed)
                run |= check(found, (tmp_path / "tap.jsonl").read_text()[tapped:], steps)
            runs.append(run)
            print(json.dumps(run))
            if out := os.environ.get("TRAINING_RESULT"):
                Path(out).write_text(json.dumps({"steps": steps, "runs": runs}, indent=1) + "\n")
    if steps >= 30:
        for arm in ("through", "direct"):
            gained = [mean(run[arm]["rewards"][-5:]) - mean(run[arm]["rewards"][:5]) for run in runs]
            assert min(gained) > 0.05, (arm, gained)
            assert mean(gained) > 0.2, (arm, gained)


def check(found: list[dict[str, Any]], tap: str, steps: int) -> dict[str, int]:
    """Check what was recorded of a training; return how many turns each kind of engine answered, and what was compared.

    Each rollout is there, complete, with the weights of its step, and where vLLM answered with its core's own tokens.
    """
    compared, turns = check_tokens(found, tap), Counter[str]()
    assert len(found) == 64 * steps
    for each in found:
        assert each["complete"]
        version = each["program_id"].split("-")[1]
        for turn in each["turns"]:
            assert turn["weights_before"] == turn["weights_after"] == version, turn
            turns[turn["replica_id"]] += 1
    assert 0 < compared < turns.total(), "both engines answered"
    assert len(turns) == 2, turns
    return {"rollouts_count": len(found), "turns_count": turns.total(), "compared_tokens": compared}


async def rollouts_of(url: str, after: int) -> list[dict[str, Any]]:
    """Return the ended rollouts after one, with their turns."""
    found: list[dict[str, Any]] = []
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            query = {"view": "turns", "after": found[-1]["seq"] if found else after}
            if not (lines := (await client.get("/rollouts", params=query)).text.splitlines()):
                return found
            found += [json.loads(line) for line in lines]


def check_tokens(found: list[dict[str, Any]], tap: str) -> int:
    """Check that vLLM's core sampled just the tokens that are recorded of its replica; return how many."""
    made: dict[str, list[int]] = {}
    for line in tap.splitlines():
        said = json.loads(line)
        if "tokens" in said:
            made.setdefault(said["id"], []).extend(said["tokens"])
    compared = 0
    for each in found:
        for turn in each["turns"]:
            own = (
                [tokens for name, tokens in made.items() if f"-{turn['request_id']}-" in f"{name}-"]
                if turn["request_id"]
                else []
            )
            if own:
                assert [output["ids"] for output in turn["outputs"]] == own, turn
                compared += len(own[0])
    return compared
