"""The prompt of the judge: a file with a place for the task and one for what was done."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from thunderagent.errors import ConfigurationError

TASK, TRANSCRIPT = PLACES = ("{task}", "{transcript}")

DEFAULT_PROMPT = resources.files(__package__).joinpath("prompt.txt").read_text(encoding="utf-8")


def read_prompt(path: Path | None) -> str:
    """Return the prompt in a file, or the default one. Raises `ConfigurationError` if it lacks one of its places."""
    if path is None:
        return DEFAULT_PROMPT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"judge_prompt: cannot read {path}: {error}") from error
    for place in PLACES:
        if text.count(place) != 1:
            raise ConfigurationError(f"judge_prompt: {path} must hold {place} once")
    return text


def filled(prompt: str, task: str, transcript: str) -> str:
    """Put a task and a transcript into their places; what they hold is taken as it is."""
    before, _, after = prompt.partition(TASK)
    if TRANSCRIPT in before:  # the places stand the other way around
        first, _, second = before.partition(TRANSCRIPT)
        return f"{first}{transcript}{second}{task}{after}"
    first, _, second = after.partition(TRANSCRIPT)
    return f"{before}{task}{first}{transcript}{second}"
