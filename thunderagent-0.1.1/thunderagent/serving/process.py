"""One process's system settings: files, memory, and when garbage is collected."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable

GARBAGE_PERIOD_S = 30.0
FULL_COLLECTION_AFTER_COUNT = 30
"""Every 30th collection is a full one, as soon as no turn is running: after a quarter of an hour."""
FULL_COLLECTION_AT_LAST_COUNT = 2880
"""After a day it is, even with running turns."""
LOOKED_AT_COUNT = 3
"""Limit of a collection, in multiples of `YOUNG_COUNT` surviving objects: that takes 20 ms."""
YOUNG_COUNT = 20_000
"""Allocated objects until the young ones are collected: that takes 5 ms."""
NEVER_COUNT = 2**30
FREED_BYTES = 64 * 2**20
"""How much freed memory the process keeps at most, instead of requesting it from the system for the next body.

That and half of it, for a single piece, are what glibc itself grows to, if large pieces are freed first. With less, a
body of 8 MB allocated each page again, and blocked the event loop for 45 ms instead of 15.
"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`, as numbered in glibc's malloc.h."""


def raise_file_limit() -> None:
    """Raise the limit of open files to the system's maximum: each turn in flight takes two sockets."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def keep_freed_memory() -> None:
    """Let the allocator keep some freed memory.

    Otherwise a body of 400 KB took memory from the system and gave it back with each turn: half the cost of carrying
    it. Pieces larger than half of that go back at once. All threads share what is kept: with an arena of its own each
    of those that read large bodies kept as much again, so an event of 12 MB once took 89 MB. Allocators other than
    glibc's are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_TRIM_THRESHOLD, FREED_BYTES)
        mallopt(_MMAP_THRESHOLD, FREED_BYTES // 2)


def calm_garbage_collector() -> None:
    """Exclude startup objects from collections, and collect less often.

    A turn makes hundreds of short-lived objects and almost no cycles. With the default threshold of 700 the youngest
    generation alone took 2 % of the time, and a full collection with 10,000 programs stops streams for 50 ms. An open
    stream has 90 objects: only `collect_garbage` removes old garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_COUNT, NEVER_COUNT, NEVER_COUNT)


async def collect_garbage(turns_count: Callable[[], int]) -> None:
    """Collect garbage now and then: with so high a threshold nothing else does, and memory would grow.

    Scanning all objects of 5,000 streams took a quarter of a second, in which no event was sent; with 100,000 programs
    0.4 s. **So when there is too much to scan, it is frozen** (`gc.freeze`), until no turn is running. It is still
    freed once nothing refers to it, and turns and programs leave no cyclic garbage.
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
