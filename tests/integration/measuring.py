"""A proxy in a process of its own, measured: how long its event loop stood still, and how much memory it took.

`python -m tests.integration.measuring OPTIONS` runs it, where OPTIONS is a JSON object: `urls`, `up` and settings; or a
list, the command line of a serving command, which is measured then.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import sys
import time
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import uvloop

from tests.integration.support import running_proxy
from thunderagent.cli import main
from thunderagent.serving.lookups import Loop
from thunderagent.serving.process import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

_START_S = 60.0
"""On a machine with other work a process takes long to import what it needs."""


SUM_S = 0.015
"""What a million additions take on a processor for which bounds of milliseconds are written."""


def slower_ratio() -> float:
    """Return how many times as long as there a million additions take here, at least 1."""
    took_s = []
    for _ in range(5):
        begin_s = time.thread_time()
        sum(range(1_000_000))
        took_s.append(time.thread_time() - begin_s)
    return max(1.0, min(took_s) / SUM_S)


class Watch:
    """The longest time for which the event loop did nothing else."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """Watch for the length of the block.

        Time in which this process did not run because others did does not count. The garbage collector's work on the
        test's own hundred thousand values does not count either.
        """
        watching = asyncio.create_task(self._watch())
        gc.disable()
        try:
            await asyncio.sleep(0)
            yield
            await asyncio.sleep(0.01)
        finally:
            gc.enable()
            watching.cancel()

    async def _watch(self) -> None:
        at_s, worked_s = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0)
            now_s, now_worked_s = time.perf_counter(), time.process_time()
            self.longest_s = max(self.longest_s, min(now_s - at_s, now_worked_s - worked_s))
            at_s, worked_s = now_s, now_worked_s


class Measured(NamedTuple):
    """What was seen since the last look."""

    longest_s: float
    """The longest time for which the loop stood still, in processor time."""
    grown_bytes: int
    """How much more memory the process had at its peak than before."""


class MeasuredProxy:
    """A handle on the process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.url = ""

    async def look(self) -> Measured:
        """Return what was seen since the last look, and begin anew."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return Measured(*json.loads(await self.line()))

    async def line(self) -> bytes:
        """Return the next line that it says."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _START_S)
        assert line, "the process ended"
        return line


def measured_proxy(*urls: str, up: int | None = None, **settings: Any) -> AbstractAsyncContextManager[MeasuredProxy]:
    """Run a proxy in front of `urls` during the block, in a process of its own."""
    return _measured({"urls": urls, "up": up, **settings})


def measured_command(*words: str) -> AbstractAsyncContextManager[MeasuredProxy]:
    """Run a serving command during the block, in a process of its own."""
    return _measured(list(words))


@asynccontextmanager
async def _measured(options: object) -> AsyncIterator[MeasuredProxy]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__, json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        proxy = MeasuredProxy(process)
        proxy.url = re.findall(r"https?://[\w.:]+\d", (await proxy.line()).decode())[0]
        await proxy.look()
        yield proxy
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _START_S)
        except TimeoutError:
            process.kill()
            raise


def _of_status(name: str) -> int:
    """Return a size of this process in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def _begin_anew() -> int:
    """Give back what is free, so that it hides nothing, and forget the peak; return where memory begins to count."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmHWM")


async def _main(urls: list[str], up: int | None, settings: dict[str, Any]) -> None:
    keep_freed_memory()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what it logs
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    async with running_proxy(*urls, up=up, **lists) as proxy:
        print(proxy.url, file=said, flush=True)
        await _watch(said)


async def _watch(said: IO[str]) -> None:
    """Say what was seen after each line of the standard input, until its end."""
    looks, watch = asyncio.StreamReader(), Watch()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(looks), sys.stdin)
    async with watch.on():
        begun_bytes = _begin_anew()
        while await looks.readline():
            gc.collect()
            print(json.dumps([watch.longest_s, _of_status("VmHWM") - begun_bytes]), file=said, flush=True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            watch.longest_s, begun_bytes = 0.0, _begin_anew()


def _command(words: list[str]) -> int:
    """Run a serving command as `thunderagent` does, watched from its start."""
    run_alone = uvloop.run

    def run(serving: Coroutine[Any, Any, None], **options: Any) -> None:
        async def watched() -> None:
            task = asyncio.ensure_future(serving)
            watching = asyncio.create_task(_watch(sys.stdout))
            watching.add_done_callback(lambda _: task.cancel())  # its standard input ended
            with suppress(asyncio.CancelledError):
                await task

        run_alone(watched(), **options)

    uvloop.run = run
    return main(words)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if isinstance(options, list):
        sys.exit(_command(options))
    uvloop.run(_main(options.pop("urls"), options.pop("up"), options), loop_factory=Loop)  # as when it serves
