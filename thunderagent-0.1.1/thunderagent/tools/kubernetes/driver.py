"""The Kubernetes driver: sandboxes that are Jobs or pods, made, watched and removed through the API server.

Theory of operation
===================
The official client blocks, so all of its calls run in threads. One thread does everything for one preparation, from the
manifest to the ready pod. It alone knows what it began, and removes it when it fails, when the time is over or when the
caller is gone, even if the caller left while the API server had not answered yet.

An object is removed only if it has the expected uid: a name may have been reused since. Objects with neither our owner
nor the label of a program are never touched.

`manifests.py` says what the manifests contain, and why no help is needed once they are submitted; `watch.py` follows
changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from kubernetes.utils.quantity import parse_quantity

from thunderagent.errors import (
    NotFoundError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSetupError,
)
from thunderagent.tools.base import SANDBOX_LABEL, Change, Found, Order, Owner, Place, Usage
from thunderagent.tools.kubernetes.api import Api
from thunderagent.tools.kubernetes.manifests import policy_manifest, rehearsal_manifest, sandbox_manifest
from thunderagent.tools.kubernetes.networks import Networks
from thunderagent.tools.kubernetes.objects import (
    LABELLED_SELECTOR,
    RESOURCES,
    Json,
    Ref,
    controller_of,
    is_for_us,
    is_going,
    network_in,
    network_of,
    owned_selector,
    ref_of,
    sandbox_name,
    sandbox_selector,
    truth,
    uid_of,
)
from thunderagent.tools.kubernetes.prepare import Errand, Stage, rehearse, wait_until_ready
from thunderagent.tools.kubernetes.state import address_of, end_of, found_of, place_of
from thunderagent.tools.kubernetes.watch import Following
from thunderagent.tools.threads import Threads

_log = structlog.get_logger(__name__)

# How long a cancelled caller waits for what was begun to be removed. It is removed all the same.
_CANCEL_LIMIT_S = 5.0
# How long it is remembered that the cluster does not report pods' resource use.
_NO_METRICS_S = 300.0
_ATTEMPTS_COUNT = 3
# A Job's pod appears in well under a second: one that has not by then may be refused.
_POD_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Known:
    """Known facts of a sandbox, to save a request. `uid` is empty if unknown."""

    uid: str
    network: str
    # It has no label: only this says that we may remove it.
    is_adopted: bool = False


class KubernetesDriver:
    """Makes sandboxes in a cluster. Implements `base.Driver`."""

    kind = "kubernetes"

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
        backoff_s: float = 0.5,
        owner_pod: tuple[str, str] | None = None,
        page_items_count: int = 500,
    ) -> None:
        """Connect to nothing yet.

        `namespace` is for templates that name none; `namespaces` are others to look for sandboxes in. Without
        `kubeconfig` the pod that we run in says where the API is, or otherwise the user's own configuration.
        `owner_pod`, name and uid of that pod, lets the cluster remove what we made in its namespace when the pod is
        deleted; in others it owns nothing. `concurrency_count` is how many are prepared at once. `backoff_s` is the
        time between two attempts if the server answers at once, but not with what was requested; the end of a sandbox
        is reported this much later, in case a better reason for it comes.
        """
        self._owner = owner
        self._namespace = namespace
        self._namespaces = {namespace, *namespaces}
        self._owner_pod = owner_pod
        self._has_owner_pod: dict[str, bool] = {}
        self._patience_s = request_timeout_s
        self._api = Api(
            kubeconfig=kubeconfig,
            api_url=api_url,
            timeout_s=request_timeout_s,
            backoff_s=backoff_s,
            connections_count=2 * concurrency_count + 8,
            page_items_count=page_items_count,
        )
        # Preparations wait for minutes: they must not block removals.
        self._preparing = Threads("kubernetes-prepare", concurrency_count)
        self._calls = Threads("kubernetes", concurrency_count)
        self._known: dict[str, _Known] = {}
        self._networks = Networks(self._api, owner)
        self._errands: set[Errand] = set()
        self._followings: set[Following] = set()
        self._no_metrics_until_s = -math.inf
        self._is_version_checked = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<KubernetesDriver in {', '.join(sorted(self._namespaces))}, {len(self._errands)} in preparation>"

    # --- prepare ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Do nothing: it connects on demand."""

    async def prepare(self, order: Order) -> Place:
        """Make a sandbox and return once it is usable; see `base.Driver`.

        Fails by itself shortly before the template's timeout, to be able to say what it waited for.
        """
        errand = Errand()
        timeout_s = order.template.prepare_timeout_s
        late = asyncio.get_running_loop().call_later(max(0.9 * timeout_s, timeout_s - 2.0), errand.stop.set)
        # Not cancelled with us: the thread must finish, so that what it began is removed.
        working = asyncio.ensure_future(self._preparing.call(self._prepare, order, errand))
        working.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._errands.add(errand)
        asking = asyncio.create_task(self._ask_for_pod(order, errand))
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
            asking.cancel()
            self._errands.discard(errand)

    async def _ask_for_pod(self, order: Order, errand: Errand) -> None:
        """Fail a preparation whose Job gets no pod, with the reason."""
        if order.template.kubernetes_kind != "job":
            return
        ref = self._ref(order)

        def ask() -> Json:
            pod = rehearsal_manifest(order, self._owner, ref.namespace)
            return self._api.create(RESOURCES["pod"], ref.namespace, pod, is_rehearsal=True)

        first_s = min(_POD_LIMIT_S, order.template.prepare_timeout_s / 3)
        await rehearse(errand, lambda: self._calls.call(ask), first_s=first_s)

    async def _give_up(self, order: Order, errand: Errand, working: asyncio.Future[Place]) -> None:
        stage = errand.give_up()
        if stage is Stage.BEGUN:
            await asyncio.wait({working}, timeout=_CANCEL_LIMIT_S)
        elif stage is Stage.DONE:
            await self._calls.call(self._discard, self._ref(order))

    def _prepare(self, order: Order, errand: Errand) -> Place:
        """Do a whole preparation; in a thread."""
        errand.begin()
        if errand.stop.is_set:
            raise SandboxSetupError(f"not ready in time: {errand.delay}")
        ref = self._ref(order)
        # From before it is made on: a pod that fails at once is removed at once, with its failed Job.
        selector = f"{owned_selector(self._owner)},{sandbox_selector(order.sandbox_id)}"
        items, version = self._api.list_all(RESOURCES["pod"], ref.namespace, selector)
        if items:
            raise SandboxConflictError(f"there is a sandbox {order.sandbox_id} already")
        self._create(order, ref)
        if ref.namespace not in self._namespaces:
            self._meet(ref.namespace)
        try:
            pod = wait_until_ready(self._api, ref, errand, selector, version, patience_s=self._patience_s)
            errand.finish()
        except BaseException:
            self._discard(ref)
            raise
        return place_of(ref, pod)

    def _ref(self, order: Order) -> Ref:
        template = order.template
        return Ref(template.kubernetes_kind, template.namespace or self._namespace, sandbox_name(order.sandbox_id))

    def _meet(self, namespace: str) -> None:
        """Look for sandboxes in one more namespace from now on, which exists and is open to us."""
        self._namespaces = {*self._namespaces, namespace}
        for following in tuple(self._followings):
            following.add(namespace)

    def _create(self, order: Order, ref: Ref) -> None:
        """Create the sandbox, and before it its network policy."""
        owner_pod = self._owner_pod_in(ref.namespace)
        ttl_s = max(1, math.ceil(order.expires_at_s - time.time()))
        manifest = sandbox_manifest(order, self._owner, ref.namespace, ttl_s=ttl_s, owner_pod=owner_pod)
        network = network_of(order)
        try:
            if network:
                policy = policy_manifest(order, self._owner, ref.namespace, owner_pod=owner_pod)
                with self._networks.made(ref.namespace, network, policy):
                    made = self._api.create(ref.resource, ref.namespace, manifest)
            else:
                made = self._api.create(ref.resource, ref.namespace, manifest)
        except SandboxEngineError:
            # No answer: it may have been made.
            self._known[ref.handle] = _Known("", network)
            self._discard(ref)
            raise
        except SandboxError:
            with contextlib.suppress(SandboxError):
                self._networks.leave(ref.namespace, network)
            raise
        self._known[ref.handle] = _Known(uid_of(made), network)

    def _owner_pod_in(self, namespace: str) -> tuple[str, str] | None:
        """Return our own pod if it is in that namespace: objects with an owner elsewhere are garbage-collected."""
        if self._owner_pod is None:
            return None
        if namespace not in self._has_owner_pod:
            name, uid = self._owner_pod
            there = self._api.read(RESOURCES["pod"], namespace, name)
            self._has_owner_pod[namespace] = there is not None and uid_of(there) == uid
            if not self._has_owner_pod[namespace]:
                _log.warning("sandboxes_without_owner", namespace=namespace, pod=name)
        return self._owner_pod if self._has_owner_pod[namespace] else None

    # --- adopt ------------------------------------------------------------------------------------------------------

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return where a client's own pod or Job is; see `base.Driver`.

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
            raise SandboxRefusedError(f"{ref.handle} is the proxy's own pod")
        self._known[ref.handle] = _Known(uid_of(there), "", is_adopted=True)
        return place_of(ref, self._pod_of(ref, there))

    def _pod_of(self, ref: Ref, manifest: Json) -> Json:
        """Return the pod of a sandbox, a running one if there is any; empty if it has none."""
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
        self._networks.leave(ref.namespace, known.network)

    def _delete(self, ref: Ref, uid: str) -> None:
        """Delete an object if it has that uid, and make sure that it goes."""
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

    # --- find, sweep, measure ---------------------------------------------------------------------------------------

    async def find(self) -> Sequence[Found]:
        """Return what exists; see `base.Driver`. What is being removed does not count."""
        return await self._calls.call(self._find)

    def _find(self) -> list[Found]:
        if not self._is_version_checked and (problem := self._api.problem()):
            _log.error("kubernetes_too_old", problem=problem)
        self._is_version_checked = True
        before = dict(self._known)
        found: list[Found] = []
        for namespace in sorted(self._namespaces):
            found += self._find_in(namespace)
        found += self._find_adopted({each.handle for each in found})
        self._forget(before, {each.handle for each in found})
        return found

    def _find_in(self, namespace: str) -> Iterator[Found]:
        # The pods first: a Job made in the meantime then has no pod here, instead of a pod without its Job.
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
                yield found_of(ref, truth(each), pod, ended=bool(end_of("job", each)))
        for pod in pods.values():
            ref, labels, controller = ref_of("pod", pod), truth(pod), controller_of(pod)
            found = found_of(ref, labels, pod, ended=bool(end_of("pod", pod)))
            # The cluster is about to remove our pod without its Job.
            if is_for_us(labels, self._owner) and (controller is None or found.is_given):
                self._known[ref.handle] = _Known(controller[1] if controller else uid_of(pod), network_in(pod))
                yield found

    def _find_adopted(self, handles: set[str]) -> Iterator[Found]:
        """Find adopted objects without a label, besides these."""
        for handle, known in tuple(self._known.items()):
            if known.is_adopted and handle not in handles:
                ref = Ref.parse(handle)
                there = self._api.read(ref.resource, ref.namespace, ref.name)
                if there is not None and uid_of(there) == known.uid and not is_going(there):
                    ended = bool(end_of(ref.kind, there))
                    yield found_of(ref, truth(there), self._pod_of(ref, there), ended=ended)

    def _forget(self, before: Mapping[str, _Known], handles: set[str]) -> None:
        """Forget what ended by itself, and leave its network."""
        for handle, known in before.items():
            if handle not in handles and self._known.get(handle) is known:
                del self._known[handle]
                with contextlib.suppress(SandboxError):  # the next sweep handles it
                    self._networks.leave(Ref.parse(handle).namespace, known.network)

    async def sweep(self) -> None:
        """Remove network policies without a sandbox; see `base.Driver`."""
        for namespace in sorted(self._namespaces):
            await self._calls.call(self._networks.sweep, namespace)

    async def measure(self, handles: Sequence[str]) -> Usage:
        """Return the memory of sandboxes, if the cluster has a metrics server; it reports no disk use."""
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
        """Yield events from now on; see `base.Driver`. Existing sandboxes are not reported: `find` does that."""
        following = Following(self._api, self._owner, explanation_limit_s=self._api.backoff_s)
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
        """Close connections and threads; running preparations fail, and remove what they began."""
        self._is_closed = True
        for errand in tuple(self._errands):
            errand.stop.set()
        for following in tuple(self._followings):
            following.stop()
        self._preparing.close()
        self._calls.close()
        self._api.close()


def _labels_of(manifest: Json) -> dict[str, str]:
    """Return the labels of an object, or otherwise those of the pods that it makes."""
    template = (manifest.get("spec") or {}).get("template") or {}
    return truth(manifest) or truth(template)
