"""From the names in sources to the replicas: added, drained, removed, and forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.builders import asked
from tests.unit.proxy.fleet.discovery_setup import A, B, C, Setup
from thunderagent.backends.discovery import Wanted
from thunderagent.errors import NotFoundError, ReplicaLeavingError, RequestError
from thunderagent.programs.messages import ReplicaRemoved
from thunderagent.proxy.fleet.discovery import API, DiscoverySettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[None]:
    task = asyncio.create_task(setup.discovery.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_named_replica_is_there_and_open_after_its_first_poll() -> None:
    setup = Setup()
    setup.names("file", A, B)
    assert setup.known == ["a:1", "b:2"]
    assert setup.open == []
    setup.comes_up("b:2")
    assert setup.open == ["b:2"]
    assert [each.sources for each in setup.replicas.known.values()] == [("file",), ("file",)]


async def test_unnamed_replica_leaves_when_nothing_is_in_flight() -> None:
    """A turn, or a request without a lease, keeps it; then all parts forget it, by an event that a replay has."""
    setup = Setup()
    setup.names("file", A, B)
    setup.comes_up("a:1")
    lease = await setup.runtime.lease(asked(setup.runtime, "p"))
    async with running(setup):
        setup.names("file", B)
        assert setup.leaving() == ["a:1"]
        assert setup.open == []
        await asyncio.sleep(0.12)
        assert setup.known == ["a:1", "b:2"]
        setup.connections.open["a:1"] = 1
        lease.finished(10, 5)
        await asyncio.sleep(0.12)
        assert setup.known == ["a:1", "b:2"]
        setup.connections.open["a:1"] = 0
        await setup.until_known("b:2")
    assert [each.replica_id for each in setup.events if isinstance(each, ReplicaRemoved)] == ["a:1"]


async def test_replica_busy_for_too_long_is_removed_all_the_same() -> None:
    setup = Setup(DiscoverySettings(drain_limit_s=10.0))
    setup.names("file", A)
    setup.comes_up("a:1")
    lease = await setup.runtime.lease(asked(setup.runtime, "p"))
    async with running(setup):
        setup.names("file")
        setup.now_s = 9.0
        await asyncio.sleep(0.12)
        assert setup.known == ["a:1"]
        setup.now_s = 10.0
        await setup.until_known()
    lease.failed()
    assert not setup.runtime.scheduler.turns


async def test_a_source_that_fails_keeps_its_set() -> None:
    setup = Setup()
    setup.names("file", A)
    setup.discovery.source_failed("file", "gone")
    assert setup.known == ["a:1"]
    assert setup.discovery.failures["file"] == "gone"
    setup.names("file", A)
    assert setup.discovery.failures["file"] == ""
    assert setup.leaving() == []


async def test_several_sources_are_a_union() -> None:
    setup = Setup()
    async with running(setup):
        setup.names("file", A, B)
        setup.names("dns", B, C)
        assert setup.replicas.known["b:2"].sources == ("file", "dns")
        setup.names("file")
        await setup.until_known("b:2", "c:3")
        assert setup.replicas.known["b:2"].sources == ("dns",)


async def test_replica_added_by_the_api_stays_and_a_drained_one_stays_drained() -> None:
    setup = Setup()
    async with running(setup):
        assert setup.discovery.add(Wanted(A)) == (["a:1"], True)
        assert setup.discovery.add(Wanted(A)) == (["a:1"], False)
        setup.names("file", A, B)
        setup.comes_up("a:1", "b:2")
        setup.discovery.drain("b:2")
        setup.names("file", B)
        assert setup.open == ["a:1"]
        setup.polls.replica_down("b:2", "restart")
        setup.comes_up("b:2")
        assert setup.open == ["a:1"]
        setup.discovery.undrain("b:2")
        assert setup.open == ["a:1", "b:2"]
        setup.names("file")
        await setup.until_known("a:1")
        assert setup.replicas.known["a:1"].sources == (API,)


async def test_replica_removed_by_the_api_stays_away_until_its_source_drops_it_once() -> None:
    setup = Setup()
    async with running(setup):
        setup.names("file", A, B)
        setup.discovery.remove("a:1")
        await setup.until_known("b:2")
        setup.names("file", A, B)
        assert setup.known == ["b:2"]
        setup.names("file", B)
        setup.names("file", A, B)
        assert setup.known == ["b:2", "a:1"]
        setup.discovery.remove("a:1")
        await setup.until_known("b:2")
        setup.discovery.add(Wanted(A))
        assert setup.known == ["b:2", "a:1"]


async def test_a_pod_that_is_about_to_go_drains_and_may_come_back() -> None:
    setup = Setup()
    setup.names("kubernetes", A)
    setup.comes_up("a:1")
    setup.names("kubernetes", A, draining=True)
    assert (setup.open, setup.leaving()) == ([], [])
    setup.names("kubernetes", A)
    assert setup.open == ["a:1"]
    setup.discovery.drain("a:1")
    setup.names("kubernetes", A, draining=True)
    setup.discovery.undrain("a:1")
    assert setup.open == [], "only the admin API's word was undone"


async def test_leaving_replica_cannot_be_undrained_but_added_again() -> None:
    setup = Setup()
    setup.names("file", A)
    setup.comes_up("a:1")
    setup.names("file")
    with pytest.raises(ReplicaLeavingError):
        setup.discovery.undrain("a:1")
    assert setup.discovery.add(Wanted(A)) == (["a:1"], True)
    assert (setup.open, setup.leaving()) == (["a:1"], [])
    for what in (setup.discovery.remove, setup.discovery.drain, setup.discovery.undrain):
        with pytest.raises(NotFoundError):
            what("nobody")


async def test_a_forced_removal_does_not_wait() -> None:
    setup = Setup()
    setup.names("file", A)
    setup.comes_up("a:1")
    lease = await setup.runtime.lease(asked(setup.runtime, "p"))
    await setup.discovery.remove_now("a:1")
    assert setup.known == []
    lease.failed()
    with pytest.raises(NotFoundError):
        await setup.discovery.remove_now("a:1")


async def test_replica_that_cannot_be_followed_is_left_out_and_harms_nobody() -> None:
    """If a source names it, it is logged; the admin API refuses it; no part keeps half of it."""
    setup = Setup()
    setup.follower.refuses = {"a:1"}
    setup.names("file", A, B)
    assert setup.known == ["b:2"]
    with pytest.raises(RequestError, match="a:1 cannot be followed"):
        setup.discovery.add(Wanted(A))
    setup.names("file", B)
    setup.follower.refuses = set()
    setup.names("file", B)
    assert setup.known == ["b:2"]
    assert setup.discovery.add(Wanted(A)) == (["a:1"], True)


async def test_renamed_replica_leaves_and_comes_again() -> None:
    """It has a password now: the id is the same, the address to connect to is another one."""
    setup = Setup()
    setup.names("file", A)
    setup.comes_up("a:1")
    lease = await setup.runtime.lease(asked(setup.runtime, "p"))
    async with running(setup):
        setup.names("file", "http://me:secret@a:1")
        assert setup.leaving() == ["a:1"]
        lease.finished(1, 1)
        async with asyncio.timeout(5):
            while setup.replicas.url_of("a:1") == A:
                await asyncio.sleep(0.005)
        assert setup.known == ["a:1"]
        assert (setup.leaving(), setup.open) == ([], [])


async def test_ranks_are_replicas_of_their_own() -> None:
    setup = Setup(DiscoverySettings(ranks_count="auto"))
    async with running(setup):
        setup.discovery.replicas_wanted("file", [Wanted(A), Wanted(B, 2)])
        assert setup.known == ["a:1", "b:2/0", "b:2/1"]
        assert [each.endpoint.finds_ranks for each in setup.replicas.known.values()] == [True, False, False]
        setup.polls.ranks_found(A, 3)
        await setup.until_known("a:1/0", "a:1/1", "a:1/2", "b:2/0", "b:2/1")
        assert [setup.replicas.known[f"a:1/{rank}"].endpoint.rank_id for rank in range(3)] == [0, 1, 2]
        assert setup.discovery.ids_at(A) == ["a:1/0", "a:1/1", "a:1/2"]
        setup.discovery.remove("a:1/1")
        await setup.until_known("a:1/0", "a:1/2", "b:2/0", "b:2/1")
        setup.polls.ranks_found(A, 1)
        await setup.until_known("a:1", "b:2/0", "b:2/1")
        setup.discovery.replicas_wanted("file", [])
        await setup.until_known()


async def test_an_engine_that_is_removed_rank_by_rank_is_forgotten_by_the_api() -> None:
    setup = Setup()
    async with running(setup):
        setup.discovery.add(Wanted(A, 2))
        for replica_id in ("a:1/0", "a:1/1"):
            setup.discovery.remove(replica_id)
        await setup.until_known()
        assert setup.discovery.add(Wanted(A, 1)) == (["a:1"], True)
        assert setup.known == ["a:1"]
