"""Who holds how many tokens where, and what the memory was spent on.

Theory of operation
===================
Every replica has an account. Its demand is the sum of three: the claims of programs that reason there, of programs
whose tools run (acting), and of turns without a program. The sums are kept incrementally: no event costs more than O(1)
here.

The paper weighs an acting program's claim by f(t) = 2^(-t / half-life), where t is the time since its tool began (arXiv
2602.13692, Eq. 7). All weights shrink by the same factor in the same time. So their sum is one number that shrinks by
that factor: `DecayedSum` needs no loop over programs.

The five cost terms (section 4.2 there) are areas in the plane of memory and time, in token-seconds:

- *decode*: a turn's tokens while it generates;
- *prefill*: a turn's tokens while its prompt is computed, for the new part of the prompt;
- *recompute*: the same, for the uncached part that the program had sent before;
- *caching*: claims of programs whose tools run;
- *unused*: memory of a usable replica that nobody claims while a turn waits anywhere.

No cost, but a sign of a wrong one, is how long a usable replica was *idle while held*: it had no turn in flight while a
program waited for room, anywhere or there.

Waiting in an engine's own queue is none of these: it holds no memory there. It is a sixth quantity, *queued*: the
tokens of the prompt times that wait. It is what remains of the time from grant to first byte after the uncached prompt
at the learned prefill speed. It is at least the share of time for which, by the claims, there was no memory: where
turns in flight claim R tokens of C, each has memory for C/R of the time.

Caching and unused are integrals of sums, and are brought up to date before a sum changes. Decode, prefill and recompute
are booked when a turn ends, because its usage is known only then. The five must never sum to more than there was
(capacity times time), so claims share what there is: turns in flight first, then programs at their tools; what programs
have in common counts once, as an equal part of each claim. What turns in flight may have had is kept in a pot
(`flight_token_s`), and no turn is booked with more than is left in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import exp2, inf
from typing import Final

from thunderagent.programs.state.paused_queue import PausedQueue
from thunderagent.programs.state.program import Kind, Place, TurnEnded

PREFILL_TO_DECODE_RATIO: Final = 1 / 350
"""Time to prefill a token over time to decode one, used when a turn's first byte was not seen apart from its last.

b/a of the engine fits in `simulator/constants.toml`: 1/344 for Llama-3.1-8B on A100, 1/390 for H100 TP2."""


@dataclass(slots=True)
class Costs:
    """What a replica's memory was spent on, in token-seconds."""

    decode_token_s: float = 0.0
    prefill_token_s: float = 0.0
    recompute_token_s: float = 0.0
    unused_token_s: float = 0.0
    caching_token_s: float = 0.0
    queued_token_s: float = 0.0
    """Turns in an engine's own queue: they use no memory, and are no part of the sum."""

    @property
    def spent_token_s(self) -> float:
        """Return the sum of the five, which never exceeds what there was."""
        working_token_s = self.decode_token_s + self.prefill_token_s + self.recompute_token_s
        return working_token_s + self.unused_token_s + self.caching_token_s


class DecayedSum:
    """A sum of terms, each of which halves every `half_life_s` seconds from its own start.

    A half-life of `inf` never decays; 0 counts nothing.
    """

    __slots__ = ("_at_s", "_count", "_halvings_per_s", "_value")

    def __init__(self, half_life_s: float) -> None:
        """Create a sum without terms."""
        self._halvings_per_s = 1.0 / half_life_s if half_life_s > 0 else inf
        self._value = 0.0
        self._at_s = 0.0
        self._count = 0

    def weight(self, age_s: float) -> float:
        """Return f(t) for a term that began `age_s` ago."""
        if age_s <= 0:
            return 0.0 if self._halvings_per_s == inf else 1.0
        return exp2(-age_s * self._halvings_per_s)

    def at(self, now_s: float) -> float:
        """Return the sum as of `now_s`."""
        if now_s == self._at_s:
            return self._value
        return self._value * exp2((self._at_s - now_s) * self._halvings_per_s) if self._count else 0.0

    def add(self, tokens: int, since_s: float, now_s: float) -> None:
        """Add a term of `tokens` that began at `since_s`."""
        self.change(tokens * self.weight(now_s - since_s), 1, now_s)

    def remove(self, tokens: int, since_s: float, now_s: float) -> None:
        """Remove a term that was added with the same `tokens` and `since_s`."""
        self.change(-tokens * self.weight(now_s - since_s), -1, now_s)

    def change(self, weighed_tokens: float, count: int, now_s: float) -> None:
        """Add or remove `count` terms that together weigh `weighed_tokens` now."""
        self._count += count
        self._value = max(0.0, self.at(now_s) + weighed_tokens) if self._count else 0.0
        self._at_s = now_s


class Account:
    """The sums of one replica, all in tokens; `capacity_tokens` is None while unknown.

    The places sum what their programs claim. `demand_tokens`, `active_count`, `growth_tokens` and `limit_tokens` are
    attributes, because every placement reads them of every replica.
    """

    __slots__ = (
        "acting",
        "active_count",
        "assumed_tokens",
        "busy_s",
        "capacity_ratio",
        "capacity_tokens",
        "costs",
        "decayed",
        "demand_tokens",
        "engine_waiting_count",
        "flight_s",
        "flight_token_s",
        "growth_tokens",
        "heard_s",
        "held_s",
        "hit_ratio",
        "idle_held_s",
        "kv_used_ratio",
        "leaving",
        "limit_tokens",
        "other_tokens",
        "pending_encode_count",
        "shared_tokens",
        "stalled",
        "turn_count",
        "updated_s",
        "usable",
        "waited_s",
        "working",
    )

    def __init__(self, half_life_s: float, now_s: float, replica_id: str = "") -> None:
        """Open an account at `now_s`."""
        self.capacity_tokens: int | None = None
        self.assumed_tokens: float | None = None
        """The same; if it is unknown, the median of the others'; None if none is known."""
        self.capacity_ratio = 1.0
        """Part of the capacity that may be claimed."""
        self.limit_tokens = inf
        """Tokens that may be claimed; infinite while no capacity is known."""
        self.usable = False
        """Whether programs may get claims there. Memory that nobody may claim is not unused."""
        self.working = Place(Kind.WORKING, replica_id)
        self.leaving = Place(Kind.LEAVING, replica_id)
        self.stalled = Place(Kind.STALLED, replica_id)
        self.acting = Place(Kind.ACTING, replica_id)
        self.decayed = DecayedSum(half_life_s) if half_life_s < inf else None
        """The claims of acting programs, each weighed by its time at the tool; None if nothing fades."""
        self.other_tokens = 0
        """Turns in flight without a program: anonymous, or of a program that was released mid-turn."""
        self.shared_tokens = 0
        """Tokens claimed more than once because programs share them."""
        self.demand_tokens = 0
        """Tokens claimed by programs and anonymous turns; shared tokens count once."""
        self.active_count = 0
        """Programs that claim memory there."""
        self.growth_tokens = 0
        """Expected growth of its programs beyond their claims."""
        self.turn_count = 0
        self.heard_s = -inf
        """When an answer there last began, went on or ended."""
        self.hit_ratio = 0.0
        """As last polled; so are the next two."""
        self.kv_used_ratio = 0.0
        self.engine_waiting_count = 0
        self.pending_encode_count: int | None = None
        """Images to encode there: as last polled, plus one for each turn since; None if encoding is no stage of its
        own."""
        self.costs = Costs()
        self.busy_s = 0.0
        """Time for which it had a turn in flight."""
        self.flight_s = 0.0
        """Time for which turns in flight had memory: less than the clock says where memory was short."""
        self.flight_token_s = 0.0
        """Memory that turns in flight had, less what was booked for those that ended."""
        self.updated_s = now_s
        self.waited_s = 0.0
        self.held_s = 0.0
        """Reading of the clock of programs that wait for room anywhere, when the integrals were last up to date."""
        self.idle_held_s = 0.0
        """Time for which it was usable and had no turn in flight while a program waited for room, anywhere or here."""

    def claim_other(self, tokens: int) -> None:
        """Add to the tokens that turns without a program claim; negative to subtract."""
        self.other_tokens += tokens
        self.demand_tokens += tokens

    def share(self, tokens: int) -> None:
        """Add to the tokens that are claimed more than once; negative to subtract."""
        self.shared_tokens += tokens
        self.demand_tokens -= tokens

    def set_limit(self, capacity_tokens: int | None, capacity_ratio: float) -> None:
        """Record the size of its memory, and which part of it may be claimed."""
        self.capacity_tokens, self.capacity_ratio = capacity_tokens, capacity_ratio
        if capacity_tokens is not None:
            self.assumed_tokens = capacity_tokens
        self.limit_tokens = inf if self.assumed_tokens is None else self.assumed_tokens * capacity_ratio

    def assume(self, tokens: float | None) -> None:
        """Assume a size while none is known."""
        self.assumed_tokens = tokens
        self.set_limit(None, self.capacity_ratio)

    @property
    def own_ratio(self) -> float:
        """Part of what its programs hold that is not shared between them; 1 if there are none."""
        whole_tokens = self.demand_tokens + self.shared_tokens
        return max(0.0, self.demand_tokens / whole_tokens) if whole_tokens else 1.0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of programs with a turn that claim memory there."""
        return self.working.tokens + self.leaving.tokens + self.stalled.tokens

    @property
    def reasoning_count(self) -> int:
        """Programs with a turn that claim memory there."""
        return self.working.count + self.leaving.count + self.stalled.count

    @property
    def marked_tokens(self) -> int:
        """Part of `reasoning_tokens` that is given back when turns in flight end."""
        return self.leaving.tokens

    def weighed_tokens(self, now_s: float) -> float:
        """Return the left side of Eq. 7: `demand_tokens` with acting programs weighed by their time in the tool."""
        acting_tokens = self.acting.tokens if self.decayed is None else self.decayed.at(now_s)
        return self.reasoning_tokens + self.other_tokens + acting_tokens


class Ledger:
    """All accounts, and the clock of waiting that tells idle memory from unused memory."""

    __slots__ = (
        "_half_life_s",
        "_queue",
        "_waited_s",
        "_waiting_since_s",
        "accounts",
        "closed_costs",
        "closed_idle_held_s",
        "waiting_count",
    )

    def __init__(self, half_life_s: float, queue: PausedQueue | None = None) -> None:
        """Create a ledger without accounts; `half_life_s` is that of f(t), `queue` has who waits for room."""
        self._half_life_s = half_life_s
        self._queue = queue
        self.accounts: dict[str, Account] = {}
        self.closed_costs = Costs()
        """Costs of removed replicas, so that sums over all replicas never shrink."""
        self.closed_idle_held_s = 0.0
        """The same of how long they idled while programs were held."""
        self.waiting_count = 0
        """Turns that wait for a lease."""
        self._waiting_since_s = 0.0
        self._waited_s = 0.0

    def open(self, replica_id: str, now_s: float) -> Account:
        """Return the account of a replica; create it if there is none."""
        account = self.accounts.get(replica_id)
        if account is None:
            account = self.accounts[replica_id] = Account(self._half_life_s, now_s, replica_id)
            account.waited_s = self.waited_s(now_s)
            account.held_s = self._held_s(now_s)
        return account

    def _held_s(self, now_s: float) -> float:
        """Return the total seconds in which at least one program waited for room anywhere."""
        if self._queue is None:
            return 0.0
        waiting = self._queue.waiting
        return waiting.occupied_s + (now_s - waiting.occupied_since_s if waiting.count else 0.0)

    def close(self, replica_id: str) -> None:
        """Forget the account of a removed replica, if it has one; its costs must be accrued first."""
        account = self.accounts.pop(replica_id, None)
        if account is not None:
            self.closed_idle_held_s += account.idle_held_s
            for field in fields(Costs):
                total_token_s = getattr(self.closed_costs, field.name) + getattr(account.costs, field.name)
                setattr(self.closed_costs, field.name, total_token_s)

    def waited_s(self, now_s: float) -> float:
        """Return the total seconds in which at least one turn was waiting."""
        return self._waited_s + now_s - self._waiting_since_s if self.waiting_count else self._waited_s

    def wait_begins(self, now_s: float) -> None:
        """Count one more waiting turn."""
        if not self.waiting_count:
            self._waiting_since_s = now_s
        self.waiting_count += 1

    def wait_ends(self, now_s: float) -> None:
        """Count one waiting turn fewer."""
        self.waiting_count -= 1
        if not self.waiting_count:
            self._waited_s += now_s - self._waiting_since_s

    def accrue(self, account: Account, now_s: float) -> None:
        """Bring the integrals of an account up to date. Call this before any of its sums changes."""
        elapsed_s = now_s - account.updated_s
        if elapsed_s <= 0:
            return
        account.updated_s = now_s
        if account.turn_count:
            account.busy_s += elapsed_s
        acting_tokens = float(account.acting.tokens)
        flight_tokens = account.demand_tokens - acting_tokens
        if account.shared_tokens:  # each bears its part of that
            whole_tokens, own_ratio = account.demand_tokens + account.shared_tokens, account.own_ratio
            flight_tokens, acting_tokens = (whole_tokens - acting_tokens) * own_ratio, acting_tokens * own_ratio
        capacity_tokens: float = inf if account.capacity_tokens is None else account.capacity_tokens
        fitting_tokens = flight_tokens
        if flight_tokens > capacity_tokens:
            fitting_tokens = capacity_tokens
            account.flight_s += elapsed_s * (fitting_tokens / flight_tokens)
        else:
            account.flight_s += elapsed_s
        account.flight_token_s += elapsed_s * fitting_tokens
        room_tokens = capacity_tokens - fitting_tokens
        account.costs.caching_token_s += elapsed_s * (acting_tokens if acting_tokens < room_tokens else room_tokens)
        waited_s = self._waited_s + now_s - self._waiting_since_s if self.waiting_count else self._waited_s
        if waited_s > account.waited_s and account.usable and capacity_tokens < inf:
            idle_tokens = max(0.0, capacity_tokens - account.demand_tokens)
            account.costs.unused_token_s += idle_tokens * min(elapsed_s, waited_s - account.waited_s)
        account.waited_s = waited_s
        queue = self._queue
        if queue is None:
            return
        waiting = queue.waiting
        held_s = waiting.occupied_s + now_s - waiting.occupied_since_s if waiting.count else waiting.occupied_s
        if not account.turn_count and account.usable:
            here = queue.routed.get(account.working.replica_id or "") if queue.routed else None
            account.idle_held_s += held_s - account.held_s if here is None or not here.count else elapsed_s
        account.held_s = held_s

    def charge_turn(
        self, account: Account, ended: TurnEnded, *, prefill_token_s: float | None = None, loaded_tokens: int = 0
    ) -> None:
        """Book an ended turn under decode, prefill, recompute and queued.

        If the engine does not say what was cached, the polled hit rate stands in. Without the learned
        `prefill_token_s`, the wait in the engine is known from claims only. `loaded_tokens` could be computed while the
        turn loaded from a tier.
        """
        turn, now_s, cached_tokens = ended.turn, ended.now_s, ended.cached_tokens
        prompt_tokens, output_tokens = ended.prompt_tokens, ended.output_tokens
        self.accrue(account, now_s)
        if cached_tokens is None:
            cached_tokens = int(prompt_tokens * account.hit_ratio)
        computed_tokens = max(0, prompt_tokens - cached_tokens) + loaded_tokens
        recomputed_tokens = max(0, ended.known_tokens - cached_tokens) + loaded_tokens
        duration_s, first_token_s = ended.duration_s, ended.first_token_s
        held_s = min(duration_s, account.flight_s - turn.granted_flight_s)
        if first_token_s is None:
            prefill_weight = computed_tokens * PREFILL_TO_DECODE_RATIO
            prefill_s = held_s * (prefill_weight / (prefill_weight + output_tokens or 1.0))
            queued_s, decode_s = duration_s - held_s, held_s - prefill_s
        else:
            computing_s = inf if prefill_token_s is None else computed_tokens * prefill_token_s
            prefill_s = min(first_token_s, computing_s, max(0.0, held_s - (duration_s - first_token_s)))
            queued_s, decode_s = first_token_s - prefill_s, min(held_s - prefill_s, duration_s - first_token_s)
        recompute_ratio = recomputed_tokens / computed_tokens if computed_tokens else 0.0
        prefill_area, decode_area = prompt_tokens * prefill_s, (prompt_tokens + output_tokens / 2) * decode_s
        part_ratio = 1.0
        if prefill_area + decode_area > account.flight_token_s:
            part_ratio = account.flight_token_s / (prefill_area + decode_area)
        account.flight_token_s = max(0.0, account.flight_token_s - prefill_area - decode_area)
        costs = account.costs
        costs.recompute_token_s += part_ratio * prefill_area * recompute_ratio
        costs.prefill_token_s += part_ratio * prefill_area * (1.0 - recompute_ratio)
        costs.decode_token_s += part_ratio * decode_area
        costs.queued_token_s += prompt_tokens * queued_s
