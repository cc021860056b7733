"""What single keys may use: turns and tokens per minute, and programs at a time.

A key has a bucket of turns and one of tokens, each as large as a minute's. A turn that finds one empty waits in the
key's line, because clients such as Codex give up at a 429. A turn's prompt counts from its lease on, a token for
`BYTES_PER_TOKEN`, and what its engine reports takes the place of that at its end. So the bucket of tokens may be
overdrawn, and fills up again before the next turn goes on. If the usage is not reported, because its client left early
or wanted none, the prompt counts as it did, and the answer as it was streamed. If only a stranger reports it (a lease
that a data key took), it counts no less than that. A websocket counts by its bytes.

Programs count from the first news of them until they have ended, and for as long as a request names them; one too many
gets 429, because the key's owner can end others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric

from thunderagent.errors import KeyHeldLimitError, KeyProgramsLimitError
from thunderagent.programs.messages import (
    Decision,
    Event,
    Grant,
    TurnAsk,
    TurnEnd,
    TurnProgressed,
    TurnUnverified,
    is_rejected,
)
from thunderagent.proxy.gate.keys.keyring import Key, KeyLimits, caller_key
from thunderagent.proxy.gate.rate_limit import Bucket

HEARD = (TurnAsk, TurnUnverified, TurnProgressed, TurnEnd, Grant)
"""Events, and a decision, to call `Quotas.heard` with."""

BYTES_PER_TOKEN = 4
"""Of a prompt whose tokens nobody reports: a common value for English text and code."""

UNSAID_TOKENS = 1000
"""Of a turn that does not say how large it is: a websocket, or a lease that names no size."""


@dataclass(slots=True)
class _Turn:
    """A turn that has not ended, of a key whose tokens are limited."""

    key_name: str
    prompt_tokens: int
    """By its size."""
    output_tokens: int = 0
    counted_tokens: int = 0
    """What was taken for it already; above 0 once it has run."""
    is_unverified: bool = False


@dataclass(slots=True)
class _Account:
    """What a key has used."""

    limits: KeyLimits
    turns: Bucket | None
    tokens: Bucket | None
    program_ids: set[str] = field(default_factory=set)
    named_ids: Counter[str] = field(default_factory=Counter)
    """Programs that requests name now, whether they live yet, or still."""
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting_count: int = 0


class Quotas:
    """Counts what keys use, and delays or refuses them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        lives: Callable[[str], bool],
        max_waiting_count: Callable[[Key], int],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start with nothing used.

        `lives` says whether a program exists, `max_waiting_count` how many turns of a key may wait.
        """
        self._lives = lives
        self._max_waiting_count = max_waiting_count
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._turns: dict[int, _Turn] = {}
        self._limited = CounterMetric(
            "thunderagent_key_limited",
            "Turns that waited (turns, tokens) or programs refused (programs) by a limit of their key.",
            labelnames=["limit"],
            registry=registry,
        )
        for limit in ("turns", "tokens", "programs"):
            self._limited.labels(limit)

    async def wait(self, key: Key) -> bool:
        """Wait until a key may begin one more turn, behind its turns that already wait; return whether it had to.

        Raises `KeyHeldLimitError` if too many do.
        """
        account = self._account(key)
        if not account.line.locked() and not any(self._missing_s(account)):
            self._begin(account)
            return False
        if account.waiting_count >= self._max_waiting_count(key):
            raise KeyHeldLimitError(f"{account.waiting_count:,} turns of this key wait for its limit per minute")
        for limit, missing_s in zip(("turns", "tokens"), self._missing_s(account), strict=True):
            if missing_s:
                self._limited.labels(limit).inc()
        account.waiting_count += 1
        try:
            async with account.line:
                while missing_s := max(self._missing_s(account)):  # noqa: ASYNC110 - time is what is waited for
                    await asyncio.sleep(missing_s)
                self._begin(account)
        finally:
            account.waiting_count -= 1
        return True

    def missing_s(self, key: Key) -> float:
        """Return how long it takes at least until a key may begin one more turn."""
        return max(self._missing_s(self._account(key)))

    def open_program(self, program_id: str) -> None:
        """Count a program that the request's key may begin. Raises `KeyProgramsLimitError`."""
        key = caller_key()
        if key is None or key.limits.programs_count is None:
            return
        account = self._account(key)
        if program_id in account.program_ids or self._lives(program_id):
            return
        if len(account.program_ids) >= key.limits.programs_count:
            account.program_ids = {each for each in account.program_ids if self._counts(account, each)}
        if len(account.program_ids) >= key.limits.programs_count:
            self._limited.labels("programs").inc()
            raise KeyProgramsLimitError(f"this key has {len(account.program_ids)} programs, which is its limit")
        account.program_ids.add(program_id)

    @contextmanager
    def naming(self, program_id: str) -> Iterator[None]:
        """Count a program of the request's key for the length of the block, although it may not live.

        Raises `KeyProgramsLimitError`.
        """
        key = caller_key()
        if key is None or key.limits.programs_count is None:
            yield
            return
        self.open_program(program_id)
        named_ids = self._account(key).named_ids
        named_ids[program_id] += 1
        try:
            yield
        finally:
            named_ids[program_id] -= 1
            if not named_ids[program_id]:
                del named_ids[program_id]

    def _counts(self, account: _Account, program_id: str) -> bool:
        return program_id in account.named_ids or self._lives(program_id)

    def bytes_counter(self) -> Callable[[int], None] | None:
        """Return a function that counts bytes of the request's key as tokens; None if its tokens are unlimited."""
        key = caller_key()
        if key is None or key.limits.tokens_per_min is None:
            return None
        name = key.name
        return lambda size_bytes: self._take(name, size_bytes / BYTES_PER_TOKEN)

    def heard(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Count the tokens of a turn. Its arrival runs in its request's context, which has the key."""
        if isinstance(event, TurnAsk):
            key = caller_key() if event.pinned_replica_id is None else None
            if key is not None and key.limits.tokens_per_min is not None and not is_rejected(event.turn_id, decisions):
                self._turns[event.turn_id] = _Turn(key.name, event.prompt_bytes // BYTES_PER_TOKEN or UNSAID_TOKENS)
        elif isinstance(event, TurnUnverified):
            if (turn := self._turns.get(event.turn_id)) is not None:
                turn.is_unverified = True
        elif isinstance(event, TurnProgressed):
            if (turn := self._turns.get(event.turn_id)) is not None:
                turn.output_tokens = max(turn.output_tokens, int(event.output_tokens or 0))
        elif isinstance(event, TurnEnd):
            turn = self._turns.pop(event.turn_id, None)
            if turn is not None:
                self._take(turn.key_name, _tokens_of(turn, event) - turn.counted_tokens)
        for decision in decisions if self._turns else ():
            if isinstance(decision, Grant) and (turn := self._turns.get(decision.turn_id)) is not None:
                self._take(turn.key_name, turn.prompt_tokens - turn.counted_tokens)
                turn.counted_tokens = turn.prompt_tokens

    def _take(self, key_name: str, tokens: float) -> None:
        account = self._accounts.get(key_name)
        if account is not None and account.tokens is not None:
            account.tokens.take(tokens, self._now_s())

    def programs_count(self, name: str) -> int:
        """Return how many programs of a key live, as far as they are counted."""
        account = self._accounts.get(name)
        return sum(self._counts(account, each) for each in account.program_ids) if account is not None else 0

    def _account(self, key: Key) -> _Account:
        account = self._accounts.get(key.name)
        if account is None or account.limits != key.limits:
            turns, tokens, now_s = key.limits.turns_per_min, key.limits.tokens_per_min, self._now_s()
            fresh = _Account(
                key.limits,
                Bucket(turns / 60, max(1.0, turns), now_s) if turns is not None else None,
                Bucket(tokens / 60, max(1.0, tokens), now_s) if tokens is not None else None,
            )
            if account is not None:
                fresh.program_ids, fresh.named_ids = account.program_ids, account.named_ids
            self._accounts[key.name] = account = fresh
        return account

    def _missing_s(self, account: _Account) -> tuple[float, float]:
        """Return how long it takes until there is a turn, and a token."""
        now_s = self._now_s()
        return (
            account.turns.missing_s(now_s) if account.turns is not None else 0.0,
            account.tokens.missing_s(now_s) if account.tokens is not None else 0.0,
        )

    def _begin(self, account: _Account) -> None:
        if account.turns is not None:
            account.turns.take(1, self._now_s())

    def _now_s(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()


def _tokens_of(turn: _Turn, end: TurnEnd) -> int:
    """Return what a turn has used; nothing if its client left while it was held, or its replica failed it."""
    granted_tokens = turn.prompt_tokens + turn.output_tokens if turn.counted_tokens else 0
    if end.outcome == "finished":
        prompt_tokens = turn.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens
        tokens = prompt_tokens + (turn.output_tokens if end.output_tokens is None else end.output_tokens)
        return max(tokens, granted_tokens) if turn.is_unverified else tokens
    return granted_tokens if turn.is_unverified or end.outcome == "abandoned" else 0
