"""EnginePlugins with an engine that has the plugin, has none, refuses, hangs, and changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.integration.support import until
from tests.loopback import on_loopback
from thunderagent.backends import backend_of
from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.leases import TurnHint
from thunderagent.programs.messages import Pause, ProgramHinted, Reason, Tick
from thunderagent.proxy.fleet import engine_plugins
from thunderagent.proxy.fleet.client import ClientSettings, ReplicaClient
from thunderagent.proxy.fleet.engine_plugins import BATCH_COUNT, POLLS_COUNT, EnginePlugins, hold_s_of, with_words
from thunderagent.proxy.fleet.known import KnownReplica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
ON = {"protocol": 1, "on": True, "version": "0.1.0", "blocks": {"total": 100, "free": 50, "pinned": 20}}


@dataclass
class Engine:
    """An engine on a socket, with what its plugin says."""

    said: object = field(default_factory=lambda: dict(ON))
    status: int = 200
    hangs: bool = False
    asked: list[tuple[str, list[Any]]] = field(default_factory=list)
    """Methods and messages."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.method, json.loads(body)["ops"] if body else []))
        while self.hangs:
            await asyncio.sleep(0.01)
        return web.json_response(self.said, status=self.status)

    @property
    def ops(self) -> list[Any]:
        return [op for _, ops in self.asked for op in ops]


@dataclass
class Setup:
    """Plugins in front of an engine, which two replicas are ranks of."""

    plugins: EnginePlugins
    engine: Engine
    observed: list[tuple[Any, ...]]

    async def settled(self) -> None:
        """Wait until nothing is left to say or to ask."""
        engine = self.plugins._by_replica["a"]
        await until(lambda: not (engine.is_talking or engine.is_due or engine.ops))

    def poll(self, polls_count: int, *replica_ids: str) -> None:
        for _ in range(polls_count):
            for replica_id in replica_ids or ("a",):
                self.plugins.polled(replica_id)


@asynccontextmanager
async def speaking(engine: Engine | None = None, *, timeout_s: float = 5.0, **options: Any) -> AsyncIterator[Setup]:
    """Run them; the engine has come up."""
    engine, observed = engine or Engine(), []
    app = web.Application()
    app.router.add_route("*", "/thunderagent/programs", engine.answer)
    async with on_loopback(app, shutdown_timeout=0) as url, ReplicaClient(ClientSettings()) as client:
        known = {}
        for rank_id, replica_id in enumerate(("a", "b")):
            endpoint = ReplicaEndpoint(replica_id, url, backend_of("vllm"), rank_id)
            known[replica_id] = KnownReplica(endpoint)
            client.add(endpoint)
        plugins = EnginePlugins(
            known, timeout_s, observe=lambda *about: observed.append(about), replicas_of=lambda _: ("a",), **options
        )
        task = asyncio.create_task(plugins.run(client))
        setup = Setup(plugins, engine, observed)
        for replica_id in known:
            plugins.came_up(replica_id)
        try:
            if options.get("is_wanted", True):
                await setup.settled()
            yield setup
        finally:
            engine.hangs = False
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_an_engine_with_the_plugin_is_asked_at_each_tenth_poll() -> None:
    """Its ranks are one engine: one request for both."""
    async with speaking() as setup:
        assert setup.engine.asked == [("GET", [])]
        assert setup.plugins.on_ids == {"a", "b"}
        for asked_count in (2, 3):
            setup.poll(POLLS_COUNT - 1, "a", "b")
            await setup.settled()
            assert len(setup.engine.asked) == asked_count - 1
            setup.poll(1, "a", "b")
            await setup.settled()
            assert len(setup.engine.asked) == asked_count


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501])
async def test_an_engine_without_it_is_asked_once(status: int) -> None:
    """Until it comes up anew: then another version may run there."""
    async with speaking(Engine(status=status)) as setup:
        setup.poll(5 * POLLS_COUNT, "a", "b")
        await asyncio.sleep(0)
        await setup.settled()
        assert len(setup.engine.asked) == 1
        assert setup.plugins.report("a") is None
        assert (setup.plugins.on_ids, setup.observed) == (set(), [])
        setup.engine.status = 200
        setup.plugins.came_up("a")
        await setup.settled()
        assert setup.plugins.report("a") is not None
        assert setup.plugins.on_ids == {"a", "b"}


async def test_answer_without_a_report_means_no_plugin() -> None:
    """Even with status 200."""
    async with speaking(Engine(said={"models": []})) as setup:
        setup.poll(POLLS_COUNT)
        await setup.settled()
        assert (len(setup.engine.asked), setup.plugins.on_ids) == (1, set())


async def test_engine_without_an_answer_is_asked_again_at_the_tenth_poll() -> None:
    """It may only be busy: it answers between two steps."""
    async with speaking(Engine(status=503)) as setup:
        assert setup.plugins.on_ids == set()
        setup.engine.status = 200
        setup.poll(POLLS_COUNT)
        await setup.settled()
        assert setup.plugins.on_ids == {"a", "b"}
        setup.engine.status = 503
        setup.poll(POLLS_COUNT)
        await setup.settled()
        assert setup.plugins.on_ids == {"a", "b"}, "one missing answer is no reason to stop"


async def test_if_it_is_not_wanted_nobody_is_asked() -> None:
    """The option is off."""
    async with speaking(is_wanted=False) as setup:
        setup.poll(2 * POLLS_COUNT)
        await asyncio.sleep(0)
        assert (setup.engine.asked, setup.plugins.on_ids) == ([], set())
        assert repr(setup.plugins) == "<EnginePlugins 0 of 0 engines, 0 messages waiting>"


async def test_unrelated_kinds_of_engines_are_not_asked() -> None:
    """They have no such path. One whose kind is found late is asked at its next poll."""
    backend = backend_of("auto")
    plugins = EnginePlugins({"a": KnownReplica(ReplicaEndpoint("a", "http://a", backend))}, 1.0)
    plugins.came_up("a")
    plugins.polled("a")
    assert repr(plugins) == "<EnginePlugins 0 of 0 engines, 0 messages waiting>"
    backend.read_metrics("vllm:num_requests_running 1.0\n")
    plugins.polled("a")
    assert repr(plugins) == "<EnginePlugins 0 of 1 engines, 0 messages waiting>"


async def test_messages_go_together_and_in_order() -> None:
    """Pauses and hints are heard of once a plugin is found."""
    async with speaking() as setup:
        assert [about[1:] for about in setup.observed] == [(Pause, ProgramHinted)]
        setup.plugins.heard(Tick(1.0), [Pause("p", "a", Reason.THRASHING), Pause("q", "gone", Reason.THRASHING)])
        setup.plugins.heard(ProgramHinted(1.0, "p", 10.0), [])
        setup.plugins.heard(ProgramHinted(1.0, "p", keep="drop"), [])
        setup.plugins.heard(ProgramHinted(1.0, "p", keep="retain"), [])
        setup.plugins.heard(ProgramHinted(1.0, "p", keep="drop", branch_id="side"), [])
        setup.plugins.release("a", "p")
        await setup.settled()
        assert setup.engine.asked[1:] == [("POST", [["pause", "p"], ["hold", "p", 21.0], ["release", "p"]])]


async def test_many_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each request, and in number: the oldest are lost."""
    monkeypatch.setattr(engine_plugins, "BATCH_S", 0.0)
    async with speaking() as setup:
        for number in range(engine_plugins.MOST_WAITING_COUNT + 5):
            setup.plugins.release("a", str(number))
        for program_id in ("x" * 257, "\udce9", "é"):  # a header may have any bytes, JSON may not
            setup.plugins.release("a", program_id)
        await setup.settled()
        assert len(setup.engine.ops) == engine_plugins.MOST_WAITING_COUNT
        assert setup.engine.ops[0] == ["release", "5"]
        assert {len(ops) for _, ops in setup.engine.asked[1:]} == {BATCH_COUNT}


async def test_messages_to_an_engine_that_hangs_are_lost_without_harm() -> None:
    """Nobody waits for them, and later ones go out."""
    async with speaking(timeout_s=2.0) as setup:
        setup.engine.hangs = True
        setup.plugins.release("a", "p")
        await setup.settled()
        setup.engine.hangs = False
        setup.plugins.release("a", "q")
        await setup.settled()
        assert setup.engine.ops == [["release", "p"], ["release", "q"]]
        assert setup.plugins.on_ids == {"a", "b"}


@pytest.mark.parametrize("said", [{**ON, "on": False}, None])
async def test_a_plugin_that_turned_itself_off_or_went_is_told_nothing(said: object) -> None:
    """The answer to a message says so, too."""
    async with speaking() as setup:
        setup.engine.said = said
        setup.plugins.release("a", "p")
        await setup.settled()
        assert setup.plugins.on_ids == set()
        setup.plugins.release("a", "q")
        await setup.settled()
        assert setup.engine.ops == [["release", "p"]]
        report = setup.plugins.report("a")
        assert report is None if said is None else report is not None and not report.is_on


async def test_a_removed_replica_is_forgotten() -> None:
    """The engine goes with its last rank."""
    async with speaking() as setup:
        setup.plugins.forget("a")
        assert setup.plugins.on_ids == {"b"}
        assert setup.plugins.report("a") is None
        setup.poll(POLLS_COUNT, "b")
        setup.plugins.forget("b")
        setup.plugins.forget("b")
        assert repr(setup.plugins) == "<EnginePlugins 0 of 0 engines, 0 messages waiting>"


async def test_blocks_that_are_held_do_not_count_as_used() -> None:
    """VLLM counts them, as if requests ran there."""
    async with speaking() as setup:
        ratios = [
            setup.plugins.without_pins("a", ReplicaReading(kv_used_ratio=each)).kv_used_ratio for each in (0.9, 0.1)
        ]
        assert ratios == [pytest.approx(0.7), 0.0]
        nothing, other = ReplicaReading(), ReplicaReading(kv_used_ratio=0.9)
        assert setup.plugins.without_pins("a", nothing) is nothing
        assert setup.plugins.without_pins("c", other) is other


async def test_no_more_capacity_counts_than_the_engine_has() -> None:
    """Whoever told it; an older plugin, one that is off, and other engines do not say."""
    engine = Engine()
    engine.said = {**ON, "blocks": {**ON["blocks"], "tokens": 1000}}
    async with speaking(engine) as setup:
        told = [setup.plugins.capacity_tokens("a", each) for each in (1150, 1000, 900, None)]
        assert told == [1000, 1000, 900, 1000]
        assert setup.plugins.capacity_tokens("c", 1150) == 1150
    async with speaking() as setup:
        assert [setup.plugins.capacity_tokens("a", each) for each in (1150, None)] == [1150, None]
    async with speaking(Engine({**engine.said, "on": False})) as setup:
        assert setup.plugins.capacity_tokens("a", 1150) == 1150


def test_a_turn_says_its_program_and_how_long_to_hold() -> None:
    """Bodies are only changed where they may have the field, and ids that are no headers are not told."""
    plugins = EnginePlugins({}, 1.0, hold_s=30.0)
    named = plugins.name_turn(CHAT, b'{"a":1}', "p", None)
    assert (named.body, named.session_id, named.is_tagged) == (
        b'{"vllm_xargs":{"thunderagent_hold_s":30.0},"a":1}',
        "p",
        True,
    )
    assert plugins.name_turn(CHAT, b'{"a":1}', "p", TurnHint(keep="drop")).body == (
        b'{"vllm_xargs":{"thunderagent_hold_s":0.0},"a":1}'
    )
    other = plugins.name_turn("/inference/v1/generate", b'{"a":1}', "p", None)
    assert (other.body, other.session_id) == (b'{"a":1}', "p")
    branch = plugins.name_turn(CHAT, b'{"a":1}', "p", None, "side")
    assert (branch.body, branch.session_id, branch.is_tagged) == (named.body, "p/side", True)
    assert b'"session_id":"p/side"' in plugins.name_turn(CHAT, b'{"session_id":"p"}', "p", None, "side").body
    for program_id in ("é", "a\nb", "x" * 257):
        assert plugins.name_turn(CHAT, b'{"a":1}', program_id, None) == (b'{"a":1}', "", False, "")
    assert EnginePlugins({}, 1.0, hold_s=0.0).name_turn(CHAT, b'{"a":1}', "p", None).body == b'{"a":1}'


def test_the_client_s_hint_precedes_and_is_bounded() -> None:
    """A hint is late up to twice its time."""
    assert [hold_s_of(hint, 30.0) for hint in (None, TurnHint(10.0), TurnHint(9e9), TurnHint(keep="retain"))] == [
        30.0,
        21.0,
        600.0,
        30.0,
    ]
    assert hold_s_of(None, None) is None


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b' { "a": 1}', b' {"vllm_xargs":{"thunderagent_hold_s":5.0}, "a": 1}'),
        (b'{"vllm_xargs": {"k": 1}}', b'{"vllm_xargs": {"k":1,"thunderagent_hold_s":5.0}}'),
        (b'{"vllm_xargs": {}, "a": 1}', b'{"vllm_xargs": {"thunderagent_hold_s":5.0}, "a": 1}'),
        (b'{"vllm_xargs": null}', b'{"vllm_xargs": {"thunderagent_hold_s":5.0}}'),
        (b'{"vllm_xargs": {"thunderagent_hold_s": 9}}', b'{"vllm_xargs": {"thunderagent_hold_s": 9}}'),
        (b'{"vllm_xargs": "text"}', b'{"vllm_xargs": "text"}'),
        (b"{}", b"{}"),
        (b"[1]", b"[1]"),
        (b"", b""),
        (b'{"a": ', b'{"a": '),
        (b"\xff", b"\xff"),
    ],
)
def test_a_body_keeps_what_is_its_client_s(body: bytes, changed: bytes) -> None:
    """What cannot hold the words is left."""
    assert with_words(body, "p", 5.0) == changed


def test_foreign_session_in_the_body_is_replaced() -> None:
    """VLLM prefers it to the header; then the engine would know the program by another name than the proxy."""
    assert with_words(b'{"session_id": "mine", "a": 1}', "p", None) == b'{"session_id":"p", "a": 1}'
    for body in (b'{"session_id": "p"}', b'{"a": {"session_id": "mine"}}'):
        assert with_words(body, "p", None) == body
