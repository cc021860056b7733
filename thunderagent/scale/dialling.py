"""A gateway's socket to the scheduler that it follows: opened, kept, and opened again elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from ssl import SSLContext

import aiohttp
import structlog
from aiohttp import WSMsgType

from thunderagent.errors import BadFrameError
from thunderagent.scale import messages
from thunderagent.scale.remote import RemoteRuntime

log = structlog.get_logger("thunderagent.scale")

HEARTBEAT_S = 2.0
MAX_FRAME_BYTES = 64 * 2**20
CONNECT_LIMIT_S = 5.0
RETRY_S = 0.1
"""So long after a link ended, or could not be had, the next address is tried."""

LOOK_S = 0.2
LAST_WORDS_S = 2.0
"""At a shutdown so much time is left for a scheduler to hear how the last turns ended."""


class Dialling:
    """Keeps a link to one of several addresses, the next one if one does not answer."""

    def __init__(
        self, runtime: RemoteRuntime, urls: Sequence[str], *, headers: dict[str, str], ssl_context: SSLContext | None
    ) -> None:
        """Link `runtime` to the scheduler at one of `urls`; `headers` hold the key that it asks for."""
        self._runtime = runtime
        self._urls = urls
        self._headers = headers
        self._ssl_context = ssl_context
        self.url = urls[0]
        """Of the scheduler that is followed, or was last."""
        self.links_count = 0
        """Links that were opened."""

    async def run(self) -> None:
        """Keep a link until cancelled."""
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            group.create_task(self._look())
            for url in cycle(self._urls):
                try:
                    await self._follow(http, url)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    log.debug("scheduler_unreachable", url=url, why=str(error))
                await asyncio.sleep(RETRY_S)

    async def _follow(self, http: aiohttp.ClientSession, url: str) -> None:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            socket = await http.ws_connect(
                url.rstrip("/") + messages.PATH,
                protocols=(messages.PROTOCOL,),
                heartbeat=HEARTBEAT_S,
                max_msg_size=MAX_FRAME_BYTES,
                headers=self._headers,
                ssl=self._ssl_context or True,
            )
        async with socket:
            self.url = url
            self.links_count += 1
            self._runtime.linked()
            sender = asyncio.create_task(self._send(socket))
            try:
                async for message in socket:
                    if message.type is not WSMsgType.BINARY:
                        break
                    frame, _ = messages.decode(message.data)
                    self._runtime.take(frame)
            except BadFrameError as error:
                log.warning("link_given_up", url=url, why=error.message)
            finally:
                sender.cancel()
                self._runtime.unlinked()
                log.warning("scheduler_left", url=url, leases_count=self._runtime.leases_count)

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        turns, news = self._runtime.turns, self._runtime.news
        try:
            while not socket.closed:
                await news.wait()
                news.clear()
                while turns.has_news:
                    await socket.send_bytes(messages.encode(turns.frame()))
        except ConnectionError:
            pass
        except Exception:
            log.exception("link_sender_failed", url=self.url)
        await socket.close()  # a link by which nothing can be said is none

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._runtime.look()

    async def last_words(self) -> None:
        """Wait until a scheduler has counted all turns that ended, if there is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._runtime.all_told.wait()
