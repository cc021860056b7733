"""Which replicas fail gateways turn after turn: one is taken for tripped once two of them say so, or the only one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from thunderagent.scale.scheduler.gateway import Gateway

WITNESSES_COUNT = 2


class OnTripped(Protocol):
    """Hears that a replica fails turn after turn, or may be tried; it may be said again."""

    def __call__(self, replica_id: str, *, tripped: bool) -> None:
        """Hear it."""


class Trips:
    """What all gateways say of replicas that fail them."""

    def __init__(self, gateways: Mapping[str, Gateway], on_tripped: OnTripped) -> None:
        """Go by the `tripped_ids` of `gateways`, as they come and go."""
        self._gateways = gateways
        self._on_tripped = on_tripped

    def are(self, gateway: Gateway, replica_ids: Iterable[str]) -> None:
        """Have these be the replicas that a gateway takes for tripped."""
        before, gateway.tripped_ids = gateway.tripped_ids, set(replica_ids)
        self._tell(before | gateway.tripped_ids)

    def went(self) -> None:
        """Hear that a gateway has no link any more: fewer may be enough."""
        self._tell({replica_id for each in self._gateways.values() for replica_id in each.tripped_ids})

    def begin_anew(self, replica_ids: Iterable[str]) -> None:
        """Forget who took replicas for tripped: they went down or came up, and did not fail since."""
        for gateway in self._gateways.values():
            gateway.tripped_ids.difference_update(replica_ids)

    def _tell(self, replica_ids: Iterable[str]) -> None:
        enough_count = min(WITNESSES_COUNT, max(1, sum(each.is_linked for each in self._gateways.values())))
        for replica_id in sorted(replica_ids):
            count = sum(replica_id in each.tripped_ids for each in self._gateways.values())
            if not count or count >= enough_count:
                self._on_tripped(replica_id, tripped=bool(count))
