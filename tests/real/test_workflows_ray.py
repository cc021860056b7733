"""The tests that need Ray, in a separate environment: it is large, and nothing else needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.real.support import assert_tests_pass_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

REQUIREMENTS = ["ray==2.60.0"]
NAME, SIZE, HOW = "workflows-ray", "about 250 MB, half a minute", {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.nightly  # Ray gives up a node that is not up within 30 s, even on a busy machine
def test_workflows_run_on_a_real_cluster(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Two nodes on this machine, one of which is lost; nothing is skipped."""
    tests = ["tests/real/test_workflows_on_ray.py"]
    assert_tests_pass_in(NAME, REQUIREMENTS, SIZE, tests, require_real, pytestconfig, timeout_s=280, **HOW)


@pytest.mark.nightly  # each killed and restarted process costs Ray seconds
@pytest.mark.timeout(420, func_only=True)
def test_cell_runs_on_a_real_cluster(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Gateways and schedulers as actors: killed, restarted, replaced, and stopped."""
    tests = ["tests/real/test_cell_on_ray.py"]
    assert_tests_pass_in(NAME, REQUIREMENTS, SIZE, tests, require_real, pytestconfig, timeout_s=400, **HOW)
