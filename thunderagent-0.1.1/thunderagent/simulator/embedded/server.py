"""Serves the engine model in real time under vLLM's HTTP dialect: the embedded engine.

Theory of operation
-------------------
One task steps the engine, in the rhythm of `realtime.py`; each of several data-parallel ranks (`ranks.py`) has its own.
A handler parses a request (`requests.py`), tokenizes it and chooses the tokens of the answer (`tokens.py`), waits until
the engine has generated them, and shapes them (`answers.py`). A request lives as long as its handler: a client that
leaves cancels that, which frees the blocks.

The same functions run servers other than `EngineServer`: their interface is `Served`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import uvloop
from aiohttp import web

from thunderagent.simulator.embedded.endpoints import EngineServer
from thunderagent.simulator.embedded.options import ServerConfig, add_arguments, config_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line, and of a header: what a proxy before it takes, it takes, too."""


class Served(Protocol):
    """An engine's HTTP API; `drive` must run beside its application."""

    app: web.Application

    async def drive(self) -> None:
        """Run iterations until cancelled."""
        ...


Build: TypeAlias = Callable[[ServerConfig], Served]


@asynccontextmanager
async def running(config: ServerConfig, build: Build = EngineServer) -> AsyncIterator[str]:
    """Serve an engine while the context is open, and yield its base URL.

    Leaving it closes the socket, lets requests finish for up to `grace_s`, aborts the rest. Raises OSError if the
    address is not available.
    """
    server = build(config)
    runner = web.AppRunner(
        server.app,
        handler_cancellation=not config.keep_zombies,
        shutdown_timeout=config.grace_s,
        access_log=None,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        port = runner.addresses[0][1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        async with asyncio.TaskGroup() as tasks:
            driver = tasks.create_task(server.drive())
            try:
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()  # while the engine still runs, for requests that may finish
                driver.cancel()
    finally:
        await runner.cleanup()


async def serve(
    config: ServerConfig, build: Build = EngineServer, *, ready: Callable[[str], None] | None = None
) -> None:
    """Serve an engine until cancelled, SIGTERM or SIGINT; `ready` is called with its base URL once it listens.

    Needs the main thread, where signals arrive. Raises OSError if the address is not available.
    """
    with _stop_signals() as stop:
        async with running(config, build) as url:
            if ready is not None:
                ready(url)
            if config.end_with_stdin:
                await _stop_with_stdin(stop)
            await stop.wait()


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _stop_with_stdin(stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends: the parent process is gone."""

    class EndOfInput(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
            stop.set()

    mode = os.fstat(sys.stdin.fileno()).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty():
        await asyncio.get_running_loop().connect_read_pipe(EndOfInput, sys.stdin)
    else:  # a file or /dev/null: nobody is behind it, and waiting for it makes uvloop abort the process
        stop.set()


def run(args: argparse.Namespace, build: Build = EngineServer) -> int:
    """Serve an engine by the options, until a signal; return the exit status (2: impossible options)."""
    try:
        config = config_from(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def announce(url: str) -> None:
        engine = config.engine
        print(
            f"embedded engine ready at {url}: model {config.model}, {engine.capacity_tokens} KV tokens in "
            f"{engine.block_count} blocks, profile {engine.timing.name}, speed {config.speed:g}",
            flush=True,
        )

    try:
        uvloop.run(serve(config, build, ready=announce))
    except OSError as error:
        print(f"error: cannot serve on {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None, build: Build = EngineServer) -> int:
    """Run the embedded engine as a program of its own."""
    parser = argparse.ArgumentParser(
        prog="python -m thunderagent.simulator.embedded.server",
        description="Serve a simulated engine that batches, caches, evicts and preempts as a real vLLM does.",
    )
    add_arguments(parser)
    return run(parser.parse_args(argv), build)


if __name__ == "__main__":
    sys.exit(main())
