"""Events of the sandboxes in a Kubernetes cluster.

Theory of operation
===================
Watching works as in Kubernetes generally: a list, then its changes from the list's version on. A stream that ends
continues from the last version heard of, including bookmarks. If the server no longer knows that version (410), the
list is read again, and its differences from the known state are the events.

A sandbox is a Job and its pod, and both are reported, in any order. `Following` combines these for `base.Driver`: each
sandbox appears once, and ends once, with the best reason given.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping

import structlog

from thunderagent.errors import SandboxEngineError
from thunderagent.tools.base import Change, Found, Owner
from thunderagent.tools.kubernetes.api import Api, GoneError, Stop
from thunderagent.tools.kubernetes.objects import (
    LABELLED_SELECTOR,
    RESOURCES,
    Json,
    Resource,
    controller_of,
    is_for_us,
    ref_of,
    truth,
    uid_of,
    version_of,
)
from thunderagent.tools.kubernetes.state import end_of, found_of

_log = structlog.get_logger(__name__)


def follow(
    api: Api, resource: Resource, namespace: str, selector: str, stop: Stop, since: str = ""
) -> Generator[tuple[str, Json], None, None]:
    """Yield existing objects as LISTED, then events as ADDED, MODIFIED or DELETED, until told to stop.

    `since` is the version of an empty list: later events are reported, and no list is read. Raises `SandboxError` when
    the server is lost: later events must be found by a new list.
    """
    known: dict[str, Json] | None = {} if since else None
    version = since
    while not stop.is_set:
        if not version:
            items, version = api.list_all(resource, namespace, selector)
            now = {uid_of(item): item for item in items}
            if known is None:
                yield from (("LISTED", item) for item in items)
            else:
                yield from _differences(known, now)
            known = now
        assert known is not None
        try:
            for event, manifest in _changes(api, resource, namespace, selector, version, stop):
                if event == "DELETED":
                    known.pop(uid_of(manifest), None)
                else:
                    known[uid_of(manifest)] = manifest
                yield event, manifest
        except GoneError:
            _log.info("kubernetes_watch_expired", resource=resource.plural, namespace=namespace)
            version = ""


def _changes(
    api: Api, resource: Resource, namespace: str, selector: str, version: str, stop: Stop
) -> Iterator[tuple[str, Json]]:
    """Yield changes from a version on, stream after stream. Raises `GoneError` if the version is too old."""
    while not stop.is_set:
        begun_at_s = time.monotonic()
        for event in api.stream(resource, namespace, selector, version, stop):
            if event["type"] == "ERROR":
                status = event["object"]
                if status.get("code") == 410:
                    raise GoneError(str(status.get("message")))
                raise SandboxEngineError(f"the watch of {resource.plural} failed: {status.get('message')}")
            version = version_of(event["object"]) or version
            if event["type"] != "BOOKMARK":
                yield event["type"], event["object"]
        if time.monotonic() - begun_at_s < api.backoff_s:
            stop.wait(api.backoff_s)


def _differences(before: Mapping[str, Json], now: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Yield the events between two lists, by uid; removals first, because a name may be reused."""
    yield from (("DELETED", manifest) for uid, manifest in before.items() if uid not in now)
    for uid, manifest in now.items():
        if uid not in before:
            yield "ADDED", manifest
        elif version_of(before[uid]) != version_of(manifest):
            yield "MODIFIED", manifest


class Following:
    """Follows labelled objects in threads, one for each namespace and kind, and reports their meaning on the loop."""

    def __init__(self, api: Api, owner: Owner, *, explanation_limit_s: float) -> None:
        """Follow nothing yet. `explanation_limit_s` is how long to wait for the reason of a sandbox's end."""
        self._api = api
        self._owner = owner
        self._explanation_limit_s = explanation_limit_s
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[tuple[str, str, Json] | Exception] = asyncio.Queue()
        self._namespaces: set[str] = set()
        self._stops: list[Stop] = []
        self._is_stopped = False
        self._lock = threading.Lock()
        # Sandboxes that have not ended, with the uid of their object; and which of these the object itself reported.
        self._alive: dict[str, tuple[Found, str]] = {}
        self._told: set[str] = set()
        # The uids of the last that ended: their pods may still be reported for a while.
        self._over: deque[str] = deque(maxlen=1000)
        # Sandboxes that ended without a reason, with their uid: kept back until then for a better one.
        self._unexplained: dict[str, tuple[float, str, Change]] = {}
        self._changes: deque[Change] = deque()

    def add(self, namespace: str) -> None:
        """Follow one more namespace; from any thread."""
        with self._lock:
            if self._is_stopped or namespace in self._namespaces:
                return
            self._namespaces.add(namespace)
            for kind in RESOURCES:
                stop = Stop()
                self._stops.append(stop)
                name = f"kubernetes-watch-{namespace}-{kind}"
                threading.Thread(target=self._follow, args=(namespace, kind, stop), name=name, daemon=True).start()

    def stop(self) -> None:
        """Let all threads leave; does not wait for them."""
        with self._lock:
            self._is_stopped = True
            for stop in self._stops:
                stop.set()

    async def next_change(self) -> Change:
        """Return the next event; raise `SandboxError` if the API server is lost."""
        while not self._changes:
            due_at_s = min((due_at_s for due_at_s, _, _ in self._unexplained.values()), default=None)
            try:
                async with asyncio.timeout_at(due_at_s):
                    heard = await self._heard.get()
            except TimeoutError:
                self._tell_due()
                continue
            if isinstance(heard, Exception):
                raise heard
            self._take(*heard)
        return self._changes.popleft()

    def _follow(self, namespace: str, kind: str, stop: Stop) -> None:
        try:
            for event, manifest in follow(self._api, RESOURCES[kind], namespace, LABELLED_SELECTOR, stop):
                self._put((kind, event, manifest))
        except Exception as error:
            self._put(error)

    def _put(self, heard: tuple[str, str, Json] | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._heard.put_nowait, heard)

    def _take(self, kind: str, event: str, manifest: Json) -> None:
        """Process an event: each sandbox appears once, and ends once."""
        ref = ref_of(kind, manifest)
        controller = controller_of(manifest) if ref.kind != kind else None
        uid = controller[1] if controller is not None else uid_of(manifest)
        why = end_of(kind, manifest) or ("removed" if event == "DELETED" else "")
        if why:
            self._ended(ref.handle, uid, why, is_part=controller is not None)
            return
        found = found_of(ref, truth(manifest), manifest if kind == "pod" else {})
        if uid in self._over or not is_for_us(found.labels, self._owner):
            return
        if controller is None:
            self._told.add(ref.handle)
        if self._uid_of(ref.handle) == uid or (controller is not None and not found.is_given):
            return
        if ref.handle in self._unexplained:
            self._changes.append(self._unexplained.pop(ref.handle)[2])
        self._alive[ref.handle] = found, uid
        if event != "LISTED":
            self._changes.append(Change(found, ended=False))

    def _ended(self, handle: str, uid: str, why: str, *, is_part: bool) -> None:
        """Report that a sandbox ended.

        A Job and its pod are reported in any order, and often only one of them knows the reason: the pod that it
        failed, or the Job that its time was over. A report without a reason waits a moment for the other.
        """
        # When a Job fails or completes, its pod has said more; when a pod is removed, its Job may know why.
        is_vague = why == "removed" if is_part else why.startswith(("BackoffLimitExceeded", "Complet"))
        if self._uid_of(handle) != uid:
            return
        if handle in self._unexplained:
            if not is_vague and why != "removed":
                _, _, change = self._unexplained.pop(handle)
                self._changes.append(Change(change.found, ended=True, why=why))
            return
        found, _ = self._alive[handle]
        if is_part and found.is_given and handle in self._told:
            return  # another pod may follow in a Job that was given to us: the Job reports its end
        del self._alive[handle]
        if handle in self._told:
            self._told.remove(handle)
            self._over.append(uid)
        change = Change(found, ended=True, why=why)
        if is_vague:
            self._unexplained[handle] = self._loop.time() + self._explanation_limit_s, uid, change
        else:
            self._changes.append(change)

    def _tell_due(self) -> None:
        """Report what ended and will not be explained any more."""
        now_s = self._loop.time()
        for handle, (due_at_s, _, change) in list(self._unexplained.items()):
            if due_at_s <= now_s:
                del self._unexplained[handle]
                self._changes.append(change)

    def _uid_of(self, handle: str) -> str:
        """Return the last known uid of a handle's object; empty if it ended, or is unknown."""
        if handle in self._alive:
            return self._alive[handle][1]
        return self._unexplained[handle][1] if handle in self._unexplained else ""
