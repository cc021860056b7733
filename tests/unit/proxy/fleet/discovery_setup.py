"""A discovery over fakes, and its actions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thunderagent.backends import backend_of
from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.discovery import Wanted
from thunderagent.errors import ConfigurationError
from thunderagent.programs import invariants
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.fleet.polls import Polls
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime

if TYPE_CHECKING:
    from thunderagent.backends.poller import ReplicaEndpoint
    from thunderagent.programs.messages import Event

A, B, C = "http://a:1", "http://b:2", "http://c:3"


@dataclass
class FakeConnections:
    """The client without connections."""

    open: dict[str, int] = field(default_factory=dict)

    def add(self, endpoint: ReplicaEndpoint) -> None:
        self.open[endpoint.replica_id] = 0

    async def remove(self, replica_id: str) -> None:
        await asyncio.sleep(0)
        del self.open[replica_id]

    def set_paused(self, replica_id: str, *, paused: bool) -> None:
        pass

    def requests_count(self, replica_id: str) -> int:
        return self.open.get(replica_id, 0)


@dataclass
class FakeFollower:
    """A follower that refuses some replicas, and records the rest."""

    refuses: set[str] = field(default_factory=set)
    followed: list[str] = field(default_factory=list)

    def add(self, replica: ReplicaEndpoint) -> None:
        if replica.replica_id in self.refuses:
            raise ConfigurationError(f"{replica.replica_id} cannot be followed")
        self.followed.append(replica.replica_id)

    def remove(self, replica_id: str) -> None:
        if replica_id in self.followed:
            self.followed.remove(replica_id)


class Setup:
    """A discovery over fakes, and its actions."""

    def __init__(self, settings: DiscoverySettings | None = None) -> None:
        self.now_s = 0.0
        self.events: list[Event] = []
        self.runtime = Runtime(Scheduler(Cap(n=9)), clock=lambda: self.now_s)
        self.runtime.observe(lambda event, _: self.events.append(event))
        self.runtime.observe(lambda _event, _decisions: invariants.check(self.runtime.scheduler))
        self.connections = FakeConnections()
        self.follower = FakeFollower()
        self.replicas = Replicas(self.runtime, [])
        self.polls = Polls(self.runtime, self.replicas)
        self.replicas.attach(self.connections, self.follower)
        self.discovery = Discovery(
            self.runtime, self.replicas, lambda: backend_of("vllm"), settings or DiscoverySettings()
        )

    def names(self, source: str, *urls: str, draining: bool = False) -> None:
        self.discovery.replicas_wanted(source, [Wanted(url, is_draining=draining) for url in urls])

    def comes_up(self, *replica_ids: str) -> None:
        for replica_id in replica_ids:
            self.polls.replica_polled(replica_id, ReplicaReading(capacity_tokens=1000))
            self.polls.replica_up(replica_id)

    @property
    def known(self) -> list[str]:
        """Return the known replicas, after a check that all parts agree."""
        known = list(self.replicas.known)
        assert sorted(self.follower.followed) == sorted(self.connections.open) == sorted(known)
        assert set(self.runtime.scheduler.replicas) <= set(known)
        return known

    @property
    def open(self) -> list[str]:
        return [replica.replica_id for replica in self.runtime.scheduler.open_replicas]

    def leaving(self) -> list[str]:
        return [name for name, each in self.replicas.known.items() if each.leaving_since_s is not None]

    async def until_known(self, *replica_ids: str) -> None:
        async with asyncio.timeout(5):
            while sorted(self.replicas.known) != sorted(replica_ids) or len(self.connections.open) != len(replica_ids):
                await asyncio.sleep(0.005)
        assert sorted(self.known) == sorted(replica_ids)
