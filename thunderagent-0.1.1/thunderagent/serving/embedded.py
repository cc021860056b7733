"""Simulated engines, each a process of its own, used if nothing names a replica."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError

log = structlog.get_logger("thunderagent")

ENGINE_READY_S = 120.0
END_S = 4.0
"""For an engine to end by itself."""


@asynccontextmanager
async def embedded_engines(config: ServeConfig) -> AsyncIterator[tuple[str, ...]]:
    """Run simulated engines, each a process of its own, for the length of the block; yield their URLs."""
    log.warning(
        "engines_are_simulated",
        engines_count=config.embedded_engines,
        kv_tokens=config.embedded_kv_tokens,
        effect="answers are made-up words; set --backends URL,URL for real engines",
    )
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(_embedded_engine(config)) for _ in range(config.embedded_engines)]
        yield tuple(await asyncio.gather(*(_url_when_ready(process) for process in processes)))


@asynccontextmanager
async def _embedded_engine(config: ServeConfig) -> AsyncIterator[Process]:
    """Run one engine; it ends with its standard input, so that it cannot outlive this process."""
    options = ("--port", "0", "--kv-tokens", str(config.embedded_kv_tokens), "--end-with-stdin")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "thunderagent.simulator.embedded.server", *options),
        stdin=PIPE,
        stdout=PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal is the proxy's: its engines must outlast the grace period
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _url_when_ready(process: Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(ENGINE_READY_S):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        raise ConfigurationError(f"an embedded engine did not start within {ENGINE_READY_S:g} s") from None
    words = [word.rstrip(":") for word in line.split() if word.startswith("http://")]
    if not words:
        raise ConfigurationError(f"an embedded engine did not start: {line.strip() or 'it ended without a word'}")
    return words[0]
