"""A scheduler's links, in one process: when it grants, what it counts late, and unusable links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import structlog.testing
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from thunderagent.leases import Lease, TurnAsk
from thunderagent.programs.messages import Decision, Event, TurnAdopted, TurnProgressed, TurnStarted, TurnUnverified
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime
from thunderagent.scale import messages
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.dialling import Dialling
from thunderagent.scale.gateway.remote import RemoteRuntime, RemoteSettings
from thunderagent.scale.messages import (
    Card,
    Frame,
    FromGateway,
    Hello,
    Hold,
    Message,
    Progress,
    Refusal,
    Running,
    Told,
    Turns,
)
from thunderagent.scale.scheduler.granting import SLICE_COUNT
from thunderagent.scale.scheduler.links import RESYNC_S, TOLD_LIMIT_S, Links

LEASE = Lease(1, "p", 1, "r0", "", None, "fits", 0.0)


class Unwatched:
    """Watches no replica."""

    def suspect(self, replica_id: str) -> None: ...

    def refused(self, replica_id: str) -> None: ...


class Cell:
    """A scheduler with one replica, which one program at a time may use, and its clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.runtime = Runtime(Scheduler(Cap(n=1)), clock=lambda: self.now_s)
        self.links = Links(self.runtime, Replicas(self.runtime, []), Unwatched(), gateway_lost_s=5.0)
        self.events: list[type] = []
        self.runtime.observe(self._observed, TurnAdopted, TurnUnverified, TurnStarted, TurnProgressed)

    def _observed(self, event: Event, decisions: Sequence[Decision]) -> None:
        self.events.append(type(event))

    def up(self) -> None:
        self.runtime.replica_at("r0", "http://r0")
        self.runtime.replica_up("r0", 100_000)

    def passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.links.look()


class Peer:
    """A gateway's end of a link."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.heard: list[Message] = []
        self._number = 0

    async def says(self, *said: FromGateway) -> None:
        self._number += 1
        await self.socket.send_bytes(messages.encode(Frame(self._number, 0, 0, said)))

    async def hears(self, kind: type[Message]) -> None:
        """Read messages until one of a kind comes."""
        while not any(isinstance(each, kind) for each in self.heard):
            frame, _ = messages.decode(await self.socket.receive_bytes(timeout=5))
            self.heard.extend(frame.messages)


@asynccontextmanager
async def served(cell: Cell) -> AsyncIterator[tuple[TestServer, aiohttp.ClientSession]]:
    app = web.Application()
    app.add_routes(cell.links.routes())
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        yield server, http
        await cell.links.close()


async def test_a_new_scheduler_first_hears_what_runs_though_the_first_gateway_never_ran_anything() -> None:
    """Another one may have: a turn is held until others had the time to link and report."""
    cell = Cell()
    cell.up()
    async with served(cell) as (server, http):
        first = Peer(await http.ws_connect(server.make_url(messages.PATH)))
        await first.says(Hello("new", 1, 1), Told(), TurnAsk(turn_id=1, program_id="q"))
        await first.hears(Hold)
        assert not any(isinstance(each, Lease) for each in first.heard)

        old = Peer(await http.ws_connect(server.make_url(messages.PATH)))
        await old.says(Hello("old", 1, 1, 3, 5), Turns(running=(Running(TurnAsk(turn_id=1, program_id="p"), LEASE),)))
        await old.hears(messages.Replicas)
        cell.passes(RESYNC_S)
        await asyncio.sleep(0)
        assert not cell.runtime.held_count, "it grants before all was told"
        assert cell.events == [TurnAdopted]

        cell.passes(TOLD_LIMIT_S)
        await asyncio.sleep(0)
        assert cell.runtime.held_count == 1, "the other program is not counted"


async def test_a_gateways_names_are_checked_as_its_clients_are() -> None:
    """A turn with a wrong name is refused; one that runs already is counted, without its names."""
    cell = Cell()
    cell.up()
    granting = cell.links.granting
    gateway = cell.links.gateways.linked(Hello("g", 1, 1))
    granting.open()
    wrong = (
        *({"program_id": each} for each in ("", "a\nb", "a\u2028b", "x" * 257)),
        *({name: "\x9b2J"} for name in ("branch_id", "parent_id", "tenant", "group_id", "role", "model")),
    )
    for turn_id, names in enumerate(wrong, 1):
        cell.links.gateways.take(gateway, Frame(turn_id, 0, 0, [TurnAsk(turn_id=turn_id, **names)]))
        await asyncio.sleep(0)
    refused = [each for each in cell.links.gateways.frame(gateway).messages if isinstance(each, Refusal)]
    assert [each.code for each in refused] == ["invalid_program_id"] * len(wrong)
    granting.adopted(99, Running(TurnAsk(turn_id=99, program_id="a\nb", prompt_bytes=100), LEASE))
    assert cell.runtime.leases_count == 1
    granting.card(Card("b\nc", "r0", 10))
    granting.card(Card("b", "r0", 10, tenant="\x9b"))
    assert not cell.runtime.programs


async def test_gateway_name_belongs_to_one_process_at_a_time() -> None:
    """The earlier process is told that its link is over, and takes another name: otherwise it would wait for ever."""
    cell = Cell()
    cell.up()
    async with served(cell) as (server, http):
        first = Peer(await http.ws_connect(server.make_url(messages.PATH)))
        await first.says(Hello("g", 1, 1), Told(), TurnAsk(turn_id=1, program_id="p"))
        await first.hears(Hold)
        second = Peer(await http.ws_connect(server.make_url(messages.PATH)))
        await second.says(Hello("g", 2, 1), Told(), TurnAsk(turn_id=1, program_id="q"))
        await second.hears(Hold)
        async with asyncio.timeout(5):
            async for _ in first.socket:
                pass
        assert cell.links.linked_count == 1
        cell.passes(RESYNC_S)
        await second.hears(Lease)


async def test_a_turn_that_is_counted_late_is_counted_as_it_runs() -> None:
    """Counting is not tried where nothing is granted; reports meanwhile are sent afterwards."""
    cell = Cell()
    cell.links.granting.adopted(
        cell.runtime.new_turn_id(), Running(TurnAsk(turn_id=9, program_id="p"), LEASE, started=True)
    )
    cell.links.granting.progressed(1, Progress(1, unverified=True))
    cell.links.granting.progressed(1, Progress(1, 30))
    cell.passes(1.0)
    assert cell.events == []
    cell.up()
    cell.passes(1.0)
    assert cell.events == [TurnAdopted, TurnUnverified, TurnStarted, TurnProgressed]
    cell.passes(1.0)
    assert cell.events.count(TurnAdopted) == 1


async def test_a_scheduler_that_can_say_nothing_by_a_link_ends_it() -> None:
    """The gateway links again, and gets everything; the failure is logged."""
    cell = Cell()
    with structlog.testing.capture_logs() as logs:
        async with served(cell) as (server, http):
            peer = Peer(await http.ws_connect(server.make_url(messages.PATH)))
            await peer.says(Hello("g", 1, 1), Told())
            await peer.hears(messages.Lead)
            cell.links.gateways.say(cell.links.gateways.all["g"], messages.Ok((2**70,)))
            while (await peer.socket.receive(timeout=5)).type is WSMsgType.BINARY:
                pass
            assert peer.socket.closed
    assert "link_sender_failed" in [each["event"] for each in logs]


async def test_a_leader_hears_of_higher_epochs_only_from_gateways_that_follow_another() -> None:
    """A gateway with an older frame of this very leader does not raise its epoch."""
    cell, heard = Cell(), list[int]()
    cell.links.gateways.on_higher = heard.append
    cell.links.lead(50, ())
    async with served(cell) as (server, http):
        for epoch in (49, 2**31 - 1, 51):
            async with http.ws_connect(server.make_url(messages.PATH)) as socket:
                await socket.receive_bytes(timeout=5)
                await socket.send_bytes(messages.encode(Frame(1, 0, epoch, (messages.Deposed(epoch),))))
                assert (await socket.receive(timeout=5)).type is WSMsgType.CLOSE
    assert heard == [51]


async def test_a_gateway_that_can_say_nothing_by_a_link_ends_it() -> None:
    """It dials again."""
    runtime = RemoteRuntime(CarriedTurns("g", 1), RemoteSettings())
    linked, ended = asyncio.Event(), asyncio.Event()

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=(messages.PROTOCOL,))
        await socket.prepare(request)
        await socket.send_bytes(messages.encode(Frame(0, 0, 0, ())))
        await socket.receive()
        linked.set()
        await socket.receive()
        ended.set()
        return socket

    app = web.Application()
    app.router.add_get(messages.PATH, handle)
    with structlog.testing.capture_logs() as logs:
        async with TestServer(app) as server:
            dialling = Dialling(runtime, [str(server.make_url("/"))], headers={}, ssl_context=None)
            task = asyncio.create_task(dialling.run())
            async with asyncio.timeout(30):
                await linked.wait()
                runtime.release("p", 2**70)
                await ended.wait()
            task.cancel()
            await asyncio.wait([task])
    assert "link_sender_failed" in [each["event"] for each in logs]


class GateForAll:
    """In place of `GivesWay`: everybody waits in it until it is opened."""

    def __init__(self) -> None:
        self.waiting_count = 0
        self.opened = asyncio.Event()

    async def __aenter__(self) -> None:
        self.waiting_count += 1
        await self.opened.wait()

    async def __aexit__(self, *_: object) -> None: ...


async def test_what_came_by_a_link_that_was_replaced_is_not_taken_for_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many gateways report at once, so frames wait; the numbers of a new link begin anew."""
    cell, gate, peers = Cell(), GateForAll(), list[Peer]()
    cell.up()
    monkeypatch.setattr(cell.links, "_gives_way", gate)
    async with served(cell) as (server, http), asyncio.timeout(5):
        for number, program_id in enumerate(("before", "after"), 1):
            peer = Peer(await http.ws_connect(server.make_url(messages.PATH)))
            peers.append(peer)  # its connection stays open
            await peer.says(Hello("g", 1, number, 3, 5))
            lease = msgspec.structs.replace(LEASE, program_id=program_id)
            await peer.says(Turns(running=(Running(TurnAsk(turn_id=1, program_id=program_id), lease),)))
            while gate.waiting_count < number:
                await asyncio.sleep(0)
        gate.opened.set()
        while not cell.events:
            await asyncio.sleep(0)
        assert list(cell.runtime.pools.programs) == ["after"]


async def test_the_first_turns_are_granted_before_the_last_one_that_waited_is_looked_at() -> None:
    """Thousands wait for a scheduler that takes over: the grants of the first ones go out at once."""
    cell, held_counts = Cell(), list[int]()
    cell.up()
    granting, loop = cell.links.granting, asyncio.get_running_loop()
    gateway = cell.links.gateways.linked(Hello("g", 1, 1))
    count = 3 * SLICE_COUNT
    asks = tuple(TurnAsk(turn_id=number, program_id=f"p{number}") for number in range(1, count + 1))
    cell.links.gateways.take(gateway, Frame(1, 0, 0, (Hello("g", 1, 1), Turns(held=asks), Told())))
    await asyncio.sleep(0)
    assert not cell.runtime.held_count
    cell.links.gateways._on_news = lambda _: loop.call_soon(lambda: held_counts.append(cell.runtime.held_count))
    granting.open()
    async with asyncio.timeout(30):
        while cell.runtime.held_count < count - 1:
            await asyncio.sleep(0)
    assert held_counts[0] < SLICE_COUNT
    await cell.links.close()
