"""Random histories under every combination of policies and parts, decided alike by the installed core and its sources.

The sources alone are in a process with another seed for `hash`. The invariants hold after every event.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

from tests.property.test_scheduler_machine import POLICY_SETTINGS
from tests.replay.histories import LEARNED_LIMITS, SETTINGS, History
from tests.unit.test_where_to_add import PACKAGE, core_at

HISTORIES_COUNT = int(os.environ.get("HISTORIES_COUNT", "1"))
"""Of each combination; `scripts/test --compiled` has 18."""

THINGS_COUNT = 100


def decided(name: str, number: int) -> str:
    """Let one history happen; return a digest of all events and decisions."""
    settings = dict(POLICY_SETTINGS[name])
    fair_tenants = bool(settings.pop("fair_tenants", False))
    limits = replace(LEARNED_LIMITS if number % 2 else SETTINGS, fair_tenants=fair_tenants)
    history = History(str(settings.pop("policy", name)), settings, limits, f"{name} {number}")
    digest = sha256()
    for event, decisions in history.record(THINGS_COUNT).events:
        for told in (event, *decisions):
            values = [str(getattr(told, field.name)) for field in fields(told)]
            digest.update(f"{type(told).__name__} {values}\n".encode())
    return digest.hexdigest()


def decided_in_all() -> dict[str, list[str]]:
    """Return the digests of all histories, by combination."""
    return {name: [decided(name, number) for number in range(HISTORIES_COUNT)] for name in POLICY_SETTINGS}


def test_the_sources_decide_as_the_core_that_is_installed(tmp_path: Path) -> None:
    """So compiled is as interpreted, and nothing hangs on the order of a set."""
    sources = core_at(tmp_path)
    said = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]\n"
    said += "import json, thunderagent.programs.scheduler as core; from tests.property import test_histories\n"
    said += "print(json.dumps([core.__file__, test_histories.decided_in_all()]))"
    env = os.environ | {"PYTHONHASHSEED": "4711"}
    with subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE, cwd=tmp_path, env=env) as other:
        here = decided_in_all()
        printed, _ = other.communicate()
    assert other.returncode == 0
    core_file, there = json.loads(printed)
    assert core_file == str(sources / "scheduler.py")
    assert there == here
    assert len(here) == 24
    assert len({digest for digests in here.values() for digest in digests}) == 24 * HISTORIES_COUNT
