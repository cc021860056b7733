"""Bearer tokens that name programs: for clients that can set only a base URL and an API key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from secrets import token_urlsafe
from typing import Protocol

from thunderagent.programs.messages import Decision, Event, Release

PLAIN_PREFIX = "ta-"
"""`Bearer ta-<id>` names the program `<id>`."""

MINTED_PREFIX = "tat_"
"""Prefix of tokens that `POST /programs` made."""


class Events(Protocol):
    """A source of events on the end of programs."""

    def observe(self, observer: Callable[[Event, Sequence[Decision]], None], *about: type) -> Callable[[], None]:
        """Call `observer` with each event that it is `about`; return a function that ends that."""


class Tokens:
    """The tokens of live programs."""

    def __init__(self, events: Events) -> None:
        """Start without tokens; a token is forgotten when its program ends."""
        self._program_ids: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        events.observe(self._heard, Release)

    def token_of(self, program_id: str) -> str:
        """Return a live program's token; create it if there is none."""
        token = self._tokens.get(program_id)
        if token is None:
            token = self._tokens[program_id] = MINTED_PREFIX + token_urlsafe(24)
            self._program_ids[token] = program_id
        return token

    def named_by(self, headers: Mapping[str, str]) -> str | None:
        """Return the program that a request's token names; None without a token, or with someone else's."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer":
            return None
        if token.startswith(PLAIN_PREFIX):
            return token.removeprefix(PLAIN_PREFIX)
        return self._program_ids.get(token)

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        if not self._tokens:
            return
        for decision in decisions:
            if type(decision) is Release and (token := self._tokens.pop(decision.program_id, None)) is not None:
                del self._program_ids[token]
