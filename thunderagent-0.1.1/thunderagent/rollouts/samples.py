"""The samples of a rollout: flat tokens with a mask, as trainers take them.

A sample is a conversation in which each prompt begins with all tokens before it. At every other link a new sample
begins, with the whole prompt masked: nothing is merged over a drift. So each sampled token bears loss in exactly one
sample, and none bears it in another context than the one it was sampled in.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from thunderagent.rollouts.records import Output, Span, Turn
from thunderagent.rollouts.tokens import from_planes, logprob_values, token_ids


class Sample(Struct, kw_only=True):
    """One conversation. `mask` is 1 for tokens that were sampled and may bear loss; logprobs are 0.0 elsewhere."""

    turns: list[int]
    """The records of which it consists."""
    prompt_tokens: int
    """How many tokens the first prompt has."""
    ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    """None if a sampled token has none."""
    spans: list[Span]
    """Which weights made which of its sampled tokens; where nobody knows there is no span."""
    finish: str
    """The reason of its last output's end."""
    link: str
    """Of its first turn."""


class _Tip:
    """A choice of a turn, and the sample that it ends, unless another turn has extended it."""

    __slots__ = ("sample", "start", "tokens")

    def __init__(self, tokens: bytes) -> None:
        self.tokens = tokens
        self.sample: Sample | None = None
        self.start = 0
        """Where its output begins in the sample."""


def samples_of(turns: Iterable[Turn]) -> list[Sample]:
    """Return the samples of a rollout, in the order in which they began; turns without tokens are left out."""
    tips: dict[tuple[int, int], _Tip] = {}
    samples: list[Sample] = []
    for turn in turns:
        parent = tips.get((turn.parent, turn.parent_choice))
        if turn.parent >= 0 and parent is None:
            continue  # its parent's tokens are missing, so its own are, too
        before = b"" if parent is None else parent.tokens[: 4 * turn.shared_tokens]
        prompt = before + from_planes(turn.prompt_new)
        for choice, output in enumerate(turn.outputs):
            tokens = prompt + output.tokens
            tips[turn.seq, choice] = tip = _Tip(tokens)
            if not turn.kept:
                continue  # its client tried again: that answer counts
            goes_on = choice == 0 and turn.link == "extends" and parent is not None
            if goes_on and parent is not None and parent.sample is not None and len(before) == len(parent.tokens):
                sample, parent.sample = parent.sample, None
                _add(sample, token_ids(from_planes(turn.prompt_new)))
            else:
                samples.append(sample := _begun(turn, token_ids(prompt)))
            tip.sample, tip.start = sample, len(sample.ids)
            _add_output(sample, turn, output)
        if not turn.outputs and prompt:
            tips[turn.seq, 0] = _Tip(prompt)
    for tip in tips.values():
        if tip.sample is not None and tip.sample.finish == "abort":
            _mask(tip.sample, tip.start)
    return samples


def _begun(turn: Turn, ids: list[int]) -> Sample:
    return Sample(
        turns=[],
        prompt_tokens=len(ids),
        ids=ids,
        mask=[0] * len(ids),
        logprobs=[0.0] * len(ids),
        spans=[],
        finish="",
        link=turn.link,
    )


def _add(sample: Sample, ids: list[int]) -> None:
    """Add tokens that were not sampled here."""
    sample.ids += ids
    sample.mask += [0] * len(ids)
    if sample.logprobs is not None:
        sample.logprobs += [0.0] * len(ids)


def _add_output(sample: Sample, turn: Turn, output: Output) -> None:
    start, ids = len(sample.ids), token_ids(output.tokens)
    sample.turns.append(turn.seq)
    sample.ids += ids
    sample.mask += [1] * len(ids)
    logprobs = logprob_values(from_planes(output.logprobs))
    if sample.logprobs is not None and len(logprobs) == len(ids):
        sample.logprobs += logprobs
    else:
        sample.logprobs = None
    sample.spans += [Span(each.version, start + each.start, start + each.end) for each in output.spans]
    sample.finish = output.finish


def _mask(sample: Sample, start: int) -> None:
    """Mask an output that was aborted, and that nobody continued: it is no answer of the policy's."""
    count = len(sample.ids) - start
    sample.mask[start:] = [0] * count
    if sample.logprobs is not None:
        sample.logprobs[start:] = [0.0] * count
