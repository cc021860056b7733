"""NoticeSender with engines that answer, hang, refuse, or are gone; and the replicas where a program is ended."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from tests.loopback import on_loopback
from thunderagent.backends import backend_of
from thunderagent.backends.base import Notice
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.programs.messages import Hold, Reason, Release, Tick
from thunderagent.proxy.fleet.client import ClientSettings, ReplicaClient
from thunderagent.proxy.fleet.notices import SENDERS_COUNT, NoticeSender, TaggedPrograms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ABORT = Notice("/abort_request", b'{"rid":"1"}')
CLOSE = Notice("/close_session", b'{"session_id":"p"}')


@dataclass
class Engine:
    """An engine on a socket whose answers a test sets."""

    statuses: dict[str, int] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    calls: list[tuple[str, bytes, str | None]] = field(default_factory=list)
    at_once_count: int = 0
    most_at_once_count: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.calls.append((request.path, body, request.headers.get("Authorization")))
        self.at_once_count += 1
        self.most_at_once_count = max(self.most_at_once_count, self.at_once_count)
        try:
            while request.path in self.hangs:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
        finally:
            self.at_once_count -= 1
        return web.Response(status=self.statuses.get(request.path, 200))

    def count(self, notice: Notice) -> int:
        return sum(path == notice.path for path, _, _ in self.calls)


@asynccontextmanager
async def sending(timeout_s: float = 5.0, max_waiting_count: int = 100) -> AsyncIterator[tuple[NoticeSender, Engine]]:
    """Run a sender in front of an engine, as replica `a`; `b` refuses connections, others are unknown."""
    engine = Engine()
    app = web.Application()
    app.router.add_post("/{path:.*}", engine.answer)
    async with on_loopback(app, shutdown_timeout=0) as engine_url, ReplicaClient(ClientSettings()) as client:
        urls = {"a": engine_url, "b": "http://127.0.0.1:9"}
        sender = NoticeSender(urls.get, timeout_s, max_waiting_count=max_waiting_count)
        for replica_id, url in urls.items():
            client.add(ReplicaEndpoint(replica_id, url, backend_of("sglang")))
        task = asyncio.create_task(sender.run(client))
        await asyncio.sleep(0)
        try:
            yield sender, engine
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            engine.hangs.clear()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_notice_arrives_with_the_authorization_of_its_turn() -> None:
    """Engines with an API key require it for control, too."""
    async with sending() as (sender, engine):
        sender.send("a", ABORT, "Bearer key")
        sender.send("a", CLOSE)
        await until(lambda: len(engine.calls) == 2)
        assert set(engine.calls) == {
            ("/abort_request", b'{"rid":"1"}', "Bearer key"),
            ("/close_session", b'{"session_id":"p"}', None),
        }


async def test_an_engine_that_hangs_delays_no_other_kind_and_gets_few_at_once() -> None:
    """A hundred hanging releases do not block an abort; each ends at its deadline, and the next one goes."""
    async with sending(timeout_s=1.5) as (sender, engine):  # an engine notices the end of a call a little later
        engine.hangs = {CLOSE.path}
        for _ in range(3 * SENDERS_COUNT):
            sender.send("a", CLOSE)
        await until(lambda: engine.count(CLOSE) == SENDERS_COUNT)
        sender.send("a", ABORT)
        await until(lambda: engine.count(ABORT) == 1)
        assert engine.most_at_once_count <= SENDERS_COUNT + 1
        await until(lambda: engine.count(CLOSE) == 3 * SENDERS_COUNT)


async def test_a_replica_that_is_gone_is_no_error() -> None:
    """It does not listen, or is no longer known: the next one is still served."""
    async with sending() as (sender, engine):
        sender.send("b", ABORT)
        sender.send("never heard of", ABORT)
        sender.send("a", ABORT)
        await until(lambda: engine.count(ABORT) == 1)


@pytest.mark.parametrize("status", [400, 404, 405, 501])
async def test_an_engine_without_the_path_is_not_asked_again_until_it_comes_up_anew(status: int) -> None:
    """Each replica is asked once; another version may run there after a restart."""
    async with sending() as (sender, engine):
        engine.statuses[CLOSE.path] = status
        sender.send("a", CLOSE)
        await until(lambda: engine.count(CLOSE) == 1 and not engine.at_once_count)
        await until(lambda: repr(sender) == "<NoticeSender 0 waiting, not to a/close_session>")
        for _ in range(3):
            sender.send("a", CLOSE)
        sender.send("a", ABORT)  # another kind: still sent
        await until(lambda: engine.count(ABORT) == 1)
        assert engine.count(CLOSE) == 1
        engine.statuses.clear()
        sender.replica_up("a")
        sender.send("a", CLOSE)
        await until(lambda: engine.count(CLOSE) == 2)


@pytest.mark.parametrize("status", [400, 401, 500, 503])
async def test_single_failure_of_an_engine_that_took_notices_is_no_refusal(status: int) -> None:
    """The path exists: the next notice is sent."""
    async with sending() as (sender, engine):
        sender.send("a", CLOSE)
        await until(lambda: engine.count(CLOSE) == 1 and not sender._sending)
        engine.statuses[CLOSE.path] = status
        sender.send("a", CLOSE)
        await until(lambda: engine.count(CLOSE) == 2 and not sender._sending)
        sender.send("a", CLOSE)
        await until(lambda: engine.count(CLOSE) == 3)


async def test_excess_notices_are_dropped_and_memory_is_bounded() -> None:
    """At most the limit waits for an engine that hangs."""
    async with sending(max_waiting_count=5) as (sender, engine):
        engine.hangs = {CLOSE.path}
        for _ in range(SENDERS_COUNT + 20):
            sender.send("a", CLOSE)
        assert repr(sender) == "<NoticeSender 5 waiting>"
        engine.hangs = set()
        await until(lambda: repr(sender) == "<NoticeSender 0 waiting>")


async def test_a_shutdown_lets_the_last_notices_go_out() -> None:
    """Its turns are cut off just before: their engines must learn that."""
    async with sending() as (sender, engine):
        for _ in range(2 * SENDERS_COUNT):
            sender.send("a", ABORT)
    assert engine.count(ABORT) == 2 * SENDERS_COUNT


async def test_before_and_after_it_runs_nothing_is_sent_and_nothing_raises() -> None:
    """A turn that ends in the middle of a shutdown meets a sender that has stopped."""
    sender = NoticeSender(lambda _replica_id: "http://127.0.0.1:9", 1.0)
    sender.send("a", ABORT)
    async with sending() as (running, _):
        pass
    running.send("a", ABORT)
    assert repr(sender) == repr(running) == "<NoticeSender 0 waiting>"


def test_a_program_is_ended_once_wherever_it_was_tagged() -> None:
    """Every replica that had a tagged turn of it is told, with the last turn's authorization; others are not."""
    ended: list[tuple[str, str, str | None]] = []
    tagged = TaggedPrograms(lambda *what: ended.append(what))
    tagged.add("p", "a", "Bearer 1")
    tagged.add("p", "b", None)
    tagged.add("p", "a", "Bearer 2")
    tagged.add("q", "a", None)
    release = Release("p", 1, Reason.RELEASED)
    tagged.heard(Tick(1.0), [Hold(1, "p", Reason.NO_ROOM), release])
    assert ended == [("p", "a", "Bearer 2"), ("p", "b", None)]
    tagged.heard(Tick(2.0), [release, Release("never tagged", 1, Reason.RELEASED)])
    assert len(ended) == 2
