"""Schedulers agree on a leader on a real cluster, with the rights of `leases-rbac.yaml`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.scale.test_leading import MemoryStore
from thunderagent.backends.discovery.kubernetes import ClusterAccess
from thunderagent.errors import StoreError
from thunderagent.scale.leader.candidacy import GIVEN_UP
from thunderagent.scale.leader.kubernetes_store import KubernetesStore

if TYPE_CHECKING:
    from tests.kubernetes.conftest import Namespace

NAME = "thunderagent-default"
LOCK_S = 3.0
WITHIN_S = 30.0


def candidate(namespace: Namespace, shared: MemoryStore, name: str = NAME) -> KubernetesStore:
    return KubernetesStore(shared, ClusterAccess(namespace.kubeconfig, timeout_s=5.0), namespace.name, name, LOCK_S)


async def until_owner(store: KubernetesStore, owner: str | None) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await store.look("0")).owner != owner:
            await asyncio.sleep(0.05)


async def test_a_lease_is_taken_kept_given_up_and_runs_out(namespace: Namespace) -> None:
    shared = MemoryStore()
    first, other = candidate(namespace, shared), candidate(namespace, shared)
    assert (await first.look("0")).owner is None
    assert await first.take("a http://a:1", GIVEN_UP, 0) == 1
    assert await other.take("b http://b:1", GIVEN_UP, 0) == 0
    assert await first.renew("a http://a:1", 1) == 1
    spec = namespace.read("lease", NAME)["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == ("a http://a:1", 1, 4)

    await first.give_up("a http://a:1")
    await until_owner(other, GIVEN_UP)
    assert await other.take("b http://b:1", GIVEN_UP, 0) == 2
    assert await first.renew("a http://a:1", 1) == 0

    third = candidate(namespace, shared)
    await until_owner(third, "b http://b:1")
    await until_owner(third, None)  # nobody renews it
    assert await third.take("c http://c:1", GIVEN_UP, 0) == 3
    for store in (first, other, third):
        await store.close()


async def test_no_other_lease_may_be_read(namespace: Namespace) -> None:
    store = candidate(namespace, MemoryStore(), "another")
    with pytest.raises(StoreError, match="lacks the right"):
        await store.look("0")
    await store.close()
