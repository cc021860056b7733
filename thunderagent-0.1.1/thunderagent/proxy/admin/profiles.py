"""Where the time of live programs goes: `/profiles`, with the fields that ThunderAgent's authors gave it.

Made from the runtime's events, so the hot path knows nothing of it, and nothing is counted unless it is on.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from pydantic import Field, RootModel

from thunderagent.errors import NotFoundError, RequestError
from thunderagent.programs.messages import Decision, Event, Grant, Release, TurnAsk, TurnEnd, TurnStarted, is_rejected
from thunderagent.proxy.gate.bodies import Report, report_response
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.runtime import Runtime

HEARS = (TurnAsk, TurnStarted, TurnEnd, Grant, Release)
"""Kinds of events and decisions for `Profiles.observe`."""


class ProfileReport(Report):
    """Means over a program's finished turns, in seconds and tokens; null where engines reported nothing."""

    step_count: int = Field(description="its finished turns")
    avg_prefill_s: float = Field(description="from the grant to the first byte of the answer")
    avg_decode_s: float = Field(description="from then to its end; 0 for answers that are no streams")
    avg_pause_s: float = Field(description="from its arrival to its grant")
    avg_tool_call_s: float = Field(description="from the end of a turn to the arrival of the next")
    avg_prompt_tokens: float | None
    avg_completion_tokens: float | None
    avg_cached_tokens: float | None
    avg_kv_hit_rate: float | None = Field(description="cached tokens as a part of the prompt")


class ProfilesReport(RootModel[dict[str, ProfileReport]]):
    """The profiles of all live programs with a turn, by their ids."""


class _Mean:
    """A mean over the values that are known."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    def rounded(self, digits: int) -> float | None:
        return round(self.total / self.count, digits) if self.count else None


class _Profile:
    """What is known of one program."""

    __slots__ = ("cached", "completion", "decode", "hits", "last_ended_s", "pause", "prefill", "prompt", "tool_call")

    def __init__(self) -> None:
        self.prefill, self.decode, self.pause, self.tool_call = _Mean(), _Mean(), _Mean(), _Mean()
        self.prompt, self.completion, self.cached, self.hits = _Mean(), _Mean(), _Mean(), _Mean()
        self.last_ended_s: float | None = None

    def report(self) -> ProfileReport:
        return ProfileReport(
            step_count=self.prefill.count,
            avg_prefill_s=self.prefill.rounded(4) or 0.0,
            avg_decode_s=self.decode.rounded(4) or 0.0,
            avg_pause_s=self.pause.rounded(4) or 0.0,
            avg_tool_call_s=self.tool_call.rounded(4) or 0.0,
            avg_prompt_tokens=self.prompt.rounded(2),
            avg_completion_tokens=self.completion.rounded(2),
            avg_cached_tokens=self.cached.rounded(2),
            avg_kv_hit_rate=self.hits.rounded(4),
        )


class _Turn:
    """When what happened of a turn that has not ended."""

    __slots__ = ("arrived_s", "granted_s", "program_id", "started_s", "tool_call_s")

    def __init__(self, program_id: str, arrived_s: float, tool_call_s: float | None) -> None:
        self.program_id = program_id
        self.arrived_s = arrived_s
        self.tool_call_s = tool_call_s
        self.granted_s: float | None = None
        self.started_s: float | None = None


class Profiles:
    """The profiles of live programs, as a listener, and the handlers of their routes."""

    def __init__(self, runtime: Runtime, tenancy: Tenancy, *, is_on: bool) -> None:
        """Listen to `runtime` if it is on; a data key that names a tenant reads its own programs only."""
        self._runtime = runtime
        self._tenancy = tenancy
        self._is_on = is_on
        self._of_program: dict[str, _Profile] = {}
        self._turns: dict[int, _Turn] = {}
        if is_on:
            runtime.observe(self.observe, *HEARS)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/profiles", self.all), web.get("/profiles/{program_id:.+}", self.one)]

    async def all(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Return the profiles of all live programs; needs `--profiles true`."""
        self._check_on()
        return report_response(ProfilesReport({name: each.report() for name, each in self._of_program.items()}))

    async def one(self, request: web.Request) -> web.Response:
        """Return a live program's profile; needs `--profiles true`."""
        self._check_on()
        program_id = request.match_info["program_id"]
        profile = self._of_program.get(program_id)
        if profile is None or not self._tenancy.has(program_id):
            raise NotFoundError(f"there is no profile of a live program {program_id!r}")
        return report_response(profile.report())

    def _check_on(self) -> None:
        if not self._is_on:
            raise RequestError("profiles are off; start with --profiles true")

    # --- what the runtime tells --------------------------------------------------------------------------------------

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Follow turns and the ends of programs."""
        if type(event) is TurnAsk:
            if event.program_id is not None and not is_rejected(event.turn_id, decisions):
                self._arrived(event, event.program_id)
        elif type(event) is TurnStarted:
            if (turn := self._turns.get(event.turn_id)) is not None:
                turn.started_s = event.now_s
        elif type(event) is TurnEnd:
            if event.outcome == "finished":
                self._finished(event)
            else:
                self._turns.pop(event.turn_id, None)
        for decision in decisions:
            if type(decision) is Grant:
                if (turn := self._turns.get(decision.turn_id)) is not None:
                    turn.granted_s = event.now_s
            elif type(decision) is Release:
                self._of_program.pop(decision.program_id, None)

    def _arrived(self, event: TurnAsk, program_id: str) -> None:
        arrived_s = event.now_s if event.waited_s is None else event.now_s - event.waited_s
        profile = self._of_program.setdefault(program_id, _Profile())
        ended_s = profile.last_ended_s
        tool_call_s = None if ended_s is None else max(0.0, arrived_s - ended_s)
        self._turns[event.turn_id] = _Turn(program_id, arrived_s, tool_call_s)

    def _finished(self, event: TurnEnd) -> None:
        turn = self._turns.pop(event.turn_id, None)
        profile = self._of_program.get(turn.program_id) if turn is not None else None
        if turn is None or profile is None:
            return
        granted_s = turn.arrived_s if turn.granted_s is None else turn.granted_s
        started_s = event.now_s if turn.started_s is None else turn.started_s
        profile.pause.add(granted_s - turn.arrived_s)
        profile.prefill.add(started_s - granted_s)
        profile.decode.add(event.now_s - started_s)
        profile.tool_call.add(turn.tool_call_s)
        profile.prompt.add(event.prompt_tokens)
        profile.completion.add(event.output_tokens)
        profile.cached.add(event.cached_tokens)
        if event.prompt_tokens and event.cached_tokens is not None:
            profile.hits.add(event.cached_tokens / event.prompt_tokens)
        profile.last_ended_s = event.now_s
