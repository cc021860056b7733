"""Finds a few metrics in an engine's Prometheus exposition, without reading all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from thunderagent.bounded import ExcessError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.samples import Sample

STARTED: Final = "process_start_time_seconds"

MAX_LINES_COUNT = 100_000
MAX_LINE_CHARS = 16 * 1024
MAX_SAMPLES_COUNT = 5_000
"""Of the dozen metrics that are read: one for each rank, and for each kind of cache."""


def check_exposition(exposition: str) -> None:
    """Raise `ExcessError` for more lines, or a longer one, than an engine writes."""
    if exposition.count("\n") > MAX_LINES_COUNT:
        raise ExcessError(f"has more than {MAX_LINES_COUNT} lines")
    begin = 0
    while len(exposition) - begin > MAX_LINE_CHARS:  # a few steps; a regular expression tries each character anew
        end = exposition.rfind("\n", begin, begin + MAX_LINE_CHARS + 1)
        if end < 0:
            raise ExcessError(f"has a line of more than {MAX_LINE_CHARS} characters")
        begin = end + 1


def samples_of(exposition: str, names: tuple[str, ...]) -> dict[str, list[Sample]]:
    """Return the samples of the metrics with exactly these names, in order. About 1 ms for 500 KB.

    Raises `ExcessError` for more than `MAX_SAMPLES_COUNT` of them, and nothing else.
    """
    # An engine's exposition is up to several hundred KB of histogram buckets, and the parser is pure Python:
    # some 70 ms for 500 KB, in which every stream on the event loop stands still. So only the dozen lines we
    # need reach it. Each is parsed on its own: a broken line costs that line and no other. With no TYPE line
    # before it, a sample keeps the name it is exposed with (the parser would rename counters).
    samples: dict[str, list[Sample]] = {}
    lines_count = 0
    for line in exposition.split("\n"):
        if not line.startswith(names):
            continue
        lines_count += 1
        if lines_count > MAX_SAMPLES_COUNT:
            raise ExcessError(f"has more than {MAX_SAMPLES_COUNT} samples of the metrics that are read")
        for sample in _parse_line(line):
            # The prefix also matches vllm:num_requests_waiting_by_reason; the whole name does not.
            if sample.name in names:
                samples.setdefault(sample.name, []).append(sample)
    return samples


def started_s_of(samples: Mapping[str, list[Sample]]) -> float | None:
    """Return when the process began, which has a line if it alone serves its metrics; None if that is unknown."""
    found = [sample.value for sample in samples.get(STARTED, ()) if is_sane(sample.value)]
    return found[0] if len(found) == 1 else None


def is_sane(value: float) -> bool:
    """Return whether a value can be a count or a ratio: not NaN, not negative, not infinite."""
    return 0 <= value < 2**63


def _parse_line(line: str) -> list[Sample]:
    try:
        families = list(text_string_to_metric_families(line))
        return [sample._replace(value=float(sample.value)) for family in families for sample in family.samples]
    except (ValueError, IndexError, OverflowError):  # the parser raises any of these for a broken line
        return []
