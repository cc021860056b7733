"""NVIDIA Dynamo without a GPU: its mockers, which model vLLM in real time, behind its own frontend and routers.

All of it comes from PyPI into an environment of its own. Nothing else is needed: a folder is its discovery, and its
planes are TCP and ZeroMQ on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import aiohttp

from benchmarks.engine_kinds import MODEL_NAME
from benchmarks.environments import COMPILES_ONCE, RealEngineError, cache_dir, ensure_environment, made_once, run_logged
from benchmarks.processes import running, tail
from thunderagent.provision.base import free_port

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence

VERSION: Final = "1.6.1"
READY_S = 60.0

# What importing the modules used here asks for; the package's own list is for GPUs.
_IMPORTS = ("pyyaml", "packaging", "prometheus_client", "aiohttp", "pyzmq", "psutil", "msgspec", "redis", "kubernetes")
_LOOPBACK = "127.0.0.1"
_WRAPPED_NAME = "wrapped"
"""The engines' model name behind the ThunderAgent router: what the frontend serves is the router's."""


class Router(StrEnum):
    """What chooses the engine of a turn."""

    ROUND_ROBIN = "round-robin"
    KV = "kv"
    THUNDERAGENT = "thunderagent"


@dataclass(frozen=True)
class MockerConfig:
    """The engines: their pool in tokens, and their core."""

    kv_tokens: int = 131_072
    block_size: int = 32
    max_batched_tokens: int = 8192
    core: int | None = None
    is_text: bool = False
    """Whether prompts are text that others bring, not our words."""


def python() -> Path:
    """Return its interpreter; install it at the first call. Raises RealEngineError."""
    return ensure_environment(
        "dynamo",
        [f"ai-dynamo-runtime=={VERSION}", *_IMPORTS, "transformers", "uvloop"],
        "about 500 MB, a minute",
        ["-m", "pip", "install", "--no-cache-dir", "--no-compile", "--no-deps", f"ai-dynamo=={VERSION}"],
        ["-c", "import dynamo.mocker.main, dynamo.frontend.main"],
    )


def model_folder(*, is_text: bool = False) -> Path:
    """Return a folder with a tokenizer of `benchmarks.real_model`, for engines that need no weights."""
    script = Path(__file__).with_name("real_model.py")
    shape = {"hidden_size": 256, "layers": 4, "intermediate_size": 768, "max_model_len": 262_144}
    parameters = json.dumps({**shape, "word_count": 2000, "seed": 0, "has_weights": False, "is_text": is_text})

    def make(folder: Path) -> None:
        log = folder.with_name(folder.name + ".log")
        run_logged([str(python()), str(script), str(folder), parameters], log, HF_HUB_OFFLINE="1")

    return made_once("text" if is_text else "words", [VERSION, script.read_text(), parameters], make)


@contextlib.asynccontextmanager
async def frontends(config: MockerConfig, count: int) -> AsyncIterator[list[str]]:
    """Run so many mockers, each behind a frontend of its own; yield the frontends' URLs."""
    async with contextlib.AsyncExitStack() as stack:
        groups = [cluster(config, 1, Router.ROUND_ROBIN, name=f"mocker-{number}") for number in range(count)]
        # One after the other: on few cores they would wait for each other.
        yield [await stack.enter_async_context(group) for group in groups]


@contextlib.asynccontextmanager
async def cluster(config: MockerConfig, count: int, router: Router, *, name: str = "cluster") -> AsyncIterator[str]:
    """Run so many mockers behind one frontend with that router; yield its URL when it serves all of them."""
    interpreter, model = str(python()), str(model_folder(is_text=config.is_text))
    is_wrapped = router is Router.THUNDERAGENT
    port = free_port()
    logs = cache_dir() / "logs"
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(TemporaryDirectory(prefix="dynamo-"))

        async def start(part: str, *arguments: str, core: int | None = config.core) -> tuple[Process, Path]:
            log = logs / f"dynamo-{name}-{part}.log"
            command = [interpreter, "-m", *arguments]
            process = await stack.enter_async_context(running(*command, log_path=log, core=core, **_variables(store)))
            return process, log

        served = _WRAPPED_NAME if is_wrapped else MODEL_NAME
        parts = [await start(f"mocker-{number}", *mocker_words(config, model, served)) for number in range(count)]
        if is_wrapped:
            parts.append(await start("router", *router_words(config, model), core=None))
        mode = Router.ROUND_ROBIN if is_wrapped else router
        parts.append(await start("frontend", *frontend_words(port, mode)))
        url = f"http://{_LOOPBACK}:{port}"
        await _until_ready(url, count, parts)
        yield url


def mocker_words(config: MockerConfig, model: str, served_name: str) -> list[str]:
    """Return the module and options of one engine."""
    named = {
        "--model-path": model,
        "--model-name": served_name,
        "--num-gpu-blocks-override": config.kv_tokens // config.block_size,
        "--block-size": config.block_size,
        "--max-num-batched-tokens": config.max_batched_tokens,
        "--speedup-ratio": 1,
        "--num-workers": 1,
    }
    return ["dynamo.mocker", *(str(word) for pair in named.items() for word in pair)]


def router_words(config: MockerConfig, model: str) -> list[str]:
    """Return the module and options of its ThunderAgent router, whose settings are its own."""
    engines = ("--endpoint", "dynamo.backend.generate", "--router-block-size", str(config.block_size))
    return ["dynamo.thunderagent_router", *engines, "--model-name", MODEL_NAME, "--model-path", model]


def frontend_words(port: int, router: Router) -> list[str]:
    """Return the module and options of a frontend."""
    return ["dynamo.frontend", "--http-host", _LOOPBACK, "--http-port", str(port), "--router-mode", router]


def _variables(store: str) -> dict[str, str]:
    """Return the variables by which processes find each other through a folder, on loopback alone."""
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST", "DYN_EVENT_PLANE_HOST")
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": store,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "warn",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        **COMPILES_ONCE,
        **dict.fromkeys(hosts, _LOOPBACK),
    }


async def _until_ready(url: str, count: int, parts: Sequence[tuple[Process, Path]]) -> None:
    """Wait until the frontend knows all engines and answers a turn; raise RealEngineError if one ends, or in time."""
    deadline_s = time.monotonic() + READY_S
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "w0"}], "max_tokens": 1}
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with session.get("/health") as answer:
                    instances = (await answer.json()).get("instances", [])
                found = [
                    one for one in instances if (one.get("component"), one.get("endpoint")) == ("backend", "generate")
                ]
                if len(found) == count:
                    async with session.post("/v1/chat/completions", json=body) as answer:
                        if answer.status == 200:
                            return
            for process, log in parts:
                if process.returncode is not None:
                    raise RealEngineError(f"a part of Dynamo ended; end of {log}:\n{tail(log)}")
            if time.monotonic() > deadline_s:
                ends = "\n".join(tail(log, 5) for _, log in parts)
                raise RealEngineError(f"Dynamo was not ready after {READY_S:.0f} s; its logs end:\n{ends}")
            await asyncio.sleep(0.25)
