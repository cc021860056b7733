"""Which Kubernetes cluster is meant, and with which credentials: for pods that are replicas, and sandboxes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.rest import should_bypass_proxies

LEAST_VERSION = (1, 22)
"""Since this version the Deployment's pod to end can be chosen, and finished Jobs are removed after their time."""


def version_problem(answer: object) -> str:
    """Return what is wrong with a cluster by its answer to `/version`; empty if nothing is, or it is unknown."""
    found = answer if isinstance(answer, dict) else {}
    # Some clusters append letters, such as 27+.
    numbers = [re.match(r"\d+", str(found.get(name) or "")) for name in ("major", "minor")]
    version = tuple(int(number[0]) for number in numbers if number is not None)
    if len(version) < len(numbers) or version >= LEAST_VERSION:
        return ""
    return "Kubernetes {}.{} is older than {}.{}, the least version".format(*version, *LEAST_VERSION)


def cluster_configuration(api_url: str, kubeconfig: Path | None) -> Any:
    """Return the configuration of the `kubernetes` package for a cluster.

    In order: the given URL, the given file, the cluster of our own pod, kubectl's default file. Raises
    `config.ConfigException` if none of them is usable. Reads files: call it on a thread.
    """
    configuration = client.Configuration()
    if api_url:
        configuration.host = api_url
        configuration.proxy = None
    elif kubeconfig is not None:
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
    else:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            config.load_kube_config(client_configuration=configuration)
    if configuration.proxy and should_bypass_proxies(configuration.host, no_proxy=None):
        configuration.proxy = None  # some versions of the package read HTTPS_PROXY and not NO_PROXY
    return configuration
