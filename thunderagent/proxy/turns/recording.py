"""What a turn adds to its program's rollout: asked of its engine, read from its answer, recorded at its end."""

from __future__ import annotations

from time import monotonic

import structlog
from multidict import CIMultiDict

from thunderagent.leases import Lease
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.capture import Capture, Captured, OutputRead, ask
from thunderagent.proxy.turns.record import Record
from thunderagent.proxy.watch.rollouts import Rollouts
from thunderagent.proxy.wire.request_id import REQUEST_ID
from thunderagent.rollouts.records import (
    Missing,
    Output,
    Rollout,
    Span,
    Turn,
    in_planes,
    logprob_bytes,
    token_bytes,
)
from thunderagent.rollouts.table import Answered

log = structlog.get_logger("thunderagent.rollouts")

_ASKED_IDS = "X-Sglext-Return-Output-Ids"
_ROLE_MARK = b'"assistant"'
_WITH_MESSAGES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class Recording:
    """One turn on its way into its program's rollout."""

    def __init__(self, rollouts: Rollouts, replicas: Replicas, record: Record) -> None:
        """Record a turn that names a program."""
        self._rollouts = rollouts
        self._replicas = replicas
        self._began_at = rollouts.clock()
        turn = record.turn
        self._template = Rollout(
            program_id=turn.program_id or "",
            generation=0,
            tenant=turn.tenant,
            group_id=turn.group_id,
            parent_id=turn.parent_id,
            program_class=turn.program_class,
            began_at=self._began_at,
        )
        self._capture: Capture | None = None
        self._was_granted = False
        self._weights = ("", 0)

    # --- the way to the engine

    def ask(
        self, record: Record, granted: Lease, body: bytes, headers: CIMultiDict[str]
    ) -> tuple[bytes, CIMultiDict[str]]:
        """Return body and headers that ask for the tokens of the answer, as far as its engine has them."""
        self._template.generation = granted.generation
        if not self._was_granted:
            self._was_granted = True
            self._rollouts.granted(self._template)
        self._weights, self._capture = self._weights_of(granted.replica_id), None
        known = self._replicas.known.get(granted.replica_id)
        if known is None or record.method != "POST":
            return body, headers
        kind, path = known.endpoint.backend.kind, record.target.spelt
        asked = ask(kind, path, body, logprobs=self._rollouts.settings.logprobs)
        if asked is None:
            return body, headers
        headers = CIMultiDict(headers)
        headers["Accept-Encoding"] = "identity"  # an encoded answer cannot be edited
        if asked.headers and _ASKED_IDS in headers:  # its client asked, too
            asked = asked._replace(ids_added=False)
        else:
            headers.update(asked.headers)
        self._capture = Capture(kind, path, asked, streams=record.turn.streams)
        return asked.body, headers

    def _weights_of(self, replica_id: str) -> tuple[str, int]:
        known = self._replicas.known.get(replica_id)
        return ("", 0) if known is None else (known.weight_version, known.weight_number)

    # --- the answer

    def reads(self, status: int, encoding: str | None) -> bool:
        """Return whether an answer is read, and edited, here."""
        if status >= 400 or encoding not in (None, "identity"):
            self._capture = None
        return self._capture is not None

    def take_whole(self, body: bytes) -> bytes:
        """Read a whole answer, and return what its client gets."""
        return body if self._capture is None else self._capture.take_whole(body)

    @property
    def pending_bytes(self) -> int:
        """Size of a stream's incomplete event."""
        return 0 if self._capture is None else self._capture.pending_bytes

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes of a stream, and return what its client gets."""
        return piece if self._capture is None else self._capture.feed(piece)

    def rest(self) -> bytes:
        """Return what is left when a stream has ended."""
        return b"" if self._capture is None else self._capture.rest()

    # --- the end

    def ended(self, record: Record, turn_id: int) -> None:
        """Record the turn, whatever became of it. A bug here never fails a turn."""
        try:
            self._ended(record, turn_id)
        except Exception:
            log.exception("rollout_turn_lost", program_id=record.turn.program_id, request_id=REQUEST_ID.get())

    def _ended(self, record: Record, turn_id: int) -> None:
        captured, request = Captured() if self._capture is None else self._capture.captured, record.turn
        if self._capture is not None:
            self._capture.rest()
        if not captured.was_undone:
            log.warning("rollout_fields_left", path=record.target.spelt, replica_id=record.replica_id)
        answered, missing = _answered(captured, asks_logprobs=self._rollouts.settings.logprobs)
        if self._capture is None and self._was_granted and record.outcome == "finished":
            missing = "not_askable"
        version, changes_count = self._weights_of(record.replica_id or "")
        prompt_tokens, _, cached_tokens = record.usage
        turn = Turn(
            seq=0,
            turn_id=turn_id,
            request_id=REQUEST_ID.get(),
            path=record.target.spelt,
            model=record.model,
            streams=request.streams,
            branch_id=request.branch_id,
            replica_id=record.replica_id or "",
            prompt_tokens=prompt_tokens or 0,
            missing=missing,
            weights_before=self._weights[0],
            weights_after=version,
            changes_before=self._weights[1],
            changes_after=changes_count,
            outcome=record.outcome,
            verdict="ok" if record.outcome == "finished" else record.verdict,
            cause=record.cause,
            status=record.status or 0,
            kept=record.outcome == "finished",
            tries_count=record.tries_count,
            reason=record.reason or "",
            began_at=self._began_at,
            held_s=round(record.held_s, 4),
            total_s=round(monotonic() - record.arrived_s, 4),
            cached_tokens=cached_tokens,
            salt=record.salt,
        )
        self._template.generation = record.generation or self._template.generation
        has_answers = _ROLE_MARK in request.body if record.target.spelt in _WITH_MESSAGES else None
        if self._was_granted:
            self._rollouts.record(self._template, turn, answered, has_answers=has_answers)


def _answered(captured: Captured, *, asks_logprobs: bool) -> tuple[Answered, Missing]:
    """Return what was read, packed, and what is missing of it."""
    if captured.prompt is None or not captured.outputs:
        return Answered(), "unreadable" if captured.is_unreadable else "no_ids"
    missing: Missing = "unreadable" if captured.is_unreadable else ""
    answered = Answered(captured.prompt)
    for _, read in sorted(captured.outputs.items()):
        tokens = token_bytes(read.ids)
        has_logprobs = len(read.logprobs) == len(read.ids)
        if asks_logprobs and not has_logprobs:
            missing = missing or "no_logprobs"
        answered.tokens.append(tokens)
        answered.outputs.append(_output(read, tokens, has_logprobs=has_logprobs))
    return answered, missing


def _output(read: OutputRead, tokens: bytes, *, has_logprobs: bool) -> Output:
    logprobs = in_planes(logprob_bytes(read.logprobs)) if has_logprobs else b""
    return Output(in_planes(tokens), logprobs, read.finish, [Span(*each) for each in read.spans])
