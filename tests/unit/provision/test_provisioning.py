"""Starting and ending replicas: only while this scheduler leads, and no other one gets the place of one that stays."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ParamSpec

import pytest

from tests.virtual_time import VirtualTimeLoop
from thunderagent.backends import backend_of
from thunderagent.config import ServeConfig
from thunderagent.errors import OperationRefusedError, ProvisionError, ProvisionLimitError
from thunderagent.programs.messages import EndReplica, Provision, ProvisionAsked, Reason, ReplicaRemoved
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.provision.base import Launched, ReplicaGoneError, free_port
from thunderagent.provision.manager import Provisioning, ProvisionSettings
from thunderagent.proxy.fleet.discovery import Discovery, DiscoverySettings
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime
from thunderagent.serving.provisioning import build_provisioning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from thunderagent.provision.base import OnLost

P = ParamSpec("P")
URL = "http://engine:1"
COOLDOWN_S = 5.0


class Driver:
    """A `Provisioner` whose ends fail in the given ways, then succeed."""

    name = "fake"

    def __init__(self, fleet: Fleet, *failures: ProvisionError, names_urls: bool) -> None:
        self._fleet = fleet
        self._failures = list(failures)
        self.names_urls = names_urls
        self.on_lost: OnLost | None = None
        self.ended_at_s: list[float] = []
        self.started_count = self.opened_count = 0

    async def open(self) -> int:
        self.opened_count += 1
        return 0

    async def run(self, on_lost: OnLost) -> None:
        self.on_lost = on_lost

    async def start(self) -> Launched:
        self.started_count += 1
        if self.names_urls:
            return Launched("h1", URL)
        self._fleet.known.add(URL)
        return Launched("")

    async def check_end(self, handle: str, url: str) -> None:
        """It always can."""

    async def end(self, handle: str, url: str) -> None:
        self.ended_at_s.append(asyncio.get_running_loop().time())
        if self._failures:
            raise self._failures.pop(0)

    async def close(self) -> None:
        """Nothing is left."""


class Fleet:
    """A proxy that has nothing to drain, unless it is `drains`."""

    def __init__(self, *, drains: bool = False) -> None:
        self.known: set[str] = set()
        self.drains = drains

    def wanted(self, urls: Sequence[str]) -> None:
        self.known = {*urls, *(self.known if self.drains else ())}

    def url_of(self, replica_id: str) -> str | None:
        return replica_id if replica_id in self.known else None

    def knows(self, url: str) -> bool:
        return url in self.known

    def is_up(self, url: str) -> bool:
        return url in self.known

    def leave(self, url: str) -> None:
        if not self.drains:
            self.known.discard(url)


def in_virtual_time(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


with_both_kinds_of_driver = pytest.mark.parametrize("names_urls", [True, False])


@asynccontextmanager
async def one_ending(
    *failures: ProvisionError, names_urls: bool, min_count: int = 0, drains: bool = False
) -> AsyncIterator[tuple[Provisioning, Driver, Fleet]]:
    """Start the only replica that is allowed; an operator ends it at second 1, or removes it if `min_count` is 1."""
    fleet = Fleet(drains=drains)
    driver = Driver(fleet, *failures, names_urls=names_urls)
    settings = ProvisionSettings(min_count=min_count, max_count=1, cooldown_s=COOLDOWN_S)
    provisioning = Provisioning(driver, fleet, settings, asyncio.get_running_loop().time)
    running = asyncio.create_task(provisioning.run())
    try:
        provisioning.observe(ProvisionAsked(0.0), [Provision(Reason.OPERATOR)])
        await asyncio.sleep(1.0)
        assert provisioning.count == 1
        if min_count:
            fleet.leave(URL)
            provisioning.observe(ReplicaRemoved(1.0, URL), [])
        else:
            provisioning.observe(ProvisionAsked(1.0), [EndReplica(URL, Reason.OPERATOR)])
        yield provisioning, driver, fleet
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@with_both_kinds_of_driver
@in_virtual_time
async def test_an_end_that_fails_is_tried_again(names_urls: bool) -> None:
    """Until it succeeds the failure is told, and no other one starts."""
    away = [ProvisionError("the engine is away")] * 2
    async with one_ending(*away, names_urls=names_urls) as (provisioning, driver, fleet):
        await asyncio.sleep(COOLDOWN_S + 1)
        assert (len(driver.ended_at_s), provisioning.failure) == (2, "the engine is away")
        assert provisioning.count == 0
        with pytest.raises(ProvisionLimitError, match="there are 1 started replicas"):
            provisioning.check_start()
        await asyncio.sleep(10 * COOLDOWN_S)
        assert driver.ended_at_s == pytest.approx([1.0, 1.0 + COOLDOWN_S, 1.0 + 2 * COOLDOWN_S], abs=0.5)
        assert (provisioning.count, provisioning.failure, fleet.known) == (0, "", set())
        provisioning.check_start()


@with_both_kinds_of_driver
@in_virtual_time
async def test_no_other_one_starts_while_a_replica_drains(names_urls: bool) -> None:
    """It runs until its turns are over: another one would be one more than allowed."""
    async with one_ending(names_urls=names_urls, drains=True) as (provisioning, driver, fleet):
        await asyncio.sleep(COOLDOWN_S + 1)
        provisioning.observe(ProvisionAsked(10.0), [Provision(Reason.OPERATOR)])
        with pytest.raises(ProvisionLimitError, match="there are 1 started replicas"):
            provisioning.check_start()
        await asyncio.sleep(1.0)
        assert (driver.started_count, driver.ended_at_s) == (1, [])
        fleet.known.discard(URL)
        await asyncio.sleep(1.0)
        assert len(driver.ended_at_s) == 1
        provisioning.check_start()


@with_both_kinds_of_driver
@in_virtual_time
async def test_a_replica_that_is_added_again_is_not_ended(names_urls: bool) -> None:
    """It has turns again, so it counts as one that does not end."""
    async with one_ending(ProvisionError("away"), names_urls=names_urls) as (provisioning, driver, fleet):
        await asyncio.sleep(1.0)
        fleet.known.add(URL)
        await asyncio.sleep(10 * COOLDOWN_S)
        assert (len(driver.ended_at_s), provisioning.count, fleet.known) == (1, 1, {URL})
        assert "was added again" in provisioning.failure
        provisioning.observe(ProvisionAsked(60.0), [EndReplica(URL, Reason.OPERATOR)])
        await asyncio.sleep(1.0)
        assert (len(driver.ended_at_s), provisioning.count, fleet.known) == (2, 0, set())


@in_virtual_time
async def test_a_missing_replica_is_started_only_when_its_place_is_free() -> None:
    """The smallest number does not lead over the largest one."""
    away = [ProvisionError("away")] * 2
    async with one_ending(*away, names_urls=True, min_count=1) as (_, driver, _fleet):
        await asyncio.sleep(COOLDOWN_S + 2)
        assert (len(driver.ended_at_s), driver.started_count) == (2, 1)
        await asyncio.sleep(2 * COOLDOWN_S)
        assert (len(driver.ended_at_s), driver.started_count) == (3, 2)


@in_virtual_time
async def test_replica_that_stops_between_two_tries_is_no_loss() -> None:
    """A container was stopped, but could not be removed."""
    async with one_ending(ProvisionError("away"), names_urls=True) as (provisioning, driver, _):
        await asyncio.sleep(1.0)
        assert driver.on_lost is not None
        driver.on_lost("h1", "it ended by itself")
        assert provisioning.failure == "away"
        await asyncio.sleep(COOLDOWN_S)
        assert (len(driver.ended_at_s), provisioning.failure) == (2, "")


@in_virtual_time
async def test_replica_that_is_gone_is_not_ended_again() -> None:
    """Kubernetes has replaced its pod, so the number is the same."""
    async with one_ending(ReplicaGoneError("no pod"), names_urls=False) as (provisioning, driver, _):
        await asyncio.sleep(10 * COOLDOWN_S)
        assert (len(driver.ended_at_s), provisioning.count, provisioning.failure) == (1, 1, "no pod")


class StandsBy:
    """Whether a scheduler stands by, as a test sets it."""

    def __init__(self) -> None:
        self.now = True

    def __call__(self) -> bool:
        return self.now


@with_both_kinds_of_driver
@in_virtual_time
async def test_a_scheduler_that_stands_by_starts_and_ends_nothing(names_urls: bool) -> None:
    """Its core sees no programs, so it would end the leader's replicas; it asks for their number when it leads."""
    fleet, stands_by = Fleet(), StandsBy()
    fleet.known.add("http://leader's:1")
    driver = Driver(fleet, names_urls=names_urls)
    settings = ProvisionSettings(min_count=1, max_count=2, cooldown_s=COOLDOWN_S)
    provisioning = Provisioning(driver, fleet, settings, asyncio.get_running_loop().time, stands_by)
    running = asyncio.create_task(provisioning.run())
    try:
        for reason in (Reason.SPARE, Reason.OPERATOR):
            provisioning.observe(ProvisionAsked(0.0), [EndReplica("http://leader's:1", reason), Provision(reason)])
        with pytest.raises(OperationRefusedError, match="stands by"):
            provisioning.check_start()
        with pytest.raises(OperationRefusedError, match="stands by"):
            provisioning.check_end("http://leader's:1")
        await asyncio.sleep(10 * COOLDOWN_S)
        assert (driver.opened_count, driver.started_count, driver.ended_at_s) == (0, 0, [])
        stands_by.now = False
        await asyncio.sleep(1.0)
        assert (driver.opened_count, driver.started_count, driver.ended_at_s) == (1, 1, [])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_provisioning_of_a_proxy_knows_whether_it_stands_by() -> None:
    runtime = Runtime(Scheduler(Cap()))
    replicas = Replicas(runtime, [])
    discovery = Discovery(runtime, replicas, backend_of("vllm"), DiscoverySettings())
    config = ServeConfig(provision="command", provision_command="engine --port {port}")
    provisioning = build_provisioning(config, runtime, replicas, discovery)
    provisioning.check_start()
    runtime.stands_by = True
    with pytest.raises(OperationRefusedError, match="stands by"):
        provisioning.check_start()
    await runtime.close()


def test_free_port_says_so_if_this_process_may_open_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other error would end the proxy, which asks for replicas when it has the most connections."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(ProvisionError, match="too many open files"):
        free_port()
