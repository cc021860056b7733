"""Fixtures and hooks shared by the integration tests; helpers are in `support.py`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import structlog
import uvloop

from tests.integration.support import FakeReplica, RunningProxy, fake_replica, running_proxy, shared_engine

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Iterator


@pytest.hookimpl(optionalhook=True)  # pytest-asyncio has it since 1.4; before, the loop is asyncio's own
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on the event loop of `thunderagent serve`."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _only_warnings_are_logged() -> Iterator[None]:
    """Log only warnings, which help when a test fails, and no line for each turn."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def engine_url() -> Iterator[str]:
    """Run an embedded engine that takes no time."""
    with shared_engine() as url:
        yield url


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    """Run a replica whose answers a test sets."""
    async with fake_replica() as replica:
        yield replica


@pytest.fixture
async def proxy(replica: FakeReplica) -> AsyncIterator[RunningProxy]:
    """Run a proxy in front of it."""
    async with running_proxy(replica.url) as proxy:
        yield proxy
