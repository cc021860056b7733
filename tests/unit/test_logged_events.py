"""The page on logs has every event that our processes log at warning or worse, with its level, and no other event."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from thunderagent.runtime.writer import _WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thunderagent"
ELSEWHERE = {"client", "simulator"}
"""Packages whose log is that of other processes than the proxy's, as the page says."""
LEVEL_OF = {"warning": "warning", "error": "error", "exception": "error", "critical": "critical"}
LOGGER = re.compile(r"(?:\blog|_log|logger)$|get_logger\(")
"""What code calls a logger."""
SOURCES = {
    path: path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE
}


def literals(value: ast.expr, tree: ast.Module) -> Iterator[str]:
    """Yield the texts that an argument may be: one, either of two, or what callers in this module pass for it."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from literals(value.body, tree)
        yield from literals(value.orelse, tree)
    elif isinstance(value, ast.Name):
        taking = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        names = {each.name for each in taking if value.id in [arg.arg for arg in each.args.args[1:2]]}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield from literals(call.args[0], tree)


def logged_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the events that a module logs at warning or worse, with their levels."""
    tree = ast.parse(text)
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        if not LOGGER.search(ast.unparse(call.func.value)):
            continue
        if call.func.attr == "log" and "WARNING" in ast.unparse(call.args[0]):
            yield from ((event, "warning") for event in literals(call.args[1], tree))
        elif level := LEVEL_OF.get(call.func.attr):
            yield from ((event, level) for event in literals(call.args[0], tree))


LOGGED = {each: path for path, text in SOURCES.items() for each in logged_in(text)} | {
    ("log_lines_lost", "warning"): PACKAGE / "log_lines.py"
}


def rows() -> dict[str, str]:
    """Return the events of the page with the levels of their row."""
    text = (ROOT / "docs/reference/logs.md").read_text().partition("| `event` | Level | Meaning |")[2]
    cells = [row.split(" | ") for row in text.partition("\n\n")[0].splitlines() if row.startswith("| `")]
    return {event: levels for names, levels, *_ in cells for event in re.findall(r"`([^`]+)`", names)}


ROWS = rows()


@pytest.mark.parametrize(("event", "level"), sorted(LOGGED))
def test_an_event_at_warning_or_worse_has_a_row_with_its_level(event: str, level: str) -> None:
    assert event in ROWS, f"{LOGGED[event, level]} logs it, and docs/reference/logs.md does not have it"
    assert level in re.findall(r"\w+", ROWS[event])


def test_a_row_is_about_events_that_exist() -> None:
    """Each is a text of the code, or the name of a decision."""
    texts = {
        each.value
        for text in SOURCES.values()
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }
    assert set(ROWS) - texts - set(_WORDS.values()) == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('log.warning("a", x=1)', {("a", "warning")}),
        ('self._log.exception("a")', {("a", "error")}),
        ('structlog.get_logger("x").warning("a")', {("a", "warning")}),
        ('log.error("a" if x else "b")', {("a", "error"), ("b", "error")}),
        ('log.log(WARNING if x else DEBUG, "a")', {("a", "warning")}),
        ('log.info("a")', set()),
        ("def say(self, what): log.error(what)\nself.say('a')", {("a", "error")}),
    ],
)
def test_logged_events_are_found_in_the_code(code: str, found: set[tuple[str, str]]) -> None:
    """The test above sees each way in which events are logged."""
    assert set(logged_in(code)) == found
