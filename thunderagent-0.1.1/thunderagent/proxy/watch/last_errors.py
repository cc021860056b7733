"""The last turns that went wrong, for whoever asks why: a few, which costs turns that go well nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pydantic import Field

from thunderagent.programs.messages import Decision, Event, Reject, TurnJudged, TurnVerdict
from thunderagent.proxy.gate.bodies import Report
from thunderagent.runtime import Runtime

KEPT_COUNT = 20

_ERRORS = frozenset({TurnVerdict.AGENT_ERROR, TurnVerdict.INFRASTRUCTURE_FAILED})

REJECTED = "rejected"


class TurnErrorReport(Report):
    """A turn whose client got an error."""

    ago_s: float
    program_id: str | None = Field(description="null if it named none; so is the next if it did not run")
    replica_id: str | None
    what: str = Field(description="rejected, or the verdict on the turn: agent_error or infrastructure_failed")
    cause: str = Field(description="why it was rejected, the code of an error, or the status of an answer")


class LastErrors:
    """The last errors, as the scheduler heard or decided them."""

    def __init__(self, runtime: Runtime) -> None:
        """Listen to what goes wrong."""
        self._runtime = runtime
        self._last: deque[tuple[float, str | None, str | None, str, str]] = deque(maxlen=KEPT_COUNT)
        runtime.observe(self._heard, TurnJudged, Reject)

    def __repr__(self) -> str:
        return f"<LastErrors: {len(self._last)}>"

    def reports(self) -> list[TurnErrorReport]:
        """Return them, the newest first."""
        now_s = self._runtime.now_s()
        return [
            TurnErrorReport(
                ago_s=round(now_s - at_s, 3), program_id=program_id, replica_id=replica_id, what=what, cause=cause
            )
            for at_s, program_id, replica_id, what, cause in reversed(self._last)
        ]

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:
        if isinstance(event, TurnJudged):
            turn = self._runtime.pools.turns.get(event.turn_id)
            if event.verdict in _ERRORS and turn is not None:
                program_id = None if turn.program is None else turn.program.program_id
                self._last.append((event.now_s, program_id, turn.account_id, event.verdict, event.cause))
        for decision in decisions:
            if isinstance(decision, Reject):
                self._last.append((event.now_s, decision.program_id, None, REJECTED, decision.reason.value))
