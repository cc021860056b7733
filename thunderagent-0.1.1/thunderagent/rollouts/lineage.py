"""How the prompts of a program continue each other, token by token.

Theory of operation
===================
A *chain* is what one conversation consists of: the tokens of a turn's prompt and output, and of the next turn's, if
that begins with all of them. The tokens alone decide, whatever headers say. For a new prompt the chain with which it
has the longest common beginning counts:

    Link        The prompt
    extends     begins with all tokens of an earlier turn, prompt and output
    drift       leaves the chain inside an output: the engine's own tokens came back as others, or not at all
    rewritten   leaves it before the first output, although its messages hold answers: the history was edited
    root        begins anew: no message is an answer, or it is the program's first turn
    unknown     begins anew, and nobody can say why: its API has no messages, or it has no ids

A prompt may extend an earlier turn than the last: then the conversation forks there.

Tokens are compared as text (`tokens.py`): a prompt of thousands of tokens that extends a chain costs one comparison of
bytes, and counting what is new.
"""

# compiled: each recorded turn passes here

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from thunderagent.rollouts.records import Link, Turn
from thunderagent.rollouts.tokens import common_text, end_of_tokens, from_planes, text_of_ids, token_ids

MAX_CHAINS_COUNT: Final = 64
"""Of one program; the least recently extended one is forgotten, and what continues it begins anew."""


class _Step:
    """A turn in a chain: where its prompt and its output end, in bytes, and in tokens."""

    __slots__ = ("choice", "end", "end_tokens", "prompt_end", "prompt_tokens", "seq")

    def __init__(self, seq: int, choice: int, prompt_end: int, prompt_tokens: int, end: int, end_tokens: int) -> None:
        self.seq = seq
        self.choice = choice
        self.prompt_end = prompt_end
        self.prompt_tokens = prompt_tokens
        self.end = end
        self.end_tokens = end_tokens


class _Chain:
    __slots__ = ("steps", "text")

    def __init__(self, text: bytes, steps: list[_Step]) -> None:
        self.text = text
        self.steps = steps


class Placed:
    """Where a turn belongs: its link, and with which record's tokens its prompt begins."""

    __slots__ = ("extended", "link", "parent", "parent_choice", "shared", "shared_tokens", "steps")

    def __init__(
        self, link: Link, parent: int = -1, parent_choice: int = 0, shared: int = 0, shared_tokens: int = 0
    ) -> None:
        """Share so many bytes of text, and tokens."""
        self.link = link
        self.parent = parent
        self.parent_choice = parent_choice
        self.shared = shared
        self.shared_tokens = shared_tokens
        self.extended: _Chain | None = None
        self.steps: list[_Step] = []


class Lineage:
    """The chains of one program."""

    __slots__ = ("_chains", "_has_begun", "size_bytes")

    def __init__(self) -> None:
        """Begin without turns."""
        self._chains: list[_Chain] = []  # the most recently extended one last
        self._has_begun = False
        self.size_bytes = 0
        """Of the texts that are kept."""

    def find(self, prompt: bytes, *, has_answers: bool | None) -> Placed:
        """Return where a turn with this prompt belongs.

        `has_answers` says whether its messages hold an answer; None if its API has no messages. Cost: one comparison
        for each chain that it extends or not; a search in those that it leaves.
        """
        whole: _Chain | None = None
        for at in range(len(self._chains) - 1, -1, -1):
            chain = self._chains[at]
            if (whole is None or len(chain.text) > len(whole.text)) and prompt.startswith(chain.text):
                whole = chain
        if whole is not None:
            last = whole.steps[-1]
            found = Placed("extends", last.seq, last.choice, last.end, last.end_tokens)
            found.extended, found.steps = whole, whole.steps
            return found
        return self._left(prompt, has_answers=has_answers)

    def add(self, seq: int, placed: Placed, prompt: bytes, outputs: list[bytes]) -> int:
        """Add a turn at its place; return how many tokens its prompt has."""
        self._has_begun = True
        if placed.extended is not None:
            self._forget(placed.extended)
        prompt_tokens = placed.shared_tokens + prompt.count(b",", placed.shared)
        for choice in range(len(outputs) - 1, -1, -1):  # the first choice is extended most often
            text = prompt + outputs[choice]
            end_tokens = prompt_tokens + outputs[choice].count(b",")
            step = _Step(seq, choice, len(prompt), prompt_tokens, len(text), end_tokens)
            self._add(_Chain(text, [*placed.steps, step]))
        if not outputs:
            step = _Step(seq, 0, len(prompt), prompt_tokens, len(prompt), prompt_tokens)
            self._add(_Chain(prompt, [*placed.steps, step]))
        return prompt_tokens

    def beginning(self, seq: int, choice: int, tokens_count: int) -> bytes:
        """Return the first tokens of a turn's prompt and output, as text."""
        for at in range(len(self._chains) - 1, -1, -1):
            chain = self._chains[at]
            for index in range(len(chain.steps) - 1, -1, -1):
                step = chain.steps[index]
                if step.seq == seq and step.choice == choice:
                    if tokens_count == step.end_tokens:
                        return chain.text[: step.end]
                    return chain.text[: end_of_tokens(chain.text, tokens_count)]
        return b""

    def _add(self, chain: _Chain) -> None:
        self._chains.append(chain)
        self.size_bytes += len(chain.text)
        if len(self._chains) > MAX_CHAINS_COUNT:
            self._forget(self._chains[0])

    def _forget(self, chain: _Chain) -> None:
        self._chains.remove(chain)
        self.size_bytes -= len(chain.text)

    def _left(self, prompt: bytes, *, has_answers: bool | None) -> Placed:
        """Return the place of a prompt that extends no chain to its end."""
        shared = 0
        longest: list[_Chain] = []
        for at in range(len(self._chains) - 1, -1, -1):
            chain = self._chains[at]
            size_bytes = common_text(chain.text, prompt)
            if size_bytes > shared:
                shared, longest = size_bytes, [chain]
            elif size_bytes and size_bytes == shared:
                longest.append(chain)
        begin: Link = "root"
        if self._has_begun and has_answers is not False:
            begin = "unknown" if has_answers is None else "rewritten"
        found = Placed(begin)
        for chain in longest:
            placed = _left(chain, shared, begin, has_more=shared < len(prompt))
            if found.parent < 0 or _RANKS[placed.link] > _RANKS[found.link]:
                found = placed
        return found


def lineage_of(turns: Iterable[Turn]) -> Lineage:
    """Return the chains of a program whose records are these, in their order."""
    lineage = Lineage()
    for turn in turns:
        if not turn.outputs:  # its tokens are not there
            continue
        prompt = lineage.beginning(turn.parent, turn.parent_choice, turn.shared_tokens)
        prompt += text_of_ids(token_ids(from_planes(turn.prompt_new)))
        texts = [text_of_ids(token_ids(output.tokens)) for output in turn.outputs]
        lineage.add(turn.seq, lineage.find(prompt, has_answers=True), prompt, texts)
    return lineage


_RANKS: Final[dict[str, int]] = {"drift": 2, "extends": 1, "root": 0, "rewritten": 0, "unknown": 0}
"""Which link counts if several chains are left at the same token: a prompt that ends as an earlier one did, and goes on
otherwise than its output, has lost that output."""


def _left(chain: _Chain, shared: int, begin: Link, *, has_more: bool) -> Placed:
    """Return the place of a prompt that leaves a chain after `shared` bytes, with the steps that it has whole."""
    kept = [step for step in chain.steps if step.end <= shared]
    left = chain.steps[len(kept)]
    if left.prompt_end <= shared and has_more:
        tokens = left.prompt_tokens + chain.text.count(b",", left.prompt_end, shared)
        placed = Placed("drift", left.seq, left.choice, shared, tokens)
    elif kept:
        placed = Placed("extends", kept[-1].seq, kept[-1].choice, kept[-1].end, kept[-1].end_tokens)
    else:
        placed = Placed(begin, left.seq, left.choice, shared, chain.text.count(b",", 0, shared))
    placed.steps = kept
    return placed
