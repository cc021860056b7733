"""Turn text into tokens, and a prompt into the tokens of its answer.

Theory of operation
-------------------
Text is words. A word between white space is one token, a message adds two more (who speaks; that he has ended), and a
prompt for an answer ends with the marker of the assistant. What the engine generates is words as well (`w123`), so a
history that holds an answer tokenises to exactly the tokens that were generated, and the next turn hits them in the
prefix cache: the property that a real engine's caching of conversations rests on. Which words, and how many, follows
from the prompt and the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

END_TOKEN: Final = 1
_MARKERS: Final = {"system": 2, "user": 3, "assistant": 4, "tool": 5, "developer": 6, "tools": 7}
_OTHER_MARKER: Final = 8
_FIRST_WORD: Final = 100
SPOKEN_WORD_COUNT: Final = 32_000  # w0 … w31999, the words that the engine generates
_FIRST_HASHED: Final = 1 << 16
_VOCABULARY_LIMIT: Final = 200_000  # words remembered, for speed and for /detokenize


class WordTokenizer:
    """Turns text into token ids, one per word, and chats into prompts; the same in every process.

    White space is not kept. Distinct words share an id with a probability of 2**-47 per pair.
    """

    def __init__(self) -> None:
        spoken = {f"w{number}": _FIRST_WORD + number for number in range(SPOKEN_WORD_COUNT)}
        self._id_by_word = spoken
        self._word_by_id = {token: word for word, token in spoken.items()}
        self._word_by_id |= {END_TOKEN: "<|end|>", _OTHER_MARKER: "<|other|>"}
        self._word_by_id |= {marker: f"<|{role}|>" for role, marker in _MARKERS.items()}

    def encode(self, text: str) -> list[int]:
        """Return a token for each word."""
        known = self._id_by_word
        return [known.get(word) or self._learn(word) for word in text.split()]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the words of these tokens; an unknown one reads `<unk>`."""
        return " ".join(self._word_by_id.get(token, "<unk>") for token in token_ids)

    def spoken_words(self, token_ids: Iterable[int]) -> list[str]:
        """Return the words of an answer, or of a part of one: the end token is silent."""
        return [self.decode([token]) for token in token_ids if token != END_TOKEN]

    def encode_words(self, words: Iterable[str]) -> list[int]:
        """Return exactly one token for each word, also for an empty one."""
        return [(self.encode(word) or [_OTHER_MARKER])[0] for word in words]

    def encode_chat(
        self, messages: Iterable[tuple[str, str]], *, tools: str = "", add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the prompt of a chat of (role, text): for each its role's marker, its words, and the end token."""
        token_ids: list[int] = []
        for role, text in [("tools", tools), *messages] if tools else messages:
            token_ids += [_MARKERS.get(role, _OTHER_MARKER), *self.encode(text), END_TOKEN]
        if add_generation_prompt:
            token_ids.append(_MARKERS["assistant"])
        return token_ids

    def _learn(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=6).digest()
        token = _FIRST_HASHED + int.from_bytes(digest, "big")
        if len(self._id_by_word) < _VOCABULARY_LIMIT:
            self._id_by_word[word] = token
            self._word_by_id[token] = word
        return token


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Any
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def arguments_text(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A future answer: `finish_reason` is `stop` (it ends with the end token), `length` or `tool_calls`.

    `words` are what the client reads instead of the tokens' own: at most one a token. `calls` are the tools it calls.
    """

    token_ids: list[int]
    finish_reason: str
    words: list[str] | None = None
    calls: Sequence[Call] = ()


def cut_at_stop(answer: Answer, words: list[str], stops: Sequence[str]) -> Answer:
    """Return the answer without what follows the first of these texts in it, and without that text."""
    text = " ".join(words)
    found = min(((text.find(stop), stop) for stop in stops if stop and stop in text), default=None)
    if found is None:
        return answer
    start, stop = found
    count = text.count(" ", 0, start + len(stop)) + 1
    return Answer(answer.token_ids[:count], "stop", text[:start].split(" ") if start else [])


def compose_answer(
    prompt_token_ids: Sequence[int], *, seed: int, limit_tokens: int, min_tokens: int, ignore_eos: bool
) -> Answer:
    """Choose the answer to a prompt: words, and 16 to 64 tokens of them if nothing else limits or asks for more."""
    key = hash((seed, *prompt_token_ids))
    count = limit_tokens if ignore_eos else max(16 + key % 49, min_tokens)
    finish_reason = "stop" if not ignore_eos and count <= limit_tokens else "length"
    token_ids = [
        _FIRST_WORD + hash((key, position)) % SPOKEN_WORD_COUNT for position in range(min(count, limit_tokens))
    ]
    if finish_reason == "stop":
        token_ids[-1] = END_TOKEN
    return Answer(token_ids, finish_reason)
