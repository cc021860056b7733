"""A scheduler's links to its gateways: websockets, and the runtime that grants their requests.

Theory of operation
===================
`Gateways` processes the gateways' messages, and `Granting` carries them out. A task for each link sends to the gateway,
one frame at a time: what gathers while a frame is sent is in the next.

A freshly started scheduler knows nothing. So it lets no gateway in before its replicas were polled once. It grants
nothing for `RESYNC_S` after the first gateway came, and until those that came have reported what runs: that is counted
first. A gateway that never ran anything may well be the first of several.

With a store it knows which gateways were there, and grants as soon as all of them have reported, or `RESYNC_S` after it
began to lead. While it stands by, requests for a link wait for the answer: so gateways have a link as soon as it leads,
and need not ask again. The first thing that a gateway gets is an empty frame of number 0, which gives it the epoch
before it says anything.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog
from aiohttp import WSMsgType, web

from thunderagent.backends.poller import Poller
from thunderagent.errors import BadFrameError, ShuttingDownError, StandingByError
from thunderagent.programs.messages import Decision, Event, Release
from thunderagent.proxy.admin.cell import CellReport
from thunderagent.proxy.fleet.known import NOT_POLLED
from thunderagent.proxy.fleet.replicas import Replicas, Watcher
from thunderagent.runtime import Runtime
from thunderagent.scale import messages
from thunderagent.scale.messages import Deposed, Frame, Hello
from thunderagent.scale.scheduler.gateway import Gateway
from thunderagent.scale.scheduler.gateways import Gateways
from thunderagent.scale.scheduler.granting import Granting
from thunderagent.scale.scheduler.link import GivesWay, Link
from thunderagent.scale.scheduler.poll_shares import PollShares
from thunderagent.scale.scheduler.replica_news import ReplicaNews

log = structlog.get_logger("thunderagent.scale")

HEARTBEAT_S = 2.0
"""How often the other side of a link is pinged; without an answer within half of it, it is gone."""

MAX_FRAME_BYTES = 64 * 2**20
HELLO_LIMIT_S = 5.0
POLLED_LIMIT_S = 3.0
"""When a gateway is let in at the latest, even if not all replicas were polled."""

RESYNC_S = 1.0
TOLD_LIMIT_S = 10.0
"""The longest wait for gateways that came and have not yet reported everything."""

STAND_LIMIT_S = 20.0
"""How long a gateway waits for a standby to lead; then it asks again: its address may be another's."""

LOOK_S = 0.25
"""How often to check for lost gateways, and for turns that can be counted by now."""


class LinkLog(Protocol):
    """Records which gateways are there."""

    def linked(self, gateway_id: str, boot_id: int) -> None:
        """Record that a gateway is there."""

    def lost(self, gateway_id: str) -> None:
        """Record that a gateway is gone."""


class Links:
    """The gateways of a scheduler. All methods belong to one event loop."""

    def __init__(
        self,
        runtime: Runtime,
        replicas: Replicas,
        watcher: Watcher,
        *,
        gateway_lost_s: float,
        log_of: Callable[[], LinkLog | None] = lambda: None,
    ) -> None:
        """Grant by `runtime`; a gateway without a link for `gateway_lost_s` is lost, and its turns are over.

        `log_of` returns the recorder of gateways.
        """
        self.granting = Granting(runtime, watcher)
        self.gateways = self.granting.gateways = Gateways(self.granting, secrets.randbits(53), self._has_news)
        self._runtime = runtime
        runtime.turn_aborters.append(self.granting.abort)
        self._replicas = replicas
        self._gateway_lost_s = gateway_lost_s
        self._links: dict[str, Link] = {}
        self._left = asyncio.Event()
        self._leads = asyncio.Event()
        if not runtime.stands_by:
            self._leads.set()
        self._since_s: float | None = None
        """Start of the wait until grants begin: the first link, or the begin of an epoch."""
        self._expected_ids: set[str] = set()
        """Known gateways that have not yet reported their turns."""
        self._waits_for_all = False
        self._log_of = log_of
        self._say_replicas = ReplicaNews(runtime, replicas, self.gateways).say_all
        self.polls: PollShares | None = None
        """Which gateway polls what; None: they poll nothing."""
        self._closing = False
        self._gives_way = GivesWay()
        self.dropped_count = 0
        """Number of messages of unknown kinds."""
        runtime.observe(self._program_ended, Release)

    def __repr__(self) -> str:
        return f"<Links: {len(self._links)}, {self.gateways!r}>"

    @property
    def linked_count(self) -> int:
        """Number of gateways with a link."""
        return len(self._links)

    def share_polls(self, poller: Poller) -> None:
        """Let gateways poll instead of the poller, while there are some."""
        self.polls = PollShares(poller, self.gateways)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for gateways and for operators."""
        return [web.get(messages.PATH, self.handle), web.get("/internal/leader", self._tell)]

    async def _tell(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Report this scheduler's state, as `Leading` does with a store."""
        return web.json_response({**self.report().model_dump(), "took_over_s": None})

    def report(self) -> CellReport:
        """Return the report of a scheduler without a store."""
        return CellReport(
            role="leader",
            epoch=self.gateways.epoch,
            gateways_count=len(self.gateways.all),
            links_count=self.linked_count,
            polled_by_gateways_count=self.polls.shared_count if self.polls is not None else 0,
            has_store=False,
            store_answers=True,
            has_standby=False,
        )

    async def run(self) -> None:
        """Check for lost gateways until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Check for lost gateways, for turns that can be counted by now, and whether to grant."""
        now_s = self._runtime.now_s()
        for gateway in self.gateways.lose_silent(now_s, self._gateway_lost_s):
            log.warning("gateway_lost", gateway_id=gateway.gateway_id)
            self._writes_lost(gateway)
        self.gateways.look()
        self.granting.count_late()
        if not self.granting.is_open and self._since_s is not None and now_s - self._since_s >= RESYNC_S:
            all_told = all(link.gateway.is_told for link in self._links.values())
            if all_told or now_s - self._since_s >= TOLD_LIMIT_S:
                self.granting.open()

    def lead(self, epoch: int, gateway_ids: Iterable[str]) -> None:
        """Let gateways in, and grant once these have reported their turns; the wait for a gateway is limited."""
        self.gateways.leads_in(epoch)
        self._expected_ids = set(gateway_ids)
        self._waits_for_all = bool(self._expected_ids)
        if self._waits_for_all:
            self._since_s = self._runtime.now_s()
        self._runtime.stands_by = False
        self._leads.set()

    def _has_told(self, gateway: Gateway) -> None:
        """Start to grant once all known gateways have reported their turns."""
        self._expected_ids.discard(gateway.gateway_id)
        if not self._expected_ids:
            self._waits_for_all = False
            self.granting.open()

    def _writes_lost(self, gateway: Gateway) -> None:
        if (link_log := self._log_of()) is not None:
            link_log.lost(gateway.gateway_id)

    async def close(self) -> None:
        """End all links, and accept no more; gateways keep their turns for the next scheduler."""
        self._closing = True
        self._leads.set()  # waiters are told that it is over
        self._runtime.replicas.on_push = None
        self.granting.close()
        for link in list(self._links.values()):
            await link.socket.close()
        for gateway in self.gateways.all.values():
            self.gateways.lose(gateway)

    # --- links

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one gateway for as long as its link lasts."""
        await self._until_leading()
        await self.until_polled()
        if self._closing:
            raise ShuttingDownError("this scheduler is shutting down")
        socket = web.WebSocketResponse(
            protocols=(messages.PROTOCOL,), heartbeat=HEARTBEAT_S, max_msg_size=MAX_FRAME_BYTES, compress=False
        )
        await socket.prepare(request)
        try:
            link, frame = await self._begin(socket)
        except (TypeError, TimeoutError, ConnectionError, BadFrameError) as error:
            log.warning("link_refused", why=str(error), peer=request.remote)
            await socket.close(code=1002)
            return socket
        gateway = link.gateway
        try:
            self._take(gateway, frame)
            async for message in socket:
                if message.type is not WSMsgType.BINARY or self._links.get(gateway.gateway_id) is not link:
                    break
                frame, dropped_count = messages.decode(message.data)
                self.dropped_count += dropped_count
                if gateway.is_told:
                    self._take(gateway, frame)
                    continue
                async with self._gives_way:  # all gateways of a cell report their turns at once
                    if self._links.get(gateway.gateway_id) is not link:
                        break  # its numbers are those of another link by now
                    self._take(gateway, frame)
        except BadFrameError as error:
            log.warning("link_given_up", gateway_id=gateway.gateway_id, why=error.message)
        finally:
            self._end(link)
        await socket.close()
        return socket

    async def _begin(self, socket: web.WebSocketResponse) -> tuple[Link, Frame]:
        """Send the epoch, and receive the gateway's identity. Raises `BadFrameError`, and what a socket raises."""
        epoch = self.gateways.epoch if self.gateways.on_higher is not None else 0
        await socket.send_bytes(messages.encode(Frame(0, 0, epoch, ())))
        async with asyncio.timeout(HELLO_LIMIT_S):
            frame, _ = messages.decode(await socket.receive_bytes())
        hello = frame.messages[0] if frame.messages else None
        if isinstance(hello, Deposed):
            self.gateways.deposed(hello.epoch)
        if not isinstance(hello, Hello):
            raise BadFrameError("a link must begin with a hello")
        gateway = self.gateways.linked(hello)
        link = Link(socket, gateway)
        before = self._links.get(gateway.gateway_id)
        self._links[gateway.gateway_id] = link
        if before is not None:
            before.replaced()
        log.info("gateway_linked", gateway_id=gateway.gateway_id, epoch=self.gateways.epoch, version=hello.version)
        if self._since_s is None:
            self._since_s = self._runtime.now_s()
        if (link_log := self._log_of()) is not None:
            link_log.linked(gateway.gateway_id, gateway.boot_id)
        link.sender = asyncio.create_task(self._send(link))
        self._say_replicas(gateway)
        if self.polls is not None and hello.polls:
            self.polls.came(gateway)
        return link, frame

    def _take(self, gateway: Gateway, frame: Frame) -> None:
        self.gateways.take(gateway, frame)
        if self._waits_for_all and gateway.is_told:
            self._has_told(gateway)

    def _end(self, link: Link) -> None:
        gateway = link.gateway
        link.sender.cancel()
        self.gateways.unlinked(gateway, link.number, self._runtime.now_s())
        if not gateway.is_linked and self.polls is not None:
            self.polls.went(gateway)
        is_known = self.gateways.all.get(gateway.gateway_id) is gateway  # not another process with its name
        if is_known and not gateway.is_linked and not gateway.turns:
            self._writes_lost(gateway)
        if self._links.get(gateway.gateway_id) is link:
            del self._links[gateway.gateway_id]
            if not self._links:
                self._left.set()
        log.info("gateway_unlinked", gateway_id=gateway.gateway_id, turns_count=len(gateway.turns))

    async def until_left(self) -> None:
        """Wait until no gateway has a link."""
        self._left.clear()
        if self._links:
            await self._left.wait()

    async def _until_leading(self) -> None:
        """Wait until this scheduler leads. Raises `StandingByError` if that takes long: then the gateway asks again."""
        try:
            async with asyncio.timeout(STAND_LIMIT_S):
                await self._leads.wait()
        except TimeoutError:
            raise StandingByError("another scheduler leads") from None

    async def until_polled(self) -> None:
        """Wait until every replica is known to be up or down, so that running turns can be counted."""
        deadline_s = self._runtime.now_s() + POLLED_LIMIT_S
        while any(known.why_down == NOT_POLLED for known in self._replicas.known.values()):
            if self._runtime.now_s() >= deadline_s:
                return
            await asyncio.sleep(0.02)  # a replica that is down from the start causes no event

    def _has_news(self, gateway: Gateway) -> None:
        link = self._links.get(gateway.gateway_id)
        if link is not None:
            link.news.set()

    async def _send(self, link: Link) -> None:
        """Send messages by a link, until it ends."""
        try:
            while not link.socket.closed:
                await link.news.wait()
                link.news.clear()
                if link.gateway.has_news and link.number == link.gateway.link_number:
                    await link.socket.send_bytes(messages.encode(self.gateways.frame(link.gateway)))
        except ConnectionError:
            pass
        except Exception:
            log.exception("link_sender_failed", gateway_id=link.gateway.gateway_id)
        await link.socket.close()  # a link that cannot send is useless

    # --- what gateways are told beside that

    def _program_ended(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        for decision in decisions:
            if type(decision) is Release:
                self.gateways.program_ended(decision.program_id)
