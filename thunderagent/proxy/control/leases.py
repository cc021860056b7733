"""Leases over the API: for a caller whose turns bypass the proxy.

`POST /leases` waits until the turn may run and says where. The caller runs it on that engine itself, and ends the lease
with the engine's usage. A caller that closes the connection while it waits leaves the queue. A lease without news for
too long is ended, because its caller is gone.

A lease counts for every limit that a turn of its key has, from its request to its end; its prompt counts as a body.
Its patience is over all that it waits for: its key's rate, its key's part of the memory, and room.
Only its own tenant, or an admin key, may report on it or end it; to others it is unknown, whatever else they may touch.
Nobody sees whether a turn goes on, or what a caller says of its progress is true. So all leases of one data key
together may claim only a part of the replicas' memory. A lease for a program waits for room as a turn does, and in line
until its key's other leases leave room in that part; the first of a key is let in whatever its size. One without a
program would run even without room, so beyond the part it is refused.

Only the caller saw how such a turn went. So a data key's report teaches only its own program, and only sizes. The
report of an admin key, or of any caller if no key is needed, teaches what all share: times, and what engines keep.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from secrets import token_hex
from types import MappingProxyType
from typing import Annotated, Literal

import structlog
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from thunderagent.backends.discovery.base import shown_url
from thunderagent.errors import ReplicaRemovedError, ShuttingDownError
from thunderagent.leases import TurnAsk
from thunderagent.leases.open_lease import GrantsLeases, OpenLease
from thunderagent.programs.messages import least_of
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.bodies import LIMITS_ELSEWHERE, ModelName, Name, Report, Text, read_model, report_response
from thunderagent.proxy.gate.held import HeldTurn, HeldTurns
from thunderagent.proxy.gate.keys import Key, caller_key
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.header_words import LIMITS_HEADER, check_program_id, limits_of
from thunderagent.proxy.wire.aiohttp_request import KEPT_BODY, begin, write_eof

log = structlog.get_logger("thunderagent.leases")

BYTES_PER_TOKEN = 4
"""The scheduler measures prompts in bytes, and learns from usage how many make a token."""

Tokens = Annotated[int, Field(ge=0, lt=2**31)]


class LeaseRequest(BaseModel):
    """A turn that wants to run; without a `program_id` it is anonymous.

    `parent_id` and `tenant` are those of the program's first turn. `patience_s` is how long the caller waits for its
    answer: the lease comes before that ends, even without room, or it is refused for a limit of its key. `model`
    selects the pool, if there are several. The header `X-Program-Limits` has the limits of its program.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    program_id: Text | None = None
    branch_id: Name = ""
    group_id: Name = ""
    parent_id: Name = ""
    tenant: Name = ""
    model: ModelName = ""
    prompt_tokens: Tokens = 0
    patience_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class ProgressReport(BaseModel):
    """How many tokens a turn generated so far."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    output_tokens: Tokens = 0


class LeaseEnd(BaseModel):
    """How a turn ended, with its usage as far as it is known."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    outcome: Literal["finished", "failed", "refused", "abandoned"] = "finished"
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    tool: Name = ""


class LeaseReport(Report):
    """A lease: permission for one turn to run on that replica."""

    lease_id: str
    program_id: str | None
    replica_id: str
    url: str
    held_s: float
    reason: str
    limit_s: float = Field(description="it is ended when nothing was heard of it for so long")


class LeaseHeldReport(Report):
    """Whether a lease is still held."""

    lease_id: str
    held: bool


class LeaseEndedReport(Report):
    """Whether a lease was still held."""

    lease_id: str
    ended: bool


class _Claim:
    """What leases of a data key claim: those of one program together, and each that has none."""

    __slots__ = ("_by_key", "key_name", "leases_count", "tokens")

    def __init__(self, by_key: Counter[str], key_name: str) -> None:
        """Count in `by_key`, nothing yet."""
        self._by_key = by_key
        self.tokens = 0
        self.leases_count = 0
        self.key_name = key_name

    def grow_to(self, tokens: int) -> None:
        """Count no less than this."""
        if tokens > self.tokens:
            self._by_key[self.key_name] += tokens - self.tokens
            self.tokens = tokens

    def close(self) -> None:
        """Stop counting it."""
        self._by_key[self.key_name] -= self.tokens
        if not self._by_key[self.key_name]:
            del self._by_key[self.key_name]
        self.tokens = 0


@dataclass(slots=True)
class _Held:
    """A lease that its caller holds."""

    lease: OpenLease
    prompt_tokens: int
    watchdog: asyncio.TimerHandle
    ends_s: float
    """When it is over in any case, by the loop's clock."""
    counted: ExitStack
    """What counts it until its end."""
    owner: str | None
    """Its key's tenant, empty without a key; None is an admin."""
    claim: _Claim | None
    """What it claims, if it was taken with a data key."""
    output_tokens: int = 0
    started: bool = False


class Leases:
    """Handlers of `/leases`."""

    def __init__(
        self,
        leases: GrantsLeases,
        replicas: Replicas,
        tenancy: Tenancy,
        held: HeldTurns,
        *,
        limit_s: float,
        total_s: float = inf,
        aliases: Mapping[str, str] = MappingProxyType({}),
        keys_share: Callable[[], bool] = lambda: True,
        wait_for_rate: Callable[[web.Request, float | None], Awaitable[float]] | None = None,
    ) -> None:
        """Take `leases`; one without news for `limit_s` is ended, and any after `total_s`. `aliases` are of models.

        While `keys_share`, leases of one key get a part of the memory. `wait_for_rate` waits until a request's caller
        may take one more, no longer than a patience, and returns how long that took.
        """
        self._wait_for_rate = wait_for_rate
        self._keys_share = keys_share
        self._total_s = total_s
        self._aliases = aliases
        self._leases = leases
        self._replicas = replicas
        self._tenancy = tenancy
        self._waiting = held
        self._limit_s = limit_s
        self._held: dict[str, _Held] = {}
        self._placed_by_key: Counter[str] = Counter()
        """What leases for programs claim."""
        self._unplaced_by_key: Counter[str] = Counter()
        """What leases without one claim."""
        self._claims: dict[tuple[str, str], _Claim] = {}
        """By key and program."""
        self._lines: dict[str, asyncio.Lock] = {}
        """By key: its first waits for a part of the memory."""
        self._in_line_count: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._is_closing = False

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of leases."""
        return [
            web.post("/leases", self.take),
            web.post("/leases/{lease_id}/progress", self.progress),
            web.post("/leases/{lease_id}/end", self.end),
        ]

    async def take(self, request: web.Request) -> web.Response:
        """Wait for a lease."""
        body = await request.read()
        wanted = read_model(LeaseRequest, body, LIMITS_ELSEWHERE)
        program_id = None if wanted.program_id is None else check_program_id(wanted.program_id)
        self._tenancy.check(program_id)
        prompt_tokens = self._believed(wanted.prompt_tokens) or 0
        prompt_bytes = prompt_tokens * BYTES_PER_TOKEN
        limits = self._tenancy.program_limits
        if LIMITS_HEADER in request.headers:
            limits = least_of(limits, limits_of(request.headers))
        key, claim, patience_s, waited_s, slowed_s = caller_key(), None, wanted.patience_s, 0.0, 0.0
        if self._wait_for_rate is not None:
            slowed_s = await self._wait_for_rate(request, patience_s)
        if patience_s is not None:
            patience_s = max(0.0, patience_s - slowed_s)

        def while_held() -> HeldTurn:
            return HeldTurn(self._waiting, request.get(KEPT_BODY), len(body))

        with ExitStack() as counted:
            counted.enter_context(self._waiting.lease(prompt_bytes))
            counted.enter_context(self._tenancy.naming(program_id))
            if key is not None and not key.is_admin:
                claim = counted.enter_context(self._claim_of(key.name, program_id))
                if program_id is None:
                    self._claim_all(claim, prompt_tokens)
                else:
                    tokens = max(prompt_tokens, self._leases.claim_tokens(program_id))
                    waited_s = await self._claim_in_line(claim, tokens, patience_s, while_held)
            self._tenancy.check(program_id)  # another tenant may have begun it during the waits
            ask = TurnAsk(
                turn_id=self._leases.new_turn_id(),
                program_id=program_id,
                branch_id=wanted.branch_id,
                prompt_bytes=prompt_bytes,
                group_id=wanted.group_id,
                patience_s=None if patience_s is None else max(0.0, patience_s - waited_s),
                waited_s=waited_s or None,
                parent_id=wanted.parent_id,
                tenant=self._tenancy.named(wanted.tenant),
                limits=None if program_id is None else limits,
                model=self._aliases.get(wanted.model, wanted.model),
            )
            lease = await self._leases.lease(ask, while_held())
            granted = lease.granted
            if claim is not None and program_id is not None:
                claim.grow_to(self._leases.claim_tokens(program_id))
            try:
                url = self._replicas.url_of(granted.replica_id)
            except ReplicaRemovedError:  # after the grant; nobody could end this lease
                lease.failed()
                raise
            lease_id, ends_s = token_hex(16), asyncio.get_running_loop().time() + self._total_s
            watchdog = self._watch(lease_id, ends_s)
            held = _Held(lease, prompt_tokens, watchdog, ends_s, counted.pop_all(), _owner(key), claim)
        self._held[lease_id] = held
        if claim is not None:
            lease.unverified()
        report = LeaseReport(
            lease_id=lease_id,
            program_id=granted.program_id,
            replica_id=granted.replica_id,
            url=shown_url(url),
            held_s=round(granted.held_s + waited_s + slowed_s, 4),
            reason=granted.reason,
            limit_s=self._limit_s,
        )
        response = report_response(report)
        await self._hand_over(request, response, lease_id)
        return response

    async def _hand_over(self, request: web.Request, response: web.Response, lease_id: str) -> None:
        """Write the answer here: a lease that nobody can have received is given back at once, not at its limit."""
        is_there = False
        try:
            await begin(request, response)
            await write_eof(request, response)
            is_there = _is_connected(request)
        finally:
            if not is_there and lease_id in self._held:
                self._give_back(lease_id)

    def _believed(self, tokens: int | None, *, beside_tokens: int = 0) -> int | None:
        """Return tokens if plausible: together no more than the largest replica has room for."""
        states = self._leases.replicas.states.values()
        capacity_tokens = max((state.capacity_tokens or 0 for state in states), default=0)
        if tokens is None or not capacity_tokens:
            return tokens
        return min(tokens, max(0, capacity_tokens - beside_tokens))

    async def progress(self, request: web.Request) -> web.Response:
        """Report progress of a lease; the first report says that the first token came."""
        lease_id = request.match_info["lease_id"]
        body = await request.read()
        report = read_model(ProgressReport, body) if body else ProgressReport()
        held = self._of_caller(lease_id)
        if held is not None:
            held.watchdog.cancel()
            held.watchdog = self._watch(lease_id, held.ends_s)
            if not held.started:
                held.started = True
                held.lease.started()
            held.lease.progressed(self._believed_progress(held, report.output_tokens))
            if held.claim is not None and (program_id := held.lease.granted.program_id) is not None:
                held.claim.grow_to(self._leases.claim_tokens(program_id))
        return report_response(LeaseHeldReport(lease_id=lease_id, held=held is not None))

    async def end(self, request: web.Request) -> web.Response:
        """End a lease. Idempotent: an unknown or ended lease is no error."""
        lease_id = request.match_info["lease_id"]
        body = await request.read()
        said = read_model(LeaseEnd, body) if body else LeaseEnd()
        held = self._of_caller(lease_id)
        if held is not None:
            self._let_go(lease_id)
            if said.outcome == "finished":
                prompt_tokens = self._believed(said.prompt_tokens)
                beside_tokens = held.prompt_tokens if prompt_tokens is None else prompt_tokens
                output_tokens = self._believed(said.output_tokens, beside_tokens=beside_tokens)
                cached_tokens = None if held.claim is not None else self._believed(said.cached_tokens)
                held.lease.finished(prompt_tokens, output_tokens, cached_tokens, said.tool)
            else:
                ends: dict[str, Callable[[], None]] = {
                    "failed": partial(held.lease.failed, "reported"),
                    "refused": held.lease.refused,
                    "abandoned": held.lease.abandoned,
                }
                ends[said.outcome]()
        return report_response(LeaseEndedReport(lease_id=lease_id, ended=held is not None))

    def _of_caller(self, lease_id: str) -> _Held | None:
        """Return a lease that the request's caller may report on."""
        held, owner = self._held.get(lease_id), _owner(caller_key())
        return held if held is not None and owner in (None, held.owner) else None

    def _let_go(self, lease_id: str) -> _Held:
        """Stop counting a lease."""
        held = self._held.pop(lease_id)
        held.watchdog.cancel()
        held.counted.close()
        return held

    def _room_tokens(self, key_name: str) -> int | None:
        """Return how much more the leases of a data key may claim; None: no limit, or no capacity is known."""
        if not self._keys_share():
            return None
        states = self._leases.replicas.states.values()
        capacity_tokens = sum(state.capacity_tokens or 0 for state in states)
        if not capacity_tokens:
            return None
        return max(0, int(self._waiting.key_leased_ratio * capacity_tokens) - self._claimed_tokens(key_name))

    def _claimed_tokens(self, key_name: str) -> int:
        return self._placed_by_key[key_name] + self._unplaced_by_key[key_name]

    def _claim_all(self, claim: _Claim, tokens: int) -> None:
        """Count what a lease claims. Raises `KeyHeldLimitError` if its key may not claim so much."""
        room_tokens = self._room_tokens(claim.key_name)
        if room_tokens is not None and tokens > room_tokens:
            raise self._waiting.key_leased_error(self._claimed_tokens(claim.key_name), tokens)
        claim.grow_to(tokens)

    @contextmanager
    def _claim_of(self, key_name: str, program_id: str | None) -> Iterator[_Claim]:
        """Provide what counts a lease, as long as its program has one; whoever waits in line then looks again."""
        if program_id is None:
            claim = _Claim(self._unplaced_by_key, key_name)
        else:
            claim = self._claims.setdefault((key_name, program_id), _Claim(self._placed_by_key, key_name))
        claim.leases_count += 1
        try:
            yield claim
        finally:
            claim.leases_count -= 1
            if not claim.leases_count:
                if program_id is not None:
                    del self._claims[key_name, program_id]
                claim.close()
                self._freed.set()

    async def _claim_in_line(
        self, claim: _Claim, tokens: int, patience_s: float | None, while_held: Callable[[], HeldTurn]
    ) -> float:
        """Count what a lease claims, as soon as its key may claim so much; return how long that took.

        Raises `KeyHeldLimitError` if it takes longer than `patience_s`, `ShuttingDownError`, and as `while_held`.
        """
        key_name = claim.key_name
        is_counted = 0 < claim.tokens >= tokens  # with another lease of its program
        if is_counted or (key_name not in self._lines and self._fits(claim, tokens)):
            claim.grow_to(tokens)
            return 0.0
        line, began_s = self._lines.setdefault(key_name, asyncio.Lock()), asyncio.get_running_loop().time()
        self._in_line_count[key_name] += 1
        try:
            with while_held():
                async with asyncio.timeout(patience_s), line:
                    while not self._fits(claim, tokens):
                        if self._is_closing:
                            raise ShuttingDownError("the proxy is shutting down")
                        self._freed.clear()
                        await self._freed.wait()
                    claim.grow_to(tokens)
        except TimeoutError:
            raise self._waiting.key_leased_error(self._claimed_tokens(key_name), tokens) from None
        finally:
            self._in_line_count[key_name] -= 1
            if not self._in_line_count[key_name]:
                del self._lines[key_name], self._in_line_count[key_name]
        return asyncio.get_running_loop().time() - began_s

    def _fits(self, claim: _Claim, tokens: int) -> bool:
        """Return whether a lease claims no more than its key's part leaves; the first for a program always does."""
        room_tokens = self._room_tokens(claim.key_name)
        if room_tokens is None or not self._placed_by_key[claim.key_name]:
            return True
        return room_tokens > 0 and tokens - claim.tokens <= room_tokens

    def _believed_progress(self, held: _Held, output_tokens: int) -> int:
        """Return a lease's progress as far as it is plausible, and no more than its key may still claim."""
        tokens = self._believed(output_tokens, beside_tokens=held.prompt_tokens) or 0
        if held.claim is None or held.lease.granted.program_id is None or tokens <= held.output_tokens:
            return tokens  # what an anonymous turn generates claims nothing
        room_tokens = self._room_tokens(held.claim.key_name)
        if room_tokens is not None:
            tokens = min(tokens, held.output_tokens + room_tokens)
        held.output_tokens = tokens
        return tokens

    async def stop_waiting(self, app: web.Application) -> None:  # noqa: ARG002 - a handler of shutdown
        """Refuse those that wait in line: the process ends."""
        self._is_closing = True
        self._freed.set()

    def close(self) -> None:
        """End what is left."""
        for lease_id in list(self._held):
            self._give_back(lease_id)

    def _watch(self, lease_id: str, ends_s: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_at(min(ends_s, loop.time() + self._limit_s), self._over_limit, lease_id)

    def _over_limit(self, lease_id: str) -> None:
        log.warning("lease_over_limit", lease_id=lease_id, limit_s=self._limit_s)
        self._give_back(lease_id)

    def _give_back(self, lease_id: str) -> None:
        self._let_go(lease_id).lease.abandoned()


def _owner(key: Key | None) -> str | None:
    """Return whose leases a request with this key may report on; None is everybody's."""
    if key is None:
        return ""
    return None if key.is_admin else key.tenant


def _is_connected(request: web.Request) -> bool:
    """Return whether the client is still connected, as far as the system knows."""
    if request.transport is None:
        return False
    try:
        request.transport.get_extra_info("socket").getpeername()
    except OSError:
        return False
    return True
