"""`orbit-step` and `orbit-judge`: programs likely to succeed are served before those likely to fail.

Theory of operation
===================
Agents that fail take many turns, agents that succeed take few: on GAIA with Magentic-One 45 against 10 in the median.
If served in order of arrival, a few lost ones delay the many that would soon end. ORBIT puts them behind.

- `orbit-step` takes the length of a program as the sign that it fails: its number is ⌊turns / `window_count`⌋, and the
  lower number comes first.
- `orbit-judge` asks a judge (`state/program.py`): its number is the program's level, high 0 to lowest 3, and
  that of `orbit-step` until there is a verdict. So without a judge, or with one that never answers, both are the same.

Of equal numbers, the turn that is expected to generate less comes first, by its agent's role; then the one that
arrived first. Turns are those of the whole program, over all its branches and sub-agents, granted before this one.

An engine takes one number, and breaks ties by arrival itself: number and expected length are packed into one that fits
in 31 bits. The paused queue does the same. Neither changes while a turn waits: a role's expected output is read when
the turn arrives, and a verdict ranks the program again.

Source: the priorities, the window of 10 and the ties are ORBIT's; packing them into one number is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.policies.helpers import check_whole_from_one
from thunderagent.programs.policy import EnginePriority, Order, ProgramView, View

MAX_LENGTH_TOKENS = 2**16 - 1
MAX_LEVEL_COUNT = 2**15 - 1


@dataclass(frozen=True, slots=True)
class OrbitStep(Order, EnginePriority):
    """Programs with fewer turns come first, in steps of `window_count`."""

    window_count: int = 10
    """Turns in a step."""
    name: ClassVar[str] = "orbit-step"

    def __post_init__(self) -> None:
        """Reject a window without a turn."""
        check_whole_from_one(self.name, self, "window_count")

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the number of a turn that is granted now, which already counts."""
        return _encoded(self._step(program.turn_count - 1), program)

    def restore_rank(self, program: ProgramView) -> float:
        """Return the number of the first waiting turn."""
        return _encoded(self._step(program.turn_count), program)

    def _step(self, turns_before_count: int) -> int:
        return max(0, turns_before_count) // self.window_count


@dataclass(frozen=True, slots=True)
class OrbitJudge(Order, EnginePriority):
    """Programs that a judge expects to succeed come first; without a verdict, as in `orbit-step`."""

    window_count: int = 10
    """Turns in a step, until there is a verdict."""
    name: ClassVar[str] = "orbit-judge"

    def __post_init__(self) -> None:
        """Reject what `orbit-step` rejects."""
        OrbitStep(self.window_count)

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the number of a turn that is granted now."""
        if program.level is None:
            return OrbitStep(self.window_count).engine_priority(view, program)
        return _encoded(program.level, program)

    def restore_rank(self, program: ProgramView) -> float:
        """Return the number of the first waiting turn."""
        if program.level is None:
            return OrbitStep(self.window_count).restore_rank(program)
        return _encoded(program.level, program)


def _encoded(step_count: int, program: ProgramView) -> int:
    """Pack a step or level, lower first, and the expected length, shorter first, into 31 bits."""
    length_tokens = min(program.expected_output_tokens, MAX_LENGTH_TOKENS)
    return min(step_count, MAX_LEVEL_COUNT) * (MAX_LENGTH_TOKENS + 1) + length_tokens
