"""Settings that apply under any policy."""

# interpreted: they are sent to other processes, and a compiled class that is frozen cannot be unpickled

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits that apply under any policy."""

    idle_limit_s: float | None = None
    """A program whose tool runs longer gives its claim back; its next turn is simply placed again.

    None is what was learned of its tool: long beyond the time in which nearly all return, and 300 s at least, but never
    more than half of the forget limit."""
    forget_limit_s: float = 1800.0
    """A program not heard of for longer is dropped from the table."""
    no_replica_limit_s: float = 60.0
    """How long turns are held while no replica is usable; then they are rejected."""
    patience_margin_s: float = 1.0
    """A turn whose client would give up gets its lease at least this long before, for its answer."""
    patience_ratio: float = 0.25
    """The same as a ratio of its client's patience, if that is longer."""
    patience_overdraft_ratio: float = 0.5
    """How far programs let in regardless of room may exceed a replica's limit, as a ratio of the limit; one program may
    exceed it if nothing is overdrawn."""
    max_programs_count: int = 100_000
    """Programs that may live at a time; beyond, the oldest without a turn are forgotten, then new ones rejected."""
    tenant_max_programs_count: int = 50_000
    """The same for each tenant."""
    fair_tenants: bool = False
    """Whether waiting programs are ordered by what their tenant had (`tenants.py`)."""
    tenant_weight_ratios: Mapping[str, float] = field(default_factory=dict)
    """Tenants' weights; 1 for those that are not named."""
    judge_fail_count: int = 10
    """More verdicts of failure than this make a program's level the lowest: K_fail of ORBIT."""
    judge_confidence_ratio: float = 0.0
    """A verdict of failure counts as one if the judge is as sure of it."""
    judge_ends_hopeless: bool = False
    """Whether a program whose level becomes the lowest is ended."""
    provisions_replicas: bool = True
    """Whether somebody starts and ends replicas for a global policy; if not, its proposals are refused."""
