"""What programs that are active on a replica have in common is claimed once: `PrefixTree`, told of programs."""

from __future__ import annotations

from collections.abc import Sequence

from thunderagent.programs.events import PrefixCut
from thunderagent.programs.ledger import Account
from thunderagent.programs.lifecycle import Status
from thunderagent.programs.prefixes import PrefixTree, chain_of
from thunderagent.programs.program import Branch, Program


class Shares:
    """Keeps `Account.shared_tokens`; whoever calls has settled the account before."""

    __slots__ = ("tree",)

    def __init__(self) -> None:
        """Begin with nobody active."""
        self.tree = PrefixTree()

    def set_prefix(
        self,
        program: Program,
        branch: Branch,
        cuts: Sequence[PrefixCut],
        tokens_per_byte_ratio: float,
        account: Account | None,
    ) -> None:
        """Take in where a branch's prompt may part from others; `account` is where its program is active."""
        chain = chain_of(cuts, tokens_per_byte_ratio)
        if account is not None:
            replica_id = program.replica_id or ""
            account.shared_tokens -= self.tree.leave(branch.prefix, replica_id)
            account.shared_tokens += self.tree.enter(chain, replica_id)
        branch.prefix = chain

    def enter(self, program: Program, account: Account) -> None:
        """Count a program on the replica where it becomes active."""
        for branch in program.branches.values():
            if branch.prefix:
                account.shared_tokens += self.tree.enter(branch.prefix, program.replica_id or "")

    def leave(self, program: Program, account: Account, branches: Sequence[Branch] | None = None) -> None:
        """Count a program no longer that is paused or ends, or some of its branches that end."""
        for branch in program.branches.values() if branches is None else branches:
            if branch.prefix:
                account.shared_tokens -= self.tree.leave(branch.prefix, program.replica_id or "")

    def tokens_on(self, program: Program, replica_id: str) -> int:
        """Return how many tokens of a program lie on a replica because others claim them there."""
        counted_itself = program.status is Status.ACTIVE and program.replica_id == replica_id
        with_count = 2 if counted_itself else 1
        tokens = 0
        for branch in program.branches.values():
            if branch.prefix:
                tokens += self.tree.shared_tokens(branch.prefix, replica_id, with_count=with_count)
        return tokens

    def own_tokens(self, program: Program, tokens: int) -> int:
        """Return `tokens` of a program without what it has in common with others on its replica."""
        return max(0, tokens - self.tokens_on(program, program.replica_id or ""))
