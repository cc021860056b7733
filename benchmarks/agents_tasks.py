"""Six small repositories with a failing test each, and the tool calls of a scripted model that mends them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Final

AGENTS: Final = ("mini-swe-agent", "openhands")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMPILED = "json unittest email http urllib asyncio concurrent logging xml"
"""Packages of Python that each setup compiles, as an installation does."""
TEST = "cd /repo && /venv/bin/python -m unittest -q 2>&1"


@dataclass(frozen=True)
class Task:
    """A repository with one module and its test; `wrong` is to become `right` there."""

    name: str
    says: str
    module: str
    wrong: str
    right: str
    test: str

    @property
    def setup(self) -> list[str]:
        """Return shell commands that make the repository, an environment for it, and see that the test fails."""
        files = {f"{self.name}.py": self.module, f"test_{self.name}.py": self._test_file}
        write = " && ".join(f"printf %s {shlex.quote(text)} > /repo/{name}" for name, text in files.items())
        stdlib = "$(python3 -c 'import os; print(os.path.dirname(os.__file__))')"
        return [
            f"mkdir -p /repo && {write}",
            "python3 -m venv --without-pip /venv",
            f"for each in {COMPILED}; do python3 -m compileall -q {stdlib}/$each || true; done",
            f"! ({TEST}) > /repo/before.txt",
        ]

    @property
    def _test_file(self) -> str:
        return (
            f"import unittest\nimport {self.name} as it\n\n\nclass Test(unittest.TestCase):\n"
            f"    def test(self):\n        {self.test}\n"
        )

    def calls(self, agent: str, written_mb: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the model's tool calls for an agent of `AGENTS`, one a turn: the tool and its arguments."""
        commands = self._commands(written_mb)
        if agent == "mini-swe-agent":  # which ends by what its last command writes
            commands[-1] = f"{SUBMIT} && {commands[-1]}"
            return [("bash", {"command": each}) for each in commands]
        return [*(("terminal", {"command": each}) for each in commands), ("finish", {"message": "The test passes."})]

    def _commands(self, written_mb: int) -> list[str]:
        """Return what the model runs; between two commands it writes build products of that size."""
        edit = (
            f"import pathlib; p = pathlib.Path('/repo/{self.name}.py'); s = p.read_text(); "
            f"assert {self.wrong!r} in s; p.write_text(s.replace({self.wrong!r}, {self.right!r}))"
        )
        return [
            "cd /repo && ls -l && cat before.txt",
            f"cat /repo/{self.name}.py",
            f"cat /repo/test_{self.name}.py",
            f"{TEST} | tail -5; true",
            f"head -c {written_mb}000000 /dev/urandom > /repo/build.bin && ls -l /repo/build.bin",
            f"python3 -c {shlex.quote(edit)}",
            f"{TEST} | tail -3",
            f"{TEST} | tail -1",
        ]


TASKS = (
    Task(
        "roman",
        "Roman numerals below ten are wrong: 4 gives IIII.",
        "PAIRS = [(10, 'X'), (5, 'V'), (1, 'I')]\n\n\ndef roman(n):\n    out = ''\n    for value, letter in PAIRS:\n"
        "        while n >= value:\n            out += letter\n            n -= value\n    return out\n",
        "(10, 'X'), (5, 'V')",
        "(10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV')",
        "self.assertEqual([it.roman(n) for n in (4, 9, 13)], ['IV', 'IX', 'XIII'])",
    ),
    Task(
        "window",
        "The moving average forgets the last window.",
        "def averages(values, size):\n"
        "    return [sum(values[i : i + size]) / size for i in range(len(values) - size)]\n",
        "len(values) - size)",
        "len(values) - size + 1)",
        "self.assertEqual(it.averages([1, 2, 3, 4], 2), [1.5, 2.5, 3.5])",
    ),
    Task(
        "words",
        "Counting words tells upper and lower case apart.",
        "from collections import Counter\n\n\ndef count(text):\n    return Counter(text.split())\n",
        "text.split()",
        "text.lower().split()",
        "self.assertEqual(it.count('A a b'), {'a': 2, 'b': 1})",
    ),
    Task(
        "leap",
        "1900 is taken for a leap year.",
        "def is_leap(year):\n    return year % 4 == 0\n",
        "year % 4 == 0",
        "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        "self.assertEqual([it.is_leap(y) for y in (1900, 2000, 2023, 2024)], [False, True, False, True])",
    ),
    Task(
        "brackets",
        "A text with an open bracket at its end passes as balanced.",
        "def is_balanced(text):\n    depth = 0\n    for letter in text:\n"
        "        depth += (letter == '(') - (letter == ')')\n"
        "        if depth < 0:\n            return False\n    return True\n",
        "    return True",
        "    return depth == 0",
        "self.assertEqual([it.is_balanced(t) for t in ('()', '(', ')(')], [True, False, False])",
    ),
    Task(
        "merge",
        "Merging ranges that touch leaves two.",
        "def merge(ranges):\n    out = []\n    for low, high in sorted(ranges):\n        if out and low < out[-1][1]:\n"
        "            out[-1][1] = max(out[-1][1], high)\n        else:\n            out.append([low, high])\n"
        "    return out\n",
        "low < out[-1][1]",
        "low <= out[-1][1]",
        "self.assertEqual(it.merge([(1, 2), (2, 3), (5, 6)]), [[1, 3], [5, 6]])",
    ),
)
