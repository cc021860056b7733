"""A calibration, from the command to the file: its findings on an engine, and its errors."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.integration.support import engine, until
from tests.loopback import on_loopback
from tests.virtual_time import VirtualTimeLoop
from thunderagent.calibrate.measurement import Calibration, Settings, calibrate
from thunderagent.cli import main
from thunderagent.errors import CalibrationError
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import IterationWork, TimingProfile, profile, profile_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def start_command(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "thunderagent", "calibrate", *options, stdout=PIPE, stderr=PIPE
    )


WORKS = (
    IterationWork(decode_count=1, decode_context_tokens=100),
    IterationWork(decode_count=4, decode_context_tokens=8000),
    IterationWork(decode_count=8, decode_context_tokens=16_000),
    IterationWork(prefill_tokens=300, attention_pairs=300 * 150.0),
    IterationWork(prefill_tokens=2048, attention_pairs=2048 * 1024.0),
    IterationWork(prefill_tokens=300, attention_pairs=300 * 1650.0, decode_count=3, decode_context_tokens=5000),
)


def worst_error_ratio(found: TimingProfile, true: TimingProfile) -> float:
    return max(abs(found.iteration_s(work) / true.iteration_s(work) - 1) for work in WORKS)


def test_a_calibrated_profile_predicts_the_engine_that_was_measured() -> None:
    """The arrival times of the engine's answers yield the iteration times that it keeps."""
    loop = VirtualTimeLoop()
    true = profile("demo")
    config = EngineConfig(kv_tokens=16_000, block_size=16, max_num_batched_tokens=2048, timing=true)

    async def measured() -> Calibration:
        async with running(ServerConfig(config, port=0, clock=loop.time)) as url:
            return await calibrate(url, Settings(60.0, max_num_batched_tokens=2048), clock=loop.time)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(measured()).timing
    assert worst_error_ratio(found, true) < 0.01
    for cost in ("base_s", "prefill_token_s", "decode_request_s"):
        assert getattr(found, cost) == pytest.approx(getattr(true, cost), rel=0.01), cost
    assert (found.kv_tokens, found.block_size, found.max_num_batched_tokens) == (15_984, 16, 2048)
    assert found.request_overhead_s < 0.05
    assert "simulated on vLLM 0." in found.source
    assert "2048 tokens in an iteration at most (as given)" in found.source


@pytest.mark.timeout(180)
async def test_the_command_writes_a_profile_once(tmp_path: Path) -> None:
    """It prints its findings; an existing file stays."""
    out = tmp_path / "found.toml"
    async with engine(profile="demo") as process:
        options = ("--url", process.url, "--seconds", "1", "--max-num-batched-tokens", "2048", "--out", str(out))
        command = await start_command(*options)
        printed, errors = (each.decode() for each in await command.communicate())
        assert command.returncode == 0, errors
        assert "simulated on vLLM 0." in profile_from(str(out)).source
        again = await start_command(*options)
        assert b"is there already" in (await again.communicate())[1]
        assert again.returncode == 2
    assert "for each uncached prompt token" in printed
    assert "prefill on context" in printed


async def test_ctrl_c_ends_it_and_nothing_is_written(tmp_path: Path) -> None:
    made_up = MadeUpEngine()
    async with served(made_up) as url:
        command = await start_command("--url", url, "--out", str(tmp_path / "x.toml"))
        await until(lambda: len(made_up.prompts) > 3 or command.returncode is not None, within_s=60)
        command.send_signal(signal.SIGINT)
        _, errors = await command.communicate()
    assert command.returncode == 130
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


# --- an engine that a test makes up


@dataclass
class MadeUpEngine:
    """Speaks just enough of OpenAI's API, and takes 2 ms for a token and 50 µs for one of a prompt."""

    max_model_len: int | None = 2048
    most_tokens: int | None = None
    prompt_token_s: float = 0.00005
    metrics: str | None = None
    version: str | None = None
    api_key: str | None = None
    takes_ids: bool = True
    status: int = 200
    error_after_tokens: int | None = None
    prompts: list[Any] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        if not self.knows(request):
            return web.Response(text="who are you?", status=401)
        return web.json_response({"data": [{"id": "made-up", "max_model_len": self.max_model_len}]})

    def knows(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def say_version(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.version, status=404 if self.version is None else 200)

    async def say_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=404 if self.metrics is None else 200)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["min_tokens"] == body["max_tokens"]
        assert body["ignore_eos"]
        assert self.knows(request)
        if self.status != 200:
            return web.Response(text="out of order", status=self.status)
        if not self.takes_ids and not isinstance(body["prompt"], str):
            return web.Response(text="text only", status=400)
        self.prompts.append(body["prompt"])
        prompt = body["prompt"].split() if isinstance(body["prompt"], str) else body["prompt"]
        if self.most_tokens is not None and len(prompt) + body["max_tokens"] > self.most_tokens:
            return web.Response(text="too long", status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.prompt_token_s * len(prompt))
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            event = {"choices": [{"text": "a"}]} if number != self.error_after_tokens else {"error": "broken"}
            await response.write(b"data: %s\n\n" % json.dumps(event).encode())
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        await response.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        return response


@asynccontextmanager
async def served(made_up: MadeUpEngine) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 24)
    app.add_routes(
        [
            web.get("/v1/models", made_up.models),
            web.get("/metrics", made_up.say_metrics),
            web.get("/version", made_up.say_version),
            web.post("/v1/completions", made_up.complete),
        ]
    )
    async with on_loopback(app) as url:
        yield url


async def calibrated(made_up: MadeUpEngine, *, budget_s: float = 0.5, api_key: str | None = None) -> Calibration:
    async with served(made_up) as url:
        return await calibrate(url, Settings(budget_s), api_key=api_key)


async def test_an_engine_that_is_not_vllm_is_measured() -> None:
    """The engine has no known metrics, no version and no context limit, and requires a key."""
    made_up = MadeUpEngine(
        max_model_len=None, most_tokens=400, metrics="other:requests 1.0\n", version="<html>", api_key="secret"
    )
    calibration = await calibrated(made_up, budget_s=2.0, api_key="secret")
    timing = calibration.timing
    assert "made-up, " in timing.source
    assert "vLLM" not in timing.source
    assert (timing.kv_tokens, timing.block_size) == (None, None)
    assert any("how large its KV pool is, nor its blocks" in warning for warning in calibration.warnings)
    assert timing.iteration_s(IterationWork(decode_count=1, decode_context_tokens=50)) > 0.001
    lengths = [len(prompt) for prompt in made_up.prompts]
    assert lengths.count(512) <= 1  # it was refused
    assert 256 in lengths


async def test_an_engine_too_slow_to_find_its_limit_is_asked_for_no_more_than_it_took() -> None:
    """Prompts behind a context, and what is decoded there, stay within the longest prompt that it accepted."""
    made_up = MadeUpEngine(max_model_len=None, most_tokens=400, prompt_token_s=0.0005)
    await calibrated(made_up)
    assert max(len(prompt) for prompt in made_up.prompts) == 256


async def test_a_broken_line_of_metrics_says_nothing_and_the_others_are_read() -> None:
    """The first block of vLLM's pool is never a request's: it does not count."""
    made_up = MadeUpEngine(
        metrics='vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="200"} 1.0\n'
        'vllm:num_requests_running{engine="0" 3.0\n'
        'vllm:num_requests_running{engine="0", ="b"} 3.0\n'
        'vllm:num_requests_running{engine="0"} 3.0 ' + "9" * 400 + "\n"
        'vllm:num_requests_waiting{engine="0"} NaN\n',
        version='{"version": "1.2"}',
    )
    calibration = await calibrated(made_up)
    assert "made-up on vLLM 1.2" in calibration.timing.source
    assert (calibration.timing.kv_tokens, calibration.timing.block_size) == (199 * 16, 16)
    assert calibration.facts.requests_count is None


async def test_an_engine_that_refuses_token_ids_is_sent_text() -> None:
    """Values that the engine does not report are shown as missing."""
    made_up = MadeUpEngine(takes_ids=False)
    calibration = await calibrated(made_up)
    assert all(isinstance(prompt, str) for prompt in made_up.prompts)
    assert max(len(prompt.split()) for prompt in made_up.prompts) < 2048
    said = " | ".join(calibration.warnings)
    assert "takes no token ids" in said
    assert "does not say how many requests" in said
    assert "does not say how large its KV pool is" in said
    assert "does not say what was cached" in said
    assert calibration.timing.kv_tokens is None


async def test_a_busy_engine_is_warned_of_and_no_request_is_longer_than_its_context() -> None:
    made_up = MadeUpEngine(max_model_len=500, metrics='vllm:num_requests_running{engine="0"} 3.0\n')
    calibration = await calibrated(made_up)
    assert any("busy with other requests" in warning for warning in calibration.warnings)
    assert any("2048 was assumed" in warning for warning in calibration.warnings)  # no prompt showed the limit
    assert "2048 tokens in an iteration at most (assumed)" in calibration.timing.source
    assert max(map(len, made_up.prompts)) < 500
    assert len({tuple(prompt[:16]) for prompt in made_up.prompts}) > len(made_up.prompts) / 2


RANKS = "".join(f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="None"}} 1.0\n' for rank in range(2))


@pytest.mark.parametrize(
    ("made_up", "says"),
    [
        (MadeUpEngine(status=503), r"http://127.0.0.1:\d+/v1/completions answered 503: out of order"),
        (MadeUpEngine(status=400), r"/v1/completions answered 400: out of order"),
        (MadeUpEngine(error_after_tokens=2), r"/v1/completions broke off: broken"),
        (MadeUpEngine(max_model_len=100), "a context of 100 tokens is too short"),
        (MadeUpEngine(metrics=RANKS), "has 2 data-parallel ranks behind one URL"),
        (MadeUpEngine(api_key="secret"), r"http://127.0.0.1:\d+/v1/models answered 401: who are you\?"),
    ],
)
async def test_unmeasurable_figure_is_reported_with_its_reason(made_up: MadeUpEngine, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        await calibrated(made_up)


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("--url", "http://127.0.0.1:9"), 1, "no engine answers at http://127.0.0.1:9/v1/models"),
        (("--url", "127.0.0.1:9"), 2, "--url needs http://HOST:PORT, not '127.0.0.1:9'"),
        (("--url", "http://127.0.0.1:9", "--seconds", "0"), 2, "--seconds must be a positive number"),
        (("--url", "http://127.0.0.1:9", "--max-num-batched-tokens", "0"), 2, "must be at least 1, got 0"),
        (("--url", "http://127.0.0.1:99999"), 1, "no engine answers at http://127.0.0.1:99999/v1/models"),
        (("--url", "http://127.0.0.1:9", "--api-key", "a\nb"), 2, "--api-key must be visible ASCII letters"),
        (("--url", "http://127.0.0.1:9", "--vocabulary", "5-9"), 2, "not a range of at least 100 token ids"),
        (("--url", "http://127.0.0.1:9", "--out", "no/such/folder/x.toml"), 2, "there is no folder no/such/folder"),
        (("--url", "http://127.0.0.1:9", "--out", "x.json"), 2, "--out needs a name that ends in .toml"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_so_in_a_line(
    options: tuple[str, ...], status: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exited = main(["calibrate", "--out", str(tmp_path / "x.toml"), *options])
    except SystemExit as error:  # argparse refuses this way
        exited = int(error.code or 0)
    assert exited == status
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
