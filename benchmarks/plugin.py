"""The scheduler for vLLM beside vLLM's own, on vLLM's real scheduler under a virtual clock: figures without noise.

    scripts/bench plugin                                     # 1, 4, 8 and 16 programs, five seeds
    scripts/bench plugin --programs 8 --seeds 2
    scripts/bench plugin --programs 16,32 --arms proxy,both,both-high
    scripts/bench plugin --claims --first-seed 100           # all that is claimed, beside its bars
    scripts/bench plugin --claims plugin --first-seed 100    # of one arm
    scripts/bench plugin --steps                             # what a step of the scheduler costs
    scripts/bench plugin --fit                               # the costs of the virtual clock, from a real engine
    scripts/bench plugin --figure mars --seeds 1             # MARS, Fig. 7 and 10, on vLLM's scheduler
    scripts/bench plugin --figure mars-default --seeds 1     # the default policy beside it, on vLLM's own scheduler
    scripts/bench plugin --figure mars-ablations --seeds 1   # Fig. 13

Each pair runs the same load, by seed, in the same process. The package's `tests/harness.py` says what an iteration
takes, fitted to a real engine's. The model never runs, so nothing depends on the machine, except the cost of a step. A
claim is judged by the bad end of the 95 % interval of its ratios, in pairs; choose settings on other seeds than those
that are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sysconfig
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engine_kinds import KINDS
from benchmarks.load import EndSignal, LoadSpec, run_load
from benchmarks.machine import describe_code, save_results
from benchmarks.mars import MARS, MARS_ON_STOCK, REGIMES
from benchmarks.mars_figures import DEFAULT, WITHOUT_CONTROL, WITHOUT_COORDINATOR, WITHOUT_COSCHEDULER, Task, run_one
from benchmarks.peer_arms import Setup, engines, plugin_settings
from benchmarks.real_engine import ensure_model
from thunderagent.simulator.figures.intervals import geometric

TESTS = Path(__file__).parents[1] / "packages" / "thunderagent-vllm" / "tests"

ARMS: Mapping[str, Mapping[str, Any]] = {
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
    "proxy-mars": {"proxy": {"policy": "mars"}},
    "both-mars": {"proxy": {"policy": "mars"}, "plugin": {"preset": "mars"}},
    "proxy-believes": {"proxy": {"policy": "thunderagent", "told_ratio": 1.15}},
    "both-believes": {"proxy": {"policy": "thunderagent", "told_ratio": 1.15}, "plugin": {}},
    **{f"cap-{n}": {"proxy": {"policy": "cap", "n": n}} for n in (5, 6, 7)},
    "both-cap": {"proxy": {"policy": "cap", "n": 6}, "plugin": {}},
    "cap-strangers": {"proxy": {"policy": "cap", "n": 6}, "strangers_s": 4.0},
    "both-cap-strangers": {"proxy": {"policy": "cap", "n": 6}, "plugin": {}, "strangers_s": 4.0},
}
"""`told`: the agents' ends are told to the engine. `proxy`: this proxy's scheduler is in front; `both`: and the plugin.

`high`: it pauses above 1.1 of the memory. `115`: the engine tells 15 % more memory than it has. `strangers`: others
send it a turn every 4 s. `mars`: the policy of that name, and the plugin's preset. `believes`: as
`115`, with a policy that does not correct what it is told. `cap`: a fixed number of programs at a time, each to its
end; 6 is the best here.
"""


@dataclass(frozen=True)
class Claim:
    """At each of these numbers of programs, a figure of an arm over that of its base, by the bad end."""

    arm: str
    base: str
    counts: tuple[int, ...]
    bar: float
    figure: str = "turns_per_minute"
    is_most: bool = False
    """Whether the ratio is at most the bar."""

    def ratios(self, runs: Sequence[Mapping[str, Any]], count: int) -> list[float]:
        """Return arm over base, seed by seed."""
        by: dict[str, dict[int, float]] = {self.arm: {}, self.base: {}}
        for run in runs:
            if run["programs"] == count and run["arm"] in by:
                by[run["arm"]][run["seed"]] = run[self.figure]
        seeds = sorted(by[self.arm].keys() & by[self.base].keys())
        return [by[self.arm][seed] / by[self.base][seed] for seed in seeds]

    def found(self, runs: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any] | None:
        """Return the mean, its interval, the worst seed, and whether the bad end reaches the bar; None without runs."""
        ratios = self.ratios(runs, count)
        if not ratios:
            return None
        mean, low, high = geometric(ratios)
        is_reached = high <= self.bar if self.is_most else low >= self.bar
        named = {"arm": self.arm, "base": self.base, "programs": count, "figure": self.figure}
        worst = max(ratios) if self.is_most else min(ratios)
        numbers = {"mean": mean, "low": low, "high": high, "worst": worst}
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        bar = f"{'<=' if self.is_most else '>='} {self.bar:.3g}"
        return {**named, **rounded, "seeds": len(ratios), "bar": bar, "reached": is_reached}


CLAIMS = (
    Claim("plugin", "stock", (8, 16, 32), 1.5),
    Claim("plugin", "stock", (1, 2, 4), 0.98),
    Claim("plugin", "stock", (1, 2, 4, 8, 16, 32), 1.5, "turn_p99_s", is_most=True),
    Claim("both", "proxy", (16, 32), 0.98),
    Claim("both-cap", "cap-6", (16, 32), 0.98),
    Claim("both-115", "proxy-115", (16, 32), 1.2),
    Claim("both-believes", "proxy-believes", (16, 32), 1.2),
    Claim("both-strangers", "proxy-strangers", (16, 32), 1.05),
    Claim("both-cap-strangers", "cap-strangers", (16, 32), 1.05),
    Claim("both-cap", "proxy", (16, 32), 1.05),
    Claim("both-high", "proxy", (16, 32), 1.05),
    Claim("both-high", "proxy", (16, 32), 1 / 1.15, "program_mean_s", is_most=True),
)

SCRIPT = """
import json, sys
from front import run_arm
model, jobs = sys.argv[1], json.loads(sys.argv[2])
for seed, count, name, arm in jobs:
    figures = run_arm(model, arm, count, seed)
    print(json.dumps({"programs": count, "seed": seed, "arm": name, **figures}), flush=True)
"""

Job = tuple[int, int, str, Mapping[str, Any]]
"""Seed, programs, arm, and what it has."""


def in_vllm(script: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Run a script in vLLM's environment; yield each line of JSON as it comes. Raises CalledProcessError."""
    kind = KINDS["vllm"]
    python = os.environ.get("THUNDERAGENT_VLLM_PYTHON") or str(kind.ensure_environment())
    paths = [str(TESTS), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("THUNDERAGENT_VLLM_PATH")])]
    offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    variables = {**os.environ, **kind.variables, **offline, "PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-c", script, *arguments]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[:1])


def running(name: str) -> str:
    """Return a script that runs a file of the package's tests."""
    return f"import runpy; runpy.run_path({str(TESTS / name)!r}, run_name='__main__')"


def do_jobs(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Do the runs; yield each as it ends."""
    model = ensure_model(256, 4, max_model_len=8192)
    return in_vllm(SCRIPT, str(model), json.dumps(jobs))


def check_claims(claims: Sequence[Claim], seeds: range, name: str) -> None:
    """Run what the claims compare, and print what was found; the stored result is complete after each run."""
    describe_code()  # as it is now: files may change while this runs
    wanted = {(count, arm) for claim in claims for count in claim.counts for arm in (claim.arm, claim.base)}
    jobs: list[Job] = [(seed, count, arm, ARMS[arm]) for seed in seeds for count, arm in sorted(wanted)]
    runs: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for run in do_jobs(jobs):
        runs.append(run)
        print(f"{run['arm']:>15} {run['programs']:3} seed {run['seed']}: {run['turns_per_minute']:.1f}", flush=True)
        found = [each for claim in claims for count in claim.counts if (each := claim.found(runs, count))]
        save_results(name, {"seeds": list(seeds), "claims": found, "runs": runs})
    for each in found:
        verdict = "reached" if each["reached"] else "MISSED"
        print(
            f"{each['arm']:>15} / {each['base']:<15} {each['programs']:3} {each['figure']:<16} {each['mean']:.2f} "
            f"({each['low']:.2f}, {each['high']:.2f}) worst {each['worst']:.2f} {each['bar']}: {verdict}"
        )


def measure_steps(name: str) -> None:
    """Measure what a step costs beside vLLM's own scheduler, and store it: a figure of this machine."""
    describe_code()
    script = running("in_vllm.py")
    (check,) = in_vllm(script, str(ensure_model(256, 4, max_model_len=8192)), "step_cost")
    for load, each in check["found"].items():
        print(f"{load:>10} {each['ratio']:.3f} ({each['low']:.3f}, {each['high']:.3f}), stock {each['stock_us']} us")
    save_results(name, {"running": 64, "loads": check["found"]})


async def _steps_of(mode: str, file: Path, seconds: float, engine_core: int) -> None:
    """Run the standard load on a real engine that writes its iterations."""
    settings = plugin_settings()
    settings["extra_args"] = (
        *("--scheduler-cls", "steps.Scheduler"),
        *("--additional-config", json.dumps({"thunderagent": {"mode": mode}})),
    )
    variables = dict(settings["extra_variables"])
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), variables["PYTHONPATH"]])
    settings["extra_variables"] = (*variables.items(), ("STEPS_FILE", str(file)))
    spec = LoadSpec(programs=16, stream=False, program_header="X-Session-ID", end_signal=EndSignal.NONE)
    async with engines(Setup("vllm", 1, 16_000, engine_core=engine_core), **settings) as urls:
        await run_load(spec, urls[0], is_proxy=False, warmup_s=0.0, measure_s=seconds)


def fit_costs(seconds: float, name: str, engine_core: int, own_core: int) -> None:
    """Fit the harness's costs to iterations of a real engine in two runs, one with the plugin, and store them."""
    describe_code()
    os.sched_setaffinity(0, {own_core})
    with TemporaryDirectory() as folder:
        files = [Path(folder) / mode for mode in ("off", "on")]
        for file in files:
            asyncio.run(_steps_of(file.name, file, seconds, engine_core))
        script = running("steps.py")
        (found,) = in_vllm(script, *map(str, files))
    print(json.dumps(found, indent=1))
    save_results(name, {"seconds": seconds, **found})


# --- MARS -----------------------------------------------------------------------------------------

MARS_LOAD = 1.5
"""Times the saturation."""

BASELINES = ("fcfs", "infercept", "concur", "continuum")

MarsRun = tuple[str, str, float, str, int, int]
"""Regime, GPU, load, arm, seed, programs."""


FIGURES: Mapping[str, Sequence[tuple[str, str]]] = {
    "mars": [(gpu, arm) for gpu in ("h100", "h200") for arm in (MARS, *BASELINES)],
    "mars-default": [(gpu, DEFAULT) for gpu in ("h100", "h200")],
    "mars-ablations": [
        ("h100", arm) for arm in (WITHOUT_COORDINATOR, WITHOUT_CONTROL, WITHOUT_COSCHEDULER, MARS_ON_STOCK)
    ],
}
"""GPU and arm: Fig. 7 and 10, the default beside them; and Fig. 13, whose base is `mars` of the first."""


def mars_runs(figure: str, seeds: range, programs_count: int, only: Container[str] | None = None) -> list[MarsRun]:
    """Return the runs of a figure, or `only` those of some, each as GPU:ARM."""
    return [
        (regime, gpu, MARS_LOAD, arm, seed, programs_count)
        for seed in seeds
        for gpu, arm in FIGURES[figure]
        if only is None or f"{gpu}:{arm}" in only
        for regime in reversed(REGIMES)
    ]


def simulated(run: MarsRun) -> dict[str, float]:
    """Return the figures of the same run in the simulator, whose engine has the paper's changes for `mars`."""
    regime, gpu, load, arm, seed, programs_count = run
    return run_one(Task("fig13", regime, gpu, load, arm, seed, programs_count), lambda: None)


def make_mars(figure: str, seeds: range, programs_count: int, name: str, only: Container[str] | None) -> None:
    """Do the runs on vLLM's scheduler and in the simulator; the stored result is complete after each."""
    describe_code()
    runs = mars_runs(figure, seeds, programs_count, only)
    model = ensure_model(256, 4, max_model_len=8192)
    site = sysconfig.get_path("purelib")
    script = running("mars.py")
    found = []
    for run, figures in zip(runs, in_vllm(script, str(model), json.dumps(runs), site), strict=True):
        found.append({"vllm": figures, "simulated": simulated(run)})
        beside = found[-1]["simulated"]
        print(
            f"{' '.join(map(str, run[:5])):44} mean {figures['mean_s']:.0f} P90 {figures['p90_s']:.0f} "
            f"P95 {figures['p95_s']:.0f} hits {figures['hit_ratio']:.2f}; simulated {beside['mean_s']:.0f} "
            f"{beside['p90_s']:.0f} {beside['p95_s']:.0f} {beside['hit_ratio']:.2f}",
            flush=True,
        )
        save_results(name, {"seeds": list(seeds), "programs_count": programs_count, "runs": found})


def print_table(runs: Sequence[Mapping[str, Any]], counts: Sequence[int], base: str) -> None:
    """Print a row for each number of programs and arm."""
    heads = ("programs", "arm", "turns/min", "ratio", "least", "hits", "p99 s", "program s")
    print("{:>8} {:>15} {:>9} {:>6} {:>6} {:>5} {:>6} {:>9}".format(*heads))
    for count in counts:
        by_arm: dict[str, list[Mapping[str, Any]]] = {}
        for run in runs:
            if run["programs"] == count:
                by_arm.setdefault(run["arm"], []).append(run)
        for arm, found in by_arm.items():
            pairs = zip(found, by_arm[base], strict=True)
            ratios = [ours["turns_per_minute"] / theirs["turns_per_minute"] for ours, theirs in pairs]
            means = [fmean(each[name] for each in found) for name in ("hit_ratio", "turn_p99_s", "program_mean_s")]
            turns = fmean(each["turns_per_minute"] for each in found)
            print(
                f"{count:8} {arm:>15} {turns:9.1f} {fmean(ratios):6.2f} {min(ratios):6.2f} "
                f"{means[0]:5.2f} {means[1]:6.1f} {means[2]:9.1f}"
            )


def main() -> None:
    """Run the pairs and print a table."""
    parser = argparse.ArgumentParser(description="The scheduler for vLLM beside vLLM's own.")
    add = parser.add_argument
    add("--programs", default="1,4,8,16")
    add("--arms", default="stock,plugin,told,mars", help=f"of {', '.join(ARMS)}; the first is the base")
    add("--seeds", type=int, default=5)
    add("--first-seed", type=int, default=0)
    add("--settings", type=json.loads, default={}, help="JSON: settings of the plugin in each arm that has it")
    add("--claims", nargs="?", const="", metavar="ARMS", help="check the claims of these arms, or all; stores results")
    add("--steps", action="store_true", help="measure what a step costs; stores results")
    add("--fit", action="store_true", help="fit the virtual clock's costs to a real engine; stores results")
    add("--seconds", type=float, default=100.0, help="of each of its two runs")
    add("--cores", default="1,0", help="of its engine, and of the rest")
    add("--figure", choices=FIGURES, help="make a paper's figures on vLLM's scheduler; stores results")
    add("--mars-programs", type=int, default=200, help="programs of a run of --figure mars")
    add("--mars-only", metavar="GPU:ARM,...", help="of --figure: some of its runs, as h100:mars,h100:infercept")
    add("--name", help="of the result file; a table alone is stored only if it has a name")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.claims is not None:
        wanted = arguments.claims.split(",") if arguments.claims else list(ARMS)
        check_claims([claim for claim in CLAIMS if claim.arm in wanted], seeds, arguments.name or "plugin-claims")
        return
    if arguments.steps:
        measure_steps(arguments.name or "plugin-steps")
        return
    if arguments.fit:
        fit_costs(arguments.seconds, arguments.name or "plugin-costs", *map(int, arguments.cores.split(",")))
        return
    if arguments.figure is not None:
        only = arguments.mars_only.split(",") if arguments.mars_only else None
        name = arguments.name or f"plugin-{arguments.figure}"
        make_mars(arguments.figure, seeds, arguments.mars_programs, name, only)
        return
    counts = [int(each) for each in arguments.programs.split(",")]
    names = arguments.arms.split(",")
    arms = {name: ARMS[name] for name in names}
    if arguments.settings:
        added = {
            name: {**arm, "plugin": {**arm["plugin"], **arguments.settings}}
            for name, arm in arms.items()
            if "plugin" in arm
        }
        arms |= added
    describe_code()
    jobs = [(seed, count, name, arm) for seed in seeds for count in counts for name, arm in arms.items()]
    runs = list(do_jobs(jobs))
    if arguments.name:
        save_results(arguments.name, {"seeds": list(seeds), "runs": runs})
    print_table(runs, counts, names[0])


if __name__ == "__main__":
    main()
