"""`thunderagent workflow stubs | top`."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from thunderagent_workflows.declare import load_agents
from thunderagent_workflows.errors import DeclarationError
from thunderagent_workflows.instance import load_class
from thunderagent_workflows.stubs import write_stubs

TIMEOUT_S = 5.0
MAX_SNAPSHOT_BYTES = 64 * 2**20
"""A deployment's is not larger, with a hundred thousand sessions."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add both to the parser of `thunderagent workflow`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    stubs = commands.add_parser(
        "stubs",
        help="write an importable module for each agent of a declaration",
        description="Write a typed, importable module for each agent that a YAML file declares, whose functions return "
        "futures. Each declaration is held against its class first.",
    )
    stubs.add_argument("file", type=Path, metavar="FILE", help="the declaration")
    stubs.add_argument("--out", type=Path, default=Path("stubs"), metavar="FOLDER", help="default: %(default)s")
    stubs.add_argument("--no-check", action="store_true", help="do not import the classes")
    stubs.set_defaults(run=run_stubs)
    top = commands.add_parser(
        "top", help="show the instances and sessions of a deployment", description="Show a running deployment."
    )
    top.add_argument("socket", type=Path, metavar="SOCKET", help="what `deploy(top=...)` was given")
    top.add_argument("--once", action="store_true", help="show it once instead of each second until Ctrl-C")
    top.set_defaults(run=run_top)


def run_stubs(args: argparse.Namespace) -> int:
    """Write stubs; check each declaration against its class first, unless told not to."""
    try:
        agents = load_agents(args.file)
        if not args.no_check:
            sys.path.insert(0, str(Path.cwd()))
            for agent in agents.values():
                load_class(agent)
        written = write_stubs(agents, args.out)
    except DeclarationError as error:
        print(f"thunderagent: error: {error}", file=sys.stderr)
        return 2
    print(f"{len(agents)} stubs in {args.out}: {', '.join(path.name for path in written)}")
    return 0


def run_top(args: argparse.Namespace) -> int:
    """Show a running deployment, again each second until Ctrl-C."""
    console = Console()
    try:
        if args.once:
            console.print(tables(read_snapshot(args.socket)))
            return 0
        with Live(tables(read_snapshot(args.socket)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)
                live.update(tables(read_snapshot(args.socket)), refresh=True)
    except (OSError, ValueError) as error:
        print(f"thunderagent: error: no deployment answers at {args.socket}: {error}", file=sys.stderr)
        return 1


def read_snapshot(path: Path) -> dict[str, Any]:
    """Return a deployment's snapshot. Raises `OSError`, `ValueError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
        with connection.makefile("rb") as answer:
            said = answer.read(MAX_SNAPSHOT_BYTES + 1)
    if len(said) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"it sent more than {MAX_SNAPSHOT_BYTES} bytes")
    found: dict[str, Any] = json.loads(said)
    return found


def tables(snapshot: dict[str, Any]) -> Group:
    """Return a snapshot as tables: instances, then the sessions with most calls."""
    instances = Table("Instance", "Node", "Runs", "Waits", "Done", "Mean", "Sessions that wait", title="Instances")
    for each in snapshot["instances"]:
        state = "retires" if each["is_retiring"] else str(each["running_count"])
        waiting = ", ".join(each["waiting"][:5])
        mean = f"{each['mean_s'] * 1e3:.1f} ms"
        counts = state, str(each["queued_count"]), str(each["done_count"])
        instances.add_row(each["location"], each["node"], *counts, mean, waiting)
    sessions = Table("Session", "Waits", "Stage", "Went back", "Priority", "Oldest", title="Sessions")
    for each in snapshot["sessions"]:
        sessions.add_row(
            each["session"],
            str(each["calls_count"]),
            str(each["stage_count"]),
            str(each["returns_count"]),
            f"{each['priority']:g}",
            f"{each['oldest_s']:.1f} s",
        )
    loop = snapshot["loop_ms"]
    said = f"loop {loop['total']:.1f} ms: {loop['merge']:.1f} merging, {loop['policies']:.1f} in policies"
    refused = "; ".join(snapshot["refused"][:3])
    return Group(instances, sessions, said, *([f"refused: {refused}"] if refused else []))
