"""A scheduler's state for the next one: written once, read whenever it arrives, even by another version."""

from __future__ import annotations

import msgspec
import pytest

from thunderagent.errors import BadFrameError
from thunderagent.programs.messages import BranchRecord, ProgramRecord
from thunderagent.scale.leader import kept as kept_module
from thunderagent.scale.leader.candidacy import GIVEN_UP, Candidacy
from thunderagent.scale.leader.journal import ENTRY_BYTES, SLICE_COUNT, TELL_AFTER_BYTES, WAITING_COUNT, Journal
from thunderagent.scale.leader.kept import (
    At,
    Begins,
    Counted,
    Ended,
    Entry,
    Kept,
    Learned,
    Linked,
    Lost,
    Record,
    Sums,
    Whole,
    decode,
    encode,
    program_of,
)
from thunderagent.scale.leader.store import Seen, believed, seen_of
from thunderagent.scale.scheduler.gateways import EPOCH_JUMP

PROGRAM = ProgramRecord("p", "t", standing="active", replica_id="r0", branches=(BranchRecord("", 70),), age_s=3.0)


def read(*entries: Entry, now_s: float = 0.0) -> Kept:
    kept = Kept()
    for entry in entries:
        kept.take(decode(encode(entry)), now_s)
    return kept


def programs(kept: Kept, now_s: float = 0.0) -> dict[str, ProgramRecord]:
    return {record.program_id: record for _, record in kept.programs(now_s)}


# --- the sum of entries


def test_the_last_word_on_a_program_counts_and_an_entry_may_come_twice() -> None:
    first = Entry(1, 10.0, [At("", PROGRAM), At("other", PROGRAM), At("", ProgramRecord("q"))])
    second = Entry(1, 11.0, [At("", PROGRAM._replace(turn_count=9)), Ended("", "q"), Ended("", "never-was")])
    for entries in ((first, second), (first, first, second, second)):
        kept = read(*entries, now_s=11.0)
        assert kept.programs_count == 2
        found = dict(kept.programs(11.0))
        assert found[""].turn_count == 9
        assert found["other"] == PROGRAM.older(1.0)


def test_programs_age_by_the_own_clock_from_the_entry_that_came_with_the_least_delay() -> None:
    """The writer's clock is 1,000 s behind; the second entry took half a second, the first one four."""
    kept = Kept()
    kept.take(Entry(1, 10.0, [At("", PROGRAM)]), 1014.0)
    kept.take(Entry(1, 20.0, []), 1020.5)
    assert programs(kept, 1030.5)["p"].age_s == pytest.approx(3.0 + 20.0)


def test_programs_that_are_not_told_again_are_gone() -> None:
    kept = read(Entry(1, 1.0, [At("", ProgramRecord("gone")), At("", PROGRAM)]))
    kept.take(Entry(2, 2.0, [Begins(), At("", PROGRAM)]), 2.0)
    assert kept.programs_count == 2
    kept.take(Entry(2, 3.0, [At("", ProgramRecord("new")), Whole()]), 3.0)
    assert set(programs(kept)) == {"p", "new"}


def test_counted_turns_are_of_a_run_of_a_gateway_and_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "COUNTED_COUNT", 3)
    kept = read(Entry(1, 1.0, [Linked("g", 7), Counted("g", (1, 2)), Linked("g", 7), Counted("g", (3, 4))]))
    assert list(kept.gateways["g"].counted) == [2, 3, 4]
    kept.take(Entry(1, 2.0, [Linked("g", 8), Counted("unknown", (1,))]), 2.0)
    assert not kept.gateways["g"].counted
    kept.take(Entry(1, 2.0, [Lost("g"), Sums({"finished": 3}, 5, 6, 7), Learned(b"x")]), 2.0)
    assert (kept.gateways["g"].is_there, kept.sums.output_tokens, kept.learned) == (False, 6, b"x")
    kept.take(Entry(1, 3.0, [Begins(), Linked("h", 1), Whole()]), 3.0)
    assert list(kept.gateways) == ["h"]


# --- versions


def test_fields_and_kinds_of_a_later_version_are_not_read() -> None:
    """A field that an earlier version did not write has its default."""
    later = [*PROGRAM[:8], [["", 70, 1, None, "", 0, "new"]], *PROGRAM[9:], "new", 4]
    data = msgspec.msgpack.encode([1, 5.0, [["at", "", later, "new"], ["unheard-of", 1], ["ended", "", "q", 8]], 1])
    kept = read()
    kept.take(decode(data), 5.0)
    assert programs(kept, 5.0)["p"] == PROGRAM._replace(branches=(BranchRecord("", 70, 1),))
    assert program_of(["p", "t"]) == ProgramRecord("p", "t")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"[]",
        msgspec.msgpack.encode([1, 2.0, [["at", 3]]]),
        msgspec.msgpack.encode([1, 2.0, [["at", "", []]]]),
        msgspec.msgpack.encode([2**40, 2.0, []]),
    ],
)
def test_broken_entry_is_reported_as_none(data: bytes) -> None:
    with pytest.raises(BadFrameError):
        decode(data)


def test_a_program_that_cannot_be_read_is_left_out() -> None:
    kept = read(Entry(1, 1.0, [At("", ["p", 7]), At("", ["q"])]))
    assert set(programs(kept)) == {"q"}


# --- entries to write


class Source:
    """Programs that change."""

    def __init__(self, count: int) -> None:
        self.programs = {f"p{number}": ProgramRecord(f"p{number}") for number in range(count)}
        self.changed: list[Record] = []
        self.total = 0
        self.journal = Journal(
            1,
            changes=self._changes,
            everything=lambda: [At("", each) for each in self.programs.values()],
            sums=self._sums,
        )
        self.kept = Kept()
        self.written_count = self.largest_bytes = 0

    def _changes(self) -> list[Record]:
        changed, self.changed = self.changed, []
        return changed

    def _sums(self) -> Sums:
        return Sums({"finished": self.total})

    def count(self, turn_id: int) -> list[tuple[str, int]]:
        self.total += 1
        return self.journal.counted("g", turn_id)

    def write(self) -> list[tuple[str, int]]:
        """Write one entry; return the turns that are acknowledged for it."""
        entry = self.journal.entry(0.0)
        assert entry is not None
        self.kept.take(decode(entry), 0.0)
        self.largest_bytes = max(self.largest_bytes, len(entry))
        self.written_count += 1
        return self.journal.was_written(str(self.written_count))

    def write_all(self) -> None:
        while self.journal.entry(0.0) is not None:
            self.write()


def test_a_turn_is_acknowledged_with_the_entry_that_has_it_and_its_sums() -> None:
    source = Source(1)
    source.journal.linked("g", 1)
    source.write_all()
    assert source.count(5) == []
    entry = source.journal.entry(0.0)
    source.count(6)
    assert source.journal.entry(1.0) is entry, "it is being written"
    assert source.write() == [("g", 5)]
    assert (source.kept.sums.outcome_counts, list(source.kept.gateways["g"].counted)) == ({"finished": 1}, [5])
    assert source.write() == [("g", 6)]
    assert source.kept.sums.outcome_counts == {"finished": 2}
    assert source.journal.entry(0.0) is None


def test_all_is_told_at_the_begin_and_what_changed_meanwhile_with_it() -> None:
    source = Source(2 * SLICE_COUNT)
    source.write()
    source.changed = [Ended("", "p0"), At("", ProgramRecord("new"))]
    assert source.journal.has_more
    assert source.journal.tells_from is None
    source.write_all()
    assert source.kept.programs_count == 2 * SLICE_COUNT
    assert source.journal.tells_from == "1", "what is before the first entry can go"


def test_all_is_told_again_after_many_bytes_and_when_the_store_lost_it() -> None:
    source = Source(3)
    source.write_all()
    source.journal.tells_from = None
    learned_bytes = 500_000
    for _ in range(TELL_AFTER_BYTES // learned_bytes + 1):
        assert not source.journal.has_more
        source.journal.learned(bytes(learned_bytes))
        source.write()
    assert source.journal.has_more, "that was few records, and many bytes"
    source.write_all()
    assert source.journal.tells_from == str(source.written_count)
    source.kept = Kept()
    source.journal.tell_all()
    source.write_all()
    assert source.kept.programs_count == 3


def test_an_outage_of_the_store_leaves_one_of_each_and_entries_that_can_be_written() -> None:
    source = Source(3)
    source.write_all()
    for number in range(50):
        source.journal.learned(bytes([number]) * 400_000)
        source.journal.linked("g", 1)
        source.journal.lost("g")
        source.journal.linked("h", number)
    source.changed = [At("", ProgramRecord(f"new{number}", "t" * 90)) for number in range(30_000)]
    source.count(7)
    assert source.write() == [("g", 7)], "what was counted waits for no program"
    assert source.kept.sums.outcome_counts == {"finished": 1}
    assert source.kept.learned == bytes([49]) * 400_000
    assert [(each.boot_id, each.is_there) for each in source.kept.gateways.values()] == [(1, False), (49, True)]
    assert source.journal.has_more
    source.changed = [At("", ProgramRecord("new0", "late")), Ended("", "new1")]
    source.write_all()
    assert source.written_count > 4
    assert source.largest_bytes < ENTRY_BYTES + 1000
    found = programs(source.kept)
    assert len(found) == 30_002
    assert found["new0"].tenant == "late", "what changed later was written later"


def test_change_during_a_large_record_has_its_place() -> None:
    source = Source(0)
    source.programs = {f"p{number}": ProgramRecord(f"p{number}", "t" * 9_000) for number in range(300)}
    source.changed = [At("", ProgramRecord("new"))]
    source.write()
    assert "new" in programs(source.kept)
    assert 1 < source.kept.programs_count < 300
    source.write_all()
    assert source.kept.programs_count == 301
    assert source.largest_bytes < ENTRY_BYTES


def test_waiting_turns_past_the_bound_are_acknowledged_unwritten() -> None:
    """A store that is away for long does not make gateways keep more than that."""
    source = Source(0)
    acknowledged = [turn for turn_id in range(WAITING_COUNT + 1) for turn in source.count(turn_id)]
    assert len(acknowledged) == WAITING_COUNT + 1
    assert source.count(0) == []


# --- the lock


def test_a_lock_is_taken_when_it_is_free_given_up_or_its_owner_is_dead() -> None:
    candidacy = Candidacy(3.0)
    assert candidacy.may_take(None, 0, 100.0) == GIVEN_UP, "nobody ever led"
    assert candidacy.may_take("other", 1, 100.0) is None
    assert candidacy.may_take(GIVEN_UP, 1, 100.0) == GIVEN_UP
    candidacy.died("someone")
    assert candidacy.may_take("other", 1, 100.0) is None
    candidacy.died("other")
    assert candidacy.may_take("other", 1, 100.0) == "other"


def test_after_the_store_was_away_the_old_owner_comes_first() -> None:
    """This lasts as long as a lock: it believes that it leads, and takes the lock again."""
    candidacy = Candidacy(3.0)
    assert candidacy.may_take("other", 1, 100.0) is None
    assert candidacy.may_take(None, 1, 103.0) == GIVEN_UP, "it ended under our eyes"
    candidacy.failed()
    assert candidacy.may_take(None, 1, 110.0) is None
    assert candidacy.may_take(None, 1, 112.9) is None
    assert candidacy.may_take(None, 1, 113.0) == GIVEN_UP


def test_a_store_that_lost_its_data_is_not_new() -> None:
    """Its leader may live, though nothing shows it any more: that leader gets precedence."""
    for seen in (("other", 7), (None, 7), ("other", 0)):
        candidacy = Candidacy(3.0)
        candidacy.failed()
        candidacy.may_take(*seen, 100.0)
        candidacy.failed()
        assert candidacy.may_take(None, 0, 110.0) is None
        assert candidacy.may_take(None, 0, 113.0) == GIVEN_UP
    always_there = Candidacy(3.0)
    assert always_there.may_take("other", 7, 100.0) is None
    assert always_there.may_take(None, 0, 110.0) is None, "the epoch fell: its data went without a word"
    assert always_there.may_take(None, 0, 112.9) is None
    assert always_there.may_take(None, 0, 113.0) == GIVEN_UP


def test_a_store_that_first_was_away_is_not_new_at_once() -> None:
    """Another scheduler may have had it meanwhile."""
    candidacy = Candidacy(3.0)
    candidacy.failed()
    assert candidacy.may_take(None, 0, 100.0) is None
    assert candidacy.may_take(None, 0, 103.0) == GIVEN_UP


# --- the contents of a store


def test_stored_entries_are_read() -> None:
    entries = [(b"1-0", {b"e": b"words"}), (b"2-0", {b"other": b"x"})]
    assert seen_of(b"a http://h:1", b"7", entries, has_more=True) == Seen(
        "a http://h:1", 7, [("1-0", b"words"), ("2-0", b"")], True
    )
    assert seen_of(None, None, [], has_more=False) == Seen(None, 0, [], False)


@pytest.mark.parametrize("epoch", [b"rubbish", b"\xff", b"-1", b"2147483648", b"9" * 5000, b"1e18"])
def test_an_epoch_that_no_scheduler_writes_is_none_and_is_said(epoch: bytes) -> None:
    """It stops no scheduler: the next one writes its own."""
    seen = seen_of(b"\xff", epoch, [], has_more=False)
    assert (seen.owner, seen.epoch) == (r"\xff", 0)
    assert "not counted" in seen.damage
    assert len(seen.damage) < 100


def test_an_epoch_is_believed_unless_it_jumps() -> None:
    assert [believed(epoch, 7) for epoch in (0, 8, 7 + EPOCH_JUMP, 8 + EPOCH_JUMP)] == [0, 8, 7 + EPOCH_JUMP, 0]
    assert believed(2**30, 0) == 2**30, "who knows of none believes any"


def test_data_that_was_lost_makes_counts_doubtful_until_all_is_written_again() -> None:
    kept = Kept()
    kept.is_torn = True
    kept.take(Entry(1, 0.0, (Whole(),)), 0.0)
    assert kept.is_torn, "nothing was written again before"
    kept.take(Entry(1, 0.0, (Begins(), Sums({"finished": 3}))), 0.0)
    assert kept.is_torn
    kept.take(Entry(1, 0.0, (Whole(),)), 0.0)
    assert not kept.is_torn
