"""Gives signals to the policy and to listeners; it makes none that nobody wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunderagent.programs.book.book import Book
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.records.signals import (
    GpuEnd,
    GpuFirstToken,
    GpuSubmit,
    ProgramEnd,
    Signal,
    ToolEnd,
    ToolNum,
    ToolStart,
)
from thunderagent.programs.model.turn import Turn
from thunderagent.programs.policy import Observe, View

Listener = Callable[[Signal], None]


class Stream:
    """The information stream of one scheduler."""

    __slots__ = ("_book", "_knowledge", "_listeners", "_observers", "_observes_all", "_view", "flows", "flows_whole")

    def __init__(
        self, book: Book, knowledge: Knowledge, view: View, observers: Sequence[Observe], *, observes_all: bool
    ) -> None:
        """Start without listeners; `observers` of the policy hear, with its `view`, all signals, or turns and ends."""
        self._book = book
        self._knowledge = knowledge
        self._observers = tuple(observers)
        self._listeners: tuple[Listener, ...] = ()
        self._view = view
        self._observes_all = bool(observers) and observes_all
        self.flows = bool(observers)
        """Whether anybody wants signals of turns and of programs' ends: check before making one."""
        self.flows_whole = self._observes_all
        """Whether anybody wants signals of tools and of first tokens, too."""

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each new signal; return a function that ends that."""
        self._listeners = (*self._listeners, listener)
        self.flows = self.flows_whole = True

        def stop() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            self.flows = bool(self._observers) or bool(self._listeners)
            self.flows_whole = self._observes_all or bool(self._listeners)

        return stop

    def send(self, signal: Signal) -> None:
        """Send a signal to the policy and to listeners."""
        for observe in self._observers:
            observe(self._view, signal)
        for listener in self._listeners:
            listener(signal)

    def submitted(self, program: Program, turn: Turn) -> None:
        """Report that a turn goes to its replica."""
        now_s, projected_tokens = self._book.now_s, turn.prompt_tokens + program.reserve_tokens
        account_id, held_s = turn.account_id or "", now_s - turn.arrived_s
        self.send(GpuSubmit(now_s, program.program_id, turn.turn_id, account_id, projected_tokens, held_s))

    def began(self, turn: Turn) -> None:
        """Report that the first token of a turn arrived."""
        if turn.program is not None:
            now_s, program_id, account_id = self._book.now_s, turn.program.program_id, turn.account_id or ""
            self.send(GpuFirstToken(now_s, program_id, turn.turn_id, account_id, now_s - turn.granted_s))

    def ended(self, turn: Turn, freed_tokens: int, computed_tokens: int, *, finished: bool) -> None:
        """Report that a turn is over, if it was in flight."""
        if turn.account_id is None or turn.program is None:
            return
        now_s, program_id, account_id = self._book.now_s, turn.program.program_id, turn.account_id
        served_s = now_s - turn.granted_s
        self.send(
            GpuEnd(now_s, program_id, turn.turn_id, account_id, freed_tokens, computed_tokens, served_s, finished)
        )

    def lost(self, turn: Turn) -> None:
        """Report the end of a turn without usage: what it computed is a guess."""
        whole_tokens = turn.prompt_tokens + turn.output_tokens
        self.ended(turn, whole_tokens, whole_tokens - turn.resident_tokens, finished=False)

    def tool_began(self, program: Program) -> None:
        """Report that a program's tool began."""
        self.send(ToolStart(self._book.now_s, program.program_id, program.tool))
        self.tools_changed()

    def tool_ended(self, program: Program) -> None:
        """Report that a program's tool ended."""
        self.send(ToolEnd(self._book.now_s, program.program_id, program.tool, program.away_s))
        self.tools_changed()

    def tools_changed(self) -> None:
        """Report how many tools run."""
        self.send(ToolNum(self._book.now_s, self._knowledge.tools_running_count, self._knowledge.mean_tool_s))

    def program_ended(self, program: Program) -> None:
        """Report that a program ended."""
        self.send(ProgramEnd(self._book.now_s, program.program_id, program.turn_count))
