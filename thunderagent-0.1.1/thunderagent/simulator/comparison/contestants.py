"""The contestants: policies with settings, presets of them, and the oracle, each given by a short text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from thunderagent.errors import ConfigurationError
from thunderagent.policy_loader import Setting, load_policy, parse_setting
from thunderagent.programs.policies import PARTS
from thunderagent.programs.policies.fitting import Fitting
from thunderagent.programs.policy import Policy
from thunderagent.simulator.comparison.oracle import Oracle
from thunderagent.simulator.figures.bounds import Bounds, turn_shapes
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tally import Progress, scenario_bounds
from thunderagent.simulator.workloads.plans import ProgramPlan, Workload

ORACLE = "oracle"

ORACLE_SETTINGS: dict[str, Setting] = {"headroom_ratio": 0.08, "reserve_tokens": 0}
"""Its defaults, besides `hold_below_s`: the headroom is the best of 0.02, 0.05, 0.08 and 0.12 on three workloads."""

BOUNDED_PLANS_COUNT = 200
"""Plans of a workload from which its bounds are taken."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy and its settings as text: `name`, or `name:key=value:key=value`; parts are settings, too.

    `name` is a policy, a preset, `package.module:Class`, or `oracle`, whose settings are those of `Oracle`; without
    `hold_below_s` it takes the best threshold of the bound L1.
    """

    name: str
    settings: tuple[tuple[str, Setting], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a contestant; ConfigurationError for an unknown or invalid one."""
        name, *parts = text.split(":")
        if parts and "=" not in parts[0]:  # package.module:Class
            name = f"{name}:{parts.pop(0)}"
        settings = {}
        whole: list[str] = []
        for part in parts:
            if "=" not in part and whole and _names_a_module(whole[-1]):  # the class of a part's module:Class
                whole[-1] += f":{part}"
            else:
                whole.append(part)
        for part in whole:
            key, equals, value = part.partition("=")
            if not key or not equals:
                raise ConfigurationError(f"not a policy: {text!r}; write NAME or NAME:SETTING=VALUE:SETTING=VALUE")
            settings[key] = parse_setting(value)
        return cls.of(name, settings)

    @classmethod
    def of(cls, name: str, settings: dict[str, Setting]) -> Self:
        """Create it from a policy and its settings; ConfigurationError if unknown."""
        contestant = cls(name, tuple(settings.items()))
        if name == ORACLE:
            contestant._check_oracle()
        else:
            contestant._policy()
        return contestant

    def __str__(self) -> str:
        return ":".join((self.name, *(f"{key}={value}" for key, value in self.settings)))

    def prepare(self, scenario: Scenario, workload: Workload) -> tuple[Policy, dict[str, float] | None]:
        """Create the policy for one run, and its foresight: both are arguments of `simulate`."""
        if self.name != ORACLE:
            return self._policy(), None
        settings = ORACLE_SETTINGS | dict(self.settings)
        hold_below_s = settings.get("hold_below_s")
        if hold_below_s is None:
            hold_below_s = bounds_of(scenario, workload).hold_below_s
        fitting = Fitting(float(settings["headroom_ratio"]), _common_prefix_tokens(scenario, workload))
        foresight: dict[str, float] = {}
        return Oracle(foresight, float(hold_below_s), fitting, int(settings["reserve_tokens"])), foresight

    def run(
        self, scenario: Scenario, workload: Workload, *, on_progress: Callable[[Progress], None] | None = None
    ) -> RunResult:
        """Simulate one run: the oracle's on engines that drop what it drops, priorities on engines that have them.

        Raises ConfigurationError.
        """
        policy, foresight = self.prepare(scenario, workload)
        scenario = replace(scenario, engines_drop=scenario.engines_drop or self.name == ORACLE)
        if policy.priority is not None and scenario.engine.scheduling_policy == "fcfs":
            scenario = replace(scenario, engine=replace(scenario.engine, scheduling_policy="priority"))
        return simulate(scenario, workload, policy, on_progress=on_progress, foresight=foresight)

    def _policy(self) -> Policy:
        return load_policy(self.name, dict(self.settings))

    def _check_oracle(self) -> None:
        known = ("hold_below_s", *ORACLE_SETTINGS)
        for key, value in self.settings:
            if key not in known:
                raise ConfigurationError(f"policy {ORACLE} has no setting {key!r}; it has: {', '.join(known)}")
            if isinstance(value, str) or not 0 <= value < float("inf"):
                raise ConfigurationError(f"policy {ORACLE}: {key} must be a number, 0 or more, not {value!r}")
            if key == "headroom_ratio" and value >= 1:
                raise ConfigurationError(f"policy {ORACLE}: headroom_ratio must be under 1, not {value!r}")


def _names_a_module(setting: str) -> bool:
    """Return whether a setting `key=value` is a part of a policy in a module, whose class follows after a colon.

    Of several parts, joined by +, it is the last.
    """
    key, _, value = setting.partition("=")
    last = value.rpartition("+")[2]
    return key in PARTS and bool(last) and last not in PARTS[key] and ":" not in last


def _common_prefix_tokens(scenario: Scenario, workload: Workload) -> int:
    """Return how many tokens all programs of a workload share, as its first ones do."""
    plans = _first_plans(scenario, workload)
    if not plans or len({plan.shared_prefix_id for plan in plans}) > 1:
        return 0
    return min(plan.shared_prefix_tokens for plan in plans)


def bounds_of(scenario: Scenario, workload: Workload) -> Bounds:
    """Return the bounds of a run, from the first plans of its workload.

    Raises ConfigurationError if the workload has a program that fits on no replica.
    """
    shapes = [shape for plan in _first_plans(scenario, workload) for shape in turn_shapes(plan)]
    try:
        return scenario_bounds(scenario, shapes)
    except ValueError as error:
        raise ConfigurationError(f"workload {workload.name} has no bounds here: {error}") from error


def _first_plans(scenario: Scenario, workload: Workload) -> list[ProgramPlan]:
    plans = []
    limit_count = max(BOUNDED_PLANS_COUNT, scenario.programs_count)
    for index in range(limit_count):
        try:
            plan = workload.program(index, scenario.seed)
        except IndexError:
            break
        plans.append(_as_far_as_it_fits(plan, scenario.engine.context_limit_tokens))
    return plans


def _as_far_as_it_fits(plan: ProgramPlan, limit_tokens: int) -> ProgramPlan:
    """Cut a plan before the turn that engines would refuse: it ends there in a run."""
    context_tokens = plan.shared_prefix_tokens
    for number, turn in enumerate(plan.turns):
        context_tokens += turn.new_tokens + turn.output_tokens
        if context_tokens > limit_tokens:
            return replace(plan, turns=plan.turns[:number])
    return plan
