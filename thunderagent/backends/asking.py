"""One poll of one URL: its health, its metrics, its models, and its capacity if only that says it.

The asker need not draw the conclusions: `Found` is the whole result of a poll, and can be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import fields
from ssl import SSLContext
from typing import Annotated, NamedTuple

import aiohttp
import msgspec
from msgspec import Meta, Struct
from yarl import URL

from thunderagent.backends.base import NOTHING_READ, Backend, ReplicaReading
from thunderagent.backends.ranks import of_rank, rank_count_of
from thunderagent.errors import ConfigurationError

MODELS_PATH = "/v1/models"
MODELS_EVERY_POLLS = 10
"""How often an engine that is up is asked for its models; at once when it is suspected."""

MOST_WHY_CHARS = 200

KEEPALIVE_S = 4.0
"""uvicorn, which engines run on, closes a connection that is idle for 5 s."""

_GOLDEN_RATIO = 0.6180339887

_TIMER_ERROR_S = 0.001
"""A timer may fire half of this early: uvloop rounds to whole milliseconds."""

_FIGURES = tuple(each.name for each in fields(ReplicaReading) if each.compare)


class Watch(Struct, frozen=True, array_like=True):
    """One URL to be polled: its number, its engine's kind, and which of its ranks are replicas; None is the whole."""

    number: int
    url: str
    kind: str = "auto"
    rank_ids: tuple[int | None, ...] = (None,)
    finds_ranks: bool = False
    """Whether somebody wants to know how many ranks there are."""


class Failure(Struct, frozen=True, array_like=True):
    """How a request failed: refused, without an answer in time, or answered with another status than 2xx."""

    why: str
    is_refusal: bool = False
    is_silence: bool = False
    is_answer: bool = False


class RankReading(Struct, frozen=True, array_like=True):
    """The metrics of one rank, or of the whole: the figures of a `ReplicaReading` in order."""

    rank_id: int | None
    figures: tuple[int | float | None, ...] = ()

    @property
    def reading(self) -> ReplicaReading:
        """Return the reading; fields that a later version adds are left out."""
        return ReplicaReading(**dict(zip(_FIGURES, self.figures, strict=False)))  # type: ignore[arg-type]


class Found(Struct, frozen=True, array_like=True):
    """What one poll of a URL found."""

    age_s: Annotated[float, Meta(ge=0)]
    """How long ago the engine was asked."""
    failure: Failure | None = None
    """Of its health; None means that it can serve."""
    metrics_failure: Failure | None = None
    readings: tuple[RankReading, ...] = ()
    kind: str = "auto"
    """Of the engine, as far as known."""
    ranks_count: int = 0
    """Number of ranks; 0 if not asked for, or not reported."""
    info_capacity_tokens: int | None = None
    """The capacity, if it is reported beside the metrics."""
    models: tuple[str, ...] | None = None
    """The names that it lists; None if it was not asked now, or did not answer."""
    lists_no_models: bool = False
    """Whether it was asked, and has no such list."""

    @property
    def is_bad(self) -> bool:
        """Whether the poll counts against the engine: one that answers for its metrics alone is not silent."""
        failure = self.failure
        return failure is not None and not (failure.is_silence and self.metrics_failure is None)


class Answers(NamedTuple):
    """A URL's unread answers."""

    asked_s: float
    failure: Failure | None
    metrics: str | Failure
    info: str | None
    models: str | Failure | None


class Asker:
    """Polls one URL, with a deadline for each answer."""

    def __init__(self, url: str, backend: Backend, deadline_s: float) -> None:
        """Ask at `url`, for `backend`. Raises `ConfigurationError` for an invalid URL."""
        self.url = url
        self.backend = backend
        self.health_url = url_of(url, backend.health_path)
        self.metrics_url = url_of(url, backend.metrics_path)
        self.polls_to_models = 0
        """How many polls until it is asked for its models."""
        self._deadline_s = deadline_s

    def client(self, authorization: str, ssl_context: SSLContext | None) -> aiohttp.ClientSession:
        """Return a client of its own, so that its connections close with it; without a context it trusts the system."""
        headers = {"User-Agent": "thunderagent"}
        if authorization and self.health_url.user is None:  # a login in the URL goes first
            headers["Authorization"] = authorization
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl_context or True, keepalive_timeout=KEEPALIVE_S, use_dns_cache=False),
            timeout=aiohttp.ClientTimeout(),  # of its parts; the deadline is for the whole answer
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def ask(self, client: aiohttp.ClientSession) -> Answers:
        """Ask for health and metrics at the same time, then for everything else needed."""
        asked_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._get(client, self.health_url))
            asking_metrics = group.create_task(self._get(client, self.metrics_url))
        health, metrics = asking.result(), asking_metrics.result()
        failure = health if isinstance(health, Failure) else None
        models = None
        if failure is not None and isinstance(metrics, Failure):
            self.polls_to_models = 0  # the next to answer may be another engine
        if self.polls_to_models <= 0 and (isinstance(metrics, str) or failure is None):
            models = await self._get(client, url_of(self.url, MODELS_PATH))  # on an open connection
            if isinstance(models, str) or models.is_answer:
                self.polls_to_models = MODELS_EVERY_POLLS
        self.polls_to_models -= 1
        return Answers(asked_s, failure, metrics, await self._info(metrics, client), models)

    async def _info(self, metrics: str | Failure, client: aiohttp.ClientSession) -> str | None:
        """Ask for the capacity if its kind reports it beside the metrics, and those lack it."""
        reading = NOTHING_READ if isinstance(metrics, Failure) else self.backend.read_metrics(metrics)
        if reading.capacity_tokens is None:
            for path in self.backend.info_paths:
                info = await self._get(client, url_of(self.url, path))
                if not isinstance(info, Failure):
                    return info
        return None

    async def _get(self, client: aiohttp.ClientSession, url: URL) -> str | Failure:
        """Return the body of a 2xx answer, or how the request failed. Expected failures end here."""
        deadline_s = self._deadline_s
        try:
            async with asyncio.timeout(deadline_s), client.get(url, allow_redirects=False) as response:
                # Both formats are UTF-8; other charsets that Python knows would produce what is no text.
                text = (await response.read()).decode(errors="replace")
        except TimeoutError:
            return Failure(f"no answer within {deadline_s:g} s", is_silence=True)
        except (aiohttp.ClientError, ValueError) as error:  # also what cannot be sent
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
                return Failure("connection refused", is_refusal=True)
            why = " ".join(str(error).split())  # it may quote what the engine sent
            return Failure(f"{type(error).__name__}: {why[:MOST_WHY_CHARS]}")
        if not 200 <= response.status < 300:
            return Failure(f"{url.path} answered {response.status}", is_answer=True)
        return text

    def found(self, answers: Answers, rank_ids: Collection[int | None], *, finds_ranks: bool) -> Found:
        """Read the answers, for these ranks and, if they are to be found, for all."""
        metrics, models, backend = answers.metrics, answers.models, self.backend
        ranks_count = 0
        if isinstance(metrics, str) and (finds_ranks or any(each is not None for each in rank_ids)):
            ranks_count = rank_count_of(metrics, backend.rank_label)
        all_ids = dict.fromkeys([*rank_ids, *(range(ranks_count) if finds_ranks and ranks_count > 1 else ())])
        readings = tuple(RankReading(each, self._figures(metrics, each, ranks_count)) for each in all_ids)
        info = answers.info
        return Found(
            asyncio.get_running_loop().time() - answers.asked_s,
            answers.failure,
            metrics if isinstance(metrics, Failure) else None,
            readings,
            # Last, because reading the metrics finds the kind.
            info_capacity_tokens=backend.read_info(info) if info is not None and None in all_ids else None,
            kind=backend.kind,
            ranks_count=ranks_count if finds_ranks else 0,
            models=models_in(models) if isinstance(models, str) else None,
            lists_no_models=isinstance(models, Failure) and models.is_answer,
        )

    def _figures(self, metrics: str | Failure, rank_id: int | None, ranks_count: int) -> tuple[int | float | None, ...]:
        if isinstance(metrics, Failure):
            return ()
        if rank_id is None:
            reading = self.backend.read_metrics(metrics)
        else:
            text = of_rank(metrics, self.backend.rank_label, rank_id)
            reading = self.backend.read_metrics(text, max(1, ranks_count))
        return tuple(getattr(reading, name) for name in _FIGURES)


def models_in(answer: str) -> tuple[str, ...]:
    """Return the names in a list of models of OpenAI's API, each once; none if it is no such list."""
    try:
        data = msgspec.json.decode(answer)["data"]
        return tuple(dict.fromkeys(each["id"] for each in data if each["id"] and isinstance(each["id"], str)))
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return ()


def url_of(url: str, path: str) -> URL:
    """Return the URL of a path below another one. Raises `ConfigurationError` if that is invalid."""
    try:
        joined = URL(url.rstrip("/") + path)
        is_http = joined.scheme in {"http", "https"} and bool(joined.host)
    except ValueError as error:
        raise ConfigurationError("its URL is none") from error
    if not is_http:
        raise ConfigurationError("its URL is not an http or https URL")
    return joined


def first_poll_after_s(number: int, interval_s: float) -> float:
    """Return how long to wait for the first poll of a URL, below one interval.

    Multiples of the golden ratio are spread evenly, however many there are, and the same way every time.
    """
    return number * _GOLDEN_RATIO % 1.0 * interval_s


def next_poll_after_s(first_s: float, now_s: float, interval_s: float) -> float:
    """Return how long to wait for the next poll in the rhythm of the first one, which was due at `first_s`.

    A poll that is due within the error of a timer is the one just made.
    """
    return (first_s - now_s - _TIMER_ERROR_S) % interval_s + _TIMER_ERROR_S
