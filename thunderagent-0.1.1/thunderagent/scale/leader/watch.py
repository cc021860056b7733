"""A standby watches the leader's process by an idle connection to its port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger("thunderagent.scale")

DEAD_S = 0.03
"""A leader whose port refuses us twice, this far apart, and wrote nothing in between, is gone."""

REACH_LIMIT_S = 0.5
RETRY_S = 0.1
"""How often to connect if nobody keeps a connection open for as long: there may be a proxy. A process that ends may
close its port a moment after its connections, so the first attempt after a long connection comes `DEAD_S` later."""


class LeaderWatch:
    """Watches one process at a time. An unreachable one may live: only one whose port is closed is gone."""

    def __init__(
        self,
        died: Callable[[str], None],
        position: Callable[[], str],
        *,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Call `died` with an owner of the lock; `position` returns how far the log has come; `rest` waits seconds."""
        self._died = died
        self._position = position
        self._rest = rest
        self._owner: str | None = None
        self._task: asyncio.Task[None] | None = None

    def follow(self, owner: str | None) -> None:
        """Watch the owner of the lock: its name, a space, and its URL. Without a URL nobody is watched."""
        if owner == self._owner:
            return
        self.stop()
        self._owner = owner
        try:
            parts = urlsplit((owner or "").partition(" ")[2])
            host, port = parts.hostname, parts.port
        except ValueError as error:
            log.warning("leader_not_watched", owner=owner, why=str(error))
            return
        if owner and host and port:
            self._task = asyncio.create_task(self._until_dead(owner, host, port))

    def stop(self) -> None:
        """Stop watching."""
        self._owner = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _until_dead(self, owner: str, host: str, port: int) -> None:
        was_there, rest_s, now_s = False, RETRY_S, asyncio.get_running_loop().time
        while True:
            began_s = now_s()
            if await _held_open(host, port):
                was_there = True
                if now_s() - began_s >= RETRY_S:
                    rest_s = DEAD_S
                else:
                    await self._rest(rest_s)
                    rest_s = RETRY_S
                continue
            position = self._position()
            await self._rest(DEAD_S)
            if was_there and await _is_refused(host, port) and position == self._position():
                log.warning("leader_is_gone", owner=owner)
                self._died(owner)
                return
            await self._rest(RETRY_S)


async def _held_open(host: str, port: int) -> bool:
    """Hold a connection until it ends; return False if there was none."""
    try:
        async with asyncio.timeout(REACH_LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, ValueError):  # ValueError: an impossible host name
        return False
    try:
        await reader.read(1)
    except OSError:
        pass
    finally:
        writer.close()
    return True


async def _is_refused(host: str, port: int) -> bool:
    """Return whether nobody listens there: not whether it is unreachable."""
    try:
        async with asyncio.timeout(REACH_LIMIT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False
