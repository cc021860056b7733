"""CONTRIBUTING.md leads to where things are decided, and to files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "thunderagent"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def decisions() -> dict[str, list[tuple[str, list[str]]]]:
    """Return, by question, the files in which it is decided, each with the names that are said to be there."""
    table = CONTRIBUTING.partition("| Question | Decided in `thunderagent/` |\n|---|---|\n")[2].partition("\n\n")[0]
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for row in table.splitlines():
        question, answer = (cell.strip() for cell in row.strip("|").split("|"))
        places: list[tuple[str, list[str]]] = []
        for name in re.findall(r"`([^`]+)`", answer):
            if not name.endswith(".py"):
                files = places[-1][1] if places else []
                files.append(name)
            else:
                folder = "" if "/" in name else places[-1][0].rpartition("/")[0] if places else ""
                places.append((f"{folder}/{name}".lstrip("/"), []))
        found[question] = places
    return found


@pytest.mark.parametrize("question", decisions())
def test_what_is_decided_is_decided_there(question: str) -> None:
    """Each file is there, begins with a text that says why, and defines what is named."""
    places = decisions()[question]
    assert places
    for path, names in places:
        source = (PACKAGE / path).read_text()
        assert len(source.split('"""')[1]) > 50
        for name in names:
            assert re.search(rf"^ *(async def|def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE), (path, name)


def test_the_field_of_a_turn_is_added_as_shown() -> None:
    """What the diff takes away is there once, and the field would be the last one: gateways read by position."""
    diff = CONTRIBUTING.partition("```diff\n")[2].partition("```")[0]
    path, removed, touched = "", [], []
    for line in diff.splitlines():
        if line.startswith(" "):
            path = line.split(",")[0].strip()
            touched.append(path)
        elif line.startswith("-"):
            removed.append((path, line[1:]))
    assert len(touched) == 3
    assert [(path, line) for path, line in removed if (PACKAGE / path).read_text().count(f"{line}\n") != 1] == []
    assert all((PACKAGE / path).is_file() for path in touched)
    assert "is the last one of `TurnAsk`" in CONTRIBUTING


def test_every_file_that_is_named_exists() -> None:
    """A name of a Python file, or of a folder of the package, leads somewhere."""
    files = [
        f"/{path.relative_to(ROOT)}"
        for top in ("thunderagent", "tests", "scripts")
        for path in (ROOT / top).rglob("*.py")
    ]
    named = set(re.findall(r"`([\w/]+\.py)`", CONTRIBUTING))
    assert len(named) > 20
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files)] == []
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert [
        room for room in rooms if f"`thunderagent/{room}/" not in CONTRIBUTING and f"`{room}/`" not in CONTRIBUTING
    ] == []
