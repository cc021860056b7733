"""A workspace of OpenHands: the agent server in the sandbox that the proxy prepares for its program.

    workspace = SandboxWorkspace(program_id=..., template="openhands", working_dir="/work")

It asks for the sandbox when it is made, and its first request waits for it. The template's command is OpenHands' agent
server, because OpenHands runs an agent and its tools where the workspace's files are. The proxy removes the sandbox
with the program: the workspace removes nothing.
"""

from __future__ import annotations

from typing import Any

from openhands.sdk.workspace import RemoteWorkspace
from pydantic import PrivateAttr

from thunderagent.client.errors import ClientError
from thunderagent.client.program import SANDBOX_TIMEOUT_S
from thunderagent.client.program_sandbox import ProgramSandbox


class SandboxWorkspace(RemoteWorkspace):  # type: ignore[misc]  # the package is the agent's own
    """Runs OpenHands' commands in the sandbox of a program."""

    host: str = ""
    """The agent server's URL; found at the first request."""
    server_port: int = 8000
    """The agent server's port in the sandbox, one of the template's `ports`."""
    program_id: str = ""
    """Whose sandbox; by default `THUNDERAGENT_PROGRAM_ID` of the environment."""
    proxy: str = ""
    """By default `THUNDERAGENT_PROXY` of the environment, or `http://127.0.0.1:8300`."""
    template: str = ""
    """What to ask for; by default nothing: the program has a sandbox by its class, or was opened with one."""
    sandbox_id: str = ""
    """Which of the program's sandboxes; by default the first that is usable."""
    sandbox_timeout_s: float = SANDBOX_TIMEOUT_S
    """How long the first request waits for it, in seconds."""

    _sandbox: ProgramSandbox = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Ask for the sandbox if a template is given. Raises `ClientError`, `ValueError` without a program."""
        super().model_post_init(context)
        self._sandbox = ProgramSandbox(
            program_id=self.program_id,
            proxy=self.proxy,
            template=self.template,
            sandbox_id=self.sandbox_id,
            timeout_s=self.sandbox_timeout_s,
        )
        self._sandbox.request()

    @property
    def client(self) -> Any:
        """Return the client of the agent server; the first call waits for the sandbox. Raises `ClientError`."""
        if not self.host:
            sandbox = self._sandbox.wait()
            where = sandbox["ports"].get(str(self.server_port))
            if where is None:
                raise ClientError(f"port {self.server_port} of the sandbox is not among its template's ports")
            host, port = where
            self.host = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return super().client
