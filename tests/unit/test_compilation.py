"""A compiled build records its sources, and a change of one is reported."""

from __future__ import annotations

import ast
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import thunderagent
from thunderagent.cli import main
from thunderagent.compilation import DIGEST_FILE, STALE, compiled_sources, kind_of, sources_digest

PACKAGE = Path(thunderagent.__file__).parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package whose core has two modules, one that must be interpreted, and a policy with a part that need not be."""
    for name, text in {
        "programs/scheduler.py": "STEP = 1\n",
        "programs/state/costs.py": "COST = 2\n",
        "programs/messages.py": '"""Events."""\n\n# interpreted: its types are read\n',
        "programs/policies/cap.py": "N = 8\n",
        "programs/policies/helpers.py": '"""Helpers."""\n\n# compiled: every turn asks\n',
        "runtime/writer.py": '"""Runtime."""\n\n# compiled: every turn asks\n',
        "proxy/wire/heads.py": '"""Heads."""\n\n# compiled: every turn has two\n',
        "proxy/app.py": "",
        "tools/manager.py": "# compiled: nothing says so here\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def compile_all(package: Path) -> None:
    """Leave the files of a compiled build."""
    for source in compiled_sources(package):
        source.with_name(source.stem + EXTENSION_SUFFIXES[0]).touch()
    (package / DIGEST_FILE).write_text(sources_digest(package) + "\n")


def test_compiled_is_the_core_but_what_says_it_is_interpreted_and_of_the_shell_what_says_so(package: Path) -> None:
    """This holds wherever the modules are; policies count as shell."""
    names = [path.relative_to(package).as_posix() for path in compiled_sources(package)]
    core = ["programs/policies/helpers.py", "programs/scheduler.py", "programs/state/costs.py"]
    assert names == [*core, "proxy/wire/heads.py", "runtime/writer.py"]


def test_of_this_package_the_scheduler_and_the_wire_are_compiled_and_messages_are_not() -> None:
    """The event log reads the types of their fields, and policy loading those of settings."""
    names = {path.name for path in compiled_sources(PACKAGE)}
    assert {"scheduler.py", "book.py", "areas.py", "heads.py", "server.py", "identity.py"} <= names
    assert not {"messages.py", "breakeven.py", "least_area.py"} & names


def test_sources_alone_are_interpreted_and_compiled_ones_say_so(package: Path) -> None:
    assert kind_of(package) == "interpreted"
    compile_all(package)
    assert kind_of(package) == "compiled"


@pytest.mark.parametrize("name", ["programs/policies/cap.py", "proxy/app.py", "programs/messages.py"])
def test_interpreted_module_may_change(package: Path, name: str) -> None:
    compile_all(package)
    with (package / name).open("a") as source:
        source.write("CHANGED = 1\n")
    assert kind_of(package) == "compiled"


@pytest.mark.parametrize("change", ["edited", "added", "removed", "no digest", "a module less", "a module more"])
def test_changed_sources_are_noticed_in_a_compiled_build(package: Path, change: str) -> None:
    """Python would silently run the compiled ones."""
    compile_all(package)
    source = package / "programs" / "scheduler.py"
    match change:
        case "edited":
            source.write_text("STEP = 2\n")
        case "added":
            source.with_name("core.py").touch()
        case "removed":
            source.unlink()
        case "no digest":
            (package / DIGEST_FILE).unlink()
        case "a module more":
            source.with_name("left" + EXTENSION_SUFFIXES[0]).touch()
        case _:
            source.with_name("scheduler" + EXTENSION_SUFFIXES[0]).unlink()
    assert kind_of(package) == "stale"


def test_no_command_runs_on_a_stale_core(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """This includes simulations: their figures would come from other code than the visible one."""
    monkeypatch.setattr("thunderagent.cli.command_line.build_kind", lambda: "stale")
    assert main(["simulate", "--minutes", "1"]) == 2
    assert capsys.readouterr().err == f"thunderagent: error: {STALE}\n"


def bare_raises_after_waits(source: str) -> list[int]:
    """Return the lines of a bare `raise` in an `except` that waits."""
    found: list[int] = []
    for handler in ast.walk(ast.parse(source)):
        if isinstance(handler, ast.ExceptHandler):
            inside = list(ast.walk(handler))
            if any(isinstance(each, ast.Await | ast.AsyncWith | ast.AsyncFor) for each in inside):
                found += [each.lineno for each in inside if isinstance(each, ast.Raise) and each.exc is None]
    return found


@pytest.mark.parametrize("path", compiled_sources(Path(thunderagent.__file__).parent), ids=str)
def test_nothing_compiled_raises_again_by_a_bare_raise_where_it_waited(path: Path) -> None:
    """Compiled by mypyc, that raises garbage, and the process ends with a segmentation fault."""
    assert bare_raises_after_waits(path.read_text()) == []


def test_a_bare_raise_after_a_wait_is_found() -> None:
    source = "async def f():\n try:\n  g()\n except E as error:\n  if await h():\n   raise\n  raise error\n"
    assert bare_raises_after_waits(source) == [6]
