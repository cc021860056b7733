"""`plas` and `atlas`: levels of attained service, and starvation; `autellix`: the replicas of its calls."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Decision, Grant
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.baselines.ttl import Ttl
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.policies.papers.autellix import Autellix
from thunderagent.programs.policies.papers.plas import Atlas, Plas


def driver_with(priority: Plas) -> Driver:
    return Driver(Composed(Passthrough(), priority=priority))


def priority_of(decisions: list[Decision]) -> int | None:
    (grant,) = (decision for decision in decisions if isinstance(decision, Grant))
    return grant.engine_priority


def next_priority(driver: Driver, program_id: str, tokens: int = 10) -> tuple[int, int | None]:
    turn_id = driver.arrives(program_id, tokens)
    return turn_id, priority_of(driver.decisions)


@pytest.mark.parametrize(
    ("served_tokens", "level"), [(2047, 0), (2048, 1), (8191, 1), (8192, 2), (32767, 2), (32768, 3), (10**6, 3)]
)
def test_the_levels_are_those_of_the_public_baseline(served_tokens: int, level: int) -> None:
    """There are four, from 0, 2,048, 8,192 and 32,768 tokens on, lower bounds included."""
    driver = driver_with(Plas())
    turn_id, priority = next_priority(driver, "a")
    assert priority == 0
    driver.finishes(turn_id, served_tokens - 40, 40)
    assert next_priority(driver, "a")[1] == level


def test_plas_adds_up_what_was_computed_and_not_what_was_cached() -> None:
    """1,500 tokens twice are 3,000: the second level; tokens from the cache are no service."""
    driver = driver_with(Plas())
    turn_id, _ = next_priority(driver, "a")
    driver.finishes(turn_id, 1400, 100)
    turn_id, priority = next_priority(driver, "a")
    assert priority == 0
    driver.finishes(turn_id, 9000, 100, 8900)
    turn_id, priority = next_priority(driver, "a")
    assert priority == 0
    driver.finishes(turn_id, 9500, 300, 9000)
    assert next_priority(driver, "a")[1] == 1


def test_atlas_counts_the_longest_chain() -> None:
    """Two concurrent calls of 1,500 tokens are a chain of 1,500; one after them makes it 3,000. PLAS adds all."""
    for part, levels in ((Atlas(), (0, 1)), (Plas(), (1, 1))):
        driver = driver_with(part)
        together = [driver.arrives("a", 10, branch=branch) for branch in ("x", "y")]
        for turn_id in together:
            driver.finishes(turn_id, 1400, 100)
        turn_id, priority = next_priority(driver, "a")
        assert priority == levels[0]
        driver.finishes(turn_id, 1400, 100)
        assert next_priority(driver, "a")[1] == levels[1]


def runs_for(driver: Driver, turn_id: int, first_token_s: float, rest_s: float, tokens: int, cached: int = 0) -> None:
    driver.passes(first_token_s)
    driver.starts(turn_id)
    driver.passes(rest_s)
    driver.finishes(turn_id, tokens, 100, cached)


def test_program_that_waits_twice_its_service_goes_first() -> None:
    """A prefill of 0.2 s is service, the 3 s before are not: the ratio is over 2; 1 s of service later it is less."""
    driver = driver_with(Plas(starved_ratio=2.0))
    for _ in range(6):  # enough to learn the speed of prefill
        runs_for(driver, driver.arrives("other", 4000), 0.2, 0.5, 4000)
    runs_for(driver, next_priority(driver, "a")[0], 3.2, 1.0, 4000)
    turn_id, priority = next_priority(driver, "a")
    assert priority == 0
    runs_for(driver, turn_id, 0.0, 1.0, 4100, 4100)
    assert next_priority(driver, "a")[1] == 1


def test_a_second_tool_is_no_waiting() -> None:
    """Neither is the client's time before its next turn: only held time counts as waiting."""
    part = Plas()
    driver = driver_with(part)
    turn_id, _ = next_priority(driver, "a")
    driver.finishes(turn_id, 4000, 100, tool="make")
    driver.tool_ends("a")
    driver.tool_starts("a", "test")
    driver.passes(1000.0)
    driver.tool_ends("a")
    driver.passes(1.0)
    next_priority(driver, "a")
    assert part._attained["a"].wait_s == 0


def test_inf_promotes_nobody() -> None:
    """This holds after any wait."""
    driver = driver_with(Plas(starved_ratio=float("inf")))
    turn_id, _ = next_priority(driver, "a")
    driver.passes(100.0)
    driver.starts(turn_id)
    driver.passes(0.1)
    driver.finishes(turn_id, 3900, 100)
    assert next_priority(driver, "a")[1] == 1


def test_service_of_a_program_is_forgotten_when_it_ends() -> None:
    """A new program of that name begins at the first level, and nothing of the old one is left."""
    part = Plas()
    driver = driver_with(part)
    turn_id, _ = next_priority(driver, "a")
    driver.finishes(turn_id, 50_000, 100)
    driver.releases("a")
    assert not part._attained
    assert next_priority(driver, "a")[1] == 0


def test_order_serves_lower_levels_first_then_by_arrival() -> None:
    """A held program with much service waits behind two later ones with little."""
    driver = Driver(Composed(Ttl(ttl_s=0.0, reserve_tokens=0), order=Plas(first_tokens=300)), replicas={"r0": 1000})
    driver.takes_turn("much", 400)
    driver.takes_turn("little", 100)
    blocker = driver.arrives("blocker", 950)
    held = {}
    for program_id, tokens in (("much", 400), ("little", 150), ("new", 150)):
        driver.passes(1.0)
        held[driver.arrives(program_id, tokens)] = program_id
    assert all(driver.held(turn_id) for turn_id in held)
    decisions = driver.finishes(blocker, 950)
    assert [held[each.turn_id] for each in decisions if isinstance(each, Grant)] == ["little", "new", "much"]


def test_program_back_after_a_failed_turn_waits_like_others() -> None:
    """Its wait begins with its turn, although no tool ended, and not with its program."""
    driver = Driver(load_policy("ttl", {"ttl_s": 1.0, "reserve_tokens": 0, "order": "plas"}), replicas={"r0": 1000})
    driver.fails(driver.arrives("failed", 300))
    driver.ticks(5.0)
    driver.arrives("busy", 600)
    head = driver.arrives("head", 500)
    driver.passes(5.0)
    back = driver.arrives("failed", 310)
    assert driver.held(head)
    assert driver.held(back)


@pytest.mark.parametrize(
    "settings", [{"level_count": 0}, {"level_count": 1.5}, {"first_tokens": 0}, {"ratio": 1.0}, {"starved_ratio": 0.0}]
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    """The error has the name of the part."""
    with pytest.raises(ConfigurationError, match="plas: "):
        Plas(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="atlas: "):
        Atlas(**settings)  # type: ignore[arg-type]


def test_autellix_sends_long_calls_home_and_short_ones_where_least_is_done() -> None:
    """Short ones have up to 2,048 tokens; its priority is PLAS."""
    driver = Driver(Autellix(), replicas={"r0": 100_000, "r1": 100_000})
    driver.takes_turn("long", 2100)
    driver.takes_turn("short", 500)
    assert (driver.home("long"), driver.home("short")) == ("r0", "r1")
    driver.arrives("busy", 10)
    assert driver.home("busy") == "r1"
    assert driver.granted_on[driver.arrives("short", 600)] == "r0"
    long, priority = next_priority(driver, "long", 2200)
    assert (driver.granted_on[long], priority) == ("r0", 1)
    with pytest.raises(ConfigurationError, match="short_tokens"):
        Autellix(short_tokens=-1)


def test_they_are_loaded_by_name() -> None:
    """They load as a policy, as parts, and as another priority on the policy."""
    policy = load_policy("autellix", {"priority": "atlas", "priority.level_count": 2})
    assert policy.name == "autellix+priority=atlas"
    assert isinstance(policy.priority, Plas)  # type: ignore[attr-defined]
    assert policy.priority.critical_path  # type: ignore[attr-defined]
    assert load_policy("fcfs", {}) == Passthrough()


def test_a_turn_that_was_left_while_it_was_held_is_no_waiting() -> None:
    """Only the hold of the next one counts, not the time between the two."""
    part = Plas()
    driver = Driver(load_policy("cap", {"n": 1, "order": "plas"}), replicas={"r0": 1000})
    driver.scheduler.listen(lambda signal: part.observe(driver.scheduler.view, signal))
    other = driver.arrives("b", 900)
    driver.is_abandoned(driver.arrives("a", 100))
    driver.passes(1000.0)
    again = driver.arrives("a", 100)
    driver.passes(7.0)
    driver.finishes(other, 900)
    driver.releases("b")
    assert again in driver.granted_on
    assert part._attained["a"].wait_s == pytest.approx(7.0)
