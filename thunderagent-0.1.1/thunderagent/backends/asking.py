"""One poll of one URL: its health, its metrics, its models, and its capacity if only that says it.

The asker need not draw the conclusions: `Found` is the whole result of a poll, and can be sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from ssl import SSLContext
from typing import Annotated, Any, NamedTuple, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct
from yarl import URL

from thunderagent.backends.base import Backend, ReplicaReading
from thunderagent.backends.exposition import check_exposition
from thunderagent.backends.ranks import by_rank_of, rank_count_of
from thunderagent.bounded import UNPACKED_ONLY, BoundedBody, ExcessError
from thunderagent.errors import ConfigurationError

MODELS_PATH = "/v1/models"
MODELS_EVERY_POLLS = 10
"""How often an engine that is up is asked for its models; at once when it is suspected."""

MOST_WHY_CHARS = 200

MAX_POLL_BYTES = 8 * 2**20
"""An answer to a poll that is larger, packed or not, takes the replica down. Engines' metrics are below 1 MiB."""

MAX_LIST_BYTES = 2 * 2**20
"""The same for a list of models, and for an engine's information about itself."""

MAX_MODELS_COUNT = 2_000
"""A replica that lists more models is down: each name costs the scheduler time. vLLM writes 1 kB for each."""

MAX_MODEL_CHARS = 512
MAX_BYTES_PER_CHAR = 12  # half of a surrogate pair takes six
"""A longer name is left out: no turn can ask for it."""

MAX_PARTS_COUNT = 16 * MAX_MODELS_COUNT
"""Objects in a list of models; vLLM writes two for each model."""

ASIDE_BYTES = 64 * 1024
"""A larger answer is read on a thread."""

CONNECT_RATIO = 0.9
"""Part of a poll's deadline in which its connection must be made."""

KEEPALIVE_S = 4.0
"""uvicorn, which engines run on, closes a connection that is idle for 5 s."""

_GOLDEN_RATIO = 0.6180339887

_TIMER_ERROR_S = 0.001
"""A timer may fire half of this early: uvloop rounds to whole milliseconds."""

Read = TypeVar("Read")

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
    is_excess: bool = False
    """Whether the answer was beyond a bound: the engine is not one that can be polled."""
    is_unreached: bool = False
    """Whether not even a connection was made in time: a process that is only busy has its kernel accept it."""


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
    is_uncached: bool | None = None
    """Whether its prefix cache is turned off, if it says so beside the metrics."""

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

    def __init__(self, url: str, backend: Backend, deadline_s: float, max_bytes: int = MAX_POLL_BYTES) -> None:
        """Ask at `url`, for `backend`, for answers of `max_bytes`. Raises `ConfigurationError` for an invalid URL."""
        self.url = url
        self.backend = backend
        self.health_url = url_of(url, backend.health_path)
        self.metrics_url = url_of(url, backend.metrics_path)
        self.polls_to_models = 0
        """How many polls until it is asked for its models."""
        self.is_uncached: bool | None = None
        """What the engine's present process said of its prefix cache beside the metrics."""
        self._started_s: float | None = None
        self._deadline_s = deadline_s
        self.max_bytes = max_bytes

    def client(self, authorization: str, ssl_context: SSLContext | None) -> aiohttp.ClientSession:
        """Return a client of its own, so that its connections close with it; without a context it trusts the system."""
        headers = {"User-Agent": "thunderagent", **UNPACKED_ONLY}
        if authorization and self.health_url.user is None:  # a login in the URL goes first
            headers["Authorization"] = authorization
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl_context or True, keepalive_timeout=KEEPALIVE_S, use_dns_cache=False),
            # Of its parts; the deadline is for the whole answer.
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_RATIO * self._deadline_s),
            headers=headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def ask(self, client: aiohttp.ClientSession) -> Answers:
        """Ask for health and metrics at the same time, then for everything else needed."""
        asked_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._get(client, self.health_url))
            asking_metrics = group.create_task(self._get(client, self.metrics_url))
        health, metrics = asking.result(), asking_metrics.result()
        reading, metrics = await self._checked(metrics, self._read, self.backend.metrics_path)
        failure = health if isinstance(health, Failure) else None
        is_dead = failure is not None and isinstance(metrics, Failure)
        needs_info = not is_dead and (reading is None or reading.capacity_tokens is None)
        started_s = reading.started_s if reading is not None else self._started_s
        if is_dead or started_s != self._started_s:
            self.is_uncached, self._started_s = None, started_s
        models = None
        if is_dead:
            self.polls_to_models = 0  # the next to answer may be another engine
        if self.polls_to_models <= 0 and (isinstance(metrics, str) or failure is None):
            models = await self._get(client, url_of(self.url, MODELS_PATH), MAX_LIST_BYTES)  # on an open connection
            _, models = await self._checked(models, models_in, MODELS_PATH)
            if isinstance(models, str) or models.is_answer:
                self.polls_to_models = MODELS_EVERY_POLLS
            needs_info = needs_info or self.is_uncached is None  # it never changes
        self.polls_to_models -= 1
        for answer in (metrics, models):
            if isinstance(answer, Failure) and answer.is_excess:
                failure, self.polls_to_models = answer, 0
        info = await self._info(client) if needs_info else None
        if info is not None:
            self.is_uncached = await aside(partial(self.backend.read_uncached, info), info)
        return Answers(asked_s, failure, metrics, info, models)

    def _read(self, metrics: str) -> ReplicaReading:
        check_exposition(metrics)
        return self.backend.read_metrics(metrics)

    async def _checked(
        self, answer: str | Failure, read: Callable[[str], object], path: str
    ) -> tuple[Any, str | Failure]:
        """Return what an answer says and the answer, which is a failure if it is beyond a bound."""
        if isinstance(answer, Failure):
            return None, answer
        try:
            return await aside(partial(read, answer), answer), answer
        except ExcessError as error:
            return None, Failure(f"{path} {error}", is_excess=True)

    async def _info(self, client: aiohttp.ClientSession) -> str | None:
        """Ask for the capacity, if its kind reports it beside the metrics."""
        for path in self.backend.info_paths:
            info = await self._get(client, url_of(self.url, path), MAX_LIST_BYTES)
            if not isinstance(info, Failure):
                return info
        return None

    async def _get(self, client: aiohttp.ClientSession, url: URL, max_bytes: int | None = None) -> str | Failure:
        """Return the body of a 2xx answer, or how the request failed. Expected failures end here."""
        deadline_s, max_bytes = self._deadline_s, min(self.max_bytes, max_bytes or self.max_bytes)
        try:
            async with asyncio.timeout(deadline_s), client.get(url, allow_redirects=False) as response:
                body = BoundedBody(max_bytes, response.headers.get("Content-Encoding"))
                async for piece in response.content.iter_any():
                    body.add(piece)
                # Both formats are UTF-8; other charsets that Python knows would produce what is no text.
                text = body.taken().decode(errors="replace")
        except ExcessError as error:
            if not 200 <= response.status < 300:
                return Failure(f"{url.path} answered {response.status}", is_answer=True)
            return Failure(f"{url.path} {error}", is_excess=True)
        except aiohttp.ConnectionTimeoutError:
            return Failure(f"no connection within {deadline_s:g} s", is_silence=True, is_unreached=True)
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

    async def found(self, answers: Answers, rank_ids: Collection[int | None], *, finds_ranks: bool) -> Found:
        """Read the answers, for these ranks and, if they are to be found, for all; on a thread if they are large."""
        age_s = asyncio.get_running_loop().time() - answers.asked_s
        return await aside(partial(self._found, answers, rank_ids, age_s, finds_ranks=finds_ranks), *answers[2:])

    def _found(self, answers: Answers, rank_ids: Collection[int | None], age_s: float, *, finds_ranks: bool) -> Found:
        metrics, models, backend = answers.metrics, answers.models, self.backend
        ranks_count = 0
        if isinstance(metrics, str) and (finds_ranks or any(each is not None for each in rank_ids)):
            ranks_count = rank_count_of(metrics, backend.rank_label)
        all_ids = dict.fromkeys([*rank_ids, *(range(ranks_count) if finds_ranks and ranks_count > 1 else ())])
        by_rank = {} if isinstance(metrics, Failure) else by_rank_of(metrics, backend.rank_label, all_ids)
        readings = tuple(
            RankReading(each, self._figures(metrics, each, by_rank.get(each, ""), ranks_count)) for each in all_ids
        )
        info = answers.info
        return Found(
            age_s,
            answers.failure,
            metrics if isinstance(metrics, Failure) else None,
            readings,
            # Last, because reading the metrics finds the kind.
            info_capacity_tokens=backend.read_info(info) if info is not None and None in all_ids else None,
            kind=backend.kind,
            ranks_count=ranks_count if finds_ranks else 0,
            models=models_in(models) if isinstance(models, str) else None,
            lists_no_models=isinstance(models, Failure) and models.is_answer,
            is_uncached=self.is_uncached,
        )

    def _figures(
        self, metrics: str | Failure, rank_id: int | None, of_rank: str, ranks_count: int
    ) -> tuple[int | float | None, ...]:
        if isinstance(metrics, Failure):
            return ()
        if rank_id is None:
            reading = self.backend.read_metrics(metrics)
        else:
            reading = self.backend.read_metrics(of_rank, max(1, ranks_count))
        return tuple(getattr(reading, name) for name in _FIGURES)


async def aside(read: Callable[[], Read], *texts: object) -> Read:
    """Call `read`, on a thread if what it reads is large."""
    size_chars = sum(len(text) for text in texts if isinstance(text, str))
    return read() if size_chars <= ASIDE_BYTES else await asyncio.to_thread(read)


class _Listed(Struct):
    """A model in a list, as far as it matters: nothing else is built."""

    id: msgspec.Raw = msgspec.Raw()


class _Models(Struct):
    data: list[_Listed] = []


_decode_models = msgspec.json.Decoder(_Models).decode


def models_in(answer: str) -> tuple[str, ...]:
    """Return the names in a list of models of OpenAI's API, each once; none if it is no such list.

    Raises `ExcessError` if there are more than `MAX_MODELS_COUNT`.
    """
    if len(answer) > ASIDE_BYTES and answer.count("{") > MAX_PARTS_COUNT:
        raise ExcessError(f"lists more than {MAX_MODELS_COUNT} models")
    try:
        ids = [each.id for each in _decode_models(answer).data if len(each.id) <= MAX_MODEL_CHARS * MAX_BYTES_PER_CHAR]
        names = [msgspec.json.decode(each) for each in ids if bytes(memoryview(each)[:1]) == b'"']
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    kept = tuple(dict.fromkeys(name for name in names if 0 < len(name) <= MAX_MODEL_CHARS))
    if len(kept) > MAX_MODELS_COUNT:
        raise ExcessError(f"lists more than {MAX_MODELS_COUNT} models")
    return kept


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
