"""Which replicas fail gateways turn after turn: one counts as tripped once two gateways, or the only one, say so.

It may be tried once none says so any more, and has recovered when its probe turns ended well at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from thunderagent.scale.scheduler.gateway import Gateway

WITNESSES_COUNT = 2


class OnTripped(Protocol):
    """Called when a replica fails turn after turn, or may be tried; may be repeated."""

    def __call__(self, replica_id: str, *, tripped: bool) -> None:
        """Report it."""


class Trips:
    """All gateways' reports of replicas that fail them."""

    def __init__(
        self, gateways: Mapping[str, Gateway], on_tripped: OnTripped, on_recovered: Callable[[str], None]
    ) -> None:
        """Use the `tripped_ids` of `gateways`, as they come and go."""
        self._gateways = gateways
        self._on_tripped = on_tripped
        self._on_recovered = on_recovered

    def are(self, gateway: Gateway, replica_ids: Iterable[str]) -> None:
        """Set the replicas that a gateway counts as tripped; it says nothing against others."""
        before, gateway.tripped_ids = gateway.failing_ids, set(replica_ids)
        gateway.failing_ids = set(gateway.tripped_ids)
        self._tell(before | gateway.tripped_ids)

    def tripped(self, gateway: Gateway, replica_id: str) -> None:
        """Note that a replica fails a gateway turn after turn."""
        gateway.tripped_ids.add(replica_id)
        gateway.failing_ids.add(replica_id)
        self._tell([replica_id])

    def tried(self, gateway: Gateway, replica_id: str) -> None:
        """Note that a gateway tries a replica again."""
        gateway.tripped_ids.discard(replica_id)
        self._tell([replica_id])

    def recovered(self, gateway: Gateway, replica_id: str) -> None:
        """Note that a gateway's probe ended well."""
        gateway.tripped_ids.discard(replica_id)
        gateway.failing_ids.discard(replica_id)
        self._tell([replica_id])

    def went(self) -> None:
        """Note that a gateway lost its link: fewer reports may be enough."""
        self._tell({replica_id for each in self._gateways.values() for replica_id in each.tripped_ids})

    def begin_anew(self, replica_ids: Iterable[str]) -> None:
        """Forget who counted replicas as tripped: they went down or came up, and did not fail since."""
        for gateway in self._gateways.values():
            gateway.tripped_ids.difference_update(replica_ids)
            gateway.failing_ids.difference_update(replica_ids)

    def _tell(self, replica_ids: Iterable[str]) -> None:
        enough_count = min(WITNESSES_COUNT, max(1, sum(each.is_linked for each in self._gateways.values())))
        for replica_id in sorted(replica_ids):
            count = sum(replica_id in each.tripped_ids for each in self._gateways.values())
            if not count or count >= enough_count:
                self._on_tripped(replica_id, tripped=bool(count))
            if not any(replica_id in each.failing_ids for each in self._gateways.values()):
                self._on_recovered(replica_id)
