"""The ledger: the decayed sum against its formula, the five costs against sums by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.state.accounts import PREFILL_TO_DECODE_RATIO, Account, Costs, DecayedSum, Ledger
from thunderagent.programs.state.program import Branch, Turn, TurnEnded

HALF_LIVES = st.sampled_from([inf, 0.0, 0.25, 1.0, 30.0, 3600.0])
TERMS = st.tuples(st.integers(0, 200_000), st.floats(0, 100))


def directly(terms: list[tuple[int, float]], half_life_s: float, now_s: float) -> float:
    """Return the formula of the paper, term by term."""
    if half_life_s == 0:
        return 0.0
    return sum(tokens * 2 ** (-(now_s - since_s) / half_life_s) for tokens, since_s in terms)


@given(HALF_LIVES, st.lists(st.tuples(TERMS, st.floats(0, 10), st.booleans()), max_size=40))
def test_the_decayed_sum_is_the_sum_of_its_decayed_terms(
    half_life_s: float, steps: list[tuple[tuple[int, float], float, bool]]
) -> None:
    """However terms come and go, one decaying number stays equal to the loop over all terms."""
    decayed, terms, now_s = DecayedSum(half_life_s), [], 100.0
    for (tokens, age_s), elapsed_s, removes in steps:
        now_s += elapsed_s
        if removes and terms:
            decayed.remove(*terms.pop(tokens % len(terms)), now_s)
        else:
            terms.append((tokens, now_s - age_s))
            decayed.add(tokens, now_s - age_s, now_s)
        for later_s in (0.0, 0.5, 1000.0):
            expected = directly(terms, half_life_s, now_s + later_s)
            assert decayed.at(now_s + later_s) == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_an_infinite_half_life_counts_in_full_and_none_at_all_counts_nothing() -> None:
    """The two ends of the setting give a plain sum and zero."""
    full, nothing = DecayedSum(inf), DecayedSum(0.0)
    for decayed in (full, nothing):
        decayed.add(70, 0.0, 0.0)
        decayed.add(30, -1e6, 1.0)
    assert full.at(1e9) == 100
    assert nothing.at(1.0) == nothing.at(1e9) == 0.0


def test_a_sum_without_terms_is_exactly_zero() -> None:
    """Rounding leaves nothing behind when the last term goes."""
    decayed = DecayedSum(1.0)
    for number in range(1000):
        decayed.add(number, number * 0.1, number * 0.1)
    for number in range(1000):
        decayed.remove(number, number * 0.1, 100.0 + number * 0.01)
    assert decayed.at(1000.0) == 0.0


# --- The five terms -------------------------------------------------------------------------------------------


def a_turn(*, granted_s: float, started_s: float | None) -> Turn:
    turn = Turn(1, None, "", 0, granted_s)
    turn.granted_s = granted_s
    turn.started_s = started_s
    return turn


def booked(
    *,
    granted_s: float = 0.0,
    started_s: float | None = 2.0,
    ended_s: float = 10.0,
    prompt: int = 1000,
    output: int = 100,
    cached: int | None = 400,
    known: int = 600,
    hit_ratio: float = 0.0,
    claimed: int = 1100,
    capacity: int | None = None,
    prefill_token_s: float | None = None,
) -> Costs:
    ledger = Ledger(inf)
    account = ledger.open("r0", 0.0)
    account.hit_ratio = hit_ratio
    account.set_limit(capacity, 1.0)
    claims(account, reasoning=claimed)
    turn = a_turn(granted_s=granted_s, started_s=started_s)
    branch = Branch()
    branch.context_tokens = known
    told = TurnEnded(turn, branch, ended_s, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)
    ledger.charge_turn(account, told, prefill_token_s=prefill_token_s)
    return account.costs


def test_a_streamed_turn_is_booked_by_its_first_byte() -> None:
    """2 s of prefill over 1000 tokens, 600 of them computed and 200 of these a second time; then 8 s of decode."""
    costs = booked()
    assert costs.recompute_token_s == pytest.approx(1000 * 2 * 200 / 600)
    assert costs.prefill_token_s == pytest.approx(1000 * 2 * 400 / 600)
    assert costs.decode_token_s == pytest.approx((1000 + 100 / 2) * 8)
    assert costs.caching_token_s == costs.unused_token_s == 0


@pytest.mark.parametrize("started_s", [None, 10.0])
def test_a_turn_whose_first_byte_came_with_its_last_is_split_by_the_engines_speeds(started_s: float | None) -> None:
    """600 computed tokens weigh 600/350 of a generated one each, and 100 are generated: the time is split that way."""
    costs = booked(started_s=started_s)
    prefill_s = 10 * (600 / 350) / (600 / 350 + 100)
    assert pytest.approx(1 / 350) == PREFILL_TO_DECODE_RATIO
    assert costs.prefill_token_s + costs.recompute_token_s == pytest.approx(1000 * prefill_s)
    assert costs.decode_token_s == pytest.approx(1050 * (10 - prefill_s))


def test_hit_rate_of_the_replica_stands_in_where_the_engine_is_silent() -> None:
    """cached None with a hit rate of 40 % books what cached 400 of 1000 books; None without a rate books no hit."""
    assert booked(cached=None, hit_ratio=0.4) == booked(cached=400)
    assert booked(cached=None, hit_ratio=0.0) == booked(cached=0)


def test_a_prompt_that_the_program_never_sent_is_no_recompute() -> None:
    """A first turn is prefill, whatever the engine had cached of it."""
    costs = booked(known=0, cached=0)
    assert costs.recompute_token_s == 0
    assert costs.prefill_token_s == pytest.approx(2000)


def test_an_evicted_history_is_recompute() -> None:
    """All 900 known tokens are computed again: 90 % of the prefill is recompute."""
    costs = booked(known=900, cached=0)
    assert costs.recompute_token_s == pytest.approx(0.9 * 2000)


@pytest.mark.parametrize("cached", [1000, 5000])
def test_a_prompt_that_was_cached_whole_is_prefill_and_no_recompute(cached: int) -> None:
    """Nothing was computed; an engine that reports more cached than sent does no harm."""
    costs = booked(cached=cached, known=900)
    assert costs.recompute_token_s == 0
    assert costs.prefill_token_s == pytest.approx(2000)


def test_a_turn_that_produced_nothing_and_took_no_time_costs_nothing() -> None:
    """Nothing is divided by zero where prompt, output and duration are all zero."""
    assert booked(started_s=None, ended_s=0.0, prompt=0, output=0, cached=None, known=0) == Costs()


def test_time_beyond_prefill_is_time_in_the_engine_queue() -> None:
    """600 tokens at a millisecond each are 0.6 of the 2 s to the first byte; for the rest the prompt had no memory."""
    costs = booked(prefill_token_s=0.001)
    assert costs.prefill_token_s + costs.recompute_token_s == pytest.approx(1000 * 0.6)
    assert costs.queued_token_s == pytest.approx(1000 * 1.4)
    assert costs.decode_token_s == pytest.approx(1050 * 8)
    assert booked(prefill_token_s=0.01).queued_token_s == 0  # the learned speed is slower than this turn was


@pytest.mark.parametrize("started_s", [2.0, 9.0, None])
def test_a_turn_waits_in_the_engines_queue_where_more_is_claimed_than_there_is(started_s: float | None) -> None:
    """Turns in flight claim twice the memory for 10 s: this one had memory for 5 of them, its own share at most."""
    costs = booked(started_s=started_s, claimed=2200, capacity=1100)
    working_token_s = costs.prefill_token_s + costs.recompute_token_s + costs.decode_token_s
    assert 1000 * 5 <= working_token_s <= 1050 * 5 + 1e-6
    assert costs.queued_token_s >= 1000 * (2 if started_s == 2.0 else 4)


@given(
    st.integers(1, 2000),
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900), st.floats(0, 5), st.floats(0, 1)), max_size=30),
    st.integers(0, 500),
)
def test_the_five_costs_never_sum_to_more_than_there_was(
    capacity: int, turns: list[tuple[int, int, float, float]], shared: int
) -> None:
    """This holds whatever is claimed, shared and waited for, and whatever usage reports in the end."""
    ledger, account = opened(capacity)
    ledger.wait_begins(0.0)
    now_s, in_flight = 0.0, list[tuple[Turn, int]]()
    for number, (tokens, acting, elapsed_s, started_ratio) in enumerate(turns):
        ledger.accrue(account, now_s)
        turn = a_turn(granted_s=now_s, started_s=now_s + started_ratio * elapsed_s)
        turn.granted_flight_s = account.flight_s
        claims(account, reasoning=account.reasoning_tokens + tokens, acting=acting, shared=shared)
        in_flight.append((turn, tokens))
        now_s += elapsed_s
        if number % 3 == 2:
            ended, claimed = in_flight.pop(0)
            branch, cached = Branch(), claimed // 2
            branch.context_tokens = claimed
            told = TurnEnded(
                ended, branch, now_s, prompt_tokens=2 * claimed, output_tokens=acting, cached_tokens=cached
            )
            ledger.charge_turn(account, told, prefill_token_s=1e-4)
            claims(account, reasoning=account.reasoning_tokens - claimed, acting=acting, shared=shared)
    ledger.accrue(account, now_s)
    assert account.costs.spent_token_s <= capacity * now_s * (1 + 1e-9) + 1e-6


def claims(account: Account, *, reasoning: int = 0, acting: int = 0, shared: int = 0) -> None:
    """Give an account these sums, as places would."""
    account.working.tokens, account.acting.tokens = reasoning, acting
    account.demand_tokens = reasoning + acting + account.other_tokens
    account.shared_tokens = 0
    account.share(min(shared, reasoning + acting))


def opened(capacity_tokens: int | None, *, acting: int = 0, reasoning: int = 0) -> tuple[Ledger, Account]:
    ledger = Ledger(inf)
    account = ledger.open("r0", 0.0)
    account.usable = True
    account.set_limit(capacity_tokens, 1.0)
    claims(account, reasoning=reasoning, acting=acting)
    return ledger, account


def test_caching_is_what_acting_programs_hold_over_time() -> None:
    """They hold 200 tokens for 10 s, then 50 for 4 s."""
    ledger, account = opened(1000, acting=200)
    ledger.accrue(account, 10.0)
    claims(account, acting=50)
    ledger.accrue(account, 14.0)
    assert account.costs.caching_token_s == pytest.approx(200 * 10 + 50 * 4)


def test_memory_is_unused_only_while_somebody_waits() -> None:
    """700 of 1000 tokens are idle for 20 s, but a turn waits only from 4 to 6 and, with another, from 10 to 15."""
    ledger, account = opened(1000, acting=100, reasoning=200)
    ledger.wait_begins(4.0)
    ledger.wait_ends(6.0)
    ledger.wait_begins(10.0)
    ledger.wait_begins(12.0)
    ledger.wait_ends(13.0)
    ledger.wait_ends(15.0)
    ledger.accrue(account, 20.0)
    assert account.costs.unused_token_s == pytest.approx(700 * (2 + 5))
    assert ledger.waiting_count == 0


def test_unused_memory_follows_the_demand() -> None:
    """While one turn waits, 700 tokens are idle for 3 s, 100 for 2 s, and none where more is claimed than exists."""
    ledger, account = opened(1000, reasoning=300)
    ledger.wait_begins(0.0)
    for until_s, reasoning in ((3.0, 900), (5.0, 1500), (9.0, 0)):
        ledger.accrue(account, until_s)
        claims(account, reasoning=reasoning)
    assert account.costs.unused_token_s == pytest.approx(700 * 3 + 100 * 2)


def test_memory_of_unknown_size_is_not_unused() -> None:
    """Unknown memory is not counted."""
    ledger, account = opened(None)
    ledger.wait_begins(0.0)
    ledger.accrue(account, 100.0)
    assert account.costs.unused_token_s == 0


def test_memory_of_a_replica_that_is_down_is_not_unused() -> None:
    """Its memory is idle for another reason."""
    ledger, account = opened(1000)
    account.usable = False
    ledger.wait_begins(0.0)
    ledger.accrue(account, 100.0)
    assert account.costs.unused_token_s == 0


def test_an_account_that_opens_late_is_not_charged_for_earlier_waits() -> None:
    """A replica that comes after a wait of 50 s has no unused memory from that time."""
    ledger = Ledger(inf)
    ledger.wait_begins(0.0)
    account = ledger.open("late", 50.0)
    account.usable = True
    account.set_limit(10, 1.0)
    ledger.accrue(account, 51.0)
    assert account.costs.unused_token_s == pytest.approx(10)


def test_settling_twice_or_backwards_is_settling_once() -> None:
    """The integrals never run backwards."""
    ledger, account = opened(1000, acting=10)
    for now_s in (5.0, 5.0, 3.0):
        ledger.accrue(account, now_s)
    assert account.costs.caching_token_s == pytest.approx(50)


def test_the_weighed_sum_is_the_left_side_of_equation_7() -> None:
    """Reasoning and anonymous turns count in full, an acting program half after one half-life."""
    ledger = Ledger(2.0)
    account = ledger.open("r0", 0.0)
    claims(account, reasoning=300, acting=400)
    account.claim_other(50)
    assert account.decayed is not None
    account.decayed.add(400, 0.0, 0.0)
    assert account.weighed_tokens(0.0) == pytest.approx(750)
    assert account.weighed_tokens(2.0) == pytest.approx(350 + 200)
    assert account.weighed_tokens(4.0) == pytest.approx(350 + 100)
    assert account.demand_tokens == 750


def test_memory_spent_on_a_removed_replica_stays_in_the_sum() -> None:
    """A plot of costs over all replicas has no step down."""
    ledger = Ledger(60.0)
    for name, number in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
        ledger.open(name, 0.0).costs.decode_token_s = number
    ledger.close("a")
    ledger.close("b")
    ledger.close("b")
    assert ledger.closed_costs.decode_token_s == 3.0
    assert ledger.closed_costs.caching_token_s == 0.0
    assert set(ledger.accounts) == {"c"}


# --- idle while held ----------------------------------------------------------------------------------------------


def idle_s(driver: Driver, replica_id: str = "r0") -> float:
    """Return how long a replica idled while programs were held."""
    driver.ticks()
    account = driver.scheduler.replicas[replica_id].account
    driver.scheduler.ledger.accrue(account, driver.now_s)
    return account.idle_held_s


def crowded(**replicas: int | None) -> tuple[Driver, int]:
    """Return a driver whose `a` holds r0 while its tool runs; and the turn of `b`, which came a second later."""
    driver = Driver(load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0}), replicas=replicas or {"r0": 1000})
    driver.takes_turn("a", 900)
    driver.passes(1.0)
    return driver, driver.arrives("b", 500)


def test_a_replica_idles_while_a_program_waits_for_what_another_holds_there() -> None:
    """It waits from 1 s on; at 4 s the holder's next turn comes, and that is in flight for 5 s."""
    driver, waiting = crowded()
    assert driver.held(waiting)
    driver.passes(3.0)
    turn = driver.arrives("a", 950)
    driver.passes(5.0)
    assert idle_s(driver) == pytest.approx(3.0)
    driver.finishes(turn, 950)
    driver.passes(2.0)
    assert idle_s(driver) == pytest.approx(3.0 + 2.0)
    driver.releases("a")
    assert waiting in driver.granted_on
    driver.passes(7.0)
    assert idle_s(driver) == pytest.approx(5.0)


def test_a_replica_that_nobody_may_use_does_not_count_as_idle() -> None:
    driver, _ = crowded()
    driver.passes(2.0)
    driver.suspends(replica_id="r0")
    driver.passes(4.0)
    assert idle_s(driver) == pytest.approx(2.0)


def test_a_replica_of_unknown_size_counts_as_any() -> None:
    """A `cap` of one program holds the second one, whatever the replica holds."""
    driver = Driver(load_policy("cap", {"n": 1}), replicas={"r0": None})
    driver.takes_turn("a", 900)
    driver.arrives("b", 500)
    driver.passes(3.0)
    assert idle_s(driver) == pytest.approx(3.0)


def test_a_program_that_waits_for_one_replica_makes_no_other_one_idle() -> None:
    """`b` may only go to r0, where `a` holds the memory; r1 has room."""
    driver = Driver(load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0}), replicas={"r0": 1000, "r1": 1000})
    driver.routes("class", "to-r0", r0=1)
    driver.finishes(driver.arrives("a", 900, program_class="to-r0"), 900)
    assert driver.held(driver.arrives("b", 500, program_class="to-r0"))
    driver.passes(3.0)
    assert idle_s(driver, "r0") == pytest.approx(3.0)
    assert idle_s(driver, "r1") == 0.0
    driver.releases("b")
    driver.passes(3.0)
    assert idle_s(driver, "r0") == pytest.approx(3.0)
    assert idle_s(driver, "r1") == 0.0


def test_a_program_that_is_not_admitted_is_not_held_for_memory() -> None:
    driver = Driver(load_policy("ttl", {"reserve_tokens": 0, "admission": "window", "admission.n": 1}))
    driver.takes_turn("a", 100)
    assert driver.held(driver.arrives("b", 100))
    driver.passes(3.0)
    assert idle_s(driver) == 0.0


def test_a_replica_that_comes_while_a_program_waits_counts_from_then() -> None:
    driver, _ = crowded()
    driver.passes(5.0)
    driver.comes_up("r1", 10)  # too small for anybody
    assert idle_s(driver, "r1") == 0.0
    driver.passes(2.0)
    assert idle_s(driver, "r1") == pytest.approx(2.0)
