"""The poller: asks every replica how it is, and tells a listener what changed.

Each URL has a task of its own, so that a slow or dead one delays no other; replicas that are data-parallel ranks
behind one URL share it. A poll asks for health and for metrics at the same time, each with its own deadline. Health
alone says whether a replica is up: one success brings it up, a refused connection or several failures in a row take it
down. Metrics that cannot be read are no reason to send turns elsewhere; they give a reading that holds nothing. But an
engine that answers for its metrics is not silent: SGLang answers for its health with a token that it generates, and so
not while it is paused for new weights. Which models it serves it is asked before it comes up, and now and then: LoRA
adapters come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from functools import cache
from ssl import SSLContext
from typing import TYPE_CHECKING, Protocol

import httpx2
import msgspec
import structlog

from thunderagent.backends.base import NOTHING_READ, Backend, ReplicaReading
from thunderagent.backends.discovery.base import replica_id_of
from thunderagent.backends.ranks import of_rank, rank_count_of
from thunderagent.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_log = structlog.get_logger(__name__)

# The part of an interval between the first polls of replicas added one after the other: multiples of the
# golden ratio spread evenly over the interval, however many there are, and the same way every time.
_GOLDEN_RATIO = 0.6180339887

MODELS_PATH = "/v1/models"
MODELS_EVERY_POLLS = 10
"""An engine that is up is asked so often which models it serves; at once when it is suspected."""


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

    def ranks_found(self, url: str, ranks_count: int) -> None:
        """Learn how many data-parallel ranks a URL has whose endpoints are `finds_ranks`, when that changes."""


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
    """Where a replica is, which engine kind answers there, and which data-parallel rank it is; None is the whole.

    Two are equal whatever their backends are: each has one of its own, which may find out its kind.
    """

    replica_id: str
    url: str = field(repr=False)
    backend: Backend = field(compare=False)
    rank_id: int | None = None
    finds_ranks: bool = False
    """Whether the listener wants to hear how many ranks the URL has."""


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    is_refusal: bool = False
    is_silence: bool = False
    is_answer: bool = False


@dataclass(slots=True, eq=False)
class _Watched:
    """One URL under watch: the only mutable thing here, written by its own task alone."""

    key: tuple[str, str, str] = field(repr=False)
    """Under which it was added: a backend that finds out its kind changes it."""
    backend: Backend
    url: str = field(repr=False)
    health_url: httpx2.URL
    metrics_url: httpx2.URL
    first_poll_after_s: float
    endpoints: dict[str, ReplicaEndpoint] = field(default_factory=dict)
    is_up: dict[str, bool] = field(default_factory=dict)
    """Of each replica there that was heard of."""
    ranks_count: int = 0
    models: tuple[str, ...] | None = None
    polls_to_models: int = 0
    """How many polls until it is asked again."""
    failure_count: int = 0
    silent_since_s: float | None = None
    trouble: dict[str, str | None] = field(default_factory=dict)
    asked_s: float = 0.0
    """When the poll that runs, or ran last, began."""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Poller:
    """Poll replicas until cancelled; add and remove them at any time, before or while it runs."""

    def __init__(self, listener: ReplicaListener, settings: PollerSettings) -> None:
        self._listener = listener
        self._settings = settings
        self._watched: dict[str, _Watched] = {}
        """By the id of each replica; ranks of one URL share theirs."""
        self._by_url: dict[tuple[str, str, str], _Watched] = {}
        self._added_count = 0
        self._start: Callable[[_Watched], asyncio.Task[None]] | None = None

    def __repr__(self) -> str:
        up_count = sum(sum(watched.is_up.values()) for watched in self._by_url.values())
        return f"<Poller {up_count} up of {len(self._watched)}>"

    def add(self, replica: ReplicaEndpoint) -> None:
        """Watch a replica; raise ConfigurationError for an id already watched, or a URL that is none."""
        if replica.replica_id in self._watched:
            raise ConfigurationError(f"replica {replica.replica_id!r} is there already")
        key = _key_of(replica)
        watched = self._by_url.get(key)
        if watched is None:
            watched = _Watched(
                key=key,
                backend=replica.backend,
                url=replica.url,
                health_url=_url_of(replica, replica.backend.health_path),
                metrics_url=_url_of(replica, replica.backend.metrics_path),
                first_poll_after_s=self._added_count * _GOLDEN_RATIO % 1.0 * self._settings.interval_s,
            )
            self._added_count += 1
            self._by_url[key] = watched
            if self._start is not None:
                watched.task = self._start(watched)
        watched.endpoints[replica.replica_id] = replica
        self._watched[replica.replica_id] = watched

    def remove(self, replica_id: str) -> None:
        """Watch a replica no longer; the listener hears nothing more of it. An unknown id is no error."""
        watched = self._watched.pop(replica_id, None)
        if watched is None:
            return
        del watched.endpoints[replica_id]
        watched.is_up.pop(replica_id, None)
        watched.trouble.pop(replica_id, None)
        if not watched.endpoints:
            del self._by_url[watched.key]
            # A task in which a listener removes what it hears of ends by itself: it closes its connections then.
            if watched.task is not None and watched.task is not asyncio.current_task():
                watched.task.cancel()

    def suspect(self, replica_id: str) -> None:
        """Poll a replica at once, because a request just failed there. An unknown id is no error."""
        watched = self._watched.get(replica_id)
        if watched is not None:
            watched.suspected.set()

    def suspect_all(self, replica_ids: Iterable[str]) -> None:
        """Poll some replicas at once, and ask them which models they serve."""
        for replica_id in replica_ids:
            self.suspect(replica_id)

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
        try:
            async with asyncio.TaskGroup() as group:
                self._start = lambda watched: group.create_task(
                    self._watch_with_client(watched), name=f"poll {next(iter(watched.endpoints), 'a replica')}"
                )
                for watched in self._by_url.values():
                    watched.task = self._start(watched)
                await asyncio.get_running_loop().create_future()
        finally:
            self._start = None

    async def _watch_with_client(self, watched: _Watched) -> None:
        # A client for each URL, so that its connections close with its watch. Redirects are not followed: one that
        # speaks no TLS needs nobody to trust.
        tls = (self._settings.ssl_context or _system_trust()) if watched.health_url.scheme == "https" else False
        # httpx2's timeouts are for each read, where our deadline is for the whole answer.
        authorization = self._settings.authorization
        headers = {"Authorization": authorization} if authorization else None
        async with httpx2.AsyncClient(verify=tls, trust_env=False, timeout=None, headers=headers) as client:
            await self._watch(watched, client)

    async def _watch(self, watched: _Watched, client: httpx2.AsyncClient) -> None:
        """Poll one URL, on the beat of its first poll, and between beats when it is suspected."""
        loop = asyncio.get_running_loop()
        origin_s = loop.time() + watched.first_poll_after_s
        wait_s = watched.first_poll_after_s
        while watched.endpoints:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await watched.suspected.wait()
            if watched.suspected.is_set():
                watched.suspected.clear()
                watched.polls_to_models = 0
            await self._poll(watched, client)
            wait_s = (origin_s - loop.time()) % self._settings.interval_s

    async def _poll(self, watched: _Watched, client: httpx2.AsyncClient) -> None:
        watched.asked_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._get(client, watched.health_url))
            metrics = group.create_task(self._get(client, watched.metrics_url))
        failure, answer = health.result(), metrics.result()
        if watched.polls_to_models <= 0 and (isinstance(answer, str) or not isinstance(failure, _Failure)):
            await self._ask_for_models(watched, client)  # on a connection that is there
        watched.polls_to_models -= 1
        info = await self._info(watched, answer, client)
        if not isinstance(failure, _Failure):
            self._heard_health(watched, answer, info)
        elif failure.is_silence and not isinstance(answer, _Failure):
            self._heard_metrics_alone(watched, answer, info)
        else:
            self._heard_failure(watched, failure)

    async def _ask_for_models(self, watched: _Watched, client: httpx2.AsyncClient) -> None:
        """Take in which models a URL serves; what it said before stands while it does not answer."""
        endpoint = ReplicaEndpoint(replica_id_of(watched.url), watched.url, watched.backend)
        answer = await self._get(client, _url_of(endpoint, MODELS_PATH))
        if isinstance(answer, str):
            watched.models = models_in(answer)
        elif answer.is_answer:
            watched.models = watched.models or ()
        else:
            return
        watched.polls_to_models = MODELS_EVERY_POLLS

    async def _info(self, watched: _Watched, metrics: str | _Failure, client: httpx2.AsyncClient) -> str | None:
        """Ask a URL for its capacity where its kind says it besides the metrics, if those lack it."""
        reading = NOTHING_READ if isinstance(metrics, _Failure) else watched.backend.read_metrics(metrics)
        if reading.capacity_tokens is None:
            endpoint = ReplicaEndpoint(replica_id_of(watched.url), watched.url, watched.backend)
            for path in watched.backend.info_paths:
                info = await self._get(client, _url_of(endpoint, path))
                if not isinstance(info, _Failure):
                    return info
        return None

    async def _get(self, client: httpx2.AsyncClient, url: httpx2.URL) -> str | _Failure:
        """Return the body of a 2xx answer, or how the request failed. Expected failures end here."""
        deadline_s = self._settings.deadline_s
        response: httpx2.Response | None = None
        try:
            async with asyncio.timeout(deadline_s), client.stream("GET", url) as response:
                await response.aread()
        except TimeoutError:
            return _Failure(f"no answer within {deadline_s:g} s", is_silence=True)
        except httpx2.HTTPError as error:
            if _is_refusal(error):
                return _Failure("connection refused", is_refusal=True)
            return _Failure(f"{type(error).__name__}: {error}")
        finally:
            if response is not None:  # it and its stream hold each other, body and connection, for a collection
                del response.stream
        assert response is not None
        if not response.is_success:
            return _Failure(f"{url.path} answered {response.status_code}", is_answer=True)
        return response.text

    def _heard_health(self, watched: _Watched, metrics: str | _Failure, info: str | None) -> None:
        watched.failure_count = 0
        watched.silent_since_s = None
        if isinstance(metrics, str):
            self._find_ranks(watched, metrics)
        for endpoint in list(watched.endpoints.values()):  # a listener may remove the very replica it hears of
            replica_id = endpoint.replica_id
            is_split = endpoint.finds_ranks and endpoint.rank_id is None and watched.ranks_count > 1
            if is_split or replica_id not in watched.endpoints:  # its ranks stand for it, or it was removed
                continue
            reading = self._read(watched, endpoint, metrics, info)
            # The reading goes first, so that nothing is granted on a replica whose capacity is about to be known.
            self._listener.replica_polled(replica_id, reading)
            if replica_id in watched.endpoints and not watched.is_up.get(replica_id):
                watched.is_up[replica_id] = True
                self._listener.replica_up(replica_id)

    def _find_ranks(self, watched: _Watched, metrics: str) -> None:
        """Tell the listener how many ranks there are, if it wants to know and that is news; it may change them."""
        if not any(endpoint.finds_ranks for endpoint in watched.endpoints.values()):
            return
        ranks_count = rank_count_of(metrics, watched.backend.rank_label)
        if ranks_count and ranks_count != watched.ranks_count:
            watched.ranks_count = ranks_count
            self._listener.ranks_found(watched.url, ranks_count)

    def _heard_metrics_alone(self, watched: _Watched, metrics: str, info: str | None) -> None:
        """Leave replicas as they are, up or down, and take the readings of those that are up."""
        watched.silent_since_s = None
        for endpoint in list(watched.endpoints.values()):
            if endpoint.replica_id in watched.endpoints and watched.is_up.get(endpoint.replica_id):
                reading = self._read(watched, endpoint, metrics, info)
                self._listener.replica_polled(endpoint.replica_id, reading)

    def _heard_failure(self, watched: _Watched, failure: _Failure) -> None:
        settings = self._settings
        if failure.is_silence:
            now_s = asyncio.get_running_loop().time()
            if watched.silent_since_s is None:
                watched.silent_since_s = now_s - settings.deadline_s
            is_over = not watched.is_up or now_s - watched.silent_since_s >= settings.silence_limit_s
        else:
            watched.failure_count += 1
            is_over = failure.is_refusal or watched.failure_count >= settings.down_after_failures
        if not is_over:
            return
        for replica_id in list(watched.endpoints):
            if replica_id in watched.endpoints and watched.is_up.get(replica_id) is not False:
                watched.is_up[replica_id] = False
                self._listener.replica_down(replica_id, failure.why)

    def _read(
        self, watched: _Watched, endpoint: ReplicaEndpoint, metrics: str | _Failure, info: str | None
    ) -> ReplicaReading:
        """Read metrics, and the capacity from elsewhere; log what is wrong with them when that changes."""
        why = None
        trouble: str | None = "unavailable"
        backend = endpoint.backend
        if isinstance(metrics, _Failure):
            reading, why = NOTHING_READ, metrics.why
        else:
            if endpoint.rank_id is not None:
                # The URL's own backend has read all of the metrics, so it knows the kind; a rank's has not yet.
                metrics = of_rank(metrics, watched.backend.rank_label, endpoint.rank_id)
            reading = backend.read_metrics(metrics)
            trouble = None if reading != NOTHING_READ else "unreadable"
        if info is not None and reading.capacity_tokens is None and endpoint.rank_id is None:
            reading = replace(reading, capacity_tokens=backend.read_info(info))
        if trouble is None and reading.capacity_tokens is None:
            trouble = "capacity unknown"
        if trouble != watched.trouble.get(endpoint.replica_id):
            watched.trouble[endpoint.replica_id] = trouble
            log = _log.bind(replica_id=endpoint.replica_id, url=str(watched.metrics_url.copy_with(userinfo=b"")))
            if trouble is None:
                log.info("replica metrics are usable again")
            else:
                log.warning("replica metrics are not usable", trouble=trouble, why=why)
        return replace(reading, models=watched.models, age_s=asyncio.get_running_loop().time() - watched.asked_s)


def models_in(answer: str) -> tuple[str, ...]:
    """Return the names in a list of models as OpenAI's API has it, each once; none if it is no such list."""
    try:
        data = msgspec.json.decode(answer)["data"]
        return tuple(dict.fromkeys(each["id"] for each in data if each["id"] and isinstance(each["id"], str)))
    except (msgspec.DecodeError, KeyError, TypeError):
        return ()


@cache
def _system_trust() -> SSLContext:
    """Trust whom the system trusts. It takes 20 ms to read."""
    return httpx2.create_ssl_context(trust_env=False)


def _key_of(replica: ReplicaEndpoint) -> tuple[str, str, str]:
    """Return what replicas have in common that share their polls: ranks, and what may turn out to have some."""
    is_whole = replica.rank_id is None and not replica.finds_ranks
    return replica.url.rstrip("/"), replica.backend.kind, replica.replica_id if is_whole else ""


def _url_of(replica: ReplicaEndpoint, path: str) -> httpx2.URL:
    try:
        url = httpx2.URL(replica.url.rstrip("/") + path)
    except httpx2.InvalidURL as error:
        raise ConfigurationError(f"replica {replica.replica_id!r}: its URL is none") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigurationError(f"replica {replica.replica_id!r}: its URL is not an http or https URL")
    return url


def _is_refusal(error: BaseException | None) -> bool:
    """Say whether nobody listens there: the connection was refused, at every address that was tried."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_refusal(each) for each in error.exceptions)
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refusal(error.__cause__ or error.__context__)
