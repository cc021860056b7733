"""The clock that the idle and the forget limit are measured on: it stands still while nothing is granted anywhere."""

from __future__ import annotations


class LimitsClock:
    """Seconds that passed while turns were granted, or would have been."""

    __slots__ = ("_halted_s", "_halted_since_s")

    def __init__(self) -> None:
        """Begin as a clock that runs."""
        self._halted_since_s: float | None = None
        self._halted_s = 0.0

    @property
    def halted(self) -> bool:
        """Whether it stands still."""
        return self._halted_since_s is not None

    def at(self, now_s: float) -> float:
        """Return its time."""
        return (now_s if self._halted_since_s is None else self._halted_since_s) - self._halted_s

    def set_halted(self, now_s: float, *, halted: bool) -> None:
        """Stop it, or let it run on; once more is no change."""
        if halted and self._halted_since_s is None:
            self._halted_since_s = now_s
        elif not halted and self._halted_since_s is not None:
            self._halted_s += now_s - self._halted_since_s
            self._halted_since_s = None
