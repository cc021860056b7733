"""Fixtures of the client's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.client.support import FakeProxy, fake_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLES = (
    *("THUNDERAGENT_PROXY", "THUNDERAGENT_KEY"),
    *("OPENAI_API_KEY", "HOSTED_VLLM_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's settings for its own agents."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with fake_proxy() as proxy:
        yield proxy
