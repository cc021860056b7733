"""What is decoded of bodies and answers; everything else in them is skipped, not built."""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw

# --- of a request's body


class PromptFields(msgspec.Struct, gc=False):
    """The top-level fields of a body's prompt, as sent; empty if missing.

    Of the chat APIs of OpenAI and Anthropic, of the Responses API, and of APIs that take a text or token ids. Messages
    are separated in the pass that finds them.
    """

    model: Raw = Raw()
    cache_salt: Raw = Raw()
    tools: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    messages: list[Raw] | None = None
    input: Raw = Raw()
    prompt: Raw = Raw()
    text: Raw = Raw()
    input_ids: Raw = Raw()
    prompt_token_ids: Raw = Raw()
    token_ids: Raw = Raw()


class BodyFields(PromptFields):
    """The few top-level fields that matter; everything else is skipped, not built."""

    program_id: Any = UNSET
    docker_ids: Any = UNSET
    extra_body: Any = None
    session_id: Any = None
    session_params: Any = None
    metadata: Any = None
    vllm_xargs: Any = None
    nvext: Any = None
    agent_hint: Any = None
    conversation_params: Any = None
    litellm_session_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    stream: Any = None
    stream_options: Any = None
    rid: Any = None
    request_id: Any = None
    previous_response_id: Any = None
    priority: Any = UNSET


# --- of an answer: the calls of tools


class CalledFunction(msgspec.Struct, gc=False):
    """The function of a call."""

    name: str | None = None
    arguments: Raw = Raw()


class ToolCall(msgspec.Struct, gc=False):
    """A call, or a piece of one."""

    index: int = 0
    function: CalledFunction | None = None


class CallingMessage(msgspec.Struct, gc=False):
    """A message that may call tools."""

    content: Raw = Raw()
    """A text; whatever else is there is not built."""
    tool_calls: list[ToolCall] | None = None


class CallingChoice(msgspec.Struct, gc=False):
    """A choice of a whole answer, or a piece of it, read for its calls."""

    index: int = 0
    text: Raw = Raw()
    message: CallingMessage | None = None
    delta: CallingMessage | None = None


class Item(msgspec.Struct, gc=False):
    """A content block of Anthropic, or an output item of the Responses API."""

    type: str | None = None
    name: str | None = None
    input: Raw = Raw()
    arguments: Raw = Raw()
    action: Raw = Raw()


class Calls(msgspec.Struct, gc=False):
    """The tool calls of a whole answer, in any of the APIs. Subclasses add the usage of those that report it there."""

    choices: list[CallingChoice] | None = None
    content: list[Item] | None = None
    output: list[Item] | None = None
    text: Raw = Raw()


class Delta(msgspec.Struct, gc=False):
    """A piece of a call's arguments."""

    partial_json: str = ""


class ChoicesEvent(msgspec.Struct, gc=False):
    """An event with choices."""

    choices: list[CallingChoice] | None = None


class TextEvent(msgspec.Struct, gc=False):
    """An event of SGLang's own API, with all the text so far."""

    text: Raw = Raw()


class ItemEvent(msgspec.Struct, gc=False):
    """An event of Anthropic's, or one of the Responses API."""

    type: str | None = None
    index: int = 0
    content_block: Item | None = None
    delta: Delta | None = None
    output_index: int = 0
    item: Item | None = None


# --- of an answer in OpenAI's format: its usage, and its text


class PromptDetails(msgspec.Struct, gc=False):
    """What is known of a prompt."""

    cached_tokens: int | None = None


class UsageObject(msgspec.Struct, gc=False):
    """The usage object of the chat API."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class UsageOnly(msgspec.Struct, gc=False):
    """An answer that calls nothing."""

    usage: UsageObject | None = None


class SoundChoice(msgspec.Struct, gc=False):
    """A choice that ended well."""

    finish_reason: (
        Literal["stop", "length", "tool_calls", "function_call", "content_filter", "eos_token", "stop_sequence"] | None
    ) = None


class SoundAnswer(UsageOnly):
    """An answer that surely reports no error: no other can be read so. See `AnswerErrorFields`."""

    object: Literal["chat.completion", "text_completion"] | None = None
    choices: list[SoundChoice] | None = None
    error: None = None
    type: None = None
    status: None = None
    response: None = None
    meta_info: None = None


class CallsAndUsage(Calls):
    """An answer that may call tools."""

    usage: UsageObject | None = None


class SaidFunction(msgspec.Struct, gc=False):
    """The function of a call, as it goes into the next prompt."""

    name: str | None = None
    arguments: Any = None


class SaidCall(msgspec.Struct, gc=False):
    """A call, as it goes into the next prompt."""

    index: int | None = None
    id: str | None = None
    function: SaidFunction | None = None


class SaidMessage(msgspec.Struct, gc=False):
    """What an answer says."""

    content: str | None = None
    tool_calls: list[SaidCall] | None = None


class SaidChoice(msgspec.Struct, gc=False):
    """A choice of a whole answer, or a piece of it."""

    index: int = 0
    text: str | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    message: SaidMessage | None = None
    delta: SaidMessage | None = None


class SaidChoices(msgspec.Struct, gc=False):
    """The choices of an answer, read for their text."""

    choices: list[SaidChoice] | None = None


# --- of an answer: where the APIs put errors


class AnswerErrorFields(msgspec.Struct, gc=False):
    """What may say that an answer is an error."""

    error: Any = None
    type: Any = None
    object: Any = None
    status: Any = None
    code: Any = None
    response: Any = None
    choices: Any = None
    meta_info: Any = None
