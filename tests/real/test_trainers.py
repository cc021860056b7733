"""The released clients of trainers, SkyRL's `RemoteInferenceClient` and verifiers' `TrainClient`; and trainers' types.

The trainers themselves need GPUs; these clients are the part that talks to the proxy. Its engines are scripted.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import enum
import json
import os
import typing
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from benchmarks.environments import RealEngineError, ensure_environment
from tests.integration.support import post, until
from tests.integration.trained_engine import continuation, trained_engines
from thunderagent.client import rollouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path
    from typing import NoReturn

VERIFIERS = "verifiers==0.4.0"
SKYRL = "skyrl==0.3.0"
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def python(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> Path:
    """Make one environment with both; the first time takes a minute and is announced.

    SkyRL's other dependencies are for its training.
    """
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    alone = ("-m", "pip", "install", "--no-cache-dir", "--no-deps", SKYRL)
    try:
        with capture.global_and_fixture_disabled():
            return ensure_environment("trainers", [VERIFIERS], "about 0.6 GB, a minute", alone)
    except RealEngineError as error:
        require_real(f"no trainers' clients: {error}")


@asynccontextmanager
async def script(python: Path, source: str, *arguments: object) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a script during the block; the task returns the JSON that it prints last."""
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-c", source, *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environment)

    async def result() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return json.loads(output.splitlines()[-1])

    task = asyncio.create_task(result())
    try:
        yield task
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.gather(task, return_exceptions=True)


SKYRL_SCRIPT = """
import asyncio, json, sys, types
from pathlib import Path

import aiohttp
import skyrl

# The package around the client imports another API of SkyRL's, which Python 3.11 cannot.
backends = types.ModuleType("skyrl.backends")
backends.__path__ = [str(Path(skyrl.__file__).parent / "backends")]
sys.modules[backends.__name__] = backends
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

PROXY = sys.argv[1]


async def asked(path):
    async with aiohttp.ClientSession() as session, session.get(PROXY + path) as response:
        return await response.json()


async def loaded(count):
    while (await asked("/v1/loads"))["aggregate"]["total_reqs"] != count:
        await asyncio.sleep(0.01)


async def main():
    urls = [worker["url"] for worker in (await asked("/workers"))["workers"]]
    client = RemoteInferenceClient(proxy_url=PROXY, server_urls=urls, data_parallel_size=1, model_name="policy")

    def generate(names, version):
        prompts = [[1, 2, 3 + number] for number in range(len(names))]
        sampling = {"max_tokens": 8, "logprobs": 1}
        batch = {"prompt_token_ids": prompts, "sampling_params": sampling, "session_ids": names, "cache_salt": version}
        return client.generate(batch, model="policy")

    async with client:
        sizes = await client.get_world_size()
        first = asyncio.create_task(generate(["task-1_0", "task-1_1"], "0"))
        await loaded(2)
        await client.pause()
        late = asyncio.create_task(generate(["task-2_0"], "0"))
        await loaded(3)
        await client.start_weight_update()
        await client.update_weights_nccl({"names": ["w"]})
        await client.finish_weight_update()
        await client.resume()
        answers = [*(await first)["response_ids"], *(await late)["response_ids"]]
        for name in ("task-1_0", "task-1_1", "task-2_0", "task-1_0", "never-seen"):
            await client.finish_session(name)
        left = (await asked("/programs"))["total"]
        again = (await generate(["task-1_0"], "1"))["response_ids"]
        await client.finish_session("task-1_0")
    print(json.dumps({"sizes": sizes, "answers": answers, "left": left, "again": again}))


asyncio.run(main())
"""


async def test_skyrl_s_client_updates_weights_in_mid_generation(python: Path) -> None:
    """Turns in flight continue after the pause, a new one meanwhile waited, and sessions end and come back."""
    async with trained_engines(gate_open=False) as (proxy, engines, _):
        async with script(python, SKYRL_SCRIPT, proxy.url) as result:
            await until(
                lambda: result.done() or sum(("/resume", None) in each.told for each in engines) == 2, within_s=180
            )
            for engine in engines:
                engine.open_gate()
            said = await result
        assert said == {
            "sizes": [2, 1],
            "answers": [continuation([3], 8), continuation([4], 8), continuation([3], 8)],
            "left": 0,
            "again": [continuation([3], 8)],
        }
        for engine in engines:
            calls = [target for target, _ in engine.told if target != "/detokenize"]
            assert calls == ["/pause?mode=keep&clear_cache=false", *["/collective_rpc"] * 3, "/resume"]
        assert {call.header("X-Session-ID") for engine in engines for call in engine.turns} == {
            "task-1_0",
            "task-1_1",
            "task-2_0",
        }


VERIFIERS_SCRIPT = """
import asyncio, json, sys

from renderers import DefaultRendererConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

PROXY, FOLDER = sys.argv[1:]
words = {f"w{number}": number for number in range(100)}
tokenizer = Tokenizer(models.WordLevel({**words, "[unk]": 100, "[end]": 101}, unk_token="[unk]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[unk]", eos_token="[end]")
fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
fast.save_pretrained(FOLDER)


async def main():
    client = TrainClient(
        TrainClientConfig(
            base_url=PROXY + "/v1", api_key_var="NONE", renderer=DefaultRendererConfig(), renderer_model_name=FOLDER
        )
    )
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    completions = []
    for version in ("0", "1"):
        response = await client.get_response(
            ChatDialect(),
            {"model": "policy", "messages": messages},
            SamplingConfig(max_tokens=4, cache_salt=version),
            session_id="trace-1",
        )
        completions.append(response.tokens.completion_ids)
        messages.append({"role": "assistant", "content": response.message.content})
        messages.append({"role": "user", "content": "w50"})
    await client.close()
    print(json.dumps(completions))


asyncio.run(main())
"""


async def test_verifiers_client_is_one_program_for_each_trace(python: Path, tmp_path: Path) -> None:
    """It reads the engine's limit from our list of models; its turns carry tokens, the trace's id and the salt."""
    async with trained_engines() as (proxy, engines, _):
        async with script(python, VERIFIERS_SCRIPT, proxy.url, tmp_path / "tokenizer") as result:
            assert await result == [continuation([3], 4), continuation([50], 4)]
        calls = [call for engine in engines for call in engine.turns]
        assert {call.header("X-Session-ID") for call in calls} == {"trace-1"}
        asked = [call.json() for call in calls]
        assert [body["token_ids"] for body in asked] == [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 50]]
        assert [body["cache_salt"] for body in asked] == ["0", "1"]
        assert min(len(engine.turns) for engine in engines) == 0  # both on the same replica
        answer = await post(proxy.url, "/finish_session?session_id=trace-1")
        assert answer.json()["released"] is True


TYPES = (
    "verl==0.9.1",
    "skyrl==0.4.0",
    "trl==1.16.0",
    "verifiers==0.4.0",
    "nemo-gym==0.7.0",
    "rllm-model-gateway==0.1.0",
)
"""Of which only the sources are read: what they import needs GPUs, or other versions of Python."""


@pytest.fixture(scope="module")
def sources(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> Path:
    """Unpack their wheels, and return the folder."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    install = (
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--no-deps",
        "--no-compile",
        "--ignore-requires-python",
        *TYPES,
    )
    try:
        with capture.global_and_fixture_disabled():
            python = ensure_environment("trainer-types", ["packaging"], "about 40 MB, half a minute", install)
    except RealEngineError as error:
        require_real(f"no trainers' packages: {error}")
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def released(source: Path, *names: str) -> dict[str, Any]:
    """Return classes of a file, by name, with its constants; `Any` stands for all else that it has or imports."""
    found: dict[str, Any] = {**vars(typing), **vars(pydantic), **vars(enum)}
    for node in ast.parse(source.read_text()).body:
        is_constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if is_constant or (isinstance(node, ast.ClassDef) and node.name in names):
            code = compile(ast.Module([node], []), str(source), "exec", dont_inherit=True)
            found |= {name: Any for name in _named(code) if name not in found and not hasattr(builtins, name)}
            exec(code, found)
    return found


def _named(code: CodeType) -> set[str]:
    return {*code.co_names, *(name for each in code.co_consts if isinstance(each, CodeType) for name in each.co_names)}


PLACE: dict[str, Any] = {"link": "root", "branch_id": "", "model": "m", "began_at": 1.0, "total_s": 0.5}
TURNS: dict[str, Any] = {
    "program_id": "p",
    "turns": [
        {
            **PLACE,
            "seq": number,
            "request_id": f"r{number}",
            "parent": number - 1,
            "parent_choice": 0,
            "shared_tokens": 3 * number,
            "prompt_new_ids": [1, 2],
            "kept": True,
            "weights_after": "7",
            "outputs": [{"ids": [5], "logprobs": [-0.5], "finish": "stop", "spans": []}],
        }
        for number in range(2)
    ],
}
SAMPLES: dict[str, Any] = {
    "program_id": "p",
    "group_id": "g",
    "verdict": "ok",
    "mask_sample": False,
    "lag_count": 0,
    "samples": [
        {
            "turns": [0, 1],
            "prompt_tokens": 2,
            "ids": [1, 2, 5, 1, 2, 5],
            "mask": [0, 0, 1, 0, 0, 1],
            "logprobs": [0.0, 0.0, -0.5, 0.0, 0.0, -0.5],
            "spans": [],
            "finish": "stop",
            "link": "root",
        }
    ],
}


def test_adapters_make_the_fields_of_the_released_types(sources: Path) -> None:
    """Each row is taken by the class itself, with no field that it does not have."""
    of_verl = released(sources / "verl/experimental/agent_loop/agent_loop.py", "AgentLoopMetrics", "AgentLoopOutput")
    of_verifiers = released(sources / "verifiers/v1/types.py", "TurnTokens")
    of_gym = released(sources / "nemo_gym/token_id_capture/records.py", "ParentResolutionStatus", "TokenEntry")
    of_rllm = released(sources / "rllm_model_gateway/models.py", "TraceRecord")
    for made, rows in (
        (of_verl["AgentLoopOutput"], rollouts.for_verl(SAMPLES)),
        (of_verifiers["TurnTokens"], rollouts.for_verifiers(TURNS)),
        (of_gym["TokenEntry"], rollouts.for_nemo_gym(TURNS)),
        (of_rllm["TraceRecord"], rollouts.for_rllm(TURNS)),
    ):
        assert rows
        for row in rows:
            assert row.keys() <= made.model_fields.keys()
            taken = made.model_validate(row)
            assert {key: value for key, value in taken.model_dump().items() if key in row and key != "metrics"} == {
                key: value for key, value in row.items() if key != "metrics"
            }
    assert rollouts.for_nemo_gym(TURNS)[1]["prompt_token_ids"] == [1, 2, 5, 1, 2]


def test_adapters_make_the_keys_that_trainers_read(sources: Path) -> None:
    """Where a trainer takes a dict: SkyRL names all keys, TRL those that must be there."""
    tree = ast.parse((sources / "skyrl/train/generators/base.py").read_text())
    (output,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GeneratorOutput"]
    keys = {
        node.target.id for node in output.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    made = rollouts.for_skyrl([SAMPLES])
    assert made.keys() - keys == {"program_ids"}
    without = {**SAMPLES, "samples": [{**SAMPLES["samples"][0], "logprobs": None}]}
    assert rollouts.for_skyrl([without])["rollout_logprobs"] is None
    trainer = (sources / "trl/trainer/grpo_trainer.py").read_text()
    assert 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}' in trainer
    assert 'extra_fields.pop("env_mask"' in trainer
    assert {"prompt_ids", "completion_ids", "logprobs", "env_mask"} <= rollouts.for_trl([SAMPLES]).keys()
