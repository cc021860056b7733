"""Tokens in, tokens out: `/inference/v1/generate` of vLLM (0.32), as trainers use it.

SkyRL (0.3) has its own endpoint beside it, for answers with the routed experts; they have no `usage`.

Its answers have `choices` and `usage` like the chat API, and its streams are asked for usage in the same way.
"""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

from thunderagent.proxy.reading.dialects.openai import OpenAI


class TokenIn:
    """The token-in API, with the rules of `OpenAI`."""

    turn_paths: tuple[str, ...] = ("/inference/v1/generate", "/skyrl/v1/generate")
    asks_for_usage = True
    last_events: tuple[bytes, ...] = ()
    token_id_fields: tuple[str, ...] = ("token_ids", "prompt_token_ids")

    def __init__(self) -> None:
        """Speak as OpenAI does."""
        openai = OpenAI()
        self.read_answer = openai.read_answer
        self.read_sound = openai.read_sound
        self.read_calling = openai.read_calling
        self.reader = openai.reader
        self.completions = openai.completions
        self.error = openai.error
        self.break_off = openai.break_off

    def speaks(self, path: str) -> bool:
        """Return whether the path is under `/inference/` or `/skyrl/`."""
        return path.startswith(("/inference/", "/skyrl/"))
