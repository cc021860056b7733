"""Numbers for the weights of all replicas: of two, the greater number is of the newer weights.

A named version has the number that the first replica got with it, so replicas with the same weights have the same
number, also if one was added later, or got them in several calls. Weights without a name count as the next ones, once
for each time that nothing is granted: an update may take several calls.

A serial is for caches: it is new whenever what a replica computed before may be of other weights, and no two replicas
have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST_VERSIONS_COUNT: Final = 10_000
"""How many names are remembered."""


class Weights:
    """What is known of the versions of weights, over all replicas."""

    def __init__(self) -> None:
        """Begin without versions."""
        self._numbers: dict[str, int] = {}
        self.serial = 0
        """The latest one."""
        self.on_change: list[Callable[[str], None]] = []
        """Called with the id of a replica whose weights, or their name, have changed."""

    def next_serial(self) -> int:
        """Return a serial that nothing had before."""
        self.serial += 1
        return self.serial

    def number_of(self, version: str, otherwise: int) -> int:
        """Return the number of a version; one that is new gets `otherwise`."""
        if len(self._numbers) >= MOST_VERSIONS_COUNT and version not in self._numbers:
            del self._numbers[next(iter(self._numbers))]
        return self._numbers.setdefault(version, otherwise)

    def changed(self, replica_id: str) -> None:
        """Report a change to all who want to hear of it."""
        for hear in self.on_change:
            hear(replica_id)
