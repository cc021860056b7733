"""How many turns may be held, and how much of their bodies: for all callers together, and for each key.

A held turn keeps its body in memory until it has run, so whoever may hold turns without end may take all memory. Past
what all may hold a turn gets 503; past what one key may hold, 429, because it is that key's to send less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from thunderagent.errors import KeyHeldLimitError, TooManyHeldError
from thunderagent.proxy.keys import caller_key

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

    def turn(self, body_bytes: int) -> HeldTurn:
        """Return the block that a turn of this request, with a body of this size, is held in."""
        return HeldTurn(self, body_bytes)

    def collect(self) -> Iterator[Metric]:
        """Yield what is held now; turns are counted by the scheduler."""
        yield GaugeMetricFamily("thunderagent_held_body_bytes", "Bodies of held turns.", self._all.body_bytes)

    def enter(self, key_name: str, body_bytes: int) -> None:
        """Take in one more held turn. Raises `KeyHeldLimitError` or `TooManyHeldError`."""
        mine = self._by_key.get(key_name) or _Sums()
        if key_name:
            if mine.turns_count >= self._key_turns_count:
                raise self._key_error("key_turns", f"{self._key_turns_count:,} turns of this key are held")
            if mine.turns_count and mine.body_bytes + body_bytes > self._key_body_bytes:
                raise self._key_error("key_bytes", f"bodies of {mine.body_bytes:,} bytes of this key are held")
        if self._all.turns_count >= self._limits.turns_count:
            raise self._error("turns", f"{self._all.turns_count:,} turns are held")
        if self._all.turns_count and self._all.body_bytes + body_bytes > self._limits.body_bytes:
            raise self._error("bytes", f"bodies of {self._all.body_bytes:,} bytes are held")
        if key_name:
            self._by_key[key_name] = mine
        for sums in (self._all, mine):
            sums.turns_count += 1
            sums.body_bytes += body_bytes

    def leave(self, key_name: str, body_bytes: int) -> None:
        """Let go of a turn that is held no longer."""
        sums_of = [self._all, *([self._by_key[key_name]] if key_name else [])]
        for sums in sums_of:
            sums.turns_count -= 1
            sums.body_bytes -= body_bytes
        if key_name and not self._by_key[key_name].turns_count:
            del self._by_key[key_name]

    def _error(self, bound: Bound, why: str) -> TooManyHeldError:
        self._refused.labels(bound).inc()
        return TooManyHeldError(f"{why}, and no more may be; the turn was not forwarded")

    def _key_error(self, bound: Bound, why: str) -> KeyHeldLimitError:
        self._refused.labels(bound).inc()
        return KeyHeldLimitError(f"{why}, and no more may be; the turn was not forwarded")


class HeldTurn:
    """The block in which one turn is held."""

    __slots__ = ("_body_bytes", "_held", "_key_name")

    def __init__(self, held: HeldTurns, body_bytes: int) -> None:
        """Do nothing yet: most turns are not held."""
        self._held = held
        self._body_bytes = body_bytes
        self._key_name = ""

    def __enter__(self) -> None:
        key = caller_key()
        self._key_name = key.name if key is not None else ""
        self._held.enter(self._key_name, self._body_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.leave(self._key_name, self._body_bytes)
