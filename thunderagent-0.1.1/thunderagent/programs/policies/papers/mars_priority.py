"""`mars`, the engine priority and the order: levels by what is still to compute, and promotion by waiting.

Theory of operation
===================
The agent-centric order of "MARS: Efficient, Adaptive Co-Scheduling for Heterogeneous Agentic Systems" (arXiv
2604.26963), as far as it is known when a turn is granted. There are `level_count` levels; level 0 is served first. A
turn's level is the higher of two:

- by **context**: the tokens of its prompt that are not expected in memory. Up to `first_level_tokens` is level 0, and
  each level reaches to four times as many tokens as the one before: 2,048, 8,192, 32,768. So a program that returns
  from its tool to a warm cache is at level 0, however long its history is.
- by **service**: what engines computed for its program in the last `window_s`, on the same scale times `served_ratio`.
  A program that was served much comes behind those that were not.

A waiting turn is **promoted** by one level for each `promote_s`, so the wait of the lowest level is bounded. For the
engine that is the time since the turn arrived. In the paused queue ranks must not change while a program waits. So it
is expressed the other way round: the rank is the time at which the turn began to wait plus `promote_s` for each level.

The paper has the levels, the window of served tokens and the bounded promotion. The marks, four levels and 30 s are
from the authors' preview code (Afterglow231/MARS_preview), which keeps them in the engine: there a level falls while a
prompt is computed, each level computes a bounded number of tokens per iteration, and the levels order what runs in each
iteration. An engine that takes a priority with a request can do none of that; the one in `benchmarks/mlfq.py` does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import GpuEnd, GpuSubmit, ProgramEnd, Signal, ToolEnd
from thunderagent.programs.policy import EnginePriority, Order, ProgramView, View
from thunderagent.programs.state.program import Phase

LEVEL_FACTOR = 4
"""Each level reaches to this many times the tokens of the one before."""


def level_of(tokens: float, first_level_tokens: float = 2048, level_count: int = 4) -> int:
    """Return the level of this many tokens, from 0."""
    level, reach_tokens = 0, first_level_tokens
    while level < level_count - 1 and tokens > reach_tokens:
        level += 1
        reach_tokens *= LEVEL_FACTOR
    return level


@dataclass(frozen=True, slots=True)
class MarsOrder(Order):
    """Restore by level, and by the begin of a turn's wait."""

    first_level_tokens: int = 2048
    """The first level ends here; each further one is four times as large."""
    level_count: int = 4
    """Levels."""
    promote_s: float = 30.0
    """Waiting this long is worth a level."""
    name: ClassVar[str] = "mars"

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        _check("order", self.first_level_tokens, self.level_count, self.promote_s)

    def restore_rank(self, program: ProgramView) -> float:
        """Return the begin of the wait plus its level's worth; for an acting program, the begin of its tool."""
        if program.phase is Phase.REASONING:
            since_s = program.waiting_since_s
        else:
            since_s = max(program.opened_s, program.acting_since_s)
        return since_s + self.promote_s * level_of(program.claim_tokens, self.first_level_tokens, self.level_count)


@dataclass(slots=True)
class MarsPriority(EnginePriority):
    """Give each turn its level, less its waiting time."""

    first_level_tokens: int = 2048
    """The first level ends here; each further one is four times as large."""
    level_count: int = 4
    """Levels."""
    promote_s: float = 30.0
    """Waiting this long is worth a level."""
    window_s: float = 30.0
    """Seconds of service that count."""
    served_ratio: float = 4.0
    """Divides what was computed for the program in that time."""
    _served: deque[tuple[float, str, int]] = field(default_factory=deque, init=False)
    _served_tokens: dict[str, int] = field(default_factory=dict, init=False)
    _returned_s: dict[str, float] = field(default_factory=dict, init=False)
    _submitted: tuple[str, float] = field(default=("", 0.0), init=False)
    name: ClassVar[str] = "mars"

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        _check("priority", self.first_level_tokens, self.level_count, self.promote_s)
        if not (self.window_s >= 0 and self.served_ratio > 0):
            raise ConfigurationError("priority mars: window_s must be 0 or more, and served_ratio over 0")

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the level of the turn that was just submitted, and of its program."""
        submitted_id, remaining_tokens = self._submitted
        if submitted_id != program.program_id:
            remaining_tokens = program.claim_tokens
        self._forget(view.now_s)
        served_tokens = self._served_tokens.get(program.program_id, 0) / self.served_ratio
        level = level_of(max(remaining_tokens, served_tokens), self.first_level_tokens, self.level_count)
        waited_s = view.now_s - max(program.opened_s, self._returned_s.get(program.program_id, 0.0))
        return max(0, level - int(waited_s / self.promote_s))

    def observe(self, view: View, signal: Signal) -> None:
        """Record what is to be computed, what was, and which programs came back."""
        if isinstance(signal, GpuSubmit):
            program, replica = view.program(signal.program_id), view.replica(signal.replica_id)
            known = program is not None and replica is not None
            resident_tokens = view.resident_tokens(program, replica) if known else 0  # type: ignore[arg-type]
            self._returned_s[signal.program_id] = signal.now_s - signal.held_s
            self._submitted = signal.program_id, max(0, signal.projected_tokens - resident_tokens)
        elif isinstance(signal, GpuEnd) and signal.computed_tokens > 0:
            self._served.append((signal.now_s, signal.program_id, signal.computed_tokens))
            tokens = self._served_tokens.get(signal.program_id, 0)
            self._served_tokens[signal.program_id] = tokens + signal.computed_tokens
            self._forget(signal.now_s)
        elif isinstance(signal, ToolEnd):
            self._returned_s[signal.program_id] = signal.now_s
        elif isinstance(signal, ProgramEnd):
            self._returned_s.pop(signal.program_id, None)

    def _forget(self, now_s: float) -> None:
        """Drop service from before the window."""
        while self._served and self._served[0][0] <= now_s - self.window_s:
            _, program_id, tokens = self._served.popleft()
            left_tokens = self._served_tokens[program_id] - tokens
            if left_tokens > 0:
                self._served_tokens[program_id] = left_tokens
            else:
                del self._served_tokens[program_id]


def _check(kind: str, first_level_tokens: int, level_count: int, promote_s: float) -> None:
    if not (first_level_tokens >= 1 and level_count >= 1 and level_count % 1 == 0 and promote_s > 0):
        raise ConfigurationError(
            f"{kind} mars: first_level_tokens and level_count must be at least 1, and promote_s over 0"
        )
