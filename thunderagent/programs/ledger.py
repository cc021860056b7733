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
- *prefill*: a turn's tokens from its grant to its first byte, for the part of the prompt that is new;
- *recompute*: the same, for the part of the uncached prompt that the program had sent before;
- *caching*: claims of programs whose tools run;
- *unused*: memory of a usable replica that nobody claims while a turn waits anywhere.

Caching and unused are integrals of sums, and are brought up to date before a sum changes. Decode, prefill and
recompute are booked when a turn ends, because only then its usage is known.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import exp2, inf

from thunderagent.programs.program import Turn

PREFILL_TO_DECODE_RATIO = 1 / 350
"""Time to prefill a token over time to decode one, where a turn's first byte was not seen apart from its last.

b/a of the engine fits in `simulator/constants.toml`: 1/344 for Llama-3.1-8B on A100, 1/390 for H100 TP2.
"""


@dataclass(slots=True)
class Costs:
    """What a replica's memory was spent on, in token-seconds."""

    decode_token_s: float = 0.0
    prefill_token_s: float = 0.0
    recompute_token_s: float = 0.0
    unused_token_s: float = 0.0
    caching_token_s: float = 0.0


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
        self._value = self.at(now_s) + tokens * self.weight(now_s - since_s)
        self._at_s = now_s
        self._count += 1

    def remove(self, tokens: int, since_s: float, now_s: float) -> None:
        """Take out a term that was added with the same `tokens` and `since_s`."""
        self._count -= 1
        self._value = max(0.0, self.at(now_s) - tokens * self.weight(now_s - since_s)) if self._count else 0.0
        self._at_s = now_s


class Account:
    """The sums of one replica. All sums in tokens; `capacity_tokens` None is not known."""

    __slots__ = (
        "acting",
        "acting_count",
        "acting_tokens",
        "capacity_ratio",
        "capacity_tokens",
        "costs",
        "engine_waiting_count",
        "growth_tokens",
        "hit_ratio",
        "kv_used_ratio",
        "marked_tokens",
        "other_tokens",
        "pending_encode_count",
        "reasoning_count",
        "reasoning_tokens",
        "shared_tokens",
        "turn_count",
        "updated_s",
        "usable",
        "waited_s",
    )

    def __init__(self, half_life_s: float, now_s: float) -> None:
        """Open an account at `now_s`."""
        self.capacity_tokens: int | None = None
        self.capacity_ratio = 1.0
        """Part of the capacity that may be claimed."""
        self.usable = False
        """Whether programs may get claims there: memory that nobody may have is not unused."""
        self.reasoning_tokens = 0
        self.reasoning_count = 0
        self.acting_tokens = 0
        self.acting_count = 0
        self.acting = DecayedSum(half_life_s)
        self.marked_tokens = 0
        """Part of `reasoning_tokens` that goes when turns in flight end."""
        self.other_tokens = 0
        """Turns in flight without a program: anonymous, or of a program that was released in mid-turn."""
        self.growth_tokens = 0
        """What its programs are expected to grow by, beyond their claims."""
        self.shared_tokens = 0
        """Claimed more than once, because programs have it in common."""
        self.turn_count = 0
        self.hit_ratio = 0.0
        """As last polled; so are the next two."""
        self.kv_used_ratio = 0.0
        self.engine_waiting_count = 0
        self.pending_encode_count: int | None = None
        """Images to encode there: as last polled, and one for each turn since; None where encoding is no stage."""
        self.costs = Costs()
        self.updated_s = now_s
        self.waited_s = 0.0

    def turn_granted(self) -> None:
        """Count a turn in flight more; where images are encoded it is expected to bring one."""
        self.turn_count += 1
        if self.pending_encode_count is not None:
            self.pending_encode_count += 1

    @property
    def active_count(self) -> int:
        """Programs that claim memory there."""
        return self.reasoning_count + self.acting_count

    @property
    def demand_tokens(self) -> int:
        """Tokens that programs and anonymous turns claim; what several have in common counts once."""
        return self.reasoning_tokens + self.acting_tokens + self.other_tokens - self.shared_tokens

    @property
    def limit_tokens(self) -> float:
        """Tokens that may be claimed; infinite if the capacity is not known."""
        return inf if self.capacity_tokens is None else self.capacity_tokens * self.capacity_ratio

    def weighed_tokens(self, now_s: float) -> float:
        """Return the left side of Eq. 7: like `demand_tokens`, acting programs weighed by their time in the tool."""
        return self.reasoning_tokens + self.other_tokens + self.acting.at(now_s)


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
            account = self.accounts[replica_id] = Account(self._half_life_s, now_s)
            account.waited_s = self.waited_s(now_s)
        return account

    def close(self, replica_id: str) -> None:
        """Forget the account of a replica that was removed, if it has one; it must be settled."""
        account = self.accounts.pop(replica_id, None)
        if account is not None:
            for field in fields(Costs):
                total_token_s = getattr(self.closed_costs, field.name) + getattr(account.costs, field.name)
                setattr(self.closed_costs, field.name, total_token_s)

    def waited_s(self, now_s: float) -> float:
        """Return for how many seconds in all at least one turn was waiting."""
        if self.waiting_count:
            return self._waited_s + now_s - self._waiting_since_s
        return self._waited_s

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

    def settle(self, account: Account, now_s: float) -> None:
        """Bring the integrals of an account up to date. Must come before any of its sums changes."""
        elapsed_s = now_s - account.updated_s
        if elapsed_s <= 0:
            return
        account.updated_s = now_s
        account.costs.caching_token_s += account.acting_tokens * elapsed_s
        waited_s = self.waited_s(now_s)
        if account.usable and account.capacity_tokens is not None and waited_s > account.waited_s:
            idle_tokens = max(0, account.capacity_tokens - account.demand_tokens)
            account.costs.unused_token_s += idle_tokens * (waited_s - account.waited_s)
        account.waited_s = waited_s

    def charge_turn(
        self,
        account: Account,
        turn: Turn,
        now_s: float,
        *,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int | None,
        known_tokens: int,
    ) -> None:
        """Book a turn that ended under decode, prefill and recompute.

        `known_tokens` is the part of the prompt that its program had sent or got before. Where the engine does not
        say what was cached (`cached_tokens` None), the replica's polled hit rate stands in for it.
        """
        if cached_tokens is None:
            cached_tokens = int(prompt_tokens * account.hit_ratio)
        computed_tokens = max(0, prompt_tokens - cached_tokens)
        recomputed_tokens = min(computed_tokens, max(0, known_tokens - cached_tokens))
        duration_s = now_s - turn.granted_s
        prefill_s = turn.first_token_s(now_s)
        if prefill_s is None:
            prefill_weight = computed_tokens * PREFILL_TO_DECODE_RATIO
            prefill_s = duration_s * (prefill_weight / (prefill_weight + output_tokens or 1.0))
        recompute_ratio = recomputed_tokens / computed_tokens if computed_tokens else 0.0
        costs = account.costs
        costs.recompute_token_s += prompt_tokens * prefill_s * recompute_ratio
        costs.prefill_token_s += prompt_tokens * prefill_s * (1.0 - recompute_ratio)
        costs.decode_token_s += (prompt_tokens + output_tokens / 2) * (duration_s - prefill_s)
