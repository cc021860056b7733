"""What is decoded of answers for their tokens; everything else in them is skipped, not built."""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct


class _Token(Struct):
    logprob: float


class _Logprobs(Struct):
    content: list[_Token] | None = None
    token_logprobs: list[float] | None = None


class _SpanRead(Struct):
    version: str | None = None
    start: int = 0
    end: int = 0


class _Choice(Struct):
    index: int = 0
    finish_reason: str | None = None
    logprobs: Raw = Raw()
    token_ids: Raw = Raw()
    prompt_token_ids: Raw = Raw()
    delta: Raw = Raw()
    weight_versions: list[_SpanRead] | None = None


class _Sglext(Struct):
    input_ids: Raw = Raw()
    output_ids: list[Raw] | None = None


class _Metadata(Struct):
    weight_versions: list[_SpanRead] | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    prompt_token_ids: Raw = Raw()
    sglext: Raw = Raw()
    metadata: _Metadata | None = None


class _Generated(Struct):
    class Meta(Struct):
        finish_reason: dict[str, Any] | None = None
        output_token_logprobs: list[tuple[float, int, Any]] | None = None
        weight_versions: list[_SpanRead] | None = None

    meta_info: Meta
    index: int = 0
    output_ids: list[int] | None = None
    prompt_token_ids: Raw = Raw()


class _Message(Struct):
    tokens: list[int]


class _Response(Struct):
    status: str | None = None
    incomplete_details: dict[str, str] | None = None
    input_messages: Raw = Raw()
    output_messages: Raw = Raw()


class _ResponseEvent(Struct):
    response: _Response | None = None


read_logprobs: Final = msgspec.json.Decoder(_Logprobs).decode
read_chunk: Final = msgspec.json.Decoder(_Chunk).decode
read_sglext: Final = msgspec.json.Decoder(_Sglext).decode
read_generated: Final = msgspec.json.Decoder(_Generated).decode
read_messages: Final = msgspec.json.Decoder(list[_Message]).decode
read_response: Final = msgspec.json.Decoder(_Response).decode
read_response_event: Final = msgspec.json.Decoder(_ResponseEvent).decode
