"""The rank of a request, and the metrics of several ranks."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from thunderagent.backends.ranks import by_rank_of, rank_count_of
from thunderagent.backends.vllm import VllmBackend
from thunderagent.simulator.embedded.ranks import RanksCollector, chosen_rank
from thunderagent.simulator.embedded.requests import ApiError
from thunderagent.simulator.engine.realtime import RealtimeEngine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.engine.timing import profile_from


def engines(count: int) -> list[RealtimeEngine]:
    config = EngineConfig.of(profile_from("instant"), kv_tokens=4096)
    return [RealtimeEngine(config, speed=1.0, now_s=0.0) for _ in range(count)]


def give_work(engine: RealtimeEngine, count: int) -> None:
    for number in range(count):
        engine.engine.submit(EngineRequest(f"r{number}", [1, 2, 3], [4, 5]), 0.0)


def test_the_header_chooses() -> None:
    ranks = engines(3)
    give_work(ranks[2], 5)
    assert [chosen_rank(text, ranks) for text in ("2", "0", " 1 ")] == [2, 0, 1]


@pytest.mark.parametrize("header", [None, "", "one", "1.0"])
def test_without_a_number_the_rank_with_the_least_to_do_is_taken(header: str | None) -> None:
    ranks = engines(3)
    give_work(ranks[0], 2)
    give_work(ranks[1], 1)
    assert chosen_rank(header, ranks) == 2


@pytest.mark.parametrize("header", ["3", "-1", "99"])
def test_a_rank_that_is_not_there_is_refused(header: str) -> None:
    with pytest.raises(ApiError, match=rf"data_parallel_rank {header} is out of range \[0, 3\)"):
        chosen_rank(header, engines(3))


def test_each_metric_is_there_once_with_a_sample_for_each_rank() -> None:
    """A strict reader requires this, and the poller tells ranks apart by it."""
    ranks = engines(2)
    give_work(ranks[1], 4)
    registry = CollectorRegistry()
    registry.register(RanksCollector(ranks, "m"))
    exposition = generate_latest(registry).decode()
    heads = [line for line in exposition.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert rank_count_of(exposition, "engine") == 2
    readings = [VllmBackend().read_metrics(each) for each in by_rank_of(exposition, "engine", range(2)).values()]
    assert [(each.capacity_tokens, each.waiting_count) for each in readings] == [(4096, 0), (4096, 4)]
