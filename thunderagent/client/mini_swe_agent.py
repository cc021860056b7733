"""An environment of mini-SWE-agent: the sandbox that the proxy prepares for its program, instead of one of its own.

    environment:
      environment_class: thunderagent.client.mini_swe_agent.SandboxEnvironment
      template: coder

It asks for the sandbox when it is made, so that the proxy prepares it while the first turn waits, and waits for it at
the first command. The proxy removes it with the program: the environment removes nothing.
"""

from __future__ import annotations

from typing import Any

from minisweagent.environments.docker import DockerEnvironment, DockerEnvironmentConfig

from thunderagent.client.errors import ClientError
from thunderagent.client.program import SANDBOX_TIMEOUT_S
from thunderagent.client.program_sandbox import ProgramSandbox


class SandboxEnvironmentConfig(DockerEnvironmentConfig):  # type: ignore[misc]  # the package is the agent's own
    """As of the package's Docker environment; what makes a container has no effect: `image`, `run_args`."""

    image: str = ""
    program_id: str = ""
    """Whose sandbox; by default `THUNDERAGENT_PROGRAM_ID` of the environment."""
    proxy: str = ""
    """By default `THUNDERAGENT_PROXY` of the environment, or `http://127.0.0.1:8300`."""
    template: str = ""
    """What to ask for; by default nothing: the program has a sandbox by its class, or was opened with one."""
    sandbox_id: str = ""
    """Which of the program's sandboxes; by default the first that is usable."""
    sandbox_timeout_s: float = SANDBOX_TIMEOUT_S
    """How long the first command waits for it, in seconds."""


class SandboxEnvironment(DockerEnvironment):  # type: ignore[misc]  # the package is the agent's own
    """Runs commands in the Docker sandbox of a program."""

    def __init__(self, *, config_class: type = SandboxEnvironmentConfig, **kwargs: Any) -> None:
        """Ask for the sandbox if a template is given. Raises `ClientError`, `ValueError` without a program."""
        self.container_id: str | None = None
        super().__init__(config_class=config_class, **kwargs)

    @property
    def wait_s(self) -> float:
        """Return how long the first command waited for the sandbox, in seconds."""
        return self._sandbox.wait_s

    def _start_container(self) -> None:
        """Ask for a sandbox instead, and wait for nothing."""
        self._sandbox = ProgramSandbox(
            program_id=self.config.program_id,
            proxy=self.config.proxy,
            template=self.config.template,
            sandbox_id=self.config.sandbox_id,
            timeout_s=self.config.sandbox_timeout_s,
        )
        self._sandbox.request()

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command in the sandbox; the first one waits for it. Raises `ClientError`, and what ends an agent."""
        if self.container_id is None:
            sandbox = self._sandbox.wait()
            if sandbox["driver"] != "docker" or not sandbox["handle"]:
                raise ClientError(f"the sandbox {sandbox['sandbox_id']} is no Docker container: {sandbox['driver']}")
            self.container_id = sandbox["handle"]
        output: dict[str, Any] = super().execute(action, cwd, timeout=timeout)
        return output

    def cleanup(self) -> None:
        """Leave the sandbox to the proxy, which removes it with its program."""
