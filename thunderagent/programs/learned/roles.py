"""How much each role of agents generates per turn, as learned."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from thunderagent.programs.learned.histogram import MOST_TOKENS, SLACK, check_range
from thunderagent.programs.model.turn import TurnEnded

MAX_ROLES_COUNT: Final = 1024
"""Clients may name a new role with every turn: the role longest not heard of is forgotten first."""

FORGETTING_RATIO: Final = 0.99
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
        self._all = weight * FORGETTING_RATIO + 1.0, tokens * FORGETTING_RATIO + output_tokens
        weight, tokens = of_role.get(role, (0.0, 0.0))
        of_role[role] = weight * FORGETTING_RATIO + 1.0, tokens * FORGETTING_RATIO + output_tokens
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
            check_range("turns of a role", weight, (0.0, 1 / (1 - FORGETTING_RATIO) + SLACK))
            check_range("tokens of a role", tokens, (0.0, weight * MOST_TOKENS))
        self._all = all_roles
        self._of_role = OrderedDict((role, (weight, tokens)) for role, weight, tokens in kept)

    def expected_tokens(self, role: str) -> int:
        """Return the expected output of a turn of that role: 0 before any turn was seen."""
        weight, tokens = self._of_role.get(role, self._all)
        return round(tokens / weight) if weight else 0
