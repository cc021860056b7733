"""Runs a blocking library's calls off the event loop, in threads that belong to one driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A bounded pool: calls beyond `threads_count` wait for a thread, never on the event loop."""

    def __init__(self, name: str, threads_count: int) -> None:
        """Start no thread yet."""
        self._executor = ThreadPoolExecutor(threads_count, thread_name_prefix=name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread. A cancelled caller leaves at once; the call itself runs to its end."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Accept no more calls; running ones end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)
