"""An API server answers badly: the known set stays, and the source says why."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.loopback import on_loopback
from tests.unit.backends.discovery.fakes import following
from thunderagent.backends.discovery.base import PodSelection, Wanted
from thunderagent.backends.discovery.kubernetes import Cluster, ClusterAccess, KubernetesSource
from thunderagent.errors import DiscoveryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def pod(name: str = "p", address: str = "10.0.0.1", *, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "5", **metadata},
        "spec": {"containers": [{"name": "e", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def page(*pods: Any, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "5", **metadata}, "items": list(pods)}


class Api:
    """Answers lists and watches from a script; its last list repeats, and a watch without a script stays silent."""

    def __init__(self) -> None:
        self.lists: list[Any] = []
        self.watches: list[list[Any]] = []
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str | None] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization"))
        if request.query.get("watch") == "true":
            response = web.StreamResponse()
            await response.prepare(request)
            if not self.watches:
                await asyncio.Event().wait()
            for event in self.watches.pop(0):
                await response.write((event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n")
            return response
        body = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(body, int):
            return web.json_response({"message": "oh no"}, status=body)
        return web.Response(body=body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    server = Api()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/inference/pods", server.answer)
    async with on_loopback(app, handler_cancellation=True, shutdown_timeout=0) as server.url:
        yield server


def source(api: Api, port: str = "8000", **access: Any) -> KubernetesSource:
    selection = PodSelection("inference", "app=vllm", port)
    return KubernetesSource(selection, ClusterAccess(**(access or {"api_url": api.url})), backoff_s=0.001)


A = Wanted("http://10.0.0.1:8000")


async def test_a_list_in_pages_is_one_set(api: Api) -> None:
    api.lists = [page(pod("a"), **{"continue": "more"}), page(pod("b", "fd00::1"))]
    async with following(source(api, "http")) as heard:
        await heard.until(lambda: heard.sets)
    assert heard.sets == [[A, Wanted("http://[fd00::1]:8000")]]
    assert api.queries[1]["continue"] == "more"
    assert {query["labelSelector"] for query in api.queries} == {"app=vllm"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (500, "answered 500: oh no"),
        (403, "the proxy lacks the right to list and watch pods: oh no"),
        (410, "expired while it was read"),
        (b"<html>", "gave an unexpected answer"),
        (b"[]", "gave an unexpected answer"),
        (b"5", "gave an unexpected answer"),
        ({"items": []}, "gave an unexpected answer"),
        (page(5), "gave an unexpected answer"),
        (page({"metadata": {}}), "gave an unexpected answer"),
    ],
)
async def test_a_list_that_is_none_tells_no_set(api: Api, answer: Any, message: str) -> None:
    """This holds at the start and after a good list; then it continues with the next good one."""
    api.lists = [answer, page(pod())]
    api.watches = [[{"type": "ERROR", "object": {"code": 410, "message": "too old"}}]]
    async with following(source(api)) as heard:
        await heard.until(lambda: len(heard.sets) == 2)
    assert message in heard.failures[0]
    assert heard.sets == [[A], [A]]


@pytest.mark.parametrize(
    "events",
    [
        [b"no json"],
        [5],
        [{"type": "ADDED"}],
        [{"type": "ADDED", "object": {}}],
        [{"type": "ERROR", "object": {"code": 500, "message": "oh"}}],
        [],
    ],
    ids=str,
)
async def test_a_watch_that_breaks_is_gone_on_with(api: Api, events: list[Any]) -> None:
    """Whatever breaks it, the set stays and the next change is noticed."""
    api.lists = [page(pod())]
    change = {"type": "ADDED", "object": pod("b", "10.0.0.2")}
    api.watches = [events, [change]]
    async with following(source(api)) as heard:
        await heard.until(lambda: heard.sets and len(heard.sets[-1]) == 2)
    assert all(A in wanted for wanted in heard.sets)


async def test_a_watch_goes_on_from_the_last_version_heard_of(api: Api) -> None:
    """Bookmarks count too."""
    api.lists = [page(pod())]
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}}
    api.watches = [[bookmark], []]
    async with following(source(api)) as heard:
        await heard.until(lambda: len(api.queries) >= 4)
    versions = [query["resourceVersion"] for query in api.queries if "watch" in query]
    assert versions[:3] == ["5", "77", "77"]


async def test_selected_pods_are_replicas(api: Api) -> None:
    """They were ready once, are not over, have an address and the port; a new pod may reuse an ending one's address."""
    done = pod("done", "10.0.0.9")
    done["status"]["phase"] = "Succeeded"
    nowhere = pod("nowhere")
    del nowhere["status"]["podIP"]
    portless = pod("portless", "10.0.0.8")
    portless["spec"] = {"containers": [{"name": "e"}]}
    going = pod("going", "10.0.0.1", deletionTimestamp="2026-11-22T00:00:00Z")
    early = pod("early", "10.0.0.3", ready=False)
    api.lists = [page(pod(), early, done, nowhere, portless, pod("stays", "10.0.0.5"))]
    api.watches = [
        [
            {"type": "MODIFIED", "object": pod("stays", "10.0.0.5", ready=False)},
            {"type": "ADDED", "object": going},
            {"type": "MODIFIED", "object": {**pod(), "metadata": {**pod()["metadata"], "deletionTimestamp": "now"}}},
            {"type": "DELETED", "object": pod()},
        ]
    ]
    stays = Wanted("http://10.0.0.5:8000")
    async with following(source(api, "http")) as heard:
        await heard.until(lambda: len(heard.sets) == 5)
    assert heard.sets == [
        [A, stays],
        [A, stays],
        [A, stays],
        [Wanted(A.url, is_draining=True), stays],
        [stays],
    ]


async def test_the_login_of_a_kubeconfig_is_sent(api: Api, tmp_path: Path) -> None:
    api.lists = [page(pod())]
    async with following(source(api, kubeconfig=kubeconfig_of(api.url, tmp_path))) as heard:
        await heard.until(lambda: heard.sets)
    assert set(api.tokens) == {"Bearer abc"}


async def test_without_a_usable_configuration_the_source_says_so(api: Api, tmp_path: Path) -> None:
    """A later one is taken."""
    kubeconfig = tmp_path / "config"
    async with following(source(api, kubeconfig=kubeconfig)) as heard:
        await heard.until(lambda: heard.failures)
        kubeconfig.write_text("rubbish")
        await heard.until(lambda: len(set(heard.failures)) > 1)
    assert all("no usable configuration for Kubernetes" in why for why in heard.failures)


def kubeconfig_of(url: str, folder: Path) -> Path:
    """Write a configuration that leads to a server."""
    file = folder / "config"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "k", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": "abc"}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            }
        )
    )
    return file


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return an environment without proxies."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return monkeypatch


@pytest.mark.parametrize("proxy", ["corp:3128", "socks9://corp:3128", "http://[::1"])
async def test_a_proxy_that_is_none_is_a_failure_of_the_source(
    api: Api, tmp_path: Path, environment: pytest.MonkeyPatch, proxy: str
) -> None:
    environment.setenv("HTTPS_PROXY", proxy)
    async with following(source(api, kubeconfig=kubeconfig_of(api.url, tmp_path))) as heard:
        await heard.until(lambda: heard.failures)
    assert "no usable configuration for Kubernetes" in heard.failures[0]


async def test_a_url_that_is_none_is_a_failure_of_the_source(api: Api) -> None:
    async with following(source(api, api_url="http://[::1")) as heard:
        await heard.until(lambda: heard.failures)
    assert "no usable configuration for Kubernetes" in heard.failures[0]


@pytest.mark.parametrize("excepted", ["127.0.0.1", "127.0.0.0/8", "*"])
async def test_a_server_that_no_proxy_leads_to_is_asked_directly(
    api: Api, tmp_path: Path, environment: pytest.MonkeyPatch, excepted: str
) -> None:
    """The `kubernetes` package takes the variable for the proxy alone."""
    environment.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    environment.setenv("NO_PROXY", excepted)
    api.lists = [page(pod())]
    async with following(source(api, kubeconfig=kubeconfig_of(api.url, tmp_path))) as heard:
        await heard.until(lambda: heard.sets or heard.failures)
    assert (heard.sets, heard.failures) == ([[A]], [])


async def test_an_api_server_that_is_not_there_is_tried_again(api: Api) -> None:
    async with following(source(api, api_url="http://127.0.0.1:1")) as heard:
        await heard.until(lambda: len(heard.failures) > 2)
    assert heard.sets == []


async def test_a_login_that_cannot_be_renewed_is_a_failure_of_the_source() -> None:
    def renew() -> Any:
        raise OSError("the token cannot be read")

    configuration: Any = SimpleNamespace(auth_settings=renew)
    with pytest.raises(DiscoveryError, match="the token cannot be read"):
        await Cluster(Any, configuration, 1.0).ask("GET", "/version")
