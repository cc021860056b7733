"""Run `benchmarks.core` once from the first folder in PYTHONPATH, whatever its commit; print the figures.

`core --beside` starts it by its path. It uses only parts of the package that the benchmark used at its first commit.
All times are processor times, not clock times, so that other work on the machine counts for less.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from statistics import fmean, median
from typing import Any

from benchmarks import core


def main(policy: str, programs_count: int, replicas_count: int, events_count: int) -> None:
    """Print one line of JSON: milliseconds, by figure."""
    vars(core)["perf_counter"] = time.thread_time
    if not hasattr(core, "plain_turns"):  # the earlier commit knows no orders
        policy = policy.partition("+")[0]
    load = core.build(policy, programs_count, replicas_count, core.CAPACITY_TOKENS)
    timed: Any = core.mixed_events(load, events_count, programs_count)
    times = sorted(chain(*timed.values()) if isinstance(timed, dict) else timed)
    ticks = [core.pausing_tick(programs_count, replicas_count) for _ in range(5)]
    figures = {
        "event_mean_ms": fmean(times) * 1e3,
        "event_p99_ms": times[int(0.99 * len(times))] * 1e3,
        "tick_pausing_half_ms": median(elapsed_s for elapsed_s, _ in ticks) * 1e3,
        "tick_paused_count": ticks[0][1],
    }
    if hasattr(core, "plain_turns"):
        first_ticks = [core.pausing_tick(programs_count, replicas_count, is_first=True) for _ in range(5)]
        figures["tick_pausing_first_ms"] = median(elapsed_s for elapsed_s, _ in first_ticks) * 1e3
        figures["plain_turn_mean_ms"] = fmean(core.plain_turns(policy, events_count // 5)) * 1e3
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
