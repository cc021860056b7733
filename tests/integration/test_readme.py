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

from tests.integration.support import ask, fake_replica, get, metric, serve
from thunderagent.cli import build_parser
from thunderagent.config import ServeConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPETS = FENCED.findall(README)
PYTHON = [text for language, text in SNIPPETS if language == "python"]
COMMANDS = [
    words
    for language, text in SNIPPETS
    if language == "sh"
    for line in text.splitlines()
    for part in line.split("&&")
    if (words := shlex.split(part, comments=True))
]
IN_WORDS = [text.split() for text in re.findall(r"`((?:thunderagent|scripts/)\s?[^`]+)`", FENCED.sub("", README))]
"""Commands that the text names."""

NOTHING_SET = {"PATH": os.defpath}
HELLO = [{"role": "user", "content": "hello"}]
TURN = f"client.chat.completions.create(model='simulated', messages={HELLO}, max_tokens=4)"


def test_the_commands_to_run_and_to_test_are_there() -> None:
    """Each is a file here, a command of ours with options that it takes, or the standard way to install."""
    installing = (["python3", "-m", "venv"], [".", ".venv/bin/activate"], ["pip", "install", "."])
    rest = [words for words in COMMANDS if not any(words[: len(each)] == each for each in installing)]
    assert [words[0] for words in rest] == ["thunderagent", "scripts/test", "thunderagent"]
    assert ["thunderagent", "doctor"] in IN_WORDS
    for words in (*rest, *IN_WORDS):
        if words[0] == "thunderagent":
            args = build_parser().parse_args(words[1:])
            given = {name: value for name in ServeConfig.model_fields if (value := getattr(args, name, None))}
            ServeConfig.load(**given)
        else:
            assert os.access(ROOT / words[0], os.X_OK)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "thunderagent"], ids=" ".join)
async def test_a_command_serves_with_nothing_set(words: list[str], tmp_path: Path) -> None:
    """Only the addresses differ: its own, and those of the engines."""
    async with fake_replica() as first, fake_replica() as second:
        engines = f"{first.url},{second.url}"
        options = [engines if word.startswith("http") else word for word in words[1:]]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "thunderagent", *options, "--port", "0"),
            cwd=tmp_path,
            env={**NOTHING_SET, "PYTHONPATH": str(ROOT)},
            stdout=PIPE,
        )
        try:
            assert process.stdout is not None
            line = b""
            while not line.startswith(b"thunderagent ready at "):
                line = await process.stdout.readline()
                assert line, "it ended"
            url = re.findall(r"http://[\w.:]+\d", line.decode())[0]
            assert len((await get(url, "/replicas")).json()["replicas"]) == 2
            assert (await ask(url, "a")).status == 200
        finally:
            process.terminate()
            assert await process.wait() == 0


@pytest.mark.parametrize("text", PYTHON, ids=["sdk", "plain"])
async def test_a_snippet_runs_with_nothing_set(text: str, tmp_path: Path) -> None:
    """Only the address differs, since the tests' proxy is not on the standard port. One turn, and the release."""
    async with serve() as server:
        here = text.replace("http://127.0.0.1:8300", server.url)
        here = here.replace("program() as p", f"program(proxy={server.url!r}) as p")
        script = tmp_path / "agent.py"
        script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{here.replace('...', TURN, 1)}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), cwd=tmp_path, env=NOTHING_SET, stdout=PIPE, stderr=PIPE
        )
        _, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        assert (await get(server.url, "/programs")).json()["total"] == 0
        assert await metric(server.url, "turns_total", "finished") == 1
