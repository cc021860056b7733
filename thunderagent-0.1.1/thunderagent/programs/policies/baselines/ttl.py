"""`ttl`: hold a program's memory for a fixed time while its tool runs, whatever the tool and whoever waits.

Theory of operation
===================
When a turn ends its program keeps its claim for `ttl_s` seconds. If its next turn comes earlier, it finds its history;
if not, the claim is taken, and the next turn is placed like that of a new program. An engine that pins the blocks of a
finished request for a fixed time works this way (Continuum with one TTL for all tools, arXiv 2511.02230).

Programs are let in where their claims fit beside all others, the oldest first. If programs still grow beyond the
capacity, some are paused at once: first those whose tools have run longest, then those with a turn in flight, the
youngest first, at the end of their turns.
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
class Ttl(Policy):
    """Hold the claim of an acting program for `ttl_s` seconds, `reserve_tokens` beside each program's context."""

    ttl_s: float = 10.0
    """Seconds that a program keeps its claim after a turn."""
    reserve_tokens: int = 256
    """Tokens added to each context: room for what the next turn adds."""
    name: ClassVar[str] = "ttl"
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        check_not_negative("ttl", self, "ttl_s", "reserve_tokens")

    @property
    def tick_s(self) -> float:
        """Return how late a claim may be taken: a twentieth of the time to live, between 0.1 and 1 s."""
        return min(1.0, max(0.1, self.ttl_s / 20))

    @property
    def claim_rules(self) -> ClaimRules:
        """Return the constant reserve."""
        return ClaimRules(reserve_tokens=self.reserve_tokens)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return the time to live."""
        return self.ttl_s

    def pause_rank(self, program: ProgramView) -> float:
        """Return the begin of its tool; with a turn in flight its age, the youngest first."""
        return program.acting_since_s if program.phase is Phase.ACTING else -program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time: first come, first served."""
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica, or one where its claim fits, if nobody older waits."""
        return FITTING.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:
        """Pause programs that are held too long or do not fit, and fill free room."""
        replicas = worth_a_look(view, moment)
        for replica in replicas:
            while (program := view.first_expired(replica)) is not None:
                if not view.propose_pause(program, Reason.POLICY):
                    break
            FITTING.relieve(view, replica)
        restore_waiting(view, self, replicas)
