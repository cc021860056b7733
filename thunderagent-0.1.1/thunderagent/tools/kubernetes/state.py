"""What the state of a pod or a Job means, and where a sandbox is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from thunderagent.errors import SandboxError, SandboxImageError, SandboxSetupError, SandboxSpaceError
from thunderagent.tools.base import Found, Place
from thunderagent.tools.kubernetes.objects import Json, Ref, is_going

_IMAGE_REASONS = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
_START_REASONS = frozenset(
    {"CrashLoopBackOff", "RunContainerError", "CreateContainerError", "CreateContainerConfigError"}
)
_ROOT_REMEDY = 'set run_as_user in the template, or pod_security = "baseline" for an image that needs root'
_SPACE_REASONS = frozenset({"Evicted", "Preempted", "Preempting"})


def address_of(pod: Json) -> str:
    """Return the IP address of a running pod; empty for any other."""
    status = pod.get("status") or {}
    return str(status.get("podIP") or "") if status.get("phase") == "Running" and not is_going(pod) else ""


def ports_of(pod: Json) -> list[int]:
    """Return the ports that a pod declares."""
    parts = (pod.get("spec") or {}).get("containers") or ()
    return [int(port["containerPort"]) for part in parts for port in part.get("ports") or ()]


def place_of(ref: Ref, pod: Json) -> Place:
    """Return where a sandbox is, by its pod; `pod` is empty if it has none."""
    address = address_of(pod)
    ports = {port: (address, port) for port in ports_of(pod)} if address else {}
    details = {"namespace": ref.namespace}
    if pod:
        details["pod"] = pod["metadata"]["name"]
    return Place(handle=ref.handle, address=address, ports=ports, details=details)


def found_of(ref: Ref, labels: Mapping[str, str], pod: Json, *, ended: bool = False) -> Found:
    """Return a sandbox by its true labels and its pod, which may be empty."""
    place = place_of(ref, pod)
    return Found(ref.handle, labels, running=bool(place.address) and not ended, place=place, ended=ended)


def is_ready(pod: Json) -> bool:
    """Return whether a pod runs, has an address, and its probes have succeeded."""
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
    # Since 1.31 the last two say why before the pods are gone, and the first two only afterwards.
    for name in ("Failed", "Complete", "FailureTarget", "SuccessCriteriaMet"):
        if (condition := _condition(manifest, name)).get("status") == "True":
            return _sentence(condition.get("reason") or name, condition.get("message"))
    return ""


def fault_of(pod: Json) -> SandboxError | None:
    """Return why a pod will never be usable; None if it is, or may become usable."""
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
            remedy = f"; {_ROOT_REMEDY}" if "runAsNonRoot" in message else ""
            return SandboxSetupError(_sentence(reason, message) + remedy)
    return None


def delay_of(pod: Json) -> tuple[str, bool]:
    """Return why a pod is not usable yet, and whether that is for lack of room."""
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
    """Return how a pod failed, with the explanation that its process left."""
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
