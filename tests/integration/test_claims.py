"""The driver of agent-sandbox, through the real client and HTTP, against an API server of the tests' own.

Its controller is played by the tests: they set the status that the real one sets. Every request needs the rights that
`deploy/kubernetes/sandboxes-rbac.yaml` gives.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.kubernetes_api import ApiError, KubernetesApi, rights_of
from tests.integration.support import DEADLINE_S, fake_replica, get, post, serve, until
from thunderagent.errors import SandboxConflictError, SandboxEngineError, SandboxRefusedError, SandboxSetupError
from thunderagent.tools.base import PROGRAM_LABEL, Change, Order, Owner, Place
from thunderagent.tools.kubernetes.claims import ClaimDriver
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RIGHTS = rights_of(Path(__file__).parents[2] / "deploy/kubernetes/sandboxes-rbac.yaml")
OWNER = Owner("proxy at example.org/east", "run-1")
GROUP = "extensions.agents.x-k8s.io"
HANDLE = "claim/default/thunderagent-a1"


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi(RIGHTS)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def driver_of(api: KubernetesApi, owner: Owner = OWNER) -> AsyncIterator[ClaimDriver]:
    driver = ClaimDriver(owner, api_url=api.url, concurrency_count=8, request_timeout_s=3.0, backoff_s=0.2)
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture
async def driver(api: KubernetesApi) -> AsyncIterator[ClaimDriver]:
    async with driver_of(api) as made:
        yield made


def order(sandbox_id: str = "a1", expires_at_s: float | None = None, **template: Any) -> Order:
    settings = {"driver": "agent-sandbox", "warm_pool": "coders", "prepare_timeout_s": 30.0, **template}
    ends_at_s = time.time() + 600 if expires_at_s is None else expires_at_s
    return Order(sandbox_id, Template(**settings), "coding", "program one", ends_at_s)


def condition(name: str, *, is_true: bool, reason: str = "SaysWhy", message: str = "") -> dict[str, Any]:
    return {"type": name, "status": str(is_true), "reason": reason, "message": message}


def say(
    api: KubernetesApi,
    *conditions: dict[str, Any],
    name: str = "thunderagent-a1",
    ip: str = "10.0.0.7",
    namespace: str = "default",
) -> None:
    """Set a claim's status, as the controller does."""
    sandbox = {"name": "coders-x7", "podIPs": [ip]} if ip else {}
    api.patch("sandboxclaims", name, {"status": {"conditions": list(conditions), "sandbox": sandbox}}, namespace)


async def prepared(api: KubernetesApi, driver: ClaimDriver, sandbox_id: str = "a1", **template: Any) -> Place:
    """Prepare a sandbox, with the controller's part."""
    preparing = asyncio.create_task(driver.prepare(order(sandbox_id, **template)))
    name = f"thunderagent-{sandbox_id}"
    await until(lambda: api.has("sandboxclaims", name))
    say(api, condition("Ready", is_true=True), name=name)
    return await preparing


async def test_a_sandbox_is_claimed_and_is_where_its_status_says(api: KubernetesApi, driver: ClaimDriver) -> None:
    """The claim names the pool, its end and our labels; it is usable when it is ready, and not before."""
    ends_at_s = time.time() + 600
    preparing = asyncio.create_task(driver.prepare(order(expires_at_s=ends_at_s, ports=(8000,))))
    await until(lambda: api.has("sandboxclaims", "thunderagent-a1"))
    claim = api.get("sandboxclaims", "thunderagent-a1")
    lifecycle = claim["spec"].pop("lifecycle")
    assert claim["spec"] == {"warmPoolRef": {"name": "coders"}}
    assert lifecycle["shutdownPolicy"] == "Delete"
    assert lifecycle["shutdownTime"].startswith(time.strftime("%Y-%m-%dT%H:", time.gmtime(ends_at_s)))
    assert claim["metadata"]["annotations"][PROGRAM_LABEL] == "program one"
    say(api, condition("Ready", is_true=False))
    reads_count = api.requests[GROUP, "sandboxclaims", "get"]
    await until(lambda: api.requests[GROUP, "sandboxclaims", "get"] >= reads_count + 2)
    assert not preparing.done()
    say(api, condition("Ready", is_true=True))
    details = {"namespace": "default", "pod": "coders-x7"}
    assert await preparing == Place(HANDLE, "10.0.0.7", {8000: ("10.0.0.7", 8000)}, details)


async def test_variables_are_the_claims(api: KubernetesApi, driver: ClaimDriver) -> None:
    """The controller then makes a new sandbox instead of taking a warm one."""
    await prepared(api, driver, environment={"A": "b"})
    assert api.get("sandboxclaims", "thunderagent-a1")["spec"]["env"] == [{"name": "A", "value": "b"}]


async def test_reclaiming_removes_the_claim(api: KubernetesApi, driver: ClaimDriver) -> None:
    """Once, twice, and without a memory of it."""
    place = await prepared(api, driver)
    async with driver_of(api) as later:
        await later.reclaim(place.handle)
    assert api.all_of("sandboxclaims") == []
    await driver.reclaim(place.handle)


async def test_foreign_claims_stay(api: KubernetesApi, driver: ClaimDriver) -> None:
    """Neither a claim without a label nor another proxy's is removed or found; a labelled one is given to us."""
    spec = {"warmPoolRef": {"name": "coders"}}
    api.create("sandboxclaims", {"metadata": {"name": "users"}, "spec": spec})
    api.create("sandboxclaims", {"metadata": {"name": "given", "labels": {PROGRAM_LABEL: "p"}}, "spec": spec})
    async with driver_of(api, Owner("another", "run-1")) as other:
        await prepared(api, other)
        assert {each.handle for each in await other.find()} == {HANDLE, "claim/default/given"}
    await driver.reclaim(HANDLE)
    await driver.reclaim("claim/default/users")
    (found,) = await driver.find()
    assert (found.handle, found.is_given, found.program_id) == ("claim/default/given", True, "p")
    await driver.reclaim(found.handle)
    assert {each["metadata"]["name"] for each in api.all_of("sandboxclaims")} == {"users", "thunderagent-a1"}


async def test_the_next_run_finds_what_this_one_left(api: KubernetesApi, driver: ClaimDriver) -> None:
    """By its labels, with its place."""
    place = await prepared(api, driver)
    async with driver_of(api, Owner(OWNER.owner_id, "run-2")) as later:
        (found,) = await later.find()
        assert found.is_orphan_of(Owner(OWNER.owner_id, "run-2"))
        assert (found.handle, found.running, found.place.address) == (HANDLE, True, place.address)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([condition("Ready", is_true=False, reason="ClaimExpired", message="too late")], "ClaimExpired: too late"),
        ([condition("Finished", is_true=True, reason="PodFailed", message="exit 3")], "PodFailed: exit 3"),
    ],
)
async def test_ended_claim_fails_with_the_reason(
    api: KubernetesApi, driver: ClaimDriver, said: list[dict[str, Any]], why: str
) -> None:
    """Nothing is left."""
    preparing = asyncio.create_task(driver.prepare(order()))
    await until(lambda: api.has("sandboxclaims", "thunderagent-a1"))
    say(api, *said)
    with pytest.raises(SandboxSetupError, match=why):
        await preparing
    assert api.all_of("sandboxclaims") == []


async def test_claim_that_is_never_ready_reports_its_condition(api: KubernetesApi, driver: ClaimDriver) -> None:
    """Before the manager's own limit, which could not."""
    preparing = asyncio.create_task(driver.prepare(order(prepare_timeout_s=1.0)))
    await until(lambda: api.has("sandboxclaims", "thunderagent-a1"))
    say(api, condition("Ready", is_true=False, reason="WarmPoolNotFound", message="no coders"), ip="")
    with pytest.raises(SandboxSetupError, match="not ready in time: WarmPoolNotFound: no coders"):
        await preparing
    assert api.all_of("sandboxclaims") == []


async def test_removed_claim_fails_the_preparation(api: KubernetesApi, driver: ClaimDriver) -> None:
    """By somebody else, before it was usable."""
    preparing = asyncio.create_task(driver.prepare(order()))
    await until(lambda: api.has("sandboxclaims", "thunderagent-a1"))
    api.delete("sandboxclaims", "thunderagent-a1")
    with pytest.raises(SandboxSetupError, match="removed before it was usable"):
        await preparing


async def test_a_cancelled_preparation_leaves_nothing(api: KubernetesApi, driver: ClaimDriver) -> None:
    """Also when the server has not answered yet."""
    api.held[GROUP, "sandboxclaims", "create"] = gate = asyncio.Event()
    preparing = asyncio.create_task(driver.prepare(order()))
    await until(lambda: api.has("sandboxclaims", "thunderagent-a1"))
    preparing.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert api.all_of("sandboxclaims") == []


async def test_a_taken_name_is_a_conflict_and_stays(api: KubernetesApi, driver: ClaimDriver) -> None:
    """The other's claim is not removed."""
    await prepared(api, driver)
    with pytest.raises(SandboxConflictError):
        await driver.prepare(order())
    assert api.has("sandboxclaims", "thunderagent-a1")


async def test_an_api_server_that_is_away_for_a_moment_is_waited_for(api: KubernetesApi, driver: ClaimDriver) -> None:
    """The claim is there all the same."""
    api.errors[GROUP, "sandboxclaims", "get"] = [ApiError(503, "ServiceUnavailable", "not now")]
    assert (await prepared(api, driver)).address == "10.0.0.7"


async def test_without_the_project_s_definitions_it_is_refused(api: KubernetesApi, driver: ClaimDriver) -> None:
    """The server does not know claims."""
    unknown = [ApiError(404, "NotFound", "the server could not find the requested resource") for _ in range(2)]
    api.errors[GROUP, "sandboxclaims", "create"] = unknown
    with pytest.raises(
        SandboxRefusedError, match=r"has no sandboxclaims of extensions\.agents.*: the server could not"
    ):
        await driver.prepare(order())


async def test_a_program_has_one_from_its_request_to_its_release(api: KubernetesApi, tmp_path: Path) -> None:
    """Through the proxy: it is claimed with the program, is where the report says, and goes with the program."""
    config = tmp_path / "proxy.toml"
    config.write_text('[sandbox_templates.coder]\ndriver = "agent-sandbox"\nwarm_pool = "coders"\nports = [8000]\n')
    options = ("--sandboxes", "agent-sandbox", "--kubernetes-url", api.url, "--config", str(config))
    async with fake_replica() as replica, serve("--backends", replica.url, *options) as proxy:
        asked = await post(proxy.url, "/programs/p/sandboxes", {"template": "coder"})
        assert asked.status == 202, asked.json()
        await until(lambda: len(api.all_of("sandboxclaims")) == 1)
        say(api, condition("Ready", is_true=True), name=api.all_of("sandboxclaims")[0]["metadata"]["name"])

        async def report() -> dict[str, Any]:
            (found,) = (await get(proxy.url, "/programs/p/sandboxes")).json()["sandboxes"]
            return dict(found)

        async with asyncio.timeout(DEADLINE_S):
            while (await report())["stage"] not in {"ready", "in_use"}:
                await asyncio.sleep(0.01)
        found = await report()
        assert (found["driver"], found["ports"]) == ("agent-sandbox", {"8000": ["10.0.0.7", 8000]})
        await post(proxy.url, "/programs/release", {"program_id": "p"})
        await until(lambda: not api.all_of("sandboxclaims"))


async def test_others_sandboxes_are_given_by_their_label(driver: ClaimDriver) -> None:
    """Not by name; and a handle of another driver is refused."""
    with pytest.raises(SandboxRefusedError, match="label the claim 'x'"):
        await driver.adopt("x", "")
    with pytest.raises(SandboxRefusedError, match="not a handle of a claim"):
        await driver.reclaim("job/default/x")


async def test_each_claim_appears_and_ends_once(api: KubernetesApi, driver: ClaimDriver) -> None:
    """With the reason if the controller gives one; earlier ones are not reported, but their end is."""
    await prepared(api, driver)
    changes: list[Change] = []

    async def listen() -> None:
        async with aclosing(driver.watch()) as watched:
            async for change in watched:
                changes.append(change)  # noqa: PERF401 - it never ends

    listening = asyncio.create_task(listen())
    try:
        await until(lambda: len(api.watchers) == 1)
        await prepared(api, driver, "a2")
        say(api, condition("Ready", is_true=False, reason="SandboxExpired"), name="thunderagent-a2")
        await driver.reclaim("claim/default/thunderagent-a2")
        await driver.reclaim(HANDLE)
        await until(lambda: len(changes) == 3)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    second = "claim/default/thunderagent-a2"
    assert [(each.found.handle, each.ended, each.why) for each in changes] == [
        (second, False, ""),
        (second, True, "SandboxExpired"),
        (HANDLE, True, "removed"),
    ]
    await until(lambda: api.watchers == set())


async def test_a_namespace_of_a_template_is_watched_from_then_on(api: KubernetesApi, driver: ClaimDriver) -> None:
    """Its claims are found, too, and their ends are heard of."""
    async with aclosing(driver.watch()) as watched:
        hearing = asyncio.ensure_future(anext(watched))
        await until(lambda: len(api.watchers) == 1)
        preparing = asyncio.create_task(driver.prepare(order(namespace="far")))
        await until(lambda: api.has("sandboxclaims", "thunderagent-a1", "far"))
        await until(lambda: len(api.watchers) == 2)
        say(api, condition("Ready", is_true=True), namespace="far")
        handle = (await preparing).handle
        assert [each.handle for each in await driver.find()] == [handle] == ["claim/far/thunderagent-a1"]
        await driver.reclaim(handle)
        change = await hearing
        if not change.ended:  # it may have been listed before it was made ready
            change = await anext(watched)
        assert (change.found.handle, change.ended) == (handle, True)


async def test_a_watch_that_is_lost_raises(api: KubernetesApi, driver: ClaimDriver) -> None:
    """The manager then looks for itself."""
    async with aclosing(driver.watch()) as watched:
        hearing = asyncio.ensure_future(anext(watched))
        await until(lambda: len(api.watchers) == 1)
        await api.stop()
        with pytest.raises(SandboxEngineError):
            await hearing
