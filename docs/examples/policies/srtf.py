# srtf.py
from dataclasses import dataclass

from thunderagent.programs.policy import GlobalPolicy


@dataclass(frozen=True)
class Srtf(GlobalPolicy):
    period_s: float = 1.0
    name: str = "srtf"

    def decide(self, view):
        for program in view.newly_waiting():
            view.propose_priority(program, -program.turn_count)
