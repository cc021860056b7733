"""The weight fence's rules: salts, bounds, and where a program may go on."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from thunderagent.errors import ProgramStaleError, RequestError, UnknownModelError
from thunderagent.leases import Lease, TurnEnd
from thunderagent.leases.open_lease import OpenLease
from thunderagent.proxy.turns.fence import Fence, FenceSettings, Staleness, places, salt_of, salted_prefix, staleness_of

NUMBERS = {"a": 5, "b": 6, "c": 7}


def test_salts_differ_by_serial_by_secret_and_by_the_clients_own() -> None:
    """And are letters and digits that every engine takes."""
    salts = {
        salt_of(secret, serial, given)
        for secret in (b"s", b"t")
        for serial in (1, 11, 12)
        for given in (b"", b'"x"', b'"1:x"', b'["x"]')
    }
    assert len(salts) == 24
    assert all(len(salt) == 32 and salt.isalnum() and salt.startswith("ta") for salt in salts)
    assert salt_of(b"s", 1, b'"x"') == salt_of(b"s", 1, b'"x"')


def test_prefixes_are_shared_only_under_one_serial() -> None:
    """The places stay."""
    prefix = ((17, 100), (18, 400))
    first, second = salted_prefix(prefix, 1), salted_prefix(prefix, 2)
    assert first == salted_prefix(prefix, 1)
    assert not {digest for digest, _ in first} & {digest for digest, _ in (*second, *prefix)}
    assert [size_bytes for _, size_bytes in first] == [100, 400]
    assert all(0 <= digest < 2**63 for digest, _ in (*first, *second))


@pytest.mark.parametrize(
    ("last", "most", "allowed"),
    [
        (5, None, None),  # all will do
        (6, None, {"b", "c"}),  # never back
        (5, 6, {"a", "b"}),  # the bound
        (6, 6, {"b"}),
        (8, None, None),  # the newer one is gone
        (7, 6, {"a", "b"}),  # the bound counts for more
    ],
)
def test_program_goes_on_with_weights_of_its_bound_that_are_not_older(
    last: int, most: int | None, allowed: set[str] | None
) -> None:
    """None is anywhere."""
    found = places(NUMBERS, last, most)
    assert found is allowed if allowed is None else set(found or ()) == allowed


def test_program_that_no_replica_may_go_on_with_waits_or_ends() -> None:
    """As its bound says; without a replica nothing is over a bound."""
    assert places(NUMBERS, 4, 4, "hold") == []
    for when in ("finish", "abort"):
        with pytest.raises(ProgramStaleError) as caught:
            places(NUMBERS, 4, 4, when)
        assert (caught.value.status, caught.value.turn_verdict) == (410, "aborted_by_trainer")
        assert places({}, 4, 4, when) is None


def test_header_says_one_program_s_bound() -> None:
    """What it leaves out is the option's."""
    default = Staleness(3, "abort")
    assert staleness_of("max_lag=1, when=hold", default) == (1, "hold")
    assert staleness_of("max_lag=0", default) == (0, "abort")
    assert staleness_of("when=continue", default) == (3, "continue")
    assert staleness_of("when=continue", default).most_lag_count is None
    for wrong in (
        "",
        "1",
        "max_lag=-1",
        "max_lag=x",
        "when=now",
        "max_lag=1, max_lag=2",
        "lag=1",
        "max_lag=99999999999",
    ):
        with pytest.raises(RequestError):
            staleness_of(wrong, default)


class Fleet:
    """Two replicas whose model may vanish, and who takes their leases back."""

    def __init__(self) -> None:
        self.is_served = True
        self.ended: list[TurnEnd] = []
        known = {each: SimpleNamespace(weight_number=1, cache_serial=1) for each in ("a", "b")}
        states = {each: SimpleNamespace(suspended_for=()) for each in known}
        self.map = SimpleNamespace(open_ids=tuple(known), states=states)
        self.known, self.has_pools = known, True
        self.weights = SimpleNamespace(serial=1, on_change=[])

    def observe(self, *_: object) -> None:
        """Report nothing."""

    def lives(self, *_: object) -> bool:
        return True

    def ids_serving(self, model: str) -> list[str]:
        if not self.is_served:
            raise UnknownModelError(model)
        return list(self.known)

    def lease(self, turn_id: int) -> OpenLease:
        keeper: Any = SimpleNamespace(ended=self.ended.append)
        return OpenLease(keeper, Lease(turn_id, "p", 3, "a", "http://a", None, "fits", 0.0))


async def test_lease_is_given_back_if_its_model_vanishes_while_the_turn_waits() -> None:
    """Whatever is raised between the grant and the start: nobody else has the lease yet."""
    fleet: Any = Fleet()
    fence = Fence(FenceSettings("turn", Staleness()), fleet, fleet, ())
    record: Any = SimpleNamespace(turn=SimpleNamespace(program_id="p"), maker_id=None, model="m", held_s=0.0)
    turns = iter((1, 2))

    async def ask(wanted_replica_id: str | None, *, again: bool) -> OpenLease:
        turn_id = next(turns)
        fleet.is_served = turn_id == 1
        lease: OpenLease = fleet.lease(turn_id)
        return lease

    assert (await fence.lease(record, None, ask, None, nullcontext)).granted.turn_id == 1
    with pytest.raises(UnknownModelError):
        await fence.lease(record, None, ask, None, nullcontext)
    assert [(end.turn_id, end.outcome) for end in fleet.ended] == [(2, "refused")]
