"""Buckets of requests: data waits in line, admin requests are refused."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from thunderagent.errors import RateLimitedError
from thunderagent.proxy.gate.rate_limit import MAX_CALLERS, RateLimits


def limits(per_s: float, burst_count: int, **more: object) -> RateLimits:
    return RateLimits(per_s, burst_count, CollectorRegistry(), **more)  # type: ignore[arg-type]


async def test_a_burst_passes_and_the_rest_waits_in_the_order_in_which_it_came() -> None:
    """Each passes at its time, none is refused; another caller does not wait for them."""
    ours, order = limits(100, 2), []
    began_s = asyncio.get_running_loop().time()

    async def ask(number: int) -> None:
        await ours.wait("a")
        order.append(number)

    await asyncio.gather(*(ask(number) for number in range(6)))
    assert order == list(range(6))
    assert asyncio.get_running_loop().time() - began_s >= 0.039
    async with asyncio.timeout(0.005):
        await ours.wait("b")


async def test_request_that_leaves_the_line_leaves_no_debt() -> None:
    """A client that gives up and retries does not wait for its abandoned request."""
    ours = limits(50, 1)
    await ours.wait("a")
    waiting = [asyncio.create_task(ours.wait("a")) for _ in range(100)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(1.5):  # with their debt it were 2 s
        await ours.wait("a")


def test_admin_requests_are_refused_with_the_time_to_wait() -> None:
    """They pass again after it; data requests do not count."""
    now_s = 0.0
    ours = limits(0.5, 2, clock=lambda: now_s)
    ours.check("a")
    ours.check("a")
    with pytest.raises(RateLimitedError) as error:
        ours.check("a")
    assert error.value.retry_after_s == 2
    ours.check("b")
    now_s = 2.0
    ours.check("a")


def test_callers_are_forgotten_when_there_are_too_many() -> None:
    """Unknown addresses do not fill the memory."""
    ours = limits(1, 1, clock=lambda: 0.0)
    for number in range(MAX_CALLERS + 10):
        ours.check(str(number))
    assert len(ours._lines) == MAX_CALLERS
