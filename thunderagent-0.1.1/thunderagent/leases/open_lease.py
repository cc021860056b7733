"""A lease while its holder has it: it comes back exactly once, whatever happens. And who grants leases."""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from thunderagent.leases import UNBOUNDED, Lease, Outcome, ReplicaMap, TurnAsk, TurnEnd
from thunderagent.programs.messages import Decision, Event, TurnProgressed, TurnStarted, TurnUnverified


class LeaseKeeper(Protocol):
    """Hears how a turn with a lease goes. Reports on an unknown turn change nothing."""

    def now_s(self) -> float:
        """Return monotonic seconds."""

    def dispatch(self, event: TurnUnverified | TurnStarted | TurnProgressed, /) -> object:
        """Hear what happened to it."""

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
        """Report that nobody trusted will report how it goes: nothing shared may be learned from it."""
        self._keeper.dispatch(TurnUnverified(self._keeper.now_s(), self.granted.turn_id))

    def started(self) -> None:
        """Report that the first byte of the answer arrived."""
        self._keeper.dispatch(TurnStarted(self._keeper.now_s(), self.granted.turn_id))

    def progressed(self, output_tokens: int) -> None:
        """Report about how many tokens were generated so far."""
        self._keeper.dispatch(TurnProgressed(self._keeper.now_s(), self.granted.turn_id, output_tokens))

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


class LeaseSource(Protocol):
    """Grants leases: the runtime of this process, or a link to a remote scheduler."""

    @property
    def replicas(self) -> ReplicaMap:
        """Return the replicas, as last pushed."""

    def now_s(self) -> float:
        """Return monotonic seconds."""

    def new_turn_id(self) -> int:
        """Return an id that no turn had before."""

    async def lease(self, ask: TurnAsk, while_held: AbstractContextManager[object] = UNBOUNDED) -> OpenLease:
        """Wait for permission to run one turn. `while_held` is entered if it is held, and left with the lease.

        Raises what `while_held` raises, and `ProgramReleasedError`, `ProgramHopelessError`, `ProgramLimitError`,
        `NoReplicaError`, `NoRoomInTimeError`, `TooManyProgramsError`, `TurnAbortedError`, `UnknownModelError` or
        `ShuttingDownError` if there will be none. Cancelling the wait takes the turn out of the queue.
        """

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica of a program, if that is up; None for a program without one, or an unknown one.

        With several pools it is that of the model's.
        """

    def tenant_of(self, program_id: str) -> str | None:
        """Return a live program's tenant; None if there is no such program."""

    def lives(self, program_id: str, generation: int) -> bool:
        """Return whether this incarnation of a program still lives."""

    def turns_count(self, replica_id: str) -> int:
        """Return how many turns have leases on a replica."""

    def aborted_ago_s(self, replica_id: str) -> float:
        """Return how long ago a trainer aborted what runs on a replica; infinite if never, or that is unknown here."""

    def release(self, program_id: str, generation: int | None = None, outcome: str = "") -> bool:
        """End a program; return False if there is none of that id and generation. Idempotent.

        `outcome` says how it ended: `success`, `failure`, or empty.
        """


class GrantsLeases(LeaseSource, Protocol):
    """Grants leases, and knows what programs claim."""

    def claim_tokens(self, program_id: str) -> int:
        """Return what a program claims, or would if it were let in; 0 if there is none of that id."""


class FleetSource(LeaseSource, Protocol):
    """The same, for the keeper of the replicas: it is told of them, and reports what it sees of them."""

    def observe(self, observer: Callable[[Event, Sequence[Decision]], None], *about: type) -> Callable[[], None]:
        """Call `observer` with each event, or with those that it is `about`; return a function that ends that."""

    def ids_serving(self, model: str) -> Collection[str]:
        """Return the replicas that serve a model. Raises `UnknownModelError`."""

    def replica_at(self, replica_id: str, url: str) -> None:
        """Set a replica's URL."""

    def replica_removed(self, replica_id: str) -> None:
        """Report that a replica is gone for good."""

    def replica_tripped(self, replica_id: str, *, tripped: bool, why: str = "") -> None:
        """Report that a replica that is up fails turn after turn, or that it may be tried again."""

    def replica_recovered(self, replica_id: str) -> None:
        """Report that a replica that was tripped has answered a turn well: it is no longer failing."""

    def replica_pressed(self, replica_id: str, for_s: float, why: str) -> None:
        """Report that a replica says it is full: it is granted nothing for that time."""
