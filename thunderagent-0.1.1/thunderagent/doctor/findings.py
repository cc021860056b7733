"""What an examination found: one thing each, with what to do about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from thunderagent.log_lines import escaped


class Level(StrEnum):
    """How bad a finding is. Only a fault makes the exit status 1."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    `check` is the machine-readable name of what was examined, `subject` the engine or the proxy that it is about, and
    `remedy` says what to do; it is empty where nothing need be done.
    """

    check: str
    level: Level
    subject: str
    text: str
    remedy: str = ""


def ok(check: str, subject: str, text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(check, Level.OK, subject, text)


def warning(check: str, subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that works, but could be better."""
    return Finding(check, Level.WARNING, subject, text, remedy)


def fault(check: str, subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that is wrong."""
    return Finding(check, Level.FAULT, subject, text, remedy)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if something is wrong, 0 otherwise."""
    return int(any(finding.level is Level.FAULT for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings for a program."""
    counts = Counter(finding.level for finding in findings)
    return json.dumps(
        {
            "faults_count": counts[Level.FAULT],
            "warnings_count": counts[Level.WARNING],
            "findings": [asdict(finding) for finding in findings],
        },
        indent=2,
    )


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings for a person: each with its subject, and under it what to do."""
    width = max(map(len, Level))
    for finding in findings:
        line = Text.assemble(
            (f"{finding.level:<{width}}", STYLES[finding.level]),
            "  ",
            (escaped(finding.subject), "bold"),
            f"  {escaped(finding.text)}",
        )
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':{width}}  → {escaped(finding.remedy)}"), soft_wrap=True)
    counts = Counter(finding.level for finding in findings)
    said = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in (Level.FAULT, Level.WARNING)]
    console.print(Text(f"{', '.join(said)}, {counts[Level.OK]} ok"), soft_wrap=True)
