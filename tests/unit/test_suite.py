"""Tests of the test suite itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

TESTS = Path(__file__).parents[1]
SHOW_SETTINGS = """
import tests.conftest
from hypothesis import Phase, settings
print(settings.default.derandomize, Phase.generate in settings.default.phases)
"""


def test_random_examples_are_new_ones_where_ci_is_true() -> None:
    """There hypothesis' own profile would make the same ones each time."""
    environment = {**os.environ, "CI": "true"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_SETTINGS],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]
    fixed = [path for path in TESTS.rglob("test_*.py") if "derandomize" + "=True" in path.read_text()]
    assert not fixed


FILES = {
    "test_first.py": """
import pytest

@pytest.fixture(scope="module")
def once(request):
    yield
    request.config.rootpath.joinpath("over").touch()

def test_passes(once): pass
def test_fails(once): assert 1 + 1 == 3
def test_is_skipped(): pytest.skip("for a reason")
""",
    "test_second.py": """
import os

def test_passes(): print("which a process alone sees")
def test_ends_its_process(): os._exit({status})
def test_has_no_process_left(): pass
""",
    "test_third.py": "def test_passes(tmp_path): assert not list(tmp_path.iterdir())",
}


def _outcomes(
    folder: Path, *options: str, status: int = 0, files: dict[str, str] = FILES
) -> tuple[dict[str, str], str]:
    """Run the files side by side; return the outcome of each test, and the output."""
    for name, text in files.items():
        folder.joinpath(name).write_text(text.replace("{status}", str(status)))
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", str(folder), "--rootdir", str(folder), "-p", "tests.side_by_side"]
    more = ["--processes", "2", "-p", "no:cacheprovider", "-p", "no:xdist", "--junit-xml", str(report), *options]
    done = subprocess.run([*command, *more], cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = next((each.tag for each in case if each.tag in {"failure", "error", "skipped"}), "passed")
    return found, done.stdout + done.stderr


def test_side_by_side_every_test_is_reported_once_though_a_process_dies(tmp_path: Path) -> None:
    """The test that ended its process, and the later ones there, have failed, whatever the status was."""
    for status in (0, 3):
        found, said = _outcomes(tmp_path, status=status)
        assert found == {
            "test_first.test_passes": "passed",
            "test_first.test_fails": "failure",
            "test_first.test_is_skipped": "skipped",
            "test_second.test_passes": "passed",
            "test_second.test_ends_its_process": "failure",
            "test_second.test_has_no_process_left": "failure",
            "test_third.test_passes": "passed",
        }
        assert "assert (1 + 1) == 3" in said
        assert tmp_path.joinpath("over").exists()
        assert f"its process ended with status {status}" in said
        assert "3 failed, 3 passed, 1 skipped" in said


def test_side_by_side_tests_fail_that_no_process_ran(tmp_path: Path) -> None:
    """Here each process ends before it takes a file."""
    broken = (
        "from tests import side_by_side\n\ndef ends(*_): raise SystemExit\n\nside_by_side._Teller.__init__ = ends\n"
    )
    tmp_path.joinpath("conftest.py").write_text(broken)
    found, said = _outcomes(tmp_path)
    assert len(found) == 7
    assert set(found.values()) == {"failure"}
    assert "no process ran it" in said


def test_side_by_side_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    """The rest of its file does not run, and does not fail."""
    found, said = _outcomes(tmp_path, "-x", "-k", "first")
    assert found == {"test_first.test_passes": "passed", "test_first.test_fails": "failure"}
    assert "stopping after 1 failures" in said


AFTER_ITS_LAST_TEST = {
    "which nobody can hear": {
        "test_last.py": """
import gc

class Kept:
    def __del__(self): raise ValueError("which nobody can hear")

def test_passes():
    gc.disable()
    cycle = Kept()
    cycle.itself = cycle
"""
    },
    "it ended with status 7": {
        "conftest.py": """
import os

collecting = os.getpid()

def pytest_unconfigure():
    if os.getpid() != collecting: os._exit(7)
""",
        "test_last.py": "def test_passes(): pass",
    },
}


@pytest.mark.parametrize("why", AFTER_ITS_LAST_TEST)
def test_side_by_side_a_process_that_fails_after_its_last_test_is_a_failure(tmp_path: Path, why: str) -> None:
    """It ends with an error that could not be raised before, or with a status."""
    found, said = _outcomes(tmp_path, "-W", "error", files=AFTER_ITS_LAST_TEST[why])
    assert found == {"test_last.test_passes": "passed", "side_by_side.process 0": "failure"}
    assert why in said
