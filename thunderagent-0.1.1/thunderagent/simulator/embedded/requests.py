"""Parses the embedded engine's requests, and refuses what vLLM refuses (vLLM 0.32, `vllm/entrypoints/openai`)."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from thunderagent.bodies import decode_body

if TYPE_CHECKING:
    from thunderagent.simulator.embedded.tokens import WordTokenizer

IMAGE_TOKENS = 85
CHARS_PER_IMAGE_TOKEN = 1250
"""An image takes a fixed number of tokens, and one more for this many characters of its data: no real model's
formula."""

Json: TypeAlias = dict[str, Any]
_Body = TypeVar("_Body", bound=msgspec.Struct)


class ApiError(Exception):
    """An error for the client, in vLLM's schema."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> Json:
        """Return the body of the response that says so."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


def parse(data: bytes, kind: type[_Body]) -> _Body:
    """Return the body of a request; ApiError for invalid JSON, and for JSON of another shape."""
    try:
        return decode_body(data, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"The request body is not valid: {error}", kind="Bad Request") from error


class Message(msgspec.Struct):
    """One message of a chat; fields without words of their own are ignored."""

    role: str
    content: str | list[Json] | None = None
    tool_calls: list[Json] | None = None

    def text(self) -> str:
        """Return all the words of the message; ApiError for a part that is no text."""
        parts = self.content if isinstance(self.content, list) else [{"text": self.content or ""}]
        words = [_part_text(part) for part in parts]
        if self.tool_calls:
            words.append(json_text([call.get("function") for call in self.tool_calls]))
        return " ".join(words)


class StreamOptions(msgspec.Struct):
    """What a stream contains besides its text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(msgspec.Struct, kw_only=True):
    """The common fields of both ways to ask for text; sampling parameters are accepted and ignored."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    priority: int = 0
    stop: str | list[str] | None = None

    def stops(self) -> list[str]:
        """Return the texts at which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def validate(self, *, allows_priority: bool) -> None:
        """Raise ApiError for what vLLM refuses, or this engine cannot do."""
        if self.n not in (None, 1):
            raise ApiError("This engine generates one choice for a request: n must be 1.", param="n")
        if self.priority != 0 and not allows_priority:
            raise ApiError(f"Got priority {self.priority} but Priority scheduling is not enabled.", param="priority")
        if self.stream_options is not None and not self.stream:
            raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
        limit_tokens, min_tokens = self.limit_tokens, self.min_tokens or 0
        if limit_tokens is not None and limit_tokens < 1:
            raise ApiError(f"max_tokens must be at least 1, got {limit_tokens}.", param="max_tokens")
        if min_tokens < 0:
            raise ApiError(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
        if limit_tokens is not None and min_tokens > limit_tokens:
            raise ApiError(f"min_tokens must be less than or equal to max_tokens={limit_tokens}, got {min_tokens}.")

    @property
    def limit_tokens(self) -> int | None:
        """Return how many tokens the client asks for at most."""
        return self.max_tokens

    def answer_limit_tokens(self, prompt_tokens: int, context_limit_tokens: int) -> int:
        """Return the limit of the answer; ApiError, with vLLM's text, if the context cannot hold it."""
        if prompt_tokens == 0:
            raise ApiError("The decoder prompt cannot be empty", param="prompt")
        limit_tokens = self.limit_tokens
        if prompt_tokens + (limit_tokens or 1) > context_limit_tokens:
            raise ApiError(
                f"This model's maximum context length is {context_limit_tokens} tokens. However, you requested "
                f"{limit_tokens or 0} output tokens and your prompt contains {prompt_tokens} input tokens, for a "
                f"total of {prompt_tokens + (limit_tokens or 0)} tokens. Please reduce the length of the input "
                f"prompt or the number of requested output tokens. (parameter=input_tokens, value={prompt_tokens})",
                param="input_tokens",
            )
        return context_limit_tokens - prompt_tokens if limit_tokens is None else limit_tokens


class ChatBody(GenerationBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    tools: list[Json] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None

    @property
    def limit_tokens(self) -> int | None:
        """Return how many tokens the client asks for at most; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def encode(self, tokenizer: WordTokenizer) -> list[int]:
        """Return the prompt's tokens; ApiError for a part of a message that is no text."""
        return _encode_chat(tokenizer, self.messages, self.tools, self.add_generation_prompt)


class CompletionBody(GenerationBody, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    max_tokens: int | None = 16  # as in vLLM
    response_format: Json | None = None
    structured_outputs: Json | None = None

    def as_chat(self) -> ChatBody:
        """Return what decides about the form of the answer, as a chat."""
        return ChatBody(
            messages=[],
            stop=self.stop,
            response_format=self.response_format,
            structured_outputs=self.structured_outputs,
        )

    def encode(self, tokenizer: WordTokenizer) -> list[int]:
        """Return the prompt's tokens; ApiError for several prompts."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if all(type(token) is int and token >= 0 for token in prompt):
            return prompt
        raise ApiError("prompt must be one text or one list of token ids: several are not supported.", param="prompt")


class EmbeddingsBody(msgspec.Struct):
    """The body of POST /v1/embeddings: a text or its tokens, or several."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None

    def encode(self, tokenizer: WordTokenizer) -> list[list[int]]:
        """Return the tokens of each text; ApiError if there is none."""
        given: Any = self.input
        is_one = isinstance(given, str) or (bool(given) and all(isinstance(token, int) for token in given))
        texts = [given] if is_one else given
        if any(isinstance(text, int) for text in texts):
            raise ApiError("The input must be texts, or tokens, not both.", param="input")
        encoded = [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
        if not encoded or not all(encoded):
            raise ApiError("The input cannot be empty.", param="input")
        return encoded


class TokenizeBody(msgspec.Struct):
    """The body of POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Json] | None = None
    add_generation_prompt: bool = True

    def encode(self, tokenizer: WordTokenizer) -> list[int]:
        """Return the tokens; ApiError if there is nothing to tokenize."""
        if self.messages is not None:
            return _encode_chat(tokenizer, self.messages, self.tools, self.add_generation_prompt)
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        raise ApiError("The request body needs a prompt or messages.", kind="Bad Request")


class DetokenizeBody(msgspec.Struct):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def _encode_chat(
    tokenizer: WordTokenizer,
    messages: list[Message],
    tools: list[Json] | None,
    add_generation_prompt: bool,
) -> list[int]:
    chat = [(message.role, message.text()) for message in messages]
    return tokenizer.encode_chat(
        chat, tools=json_text(tools) if tools else "", add_generation_prompt=add_generation_prompt
    )


def _part_text(part: Json) -> str:
    if (data := _image_data(part)) is not None:
        name = blake2b(data.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
        count = IMAGE_TOKENS + len(data) // CHARS_PER_IMAGE_TOKEN
        return " ".join(f"<image-{name}-{number}>" for number in range(count))
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(f"This model reads text only, got a part of type {part.get('type')!r}.", param="messages")
    return text


def _image_data(part: Json) -> str | None:
    """Return the data URL of an image; None for any other part."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    return url if isinstance(url, str) and url.startswith("data:image/") else None


def json_text(value: object) -> str:
    """Return JSON as text of several words, so that its length counts."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
