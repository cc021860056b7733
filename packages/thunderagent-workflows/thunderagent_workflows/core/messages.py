"""Messages between origins, controllers and the directory, and instructions to their executors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thunderagent_workflows.core.call import Call, Outcome, Record

# --- to an origin


@dataclass(slots=True)
class Create:
    """Make the call of a new record, which names the values it takes."""

    record: Record


@dataclass(slots=True)
class Result:
    """A call's result, for a call that needs it; `for_id` 0 is its origin."""

    call_id: int
    for_id: int
    outcome: Outcome


@dataclass(slots=True)
class ExecutorChanged:
    """A call moves to another instance: step 4 of a move."""

    call_id: int
    to: str
    moves_count: int


@dataclass(slots=True)
class Arrived:
    """Calls have arrived at another instance; each with the number of its move."""

    at: str
    calls: list[tuple[int, int]]


@dataclass(slots=True)
class Bounced:
    """A call cannot run at the location that it was sent to: choose another."""

    call_id: int
    location: str


@dataclass(slots=True)
class Home:
    """A session's home among an agent's instances."""

    session: str
    agent: str
    location: str
    version: int
    born_version: int


@dataclass(slots=True)
class HomeLost:
    """A session's home is gone with its state: no call of it can go on at this agent before the session has ended."""

    session: str
    agent: str
    location: str


@dataclass(slots=True)
class Joined:
    """An agent has one more instance."""

    location: str


@dataclass(slots=True)
class Leaving:
    """An instance takes no new calls."""

    location: str


@dataclass(slots=True)
class Gone:
    """All at a location is lost; to all machines. `is_clean` says that nothing was there any more."""

    location: str
    is_clean: bool = False
    why: str = ""
    """The executor's reason for its end."""


@dataclass(slots=True)
class SetRoute:
    """Send an agent's calls, or those of one session, to some instances by weight. No weights: the default."""

    agent: str
    session: str
    weights: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class SessionEnded:
    """Nothing of a session is needed any more; to all machines."""

    session: str


# --- to the directory


@dataclass(slots=True)
class AskHome:
    """Ask for the home of a session of a pinned agent; `hint` is the asker's preference."""

    session: str
    agent: str
    asker: str
    hint: str


@dataclass(slots=True)
class HomeMoved:
    """A session has moved: step 4 of a move."""

    session: str
    agent: str
    sender: str
    to: str
    version: int


@dataclass(slots=True)
class HomeArrived:
    """A session's state has come to its new home."""

    session: str
    agent: str
    location: str
    version: int


@dataclass(slots=True)
class Expected:
    """A call came to a location with a version of its session's home that is not there yet: reply if it is over."""

    session: str
    agent: str
    location: str
    version: int


# --- to a controller


@dataclass(slots=True)
class HomeOver:
    """No version of a session's home up to this one will come any more: the session ended, or its state is lost."""

    session: str
    version: int


@dataclass(slots=True)
class Adopt:
    """Become a session's home without its state if that has not come: its sender is lost."""

    session: str
    version: int


@dataclass(slots=True)
class Submit:
    """Run a call."""

    call: Call


@dataclass(slots=True)
class Subscribe:
    """Push a call's value to a consumer, for its call `for_id`; `origin` knows if the producer does not."""

    call_id: int
    origin: str
    consumer: str
    for_id: int


@dataclass(slots=True)
class Retarget:
    """Push a call's value to another consumer, if it has not left: step 2 of a move."""

    call_id: int
    origin: str
    consumer: str
    to: str
    for_id: int


@dataclass(slots=True)
class Retargeted:
    """Whether it had left: step 3 of a move."""

    call_id: int
    for_id: int
    is_sent: bool


@dataclass(slots=True)
class Migrate:
    """Move a session to another instance: step 1 of a move."""

    session: str
    to: str


@dataclass(slots=True)
class Transfer:
    """A session's state and calls: step 5 of a move."""

    transfer_id: int
    session: str
    sender: str
    to: str
    version: int
    state: Any
    priority: float
    calls: list[Call]
    subscribers: dict[int, list[tuple[str, int]]]
    """Who gets the values of these calls."""


@dataclass(slots=True)
class Activated:
    """The session goes on at its new place: step 6 of a move."""

    transfer_id: int


@dataclass(slots=True)
class SetPriorities:
    """Order sessions' calls before those of lower priority; 0 is the default."""

    priorities: dict[str, float]


@dataclass(slots=True)
class Retire:
    """Give all waiting calls to other instances, and end after the rest."""

    others: tuple[str, ...]


@dataclass(slots=True)
class Finished:
    """The instance has run a call."""

    call_id: int
    outcome: Outcome


@dataclass(slots=True)
class Interrupted:
    """The instance has stopped a call, which can restart from its checkpoint."""

    call_id: int
    checkpoint: Any


# --- what a machine wants done


@dataclass(slots=True)
class Send:
    """Carry a message to a machine."""

    to: str
    message: Any


@dataclass(slots=True)
class Run:
    """Run these calls on the instance: one, or a batch of one method."""

    calls: list[Call]


@dataclass(slots=True)
class Interrupt:
    """Stop these calls on the instance: each is answered by `Interrupted`, or earlier by `Finished`."""

    calls: list[Call]


@dataclass(slots=True)
class Settled:
    """A record has its outcome."""

    record: Record


@dataclass(slots=True)
class Moved:
    """A session has left, with this many calls; `why_not` is the reason if it did not."""

    session: str
    to: str
    calls_count: int
    why_not: str = ""


@dataclass(slots=True)
class Stays:
    """The instance was to retire and cannot: sessions are here that may not leave, or have nowhere to go."""


@dataclass(slots=True)
class Ended:
    """The instance has nothing left to do, and was to retire."""
