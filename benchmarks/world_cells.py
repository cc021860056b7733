"""The cells of `scripts/bench policy world`: loads that strangers brought, on engines that tell much, or nothing.

| Cells | Load | Engines |
|---|---|---|
| h1 | 24 programs, long prompts, short answers; tools of 2 s | one as Dynamo's mocker: cheap prefill, nothing is told |
| h2 | the standard load, 16 programs | the same with 16,000 tokens |
| h3 | a first try: short programs, all at once | two as `thunderagent serve` brings, 16,000 tokens each |
| h5 | as h1 | two, of one of which nobody knows how much it holds |
| real | the standard load | as the real vLLM of `scripts/bench real` |
| cold | the same, 16 programs in their first two minutes | the same |
| uneven | middle-sized programs that fit, or are twice too many | two: one is smaller, slower, or both |
| grid | middle-sized programs at 0.5 to 4 times the memory | cheap or dear prefill; 1, 2 or 4 replicas |
| recorded | recorded programs | middle-sized |

In a name, `whole` is for clients that do not stream, and `streamed` for those that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.policy import AWAY_LIMIT_S, RealLoad, faster, mean_context_tokens, programs_at, real_timing
from benchmarks.real import engine_model
from benchmarks.real_engine import RealEngineConfig
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import (
    AgentWorkload,
    Clipped,
    Constant,
    Distribution,
    Exponential,
    LogNormal,
    Uniform,
)
from thunderagent.simulator.workloads.formats import load_recorded
from thunderagent.simulator.workloads.plans import Workload
from thunderagent.simulator.workloads.traces import Limits, TraceWorkload

LONGEST_BATCH_S = 1800.0
REQUEST_OVERHEAD_S = 0.002
"""Until a granted turn reaches its engine, where the engine's times do not say: a vLLM took 2.5 to 14.8 ms
(`fidelity.json`). However short: when a turn ends, the engine has begun its next iteration before another one comes.
"""


@dataclass(frozen=True)
class Cell:
    """A load on engines; `of_seed` makes the workload, if that depends on the seed."""

    name: str
    scenario: Scenario
    of_seed: Callable[[int], Workload]

    def programs(self, seed: int) -> Workload:
        """Return the workload of a seed."""
        return self.of_seed(seed)


def agents(
    name: str,
    *,
    turns: tuple[int, int],
    first: tuple[int, int],
    new: tuple[int, int],
    output: tuple[int, int],
    tool: Distribution,
    shared: int = 0,
) -> AgentWorkload:
    """Return programs of so many turns, with these tokens and tools; `shared` tokens come before all of them."""
    return AgentWorkload(
        name, "", Uniform(*turns), Uniform(*first), Uniform(*new), Uniform(*output), tool, shared_prefix_tokens=shared
    )


H1_LOAD = agents("h1", turns=(6, 12), first=(4000, 12000), new=(1000, 2000), output=(16, 48), tool=Exponential(2.0))
STANDARD = agents(
    "standard", turns=(6, 12), first=(400, 800), new=(150, 450), output=(24, 64), tool=Exponential(1.0), shared=200
)
LONG_TOOLS = Clipped(LogNormal(4.0, 1.2), 0.1, 120.0)
"""Mean some 8 s."""


def first_try(turns_count: int, tool_s: float) -> AgentWorkload:
    """Return a stranger's first programs, as `scripts/bench peers` runs them: a system prompt comes before all."""
    turns = (turns_count, turns_count)
    shape: dict[str, Any] = {"first": (700, 700), "new": (150, 450), "output": (24, 64), "shared": 200}
    return agents(f"first-try-{turns_count}", turns=turns, tool=Constant(tool_s), **shape)


def middle(tool: Distribution, name: str) -> AgentWorkload:
    """Return programs of middle size: 2,600 to 8,500 tokens at their ends."""
    return agents(f"middle-{name}", turns=(5, 9), first=(800, 2400), new=(200, 700), output=(24, 96), tool=tool)


def mocker(kv_tokens: int = 131_072) -> EngineConfig:
    """Return an engine as Dynamo's mocker."""
    return EngineConfig.of(profile("mocker"), kv_tokens=kv_tokens)


def embedded(kv_tokens: int = 16_000) -> EngineConfig:
    """Return an engine as `thunderagent serve` brings it."""
    return EngineConfig.of(profile("demo"), kv_tokens=kv_tokens)


TELLS_NOTHING: dict[str, Any] = {"engine_tells_counters": False, "bytes_per_token": 5.5}
"""No metrics: an operator gave the capacity. Answers say what was cached. Prompts are of numbered words."""


def _tells_work(engine: EngineConfig) -> bool:
    """Return whether such an engine counts what its iterations compute: all but the mocker."""
    return engine.timing.name != "mocker"


def _behind_proxy(engine: EngineConfig) -> EngineConfig:
    """Return the engine as a proxy has it: turns take time to reach it."""
    overhead_s = engine.timing.request_overhead_s or REQUEST_OVERHEAD_S
    return replace(engine, timing=replace(engine.timing, request_overhead_s=overhead_s))


def _closed(engine: EngineConfig, count: int, seconds: float, **changes: Any) -> Scenario:
    changes = {"engine_tells_work": _tells_work(engine), **changes}
    return Scenario(
        engine=_behind_proxy(engine), programs_count=count, horizon_s=seconds + 60.0, warmup_s=60.0, **changes
    )


def _batch(engine: EngineConfig, count: int, **changes: Any) -> Scenario:
    changes = {"replica_count": 2, "engine_tells_work": _tells_work(engine), **changes}
    return Scenario(
        engine=_behind_proxy(engine), loop="batch", programs_count=count, horizon_s=LONGEST_BATCH_S, **changes
    )


def uneven() -> Iterator[tuple[str, Scenario, Workload]]:
    """Yield names, scenarios and programs of the cells with two replicas that differ."""
    large, small_tokens, programs = embedded(65_536), 16_384, middle(Exponential(1.0), "short")
    slow = replace(large, timing=faster(large.timing, 1 / 3))
    context_tokens = mean_context_tokens(programs, large)
    for what, last in (
        ("memory", replace(large, kv_tokens=small_tokens)),
        ("speed", slow),
        ("both", replace(slow, kv_tokens=small_tokens)),
    ):
        for name, load in (("fits", 0.4), ("full", 2.0)):
            count = programs_at(load, large.capacity_tokens + last.capacity_tokens, context_tokens)
            scenario = _closed(large, count, 240.0, replica_count=2, last_engine=last, answers_whole=True)
            yield f"uneven-{what}-{name}-whole", scenario, programs


@cache
def cells(traces: Path | None = None) -> tuple[Cell, ...]:
    """Return all cells; `traces` are recorded programs for one more."""
    found: list[Cell] = []

    def add(name: str, scenario: Scenario, programs: Workload | Callable[[int], Workload]) -> None:
        found.append(Cell(name, scenario, programs if callable(programs) else lambda _: programs))

    def both(name: str, scenario: Scenario, programs: Workload | Callable[[int], Workload]) -> None:
        add(f"{name}-whole", replace(scenario, answers_whole=True), programs)
        add(f"{name}-streamed", scenario, programs)

    h1 = _closed(mocker(), 24, 240.0, **TELLS_NOTHING)
    both("h1", h1, H1_LOAD)
    both("h1-told-x2", replace(h1, told_capacity_ratio=2.0), H1_LOAD)
    both("h1-told-x0.5", replace(h1, told_capacity_ratio=0.5), H1_LOAD)
    add("h1-unknown-whole", replace(h1, unknown_replica_count=1, answers_whole=True), H1_LOAD)
    add("h1-no-usage-whole", replace(h1, engine_tells_cached=False, answers_whole=True), H1_LOAD)
    add("h1-12-whole", replace(h1, programs_count=12, answers_whole=True), H1_LOAD)
    both("h2", _closed(mocker(16_000), 16, 180.0, **TELLS_NOTHING), STANDARD)
    for answers, whole in (("streamed", False), ("whole", True)):
        kinds: dict[str, Any] = {"answers_whole": whole}
        add(f"h3-40x5-released-{answers}", _batch(embedded(), 40, **kinds), first_try(5, 5.0))
        kinds["release_ratio"] = 0.0
        add(f"h3-40x1-silent-{answers}", _batch(embedded(), 40, **kinds), first_try(1, 1.0))
        add(f"h3-60x3-silent-{answers}", _batch(embedded(), 60, **kinds), first_try(3, 1.0))
        del kinds["release_ratio"]
        add(f"h3-30x8-released-{answers}", _batch(embedded(), 30, **kinds), first_try(8, 2.0))
    both("h5", replace(h1, replica_count=2, unknown_replica_count=1, programs_count=48, horizon_s=240.0), H1_LOAD)
    add(
        "h5-few-whole",
        replace(h1, replica_count=2, unknown_replica_count=1, programs_count=16, answers_whole=True),
        H1_LOAD,
    )
    for count in (16, 4):
        both(f"real-{count}", _closed(real_engine(), count, 600.0), real_load(count))
    both("cold", replace(_closed(real_engine(), 16, 90.0), horizon_s=110.0, warmup_s=20.0), real_load(16))
    for price, engine in (("cheap", mocker(32_768)), ("dear", replace(embedded(32_768), block_size=32))):
        for tools, tool in (("short", Exponential(1.0)), ("long", LONG_TOOLS)):
            programs = middle(tool, tools)
            context_tokens = mean_context_tokens(programs, engine)
            for replicas_count in (1, 2, 4):
                for load in (0.5, 1.0, 2.0, 4.0) if replicas_count == 1 else (2.0,):
                    count = programs_at(load, replicas_count * engine.capacity_tokens, context_tokens)
                    scenario = _closed(engine, count, 240.0, replica_count=replicas_count)
                    name = f"grid-{price}-{tools}-{replicas_count}x{load:g}"
                    if replicas_count == 1 and load >= 1:
                        both(name, scenario, programs)
                    else:
                        add(f"{name}-whole", replace(scenario, answers_whole=True), programs)
            silent = _closed(engine, programs_at(2.0, engine.capacity_tokens, context_tokens), 240.0, release_ratio=0.0)
            add(f"grid-{price}-{tools}-silent-whole", replace(silent, answers_whole=True), programs)
    for each in uneven():
        add(*each)
    if traces is not None:
        engine = replace(mocker(262_144), block_size=64)
        trace = load_recorded(traces, Limits(context_tokens=engine.context_limit_tokens, away_s=AWAY_LIMIT_S))
        both("recorded", _closed(engine, 8, 5400.0), TraceWorkload("recorded", trace, in_order_of_arrival=False))
    return tuple(found)


def real_engine() -> EngineConfig:
    """Return the model of the real vLLM of `scripts/bench real`."""
    return engine_model(RealEngineConfig(), real_timing())


def real_load(count: int) -> Callable[[int], Workload]:
    """Return the programs of `scripts/bench real`."""
    return lambda _: RealLoad(count)
