"""SandboxClaims of kubernetes-sigs/agent-sandbox on a real API server, with the proxy's own rights.

The project's controller is an image that the tests do not have. So they define the kind themselves, with the fields of
`extensions/api/v1beta1/sandboxclaim_types.go`, and do the controller's part: a pod that the claim owns, and its status.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from tests.kubernetes.conftest import until_it_says
from tests.unit.client.support import fake_proxy
from thunderagent.client.program_sandbox import ProgramSandbox
from thunderagent.errors import SandboxRefusedError, SandboxSetupError
from thunderagent.tools.base import Change, Order, Owner
from thunderagent.tools.kubernetes.claims import ClaimDriver
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.kubernetes.conftest import Access, Namespace

OWNER = Owner("proxy at example.org/east", "run-1")
NAME = "thunderagent-a1"
POD = "coders-x7"
WITHIN_S = 120.0
TEXT: dict[str, Any] = {"type": "string"}
FIELDS = {
    "spec": {
        "type": "object",
        "required": ["warmPoolRef"],
        "properties": {
            "warmPoolRef": {"type": "object", "required": ["name"], "properties": {"name": TEXT}},
            "lifecycle": {
                "type": "object",
                "properties": {
                    "shutdownTime": {"type": "string", "format": "date-time"},
                    "shutdownPolicy": {
                        "type": "string",
                        "default": "Retain",
                        "enum": ["Delete", "DeleteForeground", "Retain"],
                    },
                    "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                },
            },
            "env": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "value"],
                    "properties": {"name": TEXT, "value": TEXT, "containerName": TEXT},
                },
            },
        },
    },
    "status": {
        "type": "object",
        "properties": {
            "conditions": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["lastTransitionTime", "message", "reason", "status", "type"],
                    "properties": {
                        **dict.fromkeys(("message", "reason", "type"), TEXT),
                        "lastTransitionTime": {"type": "string", "format": "date-time"},
                        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                    },
                },
            },
            "sandbox": {
                "type": "object",
                "properties": {"name": TEXT, "podIPs": {"type": "array", "items": TEXT}},
            },
        },
    },
}
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "sandboxclaims.extensions.agents.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
    },
    "spec": {
        "group": "extensions.agents.x-k8s.io",
        "names": {"kind": "SandboxClaim", "plural": "sandboxclaims", "singular": "sandboxclaim"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": FIELDS}},
            }
        ],
    },
}


@pytest.fixture
def claims(access: Access, namespace: Namespace) -> Iterator[Namespace]:
    """A namespace of a cluster that knows claims, and has no controller for them."""
    name = DEFINITION["metadata"]["name"]  # type: ignore[index]
    if name in access.kubectl("get", "crds", "--output=name"):
        pytest.skip("the cluster has agent-sandbox itself, whose controller would do the test's part")
    access.kubectl("create", "--filename=-", given=DEFINITION)
    try:
        access.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
        yield namespace
    finally:
        access.kubectl("delete", "crd", name, "--timeout=120s")


@pytest.fixture
async def driver(namespace: Namespace) -> AsyncIterator[ClaimDriver]:
    made = ClaimDriver(OWNER, namespace=namespace.name, kubeconfig=namespace.kubeconfig)
    yield made
    await made.close()


def order(**template: Any) -> Order:
    settings = {"driver": "agent-sandbox", "warm_pool": "coders", "prepare_timeout_s": 180.0, **template}
    return Order("a1", Template(**settings), "coding", "program one", time.time() + 600)


def say(namespace: Namespace, reason: str, *, is_ready: bool, sandbox: dict[str, Any] | None = None) -> None:
    """Set the claim's status. Without a message an old server takes it for null."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = {"type": "Ready", "status": str(is_ready), "reason": reason, "message": "said", "lastTransitionTime": now}
    status = {"status": {"conditions": [ready], "sandbox": sandbox or {}}}
    patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")
    namespace.kubectl("patch", "sandboxclaim", NAME, *patch)


def serve(namespace: Namespace) -> str:
    """Do the controller's part: a pod that the claim owns. Return its address once it runs."""
    claim = namespace.read("sandboxclaim", NAME)
    owner = {"apiVersion": claim["apiVersion"], "kind": claim["kind"], "name": NAME, "uid": claim["metadata"]["uid"]}
    container = {
        "name": "main",
        "image": namespace.access.sandbox_image,
        "command": ["sleep", "3600"],
        "securityContext": {"runAsUser": 1000},
    }
    metadata = {"name": POD, "ownerReferences": [owner]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    namespace.kubectl(
        "create", "--filename=-", given={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    )
    namespace.kubectl("wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=120s")
    address: str = namespace.read("pod", POD)["status"]["podIP"]
    say(namespace, "DependenciesReady", is_ready=True, sandbox={"name": POD, "podIPs": [address]})
    return address


async def test_a_claim_from_its_preparation_to_its_end(claims: Namespace, driver: ClaimDriver) -> None:
    """It is made as the kind demands, is where its status says, is found, and is reported once."""
    changes: list[Change] = []

    async def listen() -> None:
        async with aclosing(driver.watch()) as watched:
            async for change in watched:
                changes.append(change)  # noqa: PERF401 - it never ends

    listening = asyncio.create_task(listen())
    await asyncio.sleep(2)  # until it watches: what is there before is not reported
    preparing = asyncio.create_task(driver.prepare(order(ports=(8000,), environment={"A": "b"})))
    await until_it_says(lambda: claims.names("sandboxclaims") == [NAME], within_s=WITHIN_S)
    sandbox = {"name": POD, "podIPs": ["10.0.0.7"]}
    await asyncio.to_thread(say, claims, "DependenciesReady", is_ready=True, sandbox=sandbox)
    place = await preparing
    assert (place.handle, place.ports) == (f"claim/{claims.name}/{NAME}", {8000: ("10.0.0.7", 8000)})
    assert claims.read("sandboxclaim", NAME)["spec"]["env"] == [{"name": "A", "value": "b"}]
    (found,) = await driver.find()
    assert (found.handle, found.program_id, found.running) == (place.handle, "program one", True)
    await driver.reclaim(place.handle)
    await until_it_says(lambda: not claims.names("sandboxclaims"), within_s=WITHIN_S)
    await until_it_says(lambda: len(changes) == 2, within_s=WITHIN_S)
    assert [(each.found.handle, each.ended, each.why) for each in changes] == [
        (place.handle, False, ""),
        (place.handle, True, "removed"),
    ]
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_an_agent_works_in_the_pod_of_a_claim(
    claims: Namespace, driver: ClaimDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It runs commands and moves files; the pod goes with the claim."""
    preparing = asyncio.create_task(driver.prepare(order()))
    await until_it_says(lambda: claims.names("sandboxclaims") == [NAME], within_s=WITHIN_S)
    address = await asyncio.to_thread(serve, claims)
    place = await preparing
    assert place.address == address
    monkeypatch.setenv("KUBECONFIG", str(claims.access.kubeconfig))
    with fake_proxy() as proxy:
        report = {"sandbox_id": "a1", "template": "coding", "driver": driver.kind, "stage": "ready", "why": None}
        report |= {"handle": place.handle, "details": dict(place.details), "ports": {}, "program_ids": ["p"]}
        proxy.answer("/programs/p/sandboxes", (200, {"sandboxes": [report]}))
        await asyncio.to_thread(works_in, ProgramSandbox(program_id="p", proxy=proxy.url), tmp_path)
    await driver.reclaim(place.handle)
    await until_it_says(lambda: not claims.names("sandboxclaims,pods"), within_s=WITHIN_S)


def works_in(sandbox: ProgramSandbox, folder: Path) -> None:
    """Run a command in a pod, and move files in and out."""
    (folder / "in").mkdir()
    (folder / "in" / "file").write_bytes(b"\x00moved")
    sandbox.copy_in(folder / "in", "/tmp/a b")
    done = sandbox.run(["sh", "-c", 'pwd; id -u; echo "$A"; exit 3'], cwd="/tmp/a b", env={"A": "b c"})
    assert (done.exit_code, done.stdout) == (3, b"/tmp/a b\n1000\nb c\n")
    sandbox.copy_out("/tmp/a b", folder / "out")
    assert (folder / "out" / "file").read_bytes() == b"\x00moved"


async def test_refused_claim_says_why_and_leaves_nothing(claims: Namespace, driver: ClaimDriver) -> None:
    """By the controller, in its status."""
    preparing = asyncio.create_task(driver.prepare(order(prepare_timeout_s=20.0)))
    await until_it_says(lambda: claims.names("sandboxclaims") == [NAME], within_s=WITHIN_S)
    await asyncio.to_thread(say, claims, "WarmPoolNotFound", is_ready=False)
    with pytest.raises(SandboxSetupError, match="not ready in time: WarmPoolNotFound"):
        await preparing
    assert claims.names("sandboxclaims") == []


async def test_cluster_without_claims_refuses_the_driver(namespace: Namespace, driver: ClaimDriver) -> None:
    """The server's answer says that it does not know them."""
    if "sandboxclaims" in namespace.kubectl("get", "crds", "--output=name"):
        pytest.skip("the cluster has agent-sandbox")
    with pytest.raises(SandboxRefusedError, match=r"the cluster has no sandboxclaims of extensions\.agents"):
        await driver.prepare(order())
