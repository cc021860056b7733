"""MARS, Fig. 7, 10 and 13, on a real small engine beside the simulator: `scripts/bench mars_small`.

    scripts/bench mars_small --regimes 263k --first-seed 100 --seeds 2
    scripts/bench mars_small --regimes 167k --arms 'mars;fcfs;infercept' --cores 0,1
    scripts/bench mars_small --gpu h200 --regimes 263k --programs 60

A real vLLM on one core stands for the H100: its pool, contexts and prompts have a twentieth of the tokens, so it reads
one in about the time that the H100 needs, in half of the time here. For the H200 only the pool is larger. Answers have
an eighth, since an iteration takes longer here; arrivals and tools take half. What the policies and the plugin have in
tokens or seconds is scaled alike. Programs and their order are those of `mars.py`: each begins when it arrives, at 1.5
times the saturation, and tools share 8 cores. Baselines have vLLM's own scheduler, `mars` has the plugin with the
paper's preset.

The simulator runs the same plans, with iteration times fitted to an engine of this machine (`scripts/bench plugin
--fit`; `--costs`). Saturation is programs a second if all arrive at once, under `infercept`, in the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

from benchmarks.environments import cache_dir
from benchmarks.load import EndSignal, LoadResult, LoadSpec, ProgramPlan, TurnPlan, run_plans
from benchmarks.machine import RESULTS, describe_code, save_results
from benchmarks.mars import MARS, MARS_ON_STOCK, PROFILES, TOOL_CORES_COUNT, Mix, figures_of, mix
from benchmarks.mars_figures import DEFAULT, WITHOUT_CONTROL, WITHOUT_COORDINATOR, WITHOUT_COSCHEDULER
from benchmarks.mlfq import Mlfq
from benchmarks.peer_arms import Setup, engines, plugin_settings, serve_words
from benchmarks.processes import thunderagent
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import TimingProfile, profile
from thunderagent.simulator.figures.figures import nearest_rank
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads import plans

SMALLER: Final = 20
"""Divides tokens of prompts, pool and budget."""
FEWER_ANSWERED: Final = 8
"""Divides tokens of answers."""
FASTER: Final = 2
"""Divides times."""
BLOCK_TOKENS: Final = 32
POOL_TOKENS: Final[Mapping[str, int]] = {
    gpu: (profile(name).kv_tokens or 0) // SMALLER // BLOCK_TOKENS * BLOCK_TOKENS for gpu, name in PROFILES.items()
}
"""Of each GPU's."""
CONTEXT_TOKENS: Final = min(POOL_TOKENS.values()) - 2 * BLOCK_TOKENS
"""The longest that an engine takes."""
BUDGET_TOKENS: Final = 8192 // SMALLER
LOAD: Final = 1.5
"""Times the saturation."""

_LEVELS = f"first_level_tokens={2048 // SMALLER}"
_CORES = f"tool_cpu_count={TOOL_CORES_COUNT}"
_MARS = f"mars:reserve_tokens={256 // SMALLER}"
_ORDER = f"order=mars:order.{_LEVELS}:order.promote_s={30 / FASTER}"
_PRIORITY = f"priority=mars:priority.{_LEVELS}:priority.promote_s={30 / FASTER}:priority.window_s={30 / FASTER}"
_WHOLE = f"{_MARS}:{_CORES}:{_ORDER}:{_PRIORITY}"
HOLD_S: Final = 30 / FASTER
_PAPER: Mapping[str, Any] = {
    "preset": "mars",
    "first_level_tokens": 2048 // SMALLER,
    "promote_s": 30 / FASTER,
    "window_s": 30 / FASTER,
    "starve_s": 120 / FASTER,
}


@dataclass(frozen=True)
class Arm:
    """A policy, and the plugin's settings; without them the engine has vLLM's own scheduler."""

    policy: str
    plugin: Mapping[str, Any] | None = None
    has_priorities: bool = True
    hold_s: float = HOLD_S
    """How long the proxy has a program's blocks held."""


ARMS: Mapping[str, Arm] = {
    MARS: Arm(_WHOLE, _PAPER),
    "fcfs": Arm("passthrough"),
    "infercept": Arm("infercept"),
    "concur": Arm(f"passthrough:admission=concur:admission.interval_s={5 / FASTER}"),
    "continuum": Arm(f"continuum:ttl_s={2 / FASTER}"),
    DEFAULT: Arm("breakeven"),
    WITHOUT_COORDINATOR: Arm(
        f"{_MARS}:{_CORES}:order=fcfs", {**_PAPER, "order": False, "quanta": False}, has_priorities=False
    ),
    WITHOUT_CONTROL: Arm(f"{_MARS}:{_ORDER}:{_PRIORITY}:admission=window:admission.n=1000000", _PAPER),
    WITHOUT_COSCHEDULER: Arm(f"{_WHOLE}:warm_ratio=0", {**_PAPER, "hold_s": 0.0}, hold_s=0.0),
    MARS_ON_STOCK: Arm(_WHOLE),
}


@dataclass(frozen=True)
class Shrunk:
    """Programs of a mix as a small engine can have them; with `at_once` they all come at time 0."""

    inner: Mix
    at_once: bool = False

    @property
    def name(self) -> str:
        """Return the mix's."""
        return f"{self.inner.name}-shrunk"

    def program(self, index: int, seed: int) -> plans.ProgramPlan:
        """Return program number `index`, from 0."""
        plan = self.inner.program(index, seed)
        turns = tuple(
            replace(
                turn,
                new_tokens=max(1, round(turn.new_tokens / SMALLER)),
                output_tokens=max(1, round(turn.output_tokens / FEWER_ANSWERED)),
                tool_s=turn.tool_s / FASTER,
            )
            for turn in plan.turns
        )
        arrival_s = 0.0 if self.at_once else (plan.arrival_s or 0.0)
        return replace(
            plan, turns=turns, arrival_s=arrival_s, shared_prefix_tokens=plan.shared_prefix_tokens // SMALLER
        )


def words_of(plan: plans.ProgramPlan, index: int, seed: int, spec: LoadSpec) -> ProgramPlan:
    """Return the plan of a real program: one word for each token, less the markers that the model's template adds."""
    rng = Random(f"mars/{seed}/{index}/words")

    def words(count: int, rng: Random = rng) -> str:
        return " ".join(f"w{rng.randrange(spec.word_count)}" for _ in range(max(1, count)))

    system = words(plan.shared_prefix_tokens - 1, Random(plan.shared_prefix_id)) if plan.shared_prefix_tokens else ""
    turns = tuple(TurnPlan(words(turn.new_tokens - 2), turn.output_tokens, turn.tool_s) for turn in plan.turns)
    return ProgramPlan(index, f"mars-{seed}-{index}", system, turns, plan.arrival_s or 0.0)


# --- the simulator --------------------------------------------------------------------------------


def scenario_of(costs: Mapping[str, float], seed: int, programs_count: int, pool_tokens: int) -> Scenario:
    """Return the small engine in the simulator, and 8 cores for tools."""
    timing = TimingProfile(
        "fitted",
        costs["base_s"],
        costs["prompt_s"],
        0.0,
        decode_context_token_s=costs["context_s"],
        attention_pair_s=costs["prompt_context_s"],
        kv_tokens=pool_tokens,
    )
    engine = EngineConfig.of(
        timing, block_size=BLOCK_TOKENS, kv_tokens=pool_tokens, max_num_batched_tokens=BUDGET_TOKENS
    )
    return Scenario(
        replace(engine, max_model_len=CONTEXT_TOKENS),
        loop="open",
        programs_count=programs_count,
        horizon_s=1e6,
        seed=seed,
        tools=ToolSettings(cpu_count=TOOL_CORES_COUNT),
        sample_interval_s=600.0,
    )


def saturation_per_s(regime: str, scenario: Scenario) -> float:
    """Return programs a second that end if all arrive at once, under `infercept`."""
    result = Contestant.parse("infercept").run(scenario, Shrunk(mix(regime, 1.0), at_once=True))
    return scenario.programs_count / result.simulated_s


def simulated(arm: Arm, scenario: Scenario, programs: Shrunk) -> dict[str, float]:
    """Return the figures of a run in the simulator, whose engine has the paper's changes where the real one has."""
    engine = scenario.engine
    if arm.plugin is not None and arm.has_priorities:
        engine = replace(engine, scheduling_policy="priority", discipline=partial(Mlfq, SMALLER, FASTER))
    holds = arm.plugin is not None and arm.hold_s > 0
    scenario = replace(scenario, engine=engine, engines_retain=holds)
    contestant = Contestant.parse(arm.policy)
    if arm.has_priorities:
        return figures_of(contestant.run(scenario, programs))
    return figures_of(simulate(scenario, programs, contestant.prepare(scenario, programs)[0]))


# --- the engine -----------------------------------------------------------------------------------


def engine_settings(arm: Arm) -> dict[str, Any]:
    """Return the settings of the arm's engine."""
    settings: dict[str, Any] = plugin_settings() if arm.plugin is not None else {"extra_args": ()}
    if arm.plugin is not None:
        settings["extra_args"] += ("--additional-config", json.dumps({"thunderagent": arm.plugin}))
    if not arm.has_priorities:  # the last one counts
        settings["extra_args"] += ("--scheduling-policy", "fcfs")
    return {**settings, "max_model_len": CONTEXT_TOKENS, "max_batched_tokens": BUDGET_TOKENS}


async def real(arm: Arm, programs: Shrunk, scenario: Scenario, engine_core: int | None) -> dict[str, float]:
    """Return the figures of a run on a fresh engine behind a fresh proxy."""
    setup = Setup("vllm", 1, scenario.engine.kv_tokens, engine_core=engine_core)
    seed = scenario.seed
    spec = LoadSpec(stream=False, end_signal=EndSignal.RELEASE)
    planned = [words_of(programs.program(index, seed), index, seed, spec) for index in range(scenario.programs_count)]
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(engines(setup, **engine_settings(arm)))
        words = [*serve_words(arm.policy, setup, urls), "--engine-hold-s", f"{arm.hold_s:g}"]
        log = cache_dir() / "logs" / f"mars-small-{os.getpid()}.log"
        server = await stack.enter_async_context(thunderagent(*words, log_path=log))
        result = await run_plans(spec, server.url, planned, is_proxy=True, tool_cores_count=TOOL_CORES_COUNT)
        return measured(result, planned)


def measured(result: LoadResult, planned: Sequence[ProgramPlan]) -> dict[str, float]:
    """Return the figures of a real run; a program's time is from its arrival to its last answer."""
    ends_s: dict[int, float] = {}
    for record in result.records:
        ends_s[record.program_index] = max(ends_s.get(record.program_index, 0.0), record.end_s)
    times_s = sorted(ends_s[plan.index] - plan.arrival_s for plan in planned)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in result.records)
    values = {
        "mean_s": fmean(times_s),
        "p50_s": nearest_rank(times_s, 0.5),
        "p90_s": nearest_rank(times_s, 0.9),
        "p95_s": nearest_rank(times_s, 0.95),
        "took_s": result.window_end_s,
        "turns": float(len(result.records)),
        "prompt_tokens": float(prompt_tokens),
        "failed_turns": float(result.failed_turn_count),
        "programs_ended": float(result.finished_program_count),
    }
    return {name: round(value, 4) for name, value in values.items()}


def main() -> None:
    """Do the runs; the stored result is complete after each."""
    parser = argparse.ArgumentParser(description="MARS on a real small engine beside the simulator.")
    add = parser.add_argument
    add("--gpu", choices=POOL_TOKENS, default="h100", help="whose pool (default: %(default)s)")
    add("--regimes", default="263k,167k")
    add("--arms", default=";".join(ARMS), help="a semicolon between (default: %(default)s)")
    add("--programs", type=int, default=30)
    add("--seeds", type=int, default=1)
    add("--first-seed", type=int, default=100)
    add("--costs", default="plugin-costs", help="the result of `scripts/bench plugin --fit`")
    add("--cores", default="1,0", help="of the engine, and of the rest")
    add("--name", default="mars-small", help="of the result file")
    add("--simulate", action="store_true", help="run the simulator alone, and store nothing")
    arguments = parser.parse_args()
    describe_code()  # as it is now: files may change while this runs
    engine_core, own_core = map(int, arguments.cores.split(","))
    os.sched_setaffinity(0, {own_core})
    costs = json.loads((RESULTS / f"{arguments.costs}.json").read_text())["costs"]
    count = arguments.programs
    found: list[dict[str, Any]] = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for regime in arguments.regimes.split(","):
            scenario = scenario_of(costs, seed, count, POOL_TOKENS[arguments.gpu])
            saturation = saturation_per_s(regime, scenario)
            programs = Shrunk(mix(regime, LOAD * saturation))
            for name in arguments.arms.split(";"):
                beside = simulated(ARMS[name], scenario, programs)
                run: dict[str, Any] = {"regime": regime, "arm": name, "seed": seed, "saturation_per_s": saturation}
                said = " ".join(f"{beside[key]:.0f}" for key in ("mean_s", "p90_s", "p95_s"))
                if arguments.simulate:
                    print(f"{regime} {seed} {name}: simulated {said}, hits {beside['hit_ratio']:.2f}", flush=True)
                    continue
                run["real"] = asyncio.run(real(ARMS[name], programs, scenario, engine_core))
                found.append({**run, "simulated": beside})
                told = {"gpu": arguments.gpu, "programs": count, "load": LOAD, "costs": arguments.costs}
                save_results(arguments.name, {**told, "runs": found})
                own = " ".join(f"{run['real'][key]:.0f}" for key in ("mean_s", "p90_s", "p95_s"))
                failed = run["real"]["failed_turns"]
                print(f"{regime} {seed} {name}: {own}; simulated {said}; {failed:.0f} failed", flush=True)


if __name__ == "__main__":
    main()
