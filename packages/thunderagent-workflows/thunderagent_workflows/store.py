"""The node store: controllers leave summaries there, and the global loop its decisions.

It decouples the two: neither waits for the other, and it is on no call's path. One blob per node, not one key per
future: a call is visible outside its controller only as part of a summary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from thunderagent_workflows.core import messages as m
from thunderagent_workflows.view import Summary


@dataclass(slots=True)
class Decisions:
    """The global loop's orders for a node."""

    routes: list[m.SetRoute] = field(default_factory=list)
    priorities: dict[str, float] = field(default_factory=dict)
    agent_priorities: dict[str, dict[str, float]] = field(default_factory=dict)
    migrations: dict[str, list[m.Migrate]] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.routes, self.priorities, self.agent_priorities, self.migrations, self.kills))


class Store(Protocol):
    """The interface that both levels need."""

    async def publish(self, node: str, summaries: list[Summary]) -> None:
        """Leave a node's summaries."""

    async def collect(self) -> list[Summary]:
        """Take all summaries."""

    async def push(self, node: str, decisions: Decisions) -> None:
        """Leave decisions for a node."""

    async def take(self, node: str) -> list[Decisions]:
        """Take a node's decisions."""

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        """Store parts of a session's managed state, if the store outlives the deployment.

        One that is None cannot be stored: forget what was stored of it.
        """

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:
        """Return a session's stored managed state, by agent."""

    async def drop_session(self, session: str) -> None:
        """Delete a session's state."""

    async def close(self) -> None:
        """Close open resources."""


class MemoryStore:
    """The store of one process: two tables, which end with it."""

    def __init__(self) -> None:
        self._summaries: list[Summary] = []
        self._decisions: dict[str, list[Decisions]] = {}

    async def publish(self, node: str, summaries: list[Summary]) -> None:  # noqa: ARG002 - a summary names its node
        """Leave a node's summaries."""
        self._summaries += summaries

    async def collect(self) -> list[Summary]:
        """Take all summaries."""
        found, self._summaries = self._summaries, []
        return found

    async def push(self, node: str, decisions: Decisions) -> None:
        """Leave decisions for a node."""
        self._decisions.setdefault(node, []).append(decisions)

    async def take(self, node: str) -> list[Decisions]:
        """Take a node's decisions."""
        return self._decisions.pop(node, [])

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        """Store nothing: the state lives as long as the process."""

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:  # noqa: ARG002
        """Return nothing."""
        return {}

    async def drop_session(self, session: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
