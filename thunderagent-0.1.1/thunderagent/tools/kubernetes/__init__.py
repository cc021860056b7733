"""Sandboxes on Kubernetes."""

from thunderagent.tools.kubernetes.driver import KubernetesDriver

__all__ = ["KubernetesDriver"]
