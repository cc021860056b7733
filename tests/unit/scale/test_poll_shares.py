"""Gateways poll for a scheduler: the core gets the same events, and no single gateway takes a replica down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.unit.scale.test_gateways import Heard
from thunderagent.backends import backend_of
from thunderagent.backends.asking import Failure, Found, RankReading, Watch
from thunderagent.backends.base import ReplicaReading
from thunderagent.backends.poller import Poller, PollerSettings, ReplicaEndpoint
from thunderagent.programs.messages import Decision, Event
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.polls import Polls
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime
from thunderagent.scale.gateway.polling import SharedPolls
from thunderagent.scale.messages import Digest, Frame, Hello, Look, Polled, PollShare, Told, decode, encode
from thunderagent.scale.scheduler.gateways import Gateways
from thunderagent.scale.scheduler.granting import Granting
from thunderagent.scale.scheduler.poll_shares import PollShares

INTERVAL_S = 0.02


class Engine:
    """An engine whose answers a test sets; it counts its pollers."""

    def __init__(self) -> None:
        self.metrics = ""
        self.health_status = 200
        self.models = ["m"]
        self.health_count = 0
        self.says(0.1, 0)

    def says(self, kv_used_ratio: float, queries: int, capacity_tokens: int = 16_000, ranks_count: int = 1) -> None:
        """Set its metrics."""
        self.metrics = "".join(
            f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="{capacity_tokens}"}} 1.0\n'
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {kv_used_ratio}\n'
            f'vllm:num_requests_waiting{{engine="{rank}"}} 2.0\n'
            f'vllm:num_preemptions_total{{engine="{rank}"}} {queries // 100}.0\n'
            f'vllm:prefix_cache_queries_total{{engine="{rank}"}} {queries}.0\n'
            f'vllm:prefix_cache_hits_total{{engine="{rank}"}} {queries // 2}.0\n'
            for rank in range(ranks_count)
        )

    async def health(self, request: web.Request) -> web.Response:
        self.health_count += 1
        return web.Response(status=self.health_status)

    async def tell(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": each} for each in self.models]})


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(
        [web.get("/health", engine.health), web.get("/metrics", engine.tell), web.get("/v1/models", engine.list_models)]
    )
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


class Core:
    """A runtime, its poll events, and the poller that sends them."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.runtime = Runtime(Scheduler(Cap(n=1)))
        self.replicas = Replicas(self.runtime, [])
        self.polls = Polls(self.runtime, self.replicas)
        self.poller = Poller(self, PollerSettings(interval_s=interval_s))
        self.polled_count = 0
        self.heard: list[tuple[object, ...]] = []
        self.runtime.observe(self._observed)

    def _observed(self, event: Event, decisions: Sequence[Decision]) -> None:
        values = [getattr(event, each.name) for each in fields(event) if each.name not in ("now_s", "age_s")]
        self.heard.append((type(event).__name__, *values))

    def add(self, *endpoints: ReplicaEndpoint) -> None:
        for each in endpoints:
            self.replicas.known[each.replica_id] = Replicas(self.runtime, [each]).known[each.replica_id]
            self.poller.add(each)

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        self.polled_count += 1
        self.polls.replica_polled(replica_id, reading)

    def replica_up(self, replica_id: str) -> None:
        self.polls.replica_up(replica_id)

    def may_be_silent(self, replica_id: str) -> bool:
        return False

    def heard_ago_s(self, replica_id: str) -> float:
        return float("inf")

    def replica_lost(self, replica_id: str, why: str) -> None: ...

    def replica_down(self, replica_id: str, why: str, *, is_silent: bool) -> None:
        self.polls.replica_down(replica_id, why)

    def ranks_found(self, url: str, ranks_count: int) -> None:
        self.heard.append(("ranks", ranks_count))


class Cell:
    """A scheduler's polls and its gateways', with each message encoded as on the wire."""

    def __init__(self, core: Core, group: asyncio.TaskGroup) -> None:
        self.core = core
        self.group = group
        self.gateways = Gateways(Heard(), leader_id=7, on_news=lambda _gateway: self._tell())
        self.shares = PollShares(core.poller, self.gateways)
        self.polling: dict[str, SharedPolls] = {}
        self.heard_by: dict[str, list[PollShare | Look]] = {}
        self.numbers: dict[str, int] = {}
        self.mute: set[str] = set()
        self.cut_off: set[str] = set()
        """The gateways that reach no engine."""
        self._links_count = 0

    def comes(self, gateway_id: str) -> None:
        self._links_count += 1
        self.numbers[gateway_id] = 0
        gateway = self.gateways.linked(Hello(gateway_id, 1, self._links_count, polls=True))
        self.polling[gateway_id] = SharedPolls(lambda word: self._says(gateway_id, word), self.group)
        self.heard_by[gateway_id] = []
        self._says(gateway_id, Told())
        self.shares.came(gateway)

    def goes(self, gateway_id: str) -> None:
        gateway = self.gateways.all[gateway_id]
        self.polling.pop(gateway_id).close()
        self.gateways.unlinked(gateway, gateway.link_number, 0.0)
        self.shares.went(gateway)

    def _says(self, gateway_id: str, word: Polled | Told) -> None:
        if gateway_id in self.mute:
            return
        if gateway_id in self.cut_off and isinstance(word, Polled):
            refused = decode(encode(Frame(1, 0, 0, (word,))))[0].messages[0]
            assert isinstance(refused, Polled)
            word = Polled(word.number, type(word.found)(0.0, failure=REFUSED))
        self.numbers[gateway_id] += 1
        frame, dropped_count = decode(encode(Frame(self.numbers[gateway_id], 0, 0, (word,))))
        assert not dropped_count
        self.gateways.take(self.gateways.all[gateway_id], frame)

    def _tell(self) -> None:
        for gateway_id, polls in self.polling.items():
            gateway = self.gateways.all[gateway_id]
            frame, dropped_count = decode(encode(self.gateways.frame(gateway)))
            assert not dropped_count
            for word in frame.messages:
                if isinstance(word, PollShare | Look):
                    self.heard_by[gateway_id].append(word)
                    polls.take(word)

    def close(self) -> None:
        for each in self.polling.values():
            each.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def polled(core: Core, count: int = 2) -> None:
    """Wait until a core's poller has the results of a number of polls that began after now."""
    target = core.polled_count + count + 1
    await until(lambda: core.polled_count >= target)


@asynccontextmanager
async def cell_of(core: Core) -> AsyncIterator[Cell]:
    async with asyncio.TaskGroup() as group:
        running_poller = group.create_task(core.poller.run())
        cell = Cell(core, group)
        yield cell
        cell.close()
        running_poller.cancel()


REFUSED = Failure("connection refused", is_refusal=True)


def replica(url: str, replica_id: str = "r", kind: str = "auto") -> ReplicaEndpoint:
    return ReplicaEndpoint(replica_id, url, backend_of(kind))


async def story(engine: Engine, core: Core) -> None:
    """Lead an engine through its states, each for long enough to be polled."""
    await polled(core)
    engine.says(0.5, 1000)
    await polled(core)
    engine.models = ["m", "adapter"]
    for _ in range(3):
        core.poller.suspect("r")
        await polled(core)
    engine.health_status = 503
    await until(lambda: core.heard[-1][0] == "ReplicaDown")
    engine.says(0.0, 10, capacity_tokens=8000)  # another engine runs there now
    engine.health_status = 200
    await until(lambda: any(each[0] == "ReplicaUp" and each[2] == 8000 for each in core.heard))
    engine.says(0.25, 500, capacity_tokens=8000)
    await polled(core)


async def test_the_core_hears_the_same_whoever_polls() -> None:
    """Capacities, changes since the last poll, models, coming up, going down, and the detected kind are the same."""
    heard: list[list[tuple[object, ...]]] = []
    served: list[object] = []
    for gateways_count in (0, 1, 2):
        core, engine = Core(), Engine()
        async with running(engine) as url, cell_of(core) as cell:
            for number in range(gateways_count):
                cell.comes(f"g{number}")
            core.add(endpoint := replica(url))
            await story(engine, core)
            served.append((endpoint.backend.kind, core.replicas.known["r"].reading.models))
        heard.append(core.heard)
    assert heard[0] == heard[1] == heard[2]
    assert {"ReplicaUp", "ReplicaDown", "ReplicaPolled"} <= {str(each[0]) for each in heard[0]}
    assert served == [("vllm", ("m", "adapter"))] * 3


async def test_a_connection_refused_to_one_gateway_takes_no_replica_down() -> None:
    """It has the replica polled: others may reach it, and whoever finds it gone says so at once."""
    core, engine = Core(), Engine()
    async with cell_of(core) as cell:
        cell.comes("g0")
        cell.comes("g1")
        granting = Granting(core.runtime, core.poller)
        async with running(engine) as url:
            core.add(replica(url))
            await polled(core)
            granting.seen(Digest("r", "refused"))
            await polled(core, 3)
            assert "ReplicaDown" not in [each[0] for each in core.heard]
        granting.seen(Digest("r", "refused"))
        await until(lambda: core.heard[-1][0] == "ReplicaDown")


async def test_ranks_are_found_and_each_has_its_own_reading() -> None:
    """Each poller counts them, and reads each rank that is a replica."""
    core, engine = Core(), Engine()
    engine.says(0.5, 0, ranks_count=2)
    async with running(engine) as url, cell_of(core) as cell:
        cell.comes("g0")
        core.add(ReplicaEndpoint("r", url, backend_of("auto"), None, finds_ranks=True))
        await until(lambda: ("ranks", 2) in core.heard)
        core.poller.remove("r")
        core.add(*(ReplicaEndpoint(f"r/{rank}", url, backend_of("auto"), rank) for rank in range(2)))
        await until(lambda: {f"r/{rank}" for rank in range(2)} <= core.runtime.replicas.states.keys())
        assert [state.capacity_tokens for state in core.runtime.replicas.states.values()] == [16_000, 16_000]


async def test_a_scheduler_polls_nothing_while_gateways_do_and_all_when_they_are_gone() -> None:
    """Nothing is asked twice; a silent gateway does not leave its share unknown."""
    core, engine = Core(), Engine()
    async with running(engine) as url, cell_of(core) as cell:
        cell.comes("g0")
        core.add(replica(url))
        await polled(core)
        asker = core.poller._by_number[0].asker  # its polls are counted down
        before = asker.polls_to_models
        await polled(core, 4)
        assert asker.polls_to_models == before
        cell.goes("g0")
        await polled(core, 4)
        assert asker.polls_to_models != before


async def test_a_silent_gateway_is_made_up_for() -> None:
    """It has a link and its share, and sends nothing."""
    core, engine = Core(), Engine()
    core.poller.settings = PollerSettings(interval_s=INTERVAL_S, deadline_s=0.05)
    async with running(engine) as url, cell_of(core) as cell:
        cell.comes("g0")
        cell.mute.add("g0")
        core.add(replica(url))
        await polled(core, 2)
        cell.mute.clear()
        cell.numbers["g0"] = cell.gateways.all["g0"].heard
        await polled(core, 2)


async def test_gateway_that_reaches_no_engine_takes_none_down() -> None:
    """The next one is asked, and its result counts; two that fail, or the only one, are believed."""
    core, engine = Core(), Engine()
    async with running(engine) as url, cell_of(core) as cell:
        core.add(replica(url))
        cell.comes("g0")
        cell.comes("g1")
        await until(lambda: core.runtime.replicas.open_ids)
        mine, other = sorted(cell.polling, key=lambda each: not shares_of(cell)[each])
        cell.cut_off.add(mine)
        await until(lambda: sum(isinstance(each, Look) for each in cell.heard_by[other]) >= 6)
        assert not [each for each in core.heard if each[0] == "ReplicaDown"]
        cell.cut_off.add(other)
        await until(lambda: not core.runtime.replicas.open_ids)
        cell.goes(mine)
        cell.cut_off.clear()
        await until(lambda: core.runtime.replicas.open_ids)
        cell.cut_off.add(other)
        await until(lambda: not core.runtime.replicas.open_ids)


async def test_gateway_that_was_not_asked_takes_no_engine_down() -> None:
    """It may be a gateway whose share went to another one."""
    core, engine = Core(), Engine()
    async with running(engine) as url, cell_of(core) as cell:
        core.add(replica(url))
        cell.comes("g0")
        cell.comes("g1")
        await until(lambda: core.runtime.replicas.open_ids)
        mine, other = sorted(cell.polling, key=lambda each: not shares_of(cell)[each])
        (number,) = shares_of(cell)[mine]
        before_count = core.polled_count
        for gateway_id in (other, other):
            cell.shares.polled(cell.gateways.all[gateway_id], Polled(number, Found(0.0, failure=REFUSED)))
        await until(lambda: core.polled_count > before_count + 3)
        assert not [each for each in core.heard if each[0] == "ReplicaDown"]
        assert not [each for each in cell.heard_by[other] if isinstance(each, Look)]


def shares_of(cell: Cell) -> dict[str, set[int]]:
    told = {
        gateway_id: [each for each in words if isinstance(each, PollShare)]
        for gateway_id, words in cell.heard_by.items()
    }
    return {
        gateway_id: {watch.number for watch in words[-1].watches} if words else set()
        for gateway_id, words in told.items()
        if gateway_id in cell.polling
    }


async def test_a_gateway_that_comes_or_goes_moves_its_own_share_only() -> None:
    """Each URL is polled by one; of 60 a third gateway gets about a third, from both others."""
    core = Core(interval_s=60.0)
    async with cell_of(core) as cell:
        core.add(*(replica(f"http://127.0.0.1:{number}", f"r{number}") for number in range(1, 61)))
        cell.comes("g0")
        cell.comes("g1")
        await asyncio.sleep(0)
        two = shares_of(cell)
        assert not two["g0"] & two["g1"]
        assert two["g0"] | two["g1"] == set(range(60))
        cell.comes("g2")
        await asyncio.sleep(0)
        three = shares_of(cell)
        assert three["g0"] < two["g0"]
        assert three["g1"] < two["g1"]
        assert three["g0"] | three["g1"] | three["g2"] == set(range(60))
        cell.goes("g2")
        await asyncio.sleep(0)
        assert shares_of(cell) == two
        core.poller.remove("r1")
        await asyncio.sleep(0)
        assert set().union(*shares_of(cell).values()) == set(range(1, 60))


@pytest.mark.parametrize("kind", ["of a later version", "vllm"])
async def test_engine_that_a_gateway_cannot_poll_is_left_to_its_scheduler(kind: str) -> None:
    """It does not know the kind, or cannot read the URL: it continues with the rest."""
    said: list[Polled] = []
    async with asyncio.TaskGroup() as group:
        polls = SharedPolls(said.append, group)
        url = "http://127.0.0.1:1" if kind != "vllm" else "nowhere"
        polls.take(PollShare((Watch(1, url, kind), Watch(2, "http://127.0.0.1:1"))))
        polls.take(Look(Watch(1, url, kind)))
        assert polls.count == 1
        await until(lambda: said)
        polls.close()
    assert {word.number for word in said} == {2}


def test_unknown_reading_of_a_later_version_is_left_out() -> None:
    """Figures come in the order of a reading; later versions add more."""
    known = RankReading(None, (16_000, 0.5))
    unread_count = len(fields(ReplicaReading)) - len(known.figures)
    later = json.loads(json.dumps([*known.figures, *[None] * unread_count, 99]))
    assert known.reading == ReplicaReading(capacity_tokens=16_000, kv_used_ratio=0.5)
    assert RankReading(None, tuple(later)).reading == known.reading
