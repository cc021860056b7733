"""The node store on Redis: others can read the summaries, and sessions' state outlives the deployment.

One blob per node and period, one hash per session, all in msgpack. So state comes back in its types: tuples and sets as
lists, dataclasses as dictionaries, enums as their values, decimals and dates as strings. What it cannot encode is not
kept. Anybody who can write to the server decides what agents remember. Deployments on one server share the sessions'
state, and nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from thunderagent.redis_failover import asked_anew, in_words
from thunderagent_workflows.errors import StoreError
from thunderagent_workflows.state import kept_values
from thunderagent_workflows.store import Decisions
from thunderagent_workflows.view import Summary

PREFIX = "thunderagent:workflows"
MAX_BLOBS_COUNT = 1000
"""Limit of unread blobs; older ones are dropped, so that a stuck loop fills no memory."""

UNREAD_S = 3600
"""Blobs that nobody has read for so long are of a deployment that is gone."""

ANSWER_S = 5.0
"""A server that is silent for so long has refused."""


class RedisStore:
    """A store at `redis://HOST:PORT/DATABASE`. Its methods raise `StoreError` if the server refuses."""

    def __init__(self, url: str, prefix: str = PREFIX) -> None:
        """Connect at the first use."""
        self._client = redis.asyncio.Redis.from_url(url, socket_timeout=ANSWER_S)
        self._prefix = prefix
        deployment = uuid.uuid4().hex  # all have a node-0
        self._summaries = f"{prefix}:summaries:{deployment}"
        self._decisions = f"{prefix}:decisions:{deployment}"

    async def publish(self, node: str, summaries: list[Summary]) -> None:
        """Leave a node's summaries."""
        await self._add(self._summaries, msgspec.msgpack.encode([node, [asdict(each) for each in summaries]]))

    async def collect(self) -> list[Summary]:
        """Take all summaries."""
        blobs = await self._asked(lambda: self._client.lpop(self._summaries, MAX_BLOBS_COUNT))
        said = [msgspec.msgpack.decode(blob, type=tuple[str, list[Summary]]) for blob in blobs or ()]
        return [summary for _, summaries in said for summary in summaries]

    async def push(self, node: str, decisions: Decisions) -> None:
        """Leave decisions for a node."""
        await self._add(f"{self._decisions}:{node}", msgspec.msgpack.encode(asdict(decisions)))

    async def take(self, node: str) -> list[Decisions]:
        """Take a node's decisions."""
        blobs = await self._asked(lambda: self._client.lpop(f"{self._decisions}:{node}", MAX_BLOBS_COUNT))
        return [msgspec.msgpack.decode(blob, type=Decisions) for blob in blobs or ()]

    async def save_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        """Store parts of a session's managed state. What msgpack cannot encode is logged, and not stored."""
        key = f"{self._prefix}:state:{session}"
        blobs = {f"{agent}/{name}": blob for name, blob in kept_values(values, msgspec.msgpack.encode, session).items()}
        kept = {field: blob for field, blob in blobs.items() if blob is not None}

        async def save() -> None:
            async with self._client.pipeline() as pipeline:
                if kept:
                    pipeline.hset(key, mapping=kept)
                if refused := blobs.keys() - kept.keys():
                    pipeline.hdel(key, *refused)
                await pipeline.execute()

        await self._asked(save)

    async def load_states(self, session: str) -> dict[str, dict[str, Any]]:
        """Return a session's stored managed state, by agent."""
        fields = await self._asked(lambda: self._client.hgetall(f"{self._prefix}:state:{session}"))
        found: dict[str, dict[str, Any]] = {}
        for field, blob in fields.items():
            agent, _, name = field.decode().partition("/")
            found.setdefault(agent, {})[name] = msgspec.msgpack.decode(blob, strict=False)
        return found

    async def drop_session(self, session: str) -> None:
        """Delete a session's state."""
        await self._asked(lambda: self._client.delete(f"{self._prefix}:state:{session}"))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _add(self, key: str, blob: bytes) -> None:
        async def add() -> None:
            async with self._client.pipeline() as pipeline:
                pipeline.rpush(key, blob)
                pipeline.ltrim(key, -MAX_BLOBS_COUNT, -1)
                pipeline.expire(key, UNREAD_S)
                await pipeline.execute()

        await self._asked(add)

    async def _asked(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask the server, on a new connection if it is no longer the one to ask."""
        try:
            return await asked_anew(self._client, ask)
        except (RedisError, OSError, RuntimeError) as error:  # the last: a connection whose end uvloop already knows
            raise StoreError(f"Redis: {in_words(error)}") from error
