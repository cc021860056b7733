"""What a session did, call by call: as Chrome trace events, which Perfetto opens, and as one self-contained page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from thunderagent_workflows.scope import LogEntry, SessionInfo

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
_STYLE = "body{font:13px sans-serif;margin:16px}td,th{padding:2px 10px;text-align:left}text{font:11px sans-serif}"
_ROW_PX, _LEFT_PX, _WIDTH_PX = 22, 150, 1000


def entries_of(info: SessionInfo) -> list[LogEntry]:
    """Return a session's finished calls, in order of creation."""
    return sorted((LogEntry(*each) for each in info.log), key=lambda entry: entry.created_s)


def chrome_trace(info: SessionInfo) -> dict[str, Any]:
    """Return the trace: a row an instance, a bar a call, and who waited for how long. Times are in microseconds."""
    entries = entries_of(info)
    rows = {location: number + 1 for number, location in enumerate(dict.fromkeys(entry.location for entry in entries))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": f"session {info.name}"}}
    ]
    for location, row in rows.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": location or "nowhere"}})
    for entry in entries:
        began_s = entry.began_s or entry.ended_s
        args = {
            "call": entry.call_id,
            "parent": entry.parent_id,
            "queued_ms": round((began_s - entry.created_s) * 1e3, 3),
            "stage": entry.stage_count,
            "moves": entry.moves_count,
            "failed": entry.is_failed,
        }
        events.append(
            {
                "ph": "X",
                "name": f"{entry.agent}.{entry.method}",
                "cat": entry.agent,
                "pid": 1,
                "tid": rows[entry.location],
                "ts": round(began_s * 1e6, 1),
                "dur": round((entry.ended_s - began_s) * 1e6, 1),
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def stages(info: SessionInfo) -> list[dict[str, Any]]:
    """Return, by agent and method, the number of calls, their waiting and running times, and their locations."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries_of(info):
        name = f"{entry.agent}.{entry.method}"
        row = found.setdefault(name, {"name": name, "calls": 0, "failed": 0, "queued_s": 0.0, "ran_s": 0.0, "at": []})
        began_s = entry.began_s or entry.ended_s
        row["calls"] += 1
        row["failed"] += entry.is_failed
        row["queued_s"] += began_s - entry.created_s
        row["ran_s"] += entry.ended_s - began_s
        if entry.location not in row["at"]:
            row["at"].append(entry.location)
    return list(found.values())


def page(info: SessionInfo) -> str:
    """Return the timeline as one HTML page: pale is waiting, full is running, red is failed."""
    entries = entries_of(info)
    start_s = min([entry.created_s for entry in entries], default=0.0)
    span_s = max([entry.ended_s - start_s for entry in entries], default=0.0) or 1e-9
    agents = {agent: _COLOURS[i % 8] for i, agent in enumerate(dict.fromkeys(entry.agent for entry in entries))}
    lanes: list[tuple[str, float]] = []
    bars = []
    for entry in entries:
        row = next(
            (i for i, (at, end_s) in enumerate(lanes) if at == entry.location and end_s <= entry.created_s), None
        )
        if row is None:
            row = len(lanes)
            lanes.append((entry.location, 0.0))
        lanes[row] = (entry.location, entry.ended_s)
        bars.append(_bar(entry, row, start_s, span_s, agents[entry.agent]))
    labels = [
        f'<text x="4" y="{row * _ROW_PX + 15}">{escape(location or "nowhere")}</text>'
        for row, (location, _) in enumerate(lanes)
    ]
    table = "".join(
        f"<tr><td>{escape(row['name'])}<td>{row['calls']}<td>{row['failed']}<td>{row['queued_s']:.3f}"
        f"<td>{row['ran_s']:.3f}<td>{escape(', '.join(row['at']))}"
        for row in stages(info)
    )
    height = len(lanes) * _ROW_PX + 4
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Session {escape(info.name)}</title>
<style>{_STYLE}</style>
<h1>Session {escape(info.name)}</h1>
<p>{len(entries)} calls in {span_s:.3f} s. Pale: waiting. Full: running. Red edge: failed.</p>
<svg width="{_LEFT_PX + _WIDTH_PX + 10}" height="{height}" role="img">{"".join(labels)}{"".join(bars)}</svg>
<table><tr><th>Call<th>Calls<th>Failed<th>Waited, s<th>Ran, s<th>Where{table}</table>
</html>
"""


def write(info: SessionInfo, path: Path) -> None:
    """Write the timeline: the page to `.html`, the trace to anything else."""
    path.write_text(page(info) if path.suffix == ".html" else json.dumps(chrome_trace(info)))


def _bar(entry: LogEntry, row: int, start_s: float, span_s: float, colour: str) -> str:
    def x(at_s: float) -> float:
        return _LEFT_PX + (at_s - start_s) / span_s * _WIDTH_PX

    began_s = entry.began_s or entry.ended_s
    y, height = row * _ROW_PX + 3, _ROW_PX - 6
    edge = ' stroke="#c00" stroke-width="2"' if entry.is_failed else ""
    title = escape(
        f"{entry.agent}.{entry.method} #{entry.call_id}: waited {began_s - entry.created_s:.3f} s, "
        f"ran {entry.ended_s - began_s:.3f} s, stage {entry.stage_count}, moved {entry.moves_count} times"
    )
    waited = max(0.0, x(began_s) - x(entry.created_s))
    ran = max(1.0, x(entry.ended_s) - x(began_s))
    return (
        f"<g><title>{title}</title>"
        f'<rect x="{x(entry.created_s):.1f}" y="{y}" width="{waited:.1f}" height="{height}" fill="{colour}" '
        'opacity=".3"/>'
        f'<rect x="{x(began_s):.1f}" y="{y}" width="{ran:.1f}" height="{height}" fill="{colour}"{edge}/></g>'
    )
