"""`sticky`: consistent hashing."""

from __future__ import annotations

from collections import Counter

from tests.builders import Driver
from thunderagent.programs.policies.baselines.sticky import Sticky, rendezvous_hash

REPLICAS = {"r0": None, "r1": None, "r2": None, "r3": None}
PROGRAMS = [f"program-{number}" for number in range(60)]


def homes(driver: Driver) -> dict[str, str | None]:
    """Let every program take a turn; return the place of each."""
    for program_id in PROGRAMS:
        driver.takes_turn(program_id, 10)
    return {program_id: driver.home(program_id) for program_id in PROGRAMS}


def test_a_programs_turns_all_go_to_one_replica() -> None:
    """Its place is a function of its name, whatever the load."""
    driver = Driver(Sticky(), replicas=REPLICAS)
    first = homes(driver)
    for number in range(20):
        driver.arrives(f"load-{number}", 500)
    assert homes(driver) == first


def test_only_the_lost_replicas_programs_move_and_they_return() -> None:
    """Three quarters keep their cache through a loss, and the rest get theirs back afterwards."""
    driver = Driver(Sticky(), replicas=REPLICAS)
    before = homes(driver)
    driver.goes_down("r2")
    during = homes(driver)
    moved = {name for name in PROGRAMS if during[name] != before[name]}
    assert moved == {name for name in PROGRAMS if before[name] == "r2"}
    assert len({during[name] for name in moved}) == 3
    driver.comes_up("r2")
    assert homes(driver) == before


def test_the_place_does_not_depend_on_the_order_of_the_replicas() -> None:
    """Two proxies that know the replicas in different orders agree."""
    forwards = Driver(Sticky(), replicas=REPLICAS)
    backwards = Driver(Sticky(), replicas=dict(reversed(REPLICAS.items())))
    assert homes(forwards) == homes(backwards)


def test_programs_are_spread_evenly() -> None:
    """60 programs on four replicas are 15 each, apart from chance."""
    counts = Counter(homes(Driver(Sticky(), replicas=REPLICAS)).values())
    assert all(7 <= count <= 23 for count in counts.values())


def test_the_hash_is_the_same_in_every_run() -> None:
    """It is a fixed value: neither a restart nor another machine may move a program."""
    assert rendezvous_hash("agent-1", "r0").hex() == "8b6e6fd47c0d6f97"
    assert rendezvous_hash("ab", "c") != rendezvous_hash("b", "ca")


def test_after_an_outage_every_held_turn_is_granted_at_its_place() -> None:
    """The queue is restored by name, too."""
    driver = Driver(Sticky(), replicas={})
    turns = {name: driver.arrives(name, 10) for name in PROGRAMS[:20]}
    for replica_id in REPLICAS:
        driver.comes_up(replica_id)
    assert {driver.granted_on[turn] for turn in turns.values()} == {"r0"}
    for name, turn in turns.items():
        driver.finishes(turn, 10)
        driver.takes_turn(name, 10)
    placed = Driver(Sticky(), replicas=REPLICAS)
    for name in turns:
        placed.takes_turn(name, 10)
    assert [driver.home(name) for name in turns] == [placed.home(name) for name in turns]
