"""Claude Code, Codex, OpenCode and clients for Node as installed from npm, and what each client sends by itself."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.environments import made_once
from tests.integration.support import running_proxy
from tests.real.client_runner import PAGES
from tests.real.scripted_model import ScriptedModel
from tests.real.test_integrations import Seen
from thunderagent.programs.messages import Event, TurnAsk, TurnEnd
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from tests.integration.support import RunningProxy
    from tests.real.client_runner import ClientRunner
    from thunderagent.programs.messages import Decision

DEADLINE_S = 180.0  # OpenCode alone took 60 s on a busy machine
INSTALL_S = 300.0


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)


def packages(*names: str) -> list[str]:
    """Return the packages that the pages name."""
    found = [re.search(r"npm install --global (\S+)", blocks(name, "sh")[0]) for name in names]
    return [each[1] for each in found if each is not None]


@pytest.fixture(scope="module")
def programs_folder(require_real: Callable[[str], NoReturn]) -> Path:
    """Install Claude Code and Codex with npm, the first time in some seconds; return the folder of their commands."""
    return from_npm("coding-clis", packages("claude-code", "codex"), require_real) / ".bin"


@pytest.fixture(scope="module")
def node_folder(require_real: Callable[[str], NoReturn]) -> Path:
    """Install OpenCode and the clients for Node that the table names; return their `node_modules`."""
    versions = {client: client.rpartition(" ")[2] for client in sent_by_table()}
    wanted = packages("opencode")
    wanted += [f"openai@{versions[each]}" for each in versions if each.startswith("openai for Node")]
    wanted += [f"@anthropic-ai/sdk@{versions[each]}" for each in versions if each.startswith("anthropic for Node")]
    assert len(wanted) == 3
    return from_npm("node-clients", wanted, require_real)


def from_npm(name: str, wanted: list[str], require_real: Callable[[str], NoReturn]) -> Path:
    """Install packages with npm, once; return their `node_modules`."""

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

    return made_once(name, wanted, install) / "node_modules"


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


async def test_claude_code_ends_on_simulated_engines(programs_folder: Path, tmp_path: Path) -> None:
    """They start a sub-agent because that is a tool; the notice of its end begins no other one."""
    config = ServerConfig(EngineConfig(kv_tokens=64_000, timing=profile("instant")), port=0, grace_s=0)
    async with running(config) as engine, running_proxy(engine) as proxy:
        seen = Seen(output_tokens=None)
        proxy.runtime.observe(seen)
        output = await type_in(blocks("claude-code", "sh")[1], proxy, programs_folder, tmp_path)
        assert '"released":true' in output
        assert len(set(seen.arrived)) == 1
        assert "Agent" in seen.tools
        assert seen.tools[-1] == ""


async def test_claude_code_says_which_sub_agent_called_which(programs_folder: Path, tmp_path: Path) -> None:
    """A sub-agent of a sub-agent is a branch below it, which is forgotten when its caller continues."""
    asked = {"description": "ask", "prompt": "What is the weather?", "run_in_background": False}
    script = ScriptedModel(tool="Agent", arguments=asked, leaf_header="X-Claude-Code-Parent-Agent-Id")
    async with script.running() as model, running_proxy(model.url) as proxy:
        arrived: list[TurnAsk] = []
        branches_counts: list[int] = []

        def see(event: Event, decisions: Sequence[Decision]) -> None:
            if isinstance(event, TurnAsk):
                arrived.append(event)
            elif isinstance(event, TurnEnd) and event.outcome == "finished":
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


CODEX_WAYS = {
    "websockets": "supports_websockets = true",
    "signed in": "requires_openai_auth = true",
    "its own provider": "",
}
"""How people set Codex up besides, and what their provider's table has more."""


def sign_in(home: Path) -> None:
    """Write a made-up sign-in without a signature: only its shape matters."""

    def part(content: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    now = datetime.now(UTC)
    account = {"chatgpt_account_id": "0", "chatgpt_plan_type": "plus"}
    claims = {"exp": int(now.timestamp()) + 10**8, "https://api.openai.com/auth": account}
    token = ".".join((part({"alg": "none"}), part(claims), "c2ln"))
    tokens = {"id_token": token, "access_token": token, "refresh_token": "none", "account_id": "0"}
    auth = {"auth_mode": "chatgpt", "OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": now.isoformat()}
    (home / "auth.json").write_text(json.dumps(auth))


@pytest.mark.parametrize("way", CODEX_WAYS)
async def test_codex_is_one_program_however_it_is_set_up(programs_folder: Path, tmp_path: Path, way: str) -> None:
    """Over websockets it is told at once to use HTTP; signed in it packs its bodies, which engines do not read."""
    if way == "signed in":
        pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
        sign_in(tmp_path)
    script = ScriptedModel(tool="exec_command", arguments={"cmd": "echo sunny"})
    async with script.running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        config, command = blocks("codex", "toml")[0], blocks("codex", "sh")[1]
        config = config.replace("http://127.0.0.1:8300", proxy.url)
        if way == "its own provider":
            config = f'model = "simulated"\nopenai_base_url = "{proxy.url}/p/$run/v1"\n'
            command = re.sub(r" --config \S+", f' --config openai_base_url="{proxy.url}/p/$run/v1"', command)
            command = command.replace("codex exec", "CODEX_API_KEY=none codex exec")
        else:
            config += CODEX_WAYS[way] + "\n"
        if way == "signed in":
            config = config.replace('name = "thunderagent"', 'name = "OpenAI"')
        (tmp_path / "config.toml").write_text(config)
        command = command.replace('"What is the weather?"', '"What is the weather?" 2>&1')
        output = await type_in(command, proxy, programs_folder, tmp_path)
        assert "sunny" in output
        assert "econnecting" not in output
        assert seen.finished_count == len(seen.arrived) == 2
        assert len(set(seen.arrived)) == 1
        assert seen.released == seen.arrived[:1]


def opencode_config(folder: Path, proxy: RunningProxy) -> str:
    """Write what the page has, and return the page's command with the file."""
    (folder / "opencode.json").write_text(blocks("opencode", "json")[0].replace("http://127.0.0.1:8300", proxy.url))
    return blocks("opencode", "sh")[1].replace("opencode.json", str(folder / "opencode.json"))


async def test_a_sub_agent_of_opencode_is_a_program_that_ends_with_its_parent_s_next_turn(
    node_folder: Path, tmp_path: Path
) -> None:
    asked = {"description": "ask", "prompt": "What is the weather?", "subagent_type": "general"}
    script = ScriptedModel(tool="task", arguments=asked, leaf_header="X-Parent-Session-Id")
    async with script.running() as model, running_proxy(model.url) as proxy:
        seen = Seen()
        proxy.runtime.observe(seen)
        output = await type_in(opencode_config(tmp_path, proxy), proxy, node_folder / ".bin", tmp_path)
        assert "hello to you" in output
        sessions = list(dict.fromkeys(headers["x-session-id"] for _, headers, _ in model.asked))
        assert len(sessions) == 2
        assert set(seen.arrived) == set(sessions)
        programs = proxy.runtime.scheduler.programs
        assert sessions[1] not in programs or programs[sessions[1]].parent_id == sessions[0]
        assert sessions[0] in programs
        assert sessions[1] not in {key for key, each in programs.items() if each.claim_tokens}
    assert_headers_of_row(script, next(row for row in sent_by_table() if client_name(row) == "OpenCode"))
    assert script.asked[0][1]["User-Agent"].startswith("opencode/")


# --- who sends what

CLIENT_HEADERS = frozenset(
    {
        *("x-session-id", "x-smg-routing-key", "x-session-affinity", "x-dynamo-session-id", "x-claude-code-session-id"),
        *("session-id", "session_id", "x-litellm-session-id", "x-claude-code-agent-id"),
        *("x-claude-code-parent-agent-id", "thread-id", "x-codex-parent-thread-id", "x-dynamo-parent-session-id"),
        *("x-parent-session-id", "x-program-patience", "x-stainless-read-timeout", "x-stainless-timeout"),
        *("idempotency-key", "x-stainless-retry-count", "content-encoding"),
    }
)
"""What the proxy reads of clients, and how a body is packed."""


def sent_by_table() -> dict[str, set[str]]:
    """Return the headers of each client of the reference's table."""
    text = (PAGES.parent / "reference/turns.md").read_text()
    section = text.partition("{ #who-sends-what }")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    return {
        name: {word.lower() for cell in cells if not cell.startswith("-") for word in re.findall(r"`([\w-]+)`", cell)}
        for name, *cells in rows
    }


NODE_CLIENTS = """
const OpenAI = require("openai"), Anthropic = require("@anthropic-ai/sdk");
const messages = [{role: "user", content: "hello"}];
const calls = {
  openai: () => new OpenAI({baseURL: "http://127.0.0.1:8300/v1", apiKey: "none"})
    .chat.completions.create({model: "simulated", messages}),
  anthropic: () => new Anthropic({baseURL: "http://127.0.0.1:8300", apiKey: "none"})
    .messages.create({model: "simulated", max_tokens: 8, messages}),
};
calls[process.argv[2]]().then(() => console.log("answered"));
"""
PYTHON_CLIENTS = {
    "openai for Python": """
import openai
openai.OpenAI(base_url=f"{PROXY}/v1", api_key="none").chat.completions.create(model="simulated", messages=MESSAGES)
""",
    "anthropic for Python": """
import anthropic
client = anthropic.Anthropic(base_url=PROXY, api_key="none")
client.messages.create(model="simulated", max_tokens=8, messages=MESSAGES)
""",
    "LiteLLM": """
import litellm
litellm.completion(model="hosted_vllm/simulated", api_base=f"{PROXY}/v1", messages=MESSAGES, max_tokens=8)
""",
}


def client_name(row: str) -> str:
    """Return a client's name without its version."""
    return re.sub(r" [\d.]+\d.*", "", row)


def assert_headers_of_row(model: ScriptedModel, row: str) -> None:
    """Check that a client sent of what the proxy reads neither more nor less than its row says."""
    sent = {header.lower() for _, headers, _ in model.asked for header in headers}
    assert sent & CLIENT_HEADERS == sent_by_table()[row]


ROWS = [row for row in sent_by_table() if client_name(row) != "OpenCode"]
"""Those of which no test above sees all that is sent."""


@pytest.mark.parametrize("row", [row for row in ROWS if client_name(row) in PYTHON_CLIENTS], ids=client_name)
async def test_a_client_for_python_sends_the_headers_of_its_row(row: str, clients: ClientRunner) -> None:
    """Neither more nor fewer of those that the proxy reads."""
    model = ScriptedModel(tool="none")
    async with model.running(), running_proxy(model.url) as proxy:
        before = f'PROXY = {proxy.url!r}\nMESSAGES = [{{"role": "user", "content": "hello"}}]\n'
        await clients.run(before + PYTHON_CLIENTS[client_name(row)])
        assert_headers_of_row(model, row)


@pytest.mark.parametrize("row", [row for row in ROWS if client_name(row) not in PYTHON_CLIENTS], ids=client_name)
async def test_a_client_sends_the_headers_of_its_row(row: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Neither more nor fewer of those that the proxy reads."""
    name = client_name(row)
    asked = {"description": "ask", "prompt": "What is the weather?", "run_in_background": False}
    model = ScriptedModel(tool="none")
    if name == "Claude Code":
        model = ScriptedModel(tool="Agent", arguments=asked, leaf_header="X-Claude-Code-Parent-Agent-Id")
    async with model.running(), running_proxy(model.url) as proxy:
        if name.endswith("for Node"):
            folder = request.getfixturevalue("node_folder")
            (tmp_path / "client.cjs").write_text(NODE_CLIENTS.replace("http://127.0.0.1:8300", proxy.url))
            line = f"NODE_PATH={folder} node client.cjs {name.partition(' ')[0]}"
            assert "answered" in await type_in(line, proxy, folder / ".bin", tmp_path)
        else:
            folder = request.getfixturevalue("programs_folder")
            page_name = name.lower().replace(" ", "-")
            line = blocks(page_name, "sh")[1].replace("/p/$run", "")
            if name == "Codex":
                config = blocks("codex", "toml")[0].replace("http://127.0.0.1:8300", proxy.url)
                (tmp_path / "config.toml").write_text(config)
            await type_in(line, proxy, folder, tmp_path)
        assert_headers_of_row(model, row)
        if name.endswith("for Node"):
            assert {key.lower(): value for key, value in model.asked[0][1].items()}["x-stainless-runtime"] == "node"
