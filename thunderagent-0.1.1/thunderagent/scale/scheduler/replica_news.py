"""A scheduler's messages to gateways on the replicas: all of them at the begin of a link, then changes."""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.leases import ReplicaState
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime
from thunderagent.scale import messages
from thunderagent.scale.messages import RemoteReplica
from thunderagent.scale.scheduler.gateway import Gateway
from thunderagent.scale.scheduler.gateways import Gateways


class ReplicaNews:
    """Takes what the runtime pushes, and sends it to gateways."""

    def __init__(self, runtime: Runtime, replicas: Replicas, gateways: Gateways) -> None:
        """Start to listen."""
        self._runtime = runtime
        self._replicas = replicas
        self._gateways = gateways
        self._told: dict[str, RemoteReplica] = {}
        self._flags = (False, False)
        runtime.replicas.on_push = self._pushed

    def say_all(self, gateway: Gateway) -> None:
        """Send all of them to one gateway."""
        runtime = self._runtime
        everything = [self._remote(state) for state in runtime.replicas.states.values()]
        self._told.update((each.state.replica_id, each) for each in everything)
        flags = runtime.replicas.names_models, runtime.replicas.has_pools
        self._gateways.say(gateway, messages.Replicas(tuple(everything), (), *flags, is_whole=True))

    def _pushed(self, states: Sequence[ReplicaState], removed_ids: Sequence[str]) -> None:
        """Send changes of replicas to all gateways."""
        stayed_ids = {each.replica_id for each in states if each.is_up and self._was_up(each.replica_id)}
        self._gateways.trips.begin_anew([*({each.replica_id for each in states} - stayed_ids), *removed_ids])
        remote = [self._remote(state) for state in states]
        changed = tuple(each for each in remote if self._told.get(each.state.replica_id) != each)
        self._told.update((each.state.replica_id, each) for each in changed)
        gone = tuple(replica_id for replica_id in removed_ids if self._told.pop(replica_id, None) is not None)
        flags = self._runtime.replicas.names_models, self._runtime.replicas.has_pools
        if changed or gone or flags != self._flags:
            self._flags = flags
            self._gateways.say_to_all(messages.Replicas(changed, gone, *flags))

    def _was_up(self, replica_id: str) -> bool:
        told = self._told.get(replica_id)
        return told is not None and told.state.is_up

    def _remote(self, state: ReplicaState) -> RemoteReplica:
        known = self._replicas.known.get(state.replica_id)
        models = self._runtime.pools.listing_of(state.replica_id) or () if self._runtime.pools.several else ()
        if known is None:
            return RemoteReplica(state, models=models)
        return RemoteReplica(state, known.endpoint.backend.kind, known.endpoint.rank_id, models)
