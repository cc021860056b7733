"""An engine's data on each request inside it, and the plan of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from thunderagent.simulator.engine.blocks import ROOT_HASH, BlockPool, Holding
from thunderagent.simulator.engine.records import Admission, EngineRequest
from thunderagent.simulator.engine.timing import IterationWork


@dataclass(slots=True, eq=False, weakref_slot=True)
class EngineSequence:
    """One request inside the engine. `known` tokens are the prompt and what was generated; `computed` have KV.

    While it is in a batch of decoding ones, both are as they were when it joined (`decoding.py`).
    """

    request: EngineRequest
    rank: tuple[int, int]
    keys: Sequence[int]
    arrival_s: float
    prompt_tokens: int
    end_tokens: int
    known_tokens: int
    computed_tokens: int = 0
    blocks: Holding = field(default_factory=Holding)
    published_count: int = 0
    cached_tokens: int | None = None
    preemption_count: int = 0
    first_token_s: float = 0.0
    refused_at: tuple[int, int] | None = None
    served_s: float = 0.0

    @property
    def request_id(self) -> str:
        """Return the id of its request."""
        return self.request.request_id

    @property
    def generated_tokens(self) -> int:
        """Return how many tokens it has got."""
        return self.known_tokens - self.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Say whether all but its last token is computed, and that was generated."""
        return self.known_tokens > self.prompt_tokens and self.computed_tokens == self.known_tokens - 1

    def publish(self, pool: BlockPool, full_count: int) -> None:
        """Make its blocks findable up to that many, some of which are not yet."""
        begin, keys = self.published_count, self.keys
        parent = keys[begin - 1] if begin else ROOT_HASH
        if full_count == begin + 1:
            pool.publish_one(self.blocks, keys[begin], parent)
        else:
            pool.publish(self.blocks, keys[begin:full_count], parent)
        self.published_count = full_count


def rank_of(sequence: EngineSequence) -> tuple[int, int]:
    """Return the sort key of waiting requests."""
    return sequence.rank


class Discipline(Protocol):
    """How an engine serves running requests, if not like vLLM; one for each engine.

    With a discipline, a chunk of a prompt that does not fit in the free blocks is halved until it does, down to one
    block, before anybody is preempted; and a prompt is admitted only if the running ones will fit, too.
    """

    def in_order(self, running: Sequence[EngineSequence], now_s: float) -> Sequence[EngineSequence]:
        """Return the running requests in this iteration's serving order."""

    def most_tokens(self, sequence: EngineSequence, now_s: float) -> int:
        """Return the limit of a prompt's tokens in this iteration, if there are others."""

    def victim(self, running: Sequence[EngineSequence], now_s: float) -> EngineSequence:
        """Return the request to preempt."""

    def preempted(self, sequence: EngineSequence) -> None:
        """Give a preempted sequence the rank at which it waits."""

    def served(self, sequence: EngineSequence, tokens: int, end_s: float) -> None:
        """Learn that `tokens` tokens of a sequence are computed, before they count."""


@dataclass(slots=True)
class Plan:
    """The plan of an iteration: the number of tokens per sequence, besides those of the batch.

    `restored_tokens` are copied into the pool from the tier behind it, and not computed.
    """

    budget_tokens: int
    now_s: float = 0.0
    restored_tokens: int = 0
    chunks: dict[EngineSequence, int] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def add(self, sequence: EngineSequence, tokens: int) -> None:
        """Compute tokens of a sequence."""
        self.chunks[sequence] = tokens
        self.budget_tokens -= tokens

    def remove(self, sequence: EngineSequence) -> None:
        """Compute nothing of a sequence."""
        self.budget_tokens += self.chunks.pop(sequence, 0)

    def work(self, decode_count: int, decode_context_tokens: int) -> IterationWork:
        """Return the total work, together with the decoding batch."""
        prefill_tokens = 0
        attention_pairs = 0.0
        for sequence, tokens in self.chunks.items():
            if sequence.is_decoding:
                decode_count += 1
                decode_context_tokens += sequence.known_tokens
            else:
                prefill_tokens += tokens
                attention_pairs += tokens * (sequence.computed_tokens + tokens / 2)
        return IterationWork(prefill_tokens, attention_pairs, decode_count, decode_context_tokens)
