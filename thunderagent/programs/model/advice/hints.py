"""What a client says of its program's next turn, until that comes."""

from __future__ import annotations

from typing import Final

RETAIN, OFFLOAD, DROP = KEEPS = ("retain", "offload", "drop")
"""What may become of a program's memory: keep it as long as a hint may, or others may have it, for now or for good."""

MAX_NEXT_TURN_S: Final = 366 * 86_400.0
"""Nobody knows of a turn that is further away than a year."""


class Hint:
    """The newest word of a client on when its program's next turn comes.

    It is `given_s` when it began to count, None as long as a turn of the program is with us: it counts from the end of
    the last one. The first that counts between two turns is measured by the turn that comes; those after it are not.
    """

    __slots__ = ("confidence_ratio", "given_s", "keep", "measured", "next_turn_in_s", "own_until_s", "since_s")

    def __init__(self, next_turn_in_s: float | None, confidence_ratio: float, keep: str) -> None:
        """Take the word of a client, which does not count yet."""
        self.next_turn_in_s = next_turn_in_s
        self.confidence_ratio = confidence_ratio
        self.keep = keep
        self.given_s: float | None = None
        self.since_s = 0.0
        """When the first that counted between these two turns was given."""
        self.own_until_s = 0.0
        """Until when the policy itself would hold."""
        self.measured: tuple[float, float, float] | None = None
        """Of the first: when it was given, and within which seconds from then the turn is expected."""

    @property
    def words(self) -> str:
        """Say it, for a story."""
        if self.next_turn_in_s is None:
            return self.keep
        keep = f", {self.keep}" if self.keep else ""
        return f"next turn in {self.next_turn_in_s:.1f} s{keep}, by {self.confidence_ratio:.2f}"
