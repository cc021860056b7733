"""Compute what turns and programs of `benchmarks.load` would take alone, and how many were in time by that.

A turn's ideal time is that of the engine model (`Engines.alone_s`) with the constants of the engine that the load ran
on: an idle engine with all of the program's history in its cache. A program's ideal is that of its turns and its tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import LoadResult, LoadSpec, TurnRecord, plan_program
from thunderagent.simulator.figures.bounds import Engines, turn_shapes
from thunderagent.simulator.figures.figures import Goodput
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

MARKER_TOKENS = 1
"""Markers of `real_model`'s chat template: one before each message, and one before the answer."""


@dataclass(frozen=True)
class StandardLoad:
    """The programs of `benchmarks.load` as the simulator sees them: token counts and times."""

    spec: LoadSpec
    name: str = "standard load"

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program `index`; the seed is the spec's."""
        assert seed == self.spec.seed
        plan = plan_program(self.spec, index)
        turns = tuple(
            TurnPlan(
                # The marker of the first user message belongs to the part that all programs share.
                new_tokens=len(turn.prompt.split()) + (2 if number else 1) * MARKER_TOKENS,
                output_tokens=turn.output_tokens,
                tool_s=turn.tool_s,
            )
            for number, turn in enumerate(plan.turns)
        )
        return ProgramPlan(
            program_id=plan.program_id,
            turns=turns,
            shared_prefix_id=f"system-{self.spec.seed}",
            shared_prefix_tokens=self.spec.system_tokens + 2 * MARKER_TOKENS,
        )


def goodputs(result: LoadResult, engines: Engines) -> tuple[Goodput, ...]:
    """Return the parts in time of the window's turns, and of the programs whose last turn ended in it."""
    load = StandardLoad(result.spec)
    by_program: dict[int, list[TurnRecord]] = {}
    for record in result.records:
        by_program.setdefault(record.program_index, []).append(record)
    turns_s, programs_s = [], []
    for index, records in by_program.items():
        shapes = list(turn_shapes(load.program(index, result.spec.seed)))
        alone_s = [engines.alone_s(shape) for shape in shapes]
        turns_s += [
            (record.latency_s, alone_s[record.turn_index]) for record in records if result.has_in_window(record)
        ]
        first, last = records[0], records[-1]
        if last.turn_index == len(shapes) - 1 and result.has_in_window(last):
            tools_s = sum(shape.gap_s or 0.0 for shape in shapes)
            programs_s.append((last.end_s - first.start_s, sum(alone_s) + tools_s))
    return Goodput.of_all(turns_s, programs_s, result.window_end_s - result.window_start_s)


def goodput_figures(found: Sequence[Goodput]) -> dict[str, float]:
    """Return the parts of turns and programs by name, for JSON."""
    return {
        f"goodput_{kind}_ratio_{each.alpha_ratio:g}": ratio
        for each in found
        for kind, ratio in (("turns", each.turn_ratio), ("programs", each.program_ratio))
    }
