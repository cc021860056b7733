"""The scheduler for vLLM beside vLLM's own, on vLLM's real scheduler under a virtual clock: figures without noise.

    scripts/bench plugin                       # 1, 4, 8 and 16 programs, five seeds
    scripts/bench plugin --programs 8 --seeds 2
    scripts/bench plugin --programs 16,32 --arms proxy,both,both-high

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

ARMS = {
    "stock": {},
    "plugin": {"plugin": {}},
    "told": {"plugin": {}, "told": True},
    "mars": {"plugin": {"preset": "mars"}},
    "proxy": {"proxy": {}},
    "both": {"proxy": {}, "plugin": {}},
    "both-high": {"proxy": {"high_ratio": 1.1}, "plugin": {}},
    "proxy-high": {"proxy": {"high_ratio": 1.1}},
    "proxy-115": {"proxy": {"told_ratio": 1.15}},
    "both-115": {"proxy": {"told_ratio": 1.15}, "plugin": {}},
    "proxy-strangers": {"proxy": {}, "strangers_s": 4.0},
    "both-strangers": {"proxy": {}, "plugin": {}, "strangers_s": 4.0},
}
"""`told`: the agents' ends are told to the engine. `proxy`: this proxy's scheduler is in front; `both`: and the plugin.

`high`: it pauses above 1.1 of the memory. `115`: the engine tells 15 % more memory than it has. `strangers`: others
send it a turn every 4 s.
"""

SCRIPT = """
import json, sys
from front import run_arm
model, programs, seeds, arms = sys.argv[1], *map(json.loads, sys.argv[2:])
for seed in range(seeds):
    for count in programs:
        for name, arm in arms.items():
            figures = run_arm(model, arm, count, seed)
            print(json.dumps({"programs": count, "seed": seed, "arm": name, **figures}), flush=True)
"""


def in_vllm(model: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the script in vLLM's environment."""
    kind = KINDS["vllm"]
    paths = os.pathsep.join(map(str, (TESTS, Path(__file__).parents[1])))
    variables = {**os.environ, **kind.variables, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [str(kind.ensure_environment()), "-c", SCRIPT, str(model), *arguments]
    done = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env={**variables, "HF_HUB_OFFLINE": "1"}
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Run the pairs and print a table."""
    parser = argparse.ArgumentParser(description="The scheduler for vLLM beside vLLM's own.")
    parser.add_argument("--programs", default="1,4,8,16")
    parser.add_argument("--arms", default="stock,plugin,told,mars", help=f"of {', '.join(ARMS)}; the first is the base")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write every run here, as JSON")
    arguments = parser.parse_args()
    counts = [int(each) for each in arguments.programs.split(",")]
    model = ensure_model(256, 4, max_model_len=8192)
    names = arguments.arms.split(",")
    arms = {name: ARMS[name] for name in names}
    runs = in_vllm(model, json.dumps(counts), str(arguments.seeds), json.dumps(arms))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(runs, indent=1) + "\n")
    heads = ("programs", "arm", "turns/min", "ratio", "least", "hits", "p99 s", "program s")
    print("{:>8} {:>15} {:>9} {:>6} {:>6} {:>5} {:>6} {:>9}".format(*heads))
    for count in counts:
        by_arm: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run["programs"] == count:
                by_arm.setdefault(run["arm"], []).append(run)
        for arm, found in by_arm.items():
            pairs = zip(found, by_arm[names[0]], strict=True)
            ratios = [ours["turns_per_minute"] / base["turns_per_minute"] for ours, base in pairs]
            means = [fmean(each[name] for each in found) for name in ("hit_ratio", "turn_p99_s", "program_mean_s")]
            turns = fmean(each["turns_per_minute"] for each in found)
            print(
                f"{count:8} {arm:>15} {turns:9.1f} {fmean(ratios):6.2f} {min(ratios):6.2f} "
                f"{means[0]:5.2f} {means[1]:6.1f} {means[2]:9.1f}"
            )


if __name__ == "__main__":
    main()
