"""Run many real agents in threads of one process; each prints a line of JSON with what it did.

Runs in the agents' own environment: it reads a plan from standard input. See `benchmarks.agents`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from thunderagent.client import Program

    RunOne = Callable[[dict[str, Any], int, float, threading.Semaphore], dict[str, Any]]
    """Runs the agent of a plan with this number from its begin to its release.

    It is told when the run began, and what its own containers take a place of.
    """

LOOK_S = 0.1
"""How often a first command looks for its sandbox."""


def wait_for_sandbox(own: Program) -> tuple[float, float]:
    """Wait until a program has a sandbox; return how long for a place, and how long for its preparation."""
    place_s = setup_s = 0.0
    looked_s = time.monotonic()
    while True:
        stages = {each["stage"] for each in own.sandboxes()}
        now_s = time.monotonic()
        if stages == {"requested"}:
            place_s += now_s - looked_s
        else:
            setup_s += now_s - looked_s
        if stages - {"requested", "preparing"}:
            return place_s, setup_s
        looked_s = now_s
        time.sleep(LOOK_S)


def main(run_one: RunOne) -> None:
    """Run the plan."""
    plan = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr  # what the agents print is no answer of ours
    started_s, printing = time.monotonic(), threading.Lock()
    hands, places = threading.Semaphore(plan["at_once"]), threading.Semaphore(plan["sandboxes_count"])

    def work(number: int) -> None:
        with hands:
            try:
                said = run_one(plan, number, started_s, places)
            except Exception as error:
                said = {"number": number, "error": repr(error)}
        with printing:
            print(json.dumps(said), file=answers, flush=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(plan["agents_count"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
