"""How many tokens images, audio and files are to an engine: learned from usage, for each model, kind and size.

A class comes with a first guess. What a turn's usage says beyond its text is shared among its classes in proportion to
what they are expected to be, and each class remembers by how much its guess was wrong.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from thunderagent.programs.learned.histogram import check_range
from thunderagent.programs.model.events import Media

LEARNING_RATIO: Final = 0.25
"""Weight of the newest turn; the first of a class is believed at once."""

LARGEST_FACTOR: Final = 64.0
"""A guess is wrong by no more than that: whoever teaches more speaks of something else."""

CLASSES_COUNT: Final = 1024
"""So many are remembered, the one longest unused forgotten first: clients name their models as they like."""


class MediaSizes:
    """Tokens of media by class."""

    __slots__ = ("_factors",)

    def __init__(self) -> None:
        """Begin by believing the guesses."""
        self._factors: OrderedDict[str, float] = OrderedDict()

    def export(self) -> tuple[tuple[str, float], ...]:
        """Return by how much the guess of each class was wrong."""
        return tuple(self._factors.items())

    def adopt(self, factors: Iterable[tuple[str, float]]) -> None:
        """Know what another one knew. Raises ValueError for what cannot be."""
        kept = deque(factors, maxlen=CLASSES_COUNT)
        for name, factor in kept:
            check_range(name, factor, (1 / LARGEST_FACTOR, LARGEST_FACTOR))
        self._factors = OrderedDict(kept)

    def tokens(self, media: Media) -> int:
        """Return how many tokens all of these are expected to be."""
        return int(sum(tokens * self._factors.get(name, 1.0) for name, tokens in media))

    def learn(self, media: Media, tokens: float) -> None:
        """Take in that all of these were so many tokens."""
        expected_tokens = sum(guess * self._factors.get(name, 1.0) for name, guess in media)
        if expected_tokens <= 0:
            return
        wrong_by = max(0.0, tokens) / expected_tokens
        for name, _ in media:
            before = self._factors.pop(name, None)
            factor = (before or 1.0) * (1.0 + (1.0 if before is None else LEARNING_RATIO) * (wrong_by - 1.0))
            self._factors[name] = min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))
        while len(self._factors) > CLASSES_COUNT:
            self._factors.popitem(last=False)
