"""Leases of a remote scheduler: a gateway's substitute for a runtime.

Theory of operation
===================
`RemoteRuntime` is to the proxy what `Runtime` is in a single process: it grants leases, hears how turns go, and has the
replicas as last pushed. It answers questions from what it carried itself, and reports what happens elsewhere to
replicas and programs to its observers, as the events that the core would have received.

Turns that wait without a scheduler keep waiting, until they *fail open* (`failing_open.py`).

The socket belongs to `dialling.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from math import inf
from time import monotonic

import structlog

from thunderagent.errors import ShuttingDownError, ThunderAgentError
from thunderagent.leases import UNBOUNDED, Lease, TurnAsk, TurnEnd
from thunderagent.leases.open_lease import OpenLease
from thunderagent.programs.messages import TurnProgressed, TurnStarted, TurnUnverified
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.gateway.failing_open import FailingOpen
from thunderagent.scale.gateway.fleet import RemoteFleet
from thunderagent.scale.gateway.known import KnownProgram, KnownPrograms
from thunderagent.scale.messages import (
    Digest,
    Frame,
    Gone,
    Hold,
    Lead,
    Look,
    Message,
    Polled,
    PollShare,
    Refusal,
    Replicas,
    Revoke,
)

log = structlog.get_logger("thunderagent.scale")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How a gateway does without a scheduler."""

    patience_s: float = 30.0
    """How long turns wait for a scheduler to come back."""
    fail_open_turns_count: int = 64
    """How many then run on each replica."""
    grace_s: float = 30.0
    """How long a shutdown waits for turns in flight."""


Answer = Lease | None
"""None is a held turn."""


class RemoteRuntime:
    """Asks a remote scheduler. All methods belong to one event loop."""

    def __init__(
        self,
        turns: CarriedTurns,
        settings: RemoteSettings,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Carry `turns`."""
        self.turns = turns
        self.settings = settings
        self.fleet = RemoteFleet(clock)
        self.replicas = self.fleet.replicas
        self.observe = self.fleet.observe
        self.ids_serving = self.fleet.ids_serving
        self.now_s = clock
        self.on_polls: Callable[[PollShare | Look | None], None] = lambda _word: None
        """Called with what this gateway is to poll; None: nothing, because there is no link."""
        self.on_revoke: Callable[[str, int, str], object] = lambda _program_id, _turn_id, _code: None
        """Called with a program's turn that must end here, because it was retried elsewhere."""
        self.polls_count: Callable[[], int] = lambda: 0
        """Returns how many engines are polled from here."""
        self.all_told = asyncio.Event()
        """Set while the link's scheduler has heard of all turns, or there is no link."""
        self.all_told.set()
        self.news = asyncio.Event()
        """Set when there is something to send."""
        self.outcome_counts: Counter[str] = Counter()
        """Number of turns by outcome."""
        self.prompt_tokens_total = self.output_tokens_total = self.cached_tokens_total = 0
        """Of finished turns, as far as engines reported their usage."""
        self.leases_count = 0
        self.closing = self.leaving = False
        self._turn_ids = count(1)
        self._waiters: dict[int, asyncio.Future[Answer]] = {}
        self._refusals: dict[int, Refusal] = {}
        self._held: dict[int, TurnAsk] = {}
        """Turns known to be held, in order."""
        self._known = KnownPrograms()
        self._counts: Counter[str] = Counter()
        """Turns in flight from here, by replica."""
        self.alone = FailingOpen(
            turns,
            self.fleet,
            self._known,
            patience_s=settings.patience_s,
            turns_count=settings.fail_open_turns_count,
            clock=clock,
        )
        """Grants here while there is no scheduler."""
        self._no_lease_left = asyncio.Event()
        self._no_lease_left.set()

    def __repr__(self) -> str:
        return f"<RemoteRuntime: {self.leases_count} leases, {self.held_count} held, {self.turns!r}>"

    @property
    def why_not_ready(self) -> str:
        """Return why no turn would be served now; empty if one would."""
        if self.leaving or self.closing:
            return "shutting down"
        if not self.turns.is_led and not self.alone.is_on:
            return "there is no link to a scheduler"
        return "" if self.replicas.open_ids else "no replica is up"

    @property
    def held_count(self) -> int:
        """Number of turns that wait for a lease."""
        return len(self._waiters)

    def new_turn_id(self) -> int:
        """Return an id that no turn of this gateway had before."""
        return next(self._turn_ids)

    # --- leases

    async def lease(self, ask: TurnAsk, while_held: AbstractContextManager[object] = UNBOUNDED) -> OpenLease:
        """Wait for permission to run one turn; see `LeaseSource`."""
        if self.closing:
            raise ShuttingDownError("the proxy is shutting down")
        turn_id = ask.turn_id
        self.all_told.clear()
        self.turns.asked(ask, self.now_s())
        self.news.set()
        try:
            lease = await self._answer(turn_id) if self.turns.is_led else None
            if lease is None:
                lease = await self._wait(ask, while_held)
        except BaseException as error:
            self._give_up(turn_id, error)
            raise
        finally:
            self._waiters.pop(turn_id, None)
            self._refusals.pop(turn_id, None)
        self._begins(ask, lease)
        return OpenLease(self, lease)

    async def _answer(self, turn_id: int) -> Answer:
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiters[turn_id] = waiter
        return await waiter

    async def _wait(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> Lease:
        """Wait as a held turn: for this scheduler, for another one, or to run without."""
        self._check_refusal(ask.turn_id)
        row = self.turns.rows[ask.turn_id]
        self._held[ask.turn_id] = ask
        try:
            with while_held:
                self.look()
                while row.lease is None:
                    await self._answer(ask.turn_id)
                    self._check_refusal(ask.turn_id)
                return row.lease
        finally:
            self._held.pop(ask.turn_id, None)

    def _check_refusal(self, turn_id: int) -> None:
        """Raise a refusal that came together with the message that its turn is held: it removed the row."""
        if (refusal := self._refusals.get(turn_id)) is not None:
            raise error_of(refusal)

    def _give_up(self, turn_id: int, error: BaseException) -> None:
        """Report that nobody waits for a turn any more; its lease may have come at the same moment."""
        self.outcome_counts["abandoned" if isinstance(error, asyncio.CancelledError) else "rejected"] += 1
        row = self.turns.rows.get(turn_id)
        if row is not None and row.lease is not None:
            self.alone.came(row.lease)
            self.turns.ended(TurnEnd(turn_id, row.ask.program_id, row.lease.generation, "abandoned"))
        else:
            self.turns.left(turn_id)
        self.news.set()

    def _begins(self, ask: TurnAsk, lease: Lease) -> None:
        self.leases_count += 1
        self._no_lease_left.clear()
        self.alone.came(lease)
        self._counts[lease.replica_id] += 1
        if ask.program_id is not None:
            self._known.note(ask.program_id, KnownProgram(lease.replica_id, ask.tenant, lease.generation))

    def look(self) -> None:
        """Let turns run without a scheduler, if there has been none for long; call it now and then."""
        for lease in self.alone.grants(self._held, self._counts, self.home_of):
            self._tell(lease.turn_id, lease)

    # --- links

    def linked(self) -> None:
        """Begin a link, and queue everything to report."""
        self.turns.linked(self.now_s(), self.fleet.tripped_ids)
        if self.turns.rows:
            self.all_told.clear()
        self.news.set()

    def unlinked(self) -> None:
        """End a link: waiters for an answer count as held."""
        self.alone.alone()
        self.turns.unlinked()
        self.on_polls(None)
        self.all_told.set()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
        self.look()

    def take(self, frame: Frame) -> None:
        """Process a received frame. Raises `BadFrameError`."""
        for message in self.turns.take(frame):
            self._take(message)
        if not self.turns.rows:
            self.all_told.set()
        if self.turns.has_news:
            self.news.set()

    def _take(self, message: Message) -> None:
        match message:
            case Lease():
                self._tell(message.turn_id, message)
            case Hold():
                self._tell(message.turn_id, None)
            case Refusal():
                waiter = self._waiters.get(message.turn_id)
                if waiter is not None and not waiter.done():
                    waiter.set_exception(error_of(message))
                elif waiter is not None:  # it is told just now that it is held
                    self._refusals[message.turn_id] = message
            case Lead():
                if (alone_s := self.alone.led()) is not None:
                    log.info("scheduler_leads", epoch=self.turns.epoch, alone_s=alone_s)
            case Replicas():
                self.fleet.take(message)
            case Revoke():
                self.on_revoke(message.program_id, message.turn_id, message.code)
            case Gone():
                self._program_gone(message.program_id)
            case PollShare() | Look():
                self.on_polls(message)
            case _:
                pass  # the table handles acknowledgements

    def _tell(self, turn_id: int, answer: Answer) -> None:
        waiter = self._waiters.get(turn_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _program_gone(self, program_id: str) -> None:
        known = self._known.gone(program_id)
        if known is not None:
            self.fleet.program_gone(program_id, known.generation)

    # --- what the proxy asks; see `FleetSource`

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica of a program's last turn from this gateway, if that is up."""
        known = self._known.get(program_id)
        if known is None or (model and self.replicas.has_pools and not self.fleet.serves(known.replica_id, model)):
            return None
        return known.replica_id if self.replicas.is_up(known.replica_id) else None

    def tenant_of(self, program_id: str) -> str | None:
        """Return the tenant of a program whose turns this gateway carried."""
        known = self._known.get(program_id)
        return known.tenant if known is not None else None

    def lives(self, program_id: str, generation: int) -> bool:
        """Return whether no end of this incarnation of a program was reported."""
        known = self._known.get(program_id)
        return known is not None and known.generation == generation

    def turns_count(self, replica_id: str) -> int:
        """Return how many turns have leases on a replica, from here."""
        return self._counts[replica_id]

    def aborted_ago_s(self, replica_id: str) -> float:
        """Return how long ago the scheduler said that a trainer aborted what runs on a replica; infinite if never."""
        return self.now_s() - self.fleet.aborted_s.get(replica_id, -inf)

    def release(self, program_id: str, generation: int | None = None, outcome: str = "") -> bool:
        """Ask the scheduler to end a program; return False if this gateway carried no turn of it."""
        known = self._known.get(program_id) is not None
        self.turns.released(program_id, generation, outcome)
        self.news.set()
        return known

    def replica_at(self, replica_id: str, url: str) -> None:
        """Do nothing: this gateway was told of it itself."""

    def replica_removed(self, replica_id: str) -> None:
        """Do nothing for a removed replica: this gateway was told of it itself."""
        self.fleet.tripped_ids.discard(replica_id)

    def replica_pressed(self, replica_id: str, for_s: float, why: str) -> None:  # noqa: ARG002 - the protocol's
        """Tell the scheduler that a replica says it is full."""
        self._seen(replica_id, f"pressed {for_s:.3f}")

    def replica_tripped(self, replica_id: str, *, tripped: bool, why: str = "") -> None:  # noqa: ARG002
        """Tell the scheduler that a replica fails turn after turn, or may be tried again."""
        (self.fleet.tripped_ids.add if tripped else self.fleet.tripped_ids.discard)(replica_id)
        self._seen(replica_id, "tripped" if tripped else "tried")

    def replica_recovered(self, replica_id: str) -> None:
        """Tell the scheduler that a replica that was tried has answered well."""
        self._seen(replica_id, "recovered")

    def suspect(self, replica_id: str) -> None:
        """Ask the scheduler to check a replica, because a request just failed there."""
        self._seen(replica_id, "failed")

    def refused(self, replica_id: str) -> None:
        """Ask the scheduler to check a replica, because it refused a connection; others may reach it."""
        self._seen(replica_id, "refused")

    def _seen(self, replica_id: str, what: str) -> None:
        self.say(Digest(replica_id, what))

    def say(self, word: Digest | Polled) -> None:
        """Report to the scheduler what was seen or found here, if there is one."""
        self.turns.seen(word)
        self.news.set()

    # --- what becomes of a turn with a lease; see `LeaseKeeper`

    def dispatch(self, event: TurnUnverified | TurnStarted | TurnProgressed, /) -> None:
        """Tell the scheduler what happened to a turn."""
        output_tokens = event.output_tokens if isinstance(event, TurnProgressed) else 0
        self.turns.progressed(event.turn_id, output_tokens, unverified=isinstance(event, TurnUnverified))
        self.news.set()

    def ended(self, end: TurnEnd) -> None:
        """Take a lease back, and tell the scheduler."""
        row = self.turns.rows.get(end.turn_id)
        assert row is not None, f"turn {end.turn_id} ends that was not asked for"
        assert row.lease is not None, f"turn {end.turn_id} ends without a lease"
        replica_id = row.lease.replica_id
        self._counts[replica_id] -= 1
        self.leases_count -= 1
        self.outcome_counts["errored" if end.is_error else end.outcome] += 1
        if end.outcome == "finished":
            self.prompt_tokens_total += end.prompt_tokens or 0
            self.output_tokens_total += end.output_tokens or 0
            self.cached_tokens_total += end.cached_tokens or 0
        self.turns.ended(end)
        self.news.set()
        if not self.leases_count:
            self._no_lease_left.set()
        self.look()

    async def close(self) -> None:
        """Ask for nothing more, reject waiting turns, let turns in flight end within the grace period."""
        self.closing = True
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(ShuttingDownError("the proxy is shutting down; the turn was not forwarded"))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self.settings.grace_s):
                await self._no_lease_left.wait()
        except TimeoutError:
            log.warning("grace_period_over", leases_count=self.leases_count, grace_s=self.settings.grace_s)


def error_of(refusal: Refusal) -> ThunderAgentError:
    """Return the error of a scheduler's refusal."""
    error = _ERRORS.get(refusal.code, ThunderAgentError)(refusal.message)
    error.retry_after_s = refusal.retry_after_s
    return error


def _all_errors(of: type[ThunderAgentError]) -> dict[str, type[ThunderAgentError]]:
    found = {of.code: of}
    for each in of.__subclasses__():
        if each.__init__ is ThunderAgentError.__init__:
            found = {**_all_errors(each), **found}
    return found


_ERRORS = _all_errors(ThunderAgentError)
"""Errors created from their message alone, by code."""
