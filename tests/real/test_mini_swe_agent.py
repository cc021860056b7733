"""mini-swe-agent as in the documentation: turns through the proxy, tools in Docker, nothing left after the release."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.environments import RealEngineError
from tests.real.mini_swe_agent import (
    EXAMPLE,
    MODEL_NAME,
    SUBMIT,
    ScriptedReplica,
    agent_environment,
    engine_with_bash,
    ensure_mini_swe_agent,
)
from tests.real.support import metrics, until

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import NoReturn

    from benchmarks.processes import Server
    from tests.real.docker_engine import DockerEngine

    RunExample = Callable[[Server, str], AbstractAsyncContextManager[Process]]

# Docker's client leaves its socket open when it cannot connect, as while the engine starts.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

IMAGE = "thunderagent-test-bash"
POEM = "a turn waits its turn"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> Path:
    """Make mini-swe-agent's environment; the first time takes a minute and is announced."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            return ensure_mini_swe_agent()
    except RealEngineError as error:
        require_real(f"no mini-swe-agent: {error}")


@pytest.fixture(scope="module")
def engine(require_real: Callable[[str], NoReturn]) -> Iterator[DockerEngine]:
    """Run a Docker engine with an image that has mini-swe-agent's requirements."""
    with engine_with_bash(IMAGE, require_real) as engine:
        yield engine


@pytest.fixture
async def replica() -> AsyncIterator[ScriptedReplica]:
    """Run a model that writes a file, reads it, and submits it."""
    commands = [f"echo '{POEM}' > /poem.txt", "cat /poem.txt", f"{SUBMIT} && cat /poem.txt"]
    async with ScriptedReplica(commands).running() as replica:
        yield replica


@pytest.fixture
async def proxy(
    engine: DockerEngine,
    replica: ScriptedReplica,
    run_proxy: Callable[..., AbstractAsyncContextManager[Server]],
) -> AsyncIterator[Server]:
    """Run a proxy in front of that model, which reclaims what programs leave in Docker."""
    async with run_proxy((replica,), "--sandboxes", "docker", "--docker-url", engine.url) as proxy:
        yield proxy


@pytest.fixture
def run_example(python: Path, engine: DockerEngine, tmp_path: Path) -> RunExample:
    """Run the documentation's example as a process; kill it and its children at the end of the block."""

    @asynccontextmanager
    async def run(proxy: Server, program_id: str) -> AsyncIterator[Process]:
        async with started(
            *(str(python), str(EXAMPLE), "--task", "Write a poem to /poem.txt.", "--proxy", proxy.url),
            *("--model", MODEL_NAME, "--image", IMAGE, "--program-id", program_id),
            env=agent_environment(engine.url, tmp_path),
        ) as process:
            yield process

    return run


@pytest.fixture
def run_mini(python: Path, engine: DockerEngine, tmp_path: Path) -> RunExample:
    """Run the package's own command as a process, with the environment that attaches to the proxy's sandbox."""

    @asynccontextmanager
    async def run(proxy: Server, program_id: str) -> AsyncIterator[Process]:
        settings = {
            "model.cost_tracking": "ignore_errors",
            "model.model_kwargs.api_base": f"{proxy.url}/p/{program_id}/v1",
            "environment.program_id": program_id,
            "environment.proxy": proxy.url,
            "environment.template": "poet",
        }
        async with started(
            *(str(python.with_name("mini")), "-y", "--exit-immediately", "-t", "Write a poem to /poem.txt."),
            *("-m", f"hosted_vllm/{MODEL_NAME}", "-o", str(tmp_path / "run.json"), "-c", "mini.yaml"),
            *("--environment-class", "thunderagent.client.mini_swe_agent.SandboxEnvironment"),
            *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
            env=agent_environment(engine.url, tmp_path) | {"PYTHONPATH": str(ROOT), "MSWEA_CONFIGURED": "true"},
        ) as process:
            yield process

    return run


@asynccontextmanager
async def started(*words: str, env: dict[str, str]) -> AsyncIterator[Process]:
    """Run a command in a session of its own during the block, then kill all of it."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)
        await process.communicate()


def kill(process: Process) -> None:
    """Kill a process and its children, as if its machine had failed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


PREPARED = "thunderagent.sandbox-id"
"""A label of each container that the proxy made; whose it is may change."""


def containers_with(engine: DockerEngine, label: str) -> list[dict[str, Any]]:
    """Return the containers with a label, running or not."""
    with contextlib.closing(engine.client()) as client:
        found: list[dict[str, Any]] = client.containers(all=True, filters={"label": label})
        return found


def containers_of(engine: DockerEngine, program_id: str) -> list[dict[str, Any]]:
    """Return the containers with a program's label, running or not."""
    return containers_with(engine, f"thunderagent.program-id={program_id}")


async def until_gone(engine: DockerEngine, program_id: str) -> None:
    """Wait until no container has a program's label. Raises TimeoutError."""
    await until_none_with(engine, f"thunderagent.program-id={program_id}")


async def until_none_with(engine: DockerEngine, label: str) -> None:
    """Wait until no container has a label. Raises TimeoutError."""

    async def is_gone() -> bool:
        return not await asyncio.to_thread(containers_with, engine, label)

    await until(is_gone, within_s=60)


async def test_agent_is_one_program_from_its_first_turn_to_its_release(
    engine: DockerEngine, replica: ScriptedReplica, proxy: Server, run_example: RunExample
) -> None:
    """The task is done in the container, all turns belong to the program, and the release removes the container."""
    start_s = time.time()
    async with run_example(proxy, "poet-1") as process:
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        assert "'exit_status': 'Submitted'" in output
        assert f"'submission': '{POEM}\\n'" in output
        await until_gone(engine, "poet-1")
    turns = replica.turns_of("poet-1")
    assert len(turns) == len(replica.asked) == len(replica.commands)
    assert POEM in turns[2]["messages"][-1]["content"]  # what its second command read in the container
    with contextlib.closing(engine.client()) as client:
        span: Any = {"since": int(start_s), "until": int(time.time()) + 1}
        happened = client.events(**span, filters={"type": "container"}, decode=True)
        labels = [each["Actor"]["Attributes"].get("thunderagent.program-id") for each in happened]
    assert labels
    assert set(labels) == {"poet-1"}
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin:
        assert (await admin.get("/programs/poet-1")).status_code == 404

        async def is_reclaimed() -> bool:
            return (await metrics(admin, ""))["thunderagent_sandboxes_reclaimed_total"] == 1

        await until(is_reclaimed)  # by the proxy: the agent itself ends its container, too, but only after 10 s


async def test_an_agent_that_was_killed(
    engine: DockerEngine, replica: ScriptedReplica, proxy: Server, run_example: RunExample
) -> None:
    """A release from any sender ends its container; that of another killed agent stays until its own release."""
    replica.commands = [*["sleep 25"] * 6, SUBMIT]  # the second may begin long after the first
    async with run_example(proxy, "poet-2") as first, run_example(proxy, "poet-3") as second:

        async def both_work() -> bool:
            return all(containers_of(engine, each) and replica.turns_of(each) for each in ("poet-2", "poet-3"))

        await until(both_work, within_s=120)
        kill(first)
        kill(second)
        await asyncio.gather(first.wait(), second.wait())
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin:
        for program_id, left in (("poet-2", "poet-3"), ("poet-3", None)):
            answer = await admin.post("/programs/release", json={"program_id": program_id})
            assert answer.status_code == 200
            await until_gone(engine, program_id)
            if left is not None:
                assert [each["State"] for each in containers_of(engine, left)] == ["running"]


async def test_agent_works_in_the_sandbox_that_the_proxy_prepares(
    engine: DockerEngine,
    replica: ScriptedReplica,
    run_proxy: Callable[..., AbstractAsyncContextManager[Server]],
    run_mini: RunExample,
    tmp_path: Path,
) -> None:
    """Its first turn is answered while the sandbox is prepared; its commands run there, and it makes no other."""
    setup = "until [ -e /go ]; do sleep 0.1; done; echo prepared > /prepared"
    config = tmp_path / "proxy.toml"
    config.write_text(f"[sandbox_templates.poet]\nimage = {IMAGE!r}\nsetup = [{json.dumps(setup)}]\n")
    replica.commands = ["cat /prepared", f"echo '{POEM}' > /poem.txt", f"{SUBMIT} && cat /poem.txt"]
    options = ("--sandboxes", "docker", "--docker-url", engine.url, "--config", str(config))
    async with run_proxy((replica,), *options) as proxy, run_mini(proxy, "poet-9") as process:

        async def asks_and_is_prepared() -> bool:
            return bool(replica.asked) and bool(containers_with(engine, PREPARED))

        await until(asks_and_is_prepared, within_s=120)
        (sandbox,) = containers_with(engine, PREPARED)
        with contextlib.closing(engine.client()) as client:
            client.exec_start(client.exec_create(sandbox["Id"], ["touch", "/go"]))
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        turns = replica.asked
        assert len(turns) == len(replica.commands), output
        assert "prepared" in turns[1][1]["messages"][-1]["content"]
        assert POEM in json.loads((tmp_path / "run.json").read_text())["info"]["submission"]
        assert [each["Id"] for each in containers_with(engine, PREPARED)] == [sandbox["Id"]]
        async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin:
            await admin.post("/programs/release", json={"program_id": "poet-9"})
        await until_none_with(engine, PREPARED)
