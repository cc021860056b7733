"""What a client says of its program's next turn, until that comes."""

from __future__ import annotations

from typing import Final

RETAIN, OFFLOAD, DROP = KEEPS = ("retain", "offload", "drop")
"""What may become of a program's memory: kept as long as a hint may, or free for others for now, or for good."""

MAX_NEXT_TURN_S: Final = 366 * 86_400.0
"""Nobody knows of a turn that is more than a year away."""


class Hint:
    """A client's newest hint on when its program's next turn comes.

    `given_s` is when it began to count. It is None while a turn of the program is here: the hint counts from the end of
    the last one. The first hint that counts between two turns is measured by the turn that comes; later ones are not.
    """

    __slots__ = ("confidence_ratio", "given_s", "keep", "measured", "next_turn_in_s", "own_until_s", "since_s")

    def __init__(self, next_turn_in_s: float | None, confidence_ratio: float, keep: str) -> None:
        """Create a client's hint that does not count yet."""
        self.next_turn_in_s = next_turn_in_s
        self.confidence_ratio = confidence_ratio
        self.keep = keep
        self.given_s: float | None = None
        self.since_s = 0.0
        """When the first hint that counted between these two turns was given."""
        self.own_until_s = 0.0
        """Until when the policy itself would hold."""
        self.measured: tuple[float, float, float] | None = None
        """Of the first: when it was given, and the seconds from then within which the turn is expected."""

    @property
    def words(self) -> str:
        """Describe it for a story."""
        if self.next_turn_in_s is None:
            return self.keep
        keep = f", {self.keep}" if self.keep else ""
        return f"next turn in {self.next_turn_in_s:.1f} s{keep}, by {self.confidence_ratio:.2f}"
