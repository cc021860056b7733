"""mini-swe-agent in an environment of its own, an image for its container, and a replica that follows a script.

mini-swe-agent and litellm need many packages that the proxy must not have, so they are in a virtual environment outside
the checkout (about 0.7 GB, made once).
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from aiohttp import web

from benchmarks.environments import ensure_environment
from tests.loopback import on_loopback
from tests.real.docker_engine import DockerEngine, DockerEngineError, busybox_root, ensure_docker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "mini_swe_agent.py"
MODEL_NAME = "scripted"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise litellm fetches prices on import


def requirements() -> list[str]:
    """Return the example's requirements: versions that are known to work together."""
    found = re.search(r"^ *pip install (.+)$", EXAMPLE.read_text(), re.MULTILINE)
    assert found is not None, EXAMPLE
    return found[1].split()


def ensure_mini_swe_agent() -> Path:
    """Return the Python interpreter of an environment with mini-swe-agent; make it at the first call.

    Takes about a minute once. Raises RealEngineError if the installation fails.
    """
    wanted = requirements()
    # litellm 1.106 lacks a dependency of its tool calls, and reports that only at the first one.
    modules = "httpx2, minisweagent.models.litellm_model, litellm.responses.mcp.chat_completions_handler"
    imports = ["-c", f"import {modules}"]
    return ensure_environment("mini-swe-agent", wanted, "about 0.7 GB, a minute", imports, **_OFFLINE)


def agent_environment(docker_url: str, folder: Path) -> dict[str, str]:
    """Return the environment of an agent that contacts only this machine, and keeps its files in `folder`."""
    return {
        **os.environ,
        "DOCKER_HOST": docker_url,
        "DOCKER_CONFIG": str(folder),
        **_OFFLINE,
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # a test must see the first failure
        "MSWEA_SILENT_STARTUP": "1",
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def engine_with_bash(image: str, require_real: Callable[[str], NoReturn]) -> Iterator[DockerEngine]:
    """Run a Docker engine that has an image of this name, with a shell by the name of bash."""
    try:
        ensure_docker()
        with DockerEngine() as engine:
            with closing(engine.client()) as client:
                client.import_image_from_data(root_with_bash(), repository=image)
            yield engine
    except DockerEngineError as error:
        require_real(f"no Docker: {error}")


def root_with_bash() -> bytes:
    """Return, for an import, the root folder of an image with busybox, where `bash` is busybox's shell."""
    root, script = io.BytesIO(busybox_root()), b'#!/bin/sh\nexec sh "$@"\n'
    with tarfile.open(fileobj=root, mode="a") as archive:
        entry = tarfile.TarInfo("bin/bash")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
    return root.getvalue()


@dataclass
class ScriptedReplica:
    """A replica like vLLM, whose model calls the tool `bash` with one command after another.

    The history of a request selects the next command, so it serves any number of programs at a time.
    """

    commands: Sequence[str]
    asked: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve on a loopback port during the block."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        async with on_loopback(app, shutdown_timeout=0) as self.url:
            yield self

    def turns_of(self, program_id: str) -> list[dict[str, Any]]:
        """Return the bodies of one program's turns, in order."""
        return [body for headers, body in self.asked if headers.get("X-Program-ID") == program_id]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text='vllm:cache_config_info{kv_cache_size_tokens="100000"} 1.0\nvllm:num_requests_running 0.0\n'
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((dict(request.headers), body))
        done_count = sum(message["role"] == "assistant" for message in body["messages"])
        call = {"name": "bash", "arguments": json.dumps({"command": self.commands[done_count]})}
        message = {
            "role": "assistant",
            "content": f"Step {done_count + 1}.",
            "tool_calls": [{"id": f"call-{done_count}", "type": "function", "function": call}],
        }
        prompt_tokens = len(json.dumps(body["messages"])) // 4
        return web.json_response(
            {
                "id": f"chat-{len(self.asked)}",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL_NAME,
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": 20,
                    "total_tokens": prompt_tokens + 20,
                },
            }
        )
