"""The driver of kubernetes-sigs/agent-sandbox: a sandbox is a SandboxClaim, which takes one from a SandboxWarmPool.

Theory of operation
===================
The pool says what is in a sandbox, so a template names the pool and little else. The claim bears our labels, and its
status says where its pod is: the controller refuses labels like ours on pods. So claims are listed and watched, and no
pod. `shutdownTime` ends a claim without our help; its end is that of its pod.

Fields are those of `extensions.agents.x-k8s.io/v1beta1`, which agent-sandbox has from 0.5 on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import structlog

from thunderagent.errors import (
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSetupError,
)
from thunderagent.tools.base import OWNER_LABEL, PROGRAM_LABEL, RUN_LABEL, Change, Found, Order, Owner, Place, Usage
from thunderagent.tools.kubernetes.api import Api, Stop
from thunderagent.tools.kubernetes.objects import (
    LABELLED_SELECTOR,
    Json,
    Ref,
    Resource,
    is_for_us,
    is_going,
    marks_of,
    sandbox_name,
    truth,
    uid_of,
)
from thunderagent.tools.kubernetes.watch import follow
from thunderagent.tools.template import Template
from thunderagent.tools.threads import Threads

_log = structlog.get_logger(__name__)

CLAIMS = Resource("SandboxClaim", "extensions.agents.x-k8s.io/v1beta1", "sandboxclaims")
_HANDLE_WORD = "claim"
_ENDED_REASONS = frozenset({"ClaimExpired", "SandboxExpired"})
# How long a cancelled caller waits for what was begun to be removed. It is removed all the same.
_CANCEL_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Watcher:
    """One watch: `start` begins with a namespace, in a thread for each that leaves at its stop."""

    start: Callable[[str], None]
    stops: list[Stop]

    def stop(self) -> None:
        for stop in self.stops:
            stop.set()


class ClaimDriver:
    """Claims sandboxes from warm pools. Implements `base.Driver`."""

    kind = "agent-sandbox"

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
    ) -> None:
        """Connect to nothing yet; the arguments are as those of `KubernetesDriver`."""
        self._owner = owner
        self._namespace = namespace
        self._namespaces = {namespace, *namespaces}
        self._api = Api(
            kubeconfig=kubeconfig,
            api_url=api_url,
            timeout_s=request_timeout_s,
            backoff_s=backoff_s,
            connections_count=2 * concurrency_count + 8,
            page_items_count=500,
        )
        self._calls = Threads("kubernetes-claims", concurrency_count)
        # The ports that a template names, by handle: a claim does not say them.
        self._ports: dict[str, tuple[int, ...]] = {}
        self._watchers: list[_Watcher] = []

    def __repr__(self) -> str:
        return f"<ClaimDriver in {', '.join(sorted(self._namespaces))}>"

    async def open(self) -> None:
        """Do nothing: it connects on demand."""

    # --- prepare ----------------------------------------------------------------------------------------------------

    async def prepare(self, order: Order) -> Place:
        """Claim a sandbox and return once it is usable; see `base.Driver`.

        Fails by itself shortly before the template's timeout, with what the claim says.
        """
        template = order.template
        ref = Ref(_HANDLE_WORD, template.namespace or self._namespace, sandbox_name(order.sandbox_id))
        manifest = claim_manifest(order, self._owner, ref.namespace)
        making = asyncio.ensure_future(self._calls.call(self._api.create, CLAIMS, ref.namespace, manifest))
        try:
            uid = uid_of(await asyncio.shield(making))
            self._meet(ref.namespace)
            self._ports[ref.handle] = template.ports
            limit_s = max(0.9 * template.prepare_timeout_s, template.prepare_timeout_s - 2.0)
            return await self._usable(ref, uid, limit_s=limit_s, pause_s=template.ready_interval_s)
        except BaseException as error:
            removing = asyncio.ensure_future(self._discard(making, ref))
            await asyncio.wait(
                {removing}, timeout=_CANCEL_LIMIT_S if isinstance(error, asyncio.CancelledError) else None
            )
            raise

    async def _usable(self, ref: Ref, uid: str, *, limit_s: float, pause_s: float) -> Place:
        give_up_s = time.monotonic() + limit_s
        delay = "the controller of agent-sandbox says nothing about the claim"
        while True:
            with contextlib.suppress(SandboxEngineError):  # it may be away for a moment
                claim = await self._calls.call(self._api.read, CLAIMS, ref.namespace, ref.name)
                if claim is None or uid_of(claim) != uid:
                    raise SandboxSetupError("the claim was removed before it was usable")
                if why := end_of_claim(claim):
                    raise SandboxSetupError(why)
                if (place := place_of_claim(ref, claim, self._ports[ref.handle])).address:
                    return place
                delay = _said(_condition(claim, "Ready")) or delay
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise SandboxSetupError(f"not ready in time: {delay}")
            await asyncio.sleep(min(pause_s, left_s))

    async def _discard(self, making: asyncio.Future[Json], ref: Ref) -> None:
        """Remove what was begun, as far as the API server can be reached: it ends by itself otherwise."""
        try:
            await making
        except SandboxEngineError:
            pass  # no answer: it may have been made
        except SandboxError:
            return
        try:
            await self.reclaim(ref.handle)
        except SandboxError as error:
            _log.warning("sandbox_not_removed", handle=ref.handle, why=str(error))

    async def adopt(self, name: str, reclaim_url: str) -> Place:  # noqa: ARG002 - see `base.Driver`
        """Refuse; a claim of somebody else is given to us by the label of its program."""
        raise SandboxRefusedError(f"label the claim {name!r} with {PROGRAM_LABEL} instead")

    # --- reclaim, find, watch ---------------------------------------------------------------------------------------

    async def reclaim(self, handle: str) -> None:
        """Remove a claim, and with it its sandbox; see `base.Driver`."""
        await self._calls.call(self._reclaim, _parse(handle))
        self._ports.pop(handle, None)

    def _reclaim(self, ref: Ref) -> None:
        there = self._api.read(CLAIMS, ref.namespace, ref.name)
        if there is None or is_going(there):
            return
        if not is_for_us(truth(there), self._owner):
            _log.warning("sandbox_is_not_ours", handle=ref.handle)
        elif not self._api.delete(CLAIMS, ref.namespace, ref.name, uid_of(there)):
            raise SandboxEngineError(f"{ref.handle} could not be removed: it was made anew meanwhile")

    async def find(self) -> Sequence[Found]:
        """Return the claims that exist; see `base.Driver`."""
        return await self._calls.call(lambda: list(self._find()))

    def _find(self) -> Iterator[Found]:
        for namespace in sorted(self._namespaces):
            for claim in self._api.list_all(CLAIMS, namespace, LABELLED_SELECTOR)[0]:
                if not is_going(claim) and is_for_us(truth(claim), self._owner):
                    yield self._found(claim)

    def _found(self, claim: Json) -> Found:
        ref = Ref(_HANDLE_WORD, claim["metadata"]["namespace"], claim["metadata"]["name"])
        place = place_of_claim(ref, claim, self._ports.get(ref.handle, ()))
        ended = bool(end_of_claim(claim))
        return Found(ref.handle, truth(claim), running=bool(place.address) and not ended, place=place, ended=ended)

    async def watch(self) -> AsyncGenerator[Change, None]:
        """Yield events from now on; see `base.Driver`."""
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Json] | Exception]()
        stops: list[Stop] = []

        def put(event: tuple[str, Json] | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(heard.put_nowait, event)

        def listen(namespace: str, stop: Stop) -> None:
            try:
                for event in follow(self._api, CLAIMS, namespace, LABELLED_SELECTOR, stop):
                    put(event)
            except Exception as error:
                put(error)

        def start(namespace: str) -> None:
            stops.append(stop := Stop())
            name = f"kubernetes-claims-{namespace}"
            Thread(target=listen, args=(namespace, stop), name=name, daemon=True).start()

        watcher = _Watcher(start, stops)
        self._watchers.append(watcher)
        alive: set[str] = set()
        try:
            for namespace in self._namespaces:
                start(namespace)
            while True:
                event = await heard.get()
                if isinstance(event, Exception):
                    raise event
                if (change := self._change(*event, alive)) is not None:
                    yield change
        finally:
            self._watchers.remove(watcher)
            watcher.stop()

    def _meet(self, namespace: str) -> None:
        """Look for claims in one more namespace from now on, which exists and is open to us."""
        if namespace not in self._namespaces:
            self._namespaces = {*self._namespaces, namespace}  # a thread may be at the old one
            for watcher in self._watchers:
                watcher.start(namespace)

    def _change(self, event: str, claim: Json, alive: set[str]) -> Change | None:
        """Return what an event means: each claim appears once, and ends once. `alive` are the uids that appeared."""
        found, uid = self._found(claim), uid_of(claim)
        if not is_for_us(found.labels, self._owner):
            return None
        why = end_of_claim(claim) or ("removed" if event == "DELETED" else "")
        if not why:
            is_new = uid not in alive and event != "LISTED"
            alive.add(uid)
            return Change(found, ended=False) if is_new else None
        if uid not in alive:
            return None
        alive.remove(uid)
        return Change(found, ended=True, why=why)

    # --- the rest ---------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Do nothing: a claim leaves nothing."""

    async def measure(self, handles: Sequence[str]) -> Usage:  # noqa: ARG002 - see `base.Driver`
        """Return nothing: the pods are the controller's."""
        return Usage()

    async def close(self) -> None:
        """Close connections and threads."""
        for watcher in self._watchers:
            watcher.stop()
        self._calls.close()
        self._api.close()


def claim_manifest(order: Order, owner: Owner, namespace: str) -> Json:
    """Return the claim for an order."""
    labels = {PROGRAM_LABEL: "", **order.labels, OWNER_LABEL: owner.owner_id, RUN_LABEL: owner.run_id}
    ends_at = datetime.fromtimestamp(math.ceil(order.expires_at_s), UTC)
    template: Template = order.template
    spec: Json = {
        "warmPoolRef": {"name": template.warm_pool},
        "lifecycle": {"shutdownTime": ends_at.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"},
    }
    if template.environment:  # with it, the controller makes a new sandbox instead of taking a warm one
        spec["env"] = [{"name": name, "value": value} for name, value in template.environment.items()]
    return {
        "apiVersion": CLAIMS.api_version,
        "kind": CLAIMS.kind,
        "metadata": {"name": sandbox_name(order.sandbox_id), "namespace": namespace, **marks_of(labels)},
        "spec": spec,
    }


def place_of_claim(ref: Ref, claim: Json, ports: Iterable[int]) -> Place:
    """Return where a claim's sandbox is; without an address until it is ready."""
    status = claim.get("status") or {}
    sandbox = status.get("sandbox") or {}
    addresses = sandbox.get("podIPs") or ()
    is_ready = _condition(claim, "Ready").get("status") == "True" and not is_going(claim)
    address = str(addresses[0]) if addresses and is_ready else ""
    details = {"namespace": ref.namespace}
    if name := sandbox.get("name"):
        details["pod"] = str(name)  # the controller gives a pod the name of its Sandbox
    return Place(ref.handle, address, {port: (address, port) for port in ports if address}, details)


def end_of_claim(claim: Json) -> str:
    """Return how a claim's sandbox ended; empty if it has not."""
    if is_going(claim):
        return "removed"
    finished, ready = _condition(claim, "Finished"), _condition(claim, "Ready")
    if finished.get("status") == "True":
        return _said(finished) or "finished"
    return _said(ready) if ready.get("status") == "False" and ready.get("reason") in _ENDED_REASONS else ""


def _condition(claim: Json, name: str) -> Mapping[str, object]:
    conditions = (claim.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == name), {})


def _said(condition: Mapping[str, object]) -> str:
    return ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))


def _parse(handle: str) -> Ref:
    parts = handle.split("/")
    if len(parts) != 3 or parts[0] != _HANDLE_WORD:
        raise SandboxRefusedError(f"{handle!r} is not a handle of a claim, as {_HANDLE_WORD}/default/NAME is")
    return Ref(*parts)
