"""OpenAI's chat API as far as Nova supports it: requests, and the shapes of answers."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from thunderagent.bodies import decode_body

Json = dict[str, Any]

_DATA_URL: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)


class ApiError(Exception):
    """A refused request, with its status and OpenAI's error format."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "invalid_request_error", param: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self._kind = kind
        self._param = param

    def body(self) -> Json:
        """Return the answer's body."""
        error = {"message": self.message, "type": self._kind, "param": self._param or None, "code": self.status}
        return {"error": error}


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A text in a message."""

    text: str


class ImageUrl(msgspec.Struct):
    """An image's URL; `detail` has no effect."""

    url: str
    detail: str = "auto"


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: ImageUrl


class Message(msgspec.Struct):
    """One message. Other fields are passed on to the chat template."""

    role: str
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct):
    """Whether a stream's last event has the usage."""

    include_usage: bool = False


class ChatBody(msgspec.Struct):
    """A request. Decoding is greedy: sampling parameters are accepted, and have no effect."""

    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    response_format: Any = None
    program_id: str | None = None


class ReleaseBody(msgspec.Struct):
    """The program whose slot is freed."""

    program_id: str


def parse(body: bytes, kind: type[Any]) -> Any:
    """Parse a body; ApiError if it is invalid."""
    try:
        return decode_body(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"The body cannot be read: {error}") from None


def check(body: ChatBody, model_name: str) -> None:
    """Refuse what cannot be served: ApiError."""
    if body.model not in (None, model_name):
        raise ApiError(f"There is no model {body.model!r} here.", status=404, kind="not_found_error", param="model")
    if not body.messages:
        raise ApiError("A chat needs at least one message.", param="messages")
    if body.n not in (None, 1):
        raise ApiError("n must be 1.", param="n")
    if body.logprobs:
        raise ApiError("logprobs are not supported.", param="logprobs")
    if isinstance(body.response_format, dict) and body.response_format.get("type") not in (None, "text"):
        raise ApiError("Structured outputs are not supported.", param="response_format")
    for name in ("max_tokens", "max_completion_tokens"):
        wanted = getattr(body, name)
        if wanted is not None and wanted < 1:
            raise ApiError("max_tokens must be at least 1.", param=name)


def stops_of(body: ChatBody) -> tuple[str, ...]:
    """Return the texts that end an answer."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return tuple(stop for stop in stops if stop)


def template_messages(messages: Sequence[Message]) -> list[Json]:
    """Return messages in the format of chat templates: an image is only its place."""
    said = []
    for message in messages:
        fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
        content = message.content
        if isinstance(content, list):
            fields["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in content
            ]
        else:
            fields["content"] = content or ""
        said.append(fields)
    return said


def images_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the bytes of all images, in order; ApiError for one that is no data URL: nothing is fetched."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return [_bytes_of(part.image_url.url) for part in parts if isinstance(part, ImagePart)]


def _bytes_of(url: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise ApiError(
            "An image must be a data URL, data:image/...;base64,...: images are not fetched.", param="image_url"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except binascii.Error:
        raise ApiError("An image's data is not base64.", param="image_url") from None


class ChatForm:
    """The answers to one request: whole, or in events."""

    def __init__(self, answer_id: str, created_s: int, model_name: str) -> None:
        self._common = {"id": answer_id, "created": created_s, "model": model_name}

    def whole(self, text: str, finish_reason: str, usage: Json) -> Json:
        """Return the answer in one."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._common, "object": "chat.completion", "choices": [choice], "usage": usage}

    def event(self, text: str, finish_reason: str | None = None, *, is_first: bool = False) -> bytes:
        """Return an event with the next part of the text."""
        delta: Json = {"role": "assistant"} if is_first else {}
        delta["content"] = text
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event_bytes({**self._common, "object": "chat.completion.chunk", "choices": [choice]})

    def usage_event(self, usage: Json) -> bytes:
        """Return the event with the usage."""
        return event_bytes({**self._common, "object": "chat.completion.chunk", "choices": [], "usage": usage})


DONE: Final = b"data: [DONE]\n\n"


def event_bytes(value: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage_of(prompt_tokens: int, image_tokens: int, output_tokens: int) -> Json:
    """Return the usage, with the images' tokens also listed separately; the prompt's count includes them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"image_tokens": image_tokens},
    }
