"""Networks of programs in a Docker engine: each shared by one program's sandboxes, gone with the last of them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from weakref import WeakValueDictionary

from docker import APIClient, errors  # type: ignore[import-untyped]

from thunderagent.tools.base import EXPIRES_LABEL, OWNER_LABEL, PROGRAM_LABEL, RUN_LABEL, Order, Owner, logging_failures
from thunderagent.tools.docker.answers import expires_s, list_all
from thunderagent.tools.docker.engine import Engine


class Networks:
    """The networks that one owner made."""

    def __init__(self, engine: Engine, owner: Owner) -> None:
        self._engine = engine
        self._owner = owner
        # Preparations that need one now: the engine does not know of them yet.
        self._users: Counter[str] = Counter()
        # An engine makes two networks of one name if it is asked twice at once, and then finds neither by it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def claim(self, order: Order) -> str:
        """Return the name of an order's network, and keep it from being removed. A warm sandbox has its own."""
        of = f"program/{order.program_id}" if order.program_id else f"sandbox/{order.sandbox_id}"
        name = "thunderagent-" + hashlib.sha256(f"{self._owner.owner_id}/{of}".encode()).hexdigest()[:24]
        self._users[name] += 1
        return name

    def unclaim(self, name: str) -> None:
        """Take one claim back."""
        self._users -= Counter([name])

    async def make(self, name: str, order: Order) -> None:
        """Make a network unless it exists. A cancelled caller leaves; it is made all the same."""
        labels = {
            OWNER_LABEL: self._owner.owner_id,
            RUN_LABEL: self._owner.run_id,
            PROGRAM_LABEL: order.program_id,
            EXPIRES_LABEL: order.labels[EXPIRES_LABEL],
        }

        async def make() -> None:
            async with self._lock(name):
                await self._engine.ask(lambda client: _make(client, name, labels))

        await asyncio.shield(self._engine.whole(make()))

    async def drop_unused(self, name: str) -> None:
        """Remove a network unless somebody needs it. Raises `SandboxError`."""
        async with self._lock(name):
            if not self._users[name]:
                await self._engine.ask(lambda client: remove_network(client, name))

    async def sweep(self) -> None:
        """Remove unneeded networks that an earlier run made or that expired. Raises `SandboxError` without a list."""
        ours = {"label": [f"{OWNER_LABEL}={self._owner.owner_id}"]}
        now_s = time.time()
        for network in await self._engine.ask(lambda client: client.networks(filters=ours)):
            labels = network["Labels"] or {}
            if labels.get(RUN_LABEL) != self._owner.run_id or expires_s(labels) <= now_s:
                with logging_failures(f"network {network['Name']}"):
                    await self.drop_unused(network["Name"])

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _make(client: APIClient, name: str, labels: Mapping[str, str]) -> None:
    try:
        client.create_network(name, driver="bridge", check_duplicate=True, labels=labels)
    except errors.APIError as error:
        if error.status_code != 409:
            raise


def remove_network(client: APIClient, name: str) -> bool:
    """Remove a network unless a container, running or not, is on it; return whether it is gone. Blocks."""
    if list_all(client, {"network": [name]}):
        return False
    try:
        client.remove_network(name)
    except errors.NotFound:
        return True
    except errors.APIError as error:
        if error.status_code not in (403, 409):  # it is in use after all
            raise
        return False
    return True
