"""How many turns may be held, and how much of their bodies: for all callers together, and for each key.

A held turn keeps its body in memory until it has run, so whoever may hold turns without end may take all memory; so may
whoever sends bodies faster than they are read. A body counts as it comes, until its turn may run. Past what all may
keep a request gets 503; past what one key may, 429, because it is that key's to send less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from thunderagent.errors import KeyHeldLimitError, TooManyHeldError
from thunderagent.proxy.gate.keys import caller_key
from thunderagent.proxy.wire.exchange import KeptBody as Kept

Bound = Literal["turns", "bytes", "key_turns", "key_bytes"]


@dataclass(frozen=True, slots=True)
class HeldLimits:
    """What may be held. None of a key is half of that of all."""

    turns_count: int = 20_000
    body_bytes: int = 2**30
    key_turns_count: int | None = None
    key_body_bytes: int | None = None


NO_LIMITS = HeldLimits()


@dataclass(slots=True)
class _Sums:
    turns_count: int = 0
    body_bytes: int = 0


class HeldTurns:
    """Counts what is held, and refuses what would be too much."""

    def __init__(self, limits: HeldLimits, registry: CollectorRegistry) -> None:
        """Begin with nothing held."""
        self._limits = limits
        half_turns, half_bytes = max(1, limits.turns_count // 2), max(1, limits.body_bytes // 2)
        self._key_turns_count = half_turns if limits.key_turns_count is None else limits.key_turns_count
        self._key_body_bytes = half_bytes if limits.key_body_bytes is None else limits.key_body_bytes
        self._all = _Sums()
        self._by_key: dict[str, _Sums] = {}
        self._refused = Counter(
            "thunderagent_held_refused",
            "Turns that were refused instead of held, by the bound that was reached.",
            ["bound"],
            registry=registry,
        )
        for bound in ("turns", "bytes", "key_turns", "key_bytes"):
            self._refused.labels(bound)
        registry.register(self)

    def __repr__(self) -> str:
        return f"<HeldTurns: {self._all.turns_count} turns, {self._all.body_bytes} bytes>"

    def turn(self, kept: Kept | None, body_bytes: int) -> HeldTurn:
        """Return the block that a turn with a body of this size is held in; until now `kept` counted it, if anybody."""
        return HeldTurn(self, kept, body_bytes)

    def collect(self) -> Iterator[Metric]:
        """Yield what is kept now; turns are counted by the scheduler."""
        yield GaugeMetricFamily(
            "thunderagent_held_body_bytes",
            "Bodies of held turns, and those that are on their way.",
            self._all.body_bytes,
        )

    def take(self, key_name: str, turns_count: int, body_bytes: int) -> None:
        """Count what is kept from now on. Raises `KeyHeldLimitError` or `TooManyHeldError`."""
        mine = self._by_key.get(key_name) or _Sums()
        if key_name:
            if turns_count and mine.turns_count >= self._key_turns_count:
                raise self._key_error("key_turns", f"{mine.turns_count:,} turns of this key are held")
            if mine.body_bytes and mine.body_bytes + body_bytes > self._key_body_bytes:
                raise self._key_error("key_bytes", f"bodies of {mine.body_bytes:,} bytes of this key are kept")
        if turns_count and self._all.turns_count >= self._limits.turns_count:
            raise self._error("turns", f"{self._all.turns_count:,} turns are held")
        if self._all.body_bytes and self._all.body_bytes + body_bytes > self._limits.body_bytes:
            raise self._error("bytes", f"bodies of {self._all.body_bytes:,} bytes are kept")
        if key_name:
            self._by_key[key_name] = mine
        for sums in (self._all, mine):
            sums.turns_count += turns_count
            sums.body_bytes += body_bytes

    def give_back(self, key_name: str, turns_count: int, body_bytes: int) -> None:
        """Count what is kept no longer."""
        mine = self._by_key[key_name] if key_name else None
        for sums in (self._all, mine):
            if sums is not None:
                sums.turns_count -= turns_count
                sums.body_bytes -= body_bytes
        if mine is not None and not mine.turns_count and not mine.body_bytes:
            del self._by_key[key_name]

    def _error(self, bound: Bound, why: str) -> TooManyHeldError:
        self._refused.labels(bound).inc()
        return TooManyHeldError(f"{why}, and no more may be; nothing was forwarded")

    def _key_error(self, bound: Bound, why: str) -> KeyHeldLimitError:
        self._refused.labels(bound).inc()
        return KeyHeldLimitError(f"{why}, and no more may be; nothing was forwarded")


class KeptBody:
    """A body that did not come with its head, from before it is read until its turn may run or its request ends."""

    __slots__ = ("_bytes", "_held", "_key_name")

    def __init__(self, held: HeldTurns) -> None:
        """Keep nothing yet."""
        self._held = held
        self._key_name = _key_name()
        self._bytes = 0

    def check(self, body_bytes: int) -> None:
        """Check that there is room for so much now; it is not counted before it comes. Raises as `take` does."""
        self._held.take(self._key_name, 0, body_bytes)
        self._held.give_back(self._key_name, 0, body_bytes)

    def grow(self, body_bytes: int) -> None:
        """Count so much more. Raises as `HeldTurns.take` does."""
        self._held.take(self._key_name, 0, body_bytes)
        self._bytes += body_bytes

    def release(self) -> None:
        """Count it no longer; idempotent."""
        if self._bytes:
            self._held.give_back(self._key_name, 0, self._bytes)
            self._bytes = 0


class HeldTurn:
    """The block in which one turn is held; what was kept of its body before is counted there."""

    __slots__ = ("_body_bytes", "_held", "_kept", "_key_name")

    def __init__(self, held: HeldTurns, kept: Kept | None, body_bytes: int) -> None:
        """Do nothing yet: most turns are not held."""
        self._held = held
        self._kept = kept
        self._body_bytes = body_bytes
        self._key_name = ""

    def __enter__(self) -> None:
        self._key_name = _key_name()
        if self._kept is not None:
            self._kept.release()
        self._held.take(self._key_name, 1, self._body_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.give_back(self._key_name, 1, self._body_bytes)


def _key_name() -> str:
    key = caller_key()
    return key.name if key is not None else ""
