"""What one process needs of its system: files, memory, and when garbage is looked for."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable

GARBAGE_PERIOD_S = 30.0
FULL_COLLECTION_AFTER_COUNT = 30
"""Of so many collections of garbage one is of all of it, as soon as no turn is in hand: after a quarter of an hour."""
FULL_COLLECTION_AT_LAST_COUNT = 2880
"""After a day it is, whatever is in hand."""
LOOKED_AT_COUNT = 3
"""Times that `YOUNG_COUNT` objects have stayed, which a collection looks at, at most: that takes 20 ms."""
YOUNG_COUNT = 20_000
"""Objects that come and stay until the young ones are looked at: that takes 5 ms."""
NEVER_COUNT = 2**30
FREED_BYTES = 64 * 2**20
"""So much freed memory the process keeps at most, instead of taking it from the system again for the next body.

That and half of it, for a single piece, are what glibc itself goes up to, if large pieces are freed first. With less, a
body of 8 MB took each page anew, and blocked the event loop for 45 ms instead of 15.
"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt`, as glibc's malloc.h numbers them."""


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: each turn in flight takes two sockets."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def keep_freed_memory() -> None:
    """Have the allocator keep a little of what was freed.

    Else a body of 400 KB took memory from the system and gave it back with each turn: half of what it cost to carry.
    Larger pieces than half of that go back at once. Other allocators than glibc's are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, FREED_BYTES)
        mallopt(_MMAP_THRESHOLD, FREED_BYTES // 2)


def calm_garbage_collector() -> None:
    """Leave what was built at the start out of collections, and collect less often.

    A turn makes hundreds of short-lived objects and no cycles to speak of; with the default threshold of 700 the
    youngest generation alone took 2 % of the time, and a full collection with 10,000 programs stops streams for 50 ms.
    A stream has 90 objects while it is open: of what is old only `collect_garbage` takes the garbage out.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_COUNT, NEVER_COUNT, NEVER_COUNT)


async def collect_garbage(turns_count: Callable[[], int]) -> None:
    """Take out the garbage now and then: with so high a threshold nothing else does, and memory would grow.

    A look at all that 5,000 streams hold took a quarter of a second, in which no event went out; at 100,000 programs
    0.4 s. **So what has become too much to look at is taken for lasting** (`gc.freeze`), until no turn is in hand. It
    is freed all the same once nothing refers to it, and turns and programs leave no garbage in circles.
    """
    waited_count = 0
    while True:
        await asyncio.sleep(GARBAGE_PERIOD_S)
        waited_count += 1
        if waited_count >= (FULL_COLLECTION_AT_LAST_COUNT if turns_count() else FULL_COLLECTION_AFTER_COUNT):
            waited_count = 0
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif gc.get_count()[1] > LOOKED_AT_COUNT:
            gc.freeze()
        else:
            gc.collect(1)
