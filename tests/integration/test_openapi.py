"""The OpenAPI document against a running proxy: requests that follow it get answers that follow it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from thunderagent.config import ENVIRONMENT_PREFIX
from thunderagent.proxy.admin.openapi import EVENTS_TYPE, OPERATIONS, Operation
from thunderagent.proxy.gate.keys import mint_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES_COUNT = int(os.environ.get("EXAMPLES", "50")) // 10
ENDING = [operation for operation in OPERATIONS if operation.answer_type != EVENTS_TYPE]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ADMIN_KEY, ADMIN_LINE = mint_key("ops")
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


@contextmanager
def running(name: str, *options: str) -> Iterator[str]:
    """Run a command that serves during the block; yield its URL."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
    process = subprocess.Popen(
        [sys.executable, "-m", "thunderagent", name, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield re.findall(r"http://[\w.:]+\d", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a proxy with a program, and with sandboxes that no service makes."""
    file: Path = tmp_path_factory.mktemp("openapi") / "thunderagent.toml"
    urls = 'prepare_url = "http://127.0.0.1:9/"\nreclaim_url = "http://127.0.0.1:9/"\n'  # nobody listens there
    file.write_text(f'[sandbox_templates.there]\ndriver = "callback"\n{urls}')
    keys = ("--admin-keys", ADMIN_LINE, "--bearer-programs", "true")
    sandboxes = ("--config", str(file), "--sandboxes", "callback", "--sandbox-specs", "false")
    policy = ("--policy", "passthrough", "--grace-s", "0")  # under this policy no lease has to be waited for
    with running("engine") as engine, running("serve", "--backends", engine, *keys, *sandboxes, *policy) as proxy:
        with httpx2.Client(base_url=proxy, headers=HEADERS, timeout=30) as client:
            while client.get("/ready").status_code != 200:
                pass
            turn = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
            assert client.post("/p/acting/v1/chat/completions", json=turn).status_code == 200
        yield proxy


@pytest.fixture(scope="module")
def api(url: str) -> Any:
    """Read the document strictly: no answer has a field that the document lacks."""
    document = httpx2.get(f"{url}/openapi.json", timeout=30).json()
    schemas = document["components"]["schemas"]
    asked = [each["requestBody"] for each in _operations(document) if "requestBody" in each]
    of_bodies = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(asked)))
    for name, schema in schemas.items():
        if name not in of_bodies and "properties" in schema:
            schema["additionalProperties"] = False
    read = schemathesis.openapi.from_dict(document)
    read.config.update(base_url=url)
    return read


def _operations(document: Any) -> Iterator[Any]:
    for operations in document["paths"].values():
        yield from operations.values()


def test_the_document_can_be_read_without_a_key(url: str) -> None:
    """It also says how to send one, and what each operation does."""
    document = httpx2.get(f"{url}/openapi.json", timeout=30).json()
    assert document["openapi"] == "3.1.0"
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for operation in _operations(document):
        assert operation["summary"].endswith(".")
        assert "Key, where keys are configured: " in operation["description"]


@pytest.mark.parametrize(
    ("path", "where"),
    [("/programs/acting", "a program that holds memory"), ("/programs?limit=1", "a page"), ("/replicas", "replicas")],
)
def test_every_read_answer_matches_its_schema(api: Any, url: str, path: str, where: str) -> None:
    """The reports are of real programs, which no random id finds, and which "all" releases below."""
    operation = api[re.sub("/acting$", "/{program_id}", path.partition("?")[0])]["GET"]
    answer = httpx2.get(url + path, headers=HEADERS, timeout=30)
    assert answer.status_code == 200, where
    operation.validate_response(answer)


@pytest.mark.parametrize(
    ("method", "path", "body", "template"),
    [
        (
            "POST",
            "/programs",
            {"program_id": "opened", "parent_id": "acting", "sandboxes": [{"template": "there"}]},
            "",
        ),
        ("GET", "/programs/opened/sandboxes", None, "/programs/{program_id}/sandboxes"),
        ("GET", "/sandboxes", None, ""),
        ("POST", "/leases", {"program_id": "leased", "parent_id": "acting", "tenant": "t", "patience_s": 60}, ""),
        ("GET", "/programs?tenant=t&search=LEAS&sort=-claim", None, ""),
        ("GET", "/programs/leased", None, "/programs/{program_id}"),
        ("GET", "/queue", None, ""),
        ("POST", "/weight_sync/begin", {"weight_version": 3}, ""),
        ("POST", "/weight_sync/end", {}, ""),
    ],
)
def test_every_write_answer_matches_its_schema(
    api: Any, url: str, method: str, path: str, body: Any, template: str
) -> None:
    """The same holds for what exists afterwards: a token, a sandbox, a lease."""
    answer = httpx2.request(method, url + path, json=body, headers=HEADERS, timeout=30)
    assert answer.status_code == 200, answer.text
    api[template or path.partition("?")[0]][method].validate_response(answer)
    if path == "/programs":
        assert answer.json()["token"].startswith("tat_")
    if path.startswith("/programs?"):
        assert [program["program_id"] for program in answer.json()["programs"]] == ["leased"]


def _takes(operation: Operation) -> bool:
    """Say whether an operation can be asked wrongly."""
    return bool(operation.body or operation.query or "{" in operation.path)


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        *(pytest.param(each, POSITIVE, id=f"{each.method} {each.path}") for each in ENDING),
        *(pytest.param(each, NEGATIVE, id=f"rubbish to {each.method} {each.path}") for each in ENDING if _takes(each)),
    ],
)
def test_each_operation_answers_as_described(operation: Operation, mode: GenerationMode, api: Any) -> None:
    """Requests have values that the operation takes, and others."""
    cases = api[operation.path][operation.method].as_strategy(generation_mode=mode)

    @settings(max_examples=EXAMPLES_COUNT, database=None, deadline=None, suppress_health_check=HealthCheck)
    @given(case=cases)
    def ask(case: Any) -> None:
        case.call_and_validate(headers=HEADERS, checks=CHECKS, timeout=30)

    ask()


@pytest.fixture(scope="module")
def cell_urls() -> Iterator[tuple[str, str]]:
    """Run a scheduler and a gateway, with a program; yield both URLs once the gateway polls."""
    keys = ("--admin-keys", ADMIN_LINE)
    with (
        running("engine") as engine,
        running(
            "scheduler", "--backends", engine, *keys, "--policy", "passthrough", "--poll-interval-s", "0.1"
        ) as leader,
        running("gateway", "--schedulers", leader, "--scheduler-key", ADMIN_KEY, *keys) as front,
        httpx2.Client(base_url=front, headers=HEADERS, timeout=30) as client,
    ):
        while client.get("/ready").status_code != 200:
            pass
        turn = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert client.post("/p/there/v1/chat/completions", json=turn).status_code == 200
        while client.get("/summary").json()["cell"]["polled_by_gateways_count"] != 1:
            pass
        yield leader, front


ANSWERED_BY_BOTH = {"/health", "/ready", "/metrics"}
"""Each process's own reports."""

FORWARDED = [
    each
    for each in OPERATIONS
    if each.path not in ANSWERED_BY_BOTH and each.answer_type != EVENTS_TYPE and not each.path.startswith("/v1/")
]


OF_EACH = re.compile("samples|lease_id|.*_s")


def shape_of(answer: Any) -> Any:
    """Return an answer without what differs each time: fractions, ages, samples, leases."""
    if isinstance(answer, dict):
        return {name: shape_of(each) for name, each in answer.items() if not OF_EACH.fullmatch(name)}
    if isinstance(answer, list):
        return [shape_of(each) for each in answer]
    return None if isinstance(answer, float) else answer


@pytest.mark.parametrize("operation", FORWARDED, ids=lambda each: f"{each.method} {each.path}")
def test_a_gateway_answers_as_its_leader_does(cell_urls: tuple[str, str], operation: Operation) -> None:
    """Programs, stories, replicas, keys, the dashboard's data: both give the same answer."""
    path = re.sub(r"\{program_id\}", "there" if operation.method == "GET" else "nobody", operation.path)
    path = re.sub(r"\{[^}]*\}", "nothing", path)
    answers = []
    leader, front = cell_urls
    for url in (leader, leader, front):  # the first request may change something
        with httpx2.Client(base_url=url, headers=HEADERS, timeout=30) as client:
            content = None if operation.method in ("GET", "DELETE") else b"{}"
            answers.append(client.request(operation.method, path, content=content))
    _, of_leader, of_gateway = answers
    assert of_gateway.status_code == of_leader.status_code
    assert of_gateway.headers.get("Content-Type") == of_leader.headers.get("Content-Type")
    if "json" in of_leader.headers.get("Content-Type", ""):
        assert shape_of(of_gateway.json()) == shape_of(of_leader.json())


def test_processes_say_their_part(cell_urls: tuple[str, str]) -> None:
    """They say it in `/health`, in the metrics, and in the dashboard."""
    leader, front = cell_urls
    with httpx2.Client(headers=HEADERS, timeout=30) as client:
        healths = [client.get(f"{url}/health").json() for url in cell_urls]
        assert [(each["role"], each["epoch"]) for each in healths] == [("leader", 1), ("gateway", 1)]
        of_leader, of_gateway = (client.get(f"{url}/metrics").text for url in cell_urls)
        for line in ("leads 1.0", "epoch 1.0", "gateways 1.0", "links 1.0", "polled_by_gateways 1.0"):
            assert f"\nthunderagent_scheduler_{line}\n" in of_leader
        assert "\nthunderagent_gateway_polls 1.0\n" in of_gateway
        for url in cell_urls:
            cell = client.get(f"{url}/summary").json()["cell"]
            assert (cell["role"], cell["links_count"], cell["has_store"]) == ("leader", 1, False)
            assert client.get(f"{url}/dashboard").text == client.get(f"{leader}/dashboard").text
        told = subprocess.run(
            [sys.executable, "-m", "thunderagent", "status", "--url", front],
            env={**os.environ, "THUNDERAGENT_KEY": ADMIN_KEY},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert re.search(r"scheduler leader, epoch 1 +gateways 1,\s+links 1,\s+engines polled by them 1", told), told
