"""Which tool an answer calls, as a key that predicts how long the program will be away.

The key of a call is the tool's name, and for a shell also the first word of its command: `bash:pytest` takes longer
than `bash:ls`. Calls are found in the answers of the chat API of OpenAI, of the Messages API of Anthropic and of the
Responses API. Agents without tool calls write one fenced shell block into their text, which may also come from SGLang's
own API. Unreadable answers call nothing: a key is a hint, and the bytes of the answer are never touched.
"""

# compiled: each answer passes here

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from msgspec import Raw

from thunderagent.proxy.reading.dialects.structs import (
    CallingChoice,
    CallingMessage,
    Calls,
    ChoicesEvent,
    Item,
    ItemEvent,
    TextEvent,
)
from thunderagent.proxy.reading.sse import UNREADABLE, data_of, events_in

MAX_KEY_CHARS: Final = 64
MAX_NAMES: Final = 3
"""If an answer calls several tools, this many names make the key."""

MAX_CALLS: Final = 16
MAX_KEPT_CHARS: Final = 4096
"""How much is kept of a call's arguments, or of a text from its first fence on: commands are near the beginning."""

_STRING: Final = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'  # without its end, which may be cut off
_STRINGS: Final = re.compile(rf'({_STRING})"?')
_COMMAND: Final = re.compile(
    rf'"(?:commands?|cmd|script)"\s*:\s*(?P<strings>{_STRING}|\[(?:\s*{_STRING}"\s*,?)*(?:\s*{_STRING})?)'
)
_OPENING_FENCE: Final = re.compile(r"^[ \t]*```(?:bash|sh|shell|mswea_bash_command)[ \t]*\r?\n", re.MULTILINE)
_NOT_PRINTABLE: Final = re.compile(r"[^!-~]+")

_NOT_YET_THE_COMMAND: Final = re.compile(
    r"""
      [\s\\(){};&|!'"]+                                          # what stands between commands
    | \#[^\n]*                                                   # a comment
    | (?:cd|pushd|set|export|source|\.)\s[^\n;&|]*(?:&&|;|\n)    # a command that only prepares the next
    | [A-Za-z_]\w*=(?:"[^"]*"|'[^']*'|[^\s'"])*                  # a variable for the command
    | (?:sudo|env|time|timeout|nice|nohup|exec)\s+(?:-u\s+\S+\s+|-\S+\s+|[\d.]+[smhd]?\s+)*
    | (?:\S*/)?(?:ba|z)?sh\s+-\w*c\s+                            # a shell that runs a command
    | (?:\S*/)?python[\d.]*\s+(?:-[A-Za-z]\s+)*?-m\s+            # a module that is run as a command
    """,
    re.VERBOSE,
)
_WORD: Final = re.compile(r"""[^\s(){};&|<>'"]+""")


_decode_choices_event: Final = msgspec.json.Decoder(ChoicesEvent).decode
_decode_text_event: Final = msgspec.json.Decoder(TextEvent).decode
_decode_item_event: Final = msgspec.json.Decoder(ItemEvent).decode
_decode_string: Final[Callable[[bytes | Raw], str]] = msgspec.json.Decoder(str).decode


def key_of(calls: Calls) -> str:
    """Return the key of the calls of a whole answer; empty if there are none."""
    choice = calls.choices[0] if calls.choices else CallingChoice()
    message = choice.message or CallingMessage()
    functions = [call.function for call in message.tool_calls or () if call.function is not None]
    keys = [_key(function.name, _plain(function.arguments)) for function in functions]
    keys += [_key_of_item(item) for item in (calls.content or []) + (calls.output or []) if _is_call(item)]
    if keys:
        return _joined_key(keys)
    texts = [_text(text) for text in (message.content, choice.text, calls.text) if _is_said(text)]
    return _key_of_text(texts[0] or "") if texts else ""


def _is_said(value: Raw) -> bool:
    return len(value) > 0 and bytes(memoryview(value)[:1]) != b"n"


def _text(value: Raw) -> str | None:
    """Return a text; None if the value is none."""
    return _decode_string(value) if bytes(memoryview(value)[:1]) == b'"' else None


class StreamToolCalls:
    """Follows the events of a streamed answer for its tool calls.

    `read` takes whole events as `StreamUsage` finds them. Irrelevant events cost a few searches.
    """

    __slots__ = ("_calls", "_text")

    def __init__(self) -> None:
        """Start before the first event."""
        self._calls: dict[int, tuple[str, str]] = {}
        self._text: str | None = None

    def read(self, events: bytes) -> None:
        """Read whole events."""
        has_begun = self._text is not None or self._calls
        if not (self._matters(events) if has_begun else may_call(events)):
            return
        for event in events_in(events):
            try:
                self._read_event(event)
            except UNREADABLE:
                continue

    def key(self) -> str:
        """Return the key of the calls so far; empty if there are none."""
        if self._calls:
            return _joined_key(_key(name, arguments) for name, arguments in self._calls.values())
        return _key_of_text(self._text) if self._text else ""

    def _matters(self, data: bytes) -> bool:
        if self._text is not None and len(self._text) < MAX_KEPT_CHARS:
            return True
        return may_call(data) or (bool(self._calls) and b'"input_json_delta"' in data)  # more of a call that has begun

    def _read_event(self, event: bytes) -> None:
        if not self._matters(event):
            return
        if b'"choices"' in event:
            for choice in _decode_choices_event(data_of(event)).choices or ():
                if choice.index == 0:
                    self._read_choice(choice)
        elif b'"meta_info"' in event:
            text = _text(_decode_text_event(data_of(event)).text)
            self._text = text if text is not None and "```" in text else self._text
        else:
            self._read_item_event(_decode_item_event(data_of(event)))

    def _read_choice(self, choice: CallingChoice) -> None:
        """Read a piece of the first choice: of the chat API, or of a text completion."""
        delta = choice.delta or CallingMessage()
        for call in delta.tool_calls or ():
            if call.function is not None:
                self._add(call.index, call.function.name, _plain(call.function.arguments))
        text = _text(delta.content if _is_said(delta.content) else choice.text)
        if text is not None and (self._text is not None or "```" in text):
            self._text = _head((self._text or "") + text)

    def _read_item_event(self, event: ItemEvent) -> None:
        """Read an event of Anthropic's, or one of the Responses API."""
        if event.type == "content_block_start" and event.content_block is not None and _is_call(event.content_block):
            self._add(event.index, event.content_block.name, "")
        elif event.type == "content_block_delta" and event.delta is not None and event.index in self._calls:
            self._add(event.index, None, event.delta.partial_json)
        elif event.type == "response.output_item.done" and event.item is not None and _is_call(event.item):
            self._add(event.output_index, _name(event.item), _arguments(event.item))

    def _add(self, index: int, name: str | None, arguments: str) -> None:
        """Append a piece of a call; a name comes complete, once or with every piece."""
        if index in self._calls or len(self._calls) < MAX_CALLS:
            known_name, known_arguments = self._calls.get(index, ("", ""))
            self._calls[index] = (known_name or name or "", _head(known_arguments + arguments))


CALL_MARKS: Final[tuple[bytes, ...]] = (b"```", b'"tool_', b'_call"')
"""What all data have that may hold a call: tool_calls, tool_use, function_call, shell_call, or one in a text."""


def may_call(data: bytes) -> bool:
    """Return whether there may be a call to read; a few searches, for every chunk of every stream."""
    if data.find(b"`") >= 0 and b"```" in data:  # the first search is many times faster, and usually enough
        return True
    at = data.find(b"_")  # the same here: both search words contain one, and plain text has none
    return at >= 0 and (
        data.find(b'"tool_', max(0, at - 5)) >= 0  # tool_calls and tool_use
        or data.find(b'_call"', at) >= 0  # function_call, custom_tool_call, local_shell_call and shell_call
    )


_SHELL_CALLS: Final = {"local_shell_call", "shell_call"}
"""The Responses API's own shell: no name, and an action instead of arguments."""


def _is_call(item: Item) -> bool:
    return item.type in {"tool_use", "function_call", "custom_tool_call", *_SHELL_CALLS}


def _key_of_item(item: Item) -> str:
    return _key(_name(item), _arguments(item))


def _name(item: Item) -> str | None:
    return "shell" if item.type in _SHELL_CALLS else item.name


def _arguments(item: Item) -> str:
    return _plain(item.input) or _plain(item.arguments) or _plain(item.action)


def _plain(value: Raw) -> str:
    """Return arguments as JSON text; some APIs send an object, some its text in a string."""
    text = bytes(value)
    if text.startswith(b'"'):
        return _decode_string(text)
    return text.decode() if text != b"null" else ""


def _head(text: str) -> str:
    return text[:MAX_KEPT_CHARS]


def _joined_key(keys: Iterable[str]) -> str:
    """Return one key for simultaneous calls."""
    return "+".join(sorted({key for key in keys if key})[:MAX_NAMES])[:MAX_KEY_CHARS]


def _key(name: str | None, arguments: str) -> str:
    """Return the key of one call, with arguments as JSON that may be cut off; empty for a call without a name."""
    if not name:
        return ""
    word = first_word(_command(_head(arguments)))
    return _readable(f"{name}:{word}" if word else name)


def _key_of_text(text: str) -> str:
    """Return the key of a text with exactly one shell block."""
    openings = list(_OPENING_FENCE.finditer(text))
    if len(openings) != 1:
        return ""
    word = first_word(_head(text[openings[0].end() :].partition("```")[0]))
    return _readable(f"bash:{word}") if word else ""


def _readable(key: str) -> str:
    return _NOT_PRINTABLE.sub("_", key)[:MAX_KEY_CHARS]


def _command(arguments: str) -> str:
    """Return the shell command in the arguments, a list of words joined; empty if there is none."""
    field = _COMMAND.search(arguments)
    strings = _STRINGS.findall(field["strings"]) if field is not None else []
    return " ".join(json.loads(string + '"', strict=False) for string in strings)


def first_word(command: str) -> str:
    """Return the word that tells what a shell command does, without its path.

    Changes of directory, variables, comments and wrappers such as `sudo` or `timeout 60` are skipped.
    """
    at = 0
    while (skipped := _NOT_YET_THE_COMMAND.match(command, at)) is not None:
        at = skipped.end()
    word = _WORD.match(command, at)
    return word[0].rstrip("/").rpartition("/")[2] if word is not None else ""
