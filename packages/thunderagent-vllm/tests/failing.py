"""A scheduler whose plugin fails after `CALLS` requests have ended: `--scheduler-cls failing.Scheduler`."""

from __future__ import annotations

from typing import Any

from thunderagent_vllm import scheduler

CALLS = 10


def Scheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - vLLM calls what it is told is a class
    """Return our scheduler, one decision of which raises after a while."""
    made = scheduler.Scheduler(*args, **kwargs)
    stock, left = made.agents.ended, [CALLS]

    def broken(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("a fault in a decision")
        return stock(*args, **kwargs)

    made.agents.ended = broken
    return made
