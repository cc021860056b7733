"""The Kubernetes driver: sandboxes that are Jobs or pods, made, watched and removed through the API server.

Theory of operation
===================
The official client waits, so all of its calls run in threads. Whatever is done for one preparation is done by one
thread, from the manifest to the pod that is ready: it alone knows what it began, and removes it when it fails, when the
time is over or when the caller is gone, even if the caller left while the API server had not answered yet. Threads that
read a watch are told to leave by `_Stop`, which takes the connection away under them.

What is watched is followed as Kubernetes wants it: a list, then its changes from the list's version on. A stream that
ends goes on from the last version heard of, bookmarks included. If the server no longer knows that version (410), the
list is made again, and what differs from what was known is what happened.

An object is removed under the condition that it is the one that is meant (its uid): a name may have been taken by
another one since. What bears neither our owner nor the label of a program is never touched.

What the manifests say, and why no help is needed once they are given, is in `kubernetes_objects.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import urllib3
from kubernetes import client, config
from kubernetes.utils.quantity import parse_quantity

from thunderagent.errors import (
    NotFoundError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSetupError,
    SandboxSpaceError,
)
from thunderagent.tools.base import SANDBOX_LABEL, Change, Found, Order, Owner, Place, Usage
from thunderagent.tools.kubernetes_objects import (
    LABELLED_SELECTOR,
    POD_METRICS,
    POLICIES,
    RESOURCES,
    Json,
    Ref,
    Resource,
    address_of,
    controller_of,
    delay_of,
    end_of,
    fault_of,
    is_for_us,
    is_going,
    is_ready,
    network_in,
    network_of,
    owned_selector,
    policy_manifest,
    ports_of,
    ref_of,
    sandbox_manifest,
    sandbox_name,
    sandbox_selector,
    truth,
    uid_of,
    version_of,
)
from thunderagent.tools.threads import Threads

_log = structlog.get_logger(__name__)

# How long a watch lasts before it is asked for anew: so a connection that died in silence is noticed.
_WATCH_S = 60
# Between two attempts where the server answers at once, but not with what was asked for.
_BACKOFF_S = 0.5
# How long a caller that is cancelled waits for what was begun to be removed. It is removed all the same.
_CANCEL_LIMIT_S = 5.0
# How long it is remembered that the cluster tells nothing of what pods take.
_NO_METRICS_S = 300.0
# How long it is waited for the reason why a sandbox ended, once it has.
_EXPLANATION_LIMIT_S = 0.5
_ATTEMPTS_COUNT = 3
_LOCKS_COUNT = 64


class KubernetesDriver:
    """Make sandboxes in a cluster. Implements `base.Driver`."""

    def __init__(
        self,
        owner: Owner,
        *,
        namespace: str = "default",
        namespaces: Iterable[str] = (),
        kubeconfig: Path | None = None,
        api_url: str = "",
        concurrency_count: int = 32,
        request_timeout_s: float = 30.0,
        owner_pod: tuple[str, str] | None = None,
        page_items_count: int = 500,
    ) -> None:
        """Connect to nothing yet.

        `namespace` is for templates that name none; `namespaces` are others to look for sandboxes in. Without
        `kubeconfig` the pod that we run in says where the API is, or else the user's own configuration. `owner_pod`,
        name and uid of that pod, lets the cluster remove what we made in its namespace when the pod is deleted; in
        others it owns nothing. `concurrency_count` is how many are prepared at once.
        """
        self._owner = owner
        self._namespace = namespace
        self._namespaces = {namespace, *namespaces}
        self._owner_pod = owner_pod
        self._has_owner_pod: dict[str, bool] = {}
        self._patience_s = request_timeout_s
        self._api = _Api(
            kubeconfig=kubeconfig,
            api_url=api_url,
            timeout_s=request_timeout_s,
            connections_count=2 * concurrency_count + 8,
            page_items_count=page_items_count,
        )
        # Preparations wait for minutes: they must not keep anything from being removed.
        self._preparing = Threads("kubernetes-prepare", concurrency_count)
        self._calls = Threads("kubernetes", concurrency_count)
        self._known: dict[str, _Known] = {}
        self._network_locks = tuple(threading.Lock() for _ in range(_LOCKS_COUNT))
        self._errands: set[_Errand] = set()
        self._followings: set[_Following] = set()
        self._no_metrics_until_s = -math.inf
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<KubernetesDriver in {', '.join(sorted(self._namespaces))}, {len(self._errands)} in preparation>"

    @property
    def kind(self) -> str:
        """Return its word."""
        return "kubernetes"

    # --- prepare ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin nothing: it connects when it is asked for something."""

    async def prepare(self, order: Order) -> Place:
        """Make a sandbox and return once it is usable; see `base.Driver`.

        Fails by itself shortly before the template's timeout, to be able to say what it waited for.
        """
        errand = _Errand()
        timeout_s = order.template.prepare_timeout_s
        late = asyncio.get_running_loop().call_later(max(0.9 * timeout_s, timeout_s - 2.0), errand.stop.set)
        # Not cancelled with us: the thread must be heard to its end, for what it began to be removed.
        working = asyncio.ensure_future(self._preparing.call(self._prepare, order, errand))
        working.add_done_callback(_be_heard)
        self._errands.add(errand)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError as cancelled:
            if self._is_closed and working.cancelled():
                raise SandboxEngineError("the driver was closed before this preparation had its turn") from cancelled
            cancelled.add_note(f"sandbox {order.sandbox_id} was not ready: {errand.delay}")
            await self._give_up(order, errand, working)
            raise
        finally:
            late.cancel()
            self._errands.discard(errand)

    async def _give_up(self, order: Order, errand: _Errand, working: asyncio.Future[Place]) -> None:
        stage = errand.give_up()
        if stage is _Stage.BEGUN:
            await asyncio.wait({working}, timeout=_CANCEL_LIMIT_S)
        elif stage is _Stage.DONE:
            await self._calls.call(self._discard, self._ref(order))

    def _prepare(self, order: Order, errand: _Errand) -> Place:
        """Do all of a preparation; in a thread."""
        errand.begin()
        if errand.stop.is_set:
            raise SandboxSetupError(f"not ready in time: {errand.delay}")
        ref = self._ref(order)
        # From before it is made on: a pod that fails at once is removed at once, with the Job that failed.
        selector = f"{owned_selector(self._owner)},{sandbox_selector(order.sandbox_id)}"
        items, version = self._api.list_all(RESOURCES["pod"], ref.namespace, selector)
        if items:
            raise SandboxConflictError(f"there is a sandbox {order.sandbox_id} already")
        self._create(order, ref)
        if ref.namespace not in self._namespaces:
            self._meet(ref.namespace)
        try:
            pod = self._wait_until_ready(ref, errand, selector, version)
            errand.finish()
        except BaseException:
            self._discard(ref)
            raise
        return _place_of(ref, pod)

    def _ref(self, order: Order) -> Ref:
        template = order.template
        return Ref(template.kubernetes_kind, template.namespace or self._namespace, sandbox_name(order.sandbox_id))

    def _meet(self, namespace: str) -> None:
        """Look for sandboxes in one more namespace from now on; it is known to exist, and to be open to us."""
        self._namespaces = {*self._namespaces, namespace}
        for following in tuple(self._followings):
            following.add(namespace)

    def _create(self, order: Order, ref: Ref) -> None:
        """Create the sandbox, and before it the policy of its network."""
        owner_pod = self._owner_pod_in(ref.namespace)
        ttl_s = max(1, math.ceil(order.expires_at_s - time.time()))
        manifest = sandbox_manifest(order, self._owner, ref.namespace, ttl_s=ttl_s, owner_pod=owner_pod)
        network = network_of(order)
        try:
            if not network:
                made = self._api.create(ref.resource, ref.namespace, manifest)
            else:
                policy = policy_manifest(order, self._owner, ref.namespace, owner_pod=owner_pod)
                # Held until the sandbox is there: else the last one's end would take the policy away under it.
                with self._lock_of(ref.namespace, network):
                    with contextlib.suppress(SandboxConflictError):
                        self._api.create(POLICIES, ref.namespace, policy)
                    made = self._api.create(ref.resource, ref.namespace, manifest)
        except SandboxEngineError:
            # No answer: it may have been made.
            self._known[ref.handle] = _Known("", network)
            self._discard(ref)
            raise
        except SandboxError:
            with contextlib.suppress(SandboxError):
                self._leave_network(ref.namespace, network)
            raise
        self._known[ref.handle] = _Known(uid_of(made), network)

    def _owner_pod_in(self, namespace: str) -> tuple[str, str] | None:
        """Return our own pod if it is in that namespace: what an owner elsewhere owns is collected as garbage."""
        if self._owner_pod is None:
            return None
        if namespace not in self._has_owner_pod:
            name, uid = self._owner_pod
            there = self._api.read(RESOURCES["pod"], namespace, name)
            self._has_owner_pod[namespace] = there is not None and uid_of(there) == uid
            if not self._has_owner_pod[namespace]:
                _log.warning("sandboxes_without_owner", namespace=namespace, pod=name)
        return self._owner_pod if self._has_owner_pod[namespace] else None

    def _wait_until_ready(self, ref: Ref, errand: _Errand, selector: str, version: str) -> Json:
        """Return the pod of a sandbox once it is usable; bear with an API server that is away for a while."""
        lost_at_s: float | None = None
        errand.delay = "the cluster has made no pod for it"
        while not errand.stop.is_set:
            try:
                events = self._api.follow(RESOURCES["pod"], ref.namespace, selector, errand.stop, version)
                with contextlib.closing(events):
                    for event, pod in events:
                        lost_at_s = None
                        if event == "DELETED":
                            raise SandboxSetupError("the pod was removed before it was usable")
                        if (fault := fault_of(pod)) is not None:
                            raise fault
                        if is_ready(pod):
                            return pod
                        errand.delay, errand.is_for_room = delay_of(pod)
            except SandboxEngineError:
                now_s = time.monotonic()
                lost_at_s = now_s if lost_at_s is None else lost_at_s
                if now_s - lost_at_s >= self._patience_s:
                    raise
                version = ""
                errand.stop.wait(_BACKOFF_S)
        error_class = SandboxSpaceError if errand.is_for_room else SandboxSetupError
        raise error_class(f"not ready in time: {errand.delay}")

    # --- adopt ------------------------------------------------------------------------------------------------------

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return where a pod or Job is that a client made itself; see `base.Driver`.

        `name` is that of a pod, `NAMESPACE/NAME`, or a handle. A pod that a Job made stands for the Job.
        """
        if reclaim_url:
            raise SandboxRefusedError("Kubernetes removes its sandboxes itself: no reclaim_url is needed")
        parts = name.split("/")
        handle = {1: f"pod/{self._namespace}/{name}", 2: f"pod/{name}"}.get(len(parts), name)
        return await self._calls.call(self._adopt, Ref.parse(handle))

    def _adopt(self, ref: Ref) -> Place:
        there = self._api.read(ref.resource, ref.namespace, ref.name)
        if there is not None and ref_of(ref.kind, there) != ref:
            return self._adopt(ref_of(ref.kind, there))
        if there is None or end_of(ref.kind, there):
            raise NotFoundError(f"{ref.handle} is not there, or has ended")
        if _labels_of(there).get(SANDBOX_LABEL):
            raise SandboxRefusedError(f"{ref.handle} is a sandbox already")
        if self._owner_pod is not None and uid_of(there) == self._owner_pod[1]:
            raise SandboxRefusedError(f"{ref.handle} is what the proxy itself runs in")
        self._known[ref.handle] = _Known(uid_of(there), "", is_adopted=True)
        return _place_of(ref, self._pod_of(ref, there))

    def _pod_of(self, ref: Ref, manifest: Json) -> Json:
        """Return the pod of a sandbox, one that runs if there is any; nothing if it has none."""
        if ref.kind == "pod":
            return manifest
        pods, _ = self._api.list_all(RESOURCES["pod"], ref.namespace, f"job-name={ref.name}")
        return max(pods, key=lambda pod: bool(address_of(pod)), default={})

    # --- reclaim ----------------------------------------------------------------------------------------------------

    async def reclaim(self, handle: str) -> None:
        """Remove a sandbox; see `base.Driver`. One that a finalizer keeps counts as removed."""
        await self._calls.call(self._reclaim, Ref.parse(handle))

    def _discard(self, ref: Ref) -> None:
        """Remove what was begun, as far as the API server can be reached: it ends by itself otherwise."""
        try:
            self._reclaim(ref)
        except SandboxError as error:
            _log.warning("sandbox_not_removed", handle=ref.handle, why=str(error))

    def _reclaim(self, ref: Ref) -> None:
        known = self._known.get(ref.handle, _Known("", ""))
        if not known.uid:
            there = self._api.read(ref.resource, ref.namespace, ref.name)
            if there is not None and not is_for_us(_labels_of(there), self._owner):
                _log.warning("sandbox_is_not_ours", handle=ref.handle)
                there = None
            if there is not None:
                known = _Known(uid_of(there), known.network or network_in(there))
        if known.uid:
            self._delete(ref, known.uid)
        self._known.pop(ref.handle, None)
        self._leave_network(ref.namespace, known.network)

    def _delete(self, ref: Ref, uid: str) -> None:
        """Delete an object if it is that one, and see to it that it will go."""
        for _ in range(_ATTEMPTS_COUNT):
            if self._api.delete(ref.resource, ref.namespace, ref.name, uid):
                break
            there = self._api.read(ref.resource, ref.namespace, ref.name)
            if there is None or is_going(there):
                break
            if uid_of(there) != uid:
                _log.warning("sandbox_name_taken", handle=ref.handle)
                return
        else:
            raise SandboxEngineError(f"{ref.handle} could not be removed: the API server reports conflicts only")

    def _leave_network(self, namespace: str, network: str) -> None:
        """Remove a network's policies if nobody is left in it; nothing if it is the cluster's own."""
        if not network:
            return
        selector = owned_selector(self._owner, network)
        with self._lock_of(namespace, network):
            for resource in RESOURCES.values():
                items, _ = self._api.list_all(resource, namespace, selector)
                # A Job is gone before its pod is: that pod is on its way.
                if any(not is_going(each) and controller_of(each) is None for each in items):
                    return
            for policy in self._api.list_all(POLICIES, namespace, selector)[0]:
                self._api.delete(POLICIES, namespace, policy["metadata"]["name"], uid_of(policy))

    def _lock_of(self, namespace: str, network: str) -> threading.Lock:
        return self._network_locks[zlib.crc32(f"{namespace}/{network}".encode()) % _LOCKS_COUNT]

    # --- find, sweep, measure ---------------------------------------------------------------------------------------

    async def find(self) -> Sequence[Found]:
        """Return what is there; see `base.Driver`. What is being removed is not there any more."""
        return await self._calls.call(self._find)

    def _find(self) -> list[Found]:
        before = dict(self._known)
        found: list[Found] = []
        for namespace in sorted(self._namespaces):
            found += self._find_in(namespace)
        found += self._find_adopted({each.handle for each in found})
        self._forget(before, {each.handle for each in found})
        return found

    def _find_in(self, namespace: str) -> Iterator[Found]:
        # The pods first: a Job made in the meantime is then there without its pod, and not the other way round.
        pods: dict[str, Json] = {}
        for pod in self._api.list_all(RESOURCES["pod"], namespace, LABELLED_SELECTOR)[0]:
            handle = ref_of("pod", pod).handle
            if not is_going(pod) and (handle not in pods or address_of(pod)):
                pods[handle] = pod
        for each in self._api.list_all(RESOURCES["job"], namespace, LABELLED_SELECTOR)[0]:
            ref = ref_of("job", each)
            pod = pods.pop(ref.handle, {})
            if not is_going(each) and is_for_us(truth(each), self._owner):
                self._known[ref.handle] = _Known(uid_of(each), network_in(each))
                yield _found_of(ref, truth(each), pod, is_ended=bool(end_of("job", each)))
        for pod in pods.values():
            ref, labels, controller = ref_of("pod", pod), truth(pod), controller_of(pod)
            found = _found_of(ref, labels, pod)
            # A pod of ours without its Job is about to be removed by the cluster.
            if is_for_us(labels, self._owner) and (controller is None or found.is_given):
                self._known[ref.handle] = _Known(controller[1] if controller else uid_of(pod), network_in(pod))
                yield found

    def _find_adopted(self, handles: set[str]) -> Iterator[Found]:
        """Look for what was adopted and bears no label, besides these."""
        for handle, known in tuple(self._known.items()):
            if known.is_adopted and handle not in handles:
                ref = Ref.parse(handle)
                there = self._api.read(ref.resource, ref.namespace, ref.name)
                if there is not None and uid_of(there) == known.uid and not is_going(there):
                    is_ended = bool(end_of(ref.kind, there))
                    yield _found_of(ref, truth(there), self._pod_of(ref, there), is_ended=is_ended)

    def _forget(self, before: Mapping[str, _Known], handles: set[str]) -> None:
        """Forget what ended by itself, and leave its network."""
        for handle, known in before.items():
            if handle not in handles and self._known.get(handle) is known:
                del self._known[handle]
                with contextlib.suppress(SandboxError):  # the next sweep sees to it
                    self._leave_network(Ref.parse(handle).namespace, known.network)

    async def sweep(self) -> None:
        """Remove network policies that no sandbox is left for; see `base.Driver`."""
        await self._calls.call(self._sweep)

    def _sweep(self) -> None:
        for namespace in sorted(self._namespaces):
            policies, _ = self._api.list_all(POLICIES, namespace, owned_selector(self._owner))
            for network in {network_in(policy) for policy in policies}:
                self._leave_network(namespace, network)

    async def measure(self, handles: Sequence[str]) -> Usage:
        """Return the memory that sandboxes take, if the cluster has a metrics server; it tells nothing of disks."""
        if not handles or time.monotonic() < self._no_metrics_until_s:
            return Usage()
        return Usage(memory_bytes=await self._calls.call(self._memory_of, {Ref.parse(each) for each in handles}))

    def _memory_of(self, refs: set[Ref]) -> dict[str, int]:
        memory_bytes: dict[str, int] = {}
        for namespace in {ref.namespace for ref in refs}:
            metrics = self._api.list_metrics(namespace, LABELLED_SELECTOR)
            if metrics is None:
                self._no_metrics_until_s = time.monotonic() + _NO_METRICS_S
                _log.info("sandbox_metrics_not_available", namespace=namespace)
                return {}
            pods, _ = self._api.list_all(RESOURCES["pod"], namespace, LABELLED_SELECTOR)
            refs_of_pods = {pod["metadata"]["name"]: ref_of("pod", pod) for pod in pods}
            for item in metrics:
                ref = refs_of_pods.get(item["metadata"]["name"])
                if ref in refs:
                    taken = sum(parse_quantity(each["usage"]["memory"]) for each in item.get("containers") or ())
                    memory_bytes[ref.handle] = memory_bytes.get(ref.handle, 0) + int(taken)
        return memory_bytes

    # --- watch ------------------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncGenerator[Change, None]:
        """Yield what happens from now on; see `base.Driver`. What is there already is not told: `find` tells it."""
        following = _Following(self._api, self._owner)
        self._followings.add(following)
        try:
            for namespace in self._namespaces:
                following.add(namespace)
            while True:
                yield await following.next_change()
        finally:
            self._followings.discard(following)
            following.stop()

    async def close(self) -> None:
        """Let go of connections and threads; preparations that run fail, and remove what they began."""
        self._is_closed = True
        for errand in tuple(self._errands):
            errand.stop.set()
        for following in tuple(self._followings):
            following.stop()
        self._preparing.close()
        self._calls.close()
        self._api.close()


@dataclass(frozen=True, slots=True)
class _Known:
    """What was learnt of a sandbox, to save a request. `uid` is empty if it is not known."""

    uid: str
    network: str
    # It bears no label: that it is ours to remove stands only here.
    is_adopted: bool = False


# --- places -----------------------------------------------------------------------------------------------------------


def _place_of(ref: Ref, pod: Json) -> Place:
    address = address_of(pod)
    ports = {port: (address, port) for port in ports_of(pod)} if address else {}
    details = {"namespace": ref.namespace}
    if pod:
        details["pod"] = pod["metadata"]["name"]
    return Place(handle=ref.handle, address=address, ports=ports, details=details)


def _found_of(ref: Ref, labels: Mapping[str, str], pod: Json, *, is_ended: bool = False) -> Found:
    place = _place_of(ref, pod)
    return Found(handle=ref.handle, labels=labels, running=bool(place.address) and not is_ended, place=place)


def _labels_of(manifest: Json) -> dict[str, str]:
    """Return the labels of an object, or else those of the pods that it makes."""
    template = (manifest.get("spec") or {}).get("template") or {}
    return truth(manifest) or truth(template)


# --- what happens -----------------------------------------------------------------------------------------------------


class _Following:
    """Follows labelled objects in threads, one for each namespace and kind, and says what that means on the loop."""

    def __init__(self, api: _Api, owner: Owner) -> None:
        self._api = api
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[tuple[str, str, Json] | Exception] = asyncio.Queue()
        self._namespaces: set[str] = set()
        self._stops: list[_Stop] = []
        self._is_stopped = False
        self._lock = threading.Lock()
        # What has not ended, with the uid of its object; and which of these were told by the object itself.
        self._alive: dict[str, tuple[Found, str]] = {}
        self._told: set[str] = set()
        # Of those the uids of the last that ended: their pods may be heard of a little longer.
        self._over: deque[str] = deque(maxlen=1000)
        # What ended without a word why, with its uid: kept back until then for a better word.
        self._unexplained: dict[str, tuple[float, str, Change]] = {}
        self._changes: deque[Change] = deque()

    def add(self, namespace: str) -> None:
        """Follow one more namespace; from any thread."""
        with self._lock:
            if self._is_stopped or namespace in self._namespaces:
                return
            self._namespaces.add(namespace)
            for kind in RESOURCES:
                stop = _Stop()
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
        """Return what happened next; raise `SandboxError` if the API server is lost."""
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

    def _follow(self, namespace: str, kind: str, stop: _Stop) -> None:
        try:
            for event, manifest in self._api.follow(RESOURCES[kind], namespace, LABELLED_SELECTOR, stop):
                self._put((kind, event, manifest))
        except Exception as error:
            self._put(error)

    def _put(self, heard: tuple[str, str, Json] | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._heard.put_nowait, heard)

    def _take(self, kind: str, event: str, manifest: Json) -> None:
        """Take in an event: each sandbox appears once, and ends once."""
        ref = ref_of(kind, manifest)
        controller = controller_of(manifest) if ref.kind != kind else None
        uid = controller[1] if controller is not None else uid_of(manifest)
        why = end_of(kind, manifest) or ("removed" if event == "DELETED" else "")
        if why:
            self._ended(ref.handle, uid, why, is_part=controller is not None)
            return
        found = _found_of(ref, truth(manifest), manifest if kind == "pod" else {})
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
        """Tell that a sandbox ended.

        A Job and its pod are heard of in any order, and often only one of them knows why it ended: the pod that it
        failed, or the Job that its time was over. What only says that it is gone waits a moment for the other.
        """
        # When a Job fails or completes, a pod of it has said more; when a pod is removed, its Job may know why.
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
            return  # one pod of a Job that was given to us may be followed by another: the Job tells when it ends
        del self._alive[handle]
        if handle in self._told:
            self._told.remove(handle)
            self._over.append(uid)
        change = Change(found, ended=True, why=why)
        if is_vague:
            self._unexplained[handle] = self._loop.time() + _EXPLANATION_LIMIT_S, uid, change
        else:
            self._changes.append(change)

    def _tell_due(self) -> None:
        """Tell what ended and will not be explained any more."""
        now_s = self._loop.time()
        for handle, (due_at_s, _, change) in list(self._unexplained.items()):
            if due_at_s <= now_s:
                del self._unexplained[handle]
                self._changes.append(change)

    def _uid_of(self, handle: str) -> str:
        """Return the uid of the object that a handle was last known to be; empty if it ended, or is not known."""
        if handle in self._alive:
            return self._alive[handle][1]
        return self._unexplained[handle][1] if handle in self._unexplained else ""


# --- one preparation --------------------------------------------------------------------------------------------------


class _Stop:
    """Tells a thread to leave, even while it waits for what the API server says next."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._response: urllib3.HTTPResponse | None = None

    @property
    def is_set(self) -> bool:
        """Say whether the thread should leave."""
        return self._event.is_set()

    def set(self) -> None:
        """Have the thread leave; from any thread, at once."""
        with self._lock:
            self._event.set()
            if self._response is not None:
                _shut(self._response)

    def wait(self, limit_s: float) -> None:
        """Wait, but not if it should leave."""
        self._event.wait(limit_s)

    @contextlib.contextmanager
    def reading(self, response: urllib3.HTTPResponse) -> Iterator[None]:
        """Read a response that `set` breaks off."""
        with self._lock:
            self._response = response
            if self._event.is_set():
                _shut(response)
        try:
            yield
        finally:
            with self._lock:
                self._response = None


def _shut(response: urllib3.HTTPResponse) -> None:
    with contextlib.suppress(OSError, ValueError):  # it is over already
        response.shutdown()


class _Stage(enum.Enum):
    WAITING = enum.auto()
    BEGUN = enum.auto()
    DONE = enum.auto()
    GIVEN_UP = enum.auto()


class _Errand:
    """One preparation, between the coroutine that wants it and the thread that does it."""

    def __init__(self) -> None:
        self.stop = _Stop()
        # What is waited for, and whether that is room in the cluster; written by the thread, read when it is over.
        self.delay = "too many others are being prepared"
        self.is_for_room = False
        self._stage = _Stage.WAITING
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin. Raises `SandboxSetupError` if it is not wanted any more."""
        self._step(_Stage.WAITING, _Stage.BEGUN)

    def finish(self) -> None:
        """Hand over what was made. Raises `SandboxSetupError` if nobody wants it: then it is the thread's to remove."""
        self._step(_Stage.BEGUN, _Stage.DONE)

    def give_up(self) -> _Stage:
        """Want it no longer; return how far it was. What was done by then is the caller's to remove."""
        with self._lock:
            before, self._stage = self._stage, _Stage.GIVEN_UP
        self.stop.set()
        return before

    def _step(self, before: _Stage, after: _Stage) -> None:
        with self._lock:
            if self._stage is not before:
                raise SandboxSetupError("nobody waits for it any more")
            self._stage = after


def _be_heard(working: asyncio.Future[Place]) -> None:
    """Take note of how a preparation ended that nobody waits for, so that asyncio does not complain."""
    if not working.cancelled():
        working.exception()


# --- the API ----------------------------------------------------------------------------------------------------------


class _GoneError(Exception):
    """The server no longer knows that version (410)."""


class _Api:
    """The few requests that are needed, in plain JSON. All of them wait; all raise `SandboxError`, and nothing else."""

    def __init__(
        self, *, kubeconfig: Path | None, api_url: str, timeout_s: float, connections_count: int, page_items_count: int
    ) -> None:
        self._kubeconfig = kubeconfig
        self._api_url = api_url
        self._timeout_s = timeout_s
        self._connections_count = connections_count
        self._page_items_count = page_items_count
        self._client: Any = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close connections that nobody uses; the others close with their requests."""
        with self._lock:
            if self._client is not None:
                self._client.rest_client.pool_manager.clear()

    def create(self, resource: Resource, namespace: str, manifest: Json) -> Json:
        """Create an object and return it. Raises `SandboxConflictError` if its name is taken."""
        for left in reversed(range(_ATTEMPTS_COUNT)):
            try:
                return self._request("create", resource, namespace, body=manifest)
            except client.ApiException as error:
                # Two that count against one quota at the same moment: the server says to try again.
                if left and error.status == 409 and _status_of(error).get("reason") == "Conflict":
                    continue
                raise _mapped(error, "create", resource) from error
        raise AssertionError("the last attempt returns or raises")

    def read(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Return an object, or nothing if there is none."""
        try:
            return self._request("get", resource, namespace, name)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise _mapped(error, "get", resource) from error

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        """Delete an object if its uid is that one, with all that it made; say whether it is going or gone."""
        # How long it may take to stop is in the pod's own specification.
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            answer = self._request("delete", resource, namespace, name, body=options)
        except client.ApiException as error:
            if error.status == 409:
                return False
            if error.status == 404:
                return True
            raise _mapped(error, "delete", resource) from error
        if finalizers := (answer.get("metadata") or {}).get("finalizers"):
            _log.warning(
                "sandbox_kept_by_finalizers", resource=resource.plural, name=name, finalizers=sorted(finalizers)
            )
        return True

    def list_all(self, resource: Resource, namespace: str, selector: str) -> tuple[list[Json], str]:
        """Return all objects that a label selector selects, and the version that this list is of."""
        try:
            for _ in range(_ATTEMPTS_COUNT):
                with contextlib.suppress(_GoneError):
                    return self._pages(resource, namespace, selector)
        except client.ApiException as error:
            raise _mapped(error, "list", resource) from error
        raise SandboxEngineError(f"the list of {resource.plural} expires before it is read")

    def list_metrics(self, namespace: str, selector: str) -> list[Json] | None:
        """Return what pods take, or nothing if the cluster does not tell, or not us."""
        query = [("labelSelector", selector)]
        try:
            items: list[Json] = self._request("list", POD_METRICS, namespace, query=query).get("items") or []
        except client.ApiException as error:
            if error.status in {403, 404, 503}:
                return None
            raise _mapped(error, "list", POD_METRICS) from error
        return items

    def follow(
        self, resource: Resource, namespace: str, selector: str, stop: _Stop, since: str = ""
    ) -> Generator[tuple[str, Json], None, None]:
        """Yield what is there as LISTED, then what is ADDED, MODIFIED or DELETED, until told to stop.

        `since` is the version of a list that was empty: what happened after it is told, and no list is made.
        Raises `SandboxError` when the server is lost: what happens from then on must be found out by a new list.
        """
        known: dict[str, Json] | None = {} if since else None
        version = since
        while not stop.is_set:
            if not version:
                items, version = self.list_all(resource, namespace, selector)
                now = {uid_of(item): item for item in items}
                if known is None:
                    yield from (("LISTED", item) for item in items)
                else:
                    yield from _differences(known, now)
                known = now
            assert known is not None
            try:
                for event, manifest in self._changes(resource, namespace, selector, version, stop):
                    if event == "DELETED":
                        known.pop(uid_of(manifest), None)
                    else:
                        known[uid_of(manifest)] = manifest
                    yield event, manifest
            except _GoneError:
                _log.info("kubernetes_watch_expired", resource=resource.plural, namespace=namespace)
                version = ""

    def _changes(
        self, resource: Resource, namespace: str, selector: str, version: str, stop: _Stop
    ) -> Iterator[tuple[str, Json]]:
        """Yield changes from a version on, stream after stream. Raises `_GoneError` if the version is too old."""
        while not stop.is_set:
            begun_at_s = time.monotonic()
            for event in self._stream(resource, namespace, selector, version, stop):
                if event["type"] == "ERROR":
                    status = event["object"]
                    if status.get("code") == 410:
                        raise _GoneError
                    raise SandboxEngineError(f"the watch of {resource.plural} failed: {status.get('message')}")
                version = version_of(event["object"]) or version
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["object"]
            if time.monotonic() - begun_at_s < _BACKOFF_S:
                stop.wait(_BACKOFF_S)

    def _stream(
        self, resource: Resource, namespace: str, selector: str, version: str, stop: _Stop
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of one stream, until it ends or breaks."""
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("labelSelector", selector),
            ("resourceVersion", version),
            ("timeoutSeconds", str(_WATCH_S)),
        ]
        try:
            response = self._send("watch", resource, namespace, query=query, is_stream=True)
        except client.ApiException as error:
            if error.status == 410:
                raise _GoneError from error
            raise _mapped(error, "watch", resource) from error
        try:
            with stop.reading(response):
                for line in _lines(response):
                    if stop.is_set:
                        return
                    yield json.loads(line)
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            if isinstance(error, AttributeError) and not stop.is_set:
                raise  # only a TLS socket that is shut down while it is read from looks like that
            if not stop.is_set:
                _log.info("kubernetes_watch_broken", resource=resource.plural, namespace=namespace, why=repr(error))
        finally:
            response.close()

    def _pages(self, resource: Resource, namespace: str, selector: str) -> tuple[list[Json], str]:
        items: list[Json] = []
        query = [("labelSelector", selector), ("limit", str(self._page_items_count))]
        more = ""
        while True:
            try:
                page = self._request("list", resource, namespace, query=[*query, ("continue", more)] if more else query)
            except client.ApiException as error:
                if error.status == 410:
                    raise _GoneError from error
                raise
            items += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return items, version_of(page)

    def _request(
        self,
        verb: str,
        resource: Resource,
        namespace: str,
        name: str = "",
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Json | None = None,
    ) -> Json:
        """Send a request and return the answer. Raises as `_send` does."""
        answer = self._send(verb, resource, namespace, name, query=query, body=body)
        if not isinstance(answer, dict):
            raise SandboxEngineError("what answers in place of the Kubernetes API does not speak its language")
        return answer

    def _send(
        self,
        verb: str,
        resource: Resource,
        namespace: str,
        name: str = "",
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Json | None = None,
        is_stream: bool = False,
    ) -> Any:
        """Send a request. Raises `client.ApiException` for an answer that is an error, else `SandboxEngineError`."""
        read_timeout_s = self._timeout_s + (_WATCH_S if is_stream else 0)
        try:
            return self._connected().call_api(
                resource.path(namespace, name),
                {"create": "POST", "delete": "DELETE"}.get(verb, "GET"),
                query_params=list(query),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                response_type="object",
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=not is_stream,
                _request_timeout=(self._timeout_s, read_timeout_s),
            )
        except client.ApiException as error:
            if error.status:
                raise
            raise SandboxEngineError(f"the Kubernetes API cannot be used: {error.reason}") from error
        except (urllib3.exceptions.HTTPError, OSError, UnicodeDecodeError) as error:
            raise SandboxEngineError(f"the Kubernetes API does not answer: {error}") from error
        except config.ConfigException as error:
            raise SandboxEngineError(f"no usable configuration for Kubernetes: {error}") from error

    def _connected(self) -> Any:
        """Return the client, and configure it first if that has not succeeded yet."""
        with self._lock:
            if self._client is None:
                self._client = client.ApiClient(self._configuration())
            return self._client

    def _configuration(self) -> Any:
        configuration = client.Configuration()
        if self._api_url:
            configuration.host = self._api_url
            configuration.proxy = None
        elif self._kubeconfig is not None:
            config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
        else:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                config.load_kube_config(client_configuration=configuration)
        configuration.connection_pool_maxsize = self._connections_count
        # Once more for a connection that had been closed by the other side; never a second POST.
        configuration.retries = urllib3.Retry(
            1, status=0, redirect=0, allowed_methods={"GET", "DELETE"}, respect_retry_after_header=False
        )
        return configuration


def _lines(response: urllib3.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a body as they come; what is left of one that broke off is nothing."""
    rest = b""
    for data in response.stream(amt=None):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line for line in lines if line.strip())


def _differences(before: Mapping[str, Json], now: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Yield what must have happened between two lists, by uid; what is gone first, for its name may be taken."""
    yield from (("DELETED", manifest) for uid, manifest in before.items() if uid not in now)
    for uid, manifest in now.items():
        if uid not in before:
            yield "ADDED", manifest
        elif version_of(before[uid]) != version_of(manifest):
            yield "MODIFIED", manifest


def _status_of(error: client.ApiException) -> Json:
    """Return what the server says of an error."""
    try:
        status = json.loads(error.body or b"")
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}


def _mapped(error: client.ApiException, verb: str, resource: Resource) -> SandboxError:
    """Return our error for one of the API server's."""
    status = _status_of(error)
    message = str(status.get("message") or error.reason or "no reason given")
    code = int(error.status)
    if code == 403:
        if "exceeded quota" in message:
            return SandboxSpaceError(message)
        return SandboxRefusedError(f"we lack the right to {verb} {resource.plural}: {message}")
    if code == 409 and status.get("reason") == "AlreadyExists":
        return SandboxConflictError(message)
    if code in {401, 408, 409, 429} or code >= 500:
        return SandboxEngineError(f"the Kubernetes API answered {code}: {message}")
    return SandboxRefusedError(f"Kubernetes refused to {verb} {resource.plural}: {message}")
