"""How large turns and programs are: what a turn adds, generates and holds, by role, and what media take.

Images, audio and files
=======================
How many tokens they take in an engine: learned from usage, for each model, kind and size.

A class starts with a first guess. A turn's usage beyond its text is split among its classes in proportion to their
expected sizes, and each class remembers by how much its guess was wrong.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from math import inf
from typing import Final

from thunderagent.programs.learned.histogram import MOST_TOKENS, SLACK, LogHistogram, check_range, geometric_edges
from thunderagent.programs.messages import GrowthRecord, Media, TurnMeansRecord
from thunderagent.programs.state.program import TurnEnded

TOKEN_EDGES: Final = geometric_edges(8.0, 2**0.5, 36)
"""8 tokens to 1.5 million."""

MANY_TOKENS: Final = 512
"""This many prompt tokens take much longer than the overhead of an iteration."""

FEW_TOKENS: Final = 128
"""This many take almost no time beside a generated answer."""

ENOUGH_TURNS_COUNT: Final = 8

ENOUGH_PROGRAMS_COUNT: Final = 5
"""Number of programs to see before what they tell of growth is believed."""

FORGETTING_RATIO: Final = 0.999
"""Weight of a turn relative to that of the next one."""


class Growth:
    """How many tokens a turn adds to its program's context, and how many of them it generates."""

    __slots__ = (
        "_cycle_s",
        "_grown_tokens",
        "_growths",
        "_outputs",
        "_program_count",
        "_turn_count",
        "_whole_tokens",
        "tokens_per_s",
        "whole_tokens",
    )

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._growths = LogHistogram(TOKEN_EDGES)
        self._outputs = LogHistogram(TOKEN_EDGES)
        self._program_count = 0
        self._turn_count = self._whole_tokens = 0.0
        self._grown_tokens = self._cycle_s = 0.0
        self.tokens_per_s = inf
        """How fast a program grows while it is not paused; infinite until some turns were seen."""
        self.whole_tokens = inf
        """By how much a program exceeds its first prompt, mean over its turns; infinite until some ended."""

    def turn_ended(self, ended: TurnEnded) -> None:
        """Learn what a turn added to its program, and in what time, with the tool before it."""
        program, grown_tokens = ended.turn.program, ended.grown_tokens
        cycle_s = ended.duration_s + (program.away_s if program is not None else 0.0)
        if grown_tokens is not None and grown_tokens > 0:
            self._growths.add(grown_tokens)
            self._grown_tokens = self._grown_tokens * FORGETTING_RATIO + grown_tokens
            self._cycle_s = self._cycle_s * FORGETTING_RATIO + cycle_s
            self._say_speed()
        self._outputs.add(ended.output_tokens)

    def program_ended(self, larger_tokens: int, turn_count: int) -> None:
        """Learn from an ended program: by how much it exceeded its first prompt, summed over its turns."""
        self._program_count += 1
        self._turn_count = self._turn_count * FORGETTING_RATIO**turn_count + turn_count
        self._whole_tokens = self._whole_tokens * FORGETTING_RATIO**turn_count + larger_tokens
        if self._program_count >= ENOUGH_PROGRAMS_COUNT and self._turn_count:
            self.whole_tokens = self._whole_tokens / self._turn_count

    def _say_speed(self) -> None:
        if self._growths.total >= ENOUGH_TURNS_COUNT and self._cycle_s > 0:
            self.tokens_per_s = self._grown_tokens / self._cycle_s

    @property
    def is_empty(self) -> bool:
        """Whether no turn was seen."""
        return not self._outputs.total

    def export(self) -> GrowthRecord:
        """Return its content."""
        return GrowthRecord(
            self._growths.export(),
            self._outputs.export(),
            self._program_count,
            self._turn_count,
            self._whole_tokens,
            self._grown_tokens,
            self._cycle_s,
        )

    def adopt(self, record: GrowthRecord) -> None:
        """Adopt another's content. Raises ValueError if it has other edges or impossible values."""
        check_range("programs", record.program_count, (0, inf))
        check_range("turns", record.turn_count, (0.0, inf))
        check_range("whole tokens", record.whole_tokens, (0.0, record.turn_count * MOST_TOKENS))
        check_range("grown tokens", record.grown_tokens, (0.0, inf))
        check_range("cycles", record.cycle_s, (0.0, inf))
        self._growths.adopt(record.growths)
        self._outputs.adopt(record.outputs)
        self._program_count, self._turn_count = record.program_count, record.turn_count
        self._whole_tokens = record.whole_tokens
        self._grown_tokens, self._cycle_s = record.grown_tokens, record.cycle_s
        self._say_speed()
        if record.program_count >= ENOUGH_PROGRAMS_COUNT and record.turn_count:
            self.whole_tokens = record.whole_tokens / record.turn_count

    def turn_tokens(self, ratio: float, default_tokens: int) -> int:
        """Return what a turn adds at most in `ratio` of all cases, prompt and answer."""
        return int(self._growths.quantile(ratio, default_tokens))

    def output_tokens(self, ratio: float, default_tokens: int) -> int:
        """Return how many tokens a turn generates at most in `ratio` of all cases."""
        return int(self._outputs.quantile(ratio, default_tokens))


MAX_ROLES_COUNT: Final = 1024
"""Clients may name a new role with every turn: the role longest not heard of is forgotten first."""

ROLE_FORGETTING_RATIO: Final = 0.99
"""Weight of a turn relative to that of the next one of its role."""


class RoleOutputs:
    """The mean output of each role's turns; for an unknown role, that of all turns."""

    __slots__ = ("_all", "_of_role")

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._all = (0.0, 0.0)
        self._of_role: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of_role)

    def turn_ended(self, ended: TurnEnded) -> None:
        """Learn from a turn. Cost: O(1)."""
        of_role, role, output_tokens = self._of_role, ended.turn.role, ended.output_tokens
        weight, tokens = self._all
        self._all = weight * ROLE_FORGETTING_RATIO + 1.0, tokens * ROLE_FORGETTING_RATIO + output_tokens
        weight, tokens = of_role.get(role, (0.0, 0.0))
        of_role[role] = weight * ROLE_FORGETTING_RATIO + 1.0, tokens * ROLE_FORGETTING_RATIO + output_tokens
        of_role.move_to_end(role)
        if len(of_role) > MAX_ROLES_COUNT:
            of_role.popitem(last=False)

    def export(self) -> tuple[tuple[float, float], tuple[tuple[str, float, float], ...]]:
        """Return weight and tokens of all turns, and of each role."""
        return self._all, tuple((role, *sums) for role, sums in self._of_role.items())

    def adopt(self, all_roles: tuple[float, float], roles: Iterable[tuple[str, float, float]]) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        kept = deque(roles, maxlen=MAX_ROLES_COUNT)
        for weight, tokens in (all_roles, *((weight, tokens) for _, weight, tokens in kept)):
            check_range("turns of a role", weight, (0.0, 1 / (1 - ROLE_FORGETTING_RATIO) + SLACK))
            check_range("tokens of a role", tokens, (0.0, weight * MOST_TOKENS))
        self._all = all_roles
        self._of_role = OrderedDict((role, (weight, tokens)) for role, weight, tokens in kept)

    def expected_tokens(self, role: str) -> int:
        """Return the expected output of a turn of that role: 0 before any turn was seen."""
        weight, tokens = self._of_role.get(role, self._all)
        return round(tokens / weight) if weight else 0


MEANS_LEARNING_RATIO: Final = 0.01
"""Weight of the newest turn, or program, in the means; while few were seen, all weigh the same."""


class TurnMeans:
    """Means over turns, in tokens: what they hold while they run, bring, leave in memory, add, and generate."""

    __slots__ = (
        "count",
        "grown_tokens",
        "held_tokens",
        "left_tokens",
        "new_tokens",
        "output_tokens",
        "program_count",
        "program_turn_count",
    )

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.count = self.program_count = 0
        self.held_tokens = self.new_tokens = self.left_tokens = self.output_tokens = 0.0
        self.grown_tokens = 0.0
        """What a turn adds to the context of its program; a program's first turn adds nothing."""
        self.program_turn_count = 0.0
        """Turns of an ended program."""

    def turn_ended(self, ended: TurnEnded) -> None:
        """Learn from a turn. Its prompt and half of its output are in memory while it runs; all of it is left."""
        self.count += 1
        ratio = max(MEANS_LEARNING_RATIO, 1.0 / self.count)
        self.held_tokens += ratio * (ended.prompt_tokens + ended.output_tokens / 2 - self.held_tokens)
        self.new_tokens += ratio * (ended.prompt_tokens - ended.known_tokens - self.new_tokens)
        self.left_tokens += ratio * (ended.prompt_tokens + ended.output_tokens - self.left_tokens)
        self.output_tokens += ratio * (ended.output_tokens - self.output_tokens)
        self.grown_tokens += ratio * (max(0, ended.grown_tokens or 0) - self.grown_tokens)

    def program_ended(self, turn_count: int) -> None:
        """Learn how many turns an ended program had."""
        self.program_count += 1
        self.program_turn_count += max(MEANS_LEARNING_RATIO, 1.0 / self.program_count) * (
            turn_count - self.program_turn_count
        )

    @property
    def goes_on_ratio(self) -> float:
        """Part of all turns that are not their program's last; 1 until a program ended."""
        return 1.0 - 1.0 / self.program_turn_count if self.program_turn_count else 1.0

    def export(self) -> TurnMeansRecord:
        """Return its content."""
        return TurnMeansRecord(
            self.count,
            self.held_tokens,
            self.new_tokens,
            self.left_tokens,
            self.output_tokens,
            self.program_count,
            self.program_turn_count,
            self.grown_tokens,
        )

    def adopt(self, record: TurnMeansRecord) -> None:
        """Adopt another's content. Raises ValueError for impossible values."""
        for count in (record.count, record.program_count):
            check_range("count", count, (0, inf))
        tokens = (record.held_tokens, record.new_tokens, record.left_tokens, record.output_tokens, record.grown_tokens)
        for each in tokens:
            check_range("tokens of turns", each, (0.0, MOST_TOKENS))
        least_count = 1.0 if record.program_count or record.program_turn_count else 0.0
        check_range("turns of programs", record.program_turn_count, (least_count, inf))
        self.count, self.held_tokens, self.new_tokens = record.count, record.held_tokens, record.new_tokens
        self.left_tokens, self.output_tokens = record.left_tokens, record.output_tokens
        self.grown_tokens = record.grown_tokens
        self.program_count, self.program_turn_count = record.program_count, record.program_turn_count


MEDIA_LEARNING_RATIO: Final = 0.25
"""Weight of the newest turn; the first of a class is believed at once."""

LARGEST_FACTOR: Final = 64.0
"""The largest factor by which a guess can be wrong: anything beyond is not about media."""

CLASSES_COUNT: Final = 1024
"""How many classes are remembered; the one longest unused is forgotten first, since clients name models freely."""


class MediaSizes:
    """Tokens of media by class."""

    __slots__ = ("_factors",)

    def __init__(self) -> None:
        """Start by believing the guesses."""
        self._factors: OrderedDict[str, float] = OrderedDict()

    def export(self) -> tuple[tuple[str, float], ...]:
        """Return by how much each class's guess was wrong."""
        return tuple(self._factors.items())

    def adopt(self, factors: Iterable[tuple[str, float]]) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        kept = deque(factors, maxlen=CLASSES_COUNT)
        for name, factor in kept:
            check_range(name, factor, (1 / LARGEST_FACTOR, LARGEST_FACTOR))
        self._factors = OrderedDict(kept)

    def tokens(self, media: Media) -> int:
        """Return the expected tokens of all of these."""
        return int(sum(tokens * self._factors.get(name, 1.0) for name, tokens in media))

    def learn(self, media: Media, tokens: float) -> None:
        """Learn that all of these together took this many tokens."""
        expected_tokens = sum(guess * self._factors.get(name, 1.0) for name, guess in media)
        if expected_tokens <= 0:
            return
        wrong_by = max(0.0, tokens) / expected_tokens
        for name, _ in media:
            before = self._factors.pop(name, None)
            factor = (before or 1.0) * (1.0 + (1.0 if before is None else MEDIA_LEARNING_RATIO) * (wrong_by - 1.0))
            self._factors[name] = min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))
        while len(self._factors) > CLASSES_COUNT:
            self._factors.popitem(last=False)
