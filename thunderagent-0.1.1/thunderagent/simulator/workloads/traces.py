"""Recorded programs: how much of a recording is used, and a workload that replays them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from random import Random
from typing import Annotated, TypeVar

import msgspec

from thunderagent.errors import TraceError
from thunderagent.simulator.workloads.plans import ProgramPlan

Count = Annotated[int, msgspec.Meta(ge=0)]
Prompt = Annotated[int, msgspec.Meta(ge=1)]
Duration = Annotated[float, msgspec.Meta(ge=0)]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a recording is replayed.

    A program ends before its first turn that would need more than `context_tokens`, prompt and output together. Longer
    absences than `away_s` are cut to it: people have lunch. None is no limit.
    """

    context_tokens: int | None = None
    away_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded programs, and what was changed about them to make them plans.

    `dropped_programs_count` had no turn within the limit of the context; `dropped_turns_count` are all turns beyond it,
    theirs too. `reset_count` is how often a program began anew, `shortened_count` how many absences were cut.
    """

    programs: tuple[ProgramPlan, ...]
    dropped_programs_count: int = 0
    dropped_turns_count: int = 0
    reset_count: int = 0
    shortened_count: int = 0

    def __str__(self) -> str:
        """Return in one line what there is and what was dropped."""
        turns_count = sum(len(program.turns) for program in self.programs)
        return (
            f"{len(self.programs)} programs, {turns_count} turns; over the context limit: {self.dropped_turns_count} "
            f"turns dropped, {self.dropped_programs_count} programs with all of theirs; "
            f"{self.reset_count} context resets, {self.shortened_count} absences shortened"
        )


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Recorded programs as a workload: each once in an order that the seed gives, then all of them again.

    With `in_order_of_arrival`, for an open loop, the order is that of the recorded arrivals, if there are any: then all
    seeds are the same, and each round begins one mean gap after the end of the last.
    """

    name: str
    trace: Trace
    in_order_of_arrival: bool = True
    _in_order: tuple[ProgramPlan, ...] = field(init=False, compare=False, repr=False)
    _round_s: float | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        programs = self.trace.programs
        if not programs:
            raise TraceError(f"{self.name}: no program is left to replay ({self.trace})")
        arrivals_s = [program.arrival_s for program in programs if program.arrival_s is not None]
        round_s = None
        if self.in_order_of_arrival and len(arrivals_s) == len(programs):
            programs = tuple(sorted(programs, key=lambda program: program.arrival_s or 0.0))
            span_s = max(arrivals_s) - min(arrivals_s)
            # A round takes some time in any case, otherwise an open loop would never end.
            round_s = span_s + max(span_s / max(1, len(programs) - 1), 1.0)
        object.__setattr__(self, "_in_order", programs)
        object.__setattr__(self, "_round_s", round_s)

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""
        round_count, place = divmod(index, len(self._in_order))
        if self._round_s is None:
            plan = self._in_order[_shuffled(self.name, seed, len(self._in_order))[place]]
        else:
            plan = self._in_order[place]
            plan = replace(plan, arrival_s=(plan.arrival_s or 0.0) + round_count * self._round_s)
        return replace(plan, program_id=f"{plan.program_id}~{round_count}") if round_count else plan


@functools.lru_cache(maxsize=32)
def _shuffled(name: str, seed: int, count: int) -> list[int]:
    return Random(f"{name}/{seed}").sample(range(count), count)  # noqa: S311 - loads are seeded, not secret
