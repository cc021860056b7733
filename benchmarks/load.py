"""The standard load: agent programs in a closed loop against an engine or the proxy, in real time.

N programs run at a time, and a finished one is replaced at once. Each makes 6-12 turns. Between two turns its tool
takes a random time and returns a result that the next turn appends to the history. Everything random in a program
comes from its seed and index, so program k is the same program whatever the target, the policy or the timing: runs
with one seed are paired.

Words are `w0`, `w1`, ...: one token each for the models of `benchmarks.real_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

ANSWER_OK = 200
CONNECTION_BROKE = 0  # in place of an HTTP status

# Counts are ranges (lowest, highest), uniform, both ends included.
CountRange = tuple[int, int]


class EndSignal(StrEnum):
    """How a program says that it ended."""

    RELEASE = "release"
    """By a call to the proxy."""
    FINAL_TURN = "final-turn"
    """By a small turn with the header `X-Dynamo-Session-Final: true`, which no engine sees."""
    NONE = "none"


@dataclass(frozen=True)
class LoadSpec:
    """The shape of the programs and how many run at a time; the defaults are the standard load."""

    programs: int = 8  # at a time
    seed: int = 0
    turns: CountRange = (6, 12)
    system_tokens: int = 200  # shared by all programs of a seed
    first_prompt_tokens: CountRange = (400, 800)
    output_tokens: CountRange = (24, 64)
    tool_result_tokens: CountRange = (150, 450)
    tool_mean_s: float = 1.0
    is_tool_time_fixed: bool = False  # else exponential
    word_count: int = 2000
    model: str = "random-llama"
    stream: bool = True
    include_usage: bool = True  # ask for the usage of streamed answers; without it token counts are unknown
    tries: int = 5  # of one turn, as an agent framework would
    retry_after_s: float = 1.0
    turn_timeout_s: float = 600.0  # of one try
    program_header: str = "X-Program-ID"
    end_signal: EndSignal = EndSignal.RELEASE


@dataclass(frozen=True)
class TurnPlan:
    """A planned turn: what it appends, what it asks for, and the tool call that follows it."""

    prompt: str
    output_tokens: int
    tool_s: float


@dataclass(frozen=True)
class ProgramPlan:
    """A planned program."""

    index: int
    program_id: str
    system_prompt: str  # empty: it has none
    turns: tuple[TurnPlan, ...]
    arrival_s: float = 0.0  # `run_plans` begins it so long after the run's begin


HELD_S = 0.01
"""A turn that waited less at a proxy before its lease does not count as held."""


@dataclass(frozen=True)
class TurnRecord:
    """The outcome of one turn; times in seconds since the load began, latency includes retries."""

    program_index: int
    turn_index: int
    start_s: float
    first_token_s: float | None  # None: not streamed, or nothing came
    end_s: float
    prompt_tokens: int | None  # None: the answer carried no usage
    cached_tokens: int | None
    output_tokens: int | None
    status: int  # HTTP status of the last try; CONNECTION_BROKE when there was none or the answer broke off
    tries: int
    error: str = ""  # of the last try that failed
    held_s: float = 0.0  # how long a proxy held the last try

    @property
    def succeeded(self) -> bool:
        """Whether a try gave a complete answer."""
        return self.status == ANSWER_OK

    @property
    def latency_s(self) -> float:
        """Seconds from the first try to the end of the answer."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class LoadResult:
    """All turns of a load, and the figures of its measuring window."""

    spec: LoadSpec
    window_start_s: float
    window_end_s: float
    records: tuple[TurnRecord, ...]  # in the order they ended; also those outside the window
    finished_program_count: int  # ran to their last turn, over the whole load
    release_error_count: int

    @property
    def window_records(self) -> list[TurnRecord]:
        """Turns that succeeded and ended in the window."""
        return [record for record in self.records if self.has_in_window(record)]

    def has_in_window(self, record: TurnRecord) -> bool:
        """Say whether a turn succeeded and ended in the window."""
        return record.succeeded and self.window_start_s <= record.end_s <= self.window_end_s

    @property
    def turns_per_min(self) -> float:
        """Turns that succeeded in the window, per minute."""
        return len(self.window_records) * 60 / (self.window_end_s - self.window_start_s)

    @property
    def hit_ratio(self) -> float | None:
        """Cached over all prompt tokens of the window's turns; None without usage."""
        with_usage = [record for record in self.window_records if record.prompt_tokens]
        prompt_tokens = sum(record.prompt_tokens or 0 for record in with_usage)
        return sum(record.cached_tokens or 0 for record in with_usage) / prompt_tokens if prompt_tokens else None

    @property
    def failed_turn_count(self) -> int:
        """Turns that no try completed, over the whole load."""
        return sum(not record.succeeded for record in self.records)

    @property
    def retry_count(self) -> int:
        """Tries beyond the first, over the whole load."""
        return sum(record.tries - 1 for record in self.records)

    def latency_percentile_s(self, ratio: float) -> float | None:
        """Return a percentile (`ratio` 0 to 1) of the window's turn latencies; None without turns."""
        return percentile([record.latency_s for record in self.window_records], ratio)

    def first_token_percentile_s(self, ratio: float) -> float | None:
        """Return a percentile of the window's times to first token; None without streamed turns."""
        return percentile(
            [r.first_token_s - r.start_s for r in self.window_records if r.first_token_s is not None], ratio
        )

    @property
    def held_time_ratio(self) -> float | None:
        """The part of the running time of the window's turns in which a proxy held them; None without turns."""
        ran_s = sum(record.latency_s for record in self.window_records)
        return sum(record.held_s for record in self.window_records) / ran_s if ran_s else None

    def summary(self) -> dict[str, float | int | None]:
        """Return the window's figures by name, units in the names, ready for JSON."""
        return {
            "turns_per_min": self.turns_per_min,
            "hit_ratio": self.hit_ratio,
            "latency_p50_s": self.latency_percentile_s(0.5),
            "latency_p99_s": self.latency_percentile_s(0.99),
            "first_token_p50_s": self.first_token_percentile_s(0.5),
            "first_token_p99_s": self.first_token_percentile_s(0.99),
            "window_s": self.window_end_s - self.window_start_s,
            "turn_count": len(self.window_records),
            "finished_program_count": self.finished_program_count,
            "failed_turn_count": self.failed_turn_count,
            "retry_count": self.retry_count,
            "held_time_ratio": self.held_time_ratio,
            "held_turn_count": sum(record.held_s >= HELD_S for record in self.window_records),
            "release_error_count": self.release_error_count,
        }


def percentile(values: list[float], ratio: float) -> float | None:
    """Return the nearest-rank percentile, `ratio` from 0 to 1; None without values."""
    if not values:
        return None
    rank = max(1, math.ceil(ratio * len(values)))
    return sorted(values)[rank - 1]


def plan_program(spec: LoadSpec, index: int) -> ProgramPlan:
    """Draw program `index` of a load; the same seed and shape always give the same program."""
    rng = Random(f"{spec.seed}/{index}")
    turn_count = rng.randint(*spec.turns)
    turns = tuple(
        TurnPlan(
            prompt=_words(rng, rng.randint(*(spec.tool_result_tokens if turn else spec.first_prompt_tokens)), spec),
            output_tokens=rng.randint(*spec.output_tokens),
            tool_s=_tool_s(rng, spec),
        )
        for turn in range(turn_count)
    )
    system_prompt = _words(Random(f"{spec.seed}/system"), spec.system_tokens, spec)
    return ProgramPlan(index, f"program-{spec.seed}-{index}", system_prompt, turns)


def _tool_s(rng: Random, spec: LoadSpec) -> float:
    if spec.is_tool_time_fixed or not spec.tool_mean_s:
        return spec.tool_mean_s
    return rng.expovariate(1 / spec.tool_mean_s)


def _words(rng: Random, count: int, spec: LoadSpec) -> str:
    """Return `count` random words."""
    return " ".join(f"w{rng.randrange(spec.word_count)}" for _ in range(count))


async def run_load(
    spec: LoadSpec,
    base_url: str,
    *,
    is_proxy: bool,
    warmup_s: float = 20.0,
    measure_s: float = 60.0,
    on_turn: Callable[[TurnRecord], None] | None = None,
) -> LoadResult:
    """Keep programs running for `warmup_s + measure_s` seconds and measure the last `measure_s`.

    `base_url` has no `/v1`; of several, with a comma between, each try goes to the next. Turns in flight at the end
    are cancelled and not recorded. A program that ends, or is cut off at the end, says so when the target is a proxy,
    as the load has it. `on_turn` sees every turn as it ends.
    """
    async with _open_run(spec, base_url, is_proxy, on_turn) as run:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(warmup_s + measure_s):
                await run.keep_running(itertools.count())
        return run.result(warmup_s, warmup_s + measure_s)


async def run_programs(
    spec: LoadSpec,
    base_url: str,
    program_count: int,
    *,
    is_proxy: bool,
    on_turn: Callable[[TurnRecord], None] | None = None,
) -> LoadResult:
    """Run programs 0 to `program_count - 1` to their ends; the window is all of it."""
    async with _open_run(spec, base_url, is_proxy, on_turn) as run:
        await run.keep_running(range(program_count))
        return run.result(0.0, run.now_s())


async def run_plans(
    spec: LoadSpec, base_url: str, plans: Sequence[ProgramPlan], *, is_proxy: bool, tool_cores_count: int
) -> LoadResult:
    """Begin each program when its plan says, whatever the others do, and run it to its end; the window is all of it.

    Of all tools `tool_cores_count` run at a time, first come, first served. The shape of the spec is not used.
    """

    async def come(run: _Run, plan: ProgramPlan) -> None:
        await asyncio.sleep(plan.arrival_s)
        await run.run_program(plan)

    async with _open_run(spec, base_url, is_proxy, None) as run:
        run.tool_cores = asyncio.Semaphore(tool_cores_count)
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                group.create_task(come(run, plan))
        return run.result(0.0, run.now_s())


STRANGERS_SEEDS_FROM = 1_000_000


@contextlib.asynccontextmanager
async def strangers(spec: LoadSpec, base_url: str, every_s: float) -> AsyncIterator[None]:
    """Have others send one turn each `every_s` seconds during the block, of 400 to 1,200 tokens, of no program."""
    seed = spec.seed + STRANGERS_SEEDS_FROM
    counts: dict[str, Any] = {
        "turns": (1, 1),
        "first_prompt_tokens": (400, 1200),
        "output_tokens": (32, 32),
        "system_tokens": 0,
    }
    single = replace(spec, seed=seed, end_signal=EndSignal.NONE, program_header="X-Stranger", **counts)

    async def come(run: _Run) -> None:
        async with asyncio.TaskGroup() as group:
            for index in itertools.count():
                await asyncio.sleep(every_s)
                group.create_task(run.run_program(plan_program(single, index)))

    async with _open_run(single, base_url, False, None) as run:
        coming = asyncio.create_task(come(run))
        try:
            yield
        finally:
            coming.cancel()
            await asyncio.wait([coming])
        if not coming.cancelled():
            coming.result()  # it ended by an error


@contextlib.asynccontextmanager
async def _open_run(
    spec: LoadSpec, base_url: str, is_proxy: bool, on_turn: Callable[[TurnRecord], None] | None
) -> AsyncIterator[_Run]:
    """Open a run's connections, and release its unfinished programs at the end."""
    # Closed before an engine closes idle connections (5 s), so that no turn meets a closed one.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    timeout = aiohttp.ClientTimeout(total=spec.turn_timeout_s, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        run = _Run(spec, base_url, is_proxy, on_turn or (lambda _record: None), session)
        yield run
        await run.release_all()


class _Run:
    """A running load."""

    def __init__(
        self,
        spec: LoadSpec,
        base_url: str,
        is_proxy: bool,
        on_turn: Callable[[TurnRecord], None],
        session: aiohttp.ClientSession,
    ) -> None:
        self._spec = spec
        self._base_urls = itertools.cycle(base_url.split(","))
        self._is_proxy = is_proxy
        self._on_turn = on_turn
        self._session = session
        self._origin_s = time.monotonic()
        self._records: list[TurnRecord] = []
        self._live_program_ids: set[str] = set()
        self._finished_program_count = 0
        self._release_error_count = 0
        self.tool_cores: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        """What a tool holds while it runs."""

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._origin_s

    def result(self, window_start_s: float, window_end_s: float) -> LoadResult:
        """Return the result so far, for a measuring window."""
        return LoadResult(
            spec=self._spec,
            window_start_s=window_start_s,
            window_end_s=window_end_s,
            records=tuple(self._records),
            finished_program_count=self._finished_program_count,
            release_error_count=self._release_error_count,
        )

    async def keep_running(self, indices: Iterable[int]) -> None:
        """Run the programs with these indices, `spec.programs` at a time, until none is left."""
        remaining = iter(indices)

        async def work() -> None:
            for index in remaining:
                await self.run_program(plan_program(self._spec, index))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._spec.programs):
                group.create_task(work())

    async def release_all(self) -> None:
        """Release every program that was cut off."""
        await asyncio.gather(*(self._release(program_id) for program_id in sorted(self._live_program_ids)))

    async def run_program(self, plan: ProgramPlan) -> None:
        """Run one program turn by turn; give it up at a turn that no try completes."""
        self._live_program_ids.add(plan.program_id)
        messages = [{"role": "system", "content": plan.system_prompt}] if plan.system_prompt else []
        for turn_index, turn in enumerate(plan.turns):
            messages.append({"role": "user", "content": turn.prompt})
            record, text = await self._run_turn(plan, turn_index, turn, messages)
            self._records.append(record)
            self._on_turn(record)
            if not record.succeeded:
                break
            messages.append({"role": "assistant", "content": text})
            if turn_index < len(plan.turns) - 1:
                async with self.tool_cores:
                    await asyncio.sleep(turn.tool_s)
        else:
            self._finished_program_count += 1
        await self._release(plan.program_id)

    async def _run_turn(
        self, plan: ProgramPlan, turn_index: int, turn: TurnPlan, messages: list[dict[str, str]]
    ) -> tuple[TurnRecord, str]:
        """Try one turn until an answer is complete; return its record and the answer's text."""
        body = _turn_body(self._spec, turn, messages)
        start_s = self.now_s()
        error = ""
        for tries in itertools.count(1):
            answer = await self._try_turn(plan.program_id, body)
            error = answer.error or error
            if answer.status == ANSWER_OK or not answer.may_retry or tries >= self._spec.tries:
                break
            await asyncio.sleep(self._spec.retry_after_s)
        record = TurnRecord(
            program_index=plan.index,
            turn_index=turn_index,
            start_s=start_s,
            first_token_s=answer.first_token_s,
            end_s=self.now_s(),
            prompt_tokens=answer.usage.get("prompt_tokens"),
            cached_tokens=_cached_tokens(answer.usage),
            output_tokens=answer.usage.get("completion_tokens"),
            status=answer.status,
            tries=tries,
            error=error,
            held_s=answer.held_s,
        )
        return record, answer.text

    async def _try_turn(self, program_id: str, body: dict[str, Any]) -> _Answer:
        """Send a turn once and read its answer to the end; a failure becomes part of the answer."""
        answer = _Answer()
        url = self._next_url("/v1/chat/completions")
        try:
            async with self._session.post(url, json=body, headers={self._spec.program_header: program_id}) as response:
                answer.held_s = float(response.headers.get("X-Hold-Ms", 0.0)) / 1000
                if response.status != ANSWER_OK:
                    answer.fail(response.status, await response.text())
                elif self._spec.stream:
                    await self._read_stream(response, answer)
                else:
                    answer.read_whole(await response.json())
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            answer.fail(CONNECTION_BROKE, repr(error))
        return answer

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: _Answer) -> None:
        """Read server-sent events up to `[DONE]`."""
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                answer.status = ANSWER_OK
                continue
            answer.read_event(json.loads(data), self.now_s())
            if answer.error:
                return
        if answer.status != ANSWER_OK:
            answer.fail(CONNECTION_BROKE, "the stream ended without [DONE]")

    def _next_url(self, path: str) -> str:
        return next(self._base_urls).rstrip("/") + path

    async def _release(self, program_id: str) -> None:
        """Say that a program ended, if the target is a proxy and the load says ends."""
        self._live_program_ids.discard(program_id)
        if not self._is_proxy or self._spec.end_signal is EndSignal.NONE:
            return
        path, body, headers = _end_call(self._spec, program_id)
        try:
            async with self._session.post(self._next_url(path), json=body, headers=headers) as response:
                self._release_error_count += response.status != ANSWER_OK
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            self._release_error_count += 1


class _Answer:
    """The answer of one try so far; a failure until it is complete."""

    def __init__(self) -> None:
        self.status = CONNECTION_BROKE
        self.error = ""
        self.text = ""
        self.usage: dict[str, Any] = {}
        self.first_token_s: float | None = None
        self.held_s = 0.0

    @property
    def may_retry(self) -> bool:
        """Whether another try may help: not after a client error."""
        return self.status in {CONNECTION_BROKE, 408, 409, 429} or self.status >= 500

    def fail(self, status: int, error: str) -> None:
        """Note why the answer is incomplete."""
        self.status = status
        self.error = error[:500]

    def read_whole(self, body: dict[str, Any]) -> None:
        """Read an answer that was not streamed."""
        self.text = body["choices"][0]["message"]["content"] or ""
        self.usage = body.get("usage") or {}
        self.status = ANSWER_OK

    def read_event(self, event: dict[str, Any], now_s: float) -> None:
        """Read one event of a stream."""
        if "error" in event:
            self.fail(CONNECTION_BROKE, json.dumps(event["error"]))
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            if text and self.first_token_s is None:
                self.first_token_s = now_s
            self.text += text


def _turn_body(spec: LoadSpec, turn: TurnPlan, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return a turn's request; its answer has exactly the planned number of tokens."""
    body: dict[str, Any] = {
        "model": spec.model,
        "messages": messages,
        "max_tokens": turn.output_tokens,
        "min_tokens": turn.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": spec.stream,
    }
    if spec.stream and spec.include_usage:
        body["stream_options"] = {"include_usage": True}
    return body


def _end_call(spec: LoadSpec, program_id: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the path, body and headers of the call that ends a program."""
    if spec.end_signal is EndSignal.RELEASE:
        return "/programs/release", {"program_id": program_id}, {}
    body = {
        "model": spec.model,
        "messages": [{"role": "user", "content": "w0"}],
        "max_tokens": 1,
        "stream": spec.stream,
    }
    headers = {spec.program_header: program_id, "X-Dynamo-Session-Final": "true"}
    return "/v1/chat/completions", body, headers


def _cached_tokens(usage: dict[str, Any]) -> int | None:
    """Return the prompt tokens found in the prefix cache; None without usage, 0 if usage does not say."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 if usage else None
