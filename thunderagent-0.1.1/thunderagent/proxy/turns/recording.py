"""What a turn adds to its program's rollout: asked of its engine, cut out of its answer, kept at its end.

Nothing is decoded or compared on the turn's way: that is done later, or when somebody reads the rollout.
"""

# compiled: each recorded turn passes here

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import Final

import structlog
from multidict import CIMultiDict, CIMultiDictProxy, istr

from thunderagent.leases import Lease
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.reading.capture import Capture, Captured, ask
from thunderagent.proxy.reading.exact_prefix import Chat, Prefix, Refused
from thunderagent.proxy.reading.outline import read_aside
from thunderagent.proxy.reading.taken import Taken
from thunderagent.proxy.turns.exact_prefixes import Answered, ExactPrefixes, Supplied
from thunderagent.proxy.turns.record import Record
from thunderagent.proxy.watch.rollouts import Rollouts
from thunderagent.proxy.wire.headers import REQUEST_ID
from thunderagent.rollouts.records import Rollout, Turn
from thunderagent.rollouts.table import Entry

log = structlog.get_logger("thunderagent.rollouts")

_ACCEPT_ENCODING: Final = istr("Accept-Encoding")
_ASKED_IDS: Final = istr("X-Sglext-Return-Output-Ids")
_ROLE_MARK: Final = b'"assistant"'
_WITH_MESSAGES: Final = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})


class Recording:
    """One turn on its way into its program's rollout."""

    def __init__(self, rollouts: Rollouts, replicas: Replicas, prefixes: ExactPrefixes | None = None) -> None:
        """Record a turn that names a program."""
        self.prefixes = prefixes
        """What makes exact prompts, if anything does."""
        self.supplied: Supplied | None = None
        """The exact prompt that was sent."""
        self._prefix: Prefix | None = None
        """Why there is none, if one was wanted."""
        self._chat: Chat | None = None
        self._granted: Lease | None = None
        self._pieces: list[bytes] = []
        """Of a stream, as its client gets it; kept if the chat is."""
        self._rollouts = rollouts
        self._replicas = replicas
        self._began_at = rollouts.clock()
        self._logprobs = rollouts.settings.logprobs
        self._entry: Entry | None = None
        """Its program's rollout, once an engine gets it."""
        self._capture: Capture | None = None
        self._edited: bytes | None = None
        """The whole answer as its client gets it, once it was read."""
        self._version = ""
        self._number = 0
        """Weights of its replica when it was granted."""

    # --- the way to the engine

    async def supply(
        self,
        said: CIMultiDictProxy[str],
        record: Record,
        granted: Lease,
        headers: CIMultiDict[str],
        body: bytes,
    ) -> bytes:
        """Return the body with an exact prompt, if one is certain, and wanted by what its client `said`."""
        assert self.prefixes is not None
        self.supplied, self._prefix, self._granted = None, None, granted
        known = self._replicas.known.get(granted.replica_id)
        if known is None or not self.prefixes.supplies(said):
            return body
        try:
            kind = known.endpoint.backend.kind if record.method == "POST" else ""
            self.prefixes.check(kind, record.target.spelt)
            if self._chat is None:
                self._chat = await read_aside(partial(Chat, body), len(body))
            self.supplied = await self.prefixes.supply(self._chat, kind, granted, headers, body)
        except Refused as refused:
            self._prefix = refused.why
            return body
        return self.supplied.body

    def not_taken(self) -> None:
        """Note that the engine refused a turn with an exact prompt: it gets it as its client sent it."""
        self.supplied, self._prefix = None, "engine"

    def ask(
        self, record: Record, granted: Lease, body: bytes, headers: CIMultiDict[str]
    ) -> tuple[bytes, CIMultiDict[str]]:
        """Return body and headers that ask for the tokens of the answer, as far as its engine has them."""
        if self._entry is None:
            self._entry = self._entry_of(record, granted.generation)
            self._entry.rollout.granted_count += 1
        self._capture, self._edited, self._pieces = None, None, []
        known = self._replicas.known.get(granted.replica_id)
        self._version, self._number = ("", 0) if known is None else (known.weight_version, known.weight_number)
        if known is None or record.method != "POST":
            return body, headers
        kind, path = known.endpoint.backend.kind, record.target.spelt
        asked = ask(kind, path, body, logprobs=self._logprobs)
        if asked is None:
            return body, headers
        if asked.headers:
            headers = CIMultiDict(headers)  # other attempts go elsewhere
        headers[_ACCEPT_ENCODING] = "identity"  # an encoded answer cannot be edited
        if asked.headers and _ASKED_IDS in headers:  # its client asked, too
            asked.ids_added = False
        elif asked.headers:
            headers.update(asked.headers)
        self._capture = Capture(kind, path, asked, streams=record.turn.streams)
        return asked.body, headers

    def _entry_of(self, record: Record, generation: int) -> Entry:
        turn, table = record.turn, self._rollouts.table
        program_id = turn.program_id or ""
        entry = table.live(program_id, generation)
        if entry is not None:
            return entry
        return table.begin(
            Rollout(
                program_id=program_id,
                generation=generation,
                tenant=turn.tenant,
                group_id=turn.told.get("group_id", ""),
                parent_id=turn.told.get("parent_id", ""),
                program_class=turn.told.get("program_class", ""),
                began_at=self._began_at,
            )
        )

    # --- the answer

    def reads(self, status: int, encoding: str | None) -> bool:
        """Return whether an answer is read, and edited, here."""
        if status >= 400 or encoding not in (None, "identity"):
            self._capture = None
        return self._capture is not None

    def take_whole(self, body: bytes) -> bytes:
        """Read a whole answer, and return what its client gets: it is read once for all who ask."""
        if self._capture is None:
            return body
        if self._edited is None:
            self._edited = self._capture.take_whole(body)
        return self._edited

    @property
    def pending_bytes(self) -> int:
        """Size of a stream's incomplete event."""
        return 0 if self._capture is None else self._capture.pending_bytes

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes of a stream, and return what its client gets."""
        if self._capture is None:
            return piece
        fed = self._capture.feed(piece)
        if self._chat is not None:
            self._pieces.append(fed)
        return fed

    def rest(self) -> bytes:
        """Return what is left when a stream has ended."""
        return b"" if self._capture is None else self._capture.rest()

    # --- the end

    def ended(self, record: Record, turn_id: int) -> None:
        """Record the turn, whatever became of it. A bug here never fails a turn."""
        if self._entry is None:
            return
        try:
            self._ended(self._entry, record, turn_id)
        except Exception:
            log.exception("rollout_turn_lost", program_id=record.turn.program_id, request_id=REQUEST_ID.get())
            self._rollouts.lost(self._entry)

    def _ended(self, entry: Entry, record: Record, turn_id: int) -> None:
        request, path, is_finished = record.turn, record.target.spelt, record.outcome == "finished"
        captured: Captured | None = None
        if self._capture is not None:
            self._capture.rest()
            captured = self._capture.kept
            if not captured.was_undone:
                log.warning("rollout_fields_left", path=path, replica_id=record.replica_id)
        replica_id = record.replica_id or ""
        known = self._replicas.known.get(replica_id)
        prompt_tokens, _, cached_tokens = record.usage
        turn = Turn(
            seq=0,
            turn_id=turn_id,
            request_id=REQUEST_ID.get(),
            path=path,
            model=record.model,
            streams=request.streams,
            branch_id=request.branch_id,
            replica_id=replica_id,
            prompt_tokens=prompt_tokens or 0,
            missing="not_askable" if is_finished else "no_ids",
            weights_before=self._version,
            weights_after="" if known is None else known.weight_version,
            changes_before=self._number,
            changes_after=0 if known is None else known.weight_number,
            outcome=record.outcome,
            verdict="ok" if is_finished else record.verdict,
            cause=record.cause,
            status=record.status or 0,
            kept=is_finished,
            tries_count=record.tries_count,
            reason=record.reason or "",
            began_at=self._began_at,
            held_s=_rounded(record.held_s),
            total_s=_rounded(monotonic() - record.arrived_s),
            cached_tokens=cached_tokens,
            salt=record.salt,
        )
        if self.prefixes is not None and (self._prefix is not None or self.supplied is not None):
            turn.prefix = self._prefix_of(self.prefixes, entry, record, captured)
        has_answers = request.body.rfind(_ROLE_MARK) >= 0 if path in _WITH_MESSAGES else None
        if record.generation and record.generation != entry.rollout.generation:
            entry = self._moved(entry, record)
        table = self._rollouts.table
        if captured is not None and table.is_behind:
            captured, turn.missing = None, "too_large"
        taken = Taken(
            turn, captured, has_answers=has_answers, logprobs=self._logprobs, prompt_bytes=record.prompt_bytes
        )
        if table.take(entry, taken):
            self._rollouts.attend(entry)

    def _prefix_of(self, prefixes: ExactPrefixes, entry: Entry, record: Record, captured: Captured | None) -> Prefix:
        """Return what became of the turn's prompt, and have the turn remembered for the next one's."""
        prefix: Prefix = self._prefix or "engine"
        if captured is not None and self._chat is not None and self._granted is not None:
            body = self._edited if self._edited is not None else b"".join(self._pieces)
            prompt_tokens, output_tokens, _ = record.usage
            counts = (prompt_tokens, output_tokens) if record.outcome == "finished" else (None, None)
            answered = Answered(body, counts, self.supplied, streams=self._edited is None)
            prefix = prefixes.ended(self._chat, entry.rollout.tenant, self._granted, captured, answered) or prefix
        prefixes.count(prefix)
        return prefix

    def _moved(self, entry: Entry, record: Record) -> Entry:
        """Return the rollout of a later generation, in which a turn was tried again."""
        entry.rollout.granted_count -= 1
        entry = self._entry = self._entry_of(record, record.generation)
        entry.rollout.granted_count += 1
        return entry


def _rounded(seconds: float) -> float:
    return int(seconds * 1e4 + 0.5) / 1e4  # round() goes by a text
