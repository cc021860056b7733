"""What the package's README shows runs as it stands, and what it says it lacks is not there."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import thunderagent_workflows
from thunderagent_workflows import deploy, stubs
from thunderagent_workflows.view import Act, Summary

README = (Path(__file__).parents[3] / "packages" / "thunderagent-workflows" / "README.md").read_text()
RECIPE = "a_recipe_of_the_readme"


class Planner:
    """The agent that the recipe leaves to its reader."""

    def split(self, goal: str) -> list[str]:
        return goal.split(" and ")


class _Stub:
    """An agent's module, as `thunderagent workflow stubs` writes it."""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: stubs.call(self._agent, method, arguments)


@pytest.fixture
def recipe() -> Iterator[Any]:
    """The README's fan-out with memory, as a module."""
    section = README.partition("### Fan out, with memory\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    module = ModuleType(RECIPE)
    names = {name: getattr(thunderagent_workflows, name) for name in ("managed_list", "settle")}
    module.__dict__.update(names, coder=_Stub("coder"), planner=_Stub("planner"))
    sys.modules[RECIPE] = module
    exec(compile(code, "README.md", "exec"), module.__dict__)
    yield module
    del sys.modules[RECIPE]


def test_a_fan_out_with_memory_runs_as_the_readme_has_it(recipe: Any) -> None:
    """Each call sees what those before it left, in this session alone."""
    agents: dict[str, Any] = {
        "planner": {"class": f"{__name__}:Planner", "methods": {"split": {"goal": "str"}}},
        "coder": {"class": f"{RECIPE}:Coder", "methods": {"build": {"part": "str"}}, "max_instances": 3},
    }
    with deploy(agents, policies=(), period_s=0.01) as app:
        built = app.run(recipe.main, "a form and a page and a test", session="s")
        assert built == ["a form, after 0 others", "a page, after 1 others", "a test, after 2 others"]
        assert app.run(recipe.main, "a door", session="s") == ["a door, after 3 others"]
        assert app.run(recipe.main, "a door", session="t") == ["a door, after 0 others"]


def test_what_the_readme_says_is_missing_beside_nalar_is_missing() -> None:
    """A report without resources, an instance without a place, no hand on KV caches: said, and so."""
    said = re.sub(r"\s+", " ", README.partition("## Where it differs from Nalar\n")[2].partition("\n## ")[0])
    assert "One hub, in the driver's process" in said
    assert "one central store" in said
    assert "Reports have no CPU or memory." in said
    assert not [field.name for field in fields(Summary) if re.search("cpu|memory|gpu|bytes", field.name)]
    assert "`provision` names no place" in said
    assert [*inspect.signature(Act.provision).parameters] == ["self", "agent"]
    assert "The proxy gets hints instead of orders to move KV caches." in said
    acts = {name for name, _ in inspect.getmembers(Act, inspect.isfunction) if not name.startswith("_")}
    assert acts == {"route", "set_priority", "migrate", "kill", "provision"}
