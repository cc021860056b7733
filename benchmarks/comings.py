"""A load with everything that a proxy must later forget: programs of every form come and go.

A fixed number of programs run at a time; one that ends is replaced by one with a new id. Each draws from its number:
its API, how it names itself, how it ends (some never say so), how long its tools run. Its turns are streamed or whole,
some with a body of 400 KB. Some of its clients leave in the middle; some of those come back, others ask again while the
first attempt is with the engine. Engines fail now and then: before the first byte, in mid-stream, with a 500. Side
calls come between turns, and an operator looks on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any
from urllib.parse import quote

import aiohttp

from benchmarks.drip import Plan, event_of, whole

BYTES_PER_TOKEN = 4
LARGE_TURN_RATIO = 0.002
LARGE_BODY_BYTES = 400_000
LEAVES_RATIO = 0.04
ASKS_AGAIN_RATIO = 0.01
SIDE_CALL_RATIO = 0.1
LONG_TOOL_RATIO = 0.01
UNNAMED_RATIO = 0.1
SILENT_RATIO = 0.1
ENGINE_WAIT_S = 0.3
TOOL_S = 1.0
LONG_TOOL_S = 20.0
STREAM_EVENTS_COUNT = 12
STREAM_GAP_S = 0.03
TEXT = "w1 " * 40

APIS = {
    "/v1/chat/completions": 0.5,
    "/v1/completions": 0.1,
    "/v1/messages": 0.2,
    "/v1/responses": 0.2,
}


class Engine:
    """Draws the result of each turn at an engine."""

    def __init__(self, seed: int) -> None:
        """Draw from a seed."""
        self._rng = Random(seed)
        self._numbers = count()

    def plan(self, path: str, body: bytes) -> Plan:
        """Return the result of a turn: an answer of its API, or a failure."""
        path = path.partition("?")[0]
        if path not in APIS:
            return Plan(answer=whole(200, "application/json", b'{"count": 100, "input_tokens": 100}'))
        if b'"at_once"' in body:
            return Plan(answer=whole(200, "application/json", _answer(path, len(body), next(self._numbers))))
        fate, wait_s = self._rng.random(), self._rng.expovariate(1 / ENGINE_WAIT_S)
        if fate < 0.005:
            return Plan(wait_s, breaks=True)
        if fate < 0.01:
            return Plan(wait_s, answer=whole(500, "application/json", b'{"error": {"message": "out of order"}}'))
        number = next(self._numbers)
        if b'"stream": true' not in body:
            return Plan(wait_s, answer=whole(200, "application/json", _answer(path, len(body), number)))
        events = _events(path, len(body), number)
        breaks = fate < 0.015
        if breaks:
            del events[self._rng.randrange(1, len(events)) :]
        return Plan(wait_s, events=iter(events), gap_s=STREAM_GAP_S, breaks=breaks)


def _usage(path: str, body_bytes: int) -> dict[str, int]:
    prompt_tokens = body_bytes // BYTES_PER_TOKEN
    if path in ("/v1/messages", "/v1/responses"):
        return {"input_tokens": prompt_tokens, "output_tokens": 40}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": 40, "total_tokens": prompt_tokens + 40}


def _answer(path: str, body_bytes: int, number: int) -> bytes:
    answer: dict[str, Any] = {"id": f"made-{number:032d}", "model": "drip", "usage": _usage(path, body_bytes)}
    if path == "/v1/chat/completions":
        tool = f"tool_{number % 40}"
        calls = [{"id": "c", "type": "function", "function": {"name": tool, "arguments": "{}"}}]
        answer["choices"] = [{"index": 0, "message": {"role": "assistant", "content": TEXT, "tool_calls": calls}}]
    elif path == "/v1/completions":
        answer["choices"] = [{"index": 0, "text": TEXT}]
    else:
        answer["content"] = [{"type": "text", "text": TEXT}]
    return json.dumps(answer).encode()


def _events(path: str, body_bytes: int, number: int) -> list[bytes]:
    base = {"id": f"made-{number:032d}", "model": "drip"}
    usage = _usage(path, body_bytes)
    if path == "/v1/messages":
        words = [event_of({"delta": {"text": "w1 "}}, "content_block_delta") for _ in range(STREAM_EVENTS_COUNT)]
        start = event_of({"message": {**base, "usage": {**usage, "output_tokens": 0}}}, "message_start")
        return [start, *words, event_of({"usage": usage}, "message_delta"), event_of({}, "message_stop")]
    if path == "/v1/responses":
        words = [event_of({"delta": "w1 "}, "response.output_text.delta") for _ in range(STREAM_EVENTS_COUNT)]
        start = event_of({"response": base}, "response.created")
        return [start, *words, event_of({"response": {**base, "usage": usage}}, "response.completed")]
    words = [
        event_of({**base, "choices": [{"index": 0, "delta": {"content": "w1 "}, "text": "w1 "}]})
        for _ in range(STREAM_EVENTS_COUNT)
    ]
    return [*words, event_of({**base, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]


@dataclass
class Comings:
    """The load on one proxy; `counts` has its results."""

    url: str
    client: aiohttp.ClientSession
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    numbers: count[int] = field(default_factory=count)

    async def run(self, programs_count: int, seconds: float) -> None:
        """Keep this many programs running for `seconds`; then wait for the running ones to end."""
        ends_s = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            operator = group.create_task(self._look_on())
            listener = group.create_task(self._listen())
            slots = [group.create_task(self._slot(ends_s)) for _ in range(programs_count)]
            await asyncio.wait(slots)
            operator.cancel()
            listener.cancel()

    async def fill(self, turns_count: int) -> None:
        """Create `turns_count` responses at once: the proxy's table of their ids is then full before the hour."""
        numbers = iter(range(turns_count))
        headers = {"X-Program-ID": "filler"}

        async def slot() -> None:
            for _ in numbers:
                async with self.client.post(
                    f"{self.url}/v1/responses", json={"model": "drip", "input": "at_once"}, headers=headers
                ) as answer:
                    await answer.read()
                    self.counts[f"filled {answer.status}"] += 1

        await asyncio.gather(*(slot() for _ in range(16)))
        await self.call("POST", "/programs/release", {"program_id": "filler"})

    async def _slot(self, ends_s: float) -> None:
        while asyncio.get_running_loop().time() < ends_s:
            number = next(self.numbers)
            rng = Random(f"{self.seed}/{number}")
            program = _Program(self, rng, f"program-{self.seed}-{number}")
            await program.run()
            self.counts["programs"] += 1

    async def _look_on(self) -> None:
        """Send the requests of a dashboard and a Prometheus."""
        while True:
            for path in ("/metrics", "/summary", "/history", "/programs?limit=50", "/queue", "/replicas", "/tools"):
                await self.call("GET", path)
            await asyncio.sleep(5.0)

    async def _listen(self) -> None:
        """Follow the events, reconnecting every half minute."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30.0), self.client.get(f"{self.url}/events") as answer:
                    async for _ in answer.content.iter_any():
                        self.counts["heard"] += 1

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Ask for something that is not a turn, and count its status."""
        async with self.client.request(method, f"{self.url}{path}", json=body) as answer:
            await answer.read()
            self.counts[f"calls {answer.status}"] += 1


class _Program:
    """One program of the load."""

    def __init__(self, load: Comings, rng: Random, program_id: str) -> None:
        self._load = load
        self._rng = rng
        self._id = program_id
        self._path = rng.choices(list(APIS), list(APIS.values()))[0]
        self._naming = "none" if rng.random() < UNNAMED_RATIO else rng.choice(("header", "path", "body", "session"))
        self._silent = rng.random() < SILENT_RATIO
        self._context_bytes = rng.randint(1000, 4000)
        self._made_id = ""

    async def run(self) -> None:
        """Send some turns; then announce the end, or not."""
        turns_count = self._rng.randint(2, 10)
        final_by_header = self._naming == "header" and not self._silent and self._rng.random() < 0.3
        for index in range(turns_count):
            is_last = index + 1 == turns_count
            if not await self._turn(final=is_last and final_by_header):
                self._load.counts["gave up"] += 1
                break
            self._context_bytes += self._rng.randint(500, 3000)
            if self._rng.random() < SIDE_CALL_RATIO:
                await self._side_call()
            if not is_last:
                long_tool = self._rng.random() < LONG_TOOL_RATIO
                await asyncio.sleep(self._rng.expovariate(1 / (LONG_TOOL_S if long_tool else TOOL_S)))
        if not self._silent and self._naming != "none":
            await self._release()

    async def _turn(self, *, final: bool) -> bool:
        """Send one turn, with all possible failures; return whether the program goes on."""
        rng = self._rng
        body_bytes = LARGE_BODY_BYTES if rng.random() < LARGE_TURN_RATIO else self._context_bytes
        body = self._body(body_bytes, stream=rng.random() < 0.5)
        headers = {"X-Program-Final": "1"} if final else {}
        if rng.random() < LEAVES_RATIO:
            try:
                async with asyncio.timeout(rng.uniform(0.01, 0.6)):
                    return await self._ask(body, headers)
            except TimeoutError:
                self._load.counts["left"] += 1
                if rng.random() < 0.5:
                    return False
                headers["x-stainless-retry-count"] = "1"
        elif rng.random() < ASKS_AGAIN_RATIO:
            first = asyncio.create_task(self._ask(body, headers))
            await asyncio.sleep(rng.uniform(0.01, 0.3))
            self._load.counts["asked again"] += 1
            again = await self._ask(body, {**headers, "x-stainless-retry-count": "1"})
            return await first or again
        for tries_count in range(3):
            if await self._ask(body, headers):
                return True
            self._load.counts["retries"] += 1
            headers["x-stainless-retry-count"] = str(tries_count + 1)
        return False

    async def _ask(self, body: bytes, headers: dict[str, str]) -> bool:
        """Send a turn and read its answer; return whether it was complete."""
        load = self._load
        named = {"header": {"X-Program-ID": self._id}, "session": {"X-Session-ID": self._id}}.get(self._naming, {})
        path = f"/p/{quote(self._id)}{self._path}" if self._naming == "path" else self._path
        all_headers = {"Content-Type": "application/json", "x-stainless-read-timeout": "600.0", **named, **headers}
        load.counts["turns"] += 1
        try:
            async with load.client.post(f"{load.url}{path}", data=body, headers=all_headers) as answer:
                read = await answer.read()
        except aiohttp.ClientError:
            load.counts["broken"] += 1
            return False
        load.counts[f"answers {answer.status}"] += 1
        if answer.status == 200 and self._path == "/v1/responses":
            self._made_id = read.partition(b'"id": "' if b'"id": "' in read else b'"id":"')[2][:37].decode()
        return answer.status == 200

    async def _side_call(self) -> None:
        if self._path == "/v1/responses" and self._made_id:
            await self._load.call("GET", f"/v1/responses/{self._made_id}")
        elif self._path == "/v1/messages":
            await self._load.call("POST", "/v1/messages/count_tokens", {"messages": [], "model": "drip"})
        else:
            await self._load.call("POST", f"/p/{quote(self._id)}/tokenize", {"prompt": "w1 w2", "model": "drip"})

    async def _release(self) -> None:
        match self._rng.randrange(3):
            case 0:
                await self._load.call("POST", "/programs/release", {"program_id": self._id})
            case 1:
                await self._load.call("DELETE", f"/programs/{quote(self._id)}")
            case _:
                await self._load.call("POST", f"/finish_session?session_id={quote(self._id)}")

    def _body(self, body_bytes: int, *, stream: bool) -> bytes:
        prompt = f"{self._id} " + "w123 " * (body_bytes // 5)
        fields: dict[str, Any] = {"model": "drip", "stream": stream}
        if self._path == "/v1/completions":
            fields["prompt"] = prompt
        elif self._path == "/v1/responses":
            fields["input"] = prompt
        else:
            fields["messages"] = [{"role": "user", "content": prompt}]
        if self._naming == "body":
            fields["program_id"] = self._id
        return json.dumps(fields).encode()
