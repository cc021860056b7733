"""Bodies that take long to read are read on a thread, so that other turns go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Read = TypeVar("Read")

LARGE_BODY_BYTES = 512 * 1024
"""What is larger is read on a thread."""


async def read_aside(read: Callable[[], Read], size_bytes: int) -> Read:
    """Return what `read` makes of a body of this size. It must change nothing that others see."""
    return await asyncio.to_thread(read) if size_bytes > LARGE_BODY_BYTES else read()
