# fixed_hold.py
from dataclasses import dataclass

from thunderagent.programs.policies.breakeven import BreakEven


@dataclass(frozen=True)
class FixedHold(BreakEven):
    fixed_s: float = 20.0
    name: str = "fixed_hold"

    def hold_s(self, view, program):
        return self.fixed_s
