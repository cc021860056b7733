"""A gateway's sockets to its schedulers: one to the scheduler that it follows, and one waiting at each other.

Theory of operation
===================
Each address is dialled all the time. A standby scheduler answers only once it leads, so a waiting socket becomes a link
as soon as that one leads. The first frame of a link contains the epoch. A scheduler with a higher epoch than any so far
is followed from now on; one with a lower epoch is told so, and left. Without a store the epoch is 0 at first: such a
scheduler is followed if there is no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from ssl import SSLContext

import aiohttp
import structlog
from aiohttp import WSMsgType

from thunderagent.errors import BadFrameError
from thunderagent.scale import messages
from thunderagent.scale.gateway.remote import RemoteRuntime

log = structlog.get_logger("thunderagent.scale")

HEARTBEAT_S = 2.0
MAX_FRAME_BYTES = 64 * 2**20
CONNECT_LIMIT_S = 5.0
STAND_LIMIT_S = 30.0
"""A standby scheduler lets us wait for less than that."""

EPOCH_LIMIT_S = 5.0
"""A scheduler that has not sent its epoch by then hangs: it sends that first."""

RETRY_S = 0.1
"""Time until an address is tried again after a link ended or failed; while another is followed, `SEEK_S`."""

SEEK_S = 1.0

CLOSE_LIMIT_S = 1.0
"""Limit for closing the link of a hanging scheduler: it may be needed again."""

LOOK_S = 0.2
REFUSALS = {
    401: "it asks for a key, or for another one",
    403: "it asks for an admin key",
    421: "it is called by a name that it does not know: set its reached_at, or its allowed_hosts",
}
"""What a scheduler means by the status that refuses a link."""

LAST_WORDS_S = 2.0
"""Time at a shutdown for a scheduler to hear how the last turns ended."""


class Dialling:
    """Keeps a link to the leader among several addresses."""

    def __init__(
        self,
        runtime: RemoteRuntime,
        urls: Sequence[str],
        *,
        headers: dict[str, str],
        ssl_context: SSLContext | None,
        epoch_limit_s: float = EPOCH_LIMIT_S,
    ) -> None:
        """Link `runtime` to the scheduler at one of `urls`; `headers` contain the key that it requires."""
        self._runtime = runtime
        self._urls = urls
        self._headers = headers
        self._ssl_context = ssl_context
        self._epoch_limit_s = epoch_limit_s
        self.url = urls[0]
        """URL of the current or last scheduler."""
        self.links_count = 0
        """Number of links that were opened."""
        self._followed: aiohttp.ClientWebSocketResponse | None = None
        self._sender: asyncio.Task[None] | None = None
        self._alone = asyncio.Event()
        """Set while no scheduler is followed."""
        self._alone.set()
        self._closing: set[asyncio.Task[bool]] = set()
        self._refusals: dict[str, int] = {}
        """By address: the status that refused the last link."""

    async def run(self) -> None:
        """Keep a link until cancelled."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
        async with aiohttp.ClientSession(timeout=limits) as http, asyncio.TaskGroup() as group:
            group.create_task(self._look())
            for url in self._urls:
                group.create_task(self._keep(http, url))

    async def _keep(self, http: aiohttp.ClientSession, url: str) -> None:
        while True:
            stands_by = False
            try:
                await self._dial(http, url)
            except aiohttp.WSServerHandshakeError as error:
                stands_by = error.status == 503
                self._refused(url, error.status)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                log.debug("scheduler_unreachable", url=url, why=str(error))
            except Exception:  # whatever a scheduler sent: turns are still carried, and reported again by the next link
                log.exception("link_failed", url=url)
            await asyncio.sleep(RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if stands_by else SEEK_S):
                    await self._alone.wait()

    def _refused(self, url: str, status: int) -> None:
        """Log why a scheduler refuses links, whenever its answer changes."""
        if status != self._refusals.get(url) and status != 503:
            log.warning("scheduler_refuses", url=url, status=status, why=REFUSALS.get(status, "it knows no such link"))
        self._refusals[url] = status

    async def _dial(self, http: aiohttp.ClientSession, url: str) -> None:
        async with asyncio.timeout(STAND_LIMIT_S):
            socket = await http.ws_connect(
                url.rstrip("/") + messages.PATH,
                protocols=(messages.PROTOCOL,),
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_LIMIT_S),
                max_msg_size=MAX_FRAME_BYTES,
                headers=self._headers,
                ssl=self._ssl_context or True,
            )
        async with socket:
            try:
                epoch, known = await self._epoch_of(socket), self._runtime.turns.epoch
                if epoch > known or (self._followed is None and epoch in (0, known)):
                    await self._follow(socket, url)
                elif 0 < epoch < known:
                    log.warning("scheduler_is_over", url=url, epoch=epoch, known_epoch=known)
                    deposed = messages.Frame(1, 0, known, (messages.Deposed(known),))
                    await socket.send_bytes(messages.encode(deposed))
            except BadFrameError as error:
                log.warning("link_given_up", url=url, why=error.message)

    async def _epoch_of(self, socket: aiohttp.ClientWebSocketResponse) -> int:
        """Return the epoch of a leading scheduler; 0 if it takes that from its gateways. Raises `BadFrameError`."""
        try:
            first = await socket.receive(self._epoch_limit_s)
        except TimeoutError:
            raise BadFrameError(f"the scheduler sent no epoch for {self._epoch_limit_s:g} s") from None
        if first.type is not WSMsgType.BINARY:
            raise BadFrameError("the link ended before the scheduler sent its epoch")
        frame, _ = messages.decode(first.data)
        return frame.epoch

    async def _follow(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        """Use a link until it ends, or another scheduler is followed."""
        self._leave()
        self.url, self._followed = url, socket
        self._alone.clear()
        self.links_count += 1
        self._runtime.linked()
        self._sender = asyncio.create_task(self._send(socket))
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY or self._followed is not socket:
                    break
                frame, _ = messages.decode(message.data)
                self._runtime.take(frame)
        finally:
            if self._followed is socket:
                self._leave()
            log.warning("scheduler_left", url=url, leases_count=self._runtime.leases_count)

    def _leave(self) -> None:
        """Stop following the current scheduler."""
        if self._followed is None or self._sender is None:
            return
        self._sender.cancel()
        closing = asyncio.create_task(self._followed.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._followed = None
        self._alone.set()
        self._runtime.unlinked()

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        turns, news = self._runtime.turns, self._runtime.news
        try:
            while not socket.closed:
                await news.wait()
                news.clear()
                while turns.has_news:
                    await socket.send_bytes(messages.encode(turns.frame()))
                    await asyncio.sleep(0)  # sending 100,000 programs takes half a second
        except ConnectionError:
            pass
        except Exception:
            log.exception("link_sender_failed", url=self.url)
        await socket.close()  # a link that cannot send is useless

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._runtime.look()

    async def last_words(self) -> None:
        """Wait until a scheduler has counted all ended turns, if there is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._runtime.all_told.wait()
