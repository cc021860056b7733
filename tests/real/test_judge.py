"""A judge that answers late, never or with rubbish delays no turn on a real engine with priorities."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.integration.support import Gate, Wire, answers, fake_replica, metrics_of
from tests.real.support import CHAT, chat, words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from benchmarks.real_engine import RealEngine
    from tests.integration.support import Call
    from tests.real.conftest import RunProxy

pytestmark = pytest.mark.asyncio(loop_scope="session")
log = logging.getLogger(__name__)

LATE_S = 30.0
DELAY_LIMIT_MS = 5.0
PROGRAMS_COUNT, BLOCK_TURNS_COUNT = 3, 6
NONE = "none"
VERDICT = {"choices": [{"message": {"content": '{"prediction": "failure", "confidence": 1, "reasoning": "r"}'}}]}


async def late(call: Call) -> None:
    """Give a valid answer, too late to be useful."""
    await asyncio.sleep(LATE_S)
    await answers(VERDICT)(call)


JUDGES: dict[str, Callable[[Call], Awaitable[None]]] = {
    "after 30 s": late,
    "never": Gate(),
    "rubbish": answers(b"<html>I think so</html>"),
}


@dataclass
class Relay:
    """Passes on an engine's requests and answers; notes their times by request id."""

    engine_url: str
    url: str = ""
    arrived_s: dict[str, float] = field(default_factory=dict)
    answered_s: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine = urlsplit(self.engine_url)
        request_id = ""

        def asked(data: bytes) -> None:
            nonlocal request_id
            if found := re.match(rb"(?is)[A-Z]+ \S+ HTTP/1.1\r\n.*?\r\nx-request-id: (\S+)", data):
                request_id = found[1].decode()
                self.arrived_s[request_id] = perf_counter()

        def answered(_data: bytes) -> None:
            self.answered_s[request_id] = perf_counter()

        with suppress(ConnectionError):
            from_engine, to_engine = await asyncio.open_connection(engine.hostname, engine.port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, to_engine, asked))
                group.create_task(self._pump(from_engine, writer, answered))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, note: Callable[[bytes], None]
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(2**16):
                note(data)
                sink.write(data)
                await sink.drain()
        sink.close()


class Client:
    """Makes turns one after another, and notes how long each was in the proxy."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._count = 0
        self.hold_ms: list[float] = []

    async def turn(self, url: str, program_id: str, seed: int) -> float:
        """Return the milliseconds until the engine had the turn, and from its complete answer to the client's."""
        self._count += 1
        request_id = f"turn-{self._count}"
        headers = [("Content-Type", "application/json"), ("X-Program-ID", program_id), ("X-Request-Id", request_id)]
        body = json.dumps(chat(words(100, seed=seed), 2)).encode()
        async with Wire.open(url) as wire:
            sent_s = perf_counter()
            wire.send("POST", CHAT, headers, body)
            answer = await wire.answer()
            whole_s = perf_counter()
        assert answer.status == 200, answer.body
        self.hold_ms.append(float(answer.header("X-Hold-Ms") or "nan"))
        before_s = self._relay.arrived_s[request_id] - sent_s
        return 1000 * (before_s + whole_s - self._relay.answered_s[request_id])

    async def round(self, urls: dict[str, str]) -> dict[str, list[float]]:
        """Return the turns' times at each proxy: some back to back at one, then at the next."""
        took_ms: dict[str, list[float]] = {name: [] for name in urls}
        for name, url in urls.items():
            for number in range(BLOCK_TURNS_COUNT):
                place = number % PROGRAMS_COUNT
                took_ms[name].append(await self.turn(url, f"{name}-{place}", seed=place))
        return took_ms


async def counted(url: str, name: str) -> float:
    return sum((await metrics_of(url)).get(f"thunderagent_judge_{name}", {}).values())


@pytest.mark.nightly
async def test_no_turn_is_delayed_by_a_judge(engine: RealEngine, run_proxy: RunProxy) -> None:
    """Neither median nor slowest is 5 ms longer than at a proxy without a judge, until the late one has answered.

    A busy machine slows single turns at any proxy, so the best round of each counts: a judge's cost shows in every
    round, because it is asked after every turn, as far as its rate allows.
    """
    polls = ("--poll-interval-s", "2")
    exact = ("--policy-arg", "reserve_tokens=0")  # so that no turn is held
    parts = ("--order", "orbit-judge", "--priority", "orbit-judge")
    asking = ("--judge-model", "j", "--judge-every-turns", "1", "--judge-rate-per-s", "20", "--judge-timeout-s", "60")
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(Relay(engine.url).running())
        options: dict[str, tuple[str, ...]] = {NONE: ("--order", "orbit-step", "--priority", "orbit-step")}
        for name, behaviour in JUDGES.items():
            judge = await stack.enter_async_context(fake_replica(behaviour))
            options[name] = (*parts, "--judge-url", f"{judge.url}/v1", *asking)
        proxies = await asyncio.gather(
            *(stack.enter_async_context(run_proxy((relay,), *polls, *exact, *judged)) for judged in options.values())
        )
        urls = {name: proxy.url for name, proxy in zip(options, proxies, strict=True)}
        client = Client(relay)
        await client.round(urls)  # one-time work, such as opening a connection, is not counted
        client.hold_ms.clear()
        rounds: list[dict[str, list[float]]] = []
        began_s = perf_counter()
        while await counted(urls["after 30 s"], "verdicts_total") == 0:
            assert perf_counter() - began_s < 2 * LATE_S
            rounds.append(await client.round(urls))
        for figure in (median, max):
            best_ms = {name: min(figure(took_ms[name]) for took_ms in rounds) for name in urls}
            log.info("%s of the best of %d rounds, ms: %s", figure.__name__, len(rounds), best_ms)
            assert all(best_ms[name] - best_ms[NONE] <= DELAY_LIMIT_MS for name in JUDGES), best_ms
        assert max(client.hold_ms) <= DELAY_LIMIT_MS
        for name, figure in {"after 30 s": "verdicts_total", "never": "asking", "rubbish": "failures_total"}.items():
            assert await counted(urls[name], figure) > 0, name
        assert await counted(urls["never"], "verdicts_total") == 0
        levels = (await metrics_of(urls["after 30 s"]))["thunderagent_programs_by_level"]
        assert levels["high",] < PROGRAMS_COUNT
