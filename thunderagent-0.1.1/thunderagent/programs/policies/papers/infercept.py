"""`infercept`: hold memory through a tool while that wastes less than computing it again; first come, first served.

Theory of operation
===================
InferCept (arXiv 2402.01869, sections 3.2, 4.2 to 4.4) counts *waste*: memory times the time in which it does nothing.
The tool of a program with C tokens runs for t seconds, beside programs whose turns run and have R tokens together. With
β seconds to prefill a token, the waste is:

    preserve  t · C                          discard, in chunks  β·C · C/2 + β·C · R        [Eq. 1 and 4, T_fwd linear]

The smaller is chosen [Eq. 5], again in every iteration. Nobody knows t, so the time since the tool began is used [4.4]:
a program that stays away for long is paused in the end. In closed form, memory is preserved for

    t* = β · (C/2 + R)

and given up at once after that, whether somebody waits for it or not. R changes all the time, but equally for all
programs of a replica. So `hold_s` returns β·C/2, and `balance` checks on every event whether that was over β·R seconds
ago. It finds the first to pause without checking the others.

Programs are let in where their claims fit, in order of the program's arrival: InferCept keeps a request's arrival over
all its interceptions, and its request is a program here. If claims grow over the capacity, programs are paused in the
order of waste, those nearest to their t* first; then the youngest with a turn, at its end.

β is learned unless `prefill_token_s` sets it; the paper takes it from a table measured beforehand. Only an engine has
its third way, swapping memory out while the engine computes: with it, what is discarded here would be swapped within
the budget of an iteration, the largest waste first. A proxy does not choose the chunks in which an engine prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.fitting import Fitting
from thunderagent.programs.policies.helpers import check_not_negative, restore_waiting, worth_a_look
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Phase

FITTING = Fitting()


@dataclass(frozen=True, slots=True)
class InferCept(Policy):
    """Hold by minimal waste, `reserve_tokens` beside each program's context."""

    prefill_token_s: float = 0.0
    """Seconds to prefill a token; 0: as learned."""
    reserve_tokens: int = 256
    """Tokens added to each context: room for what the next turn adds."""
    name: ClassVar[str] = "infercept"
    tick_s: ClassVar[float] = 0.25
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        check_not_negative("infercept", self, "prefill_token_s", "reserve_tokens")

    @property
    def claim_rules(self) -> ClaimRules:
        """Return the constant reserve."""
        return ClaimRules(reserve_tokens=self.reserve_tokens)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return the program's own part of t*: β·C/2."""
        return self._prefill_token_s(view) * program.context_tokens / 2

    def pause_rank(self, program: ProgramView) -> float:
        """Return when its t* begins to be over; with a turn in flight its age, the youngest first."""
        return program.hold_until_s if program.phase is Phase.ACTING else -program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time: first come, first served."""
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica, or one where its claim fits, if nobody older waits."""
        return FITTING.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:
        """Pause programs that are cheaper to recompute or do not fit, and fill free room."""
        replicas = worth_a_look(view, moment)
        for replica in replicas:
            self._pause_expired(view, replica)
            FITTING.relieve(view, replica)
        restore_waiting(view, self, replicas)

    def _pause_expired(self, view: View, replica: ReplicaView) -> None:
        """Pause programs whose t* is over, given what runs there now."""
        while (program := view.first_expired(replica)) is not None:
            others_s = self._prefill_token_s(view) * replica.account.reasoning_tokens
            if view.now_s < program.hold_until_s + others_s or not view.propose_pause(program, Reason.EXPIRED):
                return

    def _prefill_token_s(self, view: View) -> float:
        return self.prefill_token_s or view.prefill_token_s
