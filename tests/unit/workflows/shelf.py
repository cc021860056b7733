"""A store that outlives deployments, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

from thunderagent_workflows import StoreError
from thunderagent_workflows.store import MemoryStore

TURNS_COUNT = 50
"""Turns of the loop that a slow answer takes: more than a call with its value does."""


class Shelf:
    """A store that outlives deployments, in memory. `refuses` and `slow` have commands: load, save, drop."""

    def __init__(self, states: dict[str, Any] | None = None) -> None:
        self.states: dict[str, dict[str, dict[str, Any]]] = states or {}
        self.refuses: set[str] = set()
        self.slow: list[str] = []
        """Each is taken off by the command that it slows down."""
        self.loads_count = 0
        of = MemoryStore()
        self.publish, self.collect, self.push, self.take, self.close = (
            of.publish,
            of.collect,
            of.push,
            of.take,
            of.close,
        )

    async def _do(self, command: str) -> None:
        if command in self.refuses:
            raise StoreError(f"no {command}")
        if command in self.slow:
            self.slow.remove(command)
            for _ in range(TURNS_COUNT):
                await asyncio.sleep(0)

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        await self._do("save")
        self.states.setdefault(session, {}).setdefault(agent, {}).update(values)

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:
        self.loads_count += 1
        found = {agent: dict(values) for agent, values in self.states.get(session, {}).items()}
        await self._do("load")
        return found

    async def drop_session(self, session: str) -> None:
        await self._do("drop")
        self.states.pop(session, None)
