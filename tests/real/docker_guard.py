"""Removes a private Docker engine whose owner has died: a process that outlives it, however it ends.

    python -m tests.real.docker_guard FOLDER BRIDGE < PIPE

The owner holds the other end of standard input for as long as it lives. Then this ends the engine, and with it the
containers and reapers, and removes mounts, bridge and folder. After an owner that has done so itself it finds nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STOP_S = 30.0
ENGINE = "dockerd"
REAPER = "thunderagent.tools.reaper"
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_POLL_S = 0.05


def remove_engine(root: Path, bridge: str) -> None:
    """End the engine in a folder if it runs, and remove all its traces; harmless if there are none."""
    _end(processes(ENGINE, f"--data-root={root / 'data'}"))
    for reaper_id in processes(REAPER, f"unix://{root / 'docker.sock'}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(reaper_id, signal.SIGTERM)
    for mount in sorted(_mounts_under(root), reverse=True):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    environment = {**os.environ, "PATH": SYSTEM_PATH}
    subprocess.run(["ip", "link", "delete", bridge], capture_output=True, env=environment, check=False)
    shutil.rmtree(root, ignore_errors=True)


def processes(*arguments: str) -> list[int]:
    """Return the ids of processes that have all of these among their words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if set(arguments) <= set(path.read_text().split("\0")):
                found.append(int(path.parent.name))
    return found


def _end(process_ids: list[int]) -> None:
    """Ask processes to end, which may be another's children, and wait; kill them after `STOP_S`."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        for each in process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, how)
        give_up_s = time.monotonic() + STOP_S
        while any(map(_is_alive, process_ids)):
            if time.monotonic() > give_up_s:
                break
            time.sleep(_POLL_S)


def _is_alive(process_id: int) -> bool:
    """Return whether a process is there and has not ended: nobody may have asked yet how."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _mounts_under(root: Path) -> list[str]:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [mount for mount in mounts if mount.startswith(f"{root}/")]


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove_engine(Path(sys.argv[1]), sys.argv[2])
