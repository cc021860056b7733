"""How a chat's next prompt is put together from tokens that its engine has seen: exact, or not at all.

Theory of operation
===================
A chat goes on with the answer in its messages, as text. The engine renders them anew, and need not come to the tokens
that it sampled. Where a turn's messages begin with those of an earlier turn and its answer, word by word, the prompt
can be made of the earlier turn's own tokens and of those that the engine renders for what follows:

    rendered    the messages of the earlier turn                            | opened
    history     these, and its answer                                       | opened | answer END tail
    whole       all messages                                                | opened | answer END tail | new
    exact       the earlier turn's prompt, its output up to its END,                              tail | new

The engine renders history and whole; `rendered` it did before. Each must begin with the one before, token by token, and
the answer must have exactly one END, the token with which the model ended its output. Only then is it certain what
follows the answer. A tokenizer joins nothing across such a token. Everything else is refused, with the reason: a prompt
is exact, or as its client sent it.

Tokens are text, as in `rollouts/tokens.py`.
"""

# interpreted: supplying is asked for, and a turn's time there is its engine's

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from thunderagent.proxy.reading.sse import data_of, events_in

Prefix = Literal["supplied", "same", "first", "edited", "cut", "template", "unsupported", "engine"]
"""What became of a turn's prompt; all but `supplied` went as its client sent it.

`same`: its engine renders it exactly. `first`: no turn that is still known comes before it. `edited`: the answer before
came back otherwise. `cut`: it was cut off, or ended by a text. `template`: see above. `unsupported`: the request has
something else that counts. `engine`: it cannot render, or does not take tokens.
"""

_DECIDING: Final = ("kv_transfer_params", "input_ids", "echo", "continue_final_message", "truncate_prompt_tokens")
"""Fields of a request under which an engine's prompt is not what is said above."""
_ENDING: Final = ("stop", "stop_token_ids", "ignore_eos")
"""Fields under which an output may end otherwise than with its end token."""
KNOWN_BYTES: Final = 700
"""What a turn that is remembered needs beside its tokens."""
_OF_AN_ANSWER: Final = frozenset({"role", "content", "reasoning", "reasoning_content", "tool_calls"})


class Refused(Exception):  # noqa: N818 - it is none for who calls
    """The prompt goes as it is."""

    def __init__(self, why: Prefix) -> None:
        """Say why."""
        super().__init__(why)
        self.why: Prefix = why


class Chat:
    """A chat's request: its messages, and a digest of the first n of them for each n."""

    __slots__ = ("body", "digests", "ends_itself", "messages")

    def __init__(self, body: bytes) -> None:
        """Read it. Raises `Refused` for what is not text alone, or asks for more than one answer."""
        try:
            read = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            raise Refused("unsupported") from None
        messages = read.get("messages") if isinstance(read, dict) else None
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise Refused("unsupported")
        if any(read.get(name) for name in _DECIDING) or read.get("n") not in (None, 1):
            raise Refused("unsupported")
        if read.get("add_generation_prompt") is False or not all(map(_is_text, messages)):
            raise Refused("unsupported")
        self.body: dict[str, Any] = read
        self.messages: list[dict[str, Any]] = messages
        self.ends_itself = not any(read.get(name) for name in _ENDING)
        self.digests = [b""]
        for message in messages:
            self.digests.append(_digest(self.digests[-1] + msgspec.json.encode(message, order="sorted")))

    @property
    def digest(self) -> bytes:
        """The digest of all messages."""
        return self.digests[-1]

    def until(self, count: int) -> bytes:
        """Return a request to render the first `count` messages, the last an answer that has ended."""
        asked = {**self._whole(), "messages": self.messages[:count], "add_generation_prompt": False}
        return msgspec.json.encode(asked)

    def all(self, body: bytes) -> bytes:
        """Return a request to render all messages of `body`, which is this chat's."""
        return msgspec.json.encode(self._whole()) if self.body.get("stream") else body

    def _whole(self) -> dict[str, Any]:
        """Return the body of the same chat whose answer is not streamed: SGLang renders no others (501)."""
        return {name: value for name, value in self.body.items() if name not in ("stream", "stream_options")}


class Known:
    """A turn that has ended well."""

    __slots__ = ("end", "ends_itself", "rendered_bytes", "rendered_digest", "size_bytes", "text")

    def __init__(self, chat: Chat, prompt: bytes, output: bytes, rendered: bytes, finish: str) -> None:
        """Keep the tokens of its prompt and output, and the digest of what its engine rendered for its messages."""
        self.text = prompt + output
        self.end = output[output.rfind(b",", 0, -1) + 1 :]
        """The last token of its output."""
        self.rendered_bytes = len(rendered)
        self.rendered_digest = _digest(rendered)
        self.ends_itself = chat.ends_itself and finish in ("stop", "tool_calls")
        self.size_bytes = KNOWN_BYTES + len(self.text)


def exact(known: Known, history: bytes, whole: bytes) -> bytes:
    """Return the exact prompt; it may be `whole`. Raises `Refused` if it is not certain."""
    opened = history[: known.rendered_bytes]
    if len(opened) < known.rendered_bytes or _digest(opened) != known.rendered_digest or not whole.startswith(history):
        raise Refused("template")
    answer = history[known.rendered_bytes :]
    tokens = answer.split(b",")[:-1]
    end = known.end[:-1]
    if tokens.count(end) != 1:
        raise Refused("template")
    tail = b"".join([b"%b," % each for each in tokens[tokens.index(end) + 1 :]])
    return known.text + tail + whole[len(history) :]


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def _is_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return content is None or isinstance(content, str) or _text_of_parts(content) is not None


def _text_of_parts(content: object) -> str | None:
    """Return the text of a list of texts; None if it has anything else."""
    if not isinstance(content, list):
        return None
    found = ""
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return None
        found += part["text"]
    return found


# --- an answer, and what its client made of it


def answer_in(message: dict[str, Any]) -> bytes:
    """Return a digest of what a message of the assistant says; empty if it says more than engines do."""
    if message.get("role") != "assistant" or any(message[name] for name in message.keys() - _OF_AN_ANSWER):
        return b""
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    text = content if isinstance(content, str) else _text_of_parts(content)
    if text is None or not isinstance(calls, list):
        return b""
    try:
        said = text, _thoughts(message), [_call(call) for call in calls]
        return _digest(msgspec.json.encode(said, order="sorted"))
    except (KeyError, TypeError, AttributeError):
        return b""


def _thoughts(message: dict[str, Any]) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""


def _call(call: dict[str, Any]) -> object:
    """Return a call; its arguments as values, since clients spell them anew."""
    function = call["function"]
    arguments = function.get("arguments") or ""
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(arguments)
    return call.get("id"), function["name"], arguments


def answer_of(body: bytes, *, streams: bool) -> bytes:
    """Return the same of a chat's answer, whole or streamed; empty if it cannot be read."""
    try:
        if streams:
            return answer_in(_joined(body))
        (choice,) = msgspec.json.decode(body)["choices"]
        message = choice["message"]
        return answer_in({name: message.get(name) for name in _OF_AN_ANSWER})
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError, AttributeError):
        return b""


def _joined(stream: bytes) -> dict[str, Any]:
    """Return the message of which a stream told the parts."""
    texts: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for event in events_in(stream):
        data = data_of(event)
        if not data or data == b"[DONE]":
            continue
        for choice in msgspec.json.decode(data).get("choices") or ():
            delta = choice.get("delta") or {}
            texts["content"] += delta.get("content") or ""
            texts["reasoning_content"] += _thoughts(delta)
            _join_calls(calls, delta.get("tool_calls") or ())
    return {"role": "assistant", **texts, "tool_calls": [calls[index] for index in sorted(calls)]}


def _join_calls(calls: dict[int, dict[str, Any]], parts: Sequence[dict[str, Any]]) -> None:
    for part in parts:
        call = calls.setdefault(part.get("index", 0), {"id": None, "function": {"name": "", "arguments": ""}})
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""
