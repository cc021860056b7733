"""Clients' reports between turns: a tool begins or ends, and when the next turn comes."""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from thunderagent.errors import RequestError
from thunderagent.leases import TurnHint
from thunderagent.programs.messages import MAX_NEXT_TURN_S
from thunderagent.proxy.gate.bodies import Name, Report, read_model, report_response
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.header_words import check_program_id
from thunderagent.runtime import Runtime


class ToolRequest(BaseModel):
    """A tool that begins now; its name may be left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    tool: Name = ""


class HintRequest(BaseModel):
    """When a program's next turn comes, or what may become of its memory until then; at least one is given."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    next_turn_in_s: float | None = Field(
        None,
        ge=0,
        le=MAX_NEXT_TURN_S,
        allow_inf_nan=False,
        description="counted from now, or, while a turn of the program is with us, from the end of the last one",
    )
    confidence: float = Field(1.0, ge=0, le=1, description="how sure the client is")
    keep: Literal["retain", "offload", "drop"] | None = Field(
        None, description="of a branch that is named: drop, it has ended"
    )
    branch: Name = ""


class ToolReport(Report):
    """A program whose tool began or ended."""

    program_id: str
    known: bool = Field(description="false if no program of that id lives")


class HintReport(Report):
    """A program that got a hint."""

    program_id: str
    known: bool = Field(description="false if no program of that id lives")


class BetweenTurns:
    """Handlers of reports on one program. Another tenant's program is treated as missing."""

    def __init__(self, runtime: Runtime, tenancy: Tenancy) -> None:
        """Report to `runtime`."""
        self._runtime = runtime
        self._tenancy = tenancy

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, which go before those of a program, because an id may hold slashes."""
        return [
            web.post("/programs/{program_id:.+}/tools/start", self.tool_start),
            web.post("/programs/{program_id:.+}/tools/end", self.tool_end),
            web.post("/programs/{program_id:.+}/hints", self.hint),
        ]

    async def tool_start(self, request: web.Request) -> web.Response:
        """Report that a program's tool begins now, which is more exact than the end of the turn that called it."""
        program_id = check_program_id(request.match_info["program_id"])
        body = await request.read()
        tool = read_model(ToolRequest, body).tool if body.strip() else ""
        known = self._tenancy.has(program_id) and self._runtime.tool_started(program_id, tool)
        return report_response(ToolReport(program_id=program_id, known=known))

    async def tool_end(self, request: web.Request) -> web.Response:
        """Report that a program's tool has ended. Idempotent; an unknown program is no error."""
        program_id = check_program_id(request.match_info["program_id"])
        known = self._tenancy.has(program_id) and self._runtime.tool_ended(program_id)
        return report_response(ToolReport(program_id=program_id, known=known))

    async def hint(self, request: web.Request) -> web.Response:
        """Tell when a program's next turn comes. An unknown program is no error."""
        program_id = check_program_id(request.match_info["program_id"])
        said = read_model(HintRequest, await request.read())
        if said.next_turn_in_s is None and said.keep is None:
            raise RequestError("a hint needs next_turn_in_s or keep")
        hint = TurnHint(said.next_turn_in_s, said.confidence, said.keep or "")
        known = self._tenancy.has(program_id) and self._runtime.hint(program_id, hint, said.branch)
        return report_response(HintReport(program_id=program_id, known=known))
