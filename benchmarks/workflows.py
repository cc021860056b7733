"""Measure workflows alone: the cost of a call and of waiting, the paper's Table 4 and Fig. 10, and Fig. 9's workflows.

Table 4 and Fig. 10 use the real machines, with 128 controllers in one process and no agents behind them. In the
one-level design every instance that becomes free asks one controller, which updates the policy and answers one request
after another: all 128 ask at once, and the figure is the mean time until the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import structlog
import uvloop

from benchmarks import workflow_turns
from benchmarks.machine import save_results
from benchmarks.workflow_cases import CASES, compare
from thunderagent_workflows import deploy, stubs
from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Maker, Outcome, Rules
from thunderagent_workflows.core.controller import Controller
from thunderagent_workflows.declare import Directives
from thunderagent_workflows.globalloop import GlobalLevel
from thunderagent_workflows.policies import srtf
from thunderagent_workflows.store import MemoryStore
from thunderagent_workflows.view import Act, View, summarize

PAPER_TABLE_4_MS = {
    1024: (1.2, 0.1),
    2048: (2.3, 0.1),
    4096: (2.8, 0.2),
    8192: (3.4, 0.4),
    16384: (3.9, 0.4),
    32768: (19.4, 0.3),
    65536: (32.3, 0.4),
    131072: (72.3, 0.4),
}
PAPER_FIG_10_MS = {131072: 464.0}
CALLS_OF_SESSION, AGENTS_OF_SESSION = 32, 8
AGENT = {"echo": {"class": "benchmarks.workflows:Echo", "methods": {"say": {"text": "Any"}, "hold": {}}}}


class Echo:
    """The cheapest possible agent."""

    async def say(self, text: Any) -> Any:
        """Return the argument."""
        return text

    async def hold(self) -> Any:
        """Never return."""
        await asyncio.Event().wait()


# --- what a call costs


async def _round_trips(count: int) -> list[float]:
    times = []
    for number in range(count):
        began = perf_counter()
        await stubs.call("echo", "say", (number,))
        times.append(perf_counter() - began)
    return times


def _blocking_round_trips(count: int) -> list[float]:
    times = []
    for number in range(count):
        began = perf_counter()
        stubs.call("echo", "say", (number,)).value()
        times.append(perf_counter() - began)
    return times


def call_costs(count: int) -> dict[str, float]:
    """Measure a call and its value: from a coroutine on the loop, and from a plain driver in its thread."""
    with deploy(AGENT) as app:
        app.run(_round_trips, 1000)
        awaited = app.run(_round_trips, count)
        blocking = app.run(_blocking_round_trips, count // 4)
    return {
        "call_awaited_p50_us": statistics.median(awaited) * 1e6,
        "call_awaited_p99_us": percentile(awaited, 0.99) * 1e6,
        "call_blocking_p50_us": statistics.median(blocking) * 1e6,
        "call_blocking_p99_us": percentile(blocking, 0.99) * 1e6,
    }


async def _hold(count: int) -> tuple[float, float, int]:
    await stubs.call("echo", "say", ("warm",))
    gc.collect()
    before_bytes, began = resident_bytes(), perf_counter()
    held = [stubs.call("echo", "hold", ()) for _ in range(count)]
    elapsed_s = perf_counter() - began
    await asyncio.sleep(0)
    gc.collect()
    return elapsed_s, resident_bytes() - before_bytes, len(held)


def pending_costs(count: int) -> dict[str, float]:
    """Measure calls that wait: memory without their arguments, and the time to make one."""
    with deploy(AGENT, policies=()) as app:
        elapsed_s, size_bytes, _ = app.run(_hold, count)
    return {
        "pending_calls": count,
        "pending_mb": size_bytes / 1e6,
        "pending_bytes_each": size_bytes / count,
        "make_us_each": elapsed_s / count * 1e6,
    }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- Table 4 and Fig. 10


def controllers_with(calls_count: int, controllers_count: int, rng: random.Random) -> list[Controller]:
    """Return controllers on which calls wait: sessions of 32 calls, at 8 agents each, in stages 1 to 8."""
    found = [Controller(f"agent{number}/0", Rules()) for number in range(controllers_count)]
    makers = [Maker(f"s{session}", "node-0") for session in range(calls_count // CALLS_OF_SESSION)]
    for session in range(calls_count // CALLS_OF_SESSION):
        at = rng.sample(found, min(AGENTS_OF_SESSION, controllers_count))
        for number in range(CALLS_OF_SESSION):
            controller = at[number % len(at)]
            call_id = session * CALLS_OF_SESSION + number + 1
            stage_count = rng.randrange(1, 9)
            call = Call(call_id, makers[session], controller.agent, "run", stage_count=stage_count)
            controller.handle(m.Submit(call))
    return found


def view_for(controllers: list[Controller]) -> View:
    """Return an empty view of their agents."""
    return View({controller.agent: Directives() for controller in controllers})


def next_run(controller: Controller) -> float:
    """Free an instance; return the time until its next call is on it."""
    running = next(iter(controller.running))
    began = perf_counter()
    controller.handle(m.Finished(running, Outcome()))
    return perf_counter() - began


def two_level_ms(calls_count: int, rng: random.Random) -> float:
    """Return the p50 of one dispatch if each controller decides by its latest update."""
    controllers = controllers_with(calls_count, 128, rng)
    view = view_for(controllers)
    view.merge([summarize(each, "n", (0, 0.0, 0.0)) for each in controllers], 0.0)
    act = Act(view)
    srtf.step(view, act)
    for each in controllers:
        each.handle(m.SetPriorities(act.priorities))
    ready = [each for each in controllers for _ in range(min(6, len(each.queue))) if each.running]
    rng.shuffle(ready)
    return statistics.median([next_run(each) for each in ready]) * 1e3


def one_level_ms(calls_count: int, rng: random.Random, *, looks_at_all: bool) -> float:
    """Return the mean time of one dispatch if all instances ask one controller, which runs the policy each time.

    It `looks_at_all` sessions to find those that changed, or is told, as the two-level design's loop is.
    """
    controllers = [each for each in controllers_with(calls_count, 128, rng) if each.running]
    view = view_for(controllers)
    view.merge([summarize(each, "n", (0, 0.0, 0.0)) for each in controllers], 0.0)
    began, answered = perf_counter(), []
    for each in controllers:
        view.merge([summarize(each, "n", (0, 0.0, 0.0))], 0.0)
        act = Act(view)
        if looks_at_all:
            view.changed = list(view.sessions.values())
        srtf.step(view, act)
        for other in controllers if act.priorities else ():
            other.handle(m.SetPriorities(act.priorities))
        each.handle(m.Finished(next(iter(each.running)), Outcome()))
        answered.append(perf_counter() - began)
    return statistics.mean(answered) * 1e3


async def loop_ms(
    calls_count: int, controllers_count: int, changed_ratio: float, rng: random.Random
) -> dict[str, float]:
    """Measure a turn of the global loop with SRTF after part of the sessions changed, and the controllers' work."""
    controllers = controllers_with(calls_count, controllers_count, rng)
    store = MemoryStore()
    level = GlobalLevel(view_for(controllers), [srtf.step], store, lambda: ["n"], lambda _: None, perf_counter)
    rounds = []
    for turn in range(6):
        for each in controllers:
            if turn:
                sessions = each.queue.sessions()
                each.changed = set(rng.sample(sessions, int(len(sessions) * changed_ratio)))
        if turn and changed_ratio == 1.0:
            for each in controllers:  # so that every priority changes too
                for session in each.changed:
                    for call in each.queue.calls_of(session):
                        call.stage_count += 1
        began = perf_counter()
        await store.publish("n", [summarize(each, "n", (1, 1.0, 0.0)) for each in controllers])
        published = perf_counter()
        await level.step()
        decided = perf_counter()
        for decisions in await store.take("n"):
            for each in controllers:
                each.handle(m.SetPriorities(decisions.priorities))
        applied = perf_counter()
        rounds.append(
            {
                "loop_ms": level.times.total_s * 1e3,
                "merge_ms": level.times.merge_s * 1e3,
                "policies_ms": level.times.policies_s * 1e3,
                "publish_each_ms": (published - began) / controllers_count * 1e3,
                "apply_each_ms": (applied - decided) / controllers_count * 1e3,
            }
        )
    return {name: statistics.median(each[name] for each in rounds[1:]) for name in rounds[0]}


def percentile(values: list[float], ratio: float) -> float:
    """Return the nearest-rank percentile."""
    return sorted(values)[min(len(values) - 1, int(ratio * len(values)))]


def least(runs: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Return the least of each figure over several runs: other work on a shared machine only adds to it."""
    found: dict[Any, Any] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        found[name] = least(values) if isinstance(value, dict) else None if value is None else min(values)
    return found


# --- all of it


def measure_scale() -> dict[str, Any]:
    """Reproduce Table 4 and Fig. 10."""
    table, figure = {}, {}
    for calls_count, (paper_one_ms, paper_two_ms) in PAPER_TABLE_4_MS.items():
        gc.collect()
        table[calls_count] = {
            "one_level_ms": one_level_ms(calls_count, random.Random(1), looks_at_all=True),
            "one_level_told_ms": one_level_ms(calls_count, random.Random(1), looks_at_all=False),
            "two_level_ms": two_level_ms(calls_count, random.Random(1)),
            "paper_one_level_ms": paper_one_ms,
            "paper_two_level_ms": paper_two_ms,
        }
        print(calls_count, {name: round(value, 4) for name, value in table[calls_count].items()})
    for calls_count in (1024, 16384, 131072):
        for controllers_count in (64, 128):
            for changed_ratio in (0.1, 1.0):
                gc.collect()
                found = asyncio.run(loop_ms(calls_count, controllers_count, changed_ratio, random.Random(1)))
                name = f"{calls_count} calls, {controllers_count} controllers, {changed_ratio:.0%} changed"
                figure[name] = found | {"paper_loop_ms": PAPER_FIG_10_MS.get(calls_count)}
                print(name, {key: round(value, 3) for key, value in found.items()})
    return {"table_4": table, "fig_10": figure}


def main() -> None:
    """Measure, print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["calls", "scale", "cases", "turns"], help="one or more of these")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--pending", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="of what is measured by a clock, the least is kept")
    args = parser.parse_args()
    if "calls" in args.parts:
        pending = pending_costs(args.pending)  # once: the next run would reuse the freed memory
        runs = [call_costs(args.calls) for _ in range(args.runs)]
        figures = pending | least(runs)
        for name, value in figures.items():
            print(f"{name:24} {value:.2f}")
        save_results("workflows-calls", {"arguments": vars(args), "figures": figures, "runs": runs})
    if "scale" in args.parts:
        runs = [measure_scale() for _ in range(args.runs)]
        save_results("workflows-scale", {"arguments": vars(args), **least(runs), "runs": runs})
    if "cases" in args.parts:
        results = {name: compare(case, args.seeds) for name, case in CASES.items()}
        save_results("workflows-cases", {"arguments": vars(args), "cases": results})
    if "turns" in args.parts:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        save_results("workflows-turns", {"arguments": vars(args), **workflow_turns.compare(args.seeds)})


if __name__ == "__main__":
    assert uvloop
    main()
