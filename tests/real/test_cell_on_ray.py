"""A cell on a Ray cluster of two nodes: killed parts restart at their place, and waiting clients see no error."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from tests.integration.support import ask, engine, events_of, get, until
from tests.real.ray_cluster import two_nodes
from tests.real.redis_server import redis_server
from thunderagent.errors import ConfigurationError
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    from tests.integration.support import Answer
    from tests.real.ray_cluster import TwoNodes
    from tests.real.redis_server import RedisServer

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
QUICK: dict[str, Any] = {"poll_interval_s": 0.2, "port": 0, "scheduler_port": 0}


@pytest.fixture(scope="module")
def redis(require_real: Callable[[str], NoReturn], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: test_workflows_ray.py runs this with it")
    with redis_server(require_real, tmp_path_factory.mktemp("redis"), keeps=True) as redis:
        yield redis


@pytest.fixture(scope="module")
def nodes(redis: RedisServer) -> Iterator[TwoNodes]:
    import ray  # noqa: PLC0415 - where it is

    with two_nodes(redis.packages) as nodes:
        ray.init(nodes.address, logging_level="ERROR")
        try:
            yield nodes
        finally:
            ray.shutdown()


class Clients:
    """Programs that stream turn after turn through one URL each."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.answers: list[Answer] = []
        self.stop = asyncio.Event()

    async def talk(self, number: int) -> None:
        while not self.stop.is_set():
            url = self.urls[number % len(self.urls)]
            self.answers.append(await ask(url, f"p{number}", stream=True, max_tokens=16))
            await asyncio.sleep(0.02)

    async def more(self, count: int) -> None:
        wanted_count = len(self.answers) + count
        await until(lambda: len(self.answers) >= wanted_count, within_s=60)

    def check(self) -> None:
        assert {answer.status for answer in self.answers} == {200}
        assert all(answer.whole and events_of(answer.body)[-1] == "[DONE]" for answer in self.answers)


def pids_of(cell: Any) -> dict[str, int]:
    """Return the process id of each actor, by name."""
    import ray  # noqa: PLC0415
    from ray_cell import _actors  # noqa: PLC0415

    return {name: ray.get(actor.pid.remote(), timeout=60) for name, actor in _actors(cell.name).items()}


def actor_of(name: str) -> Any:
    import ray  # noqa: PLC0415

    return ray.get_actor(name, namespace="thunderagent")


async def gone(*pids: int) -> None:
    await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), within_s=60)


async def ready(url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await get(url, "/ready")).status == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.05)


async def restarted(name: str, pid: int) -> int:
    """Wait until an actor has a new process."""
    import ray  # noqa: PLC0415

    async with asyncio.timeout(60):
        while True:
            try:
                found = await asyncio.to_thread(ray.get, actor_of(name).pid.remote(), timeout=60)
            except ray.exceptions.RayError:
                found = pid
            if found != pid:
                return int(found)
            await asyncio.sleep(0.1)


async def test_killed_member_comes_back_where_it_was(nodes: TwoNodes) -> None:
    """Kills a gateway and the scheduler, through their actors and directly."""
    import ray  # noqa: PLC0415
    import ray_cell  # noqa: PLC0415

    async with engine("--speed", "4", kv_tokens=64_000, profile="demo") as behind:
        cell = await asyncio.to_thread(ray_cell.start, backends=[behind.url], **QUICK)
        assert len(cell.urls) == 2
        with pytest.raises(ConfigurationError, match="runs already"):
            await asyncio.to_thread(ray_cell.start, backends=[behind.url], **QUICK)
        assert await asyncio.to_thread(ray_cell.url) in cell.urls.values()
        urls = list(cell.urls.values())
        pids = await asyncio.to_thread(pids_of, cell)
        assert sorted(name.split("/")[1] for name in pids) == ["gateway", "gateway", "scheduler"]
        scheduler = next(name for name in pids if "/scheduler/" in name)
        first = f"{cell.name}/gateway/{next(iter(cell.urls))}"
        for url in urls:
            await ready(url)
            assert (await ask(url, "p")).status == 200

        clients = Clients(urls[1:])
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(clients.talk(number))
            long = group.create_task(ask(urls[0], "long", stream=True, max_tokens=600))
            await clients.more(8)

            ray.kill(actor_of(first), no_restart=False)
            again = await restarted(first, pids[first])
            await ready(urls[0])
            assert (await ask(urls[0], "p")).status == 200
            answer = await long
            assert answer.whole, "a stream outlives the actor of its gateway"
            assert events_of(answer.body)[-1] == "[DONE]"
            await gone(pids[first])

            ray.kill(actor_of(scheduler), no_restart=False)
            other = await restarted(scheduler, pids[scheduler])
            await gone(pids[scheduler])
            await clients.more(8)
            os.kill(other, signal.SIGKILL)
            last = await restarted(scheduler, other)
            await clients.more(8)
            clients.stop.set()
        clients.check()
        await asyncio.to_thread(cell.stop, grace_s=5)
        await gone(again, last, *pids.values())
        assert ray_cell._actors(cell.name) == {}
        ray_cell.stop(cell.name)  # of a missing actor


async def test_two_schedulers_share_a_store(nodes: TwoNodes, redis: RedisServer) -> None:
    """They are on different nodes; one replaces the other at once."""
    import ray  # noqa: PLC0415
    import ray_cell  # noqa: PLC0415
    from ray._private.state import actors  # noqa: PLC0415

    async with engine(kv_tokens=64_000) as behind:
        cell = await asyncio.to_thread(
            ray_cell.start, name="other", store=redis.url, backends=[behind.url], lock_s=1.0, **QUICK
        )
        try:
            pids = await asyncio.to_thread(pids_of, cell)
            schedulers = [name for name in pids if "/scheduler/" in name]
            assert len(schedulers) == 2
            where = {each["Address"]["NodeID"] for each in actors().values() if each["Name"] in schedulers}
            assert len(where) == 2
            clients = Clients(list(cell.urls.values()))
            async with asyncio.TaskGroup() as group:
                for number in range(4):
                    group.create_task(clients.talk(number))
                await clients.more(8)
                for name in schedulers:
                    ray.kill(actor_of(name), no_restart=False)
                    await restarted(name, pids[name])
                    await clients.more(8)
                clients.stop.set()
            clients.check()
        finally:
            await asyncio.to_thread(cell.stop, grace_s=5)
        await gone(*pids.values())


async def test_gateways_that_are_stopped_serve_for_their_delay(nodes: TwoNodes) -> None:
    """The delay is longer than the wait for a process after its grace period."""
    import ray_cell  # noqa: PLC0415

    delay_s = 2 * ray_cell.CLOSE_S + 1
    async with engine(kv_tokens=64_000) as behind:
        cell = await asyncio.to_thread(ray_cell.start, backends=[behind.url], shutdown_delay_s=delay_s, **QUICK)
        pids = await asyncio.to_thread(pids_of, cell)
        for url in cell.urls.values():
            await ready(url)
        began_s = monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(cell.stop, grace_s=0))
        async with asyncio.timeout(delay_s):
            while (await get(cell.url, "/ready")).status == 200:
                await asyncio.sleep(0.05)
        while monotonic() < began_s + delay_s - 1:
            assert {(await ask(url, "p")).status for url in cell.urls.values()} == {200}
            await asyncio.sleep(0.2)
        await stopping
        await gone(*pids.values())


def test_impossible_cell_is_refused(nodes: TwoNodes) -> None:
    """Errors come before anything runs, or leave nothing behind."""
    import ray_cell  # noqa: PLC0415

    with pytest.raises(ConfigurationError, match=r"scheduler .* does not start; Ray's logs"):
        ray_cell.start(name="wrong", policy="fastest", nodes=[nodes.second.node_id], **QUICK)
    with pytest.raises(ConfigurationError, match="not alive"):
        ray_cell.start(name="wrong", nodes=["there"], **QUICK)
    with pytest.raises(ConfigurationError, match="no cell wrong"):
        ray_cell.url("wrong")
    assert ray_cell._actors("wrong") == {}


def test_keys_are_made_where_others_could_come() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: test_workflows_ray.py runs this with it")
    from ray_cell import _with_keys, environment_of  # noqa: PLC0415

    from thunderagent.config import ServeConfig  # noqa: PLC0415

    given: dict[str, Any] = {}
    assert _with_keys(given, ["127.0.0.1"]) == ("", "", {})
    assert _with_keys({"allow_open": True}, ["10.0.0.1"]) == ("", "", {})
    key, admin_key, of_gateways = _with_keys(given, ["10.0.0.1", "10.0.0.2"])
    assert key
    assert of_gateways == {"scheduler_key": admin_key}
    variables = environment_of({**given, "policy_args": {"n": 6}, "policy": "cap", "backends": ["http://a:1"]})
    with pytest.MonkeyPatch.context() as changes:
        for name, value in variables.items():
            changes.setenv(name, value)
        config = ServeConfig.load()
    assert (config.policy, config.policy_args, config.backends) == ("cap", {"n": "6"}, ("http://a:1",))
    assert config.has_keys
    assert not config.keys_name_tenants
    own: dict[str, Any] = {"api_keys": "me:sha256:" + "0" * 64}
    assert _with_keys(own, ["127.0.0.1"])[0] == ""
    assert len(own["admin_keys"]) == 1


def test_settings_arrive_as_they_were_given() -> None:
    """Secrets, templates and values that are none do; what no environment variable can hold is refused."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: test_workflows_ray.py runs this with it")
    from ray_cell import environment_of  # noqa: PLC0415

    from thunderagent.config import ServeConfig  # noqa: PLC0415

    given: dict[str, Any] = {
        "backend_api_key": SecretStr("a,b=c"),
        "sandbox_templates": {"dict": {"image": "i", "setup": ["a, b"]}, "model": Template(image="j")},
        "admin_port": None,
        "backends": ["http://a:1", "http://b:1"],
        "policy_args": {"n": 6},
        "tenant_weights": {"a": 1.5},
        "access_log": True,
    }
    with pytest.MonkeyPatch.context() as changes:
        for name, value in environment_of(given).items():
            changes.setenv(name, value)
        config = ServeConfig.load()
    assert config == ServeConfig.load(**given)
    refused: list[dict[str, Any]] = [
        {"policy_args": {"n": "1,m=2"}},
        {"policy_args": {"n": "1,2"}},
        {"policy_args": {"n": ""}},
        {"cors_origins": ["http://a,b"]},
    ]
    for settings in refused:
        with pytest.raises(ConfigurationError, match=f"{next(iter(settings))}: .* has a comma"):
            environment_of(settings)
