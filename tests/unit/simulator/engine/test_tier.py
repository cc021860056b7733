"""A tier behind the pool keeps what the pool evicts, and returns it at its price."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from thunderagent.backends.vllm import VllmBackend
from thunderagent.simulator.embedded.metrics import EngineCollector
from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.realtime import RealtimeEngine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest, FinishedRequest
from thunderagent.simulator.engine.tier import Tier
from thunderagent.simulator.engine.timing import TimingProfile
from thunderagent.simulator.figures.bounds import Engines, TurnCost, TurnShape

TIMING = TimingProfile("unit", base_s=1.0, prefill_token_s=0.1, decode_request_s=0.0)


def make_engine(*, blocks: int, tier_blocks: int, restore_token_s: float = 0.01) -> Engine:
    """Make an engine with blocks of 4 tokens."""
    return Engine(
        EngineConfig(
            blocks * 4, block_size=4, timing=TIMING, tier_tokens=tier_blocks * 4, restore_token_s=restore_token_s
        )
    )


def serve(engine: Engine, request_id: str, start: int, count: int) -> FinishedRequest:
    """Run a request of `count` tokens, and one of output, alone."""
    engine.submit(EngineRequest(request_id, range(start, start + count), [900_000 + start]), 0.0)
    now_s = 0.0
    while True:
        result = engine.step(now_s)
        now_s += result.duration_s
        engine.check_invariants()
        if result.finished:
            return result.finished[0]


def test_evicted_context_is_restored_at_the_price_of_restoring() -> None:
    """Of 24 tokens 20 may be found (the last block has the token that is always computed), 8 of them in the tier."""
    engine = make_engine(blocks=10, tier_blocks=10)
    serve(engine, "old", 0, 24)
    serve(engine, "new", 100, 28)  # takes 3 of the 6 blocks of the old one
    again = serve(engine, "again", 0, 24)
    assert again.cached_tokens == 20
    assert again.finished_s == pytest.approx(1.0 + 4 * 0.1 + 8 * 0.01)
    stats = engine.stats
    assert (stats.prefix_hit_tokens, stats.tier_query_tokens, stats.tier_hit_tokens) == (12, 24 + 28 + 12, 8)


def test_without_a_tier_it_is_computed_again() -> None:
    engine = make_engine(blocks=10, tier_blocks=0)
    serve(engine, "old", 0, 24)
    serve(engine, "new", 100, 28)
    again = serve(engine, "again", 0, 24)
    assert again.cached_tokens == 12
    assert again.finished_s == pytest.approx(1.0 + 12 * 0.1)
    assert (engine.stats.tier_query_tokens, engine.stats.tier_block_count) == (0, 0)


def test_tier_evicts_the_tail_of_a_context_first() -> None:
    tier = Tier(3)
    for key in (3, 2, 1):  # a pool evicts in this order
        tier.store(key)
    tier.store(9)
    assert [tier.find([1, 2, 3], 0, count) for count in (1, 2, 3)] == [1, 2, 2]


def test_restored_context_stays_and_is_evicted_last() -> None:
    tier = Tier(3)
    for key in (2, 1, 7):
        tier.store(key)
    tier.use([1, 2])
    tier.store(8)
    assert tier.find([1, 2], 0, 2) == 2
    assert tier.find([7], 0, 1) == 0


def test_a_gap_ends_what_is_found() -> None:
    tier = Tier(3)
    for key in (4, 2, 1):
        tier.store(key)
    assert tier.find([1, 2, 3, 4], 0, 4) == 2


def test_a_tier_that_holds_all_leaves_nothing_to_compute_twice() -> None:
    """This holds whatever came between: in a large tier a whole context is found; blocks are consistent."""
    engine, choose = make_engine(blocks=12, tier_blocks=1000), random.Random(7)
    longest_tokens: dict[int, int] = {}
    for number in range(200):
        family, count = choose.randrange(9), choose.randrange(2, 40)
        finished = serve(engine, str(number), family * 1000, count)
        known = min(longest_tokens.get(family, 0), count - 1)
        assert finished.cached_tokens >= known // 4 * 4
        longest_tokens[family] = max(longest_tokens.get(family, 0), count)


def test_a_served_engine_tells_of_its_tier_as_vllm_does() -> None:
    """The proxy reads these metrics; without a tier there are none."""
    for tier_blocks, told in ((10, (64.0, 8.0)), (0, (None, None))):
        config = make_engine(blocks=10, tier_blocks=tier_blocks).config
        realtime = RealtimeEngine(config, speed=1.0, now_s=0.0)
        for request_id, start, count in (("old", 0, 24), ("new", 100, 28), ("again", 0, 24)):
            serve(realtime.engine, request_id, start, count)
        registry = CollectorRegistry()
        registry.register(EngineCollector(realtime, "m"))
        reading = VllmBackend().read_metrics(generate_latest(registry).decode())
        assert (reading.tier_query_tokens_total, reading.tier_hit_tokens_total) == told
        assert reading.cache_hit_tokens_total == 12


def test_an_impossible_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="tier_tokens"):
        EngineConfig(160, tier_tokens=-1)


def test_the_bound_takes_the_cheaper_of_both_ways_back() -> None:
    """A turn of 100 tokens, 20 of them new, of a program whose 80 others were dropped."""
    config = EngineConfig(1600, timing=TIMING, tier_tokens=1600, restore_token_s=0.01)
    shape = TurnShape(prompt_tokens=100, new_tokens=20, output_tokens=1, shared_tokens=0, gap_s=5.0)
    with_tier, without = Engines.of(config, 1), Engines.of(replace(config, tier_tokens=0), 1)
    assert with_tier.dropped_cost(shape) == TurnCost(pytest.approx(20 * 0.1 + 80 * 0.01), 100.0)
    assert without.dropped_cost(shape).work_s == pytest.approx(100 * 0.1)
    dear = Engines.of(replace(config, restore_token_s=0.5), 1)
    assert dear.dropped_cost(shape).work_s == pytest.approx(100 * 0.1)
