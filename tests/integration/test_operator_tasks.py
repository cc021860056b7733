"""The ten tasks of an operator, as two pages have them: each command runs, and does what it is for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.integration.support import command, engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "observe.md").read_text()
TASKS = dict(
    re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.partition("## Ten tasks")[2].partition("\n## ")[0], re.MULTILINE)[1:]
)
DEADLINE_S = 50.0
COMMANDS = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```sh\n(.+?)```",
        (ROOT / "docs" / "how-to" / "operate.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)
"""The first command of each task of the page on operating, by its heading."""


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
            (replica,) = (await client.get("/replicas")).json()["replicas"]
            script = command_for(task).replace("10.0.0.1:8000", replica["replica_id"])
            return await run(script, proxy.url, tmp_path)

        await _tasks(client, typed)
    assert json.loads((tmp_path / "keys.json").read_text())["keys"][0]["turns_per_min"] == 600


async def run(script: str, url: str, folder: Path, **environment: str) -> str:
    """Run what a page says in a shell, on the proxy at `url` instead of that of the page; return what it prints."""
    script = script.replace("localhost:8300", url.removeprefix("http://"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "THUNDERAGENT_PROXY": url, "PYTHONPATH": str(ROOT), **environment}
    shell = await asyncio.create_subprocess_exec(
        "bash", "-euc", script, cwd=folder, stdout=PIPE, stderr=PIPE, env=environment
    )
    async with asyncio.timeout(DEADLINE_S):
        said, complaint = await shell.communicate()
    assert shell.returncode == 0, complaint.decode() + said.decode()
    return said.decode()


@pytest.mark.skipif(shutil.which("jq") is None, reason="the page's commands need jq")
@pytest.mark.timeout(300)
async def test_each_command_of_the_page_on_operating_does_its_task(tmp_path: Path) -> None:
    """One engine lives and one is dead; one program is acting, the next one is held. Keys are asked for."""
    made = await run("thunderagent key ops --admin --keys-file keys.json", "-", tmp_path)
    (key,) = re.findall(r"tak_\S+", made)
    bearer = {"Authorization": f"Bearer {key}"}
    async with (
        engine() as replica,
        command(
            *("serve", "--backends", f"{replica.url},http://127.0.0.1:9", "--policy", "cap", "--policy-arg", "n=1"),
            *("--keys-file", str(tmp_path / "keys.json"), "--port", "0"),
        ) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, headers=bearer, timeout=60, trust_env=False) as client,
    ):
        replica_id, commands = replica.url.removeprefix("http://"), dict(COMMANDS)

        async def typed(task: str) -> str:
            script = commands.pop(task).replace("10.0.0.1:8000", replica_id)
            script = re.sub("curl(?!.*Authorization)", 'curl -H "Authorization: Bearer $THUNDERAGENT_KEY"', script)
            return await run(script, proxy.url, tmp_path, THUNDERAGENT_KEY=key)

        await _tasks_of_operating(client, typed, replica_id)
    assert not commands, "tasks that nobody tried"


async def _tasks_of_operating(
    client: httpx2.AsyncClient, typed: Callable[[str], Awaitable[str]], replica_id: str
) -> None:
    async def turn(program_id: str, messages: object) -> httpx2.Response:
        body = {"model": "simulated", "messages": messages, "max_tokens": 4}
        return await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": program_id})

    async def until(path: str, holds: Callable[[dict[str, Any]], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds((await client.get(path)).json()):
                await asyncio.sleep(0.02)

    async def names() -> set[str]:
        return {each["name"] for each in (await client.get("/keys")).json()["keys"]}

    hello = [{"role": "user", "content": "hello"}]
    await until("/replicas", lambda said: any(each["up"] for each in said["replicas"]))
    assert (await turn("first", hello)).status_code == 200
    assert (await turn("first", "no list")).status_code == 400
    async with asyncio.TaskGroup() as group:
        held = group.create_task(turn("task-5", hello))
        await until("/queue", lambda said: said["waiting_count"])
        needs = (await client.get("/queue")).json()["first_needs"]
        said = json.loads(await typed("Find why a turn waits"))
        assert said == {"status": "paused", "turns_held_count": 1, "needs": needs}
        await until("/summary", lambda said: said["rates"]["turns_per_min"])
        sizes = json.loads(await typed("Size 16 replicas"))
        assert (sizes["programs_that_fit"], sizes["processes"]) == (16, 1)
        assert 'outcome="refused"} 1.0' in await typed("See errors")
        most, *_ = json.loads(await typed("Find which program costs most"))
        assert most["program_id"] == "first"
        dead = json.loads(await typed("Find a dead engine"))
        assert dead["replica_id"] == "127.0.0.1:9"
        assert dead["why_down"]
        assert re.search(rf"{replica_id}.*\d+%", await typed("See whether prefix caching works"))
        await typed("Abort a program")
        assert (await held).status_code == 410
    await typed("Add a key with a limit")
    async with asyncio.timeout(DEADLINE_S):
        while "lab" not in await names():
            await asyncio.sleep(0.05)
    await typed("Rotate a key")
    async with asyncio.timeout(DEADLINE_S):
        while await names() != {"ops", "lab-2"}:
            await asyncio.sleep(0.05)
    await typed("Drain an engine")
    replicas = (await client.get("/replicas")).json()["replicas"]
    assert [each["verdict"] for each in replicas if each["replica_id"] == replica_id] == ["draining"]


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
