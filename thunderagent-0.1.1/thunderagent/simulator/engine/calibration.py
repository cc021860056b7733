"""Fit the constants of the engine model to times that were measured on an engine: observations in, a profile out.

Theory of operation
-------------------
The time of an iteration is linear in its work (see `timing.py`), so the time of several is linear in the sums. A time
to first token is the time of the prompt's iterations plus a constant: the request's way to the engine and the token's
way back. The time between two tokens is one iteration. So every observation is one equation, all equations form one
system, and no constant is fitted from a single experiment.

**Relative errors count**: each equation is divided by its time; otherwise the longest prompts would decide alone.
**No constant is negative**: it would be noise, and would make the time of some iterations negative.
**Noise of a shared machine only ever adds**, sometimes a lot. So the repetitions of a measurement become one, their
median, and equations that are still far from the others weigh less (Huber's weights).
**What cannot be told apart is not guessed**: a constant whose column depends on the others' is left out if the model
can do without it; otherwise the fit is refused.
**The token limit of an iteration** decides how many iterations a long prompt needs, and is not linear. So the fit is
made for each of the usual sizes, and a size is reported only if its errors are clearly smaller than all others'.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from thunderagent.errors import CalibrationError
from thunderagent.simulator.engine.timing import IterationWork, TimingProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

POOR_FIT_RATIO: Final = 0.15
"""With a higher median relative error the model does not describe the engine."""

ASSUMED_CHUNK_TOKENS: Final = 2048
"""Assumed limit of tokens per iteration if an engine's times do not tell (vLLM's `--max-num-batched-tokens`)."""

_CHUNK_TOKENS: Final = (512, 1024, 2048, 4096, 8192, 16_384)
_CLEAR_RATIO: Final = 1.5  # by which the errors of every other size must be larger
_CLEAR_DIFFERENCE: Final = 0.002  # of the measured times, by which they must be larger as well

_LEAST_TIME_S: Final = 1e-5  # what is shorter is not known to its own size: keeps weights finite
_DEPENDENT: Final = 1e-7  # squared distance of a column of length 1 from what the others span
_HUBER_LIMIT: Final = 1.5  # standard deviations up to which an equation counts in full
_LEAST_SPREAD_RATIO: Final = 0.01  # no equation is better than this
_REWEIGHTING_COUNT: Final = 10

# The needed ones first: a column is only ever left out in favour of those before it.
_CONSTANTS: Final = (
    "base_s",
    "prefill_token_s",
    "decode_request_s",
    "request_overhead_s",
    "attention_pair_s",
    "decode_context_token_s",
)
_NEEDED_COUNT: Final = 3


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured time and what passed in it: `iteration_count` iterations with `work` in total.

    `request_count` is 1 for a time to first token, and 0 for the time between two tokens.
    """

    experiment: str
    measured_s: float
    work: IterationWork
    iteration_count: int = 1
    request_count: int = 0


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors of the predictions for the times of one experiment."""

    experiment: str
    observation_count: int
    median_ratio: float
    p90_ratio: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants, their errors, and the names of those that could not be determined.

    `observation_count` counts repetitions as one. The last of the residuals are those of all experiments together.
    """

    timing: TimingProfile
    residuals: tuple[Residuals, ...]
    left_out: tuple[str, ...]
    observation_count: int

    @property
    def median_ratio(self) -> float:
        """Return the median relative error of all observations."""
        return self.residuals[-1].median_ratio

    @property
    def is_poor(self) -> bool:
        """Return whether the worst experiment's median error is too large to trust the model."""
        return max(residuals.median_ratio for residuals in self.residuals) > POOR_FIT_RATIO


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """The limit of tokens per iteration, and whether the times tell it or it is assumed."""

    tokens: int
    is_told: bool


def prefill_observation(
    experiment: str, first_token_s: float, *, prompt_tokens: int, cached_tokens: int, max_num_batched_tokens: int
) -> Observation:
    """Return the observation of a single request's time to first token: each of its chunks is an iteration."""
    computed_tokens = prompt_tokens - cached_tokens
    work = IterationWork(computed_tokens, computed_tokens * (cached_tokens + computed_tokens / 2))
    return _in_chunks(Observation(experiment, first_token_s, work, request_count=1), max_num_batched_tokens)


def decode_observation(experiment: str, iteration_s: float, *, requests_count: int, context_tokens: int) -> Observation:
    """Return the observation of a time between two tokens: `context_tokens` are those of all the requests."""
    return Observation(experiment, iteration_s, IterationWork(0, 0.0, requests_count, context_tokens))


def in_chunks(observations: Iterable[Observation], max_num_batched_tokens: int) -> list[Observation]:
    """Return the observations for an engine with this limit of tokens per iteration."""
    return [_in_chunks(each, max_num_batched_tokens) if each.request_count else each for each in observations]


def tell_chunk_size(observations: Iterable[Observation]) -> ChunkSize:
    """Return the limit of tokens per iteration if the times tell it, otherwise the usual one.

    Sizes that no prompt exceeds cannot be distinguished, so none of them is reported. Raises CalibrationError as `fit`
    does.
    """
    points = _merge_repetitions(observations)
    longest_tokens = max((point.work.prefill_tokens for point in points if point.request_count), default=0)
    assumed = ChunkSize(ASSUMED_CHUNK_TOKENS, is_told=False)
    errors: dict[ChunkSize, float] = {}
    for tokens in _CHUNK_TOKENS:
        chunk_size = ChunkSize(tokens, is_told=tokens < longest_tokens)
        if not chunk_size.is_told and tokens < ASSUMED_CHUNK_TOKENS:
            continue
        errors[chunk_size] = _mean_error_ratio(in_chunks(points, tokens))
        if not chunk_size.is_told:
            break
    best, *others = sorted(errors, key=errors.__getitem__)
    if not others:
        return assumed
    least, next_least = errors[best], errors[others[0]]
    is_clear = next_least > _CLEAR_RATIO * least and next_least > least + _CLEAR_DIFFERENCE
    return best if is_clear else assumed


def predict_s(timing: TimingProfile, observation: Observation) -> float:
    """Return the time that the model predicts."""
    constants = [getattr(timing, name) for name in _CONSTANTS]
    return _dot(constants, _row(observation))


def fit(observations: Iterable[Observation]) -> Fit:
    """Return the constants that fit these times best; CalibrationError if the needed ones cannot be determined."""
    points = _merge_repetitions(observations)
    rows = [_row(point) for point in points]
    scales = [max(point.measured_s, _LEAST_TIME_S) for point in points]
    relative_rows = [[value / scale for value in row] for row, scale in zip(rows, scales, strict=True)]
    targets = [point.measured_s / scale for point, scale in zip(points, scales, strict=True)]
    columns = independent_columns(relative_rows)
    missing = [name for index, name in enumerate(_CONSTANTS[:_NEEDED_COUNT]) if index not in columns]
    if missing:
        raise CalibrationError(
            f"{len(points)} different measurements are too few, or too much alike, to tell {missing[0]}"
        )
    chosen = [[row[index] for index in columns] for row in relative_rows]
    values = dict(zip((_CONSTANTS[index] for index in columns), _fit_robustly(chosen, targets), strict=True))
    costs: dict[str, Any] = {name: values.get(name, 0.0) for name in _CONSTANTS}
    timing = TimingProfile("", **costs)
    left_out = tuple(name for name in _CONSTANTS if name not in values)
    return Fit(timing, _residuals(timing, points), left_out, len(points))


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the x ≥ 0 that makes |rows·x - targets| least.

    It is the ordinary solution on just those columns where it is not 0. So all sets of columns are tried, which is
    exact and has no loop that could fail to end; it costs 2**columns, and there are six. Dependent columns are allowed.
    """
    count = len(rows[0])
    lengths = [math.hypot(*(row[column] for row in rows)) or 1.0 for column in range(count)]
    scaled = [[value / length for value, length in zip(row, lengths, strict=True)] for row in rows]
    best, least = [0.0] * count, 0.0
    whole_gram, whole_moments = _normal_equations(scaled, targets)
    for size in range(1, count + 1):
        for columns in combinations(range(count), size):
            gram = [[whole_gram[one][other] for other in columns] for one in columns]
            moments = [whole_moments[column] for column in columns]
            solution = _solve(gram, moments)
            if solution is None or min(solution) < 0:
                continue
            error = -_dot(solution, moments)  # of the square, beside targets² which is the same for all
            if error < least:
                best, least = [0.0] * count, error
                for column, value in zip(columns, solution, strict=True):
                    best[column] = value / lengths[column]
    return best


def independent_columns(rows: Sequence[Sequence[float]]) -> list[int]:
    """Return the columns that are not a combination of earlier ones; a column of zeros is one."""
    columns: list[int] = []
    for column in range(len(rows[0]) if rows else 0):
        length = math.hypot(*(row[column] for row in rows))
        if length == 0:
            continue
        tried = [*columns, column]
        lengths = [math.hypot(*(row[each] for row in rows)) for each in tried]
        chosen = [[row[each] / size for each, size in zip(tried, lengths, strict=True)] for row in rows]
        if _solve(*_normal_equations(chosen, [0.0] * len(rows))) is not None:
            columns = tried
    return columns


def _in_chunks(observation: Observation, max_num_batched_tokens: int) -> Observation:
    return replace(observation, iteration_count=-(-observation.work.prefill_tokens // max_num_batched_tokens))


def _mean_error_ratio(points: Sequence[Observation]) -> float:
    """Return the mean relative error of the constants that fit best: unlike the median, it sees a few long prompts."""
    timing = fit(points).timing
    return fmean(_error_ratio(timing, point) for point in points)


def _error_ratio(timing: TimingProfile, point: Observation) -> float:
    return abs(predict_s(timing, point) - point.measured_s) / max(point.measured_s, _LEAST_TIME_S)


def _row(observation: Observation) -> list[float]:
    """Return the factors of the constants, in their order."""
    work = observation.work
    return [
        float(observation.iteration_count),
        float(work.prefill_tokens),
        float(work.decode_count),
        float(observation.request_count),
        work.attention_pairs,
        float(work.decode_context_tokens),
    ]


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum((one * other for one, other in zip(left, right, strict=True)), 0.0)


def _merge_repetitions(observations: Iterable[Observation]) -> list[Observation]:
    times: defaultdict[Observation, list[float]] = defaultdict(list)
    for observation in observations:
        times[replace(observation, measured_s=0.0)].append(observation.measured_s)
    return [replace(same, measured_s=median(measured)) for same, measured in times.items()]


def _fit_robustly(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Solve with weights that follow from the errors of the solution before (iteratively reweighted least squares)."""
    weights = [1.0] * len(rows)
    for _ in range(_REWEIGHTING_COUNT):
        weighted = [[value * weight for value in row] for row, weight in zip(rows, weights, strict=True)]
        values = non_negative_least_squares(
            weighted, [target * weight for target, weight in zip(targets, weights, strict=True)]
        )
        errors = [abs(_dot(row, values) - target) for row, target in zip(rows, targets, strict=True)]
        limit = _HUBER_LIMIT * max(_LEAST_SPREAD_RATIO, 1.4826 * median(errors))  # the median of a normal error's size
        weights = [math.sqrt(min(1.0, limit / error)) if error else 1.0 for error in errors]
    return values


def _residuals(timing: TimingProfile, points: Sequence[Observation]) -> tuple[Residuals, ...]:
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for point in points:
        ratios[point.experiment].append(_error_ratio(timing, point))
    ratios["all"] = [ratio for each in ratios.values() for ratio in each]
    return tuple(
        Residuals(experiment, len(each), median(each), sorted(each)[math.ceil(0.9 * len(each)) - 1])
        for experiment, each in ratios.items()
    )


def _normal_equations(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    columns = list(zip(*rows, strict=True))
    return [[_dot(one, other) for other in columns] for one in columns], [_dot(column, targets) for column in columns]


def _solve(gram: Sequence[Sequence[float]], moments: Sequence[float]) -> list[float] | None:
    """Solve a system whose matrix is symmetric, with ones or less on its diagonal; None if it is singular.

    By Cholesky's factors: the square of each on the diagonal is how far a column is from what those before it span.
    """
    size = len(moments)
    factor = [[0.0] * size for _ in range(size)]
    for row in range(size):
        for column in range(row):
            known = _dot(factor[row][:column], factor[column][:column])
            factor[row][column] = (gram[row][column] - known) / factor[column][column]
        left = gram[row][row] - _dot(factor[row][:row], factor[row][:row])
        if left < _DEPENDENT * gram[row][row] or left <= 0:
            return None
        factor[row][row] = math.sqrt(left)
    halfway: list[float] = []
    for row in range(size):
        halfway.append((moments[row] - _dot(factor[row][:row], halfway)) / factor[row][row])
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(factor[below][row] * solution[below] for below in range(row + 1, size))
        solution[row] = (halfway[row] - known) / factor[row][row]
    return solution
