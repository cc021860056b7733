"""From the configuration to the sources, and to the replicas whose KV events are followed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from thunderagent.backends import backend_of
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime import Runtime
from thunderagent.serving.replica_sources import KvFinder, KvFollower, followers_of, of_rank, sources_of, static_of


def config(**given: object) -> ServeConfig:
    return ServeConfig.load(**given)


def endpoint(replica_id: str, url: str, rank_id: int | None = None) -> ReplicaEndpoint:
    return ReplicaEndpoint(replica_id, url, backend_of("vllm"), rank_id)


def followed(follower: KvFollower) -> dict[str, tuple[str, str | None]]:
    return {name: (each.address, each.replay_address) for name, each in follower._events._endpoints.items()}


def follower_of(**given: object) -> KvFollower:
    (follower,) = followers_of(config(**given), Runtime(Scheduler(Cap(n=1))))
    assert isinstance(follower, KvFollower)
    return follower


def test_each_source_that_is_configured_is_there() -> None:
    everything = config(
        backends="http://a:1,dns+http://b:2,http://c:3#dp=2",
        backends_file="replicas.txt",
        kubernetes_replicas="default/app=vllm:8000",
    )
    assert [source.name for source in sources_of(everything)] == ["dns:b:2", "file", "kubernetes"]
    assert [each.url for each in static_of(everything.backends)] == ["http://a:1", "http://c:3"]
    assert sources_of(config()) == []
    assert not config().has_replica_source


def test_kv_events_are_off_unless_they_are_configured() -> None:
    assert followers_of(config(), Runtime(Scheduler(Cap(n=1)))) == []


def test_kv_events_of_a_list_are_followed_by_url() -> None:
    """A replica from elsewhere has none; a removed one is no longer followed."""
    follower = follower_of(
        backends="http://a:1,http://b:2",
        kv_events="tcp://a:5557,tcp://b:6000",
        kv_events_replay="tcp://a:5558,tcp://b:1",
    )
    for replica in (endpoint("a:1", "http://a:1"), endpoint("c:3", "http://c:3"), endpoint("b:2/1", "http://b:2", 1)):
        follower.add(replica)
    assert followed(follower) == {"a:1": ("tcp://a:5557", "tcp://a:5558"), "b:2/1": ("tcp://b:6001", "tcp://b:2")}
    follower.remove("a:1")
    follower.remove("nobody")
    assert set(followed(follower)) == {"b:2/1"}


def test_kv_events_of_all_are_followed_by_host() -> None:
    """This holds for all sources; a rank adds its number to the port."""
    follower = follower_of(kv_events="tcp://{host}:5557", kv_events_replay="tcp://{host}:5657")
    follower.add(endpoint("a", "http://10.0.0.1:8000", 2))
    follower.add(endpoint("b", "http://[::1]:8000"))
    assert followed(follower) == {
        "a": ("tcp://10.0.0.1:5559", "tcp://10.0.0.1:5659"),
        "b": ("tcp://[::1]:5557", "tcp://[::1]:5657"),
    }


def test_an_address_without_a_port_has_no_ranks() -> None:
    assert of_rank("inproc://x", 0) == "inproc://x"
    with pytest.raises(ConfigurationError, match="no port"):
        of_rank("inproc://x", 1)


class Sources:
    """Engines that say where they publish."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, replica_id: str, url: str, path: str) -> tuple[int, bytes]:
        self.asked.append((replica_id, path))
        return self.answers.get(replica_id, (0, b""))


def source(endpoint: str, replay: str | None = None, *, on: bool = True) -> dict[str, object]:
    return {"enable_kv_cache_events": on, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}


async def test_kv_events_are_found_where_engines_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are up, and again after a restart; one that is silent is asked again, one that has none is not."""
    monkeypatch.setattr("thunderagent.serving.replica_sources.ASK_AGAIN_S", 0.01)
    runtime, sources = Runtime(Scheduler(Cap(n=1))), Sources()
    (finder,) = followers_of(config(kv_events="auto"), runtime)
    assert isinstance(finder, KvFinder)
    finder.ask = sources
    two = {"0": source("tcp://*:5557", "tcp://*:5657"), "1": source("tcp://*:5558")}
    sources.answers = {
        "a/0": (200, json.dumps(two).encode()),
        "a/1": (200, json.dumps(two).encode()),
        "old": (404, b"{}"),
        "off": (200, b"{}"),
    }
    finder.add(endpoint("a/0", "http://10.0.0.1:8000", 0))
    finder.add(endpoint("a/1", "http://10.0.0.1:8000", 1))
    for name in ("old", "off", "silent"):
        finder.add(endpoint(name, f"http://{name}:8000"))
    task = asyncio.create_task(finder.run())
    try:
        assert sources.asked == []
        for name in ("a/0", "a/1", "old", "off", "silent"):
            runtime.replica_up(name, 1000)
        async with asyncio.timeout(5):
            while len(sources.asked) < 8:
                await asyncio.sleep(0.01)
        found = {name: (each.address, each.replay_address) for name, each in finder._events._endpoints.items()}
        assert found == {"a/0": ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657"), "a/1": ("tcp://10.0.0.1:5558", None)}
        counts = Counter(name for name, _ in sources.asked)
        assert (counts["old"], counts["off"], counts["a/0"]) == (1, 1, 1)
        assert counts["silent"] > 1
        add, refusals = finder._events.add, list[str]()

        def refuse(each: Any) -> None:
            if not refusals:
                refusals.append(each.replica_id)
                raise ConfigurationError("no socket can be opened")
            add(each)

        monkeypatch.setattr(finder._events, "add", refuse)
        sources.answers["silent"] = (200, json.dumps({"0": source("tcp://0.0.0.0:7000")}).encode())
        async with asyncio.timeout(5):
            while "silent" not in finder._events._endpoints:
                await asyncio.sleep(0.01)
        assert refusals == ["silent"]
        sources.answers["a/0"] = (200, json.dumps({"0": source("tcp://*:6000")}).encode())
        runtime.replica_down("a/0")
        runtime.replica_up("a/0", 1000)
        async with asyncio.timeout(5):
            while finder._events._endpoints["a/0"].address != "tcp://10.0.0.1:6000":
                await asyncio.sleep(0.01)
        finder.remove("a/1")
        assert "a/1" not in finder._events._endpoints
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_addresses_to_replay_cannot_be_given_to_engines_that_say_theirs() -> None:
    with pytest.raises(ConfigurationError, match="kv_events_replay"):
        config(kv_events="auto", kv_events_replay="tcp://a:1")
