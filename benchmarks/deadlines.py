"""Simulate deadlines: whether programs meet those that fit, what that costs the others, and what is said of the rest.

    scripts/bench deadlines [--jobs 2] [--minutes 5]

Two hundred programs come one after another, more than there is memory for. Without deadlines each takes its time. Then
each tenth has a deadline that fits: `--deadline-ratio` of the time that it took without one, but at least
`--alone-ratio` times its time alone on an idle engine. In a third run another tenth has one that cannot be met, a tenth
of its time alone: each of these must be refused with its first turn.

One seed says little of the others' time: if all programs come a tenth of a millisecond sooner, others meet in the
queue, and their mean time is up to 7 % longer or shorter. So there are a hundred, by default none of those by which the
rule was made. In the mean the others pay what the 20 gain, which differs less: it is told besides, with what they had
to gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf

from rich.console import Console

from benchmarks.kept_runs import Figures, do_runs
from benchmarks.machine import ROOT, save_results
from benchmarks.simulated import scenario_of
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import Grant, ProgramLimits, Reason, Reject
from thunderagent.simulator.comparison.processes import GoOn
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.figures.waits import ProgramWait
from thunderagent.simulator.runs.run import Simulation
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan, Workload

PROGRAMS_COUNT = 200
FIRST_FITS, FIRST_CANNOT = 5, 9
"""Numbers of the first programs with a deadline that fits, and with one that cannot be met: turns have ended then."""

MOST_RATIO = 1.05
"""What the others may take on average, of their time without deadlines."""


@dataclass(frozen=True)
class Staggered:
    """Another workload's programs, one every `gap_s`, some with deadlines: seconds by number."""

    programs: Workload
    gap_s: float
    deadlines_s: Mapping[int, float] = field(default_factory=dict)
    name: str = "staggered"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""
        plan = replace(self.programs.program(index, seed), arrival_s=index * self.gap_s)
        if (deadline_s := self.deadlines_s.get(index)) is None:
            return plan
        return replace(plan, limits=ProgramLimits(deadline_s=deadline_s, turns=len(plan.turns)))


@dataclass(frozen=True)
class Found:
    """The result of one seed."""

    in_time_count: int
    others_ratio: float
    """Mean time of the programs without a deadline, relative to their time without any."""
    gain_ratio: float
    """Time that programs with a deadline that fits were sooner, relative to the others' time without any."""
    needed_ratio: float
    """The same, had each of them ended at its deadline, or when it did without, if that was before."""
    used_ratio: float
    """The largest part of its deadline that one of them took."""
    said_at_once_count: int
    wrongly_refused_count: int
    """Programs whose deadline fits that were told that it does not."""


@dataclass(frozen=True)
class Case:
    """How many programs there are, and how hard their deadlines."""

    programs_count: int = PROGRAMS_COUNT
    gap_s: float = 3.0
    deadline_ratio: float = 0.9
    alone_ratio: float = 5.0
    policy: str = "breakeven"


def find(scenario: Scenario, case: Case, seed: int) -> Found:
    """Simulate one seed without deadlines, with those that fit, and with those that cannot be met besides."""
    scenario = replace(scenario, loop="open", programs_count=case.programs_count, seed=seed, keep_events=True)
    without, _ = _run(scenario, case, {})
    fits_s = {
        number: max(case.deadline_ratio * without[number].residence_s, case.alone_ratio * without[number].alone_s)
        for number in range(FIRST_FITS, case.programs_count, 10)
    }
    with_them, refused = _run(scenario, case, fits_s)
    in_time = [each for each, limit_s in fits_s.items() if each in with_them and with_them[each].residence_s <= limit_s]
    others = [number for number in without if number not in fits_s and number in with_them]
    others_s = sum(without[each].residence_s for each in others)
    others_ratio = sum(with_them[each].residence_s for each in others) / others_s
    used_ratio = max(
        with_them[each].residence_s / limit_s if each in with_them else inf for each, limit_s in fits_s.items()
    )
    gain_s = sum(without[each].residence_s - with_them[each].residence_s for each in fits_s if each in with_them)
    needed_s = sum(max(0.0, without[each].residence_s - limit_s) for each, limit_s in fits_s.items())
    cannot_s = {number: 0.1 * without[number].alone_s for number in range(FIRST_CANNOT, case.programs_count, 10)}
    _, said = _run(scenario, case, {**fits_s, **cannot_s})
    names = {scenario_name(case, number, seed) for number in cannot_s}
    return Found(
        len(in_time), others_ratio, gain_s / others_s, needed_s / others_s, used_ratio, len(names & said), len(refused)
    )


def scenario_name(case: Case, number: int, seed: int) -> str:
    """Return the id of a program."""
    return Staggered(workload("standard"), case.gap_s).program(number, seed).program_id


def _run(scenario: Scenario, case: Case, deadlines_s: Mapping[int, float]) -> tuple[dict[int, ProgramWait], set[str]]:
    """Return the programs that ended, by number, and the ids of those whose first turn was refused for its deadline."""
    programs = Staggered(workload("standard"), case.gap_s, deadlines_s)
    result = Simulation(scenario, programs, load_policy(case.policy, {})).run()
    refused, granted = set[str](), set[str]()
    for _, decisions in result.events:
        for decision in decisions:
            if isinstance(decision, Grant) and decision.program_id is not None:
                granted.add(decision.program_id)
            elif isinstance(decision, Reject) and decision.reason is Reason.DEADLINE_UNMET:
                refused |= {decision.program_id or ""} - granted
    return {each.serial_id: each for each in result.waits.programs}, refused


@dataclass(frozen=True)
class Run:
    """One seed of a case."""

    case: Case
    seed: int

    @property
    def key(self) -> str:
        """Its name among the stored runs."""
        return f"{self.case}/{self.seed}"


def do(run: Run, go_on: GoOn = lambda: None) -> Figures:
    """Simulate one seed."""
    go_on()
    return {name: float(value) for name, value in asdict(find(_scenario(), run.case, run.seed)).items()}


def _scenario() -> Scenario:
    return scenario_of("demo", minutes=240.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds that are not stored yet, and judge all that are; exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="breakeven")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--gap-s", type=float, default=3.0, help="time between two programs that come")
    parser.add_argument("--deadline-ratio", type=float, default=0.9)
    parser.add_argument("--alone-ratio", type=float, default=5.0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=inf, help="start no seed after; the next call goes on there")
    args = parser.parse_args(argv)
    case = Case(gap_s=args.gap_s, deadline_ratio=args.deadline_ratio, alone_ratio=args.alone_ratio, policy=args.policy)
    path = ROOT / "out" / "deadlines.json"
    path.parent.mkdir(exist_ok=True)
    wanted = [Run(case, seed) for seed in range(args.first_seed, args.first_seed + args.seeds)]
    kept = do_runs(do, wanted, path, args.jobs, Console(), for_s=60.0 * args.minutes)
    runs = [{"seed": run.seed, **kept[run.key]} for run in wanted if run.key in kept]
    if not runs:
        return 1
    ratio = Interval.of([each["others_ratio"] for each in runs])
    worst = [min(each[name] for each in runs) for name in ("in_time_count", "said_at_once_count")]
    wrong = sum(each["wrongly_refused_count"] for each in runs)
    fits = len(range(FIRST_FITS, case.programs_count, 10))
    print(f"{len(runs)} seeds; in time, worst seed: {worst[0]:.0f} of {fits}; said at once: {worst[1]:.0f} of {fits}")
    print(f"others' mean time: {ratio.text(3)} of without; refused though it fits: {wrong:.0f}")
    gain, needed = (Interval.of([each[name] for each in runs]) for name in ("gain_ratio", "needed_ratio"))
    print(f"the {fits} were sooner by {gain.text(4)} of the others' time; needed: {needed.text(4)}")
    figures = {"others": asdict(ratio), "gain": asdict(gain), "needed": asdict(needed)}
    save_results("deadlines", {"args": {**vars(args), "minutes": None}, "runs": runs, **figures})
    return 0 if worst == [fits, fits] and ratio.high <= MOST_RATIO and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
