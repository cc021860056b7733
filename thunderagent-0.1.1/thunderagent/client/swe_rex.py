"""A deployment of SWE-ReX: the sandbox that the proxy prepares for its program, instead of one of its own.

    env = SWEEnv(deployment=SandboxDeployment(program_id=..., template="coder"), ...)

`start` asks for the sandbox, and the first command or file waits for it. The proxy removes it with the program: `stop`
ends the shells only. No server of SWE-ReX runs in the sandbox, which needs `bash`, `stty` and `tar`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pexpect
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from swerex.runtime.local import BashSession, LocalRuntime

from thunderagent.client.program_sandbox import ProgramSandbox

_STARTED = "THUNDERAGENT-SHELL-STARTS"
_START_LIMIT_S = 30.0


class SandboxDeployment(AbstractDeployment):  # type: ignore[misc]  # the package is the agent's own
    """Runs SWE-ReX' commands in the sandbox of a program."""

    def __init__(self, *, logger: logging.Logger | None = None, **sandbox: Any) -> None:
        """Make no request yet; `sandbox` is as in `ProgramSandbox`."""
        self.logger = logger or logging.getLogger("thunderagent.client")
        self._sandbox = ProgramSandbox(**sandbox)
        self._hooks = CombinedDeploymentHook()
        self._runtime: SandboxRuntime | None = None

    def add_hook(self, hook: DeploymentHook) -> None:
        """Call the hook's methods as the deployment proceeds."""
        self._hooks.add_hook(hook)

    async def start(self) -> None:
        """Ask for the sandbox if a template is given, and wait for nothing. Raises `ClientError`, `ValueError`."""
        self._hooks.on_custom_step("Asking for a sandbox")
        await asyncio.to_thread(self._sandbox.request)
        self._runtime = SandboxRuntime(self._sandbox, logger=self.logger)

    async def stop(self) -> None:
        """End the shells; leave the sandbox to the proxy, which removes it with its program."""
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109 - SWE-ReX' name
        """Return whether a command runs in the sandbox. Raises `DeploymentNotStartedError`."""
        return await self.runtime.is_alive(timeout=timeout)

    @property
    def runtime(self) -> SandboxRuntime:
        """Return what runs commands. Raises `DeploymentNotStartedError`."""
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


class SandboxRuntime(LocalRuntime):  # type: ignore[misc]  # the package is the agent's own
    """The package's own runtime, which runs its commands and shells in a sandbox instead of on this machine."""

    def __init__(self, sandbox: ProgramSandbox, *, logger: logging.Logger | None = None) -> None:
        """Make no request yet."""
        super().__init__(logger=logger)
        self._sandbox = sandbox

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109 - SWE-ReX' name
        """Return whether a command runs in the sandbox."""
        try:
            done = await asyncio.to_thread(self._sandbox.run, ["true"], timeout_s=timeout)
        except TimeoutError as error:
            return IsAliveResponse(is_alive=False, message=str(error))
        return IsAliveResponse(is_alive=done.exit_code == 0, message=done.text)

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        """Start a shell in the sandbox."""
        if request.session in self.sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        session = _SandboxSession(request, self._sandbox)
        started: CreateBashSessionResponse = await session.start()
        self.sessions[request.session] = session
        return started

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command in the sandbox. Raises `CommandTimeoutError`, `NonZeroExitCodeError`, `ClientError`."""
        words = [command.command] if isinstance(command.command, str) else list(command.command)
        try:
            done = await asyncio.to_thread(
                self._sandbox.run,
                ["sh", "-c", *words] if command.shell else words,
                timeout_s=command.timeout,
                merges_output=command.merge_output_streams,
                cwd=command.cwd or "",
                env=command.env,
            )
        except TimeoutError as error:
            raise CommandTimeoutError(str(error)) from error
        if command.check and done.exit_code != 0:
            prefix = f"{command.error_msg}: " if command.error_msg else ""
            raise NonZeroExitCodeError(f"{prefix}{command.command!r} failed with {done.exit_code}: {done.text!r}")
        return CommandResponse(
            stdout=done.stdout.decode(errors="backslashreplace"),
            stderr=done.stderr.decode(errors="backslashreplace"),
            exit_code=done.exit_code,
        )

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """Read a file in the sandbox. Raises `FileNotFoundError`, `ClientError`."""
        content = await asyncio.to_thread(self._sandbox.read, request.path)
        return ReadFileResponse(content=content.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a file in the sandbox. Raises `ClientError`."""
        await asyncio.to_thread(self._sandbox.write, request.content.encode(), request.path)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or folder into the sandbox. Raises `ClientError`, `OSError`."""
        await asyncio.to_thread(self._sandbox.copy_in, request.source_path, request.target_path)
        return UploadResponse()


class _SandboxSession(BashSession):  # type: ignore[misc]  # the package is the agent's own
    def __init__(self, request: CreateBashSessionRequest, sandbox: ProgramSandbox) -> None:
        super().__init__(request)
        self._sandbox = sandbox

    async def start(self) -> CreateBashSessionResponse:
        """Start the shell, source the request's files and set the prompt that the package looks for."""
        # The terminal inside would repeat the commands, and with them the prompt that ends their output.
        script = f"stty -echo; echo {_STARTED}; exec bash"
        command = await asyncio.to_thread(self._sandbox.command, ["sh", "-c", script], has_terminal=True)
        return await asyncio.to_thread(self._start, command)

    def _start(self, command: list[str]) -> CreateBashSessionResponse:
        self._shell = pexpect.spawn(
            command[0], command[1:], encoding="utf-8", codec_errors="backslashreplace", echo=False
        )
        self.shell.expect(_STARTED, timeout=_START_LIMIT_S)
        sources = [f"source {path}" for path in self.request.startup_source]
        self.shell.sendline(" ; ".join([*sources, *self._get_reset_commands()]))
        self.shell.expect(self._ps1, timeout=max(self.request.startup_timeout, _START_LIMIT_S))
        return CreateBashSessionResponse(output=str(self.shell.before))
