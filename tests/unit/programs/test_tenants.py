"""Fair shares between tenants."""

from __future__ import annotations

from itertools import count, groupby

import pytest

from tests.builders import Driver
from thunderagent.compilation import build_kind
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import ProgramReleased, SchedulerSettings, TurnAsk
from thunderagent.programs.rules.tenants import FairSet, Tenants
from thunderagent.programs.state.program import Program

VERBS = Driver().scheduler.core
"""A rule gets these verbs; the count of what tenants had needs none of them."""


def fair(active_count: int = 2, **weight_ratios: float) -> Driver:
    """A fixed number of programs at a time, of any tenant."""
    settings = SchedulerSettings(fair_tenants=True, tenant_weight_ratios=weight_ratios)
    return Driver(load_policy("cap", {"n": active_count}), replicas={"r0": 100_000}, settings=settings)


def share_out(driver: Driver, wants: dict[str, int], *, rounds: int) -> dict[str, int]:
    """Let each tenant keep a number of programs running, each with turns of 10 s; return the count for each."""
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
    """One has three programs, another one twenty: each gets half, and all places are used."""
    through = share_out(fair(), {"small": 3, "large": 20}, rounds=50)
    assert sum(through.values()) == 100
    assert abs(through["small"] - through["large"]) <= 4


def test_without_shares_it_does() -> None:
    """The policy's order is by arrival."""
    driver = Driver(load_policy("cap", {"n": 2}), replicas={"r0": 100_000})
    through = share_out(driver, {"small": 3, "large": 20}, rounds=50)
    assert through["large"] > 4 * through["small"]


def test_weights_are_parts() -> None:
    """Three times the weight gives three times as much."""
    through = share_out(fair(red=3.0), {"red": 20, "blue": 20}, rounds=100)
    assert through["red"] / through["blue"] == pytest.approx(3.0, rel=0.1)


def test_jain_tells_fair_from_unfair() -> None:
    """Only tenants that had to wait count; weights matter."""
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
    tenants.advance(10.0)
    assert tenants.jain_ratio() == 0.5


def waiting(tenants: Tenants, name: str, replica_id: str | None = None) -> tuple[FairSet, Program]:
    """Make a program of a tenant wait."""
    where, program = FairSet(tenants, replica_id), Program(f"{name}-waits", 1, 0.0)
    program.tenant = name
    where.add(program, 0.0)
    return where, program


def test_nobody_saves_up_and_nobody_begins_anew() -> None:
    """A new tenant starts level with the least waiting one; one that leaves while ahead returns ahead."""
    tenants = Tenants({})
    tenants.set_granting(["r0"])
    for name, tokens in (("steady", 10), ("greedy", 30), ("tiny", 1)):
        tenants.claims(name, tokens)
    where, program = waiting(tenants, "steady")
    tenants.settle(VERBS)
    tenants.advance(10.0)
    tenants.claims("greedy", -30)
    tenants.settle(VERBS)
    levels = [tenants.level_token_s(name) for name in ("steady", "greedy", "new", "tiny")]
    assert levels == [100, 300, 100, 100]
    tenants.waits("new", 1)
    tenants.waits("greedy", 1)
    assert [tenants.level_token_s(name) for name in ("new", "greedy")] == [100, 300]
    tenants.waits("new", -1)
    tenants.waits("greedy", -1)
    tenants.settle(VERBS)
    assert {tenant.name for tenant in tenants} == {"steady", "greedy", "tiny"}
    tenants.advance(40.0)
    tenants.settle(VERBS)
    assert {tenant.name for tenant in tenants} == {"steady", "tiny"}, "all others have caught up with it"
    where.discard(program)
    tenants.settle(VERBS)
    tenants.advance(90.0)
    assert tenants.level_token_s("steady") == 400, "what nobody waits for takes nothing from others"


def test_program_that_waits_for_suspended_grants_blocks_nobody() -> None:
    """Its level is frozen, and is not the least; when grants resume there it starts like all others."""
    tenants = Tenants({})
    tenants.set_granting(["r0"])
    waiting(tenants, "stuck", "r1")
    waiting(tenants, "steady", "r0")
    tenants.claims("steady", 10)
    tenants.settle(VERBS)
    tenants.advance(10.0)
    assert [tenants.level_token_s(name) for name in ("stuck", "steady", "new")] == [0, 100, 100]
    tenants.set_granting(["r0", "r1"])
    assert tenants.level_token_s("stuck") == 100


def test_a_tiny_tenant_lets_no_newcomer_go_many_times_in_a_row() -> None:
    """A tenant with almost nothing that does not wait does not set a newcomer's level: the waiting ones do."""
    driver = fair(2)
    driver.arrives("tiny", 10, tenant="tiny")
    numbers = count()
    large = {driver.arrives(f"large-{next(numbers)}", 1000, tenant="large") for _ in range(3)}

    def round_of(tenant: str, turns: set[int]) -> None:
        """End a tenant's running programs after 10 s, and let as many arrive again."""
        for turn_id in [turn_id for turn_id in turns if turn_id in driver.granted_on]:
            turns.remove(turn_id)
            program_id = next(
                each.program_id for each in driver.scheduler.programs.values() if turn_id in each.in_flight
            )
            driver.finishes(turn_id, 1000)
            turns.add(driver.arrives(f"{tenant}-{next(numbers)}", 1000, tenant=tenant))
            driver.releases(program_id)

    for _ in range(30):
        driver.passes(10.0)
        round_of("large", large)
    new = {driver.arrives(f"new-{next(numbers)}", 1000, tenant="new") for _ in range(3)}
    whose = []
    for _ in range(24):
        driver.passes(10.0)
        whose.append("new" if new & set(driver.granted_on) else "large")
        round_of("large", large)
        round_of("new", new)
    longest = max(len(list(run)) for name, run in groupby(whose) if name == "new")
    assert longest <= 2, whose
    assert abs(whose.count("new") - 12) <= 2


def test_tenants_that_come_and_go_are_not_kept_and_cost_little() -> None:
    """One waits for a replica without grants, and still neither the kept state nor the lookups grow."""
    driver = fair(2)
    tenants = driver.scheduler.tenants
    assert tenants is not None
    driver.comes_up("r1", 100_000)
    driver.arrives("stuck-0", 100, tenant="stuck")
    driver.routes("tenant", "stuck", r1=1)
    driver.suspends("pause", "r1")
    assert driver.held(driver.arrives("stuck-1", 100, tenant="stuck"))
    driver.releases("stuck-0")
    numbers = count()
    for _ in range(5):
        driver.arrives(f"steady-{next(numbers)}", 100, tenant="steady")
    looked_up = lookups_of(tenants)
    kept, per_event = [], []
    for n in range(400):
        driver.passes(1.0)
        for tenant, program_id in zip(
            ("steady", f"tenant-{n}"), list(driver.scheduler.replicas["r0"].programs), strict=True
        ):
            looked_up.count = 0
            driver.scheduler.handle(ProgramReleased(driver.now_s, program_id))
            per_event.append(looked_up.count)
            driver.arrives(f"{tenant}-{next(numbers)}", 100, tenant=tenant)
        kept.append(len(tenants))
    assert max(kept) < 12
    assert max(per_event) < 40
    assert "tenant-399" in {tenant.name for tenant in tenants}


def test_next_of_4000_tenants_is_found_without_looking_at_all() -> None:
    """Reading the first few does not look at each tenant, either."""
    driver = fair(1)
    driver.arrives("holder", 100, tenant="holder")
    for n in range(4000):
        driver.scheduler.handle(
            TurnAsk(now_s=driver.now_s, turn_id=10_000 + n, program_id=f"p{n}", tenant=f"tenant-{n}", prompt_bytes=400)
        )
    tenants, waiting_set = driver.scheduler.tenants, driver.scheduler.queue.waiting.order
    assert tenants is not None
    assert isinstance(waiting_set, FairSet)
    looked_up = lookups_of(tenants)
    assert [program.program_id for program in waiting_set.lowest(5)] == [f"p{n}" for n in range(5)]
    assert looked_up.count <= 10
    looked_up.count = 0
    for n in range(20):
        driver.passes(1.0)
        driver.scheduler.handle(ProgramReleased(driver.now_s, "holder" if n == 0 else f"p{n - 1}"))
        assert driver.scheduler.programs.get(f"p{n}") in driver.scheduler.replicas["r0"].programs.values()
    assert looked_up.count <= 20 * 12


class Lookups:
    """The number of levels that were looked up."""

    count = 0


def lookups_of(tenants: Tenants) -> Lookups:
    """Count lookups from now on; a compiled method cannot be replaced, so none are counted there."""
    lookups, look_up = Lookups(), tenants.level_token_s

    def counted(name: str) -> float:
        lookups.count += 1
        return look_up(name)

    if build_kind() == "interpreted":
        tenants.level_token_s = counted  # type: ignore[method-assign]
    return lookups


def test_tenant_that_left_ahead_comes_back_level_once_caught_up() -> None:
    """It left ahead and has less than all others by now: without this rule it would pass the first that waits."""
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
    """Lists show one of each tenant in turn."""
    driver = fair(1)
    driver.arrives("now", 10, tenant="red")
    for name in ("a", "b"):
        for tenant in ("red", "blue"):
            driver.passes(1.0)
            driver.arrives(f"{tenant}-{name}", 10, tenant=tenant)
    waiting = [program.program_id for program in driver.scheduler.queue]
    assert waiting == ["blue-a", "red-a", "blue-b", "red-b"]
    assert [program.program_id for program in driver.scheduler.queue.waiting.order.lowest(3)] == waiting[:3]


def test_children_without_end_get_in_one_at_a_time() -> None:
    """Their parent waits for all of them, so one suffices for it to continue."""
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
    """Its only program's claim is booked anew at each growth: the tenant's past use stays."""
    driver = fair()
    driver.arrives("a", 900, tenant="a")
    turn_id = driver.arrives("b", 10, tenant="b")
    driver.arrives("c", 10, tenant="c")
    driver.passes(100.0)
    driver.progresses(turn_id, 5)
    tenants = driver.scheduler.tenants
    assert tenants is not None
    assert tenants.level_token_s("b") == 1000
    assert {tenant.name: tenant.service_token_s for tenant in tenants} == {"a": 90_000, "b": 1000, "c": 0}


def test_tenant_alone_that_leaves_briefly_takes_nobodys_memory_along() -> None:
    """A tenant that had more and left returns ahead, although the only other one's claim was booked anew."""
    driver = fair()
    driver.arrives("a", 900, tenant="a")
    turn_id = driver.arrives("b", 10, tenant="b")
    driver.arrives("c", 10, tenant="c")
    driver.passes(100.0)
    driver.releases("a")
    driver.progresses(turn_id, 5)
    tenants = driver.scheduler.tenants
    assert tenants is not None
    assert tenants.level_token_s("a") == 90_000
