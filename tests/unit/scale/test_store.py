"""A common property of stores: a cancellation that a client lost still counts."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from thunderagent.scale.leader.store import heeds_cancellation


async def test_a_task_ends_though_a_client_forgot_that_it_was_cancelled() -> None:
    began = asyncio.Event()

    async def forgets() -> None:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()

    async def goes_on_for_ever() -> None:
        while True:
            with heeds_cancellation():
                await forgets()

    task = asyncio.create_task(goes_on_for_ever())
    await began.wait()
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_an_earlier_cancellation_or_a_limit_within_ends_nothing() -> None:
    """Clean-up after a cancellation may use a store; a client may limit its waits."""
    has_cleaned = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with heeds_cancellation(), suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.get_running_loop().create_future()
            has_cleaned.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cleans_up(), 0.01)
    assert has_cleaned.is_set()
