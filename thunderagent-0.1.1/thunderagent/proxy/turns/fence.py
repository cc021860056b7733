"""The weight fence: what a turn may reuse that older weights computed, and how stale a program may become.

Theory of operation
===================
**Salts.** A replica's cache has a serial, which is another one whenever its weights may have changed. A turn's body
gets a salt made of the serial, of its client's own salt, and of a secret of this process: engines reuse nothing across
salts. With `turn` the serial is that of the grant. With `start` it is that of the program's first turn on this replica:
the program goes on with its own cache after a change, and shares with no program that began later. Nothing needs to be
flushed for that, so it holds where an engine keeps what old weights computed. What a salt separates is not shared in
the scheduler's count, either: the digests of prefixes are changed alike.

**Staleness.** Weights have numbers, over all replicas. A program's lag on a replica is the number there less the one
with which it began. A turn that would be over its program's bound runs on a replica with older weights; if there is
none it gets an error, or waits. And no program goes back: its turns wait for a replica that has at least the weights
of its last turn, while one is up.

A turn is placed by the scheduler, which knows nothing of weights. So the fence names a replica only if not all will do,
and gives a lease back that will not do. Nothing is called while there is no fence.
"""

# interpreted: there is none by default, and a salt costs a hash

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes
from time import monotonic
from typing import Final, Literal, NamedTuple, Protocol

from msgspec.structs import replace
from multidict import istr

from thunderagent.errors import NoRoomInTimeError, ProgramReleasedError, ProgramStaleError, RequestError
from thunderagent.leases import Lease, TurnAsk
from thunderagent.leases.open_lease import FleetSource, OpenLease
from thunderagent.programs.messages import (
    Decision,
    Event,
    GrantsContinued,
    GrantsSuspended,
    PrefixCut,
    Release,
    ReplicaDown,
    ReplicaUp,
)
from thunderagent.proxy.fleet.known import KnownReplica
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.capture import CHAT, COMPLETIONS, GENERATE, RESPONSES, TOKENS
from thunderagent.proxy.reading.json_splice import put_value, value_of
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.proxy.turns.record import Record

STALENESS_HEADER: Final = istr("X-Program-Staleness")
"""The bound of one program: `max_lag=1, when=hold`."""

WhenStale = Literal["continue", "finish", "hold", "abort"]
"""What becomes of a turn that would be over the bound."""

_WAYS: Final[Mapping[str, WhenStale]] = {way: way for way in ("continue", "finish", "hold", "abort")}

LOOK_AGAIN_S: Final = 1.0
"""How long to wait for a replica before the next look, if nothing is heard meanwhile."""

MOST_LAG_COUNT: Final = 10**9

_SALT: Final = "cache_salt"
_FIELDS: Final[Mapping[tuple[str, str], str]] = {
    **{("vllm", path): _SALT for path in (CHAT, COMPLETIONS, RESPONSES, TOKENS)},
    **{("sglang", path): _SALT for path in (CHAT, COMPLETIONS, RESPONSES)},
    ("sglang", GENERATE): "extra_key",
}
"""The field of a body that separates caches, by engine kind and API. Messages have none: a turn there gets no salt."""


class Staleness(NamedTuple):
    """How often the weights may change after a program's first turn (None: as often as they will), and what then."""

    max_lag_count: int | None = None
    when: WhenStale = "continue"

    @property
    def most_lag_count(self) -> int | None:
        """The bound, if a turn beyond it does not run."""
        return None if self.when == "continue" else self.max_lag_count


@dataclass(frozen=True, slots=True)
class FenceSettings:
    """How caches are salted, and the bound of programs that name none."""

    salts: Literal["start", "turn"]
    staleness: Staleness


def staleness_of(text: str, default: Staleness) -> Staleness:
    """Read the header's value; what it does not say is as in `default`. Raises `RequestError` if it is invalid."""
    fields = [field.partition("=") for field in text.split(",")]
    said = {name.strip(): value.strip() for name, _, value in fields}
    lag, when = said.pop("max_lag", None), said.pop("when", default.when)
    is_count = lag is None or (lag.isascii() and lag.isdigit() and len(lag) < 11 and int(lag) <= MOST_LAG_COUNT)
    if said or len({name.strip() for name, _, _ in fields}) < len(fields) or not is_count or when not in _WAYS:
        ways = ", ".join(_WAYS)
        raise RequestError(f"{STALENESS_HEADER} is like max_lag=1, when=hold; when is one of {ways}")
    return Staleness(default.max_lag_count if lag is None else int(lag), _WAYS[when])


def salt_of(secret: bytes, serial: int, given: bytes) -> str:
    """Return a salt that no other serial, and no other salt of a client, makes: letters and digits."""
    digest = blake2b(b"%d:%b" % (serial, given), key=secret, digest_size=15)
    return f"ta{digest.hexdigest()}"


def salted_prefix(prefix: tuple[PrefixCut, ...], serial: int) -> tuple[PrefixCut, ...]:
    """Return a prompt's places with digests that only prompts of the same serial share."""
    mask = int.from_bytes(blake2b(b"%d" % serial, digest_size=8).digest()) >> 1
    return tuple((digest ^ mask, size_bytes) for digest, size_bytes in prefix)


def places(
    numbers: Mapping[str, int], last: int, most: int | None, when: WhenStale = "finish"
) -> Collection[str] | None:
    """Return which replicas a turn may run on, by the numbers of their weights; None if any will do.

    `last` is the number of its program's last turn, `most` the greatest that its bound allows. It is empty if the turn
    must wait. Raises `ProgramStaleError` if it must not.
    """
    fresh = [each for each, number in numbers.items() if most is None or number <= most]
    if numbers and not fresh and when != "hold":
        raise ProgramStaleError("the weights have changed more often than the program's bound allows")
    fitting = [each for each in fresh if numbers[each] >= last] or fresh
    return None if len(fitting) == len(numbers) else fitting


class Asks(Protocol):
    """Asks the scheduler for a lease."""

    def __call__(self, wanted_replica_id: str | None, *, again: bool) -> Awaitable[OpenLease]:
        """Ask for one, on this replica if one is named; `again` if an earlier one was given back."""


class _Fenced:
    """A program that has had a turn."""

    __slots__ = ("generation", "last", "prefix_serial", "replica_id", "serials", "staleness", "start")

    def __init__(self, generation: int, start: int, prefix_serial: int, staleness: Staleness) -> None:
        self.generation = generation
        self.start = self.last = start
        self.prefix_serial = prefix_serial
        self.staleness = staleness
        self.serials: dict[str, int] = {}
        """Those of its first turns, by replica."""
        self.replica_id = ""

    @property
    def most(self) -> int | None:
        lag_count = self.staleness.most_lag_count
        return None if lag_count is None else self.start + lag_count


class Fence:
    """Salts turns, and holds programs to their bounds."""

    def __init__(
        self,
        settings: FenceSettings,
        replicas: Replicas,
        runtime: FleetSource,
        aborters: Sequence[Callable[[str, str], int]],
    ) -> None:
        """Hear of changes from `replicas`, and of programs' ends from `runtime`.

        `aborters` are called with a program and the code of an error: they end its turns.
        """
        self._aborters = aborters
        self._settings = settings
        self._replicas = replicas
        self._runtime = runtime
        self._secret = token_bytes(32)
        self._programs: dict[str, _Fenced] = {}
        self._changed = asyncio.Event()
        replicas.weights.on_change.append(self._weights_changed)
        runtime.observe(self._heard, Release, GrantsContinued, GrantsSuspended, ReplicaUp, ReplicaDown)

    def __repr__(self) -> str:
        return f"<Fence by {self._settings.salts}: {len(self._programs)} programs>"

    # --- what happens

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        for decision in decisions:
            if type(decision) is Release:
                self._programs.pop(decision.program_id, None)
        self._look_again()

    def _look_again(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _weights_changed(self, replica_id: str) -> None:
        """Have those look again who wait, and abort the programs there that are over a bound which says so."""
        self._look_again()
        number = self._replicas.known[replica_id].weight_number
        for program_id, fenced in list(self._programs.items()):
            if fenced.staleness.when != "abort" or fenced.replica_id != replica_id:
                continue
            if fenced.most is not None and number > fenced.most:
                for abort in self._aborters:
                    abort(program_id, ProgramStaleError.code)

    # --- leases

    async def lease(
        self,
        record: Record,
        said: str | None,
        ask: Asks,
        deadline_s: float | None,
        while_held: Callable[[], AbstractContextManager[object]],
    ) -> OpenLease:
        """Return a lease on a replica whose weights a turn may run on. `said` is its client's bound.

        `while_held` makes the block in which it waits here. Raises what `ask` raises, and `ProgramStaleError`,
        `ProgramReleasedError`, `NoRoomInTimeError`, `RequestError`.
        """
        program_id = record.turn.program_id
        if program_id is None:
            return await ask(None, again=False)
        fenced, waited_s, again = self._programs.get(program_id), 0.0, False
        default = self._settings.staleness if fenced is None else fenced.staleness
        staleness = default if said is None else staleness_of(said, default)
        if fenced is not None:
            fenced.staleness = staleness
        while True:
            allowed = None if fenced is None else self._places(record, fenced)
            wanted = None if allowed is None else self._best(allowed, program_id, record.model)
            if allowed is None or wanted is not None:
                lease = await ask(wanted, again=again)
                again = True
                try:
                    takes = self._takes(record, lease.granted, staleness)
                except BaseException:  # meanwhile the weights changed, or nobody lists its model any more
                    lease.refused()
                    raise
                if takes:
                    record.held_s += waited_s
                    return lease
                waited_s += lease.granted.held_s
                lease.refused()
                fenced = self._programs.get(program_id)
            began_s = monotonic()
            with while_held():
                await self._until_changed(deadline_s)
            waited_s += monotonic() - began_s
            if self._programs.get(program_id) is not fenced:
                raise ProgramReleasedError(f"program {program_id!r} was released while this turn waited")

    def _places(self, record: Record, fenced: _Fenced) -> Collection[str] | None:
        replicas, known = self._replicas, self._replicas.known
        able: Collection[str] = replicas.map.open_ids
        if record.maker_id is not None:
            able = (record.maker_id,)
        elif record.model and replicas.has_pools:
            of_model = self._runtime.ids_serving(record.model)
            able = [each for each in able if each in of_model]
        numbers = {each: known[each].weight_number for each in able if each in known}
        return places(numbers, fenced.last, fenced.most, fenced.staleness.when)

    def _best(self, allowed: Collection[str], program_id: str, model: str) -> str | None:
        """Return the program's own replica, or the least busy one, of those that grant now; None if none does."""
        states = self._replicas.map.states
        granting = [each for each in allowed if each in states and not states[each].suspended_for]
        home_id = self._runtime.home_of(program_id, model)
        if home_id in granting:
            return home_id
        return min(granting, key=self._runtime.turns_count, default=None)

    def _takes(self, record: Record, granted: Lease, staleness: Staleness) -> bool:
        """Return whether a lease will do, and note that it is used."""
        program_id, known = granted.program_id or "", self._replicas.known.get(granted.replica_id)
        if known is None or not self._runtime.lives(program_id, granted.generation):
            return True  # sending reports that
        fenced = self._programs.get(program_id)
        if fenced is not None and fenced.generation == granted.generation:
            allowed = self._places(record, fenced)
            if allowed is not None and granted.replica_id not in allowed:
                return False
        else:
            fenced = _Fenced(granted.generation, known.weight_number, self._replicas.weights.serial, staleness)
            self._programs[program_id] = fenced
        fenced.last, fenced.replica_id = known.weight_number, granted.replica_id
        fenced.serials.setdefault(granted.replica_id, known.cache_serial)
        return True

    async def _until_changed(self, deadline_s: float | None) -> None:
        """Wait until something may have changed. Raises `NoRoomInTimeError` at the deadline."""
        left_s = LOOK_AGAIN_S if deadline_s is None else deadline_s - self._runtime.now_s()
        if left_s <= 0:
            raise NoRoomInTimeError("no replica had weights that the program may go on with, in time")
        with suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_AGAIN_S, left_s)):
                await self._changed.wait()

    # --- salts

    def ask(self, record: Record, ask: TurnAsk) -> TurnAsk:
        """Return what the scheduler is told, with prefixes that only those share who share a salt."""
        if not ask.prefix:
            return ask
        fenced = self._programs.get(record.turn.program_id or "") if self._settings.salts == "start" else None
        serial = self._replicas.weights.serial if fenced is None else fenced.prefix_serial
        return replace(ask, prefix=salted_prefix(ask.prefix, serial))

    async def salted(self, record: Record, granted: Lease, body: bytes) -> bytes:
        """Return a turn's body with its salt, if its engine has a field for that in this API."""
        record.salt = ""
        known = self._replicas.known.get(granted.replica_id)
        name = "" if known is None else _FIELDS.get((known.endpoint.backend.kind, record.target.spelt), "")
        if known is None or not name or record.method != "POST" or body[:64].lstrip()[:1] != b"{":
            return body
        serial = self._serial(granted, known)

        def put() -> tuple[str, bytes]:
            salt = salt_of(self._secret, serial, value_of(body, name) or b"")
            return salt, put_value(body, name, b'"%b"' % salt.encode())

        with suppress(ValueError):  # then it is no JSON, and its engine refuses it
            record.salt, body = await read_aside(put, len(body))
        return body

    def _serial(self, granted: Lease, known: KnownReplica) -> int:
        if self._settings.salts == "start" and granted.program_id is not None:
            fenced = self._programs.get(granted.program_id)
            if fenced is not None and fenced.generation == granted.generation:
                return fenced.serials.get(granted.replica_id, known.cache_serial)
        return known.cache_serial
