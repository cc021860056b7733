"""`oracle`: the clairvoyant hold-or-drop, the policy behind the bound L1; it needs a known future.

Theory of operation
===================
When a turn ends, the oracle knows how long the tool will run. If that is shorter than a threshold, the program keeps
its claim; if not, its claim goes at once and its next turn computes everything again. The threshold is the best one of
the bound (`bounds.py`), which trades the memory for holding against the time for recomputing.

It maximises throughput alone. Programs are let in oldest first, and the rest is filled with the oldest that fits, so a
large program may wait for long. A little headroom stays for growth. If held claims still grow beyond the capacity, the
smallest go: they free enough, and are the cheapest to compute again. A prefix that all programs share is counted once.

A real engine keeps the blocks of dropped or ended programs until they are the oldest, and so loses others that were to
be held. The oracle avoids that: its runs are on engines that drop what it drops (`Scenario.engines_drop`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.fitting import Fitting
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Phase


@dataclass(frozen=True, slots=True, eq=False)
class Oracle(Policy):
    """Hold a program's claim if its tool runs for less than `hold_below_s`.

    `foresight` says of each program for how many seconds the tool after its turn will run; `Simulation` fills it.
    """

    foresight: Mapping[str, float]
    hold_below_s: float
    fitting: Fitting
    reserve_tokens: int = 0
    name: ClassVar[str] = "oracle"
    tick_s: ClassVar[float] = 1.0

    @property
    def claim_rules(self) -> ClaimRules:
        """Return the constant reserve."""
        return ClaimRules(reserve_tokens=self.reserve_tokens)

    def hold_s(self, view: View, program: ProgramView) -> float:  # noqa: ARG002 - the protocol's
        """Return infinity: `balance` drops programs at once that are not to be held."""
        return inf

    def pause_rank(self, program: ProgramView) -> float:
        """Rank programs first that are not to be held, then the smallest."""
        held = program.phase is Phase.REASONING or self._is_held(program)
        return program.claim_tokens if held else -1.0

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time: the oldest first."""
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica, or one where its claim fits, if nobody older waits."""
        return self.fitting.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:  # noqa: ARG002 - the protocol's
        """Drop programs that are not to be held, or do not fit, and fill free room."""
        for replica in view.replicas:
            while (program := view.first_to_pause(replica)) is not None and not self._is_held(program):
                view.propose_pause(program, Reason.POLICY)
            self.fitting.relieve(view, replica)
        if view.replicas:
            self._refill(view)

    def _refill(self, view: View) -> None:
        """Restore waiting programs, oldest first, skipping those that do not fit."""
        for program in list(view.waiting()):
            placement = self.fitting.find_room(view, program, view.replicas)
            if placement.replica is not None:
                view.propose_restore(program, placement.replica, placement.reason)

    def _is_held(self, program: ProgramView) -> bool:
        return self.foresight.get(program.program_id, inf) < self.hold_below_s
