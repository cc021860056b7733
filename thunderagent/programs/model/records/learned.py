"""Learned knowledge as values: to be stored, and adopted by a scheduler that starts.

The numbers are what the learners hold, not what they derive; sequences of names begin with the one longest not heard
of. Counts that only reports show (of hints, turns and programs) are not in them.
"""

# interpreted: the event log reads the types of the fields, which a compiled class does not keep

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """Counts of values between edges, and how many values count."""

    counts: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True)
class ToolRecord:
    """The life table of a tool: how many left in each interval, by returning or otherwise, and the last rates."""

    name: str
    returned: tuple[float, ...]
    away: tuple[float, ...]
    count: float
    rates: tuple[float, ...]
    refresh_at_count: float


@dataclass(frozen=True, slots=True)
class GrowthRecord:
    """What turns add and generate, and how large programs become."""

    growths: HistogramRecord
    outputs: HistogramRecord
    program_count: int
    turn_count: float
    whole_tokens: float
    grown_tokens: float
    cycle_s: float


@dataclass(frozen=True, slots=True)
class TurnMeansRecord:
    """Means over turns, in tokens, and over how many: what they hold, bring, leave, generate and add; of programs."""

    count: int
    held_tokens: float
    new_tokens: float
    left_tokens: float
    output_tokens: float
    program_count: int
    program_turn_count: float
    """Turns of an ended program, mean."""
    grown_tokens: float = 0.0
    """What a turn adds to its program; earlier versions did not keep it, then it is learned anew."""


@dataclass(frozen=True, slots=True)
class PriceRecord:
    """Price of a generated token, as looked up so many turns ago, and how many tokens a byte is."""

    decode: HistogramRecord
    decode_token_s: float
    decode_refreshed_count: int
    tokens_per_byte_ratio: float


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """The claimable part of a replica's reported capacity, and where much was lost the last time."""

    replica_id: str
    ratio: float
    ceiling_ratio: float


@dataclass(frozen=True, slots=True)
class TierRecord:
    """Price of a replica's tier: times to load a token, and how much of its pool's losses was found there."""

    replica_id: str
    restore: HistogramRecord
    missing_tokens: float
    found_tokens: float


@dataclass(frozen=True, slots=True)
class ReplicaPriceRecord:
    """Price of a computed prompt token on a replica with its interval, of an iteration, and of a sequence in it."""

    replica_id: str
    token_s: float
    low_token_s: float
    high_token_s: float
    iteration_s: float
    sequence_s: float
    source: str


@dataclass(frozen=True, slots=True)
class LengthsRecord:
    """How many programs ended in each interval of turns, or passed it, and what turns added recently."""

    ended: tuple[float, ...]
    passed: tuple[float, ...]
    grown_tokens: float
    grown_count: float


@dataclass(frozen=True, slots=True)
class LearnedRecord:
    """All that the scheduler of one pool has learned."""

    all_tools: ToolRecord
    tools: tuple[ToolRecord, ...]
    mean_tool_s: float
    growth: GrowthRecord
    prices: PriceRecord
    residences_s: HistogramRecord
    all_roles: tuple[float, float]
    roles: tuple[tuple[str, float, float], ...]
    """Weight and tokens of each role."""
    media_factors: tuple[tuple[str, float], ...]
    hints: tuple[tuple[str, float, float], ...]
    """For each tenant: how many were right, and of how many."""
    restores: tuple[float, float]
    """Number of restores, and their seconds of waiting."""
    capacities: tuple[CapacityRecord, ...]
    tiers: tuple[TierRecord, ...] = ()
    lengths: LengthsRecord | None = None
    """None if the order does not learn them."""
    turn_means: TurnMeansRecord | None = None
    """None in a state that an earlier version kept."""
    replica_prices: tuple[ReplicaPriceRecord, ...] = ()
