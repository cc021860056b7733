"""Models that only some replicas of a pool serve, such as LoRA adapters: their turns go there, and wait for them."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.policies import POLICIES
from thunderagent.programs.state.program import Kind


def three() -> Driver:
    """Three replicas; the first has less room than the others, and alone serves `lora`."""
    driver = Driver(
        load_policy("ttl", {"ttl_s": 1000.0, "reserve_tokens": 0}), replicas={"r0": 1000, "r1": 2000, "r2": 2000}
    )
    driver.serve("lora", "r0")
    return driver


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_of_an_adapter_run_where_it_is_under_every_policy(policy: str) -> None:
    """This covers programs and anonymous turns, even if others have more room; all other turns run as before."""
    settings = {"n": 8} if policy == "cap" else {"reserve_tokens": 0} if policy == "breakeven" else {}
    driver = Driver(load_policy(policy, settings), replicas={"r0": 1000, "r1": 2000, "r2": 2000})
    driver.serve("lora", "r0")
    of_adapter = [driver.arrives(None, 10, model="lora") for _ in range(4)]
    of_adapter += [driver.arrives(f"p{number}", 10, model="lora") for number in range(4)]
    assert {driver.granted_on[each] for each in of_adapter if each in driver.granted_on} == {"r0"}
    assert driver.granted_on[driver.arrives(None, 10)] != "r0"


def test_a_program_moves_to_where_its_turn_is_served_and_stays_there() -> None:
    """Its next turn of a model that all replicas have does not move it back."""
    driver = three()
    driver.takes_turn("p", 100)
    assert driver.home("p") == "r1"
    driver.finishes(driver.arrives("p", 110, model="lora"), 110)
    assert driver.home("p") == "r0"
    driver.arrives("p", 120)
    assert driver.home("p") == "r0"


def test_paused_program_is_restored_where_its_adapter_is() -> None:
    """It is restored as soon as there is room, though others always have some."""
    driver = three()
    first = driver.arrives("first", 900, model="lora")
    second = driver.arrives("second", 900, model="lora")
    assert driver.granted_on == {first: "r0"}
    driver.ticks(1.0)
    driver.releases("first")
    driver.finishes(first, 900)
    assert driver.granted_on[second] == "r0"


@pytest.mark.parametrize("program_id", ["p", None])
def test_a_turn_waits_for_the_only_replica_that_serves_it(program_id: str | None) -> None:
    """The replica is down, or grants nothing, and its program lost its claim with it."""
    driver = three()
    driver.finishes(driver.arrives(program_id, 100, model="lora"), 100)
    driver.goes_down("r0")
    waits = driver.arrives(program_id, 110, model="lora")
    driver.ticks(1.0)
    assert waits not in driver.granted_on
    driver.comes_up("r0", 1000)
    assert driver.granted_on[waits] == "r0"


@pytest.mark.parametrize("program_id", ["p", None])
def test_a_turn_that_waits_goes_where_the_adapter_is_loaded_meanwhile(program_id: str | None) -> None:
    """If all replicas have it by then, the turn goes anywhere."""
    driver = three()
    driver.goes_down("r0")
    one = driver.arrives(program_id, 100, model="lora")
    driver.serve("lora", "r0", "r2")
    assert driver.granted_on[one] == "r2"
    driver.goes_down("r2")
    other = driver.arrives(program_id and "q", 100, model="lora")
    assert other not in driver.granted_on
    driver.serve("lora")
    assert driver.granted_on[other] == "r1"
    assert not driver.scheduler.core.routing.routes


def test_turns_of_two_adapters_at_once_run_where_each_is() -> None:
    """A program claims memory on one replica: a turn that cannot run there is anonymous."""
    driver = three()
    driver.serve("other", "r2")
    first = driver.arrives("p", 100, model="lora")
    beside = driver.arrives("p", 100, branch="sub", model="other")
    assert driver.granted_on == {first: "r0", beside: "r2"}
    assert driver.scheduler.turns[beside].program is None
    driver.finishes(beside, 100)
    driver.finishes(first, 100)
    assert driver.granted_on[driver.arrives("p", 110, model="other")] == "r2"
    assert driver.home("p") == "r2"


def test_a_route_leads_to_those_of_its_replicas_that_serve_the_model() -> None:
    """Without such a replica the route has no effect; operators cannot move programs to others."""
    driver = three()
    driver.serve("lora", "r0", "r2")
    driver.routes("all", "", r1=1, r2=1)
    assert driver.granted_on[driver.arrives("p", 10, model="lora")] == "r2"
    driver.routes("all", "", r1=1)
    assert driver.granted_on[driver.arrives("q", 10, model="lora")] in ("r0", "r2")
    assert "does not serve" in driver.scheduler.operations.why_not_migrate("p", "r1")


def test_a_program_with_a_claim_elsewhere_does_not_stall_there() -> None:
    """Nothing is granted anywhere: it gives up its claim, and waits for the replica of its adapter."""
    driver = three()
    driver.takes_turn("p", 100)
    driver.suspends("pause")
    waits = driver.arrives("p", 110, model="lora")
    assert driver.scheduler.programs["p"].place.kind is Kind.WAITING
    driver.goes_on("pause")
    assert driver.granted_on[waits] == "r0"
