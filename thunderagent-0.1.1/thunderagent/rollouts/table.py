"""The rollouts of all programs, within bounds.

A live program's are in memory: its records, packed once there are many, and the tokens of its chains. An ended one is
on disk, packed, if there is a folder. What is ended goes first when memory is short: what was read, then the oldest.
If that is not enough, turns are recorded without their tokens, and their programs are incomplete: a rollout is never
silently shorter.

No tenant pushes another's rollouts out. The *share* of a tenant is the memory divided by the tenants that have any:
one with no more than that loses nothing to others, and `RESERVED_RATIO` of the memory is for such tenants alone. All
tenants beyond `OWN_SHARES_COUNT` have one share together: a client that makes up tenants takes no more than that.

A program's rollout ends with the last of its turns: one that is still under way when the program ends is waited for.

A turn is *taken* at its end, which costs almost nothing, and *settled* later: its tokens are decoded, compared with
earlier ones, and packed. Its program's turns are settled together, in their order, before anything of them is read.

The table knows no clock, no thread and no process. Its owner has turns settled here, or by a process that keeps the
chains of the programs that it is sent. Nothing is there that is not here, too: if it dies, another gets the records.
`to_pack` returns work that its owner does wherever it wants, and reports.
"""

# compiled: each recorded turn passes here

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from msgspec import Raw
from msgspec.structs import replace

from thunderagent.programs.messages import TURN_VERDICTS, TurnVerdict
from thunderagent.programs.state.program import ProgramVerdict
from thunderagent.rollouts.lineage import Lineage, lineage_of
from thunderagent.rollouts.records import (
    Batch,
    Output,
    Rollout,
    SettledBatch,
    Turn,
    frame_of,
    share_name,
    turns_in,
)
from thunderagent.rollouts.segments import Stored
from thunderagent.rollouts.tokens import UNREADABLE, in_planes, packed_text

PACKED_FROM_BYTES: Final = 128 * 1024
"""So many bytes of a program's records are packed, unless they go to disk: there all are."""

TAKEN_RATIO: Final = 0.25
"""The part of the memory for rollouts that turns may take which are not yet settled."""

FILLING_RATIO: Final = 0.25
"""From this part of that on they are settled without delay."""

RESERVED_RATIO: Final = 0.125
"""The part of it that tenants with more than their share leave to others."""

ENTRY_BYTES: Final = 2048
"""What an entry without turns is taken to need."""

MAX_DROPPED_COUNT: Final = 10_000
"""Ids of dropped rollouts that are remembered, with the reason."""


class Answered:
    """The tokens of an answer as an engine reported them, as text; no prompt if it did not."""

    __slots__ = ("outputs", "prompt", "texts")

    def __init__(self, prompt: bytes | None = None) -> None:
        """Begin without outputs."""
        self.prompt = prompt
        self.outputs: list[Output] = []
        self.texts: list[bytes] = []
        """Of each output."""


NOTHING: Final = Answered()


class Share:
    """What one tenant has in memory, or those without a share of their own."""

    __slots__ = ("ended", "live_count", "read", "size_bytes")

    def __init__(self) -> None:
        """Begin without rollouts."""
        self.size_bytes = 0
        self.live_count = 0
        self.ended: dict[int, None] = {}
        """Its ended rollouts by their number, the oldest first."""
        self.read: dict[int, None] = {}
        """Those of them that were read."""


class Entry:
    """One program's rollout, and where its records are."""

    __slots__ = (
        "blocks",
        "changes_first",
        "deaths_count",
        "ending",
        "frames",
        "frames_bytes",
        "lineage",
        "lineage_bytes",
        "lost_count",
        "number",
        "rollout",
        "sent",
        "settled_by",
        "settled_prompt",
        "share_name",
        "size_bytes",
        "stored",
        "taken",
        "taken_bytes",
        "taken_count",
        "taken_prompt",
        "verdict",
    )

    def __init__(self, rollout: Rollout) -> None:
        """Begin without turns."""
        self.rollout = rollout
        self.share_name = rollout.tenant
        """Whose share it counts for: its tenant's own, or the common one."""
        self.lineage: Lineage | None = Lineage()
        """Its chains, if they are here; see `settled_by`."""
        self.settled_by = 0
        """The process that knows its chains, by the count of processes; 0 if they are here."""
        self.number = 0
        """What that process knows it by."""
        self.lineage_bytes = 0
        """What it has of its chains."""
        self.sent: list[Any] = []
        """Turns that it settles now. They are among those that wait until it has answered."""
        self.deaths_count = 0
        """How many processes died of its turns, so it seems."""
        self.blocks: list[bytes] = []
        self.frames: list[bytes] = []
        self.frames_bytes = 0
        self.size_bytes = ENTRY_BYTES
        """What it counts for in memory."""
        self.stored: Stored | None = None
        self.verdict = ProgramVerdict()
        self.changes_first = -1
        """How often weights had changed when its first turn was granted; less than 0 before that."""

        self.ending: tuple[str, float] | None = None
        """Outcome and time of its end, if turns are still under way."""
        self.lost_count = 0
        """Turns that will have no record."""
        self.taken: list[Any] = []
        """Turns that have ended, and are not yet settled nor sent; see `Taken`."""
        self.taken_bytes = 0
        self.taken_count = 0
        """Turns that were ever taken."""
        self.taken_prompt = b""
        """The prompt of the last one of `taken`, as its engine listed it, without the bracket at its end."""
        self.settled_prompt = b""
        """The same of the last one that was settled, while they are."""

    @property
    def is_under_way(self) -> bool:
        """Whether an engine got a turn that has no record yet."""
        return self.rollout.granted_count > self.taken_count + self.lost_count

    def measure(self) -> int:
        """Return its size in memory now, in bytes."""
        lineage_bytes = self.lineage.size_bytes if self.lineage is not None else 0
        blocks_bytes = 0
        for block in self.blocks:
            blocks_bytes += len(block)
        lineage_bytes += self.lineage_bytes
        return ENTRY_BYTES + self.frames_bytes + blocks_bytes + lineage_bytes + self.taken_bytes


def place(
    lineage: Lineage | None,
    turn: Turn,
    answered: Answered,
    *,
    has_answers: bool | None,
    turns_count: int,
    is_full: bool,
) -> tuple[bytes, int]:
    """Put a turn with its tokens into its program's chains; return its record, and how many tokens were generated.

    After `turns_count` turns, or if the memory `is_full`, tokens are left out; after twice as many the record is empty.
    """
    output_tokens = 0
    if turn.seq >= turns_count or is_full:
        turn.missing = turn.missing or "too_large"
    elif lineage is not None and answered.prompt is not None:
        output_tokens = _placed(lineage, turn, answered, answered.prompt, has_answers=has_answers)
    return frame_of(turn) if turn.seq < 2 * turns_count else b"", output_tokens


def _placed(lineage: Lineage, turn: Turn, answered: Answered, prompt: bytes, *, has_answers: bool | None) -> int:
    placed = lineage.find(prompt, has_answers=has_answers)
    try:
        turn.prompt_new = in_planes(packed_text(prompt[placed.shared :]))
    except UNREADABLE:
        turn.missing = turn.missing or "unreadable"
        return 0
    turn.link, turn.parent, turn.parent_choice = placed.link, placed.parent, placed.parent_choice
    turn.shared_tokens = placed.shared_tokens
    turn.prompt_tokens = lineage.add(turn.seq, placed, prompt, answered.texts)
    turn.outputs = answered.outputs
    output_tokens = 0
    for output in answered.outputs:
        output_tokens += len(output.ids) // 4
    return output_tokens


def settle(
    entry: Entry, taken: Iterable[Any], *, number: int, first_seq: int, turns_count: int, is_full: bool
) -> SettledBatch:
    """Put turns of a rollout into its chains, in their order; return their records, and what they come to.

    The next record gets the number `first_seq`; the others are as in `place`.
    """
    frames: list[bytes] = []
    links: dict[str, int] = {}
    lacks: list[tuple[str, str, str]] = []
    errors: list[str] = []
    seq, incomplete_count, prompt_tokens, output_tokens, held_s = first_seq, 0, 0, 0, 0.0
    changes_first, changes_most, weights_first, weights_last = -1, 0, "", ""
    for each in taken:
        turn: Turn = each.turn
        try:
            turn.seq = seq
            answered: Answered = each.answered(entry)
            has_answers: bool | None = each.has_answers
            frame, tokens = place(
                entry.lineage, turn, answered, has_answers=has_answers, turns_count=turns_count, is_full=is_full
            )
        except Exception as error:
            errors.append(repr(error))
            continue
        seq += 1
        frames.append(frame)
        link: str = turn.link
        links[link] = links.get(link, 0) + 1
        prompt_tokens += turn.prompt_tokens
        output_tokens += tokens
        held_s += turn.held_s
        if turn.missing and turn.kept:
            lacks.append((turn.replica_id, turn.path, turn.missing))
        if turn.tries_count:
            if turn.missing and turn.kept and turn.verdict != "agent_error":
                incomplete_count += 1
            if changes_first < 0:
                changes_first, weights_first = turn.changes_before, turn.weights_before
            weights_last = turn.weights_after or weights_last
            changes_most = max(changes_most, turn.changes_after)
    entry.settled_prompt = b""
    return SettledBatch(
        number=number,
        frames=b"".join(frames),
        turns_count=seq - first_seq,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        held_s=held_s,
        links=links,
        incomplete_count=incomplete_count,
        lacks=lacks,
        changes_first=changes_first,
        weights_first=weights_first,
        weights_last=weights_last,
        changes_most=changes_most,
        errors=errors,
    )


class Table:
    """All rollouts."""

    def __init__(self, *, memory_bytes: int, keep_s: float, turns_count: int) -> None:
        """Keep no more than `memory_bytes`, ended ones for `keep_s`, and `turns_count` turns of a program."""
        self._memory_bytes = memory_bytes
        self._keep_s = keep_s
        self._turns_count = turns_count
        self.most_taken_bytes = int(TAKEN_RATIO * memory_bytes)
        self._filling_bytes = int(FILLING_RATIO * self.most_taken_bytes)
        self._live: dict[str, Entry] = {}
        self._ended: dict[int, Entry] = {}
        """By their number, the oldest first."""
        self._shares: dict[str, Share] = {}
        """By tenant."""
        self._last: dict[str, int] = {}
        """By program, the number of its last ended rollout."""
        self._dropped: dict[str, str] = {}
        self._ended_count = 0
        self.size_bytes = 0
        self.unsettled: dict[int, Entry] = {}
        """Entries with turns that are not yet settled, by identity; that which waits longest first."""
        self.taken_bytes = 0
        """What such turns take in memory."""
        self.gone: list[Entry] = []
        """Those that ended, until the owner has told the process that knows their chains."""
        self.links: dict[str, int] = {}
        self.incomplete_count = 0
        """Turns without tokens so far."""
        self.lacks: list[tuple[str, str, str]] = []
        """What `SettledBatch` says so, until the owner has taken notice."""
        self.dropped_count = 0

    # --- what happens

    def live(self, program_id: str, generation: int) -> Entry | None:
        """Return the rollout of a live program; None if it has none yet."""
        entry = self._live.get(program_id)
        return entry if entry is not None and entry.rollout.generation == generation else None

    def begin(self, template: Rollout) -> Entry:
        """Return the rollout of a program, which `template` names; one of an earlier generation ends now."""
        entry = self._live.get(template.program_id)
        if entry is not None and entry.rollout.generation != template.generation:
            if entry.rollout.generation > template.generation:
                return Entry(template)  # nobody can read it any more
            self._end(entry, "", template.began_at)
            entry = None
        if entry is None:
            self._live[template.program_id] = entry = Entry(replace(template, links={}))
            entry.share_name = share_name(template.tenant, self._shares)
            self._share(entry).live_count += 1
            self._count(entry, entry.size_bytes)
        return entry

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be settled that further turns are recorded without their tokens."""
        return self.taken_bytes >= self.most_taken_bytes

    @property
    def is_filling(self) -> bool:
        """Whether so much waits that it is not to wait any longer."""
        return self.taken_bytes >= self._filling_bytes

    def take(self, entry: Entry, taken: Any) -> bool:
        """Take a turn that has ended; return whether its owner has something to do."""
        if entry.rollout.ended:  # another generation took its place
            return False
        self._judge(entry, taken.turn, taken.prompt_bytes)
        taken.pack(entry)
        size_bytes: int = taken.size_bytes
        is_first, was_filling = not self.unsettled, self.is_filling
        entry.taken.append(taken)
        entry.taken_count += 1
        self._wait(entry, size_bytes)
        if entry.ending is not None and not entry.is_under_way:
            self._end(entry, *entry.ending)
            return True
        return is_first or (self.is_filling and not was_filling)

    def _judge(self, entry: Entry, turn: Turn, prompt_bytes: int) -> None:
        """Note what the end of a turn says about its program; a new attempt has a prompt of the same size."""
        if turn.outcome == "superseded":
            return
        verdict, so_far = TURN_VERDICTS.get(turn.verdict, TurnVerdict.OK), entry.verdict
        if verdict is not TurnVerdict.OK or so_far.verdict is not TurnVerdict.OK:
            so_far.ended(verdict, turn.cause, turn.replica_id, turn.branch_id, prompt_bytes)
            entry.rollout.verdict, entry.rollout.cause = so_far.verdict.value, so_far.cause

    def settle(self, entry: Entry) -> list[str]:
        """Settle the turns of a rollout here; return what went wrong: such turns have no record."""
        if not entry.taken or entry.sent:
            return []
        if entry.settled_by:
            entry.settled_by = 0
            entry.lineage = lineage_of(turns_in(entry.blocks, entry.frames))
        taken, entry.taken, entry.taken_prompt = entry.taken, [], b""
        self._give_back(entry)
        first_seq, is_full = entry.rollout.turns_count, self._is_full(entry)
        turns = [each.opened() for each in taken]
        batch = settle(
            entry, turns, number=entry.number, first_seq=first_seq, turns_count=self._turns_count, is_full=is_full
        )
        return self._note(entry, batch)

    def _give_back(self, entry: Entry) -> None:
        """Note that no turn of a rollout waits any more."""
        self.unsettled.pop(id(entry), None)
        self.taken_bytes -= entry.taken_bytes
        self._count(entry, -entry.taken_bytes)
        entry.size_bytes -= entry.taken_bytes
        entry.taken_bytes = 0

    # --- settled by another process

    def send(self, entry: Entry, process: int) -> Batch:
        """Return all turns of a rollout that wait, as they are sent to a process; none are at one now."""
        assert not entry.sent
        rollout, is_new = entry.rollout, entry.settled_by != process
        batch = Batch(
            entry.number,
            rollout.turns_count,
            self._turns_count,
            self._is_full(entry),
            rollout.ended,
            is_new,
            entry.blocks if is_new else [],
            entry.frames if is_new else [],
            [Raw(each.message) for each in entry.taken],
        )
        entry.settled_by, entry.lineage = process, None
        entry.sent, entry.taken, entry.taken_prompt = entry.taken, [], b""
        return batch

    def settled(self, entry: Entry, batch: SettledBatch) -> list[str]:
        """Note what became of turns that were sent; return what went wrong: such turns have no record."""
        entry.sent, entry.deaths_count = [], 0
        self._give_back(entry)
        for each in entry.taken:
            self._wait(entry, each.size_bytes)
        return self._note(entry, batch)

    def _wait(self, entry: Entry, size_bytes: int) -> None:
        entry.taken_bytes += size_bytes
        entry.size_bytes += size_bytes
        self._count(entry, size_bytes)
        self.taken_bytes += size_bytes
        self.unsettled[id(entry)] = entry

    def died(self, entry: Entry) -> None:
        """Note that the process died that knew a rollout's chains: what it was sent waits again."""
        entry.taken, entry.sent, entry.taken_prompt = entry.sent + entry.taken, [], b""

    def give_up(self, entry: Entry) -> int:
        """Note that the turns of a rollout which wait will have no record; return how many."""
        count = len(entry.taken)
        entry.taken, entry.taken_prompt = [], b""
        entry.rollout.complete = False
        self._give_back(entry)
        self._after(entry)
        return count

    def _note(self, entry: Entry, batch: SettledBatch) -> list[str]:
        """Add turns that were settled to their rollout; return why others were not."""
        rollout = entry.rollout
        links: dict[str, int] = rollout.links
        for link, count in batch.links.items():
            self.links[link] = self.links.get(link, 0) + count
            links[link] = links.get(link, 0) + count
        if batch.incomplete_count or batch.errors:
            rollout.complete = False
            self.incomplete_count += batch.incomplete_count
        rollout.turns_count += batch.turns_count
        rollout.prompt_tokens += batch.prompt_tokens
        rollout.output_tokens += batch.output_tokens
        rollout.held_s += batch.held_s
        if batch.changes_first >= 0:
            if entry.changes_first < 0:
                entry.changes_first, rollout.weights_first = batch.changes_first, batch.weights_first
            rollout.weights_last = batch.weights_last or rollout.weights_last
            lag_count = batch.changes_most - entry.changes_first
            rollout.lag_count = max(rollout.lag_count, lag_count)
        frames: bytes = batch.frames
        if frames:
            entry.frames.append(frames)
            entry.frames_bytes += len(frames)
        self.lacks += batch.lacks
        entry.lineage_bytes = batch.lineage_bytes
        self._after(entry)
        errors: list[str] = batch.errors
        return errors

    def lost(self, entry: Entry) -> None:
        """Note that a turn which an engine got will have no record."""
        if not entry.rollout.ended:
            entry.lost_count += 1
            entry.rollout.complete = False
            self._after(entry)

    def _after(self, entry: Entry) -> None:
        """Measure a rollout after a turn, and end it if that was the last one of a program that has ended."""
        if entry.ending is not None and not entry.rollout.ended and not entry.is_under_way:
            self._end(entry, *entry.ending)
        elif entry.rollout.ended and not entry.taken:
            entry.lineage, entry.lineage_bytes = None, 0
        self._measure(entry)
        self._make_room()

    def ended(self, program_id: str, generation: int | None, outcome: str, now_at: float) -> Entry | None:
        """Note that a program ended, at `now_at` in seconds since 1970; None if it has no live rollout.

        The rollout ends with it, unless turns are under way: then with the last of these.
        """
        entry = self._live.get(program_id)
        if entry is None or (generation is not None and entry.rollout.generation != generation):
            return None
        if entry.is_under_way:
            entry.ending = (outcome, now_at)
        else:
            self._end(entry, outcome, now_at)
        return entry

    def _end(self, entry: Entry, outcome: str, now_at: float) -> None:
        rollout = entry.rollout
        del self._live[rollout.program_id]
        self._share(entry).live_count -= 1
        self._ended_count += 1
        rollout.seq, rollout.ended, rollout.outcome, rollout.ended_at = self._ended_count, True, outcome, now_at
        if rollout.granted_count > entry.taken_count:
            rollout.complete = False
        if not entry.taken and not entry.sent:
            entry.lineage, entry.lineage_bytes = None, 0
        if entry.settled_by:
            self.gone.append(entry)
        self._keep(entry)
        self._expire(now_at)
        self._make_room()

    def _keep(self, entry: Entry) -> None:
        self._ended[entry.rollout.seq] = entry
        self._share(entry).ended[entry.rollout.seq] = None
        self._last[entry.rollout.program_id] = entry.rollout.seq
        self._measure(entry)

    def found(self, rollout: Rollout, stored: Stored) -> None:
        """Add an ended rollout that an earlier process left on disk."""
        entry = Entry(rollout)
        entry.lineage, entry.stored = None, stored
        entry.share_name = share_name(rollout.tenant, self._shares)
        self._ended_count = max(self._ended_count, rollout.seq)
        self._keep(entry)

    # --- bounds

    def _share(self, entry: Entry) -> Share:
        name: str = entry.share_name
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share()
        return share

    def _count(self, entry: Entry, size_bytes: int) -> None:
        """Note that so much more of a rollout is in memory."""
        self.size_bytes += size_bytes
        share = self._share(entry)
        share.size_bytes += size_bytes
        if not share.size_bytes and not share.live_count and not share.ended:
            del self._shares[entry.share_name]

    def _measure(self, entry: Entry) -> None:
        size_bytes = entry.measure()
        is_known = self._live.get(entry.rollout.program_id) is entry or self._ended.get(entry.rollout.seq) is entry
        if is_known:
            self._count(entry, size_bytes - entry.size_bytes)
        entry.size_bytes = size_bytes

    def _has_more_than_its_share(self, share: Share) -> bool:
        return share.size_bytes * len(self._shares) > self._memory_bytes

    @property
    def _unreserved_bytes(self) -> int:
        """How much of the memory tenants with more than their share may fill."""
        return int((1 - RESERVED_RATIO) * self._memory_bytes) if len(self._shares) > 1 else self._memory_bytes

    def _is_full(self, entry: Entry) -> bool:
        """Return whether there is no memory for tokens of a rollout."""
        settled_bytes = self.size_bytes - self.taken_bytes
        if settled_bytes >= self._memory_bytes:
            return True
        return settled_bytes >= self._unreserved_bytes and self._has_more_than_its_share(self._share(entry))

    def _make_room(self) -> None:
        """Drop ended rollouts of the tenant that has most, until it leaves to others what is theirs."""
        while self.size_bytes > self._unreserved_bytes:
            most: Share | None = None
            for share in self._shares.values():
                if share.ended and (most is None or share.size_bytes > most.size_bytes):
                    most = share
            if most is None or not self._has_more_than_its_share(most):
                return
            self.drop(next(iter(most.read or most.ended)), "memory was short")

    def was_read(self, entry: Entry) -> None:
        """Note that an ended rollout was read: it goes first."""
        if entry.rollout.seq in self._ended:
            self._share(entry).read[entry.rollout.seq] = None

    def _expire(self, now_at: float) -> None:
        for _ in range(100):
            seq = next(iter(self._ended), 0)
            if not seq or now_at - self._ended[seq].rollout.ended_at <= self._keep_s:
                return
            self.drop(seq, "it ended too long ago")

    def keeps(self, entry: Entry) -> bool:
        """Return whether an ended rollout was not dropped."""
        return self._ended.get(entry.rollout.seq) is entry

    def drop(self, seq: int, why: str) -> None:
        """Forget an ended rollout, and remember why."""
        entry = self._ended.pop(seq, None)
        if entry is None:
            return
        program_id = entry.rollout.program_id
        if entry.taken or entry.sent:  # whoever reads it now does not get them
            entry.rollout.complete = False
            self.gone.append(entry)
        self._give_back(entry)
        share = self._share(entry)
        share.ended.pop(seq, None)
        share.read.pop(seq, None)
        self._count(entry, -entry.size_bytes)
        entry.taken, entry.sent, entry.taken_prompt = [], [], b""
        self.dropped_count += 1
        if self._last.get(program_id) == seq:
            del self._last[program_id]
            self._dropped[program_id] = why
            if len(self._dropped) > MAX_DROPPED_COUNT:
                del self._dropped[next(iter(self._dropped))]

    @property
    def segments(self) -> frozenset[int]:
        """The files in which anything is that is kept."""
        return frozenset([entry.stored.segment for entry in self._ended.values() if entry.stored is not None])

    def drop_segment(self, number: int) -> None:
        """Forget what was in a deleted file."""
        for seq, entry in list(self._ended.items()):
            if entry.stored is not None and entry.stored.segment == number:
                self.drop(seq, "the disk was full")

    # --- packing, by whoever has time

    def to_pack(self, entry: Entry, *, writes: bool) -> list[bytes]:
        """Return records to pack: if there are enough, or if their rollout is to be written."""
        return entry.frames[:] if writes or entry.frames_bytes >= PACKED_FROM_BYTES else []

    def packed(self, entry: Entry, count: int, block: bytes) -> None:
        """Replace the first `count` unpacked records by a block."""
        entry.blocks.append(block)
        for frame in entry.frames[:count]:
            entry.frames_bytes -= len(frame)
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
