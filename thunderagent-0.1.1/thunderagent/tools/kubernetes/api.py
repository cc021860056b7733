"""Requests to the Kubernetes API: connections, the few requests that are needed, and the meaning of errors.

All of this blocks: it is called in threads. A `Stop` ends a thread that reads a watch, by closing its connection.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
import urllib3
from kubernetes import client

from thunderagent.cluster import cluster_configuration, version_problem
from thunderagent.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSpaceError,
)
from thunderagent.tools.kubernetes.objects import POD_METRICS, Json, Resource, version_of

_log = structlog.get_logger(__name__)

# How long a watch lasts before it is renewed: so a silently broken connection is noticed.
_WATCH_S = 60
_ATTEMPTS_COUNT = 3
# How the server reports missing rights; quotas, pod security and webhooks answer 403 as well.
_LACKS_RIGHT = re.compile(r" cannot \S+ (resource|path) ")


class GoneError(SandboxEngineError):
    """The server no longer knows that version (410)."""


class RightError(SandboxRefusedError):
    """Our account has no right to do that (403)."""


class Stop:
    """Tells a thread to leave, even while it waits for the API server."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._response: urllib3.HTTPResponse | None = None

    @property
    def is_set(self) -> bool:
        """Return whether the thread should leave."""
        return self._event.is_set()

    def set(self) -> None:
        """Make the thread leave; from any thread, at once."""
        with self._lock:
            self._event.set()
            if self._response is not None:
                _shut(self._response)

    def wait(self, limit_s: float) -> None:
        """Wait, unless it should leave."""
        self._event.wait(limit_s)

    @contextlib.contextmanager
    def reading(self, response: urllib3.HTTPResponse) -> Iterator[None]:
        """Read a response that `set` can break off."""
        with self._lock:
            self._response = response
            if self._event.is_set():
                _shut(response)
        try:
            yield
        finally:
            with self._lock:
                self._response = None


def _shut(response: urllib3.HTTPResponse) -> None:
    with contextlib.suppress(OSError, ValueError):  # it is over already
        response.shutdown()


class Api:
    """The few requests that are needed, in plain JSON. All of them block; they raise only `SandboxError`.

    After a restart the server refuses everybody until it has loaded the rights: a request that was allowed before is
    repeated for as long as a request may take.
    """

    def __init__(
        self,
        *,
        kubeconfig: Path | None,
        api_url: str,
        timeout_s: float,
        backoff_s: float,
        connections_count: int,
        page_items_count: int,
    ) -> None:
        """Connect to nothing yet; `backoff_s` is for callers that retry."""
        self.backoff_s = backoff_s
        self._kubeconfig = kubeconfig
        self._api_url = api_url
        self._timeout_s = timeout_s
        self._connections_count = connections_count
        self._page_items_count = page_items_count
        self._client: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # What was allowed: verb, resource, namespace.
        self._allowed: set[tuple[str, Resource, str]] = set()

    def close(self) -> None:
        """Close unused connections; the others close with their requests, which are not retried."""
        self._closed.set()
        with self._lock:
            if self._client is not None:
                self._client.rest_client.pool_manager.clear()

    def problem(self) -> str:
        """Return what is wrong with the cluster's version; empty if nothing is, or it does not tell us."""
        try:
            answer = self._call("GET", "/version")
        except client.ApiException:
            return ""
        return version_problem(answer)

    def create(self, resource: Resource, namespace: str, manifest: Json, *, is_rehearsal: bool = False) -> Json:
        """Create an object and return it; a rehearsal only checks whether it would be created.

        Raises `SandboxConflictError` if its name is taken.
        """
        query = [("dryRun", "All")] if is_rehearsal else []
        for left in reversed(range(_ATTEMPTS_COUNT)):
            try:
                return self._request("create", resource, namespace, query=query, body=manifest)
            except client.ApiException as error:
                # Two that count against one quota at the same moment: the server says to try again.
                if left and error.status == 409 and _status_of(error).get("reason") == "Conflict":
                    continue
                raise _mapped(error, "create", resource) from error
        raise AssertionError("the last attempt returns or raises")

    def read(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Return an object, or nothing if there is none."""
        try:
            return self._request("get", resource, namespace, name)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise _mapped(error, "get", resource) from error

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        """Delete an object if it has that uid, with all that it made; return whether it is going or gone."""
        # The pod's own specification says how long it may take to stop.
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            answer = self._request("delete", resource, namespace, name, body=options)
        except client.ApiException as error:
            if error.status == 409:
                return False
            if error.status == 404:
                return True
            raise _mapped(error, "delete", resource) from error
        if finalizers := (answer.get("metadata") or {}).get("finalizers"):
            _log.warning(
                "sandbox_kept_by_finalizers", resource=resource.plural, name=name, finalizers=sorted(finalizers)
            )
        return True

    def list_all(self, resource: Resource, namespace: str, selector: str) -> tuple[list[Json], str]:
        """Return all objects that a label selector selects, and the version of this list."""
        for _ in range(_ATTEMPTS_COUNT):
            with contextlib.suppress(GoneError):
                return self._pages(resource, namespace, selector)
        raise SandboxEngineError(f"the list of {resource.plural} expires before it is read")

    def _pages(self, resource: Resource, namespace: str, selector: str) -> tuple[list[Json], str]:
        items: list[Json] = []
        query = [("labelSelector", selector), ("limit", str(self._page_items_count))]
        more = ""
        while True:
            try:
                page = self._request("list", resource, namespace, query=[*query, ("continue", more)] if more else query)
            except client.ApiException as error:
                raise _mapped(error, "list", resource) from error
            items += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return items, version_of(page)

    def list_metrics(self, namespace: str, selector: str) -> list[Json] | None:
        """Return the resource use of pods, or None if the cluster does not report it, or not to us."""
        query = [("labelSelector", selector)]
        try:
            items: list[Json] = self._request("list", POD_METRICS, namespace, query=query).get("items") or []
        except client.ApiException as error:
            if error.status in {403, 404, 503}:
                return None
            raise _mapped(error, "list", POD_METRICS) from error
        return items

    def stream(
        self, resource: Resource, namespace: str, selector: str, version: str, stop: Stop
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of one watch, until it ends or breaks. Raises `GoneError` if its version is too old."""
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("labelSelector", selector),
            ("resourceVersion", version),
            ("timeoutSeconds", str(_WATCH_S)),
        ]
        try:
            response = self._send("watch", resource, namespace, query=query, is_stream=True)
        except client.ApiException as error:
            refusal = _mapped(error, "watch", resource)
            if isinstance(refusal, RightError) and ("list", resource, namespace) in self._allowed:
                raise SandboxEngineError(str(refusal)) from error  # the watcher retries
            raise refusal from error
        try:
            with stop.reading(response):
                for line in _lines(response):
                    if stop.is_set:
                        return
                    yield json.loads(line)
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            if isinstance(error, AttributeError) and not stop.is_set:
                raise  # only a TLS socket that is shut down while being read looks like that
            if not stop.is_set:
                _log.info("kubernetes_watch_broken", resource=resource.plural, namespace=namespace, why=repr(error))
        finally:
            response.close()

    def _request(self, verb: str, resource: Resource, namespace: str, name: str = "", **options: Any) -> Json:
        """Send a request and return the answer; see `_send`. Tolerates the loss of a right that was there."""
        right = (verb, resource, namespace)
        patient_until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                answer = self._send(verb, resource, namespace, name, **options)
            except client.ApiException as error:
                if right not in self._allowed or not isinstance(_mapped(error, verb, resource), RightError):
                    raise
                if self._closed.is_set() or time.monotonic() >= patient_until_s:
                    self._allowed.discard(right)
                    raise
                _log.info("kubernetes_right_lost", verb=verb, resource=resource.plural, namespace=namespace)
                self._closed.wait(self.backoff_s)
            else:
                # Rights to make something include removing it: otherwise it would stay.
                self._allowed |= {right, ("delete", resource, namespace)} if verb == "create" else {right}
                break
        if not isinstance(answer, dict):
            raise SandboxEngineError("the Kubernetes API gave an answer that is not JSON")
        return answer

    def _send(self, verb: str, resource: Resource, namespace: str, name: str = "", **options: Any) -> Any:
        """Send a request about a resource; see `_call`."""
        method = {"create": "POST", "delete": "DELETE"}.get(verb, "GET")
        return self._call(method, resource.path(namespace, name), **options)

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Json | None = None,
        is_stream: bool = False,
    ) -> Any:
        """Send a request. Raises `client.ApiException` for an error answer, otherwise `SandboxEngineError`."""
        read_timeout_s = self._timeout_s + (_WATCH_S if is_stream else 0)
        try:
            return self._connected().call_api(
                path,
                method,
                query_params=list(query),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                response_type="object",
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=not is_stream,
                _request_timeout=(self._timeout_s, read_timeout_s),
            )
        except client.ApiException as error:
            if error.status:
                raise
            raise SandboxEngineError(f"the Kubernetes API cannot be used: {error.reason}") from error
        except (urllib3.exceptions.HTTPError, OSError, UnicodeDecodeError) as error:
            raise SandboxEngineError(f"the Kubernetes API does not answer: {error}") from error
        except Exception as error:  # a half-written configuration raises whatever its readers happen to
            raise SandboxEngineError(f"no usable configuration for Kubernetes: {error!r}") from error

    def _connected(self) -> Any:
        """Return the client, and configure it first if that has not succeeded yet."""
        with self._lock:
            if self._client is None:
                self._client = client.ApiClient(self._configuration())
            return self._client

    def _configuration(self) -> Any:
        configuration = cluster_configuration(self._api_url, self._kubeconfig)
        configuration.connection_pool_maxsize = self._connections_count
        # Retry once if the other side had closed the connection; never repeat a POST.
        configuration.retries = urllib3.Retry(
            1, status=0, redirect=0, allowed_methods={"GET", "DELETE"}, respect_retry_after_header=False
        )
        return configuration


def _lines(response: urllib3.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a body as they arrive; the rest of a broken one is dropped."""
    rest = b""
    for data in response.stream(amt=None):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line for line in lines if line.strip())


def _status_of(error: client.ApiException) -> Json:
    """Return the server's description of an error."""
    try:
        status = json.loads(error.body or b"")
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}


def _mapped(error: client.ApiException, verb: str, resource: Resource) -> SandboxError:
    """Return our error for one of the API server's."""
    status = _status_of(error)
    message = str(status.get("message") or error.reason or "no reason given")
    code = int(error.status)
    if code == 410:
        return GoneError(message)
    if code == 403:
        if "exceeded quota" in message:
            return SandboxSpaceError(message)
        if _LACKS_RIGHT.search(message):
            return RightError(f"the proxy lacks the right to {verb} {resource.plural}: {message}")
    if code == 404 and (not status or "could not find the requested resource" in message):
        return SandboxRefusedError(f"the cluster has no {resource.plural} of {resource.api_version}: {message}")
    if code == 409 and status.get("reason") == "AlreadyExists":
        return SandboxConflictError(message)
    if code in {401, 408, 409, 429} or code >= 500:
        return SandboxEngineError(f"the Kubernetes API answered {code}: {message}")
    return SandboxRefusedError(f"Kubernetes refused to {verb} {resource.plural}: {message}")
