"""Builds the provisioning from the configuration, and connects it with the proxy."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from thunderagent.backends.discovery import wanted_of
from thunderagent.backends.discovery.base import PodSelection
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.provision.base import Provisioner
from thunderagent.provision.command import CommandProvisioner
from thunderagent.provision.manager import HEARS, Provisioning, ProvisionSettings
from thunderagent.proxy.fleet.discovery import Discovery
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime

SOURCE = "provision"
"""The source of the replicas that were started here."""


@dataclass(frozen=True, slots=True)
class ProxyFleet:
    """The proxy's replicas as `thunderagent.provision.manager.Fleet`."""

    replicas: Replicas
    discovery: Discovery

    def wanted(self, urls: Sequence[str]) -> None:
        """See `Fleet`."""
        self.discovery.replicas_wanted(SOURCE, [wanted_of(url) for url in urls])

    def url_of(self, replica_id: str) -> str | None:
        """See `Fleet`."""
        known = self.replicas.known.get(replica_id)
        return known.endpoint.url if known is not None else None

    def knows(self, url: str) -> bool:
        """See `Fleet`."""
        return bool(self.discovery.ids_at(url))

    def is_up(self, url: str) -> bool:
        """See `Fleet`."""
        return any(self.replicas.known[replica_id].is_up for replica_id in self.discovery.ids_at(url))

    def leave(self, url: str) -> None:
        """See `Fleet`."""
        for replica_id in self.discovery.ids_at(url):
            self.discovery.remove(replica_id)


def build_provisioning(config: ServeConfig, runtime: Runtime, replicas: Replicas, discovery: Discovery) -> Provisioning:
    """Create the provisioning, and connect it to decisions. Raises `ConfigurationError`."""
    if config.provision_min > config.provision_max:
        raise ConfigurationError(
            f"provision_min is {config.provision_min}, over provision_max, which is {config.provision_max}: set both"
        )
    settings = ProvisionSettings(
        min_count=config.provision_min if config.provision else 0,
        max_count=config.provision_max,
        cooldown_s=config.provision_cooldown_s,
        ready_limit_s=config.provision_ready_limit_s,
    )
    fleet = ProxyFleet(replicas, discovery)
    provisioning = Provisioning(_driver(config), fleet, settings, runtime.now_s, lambda: runtime.stands_by)
    runtime.observe(provisioning.observe, *HEARS)
    return provisioning


def _driver(config: ServeConfig) -> Provisioner | None:
    if not config.provision:
        return None
    if config.provision == "command":
        return CommandProvisioner(
            config.provision_command,
            config.provision_url,
            end_limit_s=config.provision_end_limit_s,
            log_folder=config.provision_log_folder,
        )
    try:
        if config.provision == "docker":
            from thunderagent.provision.docker import DockerProvisioner, ReplicaImage  # noqa: PLC0415 - needs an extra

            image = ReplicaImage(
                config.provision_image,
                config.provision_command,
                config.provision_url,
                config.provision_port,
                config.provision_network,
                config.provision_gpus,
                config.provision_volumes,
            )
            owner = config.sandbox_owner or f"{socket.gethostname()}:{config.port}"
            return DockerProvisioner(
                image, owner=owner, docker_url=config.docker_url, end_limit_s=config.provision_end_limit_s
            )
        from thunderagent.backends.discovery.kubernetes import ClusterAccess  # noqa: PLC0415 - needs an extra
        from thunderagent.provision.kubernetes import KubernetesProvisioner, Workload  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"provision {config.provision}: install thunderagent with the extra `{config.provision}`"
        ) from error
    if not config.kubernetes_replicas:
        raise ConfigurationError("provision kubernetes: needs kubernetes_replicas, which finds the pods")
    access = ClusterAccess(config.kubernetes_config, config.kubernetes_url)
    return KubernetesProvisioner(
        Workload.read(config.provision_workload), PodSelection.read(config.kubernetes_replicas), access
    )
