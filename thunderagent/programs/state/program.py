"""A program: one run of an agent, its turns and branches, where it stands, and what others advise on it.

Where a program stands: its life as one table
=============================================
A program is in exactly one place, and its place says the rest: its *status* - does it hold a claim on a replica's
memory? -, its *phase* - is a turn of it with us? -, and whether it is admitted.

| Place | Status, phase | Who is there |
|---|---|---|
| away | paused, acting | its tool runs; it gave its claim up at the idle limit, was only announced, must be admitted \
first, or is to go to a certain replica: only its next turn brings it back |
| resting | paused, acting | its tool runs; it may be restored ahead of its turn |
| unadmitted | paused, reasoning | it has a turn, and an admission has not let it begin |
| waiting | paused, reasoning | it has a turn and waits for room, anywhere or on the replica of its route |
| asking | either, reasoning | its turn arrived, and the policy is asked: nobody is there between two events, and \
who is claims nothing |
| working | active, reasoning | it has turns in flight |
| leaving | active, reasoning | it has turns in flight, and pauses or moves when they end; turns that come are held |
| stalled | active, reasoning | turns of it are held where it is, because its replica grants nothing now |
| acting | active, acting | its tool runs, and it holds its claim |
| ended | terminated | it was released: an id that comes back is a new program with a new generation |

So an active program has all its turns in flight, and a paused program has all its turns held: a branch that another one
waits for is never stuck behind it. In two places turns of an active program are held in place: leaving, because a
program whose branches overlap would otherwise stay for ever, and stalled. A program with a turn in flight is never
paused: it leaves. When a replica is lost, so are the turns in flight there: they no longer count for the program, and
their carrier sees them fail and lets them arrive again.

A move that is not in `ALLOWED` is a bug and raises.

Verdicts of judges
==================
A judge's opinion of a program, as a level, and how often it was right.

A judge reads a program's task and what it did so far. It says whether the program will succeed, and how sure it is
(`ProgramJudged`). Where a judge comes from, and when it is asked, does not matter to the core.

Verdicts are ordered by the turns that they are about, whenever they arrive. With F the number of failures among all of
them, the level is that of the first row that holds:

| Verdicts | Level |
|---|---|
| F > K_fail (`fail_count`) | lowest |
| the last two are failures | low |
| the last is a failure | medium |
| the last is none | high |

So one success makes the level high again, until F passes K_fail: from then on it is always the lowest.

A predicted failure counts only if its judge is at least as sure as `least_confidence_ratio`; with 0 each counts. A
level, and so a program's rank, changes only when a verdict arrives.

How often a judge was right is only known of programs whose clients report the outcome (`ProgramReleased`).
`JudgeRecord` keeps for each outcome after how many turns failure was first predicted. Of failed programs, the part
predicted by then is the recall; of successful ones it is the ratio of false alarms.

Source: the levels and K_fail = 10, for a verdict at each step, are those of ORBIT-JUDGE ("ORBIT: Efficient Agentic
Inference using Priority Scheduling", 3.2.3 and 4.1.4). How sure a judge must be, and what ends a program, is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf
from typing import Any, Final, NamedTuple

from thunderagent.errors import LifecycleError
from thunderagent.programs.messages import Media, ProgramLimits, Reason, Scope, Targets, TurnVerdict


class Status(StrEnum):
    """Whether a program holds a claim on a replica's memory."""

    ACTIVE = "active"
    PAUSED = "paused"
    TERMINATED = "terminated"


class Phase(StrEnum):
    """Whether a turn of the program is in flight or waiting (REASONING), or its tool runs (ACTING)."""

    REASONING = "reasoning"
    ACTING = "acting"


class Kind(StrEnum):
    """The kinds of places."""

    AWAY = "away"
    RESTING = "resting"
    UNADMITTED = "unadmitted"
    WAITING = "waiting"
    ASKING = "asking"
    WORKING = "working"
    LEAVING = "leaving"
    STALLED = "stalled"
    ACTING = "acting"
    ENDED = "ended"


# What each turn asks for: looking up a member of an enum costs more than a call.
ACTING: Final = Kind.ACTING

LEAVING: Final = Kind.LEAVING

REASONING: Final = Phase.REASONING

_PAUSED: Final = frozenset({Kind.AWAY, Kind.RESTING, Kind.WAITING})

ALLOWED: dict[Kind, frozenset[Kind]] = {
    Kind.AWAY: frozenset({Kind.AWAY, Kind.RESTING, Kind.UNADMITTED, Kind.ASKING, Kind.ACTING, Kind.ENDED}),
    Kind.RESTING: frozenset({Kind.AWAY, Kind.ASKING, Kind.ACTING, Kind.ENDED}),
    Kind.UNADMITTED: frozenset({Kind.AWAY, Kind.WAITING, Kind.ASKING, Kind.WORKING, Kind.ENDED}),
    Kind.WAITING: _PAUSED | {Kind.UNADMITTED, Kind.WORKING, Kind.ENDED},
    Kind.ASKING: frozenset({Kind.ASKING, Kind.WAITING, Kind.WORKING, Kind.ENDED}),
    Kind.WORKING: _PAUSED | {Kind.ACTING, Kind.LEAVING, Kind.STALLED, Kind.ENDED},
    Kind.LEAVING: _PAUSED | {Kind.WORKING, Kind.STALLED, Kind.ENDED},
    Kind.STALLED: _PAUSED | {Kind.ACTING, Kind.ASKING, Kind.WORKING, Kind.LEAVING, Kind.ENDED},
    Kind.ACTING: frozenset({Kind.AWAY, Kind.RESTING, Kind.ASKING, Kind.WORKING, Kind.STALLED, Kind.ENDED}),
    Kind.ENDED: frozenset(),
}

_ON_A_REPLICA: Final = frozenset({Kind.ASKING, Kind.WORKING, Kind.LEAVING, Kind.STALLED, Kind.ACTING})

_WITHOUT_TURNS: Final = frozenset({Kind.AWAY, Kind.RESTING, Kind.ACTING, Kind.ENDED})


class Place:
    """One place: its programs are counted, and their actual or possible claims are summed."""

    __slots__ = (
        "active",
        "admitted",
        "allowed",
        "claims",
        "count",
        "kind",
        "phase",
        "replica_id",
        "status",
        "tokens",
    )

    def __init__(self, kind: Kind, replica_id: str | None = None, *, admitted: bool = True) -> None:
        """Create an empty place, of one replica or of all."""
        self.kind = kind
        self.allowed = ALLOWED[kind]
        """Places to which its programs may move."""
        self.replica_id = replica_id
        self.active = replica_id is not None and kind in _ON_A_REPLICA
        self.claims = self.active and kind is not Kind.ASKING
        """Whether its programs claim memory of the replica."""
        self.status = Status.ACTIVE if self.active else Status.TERMINATED if kind is Kind.ENDED else Status.PAUSED
        self.phase = Phase.ACTING if kind in _WITHOUT_TURNS else Phase.REASONING
        self.admitted = admitted
        self.count = 0
        self.tokens = 0

    def __repr__(self) -> str:
        where = f" at {self.replica_id}" if self.replica_id is not None else ""
        return f"<{self.kind}{where}: {self.count} programs, {self.tokens} tokens>"

    def enter(self, program: Program, now_s: float) -> None:  # noqa: ARG002 - for places whose sums fade with time
        """Add a program. Only for the book, as are the next two."""
        self.count += 1
        self.tokens += program.claim_tokens

    def enter_all(self, programs: Sequence[Program], now_s: float) -> None:  # noqa: ARG002
        """Add several programs, in their order."""
        self.count += len(programs)
        self.tokens += sum([program.claim_tokens for program in programs])

    def leave(self, program: Program, now_s: float) -> None:  # noqa: ARG002
        """Remove a program."""
        self.count -= 1
        self.tokens -= program.claim_tokens

    def resize(self, program: Program, claim_tokens: int, growth_tokens: int, now_s: float) -> None:  # noqa: ARG002
        """Record that a program's size changed from these values."""
        self.tokens += program.claim_tokens - claim_tokens

    def rank(self, program: Program) -> None:
        """Move a program to the position of its rank."""


def not_allowed(program: Program, kind: Kind) -> LifecycleError:
    """Return the error for a move that is not in the table, with the program's story."""
    story = "\n".join(map(str, (program, *program.story())))
    return LifecycleError(f"a program that is {program.place.kind} cannot become {kind}\n{story}")


class Level(IntEnum):
    """A program's prospects; the lower, the sooner it is served."""

    HIGH = 0
    MEDIUM = 1
    LOW = 2
    LOWEST = 3


class JudgeVerdict(NamedTuple):
    """One answer of a judge: what it says after `turn_count` turns of the program."""

    turn_count: int
    will_succeed: bool
    confidence_ratio: float


class Verdicts:
    """The last two verdicts on a program, and the number of failures among all."""

    __slots__ = ("_failures", "failure_count", "first_failure_turn_count", "last", "level")

    def __init__(self) -> None:
        """Start without verdicts."""
        self.last: tuple[JudgeVerdict, ...] = ()
        """Two at most, the one on fewer turns first."""
        self._failures: tuple[bool, ...] = ()
        self.level: Level | None = None
        """None before the first verdict."""
        self.failure_count = 0
        """F: failures among all verdicts so far."""
        self.first_failure_turn_count: int | None = None
        """The fewest turns after which a failure was predicted."""

    def add(self, verdict: JudgeVerdict, *, fail_count: int, least_confidence_ratio: float) -> bool:
        """Add a verdict at the position of its turn; return False if it is late and changes no level."""
        is_failure = not verdict.will_succeed and verdict.confidence_ratio >= least_confidence_ratio
        place = sum(each.turn_count <= verdict.turn_count for each in self.last)
        is_newest, level_before = place == len(self.last), self.level
        self.last = (*self.last[:place], verdict, *self.last[place:])[-2:]
        self._failures = (*self._failures[:place], is_failure, *self._failures[place:])[-2:]
        if is_failure:
            self.failure_count += 1
            first_turn_count = self.first_failure_turn_count
            if first_turn_count is None or verdict.turn_count < first_turn_count:
                self.first_failure_turn_count = verdict.turn_count
        if self.failure_count > fail_count:
            self.level = Level.LOWEST
        elif not self._failures[-1]:
            self.level = Level.HIGH
        else:
            self.level = Level.LOW if self._failures == (True, True) else Level.MEDIUM
        return is_newest or self.level is not level_before


class Hint:
    """A client's newest hint on when its program's next turn comes.

    `given_s` is when it began to count. It is None while a turn of the program is here: the hint counts from the end of
    the last one. The first hint that counts between two turns is measured by the turn that comes; later ones are not.
    """

    __slots__ = ("confidence_ratio", "given_s", "keep", "measured", "next_turn_in_s", "own_until_s", "since_s")

    def __init__(self, next_turn_in_s: float | None, confidence_ratio: float, keep: str) -> None:
        """Create a client's hint that does not count yet."""
        self.next_turn_in_s = next_turn_in_s
        self.confidence_ratio = confidence_ratio
        self.keep = keep
        self.given_s: float | None = None
        self.since_s = 0.0
        """When the first hint that counted between these two turns was given."""
        self.own_until_s = 0.0
        """Until when the policy itself would hold."""
        self.measured: tuple[float, float, float] | None = None
        """Of the first: when it was given, and the seconds from then within which the turn is expected."""

    @property
    def words(self) -> str:
        """Describe it for a story."""
        if self.next_turn_in_s is None:
            return self.keep
        keep = f", {self.keep}" if self.keep else ""
        return f"next turn in {self.next_turn_in_s:.1f} s{keep}, by {self.confidence_ratio:.2f}"


class Route:
    """Weighted replicas, and the order in which they get programs: evenly mixed, as the weights say.

    A model's route leads to the replicas that serve it, and nowhere else.
    """

    __slots__ = ("_credits", "programs", "targets")

    def __init__(self, targets: Targets) -> None:
        """Create a route that was not used yet."""
        self.targets = targets
        self.programs: dict[Program, None] = {}
        """Programs whose narrowest route it is."""
        self._credits = dict.fromkeys((replica_id for replica_id, _ in targets), 0.0)

    def lead_to(self, replica_ids: tuple[str, ...]) -> None:
        """Lead to these replicas with equal weight from now on."""
        self.targets = tuple((replica_id, 1.0) for replica_id in replica_ids)
        self._credits = dict.fromkeys(replica_ids, 0.0)

    def __repr__(self) -> str:
        return f"<Route to {', '.join(f'{replica_id} ({weight:g})' for replica_id, weight in self.targets)}>"

    def next(self, is_open: Callable[[str], bool]) -> str | None:
        """Return the next open replica; None if none is open.

        Each gains its weight, and the richest is taken and pays the sum: nobody is ever far from its share.
        """
        targets = [(replica_id, weight) for replica_id, weight in self.targets if is_open(replica_id)]
        if not targets:
            return None
        for replica_id, weight in targets:
            self._credits[replica_id] += weight
        chosen = max(targets, key=lambda target: self._credits[target[0]])[0]
        self._credits[chosen] -= sum(weight for _, weight in targets)
        return chosen

    def names(self, replica_id: str) -> bool:
        """Return whether a replica is one of its targets."""
        return replica_id in self._credits


def is_for(scope: Scope, name: str, program: Program) -> bool:
    """Return whether a route of that scope and name applies to a program."""
    if scope is Scope.PROGRAM:
        return program.program_id == name
    if scope is Scope.GROUP:
        return program.group_id == name
    if scope is Scope.CLASS:
        return program.program_class == name
    return scope is Scope.ALL or program.tenant == name


class RouteView(NamedTuple):
    """The replicas to which the programs of a scope go."""

    scope: str
    name: str
    targets: Mapping[str, float]
    """Replica ids with weights; they need not be open, but none was removed."""


Chain = tuple[tuple[int, int], ...]
"""Cuts of a prompt: digest of everything before it, tokens before it."""

MOST_TOKENS_PER_BYTE_RATIO: Final = 1.0

LEAST_TOKENS_PER_BYTE_RATIO: Final = 1 / 16
"""A token of text has at least one byte, and few have sixteen. Values outside count only for the program itself: its
client may have made its usage up, or filled its bodies with something other than a prompt."""

SIDE_TURN_RATIO: Final = 0.5
"""A turn whose prompt is shorter than this ratio of its branch is taken for a side turn, until a second one follows."""

PARENT_TURNS_COUNT: Final = 8
"""How many turns of the waiting branch may finish beside a branch whose tool runs; after more, it was left.

For example, a branch whose last answer calls the tool that hands in its result."""

MAIN_BRANCH: Final = ""


def usual_ratio(tokens_per_byte_ratio: float) -> float:
    """Return a ratio as far as it counts for other programs."""
    return max(LEAST_TOKENS_PER_BYTE_RATIO, min(tokens_per_byte_ratio, MOST_TOKENS_PER_BYTE_RATIO))


class Turn:
    """One inference request of a program, from its arrival to the end of its lease."""

    __slots__ = (
        "account_id",
        "arrived_s",
        "avoid_replica_id",
        "branch_id",
        "claim_tokens",
        "deadline_s",
        "expected_output_tokens",
        "granted_flight_s",
        "granted_s",
        "kept_since_s",
        "kept_tokens",
        "media",
        "media_tokens",
        "output_tokens",
        "pinned_replica_id",
        "program",
        "prompt_bytes",
        "prompt_tokens",
        "resident_tokens",
        "role",
        "served_by",
        "started_s",
        "turn_id",
        "unrepresentative",
        "unverified",
        "verdict_cause",
        "waiting_since_s",
        "wanted_replica_id",
    )

    def __init__(
        self, turn_id: int, program: Program | None, branch_id: str, prompt_bytes: int, arrived_s: float
    ) -> None:
        """Create a turn without a lease."""
        self.turn_id = turn_id
        self.program = program
        self.branch_id = branch_id
        self.prompt_bytes = prompt_bytes
        self.arrived_s = arrived_s
        self.role = branch_id
        """The agent of the turn: its branch, unless set otherwise."""
        self.expected_output_tokens = 0
        """Output that turns of that role were seen to generate, at its arrival."""
        self.waiting_since_s = arrived_s
        """When its first attempt arrived, if its client retried."""
        self.deadline_s = inf
        """When its client gives up."""
        self.prompt_tokens = 0
        """Estimated size of the prompt at arrival."""
        self.media: Media = ()
        self.media_tokens = 0
        """The part of it that is images, audio and files."""
        self.output_tokens = 0
        """Generated so far, as far as seen."""
        self.account_id: str | None = None
        """The replica on which it is in flight; None while it is held, and once that replica is lost."""
        self.claim_tokens = 0
        """Its own claim: only for a turn in flight whose program is None."""
        self.avoid_replica_id: str | None = None
        """The replica that failed the previous attempt."""
        self.pinned_replica_id: str | None = None
        """The only replica that it may run on, if its client chose one."""
        self.wanted_replica_id: str | None = None
        """The replica that has what it continues from: it runs there if its program may get a claim there."""
        self.served_by: Route | None = None
        """For a turn without a program, the replicas that serve its model; None if all do."""
        self.unrepresentative = False
        self.unverified = False
        """Its replica was suspended or flushed while it ran: its times, hits and end say nothing."""
        self.verdict_cause = ""
        """Whose fault it is that it ends badly, as far as told."""
        self.granted_s = 0.0
        self.granted_flight_s = 0.0
        """Its account's `flight_s` at the grant."""
        self.started_s: float | None = None
        self.resident_tokens = 0
        """Prompt tokens that were expected in the replica's memory at the grant."""
        self.kept_tokens = 0
        """The same if its program had kept its claim since its branch's last turn; 0 otherwise."""
        self.kept_since_s = 0.0
        """When that last turn finished."""

    def __repr__(self) -> str:
        where = f"on {self.account_id}" if self.account_id else "held"
        return f"<Turn {self.turn_id} {where}, {self.prompt_tokens} prompt tokens>"


class TurnEnded:
    """What a finished turn in flight told: the ledger and all learners get this one record.

    Its program and its branch (None if it has none any more) are as they were before.
    """

    __slots__ = (
        "branch",
        "cached_tokens",
        "duration_s",
        "first_token_s",
        "grown_tokens",
        "known_tokens",
        "now_s",
        "output_tokens",
        "prompt_tokens",
        "turn",
        "uncached_tokens",
    )

    def __init__(
        self,
        turn: Turn,
        branch: Branch | None,
        now_s: float,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """Record its usage; `cached_tokens` is None if the engine does not report it."""
        self.turn = turn
        self.branch = branch
        self.now_s = now_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens
        self.duration_s = now_s - turn.granted_s
        started_s = turn.started_s
        self.first_token_s = None if started_s is None or started_s >= now_s else started_s - turn.granted_s
        """From its grant; None if that was not seen apart from its end."""
        context_tokens = branch.context_tokens if branch is not None else 0
        self.known_tokens = context_tokens if context_tokens < prompt_tokens else prompt_tokens
        """The part of the prompt that its branch had sent or received before."""
        self.grown_tokens = prompt_tokens + output_tokens - context_tokens if context_tokens else None
        """What it added to its branch; None for a first turn."""
        found_tokens = max(turn.resident_tokens, turn.kept_tokens) if cached_tokens is None else cached_tokens
        self.uncached_tokens = prompt_tokens - found_tokens if prompt_tokens > found_tokens else 0
        """The computed part of the prompt: an estimate if the engine does not report it."""


class Branch:
    """One context chain inside a program."""

    __slots__ = (
        "context_tokens",
        "kept_since_s",
        "last_turn_id",
        "parent_id",
        "parent_turns_count",
        "prefix",
        "prompt_tokens",
        "served_by",
        "side_turn_count",
        "tokens_per_byte_ratio",
    )

    def __init__(self) -> None:
        """Create a branch of which nothing is known."""
        self.context_tokens = 0
        """Exact from the last usage: prompt and output of its last turn."""
        self.prompt_tokens = 0
        """The last turn's prompt in that: an engine has it for certain, while answers may come back edited."""
        self.kept_since_s = -inf
        """When the turn that set them finished, if under its program's present claim; minus infinite otherwise."""
        self.prefix: Chain = ()
        """Where its prompt may part from others."""
        self.tokens_per_byte_ratio: float | None = None
        self.side_turn_count = 0
        self.parent_turns_count = 0
        """While its tool runs: how many turns of the waiting branch may still finish before it is taken for ended."""
        self.last_turn_id = -1
        self.served_by: str | None = None
        """The replica of its last turn, if some replicas have a tier behind their pools."""
        self.parent_id = MAIN_BRANCH
        """The branch that waits for it, as far as its client says."""

    def turn_finished(self, prompt_tokens: int, output_tokens: int, tool: str = "") -> bool:
        """Set the size of the branch from the usage of a turn; return whether that is believed.

        It goes on by itself if the answer called a tool.
        A much shorter prompt is a side turn (a title, a summary) and changes nothing; when a second one follows, the
        branch was really cut (a compaction) and its size is believed.
        """
        self.parent_turns_count = PARENT_TURNS_COUNT if tool else 0
        if prompt_tokens < SIDE_TURN_RATIO * self.context_tokens:
            self.side_turn_count += 1
            if self.side_turn_count < 2:
                return False
        self.side_turn_count = 0
        self.context_tokens = prompt_tokens + output_tokens
        self.prompt_tokens = prompt_tokens
        return True


class ProgramVerdict:
    """The verdict on a program: that on its last bad turn, until the same turn is answered after all.

    The same turn is one of the same branch with a prompt of the same size. A later good turn makes up for a client that
    left, but not for a failure: the agent may have gone on without that answer.
    """

    __slots__ = ("_branch_id", "_prompt_bytes", "cause", "replica_id", "verdict")

    def __init__(self) -> None:
        """Begin well."""
        self.verdict = TurnVerdict.OK
        self.cause = ""
        self.replica_id: str | None = None
        self._branch_id = ""
        self._prompt_bytes = 0

    def ended(
        self, verdict: TurnVerdict, cause: str, replica_id: str | None, branch_id: str, prompt_bytes: int
    ) -> None:
        """Note how a turn ended."""
        is_same = branch_id == self._branch_id and prompt_bytes == self._prompt_bytes
        if verdict is TurnVerdict.OK:
            if self.verdict is TurnVerdict.OK or not (is_same or self.verdict is TurnVerdict.CLIENT_LEFT):
                return
            cause, replica_id = "", None
        elif verdict is TurnVerdict.CLIENT_LEFT and self.verdict is not TurnVerdict.OK:
            return
        self.verdict, self.cause, self.replica_id = verdict, cause, replica_id
        self._branch_id, self._prompt_bytes = branch_id, prompt_bytes


STORY_ENTRIES: Final = 48
"""How many of its last events a program's story keeps."""

STORY_FIELDS_COUNT: Final = 6
"""Of a `StoryEntry`."""

LOST_TURNS_COUNT: Final = 64
"""How many turns without an answer a program remembers, for retries."""

IDLE_BRANCHES_COUNT: Final = 16
"""How many side branches without a turn keep their claim; beyond, the longest unused are taken for ended."""

SCHEDULER_CAUSES: Final = frozenset({Reason.REPLICA_DRAINING, Reason.REPLICA_TRIPPED, Reason.MOVED, Reason.TURN_FAILED})
"""Causes for which a program leaves its replica whatever its policy says."""


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One entry in a program's story, in the scheduler's monotonic seconds."""

    now_s: float
    what: str
    why: str
    replica_id: str | None
    tokens: int
    began_s: float | None = None
    """When an ended turn was granted; None if it never was."""


class Group:
    """Programs that finish together, such as the samples of one RL prompt."""

    __slots__ = ("group_id", "programs", "some_ended", "tenant")

    def __init__(self, tenant: str, group_id: str) -> None:
        """Create an empty group; all its programs will be of one tenant."""
        self.tenant = tenant
        self.group_id = group_id
        self.programs: dict[str, Program] = {}
        """Programs that have not ended."""
        self.some_ended = False

    @property
    def last(self) -> Program | None:
        """The only program that has not ended, if others have."""
        return next(iter(self.programs.values())) if self.some_ended and len(self.programs) == 1 else None


class Program:
    """One run of an agent, from its first turn to its release.

    Only the scheduler writes here; policies see it through the read-only `ProgramView`.
    """

    __slots__ = (
        "_story",
        "acting_number",
        "acting_since_s",
        "away_s",
        "branches",
        "cached_tokens_total",
        "censored_after_s",
        "claim_tokens",
        "destination",
        "first_prompt_tokens",
        "generation",
        "granted_output_tokens",
        "group",
        "growth_tokens",
        "held",
        "held_s_total",
        "hint",
        "hint_keeps",
        "hint_score",
        "hold_reason",
        "hold_until_s",
        "ideal_s_total",
        "idle_at_s",
        "idle_look_s",
        "idle_since_s",
        "in_flight",
        "larger_tokens_total",
        "last_ended_s",
        "learned_count",
        "leaves_for",
        "limits_since_s",
        "look_again_s",
        "lost",
        "lost_turn_ids",
        "opened_s",
        "output_tokens_total",
        "parent_id",
        "place",
        "priority",
        "priority_by_replica",
        "program_class",
        "program_id",
        "program_limits",
        "prompt_tokens_total",
        "replica_id",
        "reserve_tokens",
        "route",
        "routed_to",
        "served_by",
        "tenant",
        "tool",
        "tool_ends_count",
        "tool_named",
        "tool_runs",
        "turn_count",
        "turns_ended_s",
        "urgent_until_s",
        "verdict",
        "verdicts",
    )

    def __init__(  # noqa: PLR0915 - one statement for each slot
        self, program_id: str, generation: int, opened_s: float, place: Place | None = None
    ) -> None:
        """Create a program of which nothing is known."""
        self.program_id = program_id
        self.generation = generation
        self.opened_s = opened_s
        self.place = place or Place(Kind.AWAY)
        """Its place. Only the book writes this."""
        self.acting_since_s = self.turns_ended_s = opened_s
        """Since when its tool runs, and when its last turn ended: earlier, if a tool was reported to begin later."""
        self.tool_ends_count = 0
        """How many tools were reported to end since its last turn."""
        self.tool = ""
        self.tool_named = False
        """Whether its answer or its client named the tool; otherwise an inferred name replaces this one."""
        self.tool_runs = False
        """Whether it acts because a turn finished: only then it is at a tool."""
        self.away_s = 0.0
        """How long the tool before its last turn ran."""
        self.censored_after_s: float | None = None
        """How long its tool had run when its claim was taken: after that time less is known."""
        self.acting_number = 0
        """Its number among those that began to act there, by which equals are ordered."""
        self.hold_until_s = inf
        self.hint: Hint | None = None
        """Its client's hint on its next turn."""
        self.hint_keeps = False
        """Whether the hint keeps its claim for longer than its policy would have."""
        self.hint_score = (0.0, 0.0)
        """Weight of its hints that were right, and of all measured ones."""
        self.group: Group | None = None
        self.limits_since_s = self.idle_since_s = 0.0
        """When it was last heard of, and from when its idle limit counts, on the clock of the limits."""
        self.parent_id = self.tenant = self.program_class = ""
        self.program_limits: ProgramLimits | None = None
        """What it may use; None if nothing limits it."""
        self.look_again_s = self.urgent_until_s = inf
        """While it is held: when its deadline is to be looked at, and the deadline, once it would miss that."""
        self.priority = 0
        """Its set priority: lower comes first, in the paused queue and in engines, before the policy's rank."""
        self.priority_by_replica: dict[str, int] | None = None
        """The same for the engine of one replica alone."""
        self.route: Route | None = None
        self.routed_to: str | None = None
        """The replica of its route, while that is open."""
        self.served_by: Route | None = None
        """The replicas that serve its turns' model, as last asked for; None if all do."""
        self.destination: tuple[str, Reason] | None = None
        """Where it goes when its turns in flight end, or its next one arrives; and why."""
        self.leaves_for: dict[Reason, None] = {}
        """Why it is marked, in order of the causes: it leaves its replica unless all of them end."""
        self.idle_at_s = inf
        """When, on the clock of the limits, its idle limit is to be checked; infinite if it has nothing to lose."""
        self.idle_look_s = inf
        """When it is looked at for that, or earlier; infinite if it is not watched."""
        self.replica_id: str | None = None
        """Where it is active, or was when it was paused."""
        self.claim_tokens = 0
        """c of the paper: its claim while active, or what it would claim if restored."""
        self.first_prompt_tokens = 0
        self.larger_tokens_total = self.learned_count = 0
        """By how much it exceeded its first prompt, summed over the turns that taught something, and how many did."""
        self.growth_tokens = 0
        """Expected growth beyond its claim, until it is as large as programs are on average."""
        self.reserve_tokens = 0
        """The part of its claim that is expected growth."""
        self.branches: dict[str, Branch] = {MAIN_BRANCH: Branch()}
        self.held: dict[int, Turn] = {}
        self.in_flight: dict[int, Turn] = {}
        self.lost: dict[int, Turn] = {}
        """Turns on a replica that went down: not ended yet, but no longer counted."""
        self.lost_turn_ids: deque[int] = deque(maxlen=LOST_TURNS_COUNT)
        """The last turns that had a lease and ended without an answer: a retry of one is the same turn."""
        self.hold_reason = ""
        self.granted_output_tokens = 0
        """Expected output of the turn that was granted last."""
        self.verdicts = Verdicts()
        self.verdict = ProgramVerdict()
        self.turn_count = self.prompt_tokens_total = self.output_tokens_total = self.cached_tokens_total = 0
        self.held_s_total = 0.0
        self.ideal_s_total = 0.0
        """What its finished turns would have taken alone, plus its tools' actual time."""
        self.last_ended_s: float | None = None
        """When its last turn finished; None before the first."""
        self._story: deque[float | str | None] = deque(maxlen=STORY_ENTRIES * STORY_FIELDS_COUNT)
        """The fields of its last story entries, flat: no object per entry for the garbage collector to scan."""

    def __repr__(self) -> str:
        return (
            f"<Program {self.program_id!r} generation {self.generation}: {self.status}, {self.place.kind} "
            f"at {self.replica_id}, {self.claim_tokens} tokens, {len(self.in_flight)} in flight, {len(self.held)} held>"
        )

    @property
    def status(self) -> Status:
        """Whether it holds a claim."""
        return self.place.status

    @property
    def phase(self) -> Phase:
        """Whether a turn of it is here, or its tool runs."""
        return self.place.phase

    @property
    def admitted(self) -> bool:
        """Whether it may wait for room: always, if there is no admission."""
        return self.place.admitted

    @property
    def marked(self) -> bool:
        """Whether it leaves its replica when its turns in flight end."""
        return self.place.kind is Kind.LEAVING

    @property
    def marked_by_policy(self) -> bool:
        """Whether it is marked only because of its policy."""
        return self.place.kind is Kind.LEAVING and self.leaves_for.keys().isdisjoint(SCHEDULER_CAUSES)

    @property
    def is_last_of_group(self) -> bool:
        """Whether it is in a group whose other programs have all ended."""
        return self.group is not None and self.group.last is self

    @property
    def group_id(self) -> str:
        """The group it is in; empty if in none."""
        return self.group.group_id if self.group is not None else ""

    @property
    def expected_output_tokens(self) -> int:
        """Expected output, at arrival, of its first waiting turn, or else of the turn granted last."""
        for turn in self.held.values():
            return turn.expected_output_tokens
        return self.granted_output_tokens

    @property
    def level(self) -> Level | None:
        """A judge's level for its prospects; None before the first verdict."""
        return self.verdicts.level

    @property
    def waiting_since_s(self) -> float:
        """When the first of its held turns arrived, or the first attempt at it."""
        for turn in self.held.values():
            return turn.waiting_since_s
        raise ValueError(f"{self!r} does not wait")

    @property
    def context_tokens(self) -> int:
        """Tokens of all branches after their last finished turns."""
        if len(self.branches) == 1:
            return self.branches[MAIN_BRANCH].context_tokens
        return sum(branch.context_tokens for branch in self.branches.values())

    def note(self, now_s: float, what: str, why: str, replica_id: str | None, began_s: float | None = None) -> None:
        """Add a story entry; `began_s` is when it began, if it took time."""
        self._story.extend((now_s, what, why, replica_id, self.claim_tokens, began_s))

    def story(self) -> list[StoryEntry]:
        """Return its story, oldest first; only the last `STORY_ENTRIES` are kept."""
        fields: list[Any] = list(self._story)
        return [StoryEntry(*fields[at : at + STORY_FIELDS_COUNT]) for at in range(0, len(fields), STORY_FIELDS_COUNT)]

    def begin_turn(self, turn: Turn, parent_id: str, tokens_per_byte_ratio: float) -> Branch:
        """Estimate an arrived turn's prompt, and return its branch, opened if there is none.

        The main branch has no parent. Text counts by the last usage of the branch, or of the main one if it is new, or
        by the ratio; plus media.
        """
        branch = self.branches.get(turn.branch_id)
        known = self.branches[MAIN_BRANCH] if branch is None else branch
        ratio = known.tokens_per_byte_ratio or tokens_per_byte_ratio
        turn.prompt_tokens = int(turn.prompt_bytes * ratio) + turn.media_tokens
        if branch is None:
            branch = self.branches[turn.branch_id] = Branch()
        branch.last_turn_id = turn.turn_id
        if parent_id and turn.branch_id != MAIN_BRANCH:
            branch.parent_id = parent_id
        return branch

    def measure_claim(self) -> int:
        """Return what the program claims now: each branch's longest chain, plus what its turns have generated.

        Turns of one branch share their prefix, so only the longest prompt of a branch counts. Held turns beside those
        in flight count, too: they are granted together or taken together. Cost: O(turns here + branches).
        """
        output_tokens = 0
        longest = {branch_id: branch.context_tokens for branch_id, branch in self.branches.items()}
        for turn in (*self.in_flight.values(), *self.held.values()):
            longest[turn.branch_id] = max(longest[turn.branch_id], turn.prompt_tokens)
            output_tokens += turn.output_tokens
        return sum(longest.values()) + output_tokens

    def forget_ended_branches(self, ended: Turn, *, finished: bool = True) -> list[Branch]:
        """Drop and return side branches that are not used again, after `ended`, a turn of this program.

        If it finished: all that its branch waits for, or one of these, and that had no turn since it arrived, because a
        parent goes on when its sub-agents have ended; the main branch waits for all. Branches whose tool runs are
        dropped only after `PARENT_TURNS_COUNT` such turns, because a parent may also go on beside them. In any case all
        idle branches except the `IDLE_BRANCHES_COUNT` last used, because a client may name every branch and have no
        main one.
        """
        busy = {turn.branch_id for turns in (self.in_flight, self.held) for turn in turns.values()}
        idle = [name for name in self.branches if name != MAIN_BRANCH and name not in busy]
        idle.sort(key=lambda name: self.branches[name].last_turn_id)
        excess_count = len(idle) - IDLE_BRANCHES_COUNT
        waiting = {name: self._who_waits_for(name) for name in idle} if finished else {}
        forgotten = []
        for position, name in enumerate(idle):
            branch = self.branches[name]
            done = finished and branch.last_turn_id < ended.turn_id and ended.branch_id in waiting[name]
            if done and branch.parent_turns_count:
                branch.parent_turns_count -= 1
                done = False
            if done or position < excess_count:
                forgotten.append(self.branches.pop(name))
        return forgotten

    def _who_waits_for(self, branch_id: str) -> set[str]:
        """Return the branches above one, including the main branch; parents that name each other in a ring are few."""
        above = {MAIN_BRANCH}
        while (branch := self.branches.get(branch_id)) is not None and branch.parent_id not in above:
            branch_id = branch.parent_id
            above.add(branch_id)
        return above
