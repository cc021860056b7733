"""The cost of a lost prefix if an engine has a tier behind its pool, learned from turns that come back."""

from __future__ import annotations

from math import inf

import pytest

from tests.builders import Driver
from thunderagent.programs.learned.tier_price import TierPrice
from thunderagent.programs.messages import TierPolled
from thunderagent.programs.policies.breakeven import BreakEven

POOL_TOKENS = 10_000
PREFILL_TOKEN_S, RESTORE_TOKEN_S = 1e-3, 1e-4


def returning(driver: Driver, *, found_ratio: float, rounds: int = 12, tells_cached: bool = True) -> None:
    """Let two programs of 8,000 tokens take turns on a pool of 10,000: each evicts most of the other."""
    context_tokens = dict.fromkeys(("a", "b"), 0)
    for number in range(2 * rounds):
        program_id = "ab"[number % 2]
        known_tokens = context_tokens[program_id]
        prompt_tokens = known_tokens + (8000 if not known_tokens else 0)
        turn_id = driver.arrives(program_id, prompt_tokens)
        turn = driver.scheduler.book.turns[turn_id]
        loaded_tokens = int(found_ratio * max(0, known_tokens - turn.resident_tokens))
        cached_tokens = min(known_tokens, turn.resident_tokens) + loaded_tokens
        driver.passes((prompt_tokens - cached_tokens) * PREFILL_TOKEN_S + loaded_tokens * RESTORE_TOKEN_S)
        driver.starts(turn_id)
        driver.passes(0.5)
        driver.finishes(turn_id, prompt_tokens, 1, cached_tokens if tells_cached else None)
        context_tokens[program_id] = prompt_tokens + 1
        driver.passes(100.0)


def make_driver(*, tier: bool) -> Driver:
    driver = Driver(BreakEven(reserve_tokens=0), replicas={"r0": POOL_TOKENS}, threshold_s=20.0)
    if tier:
        driver.send(TierPolled(driver.now_s, "r0", 10, 0))
    return driver


def test_break_even_is_the_time_to_load_the_pool_where_all_is_found() -> None:
    driver = make_driver(tier=True)
    returning(driver, found_ratio=1.0)
    knowledge = driver.scheduler.knowledge
    price = knowledge.tiers.by_replica["r0"]
    assert price.found_ratio == pytest.approx(1.0, abs=0.01)
    assert price.restore_token_s == pytest.approx(RESTORE_TOKEN_S, rel=0.2)
    assert driver.scheduler.view.break_even_s("r0") == pytest.approx(RESTORE_TOKEN_S * POOL_TOKENS, rel=0.2)
    assert knowledge.prices.of("r0").token_s == pytest.approx(PREFILL_TOKEN_S, rel=0.2)  # it excludes loading


def test_half_found_is_half_the_saving() -> None:
    driver = make_driver(tier=True)
    returning(driver, found_ratio=0.5)
    price = driver.scheduler.knowledge.tiers.by_replica["r0"]
    assert price.found_ratio == pytest.approx(0.5, abs=0.01)
    expected_s = (PREFILL_TOKEN_S + price.restore_token_s) / 2 * POOL_TOKENS
    assert driver.scheduler.view.break_even_s("r0") == pytest.approx(expected_s, rel=0.2)


def test_without_a_tier_cached_tokens_are_those_of_the_pool() -> None:
    driver = make_driver(tier=False)
    returning(driver, found_ratio=0.0)
    assert driver.scheduler.knowledge.tiers.by_replica == {}
    assert driver.scheduler.view.break_even_s("r0") == pytest.approx(PREFILL_TOKEN_S * POOL_TOKENS, rel=0.2)


def test_an_engine_that_tells_no_cached_tokens_tells_by_its_counters_how_much_is_found() -> None:
    driver = make_driver(tier=True)
    for _ in range(100):
        driver.send(TierPolled(driver.now_s, "r0", 1000, 600))
    price = driver.scheduler.knowledge.tiers.by_replica["r0"]
    assert (price.found_ratio, price.restore_token_s) == (pytest.approx(0.6, abs=0.01), inf)
    assert price.lost_token_s(PREFILL_TOKEN_S) == PREFILL_TOKEN_S  # the cost of loading is unknown


def test_loading_never_costs_more_than_computing() -> None:
    price = TierPrice()
    price.found(1000, 1000)
    for _ in range(20):
        price.loaded(5.0, 1000)
    assert price.restore_token_s > PREFILL_TOKEN_S
    assert price.lost_token_s(PREFILL_TOKEN_S) == PREFILL_TOKEN_S


def test_loaded_tokens_hide_no_loss_from_the_capacity() -> None:
    """Usage reports it as cached; the pool's own counters show that it was not there."""
    losing = {}
    for tier in (False, True):
        driver = make_driver(tier=tier)
        driver.is_polled(hit_ratio=0.0, query_tokens=0)
        for number in range(40):
            program_id = f"p{number % 2}"
            turn_id = driver.arrives(program_id, 2000)
            driver.passes(0.1)
            driver.starts(turn_id)
            driver.finishes(turn_id, 2000, 1, 1999 if number > 1 else 0)
            driver.ticks(1.0)
            driver.is_polled(hit_ratio=0.0, query_tokens=2000)
        losing[tier] = driver.scheduler.knowledge.corrections["r0"].ratio
    assert losing[True] < losing[False]


def test_a_replica_that_was_removed_is_forgotten() -> None:
    driver = make_driver(tier=True)
    driver.is_removed("r0")
    assert driver.scheduler.knowledge.tiers.by_replica == {}
