"""Contact with one engine: what exists there, what happens there, its use of resources, and whether it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

import structlog

from thunderagent.errors import SandboxEngineError, SandboxError
from thunderagent.tools.base import Command, Driver, Found, Usage

log = structlog.get_logger("thunderagent.sandboxes")

LOOKS_PER_SWEEP_COUNT = 10
"""How many looks pass between two sweeps of leftovers without a sandbox."""


@dataclass(frozen=True, slots=True)
class ContactSettings:
    """How contact with an engine is kept; times in seconds."""

    resync_interval_s: float = 10.0
    measure_interval_s: float = 15.0
    answer_timeout_s: float = 60.0
    retry_s: float = 1.0
    """Time to the second connection attempt; doubled for each further one up to `retry_limit_s`."""
    retry_limit_s: float = 15.0


class Listener(Protocol):
    """Receives news of an engine."""

    def found(self, kind: str, found: Sequence[Found], known: Sequence[str], *, first: bool) -> None:
        """Take all labelled sandboxes that exist; `first` in this run.

        `known` are the handles that existed before the look: one that appeared meanwhile may be missing.
        """

    def appeared(self, kind: str, found: Found) -> None:
        """Note that a labelled sandbox began."""

    def ended(self, kind: str, handle: str, why: str) -> None:
        """Note that a labelled sandbox ended."""

    def watching(self, kind: str) -> None:
        """Note that events are reported from now on; commands that began before are unknown."""

    def command(self, kind: str, command: Command) -> None:
        """Take a command inside a labelled sandbox."""

    def measured(self, kind: str, usage: Usage) -> None:
        """Take the sandboxes' resource use."""

    def handles(self, kind: str) -> list[str]:
        """Return the known handles that can be measured."""


class Contact:
    """Contact with one engine. `why_lost` is its last error while it does not answer; otherwise empty."""

    def __init__(self, driver: Driver, listener: Listener, settings: ContactSettings) -> None:
        """Start without contact."""
        self.why_lost = ""
        self._driver = driver
        self._listener = listener
        self._settings = settings
        self._look_again = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Contact with {self._driver.kind}: {self.why_lost or 'it answers'}>"

    async def run(self) -> None:
        """Keep contact until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._measure())
            await asyncio.sleep(0)  # watch before looking, so that nothing is missed in between
            await self._look()

    async def _look(self) -> None:
        """List everything: at the start, after each loss of contact, and now and then."""
        first = True
        look_count = 0
        delay_s = self._settings.retry_s
        while True:
            self._look_again.clear()
            known = self._listener.handles(self._driver.kind)
            try:
                async with asyncio.timeout(self._settings.answer_timeout_s):
                    found = await self._driver.find()
            except (SandboxError, TimeoutError) as error:
                delay_s = await self._lost(error, delay_s)
                continue
            if self.why_lost:
                log.info("sandbox_engine_back", driver=self._driver.kind)
            self.why_lost, delay_s = "", self._settings.retry_s
            self._listener.found(self._driver.kind, found, known, first=first)
            first = False
            if look_count % LOOKS_PER_SWEEP_COUNT == 0:
                await self._sweep()
            look_count += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.resync_interval_s):
                    await self._look_again.wait()

    async def _sweep(self) -> None:
        """Remove leftovers; if that fails the engine is not lost, because it listed everything just now."""
        try:
            async with asyncio.timeout(self._settings.answer_timeout_s):
                await self._driver.sweep()
        except (SandboxError, TimeoutError) as error:
            log.warning("sandboxes_not_swept", driver=self._driver.kind, why=str(error) or "no answer in time")

    async def _watch(self) -> None:
        """Follow what the engine says."""
        kind = self._driver.kind
        delay_s = self._settings.retry_s
        while True:
            try:
                async with aclosing(self._driver.watch()) as changes:
                    self._look_again.set()  # at events between two watches
                    self._listener.watching(kind)
                    async for change in changes:
                        delay_s = self._settings.retry_s
                        if isinstance(change, Command):
                            self._listener.command(kind, change)
                        elif change.ended:
                            self._listener.ended(kind, change.found.handle, change.why or "it ended by itself")
                        else:
                            self._listener.appeared(kind, change.found)
                raise SandboxEngineError("the engine closed its stream of events")
            except SandboxError as error:
                delay_s = await self._lost(error, delay_s)

    async def _lost(self, error: Exception, delay_s: float) -> float:
        """Record why there is no contact and wait; return the delay for the next time."""
        why = str(error) or "no answer in time"
        if not self.why_lost:
            log.warning("sandbox_engine_lost", driver=self._driver.kind, why=why)
        self.why_lost = why
        await asyncio.sleep(delay_s)
        return min(2 * delay_s, self._settings.retry_limit_s)

    async def _measure(self) -> None:
        """Measure the sandboxes' resource use."""
        while True:
            await asyncio.sleep(self._settings.measure_interval_s)
            handles = self._listener.handles(self._driver.kind)
            usage = Usage()
            if handles and not self.why_lost:
                try:
                    async with asyncio.timeout(self._settings.answer_timeout_s):
                        usage = await self._driver.measure(handles)
                except (SandboxError, TimeoutError) as error:
                    log.debug("sandboxes_not_measured", driver=self._driver.kind, why=str(error))
            self._listener.measured(self._driver.kind, usage)
