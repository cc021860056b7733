"""Connects gateways to a scheduler's runtime: carries out what they say, and reports the decisions to them.

A held turn is a task that waits in `Runtime.lease`, like an HTTP handler. Turns that came before grants may begin go on
a few at a time, so that the first grants are sent before the last turn is processed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from msgspec.structs import replace

from thunderagent.errors import InvalidProgramIdError, ShuttingDownError, ThunderAgentError
from thunderagent.leases import TurnAsk, TurnEnd
from thunderagent.programs.messages import (
    ProgramOpened,
    ResidencyReported,
    TurnProgressed,
    TurnStarted,
    TurnUnverified,
)
from thunderagent.programs.state.health import MOST_PRESSURE_S
from thunderagent.proxy.fleet.replicas import Watcher
from thunderagent.proxy.reading.header_words import check_names
from thunderagent.runtime import Runtime
from thunderagent.scale.messages import Card, Digest, Progress, Released, Running
from thunderagent.scale.scheduler.gateways import Gateways

SLICE_COUNT = 50
"""Turns waiting for grants to begin that go on without yielding to others."""


class Granting:
    """Grants by a runtime; see `Grants`. All methods belong to one event loop."""

    gateways: Gateways
    """The gateways to notify."""

    def __init__(self, runtime: Runtime, watcher: Watcher) -> None:
        """Grant nothing until `open` is called."""
        self._early: deque[asyncio.Event] | None = deque()
        """What early turns wait for; None: grants have begun."""
        self._opening: asyncio.Task[None] | None = None
        self._runtime = runtime
        self._watcher = watcher
        self._waits: dict[int, asyncio.Task[None]] = {}
        self._uncounted: dict[int, Running] = {}
        """Turns running where nothing can be counted now."""
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<Granting: {len(self._waits)} wait, {len(self._uncounted)} to be counted>"

    @property
    def is_open(self) -> bool:
        """Whether grants have begun."""
        return self._early is None

    def open(self) -> None:
        """Start to grant, in order of arrival."""
        early, self._early = self._early, None
        if early and _lets_some_go_on(early):
            self._opening = asyncio.create_task(_let_go_on(early))

    def count_late(self) -> None:
        """Count turns that can be counted by now."""
        for turn_id, running in list(self._uncounted.items()):
            self.adopted(turn_id, running)

    def close(self) -> None:
        """Release all waiters."""
        self._is_closing = True
        if self._opening is not None:
            self._opening.cancel()
        for task in self._waits.values():
            task.cancel()

    def new_turn_id(self) -> int:
        """Return the runtime's next number."""
        return self._runtime.new_turn_id()

    def asked(self, turn_id: int, ask: TurnAsk) -> None:
        """Wait for a lease, in a task."""
        self._waits[turn_id] = asyncio.create_task(self._lease(turn_id, ask))

    async def _lease(self, turn_id: int, ask: TurnAsk) -> None:
        try:
            check_names(ask)
            if self._early is not None:
                self.gateways.held(turn_id)
                self._early.append(asyncio.Event())
                await self._early[-1].wait()
            lease = await self._runtime.lease(ask, _Held(self.gateways, turn_id))
        except ThunderAgentError as error:
            if not isinstance(error, ShuttingDownError):  # its gateway keeps it for the next scheduler
                self.gateways.refused(turn_id, error.code, error.message, error.retry_after_s)
        else:
            if not self.gateways.granted(turn_id, lease.granted):
                lease.abandoned()
        finally:
            self._waits.pop(turn_id, None)

    def adopted(self, turn_id: int, running: Running) -> None:
        """Count a turn that already runs, now or as soon as possible."""
        ask, replica_id = replace(_named(running.ask), turn_id=turn_id), running.lease.replica_id
        state = self._runtime.replicas.get(replica_id)
        grants = state is not None and state.is_open and not state.suspended_for
        if not grants or not self._runtime.adopt(ask, replica_id):
            self._uncounted[turn_id] = running
            return
        self._uncounted.pop(turn_id, None)
        tell, now_s = self._runtime.dispatch, self._runtime.now_s()
        if running.unverified:
            tell(TurnUnverified(now_s, turn_id))
        if running.started:
            tell(TurnStarted(now_s, turn_id))
        if running.output_tokens:
            tell(TurnProgressed(now_s, turn_id, running.output_tokens))

    def progressed(self, turn_id: int, progress: Progress) -> None:
        """Tell the runtime, now or when the turn is counted."""
        if (running := self._uncounted.get(turn_id)) is not None:
            unverified = running.unverified or progress.unverified
            output_tokens = max(running.output_tokens, progress.output_tokens)
            started = running.started or not progress.unverified
            self._uncounted[turn_id] = replace(
                running, unverified=unverified, started=started, output_tokens=output_tokens
            )
            return
        now_s = self._runtime.now_s()
        if progress.unverified:
            self._runtime.dispatch(TurnUnverified(now_s, turn_id))
        elif progress.output_tokens:
            self._runtime.dispatch(TurnProgressed(now_s, turn_id, progress.output_tokens))
        else:
            self._runtime.dispatch(TurnStarted(now_s, turn_id))

    def ended(self, turn_id: int, end: TurnEnd) -> None:
        """Return its lease, or count its usage if it had none here."""
        if self._uncounted.pop(turn_id, None) is not None:
            self._runtime.count_end(replace(end, turn_id=turn_id))
        else:
            self._runtime.ended(replace(end, turn_id=turn_id))

    def left(self, turn_id: int) -> None:
        """Take a turn out of the queue."""
        task = self._waits.pop(turn_id, None)
        if task is not None:
            task.cancel()

    def tried_again(self, turn_id: int) -> None:
        """Count it as replaced by the next attempt."""
        self._runtime.tried_again(turn_id)

    def abort(self, program_id: str, code: str) -> int:
        """Have gateways end the turns of a program that run, with that error; return how many."""
        own_ids = [each for program in self._runtime.pools.incarnations(program_id) for each in program.in_flight]
        return sum([self.gateways.abort(own_id, program_id, code) for own_id in own_ids])

    def released(self, word: Released) -> None:
        """End a program."""
        self._runtime.release(word.program_id, word.generation, word.outcome)

    def card(self, card: Card) -> None:
        """Register a program that another scheduler knew, and where its cache is."""
        runtime = self._runtime
        named = TurnAsk(
            turn_id=0,
            program_id=card.program_id,
            group_id=card.group_id,
            parent_id=card.parent_id,
            tenant=card.tenant,
            program_class=card.program_class,
        )
        if card.program_id in runtime.programs or not _is_named(named):
            return
        opened = (card.program_id, card.group_id, card.parent_id, card.tenant, card.program_class)
        runtime.dispatch(ProgramOpened(runtime.now_s(), *opened))
        if runtime.replicas.is_up(card.replica_id):
            resident = ((card.program_id, card.tokens),)
            runtime.dispatch(ResidencyReported(runtime.now_s(), card.replica_id, resident))

    def seen(self, digest: Digest) -> None:
        """Have a replica polled: it may be this gateway alone that does not reach it."""
        if digest.seen in {"refused", "failed"}:
            self._watcher.suspect(digest.replica_id)
        elif digest.seen.startswith("pressed ") and not self._is_closing:
            for_s = _seconds_of(digest.seen)
            if for_s is not None:
                self._runtime.replica_pressed(digest.replica_id, for_s, "it says that it is full")

    def tripped(self, replica_id: str, *, tripped: bool) -> None:
        """Tell the runtime."""
        if not self._is_closing:
            self._runtime.replica_tripped(replica_id, tripped=tripped)

    def recovered(self, replica_id: str) -> None:
        """Tell the runtime."""
        if not self._is_closing:
            self._runtime.replica_recovered(replica_id)


def _is_named(ask: TurnAsk) -> bool:
    """Return whether its names are what a client may give: a gateway of another version may judge otherwise."""
    try:
        check_names(ask)
    except InvalidProgramIdError:
        return False
    return True


def _named(ask: TurnAsk) -> TurnAsk:
    """Return a turn that runs, as an anonymous one if its names are wrong: it takes its place in any case."""
    if _is_named(ask):
        return ask
    return TurnAsk(turn_id=ask.turn_id, prompt_bytes=ask.prompt_bytes, media=ask.media)


def _seconds_of(seen: str) -> float | None:
    """Return the seconds of a word about pressure, as far as they are believed; None if they are no number."""
    try:
        for_s = float(seen.partition(" ")[2])
    except ValueError:
        return None
    return min(for_s, MOST_PRESSURE_S) if for_s > 0 else None


def _lets_some_go_on(early: deque[asyncio.Event]) -> bool:
    """Let the first ones go on; return whether others wait."""
    for _ in range(min(SLICE_COUNT, len(early))):
        early.popleft().set()
    return bool(early)


async def _let_go_on(early: deque[asyncio.Event]) -> None:
    has_more = True
    while has_more:
        await asyncio.sleep(0)
        has_more = _lets_some_go_on(early)


class _Held:
    """Tells a turn's gateway that it is held."""

    def __init__(self, gateways: Gateways, turn_id: int) -> None:
        self._gateways = gateways
        self._turn_id = turn_id

    def __enter__(self) -> None:
        self._gateways.held(self._turn_id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send nothing: a grant or a refusal follows, or nobody waits any more."""
