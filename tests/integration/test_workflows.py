"""The workflow tutorial's files, unchanged, against a running proxy; and the programs of its turns."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.docs_site import whole
from tests.integration.support import answers, fake_replica, running_proxy
from thunderagent.programs.messages import ProgramReleased, TurnAsk

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "workflows.md"
URL = "http://127.0.0.1:8300"


def write_tutorial(folder: Path, proxy_url: str) -> None:
    """Write the page's files, each named in its first line."""
    text = whole(PAGE.read_text())
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        name = re.match(r"# (\w+\.\w+)\n", block)
        if name is not None:
            (folder / name[1]).write_text(block.replace(URL, proxy_url))


async def run(folder: Path, command: Sequence[str], **variables: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=PIPE, stderr=STDOUT, env={"PATH": "", **variables}
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Its session is one program with a branch for each call, and is released at the end."""
    async with fake_replica(answers()) as replica, running_proxy(replica.url) as proxy:
        heard: list[Any] = []
        proxy.runtime.observe(lambda event, _: heard.append(event))
        write_tutorial(tmp_path, proxy.url)
        stubs = [sys.executable, "-m", "thunderagent", "workflow", "stubs", "agents.yaml"]
        assert "3 stubs in stubs" in await run(tmp_path, stubs)
        printed = await run(tmp_path, [sys.executable, "main.py"], THUNDERAGENT_PROXY=proxy.url)
        assert printed.strip() == str([f"Enable OAuth login, part {number}" for number in range(3)])
        page = (tmp_path / "timeline.html").read_text()
        assert page.count("<g><title>developer.build") == 6
        assert page.count("<g><title>tester.check") == 6
        turns = [event for event in heard if isinstance(event, TurnAsk)]
        assert {turn.program_id for turn in turns} == {"user-7"}
        assert len({turn.branch_id for turn in turns}) == len(turns) == len(replica.calls) == 13
        assert [event.program_id for event in heard if isinstance(event, ProgramReleased)] == ["user-7"]
