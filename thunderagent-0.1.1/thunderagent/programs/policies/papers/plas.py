"""`plas` and `atlas`: least attained service first, as a priority of engines and as an order.

Theory of operation
===================
Autellix (arXiv 2502.13965, Algorithm 1) ranks a call by the service that its program attained in earlier calls.
Programs that took little so far are likely to end soon, so putting them first lowers the mean over programs, without
knowing how long any of them will be. Service is divided into K ranges, the *levels*; inside a level it is first come,
first served. A new call begins at the level of its program, not at the first.

- PLAS: the service of a program is the sum over its calls.
- ATLAS: it is the longest chain of calls. A turn inherits the program's service when it goes to an engine. When it
  ends, the program's service is the larger of its old value and the inherited service plus the turn's own. For programs
  that take one turn at a time both are the same.
- Against starvation a call goes to the first level while its program waited beta (`starved_ratio`) times as long as it
  was served. Both times are kept, so a starving program is moved up until it has caught up.

The numbers for K, the ranges and beta are chosen here. They are those of a public re-implementation, the baseline of
MARS' authors: four levels from 0, 2,048, 8,192 and 32,768 tokens on, beta 2. As there, service counts tokens that an
engine computed: uncached prompt tokens, and generated ones. The times for beta are seconds, from the signals: a turn
waited until it was granted, and in the engine until its first token, less its prefill at the learned speed; if no first
token is seen it was served all the time.

A proxy sets the priority once, when the turn is granted. Only an engine can move a call down while it runs, when its
level's quantum is used up, move a waiting one up, and swap out those that are not in the batch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import GpuEnd, GpuFirstToken, GpuSubmit, ProgramEnd, Signal, ToolEnd, ToolStart
from thunderagent.programs.policies.helpers import check_whole_from_one
from thunderagent.programs.policy import EnginePriority, Order, ProgramView, View
from thunderagent.programs.state.program import Phase

LEVEL_S = 1e9
"""Distance of two levels in the paused queue; inside a level the time of arrival orders."""


@dataclass(slots=True)
class _Turn:
    """A turn in flight: the service that it inherited, and the time to its first token if seen."""

    inherited_tokens: int
    launch_delay_s: float = 0.0


@dataclass(slots=True)
class _Attained:
    """What a program got. `waits` says whether its next turn's wait counts: the others run beside that one."""

    service_tokens: int = 0
    service_s: float = 0.0
    wait_s: float = 0.0
    waits: bool = True
    turns: dict[int, _Turn] = field(default_factory=dict)


@dataclass(slots=True)
class Plas(Order, EnginePriority):
    """`level_count` ranges of attained service: up to `first_tokens`, and each later one `ratio` times as far.

    A program that waited `starved_ratio` times as long as it was served goes to the first; `inf`: never.
    """

    level_count: int = 4
    """Levels; 0 is served first."""
    first_tokens: int = 2048
    """The second level begins here."""
    ratio: float = 4.0
    """Each later level begins this many times further."""
    starved_ratio: float = 2.0
    """A program that waited this many times as long as it was served goes to the first level; `inf`: never."""
    critical_path: bool = False
    """Count the longest chain of turns instead of the sum."""
    _bounds: list[float] = field(init=False, repr=False)
    _attained: dict[str, _Attained] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        check_whole_from_one(self.name, self, "level_count")
        if not (self.first_tokens > 0 and self.ratio > 1 and self.starved_ratio > 0):
            raise ConfigurationError(
                f"{self.name}: needs first_tokens over 0, ratio over 1 and starved_ratio over 0, "
                f"not {self.first_tokens}, {self.ratio} and {self.starved_ratio}"
            )
        self._bounds = [self.first_tokens * self.ratio**level for level in range(self.level_count - 1)]

    @property
    def name(self) -> str:
        """Return the paper's name."""
        return "atlas" if self.critical_path else "plas"

    def level(self, program_id: str) -> int:
        """Return the level of a program's next call; 0 is served first. Cost: O(log levels)."""
        attained = self._attained.get(program_id)
        if attained is None:
            return 0
        if attained.service_s > 0 and attained.wait_s >= self.starved_ratio * attained.service_s:
            return 0
        return bisect_right(self._bounds, attained.service_tokens)

    def engine_priority(self, view: View, program: ProgramView) -> int:
        """Return the level: an engine serves those of one level in order of arrival."""
        return self.level(program.program_id)

    def restore_rank(self, program: ProgramView) -> float:
        """Return the level, then the arrival of the turn; for an acting program, its own arrival."""
        came_s = program.waiting_since_s if program.phase is Phase.REASONING else program.opened_s
        return self.level(program.program_id) * LEVEL_S + came_s

    def observe(self, view: View, signal: Signal) -> None:
        """Count service and waiting."""
        if isinstance(signal, GpuSubmit):
            self._submit(signal)
        elif isinstance(signal, GpuFirstToken):
            turn = self._of(signal.program_id).turns.get(signal.turn_id)
            if turn is not None:
                turn.launch_delay_s = signal.launch_delay_s
        elif isinstance(signal, GpuEnd):
            self._end(view, signal)
        elif isinstance(signal, ToolEnd | ToolStart):
            self._of(signal.program_id).waits = isinstance(signal, ToolEnd)
        elif isinstance(signal, ProgramEnd):
            self._attained.pop(signal.program_id, None)

    def _of(self, program_id: str) -> _Attained:
        return self._attained.setdefault(program_id, _Attained())

    def _submit(self, signal: GpuSubmit) -> None:
        attained = self._of(signal.program_id)
        if attained.waits:
            attained.wait_s += signal.held_s
            attained.waits = False
        attained.turns[signal.turn_id] = _Turn(attained.service_tokens)

    def _end(self, view: View, signal: GpuEnd) -> None:
        attained = self._of(signal.program_id)
        turn = attained.turns.pop(signal.turn_id, None) or _Turn(attained.service_tokens)
        waited_s = max(0.0, turn.launch_delay_s - signal.computed_tokens * view.prefill_token_s)
        attained.wait_s += waited_s
        attained.service_s += signal.served_s - waited_s
        if self.critical_path:
            chain_tokens = turn.inherited_tokens + signal.computed_tokens
            attained.service_tokens = max(attained.service_tokens, chain_tokens)
        else:
            attained.service_tokens += signal.computed_tokens


Atlas = partial(Plas, critical_path=True)
"""The same for programs with several turns at a time."""
