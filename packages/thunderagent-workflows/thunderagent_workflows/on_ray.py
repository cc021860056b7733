"""Instances on Ray: it starts a process for each where its resources are, and reports when one is gone.

Everything else stays ours: a call waits in our queues until it runs, so it can move, be batched, be prioritised and be
dropped as in one process. A cluster is one domain of trust: messages are pickled, and anybody who can send to it runs
code.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from thunderagent_workflows.declare import Agent
from thunderagent_workflows.errors import WorkflowError
from thunderagent_workflows.host import Hello, Host
from thunderagent_workflows.hub import PeerLostError
from thunderagent_workflows.parcels import Parcel

PLACE_S = 60.0
"""How long an instance waits for room in the cluster before giving up for now."""


def dumps(message: object) -> bytes:
    """Return a message's bytes."""
    content: bytes = ray.cloudpickle.dumps(message)
    return content


class Process:
    """A Ray actor: all of a host's methods, and its location."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def place(self) -> str:
        """Return which of Ray's nodes this is."""
        return str(ray.get_runtime_context().get_node_id())

    async def open(self, hello: Hello) -> None:
        """Start the host."""
        self._host = Host(hello, dumps, await self.place())
        await self._host.open()

    async def deliver(self, number: int, batch: list[Parcel]) -> None:
        """Process a batch."""
        assert self._host is not None
        self._host.deliver(number, batch)

    async def receive(self) -> list[Parcel]:
        """Return the next batch."""
        assert self._host is not None
        return await self._host.receive()

    async def close(self, *, is_over: bool) -> None:
        """End the host."""
        if self._host is not None:
            await self._host.close(is_over=is_over)


class RayPeer:
    """An actor, from the hub's side."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._batches_count = 0

    async def open(self, hello: Hello) -> None:
        """Start the host. Raises what the agent's class raises."""
        try:
            await self._actor.open.remote(hello)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise PeerLostError(str(error)) from None

    def deliver(self, batch: list[Parcel]) -> None:
        """Send a batch: a call of the actor, whose tasks may overtake each other."""
        self._actor.deliver.remote(self._batches_count, batch)
        self._batches_count += 1

    async def receive(self) -> list[Parcel]:
        """Return the next batch. Raises `PeerLostError`."""
        try:
            batch: list[Parcel] = await self._actor.receive.remote()
        except RayError as error:
            raise PeerLostError(str(error)) from None
        return batch

    async def close(self, *, is_over: bool) -> None:
        """End the host."""
        try:
            await self._actor.close.remote(is_over=is_over)
        except RayError as error:
            raise PeerLostError(str(error)) from None

    def kill(self) -> None:
        """End the actor's process."""
        ray.kill(self._actor)


class RayLauncher:
    """Starts actors in a cluster, spread over its nodes as far as their resources allow."""

    def __init__(self, *, is_ours: bool) -> None:
        """With `is_ours` the connection to the cluster was made here, and is closed with this."""
        self._is_ours = is_ours

    def dumps(self, message: Any) -> bytes:
        """Return a message's bytes; definitions in the driver's own script go by value."""
        return dumps(message)

    async def start(self, agent: Agent, location: str) -> RayPeer:
        """Start an actor, and wait until it has a place. Raises `WorkflowError` after `PLACE_S` without one."""
        wanted = actor_options(agent.directives.resources)
        actor = ray.remote(Process).options(**wanted, scheduling_strategy="SPREAD", max_restarts=0).remote()
        try:
            async with asyncio.timeout(PLACE_S):
                await actor.place.remote()
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                text = f"the cluster has no room for {location}, which wants {agent.directives.resources}"
                raise WorkflowError(f"{text}: it has {ray.available_resources()}") from error
            if isinstance(error, RayError):
                raise PeerLostError(str(error)) from None
            raise
        return RayPeer(actor)

    async def close(self) -> None:
        """Leave the cluster, if it was entered here."""
        if self._is_ours:
            await _in_thread(ray.shutdown)


async def connect(address: str) -> RayLauncher:
    """Enter a cluster, unless this process already has: `auto`, `HOST:PORT`, or `local` for a private one.

    Raises `WorkflowError`.
    """
    if ray.is_initialized():
        return RayLauncher(is_ours=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        await _in_thread(lambda: ray.init(address, logging_level="ERROR", **options))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise WorkflowError(f"no Ray cluster at {address}: {error}") from error
    return RayLauncher(is_ours=True)


def actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """Return an agent's resources under Ray's names; others become custom resources of the cluster."""
    own = {name: amount for name, amount in resources.items() if name not in {"cpu", "gpu", "memory"}}
    options: dict[str, Any] = {"num_cpus": resources.get("cpu", 0.0), "num_gpus": resources.get("gpu", 0.0)}
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return {**options, "resources": own} if own else options


async def _in_thread(action: Callable[[], object]) -> None:
    """Run something blocking, in a thread that ends with it."""
    with ThreadPoolExecutor(1, "workflow-ray") as thread:
        await asyncio.get_running_loop().run_in_executor(thread, action)
