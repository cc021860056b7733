"""Fair shares between tenants."""

from __future__ import annotations

from itertools import count

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.scheduler import SchedulerSettings
from thunderagent.programs.tenants import Tenants


def fair(active_count: int = 2, **weight_ratios: float) -> Driver:
    """So many programs at a time, whoever they are."""
    settings = SchedulerSettings(fair_tenants=True, tenant_weight_ratios=weight_ratios)
    return Driver(load_policy("cap", {"n": active_count}), replicas={"r0": 100_000}, settings=settings)


def share_out(driver: Driver, wants: dict[str, int], *, rounds: int) -> dict[str, int]:
    """Let each tenant keep so many programs going, each one turn of 10 s; return how many each got through."""
    numbers = count()
    through = dict.fromkeys(wants, 0)
    turns: dict[int, tuple[str, str]] = {}

    def begin(tenant: str) -> None:
        program_id = f"{tenant}-{next(numbers)}"
        turns[driver.arrives(program_id, 1000, tenant=tenant)] = (program_id, tenant)

    for tenant, programs_count in wants.items():
        for _ in range(programs_count):
            begin(tenant)
    for _ in range(rounds):
        driver.passes(10.0)
        for turn_id in [turn_id for turn_id in turns if turn_id in driver.granted_on]:
            program_id, tenant = turns.pop(turn_id)
            through[tenant] += 1
            driver.finishes(turn_id, 1000)
            driver.releases(program_id)
            begin(tenant)
    return through


def test_a_tenant_that_wants_more_gets_no_more() -> None:
    """One with three programs beside one with twenty: half each, and so many as there is room for in all."""
    through = share_out(fair(), {"small": 3, "large": 20}, rounds=50)
    assert sum(through.values()) == 100
    assert abs(through["small"] - through["large"]) <= 4


def test_without_shares_it_does() -> None:
    """The policy's order is who came first."""
    driver = Driver(load_policy("cap", {"n": 2}), replicas={"r0": 100_000})
    through = share_out(driver, {"small": 3, "large": 20}, rounds=50)
    assert through["large"] > 4 * through["small"]


def test_weights_are_parts() -> None:
    """Three times as much."""
    through = share_out(fair(red=3.0), {"red": 20, "blue": 20}, rounds=100)
    assert through["red"] / through["blue"] == pytest.approx(3.0, rel=0.1)


def test_jain_tells_fair_from_unfair() -> None:
    """Of those that had to wait; weights count."""
    driver = fair(red=3.0)
    share_out(driver, {"red": 20, "blue": 20}, rounds=100)
    assert driver.scheduler.tenants is not None
    jain_ratio = driver.scheduler.tenants.jain_ratio()
    assert jain_ratio is not None
    assert jain_ratio > 0.98
    tenants = Tenants({})
    assert tenants.jain_ratio() is None
    for name, tokens in (("all", 100), ("none", 0)):
        tenants.waits(name, 1)
        tenants.claims(name, tokens)
    tenants.now_s = 10.0
    assert tenants.jain_ratio() == 0.5


def test_nobody_saves_up_and_nobody_begins_anew() -> None:
    """Who comes is level with the least; who leaves while ahead is ahead when it comes back."""
    tenants = Tenants({})
    tenants.claims("steady", 10)
    tenants.claims("greedy", 30)
    tenants.now_s = 10.0
    tenants.claims("greedy", -30)
    tenants.event_ended()
    assert tenants.level_token_s("greedy") == 300
    assert tenants.level_token_s("new") == 100
    tenants.waits("new", 1)
    tenants.waits("greedy", 1)
    assert [tenants.level_token_s(name) for name in ("new", "greedy")] == [100, 300]
    tenants.waits("new", -1)
    tenants.waits("greedy", -1)
    tenants.event_ended()
    assert {tenant.name for tenant in tenants} == {"steady", "greedy"}
    tenants.now_s = 30.0
    tenants.claims("steady", -10)
    tenants.waits("steady", 1)
    tenants.waits("steady", -1)
    tenants.event_ended()
    assert not {tenant.name for tenant in tenants} & {"new"}


def test_who_left_ahead_and_was_caught_up_with_comes_back_level() -> None:
    """It is remembered until somebody leaves, by then with less than all others: it would pass the first that waits."""
    policy = load_policy("ttl", {"reserve_tokens": 0})
    driver = Driver(policy, replicas={"r0": 1000}, settings=SchedulerSettings(fair_tenants=True))
    early = driver.arrives("early", 600, tenant="early")
    driver.arrives("steady", 400, tenant="steady")
    driver.passes(10.0)
    driver.finishes(early, 600)
    driver.releases("early")
    driver.passes(990.0)
    head = driver.arrives("new", 700, tenant="new")
    back = driver.arrives("back", 50, tenant="early")
    assert driver.held(head)
    assert driver.held(back)


def test_inside_a_tenant_the_policy_s_order_counts() -> None:
    """And lists show one of each in turn."""
    driver = fair(1)
    driver.arrives("now", 10, tenant="red")
    for name in ("a", "b"):
        for tenant in ("red", "blue"):
            driver.passes(1.0)
            driver.arrives(f"{tenant}-{name}", 10, tenant=tenant)
    waiting = [program.program_id for program in driver.scheduler.queue]
    assert waiting == ["blue-a", "red-a", "blue-b", "red-b"]
    assert [program.program_id for program in driver.scheduler.queue.reasoning.lowest(3)] == waiting[:3]


def test_children_without_end_get_in_one_at_a_time() -> None:
    """Their parent waits for all of them, so that one is enough for it to go on."""
    driver = fair(1)
    driver.arrives("parent", 10, tenant="red")
    first, *others = [driver.arrives(f"child-{n}", 10, parent="parent", tenant="red") for n in range(20)]
    assert first in driver.granted_on
    assert not set(others) & set(driver.granted_on)
    driver.passes(1.0)
    driver.finishes(first, 10)
    assert not set(others) & set(driver.granted_on)
    driver.releases("child-0")
    assert set(others) & set(driver.granted_on) == {others[0]}
    driver.is_abandoned(others[0])
    driver.releases("child-1")
    assert others[1] in driver.granted_on


def test_a_tenant_is_not_gone_for_a_moment() -> None:
    """Its only program's claim is booked anew whenever it grows: what the tenant had stays."""
    driver = fair()
    driver.arrives("a", 900, tenant="a")
    turn_id = driver.arrives("b", 10, tenant="b")
    driver.passes(100.0)
    driver.progresses(turn_id, 5)
    tenants = driver.scheduler.tenants
    assert tenants is not None
    assert tenants.level_token_s("b") == 1000
    assert {tenant.name: tenant.service_token_s for tenant in tenants} == {"a": 90_000, "b": 1000}


def test_who_is_alone_and_leaves_for_a_moment_takes_nobody_s_memory_along() -> None:
    """One that had more and left is ahead when it comes back, though the only other one's claim was booked anew."""
    driver = fair()
    driver.arrives("a", 900, tenant="a")
    turn_id = driver.arrives("b", 10, tenant="b")
    driver.passes(100.0)
    driver.releases("a")
    driver.progresses(turn_id, 5)
    tenants = driver.scheduler.tenants
    assert tenants is not None
    assert tenants.level_token_s("a") == 90_000
