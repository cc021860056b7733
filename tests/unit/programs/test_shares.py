"""Tokens that programs share, while they come, go and send other prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import Driver
from thunderagent.policy_loader import load_policy
from thunderagent.programs.state.accounts import Account
from thunderagent.programs.state.prefixes import SharedPrefixes
from thunderagent.programs.state.program import MAIN_BRANCH, Branch, Kind, Place, Program

CUTS = {"": (), "a": ((1, 100),), "ab": ((1, 100), (2, 250)), "ac": ((1, 100), (3, 150)), "d": ((4, 80),)}
SIZES_TOKENS = {1: 100, 2: 150, 3: 50, 4: 80}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["activate", "pause", "prompt", "branch", "end_branch"]),
        st.integers(0, 3),
        st.sampled_from(["r0", "r1"]),
        st.sampled_from(sorted(CUTS)),
    ),
    max_size=60,
)


def activate(shares: SharedPrefixes, program: Program, replica_id: str, account: Account) -> None:
    program.replica_id = replica_id
    program.place = Place(Kind.ACTING, replica_id)
    shares.enter(program, account)


def shared_tokens(programs: list[Program], replica_id: str) -> int:
    chains = [
        [digest for digest, _ in branch.prefix]
        for program in programs
        if program.status == "active" and program.replica_id == replica_id
        for branch in program.branches.values()
    ]
    union = {digest for chain in chains for digest in chain}
    claimed_tokens = sum(SIZES_TOKENS[digest] for chain in chains for digest in chain)
    return claimed_tokens - sum(SIZES_TOKENS[digest] for digest in union)


@given(STEPS)
def test_an_account_knows_what_is_claimed_more_than_once(steps: list[tuple[str, int, str, str]]) -> None:
    """Chains are replaced while active, branches come and go: the sum equals a count from scratch."""
    shares, programs = SharedPrefixes(), [Program(f"p{number}", number, 0.0) for number in range(4)]
    accounts = {replica_id: Account(1.0, 0.0) for replica_id in ("r0", "r1")}
    for kind, number, replica_id, prompt in steps:
        program = programs[number]
        active = program.status == "active"
        account = accounts[program.replica_id or ""] if active else None
        if kind == "activate" and not active:
            activate(shares, program, replica_id, accounts[replica_id])
        elif kind == "pause" and account is not None:
            shares.leave(program, account)
            program.place = Place(Kind.RESTING)
        elif kind in {"prompt", "branch"}:
            name = MAIN_BRANCH if kind == "prompt" else "sub"
            grown = shares.set_prefix(program, program.branches.setdefault(name, Branch()), CUTS[prompt], 1.0)
            for where, tokens in grown.items():
                accounts[where].share(tokens)
        elif kind == "end_branch" and "sub" in program.branches:
            ended = program.branches.pop("sub")
            if account is not None:
                shares.leave(program, account, [ended])
        for where, each in accounts.items():
            assert each.shared_tokens == shared_tokens(programs, where)
    for program in programs:
        if program.status == "active":
            shares.leave(program, accounts[program.replica_id or ""])
    assert len(shares.tree) == 0
    assert {account.shared_tokens for account in accounts.values()} == {0}


def two_programs() -> tuple[SharedPrefixes, Program, Program, Account]:
    shares, account = SharedPrefixes(), Account(1.0, 0.0)
    here, comes = Program("here", 1, 0.0), Program("comes", 2, 0.0)
    shares.set_prefix(here, here.branches[MAIN_BRANCH], CUTS["ab"], 1.0)
    shares.set_prefix(comes, comes.branches[MAIN_BRANCH], CUTS["ac"], 1.0)
    activate(shares, here, "r0", account)
    return shares, here, comes, account


def sends(shares: SharedPrefixes, program: Program, ratio: float, account: Account) -> None:
    """Send the program's prompt again, with known tokens per byte."""
    branch = program.branches[MAIN_BRANCH]
    branch.tokens_per_byte_ratio = ratio
    cuts = CUTS["ab" if program.program_id == "here" else "ac"]
    for replica_id, tokens in shares.set_prefix(program, branch, cuts, 1.0).items():
        assert replica_id == "r0"
        account.share(tokens)


def test_a_made_up_size_moves_what_others_share_within_bounds() -> None:
    """A client may report any usage; a cut has 1/16 to 1 token a byte, and a turn moves it by an eighth."""
    shares, liar, victim, account = two_programs()
    activate(shares, victim, "r0", account)
    for ratio, cut_tokens in ((1250.0, 100), (1e-6, 89)):
        sends(shares, liar, ratio, account)
        assert account.shared_tokens == cut_tokens
    for _ in range(100):
        sends(shares, liar, 1e-6, account)
    assert 100 // 16 <= account.shared_tokens < 100 // 16 + 8


def test_a_program_with_a_dense_history_moves_what_others_share_by_little() -> None:
    """Each turn moves it by an eighth of the difference at most, and the others' turns move it back."""
    shares, dense, other, account = two_programs()
    activate(shares, other, "r0", account)
    sends(shares, other, 0.25, account)
    assert account.shared_tokens == 25
    for _ in range(50):
        before_tokens = account.shared_tokens
        sends(shares, dense, 1.0, account)
        assert account.shared_tokens - before_tokens < 10
        sends(shares, other, 0.25, account)
        assert account.shared_tokens < (25 + 100) / 2


def test_a_guess_gives_way_to_what_is_measured_at_once() -> None:
    """With one ratio for all, nobody moves it again."""
    shares, here, comes, account = two_programs()
    activate(shares, comes, "r0", account)
    assert account.shared_tokens == 100
    for program in (comes, here, comes, here):
        sends(shares, program, 0.25, account)
        assert account.shared_tokens == 25


def test_no_shared_part_is_larger_than_the_prompt_that_has_it() -> None:
    """The rest of this body is no prompt: it has less than 1/16 token a byte."""
    driver = Driver(load_policy("breakeven", {}), replicas={"r0": 100_000})
    driver.finishes(driver.arrives("a", 4000), 100)
    driver.arrives("a", 4000, prefix={"system": 3000})
    assert [tokens for _, tokens in driver.program("a").branches[MAIN_BRANCH].prefix] == [100]


def test_a_paused_program_finds_what_others_claim() -> None:
    """It finds 100 tokens on the replica of the other program, and none elsewhere."""
    shares, _, comes, _ = two_programs()
    assert shares.tokens_on(comes, "r0") == 100
    assert shares.tokens_on(comes, "r1") == 0


def test_own_claim_of_a_program_is_not_a_claim_of_others() -> None:
    """An active one finds what it shares with another, and nothing if it is alone."""
    shares, here, comes, account = two_programs()
    assert shares.tokens_on(here, "r0") == 0
    activate(shares, comes, "r0", account)
    assert shares.tokens_on(here, "r0") == shares.tokens_on(comes, "r0") == 100


def test_a_programs_own_tokens_are_what_no_other_shares() -> None:
    """It has 400, and 300 once both programs are there, which share 100."""
    shares, here, comes, account = two_programs()
    assert shares.own_tokens(here, 400, "r0") == 400
    activate(shares, comes, "r0", account)
    assert shares.own_tokens(here, 400, "r0") == 300
    assert shares.own_tokens(here, 40, "r0") == 0


SYSTEM = {"system": 4000}


def sharing(tokens: int = 100_000) -> Driver:
    """Return a driver with one program of 20,000 tokens, whose first 4000 others have too."""
    driver = Driver(load_policy("breakeven", {"reserve_tokens": 0}), replicas={"r0": tokens})
    driver.takes_turn("a", 20_000, prefix=SYSTEM)
    return driver


@pytest.mark.parametrize("branch", [MAIN_BRANCH, "sub"])
@pytest.mark.parametrize("end", ["failed", "refused", "abandoned"])
def test_program_without_a_claim_shares_nothing(end: str, branch: str) -> None:
    """When the only turn of a branch ends without usage, the tokens of the other program are all there is."""
    driver = sharing()
    turn_id = driver.arrives("b", 5000, prefix=SYSTEM, branch=branch)
    assert driver.demand() == 21_000
    if end == "abandoned":
        driver.is_abandoned(turn_id)
    else:
        driver.fails(turn_id, refused=end == "refused")
    assert driver.demand() == 20_000
    driver.takes_turn("b", 5000, prefix=SYSTEM, branch=branch)
    assert driver.demand() == 21_000


def test_a_branch_shares_as_long_as_it_claims_something() -> None:
    """It does with another turn in flight, and with a context."""
    driver = sharing()
    first, second = (driver.arrives("b", 5000, prefix=SYSTEM) for _ in range(2))
    driver.fails(first)
    assert driver.demand() == 21_000
    driver.finishes(second, 5000)
    driver.fails(driver.arrives("b", 6000, prefix=SYSTEM))
    assert driver.demand() == 21_000


def test_a_side_branch_that_failed_takes_nothing_of_what_the_main_one_left() -> None:
    """Of 10,000 tokens 4000 are others', once."""
    driver = sharing()
    driver.takes_turn("b", 10_000, prefix=SYSTEM)
    driver.fails(driver.arrives("b", 5000, prefix=SYSTEM, branch="sub"))
    residency = driver.scheduler.replicas["r0"].residency
    assert residency.resident_tokens(driver.program("b").generation) == 6000
    assert driver.demand() == 26_000


def test_a_turn_that_left_while_it_waited_shares_nothing_when_its_program_comes_back() -> None:
    """Its branch has nothing; the main one comes back with a prompt of which no part is known."""
    driver = sharing(30_000)
    driver.arrives("a", 20_000, prefix=SYSTEM)
    held = driver.arrives("b", 25_000, prefix=SYSTEM, branch="sub")
    assert driver.held(held)
    driver.is_abandoned(held)
    assert not driver.held(driver.arrives("b", 1000))
    assert driver.demand() == 21_000
