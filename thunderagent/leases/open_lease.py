"""A lease while its holder has it: it comes back exactly once, whatever happens."""

# compiled: each turn passes here

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from thunderagent.leases import Lease, Outcome, TurnEnd


class LeaseKeeper(Protocol):
    """Hears how a turn with a lease goes. Reports on an unknown turn change nothing."""

    def unverified(self, turn_id: int) -> None:
        """Record that nobody trusted will report how it goes: nothing shared may be learned from it."""

    def started(self, turn_id: int) -> None:
        """Record that the first byte of the answer arrived."""

    def progressed(self, turn_id: int, output_tokens: int) -> None:
        """Record about how many tokens were generated so far."""

    def ended(self, end: TurnEnd) -> None:
        """Take a lease back."""


class OpenLease:
    """A held lease. Use it in a `with` block and end it with the result.

    It ends exactly once, by the first report; leaving its block ends it as abandoned. So a handler that is cancelled,
    or raises, always returns its lease.
    """

    __slots__ = ("_ended", "_keeper", "granted")

    def __init__(self, keeper: LeaseKeeper, granted: Lease) -> None:
        """Hold the grant, until its end is reported to `keeper`."""
        self._keeper = keeper
        self._ended = False
        self.granted = granted

    def __repr__(self) -> str:
        granted = self.granted
        return f"<Lease of turn {granted.turn_id} on {granted.replica_id}{', ended' if self._ended else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self.abandoned()

    def unverified(self) -> None:
        """Mark further reports on this turn as a stranger's."""
        self._keeper.unverified(self.granted.turn_id)

    def started(self) -> None:
        """Report that the first byte of the answer arrived."""
        self._keeper.started(self.granted.turn_id)

    def progressed(self, output_tokens: int) -> None:
        """Report about how many tokens were generated so far."""
        self._keeper.progressed(self.granted.turn_id, output_tokens)

    def finished(
        self,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        tool: str = "",
    ) -> None:
        """End it: the answer is complete, with this usage as far as the engine reported it, and calls this tool."""
        if not self._ended:
            self._ended, of = True, self.granted
            usage = prompt_tokens, output_tokens, cached_tokens
            self._keeper.ended(TurnEnd(of.turn_id, of.program_id, of.generation, "finished", *usage, tool))

    def failed(self, cause: str = "") -> None:
        """End it: the replica failed the turn, for that cause."""
        self._end("failed", verdict="infrastructure_failed" if cause else "", cause=cause)

    def errored(self, verdict: str, cause: str) -> None:
        """End it: the engine reported an error inside its answer."""
        self._end("failed", is_error=True, verdict=verdict, cause=cause)

    def refused(self, verdict: str = "", cause: str = "") -> None:
        """End it: the engine refused the turn; without a verdict it is tried again."""
        self._end("refused", verdict=verdict, cause=cause)

    def abandoned(self) -> None:
        """End it: the client left."""
        self._end("abandoned")

    def _end(
        self,
        outcome: Outcome,
        *,
        is_error: bool = False,
        verdict: str = "",
        cause: str = "",
    ) -> None:
        if not self._ended:
            self._ended, of = True, self.granted
            about = of.turn_id, of.program_id, of.generation
            self._keeper.ended(TurnEnd(*about, outcome, is_error=is_error, verdict=verdict, cause=cause))
