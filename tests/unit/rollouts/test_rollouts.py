"""Rollouts are exact: chains rebuild, each sampled token has one owner, and bounds hold without silent loss."""

from __future__ import annotations

import json
import os
import random
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderagent.rollouts.lineage import MAX_CHAINS_COUNT, Lineage
from thunderagent.rollouts.records import (
    OWN_SHARES_COUNT,
    Output,
    Rollout,
    Span,
    Turn,
    block_of,
    frame_of,
    turns_in,
)
from thunderagent.rollouts.samples import Sample, samples_of
from thunderagent.rollouts.segments import Segments, Stored
from thunderagent.rollouts.table import NOTHING, Answered, Entry, Table
from thunderagent.rollouts.tokens import (
    UNREADABLE,
    common_text,
    from_planes,
    in_planes,
    logprob_bytes,
    logprob_values,
    packed_text,
    text_of_ids,
    text_of_list,
    token_bytes,
    token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


def table(memory_bytes: int = 2**30, keep_s: float = 100.0, turns_count: int = 1000) -> Table:
    return Table(memory_bytes=memory_bytes, keep_s=keep_s, turns_count=turns_count)


def rollout(program_id: str = "a", generation: int = 1, **fields: object) -> Rollout:
    return Rollout(program_id=program_id, generation=generation, **fields)  # type: ignore[arg-type]


class Said:
    """A turn that has ended, with what its engine said."""

    size_bytes = 0

    def __init__(self, turn: Turn, answered: Answered, *, has_answers: bool, prompt_bytes: int = 0) -> None:
        self.turn = turn
        self.prompt_bytes = prompt_bytes
        self.has_answers = has_answers
        self._answered = answered

    def pack(self, _: Entry) -> None: ...

    def opened(self) -> Said:
        return self

    def answered(self, _: Entry) -> Answered:
        return self._answered


def record(to: Table, entry: Entry, turn: Turn, answered: Answered, *, has_answers: bool) -> None:
    """Have a turn taken and settled."""
    to.take(entry, Said(turn, answered, has_answers=has_answers))
    assert to.settle(entry) == []


def add(
    to: Table,
    prompt: list[int],
    *outputs: list[int],
    of: Rollout | None = None,
    has_answers: bool = True,
    **said: object,
) -> Turn:
    """Record a turn whose tokens have the log probability of minus their id, and return its record."""
    packed = [
        Output(in_planes(token_bytes(ids)), in_planes(logprob_bytes([-float(each) for each in ids])), "stop")
        for ids in outputs
    ]
    for output in packed:
        output.finish = str(said.pop("finish", "stop"))
    turn = Turn(seq=0, tries_count=1, outcome="finished", **said)  # type: ignore[arg-type]
    answered = Answered(text_of_ids(prompt))
    answered.outputs, answered.texts = packed, [text_of_ids(ids) for ids in outputs]
    entry = granted(to, of)
    record(to, entry, turn, answered, has_answers=has_answers)
    return turn


def granted(to: Table, of: Rollout | None = None) -> Entry:
    """Note that an engine gets a turn."""
    template = of or rollout()
    entry = to.live(template.program_id, template.generation) or to.begin(template)
    entry.rollout.granted_count += 1
    return entry


def samples(of: Table, program_id: str = "a") -> list[Sample]:
    entry = of.find(program_id)
    assert entry is not None
    return samples_of(turns_of(entry))


def turns_of(entry: Entry) -> list[Turn]:
    return list(turns_in(entry.blocks, entry.frames))


# --- records


@given(IDS)
def test_tokens_come_back_as_they_were(ids: list[int]) -> None:
    """Through bytes and planes."""
    assert token_ids(from_planes(in_planes(token_bytes(ids)))) == ids


@given(IDS)
def test_tokens_have_one_text_however_a_list_is_spelt(ids: list[int]) -> None:
    """With spaces or without."""
    text = text_of_ids(ids)
    assert token_ids(packed_text(text)) == ids
    for separators in ((",", ":"), (", ", ": "), (" ,\n", ":")):
        assert text_of_list(json.dumps(ids, separators=separators).encode()) == text


@given(st.lists(st.floats(-100, 0, width=32), max_size=50))
def test_log_probabilities_come_back_as_they_were(values: list[float]) -> None:
    """Every bit of the 32 that engines compute."""
    assert logprob_values(from_planes(in_planes(logprob_bytes(values)))) == values


def test_turns_come_back_from_blocks_and_frames() -> None:
    """In order."""
    made = [Turn(seq=number, outputs=[Output(b"x", b"y", "stop", [Span("7", 0, 1)])]) for number in range(5)]
    frames = [frame_of(turn) for turn in made]
    assert list(turns_in([block_of(frames[:2]), block_of(frames[2:4])], frames[4:])) == made
    with pytest.raises(ValueError, match="broken"):
        list(turns_in([b"no block"]))


def test_random_tokens_take_less_than_six_bytes() -> None:
    """With log probabilities, in turns with as many new tokens in the prompt; these need less."""
    rng = random.Random(1)
    frames = []
    for seq in range(8):
        new, ids = ([rng.randrange(150_000) for _ in range(300)] for _ in range(2))
        output = Output(in_planes(token_bytes(ids)), in_planes(logprob_bytes([-rng.expovariate(1.0) for _ in ids])))
        turn = Turn(seq=seq, prompt_new=in_planes(token_bytes(new)), outputs=[output], began_at=rng.random())
        turn.request_id, turn.path, turn.replica_id = f"{rng.getrandbits(128):032x}", "/v1/chat/completions", "10.0.0.1"
        frames.append(frame_of(turn))
    assert len(block_of(frames)) <= 6 * 8 * 600


# --- lineage


@given(IDS, IDS)
def test_common_beginning_is_the_longest(one: list[int], other: list[int]) -> None:
    """Found by halving, equal to what a loop finds."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common_text(text_of_ids(one), text_of_ids(other)) == len(text_of_ids(one[:count]))


def test_links_join_turns_to_their_parents() -> None:
    """Each says how a prompt goes on from what was before."""
    to = table()
    assert add(to, [1, 2, 3], [4, 5], has_answers=False).link == "root"
    second = add(to, [1, 2, 3, 4, 5, 6], [7, 8])
    assert (second.link, second.parent, second.shared_tokens) == ("extends", 0, 5)
    fork = add(to, [1, 2, 3, 4, 5, 9], [10])
    assert (fork.link, fork.parent, fork.shared_tokens) == ("extends", 0, 5)
    drift = add(to, [1, 2, 3, 4, 5, 6, 7, 99, 11], [12])
    assert (drift.link, drift.parent, drift.shared_tokens) == ("drift", 1, 7)
    dropped = add(to, [1, 2, 3, 4, 5, 6, 50], [51])
    assert (dropped.link, dropped.parent, dropped.shared_tokens) == ("drift", 1, 6)
    assert add(to, [1, 2, 77], [5], has_answers=True).link == "rewritten"
    assert add(to, [1, 2, 78], [5], has_answers=False).link == "root"
    assert add(to, [90], [91], has_answers=True).link == "rewritten"
    assert [sample.link for sample in samples(to)] == [
        "root",
        "extends",
        "drift",
        "drift",
        "rewritten",
        "root",
        "rewritten",
    ]


def test_same_prompt_again_is_a_fork() -> None:
    """Sampled twice from the same prompt, nothing drifts."""
    to = table()
    add(to, [1, 2], [3])
    add(to, [1, 2, 3, 4], [5])
    again = add(to, [1, 2, 3, 4], [6])
    assert (again.link, again.parent, again.shared_tokens) == ("extends", 0, 3)


def test_chains_are_bounded() -> None:
    """The one that was longest not extended is forgotten."""
    lineage = Lineage()
    for number in range(3 * MAX_CHAINS_COUNT):
        prompt = text_of_ids([1000 + number, 1])
        lineage.add(number, lineage.find(prompt, has_answers=False), prompt, [text_of_ids([2])])
    assert lineage.size_bytes == MAX_CHAINS_COUNT * len("1000,1,2,")
    assert lineage.find(text_of_ids([1000, 1, 2, 3]), has_answers=True).link == "rewritten"


# --- samples


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["on", "fork", "drift", "new", "lost"]), IDS, IDS), max_size=12
    )
)
def test_any_history_rebuilds_and_each_sampled_token_has_one_owner(
    history: list[tuple[int, str, list[int], list[int]]],
) -> None:
    """Whatever goes on from whatever: records rebuild every prompt, and samples have each output once, unmasked."""
    to, prompts, ends = table(), [], [[1]]
    for at, how, new, output in history:
        before = ends[at % len(ends)]
        prompt = {
            "on": before + new,
            "fork": before[: max(1, len(before) // 2)] + new,
            "drift": [*before[:-1], 7, *new],
            "new": [9, *new],
            "lost": before,
        }[how]
        kept = how != "lost"
        add(to, prompt, output, kept=kept)
        prompts.append((prompt, output, kept))
        ends.append(prompt + output)
    entry = to.find("a")
    if entry is None:
        return
    made = samples_of(turns_of(entry))
    known: dict[int, list[int]] = {}
    for turn, (prompt, output, _) in zip(turns_of(entry), prompts, strict=True):
        parent = known.get(turn.parent, [])
        assert parent[: turn.shared_tokens] + token_ids(from_planes(turn.prompt_new)) == prompt
        known[turn.seq] = prompt + output
    owned = [seq for sample in made for seq in sample.turns]
    assert sorted(owned) == [seq for seq, (_, _, kept) in enumerate(prompts) if kept]
    for sample in made:
        last = prompts[sample.turns[-1]]
        assert sample.ids == last[0] + last[1]
        assert sum(sample.mask) == sum(len(prompts[seq][1]) for seq in sample.turns)
        assert sample.logprobs is not None
        for token, mask, logprob in zip(sample.ids, sample.mask, sample.logprobs, strict=True):
            assert logprob == pytest.approx(-float(token) * mask)


def test_conversation_is_one_sample() -> None:
    """Its outputs bear loss, its prompts do not."""
    to = table()
    add(to, [1, 2], [3, 4], has_answers=False)
    add(to, [1, 2, 3, 4, 5], [6])
    (sample,) = samples(to)
    assert sample.ids == [1, 2, 3, 4, 5, 6]
    assert sample.mask == [0, 0, 1, 1, 0, 1]
    assert sample.logprobs == [0, 0, -3, -4, 0, -6]
    assert (sample.prompt_tokens, sample.turns) == (2, [0, 1])


def test_aborted_fragment_bears_loss_only_if_it_is_continued() -> None:
    """A trainer's abort is no end that the policy chose."""
    to = table()
    add(to, [1, 2], [3], finish="abort")
    (sample,) = samples(to)
    assert sample.mask == [0, 0, 0]
    add(to, [1, 2, 3], [4], finish="stop")
    (sample,) = samples(to)
    assert sample.mask == [0, 0, 1, 1]


def test_retried_turn_counts_once() -> None:
    """The attempt whose answer its client did not get is in no sample."""
    to = table()
    add(to, [1, 2], [3], kept=False)
    add(to, [1, 2], [8])
    (sample,) = samples(to)
    assert sample.ids == [1, 2, 8]


def test_several_choices_are_several_samples() -> None:
    """The first goes on, and the others if they are continued."""
    to = table()
    add(to, [1], [2], [3])
    second = add(to, [1, 3, 4], [5])
    assert (second.parent, second.parent_choice) == (0, 1)
    assert [sample.ids for sample in samples(to)] == [[1, 2], [1, 3, 4, 5]]


# --- what is said of a rollout


def test_verdicts_and_gaps_mask_a_rollout() -> None:
    """A hole, an infrastructure's failure and an abort; not an agent's error."""
    to = table()
    add(to, [1], [2])
    entry = to.find("a")
    assert entry is not None
    assert not entry.rollout.mask_sample
    record(to, entry, Turn(seq=0, verdict="agent_error", tries_count=1), NOTHING, has_answers=True)
    assert not entry.rollout.mask_sample
    failed = Turn(seq=0, verdict="infrastructure_failed", tries_count=1, missing="no_ids")
    record(to, entry, failed, NOTHING, has_answers=True)
    assert entry.rollout.mask_sample
    assert not entry.rollout.complete


def test_failure_is_made_up_by_the_same_turn_alone() -> None:
    """A new attempt has a prompt of the same size, though the first one broke off before its engine counted tokens."""
    to = table()
    entry, said = granted(to), []
    tries = [("infrastructure_failed", 10, 0), ("ok", 20, 8), ("ok", 10, 5), ("client_left", 30, 0)]
    for verdict, prompt_bytes, prompt_tokens in tries:
        turn = Turn(seq=0, verdict=verdict, tries_count=1, prompt_tokens=prompt_tokens)
        to.take(entry, Said(turn, NOTHING, has_answers=True, prompt_bytes=prompt_bytes))
        said.append(entry.rollout.verdict)
    assert said == ["infrastructure_failed", "infrastructure_failed", "ok", "client_left"]


def test_turn_that_was_granted_and_not_recorded_makes_it_incomplete() -> None:
    """Nothing is silently shorter."""
    to = table()
    add(to, [1], [2])
    entry = granted(to)
    to.ended("a", 1, "success", 5.0)
    assert not entry.rollout.ended
    to.lost(entry)
    assert (entry.rollout.ended, entry.rollout.complete, entry.rollout.outcome) == (True, False, "success")


def test_rollout_ends_with_the_last_turn_of_a_program_that_has_ended() -> None:
    """A client may release its program before the proxy has noted its last answer, or leave turns under way."""
    to = table()
    entry = granted(to)
    assert to.ended("a", 1, "success", 5.0) is entry
    assert not entry.rollout.ended
    entry.rollout.granted_count -= 1  # `add` counts it
    add(to, [1], [2])
    assert to.find("a") is entry
    assert (entry.rollout.ended, entry.rollout.complete, entry.rollout.turns_count) == (True, True, 1)
    assert (entry.rollout.outcome, entry.rollout.ended_at, to.live_count) == ("success", 5.0, 0)
    assert to.size_bytes == entry.measure()


def test_turn_under_way_does_not_outlive_the_next_of_its_name() -> None:
    """The earlier rollout ends then, without it; it adds nothing when it ends at last."""
    to = table()
    entry = granted(to)
    to.ended("a", 1, "", 5.0)
    add(to, [1], [2], of=rollout(generation=2))
    assert (entry.rollout.ended, entry.rollout.complete) == (True, False)
    record(to, entry, Turn(seq=0, tries_count=1), NOTHING, has_answers=True)
    assert entry.rollout.turns_count == 0


def test_tokens_that_are_none_are_unreadable() -> None:
    """The turn is recorded without them, and what comes after it is not measured by them."""
    to = table()
    turn = Turn(seq=0, tries_count=1)
    record(to, granted(to), turn, Answered(b'1,"2",'), has_answers=False)
    assert (turn.missing, turn.prompt_new) == ("unreadable", b"")
    assert add(to, [1, 5], [2]).link == "root"
    for text in (b'"x",', b"1.5,", b"99999999999,"):
        with pytest.raises(UNREADABLE):
            packed_text(text)


def test_id_that_lives_again_is_another_rollout() -> None:
    """Each incarnation has its own, and the last one is the default."""
    to = table()
    add(to, [1], [2])
    to.ended("a", 1, "", 1.0)
    add(to, [3], [4], of=rollout(generation=2))
    assert [each.rollout.generation for each in (to.find("a"), to.find("a", 1)) if each is not None] == [2, 1]
    assert to.ended("a", 1, "", 2.0) is None


# --- bounds


def test_ended_ones_are_dropped_when_memory_is_short_those_that_were_read_first() -> None:
    """The reason is remembered, and the sum stays right."""
    to = table(memory_bytes=40_000)
    for number in range(30):
        name = f"p{number}"
        add(to, list(range(500)), [1], of=rollout(name))
        ended = to.ended(name, 1, "", 1.0)
        assert ended is not None
        if number == 5:
            to.was_read(ended)
        if number == 6:
            assert to.find("p5") is not None or to.why_dropped("p5")
    assert to.size_bytes <= 40_000
    assert to.find("p29") is not None
    assert to.find("p0") is None
    assert to.why_dropped("p0") == "memory was short"
    kept = [each for each in (to.find(f"p{number}") for number in range(30)) if each is not None]
    assert to.size_bytes == sum(each.size_bytes for each in kept)


def test_live_program_without_room_is_recorded_without_tokens() -> None:
    """It is incomplete, not shorter."""
    to = table(memory_bytes=30_000)
    for _ in range(30):
        last = add(to, list(range(1000)), [1])
    assert last.missing == "too_large"
    assert to.size_bytes < 60_000
    entry = to.find("a")
    assert entry is not None
    assert (entry.rollout.turns_count, entry.rollout.complete) == (30, False)


def test_tenant_pushes_no_other_out() -> None:
    """One that has no more than its share keeps its ended rollouts, and has room for the tokens of its turns."""
    to = table(memory_bytes=100_000)
    for number in range(3):
        add(to, list(range(500)), [1], of=rollout(f"small{number}", tenant="small"))
        to.ended(f"small{number}", 1, "", 1.0)
    first = to.find("small0")
    assert first is not None
    to.was_read(first)
    for number in range(60):
        add(to, list(range(500)), [1], of=rollout(f"large{number}", tenant="large"))
        to.ended(f"large{number}", 1, "", 2.0)
    assert to.why_dropped("large0") == "memory was short"
    assert to.find("large59") is not None
    assert all(to.find(f"small{number}") is not None for number in range(3))
    assert to.size_bytes <= 100_000


def test_live_programs_of_one_tenant_leave_room_to_another() -> None:
    """Even if nothing of theirs can be dropped; once they are gone nothing counts any more."""
    to = table(memory_bytes=200_000)
    small = rollout("small", tenant="small")
    assert add(to, [1], [2], of=small).missing == ""
    for _ in range(100):
        last = add(to, list(range(1000)), [1], of=rollout("large", tenant="large"))
    assert last.missing == "too_large"
    for _ in range(3):
        assert add(to, list(range(500)), [2], of=small).missing == ""
    assert add(to, [1], [2], of=rollout("large", tenant="large")).missing == "too_large"
    for name in ("small", "large"):
        ended = to.ended(name, 1, "", 1.0)
        assert ended is not None
        to.drop(ended.rollout.seq, "it was deleted")
    assert to.size_bytes == 0
    assert not to._shares


def test_rollouts_expire() -> None:
    """When the next program ends."""
    to = table(keep_s=10)
    for name, ended_at in (("a", 0.0), ("b", 11.0)):
        add(to, [1], [2], of=rollout(name))
        to.ended(name, 1, "", ended_at)
    assert (to.find("a"), to.why_dropped("a")) == (None, "it ended too long ago")
    assert to.find("b") is not None


def test_group_and_tenant_select() -> None:
    """In the order of ending, after a number."""
    to = table()
    for name, group, tenant in (("a", "g", "x"), ("b", "g", "y"), ("c", "h", "x"), ("d", "g", "x")):
        add(to, [1], [2], of=rollout(name, group_id=group, tenant=tenant))
        to.ended(name, 1, "", 1.0)
    found = [each.rollout.program_id for each in to.ended_after(0, group_id="g", tenant="x")]
    assert found == ["a", "d"]
    assert [each.rollout.seq for each in to.ended_after(2, group_id=None, tenant=None)] == [3, 4]


def test_packed_records_replace_frames() -> None:
    """What came meanwhile stays after them."""
    to = table()
    add(to, [1], [2])
    entry = to.find("a")
    assert entry is not None
    assert to.to_pack(entry, writes=False) == []
    assert to.to_pack(entry, writes=True) == entry.frames
    add(to, [1, 2, 3], [4])
    to.packed(entry, 1, block_of(entry.frames[:1]))
    assert [turn.seq for turn in turns_of(entry)] == [0, 1]
    assert to.size_bytes == entry.measure()


# --- disk


def test_rollouts_are_found_again_on_disk(tmp_path: Path) -> None:
    """By another process, up to one that was cut off."""
    folder = tmp_path / "rollouts"
    segments = Segments(folder, 10**9)
    blocks = [block_of([frame_of(Turn(seq=0))]), block_of([frame_of(Turn(seq=1))])]
    stored, deleted = segments.append(rollout(seq=1), blocks)
    segments.append(rollout("b", seq=2), blocks)
    segments.close()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    again = Segments(folder, 10**9)
    assert [(each.program_id, where) for each, where in again.found()] == [("a", stored)]
    assert list(turns_in(again.read(stored))) == [Turn(seq=0), Turn(seq=1)]
    assert deleted == []
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let writes beyond this size fail, after those bytes that fit, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room_bytes", [3, 100])
def test_rollout_that_does_not_fit_on_the_disk_spoils_no_other(tmp_path: Path, room_bytes: int) -> None:
    """Part of it was written, or not even the begin of a file."""
    folder = tmp_path / "rollouts"
    segments, blocks = Segments(folder, 10**9), [os.urandom(1000)]
    if room_bytes > 3:
        segments.append(rollout(seq=1), [])
        room_bytes += segments.size_bytes
    for _ in range(2):
        with files_of_at_most(room_bytes), pytest.raises(OSError, match="too large"):
            segments.append(rollout("b", seq=2), blocks)
    stored, _ = segments.append(rollout("c", seq=3), blocks)
    assert segments.read(stored) == blocks
    segments.close()
    (path,) = folder.iterdir()
    assert path.stat().st_size == segments.size_bytes
    found = list(Segments(folder, 10**9).found())
    assert found[-1] == (found[-1][0], stored)
    assert [each.program_id for each, _ in found] == (["a", "c"] if room_bytes > 3 else ["c"])


def test_oldest_file_is_deleted_when_disk_is_short(tmp_path: Path) -> None:
    """Its rollouts are dropped with that reason."""
    segments, to = Segments(tmp_path / "r", 4000, segment_bytes=1000), table()
    for number in range(60):
        name = f"p{number}"
        add(to, [1], [2], of=rollout(name))
        entry = to.ended(name, 1, "", 1.0)
        assert entry is not None
        stored, deleted = segments.append(entry.rollout, [block_of(entry.frames)])
        to.stored(entry, stored)
        for segment in deleted:
            to.drop_segment(segment)
    assert segments.size_bytes <= 5000
    assert to.why_dropped("p0") == "the disk was full"
    last = to.find("p59")
    assert last is not None
    assert last.stored is not None
    assert len(list(turns_in(segments.read(last.stored)))) == 1
    segments.close()


def test_tenant_with_no_more_than_its_share_of_the_disk_loses_nothing(tmp_path: Path) -> None:
    """Neither to one that writes much, nor to many others, nor after a restart; and the disk is bounded."""
    folder, max_bytes, block = tmp_path / "r", 100_000, [os.urandom(1000)]
    segments, deleted, seq = Segments(folder, max_bytes), set[int](), 0

    def write(tenant: str) -> Stored:
        nonlocal seq
        seq += 1
        stored, gone = segments.append(rollout(f"p{seq}", seq=seq, tenant=tenant), block)
        deleted.update(gone)
        assert segments.size_bytes <= max_bytes + 1200
        assert segments.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
        return stored

    kept = [write("small") for _ in range(10)]
    for _ in range(300):
        write("large")
    assert deleted
    segments.close()
    segments = Segments(folder, max_bytes)
    assert segments.size_bytes > max_bytes // 2
    for number in range(300):
        write(f"other-{number % 5}" if number % 2 else "large")
    assert not {each.segment for each in kept} & deleted
    assert all(segments.read(each) == block for each in kept)
    tenants: dict[int, set[str]] = {}
    for found, stored in segments.found():
        tenants.setdefault(stored.segment, set()).add(found.tenant)
    assert {len(each) for each in tenants.values()} == {1}
    assert set.union(*tenants.values()) == {"small", "large", *(f"other-{number}" for number in (1, 3, 0, 2, 4))}
    segments.close()


def test_client_that_makes_up_tenants_gets_no_file_for_each(tmp_path: Path) -> None:
    """Beyond some they share files and count as one, also after a restart: who was there before loses nothing."""
    folder, max_bytes, block = tmp_path / "r", 1_000_000, [os.urandom(1000)]
    segments, deleted, seq = Segments(folder, max_bytes), set[int](), 0

    def write(tenant: str) -> Stored:
        nonlocal seq
        seq += 1
        stored, gone = segments.append(rollout(f"p{seq}", seq=seq, tenant=tenant), block)
        deleted.update(gone)
        return stored

    kept = [write("honest") for _ in range(5)]
    for number in range(1500):
        write(f"made-up-{number}")
        if number == 500:
            segments.close()
            segments = Segments(folder, max_bytes)
    assert deleted
    assert segments.size_bytes <= max_bytes
    assert not {each.segment for each in kept} & deleted
    tenants: dict[int, set[str]] = {}
    for found, stored in segments.found():
        tenants.setdefault(stored.segment, set()).add(found.tenant)
    assert len(tenants) <= len(list(folder.iterdir())) < 200
    own = [next(iter(names)) for names in tenants.values() if len(names) == 1]
    assert len(set(own)) <= OWN_SHARES_COUNT + 1
    assert "honest" in own
    segments.close()


def test_client_that_makes_up_tenants_has_one_share_of_the_memory() -> None:
    """Who was there before keeps what is within a share, and nothing is counted once all is gone."""
    to = table(memory_bytes=2_000_000)
    for number in range(3):
        add(to, list(range(500)), [1], of=rollout(f"honest{number}", tenant="honest"))
        to.ended(f"honest{number}", 1, "", 1.0)
    for number in range(1500):
        add(to, list(range(500)), [1], of=rollout(f"p{number}", tenant=f"made-up-{number}"))
        to.ended(f"p{number}", 1, "", 2.0)
    assert to.size_bytes <= 2_000_000
    assert to.dropped_count > 0
    assert all(to.find(f"honest{number}") is not None for number in range(3))
    for entry in list(to.ended_after(0, group_id=None, tenant=None)):
        to.drop(entry.rollout.seq, "it was deleted")
    assert to.size_bytes == 0


def test_day_of_turns_fits_on_one_disk_in_bounded_memory(tmp_path: Path) -> None:
    """DAY_TURNS of them, a million in the nightly run, in programs of 20 turns, side by side, kept for an hour."""
    turns_count = int(os.environ.get("DAY_TURNS", "8000"))
    memory_bytes, disk_bytes, at_a_time = 4 * 2**20, 64 * 2**20, 40
    to = Table(memory_bytes=memory_bytes, keep_s=3600.0, turns_count=1000)
    segments, draw = Segments(tmp_path / "r", disk_bytes, segment_bytes=4 * 2**20), random.Random(0)
    most_bytes = tokens_count = written_bytes = 0
    for first in range(0, turns_count // 20, at_a_time):
        prompts = [[draw.randrange(150_000) for _ in range(60)] for _ in range(at_a_time)]
        for _ in range(20):
            for number, prompt in enumerate(prompts):
                output = [draw.randrange(150_000) for _ in range(40)]
                add(to, prompt, output, of=rollout(f"p{first + number}"))
                prompts[number] = prompt + output + [draw.randrange(150_000) for _ in range(20)]
        most_bytes = max(most_bytes, to.size_bytes)
        for number in range(at_a_time):
            entry = to.ended(f"p{first + number}", 1, "", 86400.0 * 20 * (first + number) / turns_count)
            assert entry is not None
            assert entry.rollout.complete
            stored, deleted = segments.append(entry.rollout, [block_of(entry.frames)])
            written_bytes += stored.size_bytes
            tokens_count += entry.rollout.output_tokens
            to.stored(entry, stored)
            for segment in deleted:
                to.drop_segment(segment)
        segments.delete_except(to.segments)
        assert segments.size_bytes <= disk_bytes
        assert to.size_bytes <= memory_bytes
    assert most_bytes <= memory_bytes
    assert to.ended_count >= turns_count // 20 // 25, "those of the last hour are there"
    last = to.find(f"p{turns_count // 20 - 1}")
    assert last is not None
    assert last.stored is not None
    assert [len(each.outputs[0].tokens) for each in turns_in(segments.read(last.stored))] == [160] * 20
    segments.close()
    print(f"{written_bytes / turns_count:,.0f} bytes a turn, at most {most_bytes:,} in memory")


def test_files_without_anything_kept_are_deleted(tmp_path: Path) -> None:
    """What expired, or was deleted, does not lie there until the disk is full."""
    segments = Segments(tmp_path / "r", 10**9, segment_bytes=1000)
    block = [block_of([frame_of(Turn(seq=0))])]
    numbers = [segments.append(rollout(seq=number), block)[0].segment for number in range(60)]
    segments.delete_except({numbers[0], numbers[-1]})
    assert len(list((tmp_path / "r").iterdir())) == 2
    segments.append(rollout(seq=61), block)
    segments.delete_except(set())
    assert len(list((tmp_path / "r").iterdir())) >= 2
    segments.close()


def test_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """Token ids are prompts."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        Segments(folder, 1000)
