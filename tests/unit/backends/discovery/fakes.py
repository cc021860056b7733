"""A listener that records the reports of sources."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from thunderagent.backends.discovery import Source, Wanted


@dataclass
class Recorder:
    """See `DiscoveryListener`."""

    sets: list[list[Wanted]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def replicas_wanted(self, source: str, wanted: Sequence[Wanted]) -> None:
        self.sets.append(list(wanted))

    def source_failed(self, source: str, why: str) -> None:
        self.failures.append(why)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Recorder]:
    """Follow a source during the block; raise an error in it."""
    recorder = Recorder()
    task = asyncio.create_task(source.run(recorder))
    try:
        yield recorder
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
