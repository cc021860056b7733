"""The poller: asks every replica how it is, and tells a listener what changed.

Each replica has a task of its own, so that a slow or dead one delays no other. A poll asks for health and
for metrics at the same time, each with its own deadline. Health alone says whether a replica is up: one
success brings it up, a refused connection or several failures in a row take it down. Metrics that cannot be
read are no reason to send turns elsewhere; they give a reading that holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import TYPE_CHECKING, Protocol

import httpx
import structlog

from thunderagent.backends.base import NOTHING_READ, Backend, ReplicaReading
from thunderagent.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = structlog.get_logger(__name__)

# The part of an interval between the first polls of replicas added one after the other: multiples of the
# golden ratio spread evenly over the interval, however many there are, and the same way every time.
_GOLDEN_RATIO = 0.6180339887


class ReplicaListener(Protocol):
    """Hear what the poller finds.

    Called on the event loop only. Must not block; may add and remove replicas.
    """

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        """Take what a healthy replica's metrics said; at a replica's coming up this comes just before it."""

    def replica_up(self, replica_id: str) -> None:
        """Learn that a replica can serve: for the first time, or again."""

    def replica_down(self, replica_id: str, why: str) -> None:
        """Learn that a replica can no longer serve, or, once, that it cannot at the start."""


@dataclass(frozen=True, slots=True)
class PollerSettings:
    """How often to ask, how long to wait, and what to make of silence."""

    # Time between two polls of a replica.
    interval_s: float = 1.0
    # How long health and metrics may each take to answer, from connecting to the last byte.
    deadline_s: float = 2.0
    # Failed polls in a row that take a replica down; a refused connection does so at once.
    down_after_failures: int = 2
    # Silence is weaker evidence: a loaded engine may let a poll wait for many seconds while its streams flow
    # (vLLM on a busy CPU: 10 s seen). Polls that only got no answer in time take a replica down after so long.
    silence_limit_s: float = 30.0
    # The header Authorization of polls; empty: none.
    authorization: str = ""
    # Whom to trust where a replica speaks https; None is whom the system trusts.
    ssl_context: SSLContext | None = None


@dataclass(frozen=True, slots=True)
class ReplicaEndpoint:
    """Where a replica is, and which engine kind answers there."""

    replica_id: str
    url: str
    backend: Backend


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    is_refusal: bool = False
    is_silence: bool = False


@dataclass(slots=True, eq=False)
class _Watched:
    """One replica under watch: the only mutable thing here, written by its own task alone."""

    endpoint: ReplicaEndpoint
    health_url: httpx.URL
    metrics_url: httpx.URL
    first_poll_after_s: float
    is_up: bool | None = None
    failure_count: int = 0
    silent_since_s: float | None = None
    trouble: str | None = None
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Poller:
    """Poll replicas until cancelled; add and remove them at any time, before or while it runs."""

    def __init__(self, listener: ReplicaListener, settings: PollerSettings) -> None:
        self._listener = listener
        self._settings = settings
        self._watched: dict[str, _Watched] = {}
        self._added_count = 0
        self._start: Callable[[_Watched], asyncio.Task[None]] | None = None

    def __repr__(self) -> str:
        up_count = sum(watched.is_up is True for watched in self._watched.values())
        return f"<Poller {up_count} up of {len(self._watched)}>"

    def add(self, replica: ReplicaEndpoint) -> None:
        """Watch a replica; raise ConfigurationError for an id already watched, or a URL that is none."""
        if replica.replica_id in self._watched:
            raise ConfigurationError(f"replica {replica.replica_id!r} is there already")
        watched = _Watched(
            endpoint=replica,
            health_url=_url_of(replica, replica.backend.health_path),
            metrics_url=_url_of(replica, replica.backend.metrics_path),
            first_poll_after_s=self._added_count * _GOLDEN_RATIO % 1.0 * self._settings.interval_s,
        )
        self._added_count += 1
        self._watched[replica.replica_id] = watched
        if self._start is not None:
            watched.task = self._start(watched)

    def remove(self, replica_id: str) -> None:
        """Watch a replica no longer; the listener hears nothing more of it. An unknown id is no error."""
        watched = self._watched.pop(replica_id, None)
        if watched is not None and watched.task is not None:
            watched.task.cancel()

    def suspect(self, replica_id: str) -> None:
        """Poll a replica at once, because a request just failed there. An unknown id is no error."""
        watched = self._watched.get(replica_id)
        if watched is not None:
            watched.suspected.set()

    def refused(self, replica_id: str) -> None:
        """Take a replica for down until a poll finds it healthy, because it refused a connection."""
        watched = self._watched.get(replica_id)
        if watched is not None:
            self._heard_failure(watched, _Failure("connection refused", is_refusal=True))
            watched.suspected.set()

    async def run(self) -> None:
        """Poll until cancelled. Runs once at a time; a bug in a listener ends it, loudly."""
        if self._start is not None:
            raise RuntimeError("the poller runs already")
        # httpx's default limits let 100 replicas that hang keep all others waiting for a connection; and its
        # timeouts are for each read, where our deadline is for the whole answer.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            async with (
                httpx.AsyncClient(
                    trust_env=False,
                    timeout=None,  # noqa: S113
                    limits=limits,
                    headers={"Authorization": self._settings.authorization} if self._settings.authorization else None,
                    verify=self._settings.ssl_context or True,
                ) as client,
                asyncio.TaskGroup() as group,
            ):
                self._start = lambda watched: group.create_task(
                    self._watch(watched, client), name=f"poll {watched.endpoint.replica_id}"
                )
                for watched in self._watched.values():
                    watched.task = self._start(watched)
                await asyncio.get_running_loop().create_future()
        finally:
            self._start = None

    async def _watch(self, watched: _Watched, client: httpx.AsyncClient) -> None:
        """Poll one replica, on the beat of its first poll, and between beats when it is suspected."""
        loop = asyncio.get_running_loop()
        origin_s = loop.time() + watched.first_poll_after_s
        wait_s = watched.first_poll_after_s
        while self._is_current(watched):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await watched.suspected.wait()
            watched.suspected.clear()
            await self._poll(watched, client)
            wait_s = (origin_s - loop.time()) % self._settings.interval_s

    async def _poll(self, watched: _Watched, client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._get(client, watched.health_url))
            metrics = group.create_task(self._get(client, watched.metrics_url))
        if isinstance(failure := health.result(), _Failure):
            self._heard_failure(watched, failure)
        else:
            self._heard_health(watched, metrics.result())

    async def _get(self, client: httpx.AsyncClient, url: httpx.URL) -> str | _Failure:
        """Return the body of a 2xx answer, or how the request failed. Expected failures end here."""
        deadline_s = self._settings.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                response = await client.get(url)
        except TimeoutError:
            return _Failure(f"no answer within {deadline_s:g} s", is_silence=True)
        except httpx.HTTPError as error:
            if _is_refusal(error):
                return _Failure("connection refused", is_refusal=True)
            return _Failure(f"{type(error).__name__}: {error}")
        if not response.is_success:
            return _Failure(f"{url.path} answered {response.status_code}")
        return response.text

    def _heard_health(self, watched: _Watched, metrics: str | _Failure) -> None:
        watched.failure_count = 0
        watched.silent_since_s = None
        reading = self._read(watched, metrics)
        replica_id = watched.endpoint.replica_id
        # The reading goes first, so that nothing is granted on a replica whose capacity is about to be known.
        self._listener.replica_polled(replica_id, reading)
        if watched.is_up is not True and self._is_current(watched):
            watched.is_up = True
            self._listener.replica_up(replica_id)

    def _heard_failure(self, watched: _Watched, failure: _Failure) -> None:
        settings = self._settings
        if failure.is_silence:
            now_s = asyncio.get_running_loop().time()
            if watched.silent_since_s is None:
                watched.silent_since_s = now_s - settings.deadline_s
            is_over = watched.is_up is None or now_s - watched.silent_since_s >= settings.silence_limit_s
        else:
            watched.failure_count += 1
            is_over = failure.is_refusal or watched.failure_count >= settings.down_after_failures
        if is_over and watched.is_up is not False:
            watched.is_up = False
            self._listener.replica_down(watched.endpoint.replica_id, failure.why)

    def _read(self, watched: _Watched, metrics: str | _Failure) -> ReplicaReading:
        """Read metrics, and log what is wrong with them when that changes."""
        why = None
        trouble: str | None = "unavailable"
        if isinstance(metrics, _Failure):
            reading, why = NOTHING_READ, metrics.why
        else:
            reading = watched.endpoint.backend.read_metrics(metrics)
            trouble = _trouble_of(reading)
        if trouble != watched.trouble:
            watched.trouble = trouble
            log = _log.bind(
                replica_id=watched.endpoint.replica_id, url=str(watched.metrics_url.copy_with(userinfo=b""))
            )
            if trouble is None:
                log.info("replica metrics are usable again")
            else:
                log.warning("replica metrics are not usable", trouble=trouble, why=why)
        return reading

    def _is_current(self, watched: _Watched) -> bool:
        """Say whether a replica is still watched: a listener may remove the very replica it hears of."""
        return self._watched.get(watched.endpoint.replica_id) is watched


def _trouble_of(reading: ReplicaReading) -> str | None:
    if reading == NOTHING_READ:
        return "unreadable"
    return "capacity unknown" if reading.capacity_tokens is None else None


def _url_of(replica: ReplicaEndpoint, path: str) -> httpx.URL:
    try:
        url = httpx.URL(replica.url.rstrip("/") + path)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"replica {replica.replica_id!r}: its URL is none: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigurationError(f"replica {replica.replica_id!r}: its URL is no http or https URL")
    return url


def _is_refusal(error: BaseException | None) -> bool:
    """Say whether nobody listens there: the connection was refused, at every address that was tried."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_refusal(each) for each in error.exceptions)
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refusal(error.__cause__ or error.__context__)
