"""Where a program may go: the candidate replicas, the policy's answer, and who must be let in.

It lets in two kinds of turns that the policy would hold, regardless of room, where that costs least: one whose client
would soon give up (`rules/patience.py`), and one of a child whose parent holds a claim (`rules/families.py`). A parent
waits for its children as for its own branches: held behind a claim that is only given back when they have ended, they
would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.book.book import Book
from thunderagent.programs.book.replica import Replica
from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.program import Program
from thunderagent.programs.policy import Policy, ReplicaView, View
from thunderagent.programs.rules.families import Families, family_of
from thunderagent.programs.rules.routes import serving


class Placing:
    """Finds where programs may go. It changes nothing."""

    __slots__ = ("_book", "_families", "_overdraft_ratio", "_policy", "some_encode", "view")

    def __init__(self, book: Book, policy: Policy, families: Families, overdraft_ratio: float, view: View) -> None:
        """Ask `policy` about what is in `book`."""
        self._book = book
        self._policy = policy
        self._families = families
        self._overdraft_ratio = overdraft_ratio
        self.view = view
        self.some_encode = False
        """Whether any replica ever reported how many images it has to encode."""

    def open_to(self, program: Program) -> Sequence[Replica]:
        """Return where a program may get a claim now: its route's replica if that grants, else any with its model."""
        routed = self._book.replicas.get(program.routed_to) if program.routed_to is not None else None
        if routed is not None and routed.grants:
            return [routed]
        return serving(self._book.granting_replicas, program.served_by)

    def candidates(self, avoid_replica_id: str | None, program: Program | None = None) -> Sequence[Replica]:
        """Return the replicas that a turn may go to: without the one to avoid, if another is left.

        A routed program may go to its replica alone, except for a turn that just failed there.
        """
        granting: Sequence[Replica] = self._book.granting_replicas
        if program is not None and program.routed_to not in (None, avoid_replica_id):
            routed = self._book.replicas.get(program.routed_to or "")
            return [routed] if routed is not None and routed.grants else []
        if program is not None and program.served_by is not None:
            granting = serving(granting, program.served_by)
        if avoid_replica_id is None:
            return granting
        return [replica for replica in granting if replica.replica_id != avoid_replica_id] or granting

    def can_avoid(self, program: Program, replica_id: str | None) -> bool:
        """Return whether that is an active program's replica, and it could go on elsewhere."""
        if replica_id is None or replica_id != program.replica_id:
            return False
        return any(candidate.replica_id != replica_id for candidate in self.candidates(replica_id, program))

    def wanted_by(self, program: Program) -> Replica | None:
        """Return the replica that a program's held turn needs, if it grants."""
        for turn in program.held.values():
            if turn.wanted_replica_id is not None:
                wanted = self._book.replicas.get(turn.wanted_replica_id)
                if wanted is not None and wanted.grants and serving([wanted], program.served_by):
                    return wanted
        return None

    def granting(self, proposed: ReplicaView | None) -> Replica | None:
        """Return the replica that a policy named, if a program may get a claim there."""
        replica = self._book.replicas.get(proposed.replica_id) if proposed is not None else None
        return replica if replica is not None and replica.grants else None

    def destination_of(self, program: Program) -> tuple[Replica | None, Reason]:
        """Return a program's destination, if it can still go there."""
        if program.destination is None:
            return None, Reason.GLOBAL_POLICY
        replica_id, reason = program.destination
        replica = self._book.replicas.get(replica_id)
        may_go = replica is not None and replica.grants and serving([replica], program.served_by)
        return (replica if may_go else None), reason

    def find(self, program: Program, avoid_replica_id: str | None) -> tuple[Replica | None, Reason]:
        """Ask the policy where a program with a turn may be active now; if nowhere, return the reason."""
        wanted = self.wanted_by(program)
        candidates = self.candidates(avoid_replica_id, program) if wanted is None else [wanted]
        if not candidates and self.parent_claims(program):
            candidates = self.open_to(program)
            if not candidates and program.served_by is not None:
                self._families.overdrawn[family_of(program)] = None
        if not candidates:
            return None, Reason.SUSPENDED if self._book.open_replicas else Reason.NO_REPLICA
        target, reason = self._among(candidates, program)
        if target is not None and program.routed_to is not None and target not in candidates:
            target = candidates[0]
        return target, reason

    def _among(self, candidates: Sequence[Replica], program: Program) -> tuple[Replica | None, Reason]:
        """Return where a program may be active now, or where its parent's claim lets it in; if nowhere, the reason.

        Of replicas where it fits, one with fewer images to encode comes first: they are encoded one after the other.
        """
        nearer = self._nearer_to_encode(candidates, program) if self.some_encode else ()
        placement = self._policy.place(self.view, program, nearer or candidates)
        if nearer and placement.reason is not Reason.FITS:
            placement = self._policy.place(self.view, program, candidates)
        target = self.granting(placement.replica)
        if target is None and self.parent_claims(program):
            beyond = self.beyond_limit(program, candidates)
            if beyond is not None:
                return beyond, Reason.PARENT
            self._families.overdrawn[family_of(program)] = None
        return target, placement.reason

    def _nearer_to_encode(self, candidates: Sequence[Replica], program: Program) -> Sequence[Replica]:
        """Return the candidates with the fewest images to encode, if those are not all, and the program's last one.

        Only if the program fits there beside the claims: nobody gives up memory for it.
        """
        if program.place.active:
            return ()
        counts = [replica.account.pending_encode_count or 0 for replica in candidates]
        fewest = min(counts)
        if fewest == max(counts):
            return ()
        return [
            each
            for each, count in zip(candidates, counts, strict=True)
            if (count == fewest or each.replica_id == program.replica_id)
            and each.account.demand_tokens + program.claim_tokens <= each.account.limit_tokens
        ]

    def parent_claims(self, program: Program) -> bool:
        """Return whether a program must be let in because its parent, of the same tenant, may wait for it."""
        if not program.parent_id:
            return False
        parent = self._book.programs.get(program.parent_id)
        if parent is None or not parent.place.active or parent.tenant != program.tenant:
            return False
        return self._families.may_enter(program)

    def beyond_limit(self, program: Program, candidates: Sequence[Replica]) -> Replica | None:
        """Return where a program that fits nowhere costs least: most of it is there, and least is overdrawn.

        None if no replica may take it beyond its limit.
        """
        wanted = self.wanted_by(program)
        able = candidates if wanted is None else [wanted]
        willing = [replica for replica in able if replica.may_overdraw(program.claim_tokens, self._overdraft_ratio)]

        def cost(replica: Replica) -> tuple[float, float, int, int]:
            account = replica.account
            resident_tokens = min(program.claim_tokens, self._book.resident_tokens(program, replica))
            excess_tokens = max(0.0, account.demand_tokens + program.claim_tokens - account.limit_tokens)
            return -resident_tokens, excess_tokens, account.turn_count, account.demand_tokens

        return min(willing, key=cost, default=None)
