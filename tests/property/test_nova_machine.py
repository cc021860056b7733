"""Invariants of Nova's scheduler: stages never overlap wrongly, no request waits in vain, none is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from thunderagent_nova.messages import (
    Arrived,
    Cancelled,
    Decision,
    DecodeDone,
    EncodeDone,
    Failed,
    Free,
    PrefillDone,
    Resplit,
    StartDecode,
    StartEncode,
    StartPrefill,
)
from thunderagent_nova.policy import PAPER
from thunderagent_nova.scheduler import POLICIES, Scheduler


class Machine(RuleBasedStateMachine):
    """Drive a scheduler with workers that answer in any order, and clients that come and leave at any time."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), slots=st.integers(1, 4))
    def begin(self, policy: str, slots: int) -> None:
        self.policy, self.slots = policy, slots
        self.scheduler = Scheduler(policy, slots=slots, split_policy=PAPER, decode_limit=2, budget_tokens=4)
        self.count = 0
        self.live: dict[str, int] = {}  # requests that are not freed, and how many tokens each will get
        self.freed: set[str] = set()
        self.leavers: set[str] = set()
        self.encoding: StartEncode | None = None
        self.prefilling: StartPrefill | None = None
        self.decoding: StartDecode | None = None
        self.encode_split: int | None = None
        self.started: set[str] = set()
        self.ready: set[str] = set()  # prefilled, and not through

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case StartEncode(request_id, split):
                    assert self.encoding is self.prefilling is None
                    self.encoding, self.encode_split = decision, split
                    self.started.add(request_id)
                case StartPrefill(request_id):
                    assert self.encoding is self.prefilling is None
                    self.prefilling = decision
                    self.started.add(request_id)
                case StartDecode(request_ids):
                    assert self.decoding is None
                    assert self.ready.issuperset(request_ids)
                    assert set(request_ids) == self.ready, "all that are ready are taken along"
                    self.decoding = decision
                case Resplit(split):
                    assert self.encoding is not None
                    self.encode_split = split
                case Free(request_id):
                    assert request_id not in self.busy(), "a worker still has it"
                    assert request_id not in self.freed
                    del self.live[request_id]
                    self.freed.add(request_id)
                    self.ready.discard(request_id)

    def busy(self) -> set[str]:
        busy = {each.request_id for each in (self.encoding, self.prefilling) if each is not None}
        return busy | set(self.decoding.request_ids if self.decoding else ())

    @rule(images=st.integers(0, 1), prompt_tokens=st.integers(1, 9), output_tokens=st.integers(1, 3))
    def arrive(self, images: int, prompt_tokens: int, output_tokens: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.live[name] = output_tokens
        self.take(self.scheduler.handle(Arrived(0.0, name, images, prompt_tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.leavers.add(name)
        self.take(self.scheduler.handle(Cancelled(0.0, name)))
        assert name in self.freed or name in self.busy(), "it keeps no worker, and is not freed"

    @precondition(lambda self: self.encoding)
    @rule(fails=st.booleans())
    def encoder_answers(self, fails: bool) -> None:
        assert self.encoding is not None
        name, self.encoding = self.encoding.request_id, None
        self.take(self.scheduler.handle(Failed(0.0, "encode", (name,)) if fails else EncodeDone(0.0, name)))
        assert (fails or name in self.leavers) == (name in self.freed)

    @precondition(lambda self: self.prefilling)
    @rule()
    def prefill_answers(self) -> None:
        assert self.prefilling is not None
        done, self.prefilling = self.prefilling, None
        name = done.request_id
        tokens = self.scheduler.prefill[name].prompt_tokens
        is_last = done.end == tokens
        if is_last:
            self.live[name] -= 1
        is_over = is_last and not self.live[name]
        if is_last and not is_over and name not in self.leavers:
            self.ready.add(name)
        self.take(self.scheduler.handle(PrefillDone(0.0, name, done.end, is_over)))
        assert (is_over or name in self.leavers) == (name in self.freed)

    @precondition(lambda self: self.decoding)
    @rule()
    def decoder_answers(self) -> None:
        assert self.decoding is not None
        names, self.decoding = self.decoding.request_ids, None
        for name in names:
            self.live[name] -= 1
        over = tuple(name for name in names if not self.live[name])
        self.ready -= {*over, *(name for name in names if name in self.leavers)}
        self.take(self.scheduler.handle(DecodeDone(0.0, names, over)))
        assert self.freed.issuperset(over)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        front = self.encoding or self.prefilling
        assert len(self.started & self.live.keys()) <= self.slots
        assert self.live.keys() >= self.busy()
        if self.live:
            assert self.busy(), "somebody is there, and nothing runs"
        if self.policy in {"nova", "multi_stream"}:
            assert self.decoding is not None or not self.ready, "decoding waits for nothing but its batch"
            can_start = (
                self.started & self.live.keys() - self.ready or len(self.started & self.live.keys()) < self.slots
            )
            if self.live.keys() - self.ready and can_start:
                assert front, "a request could be encoded or prefilled"
        if self.policy != "nova":
            assert self.scheduler.split is None
        if self.policy == "pf_limit":
            assert not (front and self.decoding)
        if self.policy == "chunked":
            assert not (self.encoding and self.decoding)
        if self.policy == "nova" and self.encoding and self.ready:
            assert self.encode_split == self.scheduler.split is not None, "two that share know of it"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
