"""The paper's three workflows with the scheduler behind them: its leases, its policy, a simulated engine, virtual time.

Every LLM call is a turn of its session's program: it takes a lease of the proxy's runtime, runs on the engine's model
beside all others, and ends with its usage. A developer works in steps, each a turn and then a command in a sandbox.
There are few sandboxes, so it also waits for other sessions' commands. Concurrent sessions share the engine's memory.
Two runs of a seed differ only in who decides, and whether hints are sent. Instances are workers here, not GPUs: all
share the engine.
"""

from __future__ import annotations

import asyncio
import copy
import random
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.workflow_cases import CASES, DEFAULTS, Case, VirtualLoop, all_come
from thunderagent.leases import TurnAsk, TurnHint
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import ReplicaPolled, Tick
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.transitions import LATE_RATIO, LEAST_CONFIDENCE_RATIO, TOLERANCE_S
from thunderagent.runtime import Runtime
from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest, FinishedRequest
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.workloads.contexts import Context, TokenSpace
from thunderagent_workflows import Deployment, deploy, stubs
from thunderagent_workflows.hints import Hints
from thunderagent_workflows.llm import turn_headers

HERE = "benchmarks.workflow_turns"
PROFILE = "qwen3-14b-h100"
WORKERS_FACTOR = 4
"""Instances are workers here, not GPUs: all share the engine."""
SANDBOXES_COUNT = 10
MEMORY_TOKENS = {"short": 100_000, "ample": 2_000_000}
RATES_PER_S = {"software": 0.5, "financial": 0.5, "router": 8.0}
COUNT = 40
"""Number of sessions in a run."""
EARLY_S = 2.0
"""How long before its hinted turn a program is restored, where that is tried."""


class EarlyScheduler(Scheduler):
    """Restores a paused program shortly before its hinted turn, if it precedes all that wait and fits.

    It exists only to be measured: the program would get the same room with its turn anyway, unless another one
    takes the room in between.
    """

    early_count = 0

    def _tick(self, event: Tick) -> None:
        super()._tick(event)
        book, core, now_s = self.book, self.core, self.book.now_s
        for program in list(book.queue.resting.order):
            hint = program.hint
            if hint is None or hint.given_s is None or hint.next_turn_in_s is None:
                continue
            late_s = hint.given_s + max(TOLERANCE_S, LATE_RATIO * hint.next_turn_in_s)
            is_soon = hint.given_s + hint.next_turn_in_s - EARLY_S <= now_s <= late_s
            ratio = self.knowledge.hints.confidence_ratio(program, hint.confidence_ratio)
            if is_soon and ratio >= LEAST_CONFIDENCE_RATIO and book.queue.comes_before_all_waiting(program):
                target, reason = core.placing.find(program, None)
                if target is not None:
                    core.restore(program, target, reason)
                    book.act_anew(program, program.acting_since_s, late_s, hint_keeps=True)
                    self.early_count += 1


class Rig:
    """The engine, and the runtime that leases its turns."""

    def __init__(self, loop: VirtualLoop, kv_tokens: int, hints: str) -> None:
        """Begin at the loop's time, with one replica up."""
        self.loop = loop
        self.hints = hints
        self.engine = Engine(EngineConfig(kv_tokens, timing=profile(PROFILE), max_num_batched_tokens=8192))
        scheduler = EarlyScheduler if hints == "early" else Scheduler
        self.runtime = Runtime(scheduler(load_policy("breakeven", {})), clock=loop.time)
        self.runtime.dispatch(ReplicaPolled(self.runtime.now_s(), "engine", kv_tokens))
        self.runtime.replica_up("engine", kv_tokens)
        self.space = TokenSpace(16)
        self.contexts: dict[tuple[str, str], Context] = {}
        self.cached_tokens = self.prompt_tokens = 0
        self._over: dict[str, asyncio.Future[FinishedRequest]] = {}
        self._began: dict[str, Any] = {}
        self._work = asyncio.Event()

    async def drive(self) -> None:
        """Step the engine while it has work."""
        while True:
            if not self.engine.has_work:
                self._work.clear()
                await self._work.wait()
            result = self.engine.step(self.loop.time())
            await asyncio.sleep(result.duration_s)
            for request_id in result.generated:
                if (lease := self._began.pop(request_id, None)) is not None:
                    lease.started()
            for finished in result.finished:
                self._over.pop(finished.request_id).set_result(finished)

    async def turn(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Take a turn of the current session: its branch's context grows by both."""
        headers = turn_headers()
        program_id, branch_id = headers["X-Program-ID"], headers.get("X-Program-Branch", "")
        context = self.contexts.get((program_id, branch_id))
        if context is None:
            context = self.contexts[program_id, branch_id] = self.space.open(branch_id.partition("/")[0], 800)
        context.append(prompt_tokens)
        turn_id = self.runtime.new_turn_id()
        ask = TurnAsk(turn_id=turn_id, program_id=program_id, branch_id=branch_id, prompt_bytes=4 * len(context))
        with await self.runtime.lease(ask) as lease:
            name = str(turn_id)
            answer = context.following(answer_tokens)
            request = EngineRequest(name, context.tokens(), answer, keys=context.keys_with(answer))
            over = self._over[name] = asyncio.get_running_loop().create_future()
            self._began[name] = lease
            self.engine.submit(request, self.loop.time())
            self._work.set()
            finished = await over
            self.cached_tokens += finished.cached_tokens
            self.prompt_tokens += finished.prompt_tokens
            lease.finished(finished.prompt_tokens, finished.generated_tokens, finished.cached_tokens)
        context.append(answer_tokens)

    def say(self, session: str, said: dict[str, Any]) -> None:
        """Accept a hint as `POST /programs/{id}/hints` does, if its kind is on."""
        if self.hints == "branches" and "branch" not in said:
            return
        hint = TurnHint(said.get("next_turn_in_s"), said.get("confidence", 1.0), said.get("keep", ""))
        self.runtime.hint(session, hint, said.get("branch", ""))


_rig: list[Rig] = []
"""The running rig: agents are constructed without arguments."""


class Turning:
    """An agent whose work is one turn."""

    async def ask(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Take it."""
        await _rig[-1].turn(prompt_tokens, answer_tokens)
        return answer_tokens


class Coding:
    """An agent that works in steps: a turn, then a command in a sandbox whose output the next turn reads."""

    async def ask(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Take four steps, drawn by the size of the answer so that every run has the same steps."""
        rng = random.Random(answer_tokens)
        for _ in range(4):
            await _rig[-1].turn(prompt_tokens, answer_tokens // 2 + 1)
            await stubs.call("sandbox", "run", (rng.lognormvariate(1.2, 1.0),))
        return answer_tokens


class Sandbox:
    """The agent that runs commands."""

    async def run(self, seconds: float) -> float:
        """Take the given time."""
        await asyncio.sleep(seconds)
        return seconds


def agents_of(agents: dict[str, Any], *, has_sandboxes: bool) -> dict[str, Any]:
    """Return a case's agents in the form used here."""
    found = copy.deepcopy(agents)
    for name, each in found.items():
        each["class"] = f"{HERE}:{'Coding' if name == 'developer' else 'Turning'}"
        each["managed"] = name == "analyst" and not each.get("stateful")
        for key in ("min_instances", "max_instances"):
            each[key] *= WORKERS_FACTOR
    if has_sandboxes:
        count = {"min_instances": SANDBOXES_COUNT, "max_instances": SANDBOXES_COUNT}
        found["sandbox"] = {"class": f"{HERE}:Sandbox", "methods": {"run": {"seconds": "float"}}, **count}
    return found


ADAPTIVE = (*DEFAULTS, "srtf")
CHOICES: dict[str, tuple[bool, tuple[str, ...], str]] = {
    "static, sticky, FCFS": (True, (), ""),
    "default and srtf": (False, ADAPTIVE, ""),
    "default and srtf, ended branches": (False, ADAPTIVE, "branches"),
    "default and srtf, hints": (False, ADAPTIVE, "all"),
    "default and srtf, hints, restored early": (False, ADAPTIVE, "early"),
}
"""By name: whether instances are static, the policies, and which hints are sent, or also used early."""
PAIRS = (
    ("default and srtf", "static, sticky, FCFS"),
    ("default and srtf, ended branches", "default and srtf"),
    ("default and srtf, hints", "default and srtf"),
    ("default and srtf, hints", "default and srtf, ended branches"),
    ("default and srtf, hints, restored early", "default and srtf, hints"),
)


def run(case: Case, choice: str, memory: str, seed: int) -> dict[str, Any]:
    """Run one load in virtual time; return latencies in seconds, programs an hour, and the outcome of hints."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_run(case, choice, memory, seed, loop))
    finally:
        loop.close()


async def _run(case: Case, choice: str, memory: str, seed: int, loop: VirtualLoop) -> dict[str, Any]:
    is_static, policies, hints = CHOICES[choice]
    agents = agents_of(case.static if is_static else case.agents, has_sandboxes="developer" in case.agents)
    rig = Rig(loop, MEMORY_TOKENS[memory], hints)
    _rig.append(rig)
    latencies: list[float] = []

    async def one(app: Deployment, number: int) -> None:
        began_s, name = loop.time(), f"s{number}"
        await app.run_async(case.driver, random.Random(seed * 10_000 + number), number / case.count, session=name)
        latencies.append(loop.time() - began_s)
        await app.end_session_async(name)
        rig.runtime.release(name)

    aside = [asyncio.create_task(rig.drive()), asyncio.create_task(rig.runtime.run())]
    options: dict[str, Any] = {"policies": policies, "period_s": 1.0, "clock": loop.time}
    async with deploy(agents, resources={"gpu": case.gpus * WORKERS_FACTOR}, **options) as app:
        if hints:
            app.node.hints = Hints(app.node, rig.say)
        took_s = await all_come(partial(one, app), case.count, case.rates_per_s[0], seed)
    for task in aside:
        task.cancel()
    await asyncio.gather(*aside, return_exceptions=True)
    _rig.pop()
    ordered, record = sorted(latencies), rig.runtime.scheduler.knowledge.hints
    return {
        "mean_s": statistics.mean(ordered),
        "p95_s": ordered[int(len(ordered) * 0.95)],
        "programs_per_h": case.count / took_s * 3600,
        "hit_ratio": rig.cached_tokens / max(1, rig.prompt_tokens),
        "hints": dict(record.taken_counts) | record.outcome_counts,
        "early_count": getattr(rig.runtime.scheduler, "early_count", 0),
    }


def compare(seeds_count: int) -> dict[str, Any]:
    """Run every case under every choice, with short and ample memory; return each seed's figures and pair ratios."""
    found: dict[str, Any] = {}
    for name, rate_per_s in RATES_PER_S.items():
        case = replace(CASES[name], rates_per_s=(rate_per_s,), count=COUNT)
        for memory in MEMORY_TOKENS:
            runs = {choice: [run(case, choice, memory, seed) for seed in range(seeds_count)] for choice in CHOICES}
            pairs = {f"{better} against {base}": ratios(runs[better], runs[base]) for better, base in PAIRS}
            found[f"{name}, memory {memory}"] = {"runs": runs, "ratios": pairs}
            for choice, each in runs.items():
                figures = {key: statistics.mean(one[key] for one in each) for key in each[0] if key != "hints"}
                print(name, memory, choice, {key: round(value, 3) for key, value in figures.items()}, each[0]["hints"])
            for pair, said in pairs.items():
                print("   ", pair, said, flush=True)
    return found


def ratios(runs: list[dict[str, Any]], bases: list[dict[str, Any]]) -> dict[str, str]:
    """Return the ratio of each figure over that of the same seed, with its 95 % interval."""
    found = {}
    for key in ("mean_s", "p95_s", "programs_per_h"):
        interval = Interval.of_ratios([each[key] for each in runs], [each[key] for each in bases])
        found[key] = "" if interval is None else interval.text(3)
    return found
