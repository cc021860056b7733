"""`thunderagent simulate`: one run, with its progress and its final figures."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from thunderagent.errors import ConfigurationError
from thunderagent.simulator.commands.console import GIBIBYTE, picture, progress_bar
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.embedded.options import add_tier_arguments, with_tier
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import load_profiles, profile_from
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.scenario import Loop, Scenario
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads.distributions import workload, workload_names
from thunderagent.simulator.workloads.formats import FORMATS
from thunderagent.simulator.workloads.plans import Workload
from thunderagent.simulator.workloads.traces import Limits, TraceWorkload

DESCRIPTION = """\
Simulate agent programs on engine replicas under a policy, in virtual time: an hour takes seconds.

The policy runs in the same scheduler as in `thunderagent serve`; the engines are the model that `thunderagent engine`
serves in real time. The same options always give the same figures. Ctrl-C ends a run, and what is done counts.

Examples:
  thunderagent simulate --policy passthrough --workload standard --profile demo --programs 16 --minutes 10
      16 programs that thrash a small engine
  thunderagent simulate --workload mini-swe-agent --profile glm-4.6-h100x8 --replicas 2 --programs 144 --json run.json
      an hour of two large replicas, its figures and samples in a file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of one run to a command's parser."""
    add = parser.add_argument
    add(
        "--policy",
        default="breakeven",
        metavar="NAME",
        help="who may hold memory: a policy, a preset of one, package.module:Class, or oracle, which knows how long "
        "tools will run (default: %(default)s)",
    )
    add(
        "--policy-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy; may be given again",
    )
    add("--programs", type=int, default=16, metavar="N", help="how many at a time, or in all (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="vary the programs (default: %(default)s)")
    add_scenario_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="write all figures and samples to FILE; - is standard output")


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the common options of a run and a comparison: workload, engines, time, tools."""
    add = parser.add_argument
    add(
        "--workload",
        default="standard",
        metavar="NAME",
        help=f"what programs do: {', '.join(workload_names())} (default: %(default)s)",
    )
    add("--trace", type=Path, metavar="FILE", help="replay recorded programs instead of a workload")
    add(
        "--trace-format",
        default="recorded",
        choices=sorted(FORMATS),
        help="format of the file; recorded: what `thunderagent record` writes (default: %(default)s)",
    )
    add(
        "--loop",
        default="closed",
        choices=get_args(Loop),
        help="closed: a finished program is replaced at once; open: programs arrive when the workload says; batch: all "
        "begin at once, and the run ends with the last (default: %(default)s)",
    )
    add("--replicas", type=int, default=1, metavar="N", help="engines (default: %(default)s)")
    add(
        "--profile",
        default="demo",
        metavar="NAME|FILE.toml",
        help="whose iteration times the engines keep: a file that `thunderagent calibrate` wrote, or one of "
        f"{', '.join(sorted(load_profiles()))} (default: %(default)s)",
    )
    add("--kv-tokens", type=int, metavar="N", help="KV pool of each engine, in tokens (default: the profile's own)")
    add_tier_arguments(parser)
    add("--block-size", type=int, metavar="N", help="tokens in a KV block (default: the profile's own, or 16)")
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens computed in one iteration at most (default: the profile's own, or 2048)",
    )
    add("--max-num-seqs", type=int, default=256, metavar="N", help="turns that run at a time (default: %(default)s)")
    add("--minutes", type=float, default=60.0, metavar="M", help="simulated time (default: %(default)g)")
    add(
        "--warmup-minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="time at the start that does not count (default: %(default)g)",
    )
    add("--tool-cpus", type=int, metavar="N", help="tools that run at a time (default: no limit)")
    add(
        "--sandbox-s",
        type=_range_of_seconds,
        default=(0.0, 0.0),
        metavar="S[-S]",
        help="time to prepare a program's sandbox, in seconds, or a range of it (default: the workload's)",
    )
    add("--sandbox-gib", type=float, default=0.0, metavar="G", help="disk of a sandbox (default: %(default)g)")
    add("--disk-gib", type=float, metavar="G", help="disk of all sandboxes (default: no limit)")


def run(args: argparse.Namespace) -> int:
    """Run by the options; return the exit status: 0, or 1 if the run is not complete.

    Raises ConfigurationError for impossible options.
    """
    if wrong := [text for text in args.policy_arg if "=" not in text]:
        raise ConfigurationError(f"--policy-arg needs NAME=VALUE, not {wrong[0]!r}")
    contestant = Contestant.parse(":".join([args.policy, *args.policy_arg]))
    scenario = scenario_from(args, programs_count=args.programs, seed=args.seed)
    programs = load_programs(args, scenario.engine.context_limit_tokens)
    if args.json is not None and str(args.json) != "-":
        _check_writable(args.json)
    console = Console(stderr=True)
    with progress_bar(console, scenario) as on_progress:
        result = contestant.run(scenario, programs, on_progress=on_progress)
    if str(args.json) == "-":
        print(_json(result))
    else:
        Console(markup=False, emoji=False, highlight=False).print(picture(result))
        if args.json is not None:
            args.json.write_text(f"{_json(result)}\n", encoding="utf-8")
    return 0 if result.complete else 1


def _json(result: RunResult) -> str:
    return json.dumps(result.to_json(), indent=1, allow_nan=False)


def _check_writable(path: Path) -> None:
    """Raise ConfigurationError for an unwritable file; a file that did not exist does not exist afterwards."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    if is_new:
        path.unlink()


def scenario_from(args: argparse.Namespace, *, programs_count: int, seed: int) -> Scenario:
    """Build the scenario from parsed options; ConfigurationError says why it is impossible."""
    try:
        engine = EngineConfig.of(
            profile_from(args.profile),
            kv_tokens=args.kv_tokens,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
        )
        engine = replace(with_tier(engine, args), max_num_seqs=args.max_num_seqs)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    prepare_min_s, prepare_max_s = args.sandbox_s
    return Scenario(
        engine=engine,
        replica_count=args.replicas,
        loop=args.loop,
        programs_count=programs_count,
        horizon_s=args.minutes * 60,
        warmup_s=args.warmup_minutes * 60,
        seed=seed,
        tools=ToolSettings(
            cpu_count=args.tool_cpus,
            prepare_min_s=prepare_min_s,
            prepare_max_s=prepare_max_s,
            sandbox_disk_bytes=_bytes("--sandbox-gib", args.sandbox_gib),
            disk_bytes=None if args.disk_gib is None else _bytes("--disk-gib", args.disk_gib),
        ),
    )


def _bytes(option: str, gibibytes: float) -> int:
    if not 0 <= gibibytes < math.inf:
        raise ConfigurationError(f"{option} must be a number of GiB, 0 or more, not {gibibytes}")
    return int(gibibytes * GIBIBYTE)


def load_programs(args: argparse.Namespace, limit_tokens: int) -> Workload:
    """Return the programs; report on standard error what of a trace cannot be replayed."""
    if args.trace is not None:
        trace = FORMATS[args.trace_format](args.trace, Limits(context_tokens=limit_tokens))
        print(f"{args.trace}: {trace}", file=sys.stderr)
        return TraceWorkload(args.trace.name, trace, in_order_of_arrival=args.loop == "open")
    try:
        return workload(args.workload)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _range_of_seconds(text: str) -> tuple[float, float]:
    """Read `30` or `30-120`."""
    low, dash, high = text.partition("-")
    try:
        return float(low), float(high if dash else low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number of seconds, nor a range like 30-120: {text!r}") from None
