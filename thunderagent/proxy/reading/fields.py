"""The fields of a request's body that are looked at; everything else is skipped, not built."""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw


class PromptFields(msgspec.Struct):
    """The top-level fields of a body that its prompt is made of, as they were sent; empty if they are not there.

    Of the chat APIs of OpenAI and Anthropic, of the Responses API, and of what takes a text or token ids. Messages are
    told apart in the pass that finds them.
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
    """The few top-level fields that are looked at; everything else is skipped, not built."""

    program_id: Any = UNSET
    extra_body: Any = None
    session_id: Any = None
    session_params: Any = None
    metadata: Any = None
    vllm_xargs: Any = None
    nvext: Any = None
    agent_hint: Any = None
    conversation_params: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    stream: Any = None
    stream_options: Any = None
    previous_response_id: Any = None
    priority: Any = UNSET
