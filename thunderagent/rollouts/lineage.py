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
"""

from __future__ import annotations

from typing import Final, NamedTuple

from thunderagent.rollouts.records import Link

MAX_CHAINS_COUNT: Final = 64
"""Of one program; the least recently extended one is forgotten, and what continues it begins anew."""

_WIDTH: Final = 4


class Placed(NamedTuple):
    """Where a turn belongs: its link, and with which record's tokens its prompt begins."""

    link: Link
    parent: int = -1
    parent_choice: int = 0
    shared_tokens: int = 0


class _Step(NamedTuple):
    """A turn in a chain: in tokens, where its prompt ends, and its output."""

    seq: int
    choice: int
    prompt_end: int
    end: int


class _Chain:
    __slots__ = ("steps", "tokens")

    def __init__(self, tokens: bytes, steps: list[_Step]) -> None:
        self.tokens = tokens
        self.steps = steps


class Lineage:
    """The chains of one program."""

    __slots__ = ("_chains", "_has_begun", "size_bytes")

    def __init__(self) -> None:
        """Begin without turns."""
        self._chains: list[_Chain] = []  # the most recently extended one last
        self._has_begun = False
        self.size_bytes = 0
        """Of the tokens that are kept."""

    def place(self, seq: int, prompt: bytes, outputs: list[bytes], *, has_answers: bool | None) -> Placed:
        """Add a turn, and return where it belongs.

        `has_answers` says whether its messages hold an answer; None if its API has no messages. Cost: one comparison
        for each chain that it extends or not; a search in those that it leaves.
        """
        is_first, self._has_begun = not self._has_begun, True
        grown, placed, before = self._placed(prompt, is_first=is_first, has_answers=has_answers)
        if grown is not None:
            self._forget(grown)
        prompt_end = len(prompt) // _WIDTH
        for choice in reversed(range(len(outputs))):  # the first choice is extended most often
            tokens = prompt + outputs[choice]
            self._add(_Chain(tokens, [*before, _Step(seq, choice, prompt_end, len(tokens) // _WIDTH)]))
        if not outputs:
            self._add(_Chain(prompt, [*before, _Step(seq, 0, prompt_end, prompt_end)]))
        return placed

    def _add(self, chain: _Chain) -> None:
        self._chains.append(chain)
        self.size_bytes += len(chain.tokens)
        if len(self._chains) > MAX_CHAINS_COUNT:
            self._forget(self._chains[0])

    def _forget(self, chain: _Chain) -> None:
        self._chains.remove(chain)
        self.size_bytes -= len(chain.tokens)

    def _placed(
        self, prompt: bytes, *, is_first: bool, has_answers: bool | None
    ) -> tuple[_Chain | None, Placed, list[_Step]]:
        """Return the chain that it extends to its end, its place, and the steps before it."""
        whole: _Chain | None = None
        for chain in reversed(self._chains):
            if (whole is None or len(chain.tokens) > len(whole.tokens)) and prompt.startswith(chain.tokens):
                whole = chain
        if whole is not None:
            last = whole.steps[-1]
            return whole, Placed("extends", last.seq, last.choice, last.end), whole.steps
        shared, longest = 0, list[_Chain]()
        for chain in reversed(self._chains):
            count = common_tokens(chain.tokens, prompt)
            if count > shared:
                shared, longest = count, [chain]
            elif count and count == shared:
                longest.append(chain)
        begin = self._begin(is_first=is_first, has_answers=has_answers)
        found, steps = Placed(begin), list[_Step]()
        for chain in longest:
            placed, kept = _left(chain, shared, begin, has_more=shared < len(prompt) // _WIDTH)
            if found.parent < 0 or _RANKS[placed.link] > _RANKS[found.link]:
                found, steps = placed, kept
        return None, found, steps

    def _begin(self, *, is_first: bool, has_answers: bool | None) -> Link:
        if is_first or has_answers is False:
            return "root"
        return "unknown" if has_answers is None else "rewritten"


_RANKS: Final[dict[Link, int]] = {"drift": 2, "extends": 1, "root": 0, "rewritten": 0, "unknown": 0}
"""Which link counts if several chains are left at the same token: a prompt that ends as an earlier one did, and goes on
otherwise than its output, has lost that output."""


def _left(chain: _Chain, shared: int, begin: Link, *, has_more: bool) -> tuple[Placed, list[_Step]]:
    """Return the place of a prompt that leaves a chain after `shared` tokens, and the steps that it has whole."""
    kept = [step for step in chain.steps if step.end <= shared]
    left = chain.steps[len(kept)]
    if left.prompt_end <= shared and has_more:
        return Placed("drift", left.seq, left.choice, shared), kept
    if kept:
        return Placed("extends", kept[-1].seq, kept[-1].choice, kept[-1].end), kept
    return Placed(begin, left.seq, left.choice, shared), []


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens two texts have in common at their beginning. Cost: O(log n) comparisons, n bytes."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    if one[:_WIDTH] != other[:_WIDTH]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _WIDTH : middle * _WIDTH] == other[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
