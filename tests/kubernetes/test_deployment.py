"""The manifests of `deploy/kubernetes` applied for real, with the image of the Dockerfile, in a restricted namespace.

They are changed as the documentation describes: the image, the engines, the keys. Other changes: the engines' pods
become simulated engines without GPUs, and parts for which the cluster is too old are adapted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.kubernetes.conftest import DEPLOY, ROOT, until_it_says

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import NoReturn

    from tests.kubernetes.conftest import Namespace

Json = dict[str, Any]
WITHIN_S = 120.0
LOAD_S = 45
PROGRAMS_COUNT = 4

CALL = """
import http.client, json, sys
method, path, key, body = sys.argv[1:]
asked = http.client.HTTPConnection("127.0.0.1", 8300, timeout=60)
asked.request(method, path, body or None, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
answer = asked.getresponse()
print(json.dumps([answer.status, json.loads(answer.read() or b"null")]))
"""
LOAD = """
import asyncio, collections, json, sys, time
import httpx2

url, key, programs_count, load_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
until_s = time.monotonic() + load_s
seen = collections.Counter()
longest_s = 0.0

async def asked(http, headers, body):
    # Tries again only so that the load goes on: whatever is no whole answer is counted.
    while time.monotonic() < until_s + 60:
        try:
            async with http.stream("POST", f"{url}/v1/chat/completions", headers=headers, json=body) as answer:
                text = (await answer.aread()).decode()
        except httpx2.HTTPError as error:
            seen[f"broken: {type(error).__name__}"] += 1
            return
        if answer.status_code == 200:
            whole = text.endswith("data: [DONE]\\n\\n") if body["stream"] else "usage" in json.loads(text)
            seen["whole" if whole else "cut"] += 1
            return
        seen[f"status {answer.status_code}: {text}"] += 1
        if answer.status_code != 503:
            return
        await asyncio.sleep(min(float(answer.headers.get("retry-after", 1)), 1.0))
    seen["given up"] += 1

async def program(http, number):
    global longest_s
    messages = []
    while time.monotonic() < until_s:
        messages.append({"role": "user", "content": "w1 w2 w3 w4"})
        tokens = 400 if number == 0 else 40  # one of them is always in the middle of a long stream
        body = {"model": "simulated", "messages": messages, "max_tokens": tokens, "min_tokens": tokens}
        headers = {"Authorization": f"Bearer {key}", "X-Program-ID": f"program-{number}"}
        began_s = time.monotonic()
        await asked(http, headers, {**body, "ignore_eos": True, "stream": number % 2 == 0})
        longest_s = max(longest_s, time.monotonic() - began_s)
        messages.append({"role": "assistant", "content": "w5 w6"})
        await asyncio.sleep(0.1)

async def main():
    async with httpx2.AsyncClient(timeout=120) as http:
        await asyncio.gather(*(program(http, number) for number in range(programs_count)))
    print(json.dumps({**seen, "longest_s": round(longest_s, 1)}))

asyncio.run(main())
"""


@dataclass(frozen=True)
class Deployment:
    """The proxy in a namespace, with keys."""

    namespace: Namespace
    key: str
    admin_key: str

    def call(self, method: str, path: str, body: Json | None = None) -> tuple[int, Any]:
        """Ask the proxy from within its pod."""
        text = "" if body is None else json.dumps(body)
        told = self.namespace.kubectl(
            "exec", "deployment/thunderagent", "--", "python3", "-c", CALL, method, path, self.admin_key, text
        )
        status, answer = json.loads(told)
        return status, answer

    def pods(self) -> list[str]:
        """Return the names of the proxy's pods, including ending ones."""
        found = self.namespace.read("pods", "--selector=app.kubernetes.io/name=thunderagent")
        return [each["metadata"]["name"] for each in found["items"]]


@pytest.fixture
def deployment(restricted: Namespace, tmp_path: Path, require_real: Callable[[str], NoReturn]) -> Deployment:
    """Follow `docs/how-to/kubernetes.md`, and wait until it is ready."""
    if len(restricted.access.proxy_images) < 2:
        require_real("KUBERNETES_TEST_PROXY_IMAGES names no two images of thunderagent")
    keys = {name: key_of(name) for name in ("agents", "operator")}
    secrets = [
        f"--from-literal=THUNDERAGENT_{kind}_KEYS={keys[name][1]}"
        for kind, name in (("API", "agents"), ("ADMIN", "operator"))
    ]
    restricted.kubectl("create", "secret", "generic", "thunderagent-keys", *secrets)
    for folder in ("vllm", "."):
        restricted.kubectl("apply", "--filename=-", given=manifests(restricted, tmp_path / "deploy", folder))
    for workload in ("statefulset/vllm", "deployment/thunderagent"):
        await_rollout(restricted, workload)
    return Deployment(restricted, keys["agents"][0], keys["operator"][0])


def await_rollout(namespace: Namespace, workload: str) -> None:
    """Wait until all its pods are new and ready; report their events otherwise."""
    try:
        namespace.kubectl("rollout", "status", workload, f"--timeout={WITHIN_S:g}s")
    except AssertionError as error:
        error.add_note(namespace.kubectl("get", "pods,events"))
        raise


def key_of(name: str) -> tuple[str, str]:
    """Return a key and its line for the configuration, as `thunderagent key` makes them."""
    command = [sys.executable, "-m", "thunderagent", "key", name]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    return said[0].split()[-1], said[1].split('"')[1]


def manifests(namespace: Namespace, copy: Path, folder: str) -> list[Json]:
    """Return the objects of a kustomization, in this namespace and with these images."""
    if not copy.exists():
        shutil.copytree(DEPLOY, copy)
        settings = copy / "thunderagent.toml"
        shipped = settings.read_text().replace('"thunderagent/', f'"{namespace.name}/')
        settings.write_text(f'sandboxes = ["kubernetes"]\nsandbox_specs = true\n{shipped}')
        whole = copy / "kustomization.yaml"
        made = yaml.safe_load(whole.read_text())
        name, _, tag = namespace.access.proxy_images[0].rpartition(":")
        made["images"] = [{"name": "thunderagent", "newName": name, "newTag": tag}]
        made["resources"].append("sandboxes-rbac.yaml")
        whole.write_text(yaml.safe_dump(made))
        for each in (whole, copy / "vllm/kustomization.yaml"):
            each.write_text(each.read_text().replace("namespace: thunderagent", f"namespace: {namespace.name}"))
        space = copy / "namespace.yaml"
        space.write_text(space.read_text().replace("name: thunderagent", f"name: {namespace.name}"))
    found = list(yaml.safe_load_all(namespace.access.kubectl("kustomize", str(copy / folder))))
    for each in found:
        if each["kind"] == "PodDisruptionBudget" and namespace.access.version < (1, 21):
            each["apiVersion"] = "policy/v1beta1"
        if each["kind"] == "StatefulSet":
            simulate(each["spec"], namespace.access.proxy_images[0])
    return found


def simulate(spec: Json, image: str) -> None:
    """Replace vLLM with a simulated engine, without its GPU, its model and its two minutes of grace."""
    del spec["volumeClaimTemplates"]
    pod = spec["template"]["spec"]
    pod["volumes"] = []
    (container,) = pod["containers"]
    for name in ("command", "env", "volumeMounts", "resources", "lifecycle"):
        container.pop(name)
    container.update(image=image, args=["engine", "--host=0.0.0.0", "--port=8000", "--kv-tokens=64000"])
    container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


async def test_deployment_serves_scales_makes_sandboxes_and_is_upgraded_under_load(deployment: Deployment) -> None:
    """No turn fails while the image changes; the sandboxes of a killed pod are removed too."""
    namespace = deployment.namespace

    def up_count() -> int:
        return sum(each["up"] for each in deployment.call("GET", "/replicas")[1]["replicas"])

    await until_it_says(lambda: up_count() == 2, within_s=WITHIN_S)
    namespace.kubectl("scale", "statefulset/vllm", "--replicas=3")
    await until_it_says(lambda: up_count() == 3, within_s=WITHIN_S)

    (before,) = deployment.pods()
    start_load(deployment)
    await until_it_says(lambda: deployment.call("GET", "/programs/program-3")[0] == 200, within_s=WITHIN_S)
    namespace.kubectl("set", "image", "deployment/thunderagent", f"thunderagent={namespace.access.proxy_images[1]}")
    await_rollout(namespace, "deployment/thunderagent")
    await until_it_says(lambda: before not in deployment.pods(), within_s=WITHIN_S)
    await until_it_says(lambda: phase_of(namespace, "load") in {"Succeeded", "Failed"}, within_s=WITHIN_S)
    seen = json.loads(namespace.kubectl("logs", "load").splitlines()[-1])
    print(f"\nan upgrade under the load of {PROGRAMS_COUNT} programs: {seen}")
    assert set(seen) == {"whole", "longest_s"}
    assert seen["whole"] > 10 * PROGRAMS_COUNT

    spec = {"image": namespace.access.sandbox_image, "run_as_user": 1000, "driver": "kubernetes"}
    status, answer = deployment.call("POST", "/programs/p1/sandboxes", {"spec": spec})
    assert status == 202, answer
    await until_it_says(lambda: stage_of(deployment, "p1") in {"ready", "in_use"}, within_s=WITHIN_S)
    (job,) = namespace.names("jobs")
    (owner,) = namespace.read("job", job)["metadata"]["ownerReferences"]
    assert [owner["name"]] == deployment.pods()
    namespace.kubectl("delete", "pod", owner["name"], "--grace-period=0", "--force")
    await until_it_says(lambda: not namespace.names("jobs"), within_s=WITHIN_S)


def start_load(deployment: Deployment) -> None:
    """Run programs against the Service, from a pod of the namespace."""
    namespace = deployment.namespace
    address = namespace.read("service", "thunderagent")["spec"]["clusterIP"]
    arguments = [f"http://{address}:8300", deployment.key, str(PROGRAMS_COUNT), str(LOAD_S)]
    container = {
        "name": "load",
        "image": namespace.access.proxy_images[0],
        "command": ["python3", "-c", LOAD.replace("$", "$$"), *arguments],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "securityContext": security, "containers": [container]}
    namespace.kubectl(
        "create",
        "--filename=-",
        given={"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "load"}, "spec": spec},
    )


def phase_of(namespace: Namespace, pod: str) -> str:
    return str(namespace.read("pod", pod)["status"]["phase"])


def stage_of(deployment: Deployment, program_id: str) -> str:
    (report,) = deployment.call("GET", f"/programs/{program_id}/sandboxes")[1]["sandboxes"]
    assert report["stage"] != "failed", report["why"]
    return str(report["stage"])
