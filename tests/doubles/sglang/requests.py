"""Read requests to the simulator's engine in SGLang's form (0.5, `managers/io_struct.py`, `entrypoints/openai`)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from thunderagent.simulator.embedded.requests import ApiError, ChatBody, CompletionBody, StreamOptions

if TYPE_CHECKING:
    from thunderagent.simulator.embedded.tokens import WordTokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of one generation. `limit_tokens` None: the context is the limit."""

    rid: str
    prompt: list[int]
    limit_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    priority: int
    tag: str | None
    wants_logprobs: bool = False

    def answer_limit_tokens(self, context_limit_tokens: int) -> int:
        """Return the token limit of the answer; ApiError, in SGLang's words, if the context cannot hold it."""
        prompt_tokens = len(self.prompt)
        if prompt_tokens == 0:
            raise ApiError("The input is empty.")
        if prompt_tokens >= context_limit_tokens:
            raise ApiError(
                f"The input ({prompt_tokens} tokens) is longer than the model's context length "
                f"({context_limit_tokens} tokens)."
            )
        if self.limit_tokens is None:
            return context_limit_tokens - prompt_tokens
        if self.limit_tokens < 1 or self.min_tokens > self.limit_tokens:
            raise ApiError(f"min_new_tokens must be in [0, max_new_tokens({self.limit_tokens})], which is at least 1.")
        if prompt_tokens + self.limit_tokens > context_limit_tokens:
            raise ApiError(
                f"Requested token count exceeds the model's maximum context length of {context_limit_tokens} tokens. "
                f"You requested a total of {prompt_tokens + self.limit_tokens} tokens: {prompt_tokens} tokens from the "
                f"input messages and {self.limit_tokens} tokens for the completion. Please reduce the number of tokens "
                "in the input messages or the completion to fit within the limit."
            )
        return self.limit_tokens


class Sampling(msgspec.Struct):
    """Sampling parameters; others are accepted and ignored."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1


class GenerateBody(msgspec.Struct):
    """The body of POST /generate: one prompt, or several."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: Sampling | list[Sampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = False
    return_logprob: bool | None = False
    session_id: str | None = None
    priority: int | None = None

    @property
    def is_batch(self) -> bool:
        """Return whether it asks for a list of answers."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def asked(self, tokenizer: WordTokenizer) -> list[Asked]:
        """Return a request for each prompt; ApiError for an invalid body."""
        prompts = self._prompts(tokenizer)
        count = len(prompts)
        samplings = self.sampling_params or Sampling()
        samplings = samplings if isinstance(samplings, list) else [samplings] * count
        rids = self._rids(count)
        if not prompts:
            raise ApiError("The input is empty.")
        if len(samplings) != count or len(rids) != count:
            raise ApiError("The specified rids or sampling_params mismatch with the batch_size for batch processing.")
        if any(sampling.n != 1 for sampling in samplings):
            raise ApiError("This engine generates one sample for a prompt: n must be 1.")
        return [
            Asked(
                rid=rid,
                prompt=prompt,
                limit_tokens=sampling.max_new_tokens,
                min_tokens=sampling.min_new_tokens,
                ignore_eos=sampling.ignore_eos,
                priority=self.priority or 0,
                tag=self.session_id,
                wants_logprobs=bool(self.return_logprob),
            )
            for rid, prompt, sampling in zip(rids, prompts, samplings, strict=True)
        ]

    def _prompts(self, tokenizer: WordTokenizer) -> list[list[int]]:
        if (self.text is None) == (self.input_ids is None):
            raise ApiError("Either text, input_ids or input_embeds should be provided.")
        if self.text is not None:
            return [tokenizer.encode(text) for text in ([self.text] if isinstance(self.text, str) else self.text)]
        prompts: list[Any] = (self.input_ids or []) if self.is_batch else [self.input_ids]
        if not all(isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in prompts):
            raise ApiError("input_ids is a list of integers, or a list of such lists.")
        return prompts

    def _rids(self, count: int) -> list[str]:
        if isinstance(self.rid, list):
            return self.rid
        if self.rid is not None:
            return [self.rid] if not self.is_batch else [f"{self.rid}_{index}" for index in range(count)]
        return [uuid.uuid4().hex for _ in range(count)]


class SglangChatBody(ChatBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    rid: str | None = None
    session_id: str | None = None


class SglangCompletionBody(CompletionBody, kw_only=True):
    """The body of POST /v1/completions."""

    rid: str | None = None
    session_id: str | None = None


def asked_of(body: SglangChatBody | SglangCompletionBody, tokenizer: WordTokenizer) -> Asked:
    """Return the request of a body of OpenAI's API; ApiError if it is refused."""
    if body.n not in (None, 1):
        raise ApiError("This engine generates one choice for a request: n must be 1.", param="n")
    if body.limit_tokens is not None and body.limit_tokens < 1:
        raise ApiError("max_tokens must be positive", kind="Bad Request")
    return Asked(
        rid=body.rid or uuid.uuid4().hex,
        prompt=body.encode(tokenizer),
        limit_tokens=body.limit_tokens,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        priority=body.priority,
        tag=body.session_id,
    )


def wants_usage(options: StreamOptions | None) -> bool:
    """Return whether a stream ends with its usage."""
    return options is not None and bool(options.include_usage)


class AbortBody(msgspec.Struct):
    """The body of POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    """The body of POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class WeightVersionBody(msgspec.Struct):
    """The body of POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class OpenBody(msgspec.Struct):
    """The body of POST /open_session."""

    capacity_of_str_len: int
    session_id: str | None = None


class CloseBody(msgspec.Struct):
    """The body of POST /close_session."""

    session_id: str
