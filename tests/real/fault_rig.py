"""A cell of real processes for fault injection: two schedulers, four gateways, a Redis, two engines that count.

A killed process is restarted a second later, as by a supervisor. Between gateways, schedulers and the store are links
that can go silent. The programs that take turns are in `fault_load.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.integration.support import CommandProcess, command, get, metrics_of
from tests.loopback import free_ports
from tests.real.silent_link import SilentLink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from tests.real.redis_server import RedisServer
    from tests.real.silent_link import Way

GATEWAYS_COUNT = 4
ENGINES_COUNT = 2
LOCK_S = 3.0
SLOTS_S = 0.4
"""Programs that may be active at once, for each turn a second. A turn takes 0.46 s of one, with the idle limit after
it: so some hundred programs are always held, and go on within seconds of the last turn of the others. `cap` lets those
in first that were opened first, so with much less room the youngest would wait for as long as there is load."""

BACK_S = 1.0
"""Time after which the supervisor restarts a killed process."""

BACK_LIMIT_S = 120.0
"""Time limit until a scheduler leads or stands by. A start takes a second of a core, and a quarter of a minute while
thirty programs want the core: two of them, one after another, were once not back within a minute."""

FORGOTTEN_S = 3600.0
KEYS = "ta:{default}:"
ROOT = Path(__file__).parents[2]


class Engine:
    """A `counting_engine`, which restarts on the same port and records in the same file."""

    def __init__(self, port: int, notes: Path) -> None:
        """Begin stopped."""
        self.url = f"http://127.0.0.1:{port}"
        self.notes = notes
        self.process: asyncio.subprocess.Process | None = None
        self._port = port

    async def start(self) -> None:
        """Start the engine, and wait until it listens."""
        arguments = ("-m", "tests.real.counting_engine", str(self._port), str(self.notes))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert self.process.stdout is not None
        assert await self.process.stdout.readline()


class Rig:
    """All processes by name: `scheduler0`, `gateway3`, `engine1`, `redis`; and the links between them."""

    def __init__(self, redis: RedisServer, folder: Path, seed: int, *, turns_per_s: float) -> None:
        """Begin with only the store running; `seed` is for random draws, `turns_per_s` is the clients' rate."""
        self.active_count = round(SLOTS_S * turns_per_s)
        self.redis = redis
        self.random = random.Random(seed)
        self.began_s = time.monotonic()
        self.kills_s: dict[str, list[float]] = {}
        """When processes were killed."""
        self.pauses_s: dict[str, list[tuple[float, float]]] = {}
        """Begin and end of pauses."""
        self.processes: dict[str, CommandProcess] = {}
        self.logs: list[tuple[str, CommandProcess]] = []
        self.scheduler_within: dict[str, tuple[str, ...]] = {}
        """The command that wraps a process."""
        self.settings: dict[str, Mapping[str, str]] = {}
        """Extra environment variables of a process."""
        ports = iter(free_ports(2 + GATEWAYS_COUNT + ENGINES_COUNT + 2 + 2 + 2 * GATEWAYS_COUNT))
        self.ports = {f"scheduler{n}": next(ports) for n in range(2)}
        self.ports |= {f"gateway{n}": next(ports) for n in range(GATEWAYS_COUNT)}
        self.engines = {f"engine{n}": Engine(next(ports), folder / f"engine{n}") for n in range(ENGINES_COUNT)}
        socket = str(redis.folder / "redis.sock")
        self.to_store = {f"scheduler{n}": SilentLink(socket, next(ports)) for n in range(2)}
        at = {f"scheduler{n}": f"127.0.0.1:{self.ports[f'scheduler{n}']}" for n in range(2)}
        self.watches = {name: SilentLink(at[name], next(ports)) for name in at}
        """The link through which the other scheduler watches one."""
        pairs = product([f"gateway{n}" for n in range(GATEWAYS_COUNT)], at)
        self.leases = {(gateway, name): SilentLink(at[name], next(ports)) for gateway, name in pairs}
        self._stack = AsyncExitStack()
        self._returning: set[asyncio.Task[None]] = set()
        self._is_over = False

    @property
    def gateways(self) -> list[str]:
        """Names of all gateways."""
        return [f"gateway{n}" for n in range(GATEWAYS_COUNT)]

    def url(self, name: str) -> str:
        """Return the URL at which a gateway or a scheduler itself listens."""
        return f"http://127.0.0.1:{self.ports[name]}"

    # --- start and end

    async def __aenter__(self) -> Self:
        """Start all processes, and wait until turns would be served and there is a standby."""
        links = (*self.to_store.values(), *self.watches.values(), *self.leases.values())
        for link in links:
            await link.open()
            self._stack.push_async_callback(link.end)
        await asyncio.gather(*(engine.start() for engine in self.engines.values()))
        await asyncio.gather(*(self.start(name) for name in self.ports))
        for name in self.gateways:
            await self.processes[name].ready()
        await self.until_followed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all."""
        self._is_over = True
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        for name in self.ports:
            self._signal(name, signal.SIGCONT)
        await self._stack.aclose()
        for engine in self.engines.values():
            if engine.process is not None and engine.process.returncode is None:
                engine.process.kill()
                await engine.process.communicate()

    async def start(self, name: str) -> None:
        """Start a process, and wait until it listens."""
        if name == "redis":
            await asyncio.to_thread(self.redis.start)
        elif name in self.engines:
            await self.engines[name].start()
        else:
            running = await self._stack.enter_async_context(self._command(name))
            self.processes[name] = running
            self.logs.append((name, running))
            if name in self.watches:
                await self.watches[name].open()

    def _command(self, name: str) -> Any:
        if name not in self.watches:
            urls = ",".join(self.leases[name, each].url for each in self.watches)
            options: Sequence[str] = ("--port", str(self.ports[name]), "--schedulers", urls)
            return command("gateway", *options, settings=self.settings.get(name))
        # Held turns, and few claims between turns: a program that gives up room is held with its next turn.
        policy = ("--policy", "cap", "--policy-arg", f"n={self.active_count}", "--idle-limit-s", "0.1")
        policy += ("--tick-s", "0.1")
        store = f"redis://127.0.0.1:{self.to_store[name].port}"
        options = (
            *("--listen", f"127.0.0.1:{self.ports[name]}", "--reached-at", self.watches[name].url),
            *("--store", store, "--lock-s", str(LOCK_S), "--forget-limit-s", str(FORGOTTEN_S)),
            *("--backends", ",".join(engine.url for engine in self.engines.values()), "--poll-interval-s", "0.5"),
            *("--max-programs-count", "200000", "--tenant-max-programs-count", "200000"),
        )
        environment = {"PYTHONPATH": self.redis.packages, **self.settings.get(name, {})}
        within = self.scheduler_within.get(name, ())
        return command("scheduler", *options, *policy, settings=environment, within=within)

    # --- faults

    def kill(self, name: str, *, back_s: float | None = BACK_S) -> None:
        """Kill a process with -9; restart it `back_s` later, or not at all if that is None."""
        self.kills_s.setdefault(name, []).append(time.monotonic())
        if name == "redis":
            self.redis.kill()
        else:
            if name in self.watches:
                self.watches[name].close()
            self._signal(name, signal.SIGKILL)
        if back_s is not None:
            task = asyncio.create_task(self._return(name, back_s))
            self._returning.add(task)

    async def _return(self, name: str, back_s: float) -> None:
        await asyncio.sleep(back_s)
        if not self._is_over:
            await self.start(name)

    async def until_back(self) -> None:
        """Wait until all killed processes run again."""
        await asyncio.gather(*self._returning)

    async def pause(self, name: str, for_s: float) -> None:
        """Stop a process, and resume it later."""
        began_s = time.monotonic()
        self._signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            self.pauses_s.setdefault(name, []).append((began_s, time.monotonic()))
            self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: int) -> None:
        if name == "redis":
            process: Any = self.redis.process
        elif name in self.engines:
            process = self.engines[name].process
        else:
            process = self.processes[name].process if name in self.processes else None
        if process is not None and process.returncode is None:
            with suppress(IndexError, ProcessLookupError):  # only the wrapping command is left
                os.kill(self._pid(process.pid, name), number)

    def _pid(self, process_id: int, name: str) -> int:
        """Return the id of the actual process: a wrapping command does not pass signals on to it.

        Raises IndexError if it is gone.
        """
        if name not in self.scheduler_within:
            return process_id
        return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()[0])

    async def silence(self, links: Sequence[SilentLink], ways: Sequence[Way], for_s: float) -> None:
        """Make links go silent for a while."""
        for link in links:
            link.silence(*ways)
        try:
            await asyncio.sleep(for_s)
        finally:
            for link in links:
                link.heal()

    def store(self, *words: str, given: bytes | None = None) -> str:
        """Run a command of the store; `given` is the last argument, if there is one."""
        client = ["redis-cli", "-s", str(self.redis.folder / "redis.sock"), *(("-x",) if given is not None else ())]
        return subprocess.run([*client, *words], input=given, check=True, capture_output=True).stdout.decode(
            errors="replace"
        )

    # --- queries

    async def said(self, name: str) -> dict[str, Any]:
        """Return a scheduler's status; empty if it does not answer."""
        try:
            async with asyncio.timeout(1.0):
                answer = await get(self.url(name), "/internal/leader")
        except (OSError, TimeoutError):
            return {}
        return dict(json.loads(answer.body)) if answer.status == 200 else {}

    async def status(self, name: str) -> dict[str, Any]:
        """Wait until a scheduler answers; return its status."""
        async with asyncio.timeout(30):
            while not (said := await self.said(name)):
                await asyncio.sleep(0.05)
        return said

    async def leader(self) -> str:
        """Wait until a scheduler leads and has taken over all state; return the one with the highest epoch."""
        async with asyncio.timeout(BACK_LIMIT_S):
            while True:
                said = {name: await self.said(name) for name in self.watches}
                leads = {name: each for name, each in said.items() if each.get("role") == "leader"}
                epochs = {name: each["epoch"] for name, each in leads.items() if each["took_over_s"] is not None}
                if epochs:
                    return max(epochs, key=lambda name: epochs[name])
                await asyncio.sleep(0.02)

    async def standby(self) -> str:
        """Return the scheduler that does not lead."""
        leader = await self.leader()
        return next(name for name in self.watches if name != leader)

    async def until_followed(self) -> None:
        """Wait until one scheduler leads, the other is a standby, and the leader knows."""
        async with asyncio.timeout(BACK_LIMIT_S):
            while True:
                leader = await self.leader()
                other = next(name for name in self.watches if name != leader)
                stands_by = (await self.said(other)).get("role") == "standby"
                if stands_by and (await self.said(leader)).get("has_standby"):
                    return
                await asyncio.sleep(0.05)

    async def metrics(self, name: str) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the samples of a gateway or a scheduler."""
        return await metrics_of(self.url(name))

    async def programs(self, name: str, prefix: str) -> dict[str, dict[str, Any]]:
        """Return the programs known to a scheduler whose names contain `prefix`."""
        found: dict[str, dict[str, Any]] = {}
        offset: int | None = 0
        while offset is not None:
            page = await get(self.url(name), f"/programs?limit=1000&search={prefix}&offset={offset}")
            said = json.loads(page.body)
            found |= {each["program_id"]: each for each in said["programs"]}
            offset = said["next_offset"]
        return found
