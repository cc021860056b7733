"""Replicas come and go while programs run: by a file, a name, a cluster's pods, and the admin API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.load import LoadSpec, run_programs
from tests.integration.kubernetes_api import ApiError, KubernetesApi, rights_of
from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Gate,
    RunningProxy,
    Wire,
    answers,
    ask,
    chunk,
    events_of,
    exchange,
    exposition,
    fake_replica,
    get,
    metrics_of,
    post,
    running_proxy,
    stream_head,
    turn,
    until,
    word,
)
from thunderagent.backends.discovery.dns import DnsSource
from thunderagent.simulator.embedded.options import ServerConfig
from thunderagent.simulator.embedded.server import running
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.integration.support import Answer

QUICK = {"discovery_interval_s": 0.02, "poll_interval_s": 0.02}
RBAC = Path(__file__).parents[2] / "deploy/kubernetes/replicas-rbac.yaml"

LOAD = LoadSpec(
    programs=20,
    turns=(4, 6),
    system_tokens=50,
    first_prompt_tokens=(100, 200),
    output_tokens=(5, 10),
    tool_result_tokens=(20, 40),
    tool_mean_s=0.05,
    model="simulated",
    tries=1,
    turn_timeout_s=20,
)
"""Its clients do not retry: a failing turn is noticed."""


@asynccontextmanager
async def engine_here(
    *, host: str = "127.0.0.1", port: int = 0, ranks: int = 1, profile: str = "demo", kv_tokens: int = 16_000
) -> AsyncIterator[str]:
    """Run an embedded engine in this process; yield its URL."""
    engine = EngineConfig.of(profile_from(profile), kv_tokens=kv_tokens, block_size=None, max_num_batched_tokens=None)
    config = ServerConfig(engine, host=host, port=port, grace_s=0.0, speed=20.0, data_parallel_count=ranks)
    async with running(config) as url:
        yield url


def id_of(url: str) -> str:
    return url.removeprefix("http://")


async def delete(url: str, target: str) -> Answer:
    return await exchange(url, "DELETE", target)


async def replicas_of(proxy: RunningProxy) -> dict[str, dict[str, Any]]:
    return {each["replica_id"]: each for each in (await get(proxy.url, "/replicas")).json()["replicas"]}


def known(proxy: RunningProxy) -> set[str]:
    """The replicas that the core knows."""
    return set(proxy.runtime.scheduler.replicas)


async def gone(proxy: RunningProxy, replica_id: str) -> None:
    """Wait until no part remembers a replica."""
    async with asyncio.timeout(DEADLINE_S):
        while replica_id in await replicas_of(proxy):
            await asyncio.sleep(0.01)
    assert replica_id not in known(proxy)
    assert replica_id not in proxy.runtime.scheduler.ledger.accounts
    assert f'replica="{replica_id}"'.encode() not in (await get(proxy.url, "/metrics")).body


async def failing(proxy: RunningProxy, source: str, *, times: int = 1) -> None:
    """Wait until a source fails, or no longer fails."""
    async with asyncio.timeout(DEADLINE_S):
        while (await metrics_of(proxy.url))["thunderagent_replica_source_failing"].get((source,), 0) != times:
            await asyncio.sleep(0.01)


async def finished(proxy: RunningProxy, count: int) -> None:
    await until(lambda: proxy.runtime.outcome_counts["finished"] >= count)


# --- a file


async def test_a_file_that_is_edited_while_programs_run_costs_no_turn(tmp_path: Path) -> None:
    """Replicas come, go and return under 20 programs; rubbish in between changes nothing."""
    file = tmp_path / "replicas.txt"
    async with engine_here() as one, engine_here() as two, engine_here() as three:
        file.write_text(f"{one}\n")
        async with running_proxy(up=1, backends_file=file, **QUICK) as proxy:
            load = asyncio.create_task(run_programs(LOAD, proxy.url, 40, is_proxy=True))
            await finished(proxy, 15)
            replaced(file, f"# more of them\n{one}\n{two}  # the second\n{three}\n")
            await proxy.up(3)
            await finished(proxy, 50)
            replaced(file, f"{two}\n{three}\n")
            await gone(proxy, id_of(one))
            replaced(file, "http://not a url\n")
            await failing(proxy, "file")
            assert known(proxy) == {id_of(two), id_of(three)}
            replaced(file, f"{two}\n")
            await gone(proxy, id_of(three))
            await failing(proxy, "file", times=0)
            result = await load
            assert (result.finished_program_count, result.failed_turn_count) == (40, 0)


def replaced(file: Path, text: str) -> None:
    """Replace a file atomically, as editors and ConfigMaps do."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


async def test_a_file_that_is_not_there_yet_or_no_more_is_waited_for(tmp_path: Path) -> None:
    """The proxy starts without it; when the file is gone, its last contents stay in effect."""
    file = tmp_path / "replicas.toml"
    async with fake_replica() as one, running_proxy(up=0, backends_file=file, **QUICK) as proxy:
        assert (await get(proxy.url, "/ready")).status == 503
        file.write_text(f'[[replicas]]\nurl = "{one.url}"\n')
        await proxy.up(1)
        file.unlink()
        await failing(proxy, "file")
        assert (await ask(proxy.url, "a")).status == 200
        file.write_text("replicas = []\n")
        await gone(proxy, one.replica_id)


# --- the admin API


async def test_adding_draining_and_removing_under_load_costs_no_turn() -> None:
    """A replica joins, drains until nothing is in flight, joins again, and is removed; no turn fails."""
    async with engine_here() as one, engine_here() as two, running_proxy(one, **QUICK) as proxy:
        load = asyncio.create_task(run_programs(LOAD, proxy.url, 40, is_proxy=True))
        added = await post(proxy.url, "/replicas", {"url": two})
        assert added.status == 201
        assert [each["sources"] for each in added.json()["replicas"]] == [["api"]]
        await proxy.up(2)
        await finished(proxy, 40)
        drained = await post(proxy.url, f"/replicas/{id_of(two)}/drain")
        assert drained.json()["replicas"][0]["draining"] is True
        async with asyncio.timeout(DEADLINE_S):
            while (report := (await replicas_of(proxy))[id_of(two)])["in_flight_count"]:
                await asyncio.sleep(0.01)
        assert report["draining_for_s"] > 0
        assert report["leaving_for_s"] is None
        assert (await metrics_of(proxy.url))["thunderagent_replica_draining"][id_of(two),] == 1
        assert (await get(proxy.url, "/ready")).status == 200
        before_count = proxy.runtime.outcome_counts["finished"]
        await finished(proxy, before_count + 5)
        assert (await replicas_of(proxy))[id_of(two)]["in_flight_count"] == 0
        assert (await post(proxy.url, f"/replicas/{id_of(two)}/undrain")).status == 200
        await proxy.up(2)
        await finished(proxy, before_count + 25)
        assert (await delete(proxy.url, f"/replicas/{id_of(two)}")).status == 202
        await gone(proxy, id_of(two))
        result = await load
        assert (result.finished_program_count, result.failed_turn_count) == (40, 0)


async def test_draining_replica_finishes_and_the_next_turn_goes_elsewhere() -> None:
    """A turn in flight keeps its replica until its end; the replica is removed right after it."""
    gate = Gate()
    async with fake_replica(gate) as one, fake_replica() as other, running_proxy(one.url, **QUICK) as proxy:
        in_flight = asyncio.create_task(ask(proxy.url, "a"))
        await one.call()
        await post(proxy.url, "/replicas", {"url": other.url})
        await proxy.up(2)
        assert (await delete(proxy.url, f"/replicas/{one.replica_id}")).status == 202
        report = (await replicas_of(proxy))[one.replica_id]
        assert report["leaving_for_s"] is not None
        assert (report["in_flight_count"], report["sources"]) == (1, [])
        assert (await ask(proxy.url, "b")).header("X-Replica-ID") == other.replica_id
        assert one.replica_id in known(proxy)
        conflict = await post(proxy.url, f"/replicas/{one.replica_id}/undrain")
        assert (conflict.status, conflict.error["code"]) == (409, "replica_leaving")
        gate.open()
        assert (await in_flight).status == 200
        await gone(proxy, one.replica_id)
        assert not one.peers, "connections are closed at once"
        again = await ask(proxy.url, "a")
        assert (again.status, again.header("X-Replica-ID")) == (200, other.replica_id)


async def test_a_request_that_is_no_turn_is_waited_for_too() -> None:
    """An embedding takes no lease, and is still not cut off."""
    gate = Gate()
    async with fake_replica(gate) as one, fake_replica() as other, running_proxy(one.url, **QUICK) as proxy:
        side_call = asyncio.create_task(post(proxy.url, "/v1/embeddings", {"input": "x"}))
        await one.call()
        await post(proxy.url, "/replicas", {"url": other.url})
        await proxy.up(2)
        await delete(proxy.url, f"/replicas/{one.replica_id}")
        await asyncio.sleep(0.15)
        assert (await replicas_of(proxy))[one.replica_id]["in_flight_count"] == 1
        gate.open()
        assert (await side_call).status == 200
        await gone(proxy, one.replica_id)


async def test_a_replica_that_is_named_again_while_it_leaves_stays() -> None:
    gate = Gate()
    async with fake_replica(gate) as one, running_proxy(one.url, **QUICK) as proxy:
        in_flight = asyncio.create_task(ask(proxy.url, "a"))
        await one.call()
        await delete(proxy.url, f"/replicas/{one.replica_id}")
        held = asyncio.create_task(ask(proxy.url, "b"))
        await until(lambda: proxy.runtime.held_count == 1)
        assert (await post(proxy.url, "/replicas", {"url": one.url})).status == 201
        await until(lambda: len(one.calls) == 2)
        gate.open()
        assert {(await each).status for each in (in_flight, held)} == {200}
        report = (await replicas_of(proxy))[one.replica_id]
        assert (report["draining"], report["leaving_for_s"], report["sources"]) == (False, None, ["api", "static"])
        assert (await post(proxy.url, "/replicas", {"url": one.url})).status == 200


async def test_a_forced_removal_before_the_first_byte_is_a_failover() -> None:
    """The turn is lost there and tried on another replica; its client does not notice."""
    async with fake_replica(Gate()) as one, fake_replica() as other, running_proxy(one.url, **QUICK) as proxy:
        in_flight = asyncio.create_task(ask(proxy.url, "a"))
        await one.call()
        await post(proxy.url, "/replicas", {"url": other.url})
        await proxy.up(2)
        forced = await delete(proxy.url, f"/replicas/{one.replica_id}?force=1")
        assert (forced.status, forced.json()) == (200, {"replica_id": one.replica_id, "removed": True})
        answer = await in_flight
        assert (answer.status, answer.header("X-Replica-ID")) == (200, other.replica_id)
        assert len(other.calls) == 1
        await gone(proxy, one.replica_id)


async def test_a_forced_removal_in_a_stream_is_one_clean_error() -> None:
    """The words that came, one error event, and the end; the engine's request is cancelled."""
    stream = Gate(before=[stream_head(), chunk(word("one"))])
    async with fake_replica(stream) as one, fake_replica() as other, running_proxy(one.url, **QUICK) as proxy:
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, [], json.dumps(turn("a", stream=True)).encode())
            answer = await wire.head()
            first = await wire.chunk()
            await post(proxy.url, "/replicas", {"url": other.url})
            await proxy.up(2)
            await delete(proxy.url, f"/replicas/{one.replica_id}?force=1")
            rest = await wire.body(answer)
        assert b"one" in first
        assert [event["error"]["code"] for event in events_of(rest.body)] == ["replica_closed_early"]
        assert not rest.whole
        assert not other.calls
        await until(one.calls[0].left.is_set)
        assert (await ask(proxy.url, "a")).header("X-Replica-ID") == other.replica_id


async def test_a_drain_that_takes_too_long_ends_as_a_forced_removal() -> None:
    async with (
        fake_replica(Gate()) as one,
        fake_replica() as other,
        running_proxy(one.url, drain_limit_s=0.1, **QUICK) as proxy,
    ):
        in_flight = asyncio.create_task(ask(proxy.url, "a"))
        await one.call()
        await post(proxy.url, "/replicas", {"url": other.url})
        await proxy.up(2)
        await delete(proxy.url, f"/replicas/{one.replica_id}")
        answer = await in_flight
        assert (answer.status, answer.header("X-Replica-ID")) == (200, other.replica_id)
        await gone(proxy, one.replica_id)


async def test_the_last_replica_that_is_removed_leaves_turns_waiting_for_the_next() -> None:
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, **QUICK) as proxy:
        assert (await ask(proxy.url, "a")).status == 200
        await delete(proxy.url, f"/replicas/{one.replica_id}")
        await gone(proxy, one.replica_id)
        assert (await get(proxy.url, "/ready")).status == 503
        held = asyncio.create_task(ask(proxy.url, "a"))
        await until(lambda: proxy.runtime.held_count == 1)
        await post(proxy.url, "/replicas", {"url": other.url})
        answer = await held
        assert (answer.status, answer.header("X-Replica-ID")) == (200, other.replica_id)


async def test_a_drained_replica_stays_drained_when_its_engine_restarts() -> None:
    async with fake_replica() as one, fake_replica() as other, running_proxy(one.url, other.url, **QUICK) as proxy:
        await post(proxy.url, f"/replicas/{one.replica_id}/drain")
        await one.stop()
        await until(lambda: not proxy.runtime.scheduler.replicas[one.replica_id].up)
        await one.start()
        async with asyncio.timeout(DEADLINE_S):
            while not (report := (await replicas_of(proxy))[one.replica_id])["up"]:
                await asyncio.sleep(0.01)
        assert report["draining"] is True
        for name in "abcdef":
            assert (await ask(proxy.url, name)).header("X-Replica-ID") == other.replica_id
        await post(proxy.url, f"/replicas/{one.replica_id}/undrain")
        served = {(await ask(proxy.url, name)).header("X-Replica-ID") for name in "ghijkl"}
        assert one.replica_id in served


async def test_a_new_replica_gets_no_turn_before_its_first_good_poll() -> None:
    """The replica is known, but not healthy yet; its capacity is known before its first turn."""
    async with fake_replica() as one, fake_replica(capacity_tokens=5000) as other, running_proxy(one.url) as proxy:
        other.healthy = False
        await post(proxy.url, "/replicas", {"url": other.url})
        for name in "abcdef":
            assert (await ask(proxy.url, name)).header("X-Replica-ID") == one.replica_id
        other.healthy = True
        await proxy.up(2)
        assert proxy.runtime.scheduler.ledger.accounts[other.replica_id].capacity_tokens == 5000


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "code"),
    [
        ("POST", "/replicas", b"{", 400, "invalid_request"),
        ("POST", "/replicas", b"{}", 400, "invalid_request"),
        ("POST", "/replicas", b'{"url": "ftp://a"}', 400, "invalid_request"),
        ("POST", "/replicas", b'{"url": "http://a:99999"}', 400, "invalid_request"),
        ("POST", "/replicas", b'{"url": "http://a/v1"}', 400, "invalid_request"),
        ("POST", "/replicas", b'{"url": "http://a", "data_parallel_ranks": 0}', 400, "invalid_request"),
        ("POST", "/replicas/nobody:1/drain", b"", 404, "not_found"),
        ("POST", "/replicas/nobody:1/undrain", b"", 404, "not_found"),
        ("DELETE", "/replicas/nobody:1", b"", 404, "not_found"),
        ("DELETE", "/replicas/nobody:1?force=1", b"", 404, "not_found"),
        ("DELETE", "/replicas/nobody:1?force=maybe", b"", 400, "invalid_request"),
        ("POST", "/add_worker", b"", 400, "invalid_request"),
        ("POST", "/add_worker?url=nothing", b"", 400, "invalid_request"),
    ],
)
async def test_impossible_replica_change_is_refused_with_the_reason(
    method: str, target: str, body: bytes, status: int, code: str
) -> None:
    async with fake_replica() as one, running_proxy(one.url) as proxy:
        answer = await exchange(proxy.url, method, target, body=body)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert set(await replicas_of(proxy)) == {one.replica_id}


async def test_replica_shapes_of_the_public_gateways_are_read() -> None:
    """They are those of the SGLang gateway, of its earlier router and of slime's, for adding and removing engines."""
    async with fake_replica() as one, fake_replica() as two, running_proxy(one.url, **QUICK) as proxy:
        added = await post(proxy.url, "/workers", {"url": two.url, "worker_type": "regular", "model_id": "m"})
        assert (added.status, added.header("Location")) == (202, f"/workers/{two.replica_id}")
        assert added.json() | {"message": ""} == {
            "status": "accepted",
            "worker_id": two.replica_id,
            "url": two.url,
            "location": f"/workers/{two.replica_id}",
            "message": "",
        }
        await proxy.up(2)
        assert (await get(proxy.url, "/workers")).json()["total"] == 2
        removed = await delete(proxy.url, f"/workers/{two.replica_id}")
        assert (removed.status, removed.json()["status"]) == (202, "accepted")
        await gone(proxy, two.replica_id)
        unknown = await delete(proxy.url, "/workers/nobody")
        assert (unknown.status, unknown.json()["code"]) == (404, "WORKER_NOT_FOUND")

        legacy = await post(proxy.url, f"/add_worker?url={two.url}/")
        assert (legacy.status, legacy.body) == (200, f"Successfully added worker: {two.url}/".encode())
        await proxy.up(2)
        by_url = await delete(proxy.url, f"/workers/{two.url.replace(':', '%3A').replace('/', '%2F')}")
        assert by_url.status == 202
        await gone(proxy, two.replica_id)
        assert (await post(proxy.url, "/add_worker", {"worker_url": two.url})).status == 200
        await proxy.up(2)
        for _ in range(2):
            legacy = await post(proxy.url, f"/remove_worker?url={two.url}")
            assert (legacy.status, legacy.body) == (200, f"Successfully removed worker: {two.url}".encode())
        await gone(proxy, two.replica_id)


async def test_a_password_is_shown_nowhere() -> None:
    async with fake_replica() as one, fake_replica() as two, running_proxy(one.url, **QUICK) as proxy:
        secret = two.url.replace("http://", "http://me:secret@")
        added = await post(proxy.url, "/replicas", {"url": secret})
        await proxy.up(2)
        shown = [added, await get(proxy.url, "/replicas"), await get(proxy.url, "/workers")]
        assert not any(b"secret" in each.body for each in shown)
        assert (await replicas_of(proxy))[two.replica_id]["url"] == two.url


async def test_several_sources_are_a_union(tmp_path: Path) -> None:
    """A replica of the API stays if a file drops it; one that the API removed stays away though the file names it."""
    file = tmp_path / "replicas.json"
    async with fake_replica() as one, fake_replica() as two, fake_replica() as three:
        file.write_text(json.dumps([two.url, three.url]))
        async with running_proxy(one.url, up=3, backends_file=file, **QUICK) as proxy:
            await post(proxy.url, "/replicas", {"url": two.url})
            assert (await replicas_of(proxy))[two.replica_id]["sources"] == ["api", "file"]
            await delete(proxy.url, f"/replicas/{three.replica_id}")
            await gone(proxy, three.replica_id)
            replaced(file, json.dumps({"replicas": [three.url]}))
            async with asyncio.timeout(DEADLINE_S):
                while (await replicas_of(proxy))[two.replica_id]["sources"] != ["api"]:
                    await asyncio.sleep(0.01)
            assert set(await replicas_of(proxy)) == {one.replica_id, two.replica_id}
            replaced(file, json.dumps([one.url]))
            async with asyncio.timeout(DEADLINE_S):
                while "file" not in (await replicas_of(proxy))[one.replica_id]["sources"]:
                    await asyncio.sleep(0.01)
            replaced(file, json.dumps([{"url": three.url}]))
            await proxy.up(3)


async def test_64_replicas_at_once_are_polled_without_a_storm(tmp_path: Path) -> None:
    """All of them come up, though one hangs; none is polled too often."""
    file = tmp_path / "replicas.txt"
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(fake_replica()) for _ in range(64)]
        hanging = await stack.enter_async_context(hanging_server())
        file.write_text("\n".join(each.url for each in replicas) + f"\n{hanging}\n")
        async with running_proxy(up=0, backends_file=file, poll_interval_s=0.5, discovery_interval_s=0.05) as proxy:
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            await proxy.up(64)
            answer = await asyncio.gather(*(ask(proxy.url, f"p{number}") for number in range(64)))
            assert {each.status for each in answer} == {200}
            polls_count, at_s = sum(each.polls_count for each in replicas), loop.time()
            assert polls_count <= 64 * (1 + (at_s - begin_s + 0.1) / 0.5)
            file.write_text(f"{replicas[0].url}\n")
            await proxy.up(1)
            await until(lambda: len(known(proxy)) == 1)


@asynccontextmanager
async def hanging_server() -> AsyncIterator[str]:
    """Accept connections and send nothing."""

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()


# --- a name


@dataclass
class FakeResolver:
    """Resolves names as a test wants."""

    found: Sequence[str] | OSError
    asked: list[str] = field(default_factory=list)

    async def addresses(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if isinstance(self.found, OSError):
            raise self.found
        return self.found


async def test_the_addresses_of_a_name_are_replicas() -> None:
    """An address comes, another goes; a failed lookup changes nothing."""
    resolver = FakeResolver(["127.0.0.1"])
    async with engine_here(profile="instant") as one, AsyncExitStack() as stack:
        port = int(one.rpartition(":")[2])
        await stack.enter_async_context(engine_here(host="127.0.0.2", port=port, profile="instant"))
        source = DnsSource(f"dns+http://engines.local:{port}", interval_s=0.02, resolver=resolver)
        async with running_proxy(up=1, sources=[source], **QUICK) as proxy:
            load = asyncio.create_task(run_programs(LOAD, proxy.url, 30, is_proxy=True))
            await finished(proxy, 10)
            resolver.found = ["127.0.0.2", "127.0.0.1", "fe80::1%eth0"]
            await proxy.up(2)
            resolver.found = OSError("no such host")
            await until(lambda: len(resolver.asked) > 5)
            await failing(proxy, source.name)
            assert known(proxy) == {f"127.0.0.1:{port}", f"127.0.0.2:{port}"}
            resolver.found = []
            await asyncio.sleep(0.1)
            assert len(known(proxy)) == 2
            resolver.found = ["127.0.0.2"]
            await gone(proxy, f"127.0.0.1:{port}")
            result = await load
            assert (result.finished_program_count, result.failed_turn_count) == (30, 0)
        assert set(resolver.asked) == {"engines.local"}


async def test_a_name_is_looked_up_by_the_system() -> None:
    """No test resolver is used: localhost has the address that the engine listens on."""
    async with fake_replica() as one:
        port = one.url.rpartition(":")[2]
        async with running_proxy(up=0, backends=(f"dns+http://localhost:{port}",), **QUICK) as proxy:
            await until(
                lambda: f"127.0.0.1:{port}" in {each.replica_id for each in proxy.runtime.scheduler.open_replicas}
            )
            assert (await ask(proxy.url, "a")).status == 200


# --- a cluster


@asynccontextmanager
async def cluster() -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(rights_of(RBAC))
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


async def pod(api: KubernetesApi, name: str, url: str, labels: dict[str, str] | None = None) -> None:
    """Start a pod of the image engine, whose engine is at a URL."""
    ports = [{"name": "metrics", "containerPort": 1}, {"name": "http", "containerPort": int(url.rpartition(":")[2])}]
    spec = {"containers": [{"name": "e", "image": "engine", "ports": ports, "readinessProbe": {"periodSeconds": 1}}]}
    api.create("pods", {"metadata": {"name": name, "labels": labels or {"app": "vllm"}}, "spec": spec})
    await until(lambda: api.get("pods", name)["status"].get("podIP"))
    api.patch("pods", name, {"status": {"podIP": "127.0.0.1"}})


async def test_the_pods_of_a_selection_are_replicas() -> None:
    """Ready pods are in, deleted ones drain, gone ones are forgotten; trouble of the API server changes nothing."""
    gate = Gate()
    async with cluster() as api, fake_replica(gate) as one, fake_replica() as two:
        api.behave("engine", is_ready=False, stops_at_once=False)
        await pod(api, "one", one.url)
        await pod(api, "other", two.url, {"app": "else"})
        config = {"kubernetes_replicas": "default/app=vllm:http", "kubernetes_url": api.url, **QUICK}
        async with running_proxy(up=0, **config) as proxy:
            await until(lambda: api.watchers)
            assert not await replicas_of(proxy)
            api.behave("engine", is_ready=True)
            await proxy.up(1)
            assert (await replicas_of(proxy))[one.replica_id]["sources"] == ["kubernetes"]
            api.behave("engine", is_ready=False)
            api.send_bookmarks()
            in_flight = asyncio.create_task(ask(proxy.url, "a"))
            await one.call()
            assert (await replicas_of(proxy))[one.replica_id]["draining"] is False

            api.delete("pods", "one")
            async with asyncio.timeout(DEADLINE_S):
                while not (report := (await replicas_of(proxy))[one.replica_id])["draining"]:
                    await asyncio.sleep(0.01)
            assert report["leaving_for_s"] is None
            gate.open()
            assert (await in_flight).status == 200
            api.pass_time(31)
            await gone(proxy, one.replica_id)

            await one.stop()
            await until(lambda: api.watchers)
            api.compact()
            api.expire_watches()
            api.behave("engine", is_ready=True)
            await pod(api, "two", two.url)
            await proxy.up(1)
            api.errors["", "pods", "list"] = [ApiError(500, "InternalError", "oh")]
            await api.stop()
            await failing(proxy, "kubernetes")
            assert (await ask(proxy.url, "b")).header("X-Replica-ID") == two.replica_id
            await api.start()
            await failing(proxy, "kubernetes", times=0)
            api.delete("pods", "two", {"gracePeriodSeconds": 0})
            await gone(proxy, two.replica_id)
        assert {verb for _, _, verb in api.requests} == {"list", "watch"}


async def test_without_the_right_to_list_pods_the_proxy_says_so() -> None:
    async with cluster() as api:
        api.rights = set()
        config = {"kubernetes_replicas": "default/app=vllm:8000", "kubernetes_url": api.url, **QUICK}
        async with running_proxy(up=0, **config) as proxy:
            await failing(proxy, "kubernetes")
            assert (await get(proxy.url, "/health")).status == 200


# --- data-parallel ranks


@pytest.mark.parametrize("setting", ["auto", "2", "fragment"])
async def test_ranks_of_an_engine_are_replicas_of_their_own(setting: str) -> None:
    """Each has its own capacity; a program's turns run on its rank, which a header tells the engine."""
    async with engine_here(ranks=2, kv_tokens=4096, profile="instant") as url:
        urls = [f"{url}#dp=2"] if setting == "fragment" else [url]
        config = {} if setting == "fragment" else {"data_parallel_ranks": setting}
        async with running_proxy(*urls, up=2, **config, **QUICK) as proxy:
            first, second = f"{id_of(url)}/0", f"{id_of(url)}/1"
            await until(lambda: known(proxy) == {first, second})
            reports = await replicas_of(proxy)
            assert [(each["rank"], each["url"], each["capacity_tokens"]) for each in reports.values()] == [
                (0, url, 4096),
                (1, url, 4096),
            ]
            homes = {name: (await ask(proxy.url, name)).header("X-Replica-ID") for name in "abcdefgh"}
            assert set(homes.values()) == {first, second}
            for name, home in homes.items():
                assert (await ask(proxy.url, name)).header("X-Replica-ID") == home
            served = (await metrics_of(url))["vllm:request_success_total"]
            for rank, home in (("0", first), ("1", second)):
                counts = [count for labels, count in served.items() if labels[0] == rank]
                assert sum(counts) == 2 * list(homes.values()).count(home)
            assert (await delete(proxy.url, f"/replicas/{second}")).status == 202
            await gone(proxy, second)
            assert (await ask(proxy.url, "z")).header("X-Replica-ID") == first


async def test_a_rank_that_a_client_asks_for_is_the_proxys_to_choose() -> None:
    """The header to the engine names the rank of the lease; one poll asks for all ranks."""
    async with fake_replica() as one:
        one.metrics = exposition(1000, 2000, 3000)
        async with running_proxy(f"{one.url}#dp=3", up=3, **QUICK) as proxy:
            accounts = proxy.runtime.scheduler.ledger.accounts
            assert [accounts[f"{one.replica_id}/{rank}"].capacity_tokens for rank in range(3)] == [1000, 2000, 3000]
            for name in "abc":
                answer = await post(proxy.url, CHAT, turn(name), ("X-Data-Parallel-Rank", "7"))
                call = one.calls[-1]
                sent = [value for header, value in call.headers if header.lower() == "x-data-parallel-rank"]
                assert [f"{one.replica_id}/{rank}" for rank in sent] == [answer.header("X-Replica-ID")]
            await post(proxy.url, "/v1/embeddings", {"input": "x"})
            assert one.calls[-1].header("X-Data-Parallel-Rank") in {"0", "1", "2"}
            await one.stop()
            await proxy.up(0)
            await one.start()
            await proxy.up(3)


async def test_ranks_that_are_found_follow_the_engine() -> None:
    """An engine that returns with another number of ranks counts as other replicas."""
    async with fake_replica() as one:
        one.metrics = exposition(1000, 2000)
        async with running_proxy(one.url, up=2, data_parallel_ranks="auto", **QUICK) as proxy:
            await until(lambda: known(proxy) == {f"{one.replica_id}/{rank}" for rank in range(2)})
            one.metrics = exposition(1000, 2000, 3000)
            await proxy.up(3)
            assert (await ask(proxy.url, "a")).status == 200
            one.metrics = exposition(1000)
            await until(lambda: known(proxy) == {one.replica_id} and len(proxy.runtime.scheduler.open_replicas) == 1)
            assert (await ask(proxy.url, "a")).header("X-Replica-ID") == one.replica_id
            assert one.calls[-1].header("X-Data-Parallel-Rank") is None


async def test_an_engine_without_ranks_is_one_replica_even_so() -> None:
    async with fake_replica(answers()) as one, running_proxy(one.url, data_parallel_ranks="auto", **QUICK) as proxy:
        assert known(proxy) == {one.replica_id}
        with contextlib.suppress(TimeoutError):
            await until(lambda: len(known(proxy)) > 1, within_s=0.1)
        assert set(await replicas_of(proxy)) == {one.replica_id}
