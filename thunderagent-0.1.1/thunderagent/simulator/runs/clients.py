"""The senders of turns: the programs of a run, and the source of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from zlib import crc32

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import PrefixCut
from thunderagent.simulator.engine.records import EngineRequest
from thunderagent.simulator.figures.bounds import TurnShape
from thunderagent.simulator.figures.waits import ProgramWait
from thunderagent.simulator.runs.scenario import SAMPLED_PROGRAMS_COUNT, Scenario
from thunderagent.simulator.runs.tools import Sandbox
from thunderagent.simulator.workloads.contexts import TokenSpace
from thunderagent.simulator.workloads.plans import ProgramPlan, SandboxWorkload, TurnPlan, Workload


class RunningProgram:
    """One program of the run, from its first turn's arrival to its end."""

    __slots__ = (
        "_turn_number",
        "arrived_s",
        "context",
        "engine_priority",
        "granted_s",
        "is_held",
        "plan",
        "prefix",
        "replica_id",
        "sandbox",
        "says_release",
        "started_s",
        "turn_id",
        "wait",
    )

    def __init__(
        self, supplied: Supplied, tokens: TokenSpace, sandbox: Sandbox, started_s: float, bytes_per_token: float
    ) -> None:
        plan = self.plan = supplied.plan
        self.says_release = supplied.says_release
        self.prefix = _prefix_of(plan, bytes_per_token)
        self.context = tokens.open(plan.shared_prefix_id, plan.shared_prefix_tokens)
        self.sandbox = sandbox
        self.started_s = started_s
        self.turn_id = 0
        self.arrived_s = self.granted_s = 0.0
        self.is_held = False
        self.engine_priority = 0
        """Of its last turn."""
        self.replica_id = ""
        """Where its last turn ran; empty before its first one did."""
        self.wait = ProgramWait(outcome=plan.outcome, serial_id=supplied.serial_id)
        self._turn_number = 0

    def __repr__(self) -> str:
        return f"<RunningProgram {self.plan.program_id}: turn {self._turn_number + 1} of {len(self.plan.turns)}>"

    @property
    def turns_done_count(self) -> int:
        """Number of its finished turns."""
        return self._turn_number

    @property
    def turn(self) -> TurnPlan:
        """Its current turn."""
        return self.plan.turns[self._turn_number]

    @property
    def is_at_last_turn(self) -> bool:
        """Whether it ends with this turn."""
        return self._turn_number + 1 == len(self.plan.turns)

    def begin_turn(self, now_s: float) -> None:
        """Append to the context what the turn brings."""
        self.context.append(self.turn.new_tokens)
        self.arrived_s = now_s

    def request(self, *, retained: bool = False) -> EngineRequest:
        """Return the turn as a request to an engine; `retained`: keep its blocks for the next one."""
        context = self.context
        answer = context.following(self.turn.output_tokens)
        return EngineRequest(
            str(self.turn_id),
            context.tokens(),
            answer,
            self.engine_priority,
            keys=context.keys_with(answer),
            retain_id=self.plan.program_id if retained and not self.is_at_last_turn else "",
        )

    def shape(self) -> TurnShape:
        """Return what the turn is made of, after `begin_turn` and before `end_turn`."""
        plan, number = self.plan, self._turn_number
        gap_s = plan.turns[number - 1].tool_s if number else None
        turn = self.turn
        return TurnShape(len(self.context), turn.new_tokens, turn.output_tokens, plan.shared_prefix_tokens, gap_s)

    def own_block_keys(self) -> Sequence[int]:
        """Return the keys of its full blocks, without those of the prefix that it shares."""
        return self.context.keys[self.context.shared_blocks_count :]

    def end_turn(self) -> bool:
        """Append the answer to the context and go to the next turn; False if there is none."""
        self.context.append(self.turn.output_tokens)
        self._turn_number += 1
        return self._turn_number < len(self.plan.turns)


def _prefix_of(plan: ProgramPlan, bytes_per_token: float) -> tuple[PrefixCut, ...]:
    """Return the end of the program's shared prompt prefix: one cut, if it shares anything."""
    if not plan.shared_prefix_tokens:
        return ()
    digest = crc32(f"{plan.shared_prefix_id}/{plan.shared_prefix_tokens}".encode())
    return ((digest, int(plan.shared_prefix_tokens * bytes_per_token)),)


@dataclass(frozen=True, slots=True)
class Supplied:
    """A plan, its sandbox's preparation time (None: unknown, or none is needed), and whether it will be released."""

    serial_id: int
    plan: ProgramPlan
    sandbox_s: float | None
    says_release: bool = True


class Supply:
    """The plans of a workload one after the other, as many as the scenario's loop wants."""

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        self._workload = workload
        self._seed = scenario.seed
        self._release_ratio = scenario.release_ratio
        self._limit_count = None if scenario.loop == "closed" else scenario.programs_count
        self._needs_arrivals = scenario.loop == "open"
        self._supplied_count = 0
        self._check_some_fit(scenario)

    def _check_some_fit(self, scenario: Scenario) -> None:
        """Raise ConfigurationError if engines would refuse the first turns of all sampled programs."""
        limit_tokens = scenario.engine.context_limit_tokens
        least_tokens = inf
        for index in range(min(SAMPLED_PROGRAMS_COUNT, scenario.programs_count)):
            try:
                plan = self._workload.program(index, self._seed)
            except IndexError:
                break
            first = plan.turns[0] if plan.turns else None
            if first is not None:
                first_tokens = plan.shared_prefix_tokens + first.new_tokens + first.output_tokens
                least_tokens = min(least_tokens, first_tokens)
        if limit_tokens < least_tokens < inf:
            raise ConfigurationError(
                f"workload {self._workload.name}: the first turns of its programs need {least_tokens} tokens or more, "
                f"and an engine takes {limit_tokens}"
            )

    def next(self) -> Supplied | None:
        """Return the next plan; None after the last wanted one, or at the end of a recorded workload.

        Raises ConfigurationError for a plan that no engine could run, and for one without an arrival in an open loop.
        """
        index = self._supplied_count
        if index == self._limit_count:
            return None
        workload = self._workload
        try:
            plan = workload.program(index, self._seed)
        except IndexError:
            return None
        self._check(plan, index)
        self._supplied_count += 1
        sandbox_s = workload.sandbox_preparation_s(index, self._seed) if isinstance(workload, SandboxWorkload) else None
        return Supplied(index, plan, sandbox_s, self._says_release(index))

    def _says_release(self, index: int) -> bool:
        """Return whether the program will be released: drawn for each, the same in every run with that seed."""
        return Random(f"release/{self._seed}/{index}").random() < self._release_ratio  # noqa: S311 - seeded, not secret

    def _check(self, plan: ProgramPlan, index: int) -> None:
        wrong = "" if plan.turns else "has no turns"
        prompt_tokens = plan.shared_prefix_tokens
        for number, turn in enumerate(plan.turns, start=1):
            prompt_tokens += turn.new_tokens
            possible = turn.new_tokens >= 0 and turn.output_tokens >= 1 and prompt_tokens >= 1
            if not (possible and 0 <= turn.tool_s < float("inf")):
                wrong = wrong or f"turn {number} is impossible: {turn}"
        if self._needs_arrivals and plan.arrival_s is None:
            wrong = wrong or "has no arrival: simulate a closed loop or a batch"
        if wrong:
            raise ConfigurationError(f"workload {self._workload.name}, program {index} ({plan.program_id}): {wrong}")
