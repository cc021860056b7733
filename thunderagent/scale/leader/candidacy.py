"""When a scheduler may try to lead, by what it saw of the lock.

Theory of operation
===================
Pure. The lock ends by the store's own clock, so a lock that is there is somebody's, and one that is gone may be taken.
Three things are beside that:

- who gave it up left it empty: it is taken at once;
- a leader whose process has ended, as far as its port says, is not waited for. If that is wrong two schedulers believe
  that they lead, until the older one next writes or renews: its epoch is over, and gateways hear no frame of it;
- a store that was away, or lost its data, may have let a lock go that its owner still believes to have. He is let come
  first, for as long as a lock lasts. A store is new if this scheduler never saw a lock or an epoch there, and always
  had its answers.
"""

from __future__ import annotations

GIVEN_UP = ""
"""What the lock holds when its owner gave it up."""


class Candidacy:
    """What one scheduler saw of the lock."""

    def __init__(self, lock_s: float) -> None:
        """Begin knowing nothing; a lock ends `lock_s` after it was last renewed."""
        self._lock_s = lock_s
        self._answers_since_s: float | None = None
        self._dead: str | None = None
        self._is_new = True
        self._epoch = 0
        """The last one."""

    def failed(self) -> None:
        """Take in that the store does not answer."""
        self._answers_since_s, self._is_new = None, False

    def died(self, owner: str) -> None:
        """Take in that the process of an owner of the lock has ended."""
        self._dead = owner

    def may_take(self, owner: str | None, epoch: int, now_s: float) -> str | None:
        """Say what the lock must hold for it to be taken now; None if it must not be.

        It holds `owner` now; None is that there is no lock. What must be empty may be missing, too. An epoch below the
        last one is that the store lost its data.
        """
        if epoch < self._epoch:
            self._answers_since_s = None
        self._epoch = epoch
        if owner is not None or epoch:
            self._is_new = False
        if self._answers_since_s is None:
            self._answers_since_s = now_s
        if owner is not None:
            return owner if owner in (GIVEN_UP, self._dead) else None
        return GIVEN_UP if self._is_new or now_s - self._answers_since_s >= self._lock_s else None
