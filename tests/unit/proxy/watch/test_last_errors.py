"""The last turns that went wrong."""

from __future__ import annotations

from tests.builders import Driver, asked
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.proxy.watch.last_errors import KEPT_COUNT, LastErrors
from thunderagent.runtime import Runtime


async def test_turns_that_go_wrong_are_told_with_their_cause() -> None:
    """The newest first; not those that went well, nor those whose client left, nor tries that are tried again."""
    driver = Driver(Cap(99))
    runtime = Runtime(driver.scheduler, clock=lambda: driver.now_s)
    errors = LastErrors(runtime)
    with await runtime.lease(asked(runtime, "a")) as lease:
        lease.refused("infrastructure_failed", "503")
    with await runtime.lease(asked(runtime, "b")) as lease:
        lease.failed()
    with await runtime.lease(asked(runtime, "b")) as lease:
        lease.abandoned()
    with await runtime.lease(asked(runtime, "b")) as lease:
        lease.finished(prompt_tokens=1)
    driver.passes(5.0)
    first = errors.reports()
    assert [(e.program_id, e.replica_id, e.what, e.cause, e.ago_s) for e in first] == [
        ("a", "r0", "infrastructure_failed", "503", 5.0)
    ]
    for number in range(KEPT_COUNT + 5):
        with await runtime.lease(asked(runtime, f"c{number}")) as lease:
            lease.refused("agent_error", "400")
    assert [e.program_id for e in errors.reports()] == [f"c{KEPT_COUNT + 4 - number}" for number in range(KEPT_COUNT)]
