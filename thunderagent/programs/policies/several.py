"""Several global policies: each is asked in its own period, in the order in which they are named."""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.policies.parts import GlobalPolicy


class Several:
    """All of them are asked. What one changed, those after it see."""

    def __init__(self, policies: Sequence[GlobalPolicy]) -> None:
        """Have `policies` asked, of which there is at least one."""
        self.policies = tuple(policies)
        self.name = "+".join(policy.name for policy in self.policies)
        self.period_s = min(policy.period_s for policy in self.policies)

    def __repr__(self) -> str:
        return f"<Several {self.name}>"
