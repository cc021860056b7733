"""The poller: asks every replica for its state, and tells a listener what changed.

Each URL has a task of its own, so that a slow or dead one delays no other; replicas that are data-parallel ranks behind
one URL share it. A poll asks for health and for metrics at the same time, each with its own deadline. Health alone
decides whether a replica is up: one success brings it up, a refused connection or several failures in a row take it
down. So do three in a row without an answer, if no turn there had a byte meanwhile. What is in flight there may still
be computed: it is lost after a longer time, or at once if not even a connection can be made. One that takes new weights
is given that time, too. Unreadable metrics are no reason to send turns elsewhere; they give an empty reading. But an
engine that answers for its metrics is not silent: SGLang answers for its health with a token that it generates, and so
not while it is paused for new weights. A replica is asked for its models before it comes up, and now and then: LoRA
adapters come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from math import inf
from ssl import SSLContext
from typing import TYPE_CHECKING, Protocol

import aiohttp
import structlog

from thunderagent.backends.asking import (
    MAX_POLL_BYTES,
    Asker,
    Failure,
    Found,
    Watch,
    first_poll_after_s,
    next_poll_after_s,
)
from thunderagent.backends.base import NOTHING_READ, Backend, ReplicaReading
from thunderagent.backends.detection import learn_kind
from thunderagent.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_log = structlog.get_logger(__name__)

SILENT_POLLS_COUNT = 3
"""Polls in a row without an answer, while no turn had a byte, that take a replica down."""

HEARD_WITHIN_S = 1.5
"""A turn's bytes are reported once a second: without a report for so long they stand still when a poll fails. Until the
next ones fail there must be none at all."""

ELSEWHERE_POLLS_COUNT = 3
"""A URL that others poll is polled here after this many intervals without news."""


class ReplicaListener(Protocol):
    """Receives what the poller finds.

    Called on the event loop only. Must not block; may add and remove replicas.
    """

    def replica_polled(self, replica_id: str, reading: ReplicaReading) -> None:
        """Take a healthy replica's metrics; when a replica comes up this is called just before it."""

    def replica_up(self, replica_id: str) -> None:
        """Note that a replica can serve: for the first time, or again."""

    def replica_down(self, replica_id: str, why: str, *, is_silent: bool = False) -> None:
        """Note that a replica can no longer serve, or, once, that it cannot at the start.

        With `is_silent` it answered no poll for long; otherwise it refused one, or answered badly.
        """

    def replica_lost(self, replica_id: str, why: str) -> None:
        """Note, once, that nothing will come of what is in flight on a replica that is down."""

    def may_be_silent(self, replica_id: str) -> bool:
        """Return whether a replica does something during which it may answer nothing, such as taking new weights."""

    def heard_ago_s(self, replica_id: str) -> float:
        """Return how long ago a turn there last had a byte; infinite if none ever had."""

    def ranks_found(self, url: str, ranks_count: int) -> None:
        """Note how many data-parallel ranks a URL has whose endpoints are `finds_ranks`, when that changes."""


class Elsewhere(Protocol):
    """Lets others poll instead of the poller, and reports their results: see `Poller.told`."""

    def watch(self, watch: Watch) -> None:
        """Add a URL to be polled, or apply its changes."""

    def unwatch(self, number: int) -> None:
        """Stop polling a URL."""

    def look(self, number: int) -> None:
        """Poll a URL at once."""


@dataclass(frozen=True, slots=True)
class PollerSettings:
    """How often to ask, how long to wait, and how to treat silence."""

    # Time between two polls of a replica.
    interval_s: float = 1.0
    # How long health and metrics may each take to answer, from connecting to the last byte.
    deadline_s: float = 2.0
    # Failed polls in a row that take a replica down; a refused connection does so at once.
    down_after_failures: int = 2
    # Silence is weaker evidence: a loaded engine may delay a poll for many seconds (vLLM on a busy CPU: 10 s seen), and
    # compute meanwhile. What is in flight on a replica that is silent is lost after this time.
    silence_limit_s: float = 30.0
    # The header Authorization of polls; empty: none.
    authorization: str = ""
    # Which certificates to trust if a replica speaks https; None is the system's.
    ssl_context: SSLContext | None = None
    # A larger answer, packed or not, takes a replica down.
    max_bytes: int = MAX_POLL_BYTES


@dataclass(frozen=True, slots=True)
class ReplicaEndpoint:
    """Where a replica is, which engine kind answers there, and which data-parallel rank it is; None is the whole.

    Equality ignores their backends: each has one of its own, which may find out its kind.
    """

    replica_id: str
    url: str = field(repr=False)
    backend: Backend = field(compare=False)
    rank_id: int | None = None
    finds_ranks: bool = False
    """Whether the listener wants to know how many ranks the URL has."""


@dataclass(slots=True, eq=False)
class _Watched:
    """One watched URL: the only mutable thing here, written by its own task alone."""

    number: int
    key: tuple[str, str, str] = field(repr=False)
    """The key under which it was added: a backend that finds out its kind changes it."""
    asker: Asker
    first_poll_after_s: float
    endpoints: dict[str, ReplicaEndpoint] = field(default_factory=dict)
    is_up: dict[str, bool] = field(default_factory=dict)
    """For each replica there with news."""
    ranks_count: int = 0
    models: tuple[str, ...] | None = None
    failure_count: int = 0
    silent_count: int = 0
    """Polls in a row without an answer, while no turn had a byte."""
    silent_since_s: float | None = None
    is_lost: bool = True
    """Whether what was in flight there was given up, or it never answered."""
    trouble: dict[str, str | None] = field(default_factory=dict)
    asked_s: float = float("-inf")
    """Begin of the last poll with a result, or a later refusal."""
    told_s: float | None = None
    """When others last reported it, or were first asked to poll it; None if nobody else does."""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)

    def begin_anew(self) -> None:
        """Forget what failed: it has answered."""
        self.failure_count = self.silent_count = 0
        self.silent_since_s, self.is_lost = None, False


class Poller:
    """Polls replicas until cancelled; add and remove them at any time, before or while it runs."""

    def __init__(self, listener: ReplicaListener, settings: PollerSettings) -> None:
        self._listener = listener
        self._watched: dict[str, _Watched] = {}
        """By replica id; ranks of one URL share theirs."""
        self._by_url: dict[tuple[str, str, str], _Watched] = {}
        self._by_number: dict[int, _Watched] = {}
        self._added_count = 0
        self.settings = settings
        self.elsewhere: Elsewhere | None = None
        self._start: Callable[[_Watched], asyncio.Task[None]] | None = None

    def __repr__(self) -> str:
        up_count = sum(sum(watched.is_up.values()) for watched in self._by_url.values())
        return f"<Poller {up_count} up of {len(self._watched)}>"

    def add(self, replica: ReplicaEndpoint) -> None:
        """Watch a replica; raise ConfigurationError for an id already watched, or an invalid URL."""
        if replica.replica_id in self._watched:
            raise ConfigurationError(f"replica {replica.replica_id!r} is there already")
        key = _key_of(replica)
        watched = self._by_url.get(key)
        if watched is None:
            try:
                asker = Asker(replica.url, replica.backend, self.settings.deadline_s, self.settings.max_bytes)
            except ConfigurationError as error:
                raise ConfigurationError(f"replica {replica.replica_id!r}: {error.message}") from error
            first_s = first_poll_after_s(self._added_count, self.settings.interval_s)
            watched = _Watched(self._added_count, key, asker, first_s)
            self._added_count += 1
            self._by_url[key] = self._by_number[watched.number] = watched
            if self._start is not None:
                self._start(watched)
        watched.endpoints[replica.replica_id] = replica
        self._watched[replica.replica_id] = watched
        self._say(watched)

    def _say(self, watched: _Watched) -> None:
        """Report a URL's current state to whoever polls instead."""
        if self.elsewhere is not None:
            self.elsewhere.watch(_watch_of(watched))

    @property
    def watches(self) -> list[Watch]:
        """Return all that is polled."""
        return [_watch_of(watched) for watched in self._by_url.values()]

    def remove(self, replica_id: str) -> None:
        """Stop watching a replica; the listener hears nothing more of it. An unknown id is ignored."""
        watched = self._watched.pop(replica_id, None)
        if watched is None:
            return
        del watched.endpoints[replica_id]
        watched.is_up.pop(replica_id, None)
        watched.trouble.pop(replica_id, None)
        if watched.endpoints:
            self._say(watched)
        else:
            del self._by_url[watched.key], self._by_number[watched.number]
            if self.elsewhere is not None:
                self.elsewhere.unwatch(watched.number)
            watched.suspected.set()  # its task ends by itself: a client cancelled while it connects may leak a socket

    def suspect(self, replica_id: str) -> None:
        """Poll a replica at once, because a request just failed there. An unknown id is ignored."""
        watched = self._watched.get(replica_id)
        if watched is not None:
            watched.suspected.set()

    def suspect_all(self, replica_ids: Iterable[str]) -> None:
        """Poll some replicas at once, and ask them for their models."""
        for replica_id in replica_ids:
            self.suspect(replica_id)

    def refused(self, replica_id: str) -> None:
        """Treat a replica as down until a poll finds it healthy, because it refused a connection."""
        watched = self._watched.get(replica_id)
        if watched is not None:
            watched.asked_s = asyncio.get_running_loop().time()  # what was asked before is late
            self._heard_failure(watched, Failure("connection refused", is_refusal=True))
            watched.suspected.set()

    def entrusted(self, number: int, *, elsewhere: bool) -> None:
        """Record whether others poll a URL from now on. An unknown number is ignored."""
        if (watched := self._by_number.get(number)) is not None:
            watched.told_s = asyncio.get_running_loop().time() if elsewhere else None

    def told(self, number: int, found: Found) -> None:
        """Take another poller's result like an own one; late polls are ignored."""
        if (watched := self._by_number.get(number)) is not None:
            if watched.told_s is not None:
                watched.told_s = asyncio.get_running_loop().time()
            self._heard(watched, found)

    async def run(self) -> None:
        """Poll until cancelled. Runs once at a time; an error in a listener ends it and is raised."""
        if self._start is not None:
            raise RuntimeError("the poller runs already")
        try:
            async with asyncio.TaskGroup() as group:
                self._start = lambda watched: group.create_task(
                    self._watch_with_client(watched), name=f"poll {next(iter(watched.endpoints), 'a replica')}"
                )
                for watched in self._by_url.values():
                    self._start(watched)
                await asyncio.get_running_loop().create_future()
        finally:
            self._start = None

    async def _watch_with_client(self, watched: _Watched) -> None:
        settings = self.settings
        async with watched.asker.client(settings.authorization, settings.ssl_context) as client:
            await self._watch(watched, client)

    async def _watch(self, watched: _Watched, client: aiohttp.ClientSession) -> None:
        """Poll one URL, in the rhythm of its first poll, and between when it is suspected."""
        loop = asyncio.get_running_loop()
        origin_s = loop.time() + watched.first_poll_after_s
        wait_s = watched.first_poll_after_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await watched.suspected.wait()
            if not watched.endpoints:
                return
            is_suspected = watched.suspected.is_set()
            watched.suspected.clear()
            if self._is_told(watched):
                if is_suspected and self.elsewhere is not None:
                    self.elsewhere.look(watched.number)
            else:
                if is_suspected:
                    watched.asker.polls_to_models = 0
                await self._poll(watched, client)
            wait_s = next_poll_after_s(origin_s, loop.time(), self.settings.interval_s)
            if 0 < watched.silent_count < SILENT_POLLS_COUNT and self.settings.deadline_s >= self.settings.interval_s:
                wait_s = 0.0  # the last one took longer than it is until the next

    def _is_told(self, watched: _Watched) -> bool:
        """Return whether others poll a URL, and report on it."""
        limit_s = ELSEWHERE_POLLS_COUNT * self.settings.interval_s + self.settings.deadline_s
        return watched.told_s is not None and asyncio.get_running_loop().time() - watched.told_s < limit_s

    async def _poll(self, watched: _Watched, client: aiohttp.ClientSession) -> None:
        answers = await watched.asker.ask(client)
        if not watched.endpoints:  # it was removed meanwhile
            return
        watch = _watch_of(watched)
        found = await watched.asker.found(answers, watch.rank_ids, finds_ranks=watch.finds_ranks)
        if watched.endpoints:
            self._heard(watched, found)

    def _heard(self, watched: _Watched, found: Found) -> None:
        """Process the result of a poll, unless a later one was processed."""
        asked_s = asyncio.get_running_loop().time() - found.age_s
        if asked_s < watched.asked_s:
            return
        watched.asked_s = asked_s
        if found.models is not None:
            watched.models = found.models
        elif found.lists_no_models:
            watched.models = watched.models or ()
        if found.failure is None:
            self._heard_health(watched, found)
        elif found.is_bad:
            self._heard_failure(watched, found.failure)
        else:
            self._heard_metrics_alone(watched, found)

    def _heard_health(self, watched: _Watched, found: Found) -> None:
        watched.begin_anew()
        self._find_ranks(watched, found.ranks_count)
        for endpoint in list(watched.endpoints.values()):  # a listener may remove the very replica it is told of
            replica_id = endpoint.replica_id
            is_split = endpoint.finds_ranks and endpoint.rank_id is None and watched.ranks_count > 1
            if is_split or replica_id not in watched.endpoints:  # its ranks replace it, or it was removed
                continue
            reading = self._read(watched, endpoint, found)
            if reading is None:
                continue
            # The reading goes first, so that nothing is granted on a replica whose capacity is about to be known.
            self._listener.replica_polled(replica_id, reading)
            if replica_id in watched.endpoints and not watched.is_up.get(replica_id):
                watched.is_up[replica_id] = True
                self._listener.replica_up(replica_id)

    def _find_ranks(self, watched: _Watched, ranks_count: int) -> None:
        """Tell the listener how many ranks there are, if that is new; it may change them."""
        if ranks_count and ranks_count != watched.ranks_count:
            watched.ranks_count = ranks_count
            self._listener.ranks_found(watched.asker.url, ranks_count)

    def _heard_metrics_alone(self, watched: _Watched, found: Found) -> None:
        """Keep replicas as they are, up or down, and take the readings of those that are up."""
        watched.begin_anew()
        for endpoint in list(watched.endpoints.values()):
            if endpoint.replica_id in watched.endpoints and watched.is_up.get(endpoint.replica_id):
                reading = self._read(watched, endpoint, found)
                if reading is not None:
                    self._listener.replica_polled(endpoint.replica_id, reading)

    def _heard_failure(self, watched: _Watched, failure: Failure) -> None:
        settings = self.settings
        if failure.is_silence:
            now_s = asyncio.get_running_loop().time()
            if watched.silent_since_s is None:
                watched.silent_since_s = watched.asked_s
            heard_ago_s = min(map(self._listener.heard_ago_s, watched.endpoints), default=inf)  # its turns tell, too
            stands_s = now_s - watched.asked_s if watched.silent_count else HEARD_WITHIN_S
            is_silent = heard_ago_s >= stands_s
            watched.silent_count = watched.silent_count + 1 if is_silent else 0
            silent_s = min(now_s - watched.silent_since_s, heard_ago_s)
            is_lost = failure.is_unreached or silent_s >= settings.silence_limit_s
            needs_limit = not is_lost and any(map(self._listener.may_be_silent, watched.endpoints))
            is_over = not watched.is_up or (watched.silent_count >= SILENT_POLLS_COUNT and not needs_limit)
        else:
            watched.failure_count += 1
            is_over = failure.is_refusal or watched.failure_count >= settings.down_after_failures
            is_lost = False
        if not is_over:
            return
        is_lost, watched.is_lost = is_lost and not watched.is_lost, is_lost or watched.is_lost
        for replica_id in list(watched.endpoints):
            if replica_id in watched.endpoints and watched.is_up.get(replica_id) is not False:
                watched.is_up[replica_id] = False
                self._listener.replica_down(replica_id, failure.why, is_silent=failure.is_silence)
            if replica_id in watched.endpoints and is_lost:
                self._listener.replica_lost(replica_id, failure.why)

    def _read(self, watched: _Watched, endpoint: ReplicaEndpoint, found: Found) -> ReplicaReading | None:
        """Return a replica's metrics, with the capacity from elsewhere; None if it was not asked for.

        Errors in them are logged when they change.
        """
        learn_kind(endpoint.backend, found.kind)
        reading = next((each.reading for each in found.readings if each.rank_id == endpoint.rank_id), None)
        if reading is None:
            return None
        why = None
        trouble: str | None = "unavailable"
        if found.metrics_failure is not None:
            why = found.metrics_failure.why
        else:
            trouble = None if reading != NOTHING_READ else "unreadable"
        if found.info_capacity_tokens is not None and reading.capacity_tokens is None and endpoint.rank_id is None:
            reading = replace(reading, capacity_tokens=found.info_capacity_tokens)
        if found.is_uncached is not None and reading.uncached_ranks_count is None:
            reading = replace(reading, uncached_ranks_count=int(found.is_uncached))
        if trouble is None and reading.capacity_tokens is None:
            trouble = "capacity unknown"
        if trouble != watched.trouble.get(endpoint.replica_id):
            watched.trouble[endpoint.replica_id] = trouble
            metrics_url = watched.asker.metrics_url.with_user(None)
            log = _log.bind(replica_id=endpoint.replica_id, url=str(metrics_url))
            if trouble is None:
                log.info("replica metrics are usable again")
            else:
                log.warning("replica metrics are not usable", trouble=trouble, why=why)
        return replace(reading, models=watched.models, age_s=asyncio.get_running_loop().time() - watched.asked_s)


def _key_of(replica: ReplicaEndpoint) -> tuple[str, str, str]:
    """Return the key of replicas that share their polls: ranks, and what may turn out to have some."""
    is_whole = replica.rank_id is None and not replica.finds_ranks
    return replica.url.rstrip("/"), replica.backend.kind, replica.replica_id if is_whole else ""


def _watch_of(watched: _Watched) -> Watch:
    endpoints = watched.endpoints.values()
    rank_ids = tuple(dict.fromkeys(each.rank_id for each in endpoints))
    return Watch(
        watched.number, watched.asker.url, watched.key[1], rank_ids, any(each.finds_ranks for each in endpoints)
    )
