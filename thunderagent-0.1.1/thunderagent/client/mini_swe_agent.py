"""An environment of mini-SWE-agent: the sandbox that the proxy prepares for its program, instead of one of its own.

    environment:
      environment_class: thunderagent.client.mini_swe_agent.SandboxEnvironment
      template: coder

It asks for the sandbox when it is made, so that the proxy prepares it while the first turn waits, and waits for it at
the first command. The proxy removes it with the program: the environment removes nothing.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

from minisweagent.environments.docker import DockerEnvironment, DockerEnvironmentConfig

from thunderagent.client.program import SANDBOX_TIMEOUT_S
from thunderagent.client.program_sandbox import ProgramSandbox


class SandboxEnvironmentConfig(DockerEnvironmentConfig):  # type: ignore[misc]  # the package is the agent's own
    """As of the package's Docker environment; `image`, `run_args` and `executable`, which make one, have no effect."""

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
    """Runs commands in the sandbox of a program: a container, or a pod."""

    def __init__(self, *, config_class: type = SandboxEnvironmentConfig, **kwargs: Any) -> None:
        """Ask for the sandbox if a template is given. Raises `ClientError`, `ValueError` without a program."""
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
        forwarded = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        self._sandbox.wait()
        try:
            done = self._sandbox.run(
                [*self.config.interpreter, action.get("command", "")],
                cwd=cwd or self.config.cwd,
                env={**forwarded, **self.config.env},
                timeout_s=timeout or self.config.timeout,
                merges_output=True,
            )
        except TimeoutError as error:  # said to the model in the package's own words
            cause = error.__cause__
            written = cause.output if isinstance(cause, subprocess.TimeoutExpired) else None
            output = {
                "output": (written or b"").decode(errors="replace"),
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {error}",
                "extra": {"exception_type": "TimeoutExpired", "exception": str(error)},
            }
        else:
            output = {"output": done.text, "returncode": done.exit_code, "exception_info": ""}
        self._check_finished(output)
        return output

    def cleanup(self) -> None:
        """Leave the sandbox to the proxy, which removes it with its program."""
