"""Nova with torch and transformers, in an environment of its own: the tests that are skipped where they are missing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks.real_engine import RealEngineError, ensure_environment

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 540


def ensure_nova_environment() -> Path:
    """Return the interpreter of an environment with the extras `nova` and `dev`; make it at the first call.

    Takes a minute or two and, with torch for CPUs, about 1.5 GB once. A change of what they ask for makes a new one.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["nova"]]
    name = "nova-" + hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    return ensure_environment(name, wanted, "about 1.5 GB, some minutes", ["-c", "import torch, transformers"])


@pytest.mark.timeout(LIMIT_S + 60)
def test_nova_with_a_real_model(require_real: Callable[[str], NoReturn]) -> None:
    """Stages equal `generate()`, lanes, offload, the engine, and an agent of twenty turns: none is skipped."""
    try:
        python = ensure_nova_environment()
    except RealEngineError as error:
        require_real(f"no torch: {error}")
    command = [str(python), "-m", "pytest", "-q", "tests/unit/nova", "tests/real/test_nova.py"]
    environment = {**os.environ, "THUNDERAGENT_REQUIRE_REAL": "1"}
    told = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert told.returncode == 0, told.stdout[-8000:] + told.stderr[-2000:]
    assert "skipped" not in told.stdout.splitlines()[-1]
