"""The lifecycle table, arrow by arrow."""

from __future__ import annotations

from itertools import product

import pytest
from thunderagent.programs.lifecycle import (
    ACTIVE_ACTING,
    ACTIVE_REASONING,
    PAUSED_ACTING,
    PAUSED_REASONING,
    TERMINATED,
    TRANSITIONS,
    State,
    Trigger,
)

from thunderagent.errors import LifecycleError
from thunderagent.programs.model.places import Phase, Status
from thunderagent.programs.model.program import Program

STATES = list(product(Status, Phase))

# Written out a second time, on purpose: a change of the table must be meant.
LEGAL = {
    PAUSED_ACTING: {"turn_arrived": PAUSED_REASONING, "restore": ACTIVE_ACTING, "release": TERMINATED},
    PAUSED_REASONING: {
        "turn_arrived": PAUSED_REASONING,
        "turns_ended": PAUSED_ACTING,
        "restore": ACTIVE_REASONING,
        "release": TERMINATED,
    },
    ACTIVE_ACTING: {
        "turn_arrived": ACTIVE_REASONING,
        "pause": PAUSED_ACTING,
        "replica_lost": PAUSED_ACTING,
        "release": TERMINATED,
    },
    ACTIVE_REASONING: {
        "turn_arrived": ACTIVE_REASONING,
        "turns_ended": ACTIVE_ACTING,
        "pause": PAUSED_REASONING,
        "mark": ACTIVE_REASONING,
        "unmark": ACTIVE_REASONING,
        "replica_lost": PAUSED_ACTING,
        "release": TERMINATED,
    },
}


@pytest.mark.parametrize(("state", "trigger"), list(product(STATES, Trigger)))
def test_every_pair_leads_where_the_table_says_or_raises(state: State, trigger: Trigger) -> None:
    """All 48 pairs of state and trigger: an arrow of the table, or a LifecycleError with the story."""
    expected = LEGAL.get(state, {}).get(trigger)
    program = Program("a", generation=1, opened_s=0.0)
    program.status, program.phase = state
    if expected is not None:
        program.advance(trigger)
        assert (program.status, program.phase) == expected
        return
    program.note(0.0, "once", "upon a time", None)
    with pytest.raises(LifecycleError, match=f"(?s){state[0]} and {state[1]} knows no {trigger}\n.*upon a time"):
        program.advance(trigger)


def test_the_table_has_no_arrow_that_is_not_listed_here() -> None:
    """An arrow that is added to the table is added here."""
    assert sum(len(arrows) for arrows in LEGAL.values()) == len(TRANSITIONS)


def test_nothing_leads_out_of_terminated() -> None:
    """An id that comes back is a new program."""
    assert [trigger for (state, trigger) in TRANSITIONS if state[0] is Status.TERMINATED] == []


def test_a_program_that_is_driven_wrongly_tells_its_story() -> None:
    """The error of an illegal step names the program, what happened to it and why; the program stays as it was."""
    program = Program("agent-7", generation=3, opened_s=1.0)
    program.note(1.5, "hold", "no_room", None)
    with pytest.raises(LifecycleError, match=r"(?s)knows no mark.*'agent-7' generation 3.*hold.*no_room"):
        program.advance(Trigger.MARK)
    assert (program.status, program.phase) == PAUSED_ACTING
