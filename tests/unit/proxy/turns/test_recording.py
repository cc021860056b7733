"""A turn is kept at its end and settled later: what is read then is what its engine said, and what waits is bounded."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent.proxy.reading.capture import CHAT, Asked, Capture
from thunderagent.proxy.reading.taken import TAKEN_BYTES, Settler, Taken
from thunderagent.proxy.watch import rollouts as watch
from thunderagent.proxy.watch import settling
from thunderagent.proxy.watch.rollouts import MAX_DEATHS_COUNT, SEND_COUNT, Rollouts, RolloutSettings
from thunderagent.proxy.watch.settling import SettlingProcess
from thunderagent.rollouts.records import (
    Rollout,
    Turn,
    decode_batch,
    decode_settled,
    encode_batch_into,
    encode_settled,
    turns_in,
)
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


def taken(prompt: list[int], output: list[int], *, streams: bool = False) -> Taken:
    """Return a turn that has ended so."""
    capture = Capture("vllm", CHAT, OURS, streams=streams)
    if streams:
        capture.feed(b"data: %b\n\n" % answer(prompt, output).replace(b'"message"', b'"delta"'))
        capture.rest()
    else:
        capture.take_whole(answer(prompt, output))
    turn = Turn(seq=0, tries_count=1, outcome="finished")
    return Taken(turn, capture.kept, has_answers=True, logprobs=True)


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
def test_turn_settled_later_is_recorded_as_said(turns: list[tuple[int, list[int], list[int]]], every: int) -> None:
    """However prompts go on from each other, and whenever they are settled."""
    now, later, history = new_table(), new_table(), list[int]()
    for number, (kept, new, output) in enumerate(turns):
        prompt = history[:kept] + new
        for table in (now, later):
            entry = begun(table)
            one = taken(prompt, output)
            table.take(entry, one)
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
def test_new_part_alone_of_a_growing_prompt_waits(streams: bool) -> None:
    """Else a conversation of n turns would wait with n² tokens."""
    table = new_table()
    entry, prompt = begun(table), list(range(10_000))
    sizes = []
    for _ in range(5):
        prompt = [*prompt, 7]
        one = taken(prompt, [7], streams=streams)
        table.take(entry, one)
        sizes.append(one.size_bytes)
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
        one = taken(prompt, [5])
        table.take(entry, one)
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
    one = taken([1, 2], [5])
    table.take(entry, one)
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
        size_bytes, prompt_bytes = 100, 0

        def pack(self, entry: Entry) -> None:
            pass

        def opened(self) -> Broken:
            return self

        def answered(self, entry: Entry) -> None:
            raise RuntimeError(entry.rollout.program_id)

    table = new_table()
    entry = begun(table)
    for one in (taken([1], [2]), Broken(), taken([1, 2, 3], [4])):
        table.take(entry, one)
    (error,) = table.settle(entry)
    assert error == "RuntimeError('a')"
    assert (entry.rollout.turns_count, entry.rollout.complete) == (2, False)
    assert [each.link for each in read(entry)] == ["root", "extends"]


def test_turn_that_cannot_be_packed_spoils_no_later_one() -> None:
    """What goes on from its prompt has all of its own."""
    table = new_table()
    entry = begun(table)
    lost = taken([1, 2], [5])
    assert lost.turn is not None
    lost.turn.model = "\ud800"
    with pytest.raises(UnicodeEncodeError):
        table.take(entry, lost)
    table.lost(entry)
    table.take(begun(table), taken([1, 2, 5, 3], [6]))
    assert table.settle(entry) == []
    (turn,) = read(entry)
    assert (turn.prompt_tokens, turn.missing, entry.rollout.complete) == (4, "", False)


def test_attempt_that_its_client_never_got_needs_no_tokens() -> None:
    """The turn was sent again: what bears loss is there."""
    table = new_table()
    entry = begun(table)
    lost = Turn(seq=0, tries_count=1, kept=False, outcome="errored", missing="no_ids")
    table.take(entry, Taken(lost, None, has_answers=True, logprobs=True))
    entry = begun(table)
    table.take(entry, taken([1], [2]))
    table.settle(entry)
    assert (entry.rollout.turns_count, entry.rollout.complete, entry.rollout.mask_sample) == (2, True, False)


def sent(table: Table, settler: Settler, entry: Entry, process: int = 1) -> list[str]:
    """Have the turns of a rollout settled by another process, through the bytes that are sent; return what failed."""
    entry.number = 7
    encode_batch_into(table.send(entry, process), sent := bytearray())
    batch = decode_batch(bytes(sent))
    return table.settled(entry, decode_settled(encode_settled(settler.settle(batch))))


@given(st.lists(st.tuples(st.integers(0, 30), IDS, IDS), max_size=10), st.data())
def test_another_process_settles_the_same(turns: list[tuple[int, list[int], list[int]]], data: st.DataObject) -> None:
    """Also if it dies between, or a part is settled here: the next one goes on where it was."""
    here, there, history = new_table(), new_table(), list[int]()
    settler, process = Settler(), 1
    for kept, new, output in turns:
        prompt = history[:kept] + new
        for table in (here, there):
            table.take(begun(table), taken(prompt, output))
        history = prompt + output
        entry = there.live("a", 1)
        assert entry is not None
        fate = data.draw(st.sampled_from(["waits", "here", "there", "dies", "dies with it"]))
        if fate == "dies":
            settler, process = Settler(), process + 1
        if fate == "here":
            assert there.settle(entry) == []
        elif fate == "dies with it":
            there.send(entry, process)
            there.died(entry)
            settler, process = Settler(), process + 1
        elif fate == "there" and entry.taken:
            assert sent(there, settler, entry, process) == []
    entries = [begun(table) for table in (here, there)]
    here.settle(entries[0])
    if entries[1].taken:
        assert sent(there, settler, entries[1], process) == []
    assert read(entries[0]) == read(entries[1])
    assert entries[0].rollout == entries[1].rollout
    assert there.size_bytes == entries[1].measure() == here.size_bytes
    assert there.unsettled == {}


def test_rollout_that_goes_while_it_is_settled_elsewhere_gives_back_what_waited() -> None:
    """The answer for it is no longer wanted, and the process is told to forget it."""
    table, settler = new_table(), Settler()
    entry = begun(table)
    table.take(entry, taken([1, 2], [5]))
    entry.number = 7
    batch = table.send(entry, 1)
    table.ended("a", 1, "", 5.0)
    assert table.gone == [entry]
    table.drop(entry.rollout.seq, "it was deleted")
    assert (table.taken_bytes, table.size_bytes, table.unsettled, entry.sent) == (0, 0, {}, [])
    assert settler.settle(batch).lineage_bytes
    assert entry.rollout.mask_sample


def rollouts(folder: Path | None = None) -> Rollouts:
    """Return the rollouts of a proxy."""
    return Rollouts(
        RolloutSettings(
            logprobs=True, folder=folder, memory_bytes=2**20, disk_bytes=2**20, keep_s=100, turns_count=1000
        ),
        Nobody(),
    )


async def closed(recorded: Rollouts) -> None:
    """Close, and let the loop close the connection."""
    recorded.close()
    await asyncio.sleep(0.01)


async def until_settled(recorded: Rollouts) -> None:
    """Wait until no turn waits."""
    async with asyncio.timeout(60):
        while recorded.table.unsettled:
            await asyncio.sleep(0.01)


async def test_turns_are_settled_with_nobody_asking_also_if_the_process_is_killed() -> None:
    """What it had not settled, and the chains that it knew, go to the next one."""
    recorded, prompt, pids = rollouts(), [1, 2], set()
    for _ in range(3):
        entry = begun(recorded.table)
        if recorded.table.take(entry, taken(prompt, [5])):
            recorded.attend(entry)
        prompt = [*prompt, 5, 3]
        await until_settled(recorded)
        process = recorded._settling._process
        assert process is not None
        pids.add(process.pid)
        process.kill()
        async with asyncio.timeout(30):
            while recorded._settling.is_up:
                await asyncio.sleep(0.01)
    assert len(pids) == 3
    assert [each.link for each in await recorded.turns(entry)] == ["root", "extends", "extends"]
    assert (entry.rollout.complete, entry.rollout.turns_count) == (True, 3)
    await closed(recorded)


async def test_many_programs_are_settled_though_only_some_are_sent_at_once() -> None:
    """Each has its records, also one that ended meanwhile, and the process forgets them all."""
    recorded, count = rollouts(), 3 * SEND_COUNT + 1
    entries = []
    for number in range(count):
        entries.append(entry := begun(recorded.table, f"p{number}"))
        if recorded.table.take(entry, taken([1, 2], [5])):
            recorded.attend(entry)
    recorded.table.ended("p1", 1, "", 5.0)
    await until_settled(recorded)
    assert [entry.rollout.turns_count for entry in entries] == [1] * count
    assert recorded.table.links == {"root": count}
    await closed(recorded)


async def test_turns_are_sent_at_once_if_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those after them would have no tokens."""
    monkeypatch.setattr(watch, "SEND_S", 1000.0)
    recorded = rollouts()
    entry = begun(recorded.table)
    while not recorded.table.is_filling:
        if recorded.table.take(entry, taken([1, 2], [5])):
            recorded.attend(entry)
    assert not recorded.table.is_behind
    await until_settled(recorded)
    assert entry.rollout.turns_count == entry.taken_count
    await closed(recorded)


async def test_a_process_that_stands_still_is_ended_and_another_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped, or hangs: nothing is lost, and who reads meanwhile is answered."""
    recorded = rollouts()
    entry = begun(recorded.table)
    recorded.table.take(entry, taken([1, 2], [5]))
    recorded.attend(entry)
    await until_settled(recorded)
    process = recorded._settling._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(settling, "SILENCE_S", 0.3)
    recorded.table.take(entry, taken([1, 2, 5, 3], [6]))
    recorded.attend(entry)
    async with asyncio.timeout(30):
        while recorded._settling.is_up or not entry.taken:
            await asyncio.sleep(0.01)
    assert [each.link for each in await recorded.turns(entry)] == ["root", "extends"]
    assert entry.rollout.complete
    await closed(recorded)


async def test_process_that_is_killed_before_it_is_ready_died_of_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: it had not been sent any."""
    monkeypatch.setattr(settling, "RESTART_S", 0.01)
    recorded, pids = rollouts(), set[int]()
    entry = begun(recorded.table)
    recorded.table.take(entry, taken([1, 2], [5]))
    recorded.attend(entry)
    async with asyncio.timeout(60):
        while len(pids) <= MAX_DEATHS_COUNT:
            process = recorded._settling._process
            if process is not None and process.pid not in pids:
                assert not recorded._settling.is_up
                pids.add(process.pid)
                process.kill()
            await asyncio.sleep(0.01)
    await until_settled(recorded)
    assert (entry.rollout.complete, entry.rollout.turns_count) == (True, 1)
    await closed(recorded)


async def test_process_begins_once_there_are_files_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that is short of files does not go without it for ever."""
    monkeypatch.setattr(settling, "RESTART_S", 0.01)
    short = OSError(errno.EMFILE, "Too many open files")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", Mock(side_effect=short))
        recorded = rollouts()
        entry = begun(recorded.table)
        recorded.table.take(entry, taken([1, 2], [5]))
        recorded._settling.start()
        async with asyncio.timeout(30):
            while not recorded._settling._begins_at_s:
                await asyncio.sleep(0.01)
    recorded.attend(entry)
    await until_settled(recorded)
    assert recorded._settling.is_up
    assert entry.rollout.turns_count == 1
    await closed(recorded)


@pytest.mark.parametrize("ends", [True, False])
async def test_rollout_that_did_not_fit_on_the_disk_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """With the next one that fits, or when the proxy ends."""
    folder = tmp_path / "rollouts"
    recorded = rollouts(folder)
    segments = recorded._segments
    assert segments is not None

    async def ended(program_id: str) -> Entry:
        entry = begun(recorded.table, program_id)
        recorded.table.take(entry, taken([1, 2], [5]))
        assert recorded.table.ended(program_id, 1, "", recorded.clock()) is entry
        recorded.attend(entry)
        await until_settled(recorded)
        async with asyncio.timeout(30):
            while entry.stored is None and id(entry) not in recorded._unstored:
                await asyncio.sleep(0.01)
        return entry

    with monkeypatch.context() as patched:
        patched.setattr(segments, "append", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        first = await ended("a")
    assert [each.link for each in await recorded.turns(first)] == ["root"]
    if not ends:
        await ended("b")
        async with asyncio.timeout(30):
            while first.stored is None:
                await asyncio.sleep(0.01)
    await closed(recorded)
    again = rollouts(folder)
    found = again.table.find("a")
    assert found is not None
    assert [each.link for each in await again.turns(found)] == ["root"]
    await closed(again)


async def test_processes_that_die_of_the_same_turns_do_not_go_on_for_ever() -> None:
    """These have no records, and the rollout says so."""
    recorded = rollouts()
    for program_id in "ab":
        entry = begun(recorded.table, program_id)
        entry.number = ord(program_id)
        recorded.table.take(entry, taken([1, 2], [5]))
    for process in range(1, MAX_DEATHS_COUNT + 1):
        for entry in list(recorded.table.unsettled.values()):
            recorded._sent[entry.number] = entry
            recorded.table.send(entry, process)
        recorded._settling_ended()
    first, second = recorded.table.live("a", 1), recorded.table.live("b", 1)
    assert first is not None
    assert second is not None
    assert (first.rollout.complete, first.taken, len(second.taken)) == (False, [], 1)
    await recorded.settled(second)
    assert second.rollout.complete
    await closed(recorded)


async def test_what_waits_is_bounded() -> None:
    """Beyond the bound `Recording` keeps no tokens, and says so; here, that the table tells it, until there is room."""
    recorded = rollouts()
    table, number = recorded.table, 0
    while not table.is_behind:
        entry, number = begun(table, f"p{number}"), number + 1
        if table.take(entry, taken(list(range(500)), [5])):
            recorded.attend(entry)
    assert 2**18 <= table.taken_bytes < 2**18 + 10_000
    await until_settled(recorded)
    assert not table.is_behind
    found = table.find("p0")
    assert found is not None
    assert (found.rollout.turns_count, found.rollout.complete) == (1, True)
    await closed(recorded)


async def test_no_file_lacks_the_turns_that_wait(tmp_path: Path) -> None:
    """A rollout whose packing was asked for before its last turn came is written once that is settled."""
    recorded = rollouts(tmp_path / "rollouts")
    entry = begun(recorded.table)
    recorded.table.take(entry, taken([1, 2], [5]))
    recorded.settle(entry)
    recorded._works = True  # the thread has something else to do
    recorded._pack(entry)
    entry = begun(recorded.table)
    recorded.table.take(entry, taken([1, 2, 5, 3], [6]))
    recorded.table.ended("a", 1, "success", 5.0)
    recorded._was_done([])
    await asyncio.wrap_future(recorded._thread.submit(int))  # it has done what it got
    await asyncio.sleep(0)
    await closed(recorded)
    again = rollouts(tmp_path / "rollouts")
    found = again.table.find("a")
    assert found is not None
    assert [each.link for each in await again.turns(found)] == ["root", "extends"]
    await closed(again)


async def test_process_that_is_closed_while_it_starts_leaves_no_socket() -> None:
    """Whatever its start had done."""
    before = open_sockets()
    for steps_count in range(4):
        process = SettlingProcess(lambda _: None, lambda: None)
        process.start()
        for _ in range(steps_count):
            await asyncio.sleep(0)
        process.close()
    await asyncio.sleep(0.05)
    assert open_sockets() == before


def open_sockets() -> list[str]:
    """Return the sockets of this process."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return sorted(link for link in links if link.startswith("socket:"))
