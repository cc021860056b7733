"""Fixtures shared by Nova's tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _thread_as_before() -> Iterator[None]:
    """Restore the name and cores of this thread, which entered a lane."""
    comm, cores = Path("/proc/thread-self/comm"), os.sched_getaffinity(0)
    name = comm.read_text()
    yield
    os.sched_setaffinity(0, cores)
    comm.write_text(name)
