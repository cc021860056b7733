"""An event loop with virtual time: time passes only while there is nothing else to do, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 0.0005
"""Time for a local socket to deliver data: the loop waits this long before time passes."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs coroutines that wait for times and for each other's sockets, as in real time, but without waiting.

    Input from others, such as processes, comes too late for it. It waits for work on its own threads.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._aside_count = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now_s

    def pass_time(self, seconds_s: float) -> None:
        self._now_s += seconds_s

    @property
    def waits_for_threads(self) -> bool:
        return self._aside_count > 0

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._aside_count += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self._aside_count -= 1


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(1.0 if self._loop.waits_for_threads else LOOK_S)
        if not ready and not self._loop.waits_for_threads:
            self._loop.pass_time(timeout)
        return ready
