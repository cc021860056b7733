"""Measure an engine: what is asked of it, and which observations that gives.

Theory of operation
-------------------
Requests are streamed and have exact lengths; what arrives when is all that is measured. Prompts are random token ids,
so that only what is meant to hits the prefix cache. Four experiments, smallest sizes first:

1. *prefill*: single requests of one token; the time to first token against the length of the prompt.
2. *prefill on context*: the same behind a prompt that was just computed, so that it is cached.
3. *decode*: requests at a time, with short prompts; the time between tokens while all of them are decoding.
4. *decode on context*: the same with long prompts, one for each request: a shared one would be faster to read.

A round is all of that once. The first finds out how large the sizes can be: a series ends where the next size would
take more than a part of the budget, or, on an engine that does not tell its context limit, where it refuses one. Rounds
are repeated until the time is over; `simulator/engine/calibration.py` fits.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from typing import Final

import aiohttp

from thunderagent.calibrate.client import Answer, EngineClient, EngineFacts
from thunderagent.errors import CalibrationError, CalibrationRefusedError
from thunderagent.simulator.engine.calibration import (
    ASSUMED_CHUNK_TOKENS,
    POOR_FIT_RATIO,
    ChunkSize,
    Fit,
    Observation,
    decode_observation,
    fit,
    in_chunks,
    prefill_observation,
    tell_chunk_size,
)
from thunderagent.simulator.engine.timing import COSTS_US, TimingProfile

ROUNDS_COUNT: Final = 5  # at most: more repetitions tell little more
SERIES_RATIO: Final = 1 / 20  # of the budget, that one size may take
DECODE_RATIO: Final = 1 / 100  # of the budget, that a measurement of decoding should take
LONGEST_PROMPT_TOKENS: Final = 16_384
SHORTEST_PROMPT_TOKENS: Final = 64
SHORT_PROMPT_TOKENS: Final = 32  # of requests that are to decode
NEW_TOKENS: Final = (64, 256, 1024)  # behind a context
MOST_REQUESTS_COUNT: Final = 128
MOST_CONTEXTS_COUNT: Final = 4  # long ones, that requests decode on at a time
NEEDED_SIZES_COUNT: Final = 3  # of a series, however long they take
POOL_RATIO: Final = 0.8  # of the pool, that requests at a time may take
LEAST_DECODE_TOKENS: Final = 16
MOST_DECODE_TOKENS: Final = 128
DEFAULT_BLOCK_SIZE: Final = 16
TOO_LONG_STATUSES: Final = (400, 413, 422)  # of an engine that is asked for more than its context


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure: for how long, with which token ids, and known facts of the engine; None is unknown."""

    budget_s: float = 120.0
    max_num_batched_tokens: int | None = None
    token_ids: range = range(100, 1001)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured engine, and its profile."""

    facts: EngineFacts
    fit: Fit
    timing: TimingProfile
    warnings: tuple[str, ...]


@dataclass(slots=True)
class Measurement:
    """A running calibration; `on_progress` is called with texts."""

    client: EngineClient
    facts: EngineFacts
    settings: Settings
    on_progress: Callable[[str], None]
    observations: list[Observation] = field(default_factory=list)
    rounds_count: int = 0
    tells_cached: bool = False
    context_hits_count: int = 0
    _begin_s: float = field(init=False)
    # Prompts must differ from each other and from the last calibration's; they need not be secret.
    _random: random.Random = field(default_factory=random.Random)
    _last_sizes: dict[str, int] = field(default_factory=dict)
    _taken_tokens: int | None = None
    """Stands for an unknown limit once prompts became too slow to look for it: what it took, and a token."""
    _output_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    _interval_s: float = 0.01

    def __post_init__(self) -> None:
        self._begin_s = self.client.clock()

    async def run(self) -> None:
        """Measure round after round; the first is finished, however long it takes."""
        if self._limit_tokens < 4 * SHORTEST_PROMPT_TOKENS:
            raise CalibrationError(f"a context of {self._limit_tokens} tokens is too short to measure anything")
        await self._warm_up()
        while self.rounds_count < ROUNDS_COUNT and not self._is_over:
            await self._measure_prefill()
            await self._measure_contexts()
            await self._measure_decode()
            self.rounds_count += 1

    @property
    def _is_over(self) -> bool:
        return self.rounds_count > 0 and self.client.clock() - self._begin_s > self.settings.budget_s

    @property
    def _limit_tokens(self) -> int:
        """Return the limit of a prompt and its answer; less exact for a text."""
        if self.facts.limit_tokens is None and self._taken_tokens is not None:
            return self._taken_tokens
        limit_tokens = min(self.facts.limit_tokens or LONGEST_PROMPT_TOKENS, LONGEST_PROMPT_TOKENS)
        return limit_tokens if self.client.speaks_ids else int(0.8 * limit_tokens)

    @property
    def _pool_tokens(self) -> float:
        """Return the part of the pool for simultaneous requests, so that none is preempted."""
        return POOL_RATIO * (self.facts.kv_tokens or self._limit_tokens)

    @property
    def _block_size(self) -> int:
        return self.facts.block_size or DEFAULT_BLOCK_SIZE

    async def _warm_up(self) -> None:
        """Warm the engine up, and find out whether it accepts token ids, and its approximate speed."""
        prompt = self._fresh(SHORTEST_PROMPT_TOKENS)
        try:
            await self.client.generate(prompt, LEAST_DECODE_TOKENS)
        except CalibrationRefusedError as error:
            if error.engine_status not in (400, 422):
                raise
            self.client.speaks_ids = False
            answer = await self.client.generate(prompt, LEAST_DECODE_TOKENS)
            self.client.tokens_per_word = answer.prompt_tokens / len(prompt)
        answer = await self.client.generate(self._fresh(SHORTEST_PROMPT_TOKENS), LEAST_DECODE_TOKENS)
        self._interval_s = answer.interval_s(-math.inf, math.inf) or self._interval_s

    async def _measure_prefill(self) -> None:
        most_tokens = self._limit_tokens - 1
        sizes = [size for power in range(20) if (size := SHORTEST_PROMPT_TOKENS << power) <= most_tokens]
        if most_tokens > 1.4 * sizes[-1]:
            sizes.append(most_tokens)
        for prompt_tokens in self._affordable("prefill", sizes):
            try:
                await self._observe_prefill("prefill", self._fresh(prompt_tokens), 0)
            except CalibrationRefusedError as error:
                is_too_long = error.engine_status in TOO_LONG_STATUSES and prompt_tokens >= 4 * SHORTEST_PROMPT_TOKENS
                if self.facts.limit_tokens is not None or not is_too_long:
                    raise
                self._last_sizes["prefill"] = prompt_tokens // 2  # it accepted that: the limit is in between
                self.facts = replace(self.facts, limit_tokens=prompt_tokens // 2 + 1)
                return
        self._taken_tokens = self._last_sizes["prefill"] + 1

    async def _measure_contexts(self) -> None:
        """Measure prefill and decode behind two lengths of cached context."""
        size = self._block_size
        longest_tokens = self._last_sizes["prefill"]
        contexts = sorted({max(size, int(longest_tokens * part) // size * size) for part in (0.25, 0.75)})
        for context_tokens in self._affordable("context", contexts):
            context = self._fresh(context_tokens)
            answer = await self._observe_prefill("prefill", context, 0)
            cached_tokens = answer.prompt_tokens // size * size if self.facts.caches_prefixes else 0
            for new_tokens in NEW_TOKENS:
                if not self._is_over and new_tokens <= min(longest_tokens, self._limit_tokens - context_tokens - 1):
                    prompt = [*context, *self._fresh(new_tokens)]
                    answer = await self._observe_prefill("prefill on context", prompt, cached_tokens)
                    self.context_hits_count += answer.cached_tokens != 0
            await self._observe_decode("decode on context", [context])
            others = [self._fresh(context_tokens) for _ in range(self._contexts_count(context_tokens) - 1)]
            for other in others:
                await self._observe_prefill("prefill", other, 0)
            if others:
                await self._observe_decode("decode on context", [context, *others])

    async def _measure_decode(self) -> None:
        counts = [1 << power for power in range(MOST_REQUESTS_COUNT.bit_length())]
        for requests_count in self._affordable("decode", counts):
            await self._observe_decode("decode", [[]] * requests_count)

    def _affordable(self, series: str, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the sizes of a series, until the next would take too long; later rounds end where the first did.

        The time of a size is measured until the next one is requested.
        """
        most_s = self.settings.budget_s * SERIES_RATIO
        took_s = 0.0
        for index, size in enumerate(sizes):
            if self._is_over or (self.rounds_count and size > self._last_sizes[series]):
                return
            if not self.rounds_count:
                if index >= NEEDED_SIZES_COUNT and took_s * size / sizes[index - 1] > most_s:
                    return
                self._last_sizes[series] = size
            self.on_progress(f"round {self.rounds_count + 1}: {series}, {size}")
            begin_s = self.client.clock()
            yield size
            took_s = self.client.clock() - begin_s

    async def _observe_prefill(self, experiment: str, prompt: Sequence[int], likely_cached_tokens: int) -> Answer:
        answer = await self.client.generate(prompt, 1)
        self.tells_cached |= answer.cached_tokens is not None
        cached_tokens = answer.cached_tokens
        if cached_tokens is None:  # some versions do not say that it is 0
            cached_tokens = 0 if self.tells_cached else likely_cached_tokens
        self.observations.append(
            prefill_observation(
                experiment,
                answer.first_token_s,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=cached_tokens,
                max_num_batched_tokens=self.settings.max_num_batched_tokens or ASSUMED_CHUNK_TOKENS,
            )
        )
        return answer

    def _contexts_count(self, context_tokens: int) -> int:
        """Return how many contexts of this length fit in the pool together, with what follows them."""
        room_tokens = context_tokens + SHORT_PROMPT_TOKENS + MOST_DECODE_TOKENS + self._block_size
        return min(MOST_CONTEXTS_COUNT, int(self._pool_tokens / room_tokens))

    async def _observe_decode(self, experiment: str, contexts: Sequence[Sequence[int]]) -> None:
        """Measure the time between tokens while requests decode, one on each of the contexts, which have one length.

        Observes nothing if there is no room for them, or they never all decode at once.
        """
        requests_count, context_tokens = len(contexts), int(len(contexts[0]) * self.client.tokens_per_word)
        likely_tokens = math.ceil(self.settings.budget_s * DECODE_RATIO / self._interval_s)
        output_tokens = self._output_tokens.setdefault(
            (context_tokens, requests_count), min(max(likely_tokens, LEAST_DECODE_TOKENS), MOST_DECODE_TOKENS)
        )
        room_tokens = context_tokens + SHORT_PROMPT_TOKENS + output_tokens + self._block_size
        if self._is_over or room_tokens > self._limit_tokens or requests_count * room_tokens > self._pool_tokens:
            return
        prompts = [[*context, *self._fresh(SHORT_PROMPT_TOKENS)] for context in contexts]
        answers = await self.client.generate_all(prompts, output_tokens)
        begin_s = max(answer.token_times_s[0] for answer in answers)
        end_s = min(answer.token_times_s[-1] for answer in answers)
        intervals = [interval_s for answer in answers if (interval_s := answer.interval_s(begin_s, end_s))]
        if len(intervals) < requests_count:
            return
        self._interval_s = median(intervals)
        known_tokens = sum(answer.prompt_tokens + output_tokens // 2 for answer in answers)
        self.observations.append(
            decode_observation(experiment, self._interval_s, requests_count=requests_count, context_tokens=known_tokens)
        )

    def _fresh(self, tokens: int) -> list[int]:
        """Return a prompt that shares no block with others."""
        return self._random.choices(self.settings.token_ids, k=max(1, int(tokens / self.client.tokens_per_word)))


async def calibrate(
    url: str,
    settings: Settings,
    *,
    model: str | None = None,
    api_key: str | None = None,
    on_progress: Callable[[str], None] = lambda _text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure the engine at a URL, by a clock in seconds.

    Raises CalibrationError if that fails, or its times do not determine the constants.
    """
    base_url = url.rstrip("/").removesuffix("/v1")
    timeout = aiohttp.ClientTimeout(total=max(60.0, settings.budget_s), sock_connect=10)
    # Connections are closed sooner than an engine closes idle ones (5 s), so that no request meets a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as http:
        client = EngineClient(http, base_url, clock)
        facts = await client.facts(model)
        measurement = Measurement(client, facts, settings, on_progress)
        await measurement.run()
        facts_after = await client.facts(model)
        if facts_after.requests_count:  # ours, perhaps: metrics come late
            await asyncio.sleep(1.0)
            facts_after = await client.facts(model)
    given_tokens = settings.max_num_batched_tokens
    chunk_size = ChunkSize(given_tokens, is_told=True) if given_tokens else tell_chunk_size(measurement.observations)
    found = fit(in_chunks(measurement.observations, chunk_size.tokens))
    timing = replace(
        found.timing,
        kv_tokens=facts.kv_tokens,
        block_size=facts.block_size,
        max_num_batched_tokens=chunk_size.tokens,
        source=_source(measurement, chunk_size, found),
    )
    return Calibration(facts, found, timing, tuple(_warnings(measurement, facts_after, chunk_size, found)))


def _source(measurement: Measurement, chunk_size: ChunkSize, found: Fit) -> str:
    """Return a sentence on the origin of the constants."""
    facts = measurement.facts
    today = datetime.now(UTC).date()
    kind = "vLLM" if facts.is_vllm else "version" if facts.version else ""
    engine = f"{facts.model} on {kind} {facts.version}".rstrip() if kind else facts.model
    is_given = measurement.settings.max_num_batched_tokens is not None
    origin = "as given" if is_given else "as the times tell" if chunk_size.is_told else "assumed"
    return (
        f"measured by thunderagent calibrate on {today}: {engine}, {chunk_size.tokens} tokens in an iteration at most "
        f"({origin}); {found.observation_count} different measurements in {measurement.rounds_count} rounds, median "
        f"error {found.median_ratio:.1%}"
    )


def _warnings(measurement: Measurement, facts_after: EngineFacts, chunk_size: ChunkSize, found: Fit) -> Iterator[str]:
    facts = measurement.facts
    if found.is_poor:
        yield (
            f"the fit is poor: the median error of an experiment is over {POOR_FIT_RATIO:.0%}. The engine was "
            "disturbed, or it is not one that the model describes: do not trust a simulation with this profile"
        )
    if not chunk_size.is_told:
        yield (
            f"the times do not tell how many tokens the engine takes in one iteration at most: {chunk_size.tokens} was "
            "assumed. If that is wrong, so are the costs of an iteration and of a prompt token, for long prompts above "
            "all: give the engine's own with --max-num-batched-tokens (many use 8192)"
        )
    if facts.requests_count or facts_after.requests_count:
        yield "the engine was busy with other requests: measure again when nobody else uses it"
    if facts.requests_count is None:
        yield "the engine does not say how many requests it has: make sure that nobody else uses it"
    if facts.kv_tokens is None and facts.block_size is None:
        yield "the engine does not say how large its KV pool is, nor its blocks: give --kv-tokens and --block-size"
    elif facts.kv_tokens is None:
        yield "the engine does not say how large its KV pool is: give --kv-tokens"
    elif facts.block_size is None:
        yield "the engine does not say how large the blocks of its KV pool are: give --block-size"
    if facts.caches_prefixes and not measurement.context_hits_count:
        yield "no prompt hit the prefix cache, though each was sent right after its beginning"
    elif facts.caches_prefixes and not measurement.tells_cached:
        yield (
            "the engine does not say what was cached (vLLM does with --enable-prompt-tokens-details): "
            "whole blocks were assumed"
        )
    if not measurement.client.speaks_ids:
        yield "the engine takes no token ids: text was sent, so a prefill token's cost includes its tokenization"
    if found.left_out:
        keys = [key for key, name in COSTS_US.items() if name in found.left_out]
        yield f"could not be told from the rest, and is left at 0: {', '.join(keys)}"
