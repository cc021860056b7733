"""The life of a program as a table.

Theory of operation
===================
A program has a *status* - does it hold a claim on a replica's memory? - and a *phase* - is a turn of it with us?

                      turn arrives                      turn arrives
       (PAUSED, ACTING) ───────▶ (PAUSED, REASONING)       ╭──╮        PAUSED REASONING: its turns are held.
          │  ▲  ▲  ◀───────────────  │                     │  ▼        PAUSED ACTING:    its tool runs, or it is new.
  restore │  │  │    turns ended     │ restore        (ACTIVE, REASONING)  ACTIVE REASONING: a turn is in flight.
          ▼  │  ╰───────────╮        ╰────────────────▶    │  ▲        ACTIVE ACTING:    its tool runs, memory is kept.
     (ACTIVE, ACTING) ◀─────┼──────── turns ended ─────────╯  │
          │  │ pause        ╰───────── replica lost ──────────┤
          │  ╰──▶ (PAUSED, ACTING)                            │
          ╰──────────────── turn arrives ─────────────────────╯

Three rules keep the table this small:

- A program that is ACTIVE has all its turns in flight, a program that is PAUSED has all its turns held. A restore
  grants every held turn at once; a turn that arrives for an ACTIVE program is granted at once. So a branch that
  another branch waits for is never stuck behind it. There are two exceptions, in which turns of an ACTIVE program are
  held where it is: it leaves, as below; or nothing is granted on its replica (its engine is paused, sleeps, gets new
  weights), and they are granted there when grants go on.
- A program with a turn in flight is never paused. It is *marked*: it *leaves*. Turns that come are held until its last
  turn in flight ends, and then it moves or pauses with all of them; else one whose branches overlap would stay for
  ever. The mark is a flag on (ACTIVE, REASONING), not a status. It has causes (`Program.leaves_for`), and is taken back
  when the last of them is over: then what was held is granted where it is. (A program whose turns are all held where
  it is may be paused: they stay held, and it waits in the queue.)
- When a replica is lost, so are the turns in flight on it: they no longer count for the program. Whoever carries
  them out sees them fail and lets them arrive again.

A release leads to TERMINATED from everywhere, and from TERMINATED nothing leads anywhere: an id that comes back is
a new program with a new generation. A pair (state, trigger) that is not in the table is a bug of ours and raises.
"""

from __future__ import annotations

from enum import StrEnum

from thunderagent.errors import LifecycleError


class Status(StrEnum):
    """Whether a program holds a claim on a replica's memory."""

    ACTIVE = "active"
    PAUSED = "paused"
    TERMINATED = "terminated"


class Phase(StrEnum):
    """Whether a turn of the program is in flight or waiting (REASONING), or its tool runs (ACTING)."""

    REASONING = "reasoning"
    ACTING = "acting"


class Trigger(StrEnum):
    """What moves a program from one state to the next."""

    TURN_ARRIVED = "turn_arrived"
    TURNS_ENDED = "turns_ended"
    PAUSE = "pause"
    RESTORE = "restore"
    MARK = "mark"
    UNMARK = "unmark"
    REPLICA_LOST = "replica_lost"
    RELEASE = "release"


State = tuple[Status, Phase]

PAUSED_ACTING: State = (Status.PAUSED, Phase.ACTING)
PAUSED_REASONING: State = (Status.PAUSED, Phase.REASONING)
ACTIVE_ACTING: State = (Status.ACTIVE, Phase.ACTING)
ACTIVE_REASONING: State = (Status.ACTIVE, Phase.REASONING)
TERMINATED: State = (Status.TERMINATED, Phase.ACTING)

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (PAUSED_ACTING, Trigger.TURN_ARRIVED): PAUSED_REASONING,
    (PAUSED_ACTING, Trigger.RESTORE): ACTIVE_ACTING,
    (PAUSED_ACTING, Trigger.RELEASE): TERMINATED,
    (PAUSED_REASONING, Trigger.TURN_ARRIVED): PAUSED_REASONING,
    (PAUSED_REASONING, Trigger.TURNS_ENDED): PAUSED_ACTING,
    (PAUSED_REASONING, Trigger.RESTORE): ACTIVE_REASONING,
    (PAUSED_REASONING, Trigger.RELEASE): TERMINATED,
    (ACTIVE_ACTING, Trigger.TURN_ARRIVED): ACTIVE_REASONING,
    (ACTIVE_ACTING, Trigger.PAUSE): PAUSED_ACTING,
    (ACTIVE_ACTING, Trigger.REPLICA_LOST): PAUSED_ACTING,
    (ACTIVE_ACTING, Trigger.RELEASE): TERMINATED,
    (ACTIVE_REASONING, Trigger.TURN_ARRIVED): ACTIVE_REASONING,
    (ACTIVE_REASONING, Trigger.TURNS_ENDED): ACTIVE_ACTING,
    (ACTIVE_REASONING, Trigger.PAUSE): PAUSED_REASONING,
    (ACTIVE_REASONING, Trigger.MARK): ACTIVE_REASONING,
    (ACTIVE_REASONING, Trigger.UNMARK): ACTIVE_REASONING,
    (ACTIVE_REASONING, Trigger.REPLICA_LOST): PAUSED_ACTING,
    (ACTIVE_REASONING, Trigger.RELEASE): TERMINATED,
}


def no_transition(state: State, trigger: Trigger, story: str) -> LifecycleError:
    """Return the error that tells of a pair that is not in the table, with the program's `story`."""
    status, phase = state
    return LifecycleError(f"a program that is {status} and {phase} knows no {trigger}\n{story}")
