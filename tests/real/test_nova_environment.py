"""Nova's tests that need PyTorch, with an environment of their own: it is heavy, and the proxy needs none of it."""

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

REQUIREMENTS = ["torch==2.13.0", "transformers==5.17.0", "pillow>=11", "jinja2>=3.1", "numpy"]
TESTS = ["tests/unit/nova", "tests/real/test_nova.py"]


@pytest.mark.timeout(900, func_only=True)
def test_nova_with_real_models(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Staged tokens, offloading, the engine, and the server behind the proxy; nothing is skipped."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            python = ensure_environment("nova", REQUIREMENTS, "about 1.5 GB, a minute")
    except RealEngineError as error:
        require_real(f"no PyTorch: {error}")
    find = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-n", "0", *TESTS],
        env={**os.environ, "PYTHONPATH": packages, "REQUIRE_REAL_PARTS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
