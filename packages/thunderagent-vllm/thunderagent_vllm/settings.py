"""The settings: `--additional-config '{"thunderagent": {...}}'`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

log = logging.getLogger("vllm.thunderagent")

HOLD_MOST_S = 600.0
"""No pin lasts longer without a new word."""


@dataclass(frozen=True)
class Settings:
    """How the scheduler decides. Unknown keys and bad values are logged, and their defaults apply."""

    mode: str = "on"
    """`on`; `watch`: count only; `off`; `force`: on, whatever vLLM's version."""
    order: bool = True
    """Order requests by level and program; otherwise as vLLM does."""
    program_order: bool = True
    """Of one level, held programs wait first, then the oldest; before all, who has starved; and a prompt leaves tokens
    of an iteration for a better level that waits. Otherwise by level, then arrival."""
    quanta: bool = False
    """Bound a prompt's tokens in an iteration by its level."""
    shrink: bool = True
    """Halve a prompt's chunk until it fits the free blocks."""
    shrink_floor: float = 0.125
    """Part of a chunk below which it is not shrunk; 0: down to one block."""
    promote_s: float = 30.0
    """Seconds without service that are worth a level."""
    starve_s: float = 120.0
    """A request that waited this long goes first, and may take anybody's pin."""
    starve_rounds: float = 2.25
    """The same after as many rounds: one is the time in which each program that is here gets a turn. 0: not."""
    room_turns: float = 2.0
    """A program that begins leaves room for as many turns of those that are here. 0: none."""
    pin_share: float = 0.9
    """Most of the pool that pins may hold."""
    hold_s: float = 30.0
    """How long a pin lasts if nobody says; 0: no pins without a hint."""
    stale_s: float = 5.0
    """A program that is gone for this long loses its pin to anybody who needs the room, unless a hold was asked for."""
    stale_gaps: float = 3.0
    """The same after so many times the mean of how long programs are gone that come back. 0: not."""
    largest_first: bool = False
    """Which pins go first: the largest, instead of those of the youngest programs."""
    level_count: int = 4
    """Levels."""
    first_level_tokens: int = 2048
    """The first level ends here; each further one is four times as large."""
    window_s: float = 30.0
    """Time constant in which service is forgotten."""
    served_ratio: float = 4.0
    """Divides a program's service before it counts for its level."""


MARS = {
    "program_order": False,
    "quanta": True,
    "shrink_floor": 0.0,
    "largest_first": True,
    "room_turns": 0.0,
    "starve_rounds": 0.0,
    "stale_gaps": 0.0,
    "stale_s": HOLD_MOST_S,
}
"""The preset `mars`: what the paper says, without this project's own choices."""

_MODES = ("on", "watch", "off", "force")


def read_settings(given: object) -> Settings:
    """Return the settings in what `--additional-config` has under `thunderagent`; never raise."""
    if not isinstance(given, Mapping):
        if given is not None:
            log.warning("thunderagent: the settings must be an object; the defaults apply")
        return Settings()
    values = dict(given)
    preset = values.pop("preset", None)
    if preset not in (None, "mars"):
        log.warning("thunderagent: there is no preset %r; the defaults apply", preset)
    settings = replace(Settings(), **MARS) if preset == "mars" else Settings()  # type: ignore[arg-type]
    known = {each.name: getattr(Settings, each.name) for each in fields(Settings)}
    for name, value in values.items():
        if name not in known or not _is_valid(name, value, known[name]):
            log.warning("thunderagent: %s=%r is not a setting; it is ignored", name, value)
            continue
        settings = replace(settings, **{name: type(known[name])(value)})
    return settings


_LEAST: Mapping[str, float] = {"promote_s": 0.001, "window_s": 0.001, "served_ratio": 0.001}
_MOST: Mapping[str, float] = {"pin_share": 0.95, "shrink_floor": 1.0, "hold_s": HOLD_MOST_S, "level_count": 16}


def _is_valid(name: str, value: Any, default: object) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, str):
        return value in _MODES
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    if isinstance(default, int):
        return value >= 1 and value == int(value) and value <= _MOST.get(name, 1 << 40)
    return _LEAST.get(name, 0.0) <= value <= _MOST.get(name, 1e9)
