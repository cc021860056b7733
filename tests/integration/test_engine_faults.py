"""Four engines that fail, alone and in pairs, under 64 programs: the whole proxy on loopback sockets, in virtual time.

Each engine runs a few turns at once, and others wait in its queue: the load is more than four engines can serve.
ENGINE_FAULTS=all runs each failure, each pair of different ones, and an hour of overload; without it a few pairs run,
so that a failure of each kind is seen once. ENGINE_FAULTS=real runs each failure in real time, for a quarter of an
hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from itertools import combinations, count, cycle
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.integration.support import (
    CHAT,
    DONE,
    LAST_CHUNK,
    FakeReplica,
    chunk,
    event,
    get,
    post,
    running_proxy,
    stream_head,
    word,
)
from tests.virtual_time import VirtualTimeLoop
from thunderagent.proxy.turns import flow, forward, relay
from thunderagent.runtime import Runtime
from thunderagent.serving import building

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from contextlib import AbstractAsyncContextManager

    from tests.integration.support import Call, RunningProxy

PROGRAMS_COUNT = 64
TURNS_COUNT = 4
"""Turns of a program, after which a new one comes: it may be placed on an engine that is tried again."""

SLOTS_COUNT = 6
"""Turns that an engine runs at once."""

LEAST_THROUGHPUT_RATIO = 0.95
"""What the healthy engines do at least, once the others have their verdicts, of what they can."""

OVERLOAD_SLOTS_COUNT, OVERLOAD_S, OVERLOAD_LOOK_S = 2, 3600.0, 1.0
LATE_S = (0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.5)
"""How late an overloaded engine answers its polls, one after the other: five get no answer in time."""

TURN_S, TOOL_S = 2.0, 2.0
FIRST_TOKENS, MORE_TOKENS = 2000, 500
"""Prompts of a program's first turn, and how much longer each next one is."""

FAULT_S, REST_S = 50.0, 30.0
LOOK_S = 0.25
SLOW_POLL_S = 1.5
SETTLED_S = 2.0
"""After the verdicts, until throughput counts."""

FAULTS: dict[str, tuple[frozenset[str], float]] = {
    "error 500": (frozenset({"failing"}), 3.0),
    "error event": (frozenset({"failing"}), TURN_S + 3.0),
    "freeze": (frozenset({"frozen"}), 15.0),
    "vanish": (frozenset({"silent", "down"}), 1.0 + 3 * 2.0),
    "outage": (frozenset({"down"}), 3.0),
    "restart": (frozenset({"restarted"}), 3.0),
    "full": (frozenset({"backpressure"}), 3.0),
    "collapse": (frozenset({"collapsed"}), 15.0),
    "sleep": (frozenset({"suspended"}), 1.0),
    "update": (frozenset({"suspended"}), 1.0),
    "slow metrics": (frozenset(), 0.0),
}
"""The verdicts that each failure may get, and within which time; one that gets none is no failure.

One that vanishes is silent after three polls of 2 s without an answer; a collapse shows after 20 turns. An outage
lasts; a restart is over before the next poll, which tells it: it has no verdict, but its replica a new incarnation. An
update is told by a caller that leaves, and goes on."""

SLEEP, WAKE_UP, UPDATE = "/sleep", "/wake_up", "/update_weights_from_disk"
TOLD = (SLEEP, WAKE_UP, UPDATE)
REAL_S = 900.0

PROBED = frozenset({"error 500", "error event"})
"""Failures whose engine is tried with a turn after 5 s, doubled each time."""

MOST_PROBES_COUNT = 4
SHORT = (("error 500", "freeze"), ("vanish", "restart"), ("collapse", "update"))
WHICH = os.environ.get("ENGINE_FAULTS", "")
HEALED = frozenset({"restart", "slow metrics"})
"""Failures whose engine serves all the same."""

pytestmark = pytest.mark.timeout(3600)
"""A case takes ten seconds; but where others have the processors, twenty thousand waits for sockets take long."""

CHECKED_EVERY_COUNT = 20
CASES: list[tuple[str, ...]] = list(SHORT)
if WHICH == "all":
    CASES = [*((name,) for name in FAULTS), *combinations(FAULTS, 2)]


class Engine(FakeReplica):
    """An engine that fails as it is told."""

    def __init__(self, slots_count: int = SLOTS_COUNT, late_s: Sequence[float] = (0.0,)) -> None:
        super().__init__(self.behave)
        self.fault = ""
        self.late_s, self.late_now_s = cycle(late_s), 0.0
        self.started_s = 0.0
        self.slots_count = slots_count
        self.slots = asyncio.Semaphore(slots_count)
        self.waiting_count = 0
        self.ends_s: list[float] = []
        self.kept_tokens: dict[str, int] = {}
        """By the name of a program."""
        self.well = asyncio.Event()
        self.well.set()
        self.running_count = self.steps_count = 0
        self.turns_s: list[float] = []

    async def answer_call(self, call: Call) -> None:
        if self.fault == "vanish":
            await self.well.wait()
            return
        if call.target == "/health":
            self.late_now_s = next(self.late_s)
        if call.target in ("/health", "/metrics") and self.late_now_s:
            await asyncio.sleep(self.late_now_s)
        if self.fault == "slow metrics" and call.target == "/metrics":
            await asyncio.sleep(SLOW_POLL_S)
        self.metrics = (
            'vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000000"} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {self.running_count}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting_count}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.steps_count}\n'
            f"process_start_time_seconds {self.started_s}\n"
        )
        await super().answer_call(call)

    async def behave(self, call: Call) -> None:
        if call.target in TOLD:
            if call.target == UPDATE:
                await self.well.wait()
            call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        if call.target not in (CHAT, "/v1/completions"):
            call.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        if call.target == CHAT:
            self.turns_s.append(asyncio.get_running_loop().time())
        if self.fault == "error 500":
            call.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}")
            return
        if self.fault == "full":
            call.write(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}")
            return
        self.waiting_count += 1
        slots, running = self.slots, False
        try:
            await slots.acquire()
            running = True
            self.waiting_count -= 1
            self.running_count += 1
            await self.generate(call)
        finally:
            if running:
                slots.release()
                self.running_count -= 1
            else:
                self.waiting_count -= 1

    async def generate(self, call: Call) -> None:
        """Answer a turn, step by step, until its client leaves."""
        for step in range(4):
            if self.fault in ("freeze", "vanish"):
                await self.well.wait()
            if call.left.is_set():
                return
            if step == 0 and call.target == CHAT:
                call.write(stream_head())
            if call.target == CHAT:
                call.write(chunk(word("a")))
            await asyncio.sleep(TURN_S / 4)
            if self.fault in ("freeze", "vanish"):
                await self.well.wait()
            self.steps_count += 1
        if call.target != CHAT:
            call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        elif self.fault == "error event":
            call.write(chunk(event({"error": {"message": "engine died", "code": 500}})), LAST_CHUNK)
        else:
            call.write(chunk(word("b", "stop")), chunk(self.usage(call)), chunk(DONE), LAST_CHUNK)
            self.ends_s.append(asyncio.get_running_loop().time())

    def usage(self, call: Call) -> bytes:
        """Return the event with a turn's tokens, and keep them."""
        name, _, number = call.json()["messages"][0]["content"].partition(" turn ")
        prompt_tokens = FIRST_TOKENS + int(number) * MORE_TOKENS
        cached_tokens = 0 if self.fault == "collapse" else self.kept_tokens.get(name, 0)
        self.kept_tokens[name] = prompt_tokens
        details = {"cached_tokens": cached_tokens}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 4, "prompt_tokens_details": details}
        return event({"id": "1", "object": "chat.completion.chunk", "choices": [], "usage": usage})

    async def die(self) -> None:
        """End the process: what ran is lost, and so are its counters and what it kept."""
        tasks = list(self.tasks)
        await self.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.tasks.difference_update(tasks)
        self.slots = asyncio.Semaphore(self.slots_count)
        self.running_count = self.waiting_count = self.steps_count = 0
        self.kept_tokens.clear()

    async def live(self) -> None:
        self.started_s += 1.0
        await self.start()

    async def begin(self, fault: str, proxy_url: str) -> None:
        """Fail from now on."""
        self.fault = fault
        self.well.clear()
        if fault in ("outage", "restart"):
            await self.die()
        if fault == "restart":
            await self.live()
        elif fault == "sleep":
            await post(proxy_url, self.told(SLEEP))
        elif fault == "update":
            leaves = asyncio.create_task(post(proxy_url, self.told(UPDATE), {}))
            await asyncio.sleep(LOOK_S)
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)

    def told(self, path: str) -> str:
        return f"/workers/{self.replica_id}{path}"

    async def recover(self, proxy_url: str) -> None:
        if self.fault == "outage":
            await self.live()
        elif self.fault == "sleep":
            await post(proxy_url, self.told(WAKE_UP))
        self.fault = ""
        self.well.set()


async def sent(url: str, program_id: str, number: int) -> tuple[int, bytes]:
    """Send a streamed turn; return its status and its whole answer."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages = [{"role": "user", "content": f"{program_id} turn {number}"}]
    said = {"model": "m", "stream": True, "program_id": program_id, "messages": messages}
    body = json.dumps(said).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        answer = await reader.read()
    finally:
        writer.close()
    return int(answer.split(b" ", 2)[1]) if answer else 0, answer


class Rig:
    """The load, and what came of it."""

    def __init__(self, proxy: RunningProxy, engines: list[Engine]) -> None:
        self.proxy = proxy
        self.engines = engines
        self.ended: Counter[str] = Counter()
        self.lost: list[str] = []
        """Turns without a byte of a generated answer that their client was told had failed."""
        self.found_s: dict[str, float] = {}
        """When each failure got its verdict, from its begin."""
        self.false_alarms: set[str] = set()
        self.whole_s: dict[int, float] = {}
        """When each program last had a whole answer."""
        self.taken_back: set[str] = set()
        """Failures whose engine was up again while it still failed."""

    async def program(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep((TURN_S + TOOL_S) * number / PROGRAMS_COUNT)
        for turn in count():
            status, answer = await sent(self.proxy.url, f"p{number}-{turn // TURNS_COUNT}", turn % TURNS_COUNT)
            if status == 200 and b"[DONE]" in answer:
                self.ended["whole"] += 1
                self.whole_s[number] = loop.time()
            elif status == 200 and b'"content":"a"' in answer:
                self.ended["cut"] += 1
            else:
                self.lost.append(f"{loop.time():.2f} s: {status} {answer[-200:]!r}")
            await asyncio.sleep(TOOL_S)

    async def verdicts(self) -> dict[str, str]:
        said: Any = (await get(self.proxy.url, "/replicas")).json()
        rows = said["replicas"] if isinstance(said, dict) else said
        restarted = {engine.replica_id for engine in self.engines if engine.fault == "restart"}
        return {
            row["replica_id"]: "restarted" if row["incarnation"] and row["replica_id"] in restarted else row["verdict"]
            for row in rows
        }

    async def watch(self, for_s: float = FAULT_S, look_s: float = LOOK_S) -> None:
        """Note the verdicts while the engines fail."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while loop.time() < began_s + for_s:
            verdicts = await self.verdicts()
            for engine in self.engines:
                verdict = verdicts[engine.replica_id]
                expected = FAULTS[engine.fault][0] if engine.fault else frozenset()
                if verdict in expected:
                    self.found_s.setdefault(engine.fault, loop.time() - began_s)
                elif verdict == "up" and engine.fault in self.found_s and engine.fault != "full":
                    self.taken_back.add(engine.fault)
                elif verdict != "up" and not expected:
                    self.false_alarms.add(f"{engine.fault or 'well'}: {verdict}")
            await asyncio.sleep(look_s)

    def known_bad_count(self, engine: Engine, began_s: float) -> int:
        """Return how many turns an engine got after its verdict; one that is full is tried again each second."""
        if engine.fault not in self.found_s or engine.fault in ("full", "restart"):
            return 0
        since_s = began_s + self.found_s[engine.fault] + LOOK_S
        return sum(sent_s > since_s for sent_s in engine.turns_s)

    def wrong(self, case: tuple[str, ...], known_bad: dict[str, int]) -> list[str]:
        """Return what is not as it should be."""
        wrong = [f"false alarm: {each}" for each in sorted(self.false_alarms)]
        wrong += [f"lost: {each}" for each in self.lost[:5]]
        wrong += [f"{fault}: up again while it still failed" for fault in sorted(self.taken_back)]
        for fault in case:
            expected, within_s = FAULTS[fault]
            if expected and self.found_s.get(fault, inf) > within_s + 2 * LOOK_S:
                wrong.append(f"{fault}: verdict after {self.found_s.get(fault)} s, not {within_s} s")
            if known_bad[fault] > (MOST_PROBES_COUNT if fault in PROBED else 0):
                wrong.append(f"{fault}: {known_bad[fault]} turns to an engine that is known bad")
        return wrong if self.ended["whole"] else [*wrong, "no turn ended"]


def rig_proxy(
    urls: Sequence[str], checked_every_count: int = CHECKED_EVERY_COUNT
) -> AbstractAsyncContextManager[RunningProxy]:
    options: dict[str, Any] = {"poll_interval_s": 1.0, "tick_s": 1.0, "policy": "breakeven"}
    return running_proxy(*urls, checked_every_count=checked_every_count, **options)


async def run_case(case: tuple[str, ...], engines: list[Engine]) -> list[str]:
    """Run the load with these failures, one to an engine; return what is wrong. Print a row of figures."""
    loop = asyncio.get_running_loop()
    urls = [engine.url for engine in engines]
    async with rig_proxy(urls) as proxy:
        rig = Rig(proxy, engines)
        programs = [asyncio.create_task(rig.program(number)) for number in range(PROGRAMS_COUNT)]
        await asyncio.sleep(REST_S / 2)
        began_s = loop.time()
        for engine, fault in zip(engines, case, strict=False):
            await engine.begin(fault, proxy.url)
        await rig.watch()
        ratio = throughput_ratio(engines, began_s + max(FAULTS[fault][1] for fault in case) + SETTLED_S)
        known_bad = {engine.fault: rig.known_bad_count(engine, began_s) for engine in engines}
        recovered_s = loop.time()
        for engine in engines:
            await engine.recover(proxy.url)
        await asyncio.sleep(REST_S / 2)
        after = sorted(set((await rig.verdicts()).values()))
        for program in programs:
            program.cancel()
        await asyncio.gather(*programs, return_exceptions=True)
    found = ", ".join(f"{fault} {found_s:.2f} s" for fault, found_s in rig.found_s.items())
    ends = f"{rig.ended['whole']} whole, {rig.ended['cut']} cut, {len(rig.lost)} lost"
    known = sum(known_bad[fault] for fault in case)
    print(f"| {' + '.join(case)} | {found} | {ends} | {known} | {ratio:.3f} | {', '.join(after)} |", flush=True)
    lost = [number for number in range(PROGRAMS_COUNT) if rig.whole_s.get(number, 0.0) < recovered_s]
    wrong = [f"lost: program {number}, which had no whole answer any more" for number in lost]
    if ratio < LEAST_THROUGHPUT_RATIO and isinstance(loop, VirtualTimeLoop):
        wrong.append(f"{SLOW} {ratio:.3f} of what they can")
    return rig.wrong(case, known_bad) + wrong


SLOW = "the healthy engines do"


def throughput_ratio(engines: list[Engine], since_s: float) -> float:
    """Return how many turns the healthy engines have ended since then, of as many as they have slots for."""
    healthy = [engine for engine in engines if engine.fault in HEALED or not engine.fault]
    for_s = asyncio.get_running_loop().time() - since_s
    ended = sum(ended_s > since_s for engine in healthy for ended_s in engine.ends_s)
    return ended * TURN_S / (for_s * sum(engine.slots_count for engine in healthy))


@contextlib.asynccontextmanager
async def running_engines(
    slots_count: int = SLOTS_COUNT, late_s: Sequence[float] = (0.0,)
) -> AsyncIterator[list[Engine]]:
    engines = [Engine(slots_count, late_s) for _ in range(4)]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.end()


async def run_engines(case: tuple[str, ...]) -> list[str]:
    """Run a case with four engines of its own."""
    async with running_engines() as engines:
        return await run_case(case, engines)


async def overload(for_s: float) -> list[str]:
    """Run the load on engines that can serve a quarter of it, and answer their polls late; return what is wrong."""
    async with running_engines(OVERLOAD_SLOTS_COUNT, LATE_S) as engines:
        urls = [engine.url for engine in engines]
        async with rig_proxy(urls, ceil(for_s)) as proxy:
            rig = Rig(proxy, engines)
            programs = [asyncio.create_task(rig.program(number)) for number in range(PROGRAMS_COUNT)]
            await rig.watch(for_s, OVERLOAD_LOOK_S)
            since_s = asyncio.get_running_loop().time() - REST_S
            for program in programs:
                program.cancel()
            await asyncio.gather(*programs, return_exceptions=True)
    print(f"| overload for {for_s / 60:.0f} min | {rig.ended['whole']} whole, {len(rig.lost)} lost |", flush=True)
    stuck = [number for number in range(PROGRAMS_COUNT) if rig.whole_s.get(number, 0.0) < since_s]
    return rig.wrong((), {}) + [f"lost: program {number}" for number in stuck]


def in_virtual_time(run: Callable[[], Coroutine[Any, Any, list[str]]]) -> list[str]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        clock = runner.get_loop().time

        def timed(*args: Any, **options: Any) -> Runtime:
            return Runtime(*args, clock=clock, **options)

        with (
            patch.object(building, "Runtime", timed),
            patch.object(flow, "monotonic", clock),
            patch.object(forward, "monotonic", clock),
            patch.object(relay, "monotonic", clock),
        ):
            return runner.run(run())


@pytest.mark.parametrize("case", CASES, ids=" + ".join)
def test_no_failure_of_an_engine_becomes_the_agents(case: tuple[str, ...]) -> None:
    wrong = in_virtual_time(lambda: run_engines(case))
    assert not wrong, "\n".join(wrong)


def test_overload_gives_no_engine_a_verdict() -> None:
    """For an hour if ENGINE_FAULTS=all, and else for two minutes."""
    wrong = in_virtual_time(lambda: overload(OVERLOAD_S if WHICH == "all" else OVERLOAD_S / 30))
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(WHICH != "real", reason="it takes a quarter of an hour, on a machine that does nothing else")
@pytest.mark.timeout(2 * REAL_S)
def test_no_failure_becomes_the_agents_in_real_time() -> None:
    """Each failure in turn, until the time is over; throughput is printed, but not asserted."""
    until_s, wrong = monotonic() + REAL_S, []
    for fault in FAULTS:
        if monotonic() + FAULT_S + REST_S <= until_s:
            wrong += [f"{fault}: {each}" for each in asyncio.run(run_engines((fault,)))]
    assert not wrong, "\n".join(wrong)
