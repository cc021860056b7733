# oldest_first.py
from dataclasses import dataclass

from thunderagent.programs.policies.papers.thunderagent import ThunderAgent


@dataclass(frozen=True)
class OldestFirst(ThunderAgent):
    name: str = "oldest_first"

    def pause_rank(self, program):  # the lowest rank is paused first
        return -program.opened_s

    def restore_rank(self, program):
        return program.opened_s
