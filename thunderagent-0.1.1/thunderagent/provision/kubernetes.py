"""Replicas that are pods of a Deployment or a StatefulSet, by scaling it.

The source of replicas that watches the pods finds their URLs. When a Deployment is scaled down, Kubernetes chooses the
pod with the lowest deletion cost, so that is set first. In a StatefulSet it is always the one with the highest number,
so no other can be ended.

A size may have been set although no answer came. When the end of a replica is tried again, its pod may therefore be
ending: setting a smaller size would end another one. And what the next start wants may be there already.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from thunderagent.backends.discovery.base import PodSelection
from thunderagent.backends.discovery.kubernetes import Cluster, ClusterAccess, RefusedError, connected, url_of
from thunderagent.errors import ConfigurationError, DiscoveryError, ProvisionError
from thunderagent.provision.base import Launched, OnLost, ReplicaGoneError

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-2147483647"
KINDS = {"deployment": "deployments", "statefulset": "statefulsets"}


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload to scale."""

    namespace: str
    kind: str
    name: str

    @classmethod
    def read(cls, text: str) -> Workload:
        """Read `NAMESPACE/deployment/NAME`, or with `statefulset`. Raises `ConfigurationError`."""
        parts = text.strip().split("/")
        if len(parts) != 3 or not all(parts) or parts[1].lower() not in KINDS:
            raise ConfigurationError(f"provision_workload: {text!r} is not NAMESPACE/deployment/NAME, nor statefulset")
        return cls(parts[0], parts[1].lower(), parts[2])

    @property
    def path(self) -> str:
        """Return where the API has it."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/{KINDS[self.kind]}/{self.name}"


class KubernetesProvisioner:
    """Scale a workload."""

    name = "kubernetes"
    names_urls = False

    def __init__(self, workload: Workload, selection: PodSelection, access: ClusterAccess) -> None:
        """Scale `workload`, whose pods are those of `selection` that have its name."""
        self._workload = workload
        self._selection = selection
        self._access = access
        self._resizing = asyncio.Lock()
        """Held from reading the size to setting it: several may start and end at a time."""
        self._unsure_urls: set[str] = set()
        """Of replicas for whose end a size was set, but not answered."""
        self._unsure_size_count = 0
        """The size that a start set without an answer; 0 if there is none."""

    def __repr__(self) -> str:
        return f"<KubernetesProvisioner {self._workload}>"

    async def open(self) -> int:
        """See `Provisioner`: the workload keeps its size when the proxy restarts.

        Refuses a Deployment if the cluster has no deletion cost: another pod than the drained one would end.
        """
        try:
            async with connected(self._access) as cluster:
                size_count = await self._size(cluster)
                if self._workload.kind == "deployment" and (problem := await cluster.problem()):
                    raise ProvisionError(f"{problem}: the pod of a Deployment that ends cannot be chosen there")
                return size_count
        except DiscoveryError as error:
            raise ProvisionError(error.message) from error

    async def run(self, on_lost: OnLost) -> None:
        """See `Provisioner`: Kubernetes itself replaces pods that end."""

    async def start(self) -> Launched:
        """See `Provisioner`."""
        try:
            async with self._resizing, connected(self._access) as cluster:
                size_count = await self._size(cluster)
                if not 0 < self._unsure_size_count <= size_count:
                    before_count, self._unsure_size_count = self._unsure_size_count, size_count + 1
                    try:
                        await self._resize(cluster, size_count + 1)
                    except RefusedError:
                        self._unsure_size_count = before_count
                        raise
                self._unsure_size_count = 0
        except DiscoveryError as error:
            raise ProvisionError(error.message) from error
        return Launched("")

    async def check_end(self, handle: str, url: str) -> None:  # noqa: ARG002 - pods are known by their addresses
        """See `Provisioner`."""
        try:
            async with connected(self._access) as cluster:
                await self._endable(cluster, url)
        except DiscoveryError as error:
            raise ProvisionError(error.message) from error

    async def end(self, handle: str, url: str) -> None:  # noqa: ARG002 - as above
        """See `Provisioner`."""
        try:
            async with self._resizing, connected(self._access) as cluster:
                pod, size_count = await self._endable(cluster, url)
                if self._workload.kind == "deployment":
                    cost = {"metadata": {"annotations": {DELETION_COST: LOWEST_COST}}}
                    await cluster.ask("PATCH", f"{_pods(self._workload)}/{pod}", cost)
                is_first = url not in self._unsure_urls
                self._unsure_urls.add(url)
                try:
                    await self._resize(cluster, size_count - 1)
                except RefusedError:
                    if is_first:
                        self._unsure_urls.discard(url)
                    raise
        except ReplicaGoneError:
            if url not in self._unsure_urls:
                raise
        except DiscoveryError as error:
            raise ProvisionError(error.message) from error
        self._unsure_urls.discard(url)
        self._unsure_size_count = max(0, self._unsure_size_count - 1)

    async def _endable(self, cluster: Cluster, url: str) -> tuple[str, int]:
        """Return the pod at a URL, and the number of pods. Raises `ProvisionError` if it cannot be the one to go."""
        size_count, there_count = await self._sizes(cluster)
        pod = await self._pod_at(cluster, url)
        if pod is None:
            raise ReplicaGoneError(f"no pod of {self._workload.name} is at {url}")
        if url in self._unsure_urls and there_count > size_count:
            raise ProvisionError(f"{self._workload.name} is being scaled down: it may be {pod} that ends")
        last = f"{self._workload.name}-{size_count - 1}"
        if self._workload.kind == "statefulset" and pod != last:
            raise ProvisionError(f"of a StatefulSet only the last pod can end, {last}, and not {pod}")
        return pod, size_count

    async def close(self) -> None:
        """See `Provisioner`: the workload does not belong to the proxy, and stays."""

    async def _size(self, cluster: Cluster) -> int:
        return (await self._sizes(cluster))[0]

    async def _sizes(self, cluster: Cluster) -> tuple[int, int]:
        """Return how many pods there should be, and how many there are."""
        scale = await cluster.ask("GET", f"{self._workload.path}/scale")
        wanted_count = (scale.get("spec") or {}).get("replicas", 0)
        there_count = (scale.get("status") or {}).get("replicas", wanted_count)
        if not isinstance(wanted_count, int) or not isinstance(there_count, int):
            raise DiscoveryError("the Kubernetes API gave an unexpected answer: a scale without a number")
        return wanted_count, there_count

    async def _resize(self, cluster: Cluster, size_count: int) -> None:
        await cluster.ask("PATCH", f"{self._workload.path}/scale", {"spec": {"replicas": size_count}})

    async def _pod_at(self, cluster: Cluster, url: str) -> str | None:
        """Return the name of the pod at a URL, if it is one of the workload's and not ending."""
        pods, _ = await cluster.list(self._selection)
        for pod in pods:
            name = str(pod["metadata"]["name"])
            is_at = url_of(pod, self._selection.port) == url and "deletionTimestamp" not in pod["metadata"]
            if is_at and name.startswith(f"{self._workload.name}-"):
                return name
        return None


def _pods(workload: Workload) -> str:
    return f"/api/v1/namespaces/{workload.namespace}/pods"
