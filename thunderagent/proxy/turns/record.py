"""What is known of one turn: for its lease request, for its canonical line, for the headers of its answer."""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from thunderagent.leases import FAIL_OPEN, TurnAsk
from thunderagent.log_lines import TurnLine
from thunderagent.programs.model.records.limits import least_of
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.answer_errors import AnswerError
from thunderagent.proxy.reading.answers import Completions
from thunderagent.proxy.reading.dialects import NO_USAGE, Dialect
from thunderagent.proxy.reading.identity import TurnRequest
from thunderagent.proxy.reading.inference import Chain, Key, Prompt
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns.aborts import is_abortable
from thunderagent.proxy.turns.attempts import Attempt
from thunderagent.proxy.turns.heartbeat import HeldStream
from thunderagent.proxy.wire.headers import FAIL_OPEN_HEADER, HOLD_HEADER, REPLICA_HEADER, identity_headers


class Record:
    """One turn: what it is, where it ran, and its result. Unless it ends otherwise, its client left."""

    maker_id: str | None = None
    """The replica that made the response from which it continues, if known: no other has it."""
    held_stream: HeldStream | None = None
    """What a held stream sends; its head may have been sent."""
    chain: Chain | None = None
    prompt_key: Key | None = None
    """The key of its prompt, if the program was inferred from that."""
    tenancy: Tenancy | None = None
    """Decides what it may touch; None if it may touch everything."""
    completions: Completions | None = None
    """What is answered, if the program was inferred: its next prompt begins with that."""
    model = ""
    """Its model, if that matters."""
    generation = 0
    """The generation of its program, from its last lease."""
    outcome = "abandoned"
    verdict = "client_left"
    """Whose doing its end was: a `TurnVerdict`."""
    cause = ""
    """The code of an error, or the status of an answer, if it ended badly."""
    status: int | None = None
    replica_id: str | None = None
    reason: str | None = None
    held_s = 0.0
    error: AnswerError | None = None
    """What the engine reported inside an answer with status 200."""
    first_error: AnswerError | None = None
    """What its answer began with, if that is an error of the engine's own."""
    had_head = False
    """Whether its engine had begun an answer that broke off: only one that went down may have it begun again."""
    tries_count = 0
    unsent_count = 0
    """How many of the tries did not run: they were not sent, or refused for want of room."""
    incarnation = 0
    """That of the replica to which it was last sent."""
    lost_count = 0
    """How many of its replicas went down with it, beyond its tries."""
    failed_ids: tuple[str, ...] = ()
    """Replicas that answered it 5xx, or began an answer with an error."""
    probe: asyncio.Future[bool] | None = None
    tool = ""
    salt = ""
    """What its engine was told to separate its cache by, with the last try; empty if nothing."""
    recording: Any = None
    """Its part of a rollout, a `Recording`; None if nothing is recorded. A Protocol's default is lost when compiled."""

    def __init__(
        self,
        turn: TurnRequest,
        method: str,
        target: Target,
        dialect: Dialect,
        arrived_s: float,
        body: bytes,
        prompt: Prompt | None = None,
        chosen_id: str | None = None,
    ) -> None:
        """Create a turn without a lease. The answer is read if its `prompt` was."""
        self.turn = turn
        self.usage = NO_USAGE
        self.method = method
        self.target = target
        self.dialect = dialect
        self.arrived_s = arrived_s
        self.prompt_bytes = len(turn.body) - turn.media.size_bytes if turn.has_whole_prompt else 0
        self.held_bytes = len(body) + (len(turn.body) if turn.body is not body else 0)
        """What is kept of it until it has run: the body as received, and as forwarded."""
        self.chosen_id = chosen_id
        """The only replica that it may run on."""
        if prompt is not None:
            self.chain, self.completions = prompt.chain(), Completions(dialect)
            self.prompt_key = self.chain.key()

    def failed(self, cause: str) -> None:
        """Note that its replica failed it after its answer had begun."""
        self.outcome, self.verdict, self.cause = "failed", "infrastructure_failed", cause

    def refused(self) -> None:
        """Note an engine's refusal: 4xx are of the agent's making, except 429, and 5xx are not."""
        status = self.status or 0
        is_agents = 400 <= status < 500 and status != 429
        self.outcome, self.cause = "refused", f"status {status}"
        self.verdict = "agent_error" if is_agents else "infrastructure_failed"

    def line(self, duration_s: float, request_id: str) -> TurnLine:
        """Return its canonical line, once it has ended."""
        prompt_tokens, output_tokens, cached_tokens = self.usage
        if self.outcome == "finished":
            self.verdict = "ok"
        elif self.outcome == "refused" and not self.cause:
            self.refused()
        elif self.outcome in ("failed", "rejected") and not self.cause:
            self.verdict = "infrastructure_failed"
        return TurnLine(
            event="turn",
            timestamp=datetime.now(UTC),
            program_id=self.turn.program_id,
            replica_id=self.replica_id,
            outcome=self.outcome,
            verdict=self.verdict,
            cause=self.cause,
            status=self.status,
            reason=self.reason,
            held_s=round(self.held_s, 4) if self.held_s else 0.0,
            duration_s=int(duration_s * 1e4 + 0.5) / 1e4,  # round() goes by a text
            tries_count=self.tries_count,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            tool=self.tool,
            request_id=request_id,
        )

    def headers(self) -> dict[str, str]:
        """Return the headers about the turn for its answer."""
        turn = self.turn
        headers = identity_headers(turn.program_id or turn.told_id or None, turn.source)
        headers[HOLD_HEADER] = str(round(self.held_s * 1000)) if self.held_s else "0"
        if self.replica_id is not None:
            headers[REPLICA_HEADER] = self.replica_id
            if self.reason == FAIL_OPEN:
                headers[FAIL_OPEN_HEADER] = "1"
        return headers


def ask_for(
    record: Record,
    attempt: Attempt,
    now_s: float,
    deadline_s: float | None,
    avoid_replica_id: str | None,
    wanted_id: str | None,
) -> TurnAsk:
    """Return all that a scheduler may know of a turn.

    Its client gives up at `deadline_s`. It runs at `wanted_id`, if one is named: an anonymous turn that names its
    program runs beside that.
    """
    turn = record.turn
    limits = attempt.patience.limits
    if record.tenancy is not None and turn.program_id is not None:
        limits = least_of(record.tenancy.program_limits, limits)
    waited = record.tries_count or attempt.patience.retry_count
    return TurnAsk(
        turn_id=attempt.turn_id,
        program_id=turn.program_id,
        branch_id=turn.branch_id,
        parent_branch_id=turn.parent_branch_id,
        parent_id=turn.parent_id,
        tenant=turn.tenant,
        group_id=turn.group_id,
        program_class=turn.program_class,
        role=turn.role,
        prompt_bytes=record.prompt_bytes,
        prefix=turn.prefix,
        media=turn.media.media,
        patience_s=None if deadline_s is None else deadline_s - now_s,
        waited_s=now_s - attempt.since_s if waited else None,
        supersedes_id=attempt.supersedes_id,
        avoid_replica_id=avoid_replica_id,
        pinned_replica_id=record.chosen_id,
        wanted_replica_id=record.maker_id or wanted_id,
        abortable=is_abortable(record.target.engine_path, has_token_prompt=turn.has_token_prompt),
        model=record.model,
        hint=attempt.patience.hint or turn.hint,
        engine_request_id=turn.engine_request_id,
        limits=limits,
    )
