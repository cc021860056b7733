"""The APIs of turns, each a `Dialect` in a file of its own; a new one is one file and one entry."""

from thunderagent.proxy.reading.dialects.anthropic import Anthropic
from thunderagent.proxy.reading.dialects.base import NO_USAGE, Dialect, Usage
from thunderagent.proxy.reading.dialects.openai import OpenAI
from thunderagent.proxy.reading.dialects.responses import Responses
from thunderagent.proxy.reading.dialects.sglang import SGLang
from thunderagent.proxy.reading.dialects.token_in import TokenIn

CHAT = OpenAI()
"""Also used where no other dialect applies."""

DIALECTS: tuple[Dialect, ...] = (
    CHAT,
    OpenAI("/v1/completions", "prompt"),
    Responses(),
    Anthropic(),
    SGLang(),
    TokenIn(),
)

TURN_DIALECTS: dict[str, Dialect] = {path: dialect for dialect in DIALECTS for path in dialect.turn_paths}
"""The dialects by the paths on which a POST is a turn."""


def dialect_of(path: str) -> Dialect:
    """Return the dialect in which callers of `path` (without a query) expect errors."""
    return next((dialect for dialect in DIALECTS if dialect.speaks(path)), CHAT)


__all__ = ["DIALECTS", "NO_USAGE", "TURN_DIALECTS", "Dialect", "Usage", "dialect_of"]
