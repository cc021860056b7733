"""Which Kubernetes cluster is meant, and with whose rights it is asked: for pods that are replicas, and sandboxes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kubernetes import client, config

LEAST_VERSION = (1, 22)
"""Since then the pod of a Deployment that ends can be chosen, and finished Jobs are removed after their time."""


def version_problem(answer: object) -> str:
    """Say what is wrong with a cluster that answers this to `/version`; empty if nothing is, or it cannot be told."""
    found = answer if isinstance(answer, dict) else {}
    # Some clusters append letters, as in 27+.
    numbers = [re.match(r"\d+", str(found.get(name) or "")) for name in ("major", "minor")]
    version = tuple(int(number[0]) for number in numbers if number is not None)
    if len(version) < len(numbers) or version >= LEAST_VERSION:
        return ""
    return "Kubernetes {}.{} is older than {}.{}, the least version".format(*version, *LEAST_VERSION)


def cluster_configuration(api_url: str, kubeconfig: Path | None) -> Any:
    """Return the configuration of the `kubernetes` package for a cluster.

    It is at the URL if there is one, else as the file says, else the one that we are a pod of, else as kubectl's own
    file says. Raises `config.ConfigException` if none of them says anything. Reads files: call it on a thread.
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
    return configuration
