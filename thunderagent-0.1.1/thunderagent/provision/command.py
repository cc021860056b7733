"""Replicas that are processes of this machine: a command with a port of its own each.

`{port}` in the command and the URL is a free port, `{replica_id}` what the proxy will call the replica. Each is a
process group of its own, so that a Ctrl-C in a terminal is the proxy's alone, and so that all that an engine started
ends with it. Its standard input stays open for as long as the proxy lives: an engine that ends with it leaves nothing
behind even if the proxy is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from thunderagent.backends.discovery.base import replica_id_of
from thunderagent.errors import ConfigurationError, ProvisionError
from thunderagent.provision.base import Launched, OnLost, free_port, url_on

LOOK_S = 0.1
"""How often to check whether processes still run."""


class CommandProvisioner:
    """Start and end processes."""

    name = "command"
    names_urls = True

    def __init__(self, command: str, url: str, *, end_limit_s: float = 30.0, log_folder: Path | None = None) -> None:
        """Start `command`, whose engine answers at `url`. Raises `ConfigurationError` if invalid."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigurationError(f"provision_command: {error}") from error
        if not self._words:
            raise ConfigurationError("provision_command: needs a command, with {port} where its port belongs")
        if "{port}" not in command or "{port}" not in url:
            raise ConfigurationError("provision_command and provision_url: need {port}, so that each has its own")
        url_on(1, url)
        self._url = url
        self._end_limit_s = end_limit_s
        self._log_folder = log_folder
        self._running: dict[str, Process] = {}
        """By handle, which is the process id."""

    def __repr__(self) -> str:
        return f"<CommandProvisioner {self._words[0]}: {', '.join(self._running) or 'none'}>"

    async def open(self) -> int:
        """See `Provisioner`: nothing outlives a proxy that was shut down."""
        return 0

    async def run(self, on_lost: OnLost) -> None:
        """See `Provisioner`."""
        while True:
            await asyncio.sleep(LOOK_S)
            for handle, process in list(self._running.items()):
                if process.returncode is not None:
                    del self._running[handle]
                    _end_rest(process)
                    status = process.returncode
                    how = f"signal {-status}" if status < 0 else f"status {status}"
                    on_lost(handle, f"its process ended by itself, with {how}")

    async def start(self) -> Launched:
        """See `Provisioner`."""
        port = free_port()
        url = url_on(port, self._url)
        replica_id = replica_id_of(url)
        words = [word.replace("{port}", str(port)).replace("{replica_id}", replica_id) for word in self._words]
        try:
            with self._log(port) as log:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=PIPE, stdout=log, stderr=log, start_new_session=True
                )
        except (OSError, ValueError) as error:
            raise ProvisionError(f"{words[0]}: {error}") from error
        handle = str(process.pid)
        self._running[handle] = process
        return Launched(handle, url)

    async def check_end(self, handle: str, url: str) -> None:
        """See `Provisioner`."""

    async def end(self, handle: str, url: str) -> None:  # noqa: ARG002 - see `Provisioner`
        """See `Provisioner`. One that has ended is no error."""
        process = self._running.pop(handle, None)
        if process is None:
            return
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                _tell_group(process, number)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._end_limit_s):
                        await process.wait()
                        break
        except asyncio.CancelledError:
            self._running[handle] = process  # a shutdown: `close` ends it
            raise
        _end_rest(process)

    async def close(self) -> None:
        """See `Provisioner`."""
        async with asyncio.TaskGroup() as group:
            for handle in list(self._running):
                group.create_task(self.end(handle, ""))

    @contextlib.contextmanager
    def _log(self, port: int):  # type: ignore[no-untyped-def]
        if self._log_folder is None:
            yield DEVNULL
            return
        with (self._log_folder / f"replica-{port}.log").open("ab") as file:
            yield file


def _tell_group(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.killpg(process.pid, number)


def _end_rest(process: Process) -> None:
    """End the children of an ended process, and forget it."""
    _tell_group(process, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
