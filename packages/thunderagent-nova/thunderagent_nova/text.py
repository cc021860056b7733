"""Tokens to text while they come: no half character, and no part of a stop text, is ever sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one answer.

    A token may be a part of a character, and how it reads may depend on the one before: so a few are read again with
    each new one, and what they said before is taken off.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._text_of = text_of
        self._stops = stops
        self._tokens: list[int] = []
        self._begin = self._read = 0
        self._held = ""
        self.is_stopped = False

    def add(self, token_id: int) -> str:
        """Take a token; return what can be sent now."""
        self._tokens.append(token_id)
        return self._send(self._new_text(is_last=False))

    def end(self) -> str:
        """Return what is left: half a character, too, and what could have begun a stop text."""
        rest = self._send(self._new_text(is_last=True))
        if not self.is_stopped:
            rest += self._held
        self._held = ""
        return rest

    def _new_text(self, *, is_last: bool) -> str:
        before = self._text_of(self._tokens[self._begin : self._read])
        now = self._text_of(self._tokens[self._begin :])
        if len(now) <= len(before) or (now.endswith(_HALF) and not is_last):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _send(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin a stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
