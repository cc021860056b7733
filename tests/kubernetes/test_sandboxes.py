"""Sandboxes in a real cluster, with only the rights of `deploy/kubernetes/sandboxes-rbac.yaml`."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from benchmarks.processes import Server, thunderagent
from tests.integration.support import until
from tests.kubernetes.conftest import POD_SECURITY_VERSION, until_it_says
from thunderagent.errors import SandboxError, SandboxImageError, SandboxRefusedError, SandboxSetupError
from thunderagent.tools.base import PROGRAM_LABEL, Change, Order, Owner
from thunderagent.tools.kubernetes import KubernetesDriver
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from tests.kubernetes.conftest import Namespace

OWNER = Owner("proxy at example.org/east", "run-1")
KINDS = pytest.mark.parametrize("kind", ["job", "pod"])
WITHIN_S = 60.0
GONE_S = 150.0
"""A kubelet of 1.20 on a busy machine takes over a minute to give up a pod whose container never started."""


@asynccontextmanager
async def driver_in(namespace: Namespace, owner: Owner = OWNER) -> AsyncIterator[KubernetesDriver]:
    driver = KubernetesDriver(owner, namespace=namespace.name, kubeconfig=namespace.kubeconfig)
    try:
        yield driver
    finally:
        await driver.close()


def order(namespace: Namespace, sandbox_id: str = "a1", ttl_s: float = 600.0, **template: Any) -> Order:
    """Return an order for a program; the default user of its image would be root."""
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
    """Yield the events of a watch as they come; earlier events are not reported."""
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


async def until_empty(namespace: Namespace, but: Sequence[str] = ()) -> None:
    """Wait until none of our objects is left except the named ones; at the limit report the rest and its events."""
    kinds = "jobs,pods,networkpolicies"
    try:
        await until_it_says(lambda: namespace.names(kinds) == list(but), within_s=GONE_S)
    except TimeoutError as error:
        error.add_note(namespace.kubectl("get", f"{kinds},events", "--output=wide"))
        error.add_note(namespace.kubectl("get", kinds, "--output=yaml"))
        raise


async def test_from_preparation_to_its_end(namespace: Namespace) -> None:
    """A Job is set up and checked, found, and reported once; reclaiming removes it with its pod and network."""
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
async def test_failed_sandbox_says_why_and_leaves_nothing(namespace: Namespace, kind: str) -> None:
    """Cases: a failing setup, a missing image, and an image that runs as root where that is forbidden."""
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
async def test_sandbox_past_its_time_ends_by_itself(namespace: Namespace, kind: str) -> None:
    """Without a request the cluster ends it, and the watch reports that its deadline passed."""
    async with driver_in(namespace) as driver, heard_of(driver) as changes:
        place = await driver.prepare(order(namespace, kubernetes_kind=kind, ttl_s=8.0))
        await until(lambda: [each.ended for each in changes] == [False, True], within_s=WITHIN_S)
        assert "DeadlineExceeded" in changes[1].why
        if kind == "job":  # the receiver of the end removes the rest of a pod
            await until_empty(namespace)
        await driver.reclaim(place.handle)
        await until_empty(namespace)


async def test_the_next_start_sweeps_what_a_killed_proxy_left(namespace: Namespace, tmp_path: Path) -> None:
    """A Job, a pod and their networks of a proxy outside the cluster are removed; another proxy's stay."""
    template = {"driver": "kubernetes", "image": namespace.access.sandbox_image, "run_as_user": 1000, "network": "own"}
    async with driver_in(namespace) as other:
        kept = await other.prepare(order(namespace, "kept"))
        async with serving(namespace, tmp_path / "first.log") as (proxy, client):
            for kind in ("job", "pod"):
                spec = {**template, "kubernetes_kind": kind}
                asked = await client.post(f"/programs/{kind}/sandboxes", json={"spec": spec})
                assert asked.status_code == 202, asked.text

            async def are_usable() -> bool:
                reports = (await client.get("/sandboxes")).json()["sandboxes"]
                assert all(each["stage"] != "failed" for each in reports), reports
                return [each["stage"] in {"ready", "in_use"} for each in reports] == [True, True]

            await until_told(are_usable)
            proxy.process.kill()
            await proxy.process.wait()
        assert len(namespace.names("networkpolicies")) == 2
        async with serving(namespace, tmp_path / "second.log") as (_, client):

            async def are_counted() -> bool:
                return "thunderagent_sandbox_orphans_total 2.0" in (await client.get("/metrics")).text

            await until_told(are_counted)
            await until_empty(namespace, but=(kept.handle.rpartition("/")[2], kept.details["pod"]))
            assert [each.handle for each in await other.find()] == [kept.handle]
        await other.reclaim(kept.handle)
        await until_empty(namespace)


@asynccontextmanager
async def serving(namespace: Namespace, log_path: Path) -> AsyncIterator[tuple[Server, httpx2.AsyncClient]]:
    """Run a proxy with a simulated engine, outside the cluster, with the account's rights."""
    whose = ("--kubernetes-namespace", namespace.name, "--kubernetes-config", str(namespace.kubeconfig))
    options = ("--embedded-engines", "1", "--sandboxes", "kubernetes", "--sandbox-owner", "the proxy")
    async with (
        thunderagent("serve", "--port", "0", *options, "--sandbox-specs", "true", *whose, log_path=log_path) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=60.0, trust_env=False) as client,
    ):
        yield proxy, client


async def until_told(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a report of a proxy."""
    async with asyncio.timeout(WITHIN_S):
        while not await condition():
            await asyncio.sleep(0.1)


async def test_a_pod_of_a_users_own_is_found_and_goes_with_its_program(namespace: Namespace) -> None:
    """It has the label of a program."""
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
    """This includes volumes and setup; a less strict template is refused in the server's own words."""
    if restricted.access.lab is None and restricted.access.version < POD_SECURITY_VERSION:
        pytest.skip("a cluster that KUBECONFIG names, and too old for the labels of Pod Security")
    async with driver_in(restricted) as driver:
        settings = {"setup": ("true",), "mounts": ({"target": "/data"},), "kubernetes_kind": kind}
        place = await driver.prepare(order(restricted, **settings))
        await driver.reclaim(place.handle)
        with pytest.raises(SandboxRefusedError, match=r"PodSecurity|restricted|securityContext"):
            await driver.prepare(order(restricted, "a2", pod_security="baseline", run_as_user=0, kubernetes_kind=kind))
        await until_empty(restricted)
