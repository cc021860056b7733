"""Runs several gateways and their scheduler by one command, for one machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from typing import Any

import structlog

from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.scaling import begin_process, check_gateways, scheduler
from thunderagent.serving.listening import CLOSE_S
from thunderagent.serving.security import check_security
from thunderagent.serving.serving import Announcer, announce

log = structlog.get_logger("thunderagent")

RESTARTS_COUNT, RESTARTS_WITHIN_S = 5, 60.0
"""Gateways that end are restarted, in total this often within that time; then everything ends."""

START_AGAIN_S = 2.0
"""Time until a gateway that the system could not start again is tried once more, while others serve."""

_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


async def serve_with_gateways(config: ServeConfig, options: Sequence[str], *, announcer: Announcer | None) -> None:
    """Run a scheduler, and `config.gateways` gateways on one port, each a process given `options`.

    A gateway that ends is restarted, within a bound; beyond that everything ends. Raises as `serve` does.
    """
    check_gateways(config, in_one_command=True)
    check_security(config)  # the scheduler is on loopback, where more is allowed
    with _port_of(config) as port:
        own: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "tls_cert": None, "tls_key": None}
        environment = dict(os.environ)
        if config.admin_keys or config.has_keys:
            key, line = mint_key("gateways")
            own["admin_keys"] = (*config.admin_keys, line)
            environment[f"{ENVIRONMENT_PREFIX}SCHEDULER_KEY"] = key
        stop = begin_process()
        async with scheduler(config.model_copy(update=own)) as (url, runtime, _):
            more = ("--schedulers", url, "--host", config.host, "--port", str(port), "--gateways", "0")
            command = (sys.executable, "-m", "thunderagent", "gateway", *options, *more, "--end-with-stdin")
            gateways = _Gateways(command, environment, config.gateways, config.shutdown_delay_s + config.grace_s)
            host = f"[{config.host}]" if ":" in config.host else config.host
            shared_url = f"{'http' if config.tls_cert is None else 'https'}://{host}:{port}"
            what = f"policy {runtime.scheduler.policy.name}, {config.gateways} gateways, scheduler {url}"

            async def tell() -> None:
                await gateways.listening.wait()
                await announce(announcer, runtime, shared_url, what)

            async with asyncio.TaskGroup() as group:
                telling = group.create_task(tell())
                running = group.create_task(gateways.run())
                stopping = group.create_task(stop.wait())
                await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                telling.cancel()
                if running.done():
                    stopping.cancel()
                else:
                    await gateways.end()
                    running.cancel()


@contextlib.contextmanager
def _port_of(config: ServeConfig) -> Any:
    """Reserve a port for the gateways: they share it, and nobody else gets it while they start."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((config.host, config.port))
        yield kept.getsockname()[1]


class _Gateways:
    """Starts gateways, and restarts those that end."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], count: int, patience_s: float) -> None:
        self._command = command
        self._environment = environment
        self._count = count
        self._patience_s = patience_s
        self._processes: set[Process] = set()
        self._listening_count = 0
        self._ended_s: deque[float] = deque(maxlen=RESTARTS_COUNT)
        self._ending = False
        self.listening = asyncio.Event()
        """Set once each has said for the first time that it is ready, or why it is not yet."""

    async def run(self) -> None:
        """Keep all of them running, until they end too often. Raises `ConfigurationError` then."""
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._count):
                    group.create_task(self._keep(number))
        finally:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def _keep(self, number: int) -> None:
        is_first, loop = True, asyncio.get_running_loop()
        while not self._ending:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=PIPE, stdout=PIPE, env=self._environment, start_new_session=True
                )
            except OSError as error:
                if is_first or error.errno not in _SHORTAGES:
                    raise
                log.error("gateway_not_started", number=number, why=str(error))  # noqa: TRY400 - no bug, so no trace
                await asyncio.sleep(START_AGAIN_S)
                continue
            self._processes.add(process)
            assert process.stdout is not None
            line = await process.stdout.readline()
            if line and is_first:
                is_first = False
                self._listening_count += 1
                if self._listening_count == self._count:
                    self.listening.set()
            status = await process.wait()
            self._processes.discard(process)
            if self._ending:
                return
            log.error("gateway_ended", number=number, pid=process.pid, exit_status=status)
            now_s = loop.time()
            if len(self._ended_s) == RESTARTS_COUNT and now_s - self._ended_s[0] < RESTARTS_WITHIN_S:
                raise ConfigurationError(f"gateways ended {RESTARTS_COUNT + 1} times within {RESTARTS_WITHIN_S:g} s")
            self._ended_s.append(now_s)

    async def end(self) -> None:
        """End all after their turns; those that take too long are killed."""
        self._ending = True
        processes = list(self._processes)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s + 2 * CLOSE_S):
                await asyncio.gather(*(process.wait() for process in processes))
