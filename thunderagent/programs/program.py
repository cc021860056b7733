"""A program, its branches and its turns: the records of the one mutable table."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from thunderagent.programs.decisions import Reason
from thunderagent.programs.events import Media
from thunderagent.programs.lifecycle import TRANSITIONS, Phase, Status, Trigger, no_transition
from thunderagent.programs.prefixes import Chain
from thunderagent.programs.verdicts import Level, Verdicts

if TYPE_CHECKING:
    from thunderagent.programs.routes import Route

STORY_ENTRIES = 48
"""How many of its last happenings a program remembers."""

LOST_TURNS_COUNT = 64
"""How many turns without an answer a program remembers, for the one who tries again."""

SIDE_TURN_RATIO = 0.5
"""A turn whose prompt is shorter than this part of its branch is taken for a side turn - until a second one follows."""


IDLE_BRANCHES_COUNT = 16
"""How many side branches without a turn keep their claim; the rest, longest unused first, are taken for ended."""

PARENT_TURNS_COUNT = 8
"""So many turns of the branch that waits for it may finish beside one whose tool runs; it was left, if there are more.

As one is whose last answer calls the tool that hands in its result."""

SCHEDULER_CAUSES = frozenset({Reason.REPLICA_DRAINING, Reason.REPLICA_TRIPPED, Reason.MOVED, Reason.TURN_FAILED})
"""Why a program leaves its replica whatever its policy says."""


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One happening in the life of a program, in the scheduler's monotonic seconds."""

    now_s: float
    what: str
    why: str
    replica_id: str | None
    tokens: int
    began_s: float | None = None
    """Of a turn that ended, when it was granted; None if it never was."""


class Group:
    """Programs that finish together, as the samples of one RL prompt."""

    __slots__ = ("group_id", "programs", "some_ended", "tenant")

    def __init__(self, tenant: str, group_id: str) -> None:
        """Begin with nobody; all will be of one tenant."""
        self.tenant = tenant
        self.group_id = group_id
        self.programs: dict[str, Program] = {}
        """Those that did not end."""
        self.some_ended = False

    @property
    def last(self) -> Program | None:
        """The only one that did not end, if others did."""
        return next(iter(self.programs.values())) if self.some_ended and len(self.programs) == 1 else None


class Turn:
    """One inference request of a program, from its arrival to the end of its lease."""

    __slots__ = (
        "account_id",
        "arrived_s",
        "avoid_replica_id",
        "branch_id",
        "claim_tokens",
        "deadline_s",
        "disturbed",
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
        "started_s",
        "turn_id",
        "waiting_since_s",
        "wanted_replica_id",
    )

    def __init__(
        self, turn_id: int, program: Program | None, branch_id: str, prompt_bytes: int, arrived_s: float
    ) -> None:
        """Begin a turn that holds no lease yet."""
        self.turn_id = turn_id
        self.program = program
        self.branch_id = branch_id
        self.prompt_bytes = prompt_bytes
        self.arrived_s = arrived_s
        self.role = branch_id
        """The agent whose turn it is: its branch, if nothing else was said."""
        self.expected_output_tokens = 0
        """What turns of that role were seen to generate when it arrived."""
        self.waiting_since_s = arrived_s
        """When its first attempt arrived, if its client tried again."""
        self.deadline_s = inf
        """When its client gives up."""
        self.prompt_tokens = 0
        """Size of the prompt as estimated at arrival."""
        self.media: Media = ()
        self.media_tokens = 0
        """Of that, its images, audio and files."""
        self.output_tokens = 0
        """Generated so far, as far as was seen."""
        self.account_id: str | None = None
        """The replica that it is in flight on; None while it is held, and once that replica is lost."""
        self.claim_tokens = 0
        """What it claims by itself: only of a turn in flight whose program is None."""
        self.avoid_replica_id: str | None = None
        """The replica that failed the attempt before it."""
        self.pinned_replica_id: str | None = None
        """The only replica that it may run on, if its client chose one."""
        self.wanted_replica_id: str | None = None
        """The replica that has what it goes on from: it runs there if its program may get a claim there."""
        self.disturbed = False
        """Its replica was suspended or flushed while it ran: its times and hits tell nothing, nor does its end."""
        self.granted_s = 0.0
        self.granted_flight_s = 0.0
        """What its account's `flight_s` was then."""
        self.started_s: float | None = None
        self.resident_tokens = 0
        """Of its prompt, what was expected to lie in the replica's memory when it was granted."""
        self.kept_tokens = 0
        """The same, where its program had kept its claim since its last turn: 0 where it had not."""
        self.kept_since_s = 0.0
        """When that last turn ended."""

    def first_token_s(self, now_s: float) -> float | None:
        """Return the time from its grant to its first token; None where that was not seen apart from its end, now."""
        if self.started_s is None or self.started_s >= now_s:
            return None
        return self.started_s - self.granted_s

    def __repr__(self) -> str:
        where = f"on {self.account_id}" if self.account_id else "held"
        return f"<Turn {self.turn_id} {where}, {self.prompt_tokens} prompt tokens>"


class Branch:
    """One context chain inside a program."""

    __slots__ = (
        "context_tokens",
        "last_turn_id",
        "parent_id",
        "parent_turns_count",
        "prefix",
        "prompt_tokens",
        "side_turn_count",
        "tokens_per_byte_ratio",
    )

    def __init__(self) -> None:
        """Begin a branch of which nothing is known."""
        self.context_tokens = 0
        """Exact from the last usage: prompt and output of its last turn."""
        self.prompt_tokens = 0
        """Of these, the prompt of the last turn: what an engine has for certain, for answers may come back edited."""
        self.prefix: Chain = ()
        """Where its prompt may part from those of others."""
        self.tokens_per_byte_ratio: float | None = None
        self.side_turn_count = 0
        self.parent_turns_count = 0
        """So many turns of who waits for it may still finish before it is taken for ended, as its tool runs."""
        self.last_turn_id = -1
        self.parent_id = MAIN_BRANCH
        """The branch that waits for it, as far as its client says."""

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take the size of the branch from the usage of a turn.

        A prompt much shorter than the branch is a side turn (a title, a summary) and changes nothing; when a second
        one follows, the branch was really cut (a compaction) and its size is believed.
        """
        if prompt_tokens < SIDE_TURN_RATIO * self.context_tokens:
            self.side_turn_count += 1
            if self.side_turn_count < 2:
                return
        self.side_turn_count = 0
        self.context_tokens = prompt_tokens + output_tokens
        self.prompt_tokens = prompt_tokens

    def turn_finished(self, tool: str) -> None:
        """Note whether it goes on by itself: it does if its answer called a tool."""
        self.parent_turns_count = PARENT_TURNS_COUNT if tool else 0


MAIN_BRANCH = ""


class Program:
    """One run of an agent, from its first turn to its release.

    Only the scheduler writes here; policies see it through the read-only `ProgramView`.
    """

    __slots__ = (
        "acting_since_s",
        "admitted",
        "announced",
        "away_s",
        "bound_to",
        "branches",
        "cached_tokens_total",
        "claim_tokens",
        "destination",
        "first_prompt_tokens",
        "generation",
        "granted_output_tokens",
        "group",
        "growth_tokens",
        "held",
        "held_s_total",
        "hold_reason",
        "hold_until_s",
        "ideal_s_total",
        "idle",
        "idle_at_s",
        "in_flight",
        "larger_tokens_total",
        "last_ended_s",
        "leaves_for",
        "let_go_after_s",
        "limits_since_s",
        "lost",
        "lost_turn_ids",
        "opened_s",
        "output_tokens_total",
        "parent_id",
        "phase",
        "priority",
        "priority_by_replica",
        "program_class",
        "program_id",
        "prompt_tokens_total",
        "replica_id",
        "reserve_tokens",
        "route",
        "status",
        "story_entries",
        "tenant",
        "tool",
        "tool_named",
        "tool_runs",
        "turn_count",
        "verdicts",
    )

    def __init__(self, program_id: str, generation: int, opened_s: float) -> None:  # noqa: PLR0915 - one for each slot
        """Open a program: paused, and with nothing known of it."""
        self.program_id = program_id
        self.generation = generation
        self.opened_s = opened_s
        self.status = Status.PAUSED
        self.phase = Phase.ACTING
        self.acting_since_s = opened_s
        self.admitted = True
        """Whether it may be in the paused queue; only where a policy has an admission is it ever False."""
        self.announced = False
        """Opened by its client's word; no turn of it came yet."""
        self.tool = ""
        self.tool_named = False
        """Whether its answer or its client called the tool so: a name that is inferred takes its place only if not."""
        self.tool_runs = False
        """Whether it acts because a turn of it finished: only then it is at a tool."""
        self.away_s = 0.0
        """How long the tool before its last turn ran."""
        self.let_go_after_s: float | None = None
        """For how long its tool had run when its claim was taken."""
        self.hold_until_s = inf
        self.group: Group | None = None
        self.limits_since_s = 0.0
        """When it was heard of last, on the clock of the limits, which stands still while nothing is granted."""
        self.parent_id = ""
        self.tenant = ""
        self.program_class = ""
        self.priority = 0
        """As it was told: lower goes first, in the paused queue and in an engine, before what the policy says."""
        self.priority_by_replica: dict[str, int] | None = None
        """The same for the engine of one replica alone."""
        self.route: Route | None = None
        self.bound_to: str | None = None
        """The replica that its route sends it to, while that is open."""
        self.destination: tuple[str, Reason] | None = None
        """Where it is to go when its turns in flight have ended, or its next one comes; and why."""
        self.leaves_for: dict[Reason, None] = {}
        """Why it is marked, in the order in which the causes came: it leaves its replica unless all of them end."""
        self.idle_at_s = inf
        """When, on the clock of the limits, it is to be looked at whether its idle limit is over."""
        self.idle = False
        """Paused by the idle limit: only a turn brings it back."""
        self.replica_id: str | None = None
        """Where it is active, or was when it was paused."""
        self.claim_tokens = 0
        """c of the paper: what it claims while active, what it would claim if it were restored."""
        self.first_prompt_tokens = 0
        self.larger_tokens_total = 0
        """By how much it was larger than its first prompt, summed over its turns."""
        self.growth_tokens = 0
        """What it is expected to grow by, beyond its claim, until it is as large as programs are in the mean."""
        self.reserve_tokens = 0
        """Of its claim, what it is expected to grow by."""
        self.branches: dict[str, Branch] = {MAIN_BRANCH: Branch()}
        self.held: dict[int, Turn] = {}
        self.in_flight: dict[int, Turn] = {}
        self.lost: dict[int, Turn] = {}
        """In flight on a replica that went down: not ended yet, but no longer counted."""
        self.lost_turn_ids: deque[int] = deque(maxlen=LOST_TURNS_COUNT)
        """The last that had a lease and ended without an answer: who tries one of them again makes the same turn."""
        self.hold_reason = ""
        self.granted_output_tokens = 0
        """What the turn that was granted last was expected to generate."""
        self.verdicts = Verdicts()
        self.turn_count = 0
        self.prompt_tokens_total = self.output_tokens_total = self.cached_tokens_total = 0
        self.held_s_total = 0.0
        self.ideal_s_total = 0.0
        """What its finished turns would have taken alone, and its tools as long as they took."""
        self.last_ended_s: float | None = None
        """When its last turn finished; None as long as none did."""
        self.story_entries: deque[tuple[float, str, str, str | None, int, float | None]] = deque(maxlen=STORY_ENTRIES)

    def __repr__(self) -> str:
        mark = ", marked" if self.marked else ""
        return (
            f"<Program {self.program_id!r} generation {self.generation}: {self.status} {self.phase}{mark} "
            f"at {self.replica_id}, {self.claim_tokens} tokens, {len(self.in_flight)} in flight, {len(self.held)} held>"
        )

    @property
    def marked(self) -> bool:
        """Whether it leaves its replica when its turns in flight have ended."""
        return bool(self.leaves_for)

    @property
    def marked_by_policy(self) -> bool:
        """Whether it is marked, and only for what its policy said."""
        return self.marked and self.leaves_for.keys().isdisjoint(SCHEDULER_CAUSES)

    @property
    def is_last_of_group(self) -> bool:
        """Whether it is in a group, all others of which ended."""
        return self.group is not None and self.group.last is self

    @property
    def group_id(self) -> str:
        """The group it is in; empty if in none."""
        return self.group.group_id if self.group is not None else ""

    @property
    def expected_output_tokens(self) -> int:
        """What its turn that waits first, or else was granted last, was expected to generate when it arrived."""
        for turn in self.held.values():
            return turn.expected_output_tokens
        return self.granted_output_tokens

    @property
    def level(self) -> Level | None:
        """How good a judge thinks its prospects are; None as long as there is no verdict."""
        return self.verdicts.level

    @property
    def waiting_since_s(self) -> float:
        """When the first of its held turns arrived, or the first attempt at it."""
        return next(iter(self.held.values())).waiting_since_s

    @property
    def context_tokens(self) -> int:
        """Tokens of all branches after their last finished turns."""
        return sum(branch.context_tokens for branch in self.branches.values())

    def advance(self, trigger: Trigger) -> None:
        """Move along the lifecycle table. Raises `LifecycleError` with the story where it has no such arrow."""
        state = (self.status, self.phase)
        following = TRANSITIONS.get((state, trigger))
        if following is None:
            raise no_transition(state, trigger, "\n".join(map(str, (self, *self.story()))))
        self.status, self.phase = following

    def note(self, now_s: float, what: str, why: str, replica_id: str | None, began_s: float | None = None) -> None:
        """Remember a happening, and when that began if it took time."""
        self.story_entries.append((now_s, what, why, replica_id, self.claim_tokens, began_s))

    def story(self) -> list[StoryEntry]:
        """Return what happened to it, oldest first; only the last `STORY_ENTRIES` are kept."""
        return [StoryEntry(*entry) for entry in self.story_entries]

    def estimate_prompt_tokens(self, turn: Turn, tokens_per_byte_ratio: float) -> int:
        """Estimate a prompt: text by its branch's last usage, or the main branch's, or the given ratio; and media."""
        branch = self.branches.get(turn.branch_id) or self.branches[MAIN_BRANCH]
        return int(turn.prompt_bytes * (branch.tokens_per_byte_ratio or tokens_per_byte_ratio)) + turn.media_tokens

    def branch_of(self, turn: Turn, parent_id: str) -> Branch:
        """Return the branch of a turn that arrived, opened if there is none; the main one has no parent."""
        branch = self.branches.get(turn.branch_id)
        if branch is None:
            branch = self.branches[turn.branch_id] = Branch()
        branch.last_turn_id = turn.turn_id
        if parent_id and turn.branch_id != MAIN_BRANCH:
            branch.parent_id = parent_id
        return branch

    def measure_claim(self) -> int:
        """Return what the program claims now: of each branch the longest chain, and what its turns have generated.

        Turns of one branch share their prefix, so only the longest prompt of a branch counts. Held turns beside those
        in flight count, too: they are granted together or go together. Cost: O(turns with us + branches).
        """
        turns = (*self.in_flight.values(), *self.held.values())
        if len(self.branches) == 1:
            context_tokens = self.branches[MAIN_BRANCH].context_tokens
            output_tokens = 0
            for turn in turns:
                context_tokens = max(context_tokens, turn.prompt_tokens)
                output_tokens += turn.output_tokens
            return context_tokens + output_tokens
        longest = {branch_id: branch.context_tokens for branch_id, branch in self.branches.items()}
        output_tokens = 0
        for turn in turns:
            longest[turn.branch_id] = max(longest[turn.branch_id], turn.prompt_tokens)
            output_tokens += turn.output_tokens
        return sum(longest.values()) + output_tokens

    def forget_ended_branches(self, ended: Turn, *, finished: bool = True) -> list[Branch]:
        """Return and drop side branches that are not used again, after `ended`, a turn of this program.

        When it finished: all that its branch waits for, or one of these, and that had no turn since it arrived, because
        a parent goes on when its sub-agents are through; the main branch waits for all. Those whose tool runs are taken
        for that only after `PARENT_TURNS_COUNT` such turns: a parent may also go on beside them. In any case all idle
        ones but the `IDLE_BRANCHES_COUNT` last used, because a client may name every branch and have no main one.
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
        """Return the branches above one, the main branch with them; parents that name each other in a ring are few."""
        above = {MAIN_BRANCH}
        while (branch := self.branches.get(branch_id)) is not None and branch.parent_id not in above:
            branch_id = branch.parent_id
            above.add(branch_id)
        return above
