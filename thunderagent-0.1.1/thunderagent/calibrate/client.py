"""Sends requests to one engine by HTTP, records when each token arrives, and reads the engine's facts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from thunderagent.bounded import BoundedBody, ExcessError
from thunderagent.errors import CalibrationError, CalibrationRefusedError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

SEGMENT_TOKENS: Final = 4  # tokens may arrive in pairs: intervals are measured over some

MAX_ANSWER_BYTES = 64 * 2**20
"""No answer to a measurement, and no report of an engine, is larger."""

_Body = TypeVar("_Body")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's facts; None is unknown.

    `limit_tokens`: a prompt and its answer together. `kv_tokens`: the part of the pool that requests can have.
    `is_vllm`: it has vLLM's metrics, which tell all except the model and the version.
    """

    model: str
    version: str
    is_vllm: bool
    limit_tokens: int | None
    kv_tokens: int | None
    block_size: int | None
    caches_prefixes: bool
    requests_count: int | None  # running and waiting


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request: when it was sent, when each token arrived, and its usage."""

    sent_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None

    @property
    def first_token_s(self) -> float:
        """Seconds from the sending of the request to its first token."""
        return self.token_times_s[0] - self.sent_s

    def interval_s(self, begin_s: float, end_s: float) -> float | None:
        """Return the median time between tokens that arrived in a window; None for too few."""
        times = [token_s for token_s in self.token_times_s if begin_s <= token_s <= end_s]
        intervals = [
            (later - earlier) / SEGMENT_TOKENS for earlier, later in zip(times, times[SEGMENT_TOKENS:], strict=False)
        ]
        # A busy server may put tokens together: then there are fewer arrivals than tokens.
        arrivals_per_token = len(self.token_times_s) / self.output_tokens
        return median(intervals) * arrivals_per_token if intervals else None


class EngineClient:
    """Sends requests to one engine by HTTP. Every failure raises CalibrationError, which names the URL.

    An engine without token-id input (not `speaks_ids`) is sent words, each of `tokens_per_word` tokens.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, clock: Callable[[], float]) -> None:
        self._http = http
        self.clock = clock
        self._url = url
        self.model = ""
        self.speaks_ids = True
        self.tokens_per_word = 1.0

    async def facts(self, model: str | None) -> EngineFacts:
        """Return the engine's facts; CalibrationError if it serves no such model."""
        models = self._parse((await self._get("/v1/models")), _Models).data
        entry = next((each for each in models if model in (None, each.id)), None)
        if entry is None:
            names = ", ".join(each.id for each in models)
            raise CalibrationError(f"{self._url} serves no model {model or ''}; it has: {names or 'none'}")
        self.model = entry.id
        metrics = _read_metrics(await self._exposition())
        if metrics.ranks_count > 1:
            raise CalibrationError(
                f"{self._url} has {metrics.ranks_count} data-parallel ranks behind one URL, which share the "
                f"requests: calibrate an engine with one rank"
            )
        kv_tokens = metrics.kv_tokens
        if kv_tokens and metrics.block_size:
            # vLLM counts its first block, which it never gives to a request: the null block stands for no block
            # (vllm/v1/core/block_pool.py, BlockPool). The engine model has no such block. Whoever speaks vLLM's dialect
            # and has none either, as `thunderagent engine`, is taken for one block smaller than it is.
            kv_tokens = max(0, kv_tokens - metrics.block_size) or None
        limits = [limit for limit in (entry.max_model_len, kv_tokens) if limit]
        return EngineFacts(
            model=self.model,
            version=await self._version(),
            is_vllm=metrics.is_vllm,
            limit_tokens=min(limits, default=None),
            kv_tokens=kv_tokens,
            block_size=metrics.block_size,
            caches_prefixes=metrics.caches_prefixes,
            requests_count=metrics.requests_count,
        )

    async def generate(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """Return the answer, of exactly this length, to a prompt of token ids, or of as many words."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": list(prompt) if self.speaks_ids else " ".join(f"w{number}" for number in prompt),
                "max_tokens": output_tokens,
                "min_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        arrivals: list[tuple[float, bytes]] = []  # read after the end: parsing takes time
        come_bytes = 0
        sent_s = self.clock()
        async with self._request("POST", "/v1/completions", data=body) as response:
            try:
                async for line in response.content:
                    come_bytes += len(line)
                    if come_bytes > MAX_ANSWER_BYTES:
                        raise CalibrationError(f"{self._url}/v1/completions sent more than {MAX_ANSWER_BYTES} bytes")
                    if line.startswith(b"data:"):
                        arrivals.append((self.clock(), line))
            except ValueError as error:  # aiohttp's word for it
                raise CalibrationError(f"{self._url}/v1/completions streamed too long a line") from error
        return self._read(sent_s, arrivals)

    async def generate_all(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Answer]:
        """Return the answers to prompts that are sent at once."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.generate(prompt, output_tokens)) for prompt in prompts]
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None  # one is enough: the others failed alike, or were cancelled
        return [task.result() for task in tasks]

    def _read(self, sent_s: float, arrivals: list[tuple[float, bytes]]) -> Answer:
        times: list[float] = []
        usage = None
        for arrival_s, line in arrivals:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                break
            event = self._parse(data, _Event)
            if event.error is not None:
                raise CalibrationError(f"{self._url}/v1/completions broke off: {event.error}")
            if event.choices:
                times.append(arrival_s)
            usage = event.usage or usage
        if not times or usage is None or usage.completion_tokens < 1:
            raise CalibrationError(f"{self._url}/v1/completions streamed no tokens, or did not say how many")
        details = usage.prompt_tokens_details
        return Answer(
            sent_s=sent_s,
            token_times_s=tuple(times),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        )

    async def _get(self, path: str) -> bytes:
        async with self._request("GET", path) as response:
            return await self._bounded(response, path)

    async def _bounded(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        come = BoundedBody(MAX_ANSWER_BYTES)  # as the client unpacked it, piece by piece
        try:
            async for piece in response.content.iter_any():
                come.add(piece)
        except ExcessError as error:
            raise CalibrationError(f"{self._url}{path} {error}") from error
        return bytes(come.taken())

    async def _exposition(self) -> str:
        """Return the engine's metrics; "" if it has none."""
        try:
            return (await self._get("/metrics")).decode("utf-8", "replace")
        except CalibrationRefusedError:
            return ""

    async def _version(self) -> str:
        """Return the engine's version; "" if unreadable: it is informational, and never an error."""
        try:
            return self._parse(await self._get("/version"), _Version).version
        except CalibrationError:
            return ""

    def _parse(self, data: bytes, kind: type[_Body]) -> _Body:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CalibrationError(
                f"{self._url} does not answer as an engine with OpenAI's API does: {error}: {data[:100]!r}"
            ) from error

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self._url}{path}"
        try:
            async with self._http.request(
                method, url, headers={"Content-Type": "application/json"}, **options
            ) as response:
                if response.status != 200:
                    text = " ".join((await self._bounded(response, path)).decode(errors="replace").split())
                    raise CalibrationRefusedError(
                        f"{url} answered {response.status}: {text[:300]}", engine_status=response.status
                    )
                yield response
        except TimeoutError as error:
            raise CalibrationError(f"{url} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CalibrationError(f"no engine answers at {url}: {error}") from error


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class _Metrics:
    """The metrics of an exposition; None and 0 ranks if missing. `kv_tokens` counts all blocks."""

    is_vllm: bool
    ranks_count: int
    kv_tokens: int | None
    block_size: int | None
    caches_prefixes: bool
    requests_count: int | None


def _read_metrics(exposition: str) -> _Metrics:
    """Read the few metrics of vLLM that matter here."""
    names = ("vllm:cache_config_info", "vllm:num_requests_running", "vllm:num_requests_waiting")
    samples = list(_samples(exposition, names))
    infos = [sample.labels for sample in samples if sample.name == names[0]]
    counts = [int(sample.value) for sample in samples if sample.name in names[1:]]
    sizes = [_size(labels, "kv_cache_size_tokens") for labels in infos]
    products = [(_size(labels, "num_gpu_blocks") or 0) * (_size(labels, "block_size") or 0) for labels in infos]
    return _Metrics(
        is_vllm=bool(samples),
        ranks_count=len({labels.get("engine", "") for labels in infos}),
        kv_tokens=next((size for size in (*sizes, *products) if size), None),
        block_size=next((size for labels in infos if (size := _size(labels, "block_size"))), None),
        caches_prefixes=not any(labels.get("enable_prefix_caching") == "False" for labels in infos),
        requests_count=sum(counts) if counts else None,
    )


def _samples(exposition: str, names: tuple[str, ...]) -> Iterator[Sample]:
    """Read the lines that begin with these names one by one; broken ones are skipped."""
    for line in exposition.splitlines():
        if line.startswith(names):
            with suppress(ValueError, IndexError, OverflowError):  # the parser raises any of these
                samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
                yield from (sample for sample in samples if sample.name in names and math.isfinite(sample.value))


def _size(labels: dict[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= 18 else None  # it may be "None"
