"""What the scheduler learns of programs as they run: growth, residence, and the speed of prefill."""

from __future__ import annotations

from thunderagent.programs.histogram import LogHistogram, geometric_edges

TOKEN_EDGES = geometric_edges(8.0, 2**0.5, 36)
"""8 tokens to 1.5 million."""

RESIDENCE_EDGES_S = geometric_edges(0.5, 2**0.5, 38)
"""Half a second to two days."""

FIRST_PREFILL_TOKEN_S = 5e-5
"""Seconds to prefill a token until it is learned: an H100 with a model of some 30 billion active parameters."""

FIRST_WEIGHT = 20.0
"""What the first guess weighs, in turns of a thousand tokens."""

FORGETTING_RATIO = 0.999
"""Weight of a turn over that of the next one."""


class Growth:
    """How many tokens a turn adds to its program's context, and how many of them it generates."""

    __slots__ = ("_growths", "_outputs", "_weight", "_cycle_s", "_grown_tokens", "_grown_weight", "_whole_tokens")

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._growths = LogHistogram(TOKEN_EDGES)
        self._outputs = LogHistogram(TOKEN_EDGES)
        self._weight = 0.0
        self._whole_tokens = 0.0
        self._grown_weight = self._grown_tokens = self._cycle_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return how fast a program grows while it is not paused."""
        return self._grown_tokens / self._cycle_s if self._cycle_s else 0.0

    @property
    def whole_tokens(self) -> float:
        """Return how much larger a program is in the mean over its turns than its first prompt."""
        return self._whole_tokens / self._weight if self._weight else 0.0

    def learn(self, grown_tokens: int | None, output_tokens: int, whole_tokens: int, cycle_s: float) -> None:
        """Take in a finished turn.

        `grown_tokens` is how much it added; None for a first turn, which says nothing of growth. `whole_tokens` is how
        much larger its program is now than its first prompt was.
        """
        self._weight = self._weight * FORGETTING_RATIO + 1.0
        self._whole_tokens = self._whole_tokens * FORGETTING_RATIO + whole_tokens
        if grown_tokens is not None and grown_tokens > 0:
            self._growths.add(grown_tokens)
            self._grown_tokens = self._grown_tokens * FORGETTING_RATIO + grown_tokens
            self._cycle_s = self._cycle_s * FORGETTING_RATIO + cycle_s
        self._outputs.add(output_tokens)

    def turn_tokens(self, ratio: float, default: int) -> int:
        """Return what a turn adds at most in `ratio` of all cases, prompt and answer."""
        return int(self._growths.quantile(ratio, default))

    def output_tokens(self, ratio: float, default: int) -> int:
        """Return how many tokens a turn generates at most in `ratio` of all cases."""
        return int(self._outputs.quantile(ratio, default))


class PrefillSpeed:
    """Seconds for each prompt token that is not cached: the slope of a turn's duration against such tokens.

    A turn takes a + b·uncached + d·generated seconds. Least squares over both, with old turns forgotten slowly, tells b
    apart from d; so it needs no stream whose first byte could be seen.
    """

    __slots__ = ("_count", "_generated", "_generated_2", "_mixed", "_s", "_s_generated", "_s_uncached", "_uncached",
                 "_uncached_2")

    def __init__(self) -> None:
        """Begin with the first guess."""
        self._count = self._uncached = self._generated = self._s = 0.0
        self._uncached_2 = self._generated_2 = self._mixed = 0.0
        self._s_uncached = self._s_generated = 0.0

    def learn(self, duration_s: float, uncached_tokens: int, generated_tokens: int) -> None:
        """Take in a finished turn. Cost: O(1)."""
        u, g = uncached_tokens / 1000.0, generated_tokens / 1000.0
        keep = FORGETTING_RATIO
        self._count = self._count * keep + 1.0
        self._uncached = self._uncached * keep + u
        self._generated = self._generated * keep + g
        self._s = self._s * keep + duration_s
        self._uncached_2 = self._uncached_2 * keep + u * u
        self._generated_2 = self._generated_2 * keep + g * g
        self._mixed = self._mixed * keep + u * g
        self._s_uncached = self._s_uncached * keep + duration_s * u
        self._s_generated = self._s_generated * keep + duration_s * g

    @property
    def token_s(self) -> float:
        """Seconds for each uncached prompt token; never negative."""
        count = max(self._count, 1.0)
        mean_u, mean_g, mean_s = self._uncached / count, self._generated / count, self._s / count
        var_u = self._uncached_2 - count * mean_u * mean_u + FIRST_WEIGHT
        var_g = self._generated_2 - count * mean_g * mean_g + 1e-6
        cov_ug = self._mixed - count * mean_u * mean_g
        cov_su = self._s_uncached - count * mean_s * mean_u + FIRST_WEIGHT * FIRST_PREFILL_TOKEN_S * 1000.0
        cov_sg = self._s_generated - count * mean_s * mean_g
        determinant = var_u * var_g - cov_ug * cov_ug
        slope = (cov_su * var_g - cov_sg * cov_ug) / determinant if determinant > 0 else cov_su / var_u
        return max(1e-7, slope / 1000.0)
