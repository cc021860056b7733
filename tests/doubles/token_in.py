"""The embedded engine with an extra endpoint for tokens in, tokens out: `/inference/v1/generate` (vLLM 0.32).

Written after `vllm/entrypoints/scale_out/token_in_token_out`.
"""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from thunderagent.simulator.embedded.answers import Json, event_bytes, final_usage_of
from thunderagent.simulator.embedded.endpoints import EngineServer
from thunderagent.simulator.embedded.requests import ApiError, GenerationBody, StreamOptions, parse
from thunderagent.simulator.embedded.server import main

if TYPE_CHECKING:
    from thunderagent.simulator.embedded.options import ServerConfig
    from thunderagent.simulator.engine.records import FinishedRequest


class SamplingParams(msgspec.Struct):
    """The supported sampling parameters."""

    max_tokens: int | None = 16
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    n: int | None = 1


class TokenInBody(GenerationBody, kw_only=True):
    """The body of POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""

    def __post_init__(self) -> None:
        """Copy the sampling parameters to the fields of the other bodies."""
        sampling = self.sampling_params
        self.max_tokens, self.min_tokens = sampling.max_tokens, sampling.min_tokens
        self.ignore_eos, self.n = sampling.ignore_eos, sampling.n

    def prompt(self) -> list[int]:
        """Return the prompt's tokens; ApiError for negative ones."""
        if any(token < 0 for token in self.token_ids):
            raise ApiError("token_ids must not contain negative values", param="token_ids")
        return self.token_ids


@dataclass(frozen=True, slots=True)
class TokenInForm:
    """Shape an answer as token ids."""

    model: str
    options: StreamOptions
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> bytes:
        """Return the opening of a stream: nothing."""
        return b""

    def piece(self, token_ids: list[int], words: list[str], finish_reason: str | None) -> bytes:
        """Return the event for these tokens."""
        choice = {"index": 0, "finish_reason": finish_reason, "stop_reason": None, "token_ids": token_ids}
        chunk = {"request_id": self.request_id, "usage": None, "output_mode": "tokens"}
        return event_bytes({**chunk, "choices": [{**choice, "logprobs": None}]})

    def closing(self, words: list[str], finish_reason: str, finished: FinishedRequest) -> bytes:
        """Return the end of a stream."""
        usage = {"request_id": self.request_id, "usage": final_usage_of(finished), "output_mode": "tokens"}
        last = event_bytes({**usage, "choices": []}) if self.options.include_usage else b""
        return last + b"data: [DONE]\n\n"

    def whole(self, token_ids: list[int], words: list[str], finish_reason: str, finished: FinishedRequest) -> Json:
        """Return the answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "stop_reason": None}
        return {
            "request_id": self.request_id,
            "model": self.model,
            "created": self.created,
            "usage": final_usage_of(finished),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
            "output_mode": "tokens",
            "choices": [{**choice, "token_ids": token_ids, "logprobs": None}],
        }


def token_in_server(config: ServerConfig) -> EngineServer:
    """Return the embedded engine with that endpoint."""
    server = EngineServer(config)

    async def answer(request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), TokenInBody)
        form = TokenInForm(config.model, body.stream_options or StreamOptions())
        if body.request_id:
            form = TokenInForm(config.model, form.options, body.request_id)
        prompt, said = server.composed(body, body.prompt())
        return await server.answer_in_events(request, body, prompt, said, form)

    server.app.router.add_post("/inference/v1/generate", answer)
    return server


if __name__ == "__main__":
    sys.exit(main(build=token_in_server))
