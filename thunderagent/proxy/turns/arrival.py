"""What a request on a turn's endpoint is: whose turn, which parts are ours, and which attempt of its client."""

# compiled: each turn passes here

from __future__ import annotations

from typing import Any

from multidict import CIMultiDictProxy

from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.reading.body_fields import in_utf8
from thunderagent.proxy.reading.dialects import TURN_DIALECTS
from thunderagent.proxy.reading.identity import IdentityRules, TurnRequest, identify, identify_side_call
from thunderagent.proxy.reading.inference import Prompt, prompt_of
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.exchange import Exchange


def read_turn(
    exchange: Exchange, rules: IdentityRules, tenancy: Tenancy | None, chosen_id: str | None
) -> tuple[TurnRequest, Prompt | None]:
    """Return whose turn a request is, and its prompt if the program must be inferred from it.

    A body that is not a JSON object, or an unknown API, makes an anonymous turn; so does a replica that the client
    chose.
    """
    turn, prompt = read_request(exchange.target, exchange.headers, exchange.body, rules, tenancy, exchange.notes)
    if chosen_id is not None:
        return turn._replace(program_id=None, source="anonymous", is_final=False, told_id=""), None
    return turn, prompt


def read_request(
    target: Target,
    headers: CIMultiDictProxy[str],
    body: bytes,
    rules: IdentityRules,
    tenancy: Tenancy | None,
    notes: dict[str, Any] | None = None,
) -> tuple[TurnRequest, Prompt | None]:
    """Return whose turn a head (perhaps with `notes`) and a body are; see `read_turn`."""
    body = in_utf8(body)
    if tenancy is not None:
        rules = tenancy.rules(rules)
    dialect = TURN_DIALECTS.get(target.spelt)
    turn = identify(target.program_id, headers, body, rules, dialect, notes) if dialect is not None else None
    if dialect is None or turn is None:
        turn = _unread(target, headers, body, rules)
        if tenancy is not None:
            turn = turn._replace(tenant=tenancy.named(""))
        if tenancy is not None and not tenancy.may_touch(turn.told_id or None):
            turn = turn._replace(told_id="")
        return turn, None
    if tenancy is not None and (tenant := tenancy.named(turn.tenant)) != turn.tenant:
        turn = turn._replace(tenant=tenant)
    infers = turn.program_id is None and (rules.infers_programs or turn.bucket) and turn.has_whole_prompt
    return turn, prompt_of(body, dialect, turn.tenant, turn.bucket) if infers else None


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
        "",
        call.body,
        usage_added=False,
        prefix=(),
        has_whole_prompt=has_text,
        told_id=call.program_id or "",
        is_unknown=target.spelt not in TURN_DIALECTS,
        model=call.model,
    )
