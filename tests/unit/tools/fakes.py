"""A scripted driver in memory, and programs whose places tests set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from thunderagent.errors import NotFoundError, SandboxEngineError, SandboxError, ThunderAgentError
from thunderagent.tools.base import (
    OWNER_LABEL,
    PROGRAM_LABEL,
    RUN_LABEL,
    SANDBOX_LABEL,
    Change,
    Command,
    Found,
    Order,
    Owner,
    Place,
    Usage,
)


class FakeDriver:
    """An engine of sandboxes in a dict; `hold` delays the end of preparations, `errors` are raised by the next ones."""

    kind = "docker"

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.there: dict[str, Found] = {}
        self.orders: list[Order] = []
        self.errors: list[Exception] = []
        self.hold: asyncio.Event | None = None
        self.reachable = True
        self.reclaim_error: Exception | None = None
        self.reclaim_hold: asyncio.Event | None = None
        self.reclaim_hold_count = 0
        self.suspended: set[str] = set()
        self.suspensions: list[tuple[str, str]] = []
        """What was suspended and woken, in order, and those that failed."""
        self.suspend_error: Exception | None = None
        self.thaw_error: Exception | None = None
        self.stuck: set[str] = set()
        """Handles whose reclaiming hangs."""
        self.reclaimed: list[str] = []
        self.cancelled: list[str] = []
        self.look_hold: asyncio.Event | None = None
        """While it is set, a listing is answered late, with the state at its begin."""
        self.looking = False
        self.find_count = self.sweep_count = 0
        self.sweep_error: SandboxError | None = None
        self.usage = Usage()
        self.opened = self.closed = False
        self.preparing_count = self.most_preparing_count = 0
        self._changes: set[asyncio.Queue[Change | Command | SandboxError]] = set()

    def put(self, handle: str, labels: dict[str, str], *, tell: bool = True) -> Found:
        """Add a sandbox made by another party."""
        found = Found(handle, labels, True, Place(handle, "10.0.0.9"))
        self.there[handle] = found
        if tell:
            self._tell(Change(found, ended=False))
        return found

    def kill(self, handle: str, why: str = "it exited with 137", *, tell: bool = True) -> None:
        found = self.there.pop(handle)
        if tell:
            self._tell(Change(found, ended=True, why=why))

    def runs(self, handle: str, run_id: str, words: str = "") -> None:
        """Report the begin of a command."""
        self._tell(Command(handle, run_id, ended=False, words=words))

    def ran(self, handle: str, run_id: str) -> None:
        """Report the end of a command."""
        self._tell(Command(handle, run_id, ended=True))

    def stop(self) -> None:
        """Stop the engine: everything on it ends, without a report."""
        self.reachable = False
        self.there.clear()
        for queue in self._changes:
            queue.put_nowait(SandboxEngineError("the engine went away"))

    def loses_contact(self) -> None:
        """End the stream of events; running sandboxes continue."""
        for queue in self._changes:
            queue.put_nowait(SandboxEngineError("the connection was reset"))

    def _tell(self, change: Change | Command) -> None:
        for queue in self._changes:
            queue.put_nowait(change)

    def _reach(self) -> None:
        if not self.reachable:
            raise SandboxEngineError("no engine answers")

    async def open(self) -> None:
        self.opened = True

    async def prepare(self, order: Order) -> Place:
        self.orders.append(order)
        self.preparing_count += 1
        self.most_preparing_count = max(self.most_preparing_count, self.preparing_count)
        try:
            await asyncio.sleep(0)
            self._reach()
            if self.hold is not None:
                await self.hold.wait()
            self._reach()
            if self.errors:
                raise self.errors.pop(0)
        except asyncio.CancelledError:
            self.cancelled.append(order.sandbox_id)
            raise
        finally:
            self.preparing_count -= 1
        labels = {**order.labels, OWNER_LABEL: self.owner.owner_id, RUN_LABEL: self.owner.run_id}
        place = Place(order.sandbox_id, "10.0.0.1", {8000: ("127.0.0.1", 4000)})
        self.there[order.sandbox_id] = Found(order.sandbox_id, labels, True, place)
        return place

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        await asyncio.sleep(0)
        self._reach()
        if name not in self.there:
            raise NotFoundError(f"there is no {name}")
        return self.there[name].place

    async def reclaim(self, handle: str) -> None:
        await asyncio.sleep(0)
        self._reach()
        if self.reclaim_hold is not None:
            self.reclaim_hold_count += 1
            await self.reclaim_hold.wait()
        if handle in self.stuck:
            self.reclaim_hold_count += 1
            await asyncio.Event().wait()
        if self.reclaim_error is not None:
            raise self.reclaim_error
        self.reclaimed.append(handle)
        if handle in self.there:
            self.kill(handle, "removed")

    async def suspend(self, handle: str) -> None:
        await asyncio.sleep(0)
        self.suspensions.append(("suspend", handle))
        self.suspended.add(handle)
        if self.suspend_error is not None:
            raise self.suspend_error

    async def thaw(self, handle: str) -> None:
        await asyncio.sleep(0)
        self.suspensions.append(("thaw", handle))
        if self.thaw_error is not None:
            raise self.thaw_error
        self.suspended.discard(handle)

    async def find(self) -> Sequence[Found]:
        await asyncio.sleep(0)
        self._reach()
        self.find_count += 1
        seen = list(self.there.values())
        if self.look_hold is not None:
            self.looking = True
            await self.look_hold.wait()
            self.looking = False
        return seen

    async def sweep(self) -> None:
        self._reach()
        self.sweep_count += 1
        if self.sweep_error is not None:
            raise self.sweep_error

    async def watch(self) -> AsyncIterator[Change | Command]:
        queue: asyncio.Queue[Change | Command | SandboxError] = asyncio.Queue()
        self._reach()
        self._changes.add(queue)
        try:
            while True:
                change = await queue.get()
                if isinstance(change, SandboxError):
                    raise change
                yield change
        finally:
            self._changes.discard(queue)

    async def measure(self, handles: Sequence[str]) -> Usage:
        self._reach()
        return self.usage

    async def close(self) -> None:
        self.closed = True


def labels_of(owner: Owner, sandbox_id: str) -> dict[str, str]:
    """Return a proxy's labels for its own sandboxes."""
    return {SANDBOX_LABEL: sandbox_id, OWNER_LABEL: owner.owner_id, RUN_LABEL: owner.run_id}


def given_labels(program_id: str) -> dict[str, str]:
    """Return an agent's labels for a sandbox that it made itself."""
    return {PROGRAM_LABEL: program_id}


@dataclass
class FakePrograms:
    """Programs that wait unless they are among `running`."""

    opened: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    using: set[str] = field(default_factory=set)
    """Those that use tools."""
    holds_s: dict[str, float] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=dict)
    story: list[tuple[str, str, str]] = field(default_factory=list)
    tools: list[tuple[str, str | None]] = field(default_factory=list)
    """Begun commands, and None when the last running one ends."""
    sums: tuple[int, int | None, int | None] | None = None
    refuses: ThunderAgentError | None = None
    refused_count: int = 0

    def open(self, program_id: str, tenant: str = "") -> None:
        if self.refuses is not None:
            self.refused_count += 1
            raise self.refuses
        if program_id not in self.opened:
            self.opened.append(program_id)

    def runs(self, program_id: str) -> bool:
        return program_id in self.running

    def uses_tools(self, program_id: str) -> bool:
        return program_id in self.using

    def acting_for_s(self, program_id: str) -> float:
        return self.idle_s.get(program_id, 0.0)

    def expected_holds_s(self) -> dict[str, float]:
        return self.holds_s

    def tool_began(self, program_id: str, command: str) -> None:
        self.tools.append((program_id, command))

    def tool_ended(self, program_id: str) -> None:
        self.tools.append((program_id, None))

    def sandbox_ready(self, program_id: str, sandbox_id: str, prepare_s: float) -> None:
        self.story.append((program_id, "ready", sandbox_id))

    def sandbox_failed(self, program_id: str, sandbox_id: str, why: str) -> None:
        self.story.append((program_id, "failed", why))

    def measured(self, sandbox_count: int, disk_bytes: int | None, memory_bytes: int | None) -> None:
        self.sums = (sandbox_count, disk_bytes, memory_bytes)
