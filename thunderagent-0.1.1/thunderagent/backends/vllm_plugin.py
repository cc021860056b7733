"""`thunderagent-vllm`, the scheduler for vLLM that knows programs: its path, and what its reports mean.

Both halves may be older or newer: a report needs its protocol and whether the scheduler is on; what else is missing or
unreadable is None or empty.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROGRAMS_PATH: Final = "/thunderagent/programs"
"""GET reports; POST takes messages, and reports."""

PROTOCOL: Final = 1
"""The newest protocol that is spoken here. An engine that has a newer one still understands it."""

PIN_EVENTS: Final = ("kept", "used", "expired", "given_back", "released", "refused", "dropped")
STARTS: Final = ("warm", "cold")
CHUNKS: Final = ("whole", "bounded", "shrunk")

MOST_LEVELS_COUNT: Final = 16
MOST_WORD_CHARACTERS: Final = 40
MOST_REASON_CHARACTERS: Final = 200
MOST_COUNT: Final = 1e15


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What one engine, or one of its data-parallel ranks, says of its programs; None is what it did not say.

    Totals begin with the engine's process. `mode` is `on`, or `watch` if it only counts.
    """

    protocol: int
    is_on: bool
    version: str = ""
    vllm_version: str = ""
    mode: str = ""
    why_not: str = ""
    """Why vLLM's own scheduler runs in its place, if that was so from the start."""
    capacity_tokens: int | None = None
    """What the pool holds."""
    total_blocks_count: int | None = None
    free_blocks_count: int | None = None
    pinned_blocks_count: int | None = None
    """Blocks held for programs whose tools run; the engine's metrics count them as used."""
    pins_count: int | None = None
    programs_count: int | None = None
    pins_total: Mapping[str, int] = field(default_factory=dict)
    """What became of pins, by event: one of `PIN_EVENTS`."""
    turns_total: Mapping[str, int] = field(default_factory=dict)
    """Turns whose program was pinned as they began (`warm`), and others (`cold`)."""
    chunks_total: Mapping[str, int] = field(default_factory=dict)
    preemptions_total: Mapping[str, int] = field(default_factory=dict)
    """By level; -1 had begun to generate."""
    steps_total: int | None = None
    hook_seconds_total: float | None = None
    failures_total: int | None = None

    @property
    def pinned_ratio(self) -> float:
        """The part of the pool that is held for programs; 0 if unknown."""
        total = self.total_blocks_count
        return min(1.0, (self.pinned_blocks_count or 0) / total) if total else 0.0


def read_reports(answer: bytes) -> list[PluginReport]:
    """Return the report of each data-parallel rank, at least one; empty if the answer is not a plugin's.

    Never raises.
    """
    try:
        said = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if not _is_report(said):
        return []
    ranks = said.get("ranks")
    each = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return [_report(rank, said) for rank in each or [said]]


def report_of(reports: Sequence[PluginReport], rank_id: int | None) -> PluginReport:
    """Return the report of a rank, or of the whole engine: it is on if all are, and the counts are sums."""
    if rank_id is not None and rank_id < len(reports):
        return reports[rank_id]
    first = reports[0]
    if len(reports) == 1:
        return first
    return PluginReport(
        first.protocol,
        all(each.is_on for each in reports),
        first.version,
        first.vllm_version,
        first.mode,
        next((each.why_not for each in reports if each.why_not), ""),
        _sum(each.capacity_tokens for each in reports),
        _sum(each.total_blocks_count for each in reports),
        _sum(each.free_blocks_count for each in reports),
        _sum(each.pinned_blocks_count for each in reports),
        _sum(each.pins_count for each in reports),
        _sum(each.programs_count for each in reports),
        _sums(each.pins_total for each in reports),
        _sums(each.turns_total for each in reports),
        _sums(each.chunks_total for each in reports),
        _sums(each.preemptions_total for each in reports),
        _sum(each.steps_total for each in reports),
        sum(each.hook_seconds_total or 0.0 for each in reports),
        _sum(each.failures_total for each in reports),
    )


def _is_report(said: Any) -> bool:
    if not isinstance(said, dict):
        return False
    protocol = said.get("protocol")
    return isinstance(protocol, int) and not isinstance(protocol, bool) and protocol >= 1 and "on" in said


def _report(rank: Mapping[str, Any], whole: Mapping[str, Any]) -> PluginReport:
    blocks = rank.get("blocks")
    blocks = blocks if isinstance(blocks, dict) else {}
    pins = rank.get("pins")
    seconds = rank.get("hook_seconds_total")
    return PluginReport(
        protocol=whole["protocol"],
        is_on=rank.get("on") is True and whole["on"] is True,
        version=_word(rank.get("version")),
        vllm_version=_word(rank.get("vllm")),
        mode=_word(rank.get("mode")),
        why_not=_word(rank.get("why_not"), MOST_REASON_CHARACTERS),
        capacity_tokens=_count(blocks.get("tokens")) or None,
        total_blocks_count=_count(blocks.get("total")),
        free_blocks_count=_count(blocks.get("free")),
        pinned_blocks_count=_count(blocks.get("pinned")),
        pins_count=len(pins) if isinstance(pins, dict) else None,
        programs_count=_count(rank.get("programs")),
        pins_total=_counts(rank.get("pins_total"), PIN_EVENTS),
        turns_total=_counts(rank.get("turns_total"), STARTS),
        chunks_total=_counts(rank.get("chunks_total"), CHUNKS),
        preemptions_total=_by_level(rank.get("preemptions_total")),
        steps_total=_count(rank.get("steps_total")),
        hook_seconds_total=float(seconds) if _is_number(seconds) else None,
        failures_total=_count(rank.get("failures_total")),
    )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _count(value: Any) -> int | None:
    return int(value) if _is_number(value) else None


def _word(value: object, most_characters: int = MOST_WORD_CHARACTERS) -> str:
    return value[:most_characters] if isinstance(value, str) and value.isprintable() else ""


def _counts(said: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the counts of these names only: an engine makes no labels up."""
    found = {name: _count(said.get(name)) for name in names} if isinstance(said, dict) else {}
    return {name: count for name, count in found.items() if count is not None}


def _by_level(said: Any) -> dict[str, int]:
    levels = [str(level) for level in range(-1, MOST_LEVELS_COUNT)]
    return _counts(said, levels)


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for each in counts:
        sums.update(each)
    return dict(sums)
