"""Nova's tests that need PyTorch, in a separate environment: it is large, and the proxy does not need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.real.support import assert_tests_pass_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

REQUIREMENTS = ["torch==2.13.0", "transformers==5.24.0", "pillow>=11", "jinja2>=3.1", "numpy"]
TESTS = ["tests/unit/nova", "tests/real/test_nova.py"]


@pytest.mark.nightly  # a minute; tests/unit/nova has all that needs no PyTorch
@pytest.mark.timeout(900, func_only=True)
def test_nova_runs_with_real_models(require_real: Callable[[str], NoReturn], pytestconfig: pytest.Config) -> None:
    """Staged tokens, offloading, the engine, and the server behind the proxy; nothing is skipped."""
    how = {"REQUIRE_REAL_PARTS": "1", "HF_HUB_OFFLINE": "1"}
    size = "about 1.5 GB, a minute"
    assert_tests_pass_in("nova", REQUIREMENTS, size, TESTS, require_real, pytestconfig, timeout_s=880, **how)
