"""Four engines that fail, alone and in pairs, under 64 programs: the whole proxy on loopback sockets, in virtual time.

ENGINE_FAULTS=all runs each failure and each pair of different ones; without it four failures run, alone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from itertools import combinations, count
from math import inf
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.integration.support import (
    CHAT,
    DONE,
    LAST_CHUNK,
    USAGE_EVENT,
    FakeReplica,
    chunk,
    event,
    get,
    running_proxy,
    stream_head,
    word,
)
from tests.virtual_time import VirtualTimeLoop
from thunderagent.proxy.turns import flow, forward, relay
from thunderagent.runtime import Runtime
from thunderagent.serving import building

if TYPE_CHECKING:
    from tests.integration.support import Call, RunningProxy

PROGRAMS_COUNT = 64
TURNS_COUNT = 4
"""Turns of a program, after which a new one comes: it may be placed on an engine that is tried again."""

TURN_S, TOOL_S = 2.0, 2.0
FAULT_S, REST_S = 50.0, 30.0
LOOK_S = 0.25
SLOW_POLL_S = 1.5

FAULTS: dict[str, tuple[frozenset[str], float]] = {
    "error 500": (frozenset({"failing"}), 3.0),
    "error event": (frozenset({"failing"}), TURN_S + 3.0),
    "freeze": (frozenset({"frozen"}), 15.0),
    "vanish": (frozenset({"silent", "down"}), 33.0),
    "restart": (frozenset({"down"}), 3.0),
    "full": (frozenset({"backpressure"}), 3.0),
    "slow metrics": (frozenset(), 0.0),
}
"""The verdicts that each failure may get, and within which time; one that gets none is no failure.

One that vanishes is silent after the limit of silence (30 s), the deadline of a poll and the time to the next."""

PROBED = frozenset({"error 500", "error event"})
"""Failures whose engine is tried with a turn after 5 s, doubled each time."""

MOST_PROBES_COUNT = 4
SHORT = ("error 500", "freeze", "vanish", "restart")

pytestmark = pytest.mark.timeout(300)

CASES: list[tuple[str, ...]] = [(name,) for name in SHORT]
if os.environ.get("ENGINE_FAULTS") == "all":
    CASES = [*((name,) for name in FAULTS), *combinations(FAULTS, 2)]


class Engine(FakeReplica):
    """An engine that fails as it is told."""

    def __init__(self) -> None:
        super().__init__(self.behave)
        self.fault = ""
        self.well = asyncio.Event()
        self.well.set()
        self.running_count = self.steps_count = 0
        self.turns_s: list[float] = []

    async def answer_call(self, call: Call) -> None:
        if self.fault == "vanish":
            await self.well.wait()
            return
        if self.fault == "slow metrics" and call.target == "/metrics":
            await asyncio.sleep(SLOW_POLL_S)
        self.metrics = (
            'vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000000"} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {self.running_count}\n'
            'vllm:num_requests_waiting{engine="0"} 0\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.steps_count}\n'
        )
        await super().answer_call(call)

    async def behave(self, call: Call) -> None:
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
        self.running_count += 1
        try:
            for step in range(4):
                if self.fault == "freeze":
                    await self.well.wait()
                if step == 0 and call.target == CHAT:
                    call.write(stream_head(), chunk(word("a")))
                await asyncio.sleep(TURN_S / 4)
                self.steps_count += 1
            if call.target != CHAT:
                call.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            elif self.fault == "error event":
                call.write(chunk(event({"error": {"message": "engine died", "code": 500}})), LAST_CHUNK)
            else:
                call.write(chunk(word("b", "stop")), chunk(USAGE_EVENT), chunk(DONE), LAST_CHUNK)
        finally:
            self.running_count -= 1

    async def begin(self, fault: str) -> None:
        self.fault = fault
        self.well.clear()
        if fault == "restart":
            await self.stop()

    async def recover(self) -> None:
        if self.fault == "restart":
            await self.start()
        self.fault = ""
        self.well.set()


async def sent(url: str, program_id: str) -> tuple[int, bytes]:
    """Send a streamed turn; return its status and its whole answer."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = {"model": "m", "stream": True, "program_id": program_id, "messages": [{"role": "user", "content": "hello"}]}
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
            status, answer = await sent(self.proxy.url, f"p{number}-{turn // TURNS_COUNT}")
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
        return {row["replica_id"]: row["verdict"] for row in rows}

    async def watch(self) -> None:
        """Note the verdicts while the engines fail."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while loop.time() < began_s + FAULT_S:
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
            await asyncio.sleep(LOOK_S)

    def known_bad_count(self, engine: Engine, began_s: float) -> int:
        """Return how many turns an engine got after its verdict; one that is full is tried again each second."""
        if engine.fault not in self.found_s or engine.fault == "full":
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
            if expected and self.found_s.get(fault, inf) > within_s + LOOK_S:
                wrong.append(f"{fault}: verdict after {self.found_s.get(fault)} s, not {within_s} s")
            if known_bad[fault] > (MOST_PROBES_COUNT if fault in PROBED else 0):
                wrong.append(f"{fault}: {known_bad[fault]} turns to an engine that is known bad")
        return wrong if self.ended["whole"] else [*wrong, "no turn ended"]


async def run_case(case: tuple[str, ...], engines: list[Engine]) -> list[str]:
    """Run the load with these failures, one to an engine; return what is wrong. Print a row of figures."""
    loop = asyncio.get_running_loop()
    urls = [engine.url for engine in engines]
    async with running_proxy(*urls, poll_interval_s=1.0, tick_s=1.0, policy="breakeven") as proxy:
        rig = Rig(proxy, engines)
        programs = [asyncio.create_task(rig.program(number)) for number in range(PROGRAMS_COUNT)]
        await asyncio.sleep(REST_S / 2)
        began_s = loop.time()
        for engine, fault in zip(engines, case, strict=False):
            await engine.begin(fault)
        await rig.watch()
        known_bad = {engine.fault: rig.known_bad_count(engine, began_s) for engine in engines}
        recovered_s = loop.time()
        for engine in engines:
            await engine.recover()
        await asyncio.sleep(REST_S / 2)
        after = sorted(set((await rig.verdicts()).values()))
        for program in programs:
            program.cancel()
        await asyncio.gather(*programs, return_exceptions=True)
    found = ", ".join(f"{fault} {found_s:.2f} s" for fault, found_s in rig.found_s.items())
    ends = f"{rig.ended['whole']} whole, {rig.ended['cut']} cut, {len(rig.lost)} lost"
    print(f"| {' + '.join(case)} | {found} | {ends} | {sum(known_bad[fault] for fault in case)} | {', '.join(after)} |")
    lost = [number for number in range(PROGRAMS_COUNT) if rig.whole_s.get(number, 0.0) < recovered_s]
    return rig.wrong(case, known_bad) + [
        f"lost: program {number}, which had no whole answer any more" for number in lost
    ]


async def run_engines(case: tuple[str, ...]) -> list[str]:
    """Run a case with four engines of its own."""
    engines = [Engine() for _ in range(4)]
    for engine in engines:
        await engine.start()
    try:
        return await run_case(case, engines)
    finally:
        for engine in engines:
            await engine.end()


def run_in_virtual_time(case: tuple[str, ...]) -> list[str]:
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
            return runner.run(run_engines(case))


@pytest.mark.parametrize("case", CASES, ids=" + ".join)
def test_no_failure_of_an_engine_becomes_the_agents(case: tuple[str, ...]) -> None:
    wrong = run_in_virtual_time(case)
    assert not wrong, "\n".join(wrong)
