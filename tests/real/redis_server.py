"""A real redis-server, and the folder of its client."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.environments import RealEngineError, ensure_environment
from tests.debian import install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import NoReturn


@dataclass
class RedisServer:
    """A server that listens on a socket in a folder, with an optional append-only file there."""

    folder: Path
    packages: str
    """The client's folder, for PYTHONPATH."""
    keeps: bool
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 'redis.sock'}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = ("--appendonly", "yes", "--appendfsync", "always") if self.keeps else ("--appendonly", "no")
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.folder / "redis.sock"), "--save", ""]
        self.process = subprocess.Popen(
            [*command, *options, "--daemonize", "no"], stdout=subprocess.PIPE, text=True, cwd=self.folder
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "ready to accept connections" in line.lower():
                break

    def kill(self) -> None:
        """Kill the server."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def ensure_redis(require_real: Callable[[str], NoReturn]) -> str:
    """Install the server and its client; return the client's folder."""
    if shutil.which("redis-server") is None and (why_not := install("redis-server")):
        require_real(why_not)
    try:
        python = ensure_environment("workflows-redis", ["redis>=6,<9"], "a second")
    except RealEngineError as error:
        require_real(f"no redis package: {error}")
    find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def redis_server(
    require_real: Callable[[str], NoReturn], folder: Path, *, keeps: bool = False
) -> Iterator[RedisServer]:
    """Run a server during the block."""
    server = RedisServer(folder, ensure_redis(require_real), keeps)
    server.start()
    try:
        yield server
    finally:
        server.kill()
