"""Random histories under every combination of policies and parts, decided alike by the installed core and its sources.

The sources alone are in a process with another seed for `hash`. The invariants hold after every event, and the sums
whenever a policy or a part of it is asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest

from tests.property.test_scheduler_machine import POLICY_SETTINGS
from tests.replay.histories import LEARNED_LIMITS, SETTINGS, History
from tests.unit.test_where_to_add import PACKAGE, core_at, run_there
from thunderagent.programs.invariants import check_sums
from thunderagent.programs.messages import ProgramHinted
from thunderagent.programs.policy import Policy
from thunderagent.programs.scheduler import Scheduler

HISTORIES_COUNT = int(os.environ.get("HISTORIES_COUNT", "1"))
"""Number of histories for each combination; `scripts/test --compiled` has 18."""

THINGS_COUNT = 100


CALLBACKS = {
    *("pause_rank", "restore_rank", "hold_s", "hold_threshold_s", "place", "balance", "observe"),
    *("turn_granted", "turn_ended", "program_ended"),
    *("admission.rank", "admission.next", "priority.engine_priority", "global_policy.decide"),
}
"""The callbacks of a policy and of its parts that the core calls."""


class Watched:
    """A policy, or a part of one, that checks the sums of the core before each answer."""

    def __init__(self, asked: Any, sums_hold: Callable[[str], None], kind: str = "") -> None:
        """Answer as `asked`, which is the whole policy or the part of that kind."""
        self._asked, self._sums_hold, self._kind = asked, sums_hold, kind

    def __getattr__(self, name: str) -> Any:
        said, path = getattr(self._asked, name), f"{self._kind}{name}"
        if name in ("admission", "priority", "global_policy") and said is not None:
            return Watched(said, self._sums_hold, f"{name}.")
        if name == "decider":
            return Watched(said, self._sums_hold, self._kind)
        if name == "chained":
            return lambda: tuple(Watched(each, self._sums_hold, self._kind) for each in said())
        if name == "observers":
            return lambda: tuple(self._checked(each, f"{self._kind}observe") for each in said())
        if name == "learners":
            return lambda: tuple(Watched(each, self._sums_hold, self._kind) for each in said())
        return self._checked(said, path) if path in CALLBACKS and said is not None else said

    def _checked(self, said: Callable[..., Any], path: str) -> Callable[..., Any]:
        def answer(*told: Any) -> Any:
            self._sums_hold(path)
            return said(*told)

        return answer


def names_of(told: Any) -> tuple[str, ...]:
    """Return the names of the fields of an event or a decision."""
    return tuple(field.name for field in fields(told)) if is_dataclass(told) else told.__struct_fields__


def history_of(name: str, number: int, watched: Callable[[Policy], Policy] = lambda policy: policy) -> History:
    """Return a history under a combination, before it runs."""
    settings = dict(POLICY_SETTINGS[name])
    fair_tenants = bool(settings.pop("fair_tenants", False))
    limits = replace(LEARNED_LIMITS if number % 2 else SETTINGS, fair_tenants=fair_tenants)
    return History(str(settings.pop("policy", name)), settings, limits, f"{name} {number}", watched)


def calls_with_whole_sums(name: str, number: int = 0) -> Counter[str]:
    """Run a history; return how often each callback came. At each call every sum equals its parts."""
    calls: Counter[str] = Counter()
    scheduler: Scheduler | None = None

    def sums_hold(path: str) -> None:
        calls[path] += 1
        if scheduler is not None:
            check_sums(scheduler)

    history = history_of(name, number, lambda policy: cast("Policy", Watched(policy, sums_hold)))
    scheduler = history.driver.scheduler
    history.things += ((9, lambda: history.send(ProgramHinted, history.name(), history.random.uniform(0, 40))),)
    history.record(THINGS_COUNT)
    return calls


def decided(name: str, number: int) -> str:
    """Run one history; return a digest of all events and decisions."""
    digest = sha256()
    for event, decisions in history_of(name, number).record(THINGS_COUNT).events:
        for told in (event, *decisions):
            values = [str(getattr(told, name)) for name in names_of(told)]
            digest.update(f"{type(told).__name__} {values}\n".encode())
    return digest.hexdigest()


def decided_in_all() -> dict[str, list[str]]:
    """Return the digests of all histories, by combination."""
    return {name: [decided(name, number) for number in range(HISTORIES_COUNT)] for name in POLICY_SETTINGS}


def test_the_sources_decide_as_the_core_that_is_installed(tmp_path: Path) -> None:
    """Compiled code decides as interpreted code, and nothing depends on the order of a set."""
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
    assert len(here) == 25
    assert len({digest for digests in here.values() for digest in digests}) == 25 * HISTORIES_COUNT


def test_no_callback_sees_a_sum_that_is_half_booked() -> None:
    """For each callback under each combination: at every call every sum equals its parts."""
    calls = [calls_with_whole_sums(name) for name in POLICY_SETTINGS]
    assert set().union(*calls) == CALLBACKS


@pytest.mark.parametrize(
    ("name", "file", "moved", "after", "found"),
    [
        pytest.param(
            "thunderagent",
            "state/book.py",
            "        if to is not self.ended:  # nobody asks how many have ended\n"
            "            to.enter(program, now_s)\n",
            "        program.place = to\n",
            "programs miscounted",
            id="there, and still counted where it was",
        ),
        pytest.param(
            "thunderagent",
            "state/book.py",
            "        self.active_count -= len(gone)\n",
            "        self.queue.resting.enter_all(resting, now_s)\n",
            "active programs miscounted",
            id="so in a batch",
        ),
        pytest.param(
            "autellix",
            "transitions.py",
            "            if self._stream.flows:  # listeners find the turns before it in the program's count\n"
            "                self._stream.submitted(program, turn)\n",
            "            turn.account_id = replica.replica_id\n",
            "turns miscounted",
            id="in flight, and not counted yet",
        ),
    ],
)
def test_a_move_that_is_split_is_found(
    tmp_path: Path, name: str, file: str, moved: str, after: str, found: str
) -> None:
    """A copy of the core makes one line of a move too early or too late: a callback comes in between."""
    source = core_at(tmp_path) / file
    text = source.read_text()
    assert (text.count(moved), text.count(after)) == (1, 1)
    source.write_text(text.replace(moved, "").replace(after, after + moved))
    tried = f"""
from tests.property.test_histories import calls_with_whole_sums
try:
    calls_with_whole_sums({name!r})
except AssertionError as error:
    print(error)
"""
    assert run_there(tmp_path, tried).startswith(found)
