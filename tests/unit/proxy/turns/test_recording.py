"""A turn is kept at its end and settled later: what is read then is what its engine said, and what waits is bounded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.capture import CHAT, Asked, Capture
from thunderagent.proxy.turns.recording import TAKEN_BYTES, Taken
from thunderagent.proxy.watch import rollouts as watch
from thunderagent.proxy.watch.rollouts import Rollouts, RolloutSettings
from thunderagent.rollouts.records import Rollout, Turn, turns_in
from thunderagent.rollouts.table import Entry, Table
from thunderagent.rollouts.tokens import from_planes, token_ids

OURS = Asked(b"", ids_added=True, logprobs_added=True)
IDS = st.lists(st.integers(0, 300), max_size=12)


class Nobody:
    """Reports no ends of programs."""

    def observe(self, observer: Any, *about: type) -> Any:
        """Do nothing."""
        return lambda: None


def answer(prompt: list[int], output: list[int]) -> bytes:
    """Return an answer as vLLM spells it."""
    logprobs = {"content": [{"token": "w", "logprob": -float(each), "bytes": [119]} for each in output]}
    choice = {"index": 0, "message": {"content": "w"}, "logprobs": logprobs, "finish_reason": "stop"}
    said = {"choices": [{**choice, "stop_reason": None, "token_ids": output}], "prompt_token_ids": prompt}
    return json.dumps(said, separators=(",", ":")).encode()


def taken(entry: Entry, prompt: list[int], output: list[int], *, streams: bool = False) -> Taken:
    """Return a turn that has ended so."""
    capture = Capture("vllm", CHAT, OURS, streams=streams)
    if streams:
        capture.feed(b"data: %b\n\n" % answer(prompt, output).replace(b'"message"', b'"delta"'))
        capture.rest()
    else:
        capture.take_whole(answer(prompt, output))
    turn = Turn(seq=0, tries_count=1, outcome="finished")
    return Taken(entry, turn, capture.kept, has_answers=True, logprobs=True)


def begun(table: Table, program_id: str = "a") -> Entry:
    """Return the rollout of a program whose turn an engine got."""
    entry = table.live(program_id, 1) or table.begin(Rollout(program_id=program_id, generation=1))
    entry.rollout.granted_count += 1
    return entry


def new_table(memory_bytes: int = 2**30) -> Table:
    """Return a table."""
    return Table(memory_bytes=memory_bytes, keep_s=100, turns_count=1000)


def read(entry: Entry) -> list[Turn]:
    """Return the turns of a rollout."""
    return list(turns_in(entry.blocks, entry.frames))


@given(st.lists(st.tuples(st.integers(0, 30), IDS, IDS), max_size=8), st.integers(1, 4))
def test_what_is_settled_later_is_what_was_said(turns: list[tuple[int, list[int], list[int]]], every: int) -> None:
    """However prompts go on from each other, and whenever they are settled."""
    now, later, history = new_table(), new_table(), list[int]()
    for number, (kept, new, output) in enumerate(turns):
        prompt = history[:kept] + new
        for table in (now, later):
            entry = begun(table)
            one = taken(entry, prompt, output)
            table.take(entry, one, one.size_bytes)
            if table is now or number % every == 0:
                assert table.settle(entry) == []
        history = prompt + output
    for table in (now, later):
        for entry in list(table.unsettled.values()):
            table.settle(entry)
        assert table.taken_bytes == 0
        assert table.size_bytes == sum(table.live("a", 1).measure() for _ in turns[:1])  # type: ignore[union-attr]
    if turns:
        entries = [begun(table) for table in (now, later)]
        assert read(entries[0]) == read(entries[1])
        assert [token_ids(each.outputs[0].tokens) for each in read(entries[1])] == [output for *_, output in turns]
        assert entries[0].rollout == entries[1].rollout


@pytest.mark.parametrize("streams", [False, True])
def test_of_prompts_that_go_on_only_what_is_new_waits(streams: bool) -> None:
    """Else a conversation of n turns would wait with n² tokens."""
    table = new_table()
    entry, prompt = begun(table), list(range(10_000))
    sizes = []
    for _ in range(5):
        prompt = [*prompt, 7]
        one = taken(entry, prompt, [7], streams=streams)
        sizes.append(one.size_bytes)
        table.take(entry, one, one.size_bytes)
    assert sizes[0] > 40_000
    assert max(sizes[1:]) < TAKEN_BYTES + 200
    table.settle(entry)
    assert [each.prompt_tokens for each in read(entry)] == [10_001, 10_002, 10_003, 10_004, 10_005]
    assert token_ids(from_planes(read(entry)[0].prompt_new)) == [*range(10_000), 7]


def test_program_that_ends_before_its_turns_are_settled_keeps_them() -> None:
    """Its rollout is ended at once, and what it says is right once it is settled."""
    table = new_table()
    for prompt in ([1, 2], [1, 2, 5, 3]):
        entry = begun(table)
        one = taken(entry, prompt, [5])
        table.take(entry, one, one.size_bytes)
    assert table.ended("a", 1, "success", 5.0) is entry
    assert (entry.rollout.ended, entry.rollout.complete, entry.rollout.turns_count) == (True, True, 0)
    table.settle(entry)
    assert (entry.rollout.turns_count, entry.rollout.complete, entry.lineage) == (2, True, None)
    assert [each.link for each in read(entry)] == ["root", "extends"]
    assert table.size_bytes == entry.measure()


def test_dropped_rollout_gives_back_what_waited() -> None:
    """Also if it was never settled."""
    table = new_table()
    entry = begun(table)
    one = taken(entry, [1, 2], [5])
    table.take(entry, one, one.size_bytes)
    table.ended("a", 1, "", 5.0)
    table.drop(entry.rollout.seq, "it was deleted")
    assert (table.taken_bytes, table.size_bytes, table.unsettled) == (0, 0, {})
    assert table.settle(entry) == []
    assert entry.rollout.mask_sample, "who reads it just then gets no turn"


def test_turn_that_cannot_be_settled_loses_no_other() -> None:
    """It makes the rollout incomplete, and is told."""

    class Broken:
        turn = Turn(seq=0)
        has_answers = True

        def answered(self, entry: Entry) -> None:
            raise RuntimeError(entry.rollout.program_id)

    table = new_table()
    entry = begun(table)
    for one in (taken(entry, [1], [2]), Broken(), taken(entry, [1, 2, 3], [4])):
        table.take(entry, one, 100)
    (error,) = table.settle(entry)
    assert isinstance(error, RuntimeError)
    assert (entry.rollout.turns_count, entry.rollout.complete) == (2, False)
    assert [each.link for each in read(entry)] == ["root", "extends"]


def test_attempt_that_its_client_never_got_needs_no_tokens() -> None:
    """The turn was sent again: what bears loss is there."""
    table = new_table()
    entry = begun(table)
    lost = Turn(seq=0, tries_count=1, kept=False, outcome="errored", missing="no_ids")
    table.take(entry, Taken(entry, lost, None, has_answers=True, logprobs=True), 100)
    entry = begun(table)
    table.take(entry, taken(entry, [1], [2]), 100)
    table.settle(entry)
    assert (entry.rollout.turns_count, entry.rollout.complete, entry.rollout.mask_sample) == (2, True, False)


async def test_what_waits_is_bounded_and_settled_when_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest are settled at once, however busy the loop is; then the rest, with nobody asking."""
    monkeypatch.setattr(watch, "BUSY_RATIO", -1.0)  # always
    settings = RolloutSettings(
        logprobs=True, folder=None, memory_bytes=2**20, disk_bytes=2**20, keep_s=100, turns_count=1000
    )
    recorded = Rollouts(settings, Nobody())
    table = recorded.table
    for number in range(300):
        entry = begun(table, f"p{number}")
        one = taken(entry, list(range(500)), [5])
        if table.take(entry, one, one.size_bytes):
            recorded.attend(entry)
        assert table.taken_bytes <= table.most_taken_bytes == 2**18
    assert 10 < len(table.unsettled) < 200
    monkeypatch.setattr(watch, "BUSY_LOOKS_COUNT", 2)
    async with asyncio.timeout(30):
        while table.unsettled:
            await asyncio.sleep(0.01)
    found = table.find("p0")
    assert found is not None
    assert found.rollout.turns_count == 1
    recorded.close()


async def test_no_file_lacks_the_turns_that_wait(tmp_path: Path) -> None:
    """A rollout whose packing was asked for before its last turn came is written once that is settled."""
    settings = RolloutSettings(
        logprobs=True, folder=tmp_path / "rollouts", memory_bytes=2**20, disk_bytes=2**20, keep_s=100, turns_count=1000
    )
    recorded = Rollouts(settings, Nobody())
    entry = begun(recorded.table)
    recorded.table.take(entry, taken(entry, [1, 2], [5]), 100)
    recorded.settle(entry)
    recorded._works = True  # the thread has something else to do
    recorded._pack(entry)
    entry = begun(recorded.table)
    recorded.table.take(entry, taken(entry, [1, 2, 5, 3], [6]), 100)
    recorded.table.ended("a", 1, "success", 5.0)
    recorded._was_done([])
    await asyncio.wrap_future(recorded._thread.submit(int))  # it has done what it got
    await asyncio.sleep(0)
    recorded.close()
    again = Rollouts(settings, Nobody())
    found = again.table.find("a")
    assert found is not None
    assert [each.link for each in await again.turns(found)] == ["root", "extends"]
    again.close()
