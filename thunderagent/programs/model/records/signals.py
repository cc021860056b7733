"""The information stream: what a controller of GPUs and tools must hear, in one vocabulary.

The names and fields are those of MARS, section 4.1 and Table 1, besides `ProgramEnd`, by which parts with a state of
their own know what to forget. They follow from the events that the scheduler handles
anyway, in the same order, and need nothing from clients: that a tool runs is known from the turn that ended. The
scheduler gives each to its policy (`observe`, where it has one) and to whoever listens at the runtime; if there is
neither, none is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GpuSubmit:
    """A turn goes to a replica: `projected_tokens` of KV cache are expected for its prompt and its answer.

    `held_s` is how long it waited for that.
    """

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    projected_tokens: int
    held_s: float = 0.0


@dataclass(slots=True)
class GpuFirstToken:
    """The first token of a turn came, `launch_delay_s` after it went to its replica."""

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    launch_delay_s: float


@dataclass(slots=True)
class GpuEnd:
    """A turn is over, `served_s` after it went to its replica.

    `freed_tokens` of KV cache are referenced no longer; `computed_tokens` of them were not found in the cache, and were
    prefilled or generated. `finished` False is a turn that failed or whose client left.
    """

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    freed_tokens: int
    computed_tokens: int
    served_s: float
    finished: bool


@dataclass(slots=True)
class ToolNum:
    """So many programs are at a tool now, and tools took `mean_tool_s` lately; 0 until one came back."""

    now_s: float
    tool_count: int
    mean_tool_s: float


@dataclass(slots=True)
class ToolStart:
    """A program's tool began; its name is empty where it is not known."""

    now_s: float
    program_id: str
    tool: str


@dataclass(slots=True)
class ToolEnd:
    """A program's tool is through."""

    now_s: float
    program_id: str
    tool: str
    duration_s: float


@dataclass(slots=True)
class WindowUpdate:
    """An admission policy changed how many programs it lets in; `why` is a word of its own."""

    now_s: float
    window_count: int
    admitted_count: int
    why: str


@dataclass(slots=True)
class ProgramEnd:
    """A program ended, after so many turns that were granted."""

    now_s: float
    program_id: str
    turn_count: int


Signal = GpuSubmit | GpuFirstToken | GpuEnd | ToolNum | ToolStart | ToolEnd | WindowUpdate | ProgramEnd
