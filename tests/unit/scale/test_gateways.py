"""The state that both sides of a link keep, and its repair when links, gateways and schedulers come and go."""

from __future__ import annotations

from itertools import count
from typing import NoReturn

import pytest
from msgspec.structs import replace

from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.scale.gateway import carried
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.messages import (
    CHUNK_BYTES,
    CHUNK_COUNT,
    Card,
    Digest,
    Frame,
    FromGateway,
    Gone,
    Hello,
    Left,
    Progress,
    Released,
    Revoke,
    Running,
    Told,
    Turns,
    encode,
)
from thunderagent.scale.scheduler.gateways import EPOCH_JUMP, FORGET_S, Gateways
from thunderagent.scale.scheduler.tried_again import LOOKS_COUNT


class Heard:
    """Grants nothing, and remembers its events of replicas."""

    def __init__(self) -> None:
        self.ids = count(1)
        self.tripped_ids: set[str] = set()
        self.failing_ids: set[str] = set()
        self.seen_of: list[Digest] = []
        self.asked_ids: list[int] = []
        self.cards_of: list[str] = []

    def new_turn_id(self) -> int:
        return next(self.ids)

    def asked(self, turn_id: int, ask: TurnAsk) -> None:
        self.asked_ids.append(turn_id)

    def adopted(self, turn_id: int, running: Running) -> None: ...

    def progressed(self, turn_id: int, progress: Progress) -> None: ...

    def ended(self, turn_id: int, end: TurnEnd) -> None: ...

    def left(self, turn_id: int) -> None: ...

    def tried_again(self, turn_id: int) -> None: ...

    def released(self, word: Released) -> None: ...

    def card(self, card: Card) -> None:
        self.cards_of.append(card.program_id)

    def seen(self, digest: Digest) -> None:
        self.seen_of.append(digest)

    def tripped(self, replica_id: str, *, tripped: bool) -> None:
        (self.tripped_ids.add if tripped else self.tripped_ids.discard)(replica_id)
        if tripped:
            self.failing_ids.add(replica_id)

    def recovered(self, replica_id: str) -> None:
        self.failing_ids.discard(replica_id)


class Cell:
    """A scheduler, and gateways whose messages a test sets."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.gateways = Gateways(self.heard, leader_id=7)

    def links(self, gateway_id: str, number: int, *tripped_ids: str, boot_id: int = 1) -> None:
        self.gateways.linked(Hello(gateway_id, boot_id, number))
        self.says(gateway_id, Told(tripped_ids))

    def unlinks(self, gateway_id: str, now_s: float = 0.0) -> None:
        gateway = self.gateways.all[gateway_id]
        self.gateways.unlinked(gateway, gateway.link_number, now_s)

    def says(self, gateway_id: str, *messages: FromGateway) -> None:
        gateway = self.gateways.all[gateway_id]
        self.gateways.take(gateway, Frame(gateway.heard + 1, 0, 0, messages))

    @property
    def tripped_ids(self) -> set[str]:
        return self.heard.tripped_ids


def test_a_replica_is_tripped_once_two_gateways_say_so_or_the_only_one() -> None:
    """It recovers when no gateway reports it any more; other observations are passed on."""
    cell = Cell()
    cell.links("a", 1)
    cell.says("a", Digest("r", "tripped"), Digest("r", "failed"))
    assert (cell.tripped_ids, cell.heard.seen_of) == ({"r"}, [Digest("r", "failed")])
    cell.says("a", Digest("r", "tried"))
    cell.links("b", 1)
    cell.says("a", Digest("r", "tripped"))
    assert not cell.tripped_ids
    cell.says("b", Digest("r", "tripped"))
    cell.says("a", Digest("r", "tried"))
    assert cell.tripped_ids == {"r"}
    cell.says("b", Digest("r", "tried"))
    assert not cell.tripped_ids


def test_a_replica_is_failing_until_the_probes_of_all_gateways_ended_well() -> None:
    """That it may be tried is not enough."""
    cell = Cell()
    cell.links("a", 1)
    cell.links("b", 1)
    for gateway_id in "ab":
        cell.says(gateway_id, Digest("r", "tripped"))
    for gateway_id in "ab":
        cell.says(gateway_id, Digest("r", "tried"))
    assert (cell.tripped_ids, cell.heard.failing_ids) == (set(), {"r"})
    cell.says("a", Digest("r", "recovered"))
    assert cell.heard.failing_ids == {"r"}
    cell.says("b", Digest("r", "recovered"))
    assert not cell.heard.failing_ids


def test_a_gateway_that_is_lost_while_it_tries_a_replica_says_nothing_against_it() -> None:
    """It has no turn, and counts none as tripped."""
    cell = Cell()
    cell.links("a", 1)
    cell.says("a", Digest("r", "tripped"), Digest("r", "tried"))
    cell.unlinks("a", 10.0)
    assert cell.heard.failing_ids == {"r"}
    cell.gateways.lose_silent(15.0, 5.0)
    assert not cell.heard.failing_ids


def test_a_probe_that_succeeded_without_a_link_is_heard_of_with_the_next() -> None:
    """Each link begins with all replicas that fail a gateway; unnamed ones may be tried."""
    cell = Cell()
    cell.links("a", 1, "r", "s")
    assert cell.tripped_ids == {"r", "s"}
    cell.unlinks("a")
    assert cell.tripped_ids == {"r", "s"}
    cell.links("a", 2, "s")
    assert cell.tripped_ids == {"s"}


def test_a_gateway_that_is_no_more_has_nothing_to_say_of_replicas() -> None:
    """Cases are a gateway that restarted, one that is lost without a turn, and one that is forgotten."""
    cell = Cell()
    cell.links("a", 1, "r")
    cell.gateways.linked(Hello("a", 2, 1))
    assert not cell.tripped_ids
    cell.links("a", 2, "r", boot_id=2)
    cell.unlinks("a", 10.0)
    cell.gateways.lose_silent(14.0, 5.0)
    assert cell.tripped_ids == {"r"}
    cell.gateways.lose_silent(15.0, 5.0)
    assert not cell.tripped_ids
    cell.gateways.lose_silent(10.0 + FORGET_S, 5.0)
    assert not cell.gateways.all


def test_fewer_gateways_need_fewer_words() -> None:
    """The remaining one is then the only one."""
    cell = Cell()
    cell.links("a", 1)
    cell.links("b", 1, "r")
    assert not cell.tripped_ids
    cell.unlinks("a")
    assert cell.tripped_ids == {"r"}


def test_a_replica_that_begins_anew_was_tripped_by_nobody() -> None:
    """One report counts as one again, although its earlier incarnation had two."""
    cell = Cell()
    cell.links("a", 1)
    cell.links("b", 1, "r")
    cell.gateways.trips.begin_anew(["r"])
    cell.says("a", Digest("r", "tripped"))
    assert not cell.tripped_ids


def test_a_gateway_that_only_had_a_card_hears_that_its_program_ended() -> None:
    """The card of a program from another scheduler names the gateways that keep data for it."""
    cell = Cell()
    cell.links("a", 1)
    cell.says("a", Turns(cards=(Card("p", "r", 10),)))
    cell.gateways.program_ended("p")
    assert Gone("p") in cell.gateways.frame(cell.gateways.all["a"]).messages


@pytest.mark.parametrize(("followed", "has_come_back"), [(7, False), (8, True)])
def test_a_program_that_ended_without_a_link_comes_back_only_from_another_scheduler(
    followed: int, has_come_back: bool
) -> None:
    """A gateway that followed this one all the time knows nothing that it does not know."""
    cell, cards = Cell(), Turns(cards=(Card("p", "r", 10), Card("q", "r", 10)))
    cell.gateways.linked(Hello("a", 1, 1))
    cell.says("a", cards, Told())
    cell.unlinks("a")
    cell.gateways.program_ended("p")
    cell.gateways.linked(Hello("a", 1, 2, leader_id=followed))
    cell.says("a", cards)
    assert cell.heard.cards_of == ["p", "q", *(["p"] if has_come_back else []), "q"]
    assert (Gone("p") in cell.gateways.frame(cell.gateways.all["a"]).messages) is not has_come_back


LEASE = Lease(0, "p", 1, "r", "", None, "fits", 0.0)


def test_no_gateway_brings_a_leader_to_an_epoch_below_its_own_or_to_the_last_one() -> None:
    """A late message changes nothing, and an impossible one is refused: no epoch follows the last one."""
    gateways, heard = Cell().gateways, list[int]()
    gateways.on_higher = heard.append
    gateways.leads_in(50)
    gateways.deposed(40)
    assert heard == []
    gateways.deposed(60)
    assert heard == [60]
    for epoch in (50 + EPOCH_JUMP + 1, 2**31 - 1):
        with pytest.raises(BadFrameError, match="no scheduler can lead"):
            gateways.deposed(epoch)
        with pytest.raises(BadFrameError, match="no scheduler can lead"):
            gateways.linked(Hello("a", 1, 1, epoch, 8))
    assert (heard, gateways.epoch, gateways.all) == ([60], 50, {})


def test_without_a_store_no_gateway_brings_a_scheduler_to_the_last_epoch() -> None:
    """It takes its epoch from its gateways."""
    gateways = Cell().gateways
    with pytest.raises(BadFrameError, match="no scheduler can lead"):
        gateways.linked(Hello("a", 1, 1, 2**31 - 1, 8))
    gateways.deposed(60)
    gateways.linked(Hello("a", 1, 1, 5, 8))
    assert gateways.epoch == 6


def frames_of_a_link(turns: CarriedTurns) -> list[Frame]:
    turns.linked(0.0)
    frames = []
    while turns.has_news:
        frames.append(turns.frame())
    return frames


def test_backlog_of_a_long_outage_goes_out_in_small_frames() -> None:
    """Number and bytes are limited; of ended turns, data that only a coming turn needs is left out."""
    turns, long = CarriedTurns("g", 1), tuple((n, n) for n in range(2**40, 2**40 + 4000))
    for turn_id in range(1500):
        turns.asked(TurnAsk(turn_id=turn_id, program_id=f"p{turn_id}", prefix=long, media=(("image", 3),)), 0.0)
        if turn_id < 1000:
            turns.granted_here(turn_id, replace(LEASE, turn_id=turn_id, program_id=f"p{turn_id}"))
        if turn_id < 500:
            turns.ended(TurnEnd(turn_id, f"p{turn_id}", 1, "finished", 5, 7))
    frames = frames_of_a_link(turns)
    assert max(len(encode(frame)) for frame in frames) < CHUNK_BYTES + 1000
    told = [message for frame in frames for message in frame.messages if isinstance(message, Turns)]
    assert max(len(each.running) + len(each.held) + len(each.cards) for each in told) <= CHUNK_COUNT
    running = [each for message in told for each in message.running]
    assert [each.ask.turn_id for each in running] == list(range(1000))
    assert [ask.turn_id for each in told for ask in each.held] == list(range(1000, 1500))
    assert sum(len(each.cards) for each in told) == 500
    assert {bool(each.ask.prefix or each.ask.media) for each in running[:500]} == {False}
    assert {bool(each.ask.prefix and each.ask.media) for each in running[500:]} == {True}
    assert [frame.number for frame in frames] == list(range(1, len(frames) + 1))
    assert isinstance(frames[0].messages[0], Hello)
    assert isinstance(frames[-1].messages[-1], Told)


def test_ends_of_programs_are_kept_for_a_scheduler_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones are kept."""
    monkeypatch.setattr(carried, "UNHEARD_COUNT", 10)
    turns = CarriedTurns("g", 1)
    for number in range(12):
        turns.released(f"p{number}", None, "")
    words = [each for frame in frames_of_a_link(turns) for each in frame.messages if isinstance(each, Released)]
    assert [each.program_id for each in words] == [f"p{number}" for number in range(2, 12)]


def attempt(turn_id: int, key: str = "k") -> TurnAsk:
    return TurnAsk(turn_id=turn_id, program_id="p", attempt_key=key)


def test_an_attempt_waits_for_the_end_of_the_one_before_at_another_gateway() -> None:
    """That gateway is told to end it; a third attempt waits for the first, too."""
    cell = Cell()
    for gateway_id in ("a", "b", "c"):
        cell.links(gateway_id, 1)
    cell.says("a", attempt(10))
    cell.says("b", attempt(20), attempt(21, "other"))
    assert cell.heard.asked_ids == [1, 3]
    assert Revoke(10, "p") in cell.gateways.all["a"].outbox
    cell.says("c", attempt(30))
    assert Revoke(20, "p") in cell.gateways.all["b"].outbox
    cell.says("b", Left(20))
    assert cell.heard.asked_ids == [1, 3]
    cell.says("a", Left(10))
    assert cell.heard.asked_ids == [1, 3, 4]
    cell.says("a", attempt(11))
    assert Revoke(30, "p") in cell.gateways.all["c"].outbox


def test_a_gateway_that_does_not_end_an_attempt_is_not_waited_for_long() -> None:
    """It may have a version that does not know that message."""
    cell = Cell()
    cell.links("a", 1)
    cell.links("b", 1)
    cell.says("a", attempt(10))
    cell.says("b", attempt(20))
    for _ in range(LOOKS_COUNT - 1):
        cell.gateways.look()
    assert cell.heard.asked_ids == [1]
    cell.gateways.look()
    assert cell.heard.asked_ids == [1, 2]
    cell.says("a", Left(10))
    assert cell.heard.asked_ids == [1, 2]


@pytest.mark.parametrize("is_told_before", [True, False])
@pytest.mark.parametrize("runs", [True, False])
def test_a_lost_link_loses_no_word_of_the_next_attempt(is_told_before: bool, runs: bool) -> None:
    """The next link brings it. Without a link, nobody waits for the end of the earlier attempt."""
    cell = Cell()
    cell.links("a", 1)
    cell.links("b", 1)
    cell.says("a", attempt(10), attempt(11, "other"))
    for own_id in (1, 2) if runs else ():
        cell.gateways.granted(own_id, LEASE)
    if is_told_before:
        cell.says("b", attempt(20))
        cell.unlinks("a")
    else:
        cell.unlinks("a")
        cell.says("b", attempt(20))
    assert cell.heard.asked_ids == ([1, 2] if is_told_before else [1, 2, 3])
    cell.gateways.linked(Hello("a", 1, 2))
    revokes = [each for each in cell.gateways.all["a"].outbox if isinstance(each, Revoke)]
    assert not revokes
    turns = (attempt(10), attempt(11, "other"))
    cell.says(
        "a", Turns(running=tuple(Running(each, LEASE) for each in turns)) if runs else Turns(held=turns), Told(())
    )
    assert [each for each in cell.gateways.all["a"].outbox if isinstance(each, Revoke)] == [Revoke(10, "p")]
    cell.says("a", Left(10))
    assert cell.heard.asked_ids == [1, 2, 3]
    assert not cell.gateways._tried_again.revoked_ids


class NoLook(dict[int, None]):
    """Entries that nobody may go through."""

    def __iter__(self) -> NoReturn:
        pytest.fail("a frame costs a look at each of them")

    items = keys = __iter__  # type: ignore[assignment]


def test_a_frame_costs_no_look_at_turns_whose_counts_wait_for_the_store() -> None:
    """Acknowledged turns are forgotten once their gateway has heard it; the others stay."""
    cell = Cell()
    cell.links("a", 1)
    gateway, unwritten = cell.gateways.all["a"], set[int]()
    cell.gateways.on_counted = lambda _, turn_id: unwritten.add(turn_id)
    for turn_id in range(1, 101):
        cell.says(
            "a", Turns(running=(Running(TurnAsk(turn_id=turn_id), LEASE, end=TurnEnd(turn_id, None, 0, "failed")),))
        )
    assert unwritten == set(range(1, 101))
    gateway.counted = NoLook(gateway.counted)
    for turn_id in (7, 3):
        cell.gateways.written("a", turn_id)
    frame = cell.gateways.frame(gateway)
    cell.says("a", Digest("r", "failed"))
    assert len(gateway.counted) == 100, "it has not heard it"
    cell.gateways.take(gateway, Frame(gateway.heard + 1, frame.number, 0, ()))
    assert len(gateway.counted) == 98
    assert 3 not in gateway.counted
    assert 8 in gateway.counted


def test_acknowledgements_of_an_earlier_link_say_nothing_of_this_one() -> None:
    """Its frames have the same numbers."""
    cell = Cell()
    cell.links("a", 1)
    gateway = cell.gateways.all["a"]
    ended = Turns(running=(Running(TurnAsk(turn_id=1), LEASE, end=TurnEnd(1, None, 0, "failed")),))
    cell.says("a", ended)
    cell.gateways.frame(gateway)
    cell.gateways.linked(Hello("a", 1, 2))
    first = cell.gateways.frame(gateway)
    cell.says("a", ended, Told())
    cell.gateways.take(gateway, Frame(gateway.heard + 1, first.number, 0, ()))
    assert 1 in gateway.counted


@pytest.mark.parametrize("count", [1, 2500])
def test_ends_of_programs_are_told_before_turns_that_may_begin_them_anew(count: int) -> None:
    """And after those that ended; frames stay small."""
    turns = CarriedTurns("g", 1)
    for turn_id in range(3):
        turns.asked(TurnAsk(turn_id=turn_id, program_id="p"), 0.0)
    for turn_id in range(2):
        turns.granted_here(turn_id, replace(LEASE, turn_id=turn_id))
    turns.ended(TurnEnd(0, "p", 1, "finished", 5, 7))
    for number in range(count):
        turns.released(f"p{number}", 1, "")
    frames = frames_of_a_link(turns)
    told = [message for frame in frames for message in frame.messages]
    assert [type(each) for each in told] == [Hello, Turns, Turns, *[Released] * count, Turns, Turns, Told]
    assert [each.ask.turn_id for message in told[1:3] for each in message.running] == [0, 1]  # type: ignore[union-attr]
    assert max(len(frame.messages) for frame in frames) <= carried.FRAME_COUNT
