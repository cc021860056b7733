"""The Docker driver: sandboxes are containers of one Docker engine, and each ends itself when its time to live is over.

Theory of operation
===================
Everything that must be found again is in labels on the containers and networks themselves: a restarted proxy knows
nothing and still finds its own. Objects without our labels are never touched.

The engine has no time to live for containers, so each has its own. Its first process is a small shell script
(`scripts.py`) that starts the command and ends, with the container, when the time is over, whatever happened to the
proxy. The engine then removes it (auto-remove). Networks are left to others: `reclaim`, `sweep`, and the reaper
(`reaper.py`), a process that outlives a dead proxy.

The library blocks, so its calls run in threads (`engine.py`). Short ones share a bounded pool. Pulls have threads of
their own, and so has each streaming answer (a container's output, a command that runs inside, the engine's events): the
pool must not wait for what a sandbox does. One preparation, and its undoing, is `prepare.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from docker import APIClient, errors  # type: ignore[import-untyped]

from thunderagent.errors import NotFoundError, SandboxError, SandboxRefusedError
from thunderagent.tools.base import (
    OWNER_LABEL,
    PROGRAM_LABEL,
    SANDBOX_LABEL,
    Change,
    Command,
    Found,
    Order,
    Owner,
    Place,
    Usage,
    logging_failures,
)
from thunderagent.tools.docker.answers import Listed, labels_of, list_all, memory_bytes_of, place_of, volume_bytes_of
from thunderagent.tools.docker.connection import ignoring, none_if_missing, try_to_remove
from thunderagent.tools.docker.engine import Engine
from thunderagent.tools.docker.images import Images
from thunderagent.tools.docker.networks import Networks
from thunderagent.tools.docker.prepare import NETWORK_LABEL, STOP_GRACE_LABEL, Preparation
from thunderagent.tools.docker.reap import spawn_reaper
from thunderagent.tools.docker.setups import Setups, is_kept
from thunderagent.tools.docker.watch import changes
from thunderagent.tools.template import LONGEST_S

_log = structlog.get_logger(__name__)

# How often to check for the end of a container, and for how long.
_POLL_S = 0.05
_LONGEST_POLL_S = 0.5
_REMOVAL_S = 20.0
_MEASURED_AT_ONCE = 4
_ENDED_COUNT = 1000


@dataclass(frozen=True, slots=True)
class _Made:
    """What belongs to a removed container."""

    network: str = ""
    image: str = ""


class DockerDriver:
    """Makes sandboxes as containers of a Docker engine. Belongs to one event loop."""

    kind = "docker"

    def __init__(
        self,
        owner: Owner,
        *,
        url: str = "",
        concurrency_count: int,
        keep_images: Sequence[str] = (),
        images_bytes: int | None = None,
        request_timeout_s: float = 60.0,
        max_pulls_count: int = 2,
    ) -> None:
        """Connect at the first use; `url` is the engine's, by default that of DOCKER_HOST.

        `concurrency_count` calls to the engine run at a time. With `images_bytes`, images that were pulled for
        sandboxes and that none uses take no more than that: the least recently used go, except `keep_images`.
        """
        self._owner = owner
        self._engine = Engine(url, concurrency_count=concurrency_count, request_timeout_s=request_timeout_s)
        self._images_bytes, self._keep_images = images_bytes, tuple(keep_images)
        self._images = Images(
            self._engine,
            owner.owner_id,
            keep=keep_images,
            limit_bytes=images_bytes,
            max_pulls_count=max_pulls_count,
        )
        self._networks = Networks(self._engine, owner)
        self._setups = Setups(self._engine, owner)
        self._preparing: set[str] = set()
        self._made: dict[str, _Made] = {}
        self._adopted: set[str] = set()
        self._probed: dict[str, bool] = {}
        """Given containers in which commands ran since a watch began, and whether they have a health check."""
        # Recently reported ends: it was not known yet that a sandbox still in preparation was meant.
        self._ended: deque[str] = deque(maxlen=_ENDED_COUNT)
        self._stop_deadlines_s: dict[str, float] = {}
        self._reaper_pipe: int | None = None

    def __repr__(self) -> str:
        return f"<DockerDriver at {self._engine.url or 'the default engine'}: {len(self._preparing)} preparing>"

    async def open(self) -> None:
        """Start the process that cleans up if this one dies; it ends by itself."""
        if self._reaper_pipe is None:
            reading, self._reaper_pipe = os.pipe()  # its end is our end: nobody inherits it
            try:
                await self._engine.threads.call(
                    spawn_reaper, self._owner, self._engine.url, reading, self._images_bytes, self._keep_images
                )
            finally:
                os.close(reading)

    async def close(self) -> None:
        """Close connections and threads once started removals are done; sandboxes stay, kept setups go."""
        self._setups.close()
        await self._engine.close()
        self._images.close()
        if self._reaper_pipe is not None:
            os.close(self._reaper_pipe)
            self._reaper_pipe = None

    # --- preparing ----------------------------------------------------------------------------------------------------

    async def prepare(self, order: Order) -> Place:
        """Make a sandbox and return once it is usable. Raises `SandboxError`; then, and if cancelled, nothing is left.

        Costs an engine some 0.3 s and five calls, and for each setup command and readiness check some 0.1 s and three.
        """
        preparation = Preparation(order, self._owner, self._engine, self._images, self._networks, self._setups)
        self._preparing.add(preparation.name)
        try:
            place = await preparation.run()
            if place.handle in self._ended:
                await preparation.check()
        except BaseException:
            # Run to its end, even if the caller is cancelled again.
            await asyncio.shield(self._engine.later(self._undo(preparation)))
            raise
        self._made[place.handle] = _Made(preparation.network, preparation.image)
        self._preparing.discard(preparation.name)
        preparation.unclaim()
        return place

    async def _undo(self, preparation: Preparation) -> None:
        try:
            await preparation.undo()
        finally:
            self._preparing.discard(preparation.name)
        await self._drop_unused(_Made(preparation.network, preparation.image))

    # --- reclaiming ---------------------------------------------------------------------------------------------------

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return where a client's own container is; `name` may be its id.

        Raises `NotFoundError`, `SandboxError`.
        """
        if reclaim_url:
            raise SandboxRefusedError("docker removes its sandboxes itself: no reclaim_url is needed")
        info = await self._engine.inspect(name)
        if info is None or not info["State"]["Running"]:
            raise NotFoundError(f"no container {name!r} runs at the docker engine")
        if SANDBOX_LABEL in (info["Config"]["Labels"] or {}):
            raise SandboxRefusedError(f"the container {name!r} is a sandbox already")
        place = place_of(info)
        self._adopted.add(place.handle)
        return place

    async def reclaim(self, handle: str) -> None:
        """Remove a container with its anonymous volumes, then its network and its image if nobody else needs them.

        One of ours gets its template's time to end by itself. Raises `SandboxError`; `SandboxRefusedError` for one that
        we neither made nor were given.
        """
        info = await self._engine.inspect(handle)
        made = self._made.get(handle, _Made())
        if info is not None:
            labels: Mapping[str, str] = info["Config"]["Labels"] or {}
            if not self._may_touch(info["Id"], labels):
                raise SandboxRefusedError(f"the container {info['Name']} is not ours to remove")
            if info["State"].get("Paused"):
                await self.thaw(info["Id"])  # it can neither end by itself nor be told to
            if info["State"]["Running"] and SANDBOX_LABEL in labels:
                await self._stop(info["Id"], _grace_s(labels))
            await self._engine.remove(info["Id"])
            if SANDBOX_LABEL in labels:
                image = str(info["Config"]["Image"])  # of a recycled one the template's is wanted, known or not
                made = _Made(labels.get(NETWORK_LABEL, ""), made.image if is_kept(image) else image)
        self._forget(handle)
        await self._drop_unused(made)

    def _may_touch(self, handle: str, labels: Mapping[str, str]) -> bool:
        if SANDBOX_LABEL in labels:
            return labels.get(OWNER_LABEL) == self._owner.owner_id
        return PROGRAM_LABEL in labels or handle in self._adopted

    async def _stop(self, handle: str, grace_s: float) -> None:
        """Ask a container to end, and wait; repeating that, after an interrupted reclaiming, gives it no more time."""
        if grace_s <= 0:
            return
        deadline_s = self._stop_deadlines_s.get(handle)
        if deadline_s is None:
            deadline_s = self._stop_deadlines_s[handle] = time.monotonic() + grace_s
            await self._engine.ask(lambda client: ignoring(client.kill, handle, signal="TERM"))
        pause_s = _POLL_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            info = await self._engine.inspect(handle)
            if info is None or not info["State"]["Running"]:
                return
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _forget(self, handle: str) -> None:
        self._made.pop(handle, None)
        self._adopted.discard(handle)
        self._stop_deadlines_s.pop(handle, None)

    async def _drop_unused(self, made: _Made) -> None:
        """Remove a network without containers, and a pulled image that none needs. Never raises."""
        try:
            if made.network:
                await self._networks.drop_unused(made.network)
            if made.image:
                await self._images.drop_unused(made.image)
        except SandboxError as error:
            _log.warning("sandbox_remains_not_removed", network=made.network, image=made.image, why=error.message)

    # --- suspending ---------------------------------------------------------------------------------------------------

    async def suspend(self, handle: str) -> None:
        """Freeze all processes of a container; it is refused new commands. Raises `SandboxError`."""
        await self._engine.ask(lambda client: client.pause(handle))

    async def thaw(self, handle: str) -> None:
        """Thaw a container; one that is not frozen, or gone, is no error. Raises `SandboxError`."""

        def unpause(client: APIClient) -> None:
            try:
                client.unpause(handle)
            except errors.APIError:
                info = none_if_missing(client.inspect_container, handle)
                if info is not None and info["State"].get("Paused"):
                    raise

        await self._engine.ask(unpause)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def find(self) -> Sequence[Found]:
        """Return all containers of this owner, those given to us by their label, and adopted ones."""
        adopted = list(self._adopted)

        def ask(client: APIClient) -> list[Listed]:
            ours = list_all(client, {"label": [f"{OWNER_LABEL}={self._owner.owner_id}"]})
            labelled = list_all(client, {"label": [PROGRAM_LABEL]})
            given = [each for each in labelled if SANDBOX_LABEL not in labels_of(each)]
            return [*ours, *given, *(list_all(client, {"id": adopted}) if adopted else ())]

        found = {each.id: each.found() for each in await self._engine.ask(ask)}
        self._adopted.difference_update(each for each in adopted if each not in found)  # others removed them
        return list(found.values())

    async def sweep(self) -> None:
        """Remove leftovers without a sandbox: this owner's networks, stopped containers, kept setups, pulled images."""
        ours = {"label": [f"{OWNER_LABEL}={self._owner.owner_id}"]}
        for each in await self._engine.ask(lambda client: list_all(client, ours)):
            is_over = each.state in ("created", "exited", "dead")
            if is_over and self._preparing.isdisjoint(name.removeprefix("/") for name in each.names):
                with logging_failures(f"container {each.id[:12]}"):
                    await self._engine.ask(partial(try_to_remove, handle=each.id))
        await self._networks.sweep()
        await self._setups.sweep()
        await self._images.sweep()

    def watch(self) -> AsyncGenerator[Change | Command, None]:
        """Yield each given container that appears, and each labelled one that ends, from this call on.

        Also yield each command that is run inside a labelled one.

        Raises `SandboxEngineError` when the engine is lost. Closing it ends its thread and its connection.
        """
        return self._watch(time.time())

    async def _watch(self, since_s: float) -> AsyncGenerator[Change | Command, None]:
        self._probed.clear()  # some ends may have been missed
        async with contextlib.aclosing(changes(self._engine, since_s)) as told:
            async for change in told:
                if isinstance(change, tuple):
                    command, attributes = change
                    if self._may_touch(command.handle, attributes) and not await self._is_probed(command, attributes):
                        yield command
                    continue
                handle, labels = change.found.handle, change.found.labels
                if not self._may_touch(handle, labels):
                    continue
                if change.ended:
                    self._probed.pop(handle, None)
                    self._ended.append(handle)
                    self._engine.later(self._bury(handle))
                    yield change
                elif change.found.is_given and (info := await self._engine.inspect(handle)) is not None:
                    yield Change(Found(handle, labels, True, place_of(info)), ended=False)

    async def _is_probed(self, command: Command, labels: Mapping[str, str]) -> bool:
        """Return whether a command may be the engine's own probe, which looks like an agent's command.

        Our containers have no health check. A given container is inspected when a command first runs in it.
        """
        if SANDBOX_LABEL in labels:
            return False
        if command.handle not in self._probed:
            info = await self._engine.inspect(command.handle)
            check = {} if info is None else info["Config"].get("Healthcheck") or {}
            self._probed[command.handle] = (check.get("Test") or ["NONE"])[0] != "NONE"
        return self._probed[command.handle]

    async def _bury(self, handle: str) -> None:
        """Remove what belongs to our container that ended by itself; the engine removes the container."""
        made = self._made.get(handle)
        if made is None:
            return
        give_up_s = time.monotonic() + _REMOVAL_S
        with contextlib.suppress(SandboxError):
            while time.monotonic() < give_up_s:
                if await self._engine.inspect(handle) is None:
                    self._forget(handle)
                    await self._drop_unused(made)
                    return
                await asyncio.sleep(2 * _POLL_S)

    async def measure(self, handles: Sequence[str]) -> Usage:
        """Return disk use, including anonymous volumes, and memory use, without page cache.

        Costs the engine a walk through what each has written, and a call for each.
        """
        if not handles:
            return Usage()
        listed = await self._engine.ask(lambda client: list_all(client, {"id": list(handles)}, with_sizes=True))
        volume_bytes: dict[str, int] = {}
        if any(each.volume_names for each in listed):
            with contextlib.suppress(SandboxError):  # it takes one such request at a time
                volume_bytes = await self._engine.ask(volume_bytes_of)
        disk_bytes = {
            each.id: each.size_rw + sum(volume_bytes.get(name, 0) for name in each.volume_names) for each in listed
        }
        hands = asyncio.Semaphore(_MEASURED_AT_ONCE)

        async def memory_of(handle: str) -> tuple[str, int | None]:
            async with hands:
                return handle, await self._engine.ask(lambda client: memory_bytes_of(client, handle))

        running = [each.id for each in listed if each.state == "running"]
        measured = await asyncio.gather(*(memory_of(handle) for handle in running))
        return Usage(disk_bytes, {handle: taken for handle, taken in measured if taken is not None})


def _grace_s(labels: Mapping[str, str]) -> float:
    """Return a sandbox's time to end by itself; 0 if its label, which anybody may have set, does not say."""
    try:
        return min(float(labels.get(STOP_GRACE_LABEL, "")), LONGEST_S)
    except ValueError:
        return 0.0
