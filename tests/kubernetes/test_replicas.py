"""Pods of a real cluster as replicas: found while they come and go, and scaled."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import until
from thunderagent.backends.discovery.base import PodSelection, Wanted
from thunderagent.backends.discovery.kubernetes import ClusterAccess, KubernetesSource
from thunderagent.cluster import LEAST_VERSION
from thunderagent.errors import ProvisionError
from thunderagent.provision.kubernetes import KubernetesProvisioner, Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.kubernetes.conftest import Namespace

Json = dict[str, Any]
WITHIN_S = 90.0
LABELS = {"app": "engine"}


class Heard:
    """The reports of a source."""

    def __init__(self) -> None:
        self.told: list[list[Wanted]] = []
        self.failures: list[str] = []

    def replicas_wanted(self, source: str, wanted: Sequence[Wanted]) -> None:
        self.told.append(list(wanted))

    def source_failed(self, source: str, why: str) -> None:
        self.failures.append(why)

    @property
    def urls(self) -> set[str]:
        """Return the URLs that should get turns now."""
        return {each.url for each in self.told[-1] if not each.is_draining} if self.told else set()


def selection(namespace: Namespace) -> PodSelection:
    return PodSelection.read(f"{namespace.name}/app=engine:http")


@asynccontextmanager
async def found_in(namespace: Namespace) -> AsyncIterator[Heard]:
    """Follow the engines there, with the rights of `replicas-rbac.yaml`."""
    heard = Heard()
    source = KubernetesSource(selection(namespace), ClusterAccess(namespace.kubeconfig), backoff_s=0.2)
    running = asyncio.create_task(source.run(heard))
    try:
        yield heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def workload(namespace: Namespace, kind: str, replicas_count: int = 1) -> Json:
    """Return engines that need some seconds to end."""
    container = {
        "name": "engine",
        "image": namespace.access.sandbox_image,
        "command": ["httpd", "-f", "-p", "8000"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 1},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "3"]}}},
    }
    spec: Json = {
        "replicas": replicas_count,
        "selector": {"matchLabels": LABELS},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 4},
        },
    }
    if kind == "StatefulSet":
        spec["serviceName"] = "engine"
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "engine"}, "spec": spec}


def urls_of_pods(namespace: Namespace) -> dict[str, str]:
    """Return the names of the pods that are not ending, by URL."""
    pods = [each for each in namespace.read("pods")["items"] if "deletionTimestamp" not in each["metadata"]]
    return {f"http://{each['status'].get('podIP')}:8000": each["metadata"]["name"] for each in pods}


async def test_pods_are_replicas_from_ready_to_gone(namespace: Namespace) -> None:
    """New pods are found when they are ready; ending pods drain first, and only then are gone."""
    async with found_in(namespace) as heard:
        await until(lambda: heard.told == [[]], within_s=WITHIN_S)
        namespace.kubectl("create", "--filename=-", given=workload(namespace, "Deployment"))
        await until(lambda: len(heard.urls) == 1, within_s=WITHIN_S)
        namespace.kubectl("scale", "deployment/engine", "--replicas=3")
        await until(lambda: len(heard.urls) == 3, within_s=WITHIN_S)
        assert heard.urls == set(urls_of_pods(namespace))
        before = len(heard.told)
        namespace.kubectl("scale", "deployment/engine", "--replicas=1")
        await until(lambda: len(heard.told[-1]) == 1, within_s=WITHIN_S)
        assert max(sum(each.is_draining for each in told) for told in heard.told[before:]) == 2
        assert heard.urls == set(urls_of_pods(namespace))
        assert heard.failures == []


@pytest.fixture
def scaler(namespace: Namespace) -> Namespace:
    """The account also has the rights for scaling that `docs/how-to/autoscale.md` names."""
    scales = {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale", "statefulsets/scale"],
        "verbs": ["get", "patch"],
    }
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "scaler"},
        "rules": [scales, {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}],
    }
    namespace.kubectl("create", "--filename=-", given=role)
    account = f"--serviceaccount={namespace.name}:thunderagent"
    namespace.kubectl("create", "rolebinding", "scaler", "--role=scaler", account)
    return namespace


def provisioner(namespace: Namespace, kind: str) -> KubernetesProvisioner:
    scaled = Workload(namespace.name, kind, "engine")
    return KubernetesProvisioner(scaled, selection(namespace), ClusterAccess(namespace.kubeconfig))


async def test_last_pod_of_a_stateful_set_ends(scaler: Namespace) -> None:
    """It is scaled up and down; a choice of any pod but the last is refused."""
    scaler.kubectl("create", "--filename=-", given=workload(scaler, "StatefulSet"))
    async with found_in(scaler) as heard:
        scales = provisioner(scaler, "statefulset")
        assert await scales.open() == 1
        await scales.start()
        await until(lambda: len(heard.urls) == 2, within_s=WITHIN_S)
        urls = {name: url for url, name in urls_of_pods(scaler).items()}
        with pytest.raises(ProvisionError, match="only the last pod can end, engine-1"):
            await scales.end("", urls["engine-0"])
        await scales.end("", urls["engine-1"])
        await until(lambda: heard.told[-1] == [Wanted(urls["engine-0"])], within_s=WITHIN_S)


async def test_chosen_pod_of_a_deployment_ends(scaler: Namespace) -> None:
    """This needs a cluster that can choose the pod; an older one is refused at the start, before any scaling."""
    scaler.kubectl("create", "--filename=-", given=workload(scaler, "Deployment", replicas_count=3))
    scales = provisioner(scaler, "deployment")
    if scaler.access.version < LEAST_VERSION:
        with pytest.raises(ProvisionError, match=r"older than .*, the least version: the pod of a Deployment"):
            await scales.open()
        return
    assert await scales.open() == 3
    async with found_in(scaler) as heard:
        await until(lambda: len(heard.urls) == 3, within_s=WITHIN_S)
        chosen = sorted(heard.urls)[1]
        staying = heard.urls - {chosen}
        await scales.end("", chosen)
        await until(lambda: {each.url for each in heard.told[-1]} == staying, within_s=WITHIN_S)
