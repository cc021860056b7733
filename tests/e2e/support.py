"""A proxy with small simulated engines under load, and a browser that opens its dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import httpx2

from benchmarks.processes import Server, thunderagent
from tests.debian import install

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

    from playwright.async_api import Browser

CHROMIUM = "/usr/bin/chromium"
WORDS_PER_TURN = (150, 450)
LAUNCH_S = 120.0
CLOSE_S = 20.0
"""How long a browser or a page may take to close; one that does not answer is killed."""


class BrowserError(RuntimeError):
    """No browser is available; the text gives the reason."""


def ensure_chromium() -> str:
    """Return Chromium's path; install Debian's if it is missing and that is allowed. Raises BrowserError."""
    found = shutil.which("chromium") or shutil.which(CHROMIUM)
    if found is not None:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BrowserError("no chromium, and it cannot be installed here: that needs root and apt-get")
    if why := install("chromium"):
        raise BrowserError(why)
    return CHROMIUM


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Chromium during the block. Raises BrowserError."""
    try:
        from playwright.async_api import async_playwright  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BrowserError("no playwright: pip install '.[e2e]' in a checkout") from error
    path = await asyncio.to_thread(ensure_chromium)
    options = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    before, begun = _processes().keys(), dict[int, int]()
    async with AsyncExitStack() as endings:  # the last one first, and each one whatever the others do
        endings.callback(_kill, begun)
        async with asyncio.timeout(LAUNCH_S):
            playwright = await async_playwright().start()
            endings.push_async_callback(_bounded, playwright.stop)
            driver_ids = _processes().keys() - before
            begun.update(_descendants(driver_ids))
            browser = await playwright.chromium.launch(executable_path=path, args=options, timeout=1000 * LAUNCH_S)
            endings.push_async_callback(_bounded, browser.close)
            begun.update(_descendants(driver_ids))
        yield browser


async def _bounded(ending: Callable[[], Awaitable[None]]) -> None:
    """End something, and do not wait for it for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await ending()


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the time of start of each process of this one's user."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if folder.stat().st_uid == os.getuid():
                found[int(folder.name)] = int(fields[1]), int(fields[19])
    return found


def _descendants(of: Iterable[int]) -> dict[int, int]:
    """Return the times of start of these processes that come from this one, and of all below them."""
    processes, own_pid, of = _processes(), os.getpid(), set(of)

    def line_of(pid: int) -> Iterator[int]:
        while pid in processes and pid != own_pid:
            yield pid
            pid = processes[pid][0]
        yield pid

    lines = {pid: set(line_of(pid)) for pid in processes}
    return {pid: processes[pid][1] for pid, line in lines.items() if own_pid in line and pid != own_pid and line & of}


def _kill(begun: dict[int, int]) -> None:
    """Kill those of these processes that are still there; another one of the same id began later."""
    processes = _processes()
    for pid, start in begun.items():
        if pid in processes and processes[pid][1] == start:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def serving(log_path: Path, *options: str, port: int = 0, ready: bool = True) -> AsyncIterator[Server]:
    """Run `thunderagent serve` during the block, which by default begins when it is ready."""
    polling = ("--poll-interval-s", "0.25", "--poll-deadline-s", "10", "--grace-s", "0")
    async with (
        thunderagent("serve", "--port", str(port), *polling, *options, log_path=log_path) as server,
        httpx2.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        async with asyncio.timeout(120):
            while ready and (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)
        yield server


@asynccontextmanager
async def load(url: str, names: list[str], *, tool_s: float, seed: int = 0) -> AsyncIterator[None]:
    """Run a program of each name during the block; replace each with one of the same kind when it ends."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_programs(client, name, tool_s, Random(f"{seed}/{name}"))) for name in names]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
        await client.post("/programs/release", json={"all": True}, timeout=60)


async def _run_programs(client: httpx2.AsyncClient, name: str, tool_s: float, random: Random) -> None:
    await asyncio.sleep(random.random() * tool_s * 2)
    for number in range(1, 1000):
        program_id = f"{name}/{number}"
        text = _words(random, 500)
        for _ in range(random.randint(5, 14)):
            await turn(client, program_id, text, max_tokens=random.randint(24, 96), stream=True)
            slowness = 5 if random.random() < 0.15 else 1  # now and then a tool is slow
            await asyncio.sleep(random.expovariate(1 / (slowness * tool_s)))
            text += " " + _words(random, random.randint(*WORDS_PER_TURN))
        with contextlib.suppress(httpx2.TransportError):  # a connection may close as it is used again
            await client.post("/programs/release", json={"program_id": program_id})


def _words(random: Random, count: int) -> str:
    return " ".join(f"w{random.randrange(2000)}" for _ in range(count))


async def turn(
    client: httpx2.AsyncClient, program_id: str, text: str, *, max_tokens: int = 8, stream: bool = False
) -> None:
    """Take one turn, whatever its result."""
    body: dict[str, Any] = {
        "model": "simulated",
        "max_tokens": max_tokens,
        "stream": stream,
        "messages": [{"role": "system", "content": "you are an agent " * 60}, {"role": "user", "content": text}],
    }
    with contextlib.suppress(httpx2.TransportError):
        await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": program_id})
