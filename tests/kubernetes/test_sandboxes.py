"""Sandboxes in a real cluster, with the rights that `deploy/kubernetes/sandboxes-rbac.yaml` gives and no others."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import until
from thunderagent.errors import SandboxError, SandboxImageError, SandboxRefusedError, SandboxSetupError
from thunderagent.tools.base import PROGRAM_LABEL, Change, Order, Owner
from thunderagent.tools.kubernetes import KubernetesDriver
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.kubernetes.conftest import Namespace

OWNER = Owner("proxy at example.org/east", "run-1")
KINDS = pytest.mark.parametrize("kind", ["job", "pod"])
WITHIN_S = 60.0


@asynccontextmanager
async def driver_in(namespace: Namespace, owner: Owner = OWNER) -> AsyncIterator[KubernetesDriver]:
    driver = KubernetesDriver(owner, namespace=namespace.name, kubeconfig=namespace.kubeconfig)
    try:
        yield driver
    finally:
        await driver.close()


def order(namespace: Namespace, sandbox_id: str = "a1", ttl_s: float = 600.0, **template: Any) -> Order:
    """Return an order of a program's own; its image's user would be root."""
    settings = {
        "driver": "kubernetes",
        "image": namespace.access.sandbox_image,
        "run_as_user": 1000,
        "prepare_timeout_s": 60.0,
        **template,
    }
    return Order(sandbox_id, Template(**settings), "coding", "program one", time.time() + ttl_s)


@asynccontextmanager
async def heard_of(driver: KubernetesDriver) -> AsyncIterator[list[Change]]:
    """Yield what a watch tells, as it comes; what is there before it has begun is not told."""
    changes: list[Change] = []

    async def listen() -> None:
        while True:  # as the manager does
            try:
                async with aclosing(driver.watch()) as told:
                    async for change in told:
                        changes.append(change)  # noqa: PERF401 - it never ends
            except SandboxError:
                await asyncio.sleep(0.2)

    listening = asyncio.create_task(listen())
    try:
        yield changes
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def until_empty(namespace: Namespace) -> None:
    """Wait until nothing of ours is left; if that takes too long, say what is and what happened to it.

    The cluster is asked now and then, and meanwhile left the processor that it needs for it.
    """
    kinds = "jobs,pods,networkpolicies"
    try:
        async with asyncio.timeout(WITHIN_S):
            while (await asyncio.to_thread(namespace.read, kinds))["items"]:
                await asyncio.sleep(0.5)
    except TimeoutError as error:
        error.add_note(namespace.kubectl("get", f"{kinds},events", "--output=wide"))
        error.add_note(namespace.kubectl("get", kinds, "--output=yaml"))
        raise


async def test_from_preparation_to_its_end(namespace: Namespace) -> None:
    """A Job that is set up and checked, found and told of once; reclaimed, it goes with its pod and its network."""
    async with driver_in(namespace) as driver, heard_of(driver) as changes:
        template = {"setup": ("echo $GREETING > /tmp/greeting",), "environment": {"GREETING": "it costs $5"}}
        checked = {"ready_command": "grep -q 'costs .5' /tmp/greeting", "network": "own", "ports": (8000,)}
        place = await driver.prepare(order(namespace, **template, **checked))
        (pod,) = namespace.read("pods")["items"]
        assert place.handle == f"job/{namespace.name}/thunderagent-a1"
        assert (place.address, place.details["pod"]) == (pod["status"]["podIP"], pod["metadata"]["name"])
        assert namespace.kubectl("exec", place.details["pod"], "--", "cat", "/tmp/greeting") == "it costs $5\n"
        (found,) = await driver.find()
        assert (found.handle, found.program_id, found.running) == (place.handle, "program one", True)
        assert len(namespace.names("networkpolicies")) == 1
        await driver.reclaim(place.handle)
        await until_empty(namespace)
        await until(lambda: len(changes) == 2, within_s=WITHIN_S)
        assert [(each.found.handle, each.ended) for each in changes] == [(place.handle, False), (place.handle, True)]
        assert await driver.find() == []


@KINDS
async def test_what_fails_says_why_and_leaves_nothing(namespace: Namespace, kind: str) -> None:
    """A setup that fails, an image that is not there, and one that runs as root where it must not."""
    async with driver_in(namespace) as driver:
        setup = ("echo no such package; exit 3",)
        with pytest.raises(SandboxSetupError, match="exit status 3: no such package"):
            await driver.prepare(order(namespace, kubernetes_kind=kind, setup=setup))
        absent = "localhost:1/thunderagent-test-absent:1"
        with pytest.raises(SandboxImageError, match=r"ErrImagePull|ImagePullBackOff"):
            await driver.prepare(order(namespace, "a2", kubernetes_kind=kind, image=absent))
        with pytest.raises(SandboxSetupError, match="run_as_user"):
            await driver.prepare(order(namespace, "a3", kubernetes_kind=kind, run_as_user=None))
        await until_empty(namespace)


@KINDS
async def test_one_whose_time_is_over_ends_by_itself(namespace: Namespace, kind: str) -> None:
    """Nobody asks for it: the cluster ends it, and the watch tells that its deadline was over."""
    async with driver_in(namespace) as driver, heard_of(driver) as changes:
        place = await driver.prepare(order(namespace, kubernetes_kind=kind, ttl_s=8.0))
        await until(lambda: [each.ended for each in changes] == [False, True], within_s=WITHIN_S)
        assert "DeadlineExceeded" in changes[1].why
        if kind == "job":  # what remains of a pod is removed by who hears of its end
            await until_empty(namespace)
        await driver.reclaim(place.handle)
        await until_empty(namespace)


async def test_a_pod_of_a_users_own_is_found_and_goes_with_its_program(namespace: Namespace) -> None:
    """It bears the label of a program."""
    async with driver_in(namespace) as driver:
        main = {"name": "main", "image": namespace.access.sandbox_image, "command": ["sleep", "600"]}
        metadata = {"name": "own", "labels": {PROGRAM_LABEL: "p1"}}
        spec = {"containers": [main], "terminationGracePeriodSeconds": 1}
        namespace.kubectl(
            "create", "--filename=-", given={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        )
        (found,) = await driver.find()
        assert (found.handle, found.program_id) == (f"pod/{namespace.name}/own", "p1")
        assert found.is_given
        await driver.reclaim(found.handle)
        await until_empty(namespace)


@KINDS
async def test_a_restricted_namespace_admits_what_the_default_makes(restricted: Namespace, kind: str) -> None:
    """Volumes, setup and all; a template that asks for less is refused with the server's own words."""
    async with driver_in(restricted) as driver:
        settings = {"setup": ("true",), "mounts": ({"target": "/data"},), "kubernetes_kind": kind}
        place = await driver.prepare(order(restricted, **settings))
        await driver.reclaim(place.handle)
        with pytest.raises(SandboxRefusedError, match=r"PodSecurity|restricted|securityContext"):
            await driver.prepare(order(restricted, "a2", pod_security="baseline", run_as_user=0, kubernetes_kind=kind))
        await until_empty(restricted)
