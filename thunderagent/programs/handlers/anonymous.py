"""Turns without a program: counted as load on the least loaded replica, and never held for memory."""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.book.replica import Replica
from thunderagent.programs.messages import TurnAsk
from thunderagent.programs.model.decisions import Hold, Reason, Reject
from thunderagent.programs.model.turn import MAIN_BRANCH, Turn
from thunderagent.programs.rules.routes import serving
from thunderagent.programs.transitions import Core


class Anonymous:
    """Grants turns without a program at once, or as soon as a replica grants."""

    def __init__(self, core: Core) -> None:
        """Work on the parts of `core`."""
        self._core = core

    def turn(self, event: TurnAsk) -> Turn:
        """Return the arrived turn, with or without a program."""
        turn = Turn(event.turn_id, None, MAIN_BRANCH, event.prompt_bytes, self._core.book.now_s)
        if event.media:
            turn.media, turn.media_tokens = event.media, self._core.knowledge.media_sizes.tokens(event.media)
        return turn

    def arrived(self, event: TurnAsk) -> None:
        """Take a turn that may run anywhere, or continues from something that one replica has."""
        core, turn = self._core, self.turn(event)
        served_by = turn.served_by = core.routing.routes.asked(event.turn_id) if core.routing.routes else None
        wanted = core.book.replicas.get(event.wanted_replica_id or "")
        if wanted is not None and wanted.open_to_programs and serving([wanted], served_by):
            turn.pinned_replica_id = wanted.replica_id
            self.place(turn, [] if wanted.suspended_for else [wanted])
            return
        candidates = serving(core.placing.candidates(event.avoid_replica_id), served_by)
        self.place(turn, candidates or serving(core.book.granting_replicas, served_by))

    def pinned_arrived(self, event: TurnAsk, replica_id: str) -> None:
        """Take a turn for the replica that its client chose."""
        replica = self._core.book.replicas.get(replica_id)
        if replica is None or not replica.up:
            self._core.book.decisions.append(Reject(event.turn_id, None, Reason.NO_REPLICA))
            return
        turn = self.turn(event)
        turn.pinned_replica_id = replica_id
        self.place(turn, [] if replica.suspended_for else [replica])

    def place(self, turn: Turn, candidates: Sequence[Replica]) -> None:
        """Grant a turn on the least loaded candidate; hold it if there is none."""
        book = self._core.book
        turn.claim_tokens = int(turn.prompt_bytes * self._core.knowledge.tokens_per_byte_ratio) + turn.media_tokens
        book.turns[turn.turn_id] = turn
        if candidates:
            self._core.leases.grant_anonymous(turn, candidates)
        else:
            book.anonymous_held[turn.turn_id] = turn
            book.ledger.wait_begins(book.now_s)
            suspended = bool(book.open_replicas or turn.pinned_replica_id)
            book.decisions.append(Hold(turn.turn_id, None, Reason.SUSPENDED if suspended else Reason.NO_REPLICA))

    def grant_held(self) -> None:
        """Grant held turns that have a replica now."""
        book = self._core.book
        for turn in list(book.anonymous_held.values()):
            pinned = book.replicas.get(turn.pinned_replica_id or "")
            candidates = serving(book.granting_replicas, turn.served_by) if pinned is None else [pinned]
            if candidates and (pinned is None or not pinned.suspended_for):
                del book.anonymous_held[turn.turn_id]
                book.ledger.wait_ends(book.now_s)
                self._core.leases.grant_anonymous(turn, candidates)
