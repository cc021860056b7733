"""Asks an engine for the tokens of a turn, reads them from its answer, and takes out again what only we asked for.

Theory of operation
===================
What is asked for depends on the engine kind and the API (`_ASKS`). A field that the client gave itself is left as it
is, and its part of the answer stays. Of all that was added, the answer gets back what the engine would have written
without it: `null`, or nothing. Bytes are only cut and replaced, at members found by their exact spelling: a quote
within a text is escaped, so a quoted key with its colon is never part of a text.

What an engine says in its usual spelling is only cut out here, and decoded when somebody wants it (`Captured.read`).

A stream is edited event by event. An event that exists only because of what was asked is left out: SGLang's event of
the ids, and chunks without text in which an engine would have sent nothing.

What an engine does not say is missing, and nothing is guessed. An answer that cannot be read passes unchanged.
"""

# compiled: each recorded answer passes here, and each event of one

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from thunderagent.proxy.reading.capture_structs import (
    read_chunk,
    read_generated,
    read_logprobs,
    read_messages,
    read_response,
    read_response_event,
    read_sglext,
)
from thunderagent.proxy.reading.json_splice import set_value
from thunderagent.proxy.reading.sse import UNREADABLE, completed, data_of, events_in
from thunderagent.rollouts.tokens import text_of_ids, text_of_list

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
GENERATE: Final = "/generate"
TOKENS: Final = "/inference/v1/generate"

FLOAT_BYTES: Final = 32
"""What a log probability takes that is decoded."""

MAX_PENDING_BYTES: Final = 16 * 2**20
"""A stream with a longer event passes unchanged from then on."""


class OutputRead:
    """One choice as the engine reported it; its tokens are text."""

    __slots__ = ("finish", "listed", "logprobs", "spans", "text", "told")

    def __init__(self) -> None:
        """Begin without tokens."""
        self.listed = b""
        """Tokens after those of `text`, and log probabilities (`told`), in JSON, not yet decoded."""
        self.told = b""
        self.text = b""
        self.logprobs: list[float] = []
        self.finish = ""
        self.spans: list[tuple[str, int, int]] = []


class Captured:
    """What an answer said of its tokens. `prompt` is their text, None if it did not say them."""

    __slots__ = ("is_unreadable", "outputs", "prompt", "prompt_listed", "was_undone")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.prompt: bytes | None = None
        self.prompt_listed = b""
        """The prompt in JSON, not yet decoded."""
        self.outputs: dict[int, OutputRead] = {}
        self.is_unreadable = False
        self.was_undone = True
        """Whether all that was added could be taken out."""

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, without `prompt_listed`."""
        size_bytes = 0 if self.prompt is None else len(self.prompt)
        for output in self.outputs.values():
            size_bytes += len(output.listed) + len(output.told) + len(output.text) + FLOAT_BYTES * len(output.logprobs)
        return size_bytes

    def read(self) -> Captured:
        """Decode what is not yet decoded."""
        if self.prompt_listed:
            listed, self.prompt_listed = self.prompt_listed, b""
            try:
                self.prompt = text_of_list(listed)
            except UNREADABLE:
                self.is_unreadable = True
        self.read_outputs()
        return self

    def read_outputs(self) -> None:
        """Decode what of the outputs is not yet decoded."""
        for output in self.outputs.values():
            if output.listed:
                listed, output.listed = output.listed, b""
                try:
                    output.text += text_of_list(listed)
                except UNREADABLE:
                    self.is_unreadable = True
            if output.told:
                told, output.told = output.told, b""
                try:
                    _read_logprobs(output, told)
                except UNREADABLE:
                    self.is_unreadable = True


# --- what is asked


class Asked:
    """A body for the engine, with what was added to it."""

    __slots__ = ("body", "headers", "ids_added", "logprobs_added")

    def __init__(
        self,
        body: bytes,
        headers: tuple[tuple[str, str], ...] = (),
        *,
        ids_added: bool = False,
        logprobs_added: bool = False,
    ) -> None:
        """Note it."""
        self.body = body
        self.headers = headers
        self.ids_added = ids_added
        self.logprobs_added = logprobs_added


class _Ask:
    """How one API of an engine kind is asked: members to put into the body, and headers."""

    __slots__ = ("begins", "begins_ids", "headers", "ids", "logprobs", "names", "nested")

    def __init__(
        self,
        ids: tuple[bytes, bytes] | None = None,
        logprobs: tuple[bytes, bytes] | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        *,
        nested: bool = False,
    ) -> None:
        self.ids = ids
        self.logprobs = logprobs
        self.headers = headers
        self.nested = nested
        """Whether the log probabilities are asked for within `sampling_params`."""
        self.begins = self.begins_ids = b""
        """What a body begins with that asks for both, and for ids; empty if it is not so simple."""
        self.names = b"", b""
        if ids is not None and logprobs is not None and not nested:
            self.begins = b'{"%b":%b,"%b":%b,' % (*logprobs, *ids)
            self.begins_ids = b'{"%b":%b,' % ids
            self.names = b'"%b"' % ids[0], b'"%b"' % logprobs[0]


_SGLEXT: Final = (
    ("X-Sglext-Return-Input-Ids", "1"),
    ("X-Sglext-Return-Output-Ids", "1"),
    ("X-Sglext-Ids-Framed", "1"),
)
_RETURN_IDS: Final = (b"return_token_ids", b"true")
_TRUE: Final = (b"logprobs", b"true")
_OF_THE_SAMPLED: Final = (b"logprobs", b"0")

_ASKS: Final[dict[tuple[str, str], _Ask]] = {
    ("vllm", CHAT): _Ask(_RETURN_IDS, _TRUE),
    ("vllm", COMPLETIONS): _Ask(_RETURN_IDS, _OF_THE_SAMPLED),
    ("vllm", TOKENS): _Ask(_RETURN_IDS, _OF_THE_SAMPLED, nested=True),
    ("vllm", RESPONSES): _Ask((b"enable_response_messages", b"true")),
    ("sglang", CHAT): _Ask(None, _TRUE, _SGLEXT),
    ("sglang", COMPLETIONS): _Ask(_RETURN_IDS, _OF_THE_SAMPLED),
    ("sglang", GENERATE): _Ask((b"return_prompt_token_ids", b"true"), (b"return_logprob", b"true")),
}

_ECHO: Final = re.compile(rb'"echo"\s*:\s*(?!false|null)')
_SAMPLING: Final = re.compile(rb'"sampling_params"\s*:\s*\{\s*(?P<empty>\})?')


def ask(kind: str, path: str, body: bytes, *, logprobs: bool) -> Asked | None:
    """Return a body that asks for tokens, and for log probabilities if wanted; None if this API cannot be asked.

    `body` is a JSON object. A text that is to be echoed is not asked for: the engine would write another answer.
    """
    how = _ASKS.get((kind, path))
    if how is None or (path == COMPLETIONS and body.find(b'"echo"') >= 0 and _ECHO.search(body) is not None):
        return None
    of_ids, of_logprobs = how.names
    if of_ids and body.startswith(b'{"') and body.find(of_ids) < 0:
        if not logprobs:
            return Asked(how.begins_ids + body[1:], how.headers, ids_added=True)
        if body.find(of_logprobs) < 0:
            return Asked(how.begins + body[1:], how.headers, ids_added=True, logprobs_added=True)
    given, ids_added, logprobs_added = body, bool(how.headers), False
    if how.ids is not None:
        body = _with(body, how.ids[0], how.ids[1])
        ids_added = ids_added or body is not given
    if logprobs and how.logprobs is not None:
        given = body
        if how.nested:
            body = _with_nested(body, how.logprobs[0], how.logprobs[1])
        else:
            body = _with(body, how.logprobs[0], how.logprobs[1])
        logprobs_added = body is not given
    return Asked(body, how.headers, ids_added=ids_added, logprobs_added=logprobs_added)


def _with(body: bytes, name: bytes, value: bytes) -> bytes:
    """Return the body with a member; the same body if the client asks for something itself."""
    if body.find(b'"%b"' % name) >= 0:
        try:
            given = _read_members(body).get(name.decode())
        except UNREADABLE:
            return body
        if given is not None:
            asks = bytes(given) not in (b"false", b"null")
            return body if asks else set_value(body, name.decode(), value)
    opening = body.index(b"{") + 1
    comma = b"" if body[opening : opening + 16].lstrip()[:1] == b"}" else b","
    return b'%b"%b":%b%b%b' % (body[:opening], name, value, comma, body[opening:])


_read_members: Any = msgspec.json.Decoder(dict[str, Raw]).decode


def _with_nested(body: bytes, name: bytes, value: bytes) -> bytes:
    found = _SAMPLING.search(body)
    if found is None or body.find(b'"%b"' % name) >= 0:  # then the client has said something of them
        return body
    comma = b"" if found["empty"] else b","
    at = found.start("empty") if found["empty"] else found.end()
    return b'%b"%b":%b%b%b' % (body[:at], name, value, comma, body[at:])


# --- what an answer says

_NULL: Final = b"null"
_IDS_KEY: Final = b'"token_ids":['
_PROMPT_KEY: Final = b'"prompt_token_ids":['
_CHAT_LOGPROBS: Final = b'"logprobs":{"content":['
_CHAT_LOGPROBS_END: Final = b'"top_logprobs":[]}]}'
_TEXT_LOGPROBS: Final = b'"logprobs":{"text_offset":['
_NO_LOGPROBS: Final = b'"logprobs":null'
_REASON_KEY: Final = b',"finish_reason":"'
"""Members of a whole answer, as vLLM spells and orders them: log probabilities, reason, ids, the prompt's ids."""

_USUAL_EVENT: Final = re.compile(
    rb'(?P<head>data: \{[^{}\[\]]*"choices":\[\{"index":0,"(?:delta":(?P<delta>\{.*\})|text":".*"),"logprobs":)'
    rb'(?:null|\{"content":\[(?P<logprobs>.*)\]\})'
    rb'(?P<tail>,"finish_reason":null(?:,"(?:stop_reason|matched_stop|prompt_token_ids)":null)*)'
    rb'(?:,"token_ids":\[(?P<ids>[\d,]*)\])?\}\]\}\n\n',
    re.DOTALL,
).fullmatch
"""An event of chat or text completions, spelt as engines do. What is not spelt so is decoded."""

_EMPTY_DELTAS: Final = (b"{}", b'{"reasoning_content":null}')
"""Of chunks that engines send only for what was asked: vLLM's, SGLang's."""


class _Edits:
    """Members of a JSON text to be replaced, or cut out."""

    __slots__ = ("_after", "_cuts", "_text", "failed")

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._after: dict[bytes, int] = {}
        self._cuts: list[tuple[int, int, bytes]] = []
        self.failed = False

    def replace(self, key: bytes, value: Raw, new: bytes | None) -> None:
        """Give the next member with this key and value another one; None cuts it out, with a comma."""
        text, spelt, given = self._text, b'"%s":' % key, bytes(value)
        start = text.find(spelt, self._after.get(key, 0))
        while start >= 0:
            at = start + len(spelt) + (text[start + len(spelt) : start + len(spelt) + 1] == b" ")
            if text.startswith(given, at):
                break
            start = text.find(spelt, at)
        else:
            self.failed = True
            return
        end = self._after[key] = at + len(given)
        if new is not None:
            self._cuts.append((at, end, new))
            return
        if text[start - 1 : start] == b",":
            start -= 1
        elif text[start - 2 : start] == b", ":
            start -= 2
        elif text[end : end + 1] == b",":
            end += 2 if text[end + 1 : end + 2] == b" " else 1
        self._cuts.append((start, end, b""))

    def text(self) -> bytes:
        """Return the text with all of that."""
        if not self._cuts or self.failed:
            return self._text
        parts: list[bytes] = []
        at = 0
        for start, end, new in sorted(self._cuts):
            parts += [self._text[at : max(at, start)], new]
            at = end
        return b"".join((*parts, self._text[at:]))


class Capture:
    """Follows the answer to one turn."""

    __slots__ = (
        "_asked",
        "_begun",
        "_generated",
        "_ids",
        "_kind",
        "_logprobs",
        "_passes",
        "_path",
        "_streams",
        "_takes_usual",
        "_takes_usual_whole",
        "kept",
    )

    def __init__(self, kind: str, path: str, asked: Asked, *, streams: bool) -> None:
        """Expect the answer to what was asked."""
        self._kind = kind
        self._path = path
        self._asked = asked
        self._streams = streams
        self._begun = bytearray()
        self._generated = b""
        self._passes = False
        self._takes_usual_whole = kind == "vllm" and asked.ids_added and path in (CHAT, COMPLETIONS)
        self._takes_usual = asked.ids_added and (path == CHAT or (kind == "vllm" and path == COMPLETIONS))
        self._ids: list[bytes] = []
        """What usual events said, to be read together."""
        self._logprobs: list[bytes] = []
        self.kept = Captured()
        """What was said, as far as it is decoded."""

    @property
    def captured(self) -> Captured:
        """What was said."""
        return self.kept.read()

    # --- whole

    def take_whole(self, body: bytes) -> bytes:
        """Read a whole answer with status 200, and return what the client gets."""
        self._streams = False
        if self._takes_usual_whole and (edited := self._take_usual_whole(body)) is not None:
            return edited
        try:
            return self._edited(body) or b""
        except (*UNREADABLE, ValueError, OverflowError):
            self.kept.is_unreadable = True
            return body

    def _take_usual_whole(self, body: bytes) -> bytes | None:
        """Take an answer with one choice that is spelt as vLLM does; None if it is not, and must be decoded.

        Most of an answer is its two lists and the log probabilities. So it is searched from its end, for single
        brackets first, which costs least: its last two lists are the prompt's tokens and, before them, the output's.
        """
        # `find` and `rfind`, since `in` with bytes makes an exception on its way
        prompt_at = body.rfind(b"[") + 1
        if not body.endswith(_PROMPT_KEY, 0, prompt_at):
            return None
        prompt_start, prompt_end = prompt_at - len(_PROMPT_KEY), body.find(b"]", prompt_at) + 1
        ids_at = body.rfind(b"[", 0, prompt_start) + 1
        if not body.endswith(_IDS_KEY, 0, ids_at):
            return None
        start, end = ids_at - len(_IDS_KEY), body.find(b"]", ids_at) + 1
        reason_start = body.rfind(_REASON_KEY, 0, start)
        if reason_start < 0 or body.find(b"[", reason_start, start) >= 0:  # versions of weights
            return None
        if body.find(_REASON_KEY, end, prompt_start) >= 0 or body.find(_REASON_KEY, prompt_end) >= 0:
            return None  # another choice
        output, given_at = OutputRead(), reason_start
        if not body.endswith(_NO_LOGPROBS, 0, reason_start):
            key = _CHAT_LOGPROBS if self._path == CHAT else _TEXT_LOGPROBS
            given_at = body.rfind(key, 0, reason_start)
            if given_at < 0:
                return None
            is_one = self._path != CHAT or body.endswith(_CHAT_LOGPROBS_END, given_at, reason_start)
            if not is_one and body.rfind(b']},"', given_at, reason_start) >= 0:  # another member follows
                return None
            given_at += len(b'"logprobs":')
            output.told = body[given_at:reason_start]
        if body.find(_IDS_KEY, 0, given_at) >= 0:  # of another choice
            return None
        reason_at = reason_start + len(_REASON_KEY)
        output.finish = body[reason_at : body.find(b'"', reason_at)].decode()
        output.listed, self.kept.prompt_listed = body[ids_at - 1 : end], body[prompt_at - 1 : prompt_end]
        self.kept.outputs[0] = output
        if not output.told or not self._asked.logprobs_added:
            return b"null".join((body[: ids_at - 1], body[end : prompt_at - 1], body[prompt_end:]))
        parts = body[:given_at], body[reason_start : ids_at - 1], body[end : prompt_at - 1], body[prompt_end:]
        return b"null".join(parts)

    # --- streams

    @property
    def pending_bytes(self) -> int:
        """Size of the incomplete event."""
        return len(self._begun)

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes of a stream, and return what the client gets now: whole events."""
        if self._passes:
            return piece
        whole = completed(self._begun, piece)
        if len(self._begun) > MAX_PENDING_BYTES:
            self._passes, self.kept.is_unreadable = True, True
            whole += self._begun
            self._begun.clear()
            return whole
        return b"".join([self._take_event(event) for event in events_in(whole)]) if whole else b""

    def rest(self) -> bytes:
        """Return what is left when the stream has ended: an incomplete event."""
        rest = bytes(self._begun)
        self._begun.clear()
        self._read_usual()
        if self._generated:
            self._keep_generated(self._generated)
            self._generated = b""
        return rest

    def _take_event(self, event: bytes) -> bytes:
        if self._takes_usual and (usual := _USUAL_EVENT(event)) is not None:
            logprobs, ids = usual["logprobs"], usual["ids"]
            if logprobs is None or self._asked.logprobs_added:
                return self._take_usual(usual, logprobs, ids)
        if self._ids or self._logprobs:
            self._read_usual()
            self.kept.read_outputs()
        data = data_of(event)
        if not data or data == b"[DONE]":
            return event
        try:
            edited = self._edited(data)
        except (*UNREADABLE, ValueError, OverflowError):
            self.kept.is_unreadable = True
            return event
        if edited is None:
            return b""
        return event if edited is data else event.replace(data, edited, 1)

    def _take_usual(self, usual: re.Match[bytes], logprobs: bytes | None, ids: bytes | None) -> bytes:
        """Take an event with one choice that does not end: its tokens are read later, with those of others."""
        if ids:
            self._ids.append(ids)
        if logprobs:
            self._logprobs.append(logprobs)
        if usual["delta"] in _EMPTY_DELTAS and (ids or logprobs):
            return b""
        if ids is None and logprobs is None:
            return usual[0]
        tail = usual["tail"] if ids is None else usual["tail"] + b',"token_ids":null'
        return b"%snull%s}]}\n\n" % (usual["head"], tail)

    def _read_usual(self) -> None:
        """Keep the tokens of the usual events so far, to be decoded with the next that are not, or at the end."""
        ids, logprobs = self._ids, self._logprobs
        if ids or logprobs:
            self._ids, self._logprobs = [], []
            output = self._output(0)
            output.listed = b"[%b]" % b",".join(ids) if ids else b""
            output.told = b'{"content":[%b]}' % b",".join(logprobs) if logprobs else b""

    def _edited(self, data: bytes) -> bytes | None:
        """Read a whole answer, or an event; return it edited, None for an event that is left out."""
        if self._path == RESPONSES:
            return self._take_response_event(data) if self._streams else self._take_response(data)
        return self._take_generated(data) if self._path == GENERATE else self._take_chunk(data)

    # --- chat, completions and the token API

    def _take_chunk(self, data: bytes) -> bytes | None:
        """Read an answer with choices, or an event of one."""
        chunk, edits, asked = read_chunk(data), _Edits(data), self._asked
        if (sglext := bytes(chunk.sglext)) and sglext != _NULL:
            self._read_sglext(sglext)
            if asked.ids_added and self._streams and not chunk.choices:
                return None
            if asked.ids_added:
                edits.replace(b"sglext", chunk.sglext, None)
        if has_value(chunk.prompt_token_ids):
            self._read_prompt(chunk.prompt_token_ids)
            if asked.ids_added:
                is_left_out = self._path == TOKENS and self._streams
                edits.replace(b"prompt_token_ids", chunk.prompt_token_ids, None if is_left_out else _NULL)
        for choice in chunk.choices:
            self._take_choice(choice, edits)
        if chunk.metadata is not None:
            self._read_spans(0, chunk.metadata.weight_versions)
        if self._streams and chunk.choices and self._is_only_ours(chunk.choices):
            return None
        if edits.failed:
            self.kept.was_undone = False
        return edits.text()

    def _is_only_ours(self, choices: Sequence[Any]) -> bool:
        """Return whether an event would not be there without what was asked."""
        if self._path != CHAT or not (self._asked.ids_added or self._asked.logprobs_added):
            return False
        return all(
            choice.finish_reason is None
            and bytes(choice.delta) in _EMPTY_DELTAS
            and (has_value(choice.logprobs) or has_value(choice.token_ids))
            for choice in choices
        )

    def _take_choice(self, choice: Any, edits: _Edits) -> None:
        output, asked = self._output(choice.index), self._asked
        if has_value(choice.token_ids):
            output.text += text_of_list(bytes(choice.token_ids))
            if asked.ids_added and self._path != TOKENS:
                edits.replace(b"token_ids", choice.token_ids, self._unasked)
        if has_value(choice.prompt_token_ids):
            self._read_prompt(choice.prompt_token_ids)
            if asked.ids_added:
                edits.replace(b"prompt_token_ids", choice.prompt_token_ids, self._unasked)
        if has_value(choice.logprobs):
            _read_logprobs(output, choice.logprobs)
            if asked.logprobs_added:
                edits.replace(b"logprobs", choice.logprobs, _NULL)
        output.finish = choice.finish_reason or output.finish
        self._read_spans(choice.index, choice.weight_versions)

    @property
    def _unasked(self) -> bytes | None:
        """What stands for ids that nobody asked for."""
        return _NULL if self._kind == "vllm" else None

    def _output(self, index: int) -> OutputRead:
        found = self.kept.outputs.get(index)
        if found is None:
            found = self.kept.outputs[index] = OutputRead()
        return found

    def _read_prompt(self, ids: Raw) -> None:
        if not self.kept.prompt_listed:
            self.kept.prompt_listed = bytes(ids)

    def _read_spans(self, index: int, spans: list[Any] | None) -> None:
        if spans:
            self._output(index).spans = [(each.version or "", each.start, each.end) for each in spans]

    def _read_sglext(self, sglext: bytes) -> None:
        read = read_sglext(sglext)
        self.kept.prompt_listed = bytes(read.input_ids) if has_value(read.input_ids) else b""
        for index, ids in enumerate(read.output_ids or ()):
            self._output(index).text = text_of_list(bytes(ids))

    # --- SGLang's /generate: each event has all tokens so far

    def _take_generated(self, data: bytes) -> bytes:
        if self._streams:
            self._generated = data  # the last one counts
        else:
            self._keep_generated(data)
        return self._without_added(data)

    def _without_added(self, data: bytes) -> bytes:
        if self._asked.ids_added:
            data = _cut(data, b'"prompt_token_ids":', _AFTER_LIST)
        if self._asked.logprobs_added:
            for key, end in _LOGPROBS_OF_GENERATE:
                data = _cut(data, key, end)
        return data

    def _keep_generated(self, data: bytes) -> None:
        try:
            read = read_generated(data)
        except UNREADABLE:
            self.kept.is_unreadable = True
            return
        if read.index:  # several choices, or prompts: the last event has only one of them
            self.kept.is_unreadable = True
        meta, output = read.meta_info, self._output(0)
        self.kept.prompt_listed = bytes(read.prompt_token_ids) if has_value(read.prompt_token_ids) else b""
        output.text = text_of_ids(read.output_ids or ())
        output.logprobs = [row[0] for row in meta.output_token_logprobs or ()]
        output.finish = str(meta.finish_reason.get("type", "")) if meta.finish_reason else ""
        self._read_spans(0, meta.weight_versions)

    # --- vLLM's responses

    def _take_response(self, data: bytes) -> bytes:
        read, edits = read_response(data), _Edits(data)
        self._keep_response(read, edits)
        return edits.text()

    def _take_response_event(self, data: bytes) -> bytes:
        if b'"input_messages":[' not in data and b'"input_messages": [' not in data:
            return data
        read, edits = read_response_event(data).response, _Edits(data)
        if read is not None:
            self._keep_response(read, edits)
        return edits.text()

    def _keep_response(self, read: Any, edits: _Edits) -> None:
        if has_value(read.input_messages):
            self.kept.prompt = b"".join([text_of_ids(part.tokens) for part in read_messages(read.input_messages)])
            if self._asked.ids_added:
                edits.replace(b"input_messages", read.input_messages, _NULL)
        if has_value(read.output_messages):
            output = self._output(0)
            output.text = b"".join([text_of_ids(part.tokens) for part in read_messages(read.output_messages)])
            output.finish = (read.incomplete_details or {}).get("reason") or read.status or ""
            if self._asked.ids_added:
                edits.replace(b"output_messages", read.output_messages, _NULL)
        if edits.failed:
            self.kept.was_undone = False


def _read_logprobs(output: OutputRead, logprobs: Any) -> None:
    read = read_logprobs(logprobs)
    if read.content is not None:
        output.logprobs += [each.logprob for each in read.content]
    elif read.token_logprobs is not None:
        output.logprobs += read.token_logprobs


_AFTER_LIST: Final = re.compile(rb"\[[^\]\[]*\]")
_AFTER_ROWS: Final = re.compile(rb'\[\]|\[(?:\[[^\]\["]*(?:"(?:[^"\\]|\\.)*"[^\]\["]*)*\],?\s*)*\]')
_AFTER_NUMBER: Final = re.compile(rb"\d+")
_LOGPROBS_OF_GENERATE: Final = (
    (b'"input_token_logprobs":', _AFTER_ROWS),
    (b'"output_token_logprobs":', _AFTER_ROWS),
    (b'"output_token_logprobs_length":', _AFTER_NUMBER),
)


def has_value(raw: Raw) -> bool:
    """Return whether a member is there, and not null."""
    return bytes(raw) not in (b"", _NULL)


def _cut(data: bytes, key: bytes, value: re.Pattern[bytes]) -> bytes:
    """Return the data without the members that begin with `key`, and without their commas."""
    start = -1
    while (start := data.find(key, start + 1)) >= 0:
        found = value.match(data, start + len(key))
        if found is None:
            continue
        end = found.end()
        if data[start - 1 : start] == b",":
            data = data[: start - 1] + data[end:]
        else:
            data = data[:start] + data[end + (data[end : end + 1] == b",") :]
    return data
