"""The Kubernetes driver, through the real client and HTTP, against an API server of the tests' own.

Every request needs the rights that `deploy/kubernetes/sandboxes-rbac.yaml` gives: without them it fails.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import yaml

from tests.integration.kubernetes_api import ApiError, KubernetesApi, rights_of
from tests.integration.support import DEADLINE_S, until
from thunderagent.errors import (
    NotFoundError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSetupError,
    SandboxSpaceError,
)
from thunderagent.tools.base import PROGRAM_LABEL, Change, Order, Owner, Place
from thunderagent.tools.kubernetes import KubernetesDriver
from thunderagent.tools.kubernetes.claims import CLAIMS
from thunderagent.tools.kubernetes.prepare import Errand, Stage
from thunderagent.tools.kubernetes.watch import Following
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

RIGHTS = frozenset(
    right
    for right in rights_of(Path(__file__).parents[2] / "deploy/kubernetes/sandboxes-rbac.yaml")
    if right[1] != CLAIMS.plural
)
"""Those of the driver `kubernetes`; test_claims.py has the others."""
OWNER = Owner("proxy at example.org/east", "run-1")
KINDS = pytest.mark.parametrize("kind", ["job", "pod"])
PATIENCE_S = 3.0
"""Time limit of a request: enough on loopback, and short if no server answers."""


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi(RIGHTS)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def driver_of(api: KubernetesApi, owner: Owner = OWNER, **settings: Any) -> AsyncIterator[KubernetesDriver]:
    settings = {"concurrency_count": 8, "request_timeout_s": PATIENCE_S, "backoff_s": 0.2, **settings}
    driver = KubernetesDriver(owner, api_url=api.url, **settings)
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture
async def driver(api: KubernetesApi) -> AsyncIterator[KubernetesDriver]:
    async with driver_of(api) as made:
        yield made


def order(sandbox_id: str = "a1", program_id: str = "program one", ttl_s: float = 3600.0, **template: Any) -> Order:
    template = {"driver": "kubernetes", "image": "tool", "prepare_timeout_s": 30.0, **template}
    return Order(sandbox_id, Template(**template), "coding", program_id, time.time() + ttl_s)


def given(name: str, program_id: str = "p", **spec: Any) -> dict[str, Any]:
    """A pod that a user made."""
    return {
        "metadata": {"name": name, "labels": {PROGRAM_LABEL: program_id}},
        "spec": {"containers": [{"name": "main", "image": "users", **spec}]},
    }


def given_set(name: str, *, is_labelled: bool = True, **spec: Any) -> dict[str, Any]:
    """A Job that a user made; the label is on its pods, and on itself if `is_labelled`."""
    pod = given("unnamed")
    labels = pod["metadata"]["labels"]
    template = {"metadata": {"labels": labels}, "spec": {**pod["spec"], "restartPolicy": "Never"}}
    return {"metadata": {"name": name, "labels": labels if is_labelled else {}}, "spec": {"template": template, **spec}}


class Watching:
    """Keeps the reports of a watch as they come."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.error: SandboxError | None = None
        self._heard = asyncio.Event()

    async def run(self, driver: KubernetesDriver) -> None:
        try:
            async with aclosing(driver.watch()) as changes:
                async for change in changes:
                    self.changes.append(change)
                    self._heard.set()
        except SandboxError as error:
            self.error = error
            self._heard.set()

    async def next_changes(self, count: int = 1) -> list[tuple[str, bool]]:
        """Return handle and `ended` of the next changes."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.changes) < count and self.error is None:
                self._heard.clear()
                await self._heard.wait()
        taken, self.changes = self.changes[:count], self.changes[count:]
        return [(change.found.handle, change.ended) for change in taken]


@asynccontextmanager
async def watching(api: KubernetesApi, driver: KubernetesDriver) -> AsyncIterator[Watching]:
    """Watch from now on."""
    watched = Watching()
    task = asyncio.create_task(watched.run(driver))
    await until(lambda: len(api.watchers) == 2)
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def threads_count() -> int:
    return sum(thread.name.startswith("kubernetes-watch") for thread in threading.enumerate())


# --- prepare ----------------------------------------------------------------------------------------------------------


@KINDS
async def test_a_sandbox_is_made_and_is_where_it_says(api: KubernetesApi, driver: KubernetesDriver, kind: str) -> None:
    """Prepare returns a running pod, at its own address."""
    place = await driver.prepare(order(kubernetes_kind=kind, ports=(8000,)))
    [pod] = api.all_of("pods")
    ip = pod["status"]["podIP"]
    assert place == Place(
        handle=f"{kind}/default/thunderagent-a1",
        address=ip,
        ports={8000: (ip, 8000)},
        details={"pod": pod["metadata"]["name"], "namespace": "default"},
    )
    assert [len(api.all_of(each)) for each in ("jobs", "pods", "networkpolicies")] == [kind == "job", 1, 0]


async def test_pod_is_ready_when_its_probe_succeeds(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A running pod is no usable sandbox before its probe has succeeded."""
    api.behave("tool", is_ready=False)
    preparing = asyncio.create_task(driver.prepare(order(ready_command="test -e /done")))
    await until(lambda: any(pod["status"]["phase"] == "Running" for pod in api.all_of("pods")))
    await asyncio.sleep(0.1)
    assert not preparing.done()
    api.behave("tool", is_ready=True)
    assert (await preparing).address


async def test_waiting_asks_no_questions(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """One list and one watch suffice, however long a pod takes."""
    api.behave("tool", is_ready=False)
    preparing = asyncio.create_task(driver.prepare(order(ready_command="true")))
    await until(lambda: api.watchers)
    await asyncio.sleep(0.3)
    api.behave("tool", is_ready=True)
    await preparing
    assert api.requests == {("batch", "jobs", "create"): 1, ("", "pods", "list"): 1, ("", "pods", "watch"): 1}


async def lost(api: KubernetesApi, lose: Callable[[], None]) -> None:
    """Have all watches lost, and wait until they are gone: the next ones may open at once."""
    before = set(api.watchers)
    lose()
    await until(lambda: not before & api.watchers)


async def test_a_watch_that_breaks_while_a_pod_starts_is_taken_up(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A broken connection, a stream's end or a forgotten history loses no event of the pod."""
    api.behave("tool", is_ready=False)
    preparing = asyncio.create_task(driver.prepare(order(ready_command="true")))
    for lose in (api.drop_watches, api.end_watches, api.expire_watches):
        await until(lambda: api.watchers)
        await lost(api, lose)
    api.compact()
    api.behave("tool", is_ready=True)
    assert (await preparing).address


async def test_sandboxes_live_in_two_namespaces(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A template's namespace is where its sandbox is made, found and removed."""
    place = await driver.prepare(order(namespace="elsewhere"))
    assert place.handle == "job/elsewhere/thunderagent-a1"
    assert [found.handle for found in await driver.find()] == [place.handle]
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)


async def test_id_that_no_label_can_hold_comes_back_unchanged(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Program and owner ids may be any text: they return unchanged, and different ids stay different."""
    program_ids = ["x" * 256, "x" * 255 + "y", "ünï/çødé id\n!"]
    for number, program_id in enumerate(program_ids):
        await driver.prepare(order(f"id{number}", program_id))
    found = await driver.find()
    assert sorted(each.program_id for each in found) == sorted(program_ids)
    assert all(each.is_of(OWNER) and each.labels["thunderagent.run"] == "run-1" and each.running for each in found)


async def test_a_warm_sandbox_belongs_to_nobody(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """It is ours without a program: no program lists it, and it does not count as adopted."""
    await driver.prepare(order(program_id=""))
    [found] = await driver.find()
    assert (found.sandbox_id, found.program_id, found.is_given, found.is_of(OWNER)) == ("a1", "", False, True)


@KINDS
@pytest.mark.parametrize(
    ("behaviour", "error_class", "words"),
    [
        ({"has_image": False}, SandboxImageError, "ErrImagePull|ImagePullBackOff"),
        ({"outcome": "crash", "message": "pip: no such package"}, SandboxSetupError, "status 3: pip: no such package"),
        ({"outcome": "complete"}, SandboxSetupError, "ended by itself"),
        ({"outcome": "evict", "message": "low on memory"}, SandboxSpaceError, "Evicted: low on memory"),
    ],
)
async def test_hopeless_pod_fails_and_is_removed(
    api: KubernetesApi, driver: KubernetesDriver, kind: str, behaviour: Any, error_class: type, words: str
) -> None:
    """Each failure is reported in the cluster's own words, and leaves nothing behind."""
    api.behave("tool", **behaviour)
    with pytest.raises(error_class, match=words):
        await driver.prepare(order(kubernetes_kind=kind, network="own"))
    await until(lambda: not api.objects)


async def test_no_room_says_so_before_the_time_is_over(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The driver waits for a pod without room on any node, and the error names what was missing."""
    api.behave("tool", has_room=False)
    with pytest.raises(SandboxSpaceError, match="Unschedulable: 0/3 nodes are available: 3 Insufficient memory"):
        await driver.prepare(order(prepare_timeout_s=1.0))
    await until(lambda: not api.objects)


async def test_a_sandbox_without_a_pod_says_so(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """If the cluster makes no pod at all, the error says that."""
    api.makes_pods = False
    with pytest.raises(SandboxSetupError, match="made no pod"):
        await driver.prepare(order(prepare_timeout_s=1.0))
    await until(lambda: not api.objects)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_pod_that_somebody_removes_is_not_waited_for(
    api: KubernetesApi, driver: KubernetesDriver, *, has_begun: bool
) -> None:
    """A preparation fails as soon as its pod is gone, or is ending."""
    api.behave("tool", is_ready=False, has_room=has_begun)
    preparing = asyncio.create_task(driver.prepare(order(kubernetes_kind="pod", ready_command="true")))
    await until(lambda: api.watchers and "conditions" in api.get("pods", "thunderagent-a1")["status"])
    api.delete("pods", "thunderagent-a1")
    with pytest.raises(SandboxSetupError, match="removed"):
        await preparing


@KINDS
async def test_a_name_that_is_taken_is_a_conflict(api: KubernetesApi, driver: KubernetesDriver, kind: str) -> None:
    """The existing object with that name is left unchanged."""
    foreign = given_set("thunderagent-a1", is_labelled=False) if kind == "job" else given("thunderagent-a1")
    before = api.create(f"{kind}s", foreign)
    with pytest.raises(SandboxConflictError, match="already exists"):
        await driver.prepare(order(kubernetes_kind=kind, network="own"))
    assert api.get(f"{kind}s", "thunderagent-a1")["metadata"]["uid"] == before["metadata"]["uid"]
    assert not api.all_of("networkpolicies")
    assert not api.requests["", "pods", "delete"] + api.requests["batch", "jobs", "delete"]


async def test_used_up_quota_reports_no_room(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A used-up quota is a lack of room, not of rights."""
    api.quota["jobs"] = 0
    with pytest.raises(SandboxSpaceError, match="exceeded quota"):
        await driver.prepare(order())


async def test_a_quota_counted_twice_at_once_is_tried_again(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """If two requests count against one quota at the same moment, the second only needs a retry."""
    conflict = ApiError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas: please try again")
    api.errors["batch", "jobs", "create"] = [conflict]
    assert (await driver.prepare(order())).address


async def test_refused_pod_reports_the_reason(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A refusal is reported in the server's words; a missing right is named."""
    with pytest.raises(SandboxRefusedError, match=r"env.*1=2"):
        await driver.prepare(order(environment={"1=2": "x"}))
    api.rights = RIGHTS - {("batch", "jobs", "create")}
    with pytest.raises(SandboxRefusedError, match="lacks the right to create jobs"):
        await driver.prepare(order())
    with pytest.raises(SandboxRefusedError, match="are not names"):
        await driver.prepare(order(namespace="../kube-system"))
    assert not api.objects


async def test_rights_that_a_restarted_server_has_not_loaded_are_waited_for(
    api: KubernetesApi, driver: KubernetesDriver
) -> None:
    """Rights that were there before are tried again, for making and removing; nothing is left."""
    first = await driver.prepare(order("first"))
    api.has_loaded_rights = False
    tasks = [asyncio.create_task(driver.prepare(order("second", network="own")))]
    tasks.append(asyncio.create_task(driver.reclaim(first.handle)))
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    api.has_loaded_rights = True
    place, _ = await asyncio.gather(*tasks)
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)


async def test_a_preparation_bears_with_rights_that_are_not_loaded(api: KubernetesApi) -> None:
    """Its watch is refused for a while after a restart; then it continues."""
    api.behave("tool", is_ready=False)
    async with driver_of(api, request_timeout_s=10.0) as driver:
        preparing = asyncio.create_task(driver.prepare(order(ready_command="true")))
        await until(lambda: api.watchers)
        api.has_loaded_rights = False
        api.drop_watches()
        before = api.requests["", "pods", "watch"]
        await until(lambda: api.requests["", "pods", "watch"] > before)
        api.has_loaded_rights = True
        api.behave("tool", is_ready=True)
        assert (await preparing).address


async def test_a_right_that_stays_lost_is_told(api: KubernetesApi) -> None:
    """Patience ends: then the error names a missing right, and the next time it comes at once."""
    async with driver_of(api, request_timeout_s=3.0, backoff_s=0.02) as driver:
        await driver.find()
        api.rights = set()
        for attempts in ("several", "one"):
            before = api.requests["", "pods", "list"]
            with pytest.raises(SandboxRefusedError, match="lacks the right to list pods"):
                await driver.find()
            assert (api.requests["", "pods", "list"] - before == 1) == (attempts == "one")


# --- pod security -----------------------------------------------------------------------------------------------------


@KINDS
async def test_sandboxes_keep_to_the_restricted_standard(
    api: KubernetesApi, driver: KubernetesDriver, kind: str
) -> None:
    """A namespace that enforces it admits them, with setup, an empty volume and their own user."""
    api.pod_security = "restricted"
    template = {"setup": ("true",), "mounts": ({"target": "/work"},), "run_as_user": 1000}
    assert (await driver.prepare(order(kubernetes_kind=kind, **template))).address
    [pod] = api.all_of("pods")
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000


async def test_pod_security_refusal_is_not_reported_as_missing_rights(
    api: KubernetesApi, driver: KubernetesDriver
) -> None:
    """The error for a bare pod names its forbidden parts."""
    api.pod_security = "restricted"
    with pytest.raises(SandboxRefusedError, match=r"^Kubernetes refused to create pods.*violates PodSecurity"):
        await driver.prepare(order(kubernetes_kind="pod", pod_security="baseline"))


@pytest.mark.parametrize(
    ("error_class", "words"), [(SandboxRefusedError, "violates PodSecurity"), (SandboxSpaceError, "exceeded quota")]
)
async def test_job_without_a_pod_reports_why(
    api: KubernetesApi, driver: KubernetesDriver, error_class: type, words: str
) -> None:
    """The server gets a dry run of the pod: its refusal ends the preparation well before its time."""
    if error_class is SandboxRefusedError:
        api.pod_security = "restricted"
    else:
        api.quota["pods"] = 0
    with pytest.raises(error_class, match=words):
        await driver.prepare(order(pod_security="baseline", prepare_timeout_s=3.0))
    await until(lambda: not api.objects)


async def test_without_the_right_to_rehearse_the_job_is_waited_for(api: KubernetesApi) -> None:
    """A missing right to make pods says nothing about the pods of a Job."""
    api.rights = RIGHTS - {("", "pods", "create")}
    api.makes_pods = False
    async with driver_of(api) as driver:
        with pytest.raises(SandboxSetupError, match="made no pod"):
            await driver.prepare(order(prepare_timeout_s=1.0))
    assert api.requests["", "pods", "create"] > 0


async def test_an_image_that_needs_root_is_told_how(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """By default no sandbox is root; the error names the setting that allows it, which works."""
    api.behave("tool", is_root=True)
    with pytest.raises(SandboxSetupError, match=r'run as root; set run_as_user.*pod_security = "baseline"'):
        await driver.prepare(order())
    assert (await driver.prepare(order(pod_security="baseline"))).address


# --- the cluster's version --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "is_told"), [((1, 21), True), ((1, 22), False), ((2, 0), False)])
async def test_a_cluster_that_is_too_old_is_told_once(
    api: KubernetesApi, driver: KubernetesDriver, version: tuple[int, int], *, is_told: bool
) -> None:
    """It is reported at the first look at the cluster."""
    api.version = version
    with structlog.testing.capture_logs() as logs:
        await driver.find()
        await driver.find()
    problems = [entry["problem"] for entry in logs if entry["event"] == "kubernetes_too_old"]
    assert problems == ["Kubernetes 1.21 is older than 1.22, the least version"] * is_told


async def test_a_namespace_that_is_refused_is_not_looked_into(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A template that names a forbidden namespace does no harm to other templates."""
    api.errors["", "pods", "list"] = [ApiError(403, "Forbidden", "not there")]
    with pytest.raises(SandboxRefusedError):
        await driver.prepare(order(namespace="elsewhere"))
    assert "elsewhere" not in repr(driver)


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_api_that_cannot_answer_now_is_an_engine_error(
    api: KubernetesApi, driver: KubernetesDriver, status: int
) -> None:
    """Answers that may change in a while are the engine's trouble."""
    api.errors["", "pods", "list"] = [ApiError(status, "Whatever", "not now")]
    with pytest.raises(SandboxEngineError, match="not now"):
        await driver.find()


# --- network ----------------------------------------------------------------------------------------------------------


async def test_a_network_of_its_own_goes_with_the_last_sandbox(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The sandboxes of one program share a policy; it stays while one of them does."""
    places = [await driver.prepare(order(f"n{number}", network="own")) for number in range(2)]
    other = await driver.prepare(order("other", "program two", network="own"))
    assert len(api.all_of("networkpolicies")) == 2
    await driver.reclaim(places[0].handle)
    assert len(api.all_of("networkpolicies")) == 2
    await driver.reclaim(places[1].handle)
    [policy] = api.all_of("networkpolicies")
    [pod] = api.all_of("pods", "thunderagent.sandbox-id=other")
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= pod["metadata"]["labels"].items()
    await driver.reclaim(other.handle)
    await until(lambda: not api.objects)


async def test_no_network_is_denied_everything(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A policy that allows nothing selects a sandbox without network."""
    place = await driver.prepare(order(network="none"))
    [policy] = api.all_of("networkpolicies")
    [pod] = api.all_of("pods")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert set(policy["spec"]) == {"podSelector", "policyTypes"}
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)


async def test_a_network_is_kept_for_who_is_just_moving_in(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The end of the last sandbox never takes a policy from a sandbox that begins at that moment."""
    await asyncio.gather(*(churn(api, driver, number) for number in range(6)))
    await until(lambda: not api.objects)


async def churn(api: KubernetesApi, driver: KubernetesDriver, number: int) -> None:
    for turn in range(4):
        place = await driver.prepare(order(f"c{number}-{turn}", network="own", kubernetes_kind="pod"))
        assert api.all_of("networkpolicies")
        await driver.reclaim(place.handle)


async def test_sweep_removes_what_no_sandbox_is_left_for(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Policies of a dead run are removed unless their sandboxes exist; those of others are not touched."""
    async with driver_of(api, Owner(OWNER.owner_id, "run-0")) as earlier, driver_of(api, Owner("else", "x")) as foreign:
        await earlier.prepare(order("gone", "one", network="own"))
        await earlier.prepare(order("there", "two", network="own"))
        await foreign.prepare(order("foreign", "three", network="own"))
    for name in ("gone", "foreign"):
        api.delete("jobs", f"thunderagent-{name}")
    await driver.sweep()
    left = api.all_of("networkpolicies")
    assert sorted(each["metadata"]["annotations"]["thunderagent.owner"] for each in left) == ["else", OWNER.owner_id]


async def test_sweep_goes_on_without_what_cannot_be_removed(api: KubernetesApi, driver: KubernetesDriver) -> None:
    async with driver_of(api, Owner(OWNER.owner_id, "run-0")) as earlier:
        for name in ("one", "two"):
            await earlier.prepare(order(name, name, network="own"))
            api.delete("jobs", f"thunderagent-{name}")
    api.errors["networking.k8s.io", "networkpolicies", "delete"] = [ApiError(403, "Forbidden", "a webhook says no")]
    await driver.sweep()
    assert len(api.all_of("networkpolicies")) == 1


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_sandbox_ends_at_its_deadline_without_help(api: KubernetesApi) -> None:
    """At the end of its life the cluster removes it, long after the driver is gone."""
    async with driver_of(api) as driver:
        await driver.prepare(order(ttl_s=60))
    requests_count = api.requests.total()
    api.pass_time(50)
    await asyncio.sleep(0.01)
    assert api.all_of("jobs")
    api.pass_time(15)
    await until(lambda: not api.objects)
    assert api.requests.total() == requests_count


async def test_a_pod_stops_by_its_own_time(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The cluster stops a bare pod, which is reported; its remains are found, but not as running."""
    place = await driver.prepare(order(ttl_s=60, kubernetes_kind="pod"))
    async with watching(api, driver) as watched:
        api.pass_time(61)
        assert await watched.next_changes() == [(place.handle, True)]
    assert [found.running for found in await driver.find()] == [False]
    await driver.reclaim(place.handle)
    assert not api.objects


@pytest.mark.parametrize("version", [(1, 30), (1, 36)])
async def test_passed_deadline_is_reported_although_the_job_fails_late(
    api: KubernetesApi, driver: KubernetesDriver, version: tuple[int, int]
) -> None:
    """The pod ends first, and the Job fails only after it: the reason is reported in between."""
    api.version = version
    api.behave("tool", stops_at_once=False)
    await driver.prepare(order(ttl_s=60))
    async with watching(api, driver) as watched:
        api.pass_time(61)
        await until(lambda: watched.changes)
        assert watched.changes[0].why.startswith("DeadlineExceeded")


async def test_networks_of_what_ended_by_itself_are_left(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A sandbox that ended by itself is not reclaimed; its network goes at the next look."""
    await driver.prepare(order(ttl_s=60, network="own"))
    api.pass_time(61)
    await until(lambda: not api.all_of("pods"))
    assert api.all_of("networkpolicies")
    assert await driver.find() == []
    assert not api.objects


@KINDS
async def test_reclaiming_removes_all_of_it_and_is_idempotent(
    api: KubernetesApi, driver: KubernetesDriver, kind: str
) -> None:
    """It is gone with its pod; a second reclaim is no error, also for a driver that never knew it."""
    place = await driver.prepare(order(kubernetes_kind=kind, network="own", stop_grace_s=2.5))
    [pod] = api.all_of("pods")
    assert pod["spec"]["terminationGracePeriodSeconds"] == 3
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)
    await driver.reclaim(place.handle)
    async with driver_of(api) as other:
        await other.reclaim(place.handle)


async def test_a_later_run_reclaims_what_an_earlier_one_made(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """After a restart a handle suffices, and the network goes too."""
    async with driver_of(api, Owner(OWNER.owner_id, "run-0")) as earlier:
        place = await earlier.prepare(order(network="own"))
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)


async def test_pod_in_its_grace_period_counts_as_removed(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A reclaimed sandbox may take its time to stop; nothing waits for that, and no list shows it any more."""
    api.behave("tool", stops_at_once=False)
    place = await driver.prepare(order(kubernetes_kind="pod", stop_grace_s=20))
    await driver.reclaim(place.handle)
    assert await driver.find() == []
    assert api.has("pods", "thunderagent-a1")
    api.pass_time(20)
    await until(lambda: not api.objects)


@KINDS
async def test_a_finalizer_that_hangs_counts_as_removed(
    api: KubernetesApi, driver: KubernetesDriver, kind: str
) -> None:
    """An object that a foreign finalizer keeps is gone for us: reclaiming returns, even twice; its end is reported."""
    place = await driver.prepare(order(kubernetes_kind=kind))
    api.patch(f"{kind}s", "thunderagent-a1", {"metadata": {"finalizers": ["example.org/hangs"]}})
    async with watching(api, driver) as watched:
        await driver.reclaim(place.handle)
        conflict = ApiError(409, "Conflict", "the object is being deleted")
        api.errors["batch" if kind == "job" else "", f"{kind}s", "delete"] = [conflict] * 3
        await driver.reclaim(place.handle)
        assert await watched.next_changes() == [(place.handle, True)]
    assert api.has(f"{kind}s", "thunderagent-a1")
    assert await driver.find() == []
    api.patch(f"{kind}s", "thunderagent-a1", {"metadata": {"finalizers": None}})
    await until(lambda: not api.objects)


@KINDS
async def test_foreign_object_of_the_same_name_is_left_alone(
    api: KubernetesApi, driver: KubernetesDriver, kind: str
) -> None:
    """A reused name belongs to somebody else, even if the new object has the label of a program."""
    place = await driver.prepare(order(kubernetes_kind=kind))
    api.delete(f"{kind}s", "thunderagent-a1", {"gracePeriodSeconds": 0})
    api.create(f"{kind}s", given_set("thunderagent-a1") if kind == "job" else given("thunderagent-a1"))
    await driver.reclaim(place.handle)
    assert api.has(f"{kind}s", "thunderagent-a1")
    assert "deletionTimestamp" not in api.get(f"{kind}s", "thunderagent-a1")["metadata"]


async def test_conflicts_without_end_are_an_error(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A conflict about the intended object is tried again, and reported if it stays."""
    place = await driver.prepare(order())
    api.errors["batch", "jobs", "delete"] = [ApiError(409, "Conflict", "try again")]
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)
    place = await driver.prepare(order())
    api.errors["batch", "jobs", "delete"] = [ApiError(409, "Conflict", "try again") for _ in range(3)]
    with pytest.raises(SandboxEngineError, match="conflicts only"):
        await driver.reclaim(place.handle)
    await driver.reclaim(place.handle)
    await until(lambda: not api.objects)


async def test_foreign_objects_are_never_touched(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Pods without our labels, and sandboxes of other proxies, are not found, reported or removed."""
    plain = given("plain")
    plain["metadata"]["labels"] = {"app": "db"}
    async with driver_of(api, Owner("another proxy", "run-1")) as other:
        theirs = await other.prepare(order("theirs", network="own"))
        async with watching(api, driver) as watched:
            api.create("pods", plain)
            await driver.sweep()
            for handle in (theirs.handle, "pod/default/plain"):
                await driver.reclaim(handle)
            assert await driver.find() == []
            api.create("pods", given("mark"))
            assert await watched.next_changes() == [("pod/default/mark", False)]
        assert api.has("pods", "plain")
        assert len(api.all_of("jobs")) == len(api.all_of("networkpolicies")) == 1
    with pytest.raises(SandboxRefusedError):
        await driver.reclaim("pod/default/..")


async def test_all_goes_with_our_own_pod(api: KubernetesApi) -> None:
    """Sandboxes belong to the proxy's pod: the cluster removes them with it, whatever the reason."""
    proxy = api.create("pods", {"metadata": {"name": "proxy"}, "spec": {"containers": [{"name": "m", "image": "p"}]}})
    async with driver_of(api, owner_pod=("proxy", proxy["metadata"]["uid"])) as driver:
        await driver.prepare(order("j", kubernetes_kind="job", network="own"))
        await driver.prepare(order("p", kubernetes_kind="pod", network="none"))
        assert [len(api.all_of(each)) for each in ("jobs", "pods", "networkpolicies")] == [1, 3, 2]
    api.delete("pods", "proxy")
    await until(lambda: not api.objects)


async def test_a_pod_elsewhere_owns_nothing(api: KubernetesApi) -> None:
    """A pod of another namespace cannot own anything: the cluster would collect its dependents at once."""
    spec = {"containers": [{"name": "m", "image": "p"}]}
    proxy = api.create("pods", {"metadata": {"name": "proxy"}, "spec": spec}, "system")
    api.create("pods", {"metadata": {"name": "proxy"}, "spec": spec})
    async with driver_of(api, owner_pod=("proxy", proxy["metadata"]["uid"])) as driver:
        for number in range(2):
            await driver.prepare(order(f"o{number}", network="own"))
        assert len(await driver.find()) == 2
    assert not any("ownerReferences" in each["metadata"] for each in api.all_of("jobs") + api.all_of("networkpolicies"))
    assert api.requests["", "pods", "get"] == 1


# --- cancellation -----------------------------------------------------------------------------------------------------


@KINDS
async def test_a_cancelled_preparation_leaves_nothing(api: KubernetesApi, driver: KubernetesDriver, kind: str) -> None:
    """A caller that gives up while the pod starts leaves no pod, no policy and no watch."""
    api.behave("tool", has_room=False)
    preparing = asyncio.create_task(driver.prepare(order(kubernetes_kind=kind, network="own")))
    await until(lambda: api.watchers and api.all_of("pods"))
    await asyncio.sleep(0.5)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await preparing
    assert any("Unschedulable" in note for note in caught.value.__notes__)
    await until(lambda: not api.objects and not api.watchers)


async def test_a_create_that_is_answered_too_late_is_undone(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """If the server answers only after the caller left, its object is still removed; even if the caller left twice."""
    for times in (1, 2):
        held = api.held["batch", "jobs", "create"] = asyncio.Event()
        preparing = asyncio.create_task(driver.prepare(order(network="own")))
        await until(lambda: api.all_of("jobs"))
        for _ in range(times):
            preparing.cancel()
            await asyncio.sleep(0.01)
        if times == 2:
            await until(preparing.done)
        assert preparing.done() == (times == 2)
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        await until(lambda: not api.objects)


async def test_preparation_cancelled_at_any_moment_leaves_nothing(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Whenever it is cancelled, either the caller has the place, or nothing exists."""
    for number in range(30):
        preparing = asyncio.create_task(driver.prepare(order(f"m{number}", network="own")))
        await asyncio.sleep(number * 0.001)
        preparing.cancel()
        result = (await asyncio.gather(preparing, return_exceptions=True))[0]
        if isinstance(result, Place):
            await driver.reclaim(result.handle)
        await until(lambda: not api.objects)


def test_finished_sandbox_belongs_to_one_side_only() -> None:
    """The caller may leave before or after the thread is done: exactly one of them removes what was made."""
    left_first, done_first = Errand(), Errand()
    for errand in (left_first, done_first):
        errand.begin()
    assert left_first.give_up() is Stage.BEGUN
    with pytest.raises(SandboxSetupError, match="no program waits"):
        left_first.finish()
    done_first.finish()
    assert done_first.give_up() is Stage.DONE


async def test_waiting_sandbox_is_cancelled_at_once(api: KubernetesApi) -> None:
    """Preparations above the limit wait, and may leave before any request is made."""
    api.behave("tool", has_room=False)
    async with driver_of(api, concurrency_count=1) as driver:
        first = asyncio.create_task(driver.prepare(order("first")))
        await until(lambda: api.watchers)
        second = asyncio.create_task(driver.prepare(order("second")))
        await asyncio.sleep(0.05)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
    assert api.requests["batch", "jobs", "create"] == 1
    await until(lambda: not api.objects)


async def test_a_create_without_an_answer_is_undone(api: KubernetesApi) -> None:
    """If a create is never answered, the created object is found by its labels and removed."""
    held = api.held["batch", "jobs", "create"] = asyncio.Event()
    async with driver_of(api, request_timeout_s=1.0) as driver:
        with pytest.raises(SandboxEngineError):
            await driver.prepare(order(network="own"))
    held.set()
    await until(lambda: not api.objects)


async def test_closing_lets_preparations_fail_and_clean_up(api: KubernetesApi) -> None:
    """A closed driver keeps no caller waiting, and removes what was begun."""
    api.behave("tool", has_room=False)
    async with driver_of(api, concurrency_count=1) as driver:
        preparing = asyncio.create_task(driver.prepare(order()))
        await until(lambda: api.watchers)
        waiting = asyncio.create_task(driver.prepare(order("b")))
        await asyncio.sleep(0.05)
    with pytest.raises(SandboxError):
        await preparing
    with pytest.raises(SandboxEngineError, match="closed"):
        await waiting
    await until(lambda: not api.objects)


async def test_sandbox_that_waits_too_long_says_so(api: KubernetesApi) -> None:
    """Its time runs while others have their turn; it does not begin after that."""
    api.behave("tool", is_ready=False)
    async with driver_of(api, concurrency_count=1) as driver:
        first = asyncio.create_task(driver.prepare(order("first", ready_command="true")))
        await until(lambda: api.watchers)
        second = asyncio.create_task(driver.prepare(order("second", prepare_timeout_s=0.1)))
        await asyncio.sleep(0.2)
        api.behave("tool", is_ready=True)
        with pytest.raises(SandboxSetupError, match="too many others"):
            await second
        await first
    assert api.requests["batch", "jobs", "create"] == 1


# --- find and measure -------------------------------------------------------------------------------------------------


async def test_sandbox_made_by_a_client_is_adopted(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A pod by its name or namespace, a Job by its handle or its pod: it is found afterwards, and can be removed."""
    for namespace in ("default", "elsewhere"):
        plain = given("lone", ports=[{"containerPort": 80}])
        plain["metadata"]["labels"] = {}
        api.create("pods", plain, namespace)
    plain_set = given_set("some", is_labelled=False)
    plain_set["spec"]["template"]["metadata"]["labels"] = {}
    api.create("jobs", plain_set)
    await until(lambda: sum("podIP" in pod["status"] for pod in api.all_of("pods")) == 3)
    [pod] = api.all_of("pods", "job-name=some")
    assert await driver.find() == []
    places = [
        await driver.adopt(name, "") for name in ("lone", "elsewhere/lone", pod["metadata"]["name"], "job/default/some")
    ]
    handles = ["pod/default/lone", "pod/elsewhere/lone", "job/default/some", "job/default/some"]
    assert [place.handle for place in places] == handles
    assert places[3] == places[2]
    assert places[2].address == pod["status"]["podIP"]
    assert set(places[0].ports) == {80}
    for _ in range(2):
        found = await driver.find()
        assert sorted(each.handle for each in found) == sorted(set(handles))
        assert all(each.running and not each.is_given for each in found)
    for handle in set(handles):
        await driver.reclaim(handle)
    await until(lambda: not api.objects)
    assert await driver.find() == []


async def test_unsuitable_pod_cannot_be_adopted(api: KubernetesApi) -> None:
    """Cases: missing, ended, already a sandbox, and the proxy's own pod."""
    api.behave("users", outcome="complete")
    api.create("pods", given("ended"))
    proxy = api.create("pods", {"metadata": {"name": "proxy"}, "spec": {"containers": [{"name": "m", "image": "p"}]}})
    async with driver_of(api, owner_pod=("proxy", proxy["metadata"]["uid"])) as driver:
        place = await driver.prepare(order())
        await until(lambda: api.get("pods", "ended")["status"]["phase"] == "Succeeded")
        for name in ("absent", "ended", "job/default/absent"):
            with pytest.raises(NotFoundError):
                await driver.adopt(name, "")
        for name in (place.handle, place.details["pod"], "proxy", "a/b/c/d", "../x"):
            with pytest.raises(SandboxRefusedError):
                await driver.adopt(name, "")
        with pytest.raises(SandboxRefusedError, match="reclaim_url"):
            await driver.adopt("proxy", "http://127.0.0.1/")


async def test_replaced_pod_under_an_adopted_name_is_not_ours(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The existing pod was adopted: a later one of that name is neither found nor removed."""
    plain = given("lone")
    plain["metadata"]["labels"] = {}
    api.create("pods", plain)
    place = await driver.adopt("lone", "")
    api.delete("pods", "lone", {"gracePeriodSeconds": 0})
    api.create("pods", plain)
    assert await driver.find() == []
    await driver.reclaim(place.handle)
    assert api.has("pods", "lone")


async def test_many_are_found_page_by_page(api: KubernetesApi) -> None:
    """A list of many pages is complete; if it expires meanwhile, it is read again."""
    for number in range(7):
        api.create("pods", given(f"g{number}"))
    async with driver_of(api, page_items_count=3) as driver:
        assert len(await driver.find()) == 7
        assert api.requests["", "pods", "list"] == 3
        api.errors["", "pods", "list"] = [ApiError(410, "Expired", "the provided continue parameter is too old")]
        assert len(await driver.find()) == 7


async def test_adopted_sandboxes_are_found_and_reclaimed(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A pod is found as itself; a pod of a Job as that Job, which would otherwise make another pod."""
    api.create("pods", given("lone", ports=[{"containerPort": 80}]))
    api.create("jobs", given_set("labelled"))
    api.create("jobs", given_set("unlabelled", is_labelled=False))
    await until(lambda: sum("podIP" in pod["status"] for pod in api.all_of("pods")) == 3)
    found = {each.handle: each for each in await driver.find()}
    assert set(found) == {"pod/default/lone", "job/default/labelled", "job/default/unlabelled"}
    assert all(
        each.is_given and each.program_id == "p" and each.running and each.place.address for each in found.values()
    )
    assert set(found["pod/default/lone"].place.ports) == {80}
    async with driver_of(api) as other:
        for handle in found:
            await other.reclaim(handle)
    await until(lambda: not api.objects)


async def test_a_pod_that_its_job_left_behind_is_on_its_way(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Between the ends of a Job and its pod, which the cluster sees to, nothing of ours is found and no policy kept."""
    place = await driver.prepare(order(network="own"))
    api.collects_garbage = False
    await driver.reclaim(place.handle)
    assert [len(api.all_of(each)) for each in ("jobs", "pods", "networkpolicies")] == [0, 1, 0]
    assert await driver.find() == []


async def test_a_program_id_that_no_label_can_hold_is_given_by_annotation(
    api: KubernetesApi, driver: KubernetesDriver
) -> None:
    """A user's annotation with the label's name has the id that the label cannot have."""
    pod = given("lone", "anything")
    pod["metadata"]["annotations"] = {PROGRAM_LABEL: "a program/with slashes"}
    api.create("pods", pod)
    assert [each.program_id for each in await driver.find()] == ["a program/with slashes"]


async def test_memory_is_measured_where_the_cluster_tells(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Each handle gets the memory of its pod; a cluster that does not report it is not asked again and again."""
    places = [await driver.prepare(order(f"u{number}")) for number in range(2)]
    api.metrics = dict(zip((place.details["pod"] for place in places), ("1Mi", "5000Ki"), strict=True))
    usage = await driver.measure([places[1].handle])
    assert (usage.memory_bytes, usage.disk_bytes) == ({places[1].handle: 5_120_000}, {})
    assert not (await driver.measure([])).memory_bytes
    api.metrics = None
    for _ in range(3):
        assert not (await driver.measure([places[1].handle])).memory_bytes
    assert api.requests["metrics.k8s.io", "pods", "list"] == 2


# --- watch ------------------------------------------------------------------------------------------------------------


async def test_each_appearance_and_end_is_reported_once(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """Each sandbox appears once and ends once, whatever else is reported of it; earlier events are not reported."""
    api.create("pods", given("before"))
    async with watching(api, driver) as watched:
        place = await driver.prepare(order())
        api.create("pods", given("lone"))
        assert sorted(await watched.next_changes(2)) == [(place.handle, False), ("pod/default/lone", False)]
        api.patch("pods", "before", {"metadata": {"labels": {"changed": "yes"}}})
        api.behave("users", outcome="crash", message="out of luck")
        first, second = sorted([*await watched.next_changes(2)])
        assert (first, second) == (("pod/default/before", True), ("pod/default/lone", True))
        api.delete("pods", "lone")
        api.delete("pods", "before")
        await driver.reclaim(place.handle)
        assert await watched.next_changes() == [(place.handle, True)]
        api.create("pods", given("lone", image="other"))
        assert await watched.next_changes() == [("pod/default/lone", False)]
        api.patch("pods", "lone", {"metadata": {"labels": {PROGRAM_LABEL: None}}})
        assert await watched.next_changes() == [("pod/default/lone", True)]


LABELS = {"thunderagent.sandbox-id": "a1", PROGRAM_LABEL: "p"}
LABELS_OF_OURS = {"labels": LABELS, "annotations": {"thunderagent.owner": OWNER.owner_id}}
LABELS_OF_GIVEN = {"labels": {PROGRAM_LABEL: "p"}}


def job_event(event: str, marks: Any, reason: str = "", uid: str = "u1") -> tuple[str, str, Any]:
    conditions = [{"type": "Failed", "status": "True", "reason": reason}] if reason else []
    metadata = {"name": "j", "namespace": "default", "uid": uid, **marks}
    return "job", event, {"metadata": metadata, "status": {"conditions": conditions}}


def pod_event(event: str, marks: Any, phase: str = "Running", uid: str = "u1", **metadata: str) -> tuple[str, str, Any]:
    references = [{"kind": "Job", "name": "j", "uid": uid, "controller": True}]
    metadata = {"name": "j-x", "namespace": "default", "uid": "u2", "ownerReferences": references, **marks, **metadata}
    return "pod", event, {"metadata": metadata, "status": {"phase": phase, "reason": "OOM"}}


GOING = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
CASES = [
    # The Job fails, and its pod says why: before, after, or never.
    (
        [
            job_event("MODIFIED", LABELS_OF_OURS, "BackoffLimitExceeded"),
            pod_event("MODIFIED", LABELS_OF_OURS, "Failed"),
        ],
        "OOM",
    ),
    (
        [
            pod_event("MODIFIED", LABELS_OF_OURS, "Failed"),
            job_event("MODIFIED", LABELS_OF_OURS, "BackoffLimitExceeded"),
        ],
        "OOM",
    ),
    ([job_event("MODIFIED", LABELS_OF_OURS, "BackoffLimitExceeded")], "BackoffLimitExceeded"),
    # The pod is removed, and its Job says why: before, after, or never.
    (
        [pod_event("MODIFIED", LABELS_OF_OURS, **GOING), job_event("MODIFIED", LABELS_OF_OURS, "DeadlineExceeded")],
        "DeadlineExceeded",
    ),
    (
        [job_event("MODIFIED", LABELS_OF_OURS, "DeadlineExceeded"), pod_event("DELETED", LABELS_OF_OURS)],
        "DeadlineExceeded",
    ),
    ([pod_event("DELETED", LABELS_OF_OURS), job_event("DELETED", LABELS_OF_OURS)], "removed"),
    # A pod of an earlier Job of the same name ends, and then this one.
    ([pod_event("DELETED", LABELS_OF_OURS, uid="u0"), job_event("DELETED", LABELS_OF_OURS)], "removed"),
    # A Job that a user made continues with another pod; the last one explains its end, and is no new sandbox after it.
    ([pod_event("MODIFIED", LABELS_OF_GIVEN, "Failed"), job_event("DELETED", LABELS_OF_GIVEN)], "removed"),
    ([job_event("DELETED", LABELS_OF_GIVEN), pod_event("MODIFIED", LABELS_OF_GIVEN)], "removed"),
]


@pytest.mark.parametrize(("events", "why"), CASES)
async def test_a_sandbox_ends_once_and_for_the_best_reason(events: list[tuple[str, str, Any]], why: str) -> None:
    """Reports of a Job and its pod come in any order: there is one end, with the best explanation."""
    marks = {key: events[0][2]["metadata"][key] for key in ("labels", "annotations") if key in events[0][2]["metadata"]}
    following = Following(None, OWNER, explanation_limit_s=0.05)  # type: ignore[arg-type]
    for event in (job_event("ADDED", marks), pod_event("ADDED", marks), *events):
        following._put(event)
    assert not (await following.next_change()).ended
    change = await following.next_change()
    assert (change.found.handle, change.ended, change.why) == ("job/default/j", True, why)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await following.next_change()


async def test_a_name_that_is_used_again_ends_first(api: KubernetesApi) -> None:
    """An end that waits for its reason is reported before the next sandbox of that name appears."""
    following = Following(None, OWNER, explanation_limit_s=0.05)  # type: ignore[arg-type]
    events = [
        job_event("ADDED", LABELS_OF_OURS),
        job_event("MODIFIED", LABELS_OF_OURS, "BackoffLimitExceeded"),
        job_event("ADDED", LABELS_OF_OURS, uid="u9"),
    ]
    for event in events:
        following._put(event)
    assert [(await following.next_change()).ended for _ in range(3)] == [False, True, False]


@KINDS
async def test_ended_sandbox_reports_why(api: KubernetesApi, driver: KubernetesDriver, kind: str) -> None:
    """The report of a dead pod has the explanation that the pod left."""
    place = await driver.prepare(order(kubernetes_kind=kind))
    async with watching(api, driver) as watched:
        api.behave("tool", outcome="crash", message="killed by the dragon")
        await until(lambda: watched.changes)
        assert "killed by the dragon" in watched.changes[0].why
        assert await watched.next_changes() == [(place.handle, True)]


async def test_a_given_job_ends_when_it_does_and_not_with_a_pod(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A Job that a user made may try again: the end of one pod is not its end."""
    async with watching(api, driver) as watched:
        api.create("jobs", given_set("stubborn", backoffLimit=1))
        assert await watched.next_changes() == [("job/default/stubborn", False)]
        await until(lambda: any("podIP" in pod["status"] for pod in api.all_of("pods")))
        api.delete("pods", api.all_of("pods")[0]["metadata"]["name"], {"gracePeriodSeconds": 0})
        await until(lambda: any("podIP" in pod["status"] for pod in api.all_of("pods")))
        api.create("pods", given("mark"))
        assert await watched.next_changes() == [("pod/default/mark", False)]
        api.behave("users", outcome="crash")
        assert sorted(await watched.next_changes(2)) == [("job/default/stubborn", True), ("pod/default/mark", True)]


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_forgotten_history_is_made_up_by_a_list(
    api: KubernetesApi, driver: KubernetesDriver, *, in_stream: bool
) -> None:
    """Events that nobody watched are reported after the next list (410, as status or as event)."""
    api.says_gone_in_stream = in_stream
    api.create("pods", given("stays"))
    api.create("pods", given("goes"))
    api.create("pods", given("replaced"))
    async with watching(api, driver) as watched:
        api.drop_watches()
        api.delete("pods", "goes", {"gracePeriodSeconds": 0})
        api.delete("pods", "replaced", {"gracePeriodSeconds": 0})
        api.create("pods", given("comes"))
        api.create("pods", given("replaced"))
        api.compact()
        expected = [("pod/default/comes", False), ("pod/default/goes", True)]
        expected += [("pod/default/replaced", False), ("pod/default/replaced", True)]
        assert sorted(await watched.next_changes(4)) == expected


async def test_gone_event_in_a_watch_restarts_it_with_a_list(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """After a stream says that it expired comes a list, and nothing is reported twice."""
    async with watching(api, driver) as watched:
        api.create("pods", given("one"))
        assert await watched.next_changes() == [("pod/default/one", False)]
        api.expire_watches()
        api.create("pods", given("two"))
        assert await watched.next_changes() == [("pod/default/two", False)]
    assert api.requests["", "pods", "list"] == 2


async def test_a_stream_that_breaks_is_taken_up_where_it_was(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """After a broken or ended stream nothing is lost, and no list is needed."""
    async with watching(api, driver) as watched:
        for number, lose in enumerate((api.drop_watches, api.end_watches)):
            await until(lambda: len(api.watchers) == 2)
            await lost(api, lose)
            api.create("pods", given(f"p{number}"))
            assert await watched.next_changes() == [(f"pod/default/p{number}", False)]
    assert api.requests["", "pods", "list"] == 1


async def test_bookmarks_save_a_list(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A watch without events for long continues from the last bookmark, though earlier events are forgotten."""
    async with watching(api, driver) as watched:
        for number in range(5):
            api.create("networkpolicies", {"metadata": {"name": f"n{number}"}, "spec": {"podSelector": {}}})
        api.send_bookmarks()
        await asyncio.sleep(0.5)
        api.compact()
        await lost(api, api.end_watches)
        api.create("pods", given("one"))
        assert await watched.next_changes() == [("pod/default/one", False)]
    assert api.requests["", "pods", "list"] == 1


async def test_a_lost_api_ends_the_watch(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The watcher is told that the API server is gone, and may watch again when it is back."""
    async with watching(api, driver) as watched:
        await api.stop()
        await watched.next_changes()
        assert isinstance(watched.error, SandboxEngineError)
    for call in (driver.find, driver.sweep):
        with pytest.raises(SandboxEngineError, match="does not answer"):
            await call()
    await api.start()
    async with watching(api, driver) as watched:
        api.create("pods", given("one"))
        assert await watched.next_changes() == [("pod/default/one", False)]


async def test_a_preparation_bears_with_an_api_that_is_away_for_a_moment(api: KubernetesApi) -> None:
    """The pod starts meanwhile; if the API stays away the preparation fails, and its pod ends at its own deadline."""
    api.behave("tool", is_ready=False)
    async with driver_of(api, request_timeout_s=10.0) as driver:
        preparing = asyncio.create_task(driver.prepare(order(ready_command="true")))
        await until(lambda: api.watchers)
        await api.stop()
        api.behave("tool", is_ready=True)
        await asyncio.sleep(0.2)
        assert not preparing.done()
        await api.start()
        assert (await preparing).address
    async with driver_of(api, request_timeout_s=2.0) as driver:
        api.behave("tool", is_ready=False)
        preparing = asyncio.create_task(driver.prepare(order("b", ready_command="true")))
        await until(lambda: api.watchers)
        await api.stop()
        with pytest.raises(SandboxEngineError):
            await preparing


async def test_driver_made_without_an_api_server_works_once_one_runs(api: KubernetesApi) -> None:
    """A driver can be made without an API server, and works as soon as one runs."""
    await api.stop()
    async with driver_of(api) as driver:
        with pytest.raises(SandboxEngineError):
            await driver.prepare(order())
        await api.start()
        assert (await driver.prepare(order())).address


async def test_the_configuration_of_kubectl_is_read(api: KubernetesApi, tmp_path: Path) -> None:
    """The API's address and our account may be in a file, as kubectl has it."""
    named = {"name": "here"}
    configuration = {
        "current-context": "here",
        "contexts": [{**named, "context": {"cluster": "here", "user": "here"}}],
        "clusters": [{**named, "cluster": {"server": api.url}}],
        "users": [{**named, "user": {"token": "secret"}}],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(configuration))
    driver = KubernetesDriver(OWNER, kubeconfig=path, concurrency_count=1)
    assert (await driver.prepare(order())).address
    await driver.close()


async def test_missing_configuration_is_an_engine_error_once_it_is_needed(tmp_path: Path) -> None:
    """An unreadable configuration is the engine's trouble when it is needed, not before."""
    driver = KubernetesDriver(OWNER, kubeconfig=tmp_path / "none", concurrency_count=1)
    with pytest.raises(SandboxEngineError, match="no usable configuration"):
        await driver.find()
    await driver.close()


@pytest.mark.parametrize(
    "text", ["clusters: [", "- a\n- b\n", "clusters: 1\ncontexts: 2\nusers: 3\ncurrent-context: x\n"]
)
async def test_half_written_configuration_is_an_engine_error(tmp_path: Path, text: str) -> None:
    """Whatever its parser makes of it is the engine's trouble, too."""
    path = tmp_path / "config"
    path.write_text(text)
    driver = KubernetesDriver(OWNER, kubeconfig=path, concurrency_count=1)
    with pytest.raises(SandboxEngineError, match="no usable configuration"):
        await driver.find()
    await driver.close()


async def test_leaving_a_watch_ends_its_threads(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A moment later no thread and no connection of a watch is left."""
    async with watching(api, driver):
        await until(lambda: threads_count() == 2)
    await until(lambda: threads_count() == 0)
    await until(lambda: not api.watchers)


async def test_a_new_namespace_is_watched_too(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """A namespace that a template adds during a watch is watched from then on."""
    async with watching(api, driver) as watched:
        await driver.prepare(order(namespace="elsewhere"))
        await until(lambda: len(api.watchers) == 4)
        api.create("pods", given("later"), "elsewhere")
        while ("pod/elsewhere/later", False) not in await watched.next_changes():
            pass


# --- rights -----------------------------------------------------------------------------------------------------------


async def test_the_rights_are_those_that_are_used(api: KubernetesApi, driver: KubernetesDriver) -> None:
    """The driver needs every right in the manifest, and no other."""
    async with watching(api, driver):
        for kind in ("job", "pod"):
            place = await driver.prepare(order(kind, kubernetes_kind=kind, network="own"))
            api.metrics = {place.details["pod"]: "1Mi"}
            assert (await driver.measure([place.handle])).memory_bytes
            async with driver_of(api) as other:
                await other.find()
                await other.sweep()
            async with driver_of(api) as other:
                await other.reclaim(place.handle)
    assert set(api.requests) == RIGHTS
