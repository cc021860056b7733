"""Claude Code and Codex as installed from npm, used with the commands of docs/integrations."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.environments import made_once
from tests.integration.support import running_proxy
from tests.real.scripted_model import ScriptedModel
from tests.real.test_integrations import PAGES, Seen
from thunderagent.programs.model.events import Event, TurnArrived, TurnFinished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from tests.integration.support import RunningProxy
    from thunderagent.programs.model.decisions import Decision

DEADLINE_S = 90.0
INSTALL_S = 300.0


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)


def packages() -> list[str]:
    """Return the packages that the pages name."""
    found = [re.search(r"npm install --global (\S+)", blocks(name, "sh")[0]) for name in ("claude-code", "codex")]
    return [each[1] for each in found if each is not None]


@pytest.fixture(scope="module")
def programs_folder(require_real: Callable[[str], NoReturn]) -> Path:
    """Install both with npm, the first time in some seconds; return the folder of their commands."""
    wanted = packages()
    assert len(wanted) == 2

    def install(root: Path) -> None:
        if shutil.which("npm") is None:
            require_real("no npm")
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(root), *wanted]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            require_real("npm does not end")
        if done.returncode:
            require_real(f"npm failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    return made_once("coding-clis", wanted, install) / "node_modules" / ".bin"


async def type_in(script: str, proxy: RunningProxy, commands: Path, home: Path) -> str:
    """Run a user's command line with this proxy, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC_", "OPENAI_"))}
    environment |= {"HOME": str(home), "CODEX_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment["PATH"] = f"{commands}:{environment['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-euc",
        script.replace("http://127.0.0.1:8300", proxy.url),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        cwd=home,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode() + output.decode()
    return output.decode()


async def test_claude_code_with_a_sub_agent_is_one_program(programs_folder: Path, tmp_path: Path) -> None:
    """The sub-agent's turns are a branch, run while the main branch's tool is the sub-agent itself."""
    asked = {"description": "ask", "prompt": "What is the weather?", "run_in_background": False}
    script = ScriptedModel(tool="Agent", arguments=asked, leaf_header="X-Claude-Code-Agent-Id")
    async with script.running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        output = await type_in(blocks("claude-code", "sh")[1], proxy, programs_folder, tmp_path)
        assert "hello to you" in output
        assert '"released":true' in output
        assert len(set(seen.arrived)) == 1
        assert seen.released == seen.arrived[:1]
        assert len({branch for branch in seen.branches if branch}) == 1
        assert seen.branches[0] == seen.branches[-1] == ""
        assert seen.finished_count == len(seen.arrived) == 3
        assert "X-Stainless-Timeout" in model.asked[0][1]


async def test_claude_code_says_which_sub_agent_called_which(programs_folder: Path, tmp_path: Path) -> None:
    """A sub-agent of a sub-agent is a branch below it, which is forgotten when its caller continues."""
    asked = {"description": "ask", "prompt": "What is the weather?", "run_in_background": False}
    script = ScriptedModel(tool="Agent", arguments=asked, leaf_header="X-Claude-Code-Parent-Agent-Id")
    async with script.running() as model, running_proxy(model.url) as proxy:
        arrived: list[TurnArrived] = []
        branches_counts: list[int] = []

        def see(event: Event, decisions: Sequence[Decision]) -> None:
            if isinstance(event, TurnArrived):
                arrived.append(event)
            elif isinstance(event, TurnFinished):
                branches_counts.extend(len(program.branches) for program in proxy.runtime.scheduler.programs.values())

        proxy.runtime.observe(see)
        output = await type_in(blocks("claude-code", "sh")[1], proxy, programs_folder, tmp_path)
        assert "hello to you" in output
        (_, called), (_, below) = [(turn.parent_branch_id, turn.branch_id) for turn in arrived[1:3]]
        assert called
        assert below not in ("", called)
        ways = [("", ""), ("", called), (called, below), ("", called), ("", "")]
        assert [(turn.parent_branch_id, turn.branch_id) for turn in arrived] == ways
        assert branches_counts == [1, 2, 3, 2, 1]


async def test_claude_code_names_its_session_itself(programs_folder: Path, tmp_path: Path) -> None:
    """With only the base URL set each session is a program."""
    async with ScriptedModel(tool="none").running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        command = blocks("claude-code", "sh")[1].replace("/p/$run", "")
        assert "hello to you" in await type_in(command, proxy, programs_folder, tmp_path)
        sessions = {headers["X-Claude-Code-Session-Id"] for _, headers, _ in model.asked}
        assert set(seen.arrived) == sessions
        assert len(sessions) == 1


@pytest.mark.parametrize("named", [True, False], ids=["by the URL", "by itself"])
async def test_codex_runs_a_command_as_one_program(programs_folder: Path, tmp_path: Path, *, named: bool) -> None:
    """The tool call is read from the stream of a response, and Codex's own headers name the program."""
    script = ScriptedModel(tool="exec_command", arguments={"cmd": "echo sunny"})
    async with script.running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        (tmp_path / "config.toml").write_text(blocks("codex", "toml")[0].replace("http://127.0.0.1:8300", proxy.url))
        command = blocks("codex", "sh")[1]
        if not named:
            command = re.sub(r" --config \S+", "", command)
        output = await type_in(command, proxy, programs_folder, tmp_path)
        assert "The tool says" in output
        assert "sunny" in output
        assert seen.finished_count == len(seen.arrived) == 2
        assert seen.tools[0].startswith("exec_command")
        assert len(set(seen.arrived)) == 1
        if named:
            assert seen.released == seen.arrived[:1]
        else:
            assert seen.arrived[0] == model.asked[0][1]["session-id"]
