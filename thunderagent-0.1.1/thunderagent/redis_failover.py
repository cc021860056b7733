"""A Redis that fails over: what a server answers that is no longer, or not yet, the one to ask.

Theory of operation
===================
A managed Redis has one address, and after a fail-over that leads to the new primary. But connections that are open stay
where they are: at the old one, which is a read-only replica by now, and answers every read. So a refusal of this kind
is an answer of the connection, not of the store: nothing was done, the connections are dropped, and the command is
repeated once on a new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    TryAgainError,
)

Answer = TypeVar("Answer")

_ELSEWHERE: Final = (
    ReadOnlyError,
    AskError,  # and MovedError
    BusyLoadingError,
    ClusterDownError,  # and MasterDownError
    TryAgainError,
)


async def asked_anew(client: Any, ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the answer to `ask`; if the server is not the one to ask, drop its connections, and ask once more."""
    try:
        return await ask()
    except _ELSEWHERE:
        await client.connection_pool.disconnect(inuse_connections=False)  # those in use will hear it themselves
    return await ask()


def in_words(error: BaseException) -> str:
    """Return what is wrong with a store, for an operator: the server's own words are for programmers of clients."""
    said = str(error) or type(error).__name__
    if isinstance(error, AskError):  # and MovedError
        host, port = getattr(error, "node_addr", ("another node", ""))
        return f"it is a node of a Redis Cluster without these keys: give the one that has them, {host}:{port}"
    if isinstance(error, TryAgainError):
        return f"it is a Redis Cluster that moves these keys just now ({said})"
    if isinstance(error, MasterDownError):
        return f"it is a replica that has lost its primary ({said})"
    if isinstance(error, ClusterDownError):
        return f"it is a Redis Cluster of which a part is down ({said})"
    if isinstance(error, ReadOnlyError):
        return f"it is a read-only replica: after a fail-over its address must lead to the new primary ({said})"
    if isinstance(error, BusyLoadingError):
        return f"it is still loading its data ({said})"
    return said
