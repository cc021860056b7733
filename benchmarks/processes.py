"""Run commands of `thunderagent` as separate processes during a block, and observe them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence

READY_S = 180.0
STOP_S = 15.0
_READY_LINE = re.compile(r"ready at (http://\S+?)(?::? |$)")


class ServerError(RuntimeError):
    """A server failed to start; the text ends with its log."""


@dataclass(frozen=True)
class Server:
    """One running `thunderagent` command that serves; `url` has no slash at its end."""

    process: Process
    url: str


@asynccontextmanager
async def thunderagent(*arguments: str, log_path: Path, code: Path | None = None) -> AsyncIterator[Server]:
    """Run `thunderagent ARGUMENTS` during the block, which begins after its line "ready at URL".

    It runs the package in the folder `code`; by default the one that this process would import. Standard error
    goes to `log_path`. The command sees none of the THUNDERAGENT_ variables, which would change its configuration.
    Where the kernel can, it ends the command if this process dies first. Raises ServerError
    if the command ends, or says nothing for `READY_S` seconds.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent(),
            *(sys.executable, "-m", "thunderagent", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={name: value for name, value in os.environ.items() if not name.startswith("THUNDERAGENT_")},
            cwd=code,  # `python -m` looks there first
            start_new_session=True,  # Ctrl-C is for this process alone, which then stops the others in order
        )
    try:
        yield Server(process, await _url_when_ready(process, arguments, log_path))
    finally:
        await stop(process)


@asynccontextmanager
async def running(*command: str, log_path: Path, core: int | None = None, **environment: str) -> AsyncIterator[Process]:
    """Run a command during the block, on one core if given, with these variables besides; its output is logged."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    pinning = () if core is None else ("taskset", "--cpu-list", str(core))
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(*die_with_parent(), *pinning, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await stop(process)


async def stop(process: Process, grace_s: float = STOP_S) -> None:
    """Terminate a process, and kill it after `grace_s`; harmless if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def resident_mb(pid: int) -> float:
    """Return a process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def tail(path: Path, lines_count: int = 25) -> str:
    """Return the last lines of a text file; empty when there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines_count:])


async def _url_when_ready(process: Process, arguments: Sequence[str], log_path: Path) -> str:
    assert process.stdout is not None
    line = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            line = await process.stdout.readline()
    found = _READY_LINE.search(line.decode(errors="replace"))
    if found is None:
        raise ServerError(f"`thunderagent {' '.join(arguments)}` did not come up; its log ends:\n{tail(log_path)}")
    return found[1]


def die_with_parent() -> tuple[str, ...]:
    """Return a command prefix that ends the command if this process dies first; empty if the system has none."""
    return ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
