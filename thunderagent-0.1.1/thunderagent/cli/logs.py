"""`thunderagent replay` and `record`: what becomes of an event log."""

# ruff: noqa: PLC0415 - imported when it is asked for, as all commands are

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from thunderagent.errors import EventLogError


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add what `replay` takes."""
    parser.description = (
        "Feed the events of a log (`serve --event-log FILE`) through a fresh scheduler and compare its decisions with "
        "those in the log. Exit status 1 at the first difference."
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.set_defaults(run=run_replay)


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add what `record` takes."""
    parser.description = (
        "Turn an event log (`serve --event-log FILE`) into recorded programs, one JSON object a line: token counts and "
        "times, no text. `simulate` replays them against another policy."
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write; must be new")
    parser.set_defaults(run=run_record)


def run_replay(args: argparse.Namespace) -> int:
    """Replay a log and say what came out."""
    from thunderagent.runtime.event_log import replay

    try:
        with args.log.open("rb") as lines:
            report = replay(lines)
    except EventLogError as error:
        raise EventLogError(f"{args.log}: {error}") from error
    except OSError as error:
        print(f"thunderagent: error: cannot read {args.log}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"policy {report.policy}: {report.events_count} events, {report.decisions_count} decisions")
    print(report.goodput.words)
    if report.difference is None:
        print("every decision is the same")
        return 0
    print(f"a decision differs at {report.difference}")
    return 1


def run_record(args: argparse.Namespace) -> int:
    """Record the programs of a log and say what was left out."""
    from thunderagent.runtime.event_log import read_events
    from thunderagent.simulator.workloads.record import record

    try:
        with args.log.open("rb") as lines:
            recording = record(read_events(lines))
        with args.out.open("xb") as out:
            out.writelines(recording.lines())
    except EventLogError as error:
        raise EventLogError(f"{args.log}: {error}") from error
    except OSError as error:
        print(f"thunderagent: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{args.out}: {recording}")
    return 0
