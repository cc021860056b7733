"""Replicas from a Kubernetes cluster: the pods that a label selector selects.

Theory of operation
===================
A list, then its changes from the list's version on. A watch that ends continues from the last version heard of,
including bookmarks. If the server no longer knows that version (410), or is lost, the list is read again. The known set
stays until then: only a whole list, or a change, alters it.

A pod is added when it is ready for the first time, and stays until it is deleted or over. A readiness probe may fail
under load, and the poller finds out whether an engine serves. A pod that is being deleted drains.

The `kubernetes` package reads the configuration and renews tokens. The two kinds of requests use httpx2, because a
request on the event loop can be cancelled and a thread cannot.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import structlog

from thunderagent.backends.discovery.base import DiscoveryListener, PodSelection, Wanted
from thunderagent.errors import ConfigurationError, DiscoveryError

try:
    from thunderagent.cluster import cluster_configuration, version_problem
except ImportError as error:
    raise ConfigurationError("Kubernetes: install thunderagent with the extra `kubernetes`") from error

_log = structlog.get_logger(__name__)

WATCH_S = 60
"""How long a watch lasts before it is renewed: so a silently broken connection is noticed."""
PAGE_ITEMS_COUNT = 500

Json = dict[str, Any]


class _GoneError(DiscoveryError):
    """The server no longer knows the version from which a watch should continue."""


class RefusedError(DiscoveryError):
    """The server did nothing, and says why (4xx)."""


class NotThereError(RefusedError):
    """The object does not exist (404)."""


class ConflictError(RefusedError):
    """The object already exists, or does not have the named version (409)."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Where the API server is: at `api_url` without a login, or by a kubeconfig file or the pod's own account."""

    kubeconfig: Path | None = None
    api_url: str = ""
    timeout_s: float = 10.0


class KubernetesSource:
    """Follows the pods of one selection."""

    def __init__(self, selection: PodSelection, access: ClusterAccess, *, backoff_s: float) -> None:
        """Follow nothing yet; `backoff_s` is the time between two attempts when the API server is lost."""
        self.name = "kubernetes"
        self._selection = selection
        self._access = access
        self._backoff_s = backoff_s
        self._pods: dict[str, Json] = {}
        """By uid."""
        self._urls: dict[str, str] = {}
        """Of pods that were ready once."""
        self._portless: set[str] = set()

    def __repr__(self) -> str:
        return f"<KubernetesSource {self._selection}>"

    async def run(self, listener: DiscoveryListener) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                async with connected(self._access) as cluster:
                    await self._follow(cluster, listener)
            except DiscoveryError as error:
                listener.source_failed(self.name, str(error))
                await asyncio.sleep(self._backoff_s)

    async def _follow(self, cluster: Cluster, listener: DiscoveryListener) -> None:
        """List, then watch; raise `DiscoveryError` when a new list is needed because the server is lost."""
        loop = asyncio.get_running_loop()
        version = ""
        while True:
            if not version:
                pods, version = await cluster.list(self._selection)
                self._pods = {uid_of(pod): pod for pod in pods}
                self._tell(listener)
            begun_at_s = loop.time()
            try:
                async for event in cluster.watch(self._selection, version):
                    version = event["object"]["metadata"].get("resourceVersion") or version
                    if event["type"] == "BOOKMARK":
                        continue
                    self._take(event["type"], event["object"])
                    self._tell(listener)
            except _GoneError:
                _log.info("kubernetes_watch_expired", namespace=self._selection.namespace)
                version = ""
            if loop.time() - begun_at_s < self._backoff_s:
                await asyncio.sleep(self._backoff_s)

    def _take(self, kind: str, pod: Json) -> None:
        if kind == "DELETED":
            self._pods.pop(uid_of(pod), None)
        else:
            self._pods[uid_of(pod)] = pod

    def _tell(self, listener: DiscoveryListener) -> None:
        self._urls = {uid: url for uid, pod in self._pods.items() if (url := self._url_of(uid, pod))}
        wanted: dict[str, Wanted] = {}
        for uid, url in self._urls.items():
            is_draining = "deletionTimestamp" in self._pods[uid]["metadata"]
            if url not in wanted or not is_draining:  # an address may have passed to a new pod
                wanted[url] = Wanted(url, is_draining=is_draining)
        listener.replicas_wanted(self.name, sorted(wanted.values(), key=lambda each: each.url))

    def _url_of(self, uid: str, pod: Json) -> str | None:
        """Return a pod's engine URL; None if it was never ready, or is over."""
        status = pod.get("status") or {}
        if status.get("phase") in {"Succeeded", "Failed"}:
            return None
        if uid not in self._urls and not _is_ready(pod):
            return None
        if _port_of(pod, self._selection.port) is None and uid not in self._portless:
            self._portless.add(uid)
            _log.warning("kubernetes_pod_without_port", pod=pod["metadata"].get("name"), port=self._selection.port)
        return url_of(pod, self._selection.port)


def uid_of(pod: Json) -> str:
    """Return a pod's uid: names are reused."""
    return str(pod["metadata"]["uid"])


def url_of(pod: Json, port_or_name: str) -> str | None:
    """Return a pod's engine URL; None if it has no address yet, or no such port."""
    address, port = (pod.get("status") or {}).get("podIP"), _port_of(pod, port_or_name)
    if not address or port is None:
        return None
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    is_ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
    return is_ready and "deletionTimestamp" not in pod["metadata"]


def _port_of(pod: Json, wanted: str) -> int | None:
    if wanted.isdigit():
        return int(wanted)
    spec = pod.get("spec") or {}
    for part in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        for port in part.get("ports") or ():
            if port.get("name") == wanted:
                return int(port["containerPort"])
    return None


# --- the API server


class Cluster:
    """The few requests that are needed. They raise only `DiscoveryError`."""

    def __init__(self, http: httpx2.AsyncClient, configuration: Any, timeout_s: float) -> None:
        self._http = http
        self._configuration = configuration
        self._timeout_s = timeout_s

    async def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Read an object, or send a new one or a merge patch; return the result."""
        content = None if body is None else msgspec.json.encode(body)
        headers = await self._headers()
        if content is not None:
            headers["Content-Type"] = f"application/{'merge-patch+' if method == 'PATCH' else ''}json"
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.request(method, path, content=content, headers=headers)
            if not response.is_success:
                raise _refusal(response.status_code, _status_of(response.content), f"{method.lower()} {path}")
            answer = msgspec.json.decode(response.content)
        except TimeoutError as error:
            raise DiscoveryError(f"the Kubernetes API sent nothing within {self._timeout_s:g} s") from error
        except (httpx2.HTTPError, msgspec.DecodeError) as error:
            raise DiscoveryError(f"the Kubernetes API gave an unexpected answer: {error!r}") from error
        if not isinstance(answer, dict):
            raise DiscoveryError("the Kubernetes API gave an unexpected answer: no object")
        return answer

    async def problem(self) -> str:
        """Return what is wrong with the cluster's version; empty if nothing is, or it does not tell us."""
        try:
            return version_problem(await self.ask("GET", "/version"))
        except DiscoveryError:
            return ""

    async def _headers(self) -> dict[str, str]:
        try:  # a command or a file may renew a token
            login = await asyncio.to_thread(self._configuration.auth_settings)
        except Exception as error:  # whatever a command or a plugin raises
            raise DiscoveryError(f"the login to the Kubernetes API cannot be renewed: {error}") from error
        return {"Accept": "application/json", **{each["key"]: each["value"] for each in login.values()}}

    async def list(self, selection: PodSelection) -> tuple[list[Json], str]:
        """Return all pods of a selection, and the version of this list."""
        pods: list[Json] = []
        query = {"labelSelector": selection.selector, "limit": str(PAGE_ITEMS_COUNT)}
        while True:
            try:
                async with asyncio.timeout(self._timeout_s), self._answer(selection, query) as response:
                    page = msgspec.json.decode(await response.aread())
                metadata = page["metadata"]
                pods += [pod for pod in page["items"] or () if uid_of(pod)]
                query["continue"] = metadata.get("continue") or ""
                if not query["continue"]:
                    return pods, str(metadata["resourceVersion"])
            except _GoneError:  # the list expired before it was read: start over
                raise DiscoveryError("the list of pods expired while it was read") from None
            except TimeoutError as error:
                raise DiscoveryError(f"the Kubernetes API sent nothing within {self._timeout_s:g} s") from error
            except (httpx2.HTTPError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
                raise DiscoveryError(f"the Kubernetes API gave an unexpected answer: {error!r}") from error

    async def watch(self, selection: PodSelection, version: str) -> AsyncIterator[Json]:
        """Yield the events of one watch until it ends or breaks. Raises `_GoneError` if its version is too old."""
        query = {
            "labelSelector": selection.selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        try:
            async with self._answer(selection, query) as response:
                async for line in response.aiter_lines():
                    if not line.strip():
                        continue
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        raise _refusal(int(event["object"].get("code") or 0), event["object"])
                    _ = event["object"]["metadata"]
                    yield event
        except (httpx2.HTTPError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            # The next watch yields a list if the server is there, or its error otherwise.
            _log.info("kubernetes_watch_broken", namespace=selection.namespace, why=repr(error))
            if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                raise DiscoveryError(f"the Kubernetes API cannot be reached: {error}") from error

    @asynccontextmanager
    async def _answer(self, selection: PodSelection, query: Mapping[str, str]) -> AsyncIterator[httpx2.Response]:
        path = f"/api/v1/namespaces/{selection.namespace}/pods"
        params = {name: value for name, value in query.items() if value}
        headers = await self._headers()
        async with self._http.stream("GET", path, params=params, headers=headers) as response:
            if not response.is_success:
                raise _refusal(response.status_code, _status_of(await response.aread()))
            yield response


@asynccontextmanager
async def connected(access: ClusterAccess) -> AsyncIterator[Cluster]:
    """Connect by the configuration. Raises `DiscoveryError` if none is usable."""
    try:
        configuration = await asyncio.to_thread(cluster_configuration, access.api_url, access.kubeconfig)
        client = httpx2.AsyncClient(
            base_url=configuration.host,
            verify=await asyncio.to_thread(_tls, configuration),
            proxy=configuration.proxy,
            timeout=httpx2.Timeout(access.timeout_s, read=WATCH_S + access.timeout_s),
            trust_env=False,
        )
    except Exception as error:  # an invalid file, URL or proxy raises arbitrary errors
        raise DiscoveryError(f"no usable configuration for Kubernetes: {error}") from error
    async with client as http:
        yield Cluster(http, configuration, access.timeout_s)


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _status_of(body: bytes) -> Json:
    try:
        status = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return status if isinstance(status, dict) else {}


def _refusal(code: int, status: Json, what: str = "list and watch pods") -> DiscoveryError:
    message = str(status.get("message") or "no reason given")
    if code == 410:
        return _GoneError(message)
    if code in (404, 409):
        return (NotThereError if code == 404 else ConflictError)(message)
    if code == 403:
        return RefusedError(f"the proxy lacks the right to {what}: {message}")
    return (RefusedError if code < 500 else DiscoveryError)(f"the Kubernetes API answered {code}: {message}")
