"""A lab leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.integration.support import until
from tests.kubernetes.cluster import remove_cgroups
from tests.kubernetes.lab import in_namespaces

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS = Path("/sys/fs/cgroup/pids")


def processes_with(word: str) -> list[int]:
    """Return the processes with a word among their arguments, except this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_text().split("\0")
        except OSError:  # it ended meanwhile
            continue
        if word in arguments and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


async def test_killed_lab_leaves_no_process_no_mount_and_no_network(
    tmp_path: Path, require_real: Callable[[str], NoReturn]
) -> None:
    """Even processes that left its session, or were started to outlive it, are gone."""
    if os.geteuid() != 0:
        require_real("namespaces need root")
    word = secrets.token_hex(8)
    stay = f"ip link add lab0 type bridge; mount -t tmpfs lab {tmp_path}; setsid sleep 600 {word} & sleep 600 {word}"
    stay = stay.replace(f"sleep 600 {word}", f"bash -c 'sleep 600; :' {word}") + "; :"
    script = (
        "import subprocess, sys; from tests.kubernetes.lab import in_namespaces as i; subprocess.run(i(sys.argv[1:]))"
    )
    killed = subprocess.Popen([sys.executable, "-c", script, "bash", "-c", stay], cwd=Path(__file__).parents[2])
    try:
        await until(lambda: len(processes_with(word)) == 2, within_s=30)
        assert "lab0:" not in Path("/proc/net/dev").read_text()
        assert str(tmp_path) not in Path("/proc/mounts").read_text()
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    await until(lambda: not processes_with(word), within_s=30)


def test_groups_of_processes_go_or_are_told(require_real: Callable[[str], NoReturn]) -> None:
    """Empty groups are removed at any depth; a group that still holds a process is reported."""
    if os.geteuid() != 0 or not GROUPS.is_dir():
        require_real("groups of processes need root and cgroup v1")
    name = f"thunderagent-test-{secrets.token_hex(3)}"
    inner = GROUPS / name / "a/b"
    inner.mkdir(parents=True)
    assert remove_cgroups(name) == []
    assert not (GROUPS / name).exists()
    inner.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as process:
        (inner / "cgroup.procs").write_text(str(process.pid))
        assert str(inner) in remove_cgroups(name, within_s=0.1)
        process.kill()
    assert remove_cgroups(name) == []


def test_a_command_that_fails_in_namespaces_fails() -> None:
    """Its status becomes the status of the whole."""
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    assert subprocess.run(in_namespaces(["bash", "-c", "exit 7"]), check=False).returncode == 7
