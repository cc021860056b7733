"""Finds a few metrics in an engine's Prometheus exposition, without reading all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


def samples_of(exposition: str, names: tuple[str, ...]) -> dict[str, list[Sample]]:
    """Return the samples of the metrics with exactly these names, in order; never raise. About 1 ms for 500 KB."""
    # An engine's exposition is up to several hundred KB of histogram buckets, and the parser is pure Python:
    # some 70 ms for 500 KB, in which every stream on the event loop stands still. So only the dozen lines we
    # need reach it. Each is parsed on its own: a broken line costs that line and no other. With no TYPE line
    # before it, a sample keeps the name it is exposed with (the parser would rename counters).
    samples: dict[str, list[Sample]] = {}
    for line in exposition.split("\n"):
        if not line.startswith(names):
            continue
        for sample in _parse_line(line):
            # The prefix also matches vllm:num_requests_waiting_by_reason; the whole name does not.
            if sample.name in names:
                samples.setdefault(sample.name, []).append(sample)
    return samples


def is_sane(value: float) -> bool:
    """Return whether a value can be a count or a ratio: not NaN, not negative, not infinite."""
    return 0 <= value < 2**63


def _parse_line(line: str) -> list[Sample]:
    try:
        families = list(text_string_to_metric_families(line))
        return [sample._replace(value=float(sample.value)) for family in families for sample in family.samples]
    except (ValueError, IndexError, OverflowError):  # the parser raises any of these for a broken line
        return []
