"""Names in Kubernetes: API paths, sandbox names, and the meaning of labels and metadata.

Program and owner ids may be any text; a label's value may not. So labels hold a hash, to select by, and annotations of
the same names the true value. Labels that users set on their own pods hold the plain value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thunderagent.errors import SandboxRefusedError
from thunderagent.tools.base import EXPIRES_LABEL, LABEL_PREFIX, OWNER_LABEL, PROGRAM_LABEL, SANDBOX_LABEL, Order, Owner

Json = dict[str, Any]

NETWORK_LABEL = "thunderagent.network"
"""The selector of a network policy: sandboxes with the same value reach each other, or nobody."""
NO_NETWORK = "none"

_PLAIN_LABELS = frozenset({SANDBOX_LABEL, EXPIRES_LABEL})
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and its API path."""

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
        # They become parts of a path, in which `..` would have another meaning.
        if not (_NAME.fullmatch(self.namespace) and _OBJECT_NAME.fullmatch(self.name)):
            raise SandboxRefusedError(f"{self.namespace!r} and {self.name!r} are not names in Kubernetes")

    @classmethod
    def parse(cls, handle: str) -> Ref:
        """Parse a handle; raise `SandboxRefusedError` if it is invalid."""
        parts = handle.split("/")
        if len(parts) != 3 or parts[0] not in RESOURCES:
            raise SandboxRefusedError(f"{handle!r} is not a handle of a sandbox in Kubernetes, as job/default/NAME is")
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
    """Return the value of our label: a hash, except for values that we choose."""
    if not value or (key in _PLAIN_LABELS and _LABEL_VALUE.fullmatch(value)):
        return value
    return digest(value)


def sandbox_name(sandbox_id: str) -> str:
    """Return the name of a sandbox in the cluster."""
    name = f"thunderagent-{sandbox_id}"
    return name if _NAME.fullmatch(name) else f"thunderagent-{digest(sandbox_id)}"


def network_of(order: Order) -> str:
    """Return the network label of an order; empty if it uses the cluster's own network.

    A warm sandbox belongs to nobody yet, so it is alone in its network, and stays so.
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
"""Selects ours and those given to us at once: ours have a program's label even without a program."""


def marks_of(labels: Mapping[str, str]) -> Json:
    """Return labels as an object's metadata."""
    return {
        "labels": {key: label_value(key, value) for key, value in labels.items()},
        "annotations": {key: value for key, value in labels.items() if value},
    }


def truth(manifest: Json) -> dict[str, str]:
    """Return the true values of our labels on an object: annotations take precedence."""
    metadata = manifest.get("metadata") or {}
    labels = {**(metadata.get("labels") or {}), **_of_ours(metadata.get("annotations"))}
    return {key: value for key, value in _of_ours(labels).items() if value and key != NETWORK_LABEL}


def network_in(manifest: Json) -> str:
    """Return an object's network; empty if it is none of ours."""
    return str(((manifest.get("metadata") or {}).get("labels") or {}).get(NETWORK_LABEL, ""))


def is_for_us(labels: Mapping[str, str], owner: Owner) -> bool:
    """Return whether this proxy may remove an object with these true labels: it made it, or was given it."""
    if labels.get(SANDBOX_LABEL):
        return labels.get(OWNER_LABEL) == owner.owner_id
    return bool(labels.get(PROGRAM_LABEL))


def _of_ours(mapping: Mapping[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (mapping or {}).items() if key.startswith(LABEL_PREFIX)}


# --- metadata -------------------------------------------------------------------------------------------------------


def uid_of(manifest: Json) -> str:
    """Return an object's uid, which also distinguishes it from earlier ones of the same name."""
    return str((manifest.get("metadata") or {}).get("uid") or "")


def version_of(manifest: Json) -> str:
    """Return the resource version of an object or a list."""
    return str((manifest.get("metadata") or {}).get("resourceVersion") or "")


def is_going(manifest: Json) -> bool:
    """Return whether an object is being removed: it stays while a pod stops, or a finalizer keeps it."""
    return bool((manifest.get("metadata") or {}).get("deletionTimestamp"))


def controller_of(pod: Json) -> tuple[str, str] | None:
    """Return name and uid of the Job that made a pod."""
    for reference in (pod.get("metadata") or {}).get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == "Job":
            return str(reference["name"]), str(reference["uid"])
    return None


def ref_of(kind: str, manifest: Json) -> Ref:
    """Return the sandbox of an object: a Job's pod belongs to the Job, which would make another one."""
    metadata = manifest["metadata"]
    if kind == "pod" and (controller := controller_of(manifest)) is not None:
        return Ref("job", metadata["namespace"], controller[0])
    return Ref(kind, metadata["namespace"], metadata["name"])
