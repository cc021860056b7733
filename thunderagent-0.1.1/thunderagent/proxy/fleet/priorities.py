"""Gives engines the priorities of turns, in their own format, and finds out which engines take none.

Theory of operation
===================
The scheduler's numbers are lower first. An engine that can report its order (SGLang) is asked when it comes up; until
then, and if it cannot be asked, its turns go without priority. One that cannot be asked (vLLM) gets them: an engine
without priority scheduling ignores them, or refuses the turn. A turn refused for that is sent again without priority,
before its client heard anything, and so are all later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog
from multidict import CIMultiDict

from thunderagent.backends.base import Priorities
from thunderagent.errors import ReplicaError
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.fleet.known import KnownReplica

log = structlog.get_logger("thunderagent.replicas")


@dataclass(slots=True)
class _Learned:
    """What is known of a replica since it came up."""

    polarity: int
    """1 if lower goes first, -1 if higher does, 0 if it has no priorities, or while it is being asked."""


class EnginePriorities:
    """Knows of each replica whether it takes priorities."""

    def __init__(self, known: Mapping[str, KnownReplica], timeout_s: float) -> None:
        """Start without knowledge; an engine has `timeout_s` to answer."""
        self._known = known
        self._timeout_s = timeout_s
        self._learned: dict[str, _Learned] = {}
        self._to_ask: asyncio.Queue[str] = asyncio.Queue()

    def forget(self, replica_id: str) -> None:
        """Start over with a replica that comes up, because another engine may run there now, or drop one that left."""
        self._learned.pop(replica_id, None)

    def for_engine(self, replica_id: str, priority: int) -> tuple[Priorities, int] | None:
        """Return how a turn's priority is sent there, and its number; None if it gets none."""
        priorities = self._priorities_of(replica_id)
        if priorities is None:
            return None
        learned = self._learned.get(replica_id)
        if learned is None:
            learned = self._learned[replica_id] = _Learned(0 if priorities.info_path else 1)
            if priorities.info_path:
                self._to_ask.put_nowait(replica_id)
        return (priorities, priority * learned.polarity) if learned.polarity else None

    def refused(self, replica_id: str) -> None:
        """Send a replica no more priorities: it refused a turn for its priority, and took it without."""
        learned = self._learned.get(replica_id)
        if learned is not None and learned.polarity:
            learned.polarity = 0
            log.warning(
                "priorities_not_supported", replica_id=replica_id, effect="its turns are sent without a priority"
            )

    async def run(self, client: ReplicaClient) -> None:
        """Ask engines until cancelled."""
        while True:
            replica_id = await self._to_ask.get()
            priorities, known = self._priorities_of(replica_id), self._known.get(replica_id)
            if priorities is None or known is None:
                continue
            paths = dict.fromkeys((priorities.info_path, *known.endpoint.backend.info_paths))
            info = await self._ask(client, replica_id, known.endpoint.url, paths)
            if info is None:
                self._learned.pop(replica_id, None)  # the next turn asks it again
                continue
            polarity = self._learned.setdefault(replica_id, _Learned(0)).polarity = priorities.read_polarity(info)
            if not polarity:
                log.warning(
                    "priorities_not_supported", replica_id=replica_id, effect="its turns are sent without a priority"
                )

    async def _ask(self, client: ReplicaClient, replica_id: str, url: str, paths: Iterable[str]) -> bytes | None:
        """Return the answer of the first of these paths that an engine has, empty if it has none; None if it fails."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for path in paths:
                    response = await client.send(replica_id, url, "GET", path, CIMultiDict(), None)
                    try:
                        if response.status == 200:
                            return await client.read(replica_id, response)
                    finally:
                        response.close()
                    if response.status >= 500:
                        return None
        except (ReplicaError, TimeoutError):
            return None
        return b""

    def _priorities_of(self, replica_id: str) -> Priorities | None:
        known = self._known.get(replica_id)
        return known.endpoint.backend.priorities if known is not None else None
