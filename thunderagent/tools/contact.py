"""Contact with one engine: what is there, what happens there, what it takes, and whether it answers at all."""

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
"""What no sandbox is left for is looked for at every tenth look."""


@dataclass(frozen=True, slots=True)
class ContactSettings:
    """How an engine is kept in touch with; times in seconds."""

    resync_interval_s: float = 10.0
    measure_interval_s: float = 15.0
    answer_timeout_s: float = 60.0
    retry_s: float = 1.0
    """Time to the second try to reach it; doubled for each further one up to `retry_limit_s`."""
    retry_limit_s: float = 15.0


class Listener(Protocol):
    """Who wants to hear of an engine."""

    def found(self, kind: str, found: Sequence[Found], known: Sequence[str], *, first: bool) -> None:
        """Hear of all labelled sandboxes that are there; `first` in this run.

        `known` are the handles that were there before it was looked: one that came meanwhile may be missing.
        """

    def appeared(self, kind: str, found: Found) -> None:
        """Hear of a labelled sandbox that began."""

    def ended(self, kind: str, handle: str, why: str) -> None:
        """Hear of a labelled sandbox that ended."""

    def watching(self, kind: str) -> None:
        """Hear that from now on is told what happens; which commands run since before is not known."""

    def command(self, kind: str, command: Command) -> None:
        """Hear of a command inside a labelled sandbox."""

    def measured(self, kind: str, usage: Usage) -> None:
        """Hear what sandboxes take."""

    def handles(self, kind: str) -> list[str]:
        """Return those that are there, as far as is known, and can be looked at."""


class Contact:
    """One engine's. `why_lost` is what it said last, while it does not answer; else empty."""

    def __init__(self, driver: Driver, listener: Listener, settings: ContactSettings) -> None:
        """Begin without contact."""
        self.why_lost = ""
        self._driver = driver
        self._listener = listener
        self._settings = settings
        self._look_again = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Contact with {self._driver.kind}: {self.why_lost or 'it answers'}>"

    async def run(self) -> None:
        """Keep in touch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._measure())
            await asyncio.sleep(0)  # it watches before it looks, so that nothing falls between
            await self._look()

    async def _look(self) -> None:
        """Look at all that is there: at the start, after each loss of contact, and now and then."""
        first = True
        sweep_at_count = look_count = 0
        delay_s = self._settings.retry_s
        while True:
            self._look_again.clear()
            known = self._listener.handles(self._driver.kind)
            try:
                async with asyncio.timeout(self._settings.answer_timeout_s):
                    found = await self._driver.find()
                    if look_count >= sweep_at_count:
                        await self._driver.sweep()
                        sweep_at_count = look_count + LOOKS_PER_SWEEP_COUNT
            except (SandboxError, TimeoutError) as error:
                delay_s = await self._lost(error, delay_s)
                continue
            if self.why_lost:
                log.info("sandbox_engine_back", driver=self._driver.kind)
            self.why_lost, delay_s = "", self._settings.retry_s
            self._listener.found(self._driver.kind, found, known, first=first)
            first = False
            look_count += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.resync_interval_s):
                    await self._look_again.wait()

    async def _watch(self) -> None:
        """Follow what the engine says."""
        kind = self._driver.kind
        delay_s = self._settings.retry_s
        while True:
            try:
                async with aclosing(self._driver.watch()) as changes:
                    self._look_again.set()  # at what happened between two watches
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
        """Remember why there is no contact and wait; return how long to wait the next time."""
        why = str(error) or "no answer in time"
        if not self.why_lost:
            log.warning("sandbox_engine_lost", driver=self._driver.kind, why=why)
        self.why_lost = why
        await asyncio.sleep(delay_s)
        return min(2 * delay_s, self._settings.retry_limit_s)

    async def _measure(self) -> None:
        """Measure what sandboxes take."""
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
