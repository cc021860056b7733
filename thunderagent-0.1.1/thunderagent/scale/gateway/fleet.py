"""A gateway's view of the replicas: the scheduler's last report, with events for observers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

from thunderagent.errors import UnknownModelError
from thunderagent.leases import ReplicaMap, TurnAsk
from thunderagent.programs.messages import (
    Decision,
    Event,
    ProgramReleased,
    Reason,
    Release,
    ReplicaDown,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaUp,
)
from thunderagent.scale.messages import RemoteReplica, Replicas

Observer = Callable[[Event, Sequence[Decision]], None]


class RemoteFleet:
    """Processes the scheduler's reports, and says where a turn may run without a grant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without replicas; `clock` returns monotonic seconds."""
        self.replicas = ReplicaMap()
        self.on_replicas: Callable[[Sequence[RemoteReplica], Sequence[str], Sequence[str]], None] = lambda *_: None
        """Called first with replicas that changed, those that are gone, and those that a whole list does not name."""
        self.tripped_ids: set[str] = set()
        """Replicas that fail turn after turn, as seen from here."""
        self.aborted_s: dict[str, float] = {}
        """When the scheduler said last that a trainer aborted what ran on a replica."""
        self._now_s = clock
        self._models: dict[str, tuple[str, ...]] = {}
        self._observers: list[tuple[Observer, frozenset[type]]] = []

    def __repr__(self) -> str:
        return f"<RemoteFleet: {self.replicas!r}>"

    # --- what is told

    def take(self, message: Replicas) -> None:
        """Apply a change. No turn begins where a whole list does not name the replica: it may come yet."""
        unnamed_ids: tuple[str, ...] = ()
        if message.is_whole:
            said = {each.state.replica_id for each in message.changed}
            unnamed_ids = tuple(each for each in self.replicas.states if each not in said)
        events = [self._event_of(each) for each in message.changed]
        self.on_replicas(message.changed, message.removed_ids, unnamed_ids)
        removed_ids = (*message.removed_ids, *unnamed_ids)
        self.replicas.names_models, self.replicas.has_pools = message.names_models, message.has_pools
        for each in message.changed:
            self._models[each.state.replica_id] = each.models
            before = self.replicas.get(each.state.replica_id)
            if before is not None and each.state.aborts_count > before.aborts_count:
                self.aborted_s[each.state.replica_id] = self._now_s()
        for replica_id in removed_ids:
            self._models.pop(replica_id, None)
            self.aborted_s.pop(replica_id, None)
        self.tripped_ids.difference_update(removed_ids)
        self.tripped_ids.difference_update(each.state.replica_id for each in message.changed if not each.state.is_up)
        self.replicas.push((each.state for each in message.changed), removed_ids)
        for event in [*events, *(ReplicaRemoved(self._now_s(), each) for each in removed_ids)]:
            if event is not None:
                self._observed(event)

    def _event_of(self, replica: RemoteReplica) -> Event | None:
        """Return the event that the core would have received for a replica in this state."""
        state, now_s = replica.state, self._now_s()
        before = self.replicas.get(state.replica_id)
        if not state.is_up:
            is_news = before is not None and (before.is_up or before.incarnation != state.incarnation)
            return ReplicaDown(now_s, state.replica_id) if is_news else None
        if before is not None and before.is_open and not state.is_open:
            return ReplicaDraining(now_s, state.replica_id)
        return ReplicaUp(now_s, state.replica_id, state.capacity_tokens)

    def program_gone(self, program_id: str, generation: int) -> None:
        """Tell observers that a program ended."""
        release = Release(program_id, generation, Reason.RELEASED)
        self._observed(ProgramReleased(self._now_s(), program_id, generation), [release])

    def observe(self, observer: Observer, *about: type) -> Callable[[], None]:
        """Call `observer` with events of replicas and programs, if it is about those."""
        entry = observer, frozenset(about)
        self._observers.append(entry)
        return lambda: self._observers.remove(entry) if entry in self._observers else None

    def _observed(self, event: Event, decisions: Sequence[Decision] = ()) -> None:
        kinds = {type(event), *map(type, decisions)}
        for observer, about in list(self._observers):
            if not about or about & kinds:
                observer(event, decisions)

    # --- what is asked

    def serves(self, replica_id: str, model: str) -> bool:
        """Return whether a replica lists a model."""
        return model in self._models.get(replica_id, ())

    def ids_serving(self, model: str) -> Collection[str]:
        """Return the replicas that list a model. Raises `UnknownModelError`."""
        serving = [replica_id for replica_id in self._models if self.serves(replica_id, model)]
        if not serving:
            raise UnknownModelError(f"the model {model[:100]!r} is not served here")
        return serving

    def where(self, ask: TurnAsk, home_id: str | None, has_room: Callable[[str], bool]) -> str | None:
        """Return where a turn may run without a grant: at home, or by its program's name; None if nowhere now.

        A required replica and one to avoid count as in a scheduler's grants.
        """
        able = set(self.replicas.open_ids)
        if ask.model and self.replicas.has_pools:
            able = {each for each in able if self.serves(each, ask.model)}
        able = able - self.tripped_ids or able
        able = able - {ask.avoid_replica_id} or able
        if ask.pinned_replica_id is not None:
            able &= {ask.pinned_replica_id}
        elif ask.wanted_replica_id in able:
            able = {ask.wanted_replica_id}
        able = {each for each in able if has_room(each)}
        if home_id in able:
            return home_id
        name = ask.program_id or f"\0{ask.turn_id}"
        return max(able, key=lambda each: blake2b(f"{name}\0{each}".encode(), digest_size=8).digest(), default=None)
