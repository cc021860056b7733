"""Kubernetes manifests made from templates.

Theory of operation
===================
A sandbox is a Job with one pod (or a bare pod). The manifest contains all that must happen to it, so it needs nobody
afterwards, and we need no right to run commands in pods:

- setup commands run before the sandbox's own command, in a shell that then becomes it; the first to fail ends the pod;
- a *startup* probe says when it is usable. Such a probe runs until it succeeds once, and then never again, whereas a
  readiness probe would run `ready_command` inside for as long as the sandbox lives;
- the cluster ends a Job at its deadline, and removes it right after, without anybody's help. A bare pod is stopped at
  its deadline, and its finder removes what remains of it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from thunderagent.errors import SandboxRefusedError
from thunderagent.tools.base import OWNER_LABEL, PROGRAM_LABEL, RUN_LABEL, SANDBOX_LABEL, Order, Owner
from thunderagent.tools.kubernetes.objects import (
    NETWORK_LABEL,
    NO_NETWORK,
    POLICIES,
    RESOURCES,
    Json,
    digest,
    label_value,
    marks_of,
    network_of,
    sandbox_name,
)
from thunderagent.tools.template import Template

_MARKER_FOLDER = "/run/thunderagent"
_MARKER = f"{_MARKER_FOLDER}/set-up"
# PID 1 of a pod gets no signal without a handler: without the trap, each stop would take the whole grace period.
_WAIT_SCRIPT = 'trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done'
_READY_COMMAND_LIMIT_S = 30


def sandbox_manifest(
    order: Order, owner: Owner, namespace: str, *, ttl_s: int, owner_pod: tuple[str, str] | None = None
) -> Json:
    """Return the Job or pod for an order. Raises `SandboxRefusedError` for what Kubernetes cannot do."""
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
    marks = marks_of(labels)
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


def rehearsal_manifest(order: Order, owner: Owner, namespace: str) -> Json:
    """Return the pod that the cluster would make of an order's Job: the server says whether it is allowed."""
    template = sandbox_manifest(order, owner, namespace, ttl_s=1)["spec"]["template"]
    metadata = {"generateName": f"{sandbox_name(order.sandbox_id)}-", **template["metadata"]}
    pod = RESOURCES["pod"]
    return {"apiVersion": pod.api_version, "kind": pod.kind, "metadata": metadata, "spec": template["spec"]}


def policy_manifest(order: Order, owner: Owner, namespace: str, *, owner_pod: tuple[str, str] | None = None) -> Json:
    """Return the network policy for an order whose template does not use the cluster's own network.

    `none` lets nothing in or out. `own` lets the program's sandboxes in, and to `ports` everybody except other
    sandboxes; outgoing access is the cluster's default. Sandboxes of one program with other ports add a policy each:
    whatever one of them allows is allowed.
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


def _metadata(name: str, namespace: str, labels: Mapping[str, str], owner_pod: tuple[str, str] | None) -> Json:
    metadata: Json = {"name": name, "namespace": namespace, **marks_of(labels)}
    if owner_pod is not None:
        pod_name, uid = owner_pod
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": uid}]
    return metadata


def _pod_spec(template: Template) -> Json:
    volumes, mounts = _volumes(template)
    pod_security, main_security = _security(template)
    main: Json = {
        "name": "sandbox",
        "image": template.image,
        # The end of the output explains a failure, if nothing else does.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": [literal(word) for word in start_command(template)],
        "env": [{"name": key, "value": literal(value)} for key, value in template.environment.items()],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in template.ports],
        "volumeMounts": mounts,
        "securityContext": main_security,
        **_probes(template),
    }
    if template.working_dir:
        main["workingDir"] = template.working_dir
    if resources := _resources(template):
        main["resources"] = resources
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security,
        # With 0 the API would forget the pod at once, while its processes may still run.
        "terminationGracePeriodSeconds": max(1, math.ceil(template.stop_grace_s)),
        "containers": [main],
        "volumes": volumes,
    }


def _security(template: Template) -> tuple[Json, Json]:
    """Return the security contexts of the pod and of its container, by the Pod Security Standards."""
    user: Json = {} if template.run_as_user is None else {"runAsUser": template.run_as_user}
    if template.pod_security == "baseline":
        return user, {}
    return (
        {**user, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    )


def _volumes(template: Template) -> tuple[list[Json], list[Json]]:
    volumes: list[Json] = []
    mounts: list[Json] = []
    for number, mount in enumerate(template.mounts):
        name = f"mount-{number}"
        source: Json = {"emptyDir": {}} if mount.source is None else {"hostPath": {"path": mount.source}}
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": mount.target, "readOnly": mount.read_only})
    if template.setup:
        # A place for the mark, whatever the image's user and its permissions are.
        volumes.append({"name": "thunderagent", "emptyDir": {}})
        mounts.append({"name": "thunderagent", "mountPath": _MARKER_FOLDER})
    return volumes, mounts


def _resources(template: Template) -> Json:
    resources: Json = {}
    limits: dict[str, str] = {}
    if template.memory_bytes is not None:
        limits["memory"] = str(template.memory_bytes)
    if template.cpus_count is not None:
        limits["cpu"] = f"{max(1, math.ceil(template.cpus_count * 1000))}m"
    if limits:
        resources["limits"] = limits
    if template.disk_bytes:
        # Its expected writes: the scheduler finds a place for them, and exceeding them causes no eviction.
        resources["requests"] = {"ephemeral-storage": str(template.disk_bytes)}
    return resources


def start_command(template: Template, marker: str = _MARKER) -> list[str]:
    """Return what a sandbox runs: its setup commands, one after the other, and then its command in their place.

    Without setup, a command runs directly: the image needs no shell.
    """
    command = list(template.command) or ["/bin/sh", "-c", _WAIT_SCRIPT]
    if not template.setup:
        return command
    steps = [f"/bin/sh -c {shlex.quote(step)} || exit" for step in template.setup]
    script = "\n".join([*steps, f": > {shlex.quote(marker)} || exit", 'exec "$@"'])
    return ["/bin/sh", "-c", script, "sh", *command]


def ready_command(template: Template, marker: str = _MARKER) -> list[str]:
    """Return a command that succeeds inside once it is set up and usable; empty if it is usable as soon as it runs."""
    checks = [f"test -e {shlex.quote(marker)}"] if template.setup else []
    if template.ready_command:
        checks.append(f"/bin/sh -c {shlex.quote(template.ready_command)}")
    return ["/bin/sh", "-c", " && ".join(checks)] if checks else []


def _probes(template: Template) -> Json:
    """Return the probes. Those that run inside come first, and the port is tried only after them."""
    period_s = max(1, round(template.ready_interval_s))
    startup: Json = {
        "periodSeconds": period_s,
        # A startup probe that fails this often ends the pod: never before the preparation has failed anyway.
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
    """Escape `text` for Kubernetes, which replaces $(NAME) in commands, probes and values, and $$ by $."""
    return text.replace("$", "$$")
