"""Run a real vLLM or SGLang engine on one CPU core, with a small random model, in an environment of its own.

The model is a random Llama with a word-level tokenizer: generated text tokenises back to the generated tokens, so a
program's history hits the prefix cache as with a real model.

    python -m benchmarks.real_engine --setup                  # only make the environment and the model
    python -m benchmarks.real_engine --port 8101 --core 1     # run one engine until Ctrl-C
    python -m benchmarks.real_engine --engine sglang
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import aiohttp

from benchmarks.engine_kinds import KINDS, Vllm
from benchmarks.environments import COMPILES_ONCE, RealEngineError, cache_dir, file_lock, run_logged
from benchmarks.processes import tail

if TYPE_CHECKING:
    from benchmarks.engine_kinds import EngineKind


def require_free_port(port: int) -> None:
    """Raise RealEngineError if another server listens on the port: its health would be taken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RealEngineError(f"port {port} is taken") from error


def ensure_model(
    hidden_size: int,
    layers: int,
    intermediate_size: int | None = None,
    *,
    word_count: int = 2000,
    max_model_len: int = 8192,
    seed: int = 0,
    is_text: bool = False,
    kind: EngineKind | None = None,
) -> Path:
    """Return the folder of a random Llama with a word-level tokenizer; write it at the first call.

    The intermediate size is 3 times the hidden size unless given; the hidden size is a multiple of 64. `is_text`: its
    tokenizer is one for others' text. It is written by the environment of that kind, or vLLM's. Raises RealEngineError
    if it cannot be written.
    """
    parameters = {
        "hidden_size": hidden_size,
        "layers": layers,
        "intermediate_size": intermediate_size or 3 * hidden_size,
        "word_count": word_count,
        "max_model_len": max_model_len,
        "seed": seed,
        **({"is_text": True} if is_text else {}),
    }
    script = Path(__file__).with_name("real_model.py")
    digest = hashlib.sha256(json.dumps(parameters).encode() + script.read_bytes()).hexdigest()[:12]
    folder = cache_dir() / "models" / f"random-llama-{hidden_size}x{layers}-{digest}"
    if folder.exists():
        return folder
    python = (kind or Vllm()).ensure_environment()
    with file_lock(folder.with_suffix(".lock")):
        if folder.exists():
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            log = folder.with_suffix(".log")
            run_logged([str(python), str(script), str(made), json.dumps(parameters)], log, HF_HUB_OFFLINE="1")
            made.rename(folder)
    return folder


@dataclass(frozen=True)
class RealEngineConfig:
    """The settings of an engine: the model's shape, the size of the KV pool, and its place.

    The pool holds `pool_blocks * block_size` tokens and must hold one request of `max_model_len` tokens.
    """

    engine: str = "vllm"  # or sglang
    hidden_size: int = 512
    layers: int = 6
    intermediate_size: int | None = None  # None: 3 * hidden_size
    pool_blocks: int = 500
    block_size: int = 32  # tokens; vLLM's CPU attention takes multiples of 32
    max_model_len: int = 8192  # tokens of one request, prompt and output
    is_text: bool = False  # whether prompts are others' text, not words of our tokenizer
    max_batched_tokens: int = 2048  # tokens of one engine iteration
    port: int = 8101
    core: int | None = 1  # the CPU core it is pinned to; None: not pinned
    ready_timeout_s: float = 240.0
    tells_cached: bool = True  # whether usage says what was cached: no stock engine's does
    extra_args: tuple[str, ...] = ()  # more flags for the engine's command line
    extra_variables: tuple[tuple[str, str], ...] = ()  # of its environment

    @property
    def kind(self) -> EngineKind:
        """The properties of its kind."""
        return KINDS[self.engine]

    @property
    def pool_tokens(self) -> int:
        """Capacity of the KV pool in tokens."""
        return self.pool_blocks * self.block_size

    @property
    def url(self) -> str:
        """The engine's base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"


class RealEngine:
    """One engine's process group on loopback: ready inside `async with`, gone after it.

    Its output is appended to `log_path`. If this process dies first, the kernel ends the engine's API server,
    and the engine follows it.
    """

    def __init__(self, config: RealEngineConfig) -> None:
        self.config = config
        self.log_path = cache_dir() / "logs" / f"{config.engine}-{config.port}.log"
        self._process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        process = self._process
        state = f"pid {process.pid}" if process is not None and self.is_running else "not running"
        return f"<RealEngine {self.config.hidden_size}x{self.config.layers} at {self.url}, {state}>"

    @property
    def url(self) -> str:
        """The engine's base URL, without a slash at the end."""
        return self.config.url

    @property
    def is_running(self) -> bool:
        """Whether the engine's process lives; says nothing about its health."""
        return self._process is not None and self._process.returncode is None

    def processes(self) -> dict[int, bytes]:
        """Return the living processes of the engine: id to command line."""
        return {} if self._process is None else _group_members(self._process.pid)

    async def __aenter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.unlink(missing_ok=True)
        await self.start()
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the engine and wait until it is healthy; raise RealEngineError if it is not in time."""
        if self.is_running:
            raise RealEngineError(f"{self!r} is running already")
        require_free_port(self.config.port)
        command = await asyncio.to_thread(_engine_command, self.config)
        alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={
                    **os.environ,
                    **COMPILES_ONCE,
                    **alone,
                    **self.config.kind.variables,
                    **dict(self.config.extra_variables),
                },
                start_new_session=True,
            )
        try:
            await self._wait_until_healthy(self._process)
        except BaseException:
            await self.stop()
            raise

    async def stop(self, grace_s: float = 10.0) -> None:
        """Terminate the engine, and kill it after `grace_s`; harmless if it is gone."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
                await _wait_until_group_is_gone(process.pid, grace_s)
        await self.kill()

    async def kill(self) -> None:
        """Kill all its processes at once, as a crash would; connections break.

        Only Python's resource trackers are spared: they remove the others' shared memory and end by themselves.
        """
        process = self._process
        if process is None:
            return
        for pid, command in _group_members(process.pid).items():
            if b"resource_tracker" not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()
        await _wait_until_group_is_gone(process.pid, 5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._process = None

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, so that a run does not profit from the one before.

        Waits up to 60 s for requests in flight to end; raises RealEngineError if the engine still declines.
        """
        kind = self.config.kind
        deadline_s = time.monotonic() + 60
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with session.post(f"{self.url}{kind.reset_path}") as answer:
                        if kind.did_reset(answer.status, await answer.read()):
                            return
                if time.monotonic() > deadline_s:
                    raise RealEngineError("the engine did not reset its prefix cache")
                await asyncio.sleep(0.25)

    async def _wait_until_healthy(self, process: asyncio.subprocess.Process) -> None:
        deadline_s = time.monotonic() + self.config.ready_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline_s:
                if process.returncode is not None:
                    text = f"the engine ended with status {process.returncode}"
                    raise RealEngineError(f"{text}; end of {self.log_path}:\n{tail(self.log_path)}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.25)
        text = f"the engine was not healthy after {self.config.ready_timeout_s:.0f} s"
        raise RealEngineError(f"{text}; end of {self.log_path}:\n{tail(self.log_path)}")


def _group_members(group_id: int) -> dict[int, bytes]:
    """Return the living processes of a process group: id to command line."""
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state, _parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == group_id and state not in "ZX":
                members[int(folder.name)] = (folder / "cmdline").read_bytes()
    return members


async def _wait_until_group_is_gone(group_id: int, timeout_s: float) -> None:
    """Wait until no process of the group lives, at most about `timeout_s`."""
    interval_s = 0.05
    for _ in range(int(timeout_s / interval_s)):
        if not _group_members(group_id):
            return
        await asyncio.sleep(interval_s)


def _engine_command(config: RealEngineConfig) -> list[str]:
    """Return the engine's command line; makes the environment and the model if they are missing."""
    kind = config.kind
    python = kind.ensure_environment()
    shape = (config.hidden_size, config.layers, config.intermediate_size)
    model = ensure_model(*shape, max_model_len=config.max_model_len, is_text=config.is_text, kind=kind)
    pinning = [] if config.core is None else ["taskset", "--cpu-list", str(config.core)]
    server = [str(python), "-m", kind.module, "--host", "127.0.0.1", "--port", str(config.port)]
    return ["setpriv", "--pdeathsig", "TERM", *pinning, *server, *kind.options(config, model), *config.extra_args]


async def _serve(config: RealEngineConfig) -> None:
    """Run one engine until this process is told to stop."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with RealEngine(config) as engine:
        print(f"{engine!r} is ready; its log is {engine.log_path}", flush=True)
        await stopped.wait()


def main() -> None:
    """Set up, or run one engine in the foreground."""
    defaults = asdict(RealEngineConfig())
    parser = argparse.ArgumentParser(description="Run a real engine on one CPU core.")
    parser.add_argument("--engine", choices=KINDS, default=defaults["engine"])
    parser.add_argument("--setup", action="store_true", help="only make the environment and the model")
    for name, dest in (("--hidden", "hidden_size"), ("--layers", "layers"), ("--pool-blocks", "pool_blocks")):
        parser.add_argument(name, dest=dest, type=int, default=defaults[dest])
    for name in ("--block-size", "--max-model-len", "--port", "--core"):
        parser.add_argument(name, type=int, default=defaults[name[2:].replace("-", "_")])
    arguments = vars(parser.parse_args())
    only_setup = arguments.pop("setup")
    config = RealEngineConfig(**arguments)
    if only_setup:
        print(config.kind.ensure_environment())
        print(ensure_model(config.hidden_size, config.layers, max_model_len=config.max_model_len, kind=config.kind))
    else:
        asyncio.run(_serve(config))


if __name__ == "__main__":
    main()
