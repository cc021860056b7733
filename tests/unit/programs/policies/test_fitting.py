"""`Fitting`: the programs that fit together, with shared tokens counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from tests.builders import Driver, of_kind
from thunderagent.programs.messages import Pause
from thunderagent.programs.policies.fitting import Fitting
from thunderagent.programs.policies.helpers import restore_waiting
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View

PLAIN = ClaimRules()


@dataclass(frozen=True)
class Fits(Policy):
    """A policy that only fits programs; the smallest is paused first, the oldest restored first."""

    fitting: Fitting
    name: str = "fits"
    claim_rules: ClaimRules = PLAIN
    tick_s: float = 1.0

    def hold_s(self, view: View, program: ProgramView) -> float:
        return inf

    def pause_rank(self, program: ProgramView) -> float:
        return program.claim_tokens

    def restore_rank(self, program: ProgramView) -> float:
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        return self.fitting.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:
        for replica in view.replicas:
            self.fitting.relieve(view, replica)
        restore_waiting(view, self)


def driver_with(fitting: Fitting) -> Driver:
    return Driver(Fits(fitting), replicas={"r0": 1000})


def test_common_tokens_are_counted_once() -> None:
    """Three programs of 500 that share 300 take 900 of 1,000: 100 more fit, and no token beyond."""
    driver = driver_with(Fitting(shared_tokens=300))
    assert not any(driver.held(driver.arrives(name, 500)) for name in "abc")
    assert not driver.held(driver.arrives("d", 400))
    assert driver.held(driver.arrives("e", 301))


def test_alone_a_program_shares_with_nobody() -> None:
    """A program that grew beyond the capacity is paused, even if it could share with others."""
    driver = driver_with(Fitting(shared_tokens=300))
    driver.takes_turn("a", 1100)
    assert of_kind(Pause, driver.events[-1][1]) == ["a"]


def test_headroom_is_kept_from_those_who_come_and_not_from_those_who_are_there() -> None:
    """Of 1,000 tokens 100 stay free for growth; programs that grow into them stay."""
    driver = driver_with(Fitting(headroom_ratio=0.1))
    turn = driver.arrives("a", 500)
    assert driver.held(driver.arrives("b", 401))
    driver.finishes(turn, 500, 450)
    assert driver.ticks(1.0) == []
    driver.releases("a")


def test_headroom_does_not_keep_out_one_that_runs_alone() -> None:
    """On an empty replica the whole capacity is available."""
    driver = driver_with(Fitting(headroom_ratio=0.1))
    assert not driver.held(driver.arrives("a", 1000))
