"""Tokens are read from answers as vLLM 0.32 and SGLang 0.5.23 wrote them, and what only we asked for is taken out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from thunderagent.proxy.reading.capture import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    RESPONSES,
    TOKENS,
    Asked,
    Capture,
    ask,
)
from thunderagent.rollouts.tokens import packed_text, token_ids

ANSWERS: dict[str, str] = json.loads(Path(__file__).with_name("engine_answers.json").read_text())
"""Answers of engines with a small random model, as asked, and (+) as asked by us; the same turn each time."""

OURS = Asked(b"", ids_added=True, logprobs_added=True)
CHAT_IDS = ([2001, 1, 2, 3, 4, 2002], [1640, 1640, 32, 32])
TEXT_IDS = ([1, 2, 3, 4], [1871, 857, 660, 1718])
TOKEN_IDS = ([50, 51, 52, 53], [39, 39, 39, 435])
OF_A_MOMENT = re.compile(
    r'"(created|\w+_(?:ts|time|latency|wait|throughput))":[\d.e+-]+|"id":"\w+"|"cached_tokens":\d+'
)

WHOLE = {
    "vllm chat": (CHAT, "vllm chat+", CHAT_IDS),
    "vllm comp": (COMPLETIONS, "vllm comp+", TEXT_IDS),
    "vllm tok": (TOKENS, "vllm tok+", TOKEN_IDS),
    "sglang chat": (CHAT, "sglang chat h+", CHAT_IDS),
    "sglang comp": (COMPLETIONS, "sglang comp+", TEXT_IDS),
    "sglang gen": (GENERATE, "sglang gen+", TEXT_IDS),
}
STREAMS = {
    "vllm chat s": (CHAT, "vllm chat s+", CHAT_IDS),
    "vllm comp s": (COMPLETIONS, "vllm comp s+", TEXT_IDS),
    "sglang comp s": (COMPLETIONS, "sglang comp s+", TEXT_IDS),
}


def plain(text: str | bytes) -> str:
    """Return an answer without what differs from one moment to the next."""
    return OF_A_MOMENT.sub('"-":0', text if isinstance(text, str) else text.decode())


def ids(text: bytes | None) -> list[int]:
    """Return the tokens of a text."""
    assert text is not None
    return token_ids(packed_text(text))


def fed(capture: Capture, stream: str, size: int) -> bytes:
    """Feed a stream in pieces of a size, and return what the client gets."""
    data = stream.encode()
    got = b"".join(capture.feed(data[at : at + size]) for at in range(0, len(data), size))
    return got + capture.rest()


@pytest.mark.parametrize("name", WHOLE)
def test_whole_answer_is_read_and_given_back_as_without_us(name: str) -> None:
    """Ids and log probabilities are the engine's; the client's bytes are those of an engine that nobody asked."""
    path, asked, (prompt, output) = WHOLE[name]
    capture = Capture(name.split(maxsplit=1)[0], path, OURS, streams=False)
    got = capture.take_whole(ANSWERS[asked].encode())
    assert plain(got) == plain(ANSWERS[name])
    read = capture.captured
    assert (ids(read.prompt), ids(read.outputs[0].text)) == (prompt, output)
    assert len(read.outputs[0].logprobs) == len(output)
    assert all(-10 < each < 0 for each in read.outputs[0].logprobs)
    assert read.outputs[0].finish == "length"
    assert read.was_undone
    assert not read.is_unreadable


@pytest.mark.parametrize("name", ["vllm chat+", "vllm comp+"])
def test_answer_that_is_spelt_otherwise_is_read_the_same(name: str) -> None:
    """With spaces it is decoded, without them its members are found by their spelling."""
    path = CHAT if "chat" in name else COMPLETIONS
    usual, other = (Capture("vllm", path, OURS, streams=False) for _ in range(2))
    got = usual.take_whole(ANSWERS[name].encode())
    spaced = json.dumps(json.loads(ANSWERS[name]), indent=1).encode()
    assert json.loads(other.take_whole(spaced)) == json.loads(got)
    for one, its in ((usual.captured, other.captured),):
        assert (one.prompt, one.outputs[0].text, one.outputs[0].logprobs, one.outputs[0].finish) == (
            its.prompt,
            its.outputs[0].text,
            its.outputs[0].logprobs,
            its.outputs[0].finish,
        )


@pytest.mark.parametrize("cut", ['"token_ids":[', '"finish_reason":"', '"logprobs":{', '"prompt_token_ids":['])
def test_answer_with_a_member_too_many_or_too_few_is_decoded(cut: str) -> None:
    """Then nothing is found by spelling alone."""
    text = ANSWERS["vllm chat+"]
    twice = text[:-1] + f',"x":{{{cut}' + {"[": "]", '"': '"', "{": "}"}[cut[-1]] + "}}"
    assert json.loads(twice)["x"] is not None
    capture = Capture("vllm", CHAT, OURS, streams=False)
    got = capture.take_whole(twice.encode())
    assert json.loads(got)["x"] == json.loads(twice)["x"]
    assert (ids(capture.captured.prompt), ids(capture.captured.outputs[0].text)) == CHAT_IDS
    gone = Capture("vllm", CHAT, OURS, streams=False)
    gone.take_whole(text.replace(cut, cut.replace('"', '"_', 1)).encode())
    assert (gone.captured.prompt is None) == (cut == '"prompt_token_ids":[')


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("name", STREAMS)
def test_stream_is_read_and_given_back_as_without_us(name: str, size: int) -> None:
    """However its bytes are cut."""
    path, asked, (prompt, output) = STREAMS[name]
    capture = Capture(name.split(maxsplit=1)[0], path, OURS, streams=True)
    assert plain(fed(capture, ANSWERS[asked], size)) == plain(ANSWERS[name])
    assert (ids(capture.captured.prompt), ids(capture.captured.outputs[0].text)) == (prompt, output)
    assert len(capture.captured.outputs[0].logprobs) == len(output)
    assert capture.captured.outputs[0].finish == "length"


def test_sglang_chat_stream_loses_its_event_of_ids() -> None:
    """The event that only we asked for is gone; all others have no log probabilities any more."""
    capture = Capture("sglang", CHAT, OURS, streams=True)
    got = fed(capture, ANSWERS["sglang chat s h+"], 50).decode()
    assert "sglext" not in got
    assert '"logprobs":{' not in got
    assert got.endswith("data: [DONE]\n\n")
    assert (ids(capture.captured.prompt), ids(capture.captured.outputs[0].text)) == CHAT_IDS
    assert len(capture.captured.outputs[0].logprobs) == 4


def test_generate_stream_has_nothing_of_ours_left() -> None:
    """Each event of SGLang's own API has all tokens so far; the last one counts."""
    capture = Capture("sglang", GENERATE, OURS, streams=True)
    got = fed(capture, ANSWERS["sglang gen s+"], 64).decode()
    assert "logprobs" not in got
    assert "prompt_token_ids" not in got
    for event in got.split("\n\n")[:-2]:
        json.loads(event.removeprefix("data: "))
    assert (ids(capture.captured.prompt), ids(capture.captured.outputs[0].text)) == TEXT_IDS
    assert capture.captured.outputs[0].spans == [("default", 0, 4)]


def test_token_api_keeps_its_own_ids() -> None:
    """The ids of the output are the client's in any case."""
    capture = Capture("vllm", TOKENS, OURS, streams=True)
    got = fed(capture, ANSWERS["vllm tok s+"], 64).decode()
    assert got.count('"token_ids":[') == 4
    assert "prompt_token_ids" not in got
    assert '"logprobs":{' not in got
    assert ids(capture.captured.outputs[0].text) == TOKEN_IDS[1]
    assert capture.captured.outputs[0].spans == [("default", 0, 4)]


@pytest.mark.parametrize("name", ["vllm resp+", "vllm resp s+"])
def test_responses_have_ids(name: str) -> None:
    """vLLM's responses tell them as messages."""
    streams = " s" in name
    capture = Capture("vllm", RESPONSES, OURS, streams=streams)
    text = ANSWERS[name]
    got = fed(capture, text, 99).decode() if streams else capture.take_whole(text.encode()).decode()
    assert '"tokens"' not in got
    assert got.count('"input_messages":null') == text.count('"input_messages"')
    assert (ids(capture.captured.prompt), ids(capture.captured.outputs[0].text)) == CHAT_IDS
    assert capture.captured.outputs[0].finish == "max_output_tokens"


def test_several_choices_are_several_outputs() -> None:
    """With `n` each choice has its own."""
    whole = Capture("vllm", CHAT, OURS, streams=False)
    assert plain(whole.take_whole(ANSWERS["vllm chat n2+"].encode())) == plain(ANSWERS["vllm chat n2"])
    assert ids(whole.captured.outputs[1].text) == [516, 1030, 1470, 1947]
    stream = Capture("vllm", CHAT, OURS, streams=True)
    fed(stream, ANSWERS["vllm chat s n2+"], 1000)
    assert {index: read.text for index, read in stream.captured.outputs.items()} == {
        index: read.text for index, read in whole.captured.outputs.items()
    }


def test_fields_that_the_client_asked_for_stay() -> None:
    """A field of its own is read, and passed on."""
    asked = Asked(b"", ids_added=False, logprobs_added=True)
    got = Capture("vllm", CHAT, asked, streams=False).take_whole(ANSWERS["vllm chat+"].encode())
    assert b'"token_ids":[1640,1640,32,32]' in got
    assert b'"logprobs":null' in got


def test_chunk_that_exists_only_for_ids_is_left_out() -> None:
    """vLLM sends it where a parser keeps back the text of a token."""
    chunk = (
        b'data: {"id":"x","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[7]}]}\n\n'
    )
    capture = Capture("vllm", CHAT, Asked(b"", ids_added=True), streams=True)
    assert capture.feed(chunk) == b""
    capture.rest()
    assert ids(capture.captured.outputs[0].text) == [7]
    last = chunk.replace(b'"finish_reason":null', b'"finish_reason":"stop"')
    assert capture.feed(last) == last.replace(b"[7]", b"null")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices":3}', b'{"choices":[{"logprobs":{"content":3}}]}', b"\xff"])
def test_unreadable_answer_passes_unchanged(body: bytes) -> None:
    """Nothing is guessed, and nothing is lost."""
    capture = Capture("vllm", CHAT, OURS, streams=False)
    assert capture.take_whole(body) == body
    assert capture.captured.is_unreadable
    assert capture.captured.prompt is None


def test_text_that_looks_like_a_member_is_left_alone() -> None:
    """A quote within a text is escaped, so it is never taken for a key."""
    text = json.dumps({"choices": [{"message": '"token_ids":[1]', "token_ids": [1]}]}, separators=(",", ":"))
    got = Capture("vllm", CHAT, OURS, streams=False).take_whole(text.encode())
    assert json.loads(got) == {"choices": [{"message": '"token_ids":[1]', "token_ids": None}]}


# --- what is asked


def test_body_asks_for_ids_and_log_probabilities() -> None:
    """The rest of the body stays byte for byte."""
    asked = ask("vllm", CHAT, b'{"messages":[], "n":1}', logprobs=True)
    assert asked is not None
    assert json.loads(asked.body) == {"messages": [], "n": 1, "return_token_ids": True, "logprobs": True}
    assert asked.body.endswith(b'"messages":[], "n":1}')
    assert (asked.ids_added, asked.logprobs_added) == (True, True)
    only_ids = ask("vllm", CHAT, b'{"messages":[]}', logprobs=False)
    assert only_ids is not None
    assert b"logprobs" not in only_ids.body


@pytest.mark.parametrize(
    ("field", "is_ours"),
    [('"logprobs":true', False), ('"logprobs":false', True), ('"logprobs": null', True), ('"logprobs":2', False)],
)
def test_clients_own_field_counts(field: str, is_ours: bool) -> None:
    """One that asks for nothing is replaced, any other is kept."""
    asked = ask("vllm", CHAT, b'{"messages":[],%s}' % field.encode(), logprobs=True)
    assert asked is not None
    assert asked.logprobs_added is is_ours
    assert json.loads(asked.body)["logprobs"]
    assert asked.body.count(b'"logprobs"') == 1


def test_token_api_asks_within_its_sampling_parameters() -> None:
    """Also if there are none in it."""
    for inside, wanted in ((b'{"max_tokens":4}', {"logprobs": 0, "max_tokens": 4}), (b"{}", {"logprobs": 0})):
        asked = ask("vllm", TOKENS, b'{"token_ids":[1],"sampling_params":%s}' % inside, logprobs=True)
        assert asked is not None
        assert json.loads(asked.body)["sampling_params"] == wanted
        assert asked.logprobs_added


def test_body_that_cannot_carry_the_question_is_left_alone() -> None:
    """Messages of either engine, an unknown engine, and an echo, whose answer would change."""
    assert ask("vllm", "/v1/messages", b"{}", logprobs=True) is None
    assert ask("sglang", RESPONSES, b"{}", logprobs=True) is None
    assert ask("nova", CHAT, b"{}", logprobs=True) is None
    assert ask("vllm", COMPLETIONS, b'{"prompt":"a","echo":true}', logprobs=True) is None
    assert ask("vllm", COMPLETIONS, b'{"prompt":"a","echo":false}', logprobs=True) is not None


def test_sglang_chat_is_asked_by_headers() -> None:
    """In its streams a field would be an error."""
    asked = ask("sglang", CHAT, b'{"messages":[]}', logprobs=False)
    assert asked is not None
    assert asked.body == b'{"messages":[]}'
    assert asked.headers
    assert asked.ids_added
