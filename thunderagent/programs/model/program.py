"""A program: the record of one run of an agent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from thunderagent.programs.messages import ProgramLimits
from thunderagent.programs.model.advice.hints import Hint
from thunderagent.programs.model.advice.routes import Route
from thunderagent.programs.model.advice.verdicts import Level, Verdicts
from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.places import Kind, Phase, Place, Status
from thunderagent.programs.model.turn import MAIN_BRANCH, Branch, Turn
from thunderagent.programs.model.verdict import ProgramVerdict

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
        """When, on the clock of the limits, its idle limit is to be checked."""
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

    def estimate_prompt_tokens(self, turn: Turn, tokens_per_byte_ratio: float) -> int:
        """Estimate a prompt: text by the last usage of its branch or the main one, or by the ratio; plus media."""
        branch = self.branches.get(turn.branch_id) or self.branches[MAIN_BRANCH]
        return int(turn.prompt_bytes * (branch.tokens_per_byte_ratio or tokens_per_byte_ratio)) + turn.media_tokens

    def branch_of(self, turn: Turn, parent_id: str) -> Branch:
        """Return the branch of an arrived turn, opened if there is none; the main one has no parent."""
        branch = self.branches.get(turn.branch_id)
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
        if len(self.branches) == 1:
            context_tokens = self.branches[MAIN_BRANCH].context_tokens
            for turns in (self.in_flight, self.held):
                if turns:
                    for turn in turns.values():
                        output_tokens += turn.output_tokens
                        if turn.prompt_tokens > context_tokens:
                            context_tokens = turn.prompt_tokens
            return context_tokens + output_tokens
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
