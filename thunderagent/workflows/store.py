"""The node store: where controllers leave what they have to say, and the global loop what it has decided.

It decouples the two: nobody waits for the other, and nothing in it is on the path of a call. One blob a node, not one
key a future: a call becomes visible outside its controller only as a part of a summary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from thunderagent.workflows.core import messages as m
from thunderagent.workflows.view import Summary


@dataclass(slots=True)
class Decisions:
    """What the global loop wants of a node."""

    routes: list[m.SetRoute] = field(default_factory=list)
    priorities: dict[str, float] = field(default_factory=dict)
    agent_priorities: dict[str, dict[str, float]] = field(default_factory=dict)
    migrations: dict[str, list[m.Migrate]] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.routes, self.priorities, self.agent_priorities, self.migrations, self.kills))


class Store(Protocol):
    """What both levels need of it."""

    async def publish(self, node: str, summaries: list[Summary]) -> None:
        """Leave what a node's controllers say."""

    async def collect(self) -> list[Summary]:
        """Take all that was left."""

    async def push(self, node: str, decisions: Decisions) -> None:
        """Leave decisions for a node."""

    async def take(self, node: str) -> list[Decisions]:
        """Take what was decided for a node."""

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        """Keep parts of a session's managed state, where the store outlives the deployment."""

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:
        """Return a session's managed state as it was kept, by agent."""

    async def drop_session(self, session: str) -> None:
        """Keep a session's state no longer."""

    async def close(self) -> None:
        """Let go of what is open."""


class MemoryStore:
    """The store of one process: two tables, which end with it."""

    def __init__(self) -> None:
        self._summaries: list[Summary] = []
        self._decisions: dict[str, list[Decisions]] = {}

    async def publish(self, node: str, summaries: list[Summary]) -> None:  # noqa: ARG002 - a summary names its node
        """Leave what a node's controllers say."""
        self._summaries += summaries

    async def collect(self) -> list[Summary]:
        """Take all that was left."""
        found, self._summaries = self._summaries, []
        return found

    async def push(self, node: str, decisions: Decisions) -> None:
        """Leave decisions for a node."""
        self._decisions.setdefault(node, []).append(decisions)

    async def take(self, node: str) -> list[Decisions]:
        """Take what was decided for a node."""
        return self._decisions.pop(node, [])

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        """Keep nothing: the state lives as long as the process."""

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:  # noqa: ARG002
        """Return nothing."""
        return {}

    async def drop_session(self, session: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
