"""The scheduler's events and decisions, for listeners.

Theory of operation
===================
There is one ring of the last messages, and a listener is a position in it. So a message is kept once however many
listen. A listener that reads too slowly finds its position overwritten, and is told how many messages it lost. One that
returns with the id of its last message continues after it, as long as the ring still has it.

Nothing is recorded while nobody listens: the runtime does not know of the feed then. A recording begins with the first
listener and ends some time after the last, so a short break loses nothing. Each recording has an id of its own, which
is part of the messages' ids. Messages are encoded when they are read, not when they are recorded.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, get_args

import msgspec

from thunderagent.errors import RequestError, TooManyListenersError
from thunderagent.programs.messages import (
    Decision,
    EncodesPolled,
    Event,
    GpuFirstToken,
    ModelAsked,
    ProgramsReleased,
    Reject,
    ReplicaPolled,
    ResidencyReported,
    SandboxesMeasured,
    Signal,
    Tick,
    TierPolled,
    TurnAsk,
    TurnDue,
    TurnEnd,
    TurnLimited,
    TurnProgressed,
    WorkPolled,
)
from thunderagent.proxy.reading.sse import server_sent
from thunderagent.runtime import Runtime

KEPT_COUNT = 8192
"""Capacity of the ring, in messages."""

LINGER_S = 60.0
"""How long a recording continues after its last listener left."""

MAX_LISTENERS_COUNT = 64
MAX_BATCH_COUNT = 256
"""How many messages are read in one go."""

COALESCE_S = 0.05
"""A waiting listener gets everything that arrives within this time at once."""

QUIET = frozenset(
    {Tick, TurnDue, TurnProgressed, ModelAsked, TurnLimited}
    | {ReplicaPolled, TierPolled, WorkPolled, EncodesPolled, ResidencyReported, SandboxesMeasured}
)
"""Frequent events that say little; decisions on them are in the feed."""

LEFT_OUT = frozenset({"now_s", "ask", "learned", "programs"})


def _kind_of(cls: type[Any]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


KIND_OF = {cls: _kind_of(cls) for cls in (*get_args(Event), *get_args(Decision), *get_args(Signal))}
KIND_OF[TurnAsk] = "turn_arrived"
PINNED = "pinned_turn_arrived"
"""The kind of a `TurnAsk` for the replica that its client chose."""
KIND_OF[GpuFirstToken] = "gpu_1st_token"  # the paper's word
SIGNAL_KINDS = frozenset(KIND_OF[cls] for cls in get_args(Signal))
"""Kinds of the information stream; they must be requested, because they repeat much."""
KIND_OF_OUTCOME = {
    "finished": "turn_finished",
    "failed": "turn_failed",
    "refused": "turn_failed",
    "abandoned": "turn_abandoned",
}
"""Kinds of a `TurnEnd`."""
KINDS = (
    frozenset(kind for cls, kind in KIND_OF.items() if cls not in QUIET and cls is not TurnEnd)
    | frozenset((*KIND_OF_OUTCOME.values(), PINNED))
) - SIGNAL_KINDS
"""All other kinds of messages: events by what happened, decisions by what was decided."""

_FIELDS = {
    cls: tuple(
        name
        for name in getattr(cls, "__struct_fields__", None) or [field.name for field in fields(cls)]
        if name not in LEFT_OUT
    )
    for cls in KIND_OF
    if cls not in (TurnAsk, TurnEnd)
}
_FIELDS[TurnAsk] = (
    *("turn_id", "branch_id", "prompt_bytes", "avoid_replica_id", "group_id", "patience_s", "supersedes_id"),
    *("waited_s", "parent_id", "tenant", "pinned_replica_id", "wanted_replica_id", "program_class", "role"),
    *("parent_branch_id", "media"),
)
_USAGE = ("turn_id", "prompt_tokens", "output_tokens", "cached_tokens", "tool")


def kind_of(what: Event | Decision | Signal) -> str:
    """Return the kind of a message about it."""
    if type(what) is TurnEnd:
        return KIND_OF_OUTCOME[what.outcome]
    if type(what) is TurnAsk and what.pinned_replica_id is not None:
        return PINNED
    return KIND_OF[type(what)]


def _fields_of(what: Event | Decision | Signal) -> tuple[str, ...]:
    if type(what) is not TurnEnd:
        return _FIELDS[type(what)]
    return _USAGE if what.outcome == "finished" else ("turn_id",)


class Message(NamedTuple):
    """One event, or one decision on `because`, as recorded."""

    now_s: float
    program_id: str | None
    because: str | None
    what: Event | Decision | Signal

    def is_of(self, program_id: str) -> bool:
        """Return whether it is about a program."""
        if self.program_id is None and type(self.what) is ProgramsReleased:
            return program_id in self.what.program_ids
        return self.program_id == program_id


class EventFeed:
    """The recording, and its listeners. All methods belong to the runtime's event loop."""

    def __init__(self, runtime: Runtime, *, kept_count: int = KEPT_COUNT, linger_s: float = LINGER_S) -> None:
        """Start without listeners."""
        self._runtime = runtime
        self._kept_count = kept_count
        self._linger_s = linger_s
        self._listeners_count = 0
        self._stop: Callable[[], None] | None = None
        self._stop_signals: Callable[[], None] | None = None
        self._signal_listeners_count = 0
        self._lingering: asyncio.TimerHandle | None = None
        self._recording_id = ""
        self.epoch_s = 0.0
        """Unix time of the runtime's second 0."""
        self._ring: list[Message | None] = []
        self._next_number = 0
        self._waiting: list[asyncio.Event] = []
        self._program_ids: dict[int, str | None] = {}
        """Programs of turns that have not ended: events about those do not name their programs."""
        self.closed = False

    def __repr__(self) -> str:
        return f"<EventFeed of {self._listeners_count} listeners, {self._next_number} messages recorded>"

    @property
    def recording(self) -> bool:
        """Whether the runtime reports what happens."""
        return self._stop is not None

    @contextmanager
    def listen(
        self, *, program_id: str | None = None, kinds: Collection[str] = KINDS, after_id: str = ""
    ) -> Iterator[Listener]:
        """Listen in the block, to one program's messages or all, after the message of that id or from now.

        Raises `RequestError` for an unknown kind, `TooManyListenersError`.
        """
        known = KINDS | SIGNAL_KINDS
        if unknown := sorted(set(kinds) - known):
            raise RequestError(f"there is no kind {unknown[0]!r}; there are: {', '.join(sorted(known))}")
        if self._listeners_count >= MAX_LISTENERS_COUNT:
            raise TooManyListenersError(f"{MAX_LISTENERS_COUNT} listen already")
        self._listeners_count += 1
        self._begin()
        try:
            with self._hear_signals(wanted=bool(SIGNAL_KINDS & set(kinds))):
                yield Listener(self, program_id, frozenset(kinds), after_id)
        finally:
            self._listeners_count -= 1
            if not self._listeners_count and self.recording:
                loop = asyncio.get_running_loop()
                self._lingering = loop.call_later(self._linger_s, self._end)

    @contextmanager
    def _hear_signals(self, *, wanted: bool) -> Iterator[None]:
        """Record signals while somebody wants them: otherwise none are made."""
        self._signal_listeners_count += wanted
        if wanted and self._stop_signals is None:
            self._stop_signals = self._runtime.pools.listen(self._record_signal)
        try:
            yield
        finally:
            self._signal_listeners_count -= wanted
            if not self._signal_listeners_count and self._stop_signals is not None:
                self._stop_signals()
                self._stop_signals = None

    def _record_signal(self, signal: Signal) -> None:
        if self.recording:
            self._append(Message(signal.now_s, getattr(signal, "program_id", None), None, signal))

    def close(self) -> None:
        """End the feed for all listeners."""
        self.closed = True
        self._end()
        self._call_waiting()

    def _begin(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self.recording or self.closed:
            return
        self._recording_id = secrets.token_hex(4)
        self.epoch_s = time.time() - self._runtime.now_s()
        self._ring = [None] * self._kept_count
        self._next_number = 0
        self._program_ids = {
            turn.turn_id: turn.program.program_id if turn.program is not None else None
            for turn in self._runtime.pools.turns.values()
        }
        self._stop = self._runtime.observe(self._observe)

    def _end(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._ring = []
        self._program_ids = {}

    def _observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Record an event. Costs O(1), and O(waiting listeners) for the first after a silence."""
        program_id = self._program_of(event)
        kind = kind_of(event)
        if type(event) not in QUIET:
            self._append(Message(event.now_s, program_id, None, event))
        for decision in decisions:
            self._append(Message(event.now_s, getattr(decision, "program_id", None), kind, decision))
            if type(decision) is Reject and decision.turn_id == getattr(event, "turn_id", None):
                self._program_ids.pop(decision.turn_id, None)  # rejected on arrival: nothing more is heard of it

    def _program_of(self, event: Event) -> str | None:
        program_id: str | None = getattr(event, "program_id", None)
        turn_id: int | None = getattr(event, "turn_id", None)
        if turn_id is None:
            return program_id
        if isinstance(event, TurnEnd):
            return self._program_ids.pop(turn_id, None)
        if program_id is not None:
            self._program_ids[turn_id] = program_id
            return program_id
        return self._program_ids.get(turn_id)

    def _append(self, message: Message) -> None:
        self._ring[self._next_number % self._kept_count] = message
        self._next_number += 1
        if self._waiting:
            self._call_waiting()

    def _call_waiting(self) -> None:
        for news in self._waiting:
            news.set()
        self._waiting.clear()

    # --- for listeners ----------------------------------------------------------------------------------------------

    def place_after(self, message_id: str) -> tuple[int, bool]:
        """Return the position after a message, and whether the recording is another now; an empty id is from now on.

        Raises `RequestError` for an invalid id.
        """
        if not message_id:
            return self._next_number, False
        recording_id, dash, number = message_id.partition("-")
        if not (dash and number.isascii() and number.isdigit() and len(number) < 18):
            raise RequestError(f"{message_id!r} is not the id of a message")
        if recording_id != self._recording_id or int(number) >= self._next_number:
            return self._next_number, True
        return int(number) + 1, False

    def id_before(self, place: int) -> str:
        """Return the id with which a listener at this position would return; empty if nothing was before."""
        return f"{self._recording_id}-{place - 1}" if place else ""

    def read(self, place: int) -> tuple[int, int, Sequence[Message]]:
        """Return the position of the first available message, how many before it were lost, and some messages."""
        first = max(place, self._next_number - self._kept_count)
        end = min(self._next_number, first + MAX_BATCH_COUNT)
        messages = [message for at in range(first, end) if (message := self._ring[at % self._kept_count]) is not None]
        return first, first - place, messages

    async def news(self, place: int) -> bool:
        """Wait until there is a message at a position; False at the end. Cancelling it loses nothing."""
        if self._next_number <= place and not self.closed:
            news = asyncio.Event()
            self._waiting.append(news)
            try:
                await news.wait()
            finally:
                if news in self._waiting:
                    self._waiting.remove(news)
            if not self.closed:
                await asyncio.sleep(COALESCE_S)
        return not self.closed


class Listener:
    """A listener: a position in the ring, and its filter."""

    def __init__(self, feed: EventFeed, program_id: str | None, kinds: frozenset[str], after_id: str) -> None:
        """Start after the message of that id, or now."""
        self._feed = feed
        self._program_id = program_id
        self._kinds = kinds
        self._place, self._other_recording = feed.place_after(after_id)

    def __repr__(self) -> str:
        return f"<Listener at {self._place} of {self._feed!r}>"

    def greeting(self) -> bytes:
        """Return what a reader gets first: where it begins, and whether it missed something."""
        hello = b": listening\nretry: 1000\n"
        if (message_id := self._feed.id_before(self._place)) and not self._other_recording:
            hello += f"id: {message_id}\n".encode()
        return hello + b"\n" + (_lost(None) if self._other_recording else b"")

    async def next_events(self) -> bytes | None:
        """Wait for messages and return them as server-sent events; None at the end. Cancelling it loses nothing."""
        while await self._feed.news(self._place):
            first, lost_count, messages = self._feed.read(self._place)
            events = [_lost(lost_count)] if lost_count else []
            for number, message in enumerate(messages, start=first):
                kind = kind_of(message.what)
                if kind in self._kinds and (self._program_id is None or message.is_of(self._program_id)):
                    event_id = self._feed.id_before(number + 1)
                    events.append(server_sent(self._encoded(kind, message), kind=kind, event_id=event_id))
            self._place = first + len(messages)
            if events:
                return b"".join(events)
            await asyncio.sleep(0)  # let other turns run between two batches without a match
        return None

    def _encoded(self, kind: str, message: Message) -> bytes:
        """Return a message as a JSON object."""
        at_s = round(self._feed.epoch_s + message.now_s, 4)
        body: dict[str, object] = {"kind": kind, "at_s": at_s, "program_id": message.program_id}
        if message.because is not None:
            body["because"] = message.because
        for name in _fields_of(message.what):
            if name != "program_id":
                body[name] = getattr(message.what, name)
        if kind == "turn_failed":
            body["refused"] = isinstance(message.what, TurnEnd) and message.what.outcome == "refused"
        return msgspec.json.encode(body)


def _lost(lost_count: int | None) -> bytes:
    return server_sent(msgspec.json.encode({"lost_count": lost_count}), kind="lost")
