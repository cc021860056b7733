"""What Kubernetes is told and what it tells, as JSON: manifests made of templates, and what the state of a pod means.

Theory of operation
===================
A sandbox is a Job with one pod (or a bare pod). All that must happen to it is in the manifest, so that it needs nobody
afterwards, and of us no right to run commands in pods:

- setup commands run before the sandbox's own command, in a shell that then becomes it; the first to fail ends the pod;
- a *startup* probe says when it is usable. Such a probe runs until it succeeds once, and then never again, where a
  readiness probe would run `ready_command` inside for as long as the sandbox lives;
- a Job is given up by the cluster at its deadline, and removed right after: nobody's help is needed for that. A bare
  pod is stopped at its deadline, and what remains of it is removed by who finds it.

Program and owner ids may be any text; a label's value may not. So labels hold a hash, to select by, and annotations of
the same names the truth. Labels that users set on pods of their own hold the plain value.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from thunderagent.errors import (
    SandboxError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSetupError,
    SandboxSpaceError,
)
from thunderagent.tools.base import (
    EXPIRES_LABEL,
    LABEL_PREFIX,
    OWNER_LABEL,
    PROGRAM_LABEL,
    RUN_LABEL,
    SANDBOX_LABEL,
    Order,
    Owner,
)
from thunderagent.tools.template import Template

Json = dict[str, Any]

NETWORK_LABEL = "thunderagent.network"
"""What a network policy selects by: sandboxes with the same value reach each other, or nobody."""
NO_NETWORK = "none"

_MARKER_FOLDER = "/run/thunderagent"
_MARKER = f"{_MARKER_FOLDER}/set-up"
_PLAIN_LABELS = frozenset({SANDBOX_LABEL, EXPIRES_LABEL})
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# PID 1 of a pod hears no signal that it does not ask for: without the trap, each stop would take the whole grace.
_WAIT_SCRIPT = 'trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done'
_IMAGE_REASONS = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
_START_REASONS = frozenset(
    {"CrashLoopBackOff", "RunContainerError", "CreateContainerError", "CreateContainerConfigError"}
)
_SPACE_REASONS = frozenset({"Evicted", "Preempted", "Preempting"})
_READY_COMMAND_LIMIT_S = 30


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and where the API has it."""

    kind: str
    api_version: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of one, or of all in a namespace."""
        root = "apis" if "/" in self.api_version else "api"
        path = f"/{root}/{self.api_version}/namespaces/{namespace}/{self.plural}"
        return f"{path}/{name}" if name else path


RESOURCES = {"job": Resource("Job", "batch/v1", "jobs"), "pod": Resource("Pod", "v1", "pods")}
"""What a sandbox can be, by the first word of its handle."""
POLICIES = Resource("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
POD_METRICS = Resource("PodMetrics", "metrics.k8s.io/v1beta1", "pods")


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of a sandbox in the cluster. Its handle is `job/default/thunderagent-x`."""

    kind: str
    namespace: str
    name: str

    def __post_init__(self) -> None:
        # They become parts of a path, in which `..` would mean something quite different from a sandbox.
        if not (_NAME.fullmatch(self.namespace) and _OBJECT_NAME.fullmatch(self.name)):
            raise SandboxRefusedError(f"{self.namespace!r} and {self.name!r} are no names in Kubernetes")

    @classmethod
    def parse(cls, handle: str) -> Ref:
        """Read a handle; raise `SandboxRefusedError` if it is none."""
        parts = handle.split("/")
        if len(parts) != 3 or parts[0] not in RESOURCES:
            raise SandboxRefusedError(f"{handle!r} is no handle of a sandbox in Kubernetes, as job/default/NAME is")
        return cls(*parts)

    @property
    def handle(self) -> str:
        """Return it as text."""
        return f"{self.kind}/{self.namespace}/{self.name}"

    @property
    def resource(self) -> Resource:
        """Return where the API has it."""
        return RESOURCES[self.kind]


# --- names and labels -----------------------------------------------------------------------------------------------


def digest(text: str) -> str:
    """Return a hash that is a valid label value and a valid part of a name."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def label_value(key: str, value: str) -> str:
    """Return what a label of ours holds: a hash, save for what is ours to choose."""
    if not value or (key in _PLAIN_LABELS and _LABEL_VALUE.fullmatch(value)):
        return value
    return digest(value)


def sandbox_name(sandbox_id: str) -> str:
    """Return the name that a sandbox has in the cluster."""
    name = f"thunderagent-{sandbox_id}"
    return name if _NAME.fullmatch(name) else f"thunderagent-{digest(sandbox_id)}"


def network_of(order: Order) -> str:
    """Return by what the policy of its network selects it; empty if it has the cluster's own network.

    What is kept warm belongs to nobody yet, so it is alone in its network, and stays so.
    """
    if order.template.network == "default":
        return ""
    if order.template.network == "none":
        return NO_NETWORK
    return digest(f"program {order.program_id}" if order.program_id else f"sandbox {order.sandbox_id}")


def owned_selector(owner: Owner, network: str = "") -> str:
    """Return the label selector of what we made, or of what we made in one network."""
    selector = f"{OWNER_LABEL}={label_value(OWNER_LABEL, owner.owner_id)}"
    return f"{selector},{NETWORK_LABEL}={network}" if network else selector


def sandbox_selector(sandbox_id: str) -> str:
    """Return the label selector of one sandbox's pod."""
    return f"{SANDBOX_LABEL}={label_value(SANDBOX_LABEL, sandbox_id)}"


LABELLED_SELECTOR = PROGRAM_LABEL
"""Selects ours and those given to us at once: ours bear the label of a program even if they have none."""


def truth(manifest: Json) -> dict[str, str]:
    """Return what our labels on an object say: annotations hold the true value where both are there."""
    metadata = manifest.get("metadata") or {}
    labels = {**(metadata.get("labels") or {}), **_of_ours(metadata.get("annotations"))}
    return {key: value for key, value in _of_ours(labels).items() if value and key != NETWORK_LABEL}


def network_in(manifest: Json) -> str:
    """Return in which network an object is; empty if in none of ours."""
    return str(((manifest.get("metadata") or {}).get("labels") or {}).get(NETWORK_LABEL, ""))


def is_for_us(labels: Mapping[str, str], owner: Owner) -> bool:
    """Say whether this proxy may remove a thing with these true labels: it made it, or was given it."""
    if labels.get(SANDBOX_LABEL):
        return labels.get(OWNER_LABEL) == owner.owner_id
    return bool(labels.get(PROGRAM_LABEL))


def _of_ours(mapping: Mapping[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (mapping or {}).items() if key.startswith(LABEL_PREFIX)}


def _metadata(name: str, namespace: str, labels: Mapping[str, str], owner_pod: tuple[str, str] | None) -> Json:
    metadata: Json = {"name": name, "namespace": namespace, **_marked(labels)}
    if owner_pod is not None:
        pod_name, uid = owner_pod
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": uid}]
    return metadata


def _marked(labels: Mapping[str, str]) -> Json:
    return {
        "labels": {key: label_value(key, value) for key, value in labels.items()},
        "annotations": {key: value for key, value in labels.items() if value},
    }


# --- manifests ------------------------------------------------------------------------------------------------------


def sandbox_manifest(
    order: Order, owner: Owner, namespace: str, *, ttl_s: int, owner_pod: tuple[str, str] | None = None
) -> Json:
    """Return the Job or pod that an order asks for. Raises `SandboxRefusedError` for what Kubernetes cannot do."""
    template = order.template
    if template.pids_count is not None:
        raise SandboxRefusedError("Kubernetes limits processes for each machine (podPidsLimit), not for each pod")
    labels = {
        PROGRAM_LABEL: "",
        **order.labels,
        OWNER_LABEL: owner.owner_id,
        RUN_LABEL: owner.run_id,
    }
    name = sandbox_name(order.sandbox_id)
    metadata = _metadata(name, namespace, labels, owner_pod)
    marks = _marked(labels)
    if network := network_of(order):
        metadata["labels"][NETWORK_LABEL] = marks["labels"][NETWORK_LABEL] = network
    spec = _pod_spec(template)
    resource = RESOURCES[template.kubernetes_kind]
    if template.kubernetes_kind == "pod":
        spec = {**spec, "activeDeadlineSeconds": ttl_s}
    else:
        spec = {
            "backoffLimit": 0,
            "activeDeadlineSeconds": ttl_s,
            "ttlSecondsAfterFinished": 0,
            "template": {"metadata": marks, "spec": spec},
        }
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec}


def policy_manifest(order: Order, owner: Owner, namespace: str, *, owner_pod: tuple[str, str] | None = None) -> Json:
    """Return the network policy for an order whose template does not have the cluster's own network.

    `none` lets nothing in or out. `own` lets in each other, and to `ports` everybody but other sandboxes; what they
    reach outside is as everywhere in the cluster. Sandboxes of one program with other ports add a policy each: what
    one of them allows is allowed.
    """
    network = network_of(order)
    assert network, "the cluster's own network needs no policy"
    members = {"matchLabels": {OWNER_LABEL: label_value(OWNER_LABEL, owner.owner_id), NETWORK_LABEL: network}}
    ports = order.template.ports if network != NO_NETWORK else ()
    if network == NO_NETWORK:
        rules: Json = {"policyTypes": ["Ingress", "Egress"]}
    else:
        ingress: list[Json] = [{"from": [{"podSelector": members}]}]
        if ports:
            strangers = {"matchExpressions": [{"key": SANDBOX_LABEL, "operator": "DoesNotExist"}]}
            ingress.append(
                {
                    "from": [{"namespaceSelector": {}, "podSelector": strangers}],
                    "ports": [{"protocol": "TCP", "port": port} for port in ports],
                }
            )
        rules = {"policyTypes": ["Ingress"], "ingress": ingress}
    name = f"thunderagent-{digest(f'{owner.owner_id} {network} {sorted(ports)}')}"
    metadata = _metadata(name, namespace, {OWNER_LABEL: owner.owner_id, RUN_LABEL: owner.run_id}, owner_pod)
    metadata["labels"][NETWORK_LABEL] = network
    return {
        "apiVersion": POLICIES.api_version,
        "kind": POLICIES.kind,
        "metadata": metadata,
        "spec": {"podSelector": members, **rules},
    }


def _pod_spec(template: Template) -> Json:
    volumes, mounts = _volumes(template)
    main: Json = {
        "name": "sandbox",
        "image": template.image,
        # The end of the output explains a failure, if nothing else does.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": [literal(word) for word in start_command(template)],
        "env": [{"name": key, "value": literal(value)} for key, value in template.environment.items()],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in template.ports],
        "volumeMounts": mounts,
        **_probes(template),
    }
    if template.working_dir:
        main["workingDir"] = template.working_dir
    if limits := _limits(template):
        main["resources"] = {"limits": limits}
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # With 0 the API would forget the pod at once, while what runs in it may still run.
        "terminationGracePeriodSeconds": max(1, math.ceil(template.stop_grace_s)),
        "containers": [main],
        "volumes": volumes,
    }


def _volumes(template: Template) -> tuple[list[Json], list[Json]]:
    volumes: list[Json] = []
    mounts: list[Json] = []
    for number, mount in enumerate(template.mounts):
        name = f"mount-{number}"
        source: Json = {"emptyDir": {}} if mount.source is None else {"hostPath": {"path": mount.source}}
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": mount.target, "readOnly": mount.read_only})
    if template.setup:
        # A place to leave the mark in, whoever the image's user is and whatever it may write to.
        volumes.append({"name": "thunderagent", "emptyDir": {}})
        mounts.append({"name": "thunderagent", "mountPath": _MARKER_FOLDER})
    return volumes, mounts


def _limits(template: Template) -> dict[str, str]:
    limits: dict[str, str] = {}
    if template.memory_bytes is not None:
        limits["memory"] = str(template.memory_bytes)
    if template.cpus_count is not None:
        limits["cpu"] = f"{max(1, math.ceil(template.cpus_count * 1000))}m"
    if template.disk_bytes:
        limits["ephemeral-storage"] = str(template.disk_bytes)
    return limits


def start_command(template: Template, marker: str = _MARKER) -> list[str]:
    """Return what a sandbox runs: its setup commands, one after the other, and then its command instead of them.

    Without setup, a command runs as it is: the image needs no shell.
    """
    command = list(template.command) or ["/bin/sh", "-c", _WAIT_SCRIPT]
    if not template.setup:
        return command
    steps = [f"/bin/sh -c {shlex.quote(step)} || exit" for step in template.setup]
    script = "\n".join([*steps, f": > {shlex.quote(marker)} || exit", 'exec "$@"'])
    return ["/bin/sh", "-c", script, "sh", *command]


def ready_command(template: Template, marker: str = _MARKER) -> list[str]:
    """Return what succeeds inside once it is set up and usable; empty if it is so as soon as it runs."""
    checks = [f"test -e {shlex.quote(marker)}"] if template.setup else []
    if template.ready_command:
        checks.append(f"/bin/sh -c {shlex.quote(template.ready_command)}")
    return ["/bin/sh", "-c", " && ".join(checks)] if checks else []


def _probes(template: Template) -> Json:
    """Return the probes. Those that run inside come first, and the port is tried only after them."""
    period_s = max(1, round(template.ready_interval_s))
    startup: Json = {
        "periodSeconds": period_s,
        # A startup probe that fails so often ends the pod: never before the preparation has failed anyway.
        "failureThreshold": math.ceil(template.prepare_timeout_s / period_s) + 1,
        "timeoutSeconds": _READY_COMMAND_LIMIT_S,
    }
    port = {"tcpSocket": {"port": template.ready_port}} if template.ready_port is not None else None
    if command := ready_command(template):
        probes: Json = {"startupProbe": {"exec": {"command": [literal(word) for word in command]}, **startup}}
        if port is not None:
            probes["readinessProbe"] = {**port, "periodSeconds": period_s}
        return probes
    return {"startupProbe": {**port, **startup}} if port is not None else {}


def literal(text: str) -> str:
    """Return what Kubernetes makes `text` of: it replaces $(NAME) in commands, probes and values, and $$ by $."""
    return text.replace("$", "$$")


# --- what the cluster tells -----------------------------------------------------------------------------------------


def uid_of(manifest: Json) -> str:
    """Return what tells an object from all others, earlier ones of the same name too."""
    return str((manifest.get("metadata") or {}).get("uid") or "")


def version_of(manifest: Json) -> str:
    """Return the resource version of an object or a list."""
    return str((manifest.get("metadata") or {}).get("resourceVersion") or "")


def is_going(manifest: Json) -> bool:
    """Say whether somebody removed an object: it stays as long as a pod needs to stop, or a finalizer keeps it."""
    return bool((manifest.get("metadata") or {}).get("deletionTimestamp"))


def controller_of(pod: Json) -> tuple[str, str] | None:
    """Return name and uid of the Job that made a pod."""
    for reference in (pod.get("metadata") or {}).get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == "Job":
            return str(reference["name"]), str(reference["uid"])
    return None


def ref_of(kind: str, manifest: Json) -> Ref:
    """Return the sandbox that an object belongs to: a Job's pod belongs to the Job, which would make another one."""
    metadata = manifest["metadata"]
    if kind == "pod" and (controller := controller_of(manifest)) is not None:
        return Ref("job", metadata["namespace"], controller[0])
    return Ref(kind, metadata["namespace"], metadata["name"])


def address_of(pod: Json) -> str:
    """Return the IP address of a pod that runs; empty for any other."""
    status = pod.get("status") or {}
    return str(status.get("podIP") or "") if status.get("phase") == "Running" and not is_going(pod) else ""


def ports_of(pod: Json) -> list[int]:
    """Return the ports that a pod says it listens on."""
    parts = (pod.get("spec") or {}).get("containers") or ()
    return [int(port["containerPort"]) for part in parts for port in part.get("ports") or ()]


def is_ready(pod: Json) -> bool:
    """Say whether a pod runs, has an address, and its probes have succeeded."""
    return bool(address_of(pod)) and _condition(pod, "Ready").get("status") == "True"


def end_of(kind: str, manifest: Json) -> str:
    """Return how a sandbox ended; empty if it has not."""
    if is_going(manifest):
        return "removed"
    status = manifest.get("status") or {}
    if kind == "pod":
        if status.get("phase") == "Succeeded":
            return "ended by itself"
        return _failure(manifest) if status.get("phase") == "Failed" else ""
    for name in ("Failed", "Complete"):
        if (condition := _condition(manifest, name)).get("status") == "True":
            return _sentence(condition.get("reason") or name, condition.get("message"))
    return ""


def fault_of(pod: Json) -> SandboxError | None:
    """Return why a pod will never be usable; nothing if it is, or may yet become so."""
    if is_going(pod):
        return SandboxSetupError("the pod was removed by somebody else before it was usable")
    status = pod.get("status") or {}
    if status.get("phase") == "Succeeded":
        return SandboxSetupError("it ended by itself before it was usable")
    if status.get("phase") == "Failed":
        reason = str(status.get("reason") or "")
        is_space = reason in _SPACE_REASONS or reason.startswith("OutOf")
        return (SandboxSpaceError if is_space else SandboxSetupError)(_failure(pod))
    for reason, message in _waiting(pod):
        if reason in _IMAGE_REASONS:
            return SandboxImageError(_sentence(reason, message))
        if reason in _START_REASONS:
            return SandboxSetupError(_sentence(reason, message))
    return None


def delay_of(pod: Json) -> tuple[str, bool]:
    """Return why a pod is not usable yet, and whether that is for want of room."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        reason = str(scheduled.get("reason") or "not scheduled")
        return _sentence(reason, scheduled.get("message")), reason == "Unschedulable"
    for reason, message in _waiting(pod):
        return _sentence(reason, message), False
    if (pod.get("status") or {}).get("phase") == "Running":
        return "it runs, but is not ready", False
    return "it has not been started yet", False


def _condition(manifest: Json, name: str) -> Json:
    conditions: Iterable[Json] = (manifest.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == name), {})


def _waiting(pod: Json) -> list[tuple[str, str]]:
    return [
        (str(waiting.get("reason") or "waiting"), str(waiting.get("message") or ""))
        for waiting in _states(pod, "waiting")
    ]


def _failure(pod: Json) -> str:
    """Return how a pod failed, with what its process left as explanation."""
    status = pod.get("status") or {}
    if status.get("reason"):
        return _sentence(status["reason"], status.get("message"))
    for ended in _states(pod, "terminated"):
        return _sentence(f"{ended.get('reason') or 'Error'}, exit status {ended.get('exitCode')}", ended.get("message"))
    return _sentence("Failed", status.get("message"))


def _states(pod: Json, name: str) -> Iterable[Json]:
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        if state := (each.get("state") or {}).get(name):
            yield state


def _sentence(reason: object, message: object) -> str:
    text = str(message or "").strip()
    return f"{reason}: {text}" if text else str(reason)
