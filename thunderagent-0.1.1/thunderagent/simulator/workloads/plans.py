"""A simulated program's plan: the interface between workloads and the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from thunderagent.programs.messages import ProgramLimits


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn and the tool that runs after it.

    `new_tokens` are appended to the context before the turn: the first prompt, without the prefix that it shares with
    others, and later the tool's result. Then `output_tokens` are generated, and then the tool `tool_name` runs for
    `tool_s` seconds. `role` is the agent whose turn it is; empty where a program has one only.
    """

    new_tokens: int
    output_tokens: int
    tool_s: float
    tool_name: str = "tool"
    role: str = ""


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """One program from its first turn to its release.

    Programs with the same `shared_prefix_id` begin with the same `shared_prefix_tokens` tokens. `arrival_s` is used by
    open loops only: seconds from the begin of the run. Programs with the same `group_id` finish together. `tenant` says
    who pays, and `parent_id` which program waits for this one. `outcome` is `success` or `failure`, where the workload
    says which it comes to. `limits` come with each of its turns.
    """

    program_id: str
    turns: tuple[TurnPlan, ...]
    shared_prefix_id: str = ""
    shared_prefix_tokens: int = 0
    arrival_s: float | None = None
    group_id: str = ""
    tenant: str = ""
    parent_id: str = ""
    outcome: str = ""
    limits: ProgramLimits | None = None


class Workload(Protocol):
    """A source of programs: the same `index` and `seed` always give the same plan, whatever was asked before."""

    @property
    def name(self) -> str:
        """Its name in reports."""

    def program(self, index: int, seed: int) -> ProgramPlan:
        """Return program number `index`, from 0."""


@runtime_checkable
class SandboxWorkload(Protocol):
    """A workload that also knows its programs' sandboxes."""

    def sandbox_preparation_s(self, index: int, seed: int) -> float | None:
        """Return how many seconds the sandbox of program `index` takes until tools can run; None: it needs none."""
