# lpt.py
from dataclasses import dataclass

from thunderagent.programs.policy import GlobalPolicy


@dataclass(frozen=True)
class Lpt(GlobalPolicy):
    period_s: float = 1.0
    name: str = "lpt"

    def decide(self, view):
        for program in view.newly_waiting():
            computed_tokens = program.prompt_tokens_total - program.cached_tokens_total + program.output_tokens_total
            view.propose_priority(program, -computed_tokens // 1000)
