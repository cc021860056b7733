"""Which Kubernetes cluster is meant, and with whose rights it is asked: for pods that are replicas, and sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubernetes import client, config


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
