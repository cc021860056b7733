"""A real engine serves turns in the order of the scheduler's priorities, by its own timestamps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
import zmq
from zmq.asyncio import Context

from tests.real.support import COMPLETIONS, Programs, completion, priorities_in, words
from thunderagent.backends.kv_messages import BlocksStored, read_events, read_message

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.real_engine import RealEngine
    from tests.real.conftest import RunProxy
    from thunderagent.backends.kv_events import KvEventsEndpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAIT_S = 60.0
TURNS = {"long-since": 6, "some-time": 4, "just-begun": 2, "new": 0}
"""Programs, and their numbers of earlier turns; the one with most is the oldest and the largest."""


async def stored_at_s(address: str, found: list[tuple[float, str]]) -> None:
    """Note when the engine stored a block of a program, by its own clock."""
    with Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(address)
        socket.subscribe(b"")
        while True:
            message = read_message(await socket.recv_multipart())
            at_s = msgspec.msgpack.decode(message.payload, type=list[Any])[0]
            stored = (event for event in read_events(message.payload) if isinstance(event, BlocksStored))
            found.extend((at_s, event.program_id) for event in stored if event.program_id)


def first_since(since_s: float, found: list[tuple[float, str]]) -> tuple[str, ...]:
    """Return the programs with blocks stored after a time of the engine's clock, in order of their first block."""
    return tuple(dict.fromkeys(program_id for at_s, program_id in sorted(found) if at_s > since_s))


async def requests_count(engine: httpx2.AsyncClient, state: str) -> int:
    """Return the number of requests that are `running` or `waiting` in the engine."""
    exposition = (await engine.get("/metrics")).text
    lines = [line for line in exposition.splitlines() if line.startswith(f"vllm:num_requests_{state}{{")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


@dataclass(frozen=True)
class Case:
    """A priority, the order of service under it, and the tokens that each one's next turn adds."""

    priority: str
    settings: tuple[str, ...]
    order: tuple[str, ...]
    new_tokens: tuple[int, int, int, int] = (100, 100, 100, 100)


CASES = (
    Case("age", (), tuple(TURNS)),
    Case("orbit-step", ("priority.window_count=2",), tuple(reversed(TURNS))),
    Case(
        "mars",
        ("priority.first_level_tokens=80", "priority.served_ratio=1000"),
        ("some-time", "new", "long-since", "just-begun"),
        (40, 200, 700, 1700),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.priority)
async def test_the_engine_serves_in_the_order_of_the_priorities(
    case: Case, publishing: tuple[RealEngine, KvEventsEndpoint], run_proxy: RunProxy, tmp_path: Path
) -> None:
    """Four turns wait in the engine behind a long one, the least important first: they are served in reverse.

    On a busy machine the engine may read some of the turns too late to order them, so it gets five tries.
    """
    for number in range(5):
        log, salt = tmp_path / f"events-{number}.jsonl", f"{case.priority}-{number}"
        if served := await order_of_service(case, salt, publishing, run_proxy, log):
            break
    given = priorities_in(log)
    assert len(set(given.values())) == len(TURNS), given
    assert tuple(sorted(given, key=lambda name: given[name])) == case.order
    assert served == case.order


async def order_of_service(
    case: Case, salt: str, publishing: tuple[RealEngine, KvEventsEndpoint], run_proxy: RunProxy, log: Path
) -> tuple[str, ...]:
    """Let four turns wait in the engine, and return their programs in the order of service.

    Return nothing if one was served before all waited.
    """
    engine, address = publishing[0], publishing[1].address
    part = ("--policy", "passthrough", "--priority", case.priority, "--kv-events", address, "--event-log", str(log))
    command = (*part, "--tick-s", "0.2", *(word for each in case.settings for word in ("--policy-arg", each)))
    found: list[tuple[float, str]] = []
    reader = asyncio.create_task(stored_at_s(address, found))
    try:
        async with (
            run_proxy((engine,), *command) as proxy,
            httpx2.AsyncClient(base_url=proxy.url, timeout=WAIT_S) as client,
            httpx2.AsyncClient(base_url=engine.url, timeout=WAIT_S) as direct,
        ):
            programs = Programs(client, salt)
            for program_id, turns_count in TURNS.items():
                for _ in range(turns_count):
                    await programs.turn(program_id)
                await asyncio.sleep(0.2)  # ages are in tenths of a second, and these turns can be shorter
            # It is no stream: while tokens come faster than its server passes them on, it reads no other request.
            long = completion(words(20, seed=7), 3000, priority=-(2**40))
            busy = asyncio.create_task(direct.post(COMPLETIONS, json=long))
            async with asyncio.timeout(WAIT_S):
                while not busy.done() and not await requests_count(direct, "running"):
                    await asyncio.sleep(0.1)
                since_s = time.time()  # this is also the engine's clock
                waiting = []
                for program_id, new_tokens in reversed([*zip(case.order, case.new_tokens, strict=True)]):
                    waiting.append(asyncio.create_task(programs.turn(program_id, new_tokens)))
                    await asyncio.sleep(0.1)
                is_late = False
                while not is_late and await requests_count(direct, "waiting") < len(TURNS):
                    await asyncio.sleep(0.1)
                    is_late = any(each.done() for each in waiting)
            busy.cancel()
            await asyncio.gather(*waiting)
            async with asyncio.timeout(WAIT_S):
                while len(first_since(since_s, found)) < len(TURNS):
                    await asyncio.sleep(0.1)
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    return () if is_late else first_since(since_s, found)
