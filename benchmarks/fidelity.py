"""How far the simulator is from a real engine: the same programs on both, with constants fitted to that very engine.

    scripts/bench fidelity --programs 4,8,16 --policies passthrough,thunderagent --seconds 120

First the engine is calibrated (`thunderagent calibrate`), then each load runs on it under each policy, as
`benchmarks.real` does it, and in the simulator: the same programs, the same tool times, the same policy. Differences
in prefix hits (points) and in turns per minute (per cent) go to the terminal and `benchmarks/results/fidelity.json`.

An engine's speed is known to about a tenth, and where the programs only just fit, a tenth decides whether they thrash.
So each load is simulated on engines a little slower and faster too: the range that they span is the forecast. With
`--calibrations 10` the engine is calibrated ten times, and each load is simulated with each: how far they differ.
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

from benchmarks.ideal import StandardLoad, goodput_figures
from benchmarks.load import LoadSpec
from benchmarks.machine import save_results
from benchmarks.real import (
    Comparison,
    add_comparison_arguments,
    calibration_settings,
    comparison_from,
    engine_model,
    measure,
)
from benchmarks.real_engine import RealEngine, RealEngineConfig
from thunderagent.calibrate.command import picture
from thunderagent.calibrate.measurement import calibrate
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import COSTS_US
from thunderagent.simulator.figures.bounds import Engines
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thunderagent.simulator.engine.timing import TimingProfile

OTHER_COSTS_RATIOS = (0.85, 0.88, 0.91, 0.94, 0.97, 1.03, 1.06, 1.09, 1.12, 1.15)
"""Costs of other engines in a forecast for the same work. From one minute to the next the cores of this machine differ
by 15 %, which is also the largest error of a fitted constant (90th percentile)."""


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
    real_goodput: dict[str, float]
    simulated_goodput: dict[str, float]
    by_calibration: tuple[tuple[float, float], ...] = ()
    """Turns a minute and hit rate as simulated with each calibration; the first is that of `simulated_...`."""

    @property
    def turns_error_ratio(self) -> float:
        """Return the simulator's relative error in turns per minute."""
        return self.simulated_turns_per_min / self.real_turns_per_min - 1

    @property
    def hit_error_ratio(self) -> float:
        """Return how much higher its hit rate is; 0.01 is one point."""
        return self.simulated_hit_ratio - self.real_hit_ratio

    @property
    def turns_beside_ratio(self) -> float:
        """Return by which ratio the engine's turns per minute are outside of the forecast; 0 within."""
        return _beside(self.real_turns_per_min, self.turns_range_per_min) / self.real_turns_per_min

    @property
    def hits_beside_ratio(self) -> float:
        """Return how far its hit rate is outside of the forecast; 0.01 is one point, 0 within."""
        return _beside(self.real_hit_ratio, self.hit_range_ratio)


def _beside(value: float, within: tuple[float, float]) -> float:
    low, high = within
    return max(low - value, value - high, 0.0)


def forecast(spec: LoadSpec, policy: Contestant, engine: EngineConfig, comparison: Comparison) -> list[RunResult]:
    """Return the result of `simulate_load` for this engine, then for slightly slower and faster ones."""
    costs = {name: getattr(engine.timing, name) for name in COSTS_US.values()}
    found = [simulate_load(spec, policy, engine, comparison)]
    for ratio in OTHER_COSTS_RATIOS:
        timing = replace(engine.timing, **{name: cost * ratio for name, cost in costs.items()})
        found.append(simulate_load(spec, policy, replace(engine, timing=timing), comparison))
    return found


def simulate_load(spec: LoadSpec, policy: Contestant, engine: EngineConfig, comparison: Comparison) -> RunResult:
    """Return the simulator's result for the same load."""
    scenario = Scenario(
        engine=engine,
        programs_count=spec.programs,
        horizon_s=comparison.warmup_s + comparison.measure_s,
        warmup_s=comparison.warmup_s,
        seed=spec.seed,
    )
    return policy.run(scenario, StandardLoad(spec))


async def run_pairs(
    comparison: Comparison, engine: RealEngine, timings: Sequence[TimingProfile], console: Console
) -> list[Pair]:
    """Run everything on an engine that is up, and simulate it with each of its calibrations."""
    model, *others = (engine_model(engine.config, timing) for timing in timings)
    engines = Engines.of(model, 1)
    pairs = []
    for seed, programs, policy in comparison.order():
        spec = LoadSpec(programs=programs, seed=seed, stream=comparison.stream)
        run = await measure(comparison, engine, spec, policy, console, engines)
        everything = await asyncio.to_thread(forecast, spec, policy, model, comparison)
        with_others = [await asyncio.to_thread(simulate_load, spec, policy, other, comparison) for other in others]
        all_turns = [each.turns_per_min_count for each in everything]
        all_hits = [each.hit_ratio for each in everything]
        pair = Pair(
            programs,
            str(policy),
            seed,
            real_turns_per_min=float(run.figures["turns_per_min"] or 0.0),
            simulated_turns_per_min=all_turns[0],
            real_hit_ratio=float(run.figures["hit_ratio"] or 0.0),
            simulated_hit_ratio=all_hits[0],
            turns_range_per_min=(min(all_turns), max(all_turns)),
            hit_range_ratio=(min(all_hits), max(all_hits)),
            real_goodput={name: float(run.figures[name] or 0.0) for name in goodput_figures(everything[0].goodputs)},
            simulated_goodput=goodput_figures(everything[0].goodputs),
            by_calibration=tuple((each.turns_per_min_count, each.hit_ratio) for each in (everything[0], *with_others)),
        )
        pairs.append(pair)
        console.print(
            f"{policy}, {programs} programs, seed {seed}: {pair.real_turns_per_min:.1f} turns/min on the engine, "
            f"{all_turns[0]:.1f} simulated ({pair.turns_error_ratio:+.0%}); hits {pair.real_hit_ratio:.1%}, "
            f"{all_hits[0]:.1%} ({pair.hit_error_ratio * 100:+.1f} points); forecast "
            f"{_range(pair.turns_range_per_min)} turns/min, {_range(pair.hit_range_ratio, 100)} %; by calibration "
            f"{', '.join(f'{turns / pair.real_turns_per_min - 1:+.0%}' for turns, _ in pair.by_calibration)}"
        )
    return pairs


def table(pairs: list[Pair]) -> Table:
    """Return a table with one row for each pair."""
    title = "Real engine and simulator: turns/min, prefix hits; turns, programs within 1/2/3 x their ideal time"
    result = Table(title=title, box=box.SIMPLE_HEAD)
    turns_columns = ("real/min", "sim/min", "range", "error")
    goodputs = ("real turns", "sim turns", "real programs", "sim programs")
    for column in ("n", "policy", "seed", *turns_columns, "real hits", "sim hits", "range", "points", *goodputs):
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
            *(
                in_time(goodput[f"goodput_{kind}_ratio_{alpha_ratio:g}"] for alpha_ratio in ALPHA_RATIOS)
                for kind in ("turns", "programs")
                for goodput in (pair.real_goodput, pair.simulated_goodput)
            ),
        )
    return result


def _range(within: tuple[float, float], times: int = 1) -> str:
    return "-".join(f"{bound * times:.0f}" for bound in within)


def results(
    comparison: Comparison, config: RealEngineConfig, timings: Sequence[TimingProfile], pairs: list[Pair]
) -> dict[str, Any]:
    """Return all figures, with their measurement conditions, for a JSON file."""
    errors = [{"turns_error_ratio": pair.turns_error_ratio, "hit_error_ratio": pair.hit_error_ratio} for pair in pairs]
    return {
        "command": shlex.join(["python", "-m", "benchmarks.fidelity", *sys.argv[1:]]),
        "engine": {"version": config.kind.version, **asdict(config)},
        "comparison": {**asdict(comparison), "policies": [str(policy) for policy in comparison.policies]},
        "profiles": [asdict(timing) for timing in timings],
        "pairs": [asdict(pair) | error for pair, error in zip(pairs, errors, strict=True)],
    }


async def measure_all(
    comparison: Comparison, config: RealEngineConfig, budget_s: float, console: Console, calibrations_count: int = 1
) -> tuple[list[TimingProfile], list[Pair]]:
    """Start the engine, calibrate it so often, each in that time, and run all pairs."""
    async with RealEngine(config) as engine:
        timings = []
        for _ in range(calibrations_count):
            calibration = await calibrate(engine.url, calibration_settings(config, budget_s))
            console.print(picture(calibration))
            timings.append(calibration.timing)
        return timings, await run_pairs(comparison, engine, timings, console)


def _arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the simulator with a real vLLM engine.")
    add_comparison_arguments(parser, programs="4,8,16", seconds=120.0, calibration=120.0)
    parser.add_argument("--calibrations", type=int, default=1, help="how often to calibrate (default: %(default)s)")
    parser.add_argument("--name", default="fidelity", help="of the result file")
    return parser.parse_args(argv)


def main() -> None:
    """Run everything and print the table."""
    arguments = _arguments()
    os.sched_setaffinity(0, {0})
    comparison = comparison_from(arguments)
    config = RealEngineConfig(port=arguments.port)
    console = Console()
    console.width = max(console.width, 165)  # what the table takes
    budget_s, count = arguments.calibration_seconds, arguments.calibrations
    timings, pairs = asyncio.run(measure_all(comparison, config, budget_s, console, count))
    save_results(arguments.name, results(comparison, config, timings, pairs))
    console.print(table(pairs))
    console.print(f"written to benchmarks/results/{arguments.name}.json")


if __name__ == "__main__":
    main()
