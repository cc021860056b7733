"""How long an iteration takes, by what it computes: a linear formula, and its constants for known engines."""

from __future__ import annotations

import functools
import json
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thunderagent.faults import nearest_hint

if TYPE_CHECKING:
    from collections.abc import Mapping

PROFILE_SUFFIX: Final = ".toml"

COSTS_US: Final = {
    "base_us": "base_s",
    "prefill_us": "prefill_token_s",
    "decode_us": "decode_request_s",
    "decode_context_us": "decode_context_token_s",
    "prefill_attention_us": "attention_pair_s",
    "request_overhead_us": "request_overhead_s",
    "prefill_base_us": "prefill_base_s",
    "decode_pool_us": "decode_pool_s",
    "decode_pool_square_us": "decode_pool_square_s",
}
"""Costs of a profile in TOML, in order of writing, and their fields."""

_SIZES: Final = ("kv_tokens", "block_size", "max_num_batched_tokens")
_NEEDED_KEYS: Final = ("source", "base_us", "prefill_us", "decode_us")
_KEYS: Final = ("source", *COSTS_US, *_SIZES)


@dataclass(slots=True, unsafe_hash=True)
class IterationWork:
    """What one iteration computes.

    `attention_pairs` is Σ p(ctx + p/2) over the requests in prefill: p prompt tokens computed behind ctx others.
    """

    prefill_tokens: int = 0
    attention_pairs: float = 0.0
    decode_count: int = 0
    decode_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """Hold what an iteration costs on one kind of engine.

    Seconds: each iteration, each uncached prompt token, each pair of a prompt token and a token it attends to, each
    decoding request, each token of a decoding request's context. `request_overhead_s` is no part of an iteration: what
    passes outside of them from the sending of a request to its first token. `prefill_base_s` is what an iteration costs
    besides if it computes any prompt. `decode_pool_s` is for engines that slow down with the used part of their pool,
    whatever its size: what an iteration costs besides if all of it is used, and `decode_pool_square_s` how much less
    that grows by the square. The sizes are those of the engine that was measured, where they are known. Raises
    ValueError for a negative or infinite cost, for a size below 1, and if a fuller pool would cost less.
    """

    name: str
    base_s: float
    prefill_token_s: float
    decode_request_s: float
    decode_context_token_s: float = 0.0
    attention_pair_s: float = 0.0
    kv_tokens: int | None = None
    source: str = ""
    request_overhead_s: float = 0.0
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_base_s: float = 0.0
    decode_pool_s: float = 0.0
    decode_pool_square_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= getattr(self, field) < float("inf") for field in COSTS_US.values()):
            raise ValueError(f"profile {self.name!r}: every cost must be a finite number of seconds, 0 or more")
        if 2 * self.decode_pool_square_s > self.decode_pool_s:
            raise ValueError(f"profile {self.name!r}: decode_pool_square may be half of decode_pool at most")
        for name in _SIZES:
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"profile {self.name!r}: {name} must be at least 1, got {size}")

    def iteration_s(self, work: IterationWork, used_ratio: float = 0.0) -> float:
        """Return how long an iteration with this work takes, in seconds, while that part of the pool is used."""
        return (
            self.base_s
            + (self.prefill_base_s if work.prefill_tokens else 0.0)
            + self.prefill_token_s * work.prefill_tokens
            + self.attention_pair_s * work.attention_pairs
            + self.decode_request_s * work.decode_count
            + self.decode_context_token_s * work.decode_context_tokens
            + (self.decode_pool_s - self.decode_pool_square_s * used_ratio) * used_ratio
        )

    def decode_s(self, decode_count: int, context_tokens: int, used_ratio: float) -> float:
        """Return how long an iteration takes in which requests with this many tokens in total only decode."""
        return (
            self.base_s
            + self.decode_request_s * decode_count
            + self.decode_context_token_s * context_tokens
            + (self.decode_pool_s - self.decode_pool_square_s * used_ratio) * used_ratio
        )

    def sizes(
        self, *, kv_tokens: int | None, block_size: int | None, max_num_batched_tokens: int | None
    ) -> dict[str, int]:
        """Return the sizes of an engine: those given, else the measured engine's; one that is not known is left out."""
        given = {"kv_tokens": kv_tokens, "block_size": block_size, "max_num_batched_tokens": max_num_batched_tokens}
        known = {name: getattr(self, name) if size is None else size for name, size in given.items()}
        return {name: size for name, size in known.items() if size is not None}


@functools.cache
def load_profiles() -> Mapping[str, TimingProfile]:
    """Read the timing profiles that come with the package, by name (`constants.toml`, each with its source)."""
    text = resources.files(__package__).joinpath("constants.toml").read_text(encoding="utf-8")
    return {name: _profile_of(name, values) for name, values in tomllib.loads(text)["profiles"].items()}


def profile(name: str) -> TimingProfile:
    """Return the timing profile of that name; ValueError names those that exist."""
    profiles = load_profiles()
    if name not in profiles:
        known = sorted(profiles)
        raise ValueError(f"unknown timing profile {name!r}; there are: {', '.join(known)}{nearest_hint(name, known)}")
    return profiles[name]


def profile_from(text: str) -> TimingProfile:
    """Return the timing profile of that name, or the one in that file if the text ends in `.toml`.

    Such a file has the keys of one profile of `constants.toml`, without a heading; the profile is named as the file.
    Raises ValueError, which names the profiles that exist, or the file and what is wrong with it.
    """
    if not text.endswith(PROFILE_SUFFIX):
        try:
            return profile(text)
        except ValueError as error:
            raise ValueError(f"{error}; or give a file that ends in {PROFILE_SUFFIX}") from None
    path = Path(text)
    try:
        return _profile_of(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read the timing profile {text}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the timing profile {text} is not TOML: {error}") from error
    except ValueError as error:
        raise ValueError(f"the timing profile {text} is wrong: {error}") from error


def profile_text(timing: TimingProfile) -> str:
    """Return the content of a file that `profile_from` reads; costs are rounded to four digits."""
    values: dict[str, float | int | None] = {
        key: float(f"{getattr(timing, field) * 1e6:.4g}") for key, field in COSTS_US.items()
    }
    values |= {name: getattr(timing, name) for name in _SIZES}
    source = "".join(letter if letter.isprintable() else " " for letter in timing.source)
    lines = [f"source = {json.dumps(source, ensure_ascii=False)}"]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in values.items() if value is not None), ""])


def _profile_of(name: str, values: Mapping[str, Any]) -> TimingProfile:
    """Build a profile from its keys; ValueError says which is missing, unknown, or of another type."""
    for key in _NEEDED_KEYS:
        if key not in values:
            raise ValueError(f"{key} is missing")
    for key, value in values.items():
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}; a profile has: {', '.join(_KEYS)}")
        if not _has_type(key, value):
            words = "text" if key == "source" else "a whole number" if key in _SIZES else "a number"
            raise ValueError(f"{key} must be {words}, not {value!r}")
    fields: dict[str, Any] = {field: values.get(key, 0) / 1e6 for key, field in COSTS_US.items()}
    fields |= {key: values.get(key) for key in _SIZES}
    return TimingProfile(name=name, source=values["source"], **fields)


def _has_type(key: str, value: object) -> bool:
    if key == "source":
        return isinstance(value, str)
    return isinstance(value, int if key in _SIZES else int | float) and not isinstance(value, bool)
