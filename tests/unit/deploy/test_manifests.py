"""The Kubernetes manifests: each is valid by the API's schemas, and what one names of another exists."""

from __future__ import annotations

import argparse
import configparser
import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.integration.kubernetes_api import LABEL_KEY, LABEL_VALUE, NAME
from tests.unit.deploy.kubectl import kubectl
from tests.unit.deploy.kubernetes_schema import problems
from thunderagent.backends.discovery.base import PodSelection
from thunderagent.cli.command_line import build_parser
from thunderagent.cli.handover import add_arguments
from thunderagent.config import ServeConfig
from thunderagent.picker.command import Options, check_port
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.scaling import check_gateways
from thunderagent.serving.listening import CLOSE_S
from thunderagent.serving.security import check_security
from thunderagent.tools.base import SANDBOX_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy/kubernetes"
SCALED = ROOT / "deploy/kubernetes-scaled"
KUSTOMIZATIONS = [*(KUBERNETES / name for name in (".", "vllm", "monitoring", "autoscaling", "picker")), SCALED]
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
SECRETS = {"thunderagent-keys", "thunderagent-link", "hf-token"}
"""Objects that users make as documented."""


def objects_in(folder: Path) -> list[Json]:
    """Return the objects of a kustomization, without namespaces and suffixes of names."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found: list[Json] = []
    for resource in kustomization.get("resources", ()):
        path = (folder / resource).resolve()
        found += objects_in(path) if path.is_dir() else [each for each in yaml.safe_load_all(path.read_text()) if each]
    for generator in kustomization.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in generator["files"]}
        labels = kustomization.get("generatorOptions", {}).get("labels", {})
        metadata = {"name": generator["name"], "labels": labels}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return found


SANDBOXES_RBAC = list(yaml.safe_load_all((KUBERNETES / "sandboxes-rbac.yaml").read_text()))
AUTOSCALER = yaml.safe_load((KUBERNETES / "autoscaling/horizontal-pod-autoscaler.yaml").read_text())


def id_of(manifest: Json) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


MADE = [*SANDBOXES_RBAC, AUTOSCALER, *(each for folder in KUSTOMIZATIONS for each in objects_in(folder))]
OBJECTS = list({id_of(each): each for each in MADE}.values())
"""Each once: a kustomization may build on another one."""


def one(kind: str, name: str) -> Json:
    (found,) = [each for each in OBJECTS if id_of(each) == f"{kind}/{name}"]
    return found


def of_kind(*kinds: str) -> list[Json]:
    return [each for each in OBJECTS if each["kind"] in kinds]


def values_of(value: object, key: str) -> Iterator[Any]:
    """Yield every value of a key at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from values_of(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from values_of(inner, key)


def pod_of(workload: Json) -> Json:
    template: Json = workload["spec"]["template"]
    return template


def container_of(workload: Json) -> Json:
    (container,) = pod_of(workload)["spec"]["containers"]
    return dict(container)


WORKLOADS = of_kind("Deployment", "StatefulSet")
OURS = [each for each in WORKLOADS if container_of(each)["image"] == "thunderagent"]
"""The proxy (or gateways), the schedulers, the picker."""


def labels_of(workload: Json) -> dict[str, str]:
    """Return the labels of a workload's pods."""
    labels: dict[str, str] = pod_of(workload)["metadata"]["labels"]
    return labels


def selects(selector: Json, labels: dict[str, str]) -> bool:
    """Say whether a label selector selects an object with these labels."""
    held = {
        "In": lambda each: labels.get(each["key"]) in each["values"],
        "DoesNotExist": lambda each: each["key"] not in labels,
    }
    expressions = selector.get("matchExpressions", ())
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        held[each["operator"]](each) for each in expressions
    )


def lets_in(target: Json, port: str, pod: dict[str, str], namespace: dict[str, str] | None = None) -> bool:
    """Say whether a pod with these labels reaches a port; it is in this namespace, or in one with those labels."""
    policies = [
        each["spec"] for each in of_kind("NetworkPolicy") if selects(each["spec"]["podSelector"], labels_of(target))
    ]
    assert policies, "every pod of the cluster reaches it"
    sources = [
        source
        for policy in policies
        for rule in policy["ingress"]
        if port in [each["port"] for each in rule["ports"]]
        for source in rule["from"]
    ]
    if namespace is None:
        return any("namespaceSelector" not in each and selects(each["podSelector"], pod) for each in sources)
    return any("namespaceSelector" in each and selects(each["namespaceSelector"], namespace) for each in sources)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ServeConfig:
    """The ConfigMap's configuration."""
    for name in [name for name in os.environ if name.startswith("THUNDERAGENT_")]:
        monkeypatch.delenv(name)
    return ServeConfig.load(KUBERNETES / "thunderagent.toml")


@pytest.mark.parametrize("manifest", OBJECTS, ids=id_of)
def test_a_manifest_is_valid_by_the_schemas(manifest: Json) -> None:
    """Every field exists and has its type, and no required one is missing; names and labels are well formed."""
    assert problems(manifest) == []
    assert NAME.fullmatch(manifest["metadata"]["name"])
    for labels in (*values_of(manifest, "labels"), *values_of(manifest, "matchLabels")):
        assert all(LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value) for key, value in labels.items())
    for amounts in (*values_of(manifest, "requests"), *values_of(manifest, "limits")):
        assert all(QUANTITY.fullmatch(amount) for amount in amounts.values())


def _without(manifest: Json, *place: str | int) -> Json:
    *path, last = place
    inner: Any = manifest
    for key in path:
        inner = inner[key]
    del inner[last]
    return manifest


def _with(manifest: Json, value: object, *place: str | int) -> Json:
    *path, last = place
    inner: Any = manifest
    for key in path:
        inner = inner[key]
    inner[last] = value
    return manifest


POD = ("spec", "template", "spec")
MAIN = (*POD, "containers", 0)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: _with(m, 5, *MAIN, "livenessProbe", "periodSecond"), "livenessProbe.periodSecond: no such field"),
        (
            lambda m: _with(m, "5", *POD, "terminationGracePeriodSeconds"),
            "terminationGracePeriodSeconds: '5' is no int",
        ),
        (lambda m: _with(m, True, "spec", "replicas"), "replicas: True is no int"),
        (lambda m: _with(m, 1, *MAIN, "resources", "requests", "cpu"), "requests.cpu: 1 is no str"),
        (lambda m: _with(m, {}, *MAIN, "env"), "env: {} is no list"),
        (lambda m: _without(m, *MAIN, "name"), "containers[0].name: missing"),
        (lambda m: _without(m, "spec", "selector"), "spec.selector: missing"),
        (lambda m: _with(m, "v1", "apiVersion"), "there is no Deployment in v1"),
        (lambda m: _with(m, None, "spec"), "spec: None is no V1DeploymentSpec"),
    ],
)
def test_manifest_that_an_api_server_would_refuse_is_found(spoil: Callable[[Json], Json], said: str) -> None:
    """The schemas catch misspelt, missing and mistyped fields."""
    assert any(said in problem for problem in problems(spoil(copy.deepcopy(one("Deployment", "thunderagent")))))


def test_a_custom_kind_is_judged_as_well() -> None:
    """The schemas also check the operator's ServiceMonitor."""
    monitor = copy.deepcopy(one("ServiceMonitor", "thunderagent"))
    monitor["spec"]["endpoints"][0]["prot"] = "http"
    del monitor["spec"]["selector"]
    assert problems(monitor) == [".spec.selector: missing", ".spec.endpoints[0].prot: no such field"]


def test_autoscalers_scale_the_engines_by_the_same_figures() -> None:
    """KEDA's autoscaler and the other one use the same; a StatefulSet of that name exists."""
    scaled = one("ScaledObject", "vllm")["spec"]
    plain = AUTOSCALER["spec"]
    assert scaled["scaleTargetRef"] == plain["scaleTargetRef"]
    assert one(plain["scaleTargetRef"]["kind"], plain["scaleTargetRef"]["name"])["apiVersion"] == "apps/v1"
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (plain["minReplicas"], plain["maxReplicas"])
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == plain["behavior"]
    assert {trigger["metricType"] for trigger in scaled["triggers"]} == {"Value"}
    named = {re.search(r"thunderagent_\w+", each["metadata"]["query"])[0]: each for each in scaled["triggers"]}  # type: ignore[index]
    for metric in (each["external"] for each in plain["metrics"]):
        trigger = named.pop(metric["metric"]["name"])
        assert metric["target"] == {"type": trigger["metricType"], "value": trigger["metadata"]["threshold"]}
    assert named == {}


def test_every_file_is_in_a_kustomization() -> None:
    """Every file is applied or offered, so none escapes the tests."""
    text = "".join((folder / "kustomization.yaml").read_text() for folder in KUSTOMIZATIONS)
    for path in (*KUBERNETES.rglob("*.*"), *SCALED.rglob("*.*")):
        named = f"- {path.name}\n", f"- path: {path.name}\n", f"[{path.name}]"
        assert path.name == "kustomization.yaml" or any(each in text for each in named), path


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_kustomize_makes_the_same(folder: Path) -> None:
    """`kubectl apply -k` sends what is checked here, all of it in one namespace."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert [problem for each in made for problem in problems(each)] == []
    assert sorted(re.sub(r"-[a-z0-9]{10}$", "", id_of(each)) for each in made) == sorted(map(id_of, objects_in(folder)))
    assert {each["metadata"].get("namespace") for each in made if each["kind"] != "Namespace"} == {"thunderagent"}
    subjects = [subject["namespace"] for each in made for subject in each.get("subjects", ())]
    assert set(subjects) <= {"thunderagent"}


@pytest.mark.parametrize("workload", of_kind("Deployment", "StatefulSet"), ids=id_of)
def test_a_workload_is_of_one_piece(workload: Json) -> None:
    """It selects its own pods, mounts existing volumes, probes its own ports, and reads existing objects."""
    spec, container = pod_of(workload)["spec"], container_of(workload)
    assert workload["spec"]["selector"]["matchLabels"].items() <= pod_of(workload)["metadata"]["labels"].items()
    volumes = {each["name"] for each in spec.get("volumes", ())}
    volumes |= {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    ports = {each["name"] for each in container["ports"]}
    assert {probe["port"] for probe in values_of(container, "httpGet")} <= ports
    for name in values_of(spec, "configMap"):
        assert one("ConfigMap", name["name"])
    named = [each["name"] for key in ("secretRef", "secretKeyRef") for each in values_of(container, key)]
    assert set(named) <= SECRETS
    if "serviceAccountName" in spec:
        assert one("ServiceAccount", spec["serviceAccountName"])
    else:
        assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("service", of_kind("Service"), ids=id_of)
def test_a_service_leads_to_a_port_of_some_pods(service: Json) -> None:
    """Its selector selects one workload, which has the ports."""
    selector = service["spec"]["selector"].items()
    workloads = of_kind("Deployment", "StatefulSet")
    (found,) = [each for each in workloads if selector <= pod_of(each)["metadata"]["labels"].items()]
    ports = {each["name"]: each["containerPort"] for each in container_of(found)["ports"]}
    assert all(each["port"] == ports[each["targetPort"]] for each in service["spec"]["ports"])


@pytest.mark.parametrize("manifest", of_kind("PodDisruptionBudget", "NetworkPolicy"), ids=id_of)
def test_budgets_and_policies_are_about_pods_that_there_are(manifest: Json) -> None:
    """A selector that selects nothing would have no effect, silently."""
    selector = manifest["spec"].get("selector") or manifest["spec"]["podSelector"]
    pods = [pod_of(each)["metadata"]["labels"] for each in of_kind("Deployment", "StatefulSet")]
    assert sum(selector["matchLabels"].items() <= labels.items() for labels in pods) == 1


@pytest.mark.parametrize("workload", OURS, ids=id_of)
def test_the_monitor_finds_every_process_of_ours(workload: Json) -> None:
    """Each has a Service with metrics, which the monitor selects; Prometheus may reach the port."""
    monitor = one("ServiceMonitor", "thunderagent")["spec"]
    (port,) = [each["port"] for each in monitor["endpoints"]]
    (service,) = [
        each for each in of_kind("Service") if each["spec"]["selector"].items() <= labels_of(workload).items()
    ]
    assert port in {each["name"] for each in service["spec"]["ports"]}
    assert selects(monitor["selector"], service["metadata"]["labels"])
    assert lets_in(workload, port, {}, {"kubernetes.io/metadata.name": "monitoring"})


def test_the_monitor_finds_nothing_else() -> None:
    """A Service that it selects leads to a process of ours."""
    selector = one("ServiceMonitor", "thunderagent")["spec"]["selector"]
    found = [each for each in of_kind("Service") if selects(selector, each["metadata"]["labels"])]
    assert len(found) == len(OURS)


@pytest.mark.parametrize("binding", of_kind("RoleBinding"), ids=id_of)
def test_a_binding_gives_a_role_to_the_account(binding: Json) -> None:
    """Both exist, and in one namespace."""
    role = one("Role", binding["roleRef"]["name"])
    (subject,) = binding["subjects"]
    account = one(subject["kind"], subject["name"])
    places = [binding["metadata"], role["metadata"], account["metadata"], subject]
    assert {place["namespace"] for place in places} == {"default"}


def test_the_account_may_only_look_at_pods() -> None:
    """The default manifests let the proxy find replicas, and no more."""
    roles = [each for each in objects_in(KUBERNETES) if each["kind"] == "Role"]
    assert [rule for role in roles for rule in role["rules"]] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]


def test_the_proxy_s_pod_is_restricted() -> None:
    """It keeps to the strictest of Kubernetes' Pod Security Standards, and cannot write its own files."""
    deployment = one("Deployment", "thunderagent")
    pod, container = pod_of(deployment)["spec"]["securityContext"], container_of(deployment)["securityContext"]
    assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}\n" in (ROOT / "Dockerfile").read_text()


def test_the_service_s_variables_are_not_taken_for_the_configuration(
    monkeypatch: pytest.MonkeyPatch, config: ServeConfig
) -> None:
    """A Service called thunderagent would set THUNDERAGENT_PORT to an address, which the proxy refuses."""
    assert pod_of(one("Deployment", "thunderagent"))["spec"]["enableServiceLinks"] is False
    monkeypatch.setenv("THUNDERAGENT_PORT", "tcp://10.0.0.1:8300")
    with pytest.raises(Exception, match="THUNDERAGENT_PORT: "):
        ServeConfig.load(KUBERNETES / "thunderagent.toml")


def test_the_configuration_is_one_and_finds_the_engines(config: ServeConfig) -> None:
    """The ConfigMap's file is read by the proxy; its replicas are the example's pods, however many are scaled to."""
    assert config.backends == ()
    found = PodSelection.read(config.kubernetes_replicas)
    assert found.namespace == yaml.safe_load((KUBERNETES / "vllm/kustomization.yaml").read_text())["namespace"]
    name, _, value = found.selector.partition("=")
    (engines,) = [each for each in WORKLOADS if labels_of(each).get(name) == value]
    target = one("ScaledObject", "vllm")["spec"]["scaleTargetRef"]
    assert id_of(engines) == f"{target['kind']}/{target['name']}"
    ports = {each["name"]: each["containerPort"] for each in container_of(engines)["ports"]}
    assert f"--port={ports[found.port]}" in container_of(engines)["args"]
    assert one("Service", engines["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    (port,) = one("Service", "thunderagent")["spec"]["ports"]
    assert port["port"] == config.port
    mount, *_ = container_of(one("Deployment", "thunderagent"))["volumeMounts"]
    assert container_of(one("Deployment", "thunderagent"))["args"][2] == f"{mount['mountPath']}/thunderagent.toml"


def test_a_pod_has_time_to_end(config: ServeConfig) -> None:
    """Kubernetes waits for longer than the proxy: the delay, the grace period, and the closing."""
    proxy, engines = one("Deployment", "thunderagent"), one("StatefulSet", "vllm")
    assert config.shutdown_delay_s >= 5  # until the Service removed it; it must get the signal, so there is no preStop
    assert "lifecycle" not in container_of(proxy)
    least_s = config.shutdown_delay_s + config.grace_s + 2 * CLOSE_S
    assert pod_of(proxy)["spec"]["terminationGracePeriodSeconds"] > least_s
    command, before_s = container_of(engines)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod_of(engines)["spec"]["terminationGracePeriodSeconds"] > int(before_s) + 5


@pytest.mark.parametrize("name", ["thunderagent", "thunderagent-picker"])
def test_clients_reach_the_proxy_s_api_but_no_sandbox_does(name: str) -> None:
    """Code that agents run does not reach it; namespaces reach it by their label."""
    proxy = one("Deployment", name)
    assert lets_in(proxy, "http", {"app": "an-agent"})
    assert lets_in(proxy, "http", {}, {"thunderagent.clients": "true"})
    assert not lets_in(proxy, "http", {SANDBOX_LABEL: "s-1"})
    assert not lets_in(proxy, "http", {}, {"kubernetes.io/metadata.name": "default"})


def test_only_envoys_reach_the_picker_s_port_for_them() -> None:
    """Whoever calls there counts as an Envoy; Envoys carry the turns, so they reach the engines as well."""
    for target, port in ((one("Deployment", "thunderagent-picker"), "grpc"), (one("StatefulSet", "vllm"), "http")):
        assert lets_in(target, port, {"thunderagent.envoys": "true"})
        assert lets_in(target, port, {}, {"thunderagent.envoys": "true"})
        assert not lets_in(target, port, {"app": "an-agent"})
        assert not lets_in(target, port, {}, {"thunderagent.clients": "true"})


@pytest.mark.parametrize("workload", OURS, ids=id_of)
def test_each_process_of_ours_reaches_the_engines(workload: Json) -> None:
    """The proxy and the picker poll them, and so do gateways and a scheduler that stands by."""
    assert lets_in(one("StatefulSet", "vllm"), "http", labels_of(workload))
    assert lets_in(one("StatefulSet", "thunderagent-scheduler"), "http", labels_of(workload))


@pytest.mark.parametrize("policy", of_kind("NetworkPolicy"), ids=id_of)
def test_a_policy_is_about_ports_that_the_pods_have(policy: Json) -> None:
    """A rule for another port would admit nobody."""
    (target,) = [each for each in WORKLOADS if selects(policy["spec"]["podSelector"], labels_of(each))]
    named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert named <= {each["name"] for each in container_of(target)["ports"]}


def test_the_picker_starts_as_it_is_shipped_and_its_api_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the users' keys, finds the engines of the InferencePool, and accepts its options."""
    container = container_of(one("Deployment", "thunderagent-picker"))
    for name in [name for name in os.environ if name.startswith("THUNDERAGENT_")]:
        monkeypatch.delenv(name)
    args = build_parser().parse_args(container["args"])
    given = {name: value for name in ServeConfig.model_fields if (value := getattr(args, name, None)) is not None}
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == ["thunderagent-keys"]
    monkeypatch.setenv("THUNDERAGENT_API_KEYS", mint_key("agents")[1])
    monkeypatch.setenv("THUNDERAGENT_ADMIN_KEYS", mint_key("operator")[1])
    settings = ServeConfig.load(None, **given)
    check_security(settings)
    check_port(settings, Options.of(args))
    assert (settings.has_keys, settings.allow_open, settings.keys_name_tenants) == (True, False, False)
    pool = one("InferencePool", "engines")["spec"]
    found = PodSelection.read(settings.kubernetes_replicas)
    assert [f"{name}={value}" for name, value in pool["selector"]["matchLabels"].items()] == [found.selector]
    assert [str(each["number"]) for each in pool["targetPorts"]] == [found.port]


UNITS = sorted((ROOT / "deploy/systemd").iterdir())


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_waits_for_longer_than_the_proxy(path: Path) -> None:
    """Its limit covers the default grace period and the closing; a scheduler waits for no turn."""
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names are as written
    unit.read(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    default_s = 0 if "scheduler" in path.name else ServeConfig.model_fields["grace_s"].default
    assert float(unit["Service"]["TimeoutStopSec"]) > default_s + 2 * CLOSE_S


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_knows_each_word_of_a_unit(path: Path) -> None:
    """Its only complaint is that the program is not installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if path.stem.rstrip("@") in line]
    assert all("is not executable" in line for line in said), said


@pytest.fixture
def made_scaled() -> dict[str, Json]:
    """The overlay for several processes, with its patches."""
    done = subprocess.run([kubectl(), "kustomize", str(SCALED)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {id_of(each): each for each in yaml.safe_load_all(done.stdout)}


def settings_of(workload: Json, pod_ip: str = "10.0.0.7") -> dict[str, str]:
    """Return the variables of a workload's pod, without those of its Secrets."""
    given = {each["name"]: each["value"] for each in container_of(workload)["env"] if "value" in each}
    return {name: value.replace("$(POD_IP)", pod_ip) for name, value in given.items()}


def test_gateways_know_the_schedulers_by_name(
    made_scaled: dict[str, Json], config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know all of them; each part is configured as it may be with others, and with the users' keys."""
    gateways, schedulers = made_scaled["Deployment/thunderagent"], made_scaled["StatefulSet/thunderagent-scheduler"]
    service = made_scaled["Service/thunderagent-scheduler"]
    names = [f"thunderagent-scheduler-{number}" for number in range(schedulers["spec"]["replicas"])]
    port = service["spec"]["ports"][0]["port"]
    assert service["metadata"]["name"] == schedulers["spec"]["serviceName"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    for workload in (gateways, schedulers):
        assert container_of(workload)["image"] == "registry.example.com/thunderagent:0.1.1"
        with monkeypatch.context() as environment:
            secrets = {"THUNDERAGENT_API_KEYS": mint_key("a")[1], "THUNDERAGENT_ADMIN_KEYS": mint_key("b")[1]}
            for name, value in {**secrets, **settings_of(workload)}.items():
                environment.setenv(name, value)
            environment.delenv("THUNDERAGENT_SANDBOX_OWNER", raising=False)
            check_gateways(found := ServeConfig.load(KUBERNETES / "thunderagent.toml"))
        if workload is gateways:
            assert found.schedulers == tuple(f"http://{each}.thunderagent-scheduler:{port}" for each in names)
        else:
            assert found.reached_at == f"http://10.0.0.7:{port}"
            assert found.store is not None
            host = urlsplit(found.store.get_secret_value()).hostname
            assert f"Service/{host}" in made_scaled


def test_a_scheduler_hands_over_before_it_ends(made_scaled: dict[str, Json]) -> None:
    """A command asks it to; its readiness does not hinder an upgrade."""
    container = container_of(made_scaled["StatefulSet/thunderagent-scheduler"])
    *_, command = container["lifecycle"]["preStop"]["exec"]["command"]
    words = command.removesuffix(" || true").split()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert words[:2] == ["thunderagent", "handover"]
    assert parser.parse_args(words[2:]).url == f"http://127.0.0.1:{container['ports'][0]['containerPort']}"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    for name in ("thunderagent", "thunderagent-scheduler"):
        assert made_scaled[f"PodDisruptionBudget/{name}"]["spec"]["maxUnavailable"] == 1


def test_the_autoscaler_is_of_the_gateways(made_scaled: dict[str, Json]) -> None:
    """It scales by their CPU: its target exists, requests CPU, and never has fewer than two."""
    autoscaler = made_scaled["HorizontalPodAutoscaler/thunderagent"]["spec"]
    target = autoscaler["scaleTargetRef"]
    assert container_of(made_scaled[f"{target['kind']}/{target['name']}"])["resources"]["requests"]["cpu"]
    assert [each["resource"]["name"] for each in autoscaler["metrics"]] == ["cpu"]
    assert autoscaler["minReplicas"] == 2


def test_compose_waits_for_longer_than_the_proxy() -> None:
    """Its limit does as well; it publishes nothing beyond this machine."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    default_s = ServeConfig.model_fields["grace_s"].default
    scaled = yaml.safe_load((ROOT / "deploy/compose/scaled.yml").read_text())["services"]
    for service in (services["thunderagent"], services["thunderagent-gpu"], scaled["gateway-1"], scaled["gateway-2"]):
        assert float(service["stop_grace_period"].removesuffix("s")) > default_s + 2 * CLOSE_S
    published = [port for service in (*services.values(), *scaled.values()) for port in service.get("ports", ())]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)
