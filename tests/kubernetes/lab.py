"""Run tests with a private Kubernetes: `python -m tests.kubernetes.lab PYTEST-ARGUMENTS`.

If KUBECONFIG is set, they run against that cluster. Otherwise everything, including pytest, runs in network, mount and
process namespaces that end with it: no process, mount or route is left, even if this process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.environments import RealEngineError
from tests.kubernetes.cluster import remove_cgroups
from tests.kubernetes.parts import AGENTS, PartsError, kubectl, programs, write_images
from tests.real.agent_packages import NewerPythonError

FOLDER_VARIABLE = "THUNDERAGENT_TEST_LAB"
PROGRAMS_VARIABLE = "THUNDERAGENT_TEST_PROGRAMS"
"""The cluster's folder, and its programs: set only within the namespaces."""


def main(arguments: list[str]) -> int:
    """Return pytest's exit status."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if os.environ.get("KUBECONFIG"):
        environment = None if shutil.which("kubectl") else with_kubectl()
        return subprocess.run(pytest, env=environment, check=False).returncode
    if os.geteuid() != 0:
        print("a Kubernetes of the tests' own needs root; or name a cluster with KUBECONFIG", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up then, too
    folder = Path(tempfile.mkdtemp(prefix="thunderagent-kubernetes-"))
    try:
        made = programs()
        for agent in AGENTS.values():  # which nobody can install without a network
            with suppress(NewerPythonError):
                agent()
        write_images(folder)
        lab = {FOLDER_VARIABLE: str(folder), PROGRAMS_VARIABLE: str(made)}
        status = subprocess.run(in_namespaces(pytest), env={**with_kubectl(), **lab}, check=False).returncode
    except (PartsError, RealEngineError) as error:
        print(f"no Kubernetes: {error}", file=sys.stderr)
        return 1
    finally:
        left = remove_cgroups(folder.name)
        shutil.rmtree(folder, ignore_errors=True)
    if left:
        print(f"left behind: {left}", file=sys.stderr)
    return status or bool(left)


def with_kubectl() -> dict[str, str]:
    """Return this environment, with a kubectl first in PATH that reads the project's kustomizations."""
    return {**os.environ, "PATH": f"{kubectl().parent}:{os.environ['PATH']}"}


def in_namespaces(command: list[str]) -> list[str]:
    """Return a command that runs another in new namespaces, and ends with this process and all that it started."""
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
        *("bash", "-c", '"$@"; exit $?', "lab"),  # the first process there: it adopts orphans
        *command,
    ]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
