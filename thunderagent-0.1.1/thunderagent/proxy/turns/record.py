"""One turn, as whoever carries it knows it: read from its request, tried, answered, and written down.

Theory of operation
===================
A request is read once: whose turn it is and which parts of its body are ours (`reading/identity.py`), and how long its
client waits, how often it tried before, and when it will ask again, by its own headers. All that is known of it then is
a `Record`: it says what a scheduler may know (`ask_for`), and has its canonical line and the headers of its answer.

**Patience.** `openai` and `anthropic` for Python send `x-stainless-read-timeout` with every request: the seconds that
they wait for the next byte (600.0 by default, nothing if their timeout is None), and `x-stainless-retry-count`: 0, 1,
2. Their TypeScript twins send `x-stainless-timeout`, seconds too. Any other client may send `X-Program-Patience`. A
value that is not a number in other people's headers is no error. `X-Program-Limits: max_turns=50, deadline_s=600` says
what the program may use (`ProgramLimits`). `X-Program-Hint: next_turn_in_s=12.5, confidence=0.8`
says when the program's next turn comes, counted from the end of this one; `keep=retain` or `keep=offload` what may
become of its memory until then. It is a dictionary of RFC 8941.

**Attempts.** When a client retries a turn, the new attempt replaces the old one: one turn, not two. A client that gives
up closes its connection, and its turn ends. But an intermediary may keep that connection open, and then the old attempt
would hold its place, or generate, for nobody. And a client that returns after it gave up should not go to the end of
the queue.

What makes an attempt the same turn? The same program, branch, path and body are not enough: n samples of one prompt are
the same too, sent together on purpose, and must not end each other. So the client must say so:

- the same `Idempotency-Key` as the old attempt; or
- a retry count of 1 or more (`x-stainless-retry-count`), where the old attempt has a smaller one and was never beside
  another of the same body: those are samples, and it is unknown which of them is retried. Attempts with different keys
  are two turns, whatever the count.

If the old attempt already ended without an answer, only its age is left, and goes to the next turn of the same body,
whether or not its client says that it is a retry: transports that give up by themselves do not.
Anonymous turns need both, key and count.

**Observed patience.** If two attempts in a row were given up before an answer began, after nearly the same time, a
timer did that. The next attempt counts on it, whatever its client says: it is let in before (`rules/patience.py`).
People and programs that end for other reasons leave at different times. A client gains nothing that it could not say
by a header.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from multidict import CIMultiDictProxy, istr

from thunderagent.errors import (
    ProgramKilledError,
    ProgramReleasedError,
    ProgramStaleError,
    RequestError,
    ThunderAgentError,
    TurnSupersededError,
)
from thunderagent.leases import FAIL_OPEN, Lease, TurnAsk, TurnHint
from thunderagent.log_lines import TurnLine
from thunderagent.programs.messages import MAX_NEXT_TURN_S, OFFLOAD, RETAIN, ProgramLimits, least_of
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.answers import AnswerError, Completions
from thunderagent.proxy.reading.body_fields import in_utf8
from thunderagent.proxy.reading.dialects import NO_USAGE, TURN_DIALECTS, Dialect, Usage
from thunderagent.proxy.reading.header_words import LIMITS_HEADER, limits_of, number_of, seconds_of, wrong_key
from thunderagent.proxy.reading.identity import IdentityRules, TurnRequest, identify, identify_side_call
from thunderagent.proxy.reading.inference import Chain, Key, Prompt, prompt_of
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.turns.aborts import ABORTABLE_PATHS, COMPLETIONS_PATH
from thunderagent.proxy.turns.heartbeat import HeldStream
from thunderagent.proxy.wire.headers import FAIL_OPEN_HEADER, HOLD_HEADER, NOTE_HEADER, REPLICA_HEADER, put_identity

# --- What its client says of its waiting

PATIENCE_HEADER: Final = istr("X-Program-Patience")
TIMEOUT_HEADERS = (istr("X-Stainless-Read-Timeout"), istr("X-Stainless-Timeout"))
RETRY_HEADER: Final = istr("X-Stainless-Retry-Count")
IDEMPOTENCY_HEADER: Final = istr("Idempotency-Key")
HINT_HEADER: Final = istr("X-Program-Hint")

RUNTIME_HEADER: Final = istr("X-Stainless-Runtime")
USER_AGENT: Final = istr("User-Agent")
TRANSPORT_S: Final = 290.0
"""Node's `fetch` gives up after 300 s without a byte, whatever its user allows; so do clients built on it."""
_GIVES_UP: Final = ("opencode/", "ai-sdk/")
"""What names such clients that do not name their runtime, in their `User-Agent`."""

LARGEST_COUNT: Final = 1000


class Patience(NamedTuple):
    """A client's stated patience; `patience_s` None is for ever.

    With `counts_bytes` every byte that arrives renews it. `retry_count` is 0 at the first attempt. `hint` is about what
    comes after the turn, `limits` are those of its program.
    """

    patience_s: float | None = None
    counts_bytes: bool = False
    retry_count: int = 0
    idempotency_key: str = ""
    hint: TurnHint | None = None
    limits: ProgramLimits | None = None


def patience_of(
    headers: Mapping[str, str], default_s: float | None = None, notes: dict[str, Any] | None = None
) -> Patience:
    """Read the patience; `default_s` is for clients without one. `notes` are those of the head, if read before.

    Raises `RequestError` for an invalid header of ours.
    """
    known: Patience | None = None if notes is None else notes.get("patience")
    if known is None:
        known = _patience_of(headers, default_s)
        if notes is not None:
            notes["patience"] = known
    return known


def _patience_of(headers: Mapping[str, str], default_s: float | None) -> Patience:
    patience_s, counts_bytes = default_s, False
    if PATIENCE_HEADER in headers:
        patience_s = seconds_of(headers[PATIENCE_HEADER])
        if patience_s is None:
            raise RequestError(f"{PATIENCE_HEADER} is a number of seconds over 0, not {headers[PATIENCE_HEADER]!r}")
    else:
        for name in TIMEOUT_HEADERS:
            if name in headers and (said_s := seconds_of(headers[name])) is not None:
                patience_s, counts_bytes = said_s, name == TIMEOUT_HEADERS[0]
                break
        if _gives_up_early(headers) and (patience_s is None or patience_s > TRANSPORT_S):
            patience_s, counts_bytes = TRANSPORT_S, True
    retry_count = _retry_count(headers[RETRY_HEADER]) if RETRY_HEADER in headers else 0
    hint = hint_of(headers[HINT_HEADER]) if HINT_HEADER in headers else None
    limits = limits_of(headers) if LIMITS_HEADER in headers else None
    return Patience(patience_s, counts_bytes, retry_count, headers.get(IDEMPOTENCY_HEADER, ""), hint, limits)


def _gives_up_early(headers: Mapping[str, str]) -> bool:
    if RUNTIME_HEADER in headers:
        return headers[RUNTIME_HEADER].lower() == "node"
    agent = headers.get(USER_AGENT, "").lower()
    return any(name in agent for name in _GIVES_UP)


def hint_of(text: str) -> TurnHint:
    """Read the value of `X-Program-Hint`. Raises `RequestError` if it is invalid."""
    fields = [field.partition("=") for field in text.split(",")]
    said = {name.strip(): value.strip() for name, _, value in fields}
    seconds, confidence, keep = said.pop("next_turn_in_s", None), said.pop("confidence", "1"), said.pop("keep", "")
    next_turn_in_s, confidence_ratio = None if seconds is None else number_of(seconds), number_of(confidence)
    is_read = confidence_ratio is not None and (next_turn_in_s is not None or (keep and seconds is None))
    if said or not is_read or keep not in ("", RETAIN, OFFLOAD):
        raise _wrong_hint(text, said)
    assert confidence_ratio is not None
    if not 0 <= (next_turn_in_s or 0.0) <= MAX_NEXT_TURN_S or not 0 <= confidence_ratio <= 1:
        raise _wrong_hint(text)
    return TurnHint(next_turn_in_s, confidence_ratio, keep)


def _wrong_hint(text: str, unknown: Iterable[str] = ()) -> RequestError:
    example = "next_turn_in_s=12.5, confidence=0.8, or keep=retain or keep=offload"
    key = wrong_key(unknown, ("next_turn_in_s", "confidence", "keep"))
    return RequestError(f"{HINT_HEADER} is like {example}, not {text[:100]!r}{key}")


def _retry_count(text: str) -> int:
    return min(LARGEST_COUNT, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 0


# --- Whose turn a request is


def read_turn(
    target: Target,
    headers: CIMultiDictProxy[str],
    body: bytes,
    rules: IdentityRules,
    tenancy: Tenancy | None,
    notes: dict[str, Any] | None = None,
    chosen_id: str | None = None,
) -> tuple[TurnRequest, Prompt | None]:
    """Return whose turn a head (perhaps with `notes`) and a body are.

    The second is its prompt, if the program must be inferred from it. A body that is not a JSON object, or an unknown
    API, makes an anonymous turn; so does a replica that the client chose.
    """
    if body[:1] != b"{" or body[1:2] == b"\0":
        body = in_utf8(body)
    if tenancy is not None:
        rules = tenancy.rules(rules)
    dialect = TURN_DIALECTS.get(target.spelt)
    turn = identify(target.program_id, headers, body, rules, dialect, notes) if dialect is not None else None
    prompt = None
    if dialect is None or turn is None:
        turn = _unread(target, headers, body, rules)
        if tenancy is not None:
            turn.tenant = tenancy.named("")
        if tenancy is not None and not tenancy.may_touch(turn.told_id or None):
            turn.told_id = ""
    else:
        if tenancy is not None and (tenant := tenancy.named(turn.tenant)) != turn.tenant:
            turn.tenant = tenant
        if turn.program_id is None and (rules.infers_programs or turn.bucket) and turn.has_whole_prompt:
            prompt = prompt_of(body, dialect, turn.tenant, turn.bucket)
    if chosen_id is not None:
        turn.program_id, turn.source, turn.is_final, turn.told_id = None, "anonymous", False, ""
        return turn, None
    return turn, prompt


def _unread(target: Target, headers: CIMultiDictProxy[str], body: bytes, rules: IdentityRules) -> TurnRequest:
    """Return an anonymous turn; its answer still names its program, and it runs beside that if it may.

    The size of sound or pictures says nothing about the prompt.
    """
    call = identify_side_call(target.program_id, headers, body, rules)
    has_text = headers.get("Content-Type", "").partition("/")[0].lower() not in ("multipart", "audio", "image")
    return TurnRequest(
        None,
        call.source,
        "",
        call.body,
        usage_added=False,
        prefix=(),
        has_whole_prompt=has_text,
        told_id=call.program_id or "",
        is_unknown=target.spelt not in TURN_DIALECTS,
        model=call.model,
    )


# --- The turn


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
    is_judged = False
    """Whether `error` is known of the whole answer, before it is relayed."""
    sound_usage: Usage | None = None
    """The usage in a whole answer that surely reports no error, if it was read so."""
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
    first_s: float | None = None
    """From its arrival to the first bytes of its stream, if that came to its end."""
    between_s: float | None = None
    """Mean time between two events of that."""
    tool = ""
    salt = ""
    """What its engine was told to separate its cache by, with the last try; empty if nothing."""
    recording: Any = None
    """Its part of a rollout, a `Recording`; None if nothing is recorded. A Protocol's default is lost when compiled."""

    key: str | None = None
    """What attempts at one turn certainly share; None for an anonymous one without it."""
    supersedes_id: int | None = None
    """The attempt that it replaces."""
    waited_before_s = 0.0
    """How long the client waited for the attempt before, if it gave that up."""
    observed_s: float | None = None
    """After how long its client gives up, as seen twice."""
    is_sample = False
    """Whether another of the same body ran beside it."""
    superseded = False
    aborted_for = ""
    """The code of the error that it ends with, if its program was ended and it was to end, too."""

    def __init__(
        self,
        turn: TurnRequest,
        patience: Patience,
        method: str,
        target: Target,
        dialect: Dialect,
        body: bytes,
        arrived_s: float,
        since_s: float,
        turn_id: int,
        task: asyncio.Task[object] | None,
        prompt: Prompt | None = None,
        chosen_id: str | None = None,
    ) -> None:
        """Create a turn without a lease. The answer is read if its `prompt` was.

        It is carried by `task`. The first attempt at it came at `since_s`, by the clock of its leases.
        """
        self.turn = turn
        self.patience = patience
        self.path = target.sent if chosen_id is None else target.prefix + target.sent
        self.task = task
        self.turn_id = turn_id
        self.since_s = since_s
        self.began_s = since_s
        """When this attempt came, by the same clock."""
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

    def is_same(self, other: Record) -> bool:
        """Return whether two attempts of one program ask for the same."""
        return (
            self.path == other.path
            and self.turn.branch_id == other.turn.branch_id
            and len(self.turn.body) == len(other.turn.body)
            and self.turn.body == other.turn.body
        )

    def granted(self, lease: Lease) -> None:
        """Note where it runs, and how long it was held."""
        self.supersedes_id = None
        self.replica_id = lease.replica_id
        self.generation = lease.generation
        self.reason = lease.reason
        self.held_s += lease.held_s
        self.tries_count += 1

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
        headers: dict[str, str] = {}
        self.put_headers(headers)
        return headers

    def put_headers(self, headers: MutableMapping[str, str]) -> None:
        """Put the headers about the turn into those of its answer."""
        turn = self.turn
        program_id = turn.program_id or turn.told_id
        if program_id:
            put_identity(headers, program_id, turn.source)
        headers[HOLD_HEADER] = str(round(self.held_s * 1000)) if self.held_s else "0"
        if self.replica_id is not None:
            headers[REPLICA_HEADER] = self.replica_id
            if self.reason == FAIL_OPEN:
                headers[FAIL_OPEN_HEADER] = "1"
        if turn.note:
            headers[NOTE_HEADER] = turn.note


def ask_for(
    record: Record,
    now_s: float,
    deadline_s: float | None,
    avoid_replica_id: str | None,
    wanted_id: str | None,
) -> TurnAsk:
    """Return all that a scheduler may know of a turn.

    Its client gives up at `deadline_s`. It runs at `wanted_id`, if one is named: an anonymous turn that names its
    program runs beside that.
    """
    turn, path = record.turn, record.target.engine_path
    limits = record.patience.limits
    if record.tenancy is not None and turn.program_id is not None:
        limits = least_of(record.tenancy.program_limits, limits)
    waited = record.tries_count or record.patience.retry_count
    ask = TurnAsk(
        turn_id=record.turn_id,
        program_id=turn.program_id,
        branch_id=turn.branch_id,
        tenant=turn.tenant,
        prompt_bytes=record.prompt_bytes,
        prefix=turn.prefix,
        media=turn.media.media,
        patience_s=None if deadline_s is None else deadline_s - now_s,
        waited_s=now_s - record.since_s if waited else None,
        supersedes_id=record.supersedes_id,
        avoid_replica_id=avoid_replica_id,
        pinned_replica_id=record.chosen_id,
        wanted_replica_id=record.maker_id or wanted_id,
        abortable=path in ABORTABLE_PATHS or (turn.has_token_prompt and path == COMPLETIONS_PATH),
        model=record.model,
        hint=record.patience.hint or turn.hint,
        engine_request_id=turn.engine_request_id,
        limits=limits,
    )
    for name, word in turn.told.items():
        setattr(ask, name, word)
    return ask


# --- Its attempts

REMEMBER_S: Final = 120.0
"""How long an attempt that ended without an answer is remembered: clients usually wait seconds between tries."""

REMEMBER_COUNT: Final = 10_000
HASHED_BYTES: Final = 2**20
TOLD_BYTES: Final = 2**12
"""The end of a body by which another gateway knows it, together with its size, its client's key and tenant."""


LEAST_OBSERVED_S: Final = 5.0
"""Clients that leave sooner do so for other reasons than their timers."""

ALIKE_S: Final = 1.0
ALIKE_RATIO: Final = 0.02
"""How far two times may differ that the same timer took: this, or this part of them if that is more. Node's timers are
early or late by a second."""


class Ended(NamedTuple):
    """An attempt that ended without an answer: `since_s` is the arrival of the first at its turn.

    `waited_s` is how long its client waited before it gave up, 0 if it did not. `observed_s` is its patience, if known.
    """

    since_s: float
    ended_s: float
    turn_id: int
    waited_s: float
    observed_s: float | None


Place = tuple[str, str, str, int, int]


class Attempts:
    """The current attempts, by program, and the ages of those that ended without an answer."""

    def __init__(self) -> None:
        """Start without attempts."""
        self._live: dict[str, list[Record]] = {}
        self._ended: OrderedDict[Place, Ended] = OrderedDict()
        self._ended_of: Counter[str] = Counter()
        """How many of them each key has: the body of a turn is hashed only where one may have come before."""

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def begin(self, attempt: Record, now_s: float) -> None:
        """Add an attempt; it replaces the one before, which is cancelled, or at least takes over its age."""
        key = attempt.key = attempt.turn.program_id or _anonymous_key(attempt)
        if key is None:
            return
        live = self._live.get(key)
        if live is None:
            self._live[key] = [attempt]
            if key in self._ended_of:
                self._goes_on(attempt, now_s)
            return
        others = [other for other in live if not other.superseded and other.is_same(attempt)]
        earlier = _earlier_of(attempt, others)
        if earlier is not None:
            others.remove(earlier)
            attempt.since_s = earlier.since_s
            attempt.is_sample = earlier.is_sample
            attempt.supersedes_id = earlier.turn_id
            earlier.superseded = True
            if earlier.task is not None:
                earlier.task.cancel()
        elif key in self._ended_of:
            self._goes_on(attempt, now_s)
        for each in (attempt, *others) if others else ():
            each.is_sample = True
        live.append(attempt)

    def _goes_on(self, attempt: Record, now_s: float) -> None:
        """Give an attempt the age of the one before, if that recently ended without an answer."""
        ended = self._ended.pop(_place_of(attempt), None)
        if ended is not None:
            self._one_less(attempt.key or "")
        if ended is not None and now_s - ended.ended_s <= REMEMBER_S:
            attempt.since_s, attempt.supersedes_id = ended.since_s, ended.turn_id
            attempt.waited_before_s, attempt.observed_s = ended.waited_s, ended.observed_s

    def revoke(self, program_id: str, turn_id: int | None, code: str = "") -> int:
        """Cancel an attempt, because the next one at the same turn came to another gateway; return how many.

        With a `code` it ends with that error, because its program does; without a `turn_id` all of its attempts do.
        """
        revoked_count = 0
        for attempt in self._live.get(program_id, ()):
            if turn_id in (None, attempt.turn_id) and not attempt.superseded:
                attempt.superseded, attempt.aborted_for = True, code
                if attempt.task is not None:
                    attempt.task.cancel()
                revoked_count += 1
        return revoked_count

    def end(self, attempt: Record, now_s: float, *, answered: bool, gave_up: bool = False) -> None:
        """Remove an attempt; one without an answer may come again. `gave_up`: its client left before one began."""
        key = attempt.key
        if key is None:
            return
        live = self._live[key]
        if len(live) == 1:
            del self._live[key]
        else:
            live.remove(attempt)
        if not answered and not attempt.superseded:
            waited_s = now_s - attempt.began_s if gave_up else 0.0
            self._remember(_place_of(attempt), attempt, now_s, waited_s)

    def _remember(self, place: Place, attempt: Record, now_s: float, waited_s: float) -> None:
        if place not in self._ended:
            self._ended_of[place[0]] += 1
        observed_s = _observed_s(attempt.waited_before_s, waited_s)
        self._ended[place] = Ended(attempt.since_s, now_s, attempt.turn_id, waited_s, observed_s)
        self._ended.move_to_end(place)
        while len(self._ended) > REMEMBER_COUNT or now_s - next(iter(self._ended.values())).ended_s > REMEMBER_S:
            self._one_less(self._ended.popitem(last=False)[0][0])

    def _one_less(self, key: str) -> None:
        self._ended_of[key] -= 1
        if not self._ended_of[key]:
            del self._ended_of[key]


def ended_by(record: Record) -> ThunderAgentError:
    """Return the error of an attempt that was cancelled here: another one replaces it, or its program was ended."""
    program_id = record.turn.program_id
    if record.aborted_for == ProgramKilledError.code:
        return ProgramKilledError(f"program {program_id!r} was ended by an operator, and its turns aborted")
    if record.aborted_for == ProgramStaleError.code:
        return ProgramStaleError(f"the weights are newer than the bound of program {program_id!r} allows")
    if record.aborted_for:
        return ProgramReleasedError(f"program {program_id!r} was released, and its turns aborted")
    return TurnSupersededError("the client retried this turn; the retry goes on")


def told_key(attempt: Record) -> str:
    """Return the key by which other gateways know all attempts at a program's turn; empty if its client gave none."""
    turn, key = attempt.turn, attempt.patience.idempotency_key
    if not key or turn.program_id is None:
        return ""
    words = "\0".join((turn.tenant, turn.program_id, turn.branch_id, attempt.path, str(len(turn.body)), key))
    what = words.encode(errors="surrogateescape")  # a header may hold any bytes
    return blake2b(turn.body[-TOLD_BYTES:], key=blake2b(what).digest(), digest_size=16).hexdigest()


def _observed_s(before_s: float, waited_s: float) -> float | None:
    """Return the patience of a client that gave up after these times, one after the other; None if no timer did it."""
    if min(before_s, waited_s) < LEAST_OBSERVED_S or abs(before_s - waited_s) > max(ALIKE_S, ALIKE_RATIO * waited_s):
        return None
    return min(before_s, waited_s)


def _anonymous_key(attempt: Record) -> str | None:
    key = attempt.patience.idempotency_key
    return f"\0{attempt.turn.tenant}\0{key}" if key else None  # no program's id begins so


def _earlier_of(attempt: Record, others: list[Record]) -> Record | None:
    """Return the attempt, among those that ask for the same, that this one replaces."""
    key, count = attempt.patience.idempotency_key, attempt.patience.retry_count
    if key:
        same_key = [other for other in others if other.patience.idempotency_key == key]
        return same_key[0] if same_key and (count or attempt.turn.program_id is not None) else None
    earlier = others[0] if len(others) == 1 else None
    if earlier is None or earlier.is_sample or earlier.patience.idempotency_key:
        return None
    return earlier if earlier.patience.retry_count < count else None


def _place_of(attempt: Record) -> Place:
    body = attempt.turn.body
    return attempt.key or "", attempt.turn.branch_id, attempt.path, len(body), hash(body[-HASHED_BYTES:])
