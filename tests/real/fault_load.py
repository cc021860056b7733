"""Programs that take turns through a cell of real processes and retry, and the checks after a fault.

The record comes from three independent sources: clients note every try of every turn, engines note what they began and
ended, and schedulers and gateways report their counts.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tests.integration.support import CHAT, turn, until_metric
from tests.real.counting_engine import PROMPT_TOKENS, prompt_of

if TYPE_CHECKING:
    from tests.real.fault_rig import Rig

TRY_AGAIN_S = 0.25
TRIES_COUNT = 40
SILENT_S = 100.0
"""Time limit of a try."""

UNTOLD_S = 5.0
"""Turns that a gateway carried this shortly before it was killed may be uncounted."""

QUIET_S = 30.0
"""Limit of the wait until all leases are returned."""

SETTLED_S = 0.5
"""A resumed engine learns within this time which connections were closed during its pause."""

WHOLE = "whole"
_KEPT = ("turn_count", "prompt_tokens_total", "output_tokens_total", "cached_tokens_total", "context_tokens")


class Try(NamedTuple):
    """One try of a turn."""

    turn: str
    gateway: str
    outcome: str
    """`whole`, `cut`, `refused` (the connection), `silent`, or the status of the answer."""
    ended_s: float


class Generation(NamedTuple):
    """An engine's record of a turn."""

    engine: str
    began_s: float
    ended_s: float
    is_whole: bool


class Load:
    """Programs that take a turn now and then: `turns_per_s` in total, about."""

    def __init__(self, rig: Rig, prefix: str, *, programs_count: int, turns_per_s: float) -> None:
        """Take no turn yet. Names of programs begin with `prefix`, which is unique to each load of a rig."""
        self.rig = rig
        self.prefix = prefix
        self.tries: list[Try] = []
        self.turns: dict[str, int] = {}
        """Number of tokens that each turn asks for."""
        self.stop = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._programs_count = programs_count
        self._tool_s = programs_count / turns_per_s

    async def run(self) -> None:
        """Take turns until `stop` is set and all begun turns have ended."""
        async with asyncio.TaskGroup() as self._group:
            for number in range(self._programs_count):
                self._group.create_task(self._program(f"{self.prefix}-{number}", number))

    def burst(self, count: int) -> None:
        """Make more programs take a turn at once. They are the youngest: some wait until others end."""
        assert self._group is not None, "it runs"
        for number in range(count):
            self._group.create_task(self._turn(f"{self.prefix}-more{number}", number, 0))

    async def _program(self, name: str, number: int) -> None:
        draw = self.rig.random
        wait_s = draw.uniform(0, self._tool_s)
        for turn_number in range(10**6):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.stop.wait()
            if self.stop.is_set():
                return
            await self._turn(name, number, turn_number)
            wait_s = draw.expovariate(1 / self._tool_s)

    async def _turn(self, name: str, number: int, turn_number: int) -> None:
        """Try one gateway after another until an answer is complete."""
        draw = self.rig.random
        tokens = draw.randrange(20, 60) if draw.random() < 0.1 else draw.randrange(2, 8)
        turn_name = f"{name}.{turn_number}"
        self.turns[turn_name] = tokens
        for attempt in range(TRIES_COUNT):
            gateway = self.rig.gateways[(number + attempt) % len(self.rig.gateways)]
            outcome = await self._try(gateway, name, turn_name, tokens)
            self.tries.append(Try(turn_name, gateway, outcome, time.monotonic()))
            if outcome == WHOLE:
                return
            await asyncio.sleep(TRY_AGAIN_S)

    async def _try(self, gateway: str, name: str, turn_name: str, tokens: int) -> str:
        more = {"stream": True, "max_tokens": tokens, "stream_options": {"include_usage": True}}
        body = json.dumps(turn(name, content=prompt_of(turn_name, tokens), **more)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        try:
            async with asyncio.timeout(SILENT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.rig.ports[gateway])
                try:
                    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                    answer = await _all_of(reader)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return "silent"
        except OSError:
            return "refused"
        if not answer.startswith(b"HTTP/1.1 200 "):
            return answer[9:12].decode() or "cut"
        return WHOLE if answer.endswith(b"\r\n0\r\n\r\n") and b"data: [DONE]" in answer else "cut"

    def generations(self) -> dict[str, list[Generation]]:
        """Return the engines' records by turn, in the order of their begins."""
        found: dict[str, list[Generation]] = defaultdict(list)
        for name, engine in self.rig.engines.items():
            began: dict[str, float] = {}
            kills_s = self.rig.kills_s.get(name, [])
            notes = (line.split() for line in engine.notes.read_text().splitlines())
            for what, turn_name, moment in (each for each in notes if each[1] in self.turns):
                if what == "BEGAN":
                    if turn_name in began:  # the engine was killed in between
                        _end_killed(found, name, turn_name, began.pop(turn_name), kills_s)
                    began[turn_name] = float(moment)
                else:
                    began_s, ended_s = began.pop(turn_name), self._unpaused(name, float(moment))
                    found[turn_name].append(Generation(name, began_s, ended_s, what == "WHOLE"))
            for turn_name, began_s in began.items():
                _end_killed(found, name, turn_name, began_s, kills_s)
        return {turn_name: sorted(each, key=lambda one: one.began_s) for turn_name, each in found.items()}

    def _unpaused(self, name: str, moment_s: float) -> float:
        """Return the true moment of an end that an engine noted: if noted just after a pause, the pause's begin."""
        for began_s, ended_s in self.rig.pauses_s.get(name, []):
            if ended_s <= moment_s <= ended_s + SETTLED_S:
                return began_s
        return moment_s

    def open_count(self) -> int:
        """Return the number of unfinished generations."""
        return sum(one.ended_s == float("inf") for each in self.generations().values() for one in each)


def _end_killed(
    found: dict[str, list[Generation]], name: str, turn_name: str, began_s: float, kills_s: list[float]
) -> None:
    ended_s = next((each for each in kills_s if each >= began_s), float("inf"))
    found[turn_name].append(Generation(name, began_s, ended_s, is_whole=False))


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """Return all data up to the end, which may be a reset."""
    parts: list[bytes] = []
    with suppress(OSError):
        while part := await reader.read(65_536):
            parts.append(part)
    return b"".join(parts)


# --- what must hold


async def until_quiet(load: Load) -> float:
    """Wait until no turn holds a lease or is held anywhere; return the time since the last client."""
    began_s = time.monotonic()
    async with asyncio.timeout(QUIET_S):
        while left := await _left(load):
            await asyncio.sleep(0.1)
            if time.monotonic() - began_s > QUIET_S - 1:
                raise AssertionError(f"leases are leaked: {left}")
    return time.monotonic() - began_s


async def _left(load: Load) -> dict[str, float]:
    rig, left = load.rig, {"engines": float(load.open_count())}
    for name in (await rig.leader(), *rig.gateways):
        metrics = await rig.metrics(name)
        for what in ("leases_active", "turns_held", *(("gateway_turns_told",) if name in rig.gateways else ())):
            left[f"{name} {what}"] = metrics[f"thunderagent_{what}"][()]
    return {name: count for name, count in left.items() if count}


def check_answers(load: Load, *, may_fail: bool) -> Counter[str]:
    """Check that every turn got one answer, with client errors before it only if `may_fail`; count the outcomes."""
    seen = Counter(each.outcome for each in load.tries)
    whole = Counter(each.turn for each in load.tries if each.outcome == WHOLE)
    assert not seen["silent"], f"{seen['silent']} tries had no answer at all"
    assert max(whole.values()) == 1
    assert whole.keys() == load.turns.keys(), f"turns had no answer: {sorted(load.turns.keys() - whole.keys())[:9]}"
    if not may_fail:
        failed = [each for each in load.tries if each.outcome != WHOLE]
        assert not failed, f"clients saw errors, {len(failed)} of {len(load.tries)}: {failed[:5]}"
    return seen


def check_generations(load: Load, *, may_fail: bool) -> None:
    """Check that no turn was generated twice at a time, or twice at all if its client saw no failure."""
    generations = load.generations()
    assert generations.keys() == load.turns.keys(), "what engines generated is not what clients asked for"
    for turn_name, each in generations.items():
        for before, after in pairwise(each):
            assert after.began_s >= before.ended_s, f"{turn_name} was generated twice at a time: {each}"
        assert may_fail or len(each) == 1, f"{turn_name} was generated {len(each)} times: {each}"


async def check_counts(load: Load, leader: str, *, may_lose: bool) -> dict[str, tuple[int, ...]]:
    """Check that each turn was counted once, for its program and in the sums; return the programs."""
    rig = load.rig
    generated, answered = defaultdict[str, list[str]](list), Counter[str]()
    for turn_name, each in load.generations().items():
        generated[_program(turn_name)] += [turn_name] * sum(one.is_whole for one in each)
    for each_try in load.tries:
        kills_s = rig.kills_s.get(each_try.gateway, [])
        is_untold = any(0 <= kill_s - each_try.ended_s < UNTOLD_S for kill_s in kills_s)
        answered[_program(each_try.turn)] += each_try.outcome == WHOLE and not is_untold
    found = await rig.programs(leader, f"{load.prefix}-")
    programs = {name: tuple(int(each[key]) for key in _KEPT) for name, each in found.items() if name in generated}
    for name, of_program in generated.items():
        tried_count, prompt_tokens, output_tokens, *_ = programs.get(name, (0, 0, 0))
        count = prompt_tokens // PROMPT_TOKENS  # it had more turns, if some had no answer
        least_count = 0 if may_lose else answered[name]
        assert least_count <= count <= len(of_program), f"{name}: {count} counted, {answered[name]} whole, {of_program}"
        assert tried_count >= count
        if count == len(of_program):
            assert output_tokens == sum(load.turns[each] for each in of_program), f"{name} used something else"
    if not may_lose:
        await _check_sums(rig, leader)
    return programs


async def _check_sums(rig: Rig, leader: str) -> None:
    """Check that the sums are those of all programs of all loads."""
    everybody = await rig.programs(leader, "-")
    programs = [tuple(int(each[key]) for key in _KEPT) for each in everybody.values()]
    metrics = await rig.metrics(leader)
    sums = {
        "prompt": metrics["thunderagent_prompt_tokens_total"][()],
        "output": metrics["thunderagent_output_tokens_total"][()],
    }
    of_programs = {"prompt": sum(each[1] for each in programs), "output": sum(each[2] for each in programs)}
    assert sums == of_programs, f"sums are not those of programs: {sums}, {of_programs}"
    finished_count = metrics["thunderagent_turns_total"].get(("finished",), 0)
    assert sums["prompt"] == PROMPT_TOKENS * finished_count


def _program(turn_name: str) -> str:
    return turn_name.partition(".")[0]


async def check_epochs(rig: Rig, leader: str) -> int:
    """Check that the epochs seen by a gateway never fell, and end with the leader's; return that."""
    epoch = int((await rig.status(leader))["epoch"])
    for name, process in rig.logs:
        log = process.log
        assert "Traceback" not in log, f"{name}: {log[log.index('Traceback') :][:3000]}"
        heard = [int(each) for each in re.findall(r'"epoch":\s*(\d+)[^\n]*"scheduler_leads"', log)]
        heard += [int(each) for each in re.findall(r'"scheduler_leads"[^\n]*"epoch":\s*(\d+)', log)]
        assert name not in rig.gateways or heard == sorted(heard), f"{name} heard {heard}"
    for name in rig.gateways:
        await until_metric(rig.url(name), "gateway_epoch", epoch)  # one without turns may not be linked yet
    return epoch


async def check_what_is_kept(load: Load, leader: str, programs: dict[str, tuple[int, ...]]) -> None:
    """Check that a scheduler that takes over from the store alone knows what the leader knew."""
    rig = load.rig
    before = await rig.metrics(leader)
    await asyncio.sleep(1.0)  # the last changes are written within some milliseconds
    rig.kill(leader)
    other = next(name for name in rig.watches if name != leader)
    assert await rig.leader() == other
    found = await rig.programs(other, f"{load.prefix}-")
    after = {name: tuple(int(each[key]) for key in _KEPT) for name, each in found.items() if name in programs}
    differ = [(name, each, after.get(name)) for name, each in programs.items() if after.get(name) != each]
    assert not differ, f"{len(differ)} of {len(programs)} programs are not as they were: {differ[:5]}"
    now = await rig.metrics(other)
    for name in ("thunderagent_turns_total", "thunderagent_prompt_tokens_total", "thunderagent_output_tokens_total"):
        assert now[name] == before[name], f"{name}: {now[name]}, it was {before[name]}"
