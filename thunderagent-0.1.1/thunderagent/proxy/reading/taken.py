"""A turn that has ended, with what its engine said, not yet decoded: kept, sent to the process that settles, decoded.

It is packed at once, into the message that is sent: what waits is one piece of memory, not thirty objects that each
garbage collection looks at.

`Settler` is what that process does. It knows the chains of programs, and nothing else of them.
"""

# compiled: each recorded turn passes here

from __future__ import annotations

from typing import Final

from thunderagent.proxy.reading.capture import Captured, OutputRead
from thunderagent.rollouts.lineage import lineage_of
from thunderagent.rollouts.records import (
    Batch,
    Missing,
    Output,
    Rollout,
    SentOutput,
    SentTurn,
    SettledBatch,
    Span,
    Turn,
    decode_sent,
    encode_sent,
    turns_in,
)
from thunderagent.rollouts.table import NOTHING, Answered, Entry, settle
from thunderagent.rollouts.tokens import UNREADABLE, in_planes, logprob_bytes, packed_text

TAKEN_BYTES: Final = 200
"""What a turn that is not yet settled is taken to need, beside its message."""


class Taken:
    """A turn that has ended, with what its engine said."""

    __slots__ = (
        "_captured",
        "_continues",
        "_logprobs",
        "has_answers",
        "message",
        "prompt_bytes",
        "size_bytes",
        "turn",
    )

    def __init__(
        self,
        turn: Turn,
        captured: Captured | None,
        *,
        has_answers: bool | None,
        logprobs: bool,
        continues: bool = False,
        prompt_bytes: int = 0,
    ) -> None:
        """Keep it; the prompt in its body took so many bytes."""
        self.turn: Turn | None = turn
        """None once it is packed."""
        self.prompt_bytes = prompt_bytes
        self.has_answers = has_answers
        self._captured = captured
        self._logprobs = logprobs
        self._continues = continues
        """Whether its prompt lacks what the one before begins with."""
        self.message = b""
        """All of it, once it is packed."""
        self.size_bytes = TAKEN_BYTES
        """What it takes in memory; its prompt is there twice, once to compare the next one with."""

    def pack(self, entry: Entry) -> None:
        """Keep it as the message that is sent; of a prompt that begins as the one before in `entry` only the rest."""
        captured, listed, rest_bytes = self._captured, b"", 0
        if captured is not None and captured.prompt_listed:
            listed, before = captured.prompt_listed, entry.taken_prompt
            if before and listed.startswith(before):
                captured.prompt_listed = listed[len(before) :]
                self._continues = True
            rest_bytes = len(captured.prompt_listed)
        self.message = encode_sent(self._sent())
        if listed:  # only now: the next one may go on from it alone if it is there
            entry.taken_prompt = listed[:-1]
        self.turn, self._captured = None, None
        self.size_bytes = TAKEN_BYTES + len(self.message) + rest_bytes

    def opened(self) -> Taken:
        """Return what was packed."""
        return received(decode_sent(self.message))

    def answered(self, entry: Entry) -> Answered:
        """Return what was said, and note on the turn what is missing. Turns of `entry` are read in their order."""
        captured = self._captured
        if captured is None:
            return NOTHING
        if captured.prompt_listed:
            if self._continues:
                captured.prompt_listed = entry.settled_prompt + captured.prompt_listed
            entry.settled_prompt = captured.prompt_listed[:-1]
        turn = self.turn
        assert turn is not None, "it is packed"
        answered, turn.missing = _answered(captured.read(), asks_logprobs=self._logprobs)
        return answered

    def _sent(self) -> SentTurn:
        captured, turn = self._captured, self.turn
        assert turn is not None, "it is packed"
        if captured is None:
            return SentTurn(turn, self.has_answers)
        outputs = [
            SentOutput(number, each.listed, each.told, each.text, each.logprobs, each.finish, each.spans)
            for number, each in captured.outputs.items()
        ]
        return SentTurn(
            turn,
            self.has_answers,
            self._logprobs,
            self._continues,
            True,
            captured.prompt,
            captured.prompt_listed,
            captured.is_unreadable,
            outputs,
        )


def received(sent: SentTurn) -> Taken:
    """Return a turn that was sent."""
    captured: Captured | None = None
    if sent.has_captured:
        captured = Captured()
        captured.prompt, captured.prompt_listed = sent.prompt, sent.prompt_listed
        captured.is_unreadable = sent.is_unreadable
        for each in sent.outputs:
            output = captured.outputs[each.number] = OutputRead()
            output.listed, output.told, output.text = each.listed, each.told, each.text
            output.logprobs, output.finish, output.spans = each.logprobs, each.finish, each.spans
    logprobs, continues = sent.asks_logprobs, sent.continues
    return Taken(sent.turn, captured, has_answers=sent.has_answers, logprobs=logprobs, continues=continues)


class Settler:
    """Settles turns of many programs, each of which it knows by a number."""

    def __init__(self) -> None:
        """Begin without programs."""
        self._entries: dict[int, Entry] = {}

    def settle(self, batch: Batch) -> SettledBatch:
        """Settle the next turns of a program. A new one comes with all earlier records; without turns it goes."""
        if not batch.turns:
            self._entries.pop(batch.number, None)
            return SettledBatch(batch.number)
        if batch.is_new:
            entry = self._entries[batch.number] = Entry(Rollout(program_id="", generation=0))
            entry.lineage = lineage_of(turns_in(batch.blocks, batch.frames))
        else:
            entry = self._entries[batch.number]
        turns = [received(decode_sent(each)) for each in batch.turns]
        number, turns_count, is_full = batch.number, batch.turns_count, batch.is_full
        settled = settle(
            entry, turns, number=number, first_seq=batch.first_seq, turns_count=turns_count, is_full=is_full
        )
        if batch.is_last:
            del self._entries[batch.number]
        elif entry.lineage is not None:
            settled.lineage_bytes = entry.lineage.size_bytes
        return settled


def _answered(captured: Captured, *, asks_logprobs: bool) -> tuple[Answered, Missing]:
    """Return what was read, packed, and what is missing of it."""
    if captured.prompt is None or not captured.outputs:
        return NOTHING, "unreadable" if captured.is_unreadable else "no_ids"
    missing: Missing = "unreadable" if captured.is_unreadable else ""
    answered = Answered(captured.prompt)
    outputs = captured.outputs
    for index in sorted(outputs) if len(outputs) > 1 else outputs:
        read = outputs[index]
        try:
            tokens = packed_text(read.text)
        except UNREADABLE:
            return NOTHING, "unreadable"
        has_logprobs = 4 * len(read.logprobs) == len(tokens)
        if asks_logprobs and not has_logprobs:
            missing = missing or "no_logprobs"
        answered.texts.append(read.text)
        answered.outputs.append(_output(read, tokens, has_logprobs=has_logprobs))
    return answered, missing


def _output(read: OutputRead, tokens: bytes, *, has_logprobs: bool) -> Output:
    logprobs = in_planes(logprob_bytes(read.logprobs)) if has_logprobs else b""
    spans = [Span(version, start, end) for version, start, end in read.spans]
    return Output(in_planes(tokens), logprobs, read.finish, spans)
