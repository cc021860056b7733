"""What holds whatever the policy is, as somebody set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits that hold whatever the policy is."""

    idle_limit_s: float | None = None
    """A program whose tool runs longer gives its claim back; its next turn is simply placed again.

    None is what was learned of its tool: long beyond the time in which nearly all return, and 300 s at least, but never
    more than half of the forget limit."""
    forget_limit_s: float = 1800.0
    """A program that was not heard of for longer is dropped from the table."""
    no_replica_limit_s: float = 60.0
    """Turns are held for so long while no replica is usable, then rejected."""
    patience_margin_s: float = 1.0
    """A turn whose client would give up gets its lease so long before, at least: for its answer."""
    patience_ratio: float = 0.25
    """The same as a part of its client's patience, where that is longer."""
    patience_overdraft_ratio: float = 0.5
    """How much more than its limit a replica may take of who is let in whether there is room or not, as a part of
    that; one program may exceed it where nothing is overdrawn."""
    max_programs_count: int = 100_000
    """Programs that may live at a time; past that the oldest without a turn are forgotten, then new ones rejected."""
    tenant_max_programs_count: int = 50_000
    """The same for each tenant."""
    fair_tenants: bool = False
    """Whether who waits is ordered by what its tenant had (`tenants.py`)."""
    tenant_weight_ratios: Mapping[str, float] = field(default_factory=dict)
    """How much more than others some may have; 1 for those that are not named."""
    judge_fail_count: int = 10
    """More verdicts of failure than this make a program's level the lowest: K_fail of ORBIT."""
    judge_confidence_ratio: float = 0.0
    """A verdict of failure counts as one if the judge is as sure of it."""
    judge_ends_hopeless: bool = False
    """Whether a program whose level becomes the lowest is ended."""
    provisions_replicas: bool = True
    """Whether somebody starts and ends replicas where a global policy wants it; else its proposals are refused."""
