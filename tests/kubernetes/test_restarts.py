"""An API server is killed at work and restarts: its watchers continue, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.integration.support import until
from tests.kubernetes.test_replicas import found_in, urls_of_pods, workload
from tests.kubernetes.test_sandboxes import driver_in, heard_of, order, until_empty

if TYPE_CHECKING:
    from tests.kubernetes.cluster import Cluster
    from tests.kubernetes.conftest import Access, Namespace

WITHIN_S = 90.0


@pytest.fixture
def lab(access: Access) -> Cluster:
    """The tests' own cluster: no other cluster is restarted."""
    if access.lab is None:
        pytest.skip("the API server of a cluster that KUBECONFIG names is not restarted")
    return access.lab


async def test_replicas_stay_while_the_server_is_away_and_new_ones_are_found_after(
    lab: Cluster, namespace: Namespace
) -> None:
    """No reported set ever lacks an existing replica."""
    namespace.kubectl("create", "--filename=-", given=workload(namespace, "Deployment"))
    async with found_in(namespace) as heard:
        await until(lambda: len(heard.urls) == 1, within_s=WITHIN_S)
        (first,) = heard.urls
        since = len(heard.told)
        await asyncio.to_thread(lab.end_api)
        await until(lambda: heard.failures, within_s=WITHIN_S)
        await asyncio.to_thread(lab.start_api)
        namespace.kubectl("scale", "deployment/engine", "--replicas=2")
        await until(lambda: len(heard.urls) == 2, within_s=WITHIN_S)
        assert heard.urls == set(urls_of_pods(namespace))
        assert all(first in {each.url for each in told} for told in heard.told[since:])


async def test_a_preparation_and_what_ends_meanwhile_outlive_a_restart(lab: Cluster, namespace: Namespace) -> None:
    """A preparation completes; an end during the outage is reported once, and the sandbox can be removed."""
    async with driver_in(namespace) as driver, heard_of(driver) as changes:
        short = await driver.prepare(order(namespace, "short", command=("sleep", "12")))
        slow = {"setup": ("sleep 15",), "kubernetes_kind": "pod"}
        preparing = asyncio.create_task(driver.prepare(order(namespace, "slow", **slow)))
        await until(lambda: len(changes) == 2, within_s=WITHIN_S)
        await asyncio.to_thread(lab.end_api)
        await asyncio.sleep(12)  # its command ends: the node knows, and cannot report it
        await asyncio.to_thread(lab.start_api)
        place = await preparing
        await until(lambda: [each for each in changes if each.ended] or None, within_s=WITHIN_S)
        ended = [each.found.handle for each in changes if each.ended]
        assert ended == [short.handle]
        assert sorted({each.found.handle for each in changes}) == sorted([short.handle, place.handle])
        for handle in (short.handle, place.handle):
            await driver.reclaim(handle)
        await until_empty(namespace)
