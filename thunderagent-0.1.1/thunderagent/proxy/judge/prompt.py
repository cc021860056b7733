"""The judge's prompt: a file with placeholders for the task, the transcript, and the program's progress."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from thunderagent.errors import ConfigurationError

NEEDED = ("{task}", "{transcript}")
OPTIONAL = ("{step}", "{round}", "{budget}")
"""Turns of the whole program, answers of its first agent, and how many of these it has at most, if that is known."""

_PLACES = re.compile("|".join(map(re.escape, (*NEEDED, *OPTIONAL))))

DEFAULT_PROMPT = resources.files(__package__).joinpath("prompt.txt").read_text(encoding="utf-8")


def read_prompt(path: Path | None) -> str:
    """Return the prompt in a file, or the default one. Raises `ConfigurationError` if a placeholder is missing."""
    if path is None:
        return DEFAULT_PROMPT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"judge_prompt: cannot read {path}: {error}") from error
    for place in NEEDED:
        if text.count(place) != 1:
            raise ConfigurationError(f"judge_prompt: {path} must hold {place} once")
    return text


def filled(
    prompt: str, task: str, transcript: str, step_count: int, round_count: int, round_limit_count: int = 0
) -> str:
    """Fill in a task, a transcript and the program's progress, all verbatim; a limit of 0 is not known."""
    budget = f" of at most {round_limit_count}" if round_limit_count else ""
    said = (task, transcript, str(step_count), str(round_count), budget)
    values = dict(zip((*NEEDED, *OPTIONAL), said, strict=True))
    return _PLACES.sub(lambda place: values[place[0]], prompt)
