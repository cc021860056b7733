"""Leases over the API: one that its caller never got is not kept."""

from __future__ import annotations

import asyncio
from dataclasses import MISSING, fields
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from thunderagent.errors import ShuttingDownError
from thunderagent.leases import ReplicaMap, ReplicaState
from thunderagent.policy_loader import load_policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.control.engine_control import EngineControlSettings
from thunderagent.proxy.control.leases import Leases
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.held import NO_LIMITS, HeldTurn, HeldTurns
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.wire.aiohttp_errors import answering_errors
from thunderagent.proxy.wire.aiohttp_server import Runner
from thunderagent.runtime import Runtime


def test_usual_control_routes_stand_in_the_configuration_alone() -> None:
    """A second default might differ some day."""
    assert [field.name for field in fields(EngineControlSettings) if field.default is not MISSING] == []


async def test_a_lease_on_a_replica_that_was_removed_just_now_is_given_back() -> None:
    """Its caller gets an error and no id, so it could not end it."""
    runtime = Runtime(Scheduler(load_policy("passthrough", {})))
    runtime.replica_up("gone")  # the scheduler knows it, the replicas no longer do
    held = HeldTurns(NO_LIMITS, CollectorRegistry())
    leases = Leases(runtime, Replicas(runtime, []), Tenancy(runtime, from_key=False), held, limit_s=60)
    app = web.Application()
    app.router.add_post("/leases", answering_errors(leases.take))
    runner = Runner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}/leases".format(*runner.addresses[0])
        async with aiohttp.ClientSession() as client, client.post(url, json={"program_id": "a"}) as answer:
            assert answer.status == 502
            assert (await answer.json())["error"]["code"] == "replica_removed"
        assert runtime.leases_count == 0
    finally:
        leases.close()
        await runner.cleanup()


async def test_turns_that_wait_for_their_keys_share_go_in_order_and_are_refused_at_the_end() -> None:
    """A lease that ends lets the next in; one whose caller leaves is in nobody's way."""
    replicas = ReplicaMap()
    replicas.push([ReplicaState("r", capacity_tokens=100)])
    source = SimpleNamespace(replicas=replicas)
    held = HeldTurns(NO_LIMITS, CollectorRegistry())
    leases = Leases(source, Replicas(Runtime(Scheduler(load_policy("passthrough", {}))), []), None, held, limit_s=60)  # type: ignore[arg-type]
    let_in: list[str] = []
    ends = {name: asyncio.Event() for name in "abcde"}

    async def take(name: str, tokens: int) -> None:
        with leases._claim_of("key", name) as claim:
            await leases._claim_in_line(claim, tokens, None, lambda: HeldTurn(held, None, 1))
            let_in.append(name)
            await ends[name].wait()

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    tasks = {}
    for name, tokens in (("a", 50), ("b", 40), ("c", 40), ("d", 10), ("e", 10)):
        tasks[name] = asyncio.create_task(take(name, tokens))
        await turns()
    assert let_in == ["a"]
    tasks["b"].cancel()
    ends["a"].set()
    await turns()
    assert let_in == ["a", "c", "d"]
    await leases.stop_waiting(web.Application())
    with pytest.raises(ShuttingDownError):
        await tasks["e"]
    for end in ends.values():
        end.set()
    await asyncio.gather(tasks["a"], tasks["c"], tasks["d"])
    assert not leases._claims
    assert not leases._lines
    assert not leases._claimed_tokens("key")
