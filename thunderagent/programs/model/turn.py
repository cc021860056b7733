"""A turn, and a branch: one request of a program, and one context chain inside it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from thunderagent.programs.messages import Media

if TYPE_CHECKING:
    from thunderagent.programs.model.advice.routes import Route
    from thunderagent.programs.model.program import Program

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

    def learn(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Set the size of the branch from the usage of a turn; return whether that is believed.

        A much shorter prompt is a side turn (a title, a summary) and changes nothing; when a second one follows, the
        branch was really cut (a compaction) and its size is believed.
        """
        if prompt_tokens < SIDE_TURN_RATIO * self.context_tokens:
            self.side_turn_count += 1
            if self.side_turn_count < 2:
                return False
        self.side_turn_count = 0
        self.context_tokens = prompt_tokens + output_tokens
        self.prompt_tokens = prompt_tokens
        return True

    def turn_finished(self, tool: str) -> None:
        """Note whether it goes on by itself: it does if its answer called a tool."""
        self.parent_turns_count = PARENT_TURNS_COUNT if tool else 0
