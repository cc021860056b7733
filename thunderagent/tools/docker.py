"""The Docker driver: sandboxes are containers of one Docker engine, and each ends itself when its time to live is over.

Theory of operation
===================
Everything that must be found again is written on the containers and networks themselves, as labels: a proxy that
restarts knows nothing and still finds what is its own. What bears none of our labels is never touched.

The engine has no time to live for containers, so each has its own: its first process is a small shell script
(`docker_scripts.py`) that starts the command, and that ends, and with it the container, when the time is over, whatever
became of the proxy. The engine then removes it (auto-remove). What is left for others is networks: `reclaim`, `sweep`,
and the reaper (`reaper.py`), a process that outlives a proxy which dies.

The library waits, so its calls run in threads. Short ones share a bounded pool. Pulls have threads of their own, and so
has each answer that streams (a container's output, a command that runs inside, the engine's events): the pool must not
wait for what a sandbox does. A call in a thread runs to its end even if its caller is cancelled; so every preparation
writes down what it began (`_Begun`), and its undoing waits for the call that still runs before it removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import structlog

from thunderagent.errors import (
    ConfigurationError,
    NotFoundError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSetupError,
)
from thunderagent.tools.base import (
    EXPIRES_LABEL,
    LABEL_PREFIX,
    OWNER_LABEL,
    PROGRAM_LABEL,
    RUN_LABEL,
    SANDBOX_LABEL,
    Change,
    Found,
    Order,
    Owner,
    Place,
    Usage,
)
from thunderagent.tools.docker_scripts import FIRST_PROCESS, UNTIL_COMMAND, UNTIL_PORT
from thunderagent.tools.template import Mount, Template
from thunderagent.tools.threads import Threads

try:
    from docker import APIClient, errors, types  # type: ignore[import-untyped]

    from thunderagent.tools.docker_engine import (
        EVENT,
        LIBRARY_ERRORS,
        Event,
        Json,
        Listed,
        Output,
        Stream,
        connect,
        encoded,
        ignoring,
        labels_of,
        list_all,
        mapped,
        memory_bytes_of,
        none_if_missing,
        place_of,
        url_of,
        volume_bytes_of,
    )
except ImportError as error:
    raise ConfigurationError("sandboxes by docker need its library: pip install 'thunderagent[docker]'") from error

_log = structlog.get_logger(__name__)
T = TypeVar("T")

STOP_GRACE_LABEL = f"{LABEL_PREFIX}stop-grace-s"
NETWORK_LABEL = f"{LABEL_PREFIX}network"
"""Of a container: the network of its program, which goes with the last container on it."""
NAME_PREFIX = "thunderagent-"

# How long a container that is being removed by somebody else may take, and how often to look.
_REMOVAL_S = 20.0
_POLL_S = 0.05
# A command inside is over when its process is, though something that it left behind may hold its output.
_LOOK_S = 1.0
_LONGEST_LOOK_S = 8.0
_MEASURED_AT_ONCE = 4
_CLOSE_S = 10.0
_ENDED_COUNT = 1000
_REAPER_TIMEOUT_S = 60.0


# --- the driver -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Begun:
    """What a preparation has begun so far: all that must go if it does not come to its end."""

    order: Order
    call: asyncio.Future[Any] | None = None
    """The call that makes something, perhaps still running in its thread."""
    container_id: str = ""
    network: str = ""
    image: str = ""
    is_uncertain: bool = False
    """The engine did not say whether it made the container."""
    output: Output = field(default_factory=Output)
    stream: Stream | None = None


@dataclass(frozen=True, slots=True)
class _Made:
    """What goes with a container that is gone."""

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
        reclaim_images: bool = False,
        request_timeout_s: float = 60.0,
        max_pulls_count: int = 2,
    ) -> None:
        """Connect at the first use; `url` is the engine's, by default what DOCKER_HOST says.

        `concurrency_count` calls to the engine run at a time. With `reclaim_images`, images that were pulled for a
        sandbox go when none needs them, besides `keep_images`.
        """
        self._owner = owner
        self._url = url
        self._keep_images = frozenset(keep_images)
        self._reclaim_images = reclaim_images
        self._request_timeout_s = request_timeout_s
        self._calls = Threads("docker", concurrency_count)
        self._pull_threads = Threads("docker-pull", max_pulls_count)
        self._connecting = threading.Lock()
        self._connected: APIClient | None = None
        self._is_closing = False
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._pulled: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Preparations that need an image or a network now: the engine does not know of them yet.
        self._image_users: Counter[str] = Counter()
        self._network_users: Counter[str] = Counter()
        self._network_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._preparing: set[str] = set()
        self._made: dict[str, _Made] = {}
        self._adopted: set[str] = set()
        # Whose end was told of lately: nobody could know yet that one still in preparation was meant.
        self._ended: deque[str] = deque(maxlen=_ENDED_COUNT)
        self._stop_deadlines_s: dict[str, float] = {}
        self._reaper_pipe: int | None = None

    def __repr__(self) -> str:
        return f"<DockerDriver at {self._url or 'the default engine'}: {len(self._preparing)} preparing>"

    # --- preparing ----------------------------------------------------------------------------------------------------

    async def prepare(self, order: Order) -> Place:
        """Make a sandbox and return once it is usable. Raises `SandboxError`; then, and if cancelled, nothing is left.

        Costs an engine some 0.3 s and five calls, and for each setup command and readiness check some 0.1 s and three.
        """
        begun = _Begun(order)
        self._preparing.add(_name_of(order))
        try:
            place = await self._prepare(begun)
        except BaseException:
            await self._finish(self._undo(begun))
            raise
        self._made[place.handle] = _Made(begun.network, begun.image)
        self._let_go(begun)
        return place

    async def _prepare(self, begun: _Begun) -> Place:
        template = begun.order.template
        if template.ports and template.network == "none":
            raise SandboxRefusedError("a sandbox without a network can have no ports")
        begun.image = template.image
        self._image_users[template.image] += 1
        image = await self._image(template.image)
        if template.network == "own":
            await self._join_network(begun)
        try:
            place = await self._launch(begun, image)
        except SandboxImageError:  # it went since we looked
            image = await self._image(template.image)
            place = await self._launch(begun, image)
        for command in template.setup:
            await self._set_up(begun, "setup", command, ["sh", "-c", command])
        interval = f"{template.ready_interval_s:g}"
        if template.ready_port is not None:
            what = f"port {template.ready_port}"
            port = f"{template.ready_port:04X}"
            await self._set_up(begun, "readiness", what, ["sh", "-c", UNTIL_PORT, "sh", port, interval])
        if template.ready_command:
            command = template.ready_command
            await self._set_up(begun, "readiness", command, ["sh", "-c", UNTIL_COMMAND, "sh", command, interval])
        assert begun.stream is not None
        if (begun.stream.ended.done() or place.handle in self._ended) and (error := await self._ended_error(begun)):
            raise error
        return place

    async def _image(self, name: str) -> Json:
        """Return what the engine knows of an image; pull it if it is not there."""
        info: Json | None = await self._ask(lambda client: none_if_missing(client.inspect_image, name))
        while info is None:
            pull = self._pulls.get(name)
            if pull is None:
                pull = self._pulls[name] = self._later(self._pull(name))
                # Whoever waits for it gets its error; there may be nobody any more.
                pull.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(pull)
            info = await self._ask(lambda client: none_if_missing(client.inspect_image, name))
        return info

    async def _pull(self, name: str) -> None:
        """Pull an image, for everybody who waits for it."""
        started_s = time.monotonic()
        try:
            await self._ask(lambda client: self._pull_whole(client, name), self._pull_threads)
            self._pulled.add(name)
            _log.info("sandbox_image_pulled", image=name, took_s=round(time.monotonic() - started_s, 3))
        finally:
            self._pulls.pop(name, None)

    def _pull_whole(self, client: APIClient, name: str) -> None:
        for line in client.pull(name, stream=True, decode=True):
            if self._is_closing:
                raise SandboxEngineError("the driver is closing")
            if "error" in line:
                raise errors.APIError(line["error"], explanation=line["error"])

    async def _launch(self, begun: _Begun, image: Json) -> Place:
        """Create and start the container; its output is listened to from its first line on, as it goes with it."""

        def launch(client: APIClient) -> Place:
            begun.is_uncertain = True
            try:
                begun.container_id = _create(client, begun, image, self._owner)["Id"]
            except errors.APIError:  # it said no
                begun.is_uncertain = False
                raise
            path = f"/containers/{begun.container_id}/attach?stream=1&stdout=1&stderr=1"
            begun.stream = stream = self._stream("output", "POST", path, begun.output.read)
            stream.open(self._request_timeout_s)
            client.start(begun.container_id)
            info = none_if_missing(client.inspect_container, begun.container_id)
            if info is None:
                stream.ended.result(self._request_timeout_s)
                raise SandboxSetupError(_told("it ended at once", str(begun.output)))
            return place_of(info)

        begun.call = asyncio.ensure_future(self._ask(launch))
        return await asyncio.shield(begun.call)

    async def _set_up(self, begun: _Begun, what: str, told: str, command: list[str]) -> None:
        """Run a command inside. Raises `SandboxSetupError` if it fails, or if the sandbox ends meanwhile."""
        try:
            code, said = await self._run_inside(begun, command)
        except SandboxEngineError:
            raise
        except SandboxError as error:
            raise await self._ended_error(begun) or error from error
        if code != 0:
            # A container that ends takes what runs inside with it, by KILL, and nothing can be run inside any more.
            ended = await self._ended_error(begun) if code in (None, 126, 137) else None
            raise ended or SandboxSetupError(_told(f"{what} `{told}` failed with exit code {code}", said))

    async def _run_inside(self, begun: _Begun, command: list[str]) -> tuple[int | None, str]:
        """Return a command's exit code and the last lines it said."""
        exec_id = (await self._ask(lambda client: client.exec_create(begun.container_id, command)))["Id"]
        output = Output()
        body = {"Detach": False, "Tty": False}
        stream = self._stream("command", "POST", f"/exec/{exec_id}/start", output.read, body)
        try:
            await self._open(stream)
            ended = asyncio.wrap_future(stream.ended)
            look_s = _LOOK_S
            while not ended.done():
                await asyncio.wait([ended], timeout=look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
                info = await self._ask(lambda client: client.exec_inspect(exec_id))
                if not info["Running"]:
                    return info["ExitCode"], str(output)
            for _ in range(20):  # the end of its output comes first
                info = await self._ask(lambda client: client.exec_inspect(exec_id))
                if not info["Running"]:
                    break
                await asyncio.sleep(_POLL_S)
            return info["ExitCode"], str(output)
        finally:
            stream.close()

    async def _ended_error(self, begun: _Begun) -> SandboxSetupError | None:
        """Return how the container ended, or None if it has not."""
        assert begun.stream is not None
        # The end of its output comes first; what the engine says of it follows within moments.
        ended = asyncio.wrap_future(begun.stream.ended)
        await asyncio.wait([ended], timeout=0.5)
        for _ in range(20 if ended.done() else 1):
            info = await self._ask(lambda client: none_if_missing(client.inspect_container, begun.container_id))
            if info is None or not info["State"]["Running"]:
                return SandboxSetupError(_told("it ended by itself", str(begun.output)))
            await asyncio.sleep(_POLL_S)
        return None

    # --- undoing ------------------------------------------------------------------------------------------------------

    async def _undo(self, begun: _Begun) -> None:
        """Remove what a preparation began, as far as the engine can be reached."""
        if begun.call is not None:
            await asyncio.wait([begun.call])
            if not begun.call.cancelled():
                begun.call.exception()  # it was raised already, or nobody wants to know
        name = _name_of(begun.order)
        try:
            handle = begun.container_id
            if not handle and begun.is_uncertain:
                handle = await self._ask(lambda client: self._ours_by_name(client, name, begun.order.sandbox_id))
            if handle:
                await self._remove(handle)
        except SandboxError as error:
            _log.warning("sandbox_not_undone", container=name, why=error.message)
        finally:
            self._let_go(begun)
        await self._drop_unused(_Made(begun.network, begun.image))

    def _let_go(self, begun: _Begun) -> None:
        """Count a preparation no longer among those who need its network and its image."""
        self._preparing.discard(_name_of(begun.order))
        if begun.stream is not None:
            begun.stream.close()
        for users, name in ((self._network_users, begun.network), (self._image_users, begun.image)):
            if name:
                users[name] -= 1
                if not users[name]:
                    del users[name]

    def _ours_by_name(self, client: APIClient, name: str, sandbox_id: str) -> str:
        info = none_if_missing(client.inspect_container, name)
        labels = (info["Config"]["Labels"] or {}) if info else {}
        is_ours = labels.get(OWNER_LABEL) == self._owner.owner_id and labels.get(SANDBOX_LABEL) == sandbox_id
        return str(info["Id"]) if info and is_ours else ""

    # --- reclaiming ---------------------------------------------------------------------------------------------------

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return where a container is that a client made itself; `name` may be its id.

        Raises `NotFoundError`, `SandboxError`.
        """
        if reclaim_url:
            raise SandboxRefusedError("docker removes its sandboxes itself: no reclaim_url is needed")
        info = await self._ask(lambda client: none_if_missing(client.inspect_container, name))
        if info is None or not info["State"]["Running"]:
            raise NotFoundError(f"no container {name!r} runs at the docker engine")
        if SANDBOX_LABEL in (info["Config"]["Labels"] or {}):
            raise SandboxRefusedError(f"the container {name!r} is a sandbox already")
        place = place_of(info)
        self._adopted.add(place.handle)
        return place

    async def reclaim(self, handle: str) -> None:
        """Remove a container with its anonymous volumes, then its network and its image if nobody else needs them.

        One of ours gets its template's time to end by itself. Raises `SandboxError`; `SandboxRefusedError` for one
        that is neither ours nor was given to us.
        """
        info = await self._ask(lambda client: none_if_missing(client.inspect_container, handle))
        made = self._made.get(handle, _Made())
        if info is not None:
            labels: Mapping[str, str] = info["Config"]["Labels"] or {}
            if not self._may_touch(info["Id"], labels):
                raise SandboxRefusedError(f"the container {info['Name']} is not ours to remove")
            if info["State"]["Running"]:
                await self._stop(info["Id"], float(labels.get(STOP_GRACE_LABEL, 0.0)))
            await self._remove(info["Id"])
            if SANDBOX_LABEL in labels:
                made = _Made(labels.get(NETWORK_LABEL, ""), info["Config"]["Image"])
        self._forget(handle)
        await self._drop_unused(made)

    def _may_touch(self, handle: str, labels: Mapping[str, str]) -> bool:
        if SANDBOX_LABEL in labels:
            return labels.get(OWNER_LABEL) == self._owner.owner_id
        return PROGRAM_LABEL in labels or handle in self._adopted

    def _forget(self, handle: str) -> None:
        self._made.pop(handle, None)
        self._adopted.discard(handle)
        self._stop_deadlines_s.pop(handle, None)

    async def _stop(self, handle: str, grace_s: float) -> None:
        """Ask a container to end, and wait; asking again, after a reclaiming was cut short, gives it no more time."""
        if grace_s <= 0:
            return
        loop = asyncio.get_running_loop()
        deadline_s = self._stop_deadlines_s.get(handle)
        if deadline_s is None:
            deadline_s = self._stop_deadlines_s[handle] = loop.time() + grace_s
            await self._ask(lambda client: ignoring(client.kill, handle, signal="TERM"))
        pause_s = _POLL_S
        while loop.time() < deadline_s:
            info = await self._ask(lambda client: none_if_missing(client.inspect_container, handle))
            if info is None or not info["State"]["Running"]:
                return
            await asyncio.sleep(min(pause_s, max(0.0, deadline_s - loop.time())))
            pause_s = min(2 * pause_s, 0.5)

    async def _remove(self, handle: str) -> None:
        """Remove a container, running or not; return once it is gone. That it is gone already is no error."""
        give_up_s = time.monotonic() + _REMOVAL_S
        while not await self._ask(lambda client: _removed(client, handle)):
            if time.monotonic() > give_up_s:
                raise SandboxError(f"docker: the removal of {handle[:12]} has not ended after {_REMOVAL_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def _drop_unused(self, made: _Made) -> None:
        """Remove a network that no container is left on, and a pulled image that none needs. Never raises."""
        try:
            if made.network:
                await self._drop_network(made.network)
            if made.image:
                await self._drop_image(made.image)
        except SandboxError as error:
            _log.warning("sandbox_remains_not_removed", network=made.network, image=made.image, why=error.message)

    async def _drop_image(self, name: str) -> None:
        if not self._reclaim_images or name not in self._pulled or name in self._keep_images:
            return

        def drop(client: APIClient) -> bool:
            if list_all(client, {"ancestor": [name]}):
                return False
            ignoring(client.remove_image, name)
            return True

        # Whoever begins to need it while it goes finds that out, and pulls it anew.
        if not self._image_users[name] and await self._ask(drop):
            self._pulled.discard(name)
            _log.info("sandbox_image_removed", image=name)

    # --- the network of a program -------------------------------------------------------------------------------------

    async def _join_network(self, begun: _Begun) -> None:
        """Make the network that the sandboxes of a program share, unless it is there."""
        order = begun.order
        begun.network = _network_of(self._owner, order)
        self._network_users[begun.network] += 1
        labels = {
            OWNER_LABEL: self._owner.owner_id,
            RUN_LABEL: self._owner.run_id,
            PROGRAM_LABEL: order.program_id,
            EXPIRES_LABEL: order.labels[EXPIRES_LABEL],
        }
        async with self._network_lock(begun.network):
            begun.call = asyncio.ensure_future(self._ask(lambda client: _make_network(client, begun.network, labels)))
            await asyncio.shield(begun.call)

    async def _drop_network(self, name: str) -> None:
        async with self._network_lock(name):
            if not self._network_users[name]:
                await self._ask(lambda client: _remove_network(client, name))

    def _network_lock(self, name: str) -> asyncio.Lock:
        return self._network_locks.setdefault(name, asyncio.Lock())

    # --- looking ------------------------------------------------------------------------------------------------------

    async def find(self) -> Sequence[Found]:
        """Return all containers of this owner, those given to us by their label, and those that were adopted."""
        adopted = list(self._adopted)

        def ask(client: APIClient) -> list[Listed]:
            listed = list_all(client, {"label": [f"{OWNER_LABEL}={self._owner.owner_id}"]})
            listed += [
                each for each in list_all(client, {"label": [PROGRAM_LABEL]}) if SANDBOX_LABEL not in labels_of(each)
            ]
            return listed + (list_all(client, {"id": adopted}) if adopted else [])

        found = {each.id: each.found() for each in await self._ask(ask)}
        return list(found.values())

    async def sweep(self) -> None:
        """Remove what no sandbox is left for: networks and stopped containers of this owner, images that we pulled."""
        ours = {"label": [f"{OWNER_LABEL}={self._owner.owner_id}"]}
        for each in await self._ask(lambda client: list_all(client, ours)):
            name = each.names[0].removeprefix("/") if each.names else ""
            if each.state in ("created", "exited", "dead") and name not in self._preparing:
                await self._remove(each.id)
        now_s = time.time()
        for network in await self._ask(lambda client: client.networks(filters=ours)):
            labels = network["Labels"] or {}
            if labels.get(RUN_LABEL) != self._owner.run_id or _expires_s(labels) <= now_s:
                await self._drop_network(network["Name"])
        for image in list(self._pulled):
            await self._drop_image(image)

    def watch(self) -> AsyncGenerator[Change, None]:
        """Yield each given container that appears, and each labelled one that ends, from this call on.

        Raises `SandboxEngineError` when the engine is lost. Closing it ends its thread and its connection.
        """
        return self._watch(time.time())

    async def _watch(self, since_s: float) -> AsyncGenerator[Change, None]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def hand_over(event: Event | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        def read(response: Any) -> None:
            for line in response.iter_lines():
                if line:
                    hand_over(EVENT.decode(line))

        filters = {"type": ["container"], "event": ["start", "die", "destroy", "oom"]}
        query = f"/events?since={since_s:.3f}&filters={encoded(filters)}"
        stream = self._stream("events", "GET", query, read)
        stream.ended.add_done_callback(lambda _: hand_over(None))
        seen = _Seen()
        try:
            await self._open(stream)
            while (event := await events.get()) is not None:
                change = seen.change(event)
                if change is None or not self._may_touch(change.found.handle, change.found.labels):
                    continue
                if change.ended:
                    self._ended.append(change.found.handle)
                    self._later(self._bury(change.found.handle))
                elif change.found.is_given:
                    change = await self._with_place(change)
                else:
                    continue
                if change is not None:
                    yield change
            raise mapped(stream.ended.result(0) or ConnectionError("it closed its stream of events"))
        finally:
            stream.close()

    async def _with_place(self, change: Change) -> Change | None:
        handle = change.found.handle
        info = await self._ask(lambda client: none_if_missing(client.inspect_container, handle))
        if info is None:
            return None
        return Change(Found(handle, change.found.labels, True, place_of(info)), ended=False)

    async def _bury(self, handle: str) -> None:
        """Remove what goes with a container of ours that ended by itself; the engine removes that."""
        made = self._made.get(handle)
        if made is None:
            return
        give_up_s = time.monotonic() + _REMOVAL_S
        with contextlib.suppress(SandboxError):
            while time.monotonic() < give_up_s:
                info = await self._ask(lambda client: none_if_missing(client.inspect_container, handle))
                if info is None:
                    self._forget(handle)
                    await self._drop_unused(made)
                    return
                await asyncio.sleep(2 * _POLL_S)

    async def measure(self, handles: Sequence[str]) -> Usage:
        """Return what these take on disk, anonymous volumes included, and in memory, page cache excluded.

        Costs the engine a walk through what each has written, and a call for each.
        """
        if not handles:
            return Usage()
        listed = await self._ask(lambda client: list_all(client, {"id": list(handles)}, with_sizes=True))
        volume_bytes: dict[str, int] = {}
        if any(mount.type == "volume" for each in listed for mount in each.mounts or ()):
            with contextlib.suppress(SandboxError):  # it takes one such question at a time
                volume_bytes = await self._ask(volume_bytes_of)
        disk_bytes = {
            each.id: each.size_rw + sum(volume_bytes.get(mount.name, 0) for mount in each.mounts or () if mount.name)
            for each in listed
        }
        hands = asyncio.Semaphore(_MEASURED_AT_ONCE)

        async def memory_of(handle: str) -> tuple[str, int | None]:
            async with hands:
                return handle, await self._ask(lambda client: memory_bytes_of(client, handle))

        running = [each.id for each in listed if each.state == "running"]
        measured = await asyncio.gather(*(memory_of(handle) for handle in running))
        return Usage(disk_bytes, {handle: taken for handle, taken in measured if taken is not None})

    # --- the end ------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the process that removes what is left when this one dies without a word; it ends by itself."""
        if self._reaper_pipe is None:
            reading, self._reaper_pipe = os.pipe()  # its end is our end: nobody inherits it
            try:
                await self._calls.call(_spawn_reaper, self._owner, self._url, reading)
            finally:
                os.close(reading)

    async def close(self) -> None:
        """Let go of connections and threads once what was begun is removed; sandboxes stay."""
        self._is_closing = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        if self._reaper_pipe is not None:
            os.close(self._reaper_pipe)
            self._reaper_pipe = None
        self._calls.close()
        self._pull_threads.close()
        if self._connected is not None:
            self._connected.close()

    # --- helpers ------------------------------------------------------------------------------------------------------

    async def _ask(self, what: Callable[[APIClient], T], threads: Threads | None = None) -> T:
        """Ask the engine something in a thread. Raises `SandboxError`."""
        return await (threads or self._calls).call(self._in_thread, what)

    def _in_thread(self, what: Callable[[APIClient], T]) -> T:
        try:
            return what(self._client())
        except LIBRARY_ERRORS as error:
            ours = mapped(error)
            if isinstance(ours, SandboxEngineError):
                self._connected = None  # one that comes back may speak another version
            raise ours from error

    def _client(self) -> APIClient:
        """Return the library's client; connect if need be."""
        with self._connecting:
            if self._connected is None:
                self._connected = connect(self._url, self._request_timeout_s)
            return self._connected

    def _stream(
        self, name: str, method: str, path: str, read: Callable[[Any], None], body: Json | None = None
    ) -> Stream:
        # Silence is no error in a stream: the time limit is for connecting alone.
        limits_s = (self._request_timeout_s, None)

        def ask() -> Any:
            client = self._client()
            return client.request(method, url_of(client, path), json=body, stream=True, timeout=limits_s)

        return Stream(f"docker {name}", ask, read)

    async def _open(self, stream: Stream) -> None:
        await self._ask(lambda _: stream.open(self._request_timeout_s))

    def _later(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finish(self, what: Coroutine[Any, Any, None]) -> None:
        """Do it to its end: who is cancelled while waiting leaves, and it goes on."""
        await asyncio.shield(self._later(what))


# --- calls that run in threads ----------------------------------------------------------------------------------------


def _removed(client: APIClient, handle: str) -> bool:
    """Remove a container; say whether it is gone. A removal that somebody else began is waited for."""
    try:
        client.remove_container(handle, force=True, v=True)
    except errors.NotFound:
        return True
    except errors.APIError as error:
        if error.status_code != 409:
            raise
        return False
    return True


def _create(client: APIClient, begun: _Begun, image: Json, owner: Owner) -> Json:
    """Create the container of an order; nothing runs yet."""
    order = begun.order
    template = order.template
    config = image["Config"] or {}
    command = [*(config.get("Entrypoint") or ()), *template.command] if template.command else []
    ttl_s = max(1, math.ceil(order.expires_at_s - time.time()))
    signal = str(config.get("StopSignal") or "TERM").removeprefix("SIG")
    labels = {
        **order.labels,
        OWNER_LABEL: owner.owner_id,
        RUN_LABEL: owner.run_id,
        STOP_GRACE_LABEL: f"{template.stop_grace_s:g}",
        **({NETWORK_LABEL: begun.network} if begun.network else {}),
    }
    networking = None
    if begun.network:
        aliases = [each for each in (order.sandbox_id, order.template_name) if each]
        networking = client.create_networking_config({begun.network: client.create_endpoint_config(aliases=aliases)})
    created: Json = client.create_container(
        template.image,
        name=_name_of(order),
        entrypoint=["/bin/sh", "-c", FIRST_PROCESS, "thunderagent"],
        command=[str(ttl_s), signal, *command],
        environment=template.environment,
        working_dir=template.working_dir or None,
        labels=labels,
        ports=list(template.ports) or None,
        stop_signal="SIGTERM",
        host_config=_host_config(client, template, begun.network),
        networking_config=networking,
    )
    return created


def _host_config(client: APIClient, template: Template, network: str) -> Json:
    config: Json = client.create_host_config(
        auto_remove=True,
        init=False,
        mounts=[_mount(each) for each in template.mounts],
        mem_limit=template.memory_bytes,
        memswap_limit=template.memory_bytes,  # memory and swap together
        nano_cpus=None if template.cpus_count is None else int(template.cpus_count * 1e9),
        pids_limit=template.pids_count,
        port_bindings=dict.fromkeys(template.ports, ("127.0.0.1",)) or None,
        network_mode="none" if template.network == "none" else network or None,
    )
    return config


def _mount(mount: Mount) -> Json:
    kind = "volume" if mount.source is None else "bind"
    made: Json = types.Mount(mount.target, mount.source, type=kind, read_only=mount.read_only)
    return made


def _make_network(client: APIClient, name: str, labels: Mapping[str, str]) -> None:
    try:
        client.create_network(name, driver="bridge", check_duplicate=True, labels=labels)
    except errors.APIError as error:
        if error.status_code != 409:
            raise


def _remove_network(client: APIClient, name: str) -> bool:
    """Remove a network unless a container, running or not, is on it; say whether it is gone."""
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


def _spawn_reaper(owner: Owner, url: str, reading: Any) -> None:
    """Start it in a group of its own, so that what ends us does not end it; only the pipe's end does."""
    arguments = ["--owner", owner.owner_id, "--run", owner.run_id, "--url", url]
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "thunderagent.tools.reaper", *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, here, there) for here, there in ((reading, 0), (null, 1), (null, 2))],
            setsid=True,
        )
    finally:
        os.close(null)


def reap(url: str, of: Owner, now_s: float) -> float | None:
    """Remove what has expired of one run: containers, and networks that no container is on. For the reaper; waits.

    Returns when the next of what is left expires, in Unix time as `now_s` is; None if nothing is left. Raises
    `SandboxError`.
    """
    ours = {"label": [f"{OWNER_LABEL}={of.owner_id}", f"{RUN_LABEL}={of.run_id}"]}
    left_s: list[float] = []
    try:
        with contextlib.closing(connect(url, _REAPER_TIMEOUT_S)) as client:
            for each in list_all(client, ours):
                expires_s = _expires_s(labels_of(each))
                if expires_s > now_s or not _removed(client, each.id):
                    left_s.append(expires_s)
            for network in client.networks(filters=ours):
                expires_s = _expires_s(network["Labels"] or {})
                if expires_s > now_s or not _remove_network(client, network["Name"]):
                    left_s.append(expires_s)
    except LIBRARY_ERRORS as error:
        raise mapped(error) from error
    return min(left_s, default=None)


# --- what is pure -----------------------------------------------------------------------------------------------------


class _Seen:
    """Makes one change of all that the engine says of a container's end."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        self._out_of_memory: set[str] = set()

    def change(self, event: Event) -> Change | None:
        """Return what an event tells that was not told yet."""
        handle, attributes = event.actor.id, event.actor.attributes
        found = Found(handle, attributes, event.action == "start", Place(handle))
        if event.action == "oom":
            self._out_of_memory.add(handle)
            return None
        if event.action == "start":
            self._ended.discard(handle)
            return Change(found, ended=False)
        was_told = handle in self._ended
        if event.action == "destroy":
            self._ended.discard(handle)
            self._out_of_memory.discard(handle)
            return None if was_told else Change(found, ended=True, why="it was removed")
        self._ended.add(handle)
        code = attributes.get("exitCode", "?")
        why = f"it ended with exit code {code}"
        if handle in self._out_of_memory:
            why += ": out of memory"
        elif code == "124" and event.time + 1 >= _expires_s(attributes):
            why = "its time to live is over"
        return Change(found, ended=True, why=why)


def _name_of(order: Order) -> str:
    return NAME_PREFIX + order.sandbox_id


def _network_of(owner: Owner, order: Order) -> str:
    """Return the name of the network that the sandboxes of a program share; one that is kept warm has its own."""
    of = f"program/{order.program_id}" if order.program_id else f"sandbox/{order.sandbox_id}"
    return NAME_PREFIX + hashlib.sha256(f"{owner.owner_id}/{of}".encode()).hexdigest()[:24]


def _expires_s(labels: Mapping[str, str]) -> float:
    expires = labels.get(EXPIRES_LABEL, "")
    return float(expires) if expires.isdecimal() else 0.0


def _told(what: str, said: str) -> str:
    return f"{what}:\n{said}" if said else what
