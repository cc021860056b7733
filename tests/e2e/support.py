"""A proxy with small simulated engines under load, and a browser that opens its dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import httpx2

from benchmarks.processes import Server, thunderagent
from tests.debian import install

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Browser

CHROMIUM = "/usr/bin/chromium"
WORDS_PER_TURN = (150, 450)


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
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            await browser.close()


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
        await client.post("/programs/release", json={"all": True})


async def _run_programs(client: httpx2.AsyncClient, name: str, tool_s: float, random: Random) -> None:
    await asyncio.sleep(random.random() * tool_s * 2)
    for number in range(1, 1000):
        program_id = f"{name}/{number}"
        text = _words(random, 500)
        for _ in range(random.randint(5, 14)):
            await turn(client, program_id, text, max_tokens=random.randint(24, 96))
            slowness = 5 if random.random() < 0.15 else 1  # now and then a tool is slow
            await asyncio.sleep(random.expovariate(1 / (slowness * tool_s)))
            text += " " + _words(random, random.randint(*WORDS_PER_TURN))
        await client.post("/programs/release", json={"program_id": program_id})


def _words(random: Random, count: int) -> str:
    return " ".join(f"w{random.randrange(2000)}" for _ in range(count))


async def turn(client: httpx2.AsyncClient, program_id: str, text: str, *, max_tokens: int = 8) -> None:
    """Take one turn, whatever its result."""
    body: dict[str, Any] = {
        "model": "simulated",
        "max_tokens": max_tokens,
        "messages": [{"role": "system", "content": "you are an agent " * 60}, {"role": "user", "content": text}],
    }
    with contextlib.suppress(httpx2.TransportError):
        await client.post("/v1/chat/completions", json=body, headers={"X-Program-ID": program_id})
