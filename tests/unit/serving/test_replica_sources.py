"""From the configuration to the sources, and to the replicas whose KV events are followed."""

from __future__ import annotations

import pytest

from thunderagent.backends import backend_of
from thunderagent.backends.poller import ReplicaEndpoint
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime import Runtime
from thunderagent.serving.replica_sources import KvFollower, followers_of, of_rank, sources_of, static_of


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
