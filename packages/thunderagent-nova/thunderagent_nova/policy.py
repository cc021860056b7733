"""How many units decoding gets beside another stage: latency of a split, the best split, and how it follows the load.

Theory of operation
-------------------
A profile has the time of a pass of each stage for each split of the units. Encoding and prefill run beside decoding
and never beside each other, so a request that never waits takes (Eq. 1, 2 of the paper "Nova")

    E[t] = t_v(P_v) + t_p(P_p) + (prop_v * t_d(P_v) + prop_p * t_d(P_p)) * L,    prop_x = t_x / (t_v + t_p)

with P_v and P_p the splits beside encoding and beside prefill, and L tokens of output. The best pair (Eq. 3) is found
by trying all pairs. Requests pass through the first two stages one after the other and are decoded together, so the
throughput is 1 / (t_v + t_p) (Eq. 4). The pairs that no other pair beats in both form the Pareto front: along it, a
higher rate of requests needs fewer units for decoding, almost linearly. The rate is not known, but the number of
requests in the first two stages is. Hence the share of decoding (Eq. 5)

    SM_dec = max(SM_min, SM_op - alpha * (N_pend - 1))

where SM_min keeps the time between two tokens bounded. In the paper SM_op is the best share by Eq. 3; here it is that
of the pair on the front with the most throughput among those whose latency is hardly more than the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from thunderagent_nova.messages import Profile, Split, SplitTimes

PENDING_AT_FLOOR = 4
"""Number of pending requests from which decoding has its smallest share: the paper's alpha of 4 and 6 are (24 - 12) / 3
and (30 - 12) / 3."""

LONGEST_TOKEN_RATIO = 80 / 28.9
"""In the smallest share a token may take so many times what it takes alone: the paper's bound, by which it sets SM_min
to 12 of 84, is 80 ms."""

SLACK_RATIO = 0.05
"""SM_op may cost so much more latency than the least, if it gains throughput. Near its minimum Eq. 1 is flat, and it
knows no queue: on an H100 4 % more latency without a queue are 29 % more requests a second."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A split beside encoding and one beside prefill, and the results for a request that never waits."""

    beside_encode: SplitTimes
    beside_prefill: SplitTimes
    latency_s: float
    throughput_per_s: float


def pair_of(beside_encode: SplitTimes, beside_prefill: SplitTimes, output_tokens: float) -> Pair:
    """Return the results of two splits for a request: Eq. 1, 2 and 4."""
    encode_s, prefill_s = beside_encode.encode_s, beside_prefill.prefill_s
    front_s = encode_s + prefill_s
    token_s = (
        encode_s * beside_encode.decode_beside_encode_s + prefill_s * beside_prefill.decode_beside_prefill_s
    ) / front_s
    return Pair(beside_encode, beside_prefill, front_s + token_s * output_tokens, 1.0 / front_s)


def all_pairs(profile: Profile, output_tokens: float) -> list[Pair]:
    """Return every pair of splits. Cost: O(n²) of the splits."""
    return [pair_of(first, second, output_tokens) for first in profile.splits for second in profile.splits]


def best_pair(profile: Profile, output_tokens: float) -> Pair:
    """Return the pair with the least latency of a request that never waits: Eq. 3. ValueError without splits."""
    return min(all_pairs(profile, output_tokens), key=lambda pair: (pair.latency_s, -pair.throughput_per_s))


def pareto_front(profile: Profile, output_tokens: float) -> list[Pair]:
    """Return the pairs that no other beats in both latency and throughput, the fastest first."""
    front: list[Pair] = []
    best_per_s = 0.0
    for pair in sorted(all_pairs(profile, output_tokens), key=lambda pair: (pair.latency_s, -pair.throughput_per_s)):
        if pair.throughput_per_s > best_per_s:
            front.append(pair)
            best_per_s = pair.throughput_per_s
    return front


def operating_pair(profile: Profile, output_tokens: float, slack_ratio: float = SLACK_RATIO) -> Pair:
    """Return the pair on the front with the most throughput within the slack of the best latency."""
    front = pareto_front(profile, output_tokens)
    most_s = front[0].latency_s * (1.0 + slack_ratio)
    return max((pair for pair in front if pair.latency_s <= most_s), key=lambda pair: pair.throughput_per_s)


def decode_share(best: float, floor: float, step: float, pending: int) -> float:
    """Return the units for decoding with this many requests in the first two stages: Eq. 5."""
    return max(floor, best - step * max(0, pending - 1))


class SplitPolicy(Protocol):
    """Decides the splits beside encoding and beside prefill."""

    def split(self, stage: str, pending: int) -> Split:
        """Return the split beside `encode` or `prefill` with this many requests in these two stages."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Gives each pass the whole device: the hardware shares it among concurrent passes."""

    def split(self, stage: str, pending: int) -> Split:  # noqa: ARG002 - the protocol's signature
        """Return none."""
        return None


@dataclass(frozen=True, slots=True)
class Static:
    """Gives decoding always the same."""

    beside_encode_units: int
    beside_prefill_units: int

    def split(self, stage: str, pending: int) -> Split:  # noqa: ARG002 - the protocol's signature
        """Return the one for that stage."""
        return self.beside_encode_units if stage == "encode" else self.beside_prefill_units


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Gives decoding less the more requests are pending: Eq. 5, rounded down to an available share.

    `shares` are those of the device's partitions, in units, ascending.
    """

    shares: tuple[int, ...]
    beside_encode_units: float
    beside_prefill_units: float
    floor_units: float
    encode_step_units: float
    prefill_step_units: float

    def __post_init__(self) -> None:
        """Reject a device that cannot be split, and unordered shares."""
        if not self.shares or list(self.shares) != sorted(set(self.shares)):
            raise ValueError(f"shares of decoding must be ascending, and some: {self.shares}")

    def split(self, stage: str, pending: int) -> Split:
        """Return the share of Eq. 5, or the next smaller available one."""
        if stage == "encode":
            wanted = decode_share(self.beside_encode_units, self.floor_units, self.encode_step_units, pending)
        else:
            wanted = decode_share(self.beside_prefill_units, self.floor_units, self.prefill_step_units, pending)
        return max((share for share in self.shares if share <= wanted), default=self.shares[0])


def adaptive_of(
    profile: Profile,
    output_tokens: float,
    *,
    longest_token_ratio: float = LONGEST_TOKEN_RATIO,
    slack_ratio: float = SLACK_RATIO,
) -> Adaptive:
    """Return the adaptive policy of a profile: SM_op by `operating_pair`, SM_min by how long a token may take.

    Where every share is too slow for that bound, decoding keeps at least the lesser of the two best ones. Without a
    profile of any split there is nothing to adapt, and ValueError is raised.
    """
    if not profile.splits:
        raise ValueError("the profile is empty: it has no split")
    best = operating_pair(profile, output_tokens, slack_ratio)
    encode_units, prefill_units = best.beside_encode.decode_units, best.beside_prefill.decode_units
    longest_s = longest_token_ratio * min(profile.decode_s.values())
    quick_units = (times.decode_units for times in profile.splits if _token_s(times) <= longest_s)
    floor_units = min(encode_units, prefill_units, min(quick_units, default=encode_units))
    return Adaptive(
        shares=tuple(sorted(times.decode_units for times in profile.splits)),
        beside_encode_units=encode_units,
        beside_prefill_units=prefill_units,
        floor_units=floor_units,
        encode_step_units=(encode_units - floor_units) / (PENDING_AT_FLOOR - 1),
        prefill_step_units=(prefill_units - floor_units) / (PENDING_AT_FLOOR - 1),
    )


def _token_s(times: SplitTimes) -> float:
    return max(times.decode_beside_encode_s, times.decode_beside_prefill_s)


PAPER = Adaptive(
    shares=tuple(range(2, 84, 2)),
    beside_encode_units=24,
    beside_prefill_units=30,
    floor_units=12,
    encode_step_units=4,
    prefill_step_units=6,
)
"""The paper's policy on an RTX A6000: 84 SMs, two to a unit of partitioning."""

PAPER_UNITS = 84


def paper_like(units: int, shares: tuple[int, ...]) -> Adaptive:
    """Return the paper's policy scaled to another device: better than nothing, until that one is measured."""
    ratio = units / PAPER_UNITS
    return Adaptive(
        shares=shares,
        beside_encode_units=PAPER.beside_encode_units * ratio,
        beside_prefill_units=PAPER.beside_prefill_units * ratio,
        floor_units=PAPER.floor_units * ratio,
        encode_step_units=PAPER.encode_step_units * ratio,
        prefill_step_units=PAPER.prefill_step_units * ratio,
    )


def expected_wait_s(rate_per_s: float, mean_s: float, deviation_s: float = 0.0) -> float:
    """Return how long a request waits for the first two stages: M/G/1, Eq. 6; infinite from full load on.

    `mean_s` and `deviation_s` are of the time in both stages together; arrivals are Poisson.
    """
    load = rate_per_s * mean_s
    if load >= 1.0:
        return inf
    return rate_per_s * (mean_s**2 + deviation_s**2) / (2.0 * (1.0 - load))
