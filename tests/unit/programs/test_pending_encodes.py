"""The choice of replicas when engines have images to encode: they encode one at a time, whatever room there is."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.policy_loader import load_policy

TWO = {"r0": 10_000, "r1": 10_000}
BY_ROOM = ["breakeven", "thunderagent", "ttl", "mars", "infercept"]


def driver_of(policy: str, **capacities: int) -> Driver:
    return Driver(load_policy(policy, {}), replicas=capacities or TWO)


@pytest.mark.parametrize("policy", BY_ROOM)
def test_a_program_goes_where_fewer_images_are_to_be_encoded(policy: str) -> None:
    """It does so even if less room is left there."""
    driver = driver_of(policy)
    driver.has_to_encode("r0", 0)
    driver.has_to_encode("r1", 3)
    for program in ("a", "b", "c"):
        assert driver.granted_on[driver.arrives(program, 500)] == "r0"
    assert driver.granted_on[driver.arrives("d", 500)] in TWO


@pytest.mark.parametrize("policy", BY_ROOM)
def test_turns_since_the_last_poll_are_counted(policy: str) -> None:
    """Each is expected to bring an image: not all turns of a second go to the replica that was free at its begin."""
    driver = driver_of(policy)
    driver.has_to_encode("r0", 0)
    driver.has_to_encode("r1", 0)
    homes = [driver.granted_on[driver.arrives(f"p{i}", 100)] for i in range(6)]
    assert sorted(homes) == ["r0"] * 3 + ["r1"] * 3


@pytest.mark.parametrize("policy", BY_ROOM)
def test_room_comes_before_a_short_queue(policy: str) -> None:
    """A program that fits only on a replica with much to encode still goes there."""
    driver = driver_of(policy, r0=2_000, r1=10_000)
    driver.has_to_encode("r0", 0)
    driver.has_to_encode("r1", 5)
    assert driver.granted_on[driver.arrives("small", 500)] == "r0"
    assert driver.granted_on[driver.arrives("large", 5_000)] == "r1"


def test_nobody_gives_memory_up_for_a_shorter_queue() -> None:
    """A program has expired on a replica without encodes, and another replica is empty: it stays."""
    driver = Driver(load_policy("breakeven", {"hold_ratio": 0.0}), replicas={"r0": 1000, "r1": 1000})
    driver.has_to_encode("r0", 0)
    driver.has_to_encode("r1", 1)
    driver.takes_turn("a", 600)
    home = driver.home("a")
    driver.has_to_encode(home or "", 0)
    driver.has_to_encode("r1" if home == "r0" else "r0", 1)
    driver.passes(100.0)
    driver.arrives("b", 600)
    assert driver.home("a") == home
    assert driver.home("b") != home


def test_a_program_stays_where_its_history_lies() -> None:
    """Cached tokens need not be computed again, nor older images be encoded again."""
    driver = driver_of("breakeven")
    turn = driver.arrives("a", 500)
    home = driver.granted_on[turn]
    driver.has_to_encode(home, 5)
    driver.has_to_encode("r1" if home == "r0" else "r0", 0)
    driver.finishes(turn)
    assert driver.granted_on[driver.arrives("a", 600)] == home


def test_without_an_encoding_stage_nothing_changes() -> None:
    """An engine that does not report encodes is no better than one without any."""
    driver = driver_of("breakeven")
    driver.has_to_encode("r0", 0)
    for i in range(4):
        driver.arrives(f"p{i}", 500)
    assert driver.scheduler.ledger.accounts["r1"].pending_encode_count is None
    assert {driver.home(f"p{i}") for i in range(4)} == {"r0", "r1"}


def test_turns_without_a_program_count_them_too() -> None:
    """The fewest turns in flight count, and each image counts as one more."""
    driver = driver_of("breakeven")
    driver.has_to_encode("r0", 2)
    assert [driver.granted_on[driver.arrives(None, 10)] for _ in range(3)] == ["r1", "r1", "r0"]


def test_affinity_by_hash_is_left_alone() -> None:
    """Its purpose is that a program is always in the same place."""
    homes = []
    for counts in ((0, 9), (9, 0)):
        driver = driver_of("sticky")
        driver.has_to_encode("r0", counts[0])
        driver.has_to_encode("r1", counts[1])
        homes.append([driver.granted_on[driver.arrives(f"p{i}", 100)] for i in range(8)])
    assert homes[0] == homes[1]
