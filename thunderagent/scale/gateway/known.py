"""Programs as a gateway knows them: those that it carried turns of."""

from __future__ import annotations

from typing import NamedTuple

KNOWN_COUNT = 100_000
"""So many are known, the last that had a turn."""


class KnownProgram(NamedTuple):
    """Where a program's last turn from here ran, whose it is, and which incarnation of it that was."""

    replica_id: str
    tenant: str
    generation: int


class KnownPrograms:
    """Programs by their ids, the one that had no turn for longest first."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: dict[str, KnownProgram] = {}

    def get(self, program_id: str | None) -> KnownProgram | None:
        """Return what is known of a program."""
        return self._known.get(program_id or "")

    def note(self, program_id: str, known: KnownProgram) -> None:
        """Take in where a turn of a program runs."""
        self._known.pop(program_id, None)
        self._known[program_id] = known
        if len(self._known) > KNOWN_COUNT:
            del self._known[next(iter(self._known))]

    def gone(self, program_id: str) -> KnownProgram | None:
        """Forget a program that ended; return what was known of it."""
        return self._known.pop(program_id, None)
