"""A policy's view of prefixes, memory, tools and groups, and its possible actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest

from tests.builders import Driver, of_kind
from thunderagent.programs.messages import Pause, Reason, SchedulerSettings
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View

SHARING = ClaimRules(share_prefixes=True, adapt_capacity=True)


@dataclass
class Watching(Policy):
    """Admits all at the first replica, and keeps the view and the changes at each balance."""

    rules: ClaimRules = SHARING
    held_for_s: float = inf
    changed: list[tuple[Moment, list[str]]] = field(default_factory=list)
    view: View | None = None
    name: str = "watching"
    tick_s: float = 1.0

    @property
    def claim_rules(self) -> ClaimRules:
        return self.rules

    def hold_s(self, view: View, program: ProgramView) -> float:
        return self.held_for_s

    def pause_rank(self, program: ProgramView) -> float:
        return inf if program.is_last_of_group else -program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: list[ReplicaView]) -> Placement:
        self.view = view
        return Placement(candidates[0], Reason.POLICY)

    def balance(self, view: View, moment: Moment) -> None:
        self.view = view
        self.changed.append((moment, [replica.replica_id for replica in view.changed_replicas]))


def watched(**more: float) -> tuple[Driver, Watching, View]:
    policy = Watching(**more)
    settings = SchedulerSettings(idle_limit_s=1e6, forget_limit_s=1e7)
    driver = Driver(policy, replicas={"r0": 1000, "r1": 1000}, settings=settings, threshold_s=20.0)
    assert policy.view is not None
    return driver, policy, policy.view


def test_replicas_are_changed_once() -> None:
    """A turn ended there, or a program grew or left, since the policy was last asked; otherwise there are none."""
    driver, policy, _ = watched()
    turn = driver.arrives("a", 100)
    driver.progresses(turn, 10)
    policy.changed.clear()
    driver.finishes(turn, 100)
    driver.ticks(1.0)
    driver.releases("a")
    driver.ticks(1.0)
    assert policy.changed == [
        (Moment.TURN_ENDED, ["r0"]),
        (Moment.TICK, []),
        (Moment.PROGRAM_ENDED, ["r0"]),
        (Moment.TICK, []),
    ]


def test_a_replica_that_may_get_nothing_is_not_among_the_changed() -> None:
    """This holds even if programs left it."""
    driver, policy, view = watched()
    driver.takes_turn("a", 100)
    policy.changed.clear()
    driver.drains("r0")
    assert policy.changed == [(Moment.REPLICAS_CHANGED, [])]
    assert view.replica("r0") is None
    assert view.replica("r1") is not None
    assert view.replica("never was") is view.replica(None) is None


def test_a_program_expires_when_it_is_held_for_longer_than_is_worth_it() -> None:
    """The one with the shortest hold is first; none expires before its time or with an unfinished turn."""
    driver, policy, view = watched(held_for_s=10.0)
    replica = view.replica("r0")
    driver.takes_turn("a", 100)
    policy.held_for_s = 5.0
    driver.takes_turn("b", 100)
    driver.ticks(4.9)
    assert view.first_expired(replica) is None
    driver.ticks(0.2)
    assert view.first_expired(replica) is driver.program("b")
    driver.arrives("b", 100)
    assert view.first_expired(replica) is None
    driver.ticks(5.0)
    assert view.first_expired(replica) is driver.program("a")
    view.propose_pause(driver.program("a"), Reason.EXPIRED)
    assert view.first_expired(replica) is None


def test_program_held_without_end_never_expires() -> None:
    """Policies without tools do this."""
    driver, _, view = watched()
    driver.takes_turn("a", 100)
    driver.ticks(1e5)
    assert view.first_expired(view.replica("r0")) is None


def test_a_mark_is_taken_back() -> None:
    """Only a mark can be taken back, and only once; the program keeps its claim when its turn ends."""
    driver, _, view = watched()
    turn = driver.arrives("a", 100)
    program = driver.program("a")
    assert not view.propose_unmark(program, Reason.RELIEVED)
    assert view.propose_mark(program, Reason.THRASHING)
    assert view.last_marked(view.replica("r0")) is program
    assert driver.scheduler.replicas["r0"].account.marked_tokens == 100
    assert view.propose_unmark(program, Reason.RELIEVED)
    assert not view.propose_unmark(program, Reason.RELIEVED)
    assert view.first_to_mark(view.replica("r0")) is program
    assert [entry.what for entry in program.story()][-2:] == ["mark", "unmark"]
    assert of_kind(Pause, driver.finishes(turn, 100)) == []
    assert driver.home("a") == "r0"


def test_a_mark_on_a_replica_that_drains_stays() -> None:
    """No program may stay there."""
    driver, _, view = watched()
    driver.arrives("a", 100)
    driver.drains("r0")
    assert not view.propose_unmark(driver.program("a"), Reason.RELIEVED)


def test_the_last_that_was_marked_is_the_first_to_be_unmarked() -> None:
    """Marks are given from the lowest pause rank up, and taken back from the highest down."""
    driver, _, view = watched()
    for name in ("old", "young"):
        driver.arrives(name, 100)
        driver.passes(1.0)
    for name in ("young", "old"):
        view.propose_mark(driver.program(name), Reason.THRASHING)
    assert view.last_marked(view.replica("r0")) is driver.program("old")


# --- Groups


def test_the_last_of_a_group_is_alone_when_all_others_ended() -> None:
    """It does not matter how they ended; a later member makes it one of several again."""
    driver, _, _ = watched()
    for name in ("a", "b", "c"):
        driver.takes_turn(name, 100, group="g")
    driver.releases("a")
    assert not driver.program("b").is_last_of_group
    driver.ticks(1.0)
    driver.releases_all("c")
    assert driver.program("b").is_last_of_group
    driver.takes_turn("d", 100, group="g")
    assert not driver.program("b").is_last_of_group
    driver.releases_all("b", "d")
    assert not driver.scheduler.book.groups


def test_a_program_belongs_to_the_group_of_its_first_turn() -> None:
    """A later turn's group changes nothing, and no group is not a group."""
    driver, _, _ = watched()
    driver.takes_turn("a", 100, group="g")
    driver.takes_turn("a", 100, group="h")
    driver.takes_turn("b", 100)
    assert set(driver.scheduler.book.groups) == {("", "g")}
    assert driver.program("b").group is None


@pytest.mark.parametrize("group", ["g", ""])
def test_the_order_of_pausing_follows_the_group(group: str) -> None:
    """If others end while it acts, or while its turn is in flight, it is ranked anew at once."""
    driver, _, view = watched()
    replica = view.replica("r0")
    driver.takes_turn("old", 100)
    driver.passes(1.0)
    driver.takes_turn("other", 100, group=group)
    driver.passes(1.0)
    driver.takes_turn("young", 100, group=group)
    assert view.first_to_pause(replica) is driver.program("young")
    driver.releases("other")
    assert view.first_to_pause(replica) is driver.program("old" if group else "young")


# --- Prefixes


def test_shared_tokens_are_in_the_demand_once() -> None:
    """Three of 300 with 200 in common are 500; each that leaves takes its own part, the last one all."""
    driver, _, view = watched()
    for name in ("a", "b", "c"):
        driver.takes_turn(name, 300, prefix={"system": 200})
    assert driver.demand() == 500
    assert driver.scheduler.replicas["r0"].account.acting.tokens == 900
    view.propose_pause(driver.program("a"), Reason.EXPIRED)
    assert driver.demand() == 400
    assert view.claim_tokens_on(driver.program("a"), view.replica("r0")) == 100
    assert view.claim_tokens_on(driver.program("a"), view.replica("r1")) == 300
    driver.releases("b")
    assert driver.demand() == 300
    driver.releases("c")
    assert driver.demand() == 0
    assert view.claim_tokens_on(driver.program("a"), view.replica("r0")) == 300


def test_a_program_that_sends_another_prompt_shares_what_that_shares() -> None:
    """It does so from its next turn on, while it is active."""
    driver, _, _ = watched()
    driver.takes_turn("a", 300, prefix={"system": 200})
    driver.takes_turn("b", 300, prefix={"system": 200})
    driver.takes_turn("b", 300, prefix={"other": 150})
    assert driver.demand() == 600
    driver.takes_turn("b", 300, prefix={"system": 200, "task": 280})
    driver.takes_turn("a", 300, prefix={"system": 200, "task": 280})
    assert driver.demand() == 600 - 280


def test_sub_agents_share_with_others_until_they_end() -> None:
    """The branch of one shares with that of another."""
    driver, _, _ = watched()
    driver.takes_turn("a", 100)
    driver.takes_turn("b", 100)
    driver.takes_turn("a", 200, branch="sub", prefix={"search": 150})
    driver.takes_turn("b", 200, branch="sub", prefix={"search": 150})
    assert driver.demand() == 100 + 100 + 200 + 200 - 150
    driver.takes_turn("a", 100)
    assert driver.demand() == 100 + 100 + 200
    assert driver.scheduler.replicas["r0"].account.shared_tokens == 0


def test_a_policy_that_does_not_share_counts_every_claim_in_full() -> None:
    """It keeps no prefixes."""
    driver, _, _ = watched(rules=ClaimRules())
    driver.takes_turn("a", 300, prefix={"system": 200})
    driver.takes_turn("b", 300, prefix={"system": 200})
    assert driver.demand() == 600
    assert len(driver.scheduler.book.prefixes.tree) == 0


# --- Memory


def test_engine_report_replaces_the_estimate() -> None:
    """This covers known programs without a turn; unknown ids are skipped."""
    driver, _, view = watched()
    driver.takes_turn("a", 300)
    replica = view.replica("r0")
    assert view.resident_tokens(driver.program("a"), replica) == 300
    driver.reports("r0", a=120, nobody=500)
    assert view.resident_tokens(driver.program("a"), replica) == 120
    assert view.resident_tokens(driver.program("a"), view.replica("r1")) == 0
    driver.arrives("a", 320)
    driver.reports("r0", a=0)
    assert view.resident_tokens(driver.program("a"), replica) == 320


def test_a_replica_that_went_down_has_lost_what_lay_there() -> None:
    """Its memory is empty when it comes back."""
    driver, _, view = watched()
    driver.takes_turn("a", 300)
    driver.goes_down("r0")
    driver.comes_up("r0", 1000)
    assert view.resident_tokens(driver.program("a"), view.replica("r0")) == 0


def lose_half(driver: Driver, *, tells: bool) -> None:
    """Let programs that keep their claims find half of them cached, turn by turn for a while."""
    for _ in range(40):
        driver.finishes(driver.arrives("a", 400), 400, 0, 200 if tells else None)
        if not tells:
            driver.is_polled("r0", hit_ratio=0.5, query_tokens=400)
        driver.ticks(0.5)


@pytest.mark.parametrize("tells", [True, False])
def test_lost_context_is_not_claimed_again(tells: bool) -> None:
    """Usage of turns or the engine's counters show it: the limit of that replica alone falls."""
    driver, _, view = watched()
    lose_half(driver, tells=tells)
    assert view.replica("r0").account.limit_tokens <= 900
    assert view.replica("r1").account.limit_tokens == 1000
    assert view.replica("r0").account.capacity_tokens == 1000


def test_counters_are_not_believed_where_turns_tell() -> None:
    """Misses of other clients of the engine are not ours."""
    driver, _, view = watched()
    for _ in range(40):
        driver.finishes(driver.arrives("a", 400), 400, 0, 400)
        driver.is_polled("r0", hit_ratio=0.0, query_tokens=4000)
        driver.ticks(0.5)
    assert view.replica("r0").account.limit_tokens == 1000


def test_preemptions_are_lost_claims() -> None:
    """Each costs the mean claim of a program with a turn."""
    driver, _, view = watched()
    for _ in range(40):
        turn = driver.arrives("a", 400)
        driver.is_polled("r0", preemption_count=1)
        driver.finishes(turn, 400, 0, 400)
        driver.ticks(0.5)
    assert view.replica("r0").account.limit_tokens <= 900


def test_without_the_rule_the_capacity_is_believed() -> None:
    """The policies of the paper do this."""
    driver, _, view = watched(rules=ClaimRules())
    lose_half(driver, tells=True)
    assert view.replica("r0").account.limit_tokens == 1000


def test_a_program_that_had_lost_its_claim_is_not_expected_to_find_anything() -> None:
    """Its misses were given away, not lost."""
    driver, _, view = watched()
    for _ in range(40):
        driver.finishes(driver.arrives("a", 400), 400, 0, 0)
        view.propose_pause(driver.program("a"), Reason.EXPIRED)
        driver.ticks(0.5)
    assert view.replica("r0").account.limit_tokens == 1000
