"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MEMORY_BYTES = 1 << 30
"""Memory of a node, as Ray counts it."""
NODE = {"num_cpus": 2, "memory": MEMORY_BYTES, "object_store_memory": 80 << 20, "include_dashboard": False}
SOON_DEAD = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


class TwoNodes:
    """A cluster whose second node can be removed and added again."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - where Ray is

        self.folder = folder
        head = {**NODE, "_system_config": SOON_DEAD, "node_ip_address": "127.0.0.1"}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second: Any = None
        self.add()

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self) -> None:
        self.second = self.cluster.add_node(**NODE, node_ip_address="127.0.0.1")

    def remove(self) -> None:
        """Kill all processes of the second node without notice."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None


@contextmanager
def two_nodes(*paths: str) -> Iterator[TwoNodes]:
    """Run a cluster whose processes find modules in `paths` and here; no process may outlive it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a longer path leaves no room for Ray's sockets
    (folder / "ray").mkdir()
    nodes = None
    changes = pytest.MonkeyPatch()
    changes.setenv("PYTHONPATH", os.pathsep.join([*paths, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    changes.setenv("RAY_TMPDIR", str(folder))
    for name in ("ray._private.services.get_node_ip_address", "ray.util.get_node_ip_address"):
        changes.setattr(name, lambda *_: "127.0.0.1")  # Ray replaces a loopback address with the machine's external one
    try:
        nodes = TwoNodes(folder)
        yield nodes
    finally:
        if nodes is not None:
            nodes.cluster.shutdown()
        left = processes_of(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        changes.undo()
    assert left == [], "processes outlive the cluster"


def processes_of(folder: Path) -> list[int]:
    """Return the processes of a cluster that still run after some time to end."""
    for _ in range(100):
        left = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    left.append(int(entry.name))
        if not left:
            return []
        time.sleep(0.1)
    return left
