"""Programs as a gateway knows them: those that it carried turns of."""

from __future__ import annotations

from typing import NamedTuple

KNOWN_COUNT = 100_000
"""How many are known, those with the most recent turns."""


class KnownProgram(NamedTuple):
    """Where a program's last turn from here ran, its tenant, and its generation then."""

    replica_id: str
    tenant: str
    generation: int


class KnownPrograms:
    """Programs by id, the least recent first."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[str, KnownProgram] = {}

    def get(self, program_id: str | None) -> KnownProgram | None:
        """Return what is known of a program."""
        return self._known.get(program_id or "")

    def note(self, program_id: str, known: KnownProgram) -> None:
        """Record where a turn of a program runs."""
        self._known.pop(program_id, None)
        self._known[program_id] = known
        if len(self._known) > KNOWN_COUNT:
            del self._known[next(iter(self._known))]

    def gone(self, program_id: str) -> KnownProgram | None:
        """Forget an ended program; return what was known of it."""
        return self._known.pop(program_id, None)
