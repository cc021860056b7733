"""Schedulers agree on a leader by a Lease of Kubernetes, on an API server of the tests' own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.kubernetes_api import KubernetesApi, rights_of
from tests.unit.scale.test_leading import MemoryStore, running, until_leading
from thunderagent.backends.discovery.kubernetes import ClusterAccess
from thunderagent.errors import StoreError
from thunderagent.scale.leader.candidacy import GIVEN_UP
from thunderagent.scale.leader.kubernetes_store import LOOK_S, MAX_LEASE_S, KubernetesStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.kubernetes_api import Json

RBAC = Path(__file__).parents[2] / "deploy/kubernetes/leases-rbac.yaml"
NAME = "thunderagent-default"
LOCK_S, LASTS_S = 24.0, 25.0
JUST_BEFORE_S = 0.01


class Candidate:
    """A scheduler's view of a Lease, with a clock of its own."""

    def __init__(
        self, api: KubernetesApi, shared: MemoryStore, name: str, now_s: float = 0.0, lock_s: float = LOCK_S
    ) -> None:
        self.name = name
        self.now_s = now_s
        self.shared = shared
        access = ClusterAccess(None, api.url, 20.0)
        self.store = KubernetesStore(shared, access, "default", NAME, lock_s, lambda: self.now_s)

    async def owner(self, after_s: float = LOOK_S) -> str | None:
        """Return the owner in its view, some time later."""
        self.now_s += after_s
        return (await self.store.look("0")).owner

    async def take(self, expected: str = GIVEN_UP) -> int:
        return await self.store.take(self.name, expected, 0)


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi(rights_of(RBAC))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def shared() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def first(api: KubernetesApi, shared: MemoryStore) -> AsyncIterator[Candidate]:
    candidate = Candidate(api, shared, "a http://a:1")
    yield candidate
    await candidate.store.close()


@pytest.fixture
async def other(api: KubernetesApi, shared: MemoryStore) -> AsyncIterator[Candidate]:
    """Another candidate, whose clock differs widely."""
    candidate = Candidate(api, shared, "b http://b:1", now_s=1e6)
    yield candidate
    await candidate.store.close()


def spec_of(api: KubernetesApi) -> Json:
    return dict(api.get("leases", NAME)["spec"])


async def test_a_lease_says_who_leads_in_which_epoch(api: KubernetesApi, first: Candidate) -> None:
    assert await first.owner() is None
    assert await first.take() == 1
    spec = spec_of(api)
    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (first.name, 1, LASTS_S)


async def test_renewed_lease_is_never_taken_for_lost(first: Candidate, other: Candidate) -> None:
    await first.take()
    for _ in range(10):
        assert await other.owner() == first.name
        assert await other.take() == 0
        assert await first.store.renew(first.name, 1) == 1


async def test_a_lease_that_stays_the_same_runs_out_by_the_own_clock(first: Candidate, other: Candidate) -> None:
    await first.take()
    assert await other.owner() == first.name
    assert await other.owner(LASTS_S - JUST_BEFORE_S) == first.name
    assert await other.take() == 0
    assert await other.owner(JUST_BEFORE_S) is None
    assert await other.take() == 2
    assert await first.store.renew(first.name, 1) == 0
    assert await first.owner() == other.name


@pytest.mark.parametrize("time", ["2001-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
async def test_the_time_that_a_lease_says_is_nobodys_business(
    api: KubernetesApi, first: Candidate, other: Candidate, time: str
) -> None:
    await first.take()
    api.patch("leases", NAME, {"spec": {"renewTime": time, "acquireTime": time}})
    assert await other.owner() == first.name
    assert await other.owner(LASTS_S - JUST_BEFORE_S) == first.name
    assert await first.store.renew(first.name, 1) == 1
    assert await other.owner() == first.name


async def test_one_of_two_simultaneous_candidates_leads(first: Candidate, other: Candidate) -> None:
    for each in (first, other):
        assert await each.owner() is None
    assert sorted(await asyncio.gather(first.take(), other.take())) == [0, 1]


async def test_a_lease_that_was_given_up_is_seen_at_once_and_taken(first: Candidate, other: Candidate) -> None:
    await first.take()
    assert await other.owner() == first.name
    await first.store.give_up(first.name)
    assert await other.owner(after_s=0.0) == GIVEN_UP
    assert await other.take() == 2
    await first.store.give_up(first.name)
    assert await other.store.renew(other.name, 2) == 1


async def test_candidate_does_not_wait_for_a_leader_whose_process_ended(first: Candidate, other: Candidate) -> None:
    await first.take()
    assert await other.owner() == first.name
    assert await first.store.renew(first.name, 1) == 1
    assert await other.take(first.name) == 2


async def test_without_an_api_server_a_leader_goes_on_that_the_store_knows(
    api: KubernetesApi, first: Candidate, other: Candidate
) -> None:
    await first.take()
    await api.stop()
    for _ in range(10):
        first.now_s += LOCK_S
        assert await first.store.renew(first.name, 1) == 1
    with pytest.raises(StoreError):
        await other.owner()
    await api.start()
    assert await first.store.renew(first.name, 1) == 1
    assert await other.owner() == first.name


async def test_with_neither_a_leader_ends_before_its_lease_can_have_run_out(
    api: KubernetesApi, shared: MemoryStore, first: Candidate
) -> None:
    await first.take()
    await api.stop()
    shared.is_away = True
    first.now_s += LOCK_S - JUST_BEFORE_S
    with pytest.raises(StoreError):
        await first.store.renew(first.name, 1)
    first.now_s += JUST_BEFORE_S
    assert await first.store.renew(first.name, 1) == 0


async def test_both_may_hang_and_a_leader_ends_in_time(
    api: KubernetesApi, shared: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as if both were away: the leader waits for no answer while its Lease runs out."""
    leader = Candidate(api, shared, "a http://a:1", lock_s=1.5)
    await leader.take()
    await api.stop()

    async def hang(*_: object) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    monkeypatch.setattr(shared, "renew", hang)
    async with await asyncio.start_server(hear, "127.0.0.1", int(api.url.rpartition(":")[2])):
        with pytest.raises(StoreError, match=r"does not answer within 0\.5 s"):
            await leader.store.renew(leader.name, 1)
        leader.now_s += 1.5
        assert await leader.store.renew(leader.name, 1) == 0
        await leader.store.close()


async def test_a_lease_that_lasts_for_ever_is_waited_for_a_minute(
    api: KubernetesApi, first: Candidate, other: Candidate
) -> None:
    """Its writer does not matter: if that one still leads, the log refuses it."""
    await first.take()
    api.patch("leases", NAME, {"spec": {"leaseDurationSeconds": 10**9}})
    assert await other.owner() == first.name
    assert await other.owner(MAX_LEASE_S - JUST_BEFORE_S) == first.name
    assert await other.owner() is None


async def test_a_store_that_lost_its_data_proves_nothing(
    api: KubernetesApi, shared: MemoryStore, first: Candidate
) -> None:
    await first.take()
    await api.stop()
    shared.renews_as = 2
    assert await first.store.renew(first.name, 1) == 2
    first.now_s += LOCK_S
    shared.renews_as = 2
    assert await first.store.renew(first.name, 1) == 0


async def test_candidate_cut_off_from_the_api_server_learns_of_the_leader_by_the_store(
    api: KubernetesApi, first: Candidate, other: Candidate
) -> None:
    await first.take()
    assert await other.owner() == first.name
    assert await other.owner(LASTS_S) is None
    assert await other.take() == 2
    await api.stop()
    assert await first.store.renew(first.name, 1) == 0


async def test_an_api_server_that_was_away_gives_the_leader_time(
    api: KubernetesApi, first: Candidate, other: Candidate
) -> None:
    await first.take()
    assert await other.owner() == first.name
    await api.stop()
    with pytest.raises(StoreError):
        await other.owner(2 * LASTS_S)
    await api.start()
    assert await other.owner() == first.name
    assert await other.owner(LASTS_S - JUST_BEFORE_S) == first.name
    assert await other.owner(JUST_BEFORE_S) is None


async def test_a_lease_that_is_deleted_is_written_again(api: KubernetesApi, first: Candidate, other: Candidate) -> None:
    await first.take()
    api.delete("leases", NAME)
    assert await first.store.renew(first.name, 1) == 1
    assert spec_of(api)["leaseTransitions"] == 1
    assert await other.owner() == first.name


async def test_a_lease_that_somebody_else_labels_is_kept(api: KubernetesApi, first: Candidate) -> None:
    await first.take()
    api.patch("leases", NAME, {"metadata": {"labels": {"seen": "yes"}}})
    assert await first.store.renew(first.name, 1) == 1
    assert api.get("leases", NAME)["metadata"]["labels"] == {"seen": "yes"}


async def test_the_epoch_is_above_whatever_either_of_them_has_seen(
    api: KubernetesApi, shared: MemoryStore, first: Candidate, other: Candidate
) -> None:
    shared.epoch = 5
    assert await first.owner() is None
    assert await first.take() == 6
    await first.store.give_up(first.name)
    shared.epoch = 0
    assert await other.owner() == GIVEN_UP
    assert await other.store.take(other.name, GIVEN_UP, 3) == 7
    await other.store.renew(other.name, 9)
    assert (spec_of(api)["leaseTransitions"], shared.epoch) == (9, 9)


async def test_missing_rights_are_an_error_that_says_so(api: KubernetesApi, first: Candidate) -> None:
    api.rights = set()
    with pytest.raises(StoreError, match="lacks the right"):
        await first.owner()


async def test_a_lock_that_the_store_did_not_give_is_taken_again(
    api: KubernetesApi, shared: MemoryStore, first: Candidate
) -> None:
    """The Lease was taken, and then the store was away."""
    assert await first.owner() is None
    shared.is_away = True
    with pytest.raises(StoreError):
        await first.take()
    assert spec_of(api)["holderIdentity"] == first.name
    shared.is_away = False
    assert await first.owner() == first.name
    assert await first.take(first.name) == 2


async def test_leader_hands_over_to_the_next(api: KubernetesApi, shared: MemoryStore) -> None:
    access = ClusterAccess(None, api.url, 20.0)
    stores = [KubernetesStore(shared, access, "default", NAME, LOCK_S) for _ in range(2)]
    async with running(shared, stores[0]) as one:
        await until_leading(one)
        async with running(shared, stores[1]) as two:
            one.opens("p")
            await one.until_written("p")
            await one.leading.give_up()
            await until_leading(two)
            assert (two.leading.epoch, spec_of(api)["leaseTransitions"]) == (2, 2)
            assert list(two.runtime.programs) == ["p"]
    for each in stores:
        await each.close()
