"""Which programs are held, let in and paused, and where: `breakeven` without its settings."""

# compiled: most of an event where memory is short

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.foresight import foreseen_tokens, is_short
from thunderagent.programs.policies.helpers import largest_capacity_tokens, times
from thunderagent.programs.policy import Moment, Placement, least_loaded
from thunderagent.programs.state.accounts import Account
from thunderagent.programs.state.program import Program, Status
from thunderagent.programs.state.replica import Replica
from thunderagent.programs.transitions import SchedulerView

Found = tuple["Replica | None", Reason]
"""Where a program could be active, or None, and why."""


_TICK: Final = Moment.TICK
_REPLICAS_CHANGED: Final = Moment.REPLICAS_CHANGED

LONGEST_HOLD_S: Final = 1e6
"""Eleven days: so all programs whose tools run are in one order, that in which an engine evicts them."""

MOST_EXPIRED_COUNT: Final = 64
"""How many programs are paused at most to make room for one."""

OVERFILL_COUNT: Final = 3
"""How many programs more than fit, each of mean size, are let in where turns alone should fill the memory.

When a turn's answer is here and the next turn is sent, the engine's next iteration has begun: a place would stay empty
for that long, unless somebody waits for it in the engine's own queue. Of one who waits there is not enough: a large
program leaves room for several, and several may end in one iteration.
"""


class LettingIn:
    """Holds, ranks and places programs, lets them in, and relieves replicas, by the settings of `breakeven`."""

    __slots__ = (
        "_last_ratio",
        "foresight_ratio",
        "high_ratio",
        "hold_ratio",
        "low_ratio",
        "pass_count",
        "wait_ratio",
    )

    def __init__(
        self,
        *,
        hold_ratio: float,
        low_ratio: float,
        high_ratio: float,
        foresight_ratio: float,
        pass_count: int,
        wait_ratio: float,
    ) -> None:
        """Work by these settings."""
        self.hold_ratio = hold_ratio
        self.low_ratio = low_ratio
        self.high_ratio = high_ratio
        self.foresight_ratio = foresight_ratio
        self.pass_count = pass_count
        self.wait_ratio = wait_ratio
        self._last_ratio = max(0.0, min(1.0, high_ratio) - low_ratio)
        """Above `low_ratio`, up to where a replica that is to be filled counts as full."""

    def hold_s(self, view: SchedulerView, program: Program) -> float:
        """Return until when the program's tool returns more often than once in the break-even time."""
        threshold_s = self.hold_ratio * view.hold_threshold_s(program.replica_id)
        if threshold_s != threshold_s:  # noqa: PLR0124 - as `times`, which would be one more call for each turn
            threshold_s = self.hold_ratio
        hold_s = view.tool_hold_s(program.tool, threshold_s)
        return hold_s if hold_s < LONGEST_HOLD_S else LONGEST_HOLD_S

    def hold_threshold_s(self, view: SchedulerView, program: Program) -> float:
        """Return what a lost token is worth in seconds of holding, as planned, times `hold_ratio`."""
        return times(self.hold_ratio, view.hold_threshold_s(program.replica_id))

    def place(self, view: SchedulerView, program: Program, candidates: Sequence[Replica]) -> Placement:
        """Return the program's own replica while it is active, otherwise one with room, if it is its turn."""
        home = view.replica(program.replica_id)
        if home is not None and candidates is not view.replicas and home not in candidates:
            home = None
        if home is not None and program.status is Status.ACTIVE:
            return Placement(home, Reason.HOME)
        comes_first = view.comes_before_all_waiting(program)
        if not comes_first and not self.pass_count:
            return Placement(None, Reason.QUEUE_AHEAD)
        reserved = None if comes_first else self._reserved(view, view.first_waiting())
        return Placement(*self._find_beside(view, program, candidates, home, reserved, comes_first))

    def balance(self, view: SchedulerView, moment: Moment) -> None:
        """Pause where claims exceed the capacity, and let fitting programs in, where something changed or on a tick."""
        everywhere = moment is _TICK or moment is _REPLICAS_CHANGED
        replicas = view.replicas if everywhere else view.changed_replicas
        for replica in replicas:
            account = replica.account
            leaving_tokens = account.leaving.tokens
            if leaving_tokens or account.demand_tokens > self.high_ratio * account.limit_tokens:
                self._relieve(view, replica)
        if replicas and view.first_waiting() is not None:
            self._let_in(view, replicas)

    # --- letting in -------------------------------------------------------------------------------------------------

    def _let_in(self, view: SchedulerView, replicas: Sequence[Replica]) -> None:
        """Let waiting programs in, in queue order, until the first does not fit; then a few that do."""
        while (head := view.first_waiting()) is not None:
            replica, reason = self._find_beside(view, head, replicas, view.replica(head.replica_id), None, True)
            if replica is None:
                break
            view.propose_restore(head, replica, reason)
        if head is not None and self.pass_count:
            self._let_pass(view, head, replicas)

    def _let_pass(self, view: SchedulerView, head: Program, replicas: Sequence[Replica]) -> None:
        """Let a few programs behind the head of the queue pass it.

        Mostly there is not enough room for anybody, which is checked first.
        """
        followers = self._may_fit(view, view.first_waiting_few(self.pass_count + 1)[1:], replicas)
        if not followers:
            return
        reserved = self._reserved(view, head)
        for program in followers:
            home = view.replica(program.replica_id)
            replica, reason = self._find_beside(view, program, replicas, home, reserved, False)
            if replica is not None:
                view.propose_restore(program, replica, reason)

    def _find_beside(
        self,
        view: SchedulerView,
        program: Program,
        candidates: Sequence[Replica],
        home: Replica | None,
        reserved: Replica | None,
        make_room: bool,
    ) -> Found:
        """Return where a paused program could be active; with `make_room`, expired programs are paused for it.

        The replica reserved for the head of the queue is excluded, and one kept for a program that is routed to it.
        `home` need not be among the candidates, which may be only the replicas where something changed.
        """
        some_routed = view.routed_count > 0
        if some_routed:
            candidates = [each for each in candidates if each is reserved or not self._is_kept(view, program, each)]
        if not candidates or (len(candidates) == 1 and candidates[0] is reserved):
            return None, Reason.QUEUE_AHEAD
        if home is not None and (home is reserved or (some_routed and self._is_kept(view, program, home))):
            home = None
        foresees = self._foresees(view, program)
        several = len(candidates) > 1
        roomiest = self._roomiest(view, program, candidates, reserved, foresees) if several else candidates[0]
        capacity_tokens = roomiest.account.capacity_tokens
        # The first one asked, with most room, is mostly large enough.
        if capacity_tokens and program.claim_tokens > self.low_ratio * capacity_tokens:
            most_tokens = self.low_ratio * largest_capacity_tokens(view.replicas)
            if program.claim_tokens > most_tokens and view.claim_tokens_on(program, None) > most_tokens:
                return roomiest, Reason.OVERSIZE
        if home is not None and self._fits(view, program, home, foresees, make_room):
            return home, Reason.FITS
        active_count = roomiest.account.active_count
        if roomiest is not home and self._fits(view, program, roomiest, foresees, make_room):
            if not several or roomiest.account.active_count < active_count:  # expired ones went for it
                return roomiest, Reason.FITS
            return self._with_fewest_programs(view, program, candidates, reserved, roomiest, foresees), Reason.FITS
        if make_room:
            for replica in candidates:
                if not replica.account.turn_count and self._makes_room_on_idle(view, program, replica, reserved):
                    return replica, Reason.FITS
        return None, Reason.NO_ROOM

    def _makes_room_on_idle(
        self, view: SchedulerView, program: Program, replica: Replica, reserved: Replica | None
    ) -> bool:
        """Pause programs whose tools run until a program fits on a replica without a turn; return whether it does.

        Nothing that is held there is worth more than the engine's time.
        """
        account = replica.account
        if replica is reserved or view.first_routed_before(program, replica) is not None:
            return False
        needed_tokens = view.claim_tokens_on(program, replica)
        missing_tokens = needed_tokens - account.limit_tokens + account.demand_tokens
        if missing_tokens <= 0:
            return True
        acting = view.first_to_give_way(replica, MOST_EXPIRED_COUNT)
        going = _enough(acting, missing_tokens, 0.0)
        if not going and len(acting) == account.active_count:
            going = acting  # it would be alone
        for each in going:
            view.propose_pause(each, Reason.EXPIRED)
        return bool(going) or not account.active_count

    def _is_kept(self, view: SchedulerView, program: Program, replica: Replica) -> bool:
        """Return whether a program waits for that replica alone, comes before this one, and may not be passed."""
        routed = view.first_routed_before(program, replica)
        return routed is not None and (not self.pass_count or self._has_waited_long(view, routed))

    def _may_fit(self, view: SchedulerView, programs: Sequence[Program], replicas: Sequence[Replica]) -> list[Program]:
        """Return the programs that may fit at home or on one of these replicas as it is, or exceed one."""
        most_free_tokens, smallest_tokens = -inf, inf
        for replica in replicas:
            free_tokens, capacity_tokens = self._room_of(replica)
            if free_tokens > most_free_tokens:
                most_free_tokens = free_tokens
            if capacity_tokens < smallest_tokens:
                smallest_tokens = capacity_tokens
        some_share, found = view.some_share, []
        for program in programs:
            claim_tokens = view.claim_tokens_on(program, None)  # no replica takes more
            may_fit = claim_tokens <= most_free_tokens or claim_tokens > smallest_tokens
            if not may_fit and (home := view.replica(program.replica_id)) is not None:
                free_tokens, capacity_tokens = self._room_of(home)
                needed_tokens = view.claim_tokens_on(program, home) if some_share else claim_tokens
                may_fit = claim_tokens > capacity_tokens or needed_tokens <= free_tokens
            if not may_fit and some_share:
                may_fit = any(view.claim_tokens_on(program, each) <= self._room_of(each)[0] for each in replicas)
            if may_fit:
                found.append(program)
        return found

    def _room_of(self, replica: Replica) -> tuple[float, float]:
        """Return a replica's current free room, infinite if it is empty, and the size that exceeds it."""
        account = replica.account
        free_tokens = self.low_ratio * account.limit_tokens - account.demand_tokens if account.active_count else inf
        return free_tokens, self.low_ratio * (account.capacity_tokens or inf)

    def _reserved(self, view: SchedulerView, head: Program | None) -> Replica | None:
        """Return the replica that lets nobody else in, once the head of the queue has waited long enough."""
        if head is None or not self._has_waited_long(view, head):
            return None
        return self._roomiest(view, head, view.replicas, None, self._foresees(view, head))

    def _has_waited_long(self, view: SchedulerView, program: Program) -> bool:
        return view.now_s - program.waiting_since_s > times(self.wait_ratio, view.median_residence_s)

    # --- placing ----------------------------------------------------------------------------------------------------

    def _fits(self, view: SchedulerView, program: Program, replica: Replica, foresees: bool, make_room: bool) -> bool:
        """Return whether a program fits once expired programs are paused; alone on a replica it always fits."""
        account = replica.account
        if not account.active_count:
            return True
        needed_tokens, free_tokens, grown_tokens = self._measure(view, program, replica, foresees)
        if needed_tokens <= free_tokens:
            return True
        if not make_room:
            return False
        expired = view.first_expired_few(replica, MOST_EXPIRED_COUNT)
        if not expired or view.first_routed_before(program, replica) is not None:
            return False
        going = _enough(expired, needed_tokens - free_tokens, grown_tokens)
        if not going and len(expired) == account.active_count:
            going = expired  # it would be alone
        for each in going:
            view.propose_pause(each, Reason.EXPIRED)
        return not account.active_count or self._free_tokens(account, grown_tokens) >= needed_tokens

    def _measure(
        self, view: SchedulerView, program: Program, replica: Replica, foresees: bool
    ) -> tuple[float, float, float]:
        """Return what a program needs on a replica, what is free there, and the foreseen growth of each program."""
        account, claim_tokens = replica.account, view.claim_tokens_on(program, replica)
        grown_tokens = foreseen_tokens(view, program, replica, self.foresight_ratio) if foresees else 0.0
        more_tokens: float = min(program.growth_tokens, grown_tokens)
        if view.may_overfill(replica.replica_id):
            more_tokens = -self._last_ratio * account.limit_tokens - _overfill_tokens(account, claim_tokens, 1)
        needed_tokens = claim_tokens + more_tokens
        return needed_tokens, self._free_tokens(account, grown_tokens), grown_tokens

    def kept_tokens(self, view: SchedulerView, program: Program, replica: Replica) -> float:
        """Return what must stay free on a replica when a program comes: above the watermark, and for growth.

        That is its own growth, too, if it is foreseen. None of it is needed where no turn runs. It is negative where
        the program may exceed the memory.
        """
        account = replica.account
        if not account.turn_count or account.limit_tokens == inf:
            return 0.0
        needed_tokens, free_tokens, _ = self._measure(view, program, replica, self._foresees(view, program))
        unused_tokens = account.limit_tokens - account.demand_tokens
        return unused_tokens - free_tokens + needed_tokens - view.claim_tokens_on(program, replica)

    def _foresees(self, view: SchedulerView, program: Program) -> bool:
        """Return whether a program leaves room for growth: if memory is short, and growth was seen.

        A newcomer does so once programs ended, so that it does not wait for a guess. One that was in before does so
        earlier: it lost its claim, because something outgrew the memory.
        """
        if not self.foresight_ratio or (not program.turn_count and view.mean_growth_tokens == inf):
            return False
        return view.growth_tokens_per_s < inf and is_short(view, program, self.low_ratio)

    def _roomiest(
        self,
        view: SchedulerView,
        program: Program,
        candidates: Sequence[Replica],
        reserved: Replica | None,
        foresees: bool,
    ) -> Replica:
        """Return the replica with most room except the reserved one; among equals the one with least on it.

        Without foresight all replicas are in that order already. With it each is checked.
        """
        ratio = self.low_ratio
        if candidates is view.replicas and not foresees:
            first = view.roomiest(ratio, 2 if reserved is None else 3)
            if reserved is not None:
                first = [replica for replica in first if replica is not reserved]
            if len(first) == 1:
                return first[0]
            one, other = first[0].account, first[1].account
            if ratio * one.limit_tokens - one.demand_tokens > ratio * other.limit_tokens - other.demand_tokens:
                return first[0]
        roomiest: list[Replica] = []
        most_tokens = -inf
        for replica in candidates:  # a call for each would cost more than all the rest
            account = replica.account
            free_tokens = ratio * account.limit_tokens - account.demand_tokens
            if free_tokens < most_tokens or replica is reserved:
                continue
            if foresees:
                grown_tokens = foreseen_tokens(view, program, replica, self.foresight_ratio)
                free_tokens -= min(account.growth_tokens, account.active_count * grown_tokens)
            if free_tokens > most_tokens:
                most_tokens, roomiest = free_tokens, [replica]
            elif free_tokens == most_tokens:
                roomiest.append(replica)
        return roomiest[0] if len(roomiest) == 1 else least_loaded(roomiest or candidates)

    def _with_fewest_programs(
        self,
        view: SchedulerView,
        program: Program,
        candidates: Sequence[Replica],
        reserved: Replica | None,
        roomiest: Replica,
        foresees: bool,
    ) -> Replica:
        """Return the least crowded replica, of `roomiest` and those with room as things stand.

        While there is memory for all programs and one more, each of mean size, that is the one with fewest turns in
        flight: turns slow each other down, whatever the memory. After that it is the one with fewest programs for its
        memory. Among equals it is the one with most room. Claims do not tell how many programs there are: what they
        share counts once, so a replica with many seems to have as much room as one with few.
        """
        mean_tokens = program.claim_tokens + view.mean_growth_tokens
        found, fewest, most_tokens = roomiest, self._crowd_on(roomiest.account, mean_tokens), inf
        for replica in candidates:
            count = self._crowd_on(replica.account, mean_tokens)
            if count > fewest or replica is reserved or (count == fewest and found is roomiest):
                continue
            needed_tokens, free_tokens, _ = self._measure(view, program, replica, foresees)
            if needed_tokens <= free_tokens and (count < fewest or free_tokens > most_tokens):
                found, fewest, most_tokens = replica, count, free_tokens
        return found

    def _crowd_on(self, account: Account, mean_tokens: float) -> tuple[bool, float, int]:
        """Return how crowded a replica is: first whether its memory is short, then how many share what slows them."""
        count = account.acting.count + account.turn_count  # a program with as many as it has turns
        if (count + 1) * mean_tokens > self.low_ratio * account.limit_tokens:
            return True, count / max(1.0, account.limit_tokens), 0
        return False, account.turn_count, count

    def _free_tokens(self, account: Account, grown_tokens: float) -> float:
        """Return what nobody claims now or by growing; a program grows by `grown_tokens`, as far as foreseen."""
        free_tokens = self.low_ratio * account.limit_tokens - account.demand_tokens
        if grown_tokens:
            free_tokens -= min(account.growth_tokens, account.active_count * grown_tokens)
        return free_tokens

    # --- relieving --------------------------------------------------------------------------------------------------

    def _relieve(self, view: SchedulerView, replica: Replica) -> None:
        """Pause, then mark, until all unmarked claims are under the high watermark; unmark where there is room."""
        account = replica.account
        limit_tokens, marked_tokens = self.high_ratio * account.limit_tokens, account.marked_tokens
        if view.may_overfill(replica.replica_id):
            limit_tokens += _overfill_tokens(account)
        if account.demand_tokens - marked_tokens > limit_tokens:
            view.propose_pause_until(replica, limit_tokens, Reason.THRASHING, 1)
            while account.demand_tokens - account.marked_tokens > limit_tokens and account.active_count != 1:
                program = view.first_to_mark(replica)
                if program is None or not view.propose_mark(program, Reason.THRASHING):
                    break
        while account.marked_tokens and (marked := view.last_marked(replica)) is not None:
            if account.demand_tokens - account.marked_tokens + marked.claim_tokens > limit_tokens:
                break
            if not view.propose_unmark(marked, Reason.RELIEVED):
                break


def _overfill_tokens(account: Account, more_tokens: int = 0, more_count: int = 0) -> float:
    """Return what `OVERFILL_COUNT` programs of mean size claim, with so many more there, in tokens."""
    claimed_tokens = account.demand_tokens - account.other_tokens + more_tokens
    return OVERFILL_COUNT * claimed_tokens / max(1, account.active_count + more_count)


def _enough(expired: Sequence[Program], tokens: float, grown_tokens: float) -> Sequence[Program]:
    """Return the shortest prefix of `expired` that leaves room for `tokens` together; empty if all do not.

    Each gives up its claim and its expected growth.
    """
    claimed_tokens = 0.0
    for count, program in enumerate(expired, start=1):
        claimed_tokens += program.claim_tokens + min(program.growth_tokens, grown_tokens)
        if claimed_tokens >= tokens:
            return expired[:count]
    return ()
