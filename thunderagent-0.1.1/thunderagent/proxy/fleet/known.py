"""What is known of each replica, and numbers for the weights of all: of two, the greater is of the newer weights.

A named version has the number that the first replica got with it, so replicas with the same weights have the same
number, also if one was added later, or got them in several calls. Weights without a name count as the next ones, once
for each time that nothing is granted: an update may take several calls.

A serial is for caches: it is new whenever what a replica computed before may be of other weights, and no two replicas
have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from thunderagent.backends.base import NOTHING_READ, ReplicaReading
from thunderagent.backends.poller import ReplicaEndpoint

MOST_VERSIONS_COUNT: Final = 10_000
"""How many names are remembered."""

NOT_POLLED: Final = "not polled yet"
"""Why a replica is down at first."""


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


@dataclass(slots=True)
class KnownReplica:
    """One replica's address and last reading, and whether it is leaving."""

    endpoint: ReplicaEndpoint
    reading: ReplicaReading = NOTHING_READ
    counted: ReplicaReading = NOTHING_READ
    """The last reading with totals: later ones may have failed, and what happened meanwhile counts."""
    process: ReplicaReading = NOTHING_READ
    """The last reading that tells which process answered."""
    asked_s: float = 0.0
    """When it was asked for its last reading."""
    first_models: tuple[str, ...] = ()
    """What its process listed first; empty until it has listed any."""
    incarnation: int = 0
    """The last one that was heard of."""
    is_lost: bool = False
    """Whether what was in flight there when it fell silent was given up."""
    why_down: str = NOT_POLLED
    weight_version: str = ""
    """Version of the weights that it was last told to load, or reported; empty if unknown."""
    weights: Weights = field(default_factory=Weights)
    """What is known of versions, over all replicas."""
    weight_number: int = 0
    """The number of its weights, as far as the proxy was told, or saw: greater for newer ones, on any replica."""
    cache_serial: int = 0
    """Another one whenever what its cache holds may be of other weights."""
    is_suspended: bool = False
    """Whether nothing is granted there."""
    told_count: int = 0
    """Number of calls to it that its own reports must not predate."""
    is_up: bool = False
    sources: tuple[str, ...] = ()
    """Sources that name it."""
    draining_since_s: float | None = None
    leaving_since_s: float | None = None
    """Since when no source has named it: it is removed when nothing is in flight there."""
    served_last: int = 0
    """The number of the latest request without a lease that went there."""
    _is_unnamed: bool = False
    """Whether its weights have changed since their version was last named."""
    _was_counted: bool = False
    """Whether a change was counted since nothing is granted there."""

    def __post_init__(self) -> None:
        """Give its cache a serial."""
        self.cache_serial = self.weights.next_serial()

    def weights_changed(self, version: str, *, renewed: bool) -> None:
        """Note new weights, or a new name for them, or both; an empty version is none."""
        if not renewed and version in ("", self.weight_version):
            return
        if renewed or (version and version != self.weight_version and not self._is_unnamed):
            self.cache_serial = self.weights.next_serial()
            if not self._was_counted:
                self.weight_number += 1
            self._was_counted = self.is_suspended
        self._is_unnamed = (renewed or self._is_unnamed) and not version
        self.weights_named(version)

    def weights_named(self, version: str) -> None:
        """Note the name of the weights that it has; an empty one is none."""
        if version:
            self.weight_version = version
            self.weight_number = self.weights.number_of(version, self.weight_number)
        self.weights.changed(self.endpoint.replica_id)

    def cache_in_doubt(self) -> None:
        """Note that its weights may have changed: what its cache holds may be of others."""
        self.cache_serial = self.weights.next_serial()

    def set_suspended(self, *, is_suspended: bool) -> None:
        """Note whether nothing is granted there."""
        self.is_suspended = is_suspended
        self._was_counted = self._was_counted and is_suspended
