"""The scheduler for vLLM beside vLLM's own, on vLLM's real scheduler under a virtual clock: figures without noise.

    scripts/bench plugin                       # 1, 4, 8 and 16 programs, five seeds
    scripts/bench plugin --programs 8 --seeds 2

Each pair runs the same load, by seed, in the same process. The package's `tests/harness.py` says what a step takes. The
model never runs, so nothing depends on the machine, except the cost of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine_kinds import KINDS
from benchmarks.real_engine import ensure_model

TESTS = Path(__file__).parents[1] / "packages" / "thunderagent-vllm" / "tests"

SCRIPT = """
import json, sys
from harness import Engine, run_load
model, programs, seeds = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
for seed in range(seeds):
    for count in programs:
        for name, settings in (("stock", None), ("plugin", {}), ("told", {"told": True}), ("mars", {"preset": "mars"})):
            figures = run_load(Engine(model, settings), count, seed)
            print(json.dumps({"programs": count, "seed": seed, "arm": name, **figures}), flush=True)
"""
"""`told`: the agents' ends are told to the engine, as a proxy does."""


def in_vllm(model: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the script in vLLM's environment."""
    kind = KINDS["vllm"]
    variables = {**os.environ, **kind.variables, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [str(kind.ensure_environment()), "-c", SCRIPT, str(model), *arguments]
    done = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env={**variables, "HF_HUB_OFFLINE": "1"}
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Run the pairs and print a table."""
    parser = argparse.ArgumentParser(description="The scheduler for vLLM beside vLLM's own.")
    parser.add_argument("--programs", default="1,4,8,16")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write every run here, as JSON")
    arguments = parser.parse_args()
    counts = [int(each) for each in arguments.programs.split(",")]
    model = ensure_model(256, 4, max_model_len=8192)
    runs = in_vllm(model, json.dumps(counts), str(arguments.seeds))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(runs, indent=1) + "\n")
    heads = ("programs", "arm", "turns/min", "ratio", "least", "hits", "p99 s", "program s")
    print("{:>8} {:>7} {:>9} {:>6} {:>6} {:>5} {:>6} {:>9}".format(*heads))
    for count in counts:
        by_arm: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run["programs"] == count:
                by_arm.setdefault(run["arm"], []).append(run)
        for arm, found in by_arm.items():
            pairs = zip(found, by_arm["stock"], strict=True)
            ratios = [ours["turns_per_minute"] / stock["turns_per_minute"] for ours, stock in pairs]
            means = [fmean(each[name] for each in found) for name in ("hit_ratio", "turn_p99_s", "program_mean_s")]
            turns = fmean(each["turns_per_minute"] for each in found)
            print(
                f"{count:8} {arm:>7} {turns:9.1f} {fmean(ratios):6.2f} {min(ratios):6.2f} "
                f"{means[0]:5.2f} {means[1]:6.1f} {means[2]:9.1f}"
            )


if __name__ == "__main__":
    main()
