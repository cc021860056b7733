"""Several global policies as one: each is asked in its own period, in the order in which they are named."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from thunderagent.programs.policies.base import View
from thunderagent.programs.policies.parts import GlobalPolicy, next_due_s


class Several:
    """Ask all of them. What one changed, those after it see."""

    def __init__(self, policies: Sequence[GlobalPolicy]) -> None:
        """Ask `policies`, of which there is at least one."""
        self._policies = tuple(policies)
        self._due_s = [-inf] * len(self._policies)
        self.name = "+".join(policy.name for policy in self._policies)
        self.period_s = min(policy.period_s for policy in self._policies)

    def __repr__(self) -> str:
        return f"<Several {self.name}>"

    def decide(self, view: View) -> None:
        """Ask those whose time has come."""
        for place, policy in enumerate(self._policies):
            if view.now_s >= self._due_s[place]:
                self._due_s[place] = next_due_s(self._due_s[place], view.now_s, policy.period_s)
                policy.decide(view)
