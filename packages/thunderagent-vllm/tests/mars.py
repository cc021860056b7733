"""Runs of the MARS figures on vLLM's real scheduler; run in vLLM's environment by `scripts/bench plugin --figure`.

`python mars.py MODEL RUNS SITE`: RUNS is JSON, SITE the folder of packages that the simulator needs and vLLM has not.
It prints a line of JSON for each run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[3])
sys.path.insert(0, str(Path(__file__).parent))

from simulated import use_vllm

from benchmarks.mars import POLICIES, Point, figures_of, mix, scenario_of
from benchmarks.mars_figures import ABLATIONS, WITHOUT_CONTROL, WITHOUT_COORDINATOR, WITHOUT_COSCHEDULER
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.runs.run import simulate

HOLD_S = 30.0
"""The default of `--engine-hold-s`."""

PAPER: Mapping[str, Any] = {"preset": "mars"}
PLUGIN: Mapping[str, Mapping[str, Any] | None] = {
    "mars": PAPER,
    WITHOUT_CONTROL: PAPER,
    WITHOUT_COORDINATOR: {**PAPER, "order": False, "quanta": False},
    WITHOUT_COSCHEDULER: {**PAPER, "hold_s": 0.0},
    "breakeven+plugin": {},
}
"""The plugin's settings; any other arm has vLLM's own scheduler."""


def run(model: str, point: Point, arm: str, seed: int, programs_count: int) -> dict[str, float]:
    """Return the figures of one run."""
    settings = PLUGIN.get(arm)
    is_held = settings is not None and arm != WITHOUT_COSCHEDULER
    use_vllm(model, None if settings is None else dict(settings), HOLD_S if is_held else None)
    scenario = scenario_of(point, "stock", seed)
    policy = "priority" if arm != WITHOUT_COORDINATOR else "fcfs"
    engine = replace(scenario.engine, scheduling_policy=policy)
    scenario = replace(scenario, engine=engine, programs_count=programs_count, engines_retain=is_held)
    programs = mix(point.regime, point.rate_per_s)
    contestant = Contestant.parse({**POLICIES, **ABLATIONS}.get(arm, arm.partition("+")[0]))
    if arm == WITHOUT_COORDINATOR:  # `Contestant` would give its engine priorities
        result = simulate(scenario, programs, contestant.prepare(scenario, programs)[0])
    else:
        result = contestant.run(scenario, programs)
    return figures_of(result) | {
        "programs_ended": float(result.program_count),
        "failed_turns": float(result.failed_turn_count),
    }


def main() -> None:
    """Do all runs."""
    for regime, gpu, load, arm, seed, programs_count in json.loads(sys.argv[2]):
        figures = run(sys.argv[1], Point(regime, gpu, load), arm, seed, programs_count)
        named = {"regime": regime, "gpu": gpu, "load": load, "arm": arm, "seed": seed, "programs": programs_count}
        print(json.dumps({**named, **figures}), flush=True)


if __name__ == "__main__":
    main()
