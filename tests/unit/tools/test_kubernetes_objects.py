"""Objects to and from Kubernetes: names, manifests, their scripts in a real shell, and states of pods."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client

from thunderagent.errors import SandboxImageError, SandboxRefusedError, SandboxSetupError, SandboxSpaceError
from thunderagent.tools.base import OWNER_LABEL, PROGRAM_LABEL, SANDBOX_LABEL, Order, Owner
from thunderagent.tools.kubernetes.manifests import (
    literal,
    policy_manifest,
    ready_command,
    sandbox_manifest,
    start_command,
)
from thunderagent.tools.kubernetes.objects import (
    NETWORK_LABEL,
    Ref,
    Resource,
    is_for_us,
    label_value,
    network_of,
    owned_selector,
    ref_of,
    sandbox_name,
    truth,
)
from thunderagent.tools.kubernetes.state import address_of, delay_of, end_of, fault_of, is_ready
from thunderagent.tools.template import Mount, Template

if TYPE_CHECKING:
    from pathlib import Path

OWNER = Owner("proxy-1", "run-1")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def order(sandbox_id: str = "a1", program_id: str = "p", **template: Any) -> Order:
    made = Template(**{"driver": "kubernetes", "image": "img", **template})
    return Order(sandbox_id, made, "coding", program_id, 1_700_000_000.9)


def manifest(owner_pod: tuple[str, str] | None = None, **template: Any) -> dict[str, Any]:
    return sandbox_manifest(order(**template), OWNER, "space", ttl_s=60, owner_pod=owner_pod)


def main_of(made: dict[str, Any]) -> dict[str, Any]:
    spec = made["spec"]["template"]["spec"] if made["kind"] == "Job" else made["spec"]
    [main] = spec["containers"]
    return dict(main)


# --- Objects of a template --------------------------------------------------------------------------------------------


def test_a_job_ends_without_help() -> None:
    """It has its own deadline, no second try, and is removed right after."""
    made = manifest()
    assert (made["apiVersion"], made["kind"]) == ("batch/v1", "Job")
    spec = {key: value for key, value in made["spec"].items() if key != "template"}
    assert spec == {"backoffLimit": 0, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0}


def test_a_pod_has_its_own_deadline() -> None:
    """A bare pod is stopped at the end of its life."""
    made = manifest(kubernetes_kind="pod")
    assert (made["apiVersion"], made["kind"], made["spec"]["activeDeadlineSeconds"]) == ("v1", "Pod", 60)


@pytest.mark.parametrize("kind", ["job", "pod"])
def test_a_pod_gets_no_token_and_no_second_life(kind: str) -> None:
    """Code in a sandbox has no account in the cluster, and is not restarted."""
    made = manifest(kubernetes_kind=kind)
    spec = made["spec"]["template"]["spec"] if kind == "job" else made["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 1


def test_everything_a_template_says_is_there() -> None:
    """These are command, environment, folder, ports, limits and mounts."""
    made = manifest(
        kubernetes_kind="pod",
        command=("python", "-m", "tool"),
        environment={"A": "1", "B": "$(A)"},
        working_dir="/app",
        ports=(80, 8000),
        memory_bytes=1 << 30,
        cpus_count=1.5,
        disk_bytes=5_000_000,
        mounts=(Mount(target="/tmp"), Mount(target="/data", source="/srv/data", read_only=True)),
    )
    main = main_of(made)
    assert main["image"] == "img"
    assert main["command"] == ["python", "-m", "tool"]
    assert main["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "$$(A)"}]
    assert main["workingDir"] == "/app"
    assert [port["containerPort"] for port in main["ports"]] == [80, 8000]
    # Expected writes need a place; a sandbox that writes more must not be removed for it.
    assert main["resources"] == {
        "limits": {"memory": "1073741824", "cpu": "1500m"},
        "requests": {"ephemeral-storage": "5000000"},
    }
    assert made["spec"]["volumes"] == [
        {"name": "mount-0", "emptyDir": {}},
        {"name": "mount-1", "hostPath": {"path": "/srv/data"}},
    ]
    assert main["volumeMounts"] == [
        {"name": "mount-0", "mountPath": "/tmp", "readOnly": False},
        {"name": "mount-1", "mountPath": "/data", "readOnly": True},
    ]


def test_nothing_said_is_nothing_there() -> None:
    """A template with only an image has no limits, probes or volumes; an expected disk of zero is no request."""
    main = main_of(manifest(disk_bytes=0))
    assert not {"resources", "workingDir", "startupProbe", "readinessProbe"} & set(main)
    assert (main["env"], main["ports"], main["volumeMounts"]) == ([], [], [])


def test_option_that_kubernetes_lacks_is_refused() -> None:
    """Otherwise a limit would be silently ignored."""
    with pytest.raises(SandboxRefusedError, match="podPidsLimit"):
        manifest(pids_count=100)


def test_our_own_pod_owns_it() -> None:
    """If the proxy's pod is known, the cluster's garbage collection knows it too."""
    made = manifest(owner_pod=("proxy-0", "u1"))
    policy = policy_manifest(order(network="own"), OWNER, "space", owner_pod=("proxy-0", "u1"))
    for each in (made, policy):
        [reference] = each["metadata"]["ownerReferences"]
        assert reference == {"apiVersion": "v1", "kind": "Pod", "name": "proxy-0", "uid": "u1"}


FULL = {
    "command": ("x",),
    "environment": {"A": "1"},
    "working_dir": "/app",
    "mounts": (Mount(target="/tmp"), Mount(target="/data", source="/srv/data", read_only=True)),
    "ports": (80,),
    "network": "own",
    "memory_bytes": 1 << 20,
    "cpus_count": 0.5,
    "disk_bytes": 1 << 20,
    "setup": ("y",),
    "ready_command": "z",
    "ready_port": 80,
}


@pytest.mark.parametrize("network", ["own", "none"])
@pytest.mark.parametrize(("kind", "model"), [("job", "V1Job"), ("pod", "V1Pod")])
def test_every_field_is_one_that_kubernetes_has(kind: str, model: str, network: str) -> None:
    """The client's own models read and return the manifests: no field is misspelt or misplaced."""
    made = order(**{**FULL, "kubernetes_kind": kind, "network": network})
    sandbox = sandbox_manifest(made, OWNER, "space", ttl_s=60, owner_pod=("proxy-0", "u1"))
    for manifest_, name in ((sandbox, model), (policy_manifest(made, OWNER, "space"), "V1NetworkPolicy")):
        api = client.ApiClient()
        modelled = api.deserialize(SimpleNamespace(data=json.dumps(manifest_)), name)
        assert api.sanitize_for_serialization(modelled) == manifest_


# --- labels and names -------------------------------------------------------------------------------------------------


@given(st.text(max_size=300), st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=100))
def test_any_ids_make_valid_labels_and_come_back(program_id: str, owner_id: str, sandbox_id: str) -> None:
    """Labels are valid on the object and on its pods, whatever the ids are; annotations hold the originals."""
    owner = Owner(owner_id, owner_id)
    made = sandbox_manifest(order(sandbox_id, program_id), owner, "space", ttl_s=1)
    for metadata in (made["metadata"], made["spec"]["template"]["metadata"]):
        assert all(VALUE.fullmatch(value) for value in metadata["labels"].values())
        labels = truth({"metadata": metadata})
        assert labels[SANDBOX_LABEL] == sandbox_id
        assert labels.get(PROGRAM_LABEL, "") == program_id
        assert is_for_us(labels, owner)
        assert not is_for_us(labels, Owner(owner_id + "x", owner_id))
    assert NAME.fullmatch(made["metadata"]["name"])


def test_names_are_readable_where_they_can_be() -> None:
    """A sandbox is named by its id, unless that is no valid name."""
    assert sandbox_name("3f2a") == "thunderagent-3f2a"
    assert NAME.fullmatch(sandbox_name("Not A Name"))
    assert sandbox_name("Not A Name") != sandbox_name("not a name")


def test_a_hash_cannot_be_claimed() -> None:
    """A program whose id equals another one's hash is still another one."""
    assert label_value(PROGRAM_LABEL, "x") != label_value(PROGRAM_LABEL, label_value(PROGRAM_LABEL, "x"))


def test_a_label_of_a_user_is_taken_as_it_is() -> None:
    """Given pods have the plain value, or an annotation with what a label cannot hold."""
    pod = {"metadata": {"labels": {PROGRAM_LABEL: "plain", "app": "x"}}}
    assert truth(pod) == {PROGRAM_LABEL: "plain"}
    pod["metadata"]["annotations"] = {PROGRAM_LABEL: "with spaces", "other": "y"}
    assert truth(pod) == {PROGRAM_LABEL: "with spaces"}
    assert is_for_us(truth(pod), OWNER)
    assert not is_for_us({}, OWNER)


@pytest.mark.parametrize(
    "handle",
    ["", "job", "job/a", "job/a/b/c", "set/a/b", "job//b", "job/a/", "pod/a/..", "pod/../b", "job/a/b?x", "job/A/b"],
)
def test_broken_handle_is_refused(handle: str) -> None:
    """A handle becomes a path: nothing that would lead to another one is accepted."""
    with pytest.raises(SandboxRefusedError):
        Ref.parse(handle)


def test_handles_and_paths_are_parsed() -> None:
    """A handle reads back unchanged, and leads to the object's path in the API."""
    ref = Ref.parse("job/space/thunderagent-a1")
    assert (ref, ref.handle) == (Ref("job", "space", "thunderagent-a1"), "job/space/thunderagent-a1")
    assert ref.resource.path(ref.namespace, ref.name) == "/apis/batch/v1/namespaces/space/jobs/thunderagent-a1"
    assert Resource("Pod", "v1", "pods").path("space") == "/api/v1/namespaces/space/pods"


# --- networks ---------------------------------------------------------------------------------------------------------


def test_which_sandboxes_share_a_network() -> None:
    """Those of one program do; a warm one is alone; the cluster's own network needs no policy."""
    own = [network_of(order(sandbox_id, "p", network="own")) for sandbox_id in ("a", "b")]
    warm = [network_of(order(sandbox_id, "", network="own")) for sandbox_id in ("a", "b")]
    assert own[0] == own[1]
    assert len({*own, *warm, network_of(order(network="none")), network_of(order())}) == 5
    assert network_of(order()) == ""


def test_no_network_allows_nothing() -> None:
    """Both directions have rules, and none lets anything through, not even declared ports."""
    spec = policy_manifest(order(network="none", ports=(80,)), OWNER, "space")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(spec)


def test_a_network_of_its_own_lets_in_each_other_and_callers() -> None:
    """Other sandboxes are kept out, even from the ports; all other callers reach the ports."""
    made = order(network="own", ports=(80,))
    policy = policy_manifest(made, OWNER, "space")
    sandbox = sandbox_manifest(made, OWNER, "space", ttl_s=1)
    members = policy["spec"]["podSelector"]
    assert members["matchLabels"].items() <= sandbox["spec"]["template"]["metadata"]["labels"].items()
    assert policy["metadata"]["labels"][NETWORK_LABEL] == network_of(made)
    among, ports = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": members}]}
    assert ports["from"][0]["podSelector"] == {
        "matchExpressions": [{"key": SANDBOX_LABEL, "operator": "DoesNotExist"}],
    }
    assert ports["ports"] == [{"protocol": "TCP", "port": 80}]


def test_changed_ports_change_the_network_policy() -> None:
    """Sandboxes of one program may differ in their ports: each set has its policy, under the same selector."""
    orders = [order(network="own", ports=ports) for ports in ((), (80,), (80, 90), (90, 80))]
    names = [policy_manifest(each, OWNER, "space")["metadata"]["name"] for each in orders]
    assert len(set(names)) == 3
    assert names[2] == names[3]
    assert all(NAME.fullmatch(name) for name in names)


def test_the_selector_of_what_is_ours() -> None:
    """The selector matches the labels."""
    made = sandbox_manifest(order(network="own"), OWNER, "space", ttl_s=1)
    labels = made["metadata"]["labels"]
    selector = f"{OWNER_LABEL}={labels[OWNER_LABEL]},{NETWORK_LABEL}={labels[NETWORK_LABEL]}"
    assert owned_selector(OWNER, labels[NETWORK_LABEL]) == selector


# --- scripts, in a real shell -----------------------------------------------------------------------------------------


def expand(text: str) -> str:
    """Expand a word as Kubernetes does, without any variables."""
    return re.sub(r"\$(\$)|\$\([^)]*\)", lambda match: match[1] or match[0], text)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=20, check=False)


@given(st.text("$()ab{} ", max_size=20))
def test_kubernetes_leaves_literal_text_as_it_was(text: str) -> None:
    """No dollar sign of ours is read as a reference to a variable."""
    assert expand(literal(text)) == text


def test_setup_runs_in_order_and_then_the_command_takes_over(tmp_path: Path) -> None:
    """Each setup command has its own shell; the command gets its arguments unchanged."""
    marker = tmp_path / "set up"
    template = Template(
        image="i",
        setup=("X=1; echo first $(echo $X)", "echo \"second '$X'\"; test ! -e 'set up'"),
        command=("printf", "%s|", "a b", "$HOME", "'"),
    )
    ended = run(start_command(template, str(marker)), tmp_path)
    assert (ended.stdout, ended.returncode) == ("first 1\nsecond ''\na b|$HOME|'|", 0)
    assert marker.exists()


def test_the_first_setup_command_that_fails_is_the_last(tmp_path: Path) -> None:
    """The sandbox has its status; nothing else runs, and it never counts as ready."""
    template = Template(image="i", setup=("exit 7", "touch second"), command=("touch", "third"))
    marker = tmp_path / "marker"
    assert run(start_command(template, str(marker)), tmp_path).returncode == 7
    assert list(tmp_path.iterdir()) == []
    assert run(ready_command(template, str(marker)), tmp_path).returncode != 0


def test_without_setup_a_command_needs_no_shell() -> None:
    """An image with only its program can run."""
    template = Template(image="i", command=("/app",))
    assert (start_command(template), ready_command(template)) == (["/app"], [])


def test_without_a_command_it_waits_and_stops_when_asked(tmp_path: Path) -> None:
    """A waiting sandbox ends at once on SIGTERM, which the first process of a pod by itself would not do."""
    script = start_command(Template(image="i"))
    with subprocess.Popen(script, cwd=tmp_path, start_new_session=True) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.terminate()
            assert process.wait(5) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its waiting child, which in a pod ends with the first process


def test_ready_is_set_up_and_says_so(tmp_path: Path) -> None:
    """The check needs both: the mark of the setup, and the template's own command."""
    marker = tmp_path / "marker"
    template = Template(image="i", setup=("true",), ready_command="test -e a || test -e b")
    command = ready_command(template, str(marker))
    (tmp_path / "b").touch()
    assert run(command, tmp_path).returncode != 0
    marker.touch()
    assert run(command, tmp_path).returncode == 0
    (tmp_path / "b").unlink()
    assert run(command, tmp_path).returncode != 0


@pytest.mark.parametrize(
    ("template", "startup", "readiness"),
    [
        ({}, None, None),
        ({"setup": ("x",)}, "exec", None),
        ({"ready_command": "x"}, "exec", None),
        ({"ready_port": 80, "ports": (80,)}, "tcpSocket", None),
        ({"ready_command": "x", "ready_port": 80, "ports": (80,)}, "exec", "tcpSocket"),
    ],
)
def test_probes_are_translated(template: dict[str, Any], startup: str | None, readiness: str | None) -> None:
    """They decide when it is usable: one check until it succeeds, or both."""
    main = main_of(manifest(ready_interval_s=0.2, prepare_timeout_s=100, **template))
    for name, kind in (("startupProbe", startup), ("readinessProbe", readiness)):
        assert (kind is None) == (name not in main)
        if kind is not None:
            assert kind in main[name]
            assert main[name]["periodSeconds"] == 1
    if startup is not None:
        assert main["startupProbe"]["failureThreshold"] > 100


def test_the_mark_of_a_setup_has_a_place(tmp_path: Path) -> None:
    """It is in its own volume, which every user of every image may write to."""
    made = manifest(setup=("true",), kubernetes_kind="pod")
    [mount] = main_of(made)["volumeMounts"]
    assert made["spec"]["volumes"] == [{"name": "thunderagent", "emptyDir": {}}]
    assert f"{mount['mountPath']}/" in main_of(made)["command"][2]
    assert f"{mount['mountPath']}/" in main_of(made)["startupProbe"]["exec"]["command"][2]


# --- States of a pod --------------------------------------------------------------------------------------------------


def pod(phase: str = "Pending", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "x", "namespace": "space"}, "status": {"phase": phase, **status}}


def waiting(reason: str) -> dict[str, Any]:
    return pod(containerStatuses=[{"state": {"waiting": {"reason": reason, "message": "the words"}}}])


def ready(status: str) -> list[dict[str, str]]:
    return [{"type": "Ready", "status": status}]


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"])
def test_an_image_that_is_missing(reason: str) -> None:
    """Each of these reasons is the same error."""
    fault = fault_of(waiting(reason))
    assert isinstance(fault, SandboxImageError)
    assert str(fault) == f"{reason}: the words"


@pytest.mark.parametrize("reason", ["Evicted", "OutOfmemory", "OutOfcpu", "OutOfpods", "Preempting"])
def test_pod_without_room_is_recognised(reason: str) -> None:
    """The node has no room for what it has begun."""
    assert isinstance(fault_of(pod("Failed", reason=reason, message="m")), SandboxSpaceError)


@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "RunContainerError", "CreateContainerConfigError"])
def test_a_pod_that_cannot_start(reason: str) -> None:
    """These never run, however long one waits."""
    assert isinstance(fault_of(waiting(reason)), SandboxSetupError)


def test_a_pod_that_failed_says_what_it_left() -> None:
    """The error has the reason, status and last words of its process."""
    terminated = {"reason": "OOMKilled", "exitCode": 137, "message": " last words\n"}
    failed = pod("Failed", containerStatuses=[{"state": {"terminated": terminated}}])
    assert str(fault_of(failed)) == end_of("pod", failed) == "OOMKilled, exit status 137: last words"
    assert end_of("pod", pod("Failed")) == "Failed"


@pytest.mark.parametrize(
    ("state", "words", "is_for_room"),
    [
        (pod(), "it has not been started yet", False),
        (waiting("ContainerCreating"), "ContainerCreating: the words", False),
        (pod("Running"), "it runs, but is not ready", False),
        (
            pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}]),
            "Unschedulable: full",
            True,
        ),
    ],
)
def test_a_pod_that_may_yet_become_ready(state: dict[str, Any], words: str, *, is_for_room: bool) -> None:
    """It has no fault, and says what it waits for."""
    assert fault_of(state) is None
    assert delay_of(state) == (words, is_for_room)
    assert not end_of("pod", state)
    assert not is_ready(state)


def test_a_pod_that_is_ready() -> None:
    """It runs, has an address, is ready, and is not being removed."""
    state = pod("Running", podIP="10.0.0.1", conditions=ready("True"))
    assert is_ready(state)
    assert address_of(state) == "10.0.0.1"
    assert not is_ready(pod("Running", podIP="10.0.0.1", conditions=ready("False")))
    assert not is_ready(pod("Running", conditions=ready("True")))
    state["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not is_ready(state)
    assert end_of("pod", state) == "removed"
    assert isinstance(fault_of(state), SandboxSetupError)


def test_job_reports_how_it_ends() -> None:
    """Its conditions show it: since 1.31 before its pods are gone, which takes longer than the wait for a reason."""
    for name in ("FailureTarget", "SuccessCriteriaMet", "Failed", "Complete"):
        condition = {"type": name, "status": "True", "reason": "DeadlineExceeded"}
        assert end_of("job", {"metadata": {}, "status": {"conditions": [condition]}}) == "DeadlineExceeded"
    job = {"metadata": {}, "status": {"conditions": [{"type": "Suspended", "status": "True"}]}}
    assert end_of("job", job) == ""
    job["status"]["conditions"].append(
        {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "m"}
    )
    assert end_of("job", job) == "DeadlineExceeded: m"
    assert end_of("job", {"metadata": {}}) == ""


def test_a_pod_belongs_to_its_job() -> None:
    """The reference of its controller counts, and no other owner."""
    state = pod()
    assert ref_of("pod", state) == Ref("pod", "space", "x")
    reference = {"kind": "Job", "name": "j", "uid": "u"}
    state["metadata"]["ownerReferences"] = [reference]
    assert ref_of("pod", state) == Ref("pod", "space", "x")
    reference["controller"] = True
    assert ref_of("pod", state) == Ref("job", "space", "j")
