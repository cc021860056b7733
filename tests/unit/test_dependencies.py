"""What is installed is what `pyproject.toml` asks for, and nothing that is known to be unsafe may be."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
]

UNSAFE = {"aiohttp": "3.14.3"}
"""The last version with a known hole: CVE-2026-69243, -69244, -111750 (request smuggling, a read out of bounds)."""


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_what_is_installed_is_what_is_asked_for(requirement: Requirement) -> None:
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
    """`httpx` had its last release in 2024; its fork `httpx2` is looked after."""
    assert "httpx" not in {requirement.name for requirement in REQUIREMENTS}
