"""Policies, each one file, and their names."""

from __future__ import annotations

from collections.abc import Callable

from thunderagent.programs.policies.base import Policy
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.cap import Cap
from thunderagent.programs.policies.passthrough import Passthrough
from thunderagent.programs.policies.sticky import Sticky
from thunderagent.programs.policies.thunderagent import ThunderAgent
from thunderagent.programs.policies.ttl import Ttl

POLICIES: dict[str, Callable[..., Policy]] = {
    "breakeven": BreakEven,
    "cap": Cap,
    "passthrough": Passthrough,
    "sticky": Sticky,
    "thunderagent": ThunderAgent,
    "ttl": Ttl,
}
