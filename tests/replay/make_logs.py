"""Write the golden event logs: one incident for each policy, and random histories; the same bytes in every run.

    python tests/replay/make_logs.py

Run it after a policy was changed on purpose, and review the diff of the decisions.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).parent
if str(FOLDER.parents[1]) not in sys.path:  # run as a script, Python looks for modules in this folder only
    sys.path.insert(0, str(FOLDER.parents[1]))

from tests.builders import Driver  # noqa: E402 - the path must be set first
from tests.replay import histories  # noqa: E402
from thunderagent.policy_loader import Setting, load_policy  # noqa: E402
from thunderagent.programs.messages import SchedulerSettings  # noqa: E402
from thunderagent.runtime.event_log import EventLogWriter  # noqa: E402

SEED = 20261120
SETTINGS = SchedulerSettings(idle_limit_s=60.0, forget_limit_s=240.0, no_replica_limit_s=20.0)
POLICIES: dict[str, dict[str, Setting]] = {
    "passthrough": {},
    "sticky": {},
    "cap": {"n": 3},
    "thunderagent": {"delta_s": 5.0, "lambda_max": 0.95, "lambda_min": 0.8, "reserve_tokens": 100},
    "thunderagent-released": {"delta_s": 5.0},
    "ttl": {"ttl_s": 4.0},
    "autellix": {"short_tokens": 500},
    "continuum": {"cold_count": 5, "prefill_token_s": 0.005, "reserve_tokens": 100},
    "infercept": {"prefill_token_s": 0.002, "reserve_tokens": 100},
    "mars": {"tool_cpu_count": 2, "window_max_count": 6, "reserve_tokens": 100},
    "breakeven": {
        "hold_ratio": 20.0,
        "low_ratio": 0.8,
        "reserve_tokens": 100,
        "foresight_ratio": 2.0,
        "wait_ratio": 0.2,
    },
}
HISTORIES: dict[str, tuple[str, dict[str, Setting], SchedulerSettings]] = {
    "history-controlled": (
        "breakeven",
        {
            "reserve_tokens": 300,
            "order": "fcfs",
            "priority": "age",
            "global_policy": "balance+migrate+reassign",
            "global_policy.rest_s": 2.0,
            "global_policy.long_turn_s": 1.0,
            "global_policy.waiting_count": 0.5,
            "global_policy.patience_s": 1.0,
        },
        histories.LEARNED_LIMITS,
    ),
    "history-tenants": (
        "breakeven",
        {"hold_ratio": 40.0, "reserve_tokens": 400, "foresight_ratio": 2.0, "wait_ratio": 0.3},
        replace(histories.SETTINGS, fair_tenants=True),
    ),
    "history-admission": (
        "continuum",
        {"cold_count": 0, "admission": "concur", "admission.first_count": 2, "admission.interval_s": 2.0},
        histories.SETTINGS,
    ),
    "history-window": (
        "thunderagent",
        {"delta_s": 2.0, "admission": "window", "admission.n": 4, "order": "orbit-judge"},
        replace(histories.LEARNED_LIMITS, fair_tenants=True),
    ),
    "history-mars": ("mars", {"tool_cpu_count": 1, "window_max_count": 6, "reserve_tokens": 100}, histories.SETTINGS),
}
"""Policies and settings for recorded random histories, by name of the log."""
HISTORY_COUNT = 240
TELLING = {"breakeven", "continuum"}
"""Policies whose incident includes prompt prefixes, groups and tools: the others would ignore them."""


def incident(policy: str) -> Driver:
    """Ten agents on two replicas with room for about six: thrashing, a lost replica, an outage, a drain, releases."""
    random, telling = Random(SEED), policy in TELLING
    driver = Driver(load_policy(policy, POLICIES[policy]), replicas={"r0": 4000, "r1": 3000}, settings=SETTINGS)
    contexts: dict[str, int] = {}
    in_flight: dict[int, tuple[str | None, int]] = {}
    for step in range(160):
        driver.passes(random.choice([0.1, 0.4, 1.0]))
        program_id = random.choice([None, *(f"agent-{number}" for number in range(10))])
        busy = {name for name, _ in in_flight.values()}
        if program_id not in busy and step < 140:
            tokens = contexts.get(program_id or "", 0) + random.randrange(100, 500)
            branch = random.choice(["", "", "", "sub"])
            turn_id = driver.arrives(program_id, tokens, branch=branch, **(told_of(program_id) if telling else {}))
            in_flight[turn_id] = (program_id, tokens)
        for turn_id, (name, tokens) in list(in_flight.items()):
            if turn_id in driver.rejected_for:
                del in_flight[turn_id]
            elif turn_id in driver.granted_on and random.random() < 0.3:
                del in_flight[turn_id]
                if random.random() < 0.1:
                    driver.fails(turn_id)
                    continue
                driver.starts(turn_id)
                driver.progresses(turn_id, 20)
                output = random.randrange(20, 200)
                cached = random.choice([None, tokens // 2])
                driver.finishes(turn_id, tokens, output, cached, tool=f"tool {turn_id % 3}" if telling else "")
                contexts[name or ""] = tokens + output
        happens(driver, step, contexts)
        if step % 4 == 3:
            driver.ticks()
    for turn_id in in_flight:
        driver.is_abandoned(turn_id)
    driver.ticks(61.0)
    driver.ticks(240.0)
    return driver


def told_of(program_id: str | None) -> dict[str, Any]:
    """All agents share the first prefix, each half of them also a task; each half ends together."""
    if program_id is None:
        return {}
    half = "even" if int(program_id[-1]) % 2 == 0 else "odd"
    return {"prefix": {"system": 60, half: 90}, "group": half}


def happens(driver: Driver, step: int, contexts: dict[str, int]) -> None:
    """Make the faults happen at their times."""
    if step % 25 == 24 and contexts:
        ended = max(contexts, key=lambda name: (contexts[name], name))
        del contexts[ended]
        if step == 49:
            driver.releases_all(ended, "agent-none")
        else:
            driver.releases(ended)
    if step in {60, 90}:
        driver.goes_down("r1")
    if step == 92:
        driver.goes_down("r0")
        driver.ticks(21.0)
    if step in {70, 96}:
        driver.comes_up("r1", 3000)
    if step == 100:
        driver.comes_up("r0", 4000)
    if step == 120:
        driver.drains("r0")
    if step == 128:
        driver.comes_up("r0", 2500)


def log_of(name: str) -> Path:
    """Return the path of the golden log of a policy or a history."""
    return FOLDER / f"{name}.jsonl"


def write_log(name: str, path: Path) -> None:
    """Record the incident under a policy, or a history; replace an older record."""
    path.unlink(missing_ok=True)
    policy, policy_settings, settings = HISTORIES.get(name) or (name, POLICIES[name], SETTINGS)
    if name in HISTORIES:
        driver = histories.History(policy, policy_settings, settings, f"{SEED} {name}").record(HISTORY_COUNT)
    else:
        driver = incident(policy)
    log = EventLogWriter(path, policy=policy, policy_settings=policy_settings, settings=settings)
    for event, decisions in driver.events:
        log.write(event, decisions)
    log.close()


if __name__ == "__main__":
    for name in (*POLICIES, *HISTORIES):
        write_log(name, log_of(name))
        print(f"wrote {log_of(name).name}")
