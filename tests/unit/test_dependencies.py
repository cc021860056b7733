"""The installed packages are those of `pyproject.toml`, and no version with a known hole is allowed."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from mypy import api
from packaging.requirements import Requirement
from packaging.version import Version

import thunderagent
from thunderagent.cli.command_line import _PACKAGED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = [
    tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    for name in ("thunderagent-nova", "thunderagent-workflows")
]
REQUIREMENTS = [
    Requirement(line)
    for project in (PROJECT, *PACKAGES)
    for lines in (project["dependencies"], *project.get("optional-dependencies", {}).values())
    for line in lines
]

UNSAFE = {"aiohttp": "3.14.3"}
"""The last version with a known hole: CVE-2026-69243, -69244, -111750 (request smuggling, a read out of bounds)."""


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_installed_packages_match_the_requirements(requirement: Requirement) -> None:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        pytest.skip("an extra that is not installed")
    assert requirement.specifier.contains(installed, prereleases=True), installed


@pytest.mark.parametrize("name", UNSAFE)
def test_no_version_with_a_known_hole_may_be_installed(name: str) -> None:
    (asked,) = (requirement for requirement in REQUIREMENTS if requirement.name == name)
    assert not asked.specifier.contains(UNSAFE[name])


def test_the_proxy_stands_on_no_client_that_nobody_mends() -> None:
    """`httpx` had its last release in 2024; its fork `httpx2` is maintained."""
    assert "httpx" not in {requirement.name for requirement in REQUIREMENTS}


def test_an_extra_that_a_message_names_is_there() -> None:
    """How to install it depends on the source of the package, which is on no index."""
    modules = [path.read_text() for folder in ("thunderagent", "packages") for path in (ROOT / folder).rglob("*.py")]
    message = re.compile(r"install thunderagent with the extra `([a-z0-9-]+)`")
    named = {name for text in modules for name in message.findall(text)}
    assert {"kubernetes", "kv-events", "otel", "plots"} <= named <= PROJECT["optional-dependencies"].keys()
    assert [text for text in modules if re.search(r"pip install '(?:\.|thunderagent)\[", text)] == []


def test_a_package_that_a_message_names_is_there_and_no_extra_fetches_it() -> None:
    """An extra would ask an index for its name, where a stranger may have it."""
    assert set(_PACKAGED.values()) == {project["name"] for project in PACKAGES}
    assert not {requirement.name for requirement in REQUIREMENTS} & set(_PACKAGED.values())


def test_the_version_stands_in_one_place() -> None:
    """It is in the package; builds read it there."""
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["readme", "version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", thunderagent.__version__)


@pytest.mark.parametrize("project", PACKAGES, ids=lambda project: project["name"])
def test_a_package_beside_has_the_version_and_asks_for_no_later_minor_one(project: dict[str, Any]) -> None:
    """A minor version may change what they import."""
    ours = Version(thunderagent.__version__)
    assert project["version"] == str(ours)
    assert f"thunderagent>={ours},<{ours.major}.{ours.minor + 1}" in project["dependencies"]


def test_a_compiled_build_needs_none_of_them(tmp_path: Path) -> None:
    """It is made before they are installed: a class of msgspec's is then one of anything, whatever it is given."""
    types = re.search(r'^TYPES = """(.*?)"""', (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)
    assert types is not None
    (tmp_path / "mypy.ini").write_text(types[1])
    options = ["--no-site-packages", f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={tmp_path}"]
    assert api.run([*options, str(ROOT / "thunderagent/log_lines.py")])[2] == 0
