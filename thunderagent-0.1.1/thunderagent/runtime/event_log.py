"""The event log: one JSON line for every event and its decisions, and the replay that repeats the decisions.

The first line is a header with everything that decisions depend on besides the events: the policy and its settings, and
the scheduler's. A line is `[event name, event fields, [[decision name, decision fields], ...]]`; for a pool of replicas
other than the first it ends with `[number of the pool, its name]`. An event that several pools heard has a line for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import structs

from thunderagent.errors import EventLogError
from thunderagent.policy_loader import load_policy, parse_setting
from thunderagent.programs.learned.goodput import Goodput
from thunderagent.programs.messages import (
    Decision,
    Event,
    SchedulerSettings,
    TurnAsk,
    TurnEnd,
)
from thunderagent.programs.pools import Handled, share
from thunderagent.programs.scheduler import Scheduler

FORMAT = "thunderagent-events/2"
OLDER_FORMAT = "thunderagent-events/1"
"""Its turns arrive and end by events of other names, which are read as what they are now."""
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}

Record = tuple[Event, Any, int]
"""An event, its decisions, and the number of the pool that heard it."""


class EventLogWriter:
    """Appends events and their decisions to a file; call `flush` when there is time."""

    def __init__(
        self, path: Path, *, policy: str, policy_settings: Mapping[str, object], settings: SchedulerSettings
    ) -> None:
        """Open `path` and write the header; an existing file is moved to the next free `path.N`.

        Raises `EventLogError` if it cannot be written.
        """
        try:
            if path.is_file():  # no folder, and no device
                path.rename(next(old for n in count(1) if not (old := path.with_name(f"{path.name}.{n}")).exists()))
            self._file = path.open("wb", buffering=1 << 18)
        except OSError as error:
            raise EventLogError(f"cannot write the event log {path}: {error.strerror}") from error
        self._encoder = msgspec.json.Encoder()
        header = {
            "format": FORMAT,
            "policy": policy,
            "policy_settings": {name: str(value) for name, value in policy_settings.items()},
            "settings": asdict(settings),
        }
        self._file.write(self._encoder.encode(header) + b"\n")

    def write(self, event: Event, decisions: list[Decision]) -> None:
        """Append one event with its decisions."""
        named = [(type(decision).__name__, decision) for decision in decisions]
        self._file.write(self._encoder.encode((type(event).__name__, fields_of(event), named)) + b"\n")

    def write_pools(self, handled: Iterable[Handled]) -> None:
        """Append what pools heard and decided."""
        for pool, event, decisions in handled:
            if not pool.pool_id:
                self.write(event, decisions)
                continue
            named = [(type(decision).__name__, decision) for decision in decisions]
            line = type(event).__name__, fields_of(event), named, (pool.pool_id, pool.name)
            self._file.write(self._encoder.encode(line) + b"\n")

    def flush(self) -> None:
        """Hand the written lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file. A full disk is no error here: the last `flush` told of it."""
        with suppress(OSError):
            self._file.close()


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay; `difference` is None if every decision was the same.

    `goodput` is that of the first pool.
    """

    policy: str
    events_count: int
    decisions_count: int
    difference: str | None
    goodput: Goodput


def replay(lines: Iterable[bytes], *, after_event: Callable[[Scheduler], None] | None = None) -> ReplayReport:
    """Feed the events of a log to a fresh scheduler and compare its decisions with the log's.

    Stops at the first difference, and before an incomplete last line, where the process was killed. `after_event` is
    called with the scheduler after each event, for example to check invariants. Raises `EventLogError` with the line's
    number for an unreadable line.
    """
    numbered = enumerate(lines, start=1)
    make, policy = _maker_of(numbered)
    schedulers = {0: make()}
    events_count = decisions_count = 0
    for number, line in numbered:
        if not line.endswith(b"\n"):
            break
        event, logged, pool = _read_record(number, line)
        scheduler = schedulers.get(pool)
        if scheduler is None:
            scheduler = schedulers[pool] = make()
            share(list(schedulers.values()))
        decided = _plain([(type(d).__name__, d) for d in scheduler.handle(event)])
        for decisions in (decided, logged):
            _without_empty_priorities(decisions)
        events_count += 1
        decisions_count += len(decided)
        if decided != logged:
            difference = f"line {number}: {event}\n  logged:  {logged}\n  decided: {decided}"
            return ReplayReport(policy, events_count, decisions_count, difference, schedulers[0].knowledge.goodput)
        if after_event is not None:
            after_event(scheduler)
    return ReplayReport(policy, events_count, decisions_count, None, schedulers[0].knowledge.goodput)


def read_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of a log, without deciding anything; stops before an incomplete last line.

    Raises `EventLogError` with the line's number for an unreadable line.
    """
    numbered = enumerate(lines, start=1)
    _read_header(numbered)
    for number, line in numbered:
        if not line.endswith(b"\n"):
            break
        yield _read_record(number, line)[0]


def _maker_of(numbered: Iterator[tuple[int, bytes]]) -> tuple[Callable[[], Scheduler], str]:
    """Return a factory of schedulers by the header, and the name of its policy."""
    header = _read_header(numbered)
    try:
        settings = {name: parse_setting(text) for name, text in header["policy_settings"].items()}
        scheduler_settings = SchedulerSettings(**header["settings"])

        def make() -> Scheduler:
            return Scheduler(load_policy(header["policy"], settings), scheduler_settings)

        return make, make().policy.name
    except (KeyError, TypeError, AttributeError) as error:
        raise EventLogError(f"line 1: not the header of an event log: {error!r}") from error


def _read_header(numbered: Iterator[tuple[int, bytes]]) -> Any:
    number, line = next(numbered, (1, b""))
    if not line:
        raise EventLogError("it is empty: not an event log")
    try:
        header = msgspec.json.decode(line)
        if header["format"] not in (FORMAT, OLDER_FORMAT):
            raise EventLogError(f"line {number}: format {header['format']!r} is not {FORMAT!r}")
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise EventLogError(f"line {number}: not the header of an event log: {error!r}") from error
    return header


def _read_record(number: int, line: bytes) -> Record:
    try:
        name, fields, logged, *of_pool = msgspec.json.decode(line)
        event = _event_of(*_as_now(name, fields))
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise EventLogError(f"line {number}: not an event: {error!r}") from error
    return event, logged, int(of_pool[0][0]) if of_pool else 0


def fields_of(event: Event) -> Any:
    """Return an event as it is logged: of a message what decides, by its names, unless it is at its default."""
    if type(event) is not TurnAsk and type(event) is not TurnEnd:
        return event
    named = ((name, getattr(event, name), default) for name, default in _DEFAULTS[type(event)])
    return {name: value for name, value, default in named if value != default}


_UNREAD = frozenset({"abortable", "attempt_key", "engine_request_id", "hint", "limits", "model"})
"""What the core does not read of a message: it is for others, or comes as an event of its own."""

_DEFAULTS: dict[type, tuple[tuple[str, Any], ...]] = {
    kind: tuple((field.name, field.default) for field in structs.fields(kind) if field.name not in _UNREAD)
    for kind in (TurnAsk, TurnEnd)
}


def _as_now(name: str, fields: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """Return the kind and the fields of an event, which may be from an older log."""
    if name in ("TurnArrived", "PinnedTurnArrived"):
        now_s, deadline_s, since_s = (
            fields["now_s"],
            fields.pop("deadline_s", None),
            fields.pop("waiting_since_s", None),
        )
        if deadline_s is not None:
            fields["patience_s"] = deadline_s - now_s
        if since_s is not None:
            fields["waited_s"] = now_s - since_s
        if name == "PinnedTurnArrived":
            fields["pinned_replica_id"] = fields.pop("replica_id")
        return TurnAsk, fields
    if name == "TurnFailed":
        fields["outcome"] = "refused" if fields.pop("refused", False) else "failed"
        return TurnEnd, fields
    if name in ("TurnFinished", "TurnAbandoned"):
        return TurnEnd, {**fields, "outcome": "finished" if name == "TurnFinished" else "abandoned"}
    if name == "TurnAdopted" and "arrived" in fields:
        fields["ask"] = _event_of(*_as_now("TurnArrived", fields.pop("arrived")))
    return EVENTS[name], fields


def _event_of(kind: type[Any], fields: dict[str, Any]) -> Any:
    """Return the event with these fields."""
    if kind is TurnAsk or kind is TurnEnd:
        types = {field.name: field.type for field in structs.fields(kind)}
        return kind(**{name: msgspec.convert(value, types.get(name, Any)) for name, value in fields.items()})
    kind(**fields)  # refuses fields that the event does not have
    return msgspec.convert(fields, kind)


def _without_empty_priorities(decisions: Any) -> None:
    """Remove empty engine priorities from grants: older logs do not have that field."""
    for _, fields in decisions:
        if fields.get("engine_priority", 0) is None:
            del fields["engine_priority"]


def _plain(value: object) -> Any:
    """Return a value as it looks after a round trip through JSON."""
    return msgspec.json.decode(msgspec.json.encode(value))
