"""Try the steps of CONTRIBUTING.md for adding a policy and a rule: each is one new file, an import and one entry.

This uses a copy of the core in a separate process, so the entry is real and nothing of ours is patched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import thunderagent

PACKAGE = Path(thunderagent.__file__).parent
CORE = ("__init__.py", "errors.py", "leases/__init__.py", "leases/open_lease.py", "policy_loader.py")
"""Parts of the package besides `programs/` that the builders of the tests need."""

TOY_POLICY = '''\
"""`one-each`: one program at a time on each replica, the shortest id first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import restore_waiting
from thunderagent.programs.policy import Moment, Placement, Policy, ProgramView, ReplicaView, View


@dataclass(frozen=True, slots=True)
class OneEach(Policy):
    """Let a program in where none is."""

    name: ClassVar[str] = "one-each"

    def restore_rank(self, program: ProgramView) -> float:
        return len(program.program_id)

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        for replica in candidates:
            if replica.replica_id == program.replica_id or not replica.account.active_count:
                return Placement(replica, Reason.FITS)
        return Placement(None, Reason.NO_ROOM)

    def balance(self, view: View, moment: Moment) -> None:
        restore_waiting(view, self)
'''

TOY_RULE = '''\
"""Nobody waits for longer than a limit: the first that does is let in, whatever the policy says."""

from __future__ import annotations

from thunderagent.programs.messages import Reason
from thunderagent.programs.rules import Verbs

MOST_S = 5.0


class Longest:
    """A bound on how long turns wait."""

    due_s = 0.0

    def settle(self, verbs: Verbs) -> None:
        """Let in the first who waits for room, if its turn has waited for so long."""
        book = verbs.book
        while book.granting_replicas and (program := book.queue.waiting.order.first()) is not None:
            waited_s = book.now_s - next(iter(program.held.values())).arrived_s
            if waited_s < MOST_S or not verbs.restore_beyond_limit(program, Reason.PATIENCE):
                return
'''


def core_at(folder: Path) -> Path:
    """Copy the core to be importable from `folder`; return its folder."""
    for name in CORE:
        copied = folder / "thunderagent" / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, copied)
    without = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(shutil.copytree(PACKAGE / "programs", folder / "thunderagent" / "programs", ignore=without))


def add(core: Path, new_file: str, text: str, table_file: str, entry: tuple[str, str], imported: str) -> None:
    """Write a file, and the entry and the import for it into the file with the table."""
    (core / new_file).write_text(text)
    table = (core / table_file).read_text()
    pattern, replacement = entry
    assert len(re.findall(pattern, table)) == 1, f"{table_file} has no one place for the entry: {pattern}"
    table = re.sub(pattern, replacement, table)
    (core / table_file).write_text(re.sub(r"(?m)^from thunderagent", f"{imported}\nfrom thunderagent", table, count=1))


def changed_files(core: Path) -> dict[str, int]:
    """Return, by path, how many lines each file of a copied core has that ours lacks."""
    changed = {}
    for path in sorted(core.rglob("*.py")):
        ours = PACKAGE / "programs" / path.relative_to(core)
        before = ours.read_text().splitlines() if ours.exists() else []
        added = [line for line in path.read_text().splitlines() if line not in before]
        if added:
            changed[str(path.relative_to(core))] = len(added)
    return changed


def run_there(folder: Path, program: str) -> str:
    """Run a program on the core in `folder`, with the builders of the tests; return what it prints."""
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(PACKAGE.parent)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + program], capture_output=True, text=True, check=False, cwd=folder, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(name="core")
def _core(tmp_path: Path) -> Path:
    return core_at(tmp_path)


def test_a_policy_is_one_file_and_one_entry(core: Path) -> None:
    """It is loaded by its name, and the scheduler follows its decisions."""
    add(
        core,
        "policies/one_each.py",
        TOY_POLICY,
        "policies/__init__.py",
        (r"POLICIES: dict\[str, .*\] = \{\n", r'\g<0>    "one-each": OneEach,\n'),
        "from thunderagent.programs.policies.one_each import OneEach",
    )
    assert changed_files(core) == {"policies/__init__.py": 2, "policies/one_each.py": len(TOY_POLICY.splitlines())}
    printed = run_there(
        core.parents[1],
        """
from tests.builders import Driver
from thunderagent.policy_loader import load_policy

driver = Driver(load_policy("one-each", {}), replicas={"r0": 1000, "r1": 1000})
first, second = driver.arrives("a", 10), driver.arrives("b", 10)
longer, shorter = driver.arrives("long", 10), driver.arrives("c", 10)
print(driver.granted_on, [turn_id for turn_id in (longer, shorter) if driver.held(turn_id)])
driver.finishes(first, 10)
driver.releases("a")
print(driver.granted_on[shorter], driver.held(longer))
""",
    )
    assert printed == "{1: 'r0', 2: 'r1'} [3, 4]\nr0 True\n"


def test_a_rule_is_one_file_and_one_entry(core: Path) -> None:
    """It settles after every event, under a policy that would continue to hold."""
    add(
        core,
        "rules/longest.py",
        TOY_RULE,
        "scheduler.py",
        (r"self\._rules: tuple\[Rule, \.\.\.\] = \(", r"\g<0>Longest(), "),
        "from thunderagent.programs.rules.longest import Longest",
    )
    assert changed_files(core) == {"rules/longest.py": len(TOY_RULE.splitlines()), "scheduler.py": 2}
    program = """
from tests.builders import Driver
from thunderagent.programs.policies.baselines.cap import Cap

driver = Driver(Cap(1), replicas={"r0": 1000})
driver.arrives("a", 10)
waits = driver.arrives("b", 10)
driver.ticks(4.0)
print(driver.held(waits))
print(*driver.ticks(2.0), driver.held(waits))
"""
    printed = run_there(core.parents[1], program).splitlines()
    assert printed[0] == "True"
    assert printed[1].endswith("False")
    assert "reason=<Reason.PATIENCE" in printed[1]


def test_without_its_entry_a_rule_does_nothing(core: Path) -> None:
    """This shows that the test above depends on the entry."""
    (core / "rules/longest.py").write_text(TOY_RULE)
    program = """
from tests.builders import Driver
from thunderagent.programs.policies.baselines.cap import Cap

driver = Driver(Cap(1), replicas={"r0": 1000})
driver.arrives("a", 10)
waits = driver.arrives("b", 10)
driver.ticks(6.0)
print(driver.held(waits))
"""
    assert run_there(core.parents[1], program) == "True\n"
