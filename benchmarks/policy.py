"""Simulate the default policy, with one command for each of its promises; `scripts/bench limits` is beside it.

    scripts/bench policy union       # the gain from counting a shared prefix once
    scripts/bench policy burst       # 64 programs at once: do the large ones wait longer, and who waits longest
    scripts/bench policy told        # a reported capacity that is wrong by a factor of 2
    scripts/bench policy real        # the load and the engine of `scripts/bench real`, beside the oracle and caps
    scripts/bench policy deltas      # there, the periods at which `thunderagent` makes most turns
    scripts/bench policy counters    # engines that do not report cached tokens per turn, at several speeds and polls
    scripts/bench policy silent      # programs that are never released
    scripts/bench policy homes       # four replicas: restores that moved although there was room, prefix hits
    scripts/bench policy imbalance   # how far two replicas drift apart in 90 minutes
    scripts/bench policy groups      # a GRPO rollout: the time until its last group ends
    scripts/bench policy ablation    # each part of the policy switched off
    scripts/bench policy harmless    # no cost if memory is not short
    scripts/bench policy tiers       # two engines with host memory behind their pools, and without
    scripts/bench policy pools       # two models behind one proxy, one short of memory: each compared with it alone
    scripts/bench policy world       # loads and engines as strangers have them; see `benchmarks/world.py`
    scripts/bench policy price       # engines of known prices: how closely they are learned; see `benchmarks/price.py`

Each writes its findings to `benchmarks/results/policy-NAME.json` and a plot beside it. Runs with one seed have the same
programs, so ratios are taken seed by seed; every figure is a mean and its 95 % interval over seeds. A promised figure
has a bar, which the bad end of the interval must reach; with fewer than three seeds it is undecided.

`--traces FILE` adds recorded programs (`thunderagent record`'s format) to `ablation`. Their programs end
at an engine's memory limit, and gaps over 300 s are cut to that: people have lunch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.findings import Finding, Pick, mean_of, plot, ratio_of, table
from benchmarks.ideal import StandardLoad
from benchmarks.load import LoadSpec
from benchmarks.machine import RESULTS, save_results
from benchmarks.real import engine_model
from benchmarks.real_engine import RealEngineConfig
from benchmarks.simulated import Runner, goodput_table, save_plot, scenario_of
from benchmarks.together import Model, simulate_together
from thunderagent.errors import ConfigurationError, TraceError
from thunderagent.programs.messages import Event, Pause, ReplicaPolled, ReplicaUp, Restore, Tick, TurnAsk, TurnEnd
from thunderagent.programs.policy import Policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.comparison.results import Run
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import COSTS_US, TimingProfile
from thunderagent.simulator.figures.bounds import Engines, turn_shapes
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.formats import load_recorded
from thunderagent.simulator.workloads.plans import ProgramPlan, Workload
from thunderagent.simulator.workloads.traces import Limits, TraceWorkload

NO_UNION = "share_prefixes=false"
ABLATIONS = {
    "prefixes counted once": NO_UNION,
    "capacity corrected": "adapt_capacity=false",
    "growth foreseen": "foresight_ratio=0",
    "letting go at break-even": "hold_ratio=inf",
    "passing who does not fit": "pass_count=0",
    "headroom": "low_ratio=1",
}
"""Parts of the default policy, and the setting that switches each off."""

AWAY_LIMIT_S = 300.0
REAL_PROGRAMS_COUNT = 16
CAPS = ("cap:n=5", "cap:n=6", "cap:n=7")
"""Fixed numbers of programs, about as many as fit."""
DELTAS = tuple(f"thunderagent:delta_s={delta_s:g}" for delta_s in (0.5, 1, 2, 5, 10, 20))
BEST_DELTA = DELTAS[3]
"""Of `thunderagent` where programs do not fit (`policy-deltas.json`)."""
SAMPLED_PLANS_COUNT = 200
IDLE_PROGRAMS_COUNT, IDLE_TICKS_COUNT, IDLE_TICK_S = 32, 1000, 0.25


@dataclass(frozen=True)
class Case:
    """A workload on an engine, and a time long enough for a run: many programs begin and end in it."""

    workload: str
    profile: str
    minutes: float
    warmup_minutes: float
    programs_count: int = 0
    replicas_count: int = 1


SMALL = Case("standard", "demo", 30, 5, 16)
SHARING = Case("shared-prefix-90", "qwen3-8b-rtx5090", 60, 10)
LARGE = Case("mini-swe-agent", "glm-4.6-h100x8", 90, 20, 48)
RECORDED = Case("recorded", "glm-4.6-h100x8", 120, 30)
TIERED = Case("mini-swe-agent", "qwen3-coder-30b-h100-nvl", 90, 15)
TIER_TOKENS, RESTORE_TOKEN_S = 2_180_000, 3.9e-6
"""200 GiB of the host's memory for each of two GPUs, at 98,304 bytes of KV a token; 25 GB/s to copy them back."""


class Bench:
    """The command line's options, and what the commands below share."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.policy: str = args.policy
        self.traces: Path | None = args.traces
        self.name: str = args.name or f"policy-{args.what}"
        self.seeds_count: int = args.seeds
        self.runner = Runner(seeds_count=args.seeds, jobs_count=args.jobs, console=console)
        self.console = console
        self._minutes: float | None = args.minutes

    def scenario(self, case: Case, **changes: Any) -> Scenario:
        """Return a case's engines and time, or the command line's time, of which a sixth is warm-up."""
        minutes, warmup_minutes = case.minutes, case.warmup_minutes
        if self._minutes is not None:
            minutes, warmup_minutes = self._minutes, self._minutes / 6 if warmup_minutes else 0.0
        scenario = scenario_of(case.profile, minutes=minutes, warmup_minutes=warmup_minutes)
        return replace(scenario, **{"replica_count": case.replicas_count, **changes})

    def programs(self, case: Case) -> Workload:
        """Return a case's workload; for `recorded` it comes from the file of recorded programs."""
        if case.workload != RECORDED.workload:
            return workload(case.workload)
        assert self.traces is not None
        limit_tokens = scenario_of(case.profile, minutes=1).engine.context_limit_tokens
        trace = load_recorded(self.traces, Limits(context_tokens=limit_tokens, away_s=AWAY_LIMIT_S))
        return TraceWorkload("recorded", trace, in_order_of_arrival=False)

    def runs(
        self, title: str, scenario: Scenario, programs: Workload, policies: Sequence[str], programs_count: int
    ) -> dict[str, tuple[Run, ...]]:
        """Run policies at one load; return the runs of each, one for each seed."""
        policies = tuple(dict.fromkeys(policies))
        result = self.runner.compare(title, scenario, programs, policies, [programs_count], keep_samples=False)
        return {policy: result.runs_of(policy, programs_count) for policy in policies}


def turns_per_min(result: RunResult) -> float:
    """Return the throughput."""
    return result.turns_per_min_count


def limit_ratio(result: RunResult) -> float:
    """Return the reached part of the limit."""
    return result.limit_ratio


# --- loads -----------------------------------------------------------------------------------------------------------


def mean_context_tokens(programs: Workload, engine: EngineConfig) -> float:
    """Return the mean context of a program over its life, weighted by time.

    Its life is that alone on an idle engine: each turn for its time there, with its prompt and half of its answer,
    and each tool's time with the whole context so far. Shared prefixes count in full. The mean is over the first
    plans of seed 0.
    """
    engines = Engines.of(engine, 1)
    token_s = total_s = 0.0
    for plan in _first_plans(programs):
        for shape, turn in zip(turn_shapes(plan), plan.turns, strict=True):
            after_tokens = shape.prompt_tokens + turn.output_tokens
            turn_s = engines.alone_s(shape)
            token_s += turn_s * (shape.prompt_tokens + turn.output_tokens / 2) + turn.tool_s * after_tokens
            total_s += turn_s + turn.tool_s
    return token_s / total_s


def _first_plans(programs: Workload) -> Iterator[Any]:
    for index in range(SAMPLED_PLANS_COUNT):
        try:
            yield programs.program(index, 0)
        except IndexError:
            return


def programs_at(load: float, capacity_tokens: int, context_tokens: float) -> int:
    """Return how many programs fill a multiple of the capacity; at least 1."""
    return max(1, round(load * capacity_tokens / context_tokens))


# --- one promise each -------------------------------------------------------------------------------------------------


def union(bench: Bench) -> list[Finding]:
    """Run programs that share 90 % of their first prompt, or nothing: turns a minute over those without the union."""
    found = []
    without = f"{bench.policy}:{NO_UNION}"
    policies = known([bench.policy, without, "thunderagent", "passthrough"], bench.console)
    for name in ("shared-prefix-90", "shared-prefix-0"):
        case = replace(SHARING, workload=name)
        scenario, programs = bench.scenario(case), workload(name)
        context_tokens = mean_context_tokens(programs, scenario.engine)
        for load in (3.0, 6.0, 12.0):  # of full contexts, of which nine tenths may be shared
            count = programs_at(load, scenario.engine.capacity_tokens, context_tokens)
            runs = bench.runs(name, scenario, programs, policies, count)
            at = f"{name}, {count} programs"
            for policy in runs:
                found.append(Finding(at, policy, "turns/min", mean_of(runs[policy], turns_per_min)))
                found.append(Finding(at, policy, "prefix hits", mean_of(runs[policy], lambda result: result.hit_ratio)))
            for other in policies[1:]:
                ratio = ratio_of(runs[bench.policy], runs[other], turns_per_min)
                found.append(Finding(at, bench.policy, f"/ {other}", ratio))
    return found


def burst(bench: Bench) -> list[Finding]:
    """Run 64 programs of very different size as a batch: how wait depends on size, and the longest wait."""
    case = Case("burst-64", "qwen3-8b-rtx5090", 24 * 60, 0, 64)
    scenario = bench.scenario(case, loop="batch")
    policies = (bench.policy, "thunderagent", "thunderagent-ports", "cap:n=8")
    runs = bench.runs("burst", scenario, bench.programs(case), policies, case.programs_count)
    figures: dict[str, Pick] = {
        "size and wait, Pearson": lambda result: result.waits.pearson,
        "size and wait, Spearman": lambda result: result.waits.spearman,
        "longest hold (s)": lambda result: result.longest_hold_s,
        "longest hold / median residence": lambda result: result.longest_hold_s / result.program_latency.p50_s,
        "makespan / bound": _over_bound,
    }
    return [
        Finding("64 programs at once", policy, name, mean_of(runs[policy], pick))
        for name, pick in figures.items()
        for policy in runs
    ]


def counters(bench: Bench) -> list[Finding]:
    """Run engines that only count cached tokens, and others, at several speeds and polls, beside `thunderagent`.

    In the last setting polls come late, and three of ten never come.
    """
    polls = [{"poll_interval_s": poll_s} for poll_s in (1.0, 5.0, 10.0)]
    polls.append({"poll_interval_s": 5.0, "poll_delay_s": 4.0, "poll_missing_ratio": 0.3})
    found = []
    for speed_ratio in (0.3, 1.0, 3.0):
        scenario = bench.scenario(SMALL)
        engine = replace(scenario.engine, timing=faster(scenario.engine.timing, speed_ratio))
        for tells in (False, True):
            for poll in polls:
                read = ", ".join(f"{value:g}" for value in poll.values())
                at = f"speed x {speed_ratio:g}, {'told' if tells else 'counted'}, polls {read}"
                runs = bench.runs(
                    at,
                    replace(scenario, engine=engine, engine_tells_cached=tells, **poll),
                    bench.programs(SMALL),
                    (bench.policy, "thunderagent"),
                    SMALL.programs_count,
                )
                ratio = ratio_of(runs[bench.policy], runs["thunderagent"], turns_per_min)
                found.append(Finding(at, bench.policy, "turns/min / thunderagent", ratio, at_least=0.98))
    return found


@dataclass(frozen=True)
class RealLoad:
    """The programs of `scripts/bench real`, different for each seed, as the simulator sees them."""

    programs_count: int = REAL_PROGRAMS_COUNT
    name: str = "standard load"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program `index`."""
        return StandardLoad(LoadSpec(programs=self.programs_count, seed=seed)).program(index, seed)


def real_timing() -> TimingProfile:
    """Return the times of the engine of `scripts/bench real`: each the median of `scripts/bench fidelity`'s."""
    profiles = json.loads((RESULTS / "fidelity.json").read_text())["profiles"]
    middle = {name: median(profile.get(name, 0.0) for profile in profiles) for name in COSTS_US.values()}
    return TimingProfile(name="", source="the medians of the calibrations in fidelity.json", **middle)


def real(bench: Bench) -> list[Finding]:
    """Simulate load and engine of `scripts/bench real` for longer, at full and a third of its speed, beside the oracle.

    `thunderagent` has the period that is best there (`deltas`).
    """
    timing = real_timing()
    found = []
    for speed_ratio in (1.0, 0.33):
        engine = engine_model(RealEngineConfig(), faster(timing, speed_ratio))
        scenario = replace(bench.scenario(SMALL), engine=engine)
        for tells in (False, True):
            at = f"16 programs, speed x {speed_ratio:g}, {'told' if tells else 'counted'}"
            policies = (bench.policy, BEST_DELTA, "passthrough", "oracle", *CAPS)
            scene = replace(scenario, engine_tells_cached=tells)
            runs = bench.runs(at, scene, RealLoad(), policies, REAL_PROGRAMS_COUNT)
            for policy in (bench.policy, "oracle"):
                ratio = ratio_of(runs[policy], runs[BEST_DELTA], turns_per_min)
                found.append(Finding(at, policy, f"turns/min / {BEST_DELTA}", ratio))
            for other in ("passthrough", *CAPS):
                ratio = ratio_of(runs[bench.policy], runs[other], turns_per_min)
                found.append(Finding(at, bench.policy, f"turns/min / {other}", ratio))
    return found


def deltas(bench: Bench) -> list[Finding]:
    """Run `thunderagent` at several periods on the load and engine of `scripts/bench real`, beside the default."""
    engine = engine_model(RealEngineConfig(), real_timing())
    scenario = replace(bench.scenario(SMALL), engine=engine, engine_tells_cached=False)
    found = []
    for count in (8, REAL_PROGRAMS_COUNT, 32):
        runs = bench.runs(f"{count} programs", scenario, RealLoad(count), (bench.policy, *DELTAS), count)
        found += [
            Finding(f"{count} programs", policy, "turns/min", mean_of(runs[policy], turns_per_min)) for policy in runs
        ]
    return found


def faster(timing: TimingProfile, ratio: float) -> TimingProfile:
    """Return an engine that is faster by a factor."""
    return replace(timing, **{name: getattr(timing, name) / ratio for name in COSTS_US.values()})


def told(bench: Bench) -> list[Finding]:
    """Give the scheduler half and twice the capacity: turns a minute over those with the right one."""
    found = []
    for case in (SMALL, LARGE):
        programs = bench.programs(case)
        policies = (bench.policy, "thunderagent")
        runs = {
            ratio: bench.runs(
                f"{case.workload}, told {ratio:g}",
                bench.scenario(case, told_capacity_ratio=ratio),
                programs,
                policies,
                case.programs_count,
            )
            for ratio in (1.0, 0.5, 2.0)
        }
        for ratio in (0.5, 2.0):
            for policy in policies:
                interval = ratio_of(runs[ratio][policy], runs[1.0][policy], turns_per_min)
                bar = 0.85 if policy == bench.policy else None
                found.append(Finding(_name_of(case), policy, f"told {ratio:g} / told 1", interval, bar))
    return found


def silent(bench: Bench) -> list[Finding]:
    """Run programs that are never released: turns a minute over those with releases, and over `passthrough`."""
    found = []
    for case in (SMALL, LARGE):
        programs = bench.programs(case)
        policies = ("passthrough", bench.policy, "thunderagent")
        with_releases, without = (
            bench.runs(
                f"{case.workload}, {ratio:.0%} releases",
                bench.scenario(case, release_ratio=ratio),
                programs,
                policies,
                case.programs_count,
            )
            for ratio in (1.0, 0.0)
        )
        for policy in policies[1:]:
            interval = ratio_of(without[policy], with_releases[policy], turns_per_min)
            found.append(Finding(_name_of(case), policy, "silent / with releases", interval))
            over_passthrough = ratio_of(without[policy], without["passthrough"], turns_per_min)
            found.append(Finding(_name_of(case), policy, "silent / passthrough", over_passthrough))
    return found


def homes(bench: Bench) -> list[Finding]:
    """Compare four replicas with one at the same load each: restores that moved with room at home, and prefix hits."""
    case = replace(LARGE, programs_count=20)
    policies = (bench.policy, "thunderagent")
    programs = bench.programs(case)
    one = bench.runs("one replica", bench.scenario(case), programs, policies, case.programs_count)
    scenario = bench.scenario(case, replica_count=4)
    four = bench.runs("four replicas", scenario, programs, policies, 4 * case.programs_count)
    found = []
    for policy in policies:
        figures: dict[str, Pick] = {
            "restores": lambda result: result.restores.restore_count,
            "of these moved": lambda result: result.restores.moved_count,
            "of these from a home kept for the first": lambda result: result.restores.moved_from_kept_count,
        }
        found += [Finding("4 replicas", policy, name, mean_of(four[policy], pick)) for name, pick in figures.items()]
        most = Interval.of([max(run.result.restores.moved_with_room_count for run in four[policy])])
        bar = 0.0 if policy == bench.policy else None
        found.append(Finding("4 replicas", policy, "moved with room at home, worst seed", most, at_most=bar))
        for setting, runs in (("1 replica", one), ("4 replicas", four)):
            found.append(
                Finding(setting, policy, "prefix hits", mean_of(runs[policy], lambda result: result.hit_ratio))
            )
        ratio = ratio_of(four[policy], one[policy], lambda result: result.hit_ratio)
        found.append(Finding("4 replicas / 1", policy, "ratio of prefix hits", ratio))
    return found


def imbalance(bench: Bench) -> list[Finding]:
    """Run two replicas for 90 minutes: the gap between the claims on them, as a part of a replica's capacity.

    If programs are admitted with room to grow, new ones claim less than is reserved for them. So the runs include one
    without that, the oracle, which knows how long tools run, and one that moves programs to even out the claims.
    """
    case = Case("openhands", "glm-4.6-h100x8", 90, 0, 48)
    scenario = bench.scenario(case, replica_count=2, sample_interval_s=1.0)
    parts = (f"{bench.policy}:{ABLATIONS['growth foreseen']}", f"{bench.policy}:global_policy=balance")
    policies = known([bench.policy, *parts, "oracle", "sticky", "passthrough", "thunderagent"], bench.console)
    runs = bench.runs("imbalance", scenario, bench.programs(case), policies, case.programs_count)
    figures: dict[str, Pick] = {
        "imbalance, p99": lambda result: result.imbalance_p99_ratio,
        "imbalance, mean": lambda result: result.imbalance_mean_ratio,
        "turns/min": turns_per_min,
    }
    return [
        Finding(_name_of(case), policy, name, mean_of(runs[policy], pick))
        for name, pick in figures.items()
        for policy in runs
    ]


def groups(bench: Bench) -> list[Finding]:
    """Run 32 prompts with 8 programs each on two replicas: the time until all end, and its lower bound.

    The oracle, which knows the future, shows how much of the gap can be closed at all.
    """
    case = Case("grpo", "glm-4.6-h100x8", 24 * 60, 0, 8 * 32)
    scenario = bench.scenario(case, replica_count=2, loop="batch")
    policies = (bench.policy, "thunderagent", "passthrough", "oracle")
    runs = bench.runs("groups", scenario, bench.programs(case), policies, case.programs_count)
    found = []
    for policy in policies:
        found.append(Finding(_name_of(case), policy, "makespan (s)", mean_of(runs[policy], _makespan_s)))
        found.append(Finding(_name_of(case), policy, "makespan / bound", mean_of(runs[policy], _over_bound)))
    for other in policies[1:]:
        ratio = ratio_of(runs[bench.policy], runs[other], _makespan_s)
        found.append(Finding(_name_of(case), bench.policy, f"makespan / {other}", ratio))
    return found


def _makespan_s(result: RunResult) -> float | None:
    return result.makespan_s


def _over_bound(result: RunResult) -> float | None:
    if result.makespan_s is None or result.makespan_bound_s is None:
        return None
    return result.makespan_s / result.makespan_bound_s


def ablation(bench: Bench) -> list[Finding]:
    """Switch off each part of the policy: the reached part of the limit over that of the whole policy."""
    names = {f"{bench.policy}:{setting}": part for part, setting in ABLATIONS.items()}
    policies = known([bench.policy, *names], bench.console)
    cases = [replace(LARGE, programs_count=96), SMALL, replace(SMALL, programs_count=32)]
    cases += [replace(LARGE, programs_count=160, replicas_count=4), replace(SHARING, programs_count=47)]
    if bench.traces is not None:
        cases.append(replace(RECORDED, programs_count=24))
    found = []
    for case in cases:
        runs = bench.runs(_name_of(case), bench.scenario(case), bench.programs(case), policies, case.programs_count)
        whole = runs[bench.policy]
        found.append(Finding(_name_of(case), bench.policy, "of the limit", mean_of(whole, limit_ratio)))
        for policy in policies[1:]:
            ratio = ratio_of(runs[policy], whole, limit_ratio)
            found.append(Finding(_name_of(case), policy, f"without {names[policy]}", ratio))
    return found


def known(policies: Sequence[str], console: Console) -> list[str]:
    """Return the policies without those that have an unknown setting, and print which."""
    found = []
    for policy in policies:
        try:
            Contestant.parse(policy)
        except ConfigurationError as error:
            console.print(f"left out: {error}")
        else:
            found.append(policy)
    return found


def harmless(bench: Bench) -> list[Finding]:
    """Compare with `passthrough` at every load of a small engine; count the moves of a table without pressure."""
    found = []
    for count in (1, 2, 4, 8, 16, 32):
        runs = bench.runs(
            f"{count} programs", bench.scenario(SMALL), bench.programs(SMALL), ("passthrough", bench.policy), count
        )
        ratio = ratio_of(runs[bench.policy], runs["passthrough"], turns_per_min)
        setting = f"standard, {count} programs"
        found.append(Finding(setting, bench.policy, "turns/min / passthrough", ratio, at_least=0.98))
    policy, _ = Contestant.parse(bench.policy).prepare(bench.scenario(SMALL), bench.programs(SMALL))
    moves = Interval(1, idle_moves_count(policy), 0.0)  # nothing random is in it
    found.append(Finding("idle table", bench.policy, "pauses and restores", moves, at_most=0.0))
    return found


def tiers(bench: Bench) -> list[Finding]:
    """Run two GPUs with and without a tier behind their pools: the gain if contexts exceed what both hold."""
    figures: dict[str, Pick] = {
        "turns/min": turns_per_min,
        "programs/h": lambda result: result.programs_per_hour_count,
        "part of the limit": limit_ratio,
        "prompt tokens found": lambda result: result.hit_ratio,
    }
    programs, policies, found = bench.programs(TIERED), (bench.policy, "passthrough"), []
    for programs_count in (64, 128, 192):
        by_tier = {}
        for tier, tier_tokens in (("no tier", 0), ("tier", TIER_TOKENS)):
            setting = f"{programs_count} programs, {tier}"
            scenario = bench.scenario(TIERED, replica_count=2)
            engine = replace(scenario.engine, tier_tokens=tier_tokens, restore_token_s=RESTORE_TOKEN_S)
            runs = by_tier[tier] = bench.runs(
                setting, replace(scenario, engine=engine), programs, policies, programs_count
            )
            found += [
                Finding(setting, policy, name, mean_of(runs[policy], pick))
                for policy in policies
                for name, pick in figures.items()
            ]
            ratio = ratio_of(runs[bench.policy], runs["passthrough"], figures["programs/h"])
            found.append(Finding(setting, bench.policy, "programs/h / passthrough", ratio, at_least=1.0))
        ratio = ratio_of(by_tier["tier"][bench.policy], by_tier["no tier"][bench.policy], turns_per_min)
        found.append(Finding(f"{programs_count} programs", bench.policy, "turns/min / no tier", ratio, at_least=1.0))
    return found


def pools(bench: Bench) -> list[Finding]:
    """Run two models behind one proxy, one of them short of memory: the figures of each over those alone."""
    figures: dict[str, Pick] = {
        "turns/min": turns_per_min,
        "a turn's time, mean": lambda result: result.turn_latency.mean_s,
        "a turn's time, p99": lambda result: result.turn_latency.p99_s,
        "a program's time, mean": lambda result: result.program_latency.mean_s,
    }
    programs, pairs = bench.programs(SMALL), dict[str, list[tuple[RunResult, RunResult]]]()
    for seed in range(bench.seeds_count):
        models = [
            Model(name, bench.scenario(SMALL, **of_model), programs, _policy_of(bench))
            for name, of_model in (
                ("short", {"programs_count": 16, "seed": 2 * seed, "replica_prefix": "short"}),
                ("ample", {"programs_count": 4, "seed": 2 * seed + 1, "replica_prefix": "ample"}),
            )
        ]
        for model, together in zip(models, simulate_together(models), strict=True):
            alone = simulate(model.scenario, programs, _policy_of(bench))
            pairs.setdefault(f"{model.name}, {model.scenario.programs_count} programs", []).append((together, alone))
    found = []
    for setting, runs in pairs.items():
        for name, pick in figures.items():
            whole = [(value, other) for each, alone in runs if (value := pick(each)) and (other := pick(alone))]
            ratio = Interval.of_ratios([value for value, _ in whole], [other for _, other in whole])
            found.append(Finding(setting, bench.policy, f"{name} / alone", ratio, at_least=0.98, at_most=1.02))
    return found


def _policy_of(bench: Bench) -> Policy:
    """Return the judged policy, with nothing learned."""
    return Contestant.parse(bench.policy).prepare(bench.scenario(SMALL), bench.programs(SMALL))[0]


def idle_moves_count(policy: Policy) -> int:
    """Return the number of pauses and restores on ticks while all programs fit and all of their tools run."""
    scheduler = Scheduler(policy)
    scheduler.handle(ReplicaPolled(0.0, "r0", 1_000_000))
    scheduler.handle(ReplicaUp(0.0, "r0"))
    for turn_id in range(IDLE_PROGRAMS_COUNT):
        scheduler.handle(TurnAsk(now_s=0.0, turn_id=turn_id, program_id=f"p{turn_id}", prompt_bytes=40_000))
        scheduler.handle(
            TurnEnd(now_s=0.1, turn_id=turn_id, prompt_tokens=10_000, output_tokens=100, cached_tokens=0, tool="bash")
        )
    ticks: list[Event] = [Tick(IDLE_TICK_S * number) for number in range(1, IDLE_TICKS_COUNT + 1)]
    return sum(isinstance(each, Pause | Restore) for tick in ticks for each in scheduler.handle(tick))


def _name_of(case: Case) -> str:
    engines = f"{case.replicas_count} x {case.profile}" if case.replicas_count > 1 else case.profile
    return f"{case.workload}, {engines}, {case.programs_count} programs"


# --- shared -----------------------------------------------------------------------------------------------------------


COMMANDS: dict[str, Callable[[Bench], list[Finding]]] = {
    "union": union,
    "burst": burst,
    "told": told,
    "counters": counters,
    "real": real,
    "deltas": deltas,
    "silent": silent,
    "homes": homes,
    "imbalance": imbalance,
    "groups": groups,
    "ablation": ablation,
    "harmless": harmless,
    "tiers": tiers,
    "pools": pools,
}


def arguments() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(description="What the default policy promises, simulated.")
    add = parser.add_argument
    add("what", choices=COMMANDS)
    add("--policy", default="breakeven", help="who is judged (default: %(default)s)")
    add("--seeds", type=int, default=5, help="runs of each, each with other programs (default: %(default)s)")
    add("--jobs", type=int, help="runs at a time (default: one for each core)")
    add("--minutes", type=float, help="simulated time of each run, for a trial (default: each command's own)")
    add("--traces", type=Path, metavar="FILE", help="recorded programs, for ablation")
    add("--name", help="what the result is called, as of one part of a sweep (default: policy-WHAT)")
    return parser


def command_of(words: Sequence[str], traces: Path | None) -> str:
    """Return the command for a report, with only the name of the file of recorded programs."""
    shown = [word.replace(str(traces), traces.name) if traces is not None else word for word in words]
    return shlex.join(["scripts/bench", "policy", *shown])


def main() -> None:
    """Make one comparison."""
    if sys.argv[1:2] == ["world"]:  # it has options of its own
        from benchmarks import world  # noqa: PLC0415 - it needs this module

        sys.exit(world.main(sys.argv[2:]))
    if sys.argv[1:2] == ["price"]:
        from benchmarks import price  # noqa: PLC0415 - it needs this module

        sys.exit(price.main(sys.argv[2:]))
    args = arguments().parse_args()
    console = Console()
    console.width = max(console.width, 165)  # the table's width
    try:
        bench = Bench(args, console)
        found = COMMANDS[args.what](bench)
    except (ConfigurationError, TraceError) as error:
        sys.exit(f"policy {args.what}: {error}")
    console.print(table(f"policy {args.what}", found))
    console.print(goodput_table(bench.runner.in_time))
    save_plot(bench.name, plot(found))
    report = {
        "command": command_of(sys.argv[1:], args.traces),
        "seeds": args.seeds,
        "found": [each.to_json() for each in found],
        "goodput": bench.runner.in_time,
    }
    console.print(f"written: {save_results(bench.name, report).name}")


if __name__ == "__main__":
    main()
