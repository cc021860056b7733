"""The rollouts of all programs, within bounds.

A live program's are in memory: its records, packed once there are many, and the tokens of its chains. An ended one is
packed, and on disk if there is a folder. What is ended goes first when memory is short: what was read, then the oldest.
If that is not enough, turns are recorded without their tokens, and their programs are incomplete: a rollout is never
silently shorter.

The table knows no clock and no thread. `to_pack` and `to_store` return work that its owner does wherever it wants, and
reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import replace

from thunderagent.programs.model.verdict import TURN_VERDICTS, ProgramVerdict, TurnVerdict
from thunderagent.rollouts.lineage import Lineage
from thunderagent.rollouts.records import (
    Output,
    Rollout,
    Turn,
    frame_of,
    in_planes,
    token_bytes,
)
from thunderagent.rollouts.segments import Stored

PACKED_FROM_BYTES = 128 * 1024
"""So many bytes of records are packed while their program lives."""

ENTRY_BYTES = 2048
"""What an entry without turns is taken to need."""

MAX_DROPPED_COUNT = 10_000
"""Ids of dropped rollouts that are remembered, with the reason."""


@dataclass(slots=True)
class Answered:
    """The tokens of an answer as an engine reported them; ids are None if it did not."""

    prompt: list[int] | None = None
    outputs: list[Output] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    """Of each output, not in planes."""


class Entry:
    """One program's rollout, and where its records are."""

    __slots__ = (
        "blocks",
        "changes_first",
        "frames",
        "frames_bytes",
        "lineage",
        "rollout",
        "size_bytes",
        "stored",
        "verdict",
        "was_read",
    )

    def __init__(self, rollout: Rollout) -> None:
        """Begin without turns."""
        self.rollout = rollout
        self.lineage: Lineage | None = Lineage()
        self.blocks: list[bytes] = []
        self.frames: list[bytes] = []
        self.frames_bytes = 0
        self.size_bytes = ENTRY_BYTES
        """What it counts for in memory."""
        self.stored: Stored | None = None
        self.verdict = ProgramVerdict()
        self.was_read = False
        self.changes_first = -1
        """How often weights had changed when its first turn was granted; less than 0 before that."""

    def measure(self) -> int:
        """Return its size in memory now, in bytes."""
        lineage_bytes = self.lineage.size_bytes if self.lineage is not None else 0
        return ENTRY_BYTES + self.frames_bytes + sum(map(len, self.blocks)) + lineage_bytes


class Table:
    """All rollouts."""

    def __init__(self, *, memory_bytes: int, keep_s: float, turns_count: int) -> None:
        """Keep no more than `memory_bytes`, ended ones for `keep_s`, and `turns_count` turns of a program."""
        self._memory_bytes = memory_bytes
        self._keep_s = keep_s
        self._turns_count = turns_count
        self._live: dict[str, Entry] = {}
        self._ended: dict[int, Entry] = {}
        """By their number, the oldest first."""
        self._last: dict[str, int] = {}
        """By program, the number of its last ended rollout."""
        self._dropped: dict[str, str] = {}
        self._ended_count = 0
        self.size_bytes = 0
        self.links: dict[str, int] = {}
        self.incomplete_count = 0
        """Turns without tokens so far."""
        self.dropped_count = 0

    # --- what happens

    def granted(self, template: Rollout) -> None:
        """Note that an engine gets a turn of a program; `template` says whose."""
        self._entry(template).rollout.granted_count += 1

    def record(self, template: Rollout, turn: Turn, answered: Answered, *, has_answers: bool | None) -> Entry:
        """Add a turn that has ended."""
        entry = self._entry(template)
        rollout = entry.rollout
        turn.seq = rollout.turns_count
        is_over = rollout.turns_count >= self._turns_count or self.size_bytes >= self._memory_bytes
        if is_over and not turn.missing:
            turn.missing = "too_large"
        if answered.prompt is not None and entry.lineage is not None and not is_over:
            self._place(entry, turn, answered, has_answers=has_answers)
        self.links[turn.link] = self.links.get(turn.link, 0) + 1
        if turn.tries_count and turn.missing and turn.verdict != "agent_error":
            rollout.complete = False
            self.incomplete_count += 1
        rollout.turns_count += 1
        rollout.prompt_tokens += turn.prompt_tokens
        rollout.output_tokens += sum(len(output.ids) // 4 for output in turn.outputs)
        rollout.links[turn.link] = rollout.links.get(turn.link, 0) + 1
        rollout.held_s += turn.held_s
        if turn.tries_count:
            if entry.changes_first < 0:
                entry.changes_first, rollout.weights_first = turn.changes_before, turn.weights_before
            rollout.weights_last = turn.weights_after or rollout.weights_last
            rollout.lag_count = max(rollout.lag_count, turn.changes_after - entry.changes_first)
        if turn.outcome != "superseded":
            verdict = TURN_VERDICTS.get(turn.verdict, TurnVerdict.OK)
            entry.verdict.ended(verdict, turn.cause, turn.replica_id, turn.branch_id, turn.prompt_tokens)
            rollout.verdict, rollout.cause = entry.verdict.verdict.value, entry.verdict.cause
        if rollout.turns_count <= 2 * self._turns_count:
            frame = frame_of(turn)
            entry.frames.append(frame)
            entry.frames_bytes += len(frame)
        self._measure(entry)
        self._make_room()
        return entry

    def _place(self, entry: Entry, turn: Turn, answered: Answered, *, has_answers: bool | None) -> None:
        assert entry.lineage is not None
        assert answered.prompt is not None
        prompt = token_bytes(answered.prompt)
        placed = entry.lineage.place(turn.seq, prompt, answered.tokens, has_answers=has_answers)
        turn.link, turn.parent, turn.parent_choice, turn.shared_tokens = placed
        turn.prompt_tokens = len(answered.prompt)
        turn.prompt_new = in_planes(prompt[4 * placed.shared_tokens :])
        turn.outputs = answered.outputs

    def ended(self, program_id: str, generation: int | None, outcome: str, now_at: float) -> Entry | None:
        """Note that a program ended, at `now_at` in seconds since 1970; None if it has no live rollout."""
        entry = self._live.get(program_id)
        if entry is None or (generation is not None and entry.rollout.generation != generation):
            return None
        del self._live[program_id]
        self._ended_count += 1
        rollout = entry.rollout
        rollout.seq, rollout.ended, rollout.outcome, rollout.ended_at = self._ended_count, True, outcome, now_at
        if rollout.granted_count > rollout.turns_count:
            rollout.complete = False
        entry.lineage = None
        self._keep(entry)
        self._expire(now_at)
        self._make_room()
        return entry

    def _keep(self, entry: Entry) -> None:
        self._ended[entry.rollout.seq] = entry
        self._last[entry.rollout.program_id] = entry.rollout.seq
        self._measure(entry)

    def found(self, rollout: Rollout, stored: Stored) -> None:
        """Add an ended rollout that an earlier process left on disk."""
        entry = Entry(rollout)
        entry.lineage, entry.stored = None, stored
        self._ended_count = max(self._ended_count, rollout.seq)
        self._keep(entry)

    def _entry(self, template: Rollout) -> Entry:
        entry = self._live.get(template.program_id)
        if entry is not None and entry.rollout.generation != template.generation:
            if entry.rollout.generation > template.generation:
                return Entry(template)  # a turn of an earlier one that ended late: nobody can read it any more
            self.ended(template.program_id, None, "", template.began_at)
            entry = None
        if entry is None:
            self._live[template.program_id] = entry = Entry(replace(template, links={}))
            self.size_bytes += entry.size_bytes
        return entry

    # --- bounds

    def _measure(self, entry: Entry) -> None:
        size_bytes = entry.measure()
        is_known = self._live.get(entry.rollout.program_id) is entry or self._ended.get(entry.rollout.seq) is entry
        if is_known:
            self.size_bytes += size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes

    def _make_room(self) -> None:
        if self.size_bytes <= self._memory_bytes:
            return
        read = (seq for seq, entry in self._ended.items() if entry.was_read)
        for seq in [*read, *self._ended]:
            if self.size_bytes <= self._memory_bytes:
                return
            if seq in self._ended:
                self.drop(seq, "memory was short")

    def _expire(self, now_at: float) -> None:
        for seq, entry in list(islice(self._ended.items(), 100)):
            if now_at - entry.rollout.ended_at <= self._keep_s:
                return
            self.drop(seq, "it ended too long ago")

    def drop(self, seq: int, why: str) -> None:
        """Forget an ended rollout, and remember why."""
        entry = self._ended.pop(seq, None)
        if entry is None:
            return
        program_id = entry.rollout.program_id
        self.size_bytes -= entry.size_bytes
        self.dropped_count += 1
        if self._last.get(program_id) == seq:
            del self._last[program_id]
            self._dropped[program_id] = why
            if len(self._dropped) > MAX_DROPPED_COUNT:
                del self._dropped[next(iter(self._dropped))]

    @property
    def segments(self) -> frozenset[int]:
        """The files in which anything is that is kept."""
        return frozenset(entry.stored.segment for entry in self._ended.values() if entry.stored is not None)

    def drop_segment(self, number: int) -> None:
        """Forget what was in a deleted file."""
        for seq, entry in list(self._ended.items()):
            if entry.stored is not None and entry.stored.segment == number:
                self.drop(seq, "the disk was full")

    # --- packing, by whoever has time

    def to_pack(self, entry: Entry) -> list[bytes]:
        """Return records to pack, if there are enough or their program has ended."""
        wants = entry.rollout.ended or entry.frames_bytes >= PACKED_FROM_BYTES
        return entry.frames[:] if wants else []

    def packed(self, entry: Entry, count: int, block: bytes) -> None:
        """Replace the first `count` unpacked records by a block."""
        entry.blocks.append(block)
        entry.frames_bytes -= sum(map(len, entry.frames[:count]))
        del entry.frames[:count]
        self._measure(entry)

    def stored(self, entry: Entry, stored: Stored) -> None:
        """Note that an ended rollout is on disk, and no longer needed in memory."""
        entry.stored, entry.blocks, entry.frames, entry.frames_bytes = stored, [], [], 0
        self._measure(entry)

    # --- reading

    def find(self, program_id: str, generation: int | None = None) -> Entry | None:
        """Return a program's last rollout, or that of a generation."""
        entry = self._live.get(program_id)
        if entry is not None and generation in (None, entry.rollout.generation):
            return entry
        if generation is None:
            return self._ended.get(self._last.get(program_id, 0))
        for each in reversed(self._ended.values()):
            if each.rollout.program_id == program_id and each.rollout.generation == generation:
                return each
        return None

    def why_dropped(self, program_id: str) -> str:
        """Return why there is no rollout of a program any more; empty if it never had one."""
        return self._dropped.get(program_id, "")

    def ended_after(self, seq: int, *, group_id: str | None, tenant: str | None) -> Iterator[Entry]:
        """Yield ended rollouts in order of ending, after that with this number; of a group and a tenant, if given."""
        for number, entry in list(self._ended.items()):
            rollout = entry.rollout
            if number > seq and group_id in (None, rollout.group_id) and tenant in (None, rollout.tenant):
                yield entry

    @property
    def live_count(self) -> int:
        """How many live programs have a rollout."""
        return len(self._live)

    @property
    def ended_count(self) -> int:
        """How many ended rollouts are kept."""
        return len(self._ended)
