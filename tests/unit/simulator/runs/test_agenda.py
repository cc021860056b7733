"""Virtual time goes forward, and ties are broken by the order of entry."""

from __future__ import annotations

from functools import partial
from math import inf

from thunderagent.simulator.runs.agenda import Agenda


def test_entries_happen_in_time_and_then_in_the_order_of_entry() -> None:
    agenda = Agenda()
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((agenda.now_s, name))

    for due_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        agenda.at(due_s, partial(note, name))
    while agenda.next_s < inf:
        agenda.advance()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert len(agenda) == 0


def test_overdue_event_happens_now() -> None:
    agenda = Agenda()
    agenda.at(5.0, lambda: agenda.at(1.0, lambda: None))
    agenda.advance()
    agenda.advance()
    assert agenda.now_s == 5.0
