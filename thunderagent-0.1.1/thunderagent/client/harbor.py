"""An environment of harbor: the sandbox that the proxy prepares for its program, instead of one of its own.

    harbor run --environment-import-path thunderagent.client.harbor:SandboxEnvironment --ek template=coder ...

`start` asks for the sandbox, and the first command or copy waits for it. The template says what is in it: harbor builds
no image. The proxy removes it with the program: `stop` removes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from thunderagent.client.program import SANDBOX_TIMEOUT_S
from thunderagent.client.program_sandbox import ProgramSandbox


class SandboxEnvironment(BaseEnvironment):  # type: ignore[misc]  # the package is the agent's own
    """Runs harbor's commands in the sandbox of a program."""

    def __init__(
        self,
        *args: Any,
        program_id: str = "",
        proxy: str = "",
        template: str = "",
        sandbox_id: str = "",
        sandbox_timeout_s: float = SANDBOX_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        """Make no request yet. The first are harbor's; the others are as in `ProgramSandbox`."""
        super().__init__(*args, **kwargs)
        self._sandbox = ProgramSandbox(
            program_id=program_id,
            proxy=proxy,
            template=template,
            sandbox_id=sandbox_id,
            timeout_s=float(sandbox_timeout_s),
        )
        self._filling: asyncio.Task[None] | None = None

    @staticmethod
    def type() -> str:
        """Return the name that harbor reports."""
        return "thunderagent"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Return what harbor may ask of it: nothing but commands and copies."""
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        """Accept any task: the template says what the sandbox is made of."""

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 - nothing is built
        """Ask for the sandbox if a template is given, and wait for nothing. Raises `ClientError`, `ValueError`."""
        await asyncio.to_thread(self._sandbox.request)

    async def stop(self, delete: bool) -> None:
        """Leave the sandbox to the proxy, which removes it with its program."""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox; the first one waits for it. Raises `ClientError`, `TimeoutError`."""
        await self._fill()
        user = self._resolve_user(user)
        done = await asyncio.to_thread(
            self._sandbox.run,
            ["bash", "-c", command],
            cwd=cwd or self.task_env_config.workdir or "",
            env=self._merge_env(env),
            timeout_s=timeout_sec,
            user="" if user is None else str(user),
        )
        return ExecResult(
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            return_code=done.exit_code,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the sandbox. Raises `ClientError`, `OSError`."""
        await self._fill()
        await asyncio.to_thread(self._sandbox.copy_in, source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a folder into the sandbox. Raises `ClientError`, `OSError`."""
        await self._fill()
        await asyncio.to_thread(self._sandbox.copy_in, source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the sandbox. Raises as `ProgramSandbox.copy_out`."""
        await self._fill()
        await asyncio.to_thread(self._sandbox.copy_out, source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what is in a folder of the sandbox. Raises as `ProgramSandbox.copy_out`."""
        await self._fill()
        await asyncio.to_thread(self._sandbox.copy_out, source_dir, target_dir)

    async def _fill(self) -> None:
        """Put into the sandbox what harbor's own environments have, at its first use."""
        if self._filling is None:
            self._filling = asyncio.create_task(self._fill_once())
        filling = self._filling
        if asyncio.current_task() is filling:  # which itself runs commands
            return
        try:
            await asyncio.shield(filling)
        except Exception:
            if filling.done() and self._filling is filling:
                self._filling = None  # the next command tries it again
            raise

    async def _fill_once(self) -> None:
        await asyncio.to_thread(self._sandbox.wait)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()
