"""The tests that need Ray, with an environment of their own: it is heavy, and nothing else needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.environments import RealEngineError, ensure_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

REQUIREMENTS = ["ray==2.60.0"]
TESTS = ["tests/real/test_workflows_on_ray.py"]


@pytest.mark.nightly  # Ray gives up a node that is not there in 30 s, whatever else the machine does
@pytest.mark.timeout(300, func_only=True)
def test_workflows_on_a_real_cluster(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Two nodes on this machine, one of which is lost; nothing is skipped."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            python = ensure_environment("workflows-ray", REQUIREMENTS, "about 250 MB, half a minute")
    except RealEngineError as error:
        require_real(f"no Ray: {error}")
    find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-n", "0", *TESTS],
        env={**os.environ, "PYTHONPATH": packages, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
