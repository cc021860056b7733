"""A fake Kubernetes API server: pods, Jobs, Leases, network policies with real semantics, and a cluster.

It runs on the test's event loop and has no clock: what takes time in a cluster happens when a test calls `pass_time`.
A pod's behaviour follows from its image, see `Behaviour`. HTTP clients need the rights given to them; the test itself
reads and acts through the methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import re
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import yaml
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Json = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource, verb."""

RESOURCES = {
    "pods": ("", "v1", "Pod"),
    "jobs": ("batch", "batch/v1", "Job"),
    "leases": ("coordination.k8s.io", "coordination.k8s.io/v1", "Lease"),
    "sandboxclaims": ("extensions.agents.x-k8s.io", "extensions.agents.x-k8s.io/v1beta1", "SandboxClaim"),
    "networkpolicies": ("networking.k8s.io", "networking.k8s.io/v1", "NetworkPolicy"),
}
METRICS = "metrics.k8s.io"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class ApiError(Exception):
    """An error answer."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status: Json = {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


def rights_of(manifest: Path) -> set[Right]:
    """Return the rights of a file's Role."""
    roles = [each for each in yaml.safe_load_all(manifest.read_text()) if each["kind"] == "Role"]
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def expand(text: str, environment: dict[str, str] | None = None) -> str:
    """Replace $(NAME) and $$ as Kubernetes does in commands, probes and values."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else (environment or {}).get(name, match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


@dataclass
class Behaviour:
    """The behaviour of an image's pods."""

    has_image: bool = True
    has_room: bool = True
    is_root: bool = False
    """Whether its image runs as root."""
    is_ready: bool = True
    """Whether probes succeed; a pod without probes is ready as soon as it runs."""
    outcome: str = "run"
    """run, complete, crash or evict."""
    message: str = ""
    stops_at_once: bool = True
    """Whether it ends on request, or only at the end of its grace period."""


@dataclass(frozen=True)
class Event:
    """One entry of the history; `before` is the object's last state."""

    version: int
    kind: str
    plural: str
    namespace: str
    manifest: Json
    before: Json | None


class Watcher:
    """One open watch."""

    def __init__(self, plural: str, namespace: str, labels: str, fields: str, request: web.Request) -> None:
        self.plural = plural
        self.namespace = namespace
        self.labels = labels
        self.fields = fields
        self.request = request
        self.queue: asyncio.Queue[Json | None] = asyncio.Queue()

    def take(self, event: Event) -> None:
        """Send an event, if the watch's selectors select it."""
        if (event.plural, event.namespace) != (self.plural, self.namespace):
            return
        is_seen = event.kind != "DELETED" and selects(event.manifest, self.labels, self.fields)
        was_seen = event.before is not None and selects(event.before, self.labels, self.fields)
        if is_seen or was_seen:
            kind = "DELETED" if not is_seen else "MODIFIED" if was_seen else "ADDED"
            self.queue.put_nowait({"type": kind, "object": event.manifest})


class KubernetesApi:
    """The server, and the cluster behind it."""

    def __init__(self, rights: Iterable[Right] | None = None) -> None:
        self.rights = None if rights is None else set(rights)
        self.requests: Counter[Right] = Counter()
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.images: dict[str, Behaviour] = {}
        self.quota: dict[str, int] = {}
        """Quota of each resource."""
        self.version = (1, 36)
        """The reported version, which also decides how Jobs end."""
        self.has_loaded_rights = True
        """Whether RBAC is loaded: until then, after a restart, all requests are refused."""
        self.pod_security = "privileged"
        """The Pod Security Standard that namespaces enforce: privileged or restricted."""
        self.second_s = 1.0
        """Duration of a second of `timeoutSeconds`."""
        self.makes_pods = True
        """Whether the Job controller can create its pods."""
        self.collects_garbage = True
        """Whether objects without their owner are removed."""
        self.metrics: dict[str, str] | None = None
        """Memory of pods by name; None is a cluster without a metrics server."""
        self.errors: dict[Right, list[ApiError]] = {}
        """The next answers."""
        self.held: dict[Right, asyncio.Event] = {}
        """Requests that are executed at once, but answered only when the event is set."""
        self.says_gone_in_stream = False
        """Whether a too old version is reported as an event in the stream, or as an HTTP status."""
        self.sizes: dict[tuple[str, str, str], int] = {}
        """The desired number of pods of each Deployment and StatefulSet, by namespace, plural and name."""
        self.on_scale: Callable[[int, int], None] = lambda before, after: None
        self.watchers: set[Watcher] = set()
        self.now_s = 0.0
        self._version = 100
        self._oldest_version = 100
        self._history: list[Event] = []
        self._pages: dict[str, tuple[list[Json], int]] = {}
        self._uids = itertools.count(1)
        self._addresses = itertools.count(1)
        self._times_s: dict[tuple[str, str], float] = {}
        self._is_reconciling = False
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen, on the same port every time."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0, access_log=None)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        """Break all connections, and refuse new ones until the next start."""
        if self._runner is not None:
            self.drop_watches()
            await self._runner.cleanup()
            self._runner = None

    # --- what a test sees and does ------------------------------------------------------------------------------------

    def get(self, plural: str, name: str, namespace: str = "default") -> Json:
        return self._existing(plural, namespace, name)

    def has(self, plural: str, name: str, namespace: str = "default") -> bool:
        return (plural, namespace, name) in self.objects

    def all_of(self, plural: str, labels: str = "", namespace: str | None = None) -> list[Json]:
        return [
            manifest
            for (each, where, _), manifest in sorted(self.objects.items())
            if each == plural and namespace in {None, where} and selects(manifest, labels)
        ]

    def create(self, plural: str, manifest: Json, namespace: str = "default", *, is_rehearsal: bool = False) -> Json:
        """Create an object; raise `ApiError` if it exists or is invalid. A dry run stores nothing."""
        _, api_version, kind = RESOURCES[plural]
        manifest = copy.deepcopy({**manifest, "apiVersion": api_version, "kind": kind})
        metadata = manifest.setdefault("metadata", {})
        if "name" not in metadata and "generateName" in metadata:
            metadata["name"] = f"{metadata['generateName']}{next(self._uids):05}"
        validate(manifest)
        name = metadata["name"]
        key = (plural, namespace, name)
        if key in self.objects:
            raise ApiError(409, "AlreadyExists", f'{plural} "{name}" already exists')
        most = self.quota.get(plural)
        if most is not None and len(self.all_of(plural)) >= most:
            counted = f"count/{plural}"
            message = f"exceeded quota: q, requested: {counted}=1, used: {counted}={most}, limited: {counted}={most}"
            raise ApiError(403, "Forbidden", f'{plural} "{name}" is forbidden: {message}')
        if plural == "pods" and self.pod_security == "restricted" and (violations := list(_violations(manifest))):
            message = f'violates PodSecurity "restricted:latest": {", ".join(violations)}'
            raise ApiError(403, "Forbidden", f'pods "{name}" is forbidden: {message}')
        if is_rehearsal:
            return manifest
        metadata.update(namespace=namespace, uid=f"uid-{next(self._uids)}", creationTimestamp=_timestamp())
        manifest["status"] = {"phase": "Pending"} if plural == "pods" else {}
        self._store("ADDED", plural, manifest)
        return manifest

    def update(self, plural: str, manifest: Json, namespace: str = "default") -> Json:
        """Replace an object, if it still has the version that the new one names."""
        metadata = manifest["metadata"]
        before = self._existing(plural, namespace, metadata["name"])
        version = metadata.get("resourceVersion")
        if version is not None and version != before["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f'{plural} "{metadata["name"]}": the object has been modified')
        kept = {key: before["metadata"][key] for key in ("uid", "namespace", "creationTimestamp")}
        if "deletionTimestamp" in before["metadata"]:
            kept["deletionTimestamp"] = before["metadata"]["deletionTimestamp"]
        after = {**copy.deepcopy(manifest), "metadata": {**copy.deepcopy(metadata), **kept}}
        if plural == "leases":
            validate(after)
        self._store("MODIFIED", plural, after)
        if "deletionTimestamp" in kept and not after["metadata"].get("finalizers"):
            self._remove(plural, after)
        return after

    def patch(self, plural: str, name: str, patch: Json, namespace: str = "default") -> Json:
        """Merge a patch into an object."""
        return self.update(plural, merged(self._existing(plural, namespace, name), patch), namespace)

    def delete(self, plural: str, name: str, options: Json | None = None, namespace: str = "default") -> Json:
        """Delete an object as the API does: with preconditions, grace period, and finalizers."""
        options = options or {}
        manifest = copy.deepcopy(self._existing(plural, namespace, name))
        metadata = manifest["metadata"]
        for key, value in (options.get("preconditions") or {}).items():
            if value is not None and metadata[key] != value:
                message = f"the {key} in the precondition ({value}) does not match that of the object ({metadata[key]})"
                raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": {message}')
        if "deletionTimestamp" in metadata:
            return manifest
        if options.get("propagationPolicy") == "Orphan":
            self._orphan(metadata["uid"])
        if options.get("propagationPolicy") == "Foreground":
            metadata.setdefault("finalizers", []).append("foregroundDeletion")
        grace_s = 0
        if plural == "pods" and manifest["status"]["phase"] in {"Pending", "Running"} and "podIP" in manifest["status"]:
            grace_s = options.get("gracePeriodSeconds")
            if grace_s is None:
                grace_s = manifest["spec"].get("terminationGracePeriodSeconds", 30)
        if grace_s or metadata.get("finalizers"):
            metadata.update(deletionTimestamp=_timestamp(), deletionGracePeriodSeconds=grace_s)
            self._times_s[metadata["uid"], "killed"] = self.now_s + grace_s
            self._store("MODIFIED", plural, manifest)
        else:
            self._remove(plural, manifest)
        return manifest

    def pass_time(self, seconds_s: float) -> None:
        """Advance the cluster's time."""
        self.now_s += seconds_s
        self._changed()

    def behave(self, image: str, **changes: Any) -> None:
        """Change the behaviour of an image's pods from now on."""
        behaviour = self.images.setdefault(image, Behaviour())
        for name, value in changes.items():
            setattr(behaviour, name, value)
        self._changed()

    def drop_watches(self) -> None:
        """Break all watches, as a load balancer does."""
        for watcher in tuple(self.watchers):
            if watcher.request.transport is not None:
                watcher.request.transport.abort()

    def end_watches(self) -> None:
        """End all watches properly, as at their timeout."""
        for watcher in tuple(self.watchers):
            watcher.queue.put_nowait(None)

    def expire_watches(self) -> None:
        """Tell all watches that their resource version is gone."""
        for watcher in tuple(self.watchers):
            watcher.queue.put_nowait({"type": "ERROR", "object": _expired().status})
            watcher.queue.put_nowait(None)

    def send_bookmarks(self) -> None:
        """Send all watches a bookmark: they have received everything up to there."""
        for watcher in tuple(self.watchers):
            watcher.queue.put_nowait(self._bookmark(watcher.plural))

    def compact(self) -> None:
        """Forget the history, and unfinished lists."""
        self._history.clear()
        self._pages.clear()
        self._oldest_version = self._version

    # --- storage ------------------------------------------------------------------------------------------------------

    def _existing(self, plural: str, namespace: str, name: str) -> Json:
        try:
            return self.objects[plural, namespace, name]
        except KeyError:
            raise ApiError(404, "NotFound", f'{plural} "{name}" not found') from None

    def _store(self, kind: str, plural: str, manifest: Json) -> None:
        self._version += 1
        metadata = manifest["metadata"]
        metadata["resourceVersion"] = str(self._version)
        key = (plural, metadata["namespace"], metadata["name"])
        before = self.objects.get(key)
        if kind == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = manifest
        event = Event(self._version, kind, plural, metadata["namespace"], copy.deepcopy(manifest), before)
        self._history.append(event)
        for watcher in tuple(self.watchers):
            watcher.take(event)
        self._changed()

    def _remove(self, plural: str, manifest: Json) -> None:
        self._store("DELETED", plural, copy.deepcopy(manifest))

    def _orphan(self, uid: str) -> None:
        for (plural, _, _), manifest in list(self.objects.items()):
            references = manifest["metadata"].get("ownerReferences") or []
            if any(reference["uid"] == uid for reference in references):
                left = [reference for reference in references if reference["uid"] != uid]
                self._modify(plural, manifest, metadata={"ownerReferences": left})

    def _modify(self, plural: str, manifest: Json, **changes: Json) -> bool:
        """Merge changes into an object; return whether there were any."""
        after = merged(manifest, changes)
        if after == manifest:
            return False
        self._store("MODIFIED", plural, after)
        return True

    # --- the cluster --------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Schedule the controllers: one step at a time, as in a cluster."""
        if not self._is_reconciling:
            self._is_reconciling = True
            asyncio.get_running_loop().call_soon(self._reconcile)

    def _reconcile(self) -> None:
        self._is_reconciling = False
        for (plural, _, _), manifest in sorted(self.objects.items()):
            key = (plural, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
            if self.objects.get(key) is manifest and not self._collect(plural, manifest):
                if plural == "pods":
                    self._step_pod(manifest)
                elif plural == "jobs":
                    self._step_job(manifest)

    def _collect(self, plural: str, manifest: Json) -> bool:
        """Collect garbage: objects with owners, none of which exists."""
        uids = {each["metadata"]["uid"] for each in self.objects.values()}
        metadata = manifest["metadata"]
        references = metadata.get("ownerReferences") or []
        if self.collects_garbage and references and not any(reference["uid"] in uids for reference in references):
            if "deletionTimestamp" in metadata:
                return False
            self.delete(plural, metadata["name"], namespace=metadata["namespace"])
            return True
        if "foregroundDeletion" in metadata.get("finalizers", ()):
            dependents = [
                (each, other)
                for (each, _, _), other in self.objects.items()
                if any(
                    reference["uid"] == metadata["uid"] for reference in other["metadata"].get("ownerReferences", ())
                )
            ]
            for each, other in dependents:
                self.delete(each, other["metadata"]["name"], namespace=other["metadata"]["namespace"])
            if not dependents:
                left = [finalizer for finalizer in metadata["finalizers"] if finalizer != "foregroundDeletion"]
                self.patch(plural, metadata["name"], {"metadata": {"finalizers": left}}, metadata["namespace"])
            return True
        return False

    def _step_pod(self, pod: Json) -> None:
        metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
        main = spec["containers"][0]
        behaviour = self.images.get(main["image"], Behaviour())
        if "deletionTimestamp" in metadata:
            is_over = behaviour.stops_at_once or self.now_s >= self._times_s[metadata["uid"], "killed"]
            if is_over and not metadata.get("finalizers"):
                self._remove("pods", pod)
            return
        if status["phase"] in {"Succeeded", "Failed"}:
            return
        started_at_s = self._times_s.get((metadata["uid"], "started"))
        deadline_s = spec.get("activeDeadlineSeconds")
        if started_at_s is not None and deadline_s is not None and self.now_s >= started_at_s + deadline_s:
            self._end_pod(pod, "Failed", reason="DeadlineExceeded", message="Pod was active longer than its deadline")
        elif status["phase"] == "Pending":
            self._start_pod(pod, behaviour)
        elif behaviour.outcome == "crash":
            terminated = {"reason": "Error", "exitCode": 3, "message": behaviour.message}
            self._end_pod(pod, "Failed", terminated=terminated)
        elif behaviour.outcome == "evict":
            self._end_pod(pod, "Failed", reason="Evicted", message=behaviour.message)
        elif behaviour.outcome == "complete":
            self._end_pod(pod, "Succeeded", terminated={"reason": "Completed", "exitCode": 0})
        else:
            has_probe = "startupProbe" in main or "readinessProbe" in main
            is_ready = behaviour.is_ready or not has_probe
            ready = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(is_ready)}]
            self._modify("pods", pod, status={"conditions": ready})

    def _start_pod(self, pod: Json, behaviour: Behaviour) -> None:
        if not behaviour.has_room:
            unscheduled = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 Insufficient memory.",
            }
            self._modify("pods", pod, status={"conditions": [unscheduled]})
        elif behaviour.is_root and _says_of_user(pod["spec"], "runAsNonRoot") and not _user_of(pod["spec"]):
            message = "container has runAsNonRoot and image will run as root"
            waiting = {"reason": "CreateContainerConfigError", "message": message}
            self._modify("pods", pod, status={"containerStatuses": _main_is(pod, waiting=waiting)})
        elif not behaviour.has_image:
            states = [status["state"]["waiting"]["reason"] for status in pod["status"].get("containerStatuses", ())]
            reason = "ImagePullBackOff" if states else "ErrImagePull"
            waiting = {"reason": reason, "message": f'Back-off pulling image "{pod["spec"]["containers"][0]["image"]}"'}
            self._modify("pods", pod, status={"containerStatuses": _main_is(pod, waiting=waiting)})
        else:
            self._times_s[pod["metadata"]["uid"], "started"] = self.now_s
            status = {
                "phase": "Running",
                "podIP": f"10.244.0.{next(self._addresses)}",
                "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
                "containerStatuses": _main_is(pod, running={}),
            }
            self._modify("pods", pod, status=status)

    def _end_pod(self, pod: Json, phase: str, *, terminated: Json | None = None, **status: str) -> None:
        conditions = [{"type": "Ready", "status": "False"}]
        changes: Json = {"phase": phase, "conditions": conditions, **status}
        if terminated is not None:
            changes["containerStatuses"] = _main_is(pod, terminated=terminated)
        self._modify("pods", pod, status=changes)

    def _step_job(self, job: Json) -> None:
        metadata, spec, status = job["metadata"], job["spec"], job["status"]
        uid = metadata["uid"]
        if "deletionTimestamp" in metadata:
            return
        conditions = [condition for condition in status.get("conditions", ()) if condition["status"] == "True"]
        if [condition["type"] for condition in conditions] in (["FailureTarget"], ["SuccessCriteriaMet"]):
            self._finish_job_at_last(job, conditions[0])
            return
        if conditions:
            after_s = spec.get("ttlSecondsAfterFinished")
            if after_s is not None and self.now_s >= self._times_s[uid, "finished"] + after_s:
                self.delete("jobs", metadata["name"], namespace=metadata["namespace"])
            return
        started_at_s = self._times_s.setdefault((uid, "started"), self.now_s)
        pods = [pod for pod in self.all_of("pods", namespace=metadata["namespace"]) if _controller(pod) == uid]
        deadline_s = spec.get("activeDeadlineSeconds")
        if deadline_s is not None and self.now_s >= started_at_s + deadline_s:
            for pod in pods:
                self.delete("pods", pod["metadata"]["name"], namespace=metadata["namespace"])
            self._finish_job(job, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
            return
        living = [pod for pod in pods if pod["status"]["phase"] in {"Pending", "Running"}]
        made_count = int(self._times_s.get((uid, "made"), 0))
        if any(pod["status"]["phase"] == "Succeeded" for pod in pods):
            self._finish_job(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        elif not living and made_count > spec.get("backoffLimit", 6):
            self._finish_job(job, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif not living and self.makes_pods:
            self._times_s[uid, "made"] = made_count + 1
            # Whether the pod is admitted is checked again each time; the Job only waits.
            with contextlib.suppress(ApiError):
                self._make_pod(job)

    def _make_pod(self, job: Json) -> None:
        name, uid, namespace = (job["metadata"][key] for key in ("name", "uid", "namespace"))
        template = job["spec"]["template"]
        metadata = copy.deepcopy(template.get("metadata") or {})
        metadata.setdefault("labels", {}).update({"job-name": name, "batch.kubernetes.io/job-name": name})
        metadata["generateName"] = f"{name}-"
        metadata["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "controller": True}
        ]
        self.create("pods", {"metadata": metadata, "spec": template["spec"]}, namespace)

    def _finish_job(self, job: Json, kind: str, reason: str, message: str) -> None:
        """Set how a Job ends; since 1.31 this is reported before its pods are gone, and its end only after them."""
        self._times_s[job["metadata"]["uid"], "finished"] = self.now_s
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        if self.version >= (1, 31):
            condition["type"] = {"Failed": "FailureTarget", "Complete": "SuccessCriteriaMet"}[kind]
        self._modify("jobs", job, status={"conditions": [condition]})

    def _finish_job_at_last(self, job: Json, target: Json) -> None:
        """End a Job whose end was reported, once none of its pods is alive."""
        pods = [pod for pod in self.all_of("pods", namespace=job["metadata"]["namespace"])
                if _controller(pod) == job["metadata"]["uid"]]  # fmt: skip
        if any(pod["status"]["phase"] in {"Pending", "Running"} for pod in pods):
            return
        final = {"FailureTarget": "Failed", "SuccessCriteriaMet": "Complete"}[target["type"]]
        self._times_s[job["metadata"]["uid"], "finished"] = self.now_s
        self._modify("jobs", job, status={"conditions": [target, {**target, "type": final}]})

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._carry_out(request)
        except ApiError as error:
            return web.json_response(error.status, status=error.status["code"])

    async def _carry_out(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["path"].rstrip("/") == "version":
            major, minor = self.version
            return web.json_response({"major": str(major), "minor": f"{minor}+"})
        match = re.fullmatch(r"(?:api/(v1)|apis/([^/]+)/([^/]+))/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?",
                             request.match_info["path"])  # fmt: skip
        if match is None and (scale := SCALE.fullmatch(request.match_info["path"])) is not None:
            return web.json_response(self._scale(request, *scale.groups(), await _body_of(request)))
        if match is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        group, namespace, plural, name = match[2] or "", match[4], match[5], match[6]
        verb = _verb(request, name)
        self.requests[group, plural, verb] += 1
        is_right = self.rights is None or (group, plural, verb) in self.rights
        if not (is_right and self.has_loaded_rights):
            message = f'cannot {verb} resource "{plural}" in API group "{group}" in the namespace "{namespace}"'
            raise ApiError(403, "Forbidden", f"{plural} is forbidden: User {message}")
        if errors := self.errors.get((group, plural, verb)):
            raise errors.pop(0)
        if group == METRICS:
            return web.json_response(self._measured(request, namespace))
        if RESOURCES.get(plural, ("?",))[0] != group:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        body = await request.json() if request.can_read_body else None
        if verb == "watch":
            return await self._watch(request, plural, namespace)
        answer = self._perform(verb, plural, namespace, name, body, request)
        text = json.dumps(answer)
        if (held := self.held.get((group, plural, verb))) is not None:
            await held.wait()
        return web.Response(text=text, status=201 if verb == "create" else 200, content_type="application/json")

    def _scale(self, request: web.Request, namespace: str, plural: str, name: str, patch: Json | None) -> Json:
        """Read or change a workload's number of pods; `on_scale` gets the result."""
        verb = _verb(request, name)
        self.requests["apps", f"{plural}/scale", verb] += 1
        if self.rights is not None and ("apps", f"{plural}/scale", verb) not in self.rights:
            raise ApiError(403, "Forbidden", f'cannot {verb} resource "{plural}/scale"')
        if (namespace, plural, name) not in self.sizes:
            raise ApiError(404, "NotFound", f'{plural} "{name}" not found')
        if verb == "patch":
            before = self.sizes[namespace, plural, name]
            self.sizes[namespace, plural, name] = (patch or {})["spec"]["replicas"]
            self.on_scale(before, self.sizes[namespace, plural, name])
        pods = [pod["metadata"] for pod in self.all_of("pods", namespace=namespace)]
        there_count = sum(each["name"].startswith(f"{name}-") and "deletionTimestamp" not in each for each in pods)
        spec, status = {"replicas": self.sizes[namespace, plural, name]}, {"replicas": there_count}
        return {"kind": "Scale", "spec": spec, "status": status}

    def _perform(
        self, verb: str, plural: str, namespace: str, name: str, body: Json | None, request: web.Request
    ) -> Json:
        if verb == "create":
            return self.create(plural, body or {}, namespace, is_rehearsal=request.query.get("dryRun") == "All")
        if verb == "update":
            return self.update(plural, body or {}, namespace)
        if verb == "patch":
            return self.patch(plural, name, body or {}, namespace)
        if verb == "delete":
            options = dict(body or {})
            if (policy := request.query.get("propagationPolicy")) is not None:
                options["propagationPolicy"] = policy
            if (grace := request.query.get("gracePeriodSeconds")) is not None:
                options["gracePeriodSeconds"] = int(grace)
            return self.delete(plural, name, options, namespace)
        if verb == "get":
            return self._existing(plural, namespace, name)
        return self._list(plural, namespace, request)

    def _list(self, plural: str, namespace: str, request: web.Request) -> Json:
        query = request.query
        if token := query.get("continue"):
            if token not in self._pages:
                raise _expired()
            items, version = self._pages.pop(token)
        else:
            version = self._version
            items = [
                copy.deepcopy(each)
                for each in self.all_of(plural, query.get("labelSelector", ""), namespace)
                if selects(each, "", query.get("fieldSelector", ""))
            ]
        limit = int(query.get("limit") or 0)
        metadata = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            metadata["continue"] = f"token-{next(self._uids)}"
            self._pages[metadata["continue"]] = items[limit:], version
            items = items[:limit]
        _, api_version, kind = RESOURCES[plural]
        return {"apiVersion": api_version, "kind": f"{kind}List", "metadata": metadata, "items": items}

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        query = request.query
        try:
            timeout_s = int(query.get("timeoutSeconds") or 1800)
        except ValueError:
            raise ApiError(400, "BadRequest", "timeoutSeconds: must be a whole number of seconds") from None
        version = int(query.get("resourceVersion") or self._version)
        is_gone = version < self._oldest_version
        if is_gone and not self.says_gone_in_stream:
            raise _expired()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        watcher = Watcher(plural, namespace, query.get("labelSelector", ""), query.get("fieldSelector", ""), request)
        if is_gone:
            watcher.queue.put_nowait({"type": "ERROR", "object": _expired().status})
            watcher.queue.put_nowait(None)
        for event in self._history:
            if event.version > version:
                watcher.take(event)
        self.watchers.add(watcher)
        try:
            await response.prepare(request)
            async with asyncio.timeout(timeout_s * self.second_s):
                while (event := await watcher.queue.get()) is not None:
                    await response.write(json.dumps(event).encode() + b"\n")
        except TimeoutError:
            if _is_true(request, "allowWatchBookmarks"):
                await response.write(json.dumps(self._bookmark(plural)).encode() + b"\n")
        finally:
            self.watchers.discard(watcher)
        return response

    def _bookmark(self, plural: str) -> Json:
        _, api_version, kind = RESOURCES[plural]
        metadata = {"resourceVersion": str(self._version)}
        return {"type": "BOOKMARK", "object": {"apiVersion": api_version, "kind": kind, "metadata": metadata}}

    def _measured(self, request: web.Request, namespace: str) -> Json:
        if self.metrics is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        names = {each["metadata"]["name"] for each in self.all_of("pods", request.query["labelSelector"], namespace)}
        return {
            "items": [
                {"metadata": {"name": name}, "containers": [{"usage": {"cpu": "1m", "memory": memory}}]}
                for name, memory in self.metrics.items()
                if name in names
            ]
        }


SCALE = re.compile(r"apis/apps/v1/namespaces/([^/]+)/(deployments|statefulsets)/([^/]+)/scale")


async def _body_of(request: web.Request) -> Json | None:
    return await request.json() if request.can_read_body else None


def _verb(request: web.Request, name: str | None) -> str:
    if request.method == "GET":
        return "watch" if _is_true(request, "watch") else "get" if name else "list"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]


def _is_true(request: web.Request, name: str) -> bool:
    return request.query.get(name, "").lower() in {"1", "t", "true"}


def _expired() -> ApiError:
    return ApiError(410, "Expired", "too old resource version")


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _main_is(pod: Json, **state: Json) -> list[Json]:
    main = pod["spec"]["containers"][0]
    return [
        {
            "name": main["name"],
            "image": main["image"],
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
    ]


def _says_of_user(spec: Json, key: str) -> Any:
    """Return a pod's user settings: for its container, or else for all containers."""
    main = spec["containers"][0].get("securityContext") or {}
    return main.get(key, (spec.get("securityContext") or {}).get(key))


def _user_of(spec: Json) -> int:
    return _says_of_user(spec, "runAsUser") or 0


def _violations(pod: Json) -> Iterator[str]:
    """Return the parts of a pod that the standard "restricted" does not allow."""
    spec = pod["spec"]
    main = spec["containers"][0].get("securityContext") or {}
    if main.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation != false"
    if "ALL" not in (main.get("capabilities") or {}).get("drop", ()):
        yield "unrestricted capabilities"
    if _says_of_user(spec, "runAsNonRoot") is not True:
        yield "runAsNonRoot != true"
    if (_says_of_user(spec, "seccompProfile") or {}).get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "seccompProfile"
    if any("hostPath" in volume for volume in spec.get("volumes") or ()):
        yield "restricted volume types"


def _controller(pod: Json) -> str | None:
    references = pod["metadata"].get("ownerReferences", ())
    return next((reference["uid"] for reference in references if reference.get("controller")), None)


def merged(manifest: Json, patch: Json) -> Json:
    """Return an object with a JSON merge patch applied."""
    after = copy.deepcopy(manifest)
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, dict) and isinstance(after.get(key), dict):
            after[key] = merged(after[key], value)
        else:
            after[key] = copy.deepcopy(value)
    return after


# --- selectors --------------------------------------------------------------------------------------------------------


def selects(manifest: Json, labels: str, fields: str = "") -> bool:
    """Return whether a label selector and a field selector both select an object."""
    metadata = manifest["metadata"]
    has = metadata.get("labels") or {}
    return all(_is_met(has, each) for each in _requirements(labels)) and all(
        _is_met({"metadata.name": metadata["name"], "status.phase": manifest.get("status", {}).get("phase", "")}, each)
        for each in _requirements(fields)
    )


def _requirements(selector: str) -> Iterator[str]:
    yield from (each.strip() for each in re.split(r",(?![^(]*\))", selector) if each.strip())


def _is_met(has: dict[str, str], requirement: str) -> bool:
    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", requirement):
        values = {value.strip() for value in match[3].split(",")}
        return (has.get(match[1]) in values) == (match[2] == "in")
    if match := re.fullmatch(r"([^=!]+)(!=|==|=)(.*)", requirement):
        return (has.get(match[1].strip()) == match[3].strip()) == (match[2] != "!=")
    if requirement.startswith("!"):
        return requirement[1:] not in has
    return requirement in has


# --- validation -------------------------------------------------------------------------------------------------------


def validate(manifest: Json) -> None:
    """Raise `ApiError` for objects that the API server would not store; checks the parts that tests can get wrong."""
    problems = list(_problems(manifest))
    if problems:
        kind, name = manifest["kind"], manifest["metadata"].get("name")
        raise ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {"; ".join(problems)}')


def _problems(manifest: Json) -> Iterator[str]:
    metadata = manifest["metadata"]
    if not NAME.fullmatch(metadata.get("name") or ""):
        yield "metadata.name: must be a lowercase RFC 1123 subdomain"
    yield from _label_problems(metadata)
    for reference in metadata.get("ownerReferences") or ():
        if not all(reference.get(key) for key in ("apiVersion", "kind", "name", "uid")):
            yield "metadata.ownerReferences: incomplete"
    spec = manifest.get("spec") or {}
    if manifest["kind"] == "Pod":
        yield from _pod_problems(spec)
    elif manifest["kind"] == "Job":
        yield from _label_problems(spec["template"].get("metadata") or {})
        yield from _pod_problems(spec["template"]["spec"])
        if spec["template"]["spec"].get("restartPolicy") not in {"Never", "OnFailure"}:
            yield "spec.template.spec.restartPolicy: must be Never or OnFailure"
        if spec.get("activeDeadlineSeconds", 1) < 1:
            yield "spec.activeDeadlineSeconds: must be greater than 0"
    elif manifest["kind"] == "Lease":
        yield from _lease_problems(spec)
    elif manifest["kind"] == "SandboxClaim":
        yield from _claim_problems(spec)
    elif "podSelector" not in spec:
        yield "spec.podSelector: Required value"


def _claim_problems(spec: Json) -> Iterator[str]:
    """By `extensions/api/v1beta1/sandboxclaim_types.go` of kubernetes-sigs/agent-sandbox."""
    if not (spec.get("warmPoolRef") or {}).get("name"):
        yield "spec.warmPoolRef.name: Required value"
    if unknown := spec.keys() - {"warmPoolRef", "lifecycle", "additionalPodMetadata", "env"}:
        yield f"unknown fields: {sorted(unknown)}"
    lifecycle = spec.get("lifecycle") or {}
    if lifecycle.get("shutdownPolicy", "Retain") not in {"Delete", "DeleteForeground", "Retain"}:
        yield "spec.lifecycle.shutdownPolicy: Unsupported value"
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", lifecycle.get("shutdownTime", "2026-01-01T00:00:00Z")):
        yield "spec.lifecycle.shutdownTime: must be a date-time"


def _lease_problems(spec: Json) -> Iterator[str]:
    if "holderIdentity" in spec and not spec["holderIdentity"]:
        yield "spec.holderIdentity: must not be empty"
    if spec.get("leaseDurationSeconds", 1) < 1:
        yield "spec.leaseDurationSeconds: must be greater than 0"
    if not 0 <= spec.get("leaseTransitions", 0) < 2**31:
        yield "spec.leaseTransitions: must be an int32, and not negative"


def _label_problems(metadata: Json) -> Iterator[str]:
    for key, value in (metadata.get("labels") or {}).items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            yield f"metadata.labels: Invalid value: {key}={value!r}"
    for key, value in (metadata.get("annotations") or {}).items():
        if not LABEL_KEY.fullmatch(key) or not isinstance(value, str):
            yield f"metadata.annotations: Invalid value: {key}={value!r}"


def _pod_problems(spec: Json) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    if not spec.get("containers"):
        yield "spec.containers: Required value"
    for main in spec.get("containers") or ():
        if not main.get("name") or not main.get("image"):
            yield "spec.containers: name and image are required"
        targets = [mount["mountPath"] for mount in main.get("volumeMounts") or ()]
        if len(targets) != len(set(targets)) or any(
            mount["name"] not in volumes for mount in main.get("volumeMounts") or ()
        ):
            yield "spec.containers.volumeMounts: Invalid value"
        for variable in main.get("env") or ():
            if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", variable["name"]):
                yield f"spec.containers.env: Invalid value: {variable['name']!r}"
        for name in ("startupProbe", "readinessProbe"):
            probe = main.get(name) or {}
            if any(not isinstance(value, int) or value < 1 for key, value in probe.items() if "Seconds" in key):
                yield f"spec.containers.{name}: must be whole seconds"
