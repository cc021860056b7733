"""When a scheduler may try to lead, by what it saw of the lock.

Theory of operation
===================
Pure. The lock expires by the store's own clock, so an existing lock has an owner, and a missing one may be taken. There
are three exceptions:

- an owner that gave it up left it empty: it is taken at once;
- a leader whose process has ended, judging by its port, is not waited for. If that is wrong two schedulers believe that
  they lead, until the older one next writes or renews: its epoch is over, and gateways ignore its frames;
- a store that was away, or lost its data, may have dropped a lock that its owner still believes to have. The owner may
  come first, for as long as a lock lasts. A store counts as new if this scheduler never saw a lock or an epoch there,
  and always had its answers.

Who has just given up the lock lets another one that stands by take it first, in case that is slow. It does so as long
as that is announced: nobody is announced for longer than a lock lasts while the lock is empty.
"""

from __future__ import annotations

GIVEN_UP = ""
"""Content of the lock when its owner gave it up."""


class Candidacy:
    """What one scheduler saw of the lock."""

    def __init__(self, lock_s: float, led_in: int = 0) -> None:
        """Start without knowledge; a lock expires `lock_s` after its last renewal.

        `led_in` is the last epoch in which this scheduler's process led; 0 if it did not.
        """
        self.lock_s = lock_s
        self._led_in = led_in
        self._answers_since_s: float | None = None
        self._dead: str | None = None
        self._is_new = True
        self._epoch = 0
        """The last one."""

    def failed(self) -> None:
        """Record that the store does not answer."""
        self._answers_since_s, self._is_new = None, False

    def died(self, owner: str) -> None:
        """Record that the process of an owner of the lock has ended."""
        self._dead = owner

    def may_take(self, owner: str | None, epoch: int, now_s: float) -> str | None:
        """Return what the lock must hold for it to be taken now; None if it must not be.

        It holds `owner` now; None means that there is no lock. A lock that must be empty may be missing, too. An epoch
        below the last one means that the store lost its data.
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
        return GIVEN_UP if self._is_new or now_s - self._answers_since_s >= self.lock_s else None

    def yields(self, owner: str | None, epoch: int) -> bool:
        """Return whether the lock is as this process gave it up: any other scheduler that stands by comes first."""
        return owner == GIVEN_UP and 0 < epoch == self._led_in
