"""Sandboxes on a Docker engine."""

from thunderagent.tools.docker.driver import DockerDriver

__all__ = ["DockerDriver"]
