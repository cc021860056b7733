"""News of sandboxes for clients: a report of each, and a feed of changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from thunderagent.tools.sandbox import Sandbox

MAX_BEHIND_COUNT = 1000
"""How many changes a slow reader may be behind; beyond, it is cut off and must ask again."""

Report = dict[str, Any]


def report_of(sandbox: Sandbox, now_s: float) -> Report:
    """Return what a client may know of a sandbox, as a JSON object."""
    place = sandbox.place
    return {
        "sandbox_id": sandbox.sandbox_id,
        "template": sandbox.template_name or None,
        "driver": sandbox.template.driver,
        "stage": sandbox.stage.value,
        "program_ids": list(sandbox.program_ids),
        "given": sandbox.given,
        "suspended": sandbox.suspended,
        "handle": place.handle if place else None,
        "address": place.address if place else None,
        "ports": {str(inside): list(outside) for inside, outside in place.ports.items()} if place else {},
        "details": dict(place.details) if place else {},
        "age_s": round(now_s - sandbox.requested_s, 3),
        "prepare_s": None if sandbox.prepare_s is None else round(sandbox.prepare_s, 3),
        "attempt_count": sandbox.attempt_count,
        "why": sandbox.why or None,
        "disk_bytes": sandbox.disk_bytes,
        "memory_bytes": sandbox.memory_bytes,
    }


class Feed:
    """The readers that follow changes."""

    def __init__(self) -> None:
        """Start without readers."""
        self._readers: dict[asyncio.Queue[Report | None], str | None] = {}
        """Each with the program that it follows; None follows all."""

    def __repr__(self) -> str:
        return f"<Feed of {len(self._readers)} readers>"

    @asynccontextmanager
    async def read(self, program_id: str | None = None) -> AsyncIterator[asyncio.Queue[Report | None]]:
        """Provide a queue of reports, one for each change from now on, of one program or of all.

        None ends it: at the end, and for a slow reader.
        """
        queue: asyncio.Queue[Report | None] = asyncio.Queue()
        self._readers[queue] = program_id
        try:
            yield queue
        finally:
            self._readers.pop(queue, None)

    def tell(self, sandbox: Sandbox, now_s: float) -> bool:
        """Report a sandbox's change to all its readers; return whether one of them follows its program."""
        if not self._readers:
            return False
        report, told = report_of(sandbox, now_s), False
        for queue, program_id in list(self._readers.items()):
            if program_id is not None and program_id not in sandbox.program_ids:
                continue
            told = told or program_id is not None
            if queue.qsize() < MAX_BEHIND_COUNT:
                queue.put_nowait(report)
            else:
                self._end(queue)
        return told

    def close(self) -> None:
        """End it for all readers."""
        for queue in list(self._readers):
            self._end(queue)

    def _end(self, queue: asyncio.Queue[Report | None]) -> None:
        self._readers.pop(queue, None)
        queue.put_nowait(None)
