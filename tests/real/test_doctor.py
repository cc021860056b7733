"""`thunderagent doctor` on real vLLM engines: no fault in two sound ones, and the faults of a third."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from thunderagent.cli import build_parser
from thunderagent.doctor import command
from thunderagent.doctor.findings import Finding, Level

if TYPE_CHECKING:
    from benchmarks.real_engine import RealEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def found(*argv: str) -> dict[str, Finding]:
    """Return the faults, by examined item."""
    findings = await command.examine(build_parser().parse_args(["doctor", *argv]))
    assert {"engine_reachable", "second_turn_hit", "identity"} <= {finding.check for finding in findings}
    return {finding.check: finding for finding in findings if finding.level is not Level.OK}


@pytest.fixture(autouse=True)
def first_polls_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's own proxy runs in this process, which a busy machine halts for seconds."""
    monkeypatch.setattr(command, "FIRST_POLLS_S", 60.0)


async def test_two_sound_engines_have_no_fault(engines: tuple[RealEngine, RealEngine]) -> None:
    """Checked by their own reports, and by three prompts and two turns."""
    assert await found("--backends", ",".join(engine.url for engine in engines)) == {}


async def test_doctor_finds_what_is_wrong_with_an_engine(cacheless: RealEngine) -> None:
    """Found by vLLM's own reports."""
    findings = await found("--backends", cacheless.url)
    assert findings["prefix_caching"].level is Level.FAULT
    assert "--enable-prefix-caching" in findings["prefix_caching"].remedy
    assert "--enable-prompt-tokens-details" in findings["second_turn_hit"].remedy
