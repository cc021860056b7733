"""A real cluster for the whole session, and a namespace for each test, with an account that has the proxy's rights."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import yaml

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.lab import FOLDER_VARIABLE, PROGRAMS_VARIABLE
from tests.kubernetes.parts import PAUSE_IMAGE, PROXY_IMAGES, SANDBOX_IMAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/kubernetes"
ACCOUNT = "thunderagent"
POD_SECURITY_VERSION = (1, 23)
"""From this version on labels of namespaces restrict their pods; before, PodSecurityPolicies did."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests here; no test's time includes the start of the cluster."""
    for item in items:
        if "tests/kubernetes/" in item.path.as_posix():
            item.add_marker(pytest.mark.kubernetes)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(420, func_only=True))


@dataclass(frozen=True)
class Access:
    """A cluster with its administrator's access."""

    kubeconfig: Path
    sandbox_image: str
    proxy_images: tuple[str, ...]
    lab: Cluster | None
    """The tests' own cluster; None if the cluster is external."""

    def kubectl(self, *arguments: str, given: object = None) -> str:
        """Run kubectl and return its output; `given` are manifests for its standard input."""
        text = None
        if given is not None:
            text = yaml.safe_dump_all(given) if isinstance(given, list) else yaml.safe_dump(given)
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def read(self, *arguments: str) -> Any:
        """Return the parsed output of `kubectl get`."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    @property
    def version(self) -> tuple[int, int]:
        """Return the server's version."""
        said = json.loads(self.kubectl("version", "--output=json"))["serverVersion"]
        return int(said["major"]), int(said["minor"].rstrip("+"))


@dataclass(frozen=True)
class Namespace:
    """A namespace of one test, with the account `thunderagent`."""

    name: str
    access: Access
    kubeconfig: Path
    """The account's kubeconfig."""

    def kubectl(self, *arguments: str, given: object = None) -> str:
        """Run kubectl in this namespace, as the administrator."""
        return self.access.kubectl(f"--namespace={self.name}", *arguments, given=given)

    def read(self, *arguments: str) -> Any:
        """Return the parsed output of `kubectl get` in this namespace."""
        return self.access.read(f"--namespace={self.name}", *arguments)

    def names(self, kind: str) -> list[str]:
        """Return the names of all objects of a kind."""
        return [each["metadata"]["name"] for each in self.read(kind)["items"]]


async def until_it_says(condition: Callable[[], object], *, within_s: float) -> None:
    """Poll the cluster for a condition, rarely enough to leave it the processor time to reach it.

    Raises TimeoutError.
    """
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.5)


@pytest.fixture(scope="session")
def access(require_real: Callable[[str], NoReturn], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """The cluster that KUBECONFIG names, or else a private one."""
    image = os.environ.get("KUBERNETES_TEST_IMAGE", "busybox:1.36")
    proxy_images = tuple(each for each in os.environ.get("KUBERNETES_TEST_PROXY_IMAGES", "").split(",") if each)
    if os.environ.get("KUBECONFIG"):  # KUBECONFIG may name several files, or have relative paths
        whole = tmp_path_factory.mktemp("administrator") / "kubeconfig"
        whole.touch(0o600)
        command = ["kubectl", "config", "view", "--raw", "--minify", "--flatten"]
        whole.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
        access = Access(whole, image, proxy_images, None)
        print(f"\nKubernetes {access.version}, named by KUBECONFIG")
        yield access
        return
    if not (at := os.environ.get(FOLDER_VARIABLE)):
        require_real("no Kubernetes: run scripts/test --kubernetes, or set KUBECONFIG")
    folder = Path(at)
    cluster = Cluster(folder, Path(os.environ[PROGRAMS_VARIABLE]), cgroup=folder.name)
    try:
        cluster.start(sorted(folder.glob("image-*.tar")), PAUSE_IMAGE)
        access = Access(cluster.kubeconfig, SANDBOX_IMAGE, PROXY_IMAGES, cluster)
        print(f"\nKubernetes {access.version}, started by the tests")
        access.kubectl("apply", "--filename=-", given=policies())
        yield access
    finally:
        cluster.stop()


@pytest.fixture
def namespace(access: Access, tmp_path: Path) -> Iterator[Namespace]:
    """A namespace without limits on its pods."""
    yield from namespace_of(access, tmp_path, "privileged")


@pytest.fixture
def restricted(access: Access, tmp_path: Path) -> Iterator[Namespace]:
    """A namespace that admits only pods of the standard `restricted`."""
    yield from namespace_of(access, tmp_path, "restricted")


def namespace_of(access: Access, folder: Path, standard: str, name: str = "") -> Iterator[Namespace]:
    """Make a namespace and its account; remove it afterwards with all its objects."""
    name = name or f"thunderagent-test-{secrets.token_hex(3)}"
    labels = {f"pod-security.kubernetes.io/{mode}": standard for mode in ("enforce", "warn")}
    access.kubectl(
        "create",
        "--filename=-",
        given={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    made = Namespace(name, access, folder / f"{name}.kubeconfig")
    try:
        if access.lab is not None:
            group = f"--group=system:serviceaccounts:{name}"
            made.kubectl("create", "rolebinding", "psp", f"--clusterrole=psp-{standard}", group)
        for file in ("service-account", "sandboxes-rbac", "replicas-rbac", "leases-rbac"):
            text = (DEPLOY / f"{file}.yaml").read_text().replace("namespace: default", f"namespace: {name}")
            made.kubectl("apply", "--filename=-", given=list(yaml.safe_load_all(text)))
        settings = json.loads(access.kubectl("config", "view", "--raw", "--minify", "--flatten", "--output=json"))
        token = made.kubectl("create", "token", ACCOUNT, "--duration=2h").strip()
        settings["users"] = [{"name": each["name"], "user": {"token": token}} for each in settings["users"]]
        made.kubeconfig.write_text(json.dumps(settings))
        yield made
    finally:
        access.kubectl("delete", "namespace", name, "--timeout=120s")


def policies() -> list[Json]:
    """Return PodSecurityPolicies for both standards: the tests' own cluster is older than the labels."""
    anything = {"rule": "RunAsAny"}
    shared = {"seLinux": anything, "supplementalGroups": anything, "fsGroup": anything}
    privileged = {
        **shared,
        "privileged": True,
        "allowPrivilegeEscalation": True,
        "allowedCapabilities": ["*"],
        "volumes": ["*"],
        "hostNetwork": True,
        "runAsUser": anything,
    }
    restricted = {
        **shared,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "requiredDropCapabilities": ["ALL"],
        "volumes": ["configMap", "emptyDir", "projected", "secret"],
        "runAsUser": {"rule": "MustRunAsNonRoot"},
    }
    seccomp = "seccomp.security.alpha.kubernetes.io/allowedProfileNames"
    found: list[Json] = []
    for name, spec, profiles in (("privileged", privileged, "*"), ("restricted", restricted, "runtime/default")):
        found.append(
            {
                "apiVersion": "policy/v1beta1",
                "kind": "PodSecurityPolicy",
                "metadata": {"name": name, "annotations": {seccomp: profiles}},
                "spec": spec,
            }
        )
        use = {"apiGroups": ["policy"], "resources": ["podsecuritypolicies"], "resourceNames": [name], "verbs": ["use"]}
        found.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": f"psp-{name}"},
                "rules": [use],
            }
        )
    return found
