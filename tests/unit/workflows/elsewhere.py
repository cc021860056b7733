"""Hosts without Ray: on the deployment's own loop, with pickled messages, and processes that can be lost."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

from thunderagent_workflows.host import Hello, Host
from thunderagent_workflows.hub import PeerLostError

if TYPE_CHECKING:
    from thunderagent_workflows.declare import Agent
    from thunderagent_workflows.parcels import Parcel


class LocalPeer:
    def __init__(self, location: str, place: str) -> None:
        self.location = location
        self.place = place
        self.host: Host
        self.is_closed = False
        self._is_lost = asyncio.Event()
        self._held: list[tuple[int, bytes]] = []
        self._batches_count = 0

    async def open(self, hello: Hello) -> None:
        self.host = Host(pickle.loads(pickle.dumps(hello)), pickle.dumps, self.place)
        await self.host.open()

    def deliver(self, batch: list[Parcel]) -> None:
        """Deliver each second batch before its predecessor, as Ray may."""
        self._held.append((self._batches_count, pickle.dumps(batch)))
        self._batches_count += 1
        asyncio.get_running_loop().call_soon(self._bring)

    def _bring(self) -> None:
        while self._held and not self._is_lost.is_set():
            number, batch = self._held.pop()
            self.host.deliver(number, pickle.loads(batch))

    async def receive(self) -> list[Parcel]:
        receiving = asyncio.ensure_future(self.host.receive())
        lost = asyncio.ensure_future(self._is_lost.wait())
        try:
            await asyncio.wait([receiving, lost], return_when=asyncio.FIRST_COMPLETED)
            if self._is_lost.is_set():
                raise PeerLostError(f"the process of {self.location} was killed")
            return pickle.loads(pickle.dumps(receiving.result()))
        finally:
            receiving.cancel()
            lost.cancel()

    async def close(self, *, is_over: bool) -> None:
        if self._is_lost.is_set():
            raise PeerLostError("it is gone")
        self.is_closed = True
        await self.host.close(is_over=is_over)

    def kill(self) -> None:
        self._is_lost.set()


class LocalLauncher:
    """Two places, in turn."""

    def __init__(self) -> None:
        self.peers: dict[str, LocalPeer] = {}
        self.is_closed = False

    def dumps(self, message: Any) -> bytes:
        return pickle.dumps(message)

    async def start(self, agent: Agent, location: str) -> LocalPeer:
        assert agent.name == location.partition("/")[0]
        self.peers[location] = LocalPeer(location, f"place-{len(self.peers) % 2}")
        return self.peers[location]

    async def close(self) -> None:
        for peer in self.peers.values():  # a process would lose the same
            peer.kill()
            if hasattr(peer, "host"):
                await peer.host.close(is_over=True)
        self.is_closed = True
