"""Which replicas fail gateways turn after turn: one counts as tripped once two gateways, or the only one, say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from thunderagent.scale.scheduler.gateway import Gateway

WITNESSES_COUNT = 2


class OnTripped(Protocol):
    """Called when a replica fails turn after turn, or may be tried; may be repeated."""

    def __call__(self, replica_id: str, *, tripped: bool) -> None:
        """Report it."""


class Trips:
    """All gateways' reports of replicas that fail them."""

    def __init__(self, gateways: Mapping[str, Gateway], on_tripped: OnTripped) -> None:
        """Use the `tripped_ids` of `gateways`, as they come and go."""
        self._gateways = gateways
        self._on_tripped = on_tripped

    def are(self, gateway: Gateway, replica_ids: Iterable[str]) -> None:
        """Set the replicas that a gateway counts as tripped."""
        before, gateway.tripped_ids = gateway.tripped_ids, set(replica_ids)
        self._tell(before | gateway.tripped_ids)

    def went(self) -> None:
        """Note that a gateway lost its link: fewer reports may be enough."""
        self._tell({replica_id for each in self._gateways.values() for replica_id in each.tripped_ids})

    def begin_anew(self, replica_ids: Iterable[str]) -> None:
        """Forget who counted replicas as tripped: they went down or came up, and did not fail since."""
        for gateway in self._gateways.values():
            gateway.tripped_ids.difference_update(replica_ids)

    def _tell(self, replica_ids: Iterable[str]) -> None:
        enough_count = min(WITNESSES_COUNT, max(1, sum(each.is_linked for each in self._gateways.values())))
        for replica_id in sorted(replica_ids):
            count = sum(replica_id in each.tripped_ids for each in self._gateways.values())
            if not count or count >= enough_count:
                self._on_tripped(replica_id, tripped=bool(count))
