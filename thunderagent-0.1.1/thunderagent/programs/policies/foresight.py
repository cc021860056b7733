"""Whether memory is short, and for how much growth of each program room is left where one is let in: `breakeven`."""

# compiled: it is asked of everybody who waits where memory is short

from __future__ import annotations

from math import hypot

from thunderagent.programs.state.program import Program
from thunderagent.programs.state.replica import Replica
from thunderagent.programs.transitions import SchedulerView


def foreseen_tokens(view: SchedulerView, program: Program, replica: Replica, foresight_ratio: float) -> float:
    """Return how much growth of each program on a replica must have room if `program` is let in there.

    In t seconds it uses c·t + r·t²/2 of memory. If it is paused then, c + r·t tokens are computed again, each worth
    holding for the break-even time T. Until t = (r·T - c + √(c² + r²·T²)) / r that does not pay.
    """
    rate, claim_tokens = view.growth_tokens_per_s, program.claim_tokens
    grown_tokens = rate * foresight_ratio * view.break_even_s(replica.replica_id)
    return grown_tokens - claim_tokens + hypot(claim_tokens, grown_tokens)


def is_short(view: SchedulerView, program: Program, low_ratio: float) -> bool:
    """Return whether memory is short: all programs that are in or wait, each of mean size, do not fit.

    The mean size is that of `program` plus the growth that programs were seen to have. It is too large for one that
    has grown already, and infinite until some programs ended.
    """
    count = view.active_count + max(1, view.waiting_count)
    room_tokens = low_ratio * sum([replica.account.limit_tokens for replica in view.replicas])
    return count * (program.claim_tokens + view.mean_growth_tokens) > room_tokens
