"""A session's history: as trace events, as a page, and live in `thunderagent workflow top`."""

from __future__ import annotations

import json
import socket
import stat
import threading
from contextlib import suppress
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.workflows.agents import only
from thunderagent.cli import main as cli
from thunderagent_workflows import CallError, command, deploy, settle, stubs
from thunderagent_workflows.command import read_snapshot
from thunderagent_workflows.timeline import stages

if TYPE_CHECKING:
    from pathlib import Path


def workflow() -> None:
    first = stubs.call("echo", "say", ("<script>",))
    settle([stubs.call("blocking", "say", (first,)) for _ in range(3)])
    with pytest.raises(CallError):
        stubs.call("echo", "through", ("x",)).value()


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}


def test_a_timeline_has_every_call(tmp_path: Path) -> None:
    with deploy(only("echo", "blocking"), policies=()) as app:
        app.run(workflow, session="<s>")
        app.write_timeline("<s>", tmp_path / "trace.json")
        app.write_timeline("<s>", tmp_path / "page.html")
        app.end_session("<s>")
        info = app.session_log("<s>")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in calls].count("blocking.say") == 3
    assert len(calls) == 6
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(rows.values()) == {"echo/0", "blocking/0"}
    for event in calls:
        assert event["dur"] >= 0
        assert event["args"]["queued_ms"] >= 0
    failed = {event["name"] for event in calls if event["args"]["failed"]}
    assert failed == {"echo.through", "blocking.fail"}
    (inner,) = [event for event in calls if event["name"] == "blocking.fail"]
    assert [event["name"] for event in calls if event["args"]["call"] == inner["args"]["parent"]] == ["echo.through"]
    page = Page((tmp_path / "page.html").read_text())
    assert page.tags.count("rect") == 12
    assert "script" not in page.tags
    assert {row["name"]: row["calls"] for row in stages(info)} == {
        "echo.say": 1,
        "blocking.say": 3,
        "echo.through": 1,
        "blocking.fail": 1,
    }


def test_a_snapshot_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_SNAPSHOT_BYTES", 1000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "top.sock"))
        listening.listen()

        def endless() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                while True:
                    connection.sendall(b" " * 1000)

        answering = threading.Thread(target=endless)
        answering.start()
        with pytest.raises(ValueError, match="more than 1000 bytes"):
            read_snapshot(tmp_path / "top.sock")
        answering.join()


def test_top_shows_a_running_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "top.sock"
    with deploy(only("echo", "blocking"), policies=(), top=path) as app:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        app.run(workflow)
        app.act(lambda _: None)
        snapshot = read_snapshot(path)
        assert {each["location"]: each["done_count"] for each in snapshot["instances"]} == {
            "echo/0": 2,
            "blocking/0": 4,
        }
        assert cli(["workflow", "top", str(path), "--once"]) == 0
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if "blocking/0" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][:5] == ["blocking/0", "node-0", "0", "0", "4"]
    assert not path.exists()
    assert cli(["workflow", "top", str(path), "--once"]) == 1
