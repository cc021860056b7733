"""What programs share: a tree of prompt prefixes, and how often each replica's programs claim each part.

Theory of operation
===================
A prompt comes with a chain of cuts (`TurnAsk.prefix`). Two programs whose chains have the same digest at a cut have
the same prompt up to there. A cut stands for the tokens between it and the one before. Each chain that is active on a
replica counts on each of its cuts. A cut with n chains lies in memory once, but is in the claims of n programs: (n - 1)
times its tokens are claimed too much. The sum of that over all cuts is the replica's `shared_tokens`. A cut without
chains is dropped, so the tree is as large as what is active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Final

from thunderagent.programs.messages import PrefixCut
from thunderagent.programs.state.accounts import Account
from thunderagent.programs.state.program import (
    LEAST_TOKENS_PER_BYTE_RATIO,
    MAIN_BRANCH,
    MOST_TOKENS_PER_BYTE_RATIO,
    Branch,
    Chain,
    Program,
    usual_ratio,
)

SIZE_SLACK_RATIO: Final = 0.2
"""Sizes of a cut that differ by less count as equal: each program estimates them from its own prompts."""

MOVED_RATIO: Final = 1 / 8
"""How far a turn moves the measured size of a cut that others count: it is a guess by the ratio of the whole prompt."""


class _Cut:
    __slots__ = ("counts", "is_measured", "own_tokens")

    def __init__(self, own_tokens: int) -> None:
        self.own_tokens = own_tokens
        self.is_measured = False
        """Whether a program whose tokens per byte are known has said its size."""
        self.counts: dict[str, int] = {}


class PrefixTree:
    """Counts chains on replicas. Every method costs O(cuts of a chain)."""

    __slots__ = ("cuts",)

    def __init__(self) -> None:
        """Create an empty tree."""
        self.cuts: dict[int, _Cut] = {}

    def __len__(self) -> int:
        return len(self.cuts)

    def enter(self, chain: Chain, replica_id: str, previous_tokens: int = 0, *, exact: bool = False) -> int:
        """Count a chain on a replica; return how many of its tokens others already claim there.

        `exact` says that its sizes are no guess.
        """
        shared_tokens = 0
        for digest, tokens in chain:
            cut = self.cuts.get(digest)
            if cut is None:
                cut = self.cuts[digest] = _Cut(max(0, tokens - previous_tokens))
                cut.is_measured = exact
            previous_tokens = tokens
            count = cut.counts.get(replica_id, 0)
            if count:
                shared_tokens += cut.own_tokens
            cut.counts[replica_id] = count + 1
        return shared_tokens

    def leave(self, chain: Chain, replica_id: str) -> int:
        """Undo `enter` with the same arguments; return the tokens that others still claim there."""
        shared_tokens = 0
        for digest, _ in chain:
            cut = self.cuts[digest]
            count = cut.counts[replica_id] - 1
            if count:
                cut.counts[replica_id] = count
                shared_tokens += cut.own_tokens
            else:
                del cut.counts[replica_id]
                if not cut.counts:
                    del self.cuts[digest]
        return shared_tokens

    def replace(self, before: Chain, chain: Chain, replica_id: str, *, exact: bool) -> dict[str, int]:
        """Replace one counted chain by another; return by how much each replica's shared tokens grow.

        Mostly the same prompt grew: the common beginning stays counted. A cut that no other chain has gets its current
        size; one that others have, too, only if `exact`.
        """
        same_count = previous_tokens = 0
        others_differ = False
        for number in range(min(len(before), len(chain))):
            digest, tokens = chain[number]
            if digest != before[number][0]:
                break
            cut, own_tokens = self.cuts[digest], max(0, tokens - previous_tokens)
            if own_tokens == cut.own_tokens:
                cut.is_measured |= exact
            elif len(cut.counts) == 1 and cut.counts[replica_id] == 1:
                cut.own_tokens, cut.is_measured = own_tokens, exact
            else:
                others_differ = True
            previous_tokens = tokens
            same_count += 1
        shared_tokens = 0
        if same_count < len(before):
            shared_tokens -= self.leave(before[same_count:], replica_id)
        if same_count < len(chain):
            shared_tokens += self.enter(chain[same_count:], replica_id, previous_tokens, exact=exact)
        grown = self.resize(chain) if exact and (others_differ or same_count < len(chain)) else {}
        grown[replica_id] = grown.get(replica_id, 0) + shared_tokens
        return grown

    def resize(self, chain: Chain) -> dict[str, int]:
        """Move the sizes of a chain's cuts towards its own; return by how much each replica's shared tokens grow."""
        grown: dict[str, int] = {}
        previous_tokens = 0
        for digest, tokens in chain:
            cut = self.cuts.get(digest)
            own_tokens = max(0, tokens - previous_tokens)
            previous_tokens = tokens
            if cut is None:
                continue
            moved_tokens, was_measured, cut.is_measured = own_tokens - cut.own_tokens, cut.is_measured, True
            if abs(moved_tokens) <= SIZE_SLACK_RATIO * own_tokens:
                continue
            if was_measured:
                moved_tokens = int(MOVED_RATIO * moved_tokens)
            for replica_id, count in cut.counts.items():
                grown[replica_id] = grown.get(replica_id, 0) + moved_tokens * (count - 1)
            cut.own_tokens += moved_tokens
        return grown

    def sized(self, chain: Chain) -> Chain:
        """Return a chain that is counted somewhere, with the sizes that its cuts have here."""
        sizes_tokens = accumulate(self.cuts[digest].own_tokens for digest, _ in chain)
        return tuple((digest, tokens) for (digest, _), tokens in zip(chain, sizes_tokens, strict=True))

    def shared_tokens(self, chain: Chain, replica_id: str, with_count: int = 1) -> int:
        """Return how many tokens of a chain are claimed by at least `with_count` chains on a replica."""
        shared_tokens = 0
        for digest, _ in chain:
            cut = self.cuts.get(digest)
            if cut is None or cut.counts.get(replica_id, 0) < with_count:
                break
            shared_tokens += cut.own_tokens
        return shared_tokens


def chain_of(cuts: Sequence[tuple[int, int]], tokens_per_byte_ratio: float, most_tokens: float = inf) -> Chain:
    """Return the cuts of a prompt in tokens, none of them larger than the prompt itself."""
    chain: list[tuple[int, int]] = []
    for digest, size_bytes in cuts:  # a comprehension would be one more call where nothing is compiled
        tokens = size_bytes * tokens_per_byte_ratio
        chain.append((digest, int(tokens if tokens < most_tokens else most_tokens)))
    return tuple(chain)


class SharedPrefixes:
    """Computes how `Account.shared_tokens` changes; the account's costs must be accrued first."""

    __slots__ = ("tree",)

    def __init__(self) -> None:
        """Create one without active programs."""
        self.tree = PrefixTree()

    def set_prefix(
        self,
        program: Program,
        branch: Branch,
        cuts: Sequence[PrefixCut],
        first_ratio: float,
        prompt_tokens: float = inf,
    ) -> Mapping[str, int]:
        """Record where a branch's prompt may part from others; return by how much each replica's shared tokens grow.

        Until the branch's tokens per byte are known, its sizes are a guess by `first_ratio`, and count for it alone.
        """
        ratio = branch.tokens_per_byte_ratio
        exact = ratio is not None
        before = branch.prefix
        if not ratio:
            branch.prefix = chain_of(cuts, first_ratio)
        else:
            is_usual = LEAST_TOKENS_PER_BYTE_RATIO <= ratio <= MOST_TOKENS_PER_BYTE_RATIO
            branch.prefix = chain_of(cuts, ratio if is_usual else usual_ratio(ratio), prompt_tokens)
        if program.place.active:
            return self.tree.replace(before, branch.prefix, program.replica_id or "", exact=exact)
        return self.tree.resize(branch.prefix) if exact else {}

    def enter(self, program: Program, account: Account) -> None:
        """Count a program on the replica where it becomes active."""
        for branch in program.branches.values():
            if branch.prefix:
                exact = branch.tokens_per_byte_ratio is not None
                account.share(self.tree.enter(branch.prefix, program.replica_id or "", exact=exact))

    def leave(self, program: Program, account: Account, branches: Sequence[Branch] | None = None) -> None:
        """Stop counting a program that is paused or ends, or those of its branches that end."""
        if not self.tree.cuts:
            return
        for branch in program.branches.values() if branches is None else branches:
            if branch.prefix:
                shared_tokens = self.tree.leave(branch.prefix, program.replica_id or "")
                if shared_tokens:
                    account.share(-shared_tokens)

    def tokens_on(self, program: Program, replica_id: str) -> int:
        """Return how many tokens of a program are on a replica because others claim them there."""
        return self.shared_on(program, replica_id)[0]

    def own_tokens(self, program: Program, tokens: int, replica_id: str) -> int:
        """Return `tokens` of a program minus what it shares with others on a replica, or repeats in its branches."""
        others_tokens, repeated_tokens = self.shared_on(program, replica_id)
        return max(0, tokens - others_tokens - repeated_tokens)

    def shared_on(self, program: Program, replica_id: str) -> tuple[int, int]:
        """Return how many tokens of a program others claim on a replica, and how many its branches repeat.

        Those are the tokens that nobody else claims there and that an earlier one of its branches has, too.
        """
        is_single = len(program.branches) == 1
        if is_single and not self.tree.cuts:
            return 0, 0
        is_counted = program.place.active and program.replica_id == replica_id
        if is_single:
            shared_tokens, with_count = 0, 2 if is_counted else 1
            for digest, _ in program.branches[MAIN_BRANCH].prefix:
                cut = self.tree.cuts.get(digest)
                if cut is None or cut.counts.get(replica_id, 0) < with_count:
                    break
                shared_tokens += cut.own_tokens
            return shared_tokens, 0
        return self._shared_here(program, replica_id) if is_counted else self._shared_there(program, replica_id)

    def _shared_here(self, program: Program, replica_id: str) -> tuple[int, int]:
        """Return `shared_on` of a program that is counted there. Cost: O(branches + their shared cuts)."""
        cuts = self.tree.cuts
        own_counts: dict[int, int] = {}
        for branch in program.branches.values():
            for digest, _ in branch.prefix:
                if cuts[digest].counts[replica_id] == 1:  # and so has each one after it
                    break
                own_counts[digest] = own_counts.get(digest, 0) + 1
        others_tokens = repeated_tokens = 0
        for digest, own_count in own_counts.items():
            cut = cuts[digest]
            if cut.counts[replica_id] > own_count:
                others_tokens += own_count * cut.own_tokens
            else:
                repeated_tokens += (own_count - 1) * cut.own_tokens
        return others_tokens, repeated_tokens

    def _shared_there(self, program: Program, replica_id: str) -> tuple[int, int]:
        """Return `shared_on` of a program that is not counted there. Cost: O(cuts of all its branches)."""
        cuts = self.tree.cuts
        others_tokens = repeated_tokens = 0
        seen_tokens: dict[int, int] = {}
        for branch in program.branches.values():
            previous_tokens = 0
            for digest, tokens in branch.prefix:
                cut = cuts.get(digest)
                if cut is not None and replica_id in cut.counts:
                    others_tokens += cut.own_tokens
                elif digest in seen_tokens:
                    repeated_tokens += seen_tokens[digest]
                else:
                    seen_tokens[digest] = max(0, tokens - previous_tokens) if cut is None else cut.own_tokens
                previous_tokens = tokens
        return others_tokens, repeated_tokens
