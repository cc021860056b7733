"""What an engine answered, read so that it can be found again at the beginning of the next prompt."""

from __future__ import annotations

from typing import Any

import msgspec

from thunderagent.proxy.dialects.sse import data_of, events_in
from thunderagent.proxy.usage import decoded

MAX_KEPT_CHARS = 4 * 2**20
"""An answer that is longer is not kept."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    message: _Message | None = None
    delta: _Message | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or one event of a stream, of the chat and completions APIs, or of SGLang's `/generate`."""

    choices: list[_Choice] | None = None
    text: str | None = None
    output_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class Completion:
    """One choice of an answer: a message, or a text and its token ids, as far as the engine says them."""

    __slots__ = ("calls", "has_message", "text", "token_ids")

    def __init__(self) -> None:
        """Begin with nothing said."""
        self.has_message = False
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.calls: dict[int, list[str]] = {}
        """Id, name and arguments of each call."""

    def message(self) -> dict[str, Any]:
        """Return the message that a client puts into its next prompt."""
        calls = [
            {"id": call_id, "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in self.calls.values()
        ]
        return {"role": "assistant", "content": "".join(self.text), "tool_calls": calls}

    def add(self, choice: _Choice) -> None:
        """Take in a whole choice, or the next part of one."""
        if choice.text:
            self.text.append(choice.text)
        self.token_ids += choice.token_ids or ()
        message = choice.message or choice.delta
        if message is None:
            return
        self.has_message = True
        if message.content:
            self.text.append(message.content)
        for place, call in enumerate(message.tool_calls or ()):
            kept = self.calls.setdefault(place if call.index is None else call.index, ["", "", ""])
            kept[0] = kept[0] or call.id or ""
            if call.function is not None:
                kept[1] += call.function.name or ""
                kept[2] += call.function.arguments if isinstance(call.function.arguments, str) else ""


class Completions:
    """Follow a whole answer or a stream of events for what it says. What cannot be read says nothing."""

    __slots__ = ("_choices", "_kept_chars")

    def __init__(self) -> None:
        """Begin before the first byte."""
        self._choices: dict[int, Completion] = {}
        self._kept_chars = 0

    def read_answer(self, body: bytes, content_encoding: str | None) -> None:
        """Take in a whole answer."""
        plain = decoded(body, content_encoding)
        if plain and len(plain) <= MAX_KEPT_CHARS:
            self._read(plain)

    def read_events(self, whole: bytes) -> None:
        """Take in whole events of a stream, as `StreamUsage` finds them."""
        self._kept_chars += len(whole)
        if self._kept_chars > MAX_KEPT_CHARS:
            self._choices.clear()
            return
        for event in events_in(whole):
            self._read(data_of(event))

    def choices(self) -> list[Completion]:
        """Return the choices in their order."""
        return [self._choices[index] for index in sorted(self._choices)]

    def _read(self, text: bytes) -> None:
        try:
            answer = _decode(text)
        except UNREADABLE:
            return
        for choice in answer.choices or ():
            self._choices.setdefault(choice.index, Completion()).add(choice)
        if answer.text is not None or answer.output_ids is not None:  # each event says all so far
            self._choices[0] = Completion()
            self._choices[0].add(_Choice(text=answer.text, token_ids=answer.output_ids))
