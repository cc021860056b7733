"""The tests themselves: what holds for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SHOW_SETTINGS = """
import tests.conftest
from hypothesis import Phase, settings
print(settings.default.derandomize, Phase.generate in settings.default.phases)
"""


def test_random_examples_are_new_ones_where_ci_is_true() -> None:
    """Hypothesis' own profile there makes the same ones each time."""
    environment = {**os.environ, "CI": "true"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_SETTINGS],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
    fixed = [path for path in TESTS.rglob("test_*.py") if "derandomize" + "=True" in path.read_text()]
    assert not fixed
