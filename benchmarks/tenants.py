"""Simulate fair shares between tenants: how even they are, and what they cost.

    scripts/bench tenants

Three tenants always want more than there is: one with one program, one with eight, and one with a program that makes
children without end, eight for each program of the first. All have the same weight. The same programs also run without
shares, and without shares and without parents: then the third is only a tenant with many programs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.machine import save_results
from benchmarks.simulated import scenario_of
from thunderagent.policy_loader import load_policy
from thunderagent.programs.learned.goodput import in_time
from thunderagent.programs.messages import TurnAsk, TurnEnd
from thunderagent.simulator.commands.console import table_of_numbers
from thunderagent.simulator.figures.figures import Goodput, RunResult
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan, Workload

SMALL, LARGE, FANNING = "small", "large", "fanning-out"
PARENT = "fanning-out-parent"
ROUND = (SMALL, *[LARGE] * 8, *[FANNING] * 8)
"""The tenants of arriving programs, in turn: one to eight to eight."""

FAIR_AT_LEAST, LOST_AT_MOST = 0.95, 0.05


@dataclass(frozen=True)
class Three:
    """Another workload's programs, for three tenants in turn; the parent of the third's children comes first."""

    programs: Workload
    with_parents: bool
    name: str = "three tenants"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""
        if index == 0:
            turns = (TurnPlan(400, 20, 1e6, "children"), TurnPlan(50, 20, 0.0))
            return ProgramPlan(PARENT, turns, tenant=FANNING)
        plan = self.programs.program(index, seed)
        tenant = ROUND[index % len(ROUND)]
        parent_id = PARENT if self.with_parents and tenant == FANNING else ""
        return replace(plan, tenant=tenant, parent_id=parent_id)


@dataclass(frozen=True)
class Found:
    """The result of one run: tokens of finished turns by tenant; what was in time is for all three."""

    turns_per_min_count: float
    goodputs: tuple[Goodput, ...]
    tokens: dict[str, int]

    @property
    def jain_ratio(self) -> float:
        """Return Jain's index of the three tenants' tokens."""
        got = [self.tokens.get(tenant, 0) for tenant in (SMALL, LARGE, FANNING)]
        return sum(got) ** 2 / (len(got) * sum(tokens**2 for tokens in got))


def run(scenario: Scenario, *, policy: str, fair: bool, with_parents: bool, seed: int) -> Found:
    """Simulate one setting."""
    scheduler = replace(scenario.scheduler, fair_tenants=fair, idle_limit_s=scenario.horizon_s)
    scenario = replace(scenario, seed=seed, scheduler=scheduler, keep_events=True)
    result = Simulation(scenario, Three(workload("standard"), with_parents), load_policy(policy, {})).run()
    return Found(result.turns_per_min_count, result.goodputs, tokens_by_tenant(result, scenario.warmup_s))


def tokens_by_tenant(result: RunResult, begin_s: float) -> dict[str, int]:
    """Return the tokens of the turns that each tenant finished after the warm-up."""
    tenants: dict[int, str] = {}
    tokens: Counter[str] = Counter()
    for event, _ in result.events:
        if isinstance(event, TurnAsk):
            tenants[event.turn_id] = event.tenant
        elif (isinstance(event, TurnEnd) and event.outcome == "finished") and event.now_s >= begin_s:
            tokens[tenants[event.turn_id]] += (event.prompt_tokens or 0) + (event.output_tokens or 0)
    return dict(tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all settings with all seeds; exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="breakeven")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=150, help="programs of the small tenant")
    args = parser.parse_args(argv)
    console = Console()
    console.width = max(console.width, 150)  # the table's width
    scenario = replace(
        scenario_of("demo", minutes=args.minutes, warmup_minutes=args.minutes / 5, loop="batch"),
        programs_count=args.rounds * len(ROUND),
    )
    settings = {
        "shares": {"fair": True, "with_parents": True},
        "no shares": {"fair": False, "with_parents": True},
        "no shares, no parents": {"fair": False, "with_parents": False},
    }
    found: dict[str, list[Found]] = {name: [] for name in settings}
    for seed in range(args.seeds):
        for name, setting in settings.items():
            found[name].append(run(scenario, policy=args.policy, seed=seed, **setting))
    plain = [each.turns_per_min_count for each in found["no shares, no parents"]]
    table = table_of_numbers(
        "Setting", "turns/min", "of no shares, no parents", "Jain", *ROUND_NAMES, "turns in time", "programs in time"
    )
    figures: dict[str, dict[str, Any]] = {}
    for name, runs in found.items():
        ratio = Interval.of_ratios([each.turns_per_min_count for each in runs], plain)
        jain = Interval.of([each.jain_ratio for each in runs])
        rate = Interval.of([each.turns_per_min_count for each in runs])
        assert ratio is not None
        parts = [fmean(each.tokens.get(who, 0) / sum(each.tokens.values()) for each in runs) for who in ROUND_NAMES]
        by_alpha = list(zip(*(each.goodputs for each in runs), strict=True))
        goodput = {
            "turns": in_time(fmean(each.turn_ratio for each in of_seeds) for of_seeds in by_alpha),
            "programs": in_time(fmean(each.program_ratio for each in of_seeds) for of_seeds in by_alpha),
        }
        shares = (f"{part:.0%}" for part in parts)
        table.add_row(name, rate.text(1), ratio.text(3), jain.text(3), *shares, *goodput.values())
        figures[name] = {"turns_per_min": asdict(rate), "ratio": asdict(ratio), "jain": asdict(jain), "parts": parts}
        figures[name]["goodput"] = goodput
    console.print(table)
    fair_ratio, kept_ratio = figures["shares"]["jain"]["mean"], figures["shares"]["ratio"]["mean"]
    passed = fair_ratio >= FAIR_AT_LEAST and kept_ratio >= 1 - LOST_AT_MOST
    console.print(
        f"Jain >= {FAIR_AT_LEAST}: {fair_ratio:.3f}; throughput lost < {LOST_AT_MOST:.0%}: {1 - kept_ratio:.1%}; "
        f"{'reached' if passed else 'MISSED'}"
    )
    save_results("tenants", {"args": vars(args), "figures": figures})
    return 0 if passed else 1


ROUND_NAMES = (SMALL, LARGE, FANNING)

if __name__ == "__main__":
    raise SystemExit(main())
