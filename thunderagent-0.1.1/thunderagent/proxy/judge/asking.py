"""Two ways to ask a judge: at a URL that speaks OpenAI's API, or on the replicas, as an anonymous turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import aiohttp
import msgspec
from multidict import CIMultiDict

from thunderagent.errors import ReplicaError, ThunderAgentError
from thunderagent.leases import TurnAsk
from thunderagent.leases.open_lease import LeaseSource
from thunderagent.proxy.fleet.client import ReplicaClient
from thunderagent.proxy.judge.answer import MAX_ANSWER_BYTES, Failure

CHAT_PATH = "/v1/chat/completions"
JSON_TYPE = "application/json"


class Asker(Protocol):
    """Sends a question to a judge."""

    async def ask(self, body: bytes) -> bytes | Failure:
        """Return the whole answer to a chat completion; may be cancelled at any time."""


class UrlAsker:
    """Asks at an OpenAI-style base URL, which mostly ends with `/v1`. Create it with `open_url`."""

    def __init__(self, connections: aiohttp.ClientSession, base_url: str, api_key: str) -> None:
        """Ask over `connections`."""
        self._connections = connections
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": JSON_TYPE}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def ask(self, body: bytes) -> bytes | Failure:
        """See `Asker`."""
        try:
            async with self._connections.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                return await _whole(response.status, response.content.readany)
        except (aiohttp.ClientError, OSError, ValueError):  # OSError: its timeouts, too; ValueError: an invalid answer
            return Failure.CONNECTION


@asynccontextmanager
async def open_url(base_url: str, api_key: str) -> AsyncIterator[UrlAsker]:
    """Open an asker at a URL for the length of the block. Its caller sets the deadlines."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
    ) as connections:
        yield UrlAsker(connections, base_url, api_key)


class _Asked(msgspec.Struct):
    model: str = ""


class ReplicaAsker:
    """Asks the least busy replica: an anonymous turn, which counts as load and is never held for memory."""

    def __init__(self, leases: LeaseSource, client: ReplicaClient) -> None:
        """Ask with `client`, under `leases`."""
        self._leases = leases
        self._client = client

    async def ask(self, body: bytes) -> bytes | Failure:
        """See `Asker`."""
        try:
            model = msgspec.json.decode(body, type=_Asked).model if self._leases.replicas.names_models else ""
            ask = TurnAsk(turn_id=self._leases.new_turn_id(), prompt_bytes=len(body), model=model)
            with await self._leases.lease(ask) as lease:
                replica_id, url = lease.granted.replica_id, lease.granted.url
                headers = CIMultiDict({"Content-Type": JSON_TYPE})
                try:
                    response = await self._client.send(replica_id, url, "POST", CHAT_PATH, headers, body)
                    try:
                        next_piece = partial(self._client.next_chunk, replica_id, response)
                        answer = await _whole(response.status, next_piece)
                    finally:
                        response.close()
                except ReplicaError:
                    lease.failed()
                    return Failure.CONNECTION
                if isinstance(answer, Failure):
                    lease.refused()
                else:
                    lease.finished()
                return answer
        except ThunderAgentError:  # no replica, or a shutdown
            return Failure.CONNECTION


async def _whole(status: int, next_piece: Callable[[], Awaitable[bytes]]) -> bytes | Failure:
    """Read an answer to its end, or to the size limit."""
    if status != 200:
        return Failure.STATUS
    pieces, size_bytes = [], 0
    while piece := await next_piece():
        size_bytes += len(piece)
        if size_bytes > MAX_ANSWER_BYTES:
            return Failure.TOO_LARGE
        pieces.append(piece)
    return b"".join(pieces)
