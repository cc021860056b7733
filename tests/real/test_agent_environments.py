"""Agents' released packages in the sandbox that the proxy prepares, as the documentation's snippets have them.

Each asks for its sandbox before it is ready, waits for it at first use, runs a command in it, moves a file in and out,
and leaves it to the proxy. The packages need many others, so each has a virtual environment outside the checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from benchmarks.environments import COMPILES_ONCE, RealEngineError
from tests.real.agent_packages import OPENHANDS_SERVER, NewerPythonError, agent_server, environment_of, mounts, section
from tests.real.mini_swe_agent import SUBMIT, ScriptedReplica, engine_with_bash
from tests.real.support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from typing import NoReturn

    from benchmarks.processes import Server
    from tests.real.docker_engine import DockerEngine

    RunProxy = Callable[..., AbstractAsyncContextManager[Server]]

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

ROOT = Path(__file__).parents[2]
IMAGE = "thunderagent-test-bash"
PROGRAM = "task-7"  # as in the page
SYSTEM = ("/usr", "/lib", "/lib64")
"""This machine's programs, a real bash among them."""
SETUP = "until [ -e /go ]; do sleep 0.1; done; echo prepared > /prepared"
SWE_REX = """
import asyncio, pathlib, sys
from swerex.exceptions import CommandTimeoutError, NonZeroExitCodeError
from swerex.runtime.abstract import *
from thunderagent.client.swe_rex import SandboxDeployment

async def main():
    deployment = SandboxDeployment()
    await deployment.start()
    runtime = deployment.runtime
    assert await deployment.is_alive()
    await runtime.create_session(CreateBashSessionRequest(startup_source=["/rc"]))
    for command, output in (("cat /prepared", "prepared"), ("cd /tmp && x=1", ""), ("echo $PWD $x $rc", "/tmp 1 yes")):
        assert (await runtime.run_in_session(BashAction(command=command))).output.strip() == output, command
    assert (await runtime.run_in_session(BashAction(command="false", check="silent"))).exit_code == 1
    try:
        await runtime.run_in_session(BashAction(command="sleep 60", timeout=1))
        raise AssertionError
    except CommandTimeoutError:
        await runtime.run_in_session(BashInterruptAction())
    assert (await runtime.run_in_session(BashAction(command="echo again"))).output.strip() == "again"
    long = "x" * 9000  # more than a terminal's line
    assert (await runtime.run_in_session(BashAction(command=f"echo {long}"))).output.strip() == long
    assert (await runtime.run_in_session(BashAction(command="echo $BASH_VERSION"))).output.strip()
    await runtime.write_file(WriteFileRequest(path="/new/a", content="ä\\n"))
    assert (await runtime.read_file(ReadFileRequest(path="/new/a"))).content == "ä\\n"
    await runtime.upload(UploadRequest(source_path=sys.argv[1], target_path="/up"))
    done = await runtime.execute(Command(command="cat up/file; pwd; echo $A", shell=True, cwd="/", env={"A": "b"}))
    assert (done.stdout, done.exit_code) == ("moved/\\nb\\n", 0), done
    try:
        await runtime.execute(Command(command=["false"], check=True))
        raise AssertionError
    except NonZeroExitCodeError:
        pass
    await deployment.stop()
asyncio.run(main())
"""
SWE_AGENT = """
import asyncio, sys
from swerex.exceptions import CommandTimeoutError
from swerex.runtime.abstract import *
from thunderagent.client.swe_rex import SandboxDeployment

deployment = SandboxDeployment()

def communicate(command, timeout=25):
    action = BashAction(command=command, timeout=timeout, check="silent")
    return asyncio.run(deployment.runtime.run_in_session(action))

def start():
    asyncio.run(deployment.start())
    asyncio.run(deployment.runtime.create_session(CreateBashSessionRequest(startup_source=["/root/.bashrc"])))
    for command in ("export LANG=C.UTF-8 && export LC_ALL=C.UTF-8", "cd /"):
        assert communicate(command).exit_code == 0, command

async def upload_tools():
    where = [UploadRequest(source_path=sys.argv[1], target_path=f"/root/tools/{name}") for name in ("a", "b")]
    await asyncio.gather(*map(deployment.runtime.upload, where))

start()
asyncio.run(upload_tools())
assert communicate("export PATH=/root/tools/a:$PATH && ls /root/tools/b").output.strip() == "file"
done = communicate("for each in 1 2\\ndo\\n  echo $each $LANG\\ndone\\nfalse")
assert (done.output.split(), done.exit_code) == (["1", "C.UTF-8", "2", "C.UTF-8"], 1), done
asyncio.run(deployment.runtime.execute(Command(command="test -f /root/tools/a/file", shell=True, check=True)))
asyncio.run(deployment.runtime.write_file(WriteFileRequest(path="/root/state.json", content="{}")))
assert asyncio.run(deployment.runtime.read_file(ReadFileRequest(path="/root/state.json"))).content == "{}"
try:
    communicate("sleep 60", timeout=1)
    raise AssertionError
except CommandTimeoutError:
    asyncio.run(deployment.runtime.run_in_session(BashInterruptAction()))
assert communicate("echo again").output.strip() == "again"
asyncio.run(deployment.stop())
start()  # as its hard reset does: a new shell in the same sandbox
assert communicate("pwd; cat root/state.json").output.split() == ["/", "{}"]
asyncio.run(deployment.stop())
"""
"""What SWE-agent's own environment (`SWEEnv`) asks of a deployment, in its order, each call in a loop of its own."""
OPENHANDS = """
import sys
from thunderagent.client.openhands import SandboxWorkspace
with SandboxWorkspace(working_dir="/tmp") as workspace:
    done = workspace.execute_command("cat /prepared; exit 3", cwd="/tmp")
    assert (done.stdout.strip(), done.exit_code) == ("prepared", 3), done
    assert workspace.file_upload(f"{sys.argv[1]}/file", "/tmp/up").success
    assert workspace.file_download("/tmp/up", f"{sys.argv[1]}/back").success
    assert workspace.alive
"""


def snippet(heading: str, language: str) -> str:
    """Return the last code in a language below a heading of the page."""
    return re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)[-1]


@pytest.fixture
def environment(
    request: pytest.FixtureRequest, require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config
) -> Path:
    """Return the Python of an environment with what a section of the page installs; the first time is announced."""
    heading, *further = request.param
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            return environment_of(heading, *further)
    except NewerPythonError as error:
        pytest.skip(str(error))
    except RealEngineError as error:
        require_real(f"no {heading}: {error}")


@pytest.fixture(scope="module")
def docker_engine(require_real: Callable[[str], NoReturn]) -> Iterator[DockerEngine]:
    """Run a Docker engine with an image that has a shell by the name of bash."""
    with engine_with_bash(IMAGE, require_real) as engine:
        yield engine


@asynccontextmanager
async def preparing(run_proxy: RunProxy, engine: DockerEngine, template: str, folder: Path) -> AsyncIterator[Server]:
    """Run a proxy with a template whose setup ends when there is a file /go."""
    config = folder / "proxy.toml"
    config.write_text(f"{template}\nimage = {IMAGE!r}\nsetup = [{json.dumps(SETUP)}]\n")
    options = ("--sandboxes", "docker", "--docker-url", engine.url, "--config", str(config))
    async with ScriptedReplica([SUBMIT]).running() as replica, run_proxy((replica,), *options) as proxy:
        yield proxy


async def run(folder: Path, engine: DockerEngine, proxy: Server, *words: str) -> tuple[int | None, str]:
    """Run a command with a file to move in `folder`; return its exit status and output."""
    (folder / "moved").mkdir(exist_ok=True)
    (folder / "moved" / "file").write_text("moved")
    variables = {
        "DOCKER_HOST": engine.url,
        "DOCKER_CONFIG": str(folder),
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "THUNDERAGENT_PROXY": proxy.url,
        "THUNDERAGENT_PROGRAM_ID": PROGRAM,
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return await output_of(words, variables, folder)


async def output_of(
    words: Iterable[str], variables: Mapping[str, str], folder: Path | None = None
) -> tuple[int | None, str]:
    """Run a command with further variables until it ends, or until this is cancelled; return status and output."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env={**os.environ, **COMPILES_ONCE, **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, output.decode()


async def let_go(engine: DockerEngine, running: asyncio.Task[tuple[int | None, str]]) -> str:
    """Wait until the program that runs has a sandbox in preparation, and let its setup end; return the sandbox."""

    async def has_begun() -> bool:
        return bool(sandboxes_of(engine)) or running.done()

    try:
        await until(has_begun, within_s=400)  # to import some of them takes a busy machine minutes
    except TimeoutError:
        running.cancel()
        raise
    assert not running.done(), running.result()
    (sandbox,) = sandboxes_of(engine)
    with contextlib.closing(engine.client()) as client:
        client.exec_start(client.exec_create(sandbox, ["touch", "/go"]))
    return sandbox


def sandboxes_of(engine: DockerEngine) -> list[str]:
    """Return the ids of the program's containers, running or not."""
    with contextlib.closing(engine.client()) as client:
        found = client.containers(all=True, filters={"label": "thunderagent.sandbox-id"})
        return [each["Id"] for each in found]


async def released(engine: DockerEngine, proxy: Server, sandbox: str) -> None:
    """Check that the sandbox is there, and alone, after its agent has ended; release the program, and see it go."""
    assert sandboxes_of(engine) == [sandbox]
    async with httpx2.AsyncClient(base_url=proxy.url, timeout=60) as admin:
        await admin.post("/programs/release", json={"program_id": PROGRAM})

    async def is_gone() -> bool:
        return not sandboxes_of(engine)

    await until(is_gone, within_s=60)


@pytest.mark.parametrize("environment", [["SWE-agent"]], indirect=True)
async def test_swe_rex_works_in_a_prepared_sandbox(
    environment: Path, docker_engine: DockerEngine, run_proxy: RunProxy, tmp_path: Path
) -> None:
    """The page's snippet runs, and shells, commands and files as SWE-ReX has them and as SWE-agent asks for them."""
    async with preparing(run_proxy, docker_engine, f"[sandbox_templates.coder]\n{mounts(*SYSTEM)}", tmp_path) as proxy:
        python = str(environment)
        first = asyncio.create_task(run(tmp_path, docker_engine, proxy, python, "-c", snippet("SWE-agent", "python")))
        sandbox = await let_go(docker_engine, first)
        status, output = await first
        assert (status, output.strip()) == (0, "13"), output
        with contextlib.closing(docker_engine.client()) as client:
            client.exec_start(client.exec_create(sandbox, ["sh", "-c", "echo rc=yes > /rc"]))
        for script in (SWE_REX, SWE_AGENT):
            status, output = await run(tmp_path, docker_engine, proxy, python, "-c", script, str(tmp_path / "moved"))
            assert status == 0, output
        await released(docker_engine, proxy, sandbox)


@pytest.mark.nightly  # to install it and what it needs takes a minute
@pytest.mark.parametrize("environment", [["Harbor"]], indirect=True)
async def test_harbor_works_in_a_prepared_sandbox(
    environment: Path, docker_engine: DockerEngine, run_proxy: RunProxy, tmp_path: Path
) -> None:
    """The page's command runs a task: its solution, its tests, and the file with the reward that comes back."""
    task = tmp_path / "tasks" / "7"
    for name, text in {
        "task.toml": '[environment]\ndocker_image = "of-the-template"\nworkdir = "/tmp"\n',
        "instruction.md": "Write what was prepared to done.txt.",
        "environment/given.txt": "given",
        "solution/solve.sh": "#!/bin/sh\ncat /prepared given.txt > done.txt\n",
        "tests/test.sh": '#!/bin/sh\n[ "$(cat done.txt)" = "prepared\ngiven" ] && echo 1 > /logs/verifier/reward.txt\n',
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    command = snippet("Harbor", "sh").split("\n", 1)[1]
    async with preparing(run_proxy, docker_engine, "[sandbox_templates.coder]", tmp_path) as proxy:
        words = ("sh", "-c", f"PATH={environment.parent}:$PATH; {command}")
        running = asyncio.create_task(run(tmp_path, docker_engine, proxy, *words))
        sandbox = await let_go(docker_engine, running)
        status, output = await running
        assert status == 0, output
        (result,) = (tmp_path / "jobs").glob("*/*/result.json")
        assert json.loads(result.read_text())["verifier_result"]["rewards"] == {"reward": 1.0}, output
        await released(docker_engine, proxy, sandbox)


@pytest.mark.nightly  # to install it and what it needs takes minutes
@pytest.mark.parametrize("environment", [["OpenHands", *OPENHANDS_SERVER]], indirect=True)
async def test_openhands_works_in_a_prepared_sandbox(
    environment: Path, docker_engine: DockerEngine, run_proxy: RunProxy, tmp_path: Path
) -> None:
    """The page's snippet runs, with the agent server of its image taken from this machine; files go in and out."""
    lines = ["[sandbox_templates.openhands]", *agent_server(environment, *SYSTEM, "/etc/ssl")]
    async with preparing(run_proxy, docker_engine, "\n".join(lines), tmp_path) as proxy:
        python = str(environment)
        first = asyncio.create_task(run(tmp_path, docker_engine, proxy, python, "-c", snippet("OpenHands", "python")))
        sandbox = await let_go(docker_engine, first)
        status, output = await first
        assert status == 0, output
        assert output.strip().splitlines()[-1] == "42", output
        status, output = await run(tmp_path, docker_engine, proxy, python, "-c", OPENHANDS, str(tmp_path / "moved"))
        assert status == 0, output
        assert (tmp_path / "moved" / "back").read_text() == "moved"
        await released(docker_engine, proxy, sandbox)
