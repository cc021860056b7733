"""`infercept`: hold memory through a tool while that wastes less than to compute it again; first come, first served.

Theory of operation
===================
InferCept (arXiv 2402.01869, sections 3.2, 4.2 to 4.4) counts *waste*: memory times time in which it does nothing.
While the tool of a program with C tokens runs for t seconds, beside programs whose turns run and have R tokens
together, and with β seconds to prefill a token:

    preserve  t · C                          discard, in chunks  β·C · C/2 + β·C · R        [Eq. 1 and 4, T_fwd linear]

The smaller is chosen [Eq. 5], anew in every iteration. Nobody knows t, so it is taken to be what has passed since the
tool began [4.4]: who stays away for long is paused in the end. In closed form, memory is preserved for

    t* = β · (C/2 + R)

and given up at once after that, whether somebody waits for it or not. R changes all the time, but for all programs of a
replica alike: so `hold_s` says β·C/2, and `balance` asks whether that was over β·R seconds ago, on every event. It
finds the first to pause without looking at the others.

Programs are let in where their claims fit, first come first served by the arrival of the program: InferCept keeps the
arrival of a request over all its interceptions, and what is a request there is a program here. Claims that grow over
the capacity are paused in the order of waste, those first that are nearest to their t*; then the youngest with a turn,
at its end.

β is learned unless `prefill_token_s` says it; the paper takes it from a table that is measured beforehand. Its third
way, to swap memory out while the engine computes, only an engine has: with it, what is discarded here would be
swapped as far as the budget of an iteration goes, the largest waste first. A proxy does not choose the chunks in
which an engine prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.places import Phase
from thunderagent.programs.model.policy import ClaimRules, Moment, Placement
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView, ReplicaView
from thunderagent.programs.policies.fitting import Fitting
from thunderagent.programs.policies.helpers import restore_waiting, worth_a_look
from thunderagent.programs.policies.setting_checks import check_not_negative

FITTING = Fitting()


@dataclass(frozen=True, slots=True)
class InferCept:
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
