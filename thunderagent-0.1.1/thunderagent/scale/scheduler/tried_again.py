"""A turn that a client retried at another gateway: the earlier attempt ends first, then the next is requested.

Theory of operation
===================
Pure. Attempts at one turn have the same key (`TurnAsk.attempt_key`). If an earlier one is with another gateway, that
gateway is told to end it, and the new one waits until its end was reported, so that no turn is generated twice at a
time. A gateway that does not end it, for example because its version has no `Revoke`, is waited for a few seconds; then
both run, as if they were two turns. One without a link is not waited for, and told at its next link.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunderagent.leases import TurnAsk

LOOKS_COUNT = 20
"""How many checks to wait for an earlier attempt that does not end."""


class TriedAgain:
    """The last attempt at each turn with a key, and those that wait for the end of an earlier one."""

    def __init__(self) -> None:
        """Start empty."""
        self._last: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._behind: dict[int, list[TurnAsk]] = {}
        self._looks: dict[int, int] = {}
        self.revoked_ids: set[int] = set()
        """Attempts that are not over yet, though their gateway was to end them."""

    def __len__(self) -> int:
        return len(self._behind)

    def comes(self, ask: TurnAsk) -> int | None:
        """Add an attempt; return the number of the earlier one that is not over yet, if there is one."""
        if not ask.attempt_key:
            return None
        earlier_id = self._last.get(ask.attempt_key)
        self._last[ask.attempt_key], self._keys[ask.turn_id] = ask.turn_id, ask.attempt_key
        return earlier_id

    def waits(self, ask: TurnAsk, earlier_id: int) -> None:
        """Let an attempt wait until an earlier one is over; or the one for which the earlier one waits itself."""
        behind = self._behind.items()
        first_id = next((first for first, asks in behind if earlier_id in {each.turn_id for each in asks}), earlier_id)
        self._behind.setdefault(first_id, []).append(ask)
        self._looks[first_id] = 0

    def left(self, turn_id: int) -> bool:
        """Stop an attempt's wait; return False if it did not wait."""
        for asks in self._behind.values():
            for ask in asks:
                if ask.turn_id == turn_id:
                    asks.remove(ask)
                    return True
        return False

    def over(self, turn_id: int) -> list[TurnAsk]:
        """Record that an attempt is over; return those that waited for it."""
        key = self._keys.pop(turn_id, None)
        if key is None:
            return []
        if self._last.get(key) == turn_id:
            del self._last[key]
        self._looks.pop(turn_id, None)
        self.revoked_ids.discard(turn_id)
        return self._behind.pop(turn_id, [])

    def late(self) -> Iterator[TurnAsk]:
        """Yield those that waited for long enough; call it now and then."""
        for earlier_id in list(self._looks):
            self._looks[earlier_id] += 1
            if self._looks[earlier_id] >= LOOKS_COUNT:
                del self._looks[earlier_id]
                yield from self._behind.pop(earlier_id, [])
