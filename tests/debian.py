"""Install Debian packages for tests of real parts: one process at a time, because test processes run in parallel."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

LOCK = Path(tempfile.gettempdir(), "thunderagent-tests-apt.lock")
WAIT_S = 300
"""Limit of the wait: other processes on this machine may install packages too."""


def apt_get(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run apt-get once no other process does; the caller checks the status."""
    command = ["apt-get", "--quiet", "-o", f"DPkg::Lock::Timeout={WAIT_S}", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def install(*packages: str) -> str:
    """Install packages; return the error text, or nothing."""
    apt_get("update")
    done = apt_get("install", "--yes", "--no-install-recommends", *packages)
    return "" if done.returncode == 0 else f"apt-get install {' '.join(packages)}: {done.stderr[-500:]}"
