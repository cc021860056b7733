"""The sandbox of a program, as agents of other makes need it: waited for at first use, run in, copied into and out of.

It is asked for when the agent starts, so that the proxy prepares it while the first turn waits. The first command waits
for it. The proxy removes it with the program: nothing here does. Commands go through `docker exec`, or `kubectl exec`;
copies do, too, so they need a shell and `tar` in the sandbox, and work the same with both.

Everybody on this machine, and in the sandbox, can read the words of a running command. So environment variables are no
such words: they precede its standard input, and a shell in the sandbox reads them from there.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from thunderagent.client.errors import ClientError
from thunderagent.client.program import PROGRAM_VARIABLE, SANDBOX_TIMEOUT_S, Program, Sandbox, program

# Reads a script from the lines before the one that is its name, runs it, and is replaced by a command. `read` takes no
# byte more than its line: the rest is the command's.
_WITH_VARIABLES = """\
script=
while IFS= read -r line && [ "$line" != "$0" ]; do script=$script$line"
"; done
eval "unset script line
$script"
exec "$@"
"""


@dataclass(frozen=True)
class CommandOutput:
    """What a command in a sandbox left."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Return what it wrote, and after it its errors; bytes that are not UTF-8 are replaced."""
        return (self.stdout + self.stderr).decode(errors="replace")


class ProgramSandbox:
    """A sandbox of one program. All methods block, and may be called from several threads."""

    def __init__(
        self,
        *,
        program_id: str = "",
        proxy: str = "",
        template: str = "",
        sandbox_id: str = "",
        timeout_s: float = SANDBOX_TIMEOUT_S,
    ) -> None:
        """Make no request yet.

        `program_id` and `proxy` are by default `THUNDERAGENT_PROGRAM_ID` and `THUNDERAGENT_PROXY` of the environment.
        `template` is what `request` asks for; without it the program has a sandbox by its class, or was opened with
        one. `sandbox_id` says which of the program's; by default the first that is usable. `timeout_s` is how long the
        first use waits for it.
        """
        self.wait_s = 0.0
        """How long the first use waited, in seconds."""
        self._program_id = program_id
        self._proxy = proxy
        self._template = template
        self._sandbox_id = sandbox_id
        self._timeout_s = timeout_s
        self._sandbox: Sandbox | None = None
        self._lock = threading.Lock()

    def request(self) -> None:
        """Ask for the sandbox, once, if a template is given. Raises `ClientError`, `ValueError` without a program."""
        with self._lock:
            if self._template and not self._sandbox_id:
                self._sandbox_id = self._program().request_sandbox(self._template)

    def wait(self) -> Sandbox:
        """Return the sandbox; the first call waits until it is usable. Raises `ClientError`."""
        with self._lock:
            if self._sandbox is None:
                started_s = time.monotonic()
                self._sandbox = self._program().wait_for_sandbox(
                    sandbox_id=self._sandbox_id or None, timeout_s=self._timeout_s
                )
                self.wait_s = time.monotonic() - started_s
            return self._sandbox

    def command(
        self,
        words: Sequence[str],
        *,
        cwd: str = "",
        user: str = "",
        has_terminal: bool = False,
    ) -> list[str]:
        """Return the command of this machine that runs `words` in the sandbox, with its input and output.

        Raises `ClientError`: also for a sandbox without commands, and for a `user` on Kubernetes.
        """
        sandbox = self.wait()
        flags = ["-i", "-t"] if has_terminal else ["-i"]
        if sandbox["driver"] == "docker" and sandbox["handle"]:
            flags += ["--workdir", cwd] if cwd else []
            flags += ["--user", user] if user else []
            return ["docker", "exec", *flags, sandbox["handle"], *words]
        if sandbox["driver"] in {"kubernetes", "agent-sandbox"} and (pod := sandbox["details"].get("pod")):
            if user:
                raise ClientError(f"a command in a pod runs as the pod's user, not as {user}")
            if cwd:
                words = ["sh", "-c", 'cd "$0" && exec "$@"', cwd, *words]
            return ["kubectl", "exec", *flags, "--namespace", str(sandbox["details"]["namespace"]), pod, "--", *words]
        raise ClientError(f"no command runs in the sandbox {sandbox['sandbox_id']} of the driver {sandbox['driver']}")

    def run(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: IO[bytes] | None = None,
        timeout_s: float | None = None,
        merges_output: bool = False,
        **where: Any,
    ) -> CommandOutput:
        """Run a command in the sandbox until it ends; `where` is as in `command`. With `merges_output`, no `stderr`.

        With `env`, the sandbox needs a shell, and `stdin` is read to its end first. Raises `ClientError`, and
        `TimeoutError` after `timeout_s`: the command then goes on in the sandbox.
        """
        with ExitStack() as stack:
            called = list(words)
            if env:
                end = secrets.token_hex(8)
                called = ["sh", "-c", _WITH_VARIABLES, end, *words]
                file = stack.enter_context(tempfile.TemporaryFile())
                file.write(os.fsencode(f"{_exports(env)}{end}\n"))
                if stdin is not None:
                    shutil.copyfileobj(stdin, file)
                file.seek(0)
                stdin = file
            command = self.command(called, **where)
            try:
                done = subprocess.run(  # noqa: S603 - the caller names the command; no shell reads it
                    command,
                    stdin=stdin if stdin is not None else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if merges_output else subprocess.PIPE,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"{list(words)} did not end within {timeout_s} s") from error
            except OSError as error:
                raise ClientError(f"{command[0]} cannot be run: {error}") from error
        output = [done.stdout, done.stderr or b""]
        if command[0] == "kubectl":  # which says so where the command's own errors go
            its = f"command terminated with exit code {done.returncode}\n".encode()
            output[not merges_output] = output[not merges_output].removesuffix(its)
        return CommandOutput(done.returncode, *output)

    def copy_in(self, source: str | Path, target: str) -> None:
        """Copy a file, or what is in a folder, to a path in the sandbox, which it replaces; make missing folders.

        It belongs to the sandbox's user. Raises `ClientError`, `OSError`.
        """
        source = Path(source).resolve()  # of a link what it leads to
        folder, name = (target, ".") if source.is_dir() else posixpath.split(target)
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(source, arcname=name)
            file.seek(0)
            script = 'mkdir -p "$0" && exec tar -x -o -f - -C "$0"'
            self._checked(["sh", "-c", script, folder or "."], f"copying {source} to {target}", stdin=file)

    def write(self, content: bytes, target: str) -> None:
        """Write a file in the sandbox; make missing folders. Raises `ClientError`."""
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            script = 'mkdir -p "$(dirname "$0")" && exec cat > "$0"'
            self._checked(["sh", "-c", script, target], f"writing {target}", stdin=file)

    def read(self, source: str) -> bytes:
        """Read a file in the sandbox. Raises `FileNotFoundError` if there is none, `ClientError`."""
        if not self._is("-f", source):
            raise FileNotFoundError(f"there is no file {source} in the sandbox")
        return self._checked(["cat", source], f"reading {source}")

    def copy_out(self, source: str, target: str | Path) -> None:
        """Copy a file, or what is in a folder of the sandbox, to a path of this machine; make missing folders.

        What leads out of the folder is refused; devices are left out. Raises `FileNotFoundError`, `ClientError`,
        `OSError`, and `tarfile.TarError`.
        """
        target = Path(target)
        if not self._is("-d", source):
            content = self.read(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            return
        with tempfile.TemporaryFile() as file:
            file.write(self._checked(["tar", "-c", "-f", "-", "-C", source, "."], f"copying {source}"))
            file.seek(0)
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=file) as archive:
                archive.extractall(target, members=[each for each in archive if not each.isdev()], filter="data")

    def _is(self, flag: str, path: str) -> bool:
        # The sandbox answers by words: what else is said is of `docker` or `kubectl`, which talks of each exit code.
        done = self.run(["sh", "-c", f'if test {flag} "$0"; then echo yes; else echo no; fi', path])
        said = done.stdout.strip()
        if done.exit_code != 0 or said not in (b"yes", b"no"):
            raise ClientError(f"no command runs in the sandbox: {done.text.strip()}")
        return said == b"yes"

    def _checked(self, words: Sequence[str], what: str, *, stdin: IO[bytes] | None = None) -> bytes:
        done = self.run(words, stdin=stdin)
        if done.exit_code != 0:
            raise ClientError(f"{what} failed: {done.stderr.decode(errors='replace').strip() or done.exit_code}")
        return done.stdout

    def _program(self) -> Program:
        program_id = self._program_id or os.environ.get(PROGRAM_VARIABLE)
        if not program_id:
            raise ValueError(f"no program: set program_id, or {PROGRAM_VARIABLE} in the environment")
        return program(program_id, proxy=self._proxy or None)


def _exports(env: Mapping[str, str]) -> str:
    """Return these variables as lines for a shell. Raises `ClientError` for a name that it cannot read."""
    for name in env:
        if not (name.isascii() and name.isidentifier()):
            raise ClientError(f"{name!r} is no name of a variable in a shell")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
