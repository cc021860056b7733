"""The ten tasks of an operator, as the page on observing has them: each command runs, and does what it is for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.integration.support import command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "observe.md").read_text()
TASKS = dict(
    re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.partition("## Ten tasks")[2].partition("\n## ")[0], re.MULTILINE)[1:]
)
DEADLINE_S = 50.0


def command_for(task: str) -> str:
    """Return the command of a task's row."""
    (found,) = re.findall(r"`((?:curl|thunderagent) .+?)`", TASKS[task])
    return str(found)


def test_there_are_ten_and_each_names_a_command_or_a_part_of_the_dashboard() -> None:
    page = (ROOT / "thunderagent" / "proxy" / "admin" / "dashboard" / "index.html").read_text()
    scripts = (ROOT / "thunderagent" / "proxy" / "admin" / "dashboard" / "app.js").read_text()
    assert len(TASKS) == 10
    for task, how in TASKS.items():
        assert "`" in how or "dashboard" in how, task
        for part in re.findall(r"\*(.+?)\*", how):
            assert f">{part}<" in page or f'"{part}"' in scripts, part


@pytest.mark.timeout(180)
async def test_each_command_does_its_task(tmp_path: Path) -> None:
    """One program is acting, the next one is held; a third takes a turn that its engine refuses."""
    options = ("--embedded-engines", "1", "--policy", "cap", "--policy-arg", "n=1")
    async with (
        command("serve", *options, "--port", "0") as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=60, trust_env=False) as client,
    ):

        async def typed(task: str) -> str:
            script = command_for(task).replace("localhost:8300", proxy.url.removeprefix("http://"))
            (replica,) = (await client.get("/replicas")).json()["replicas"]
            script = script.replace("10.0.0.1:8000", replica["replica_id"])
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = {"PATH": path, "THUNDERAGENT_PROXY": proxy.url, "PYTHONPATH": str(ROOT)}
            shell = await asyncio.create_subprocess_exec(
                "bash", "-euc", script, cwd=tmp_path, stdout=PIPE, stderr=PIPE, env=environment
            )
            async with asyncio.timeout(DEADLINE_S):
                said, complaint = await shell.communicate()
            assert shell.returncode == 0, complaint.decode() + said.decode()
            return said.decode()

        await _tasks(client, typed)
    assert json.loads((tmp_path / "keys.json").read_text())["keys"][0]["turns_per_min"] == 600


async def _tasks(client: httpx2.AsyncClient, typed: Callable[[str], Awaitable[str]]) -> None:
    async def turn(program_id: str, messages: object) -> httpx2.Response:
        body = {"model": "simulated", "messages": messages, "max_tokens": 4}
        return await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": program_id})

    hello = [{"role": "user", "content": "hello"}]
    assert (await turn("first", hello)).status_code == 200
    assert (await turn("first", "no list")).status_code == 400
    async with asyncio.TaskGroup() as group:
        held = group.create_task(turn("run-7", hello))
        async with asyncio.timeout(DEADLINE_S):
            while not (await client.get("/queue")).json()["waiting_count"]:
                await asyncio.sleep(0.02)
        needs = (await client.get("/queue")).json()["first_needs"]
        assert needs in await typed("see why turns wait")
        assert json.loads(await typed("see why one program waits"))["waiting"]["what_must_happen"] == needs
        (error,) = json.loads(await typed("see which turns fail, and why"))["last_errors"]
        assert (error["program_id"], error["what"], error["cause"]) == ("first", "agent_error", "status 400")
        (replica,) = (await client.get("/replicas")).json()["replicas"]
        assert replica["replica_id"] in await typed("see why an engine gets nothing")
        programs = json.loads(await typed("find what costs most"))["programs"]
        assert [program["program_id"] for program in programs] == ["first", "run-7"]
        assert json.loads(await typed("let a program go first"))["priority"] == -1
        await typed("add a key with a limit")
        await typed("end one that runs away")
        assert (await held).status_code == 410
    await typed("take an engine out")
    (replica,) = (await client.get("/replicas")).json()["replicas"]
    assert (replica["verdict"], replica["draining"]) == ("draining", True)
