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
_, SERVE, *COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
DEADLINE_S = 150.0


async def typed(script: str, folder: Path, proxy: CommandProcess) -> str:
    """Return the output of a script of the page, in a shell that finds `thunderagent`, with this proxy's address."""
    script = script.replace("localhost:8300", proxy.url.removeprefix("http://"))
    script = script.replace("thunderagent status", f"thunderagent status --url {proxy.url}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "THUNDERAGENT_PROXY": proxy.url, "PYTHONPATH": str(ROOT)}
    shell = await asyncio.create_subprocess_exec(
        "bash", "-euc", f"{script}\nwait", cwd=folder, stdout=PIPE, stderr=STDOUT, env=environment
    )
    async with asyncio.timeout(DEADLINE_S):
        said, _ = await shell.communicate()
    assert shell.returncode == 0, said.decode()
    return said.decode()


def served() -> list[str]:
    """Return the options of the page's first `thunderagent serve`."""
    options: list[str]
    name, command_name, *options = SERVE.split()
    assert (name, command_name) == ("thunderagent", "serve")
    return options


@pytest.mark.timeout(180)
async def test_every_command_of_the_tutorial_shows_what_it_says(tmp_path: Path) -> None:
    """A turn is named, the program is acting and is released, and agents run their loops to the end: here four."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    first, status, release, crowd, _, _ = COMMANDS
    async with command("serve", *served(), "--port", "0") as proxy:
        head = await typed(first, tmp_path, proxy)
        said = dict(line.split(": ", 1) for line in head.splitlines() if re.match(r"X-[\w-]+: ", line))
        assert (said["X-Program-ID"], said["X-Program-ID-Source"]) == ("my-first-program", "path")
        assert {name for name in said if name.startswith("X-")} >= set(re.findall(r"^(X-[\w-]+):", PAGE, re.MULTILINE))
        assert re.search(r"my-first.* active +acting", await typed(status, tmp_path, proxy))
        assert '"released":true' in (await typed(release, tmp_path, proxy)).replace(" ", "")
        shown = await typed(crowd.replace("agents.py", "agents.py 4").replace("sleep 15", "sleep 5"), tmp_path, proxy)
        assert re.search(r"turns held \d", shown)
        assert re.search(r"^4 agents ended after \d+ s: \d+ turns/min\na turn took ", shown, re.MULTILINE)
        assert sum((await metrics_of(proxy.url))["thunderagent_turns_total"].values()) == 1 + 4 * 9
        async with httpx2.AsyncClient(base_url=proxy.url, timeout=DEADLINE_S) as client:
            assert (await client.get("/programs")).json()["total"] == 0
            assert (await client.get("/dashboard")).status_code == 200


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_the_agents_of_the_tutorial_gain_by_scheduling(tmp_path: Path) -> None:
    """Both of its runs in full: turns are held, and the agents end sooner than passed through."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    *_, crowd, passthrough, again = COMMANDS
    rates = []
    for options, script in ((served(), crowd), (passthrough.split()[2:], again)):
        async with command("serve", *options, "--port", "0") as proxy:
            shown = await typed(script, tmp_path, proxy)
            held = (await metrics_of(proxy.url))["thunderagent_decisions_total"]
            assert any(kind == "hold" for kind, _ in held) == (options == served())
        rates.append(int(re.findall(r"(\d+) turns/min", shown)[0]))
    assert rates[0] > rates[1], rates
