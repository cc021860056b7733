"""The end of the file descriptors: then no connection is accepted or made, and nothing else would say so.

The system refuses silently: a server's own library closes what it cannot accept, or leaves it waiting. So one
descriptor is asked for and given back every second, which takes a microsecond.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter

log = structlog.get_logger("thunderagent")

LOOK_S: Final = 1.0
TOLD_AGAIN_S: Final = 60.0
_ENDED: Final = frozenset({errno.EMFILE, errno.ENFILE})


def _descriptor_left() -> bool:
    """Return whether a file could be opened now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _ENDED
    return True


class OpenFiles:
    """Looks whether this process could open another file."""

    def __init__(self, registry: CollectorRegistry, has_left: Callable[[], bool] = _descriptor_left) -> None:
        """Register the metric."""
        self._has_left = has_left
        self._ended_count = Counter(
            "thunderagent_file_descriptors_ended",
            "Times, looking each second, that no file descriptor was left: no connection could be accepted or made.",
            registry=registry,
        )
        self._told_s: float | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(asyncio.get_running_loop().time())

    def look(self, now_s: float) -> None:
        """Count and log if there is none left, once a minute, and log when there is one again."""
        if self._has_left():
            if self._told_s is not None:
                log.warning("file_descriptors_are_back")
                self._told_s = None
            return
        self._ended_count.inc()
        if self._told_s is None or now_s - self._told_s >= TOLD_AGAIN_S:
            self._told_s = now_s
            limit_count = 0
            with suppress(OSError, ValueError):
                limit_count = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.error(
                "file_descriptors_ended",
                limit_count=limit_count,
                effect="no connection is accepted or made; raise the limit of open files (ulimit -n, LimitNOFILE=)",
            )
