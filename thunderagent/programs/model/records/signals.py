"""The information stream: what a controller of GPUs and tools must hear, in one vocabulary.

Names and fields are those of MARS, section 4.1 and Table 1. `ProgramEnd` is added, so that parts with their own state
know what to forget. Signals follow from the events that the scheduler handles anyway, in the same order, and need
nothing from clients: a running tool follows from the turn that ended. The scheduler gives each signal to its policy
(`observe`, if it has one) and to listeners at the runtime; if there is neither, it makes none. Those of each turn have
a constructor of their own, which can be compiled: a dataclass's own cannot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, init=False)
class GpuSubmit:
    """A turn goes to a replica; `projected_tokens` of KV cache are expected for its prompt and answer.

    `held_s` is how long it waited for that.
    """

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    projected_tokens: int
    held_s: float = 0.0

    def __init__(
        self,
        now_s: float,
        program_id: str,
        turn_id: int,
        replica_id: str,
        projected_tokens: int,
        held_s: float = 0.0,
    ) -> None:
        self.now_s = now_s
        self.program_id = program_id
        self.turn_id = turn_id
        self.replica_id = replica_id
        self.projected_tokens = projected_tokens
        self.held_s = held_s


@dataclass(slots=True)
class GpuFirstToken:
    """The first token of a turn arrived, `launch_delay_s` after the turn went to its replica."""

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    launch_delay_s: float


@dataclass(slots=True, init=False)
class GpuEnd:
    """A turn is over, `served_s` after it went to its replica.

    `freed_tokens` of KV cache are no longer referenced; `computed_tokens` of them were not cached, and were prefilled
    or generated. `finished` False is a turn that failed or whose client left.
    """

    now_s: float
    program_id: str
    turn_id: int
    replica_id: str
    freed_tokens: int
    computed_tokens: int
    served_s: float
    finished: bool

    def __init__(
        self,
        now_s: float,
        program_id: str,
        turn_id: int,
        replica_id: str,
        freed_tokens: int,
        computed_tokens: int,
        served_s: float,
        finished: bool,
    ) -> None:
        self.now_s = now_s
        self.program_id = program_id
        self.turn_id = turn_id
        self.replica_id = replica_id
        self.freed_tokens = freed_tokens
        self.computed_tokens = computed_tokens
        self.served_s = served_s
        self.finished = finished


@dataclass(slots=True)
class ToolNum:
    """The number of programs at a tool now, and the mean of recent tool times; 0 until one came back."""

    now_s: float
    tool_count: int
    mean_tool_s: float


@dataclass(slots=True)
class ToolStart:
    """A program's tool began; its name is empty if unknown."""

    now_s: float
    program_id: str
    tool: str


@dataclass(slots=True)
class ToolEnd:
    """A program's tool has ended."""

    now_s: float
    program_id: str
    tool: str
    duration_s: float


@dataclass(slots=True)
class WindowUpdate:
    """An admission policy changed how many programs it lets in; `why` is its own word for the cause."""

    now_s: float
    window_count: int
    admitted_count: int
    why: str


@dataclass(slots=True)
class ProgramEnd:
    """A program ended; `turn_count` turns of it were granted."""

    now_s: float
    program_id: str
    turn_count: int


Signal = GpuSubmit | GpuFirstToken | GpuEnd | ToolNum | ToolStart | ToolEnd | WindowUpdate | ProgramEnd
