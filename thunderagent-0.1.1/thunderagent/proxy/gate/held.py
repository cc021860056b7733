"""Limits on held turns and their bodies: for all callers together, for each tenant and each key.

A held turn keeps its body in memory until it has run, so anybody who may hold turns without limit may take all memory;
so may anybody who sends bodies faster than they are read. A body counts as it arrives, until its turn may run. Beyond
the total limit a request gets 503; beyond that of its key or tenant 429, because sending less helps. A tenant is the
part of a key's name before a slash.

A running turn keeps its body, too, until it ends: for retries, and to recognise the same turn if it comes again. So
turns that are never held, such as anonymous ones, might take all memory. All bodies of turns, held and running, have a
limit of their own, for all and for each key, which is checked before a turn asks for a lease. So do websockets, each of
which may keep its lease for an hour, and leases over the API, whose prompts count as if they were bodies here.
"""

# compiled: each turn is counted

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily, Metric

from thunderagent.errors import KeyHeldLimitError, TooManyHeldError
from thunderagent.proxy.gate.keys import Key, caller_key
from thunderagent.proxy.wire.exchange import KeptBody as Kept

Bound = Literal[
    "turns",
    "bytes",
    "key_turns",
    "key_bytes",
    "tenant_turns",
    "tenant_bytes",
    "running_bytes",
    "key_running_bytes",
    "websockets",
    "key_websockets",
    "leases",
    "key_leases",
    "key_leased_tokens",
]


@dataclass(frozen=True, slots=True)
class HeldLimits:
    """What may be held. None for a key is half of the total, None for a tenant all of it."""

    turns_count: int = 20_000
    body_bytes: int = 2**30
    key_turns_count: int | None = None
    key_body_bytes: int | None = None
    tenant_turns_count: int | None = None
    tenant_body_bytes: int | None = None
    running_bytes: int = 2**32
    """Bodies of turns, held or running, until they end; a key may have half of it."""
    websockets_count: int = 1000
    key_websockets_count: int | None = None
    leases_count: int = 20_000
    """Leases over the API."""
    key_leases_count: int | None = None
    key_leased_ratio: float = 0.5
    """Part of the replicas' memory that leases of one data key may claim."""


NO_LIMITS: Final = HeldLimits()


@dataclass(slots=True)
class _Sums:
    turns_count: int = 0
    body_bytes: int = 0


class HeldTurns:
    """Counts what is held, and refuses what would exceed a limit."""

    def __init__(self, limits: HeldLimits, registry: CollectorRegistry) -> None:
        """Start with nothing held."""
        self._all = _Sums()
        self._of_owners: dict[tuple[str, str], _Sums] = {}
        """By kind (key or tenant) and name."""
        self._running_bytes = 0
        self._running_by_key: dict[str, int] = {}
        self._websockets_by_key: Counter[str] = Counter()
        self._leases_by_key: Counter[str] = Counter()
        self.set(limits)
        self._refused = CounterMetric(
            "thunderagent_held_refused",
            "Turns, websockets and leases that were refused, by the limit that was reached.",
            ["bound"],
            registry=registry,
        )
        for bound in get_args(Bound):
            self._refused.labels(bound)
        registry.register(self)

    def __repr__(self) -> str:
        return f"<HeldTurns: {self._all.turns_count} turns, {self._all.body_bytes} bytes>"

    def set(self, limits: HeldLimits) -> None:
        """Use these limits from now on; what is already held stays."""
        self._limits = limits

    def max_turns_count(self, key: Key) -> int:
        """Return how many turns of a key may wait."""
        return self._limits_of("key", key)[0]

    def runs(self, body_bytes: int) -> str:
        """Count the body of a turn until it `ran`; return its owner. Raises `TooManyHeldError`."""
        key, max_bytes = caller_key(), self._limits.running_bytes
        name = key.name if key is not None else ""
        own_bytes = self._running_by_key.get(name, 0)
        if key is not None and own_bytes and own_bytes + body_bytes > max_bytes // 2:
            raise self._error("key_running_bytes", f"turns of this key have bodies of {own_bytes:,} bytes")
        if self._running_bytes and self._running_bytes + body_bytes > max_bytes:
            raise self._error("running_bytes", f"turns have bodies of {self._running_bytes:,} bytes")
        self._running_bytes += body_bytes
        self._running_by_key[name] = own_bytes + body_bytes
        return name

    def ran(self, name: str, body_bytes: int) -> None:
        """Stop counting the body of an ended turn."""
        self._running_bytes -= body_bytes
        own_bytes = self._running_by_key.pop(name, 0) - body_bytes  # gone if those that still run have no body
        if own_bytes:
            self._running_by_key[name] = own_bytes

    @contextmanager
    def websocket(self) -> Iterator[None]:
        """Count a websocket for the length of the block. Raises `KeyHeldLimitError` or `TooManyHeldError`."""
        limits = self._limits
        name = self._one_more(
            "websockets", self._websockets_by_key, limits.websockets_count, limits.key_websockets_count
        )
        try:
            yield
        finally:
            _one_less(self._websockets_by_key, name)

    @contextmanager
    def lease(self, prompt_bytes: int) -> Iterator[None]:
        """Count a lease over the API for the length of the block, and its prompt as a body. Raises as `websocket`."""
        limits = self._limits
        name = self._one_more("leases", self._leases_by_key, limits.leases_count, limits.key_leases_count)
        try:
            owner = self.runs(prompt_bytes)
            try:
                yield
            finally:
                self.ran(owner, prompt_bytes)
        finally:
            _one_less(self._leases_by_key, name)

    def _one_more(
        self, what: Literal["websockets", "leases"], counts: Counter[str], most_count: int, key_most_count: int | None
    ) -> str:
        """Count one more of the request's key, half of all by default; return the key's name."""
        key = caller_key()
        name = key.name if key is not None else ""
        most_own_count = max(1, most_count // 2) if key_most_count is None else key_most_count
        if key is not None and counts[name] >= most_own_count:
            raise self._owner_error(f"key_{what}", f"{counts[name]:,} {what} of this key are open")
        if counts.total() >= most_count:
            raise self._error(what, f"{counts.total():,} {what} are open")
        counts[name] += 1
        return name

    def key_leased_error(self, leased_tokens: int, wanted_tokens: int) -> KeyHeldLimitError:
        """Count and return the refusal of a lease beyond its key's part of the replicas' memory."""
        self._refused.labels("key_leased_tokens").inc()
        return KeyHeldLimitError(
            f"leases of this key claim {leased_tokens:,} tokens, and {wanted_tokens:,} more are over its part of the "
            f"memory; a lease for a program waits as long as its patience"
        )

    @property
    def key_leased_ratio(self) -> float:
        """The limit of that name."""
        return self._limits.key_leased_ratio

    def collect(self) -> Iterator[Metric]:
        """Yield what is kept now; the scheduler counts turns."""
        yield GaugeMetricFamily(
            "thunderagent_held_body_bytes",
            "Bytes of bodies of held turns, and of bodies that are being received.",
            self._all.body_bytes,
        )
        yield GaugeMetricFamily(
            "thunderagent_turn_body_bytes", "Bytes of bodies of turns held or running.", self._running_bytes
        )
        yield GaugeMetricFamily(
            "thunderagent_websockets", "Websockets that are open or opening.", self._websockets_by_key.total()
        )

    def take(self, key: Key | None, turns_count: int, body_bytes: int) -> None:
        """Count what is kept from now on. Raises `KeyHeldLimitError` or `TooManyHeldError`."""
        for kind, name in _owners(key):
            sums = self._of_owners.get((kind, name)) or _Sums()
            max_turns_count, max_body_bytes = self._limits_of(kind, key)
            if turns_count and sums.turns_count >= max_turns_count:
                raise self._owner_error(f"{kind}_turns", f"{sums.turns_count:,} turns of this {kind} are held")
            if sums.body_bytes and sums.body_bytes + body_bytes > max_body_bytes:
                raise self._owner_error(f"{kind}_bytes", f"bodies of {sums.body_bytes:,} bytes of this {kind} are kept")
        if turns_count and self._all.turns_count >= self._limits.turns_count:
            raise self._error("turns", f"{self._all.turns_count:,} turns are held")
        if self._all.body_bytes and self._all.body_bytes + body_bytes > self._limits.body_bytes:
            raise self._error("bytes", f"bodies of {self._all.body_bytes:,} bytes are kept")
        for sums in (self._all, *(self._of_owners.setdefault(owner, _Sums()) for owner in _owners(key))):
            sums.turns_count += turns_count
            sums.body_bytes += body_bytes

    def give_back(self, key: Key | None, turns_count: int, body_bytes: int) -> None:
        """Stop counting what is no longer kept."""
        for sums in (self._all, *(self._of_owners[owner] for owner in _owners(key))):
            sums.turns_count -= turns_count
            sums.body_bytes -= body_bytes
        for owner in _owners(key):
            if not self._of_owners[owner].turns_count and not self._of_owners[owner].body_bytes:
                del self._of_owners[owner]

    def _limits_of(self, kind: str, key: Key | None) -> tuple[int, int]:
        """Return the most turns, and the most bytes, that a key or its tenant may keep."""
        limits = self._limits
        if kind == "tenant":
            turns_count, body_bytes = limits.tenant_turns_count, limits.tenant_body_bytes
            return (
                limits.turns_count if turns_count is None else turns_count,
                limits.body_bytes if body_bytes is None else body_bytes,
            )
        half_turns, half_bytes = max(1, limits.turns_count // 2), max(1, limits.body_bytes // 2)
        usual_count = half_turns if limits.key_turns_count is None else limits.key_turns_count
        own_count = key.limits.held_turns_count if key is not None else None
        return (
            usual_count if own_count is None else own_count,
            half_bytes if limits.key_body_bytes is None else limits.key_body_bytes,
        )

    def _error(self, bound: Bound, why: str) -> TooManyHeldError:
        self._refused.labels(bound).inc()
        return TooManyHeldError(f"{why}, which is the limit; nothing was forwarded")

    def _owner_error(self, bound: str, why: str) -> KeyHeldLimitError:
        self._refused.labels(bound).inc()
        return KeyHeldLimitError(f"{why}, which is the limit; nothing was forwarded")


def _one_less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _owners(key: Key | None) -> tuple[tuple[str, str], ...]:
    """Return the owners of what a request of this key keeps, besides the total."""
    return () if key is None else (("key", key.name), ("tenant", key.tenant))


class KeptBody:
    """A body that did not come with its head, from before it is read until its turn may run or its request ends."""

    __slots__ = ("_bytes", "_held", "_key")

    def __init__(self, held: HeldTurns) -> None:
        """Start with nothing kept."""
        self._held = held
        self._key = caller_key()
        self._bytes = 0

    def check(self, body_bytes: int) -> None:
        """Check that there is room for `body_bytes` now; they are counted as they arrive. Raises as `take` does."""
        self._held.take(self._key, 0, body_bytes)
        self._held.give_back(self._key, 0, body_bytes)

    def grow(self, body_bytes: int) -> None:
        """Count more bytes. Raises as `HeldTurns.take` does."""
        self._held.take(self._key, 0, body_bytes)
        self._bytes += body_bytes

    def release(self) -> None:
        """Stop counting it; idempotent."""
        if self._bytes:
            self._held.give_back(self._key, 0, self._bytes)
            self._bytes = 0


class HeldTurn:
    """The block in which one turn is held; what `kept` counted of its body before, if given, is counted there."""

    __slots__ = ("_body_bytes", "_held", "_kept", "_key")

    def __init__(self, held: HeldTurns, kept: Kept | None, body_bytes: int) -> None:
        """Do nothing yet: most turns are not held."""
        self._held = held
        self._kept = kept
        self._body_bytes = body_bytes

    def __enter__(self) -> None:
        self._key: Key | None = caller_key()
        if self._kept is not None:
            self._kept.release()
        self._held.take(self._key, 1, self._body_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.give_back(self._key, 1, self._body_bytes)
