"""A move as the controller that a session leaves keeps it: what must happen before its calls and its state go."""

from __future__ import annotations

from dataclasses import dataclass, field

from thunderagent.workflows.core.call import Call


@dataclass(slots=True)
class Move:
    """Steps 1 to 3. Each edge is (a call whose value is needed, the call that needs it)."""

    session: str
    to: str
    calls: list[Call]
    asked: set[tuple[int, int]] = field(default_factory=set)
    """Edges whose producer has not answered."""
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    """Edges whose value has left for here."""

    @property
    def waits_for_values(self) -> bool:
        """Some value is asked for, or on its way."""
        return bool(self.asked or self.in_flight)

    def answer(self, edge: tuple[int, int], *, is_sent: bool) -> None:
        """Take a producer's answer."""
        self.asked.discard(edge)
        if is_sent:
            self.in_flight.add(edge)

    def forget_edge(self, edge: tuple[int, int]) -> None:
        """Wait for a value no more: it is here, or comes from elsewhere."""
        self.asked.discard(edge)
        self.in_flight.discard(edge)

    def forget(self, call: Call) -> None:
        """Take out a call that will not go."""
        self.calls = [each for each in self.calls if each is not call]
        for edges in (self.asked, self.in_flight):
            edges -= {edge for edge in edges if edge[1] == call.call_id}
