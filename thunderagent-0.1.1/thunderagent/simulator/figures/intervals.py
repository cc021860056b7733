"""Means and their 95 % intervals, over independent runs: Student's t.

For f degrees of freedom, a whole number, the probability that |t| stays under some value is a finite sum of powers of
cos θ, tan θ = t/√f (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4). It grows with θ, so
a bisection over θ inverts it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of some values, and its uncertainty: with 95 % confidence at most `half_width`.

    `half_width` is None for a single value: its spread is unknown.
    """

    count: int
    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the interval of independent values, at least one."""
        count = len(values)
        if count < 2:
            return cls(count, fmean(values), None)
        return cls(count, fmean(values), t_quantile(count - 1) * stdev(values) / math.sqrt(count))

    @classmethod
    def of_ratios(cls, values: Sequence[float], baselines: Sequence[float]) -> Self | None:
        """Return the interval of each value over its own baseline; None without any, or if a baseline is 0."""
        if not values or 0 in baselines:
            return None
        return cls.of([value / baseline for value, baseline in zip(values, baselines, strict=True)])

    @property
    def low(self) -> float:
        """Return the lower end; the mean if the spread is unknown."""
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        """Return the upper end; the mean if the spread is unknown."""
        return self.mean + (self.half_width or 0.0)

    def text(self, digits: int, *, percent: bool = False, form: str = "{} ± {}") -> str:
        """Return the mean, and its uncertainty if known; `form` has a placeholder for each."""
        scale, unit = (100, " %") if percent else (1, "")
        mean = f"{self.mean * scale:.{digits}f}{unit}"
        return mean if self.half_width is None else form.format(mean, f"{self.half_width * scale:.{digits}f}")


def geometric(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of independent ratios over 0, and the ends of its interval."""
    logs = Interval.of([math.log(ratio) for ratio in ratios])
    return math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high)


@functools.cache
def t_quantile(freedom_count: int, confidence: float = CONFIDENCE) -> float:
    """Return the t that |t| stays under with that confidence, for so many degrees of freedom, at least 1."""
    if freedom_count < 1 or not 0 < confidence < 1:
        raise ValueError(f"no quantile for {freedom_count} degrees of freedom and confidence {confidence}")
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if _probability_within(middle, freedom_count) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom_count) * math.tan(low)


def _probability_within(angle: float, freedom_count: int) -> float:
    """Return the probability that |t| <= √f·tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom_count % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(1 if is_odd else 0, freedom_count - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
