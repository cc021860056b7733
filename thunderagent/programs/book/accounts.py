"""Who holds how many tokens where, and what the memory was spent on.

Theory of operation
===================
Every replica has an account. Three sums make up its demand: the claims of programs that reason there, of programs whose
tools run (acting), and of turns without a program. They are kept by increments: no event costs more than O(1) here.

The paper weighs an acting program's claim by f(t) = 2^(-t / half-life), t being the time since its tool began
(arXiv 2602.13692, Eq. 7). All weights shrink by the same factor in the same time, so the sum of any number of them
is one number that shrinks by that factor: `DecayedSum` needs no loop over programs.

The five cost terms (section 4.2 there) are areas in the plane of memory and time, in token-seconds:

- *decode*: a turn's tokens while it generates;
- *prefill*: a turn's tokens while its prompt is computed, for the part of the prompt that is new;
- *recompute*: the same, for the part of the uncached prompt that the program had sent before;
- *caching*: claims of programs whose tools run;
- *unused*: memory of a usable replica that nobody claims while a turn waits anywhere.

What a turn waits for in an engine's own queue is none of them: it holds no memory there. It is a sixth quantity,
*queued*: the tokens of its prompt for that time. Of the time from a grant to the first byte that is what is left after
its uncached prompt at the learned speed of prefill, and at least the part of its time for which claims say that there
was no memory for it: where turns in flight claim R tokens of C, each has memory for C/R of the time.

Caching and unused are integrals of sums, and are brought up to date before a sum changes. Decode, prefill and
recompute are booked when a turn ends, because only then its usage is known. So that the five never sum to more than
there was - capacity times time -, claims share what there is: turns in flight first, then programs at their tools;
what programs have in common counts once, as an equal part of each claim. What turns in flight may have had is kept in
a pot (`flight_token_s`), and no turn is booked with more than is left in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import exp2, inf
from typing import Final

from thunderagent.programs.model.places import Kind, Place
from thunderagent.programs.model.turn import TurnEnded

PREFILL_TO_DECODE_RATIO: Final = 1 / 350
"""Time to prefill a token over time to decode one, where a turn's first byte was not seen apart from its last.

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
    """Of turns in an engine's own queue: no memory, and no part of the sum."""

    @property
    def spent_token_s(self) -> float:
        """Return the sum of the five, which is never more than there was."""
        working_token_s = self.decode_token_s + self.prefill_token_s + self.recompute_token_s
        return working_token_s + self.unused_token_s + self.caching_token_s


class DecayedSum:
    """A sum of terms that all halve every `half_life_s` seconds since each one's own start.

    A half-life of `inf` never decays; 0 counts nothing.
    """

    __slots__ = ("_at_s", "_count", "_halvings_per_s", "_value")

    def __init__(self, half_life_s: float) -> None:
        """Begin with no terms."""
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
        """Take out a term that was added with the same `tokens` and `since_s`."""
        self.change(-tokens * self.weight(now_s - since_s), -1, now_s)

    def change(self, weighed_tokens: float, count: int, now_s: float) -> None:
        """Add so many terms that are `weighed_tokens` together now, or take them out."""
        self._count += count
        self._value = max(0.0, self.at(now_s) + weighed_tokens) if self._count else 0.0
        self._at_s = now_s


class Account:
    """The sums of one replica. All sums in tokens; `capacity_tokens` None is not known.

    What programs claim is summed in the places where they are; `demand_tokens`, `active_count`, `growth_tokens` and
    `limit_tokens` are attributes, because every placement reads them of every replica.
    """

    __slots__ = (
        "acting",
        "active_count",
        "capacity_ratio",
        "capacity_tokens",
        "costs",
        "decayed",
        "demand_tokens",
        "engine_waiting_count",
        "flight_s",
        "flight_token_s",
        "growth_tokens",
        "hit_ratio",
        "idle_waited_s",
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
        self.capacity_ratio = 1.0
        """Part of the capacity that may be claimed."""
        self.limit_tokens = inf
        """Tokens that may be claimed; infinite if the capacity is not known."""
        self.usable = False
        """Whether programs may get claims there: memory that nobody may have is not unused."""
        self.working = Place(Kind.WORKING, replica_id)
        self.leaving = Place(Kind.LEAVING, replica_id)
        self.stalled = Place(Kind.STALLED, replica_id)
        self.acting = Place(Kind.ACTING, replica_id)
        self.decayed = DecayedSum(half_life_s) if half_life_s < inf else None
        """The claims of those at their tools, each weighed by its time there; None where nothing fades."""
        self.other_tokens = 0
        """Turns in flight without a program: anonymous, or of a program that was released in mid-turn."""
        self.shared_tokens = 0
        """Claimed more than once, because programs have it in common."""
        self.demand_tokens = 0
        """Tokens that programs and anonymous turns claim; what several have in common counts once."""
        self.active_count = 0
        """Programs that claim memory there."""
        self.growth_tokens = 0
        """What its programs are expected to grow by, beyond their claims."""
        self.turn_count = 0
        self.hit_ratio = 0.0
        """As last polled; so are the next two."""
        self.kv_used_ratio = 0.0
        self.engine_waiting_count = 0
        self.pending_encode_count: int | None = None
        """Images to encode there: as last polled, and one for each turn since; None where encoding is no stage."""
        self.costs = Costs()
        self.flight_s = 0.0
        """For how long a turn in flight all the time had memory: less than the clock says where it was short."""
        self.flight_token_s = 0.0
        """What turns in flight had of the memory, less what was booked for those that ended."""
        self.updated_s = now_s
        self.waited_s = 0.0
        self.idle_waited_s = 0.0
        """For so long it was usable and had no turn in flight while turns waited."""

    def turn_granted(self) -> None:
        """Count a turn in flight more; where images are encoded it is expected to bring one."""
        self.turn_count += 1
        if self.pending_encode_count is not None:
            self.pending_encode_count += 1

    def claim_other(self, tokens: int) -> None:
        """Book that turns without a program claim so much more, or less."""
        self.other_tokens += tokens
        self.demand_tokens += tokens

    def share(self, tokens: int) -> None:
        """Book that so much more is claimed more than once, or less."""
        self.shared_tokens += tokens
        self.demand_tokens -= tokens

    def set_limit(self, capacity_tokens: int | None, capacity_ratio: float) -> None:
        """Take in what its memory holds, and which part of it may be claimed."""
        self.capacity_tokens, self.capacity_ratio = capacity_tokens, capacity_ratio
        self.limit_tokens = inf if capacity_tokens is None else capacity_tokens * capacity_ratio

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
        """Return the left side of Eq. 7: like `demand_tokens`, acting programs weighed by their time in the tool."""
        acting_tokens = self.acting.tokens if self.decayed is None else self.decayed.at(now_s)
        return self.reasoning_tokens + self.other_tokens + acting_tokens


class Ledger:
    """All accounts, and the clock of waiting that tells idle memory from unused memory."""

    __slots__ = ("_half_life_s", "_waited_s", "_waiting_since_s", "accounts", "closed_costs", "waiting_count")

    def __init__(self, half_life_s: float) -> None:
        """Begin without accounts; `half_life_s` is that of f(t)."""
        self._half_life_s = half_life_s
        self.accounts: dict[str, Account] = {}
        self.closed_costs = Costs()
        """What the memory of replicas was spent on that were removed: sums over all replicas never shrink."""
        self.waiting_count = 0
        """Turns that wait for a lease."""
        self._waiting_since_s = 0.0
        self._waited_s = 0.0

    def open(self, replica_id: str, now_s: float) -> Account:
        """Return the account of a replica, a new one if it has none."""
        account = self.accounts.get(replica_id)
        if account is None:
            account = self.accounts[replica_id] = Account(self._half_life_s, now_s, replica_id)
            account.waited_s = self.waited_s(now_s)
        return account

    def close(self, replica_id: str) -> None:
        """Forget the account of a replica that was removed, if it has one; what it spent must be accrued."""
        account = self.accounts.pop(replica_id, None)
        if account is not None:
            for field in fields(Costs):
                total_token_s = getattr(self.closed_costs, field.name) + getattr(account.costs, field.name)
                setattr(self.closed_costs, field.name, total_token_s)

    def waited_s(self, now_s: float) -> float:
        """Return for how many seconds in all at least one turn was waiting."""
        return self._waited_s + now_s - self._waiting_since_s if self.waiting_count else self._waited_s

    def wait_begins(self, now_s: float) -> None:
        """Count one more turn that waits."""
        if not self.waiting_count:
            self._waiting_since_s = now_s
        self.waiting_count += 1

    def wait_ends(self, now_s: float) -> None:
        """Count one turn fewer that waits."""
        self.waiting_count -= 1
        if not self.waiting_count:
            self._waited_s += now_s - self._waiting_since_s

    def accrue(self, account: Account, now_s: float) -> None:
        """Bring the integrals of an account up to date. Must come before any of its sums changes."""
        elapsed_s = now_s - account.updated_s
        if elapsed_s <= 0:
            return
        account.updated_s = now_s
        acting_tokens = float(account.acting.tokens)
        flight_tokens = account.demand_tokens - acting_tokens
        if account.shared_tokens:  # each bears its part of that
            whole_tokens = account.demand_tokens + account.shared_tokens
            own_ratio = max(0.0, account.demand_tokens / whole_tokens) if whole_tokens else 1.0
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
            if not account.turn_count:
                account.idle_waited_s += waited_s - account.waited_s
        account.waited_s = waited_s

    def charge_turn(
        self, account: Account, ended: TurnEnded, *, prefill_token_s: float | None = None, loaded_tokens: int = 0
    ) -> None:
        """Book a turn that ended under decode, prefill, recompute and queued.

        Where the engine does not say what was cached, the polled hit rate stands in for it. Without the learned
        `prefill_token_s` what a turn waited in the engine is known from claims only. `loaded_tokens` could be computed
        while it loaded from a tier.
        """
        turn, now_s, cached_tokens = ended.turn, ended.now_s, ended.cached_tokens
        prompt_tokens, output_tokens = ended.prompt_tokens, ended.output_tokens
        self.accrue(account, now_s)
        if cached_tokens is None:
            cached_tokens = int(prompt_tokens * account.hit_ratio)
        computed_tokens = max(0, prompt_tokens - cached_tokens) + loaded_tokens
        recomputed_tokens = min(computed_tokens, max(0, ended.known_tokens - cached_tokens) + loaded_tokens)
        duration_s, first_token_s = ended.duration_s, ended.first_token_s
        held_s = min(duration_s, account.flight_s - turn.granted_flight_s)
        if first_token_s is None:
            prefill_weight = computed_tokens * PREFILL_TO_DECODE_RATIO
            prefill_s = held_s * (prefill_weight / (prefill_weight + output_tokens or 1.0))
            queued_s = duration_s - held_s
        else:
            computing_s = inf if prefill_token_s is None else computed_tokens * prefill_token_s
            prefill_s = min(first_token_s, computing_s, max(0.0, held_s - (duration_s - first_token_s)))
            queued_s = first_token_s - prefill_s
        decode_s = min(held_s - prefill_s, duration_s - (first_token_s or 0.0))
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
