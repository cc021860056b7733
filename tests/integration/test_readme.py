"""Every snippet of README.md runs, as a stranger runs it: without any variable of ours, or a key for OpenAI."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.integration.support import get, metric, serve
from thunderagent.cli import build_parser
from thunderagent.config import ServeConfig

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in SNIPPETS if language == "python"]
COMMANDS = [
    words
    for language, text in SNIPPETS
    if language == "sh"
    for line in text.splitlines()
    for part in line.split("&&")
    if (words := shlex.split(part, comments=True))
]
HELLO = [{"role": "user", "content": "hello"}]
TURN = f"client.chat.completions.create(model='simulated', messages={HELLO}, max_tokens=4)"


def test_the_commands_to_run_and_to_test_are_there() -> None:
    """Each is a file here, a command of ours with options that it takes, or the standard way to install."""
    installing = (["python3", "-m", "venv"], [".", ".venv/bin/activate"], ["pip", "install", "."])
    rest = [words for words in COMMANDS if not any(words[: len(each)] == each for each in installing)]
    assert [words[0] for words in rest] == ["thunderagent", "scripts/test", "thunderagent"]
    for words in rest:
        if words[0] == "thunderagent":
            args = build_parser().parse_args(words[1:])
            given = {name: value for name in ServeConfig.model_fields if (value := getattr(args, name, None))}
            ServeConfig.load(**given)
        else:
            assert os.access(ROOT / words[0], os.X_OK)


@pytest.mark.parametrize("text", PYTHON, ids=["sdk", "plain"])
async def test_a_snippet_runs_with_nothing_set(text: str, tmp_path: Path) -> None:
    """Only the address differs, since the tests' proxy is not on the standard port. One turn, and the release."""
    async with serve() as server:
        here = text.replace("http://127.0.0.1:8300", server.url)
        here = here.replace("program() as p", f"program(proxy={server.url!r}) as p")
        script = tmp_path / "agent.py"
        script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{here.replace('...', TURN, 1)}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), cwd=tmp_path, env={"PATH": os.defpath}, stdout=PIPE, stderr=PIPE
        )
        _, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        assert (await get(server.url, "/programs")).json()["total"] == 0
        assert await metric(server.url, "turns_total", "finished") == 1
