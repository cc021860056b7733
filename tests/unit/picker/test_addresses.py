"""Addresses of replicas: names are looked up outside turns, and kept."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.virtual_time import VirtualTimeLoop
from thunderagent.errors import NoReplicaError
from thunderagent.leases import ReplicaMap, ReplicaState
from thunderagent.picker.addresses import LOOKUP_LIMIT_S, LOOKUP_PERIOD_S, Addresses, endpoints_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from typing import Any

ENGINE = "http://Engine-1:8000"


class Names:
    """Answers as a name server, and counts its requests."""

    def __init__(self) -> None:
        self.found: Sequence[str] | None = ("10.0.0.1",)
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        await self.answers.wait()
        if self.found is None:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return self.found


@asynccontextmanager
async def looking(*urls: str) -> AsyncIterator[tuple[Addresses, Names, ReplicaMap]]:
    replicas, names = ReplicaMap(), Names()
    replicas.push(ReplicaState(f"r{number}", url) for number, url in enumerate(urls))
    addresses = Addresses(replicas, names)
    task = asyncio.create_task(addresses.run())
    try:
        yield addresses, names, replicas
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_virtual_time
async def test_turns_ask_no_name_server_that_was_asked() -> None:
    async with looking(ENGINE, "http://10.0.0.9:8000") as (addresses, names, _):
        await asyncio.sleep(0.1)
        for _turn in range(100):
            assert await addresses.of(ENGINE) == "10.0.0.1:8000"
            assert await addresses.of("http://10.0.0.9:8000") == "10.0.0.9:8000"
        assert names.asked == ["engine-1"]
        await asyncio.sleep(LOOKUP_PERIOD_S + 2)
        assert names.asked == ["engine-1"] * 2


@in_virtual_time
async def test_a_new_name_is_looked_up_once_for_all_turns_that_wait_for_it() -> None:
    async with looking() as (addresses, names, _):
        names.answers.clear()
        turns = [asyncio.create_task(addresses.of(ENGINE)) for _ in range(9)]
        await asyncio.sleep(0.1)
        turns[0].cancel()
        names.answers.set()
        assert await asyncio.gather(*turns[1:]) == ["10.0.0.1:8000"] * 8
        assert names.asked == ["engine-1"]


@in_virtual_time
async def test_found_address_is_kept_as_long_as_it_may_be_right() -> None:
    async with looking(ENGINE) as (addresses, names, replicas):
        await asyncio.sleep(0.1)
        names.found = ("10.0.0.2", "10.0.0.1")
        await asyncio.sleep(LOOKUP_PERIOD_S + 2)
        assert addresses.known(ENGINE) == "10.0.0.1:8000"
        names.found = None
        await asyncio.sleep(LOOKUP_PERIOD_S + 2)
        assert await addresses.of(ENGINE) == "10.0.0.1:8000"
        names.found = ("10.0.0.2",)
        await asyncio.sleep(LOOKUP_PERIOD_S + 2)
        assert await addresses.of(ENGINE) == "10.0.0.2:8000"
        replicas.push((), ["r0"])
        await asyncio.sleep(2)
        assert not addresses.known(ENGINE)


@in_virtual_time
async def test_a_name_without_an_address_is_a_replica_that_is_not_there() -> None:
    async with looking() as (addresses, names, _):
        names.found = None
        with pytest.raises(NoReplicaError, match=r"engine-1 has no address: .*not known"):
            await addresses.of(ENGINE)
        names.answers.clear()
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(NoReplicaError, match="no answer"):
            await addresses.of(ENGINE)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(LOOKUP_LIMIT_S, abs=0.1)
        names.found = ("fd00:0::1",)
        names.answers.set()
        assert await addresses.of(ENGINE) == "[fd00::1]:8000"


@in_virtual_time
async def test_a_subset_names_replicas_by_their_addresses_or_names() -> None:
    async with looking(ENGINE, "http://[FD00:0::9]", "http://engine-2:8000") as (addresses, names, _):
        names.found = ("10.0.0.1",)
        await asyncio.sleep(0.1)
        for hint, expected in (
            (["engine-1:8000"], [True, False, False]),
            (["10.0.0.1:8000"], [True, False, True]),
            (["ENGINE-2:8000", "[fd00::9]:80"], [False, True, True]),
            (["engine-1:8001", "engine-1"], [False, False, False]),
            ([], [False, False, False]),
            (None, [True, True, True]),
        ):
            allowed = endpoints_in(hint)
            urls = (ENGINE, "http://[FD00:0::9]", "http://engine-2:8000")
            assert [addresses.allows(url, allowed) for url in urls] == expected, hint
        assert addresses.replica_at("10.0.0.1:8000") == "r0"
        assert addresses.replica_at("[fd00:0:0::9]:80") == "r1"


@in_virtual_time
async def test_an_empty_address_is_no_replica() -> None:
    """This holds even while the name of a replica is not found yet."""
    async with looking(ENGINE) as (addresses, names, _):
        names.answers.clear()
        await asyncio.sleep(0.1)
        assert addresses.replica_at("") is None
        assert not addresses.allows(ENGINE, endpoints_in([""]))
