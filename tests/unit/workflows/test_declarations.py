"""Declarations and stubs: read, compared with the classes, written, imported and type-checked."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import thunderagent
from tests.unit.workflows.agents import AGENTS, HERE, only
from thunderagent.cli import main as cli
from thunderagent_workflows import DeclarationError, deploy
from thunderagent_workflows.declare import load_agents
from thunderagent_workflows.instance import load_class
from thunderagent_workflows.stubs import GIVEN_DIRECTIVES
from thunderagent_workflows.type_check import takes


@pytest.fixture
def stubs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the command write stubs of all agents, where they can be imported."""
    (tmp_path / "agents.yaml").write_text(yaml.safe_dump(AGENTS, sort_keys=False))
    assert cli(["workflow", "stubs", str(tmp_path / "agents.yaml"), "--out", str(tmp_path / "made_stubs")]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("made_stubs")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "made_stubs"


def test_stubs_are_modules_whose_functions_make_calls(stubs_folder: Path) -> None:
    assert {path.stem for path in stubs_folder.glob("*.py")} == {"__init__", *AGENTS}
    echo = importlib.import_module("made_stubs.echo")
    with deploy(only("echo"), policies=()) as app:
        assert app.run(lambda: echo.say(echo.say(text="x")).value(10)) == "x"


def test_stubs_pass_a_strict_type_check(stubs_folder: Path) -> None:
    """It is as strict as for the package, and uses the cache of that check: otherwise this takes many seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "-p", "made_stubs"],
        cwd=Path(thunderagent.__file__).parents[1],
        env={**os.environ, "MYPYPATH": str(stubs_folder.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_stubs_of_before_say_what_to_change() -> None:
    """They import from where the workflows were."""
    with pytest.raises(ImportError, match=r"change the import, and write stubs again"):
        importlib.import_module("thunderagent.workflows")


def test_directives_in_code_go_before_those_of_the_file(stubs_folder: Path) -> None:
    del stubs_folder
    echo = importlib.import_module("made_stubs.echo")
    try:
        echo.configure(max_instances=4, max_resources={"GPU": 2})
        echo.init(stateful=True)
        directives = deploy(only("echo"), policies=()).agents["echo"].directives
    finally:
        GIVEN_DIRECTIVES.clear()
    assert (directives.max_instances, directives.resources, directives.stateful) == (4, {"gpu": 2.0}, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"class": "nothing"}, "class_path|class"),
        ({"class": "os:path", "methods": {}}, "methods"),
        ({"class": "os:path", "methods": {"join": {}}, "stateful": "perhaps"}, "directives.stateful"),
        ({"class": "os:path", "methods": {"join": {}}, "colour": "red"}, "directives.colour"),
        ({"class": "os:path", "methods": {"join": {}}, "batchable": True, "managed": True}, "managed state"),
        ({"class": "os:path", "methods": {"join": {}}, "batchable": True, "preemptable": "x"}, "cannot be interrupted"),
        ({"class": "os:path", "methods": {"join": {}}, "min_instances": 3, "max_instances": 2}, "than max_instances"),
        ("text", "class and methods"),
    ],
)
def test_wrong_declaration_says_what_is_wrong(given: Any, said: str) -> None:
    with pytest.raises(DeclarationError, match=f"agent a: .*({said})"):
        load_agents({"a": given})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"class": f"{HERE}:Nobody"}, "cannot be imported"),
        ({"class": "no.such.module:Echo"}, "cannot be imported"),
        ({"class": f"{HERE}:AGENTS"}, "is not a class"),
        ({"methods": {"sing": {}}}, "has no method sing"),
        ({"methods": {"say": {}}}, "is not how"),
        ({"methods": {"say": {"word": "str"}}}, "its parameters are"),
        ({"methods": {"fail": {"text": "int"}}}, r"fail is declared with text: int, its parameter is text: '?str"),
        ({"methods": {"fail": {"text": "str | None"}}}, "fail is declared with text"),
        ({"methods": {"fail": {"text": "NoSuchType"}}}, "fail is declared with text"),
        ({"methods": {"fail": {"text": "print('run')"}}}, "fail is declared with text"),
        ({"methods": {"fail": {"text": "str"}}, "batchable": True}, "fail is declared with text"),
        ({"methods": {"say": {"text": "str"}}, "preemptable": "stop"}, "has no method stop"),
        ({"methods": {"say": {"text": "str"}}, "preemptable": "fail"}, "is a plain method"),
    ],
)
def test_a_declaration_is_held_against_the_class(changes: dict[str, Any], said: str) -> None:
    (agent,) = load_agents({"echo": {**AGENTS["echo"], **changes}}).values()
    with pytest.raises(DeclarationError, match=said):
        load_class(agent)


@pytest.mark.parametrize(
    ("wanted", "declared"),
    [
        (int, "int"),
        (int, "bool"),
        (float, "int"),
        (Any, "list[str]"),
        (object, "dict"),
        (inspect.Parameter.empty, "str"),
        (str, "Any"),
        ("str | None", "str"),
        (str | int | None, "int | None"),
        (Sequence[int], "list[int]"),
        ("Mapping[str, int]", "dict[str, int]"),
        (dict[str, Any], "dict"),
        (list[Path], "list[Path]"),
        ("OnlyForCheckers", "OnlyForCheckers"),
        (Callable[[int], str], "Callable[[int], str]"),
        (Literal["a", "b"], "str"),
    ],
)
def test_a_parameter_takes_what_is_at_least_as_narrow(wanted: Any, declared: str) -> None:
    """Types that exist only for a type checker cannot be resolved, and are compared by name."""
    assert takes(wanted, declared, {"Path": Path})


@pytest.mark.parametrize(
    ("wanted", "declared"),
    [
        (int, "float"),
        (str, "str | None"),
        (Sequence[int], "list[str]"),
        (list[int], "tuple[int]"),
        ("OnlyForCheckers", "str"),
        (int, "__import__('os').getpid()"),
        (int, "[int][0] if True else str"),
    ],
)
def test_a_parameter_does_not_take_another_type(wanted: Any, declared: str) -> None:
    assert not takes(wanted, declared, {})


@pytest.mark.parametrize(
    "methods", [{"class": {}}, {"configure": {}}, {"say": {"not a name": "str"}}, {"say": {"text": "list["}}]
)
def test_declaration_that_makes_no_python_is_refused(methods: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "agents.yaml"
    path.write_text(yaml.safe_dump({"echo": {**AGENTS["echo"], "methods": methods}}))
    assert cli(["workflow", "stubs", str(path), "--out", str(tmp_path / "out"), "--no-check"]) == 2
    assert "agent echo" in capsys.readouterr().err


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert cli(["workflow", "stubs", str(tmp_path / "missing.yaml")]) == 2
    assert "missing.yaml" in capsys.readouterr().err
