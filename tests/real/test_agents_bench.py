"""The benchmark of agents with their released packages: what it leaves when it is stopped, or killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.environments import RealEngineError
from tests.real.base_image import PACKAGES
from tests.real.docker_engine import DockerEngineError, ensure_docker
from tests.real.mini_swe_agent import ensure_mini_swe_agent
from tests.real.support import until

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable
    from typing import NoReturn

ROOT = Path(__file__).parents[2]
BEGUN_WITHIN_S = 480.0
"""How long engine, proxy and agents may take to begin: on a busy machine their imports alone take minutes."""
STOPPED_WITHIN_S = 60.0


@dataclass(frozen=True)
class Engine:
    """The Docker engine that a benchmark has started, as far as it shows from outside."""

    pid: int
    url: str
    bridge: str

    @property
    def root(self) -> Path:
        """Return the folder of its socket, data and mounts."""
        return Path(self.url.removeprefix("unix://")).parent

    def containers(self) -> list[str]:
        """Return the commands of its containers' own processes: they name its namespace, which is as its bridge."""
        return [words for _, words in _processes() if f" -namespace {self.bridge} " in words]

    def left(self) -> list[str]:
        """Return what is there of it: processes, also those that use it, mounts, its bridge and its folder."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        left = [words for _, words in _processes() if str(self.root) in words] + self.containers()
        left += [words for pid, words in _processes() if f"DOCKER_HOST={self.url}\0" in _environment_of(pid)]
        left += [each for each in mounts if each.startswith(str(self.root))]
        left += [self.bridge] if f" {self.bridge}:" in links else []
        return left + ([str(self.root)] if self.root.exists() else [])


def _processes() -> list[tuple[int, str]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append((int(path.parent.name), path.read_text().replace("\0", " ")))
    return found


def _environment_of(pid: int) -> str:
    """Return a process's variables, or nothing of one that is not there any more."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


def _engine_of(parent_pid: int) -> Engine | None:
    """Return the engine that is a child of a process; None before there is one."""
    for pid, words in _processes():
        if words.startswith("dockerd "):
            with contextlib.suppress(OSError):
                if f"\nPPid:\t{parent_pid}\n" in Path(f"/proc/{pid}/status").read_text():
                    options = dict(word.partition("=")[::2] for word in words.split())
                    return Engine(pid, options["--host"], options["--bridge"])
    return None


@asynccontextmanager
async def _benchmark(*arguments: str) -> AsyncIterator[Process]:
    """Run the benchmark as a person does, in a group of its own; kill it at the end of the block, if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.agents", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
def packages(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Have Docker and mini-SWE-agent; the first time takes a minute and is announced."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            ensure_docker(PACKAGES)
            ensure_mini_swe_agent()
    except (DockerEngineError, RealEngineError) as error:
        require_real(f"no agents in Docker: {error}")


@pytest.mark.timeout(BEGUN_WITHIN_S + 3 * STOPPED_WITHIN_S, func_only=True)
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "how",
    [*(pytest.param(each, marks=pytest.mark.nightly) for each in (signal.SIGTERM, signal.SIGINT)), signal.SIGKILL],
    ids=lambda each: each.name,
)
async def test_a_stopped_benchmark_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    """Engine, containers, bridge, mounts, agents, proxy: all go; SIGINT comes as from a terminal, to a whole group.

    After SIGKILL, which nobody can hear, others see to it.
    """
    arguments = ("--agents", "2", "--at-once", "2", "--sandboxes", "1", "--admitted", "0", "--arms", "own-left")
    engine: Engine | None = None
    async with _benchmark(*arguments, "--logs", str(tmp_path), "--name", "agents-stopped") as process:
        try:

            async def has_a_container() -> bool:
                nonlocal engine
                assert process.returncode is None, (await process.communicate())[0].decode()
                engine = engine or _engine_of(process.pid)
                return engine is not None and bool(engine.containers())

            await until(has_a_container, within_s=BEGUN_WITHIN_S)
            assert engine is not None
            if how is signal.SIGINT:
                os.killpg(process.pid, how)
            else:
                process.send_signal(how)
            async with asyncio.timeout(STOPPED_WITHIN_S):
                output = (await process.communicate())[0].decode()
            if how is signal.SIGKILL:
                assert process.returncode == -how, output

                async def is_gone() -> bool:
                    assert engine is not None
                    return not engine.left()

                with contextlib.suppress(TimeoutError):
                    await until(is_gone, within_s=STOPPED_WITHIN_S)
                assert engine.left() == []
                return
            assert engine.left() == [], output
            assert process.returncode == 1, output
            assert "ended by a signal" in output.splitlines()[-1]
        finally:
            if engine is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGTERM)
