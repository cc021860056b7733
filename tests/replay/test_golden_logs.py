"""The golden event logs: recorded incidents give the recorded decisions, or the difference is shown."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.replay.make_logs import HISTORIES, POLICIES, log_of, write_log
from thunderagent.cli import main
from thunderagent.programs.invariants import check
from thunderagent.programs.policies import POLICIES as EVERY_POLICY
from thunderagent.runtime.event_log import replay


@pytest.mark.parametrize("name", [*POLICIES, *HISTORIES])
def test_a_recorded_log_is_decided_as_it_was(name: str) -> None:
    """Every decision is the same, and the invariants hold after every event."""
    with log_of(name).open("rb") as lines:
        report = replay(lines, after_event=check)
    assert report.difference is None, f"{report.difference}\nIf that is meant: python tests/replay/make_logs.py"
    assert name in (report.policy, *HISTORIES)
    assert report.events_count > 200
    assert report.decisions_count > 100


def test_a_log_of_the_former_format_is_decided_as_it_was() -> None:
    """There a turn arrived and ended by events of other names, with times in place of durations."""
    with (log_of("").parent / "format-1" / "history-admission.jsonl").open("rb") as lines:
        report = replay(lines, after_event=check)
    assert report.difference is None, report.difference
    assert report.decisions_count > 100


@pytest.mark.parametrize("name", [*POLICIES, *HISTORIES])
def test_the_generator_writes_the_golden_log_again(name: str, tmp_path: Path) -> None:
    """The files are byte for byte what the script writes: none was edited by hand."""
    write_log(name, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == log_of(name).read_bytes()


def test_every_policy_has_a_golden_log() -> None:
    """A new policy needs its own log."""
    assert set(POLICIES) == set(EVERY_POLICY)


def test_the_incidents_have_what_makes_a_policy_decide() -> None:
    """Together the incidents have every kind of decision, and nearly every reason."""
    seen: Counter[str] = Counter()
    reasons = set()
    for log in (*POLICIES, *HISTORIES):
        for line in log_of(log).read_bytes().splitlines()[1:]:
            for name, fields in msgspec.json.decode(line)[2]:
                seen[name] += 1
                reasons.add(fields["reason"])
    decisions = {"Grant", "Hold", "Reject", "Pause", "Mark", "Unmark", "Restore", "Release"}
    assert set(seen) == decisions | {"SetRoute", "SetPriority", "Provision", "EndReplica"}
    assert reasons >= {
        *("anonymous", "home", "fits", "policy", "no_room", "queue_ahead", "no_replica", "thrashing"),
        *("marked", "idle", "replica_down", "replica_draining", "moved", "released", "forgotten"),
        *("expired", "relieved", "suspended", "leaving", "admission", "patience", "overdrawn", "parent"),
        *("replica_tripped", "replica_removed", "operator", "killed", "too_many_programs", "oversize"),
    }


def test_a_changed_decision_is_shown_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`thunderagent replay` ends with 1 and names the line, the event, and both decisions."""
    lines = log_of("cap").read_bytes().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if b'"Grant"' in line)
    lines[number] = lines[number].replace(b'"replica_id":"r0"', b'"replica_id":"r9"')
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(b"".join(lines))
    assert main(["replay", str(changed)]) == 1
    out = capsys.readouterr().out
    assert f"a decision differs at line {number + 1}: TurnAsk(" in out
    assert "r9" in out.split("logged:")[1].split("decided:")[0]
    assert "r0" in out.split("decided:")[1]


def test_the_command_ends_with_0_where_every_decision_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints how much was compared."""
    assert main(["replay", str(log_of("sticky"))]) == 0
    assert capsys.readouterr().out.startswith("policy sticky: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty: not an event log"),
        (b"no json\n", "line 1: not the header of an event log"),
        (b'{"format":"thunderagent-events/9"}\n', "line 1: format 'thunderagent-events/9' is not"),
        (None, "No such file or directory"),
    ],
)
def test_the_command_ends_with_2_where_there_is_nothing_to_replay(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error gives the reason."""
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
