"""Algorithm 1 and its baselines, as sequences of events."""

from __future__ import annotations

import pytest

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
from thunderagent_nova.policy import PAPER, Static
from thunderagent_nova.scheduler import Scheduler, SchedulingError

PROMPT = 1000


def nova(slots: int = 16) -> Scheduler:
    return Scheduler("nova", slots=slots, split_policy=PAPER)


def arrived(scheduler: Scheduler, *names: str, images: int = 1, prompt_tokens: int = PROMPT) -> list[Decision]:
    return [decision for name in names for decision in scheduler.handle(Arrived(0.0, name, images, prompt_tokens))]


def decoding(scheduler: Scheduler, name: str = "a") -> None:
    """Bring a first request to its decoding."""
    arrived(scheduler, name)
    scheduler.handle(EncodeDone(0.0, name))
    assert scheduler.handle(PrefillDone(0.0, name, PROMPT)) == [StartDecode((name,), None)]


# --- Algorithm 1 ------------------------------------------------------------------------------------------------


def test_a_request_goes_through_all_stages_on_the_whole_device() -> None:
    """Nothing runs beside it, so nothing is split."""
    scheduler = nova()
    assert arrived(scheduler, "a") == [StartEncode("a", None)]
    assert scheduler.handle(EncodeDone(0.0, "a")) == [StartPrefill("a", 0, PROMPT, None)]
    assert scheduler.handle(PrefillDone(0.0, "a", PROMPT)) == [StartDecode(("a",), None)]
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartDecode(("a",), None)]
    assert scheduler.handle(DecodeDone(0.0, ("a",), ("a",))) == [Free("a")]


def test_an_answer_of_one_token_is_never_decoded() -> None:
    """The prefill gives the first token."""
    scheduler = nova()
    arrived(scheduler, "a", images=0)
    assert scheduler.handle(PrefillDone(0.0, "a", PROMPT, finished=True)) == [Free("a")]


def test_text_alone_begins_with_its_prefill() -> None:
    """A request whose images are all cached does so, too."""
    assert arrived(nova(), "a", images=0) == [StartPrefill("a", 0, PROMPT, None)]


def test_encoding_runs_beside_decoding_on_a_split() -> None:
    """The batch in flight continues; decoding takes its share from the next one on."""
    scheduler = nova()
    decoding(scheduler)
    assert arrived(scheduler, "b") == [StartEncode("b", 24)]
    assert scheduler.split == 24
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartDecode(("a",), 24)]


def test_prefill_keeps_its_split_and_decoding_uses_the_same() -> None:
    """Two concurrent stages must agree on it, whatever arrives meanwhile."""
    scheduler = nova()
    decoding(scheduler)
    arrived(scheduler, "b")
    assert scheduler.handle(EncodeDone(0.0, "b")) == [StartPrefill("b", 0, PROMPT, 30)]
    assert arrived(scheduler, "c", "d") == []
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartDecode(("a",), 30)]


def test_encoding_and_prefill_never_run_beside_each_other() -> None:
    """Both compute; the shorter one goes first."""
    scheduler = nova()
    assert arrived(scheduler, "a", "b") == [StartEncode("a", None)]
    assert arrived(scheduler, "text", images=0) == []
    assert scheduler.handle(EncodeDone(0.0, "a")) == [StartPrefill("text", 0, PROMPT, None)]
    after_text = scheduler.handle(PrefillDone(0.0, "text", PROMPT))
    assert after_text == [StartPrefill("a", 0, PROMPT, 24), StartDecode(("text",), 24)]
    after_a = scheduler.handle(PrefillDone(0.0, "a", PROMPT))
    assert after_a == [StartEncode("b", 24)]


def test_ready_request_joins_the_next_batch() -> None:
    """Decoding waits for nothing but the batch in flight."""
    scheduler = nova()
    decoding(scheduler)
    arrived(scheduler, "b", images=0)
    assert scheduler.handle(PrefillDone(0.0, "b", PROMPT)) == []
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartDecode(("a", "b"), None)]


def test_the_encoder_follows_the_load() -> None:
    """Each further request takes four units from decoding, down to twelve, between two groups of layers."""
    scheduler = nova()
    decoding(scheduler)
    arrived(scheduler, "b")
    assert arrived(scheduler, "c", "d", "e", "f") == [Resplit(20), Resplit(16), Resplit(12)]
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartDecode(("a",), 12)]
    assert scheduler.handle(Cancelled(0.0, "f")) == [Free("f")]
    assert scheduler.handle(Cancelled(0.0, "e")) == [Free("e"), Resplit(16)]


def test_the_encoder_gets_all_when_decoding_ends() -> None:
    """No request comes to decoding before the encoder is done."""
    scheduler = nova()
    decoding(scheduler)
    arrived(scheduler, "b")
    assert scheduler.handle(DecodeDone(0.0, ("a",), ("a",))) == [Free("a"), Resplit(None)]
    assert scheduler.split is None


def test_a_static_split_stays() -> None:
    """It is the same policy without Eq. 5."""
    scheduler = Scheduler("nova", slots=9, split_policy=Static(18, 20))
    decoding(scheduler)
    assert arrived(scheduler, "b", "c", "d", "e") == [StartEncode("b", 18)]


def test_a_request_waits_for_a_slot_and_holds_up_none_that_has_one() -> None:
    """Text that came first waits for a slot; what is being encoded continues."""
    scheduler = nova(slots=1)
    assert arrived(scheduler, "a") == [StartEncode("a", None)]
    arrived(scheduler, "text", images=0)
    assert scheduler.handle(EncodeDone(0.0, "a")) == [StartPrefill("a", 0, PROMPT, None)]
    assert scheduler.handle(PrefillDone(0.0, "a", PROMPT, finished=True)) == [
        Free("a"),
        StartPrefill("text", 0, PROMPT, None),
    ]


# --- Cancellation and failure -----------------------------------------------------------------------------------


def test_request_that_leaves_in_a_pass_is_freed_with_its_answer() -> None:
    """The worker still writes to its slot until then."""
    scheduler = nova()
    arrived(scheduler, "a", "b")
    assert scheduler.handle(Cancelled(0.0, "a")) == []
    assert scheduler.handle(EncodeDone(0.0, "a")) == [Free("a"), StartEncode("b", None)]
    scheduler.handle(EncodeDone(0.0, "b"))
    assert scheduler.handle(Cancelled(0.0, "b")) == []
    assert scheduler.handle(PrefillDone(0.0, "b", PROMPT)) == [Free("b")]


def test_request_that_leaves_while_decoding_is_freed_after_the_batch() -> None:
    """The others of the batch continue."""
    scheduler = nova()
    decoding(scheduler)
    arrived(scheduler, "b", images=0)
    scheduler.handle(PrefillDone(0.0, "b", PROMPT))
    assert scheduler.handle(Cancelled(0.0, "b")) == [Free("b")]  # ready, but in no batch yet
    assert scheduler.handle(Cancelled(0.0, "a")) == []
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [Free("a")]


def test_unknown_or_finished_request_cannot_be_cancelled() -> None:
    """A client may leave at the very end."""
    assert nova().handle(Cancelled(0.0, "nobody")) == []


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_pass_that_failed_ends_its_requests_and_frees_its_stage(stage: str) -> None:
    """The next one begins."""
    scheduler = nova()
    if stage == "decode":
        decoding(scheduler)
    else:
        arrived(scheduler, "a", images=stage == "encode")
    arrived(scheduler, "b", images=0)
    decisions = scheduler.handle(Failed(0.0, stage, ("a",)))
    assert decisions[0] == Free("a")
    if stage != "decode":
        assert decisions[1] == StartPrefill("b", 0, PROMPT, None)


def test_impossible_request_is_refused() -> None:
    """A stage without such a request does not answer for it."""
    scheduler = nova()
    arrived(scheduler, "a")
    for event in (
        Arrived(0.0, "a", 1, 1),
        EncodeDone(0.0, "b"),
        PrefillDone(0.0, "a", 1),
        DecodeDone(0.0, ()),
        Failed(0.0, "prefill", ("a",)),
    ):
        with pytest.raises(SchedulingError):
            scheduler.handle(event)


def test_settings_that_mean_nothing_are_refused() -> None:
    """Cases are a policy of an unknown name, and no slots."""
    for name, slots in (("other", 1), ("nova", 0)):
        with pytest.raises(ValueError, match=r"polic|slots"):
            Scheduler(name, slots=slots)


# --- Baselines --------------------------------------------------------------------------------------------------


def test_streams_without_a_split_run_the_same_passes() -> None:
    """All of them run on the whole device."""
    scheduler = Scheduler("multi_stream", slots=9, split_policy=PAPER)
    decoding(scheduler)
    assert arrived(scheduler, "b", "c") == [StartEncode("b", None)]
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartDecode(("a",), None)]


def test_decode_limited_runs_one_pass_at_a_time() -> None:
    """Decoding waits until nothing else waits, or until a limit of waiting requests."""
    scheduler = Scheduler("pf_limit", slots=9, decode_limit=2)
    arrived(scheduler, "a", "b", "c")
    assert scheduler.handle(EncodeDone(0.0, "a")) == [StartPrefill("a", 0, PROMPT, None)]
    assert scheduler.handle(PrefillDone(0.0, "a", PROMPT)) == [StartEncode("b", None)]
    scheduler.handle(EncodeDone(0.0, "b"))
    assert scheduler.handle(PrefillDone(0.0, "b", PROMPT)) == [StartDecode(("a", "b"), None)]
    assert scheduler.handle(DecodeDone(0.0, ("a", "b"), ("a",))) == [Free("a"), StartEncode("c", None)]


def test_chunks_of_a_prefill_take_the_rest_of_the_budget() -> None:
    """They get 128 tokens less one for each that is decoded; the next step begins when both are done."""
    scheduler = Scheduler("chunked", slots=9)
    arrived(scheduler, "a", images=0, prompt_tokens=128)
    scheduler.handle(PrefillDone(0.0, "a", 128))
    arrived(scheduler, "b", images=0, prompt_tokens=200)
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartPrefill("b", 0, 127, None), StartDecode(("a",), None)]
    assert scheduler.handle(PrefillDone(0.0, "b", 127)) == []
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartPrefill("b", 127, 200, None), StartDecode(("a",), None)]


def test_a_budget_that_decoding_uses_up_lets_prefill_creep() -> None:
    """It gets one token at a time, instead of none."""
    scheduler = Scheduler("chunked", slots=9, budget_tokens=1)
    arrived(scheduler, "a", images=0, prompt_tokens=1)
    scheduler.handle(PrefillDone(0.0, "a", 1))
    arrived(scheduler, "b", images=0, prompt_tokens=2)
    assert scheduler.handle(DecodeDone(0.0, ("a",)))[0] == StartPrefill("b", 0, 1, None)


def test_chunked_encodes_run_beside_nothing() -> None:
    """Chunked prefill beside encoding would delay decoding, as the paper says."""
    scheduler = Scheduler("chunked", slots=9)
    decoding_tokens = 100
    arrived(scheduler, "a", images=0, prompt_tokens=decoding_tokens)
    scheduler.handle(PrefillDone(0.0, "a", decoding_tokens))
    arrived(scheduler, "b")
    assert scheduler.handle(DecodeDone(0.0, ("a",))) == [StartEncode("b", None)]
    assert scheduler.handle(EncodeDone(0.0, "b")) == [StartPrefill("b", 0, 127, None), StartDecode(("a",), None)]
