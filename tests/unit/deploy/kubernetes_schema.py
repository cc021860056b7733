"""Check manifests as a Kubernetes API server would, without one: by the models of its Python client.

The client is generated from the API's OpenAPI document, so its models have for each field its name on the wire, its
type, and whether it is required. Other rules (an enum's values, a pattern) are not checked here.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from kubernetes import client

if TYPE_CHECKING:
    from collections.abc import Iterator

Json = dict[str, Any]

MODELS = {
    ("v1", "ConfigMap"): "V1ConfigMap",
    ("v1", "Namespace"): "V1Namespace",
    ("v1", "Service"): "V1Service",
    ("v1", "ServiceAccount"): "V1ServiceAccount",
    ("apps/v1", "Deployment"): "V1Deployment",
    ("apps/v1", "StatefulSet"): "V1StatefulSet",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "V2HorizontalPodAutoscaler",
    ("networking.k8s.io/v1", "NetworkPolicy"): "V1NetworkPolicy",
    ("policy/v1", "PodDisruptionBudget"): "V1PodDisruptionBudget",
    ("rbac.authorization.k8s.io/v1", "Role"): "V1Role",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "V1RoleBinding",
}
SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "datetime": (str, datetime),
    "object": (str, int),  # in the schemas here: a number or a name, for example of a port
}

# The Prometheus operator's own kind, for which no client has a model: the useful part of its API reference. A text is a
# type; a list has the shape of its items; a name ending in "!" is required.
SERVICE_MONITOR: Json = {
    "apiVersion!": "str",
    "kind!": "str",
    "metadata!": "V1ObjectMeta",
    "spec!": {
        "selector!": "V1LabelSelector",
        "namespaceSelector": {"any": "bool", "matchNames": ["str"]},
        "jobLabel": "str",
        "targetLabels": ["str"],
        "endpoints!": [
            {
                "port": "str",
                "path": "str",
                "scheme": "str",
                "interval": "str",
                "scrapeTimeout": "str",
                "honorLabels": "bool",
                "authorization": {"type": "str", "credentials": "V1SecretKeySelector"},
            }
        ],
    },
}
# KEDA's own kind, from its reference of ScaledObject (2.x), in the same way.
SCALED_OBJECT: Json = {
    "apiVersion!": "str",
    "kind!": "str",
    "metadata!": "V1ObjectMeta",
    "spec!": {
        "scaleTargetRef!": {"apiVersion": "str", "kind": "str", "name!": "str"},
        "pollingInterval": "int",
        "cooldownPeriod": "int",
        "minReplicaCount": "int",
        "maxReplicaCount": "int",
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": "V2HorizontalPodAutoscalerBehavior"}},
        "triggers!": [
            {
                "type!": "str",
                "name": "str",
                "metricType": "str",
                "metadata!": {"serverAddress!": "str", "query!": "str", "threshold!": "str", "namespace": "str"},
            }
        ],
    },
}
# The Gateway API Inference Extension's, from its reference of InferencePool (v1), in the same way.
INFERENCE_POOL: Json = {
    "apiVersion!": "str",
    "kind!": "str",
    "metadata!": "V1ObjectMeta",
    "spec!": {
        "selector!": {"matchLabels!": {"app.kubernetes.io/name": "str"}},
        "targetPorts!": [{"number!": "int"}],
        "endpointPickerRef!": {"name!": "str", "port": {"number!": "int"}, "failureMode": "str"},
    },
}
CUSTOM = {
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
}


def problems(manifest: Json) -> list[str]:
    """Return the parts that an API server would refuse or, worse, drop silently; each with its place."""
    kind = (manifest.get("apiVersion"), manifest.get("kind"))
    if kind in CUSTOM:
        return list(_shape_problems(manifest, CUSTOM[kind], ""))
    if kind not in MODELS:
        return [f"there is no {kind[1]} in {kind[0]}"]
    return list(_problems(manifest, MODELS[kind], ""))


def _problems(value: object, kind: str, place: str) -> Iterator[str]:
    if kind in SCALARS:
        if not isinstance(value, SCALARS[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{place}: {value!r} is no {kind}"
    elif match := re.fullmatch(r"list\[(.+)\]", kind):
        yield from _list_problems(value, match[1], place)
    elif match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            yield f"{place}: {value!r} is no mapping"
            return
        for key, each in value.items():
            yield from _problems(key, "str", place)
            yield from _problems(each, match[1], f"{place}.{key}")
    else:
        yield from _model_problems(value, kind, place)


def _list_problems(value: object, kind: str, place: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{place}: {value!r} is no list"
        return
    for number, each in enumerate(value):
        yield from _problems(each, kind, f"{place}[{number}]")


def _model_problems(value: object, kind: str, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place}: {value!r} is no {kind}"
        return
    fields, required = _fields_of(kind)
    yield from (f"{place}.{name}: no such field in {kind}" for name in value if name not in fields)
    yield from (f"{place}.{name}: missing" for name in sorted(required - value.keys()))
    for name, each in value.items():
        if name in fields:
            yield from _problems(each, fields[name], f"{place}.{name}")


@cache
def _fields_of(kind: str) -> tuple[dict[str, str], frozenset[str]]:
    """Return a model's fields with their types, by name on the wire, and the required ones."""
    model = getattr(client, kind)
    lenient = client.Configuration()
    lenient.client_side_validation = False
    instance = model(local_vars_configuration=lenient)
    lenient.client_side_validation = True
    required = set()
    for attribute, name in model.attribute_map.items():
        try:
            setattr(instance, attribute, None)
        except ValueError:
            required.add(name)
    return {model.attribute_map[each]: kind for each, kind in model.openapi_types.items()}, frozenset(required)


def _shape_problems(value: object, shape: object, place: str) -> Iterator[str]:
    if isinstance(shape, str):
        yield from _problems(value, shape, place)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
            return
        for number, each in enumerate(value):
            yield from _shape_problems(each, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{place}: {value!r} is no mapping"
            return
        fields = {name.removesuffix("!"): inner for name, inner in shape.items()}
        yield from (f"{place}.{name}: no such field" for name in value if name not in fields)
        yield from (f"{place}.{n[:-1]}: missing" for n in shape if n.endswith("!") and n[:-1] not in value)
        for name, each in value.items():
            if name in fields:
                yield from _shape_problems(each, fields[name], f"{place}.{name}")
