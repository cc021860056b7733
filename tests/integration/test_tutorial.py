"""The tutorial as a newcomer types it: every command of the page runs, and shows the page's output."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.integration.support import command, metrics_of

if TYPE_CHECKING:
    from tests.integration.support import CommandProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start" / "simulated.md").read_text()
INSTALL, SERVE, *COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
DEADLINE_S = 50.0


async def typed(script: str, folder: Path, proxy: CommandProcess) -> str:
    """Return the output of a script of the page, in a shell that finds `thunderagent`, with this proxy's address."""
    script = script.replace("localhost:8300", proxy.url.removeprefix("http://"))
    script = script.replace("thunderagent status", f"thunderagent status --url {proxy.url}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = await asyncio.create_subprocess_exec(
        "bash", "-euc", f"{script}\nwait", cwd=folder, stdout=PIPE, stderr=STDOUT, env={**os.environ, "PATH": path}
    )
    async with asyncio.timeout(DEADLINE_S):
        said, _ = await shell.communicate()
    assert shell.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.timeout(180)
async def test_every_command_of_the_tutorial_shows_what_it_says(tmp_path: Path) -> None:
    """A turn is named, twelve agents do not all fit and none is refused, and every program is released."""
    name, *options = SERVE.split()[1:]
    assert SERVE.split()[0] == "thunderagent"
    first, status, crowd, release = COMMANDS
    async with command(name, *options, "--port", "0") as proxy:
        head = await typed(first, tmp_path, proxy)
        said = dict(line.split(": ", 1) for line in head.splitlines() if re.match(r"X-[\w-]+: ", line))
        assert (said["X-Program-ID"], said["X-Program-ID-Source"]) == ("my-first-program", "path")
        assert {name for name in said if name.startswith("X-")} >= set(re.findall(r"^(X-[\w-]+):", PAGE, re.MULTILINE))
        assert re.search(r"my-first.* active +acting", await typed(status, tmp_path, proxy))
        shown = await typed(crowd, tmp_path, proxy)
        assert re.search(r"turns held \d", shown)
        decisions = (await metrics_of(proxy.url))["thunderagent_decisions_total"]
        assert any(kind == "hold" for kind, _ in decisions), "all twelve fit"
        assert re.search(r'"waiting": ?(null|.*"what_must_happen")', shown)
        answers = [path.read_text() for path in tmp_path.glob("answer-*.json")]
        assert len(answers) == 12
        assert all('"choices"' in answer for answer in answers)
        assert (await typed(release, tmp_path, proxy)).replace(" ", "").count('"released":true') == 13
        async with httpx2.AsyncClient(base_url=proxy.url, timeout=DEADLINE_S) as client:
            assert (await client.get("/programs")).json()["total"] == 0
            assert (await client.get("/dashboard")).status_code == 200


@pytest.mark.real
@pytest.mark.timeout(300, func_only=True)
async def test_the_installation_of_the_tutorial_works(tmp_path: Path) -> None:
    """The commands run in an empty environment, from this checkout."""
    script = INSTALL.replace(".venv", str(tmp_path / "venv")).replace("pip install .", f"pip install --quiet {ROOT}")
    shell = await asyncio.create_subprocess_exec(
        "bash", "-euc", f"{script}\nthunderagent --version", cwd=tmp_path, stdout=PIPE, stderr=STDOUT
    )
    said, _ = await shell.communicate()
    assert shell.returncode == 0, said.decode()
    assert re.search(r"^thunderagent \d", said.decode(), re.MULTILINE)
